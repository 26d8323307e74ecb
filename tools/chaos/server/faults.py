"""Faults on purpose, at named points of a running engine, as a plan says. For tests of what must survive them.

Composed around an engine by `inject_engine`, and around the front end by tools/chaos/server/front_end_faults.py, by
`python -m tools.chaos.server --fault_plan=FILE`. A plan (that file's, or ChaosService/SetFaultPlan's) is JSON:

  {"seed": 7, "faults": [
    {"point": "step_begin", "action": "raise", "nth": 10},
    {"point": "step_end",   "action": "delay", "seconds": 0.2, "probability": 0.01},
    {"point": "step_begin", "action": "nan",   "request": "poison-*"},
    {"point": "emit",       "action": "drop",  "request": "lost-*", "times": 1}
  ]}

Each time the server passes a point is a hit. A fault acts on every hit, or only
  nth          on that hit alone (the first is 1),
  probability  by chance, which the plan's seed makes repeatable (0 if none is given),
  request      for requests whose id fits the pattern (fnmatch; ids of further outputs end in /1, /2, ...),
  times        until it has acted so often.
These may be combined: hits are counted among the requests that fit.

  point       where                                        a hit is                   actions beside delay, raise, kill
  load        before the model is loaded                   the load
  tokenize    before a prompt is tokenized                 a prompt; has no request
  admit       a request is handed to the engine            a request
  schedule    before a step is planned                     a step; has no request
  step_begin  before a step is launched                    a step, or a row of it     nan
  step_end    when the engine reads a step's values        a step, or a row of it
  constraint  before a constraint returns allowed tokens   a constrained row
  emit        an event that is not a request's last        an event                   drop
  final_emit  a request's last event                       an event                   drop
  free        a request gives back its slot and pages      a request                  drop (they leak)
  detokenize  tokens become text                           a request's tokens

delay takes `seconds`; on the points of the front end it holds up the event loop. raise raises InjectedFault. kill ends
the process by SIGKILL. nan fills a page of the row's own with NaN, at its first step that reads into a page which is
not yet full: what the device then computes for the row is NaN. A fault at a step with a `request`, and nan, are looked
at for each row; a raise there ends the engine all the same, for a step is of all its rows.
"""

from collections.abc import Sequence
import dataclasses
import fnmatch
import json
import os
import random
import signal
import threading
import time
from typing import Any

from engine.batch import Batch, Launched, StepResult
from engine.constraint import Constraint
from engine.engine import Emit, Engine
from engine.errors import ConfigError
from engine.request import Request, TokenEvent
from extensions.disaggregated.engine import DisaggregatedEngine
from extensions.fake_device.device import FakeDevice

_ANYWHERE = ("delay", "raise", "kill")
_MORE = {"step_begin": ("nan",), "emit": ("drop",), "final_emit": ("drop",), "free": ("drop",)}
POINTS = (
  *("load", "tokenize", "admit", "schedule", "step_begin", "step_end"),
  *("constraint", "emit", "final_emit", "free", "detokenize"),
)
_WITHOUT_REQUEST = ("load", "tokenize", "schedule")
_OF_STEPS = ("step_begin", "step_end")
_FIELDS = ("point", "action", "seconds", "nth", "probability", "request", "times")
_MAX_SECONDS = 86_400.0


class InjectedFault(Exception):
  """What the action "raise" raises."""


@dataclasses.dataclass(frozen=True)
class Fault:
  """One entry of a plan; see the module."""

  point: str
  action: str
  seconds: float = 0.0
  nth: int | None = None
  probability: float | None = None
  request: str | None = None
  times: int | None = None

  @property
  def is_of_rows(self) -> bool:
    """At a point of steps: whether rows are looked at, and not steps."""
    return self.request is not None or self.action == "nan"


