"""Runs discrete events around real engines: arrivals, routers, KV transfers, virtual time. Has no jax, no flag.

The engines are tools.simulate.replica's: production code makes all decisions. tools.simulate.step_costs models the
durations; this module models the rest.

Events run in time order. A replica's loop iteration is one event at its beginning; the next iteration sees the requests
that arrive meanwhile, as a real engine's thread does. A router knows the unfinished requests of each replica.

Disaggregated serving follows extensions/disaggregated, between replicas. A prefill replica runs a request for one
token. Its KV transfer takes bytes / bandwidth; each replica runs one transfer at a time. A decode replica takes over
the request with its KV once it has a free slot and enough blocks, as its engine does.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
import dataclasses
import heapq
import itertools
import math
import operator
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, Overloaded
from engine.request import FinishReason, TokenEvent
from engine.validation import validate_request
from tools.report.latency import Objectives, Outcome, percentile
from tools.report.senders import SenderTally
from tools.simulate.draft_chances import DraftChances
from tools.simulate.replica import Arrival, Replica, SimulatedRouter
from tools.simulate.step_costs import StepCosts

# --- Results ----------------------------------------------------------------------------------------------------------


class _Track:
  """A live request: the times of its tokens."""

  __slots__ = ("arrival", "times", "missed")

  def __init__(self, arrival: Arrival):
    self.arrival = arrival
    self.times: list[float] = []
    self.missed = False


class Collector:
  """Latencies as tools.report.latency defines them, counted as requests end, so memory does not grow with tokens."""

  def __init__(self, objectives: Objectives, keep: bool = False):
    """Args:
    objectives: the objectives of goodput.
    keep: whether to keep each request's Outcome in `outcomes`, and its prompt's length in `prompt_lens`.
    """
    self.objectives, self.keep = objectives, keep
    self.outcomes: list[Outcome] = []
    self.prompt_lens: list[int] = []
    self.errors: Counter[str] = Counter()
    self.misses = 0
    self.first_arrival, self.last_token = math.inf, -math.inf
    self._gaps: Counter[float] = Counter()
    self._stalls: list[float] = []
    self._ttfts: list[float] = []
    self._tpots: list[float] = []
    self._e2es: list[float] = []
    self._offered = self._prompt_tokens = self._output_tokens = 0
    self.senders = SenderTally()

  def offered(self, arrival: Arrival) -> None:
    """Counts an arrival."""
    self._offered += 1
    self.first_arrival = min(self.first_arrival, arrival.arrival_s)

  def first_token(self, track: _Track) -> None:
    """Counts a first token; after a late one the request misses its objectives."""
    if track.times[0] - track.arrival.arrival_s > self.objectives.ttft_s:
      self._miss(track)

  def ended(self, track: _Track, error: str | None) -> None:
    """Counts a request's last event or refusal."""
    arrival, times = track.arrival, track.times
    if times:
      self.last_token = max(self.last_token, times[-1])
    if error is None and len(times) != arrival.output_len:
      error = "WRONG_LENGTH"
    if self.keep:
      chunks, tokens = tuple(Counter(times).items()), (0,) * len(times)  # tokens of one time came in one event
      sent = arrival.arrival_s
      sender = arrival.tenant, arrival.priority
      self.outcomes.append(Outcome(arrival.id, arrival.output_len, sent, sent, chunks, tokens, error, *sender))
      self.prompt_lens.append(len(arrival.prompt))
    asked = len(arrival.prompt), arrival.output_len
    self.senders.add(arrival.tenant, arrival.priority, arrival.arrival_s, asked, times, error is None)
    if error is not None:
      self.errors[error] += 1
      self._miss(track)
      return
    self._prompt_tokens += len(arrival.prompt)
    self._output_tokens += len(times)
    self._ttfts.append(times[0] - arrival.arrival_s)
    self._e2es.append(times[-1] - arrival.arrival_s)
    if len(times) > 1:
      tpot = (times[-1] - times[0]) / (len(times) - 1)
      self._tpots.append(tpot)
      if tpot > self.objectives.tpot_s:
        self._miss(track)
      gaps = list(map(operator.sub, times[1:], times))
      self._gaps.update(gaps)
      self._stalls.append(max(gaps))

  def _miss(self, track: _Track) -> None:
    self.misses += not track.missed
    track.missed = True

  def figures(self) -> dict[str, Any]:
    """Returns the figures of tools.report.latency.summary and of tools.report.senders, under their names."""
    wall_s = self.last_token - self.first_arrival
    wall_s = wall_s if 0 < wall_s < math.inf else None
    met, good = self._offered - self.misses, len(self._ttfts)

    def rate(count: float) -> float | None:
      return None if wall_s is None else round(count / wall_s, 3)

    gaps = sorted(self._gaps.items())
    return {
      "wall_s": wall_s and round(wall_s, 4),
      "output_tok_s": rate(self._output_tokens),
      "total_tok_s": rate(self._output_tokens + self._prompt_tokens),
      "request_s": rate(good),
      "requests": self._offered,
      "completed": good,
      "failed": self._offered - good,
      "output_tokens": self._output_tokens,
      "prompt_tokens": self._prompt_tokens,
      "goodput_request_s": rate(met),
      "slo_attainment": round(met / self._offered, 4),
      **_spread("ttft", self._ttfts),
      **_spread("ttft_from_send", self._ttfts),
      **_spread_counted("itl", gaps),
      **_spread_counted("chunk_gap", [entry for entry in gaps if entry[0] > 0]),
      **_spread("tpot", self._tpots),
      **_spread("e2e", self._e2es),
      **_spread("stall", self._stalls),
      "errors": dict(sorted(self.errors.items())),
      **self.senders.figures(),
    }


