"""OpenTelemetry spans, one a generation, where they were asked for. Never a prompt, an output or a client's own words.

The names are those of the GenAI semantic conventions, which may still change: they stand in one table here. The SDK is
an extra of the package, so that nothing of it is imported before there is an endpoint to send to. A span is made when
its generation ends, from numbers that were kept anyway, and a thread of the SDK sends it.
"""

from collections.abc import Mapping, Sequence
import contextvars
import dataclasses
import importlib.util
import os
import threading
import time
from typing import Any, Protocol
import urllib.parse

from engine.errors import ConfigError, EngineError
from engine.sampling_params import SamplingParams
from server.proto import sluice_pb2 as pb

CHAT = "chat"
TEXT_COMPLETION = "text_completion"
_PROVIDER = "sluice"
_FLUSH_S = 5.0
# A header of a client's: longer ones than W3C allows are not worth parsing.
_MAX_STATE_CHARS = 512
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}

# Semantic conventions, version 1.41 (status: development).
_OPERATION = "gen_ai.operation.name"
_PROVIDER_NAME = "gen_ai.provider.name"
_REQUEST_MODEL = "gen_ai.request.model"
_RESPONSE_MODEL = "gen_ai.response.model"
_RESPONSE_ID = "gen_ai.response.id"
_CHOICE_COUNT = "gen_ai.request.choice.count"
_MAX_TOKENS = "gen_ai.request.max_tokens"
_TEMPERATURE = "gen_ai.request.temperature"
_TOP_P = "gen_ai.request.top_p"
_TOP_K = "gen_ai.request.top_k"
_SEED = "gen_ai.request.seed"
_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
_FINISH_REASONS = "gen_ai.response.finish_reasons"
_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
_INPUT_TOKENS = "gen_ai.usage.input_tokens"
_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
_ERROR_TYPE = "error.type"
_FIRST_TOKEN = "first_token"


@dataclasses.dataclass(frozen=True)
class _Caller:
  traceparent: str
  tracestate: str
  operation: str


_UNKNOWN = _Caller("", "", TEXT_COMPLETION)
_caller: contextvars.ContextVar[_Caller] = contextvars.ContextVar("trace_caller")


def keep_trace_parent(headers: Mapping[str, Any], operation: str = TEXT_COMPLETION) -> None:
  """Keeps what the call that is being handled says of its trace (W3C Trace Context).

  Args:
    headers: or gRPC's metadata, in lower case.
    operation: what it asks for, as far as is known.
  """
  traceparent, tracestate = headers.get("traceparent"), headers.get("tracestate")
  parent = traceparent if isinstance(traceparent, str) and len(traceparent) <= _MAX_STATE_CHARS else ""
  state = tracestate if isinstance(tracestate, str) and len(tracestate) <= _MAX_STATE_CHARS else ""
  _caller.set(_Caller(parent, state, operation))


def mark_chat() -> None:
  """The call that is being handled asks for a chat."""
  _caller.set(dataclasses.replace(_caller.get(_UNKNOWN), operation=CHAT))


class Output(Protocol):
  """What a span tells of one output of a generation."""

  @property
  def num_prompt_tokens(self) -> int: ...
  @property
  def num_tokens(self) -> int: ...
  @property
  def num_cached_tokens(self) -> int: ...
  @property
  def first_token_s(self) -> float | None: ...
  @property
  def finished(self) -> pb.Finished | None: ...


class Span:
  """One generation's, from start_span() on. Belongs to one thread."""

  def __init__(
    self,
    tracer: "Tracer",
    request_id: str,
    num_prompt_tokens: int,
    params: Sequence[SamplingParams],
    caller: _Caller,
  ):
    self._tracer = tracer
    self._request_id = request_id
    self._num_prompt_tokens = num_prompt_tokens
    self._params = params
    self._caller = caller
    self._start_ns = time.time_ns()
    self._started = time.monotonic_ns()  # the wall clock may be set; a span's length must not change by it

  def end(self, outputs: Sequence[Output], error: EngineError | None) -> None:
    """Sends it; an output that is not finished belongs to a client that went away."""
    self._tracer.send(
      self._caller,
      self._attributes(outputs, error),
      self._start_ns,
      self._start_ns + time.monotonic_ns() - self._started,
      next((first for output in outputs if (first := output.first_token_s) is not None), None),
    )

  def _attributes(self, outputs: Sequence[Output], error: EngineError | None) -> dict[str, Any]:
    params = self._params[0]
    attributes: dict[str, Any] = {
      _RESPONSE_ID: self._request_id,
      _MAX_TOKENS: params.max_tokens,
      _TEMPERATURE: params.temperature,
      _TOP_P: params.top_p,
      _INPUT_TOKENS: self._num_prompt_tokens,
      _OUTPUT_TOKENS: sum(output.num_tokens for output in outputs),
      _CACHED_TOKENS: outputs[0].num_cached_tokens if outputs else 0,
    }
    if params.top_k:
      attributes[_TOP_K] = params.top_k
    if params.seed is not None:
      attributes[_SEED] = params.seed
    if params.frequency_penalty:
      attributes[_FREQUENCY_PENALTY] = params.frequency_penalty
    if params.presence_penalty:
      attributes[_PRESENCE_PENALTY] = params.presence_penalty
    if len(self._params) > 1:
      attributes[_CHOICE_COUNT] = len(self._params)
    endings = [output.finished for output in outputs]
    if error is not None:
      attributes[_ERROR_TYPE] = error.reason.lower()
    elif not all(endings):
      attributes[_ERROR_TYPE] = "cancelled"
    reasons = [_REASONS[ending.reason] for ending in endings if ending is not None]
    if reasons:
      attributes[_FINISH_REASONS] = reasons
    return attributes


