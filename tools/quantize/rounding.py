"""Rounds a matrix to codes and scales by group; with statistics of its inputs, searches each group's scale."""

import numpy as np

from models.grouped_weight import GroupedWeight, choose_scales, round_to_scales

# Of the scale that reaches the group's extreme. A smaller one clips this weight and rounds the others more finely. A
# negative one gives -2**(bits - 1), the code without a counterpart, to the other end.
_FACTORS = tuple(sign * factor for factor in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7) for sign in (1.0, -1.0))


def round_matrix(
  weight: np.ndarray, bits: int, group: int, dtype: np.dtype, moments: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns codes uint8[N, K] and scales [N, K / group] of `dtype`.

  Args:
    weight: f32[N, K], outputs first, finite.
    group: divides K.
    moments: f32[K / group, group, group], of each group the sum of x[i] * x[j] over inputs x; each scale then gives the
      group the least error of its product with them. None: the scale reaches the group's extreme.
  """
  outputs, inputs = weight.shape
  grouped = np.ascontiguousarray(weight.T).reshape(inputs // group, group, outputs)
  extremes = choose_scales(grouped, bits)
  scales = extremes.astype(dtype)
  codes = round_to_scales(grouped, scales, bits)
  if moments is not None:
    least = _errors(grouped, codes, scales, bits, moments)
    for factor in _FACTORS[1:]:
      others = (extremes * np.float32(factor)).astype(dtype)
      other_codes = round_to_scales(grouped, others, bits)
      errors = _errors(grouped, other_codes, others, bits, moments)
      better = errors < least
      scales, codes = np.where(better, others, scales), np.where(better[:, None], other_codes, codes)
      least = np.minimum(errors, least)
  return np.ascontiguousarray(codes.reshape(inputs, outputs).T), np.ascontiguousarray(scales.T)


def dequantize_matrix(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
  """Returns f32[N, K] of the result of `round_matrix`."""
  return np.ascontiguousarray(GroupedWeight(codes.T, scales.T, bits).dequantize().T)


def _errors(grouped: np.ndarray, codes: np.ndarray, scales: np.ndarray, bits: int, moments: np.ndarray) -> np.ndarray:
  """Returns the squared error of each group's products, f32[G, N]."""
  error = (codes.astype(np.float32) - (1 << (bits - 1))) * scales.astype(np.float32)[:, None] - grouped
  return np.sum(error * np.matmul(moments, error), axis=1)
