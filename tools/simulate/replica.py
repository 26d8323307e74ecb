"""Runs the real Scheduler and Engine in virtual time on a device that is a table of step times, and routes requests.

A replica is an Engine with a clock that moves only when the replica charges work to it. It charges planning and
dispatch at a launch, device time when the engine reads values, and the commit before events go out. Step times are
samples from the table's spread; the run's seed and the replica's index make a run repeatable. As in a server, the
engine plans and launches a step before the previous one's values arrive. Sampled tokens are zeros; requests end by
their length. Drafts come from chances (tools.simulate.draft_chances); the attention of their rows takes the time of
prompt rows as long. tools.simulate.events simulates everything between replicas. Imports no jax, knows no flag.
"""

from collections.abc import Callable, Sequence
import itertools
import random
from typing import NamedTuple

from engine.batch import Batch, StepResult
from engine.block_pool import block_key, root_key
from engine.config import EngineConfig
from engine.engine import IDLE_WAIT_S, Engine
from engine.request import Request, TokenEvent
from engine.routing import make_routing_policy
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tools.simulate.draft_chances import ChanceDrafter, DraftChances, count_accepted
from tools.simulate.step_costs import Launch, StepCosts, Warmth, work_of

_TICK_S = 1e-6  # least sleep of a replica that waits for a time


class Arrival(NamedTuple):
  """A future request.

  Attributes:
    id: the unique id.
    arrival_s: the arrival time in virtual seconds.
    prompt: the token ids; `bytes` are cheap if their values do not matter.
    output_len: the exact number of output tokens.
    salt: the cache salt; only requests with the same salt share prefixes.
    tenant: the tenant, under policy fair.
    priority: the priority, under policy priority; lower goes first.
  """

  id: int | str
  arrival_s: float
  prompt: Sequence[int]
  output_len: int
  salt: bytes = b""
  tenant: str = ""
  priority: int = 0

  def request(self, output_len: int) -> Request:
    """Returns the engine's request."""
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, seed=0)
    return Request(str(self.id), self.prompt, params, self.priority, cache_salt=self.salt, tenant=self.tenant)


def made_up(rows: Sequence[tuple[float, int, int]]) -> list[Arrival]:
  """Returns requests of (arrival_s, prompt length, output length) rows, without shared prefixes."""
  zeros = bytes(max((row[1] for row in rows), default=0))
  return [
    Arrival(index, arrival_s, zeros[:prompt_len], output_len, index.to_bytes(8, "little"))
    for index, (arrival_s, prompt_len, output_len) in enumerate(rows)
  ]


# --- One replica ------------------------------------------------------------------------------------------------------


class VirtualClock:
  """A replica's time; moves only on request."""

  __slots__ = ("now",)

  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now


class SimulatedRunner:
  """A device that computes nothing and takes the table's times. Implements engine.batch.Runner."""

  def __init__(self, costs: StepCosts, clock: VirtualClock, seed: int):
    self._costs, self._clock = costs, clock
    self._random = random.Random(seed).random
    self._warmth = Warmth()
    self._results: dict[int, StepResult] = {}
    self._owed = 0.0  # host time of read values, not yet charged
    self._free_at = 0.0
    self.busy_s = 0.0
    self.ideal_s = 0.0  # as busy_s, without padding
    self.watch: Callable[[Batch, float], None] | None = None  # called with every step and its device seconds

  def launch(self, batch: Batch) -> "_Step":
    """Charges the host, and queues the step on the device."""
    costs, clock = self._costs, self._clock
    rows = len(batch.slots)
    work = work_of(batch.starts, batch.counts)
    attention = costs.attention(work)
    drafted = sum(batch.num_drafts) + len(batch.num_drafts) - batch.num_drafts.count(0)  # tokens of rows with drafts
    prompt_tokens = work.prefill_tokens - drafted
    tokens, has_prompt = batch.shape.tokens, prompt_tokens > 0
    since, after = self._warmth.step(clock.now, tokens, has_prompt)
    factor = self._draw(costs.factors(tokens, after))
    launch_factor = self._draw(costs.launch_factors(Launch.of(has_prompt, since, after)))
    clock.now += costs.launch_seconds(rows, prompt_tokens, len(batch.admissions)) * launch_factor
    cold = costs.cold(since)
    used = work.decode_rows + work.prefill_tokens
    charged = costs.charged(tokens, batch.computed_tokens)
    seconds = (costs.rung(charged) + attention + cold) * factor
    self._free_at = max(self._free_at, clock.now) + seconds
    self._warmth.ended(self._free_at)
    self.busy_s += seconds
    self.ideal_s += (costs.rung(used) + attention + cold) * factor
    if self.watch is not None:
      self.watch(batch, seconds)
    accepted = ()
    if drafted:
      pairs = zip(batch.token_ids, batch.num_drafts, strict=True)
      accepted = tuple([count_accepted(tokens[-count:]) if count else 0 for tokens, count in pairs])
    return _Step(self, self._free_at, rows, accepted)

  def _draw(self, factors: Sequence[float]) -> float:
    return factors[int(self._random() * len(factors))]

  def wait(self, until: float, rows: int, accepted: tuple[int, ...]) -> StepResult:
    """Returns the values of a step that ends at `until`; settle() charges the commit.

    Args: accepted: accepted drafts of each row; () without drafts.
    """
    clock = self._clock
    clock.now = max(clock.now, until)
    self._owed += self._costs.commit_seconds(rows)
    if accepted:
      row_ends = tuple(itertools.accumulate(count + 1 for count in accepted))
      return StepResult((0,) * row_ends[-1], row_ends=row_ends)
    result = self._results.get(rows)
    if result is None:
      result = self._results[rows] = StepResult((0,) * rows)
    return result

  def settle(self) -> None:
    """Charges the host for committing values."""
    self._clock.now += self._owed
    self._owed = 0.0


