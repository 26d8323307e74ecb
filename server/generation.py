"""Live generations: tokens come in from the engine, messages go out to one RPC each. Knows no gRPC.

Everything here runs on the event loop's thread. The engine's thread reaches it by one `call_soon_threadsafe` a step.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
import math
import secrets

from engine.disaggregated import AnyEngine
from engine.errors import DuplicateRequest, EngineError
from engine.recorder import RING_STEPS
from engine.request import FinishReason, Request, TokenEvent
from server.errors import AbortedByRequest, DeadlineExceeded, GenerationFailed
from server.observations import Observations
from server.proto import sluice_pb2 as pb
from server.text import Detokenizer, StopStrings
from server.tokenizer import Tokenizer
from server.tracing import Span, Tracer
from server.validation import Call

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
# The engine keeps its latest RING_STEPS records of requests; looked at this often, none is missed.
_LOOK_UP_ENDINGS = RING_STEPS // 4


class _Output:
  """One index of a generation: from token events to the delta and the ending that are not yet sent."""

  def __init__(
    self,
    generation: "Generation",
    index: int,
    engine_id: str,
    call: Call,
    tokenizer: Tokenizer | None,
    clock: Callable[[], float],
  ):
    self.generation = generation
    self.engine_id = engine_id
    self.last_token_at: float | None = None  # on the engine's clock, of the dispatch that brought it
    self.delta = pb.Delta(index=index)
    self.finished: pb.Finished | None = None
    self._call = call
    self._min_tokens = call.params[index].min_tokens
    self._clock = clock
    self._started = clock()
    self._first_token_s = 0.0
    self._num_tokens = 0
    self._num_cached_tokens = 0
    wants_text = call.return_text or call.stop_strings
    self._detokenizer: Detokenizer | None = None
    if wants_text and tokenizer is not None:
      self._detokenizer = tokenizer.detokenizer(skip_special_tokens=call.skip_special_tokens)
    self._stops = StopStrings(call.stop_strings)

  @property
  def num_prompt_tokens(self) -> int:
    return len(self._call.prompt_token_ids)

  @property
  def num_tokens(self) -> int:
    return self._num_tokens

  @property
  def num_cached_tokens(self) -> int:
    return self._num_cached_tokens

  @property
  def first_token_s(self) -> float | None:
    """Seconds from submission; None before it."""
    return self._first_token_s if self._num_tokens else None

  def take(self, event: TokenEvent) -> None:
    """Adds an event of this request; sets `finished` when it is the last, or completes a stop string."""
    token_ids: Sequence[int] = event.token_ids
    if token_ids and self._num_tokens == 0:
      self._first_token_s = self._clock() - self._started
    if event.prompt_logprobs:
      self.delta.prompt_logprobs.extend(map(_logprobs, event.prompt_logprobs))
    self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)
    if event.stop_token_id is not None:
      self._num_tokens += 1
      token_ids = token_ids[:-1]
    shown = self._add_text(token_ids)
    if self._call.return_token_ids:
      self.delta.token_ids.extend(token_ids[:shown])
    if event.logprobs:
      self.delta.logprobs.extend(map(_logprobs, event.logprobs[:shown]))
    if self._stops.matched is not None:
      self._finish(FinishReason.STOP, stop_string=self._stops.matched)
    elif event.finish_reason is not None:
      if self._call.return_text:
        self.delta.text += self._stops.flush()
      self._finish(event.finish_reason, stop_token_id=event.stop_token_id)

  def _add_text(self, token_ids: Sequence[int]) -> int:
    """Appends the tokens' text up to a stop string; returns how many tokens were used."""
    if self._detokenizer is None or not self._call.stop_strings:
      self._num_tokens += len(token_ids)
      if self._detokenizer is not None and token_ids:
        self.delta.text += self._detokenizer.push(token_ids)
      return len(token_ids)
    for used, token_id in enumerate(token_ids, start=1):
      self._num_tokens += 1
      text = self._detokenizer.push((token_id,))
      if self._num_tokens > self._min_tokens:
        text = self._stops.push(text)
      if self._call.return_text:
        self.delta.text += text
      if self._stops.matched is not None:
        return used
    return len(token_ids)

  def _finish(self, reason: FinishReason, *, stop_token_id: int | None = None, stop_string: str | None = None) -> None:
    num_prompt_tokens = self.num_prompt_tokens
    self.finished = pb.Finished(
      index=self.delta.index,
      reason=_REASONS[reason],
      stop_token_id=stop_token_id,
      stop_string=stop_string,
      usage=pb.Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=self._num_tokens,
        total_tokens=num_prompt_tokens + self._num_tokens,
        cached_tokens=self._num_cached_tokens,
      ),
      timing=pb.Timing(time_to_first_token_s=self._first_token_s, total_s=self._clock() - self._started),
    )


