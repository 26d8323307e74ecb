"""Measures a machine's ceilings next to the figures that are compared with them. Knows no model.

A shared machine can be twice as fast in one minute as in another, so a figure must be compared with a ceiling of the
same moment. The ceilings are therefore measured between figures, and each figure is compared with the mean of the
measurements before and after it.
"""

from __future__ import annotations

from collections.abc import Callable
import concurrent.futures
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.measure import best_and_median

if TYPE_CHECKING:
  import jax

# Numbers to read, and rows of the square matrices.
_ON_CPU, _ELSEWHERE = (2**26, 2048), (2**29, 8192)
_IN_A_ROW = 8  # reads, or matmuls, of a device with memory of its own before the host waits


@dataclasses.dataclass(frozen=True)
class Ceilings:
  """The ceilings of the devices of a mesh, in sum.

  Attributes:
    bytes_s: bytes read from memory, a second, by the best of many reads.
    flops_s: operations a second in a matmul of the model's dtype.
    median_bytes_s: the same as bytes_s by the median of these reads; 0: not measured.
  """

  bytes_s: float
  flops_s: float
  median_bytes_s: float = 0.0

  def seconds(self, num_bytes: float, flops: float) -> float:
    """Returns the roofline's seconds for work that reads `num_bytes` and does `flops` operations."""
    return max(num_bytes / self.bytes_s, flops / self.flops_s)

  def shares(self, num_bytes: float, flops: float, seconds: float) -> dict[str, float]:
    """Returns the shares of both ceilings and of the roofline that work of `seconds` reached; 1 is the maximum."""
    return {
      "of_read": round(num_bytes / seconds / self.bytes_s, 3),
      "of_rate": round(flops / seconds / self.flops_s, 3),
      "of_roofline": round(self.seconds(num_bytes, flops) / seconds, 3),
    }


def read_bandwidth(seconds: float) -> tuple[float, float]:
  """Returns the bytes a second that all cores together read from memory: the maximum of 256 MiB each.

  Returns:
    Of the best read and of the median one.
  """
  arrays = [np.ones(_ON_CPU[0], np.float32) for _ in range(os.cpu_count() or 1)]
  with concurrent.futures.ThreadPoolExecutor(len(arrays)) as pool:
    best_ms, median_ms = best_and_median(lambda: list(pool.map(np.max, arrays)), seconds)
  thousands = 1e3 * sum(array.nbytes for array in arrays)
  return thousands / best_ms, thousands / median_ms


def measure(dtype: Any, seconds: float) -> Ceilings:
  """Measures the first device with jax: a reduction, and a square matmul. Takes about `seconds`.

  On a CPU numpy reads memory, since XLA's reduction uses one core.
  """
  import jax
  import jax.numpy as jnp

  on_cpu = jax.default_backend() == "cpu"
  (count, size), times = (_ON_CPU, 1) if on_cpu else (_ELSEWHERE, _IN_A_ROW)
  if on_cpu:
    bytes_s, median_bytes_s = read_bandwidth(seconds / 2)
  else:
    values, largest = jnp.ones(count, jnp.float32), jax.jit(jnp.max)
    read_ms, median_ms = best_and_median(lambda: _run_in_a_row(times, largest, values), seconds / 2)
    bytes_s, median_bytes_s = (1e3 * times * values.nbytes / each for each in (read_ms, median_ms))
  left, multiply = jnp.ones((size, size), dtype), jax.jit(jnp.matmul)
  matmul_ms, _ = best_and_median(lambda: _run_in_a_row(times, multiply, left, left), seconds / 2)
  return Ceilings(bytes_s, 1e3 * times * 2 * size**3 / matmul_ms, median_bytes_s)


def _run_in_a_row(times: int, program: Callable[..., jax.Array], *operands: jax.Array) -> None:
  """Runs a program several times and waits for the last one, so the wait for a device is a small part of the time."""
  for _ in range(times - 1):
    program(*operands)
  program(*operands).block_until_ready()


class CeilingWatch:
  """Measures the ceilings between figures."""

  def __init__(self, dtype: Any, seconds: float, devices: int = 1):
    """Takes the first measurement.

    Args:
      dtype: dtype of the matmul.
      seconds: duration of each measurement.
      devices: devices of the mesh, all alike.
    """
    self._dtype, self._seconds, self._devices = dtype, seconds, devices
    self._seen: list[Ceilings] = []
    self._measure()

  def _measure(self) -> None:
    found = measure(self._dtype, self._seconds)
    self._seen.append(Ceilings(*(each * self._devices for each in dataclasses.astuple(found))))

  def around(self) -> Ceilings:
    """Measures again; returns the mean of this and the previous measurement, between which there was one figure."""
    self._measure()
    before, after = self._seen[-2:]
    pairs = zip(dataclasses.astuple(before), dataclasses.astuple(after), strict=True)
    return Ceilings(*(sum(pair) / 2 for pair in pairs))

  def best(self) -> Ceilings:
    """Returns each ceiling's maximum over the run, for work that has no single moment."""
    return Ceilings(*map(max, zip(*map(dataclasses.astuple, self._seen), strict=True)))

  def range(self) -> dict[str, list[float]]:
    """Returns the minimum and the maximum of each ceiling, by the name of Ceilings' attribute."""
    return {
      name: [min(values), max(values)]
      for name in ("bytes_s", "flops_s")
      for values in [[getattr(seen, name) for seen in self._seen]]
    }


def in_words(seen: dict[str, list[float]]) -> str:
  """Formats the result of `CeilingWatch.range` for the head of a table."""
  read, rate = ([each / 1e9 for each in seen[name]] for name in ("bytes_s", "flops_s"))
  return f"ceilings {read[0]:.1f} to {read[1]:.1f} GB/s, {rate[0]:.0f} to {rate[1]:.0f} GFLOP/s"
