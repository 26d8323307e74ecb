"""Who goes first: order only. Pure Python; touches no block and no budget.

The Scheduler owns the mechanism and asks. The order's rank() decides admissions, who gets blocks first and, read from
the other end, who is preempted. To add a policy, add a class and its name in the table, then tests by literal lists.
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


POLICIES = ("fcfs", "priority")


def make_order(config: EngineConfig) -> Order:
  """The order that `config.policy` names; raises ConfigError."""
  match config.policy:
    case "fcfs":
      return Fcfs()
    case "priority":
      return Priority(config.aging_s)
  raise ConfigError(f"policy={config.policy!r} is unknown; set --policy to one of {', '.join(POLICIES)}")
