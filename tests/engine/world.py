"""A small random world around an engine: clients, a fake device, a virtual clock, and everything that must always hold.

Every operation is followed by the checks of _watch() and _after_step(); every ending is compared with the oracle, which
serves the request alone. The world knows what it requested, so it can check every finish.
"""

import dataclasses
import itertools
import random

from engine.batch import Batch
from engine.batching import make_batching
from engine.block_pool import BlockPool, block_key, root_key
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import Overloaded, RequestTooLong
from engine.policy import Policy, find_policy_class
from engine.request import FinishReason, Request, RequestStatus, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.settings import POLICIES
from engine.shapes import reachable_budgets
from engine.waiting_queue import by_rank
from tests.fakes import FakeRunner, VirtualClock, oracle, oracle_prompt_logprobs
from tools.chaos.server.books import check_pool, check_scheduler

VOCAB = 40
EOS = (1, 2)
MAX_MODEL_LEN = 48


def random_config(rng: random.Random) -> EngineConfig:
  """Small pools, odd block sizes, short ladders: where things go wrong."""
  block_size = rng.choice((1, 2, 3, 4, 8))
  budgets = rng.choice(((4, 8, 16, 32), (8, 32), (5, 11, 24), (16,)))
  return EngineConfig(
    vocab_size=VOCAB,
    max_model_len=MAX_MODEL_LEN,
    block_size=block_size,
    num_blocks=-(-rng.randint(MAX_MODEL_LEN - 8, 2 * MAX_MODEL_LEN) // block_size),
    token_budgets=budgets,
    max_num_seqs=rng.randint(1, min(8, budgets[-1])),
    prefill_chunk=rng.choice((rng.randint(1, budgets[-1]), budgets[-1])),
    max_queued_requests=8,
    max_queued_tokens=160,
    queue_timeout_s=rng.choice((0.0, 5.0)),
    request_timeout_s=rng.choice((0.0, 20.0)),
    policy=rng.choice(("fcfs", "priority") * 2 + POLICIES),
    sjf_aging_tokens_per_s=rng.choice((0.0, 5.0)),
    tier_share=rng.choice((0.0, 0.3, 0.9)),
    tier_delay_s=rng.choice((0.0, 3.0)),
    tier_long_context=rng.choice((0, 10)),
    aging_s=rng.choice((0.0, 1.0)),
    batching=rng.choice(("chunked",) * 6 + ("continuous", "dynamic", "static")),
    dynamic_window_s=rng.choice((0.0, 0.5)),
    dynamic_max_batch=rng.randint(1, 8),
    prefix_cache_scope=rng.choice(("global", "tenant", "tenant", "request") if rng.random() < 0.7 else ("off",)),
    max_queued_share_per_tenant=rng.choice((1.0, 1.0, 0.4)),
    eos_token_ids=EOS,
    computes_padding=rng.random() < 0.7,
  )


@dataclasses.dataclass
class Client:
  """A request of the world, and its output so far."""

  request: Request
  poison: int | None
  aborted: bool = False
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list = dataclasses.field(default_factory=list)
  prompt_logprobs: list = dataclasses.field(default_factory=list)


def with_host_pool(config: EngineConfig, rng: random.Random | None) -> EngineConfig:
  """The settings with a pool that evicts much and a host pool, in half of the cases; without `rng` in all."""
  if not config.shares_prefixes or rng and rng.random() < 0.5:
    return config
  num_blocks = -(-(MAX_MODEL_LEN - 8) // config.block_size)
  num_host_blocks = rng.choice((3, num_blocks, 8 * num_blocks)) if rng else 6 * num_blocks
  return dataclasses.replace(config, num_blocks=num_blocks, num_host_blocks=num_host_blocks)


class World:
  """Attributes: num_ops, num_ended, and the totals that show that the rare paths were taken."""

  def __init__(
    self,
    seed: int,
    scheduler_class: type[Scheduler] = Scheduler,
    config: EngineConfig | None = None,
    overlap: bool | None = None,
    host_pool: bool = True,
  ):
    """Args: host_pool: half of the worlds without `config` have one."""
    self.rng = rng = random.Random(seed)
    self.host_rng = host_rng = random.Random(~seed)  # apart, so that the rest of a world does not depend on it
    self._seed_rng = random.Random(f"seeds {seed}")  # the scheduler would choose others in each run
    config = config or (with_host_pool(random_config(rng), host_rng) if host_pool else random_config(rng))
    self.config = dataclasses.replace(config, overlap=rng.choice((True, False)) if overlap is None else overlap)
    self.clock = VirtualClock()
    self.poisoned: dict[str, int] = {}
    self.runner = FakeRunner(self.config, poisoned=self.poisoned)
    longest = host_rng.choice((0, 2, 12))
    self.runner.copy_delay = lambda: host_rng.randint(0, longest)
    self.scheduler = scheduler_class(self.config)
    self._schedule = self.scheduler.schedule
    self.scheduler.schedule = self._watch  # type: ignore[method-assign]
    self.engine = Engine(self.scheduler, self.runner, self.clock, self._take)
    self.clients: dict[str, Client] = {}
    self.histories = [tuple(rng.randrange(VOCAB) for _ in range(24)) for _ in range(3)]
    self.serial = itertools.count()
    self.num_ops = self.num_ended = self.num_siblings = self.num_grown = self.num_cut = 0
    self.endings = dict.fromkeys(FinishReason, 0)
    self.wave_width, self.wave_closed = 0, False
    self.families: dict[str, str] = {}  # by request: the first of its siblings
    self.left_out: dict[str, int] = {}  # steps in a row that a running request had no part in
    # A policy that the checks do not know may do what its hooks allow.
    policy = find_policy_class(self.config.policy)
    known = self.config.policy in ("fair", "tiers")
    self._withholds = not known and (
      policy.holds_back is not Policy.holds_back or policy.grant_tokens is not Policy.grant_tokens
    )
    self._chooses = not known and (policy.candidates is not Policy.candidates or policy.may_join is not Policy.may_join)

  # Operations.

  def submit(self) -> None:
    """A request: often on a known prefix, an earlier answer, or as the sibling of a live one."""
    self.num_ops += 1
    rng = self.rng
    request_id, leader = f"r{next(self.serial)}", None
    history = rng.choice(self.histories)
    prompt = history[: rng.randint(0, min(len(history), 36))] + tuple(
      rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))
    )
    salt = rng.choice((b"", b"", b"", b"tenant"))
    tenant = rng.choice(("", "a", "b"))
    if self.clients and rng.random() < 0.3:
      leader = rng.choice(list(self.clients.values())).request
      prompt, salt = tuple(leader.prompt_token_ids), leader.cache_salt
      tenant = leader.tenant
    prompt = prompt or (rng.randrange(VOCAB),)
    max_tokens = rng.choice((1, rng.randint(1, 24), 24, min(40, MAX_MODEL_LEN - len(prompt)), MAX_MODEL_LEN))
    too_long = len(prompt) + max_tokens > min(MAX_MODEL_LEN, self.config.pool_tokens)
    params = SamplingParams(
      max_tokens=max_tokens,
      temperature=rng.choice((0.0, 1.0)),
      seed=rng.choice((self._seed_rng.getrandbits(32), -5, 2**40)),
      min_tokens=rng.randint(0, min(max_tokens, 4)),
      ignore_eos=rng.random() < 0.8,
      stop_token_ids=rng.choice(((), (), (5,), (6, 7, 8))),
      logprobs=rng.choice((None, None, None, 0)),
      prompt_logprobs=rng.choice((None, None, None, None, None, 0)),
    )
    now = self.clock()
    request = Request(
      request_id,
      prompt,
      params,
      priority=rng.randint(-2, 2),
      cache_salt=salt,
      tenant=tenant,
      queue_deadline=rng.choice((None, None, None, now + rng.uniform(0, 2))),
      deadline=rng.choice((None, None, None, now + rng.uniform(0, 4))),
      leader_id=leader.id if leader else None,
    )
    poison = rng.randrange(len(prompt) + 3) if rng.random() < 0.05 else None
    queued = self.scheduler.num_waiting + self.engine._inbox_requests
    queued_tokens = self.scheduler.num_waiting_tokens + self.engine._inbox_tokens
    config, share = self.config, self.config.max_queued_share_per_tenant
    has_space = queued < config.max_queued_requests and (
      not queued or queued_tokens + len(prompt) <= config.max_queued_tokens
    )
    own = [each.num_prompt_tokens for each in self.scheduler._waiting if each.tenant == request.tenant]
    arriving, arriving_tokens = self.engine._inbox_of_tenant.get(request.tenant, (0, 0))
    has_share = len(own) + arriving < max(1, int(share * config.max_queued_requests)) and (
      not len(own) + arriving or sum(own) + arriving_tokens + len(prompt) <= int(share * config.max_queued_tokens)
    )
    has_space = has_space and (share == 1.0 or has_share)
    try:
      self.engine.submit(request)
    except RequestTooLong:
      assert too_long, "refused what fits"
      return
    except Overloaded as error:
      assert not has_space and error.retry_after_s > 0, "refused although the queue has space"
      return
    assert has_space, "accepted into a full queue"
    assert not too_long, "accepted what can never fit"
    if poison is not None:
      self.poisoned[request_id] = poison
    self.num_siblings += leader is not None
    self.families[request_id] = self.families[leader.id] if leader else request_id
    self.clients[request_id] = Client(request, poison)

  def abort(self) -> None:
    """The end of a live request, whatever it is doing; now and then of one that nobody knows."""
    self.num_ops += 1
    if self.clients and self.rng.random() < 0.95:
      client = self.rng.choice(list(self.clients.values()))
      client.aborted = True
      self.engine.abort(client.request.id)
    else:
      self.engine.abort("nobody")

  def advance(self) -> None:
    """Time passes."""
    self.num_ops += 1
    self.clock.advance(self.rng.choice((0.01, 0.1, 1.0)))

  def step(self) -> bool:
    """One turn of the engine."""
    self.num_ops += 1
    active = self.engine.step()
    if self.engine.dead is not None:
      raise self.engine.dead
    self._after_step()
    return active

  def break_slot(self) -> None:
    """A byte flips in memory of the host that holds a block."""
    if self.runner.host:
      self.runner.broken.add(self.host_rng.choice(list(self.runner.host)))

  def random_op(self) -> None:
    """Any of them."""
    if self.host_rng.random() < 0.1:
      self.break_slot()
    draw = self.rng.random()
    if draw < 0.2:
      self.submit()
    elif draw < 0.22:
      self.abort()
    elif draw < 0.28:
      self.advance()
    else:
      self.step()

  def drain(self) -> None:
    """Runs until nothing is left, then looks for leaks."""
    for _ in range(4000):
      if not self.step():
        if self._copies():
          continue
        opens_at = self.scheduler.opens_at()
        if opens_at is None:
          break
        assert opens_at > self.clock.now, "nothing joins although the window has passed"
        self.clock.now = opens_at
    else:
      raise AssertionError(f"no end in sight for {list(self.clients)}")
    assert not self.clients, f"{list(self.clients)} never ended"
    assert self.scheduler.pool.num_used == 0, "blocks leaked"
    assert self.scheduler.num_running == self.scheduler.num_waiting == len(self.scheduler._launched) == 0
    assert self.engine.num_live == 0
    loads = self.scheduler.loads
    assert loads is None or not (loads.is_loading or loads._tried or loads._next_keys), "a load is left"
    assert self.runner.shapes <= set(self.scheduler.ladder.rungs())
    config = self.config
    reachable = reachable_budgets(config.token_budgets, config.max_num_seqs, make_batching(config).chunk_limit)
    assert {shape.tokens for shape in self.runner.shapes} <= set(reachable)

  def _copies(self) -> bool:
    """Whether copies between device and host, or a load, have not come to their end."""
    loads = self.scheduler.loads
    return loads is not None and (loads.is_loading or loads.is_copying or bool(loads.host._saving))

  # What must hold.

  def _watch(self, now: float) -> Batch | None:
    """schedule(), with a look before and after."""
    scheduler = self.scheduler
    running, waiting = list(scheduler._running), list(scheduler._waiting)
    computed = {request.id: request.num_computed_tokens for request in running}
    uncommitted = {request.id: request.num_drafts for request in running if request.num_drafts}
    awaits = scheduler._drafts.awaited_step in scheduler._launched
    drafting = {  # no row until the step before commits
      request.id for request in running if request.num_drafts and (awaits or request.constraint is not None)
    }
    loads = scheduler.loads
    was_loading, num_loads = loads is not None and loads.is_loading, loads.host.counts.num_hits if loads else 0
    batch = self._schedule(now)
    loading = was_loading or loads is not None and loads.host.counts.num_hits > num_loads
    scheduler.settle_counts()
    running.sort(key=by_rank)  # a dynamic policy has just given them other ranks
    victims = [request for request in running if request.status is RequestStatus.WAITING]
    admitted = [request for request in waiting if request.status is RequestStatus.RUNNING]
    kept = [request for request in running if request.status is RequestStatus.RUNNING]
    assert not (victims and admitted), "a step both preempts and admits"
    assert not (victims and loads and loads.is_loading), "a request makes way for a load"
    assert all(victim.rank > request.rank for victim in victims for request in kept), "a victim was not the last"
    for request in (*kept, *admitted):
      last = request.num_prompt_tokens + request.params.max_tokens - 1
      assert request.num_computed_tokens <= last, "computes a position whose token nobody wants"
    for request in (*victims, *admitted):
      self.left_out.pop(request.id, None)
    working = [
      request
      for request in running
      if computed[request.id] < request.max_computed_tokens and request.id not in drafting
    ]
    if batch is None:
      idle = [request for request in working if not self._may_be_held(request, computed[request.id])]
      assert all(request in victims for request in idle), "nothing runs although something could"
      return None
    rows = dict(zip(batch.request_ids, batch.counts, strict=True))
    num_drafts = dict(zip(batch.request_ids, batch.num_drafts or (0,) * len(rows), strict=True))
    assert not drafting & rows.keys(), "a request has a row although its drafts are in flight"
    behind = dict(zip(batch.request_ids, batch.behind or (0,) * len(rows), strict=True))
    for request_id, count in num_drafts.items():
      assert count <= self.config.num_speculative_tokens and (not count or rows[request_id] == 1 + count)
      assert behind[request_id] == uncommitted.get(request_id, 0), "a row does not know the drafts before it"
      assert count + behind[request_id] == scheduler._requests[request_id].num_drafts
    assert not any(victim.id in rows for victim in victims), "a victim was already taken in this step"
    tiers = self.config.policy == "tiers"
    held = self._withholds or tiers and working and working[0].priority > 0
    if working and working[0] is next(each for each in running if each.id not in drafting) and not held:
      assert working[0].id in rows, "the first in order does not advance"
    if tiers:
      batch_slots = max(1, int(self.config.max_num_seqs * (1 - self.config.tier_share)))
      assert sum(request.priority > 0 for request in scheduler._running) <= batch_slots, "batch work takes all slots"
      for request in working:
        left_out = self.left_out.get(request.id, 0) + 1 if request in kept and request.id not in rows else 0
        self.left_out[request.id] = left_out
        prefills = request.num_sent_tokens > computed[request.id]
        assert prefills or left_out < 4, f"{request.id} starves"
    for request in kept:
      if self._may_be_held(request, computed[request.id]) or request.id in drafting:
        continue
      if request.num_sent_tokens <= computed[request.id] < request.max_computed_tokens:
        assert rows.get(request.id) == 1 + num_drafts[request.id], "a decode is stalled"
    num_decodes = batch.token_ids.count(()) + sum(map(bool, batch.num_drafts))
    num_prefill = sum(batch.counts) - num_decodes - sum(batch.num_drafts)
    if self.config.batching == "chunked":
      batching = scheduler._batching
      chunk = batching.chunk_limit if running else batching.first_limit
      base = num_decodes + sum(batch.num_drafts) + min(num_prefill, chunk)
      assert batch.shape == scheduler.ladder.fit(base), "prefill beyond the chunk takes more than the padding"
      if self.config.computes_padding:
        self.num_grown += num_prefill > chunk
      else:
        assert num_prefill <= chunk, "a chunk grows into padding that costs nothing"
        left = chunk
        for row in range(num_decodes, len(batch.slots)):
          wanted = scheduler._requests[batch.request_ids[row]].num_sent_tokens - batch.starts[row]
          num_pieces = 1 if wanted <= left else -(-wanted // batching.chunk_limit)
          left -= batch.counts[row]
          assert batch.counts[row] <= -(-wanted // num_pieces), "a prompt is cut in unequal pieces"
          self.num_cut += batch.counts[row] < wanted
    elif self.config.batching == "continuous":
      parts = [row for row, ids in enumerate(batch.token_ids) if ids and not batch.samples[row]]
      assert parts in ([], [num_decodes]), "a prompt is cut though it could wait for a step of its own"
    else:
      assert not victims, "what was reserved is preempted"
      if not running:
        self.wave_width, self.wave_closed = 0, False
      assert not (admitted and self.wave_closed), "a request joins a wave that runs"
      self.wave_closed = not admitted
      self.wave_width = max(self.wave_width, len(scheduler._running))
      assert batch.shape.tokens >= self.wave_width * max(batch.counts), "the wave's padding is not paid for"
    for request in admitted:
      leader = self._leader(request)
      if leader is not None and self.config.shares_prefixes:
        assert leader.status is RequestStatus.FINISHED or leader.output_token_ids, "a sibling started before its leader"
      for other in scheduler._waiting:
        behind = other in waiting and other.rank < request.rank
        if self.config.policy == "fair":
          behind = behind and other.tenant == request.tenant
        elif tiers:
          behind = behind and not (other.priority > 0 >= request.priority)
        elif self._chooses or self._withholds:
          behind = False
        assert not behind or scheduler._awaits_leader(other) or loading, "the queue was overtaken"
    return batch

  def _may_be_held(self, request: Request, computed: int) -> bool:
    """Whether it is a long batch row, which makes way for interactive ones, or whatever another policy holds back."""
    return self._withholds or (
      self.config.policy == "tiers"
      and request.priority > 0
      and computed > (self.config.tier_long_context or MAX_MODEL_LEN)
    )

  def _owner(self, request: Request) -> object:
    """Equal for two requests that may share blocks."""
    match self.config.prefix_cache_scope:
      case "tenant":
        return request.tenant, request.cache_salt
      case "request":
        return self.families[request.id]
    return request.cache_salt

  def _leader(self, request: Request) -> Request | None:
    client = self.clients.get(request.leader_id or "")
    return client.request if client else None

  def _after_step(self) -> None:
    scheduler, now = self.scheduler, self.clock()
    check_scheduler(scheduler)
    owners: dict[int, object] = {}
    for request in scheduler._running:
      assert request.num_cached_tokens < request.num_prompt_tokens + len(request.output_token_ids)
      for block in request.block_table:
        owner = self._owner(request)
        assert owners.setdefault(block, owner) == owner, "a block is shared across salts or scopes"
    for request in (*scheduler._waiting, *scheduler._running):
      assert request.deadline is None or now < request.deadline, "a deadline was ignored"
      waits = request.first_scheduled_time is None and request.queue_deadline is not None
      assert not waits or now < request.queue_deadline, "a queue deadline was ignored"
    for client in self.clients.values():
      assert not client.aborted, "an aborted request lives on"

  def _take(self, events: list[TokenEvent]) -> None:
    for event in events:
      client = self.clients[event.request_id]  # a second ending, or a token after it, is a KeyError
      client.tokens += event.token_ids
      client.logprobs += event.logprobs
      client.prompt_logprobs += event.prompt_logprobs
      if event.finish_reason is not None:
        del self.clients[event.request_id]
        self._ended(client, event)

  def _ended(self, client: Client, event: TokenEvent) -> None:
    request, now = client.request, self.clock()
    self.num_ended += 1
    self.endings[event.finish_reason] += 1
    tokens, reason = oracle(self.config, request)
    got = tuple(client.tokens)
    if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
      assert (got, event.finish_reason) == (tokens, reason), "not the tokens of the request alone"
      if request.params.prompt_logprobs is not None:
        assert tuple(client.prompt_logprobs) == oracle_prompt_logprobs(self.config, request)
      if request.params.logprobs is not None:
        assert tuple(entry.token_id for entry in client.logprobs) == tokens
      # Bad values may be missed only where a good cached copy made computing them unnecessary.
      computed = range(request.num_prompt_tokens - 1, request.num_prompt_tokens + len(got) - 1)
      assert client.poison not in computed or request.num_preemptions, "NaN went unnoticed"
      assert event.stop_token_id == (got[-1] if reason is FinishReason.STOP else None)
    else:
      assert got == tokens[: len(got)] and len(got) <= len(tokens), "not the tokens of the request alone"
      match event.finish_reason:
        case FinishReason.ABORT:
          assert client.aborted
        case FinishReason.TIMEOUT:
          late = request.deadline is not None and now >= request.deadline
          queued = request.queue_deadline is not None and now >= request.queue_deadline
          assert late or (queued and not got), "ended before its deadline"
        case FinishReason.ERROR:
          assert client.poison is not None
          before = max(0, client.poison - request.num_prompt_tokens + 1)
          # A preempted request may find the position in the cache once, and have to compute it the next time.
          assert len(got) <= before or request.num_preemptions, "NaN was noticed late"
    history = (*request.prompt_token_ids, *got)
    self.histories[self.rng.randrange(3)] = history if len(history) < 30 else history[: self.rng.randint(12, 30)]


def run_world(seed: int, num_ops: int = 120, scheduler_class: type[Scheduler] = Scheduler) -> World:
  """A world lived through: random operations, then drained."""
  world = World(seed, scheduler_class)
  for _ in range(num_ops):
    world.random_op()
  world.drain()
  return world


class PoolWorld:
  """Tables that come and go on a pool, against a plain model: who holds what, and what each block's content is."""

  def __init__(self, seed: int, num_blocks: int):
    self.rng = random.Random(seed)
    self.pool = BlockPool(num_blocks, seed % 2 * 3)
    self.tables: list[tuple[list[int], list[bytes]]] = []  # blocks, and the keys that name their contents
    self.content: dict[int, bytes] = {}

  def open(self, length: int) -> None:
    """A table of `length` blocks, its cached prefix shared; if it does not fit, nothing."""
    keys = [root_key(self.rng.choice((b"", b"tenant")))]
    for _ in range(length):
      keys.append(block_key(keys[-1], (self.rng.randrange(2),)))
    keys = keys[1:]
    found = self.pool.match_blocks(keys)
    assert [self.content[block] for block in found] == keys[: len(found)], "found a block of other content"
    missing = length - len(found)
    if missing > self.pool.num_free - self.pool.num_idle(found):
      return
    self.pool.share_blocks(found)
    fresh = self.pool.allocate_blocks(missing)
    for block, key in self.pool.take_evicted():
      assert self.content[block] == key and key not in keys[: len(found)], "evicted under another block's key"
    held = {block for table, _ in self.tables for block in table} | set(found)
    assert len(set(fresh)) == missing and not held & set(fresh), "handed out a block that is held"
    self.content.update(zip(fresh, keys[len(found) :], strict=True))
    self.tables.append((found + fresh, keys))

  def publish(self) -> None:
    """Some table's blocks are full."""
    if self.tables:
      table, keys = self.rng.choice(self.tables)
      for block, key in zip(table, keys, strict=True):
        self.pool.publish_block(block, key)
      assert len(self.pool.match_blocks(keys)) == len(keys), "published blocks are not found"

  def close(self) -> None:
    """Some table goes."""
    if self.tables:
      table, _ = self.tables.pop(self.rng.randrange(len(self.tables)))
      self.pool.release_blocks(table)

  def close_all(self) -> None:
    """All of them go; nothing may be left."""
    while self.tables:
      self.close()
    self.check()
    assert self.pool.num_used == 0, "blocks leaked"

  def check(self) -> None:
    check_pool(self.pool, [table for table, _ in self.tables])

  def random_op(self) -> None:
    match self.rng.randrange(3):
      case 0:
        self.open(self.rng.randint(1, 6))
      case 1:
        self.publish()
      case 2:
        self.close()
    self.check()
