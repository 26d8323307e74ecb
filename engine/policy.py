"""Who goes first, and when newcomers may join: order and gate only. Pure Python; touches no block and no budget.

The Scheduler owns the mechanism and asks two questions. The order's rank() decides admissions, who gets blocks first
and, read from the other end, who is preempted. The gate decides whether anyone may join at all. To add a policy, add a
class and its name in the table, then tests by literal lists.
"""

import dataclasses
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.request import Request


class Order(Protocol):
  """A total order of requests that does not change with time, so that queues stay sorted once sorted."""

  def rank(self, request: Request) -> tuple[float, ...]:
    """Lower goes first. The Scheduler adds the order of arrival to break ties."""
    ...


class Fcfs:
  """First come, first served; priority is ignored."""

  def rank(self, request: Request) -> tuple[float, ...]:
    return (request.arrival_time,)


@dataclasses.dataclass(frozen=True)
class Priority:
  """Lower priority number first; waiting `aging_s` seconds is worth one unit, so nobody starves.

  At time t a request counts as priority - (t - arrival) / aging_s. The t is common to all, so the order is that of
  priority + arrival / aging_s and never changes: ageing costs nothing.
  """

  aging_s: float

  def rank(self, request: Request) -> tuple[float, ...]:
    aged = request.arrival_time / self.aging_s if self.aging_s else 0.0
    return (request.priority + aged, request.arrival_time)


class Gate(Protocol):
  """Whether waiting requests may join those that run."""

  def is_open(self, num_running: int) -> bool:
    """Asked before admissions of a step."""
    ...

  def full(self, num_running: int) -> None:
    """Told when admissions of a step ended for want of anything but tokens: queue, slots or blocks."""
    ...

  def min_tokens(self) -> int:
    """The step is padded to the rung of at least this many tokens."""
    ...

  def state(self) -> int:
    """What it remembers, for a trace; make_gate() takes it back."""
    ...


class Continuous:
  """Iteration-level batching (Orca, OSDI 2022): sequences join and leave at every step."""

  def is_open(self, num_running: int) -> bool:
    return True

  def full(self, num_running: int) -> None:
    pass

  def min_tokens(self) -> int:
    return 1

  def state(self) -> int:
    return 0


class Static:
  """Pad and run to completion, to compare with: a wave is admitted, and keeps its width until the last one ends."""

  def __init__(self, width: int = 0):
    self._width = width  # of the closed wave; 0 while it is still filling

  def is_open(self, num_running: int) -> bool:
    if num_running == 0:
      self._width = 0
    return self._width == 0

  def full(self, num_running: int) -> None:
    self._width = num_running

  def min_tokens(self) -> int:
    return max(1, self._width)

  def state(self) -> int:
    return self._width


POLICIES = ("fcfs", "priority")
BATCHING = ("continuous", "static")


def make_order(config: EngineConfig) -> Order:
  """The order that `config.policy` names; raises ConfigError."""
  match config.policy:
    case "fcfs":
      return Fcfs()
    case "priority":
      return Priority(config.aging_s)
  raise ConfigError(f"policy={config.policy!r} is unknown; set --policy to one of {', '.join(POLICIES)}")


def make_gate(config: EngineConfig, state: int = 0) -> Gate:
  """The gate that `config.batching` names, remembering `state`; raises ConfigError."""
  match config.batching:
    case "continuous":
      return Continuous()
    case "static":
      return Static(state)
  raise ConfigError(f"batching={config.batching!r} is unknown; set --batching to one of {', '.join(BATCHING)}")
