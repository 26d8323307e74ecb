"""Serves requests of one replica by counts: the plan of engine.scheduler under fcfs, without tokens and block tables.

A turn plans and launches a step, then commits an earlier one, as Engine.step does. While the same rows decode and
nobody can join, turns differ only in the attention's length, so a run of them is one event with times in closed form.
An arrival shortens the run. Everything between replicas is tools.plan_fleet.counted_fleet's. Imports no jax.

If the cost table has the spread of equal steps, single steps take its quantiles in turn, so percentiles of times are
those of the spread. A run of steps takes their mean, and its gaps have the spread.

Simplifications against tools.simulate: step times are not random, prompts are shared by the keys of the trace, and
blocks of outputs are never shared. A preempted request is the latest arrival.
"""

from collections import deque
from collections.abc import Sequence
import heapq
import math
from typing import NamedTuple, Protocol

from engine.batching import Batching, make_batching
from engine.config import EngineConfig
from engine.errors import ConfigError
from tools.plan_fleet.counted_pool import CountedPool
from tools.plan_fleet.gap_counts import GapCounts
from tools.simulate.step_costs import After, AttentionWork, Launch, StepCosts, Warmth

NEVER = math.inf
_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0
_GAP_PARTS = 32  # parts of a run whose gaps take a factor each
_COLD_STEPS = (1, 2, 4, 8, 16, 32)  # the cold time of a step changes after so many warm ones


class CountedRequest:
  """A live request: lengths, progress and times.

  Attributes:
    index: row of the trace.
    arrival_s: intended arrival, seconds.
    prompt, output: lengths in tokens; `output` is what this replica generates in all.
    keys: keys of the prompt's pieces.
    sampled: tokens sampled so far.
    known, computed: tokens to compute before the next sample, and those computed.
    transferred: prompt tokens whose KV another replica has sent.
    first_s, last_s: times of the first token, and of the last token before a pause.
  """

  __slots__ = (
    "index",
    "arrival_s",
    "prompt",
    "output",
    "keys",
    "sampled",
    "known",
    "computed",
    "transferred",
    "blocks",
    "held_keys",
    "published",
    "begin_step",
    "end_step",
    "first_s",
    "last_s",
    "preemptions",
    "kept",
    "has_loaded",
  )

  def __init__(self, index: int, arrival_s: float, prompt: int, output: int, keys: tuple[int, ...] = ()):
    self.index, self.arrival_s, self.prompt, self.output, self.keys = index, arrival_s, prompt, output, keys
    self.sampled = self.computed = self.transferred = self.blocks = self.published = 0
    self.known = prompt
    self.held_keys: list[int] = []
    self.begin_step = self.end_step = -1
    self.first_s = self.last_s = -1.0
    self.preemptions = 0
    self.kept: tuple[int, int] = (0, 0)  # entry and number of its blocks that a preemption left in the pool
    self.has_loaded = False  # since its arrival or preemption it had its load from the host pool


class _CountedStep(NamedTuple):
  """A launched step: rows that decode, all rows, and what its commit does."""

  decodes: int
  rows: int
  firsts: tuple[CountedRequest, ...] = ()  # first tokens, or first ones after a pause
  ends: tuple[CountedRequest, ...] = ()
  computed: tuple[tuple[CountedRequest, int, int], ...] = ()  # (request, computed tokens, preemptions) to publish


class EndingSink(Protocol):
  """Receives what happens to requests."""

  def first_token(self, request: CountedRequest, now: float) -> None:
    """The first token of a request left the replica."""
    ...

  def ended(self, replica: "CountedReplica", request: CountedRequest, now: float) -> None:
    """The last token of a request left the replica."""
    ...

  def begin_load(self, replica: "CountedReplica", request: CountedRequest, keys: int, now: float) -> None:
    """A load of so many keys from the host pool began; CountedReplica.finish_load() ends it."""
    ...


