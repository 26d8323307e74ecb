"""The account of steps and requests, against the batches themselves and against counts made by hand."""

import dataclasses
import random

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.recorder import KV_ROWS, RungTotals
from engine.scheduler import Scheduler
from tests.engine.test_engine import Front, make
from tests.extensions.disaggregated.test_engine import Pair
from tests.fakes import FakeRunner, VirtualClock, small_config

CONFIG = small_config(prefix_cache_scope="off", queue_timeout_s=0.0, request_timeout_s=0.0, overlap=False)


def run(config: EngineConfig, requests):
  """Serves requests; returns the engine and every batch with what the scheduler held when it was planned."""
  scheduler, runner, clock, seen = Scheduler(config), FakeRunner(config), VirtualClock(), []
  launch = runner.launch

  def watch(batch):
    scheduler.settle_counts()
    tables = [request.block_table for request in scheduler._running]
    held = sum(request.num_computed_tokens for request in scheduler._running)
    seen.append((batch, held, sum(map(len, tables)) * config.block_size))
    return launch(batch)

  runner.launch = watch
  engine = Engine(scheduler, runner, clock, Front())
  engine.keep_all()
  for request in requests:
    engine.submit(request)
  while engine.num_live:
    engine.step()
    assert engine.dead is None, engine.dead
    clock.advance(0.25)
  return engine, seen


