"""Small floats as bits, by the rules of PTX's cvt. Knows no registers."""

from __future__ import annotations

import numpy as np


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
  """Widens uint16 to f32."""
  return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
  """Rounds f32 to the nearest bf16, ties to even: uint16. A NaN becomes 0x7FFF, as cvt.rn makes it."""
  bits = values.view(np.uint32)
  rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
  return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
  """Widens uint16 to f32."""
  return bits.view(np.float16).astype(np.float32)


def f32_to_f16(values: np.ndarray) -> np.ndarray:
  """Rounds f32 to the nearest f16, ties to even: uint16. A NaN becomes 0x7FFF."""
  return np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))


_E4M3_NAN, _E4M3_LARGEST = 0x7F, 0x7E


def _e4m3_magnitudes() -> np.ndarray:
  """Returns f32[127]: the numbers of the bit patterns without a sign. The last pattern is NaN."""
  code = np.arange(_E4M3_NAN)
  exponent, fraction = code >> 3, code & 7
  return np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10)).astype(np.float32)


_MAGNITUDES = _e4m3_magnitudes()
_MIDDLES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2  # exact


def f32_to_e4m3(values: np.ndarray) -> np.ndarray:
  """Rounds f32 to the nearest e4m3, ties to even: uint8. As .satfinite: more than 448, and infinity, become 448."""
  magnitude = np.abs(values)
  below, above = (np.searchsorted(_MIDDLES, magnitude, side) for side in ("left", "right"))  # differ at a tie
  code = np.where(np.isnan(values), _E4M3_NAN, np.where(below % 2 == 0, below, above)).astype(np.uint8)
  return code | (np.signbit(values) & ~np.isnan(values)).astype(np.uint8) << 7


def e4m3_to_f16(bits: np.ndarray) -> np.ndarray:
  """Widens uint8 to f16, which has all of its numbers. A NaN becomes 0x7FFF."""
  code = bits & 0x7F
  numbers = np.where(bits >> 7, -1, 1) * _MAGNITUDES[np.minimum(code, _E4M3_LARGEST)]
  return np.where(code == _E4M3_NAN, np.uint16(0x7FFF), numbers.astype(np.float16).view(np.uint16)).view(np.float16)