class Generation:
  """One RPC's generation. Ends once: every output finished, or an error."""

  def __init__(self, request_id: str, owner: str):
    self.request_id = request_id
    self.owner = owner
    self.outputs: list[_Output] = []
    self.error: EngineError | None = None
    self.span: Span | None = None
    self._news = asyncio.Event()

  @property
  def ended(self) -> bool:
    """Nothing more will come from the engine."""
    return self.error is not None or all(output.finished is not None for output in self.outputs)

  @property
  def outcome(self) -> str:
    """What became of it, once it is closed."""
    if self.error is not None:
      return "cancelled" if isinstance(self.error, AbortedByRequest) else "failed"
    return "finished" if self.ended else "cancelled"

  def wake(self) -> None:
    """There is something to send."""
    self._news.set()

  async def wait_ended(self) -> None:
    """Returns when all outputs are finished; raises the error that ended the generation instead."""
    while not self.ended:
      await self._news.wait()
      self._news.clear()
    if self.error is not None:
      raise self.error

  async def messages(self) -> AsyncIterator[pb.GenerateResponse]:
    """What came since the last message, until the end; raises the error that ended the generation instead.

    A reader that is slow gets fewer and larger messages, so what waits for it is bounded by max_tokens.
    """
    unfinished = self.outputs
    while unfinished:
      await self._news.wait()
      self._news.clear()
      message = pb.GenerateResponse()
      for output in unfinished:
        delta = output.delta
        if delta.text or delta.token_ids or delta.logprobs or delta.prompt_logprobs:
          message.deltas.append(delta)
          output.delta = pb.Delta(index=delta.index)
        if output.finished is not None:
          message.finished.append(output.finished)
      unfinished = [output for output in unfinished if output.finished is None]
      if not unfinished:
        message.finished[-1].last = True
      if message.deltas or message.finished:
        yield message
      if self.error is not None:
        raise self.error


