"""Starts front-end processes, which end when their link closes. Sends no message and opens no port."""

from collections.abc import Sequence
import os
import pathlib
import socket
import subprocess
import sys

# The working directory may hold another package called `server`, which must not run.
_ROOT = pathlib.Path(__file__).resolve().parents[2]


def spawn_front_end(module: str, listening: Sequence[socket.socket | None]) -> tuple[subprocess.Popen, socket.socket]:
  """Starts a front end in a new interpreter, since a fork would copy a process with threads and a device.

  Args:
    module: its program: server.lifecycle.front_end_process, or one that adds parts to it.
    listening: sockets that it accepts from; None for a port that does not exist.

  Returns:
    The process, and this end of its link.
  """
  ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
  numbers = [-1 if each is None else each.fileno() for each in (theirs, *listening)]
  paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
  for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):  # systemd's, for one process alone
    environment.pop(name, None)
  command = [sys.executable, "-P", "-m", module, *map(str, numbers)]
  try:
    process = subprocess.Popen(
      command, stdin=subprocess.DEVNULL, pass_fds=[number for number in numbers if number >= 0], env=environment
    )
  except BaseException:
    ours.close()
    raise
  finally:
    theirs.close()
  return process, ours


def peak_rss_bytes(pid: int) -> int:
  """Returns the peak resident memory of another process of this user, in bytes; 0 where it is unknown."""
  try:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
  except OSError:
    return 0
  return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
