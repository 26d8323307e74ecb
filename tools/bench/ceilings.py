"""What a machine can do at most, measured right beside the figures that are compared with it. Knows no model.

A machine that is shared reads twice as fast in one minute as in another, so a figure's share of a ceiling means
something only where both are of the same moment: between two figures the ceilings are measured, and each figure has the
mean of those before and after it.
"""

import concurrent.futures
import dataclasses
import os
from typing import Any

import numpy as np

from tools.measure import best_and_median

# Numbers that are read, and rows of the square matrices.
_ON_CPU, _ELSEWHERE = (2**26, 2048), (2**29, 8192)


@dataclasses.dataclass(frozen=True)
class Ceilings:
  """What the devices can do at most, of the mesh together.

  Attributes:
    bytes_s: read from memory, a second.
    flops_s: multiplied and added in a matmul of the model's dtype, operations a second.
  """

  bytes_s: float
  flops_s: float

  def seconds(self, num_bytes: float, flops: float) -> float:
    """The roofline of work that reads `num_bytes` and does `flops` operations."""
    return max(num_bytes / self.bytes_s, flops / self.flops_s)

  def shares(self, num_bytes: float, flops: float, seconds: float) -> dict[str, float]:
    """How near work that took `seconds` came to either ceiling, and to its roofline; 1 is all that can be."""
    return {
      "of_read": round(num_bytes / seconds / self.bytes_s, 3),
      "of_rate": round(flops / seconds / self.flops_s, 3),
      "of_roofline": round(self.seconds(num_bytes, flops) / seconds, 3),
    }


def read_bandwidth(seconds: float) -> float:
  """Bytes a second that all cores together read from memory: the maximum of 256 MiB each."""
  arrays = [np.ones(_ON_CPU[0], np.float32) for _ in range(os.cpu_count() or 1)]
  with concurrent.futures.ThreadPoolExecutor(len(arrays)) as pool:
    best_ms, _ = best_and_median(lambda: list(pool.map(np.max, arrays)), seconds)
  return 1e3 * sum(array.nbytes for array in arrays) / best_ms


def measure(dtype: Any, seconds: float) -> Ceilings:
  """By jax on the first device: a reduction, and a square matmul. Takes about `seconds`.

  On a CPU it is numpy that reads, since XLA's reduction keeps one core busy.
  """
  import jax
  import jax.numpy as jnp

  on_cpu = jax.default_backend() == "cpu"
  count, size = _ON_CPU if on_cpu else _ELSEWHERE
  if on_cpu:
    bytes_s = read_bandwidth(seconds / 2)
  else:
    values, largest = jnp.ones(count, jnp.float32), jax.jit(jnp.max)
    read_ms, _ = best_and_median(lambda: largest(values).block_until_ready(), seconds / 2)
    bytes_s = 1e3 * values.nbytes / read_ms
  left, multiply = jnp.ones((size, size), dtype), jax.jit(jnp.matmul)
  matmul_ms, _ = best_and_median(lambda: multiply(left, left).block_until_ready(), seconds / 2)
  return Ceilings(bytes_s, 1e3 * 2 * size**3 / matmul_ms)


class CeilingWatch:
  """Measures the ceilings between figures."""

  def __init__(self, dtype: Any, seconds: float, devices: int = 1):
    """Measures for the first time.

    Args:
      dtype: of the matmul.
      seconds: for each time.
      devices: how many alike make up the mesh.
    """
    self._dtype, self._seconds, self._devices = dtype, seconds, devices
    self._seen: list[Ceilings] = []
    self._measure()

  def _measure(self) -> None:
    found = measure(self._dtype, self._seconds)
    self._seen.append(Ceilings(found.bytes_s * self._devices, found.flops_s * self._devices))

  def around(self) -> Ceilings:
    """Measures again; the mean of now and the time before, between which there was one figure."""
    self._measure()
    before, after = self._seen[-2:]
    return Ceilings((before.bytes_s + after.bytes_s) / 2, (before.flops_s + after.flops_s) / 2)

  def best(self) -> Ceilings:
    """The fastest that either was at any time: beside what is no single moment, so that no figure flatters."""
    return Ceilings(max(seen.bytes_s for seen in self._seen), max(seen.flops_s for seen in self._seen))

  def range(self) -> dict[str, list[float]]:
    """The slowest and the fastest of each, by the name of Ceilings' attribute."""
    return {
      name: [min(values), max(values)]
      for name in ("bytes_s", "flops_s")
      for values in [[getattr(seen, name) for seen in self._seen]]
    }


def in_words(seen: dict[str, list[float]]) -> str:
  """What `CeilingWatch.range` found, for the head of a table."""
  read, rate = ([each / 1e9 for each in seen[name]] for name in ("bytes_s", "flops_s"))
  return f"ceilings {read[0]:.1f} to {read[1]:.1f} GB/s, {rate[0]:.0f} to {rate[1]:.0f} GFLOP/s"
