"""Plans are read strictly, and act as they say."""

import json
import threading
import time

import pytest

from engine.constraint import FailedConstraint
from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.engine.test_engine import CONFIG
from tests.fakes import FakeConstraint, FakeRunner, VirtualClock, oracle
from tools.chaos.server.books import check_scheduler
from tools.chaos.server.faults import POINTS, FaultPlan, InjectedFault, Injector, inject_engine


def plan(*faults: dict, seed: int = 0) -> FaultPlan:
  return FaultPlan.parse(json.dumps({"seed": seed, "faults": faults}))


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("{", "the fault plan is not JSON"),
    ("[]", 'must be an object with a list "faults"'),
    ('{"faults": [], "sed": 1}', 'must be an object with a list "faults"'),
    ('{"faults": [], "seed": "x"}', "seed='x' must be a whole number"),
    ('{"faults": [3]}', "faults[0] must be an object with point and action, not 3"),
    ('{"faults": [{"point": "x", "action": "raise"}]}', "point='x' is not allowed: choose one of load, "),
    (
      '{"faults": [{"point": "admit", "action": "nan"}]}',
      "action='nan' is not allowed: at admit choose one of delay, ",
    ),
    ('{"faults": [{"point": "admit", "action": "raise", "when": 3}]}', "when=3 is not allowed: the fields are point, "),
    ('{"faults": [{"point": "admit", "action": "delay"}]}', "seconds=None is not allowed: a delay has some"),
    ('{"faults": [{"point": "admit", "action": "raise", "seconds": 1}]}', "seconds=1 is not allowed"),
    ('{"faults": [{"point": "admit", "action": "delay", "seconds": NaN}]}', "seconds=nan is not allowed"),
    ('{"faults": [{"point": "admit", "action": "raise", "nth": 0}]}', "nth=0 is not allowed: send a whole number"),
    ('{"faults": [{"point": "admit", "action": "raise", "probability": 2}]}', "probability=2 is not allowed"),
    ('{"faults": [{"point": "schedule", "action": "raise", "request": "a"}]}', "no request is known at schedule"),
    ('{"faults": [{"point": "admit", "action": "raise", "request": ""}]}', "send a pattern of request ids"),
  ],
)
def test_a_bad_plan_is_refused(text, said):
  with pytest.raises(ConfigError) as refused:
    FaultPlan.parse(text)
  assert said in str(refused.value)


def acted(injector: Injector, point: str, *request_ids: str | None) -> str:
  """What 40 hits (or one for each id) come to: a letter each."""
  said = ""
  for request_id in request_ids or (None,) * 40:
    try:
      said += "d" if "drop" in injector.hit_point(point, request_id) else "."
    except InjectedFault:
      said += "R"
  return said


def test_when():
  injector = Injector(plan({"point": "schedule", "action": "raise", "nth": 3}))
  assert acted(injector, "schedule") == "..R" + 37 * "."
  assert acted(injector, "admit") == 40 * "."
  injector = Injector(plan({"point": "emit", "action": "drop", "request": "a*", "times": 2}))
  assert acted(injector, "emit", "a", "b", "ab", "abc", "A") == "d.d.."
  chance = [
    acted(Injector(plan({"point": "load", "action": "raise", "probability": 0.3}, seed=s)), "load") for s in (5, 5, 6)
  ]
  assert chance[0] == chance[1] != chance[2] and 2 < chance[0].count("R") < 30
  both = plan({"point": "emit", "action": "drop", "nth": 2, "request": "x"})
  assert acted(Injector(both), "emit", "y", "x", "y", "x", "x") == "...d."


def test_rows_and_steps_are_told_apart():
  injector = Injector(plan({"point": "step_end", "action": "raise", "request": "a"}))
  assert acted(injector, "step_end", None, "b", "a") == "..R" and injector.looks_at_rows("step_end")
  injector = Injector(plan({"point": "step_end", "action": "raise"}))
  assert acted(injector, "step_end", "a") == "." and not injector.looks_at_rows("step_end")
  assert acted(injector, "step_end", None) == "R"


def test_another_plan_begins_anew_and_tells_of_the_old_one():
  fault = {"point": "emit", "action": "drop", "times": 3}
  injector = Injector(plan(fault, {"point": "emit", "action": "drop", "nth": 99}))
  assert acted(injector, "emit").count("d") == 3
  assert injector.replace_plan(plan(fault)) == [3, 0]
  assert acted(injector, "emit").count("d") == 3
  assert injector.replace_plan(plan()) == [3] and acted(injector, "emit").count("d") == 0


