"""The jobs of a worker on a GPU: ceilings, checks, timings, the dense peer, the whole step.

A job is a JSON object with a "kind" and that kind's fields. `prepare` turns it into something to compile and to run
(protocol.Prepared). The kinds and their fields:

  ceiling        "what": "read", "way": "rows" | "all" | "sum"
  ceiling        "what": "copy" | "matmul"
  check          "op": "parts" | "attend", "spec": NAME, and for a pool of fp8 "kv_dtype": "uint8"
                 and for a setting: "tuning": {field: value}, "block_size": tokens
  time           "op": "decode" | "prefill" | "write" | "attend" | "dense", "spec": NAME
                 and for a sweep: "tuning": {field: value}, "block_size": tokens
  profile        the fields of "time"; returns the profiler's figures for the kernels
  step           "rows": B, "context": tokens
  deterministic  no fields; see invariance.py
  smoke          see smoke.py
"""

from collections.abc import Callable
import dataclasses
import functools
import re
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from pallas_kernels.paged_attention import arg_specs, gpu, gpu_decode, gpu_prefill, gpu_write
from pallas_kernels.paged_attention import plan as plan_lib
from pallas_kernels.paged_attention.api import PagedAttention, check_gpu_capability
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.tuning import Tuning, count_sms, tuning_for
from tools.gpu import cases, timing
from tools.gpu.cases import Comparisons, KernelCase
from tools.gpu.protocol import Job, Prepared

_COLD_BYTES = 2**28  # inputs rotate over at least this many bytes: several times an L2 cache
_MOST_POOL_BYTES = 2**32
_CALL_US = 400.0  # approximate length of a program, so that the host stays ahead of it
_MOST_CALLS = 64  # most calls of a kernel in a program
_BYTES_A_US, _FLOPS_A_US = 3.5e6, 4e8  # a guess of a kernel's rate, to choose the number of calls
_SERIAL = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}  # calls of one program must not overlap


