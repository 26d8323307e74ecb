"""Blocks: handed out once, shared by count, evicted least recently used first, found by a key that names all before."""

import pytest

from engine.block_pool import BlockPool, block_key, root_key
from tools.chaos.server.books import check_pool


def chain(*blocks: tuple[int, ...], salt: bytes = b"") -> list[bytes]:
  keys = [root_key(salt)]
  for tokens in blocks:
    keys.append(block_key(keys[-1], tokens))
  return keys[1:]


def published(pool: BlockPool, keys: list[bytes]) -> list[int]:
  table = pool.allocate_blocks(len(keys))
  for block, key in zip(table, keys, strict=True):
    pool.publish_block(block, key)
  return table


def test_hands_out_every_block_but_the_padding_one():
  pool = BlockPool(4)
  assert pool.allocate_blocks(4) == [1, 2, 3, 4]
  assert (pool.num_free, pool.num_used) == (0, 4)
  with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
    pool.allocate_blocks(1)
  pool.release_blocks([1, 2, 3, 4])
  check_pool(pool, [])
  assert (pool.num_free, pool.num_used) == (4, 0)


def test_a_shared_block_is_free_when_the_last_table_lets_go():
  pool = BlockPool(3)
  table = published(pool, chain((1,), (2,)))
  found = pool.match_blocks(chain((1,), (2,), (3,)))
  assert found == table
  assert pool.num_idle(found) == 0
  pool.share_blocks(found)
  check_pool(pool, [table, found])
  pool.release_blocks(table)
  assert pool.num_free == 1
  pool.release_blocks(found)
  assert pool.num_free == 3
  assert pool.match_blocks(chain((1,), (2,))) == table, "cached after everybody let go"
  assert pool.num_idle(table) == 2
  check_pool(pool, [])


def test_sharing_takes_a_cached_block_off_the_free_list():
  pool = BlockPool(2)
  table = published(pool, chain((1,)))
  assert pool.num_cached == 0, "published, and held"
  pool.release_blocks(table)
  assert pool.num_cached == 1
  pool.share_blocks(table)
  assert pool.num_cached == 0
  assert pool.allocate_blocks(1) != table
  assert pool.num_free == 0


def test_evicts_blocks_without_key_first_then_least_recently_released_tail_before_head():
  pool = BlockPool(6)
  old = published(pool, chain((1,), (2,)))
  new = published(pool, chain((3,), (4,)))
  plain = pool.allocate_blocks(2)
  pool.release_blocks(old)
  pool.release_blocks(new)
  pool.release_blocks(plain)
  order = [block for _ in range(6) for block in pool.allocate_blocks(1)]
  assert order == [*plain, old[1], old[0], new[1], new[0]]
  assert pool.num_cached == 0 and pool.match_blocks(chain((1,))) == []


def test_a_used_prefix_is_not_the_next_to_go():
  pool = BlockPool(4)
  first, second = published(pool, chain((1,))), published(pool, chain((2,)))
  pool.release_blocks(first)
  pool.release_blocks(second)
  pool.share_blocks(first)
  pool.release_blocks(first)
  pool.allocate_blocks(2)
  assert pool.allocate_blocks(1) == second


def test_match_stops_at_the_first_gap():
  pool = BlockPool(4)
  keys = chain((1,), (2,), (3,))
  table = published(pool, keys)
  pool.release_blocks(table)
  pool.allocate_blocks(1)  # the block that was never used
  pool.allocate_blocks(1)  # evicts the tail
  assert pool.match_blocks(keys) == table[:2]
  pool.allocate_blocks(1)
  assert pool.match_blocks(keys) == table[:1]


def test_equal_content_is_kept_twice_and_found_once():
  pool = BlockPool(2)
  keys = chain((1,))
  first, second = pool.allocate_blocks(1), pool.allocate_blocks(1)
  pool.publish_block(first[0], keys[0])
  pool.publish_block(second[0], keys[0])
  assert pool.match_blocks(keys) == first
  check_pool(pool, [first, second])
  pool.release_blocks(second)
  pool.release_blocks(first)
  check_pool(pool, [])


@pytest.mark.catalogue("I3")
def test_keys_name_everything_before_them():
  assert chain((1, 2), (3, 4))[1] != chain((2, 1), (3, 4))[1]
  assert chain((1, 2))[0] != chain((1, 2), salt=b"tenant")[0]
  assert chain((1, 2)) == chain((1, 2))
  assert len(chain((1,))[0]) == 32


def test_check_finds_what_is_wrong():
  pool = BlockPool(2)
  table = pool.allocate_blocks(1)
  with pytest.raises(AssertionError, match="block 1 counts 1 references, tables hold 0"):
    check_pool(pool, [])
  with pytest.raises(AssertionError, match="tables hold 2"):
    check_pool(pool, [table, table])
  pool.release_blocks(table)
  with pytest.raises(AssertionError, match="more releases than references"):
    pool.release_blocks(table)
  with pytest.raises(AssertionError, match="has no holder"):
    BlockPool(2).publish_block(1, b"key")


def test_state_is_complete():
  pool = BlockPool(5)
  table = published(pool, chain((1,), (2,)))
  pool.release_blocks(table)
  pool.share_blocks(table[:1])
  other = BlockPool.from_state(pool.state())
  check_pool(other, [table[:1]])
  assert other.state() == pool.state()
  assert [other.allocate_blocks(1) for _ in range(4)] == [pool.allocate_blocks(1) for _ in range(4)]
