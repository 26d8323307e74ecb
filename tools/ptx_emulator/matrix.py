"""Where the elements of matrix instructions lie: fragments in registers, and operands in shared memory.

From the PTX ISA: "Register Fragments and Shared Memory Matrix Layouts" of wgmma, "Matrix Descriptor", ldmatrix, and
"Shared Memory Descriptor" and "Instruction Descriptor" of tcgen05, whose layouts are those of wgmma. The
canonical layouts with strides are those of CUTLASS's cute/arch/mma_sm90_desc.hpp.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tools.ptx_emulator.memory import AccessError
from tools.ptx_emulator.tensor_map import swizzle_offsets

_CHUNK = 16  # bytes of a core matrix's line
_SWIZZLE_MODES = {0: 0, 1: 128, 2: 64, 3: 32}  # bits 62 and 63 of a descriptor of wgmma
_TENSOR_CORE_SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}  # bits 61 to 63 of one of tcgen05


@dataclasses.dataclass(frozen=True)
class MatrixDescriptor:
  """A matrix descriptor of wgmma or tcgen05.

  Attributes:
    start: shared address in bytes.
    leading, stride: byte offsets.
    swizzle: bytes; 0 for none.
  """

  start: int
  leading: int
  stride: int
  swizzle: int

  @classmethod
  def decode(cls, bits: int) -> MatrixDescriptor:
    """Reads the 64 bits. Raises AccessError for a base offset, which is not modelled."""
    if bits >> 49 & 7:
      raise AccessError(f"matrix descriptor {bits:#x}: base offset {bits >> 49 & 7} is not modelled")
    return cls(
      (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, _SWIZZLE_MODES[bits >> 62 & 3]
    )

  @classmethod
  def decode_tensor_core(cls, bits: int) -> MatrixDescriptor:
    """Reads the 64 bits of a descriptor of tcgen05. Raises AccessError for what is reserved or not modelled."""
    swizzle = _TENSOR_CORE_SWIZZLES.get(bits >> 61)
    if bits >> 46 & 7 != 1 or bits >> 49 & 0xFFF or bits & 0x0000_C000_C000 or swizzle is None:
      raise AccessError(f"matrix descriptor {bits:#x}: reserved bits, a base offset or a mode that is not modelled")
    return cls((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzle)

  def locate(self, size: int, depth: int, itemsize: int, transposed: bool) -> np.ndarray:
    """Returns the shared addresses int64[size, depth] of elements.

    Args:
      size: rows of A, or columns of B.
      depth: the sum's length, 32 bytes.
      itemsize: bytes of an element.
      transposed: the rows of A, or columns of B, are contiguous ("MN-major"), not the depth ("K-major").
    """
    chunk = _CHUNK // itemsize  # elements
    width = max(self.swizzle, _CHUNK) // itemsize  # of a line of a swizzle atom
    outer, inner = np.arange(size)[:, None], np.arange(depth)[None, :]
    if transposed:
      if self.swizzle:
        # ((T, width / T, m), (8, k)) : ((1, T, leading), (width, stride))
        at = (outer // width) * self.leading + (inner // 8) * self.stride
        at = at + (outer % width + (inner % 8) * width) * itemsize
      else:
        # ((T, 1, m), (8, k)) : ((1, T, stride), (T, leading))
        at = (outer // chunk) * self.stride + (inner // 8) * self.leading
        at = at + (outer % chunk + (inner % 8) * chunk) * itemsize
    elif self.swizzle:
      # ((8, m), (T, 2k)) : ((width, stride), (1, T))
      at = (outer // 8) * self.stride + ((outer % 8) * width + inner) * itemsize
    else:
      # ((8, m), (T, 2)) : ((T, stride), (1, leading))
      at = (outer // 8) * self.stride + (inner // chunk) * self.leading
      at = at + ((outer % 8) * chunk + inner % chunk) * itemsize
    return swizzle_offsets(self.start + at, self.swizzle)


@dataclasses.dataclass(frozen=True)
class ProductShape:
  """An instruction descriptor of tcgen05.mma of .kind::f16, with sums of f32.

  Attributes:
    rows, columns: of the sums.
    kind: of A and B: "f16" or "bf16".
    transposes_left, transposes_right: A's rows, or B's columns, are contiguous, not the depth.
  """

  rows: int
  columns: int
  kind: str
  transposes_left: bool
  transposes_right: bool

  @classmethod
  def decode(cls, bits: int) -> ProductShape:
    """Reads the 32 bits. Raises AccessError for a shape that does not exist, or a mode that is not modelled."""
    rows, columns = (bits >> 24 & 0x1F) << 4, (bits >> 17 & 0x3F) << 3
    kinds = bits >> 7 & 7, bits >> 10 & 7
    if bits & 0xE080_604F or bits >> 4 & 3 != 1 or kinds not in ((0, 0), (1, 1)):
      raise AccessError(f"instruction descriptor {bits:#x}: a mode that is not modelled")
    if rows not in (64, 128) or not 0 < columns <= 256 or columns % (8 if rows == 64 else 16):
      raise AccessError(f"instruction descriptor {bits:#x}: no product has {rows} rows and {columns} columns")
    return cls(rows, columns, ("f16", "bf16")[kinds[0]], bool(bits >> 15 & 1), bool(bits >> 16 & 1))


def accumulator_places(columns: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows and columns int[columns / 2, 128] of the registers of a wgmma accumulator m64nN of f32, by thread."""
  register, thread = np.arange(columns // 2)[:, None], np.arange(128)[None, :]
  rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
  columns_of = 8 * (register // 4) + thread % 4 * 2 + register % 2
  return np.broadcast_to(rows, columns_of.shape), columns_of


def operand_places() -> tuple[np.ndarray, np.ndarray]:
  """Returns rows and columns int[4, 2, 128] of A's fragment m64k16 of 16-bit elements: register, half, thread."""
  register, half = np.arange(4)[:, None, None], np.arange(2)[None, :, None]
  thread = np.arange(128)[None, None, :]
  rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
  columns = thread % 4 * 2 + half + 8 * (register // 2)
  shape = np.broadcast_shapes(rows.shape, columns.shape)
  return np.broadcast_to(rows, shape), np.broadcast_to(columns, shape)
