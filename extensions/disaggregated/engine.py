"""Runs prefill on one set of devices and decode on another, in one process: two engines and the hand-over between them.

A prompt never delays another request's next token (DistServe, OSDI 2024; Splitwise, ISCA 2024). Each side is a whole
Engine with its own scheduler, pool and loop; this file schedules nothing. The prefill side runs a request for one
token. The engine then copies the request's blocks, before a later step there can write to them, and hands request and
blocks to the decode side, which imports the blocks on admission. If the decode side preempts the request, it
recomputes the whole sequence itself.
"""

from collections.abc import Callable, Sequence
import dataclasses
import threading
from typing import Any

from engine.adapters import AdapterInfo
from engine.batch import Runner
from engine.engine import Clock, Emit, Engine
from engine.errors import ConfigError, DuplicateRequest, Overloaded, Unavailable
from engine.recorder import EngineStats, Recorder, RungTotals, latest_records
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.validation import validate_request

# Maps block ids of the prefill side to a copy of these blocks as its launched steps leave them; the decode side
# receives it as an Admission's `imported`.
ExportBlocks = Callable[[tuple[int, ...]], Any]


@dataclasses.dataclass(slots=True)
class _Live:
  """A live request and the side it is on.

  Attributes:
    request: the submitted request; runs nowhere.
    first: its part on the prefill side.
    handed_over: whether it is on the decode side.
    abort: the reason and message of an abort that arrived while it was on the prefill side.
  """

  request: Request
  first: Request
  handed_over: bool = False
  abort: tuple[FinishReason, str] | None = None


