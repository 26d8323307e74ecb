"""Serves vllm.grpc.engine.VllmEngine on top of sluice.v1, for routers made for vLLM. Translates, and decides nothing.

A generation becomes one of sluice.v1, with the same checks, deadlines, errors and limits. The service refuses a field
that Sluice does not support, by the field's name or number.
"""

import asyncio
from collections.abc import Sequence
import datetime

import grpc

from engine.errors import InvalidRequest
from extensions.vllm_api.proto import smg_common_pb2 as smg_pb
from extensions.vllm_api.proto import vllm_engine_pb2 as vllm_pb
from extensions.vllm_api.proto import vllm_engine_pb2_grpc
from extensions.vllm_api.tokenizer_zip import TokenizerZip, make_zip
from server.errors import UnknownMethod
from server.generation import request_validation
from server.generation.serving_state import ServingState
from server.proto import sluice_pb2 as pb
from server.rpc.sluice_service import SluiceService
from server.telemetry.process_counts import Census
from server.text.tokenizer import Tokenizer
from server.version import server_version

VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"
_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
# 0 means unset in these fields, since the published message gives them no presence.
_ZERO_IS_UNSET = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n")
_NO_PROFILE = "there is no profiler; SetTrace of sluice.admin.v1 (--admin_port) records the steps"
# Methods of the published service that Sluice does not serve, and the alternative to each.
_NOT_SERVED = {
  "Embed": "Embed of sluice.v1 and /v1/embeddings serve embeddings, with --enable_embeddings",
  "FlushCache": "the prefix cache evicts blocks by itself; cache_salt of sluice.v1 keeps requests from sharing them",
  "StartProfile": _NO_PROFILE,
  "StopProfile": _NO_PROFILE,
  "SubscribeKvEvents": "the server sends no KV block events; route by earlier requests and by GetLoads",
}


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
  """The service; one object a server."""

  def __init__(self, state: ServingState, service: SluiceService, census: Census):
    """Args: state: admits requests. service: runs them. census: counts of all the server's processes."""
    self._state = state
    self._service = service
    self._census = census
    self._zipping = asyncio.Lock()
    self._zip: TokenizerZip | None = None

  def register(self, server: grpc.aio.Server) -> None:
    """Adds the service to a server that has not started."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)
    others = {name: _not_served(name, instead) for name, instead in _NOT_SERVED.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(VLLM_SERVICE, others),))

  async def Generate(self, request: vllm_pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
    with self._state.admit() as backend:
      request_validation.refuse_unknown_fields(request_validation.unknown_fields(request))
      if request.data_parallel_rank:
        raise InvalidRequest(f"={request.data_parallel_rank} does not exist; leave it out", field="data_parallel_rank")
      kind = request.WhichOneof("input")
      if kind is None:
        raise InvalidRequest("is missing: send tokenized or text", field="input")
      asked = pb.GenerateRequest(request_id=request.request_id)
      if kind == "text":
        asked.text = request.text
        # Tokenized first, since max_tokens depends on the number of token ids.
        prompt: Sequence[int] = await self._state.tokenize_prompt(asked, backend.tokenizer)
      else:
        prompt = request.tokenized.input_ids
      if any(token_id >= 2**31 for token_id in prompt):
        raise InvalidRequest(
          f"has a token id of 2147483648 or more; token ids of this model are 0 to {backend.config.vocab_size - 1}",
          field="prompt",
        )
      asked.token_ids.SetInParent()
      asked.token_ids.ids.extend(prompt)
      num_left = backend.config.max_model_len - len(prompt)
      max_tokens = request_validation.default_max_tokens(backend.defaults, num_left, num_left)
      _translate(request.sampling_params, asked, max_tokens)
      translator = _Translator(request, prompt)
      generation = await self._service.start_generation(backend, asked, context)
    await self._service.stream_generation(backend, generation, context, translator.translate)

  async def HealthCheck(
    self, request: vllm_pb.HealthCheckRequest, context: grpc.aio.ServicerContext
  ) -> vllm_pb.HealthCheckResponse:
    ready = self._state.ready
    return vllm_pb.HealthCheckResponse(healthy=ready, message="ready" if ready else "starting, draining or dead")

  async def Abort(self, request: vllm_pb.AbortRequest, context: grpc.aio.ServicerContext) -> vllm_pb.AbortResponse:
    await self._service.abort_generations(request.request_ids)
    return vllm_pb.AbortResponse()

  async def GetModelInfo(
    self, request: vllm_pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
  ) -> vllm_pb.GetModelInfoResponse:
    backend = self._state.require_backend()
    config = backend.config
    return vllm_pb.GetModelInfoResponse(
      model_path=backend.model,
      is_generation=True,
      max_context_length=config.max_model_len,
      vocab_size=config.vocab_size,
      served_model_name=backend.model,
      eos_token_ids=config.eos_token_ids,
      max_req_input_len=config.max_model_len,
    )

  async def GetServerInfo(
    self, request: vllm_pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
  ) -> vllm_pb.GetServerInfoResponse:
    backend = self._state.require_backend()
    return vllm_pb.GetServerInfoResponse(
      active_requests=(await self._census()).num_live,
      uptime_seconds=self._state.uptime_s,
      server_type="vllm-grpc",  # the protocol's name, by which routers recognize it
      data_parallel_size=1,
      block_size=backend.config.block_size,
      max_num_seqs=backend.config.max_num_seqs,
    )

  async def GetLoads(
    self, request: vllm_pb.GetLoadsRequest, context: grpc.aio.ServicerContext
  ) -> vllm_pb.GetLoadsResponse:
    backend = self._state.require_backend()
    stats = (await backend.engine.report()).stats
    block_size = backend.config.block_size
    waiting = max(0, stats.num_live - stats.num_running)
    load = vllm_pb.SchedulerLoad(
      num_running_reqs=stats.num_running,
      num_waiting_reqs=waiting,
      num_total_reqs=stats.num_running + waiting,
      num_used_tokens=stats.blocks_used * block_size,
      max_total_num_tokens=stats.num_blocks * block_size,
      token_usage=stats.blocks_used / max(1, stats.num_blocks),
      max_running_requests=stats.max_num_seqs,
      num_waiting_uncached_tokens=stats.num_waiting_tokens,
    )
    return vllm_pb.GetLoadsResponse(
      timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
      version=server_version(),
      dp_rank_count=1,
      loads=[load],
    )

  async def GetTokenizer(self, request: smg_pb.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
    tokenizer = request_validation.need_tokenizer(self._state.require_backend().tokenizer, "GetTokenizer")
    for data, sha256 in (await self._zipped(tokenizer)).chunks():
      await context.write(smg_pb.GetTokenizerChunk(data=data, sha256=sha256))

  async def _zipped(self, tokenizer: Tokenizer) -> TokenizerZip:
    """Returns the zip; the first caller makes it, and later callers wait."""
    async with self._zipping:
      made = self._zip
      if made is None:
        made = self._zip = await self._state.run_in_text_pool(lambda: make_zip(tokenizer.folder, tokenizer.digest))
      return made


def _not_served(name: str, instead: str) -> grpc.RpcMethodHandler:
  """Refuses any bytes: Sluice does not define the messages of these methods."""

  async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
    raise UnknownMethod(f"{name} is not served here: {instead}")

  return grpc.unary_stream_rpc_method_handler(refuse, None, bytes)


class _Translator:
  """Translates the response to one request: chunks and a completion for each index, or the completion alone."""

  def __init__(self, request: vllm_pb.GenerateRequest, prompt: Sequence[int]):
    self._stream = request.stream
    self._prompt = prompt
    self._stop_token_ids = set(request.sampling_params.stop_token_ids)
    self._with_top = request.sampling_params.logprobs > 0
    self._with_prompt_top = request.sampling_params.prompt_logprobs > 0
    self._prompt_logprobs: list[pb.TokenLogprobs] = []
    self._pending: dict[int, pb.Delta] = {}

  def translate(self, message: pb.GenerateResponse) -> list[vllm_pb.GenerateResponse]:
    """Returns the messages to send for this message, in order."""
    answers = []
    finished = {ending.index: ending for ending in message.finished}
    for delta in message.deltas:
      self._prompt_logprobs.extend(delta.prompt_logprobs)
      pending = self._pending.setdefault(delta.index, pb.Delta())
      pending.token_ids.extend(delta.token_ids)
      pending.logprobs.extend(delta.logprobs)
      if self._stream and delta.index not in finished and pending.token_ids:
        answers.append(self._chunk(delta.index, self._pending.pop(delta.index), 0))
    for index, ending in finished.items():
      delta = self._pending.pop(index, None) or pb.Delta()
      if ending.HasField("stop_token_id"):
        delta.token_ids.append(ending.stop_token_id)  # that protocol counts it as output
      if self._stream:
        answers.append(self._chunk(index, delta, ending.usage.cached_tokens))
      answers.append(self._complete(ending, delta))
    return answers

  def _chunk(self, index: int, delta: pb.Delta, cached_tokens: int) -> vllm_pb.GenerateResponse:
    return vllm_pb.GenerateResponse(
      chunk=vllm_pb.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=len(self._prompt),
        completion_tokens=len(delta.token_ids),
        cached_tokens=cached_tokens,
        output_logprobs=self._output_logprobs(delta),
        input_logprobs=self._input_logprobs(index),
        index=index,
      )
    )

  def _complete(self, ending: pb.Finished, delta: pb.Delta) -> vllm_pb.GenerateResponse:
    complete = vllm_pb.GenerateComplete(
      output_ids=delta.token_ids,
      finish_reason=_FINISH_REASONS[ending.reason],
      prompt_tokens=len(self._prompt),
      completion_tokens=len(delta.token_ids),
      cached_tokens=ending.usage.cached_tokens,
      output_logprobs=self._output_logprobs(delta),
      input_logprobs=self._input_logprobs(ending.index),
      index=ending.index,
    )
    if ending.HasField("stop_string"):
      complete.matched_stop_str = ending.stop_string
    elif ending.stop_token_id in self._stop_token_ids:  # and not at end-of-sequence
      complete.matched_token_id = ending.stop_token_id
    return vllm_pb.GenerateResponse(complete=complete)

  def _output_logprobs(self, delta: pb.Delta) -> vllm_pb.OutputLogProbs | None:
    if not delta.logprobs:
      return None
    return vllm_pb.OutputLogProbs(
      token_logprobs=[each.logprob for each in delta.logprobs],
      token_ids=[each.token_id for each in delta.logprobs],
      top_logprobs=[_top(each) for each in delta.logprobs] if self._with_top else (),
    )

  def _input_logprobs(self, index: int) -> vllm_pb.InputLogProbs | None:
    """Returns the prompt's log probabilities, once, with index 0."""
    if index or not self._prompt_logprobs:
      return None
    entries, self._prompt_logprobs = self._prompt_logprobs, []
    nothing = vllm_pb.InputTokenLogProb()
    return vllm_pb.InputLogProbs(
      token_logprobs=[nothing, *(vllm_pb.InputTokenLogProb(value=each.logprob) for each in entries)],
      token_ids=self._prompt,
      top_logprobs=[vllm_pb.TopLogProbs(), *map(_top, entries)] if self._with_prompt_top else (),
    )


