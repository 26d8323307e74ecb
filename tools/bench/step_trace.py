"""Reads the profiler's trace of decode steps: kernels, gaps between them, and the host's calls. Decides nothing.

XLA's profiler records each kernel of a CUDA graph. It slows the host down, so compare shares, not times, with a run
without it.
"""

from collections.abc import Sequence
import glob
import os
import tempfile
from typing import Any

import jax

from engine.shapes import StepShape
from tools.simulate.measure_costs import HandMade, Rows

_MOST_NAMES = 40  # of kernels and of the host's calls, the longest first


def trace_steps(made: HandMade, shape: StepShape, rows: Rows, seconds: float) -> dict[str, Any]:
  """Runs steps under the profiler, two in flight; returns `summarize`'s figures.

  Raises:
    RuntimeError: the profile has no kernel of a GPU.
  """
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  options.host_tracer_level = 2
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      steps = len(made.times(shape, rows, seconds)) + 2  # and the first and the one still in flight
    (file,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    return summarize(jax.profiler.ProfileData.from_file(file), steps)


def summarize(profile: Any, steps: int) -> dict[str, Any]:
  """Returns a profile's figures a step.

  Args:
    profile: jax.profiler.ProfileData.
    steps: in it.

  Returns:
    busy_us: time in which a kernel ran.
    span_us: from the first kernel's start to the last one's end.
    kernels: (name, microseconds, launches), the longest first.
    host: (name, microseconds, calls) of the host's events; they nest, so they do not add up.

  Raises:
    RuntimeError: the profile has no kernel of a GPU.
  """
  spans: list[tuple[float, float]] = []
  kernels: dict[str, list[float]] = {}
  host: dict[str, list[float]] = {}
  for plane in profile.planes:
    is_device = plane.name.startswith("/device:GPU")
    for line in plane.lines:
      if not (is_device and line.name.startswith("Stream")) and plane.name != "/host:CPU":
        continue
      for event in line.events:
        times = (kernels if is_device else host).setdefault(event.name, [])
        times.append(event.duration_ns / 1e3)
        if is_device:
          spans.append((event.start_ns / 1e3, event.start_ns / 1e3 + event.duration_ns / 1e3))
  if not spans:
    raise RuntimeError("the profile has no kernel of a GPU")
  return {
    "steps": steps,
    "busy_us": round(_covered(spans) / steps, 2),
    "span_us": round((max(end for _, end in spans) - min(start for start, _ in spans)) / steps, 2),
    "kernels": _longest(kernels, steps),
    "host": _longest(host, steps),
  }


def _covered(spans: Sequence[tuple[float, float]]) -> float:
  """Returns the length of the union of intervals."""
  total, until = 0.0, float("-inf")
  for start, end in sorted(spans):
    total += max(0.0, end - max(start, until))
    until = max(until, end)
  return total


def _longest(events: dict[str, list[float]], steps: int) -> list[tuple[str, float, float]]:
  found = [(name[:80], round(sum(times) / steps, 2), round(len(times) / steps, 2)) for name, times in events.items()]
  return sorted(found, key=lambda each: -each[1])[:_MOST_NAMES]
