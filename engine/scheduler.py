"""Turns counts into batches and values into events. Pure Python; may not use clocks, threads, I/O or arrays.

The scheduler has no prefill or decode phase: in every step num_computed_tokens catches up with num_tokens, as in vLLM's
v1 scheduler. Planning needs only counts; token values matter at commit, one step later. The invariants:

  - A step takes running requests in the policy's order. It preempts the last one in that order, never one already taken
    in this step. So it undoes nothing that it scheduled, and the first in order always advances.
  - No step both preempts and admits, so a preempted request returns only after its last value has arrived.
  - The scheduler publishes a block when the step that filled it returns with finite logits. So its tokens are known,
    and no NaN can reach another request through the cache.
  - The last known token never comes from the cache, because a step must compute at least one position to sample from.
  - A constrained request has no row while one of its tokens is in flight, because the next mask needs that token. With
    overlap, all constrained requests decode together in every second step; other requests do not wait.
  - Tokens that a constraint forces join the output at commit. The request then has known tokens that no step has
    computed, as after a preemption, and its next row computes them and samples after the last one.
  - A block may be freed while a launched step still writes to it, because steps run in order of launch.
  - The plan of a row with drafts assumes that all are accepted; commit takes back the rejected ones. So does the plan
    of the request's next row, which may be launched before that (Batch.behind); the device then starts it where the
    accepted ones end. Drafts join a step that is already planned: they preempt nobody, and delay no admission. A block
    for rejected drafts stays with its request, which soon needs it.
  - Planning may evict cached blocks whose copies go to the host pool. Whoever launches the step starts them before it.
"""

import bisect
from collections.abc import Mapping

from engine.admission import AdmissionControl
from engine.batch import PIECE_BLOCKS, Admission, Batch, StepResult, TokenLogprobs
from engine.batching import make_batching
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.constraint import (
  CONSTRAINT_BROKE,
  NO_VERDICTS,
  ConstrainedDraft,
  Constraint,
  FailedConstraint,
  Recorded,
  Verdicts,
)
from engine.draft_rows import DraftPlanner, StepSize
from engine.policy import Policy, make_policy
from engine.prefix_events import PrefixEventLog
from engine.prefix_keys import PrefixKeys
from engine.prefix_loads import PrefixLoads
from engine.request import GRAMMAR_LIMIT, NUMERICAL_ERROR, FinishReason, Request, RequestStatus, TokenEvent, make_event
from engine.row_values import cut_tokens_at_end, judge_rows, split_logprobs
from engine.shapes import StepShape
from engine.speculation.drafter import Drafter
from engine.speculation.speculation import Speculation
from engine.steady_decode import SteadyDecode
from engine.step_plan import StepPlan
from engine.waiting_queue import WaitingQueue, by_rank

_EVICTED_SHARE = 8  # with a host pool, an eviction takes at most this part of a small pool


def _earliest_deadline(request: Request) -> float:
  """Returns the earliest active deadline, or infinity."""
  queue = request.queue_deadline if request.first_scheduled_time is None else None
  return min([each for each in (queue, request.deadline) if each is not None], default=float("inf"))


