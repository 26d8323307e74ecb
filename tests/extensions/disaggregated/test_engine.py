"""Two engines as one: the tokens of one request at a time, one ending each, nothing leaked on either side."""

import dataclasses
import random
import threading

import pytest

from engine.batch import Batch
from engine.config import EngineConfig
from engine.errors import ConfigError, DuplicateRequest, Overloaded, RequestTooLong, Unavailable
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from extensions.disaggregated.engine import DisaggregatedEngine
from tests.engine.test_engine import Front, make
from tests.fakes import FakeRunner, VirtualClock, oracle, small_config
from tools.chaos.server.books import check_scheduler

CONFIG = small_config(max_queued_requests=64, queue_timeout_s=0.0, request_timeout_s=0.0, eos_token_ids=(1,))


class Pair:
  """A disaggregated engine on two fake devices."""

  def __init__(self, config: EngineConfig = CONFIG, **decode):
    self.front, self.clock = Front(), VirtualClock()
    self.configs = config, dataclasses.replace(config, **decode)
    self.runners = [FakeRunner(each) for each in self.configs]
    self.schedulers = [Scheduler(each) for each in self.configs]
    sides = list(zip(self.schedulers, self.runners, strict=True))
    self.engine = DisaggregatedEngine(*sides, self.runners[0].export_blocks, self.clock, self.front)

  def drain(self) -> None:
    for _ in range(2000):
      if not self.engine.step() and not self.engine.num_live:
        break
      self.clock.advance(0.01)
    assert self.engine.num_live == 0 and self.engine.dead is None, self.engine.dead
    for scheduler in self.schedulers:
      check_scheduler(scheduler)
      assert scheduler.pool.num_used == scheduler.num_running == scheduler.num_waiting == 0


def test_an_idle_loop_that_is_woken_sees_that_it_shall_stop(monkeypatch):
  monkeypatch.setattr("engine.engine.IDLE_WAIT_S", 1000.0)
  for engine in (Pair().engine, Pair().engine.decode):
    stop = threading.Event()
    loop = threading.Thread(target=engine.run, args=(stop,), daemon=True)
    loop.start()
    stop.set()
    engine.wake()
    loop.join(60)
    assert not loop.is_alive()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_endings_are_those_of_one_request_at_a_time(seed: int, overlap: bool):
  random.seed(seed)  # for those that bring none: how long their answers are decides whether any is preempted
  rng = random.Random(seed)
  pair = Pair(dataclasses.replace(CONFIG, overlap=overlap), num_blocks=rng.choice((15, 40)))  # 15: constant preemption
  requests = {}
  for number in range(30):
    prompt = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
    params = SamplingParams(
      max_tokens=rng.choice((1, 2, rng.randint(3, 30))),
      temperature=rng.choice((0.0, 1.0)),
      seed=rng.choice((None, -3, 2**40)),
      min_tokens=rng.choice((0, 1)),
      ignore_eos=rng.random() < 0.5,
      stop_token_ids=rng.choice(((), (5, 6))),
    )
    request = requests[f"r{number}"] = Request(f"r{number}", prompt, params)
    pair.engine.submit(request)
    for _ in range(rng.randint(0, 3)):
      pair.engine.step()
      pair.clock.advance(0.01)
  pair.drain()
  preempted = pair.schedulers[1].num_preemptions
  for request_id, request in requests.items():
    tokens, reason = oracle(CONFIG, request)
    assert pair.front.tokens(request_id) == tokens
    assert pair.front.endings()[request_id] == [reason]
  assert preempted or pair.configs[1].num_blocks > 15
  stats = pair.engine.stats(8)
  assert sum(stats.finished.values()) == len(requests)
  assert stats.num_output_tokens == sum(len(pair.front.tokens(request_id)) for request_id in requests)
  assert len(stats.steps) == 8 and stats.num_steps == sum(stats.steps_by_rung.values())


def test_a_prompt_never_runs_beside_a_decode():
  pair = Pair()
  seen: list[Batch] = []
  for runner in pair.runners:
    launch = runner.launch
    runner.launch = lambda batch, launch=launch, runner=runner: (seen.append((runner, batch)), launch(batch))[1]
  for number in range(6):
    pair.engine.submit(make(f"r{number}", 12, 8))
  pair.drain()
  for runner, batch in seen:
    longest = max(batch.counts)
    assert (runner is pair.runners[0]) or longest == 1