class _Step(NamedTuple):
  """A launched step; implements engine.batch.Launched."""

  runner: SimulatedRunner
  ends_at: float
  rows: int
  accepted: tuple[int, ...]

  def result(self) -> StepResult:
    return self.runner.wait(self.ends_at, self.rows, self.accepted)


class Replica:
  """One engine and its clock. `received` and `ended` inform its router."""

  def __init__(
    self,
    index: int,
    config: EngineConfig,
    costs: StepCosts,
    emit: Callable[..., None],
    step_seed: int = 0,
    drafts: DraftChances | None = None,
  ):
    """Args:
    emit: receives this replica, the time and the events of a turn.
    step_seed: the run's seed; with the index, it seeds this replica's step times.
    drafts: what drafters find in the requests; None: nothing. Otherwise, `config` allows speculation.
    """
    self.index, self.config = index, config
    self.name = index  # for engine.routing
    self.clock = VirtualClock()
    self.scheduler = Scheduler(config)
    self.runner = SimulatedRunner(costs, self.clock, seed=(step_seed << 20) + index)
    self._emit = emit
    self.engine = Engine(self.scheduler, self.runner, self.clock, self._take_events)
    if drafts is not None:
      self.engine.replace_drafter(ChanceDrafter(drafts))
    self.is_scheduled = False  # an iteration of its loop is among the pending events
    self.load = 0  # unfinished requests, in the router's view
    self.link_free_at = 0.0

  def _take_events(self, events: list[TokenEvent]) -> None:
    self.runner.settle()
    self._emit(self, self.clock.now, events)

  def submit(self, request: Request, now: float) -> None:
    """Posts a request at `now`, which may lie within the current turn. Raises EngineError, as the engine does."""
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
    request.first_scheduled_time = first_token_s  # it has already left the queue, so it cannot time out
    request.output_token_ids = [0]
    request.num_transferred_tokens = request.num_prompt_tokens
    self.engine.take_over(request)
    self.clock.now = max(self.clock.now, now)

  def turn(self) -> bool:
    """Runs one iteration of the loop; returns whether another follows without new requests."""
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


# --- The router -------------------------------------------------------------------------------------------------------


class SimulatedRouter:
  """Chooses a replica for a request by a policy of engine.routing, as `python -m server.router` does.

  It sees prompts as keys of whole blocks; the router, which has no tokenizer, as hashes of pieces of the body.
  """

  def __init__(self, policy: str):
    """Args:
    policy: a name in engine.routing.POLICIES; raises ConfigError for another.
    """
    self._policy = make_routing_policy(policy)

  def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
    """Returns the replica for a request."""
    if not self._policy.uses_keys:
      return self._policy.choose(replicas)
    size = replicas[0].config.block_size
    return self._policy.choose(replicas, _keys(arrival, arrival.prompt, (len(arrival.prompt) - 1) // size, size))


def _keys(arrival: Arrival, prompt: Sequence[int], num_blocks: int, block_size: int) -> list[bytes]:
  """Returns the keys of a prompt's first blocks."""
  parent, keys = root_key(arrival.salt), []
  for start in range(0, num_blocks * block_size, block_size):
    parent = block_key(parent, tuple(prompt[start : start + block_size]))
    keys.append(parent)
  return keys
