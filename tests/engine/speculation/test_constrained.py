"""Drafts under constraints: each position has its own mask, and tokens that leave no choice are drafts."""

import copy
import dataclasses
import json
import random
import sys
from typing import Any

import pytest

from engine.batch import MAX_DRAFT_MASKS
from engine.constraint import ConstrainedDraft, ConstraintFailed
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.engine.speculation.guessing import GuessingDrafter, RandomChoice
from tests.engine.test_engine import Front
from tests.fakes import FakeConstraint, FakeRunner, VirtualClock, oracle, small_config, tokens_of
from tools import replay
from tools.chaos.server.books import check_scheduler

CONFIG = small_config(
  token_budgets=(4, 8, 16, 32),
  max_num_seqs=16,
  max_queued_requests=64,
  queue_timeout_s=0.0,
  request_timeout_s=0.0,
  eos_token_ids=(1,),
  speculation="auto",
)


class Drafting(FakeConstraint):
  """Allows one token only after each third one, and knows it."""

  def allowed(self) -> bytes:
    mask = super().allowed()
    if self._state[1] % 3:
      return mask
    return (1 << tokens_of(mask)[0]).to_bytes(len(mask), "little")

  def find_forced(self) -> int:
    allowed = tokens_of(self.allowed())
    return allowed[0] if len(allowed) == 1 else -1

  def find_draft(self, proposed, count: int, forces: bool) -> ConstrainedDraft:
    twin, tokens, masks = copy.deepcopy(self), [], []
    follow, is_forced = list(proposed), False
    while len(tokens) < count:
      allowed = tokens_of(twin.allowed())
      if forces and len(allowed) == 1:
        is_forced = is_forced or not tokens
        follow = [*follow[: len(tokens)], *allowed] if is_forced else [*tokens, *allowed, *follow[len(tokens) + 1 :]]
      if len(tokens) == len(follow) or follow[len(tokens)] not in allowed:
        break
      try:
        twin.accept(follow[len(tokens)])
      except Exception:
        break
      if twin.is_done:
        break
      tokens.append(follow[len(tokens)])
      masks.append(twin.allowed())
    return ConstrainedDraft(tuple(tokens), tuple(masks), is_forced)


def some_requests(seed: int, count: int = 24) -> list[Request]:
  """Two of three constrained; the same at every call."""
  rng = random.Random(seed)
  requests = []
  for number in range(count):
    params = SamplingParams(
      max_tokens=rng.choice((1, 2, rng.randint(3, 30))),
      temperature=rng.choice((0.0, 1.0)),
      seed=number,
      min_tokens=rng.choice((0, 1)),
      ignore_eos=rng.random() < 0.5,
      stop_token_ids=rng.choice(((), (5, 6))),
      logprobs=0 if number % 4 == 3 else None,  # then forced tokens are drafts
    )
    constraint = Drafting(50, rng.choice((None, 1, rng.randint(2, 20)))) if number % 3 else None
    prompt = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
    requests.append(Request(f"r{number}", prompt, params, constraint=constraint))
  return requests


class KnowingDrafter(GuessingDrafter):
  """Knows the outputs of constrained requests too."""

  def propose(self, request: Request, count: int):
    constraint, request.constraint = request.constraint, None
    try:
      return super().propose(request, count)
    finally:
      request.constraint = constraint