class Generations:
  """All live generations of a server, by owner and request id, and by the engine's ids."""

  def __init__(self, engine: AnyEngine, tokenizer: Tokenizer | None, *, tracer: Tracer | None = None):
    """Args:
    engine: gets the requests; its clock is the one deadlines are on.
    tokenizer: of the model, or None.
    tracer: gets a span for each generation; None: there are none.
    """
    self.observations = Observations()
    self._tracer = tracer
    self._dispatched_at = 0.0
    self._endings_to_look_up = 0
    self._engine = engine
    self._tokenizer = tokenizer
    self._clock = engine.now
    # No deadline of a client's may be later.
    self._request_timeout_s = engine.config.request_timeout_s or math.inf
    self._live: dict[tuple[str, str], Generation] = {}  # by owner and request id
    self._outputs: dict[str, _Output] = {}
    # Ids that the engine has not ended yet, though nobody waits for them any more. They cannot be used again.
    self._lingering: set[str] = set()
    self._idle = asyncio.Event()
    self._idle.set()
    self.num_started = 0
    # Of those that are not live any more; "cancelled" are those that nobody waits for.
    self.num_ended = {"finished": 0, "failed": 0, "cancelled": 0}

  def __len__(self) -> int:
    return len(self._live)

  def start(self, call: Call, time_remaining_s: float | None, owner: str = "") -> Generation:
    """Submits a checked call.

    Args:
      call: what to generate.
      time_remaining_s: of the client's deadline; None is no deadline.
      owner: tenant of the caller's key, empty where none is asked for; nobody else can abort it, or collides with its
        id.

    Raises:
      DuplicateRequest: the id is live.
      InvalidRequest, Overloaded, Unavailable: from the engine; nothing stays queued.
    """
    request_id = call.request_id or f"g-{secrets.token_hex(16)}"
    if (owner, request_id) in self._live:
      raise DuplicateRequest(f"request_id={request_id} is in use by a live request; choose another, or leave it empty")
    now = self._clock()
    limit_s = min(self._request_timeout_s, math.inf if time_remaining_s is None else time_remaining_s)
    generation = Generation(request_id, owner)
    self._live[owner, request_id] = generation
    self._idle.clear()
    leader = self._free_engine_id(request_id)
    try:
      for index, params in enumerate(call.params):
        engine_id = leader if index == 0 else self._free_engine_id(f"{request_id}/{index}")
        output = _Output(generation, index, engine_id, call, self._tokenizer, self._clock)
        self._engine.submit(
          Request(
            id=engine_id,
            prompt_token_ids=call.prompt_token_ids,
            params=params,
            priority=call.priority,
            queue_deadline=None if call.queue_timeout_s is None else now + call.queue_timeout_s,
            deadline=None if limit_s == math.inf else now + limit_s,
            cache_salt=call.cache_salt,
            tenant=call.tenant,
            leader_id=None if index == 0 else leader,
            constraint=call.constraints[index] if call.constraints else None,
          )
        )
        self._outputs[engine_id] = output
        generation.outputs.append(output)
    except BaseException:
      self._forget(generation)
      raise
    self.num_started += 1
    if self._tracer is not None:
      generation.span = self._tracer.begin(request_id, call)
    return generation

  def dispatch(self, events: Sequence[TokenEvent]) -> None:
    """Hands a step's events to their generations, each of which is woken once."""
    woken: dict[int, Generation] = {}
    now, before = self._clock(), self._dispatched_at
    num_steady, firsts = 0, []
    for event in events:
      output = self._outputs.get(event.request_id)
      error = None
      if event.finish_reason is not None:
        self._outputs.pop(event.request_id, None)
        self._lingering.discard(event.request_id)
        self._endings_to_look_up += 1
        error = _error_of(event)
      if output is None:
        continue
      if event.token_ids:
        # Nearly all had their last token in the dispatch before: their gaps are one number, and one object.
        last = output.last_token_at
        if last is before:
          num_steady += 1
        elif last is None:
          firsts.append(output)
        else:
          self.observations.gap(now - last, 1)
        output.last_token_at = now
      generation = output.generation
      woken[id(generation)] = generation
      if error is not None:
        self.fail(generation, error)
        continue
      output.take(event)
      if output.finished is not None:
        self._observe_finished(output.finished)
        if event.finish_reason is None:
          self._abort_output(output, FinishReason.STOP)
    for generation in woken.values():
      generation.wake()
    for output in firsts:
      if output.first_token_s is not None:
        self.observations.first_token(output.first_token_s)
    if num_steady:
      self.observations.gap(now - before, num_steady)
    self._dispatched_at = now
    if self._endings_to_look_up >= _LOOK_UP_ENDINGS:
      self.look_up_endings()

  def look_up_endings(self) -> None:
    """Brings `observations` up to date with what only the engine knows of requests that ended."""
    self._endings_to_look_up = 0
    self.observations.queued(self._engine.stats(RING_STEPS).requests)

  def _observe_finished(self, finished: pb.Finished) -> None:
    usage, timing = finished.usage, finished.timing
    self.observations.finished(
      seconds=timing.total_s,
      first_token_s=timing.time_to_first_token_s,
      num_prompt_tokens=usage.prompt_tokens,
      num_tokens=usage.completion_tokens,
    )

  def abort(self, request_id: str, owner: str = "") -> bool:
    """Ends a live generation of this owner as its wish; returns whether there was one."""
    generation = self._live.get((owner, request_id))
    if generation is None or generation.ended:
      return False
    self.fail(generation, AbortedByRequest(f"request {request_id} was aborted by an Abort call"))
    return True

  def fail(self, generation: Generation, error: EngineError) -> None:
    """Ends a generation with an error, and the engine's work on it; one that has ended stays as it is."""
    if not generation.ended:
      generation.error = error
      for output in generation.outputs:
        if output.engine_id in self._outputs:
          self._abort_output(output)
      generation.wake()

  def fail_all(self, error: EngineError) -> None:
    """Ends every live generation with this error."""
    for generation in list(self._live.values()):
      self.fail(generation, error)

  def close(self, generation: Generation) -> None:
    """Forgets a generation; the engine stops work on what of it is unfinished. Call it exactly once for each start."""
    self.num_ended[generation.outcome] += 1
    self._forget(generation)

  def _forget(self, generation: Generation) -> None:
    del self._live[generation.owner, generation.request_id]
    if generation.span is not None:
      generation.span.end(generation.outputs, generation.error)
    for output in generation.outputs:
      if output.engine_id in self._outputs:
        self._abort_output(output)
    if not self._live:
      self._idle.set()

  def check(self) -> None:
    """Asserts that every generation is somewhere, once."""
    ended, live = sum(self.num_ended.values()), len(self._live)
    assert self.num_started == ended + live, f"{self.num_started} generations started, {ended} ended, {live} live"
    for engine_id, output in self._outputs.items():
      generation = output.generation
      key = generation.owner, generation.request_id
      assert self._live.get(key) is generation, f"output {engine_id!r:.80} outlived its generation"
    assert not self._lingering & self._outputs.keys(), "an output that lives waits for its end"

  @property
  def num_lingering(self) -> int:
    """Requests that the engine has not ended yet though nobody waits for them."""
    return len(self._lingering)

  async def wait_idle(self) -> None:
    """Returns when no generation is live."""
    await self._idle.wait()

  def _abort_output(self, output: _Output, reason: FinishReason = FinishReason.ABORT) -> None:
    """The engine's own ending of it, a step or two later, finds nobody."""
    del self._outputs[output.engine_id]
    self._lingering.add(output.engine_id)
    self._engine.abort(output.engine_id, reason)

  def _free_engine_id(self, request_id: str) -> str:
    """`request_id`, or a variant while the engine still holds an ended request of that id."""
    engine_id, serial = request_id, 1
    while engine_id in self._lingering or engine_id in self._outputs:
      engine_id, serial = f"{request_id}~{serial}", serial + 1
    return engine_id


def _error_of(event: TokenEvent) -> EngineError | None:
  """The error that a request's last event stands for, if any."""
  if event.finish_reason is FinishReason.TIMEOUT:
    return DeadlineExceeded(event.message or "the request's deadline has passed; allow more time, or ask for less")
  if event.finish_reason is FinishReason.ERROR:
    return GenerationFailed(event.message or "the model could not continue this request; it may succeed if sent again")
  if event.finish_reason is FinishReason.ABORT:
    return AbortedByRequest(event.message or "the request was aborted")
  return None


def _logprobs(entry) -> pb.TokenLogprobs:
  return pb.TokenLogprobs(
    token_id=entry.token_id,
    logprob=entry.logprob,
    top=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
  )
