"""Measures torch, and FlashInfer if it is installed, on the same GPU, for comparison with Sluice's figures.

  python -m tools.gpu.torch_peer          jobs come on standard input, see protocol.py

  {"kind": "peer", "what": "read" | "copy" | "matmul"}
  {"kind": "peer", "what": "flash" | "cudnn" | "efficient" | "flashinfer", "spec": NAME}

The first three of the last line are backends of torch's scaled_dot_product_attention, over dense keys and values.
"""

from collections.abc import Callable, Sequence
import statistics
import sys
import time
from typing import Any

import numpy as np

from pallas_kernels.paged_attention import arg_specs
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from tools.gpu import protocol
from tools.gpu.protocol import Job, Prepared

_SAMPLES, _SAMPLE_MS, _COPIES = 7, 50.0, 4


def _measure(torch, calls: Sequence[Callable[[], Any]], work_each: int = 1) -> dict[str, float]:
  """Returns microseconds of the work, with the calls in turn, by device events; a call does it `work_each` times."""

  def sample(rounds: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
      for call in calls:
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / (rounds * len(calls) * work_each)

  sample(2)
  rounds = max(1, round(_SAMPLE_MS / (sample(1) * len(calls) * work_each)))
  found = [1e3 * sample(rounds) for _ in range(_SAMPLES)]
  return {"us": statistics.median(found), "us_least": min(found), "us_most": max(found)}


def _spec(name: str) -> ArgSpec:
  return next(spec for spec in arg_specs.GPU_BENCHMARK if spec.name == name)


def _ceiling(torch, what: str) -> dict[str, float]:
  if what == "matmul":
    size = 8192
    pairs = [torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16) for _ in range(_COPIES)]
    found = _measure(torch, [lambda pair=pair: pair[0] @ pair[1] for pair in pairs])
    return found | {"flops_per_s": 2e6 * size**3 / found["us"]}
  x = torch.randn(2**30, device="cuda")
  if what == "copy":
    y = torch.empty_like(x)
    found = _measure(torch, [lambda: y.copy_(x)])
    return found | {"bytes_per_s": 2e6 * x.nbytes / found["us"]}
  found = _measure(torch, [lambda: torch.sum(x)])
  return found | {"bytes_per_s": 1e6 * x.nbytes / found["us"]}


def _dense(torch, spec: ArgSpec, backend: str) -> dict[str, float]:
  from torch.nn import attention  # pyright: ignore[reportMissingImports]
  from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]

  (queries, length), batch = spec.rows[0], len(spec.rows)
  if set(spec.rows) != {(queries, length)} or queries not in (1, length) or spec.sliding_window:
    raise ValueError(f"{spec.name}: no dense batch")
  chosen = {
    "flash": attention.SDPBackend.FLASH_ATTENTION,
    "cudnn": attention.SDPBackend.CUDNN_ATTENTION,
    "efficient": attention.SDPBackend.EFFICIENT_ATTENTION,
  }[backend]

  def numbers(heads: int, tokens: int):
    shape = batch, tokens, heads, spec.head_dim
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

  sets = [
    (numbers(spec.num_heads, queries), *(numbers(spec.num_kv_heads, length) for _ in range(2))) for _ in range(_COPIES)
  ]

  def attend(qkv, shared: bool):
    return scaled_dot_product_attention(*qkv, is_causal=queries > 1, enable_gqa=shared)

  with attention.sdpa_kernel(chosen):
    try:
      return _measure(torch, [lambda qkv=qkv: attend(qkv, shared=True) for qkv in sets])
    except RuntimeError:  # the backend knows no groups; a prompt's time does not depend on them
      if queries == 1:
        raise
      group = spec.num_heads // spec.num_kv_heads
      sets = [(q, *(x.repeat_interleave(group, dim=1) for x in kv)) for q, *kv in sets]
      return _measure(torch, [lambda qkv=qkv: attend(qkv, shared=False) for qkv in sets])


def _flashinfer(torch, spec: ArgSpec) -> dict[str, float]:
  import flashinfer  # pyright: ignore[reportMissingImports]

  page, counts = spec.block_size, [queries for queries, _ in spec.rows]
  lengths = np.array([length for _, length in spec.rows])
  blocks = -(-lengths // page)
  indptr = np.concatenate([[0], np.cumsum(blocks)])

  def ints(x):
    return torch.tensor(np.asarray(x), dtype=torch.int32)

  common = (spec.num_heads, spec.num_kv_heads, spec.head_dim, page)
  q = torch.randn(sum(counts), spec.num_heads, spec.head_dim, device="cuda", dtype=torch.bfloat16)
  rng, calls = np.random.default_rng(0), []
  shape = int(indptr[-1]), 2, page, spec.num_kv_heads, spec.head_dim
  for _ in range(_COPIES):
    space = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    where = ints(indptr), ints(rng.permutation(shape[0])), ints(lengths - (blocks - 1) * page)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if max(counts) == 1:
      wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
      wrapper.plan(*where, *common, **types)
    else:
      wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
      wrapper.plan(ints(np.concatenate([[0], np.cumsum(counts)])), *where, *common, causal=True, **types)
    out = torch.empty_like(q)
    calls.append(lambda wrapper=wrapper, kv=kv, out=out: wrapper.run(q, kv, out=out))
  return _measure(torch, [_capture_graph(torch, calls).replay], len(calls))


def _capture_graph(torch, calls: Sequence[Callable[[], Any]]) -> Any:
  """Returns a CUDA graph of the calls, so that the host's time for a call does not count."""
  side = torch.cuda.Stream()
  with torch.cuda.stream(side):  # lazy initialization may not be captured
    for call in calls:
      call()
  side.synchronize()
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    for call in calls:
      call()
  return graph


def main() -> int:
  """Serves jobs until standard input ends; returns the exit code."""
  start = time.monotonic()
  import torch  # pyright: ignore[reportMissingImports]

  def run(job: Job) -> dict[str, float]:
    if job["what"] in ("read", "copy", "matmul"):
      return _ceiling(torch, job["what"])
    if job["what"] == "flashinfer":
      return _flashinfer(torch, _spec(job["spec"]))
    return _dense(torch, _spec(job["spec"]), job["what"])

  def usable() -> bool:
    try:
      return bool(torch.ones(1, device="cuda").item() == 1.0)
    except Exception:  # an illegal address breaks the process for good
      return False

  hello = {"torch": torch.__version__, "import_s": round(time.monotonic() - start, 1)}
  return protocol.serve(hello, lambda job: Prepared(lambda: None, lambda _: run(job)), usable)


if __name__ == "__main__":
  sys.exit(main())
