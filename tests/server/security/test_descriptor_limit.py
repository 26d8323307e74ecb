"""More connections than a server may have, and no descriptor left: streams go on, and so does the server afterwards."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys

import grpc
import psutil
import pytest

from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from extensions.fake_device.device import expected_tokens
from server.host_options import HostOptions
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from server.security import descriptor_limit
from tests.server import http2
from tests.server.harness import CHILDREN, running, token_ids_of
from tests.server.test_main import DEMO, ROOT, wait_for_file

IDS = (7, 8, 9)
LIMIT, CONNECTIONS, CROWD = 300, 40, 400


def start(*arguments: str) -> subprocess.Popen:
  """A server that the system allows LIMIT descriptors, of which it has to ask for the last hundred."""
  limited = 'ulimit -Sn "$0" && ulimit -Hn "$1" && shift && exec "$@"'
  process = subprocess.Popen(
    ["sh", "-c", limited, str(LIMIT - 100), str(LIMIT), sys.executable, "-m", "server.main", *arguments],
    cwd=ROOT,
    stderr=subprocess.PIPE,
    text=True,
  )
  CHILDREN.append(process)
  return process


@contextlib.contextmanager
def serving(folder: pathlib.Path, *arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
  """Process and address; it drains at the end."""
  port_file = folder / "port"
  process = start(
    *("--fake_device", f"--model={DEMO}", "--fake_step_ms=5", "--port=0", f"--port_file={port_file}"), *arguments
  )
  try:
    yield process, f"127.0.0.1:{wait_for_file(port_file, process).strip()}"
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=180)[1]
    assert process.returncode == 0 and "0 KV blocks in use" in said and "Traceback" not in said, said
  finally:
    process.kill()
    process.communicate()


def asked(max_tokens: int) -> pb.GenerateRequest:
  return pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=IDS),
    sampling=pb.SamplingParams(temperature=0.0),
    stopping=pb.StopParams(max_tokens=max_tokens, ignore_eos=True),
  )


def expected(max_tokens: int) -> list[int]:
  params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
  return list(expected_tokens(IDS, params, vocab_size=2048, eos_token_ids=(2,))[0])


def crowd(address: str, stack: contextlib.ExitStack, count: int) -> list[http2.Connection]:
  """Connections that speak HTTP/2 and ask for nothing."""
  connections = [stack.enter_context(http2.Connection(address)) for _ in range(count)]
  for connection in connections:
    connection.send(http2.PREFACE, http2.frame(http2.SETTINGS))
  return connections


def assert_new_clients_are_served(address: str) -> None:
  with grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
    call = pb_grpc.GenerationServiceStub(channel).Generate(asked(5), timeout=60, wait_for_ready=True)
    assert token_ids_of(list(call)) == expected(5)


@pytest.mark.catalogue("B10")
@pytest.mark.parametrize("processes", [0, 2])
def test_more_connections_than_allowed_are_closed_at_once(tmp_path, processes):
  flags = f"--frontend_processes={processes}", f"--max_grpc_connections={CONNECTIONS}", "--http_port=-1"
  with serving(tmp_path, *flags) as (process, address), grpc.insecure_channel(address) as channel:
    server = psutil.Process(process.pid)
    several = [server, *server.children()]
    assert len(several) == 1 + processes
    assert [each.rlimit(psutil.RLIMIT_NOFILE) for each in several] == [(LIMIT, LIMIT)] * len(several)
    stream = pb_grpc.GenerationServiceStub(channel).Generate(asked(600))
    first = next(stream)
    with contextlib.ExitStack() as stack:
      kept = sum(next(each.frames(), None) is not None for each in crowd(address, stack, CROWD))
      # The stream's connection is one of them.
      assert kept == CONNECTIONS - 1
      assert all(each.num_fds() < LIMIT for each in several)
      with (
        grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),)) as late,
        pytest.raises(grpc.RpcError) as caught,
      ):
        pb_grpc.GenerationServiceStub(late).GenerateUnary(asked(5), timeout=30)
      assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert_new_clients_are_served(address)
    assert token_ids_of([first, *stream]) == expected(600)


@pytest.mark.catalogue("B10")
def test_no_descriptor_is_left(tmp_path):
  """It cannot be so by connections alone; somebody takes the descriptors away."""
  flags = f"--max_grpc_connections={CONNECTIONS}", "--http_port=-1"
  with serving(tmp_path, *flags) as (process, address), grpc.insecure_channel(address) as channel:
    server = psutil.Process(process.pid)
    stream = pb_grpc.GenerationServiceStub(channel).Generate(asked(600))
    messages = [next(stream)]
    few = server.num_fds() + 5
    server.rlimit(psutil.RLIMIT_NOFILE, (few, LIMIT))
    with contextlib.ExitStack() as stack:
      connections = crowd(address, stack, CONNECTIONS // 2)
      for connection in connections[:3]:
        assert next(connection.frames(), None) is not None
      messages += [next(stream) for _ in range(100)]  # it goes on
      assert server.num_fds() <= few
    server.rlimit(psutil.RLIMIT_NOFILE, (LIMIT, LIMIT))
    assert_new_clients_are_served(address)
    assert token_ids_of([*messages, *stream]) == expected(600)


@pytest.mark.catalogue("A1", "B10")
def test_a_drain_without_a_free_descriptor(tmp_path):
  """Streams come to their end, and so does the server, with what it has held for it."""
  flags = f"--max_grpc_connections={CONNECTIONS}", "--http_port=-1"
  with serving(tmp_path, *flags) as (process, address), grpc.insecure_channel(address) as channel:
    stream = pb_grpc.GenerationServiceStub(channel).Generate(asked(400))
    messages = [next(stream)]
    taken = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    free = min(set(range(LIMIT)) - taken)
    psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE, (free, LIMIT))
    process.send_signal(signal.SIGTERM)
    assert token_ids_of([*messages, *stream]) == expected(400)
    process.wait(60)


@pytest.mark.catalogue("B10")
def test_connections_for_which_there_is_no_room(tmp_path):
  process = start("--fake_device", f"--model={DEMO}", "--port=0", "--http_port=0", "--max_http_connections=1000")
  said = process.communicate(timeout=180)[1]
  assert process.returncode == 1 and said.splitlines()[-1] == (
    "error: max_grpc_connections=4096 and max_http_connections=1000 (of each process) may need 5352 descriptors, but "
    "the system allows 300; lower --max_grpc_connections and --max_http_connections, or raise the limit (ulimit -Hn, "
    "LimitNOFILE= of systemd)"
  ), said


def test_room_for_connections():
  descriptor_limit.check_descriptor_limit(HostOptions(max_grpc_connections=44), 300)
  descriptor_limit.check_descriptor_limit(HostOptions(max_grpc_connections=1 << 30), resource.RLIM_INFINITY)
  with pytest.raises(ConfigError, match=r"max_grpc_connections=45 \(of each process\) may need 301 descriptors"):
    descriptor_limit.check_descriptor_limit(HostOptions(max_grpc_connections=45), 300)
  with pytest.raises(ConfigError, match="max_grpc_connections=44 and max_http_connections=1 "):
    descriptor_limit.check_descriptor_limit(
      HostOptions(max_grpc_connections=44, max_http_connections=1, http_port=0), 300
    )


@pytest.mark.catalogue("B12")
def test_a_connection_that_never_says_a_word_is_closed(monkeypatch, tokenizer):
  monkeypatch.setattr("server.rpc.grpc_server._HANDSHAKE_TIMEOUT_S", 0.2)
  with running(tokenizer) as served:
    host, port = served.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as silent:
      while silent.recv(4096):  # settings, first
        pass
