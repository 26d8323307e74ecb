"""Measures a compiled program's device time by many calls that depend on each other; knows nothing of kernels.

The program takes and returns its buffers (donated, so each call waits for the previous one) and repeats its work over
different inputs. This way neither the host's time for a call nor the L2 cache is measured.
"""

from collections.abc import Callable, Sequence
import dataclasses
import glob
import math
import os
import statistics
import tempfile
import time
from typing import Any

import jax

_MOST_CALLS = 2000


@dataclasses.dataclass(frozen=True)
class Effort:
  """The effort of a timing: number of samples, and the shortest sample in seconds."""

  samples: int = 7
  least_s: float = 0.05


def measure(program: Callable, carry: Any, operands: Sequence[Any], times: int, effort: Effort) -> tuple[Any, dict]:
  """Times `carry = program(carry, *operands)`.

  Args:
    program: compiled; may do its work `times` times.
    carry: donated to each call.
    operands: the same for each call.

  Returns:
    The last carry, and microseconds of one of the `times`: the median of several samples, the least and the greatest,
    and the host's time to launch it. If the latter is near the median, the device had to wait for the host.
  """
  for _ in range(min(3, effort.samples)):
    carry = program(carry, *operands)
  jax.block_until_ready(carry)
  start = time.perf_counter()
  carry = jax.block_until_ready(program(carry, *operands))
  calls = min(math.ceil(effort.least_s / (time.perf_counter() - start)), _MOST_CALLS)
  found, asked = [], []
  for _ in range(effort.samples):
    start = time.perf_counter()
    for _ in range(calls):
      carry = program(carry, *operands)
    asked.append(time.perf_counter() - start)
    jax.block_until_ready(carry)
    found.append(time.perf_counter() - start)
  unit = 1e6 / (calls * times)
  return carry, {
    "us": statistics.median(found) * unit,
    "us_least": min(found) * unit,
    "us_most": max(found) * unit,
    "host_us": statistics.median(asked) * unit,
    "calls": calls,
  }


def kernel_times(program: Callable, carry: Any, operands: Sequence[Any], times: int) -> dict[str, float]:
  """Returns the profiler's microseconds of each kernel by name, for one of the `times`; for cross-checking.

  Raises:
    RuntimeError: the profiler saw no kernel.
  """
  carry = jax.block_until_ready(program(carry, *operands))
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(program(carry, *operands))
    found: dict[str, float] = {}
    for file in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
      for plane in jax.profiler.ProfileData.from_file(file).planes:
        if not plane.name.startswith("/device:GPU"):
          continue
        for line in plane.lines:
          if line.name.startswith("Stream"):
            for event in line.events:
              found[event.name] = found.get(event.name, 0.0) + event.duration_ns / (1e3 * times)
  if not found:
    raise RuntimeError("the profile has no kernel of a GPU")
  return found