def serve(seed: int, trace: str = "", **changes):
  """Serves some requests to their end; returns the engine, the front end, the batches and what each should yield."""
  config = dataclasses.replace(CONFIG, **changes)
  scheduler, front, clock, rng = Scheduler(config), Front(), VirtualClock(), random.Random(seed)
  if seed % 2:
    scheduler._speculation = RandomChoice(config)
  assert scheduler._speculation is not None
  drafter = scheduler._speculation.drafter = KnowingDrafter(config, 0.8)
  runner, batches = FakeRunner(config), []
  launch = runner.launch
  runner.launch = lambda batch: batches.append(batch) or launch(batch)
  engine = Engine(scheduler, runner, clock, front)
  if trace:
    engine.start_trace(trace)
  wanted = {request.id: oracle(config, request) for request in some_requests(seed)}
  drafter._truth = {name: tokens for name, (tokens, _) in wanted.items()}
  forget = drafter.forget
  drafter.forget = lambda request_id: None
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
  engine.step()
  forget("")
  assert scheduler.pool.num_used == 0
  assert {name: (front.tokens(name), *front.endings()[name]) for name in wanted} == wanted
  return engine, front, batches


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("speculation", ["ngram", "auto"])
def test_tokens_and_finishes_are_those_without_drafts(speculation: str, overlap: bool):
  masked = plain = preemptions = 0
  for seed in range(14):
    batching = ("chunked", "continuous")[seed % 2]
    engine, _, batches = serve(
      seed, speculation=speculation, overlap=overlap, batching=batching, num_blocks=(40, 13)[seed % 3 == 1]
    )
    for batch in batches:
      rows = {row for row, _ in batch.masks}
      masked += sum(count for row, count in enumerate(batch.num_drafts) if row in rows)
      plain += sum(count for row, count in enumerate(batch.num_drafts) if row not in rows)
    preemptions += engine.stats().num_preemptions
  assert masked > 60 and plain > 60 and preemptions, (masked, plain, preemptions)


def test_forced_tokens_are_of_auto_alone():
  def count_steps(speculation: str, wanted: str = "", **params: Any) -> tuple[int, int]:
    """Returns the steps and the drafts of four requests; counts tokens that no step sampled."""
    config = dataclasses.replace(CONFIG, speculation=speculation, overlap=False)
    scheduler, runner, front = Scheduler(config), FakeRunner(config), Front()
    engine = Engine(scheduler, runner, VirtualClock(), front)
    drafts, launch = [], runner.launch
    runner.launch = lambda batch: drafts.append(sum(batch.num_drafts)) or launch(batch)
    for number in range(4):
      chosen = SamplingParams(max_tokens=40, seed=number, ignore_eos=True, **params)
      engine.submit(Request(f"r{number}", [number], chosen, constraint=Drafting(50), speculation=wanted))
    while engine.num_live:
      engine.step()
    assert engine.dead is None, engine.dead
    if sum(drafts) == 0:  # otherwise a row may bring several tokens
      rows = sum(each.num_rows for each in engine.stats(sys.maxsize).steps)
      assert engine.stats().drafts.forced == 4 * 40 - rows, "a token is sampled or forced"
    return len(drafts), sum(drafts)

  forced, plain = count_steps("auto"), count_steps("auto", "none")
  assert forced == count_steps("auto", "auto") and forced[0] < 0.8 * plain[0] and plain[1] == 0, (forced, plain)
  assert count_steps("ngram") == count_steps("auto", "ngram") and count_steps("ngram")[0] > 0.9 * plain[0]
  several: list[dict[str, Any]] = [{"logprobs": 0}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.1}]
  for params in several:
    steps, drafts = count_steps("auto", **params)
    assert drafts > 20 and steps < plain[0], (params, "these need logits, or are counted when sampled: as drafts")
  with pytest.raises(InvalidRequest, match="send one of none, ngram, or serve with another --speculation"):
    count_steps("ngram", "auto")


class _Failing(Drafting):
  """Fails on the third forced token."""

  num_forced = 0

  def find_forced(self) -> int:
    token = super().find_forced()
    self.num_forced += token >= 0
    if self.num_forced == 3:
      raise ConstraintFailed("no more")
    return token


def test_a_constraint_that_fails_on_a_forced_token_ends_its_request_after_those_before():
  config = dataclasses.replace(CONFIG, overlap=False)
  engine = Engine(Scheduler(config), FakeRunner(config), VirtualClock(), front := Front())
  params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
  wanted, _ = oracle(config, Request("r", [3], params, constraint=Drafting(50)))
  engine.submit(Request("r", [3], params, constraint=_Failing(50)))
  while engine.num_live:
    engine.step()
  assert engine.dead is None and front.endings() == {"r": [FinishReason.ERROR]}
  assert 3 < len(front.tokens("r")) < 40 and front.tokens("r") == wanted[: len(front.tokens("r"))]


