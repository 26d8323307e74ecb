"""The loop: inbox, overlap, exactly one ending for everybody, and what a failing device leads to."""

import dataclasses
import random
import threading
import time

import pytest

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import DuplicateRequest, InvalidRequest, Overloaded, Unavailable
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.fakes import FakeRunner, VirtualClock, oracle, small_config

CONFIG = small_config(eos_token_ids=(1,))


def make(request_id: str, num_prompt: int = 5, max_tokens: int = 6, **params) -> Request:
  rng = random.Random(request_id)
  prompt = [rng.randrange(50) for _ in range(num_prompt)]
  return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))


class Front:
  """Collects events by request, each list one call of emit."""

  def __init__(self):
    self.calls: list[list[TokenEvent]] = []

  def __call__(self, events: list[TokenEvent]) -> None:
    self.calls.append(events)

  def tokens(self, request_id: str) -> tuple[int, ...]:
    return tuple(
      token for events in self.calls for event in events if event.request_id == request_id for token in event.token_ids
    )

  def endings(self) -> dict[str, list[FinishReason]]:
    found: dict[str, list[FinishReason]] = {}
    for event in (event for events in self.calls for event in events if event.finish_reason is not None):
      found.setdefault(event.request_id, []).append(event.finish_reason)
    return found


def serve(config: EngineConfig = CONFIG, runner: FakeRunner | None = None) -> tuple[Engine, Front, VirtualClock]:
  front, clock = Front(), VirtualClock()
  return Engine(Scheduler(config), runner or FakeRunner(config), clock, front), front, clock


def finish(engine: Engine) -> int:
  steps = 0
  while engine.step():
    steps += 1
    assert steps < 1000
  return steps


@pytest.mark.parametrize("overlap", [True, False])
def test_serves(overlap: bool):
  engine, front, _ = serve(dataclasses.replace(CONFIG, overlap=overlap))
  requests = [make(f"r{number}", num_prompt=number + 1, temperature=number % 2) for number in range(9)]
  for request in requests:
    engine.submit(request)
  assert engine.num_live == 9
  finish(engine)
  for request in requests:
    assert front.tokens(request.id) == oracle(CONFIG, request)[0]
    assert front.endings()[request.id] == [FinishReason.LENGTH]
  assert engine.num_live == 0


def test_overlap_changes_no_token_and_no_ending():
  """The same clients at both loops; steps differ (a stop costs one wasted row), answers do not."""
  for seed in range(20):
    answers = []
    for overlap in (True, False):
      rng = random.Random(seed)
      changes = {"num_blocks": rng.randint(16, 30), "prefill_chunk": rng.randint(2, 16)}
      engine, front, _ = serve(dataclasses.replace(CONFIG, overlap=overlap, **changes))
      for number in range(20):
        if rng.random() < 0.7:
          engine.submit(
            Request(
              f"r{number}",
              [3] * rng.randint(1, 9) + [rng.randrange(50)],
              SamplingParams(max_tokens=rng.randint(1, 30), seed=rng.randrange(9), logprobs=rng.choice((None, 0))),
            )
          )
        engine.step()
      finish(engine)
      answers.append(
        {request_id: (front.tokens(request_id), reasons) for request_id, reasons in front.endings().items()}
      )
      assert engine.stats().blocks_used == 0
    assert answers[0] == answers[1]
    assert len(answers[0]) > 5


class Order(FakeRunner):
  """Writes down when steps are launched and when their values are read."""

  def __init__(self, config: EngineConfig):
    super().__init__(config)
    self.log: list[str] = []

  def launch(self, batch: Batch):
    self.log.append(f"launch {batch.step}")
    return super().launch(batch)

  def run_until(self, launched) -> None:
    self.log.append(f"read {launched.batch.step}")
    super().run_until(launched)


def test_the_overlapped_loop_launches_before_it_reads_and_the_plain_one_does_not():
  for overlap, expected in (
    (True, ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]),
    (False, ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2"]),
  ):
    config = dataclasses.replace(CONFIG, overlap=overlap)
    runner = Order(config)
    engine, _, _ = serve(config, runner)
    engine.submit(make("a", max_tokens=3))
    finish(engine)
    assert runner.log == expected


@pytest.mark.parametrize(("overlap", "turns"), [(True, 2), (False, 1)])
def test_who_arrives_waits_for_the_step_at_hand_and_with_overlap_for_one_launched_ahead(overlap: bool, turns: int):
  engine, front, _ = serve(config=dataclasses.replace(CONFIG, overlap=overlap))
  engine.submit(make("long", max_tokens=20))
  for _ in range(4):
    engine.step()
  engine.submit(make("new"))
  before = len(front.calls)
  while not any(event.request_id == "new" for event in front.calls[-1]):
    engine.step()
  assert len(front.calls) - before == turns


