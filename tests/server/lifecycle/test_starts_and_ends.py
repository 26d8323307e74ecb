"""A server from its first line to its last: drains, kills, signals at any time, and that nothing stays behind."""

from concurrent.futures import ThreadPoolExecutor
import gc
import os
import pathlib
import random
import signal
import socket
import threading
import time

import grpc
import pytest

from engine.sampling_params import SamplingParams
from extensions.fake_device.device import expected_tokens
from server.client import Client, SluiceError
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.harness import generate, running
from tests.server.http2 import ACK, PREFACE, SETTINGS, frame
from tests.server.test_main import DEMO, SMALL, start, wait_for_file

IDS = pb.TokenIds(ids=[7, 8, 9])
FOREVER = pb.StopParams(max_tokens=400, ignore_eos=True)


def start_fake(folder: pathlib.Path, *arguments: str, **more):
  """A process on the fake device; its port file is `folder`/port."""
  flags = ("--fake_device", "--debug_invariants", f"--model={DEMO}", "--port=0", f"--port_file={folder / 'port'}")
  flags += ("--token_budgets=8,128", "--prefill_chunk=64", "--max_num_seqs=64")
  return start(*flags, *arguments, module="tools.chaos.server", **more)


def text_of(path: pathlib.Path) -> str | None:
  """None if there is no such file, which another process may take away at any moment."""
  try:
    return path.read_text()
  except FileNotFoundError:
    return None


def asked(serial: int) -> dict:
  return {"max_tokens": 80 + serial, "temperature": 0.7, "seed": serial, "ignore_eos": True}


def expect(info, prompt: list[int], serial: int) -> list[int]:
  tokens, _ = expected_tokens(
    prompt, SamplingParams(**asked(serial)), vocab_size=info.vocab_size, eos_token_ids=tuple(info.eos_token_ids)
  )
  return list(tokens)


@pytest.mark.catalogue("A1")
@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.long)])
def test_drains_of_64_streams(tmp_path, count):
  """All that were accepted come to their end, every token as expected; what was not is told so; nothing is left."""
  rng = random.Random(11)
  for trial in range(count):
    (tmp_path / "port").unlink(missing_ok=True)
    process = start_fake(tmp_path, "--fake_step_ms=2", "--drain_delay_s=0.1", "--drain_timeout_s=120")
    try:
      with Client(f"127.0.0.1:{wait_for_file(tmp_path / 'port', process).strip()}") as client:
        info = client.model_info()
        begun = threading.Semaphore(0)

        def stream(serial: int, client=client, info=info, begun=begun) -> bool:
          prompt = [5, 6, 7 + serial]
          tokens, ended = [], False
          try:
            with client.stream(prompt, **asked(serial)) as pieces:
              for piece in pieces:
                begun.release()
                tokens += piece.token_ids
                ended = ended or piece.ending is not None
          except SluiceError as error:
            begun.release()
            assert (error.code, tokens) == (grpc.StatusCode.UNAVAILABLE, []), error
            return False
          assert ended and tokens == expect(info, prompt, serial)
          return True

        with ThreadPoolExecutor(64) as pool:
          streams = [pool.submit(stream, serial) for serial in range(64)]
          for _ in range(rng.randrange(1, 200)):
            begun.acquire(timeout=60)
          process.send_signal(signal.SIGTERM)
          finished = [future.result(180) for future in streams]
      said = process.communicate(timeout=180)[1]
    finally:
      process.kill()
    assert process.returncode == 0 and "0 KV blocks in use" in said and said.endswith("stopped, exit code 0\n"), said
    assert any(finished), trial


@pytest.mark.catalogue("A3")
def test_a_second_signal_does_not_wait_for_a_stuck_engine(tokenizer):
  """Everything else here would wait for ten minutes."""
  host = HostOptions(step_timeout_s=600, watchdog_grace_s=600, drain_timeout_s=600)
  with running(tokenizer, host=host) as served:
    served.runner.go.clear()
    call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER), timeout=60)
    served.wait_until(lambda: served.runner.held)  # else it may never begin
    served.stop()
    served.stop()
    with pytest.raises(grpc.RpcError) as caught:
      list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == ("the server shut down before this request finished; retry on another server")
    served.thread.join(180)
    assert served.exit_code == [1], "an engine that did not stop is no success"


