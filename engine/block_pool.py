"""Who owns which KV block: free list, reference counts, prefix keys. Pure Python; knows block ids, not contents.

Every block is in exactly one of three states:

  state     references  key       where
  used      >= 1        maybe     in that many block tables
  cached    0           yes       in the free list, found again by its key until it is handed out
  free      0           no        in the free list, handed out first

The free list is in order of eviction: blocks without a key at the front, then the least recently released. Released
tables go in from their last block to their first, so that the tail of a prefix is evicted before its head.
Two blocks of equal content are both kept (block tables are append-only); only the first of them is found by the key.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
import hashlib


def root_key(salt: bytes) -> bytes:
  """The parent of a sequence's first block: requests share blocks only within one salt."""
  return hashlib.sha256(b"sluice prefix root\0" + salt).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
  """The key of a full block: names its tokens and, through `parent`, everything before them.

  A cryptographic hash, because a collision would serve one user's context to another (vLLM CVE-2025-25183).
  """
  return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
  """Hands out block ids 1..num_blocks (block 0 of the device is padding and never ours)."""

  def __init__(self, num_blocks: int):
    self.num_blocks = num_blocks
    self._references = [0] * (num_blocks + 1)
    self._keys: list[bytes | None] = [None] * (num_blocks + 1)
    self._by_key: dict[bytes, int] = {}
    self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

  @property
  def num_free(self) -> int:
    """Blocks that allocate() can hand out: those without references, cached ones included."""
    return len(self._free)

  @property
  def num_used(self) -> int:
    """Blocks that some block table holds."""
    return self.num_blocks - len(self._free)

  @property
  def num_cached(self) -> int:
    """Blocks that can be found by their key, used or not."""
    return len(self._by_key)

  def block_states(self) -> bytes:
    """Of each block, in order: 0 free, 1 cached, 2 used. For displays: from any thread, and costs a look at each."""
    free, by_key = set(self._free), set(self._by_key.values())
    return bytes(2 if block not in free else block in by_key for block in range(1, self.num_blocks + 1))

  def match_blocks(self, keys: Iterable[bytes]) -> list[int]:
    """The blocks of the longest cached prefix of `keys`. Takes no reference: call share() before allocate()."""
    found = []
    by_key = self._by_key
    for key in keys:
      block = by_key.get(key)
      if block is None:
        break
      found.append(block)
    return found

  def num_idle(self, blocks: Iterable[int]) -> int:
    """How many of `blocks` nobody references, so that sharing them takes them off the free list."""
    return sum(self._references[block] == 0 for block in blocks)

  def share_blocks(self, blocks: Iterable[int]) -> None:
    """Takes one more reference on each of `blocks` (found by match)."""
    for block in blocks:
      if self._references[block] == 0:
        del self._free[block]
      self._references[block] += 1

  def allocate_blocks(self, count: int) -> list[int]:
    """Takes `count` blocks off the free list, evicting cached ones last; the caller has looked at num_free."""
    assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free: admission must look first"
    blocks = []
    for _ in range(count):
      block, _ = self._free.popitem(last=False)
      key = self._keys[block]
      if key is not None:
        self._keys[block] = None
        del self._by_key[key]
      self._references[block] = 1
      blocks.append(block)
    return blocks

  def publish_block(self, block: int, key: bytes) -> None:
    """Lets others find a full, computed block. A block that has a key, or a key that has a block, stays as it is."""
    assert self._references[block] > 0, f"block {block} is published by nobody who holds it"
    if self._keys[block] is None and key not in self._by_key:
      self._keys[block] = key
      self._by_key[key] = block

  def release_blocks(self, table: Sequence[int]) -> None:
    """Gives back one reference on each block of a request's table."""
    free = self._free
    for block in reversed(table):
      left = self._references[block] - 1
      assert left >= 0, f"block {block} is released more often than taken"
      self._references[block] = left
      if left == 0:
        free[block] = None
        if self._keys[block] is None:
          free.move_to_end(block, last=False)

  def state(self) -> dict:
    """Everything, as plain JSON values; from_state() is its inverse."""
    return {
      "num_blocks": self.num_blocks,
      "references": {str(block): count for block, count in enumerate(self._references) if count},
      "keys": {str(block): key.hex() for block, key in enumerate(self._keys) if key is not None},
      "free": list(self._free),
    }

  @classmethod
  def from_state(cls, state: dict) -> "BlockPool":
    """A pool that will hand out the same blocks in the same order."""
    pool = cls(state["num_blocks"])
    for block, count in state["references"].items():
      pool._references[int(block)] = count
    for block, key in state["keys"].items():
      pool._keys[int(block)] = bytes.fromhex(key)
      pool._by_key[bytes.fromhex(key)] = int(block)
    pool._free = OrderedDict.fromkeys(state["free"])
    return pool