@dataclasses.dataclass(frozen=True)
class FaultPlan:
  """Attributes: faults: in order; all that fit a hit act. seed: of chance."""

  faults: tuple[Fault, ...] = ()
  seed: int = 0

  @classmethod
  def parse(cls, text: str, source: str = "the fault plan") -> "FaultPlan":
    """Reads a plan.

    Raises:
      ConfigError: names the entry, the field, the value and what is allowed.
    """
    try:
      raw = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise ConfigError(f"{source} is not JSON: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("faults"), list) or raw.keys() - {"faults", "seed"}:
      raise ConfigError(f'{source} must be an object with a list "faults" and perhaps a number "seed"')
    seed = raw.get("seed", 0)
    if type(seed) is not int:
      raise ConfigError(f"{source}: seed={seed!r:.80} must be a whole number")
    faults = tuple(_fault(entry, f"{source}: faults[{index}]") for index, entry in enumerate(raw["faults"]))
    return cls(faults, seed)


def _fault(entry: Any, where: str) -> Fault:
  def check(ok: bool, name: str, limit: str) -> None:
    if not ok:
      raise ConfigError(f"{where}: {name}={entry.get(name)!r:.80} is not allowed: {limit}")

  if not isinstance(entry, dict):
    raise ConfigError(f"{where} must be an object with point and action, not {entry!r:.80}")
  for name in entry:
    check(name in _FIELDS, name, f"the fields are {', '.join(_FIELDS)}")
  point, action, request = entry.get("point"), entry.get("action"), entry.get("request")
  check(point in POINTS, "point", f"choose one of {', '.join(POINTS)}")
  actions = (*_ANYWHERE, *_MORE.get(str(point), ()))
  check(action in actions, "action", f"at {point} choose one of {', '.join(actions)}")
  seconds = entry.get("seconds", 0.0)
  is_number = type(seconds) in (int, float) and 0 < seconds <= _MAX_SECONDS
  check(is_number if action == "delay" else "seconds" not in entry, "seconds", "a delay has some, up to a day")
  for name in ("nth", "times"):
    check(name not in entry or type(entry[name]) is int and entry[name] >= 1, name, "send a whole number from 1")
  chance = entry.get("probability", 1.0)
  check(type(chance) in (int, float) and 0 <= chance <= 1, "probability", "send a number from 0 to 1")
  check(request is None or isinstance(request, str) and request != "", "request", "send a pattern of request ids")
  check(request is None or point not in _WITHOUT_REQUEST, "request", f"no request is known at {point}; leave it out")
  return Fault(**entry)


class Injector:
  """Decides which faults act, and acts. All methods may be called from any thread.

  Attributes: request_id: the request that the event loop works on; points that receive no id take this one.
  """

  def __init__(self, plan: FaultPlan):
    self._lock = threading.Lock()
    self.request_id = ""
    self.replace_plan(plan)

  def replace_plan(self, plan: FaultPlan) -> list[int]:
    """Follows another plan from now on, from its first hit; returns how often each fault of the old one has acted."""
    with self._lock:
      before = getattr(self, "_acted", [])
      self._faults = tuple(enumerate(plan.faults))
      self._hits, self._acted = [0] * len(plan.faults), [0] * len(plan.faults)
      self._random = random.Random(plan.seed)
      self._points = frozenset(fault.point for fault in plan.faults)
      self._row_points = frozenset(fault.point for fault in plan.faults if fault.is_of_rows)
    return before

  def looks_at_rows(self, point: str) -> bool:
    """Whether hit() must be called for each row at this point of steps."""
    return point in self._row_points

  def hit_point(self, point: str, request_id: str | None = None) -> frozenset[str]:
    """The server passes a point: delays, raises and kills.

    Args: request_id: whose hit it is; None: a step's, or that of no request.

    Returns:
      What the caller must do: "drop", "nan".

    Raises:
      InjectedFault: the plan says so.
    """
    if point not in self._points:
      return frozenset()
    acting = []
    with self._lock:
      for index, fault in self._faults:
        if fault.point == point and self._fits(fault, request_id) and self._is_due(index, fault):
          self._acted[index] += 1
          acting.append(fault)
    for fault in acting:
      if fault.action == "delay":
        time.sleep(fault.seconds)
      elif fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
      elif fault.action == "raise":
        raise InjectedFault(f"injected at {point}" + (f" for {request_id}" if request_id else ""))
    return frozenset(fault.action for fault in acting)

  @staticmethod
  def _fits(fault: Fault, request_id: str | None) -> bool:
    if fault.point in _OF_STEPS and fault.is_of_rows != (request_id is not None):
      return False
    return fault.request is None or fnmatch.fnmatchcase(request_id or "", fault.request)

  def _is_due(self, index: int, fault: Fault) -> bool:
    self._hits[index] += 1
    if fault.nth is not None and self._hits[index] != fault.nth:
      return False
    if fault.times is not None and self._acted[index] >= fault.times:
      return False
    return fault.probability is None or self._random.random() < fault.probability


class FaultyRunner:
  """A runner with faults around it; what else the runner has is the runner's."""

  def __init__(self, runner: Any, injector: Injector, block_size: int):
    self._runner, self._injector, self._block_size = runner, injector, block_size
    self._tables: dict[int, list[int]] = {}  # by slot
    self._to_poison: set[str] = set()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._runner, name)

  def write_adapter(self, slot: int, weights: Any) -> None:
    """Implements AdapterWriter, which the engine does not see through __getattr__."""
    self._runner.write_adapter(slot, weights)

  def launch(self, batch: Batch) -> Launched:
    injector = self._injector
    for admission in batch.admissions:
      self._tables[admission.slot] = list(admission.block_ids)
    for slot, _, block in batch.new_blocks:
      self._tables[slot].append(block)
    injector.hit_point("step_begin")
    if injector.looks_at_rows("step_begin"):
      for request_id in batch.request_ids:
        if "nan" in injector.hit_point("step_begin", request_id):
          self._to_poison.add(request_id)
    if self._to_poison:
      self._poison(batch)
    return FaultyStep(self._runner.launch(batch), batch, injector)

  def _poison(self, batch: Batch) -> None:
    """A page that is not full is the row's own, and no other reads it."""
    for request_id, slot, start in zip(batch.request_ids, batch.slots, batch.starts, strict=True):
      if request_id in self._to_poison and start % self._block_size:
        self._to_poison.remove(request_id)
        _fill_with_nan(self._runner, self._tables[slot][start // self._block_size])


def _fill_with_nan(runner: Any, block: int) -> None:
  """Fills a page with NaN in every layer, after the steps that are launched."""
  if isinstance(runner, FakeDevice):
    runner.poison_page(block)
    return
  import jax.numpy as jnp  # takes seconds, and a fake device needs none

  runner.kv = tuple(layer.at[jnp.int32(block)].set(jnp.nan) for layer in runner.kv)


class FaultyStep:
  """A launched step whose values may come late, or not at all."""

  def __init__(self, launched: Launched, batch: Batch, injector: Injector):
    self._launched, self._batch, self._injector = launched, batch, injector

  def result(self) -> StepResult:
    values = self._launched.result()
    self._injector.hit_point("step_end")
    if self._injector.looks_at_rows("step_end"):
      for request_id in self._batch.request_ids:
        self._injector.hit_point("step_end", request_id)
    return values


class FaultyConstraint:
  """A constraint that may fail when the engine reads the allowed tokens."""

  def __init__(self, constraint: Constraint, request_id: str, injector: Injector):
    self._constraint, self._request_id, self._injector = constraint, request_id, injector

  @property
  def is_done(self) -> bool:
    return self._constraint.is_done

  def allowed(self) -> bytes:
    self._injector.hit_point("constraint", self._request_id)
    return self._constraint.allowed()

  def accept(self, token: int) -> None:
    self._constraint.accept(token)


def inject_engine(engine: Engine, injector: Injector) -> None:
  """Puts the points of an engine in place. Before its loop runs."""
  if isinstance(engine, DisaggregatedEngine):
    sides = [engine.prefill, engine.decode]
    engine._outer_emit = _faulty_emit(engine._outer_emit, injector)
  else:
    sides = [engine]
    engine.emit = _faulty_emit(engine.emit, injector)
  for side in sides:
    _inject_side(side, injector)
  submit_all = engine.submit_all

  def faulty_submit_all(requests: Sequence[Request]) -> None:
    for request in requests:
      injector.hit_point("admit", request.id)
      if request.constraint is not None:
        request.constraint = FaultyConstraint(request.constraint, request.id, injector)
    submit_all(requests)

  engine.submit_all = faulty_submit_all  # type: ignore[method-assign]


def _inject_side(engine: Engine, injector: Injector) -> None:
  scheduler = engine._scheduler
  engine._runner = FaultyRunner(engine._runner, injector, engine.config.block_size)
  schedule, take_back = scheduler.schedule, scheduler._take_back

  def faulty_schedule(now: float) -> Batch | None:
    injector.hit_point("schedule")
    return schedule(now)

  def faulty_take_back(request: Request) -> None:
    if "drop" not in injector.hit_point("free", request.id):
      take_back(request)

  scheduler.schedule = faulty_schedule  # type: ignore[method-assign]
  scheduler._take_back = faulty_take_back  # type: ignore[method-assign]


def _faulty_emit(emit: Emit, injector: Injector) -> Emit:
  def faulty_emit(events: list[TokenEvent]) -> None:
    kept = []
    for event in events:
      point = "emit" if event.finish_reason is None else "final_emit"
      if "drop" not in injector.hit_point(point, event.request_id):
        kept.append(event)
    emit(kept)

  return faulty_emit