@pytest.mark.catalogue("A4")
@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.long)])
def test_kills_and_restarts(tmp_path, count):
  """At any moment, on the same files: the next one is ready, and never takes an old port file for its own."""
  rng = random.Random(4)
  for _ in range(count):
    stale = text_of(tmp_path / "port")
    process = start_fake(tmp_path, f"--trace_file={tmp_path / 'trace'}", f"--access_log={tmp_path / 'log'}")
    try:
      while stale is not None and text_of(tmp_path / "port") == stale:
        assert process.poll() is None
        time.sleep(0.005)
      if rng.random() < 0.3:
        time.sleep(rng.random())
        process.kill()
        continue
      with Client(f"127.0.0.1:{wait_for_file(tmp_path / 'port', process).strip()}") as client:
        info = client.model_info()
        assert list(client.generate([5, 6, 7], **asked(1)).token_ids) == expect(info, [5, 6, 7], 1)
        with client.stream([5, 6, 8], **asked(2)) as pieces:
          next(iter(pieces))
          process.kill()
          with pytest.raises(SluiceError) as caught:
            for _ in pieces:
              pass
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    finally:
      process.kill()
      process.communicate()
  (tmp_path / "port").unlink(missing_ok=True)
  process = start_fake(tmp_path)
  wait_for_file(tmp_path / "port", process)
  process.send_signal(signal.SIGTERM)
  assert (process.communicate(timeout=180), process.returncode)[1] == 0


@pytest.mark.catalogue("A8")
def test_a_signal_while_compiling():
  process = start("--port=0", *SMALL, "--kv_cache_mb=64")
  assert process.stderr is not None
  try:
    said = ""
    while "compile: " not in said:
      line = process.stderr.readline()
      assert line, said
      said += line
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=180)[1]
  finally:
    process.kill()
  # It may have become ready in the meantime.
  assert process.returncode == 0 and said.endswith(("stopped while starting\n", "stopped, exit code 0\n")), said


@pytest.mark.catalogue("A9")
def test_idle_connections_end_with_the_server(tokenizer):
  """200 that never call, and 50 over HTTP that keep alive: closed at once, though the drain may take ten minutes."""
  with running(tokenizer, host=HostOptions(http_port=0, drain_timeout_s=600)) as served:
    port = int(served.address.rsplit(":", 1)[1])
    idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(200)]
    web = [socket.create_connection(("127.0.0.1", served.host.http_port), timeout=60) for _ in range(50)]
    for connection in idle:
      connection.sendall(PREFACE + frame(SETTINGS))
    for connection in idle:  # it has read all, or closing would reset the connection
      said = b""
      while frame(SETTINGS, ACK) not in said:
        said += connection.recv(1000)
    for connection in web:
      connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
      assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
    served.stop()
    for connection in (*idle, *web):
      while connection.recv(1 << 16):
        pass
      connection.close()
    served.thread.join(180)
    assert served.exit_code == [0]


def held() -> tuple[int, int, int]:
  """Descriptors, Python's threads and the system's of this process."""
  gc.collect()
  return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))


@pytest.mark.catalogue("A10")
@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.long)])
def test_nothing_stays_of_servers_that_ended(tokenizer, count):
  """gRPC's own threads come and go; they may not grow with the number of servers."""

  def cycle() -> None:
    with running(tokenizer, host=HostOptions(http_port=0)) as served:
      generate(served, token_ids=IDS, stopping=pb.StopParams(max_tokens=2))

  for _ in range(5):
    cycle()
  files, threads, tasks = held()
  for _ in range(count):
    cycle()
  for _ in range(1000):  # what gRPC closes it closes a little later
    now = held()
    if now[0] <= files and now[1] <= threads and now[2] <= tasks + 16:
      break
    time.sleep(0.05)
  assert now[0] <= files and now[1] <= threads, (now, (files, threads, tasks))
  assert now[2] <= tasks + 16, (now, (files, threads, tasks))


@pytest.mark.catalogue("D14")
def test_full_disks(tmp_path):
  """Access log, step trace and standard error on a disk that takes nothing: served, ended, and counted."""
  port_file, http_port_file = tmp_path / "port", tmp_path / "http_port"
  with open("/dev/full", "w") as full:
    process = start_fake(
      tmp_path,
      "--access_log=/dev/full",
      "--trace_file=/dev/full",
      f"--http_port_file={http_port_file}",
      stderr=full,
    )
    try:
      with Client(f"127.0.0.1:{wait_for_file(port_file, process).strip()}") as client:
        info = client.model_info()
        for serial in range(4):
          assert list(client.generate([5, 6], **asked(serial)).token_ids) == expect(info, [5, 6], serial)
      with socket.create_connection(
        ("127.0.0.1", int(wait_for_file(http_port_file, process))), timeout=60
      ) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        metrics = b""
        while piece := connection.recv(1 << 16):
          metrics += piece
      assert b"sluice_access_log_lost_lines_total 5.0" in metrics
      process.send_signal(signal.SIGTERM)
      process.wait(180)
    finally:
      process.kill()
  assert process.returncode == 0