class DisaggregatedEngine(Engine):
  """Two engines with the interface of one Engine. Emits from two threads, one list at a time."""

  def __init__(
    self,
    prefill: tuple[Scheduler, Runner],
    decode: tuple[Scheduler, Runner],
    export: ExportBlocks,
    clock: Clock,
    emit: Emit,
    engine_class: type[Engine] = Engine,
  ):
    """Args:
    prefill, decode: a scheduler and a runner each; their settings must agree, except for the pool's size.
    export: copies blocks out of the prefill side's runner.
    clock, emit, engine_class: as in Engine.
    """
    if prefill[0].config.block_size != decode[0].config.block_size:
      raise ConfigError(
        f"blocks of {prefill[0].config.block_size} tokens on the prefill side and {decode[0].config.block_size} on "
        "the decode side cannot be exchanged; set one --block_size for both"
      )
    self.config = decode[0].config
    self._clock, self._outer_emit = clock, emit
    self._lock = threading.RLock()
    self._live: dict[str, _Live] = {}
    self.num_accepted = 0  # accepted requests since the start
    self._export = export
    self.prefill = engine_class(*prefill, clock, self._on_prefill)
    self.decode = engine_class(*decode, clock, self._on_decode)
    self.prefill.recorder.side, self.decode.recorder.side = "prefill", "decode"
    self.incident = self.prefill.incident = self.decode.incident  # if one side fails, both do
    self._num_handed_over = 0

  # The interface of an Engine, callable on any thread.

  @property
  def heartbeat(self) -> float:
    """The older of the two sides' heartbeats."""
    return min(self.prefill.heartbeat, self.decode.heartbeat)

  @property
  def dead(self) -> Exception | None:
    """The error of the side that failed first; the other side then ends with the same cause."""
    return self.prefill.dead or self.decode.dead

  @property
  def recorder(self) -> Recorder:
    """The decode side's recorder."""
    return self.decode.recorder

  def submit_all(self, requests: Sequence[Request]) -> None:
    """See Engine.submit_all. Refuses requests that do not fit both pools."""
    firsts = []
    for request in requests:
      validate_request(self.config, request)
      request.arrival_time = self._clock()
      params = request.params
      firsts.append(_part(request, dataclasses.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))))
    with self._lock:
      if self.dead is not None:
        raise Unavailable("the engine has failed; send the request to another server")
      for request in requests:
        if request.id in self._live:
          raise DuplicateRequest(f"a live request has the id {request.id!r:.80}; choose another id, or leave it out")
      backlog, limit = self.decode.num_live - self.config.max_num_seqs, self.config.max_queued_requests
      if backlog >= limit:
        raise Overloaded(f"{backlog} requests wait for decode, the limit is {limit}; retry later")
      self.prefill.submit_all(firsts)
      self._live.update((request.id, _Live(request, first)) for request, first in zip(requests, firsts, strict=True))
      self.num_accepted += len(requests)

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, message: str = "") -> None:
    """See Engine.abort."""
    with self._lock:
      live = self._live.get(request_id)
      if live is None:
        return
      if not live.handed_over:
        live.abort = reason, message  # its last event may already be under way
      (self.decode if live.handed_over else self.prefill).abort(request_id, reason, message)

  def start_trace(self, path: str) -> None:
    """Writes two step traces, `path`.prefill and `path`.decode."""
    self.prefill.start_trace(path + ".prefill")
    self.decode.start_trace(path + ".decode")

  def stop_trace(self) -> None:
    """Ends both traces."""
    self.prefill.stop_trace()
    self.decode.stop_trace()

  def keep_all(self) -> None:
    """See Engine.keep_all."""
    self.prefill.keep_all()
    self.decode.keep_all()

  def stats(self, num_steps: int = 0) -> EngineStats:
    """Returns the statistics of both sides: sums, and the latest records of both in order of time.

    A request has a record on each side; the first ends at the hand-over.
    """
    first, rest = self.prefill.stats(num_steps), self.decode.stats(num_steps)
    finished = {reason: count + rest.finished[reason] for reason, count in first.finished.items()}
    finished[FinishReason.LENGTH] -= self._num_handed_over  # prefill parts of the decode side's requests
    rungs = dict(first.rungs)
    for tokens, totals in rest.rungs.items():
      rungs[tokens] = totals.plus(rungs.get(tokens, RungTotals()))
    summed = {
      field.name: getattr(first, field.name) + getattr(rest, field.name)
      for field in dataclasses.fields(EngineStats)
      if field.type is int
    }
    return EngineStats(
      **summed
      | {
        "num_live": self.num_live,
        "num_cached_tokens": first.num_cached_tokens,
        "num_queried_tokens": first.num_queried_tokens,
        "rungs": rungs,
        "drafts": first.drafts.plus(rest.drafts),
        "finished": finished,
        "steps": latest_records(sorted((*first.steps, *rest.steps), key=lambda record: record.time), num_steps),
        "requests": latest_records(sorted((*first.requests, *rest.requests), key=lambda record: record.end), num_steps),
      }
    )

  def adapters(self) -> list[AdapterInfo]:
    """Returns no adapters: --enable_lora excludes two sides."""
    return []

  def block_states(self) -> bytes:
    """See BlockPool.block_states; the prefill side's blocks come first."""
    return self.prefill.block_states() + self.decode.block_states()

  # Loops.

  def run(self, stop_event: threading.Event) -> None:
    """Runs both sides until `stop_event` is set or one side dies; the prefill side has its own thread."""
    thread = threading.Thread(target=self._run_side, args=(self.prefill, stop_event), name="prefill")
    thread.start()
    self._run_side(self.decode, stop_event)
    thread.join()

  def wake(self) -> None:
    """See Engine.wake."""
    self.prefill.wake()
    self.decode.wake()

  def _run_side(self, side: Engine, stop_event: threading.Event) -> None:
    side.run(_Either(stop_event, lambda: self.dead is not None))
    if self.dead is not None and side.dead is None:
      side.fail(self.dead)

  def step(self) -> bool:
    """Runs one iteration of each loop, on the caller's thread."""
    active = self.prefill.step()
    return self.decode.step() or active

  # Events, on the thread of the side that emits them.

  def _on_prefill(self, events: list[TokenEvent]) -> None:
    with self._lock:
      sent, leaving = [], []
      for event in events:
        live = self._live[event.request_id]
        if event.finish_reason is FinishReason.LENGTH and live.request.params.max_tokens > 1:
          if live.abort is None:
            leaving.append((live, event))
            event = event._replace(finish_reason=None, num_cached_tokens=0)
          else:
            reason, message = live.abort
            event = event._replace(finish_reason=reason, message=message)
        sent.append(event)
      self._send(sent)
      for live, event in leaving:
        self._hand_over(live, event)

  def _hand_over(self, live: _Live, event: TokenEvent) -> None:
    request, first = live.request, live.first
    rest = _part(request, request.params)
    rest.arrival_time = first.arrival_time
    rest.first_scheduled_time, rest.first_token_time = first.first_scheduled_time, first.first_token_time
    rest.output_token_ids = list(event.token_ids)
    rest.num_prompt_cached_tokens = event.num_cached_tokens
    rest.num_prompt_logprobs = request.num_prompt_tokens - 1  # the prefill side has sent them
    rest.num_transferred_tokens = request.num_prompt_tokens
    rest.transfer = self._export(first.final_blocks)
    live.handed_over = True
    self._num_handed_over += 1
    try:
      self.decode.take_over(rest)
    except Unavailable:  # the decode side died before it held the request, and the prefill side has dropped it
      self._send([self.failure_event(request.id)])

  def _on_decode(self, events: list[TokenEvent]) -> None:
    with self._lock:
      self._send(events)

  def _send(self, events: list[TokenEvent]) -> None:
    for event in events:
      if event.finish_reason is not None:
        del self._live[event.request_id]
    if events:
      self._outer_emit(events)


class _Either(threading.Event):
  """An event that is also set when another event is, or when a condition holds."""

  def __init__(self, event: threading.Event, condition: Callable[[], bool]):
    super().__init__()
    self._event, self._condition = event, condition

  def is_set(self) -> bool:
    return self._event.is_set() or self._condition()


def _part(request: Request, params: SamplingParams) -> Request:
  """Returns one side's part of a request; both sides sample with the same seed."""
  return Request(
    id=request.id,
    prompt_token_ids=request.prompt_token_ids,
    params=params if params.seed is not None else dataclasses.replace(params, seed=request.seed),
    priority=request.priority,
    queue_deadline=request.queue_deadline,
    deadline=request.deadline,
    cache_salt=request.cache_salt,
    tenant=request.tenant,
    leader_id=request.leader_id,
    speculation=request.speculation,
    constraint=request.constraint,  # shared: the request is on one side at a time
  )
