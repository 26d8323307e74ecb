"""Steps are launched late: who arrives joins the next one, no device waits, and a wrong guess costs time alone."""

from collections.abc import Callable, Sequence
import random
import threading

import pytest

from engine import engine as engine_module
from engine.batch import Batch
from engine.checked import CheckedEngine
from engine.config import EngineConfig
from engine.engine import Engine, PlainEngine
from engine.pacing import FEWEST
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.fakes import FakeRunner, VirtualClock, oracle, small_config

STEP_S, HOST_S = 0.01, 0.0005
CONFIG = small_config()


class TimedRunner(FakeRunner):
  """Steps take time on a virtual clock, launches some of the host's.

  Attributes:
    ends: of each step launched.
    idle: of the device before each step.
    batches: that were launched.
  """

  def __init__(self, config: EngineConfig, clock: VirtualClock, seconds: Callable[[Batch], float]):
    super().__init__(config)
    self._clock, self._seconds = clock, seconds
    self.ends: list[float] = []
    self.idle: list[float] = []
    self.batches: list[Batch] = []

  def launch(self, batch: Batch):
    self._clock.now += HOST_S
    free_at = self.ends[-1] if self.ends else self._clock.now
    self.idle.append(max(0.0, self._clock.now - free_at))
    self.ends.append(max(self._clock.now, free_at) + self._seconds(batch))
    self.batches.append(batch)
    return super().launch(batch)

  def run_until(self, launched) -> None:
    super().run_until(launched)
    self._clock.now = max(self._clock.now, self.ends[launched.batch.step])


class Rig:
  """An engine whose loop is run in virtual time, and what came out of it."""

  def __init__(
    self,
    seconds: Callable[[Batch], float] = lambda batch: STEP_S,
    engine_class: type[Engine] = CheckedEngine,
    config: EngineConfig = CONFIG,
  ):
    self.clock = VirtualClock()
    self.runner = TimedRunner(config, self.clock, seconds)
    self.engine = engine_class(Scheduler(config), self.runner, self.clock, self._take)
    self.tokens: dict[str, list[tuple[float, int]]] = {}
    self.endings: dict[str, list[FinishReason]] = {}
    self.waits: list[float] = []

  def _take(self, events: list[TokenEvent]) -> None:
    for event in events:
      self.tokens.setdefault(event.request_id, []).extend((self.clock.now, token) for token in event.token_ids)
      if event.finish_reason is not None:
        self.endings.setdefault(event.request_id, []).append(event.finish_reason)

  def play(self, does: Sequence[tuple[float, Callable[[], None]]] = (), *, honours: bool = True) -> None:
    """Takes turns until nothing is left; each of `does` happens at its time, or when the turn then at hand is over.

    Args: honours: turns are taken when the engine says, and not at once.
    """
    left = sorted(does, key=lambda pair: pair[0])
    while self.engine.num_live or left:
      due = max(self.clock.now, self.engine.launch_at() if honours else 0.0)
      while left and (left[0][0] <= due or not self.engine.num_live):
        self.clock.now = max(self.clock.now, left[0][0])
        left.pop(0)[1]()
        due = max(due, self.clock.now)
      self.waits.append(due - self.clock.now)
      self.clock.now = due
      self.engine.step()
      assert self.engine.dead is None, self.engine.dead
      assert len(self.waits) < 10_000

  def first(self, request_id: str) -> float:
    return self.tokens[request_id][0][0]

  def end_after(self, when: float, steps: int) -> float:
    """The end of the step at hand at `when`, or so many steps later."""
    return [end for end in self.runner.ends if end > when][steps]


def make(request_id: str, num_prompt: int = 2, max_tokens: int = 3) -> Request:
  prompt = [random.Random(request_id).randrange(50) for _ in range(num_prompt)]
  return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def served(share: float, **options) -> tuple[Rig, float]:
  """One request decodes; another comes when so much of a step has passed. Returns when it came."""
  rig = Rig(**options)
  long, came = make("long", max_tokens=50), HOST_S + STEP_S * (20 + share)
  rig.play([(0.0, lambda: rig.engine.submit(long)), (came, lambda: rig.engine.submit(make("new")))])
  assert [token for _, token in rig.tokens["long"]] == list(oracle(CONFIG, long)[0])
  return rig, came


@pytest.mark.parametrize("share", [0.05, 0.4, 0.7])
def test_who_arrives_during_a_step_joins_the_next(share: float):
  rig, came = served(share)
  assert rig.first("new") == pytest.approx(rig.end_after(came, 1))
  assert max(rig.runner.idle) == 0.0


def test_who_arrives_once_it_is_launched_joins_the_one_after():
  rig, came = served(0.9)
  assert rig.first("new") == pytest.approx(rig.end_after(came, 2))


def test_without_overlap_nothing_waits():
  rig, _ = served(0.4, engine_class=PlainEngine)
  assert max(rig.waits) == 0.0


def test_nothing_waits_where_nobody_could_join():
  rig = Rig()
  submit = rig.engine.submit
  rig.play([(0.0, lambda number=number: submit(make(f"r{number}", 2, 30 + number))) for number in range(4)])
  waited = [wait > 0 for wait in rig.waits]
  assert waited.index(True) > 30, "all slots are taken until the first has its 30 tokens"


def test_steps_not_much_longer_than_the_hosts_part_are_launched_at_once():
  rig = Rig(lambda batch: 3 * HOST_S)
  rig.play([(0.0, lambda: rig.engine.submit(make("long", max_tokens=50)))])
  assert max(rig.waits) == 0.0
  assert max(rig.runner.idle) == 0.0


