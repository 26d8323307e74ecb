"""Runs a router in the test's process, on real sockets."""

import asyncio
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import re
import threading
import time

import httpx
import uvloop

from server.router.__main__ import RouterProgram
from server.router.router_settings import RouterSettings

FAST = {"probe_period_s": 0.05, "probe_timeout_s": 0.3, "replica_timeout_s": 0.4, "port": 0}


@dataclasses.dataclass
class RoutedServer:
  """A running router.

  Attributes:
    http: a client of it.
    program: its insides.
    stop: begins its drain, as SIGTERM does.
  """

  http: httpx.Client
  program: RouterProgram
  loop: asyncio.AbstractEventLoop

  def stop(self) -> None:
    self.loop.call_soon_threadsafe(self.program.request_stop)

  def wait_ready(self, count: int) -> None:
    """Returns when exactly `count` replicas are in the rotation."""
    wait_until(lambda: self.http.get("/ready").json()["replicas_ready"] == count)

  def value(self, name: str, **labels: str) -> float:
    """Returns the value of a series of /metrics; 0.0 if there is none."""
    want = set(labels.items())
    for line in self.http.get("/metrics").text.splitlines():
      match = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
      if match and want <= set(re.findall(r'(\w+)="([^"]*)"', match[1] or "")):
        return float(match[2])
    return 0.0


def wait_until(condition) -> None:
  give_up_at = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < give_up_at, "the condition never came to hold"
    time.sleep(0.01)


@contextlib.contextmanager
def running_router(replicas: Sequence[str], **changes) -> Iterator[RoutedServer]:
  """Runs a router until the block ends; it must end its drain by itself."""
  settings = RouterSettings(replicas=tuple(replicas), **FAST | changes)
  settings.check_router()
  started: dict = {}
  is_started = threading.Event()

  async def run() -> None:
    try:
      started["program"], started["loop"] = RouterProgram(settings), asyncio.get_running_loop()
      await started["program"].start_router()
    except BaseException as error:
      started["error"] = error
      raise
    finally:
      is_started.set()
    await started["program"].wait_stopped()

  def run_loop() -> None:
    with contextlib.suppress(Exception):  # raised again below
      asyncio.run(run(), loop_factory=uvloop.new_event_loop)

  thread = threading.Thread(target=run_loop, daemon=True)
  thread.start()
  is_started.wait(60)
  if "error" in started:
    raise started["error"]
  with httpx.Client(base_url=f"http://127.0.0.1:{started['program'].port}", timeout=30) as client:
    server = RoutedServer(client, started["program"], started["loop"])
    try:
      yield server
    finally:
      with contextlib.suppress(RuntimeError):  # it has ended
        server.stop()
      thread.join(60)
      assert not thread.is_alive(), "the router did not stop"
