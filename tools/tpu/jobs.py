"""The jobs of a worker on a TPU: first calls of each kernel, checks and timings, by the numbers of tools/gpu/cases.py.

The kinds and their fields; "implementation" is "tpu" in all of them, and "kv_dtype" is "" or "uint8" (fp8):

  smoke    "op": "dma copy" | "row copies" | "write" | "attention", "head_dim": H, and those of tools/gpu/smoke.py
  ceiling  see tools/gpu/jobs.py
  check    "op": "attend", "spec": NAME, "kv_dtype"
  time     "op": "decode" | "prefill" | "write", "spec": NAME
"""

from collections.abc import Callable
import dataclasses
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import api, arg_specs, tpu
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.fp8_kv import BYTES
from pallas_kernels.row_copies.api import make_buffer_shape, read_rows, write_rows
from tools.gpu import cases, smoke, timing
from tools.gpu import jobs as shared
from tools.gpu.cases import Comparisons, KernelCase
from tools.gpu.jobs import Setting
from tools.gpu.protocol import Job, Prepared

SMOKE_OPS = ("write", "attention")
_MOST_POOL_BYTES = 2**29  # of a timing: a v5e has 16 GB, and a pool is there twice while it is made


def prepare(job: Job, setting: Setting) -> Prepared:
  """Returns what the worker compiles and runs. Raises ValueError for an unknown job."""
  if job["kind"] == "ceiling" or job.get("op") in ("add", "attend") and job["kind"] == "smoke":
    return shared.prepare(job, setting)
  if job.get("op") == "dma copy":
    return _copy(setting)
  if job.get("op") == "row copies":
    return _write_and_read_rows(setting)
  kinds: dict[str, Callable[[Job, Setting], Prepared]] = {"smoke": _kernel, "check": _check, "time": _time}
  if job["kind"] not in kinds:
    raise ValueError(f"job {job} is of no kind of ceiling, {', '.join(kinds)}")
  return kinds[job["kind"]](job, setting)


def smoke_jobs() -> list[Job]:
  """Returns the jobs of the smoke stage, the simplest first. Opens no device."""
  common = {"kind": "smoke", "implementation": "tpu"}
  pools = (128, ""), (64, ""), (128, BYTES.name)
  found = [{"kind": "smoke", "op": "add"}, {"kind": "smoke", "op": "dma copy"}]
  found += [common | {"op": op, "head_dim": size, "kv_dtype": kv} for size, kv in pools for op in SMOKE_OPS]
  found.append(common | {"op": "row copies"})
  return found + smoke.attend_jobs("tpu")


def check_jobs() -> list[Job]:
  """Returns a check of a layer for each spec that the kernels support."""
  found: list[Job] = []
  for spec in (*arg_specs.GPU_BENCHMARK, *arg_specs.CONFORMANCE):
    for kv_dtype in ("", BYTES.name):
      try:
        api.check_supported("tpu", spec.geometry, jnp.bfloat16, kv_dtype or None)
      except NotImplementedError:
        continue
      found.append({"kind": "check", "implementation": "tpu", "op": "attend", "spec": spec.name, "kv_dtype": kv_dtype})
  return found


def to_lines(pool: jax.Array) -> jax.Array:
  """Returns a pool in the TPU kernels' layout, [P, K, page, W], of one in KernelCase's."""
  blocks, heads, _, page, size = pool.shape
  lines = pool.transpose(0, 1, 3, 2, 4).reshape(blocks, heads, page, 2 * size)
  width = tpu.kv_shape(blocks, page, heads, size)[3]
  return jnp.pad(lines, ((0, 0), (0, 0), (0, 0), (0, width - 2 * size)))


def to_pool(lines: jax.Array, head_dim: int) -> jax.Array:
  """Returns a pool in KernelCase's layout, [P, K, 2, page, H]."""
  blocks, heads, page, _ = lines.shape
  return lines[..., : 2 * head_dim].reshape(blocks, heads, page, 2, head_dim).transpose(0, 1, 3, 2, 4)


def _copy(setting: Setting) -> Prepared:
  """Copies f32[64, 128] from HBM to VMEM and back by asynchronous copies."""
  x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)

  def body(source, target, buffer, copied):
    for one in ((source, buffer), (buffer, target)):
      copy = pltpu.make_async_copy(*one, copied)
      copy.start()
      copy.wait()

  def program(x):
    return pl.pallas_call(
      body,
      out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
      in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
      out_specs=pl.BlockSpec(memory_space=pl.ANY),
      scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
    )(x)

  return smoke.prepare_equal(setting, program, (x,), x, "copied numbers")


