"""A server in a process of its own, seen from outside: signals, descriptors, memory, counters. Sends no generation."""

import contextlib
import dataclasses
import http.client
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
import psutil

from engine.errors import ConfigError
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tools.measure import ROOT

READY_S = 60.0  # nothing is loaded or compiled, but the machine may be busy
_SETTLE_S = 30.0
# The fake device behind the scheduler, pages and front end of production; small, so that limits are met.
FAKE = (
  "--fake_device",
  "--max_model_len=512",
  "--num_blocks=4096",
  "--block_size=16",
  "--max_num_seqs=64",
  "--host=127.0.0.1",
)


@dataclasses.dataclass(frozen=True)
class Usage:
  """What a process holds. Bytes and counts."""

  rss: int
  fds: int
  threads: int


class Server:
  """One server process. As a context it is ready, and killed in the end if it still runs.

  Attributes:
    target: HOST:PORT of gRPC, once ready.
    http_port: of HTTP, once ready.
  """

  def __init__(
    self, folder: pathlib.Path, flags: tuple[str, ...], *, name: str = "server", port: int = 0, module: str = ""
  ):
    """Args:
    folder: for its log and its port files.
    flags: beside those of FAKE; a later one wins.
    name: of those files.
    port: for gRPC; 0 is a free one.
    module: run in place of server.main.
    """
    self._flags, self._port, self._module = flags, port, module or "server.main"
    self.log = folder / f"{name}.log"
    self._files = [folder / f"{name}.{kind}" for kind in ("port", "http")]
    self.target, self.http_port = "", 0
    self._process: subprocess.Popen | None = None
    self._channel: grpc.Channel | None = None

  def start(self) -> "Server":
    """Begins a process; returns at once."""
    for path in self._files:
      path.unlink(missing_ok=True)
    port_file, http_file = self._files
    ours = (f"--port={self._port}", f"--port_file={port_file}", "--http_port=0", f"--http_port_file={http_file}")
    with open(self.log, "w", encoding="utf-8") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-m", self._module, *FAKE, *ours, *self._flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
      )
    return self

  def is_ready(self) -> bool:
    """Whether it serves; fills in the addresses.

    Raises:
      ConfigError: it has ended.
    """
    if self.process.poll() is not None:
      raise ConfigError(f"the server ended with exit code {self.process.returncode}: {self.last_words()}")
    port_file, http_file = self._files
    if not port_file.exists():  # the last of both
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
    """Of the latest start."""
    assert self._process is not None, "start() comes first"
    return self._process

  @property
  def port(self) -> int:
    """Of gRPC."""
    return int(self.target.rsplit(":", 1)[1])

  def terminate(self) -> None:
    """SIGTERM."""
    self.process.send_signal(signal.SIGTERM)

  def kill(self) -> None:
    """SIGKILL, and waits for it."""
    if self._channel is not None:
      self._channel.close()
      self._channel = None
    if self._process is not None and self._process.poll() is None:
      self._process.kill()
    if self._process is not None:
      self._process.wait()

  def last_words(self) -> str:
    """The last line of its log."""
    lines = self.log.read_text("utf-8", errors="replace").strip().splitlines()
    return (lines or ["it said nothing"])[-1]

  @property
  def channel(self) -> grpc.Channel:
    """Ours to it, for looking."""
    if self._channel is None:
      self._channel = grpc.insecure_channel(self.target)
    return self._channel

  def is_serving(self) -> bool:
    """What its health service says of generation."""
    request = health_pb2.HealthCheckRequest(service="sluice.v1.GenerationService")
    with contextlib.suppress(grpc.RpcError):
      answer = health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=10)
      return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False

  def load(self, steps_after_s: float | None = None) -> pb.GetLoadResponse:
    """GetLoad."""
    return pb_grpc.ModelServiceStub(self.channel).GetLoad(pb.GetLoadRequest(steps_after_s=steps_after_s), timeout=30)

  def usage(self) -> Usage:
    """What it holds now."""
    process = psutil.Process(self.process.pid)
    with process.oneshot():
      return Usage(process.memory_info().rss, process.num_fds(), process.num_threads())

  def metrics(self) -> dict[str, float]:
    """All samples of /metrics but histograms' buckets, as name or name{label=value,...}."""
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

  def settle(self) -> list[str]:
    """Waits until nothing is in flight; returns what is held all the same."""
    deadline = time.monotonic() + _SETTLE_S
    while held := self._held():
      if time.monotonic() > deadline:
        break
      time.sleep(0.1)
    return held

  def _held(self) -> list[str]:
    metrics = self.metrics()
    names = ("sluice_requests_running", "sluice_requests_waiting", "sluice_kv_blocks_used", "sluice_generations_live")
    return [f"{name} is {metrics[name]:g}" for name in names if metrics[name]]

  def num_tasks(self) -> int:
    """Tasks of its event loop."""
    return round(self.metrics()["sluice_event_loop_tasks"])

  def accepted(self) -> int:
    """Requests that it took so far."""
    return round(self.metrics()["sluice_requests_accepted_total"])

  def imbalance(self) -> list[str]:
    """What is wrong with: requests accepted = ended, well or not, + in flight."""
    metrics = self.metrics()
    accepted = metrics["sluice_requests_accepted_total"]
    ended = total(metrics, "sluice_requests_finished_total")
    live = metrics["sluice_requests_running"] + metrics["sluice_requests_waiting"]
    if accepted == ended + live:
      return []
    return [f"{accepted:g} requests were accepted, {ended:g} have ended and {live:g} are in flight"]


def total(metrics: dict[str, float], name: str) -> float:
  """A counter over all its labels."""
  return sum(value for sample, value in metrics.items() if sample.split("{")[0] == name)


def free_port() -> int:
  """One that was free a moment ago."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]
