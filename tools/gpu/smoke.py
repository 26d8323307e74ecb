"""First calls on an unknown device: a copy, then each kernel alone on tiny data; part of tools/gpu/jobs.py.

The host makes all operands and does all comparisons, so a kernel is the only device program of its job. The fields of a
job with "kind": "smoke":

  "op": "add"                                XLA alone
  "op": "tma copy" | "tma tiles"             a copy by TMA, plain and through swizzled tiles
  "op": one of HOPPER_OPS, "head_dim": 64 | 128, "kv_dtype": "" | "uint8" (fp8)
                                             a Hopper kernel alone; "decode" splits no row, "decode parts" does, and so
                                             does "decode only", in a rung without the prefill kernel
  "op": "attend", "implementation": NAME, "head_dim": H, "kv_dtype": "" | "uint8" (fp8) | "int8"
                                             two steps of a whole layer: prompts, then their next tokens
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import inspect
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.fp8_kv import BYTES, from_fp8, to_fp8
from pallas_kernels.paged_attention.int8_kv import dequantize, quantize
from tools.gpu import cases, jobs
from tools.gpu.cases import Comparisons, KernelCase, Wrong
from tools.gpu.protocol import Job, Prepared

HOPPER_OPS = ("write", "prefill", "decode", "decode parts", "decode only")
# Implementations that no device of a platform runs; any other joins by itself.
_ELSEWHERE = {"gpu": ("cpu", "tpu"), "tpu": ("cpu", "gpu", "portable")}
_TILE = 64  # rows and columns of a tile of the copies
_SWIZZLED = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
_TILED = (plgpu.TilingTransform((8, _TILE)), _SWIZZLED)  # pyright: ignore[reportAbstractUsage]
# Prompts, then the next tokens of the same rows; no row needs another block in between, whatever the block size.
_PROMPTS = ((69, 69), (17, 17), (33, 33), (36, 36))
_NEXT = ((1, 70), (1, 18), (7, 40), (12, 48))
# Keys and values of 8 bits: two roundings of one key may differ by a step of an eighth, and one weight by as much.
_LOOSE_ABSOLUTE, _LOOSE_NORM = 6e-2, 2e-2


def spec_of(head_dim: int) -> ArgSpec:
  """Returns the batch of the jobs for one kernel: rows of 1, 1, 3, 7 and 40 queries, and padding."""
  rows = ((1, 70), (1, 9), (3, 130), (7, 7), (40, 140))
  return ArgSpec(
    f"smoke, heads of {head_dim}",
    rows,
    num_tokens=56,
    num_rows=6,
    block_size=64,
    table_width=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=head_dim,
    dtype="bfloat16",
  )


def prepare(job: Job, setting: jobs.Setting) -> Prepared:
  """Returns what the worker compiles and runs.

  Raises:
    NotImplementedError: the device or the implementation does not support the job.
  """
  op = job["op"]
  if op == "attend":
    return _attend(job, setting)
  if op == "add":
    x = np.arange(1024, dtype=np.float32)
    return prepare_equal(setting, lambda x: x + 1, (x,), x + 1, "x + 1")
  setting.check_hopper()
  if op.startswith("tma"):
    return _copy(op, setting)
  return _kernel(job, setting)


@contextlib.contextmanager
def on_host():
  """Makes the host the place of every array and every program of jax.numpy, while open."""
  with jax.default_device(jax.devices("cpu")[0]):
    yield


def put_arrays(setting: jobs.Setting, *arrays: Any) -> tuple[jax.Array, ...]:
  """Returns arrays on the device, copied from the host; runs no program there."""
  return tuple(jax.device_put(np.asarray(array), setting.device) for array in arrays)


def prepare_on_host(
  setting: jobs.Setting, program: Callable, operands: tuple[Any, ...], run: Callable, donate: tuple[int, ...] = ()
) -> Prepared:
  """As Setting.prepared for a program of these operands, with `run` on the host."""

  def run_on_host(compiled):
    with on_host():
      return run(compiled)

  arguments = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
  return setting.prepared(program, arguments, run_on_host, donate=donate, serial=False)


def prepare_equal(
  setting: jobs.Setting, program: Callable, operands: tuple[Any, ...], expected: np.ndarray, what: str
) -> Prepared:
  """A program that must return the bits of `expected`."""

  def run(compiled):
    comparisons, found = Comparisons(), compiled(*put_arrays(setting, *operands))
    comparisons.add("error", lambda: compare_bits(what, found, expected))
    return comparisons.finish()

  return prepare_on_host(setting, program, operands, run)


def compare_bits(what: str, found: Any, expected: np.ndarray) -> float:
  """Returns 0; raises Wrong with the first place where the bits differ."""
  bits = [np.ascontiguousarray(np.asarray(x)).view(np.uint8) for x in (found, expected)]
  different = np.flatnonzero((bits[0] != bits[1]).reshape(expected.size, -1).any(1))
  if len(different):
    at = np.unravel_index(different[0], expected.shape)
    raise Wrong(
      f"{what}: {len(different)} of {expected.size} elements differ; the first is at {tuple(int(i) for i in at)}: "
      f"{np.asarray(found)[at]} and not {expected[at]}"
    )
  return 0.0


def _copy(op: str, setting: jobs.Setting) -> Prepared:
  """Copies bf16[256, 64] through shared memory, a tile a thread block."""
  x = np.random.default_rng(0).standard_normal((4 * _TILE, _TILE)).astype(jnp.bfloat16)
  transforms = _TILED if op == "tma tiles" else ()

  def body(source, target, tile, ready):
    rows = pl.ds(jax.lax.axis_index("tile") * _TILE, _TILE)
    plgpu.copy_gmem_to_smem(source.at[rows], tile, ready)
    plgpu.barrier_wait(ready)
    plgpu.copy_smem_to_gmem(tile, target.at[rows])
    plgpu.wait_smem_to_gmem(0)

  def program(x):
    return plgpu.kernel(
      body,
      out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
      grid=(4,),
      grid_names=("tile",),
      scratch_types=[plgpu.SMEM((_TILE, _TILE), x.dtype, transforms=transforms), plgpu.Barrier()],
      compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
      interpret=setting.interpret,
    )(x)

  return prepare_equal(setting, program, (x,), x, "copied numbers")


def _kernel(job: Job, setting: jobs.Setting) -> Prepared:
  """A Hopper kernel alone."""
  op, spec = job["op"], dataclasses.replace(spec_of(job["head_dim"]), kv_dtype=job["kv_dtype"])
  if op == "decode only":  # as many rows as tokens make a rung for decodes
    spec = dataclasses.replace(spec, num_rows=spec.num_tokens)
  tuning = setting.tuning(spec, {"split_tokens": 2**20 if op == "decode" else 64})
  kernels = jobs.Kernels(setting, spec, tuning, whole=False)
  with on_host():
    case = KernelCase(spec)
    rows = jobs.row_arrays(kernels, case)
    if op == "write":
      operands = case.pool(before=True), case.qkv(0), *jobs.angle_arrays(case), jnp.asarray(case.slots[0])
    else:
      finished = np.zeros((spec.num_kv_heads, spec.num_tokens), np.int32)
      out, q, kv = jobs.nan_like(kernels.output), case.packed_queries(0), case.pool(before=False)
      operands = out, q, kv, case.tables[0], *rows, finished

  def program(donated, *rest):
    if op == "write":
      qkv, cos, sin, slots = rest
      return kernels.write(qkv, cos, sin, donated, slots)[:2]
    *shared, finished = rest
    if op == "prefill":
      return kernels.prefill(*shared)
    return kernels.decode(*shared, finished, donated if kernels.plan.has_prefill else None)

  def run(compiled):
    found = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), compiled(*put_arrays(setting, *operands)))
    comparisons = Comparisons()
    if op == "write":
      queries, after = found
      jobs.compare_write(comparisons, case, queries, after, np.arange(int(case.query_starts[-1])))
    else:
      _compare_attention(comparisons, op, kernels, case, operands, found)
    again = compiled(*put_arrays(setting, *operands))
    for first, second in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
      comparisons.add("again", lambda a=first, b=second: compare_bits("the same call again", b, np.asarray(a)))
    return comparisons.finish()

  return prepare_on_host(setting, program, operands, run, donate=() if op in ("prefill", "decode only") else (0,))


def _compare_attention(
  comparisons: Comparisons, op: str, kernels: jobs.Kernels, case: KernelCase, operands: tuple, out: jax.Array
) -> None:
  """Compares the tokens that the kernel must write, and those that it must leave NaN or fill with zeros."""
  spec, used = case.spec, int(case.query_starts[-1])
  counts = [queries for queries, _ in spec.rows]
  most = kernels.plan.decode_queries if kernels.plan.has_prefill else spec.num_tokens
  decoded = np.repeat([count <= most for count in counts], counts)
  mine = np.flatnonzero(decoded == op.startswith("decode"))
  queries = cases.tokens_of(jobs.queries_by_token(spec, operands[1]), mine)
  expected = case.attention(operands[2], queries, mine)
  comparisons.add("error", lambda: cases.compare("attention", cases.tokens_of(out, mine), expected, mine))
  found = np.asarray(out).astype(np.float32)
  if op == "prefill" or not kernels.plan.has_prefill:
    comparisons.require(not (found[used:] != 0).any(), "attention: padding tokens must give zeros")
  else:
    others = np.setdiff1d(np.arange(spec.num_tokens), mine)
    comparisons.require(bool(np.isnan(found[others]).all()), "attention: the kernel wrote tokens of other rows")


def _stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns f32 numbers as a pool of `dtype` holds them."""
  if dtype == BYTES:
    return np.asarray(from_fp8(to_fp8(jnp.asarray(array))))
  if dtype == np.int8:
    return np.asarray(dequantize(quantize(jnp.asarray(array))))
  return array.astype(dtype).astype(np.float32)


