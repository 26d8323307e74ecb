"""Sends an OpenTelemetry span for each generation to a collector. A span never holds a prompt or an output.

Attributes follow the GenAI semantic conventions, version 1.41 (status: development). The SDK is an extra, which is
imported only if there is an endpoint. A thread of the SDK sends the spans.
"""

from collections.abc import Mapping, Sequence
import contextvars
import dataclasses
import importlib.util
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol
import urllib.parse

from engine.errors import ConfigError, EngineError
from engine.sampling_params import SamplingParams
from server.proto import sluice_pb2 as pb

if TYPE_CHECKING:
  from opentelemetry.trace import Span as SdkSpan

CHAT = "chat"
TEXT_COMPLETION = "text_completion"
_FLUSH_S = 5.0
# The longest trace header that W3C allows; longer ones are ignored.
_MAX_STATE_CHARS = 512
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclasses.dataclass(frozen=True)
class _Caller:
  traceparent: str
  tracestate: str
  operation: str


_UNKNOWN = _Caller("", "", TEXT_COMPLETION)
_caller: contextvars.ContextVar[_Caller] = contextvars.ContextVar("trace_caller")


def keep_trace_parent(headers: Mapping[str, Any], operation: str = TEXT_COMPLETION) -> None:
  """Stores the trace context of the current call (W3C Trace Context).

  Args:
    headers: HTTP headers or gRPC metadata, keys in lower case.
    operation: the operation's name, as far as it is known.
  """
  traceparent, tracestate = headers.get("traceparent"), headers.get("tracestate")
  parent = traceparent if isinstance(traceparent, str) and len(traceparent) <= _MAX_STATE_CHARS else ""
  state = tracestate if isinstance(tracestate, str) and len(tracestate) <= _MAX_STATE_CHARS else ""
  _caller.set(_Caller(parent, state, operation))


def mark_chat() -> None:
  """Marks the current call as a chat."""
  _caller.set(dataclasses.replace(_caller.get(_UNKNOWN), operation=CHAT))


class Output(Protocol):
  """What a span reports of one output of a generation."""

  @property
  def num_tokens(self) -> int: ...
  @property
  def num_cached_tokens(self) -> int: ...
  @property
  def first_token_s(self) -> float | None: ...
  @property
  def finished(self) -> pb.Finished | None: ...


class Span:
  """The span of one generation. Belongs to one thread."""

  def __init__(self, span: "SdkSpan", start_ns: int):
    self._span = span
    self._start_ns = start_ns
    self._started = time.monotonic_ns()  # the monotonic clock, since the wall clock may jump

  def end(self, outputs: Sequence[Output], error: EngineError | None) -> None:
    """Queues the span, or drops it if the queue is full. An unfinished output means that its client has gone."""
    from opentelemetry.trace import StatusCode

    span = self._span
    span.set_attribute("gen_ai.usage.output_tokens", sum(output.num_tokens for output in outputs))
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", outputs[0].num_cached_tokens if outputs else 0)
    endings = [output.finished for output in outputs]
    reasons = [_REASONS[ending.reason] for ending in endings if ending is not None]
    if reasons:
      span.set_attribute("gen_ai.response.finish_reasons", reasons)
    if error is not None or not all(endings):
      span.set_attribute("error.type", error.reason.lower() if error is not None else "cancelled")
      span.set_status(StatusCode.ERROR)
    end_ns = self._start_ns + time.monotonic_ns() - self._started
    # Seconds since the submission, shortly before the span's start.
    first_token_s = next((first for output in outputs if (first := output.first_token_s) is not None), None)
    if first_token_s is not None:
      span.set_attribute("gen_ai.response.time_to_first_chunk", first_token_s)
      span.add_event("first_token", timestamp=min(self._start_ns + round(1e9 * first_token_s), end_ns))
    span.end(end_ns)


class Tracer:
  """Makes spans and sends them to a collector."""

  def __init__(self, endpoint: str, model: str, version: str):
    """Args:
      endpoint: an OTLP collector with gRPC: http://host:4317, or https:// for TLS.
      model: the served name.
      version: the server's version.

    Raises:
      ConfigError: the extra is not installed, or the endpoint is not an address.
    """
    check_otlp_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    resource = {"service.version": version}
    if "OTEL_SERVICE_NAME" not in os.environ:
      resource["service.name"] = "sluice"
    self._exporter = OTLPSpanExporter(
      endpoint=endpoint,
      insecure=endpoint.startswith("http://"),
      channel_options=(("grpc.enable_channelz", 0),),  # pyright: ignore[reportArgumentType]  (ints too; see ConnectionWatch)
    )
    # No global provider, so that two servers in one process do not share spans.
    self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
    self._tracer = self._provider.get_tracer("sluice", version)
    self._propagator = TraceContextTextMapPropagator()
    self._model = model

  def start_span(
    self, request_id: str, num_prompt_tokens: int, params: Sequence[SamplingParams], *, adapter: str = ""
  ) -> Span:
    """Starts the span of an accepted generation, under the trace of the current call. An adapter is its model."""
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    caller, first, model = _caller.get(_UNKNOWN), params[0], adapter or self._model
    attributes = {
      "gen_ai.operation.name": caller.operation,
      "gen_ai.provider.name": "sluice",
      "gen_ai.request.model": model,
      "gen_ai.response.model": model,
      "gen_ai.response.id": request_id,
      "gen_ai.request.max_tokens": first.max_tokens,
      "gen_ai.request.temperature": first.temperature,
      "gen_ai.request.top_p": first.top_p,
      "gen_ai.usage.input_tokens": num_prompt_tokens,
    }
    unless_default = {
      "gen_ai.request.top_k": first.top_k or None,
      "gen_ai.request.seed": first.seed,
      "gen_ai.request.frequency_penalty": first.frequency_penalty or None,
      "gen_ai.request.presence_penalty": first.presence_penalty or None,
      "gen_ai.request.choice.count": len(params) if len(params) > 1 else None,
    }
    attributes |= {name: value for name, value in unless_default.items() if value is not None}
    carrier = {"traceparent": caller.traceparent, "tracestate": caller.tracestate}
    start_ns = time.time_ns()
    span = self._tracer.start_span(
      f"{caller.operation} {model}",
      # The propagator ignores malformed headers, as W3C requires.
      context=self._propagator.extract({key: value for key, value in carrier.items() if value}, Context()),
      kind=SpanKind.SERVER,
      attributes=attributes,
      start_time=start_ns,
    )
    return Span(span, start_ns)

  def shutdown(self) -> None:
    """Sends the queued spans, within a few seconds."""
    # The SDK's timeouts add up where the collector does not answer, so the server does not wait for its threads.
    flush = threading.Thread(target=self._provider.force_flush, name="flush spans", daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    self._exporter.shutdown()
    self._provider.shutdown()


def check_otlp_endpoint(endpoint: str) -> None:
  """Raises ConfigError unless the extra is installed and `endpoint` is an address."""
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
