"""Runs a trace through a fleet of counted replicas: router, KV transfers, host pools, autoscaling, lost replicas.

Events run in time order. The router's policies are engine.routing's. tools.plan_fleet.counted_replica serves requests;
tools.plan_fleet.fleet_trace holds the trace. Imports no jax, knows no flag.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
import dataclasses
import heapq
import itertools
import math
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.routing import RoutingPolicy, make_routing_policy
from tools.plan_fleet.counted_replica import NEVER, CountedReplica, CountedRequest, StepTimes, check_modelled
from tools.plan_fleet.fleet_trace import FleetTrace
from tools.plan_fleet.gap_counts import GapCounts
from tools.report.latency import percentile
from tools.simulate.events import check_replica_counts
from tools.simulate.step_costs import StepCosts


@dataclasses.dataclass(frozen=True)
class ScalingRule:
  """When replicas start and stop; applied every `interval_s`.

  The wanted number is the load over `target_load`, or what brings the KV usage to `target_kv`, whichever is larger.

  Attributes:
    min_replicas, max_replicas: limits of the wanted number; equal: no scaling.
    target_load: unfinished requests of a replica.
    target_kv: share of a replica's KV blocks in use.
    start_s: from the decision until a new replica takes requests.
    up_delay_s, down_delay_s: how long more or fewer must be wanted first.
    interval_s: time between decisions.
  """

  min_replicas: int = 1
  max_replicas: int = 1
  target_load: float = 16.0
  target_kv: float = 0.8
  start_s: float = 60.0
  up_delay_s: float = 30.0
  down_delay_s: float = 300.0
  interval_s: float = 10.0

  def __post_init__(self):
    if not 1 <= self.min_replicas <= self.max_replicas:
      raise ConfigError(
        f"autoscale={self.min_replicas}:{self.max_replicas} must be MIN:MAX with 1 <= MIN <= MAX; set --autoscale"
      )
    limits = {"target_load": (self.target_load, math.inf), "target_kv": (self.target_kv, 1.0)}
    limits["scale_interval_s"] = (self.interval_s, math.inf)
    for name, (value, most) in limits.items():
      if not 0 < value <= most:
        raise ConfigError(f"{name}={value:g} must be above 0 and at most {most:g}; set --{name}")
    for name, value in (
      ("start_s", self.start_s),
      ("scale_up_delay_s", self.up_delay_s),
      ("scale_down_delay_s", self.down_delay_s),
    ):
      if not 0 <= value < math.inf:
        raise ConfigError(f"{name}={value:g} must be a finite time of 0 or more; set --{name}")


@dataclasses.dataclass(frozen=True)
class FleetPlan:
  """A fleet: numbers, links, pools.

  Attributes:
    replicas: engines that prefill and decode; with `prefill_replicas`, 0.
    prefill_replicas, decode_replicas: engines of one phase each; both or neither.
    router: name in engine.routing.POLICIES.
    devices_per_replica: for device-hours; the tensor parallel degree.
    transfer_bytes_s, transfer_latency_s: KV from a prefill replica to a decode replica.
    host_kv_bytes, host_bytes_s, host_latency_s: host pool of a replica, and loads from it.
    scaling: None keeps the number of replicas.
    losses: (seconds, replica) at which a replica is lost; another one is ready `scaling.start_s`, or 60 s, later.
  """

  replicas: int = 1
  prefill_replicas: int = 0
  decode_replicas: int = 0
  router: str = "least_loaded"
  devices_per_replica: int = 1
  transfer_bytes_s: float = 50e9
  transfer_latency_s: float = 0.0
  host_kv_bytes: float = 0.0
  host_bytes_s: float = 20e9
  host_latency_s: float = 0.0
  scaling: ScalingRule | None = None
  losses: tuple[tuple[float, int], ...] = ()

  def __post_init__(self):
    check_replica_counts(self.replicas, self.prefill_replicas, self.decode_replicas)
    if self.is_split and (self.scaling or self.losses):
      raise ConfigError(
        f"prefill_replicas={self.prefill_replicas}: autoscaling and lost replicas are modelled for one kind of replica "
        "only; leave out --autoscale and --lose, or set --replicas"
      )
    if self.devices_per_replica < 1:
      raise ConfigError(f"devices_per_replica={self.devices_per_replica} must be at least 1; set --tp")
    rates = {"transfer_gb_s": self.transfer_bytes_s, "host_gb_s": self.host_bytes_s}
    for name, value in rates.items():
      if not value > 0:
        raise ConfigError(f"{name}={value / 1e9:g} must be above 0; set --{name}")
    for name, value in {
      "transfer_latency_ms": self.transfer_latency_s,
      "host_latency_ms": self.host_latency_s,
      "host_kv_mb": self.host_kv_bytes,
    }.items():
      if not 0 <= value < math.inf:
        raise ConfigError(f"{name}={value:g} must be a finite number of 0 or more; set --{name}")
    for second, replica in self.losses:
      if not (0 <= second < math.inf and 0 <= replica < self.replicas):
        raise ConfigError(
          f"lose={second:g}:{replica} must be a time of 0 or more and a replica below {self.replicas}; set --lose"
        )
    make_routing_policy(self.router)

  @property
  def is_split(self) -> bool:
    """Whether prefill and decode run on different engines."""
    return self.prefill_replicas > 0

  @property
  def num_replicas(self) -> int:
    """The replicas at the start."""
    return self.prefill_replicas + self.decode_replicas if self.is_split else self.replicas

  def describe(self) -> str:
    """Returns the numbers as words."""
    kinds = f"{self.prefill_replicas} prefill + {self.decode_replicas} decode" if self.is_split else f"{self.replicas}"
    return kinds if self.devices_per_replica == 1 else f"{kinds}, tp {self.devices_per_replica}"


class CountedFleet:
  """Runs a trace through a fleet, once. Implements counted_replica.EndingSink."""

  def __init__(self, config: EngineConfig, costs: StepCosts, plan: FleetPlan, trace: FleetTrace):
    """Raises ConfigError for what the counts do not model, and for keys that do not cover whole blocks."""
    check_modelled(config)
    size = config.block_size
    if trace.key_tokens % size:
      raise ConfigError(
        f"block_size={size} does not divide the {trace.key_tokens} tokens of the trace's keys; set --block_size"
      )
    if (plan.is_split or plan.host_kv_bytes) and not costs.kv_bytes_per_token:
      raise ConfigError("the cost table has no kv_bytes_per_token, which transfers of KV need; measure again")
    self.config, self.costs, self.plan, self.trace = config, costs, plan, trace
    self.gaps = GapCounts()
    self._times = StepTimes(costs, config)
    self._front_s = costs.host.front_s
    self._events: list[tuple[float, int, int]] = []  # (time, replica, version)
    self._landings: list[
      tuple[float, int, CountedRequest, CountedReplica, bool]
    ] = []  # the last: a load from a host pool
    self._serials = itertools.count()
    self.replicas: list[CountedReplica] = []
    self._link_free_s: list[float] = []
    for _ in range(plan.num_replicas):
      self._add_replica()
    self._front = self.replicas[: plan.prefill_replicas] if plan.is_split else list(self.replicas)
    self._decoders = self.replicas[plan.prefill_replicas :]
    self._policy: RoutingPolicy = make_routing_policy(plan.router)
    self._decode_policy: RoutingPolicy = make_routing_policy(plan.router)
    # Latencies, in seconds.
    self.ttfts, self.tpots, self.e2es = array("d"), array("d"), array("d")
    self.errors: Counter[str] = Counter()
    self.output_tokens = self.host_tokens = self.transfer_tokens = self.retries = 0
    self.last_token_s = -math.inf
    self.late_firsts = 0
    self._ttft_limit_s = math.inf
    # Scaling.
    self._starting: list[tuple[float, int]] = []  # (ready, started) of replicas that do not take requests yet
    self._draining: list[CountedReplica] = []
    self._alive_since: dict[int, float] = {replica.name: 0.0 for replica in self.replicas}
    self._replica_s = 0.0
    self._more_since = self._fewer_since = -1.0
    self.most_replicas = len(self.replicas)

  def _add_replica(self) -> CountedReplica:
    plan, trace = self.plan, self.trace
    host_keys = 0
    if plan.host_kv_bytes and trace.key_tokens:
      host_keys = int(plan.host_kv_bytes / (self.costs.kv_bytes_per_token * trace.key_tokens))
    replica = CountedReplica(len(self.replicas), self.config, self._times, self, self.gaps, trace.key_tokens, host_keys)
    self.replicas.append(replica)
    self._link_free_s.append(0.0)
    return replica

  # The run.

  def run(self, ttft_limit_s: float = math.inf, most_late: float = math.inf) -> bool:
    """Runs until the end, or until over `most_late` first tokens came after `ttft_limit_s`; returns True at the end."""
    trace, plan, front_s = self.trace, self.plan, self._front_s
    self._ttft_limit_s = ttft_limit_s
    events, landings, replicas = self._events, self._landings, self.replicas
    arrivals, count, index = trace.arrivals, len(trace), 0
    rule = plan.scaling
    ticks = rule is not None and rule.max_replicas > rule.min_replicas
    tick_s = rule.interval_s if rule is not None and ticks else NEVER
    losses = sorted(plan.losses, reverse=True)
    while True:
      arrival_s = arrivals[index] + front_s if index < count else NEVER
      event_s = events[0][0] if events else NEVER
      landing_s = landings[0][0] if landings else NEVER
      if event_s < arrival_s and event_s < landing_s and event_s < tick_s and not (losses and losses[-1][0] <= event_s):
        _, name, version = heapq.heappop(events)
        replica = replicas[name]
        if replica.version == version:
          replica.advance()
          if replica.next_s != NEVER:
            heapq.heappush(events, (replica.next_s, name, replica.version))
        continue
      next_s = min(arrival_s, landing_s, event_s)
      if next_s == NEVER or self.late_firsts > most_late:
        break
      if losses and losses[-1][0] <= min(next_s, tick_s):
        self._lose(*losses.pop())
      elif tick_s <= next_s:
        if self._starting and self._starting[0][0] <= tick_s:
          self._open_ready(tick_s)
        self._scale(tick_s)
        tick_s += rule.interval_s  # type: ignore[union-attr]
      elif arrival_s <= landing_s:
        if self._starting and self._starting[0][0] <= arrival_s:
          self._open_ready(arrival_s)
        self._arrive(index, arrivals[index], arrival_s)
        index += 1
      else:
        self._land(*heapq.heappop(landings))
    return self.late_firsts <= most_late

  def _arrive(self, index: int, arrival_s: float, now: float) -> None:
    trace, plan = self.trace, self.plan
    prompt, output = trace.prompts[index], trace.outputs[index]
    error = self.replicas[0].check_fits(prompt, output)
    if error:
      self.errors[error] += 1
      return
    request = CountedRequest(index, arrival_s, prompt, 1 if plan.is_split else output, trace.keys_of(index))
    self._route(request, now)

  def _route(self, request: CountedRequest, now: float) -> None:
    if not self._front:
      self.errors["NO_REPLICA"] += 1
      return
    keys = ()
    if self._policy.uses_keys and request.keys:
      keys = request.keys[: (request.prompt - 1) // self.trace.key_tokens]
    replica = self._policy.choose(self._front, keys)
    replica.load += 1
    self._submit(replica, request, now)

  def _submit(self, replica: CountedReplica, request: CountedRequest, now: float) -> None:
    version = replica.version
    replica.submit(request, now)
    self._note_version(replica, version)

  def _note_version(self, replica: CountedReplica, version: int) -> None:
    if replica.version != version:
      heapq.heappush(self._events, (replica.next_s, replica.name, replica.version))

  def _land(self, when: float, _: int, request: CountedRequest, replica: CountedReplica, is_load: bool) -> None:
    if replica.name not in self._alive_since:  # its requests went elsewhere when it was lost
      return
    if not is_load:
      self._submit(replica, request, when)
      return
    version = replica.version
    self.host_tokens += replica.finish_load(request, when) * self.trace.key_tokens
    self._note_version(replica, version)

  # What replicas report.

  def first_token(self, request: CountedRequest, now: float) -> None:
    """Counts a time to first token."""
    ttft_s = now - request.arrival_s
    self.ttfts.append(ttft_s)
    self.late_firsts += ttft_s > self._ttft_limit_s

  def ended(self, replica: CountedReplica, request: CountedRequest, now: float) -> None:
    """Counts a request, or sends its KV on."""
    replica.load -= 1
    self.last_token_s = max(self.last_token_s, now)
    self.output_tokens += request.output if not self.plan.is_split or request.output == 1 else request.output - 1
    output = self.trace.outputs[request.index]
    if request.sampled < output:
      self._send_kv(replica, request, output, now)
      return
    self.e2es.append(now - request.arrival_s)
    if output > 1:
      self.tpots.append((now - request.first_s) / (output - 1))

  def begin_load(self, replica: CountedReplica, request: CountedRequest, keys: int, now: float) -> None:
    """Starts a load from a replica's host pool; one runs at a time."""
    plan = self.plan
    size = keys * self.trace.key_tokens * self.costs.kv_bytes_per_token
    when = now + plan.host_latency_s + size / plan.host_bytes_s
    heapq.heappush(self._landings, (when, next(self._serials), request, replica, True))

  def _send_kv(self, replica: CountedReplica, request: CountedRequest, output: int, now: float) -> None:
    """Sends a prompt's KV from a prefill replica, once its link is free."""
    plan, link = self.plan, self._link_free_s
    moved = CountedRequest(request.index, request.arrival_s, request.prompt, output)
    moved.sampled, moved.known, moved.transferred = 1, request.prompt + 1, request.prompt
    moved.first_s = moved.last_s = request.first_s
    self.transfer_tokens += request.prompt
    size = request.prompt * self.costs.kv_bytes_per_token
    link[replica.name] = max(now, link[replica.name]) + size / plan.transfer_bytes_s
    target = self._decode_policy.choose(self._decoders)
    target.load += 1
    when = link[replica.name] + plan.transfer_latency_s
    heapq.heappush(self._landings, (when, next(self._serials), moved, target, False))

  # Scaling and losses.

  def _open_ready(self, now: float) -> None:
    while self._starting and self._starting[0][0] <= now:
      _, name = heapq.heappop(self._starting)
      self._front.append(self.replicas[name])

  def _scale(self, now: float) -> None:
    rule = self.plan.scaling
    assert rule is not None
    for replica in [each for each in self._draining if each.load == 0]:
      self._draining.remove(replica)
      self._stop(replica, now)
    serving = self._front
    current = len(serving) + len(self._starting)
    load = sum(replica.load for replica in serving)
    wanted = math.ceil(load / rule.target_load)
    usage = sum(replica.kv_usage for replica in serving)
    wanted = max(wanted, math.ceil(usage / rule.target_kv))
    wanted = min(max(wanted, rule.min_replicas), rule.max_replicas)
    self._more_since = -1.0 if wanted <= current else now if self._more_since < 0 else self._more_since
    self._fewer_since = -1.0 if wanted >= current else now if self._fewer_since < 0 else self._fewer_since
    if wanted > current and now - self._more_since >= rule.up_delay_s:
      for _ in range(wanted - current):
        self._start(now, rule.start_s)
      self._more_since = -1.0
    elif wanted < current and now - self._fewer_since >= rule.down_delay_s:
      for replica in sorted(serving, key=lambda each: each.load)[: min(current - wanted, len(serving) - 1)]:
        serving.remove(replica)
        self._policy.forget(replica.name)
        self._draining.append(replica)
      self._fewer_since = -1.0

  def _start(self, now: float, start_s: float) -> None:
    replica = self._add_replica()
    self._alive_since[replica.name] = now
    heapq.heappush(self._starting, (now + start_s, replica.name))
    self.most_replicas = max(self.most_replicas, len(self._alive_since))

  def _stop(self, replica: CountedReplica, now: float) -> None:
    self._replica_s += now - self._alive_since.pop(replica.name)

  def _lose(self, second: float, name: int) -> None:
    """Loses a replica: its requests without a token go elsewhere, the others end with an error."""
    replica = self.replicas[name]
    if name not in self._alive_since or replica not in self._front:
      return
    live = replica.take_requests()
    self._front.remove(replica)
    self._policy.forget(name)
    self._stop(replica, second)
    self._start(second, self.plan.scaling.start_s if self.plan.scaling else 60.0)
    for request in live:
      if request.first_s < 0:
        self._retry(request, second)
      else:
        self.errors["REPLICA_LOST"] += 1

  def _retry(self, request: CountedRequest, now: float) -> None:
    self.retries += 1
    fresh = CountedRequest(request.index, request.arrival_s, request.prompt, request.output, request.keys)
    self._route(fresh, now)

  # Figures.

  def figures(self) -> dict[str, Any]:
    """Returns the figures under tools.report.latency's names, and those of the fleet."""
    trace, plan = self.trace, self.plan
    begin_s = trace.arrivals[0]
    wall_s = self.last_token_s - begin_s if self.last_token_s > begin_s else None
    end_s = max(self.last_token_s, trace.arrivals[-1])
    replica_s = self._replica_s + sum(end_s - max(since, begin_s) for since in self._alive_since.values())
    replicas = self.replicas
    prompts = sum(replica.prompt_tokens for replica in replicas)
    cached = sum(replica.cached_tokens for replica in replicas)
    busy_s = sum(replica.busy_s for replica in replicas)

    def rate(count: float) -> float | None:
      return None if wall_s is None else round(count / wall_s, 3)

    return {
      "fleet": plan.describe(),
      "requests": len(trace),
      "completed": len(self.e2es),
      "errors": dict(sorted(self.errors.items())),
      "retries": self.retries,
      "wall_s": wall_s and round(wall_s, 3),
      "request_s": rate(len(self.e2es)),
      "output_tok_s": rate(self.output_tokens),
      "total_tok_s": rate(self.output_tokens + prompts),
      **_spread("ttft", self.ttfts),
      **_spread("tpot", self.tpots),
      **_spread("e2e", self.e2es),
      **{f"itl_p{percent}_ms": _milliseconds(self.gaps.percentile(percent)) for percent in (50, 90, 99)},
      "cached_share": round(cached / prompts, 4) if prompts else None,
      "host_hit_share": round(self.host_tokens / prompts, 4) if prompts else None,
      "prompt_tokens": prompts,
      "output_tokens": self.output_tokens,
      "transfer_tokens": self.transfer_tokens,
      "preemptions": sum(replica.num_preemptions for replica in replicas),
      "steps": sum(replica.num_steps for replica in replicas),
      "device_busy_share": round(busy_s / replica_s, 4) if replica_s > 0 else None,
      "most_replicas": self.most_replicas,
      "device_hours": round(replica_s * plan.devices_per_replica / 3600, 4),
    }


def _milliseconds(seconds: float | None) -> float | None:
  return None if seconds is None else round(seconds * 1e3, 3)


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
  ordered = sorted(values)
  figures = {"mean": math.fsum(ordered) / len(ordered) if ordered else None}
  figures |= {f"p{percent}": _sorted_percentile(ordered, percent) for percent in (50, 90, 99)}
  return {f"{name}_{key}_ms": _milliseconds(value) for key, value in figures.items()}


def _sorted_percentile(ordered: Sequence[float], percent: float) -> float | None:
  return percentile(ordered, percent)
