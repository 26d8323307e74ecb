"""Constrained outputs under every schedule: the tokens of one request at a time, and nobody else waits for them."""

import dataclasses
import json
import random

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.settings import POLICIES
from tests.engine.test_engine import Front, finish, serve
from tests.extensions.disaggregated.test_engine import Pair
from tests.fakes import FakeConstraint, FakeRunner, VirtualClock, oracle, small_config
from tools import replay
from tools.chaos.server.books import check_scheduler

CONFIG = small_config(max_queued_requests=64, queue_timeout_s=0.0, request_timeout_s=0.0, eos_token_ids=(1,))


def some_requests(seed: int, count: int = 24) -> list[Request]:
  """Every other one constrained; the same at every call."""
  rng = random.Random(seed)
  requests = []
  for number in range(count):
    prompt = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
    params = SamplingParams(
      max_tokens=rng.choice((1, 2, rng.randint(3, 30))),
      temperature=rng.choice((0.0, 1.0)),
      seed=number,
      min_tokens=rng.choice((0, 1)),
      ignore_eos=rng.random() < 0.5,
      stop_token_ids=rng.choice(((), (5, 6))),
    )
    constraint = FakeConstraint(50, rng.choice((None, 1, rng.randint(2, 20)))) if number % 2 else None
    requests.append(Request(f"r{number}", prompt, params, tenant=f"t{number % 3}", constraint=constraint))
  return requests


def expected(config: EngineConfig, seed: int) -> dict[str, tuple[tuple[int, ...], FinishReason]]:
  wanted = {}
  for request in some_requests(seed):
    request.seed = request.params.seed or 0
    wanted[request.id] = oracle(config, request)
  return wanted


