"""Who goes first, and how much of a step anyone may have: order and shares only. Pure Python; touches no block.

  fcfs      first come, first served
  priority  lower numbers first, with aging
  sjf       fewest declared max_tokens first, with aging: short answers do not wait behind long ones
  fair      the tenant that has had least goes first (Virtual Token Counter, OSDI 2024)
  tiers     interactive requests (priority 0 or less) have a share of every step and of the slots to themselves

The Scheduler owns the mechanism and calls a policy. rank() orders requests: the lowest gets blocks first, and
the highest running one is preempted first. candidates() orders admission, by rank unless a policy overrides it.

The Scheduler calls rank() of a static policy (`is_dynamic = False`, the default) once, on arrival. It calls rank() of a
dynamic policy for every running and waiting request in each step that it plans. A dynamic rank may depend on all that
changes: `now`, request.num_computed_tokens, request.num_tokens (prompt and outputs so far), num_preemptions. That costs
about 1 us a request: with 256 running and 1,000 waiting ones, schedule() takes 1.4 ms instead of 0.2 ms (2 cores). Two
rules hold for both kinds:

  - The Scheduler undoes nothing that it planned: a new rank matters from the next step on.
  - While all running requests decode and none can join, the Scheduler repeats the previous step without the policy. It
    calls the policy again before it preempts or admits. It calls a policy that overrides begin_step() or holds_back()
    in every step, so the fast path of steady_decode.py is off.

A user names their own policy as MODULE:CLASS (docs/how-to/write-a-policy.md). Sluice's policies are classes here, and
names in POLICIES, from which the tests take them.
"""

from collections import deque
from collections.abc import Iterator
import importlib
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.request import Request
from engine.settings import POLICIES


class Policy:
  """The hooks of a policy. This base class (fcfs) orders requests by arrival and gives no shares.

  Attributes:
    is_dynamic: the Scheduler computes every rank again in each step that it plans.
  """

  is_dynamic = False

  def __init__(self, config: EngineConfig):
    """Args: config: the settings of all policies."""

  def rank(self, request: Request, now: float) -> tuple[float, ...]:
    """Lower goes first; ties go by arrival. All ranks of a policy have one length.

    Args:
      request: for reading only.
      now: engine clock, seconds; on arrival it is request.arrival_time.
    """
    return (request.arrival_time,)

  def candidates(self, waiting: list[Request]) -> Iterator[Request]:
    """The waiting requests in the order in which they may join. `waiting` is sorted by rank, and loses who joined."""
    return iter(tuple(waiting))

  def begin_step(self, running: list[Request], waiting: list[Request]) -> None:
    """A step is about to be planned. Both lists are read only. The Scheduler computes dynamic ranks after this."""

  def holds_back(self, request: Request) -> bool:
    """Whether a running request is left out of this step."""
    return False

  def grant_tokens(self, request: Request, count: int) -> int:
    """How many prompt tokens the request may have in this step, of the `count` that the step can still take."""
    return count

  def may_join(self, request: Request) -> bool:
    """Whether a waiting request may have a slot; who is stepped over keeps its place."""
    return True

  def note_arrival(self, request: Request) -> None:
    """A new request is queued."""

  def note_ending(self, request: Request) -> None:
    """A request has ended."""

  def charge_step(self, requests: list[Request], counts: tuple[int, ...], tokens: int) -> None:
    """A step of a rung of `tokens` is planned, of `counts[i]` tokens of `requests[i]`."""

  def note_step_time(self, tokens: int, seconds: float) -> None:
    """A step of a rung of `tokens` took this long."""

  def state(self) -> dict[str, Any]:
    """What it remembers between steps, as plain JSON values, for a trace."""
    return {}

  def restore_state(self, state: dict[str, Any]) -> None:
    """Takes back what `state` gave."""