def test_prompt_logprobs_are_told_once_and_prefixes_are_shared_on_the_prefill_side():
  pair = Pair()
  pair.engine.submit(make("a", 12, 4, prompt_logprobs=0, logprobs=0))
  pair.drain()
  again = make("a", 12, 4)
  again.id = "b"
  pair.engine.submit(again)
  pair.drain()
  events = [event for call in pair.front.calls for event in call]
  assert sum(len(event.prompt_logprobs) for event in events) == 11
  assert sum(len(event.logprobs) for event in events if event.request_id == "a") == 4
  assert [event.num_cached_tokens for event in events if event.request_id == "b" and event.finish_reason] == [8]
  assert pair.engine.stats().num_cached_tokens == 8


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_reaches_a_request_wherever_it_is(steps: int):
  pair = Pair()
  pair.engine.submit(make("a", 12, 20))
  for _ in range(steps):
    pair.engine.step()
  pair.engine.abort("a")
  pair.engine.abort("a")
  pair.drain()
  assert pair.front.endings() == {"a": [FinishReason.ABORT]}
  pair.engine.abort("a")
  pair.engine.abort("unknown")


def test_an_abort_that_crosses_the_hand_over():
  """Posted when the prefill side has already ended its part, but has not said so."""
  pair = Pair()
  pair.engine.submit(make("a", 4, 20))
  inner = pair.engine._on_prefill

  def abort_first(events):
    pair.engine.abort("a")
    inner(events)

  pair.engine.prefill.emit = abort_first
  pair.drain()
  assert pair.front.endings() == {"a": [FinishReason.ABORT]}
  assert pair.schedulers[1].num_running == 0


def test_refuses_like_an_engine():
  pair = Pair(num_blocks=8)
  with pytest.raises(RequestTooLong, match="maximum context length is 32 tokens, which the KV pool holds"):
    pair.engine.submit(make("a", 30, 8))
  pair.engine.submit(make("b", 4, 4))
  with pytest.raises(DuplicateRequest):
    pair.engine.submit(make("b", 4, 4))
  pair.drain()
  full = Pair(dataclasses.replace(CONFIG, max_queued_requests=1))
  full.engine.submit(make("a", 4, 4))
  with pytest.raises(Overloaded):
    full.engine.submit(make("b", 4, 4))
  full.drain()
  with pytest.raises(ConfigError, match="blocks of 4 tokens on the prefill side and 8 on the decode side"):
    Pair(block_size=8)


@pytest.mark.parametrize("side", [0, 1])
def test_when_a_side_dies_everybody_is_told_and_both_loops_end(side: int):
  pair = Pair()

  def fail(batch: Batch):
    raise RuntimeError("device lost")

  pair.runners[side].launch = fail
  for number in range(5):
    pair.engine.submit(make(f"r{number}", 6, 9))
  pair.engine.run(threading.Event())
  assert str(pair.engine.dead) == "device lost"
  assert pair.engine.prefill.dead is pair.engine.decode.dead
  assert pair.front.endings() == {f"r{number}": [FinishReason.ERROR] for number in range(5)}
  with pytest.raises(Unavailable, match="the engine has failed; send the request to another server"):
    pair.engine.submit(make("late", 4, 4))


def test_a_hand_over_to_a_side_that_died_keeps_the_cause_and_ends_the_request():
  pair = Pair()

  def fail(batch: Batch):
    raise RuntimeError("device lost")

  pair.runners[1].launch = fail
  pair.engine.submit(make("first", 6, 9))
  pair.engine.submit(make("late", 30, 9))  # its prompt takes several steps more
  while pair.engine.dead is None:
    pair.engine.step()
  assert pair.engine.num_live == 1
  for _ in range(8):
    pair.engine.step()
  assert str(pair.engine.dead) == "device lost" and pair.engine.prefill.dead is None
  assert pair.front.endings() == {"first": [FinishReason.ERROR], "late": [FinishReason.ERROR]}


def test_two_threads_serve_until_told_to_stop():
  pair = Pair()
  stop, done = threading.Event(), threading.Event()
  collect, requests = pair.front.__call__, {f"r{number}": make(f"r{number}", 9, 12) for number in range(20)}

  def emit(events):
    collect(events)
    if len(pair.front.endings()) == len(requests):
      done.set()

  pair.engine._outer_emit = emit
  thread = threading.Thread(target=pair.engine.run, args=(stop,))
  thread.start()
  for request in requests.values():
    pair.engine.submit(request)
  assert done.wait(180)
  stop.set()
  thread.join(180)
  assert not thread.is_alive()
  for request_id, request in requests.items():
    assert pair.front.tokens(request_id) == oracle(CONFIG, request)[0]


def test_traces_of_both_sides_replay(tmp_path):
  from tools.replay import replay

  pair = Pair()
  pair.engine.start_trace(str(tmp_path / "trace"))
  for number in range(6):
    pair.engine.submit(make(f"r{number}", 10, 8))
  pair.drain()
  pair.engine.stop_trace()
  pair.engine.step()
  for name in ("prefill", "decode"):
    with open(tmp_path / f"trace.{name}", encoding="utf-8") as lines:
      replayed = replay(lines)
    assert replayed.difference is None and replayed.num_batches > 6
