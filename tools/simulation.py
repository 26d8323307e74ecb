"""Discrete events around the real Scheduler and Engine: replicas, routers, virtual time. Imports no jax, knows no flag.

A replica is an Engine whose clock stands still unless work is charged to it: planning and dispatch when a step is
launched, the device when its values are asked for, the taking in of values before events go out. So a step is planned
and launched before the values of the one before are there, as in a server, and no decision is modelled: all are made by
the code that makes them in production. Modelled are durations (tools.step_costs), and the rest of the world: arrivals,
routers, transfers of KV. Sampled tokens are zeros; requests end by their length.

Events are taken in the order of time. A replica's turn is one event at its beginning; what arrives while it lasts is
seen by its next turn, as by a real engine's thread. A router knows how many requests each replica still has.

Disaggregated serving is that of engine/disaggregated.py between replicas: a prefill replica runs a request for one
token; its KV then takes bytes / bandwidth, one transfer at a time leaving a replica; and a decode replica takes the
request over as the engine there does, with its KV, when it has a slot and room.
"""

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
import heapq
import itertools
import math
import operator
from typing import Any, NamedTuple, Protocol

from engine.batch import Batch, StepResult
from engine.block_pool import block_key, root_key
from engine.config import EngineConfig
from engine.engine import IDLE_WAIT_S, Engine
from engine.errors import ConfigError, EngineError, Overloaded
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, validate_request
from tools.latency import Objectives, Outcome, percentile
from tools.step_costs import StepCosts, work_of

_TICK_S = 1e-6  # least sleep of a replica that waits for a time


class Arrival(NamedTuple):
  """A request that will arrive.

  Attributes:
    id: unique.
    arrival_s: virtual seconds.
    prompt: token ids; `bytes` are cheap where their values do not matter.
    output_len: exactly how many tokens it gets.
    salt: requests share prefixes only within one.
    tenant: whose share it counts to, under policy fair.
  """

  id: int | str
  arrival_s: float
  prompt: Sequence[int]
  output_len: int
  salt: bytes = b""
  tenant: str = ""

  def request(self, output_len: int) -> Request:
    """What an engine is asked for."""
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, seed=0)
    return Request(str(self.id), self.prompt, params, cache_salt=self.salt, tenant=self.tenant)


def made_up(rows: Sequence[tuple[float, int, int]]) -> list[Arrival]:
  """Requests of (arrival_s, prompt length, output length) rows, none of which shares a prefix with another."""
  zeros = bytes(max((row[1] for row in rows), default=0))
  return [
    Arrival(index, arrival_s, zeros[:prompt_len], output_len, index.to_bytes(8, "little"))
    for index, (arrival_s, prompt_len, output_len) in enumerate(rows)
  ]


# --- One replica ------------------------------------------------------------------------------------------------------


class VirtualClock:
  """Time of one replica: moves when told to."""

  __slots__ = ("now",)

  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now


class SimulatedRunner:
  """A device that computes nothing and takes as long as the table says. Implements engine.batch.Runner."""

  def __init__(self, costs: StepCosts, clock: VirtualClock):
    self._costs, self._clock = costs, clock
    self._results: dict[int, StepResult] = {}
    self._owed = 0.0  # host time for values that were read, not yet charged
    self._free_at = 0.0
    self.busy_s = 0.0
    self.ideal_s = 0.0  # as busy_s, without padding
    self.watch: Callable[[Batch, float], None] | None = None  # told every step and its device seconds

  def launch(self, batch: Batch) -> "_Step":
    """Charges the host, and queues the step on the device."""
    costs, clock = self._costs, self._clock
    rows = len(batch.slots)
    work = work_of(batch.starts, batch.counts)
    attention = costs.attention(work)
    seconds = costs.rung(batch.shape.tokens) + attention
    clock.now += costs.launch_seconds(rows, work.prefill_tokens, len(batch.admissions))
    self._free_at = max(self._free_at, clock.now) + seconds
    self.busy_s += seconds
    self.ideal_s += costs.rung(work.decode_rows + work.prefill_tokens) + attention
    if self.watch is not None:
      self.watch(batch, seconds)
    return _Step(self, self._free_at, rows)

  def wait(self, until: float, rows: int) -> StepResult:
    """Values of a step that ends at `until`; what taking them in costs is charged by settle()."""
    clock = self._clock
    clock.now = max(clock.now, until)
    self._owed += self._costs.commit_seconds(rows)
    result = self._results.get(rows)
    if result is None:
      result = self._results[rows] = StepResult((0,) * rows)
    return result

  def settle(self) -> None:
    """Charges the host for the values that were taken in."""
    self._clock.now += self._owed
    self._owed = 0.0


