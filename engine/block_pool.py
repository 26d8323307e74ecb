"""Tracks the owners of KV blocks: free list, reference counts, prefix keys. Pure Python; may not know contents.

Every block is in exactly one of three states:

  state     references  key       where
  used      >= 1        maybe     in that many block tables
  cached    0           yes       in the free list, found by its key until allocated
  free      0           no        in the free list, allocated first

The free list is in order of eviction: blocks without a key first, then the least recently released. A released table
enters from its last block to its first, so that a prefix loses its tail before its head. Two blocks of equal content
can coexist, because block tables are append-only; the key finds only the first.

A cached block becomes free when it is evicted. If evicted blocks are copied to the host, the pool evicts several at
once, because a copy moves a fixed number of blocks.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
import hashlib
import itertools

from engine.prefix_events import PrefixEventLog


def root_key(salt: bytes) -> bytes:
  """Returns the parent key of a sequence's first block; requests share blocks only within one salt."""
  return hashlib.sha256(b"sluice prefix root\0" + salt).digest()


def adapter_root_key(root: bytes, serial: int) -> bytes:
  """Returns the root key for one load of an adapter; neither the base model nor another load has it, in any scope."""
  return hashlib.sha256(b"sluice adapter root\0" + serial.to_bytes(8, "big") + root).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
  """Returns the key of a full block, which covers its tokens and, through `parent`, all tokens before them.

  A cryptographic hash, because a collision would serve one user's context to another (vLLM CVE-2025-25183).
  """
  return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
  """Allocates block ids 1..num_blocks; block 0 of the device belongs to padding.

  Attributes:
    event_log: notes each key that is found from now on, or no more; None: nobody reads that.
  """

  def __init__(self, num_blocks: int, evict_at_once: int = 0):
    """Args: evict_at_once: blocks of an eviction, which take_evicted() returns; 0: evicts single blocks and forgets."""
    self.num_blocks = num_blocks
    self.event_log: PrefixEventLog | None = None
    self._evict_at_once = evict_at_once
    self._evicted: list[tuple[int, bytes]] = []
    self._references = [0] * (num_blocks + 1)
    self._keys: list[bytes | None] = [None] * (num_blocks + 1)
    self._by_key: dict[bytes, int] = {}
    self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
    self._num_cached = 0

  @property
  def num_free(self) -> int:
    """Blocks that allocate_blocks() can take: blocks without references, including cached ones."""
    return len(self._free)

  @property
  def num_used(self) -> int:
    """Blocks that some block table holds."""
    return self.num_blocks - len(self._free)

  @property
  def num_cached(self) -> int:
    """Blocks in the state cached: no block table holds them, and allocate_blocks() may take them."""
    return self._num_cached

  def block_states(self) -> bytes:
    """Returns one byte a block: 0 free, 1 cached, 2 used. For displays; any thread may call it, in time O(blocks)."""
    free, by_key = set(self._free), set(self._by_key.values())
    return bytes(2 if block not in free else block in by_key for block in range(1, self.num_blocks + 1))

  def match_blocks(self, keys: Iterable[bytes]) -> list[int]:
    """Returns the blocks of the longest cached prefix of `keys`. Takes no reference: call share_blocks() first."""
    found = []
    by_key = self._by_key
    for key in keys:
      block = by_key.get(key)
      if block is None:
        break
      found.append(block)
    return found

  def has_key(self, key: bytes) -> bool:
    """Returns whether match_blocks() finds a block by `key`."""
    return key in self._by_key

  def num_idle(self, blocks: Iterable[int]) -> int:
    """Returns how many of `blocks` have no reference; sharing takes those off the free list."""
    return sum(self._references[block] == 0 for block in blocks)

  def share_blocks(self, blocks: Iterable[int]) -> None:
    """Takes a reference on each of `blocks`, which match_blocks() found."""
    for block in blocks:
      if self._references[block] == 0:
        del self._free[block]
        self._num_cached -= self._keys[block] is not None
      self._references[block] += 1

  def allocate_blocks(self, count: int) -> list[int]:
    """Takes `count` blocks off the free list, cached ones last; the caller must check num_free first."""
    assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free: check num_free first"
    blocks = []
    for _ in range(count):
      block, _ = self._free.popitem(last=False)
      key = self._keys[block]
      if key is not None:
        self._evict(block, key)
        for more in list(itertools.islice(self._free, max(0, self._evict_at_once - 1))):  # all of them are cached
          self._evict(more, self._keys[more])
      self._references[block] = 1
      blocks.append(block)
    return blocks

  def _evict(self, block: int, key: bytes | None) -> None:
    """Makes a cached block of the free list free."""
    assert key is not None, f"block {block} is not cached"
    self._keys[block] = None
    del self._by_key[key]
    self._num_cached -= 1
    if self.event_log is not None:
      self.event_log.note_removed(key)
    if self._evict_at_once:
      self._evicted.append((block, key))

  def take_evicted(self) -> list[tuple[int, bytes]]:
    """Returns the blocks evicted since the last call, with their former keys.

    Their contents are intact until the next step is launched.
    """
    evicted, self._evicted = self._evicted, []
    return evicted

  def publish_block(self, block: int, key: bytes) -> None:
    """Lets others find a full, computed block by `key`. Changes no existing key or entry."""
    assert self._references[block] > 0, f"block {block} has no holder"
    if self._keys[block] is None and key not in self._by_key:
      self._keys[block] = key
      self._by_key[key] = block
      if self.event_log is not None:
        self.event_log.note_stored(key)

  def release_blocks(self, table: Sequence[int]) -> None:
    """Drops one reference on each block of a request's table."""
    free = self._free
    for block in reversed(table):
      left = self._references[block] - 1
      assert left >= 0, f"block {block} has more releases than references"
      self._references[block] = left
      if left == 0:
        free[block] = None
        if self._keys[block] is None:
          free.move_to_end(block, last=False)
        else:
          self._num_cached += 1

  def state(self) -> dict:
    """Returns the whole state as plain JSON values; from_state() is the inverse."""
    return {
      "num_blocks": self.num_blocks,
      "references": {str(block): count for block, count in enumerate(self._references) if count},
      "keys": {str(block): key.hex() for block, key in enumerate(self._keys) if key is not None},
      "free": list(self._free),
    }

  @classmethod
  def from_state(cls, state: dict) -> "BlockPool":
    """Makes a pool that allocates the same blocks in the same order."""
    pool = cls(state["num_blocks"])
    for block, count in state["references"].items():
      pool._references[int(block)] = count
    for block, key in state["keys"].items():
      pool._keys[int(block)] = bytes.fromhex(key)
      pool._by_key[bytes.fromhex(key)] = int(block)
    pool._free = OrderedDict.fromkeys(state["free"])
    pool._num_cached = sum(pool._keys[block] is not None for block in pool._free)
    return pool
