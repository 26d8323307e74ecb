"""What must not be anywhere: one canary in each place that a client can fill, and a look at all that the server wrote.

Prompts, outputs, keys, salts and stop strings may be in no status, log, metric or trace; names and grammars of a client
may be told to that client, and nowhere else.
"""

from concurrent import futures
import json
import logging
import pathlib
import re

import grpc
import httpx
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
import pytest

from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.telemetry import tracing
from server.telemetry.log_lines import RateLimit
from tests.server.harness import running
from tools.certificates import replace_file

KEY = "the-canary-key-of-a-tenant"
# Each stands for another place, so that a leak says where it came from.
SECRETS = ("prompt", "chat", "stop", "salt", "wrongkey", "toolcall", "choice", "binary", "constant")
NAMES = ("model", "field", "method", "path", "host", "header", "requestid", "regex", "schema", "template", "kwarg")


def canary(place: str) -> str:
  return f"canary{place}yranac"


def found(text: str, places: tuple[str, ...]) -> list[str]:
  """Of these places, whose canary is in the text, also in hexadecimal, in escapes or in bytes of protobuf."""
  flat = text.lower()
  return [
    place
    for place in places
    if canary(place) in flat or canary(place).encode().hex() in flat or canary(place)[::-1] in flat
  ]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
  def __init__(self) -> None:
    self.spans: list[str] = []

  def Export(self, request, context):
    self.spans.append(str(request))
    return trace_service_pb2.ExportTraceServiceResponse()


def requests_over_grpc() -> list[tuple[str, pb.GenerateRequest]]:
  few = {"max_tokens": 24, "ignore_eos": True}
  ids = pb.TokenIds(ids=[7, 8])
  prompt, chat = canary("prompt"), pb.ChatMessage(role="user", content=canary("chat"))
  stopping = pb.StopParams(**few, stop=[canary("stop")])
  good = [
    pb.GenerateRequest(text=prompt, stopping=stopping, cache_salt=canary("salt")),
    pb.GenerateRequest(chat=pb.ChatPrompt(messages=[chat]), stopping=stopping),
    pb.GenerateRequest(
      text=prompt, stopping=pb.StopParams(**few), output=pb.OutputParams(logprobs=3, prompt_logprobs=3)
    ),
    pb.GenerateRequest(
      text=prompt, stopping=few_more(), constraint=pb.OutputConstraint(choice=pb.Choices(values=[canary("choice")]))
    ),
  ]
  bad = []
  for request in good:
    for change in (
      {"sampling": pb.SamplingParams(top_p=7.0)},
      {"model": canary("model")},
      {"request_id": "a b" + canary("requestid")},
      {"stopping": pb.StopParams(max_tokens=600)},
      {"stopping": pb.StopParams(stop=[canary("stop") * 20])},
      {"cache_salt": canary("salt") * 10},
      {"tenant": "another"},
      {"constraint": pb.OutputConstraint(regex=canary("regex") + "(")},
      {"constraint": pb.OutputConstraint(json_schema='{"type": "' + canary("schema") + '"}')},
      {"constraint": pb.OutputConstraint(json_schema='{"const": "' + canary("constant") + '"')},
    ):
      broken = pb.GenerateRequest()
      broken.CopyFrom(request)
      for name, value in change.items():
        broken.ClearField(name)
        if isinstance(value, str):
          setattr(broken, name, value)
        else:
          getattr(broken, name).CopyFrom(value)
      bad.append(broken)
  role = pb.ChatMessage(role="user", content=canary("chat"))
  bad.append(pb.GenerateRequest(chat=pb.ChatPrompt(messages=[role] * 1025)))
  bad.append(pb.GenerateRequest(text=canary("prompt") * 200_000))
  bad.append(pb.GenerateRequest(token_ids=ids, stopping=pb.StopParams(stop=[canary("stop")] * 20)))
  return [("good", each) for each in good] + [("bad", each) for each in bad]


def few_more() -> pb.StopParams:
  return pb.StopParams(max_tokens=60)