def test_delay_and_kill(monkeypatch):
  slept, killed = [], []
  monkeypatch.setattr(time, "sleep", slept.append)
  monkeypatch.setattr("os.kill", lambda *arguments: killed.append(arguments))
  injector = Injector(plan({"point": "load", "action": "delay", "seconds": 2.5}, {"point": "load", "action": "kill"}))
  injector.hit_point("load")
  assert slept == [2.5] and len(killed) == 1


def serve(faults: FaultPlan, *requests: Request, runner_class=FakeRunner):
  """Runs requests to their end behind a plan; returns the engine and each request's events."""
  events: dict = {request.id: [] for request in requests}
  engine = Engine(
    Scheduler(CONFIG),
    runner_class(CONFIG),
    VirtualClock(),
    lambda batch: [events[event.request_id].append(event) for event in batch],
  )
  injector = Injector(faults)
  inject_engine(engine, injector)
  for request in requests:
    engine.submit(request)
  for _ in range(500):
    if not engine.step():
      break
  return engine, events


def request(name: str, **options) -> Request:
  return Request(name, (7, 8, 9), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), **options)


def tokens(events) -> tuple[int, ...]:
  return tuple(token for event in events for token in event.token_ids)


@pytest.mark.parametrize("point", [point for point in POINTS if point not in ("load", "tokenize", "detokenize")])
def test_every_point_of_the_engine_is_passed(point):
  """A fault that waits for nothing at each point acts, and changes no token."""
  constrained = request("c", constraint=FakeConstraint(CONFIG.vocab_size, length=5))
  expected, _ = oracle(CONFIG, request("a"))
  engine, events = serve(
    plan({"point": point, "action": "delay", "seconds": 1e-6, "times": 3}), request("a"), constrained
  )
  assert tokens(events["a"]) == expected and len(tokens(events["c"])) == 5
  assert engine.dead is None


@pytest.mark.catalogue("D2")
@pytest.mark.parametrize("failing", ["allowed", "accept", "is_done"])
def test_a_constraint_that_fails_in_any_way_ends_its_request_alone(failing):
  class Failing(FakeConstraint):
    def allowed(self) -> bytes:
      if failing == "allowed" and len(self.tokens) == 3:
        raise RuntimeError("secret")
      return super().allowed()

    def accept(self, token: int) -> None:
      if failing == "accept" and len(self.tokens) == 3:
        raise RuntimeError("secret")
      super().accept(token)

    @property
    def is_done(self) -> bool:
      if failing == "is_done" and len(self.tokens) == 3:
        raise RuntimeError("secret")
      return super().is_done

  other, unharmed = request("c", constraint=FakeConstraint(CONFIG.vocab_size, length=8)), request("a")
  wanted, _ = oracle(CONFIG, request("c", constraint=FakeConstraint(CONFIG.vocab_size, length=8)))
  engine, events = serve(plan(), unharmed, request("f", constraint=Failing(CONFIG.vocab_size)), other)
  assert engine.dead is None
  assert tokens(events["a"]) == oracle(CONFIG, request("a"))[0] and tokens(events["c"]) == wanted
  ending = events["f"][-1]
  assert ending.message == "the output constraint failed on a token; send the request without it"
  assert len(tokens(events["f"])) in (2, 3)


def test_a_failed_constraint_allows_the_vocabulary():
  for vocab_size in (1, 31, 32, 33, 400):
    mask = FailedConstraint(vocab_size).allowed()
    assert len(mask) == 4 * -(-vocab_size // 32)
    assert int.from_bytes(mask, "little") == 2**vocab_size - 1


def test_a_dropped_release_is_found():
  engine, events = serve(plan({"point": "free", "action": "drop"}), request("a"))
  assert tokens(events["a"]) == oracle(CONFIG, request("a"))[0]
  with pytest.raises(AssertionError, match="references, tables hold"):
    check_scheduler(engine._scheduler)


def test_threads_may_pass_points_together():
  injector = Injector(plan({"point": "emit", "action": "drop", "times": 500}))
  found: list[int] = []
  threads = [
    threading.Thread(target=lambda: found.append(sum("drop" in injector.hit_point("emit", "a") for _ in range(400))))
    for _ in range(4)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sum(found) == 500
