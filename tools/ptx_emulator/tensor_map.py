"""Tensor maps of TMA: where a box lies in global memory and, swizzled, in shared memory.

Limits are those of cuTensorMapEncodeTiled (CUDA driver API).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tools.ptx_emulator.memory import AccessError

MAP_BYTES = 128
_MOST_BOX = 256
_SWIZZLES = (0, 32, 64, 128)


def swizzle_offsets(addresses: np.ndarray, swizzle: int) -> np.ndarray:
  """Returns where bytes at absolute shared addresses really lie (PTX ISA, swizzling modes).

  In each 8 lines of 128 bytes, chunks of 16 bytes change places: bits 4 to 6 of the address are XORed with bits 7 to 9.
  A swizzle of 64 bytes changes bits 4 and 5, one of 32 bytes bit 4.

  Args: swizzle: bytes; 0: none.
  """
  mask = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[swizzle]
  return addresses ^ ((addresses >> 3) & mask)


@dataclasses.dataclass(frozen=True)
class TensorMap:
  """A tiled tensor map. Dimensions are in TMA's order: the first is the innermost.

  Attributes:
    address: of the tensor in global memory; a multiple of 16.
    itemsize: bytes of an element.
    sizes: elements by dimension.
    strides: bytes between elements by dimension; the first is `itemsize`, the others are multiples of 16.
    box: elements of a copy by dimension.
    swizzle: bytes, 0 for none.
  """

  address: int
  itemsize: int
  sizes: tuple[int, ...]
  strides: tuple[int, ...]
  box: tuple[int, ...]
  swizzle: int = 0

  def __post_init__(self) -> None:
    problems = [
      (self.address % 16, f"address {self.address:#x} is no multiple of 16"),
      (not 1 <= len(self.sizes) <= 5, f"{len(self.sizes)} dimensions; TMA has 1 to 5"),
      (not len(self.sizes) == len(self.strides) == len(self.box), "sizes, strides and box differ in dimensions"),
      (self.strides[0] != self.itemsize, f"the innermost stride is {self.strides[0]} bytes, not {self.itemsize}"),
      (any(stride % 16 for stride in self.strides[1:]), f"strides {self.strides[1:]} are no multiples of 16"),
      (any(not 1 <= size <= _MOST_BOX for size in self.box), f"box {self.box} exceeds 256 in a dimension"),
      (
        self.box[0] * self.itemsize % 16,
        f"a line of the box has {self.box[0] * self.itemsize} bytes, no multiple of 16",
      ),
      (self.swizzle not in _SWIZZLES, f"swizzle {self.swizzle}"),
      (
        self.swizzle and self.box[0] * self.itemsize > self.swizzle,
        f"a line of the box has {self.box[0] * self.itemsize} bytes, more than its swizzle of {self.swizzle}",
      ),
      (
        self.swizzle and self.box[0] * self.itemsize < self.swizzle,
        f"a line of {self.box[0] * self.itemsize} bytes within a swizzle of {self.swizzle} is not modelled",
      ),
    ]
    for is_wrong, words in problems:
      if is_wrong:
        raise AccessError(f"tensor map: {words}")

  @property
  def box_bytes(self) -> int:
    """Bytes of a box, which a copy reports to its barrier; also of parts outside of the tensor."""
    return math.prod(self.box) * self.itemsize

  def locate_box(self, coordinates: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the global addresses int64[elements] of a box, in the order of shared memory, and which are inside."""
    if len(coordinates) != len(self.sizes):
      raise AccessError(f"{len(coordinates)} coordinates for a tensor map of {len(self.sizes)} dimensions")
    grids = np.meshgrid(*(np.arange(size) for size in reversed(self.box)), indexing="ij")
    addresses = np.full(grids[0].shape, self.address, np.int64)
    inside = np.ones(grids[0].shape, bool)
    for axis, grid in enumerate(reversed(grids)):
      index = grid + coordinates[axis]
      inside &= (index >= 0) & (index < self.sizes[axis])
      addresses += index * self.strides[axis]
    return addresses.reshape(-1), inside.reshape(-1)

  def place_box(self, address: int) -> np.ndarray:
    """Returns the shared addresses int64[elements, itemsize] of a box's bytes. Raises AccessError if not aligned."""
    if address % 128:
      raise AccessError(f"shared address {address:#x} of a TMA copy is no multiple of 128")
    return swizzle_offsets(address + np.arange(self.box_bytes), self.swizzle).reshape(-1, self.itemsize)