def requests_over_http() -> list[tuple[str, str, bytes | dict]]:
  prompt, chat = canary("prompt"), [{"role": "user", "content": canary("chat")}]
  stop = {"stop": [canary("stop")], "max_tokens": 6, "cache_salt": canary("salt")}
  call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": canary("toolcall")})}}
  asked: list[tuple[str, str, bytes | dict]] = [
    ("POST", "/v1/completions", {"prompt": prompt, **stop}),
    ("POST", "/v1/completions", {"prompt": prompt, **stop, "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": chat, **stop}),
    ("POST", "/v1/chat/completions", {"messages": [*chat, {"role": "assistant", "tool_calls": [call]}], **stop}),
    ("POST", "/tokenize", {"prompt": prompt}),
    ("POST", "/tokenize", {"messages": chat}),
  ]
  for _, path, body in tuple(asked):
    assert isinstance(body, dict)
    asked += (
      ("POST", path, body | {"top_p": 9, "max_tokens": "x"}),
      ("POST", path, body | {"model": canary("model")}),
      ("POST", path, body | {canary("field"): canary("prompt")}),
      ("POST", path, body | {"chat_template": canary("template"), "suffix": canary("prompt")}),
      ("POST", path, body | {"chat_template_kwargs": {canary("kwarg"): canary("template")}}),
      ("POST", path, body | {"prompt": {"a": prompt}, "messages": [prompt]}),
      ("POST", path, body | {"guided_regex": canary("regex") + "("}),
      ("POST", path, json.dumps(body).encode()[:-1]),
      ("POST", path, json.dumps(body).encode().replace(b"canaryprompt", b"canaryprompt\xff")),
      ("POST", path, json.dumps(body).encode().replace(b"canarychat", b"canarychat\\ud800")),
      ("POST", path, b'{"prompt": "' + prompt.encode() + b'", "prompt": "' + prompt.encode() + b'"}'),
    )
  asked += (("GET", f"/{canary('path')}", b""), ("DELETE", f"/v1/models/{canary('model')}", b""))
  return asked


@pytest.mark.catalogue("H6")
def test_canaries_are_nowhere(tokenizer, tmp_path: pathlib.Path, caplog, capfd):
  keys, access = tmp_path / "keys", tmp_path / "access.jsonl"
  replace_file(keys, f"{KEY} team\n".encode())
  collector = Collector()
  backend = grpc.server(futures.ThreadPoolExecutor(2))
  trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, backend)
  port = backend.add_insecure_port("127.0.0.1:0")
  backend.start()
  caplog.set_level(logging.DEBUG, "server")
  options = HostOptions(
    http_port=0,
    metrics_port=0,
    api_key_file=str(keys),
    access_log=str(access),
    vllm_metric_names=True,
    http_allowed_hosts=("127.0.0.1",),
  )
  to_clients: list[str] = []  # statuses; answers hold outputs, which belong there
  outputs: set[str] = set()
  with running(tokenizer, host=options) as served:
    tracer = tracing.Tracer(f"http://127.0.0.1:{port}", "tiny", "1")
    served.generations._tracer = tracer
    good_key = (("x-api-key", KEY),)
    for kind, request in requests_over_grpc():
      for streams in (True, False):
        for metadata in (good_key, (("x-api-key", canary("wrongkey")),)):
          try:
            if streams:
              messages = list(served.generation.Generate(request, metadata=metadata, timeout=60))
              parts = [delta for message in messages for delta in message.deltas]
            else:
              parts = served.generation.GenerateUnary(request, metadata=metadata, timeout=60).completions
            if not request.HasField("constraint"):
              outputs.update(part.text for part in parts if len(part.text) > 8)
          except grpc.RpcError as error:
            assert kind == "bad" or metadata is not good_key, error
            assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), error
            to_clients += (str(error.details()), str(error.trailing_metadata()), str(error.initial_metadata()))
    for method, raw in (
      ("/sluice.v1.GenerationService/Generate", b"\x1a\x40" + canary("binary").encode()),
      ("/sluice.v1.GenerationService/Abort", b"\xff" + canary("binary").encode()),
      (f"/{canary('method')}/x", b""),
    ):
      with pytest.raises(grpc.RpcError) as caught:
        served.channel.unary_unary(method)(
          raw, metadata=(*good_key, ("x-request-id", canary("header") + " ")), timeout=60
        )
      to_clients.append(str(caught.value.details()))
    with httpx.Client(base_url=f"http://127.0.0.1:{served.host.http_port}", timeout=60) as http:
      for method, path, body in requests_over_http():
        for key in (KEY, canary("wrongkey")):
          headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
          sent = {"json": body} if isinstance(body, dict) else {"content": body}
          answer = http.request(method, path, headers=headers, **sent)
          assert answer.status_code < 500, answer.text
          if answer.status_code != 200:
            to_clients += (answer.text, str(answer.headers))
      http.get("/v1/models", headers={"host": canary("host")})
      metrics = http.get("/metrics", headers={"x-api-key": KEY}).text
      metrics += httpx.get(f"http://127.0.0.1:{served.host.metrics_port}/metrics").text
    load = served.model.GetLoad(pb.GetLoadRequest(steps_after_s=0), metadata=good_key)
    served.wait_until(lambda: len(served.generations) == 0)
    tracer.shutdown()
  backend.stop(None).wait(60)
  written = {
    "log": caplog.text + "".join(capfd.readouterr()),
    "access log": access.read_text(),
    "metrics": metrics,
    "load": str(load),
    "traces": "".join(collector.spans),
  }
  assert len(to_clients) > 200 and len(outputs) > 3 and len(collector.spans) > 0
  assert len(written["access log"].splitlines()) > 200
  for where, text in written.items():
    # A path and a method that exist nowhere are what the access log is for; they are one call's line, and no series.
    allowed = ("path", "method", "model") if where == "access log" else ()
    assert not found(text, (*SECRETS, *(name for name in NAMES if name not in allowed))), where
    assert KEY not in text and not any(output in text for output in outputs), where
    assert not re.search(r"Traceback|Error\(|Exception", text), where
  said = "\n".join(to_clients)
  assert not found(said, tuple(place for place in SECRETS if place not in ("choice", "constant")))
  assert KEY not in said and not any(output in said for output in outputs)
  assert not re.search(r"Traceback|Error\(|Exception|site-packages|/server/|\.py", said)
  assert str(tmp_path) not in said


