"""Spans as a collector gets them: a real OTLP server, made of grpcio, and a server that sends to it."""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import json
import threading

import grpc
import httpx
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
import pytest

from engine.errors import ConfigError
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.telemetry import tracing
from tests.commands import run_module
from tests.server.harness import Served, running

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
CANARY = "xyzzy canary"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
  """Keeps what it gets."""

  def __init__(self) -> None:
    self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
    self.came = threading.Event()

  def Export(self, request, context):
    self.requests.append(request)
    self.came.set()
    return trace_service_pb2.ExportTraceServiceResponse()

  @property
  def spans(self) -> list[trace_pb2.Span]:
    return [
      span
      for request in self.requests
      for resource in request.resource_spans
      for scope in resource.scope_spans
      for span in scope.spans
    ]


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
  """A collector, and its address."""
  collector = Collector()
  server = grpc.server(futures.ThreadPoolExecutor(2))
  trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
  port = server.add_insecure_port("127.0.0.1:0")
  server.start()
  yield collector, f"http://127.0.0.1:{port}"
  server.stop(None).wait(60)


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
  with collecting() as found:
    yield found


@pytest.fixture
def traced(tokenizer, collector) -> Iterator[tuple[Served, tracing.Tracer]]:
  """A server that sends to the collector."""
  tracer = tracing.Tracer(collector[1], "tiny", "1.2")
  with running(tokenizer, host=HostOptions(http_port=0)) as served:
    served.generations._tracer = tracer
    yield served, tracer


def attributes(of) -> dict:
  found = {}
  for pair in of.attributes:
    kind = pair.value.WhichOneof("value")
    value = getattr(pair.value, kind)
    found[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
  return found


@pytest.mark.catalogue("H6")
def test_a_span_for_a_call_of_grpc(traced, collector):
  served, tracer = traced
  request = pb.GenerateRequest(
    request_id="mine",
    text=CANARY,
    stopping=pb.StopParams(max_tokens=6, ignore_eos=True, stop=["never " + CANARY]),
    sampling=pb.SamplingParams(temperature=0.5, seed=7, n=2),
  )
  metadata = (("traceparent", TRACEPARENT), ("tracestate", "vendor=value"))
  list(served.generation.Generate(request, metadata=metadata, timeout=30))
  served.wait_until(lambda: len(served.generations) == 0)
  tracer.shutdown()
  (span,) = collector[0].spans
  assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=value")
  assert (span.name, span.kind) == ("text_completion tiny", trace_pb2.Span.SPAN_KIND_SERVER)
  found = attributes(span)
  assert {key: found[key] for key in found if key != "gen_ai.response.time_to_first_chunk"} == {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "sluice",
    "gen_ai.request.model": "tiny",
    "gen_ai.response.model": "tiny",
    "gen_ai.response.id": "mine",
    "gen_ai.request.max_tokens": 6,
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.top_p": 1.0,
    "gen_ai.request.seed": 7,
    "gen_ai.request.choice.count": 2,
    "gen_ai.response.finish_reasons": ["length", "length"],
    "gen_ai.usage.input_tokens": found["gen_ai.usage.input_tokens"],
    "gen_ai.usage.output_tokens": 12,
    "gen_ai.usage.cache_read.input_tokens": 0,
  }
  assert found["gen_ai.usage.input_tokens"] > 5
  (event,) = span.events
  assert event.name == "first_token"
  assert span.start_time_unix_nano < event.time_unix_nano <= span.end_time_unix_nano
  assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
  resource = attributes(collector[0].requests[0].resource_spans[0].resource)
  assert (resource["service.name"], resource["service.version"]) == ("sluice", "1.2")
  assert CANARY.encode() not in b"".join(sent.SerializeToString() for sent in collector[0].requests)


def test_spans_of_http_with_and_without_a_trace(traced, collector):
  served, tracer = traced
  url = f"http://127.0.0.1:{served.host.http_port}/v1"
  chat = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 3, "ignore_eos": True}
  with httpx.Client(timeout=30) as client:  # one connection: a call must not keep the trace of the one before it
    client.post(f"{url}/chat/completions", json=chat, headers={"traceparent": TRACEPARENT}).raise_for_status()
    client.post(f"{url}/completions", json={"prompt": [CANARY, "b"], "max_tokens": 2}).raise_for_status()
    client.post(
      f"{url}/completions", json={"prompt": "c", "max_tokens": 2}, headers={"traceparent": "00-junk"}
    ).raise_for_status()
    unsampled = {"traceparent": TRACEPARENT[:-2] + "00"}
    client.post(f"{url}/completions", json={"prompt": "d", "max_tokens": 2}, headers=unsampled).raise_for_status()
  served.wait_until(lambda: len(served.generations) == 0)
  tracer.shutdown()
  spans = collector[0].spans
  # One for each prompt; what the caller's trace leaves out, is left out.
  assert [span.name for span in spans] == ["chat tiny", *["text_completion tiny"] * 3]
  assert (spans[0].trace_id.hex(), spans[0].parent_span_id.hex()) == (TRACE, PARENT)
  for span in spans[1:]:
    assert span.trace_id.hex() != TRACE and not span.parent_span_id
  assert len({span.trace_id for span in spans}) == 4