class SpreadFactors:
  """Equally likely factors of a time, taken in turn so that any number of successive ones has nearly their spread."""

  def __init__(self, values: Sequence[float]):
    """Args: values: one at least."""
    self.mean = math.fsum(values) / len(values)
    self._values, self._share = sorted(values), 0.5

  @property
  def is_spread(self) -> bool:
    """Whether the factors differ."""
    return self._values[0] != self._values[-1]

  def take_next(self) -> float:
    """Returns the next factor. Multiples of the golden ratio, modulo 1, lie evenly, however many there are."""
    factor = self._values[int(self._share * len(self._values))]
    self._share = (self._share + _GOLDEN_RATIO) % 1.0
    return factor


class StepTimes:
  """A cost table for one engine's settings: times by step size, looked up by index."""

  def __init__(self, costs: StepCosts, config: EngineConfig):
    """Raises ConfigError if the ladder exceeds the table."""
    ladder = config.ladder
    self.costs = costs
    self.shape = [0] + [ladder.fit(tokens).tokens for tokens in range(1, ladder.max_tokens + 1)]
    charged = [costs.rung(costs.charged(self.shape[tokens], tokens)) for tokens in range(1, ladder.max_tokens + 1)]
    self.linear_s = [0.0, *charged]
    self.ideal_s = [0.0, *(costs.rung(tokens) for tokens in range(1, ladder.max_tokens + 1))]
    self._factors: dict[tuple[int, After], SpreadFactors] = {}
    self.has_cold = any(costs.cold_s)
    self.launch_factors = {kind: SpreadFactors(costs.launch_factors(kind)) for kind in Launch}

  def factors(self, tokens: int, after: After) -> SpreadFactors:
    """Returns measured over modeled times of a step."""
    found = self._factors.get((tokens, after))
    if found is None:
      found = self._factors[tokens, after] = SpreadFactors(self.costs.factors(tokens, after))
    return found


class _Run(NamedTuple):
  """Equal turns from one planned moment on, in closed form; see CountedReplica._begin_run."""

  turns: int
  begin_s: float
  end_s: float  # the device's free time at the beginning
  first_s: float  # device seconds of the first step
  slope_s: float  # more in each later step
  launch_s: float
  commit_s: float
  is_host_bound: bool
  factors: SpreadFactors  # of the device's seconds, which are means


