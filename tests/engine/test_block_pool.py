"""Blocks: handed out once, shared by count, evicted least recently used first, found by a key that names all before."""

import pytest

from engine.block_pool import BlockPool, block_key, root_key


def chain(*blocks: tuple[int, ...], salt: bytes = b"") -> list[bytes]:
  keys = [root_key(salt)]
  for tokens in blocks:
    keys.append(block_key(keys[-1], tokens))
  return keys[1:]


def published(pool: BlockPool, keys: list[bytes]) -> list[int]:
  table = pool.allocate(len(keys))
  for block, key in zip(table, keys, strict=True):
    pool.publish(block, key)
  return table


def test_hands_out_every_block_but_the_padding_one():
  pool = BlockPool(4)
  assert pool.allocate(4) == [1, 2, 3, 4]
  assert (pool.num_free, pool.num_used) == (0, 4)
  with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
    pool.allocate(1)
  pool.release([1, 2, 3, 4])
  pool.check([])
  assert (pool.num_free, pool.num_used) == (4, 0)


def test_a_shared_block_is_free_when_the_last_table_lets_go():
  pool = BlockPool(3)
  table = published(pool, chain((1,), (2,)))
  found = pool.match(chain((1,), (2,), (3,)))
  assert found == table
  assert pool.num_idle(found) == 0
  pool.share(found)
  pool.check([table, found])
  pool.release(table)
  assert pool.num_free == 1
  pool.release(found)
  assert pool.num_free == 3
  assert pool.match(chain((1,), (2,))) == table, "cached after everybody let go"
  assert pool.num_idle(table) == 2
  pool.check([])


def test_sharing_takes_a_cached_block_off_the_free_list():
  pool = BlockPool(2)
  table = published(pool, chain((1,)))
  pool.release(table)
  pool.share(table)
  assert pool.allocate(1) != table
  assert pool.num_free == 0


def test_evicts_blocks_without_key_first_then_least_recently_released_tail_before_head():
  pool = BlockPool(6)
  old = published(pool, chain((1,), (2,)))
  new = published(pool, chain((3,), (4,)))
  plain = pool.allocate(2)
  pool.release(old)
  pool.release(new)
  pool.release(plain)
  order = [block for _ in range(6) for block in pool.allocate(1)]
  assert order == [*plain, old[1], old[0], new[1], new[0]]
  assert pool.num_cached == 0 and pool.match(chain((1,))) == []


def test_a_used_prefix_is_not_the_next_to_go():
  pool = BlockPool(4)
  first, second = published(pool, chain((1,))), published(pool, chain((2,)))
  pool.release(first)
  pool.release(second)
  pool.share(first)
  pool.release(first)
  pool.allocate(2)
  assert pool.allocate(1) == second


def test_match_stops_at_the_first_gap():
  pool = BlockPool(4)
  keys = chain((1,), (2,), (3,))
  table = published(pool, keys)
  pool.release(table)
  pool.allocate(1)  # the block that was never used
  pool.allocate(1)  # evicts the tail
  assert pool.match(keys) == table[:2]
  pool.allocate(1)
  assert pool.match(keys) == table[:1]


def test_equal_content_is_kept_twice_and_found_once():
  pool = BlockPool(2)
  keys = chain((1,))
  first, second = pool.allocate(1), pool.allocate(1)
  pool.publish(first[0], keys[0])
  pool.publish(second[0], keys[0])
  assert pool.match(keys) == first
  pool.check([first, second])
  pool.release(second)
  pool.release(first)
  pool.check([])


@pytest.mark.catalogue("I3")
def test_keys_name_everything_before_them():
  assert chain((1, 2), (3, 4))[1] != chain((2, 1), (3, 4))[1]
  assert chain((1, 2))[0] != chain((1, 2), salt=b"tenant")[0]
  assert chain((1, 2)) == chain((1, 2))
  assert len(chain((1,))[0]) == 32


def test_check_finds_what_is_wrong():
  pool = BlockPool(2)
  table = pool.allocate(1)
  with pytest.raises(AssertionError, match="block 1 counts 1 references, tables hold 0"):
    pool.check([])
  with pytest.raises(AssertionError, match="tables hold 2"):
    pool.check([table, table])
  pool.release(table)
  with pytest.raises(AssertionError, match="released more often than taken"):
    pool.release(table)
  with pytest.raises(AssertionError, match="published by nobody"):
    BlockPool(2).publish(1, b"key")


def test_state_is_complete():
  pool = BlockPool(5)
  table = published(pool, chain((1,), (2,)))
  pool.release(table)
  pool.share(table[:1])
  other = BlockPool.from_state(pool.state())
  other.check([table[:1]])
  assert other.state() == pool.state()
  assert [other.allocate(1) for _ in range(4)] == [pool.allocate(1) for _ in range(4)]
