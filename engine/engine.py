"""The loop: joins the scheduler to a device. Pure Python; one thread alone changes engine state.

Two crossings between threads: submit() and abort() put messages into the inbox, and emit() carries one list of events
a step out. Every request that submit() accepted gets exactly one event with a finish_reason.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import secrets
import threading

from engine.batch import Batch, Launched, Runner
from engine.errors import DuplicateRequest, Unavailable
from engine.recorder import EngineStats, Recorder, StepRecord
from engine.request import ENGINE_FAILURE, FinishReason, Request, TokenEvent
from engine.scheduler import Scheduler
from engine.validation import validate_request

IDLE_WAIT_S = 0.2  # longest sleep of an idle loop: bounds the age of the heartbeat, and the notice of stop_event

Clock = Callable[[], float]
Emit = Callable[[list[TokenEvent]], None]


class Engine:
  """Serves requests in batches; with `overlap`, a step is planned and launched while the one before is computed."""

  def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, emit: Emit):
    """Args:
    scheduler: belongs to this engine from now on.
    runner: the device.
    clock: seconds, monotonic; deadlines of requests are on it.
    emit: called on the engine thread with everything a step produced; it must not block.
    """
    self.config = scheduler.config
    self.recorder = Recorder()
    self.heartbeat = clock()  # of the latest turn of the loop; old means stuck
    self.dead: Exception | None = None
    self.incident = secrets.token_hex(4)  # by which a failure is found in the log: clients are told no more of it
    self._scheduler = scheduler
    self._overlap = scheduler.config.overlap
    self._runner = runner
    self._clock = clock
    self._emit = emit
    self._lock = threading.Lock()
    self._wake = threading.Event()
    self._inbox: list[Callable[[], list[TokenEvent] | None]] = []
    self._inbox_requests = 0
    self._inbox_tokens = 0
    self._inbox_of_tenant: dict[str, tuple[int, int]] = {}
    self._live: set[str] = set()
    self.num_accepted = 0  # requests so far
    self._in_flight: tuple[Batch, Launched, StepRecord, float] | None = None
    self._last_arrival = 0.0  # when the values of the latest committed step were there

  # Any thread.

  def now(self) -> float:
    """The clock that deadlines are on, seconds."""
    return self._clock()

  @property
  def num_live(self) -> int:
    """Requests accepted and not ended."""
    return len(self._live)

  def submit(self, request: Request) -> None:
    """Accepts a request or says at once why not; its arrival_time is now. Raises as `submit_all`."""
    self.submit_all((request,))

  def submit_all(self, requests: Sequence[Request]) -> None:
    """Accepts several requests or none of them.

    Raises:
      InvalidRequest, RequestTooLong: one can never be served.
      DuplicateRequest: a live request has the id of one.
      Overloaded: the queue has not room for all.
      Unavailable: the engine is dead.
    """
    for request in requests:
      validate_request(self.config, request)
      request.arrival_time = self._clock()
    with self._lock:
      if self.dead is not None:
        raise Unavailable("the engine has failed; send the request to another server")
      num_requests, num_tokens = self._inbox_requests, self._inbox_tokens
      of_tenant = dict(self._inbox_of_tenant)
      for request in requests:
        if request.id in self._live:
          raise DuplicateRequest(f"a live request has the id {request.id!r:.80}; choose another id, or none")
        mine = of_tenant.get(request.tenant, (0, 0))
        self._scheduler.check_room(request, num_requests, num_tokens, mine)
        num_requests += 1
        num_tokens += request.num_prompt_tokens
        of_tenant[request.tenant] = mine[0] + 1, mine[1] + request.num_prompt_tokens
      self._live.update(request.id for request in requests)
      self.num_accepted += len(requests)
      self._inbox += (functools.partial(self._add, request) for request in requests)
      self._inbox_requests, self._inbox_tokens, self._inbox_of_tenant = num_requests, num_tokens, of_tenant
    self._wake.set()

  def take_over(self, request: Request) -> None:
    """Accepts a request that another engine began, with its arrival_time; what was accepted once is not refused."""
    with self._lock:
      if self.dead is not None:
        raise Unavailable("the engine has failed; send the request to another server")
      self._live.add(request.id)
      self.num_accepted += 1
      self._inbox.append(lambda: self._add(request))
    self._wake.set()

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, message: str = "") -> None:
    """Ends a request; one that is unknown or has ended is ignored, since cancellations race with endings."""
    self._post(lambda: self._abort(request_id, reason, message))

  def start_trace(self, path: str) -> None:
    """Writes the step trace to `path` from the next step on. An unwritable path is told here, by OSError."""
    open(path, "w", encoding="utf-8").close()
    self._post(lambda: self.recorder.start_trace(path, self._scheduler, self._in_flight and self._in_flight[0]))

  def stop_trace(self) -> None:
    """Ends the step trace."""
    self._post(self.recorder.stop_trace)

  def keep_all(self) -> None:
    """Keeps all records from now on; for runs that end. Before the first step."""
    self.recorder.keep_all()

  def stats(self, num_steps: int = 0) -> EngineStats:
    """A snapshot with the latest `num_steps` records of steps and requests (of recorder.RING_STEPS that are kept)."""
    return self.recorder.stats(self._scheduler, len(self._live), num_steps)

  def block_states(self) -> bytes:
    """See BlockPool.block_states."""
    return self._scheduler.pool.block_states()

  def _post(self, message: Callable[[], list[TokenEvent] | None]) -> None:
    with self._lock:
      self._inbox.append(message)
    self._wake.set()

  # The engine thread.

  def run(self, stop_event: threading.Event) -> None:
    """Steps until `stop_event` is set or the engine dies; sleeps when there is nothing to do."""
    while not stop_event.is_set() and self.dead is None:
      if not self.step():
        opens_at = self._scheduler.opens_at()
        self._wake.wait(IDLE_WAIT_S if opens_at is None else min(IDLE_WAIT_S, max(0.0, opens_at - self._clock())))
      self._wake.clear()
    self.recorder.stop_trace()

  def wake(self) -> None:
    """Ends the sleep of an idle run(), for who has set its stop_event. Any thread."""
    self._wake.set()

  def step(self) -> bool:
    """One turn of the loop; returns whether there was anything to do. A failure ends every request and the engine."""
    self.heartbeat = now = self._clock()
    if self.dead is not None:
      return False
    try:
      events, active = self._take_messages()
      expired = self._scheduler.expire_requests(now)
      self.recorder.trace_expire(now, expired)
      events += expired
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
    """Plans step n, launches it, and only then waits for the values of step n-1; without overlap, for those of n."""
    step = self._launch(now)
    if self._overlap:
      step, self._in_flight = self._in_flight, step
    if step is not None:
      events += self._commit(step)
    # A step may be empty although requests run: one made way for another, which then was preempted.
    return step is not None or self._in_flight is not None or self._scheduler.num_running > 0

  def _launch(self, now: float) -> tuple[Batch, Launched, StepRecord, float] | None:
    scheduler = self._scheduler
    num_preemptions = scheduler.num_preemptions
    batch = scheduler.schedule(now)
    self.recorder.trace_schedule(now, batch, scheduler)
    if batch is None:
      return None
    record = self.recorder.start_record(batch, scheduler, now, scheduler.num_preemptions - num_preemptions)
    launched = self._runner.launch(batch)
    launch_time = self._clock()
    return batch, launched, record._replace(host_s=launch_time - now), launch_time

  def _commit(self, in_flight: tuple[Batch, Launched, StepRecord, float]) -> list[TokenEvent]:
    batch, launched, record, launch_time = in_flight
    result = launched.result()
    now = self._clock()
    record = record._replace(device_s=now - max(launch_time, self._last_arrival))
    self._last_arrival = now
    verdicts = self._scheduler.judge_tokens(batch, result)
    self.recorder.trace_commit(batch, result, now, record, verdicts)
    events = self._scheduler.commit(batch, result, now, verdicts)
    self.recorder.keep_record(record._replace(commit_s=self._clock() - now))
    return events

  def _take_messages(self) -> tuple[list[TokenEvent], bool]:
    """Handles the inbox under the lock, so that what is queued is at every instant in one place and counted once."""
    events: list[TokenEvent] = []
    if not self._inbox:
      return events, False
    with self._lock:
      for message in self._inbox:
        events += message() or ()
      self._inbox.clear()
      self._inbox_requests = self._inbox_tokens = 0
      self._inbox_of_tenant.clear()
    return events, True

  def _add(self, request: Request) -> None:
    self.recorder.trace_add(request)
    self._scheduler.add_request(request)

  def _abort(self, request_id: str, reason: FinishReason, message: str) -> list[TokenEvent]:
    self.recorder.trace_abort(request_id, reason)
    return self._scheduler.abort_request(request_id, reason, message)

  def _send(self, events: list[TokenEvent]) -> None:
    ended = [event.request_id for event in events if event.finish_reason is not None]
    if ended:
      with self._lock:
        self._live.difference_update(ended)
    self.recorder.count_events(events)
    self._emit(events)

  def fail(self, error: Exception) -> None:
    """Gives every live request its ending; nothing is accepted from here on. Engine thread only."""
    with self._lock:
      self.dead = error
      self._in_flight = None
      live = sorted(self._live)
    # The front end may be what failed: then it has no use for the endings.
    with contextlib.suppress(Exception):
      self._send([self.failure_event(request_id) for request_id in live])

  def failure_event(self, request_id: str) -> TokenEvent:
    """The ending of a request whose engine has failed."""
    message = f"the engine has failed, incident {self.incident} in the server's log; send the request to another server"
    return TokenEvent(request_id, finish_reason=FinishReason.ERROR, message=message, error=ENGINE_FAILURE)
