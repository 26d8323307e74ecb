"""Decides what to skip after losses: a kernel that cost two processes is not run again. Pure: runs nothing.

A job names the kernels that it uses. A loss counts for all of them together, since any may be the cause. Once a set of
kernels has two losses, later jobs that use the whole set are skipped.
"""

import collections
from collections.abc import Mapping
import dataclasses
from typing import Any

from pallas_kernels.paged_attention import arg_specs
from tools.gpu.protocol import Record

SKIPPED = "skipped: "
_MOST = 2
_LAYER = ("write", "prefill", "decode", "decode parts")
_HEAD_DIMS = {spec.name: spec.head_dim for spec in (*arg_specs.CONFORMANCE, *arg_specs.GPU_BENCHMARK)}


def name_kernels(job: Mapping[str, Any]) -> frozenset[str]:
  """Returns the kernels of a job; one that uses none of Sluice's has a name of its own."""
  kind, op = job["kind"], job.get("op", "")
  size = job.get("head_dim") or _HEAD_DIMS.get(job.get("spec", ""), 128)
  implementation = job.get("implementation", "gpu")
  layer = frozenset(f"{implementation} {name} {size}" for name in _LAYER)
  if kind in ("step", "deterministic") or op == "parts" or (op == "attend" and implementation == "gpu"):
    found = layer
  elif op == "attend":
    found = frozenset({f"{implementation} attend {size}"})
  elif op == "decode" and kind != "smoke":  # it splits rows
    found = frozenset({f"gpu decode {size}", f"gpu decode parts {size}"})
  elif op in _LAYER:
    found = frozenset({f"gpu {op} {size}"})
  else:
    found = frozenset({" ".join(str(value) for value in job.values())})
  if job.get("kv_dtype"):
    found |= {f"{job['kv_dtype']} KV"}
  return found | {repr(sorted(job["tuning"].items()))} if "tuning" in job else found


@dataclasses.dataclass
class Losses:
  """The losses of a run."""

  counts: collections.Counter[frozenset[str]] = dataclasses.field(default_factory=collections.Counter)

  def add(self, record: Record) -> None:
    """Counts a record if its job cost the process."""
    if record.get("lost"):
      self.counts[name_kernels(record["job"])] += 1

  def why_skip(self, job: Mapping[str, Any]) -> str:
    """Returns why a job is not to be run, or ""."""
    used = name_kernels(job)
    for lost, times in self.counts.items():
      if times >= _MOST and lost <= used:
        return f"{SKIPPED}{', '.join(sorted(lost))} cost {times} processes before"
    return ""
