"""Limits of the wire: sizes, streams, pings, ages of connections, floods and junk. Nobody else may be harmed."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import struct
import threading
import time
import zlib

from google.rpc import error_details_pb2
import grpc
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
import pytest

from server.errors import MalformedRequest
from server.ipc.front_end_spawn import peak_rss_bytes
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from server.rpc import call_interceptor
from server.telemetry.access_log import AccessLog
from tests.server import http2
from tests.server.harness import detail_of, endings_of, generate, reason_of, running, tiny_config, token_ids_of
from tests.server.security.test_descriptor_limit import CONNECTIONS, assert_new_clients_are_served, crowd, serving

IDS = pb.TokenIds(ids=[7, 8, 9])
FOREVER = pb.StopParams(max_tokens=400, ignore_eos=True)
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def assert_serves(served) -> None:
  assert endings_of(generate(served, token_ids=IDS, stopping=pb.StopParams(max_tokens=5)))[-1].last
  stub = health_pb2_grpc.HealthStub(served.channel)
  assert stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status == health_pb2.HealthCheckResponse.SERVING
  assert served.engine.num_live == 0 and len(served.generations) == 0


@pytest.mark.catalogue("H1")
def test_a_message_larger_than_allowed(tokenizer):
  with running(tokenizer, host=HostOptions(max_request_bytes=2000)) as served:
    generate(served, token_ids=pb.TokenIds(ids=[7] * 400), stopping=pb.StopParams(max_tokens=1))
    for method in (served.generation.GenerateUnary, served.generation.Generate):
      with pytest.raises(grpc.RpcError, match=r"Received message larger than max \(\d+ vs. 2000\)") as caught:
        list(method(pb.GenerateRequest(text="a" * 2001)))
      assert caught.value.code() is EXHAUSTED
    assert_serves(served)


@pytest.mark.catalogue("H1")
def test_a_message_that_is_large_only_unpacked(served):
  """64 MiB in 64 KiB of gzip; its size counts unpacked."""
  with grpc.insecure_channel(served.address, compression=grpc.Compression.Gzip) as channel:
    stub = pb_grpc.GenerationServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
      stub.GenerateUnary(pb.GenerateRequest(text="a" * (64 << 20)))
    assert caught.value.code() is EXHAUSTED
    stub.GenerateUnary(pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=1)))
  assert_serves(served)


def bomb(num_mib: int) -> bytes:
  """A message of so many MiB of zeros as gRPC frames it, packed a thousand times smaller: the same piece of deflate's
  format again and again, so that making it takes no time.
  """
  packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
  piece = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
  packed = b"\x1f\x8b\x08" + bytes(6) + b"\xff" + num_mib * piece + packer.flush() + bytes(8)
  return b"\1" + struct.pack(">I", len(packed)) + packed


@pytest.mark.catalogue("H1")
def test_what_is_large_only_unpacked_takes_no_memory(tmp_path):
  """Twenty times 60 MiB at once, in 62 KiB each: unpacking ends at the limit of a message."""
  flags = f"--max_grpc_connections={CONNECTIONS}", "--http_port=-1"
  opening = http2.headers("/sluice.v1.GenerationService/GenerateUnary", **{"grpc-encoding": "gzip"})
  body = bomb(60)
  assert len(body) < 65_536, "what a connection takes before it has to be asked"
  with serving(tmp_path, *flags) as (process, address), contextlib.ExitStack() as stack:
    assert_new_clients_are_served(address)
    before = peak_rss_bytes(process.pid)
    connections = crowd(address, stack, 20)
    for connection in connections:
      connection.send(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, opening))
      for at in range(0, len(body), 16_384):
        part = body[at : at + 16_384]
        connection.send(http2.frame(http2.DATA, http2.END_STREAM * (at + 16_384 >= len(body)), 1, part))
    for connection in connections:
      answer = connection.wait_for(http2.HEADERS)
      assert re.findall(rb"grpc-status.(\d+)", answer) == [TOO_LARGE] and b"larger than max" in answer
    assert_new_clients_are_served(address)
    assert peak_rss_bytes(process.pid) - before < 64 << 20


@pytest.mark.parametrize("error", [MalformedRequest("cut off"), cygrpc.ExecuteBatchError("a write")])
def test_a_call_that_is_over_before_its_status_is_no_error(error, tmp_path):
  """Which gRPC knows a moment later, and by chance before or after ours: no exception may reach it."""

  class Over:
    def set_trailing_metadata(self, metadata):
      pass

    def peer(self):
      return "somebody"

    async def abort(self, *_):
      raise cygrpc.ExecuteBatchError("the status")

  log = AccessLog(str(tmp_path / "log"))

  async def fail() -> None:
    async with call_interceptor.CallInterceptor(log, max_response_bytes=1)._running(
      call_interceptor.RpcCall("/x", {}, "id"), Over()
    ):
      raise error

  with pytest.raises(asyncio.CancelledError):
    asyncio.run(fail())
  log.close()
  (line,) = (tmp_path / "log").read_text().splitlines()
  assert json.loads(line)["code"] == ("CANCELLED" if isinstance(error, grpc.aio.InternalError) else "INVALID_ARGUMENT")


@pytest.mark.catalogue("C13")
@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
def test_an_answer_larger_than_allowed(tokenizer, method, caplog):
  with running(tokenizer, host=HostOptions(max_response_bytes=300)) as served:
    request = pb.GenerateRequest(
      token_ids=IDS,
      sampling=pb.SamplingParams(n=16),
      output=pb.OutputParams(logprobs=0),
      stopping=pb.StopParams(max_tokens=20, ignore_eos=True),
    )
    with pytest.raises(
      grpc.RpcError, match=r"message of \d+ bytes cannot be sent, the limit is 300; request fewer tokens"
    ) as caught:
      answer = getattr(served.generation, method)(request)
      for _ in answer if method == "Generate" else ():
        pass
    assert caught.value.code() is EXHAUSTED and reason_of(caught.value) == "ANSWER_TOO_LARGE"
    served.wait_until(lambda: len(served.generations) == 0 and served.engine.num_live == 0)
    assert_serves(served)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.catalogue("H2")
@pytest.mark.parametrize(
  "metadata",
  [(("x-large", "a" * 20_000),), tuple((f"x-{index}", "") for index in range(10_000))],
  ids=["large", "many"],
)
def test_more_metadata_than_allowed(served, metadata):
  small = (("x-large", "a" * 12_000),)
  served.generation.GenerateUnary(
    pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=1)), metadata=small
  )
  with pytest.raises(grpc.RpcError) as caught:
    served.generation.GenerateUnary(pb.GenerateRequest(token_ids=IDS), metadata=metadata)
  assert caught.value.code() is EXHAUSTED
  assert_serves(served)


def test_the_settings_on_the_wire(tokenizer):
  options = HostOptions(max_concurrent_streams=17, max_metadata_bytes=5000)
  with running(tokenizer, host=options) as served, http2.Connection(served.address) as connection:
    connection.send(http2.PREFACE, http2.frame(http2.SETTINGS))
    settings = dict(struct.iter_unpack(">HI", connection.wait_for(http2.SETTINGS)))
  assert settings[http2.MAX_CONCURRENT_STREAMS] == 17
  assert settings[http2.MAX_HEADER_LIST_SIZE] == 5000


def test_more_streams_than_a_connection_may_have_wait_in_the_client(tokenizer):
  with running(tokenizer, host=HostOptions(max_concurrent_streams=2)) as served:
    assert_serves(served)  # what is sent before the server's settings arrive may be refused
    served.runner.go.clear()
    request = pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)
    calls = [served.generation.GenerateUnary.future(request) for _ in range(4)]
    served.wait_until(lambda: len(served.generations) == 2)
    with grpc.insecure_channel(served.address, (("grpc.use_local_subchannel_pool", 1),)) as other:
      calls.append(pb_grpc.GenerationServiceStub(other).GenerateUnary.future(request))
      served.wait_until(lambda: len(served.generations) == 3)
      for call in calls:
        call.cancel()
      served.runner.go.set()
      served.wait_until(lambda: len(served.generations) == 0 and served.engine.num_live == 0)


def test_an_old_connection_is_closed_and_its_call_may_end(tokenizer):
  options = HostOptions(max_connection_age_s=0.1, max_connection_age_grace_s=60)
  with running(tokenizer, host=options) as served:
    served.runner.seconds = 0.002
    with http2.Connection(served.address) as connection:
      connection.send(http2.PREFACE, http2.frame(http2.SETTINGS))
      assert b"max_age" in connection.wait_for(http2.GOAWAY)
    call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
    assert len(token_ids_of(list(call))) == 400
    assert_serves(served)  # over another connection, which the caller does not notice


def test_a_connection_whose_grace_is_over_is_cut(tokenizer):
  options = HostOptions(max_connection_age_s=0.1, max_connection_age_grace_s=0.1)
  with running(tokenizer, host=options) as served:
    served.runner.go.clear()
    call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
    with pytest.raises(grpc.RpcError) as caught:
      list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    served.runner.go.set()
    served.wait_until(lambda: len(served.generations) == 0 and served.engine.num_live == 0)


@pytest.mark.catalogue("B10")
def test_an_idle_connection_is_closed(tokenizer):
  with (
    running(tokenizer, host=HostOptions(max_connection_idle_s=0.1)) as served,
    http2.Connection(served.address) as connection,
  ):
    connection.send(http2.PREFACE, http2.frame(http2.SETTINGS))
    assert b"idle" in connection.wait_for(http2.GOAWAY)


@pytest.mark.catalogue("B4")
def test_a_client_that_answers_no_ping_is_gone(tokenizer):
  """As a machine that lost its power: its stream ends, and its pages come back."""
  options = HostOptions(keepalive_time_s=2, keepalive_timeout_s=0.1)
  with running(tokenizer, host=options) as served, http2.Connection(served.address) as connection:
    served.runner.go.clear()
    connection.send(
      http2.PREFACE,
      http2.frame(http2.SETTINGS),
      http2.frame(http2.SETTINGS, http2.ACK),
      http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.headers("/sluice.v1.GenerationService/Generate")),
      http2.frame(http2.DATA, http2.END_STREAM, 1, message(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))),
    )
    served.wait_until(lambda: served.generations.num_started == 1)
    served.wait_until(lambda: len(served.generations) == 0)
    assert http2.PING in {kind for kind, *_ in connection.frames()}
    served.runner.go.set()
    served.wait_until(lambda: served.engine.num_live == 0)


@pytest.mark.catalogue("H3")
def test_a_flood_of_pings_is_calmed(served):
  with http2.Connection(served.address) as connection:
    connection.send(http2.PREFACE, http2.frame(http2.SETTINGS))
    for _ in range(10):
      connection.send(http2.frame(http2.PING, payload=b"12345678"))
    code = struct.unpack(">I", connection.wait_for(http2.GOAWAY)[4:8])[0]
    assert code == http2.ENHANCE_YOUR_CALM
  assert_serves(served)


@pytest.mark.catalogue("H3")
@pytest.mark.parametrize("kind", ["settings", "pings", "window updates", "priorities", "empty data"])
def test_floods_of_frames_that_ask_for_nothing(served, kind):
  """Twenty thousand, of which no answer is read: the connection may go, and nobody else notices."""
  served.runner.seconds = 0.001
  beside = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER), timeout=60)
  first = next(beside)
  one = {
    "settings": http2.frame(http2.SETTINGS, payload=struct.pack(">HI", 4, 65535)),
    "pings": http2.frame(http2.PING, payload=b"12345678"),
    "window updates": http2.frame(8, payload=struct.pack(">I", 1)),
    "priorities": http2.frame(2, 0, 1, struct.pack(">IB", 0, 1)),
    "empty data": http2.frame(http2.DATA, 0, 1),
  }[kind]
  opening = http2.headers("/sluice.v1.GenerationService/Generate")
  with http2.Connection(served.address) as connection:
    connection.send(http2.PREFACE, http2.frame(http2.SETTINGS), http2.frame(http2.SETTINGS, http2.ACK))
    connection.send(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, opening))
    connection.hurry()
    for _ in range(200):
      connection.send(one * 100)
  assert len(token_ids_of([first, *beside])) == 400
  served.wait_until(lambda: len(served.generations) == 0 and served.engine.num_live == 0)
  assert_serves(served)


@pytest.mark.catalogue("H3")
def test_streams_opened_and_reset_at_once(served):
  """Rapid reset: whatever of them arrived is cancelled, and a stream beside them has every token."""
  served.runner.seconds = 0.002
  beside = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
  first = next(beside)
  opening = http2.headers("/sluice.v1.GenerationService/Generate")
  body = message(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
  with http2.Connection(served.address) as connection:
    connection.send(http2.PREFACE, http2.frame(http2.SETTINGS), http2.frame(http2.SETTINGS, http2.ACK))
    for stream in range(1, 4001, 2):
      connection.send(
        http2.frame(http2.HEADERS, http2.END_HEADERS, stream, opening),
        http2.frame(http2.DATA, http2.END_STREAM, stream, body),
        http2.frame(http2.RST_STREAM, 0, stream, struct.pack(">I", 8)),
      )
  assert len(token_ids_of([first, *beside])) == 400
  served.wait_until(lambda: len(served.generations) == 0 and served.engine.num_live == 0)
  assert_serves(served)


@pytest.mark.catalogue("B1")
def test_connections_that_break_leave_nothing_behind(served, caplog):
  """Half of them reset, at any moment: no request, no descriptor and no word of an error stays."""
  served.runner.seconds = 0.001
  rng = random.Random(3)
  body = message(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
  descriptors = len(os.listdir("/proc/self/fd"))
  for _ in range(100):
    with http2.Connection(served.address) as connection:
      opening = http2.headers(f"/sluice.v1.GenerationService/{rng.choice(('Generate', 'GenerateUnary'))}")
      connection.send(
        http2.PREFACE,
        http2.frame(http2.SETTINGS),
        http2.frame(http2.HEADERS, http2.END_HEADERS, 1, opening),
        http2.frame(http2.DATA, http2.END_STREAM, 1, body),
      )
      time.sleep(rng.random() * 0.01)
      if rng.random() < 0.5:
        connection.reset_on_close()
  served.wait_until(lambda: len(served.generations) == 0 and served.engine.num_live == 0)
  served.wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
  assert served.generations.num_started > 0
  assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.catalogue("H3")
def test_headers_without_end(served):
  """A flood of CONTINUATION frames costs its own stream, or the connection, and nothing else."""
  with http2.Connection(served.address) as connection:
    connection.send(http2.PREFACE, http2.frame(http2.SETTINGS), http2.frame(http2.SETTINGS, http2.ACK))
    connection.send(http2.frame(http2.HEADERS, 0, 1, http2.headers("/sluice.v1.GenerationService/Generate")))
    for index in range(2000):
      connection.send(http2.frame(http2.CONTINUATION, 0, 1, http2.block({f"x-{index}": "a" * 100})))
    connection.send(http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1))
    for kind, *_ in connection.frames():
      if kind == http2.RST_STREAM:
        break
  assert_serves(served)


@pytest.mark.catalogue("B14")
@pytest.mark.parametrize(
  "junk",
  [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\1" * 500, b"\xff" * 5000],
  ids=["HTTP/1.1", "TLS", "bytes"],
)
def test_what_is_no_http2_is_hung_up_on(served, junk, capfd):
  host, port = served.address.rsplit(":", 1)
  for _ in range(20):
    with socket.create_connection((host, int(port)), timeout=30) as connection:
      try:
        connection.sendall(junk)
        while connection.recv(65536):
          pass
      except ConnectionResetError:
        pass
  assert_serves(served)
  assert len(capfd.readouterr().err) < 2000


GOOD = pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=3, ignore_eos=True)).SerializeToString()
FRAMED = b"\0" + struct.pack(">I", len(GOOD)) + GOOD
INVALID, DEADLINE, UNIMPLEMENTED, TOO_LARGE, INTERNAL = b"3", b"4", b"12", b"8", b"13"


@pytest.mark.catalogue("B8", "B14")
@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
@pytest.mark.parametrize(
  "fields, body, status",
  [
    ({}, FRAMED, b"0"),
    ({}, b"", INVALID),
    ({}, b"\0\0", INVALID),
    ({}, b"\0\0\0\1\0too short", INVALID),
    ({}, b"\0\xff\xff\xff\xfftoo long", TOO_LARGE),
    ({}, b"\1" + FRAMED[1:], INTERNAL),  # from gRPC's core, as all of this kind
    ({"grpc-encoding": "gzip"}, b"\1\0\0\0\5abcde", INTERNAL),
    ({"grpc-timeout": "0S"}, FRAMED, DEADLINE),
    ({"grpc-timeout": "99999999H"}, FRAMED, b"0"),
    ({"grpc-timeout": "soon"}, FRAMED, INTERNAL),
    ({"x-bin": "!!!"}, FRAMED, INTERNAL),
    ({"X-Upper": "a"}, FRAMED, INTERNAL),
    ({":path": "nonsense"}, FRAMED, UNIMPLEMENTED),
  ],
)
def test_calls_that_no_library_would_make(quiet, method, fields, body, status):
  """Each is answered, none waits for ever, and only the good ones reach the engine."""
  started = quiet.generations.num_started
  opening = http2.headers(f"/sluice.v1.GenerationService/{method}", **fields)
  with http2.Connection(quiet.address) as connection:
    connection.send(
      http2.PREFACE,
      http2.frame(http2.SETTINGS),
      http2.frame(http2.SETTINGS, http2.ACK),
      http2.frame(http2.HEADERS, http2.END_HEADERS, 1, opening),
      http2.frame(http2.DATA, http2.END_STREAM, 1, body),
    )
    answer = b""
    for kind, flags, _, payload in connection.frames():
      if kind == http2.HEADERS:
        answer += payload
        if flags & http2.END_STREAM:
          break
  assert re.findall(rb"grpc-status.(\d+)", answer) == [status]
  assert quiet.generations.num_started - started == (status == b"0")
  assert_serves(quiet)


@pytest.fixture(scope="module")
def quiet(tokenizer):
  with running(tokenizer) as served:
    yield served


@pytest.mark.catalogue("B12")
@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
def test_a_call_whose_message_never_comes(quiet, monkeypatch, method):
  monkeypatch.setattr(call_interceptor, "_MESSAGE_TIMEOUT_S", 0.05)
  never = threading.Event()

  def messages():
    never.wait(180)
    return iter(())

  def lazily():
    yield from messages()

  call = quiet.channel.stream_stream(f"/sluice.v1.GenerationService/{method}")(lazily())
  with pytest.raises(grpc.RpcError, match="message did not arrive within 0.05 s; send it with the call") as caught:
    list(call)
  never.set()
  monkeypatch.undo()  # the next call may be slower
  assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED and reason_of(caught.value) == "DEADLINE_EXCEEDED"
  assert_serves(quiet)


@pytest.mark.catalogue("B13")
def test_a_refusal_is_such_that_a_client_may_retry(tokenizer):
  """No header goes before it, so a client with a retry policy obeys the pushback and gets its answer in the end."""
  config = tiny_config(max_num_seqs=1, max_queued_requests=1)
  policy = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.1s",
    "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}"""
  with (
    running(tokenizer, config=config) as served,
    grpc.insecure_channel(served.address, (("grpc.service_config", policy),)) as channel,
  ):
    served.runner.go.clear()
    first = [served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))]
    served.wait_until(lambda: served.engine.stats().num_running == 1)
    first.append(served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)))
    served.wait_until(lambda: len(served.generations) == 2)
    refused = []
    start = served.generations.start_generation

    async def watched(*arguments):
      try:
        return await start(*arguments)
      except Exception as error:
        refused.append(error)
        for each in first:  # the next attempt finds room
          each.cancel()
        served.runner.go.set()
        raise

    served.generations.start_generation = watched
    stub = pb_grpc.GenerationServiceStub(channel)
    call = stub.Generate(pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=5)), timeout=60)
    assert len(token_ids_of(list(call))) == 5
    assert len(refused) >= 1


def test_starting_says_when_to_retry(tokenizer):
  with running(tokenizer, serve=False) as served:
    with pytest.raises(grpc.RpcError) as caught:
      generate(served, token_ids=IDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason_of(caught.value) == "STARTING"
    assert detail_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1000
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"


def message(request: pb.GenerateRequest) -> bytes:
  """As gRPC frames it."""
  raw = request.SerializeToString()
  return b"\0" + struct.pack(">I", len(raw)) + raw
