"""Reserves blocks of a pool for a prefix that is on its way, and publishes them as it arrives. Pure Python.

A held block has a reference, so nobody else gets it. Holds may not starve requests: whoever runs the scheduler gives
them up when blocks are short, and the prefix is then computed.
"""

from collections.abc import Sequence
import dataclasses

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.prefix_keys import PrefixKeys
from engine.request import Request


@dataclasses.dataclass(eq=False)
class PrefixHold:
  """The blocks of a prompt's prefix.

  Attributes:
    keys: of all full blocks but those of the last token.
    blocks: one each. The first `num_cached` came from the prefix cache, and the others fill one after the other.
    is_released: whether the references are gone.
  """

  keys: Sequence[bytes]
  blocks: list[int]
  num_cached: int
  is_released: bool = False


class PrefixHolds:
  """Takes and releases holds. Belongs to the engine's thread."""

  def __init__(self, config: EngineConfig, pool: BlockPool):
    """Args: config, pool: the scheduler's. The scope of prefixes must be "global" or "tenant"."""
    self._config, self._pool = config, pool
    self._keys = PrefixKeys(config)
    self._live: set[PrefixHold] = set()

  def __len__(self) -> int:
    return len(self._live)

  def count_missing(self, request: Request) -> int:
    """Returns how many full blocks of the prompt the pool lacks; the block of its last token does not count."""
    keys = self._all_keys(request)
    return len(keys) - len(self._pool.match_blocks(keys))

  def hold_prefix(self, request: Request, num_running: int) -> PrefixHold | None:
    """Holds the cached prefix, and free blocks for the rest; None if they would not leave one a running request."""
    keys, pool = self._all_keys(request), self._pool
    hits = pool.match_blocks(keys)
    num_missing = len(keys) - len(hits)
    if num_missing > pool.num_free - pool.num_idle(hits) - num_running:
      return None
    pool.share_blocks(hits)
    hold = PrefixHold(keys, hits + pool.allocate_blocks(num_missing), len(hits))
    self._live.add(hold)
    return hold

  def publish_blocks(self, hold: PrefixHold, start: int, stop: int) -> None:
    """Lets requests find blocks [start, stop) of a hold, whose contents have been written."""
    assert not hold.is_released, "another request may own these blocks"
    for number in range(start, stop):
      self._pool.publish_block(hold.blocks[number], hold.keys[number])

  def release_hold(self, hold: PrefixHold) -> None:
    """Drops the references; published blocks stay in the prefix cache. A second call does nothing."""
    if not hold.is_released:
      hold.is_released = True
      self._live.discard(hold)
      self._pool.release_blocks(hold.blocks)

  def release_all(self) -> None:
    """Releases every hold."""
    for hold in list(self._live):
      self.release_hold(hold)

  def _all_keys(self, request: Request) -> Sequence[bytes]:
    if not request.block_keys:
      request.root_key = self._keys.make_root_key(request, 0)  # the scopes allowed here need no serial
    return self._keys.first_keys(request, (request.num_prompt_tokens - 1) // self._config.block_size)
