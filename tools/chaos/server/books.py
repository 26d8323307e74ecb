"""What must hold of the books of blocks, queues and requests, between any two turns. Changes nothing.

Each function raises AssertionError for the first thing that is wrong.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
import itertools

from engine.block_pool import BlockPool
from engine.host_pool import HostPool
from engine.request import RequestStatus
from engine.scheduler import Scheduler
from engine.waiting_queue import WaitingQueue


def check_pool(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
  """Asserts conservation: every block is free or held by exactly as many of `tables` as it counts references."""
  held = Counter(itertools.chain.from_iterable(tables))
  references, free = pool._references, pool._free
  # Whole lists at a time: it is done after every step, and pools are large.
  expected = [0] * (pool.num_blocks + 1)
  for block, count in held.items():
    expected[block] = count
  for block, (counted, wanted) in enumerate(zip(references, expected, strict=True) if references != expected else ()):
    assert counted == wanted, f"block {block} counts {counted} references, tables hold {wanted}"
  wrong = [block for block in free if references[block]]
  assert not wrong, f"the free list is wrong about block {wrong[0]}"
  assert len(free) + len(held) == pool.num_blocks, "blocks were lost or invented"
  assert 0 not in held and 0 not in free, "the padding block was handed out"
  keyed = {key: block for block, key in enumerate(pool._keys) if key is not None}
  assert keyed == pool._by_key, "keys and blocks disagree"
  has_key = [pool._keys[block] is not None for block in free]
  assert has_key == sorted(has_key), "a block without a key queues behind cached ones"
  assert pool.num_cached == sum(has_key), "the count of cached blocks drifted"


def check_host_pool(host: HostPool) -> None:
  """Asserts that every slot is free, being saved or kept, and that loads read kept ones alone."""
  slots = [*host._free, *host._saving.values(), *host._kept.values()]
  assert sorted(slots) == list(range(host.num_slots)), "slots of the host pool were lost or shared"
  assert not host._saving.keys() & host._kept.keys(), "a block is on the host twice"
  assert host._readers.keys() <= host._kept.keys(), "a slot is reused while a load reads it"
  assert host.counts.num_kept == len(host._kept), "the count of blocks on the host drifted"


def check_queue(queue: WaitingQueue) -> None:
  """Asserts that counts and order are those of the requests."""
  fresh = WaitingQueue(queue.requests)
  assert all(a is b for a, b in zip(queue, fresh, strict=True)), "the queue is out of order"
  assert queue.num_tokens == fresh.num_tokens, "queued tokens drifted"
  assert queue._of_tenant == fresh._of_tenant, "counts of tenants drifted"


def check_scheduler(scheduler: Scheduler) -> None:
  """Asserts the invariants between steps."""
  scheduler.settle_counts()
  loads = scheduler.loads
  held = [loads.held_blocks] if loads is not None else []
  check_pool(scheduler.pool, [*(request.block_table for request in scheduler._running), *held])
  if loads is not None:
    check_host_pool(loads.host)
    assert loads._tried <= {request.id for request in scheduler._waiting}, "a request that does not wait has a load"
  live = [*scheduler._waiting, *scheduler._running]
  assert {request.id: request for request in live} == scheduler._requests, "a live request is in no queue, or in two"
  assert len(live) == len(scheduler._requests), "a request is queued twice"
  check_queue(scheduler._waiting)
  assert all(a.rank < b.rank for a, b in itertools.pairwise(scheduler._running)), "the running are out of order"
  slots = scheduler._slots + [request.slot for request in scheduler._running]
  assert sorted(slots) == list(range(scheduler.config.max_num_seqs)), "slots were lost or shared"
  constrained = sum(request.constraint is not None for request in live)
  assert scheduler._num_constrained == constrained, "constrained requests are miscounted"
  in_flight = [request for rows in scheduler._launched.values() for request in rows]
  for request in scheduler._requests.values():
    assert 0 <= request.num_in_flight <= in_flight.count(request), f"{request.id!r} awaits values nobody computes"
  for request in scheduler._waiting:
    assert request.status is RequestStatus.WAITING and not request.block_table, f"{request.id!r} waits with blocks"
    counts = request.num_computed_tokens, request.num_cached_tokens, request.num_sent_tokens
    assert counts == (0, 0, 0), f"{request.id!r} waits, but not from its beginning"
  for request in scheduler._running:
    assert request.status is RequestStatus.RUNNING
    held = len(request.block_table) * scheduler.config.block_size
    assert request.num_computed_tokens <= held, f"{request.id!r} computed past its blocks"
    spare = held - request.num_computed_tokens
    most = scheduler.config.block_size  # and blocks of drafts that were rejected, of at most two rows
    most += 0 if scheduler.config.speculation == "none" else 2 * scheduler.config.num_speculative_tokens
    assert scheduler._batching.reserves or spare < most, f"{request.id!r} holds a block too many"
    assert request.num_published_blocks * scheduler.config.block_size <= request.num_computed_tokens
