"""Slots of host memory and loads from them: given out once, found when complete, least recently used first to go."""

import pytest

from engine.batch import PIECE_BLOCKS, BlockCopy
from engine.block_pool import BlockPool, block_key, root_key
from engine.host_pool import MOST_SAVING_PIECES, HostPool
from engine.prefix_loads import PrefixLoads
from tools.chaos.server.books import check_host_pool, check_pool


def chain(count: int, salt: bytes = b"") -> list[bytes]:
  keys = [root_key(salt)]
  for number in range(count):
    keys.append(block_key(keys[-1], (number,)))
  return keys[1:]


def saved(host: HostPool, keys: list[bytes]) -> None:
  copies = host.begin_saves(enumerate(keys, 1))
  host.finish_saves(copies, len(copies))
  check_host_pool(host)


def test_a_copy_is_found_when_it_is_complete() -> None:
  host, keys = HostPool(4), chain(3)
  copies = host.begin_saves(enumerate(keys, 7))
  assert copies == [BlockCopy(7, 0, keys[0]), BlockCopy(8, 1, keys[1]), BlockCopy(9, 2, keys[2])]
  assert host.count_kept(keys, 0) == 0
  host.finish_saves(copies, 2)
  assert [host.count_kept(keys, start) for start in range(4)] == [2, 1, 0, 0]
  assert host.begin_saves([(1, keys[0])]) == [], "kept already"
  check_host_pool(host)
  assert (host.counts.num_kept, host.counts.num_saved) == (2, 2)


def test_the_least_recently_used_makes_space() -> None:
  host, keys, others = HostPool(3), chain(3), chain(2, b"other")
  saved(host, keys[::-1])  # a pool evicts a prefix from its tail
  host.begin_saves([(1, keys[2])])  # evicted once more
  saved(host, others[:1])
  assert [host.count_kept(keys, start) for start in range(3)] == [1, 0, 1]
  assert host.counts.num_evicted == 1


def test_what_is_read_or_written_is_not_reused() -> None:
  host, keys, others = HostPool(2), chain(2), chain(3, b"other")
  saved(host, keys)
  assert host.begin_reads(keys) == [0, 1]
  assert host.begin_saves([(1, others[0])]) == []
  assert host.counts.num_skipped == 1
  host.finish_reads(keys, 2)
  copies = host.begin_saves(enumerate(others, 1))
  assert [copy.slot for copy in copies] == [1, 0], "the tail of a prefix goes first"
  assert host.counts.num_skipped == 2 and host.count_kept(keys, 0) == 0
  check_host_pool(host)


def test_copies_under_way_are_bounded() -> None:
  host = HostPool(1000)
  copies = host.begin_saves(enumerate(chain(1000), 1))
  assert len(copies) == MOST_SAVING_PIECES * PIECE_BLOCKS and host.counts.num_skipped == 1000 - len(copies)


def test_a_broken_copy_is_dropped_alone() -> None:
  host, keys = HostPool(4), chain(4)
  saved(host, keys)
  host.begin_reads(keys)
  host.finish_reads(keys, 1)
  check_host_pool(host)
  assert [host.count_kept(keys, start) for start in range(4)] == [1, 0, 2, 1]
  assert (host.counts.num_failed, host.counts.num_kept) == (1, 3)


def loaded(num_blocks: int, keys: list[bytes]) -> tuple[BlockPool, PrefixLoads]:
  pool = BlockPool(num_blocks, 1)
  loads = PrefixLoads(pool, 100)
  saved(loads.host, keys)
  return pool, loads


def test_a_load_goes_piece_by_piece_and_ends_by_itself() -> None:
  keys = chain(3 * PIECE_BLOCKS - 1)
  pool, loads = loaded(64, keys)
  loads.begin_load("a", keys, [])
  pieces = [loads.take_fetches(), loads.take_fetches()]
  assert [len(piece) for piece in pieces] == [PIECE_BLOCKS] * 2
  assert loads.take_fetches() == [], "two pieces are under way"
  assert loads.finish_fetches(pieces[0], PIECE_BLOCKS) == list(range(1, PIECE_BLOCKS + 1))
  assert pool.match_blocks(keys) == list(range(1, PIECE_BLOCKS + 1))
  check_pool(pool, [loads.held_blocks])
  pieces.append(loads.take_fetches())
  for piece in pieces[1:]:
    loads.finish_fetches(piece, len(piece))
  assert not loads.is_loading and not loads.is_copying and not loads.may_load("a")
  assert len(pool.match_blocks(keys)) == len(keys)
  assert pool.num_used == 0 and loads.host.counts.num_loaded == len(keys)


@pytest.mark.parametrize("num_good", [0, 3])
def test_a_load_ends_at_the_first_broken_block(num_good: int) -> None:
  keys = chain(PIECE_BLOCKS + 5)
  pool, loads = loaded(64, keys)
  loads.begin_load("a", keys, [])
  first, second = loads.take_fetches(), loads.take_fetches()
  assert len(loads.finish_fetches(first, num_good)) == num_good
  assert not loads.is_loading and pool.num_used == 0 and len(pool.match_blocks(keys)) == num_good
  assert loads.finish_fetches(second, len(second)) == [], "nobody holds these blocks any more"
  check_host_pool(loads.host)


def test_a_load_ends_with_its_request() -> None:
  keys = chain(4)
  pool, loads = loaded(8, keys)
  loads.begin_load("a", keys, [])
  piece = loads.take_fetches()
  loads.forget_request("b")
  assert loads.is_loading and pool.num_used == 4
  loads.forget_request("a")
  assert not loads.is_loading and pool.num_used == 0 and loads.may_load("a")
  assert loads.finish_fetches(piece, 4) == [] and pool.match_blocks(keys) == []


def test_a_load_ends_if_its_blocks_have_left_the_host() -> None:
  keys = chain(2 * PIECE_BLOCKS)
  pool, loads = loaded(64, keys)
  loads.begin_load("a", keys, [])
  saved(loads.host, chain(100 - PIECE_BLOCKS, b"other"))  # all but the first piece make space
  piece = loads.take_fetches()
  assert len(piece) == PIECE_BLOCKS or not piece
  while piece:
    loads.finish_fetches(piece, len(piece))
    piece = loads.take_fetches()
  assert not loads.is_loading and pool.num_used == 0
