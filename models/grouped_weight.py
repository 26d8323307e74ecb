"""Matrices of 4 or 8 bits with a scale for each group of inputs. May not know files, layers or layouts of kernels."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from models.families.tensor_map import Piece

BITS = (4, 8)


@dataclasses.dataclass(frozen=True)
class GroupedWeight:
  """A weight of `num_inputs` input dimensions and then outputs; its inputs in row-major order make groups.

  The weight of input d (flat) and output n is `scales[g, n] * (codes[d, n] - zero) + offsets[g, n]`, g = d // group.
  One form holds all formats: one scale an output (a single group), symmetric groups, zero points (whose offset is scale
  * (zero - zero point)), and GGUF's scales with minima.

  Attributes:
    codes: uint8[*inputs, *outputs], each below 2**bits.
    scales: float16 or float32 [groups, *outputs], finite.
    bits: 4 or 8.
    num_inputs: input dimensions of `codes`, at least 1.
    offsets: float16 or float32, like `scales`; None: 0.
  """

  codes: np.ndarray
  scales: np.ndarray
  bits: int
  num_inputs: int = 1
  offsets: np.ndarray | None = None

  def __post_init__(self):
    assert self.bits in BITS and self.codes.dtype == np.uint8, (self.bits, self.codes.dtype)
    assert self.scales.shape[1:] == self.outputs and self.inputs % self.scales.shape[0] == 0, self.shapes
    assert self.offsets is None or self.offsets.shape == self.scales.shape, self.shapes

  @property
  def shapes(self) -> str:
    return f"codes {self.codes.shape}, scales {self.scales.shape}, {self.num_inputs} input dimensions"

  @property
  def inputs(self) -> int:
    """The number of inputs, flat."""
    return math.prod(self.codes.shape[: self.num_inputs])

  @property
  def outputs(self) -> tuple[int, ...]:
    return self.codes.shape[self.num_inputs :]

  @property
  def group(self) -> int:
    """Adjacent inputs that share a scale."""
    return self.inputs // self.scales.shape[0]

  @property
  def zero(self) -> int:
    """The code of weight 0 where there is no offset: 8 or 128."""
    return 1 << (self.bits - 1)

  def dequantize(self) -> np.ndarray:
    """Returns f32[*inputs, *outputs], the weight that all products with this one are compared with."""
    flat = (self.scales.shape[0], self.group, *self.outputs)
    weight = (self.codes.reshape(flat).astype(np.float32) - self.zero) * self.scales[:, None].astype(np.float32)
    if self.offsets is not None:
      weight += self.offsets[:, None].astype(np.float32)
    return weight.reshape(self.codes.shape)

  def cut(self, part: tuple[slice, ...]) -> "GroupedWeight":
    """Returns a part of the weight, which has whole groups or, with one group, any inputs.

    Args: part: by dimension of the codes.
    """
    inputs, outputs = part[: self.num_inputs], part[self.num_inputs :]
    flat = np.arange(self.inputs).reshape(self.codes.shape[: self.num_inputs])[inputs].reshape(-1)
    groups = np.zeros(1, int) if self.scales.shape[0] == 1 else flat[:: self.group] // self.group
    assert self.scales.shape[0] == 1 or np.array_equal(flat // self.group, np.repeat(groups, self.group)), part
    scales = self.scales[groups][(slice(None), *outputs)]
    offsets = None if self.offsets is None else self.offsets[groups][(slice(None), *outputs)]
    return dataclasses.replace(self, codes=self.codes[part], scales=scales, offsets=offsets)

  def regroup(self, group: int) -> "GroupedWeight":
    """Returns the same weight in smaller groups, which repeat scales. Args: group: a divisor of the present one."""
    assert self.group % group == 0, (self.group, group)
    times = self.group // group
    offsets = None if self.offsets is None else np.repeat(self.offsets, times, axis=0)
    return dataclasses.replace(self, scales=np.repeat(self.scales, times, axis=0), offsets=offsets)

  def widen(self) -> "GroupedWeight":
    """Returns the same weight as codes of 8 bits, with the same scales."""
    moved = self.codes + np.uint8(128 - self.zero)
    return dataclasses.replace(self, codes=moved, bits=8)


def quantize_by_group(weight: np.ndarray, num_inputs: int, bits: int, group: int) -> GroupedWeight:
  """Rounds a weight to the nearest codes, symmetrically, by group.

  The value of greatest magnitude in a group becomes -2**(bits - 1), the code with no counterpart, as in GGUF's Q4_0: a
  step is then 1/8 of it instead of 1/7. Codes that would pass 2**bits - 1 become that.

  Args:
    weight: finite, of a float dtype; its first `num_inputs` dimensions are inputs.
    group: inputs, flat, that share a scale; divides their number.
  """
  exact = np.asarray(weight, np.float32)
  outputs = exact.shape[num_inputs:]
  inputs = math.prod(exact.shape[:num_inputs])
  assert inputs % group == 0, (inputs, group)
  grouped = exact.reshape(inputs // group, group, *outputs)
  scales = choose_scales(grouped, bits).astype(np.float16 if bits == 4 else np.float32)
  return GroupedWeight(round_to_scales(grouped, scales, bits).reshape(exact.shape), scales, bits, num_inputs)


def choose_scales(grouped: np.ndarray, bits: int) -> np.ndarray:
  """Returns the scales of `quantize_by_group`, f32[G, *outputs], for weights f32[G, group, *outputs]; some negative."""
  low, high = grouped.min(axis=1), grouped.max(axis=1)
  return np.where(-low >= high, low, high) / np.float32(-(1 << (bits - 1)))


def round_to_scales(grouped: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
  """Returns the nearest codes uint8[G, group, *outputs] of weights f32, for scales [G, *outputs] of a float dtype."""
  zero, used = 1 << (bits - 1), scales.astype(np.float32)[:, None]
  steps = np.divide(grouped, used, out=np.zeros_like(grouped), where=used != 0)
  return np.clip(np.rint(steps) + zero, 0, 2 * zero - 1).astype(np.uint8)


def assemble_grouped(pieces: Sequence[tuple[Piece, GroupedWeight]], num_inputs: int) -> GroupedWeight:
  """Returns a parameter of the tensors of a checkpoint, each as [outputs, inputs] in `Piece.shape`.

  Pieces of other bits, groups or scale dtypes take the form that all have in common: the most bits, the smallest group,
  the widest dtype.

  Args:
    pieces: the pieces of one parameter and their weights with codes [inputs, outputs] (the transposed tensor).
    num_inputs: input dimensions of the parameter, which come first in it.
  """
  bits = max(weight.bits for _, weight in pieces)
  group = math.gcd(*(weight.group for _, weight in pieces))
  parts = [(piece, (weight.widen() if weight.bits < bits else weight).regroup(group)) for piece, weight in pieces]
  has_offsets = any(weight.offsets is not None for _, weight in parts)
  # In the tensors' order of memory, because a transposed copy of bytes takes ten times as long.
  stored = pieces[0][0].order if pieces[0][1].codes.T.flags.c_contiguous else None
  codes = place_pieces(
    [(piece, weight.codes.T.reshape(piece.split).transpose(piece.order)) for piece, weight in parts], 0, stored
  )
  scales = place_scales([(piece, weight.scales) for piece, weight in parts], num_inputs)
  offsets = None
  if has_offsets:
    found = [
      (piece, np.zeros_like(weight.scales) if weight.offsets is None else weight.offsets) for piece, weight in parts
    ]
    offsets = place_scales(found, num_inputs)
  return GroupedWeight(codes, scales, bits, num_inputs, offsets)


def place_scales(parts: Sequence[tuple[Piece, np.ndarray]], num_inputs: int) -> np.ndarray:
  """Returns the scales [groups, *outputs] of a parameter, or its offsets.

  Args:
    parts: the pieces of the parameter and their scales [groups, outputs], as many groups each.
    num_inputs: input dimensions of the parameter, which come first in it.
  """
  moved = []
  for piece, value in parts:
    order = piece.order[num_inputs:]  # split's axes of the outputs, in the parameter's order
    split = [piece.split[axis] for axis in sorted(order)]
    ranks = [sorted(order).index(axis) for axis in order]
    moved.append((piece, np.moveaxis(value.T.reshape(*split, -1), -1, 0).transpose(0, *(1 + r for r in ranks))))
  return place_pieces(moved, num_inputs - 1)


def place_pieces(
  parts: list[tuple[Piece, np.ndarray]], fewer: int = 0, stored: tuple[int, ...] | None = None
) -> np.ndarray:
  """Returns a parameter with each value at its piece's place.

  Args:
    parts: the pieces and their values, in the parameter's axis order.
    fewer: leading axes of the parameter that the values lack.
    stored: the order of `Piece.split`'s axes in memory, for a transposed result; None: C order.
  """
  if not parts[0][0].place:
    ((_, value),) = parts
    return value
  places = [{axis - fewer: offset for axis, offset in piece.place} for piece, _ in parts]
  shape = list(parts[0][1].shape)
  for (_, value), place in zip(parts, places, strict=True):
    for axis, offset in place.items():
      shape[axis] = max(shape[axis], offset + value.shape[axis])
  order = stored or tuple(range(len(shape)))
  dtype = np.result_type(*(value.dtype for _, value in parts))
  out = np.empty([shape[order.index(axis)] for axis in range(len(shape))], dtype).transpose(order)
  for (_, value), place in zip(parts, places, strict=True):
    starts = [place.get(axis, 0) for axis in range(value.ndim)]
    out[tuple(slice(start, start + size) for start, size in zip(starts, value.shape, strict=True))] = value
  return out