class CountedReplica:
  """One replica; `next_s` is when its next turn, or run of turns, is over.

  Attributes:
    name: for engine.routing.
    load: unfinished requests, in the router's view.
    next_s: time of the next advance(); NEVER while idle.
    version: changes with next_s, so that a queue can drop older entries.
  """

  def __init__(
    self,
    name: int,
    config: EngineConfig,
    times: StepTimes,
    sink: EndingSink,
    gaps: GapCounts,
    key_tokens: int = 0,
    host_keys: int = 0,
  ):
    """Args:
    key_tokens: tokens that a key of the trace covers; 0: requests have no keys.
    host_keys: capacity of the host pool, in keys.
    """
    self.name, self.load = name, 0
    self._config, self._times, self._sink, self._gaps = config, times, sink, gaps
    self._block_size, self._overlap = config.block_size, config.overlap
    self._key_tokens = key_tokens
    self._blocks_per_key = max(1, key_tokens // config.block_size)
    self.pool = CountedPool(config.num_blocks, self._blocks_per_key, host_keys)
    self._batching: Batching = make_batching(config)
    self._max_tokens, self._max_rows = config.token_budgets[-1], config.max_num_seqs
    self.waiting: deque[CountedRequest] = deque()
    self._awaiting: list[CountedRequest] = []  # their prefix is on its way from the host pool, or will be
    self._load: tuple[CountedRequest, tuple[int, ...], int] | None = None  # with its keys, and how many were cached
    self._prefilling: list[CountedRequest] = []
    self._ends: list[tuple[int, int, CountedRequest]] = []  # decoding requests: (end step, index, request)
    self._decodes = 0
    self._keys_read = 0  # by the next step of the decoding rows
    self._phases = [0] * config.block_size  # decoding rows by the step, modulo block size, in which they need a block
    self._step = 0
    self._rows_held = 0  # slots in use
    self._is_blocked = False  # the first waiting request lacks blocks until some are released
    self._took_blocks = False  # the decoding rows have the blocks of the step that is being planned
    self._warmth = Warmth()
    self._flight: _CountedStep | None = None  # launched; the next turn waits for it
    self._committing: _CountedStep | None = None  # its values arrive at next_s
    self._device_free_s = 0.0
    self._last_emit_s = 0.0
    self._run: _Run | None = None
    self.next_s, self.version = NEVER, 0
    self._idle_since_s = 0.0
    # Totals.
    self.busy_s = self.ideal_s = 0.0
    self.num_steps = self.num_preemptions = 0
    self.prefill_tokens = self.decode_tokens = self.cached_tokens = self.prompt_tokens = 0

  # Requests.

  def check_fits(self, prompt: int, output: int) -> str:
    """Returns the reason why no engine of these settings can serve such a request, or an empty text."""
    config = self._config
    if prompt < 1 or output < 1:
      return "EMPTY"
    return "TOO_LONG" if prompt + output > min(config.max_model_len, config.pool_tokens) else ""

  def submit(self, request: CountedRequest, now: float) -> None:
    """Queues a request at `now`."""
    self.waiting.append(request)
    self._wake(now)

  def finish_load(self, request: CountedRequest, now: float) -> int:
    """Caches the keys that a request waited for, and queues it again; returns the number of new keys."""
    if self._load is None or self._load[0] is not request:
      return 0
    _, keys, first = self._load
    self._load = None
    loaded = self.pool.end_load(keys, first)
    request.has_loaded = True
    self.waiting = deque(sorted((*self._awaiting, *self.waiting), key=_arrival_order))
    self._awaiting.clear()
    self._is_blocked = False
    self._wake(now)
    return loaded

  def _wake(self, now: float) -> None:
    if self.next_s == NEVER:
      self.next_s = max(now, self._idle_since_s)
      self.version += 1
    elif self._run is not None and self._rows_held < self._max_rows and not self._is_blocked:
      self._shorten_run(now)

  @property
  def kv_usage(self) -> float:
    """The share of blocks that requests hold."""
    return 1.0 - self.pool.free / self.pool.num_blocks

  def take_requests(self) -> list[CountedRequest]:
    """Removes and returns all live requests, as of a replica that dies."""
    self._end_run()
    live = [*self.waiting, *self._awaiting, *self._prefilling, *(entry[2] for entry in self._ends)]
    for step in (self._flight, self._committing):
      live += step.ends if step is not None else ()
    self.next_s, self._flight, self._committing = NEVER, None, None
    self.version += 1
    return live

  # Turns.

  def advance(self) -> None:
    """Ends the turn or the run that next_s ends, and begins the next."""
    self._end_run()
    now = self.next_s
    step, self._committing = self._committing, None
    if step is not None:
      self._commit(step, now)
    self.version += 1
    has_prompt = bool(self._prefilling)
    may_join = bool(self.waiting) and self._rows_held < self._max_rows and not self._is_blocked
    if not has_prompt and not may_join:
      if self._decodes:
        self._begin_run(now)
        return
      planned = None
    else:
      planned = self._plan_prompts(now)
    self._finish_turn(now, planned)

  def _finish_turn(self, now: float, planned: tuple[_CountedStep, float, float] | None) -> None:
    """Sets the clock after a single turn; `planned` is (step, launch seconds, device seconds)."""
    costs, flight = self._times.costs, self._flight
    launched = now
    if planned is not None:
      step, launch_s, device_s = planned
      launched = now + launch_s
      before = self._device_free_s
      self._device_free_s = max(before, launched) + device_s
      self._warmth.ended(self._device_free_s)
      if not self._overlap:
        self._committing = step
        self.next_s = self._device_free_s + costs.commit_seconds(step.rows)
        return
      self._flight = step
      if flight is None:
        self.next_s = launched
        return
      self._committing = flight
      self.next_s = max(launched, before) + costs.commit_seconds(flight.rows)
      return
    self._flight = None
    if flight is not None:
      self._committing = flight
      self.next_s = max(now, self._device_free_s) + costs.commit_seconds(flight.rows)
    elif self.waiting and self._rows_held == 0 and self._load is None:
      raise AssertionError("a request that fits the empty replica was not admitted")
    elif self._rows_held or self._prefilling:  # every running request was preempted in this step, or waits for a commit
      self.next_s = now + 1e-6
    else:
      self._idle_since_s, self.next_s = now, NEVER

  # Runs of equal turns.

  def _begin_run(self, now: float) -> None:
    """Plans decodes alone: as many equal turns as can be known now, at least one."""
    times, costs, rows = self._times, self._times.costs, self._decodes
    pool, step, phases, size = self.pool, self._step, self._phases, self._block_size
    turns = self._ends[0][0] - step
    flight = self._flight
    if flight is not None and (flight.firsts or flight.ends or flight.computed or flight.decodes != rows):
      turns = 1
    elif (turns // size + 1) * rows > pool.free:
      turns = self._turns_until_full(turns)
      if turns == 0:
        self._finish_turn(now, self._plan_prompts(now))
        return
    if phases[step % size] > pool.free:
      self._finish_turn(now, self._plan_prompts(now))
      return
    since, after = self._warmth.step(now, times.shape[rows], False)
    if times.has_cold:
      turns = min(turns, next((edge - since for edge in _COLD_STEPS if since < edge), turns))
    launch_kind = Launch.of(False, since, after)
    if launch_kind is not Launch.DECODES and times.costs.launch_spread:
      turns = 1
    factors = times.factors(times.shape[rows], after)
    if after is not After.ALIKE and times.costs.spread:
      turns = 1
    factor = factors.mean
    attention_s = costs.decode_row_s * rows + costs.decode_key_s * self._keys_read
    device_s = (times.linear_s[rows] + attention_s + costs.cold(since)) * factor
    slope_s = costs.decode_key_s * rows * factor
    launch_factors = times.launch_factors[launch_kind]
    launch_s = costs.launch_seconds(rows, 0, 0) * launch_factors.mean
    commit_s = costs.commit_seconds(rows)
    before = self._device_free_s
    is_host_bound = False
    if turns > 1 and self._overlap:
      host_s = launch_s + commit_s
      if flight is None:
        turns = 1
      elif now + launch_s <= before and device_s >= host_s:
        pass
      elif now + launch_s >= before and device_s + slope_s * (turns - 1) <= host_s:
        is_host_bound = True
      else:
        turns = 1
    if turns > 1:
      self._run = run = _Run(turns, now, before, device_s, slope_s, launch_s, commit_s, is_host_bound, factors)
      self._warmth.skip_decodes(turns - 1)
      self.next_s = self._turn_time(run, turns)
      return
    device_s *= factors.take_next() / factor
    launch_s *= launch_factors.take_next() / launch_factors.mean
    self._take_steps(1, device_s, 0.0)
    ends = self._take_ended()
    self._finish_turn(now, (_CountedStep(rows, rows, (), ends), launch_s, device_s))

  def _turns_until_full(self, turns: int) -> int:
    """Returns how many turns the free blocks last, at most `turns`."""
    left, phases, size = self.pool.free, self._phases, self._block_size
    full = left // self._decodes
    count, left = full * size, left - full * self._decodes
    while count < turns and phases[(self._step + count) % size] <= left:
      left -= phases[(self._step + count) % size]
      count += 1
    return min(turns, count)

  def _turn_time(self, run: _Run, turn: int) -> float:
    """Returns when the `turn`-th turn of a run (from 1) is over."""
    if not self._overlap:
      return run.begin_s + turn * (run.launch_s + run.first_s + run.commit_s) + run.slope_s * turn * (turn - 1) / 2
    if run.is_host_bound:
      return run.begin_s + turn * (run.launch_s + run.commit_s)
    steps = turn - 1
    return run.end_s + run.commit_s + steps * run.first_s + run.slope_s * steps * (steps - 1) / 2

  def _shorten_run(self, now: float) -> None:
    """Ends the run with the first turn that ends at `now` or later."""
    run = self._run
    assert run is not None
    low, high = 1, run.turns
    if self._turn_time(run, high) <= now:
      return
    while low < high:
      middle = (low + high) // 2
      if self._turn_time(run, middle) >= now:
        high = middle
      else:
        low = middle + 1
    if low < run.turns:
      self._warmth.skip_decodes(low - run.turns)
      self._run = run._replace(turns=low)
      self.next_s = self._turn_time(run, low)
      self.version += 1

  def _end_run(self) -> None:
    """Applies the run's turns; only the commit at next_s remains."""
    run = self._run
    if run is None:
      return
    self._run = None
    turns, rows = run.turns, self._decodes
    self._take_steps(turns, run.first_s, run.slope_s)
    plain = _CountedStep(rows, rows)
    gaps = self._gaps
    if self._overlap:
      device_s = turns * run.first_s + run.slope_s * turns * (turns - 1) / 2
      if run.is_host_bound:
        last_s = run.first_s + run.slope_s * (turns - 1)
        self._device_free_s = self._turn_time(run, turns) - run.commit_s + last_s
      else:
        self._device_free_s = run.end_s + device_s
      self._committing = self._flight if turns == 1 else plain
      self._flight = plain._replace(ends=self._take_ended())
    else:
      self._device_free_s = self._turn_time(run, turns) - run.commit_s
      self._committing = plain._replace(ends=self._take_ended())
    self._warmth.ended(self._device_free_s)
    if turns > 1:  # the commits of all turns but the last
      first_s = self._turn_time(run, 1)
      gaps.add(first_s - self._last_emit_s, rows)
      if turns > 2:
        self._add_run_gaps(run, self._turn_time(run, 2) - first_s, turns - 2, rows)
      self._last_emit_s = self._turn_time(run, turns - 1)

  def _add_run_gaps(self, run: _Run, first_s: float, turns: int, rows: int) -> None:
    """Counts the gaps of `rows` rows in turns of a run; `first_s` is the first of them, with mean times."""
    if self._overlap and run.is_host_bound:
      self._gaps.add_run(first_s, 0.0, turns, rows)
    elif not run.factors.is_spread:
      self._gaps.add_run(first_s, run.slope_s, turns, rows)
    else:
      host_s = first_s - run.first_s
      parts = min(turns, _GAP_PARTS)
      for part in range(parts):
        begin, end = turns * part // parts, turns * (part + 1) // parts
        share = run.factors.take_next() / run.factors.mean
        device_s = run.first_s + run.slope_s * begin
        self._gaps.add_run(host_s + device_s * share, run.slope_s * share, end - begin, rows)

  def _take_steps(self, turns: int, first_s: float, slope_s: float) -> None:
    """Counts steps of all decoding rows, and takes their blocks."""
    rows, size, step, phases = self._decodes, self._block_size, self._step, self._phases
    grown = turns // size * rows
    for ahead in range(turns % size):
      grown += phases[(step + ahead) % size]
    if grown:
      self.pool.take(grown)
    self._step = step + turns
    self._keys_read += turns * rows
    self.num_steps += turns
    self.decode_tokens += turns * rows
    self.busy_s += turns * first_s + slope_s * turns * (turns - 1) / 2
    self.ideal_s += turns * (self._times.ideal_s[rows] - self._times.linear_s[rows] + first_s)
    self.ideal_s += slope_s * turns * (turns - 1) / 2

  def _take_ended(self) -> tuple[CountedRequest, ...]:
    """Removes the rows whose last step was launched."""
    ends = self._ends
    ended = []
    while ends and ends[0][0] <= self._step:
      request = heapq.heappop(ends)[2]
      self._leave_decodes(request)
      request.sampled = request.output
      ended.append(request)
    return tuple(ended)

  def _leave_decodes(self, request: CountedRequest) -> None:
    """Takes a row out of the decoding ones, and notes its blocks."""
    size = self._block_size
    positions = request.known + self._step - request.begin_step
    self._decodes -= 1
    self._keys_read -= positions + 1
    self._phases[(request.begin_step - request.known) % size] -= 1
    request.computed = positions
    request.blocks = -(-positions // size)

  def _join_decodes(self, request: CountedRequest) -> None:
    """Adds a row whose known tokens are computed from the next step on."""
    request.begin_step = self._step
    request.end_step = self._step + request.output - request.sampled
    self._decodes += 1
    self._keys_read += request.known + 1
    self._phases[(request.begin_step - request.known) % self._block_size] += 1
    heapq.heappush(self._ends, (request.end_step, request.index, request))

  # Steps with prompts, or without enough blocks.

  def _plan_prompts(self, now: float) -> tuple[_CountedStep, float, float] | None:
    """Plans one step as Scheduler._plan_step does; returns it with its launch and device seconds."""
    pool, size, batching = self.pool, self._block_size, self._batching
    preemptions = self.num_preemptions
    while self._decodes and self._phases[self._step % size] > pool.free:
      self._preempt_latest()
    decodes = self._decodes
    if decodes:
      pool.take(self._phases[self._step % size])
    self._took_blocks = True
    tokens_left, chunk_left = self._max_tokens - self._rows_held, batching.prompt_limit(self._rows_held)
    rows: list[list] = []  # [request, tokens]
    for request in tuple(self._prefilling):
      if request.begin_step == -2:  # preempted in this step
        continue
      count = min(batching.piece(request.known - request.computed, chunk_left), tokens_left + 1)
      if count > 0:
        count = self._cover(request, count)
        if not count:
          break
        chunk_left -= count
        tokens_left -= count - 1
        rows.append([request, count])
    self._took_blocks = False
    if self.num_preemptions != preemptions:
      rows = [row for row in rows if row[0].begin_step != -2]
      decodes = self._decodes
    admissions = 0
    used = decodes + sum(row[1] for row in rows)
    may_admit = self.num_preemptions == preemptions
    if may_admit:
      admitted, tokens_left = self._admit(rows, chunk_left, tokens_left, now)
      admissions += admitted
      used = decodes + sum(row[1] for row in rows)
    if not used:
      return None
    shape = self._times.shape[used]
    if batching.fills_padding and rows and used < shape:
      left = shape - used
      for row in rows:
        request, count = row
        ends_at = request.computed + count
        space = (request.blocks + pool.free) * size - ends_at
        more = min(request.known - ends_at, left, tokens_left, space)
        if more > 0:
          row[1] = self._cover(request, count + more)
          left -= row[1] - count
          tokens_left -= row[1] - count
      if may_admit:
        admissions += self._admit(rows, left, tokens_left, now)[0]
      used = decodes + sum(row[1] for row in rows)
    return self._launch(now, decodes, rows, used, admissions)

  def _launch(
    self, now: float, decodes: int, rows: list[list], used: int, admissions: int
  ) -> tuple[_CountedStep, float, float]:
    """Computes the times of a planned step, and moves its rows on."""
    times, costs = self._times, self._times.costs
    decode_rows, decode_keys = decodes, self._keys_read
    prefill_tokens = prefill_keys = prefill_pairs = 0
    for request, count in rows:
      start = request.computed
      if count == 1:
        decode_rows += 1
        decode_keys += start + 1
      else:
        prefill_tokens += count
        prefill_keys += start + count
        prefill_pairs += count * start + count * (count + 1) // 2
    work = AttentionWork(decode_rows, decode_keys, prefill_tokens, prefill_keys, prefill_pairs)
    shape = times.shape[used]
    has_prompt = prefill_tokens > 0
    since, after = self._warmth.step(now, shape, has_prompt)
    factor = times.factors(shape, after).take_next()
    extra_s = costs.attention(work) + costs.cold(since)
    device_s = (times.linear_s[used] + extra_s) * factor
    num_rows = decodes + len(rows)
    launch_s = costs.launch_seconds(num_rows, prefill_tokens, admissions)
    launch_s *= times.launch_factors[Launch.of(has_prompt, since, after)].take_next()
    self.busy_s += device_s
    self.ideal_s += (times.ideal_s[used] + extra_s) * factor
    self.num_steps += 1
    self.decode_tokens += decodes
    self._step += 1
    self._keys_read += decodes
    ends = list(self._take_ended()) if decodes else []
    firsts, computed = [], []
    for request, count in rows:
      request.computed += count
      self.prefill_tokens += count
      if request.keys:
        computed.append((request, request.computed, request.preemptions))
      if request.computed < request.known:
        continue
      self._prefilling.remove(request)
      firsts.append(request)
      request.sampled += 1
      if request.sampled == request.output:
        ends.append(request)
      else:
        self._join_decodes(request)
    step = _CountedStep(decodes, num_rows, tuple(firsts), tuple(ends), tuple(computed))
    return step, launch_s, device_s

  def _admit(self, rows: list[list], limit: int, tokens_left: int, now: float) -> tuple[int, int]:
    """Admits waiting requests in order, as Scheduler._admit does; returns their number and the tokens left."""
    waiting, pool, size = self.waiting, self.pool, self._block_size
    admitted = 0
    while waiting and self._rows_held < self._max_rows and not self._is_blocked:
      most = min(limit, tokens_left)
      if most <= 0:
        break
      request = waiting[0]
      known = request.known
      cached, hits, unheld = request.transferred, 0, 0
      if request.keys and not cached and self._config.shares_prefixes:
        hits, unheld = pool.match(request.keys, (known - 1) // self._key_tokens)
        cached = hits * self._key_tokens
      count = self._batching.piece(known - cached, most)
      hit_blocks, kept = hits * self._blocks_per_key, 0
      if request.kept[1] and hits == len(request.keys):
        kept = min(pool.count_kept(*request.kept), (known - 1) // size - hit_blocks)
        cached += kept * size
        count = self._batching.piece(known - cached, most)
      idle = unheld * self._blocks_per_key + kept
      if -(-known // size) - hit_blocks - kept > pool.free - idle - self._rows_held:
        self._is_blocked = True
        break
      waiting.popleft()
      if self.pool.host_keys and not request.has_loaded and self._awaits_load(request, hits, now):
        continue
      held = list(request.keys[:hits])
      pool.share(held)
      if kept:
        pool.take_kept(request.kept[0], kept)
      request.held_keys, request.published = held, hits
      request.blocks = -(-(cached + count) // size)
      pool.take(request.blocks - hit_blocks - kept)
      request.computed, request.begin_step = cached, -1
      if not request.sampled:
        self.prompt_tokens += request.prompt
        self.cached_tokens += hits * self._key_tokens
      request.transferred = 0
      self._rows_held += 1
      self._prefilling.append(request)
      rows.append([request, count])
      limit -= count
      tokens_left -= count
      admitted += 1
    return admitted, tokens_left

  def _awaits_load(self, request: CountedRequest, hits: int, now: float) -> bool:
    """Returns whether the host pool has more of the prompt; starts a load if none runs. The request fits the pool."""
    if not request.keys or request.transferred:
      return False
    limit = min(len(request.keys), (request.known - 1) // self._key_tokens)  # known may include an answer
    more = self.pool.match_host(request.keys, hits, limit)
    if not more:
      return False
    self._awaiting.append(request)
    if self._load is None:
      keys = request.keys[: hits + more]
      self.pool.begin_load(keys, hits)
      self._load = (request, keys, hits)
      self._sink.begin_load(self, request, more, now)
    return True

  def _cover(self, request: CountedRequest, count: int) -> int:
    """Takes blocks for `count` more tokens; returns how many fit, or 0 after it preempted the request itself."""
    pool, size = self.pool, self._block_size
    space = request.blocks * size - request.computed
    if space >= count:
      return count
    while space == 0 and not pool.free:
      if self._preempt_latest() is request:
        return 0
    more = min(-(-(count - space) // size), pool.free)
    pool.take(more)
    request.blocks += more
    return min(count, request.blocks * size - request.computed)

  def _preempt_latest(self) -> CountedRequest:
    """Takes blocks and slot of the running request that arrived last; it computes its tokens again later."""
    decoding = max((entry[2] for entry in self._ends), key=_arrival_order, default=None)
    prefilling = max(self._prefilling, key=_arrival_order, default=None)
    victim = max((each for each in (decoding, prefilling) if each is not None), key=_arrival_order)
    if victim is decoding:
      self._ends = [entry for entry in self._ends if entry[2] is not victim]
      heapq.heapify(self._ends)
      self._leave_decodes(victim)
      victim.blocks += self._took_blocks and victim.computed % self._block_size == 0
      victim.sampled += self._step - victim.begin_step
      victim.last_s = self._last_emit_s
    else:
      self._prefilling.remove(victim)
    full = victim.computed // self._block_size - len(victim.held_keys) * self._blocks_per_key
    victim.known = victim.prompt + victim.sampled
    victim.computed, victim.begin_step = 0, -2
    victim.preemptions += 1
    victim.has_loaded = False
    self.num_preemptions += 1
    self._release(victim)
    if self._config.shares_prefixes and full > 0:
      victim.kept = (self.pool.keep_blocks(full), full)
    self.waiting.appendleft(victim)
    return victim

  # Values.

  def _commit(self, step: _CountedStep, now: float) -> None:
    """Delivers a step's tokens."""
    if step.decodes:
      self._gaps.add(now - self._last_emit_s, step.decodes)
    self._last_emit_s = now
    for request, computed, preemptions in step.computed:
      if request.preemptions == preemptions and self._config.shares_prefixes:
        self._publish(request, computed)
    for request in step.firsts:
      if request.first_s < 0:
        request.first_s = now
        self._sink.first_token(request, now)
      else:
        self._gaps.add(now - request.last_s, 1)
    for request in step.ends:
      self._release(request)
      self._sink.ended(self, request, now)

  def _publish(self, request: CountedRequest, computed: int) -> None:
    keys, full = request.keys, computed // self._key_tokens
    for index in range(request.published, min(full, len(keys))):
      if self.pool.publish(keys[index]):
        request.held_keys.append(keys[index])
    request.published = max(request.published, full)

  def _release(self, request: CountedRequest) -> None:
    """Returns slot and blocks."""
    private = request.blocks - len(request.held_keys) * self._blocks_per_key
    cached = 0
    if request.keys and self._config.shares_prefixes and request.begin_step != -2:
      cached = max(
        0, min(private, request.computed // self._block_size - len(request.held_keys) * self._blocks_per_key)
      )
    self.pool.release(request.held_keys, private, cached)
    request.held_keys, request.blocks, request.published = [], 0, 0
    self._rows_held -= 1
    self._is_blocked = False


def _arrival_order(request: CountedRequest) -> int:
  return request.index


def check_modelled(config: EngineConfig) -> None:
  """Raises ConfigError for settings that counts do not model."""
  remedy = "the fleet's planner does not model it; set another value, or use python -m tools.simulate"
  if config.policy != "fcfs":
    raise ConfigError(f"policy={config.policy}: {remedy}")
  if config.batching not in ("chunked", "disaggregated"):
    raise ConfigError(f"batching={config.batching}: {remedy}")
