"""A server that stands still, or that has lost a thread or a callback: its clients are told, and its process ends."""

import asyncio
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
import pytest

from engine.errors import ConfigError
from server.lifecycle import systemd_notify, watchdog
from server.lifecycle.host import Host, HostOptions
from server.lifecycle.watchdog import Watchdog, watch_threads
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tests.server.harness import endings_of, generate, reason_of, running

ROOT = pathlib.Path(__file__).resolve().parents[3]
IDS = pb.TokenIds(ids=[7, 8, 9])
FOREVER = pb.StopParams(max_tokens=400, ignore_eos=True)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def begin(served):
  call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER), timeout=60)
  next(call)
  return call


def assert_told_that_the_engine_is_dead(call) -> None:
  with pytest.raises(grpc.RpcError) as caught:
    list(call)
  assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason_of(caught.value) == "ENGINE_DEAD"
  assert caught.value.details() == "the engine has failed; retry on another server"


@pytest.mark.catalogue("D3")
def test_an_engine_that_stands_ends_the_server(tokenizer, capfd, caplog):
  with running(tokenizer, host=HostOptions(step_timeout_s=1.0, watchdog_grace_s=120)) as served:
    served.runner.seconds = 0.02
    watches = [
      health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service=name), timeout=60)
      for name in ("", "sluice.v1.GenerationService")
    ]
    assert [next(watch).status for watch in watches] == [SERVING, SERVING]
    calls = [begin(served) for _ in range(8)]
    served.runner.go.clear()
    for call in calls:
      assert_told_that_the_engine_is_dead(call)
    assert [next(watch).status for watch in watches] == [NOT_SERVING, NOT_SERVING]
    served.thread.join(180)
    assert served.exit_code == [1]
    with pytest.raises(grpc.RpcError) as caught:
      generate(served, token_ids=IDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
  assert re.search(r"the engine has been stuck for \d", caplog.text)
  stacks = capfd.readouterr().err
  assert "in run_until" in stacks and "lifetime.py" in stacks


def test_an_engine_that_dies_while_draining_is_no_success(tokenizer):
  with running(tokenizer) as served:
    served.runner.seconds = 0.02
    call = begin(served)
    served.stop()
    served.runner.fail = RuntimeError("too late")
    with pytest.raises(grpc.RpcError):
      list(call)
    served.thread.join(180)
    assert served.exit_code == [1]


@pytest.mark.catalogue("D11")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_engine_thread_that_dies_of_what_is_no_exception(tokenizer, kind):
  with running(tokenizer) as served:
    served.runner.seconds = 0.02
    call = begin(served)
    served.runner.fail = kind()
    assert_told_that_the_engine_is_dead(call)
    served.thread.join(180)
    assert served.exit_code == [1]


@pytest.mark.catalogue("D11")
def test_a_callback_of_ours_that_fails_ends_the_server(tokenizer, caplog):
  """What it carried is lost for calls that wait for it."""
  with running(tokenizer) as served:
    served.runner.seconds = 0.02
    call = begin(served)
    served.loop.call_soon_threadsafe(served.host._dispatch, [object()])
    assert_told_that_the_engine_is_dead(call)
    served.thread.join(180)
    assert served.exit_code == [1]
  assert "unhandled: Exception in callback" in caplog.text and "TypeError" in caplog.text


@pytest.mark.catalogue("D11")
def test_what_fails_alone_is_counted(tokenizer, caplog):
  """A task is one call's, and a callback of a library is that library's affair."""

  async def fail():
    raise ValueError("alone")

  def make_task():
    asyncio.ensure_future(fail())

  def of_a_connection():
    served.loop.call_exception_handler({"message": "a connection", "exception": OSError(24, ""), "transport": object()})

  with running(tokenizer) as served:
    served.runner.seconds = 0.002
    call = begin(served)
    for callback in (make_task, of_a_connection, lambda: int("a library's")):
      served.loop.call_soon_threadsafe(callback)
    served.wait_until(lambda: served.host._num_unhandled == 3)
    assert endings_of(list(call))[0].usage.completion_tokens == 400
  assert served.exit_code == [0]
  assert caplog.text.count("unhandled: ") == 3


@pytest.mark.catalogue("D11")
def test_any_thread_that_dies_is_told(monkeypatch, caplog):
  monkeypatch.setattr(threading, "excepthook", threading.excepthook)
  died: list[BaseException] = []
  watch_threads(died.append)
  errors = [RuntimeError("x"), SystemExit(0), KeyboardInterrupt(), MemoryError()]

  def work(error):
    raise error

  for error in errors:
    thread = threading.Thread(target=work, args=(error,), name="the worker")
    thread.start()
    thread.join()
  assert died == errors and caplog.text.count("the thread 'the worker' has died") == len(errors)


def test_a_process_that_was_stopped_as_a_whole_is_not_stuck():
  still = watchdog._Stillness()
  for beat, elapsed_s, stood_s in ((1.0, 9.0, 0.0), (1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (2.0, 2.0, 0.0), (2.0, 1.0, 1.0)):
    still.look(beat, elapsed_s)
    assert still.stood_s == stood_s

  class Clock:  # a clock that leaps an hour a look, as after SIGCONT; the engine turns at every second one
    now, looks = 0.0, 0

    @classmethod
    def monotonic(cls):
      cls.now += 3600.0
      return cls.now

    @classmethod
    def heartbeat(cls):
      cls.looks += 1
      return float(cls.looks // 2)

  async def look() -> list[str]:
    stuck: list[str] = []
    dog = Watchdog(timeout_s=0.04, grace_s=1, heartbeat=Clock.heartbeat, on_stuck=stuck.append, may_exit=False)
    dog.start_watching()
    while Clock.looks < 20 and not stuck:
      await asyncio.sleep(0.001)
    dog.stop_watching()
    return stuck

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(watchdog.time, "monotonic", Clock.monotonic)
    assert asyncio.run(look()) == []


# One process each, since they end hard. `how` is what happens in the device's 20th step.
_PROGRAM = """
import asyncio, ctypes, sys, threading, time
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduler import Scheduler
from server import main
from server.lifecycle import watchdog
from server.generation.generations import Generations
from server.lifecycle.host import Host, HostOptions
from server.generation.engine_client import LocalEngine
from server.generation.serving_state import Backend
from tests.fakes import FakeRunner

how = sys.argv[1]
steps = 0

class Runner(FakeRunner):
  def run_until(self, launched):
    global steps
    steps += 1
    time.sleep(0.001)
    if steps == 20:
      if how == "the engine":
        threading.Event().wait()
      elif how == "the event loop":
        loop.call_soon_threadsafe(time.sleep, 1000)
      elif how == "the interpreter":
        ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock
      elif how == "taking down":
        loop.call_soon_threadsafe(host._access_log.__setattr__, "close", lambda: time.sleep(1000))
        raise SystemExit(0)
      elif how == "a task":
        async def leave():
          sys.exit(0)
        loop.call_soon_threadsafe(lambda: asyncio.ensure_future(leave()))
    super().run_until(launched)

async def serve(composition, report):
  global loop, host
  loop = asyncio.get_running_loop()
  host = Host(HostOptions(port=0, step_timeout_s=1.0, watchdog_grace_s=1.0), may_exit=True)
  port = await host.start_listening()
  config = EngineConfig(vocab_size=400, max_model_len=512, num_blocks=256, block_size=8, max_num_seqs=8,
                        token_budgets=(8, 64), prefill_chunk=64)
  engine = LocalEngine(Engine(Scheduler(config), Runner(config), time.monotonic, host.emit))
  await host.serve(Backend(model="tiny", engine=engine, tokenizer=None, generations=Generations(engine, None),
                           load_s=0.0, warmup_s=0.0))
  print(port, flush=True)
  watchdog.exit_now(await host.wait_stopped())

main._serve = serve
sys.exit(main._main(["server"]) if main._parse(["server"]) else 9)
"""


@pytest.mark.catalogue("D3")
@pytest.mark.parametrize(
  "how, said",
  [
    ("the engine", "the engine has been stuck for"),
    ("the event loop", "the event loop has been stuck for"),
    ("the interpreter", "Timeout (0:00:02"),
    ("taking down", "Timeout (0:00:01"),
    ("a task", "error: something called exit(0) in the server"),
  ],
)
def test_the_process_ends_whatever_stands(how, said):
  with subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, how], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    try:
      assert process.stdout is not None
      port = process.stdout.readline().strip()
      with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = pb_grpc.GenerationServiceStub(channel).Generate(
          pb.GenerateRequest(token_ids=IDS, stopping=FOREVER), timeout=60
        )
        with pytest.raises(grpc.RpcError) as caught:
          list(call)
        # A loop that is told to leave cancels its tasks; elsewhere the connection is closed by the system.
        wanted = grpc.StatusCode.CANCELLED if how == "a task" else grpc.StatusCode.UNAVAILABLE
        assert caught.value.code() is wanted
      errors = process.communicate(timeout=180)[1]
    finally:
      process.kill()
  assert process.returncode == watchdog.EXIT_CODE, errors
  assert said in errors
  if how != "a task":
    assert "most recent call first" in errors, "no stacks"


def test_a_timeout_that_a_healthy_engine_would_miss():
  async def make():
    Host(HostOptions(step_timeout_s=0.2))

  with pytest.raises(ConfigError, match=r"step_timeout_s=0\.2 is below 0\.5, .* or set it to 0 for no watchdog"):
    asyncio.run(make())


def test_without_a_watchdog_nothing_is_watched(tokenizer):
  before = {thread.name for thread in threading.enumerate()}
  with running(tokenizer, host=HostOptions(step_timeout_s=0)) as served:
    generate(served, token_ids=IDS, stopping=pb.StopParams(max_tokens=2))
    assert "watchdog" not in {thread.name for thread in threading.enumerate()} - before


def test_the_loops_lag_is_measured():
  async def look() -> float:
    dog = Watchdog(timeout_s=0.8, grace_s=1, heartbeat=time.monotonic, on_stuck=pytest.fail, may_exit=False)
    dog.start_watching()
    while dog.lag_s < 0.1:
      await asyncio.sleep(0)
      time.sleep(0.3)  # longer than the 0.2 s between two looks
    dog.stop_watching()
    return dog.lag_s

  assert asyncio.run(look()) >= 0.1


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(tokenizer, tmp_path, monkeypatch, abstract):
  address = f"\0sluice-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
  with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
    systemd.bind(address)
    systemd.settimeout(60)
    monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    with running(tokenizer, host=HostOptions(step_timeout_s=1)):
      assert systemd.recv(1000) == b"READY=1\nSTATUS=serving"
      assert systemd.recv(1000) == b"WATCHDOG=1"
    heard = [systemd.recv(1000)]
    while heard[-1] == b"WATCHDOG=1":
      heard.append(systemd.recv(1000))
    assert heard[-1] == b"STOPPING=1\nSTATUS=draining"


def test_no_systemd_is_no_error(monkeypatch, tmp_path):
  for address in ("", "nonsense", str(tmp_path / "nobody")):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    systemd_notify.notify_systemd("READY=1")
  monkeypatch.delenv("NOTIFY_SOCKET")
  systemd_notify.notify_systemd("READY=1")
