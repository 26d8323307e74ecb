"""Runs a real server in its own process for the duration of a block. Starts and stops it; sends no request."""

from collections.abc import Collection, Mapping, Sequence
import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

from engine.errors import ConfigError
from tools.measure import ROOT

READY_S = 240.0  # a cold start compiles every rung
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


def find_free_port() -> int:
  """Returns a free port outside of the range that the system assigns, so it stays free."""
  first_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
  while True:
    port = random.randrange(max(1024, first_given // 2), max(2048, first_given))
    with socket.socket() as probe, contextlib.suppress(OSError):
      probe.bind(("127.0.0.1", port))
      return port
