"""Steps made from columns equal steps planned from requests: one scheduler that may repeat, beside one that may not."""

from collections import Counter, deque
import dataclasses
import random

import pytest

from engine.batch import Batch, StepResult
from engine.config import EngineConfig
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.settings import POLICIES
from engine.snapshot import restore_scheduler, scheduler_state
from engine.steady_decode import SteadyDecode

CONFIG = EngineConfig(
  vocab_size=100,
  max_model_len=64,
  num_blocks=64,
  block_size=4,
  token_budgets=(4, 8, 16, 32),
  max_num_seqs=6,
  prefill_chunk=16,
  eos_token_ids=(1,),
)


class NeverSteady(SteadyDecode):
  """Every step is planned from the requests."""

  def plan_step(self, *arguments) -> None:
    return None


class Counting(SteadyDecode):
  """Counts what it made from columns."""

  num_repeated = num_committed = longest = 0

  def plan_step(self, *arguments) -> tuple[Batch, list[Request]] | None:
    planned = super().plan_step(*arguments)
    self.num_repeated += planned is not None
    if planned is not None:
      self.longest = max(self.longest, self.num_uncounted // len(planned[1]))
    return planned

  def commit_step(self, *arguments) -> list[TokenEvent] | None:
    events = super().commit_step(*arguments)
    self.num_committed += events is not None
    return events


def scheduler_with(steady_class: type[SteadyDecode], config: EngineConfig) -> Scheduler:
  """A scheduler with this fast path."""
  scheduler = Scheduler(config)
  scheduler._steady = steady_class(config.block_size, scheduler._batching.reserves)
  return scheduler


class Pair:
  """Both schedulers, with the same calls and up to `overlap` steps in flight; no code reads their counters between."""

  def __init__(self, config: EngineConfig, overlap: int, rng: random.Random):
    self.schedulers = scheduler_with(Counting, config), scheduler_with(NeverSteady, config)
    self.launched: deque[Batch] = deque()
    self.overlap, self.rng, self.num_requests, self.now = overlap, rng, 0, 0.0
    self.live: set[str] = set()

  def add(self) -> None:
    rng, number = self.rng, self.num_requests
    self.num_requests += 1
    prompt = [rng.randrange(2, 5) for _ in range(rng.randint(1, 20))]
    params = SamplingParams(max_tokens=rng.randint(1, 40), stop_token_ids=rng.choice(((), (9,))))
    for scheduler in self.schedulers:
      scheduler.add_request(
        Request(f"r{number}", prompt, params, arrival_time=self.now, tenant=f"t{number % 2}", seed=number)
      )
    self.live.add(f"r{number}")

  def abort(self) -> None:
    if self.live:
      name = self.rng.choice(sorted(self.live))
      self.ended(*[scheduler.abort_request(name) for scheduler in self.schedulers])

  def ended(self, found: list[TokenEvent], wanted: list[TokenEvent]) -> None:
    assert found == wanted
    self.live.difference_update(event.request_id for event in found if event.finish_reason is not None)

  def step(self) -> None:
    self.now += 0.25
    found, wanted = [scheduler.schedule(self.now) for scheduler in self.schedulers]
    assert found == wanted
    if found is not None:
      self.launched.append(found)
    while self.launched and (found is None or len(self.launched) > self.overlap):
      batch, rng = self.launched.popleft(), self.rng
      # Few tokens end a request, or steps would hardly repeat.
      tokens = [rng.choice((1, 9)) if rng.random() < 0.01 else rng.randrange(10, 20) for _ in batch.slots]
      bad = frozenset({rng.randrange(len(tokens))} if rng.random() < 0.01 else ())
      result = StepResult(tokens, bad)
      self.ended(*[scheduler.commit(batch, result, self.now) for scheduler in self.schedulers])

  def compare(self) -> None:
    """All that later decisions depend on; and a scheduler restored from it is the same."""
    found, wanted = map(scheduler_state, self.schedulers)
    assert found == wanted == scheduler_state(restore_scheduler(found))
    assert self.schedulers[0].kv_usage() == self.schedulers[1].kv_usage()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("batching", ["chunked", "continuous", "static"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_repeated_step_is_the_one_that_would_be_planned(policy: str, batching: str, overlap: int):
  rng = random.Random(f"{policy} {batching} {overlap}")
  totals = Counter()
  for num_blocks in (20, 64) * 6:
    config = dataclasses.replace(CONFIG, policy=policy, batching=batching, num_blocks=num_blocks)
    pair = Pair(config, overlap, rng)
    for _ in range(150):
      draw = rng.random()
      if draw < 0.1 and len(pair.live) < 12:
        pair.add()
      elif draw < 0.11:
        pair.abort()
      elif draw < 0.13:
        pair.compare()
      else:
        pair.step()
    while pair.live:
      pair.step()
    pair.compare()
    counting = pair.schedulers[0]._steady
    assert isinstance(counting, Counting)
    totals.update(repeated=counting.num_repeated, committed=counting.num_committed, longest=counting.longest)
    totals["preemptions"] += pair.schedulers[0].num_preemptions
  if pair.schedulers[0]._looks_at_all:  # in every step, as tiers does
    assert policy != "fcfs" and not totals["repeated"]
  else:
    assert totals["repeated"] > 200 and totals["committed"] > 100 and totals["longest"] > 40, totals
    assert totals["preemptions"] > 5 or batching == "static", totals


def test_counters_follow_when_somebody_looks():
  scheduler = Scheduler(CONFIG)
  request = Request("r", [5, 6, 7], SamplingParams(max_tokens=20))
  scheduler.add_request(request)
  for _ in range(8):
    batch = scheduler.schedule(0.0)
    assert batch is not None
    scheduler.commit(batch, StepResult([50]), 0.0)
  tokens, slots = scheduler.kv_usage()
  assert (tokens, slots) == (10, 12) and request.num_computed_tokens < 10
  scheduler.settle_counts()
  assert (request.num_computed_tokens, request.num_in_flight) == (10, 0)
  assert scheduler.kv_usage() == (10, 12)
