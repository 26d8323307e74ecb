"""Turns the engine's tokens into the messages of live generations. Knows no gRPC.

Everything here runs on the event loop's thread, which the engine wakes once a step. A step has hundreds of tokens, so
each is appended to a list, and one message covers all tokens since the last one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
import math
import secrets

from engine.errors import DuplicateRequest, EngineError
from engine.request import ENGINE_FAILURE, GRAMMAR_LIMIT, NUMERICAL_ERROR, FinishReason, Request, TokenEvent
from server.errors import (
  AbortedByRequest,
  DeadlineExceeded,
  EngineFailed,
  GenerationFailed,
  GrammarLimit,
  NumericalError,
  log_incident,
)
from server.generation.engine_client import EngineClient
from server.generation.request_validation import GenerationCall
from server.proto import sluice_pb2 as pb
from server.telemetry.latency_histograms import Observations
from server.telemetry.tracing import Span, Tracer
from server.text.detokenizer import Detokenizer, StopStrings
from server.text.tokenizer import Tokenizer

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
# Limit of tokens that wait to become text, so that detokenizing one long output never delays other streams.
_MAX_PENDING = 256
_ERRORS = {NUMERICAL_ERROR: NumericalError, ENGINE_FAILURE: EngineFailed, GRAMMAR_LIMIT: GrammarLimit}


class _Output:
  """One output of a generation: turns token events into the delta and the ending that are not yet sent.

  Attributes:
    pending: tokens that are not in the delta yet.
    is_eager: whether each token is detokenized on arrival, since it may complete a stop string.
    started, last_token_at: times on the engine's clock; the second is the time of the token's dispatch.
    first_token_s: seconds from the start to the first token.
    num_cached_tokens: prompt tokens found in the prefix cache.
    embedding: see TokenEvent.
  """

  def __init__(
    self,
    generation: "Generation",
    index: int,
    engine_id: str,
    call: GenerationCall,
    tokenizer: Tokenizer | None,
    clock: Callable[[], float],
  ):
    self.generation = generation
    self.engine_id = engine_id
    self.pending: list[int] = []
    self.is_eager = bool(call.stop_strings)
    self.last_token_at: float | None = None
    self.finished: pb.Finished | None = None
    self._delta = pb.Delta(index=index)
    self._call = call
    self._min_tokens = call.params[index].min_tokens
    self._clock = clock
    self.started = clock()
    self.first_token_s: float | None = None
    self.num_prompt_tokens = len(call.prompt_token_ids)
    self.num_cached_tokens = 0
    self.embedding = b""
    self._num_tokens = 0
    wants_text = call.return_text or call.stop_strings
    self._detokenizer: Detokenizer | None = None
    if wants_text and tokenizer is not None:
      self._detokenizer = tokenizer.detokenizer(
        skip_special_tokens=call.skip_special_tokens, shown_token_ids=call.shown_token_ids
      )
    self._stops = StopStrings(call.stop_strings)

  @property
  def num_tokens(self) -> int:
    return self._num_tokens + len(self.pending)

  @property
  def delta(self) -> pb.Delta:
    """The unsent delta."""
    if self.pending:
      self.flush()
    return self._delta

  def add_to(self, message: pb.GenerateResponse) -> None:
    """Moves the unsent delta into a message."""
    delta = self.delta
    if delta.text or delta.token_ids or delta.logprobs or delta.prompt_logprobs:
      message.deltas.append(delta)
      self._delta = pb.Delta(index=delta.index)
    if self.finished is not None:
      message.finished.append(self.finished)

  def flush(self) -> None:
    """Moves pending tokens into the delta."""
    pending, self.pending = self.pending, []
    self._add_text(pending)
    if self._call.return_token_ids:
      self._delta.token_ids.extend(pending)

  def take_event(self, event: TokenEvent) -> None:
    """Adds an event; sets `finished` if it is the request's last, or completes a stop string."""
    token_ids: Sequence[int] = event.token_ids
    if event.prompt_logprobs:
      self._delta.prompt_logprobs.extend(map(_logprobs, event.prompt_logprobs))
    self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
    if event.stop_token_id is not None:
      self._num_tokens += 1
      token_ids = token_ids[:-1]
    if self.is_eager:
      token_ids = token_ids[: self._add_text(token_ids)]
      if self._call.return_token_ids:
        self._delta.token_ids.extend(token_ids)
    else:
      self.pending += token_ids
      if len(self.pending) >= _MAX_PENDING:
        self.flush()
    if event.logprobs:
      self._delta.logprobs.extend(map(_logprobs, event.logprobs[: len(token_ids)]))
    if self._stops.matched is not None:
      self._finish(FinishReason.STOP, stop_string=self._stops.matched)
    elif event.finish_reason is not None:
      if self._call.return_text:
        self._delta.text += self._stops.flush()
      self._finish(event.finish_reason, stop_token_id=event.stop_token_id)

  def _add_text(self, token_ids: Sequence[int]) -> int:
    """Appends the tokens' text up to a stop string; returns how many tokens it used."""
    if self._detokenizer is None or not self._call.stop_strings:
      self._num_tokens += len(token_ids)
      if self._detokenizer is not None and token_ids:
        self._delta.text += self._detokenizer.push(token_ids)
      return len(token_ids)
    for used, token_id in enumerate(token_ids, start=1):
      self._num_tokens += 1
      text = self._detokenizer.push((token_id,))
      text = self._stops.push(text, may_match=self._num_tokens > self._min_tokens)
      if self._call.return_text:
        self._delta.text += text
      if self._stops.matched is not None:
        return used
    return len(token_ids)

  def _finish(self, reason: FinishReason, *, stop_token_id: int | None = None, stop_string: str | None = None) -> None:
    self.finished = pb.Finished(
      index=self._delta.index,
      reason=_REASONS[reason],
      stop_token_id=stop_token_id,
      stop_string=stop_string,
      usage=pb.Usage(
        prompt_tokens=self.num_prompt_tokens,
        completion_tokens=self.num_tokens,
        total_tokens=self.num_prompt_tokens + self.num_tokens,
        cached_tokens=self.num_cached_tokens,
      ),
      timing=pb.Timing(time_to_first_token_s=self.first_token_s or 0.0, total_s=self._clock() - self.started),
    )