def _write_and_read_rows(setting: Setting) -> Prepared:
  """Writes 48 of 129 rows of bf16[384] in place, drops 16 values past the buffer's end, and reads 64 rows.

  The reference does the same on the host. A row of the buffer is longer, and NaN fills the rest.
  """
  num_rows, count, width, rng = 129, 64, 384, np.random.default_rng(0)
  old, new = (rng.standard_normal((size, width)).astype(jnp.bfloat16) for size in (num_rows, count))
  targets = rng.permutation(num_rows)[:count].astype(np.int32)
  targets[::4] += num_rows
  sources = rng.integers(0, num_rows, count, np.int32)
  shape = make_buffer_shape(num_rows, width, "tpu")
  spare = math.prod(shape[1:]) - width
  buffer = np.pad(old, ((0, 0), (0, spare)), constant_values=np.nan)
  operands = buffer.reshape(shape), targets, new, sources

  def program(buffer, targets, new, sources):
    written = write_rows(buffer, targets, new, "tpu")
    return written, read_rows(written, sources, width, "tpu")

  def run(compiled):
    written, found = (np.asarray(x) for x in compiled(*smoke.put_arrays(setting, *operands)))
    expected = write_rows(jnp.asarray(old), jnp.asarray(targets), jnp.asarray(new))
    read = np.asarray(read_rows(expected, jnp.asarray(sources), width))
    every, comparisons = written.reshape(num_rows, -1)[:, :width], Comparisons()
    comparisons.add("error", lambda: smoke.compare_bits("rows of the buffer", every, np.asarray(expected)))
    comparisons.add("read", lambda: smoke.compare_bits("rows that were read", found, read))
    return comparisons.finish()

  return smoke.prepare_on_host(setting, program, operands, run, donate=(0,))


