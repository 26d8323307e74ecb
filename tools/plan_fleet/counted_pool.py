"""Counts the KV blocks of a replica and keeps the keys of its prefix cache. Knows no time and no request.

As engine.block_pool, but with one entry for each key of the trace instead of each block. A key stands for
`blocks_per_key` blocks and everything before them. Blocks without a key are a number. Cached entries leave in the order
of their last release, and the tail of a prompt before its head.
"""

from collections import OrderedDict
from collections.abc import Sequence


class CountedPool:
  """Blocks by count, cached prefixes by key, and the host pool behind them.

  Attributes:
    num_blocks: capacity in blocks.
    free: blocks that take() can take, cached ones among them.
    host_keys: keys that the host pool can hold.
  """

  __slots__ = ("num_blocks", "free", "host_keys", "_size", "_plain", "_references", "_idle", "_host", "_anonymous")

  def __init__(self, num_blocks: int, blocks_per_key: int, host_keys: int = 0):
    """Args:
    blocks_per_key: blocks that one key covers.
    host_keys: capacity of the host pool, in keys.
    """
    self.num_blocks, self.free, self.host_keys = num_blocks, num_blocks, host_keys
    self._size = blocks_per_key
    self._plain = num_blocks  # free blocks without an entry
    self._references: dict[int, int] = {}
    self._idle: OrderedDict[int, int] = OrderedDict()  # entry -> its blocks
    self._host: OrderedDict[int, None] = OrderedDict()
    self._anonymous = 0

  def take(self, count: int) -> None:
    """Takes `count` blocks, cached ones last; the caller checks `free` first."""
    self.free -= count
    self._plain -= count
    while self._plain < 0:
      key, blocks = self._idle.popitem(last=False)
      self._plain += blocks
      if key >= 0 and self.host_keys:
        self._keep_on_host(key)

  def match(self, keys: Sequence[int], limit: int) -> tuple[int, int]:
    """Returns how many leading keys of `keys[:limit]` are cached, and how many of those no request holds."""
    references, idle = self._references, self._idle
    hits = unheld = 0
    for key in keys[:limit]:
      if key in idle:
        unheld += 1
      elif key not in references:
        break
      hits += 1
    return hits, unheld

  def share(self, keys: Sequence[int]) -> None:
    """Takes a reference on each of these cached keys."""
    references, idle = self._references, self._idle
    for key in keys:
      blocks = idle.pop(key, 0)
      self.free -= blocks
      references[key] = 1 if blocks else references[key] + 1

  def publish(self, key: int) -> bool:
    """Gives a request's computed blocks this key; returns False if others have it, so that the blocks stay private."""
    if key in self._references or key in self._idle:
      return False
    self._references[key] = 1
    return True

  def release(self, keys: Sequence[int], private: int, cached_private: int = 0) -> None:
    """Drops a request's references and its private blocks.

    Args:
      keys: keys from share() and publish(), in order of the prompt.
      private: its other blocks.
      cached_private: how many of those were full and hold what no other request has; they age as cached ones do.
    """
    self.free += private
    self._plain += private - cached_private
    idle, references = self._idle, self._references
    if cached_private:
      self._anonymous -= 1
      idle[self._anonymous] = cached_private
    for key in reversed(keys):
      left = references[key] - 1
      if left:
        references[key] = left
      else:
        del references[key]
        idle[key] = self._size
        self.free += self._size

  def keep_blocks(self, count: int) -> int:
    """Lets `count` free blocks age as cached ones that only their own request can find; returns the first entry."""
    first = self._anonymous - 1
    self._anonymous -= count
    self._plain -= count
    for entry in range(first - count + 1, first + 1):  # the last block leaves first
      self._idle[entry] = 1
    return first

  def count_kept(self, first: int, count: int) -> int:
    """Returns how many of keep_blocks()'s leading blocks are left."""
    found = 0
    while found < count and first - found in self._idle:
      found += 1
    return found

  def take_kept(self, first: int, count: int) -> None:
    """Takes the leading `count` of these blocks back; the caller has counted them."""
    for entry in range(first - count + 1, first + 1):
      del self._idle[entry]
    self.free -= count

  # The host pool.

  def match_host(self, keys: Sequence[int], first: int, limit: int) -> int:
    """Returns how many keys from `keys[first]` on the host pool holds without a gap."""
    host, found = self._host, first
    while found < limit and keys[found] in host:
      found += 1
    return found - first

  def begin_load(self, keys: Sequence[int], first: int) -> None:
    """Holds the cached `keys[:first]`, and takes blocks for the rest, which the host pool has; the caller checks."""
    for key in keys[first:]:
      self._host.move_to_end(key)
    self.share(keys[:first])
    self.take(self._size * (len(keys) - first))

  def end_load(self, keys: Sequence[int], first: int) -> int:
    """Caches what begin_load() took, unless others cached it meanwhile; returns the number of new keys."""
    new = 0
    for key in reversed(keys[first:]):
      self.free += self._size
      if key in self._references or key in self._idle:
        self._plain += self._size
      else:
        self._idle[key] = self._size
        new += 1
    self.release(keys[:first], 0)
    return new

  def _keep_on_host(self, key: int) -> None:
    host = self._host
    host[key] = None
    host.move_to_end(key)
    if len(host) > self.host_keys:
      host.popitem(last=False)