def test_a_chat_over_grpc_a_failure_and_a_client_that_left(tokenizer, collector):
  tracer = tracing.Tracer(collector[1], "tiny", "1.2")
  with running(tokenizer) as served:
    served.generations._tracer = tracer
    message = pb.ChatMessage(role="user", content="hi")
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[message]), stopping=pb.StopParams(max_tokens=2))
    served.generation.GenerateUnary(chat, timeout=30)
    served.runner.seconds = 0.01
    long = pb.GenerateRequest(request_id="long", text="a", stopping=pb.StopParams(max_tokens=400, ignore_eos=True))
    call = served.generation.Generate(long, timeout=30)
    next(iter(call))
    served.generation.Abort(pb.AbortRequest(request_ids=["long"]))
    with pytest.raises(grpc.RpcError):
      list(call)
    call = served.generation.Generate(long, timeout=30)
    next(iter(call))
    call.cancel()
    served.wait_until(lambda: len(served.generations) == 0)
    tracer.shutdown()
  first, aborted, left = collector[0].spans
  assert first.name == "chat tiny"
  for span, kind in ((aborted, "aborted_by_request"), (left, "cancelled")):
    assert span.status.code == trace_pb2.Status.STATUS_CODE_ERROR and not span.status.message
    assert attributes(span)["error.type"] == kind
    assert attributes(span)["gen_ai.usage.output_tokens"] > 0
    assert "gen_ai.response.finish_reasons" not in attributes(span)


def test_bad_endpoints_and_no_sdk(monkeypatch):
  for endpoint in ("collector:4317", "ftp://x", "http://"):
    with pytest.raises(ConfigError, match=f"otlp_endpoint={endpoint} is not an address"):
      tracing.check_otlp_endpoint(endpoint)
  tracing.check_otlp_endpoint("https://collector:4317")
  monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=r"pip install 'sluice-serve\[otel\]'"):
    tracing.check_otlp_endpoint("http://127.0.0.1:4317")


def test_the_program_without_the_extra_says_one_line(tmp_path):
  (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry'] = None\n")
  flags = ("--port=0", "--otlp_endpoint=http://127.0.0.1:4317", "--log_format=json")
  done = run_module("server.main", *flags, PYTHONPATH=str(tmp_path))
  assert done.returncode == 1
  lines = [json.loads(line) for line in done.stderr.splitlines()]
  errors = [line["message"] for line in lines if line["level"] == "error"]
  assert len(errors) == 1 and "pip install 'sluice-serve[otel]'" in errors[0]