class Scheduler:
  """The mechanism of scheduling: blocks, counts and invariants. The policy decides the order of requests.

  Call order: any of add, abort and expire; then schedule; then commit of the previous batch (without overlap: of this
  one). At most one batch may be uncommitted at a call of schedule, and commits follow the order of batches.
  """

  def __init__(self, config: EngineConfig):
    self.config = config
    self.ladder = config.ladder
    evict_at_once = min(PIECE_BLOCKS, -(-config.num_blocks // _EVICTED_SHARE)) if config.num_host_blocks else 0
    self.pool = BlockPool(config.num_blocks, evict_at_once)
    self.loads = PrefixLoads(self.pool, config.num_host_blocks) if config.num_host_blocks else None
    self.num_preemptions = 0
    self._policy = make_policy(config)
    # None if the policy holds no request back, because a call for each of 256 rows takes 10 us.
    policy = type(self._policy)
    self._holds = None if policy.holds_back is Policy.holds_back else self._policy.holds_back
    self._looks_at_all = self._holds is not None or policy.begin_step is not Policy.begin_step  # in every step
    self._admission = AdmissionControl(config)
    self._batching = make_batching(config)
    self._eos = frozenset(config.eos_token_ids)
    self._requests: dict[str, Request] = {}
    self._waiting = WaitingQueue()
    self._keys = PrefixKeys(config)
    self._running: list[Request] = []  # sorted by rank
    self._slots = list(range(config.max_num_seqs - 1, -1, -1))  # free slots; the lowest is allocated first
    self._launched: dict[int, list[Request]] = {}  # step -> requests of its rows
    self._times: dict[int, float] = {}  # step -> planning time
    self._behind_steps: set[int] = set()  # uncommitted steps that were planned while another was in flight
    self._last_commit = 0.0
    self._num_steps = 0
    self._num_arrivals = 0
    self._num_constrained = 0  # live requests with a constraint
    self._constrained_step = -1  # the latest step in which a constrained request decoded
    self._speculation = None if config.speculation == "none" else Speculation(config)
    self._drafts = DraftPlanner(config)
    self._steady = SteadyDecode(config.block_size, self._batching.reserves, self._speculation is not None)
    self._ended: list[Request] = []  # requests finished since take_ended()
    self._next_deadline = float("inf")  # no live request has an earlier deadline

  def log_prefix_events(self, log: PrefixEventLog) -> None:
    """Records the prefix cache's changes in `log` from now on. Call it before the first request."""
    self.pool.event_log = self._keys.event_log = log

  def replace_drafter(self, drafter: Drafter) -> None:
    """Proposes drafts by `drafter` from now on. Call it before the first request, with speculation."""
    assert self._speculation is not None and not self._requests
    self._speculation.replace_drafter(drafter)

  @property
  def num_waiting(self) -> int:
    return len(self._waiting)

  @property
  def num_waiting_tokens(self) -> int:
    """Prompt tokens of waiting requests."""
    return self._waiting.num_tokens

  @property
  def num_running(self) -> int:
    return len(self._running)

  def opens_at(self) -> float | None:
    """When waiting requests may join without another event, on the clock of `schedule`; None: never."""
    oldest = self._waiting.requests[0].arrival_time if self._waiting else 0.0
    return self._batching.opens_at(len(self._running), len(self._waiting), oldest)

  def kv_usage(self) -> tuple[int, int]:
    """Returns the tokens of running requests with KV, and the capacity of their blocks in tokens; see StepRecord."""
    running = self._running
    tokens = sum([request.num_computed_tokens for request in running])
    slots = sum([len(request.block_table) for request in running]) * self.config.block_size
    return tokens + self._steady.num_uncounted, slots

  def settle_counts(self) -> None:
    """Updates the counters of all requests; call it before reading them. See steady_decode.py."""
    self._steady.settle_counts()

  def constrained_drafts(self) -> Mapping[str, ConstrainedDraft]:
    """Returns what constraints proposed while the latest step was planned, by request; for a trace."""
    return {} if self._speculation is None else self._speculation.constrained_drafts

  def set_constrained_drafts(self, drafts: Mapping[str, tuple[tuple[int, ...], bool]]) -> None:
    """Sets what constraints of a trace propose for the next step: tokens, and whether they are forced."""
    for request in self._requests.values():
      if isinstance(request.constraint, Recorded):
        request.constraint.draft = drafts.get(request.id, ((), False))

  def take_ended(self) -> list[Request]:
    """Returns the requests that finished since the last call, in order."""
    ended, self._ended = self._ended, []
    return ended

  # Arrivals and finishes.

  def check_capacity(
    self, request: Request, requests_ahead: int = 0, tokens_ahead: int = 0, of_tenant_ahead: tuple[int, int] = (0, 0)
  ) -> None:
    """Raises Overloaded if the queue, with the requests ahead, is full for `request`. Only reads counts.

    Args:
      request: not yet added.
      requests_ahead, tokens_ahead: requests on their way to the queue, and their prompt tokens.
      of_tenant_ahead: the same two numbers for the request's tenant alone.
    """
    requests, tokens = self._waiting.of_tenant(request.tenant)
    self._admission.check_capacity(
      request,
      len(self._waiting) + requests_ahead,
      self._waiting.num_tokens + tokens_ahead,
      bool(self._slots),
      (requests + of_tenant_ahead[0], tokens + of_tenant_ahead[1]),
    )

  def add_request(self, request: Request) -> None:
    """Queues a new request, which passed validate_request() and check_capacity(), at its arrival_time."""
    assert request.id not in self._requests, f"request {request.id!r} is live; the engine rejects duplicates"
    config = self.config
    self._num_arrivals += 1
    request.rank = (*self._policy.rank(request, request.arrival_time), self._num_arrivals)
    params = request.params
    request.stop_ids = frozenset() if params.ignore_eos else self._eos  # one shared object, which saves cache misses
    if params.stop_token_ids:
      request.stop_ids = request.stop_ids.union(params.stop_token_ids)
    request.max_computed_tokens = request.num_prompt_tokens + params.max_tokens - 1
    if request.leader_id is not None:
      request.leader = self._requests.get(request.leader_id)
    request.root_key = self._keys.make_root_key(request, self._num_arrivals)
    if request.queue_deadline is None and config.queue_timeout_s:
      request.queue_deadline = request.arrival_time + config.queue_timeout_s
    if request.deadline is None and config.request_timeout_s:
      request.deadline = request.arrival_time + config.request_timeout_s
    self._next_deadline = min(self._next_deadline, _earliest_deadline(request))
    request.takes_forced = self._takes_forced(request)
    self._requests[request.id] = request
    self._num_constrained += request.constraint is not None
    self._policy.note_arrival(request)
    self._enqueue(request)

  def _takes_forced(self, request: Request) -> bool:
    """Returns whether forced tokens may join the request's output without logits.

    Log probabilities need these, and penalties of later tokens count what the device has sampled.
    """
    params = request.params
    return (
      request.constraint is not None
      and self.config.speculation == "auto"
      and request.speculation in ("", "auto")
      and params.logprobs is params.prompt_logprobs is None
      and params.presence_penalty == params.frequency_penalty == 0
      and params.repetition_penalty == 1
    )

  def abort_request(
    self, request_id: str, reason: FinishReason = FinishReason.ABORT, message: str = ""
  ) -> list[TokenEvent]:
    """Ends a request in any state. Ignores an unknown or finished id, because cancellations race with finishes."""
    request = self._requests.get(request_id)
    return [] if request is None else [self._finish(request, reason, message=message)]

  def expire_requests(self, now: float) -> list[TokenEvent]:
    """Ends requests past their queue deadline or total deadline."""
    if now < self._next_deadline:
      return []
    events = []
    for request in [each for each in self._requests.values() if now >= _earliest_deadline(each)]:
      waited = now - request.arrival_time
      if request.deadline is not None and now >= request.deadline:
        message = f"not finished after {waited:.1f} s, its deadline; lower max_tokens or allow more time"
      else:
        message = f"still queued after {waited:.1f} s, its queue deadline; try again when the server is less busy"
      events.append(self._finish(request, FinishReason.TIMEOUT, message=message))
    self._next_deadline = min(map(_earliest_deadline, self._requests.values()), default=float("inf"))
    return events

  # Planning: counts only.

  def schedule(self, now: float) -> Batch | None:
    """Plans and returns the next step, or None if nothing can run. The caller must launch it before the next call."""
    may_join = bool(self._waiting and self._slots)
    # Steps that repeat cost the host less, so drafts must pay for leaving them.
    may_repeat = bool(self._steady.steps_left) and not may_join
    speculation = self._speculation
    has_drafts = (
      speculation is not None
      and speculation.next_look <= self._num_steps
      and self._drafts.find_drafts(speculation, self._num_steps, len(self._running), self._launched, may_repeat)
    )
    planned = None
    if not (may_join or has_drafts):
      planned = self._steady.plan_step(self._num_steps, self.pool, self._batching, self.ladder)
    if planned is None:
      self._steady.stop_run()
      was_drafted = self._drafts.drafted_step == self._num_steps - 1
      planned = self._plan_step(now)
      if planned is None:
        return None
      if speculation is not None and not planned[0].num_drafts and (was_drafted or (has_drafts and may_repeat)):
        speculation.costs.note_slow_step(planned[0].step)
    batch, rows = planned
    if speculation is not None and speculation.model is not None:
      batch = speculation.plan_draft_model(batch, self._launched)
    self._num_steps += 1
    self._times[batch.step] = now
    if self._launched:
      self._behind_steps.add(batch.step)
    self._launched[batch.step] = rows
    self._policy.charge_step(rows, batch.counts, batch.shape.tokens)
    return batch

  def _plan_step(self, now: float) -> tuple[Batch, list[Request]] | None:
    """Plans a step and its rows from the requests: running ones continue, and waiting ones may join."""
    running, block_size = self._running, self.config.block_size
    plan = StepPlan(self.ladder.max_tokens - len(running), self.ladder.max_logits - len(running))
    batching = self._batching
    chunk_left, row_limit = batching.prompt_limit(len(running)), batching.row_limit()
    policy, holds, constrained = self._policy, self._holds, self._num_constrained
    # New constrained requests join the step of the others; rows in both steps would make both more expensive.
    held = self._constrained_step in self._launched
    awaits = self._drafts.awaited_step in self._launched
    policy.begin_step(running, self._waiting.requests)
    if policy.is_dynamic:
      self._update_ranks(now)
    num_preemptions = self.num_preemptions
    decodes: list[Request] = []
    starts: list[int] = []
    # Preemption pops victims off the end of this list: after the current request, or itself if it is last.
    for request in running:
      position = request.num_computed_tokens
      if position >= request.num_sent_tokens:
        # Or its last value is in flight.
        if position >= request.max_computed_tokens or (holds is not None and holds(request)):
          continue
        if constrained and request.constraint is not None and (held or request.num_in_flight):
          continue  # until the constraint accepts the token in flight
        if awaits and request.num_drafts:
          continue  # until their number of accepted ones is known
        if position % block_size == 0 and not self._cover(request, 1, plan):
          break
        request.num_computed_tokens = position + 1
        request.num_in_flight += 1
        decodes.append(request)
        starts.append(position)
      else:
        count = batching.piece(request.num_sent_tokens - position, chunk_left)
        count = min(count, row_limit, plan.tokens_left + 1)
        if self._needs_every_position(request):
          count = min(count, plan.logits_left + 1)
        if count > 0:
          count = policy.grant_tokens(request, count)
        if count > 0:
          count = self._cover(request, count, plan)
          if not count:
            break
          chunk_left -= count
          plan.tokens_left -= count - 1
          plan.logits_left -= self._num_logits(request, count) - 1
          plan.add_row(request, count)
    num_tokens = len(decodes) + sum(plan.counts)
    may_admit = self.num_preemptions == num_preemptions
    if may_admit:
      num_tokens += self._admit(plan, chunk_left, now)
    if not num_tokens:
      return None
    padded = batching.step_tokens(num_tokens, max(plan.counts, default=1), len(running))
    shape = self.ladder.fit(padded)
    if batching.fills_padding and plan.requests and num_tokens < shape.tokens:
      # The ladder pads the step to its rung, so prompt tokens in that padding are free.
      num_tokens += self._grow(plan, shape.tokens - num_tokens)
      if may_admit:
        num_tokens += self._admit(plan, shape.tokens - num_tokens, now)
    if self._speculation is not None and self._speculation.has_drafts and decodes:
      num_logits = len(decodes) + sum(map(self._num_logits, plan.requests, plan.counts))
      size = StepSize(self._num_steps, len(running), num_tokens, num_logits, shape)
      num_drafts = self._drafts.add_drafts(self._speculation, decodes, starts, plan, size, self.pool)
      if num_drafts:
        padded = num_tokens + num_drafts
        shape = self.ladder.fit(padded)
    return self._seal(decodes, starts, plan, shape, padded)

  def _update_ranks(self, now: float) -> None:
    """Recomputes every rank with the policy; ties stay in the order of arrival."""
    rank = self._policy.rank
    for request in (*self._running, *self._waiting):
      request.rank = (*rank(request, now), request.rank[-1])
    self._running.sort(key=by_rank)
    self._waiting.sort()

  def _seal(
    self, decodes: list[Request], starts: list[int], plan: StepPlan, shape: StepShape, padded: int
  ) -> tuple[Batch, list[Request]]:
    """Freezes the plan: decodes, then those with drafts, then other rows. Also returns the rows' requests."""
    columns = self._steady.columns_of(decodes)
    behind = plan.list_behind(decodes) if self._speculation is not None else ()
    more_requests, more_counts, more_logits, more_samples, more_token_ids = [], [], [], [], []
    for request, tokens, _ in plan.drafted:
      starts.append(request.num_computed_tokens - len(tokens))
      more_requests.append(request)
      more_counts.append(len(tokens))
      more_logits.append(len(tokens))
      more_samples.append(True)
      more_token_ids.append(tokens)
    more_requests += plan.requests
    more_counts += plan.counts
    for request, count in zip(plan.requests, plan.counts, strict=True):
      start = request.num_computed_tokens
      end = start + count
      reaches_end = end == request.num_sent_tokens
      starts.append(start)
      more_logits.append(self._num_logits(request, count))
      more_samples.append(reaches_end)
      more_token_ids.append(request.known_tokens(start, end))
      request.num_computed_tokens = end
      request.num_in_flight += reaches_end
    rows = columns.requests + more_requests if more_requests else columns.requests  # the same list, for steady steps
    samples = columns.samples + tuple(more_samples)
    masks: tuple[tuple[int, bytes], ...] = ()
    if self._num_constrained:
      later = {request.id: masks for request, _, masks in plan.drafted}
      masks = tuple(
        [
          (row, mask)
          for row, request in enumerate(rows)
          if request.constraint is not None and samples[row]
          for mask in (self._allowed(request, request.constraint), *later.get(request.id, ()))
        ]
      )
    step = self._num_steps
    if masks and any(rows[row].output_token_ids for row, _ in masks):
      self._constrained_step = step
    all_starts = tuple(starts)
    was_alone, columns.alone = columns.alone, not (more_requests or behind)
    if columns.alone and len(rows) == len(self._running) and not (self._looks_at_all or self._num_constrained):
      self._steady.begin_run(all_starts)
    batch = Batch(
      step=step,
      shape=shape,
      request_ids=columns.request_ids + tuple([request.id for request in more_requests]),
      slots=columns.slots + tuple([request.slot for request in more_requests]),
      starts=all_starts,
      counts=columns.ones + tuple(more_counts),
      num_logits=columns.ones + tuple(more_logits),
      samples=samples,
      token_ids=columns.token_ids + tuple(more_token_ids),
      admissions=tuple(plan.admissions),
      new_blocks=tuple(plan.new_blocks),
      masks=masks,
      padded_tokens=padded,
      num_drafts=plan.count_drafts(len(decodes)),
      repeats=was_alone and columns.alone,
      behind=behind,
    )
    return batch, rows

  def _allowed(self, request: Request, constraint: Constraint) -> bytes:
    """Returns the mask of a constraint. If that fails, the request ends when the step returns."""
    try:
      return constraint.allowed()
    except Exception:  # foreign code, whose errors may affect only this request
      request.constraint = failed = FailedConstraint(self.config.vocab_size)
      return failed.allowed()

  def _admit(self, plan: StepPlan, limit: int, now: float) -> int:
    """Admits waiting requests in order while tokens (at most `limit`), slots and blocks last; returns tokens taken.

    Strictly in order: no request overtakes one that does not fit, or a long prompt would starve. It skips only siblings
    that wait for their leader's prompt, requests whose prefix comes from the host pool, and those that the policy holds
    back.
    """
    waiting, batching, policy = self._waiting.requests, self._batching, self._policy
    if not waiting or not self._slots or limit <= 0:
      return 0
    places = batching.places(len(self._running), len(waiting), waiting[0].arrival_time, now)
    if places <= 0:
      return 0
    row_limit = batching.row_limit()
    taken = 0
    for request in policy.candidates(waiting):
      count = min(limit - taken, row_limit, plan.tokens_left)
      if count <= 0 or plan.logits_left <= 0 or not self._slots or not places:
        break
      if self._awaits_leader(request) or self._awaits_load(request) or not policy.may_join(request):
        continue
      if self._needs_every_position(request):
        count = min(count, plan.logits_left)
      count = policy.grant_tokens(request, count)
      if not count:
        continue
      count = self._place(request, count, whole=batching.whole_prompts and bool(plan.requests))
      if not count:
        break
      self._waiting.remove(request)
      places -= 1
      bisect.insort(self._running, request, key=by_rank)
      request.status = RequestStatus.RUNNING
      request.slot = self._slots.pop()
      if self._speculation is not None:
        self._speculation.add_request(request)
      self._admission.note_admission(now)
      if request.first_scheduled_time is None:
        request.first_scheduled_time = now
        request.num_prompt_cached_tokens = request.num_cached_tokens
      plan.admissions.append(
        Admission(
          slot=request.slot,
          token_ids=request.known_tokens(0, request.num_sent_tokens),
          num_prompt_tokens=request.num_prompt_tokens,
          block_ids=tuple(request.block_table),
          params=request.params,
          seed=request.seed,
          constrained=request.constraint is not None,
          imported=request.transfer,
          adapter_slot=request.adapter_slot,
        )
      )
      request.num_transferred_tokens, request.transfer = 0, None
      plan.add_row(request, count)
      taken += count
      plan.tokens_left -= count
      plan.logits_left -= self._num_logits(request, count)
    return taken

  def _place(self, request: Request, limit: int, whole: bool) -> int:
    """Gives a waiting request its cached prefix, and blocks for up to `limit` more tokens; returns their number or 0.

    With `whole` it places all tokens or none.

    It allocates blocks for the first chunk. It also requires free blocks for all known tokens, and one for each running
    request, because a request admitted into a full pool would soon be preempted and computed twice. (200 requests of
    64 + 64 tokens on a pool of 160 blocks: 136 preemptions without that reserve, 4 with it, for 3 % more steps.)
    """
    assert request.num_in_flight == 0, f"request {request.id!r} returns before its last value arrived"
    block_size, pool = self.config.block_size, self.pool
    known = request.num_tokens
    hits: list[int] = []
    transferred = request.num_transferred_tokens
    if self.config.shares_prefixes and not transferred and not self._needs_every_position(request):
      hits = pool.match_blocks(self._keys.first_keys(request, (known - 1) // block_size))
    cached = transferred or len(hits) * block_size
    count = self._batching.piece(known - cached, limit)
    if whole and count < known - cached:
      return 0
    if not self._fits(request, hits):
      return 0
    held = request.num_prompt_tokens + request.params.max_tokens if self._batching.reserves else cached + count
    if self.loads is not None:
      self.loads.forget_request(request.id)
    pool.share_blocks(hits)
    request.block_table = hits + pool.allocate_blocks(-(-held // block_size) - len(hits))
    request.num_sent_tokens = known
    request.num_cached_tokens = request.num_computed_tokens = cached
    request.num_published_blocks = len(hits)
    return count

  def _fits(self, request: Request, hits: list[int]) -> bool:
    """Returns whether the pool has the blocks that `_place` requires besides the cached ones."""
    if self._batching.reserves:
      wanted, growth = request.num_prompt_tokens + request.params.max_tokens, 0
    else:
      wanted, growth = request.num_tokens, len(self._running)
    pool = self.pool
    return -(-wanted // self.config.block_size) - len(hits) <= pool.num_free - pool.num_idle(hits) - growth

  def _awaits_load(self, request: Request) -> bool:
    """Returns whether the request's prefix is on its way from the host pool, or will be; starts a load if none runs.

    A request that would not fit does not wait here: it keeps its place at the head of the queue.
    """
    loads = self.loads
    if loads is None or not loads.may_load(request.id) or self._needs_every_position(request):
      return False
    if loads.awaits_turn(request.id):
      return True
    keys = self._keys.first_keys(request, (request.num_tokens - 1) // self.config.block_size)
    hits = self.pool.match_blocks(keys)
    num_kept = loads.host.count_kept(keys, len(hits))
    if not num_kept:
      return False
    if loads.is_loading:
      loads.await_turn(request.id, keys[len(hits)])
      return True
    if not self._fits(request, hits):
      return False
    loads.begin_load(request.id, keys[: len(hits) + num_kept], hits)
    return True

  def _grow(self, plan: StepPlan, slack: int) -> int:
    """Grows planned rows by up to `slack` prompt tokens, without preemption; returns the tokens added."""
    block_size, pool = self.config.block_size, self.pool
    left = slack
    for row, request in enumerate(plan.requests):
      count = plan.counts[row]
      end = request.num_computed_tokens + count
      room = (len(request.block_table) + pool.num_free) * block_size - end
      more = min(request.num_sent_tokens - end, left, plan.tokens_left, room)
      if self._needs_every_position(request):
        more = min(more, plan.logits_left)
      if more > 0:
        count = self._cover(request, count + more, plan)
        plan.logits_left -= self._num_logits(request, count) - self._num_logits(request, plan.counts[row])
        plan.tokens_left -= count - plan.counts[row]
        left -= count - plan.counts[row]
        plan.counts[row] = count
    return slack - left

  def _cover(self, request: Request, count: int, plan: StepPlan) -> int:
    """Extends the block table for `count` more tokens and returns how many fit.

    It takes free blocks. Only if not even one token fits does it end a load of prefix blocks, and then preempt, last in
    order first. Returns 0 if it preempted the request itself.
    """
    pool, table, block_size = self.pool, request.block_table, self.config.block_size
    room = len(table) * block_size - request.num_computed_tokens
    if room >= count:
      return count
    while room == 0 and not pool.num_free:
      if self.loads is not None and self.loads.end_load():
        continue
      victim = self._running.pop()
      self._preempt(victim)
      if victim is request:
        return 0
    plan.extend_table(request, min(-(-(count - room) // block_size), pool.num_free), pool)
    return min(count, len(table) * block_size - request.num_computed_tokens)

  def _preempt(self, victim: Request) -> None:
    """Releases slot and blocks of a victim, which keeps its place in the order and recomputes its KV later."""
    self.num_preemptions += 1
    victim.num_preemptions += 1
    victim.num_lost_tokens += victim.num_computed_tokens - victim.num_cached_tokens
    self._take_back(victim)
    self._enqueue(victim)

  def _awaits_leader(self, request: Request) -> bool:
    """Returns whether a sibling would compute blocks that its leader is about to publish."""
    leader = request.leader
    return (
      leader is not None
      and self.config.shares_prefixes
      and leader.status is not RequestStatus.FINISHED
      and not leader.output_token_ids
    )

  def _needs_every_position(self, request: Request) -> bool:
    """Returns whether every position of the prompt needs a logit row, and none may come from the prefix cache.

    True while prompt log probabilities are missing, and for a mean of hidden states, which each admission starts anew.
    """
    params = request.params
    if params.prompt_logprobs is not None and request.num_prompt_logprobs < len(request.prompt_token_ids) - 1:
      return True
    return params.embed and self.config.pooling == "mean"

  def _num_logits(self, request: Request, count: int) -> int:
    """Returns the logit rows of a row of `count` tokens.

    At least one, even without sampling: it detects NaN in the KV, and is free in a padded step.
    """
    return count if self._needs_every_position(request) else 1

  # Values of steps.

  def judge_tokens(self, batch: Batch, result: StepResult) -> Verdicts:
    """Passes the new tokens of a launched batch to their constraints; call it once, before `commit`.

    Separate from commit(), so that a trace can hold the verdicts and a replay needs no constraints.
    """
    return judge_rows(self._launched[batch.step], batch, result) if batch.masks else NO_VERDICTS

  def commit(self, batch: Batch, result: StepResult, now: float, verdicts: Verdicts = NO_VERDICTS) -> list[TokenEvent]:
    """Commits the values of a launched batch: new tokens, finishes, blocks to share.

    It drops rows of requests that finished meanwhile; rows of requests preempted meanwhile still deliver tokens.
    """
    assert not result.row_ends or batch.num_drafts, "several tokens of a row without drafts"
    rows = self._launched.pop(batch.step)
    seconds = now - max(self._times.pop(batch.step), self._last_commit)
    self._last_commit = now
    if self._speculation is not None:
      costs = self._speculation.costs
      if batch.fills_draft:
        costs.note_fill(result.fill_seconds)
      if batch.step >= costs.next_note or batch.num_drafts or batch.num_proposals:
        costs.note_step(batch, len(result.tokens), seconds, batch.step in self._behind_steps, result.fill_seconds)
    self._behind_steps.discard(batch.step)
    self._policy.note_step_time(batch.shape.tokens, seconds)
    self._admission.note_step_time(seconds)
    events = None
    if not (verdicts.done or verdicts.failed or batch.behind):
      events = self._steady.commit_step(rows, batch, result, self._publish if self.config.shares_prefixes else None)
    if events is None:
      events = self._commit_rows(rows, batch, result, now, verdicts)
    if self._speculation is not None and result.proposals:
      self._speculation.take_proposals(rows, result)
    return events

  def _commit_rows(
    self, rows: list[Request], batch: Batch, result: StepResult, now: float, verdicts: Verdicts
  ) -> list[TokenEvent]:
    """Commits a step request by request."""
    done, failed, num_taken = verdicts.done or None, verdicts.failed or None, verdicts.num_taken
    forced = verdicts.forced or None
    block_size, sharing = self.config.block_size, self.config.shares_prefixes
    running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
    bad_rows, logprobs, drafts, behind = result.bad_rows, result.logprobs, batch.num_drafts, batch.behind
    embeddings = result.embeddings or None
    events: list[TokenEvent] = []
    columns = zip(rows, batch.starts, batch.counts, batch.samples, batch.token_ids, result.tokens_by_row(), strict=True)
    for row, (request, start, count, samples, inputs, tokens) in enumerate(columns):
      if drafts and drafts[row]:
        request.num_drafts -= drafts[row]
      if request.status is finished:
        continue
      if bad_rows and row in bad_rows:
        events.append(
          self._finish(
            request,
            FinishReason.ERROR,
            message="the model produced NaN or infinite logits for this request; others are unaffected",
            error=NUMERICAL_ERROR,
          )
        )
        continue
      if failed and row in failed and not num_taken.get(row):
        events.append(self._finish_failed(request, failed[row]))
        continue
      num_before = 0  # rejected drafts of the request's row before this one
      if behind and behind[row]:  # the last known token is its first input, whatever was rejected
        planned, start = start, request.num_prompt_tokens + len(request.output_token_ids) - 1
        num_before = planned - start
      end = start + count  # positions with valid KV, without rejected drafts
      entries = logprobs.get(row, ()) if logprobs else ()
      if not samples:
        tokens = tokens[:0]  # arbitrary values
      elif drafts and drafts[row]:
        if request.status is running:
          request.num_computed_tokens -= drafts[row] + 1 - len(tokens)
        num_sampled = len(tokens)
        if self._speculation is not None:
          self._speculation.note_row(request, drafts[row], num_sampled - 1, self._num_steps, num_before)
        tokens = cut_tokens_at_end(request, end - drafts[row], tokens)[: num_taken.get(row)]
        end += len(tokens) - 1 - drafts[row]
        entries = entries[: len(entries) - (num_sampled - len(tokens))]
      outputs = request.output_token_ids
      outputs += tokens
      more = forced[row] if forced and row in forced else ()
      if sharing and (inputs or end % block_size == 0) and request.status is running:
        self._publish(request, end // block_size)
      token_logprobs: tuple[TokenLogprobs, ...] = ()
      if entries:
        token_logprobs, prompt_logprobs = split_logprobs(request, end, entries, len(tokens))
        if prompt_logprobs:
          events.append(TokenEvent(request.id, prompt_logprobs=prompt_logprobs))
      if inputs:
        if self._needs_every_position(request):
          request.num_prompt_logprobs = max(request.num_prompt_logprobs, min(end, request.num_prompt_tokens - 1))
        if not samples:
          continue
      request.num_in_flight -= 1
      if more:
        outputs += more
        tokens = (*tokens, *more)
        end += len(more)
        if request.status is running:
          request.num_sent_tokens = request.num_prompt_tokens + len(outputs)
      if request.first_token_time is None:
        request.first_token_time = now
      if embeddings and row in embeddings:
        events.append(TokenEvent(request.id, embedding=embeddings[row]))
      token = tokens[-1]  # a sampling row has at least one
      if token in request.stop_ids:
        events.append(self._finish(request, FinishReason.STOP, tokens, token_logprobs, stop_token_id=token))
      elif done and row in done:
        events.append(self._finish(request, FinishReason.STOP, tokens, token_logprobs))
      elif failed and row in failed:
        events.append(self._finish_failed(request, failed[row], tokens, token_logprobs))
      elif end >= request.max_computed_tokens:
        events.append(self._finish(request, FinishReason.LENGTH, tokens, token_logprobs))
      else:
        events.append(make_event(TokenEvent, (request.id, tokens, token_logprobs, (), None, "", 0, None, "", b"")))
    return events

  def _publish(self, request: Request, num_blocks: int) -> None:
    keys = self._keys.first_keys(request, num_blocks)
    for index in range(request.num_published_blocks, num_blocks):
      self.pool.publish_block(request.block_table[index], keys[index])
    request.num_published_blocks = num_blocks

  # Moves between states.

  def _enqueue(self, request: Request) -> None:
    request.status = RequestStatus.WAITING
    self._waiting.add(request)

  def _take_back(self, request: Request) -> None:
    """Releases slot and blocks of a request that left the running list."""
    self.pool.release_blocks(request.block_table)
    self._slots.append(request.slot)
    request.block_table = []
    request.slot = -1
    request.num_computed_tokens = request.num_cached_tokens = request.num_sent_tokens = 0

  def _finish(
    self,
    request: Request,
    reason: FinishReason,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
    message: str = "",
    stop_token_id: int | None = None,
    error: str = "",
  ) -> TokenEvent:
    """Finishes a request; every finish passes here."""
    if request.status is RequestStatus.RUNNING:
      self._steady.stop_run()
      request.final_blocks = tuple(request.block_table)
      self._running.remove(request)
      self._take_back(request)
    else:
      self._waiting.remove(request)
      if self.loads is not None:
        self.loads.forget_request(request.id)
    request.status = RequestStatus.FINISHED
    if self._speculation is not None:
      self._speculation.end_request(request.id)
    self._policy.note_ending(request)
    request.finish_reason = reason
    request.leader = None
    self._ended.append(request)
    self._num_constrained -= request.constraint is not None
    del self._requests[request.id]
    return TokenEvent(
      request.id, token_ids, logprobs, (), reason, message, request.num_prompt_cached_tokens, stop_token_id, error
    )

  def _finish_failed(
    self,
    request: Request,
    text: str,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
  ) -> TokenEvent:
    """Finishes a request whose constraint cannot continue, after the tokens that it accepted."""
    error = "" if text == CONSTRAINT_BROKE else GRAMMAR_LIMIT
    return self._finish(request, FinishReason.ERROR, token_ids, logprobs, text, error=error)
