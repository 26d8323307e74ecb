"""Scenario: time in which an idle server refuses wrong input, one of each row of the catalogue's table E."""

from collections.abc import Callable
import dataclasses
import http.client
import json
import time
from typing import Any

import grpc

from server.proto import sluice_pb2 as pb
from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig
from tools.report.latency import percentile

_LIMIT_MS = 5.0
_WARM = 5  # untimed requests of each; they build what is made once, such as the vocabulary for grammars
CANARY = "a-prompt-that-no-answer-repeats"
_METHOD = "/sluice.v1.GenerationService/GenerateUnary"
_PATH = "/v1/completions"
_PROTOCOLS = ("gRPC", "HTTP")


@dataclasses.dataclass(frozen=True)
class Bad:
  """One wrong input, for both protocols.

  Attributes:
    name: its row of the catalogue, and a description.
    message: protobuf; bytes are sent as they are.
    body: JSON; bytes are sent as they are.
    code, status: the required responses.
  """

  name: str
  message: pb.GenerateRequest | bytes
  body: dict[str, Any] | bytes
  code: str = "INVALID_ARGUMENT"
  status: int = 400


def _constraint(name: str, kind: str, text: str) -> Bad:
  request = pb.GenerateRequest(text=CANARY)
  setattr(request.constraint, kind, text)
  asked = {"prompt": CANARY, "structured_outputs": {"json" if kind == "json_schema" else kind: text}}
  return Bad(f"E6 {name}", request, asked)


def _small() -> list[Bad]:
  ids = pb.TokenIds(ids=[1, 2**31 - 1])
  both = pb.SamplingParams(allowed_token_ids=pb.TokenIds(ids=[7]))
  return [
    Bad(
      "E1 temperature",
      pb.GenerateRequest(text=CANARY, sampling=pb.SamplingParams(temperature=float("nan"))),
      {"prompt": CANARY, "temperature": -1},
    ),
    Bad(
      "E2 max_tokens",
      pb.GenerateRequest(text=CANARY, stopping=pb.StopParams(max_tokens=0)),
      {"prompt": CANARY, "max_tokens": 0},
    ),
    Bad("E3 no prompt", pb.GenerateRequest(), {}),
    Bad("E4 token id", pb.GenerateRequest(token_ids=ids), {"prompt": [1, 2**31 - 1]}),
    Bad(
      "E5 empty stop",
      pb.GenerateRequest(text=CANARY, stopping=pb.StopParams(stop=[""])),
      {"prompt": CANARY, "stop": ""},
    ),
    _constraint("not JSON", "json_schema", "{'a': 1}"),
    _constraint("recursive $ref", "json_schema", '{"$ref": "#"}'),
    _constraint("{1,10^9}", "regex", "a{1,1000000000}"),
    _constraint("nested bounds", "regex", "((a{1,1000}){1,1000}){1,1000}"),
    _constraint("lookaround", "regex", "(?=a)b"),
    _constraint("endless rule", "grammar", "start: start"),
    Bad("E7 model", pb.GenerateRequest(text=CANARY, model="gpt"), {"prompt": CANARY, "model": "gpt"}, "NOT_FOUND", 404),
    Bad("E8 malformed", b"\x1a\x02\xff\xfe", b'{"prompt":"a","metadata":' + b"[" * 65 + b"]" * 65 + b"}"),
    Bad(
      "E9 a pair",
      pb.GenerateRequest(text=CANARY, sampling=both, constraint=pb.OutputConstraint(regex="a*")),
      {"prompt": CANARY, "allowed_token_ids": [7], "structured_outputs": {"regex": "a*"}},
    ),
  ]


def _large() -> list[Bad]:
  size = 1 << 20
  digits = b'{"prompt":"a","n":' + b"1" * size + b"}"
  return [
    _constraint("1 MB schema", "json_schema", '{"const": "' + "x" * size + '"}'),
    Bad("E8 1 MB of junk", b"\xff" * size, digits),
  ]