_PERCENTS = (50, 90, 99)


def _milliseconds(name: str, figures: dict[str, float | None]) -> dict[str, float | None]:
  return {f"{name}_{key}_ms": None if value is None else round(value * 1e3, 3) for key, value in figures.items()}


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
  ordered = sorted(values)
  figures = {"mean": math.fsum(ordered) / len(ordered) if ordered else None}
  figures |= {f"p{percent}": percentile(ordered, percent) for percent in _PERCENTS}
  return _milliseconds(name, figures | {"max": ordered[-1] if ordered else None})


def _spread_counted(name: str, counted: Sequence[tuple[float, int]]) -> dict[str, float | None]:
  """Computes _spread of sorted values with their counts."""
  ends = list(itertools.accumulate(count for _, count in counted))
  if not ends:
    return _spread(name, ())

  def at(rank: int) -> float:
    return counted[bisect.bisect_right(ends, rank)][0]

  figures: dict[str, float | None] = {"mean": math.fsum(value * count for value, count in counted) / ends[-1]}
  for percent in _PERCENTS:
    position = (ends[-1] - 1) * percent / 100
    low = math.floor(position)
    below = at(low)
    figures[f"p{percent}"] = below + (at(min(low + 1, ends[-1] - 1)) - below) * (position - low)
  return _milliseconds(name, figures | {"max": counted[-1][0]})


# --- The fleet --------------------------------------------------------------------------------------------------------


def check_replica_counts(replicas: int, prefill_replicas: int, decode_replicas: int) -> None:
  """Raises ConfigError for numbers of replicas that make no fleet."""
  split = (prefill_replicas, decode_replicas)
  if min(split) < 0 or (max(split) > 0 and min(split) == 0):
    raise ConfigError(
      f"prefill_replicas={split[0]} and decode_replicas={split[1]} must be both 0, or both at least 1; "
      "set --prefill_replicas and --decode_replicas"
    )
  if not prefill_replicas and replicas < 1:
    raise ConfigError(f"replicas={replicas} must be at least 1; set --replicas")


@dataclasses.dataclass(frozen=True)
class Fleet:
  """The replicas and their links.

  Attributes:
    replicas: the number of engines that both prefill and decode; 0 with disaggregated serving.
    router: the name in engine.routing.POLICIES for arriving requests (and, disaggregated, for arriving KV).
    prefill_replicas, decode_replicas: the numbers of engines for one phase each; both or neither.
    transfer_bytes_s, transfer_latency_s: bandwidth and latency of KV transfers to a decode replica.
    step_seed: the seed of the random step times.
    drafts: what drafters find in the requests; None: nothing.
  """

  replicas: int = 1
  router: str = "least_loaded"
  prefill_replicas: int = 0
  decode_replicas: int = 0
  transfer_bytes_s: float = 50e9
  transfer_latency_s: float = 0.0
  step_seed: int = 0
  drafts: DraftChances | None = None

  def __post_init__(self):
    check_replica_counts(self.replicas, self.prefill_replicas, self.decode_replicas)
    if not (self.transfer_bytes_s > 0 and 0 <= self.transfer_latency_s < math.inf):
      raise ConfigError(
        f"transfer_bytes_s={self.transfer_bytes_s} must be above 0 and transfer_latency_s={self.transfer_latency_s} "
        "0 or more; set --transfer_gb_s and --transfer_latency_ms"
      )
    SimulatedRouter(self.router)  # raises for an unknown name

  @property
  def is_split(self) -> bool:
    """Whether prefill and decode run on different engines."""
    return self.prefill_replicas > 0


