"""The engine loop, which connects the scheduler to a device. Pure Python; only one thread may change engine state.

Threads meet in two places: submit() and abort() put messages into the inbox, and emit() passes one list of events a
step out. Every request that submit() accepts gets exactly one event with a finish_reason.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
import contextlib
import errno
import functools
import os
import secrets
import threading

from engine.adapters import Adapter, AdapterInfo, AdapterTable, AdapterWeights
from engine.batch import AdapterWriter, Batch, BlockStore, Launched, Runner
from engine.errors import ConfigError, DuplicateRequest, Unavailable
from engine.prefix_events import PrefixEventLog
from engine.recorder import EngineStats, Recorder, StartedRecord, StepRecord
from engine.request import ENGINE_FAILURE, FinishReason, Request, TokenEvent
from engine.scheduler import Scheduler
from engine.speculation.drafter import Drafter
from engine.validation import validate_request

IDLE_WAIT_S = 0.2  # longest sleep of an idle loop; limits the age of the heartbeat and the delay of stop_event

Clock = Callable[[], float]
Emit = Callable[[list[TokenEvent]], None]
StepInFlight = tuple[Batch, Launched, StartedRecord, float, float]  # and host_s of the record, and when it was launched


class Engine:
  """Serves requests in batches; with `overlap` it launches a step while the device computes the previous one."""

  def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, emit: Emit):
    """Args:
    scheduler: owned by this engine from now on.
    runner: the device.
    clock: monotonic seconds; deadlines use it.
    emit: called on the engine thread with all events of a step; must not block. Becomes an attribute, which may be
      replaced while no request is live.
    """
    self.config = scheduler.config
    self.recorder = Recorder()
    self.heartbeat = clock()  # time of the loop's latest turn; old: stuck
    self.dead: Exception | None = None
    self.incident = secrets.token_hex(4)  # identifies a failure in the log; clients see only this id
    self._scheduler = scheduler
    self._overlap = scheduler.config.overlap
    self._runner = runner
    self._store = self._find_block_store(runner) if self.config.num_host_blocks else None
    self._clock = clock
    self.emit = emit
    self._lock = threading.Lock()
    self._wake = threading.Event()
    self._inbox: list[Callable[[], list[TokenEvent] | None]] = []
    self._inbox_requests = 0
    self._inbox_tokens = 0
    self._inbox_of_tenant: dict[str, tuple[int, int]] = {}
    self._live: set[str] = set()
    self.num_accepted = 0  # accepted requests
    self._adapters = AdapterTable(self.config.max_loras if self.config.enable_lora else 0)
    self._adapter_of: dict[str, Adapter] = {}  # live requests with an adapter
    # Loads and unloads that are not complete; the lock guards them.
    self._loading: dict[Adapter, Future[None]] = {}
    self._draining: dict[Adapter, list[Future[None]]] = {}
    self._written: list[tuple[Future[None], ValueError | None]] = []  # to complete without the lock; engine thread only
    self._in_flight: StepInFlight | None = None
    self._last_arrival = 0.0  # arrival time of the latest committed step's values
    if self._store is not None:
      self._store.notify_copies(self.wake)

  @staticmethod
  def _find_block_store(runner: Runner) -> BlockStore:
    if not isinstance(runner, BlockStore):
      raise ConfigError("host_kv_mb: this device keeps no blocks on the host; leave out --host_kv_mb")
    return runner

  # Any thread.

  def now(self) -> float:
    """The time on the clock of deadlines, in seconds."""
    return self._clock()

  @property
  def num_live(self) -> int:
    """Accepted requests that have not ended."""
    return len(self._live)

  def submit(self, request: Request) -> None:
    """Accepts a request, with arrival_time now, or raises at once like `submit_all`."""
    self.submit_all((request,))

  def submit_all(self, requests: Sequence[Request]) -> None:
    """Accepts several requests or none of them.

    Raises:
      InvalidRequest, RequestTooLong: the engine can never serve one of them.
      AdapterNotLoaded: one of them names an adapter that is not loaded.
      DuplicateRequest: a live request has the same id.
      Overloaded: the queue cannot hold all.
      Unavailable: the engine has failed.
    """
    for request in requests:
      validate_request(self.config, request)
      request.arrival_time = self._clock()
    with self._lock:
      if self.dead is not None:
        raise Unavailable("the engine has failed; send the request to another server")
      adapters = {each.adapter: self._adapters.find_adapter(each.adapter) for each in requests if each.adapter}
      num_requests, num_tokens = self._inbox_requests, self._inbox_tokens
      of_tenant = dict(self._inbox_of_tenant)
      for request in requests:
        if request.id in self._live:
          raise DuplicateRequest(f"a live request has the id {request.id!r:.80}; choose another id, or leave it out")
        mine = of_tenant.get(request.tenant, (0, 0))
        self._scheduler.check_capacity(request, num_requests, num_tokens, mine)
        num_requests += 1
        num_tokens += request.num_prompt_tokens
        of_tenant[request.tenant] = mine[0] + 1, mine[1] + request.num_prompt_tokens
      for request in requests if adapters else ():
        if request.adapter:
          self._use_adapter(request, adapters[request.adapter])
      self._live.update(request.id for request in requests)
      self.num_accepted += len(requests)
      self._inbox += (functools.partial(self._add, request) for request in requests)
      self._inbox_requests, self._inbox_tokens, self._inbox_of_tenant = num_requests, num_tokens, of_tenant
    self._wake.set()

  def take_over(self, request: Request) -> None:
    """Accepts a request that another engine started, with its arrival_time. Never raises Overloaded."""
    with self._lock:
      if self.dead is not None:
        raise Unavailable("the engine has failed; send the request to another server")
      self._live.add(request.id)
      self.num_accepted += 1
      self._inbox.append(lambda: self._add(request))
    self._wake.set()

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, message: str = "") -> None:
    """Ends a request; ignores an unknown or finished id, because cancellations race with finishes."""
    self._post(lambda: self._abort(request_id, reason, message))

  def check_adapter_load(self, name: str, replaces: bool = False) -> None:
    """Refuses what `load_adapter` would refuse now, so that nobody reads weights in vain. Raises as it does."""
    with self._lock:
      self._require_adapter_writer(name)
      self._adapters.check_load(name, replaces)

  def load_adapter(self, name: str, weights: AdapterWeights, replaces: bool = False) -> Future[None]:
    """Loads a LoRA adapter between two steps; the result is complete when requests may name it.

    Args:
      name: what requests send as their model.
      weights: from Built.read_adapter.
      replaces: an adapter of this name without live requests gives its slot to this one.

    Raises:
      InvalidRequest: the name is invalid or in use, or no slot is free; at once.
      Unavailable: the engine has failed.
    """
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # nobody may cancel it
    with self._lock:
      writer = self._require_adapter_writer(name)
      adapter = self._adapters.begin_load(name, weights, replaces)
      self._loading[adapter] = future
      self._inbox.append(functools.partial(self._write_adapter, writer, adapter, weights))
    self._wake.set()
    return future

  def _require_adapter_writer(self, name: str) -> AdapterWriter:
    if self.dead is not None:
      raise Unavailable("the engine has failed; load the adapter on another server")
    if not isinstance(self._runner, AdapterWriter):
      raise ConfigError(f"lora_name={name!r:.80}: this device holds no adapters; serve with --enable_lora on another")
    return self._runner

  def unload_adapter(self, name: str) -> Future[None]:
    """Refuses new requests of an adapter at once; the result is complete when its last request has finished.

    Raises:
      AdapterNotLoaded: no such adapter is loaded; at once.
    """
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    with self._lock:
      adapter = self._adapters.begin_unload(name)
      drains = adapter.num_live > 0 and self.dead is None
      if drains:
        self._draining.setdefault(adapter, []).append(future)
    if not drains:
      future.set_result(None)
    return future

  def adapters(self) -> list[AdapterInfo]:
    """Returns a snapshot of the adapters, in order of load."""
    with self._lock:
      return self._adapters.infos()

  def start_trace(self, path: str) -> None:
    """Writes the step trace to `path` from the next step on. Raises OSError if it cannot be written."""
    if self._store is not None:
      reason = "a replay would not have the blocks of the host pool; serve without --host_kv_mb"
      raise OSError(errno.EOPNOTSUPP, reason, os.fspath(path))
    open(path, "w", encoding="utf-8").close()
    self._post(lambda: self.recorder.start_trace(path, self._scheduler, self._in_flight and self._in_flight[0]))

  def stop_trace(self) -> None:
    """Ends the step trace."""
    self._post(self.recorder.stop_trace)

  def keep_all(self) -> None:
    """Keeps all records from now on, for finite runs. Call before the first step."""
    self.recorder.keep_all()

  def replace_drafter(self, drafter: Drafter) -> None:
    """Proposes drafts by `drafter` alone, for measurements. Call before the first request, with speculation."""
    self._scheduler.replace_drafter(drafter)

  def stats(self, num_steps: int = 0) -> EngineStats:
    """Returns a snapshot with the latest `num_steps` records of steps and requests, at most recorder.RING_STEPS."""
    return self.recorder.stats(self._scheduler, len(self._live), num_steps)

  def log_prefix_events(self, log: PrefixEventLog) -> None:
    """Records the prefix cache's changes in `log`. Call it before the thread starts."""
    self._scheduler.log_prefix_events(log)

  def block_states(self) -> bytes:
    """See BlockPool.block_states."""
    return self._scheduler.pool.block_states()

  def _post(self, message: Callable[[], list[TokenEvent] | None]) -> None:
    with self._lock:
      self._inbox.append(message)
    self._wake.set()

  # The engine thread.

  def run(self, stop_event: threading.Event) -> None:
    """Runs steps until `stop_event` is set or the engine fails; sleeps while idle."""
    while not stop_event.is_set() and self.dead is None:
      if not self.step():
        opens_at = self._scheduler.opens_at()
        self._wake.wait(IDLE_WAIT_S if opens_at is None else min(IDLE_WAIT_S, max(0.0, opens_at - self._clock())))
      self._wake.clear()
    self.recorder.stop_trace()

  def wake(self) -> None:
    """Wakes an idle run(), for example after setting its stop_event. Any thread."""
    self._wake.set()

  def step(self) -> bool:
    """Runs one turn of the loop; returns whether it had work. A failure ends every request and the engine."""
    self.heartbeat = now = self._clock()
    if self.dead is not None:
      return False
    try:
      events, active = self._take_messages()
      expired = self._scheduler.expire_requests(now)
      self.recorder.trace_expire(now, expired)
      events += expired
      if self._store is not None:
        self._take_copies(self._store)
      active = self._turn(events, now) or active or bool(events)
      if events:
        self._send(events)
      ended = self._scheduler.take_ended()
      if ended:
        self.recorder.record_requests(ended, self._clock())
    except Exception as error:
      self.fail(error)
      return True
    return active

  def _turn(self, events: list[TokenEvent], now: float) -> bool:
    """Plans and launches step n, then waits for the values of step n-1; without overlap for those of n."""
    step = self._launch(now)
    if self._overlap:
      step, self._in_flight = self._in_flight, step
    if step is not None:
      events += self._commit(step)
    # A step may be empty although requests run: one was preempted for another, which then was preempted too.
    return step is not None or self._in_flight is not None or self._scheduler.num_running > 0

  def _launch(self, now: float) -> StepInFlight | None:
    scheduler = self._scheduler
    num_preemptions = scheduler.num_preemptions
    batch = scheduler.schedule(now)
    if self._store is not None:
      self._start_copies(self._store)
    self.recorder.trace_schedule(now, batch, scheduler)
    if batch is None:
      return None
    launched = self._runner.launch(batch)
    launch_time = self._clock()
    record = self.recorder.start_record(batch, scheduler, now, scheduler.num_preemptions - num_preemptions)
    return batch, launched, record, launch_time - now, launch_time

  def _take_copies(self, store: BlockStore) -> None:
    """Takes the copies between device and host that are complete, and writes fetched blocks into the pool."""
    loads = self._scheduler.loads
    assert loads is not None
    for finished in store.finished_copies():
      if finished.is_save:
        loads.finish_saves(finished.copies, finished.num_good)
      else:
        blocks = loads.finish_fetches(finished.copies, finished.num_good)
        if blocks:
          store.write_blocks(finished, blocks)

  def _start_copies(self, store: BlockStore) -> None:
    """Starts to copy the blocks that planning evicted, and the next pieces of the load."""
    loads = self._scheduler.loads
    assert loads is not None
    saves = loads.take_saves()
    if saves:
      store.save_blocks(saves)
    while fetches := loads.take_fetches():
      store.fetch_blocks(fetches)

  def _commit(self, in_flight: StepInFlight) -> list[TokenEvent]:
    batch, launched, record, host_s, launch_time = in_flight
    result = launched.result()
    now = self._clock()
    device_s = now - max(launch_time, self._last_arrival)
    self._last_arrival = now
    num_drafts, num_accepted = self.recorder.count_drafts(batch, result) if batch.num_drafts else (0, 0)
    verdicts = self._scheduler.judge_tokens(batch, result)
    if verdicts.forced:
      self.recorder.count_forced(verdicts)
    self.recorder.trace_commit(batch, result, now, verdicts, host_s, device_s)
    events = self._scheduler.commit(batch, result, now, verdicts)
    commit_s = self._clock() - now
    self.recorder.keep_record(StepRecord._make((*record, host_s, device_s, commit_s, num_drafts, num_accepted)))
    return events

  def _take_messages(self) -> tuple[list[TokenEvent], bool]:
    """Handles the inbox under the lock, so that a queued request is always in exactly one place and counted once."""
    events: list[TokenEvent] = []
    if not self._inbox:
      return events, False
    with self._lock:
      for message in self._inbox:
        events += message() or ()
      self._inbox.clear()
      self._inbox_requests = self._inbox_tokens = 0
      self._inbox_of_tenant.clear()
    while self._written:
      future, error = self._written.pop()
      if error is None:
        future.set_result(None)
      else:
        future.set_exception(error)
    return events, True

  def _add(self, request: Request) -> None:
    self.recorder.trace_add(request)
    self._scheduler.add_request(request)

  def _use_adapter(self, request: Request, adapter: Adapter) -> None:
    """Counts an accepted request of an adapter; under the lock."""
    request.adapter_slot, request.adapter_serial = adapter.slot, adapter.serial
    self._adapters.add_request(adapter)
    self._adapter_of[request.id] = adapter

  def _leave_adapters(self, ended: list[str]) -> list[Future[None]]:
    """Counts finished requests; returns the futures of unloads that are complete now. Under the lock."""
    complete: list[Future[None]] = []
    for request_id in ended:
      adapter = self._adapter_of.pop(request_id, None)
      if adapter is not None and self._adapters.end_request(adapter):
        complete += self._draining.pop(adapter, [])
    return complete

  def _write_adapter(self, writer: AdapterWriter, adapter: Adapter, weights: AdapterWeights) -> None:
    """Writes the slot of a load; weights of another shape fail this load alone. Under the lock of `_take_messages`."""
    try:
      writer.write_adapter(adapter.slot, weights)
    except ValueError as error:
      self._adapters.cancel_load(adapter)
      self._written.append((self._loading.pop(adapter), error))
      return
    self._adapters.finish_load(adapter)
    self._written.append((self._loading.pop(adapter), None))

  def _abort(self, request_id: str, reason: FinishReason, message: str) -> list[TokenEvent]:
    self.recorder.trace_abort(request_id, reason)
    return self._scheduler.abort_request(request_id, reason, message)

  def _send(self, events: list[TokenEvent]) -> None:
    ended = [event.request_id for event in events if event.finish_reason is not None]
    if ended:
      with self._lock:
        self._live.difference_update(ended)
        unloaded = self._leave_adapters(ended) if self._adapter_of else ()
      for future in unloaded:
        future.set_result(None)
    self.recorder.count_events(events)
    self.emit(events)

  def fail(self, error: Exception) -> None:
    """Finishes every live request with an error; the engine accepts nothing from now on. Engine thread only."""
    with self._lock:
      self.dead = error
      self._in_flight = None
      live = sorted(self._live)
      waiting = [*self._loading.values(), *(each for futures in self._draining.values() for each in futures)]
      self._loading.clear()
      self._draining.clear()
    for future in waiting:
      future.set_exception(Unavailable("the engine has failed; load the adapter on another server"))
    # The front end itself may have failed; then it does not need these events.
    with contextlib.suppress(Exception):
      self._send([self.failure_event(request_id) for request_id in live])

  def failure_event(self, request_id: str) -> TokenEvent:
    """Returns the last event of a request whose engine failed."""
    message = f"the engine has failed, incident {self.incident} in the server's log; send the request to another server"
    return TokenEvent(request_id, finish_reason=FinishReason.ERROR, message=message, error=ENGINE_FAILURE)