@dataclasses.dataclass
class RefusalTimes:
  """A client's times: milliseconds from sending to the whole response, by protocol and name of the input."""

  times: dict[tuple[str, str], list[float]] = dataclasses.field(default_factory=dict)
  faults: list[str] = dataclasses.field(default_factory=list)

  @property
  def sent(self) -> int:
    """Returns the number of timed requests."""
    return sum(map(len, self.times.values()))


def ask(target: str, http_port: int, large: bool, count: int) -> RefusalTimes:
  """A job: sends each input `count` times, one after the other."""
  seen = RefusalTimes()
  connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=30)
  with grpc.insecure_channel(target, options=(("grpc.max_send_message_length", -1),)) as channel:
    call = channel.unary_unary(_METHOD)
    for bad in _large() if large else _small():
      message = bad.message if isinstance(bad.message, bytes) else bad.message.SerializeToString()
      body = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
      timed(seen, "gRPC", bad, bad.code, count, lambda message=message: _over_grpc(call, message))
      timed(seen, "HTTP", bad, str(bad.status), count, lambda body=body: _over_http(connection, body))
  connection.close()
  return seen


def timed(
  seen: RefusalTimes, protocol: str, bad: Bad, wanted: str, count: int, send: Callable[[], tuple[str, str]]
) -> None:
  """Sends one input `count` times; records its times and faults in the response."""
  times = []
  for _ in range(_WARM + count):
    began = time.perf_counter()
    answer, said = send()
    times.append(1000 * (time.perf_counter() - began))
    if answer != wanted:
      seen.faults.append(f"{bad.name} over {protocol} was answered {answer}")
    elif CANARY in said:
      seen.faults.append(f"{bad.name} over {protocol} had its prompt sent back")
  seen.times[protocol, bad.name] = times[_WARM:]


def _over_grpc(call: grpc.UnaryUnaryMultiCallable, message: bytes) -> tuple[str, str]:
  try:
    call(message, timeout=30)
  except grpc.RpcError as error:
    return error.code().name, str(error)  # pyright: ignore[reportAttributeAccessIssue]
  return "OK", ""


def _over_http(connection: http.client.HTTPConnection, body: bytes) -> tuple[str, str]:
  connection.request("POST", _PATH, body, {"content-type": "application/json"})
  answer = connection.getresponse()
  return str(answer.status), answer.read().decode()


def refusals(rig: Rig, count: int = 400, asked: int = 400) -> list[Row]:
  """Compares small inputs with the limit; large ones, which take long to read, have a separate row and no limit."""
  with rig.server() as server:
    small = rig.submit(ask, server.target, server.http_port, False, count).result()
    large = rig.submit(ask, server.target, server.http_port, True, max(1, count // 4)).result()
    books = server.books()
    faults = small.faults + large.faults + server.settle() + server.imbalance()
  if books.requests_accepted_total or books.generations_started_total:
    faults.append(f"{books.requests_accepted_total} of them were queued")
  slowest = {each: percentile(times, 99) or 0.0 for each, times in small.times.items()}
  (protocol, name), worst = max(slowest.items(), key=lambda each: each[1])
  of_all = ", ".join(f"{way} {_p99(small, way):.1f} ms" for way in _PROTOCOLS)
  of_large = ", ".join(f"{way} {_p99(large, way):.1f} ms" for way in _PROTOCOLS)
  return [
    Row(
      f"time to refuse, idle server, p99 of each of {len(slowest) // 2} wrong inputs, gRPC and HTTP",
      f"<= {_LIMIT_MS:g} ms",
      f"at most {worst:.1f} ms ({name}, {protocol}); of all {of_all}; of 1 MB, which has no limit, {of_large}",
      worst <= _LIMIT_MS,
      asked,
      count,
    ),
    none_of(
      "wrong inputs", "the required status, nothing queued, no prompt sent back", faults, small.sent + large.sent, 0
    ),
  ]


def _p99(seen: RefusalTimes, protocol: str) -> float:
  return percentile([each for (way, _), times in seen.times.items() if way == protocol for each in times], 99) or 0.0
