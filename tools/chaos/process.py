"""Runs a server process and observes it from outside: signals, descriptors, memory, counters. Sends no generation."""

import contextlib
import dataclasses
import http.client
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
import psutil

from engine.errors import ConfigError
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tools.chaos.proto import chaos_pb2, chaos_pb2_grpc
from tools.measure import ROOT

READY_S = 180.0  # nothing is loaded or compiled, but the machine may be busy
_SETTLE_S = 30.0
# The fake device behind production's scheduler, pages and front end; small, so that clients reach the limits.
FAKE = (
  "--fake_device",
  "--debug_invariants",
  "--admin_port=0",
  "--max_model_len=512",
  "--num_blocks=2048",
  "--block_size=16",
  "--max_num_seqs=64",
  "--host=127.0.0.1",
)


@dataclasses.dataclass(frozen=True)
class Usage:
  """A process's resources, in bytes and counts."""

  rss: int
  fds: int
  threads: int


class Server:
  """One server process. Its context waits until it is ready, and kills it at the end if it still runs.

  Attributes:
    target: HOST:PORT of gRPC, once ready.
    http_port: the HTTP port, once ready.
  """

  def __init__(
    self, folder: pathlib.Path, flags: tuple[str, ...], *, name: str = "server", port: int = 0, module: str = ""
  ):
    """Args:
    folder: folder for its log and its port files.
    flags: flags added to FAKE; a later one wins.
    name: name of those files.
    port: the gRPC port; 0 is a free one.
    module: module to run instead of tools.chaos.server.
    """
    self._flags, self._port, self._module = flags, port, module or "tools.chaos.server"
    self.log = folder / f"{name}.log"
    self._files = [folder / f"{name}.{kind}" for kind in ("port", "http")]
    self.target, self.http_port = "", 0
    self._process: subprocess.Popen | None = None
    self._channel: grpc.Channel | None = None
    self._admin_channel: grpc.Channel | None = None

  def start(self) -> "Server":
    """Starts a process; returns at once."""
    for path in self._files:
      path.unlink(missing_ok=True)
    port_file, http_file = self._files
    own_flags = (f"--port={self._port}", f"--port_file={port_file}", "--http_port=0", f"--http_port_file={http_file}")
    with open(self.log, "w", encoding="utf-8") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-m", self._module, *FAKE, *own_flags, *self._flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
      )
    return self

  def is_ready(self) -> bool:
    """Whether it serves; sets the addresses.

    Raises:
      ConfigError: it has ended.
    """
    if self.process.poll() is not None:
      raise ConfigError(f"the server ended with exit code {self.process.returncode}: {self.last_words()}")
    port_file, http_file = self._files
    if not port_file.exists():  # the later of the two files
      return False
    self.target = f"127.0.0.1:{port_file.read_text('utf-8').strip()}"
    self.http_port = int(http_file.read_text("utf-8"))
    return True

  def wait_ready(self) -> "Server":
    """Returns once it serves. Raises ConfigError if it ends instead, or takes too long."""
    deadline = time.monotonic() + READY_S
    while not self.is_ready():
      if time.monotonic() > deadline:
        raise ConfigError(f"the server was not ready after {READY_S:g} s: {self.last_words()}")
      time.sleep(0.02)
    return self

  def __enter__(self) -> "Server":
    try:
      return self.start().wait_ready()
    except BaseException:
      self.kill()
      raise

  def __exit__(self, *_: object) -> None:
    self.kill()

  @property
  def process(self) -> subprocess.Popen:
    """The latest started process."""
    assert self._process is not None, "start() comes first"
    return self._process

  @property
  def port(self) -> int:
    """The gRPC port."""
    return int(self.target.rsplit(":", 1)[1])

  def terminate(self) -> None:
    """Sends SIGTERM."""
    self.process.send_signal(signal.SIGTERM)

  def kill(self) -> None:
    """Sends SIGKILL and waits for the end."""
    for channel in (self._channel, self._admin_channel):
      if channel is not None:
        channel.close()
    self._channel = self._admin_channel = None
    if self._process is not None and self._process.poll() is None:
      self._process.kill()
    if self._process is not None:
      self._process.wait()

  def last_words(self) -> str:
    """Returns the last line of its log."""
    lines = self.log.read_text("utf-8", errors="replace").strip().splitlines()
    return (lines or ["it said nothing"])[-1]

  @property
  def channel(self) -> grpc.Channel:
    """The channel for observing the server."""
    if self._channel is None:
      self._channel = grpc.insecure_channel(self.target)
    return self._channel

  def is_serving(self) -> bool:
    """Returns whether its health service reports generation as SERVING."""
    request = health_pb2.HealthCheckRequest(service="sluice.v1.GenerationService")
    with contextlib.suppress(grpc.RpcError):
      health: Any = health_pb2_grpc.HealthStub(self.channel)
      answer = health.Check(request, timeout=10)
      return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False

  def load(self, steps_after_s: float | None = None) -> pb.GetLoadResponse:
    """Returns the response to GetLoad."""
    return pb_grpc.ModelServiceStub(self.channel).GetLoad(pb.GetLoadRequest(steps_after_s=steps_after_s), timeout=30)

  def usage(self) -> Usage:
    """Returns the process's resources now."""
    process = psutil.Process(self.process.pid)
    with process.oneshot():
      return Usage(process.memory_info().rss, process.num_fds(), process.num_threads())

  def num_connections(self) -> int:
    """Returns the number of established connections."""
    connections = psutil.Process(self.process.pid).net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)

  def metrics(self) -> dict[str, float]:
    """Returns all samples of /metrics except histogram buckets, as name or name{label=value,...}."""
    connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=30)
    try:
      connection.request("GET", "/metrics")
      text = connection.getresponse().read().decode()
    finally:
      connection.close()
    found = {}
    for family in text_string_to_metric_families(text):
      for sample in family.samples:
        if "le" not in sample.labels:
          labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
          found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found

  def books(self) -> chaos_pb2.GetInvariantsResponse:
    """Returns its counters of accepted, ended and live requests."""
    if self._admin_channel is None:
      found = re.search(r"\badmin +(\S+:\d+)", self.log.read_text("utf-8"))
      assert found is not None, "a server with an admin port logs its address"
      self._admin_channel = grpc.insecure_channel(found[1])
    stub = chaos_pb2_grpc.ChaosServiceStub(self._admin_channel)
    return stub.GetInvariants(chaos_pb2.GetInvariantsRequest(), timeout=30)

  def settle(self) -> list[str]:
    """Waits until nothing is in flight; returns descriptions of what is still held."""
    deadline = time.monotonic() + _SETTLE_S
    while held := self._held():
      if time.monotonic() > deadline:
        break
      time.sleep(0.05)
    return held

  def _held(self) -> list[str]:
    books = self.books()
    held = {
      "requests": books.requests_live,
      "generations": books.generations_live,
      "KV blocks": books.kv_blocks_in_use,
    }
    return [f"{count} {name} are held" for name, count in held.items() if count]

  def imbalance(self) -> list[str]:
    """Returns faults in: accepted = finished + failed + cancelled + in flight, of requests and of generations."""
    books = self.books()
    faults = [] if books.enabled and books.checks_total else ["the server checks no invariants"]
    if books.breaches_total:
      faults.append(f"an invariant is broken: {books.breach}")
    for name, accepted, ended in (
      (
        "requests",
        books.requests_accepted_total,
        (
          books.requests_finished_total,
          books.requests_failed_total,
          books.requests_cancelled_total,
          books.requests_live,
        ),
      ),
      (
        "generations",
        books.generations_started_total,
        (
          books.generations_finished_total,
          books.generations_failed_total,
          books.generations_cancelled_total,
          books.generations_live,
        ),
      ),
    ):
      if accepted != sum(ended):
        faults.append(f"{accepted} {name} accepted, finished, failed, cancelled and in flight are {ended}")
    return faults + self._disagreement()

  def _disagreement(self) -> list[str]:
    """Returns disagreements between counters of endings, once nothing is in flight."""
    books, load, metrics = self.books(), self.load(), self.metrics()
    if books.requests_live:
      return []
    accepted = books.requests_accepted_total
    ended = sum(value for name, value in metrics.items() if name.startswith("sluice_requests_finished_total"))
    if accepted == ended == load.requests_finished_total:
      return []
    return [f"{accepted} requests accepted, {ended:g} ended by the metrics, {load.requests_finished_total} by GetLoad"]