def test_emits_once_a_step():
  engine, front, _ = serve(dataclasses.replace(CONFIG, overlap=False))
  for number in range(3):
    engine.submit(make(f"r{number}", num_prompt=2, max_tokens=2))
  engine.step()
  assert [[event.request_id for event in events] for events in front.calls] == [["r0", "r1", "r2"]]
  engine.step()
  assert len(front.calls) == 2


def test_submit_refuses_at_once():
  engine, front, _ = serve(config=dataclasses.replace(CONFIG, max_queued_requests=2))
  with pytest.raises(InvalidRequest, match="prompt token id 50"):
    engine.submit(Request("bad", [50], SamplingParams(max_tokens=1)))
  engine.submit(make("a"))
  with pytest.raises(DuplicateRequest, match="'a'"):
    engine.submit(make("a"))
  engine.submit(make("b"))
  with pytest.raises(Overloaded):
    engine.submit(make("c"))
  engine.step()
  engine.submit(make("c"))
  finish(engine)
  engine.submit(make("a"))  # its id is free again
  finish(engine)
  assert front.endings() == {"a": [FinishReason.LENGTH] * 2, "b": [FinishReason.LENGTH], "c": [FinishReason.LENGTH]}


@pytest.mark.catalogue("B2", "B3")
def test_abort_at_any_time_is_one_ending():
  for steps in range(8):
    engine, front, _ = serve()
    engine.submit(make("a", num_prompt=12, max_tokens=5))
    for _ in range(steps):
      engine.step()
    engine.abort("a", FinishReason.STOP, "stop string")
    engine.abort("a")
    engine.abort("nobody")
    finish(engine)
    reasons = front.endings()["a"]
    assert len(reasons) == 1
    assert reasons[0] is FinishReason.STOP or steps == 7
    assert engine.stats().blocks_used == 0


def test_an_abort_frees_its_blocks_within_one_step():
  engine, _, _ = serve()
  engine.submit(make("a", num_prompt=12, max_tokens=30))
  for _ in range(5):
    engine.step()
  assert engine.stats().blocks_used > 0
  engine.abort("a")
  engine.step()
  assert engine.stats().blocks_used == 0


def test_deadlines_are_kept_between_steps():
  engine, front, clock = serve(
    config=dataclasses.replace(CONFIG, max_num_seqs=1, request_timeout_s=3.0, queue_timeout_s=1.0)
  )
  engine.submit(make("a", max_tokens=50))
  engine.submit(make("b"))
  engine.step()
  clock.advance(1.0)
  engine.step()
  assert front.endings() == {"b": [FinishReason.TIMEOUT]}
  clock.advance(2.0)
  finish(engine)
  assert front.endings()["a"] == [FinishReason.TIMEOUT]
  assert engine.num_live == 0


class Broken(FakeRunner):
  """Fails at one step, when it is launched or when its values are read."""

  def __init__(self, config: EngineConfig, at: str, step: int):
    super().__init__(config)
    self.at, self.step = at, step

  def launch(self, batch: Batch):
    if self.at == "launch" and batch.step == self.step:
      raise RuntimeError("device lost")
    return super().launch(batch)

  def run_until(self, launched) -> None:
    if self.at == "read" and launched.batch.step == self.step:
      raise RuntimeError("device lost")
    super().run_until(launched)


@pytest.mark.catalogue("C9")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", ["launch", "read"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_failing_device_ends_everybody_once_and_the_engine(overlap: bool, at: str, step: int):
  engine, front, _ = serve(dataclasses.replace(CONFIG, overlap=overlap), Broken(CONFIG, at, step))
  for number in range(7):
    engine.submit(make(f"r{number}", max_tokens=2 + number))
  finish(engine)
  assert isinstance(engine.dead, RuntimeError)
  endings = front.endings()
  assert sorted(endings) == [f"r{number}" for number in range(7)]
  assert all(len(reasons) == 1 for reasons in endings.values())
  assert [FinishReason.ERROR] in endings.values()
  assert "device lost" not in str(front.calls), "the cause is for the log, not for clients"
  with pytest.raises(Unavailable, match="the engine has failed"):
    engine.submit(make("late"))
  engine.abort("r0")
  assert not engine.step()


def test_a_failing_front_end_stops_the_engine():
  def emit(events: list[TokenEvent]) -> None:
    raise ValueError("no loop")

  engine = Engine(Scheduler(CONFIG), FakeRunner(CONFIG), VirtualClock(), emit)
  engine.submit(make("a"))
  finish(engine)
  assert isinstance(engine.dead, ValueError)