def _compare_loosely(what: str, found: np.ndarray, expected: np.ndarray) -> float:
  """Returns the relative error in norm, for KV of 8 bits; raises Wrong if it is too large."""
  off = np.abs(found.astype(np.float32) - expected)
  norm = float(np.linalg.norm(off) / np.linalg.norm(expected))
  if not (norm < _LOOSE_NORM and off.max() < _LOOSE_ABSOLUTE):
    raise Wrong(f"{what}: error {norm:.1e} of the norm, the largest {off.max():.1e}")
  return norm


def _attend(job: Job, setting: jobs.Setting) -> Prepared:
  """Two steps of a layer. Only the implementation itself writes the pool, so that its layout does not matter."""
  name = job["implementation"]
  module, dtype = api.implementation(name), jnp.dtype(job["kv_dtype"] or jnp.bfloat16)
  spec = ArgSpec(
    "smoke",
    _NEXT,
    num_tokens=160,
    num_rows=5,
    block_size=128 if dtype == np.int8 else max(16, api.preferred_block_size(name)),
    table_width=8,
    num_heads=8,
    num_kv_heads=2,
    head_dim=job["head_dim"],
    dtype="bfloat16",
  )
  if name == "gpu":
    setting.check_hopper()
  api.check_supported(name, spec.geometry, jnp.bfloat16, dtype)
  attention = api.PagedAttention(name, spec.geometry, spec.scale, None, setting.device.device_kind)
  options = {}
  if "interpret" in inspect.signature(module.attend).parameters:
    options["interpret"] = setting.interpret if name == "gpu" else setting.tiny

  def program(kv, qkv, cos, sin, tables, lens, starts, slots, *plan):
    meta = attention.meta(tables, lens, starts, *plan)
    return module.attend(attention, qkv, cos, sin, kv, meta, slots, **options)

  with on_host():
    steps = [KernelCase(dataclasses.replace(spec, rows=rows), seed=0) for rows in (_PROMPTS, _NEXT)]
    if not np.array_equal(steps[0].tables, steps[1].tables):
      raise AssertionError("the rows of the two steps need the same blocks")
    shape = api.kv_shape(steps[0].num_blocks, spec.block_size, 2, spec.head_dim, name, dtype)
    empty = np.full(shape, {"int8": -1, "uint8": 255}.get(dtype.name, np.nan), dtype)  # NaN in all of them
    inputs = [_step_operands(attention, number, case) for number, case in enumerate(steps)]

  def run(compiled):
    kv, comparisons, right = empty, Comparisons(), np.full(steps[0].kv_shape(), np.nan, np.float32)
    for number, (case, operands) in enumerate(zip(steps, inputs, strict=True)):
      out, kv = (np.asarray(x) for x in compiled(*put_arrays(setting, kv, *operands)))
      used = int(case.query_starts[-1])
      tokens = np.arange(used)
      expected = _write_and_attend(case, operands[0], right, dtype, tokens)
      what = ("prompts", "next tokens")[number]
      if dtype.itemsize == 1:
        comparisons.add(what, functools.partial(_compare_loosely, what, out[:used], expected))
      else:
        comparisons.add(what, functools.partial(cases.compare, what, out[:used], expected, tokens))
      comparisons.require(not (out[used:] != 0).any(), f"{what}: padding tokens must give zeros")
    return comparisons.finish()

  return prepare_on_host(setting, program, (empty, *inputs[0]), run, donate=(0,))


