"""Keeps copies of KV blocks in memory of the host, with a digest each. May not choose blocks or slots.

Blocks leave and enter the pool by two compiled programs of fixed shape (block_transfer.py). One thread copies bytes and
computes digests beside the step loop, in order. A copy back carries the bytes out of the slot before it checks the
digest, so nothing can change them between check and use. The digest begins with the prefix key: the contents of another
block fail it, too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
import logging
import time

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
from engine.host_pool import MOST_SAVING_PIECES
from engine.prefix_loads import PIECES_AHEAD

_log = logging.getLogger(__name__)


def device_bytes(block_bytes: int) -> int:
  """Returns the most bytes of all devices that copies under way take, for blocks of `block_bytes`."""
  return (MOST_SAVING_PIECES + PIECES_AHEAD + 1) * PIECE_BLOCKS * block_bytes


class HostBlocks:
  """Slots for one block each. One thread calls it, except that the callback runs on another.

  Attributes:
    memory: uint8[slots, bytes of a block], layer after layer.
    on_finish: called, on another thread, when copies finish.
  """

  def __init__(self, spec: ProgramSpec, num_slots: int):
    """Compiles the programs and allocates all memory. Args: spec: of the device's pool."""
    self._reader = BlockReader(read_program(spec).compile())
    self._writer = BlockWriter(spec, write_program(spec).compile())
    self._leaves = tuple((leaf.shape, np.dtype(leaf.dtype), leaf.sharding) for leaf in piece_of(spec))
    self._sizes = tuple(leaf.size * np.dtype(leaf.dtype).itemsize // PIECE_BLOCKS for leaf in piece_of(spec))
    self.memory = np.empty((num_slots, sum(self._sizes)), np.uint8)
    self.memory.fill(0)  # the system gives the pages now, not while requests run
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
    hashers = [xxhash.xxh3_64(copy.key) for copy in copies]
    start = 0
    for leaf, size in zip(piece, self._sizes, strict=True):
      rows = _rows_of(np.ascontiguousarray(leaf))
      for copy, row, hasher in zip(copies, rows, hashers, strict=False):
        copy_bytes(memoryview(row), memoryview(self.memory[copy.slot])[start : start + size], hasher)
      start += size
      time.sleep(0)  # lets the step loop have the interpreter
    for copy, hasher in zip(copies, hashers, strict=True):
      self._digests[copy.slot] = hasher.intdigest()
    return len(copies), None

  def _fetch_piece(self, copies: list[BlockCopy]) -> tuple[int, Piece]:
    hashers = [xxhash.xxh3_64(copy.key) for copy in copies]
    arrays, start = [], 0
    for (shape, dtype, sharding), size in zip(self._leaves, self._sizes, strict=True):
      array = np.empty(shape, dtype)
      for copy, row, hasher in zip(copies, _rows_of(array), hashers, strict=False):
        copy_bytes(memoryview(self.memory[copy.slot])[start : start + size], memoryview(row), hasher)
      arrays.append(jax.device_put(array, sharding))  # may keep `array`, which nothing changes any more
      start += size
      time.sleep(0)
    num_good = 0
    while num_good < len(copies) and hashers[num_good].intdigest() == self._digests[copies[num_good].slot]:
      num_good += 1
    return num_good, tuple(arrays)


def _rows_of(array: np.ndarray) -> np.ndarray:
  """Returns a contiguous piece's array as bytes, a row a block: uint8[PIECE_BLOCKS, bytes]."""
  return array.reshape(-1).view(np.uint8).reshape(PIECE_BLOCKS, -1)