@pytest.mark.parametrize("batching", ["chunked", "continuous", "static"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_and_endings_are_those_of_one_request_at_a_time(seed: int, overlap: bool, batching: str):
  policy = sorted(POLICIES)[seed % len(POLICIES)]
  # A small pool for half of them: rows are preempted with a token in flight and without.
  config = dataclasses.replace(CONFIG, num_blocks=(40, 13)[seed % 2], batching=batching, policy=policy, overlap=overlap)
  scheduler, front, clock = Scheduler(config), Front(), VirtualClock()
  engine = Engine(scheduler, FakeRunner(config), clock, front)
  wanted, rng = expected(config, seed), random.Random(seed)
  for request in some_requests(seed):
    engine.submit(request)
    for _ in range(rng.randint(0, 3)):
      engine.step()
      clock.advance(0.01)
  while engine.num_live:
    engine.step()
    assert engine.dead is None, engine.dead
    check_scheduler(scheduler)
    clock.advance(0.01)
  assert {name: (front.tokens(name), *front.endings()[name]) for name in wanted} == wanted
  assert scheduler.pool.num_used == 0
  if batching == "chunked" and seed == 3:
    assert scheduler.num_preemptions > 0


def test_a_constrained_row_decodes_in_every_other_step_and_the_others_in_each():
  rows = {}
  for constraint in (None, FakeConstraint(50)):
    runner = FakeRunner(CONFIG)
    engine, front, _ = serve(config=CONFIG, runner=runner)
    batches, launch = [], runner.launch
    runner.launch = lambda batch, batches=batches, launch=launch: batches.append(batch) or launch(batch)
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
    engine.submit(Request("plain", [3, 4], params))
    engine.submit(Request("other", [5, 6], params, constraint=constraint))
    finish(engine)
    rows[constraint is None] = batches
    assert {len(front.tokens(name)) for name in ("plain", "other")} == {10}
  assert [batch.request_ids for batch in rows[True]] == [("plain", "other")] * 10
  assert [batch.request_ids for batch in rows[False][:4]] == [("plain", "other"), ("plain",)] * 2
  # Ten tokens of the one take nine gaps of two steps, and the other is done after its ten.
  assert sum("plain" in batch.request_ids for batch in rows[False]) == 10
  assert [len(batch.masks) for batch in rows[False][:10]] == [1, 0] * 5
  assert not any(batch.masks for batch in rows[True])


def test_constrained_rows_keep_step():
  """One that joins while the others rest waits until they go on; then all decode together."""
  runner = FakeRunner(CONFIG)
  engine, front, _ = serve(config=CONFIG, runner=runner)
  batches, launch = [], runner.launch
  runner.launch = lambda batch: batches.append(batch) or launch(batch)
  params = SamplingParams(max_tokens=10, ignore_eos=True)
  for name in "abc":
    engine.submit(Request(name, [3, 4], params, constraint=FakeConstraint(50)))
    engine.step()
  finish(engine)
  together = [batch.request_ids for batch in batches if len(batch.request_ids) == 3]
  assert len(together) >= 8, [batch.request_ids for batch in batches]
  assert all(len(front.tokens(name)) == 10 for name in "abc")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_constraint_that_fails_ends_its_request_alone(overlap: bool):
  engine, front, _ = serve(dataclasses.replace(CONFIG, overlap=overlap))
  params = SamplingParams(max_tokens=10, ignore_eos=True)
  engine.submit(Request("bad", [3, 4], params, constraint=FakeConstraint(50, fails_after=4)))
  broken = FakeConstraint(50)
  broken.accept = lambda token: 1 // 0
  engine.submit(Request("broken", [3, 4], params, constraint=broken))
  engine.submit(Request("good", [3, 4], params))
  finish(engine)
  assert front.endings() == {
    "bad": [FinishReason.ERROR],
    "broken": [FinishReason.ERROR],
    "good": [FinishReason.LENGTH],
  }
  said = {event.request_id: event.message for events in front.calls for event in events if event.message}
  assert said["bad"] == "enough" and "constraint failed" in said["broken"]
  assert (len(front.tokens("bad")), len(front.tokens("broken")), len(front.tokens("good"))) == (3, 0, 10)
  assert engine.stats().blocks_used == 0


def test_a_complete_output_ends_without_a_stop_token():
  engine, front, _ = serve(config=CONFIG)
  engine.submit(
    Request("a", [3], SamplingParams(max_tokens=9, min_tokens=9, ignore_eos=True), constraint=FakeConstraint(50, 4))
  )
  finish(engine)
  assert len(front.tokens("a")) == 4
  last = front.calls[-1][-1]
  assert last.finish_reason is FinishReason.STOP and last.stop_token_id is None and last.token_ids


@pytest.mark.parametrize("begin", [0, 7])
def test_a_trace_replays_without_the_constraints(begin: int, tmp_path):
  path = tmp_path / "trace.jsonl"
  config = dataclasses.replace(CONFIG, num_blocks=16)
  engine, front, clock = serve(config=config)
  requests = some_requests(1)
  requests[3].constraint = FakeConstraint(50, fails_after=1)
  for number, request in enumerate(requests):
    if number == begin:
      engine.start_trace(str(path))
    engine.submit(request)
    engine.step()
    clock.advance(0.01)
  finish(engine)
  engine.stop_trace()
  engine.step()
  assert front.endings()["r3"] == [FinishReason.ERROR]
  assert replay.main([str(path)]) == 0
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert any(line.get("done") for line in lines)
  assert sum(bool(line.get("failed")) for line in lines) == (begin == 0)


@pytest.mark.parametrize("num_blocks", [16, 40])
def test_a_constraint_goes_along_when_a_request_is_handed_over(num_blocks: int):
  pair = Pair(CONFIG, num_blocks=num_blocks)
  wanted = expected(CONFIG, 3)
  for request in some_requests(3):
    pair.engine.submit(request)
    pair.engine.step()
    pair.clock.advance(0.01)
  pair.drain()
  assert {name: (pair.front.tokens(name), *pair.front.endings()[name]) for name in wanted} == wanted


def test_not_together_with_allowed_ids():
  engine, _, _ = serve(config=CONFIG)
  params = SamplingParams(allowed_token_ids=(3, 4), max_tokens=2)
  with pytest.raises(InvalidRequest, match="allowed_token_ids is not allowed together with an output constraint"):
    engine.submit(Request("a", [3], params, constraint=FakeConstraint(50)))
  assert engine.num_live == 0
