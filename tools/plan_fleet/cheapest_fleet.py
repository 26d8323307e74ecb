"""Finds the fleet with the fewest device-hours that meets objectives on a trace. Knows no flag."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from tools.plan_fleet.counted_fleet import CountedFleet, FleetPlan
from tools.plan_fleet.fleet_trace import FleetTrace
from tools.simulate.step_costs import StepCosts


@dataclasses.dataclass(frozen=True)
class FleetObjectives:
  """Limits of percentiles over all requests or gaps, in milliseconds; infinity sets none. Every request must end."""

  ttft_p50_ms: float = math.inf
  ttft_p99_ms: float = math.inf
  itl_p99_ms: float = math.inf
  tpot_p99_ms: float = math.inf

  def __post_init__(self):
    if min(dataclasses.astuple(self)) == math.inf:
      raise ConfigError(
        "the search has no objective; set --slo_ttft_p50_ms, --slo_ttft_p99_ms, --slo_gap_p99_ms or --slo_tpot_p99_ms"
      )

  def margins(self, figures: dict[str, Any]) -> dict[str, float]:
    """Returns what is left of each limit as a share of it; below 0: missed."""
    found = {}
    for field in dataclasses.fields(self):
      limit, value = getattr(self, field.name), figures.get(field.name)
      if limit < math.inf:
        found[field.name] = -math.inf if value is None else round(1 - value / limit, 4)
    if figures["completed"] < figures["requests"]:
      found["completed"] = figures["completed"] / figures["requests"] - 1
    return found


@dataclasses.dataclass(frozen=True)
class FleetCandidate:
  """A kind of fleet, of which the search finds the number.

  Attributes:
    plan: its smallest form.
    config, costs: of every engine.
  """

  plan: FleetPlan
  config: EngineConfig
  costs: StepCosts

  @property
  def devices(self) -> int:
    """Devices of the smallest form."""
    return self.plan.num_replicas * self.plan.devices_per_replica

  def times(self, count: int) -> FleetPlan:
    """Returns the fleet `count` times as large."""
    plan = self.plan
    return dataclasses.replace(
      plan,
      replicas=plan.replicas * count,
      prefill_replicas=plan.prefill_replicas * count,
      decode_replicas=plan.decode_replicas * count,
    )


def find_smallest(
  candidate: FleetCandidate,
  objectives: FleetObjectives,
  trace: FleetTrace,
  most: int,
  report: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, float]] | None:
  """Returns figures and margins of the smallest multiple, at most `most`, that meets the objectives; None if none does.

  Doubles the number, then halves the interval, as if more replicas never served worse. A run stops once too many first
  tokens were late.
  """

  def attempt(count: int) -> tuple[dict[str, Any], dict[str, float]] | None:
    plan = candidate.times(count)
    fleet = CountedFleet(candidate.config, candidate.costs, plan, trace)
    most_late = 0.01 * len(trace) + 1 if objectives.ttft_p99_ms < math.inf else math.inf
    limit_s = objectives.ttft_p99_ms / 1e3
    if not fleet.run(limit_s, most_late):
      report(f"{plan.describe()}: more than 1 % of first tokens later than {objectives.ttft_p99_ms:g} ms")
      return None
    figures = fleet.figures()
    margins = objectives.margins(figures)
    name, margin = min(margins.items(), key=lambda item: item[1])
    report(f"{plan.describe()}: {name} {'meets' if margin >= 0 else 'misses'} its limit by {abs(margin):.1%}")
    return (figures, margins) if margin >= 0 else None

  low, high, best = 0, 1, attempt(1) if most >= 1 else None
  while best is None:
    if high >= most:
      return None
    low, high = high, min(2 * high, most)
    best = attempt(high)
  while high - low > 1:
    middle = (low + high) // 2
    found = attempt(middle)
    if found is None:
      low = middle
    else:
      high, best = middle, found
  return best


def find_cheapest(
  candidates: Sequence[FleetCandidate],
  objectives: FleetObjectives,
  trace: FleetTrace,
  max_replicas: int,
  report: Callable[[str], None],
) -> list[dict[str, Any]]:
  """Returns a row for each candidate, the fewest device-hours first; those that cannot be cheaper are left out early.

  Raises:
    ConfigError: none meets the objectives with `max_replicas`.
  """
  rows: list[dict[str, Any]] = []
  fewest = math.inf  # devices of the best so far
  for candidate in candidates:
    most = max_replicas // candidate.plan.num_replicas
    if fewest < math.inf:
      most = min(most, math.ceil(fewest / candidate.devices))
    found = find_smallest(candidate, objectives, trace, most, report)
    kind = candidate.plan.describe()
    if found is None:
      rows.append({"kind": kind, "device_hours": None, "tried_up_to": candidate.times(max(1, most)).describe()})
      continue
    figures, margins = found
    rows.append({"kind": kind, "margins": margins} | figures)
    devices = figures["most_replicas"] * candidate.plan.devices_per_replica
    fewest = min(fewest, devices)
  if all(row["device_hours"] is None for row in rows):
    raise ConfigError(
      f"no fleet of up to {max_replicas} replicas meets the objectives; raise --max_replicas or the objectives, or try "
      "other values of --tp and --ratios"
    )
  return sorted(rows, key=lambda row: math.inf if row["device_hours"] is None else row["device_hours"])
