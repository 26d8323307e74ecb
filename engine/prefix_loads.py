"""Brings prefix blocks back from the host pool while their request waits in the queue. Pure Python; moves no bytes.

One load runs at a time. It holds the request's cached blocks and newly allocated ones, so nobody else gets them. Blocks
enter the prefix cache as they arrive, and the scheduler finds them there like any cached prefix. The rules:

  - A load ends after a bounded number of turns, whatever else happens. Then it holds nothing.
  - A request has at most one load before each admission. If blocks do not arrive, the request computes them.
  - The scheduler gives a load up before it preempts a request for want of blocks.
"""

from collections import deque
from collections.abc import Sequence
import dataclasses

from engine.batch import PIECE_BLOCKS, BlockCopy
from engine.block_pool import BlockPool
from engine.host_pool import HostPool

PIECES_AHEAD = 2  # copies under way: one to the device's memory, one that waits for the loop


@dataclasses.dataclass(eq=False)
class PrefixLoad:
  """A prefix on its way to the device.

  Attributes:
    request_id: the request that waits for it.
    keys: of the prefix's blocks.
    blocks: one each, held.
    num_ready: leading blocks that have their contents.
    num_begun: leading blocks that have them, or whose copy has begun.
    is_over: nothing is held any more.
  """

  request_id: str
  keys: Sequence[bytes]
  blocks: list[int]
  num_ready: int
  num_begun: int
  is_over: bool = False


class PrefixLoads:
  """Starts and ends loads, and names the copies that they and evictions need.

  Attributes:
    host: the host pool.
  """

  def __init__(self, pool: BlockPool, num_slots: int):
    """Args: pool: the scheduler's. num_slots: blocks of the host pool."""
    self.host = HostPool(num_slots)
    self._pool = pool
    self._load: PrefixLoad | None = None
    self._fetching: deque[tuple[PrefixLoad, list[BlockCopy]]] = deque()  # copies to the device, in order
    self._tried: set[str] = set()  # waiting requests that have had their load
    self._next_keys: dict[str, bytes] = {}  # waiting requests whose turn comes later -> the first key they lack

  @property
  def is_loading(self) -> bool:
    """Whether a load runs."""
    return self._load is not None

  @property
  def is_copying(self) -> bool:
    """Whether copies to the device are under way, also those of loads that are over."""
    return bool(self._fetching)

  @property
  def held_blocks(self) -> list[int]:
    """The blocks that the load holds."""
    return self._load.blocks if self._load is not None else []

  # The scheduler's part.

  def may_load(self, request_id: str) -> bool:
    """Returns whether a waiting request may still have a load, or has one."""
    return request_id not in self._tried or (self._load is not None and self._load.request_id == request_id)

  def await_turn(self, request_id: str, next_key: bytes) -> None:
    """Lets a request wait until the load that runs is over. Args: next_key: the first key that the device lacks."""
    self._next_keys[request_id] = next_key

  def awaits_turn(self, request_id: str) -> bool:
    """Returns whether a request of `await_turn` still waits. A look-up, since the queue may be long."""
    key = self._next_keys.get(request_id)
    return self.is_loading and key is not None and self.host.has_key(key) and not self._pool.has_key(key)

  def begin_load(self, request_id: str, keys: Sequence[bytes], hits: Sequence[int]) -> None:
    """Starts to load a prefix.

    Args:
      request_id: the request that waits.
      keys: of the prefix; after the first len(hits) the host pool has all of them.
      hits: the blocks that are cached on the device. The caller checks num_free for the others.
    """
    assert self._load is None, "one load at a time"
    pool = self._pool
    pool.share_blocks(hits)
    blocks = [*hits, *pool.allocate_blocks(len(keys) - len(hits))]
    self._load = PrefixLoad(request_id, keys, blocks, len(hits), len(hits))
    self._tried.add(request_id)
    self.host.counts.num_hits += 1

  def forget_request(self, request_id: str) -> None:
    """Ends the load of a request that is admitted or has finished."""
    self._tried.discard(request_id)
    self._next_keys.pop(request_id, None)
    if self._load is not None and self._load.request_id == request_id:
      self.end_load()

  def end_load(self) -> bool:
    """Ends the load, complete or not; returns whether one ran. Blocks that have arrived stay in the prefix cache."""
    load, self._load = self._load, None
    if load is None:
      return False
    load.is_over = True
    self._pool.release_blocks(load.blocks)
    return True

  # The engine's part, between two steps.

  def take_saves(self) -> list[BlockCopy]:
    """Returns the copies of blocks evicted since the last call. Make them before the next step is launched."""
    evicted = self._pool.take_evicted()
    return self.host.begin_saves(evicted) if evicted else []

  def finish_saves(self, copies: Sequence[BlockCopy], num_good: int) -> None:
    """Takes copies of `take_saves`, of which the first `num_good` were made."""
    self.host.finish_saves(copies, num_good)

  def take_fetches(self) -> list[BlockCopy]:
    """Returns a piece of the load to verify and to bring to the device next; empty if there is none to begin."""
    load = self._load
    if load is None or len(self._fetching) >= PIECES_AHEAD:
      return []
    start = load.num_begun
    keys = load.keys[start : start + PIECE_BLOCKS]
    keys = keys[: self.host.count_kept(keys, 0)]  # a key may have gone since the load began
    if not keys:
      if load.num_ready == start:
        self.end_load()
      return []
    load.num_begun += len(keys)
    slots = self.host.begin_reads(keys)
    copies = [BlockCopy(*each) for each in zip(load.blocks[start : load.num_begun], slots, keys, strict=True)]
    self._fetching.append((load, copies))
    return copies

  def finish_fetches(self, copies: Sequence[BlockCopy], num_good: int) -> list[int]:
    """Takes the oldest copies of `take_fetches`; returns the blocks to write before the next step is launched.

    Args:
      num_good: leading copies with intact contents. If it is less than all, the load is over.
    """
    load, begun = self._fetching.popleft()
    assert begun == copies, "copies finish in the order in which they begin"
    self.host.finish_reads([copy.key for copy in copies], num_good)
    if load.is_over:
      return []
    good = copies[:num_good]
    for block, _, key in good:
      self._pool.publish_block(block, key)
    load.num_ready += num_good
    self.host.counts.num_loaded += num_good
    if num_good < len(copies) or load.num_ready == len(load.keys):
      self.end_load()
    return [copy.block for copy in good]