class _Step(NamedTuple):
  """A launched step; implements engine.batch.Launched."""

  runner: SimulatedRunner
  ends_at: float
  rows: int

  def result(self) -> StepResult:
    return self.runner.wait(self.ends_at, self.rows)


class Replica:
  """One engine and its clock. `received` and `ended` are what its router is told."""

  def __init__(self, index: int, config: EngineConfig, costs: StepCosts, emit: Callable[..., None]):
    """Args:
    emit: called with this replica, the time and the events of a turn.
    """
    self.index, self.config = index, config
    self.clock = VirtualClock()
    self.scheduler = Scheduler(config)
    self.runner = SimulatedRunner(costs, self.clock)
    self._emit = emit
    self.engine = Engine(self.scheduler, self.runner, self.clock, self._take_events)
    self.is_scheduled = False  # a turn of it is among the events to come
    self.load = 0  # requests sent and not ended, as the router knows it
    self.link_free_at = 0.0

  def _take_events(self, events: list[TokenEvent]) -> None:
    self.runner.settle()
    self._emit(self, self.clock.now, events)

  def submit(self, request: Request, now: float) -> None:
    """Posts a request at `now`, which may lie within the turn at hand. Raises EngineError, as the engine does."""
    clock = self.clock
    turn = clock.now
    clock.now = now
    try:
      self.engine.submit(request)
    finally:
      clock.now = max(turn, now)

  def take_over(self, arrival: Arrival, arrival_s: float, first_token_s: float, now: float) -> None:
    """Posts at `now` a request that arrived at `arrival_s` and got its first token elsewhere, with its KV."""
    request = arrival.request(arrival.output_len)
    request.arrival_time, request.first_token_time = arrival_s, first_token_s
    request.first_scheduled_time = first_token_s  # it waits in no queue that could time out
    request.output_token_ids = [0]
    request.num_transferred_tokens = request.num_prompt_tokens
    self.engine.take_over(request)
    self.clock.now = max(self.clock.now, now)

  def turn(self) -> bool:
    """One turn of the loop; returns whether there will be another without new requests."""
    active = self.engine.step()
    self.runner.settle()
    if self.engine.dead is not None:
      raise self.engine.dead
    if active:
      return True
    if not self.engine.num_live:
      return False
    opens_at = self.scheduler.opens_at()
    sleep = IDLE_WAIT_S if opens_at is None else min(IDLE_WAIT_S, opens_at - self.clock.now)
    self.clock.now += max(sleep, _TICK_S)
    return True


# --- Routers ----------------------------------------------------------------------------------------------------------


class Router(Protocol):
  """Chooses a replica for a request; sees loads, and what it chose before."""

  def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
    """The replica that gets it."""
    ...


class RoundRobin:
  """One after the other."""

  def __init__(self):
    self._turns = itertools.count()

  def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
    return replicas[next(self._turns) % len(replicas)]


class LeastLoaded:
  """The one with the fewest requests that have not ended; the first of equals."""

  def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda replica: replica.load)