def _step_operands(attention: api.PagedAttention, number: int, case: KernelCase) -> tuple[np.ndarray, ...]:
  """Returns the operands of step `number` but for the pool."""
  plan = [] if attention.plan is None else [attention.plan.make_work(case.query_starts, case.kv_lens)]
  rows = case.tables[0], case.kv_lens, case.query_starts, case.slots[0]
  return tuple(np.asarray(x) for x in (case.qkv(number), *jobs.angle_arrays(case), *rows, *plan))


def _write_and_attend(
  case: KernelCase, qkv: np.ndarray, pool: np.ndarray, dtype: np.dtype, tokens: np.ndarray
) -> np.ndarray:
  """Writes a step's keys and values into `pool`, f32 in the layout of KernelCase; returns the attention expected."""
  page, slots = case.spec.block_size, case.slots[0, tokens]
  projected = qkv[tokens].astype(np.float32)
  turned = cases.rounded(case.rotated(projected[:, :, :-1], tokens))
  for which, numbers in enumerate((turned[:, :, -1], projected[:, :, -1])):
    pool[slots // page, :, which, slots % page] = _stored(numbers, dtype)
  queries = turned[:, :, :-1].reshape(-1, case.spec.num_heads, case.spec.head_dim)
  return case.attention(jnp.asarray(pool), queries, tokens)


def smoke_jobs() -> list[Job]:
  """Returns the jobs for a GPU, the simplest first. Opens no device."""
  found: list[Job] = [{"kind": "smoke", "op": op} for op in ("add", "tma copy", "tma tiles")]
  pools = (128, ""), (64, ""), (128, BYTES.name)
  found += [{"kind": "smoke", "op": op, "head_dim": size, "kv_dtype": kv} for size, kv in pools for op in HOPPER_OPS]
  return found + attend_jobs("gpu")


def attend_jobs(platform: str) -> list[Job]:
  """Returns two steps of a layer for each implementation that may run on a platform, and each dtype of KV.

  The worker refuses implementations that its own device does not run.
  """
  found: list[Job] = []
  for name in api.IMPLEMENTATIONS:
    if name in _ELSEWHERE[platform]:
      continue
    for dtype in (None, *api.EIGHT_BIT_KV.values()):
      with contextlib.suppress(NotImplementedError):
        spec = dataclasses.replace(spec_of(128), block_size=128 if dtype == np.int8 else 64)
        api.check_supported(name, spec.geometry, jnp.bfloat16, dtype)
        kv_dtype = dtype.name if dtype else ""
        found.append({"kind": "smoke", "op": "attend", "implementation": name, "head_dim": 128, "kv_dtype": kv_dtype})
  return found