@pytest.mark.parametrize("computes_padding", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("batching", ["chunked", "continuous", "static"])
def test_a_record_says_what_its_batch_holds(batching: str, overlap: bool, computes_padding: bool):
  rng = random.Random(batching)
  requests = [make(f"r{n}", num_prompt=rng.randint(1, 30), max_tokens=rng.randint(1, 20)) for n in range(25)]
  # A pool that is too small for four: what chunked and continuous batching admit is preempted now and then.
  changes = {"batching": batching, "num_blocks": 22, "overlap": overlap, "computes_padding": computes_padding}
  engine, seen = run(dataclasses.replace(CONFIG, **changes), requests)
  records = engine.stats(1 << 20).steps
  assert len(records) == len(seen) and any(record.prefill_pairs for record in records)
  for record, (batch, held, room) in zip(records, seen, strict=True):
    pairs = [
      sum(position + 1 for position in range(start, start + count))
      for start, count in zip(batch.starts, batch.counts, strict=True)
    ]
    decodes = [row for row, tokens in enumerate(batch.token_ids) if not tokens]
    assert record.step == batch.step and record.shape_tokens == batch.shape.tokens
    assert record.num_rows == len(batch.slots) and record.decode_rows == record.decode_tokens == len(decodes)
    assert record.decode_keys == sum(pairs[row] for row in decodes)
    assert record.decode_keys + record.prefill_pairs == sum(pairs)
    assert record.decode_tokens + record.prefill_tokens == batch.num_tokens
    computed = batch.shape.tokens if computes_padding else max(batch.num_tokens, batch.padded_tokens)
    assert record.padding == computed - batch.num_tokens
    assert record.skipped == batch.shape.tokens - computed
    assert record.idle_slots == min(4 - record.num_rows, record.num_waiting)
    assert (record.kv_tokens, record.kv_slots) == (held, room)
    assert record.blocks_used * 4 == room >= held
  assert any(record.skipped for record in records) is not computes_padding
  assert any(record.padding for record in records) is (computes_padding or batching == "static")


@pytest.mark.parametrize("computes_padding", [True, False])
def test_totals_are_those_of_the_records_by_rung(computes_padding: bool):
  config = dataclasses.replace(CONFIG, computes_padding=computes_padding)
  engine, _ = run(config, [make(f"r{n}", num_prompt=9, max_tokens=7) for n in range(9)])
  stats = engine.stats(1 << 20)
  assert len(stats.rungs) > 1
  for tokens, totals in stats.rungs.items():
    records = [record for record in stats.steps if record.shape_tokens == tokens]
    assert totals.steps == len(records) == stats.steps_by_rung[tokens]
    for name in ("decode_tokens", "prefill_tokens", "padding", "idle_slots"):
      assert getattr(totals, name) == sum(getattr(record, name) for record in records)
    useful = totals.decode_tokens + totals.prefill_tokens
    assert (totals.padding, totals.skipped(tokens)) == (
      (tokens * totals.steps - useful, 0) if computes_padding else (0, tokens * totals.steps - useful)
    )
  assert stats.num_skipped_tokens == sum(record.skipped for record in stats.steps)
  assert (stats.num_skipped_tokens > 0) is not computes_padding
  assert stats.num_idle_slots == sum(record.idle_slots for record in stats.steps)
  assert RungTotals(1, 2, 3, 4, 5, 0.5, 1.5).plus(RungTotals(1, 1, 1, 1, 1, 1.0, 1.0)) == (2, 3, 4, 5, 6, 1.5, 2.5)


def test_static_batching_leaves_slots_idle_while_others_wait():
  """Four slots; one of a wave runs 12 steps, three run 2 and leave their slots to nobody though two requests wait."""
  requests = [make(f"r{n}", num_prompt=2, max_tokens=12 if n == 0 else 2) for n in range(6)]
  waves, _ = run(dataclasses.replace(CONFIG, batching="static"), requests)
  joined, _ = run(CONFIG, [make(f"r{n}", num_prompt=2, max_tokens=12 if n == 0 else 2) for n in range(6)])
  assert waves.stats().num_idle_slots == 10 * 2  # of three free slots, two requests wait for one: 10 steps long
  assert joined.stats().num_idle_slots == 0


def test_with_many_requests_kv_is_looked_up_now_and_then():
  config = dataclasses.replace(CONFIG, max_num_seqs=40, token_budgets=(64,), prefill_chunk=64, num_blocks=400)
  engine, seen = run(config, [make(f"r{n}", num_prompt=1, max_tokens=40) for n in range(40)])
  looks, latest = 0, (0, 0)
  for record, (batch, held, room) in zip(engine.stats(1 << 20).steps, seen, strict=True):
    assert held <= room
    if record.num_running < 2 * KV_ROWS or batch.step % 2 == 0:  # at most 40 run: every second step
      looks, latest = looks + 1, (held, room)
    assert (record.kv_tokens, record.kv_slots) == latest
  assert 20 <= looks < len(seen)


def test_a_request_that_ended_has_a_record():
  requests = [make(f"r{n}", num_prompt=20, max_tokens=12) for n in range(4)]
  engine, _ = run(dataclasses.replace(CONFIG, num_blocks=14), requests)
  stats = engine.stats(1 << 20)
  records = {record.id: record for record in stats.requests}
  assert records.keys() == {request.id for request in requests}
  assert stats.num_preemptions > 0 and stats.num_lost_tokens > 0
  for record in records.values():
    assert (record.reason, record.prompt_tokens, record.output_tokens) == ("length", 20, 12)
    assert record.first_scheduled is not None and record.first_token is not None
    assert 0 == record.arrival <= record.first_scheduled < record.first_token < record.end
    assert (record.lost_tokens > 0) == (record.num_preemptions > 0)
  assert sum(record.num_preemptions for record in records.values()) == stats.num_preemptions
  # Whatever was computed was either kept, or lost: prompt and all outputs but the last once, and the lost ones again.
  computed = stats.num_decode_tokens + stats.num_prefill_tokens
  assert computed == 4 * (20 + 11) + stats.num_lost_tokens


def test_one_that_never_ran_has_a_record_too():
  engine, _ = run(CONFIG, [])
  engine.submit(make("a", num_prompt=3, max_tokens=4))
  engine.abort("a")
  engine.step()
  (record,) = engine.stats(10).requests
  assert (record.reason, record.first_scheduled, record.first_token, record.output_tokens) == ("abort", None, None, 0)


def test_records_say_which_side_they_are_of():
  pair = Pair()
  pair.engine.submit(make("a", 12, 8))
  pair.drain()
  stats = pair.engine.stats(100)
  totals = {
    side: [
      sum(getattr(record, name) for record in stats.steps if record.side == side)
      for name in ("prefill_tokens", "decode_tokens")
    ]
    for side in ("prefill", "decode")
  }
  # The decode side receives the first token, so it counts it as a token of a prompt.
  assert totals == {"prefill": [12, 0], "decode": [1, 6]}
  assert [(record.side, record.output_tokens) for record in stats.requests] == [("prefill", 1), ("decode", 8)]
  for tokens, totals in stats.rungs.items():
    assert totals.padding == sum(record.padding for record in stats.steps if record.shape_tokens == tokens)