@pytest.mark.catalogue("H7")
def test_lines_of_one_kind_are_limited_and_counted():
  now = [0.0]
  limit = RateLimit(lambda: now[0])

  def line(number: int, level: int = logging.ERROR, lineno: int = 10) -> logging.LogRecord:
    return logging.LogRecord("server.rpc.grpc_status", level, "status.py", lineno, "incident %s", (number,), None)

  written = [limit.filter(line(number)) for number in range(1000)]
  assert written == [True] * 20 + [False] * 980
  assert limit.filter(line(0, lineno=11)), "others are not held back"
  assert all(limit.filter(line(0, level)) for level in (logging.INFO, logging.CRITICAL) for _ in range(50))
  now[0] = 60.0
  first, second = line(7), line(8)
  assert limit.filter(first) and limit.filter(second)
  assert first.getMessage() == "incident 7 (980 more like this were left out)" and second.getMessage() == "incident 8"


@pytest.mark.catalogue("H7")
def test_headers_cannot_forge_a_line(tokenizer, tmp_path, caplog):
  """Ids and names with line ends, quotes and control characters: one line a call, and JSON in each."""
  access = tmp_path / "access.jsonl"
  forged = 'x","code":"OK"}\\n{"forged":true,"a":"'
  with running(tokenizer, host=HostOptions(http_port=0, access_log=str(access))) as served:
    with httpx.Client(base_url=f"http://127.0.0.1:{served.host.http_port}") as http:
      for path in ("/v1/%0a%7b%22forged%22:true%7d", '/"},{"forged":true}', "/%00%1b%5b31m"):
        http.get(path, headers={"x-request-id": forged, "traceparent": forged})
    for method in (f"/{forged}", "/a\tb"):
      with pytest.raises(grpc.RpcError):
        served.channel.unary_unary(method)(b"", metadata=(("x-request-id", forged),), timeout=30)
  lines = [json.loads(line) for line in access.read_text().splitlines()]
  assert len(lines) == 5 and not any("forged" in line for line in lines)
  assert all(re.fullmatch(r"(req-)?[0-9a-f]{32}", line["request_id"]) for line in lines)
  assert access.read_text().isascii() and "\x1b" not in access.read_text()
