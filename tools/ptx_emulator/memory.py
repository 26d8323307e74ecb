"""Global memory as buffers at addresses, and shared memory of a block. Accesses outside are errors."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
import copy
import dataclasses

import numpy as np

_FIRST_ADDRESS = 0x7000_0000_0000
_ALIGNMENT = 256  # as cudaMalloc
_SHARED = -1  # the owner of bytes that atomic operations have changed
_FIRST_SERIAL = 1 << 24  # of blocks that have synchronized; a grid has fewer
_GAP = 1 << 20  # bytes between buffers, so that an address outside of one is in no other


class AccessError(Exception):
  """An address outside of a buffer, or one that is not aligned."""


@dataclasses.dataclass
class Buffer:
  """An array in global memory.

  Attributes:
    name: for errors.
    address: of its first byte.
    data: uint8[bytes], a view of the array.
    owner: int32[bytes]: the block that has written a byte, from 1; 0: none. See GlobalMemory.synchronize.
    slack: bytes behind the end that loads may touch.
  """

  name: str
  address: int
  data: np.ndarray
  owner: np.ndarray
  slack: int = 0


class GlobalMemory:
  """Buffers of one launch."""

  def __init__(self) -> None:
    self._buffers: list[Buffer] = []
    self._starts: list[int] = []
    self._next = _FIRST_ADDRESS
    self._released: dict[int, set[int]] = {}  # address -> whose writes an addition there makes visible
    self._visible: dict[int, set[int]] = {}  # serial -> others whose writes it may read
    self._names: dict[int, int] = {}  # serial that `synchronize` gave -> the block's own

  def add_buffer(self, name: str, array: np.ndarray, skew: int = 0, pads: bool = False) -> Buffer:
    """Gives an array addresses. Kernels read and write the array itself.

    Args:
      array: C-contiguous.
      skew: bytes of its address behind a multiple of 256.
      pads: loads may go on to the next multiple of 256, as XLA's do for threads that have nothing to compute.
    """
    assert array.flags.c_contiguous, name
    data = array.reshape(-1).view(np.uint8)
    buffer = Buffer(name, self._next + skew % _ALIGNMENT, data, np.zeros(data.size, np.int32))
    if pads:
      buffer.slack = -(buffer.address + data.size) % _ALIGNMENT
    self._buffers.append(buffer)
    self._starts.append(buffer.address)
    self._next += -(-data.size // _ALIGNMENT) * _ALIGNMENT + _GAP
    return buffer

  def find(self, address: int, size: int, over: int = 0) -> tuple[Buffer, int]:
    """Returns the buffer that holds `size` bytes at `address`, and the offset in it. Raises AccessError.

    Args: over: bytes that may lie behind the buffer's end.
    """
    index = bisect.bisect_right(self._starts, address) - 1
    if index >= 0:
      buffer = self._buffers[index]
      offset = address - buffer.address
      if offset + size - over <= buffer.data.size:
        return buffer, offset
      if offset < buffer.data.size + _GAP // 2:
        raise AccessError(f"{size} bytes at offset {offset} of {buffer.name}, which has {buffer.data.size}")
    raise AccessError(f"address {address:#x} is in no buffer")

  def read(self, addresses: np.ndarray, size: int, block: int | np.ndarray) -> np.ndarray:
    """Returns uint8[n, size].

    A vector may reach over the end of a buffer, as LLVM widens loads where alignment makes that harmless; what is
    behind the end is 0xFF.

    Args: addresses: int64[n], multiples of size. block: that reads, from 1, or those of each address, int[n].
    """
    found = np.full((len(addresses), size), 0xFF, np.uint8)
    for buffer, lanes, places in self._take(addresses, size, is_load=True):
      inside = places < buffer.data.size
      places = np.minimum(places, buffer.data.size - 1)
      self.check_owner(buffer, places, block if isinstance(block, int) else block[lanes, None])
      found[lanes] = np.where(inside, buffer.data[places], np.uint8(0xFF))
    return found

  def write(self, addresses: np.ndarray, values: np.ndarray, block: int | np.ndarray) -> None:
    """Writes uint8[n, size] at addresses. Args: block: that writes, from 1, or those of each address, int[n]."""
    for buffer, lanes, places in self._take(addresses, values.shape[1]):
      buffer.data[places] = values[lanes]
      buffer.owner[places] = block if isinstance(block, int) else block[lanes, None]

  def share(self, address: int, size: int) -> np.ndarray:
    """Returns the bytes at an address, uint8[size], for an atomic operation: only such ones may read them now."""
    buffer, offset = self.find(address, size)
    where = slice(offset, offset + size)
    self.check_owner(buffer, where, _SHARED)
    buffer.owner[where] = _SHARED
    return buffer.data[where]

  def check_owner(self, buffer: Buffer, where: slice | np.ndarray, block: int | np.ndarray) -> None:
    """Raises AccessError if a block reads what another one of this launch has written: blocks run in any order."""
    owner = buffer.owner[where]
    others = (owner != 0) & (owner != block)
    if isinstance(block, int) and block in self._visible and others.any():
      others &= ~np.isin(owner, list(self._visible[block]))
    if others.any():
      reader = self._describe_owner(int(np.broadcast_to(block, owner.shape)[others][0]))
      writer = self._describe_owner(int(owner[others][0]))
      raise AccessError(f"{buffer.name}: {reader} reads bytes that {writer} has written")

  def _describe_owner(self, serial: int) -> str:
    return "an atomic operation" if serial == _SHARED else f"block {self._names.get(serial, serial) - 1}"

  def synchronize(self, address: int, block: int) -> int:
    """Releases a block's writes at an address, and acquires those that others have released there.

    Returns:
      The block's serial from now on. What it writes under this one is released by a later call only.
    """
    serial = _FIRST_SERIAL + len(self._names)
    self._names[serial] = self._names.get(block, block)
    released = self._released.setdefault(address, set())
    released |= {block} | self._visible.get(block, set())
    self._visible[serial] = set(released)
    return serial

  def _take(
    self, addresses: np.ndarray, size: int, is_load: bool = False
  ) -> Iterator[tuple[Buffer, np.ndarray, np.ndarray]]:
    """Yields each buffer with the lanes int[m] that are in it, and their bytes' offsets int[m, size].

    Raises:
      AccessError: an address is in no buffer, or no multiple of size.
    """
    addresses = addresses.astype(np.int64)
    if (addresses % size != 0).any():
      raise AccessError(f"address {int(addresses[addresses % size != 0][0]):#x} is no multiple of {size}")
    index = np.searchsorted(np.array(self._starts, np.int64), addresses, "right") - 1
    for number in np.unique(index).tolist():
      lanes = np.flatnonzero(index == number)
      mine = addresses[lanes]
      buffer = self._buffers[max(number, 0)]
      offsets = mine - buffer.address
      over = max(size - 1 if size > 4 else 0, buffer.slack) if is_load else 0
      outside = (offsets < 0) | (offsets + size - over > buffer.data.size)
      if outside.any():
        self.find(int(mine[outside][0]), size, over)  # raises
      yield buffer, lanes, offsets[:, None] + np.arange(size)


class SharedMemory:
  """Shared memory of one block, or of several that run together.

  Attributes:
    data: uint8[bytes]; it begins with a pattern, not with zeros.
  """

  START = 1024  # the address of byte 0: the driver keeps the first KB, and address 0 is then an error

  def __init__(self, size: int, rng: np.random.Generator, num_blocks: int = 1):
    """Args: size: of a block. num_blocks: that follow each other in `data`."""
    self._size = size
    self.data = rng.integers(0, 256, size * num_blocks, np.uint8)

  def take(self, blocks: np.ndarray) -> SharedMemory:
    """Returns a copy of the memory of some blocks. Args: blocks: their numbers, int[n]."""
    memory = copy.copy(self)
    memory.data = self.data.reshape(-1, self._size)[blocks].reshape(-1)
    return memory

  def offsets(self, addresses: np.ndarray, size: int, alignment: int | None = None) -> np.ndarray:
    """Returns the offsets int64[n, size] of bytes at addresses [n] of the first block. Raises AccessError."""
    starts = addresses.astype(np.int64) - self.START
    outside = (starts < 0) | (starts + size > self._size)
    if outside.any():
      address = int(addresses[outside][0])
      raise AccessError(f"{size} bytes at shared address {address:#x}: the block has {self._size} from {self.START:#x}")
    wrong = addresses.astype(np.int64) % (alignment or size) != 0
    if wrong.any():
      raise AccessError(f"shared address {int(addresses[wrong][0]):#x} is no multiple of {alignment or size}")
    return starts[:, None] + np.arange(size)