class PrefixAware:
  """Where the longest known prefix went before, unless that replica is much busier than the least loaded one.

  The router keeps its own map of block keys: like SGLang's cache-aware router it does not ask the replicas, so it does
  not know what was evicted. A new prefix goes to the least loaded replica.
  """

  BUSIER_BY, BUSIER_TIMES = 8, 1.5  # requests, and factor, beyond which balance goes before locality

  def __init__(self):
    self._homes: dict[bytes, int] = {}

  def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
    size, homes = replicas[0].config.block_size, self._homes
    keys = _keys(arrival, arrival.prompt, (len(arrival.prompt) - 1) // size, size)
    known = next((index for index, key in enumerate(keys) if key not in homes), len(keys))
    chosen = min(replicas, key=lambda replica: replica.load)
    if known:
      preferred = replicas[homes[keys[known - 1]]]
      if preferred.load <= max(chosen.load + self.BUSIER_BY, chosen.load * self.BUSIER_TIMES):
        chosen = preferred
    homes.update(dict.fromkeys(keys, chosen.index - replicas[0].index))
    return chosen


def _keys(arrival: Arrival, prompt: Sequence[int], num_blocks: int, block_size: int) -> list[bytes]:
  """The keys of the first blocks of a prompt."""
  parent, keys = root_key(arrival.salt), []
  for start in range(0, num_blocks * block_size, block_size):
    parent = block_key(parent, tuple(prompt[start : start + block_size]))
    keys.append(parent)
  return keys


ROUTERS: dict[str, Callable[[], Router]] = {
  "round_robin": RoundRobin,
  "least_loaded": LeastLoaded,
  "prefix_aware": PrefixAware,
}


def make_router(name: str) -> Router:
  """The router of that name; raises ConfigError."""
  if name not in ROUTERS:
    raise ConfigError(f"router={name!r} is unknown; set --router to one of {', '.join(ROUTERS)}")
  return ROUTERS[name]()


# --- What came of it --------------------------------------------------------------------------------------------------


class _Track:
  """A request on its way: when its tokens came."""

  __slots__ = ("arrival", "times", "missed")

  def __init__(self, arrival: Arrival):
    self.arrival = arrival
    self.times: list[float] = []
    self.missed = False


class Collector:
  """Latencies by the definitions of tools.latency, counted as requests end: memory does not grow with tokens."""

  def __init__(self, objectives: Objectives, keep: bool = False):
    """Args:
    objectives: what goodput counts.
    keep: also keep an Outcome of each request, in `outcomes`.
    """
    self.objectives, self.keep = objectives, keep
    self.outcomes: list[Outcome] = []
    self.errors: Counter[str] = Counter()
    self.misses = 0
    self.first_arrival, self.last_token = math.inf, -math.inf
    self._gaps: Counter[float] = Counter()
    self._stalls: list[float] = []
    self._ttfts: list[float] = []
    self._tpots: list[float] = []
    self._e2es: list[float] = []
    self._offered = self._prompt_tokens = self._output_tokens = 0

  def offered(self, arrival: Arrival) -> None:
    """A request arrives."""
    self._offered += 1
    self.first_arrival = min(self.first_arrival, arrival.arrival_s)

  def first_token(self, track: _Track) -> None:
    """A first token came: too late is a miss, whatever follows."""
    if track.times[0] - track.arrival.arrival_s > self.objectives.ttft_s:
      self._miss(track)

  def ended(self, track: _Track, error: str | None) -> None:
    """A request has its last event, or was refused."""
    arrival, times = track.arrival, track.times
    if times:
      self.last_token = max(self.last_token, times[-1])
    if error is None and len(times) != arrival.output_len:
      error = "WRONG_LENGTH"
    if self.keep:
      chunks, tokens = tuple((time, 1) for time in times), (0,) * len(times)
      sent = arrival.arrival_s
      self.outcomes.append(Outcome(arrival.id, arrival.output_len, sent, sent, chunks, tokens, error))
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
    """The figures of tools.latency.summary, under its names."""
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
      **_spread_counted("chunk_gap", gaps),
      **_spread("tpot", self._tpots),
      **_spread("e2e", self._e2es),
      **_spread("stall", self._stalls),
      "errors": dict(sorted(self.errors.items())),
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
  """As _spread, of values in order with how often each occurs."""
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


# --- The world --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Who serves.

  Attributes:
    replicas: engines that do everything; 0 with disaggregated serving.
    router: name in ROUTERS, for requests that arrive (and, disaggregated, for those whose KV does).
    prefill_replicas, decode_replicas: engines that do one part each; both or neither.
    transfer_bytes_s, transfer_latency_s: of KV from a prefill replica to a decode replica.
  """

  replicas: int = 1
  router: str = "least_loaded"
  prefill_replicas: int = 0
  decode_replicas: int = 0
  transfer_bytes_s: float = 50e9
  transfer_latency_s: float = 0.0

  def __post_init__(self):
    split = (self.prefill_replicas, self.decode_replicas)
    if min(split) < 0 or (max(split) > 0 and min(split) == 0):
      raise ConfigError(
        f"prefill_replicas={split[0]} and decode_replicas={split[1]} must be both 0, or both at least 1; "
        "set --prefill_replicas and --decode_replicas"
      )
    if not self.is_split and self.replicas < 1:
      raise ConfigError(f"replicas={self.replicas} must be at least 1; set --replicas")
    if not (self.transfer_bytes_s > 0 and 0 <= self.transfer_latency_s < math.inf):
      raise ConfigError(
        f"transfer_bytes_s={self.transfer_bytes_s} must be above 0 and transfer_latency_s={self.transfer_latency_s} "
        "0 or more; set --transfer_gb_s and --transfer_latency_ms"
      )
    make_router(self.router)

  @property
  def is_split(self) -> bool:
    """Whether prefill and decode run on different engines."""
    return self.prefill_replicas > 0


class Simulation:
  """Runs arrivals through a fleet, once."""

  def __init__(self, config: EngineConfig, costs: StepCosts, fleet: Fleet, collector: Collector):
    """Args:
    config: of every engine.
    costs: of every device.
    """
    costs.rung(config.token_budgets[-1])  # a ladder above the table is told before anything runs
    if config.batching == "disaggregated" and not fleet.is_split:
      raise ConfigError(
        "batching='disaggregated' needs engines for both parts; set --prefill_replicas and --decode_replicas"
      )
    if fleet.is_split and not costs.kv_bytes_per_token:
      raise ConfigError("the cost table has no kv_bytes_per_token, which transfers of KV need; measure again")
    self.config, self.costs, self.fleet, self.collector = config, costs, fleet, collector
    count = fleet.prefill_replicas + fleet.decode_replicas if fleet.is_split else fleet.replicas
    self.replicas = [Replica(index, config, costs, self._take_events) for index in range(count)]
    self._front = self.replicas[: fleet.prefill_replicas] if fleet.is_split else self.replicas
    self._decoders = self.replicas[fleet.prefill_replicas :] if fleet.is_split else []
    self._router, self._decode_router = make_router(fleet.router), make_router(fleet.router)
    self._tracks: dict[str, _Track] = {}
    self._turns: list[tuple[float, int]] = []  # (when, replica)
    self._endings: list[tuple[float, int]] = []  # (when, replica): what its router learns then
    self._landings: list[tuple[float, int, Arrival, Replica]] = []  # (when, serial, what, where)
    self._serials = itertools.count()

  def run(self, arrivals: Sequence[Arrival], give_up_after: float = math.inf) -> bool:
    """Runs to the end, or until more than `give_up_after` requests missed their objectives; returns whether to the end.

    Args:
      arrivals: in order of arrival_s, ids unique.
    """
    turns, landings, collector = self._turns, self._landings, self.collector
    index, never, front_s = 0, (math.inf,), self.costs.host.front_s
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
        times = track.times
        times.append(now)
        if len(times) == 1:
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
    """Refuses what could not go on after its first token, as DisaggregatedEngine.submit does."""
    validate_request(self.config, arrival.request(arrival.output_len))
    count = len(self._decoders)
    backlog = sum(replica.load for replica in self._decoders) - count * self.config.max_num_seqs
    if backlog >= count * self.config.max_queued_requests:
      raise Overloaded(f"{backlog} requests wait to be decoded; raise max_queued_requests", 1.0)

  def _send_kv(self, replica: Replica, arrival: Arrival, now: float) -> None:
    """The prompt's KV leaves a prefill replica, when its link is free."""
    fleet, size = self.fleet, len(arrival.prompt) * self.costs.kv_bytes_per_token
    replica.link_free_at = max(now, replica.link_free_at) + size / fleet.transfer_bytes_s
    target = self._decode_router.choose(arrival, self._decoders)
    target.load += 1
    when = replica.link_free_at + fleet.transfer_latency_s
    heapq.heappush(self._landings, (when, next(self._serials), arrival, target))

  # Figures.

  def figures(self) -> dict[str, Any]:
    """The collector's, and what bench_serving and bench_offline tell of the engine, over all replicas."""
    stats = [replica.engine.stats() for replica in self.replicas]
    totals = {
      name: sum(getattr(stat, f"num_{name}") for stat in stats)
      for name in ("steps", "decode_tokens", "prefill_tokens", "padding_tokens", "preemptions", "cached_tokens")
    }
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
      **{name: totals[name] for name in ("steps", "decode_tokens", "prefill_tokens", "preemptions")},
      "prefix_hit_tokens": totals["cached_tokens"],
      "batching": self.config.batching,
      "steps_by_rung": dict(sorted(rungs.items())),
      "replicas": len(self.replicas),
      "device_busy_s": round(busy_s, 4),
      "device_busy_share": round(busy_s / wall_s / len(self.replicas), 4) if wall_s else None,
      "padded_over_ideal_time": round(busy_s / ideal_s, 4) if ideal_s else None,
    }
