"""The RPCs: a message in, messages out, errors raised. May not touch the engine except through `Backend`.

Keys, request ids and the way from an error to a status are the interceptor's, without which no server may run these.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
import concurrent.futures
import dataclasses
import hashlib
from importlib import metadata
import time
from typing import Any

from google.protobuf import message as protobuf_message
import grpc

from engine.config import EngineConfig
from engine.errors import InvalidRequest, Unavailable
from engine.recorder import RING_STEPS, RungTotals
from engine.shapes import ShapeLadder
from server import interceptors, tracing, validation
from server.auth import bind_tenant
from server.constraints import ConstraintCompiler
from server.errors import DeadlineExceeded, EngineDead, SlowConsumer, Starting
from server.generation import Generation, Generations
from server.invariants import Invariants
from server.memory import MemoryLimit
from server.port import EnginePort
from server.proto import sluice_pb2 as pb
from server.tokenizer import Tokenizer
from server.watchdog import Watchdog

GENERATION_SERVICE = "sluice.v1.GenerationService"
MODEL_SERVICE = "sluice.v1.ModelService"
_INLINE_CHARS = 2048
_MAX_IGNORED_CHARS = 1024


@dataclasses.dataclass(frozen=True)
class Backend:
  """What serves, once it is ready.

  Attributes:
    model: the served name.
    engine: asked for reports only; requests reach it through `generations`.
    tokenizer: of the model, or None.
    generations: the live ones.
    load_s, warmup_s: what the start took.
  """

  model: str
  engine: EnginePort
  tokenizer: Tokenizer | None
  generations: Generations
  load_s: float
  warmup_s: float

  @property
  def config(self) -> EngineConfig:
    return self.engine.config


class Service:
  """Both services of sluice.v1. One object a server; its state is who may come in."""

  def __init__(
    self, *, stream_stall_timeout_s: float = 30.0, strict_requests: bool = False, memory: MemoryLimit | None = None
  ):
    """What to be strict about.

    Args:
      stream_stall_timeout_s: the work for a client that takes nothing for this long is stopped.
      strict_requests: a call with unknown fields is refused, instead of served without them and with their names in
        the metadata.
      memory: above it no new work is let in; None is no limit.
    """
    self._memory = memory
    self._strict_requests = strict_requests
    self._backend: Backend | None = None
    self._compiler: ConstraintCompiler | None = None
    self._closed: Unavailable | None = Starting()
    self._stream_stall_timeout_s = stream_stall_timeout_s
    # Two threads: tokenizing a long prompt must not stop the loop, and must not take all cores either.
    self._text_pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="tokenize")
    self._ready_at = 0.0
    # For probes and metrics. Not ready while draining or not alive; not alive when the engine stands or has failed.
    self.ready = False
    self.alive = True
    self.watchdog: Watchdog | None = None
    self.invariants: Invariants | None = None
    self.num_unhandled = 0

  def open(self, backend: Backend) -> None:
    """Begins to serve."""
    self._backend = backend
    if backend.tokenizer is not None:
      config = backend.config
      self._compiler = ConstraintCompiler(backend.tokenizer, config.vocab_size, config.eos_token_ids)
    self._closed = None
    self._ready_at = time.monotonic()

  def close(self, error: Unavailable) -> None:
    """Lets no new work in; `error` is what callers are told. Work inside goes on."""
    self._closed = error

  def count_unhandled(self) -> None:
    """An error was found that no call has taken."""
    self.num_unhandled += 1

  def shutdown(self) -> None:
    """Gives the threads back."""
    self._text_pool.shutdown(wait=False, cancel_futures=True)

  def register(self, server: grpc.aio.Server) -> None:
    """Adds the services to a server that has not started."""
    services = {
      GENERATION_SERVICE: {
        "Generate": _stream(pb.GenerateRequest, self._generate),
        "GenerateUnary": _unary(pb.GenerateRequest, self._generate_unary),
        "Abort": _unary(pb.AbortRequest, self._abort),
        "Tokenize": _unary(pb.TokenizeRequest, self._tokenize),
        "Detokenize": _unary(pb.DetokenizeRequest, self._detokenize),
      },
      MODEL_SERVICE: {
        "GetModelInfo": _unary(pb.GetModelInfoRequest, self._get_model_info),
        "GetLoad": _unary(pb.GetLoadRequest, self._get_load),
      },
    }
    server.add_generic_rpc_handlers(
      tuple(grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items())
    )

  # The RPCs.

  async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
    await self.stream(request, context, lambda message: (message,))

  async def stream(
    self,
    request: pb.GenerateRequest,
    context: grpc.aio.ServicerContext,
    translate: Callable[[pb.GenerateResponse], Iterable[protobuf_message.Message]],
  ) -> None:
    """Generates, and writes what `translate` makes of each message. What a method of another protocol does, too."""
    backend = self.admit()
    generation = await self._start(backend, request, context)
    # In `finally` alone, and never swallowing CancelledError: that is how gRPC says that the client is gone.
    loop = asyncio.get_running_loop()
    try:
      first = True
      async for message in generation.messages():
        if first:
          first = False
          message.started.CopyFrom(
            pb.Started(
              request_id=generation.request_id,
              model=backend.model,
              num_prompt_tokens=generation.outputs[0].num_prompt_tokens,
            )
          )
        # A blocked write is left alone, for a status could not pass it either. What it must not do is hold pages.
        stalled = loop.call_later(
          self._stream_stall_timeout_s,
          backend.generations.fail,
          generation,
          SlowConsumer(
            f"the client took nothing for {self._stream_stall_timeout_s:g} s; read the stream faster, or use "
            "GenerateUnary"
          ),
        )
        try:
          for answer in translate(message):
            await context.write(answer)
        finally:
          stalled.cancel()
        if message.finished:
          _note_ended(message.finished)
    finally:
      backend.generations.close(generation)

  async def _generate_unary(
    self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
  ) -> pb.GenerateUnaryResponse:
    backend = self.admit()
    generation = await self._start(backend, request, context)
    try:
      await generation.wait_ended()
    finally:
      backend.generations.close(generation)
    response = pb.GenerateUnaryResponse(
      request_id=generation.request_id,
      model=backend.model,
      num_prompt_tokens=generation.outputs[0].num_prompt_tokens,
      prompt_logprobs=generation.outputs[0].delta.prompt_logprobs,
    )
    for output in generation.outputs:
      delta = output.delta
      response.completions.add(
        text=delta.text, token_ids=delta.token_ids, logprobs=delta.logprobs, finished=output.finished
      )
    response.completions[-1].finished.last = True
    _note_ended([completion.finished for completion in response.completions])
    return response

  async def _abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
    self._judge_unknown(request, context)
    return pb.AbortResponse(
      outcomes=[
        pb.AbortResponse.OUTCOME_ABORTED if aborted else pb.AbortResponse.OUTCOME_NOT_FOUND
        for aborted in await self.abort(request.request_ids)
      ]
    )

  async def abort(self, request_ids: Sequence[str]) -> list[bool]:
    """Ends live generations of the caller; returns, for each id, whether it was one.

    Raises:
      InvalidRequest: the list is bad.
    """
    backend = self.opened()
    if not 1 <= len(request_ids) <= validation.MAX_ABORTS:
      raise InvalidRequest(
        f"request_ids has {len(request_ids)} entries, allowed are 1 to {validation.MAX_ABORTS}: send them in several "
        "calls"
      )
    for request_id in request_ids:
      validation.check_request_id(request_id)
    owner = interceptors.current().tenant or ""
    aborted = [backend.generations.abort(request_id, owner) for request_id in request_ids]
    if all(aborted):
      return aborted
    others = [request_id for request_id, done in zip(request_ids, aborted, strict=True) if not done]
    elsewhere = iter(await backend.engine.abort_elsewhere(owner, others))
    return [done or next(elsewhere) for done in aborted]

  async def _tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
    backend = self.opened()
    self._judge_unknown(request, context)
    validation.check_model(request.model, backend.model)
    return pb.TokenizeResponse(token_ids=await self.prompt_token_ids(request, backend.tokenizer))

  async def _detokenize(
    self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
  ) -> pb.DetokenizeResponse:
    backend = self.opened()
    self._judge_unknown(request, context)
    validation.check_model(request.model, backend.model)
    tokenizer = validation.need_tokenizer(backend.tokenizer, "Detokenize")
    validation.check_token_ids("token_ids", request.token_ids, backend.config.vocab_size)
    skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
    text = await self.in_pool(lambda: tokenizer.decode(list(request.token_ids), skip_special_tokens=skip))
    return pb.DetokenizeResponse(text=text)

  async def _get_model_info(
    self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
  ) -> pb.GetModelInfoResponse:
    backend = self.opened()
    config, tokenizer = backend.config, backend.tokenizer
    return pb.GetModelInfoResponse(
      model=backend.model,
      vocab_size=config.vocab_size,
      max_model_len=config.max_model_len,
      eos_token_ids=config.eos_token_ids,
      has_tokenizer=tokenizer is not None,
      has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
      token_budgets=config.token_budgets,
      max_num_seqs=config.max_num_seqs,
      block_size=config.block_size,
      num_blocks=config.num_blocks,
      server_version=server_version(),
      batching=config.batching,
    )

  async def _get_load(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
    backend = self.opened()
    wants_steps = request.HasField("steps_after_s")
    report = await backend.engine.report(RING_STEPS if wants_steps else 0)
    stats = report.stats
    nothing = RungTotals()
    return pb.GetLoadResponse(
      uptime_s=self.uptime_s,
      load_s=backend.load_s,
      warmup_s=backend.warmup_s,
      peak_rss_bytes=report.peak_rss_bytes,
      compiles_after_ready=report.compiles_after_ready,
      # Requests on their way to the scheduler wait, too.
      running_requests=stats.num_running,
      queued_requests=max(0, stats.num_live - stats.num_running),
      queued_tokens=stats.num_waiting_tokens,
      max_num_seqs=stats.max_num_seqs,
      kv_blocks_total=stats.num_blocks,
      kv_blocks_in_use=stats.blocks_used,
      kv_blocks_cached=stats.blocks_cached,
      steps_total=stats.num_steps,
      decode_tokens_total=stats.num_decode_tokens,
      prefill_tokens_total=stats.num_prefill_tokens,
      padding_tokens_total=stats.num_padding_tokens,
      output_tokens_total=stats.num_output_tokens,
      preemptions_total=stats.num_preemptions,
      prefix_hit_tokens_total=stats.num_cached_tokens,
      requests_finished_total=sum(stats.finished.values()),
      rungs=[
        pb.RungLoad(
          tokens=rung.tokens,
          rows=rung.rows,
          steps_total=totals.steps,
          decode_tokens_total=totals.decode_tokens,
          prefill_tokens_total=totals.prefill_tokens,
          padding_tokens_total=totals.padding,
          idle_slots_total=totals.idle_slots,
          host_s_total=totals.host_s,
          device_s_total=totals.device_s,
        )
        for rung in ShapeLadder(backend.config.token_budgets, backend.config.max_num_seqs).rungs()
        for totals in (stats.rungs.get(rung.tokens, nothing),)
      ],
      idle_slots_total=stats.num_idle_slots,
      lost_tokens_total=stats.num_lost_tokens,
      now_s=report.now_s,
      steps=[pb.StepLoad(**step._asdict()) for step in stats.steps if step.time > request.steps_after_s],
      requests=[
        pb.RequestLoad(**ended._replace(id=_digest(ended.id))._asdict())
        for ended in stats.requests
        if ended.end > request.steps_after_s
      ],
    )

  @property
  def uptime_s(self) -> float:
    """Seconds since ready."""
    return time.monotonic() - self._ready_at

  # Their common parts; those without an underscore are also what the HTTP side goes through.

  @property
  def backend(self) -> Backend | None:
    """What serves, or nothing: before it does, and when it is dead."""
    return None if isinstance(self._closed, EngineDead) else self._backend

  def opened(self) -> Backend:
    """The backend, also while draining; raises what keeps the server shut."""
    if self._backend is None or isinstance(self._closed, EngineDead):
      raise self._closed or Starting()
    return self._backend

  def admit(self) -> Backend:
    """The backend, for new work."""
    if self._closed is not None:
      raise self._closed
    if self._memory is not None:
      self._memory.check()
    return self.opened()

  def _judge_unknown(self, request: protobuf_message.Message, context: grpc.aio.ServicerContext) -> None:
    """Refuses fields that this server's proto has not, or names them in the answer's trailing metadata."""
    unknown = validation.unknown_fields(request)
    if self._strict_requests:
      validation.refuse_unknown_fields(unknown)
    elif unknown:
      ignored = ",".join(unknown)[:_MAX_IGNORED_CHARS]
      context.set_trailing_metadata((*context.trailing_metadata(), ("x-sluice-ignored-fields", ignored)))

  async def _start(
    self, backend: Backend, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
  ) -> Generation:
    """Checks and submits. Nothing awaits after the submission, so the caller's `finally` cannot be missed."""
    self._judge_unknown(request, context)
    validation.check_model(request.model, backend.model)
    prompt = await self.prompt_token_ids(request, backend.tokenizer)
    caller = interceptors.current()
    if request.WhichOneof("prompt") == "chat":
      tracing.is_chat()
    request.tenant = bind_tenant(request.tenant, caller.tenant)
    call = validation.generate_call(request, backend.config, backend.tokenizer, prompt)
    (call,) = await self.constrained(request, [call])
    remaining = context.time_remaining()
    if remaining is not None and remaining <= 0:
      raise DeadlineExceeded("the deadline had passed before the request was queued; allow more time")
    self.admit()  # a drain may have begun while the prompt was tokenized
    generation = await backend.generations.start(call, remaining, caller.tenant or "")
    caller.notes.update(generation_id=generation.request_id, prompt_tokens=len(prompt))
    return generation

  async def prompt_token_ids(
    self, request: pb.GenerateRequest | pb.TokenizeRequest, tokenizer: Tokenizer | None
  ) -> list[int]:
    """Of a prompt of any kind; away from the loop where it takes long. Raises as `validation.prompt_token_ids`."""
    if request.WhichOneof("prompt") == "chat" or len(request.text) > _INLINE_CHARS:
      return await self.in_pool(lambda: validation.prompt_token_ids(request, tokenizer))
    return validation.prompt_token_ids(request, tokenizer)

  async def constrained(self, request: pb.GenerateRequest, calls: Sequence[validation.Call]) -> list[validation.Call]:
    """The calls, with constraints for their outputs if `request` asks for one; compiled away from the loop.

    Raises:
      InvalidRequest: the constraint cannot be followed.
    """
    compiler = self._compiler
    if not request.HasField("constraint") or compiler is None:
      return list(calls)

    def compile_all() -> list[validation.Call]:
      grammar = compiler.compile(request.constraint, request.tenant)
      return [dataclasses.replace(call, constraints=tuple(grammar.copy() for _ in call.params)) for call in calls]

    return await self.in_pool(compile_all)

  async def in_pool(self, work: Callable[[], Any]) -> Any:
    """Runs `work`, which takes long for a long text, away from the loop."""
    return await asyncio.get_running_loop().run_in_executor(self._text_pool, work)


def _note_ended(endings: Iterable[pb.Finished]) -> None:
  """For the access log: the tokens of outputs that came to their end."""
  notes = interceptors.current().notes
  notes["output_tokens"] = notes.get("output_tokens", 0) + sum(ended.usage.completion_tokens for ended in endings)


def _unary(
  kind: type[protobuf_message.Message], method: Callable[[Any, Any], Awaitable[protobuf_message.Message]]
) -> grpc.RpcMethodHandler:
  return grpc.unary_unary_rpc_method_handler(method, kind.FromString, _serialize)


def _stream(
  kind: type[protobuf_message.Message], method: Callable[[Any, Any], Awaitable[None]]
) -> grpc.RpcMethodHandler:
  """Of a method that writes by itself."""
  return grpc.unary_stream_rpc_method_handler(method, kind.FromString, _serialize)


def _serialize(message: protobuf_message.Message) -> bytes:
  return message.SerializeToString()


def _digest(request_id: str) -> str:
  """Tells requests apart without saying what their clients called them."""
  return hashlib.sha256(request_id.encode()).hexdigest()[:16]


def server_version() -> str:
  """Of the installed package."""
  try:
    return metadata.version("sluice-serve")
  except metadata.PackageNotFoundError:
    return "not installed"