class Tracer:
  """Makes spans and sends them to a collector."""

  def __init__(self, endpoint: str, model: str, version: str):
    """Args:
      endpoint: of an OTLP collector with gRPC: http://host:4317, or https:// for TLS.
      model: the served name.
      version: of the server.

    Raises:
      ConfigError: the extra is not installed, or the endpoint is none.
    """
    check_otlp_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    resource = {"service.version": version}
    if "OTEL_SERVICE_NAME" not in os.environ:
      resource["service.name"] = "sluice"
    self._exporter = OTLPSpanExporter(
      endpoint=endpoint,
      insecure=endpoint.startswith("http://"),
      channel_options=(("grpc.enable_channelz", 0),),  # pyright: ignore[reportArgumentType]  (ints too; see ConnectionWatch)
    )
    # Its own: nothing global, so that two servers in one process do not share their spans.
    self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
    self._tracer = self._provider.get_tracer("sluice", version)
    self._propagator = TraceContextTextMapPropagator()
    self._kind = SpanKind.SERVER
    self._error = Status(StatusCode.ERROR)
    self._model = model

  def start_span(self, request_id: str, num_prompt_tokens: int, params: Sequence[SamplingParams]) -> Span:
    """A generation was accepted; the span begins now, under the trace of the call that is being handled."""
    return Span(self, request_id, num_prompt_tokens, params, _caller.get(_UNKNOWN))

  def send(
    self, caller: _Caller, attributes: dict[str, Any], start_ns: int, end_ns: int, first_token_s: float | None
  ) -> None:
    """Queues a span; a full queue drops it rather than wait."""
    from opentelemetry.context import Context

    carrier = {"traceparent": caller.traceparent, "tracestate": caller.tracestate}
    span = self._tracer.start_span(
      f"{caller.operation} {self._model}",
      # What is malformed is ignored by the propagator, as W3C wants.
      context=self._propagator.extract({key: value for key, value in carrier.items() if value}, Context()),
      kind=self._kind,
      attributes={
        _OPERATION: caller.operation,
        _PROVIDER_NAME: _PROVIDER,
        _REQUEST_MODEL: self._model,
        _RESPONSE_MODEL: self._model,
        **attributes,
      },
      start_time=start_ns,
    )
    if first_token_s is not None:
      span.set_attribute(_TIME_TO_FIRST_CHUNK, first_token_s)
      span.add_event(_FIRST_TOKEN, timestamp=start_ns + round(1e9 * first_token_s))
    if _ERROR_TYPE in attributes:
      span.set_status(self._error)
    span.end(end_ns)

  def shutdown(self) -> None:
    """Sends what is queued, for a few seconds at most."""
    # The SDK's own timeouts add up where the collector does not answer, and its threads are not ours to wait for.
    flush = threading.Thread(target=self._provider.force_flush, name="flush spans", daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    self._exporter.shutdown()
    self._provider.shutdown()


def check_otlp_endpoint(endpoint: str) -> None:
  """Raises ConfigError unless spans can be made and `endpoint` is an address for them."""
  parts = urllib.parse.urlsplit(endpoint)
  if parts.scheme not in ("http", "https") or not parts.hostname:
    raise ConfigError(
      f"otlp_endpoint={endpoint} is not an address of a collector; send http://HOST:4317, or https://HOST:4317 for TLS"
    )
  try:
    found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc")
  except ModuleNotFoundError:
    found = None
  if found is None:
    raise ConfigError(
      f"otlp_endpoint={endpoint} needs OpenTelemetry's SDK, which is not installed; run pip install "
      "'sluice-serve[otel]', or leave the flag out"
    )