@dataclasses.dataclass(frozen=True)
class Setting:
  """The setting of jobs.

  Attributes:
    device: the GPU, or in a dry run the CPU or a GPU without the hardware.
    mode: "device", "interpret" (tiny sizes through the GPU interpreter), "emulate" (tiny sizes, the compiled PTX) or
      "compile" (nothing runs).
    effort: effort of timings.
  """

  device: Any
  mode: str
  effort: timing.Effort = timing.Effort()

  @property
  def tiny(self) -> bool:
    return self.mode in ("interpret", "emulate")

  @property
  def interpret(self) -> plgpu.InterpretGPUParams | None:
    return plgpu.InterpretGPUParams() if self.mode == "interpret" else None

  def check_hopper(self) -> None:
    """Raises NotImplementedError on a device that does not run the implementation "gpu"."""
    if self.mode == "device":
      check_gpu_capability(self.device.compute_capability)

  def abstract(self, tree: Any) -> Any:
    """Returns ShapeDtypeStructs on the device for arrays or other structs."""
    place = SingleDeviceSharding(self.device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

  def spec(self, name: str) -> ArgSpec:
    """Returns the spec of this name, in bf16 and of a size that this setting can run."""
    for one in arg_specs.GPU_SPECS:
      if one.name == name:
        large = one in arg_specs.GPU_BENCHMARK
        return cases.shrunk(one) if self.tiny and large else dataclasses.replace(one, dtype="bfloat16")
    raise ValueError(f"no spec is called {name!r}")

  def tuning(self, spec: ArgSpec, changes: dict[str, Any]) -> Tuning:
    """Returns the table's settings with some replaced."""
    changes = dict(changes)
    if "lowering" in changes:
      changes["lowering"] = plgpu.LoweringSemantics[changes["lowering"]]
    if self.tiny:
      changes = {"split_tokens": 64, **changes}
    return dataclasses.replace(tuning_for(self.device.device_kind, spec.head_dim, spec.block_size), **changes)

  def prepared(
    self, program: Callable, arguments: tuple, run: Callable, donate: tuple[int, ...] = (), serial: bool = True
  ) -> Prepared:
    """Lowers here, compiles in any thread; `run` gets the executable. If nothing can run, `run` is left out."""
    lowered = jax.jit(program, donate_argnums=donate, keep_unused=True).lower(*self.abstract(arguments))
    options = _SERIAL if serial and not self.tiny and self.device.platform != "tpu" else None

    def compile_it():
      compiled = lowered.compile(options)
      return compiled, _facts(compiled, self.tiny)

    def run_it(found):
      compiled, facts = found
      return facts | ({} if self.mode == "compile" else run(compiled))

    return Prepared(compile_it, run_it)


def _facts(compiled: jax.stages.Compiled, interpreted: bool) -> dict[str, Any]:
  """Returns compile facts: bytes of temporaries and of in-place results, and copies."""
  memory = compiled.memory_analysis()
  return {
    "temp_bytes": memory.temp_size_in_bytes if memory else None,
    "alias_bytes": memory.alias_size_in_bytes if memory else None,
    # The interpreter's programs copy anyway.
    "copies": 0 if interpreted else len(re.findall(r" copy\(", compiled.as_text() or "")),
  }


# --- ceilings ---------------------------------------------------------------------------------------------------------


def _ceiling(job: Job, setting: Setting) -> Prepared:
  what, small = job["what"], setting.tiny
  if what == "matmul":
    size, times = (256, 2) if small else (8192, 4)
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)

    def multiply(carry, left, right):
      return tuple(x @ right for x in left)

    def time_it(compiled):
      left, right = [_normal(matrix, key) for key in range(times)], _normal(matrix, 99)
      carry = tuple(nan_like(matrix) for _ in range(times))
      _, found = timing.measure(compiled, carry, (tuple(left), right), times, setting.effort)
      return found | {"flops_per_s": 2e6 * size**3 / found["us"]}

    return setting.prepared(multiply, ((matrix,) * times, (matrix,) * times, matrix), time_it, donate=(0,))

  rows, columns = (64, 1024) if small else (2**15, 2**15)
  array = jax.ShapeDtypeStruct((rows, columns), jnp.float32 if what == "read" else jnp.bfloat16)
  size = rows * columns * array.dtype.itemsize
  if what == "copy":

    def copy(carry, x):
      return x + jnp.bfloat16(1)

    def time_copy(compiled):
      _, found = timing.measure(compiled, _normal(array, 0), (_normal(array, 1),), 1, setting.effort)
      return found | {"bytes_per_s": 2e6 * size / found["us"]}

    return setting.prepared(copy, (array, array), time_copy, donate=(0,))

  kinds = {"rows": lambda x: x.max(1), "all": lambda x: x.max()[None], "sum": lambda x: x.sum(1)}

  def read(carry, x):
    return kinds[job["way"]](x)

  def time_read(compiled):
    x = _normal(array, 0)
    carry = jnp.zeros(1 if job["way"] == "all" else rows, jnp.float32)
    _, found = timing.measure(compiled, carry, (x,), 1, setting.effort)
    return found | {"bytes_per_s": 1e6 * size / found["us"]}

  result = jax.ShapeDtypeStruct((1 if job["way"] == "all" else rows,), jnp.float32)
  return setting.prepared(read, (result, array), time_read, donate=(0,))


