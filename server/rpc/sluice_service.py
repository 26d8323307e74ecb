"""Serves sluice.v1 over gRPC: a message in, messages out, errors raised. Reaches the engine only by `ServingState`.

The interceptor checks keys, makes request ids and turns errors into statuses. No server may run these services without
it.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
import hashlib

from google.protobuf import message as protobuf_message
import grpc

from engine.errors import InvalidRequest
from engine.recorder import RING_STEPS, RungTotals
from server.errors import DeadlineExceeded, SlowConsumer
from server.generation import prompt_classification, prompt_embedding, request_validation
from server.generation.generations import Generation
from server.generation.serving_state import Backend, ServingState
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from server.rpc import call_interceptor
from server.security.api_keys import bind_tenant
from server.telemetry import tracing
from server.version import server_version

GENERATION_SERVICE = "sluice.v1.GenerationService"
MODEL_SERVICE = "sluice.v1.ModelService"
_MAX_IGNORED_CHARS = 1024


class SluiceService(pb_grpc.GenerationServiceServicer, pb_grpc.ModelServiceServicer):
  """Implements GenerationService and ModelService of sluice.v1; a server has one."""

  def __init__(self, state: ServingState, *, stream_stall_timeout_s: float = 30.0, strict_requests: bool = False):
    """Sets the state that serves and the service's limits.

    Args:
      state: admits requests and holds the backend.
      stream_stall_timeout_s: the service aborts a stream whose client reads nothing for this long.
      strict_requests: refuse calls with unknown fields. Otherwise the service ignores the fields and names them in the
        trailing metadata.
    """
    self._state = state
    self._stream_stall_timeout_s = stream_stall_timeout_s
    self._strict_requests = strict_requests

  def register(self, server: grpc.aio.Server) -> None:
    """Adds the services to a server that has not started."""
    pb_grpc.add_GenerationServiceServicer_to_server(self, server)
    pb_grpc.add_ModelServiceServicer_to_server(self, server)

  # The RPCs. Those of a stream write by themselves.

  async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
    with self._state.admit() as backend:
      generation = await self.start_generation(backend, request, context)
    await self.stream_generation(backend, generation, context, lambda message: (message,))

  async def stream_generation(
    self,
    backend: Backend,
    generation: Generation,
    context: grpc.aio.ServicerContext,
    translate: Callable[[pb.GenerateResponse], Iterable[protobuf_message.Message]],
  ) -> None:
    """Writes `translate` of each message to the call, then closes the generation. Other protocols use it."""
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
              model=generation.adapter or backend.model,
              num_prompt_tokens=generation.outputs[0].num_prompt_tokens,
            )
          )
        # A blocked write is left alone, for a status could not pass it either. What it must not do is hold pages.
        stalled = loop.call_later(
          self._stream_stall_timeout_s,
          backend.generations.fail_generation,
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
      backend.generations.close_generation(generation)

  async def GenerateUnary(
    self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
  ) -> pb.GenerateUnaryResponse:
    with self._state.admit() as backend:
      generation = await self.start_generation(backend, request, context)
    try:
      await generation.wait_ended()
    finally:
      backend.generations.close_generation(generation)
    response = pb.GenerateUnaryResponse(
      request_id=generation.request_id,
      model=generation.adapter or backend.model,
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

  async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
    self._judge_unknown(request, context)
    return pb.AbortResponse(
      outcomes=[
        pb.AbortResponse.OUTCOME_ABORTED if aborted else pb.AbortResponse.OUTCOME_NOT_FOUND
        for aborted in await self.abort_generations(request.request_ids)
      ]
    )

  async def abort_generations(self, request_ids: Sequence[str]) -> list[bool]:
    """Aborts the caller's live generations; returns for each id whether it named one.

    Raises:
      InvalidRequest: the list is empty, too long, or has a bad id.
    """
    backend = self._state.require_backend()
    if not 1 <= len(request_ids) <= request_validation.MAX_ABORTS:
      raise InvalidRequest(
        f"has {len(request_ids)} entries, allowed are 1 to {request_validation.MAX_ABORTS}: send them in several calls",
        field="request_ids",
      )
    for request_id in request_ids:
      request_validation.check_request_id(request_id)
    owner = call_interceptor.current_call().tenant or ""
    aborted = [backend.generations.abort_generation(request_id, owner) for request_id in request_ids]
    if all(aborted):
      return aborted
    others = [request_id for request_id, done in zip(request_ids, aborted, strict=True) if not done]
    elsewhere = iter(await backend.engine.abort_elsewhere(owner, others))
    return [done or next(elsewhere) for done in aborted]

  async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
    backend = self._state.require_backend()
    self._judge_unknown(request, context)
    backend.find_adapter(request.model)
    return pb.TokenizeResponse(token_ids=await self._state.tokenize_prompt(request, backend.tokenizer))

  async def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
    backend = self._state.require_backend()
    self._judge_unknown(request, context)
    backend.find_adapter(request.model)
    tokenizer = request_validation.need_tokenizer(backend.tokenizer, "Detokenize")
    request_validation.check_token_ids("token_ids", request.token_ids, backend.config.vocab_size)
    skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
    text = await self._state.run_in_text_pool(
      lambda: tokenizer.decode(list(request.token_ids), skip_special_tokens=skip)
    )
    return pb.DetokenizeResponse(text=text)

  async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
    with self._state.admit() as backend:
      self._judge_unknown(request, context)
      adapter = prompt_embedding.find_embedding_adapter(request.model, backend)
      dimensions = request.dimensions if request.HasField("dimensions") else None
      prompt_embedding.check_dimensions(dimensions, backend.config)
      prompts, vectors = await self._embed(backend, request, adapter, context)
    normalize = request.normalize or not request.HasField("normalize")

    def make_response() -> pb.EmbedResponse:
      response = pb.EmbedResponse(model=adapter or backend.model)
      for prompt, vector in zip(prompts, vectors, strict=True):
        values = prompt_embedding.shorten_vector(vector, dimensions, normalize)
        response.embeddings.add(values=values, num_tokens=len(prompt))
      return response

    return await self._state.run_in_text_pool(make_response)

  async def Classify(self, request: pb.ClassifyRequest, context: grpc.aio.ServicerContext) -> pb.ClassifyResponse:
    with self._state.admit() as backend:
      self._judge_unknown(request, context)
      adapter = prompt_classification.find_classifier_adapter(request.model, backend)
      prompts, vectors = await self._embed(backend, request, adapter, context)
    config = backend.config
    activates = request.use_activation or not request.HasField("use_activation")
    activation = config.class_activation if activates else "none"

    def make_response() -> pb.ClassifyResponse:
      response = pb.ClassifyResponse(model=adapter or backend.model, labels=config.labels)
      for prompt, vector in zip(prompts, vectors, strict=True):
        numbers = prompt_classification.make_probabilities(vector, activation)
        label = config.labels[max(range(len(numbers)), key=numbers.__getitem__)]
        response.classifications.add(label=label, probabilities=numbers, num_tokens=len(prompt))
      return response

    return await self._state.run_in_text_pool(make_response)

  async def _embed(
    self,
    backend: Backend,
    request: pb.EmbedRequest | pb.ClassifyRequest,
    adapter: str,
    context: grpc.aio.ServicerContext,
  ) -> tuple[list[tuple[int, ...]], list[prompt_embedding.Vector]]:
    """Returns the token ids of each input, and its raw embedding or a head's numbers for it."""
    if not request.inputs:
      raise InvalidRequest("is an empty list: send at least one text or list of token ids", field="inputs")
    prompt_embedding.check_num_inputs(len(request.inputs), "inputs")
    inputs = [_read_input(each) for each in request.inputs]
    add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else None
    prompts: list[tuple[int, ...]] = await self._state.run_in_text_pool(
      lambda: prompt_embedding.tokenize_inputs(backend.tokenizer, backend.config, inputs, add_special_tokens, "inputs")
    )
    caller = call_interceptor.current_call()
    tenant = bind_tenant(request.tenant, caller.tenant)
    request_validation.check_tenant(tenant)
    caller.notes.update(prompt_tokens=sum(map(len, prompts)), adapter=adapter or None)
    vectors = await prompt_embedding.embed_prompts(
      backend,
      prompts,
      priority=request.priority,
      tenant=tenant,
      owner=caller.tenant or "",
      adapter=adapter,
      time_remaining_s=lambda: _time_remaining(context),
    )
    return prompts, vectors

  async def GetModelInfo(
    self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
  ) -> pb.GetModelInfoResponse:
    backend = self._state.require_backend()
    config, tokenizer = backend.config, backend.tokenizer
    sampling = pb.SamplingParams(**{name: value for name, value in backend.defaults.items() if name != "max_tokens"})
    return pb.GetModelInfoResponse(
      default_sampling=sampling,
      default_stopping=pb.StopParams(max_tokens=backend.defaults.get("max_tokens")),
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
      adapters=[adapter.name for adapter in backend.engine.adapters()],
      headless_architecture=config.headless,
      labels=config.labels,
    )

  async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
    backend = self._state.require_backend()
    wants_steps = request.HasField("steps_after_s")
    report = await backend.engine.report(RING_STEPS if wants_steps else 0)
    stats = report.stats
    nothing = RungTotals()
    return pb.GetLoadResponse(
      uptime_s=self._state.uptime_s,
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
      skipped_tokens_total=stats.num_skipped_tokens,
      output_tokens_total=stats.num_output_tokens,
      preemptions_total=stats.num_preemptions,
      draft_rows_total=stats.drafts.rows,
      draft_tokens_total=stats.drafts.tokens,
      accepted_draft_tokens_total=stats.drafts.accepted,
      forced_tokens_total=stats.drafts.forced,
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
          skipped_tokens_total=totals.skipped(rung.tokens),
          idle_slots_total=totals.idle_slots,
          host_s_total=totals.host_s,
          device_s_total=totals.device_s,
        )
        for rung in backend.config.ladder.rungs()
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

  # Their common parts; those without an underscore are also what other protocols' methods go through.

  def _judge_unknown(self, request: protobuf_message.Message, context: grpc.aio.ServicerContext) -> None:
    """Refuses unknown fields, or names them in the trailing metadata of the response.

    The service always refuses unknown fields that would change the output.
    """
    unknown = request_validation.unknown_fields(request)
    request_validation.refuse_unknown_choices(unknown)
    if self._strict_requests:
      request_validation.refuse_unknown_fields(unknown)
    elif unknown:
      ignored = ",".join(unknown)[:_MAX_IGNORED_CHARS]
      context.set_trailing_metadata((*context.trailing_metadata(), ("x-sluice-ignored-fields", ignored)))

  async def start_generation(
    self, backend: Backend, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
  ) -> Generation:
    """Checks and submits an admitted request; the caller closes the generation.

    Nothing awaits after the submission, so the caller's `finally` always runs.
    """
    self._judge_unknown(request, context)
    adapter = backend.find_generator(request.model)
    prompt = await self._state.tokenize_prompt(request, backend.tokenizer)
    caller = call_interceptor.current_call()
    if request.WhichOneof("prompt") == "chat":
      tracing.mark_chat()
    request.tenant = bind_tenant(request.tenant, caller.tenant)
    call = request_validation.make_generation_call(
      request, backend.config, backend.tokenizer, prompt, backend.defaults, adapter
    )
    (call,) = await self._state.add_constraints(request, [call])
    remaining = _time_remaining(context)
    generation = await backend.generations.start_generation(call, remaining, caller.tenant or "")
    caller.notes.update(
      generation_id=generation.request_id, prompt_tokens=len(prompt), adapter=generation.adapter or None
    )
    return generation


