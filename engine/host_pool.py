"""Tracks copies of prefix blocks in slots of host memory, by prefix key. Pure Python; may not know contents.

Every slot is in exactly one state:

  state     key   may be reused
  free      no    yes
  saving    yes   no: a copy from the device is on its way into it, and nobody finds it yet
  kept      yes   the least recently used first, unless a load reads it

A copy stays here while its block is on the device again, so a second eviction copies nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
import dataclasses

from engine.batch import PIECE_BLOCKS, BlockCopy

MOST_SAVING_PIECES = 8  # each takes memory of the device until it is copied


@dataclasses.dataclass
class HostPoolCounts:
  """Counters since the start, and the blocks kept now.

  Attributes:
    num_kept: blocks that the host pool has now, without those being copied.
    num_saved: evicted blocks copied to the host.
    num_skipped: evicted blocks that were not copied, because too many copies were under way.
    num_hits: requests whose prefix continued in the host pool, so that a load began.
    num_loaded: blocks copied back to the device.
    num_failed: blocks whose copy back failed: the digest differs, or an error. They are computed again.
    num_evicted: blocks that made space for others.
  """

  num_kept: int = 0
  num_saved: int = 0
  num_skipped: int = 0
  num_hits: int = 0
  num_loaded: int = 0
  num_failed: int = 0
  num_evicted: int = 0


class HostPool:
  """Assigns slots 0..num_slots-1 to prefix keys.

  Attributes:
    counts: what happened so far.
  """

  def __init__(self, num_slots: int):
    self.num_slots = num_slots
    self.counts = HostPoolCounts()
    self._kept: OrderedDict[bytes, int] = OrderedDict()  # key -> slot, the least recently used first
    self._saving: dict[bytes, int] = {}  # key -> slot
    self._readers: dict[bytes, int] = {}  # key -> copies to the device under way
    self._free = list(range(num_slots - 1, -1, -1))  # the lowest is used first

  def has_key(self, key: bytes) -> bool:
    """Returns whether the pool has a complete copy of the block with this key."""
    return key in self._kept

  def count_kept(self, keys: Sequence[bytes], start: int) -> int:
    """Returns how many of keys[start:], from the first on, the pool has without a gap."""
    end = start
    while end < len(keys) and keys[end] in self._kept:
      end += 1
    return end - start

  def begin_saves(self, evicted: Iterable[tuple[int, bytes]]) -> list[BlockCopy]:
    """Assigns slots to evicted blocks (id and key) and returns the copies to make, for `finish_saves`."""
    copies = []
    for block, key in evicted:
      if key in self._kept:
        self._kept.move_to_end(key)
      elif key not in self._saving:
        slot = self._take_slot()
        if slot is None:
          self.counts.num_skipped += 1
          continue
        self._saving[key] = slot
        copies.append(BlockCopy(block, slot, key))
    return copies

  def _take_slot(self) -> int | None:
    if len(self._saving) >= MOST_SAVING_PIECES * PIECE_BLOCKS:
      return None
    if self._free:
      return self._free.pop()
    for key in self._kept:
      if key not in self._readers:
        self.counts.num_evicted += 1
        return self._remove(key)
    return None

  def _remove(self, key: bytes) -> int:
    self.counts.num_kept -= 1
    return self._kept.pop(key)

  def finish_saves(self, copies: Sequence[BlockCopy], num_good: int) -> None:
    """Lets others find the first `num_good` copies; frees the slots of the rest."""
    for number, (_, slot, key) in enumerate(copies):
      del self._saving[key]
      if number < num_good:
        self._kept[key] = slot
        self.counts.num_kept += 1
        self.counts.num_saved += 1
      else:
        self._free.append(slot)

  def begin_reads(self, keys: Sequence[bytes]) -> list[int]:
    """Returns the slots of kept keys, which nobody reuses before `finish_reads`."""
    for key in reversed(keys):  # a prefix loses its tail before its head
      self._readers[key] = self._readers.get(key, 0) + 1
      self._kept.move_to_end(key)
    return [self._kept[key] for key in keys]

  def finish_reads(self, keys: Sequence[bytes], num_good: int) -> None:
    """Ends the reads. Of the first `num_good` keys the contents were intact; drops the next one, which was not."""
    for key in keys:
      left = self._readers.pop(key) - 1
      if left:
        self._readers[key] = left
    if num_good < len(keys):
      self.counts.num_failed += 1
      bad = keys[num_good]
      if bad in self._kept and bad not in self._readers:
        self._free.append(self._remove(bad))
