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
_LAYERS = {"gpu": ("write", "prefill", "decode", "decode parts", "decode only"), "tpu": ("write", "attention")}
_HEAD_DIMS = {spec.name: spec.head_dim for spec in arg_specs.GPU_SPECS}


def name_kernels(job: Mapping[str, Any]) -> frozenset[str]:
  """Returns the kernels of a job; one that uses none of Sluice's has a name of its own."""
  kind, op = job["kind"], job.get("op", "")
  size = job.get("head_dim") or _HEAD_DIMS.get(job.get("spec", ""), 128)
  implementation = job.get("implementation", "gpu")
  names = _LAYERS.get(implementation, ("attend",))
  if op == "decode" and kind != "smoke" and implementation == "gpu":
    used = ("decode", "decode parts", "decode only")
  elif op in ("decode", "prefill") and implementation == "tpu":
    used = ("attention",)
  elif kind in ("step", "deterministic") or op in ("parts", "attend"):
    used = names
  else:
    used = (op,)
  if set(used) <= set(names):
    found = frozenset(f"{implementation} {name} {size}" for name in used)
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