def _normal(like: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
  return _random(like.shape, like.dtype, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(shape: tuple[int, ...], dtype: Any, key: jax.Array) -> jax.Array:
  return jax.random.normal(key, shape, dtype)


# --- the kernels ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernels:
  """The kernels' calls on one spec. `rows` of a call: block_tables, kv_lens, query_starts, packed plan."""

  setting: Setting
  spec: ArgSpec
  tuning: Tuning
  whole: bool  # gpu.attend takes its settings from the table

  @functools.cached_property
  def plan(self) -> plan_lib.Plan:
    geometry = self.spec.geometry
    if self.whole:
      return gpu.make_plan(geometry, self.setting.device.device_kind)
    # The interpreter takes as long for idle thread blocks.
    num_sms = 2 if self.setting.tiny else count_sms(self.setting.device.device_kind)
    return plan_lib.make_plan(geometry, self.tuning.split_tokens, num_sms, self.tuning.decode_ctas_per_sm)

  @functools.cached_property
  def _static(self) -> dict[str, Any]:
    return {
      "plan": self.plan,
      "scale": self.spec.scale,
      "soft_cap": self.spec.soft_cap,
      "tuning": self.tuning,
      "interpret": self.setting.interpret,
    }

  @property
  def output(self) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((self.spec.num_tokens, self.spec.num_heads, self.spec.head_dim), jnp.bfloat16)

  @property
  def queries(self) -> jax.ShapeDtypeStruct:
    spec = self.spec
    rows = spec.num_tokens * (spec.num_heads // spec.num_kv_heads)
    return jax.ShapeDtypeStruct((spec.num_kv_heads, rows, spec.head_dim), jnp.bfloat16)

  # An inner jit is traced once, however often a program calls it.
  @functools.cached_property
  def write(self) -> Callable:
    return jax.jit(functools.partial(gpu_write.rotate_and_write, tuning=self.tuning, interpret=self.setting.interpret))

  @functools.cached_property
  def prefill(self) -> Callable:
    def call(q, kv, tables, lens, starts, work):
      return gpu_prefill.prefill(q, kv, tables, lens, starts, self.plan.split(work), **self._static)

    return jax.jit(call)

  @functools.cached_property
  def decode(self) -> Callable:
    def call(q, kv, tables, lens, starts, work, finished, out):
      return gpu_decode.decode(q, kv, tables, lens, starts, self.plan.split(work), finished, out, **self._static)

    return jax.jit(call)

  @functools.cached_property
  def attend(self) -> Callable:
    spec = self.spec
    attention = PagedAttention("gpu", spec.geometry, spec.scale, spec.soft_cap, self.setting.device.device_kind)

    def call(qkv, cos, sin, kv, tables, lens, starts, slots, work):
      meta = attention.meta(tables, lens, starts, work)
      return gpu.attend(attention, qkv, cos, sin, kv, meta, slots, interpret=self.setting.interpret)

    return jax.jit(call)


def _kernels(job: Job, setting: Setting) -> Kernels:
  setting.check_hopper()
  spec = setting.spec(job["spec"])
  if "block_size" in job:
    spec = cases.with_blocks_of(spec, job["block_size"])
  spec = dataclasses.replace(spec, kv_dtype=job.get("kv_dtype", ""))
  return Kernels(setting, spec, setting.tuning(spec, job.get("tuning", {})), job["op"] == "attend")


def row_arrays(kernels: Kernels, case: KernelCase) -> tuple[jax.Array, ...]:
  """Returns kv_lens, query_starts and the plan, which all copies share."""
  work = kernels.plan.make_work(case.query_starts, case.kv_lens)
  return tuple(jnp.asarray(x) for x in (case.kv_lens, case.query_starts, work))


def angle_arrays(case: KernelCase) -> tuple[jax.Array, jax.Array]:
  return jnp.asarray(np.cos(case.angles)), jnp.asarray(np.sin(case.angles))


def nan_like(like: jax.ShapeDtypeStruct) -> jax.Array:
  return jnp.full(like.shape, jnp.nan, like.dtype)


def host_queries(case: KernelCase, tokens: np.ndarray, copy: int = 0) -> np.ndarray:
  """Returns f32[n, N, H]: the rotated queries of `tokens`, rounded to bf16."""
  spec = case.spec
  projected = cases.tokens_of(case.qkv(copy), tokens)[:, :, :-2]
  return cases.rounded(case.rotated(projected, tokens)).reshape(-1, spec.num_heads, spec.head_dim)


def _compare_written(
  comparisons: Comparisons, case: KernelCase, kv: jax.Array, tokens: np.ndarray, copy: int = 0
) -> None:
  """Compares the slots of `tokens` with their rotated keys and their values."""
  page = case.spec.block_size
  slots = jnp.asarray(case.slots[copy, tokens])
  found = cases.numbers_of(kv[slots // page, :, :, slots % page])  # [n, K, 2, H]
  projected, dtype = cases.tokens_of(case.qkv(copy), tokens), case.kv_dtype
  keys = cases.stored(cases.rounded(case.rotated(projected[:, :, -2], tokens)), dtype)
  values = cases.stored(projected[:, :, -1], dtype)
  comparisons.add("key_error", lambda: cases.compare("keys in the pool", found[:, :, 0], keys, tokens, dtype))
  comparisons.add("value_error", lambda: cases.compare("values in the pool", found[:, :, 1], values, tokens, dtype))


def compare_write(
  comparisons: Comparisons, case: KernelCase, packed: jax.Array, after: jax.Array, tokens: np.ndarray
) -> np.ndarray:
  """Compares all that the write kernel makes of copy 0: queries of `tokens`, their slots, and the rest of the pool.

  Args:
    packed: bf16[K, T * G, H].
    after: the pool.
    tokens: int[n], ascending.

  Returns:
    The queries that the kernel made, f32[n, N, H].
  """
  made, right = cases.tokens_of(queries_by_token(case.spec, packed), tokens), host_queries(case, tokens)
  comparisons.add("query_error", lambda: cases.compare("rotated queries", made, right, tokens, np.dtype(jnp.bfloat16)))
  compare_pool(comparisons, case, after, tokens)
  return made


def compare_pool(comparisons: Comparisons, case: KernelCase, after: jax.Array, tokens: np.ndarray) -> None:
  """Compares the pool behind a write of copy 0: the slots of `tokens`, and that nothing else changed."""
  _compare_written(comparisons, case, after, tokens)
  changed = int(_changed(case.pool(before=True), after, jnp.asarray(case.slots[0]), case.spec.block_size))
  comparisons.require(not changed, f"the write changed {changed} values of the pool outside its slots")


def queries_by_token(spec: ArgSpec, packed: jax.Array) -> jax.Array:
  """Returns the queries of the kernels' layout, [K, T * G, H], by token: [T, N, H]."""
  by_token = packed.reshape(spec.num_kv_heads, spec.num_tokens, -1, spec.head_dim).transpose(1, 0, 2, 3)
  return by_token.reshape(spec.num_tokens, spec.num_heads, spec.head_dim)


@functools.partial(jax.jit, static_argnums=3)
def _changed(before: jax.Array, after: jax.Array, slots: jax.Array, page: int) -> jax.Array:
  """Counts values outside block 0 and `slots` whose bits differ."""
  at = slots // page, slice(None), slice(None), slots % page
  expected = before.at[at].set(after[at])
  bits = jnp.uint8 if after.dtype == jnp.uint8 else jnp.uint16
  same = jax.lax.bitcast_convert_type(expected, bits) == jax.lax.bitcast_convert_type(after, bits)
  return jnp.sum(jnp.logical_not(same[1:]).astype(jnp.int32))


def _check(job: Job, setting: Setting) -> Prepared:
  kernels = _kernels(job, setting)
  case, spec, whole = KernelCase(kernels.spec), kernels.spec, job["op"] == "attend"
  qkv = jax.eval_shape(lambda: case.qkv(0))
  half = jax.ShapeDtypeStruct((spec.num_tokens, spec.head_dim // 2), jnp.float32)
  kv = jax.ShapeDtypeStruct(case.kv_shape(), case.kv_dtype)
  ints = jnp.int32
  lens, starts = jax.ShapeDtypeStruct((spec.num_rows,), ints), jax.ShapeDtypeStruct((spec.num_rows + 1,), ints)
  tables = jax.ShapeDtypeStruct((spec.num_rows, spec.table_width), ints)
  slots = jax.ShapeDtypeStruct((spec.num_tokens,), ints)
  work = jax.ShapeDtypeStruct((kernels.plan.size,), ints)

  def program(kv, unwritten, qkv, cos, sin, tables, lens, starts, slots, work):
    if whole:
      out, kv = kernels.attend(qkv, cos, sin, kv, tables, lens, starts, slots, work)
      return kv, out
    q, kv, finished = kernels.write(qkv, cos, sin, kv, slots)
    out = kernels.prefill(q, kv, tables, lens, starts, work) if kernels.plan.has_prefill else None
    return kv, kernels.decode(q, kv, tables, lens, starts, work, finished, out), q

  def run(compiled):
    rest = (case.qkv(0), *angle_arrays(case), jnp.asarray(case.tables[0]))
    lens, starts, work = row_arrays(kernels, case)
    rest = (*rest, lens, starts, jnp.asarray(case.slots[0]), work)
    after, out, *queries = compiled(case.pool(before=True), nan_like(kernels.output), *rest)
    used = int(case.query_starts[-1])
    tokens, comparisons = case.sampled(256), Comparisons()
    if queries:
      made_queries = compare_write(comparisons, case, queries[0], after, tokens)
    else:
      compare_pool(comparisons, case, after, tokens)
      made_queries = host_queries(case, tokens)
    # Of the numbers that the write made: wrong ones are its own error, and not that of attention.
    expected = case.attention(after, made_queries, tokens)
    comparisons.add("error", lambda: cases.compare("attention", cases.tokens_of(out, tokens), expected, tokens))
    comparisons.require(
      bool(jnp.isfinite(out[:used]).all()), "attention: a token, perhaps one that was not sampled, holds NaN or Inf"
    )
    comparisons.require(not bool((out[used:] != 0).any()), "attention: padding tokens must give zeros")
    _, out_again, *_ = compiled(case.pool(before=True), nan_like(kernels.output), *rest)
    is_same = np.array_equal(np.asarray(out).view(np.uint16), np.asarray(out_again).view(np.uint16))
    comparisons.require(is_same, "attention: the same call gave other bits, so there is a race")
    return comparisons.finish(tokens_compared=len(tokens))

  arguments = (kv, kernels.output, qkv, half, half, tables, lens, starts, slots, work)
  return setting.prepared(program, arguments, run, donate=(0, 1), serial=False)


def number_of_calls(op: str, spec: ArgSpec, tiny: bool) -> int:
  """Returns the number of calls in a program: enough for its length, and for inputs larger than a cache."""
  if tiny:
    return 2
  tokens = spec.num_tokens * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * 2
  touched = {"decode": cases.read_bytes(spec), "write": 2 * tokens}.get(op, cases.read_bytes(spec) + 2 * tokens)
  us = max(3.0, touched / _BYTES_A_US, 0.0 if op == "write" else cases.flops(spec) / _FLOPS_A_US)
  return int(min(max(2, np.ceil(_CALL_US / us), np.ceil(_COLD_BYTES / touched)), _MOST_CALLS))


def _time(job: Job, setting: Setting) -> Prepared:
  if job["op"] == "dense":
    return _dense(job, setting)
  kernels, op = _kernels(job, setting), job["op"]
  spec = kernels.spec
  times = number_of_calls(op, spec, setting.tiny)
  copies = min(times, max(2, _MOST_POOL_BYTES // max(1, KernelCase(spec).nbytes)))
  case, last = KernelCase(spec, copies, seed=1), (times - 1) % copies
  result = kernels.queries if op == "write" else kernels.output

  def inputs() -> list[tuple]:
    """Returns each call's own inputs."""
    tables, slots = ([jnp.asarray(x) for x in each] for each in (case.tables, case.slots))
    found = []
    for number in range(times):
      copy = number % copies
      if op in ("decode", "prefill"):
        found.append((case.packed_queries(copy), tables[copy]))
      else:
        found.append((case.qkv(copy), tables[copy], slots[copy]))
    return found

  def shared() -> tuple:
    return (*angle_arrays(case), *row_arrays(kernels, case))

  def program(carry, calls, cos, sin, lens, starts, work):
    kv, outs = carry
    results = []
    for out, call in zip(outs, calls, strict=True):
      if op == "decode":
        # Clearing the counters is timed too: 1 KB or so, which the write kernel does in a layer.
        finished = jnp.zeros((spec.num_kv_heads, spec.num_tokens), jnp.int32)
        out = out if kernels.plan.has_prefill else None
        made = kernels.decode(call[0], kv, call[1], lens, starts, work, finished, out)
      elif op == "prefill":
        made = kernels.prefill(call[0], kv, call[1], lens, starts, work)
      elif op == "write":
        made, kv, _ = kernels.write(call[0], cos, sin, kv, call[2])
      else:
        made, kv = kernels.attend(call[0], cos, sin, kv, call[1], lens, starts, call[2], work)
      # The next call depends on this one: moving a write before a read of the pool would need a copy of the pool.
      kv, made = jax.lax.optimization_barrier((kv, made))
      results.append(made)
    return kv, tuple(results)

  def run(compiled):
    operands = inputs(), *shared()
    carry = case.pool(before=False), tuple(nan_like(result) for _ in range(times))
    if job["kind"] == "profile":
      kernels_us = timing.kernel_times(compiled, carry, operands, times)
      return {"kernels_us": sum(kernels_us.values()), "kernels": kernels_us, "times": times}
    carry, found = timing.measure(compiled, carry, operands, times, setting.effort)
    found["error"] = _spot_check(op, kernels, case, carry[0], carry[1][-1], last)
    return found | {"times": times, "bytes": cases.read_bytes(spec), "flops": cases.flops(spec)}

  abstract_calls = jax.eval_shape(inputs)
  pool = jax.ShapeDtypeStruct(case.kv_shape(), case.kv_dtype)
  arguments = ((pool, (result,) * times), abstract_calls, *jax.eval_shape(shared))
  return setting.prepared(program, arguments, run, donate=(0,))


def _spot_check(op: str, kernels: Kernels, case: KernelCase, kv: jax.Array, result: jax.Array, copy: int) -> float:
  """Returns the error of some tokens of a call, since a timed call must be right."""
  spec = case.spec
  most = kernels.plan.decode_queries if kernels.plan.has_prefill else spec.num_tokens
  decoded = np.repeat([queries <= most for queries, _ in spec.rows], [queries for queries, _ in spec.rows])
  tokens = case.sampled(8)
  if op in ("decode", "prefill"):
    tokens = tokens[decoded[tokens] == (op == "decode")]
  tokens = np.unique(tokens[np.linspace(0, len(tokens) - 1, 24).astype(int)])
  if op == "write":
    found = cases.tokens_of(queries_by_token(spec, result), tokens)
    comparisons, expected = Comparisons(), host_queries(case, tokens, copy)
    comparisons.add(
      "query_error", lambda: cases.compare("rotated queries", found, expected, tokens, np.dtype(jnp.bfloat16))
    )
    _compare_written(comparisons, case, kv, tokens, copy)
    return comparisons.finish().get("value_error", 0.0)
  if op == "attend":
    queries = host_queries(case, tokens, copy)
  else:
    queries = cases.tokens_of(queries_by_token(spec, case.packed_queries(copy)), tokens)
  expected = case.attention(kv, queries, tokens, copy)
  return cases.compare("attention", cases.tokens_of(result, tokens), expected, tokens)


def _dense(job: Job, setting: Setting) -> Prepared:
  """Runs cuDNN's causal attention over plain arrays, for a spec whose rows are whole prompts of one length."""
  spec, times = setting.spec(job["spec"]), 2 if setting.tiny else 4
  length, batch = spec.rows[0][1], len(spec.rows)
  if set(spec.rows) != {(length, length)}:
    raise ValueError(f"{spec.name}: rows are not prompts of one length")
  q = jax.ShapeDtypeStruct((batch, length, spec.num_heads, spec.head_dim), jnp.bfloat16)
  kv = jax.ShapeDtypeStruct((batch, length, spec.num_kv_heads, spec.head_dim), jnp.bfloat16)

  def program(carry, calls):
    attend = functools.partial(
      jax.nn.dot_product_attention, is_causal=True, implementation="xla" if setting.tiny else "cudnn"
    )
    return tuple(attend(*call) for call in calls)

  def run(compiled):
    calls = tuple(tuple(_normal(x, 3 * time + i) for i, x in enumerate((q, kv, kv))) for time in range(times))
    _, found = timing.measure(compiled, tuple(nan_like(q) for _ in range(times)), (calls,), times, setting.effort)
    return found | {"times": times, "flops": cases.flops(spec)}

  return setting.prepared(program, ((q,) * times, ((q, kv, kv),) * times), run, donate=(0,))


def _step(job: Job, setting: Setting) -> Prepared:
  from tools.gpu import step  # needs flax, unlike the kernels

  return step.prepare(job["rows"], job["context"], setting)


def _deterministic(job: Job, setting: Setting) -> Prepared:
  from tools.gpu import invariance  # needs flax, unlike the kernels

  del job
  return invariance.prepare(setting)


def _smoke(job: Job, setting: Setting) -> Prepared:
  from tools.gpu import smoke

  return smoke.prepare(job, setting)


_KINDS = {
  "smoke": _smoke,
  "ceiling": _ceiling,
  "check": _check,
  "deterministic": _deterministic,
  "time": _time,
  "profile": _time,
  "step": _step,
}


def prepare(job: Job, setting: Setting) -> Prepared:
  """Returns what the worker compiles and runs. Raises ValueError for an unknown job."""
  if job.get("kind") not in _KINDS:
    raise ValueError(f"job {job} is of no kind of {', '.join(_KINDS)}")
  return _KINDS[job["kind"]](job, setting)
