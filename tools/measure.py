"""Shared by the comparisons: runs a tool as a user does, times a call, computes medians, describes the machine."""

from collections.abc import Callable, Sequence
import gc
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from engine.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_tool(command: Sequence[str], what: str) -> dict[str, Any]:
  """Runs a command that prints one JSON line and returns it; its progress goes to standard error.

  Raises:
    ConfigError: the command failed, or printed something else.
  """
  print(f"{what} ...", file=sys.stderr, flush=True)
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  try:
    if done.returncode:
      raise ValueError
    return json.loads(done.stdout.strip().splitlines()[-1])
  except (ValueError, IndexError) as error:
    tail = " | ".join(done.stderr.strip().splitlines()[-5:])
    raise ConfigError(f"{what}: {' '.join(command)} ended with exit code {done.returncode}: {tail}") from error


def freeze_start() -> None:
  """Keeps collections short, as the server does when it is ready: they leave out all objects of the start."""
  gc.collect()
  gc.freeze()


def best_and_median(call: Callable[[], object], seconds: float) -> tuple[float, float]:
  """Returns milliseconds of a call, best and median: repeated for `seconds`, and at least 5 times."""
  call()
  times, end = [], time.perf_counter() + seconds
  while len(times) < 5 or time.perf_counter() < end:
    start = time.perf_counter()
    call()
    times.append(1e3 * (time.perf_counter() - start))
  return min(times), sorted(times)[len(times) // 2]


def median_of(runs: Sequence[dict[str, Any]], name: str) -> float:
  """Returns the median of one figure over runs."""
  return statistics.median(run[name] for run in runs)


def machine() -> dict[str, Any]:
  """Returns cores and instruction set, in words that mean something on another machine."""
  model, vector = platform.machine(), ""
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines():
      key, _, value = line.partition(":")
      if key.strip() == "model name":
        model = value.strip()
      elif key.strip() == "flags":
        flags = set(value.split())
        vector = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "")
  except OSError:
    pass
  return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "vector": vector, "python": platform.python_version()}


def commit() -> str:
  """Returns the value of SLUICE_COMMIT, if it has one, else this checkout's commit, with -dirty if files differ."""
  if given := os.environ.get("SLUICE_COMMIT"):  # a copy of a checkout may have the git folder of another commit
    return given
  if shutil.which("git"):
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.returncode:
      return done.stdout.strip()
  return "unknown"


def write_result(path: str, result: dict[str, Any]) -> None:
  """Writes a result as indented JSON."""
  if path:
    pathlib.Path(path).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def show(result: dict[str, Any], table: str, path: str) -> None:
  """Writes a result; prints its table on standard error, and the result as a line of JSON."""
  write_result(path, result)
  print(table, file=sys.stderr)
  print(json.dumps(result), flush=True)
