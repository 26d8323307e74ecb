"""Runs a real server, or a router, in its own process for the duration of a block. Sends no request but checks."""

from collections.abc import Collection, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from engine.errors import ConfigError
from tools.measure import ROOT

READY_S = 240.0  # a cold start compiles every rung
_ROUTER_READY_S = 60.0
_STOP_S = 60.0  # seconds for a drain; then it is killed
# Clients are few processes with a connection each; calls that they queued would be in no server's counts.
_MANY_STREAMS = "--max_concurrent_streams=4096"


class RunningServer:
  """A server on a free port of this machine; it ends with the block, however that ends."""

  def __init__(
    self,
    flags: Sequence[str],
    log: pathlib.Path,
    environment: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
  ):
    """Args:
    flags: flags of server.main, without port and port file.
    log: file for its output; overwritten.
    environment: variables added to those of this process.
    cores: the cores that all its threads may use; none: those of this process.
    """
    self._flags, self._log, self._environment, self._cores = flags, log, environment or {}, cores

  def __enter__(self) -> "RunningServer":
    """Returns once it serves.

    Raises:
      ConfigError: it ended instead, or took too long; the text has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-server-") as folder, open(self._log, "w", encoding="utf-8") as log:
      port_file = pathlib.Path(folder) / "port"
      own = os.sched_getaffinity(0)  # of this thread; a child inherits it
      if self._cores:
        os.sched_setaffinity(0, self._cores)
      self._process = subprocess.Popen(
        [sys.executable, "-m", "server.main", "--port=0", f"--port_file={port_file}", _MANY_STREAMS, *self._flags],
        cwd=ROOT,
        env={**os.environ, **self._environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,  # Ctrl-C is for this process, which then stops the server
      )
      os.sched_setaffinity(0, own)
      try:
        deadline = time.monotonic() + READY_S
        while not port_file.exists():
          if not self.is_alive:
            raise ConfigError(f"the server did not start: {self.last_words()}")
          if time.monotonic() > deadline:
            raise ConfigError(f"the server was not ready after {READY_S:g} s: {self.last_words()}")
          time.sleep(0.1)
        self.target = f"127.0.0.1:{port_file.read_text('utf-8').strip()}"
      except BaseException:
        self._stop()
        raise
    return self

  def __exit__(self, *_: object) -> None:
    self._stop()

  def _stop(self) -> None:
    if self.is_alive:
      self._process.send_signal(signal.SIGTERM)
    try:
      self._process.wait(_STOP_S)
    except BaseException as error:
      self._process.kill()
      self._process.wait()
      if not isinstance(error, subprocess.TimeoutExpired):
        raise

  @property
  def pid(self) -> int:
    """The process's id."""
    return self._process.pid

  @property
  def is_alive(self) -> bool:
    """Whether the process runs."""
    return self._process.poll() is None

  def last_words(self) -> str:
    """Returns the last error in its log, or else the last line."""
    lines = self._log.read_text("utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error")]
    return (errors or lines or ["it said nothing"])[-1]


class RunningRouter:
  """A router on a free port of this machine, in a process of its own; it ends with the block, however that ends."""

  def __init__(
    self, replicas: Sequence[str], log: pathlib.Path, flags: Sequence[str] = (), tls: ssl.SSLContext | None = None
  ):
    """Args:
    replicas: HOST:PORT of the replicas' HTTP ports, or https://HOST:PORT.
    log: file for its output; overwritten.
    flags: further flags of server.router.
    tls: verifies the router's certificate, if the flags name one.
    """
    self._replicas, self._flags, self._log, self._tls = replicas, flags, log, tls

  def __enter__(self) -> "RunningRouter":
    """Returns once all replicas are in the rotation.

    Raises:
      ConfigError: the router ended instead, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-router-") as folder, open(self._log, "w", encoding="utf-8") as log:
      port_file = pathlib.Path(folder) / "port"
      flags = [f"--replicas={','.join(self._replicas)}", "--port=0", f"--port_file={port_file}", *self._flags]
      self._process = subprocess.Popen(
        [sys.executable, "-m", "server.router", *flags],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
      )
      try:
        deadline = time.monotonic() + _ROUTER_READY_S
        while not (port_file.exists() and self._count_ready(port_file) == len(self._replicas)):
          if self._process.poll() is not None or time.monotonic() > deadline:
            last = (self._log.read_text("utf-8").strip().splitlines() or ["it said nothing"])[-1]
            raise ConfigError(f"the router did not find its {len(self._replicas)} replicas: {last}")
          time.sleep(0.05)
      except BaseException:
        self._stop()
        raise
    return self

  def __exit__(self, *_: object) -> None:
    self._stop()

  def _count_ready(self, port_file: pathlib.Path) -> int:
    self.address = f"127.0.0.1:{port_file.read_text('utf-8').strip()}"
    url = f"{'http' if self._tls is None else 'https'}://{self.address}/ready"
    try:
      with urllib.request.urlopen(url, timeout=10, context=self._tls) as response:
        return json.load(response)["replicas_ready"]
    except urllib.error.HTTPError as error:
      return json.load(error)["replicas_ready"]

  def _stop(self) -> None:
    if self._process.poll() is None:
      self._process.send_signal(signal.SIGTERM)
    try:
      self._process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  @property
  def pid(self) -> int:
    """The process's id."""
    return self._process.pid

  def processor_s(self) -> float:
    """Returns the processor time that the router has used, in seconds."""
    fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def find_free_port() -> int:
  """Returns a free port outside of the range that the system assigns, so it stays free."""
  first_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
  while True:
    port = random.randrange(max(1024, first_given // 2), max(2048, first_given))
    with socket.socket() as probe, contextlib.suppress(OSError):
      probe.bind(("127.0.0.1", port))
      return port