class Generation:
  """One RPC's generation. Ends once: with every output finished, or with an error.

  Attributes:
    adapter: name of its LoRA adapter; empty: the base model alone.
    has_news: whether its reader has been woken and has not looked yet, so that no token wakes it again.
  """

  def __init__(self, request_id: str, owner: str, adapter: str = ""):
    self.request_id = request_id
    self.owner = owner
    self.adapter = adapter
    self.outputs: list[_Output] = []
    self.error: EngineError | None = None
    self.span: Span | None = None
    self.has_news = False
    self._news = asyncio.Event()

  @property
  def ended(self) -> bool:
    """Whether the engine will bring nothing more."""
    return self.error is not None or all(output.finished is not None for output in self.outputs)

  @property
  def outcome(self) -> str:
    """How it ended, once it is closed."""
    if self.error is not None:
      return "cancelled" if isinstance(self.error, AbortedByRequest) else "failed"
    return "finished" if self.ended else "cancelled"

  def wake(self) -> None:
    """Wakes the reader: there is something to send."""
    self.has_news = True
    self._news.set()

  async def _wait_news(self) -> None:
    await self._news.wait()
    self._news.clear()
    self.has_news = False

  async def wait_ended(self) -> None:
    """Returns when all outputs are finished; raises the error that ended the generation instead."""
    while not self.ended:
      await self._wait_news()
    if self.error is not None:
      raise self.error

  async def messages(self) -> AsyncIterator[pb.GenerateResponse]:
    """Yields messages until the end; raises the error that ended the generation instead.

    A slow reader gets fewer and larger messages, so max_tokens bounds what waits for it.
    """
    unfinished = self.outputs
    while unfinished:
      await self._wait_news()
      message = pb.GenerateResponse()
      for output in unfinished:
        output.add_to(message)
      unfinished = [output for output in unfinished if output.finished is None]
      if not unfinished:
        message.finished[-1].last = True
      if message.deltas or message.finished:
        yield message
      if self.error is not None:
        raise self.error