class Priority(Policy):
  """Lower priority number first; waiting `aging_s` seconds is worth one unit, so nobody starves.

  At time t a request counts as priority - (t - arrival) / aging_s. The t is common to all, so the order is that of
  priority + arrival / aging_s and never changes: ageing costs nothing.
  """

  def __init__(self, config: EngineConfig):
    self._aging_s = config.aging_s

  def rank(self, request: Request, now: float) -> tuple[float, ...]:
    aged = request.arrival_time / self._aging_s if self._aging_s else 0.0
    return (request.priority + aged, request.arrival_time)


class ShortestJobFirst(Policy):
  """Fewest max_tokens first; a second of waiting is worth `sjf_aging_tokens_per_s` of them.

  A request for n tokens is overtaken only by what arrives within n / sjf_aging_tokens_per_s seconds after it.
  """

  def __init__(self, config: EngineConfig):
    self._tokens_per_s = config.sjf_aging_tokens_per_s

  def rank(self, request: Request, now: float) -> tuple[float, ...]:
    return (request.params.max_tokens + request.arrival_time * self._tokens_per_s, request.arrival_time)


_GUESSED_TOKEN_S = 1e-3  # of a rung that was never measured


class Fair(Policy):
  """Admits for the tenant that has used least (Virtual Token Counter, Sheng et al., OSDI 2024).

  It counts seconds, not tokens: each token of a step costs its part of the recent mean time of that rung. So a tenant
  pays for the padding and the prefill that its requests cause. A tenant that was away returns with the least usage of
  those that stayed: it cannot save up what it did not use.
  """

  def __init__(self, config: EngineConfig):
    self._used: dict[str, float] = {}  # seconds, by tenant
    self._live: dict[str, int] = {}  # requests, by tenant; those without are absent
    self._step_s: dict[int, float] = {}  # by rung
    self._per_token_s = _GUESSED_TOKEN_S  # of the latest step

  def candidates(self, waiting: list[Request]) -> Iterator[Request]:
    queues: dict[str, deque[Request]] = {}
    for request in waiting:
      queues.setdefault(request.tenant, deque()).append(request)
    used = {name: self._used[name] for name in queues}
    while queues:
      # Equals, as who comes back and the poorest of those who stayed: who has fewer requests goes first.
      tenant = min(queues, key=lambda name: (used[name], self._live[name], queues[name][0].rank))
      request = queues[tenant].popleft()
      if not queues[tenant]:
        del queues[tenant]
      yield request
      used[tenant] += request.num_prompt_tokens * self._per_token_s  # until ran() knows what it really is

  def note_arrival(self, request: Request) -> None:
    tenant = request.tenant
    if tenant not in self._live:
      self._used[tenant] = max(self._used.get(tenant, 0.0), self._floor())
    self._live[tenant] = self._live.get(tenant, 0) + 1

  def note_ending(self, request: Request) -> None:
    left = self._live[request.tenant] - 1
    if left:
      self._live[request.tenant] = left
      return
    del self._live[request.tenant]
    floor = self._floor()  # whoever has used no more would come back with as much: its name need not be kept
    self._used = {name: used for name, used in self._used.items() if name in self._live or used > floor > 0.0}

  def _floor(self) -> float:
    return min((self._used[name] for name in self._live), default=0.0)

  def charge_step(self, requests: list[Request], counts: tuple[int, ...], tokens: int) -> None:
    self._per_token_s = self._step_s.get(tokens, _GUESSED_TOKEN_S * tokens) / sum(counts)
    for request, count in zip(requests, counts, strict=True):
      self._used[request.tenant] += count * self._per_token_s

  def note_step_time(self, tokens: int, seconds: float) -> None:
    known = self._step_s.get(tokens)
    self._step_s[tokens] = seconds if known is None else known + 0.1 * (seconds - known)

  def state(self) -> dict[str, Any]:
    return {
      "used": dict(self._used),
      "live": dict(self._live),
      "step_s": list(self._step_s.items()),
      "per_token_s": self._per_token_s,
    }

  def restore_state(self, state: dict[str, Any]) -> None:
    self._used, self._live = dict(state["used"]), dict(state["live"])
    self._step_s = dict(state["step_s"])
    self._per_token_s = state["per_token_s"]


