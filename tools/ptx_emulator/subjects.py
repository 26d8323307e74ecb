"""Each GPU kernel of paged attention on one tiny batch: its arrays, its program to compile, and what must come out.

The portable kernels are compiled for an A100 ("sm_80" in a name), an RTX PRO 6000 ("sm_120"), a B200 ("sm_100a") and an
H200 ("h200"), the others for an H200.

The batches are the least that use a ring again, have a second block, parts of a split row, padding, and an end inside a
page. What no row uses is NaN, as in tools/gpu/cases.py, whose oracle is dense attention in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import types
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import gpu_decode, gpu_prefill, gpu_write, portable
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.tuning import tuning_for
from tools.gpu import cases
from tools.gpu.cases import KernelCase, Wrong

KV_DTYPES = {"bf16": "", "fp8": "uint8"}
_DTYPES = {"bf16": jnp.bfloat16, "fp8": jnp.bfloat16, "f16": np.float16, "f32": np.float32}  # of queries


@dataclasses.dataclass(frozen=True)
class Subject:
  """A kernel and a batch.

  Attributes:
    name: of the kernel and of the pool's dtype.
    module: of the kernel's source.
    program: takes a module like `module`; returns a function and the arrays that it is to be compiled for.
    inputs: of the kernel.
    judge: raises Wrong for wrong outputs; returns those that matter.
    target: of tools/check_device, that the kernel is compiled for.
    entry: the kernel's name in a program of several.
  """

  name: str
  module: types.ModuleType
  program: Callable[[Any], tuple[Callable, tuple]]
  inputs: tuple[np.ndarray, ...]
  judge: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
  target: str = "h200"
  entry: str = ""


def _host(*arrays: Any) -> tuple[np.ndarray, ...]:
  return tuple(np.asarray(array) for array in arrays)


def _write(kv_dtype: str, is_portable: bool = False) -> Subject:
  """Eleven tokens, three of them padding, two KV heads; in tiles of eight, or in one portable tile of sixteen."""
  head_dim = 128
  spec = ArgSpec(
    "write",
    ((1, 20), (7, 40)),
    11,
    3,
    block_size=16,
    table_width=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=head_dim,
    dtype="bfloat16",
    kv_dtype=kv_dtype,
  )
  case = KernelCase(spec)
  tuning = dataclasses.replace(tuning_for("", head_dim, 16), write_tokens=8)
  before = np.asarray(case.pool(before=True))
  inputs = _host(case.qkv(0), np.cos(case.angles), np.sin(case.angles), case.slots[0], before)

  def program(module: Any) -> tuple[Callable, tuple]:
    qkv, cos, sin, slots, kv = inputs
    run = module.rotate_and_write if is_portable else functools.partial(module.rotate_and_write, tuning=tuning)
    return run, (qkv, cos, sin, kv, slots)

  def judge(outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    q, *finished, kv = outputs
    if any(counters.any() for counters in finished):
      raise Wrong("the decode kernel's counters are not zeros")
    tokens = np.arange(int(case.query_starts[-1]))
    projected = cases.tokens_of(case.qkv(0), tokens)
    wanted = cases.rounded(case.rotated(projected[:, :, :-2], tokens))
    # q: [T, N, H], or [K, whole tiles, G, H]
    queries = q[tokens].reshape(wanted.shape) if is_portable else q.transpose(1, 0, 2, 3)[tokens]
    cases.compare("queries", queries, wanted, tokens, np.dtype(jnp.bfloat16))
    slots = case.slots[0, tokens]
    at = slots // 16, slice(None), slice(None), slots % 16
    pairs = cases.numbers_of(jnp.asarray(kv[at]))
    keys = cases.stored(cases.rounded(case.rotated(projected[:, :, -2], tokens)), case.kv_dtype)
    cases.compare("keys", pairs[:, :, 0], keys, tokens, case.kv_dtype)
    values = cases.stored(projected[:, :, -1], case.kv_dtype)
    if not np.array_equal(pairs[:, :, 1], values):
      raise Wrong("values in the pool are not those of the projection")
    rest = kv.copy()
    rest[at] = before[at]
    if rest[1:].tobytes() != before[1:].tobytes():
      raise Wrong("the write changed the pool outside of its slots")
    return queries, kv[1:]

  if is_portable:
    return Subject("write", portable, program, inputs, judge, entry="rotate_and_write")
  return Subject("write", gpu_write, program, inputs, judge)


@dataclasses.dataclass(frozen=True)
class _Batch:
  """A batch for attention kernels, with its plan."""

  case: KernelCase
  plan: Plan | None = None

  @functools.cached_property
  def pieces(self) -> dict[str, np.ndarray]:
    assert self.plan is not None
    return self.plan.split(self.plan.make_work(self.case.query_starts, self.case.kv_lens))

  @functools.cached_property
  def operands(self) -> tuple[np.ndarray, ...]:
    """q, kv, block_tables, kv_lens, query_starts."""
    case = self.case
    return _host(case.packed_queries(0), case.pool(before=False), case.tables[0], case.kv_lens, case.query_starts)

  @functools.cached_property
  def queries(self) -> np.ndarray:
    """By token: [T, N, H]."""
    spec = self.case.spec
    packed = self.operands[0].reshape(spec.num_kv_heads, spec.num_tokens, -1, spec.head_dim).transpose(1, 0, 2, 3)
    return np.ascontiguousarray(packed.reshape(spec.num_tokens, spec.num_heads, spec.head_dim))

  @functools.cached_property
  def wanted(self) -> np.ndarray:
    """f32[tokens in use, N, H]."""
    tokens = np.arange(int(self.case.query_starts[-1]))
    return self.case.attention(jnp.asarray(self.operands[1]), self.queries[tokens].astype(np.float32), tokens)


def _prefill(kv_dtype: str) -> Subject:
  """Nine queries over three tiles of keys in two stages; a tile has two pages, and the row ends inside a page.

  An SM takes four items: the row's and padding's, of two KV heads. So it uses each tile of queries twice.
  """
  spec = ArgSpec(
    "prefill",
    ((9, 150),),
    12,
    3,
    block_size=32,
    table_width=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    kv_dtype=kv_dtype,
  )
  batch = _Batch(KernelCase(spec), Plan(spec.geometry, split_blocks=8, decode_queries=2, num_sms=1, pairs=1))
  tuning = dataclasses.replace(tuning_for("", 64, 32), prefill_stages=2, prefill_tile_keys=64)
  inputs = (*batch.operands, *_host(batch.pieces["prefill_count"], batch.pieces["prefill_items"]))

  def program(module: Any) -> tuple[Callable, tuple]:
    static = {"plan": batch.plan, "scale": spec.scale, "soft_cap": None, "tuning": tuning, "interpret": None}
    return functools.partial(module.prefill, **static), (*batch.operands, batch.pieces)

  def judge(outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    (out,) = outputs
    cases.compare("attention", out[:9], batch.wanted, np.arange(9))
    if out[9:].any():
      raise Wrong("padding tokens must give zeros")
    return outputs

  return Subject("prefill", gpu_prefill, program, inputs, judge)


def _decode(kv_dtype: str, has_prefill: bool = True) -> Subject:
  """Rows of one part and of two, two stages; the second's queries are on both sides of a multiple of 8.

  Two SMs have the parts of a row, and either may sum them. One counts its part after its next item's tiles, and the
  other at its end. Without the prefill kernel, the last row is one of its rows, and padding gets zeros.
  """
  spec = ArgSpec(
    "decode",
    ((1, 40), (2, 500), (1, 40) if has_prefill else (4, 70)),
    8,
    4,
    block_size=64,
    table_width=8,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    dtype="bfloat16",
    kv_dtype=kv_dtype,
  )
  plan = Plan(spec.geometry, split_blocks=1, decode_queries=2, num_sms=2, pairs=1, has_prefill=has_prefill)
  batch, used = _Batch(KernelCase(spec), plan), sum(queries for queries, _ in spec.rows)
  tuning = dataclasses.replace(tuning_for("", 64, 64), decode_ctas_per_sm=1, decode_stages=2)
  finished = np.zeros((1, spec.num_tokens), np.int32)
  before = np.full((spec.num_tokens, spec.num_heads, spec.head_dim), 7 if has_prefill else 0, jnp.bfloat16)
  lists = _host(batch.pieces["decode_items"], batch.pieces["worker_starts"])
  inputs = (*batch.operands, *lists, finished, *[before] * has_prefill)

  def program(module: Any) -> tuple[Callable, tuple]:
    static = {"plan": plan, "scale": spec.scale, "soft_cap": None, "tuning": tuning}
    if not has_prefill:
      return functools.partial(module.decode, out=None, **static), (*batch.operands, batch.pieces, finished)
    return functools.partial(module.decode, **static), (*batch.operands, batch.pieces, finished, before)

  def judge(outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    (out,) = (array for array in outputs if array.shape == before.shape)
    cases.compare("attention", out[:used], batch.wanted, np.arange(used))
    if out[used:].tobytes() != before[used:].tobytes():
      raise Wrong("padding is wrong")
    return (out,)

  return Subject("decode", gpu_decode, program, inputs, judge)


def _portable_spec(name: str, dtype: str, rows: tuple[tuple[int, int], ...], tokens: int, table_width: int) -> ArgSpec:
  heads = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64}
  kv_dtype = KV_DTYPES.get(dtype, "")
  more = {"block_size": 32, "table_width": table_width, "dtype": "bfloat16", "kv_dtype": kv_dtype}
  return ArgSpec(name, rows, tokens, len(rows) + 1, **heads, **more)


def _portable_attention(entry: str, spec: ArgSpec, dtype: str, judge: Callable, before: np.ndarray | None) -> Subject:
  """Returns a subject of the portable kernels; `judge` gets the batch too.

  Args:
    dtype: a key of _DTYPES.
    before: what the result holds before the kernel, of any dtype; None: the kernel makes its result.
  """
  batch = _Batch(KernelCase(spec))
  _, kv, tables, lens, starts = batch.operands
  q = batch.queries.astype(_DTYPES[dtype])
  kv = kv if dtype == "fp8" else kv.astype(q.dtype)
  inputs = tables, lens, starts, q, kv, *([] if before is None else [before.astype(q.dtype)])

  def program(module: Any) -> tuple[Callable, tuple]:
    static = {"scale": spec.scale, "sliding_window": spec.sliding_window, "soft_cap": spec.soft_cap}
    return functools.partial(module.ragged_paged_attention, **static), (q, kv, tables, lens, starts)

  return Subject(entry, portable, program, inputs, functools.partial(judge, batch), entry=f"{entry}_kernel")


def _portable_prefill(dtype: str) -> Subject:
  """Twenty queries in two tiles over four chunks of keys, one query that is the decode kernel's, and padding."""
  spec = _portable_spec("prefill", dtype, ((1, 40), (20, 230)), 23, 8)

  def judge(batch: _Batch, outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    (out,) = outputs
    cases.compare("attention", out[1:21], batch.wanted[1:], np.arange(1, 21))
    if out[21:].any():
      raise Wrong("padding tokens must give zeros")
    if not np.isnan(out[0].astype(np.float32)).all():
      raise Wrong("the kernel wrote a row of the decode kernel")
    return outputs

  return _portable_attention("prefill", spec, dtype, judge, None)


_PORTABLE_ROWS = (1, 40), (2, 300), (5, 60)


def _portable_decode(dtype: str) -> Subject:
  """Rows of one and of two queries; a thread block walks all five chunks of the second, which ends inside a page."""
  spec = _portable_spec("decode", dtype, _PORTABLE_ROWS, 10, table_width=10)  # too few chunks to split a row
  before = np.full((spec.num_tokens, spec.num_heads, spec.head_dim), 7.0)

  def judge(batch: _Batch, outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    (out,) = outputs
    cases.compare("attention", out[:3], batch.wanted[:3], np.arange(3))
    if (out[3:] != 7).any():
      raise Wrong("the kernel wrote tokens of the prefill kernel")
    return outputs

  return _portable_attention("decode", spec, dtype, judge, before)


def _portable_parts(dtype: str) -> Subject:
  """As `_portable_decode`, with the second row in parts of four chunks, each its own thread block's."""
  spec = _portable_spec("decode", dtype, _PORTABLE_ROWS, 10, table_width=16)

  def judge(batch: _Batch, outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    parts, logs = outputs
    found = _sum_parts(parts, logs, (1, 3 if dtype == "f32" else 2, 0, 0))
    for row, tokens in enumerate((range(1), range(1, 3))):
      pairs = found[row, 0].reshape(-1, spec.num_heads, spec.head_dim)[: len(tokens)]
      cases.compare("attention", pairs, batch.wanted[tokens], np.array(tokens))
    return outputs

  return _portable_attention("decode", spec, dtype, judge, None)


def _sum_parts(parts: np.ndarray, logs: np.ndarray, counts: Sequence[int]) -> np.ndarray:
  """Returns f32[S, K, pairs, H], the attention of rows; zeros of rows without parts.

  Args:
    parts: f32[S, K, parts, pairs, H], each part's own attention.
    logs: f32[S, K, parts, pairs], the logarithm to base 2 of each part's sum of weights.
    counts: parts of each row. Others must be NaN, which the kernel finds there.

  Raises:
    Wrong: the kernel wrote another part.
  """
  found = np.zeros((*parts.shape[:2], *parts.shape[3:]), np.float32)
  for row, count in enumerate(counts):
    if not (np.isnan(parts[row, :, count:]).all() and np.isnan(logs[row, :, count:]).all()):
      raise Wrong(f"row {row} has more than {count} parts")
    if count:
      weights = np.exp2(logs[row, :, :count] - logs[row, :, :count].max(1, keepdims=True))
      found[row] = (parts[row, :, :count] * weights[..., None]).sum(1) / weights.sum(1)[..., None]
  return found


def _portable_combine(dtype: str) -> Subject:
  """Rows of one part and of two, one of the prefill kernel, and padding."""
  spec = _portable_spec("combine", dtype, _PORTABLE_ROWS, 10, table_width=16)
  rng, counts = np.random.default_rng(0), (1, 2, 0, 0)
  logs = np.full((spec.num_rows, 1, 2, 16), np.nan, np.float32)
  parts = np.full((*logs.shape, spec.head_dim), np.nan, np.float32)
  for row, count in enumerate(counts):
    logs[row, :, :count] = rng.standard_normal((1, count, 16)) * 3
    parts[row, :, :count] = rng.standard_normal((1, count, 16, spec.head_dim))
  before = np.full((spec.num_tokens, spec.num_heads, spec.head_dim), 7, jnp.bfloat16)
  attention = _portable_decode(dtype)
  _, lens, starts, *_ = attention.inputs
  summed = _sum_parts(parts, logs, counts).reshape(spec.num_rows, -1, spec.num_heads, spec.head_dim)
  wanted = np.concatenate([summed[0, :1], summed[1, :2]])

  def judge(outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    (out,) = outputs
    cases.compare("attention", out[:3], wanted, np.arange(3))
    if (out[3:] != 7).any():
      raise Wrong("the kernel wrote tokens of the prefill kernel")
    return outputs

  program = _portable_parts(dtype).program
  return Subject("combine", portable, program, (lens, starts, parts, logs, before), judge, entry="combine_kernel")


_MAKERS: Mapping[str, Callable[[str], Subject]] = {
  "write": _write,
  "prefill": _prefill,
  "decode": _decode,
  "decode-only": functools.partial(_decode, has_prefill=False),
}
_SMALL_DTYPES: dict[str, tuple[str, ...]] = dict.fromkeys(("sm_80", "sm_120", "sm_100a"), ("bf16", "fp8"))
_ANY_DTYPES = _SMALL_DTYPES | {"sm_80": ("bf16", "fp8", "f16", "f32")}
# Of the portable kernels; with the dtypes of queries, or of the pool, by target. On an H200, prefill has wgmma. On a
# B200 it has tcgen05 with 16-bit products.
_PORTABLE: Mapping[str, tuple[Callable[[str], Subject], Mapping[str, tuple[str, ...]]]] = {
  "write": (lambda dtype: _write(KV_DTYPES[dtype], is_portable=True), _SMALL_DTYPES),
  "prefill": (_portable_prefill, _ANY_DTYPES | {"h200": ("bf16", "fp8", "f16"), "sm_100a": _ANY_DTYPES["sm_80"]}),
  "decode": (_portable_decode, dict.fromkeys(_SMALL_DTYPES, ("bf16",))),
  "parts": (_portable_parts, _ANY_DTYPES),
  "combine": (_portable_combine, dict.fromkeys(_SMALL_DTYPES, ("bf16",))),
}
NAMES = (
  *(f"{kernel}_{dtype}" for kernel in _MAKERS for dtype in KV_DTYPES),
  *(
    f"{target}-{kernel}_{dtype}"
    for kernel, (_, dtypes_by_target) in _PORTABLE.items()
    for target, dtypes in dtypes_by_target.items()
    for dtype in dtypes
  ),
)


def make_subject(name: str) -> Subject:
  """Returns the subject of a name in NAMES."""
  kernel, _, dtype = name.rpartition("_")
  if kernel in _MAKERS:
    return dataclasses.replace(_MAKERS[kernel](KV_DTYPES[dtype]), name=name)
  target, _, portable_kernel = kernel.partition("-")
  make, _ = _PORTABLE[portable_kernel]
  return dataclasses.replace(make(dtype), name=name, target=target)