class Generations:
  """The live generations of a server, by owner and request id, and by the engine's ids."""

  def __init__(
    self,
    engine: EngineClient,
    tokenizer: Tokenizer | None,
    *,
    tracer: Tracer | None = None,
    observations: Observations | None = None,
  ):
    """Args:
    engine: receives the requests; deadlines are on its clock.
    tokenizer: the model's tokenizer, or None.
    tracer: receives a span for each generation; None makes no spans.
    observations: receives the latencies; None: a new one.
    """
    self.observations = Observations() if observations is None else observations
    self._tracer = tracer
    self._dispatched_at = 0.0
    self._engine = engine
    self._tokenizer = tokenizer
    self._clock = engine.now
    # The latest deadline that a client may set.
    self._request_timeout_s = engine.config.request_timeout_s or math.inf
    self._live: dict[tuple[str, str], Generation] = {}  # by owner and request id
    self._outputs: dict[str, _Output] = {}
    self._idle = asyncio.Event()
    self._idle.set()
    self.num_started = 0
    self.num_late_events = 0  # events of finished, abandoned or unknown requests
    self._refusal: EngineError | None = None
    self._num_starting = 0  # live, but the engine has not accepted or refused them yet
    # Ended generations by outcome; "cancelled" are those whose client has gone.
    self.num_ended = {"finished": 0, "failed": 0, "cancelled": 0}

  def __len__(self) -> int:
    return len(self._live)

  async def start_generation(self, call: GenerationCall, time_remaining_s: float | None, owner: str = "") -> Generation:
    """Submits a checked call. If it raises, or is cancelled, it leaves nothing behind.

    Args:
      call: the checked call.
      time_remaining_s: seconds until the client's deadline; None is no deadline.
      owner: the tenant of the caller's key, empty where the server requires none. Ids are unique within an owner, and
        only the owner can abort the generation.

    Raises:
      DuplicateRequest: the id is live.
      InvalidRequest, Overloaded, Unavailable: the engine refused it.
      EngineError: the error of `end_all`.
    """
    if self._refusal is not None:
      raise self._refusal
    request_id = call.request_id or f"g-{secrets.token_hex(16)}"
    if (owner, request_id) in self._live:
      raise DuplicateRequest(f"request_id={request_id} is in use by a live request; choose another, or leave it empty")
    now = self._clock()
    limit_s = min(self._request_timeout_s, math.inf if time_remaining_s is None else time_remaining_s)
    generation = Generation(request_id, owner, call.adapter)
    self._live[owner, request_id] = generation
    self._idle.clear()
    self._num_starting += 1
    ids: list[str] = []
    requests: list[Request] = []
    try:
      for index, params in enumerate(call.params):
        engine_id = self._engine.new_id(f"{request_id}/{index}" if index else request_id)
        ids.append(engine_id)
        output = _Output(generation, index, engine_id, call, self._tokenizer, self._clock)
        self._outputs[engine_id] = output
        generation.outputs.append(output)
        requests.append(
          Request(
            id=engine_id,
            prompt_token_ids=call.prompt_token_ids,
            params=params,
            priority=call.priority,
            queue_deadline=None if call.queue_timeout_s is None else now + call.queue_timeout_s,
            deadline=None if limit_s == math.inf else now + limit_s,
            cache_salt=call.cache_salt,
            tenant=call.tenant,
            leader_id=None if index == 0 else ids[0],
            constraint=call.constraints[index] if call.constraints else None,
            adapter=call.adapter,
            speculation=call.speculation,
          )
        )
      await self._engine.submit(owner, request_id, requests)
    except Exception:
      for engine_id in ids:  # of which the engine knows nothing
        self._outputs.pop(engine_id, None)
        self._engine.ended(engine_id)
      self._forget(generation)
      raise
    except BaseException:  # a cancellation: the engine may know of it or not
      self._forget(generation)
      raise
    finally:
      self._num_starting -= 1
    self.num_started += 1
    if self._tracer is not None:
      generation.span = self._tracer.start_span(
        request_id, len(call.prompt_token_ids), call.params, adapter=call.adapter
      )
    return generation

  def dispatch_events(
    self, events: Sequence[TokenEvent], request_ids: Sequence[str] = (), token_ids: Sequence[int] = ()
  ) -> bool:
    """Hands a step's events to their generations and wakes them; returns whether a request ended.

    Args:
      events: events of any kind.
      request_ids, token_ids: columns of events that only bring one token.
    """
    has_ending = False
    now, before = self._clock(), self._dispatched_at
    num_steady = 0
    outputs = self._outputs
    for request_id, token_id in zip(request_ids, token_ids, strict=True):
      output = outputs.get(request_id)
      if output is None:
        self.num_late_events += 1
        continue
      # Nearly all outputs had their last token in the dispatch before, so they share one gap.
      if output.last_token_at is before:
        num_steady += 1
        output.last_token_at = now
      else:
        self._see_token(output, now)
      if output.is_eager:
        self._take(output, TokenEvent(request_id, (token_id,)))
      else:
        output.pending.append(token_id)
        if len(output.pending) >= _MAX_PENDING:
          self._guarded(output, output.flush)
      if not output.generation.has_news:
        output.generation.wake()
    for event in events:
      request_id, tokens, logprobs, prompt_logprobs, reason, _, _, _, _, embedding = event
      if reason is not None:
        has_ending = True
        self._engine.ended(request_id)
        output = outputs.pop(request_id, None)
      else:
        output = outputs.get(request_id)
      if output is None:
        self.num_late_events += 1
        continue
      if embedding:
        output.embedding = embedding
      if tokens:
        if output.last_token_at is before:
          num_steady += 1
          output.last_token_at = now
        else:
          self._see_token(output, now)
      if reason is not None or output.is_eager or logprobs or prompt_logprobs:
        self._take(output, event)
      else:
        output.pending += tokens
        if len(output.pending) >= _MAX_PENDING:
          self._guarded(output, output.flush)
      if not output.generation.has_news:
        output.generation.wake()
    if num_steady:
      self.observations.gap(now, now - before, num_steady)
    self._dispatched_at = now
    return has_ending

  def _see_token(self, output: _Output, now: float) -> None:
    """Records a first token, or one whose predecessor did not come in the previous dispatch."""
    if output.last_token_at is None:
      output.first_token_s = now - output.started
      self.observations.first_token(now, output.first_token_s)
    else:
      self.observations.gap(now, now - output.last_token_at, 1)
    output.last_token_at = now

  def _take(self, output: _Output, event: TokenEvent) -> None:
    error = _error_of(event)
    if error is not None:
      self.fail_generation(output.generation, error)
      return
    self._guarded(output, lambda: output.take_event(event))
    if output.finished is not None:
      usage, timing = output.finished.usage, output.finished.timing
      self.observations.finished(
        seconds=timing.total_s,
        first_token_s=timing.time_to_first_token_s,
        num_prompt_tokens=usage.prompt_tokens,
        num_tokens=usage.completion_tokens,
      )
      if event.finish_reason is None:
        self._abort_output(output, FinishReason.STOP)

  def _guarded(self, output: _Output, work: Callable[[], None]) -> None:
    """Runs work on an output's text, such as detokenizing, such that an error ends this request alone."""
    try:
      work()
    except Exception as error:
      hidden = log_incident(error, "the text of a request failed in the server's own code")
      self.fail_generation(output.generation, hidden)

  def abort_generation(self, request_id: str, owner: str = "") -> bool:
    """Ends a live generation at its owner's request; returns whether there was one."""
    generation = self._live.get((owner, request_id))
    if generation is None or generation.ended:
      return False
    self.fail_generation(generation, AbortedByRequest(f"request {request_id} was aborted by an Abort call"))
    return True

  def fail_generation(self, generation: Generation, error: EngineError) -> None:
    """Ends a generation with an error and aborts its requests; does nothing if it has ended."""
    if not generation.ended:
      generation.error = error
      for output in generation.outputs:
        if output.engine_id in self._outputs:
          self._abort_output(output)
      generation.wake()

  def end_all(self, error: EngineError) -> None:
    """Ends every live generation with this error, and every later one."""
    self._refusal = error
    for generation in list(self._live.values()):
      self.fail_generation(generation, error)

  def close_generation(self, generation: Generation) -> None:
    """Removes a generation and aborts its unfinished requests. Call it exactly once for each start."""
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

  async def wait_idle(self) -> None:
    """Returns when no generation is live."""
    await self._idle.wait()

  def _abort_output(self, output: _Output, reason: FinishReason = FinishReason.ABORT) -> None:
    """Aborts an output; the engine's last event for it, a step or two later, is dropped."""
    del self._outputs[output.engine_id]
    self._engine.abort(output.engine_id, reason)


def _error_of(event: TokenEvent) -> EngineError | None:
  """Returns the error that a request's last event means, or None."""
  if event.finish_reason is FinishReason.TIMEOUT:
    return DeadlineExceeded(
      event.message or "the request's deadline has passed; allow more time, or request fewer tokens"
    )
  if event.finish_reason is FinishReason.ERROR:
    kind = _ERRORS.get(event.error, GenerationFailed)
    return kind(event.message or "the model could not continue this request; it may succeed if sent again")
  if event.finish_reason is FinishReason.ABORT:
    return AbortedByRequest(event.message or "the request was aborted")
  return None


def _logprobs(entry) -> pb.TokenLogprobs:
  return pb.TokenLogprobs(
    token_id=entry.token_id,
    logprob=entry.logprob,
    top=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
  )