class Simulation:
  """Runs arrivals through a fleet, once."""

  def __init__(self, config: EngineConfig, costs: StepCosts, fleet: Fleet, collector: Collector):
    """Args:
    config: the settings of every engine.
    costs: the cost table of every device.
    """
    costs.rung(config.token_budgets[-1])  # rejects a ladder above the table before the run
    if config.batching == "disaggregated" and not fleet.is_split:
      raise ConfigError(
        "batching='disaggregated' needs engines for both parts; set --prefill_replicas and --decode_replicas"
      )
    if fleet.is_split and not costs.kv_bytes_per_token:
      raise ConfigError("the cost table has no kv_bytes_per_token, which transfers of KV need; measure again")
    self.config, self.costs, self.fleet, self.collector = config, costs, fleet, collector
    count = fleet.prefill_replicas + fleet.decode_replicas if fleet.is_split else fleet.replicas
    self.replicas = [
      Replica(index, config, costs, self._take_events, fleet.step_seed, fleet.drafts) for index in range(count)
    ]
    self._front = self.replicas[: fleet.prefill_replicas] if fleet.is_split else self.replicas
    self._decoders = self.replicas[fleet.prefill_replicas :] if fleet.is_split else []
    self._router, self._decode_router = SimulatedRouter(fleet.router), SimulatedRouter(fleet.router)
    self._tracks: dict[str, _Track] = {}
    self._turns: list[tuple[float, int]] = []  # (time, replica)
    self._endings: list[tuple[float, int]] = []  # (time, replica), for the router's update
    self._landings: list[tuple[float, int, Arrival, Replica]] = []  # (when, serial, what, where)
    self._serials = itertools.count()

  def run(self, arrivals: Sequence[Arrival], give_up_after: float = math.inf) -> bool:
    """Runs until the end, or until over `give_up_after` requests missed their objectives; returns True at the end.

    Args:
      arrivals: requests in order of arrival_s, with unique ids.
    """
    turns, landings, collector = self._turns, self._landings, self.collector
    index, never, front_s = 0, (math.inf,), self.costs.host.front_s
    collector.senders.end_s = arrivals[-1].arrival_s if arrivals else 0.0
    while collector.misses <= give_up_after:
      arrival_s = arrivals[index].arrival_s + front_s if index < len(arrivals) else math.inf
      landing_s = (landings[0] if landings else never)[0]
      turn_s = (turns[0] if turns else never)[0]
      if turn_s < min(arrival_s, landing_s):
        replica = self.replicas[heapq.heappop(turns)[1]]
        replica.is_scheduled = replica.turn()
        if replica.is_scheduled:
          heapq.heappush(turns, (replica.clock.now, replica.index))
      elif index < len(arrivals) and arrival_s <= landing_s:
        self._arrive(arrivals[index], arrival_s)
        index += 1
      elif landings:
        when, _, arrival, replica = heapq.heappop(landings)
        first_token_s = self._tracks[str(arrival.id)].times[0]
        replica.take_over(arrival, arrival.arrival_s + front_s, first_token_s, when)
        self._wake(replica)
      else:
        return True
    return False

  def _arrive(self, arrival: Arrival, now: float) -> None:
    while self._endings and self._endings[0][0] <= now:
      self.replicas[heapq.heappop(self._endings)[1]].load -= 1
    self.collector.offered(arrival)
    track = _Track(arrival)
    try:
      if self.fleet.is_split:
        self._check_decoders(arrival)
      request = arrival.request(1 if self.fleet.is_split else arrival.output_len)
      replica = self._router.choose(arrival, self._front)
      replica.submit(request, now)
    except EngineError as error:
      self.collector.ended(track, error.reason)
      return
    self._tracks[request.id] = track
    replica.load += 1
    self._wake(replica)

  def _wake(self, replica: Replica) -> None:
    if not replica.is_scheduled:
      replica.is_scheduled = True
      heapq.heappush(self._turns, (replica.clock.now, replica.index))

  def _take_events(self, replica: Replica, now: float, events: list[TokenEvent]) -> None:
    tracks = self._tracks
    for event in events:
      track = tracks[event.request_id]
      if event.token_ids:
        is_first = not track.times
        track.times += [now] * len(event.token_ids)
        if is_first:
          self.collector.first_token(track)
      if event.finish_reason is not None:
        heapq.heappush(self._endings, (now, replica.index))
        self._ended(replica, track, event.finish_reason, now)

  def _ended(self, replica: Replica, track: _Track, reason: FinishReason, now: float) -> None:
    arrival = track.arrival
    if reason is FinishReason.LENGTH and len(track.times) < arrival.output_len and self.fleet.is_split:
      self._send_kv(replica, arrival, now)
      return
    del self._tracks[str(arrival.id)]
    self.collector.ended(track, None if reason is FinishReason.LENGTH else reason.name)

  # Disaggregated serving.

  def _check_decoders(self, arrival: Arrival) -> None:
    """Refuses requests that could not continue after their first token, as DisaggregatedEngine.submit does."""
    validate_request(self.config, arrival.request(arrival.output_len))
    count = len(self._decoders)
    backlog = sum(replica.load for replica in self._decoders) - count * self.config.max_num_seqs
    if backlog >= count * self.config.max_queued_requests:
      raise Overloaded(f"{backlog} requests wait to be decoded; raise max_queued_requests", 1.0)

  def _send_kv(self, replica: Replica, arrival: Arrival, now: float) -> None:
    """Sends the prompt's KV from a prefill replica, once its link is free."""
    fleet, size = self.fleet, len(arrival.prompt) * self.costs.kv_bytes_per_token
    replica.link_free_at = max(now, replica.link_free_at) + size / fleet.transfer_bytes_s
    target = self._decode_router.choose(arrival, self._decoders)
    target.load += 1
    when = replica.link_free_at + fleet.transfer_latency_s
    heapq.heappush(self._landings, (when, next(self._serials), arrival, target))

  # Figures.

  def figures(self) -> dict[str, Any]:
    """Returns the collector's figures, and the engine figures of bench_serving and bench_offline over all replicas."""
    stats = [replica.engine.stats() for replica in self.replicas]
    totals = {
      name: sum(getattr(stat, f"num_{name}") for stat in stats)
      for name in ("steps", "decode_tokens", "prefill_tokens", "padding_tokens", "preemptions", "cached_tokens")
    }
    skipped = sum(stat.num_skipped_tokens for stat in stats)
    computed = totals["decode_tokens"] + totals["prefill_tokens"] + totals["padding_tokens"]
    rungs: Counter[int] = Counter()
    for stat in stats:
      rungs.update(stat.steps_by_rung)
    figures = self.collector.figures()
    busy_s = sum(replica.runner.busy_s for replica in self.replicas)
    ideal_s = sum(replica.runner.ideal_s for replica in self.replicas)
    wall_s = figures["wall_s"]
    return figures | {
      "padding_share": round(totals["padding_tokens"] / computed, 5) if computed else None,
      "skipped_tokens": skipped,
      **{name: totals[name] for name in ("steps", "decode_tokens", "prefill_tokens", "preemptions")},
      "prefix_hit_tokens": totals["cached_tokens"],
      "draft_tokens": sum(stat.drafts.tokens for stat in stats),
      "accepted_draft_tokens": sum(stat.drafts.accepted for stat in stats),
      "batching": self.config.batching,
      "steps_by_rung": dict(sorted(rungs.items())),
      "replicas": len(self.replicas),
      "device_busy_s": round(busy_s, 4),
      "device_busy_share": round(busy_s / wall_s / len(self.replicas), 4) if wall_s else None,
      "padded_over_ideal_time": round(busy_s / ideal_s, 4) if ideal_s else None,
    }
