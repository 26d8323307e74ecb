"""Each kernel of paged attention on one tiny batch: its arrays, its program to compile, and what must come out.

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

from pallas_kernels.paged_attention import gpu_decode, gpu_prefill, gpu_write
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.tuning import tuning_for
from tools.gpu import cases
from tools.gpu.cases import KernelCase, Wrong

KV_DTYPES = {"bf16": "", "fp8": "uint8"}


@dataclasses.dataclass(frozen=True)
class Subject:
  """A kernel and a batch.

  Attributes:
    name: of the kernel and of the pool's dtype.
    module: of the kernel's source.
    program: takes a module like `module`; returns a function and the arrays that it is to be compiled for.
    inputs: of the kernel.
    judge: raises Wrong for wrong outputs; returns those that matter.
  """

  name: str
  module: types.ModuleType
  program: Callable[[Any], tuple[Callable, tuple]]
  inputs: tuple[np.ndarray, ...]
  judge: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


def _host(*arrays: Any) -> tuple[np.ndarray, ...]:
  return tuple(np.asarray(array) for array in arrays)


def _write(kv_dtype: str, head_dim: int = 128) -> Subject:
  """Eleven tokens in tiles of eight, three of them padding, two KV heads."""
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
    run = functools.partial(module.rotate_and_write, tuning=tuning)
    return run, (qkv, cos, sin, kv, slots)

  def judge(outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    q, finished, kv = outputs  # q: [K, whole tiles, G, H]
    if finished.any():
      raise Wrong("the decode kernel's counters are not zeros")
    tokens = np.arange(int(case.query_starts[-1]))
    projected = cases.tokens_of(case.qkv(0), tokens)
    wanted = cases.rounded(case.rotated(projected[:, :, :-2], tokens))
    queries = q.transpose(1, 0, 2, 3)[tokens]
    cases.compare("queries", queries, wanted, tokens)
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

  return Subject("write", gpu_write, program, inputs, judge)


@dataclasses.dataclass(frozen=True)
class _Batch:
  """A batch for attention kernels, with its plan."""

  case: KernelCase
  plan: Plan

  @functools.cached_property
  def pieces(self) -> dict[str, np.ndarray]:
    return self.plan.split(self.plan.make_work(self.case.query_starts, self.case.kv_lens))

  @functools.cached_property
  def operands(self) -> tuple[np.ndarray, ...]:
    """q, kv, block_tables, kv_lens, query_starts."""
    case = self.case
    return _host(case.packed_queries(0), case.pool(before=False), case.tables[0], case.kv_lens, case.query_starts)

  @functools.cached_property
  def wanted(self) -> np.ndarray:
    """f32[tokens in use, N, H]."""
    spec = self.case.spec
    tokens = np.arange(int(self.case.query_starts[-1]))
    packed = self.operands[0].reshape(spec.num_kv_heads, spec.num_tokens, -1, spec.head_dim).transpose(1, 0, 2, 3)
    queries = packed.reshape(spec.num_tokens, spec.num_heads, spec.head_dim)[tokens].astype(np.float32)
    return self.case.attention(jnp.asarray(self.operands[1]), queries, tokens)


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
  batch = _Batch(KernelCase(spec), Plan(spec.geometry, split_blocks=8, decode_queries=2, num_sms=1))
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

  Two SMs have the parts of a row, and either may sum them. Without the prefill kernel, the last row is one of its
  rows, and padding gets zeros.
  """
  spec = ArgSpec(
    "decode",
    ((1, 40), (2, 100), *([] if has_prefill else [(4, 70)])),
    8,
    4,
    block_size=64,
    table_width=3,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    dtype="bfloat16",
    kv_dtype=kv_dtype,
  )
  plan = Plan(spec.geometry, split_blocks=1, decode_queries=2, num_sms=2, has_prefill=has_prefill)
  batch, used = _Batch(KernelCase(spec), plan), sum(queries for queries, _ in spec.rows)
  tuning = dataclasses.replace(tuning_for("", 64, 64), decode_ctas_per_sm=1, decode_stages=2)
  finished = np.zeros((1, spec.num_tokens), np.int32)
  before = np.full((spec.num_tokens, spec.num_heads, spec.head_dim), 7 if has_prefill else 0, jnp.bfloat16)
  names = ("decode_items", "sm_starts", "sm_items", "row_slots")
  inputs = (*batch.operands, *_host(*(batch.pieces[name] for name in names)), finished, *[before] * has_prefill)

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


_MAKERS: Mapping[str, Callable[[str], Subject]] = {
  "write": _write,
  "prefill": _prefill,
  "decode": _decode,
  "decode-only": functools.partial(_decode, has_prefill=False),
}
NAMES = tuple(f"{kernel}_{dtype}" for kernel in _MAKERS for dtype in KV_DTYPES)


def make_subject(name: str) -> Subject:
  """Returns the subject of a name in NAMES."""
  kernel, _, dtype = name.rpartition("_")
  return dataclasses.replace(_MAKERS[kernel](KV_DTYPES[dtype]), name=name)
