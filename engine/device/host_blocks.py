"""Keeps copies of KV blocks in memory of the host or in a file, with a digest each. May not choose blocks or slots.

Blocks leave and enter the pool by two compiled programs of fixed shape (block_transfer.py). One thread copies bytes and
computes digests beside the step loop, in order. A copy back carries the bytes out of the slot before it checks the
digest, so nothing can change them between check and use. The digest begins with the prefix key: the contents of another
block fail it, too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
import logging
import os
import tempfile
import time
import weakref

import jax
import numpy as np
import xxhash

from engine.batch import BlockCopy, FinishedCopies
from engine.device import kv_cache
from engine.device.block_transfer import (
  PIECE_BLOCKS,
  BlockReader,
  BlockWriter,
  Piece,
  copy_bytes,
  piece_of,
  read_program,
  write_program,
)
from engine.device.programs import ProgramSpec
from engine.errors import ConfigError
from engine.host_pool import MOST_SAVING_PIECES
from engine.prefix_loads import PIECES_AHEAD

_log = logging.getLogger(__name__)


def device_bytes(block_bytes: int) -> int:
  """Returns the most bytes of all devices that copies under way take, for blocks of `block_bytes`."""
  return (MOST_SAVING_PIECES + PIECES_AHEAD + 1) * PIECE_BLOCKS * block_bytes


class MemorySlots:
  """Slots in memory of the host.

  Attributes:
    memory: uint8[slots, bytes of a block].
  """

  def __init__(self, num_slots: int, block_bytes: int):
    """Allocates all memory."""
    self.memory = np.empty((num_slots, block_bytes), np.uint8)
    self.memory.fill(0)  # the system gives the pages now, not while requests run

  def read_slot(self, slot: int) -> memoryview:
    """Returns the bytes of a slot."""
    return memoryview(self.memory[slot])

  def open_slot(self, slot: int) -> memoryview:
    """Returns bytes to fill, for `write_slot`."""
    return memoryview(self.memory[slot])

  def write_slot(self, slot: int) -> None:
    """Does nothing: the bytes are in the slot."""


class FileSlots:
  """Slots in a file without a name, which the system caches in free memory. Belongs to one thread.

  Reads and writes leave the interpreter to other threads while they wait for the disk, unlike a mapped file.
  """

  def __init__(self, num_slots: int, block_bytes: int, folder: str):
    """Reserves the space on the disk. Raises ConfigError."""
    try:
      with tempfile.TemporaryFile(dir=folder) as file:
        self._fd = os.dup(file.fileno())
      self._close = weakref.finalize(self, os.close, self._fd)
      os.posix_fallocate(self._fd, 0, num_slots * block_bytes)
    except OSError as error:
      raise ConfigError(
        f"host_kv_dir={folder:.200} takes no file of {num_slots * block_bytes} bytes: {error.strerror}; lower "
        "--host_kv_mb, or set --host_kv_dir to another folder"
      ) from None
    self._row = memoryview(bytearray(block_bytes))

  def read_slot(self, slot: int) -> memoryview:
    """Returns the bytes of a slot, until the next call. Raises OSError."""
    self._require_all(os.preadv(self._fd, [self._row], slot * len(self._row)))
    return self._row

  def open_slot(self, slot: int) -> memoryview:
    """Returns bytes to fill, for `write_slot`."""
    return self._row

  def write_slot(self, slot: int) -> None:
    """Writes the bytes of the latest `open_slot` into a slot. Raises OSError."""
    self._require_all(os.pwritev(self._fd, [self._row], slot * len(self._row)))

  def drop_cached(self) -> None:
    """Makes the system forget its copy in memory, for measurements. Waits for the disk."""
    os.fsync(self._fd)
    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

  def _require_all(self, count: int) -> None:
    if count != len(self._row):
      raise OSError(f"{count} of a block's {len(self._row)} bytes were transferred")


class HostBlocks:
  """Slots for one block each, layer after layer. One thread calls it; the callback runs on another.

  Attributes:
    slots: where the bytes are.
    on_finish: called, on another thread, when copies finish.
  """

  def __init__(self, spec: ProgramSpec, num_slots: int, folder: str = ""):
    """Compiles the programs and allocates all memory.

    Args:
      spec: of the device's pool.
      folder: where a file has the slots; "": they are in memory.
    """
    self._reader = BlockReader(read_program(spec).compile())
    self._writer = BlockWriter(spec, write_program(spec).compile())
    self._leaves = tuple((leaf.shape, np.dtype(leaf.dtype), leaf.sharding) for leaf in piece_of(spec))
    self._sizes = tuple(leaf.size * np.dtype(leaf.dtype).itemsize // PIECE_BLOCKS for leaf in piece_of(spec))
    self.slots: MemorySlots | FileSlots
    if folder:
      self.slots = FileSlots(num_slots, sum(self._sizes), folder)
    else:
      self.slots = MemorySlots(num_slots, sum(self._sizes))
    self._digests = [0] * num_slots
    self.on_finish: Callable[[], None] = lambda: None
    self._finished: deque[FinishedCopies] = deque()
    self._thread = ThreadPoolExecutor(1, "host kv")  # ends with this object
    self._has_failed = False

  def warm_up(self, kv: kv_cache.Buffers) -> kv_cache.Buffers:
    """Runs both programs once; returns the pool (donated), unchanged."""
    for piece in self._reader.read_blocks(kv, (0,)):
      jax.block_until_ready(piece)
      kv = self._writer.write_piece(kv, (), piece)
    return jax.block_until_ready(kv)

  def save_blocks(self, kv: kv_cache.Buffers, copies: list[BlockCopy]) -> None:
    """Starts to copy blocks out of the pool as launched steps leave them. Returns at once."""
    pieces = self._reader.read_blocks(kv, [copy.block for copy in copies])
    for number, piece in enumerate(pieces):
      for leaf in piece:
        leaf.copy_to_host_async()
      part = copies[number * PIECE_BLOCKS : (number + 1) * PIECE_BLOCKS]
      self._thread.submit(self._finish, part, True, self._save_piece, piece)

  def fetch_blocks(self, copies: list[BlockCopy]) -> None:
    """Starts to verify at most PIECE_BLOCKS slots and to bring their contents to the device. Returns at once."""
    self._thread.submit(self._finish, copies, False, self._fetch_piece)

  def finished_copies(self) -> list[FinishedCopies]:
    """Returns the copies finished since the last call, in order."""
    found = []
    while self._finished:
      found.append(self._finished.popleft())
    return found

  def write_blocks(self, kv: kv_cache.Buffers, fetched: FinishedCopies, blocks: Sequence[int]) -> kv_cache.Buffers:
    """Returns the pool (donated), with the first fetched blocks written to `blocks`."""
    return self._writer.write_piece(kv, blocks, fetched.piece)

  # The other thread.

  def _finish[*Args](
    self,
    copies: list[BlockCopy],
    is_save: bool,
    work: Callable[[list[BlockCopy], *Args], tuple[int, Piece | None]],
    *args: *Args,
  ) -> None:
    try:
      num_good, piece = work(copies, *args)
    except Exception:  # of the device, or for want of memory: the blocks are computed again
      if not self._has_failed:
        _log.exception("a copy of KV blocks between device and host failed; their tokens are computed again")
      self._has_failed = True
      num_good, piece = 0, None
    self._finished.append(FinishedCopies(copies, is_save, num_good, piece))
    self.on_finish()

  def _save_piece(self, copies: list[BlockCopy], piece: Piece) -> tuple[int, None]:
    rows = [_rows_of(np.ascontiguousarray(leaf)) for leaf in piece]
    for number, (_, slot, key) in enumerate(copies):
      hasher, start, target = xxhash.xxh3_64(key), 0, self.slots.open_slot(slot)
      for of_layer, size in zip(rows, self._sizes, strict=True):
        copy_bytes(memoryview(of_layer[number]), target[start : start + size], hasher)
        start += size
      self.slots.write_slot(slot)
      self._digests[slot] = hasher.intdigest()
      time.sleep(0)  # lets the step loop have the interpreter
    return len(copies), None

  def _fetch_piece(self, copies: list[BlockCopy]) -> tuple[int, Piece]:
    arrays = [np.empty(shape, dtype) for shape, dtype, _ in self._leaves]
    rows = [_rows_of(array) for array in arrays]
    num_good = 0
    for number, (_, slot, key) in enumerate(copies):
      hasher, start, source = xxhash.xxh3_64(key), 0, self.slots.read_slot(slot)
      for of_layer, size in zip(rows, self._sizes, strict=True):
        copy_bytes(source[start : start + size], memoryview(of_layer[number]), hasher)
        start += size
      if hasher.intdigest() != self._digests[slot]:
        break
      num_good += 1
      time.sleep(0)
    # May keep the arrays, which nothing changes any more.
    return num_good, tuple(jax.device_put(array, of[2]) for array, of in zip(arrays, self._leaves, strict=True))


def _rows_of(array: np.ndarray) -> np.ndarray:
  """Returns a contiguous piece's array as bytes, a row a block: uint8[PIECE_BLOCKS, bytes]."""
  return array.reshape(-1).view(np.uint8).reshape(PIECE_BLOCKS, -1)