def test_seeds_are_the_clients_or_the_engines_choice():
  engine, front, _ = serve()
  prompt = make("x").prompt_token_ids
  same = [Request(f"s{number}", prompt, SamplingParams(max_tokens=20, seed=7, ignore_eos=True)) for number in range(2)]
  free = [Request(f"f{number}", prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for number in range(2)]
  for request in (*same, *free):
    engine.submit(request)
  finish(engine)
  assert front.tokens("s0") == front.tokens("s1")
  assert front.tokens("f0") != front.tokens("f1")


def test_stats_add_up():
  engine, front, clock = serve(dataclasses.replace(CONFIG, overlap=False))
  engine.submit(make("a", num_prompt=9, max_tokens=4, temperature=0.0))
  while engine.num_live:
    engine.step()
    clock.advance(0.5)
  engine.submit(make("a", num_prompt=9, max_tokens=4, temperature=0.0))
  finish(engine)
  stats = engine.stats(num_steps=3)
  assert stats.num_output_tokens == 8 and stats.num_decode_tokens == 6
  assert stats.num_prefill_tokens == 9 + 1 and stats.num_cached_tokens == 8
  assert stats.finished[FinishReason.LENGTH] == 2
  assert stats.num_steps == 9 == sum(stats.steps_by_rung.values())
  assert sum(stats.steps_by_rung[rung] * rung for rung in stats.steps_by_rung) == 16 + stats.num_padding_tokens
  assert [record.step for record in stats.steps] == [6, 7, 8]
  assert (stats.blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
  assert stats.blocks_cached == 3, "12 tokens of either request, which are the same"
  last = stats.steps[-1]
  assert (last.num_rows, last.decode_tokens, last.prefill_tokens, last.padding) == (1, 1, 0, 3)
  assert len(engine.stats(num_steps=5000).steps) == 9 and engine.stats().steps == ()
  assert front.calls


def test_threads_submit_and_abort_while_the_loop_runs():
  """Real threads and a real clock: every accepted request has one ending, finished ones are right."""
  config = dataclasses.replace(CONFIG, max_queued_requests=8)
  front = Front()
  engine = Engine(Scheduler(config), FakeRunner(config), time.monotonic, front)
  stop = threading.Event()
  loop = threading.Thread(target=engine.run, args=(stop,))
  loop.start()
  accepted: dict[str, Request] = {}
  aborted: set[str] = set()

  def client(name: int) -> None:
    rng = random.Random(name)
    for number in range(25):
      request = make(f"{name}/{number}", num_prompt=rng.randint(1, 9), max_tokens=rng.randint(1, 9))
      while True:
        try:
          engine.submit(request)
          break
        except Overloaded:
          time.sleep(0.001)
      accepted[request.id] = request
      if rng.random() < 0.3:
        aborted.add(request.id)
        engine.abort(request.id)

  clients = [threading.Thread(target=client, args=(name,)) for name in range(4)]
  for thread in clients:
    thread.start()
  for thread in clients:
    thread.join()
  patience = time.monotonic() + 180
  while engine.num_live and time.monotonic() < patience:
    time.sleep(0.005)
  before = engine.heartbeat
  while engine.heartbeat == before and time.monotonic() < patience:
    time.sleep(0.01)  # an idle loop still shows that it lives
  stop.set()
  loop.join()
  assert engine.dead is None
  assert engine.num_live == 0 and engine.heartbeat > before
  assert sorted(front.endings()) == sorted(accepted)
  for request_id, reasons in front.endings().items():
    assert len(reasons) == 1
    tokens = oracle(config, accepted[request_id])[0]
    if reasons[0] is FinishReason.LENGTH:
      assert front.tokens(request_id) == tokens
    else:
      assert reasons[0] is FinishReason.ABORT and request_id in aborted
  assert engine.stats().blocks_used == 0


def test_a_request_gets_its_seed_when_it_is_made():
  """Of its parameters, folded to 32 bits, or as given; else one of its own, so that equal requests differ."""
  assert Request("a", [1], SamplingParams(seed=7)).seed == 7
  given = (0, 1, 2, -1, -2, -3, 2**32, 2**63 - 1, -(2**63))
  seeds = [Request("a", [1], SamplingParams(seed=seed)).seed for seed in given]
  assert seeds[:3] == [0, 1, 2] and len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)
  assert Request("a", [1], SamplingParams(), seed=5).seed == 5
  seeds = {Request("a", [1], SamplingParams()).seed for _ in range(20)}
  assert len(seeds) > 10 and all(0 <= seed < 2**32 for seed in seeds)
