"""Starts, watches and stops one Sluice server as a child process on loopback. Imports no Ray, and forwards nothing.

A whole server in a process of its own keeps its event loop, watchdog, limits and drain as they are anywhere else, and
leaves Ray's process alone when a step hangs or a kernel crashes.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

from absl import flags
from absl.testing import flagsaver

from engine.errors import ConfigError
from server import flags as server_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The child's own flags: replicas listen on loopback, and Serve's proxies alone call them.
_FIXED = (
  "--host=127.0.0.1",
  "--port=0",
  "--http_port=0",
  # One connection carries all calls of a replica, and only this process can reach it.
  "--max_concurrent_streams=4096",
  # A later request may reach another replica, which has stored nothing.
  "--max_stored_responses=0",
)
# Flag -> why a replica refuses it.
_REFUSED = {
  "host": "a replica listens on loopback",
  "port": "a replica takes a free port",
  "http_host": "a replica listens on loopback",
  "http_port": "a replica takes a free port",
  "port_file": "a replica writes its own",
  "http_port_file": "a replica writes its own",
  "max_stored_responses": "the next request may reach a replica that stored nothing",
  "batch_dir": "one server owns the folder; run a server of its own for batches",
  "num_hosts": "a replica is one process on one host; use deploy/kubernetes/hosts without Ray",
  "drain_timeout_s": "Serve drains; set the application's drain_timeout_s",
  "drain_delay_s": "Serve takes a replica out of its routers first",
  "tls_cert_file": "Serve's proxies accept the connections; set TLS there",
  "tls_key_file": "Serve's proxies accept the connections; set TLS there",
  "tls_client_ca_file": "Serve's proxies accept the connections; set TLS there",
}
_POLL_S = 0.05
_STOP_MARGIN_S = 10.0  # the server's farewells and the interpreter's end


def check_server_flags(arguments: Sequence[str]) -> None:
  """Checks a replica's flags before any replica is allocated.

  Args:
    arguments: `--name=value` each, as server.main takes them.

  Raises:
    ConfigError: a flag is unknown, its value is not allowed, or Serve decides it. One line.
  """
  for argument in arguments:
    name = argument.lstrip("-").partition("=")[0].replace("-", "_")
    if name in _REFUSED:
      raise ConfigError(f"{argument}: {_REFUSED[name]}; leave the flag out")
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    rest = server_flags.parse_flags(["server.main", *_FIXED, *arguments], "server.main")
    if len(rest) > 1:
      raise ConfigError(f"unexpected argument {rest[1]!r}; server_flags are written --name=value")


class ChildServer:
  """A server that ends with the thread that started it, at the latest. Belongs to one event loop.

  Attributes:
    http_port, grpc_port: its ports on 127.0.0.1, once started.
  """

  def __init__(self, arguments: Sequence[str], *, drain_timeout_s: float = 30.0):
    """Args:
    arguments: flags of server.main that `check_server_flags` accepts.
    drain_timeout_s: seconds that running requests have when the server stops.
    """
    self._arguments = [*_FIXED, f"--drain_timeout_s={drain_timeout_s:g}", *arguments]
    self._drain_timeout_s = drain_timeout_s
    self._process: subprocess.Popen[bytes] | None = None
    self._relay: threading.Thread | None = None
    self._last_line = "it said nothing"
    self.http_port = self.grpc_port = -1

  async def start(self) -> None:
    """Returns once the server is ready. The caller decides how long a start may take.

    Raises:
      ConfigError: the server ended instead; the text has its last line.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-replica-") as folder:
      port_file, http_port_file = pathlib.Path(folder) / "port", pathlib.Path(folder) / "http_port"
      command = [sys.executable, "-m", "deploy.ray.guarded_server", str(os.getpid()), *self._arguments]
      command += [f"--port_file={port_file}", f"--http_port_file={http_port_file}"]
      process = self._process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,
      )
      # A thread, so that the server can write while this process's event loop is busy.
      relay = self._relay = threading.Thread(
        target=self._relay_lines, args=(process,), name="server's lines", daemon=True
      )
      relay.start()
      while not port_file.exists():
        if not self.is_alive:
          relay.join(_POLL_S)
          raise ConfigError(f"the server did not start: {self._last_line}")
        await asyncio.sleep(_POLL_S)
      self.grpc_port = int(port_file.read_text("utf-8"))
      self.http_port = int(http_port_file.read_text("utf-8"))

  def _relay_lines(self, process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None, "the server's standard error is a pipe"
    with process.stderr as lines:
      for line in lines:
        text = line.decode(errors="replace").rstrip()
        self._last_line = text or self._last_line
        print(text, file=sys.stderr, flush=True)

  @property
  def is_alive(self) -> bool:
    """Whether the process runs."""
    return self._process is not None and self._process.poll() is None

  @property
  def pid(self) -> int:
    """The process's id; -1 before the start."""
    return self._process.pid if self._process is not None else -1

  def describe_end(self) -> str:
    """Returns why the server no longer runs, in a few words."""
    code = self._process.poll() if self._process is not None else None
    return f"the server has ended with exit code {code}: {self._last_line}"

  async def wait_ended(self) -> None:
    """Returns when the process has ended."""
    while self.is_alive:
      await asyncio.sleep(_POLL_S)

  def kill(self) -> None:
    """Ends a server that no longer answers, so that its clients learn of it."""
    if self._process is not None:
      self._process.kill()

  async def stop(self) -> None:
    """Drains and ends the server; kills it if it does not end in time."""
    process = self._process
    if process is None:
      return
    if self.is_alive:
      process.send_signal(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(self._drain_timeout_s + _STOP_MARGIN_S):
        await self.wait_ended()
    process.kill()  # nothing, if it has ended
    process.wait()
    if self._relay is not None:
      self._relay.join(_POLL_S)