def _top(entry: pb.TokenLogprobs) -> vllm_pb.TopLogProbs:
  return vllm_pb.TopLogProbs(
    values=[each.logprob for each in entry.top], token_ids=[each.token_id for each in entry.top]
  )


def _translate(params: vllm_pb.SamplingParams, asked: pb.GenerateRequest, default_max_tokens: int) -> None:
  """Translates all fields but the prompt."""
  for name in ("top_k", "n", "min_tokens", "max_tokens", "stop_token_ids"):
    values = getattr(params, name)
    for value in (values,) if isinstance(values, int) else values:
      if value >= 2**31:
        raise InvalidRequest(f"={value} is not allowed: send less than 2147483648", field=name)
  sampling, stopping, output = asked.sampling, asked.stopping, asked.output
  if params.HasField("temperature"):
    sampling.temperature = params.temperature
  for name in _ZERO_IS_UNSET:
    if getattr(params, name):
      setattr(sampling, name, getattr(params, name))
  if params.HasField("seed"):
    sampling.seed = params.seed
  sampling.logit_bias.update(params.logit_bias)
  stopping.max_tokens = params.max_tokens if params.HasField("max_tokens") else default_max_tokens
  stopping.min_tokens = params.min_tokens
  stopping.ignore_eos = params.ignore_eos
  stopping.stop.extend(params.stop)
  stopping.stop_token_ids.extend(params.stop_token_ids)
  output.return_text = False
  kind = params.WhichOneof("constraint")
  if kind == "choice":
    asked.constraint.choice.SetInParent()
    asked.constraint.choice.values.extend(params.choice.choices)
  elif kind is not None:
    setattr(asked.constraint, kind, getattr(params, kind))
  for name in ("logprobs", "prompt_logprobs"):
    if params.HasField(name):
      setattr(output, name, getattr(params, name))
