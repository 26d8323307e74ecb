"""Measures how long a device waits for the host, in a run of the engine and for one request. For tools/bench/engine.py.

A step's record does not show it, since its time lasts until the host has the values. Here a thread waits for each
step's end; the time from there until the next launch returns counts as waiting.
"""

from collections.abc import Iterator
import contextlib
import queue
import statistics
import sys
import threading
import time
from typing import Any

from engine.batch import Batch
from engine.device.runner import LaunchedStep, ModelRunner
from tools.bench_offline import OfflineRun
from tools.simulate.measure_costs import HandMade
from tools.workload import synthetic

_SWITCH_S = (
  1e-4  # thread switch interval; the default of 5 ms is longer than a step, and would delay the end's time stamp
)
_DEEP = 8  # with so many steps in flight no device waits for the host
_TOKENS = 128  # output tokens of the request that runs alone


class DeviceWatch:
  """Watches the launches between an engine and its runner, within `watching`.

  Attributes:
    held: first positions and counts of each step's rows.
  """

  def __init__(self, runner: ModelRunner):
    self.held: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    self._launch = runner.launch
    self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
    self._begins: list[float] = []
    self._ends: list[float] = []

  def launch(self, batch: Batch) -> LaunchedStep:
    """Launches a step and notes it."""
    launched = self._launch(batch)
    self._begins.append(time.monotonic())
    self._launched.put(launched)
    self.held.append((tuple(batch.starts), tuple(batch.counts)))
    return launched

  def idle_s(self, started: float) -> float:
    """Returns the seconds without a step, from `started` (time.monotonic()) to the last launch."""
    return waited([started, *self._ends], self._begins)

  @contextlib.contextmanager
  def watching(self, runner: ModelRunner) -> Iterator[None]:
    """Routes the runner's launches through this object while open."""
    thread, switch_s = threading.Thread(target=self._note_ends, daemon=True), sys.getswitchinterval()
    thread.start()
    runner.launch = self.launch
    sys.setswitchinterval(_SWITCH_S)
    try:
      yield
    finally:
      sys.setswitchinterval(switch_s)
      runner.launch = self._launch
      self._launched.put(None)
      thread.join()

  def _note_ends(self) -> None:
    while (launched := self._launched.get()) is not None:
      launched.wait()
      self._ends.append(time.monotonic())


def waited(ends: list[float], begins: list[float]) -> float:
  """Returns the sum of the gaps between the end of each step and the beginning of the next."""
  return sum(max(0.0, begin - end) for end, begin in zip(ends, begins, strict=False))


def alone(run: OfflineRun, context: int, seconds: float) -> dict[str, Any]:
  """Runs one request through the engine, around position `context`, and the same step with many in flight.

  The difference is the most that decoding several steps on the device, without the host, could save.
  """
  config = run.built.config
  tokens = min(_TOKENS, config.max_model_len - 1)
  prompt = max(1, min(context, config.max_model_len - tokens) - tokens // 2)
  lengths = f"uniform:{prompt}:{prompt}", f"uniform:{tokens}:{tokens}"
  (outcome,) = run.serve(synthetic(1, *lengths, run.built.model.vocab_size, seed=0))
  if outcome.error:
    return {"error": outcome.error}
  times = [time_s for time_s, _ in outcome.chunks]
  engine_s = statistics.median(later - earlier for earlier, later in zip(times, times[1:], strict=False))
  shape = config.ladder.fit(1)
  made = HandMade(run.built.runner, config)
  deep_s = statistics.median(made.times(shape, [(prompt + tokens // 2, 1)], seconds, _DEEP))
  print(f"one request: {1e3 * engine_s:.3f} ms a step, {1e3 * deep_s:.3f} with {_DEEP} in flight", file=sys.stderr)
  return {
    "context": prompt + tokens // 2,
    "engine_s": engine_s,
    "deep_s": deep_s,
    "waits_share": round(max(0.0, 1 - deep_s / engine_s), 4),
  }