def test_the_last_tokens_may_be_forced():
  """They end the request at once, by its length, a stop token or the constraint."""
  reasons = set()
  for length in range(2, 12):
    for max_tokens, stops in ((40, ()), (length, ()), (40, tuple(range(length, 50, 4)))):
      config = dataclasses.replace(CONFIG, overlap=bool(length % 2))
      engine = Engine(Scheduler(config), FakeRunner(config), VirtualClock(), front := Front())
      params = SamplingParams(max_tokens=max_tokens, seed=length, ignore_eos=True, stop_token_ids=stops)
      wanted = oracle(
        config, Request("r", [3], params, constraint=Drafting(50, None if max_tokens == length else length))
      )
      engine.submit(Request("r", [3], params, constraint=Drafting(50, None if max_tokens == length else length)))
      while engine.num_live:
        engine.step()
      assert engine.dead is None, engine.dead
      assert (front.tokens("r"), *front.endings()["r"]) == wanted
      reasons.add((wanted[1], len(wanted[0]) == max_tokens))
  assert reasons == {(FinishReason.STOP, False), (FinishReason.LENGTH, True)}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_has_no_more_masks_than_the_device(overlap: bool):
  """FakeRunner checks the limit; here it is reached."""
  config = small_config(
    token_budgets=(8, 64, 128), max_num_seqs=128, num_blocks=400, overlap=overlap, speculation="ngram", eos_token_ids=()
  )
  scheduler = Scheduler(config)
  scheduler._speculation = RandomChoice(config)
  drafter = scheduler._speculation.drafter = KnowingDrafter(config, 1.0)
  runner, front = FakeRunner(config), Front()
  launch = runner.launch
  batches = []
  runner.launch = lambda batch: batches.append(batch) or launch(batch)
  engine = Engine(scheduler, runner, VirtualClock(), front)
  requests = {}
  for number in range(40):
    params = SamplingParams(max_tokens=30, seed=number, ignore_eos=True)
    name = f"r{number}"
    requests[name] = oracle(config, Request(name, [number], params, constraint=Drafting(50)))
    drafter._truth[name] = requests[name][0]
    engine.submit(Request(name, [number], params, constraint=Drafting(50)))
  drafter.forget = lambda request_id: None
  while engine.num_live:
    engine.step()
    assert engine.dead is None, engine.dead
  assert max(sum(batch.num_drafts) for batch in batches) == MAX_DRAFT_MASKS
  assert {name: (front.tokens(name), *front.endings()[name]) for name in requests} == requests


@pytest.mark.parametrize("overlap", [True, False])
def test_a_trace_replays_with_drafts_of_constraints(overlap: bool, tmp_path, monkeypatch: pytest.MonkeyPatch):
  """The replay knows neither the constraints nor what they proposed, but what the trace says."""
  path = tmp_path / "trace.jsonl"
  monkeypatch.setattr("engine.speculation.speculation.NgramDrafter", lambda: KnowingDrafter(CONFIG, 0.0))
  config = dataclasses.replace(CONFIG, overlap=overlap, num_blocks=16)
  scheduler, front, clock = Scheduler(config), Front(), VirtualClock()
  engine = Engine(scheduler, FakeRunner(config), clock, front)
  for number, request in enumerate(some_requests(2)):
    if number == 7:
      engine.start_trace(str(path))
    engine.submit(request)
    engine.step()
    clock.advance(0.01)
  while engine.num_live:
    engine.step()
    clock.advance(0.01)
  engine.stop_trace()
  engine.step()
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert any(line.get("drafts") for line in lines)
  assert sum(bool(line.get("forced")) for line in lines) > 2
  assert replay.main([str(path)]) == 0


def test_an_error_of_a_constraint_costs_its_drafts_alone():
  config = dataclasses.replace(CONFIG, overlap=False)
  engine = Engine(Scheduler(config), FakeRunner(config), VirtualClock(), front := Front())
  broken = Drafting(50)
  broken.find_draft = lambda proposed, count, forces: 1 // 0
  engine.submit(Request("r", [3], SamplingParams(max_tokens=20, ignore_eos=True), constraint=broken))
  while engine.num_live:
    engine.step()
  assert len(front.tokens("r")) == 20 and front.endings() == {"r": [FinishReason.LENGTH]}
