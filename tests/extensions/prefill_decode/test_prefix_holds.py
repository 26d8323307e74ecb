"""Holds of a pool: blocks are nobody else's while held, and everybody's afterwards."""

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.request import Request
from engine.sampling_params import SamplingParams
from extensions.prefill_decode.prefix_holds import PrefixHolds

_CONFIG = EngineConfig(vocab_size=100, max_model_len=64, num_blocks=10, block_size=4)


def _request(name: str, num_tokens: int, first: int = 5) -> Request:
  return Request(name, tuple(range(first, first + num_tokens)), SamplingParams(max_tokens=2))


def test_a_hold_is_found_when_it_is_published():
  pool = BlockPool(10)
  holds = PrefixHolds(_CONFIG, pool)
  assert holds.count_missing(_request("a", 17)) == 4  # the block of the last token is none of them
  hold = holds.hold_prefix(_request("a", 17), num_running=0)
  assert hold is not None and (len(hold.blocks), hold.num_cached, pool.num_free) == (4, 0, 6)
  holds.publish_blocks(hold, 0, 3)
  assert holds.count_missing(_request("b", 17)) == 1
  again = holds.hold_prefix(_request("b", 17), num_running=0)
  assert again is not None and again.blocks[:3] == hold.blocks[:3] and again.num_cached == 3
  assert holds.count_missing(_request("c", 17, first=6)) == 4
  holds.release_hold(hold)
  holds.release_hold(hold)
  assert pool.num_used == 4 and len(holds) == 1
  holds.release_all()
  assert again.is_released and pool.num_used == 0 and pool.num_cached == 3
  assert holds.count_missing(_request("d", 17)) == 1


def test_a_hold_leaves_a_block_to_each_running_request():
  pool = BlockPool(10)
  holds = PrefixHolds(_CONFIG, pool)
  assert holds.hold_prefix(_request("a", 25), num_running=5) is None and pool.num_free == 10
  held = holds.hold_prefix(_request("a", 25), num_running=4)
  assert held is not None and pool.num_free == 4
  assert holds.hold_prefix(_request("b", 25, first=30), num_running=0) is None
