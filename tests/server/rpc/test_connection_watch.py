"""What a server says of connections to its gRPC port that end without a call. Real sockets."""

import asyncio
import contextlib
import logging
import re
import socket

import grpc
from grpc._cython import cygrpc
import pytest

from server.client import Client
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from server.rpc import connection_watch
from tests.server.certificates import KEY, served_serial, tls_options
from tests.server.harness import Served, running

JUNK = {
  "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
  "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\1" * 500,
  "bytes": b"\xff" * 5000,
  "nothing": b"",
}
UNCOUNTED = (("grpc.enable_channelz", 0),)  # clients of the server's own process


def connect(served: Served) -> socket.socket:
  host, port = served.address.rsplit(":", 1)
  return socket.create_connection((host, int(port)), timeout=30)


def send_junk(served: Served, junk: bytes, count: int) -> None:
  for _ in range(count):
    with connect(served) as connection, contextlib.suppress(ConnectionError):
      connection.sendall(junk)
      connection.shutdown(socket.SHUT_WR)
      while connection.recv(65536):
        pass


@contextlib.contextmanager
def client(served: Served):
  """Has a connection once it has called."""
  with grpc.insecure_channel(served.address, options=UNCOUNTED) as channel:
    yield channel


def call(channel: grpc.Channel) -> None:
  pb_grpc.ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())


def on_loop(served: Served, coroutine):
  return asyncio.run_coroutine_threadsafe(coroutine, served.loop).result(60)


def counted(served: Served) -> int:
  """How many more ended without a call; the loop has had time to see the last of them go."""
  return on_loop(served, served.host.connections.ended_without_call())


def wait_for(served: Served, expected: int) -> None:
  """A connection is over for its client before it is for the server."""
  seen = 0

  def all_seen() -> bool:
    nonlocal seen
    seen += counted(served)
    return seen >= expected

  served.wait_until(all_seen)
  assert seen == expected
  assert counted(served) == 0


@pytest.fixture
def fresh(tokenizer, monkeypatch):
  """A server that nobody has connected to, which says nothing unless asked."""
  monkeypatch.setattr(connection_watch, "INTERVAL_S", 3600.0)
  with running(tokenizer) as served:
    assert served.host.connections._server_id is not None
    counted(served)
    yield served


@pytest.mark.catalogue("B14")
@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_connections_that_came_for_nothing_are_counted(fresh, junk):
  send_junk(fresh, junk, 20)
  wait_for(fresh, 20)


@pytest.mark.catalogue("B14")
def test_clients_are_not_counted(fresh):
  """Be they idle, at work or gone, and with others between them."""
  with client(fresh) as idle, client(fresh) as busy:
    call(idle)
    call(busy)
    assert counted(fresh) == 0
    for _ in range(5):
      with client(fresh) as passing:
        call(passing)
      call(busy)
    send_junk(fresh, JUNK["bytes"], 3)
    wait_for(fresh, 3)
    with connect(fresh):  # says nothing, and is there still
      assert counted(fresh) == 0
    wait_for(fresh, 1)
    call(idle)
  assert counted(fresh) == 0


@pytest.mark.catalogue("B14")
def test_one_line_for_all(fresh, caplog):
  for junk in JUNK.values():
    send_junk(fresh, junk, 50)
  with caplog.at_level(logging.WARNING, "server.rpc.connection_watch"):
    fresh.wait_until(lambda: not has_junk(fresh))
    for _ in range(3):
      on_loop(fresh, fresh.host.connections.tell_counts())
  lines = [record.getMessage() for record in caplog.records if record.name == "server.rpc.connection_watch"]
  assert len(lines) == 1
  assert lines[0].startswith("gRPC port: 200 connections ended without a call")


def has_junk(served: Served) -> bool:
  """Whether a connection is open still."""
  return bool(on_loop(served, served.host.connections.open_peers()))


@pytest.mark.catalogue("B14")
def test_lines_come_by_themselves(tokenizer, monkeypatch, caplog):
  monkeypatch.setattr(connection_watch, "INTERVAL_S", 0.05)

  def told() -> int:
    texts = [record.getMessage() for record in caplog.records if record.name == "server.rpc.connection_watch"]
    return sum(int(found.group(1)) for text in texts if (found := re.match(r"gRPC port: (\d+) ", text)))

  with caplog.at_level(logging.WARNING, "server.rpc.connection_watch"), running(tokenizer) as served:
    send_junk(served, JUNK["HTTP/1.1"], 30)
    served.wait_until(lambda: told() >= 30)
    assert told() == 30


@pytest.mark.catalogue("B14")
def test_with_tls(tokenizer, secrets, authority, monkeypatch):
  """Handshakes that fail are never numbered by gRPC, and counted all the same."""
  monkeypatch.setattr(connection_watch, "INTERVAL_S", 3600.0)
  with running(tokenizer, host=tls_options(secrets, api_key_file=str(secrets / "keys"))) as served:
    counted(served)
    with Client(served.address, tls_ca_file=str(authority.file), api_key=KEY) as good:
      good.model_info()
      assert counted(served) == 0
      for junk in JUNK.values():
        send_junk(served, junk, 5)
      wait_for(served, 20)
      served_serial(served.address, authority)  # a good handshake, and nothing after it
      wait_for(served, 1)
      good.model_info()
    assert counted(served) == 0


@pytest.mark.parametrize("answer", [AttributeError("no such name"), ValueError("no such server"), b"{}", b"nonsense"])
def test_a_grpc_that_does_not_tell(tokenizer, monkeypatch, caplog, answer):
  """Then nothing is counted, which is said once, and the server serves."""

  def asked(*_) -> bytes:
    if isinstance(answer, Exception):
      raise answer
    return answer

  monkeypatch.setattr(cygrpc, "channelz_get_servers", asked)
  with (
    caplog.at_level(logging.INFO, "server.rpc.connection_watch"),
    running(tokenizer) as served,
    client(served) as channel,
  ):
    call(channel)
    send_junk(served, JUNK["bytes"], 3)
    assert served.host.connections._server_id is None
    assert counted(served) == 0
  lines = [record.getMessage() for record in caplog.records if record.name == "server.rpc.connection_watch"]
  assert len(lines) == 1
  assert lines[0].startswith("connections without a call are not counted")