def test_nothing_is_expected_of_a_kind_of_step_that_is_new():
  rig = Rig()
  rig.play([(0.0, lambda: rig.engine.submit(make("long", num_prompt=40, max_tokens=6)))])
  kinds = [(batch.shape.tokens, bool(batch.token_ids[0])) for batch in rig.runner.batches]
  assert kinds == [(8, True)] * 5 + [(4, False)] * 5
  # The turn that launches step n+1 waits for n, which is of a kind of which steps up to n-1 are known.
  by_step = [wait > 0 for wait in rig.waits[1:]]
  assert by_step == ([False] * FEWEST + [True] * (5 - FEWEST)) * 2


def test_steps_that_become_short_make_the_device_wait_twice():
  rig = Rig(lambda batch: STEP_S if batch.step < 20 else STEP_S / 3)
  rig.play([(0.0, lambda: rig.engine.submit(make("long", max_tokens=50)))])
  assert [step for step, idle in enumerate(rig.runner.idle) if idle] == [21, 22]
  assert max(rig.runner.idle) < STEP_S
  assert rig.waits[-1] > 0, "it is waited again, when what they take is known"


def test_steps_that_vary_are_taken_for_short_ones():
  rng = random.Random(1)
  rig = Rig(lambda batch: STEP_S * rng.uniform(0.92, 1.5))
  rig.play([(0.0, lambda: rig.engine.submit(make("long", max_tokens=60)))])
  assert sum(rig.runner.idle) < 0.02 * rig.clock.now
  assert sum(rig.waits) > 0.5 * rig.clock.now


def test_fewer_tokens_are_taken_to_need_less_time_and_more_to_need_no_more():
  rig = Rig(lambda batch: STEP_S / 4 * batch.num_tokens)  # as where padding is not computed
  rng = random.Random(2)
  arrivals = [(rng.uniform(0.0, 4.0), make(f"r{number}", max_tokens=rng.randint(5, 40))) for number in range(30)]
  rig.play([(when, lambda request=request: rig.engine.submit(request)) for when, request in arrivals])
  busy = [idle for idle, batch in zip(rig.runner.idle, rig.runner.batches, strict=True) if not batch.admissions]
  assert max(busy) == 0.0
  assert sum(rig.waits) > 0.2 * rig.clock.now


def test_an_abort_is_seen_by_the_launch_that_was_waited_for():
  rig = Rig()
  rig.play(
    [
      (0.0, lambda: rig.engine.submit(make("long", max_tokens=50))),
      (0.0, lambda: rig.engine.submit(make("gone", max_tokens=50))),
      (STEP_S * 20.5, lambda: rig.engine.abort("gone")),
    ]
  )
  last = max(step for step, batch in enumerate(rig.runner.batches) if "gone" in batch.request_ids)
  assert rig.runner.ends[last] == pytest.approx(rig.end_after(STEP_S * 20.5, 0)), "only the step at hand had it"
  assert rig.endings == {"gone": [FinishReason.ABORT], "long": [FinishReason.LENGTH]}


def crowd(seed: int, *, honours: bool) -> Rig:
  """Steps of any length, requests at any time, some aborted."""
  rng = random.Random(seed)
  spread = rng.choice((1.0, 3.0, 30.0))
  rig = Rig(lambda batch: STEP_S * spread ** -rng.random())
  does: list[tuple[float, Callable[[], None]]] = []
  requests = [make(f"r{number}", rng.randint(1, 20), rng.randint(1, 30)) for number in range(40)]
  for request in requests:
    when = rng.uniform(0.0, 2.0)
    does.append((when, lambda request=request: rig.engine.submit(request)))
    if rng.random() < 0.2:
      does.append((when + rng.uniform(0.0, 0.3), lambda request=request: rig.engine.abort(request.id)))
  rig.play(does, honours=honours)
  assert rig.endings.keys() == {request.id for request in requests}
  assert {len(reasons) for reasons in rig.endings.values()} == {1}
  assert rig.engine.stats().blocks_used == 0
  for request in requests:
    expected = oracle(CONFIG, request)[0]
    tokens = tuple(token for _, token in rig.tokens.get(request.id, ()))
    ended = rig.endings[request.id] == [FinishReason.LENGTH]
    assert tokens == expected if ended else tokens == expected[: len(tokens)]
  return rig


@pytest.mark.parametrize("seed", range(6))
def test_no_guess_loses_or_changes_anything(seed: int):
  assert max(crowd(seed, honours=True).waits) > 0 == max(crowd(seed, honours=False).waits)


@pytest.mark.parametrize(("late_s", "most_idle"), [(0.0, 0), (0.002, 3)])
def test_the_loop_sleeps_until_then_and_less_where_it_wakes_late(monkeypatch, late_s: float, most_idle: int):
  rig, stop = Rig(engine_class=Engine), threading.Event()
  slept: list[float] = []

  def sleep(seconds: float) -> None:
    slept.append(seconds)
    rig.clock.now += seconds + late_s
    if not rig.engine.num_live:
      stop.set()

  monkeypatch.setattr(engine_module.time, "sleep", sleep)
  take = rig._take
  monkeypatch.setattr(rig.engine, "_emit", lambda events: (take(events), rig.endings and stop.set()))
  rig.engine.submit(make("long", max_tokens=50))
  rig.engine.run(stop)
  assert rig.endings == {"long": [FinishReason.LENGTH]}
  assert len(slept) > 40 and max(slept) < STEP_S
  assert sum(idle > 0 for idle in rig.runner.idle) <= most_idle