def _time_remaining(context: grpc.aio.ServicerContext) -> float | None:
  """Returns the seconds until the client's deadline, or None. Raises DeadlineExceeded."""
  remaining = context.time_remaining()
  if remaining is not None and remaining <= 0:
    raise DeadlineExceeded("the deadline had passed before the request was queued; allow more time")
  return remaining


def _read_input(given: pb.EmbedInput | pb.ClassifyInput) -> prompt_embedding.EmbeddingInput:
  """Returns a text, a pair of texts or token ids. Raises InvalidRequest."""
  match given.WhichOneof("input"):
    case "text":
      return given.text
    case "token_ids":
      return list(given.token_ids.ids)
    case "pair" if isinstance(given, pb.ClassifyInput):
      return given.pair.first, given.pair.second
  raise InvalidRequest("has an entry with neither text nor token_ids: send one of them", field="inputs")


def _note_ended(endings: Iterable[pb.Finished]) -> None:
  """Adds the tokens of finished outputs to the call's access log line."""
  notes = call_interceptor.current_call().notes
  notes["output_tokens"] = notes.get("output_tokens", 0) + sum(ended.usage.completion_tokens for ended in endings)


def _digest(request_id: str) -> str:
  """Returns a digest that distinguishes requests without showing their clients' ids."""
  return hashlib.sha256(request_id.encode()).hexdigest()[:16]
