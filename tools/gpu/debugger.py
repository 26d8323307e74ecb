"""Finds where a GPU kernel hangs, by attaching cuda-gdb to its process. Knows no job.

A device kernel that hangs has no other trace: its host thread waits in the driver. cuda-gdb stops the device and lists
the program counters of its threads. It must be allowed to trace the process, see `allow_tracing`.
"""

import contextlib
import ctypes
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys

_COMMANDS = ("set width 0", "info cuda kernels", "info cuda warps", "info cuda threads", "x/4i $pc")
_LIMIT_S = 60.0
_MOST_LINES = 40
_NOISE = ("[New Thread", "[Thread debugging", "[Detaching", "[Inferior", "Using host lib", "warning:", "Reading ")
_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)  # of prctl(2)


def allow_tracing() -> None:
  """Lets a debugger of the same user attach to this process, where Linux allows only ancestors by default."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def find_debugger() -> str | None:
  """Returns the path of cuda-gdb, or None where it is not installed."""
  roots = [os.environ[name] for name in ("CUDA_ROOT", "CUDA_HOME") if os.environ.get(name)]
  paths = [str(pathlib.Path(root) / "bin") for root in (*roots, "/usr/local/cuda")]
  return shutil.which("cuda-gdb", path=os.pathsep.join([os.environ.get("PATH", ""), *paths]))


def list_counters(pid: int, kept: pathlib.Path, most_s: float = math.inf) -> list[str]:
  """Returns lines with the kernels, warps and program counters of a process that hangs.

  Args:
    pid: the process; it goes on afterwards.
    kept: file to which the debugger's whole output is added.
    most_s: limit of the seconds, besides the debugger's own.
  """
  found = find_debugger()
  if not found:
    return ["cuda-gdb is not installed: the program counters are unknown"]
  command = [found, "-nx", "--batch", "-p", str(pid)]
  for each in _COMMANDS:
    command += ["-ex", each]
  process = subprocess.Popen(
    command,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
    start_new_session=True,
  )
  late, limit_s = [], min(_LIMIT_S, most_s)
  try:
    output, _ = process.communicate(timeout=limit_s)
  except subprocess.TimeoutExpired:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    late = [f"cuda-gdb did not end in {limit_s:.0f} s"]
  with open(kept, "a", encoding="utf-8") as file:
    file.write(f"== process {pid}: {' '.join(command)}\n{output}\n")
  lines = [line.rstrip() for line in output.splitlines() if line.strip() and not line.lstrip().startswith(_NOISE)]
  return [*lines[:_MOST_LINES], *late] or ["cuda-gdb printed nothing"]