def _write(kv: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
  # Without the barrier, XLA refuses a kernel whose result in HBM is directly that of the program, in donated memory.
  return jax.lax.optimization_barrier(tpu.write_kv(kv, k, v, slots))


def _attend_rows(spec: ArgSpec, q, lines, tables, lens, starts):
  return tpu.ragged_paged_attention(
    *(q, lines, tables, lens, starts), scale=spec.scale, sliding_window=spec.sliding_window, soft_cap=spec.soft_cap
  )


def _kernel(job: Job, setting: Setting) -> Prepared:
  """A kernel alone."""
  spec = dataclasses.replace(smoke.spec_of(job["head_dim"]), kv_dtype=job["kv_dtype"])
  used = sum(queries for queries, _ in spec.rows)
  with smoke.on_host():
    case = KernelCase(spec)
    qkv = np.asarray(case.qkv(0))
    pool = case.pool(before=job["op"] == "write")
    lines = np.asarray(to_lines(pool))
    q = qkv[:, :, :-2].reshape(spec.num_tokens, spec.num_heads, spec.head_dim)
    if job["op"] == "write":
      operands = lines, qkv[:, :, -2], qkv[:, :, -1], case.slots[0]
    else:
      operands = lines, q, case.tables[0], case.kv_lens, case.query_starts

  def program(kv, *rest):
    if job["op"] == "write":
      return _write(kv, *rest)
    q, tables, lens, starts = rest
    return _attend_rows(spec, q, kv, tables, lens, starts)

  def run(compiled):
    comparisons, found = Comparisons(), np.asarray(compiled(*smoke.put_arrays(setting, *operands)))
    tokens = np.arange(used)
    if job["op"] == "write":
      right = np.array(lines)
      slots, page = case.slots[0, tokens], spec.block_size
      both = np.concatenate([qkv[tokens, :, -2], qkv[tokens, :, -1]], axis=-1).astype(np.float32)
      stored = cases.stored(both, case.kv_dtype)
      if case.kv_dtype == BYTES:
        stored = np.asarray(stored).astype(jnp.float8_e4m3fn).view(np.uint8)
      right[slots // page, :, slots % page, : 2 * spec.head_dim] = stored
      comparisons.add("error", lambda: smoke.compare_bits("lines of the pool", found[1:], right[1:]))
    else:
      expected = case.attention(pool, q[tokens].astype(np.float32), tokens)
      comparisons.add("error", lambda: cases.compare("attention", found[tokens], expected, tokens))
      comparisons.require(not (found[used:] != 0).any(), "attention: padding tokens must give zeros")
    return comparisons.finish()

  donate = (0,) if job["op"] == "write" else ()
  return smoke.prepare_on_host(setting, program, operands, run, donate)


def _check(job: Job, setting: Setting) -> Prepared:
  """A layer on a large spec, with numbers made by the device."""
  spec = dataclasses.replace(setting.spec(job["spec"]), kv_dtype=job["kv_dtype"])
  api.check_supported("tpu", spec.geometry, jnp.bfloat16, job["kv_dtype"] or None)
  case = KernelCase(spec)
  attention = api.PagedAttention("tpu", spec.geometry, spec.scale, spec.soft_cap, setting.device.device_kind)
  rows = tuple(jnp.asarray(x) for x in (case.tables[0], case.kv_lens, case.query_starts))

  def program(kv, qkv, cos, sin, slots, *rows):
    return attention.attend(qkv, cos, sin, kv, attention.meta(*rows), slots)

  def run(compiled):
    operands = case.qkv(0), *shared.angle_arrays(case), jnp.asarray(case.slots[0]), *rows
    out, lines = compiled(jax.jit(to_lines)(case.pool(before=True)), *operands)
    after = jax.jit(to_pool, static_argnums=1)(lines, spec.head_dim)
    tokens, comparisons, used = case.sampled(256), Comparisons(), int(case.query_starts[-1])
    shared.compare_pool(comparisons, case, after, tokens)
    expected = case.attention(after, shared.host_queries(case, tokens), tokens)
    comparisons.add("error", lambda: cases.compare("attention", cases.tokens_of(out, tokens), expected, tokens))
    is_finite = bool(jnp.isfinite(out[:used]).all())
    comparisons.require(is_finite, "attention: a token, perhaps one that was not sampled, holds NaN or Inf")
    comparisons.require(not bool((out[used:] != 0).any()), "attention: padding tokens must give zeros")
    again, _ = compiled(jax.jit(to_lines)(case.pool(before=True)), *operands)
    is_same = np.array_equal(np.asarray(out).view(np.uint16), np.asarray(again).view(np.uint16))
    comparisons.require(is_same, "attention: the same call gave other bits, so there is a race")
    return comparisons.finish(tokens_compared=len(tokens))

  abstract = jax.eval_shape(lambda: (to_lines(case.pool(before=True)), case.qkv(0), *shared.angle_arrays(case)))
  slots = jax.ShapeDtypeStruct((spec.num_tokens,), jnp.int32)
  arguments = (*abstract, slots, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rows))
  return setting.prepared(program, arguments, run, donate=(0,))


def _time(job: Job, setting: Setting) -> Prepared:
  """One kernel, several times in a program, each time on other blocks."""
  op, spec = job["op"], setting.spec(job["spec"])
  times = shared.number_of_calls(op, spec, setting.tiny)
  copies = min(times, max(2, _MOST_POOL_BYTES // max(1, KernelCase(spec).nbytes)))
  case, last = KernelCase(spec, copies, seed=1), (times - 1) % copies
  heads = spec.num_tokens, spec.num_heads, spec.head_dim

  def inputs() -> tuple[list[tuple[jax.Array, ...]], jax.Array, jax.Array]:
    calls = []
    for number in range(times):
      qkv = case.qkv(number % copies)
      table, slots = (jnp.asarray(x[number % copies]) for x in (case.tables, case.slots))
      calls.append((qkv[:, :, -2], qkv[:, :, -1], slots) if op == "write" else (qkv[:, :, :-2].reshape(heads), table))
    return calls, jnp.asarray(case.kv_lens), jnp.asarray(case.query_starts)

  def program(carry, calls, lens, starts):
    kv, outs = carry
    made = []
    for call in calls:
      if op == "write":
        kv = _write(kv, *call)
      else:
        made.append(_attend_rows(spec, call[0], kv, call[1], lens, starts))
        kv, made[-1] = jax.lax.optimization_barrier((kv, made[-1]))
    return kv, tuple(made) or outs

  def run(compiled):
    results = () if op == "write" else tuple(jnp.zeros(heads, jnp.bfloat16) for _ in range(times))
    carry = jax.jit(to_lines)(case.pool(before=False)), results
    (_, outs), found = timing.measure(compiled, carry, inputs(), times, setting.effort)
    if op != "write":
      tokens = case.sampled(8)
      tokens = np.unique(tokens[np.linspace(0, len(tokens) - 1, 24).astype(int)])
      queries = cases.tokens_of(case.qkv(last)[:, :, :-2].reshape(heads), tokens)
      expected = case.attention(case.pool(before=False), queries, tokens, last)
      found["error"] = cases.compare("attention", cases.tokens_of(outs[-1], tokens), expected, tokens)
    return found | {"times": times, "bytes": cases.read_bytes(spec), "flops": cases.flops(spec)}

  results = () if op == "write" else (jax.ShapeDtypeStruct(heads, jnp.bfloat16),) * times
  lines = jax.eval_shape(lambda: to_lines(case.pool(before=False)))
  return setting.prepared(program, ((lines, results), *jax.eval_shape(inputs)), run, donate=(0,))