class Tiers(Policy):
  """Two latency tiers: interactive requests have priority 0 or less, batch work has more.

  Of the slots, and of a step's prompt tokens while interactive requests are live, `share` is for interactive requests
  alone. Batch rows of more than `long_context` tokens make a step slow for all, so while interactive requests run they
  take part in one step of `_LONG_PERIOD`. A batch request is overtaken only by what arrives within `delay_s` after it.
  """

  def __init__(self, config: EngineConfig):
    self._delay_s = config.tier_delay_s
    self._long_context = config.tier_long_context or config.max_model_len
    self._batch_slots = max(1, int(config.max_num_seqs * (1.0 - config.tier_share)))
    self._batch_tokens = max(1, int(config.prefill_chunk * (1.0 - config.tier_share)))
    self._step = 0
    # Of the step at hand:
    self._slots_left = self._tokens_left = 0
    self._interactive_runs = False

  def rank(self, request: Request, now: float) -> tuple[float, ...]:
    return (request.arrival_time + (self._delay_s if _is_batch(request) else 0.0),)

  def begin_step(self, running: list[Request], waiting: list[Request]) -> None:
    num_batch = sum(map(_is_batch, running))
    self._interactive_runs = any(
      not _is_batch(request) and request.num_computed_tokens < request.max_computed_tokens for request in running
    )
    self._slots_left = self._batch_slots - num_batch
    shared = num_batch < len(running) or not all(map(_is_batch, waiting))
    self._tokens_left = self._batch_tokens if shared else _EVERYTHING

  def holds_back(self, request: Request) -> bool:
    return (
      self._interactive_runs
      and self._step % _LONG_PERIOD != 0
      and _is_batch(request)
      and request.num_computed_tokens > self._long_context
    )

  def grant_tokens(self, request: Request, count: int) -> int:
    if not _is_batch(request):
      return count
    granted = min(count, self._tokens_left)
    self._tokens_left -= granted
    return granted

  def may_join(self, request: Request) -> bool:
    if not _is_batch(request):
      return True
    self._slots_left -= 1
    return self._slots_left >= 0

  def charge_step(self, requests: list[Request], counts: tuple[int, ...], tokens: int) -> None:
    self._step += 1  # steps, not looks at an empty queue: those leave no line in a trace

  def state(self) -> dict[str, Any]:
    return {"step": self._step}

  def restore_state(self, state: dict[str, Any]) -> None:
    self._step = state["step"]


_LONG_PERIOD = 4
_EVERYTHING = 1 << 30


def _is_batch(request: Request) -> bool:
  return request.priority > 0


_CLASSES: dict[str, type[Policy]] = {
  "fcfs": Policy,
  "priority": Priority,
  "sjf": ShortestJobFirst,
  "fair": Fair,
  "tiers": Tiers,
}
assert set(_CLASSES) == set(POLICIES)


def find_policy_class(name: str) -> type[Policy]:
  """The class that a policy's name stands for: one of POLICIES, or MODULE:CLASS, which is imported.

  Raises:
    ConfigError: the module cannot be imported, or what it has under that name is no policy.
  """
  if name in _CLASSES:
    return _CLASSES[name]
  module_name, _, class_name = name.partition(":")
  remedy = (
    f"set --policy to one of {', '.join(POLICIES)}, or to MODULE:CLASS of a module that Python finds (PYTHONPATH)"
  )
  try:
    found = getattr(importlib.import_module(module_name), class_name)
  except Exception as error:  # the user's module may raise anything
    raise ConfigError(f"policy={name!r} cannot be imported ({type(error).__name__}: {error}); {remedy}") from error
  if not (isinstance(found, type) and issubclass(found, Policy)):
    raise ConfigError(f"policy={name!r} is not a subclass of engine.policy.Policy; derive it from that class")
  return found


def make_policy(config: EngineConfig) -> Policy:
  """The policy that `config.policy` names. Raises ConfigError."""
  return find_policy_class(config.policy)(config)
