"""Decides how many replicas serve, from each replica's queue, rows and KV. Imports no Ray; keeps no state.

Serve asks every replica for `LoadFigures` each metrics_interval_s, averages them over look_back_period_s, calls the
policy, and applies its own bounds and delays to the result.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

# Names of the figures in Serve's reports.
REQUESTS, ROWS, KV_USAGE = "sluice_requests", "sluice_rows", "sluice_kv_usage"


@dataclasses.dataclass(frozen=True)
class LoadFigures:
  """One replica's load.

  Attributes:
    requests: requests that run or wait in the engine.
    rows: requests that can run at once (--max_num_seqs).
    kv_usage: share of the KV blocks that running requests hold, 0 to 1; cached prefixes do not count.
  """

  requests: float
  rows: float
  kv_usage: float

  def report(self) -> dict[str, float]:
    """Returns the figures by name, as Serve's record_autoscaling_stats expects them."""
    return {REQUESTS: float(self.requests), ROWS: float(self.rows), KV_USAGE: float(self.kv_usage)}


def count_needed_replicas(
  loads: Mapping[str, LoadFigures], queued_at_proxies: float, *, target_rows: float, target_kv: float
) -> int:
  """Returns how many replicas would have their target load. At least 1.

  Args:
    loads: the figures of every replica that reported, by its name.
    queued_at_proxies: requests that Serve has not yet sent to a replica.
    target_rows: wanted share of the rows in use, above 0.
    target_kv: wanted share of the KV blocks in use, above 0.
  """
  if not loads:
    return 1
  # A replica needs as many replicas as its scarcer resource says; with long prompts that is KV, else rows.
  needed = sum(max(load.requests / (target_rows * load.rows), load.kv_usage / target_kv) for load in loads.values())
  rows = sum(load.rows for load in loads.values()) / len(loads)
  needed += queued_at_proxies / (target_rows * rows)
  # A hair of the mean must not cost a replica.
  return max(1, math.ceil(needed - 0.01))


class SluicePolicy:
  """The policy of a deployment, for Serve's AutoscalingPolicy(policy_function=..., policy_kwargs=...)."""

  def __init__(self, target_rows: float, target_kv: float):
    """Args: see `count_needed_replicas`."""
    self._target_rows, self._target_kv = target_rows, target_kv

  def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
    """Returns the wanted number of replicas and this policy's state, of which it has none.

    Args:
      context: Serve's AutoscalingContext.
    """
    metrics = context.aggregated_metrics or {}
    loads = {
      str(replica): LoadFigures(requests, metrics[ROWS][replica], metrics[KV_USAGE][replica])
      for replica, requests in metrics.get(REQUESTS, {}).items()
      if replica in metrics.get(ROWS, {}) and replica in metrics.get(KV_USAGE, {})
    }
    if not loads:
      return context.target_num_replicas, {}  # no replica has reported since it started
    needed = count_needed_replicas(
      loads, context.total_queued_requests or 0.0, target_rows=self._target_rows, target_kv=self._target_kv
    )
    return needed, {}
