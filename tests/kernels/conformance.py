"""What every implementation of paged attention must do, as one class to inherit; no implementation is named here.

Pages that no row uses, and positions past a row's length in its last page, hold NaN in every test: whatever reads them
shows. The oracle is dense attention in f64.
"""

from collections.abc import Callable
import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import arg_specs
from pallas_kernels.paged_attention.arg_specs import ArgSpec, Arguments
from pallas_kernels.paged_attention.plan import Plan

_POOL = 140  # blocks of a batch that shares an executable with others
put = jax.device_put  # `jnp.asarray` compiles a program for each shape of a numpy array


def dense(q: np.ndarray, keys: np.ndarray, values: np.ndarray, spec: ArgSpec) -> np.ndarray:
  """Causal attention of one row's last queries, in f64: q [n, N, H], keys and values [L, K, H] -> [n, N, H]."""
  queries, length, num_kv_heads = q.shape[0], *keys.shape[:2]
  grouped = q.reshape(queries, num_kv_heads, -1, spec.head_dim).astype(np.float64)
  scores = np.einsum("nkgh,lkh->kgnl", grouped, keys.astype(np.float64)) * spec.scale
  if spec.soft_cap is not None:
    scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
  position, key = np.arange(length - queries, length)[:, None], np.arange(length)[None, :]
  seen = key <= position
  if spec.sliding_window is not None:
    seen &= key > position - spec.sliding_window
  weights = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum("kgnl,lkh->nkgh", weights, values.astype(np.float64)).reshape(q.shape)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
  """The numbers that `dtype` keeps, in f32: the oracle gets what the kernel gets. int8 scales the last axis, and
  uint8 has the bytes of e4m3."""
  if dtype == "uint8":
    array = np.where(np.isfinite(array), np.clip(array, -448, 448), np.nan)
    return array.astype(jnp.float8_e4m3fn).astype(np.float32)
  if dtype != "int8":
    return array.astype(jnp.dtype(dtype)).astype(np.float32)
  array = array.astype(np.float32)
  peak = np.abs(array).max(-1, keepdims=True) / np.float32(127)
  near = peak.astype(jnp.bfloat16)
  scale = np.where(near < peak, np.nextafter(near, np.array(np.inf, jnp.bfloat16)), near).astype(np.float32)
  return np.rint(array * (np.float32(1) / np.where(scale, scale, np.float32(1)))) * scale


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
  """An array as a buffer of `dtype` has it, without scales: uint8 has the bytes of e4m3."""
  if dtype == "uint8":
    return rounded(array, dtype).astype(jnp.float8_e4m3fn).view(np.uint8)
  return array.astype(jnp.dtype(dtype))


def oracle(spec: ArgSpec, arguments: Arguments) -> np.ndarray:
  """What the call must return, f64[T, N, H]."""
  out = np.zeros(arguments.q.shape)
  for row, (keys, values) in enumerate(zip(arguments.keys, arguments.values, strict=True)):
    begin, end = arguments.query_starts[row : row + 2]
    if begin < end:
      keys, values = (rounded(rounded(x, spec.dtype), spec.stored_dtype) for x in (keys, values))
      out[begin:end] = dense(rounded(arguments.q[begin:end], spec.dtype), keys, values, spec)
  return out


_jitted = functools.cache(jax.jit)


def jitted(function: Callable) -> Callable:
  """One executable instead of one for each operation: compiling is what these tests take their time for."""
  return function if hasattr(function, "lower") else _jitted(function)


def empty_buffer(implementation: ModuleType, spec: ArgSpec, num_blocks: int) -> np.ndarray:
  """A buffer of NaN, which all bits make in fp8 and in the scales of int8."""
  dtype = jnp.dtype(spec.stored_dtype)
  shape = implementation.kv_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim, dtype)
  return np.full(shape, {"int8": -1, "uint8": 255}.get(dtype.name, np.nan), dtype)


def filled(implementation: ModuleType, spec: ArgSpec, arguments: Arguments) -> jax.Array:
  """A buffer of NaN with every row's keys and values written, by write_kv, in one call."""
  kv = put(empty_buffer(implementation, spec, arguments.num_blocks))
  dtype = jnp.dtype(spec.dtype)
  if not spec.rows:
    return kv
  slots = np.concatenate([arguments.slots(row, spec.block_size) for row in range(len(spec.rows))])
  # With padding, which belongs in block 0, batches of many lengths share an executable.
  padding = max(64, 1 << (len(slots) - 1).bit_length()) - len(slots)
  keys, values = (
    put(np.pad(np.concatenate(x).astype(dtype), ((0, padding), (0, 0), (0, 0)), constant_values=np.nan))
    for x in (arguments.keys, arguments.values)
  )
  return jitted(implementation.write_kv)(kv, keys, values, put(np.pad(slots, (0, padding))))


def plan_of(implementation: ModuleType, spec: ArgSpec) -> Plan | None:
  """The plan that an implementation wants made on the host, if any."""
  make_plan = getattr(implementation, "make_plan", None)
  return make_plan(spec.geometry, "") if make_plan else None


def attend(implementation: ModuleType, spec: ArgSpec, **static):
  """The call as serving makes it: jitted, with everything dynamic but the geometry. Takes `operands`."""
  plan = plan_of(implementation, spec)

  def call(q, kv, block_tables, kv_lens, query_starts, *packed):
    planned = {"plan": plan, "work": plan.split(*packed)} if plan else {}
    return implementation.ragged_paged_attention(
      q,
      kv,
      block_tables,
      kv_lens,
      query_starts,
      scale=spec.scale,
      sliding_window=spec.sliding_window,
      soft_cap=spec.soft_cap,
      **planned,
      **static,
    )

  return jax.jit(call)


@functools.cache
def _program(implementation: ModuleType, stripped: ArgSpec, _quickly_compiled: bool):
  return attend(implementation, stripped)


def program(implementation: ModuleType, spec: ArgSpec):
  """As `attend`, but one for all specs of this geometry: bounds are values, not shapes."""
  stripped = dataclasses.replace(spec, name="", rows=(), shared_blocks=0, spare_blocks=0)
  return _program(implementation, stripped, jax.config.read("jax_disable_most_optimizations"))


def run(implementation: ModuleType, spec: ArgSpec, *inputs: jax.Array) -> np.ndarray:
  """A call of `program`, f32[T, N, H]."""
  return f32(program(implementation, spec)(*inputs))


# The geometry of `mixed` and of the random batches, but for a size that others have too.
WITH_SPARE_BLOCKS = ("nothing", "decode", "mixed", "shared_prefix")


def with_spare_blocks(spec: ArgSpec) -> ArgSpec:
  """The same rows in sizes that many specs share, and so an executable."""
  spec = dataclasses.replace(spec, num_tokens=64, num_rows=12)
  return dataclasses.replace(spec, spare_blocks=spec.spare_blocks + _POOL - arg_specs.make_arguments(spec).num_blocks)


def rows_of(implementation: ModuleType, spec: ArgSpec, kv_lens: np.ndarray, query_starts: np.ndarray) -> tuple:
  """Returns the metadata of a batch's rows: lengths, starts and, if there is a plan, its array."""
  plan = plan_of(implementation, spec)
  packed = [plan.make_work(query_starts, kv_lens)] if plan else []
  return tuple(put(x) for x in (kv_lens, query_starts, *packed))


def operands(implementation: ModuleType, spec: ArgSpec, arguments: Arguments) -> tuple[jax.Array, ...]:
  """The arguments on the device."""
  return (
    put(arguments.q.astype(jnp.dtype(spec.dtype))),
    filled(implementation, spec, arguments),
    put(arguments.block_tables),
    *rows_of(implementation, spec, arguments.kv_lens, arguments.query_starts),
  )


def f32(x: jax.Array) -> np.ndarray:
  """On the host, in a dtype that numpy knows."""
  return np.asarray(x).astype(np.float32)


def check(implementation: ModuleType, spec: ArgSpec, call: Callable | None = None, atol: float = 1e-5) -> None:
  """Compares one call, of a program of its own if none is given, with the oracle."""
  arguments = arg_specs.make_arguments(spec)
  out = (call or attend(implementation, spec))(*operands(implementation, spec, arguments))
  assert out.dtype == jnp.dtype(spec.dtype)
  np.testing.assert_allclose(f32(out), oracle(spec, arguments), rtol=relative(spec.dtype), atol=atol)
  assert not f32(out)[arguments.query_starts[-1] :].any(), "padding tokens must give zeros"


def relative(dtype: str) -> float:
  """Of the result's own rounding, to 8 bits in bf16 and 11 bits in f16."""
  return {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(dtype, 0.0)


class Conformance:
  """Inherit as `class TestX(Conformance): implementation = module`.

  Attributes:
    implementation: the module.
    dtype: of all but the first test, whose specs have their own.
    kv_dtype: of the buffer, in all tests; "": as queries.
    block_size: tokens a block, in all tests but the first.
    atol: how far a result may be off besides its own rounding. As it is here: sums of at most some thousand terms of
      order 1 whose weights sum to 1, all in f32, each rounded to 6e-8.
    num_random: number of random batches.
    chunks: the sizes that a prompt of 150 tokens is cut into.
  """

  implementation: ModuleType
  dtype: str = "float32"
  kv_dtype: str = ""
  block_size: int = 16
  atol: float = 1e-5
  num_random: int = 10
  chunks: tuple[int, ...] = (16, 1, 37, 64, 31, 1)

  @property
  def _stored(self) -> dict[str, Any]:
    return {"dtype": self.dtype, "kv_dtype": self.kv_dtype, "block_size": self.block_size}

  @pytest.mark.parametrize("spec", arg_specs.CONFORMANCE, ids=str)
  def test_equals_dense_attention(self, spec: ArgSpec) -> None:
    spec = with_spare_blocks(spec) if spec.name in WITH_SPARE_BLOCKS else spec
    spec = dataclasses.replace(spec, kv_dtype=self.kv_dtype)
    check(self.implementation, spec, program(self.implementation, spec), self.atol)

  def test_random_batches_in_one_executable(self) -> None:
    rng = np.random.default_rng(7)
    for seed in range(self.num_random):
      budget, rows = 48, []
      while budget and len(rows) < int(rng.integers(1, 11)):
        queries = int(rng.choice([0, 1, 1, 1, min(budget, 2), rng.integers(1, budget + 1)]))
        rows.append((queries, int(rng.integers(queries, 193)) if queries else 0))
        budget -= queries
      spec = with_spare_blocks(ArgSpec("random", tuple(rows), 48, 10, **self._stored))
      arguments = arg_specs.make_arguments(spec, seed)
      out = run(self.implementation, spec, *operands(self.implementation, spec, arguments))
      np.testing.assert_allclose(out, oracle(spec, arguments), rtol=relative(self.dtype), atol=self.atol)

  @pytest.mark.compares_bits
  @pytest.mark.parametrize("queries", [1, 20], ids=["decode", "prefill"])
  def test_a_row_depends_neither_on_neighbors_nor_on_its_place(self, queries: int) -> None:
    """Bit for bit, in one executable: alone, in front, among long rows full of NaN."""
    subject, results = (queries, 150), []
    companies = [
      ([], []),
      ([], [(1, 7), (1, 350), (9, 100)]),
      ([(1, 350), (1, 1), (30, 30), (1, 2)], [(2, 5), (1, 151)]),
    ]
    for number, (before, after) in enumerate(companies):
      rows = (*before, subject, *after)
      spec = with_spare_blocks(ArgSpec("neighbors", rows, 64, 8, **self._stored))
      arguments = arg_specs.make_arguments(spec, number)
      at = len(before)
      begin, end = arguments.query_starts[at : at + 2]
      fixed = arg_specs.make_arguments(ArgSpec("subject", (subject,), queries, 1))
      arguments.q[begin:end] = fixed.q
      arguments.keys[at][:], arguments.values[at][:] = fixed.keys[0], fixed.values[0]
      for row in range(len(rows)):
        if row != at and number == 2:
          arguments.keys[row][:] = np.nan
          arguments.values[row][:] = np.nan
      results.append(run(self.implementation, spec, *operands(self.implementation, spec, arguments))[begin:end])
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
      np.testing.assert_array_equal(other, results[0])

  def test_chunks_of_any_size_give_the_whole(self) -> None:
    """A prompt in chunks (the last of one token) equals the prompt at once."""
    length, spec = 150, ArgSpec("whole", ((150, 150),), 160, 2, **self._stored)
    arguments = arg_specs.make_arguments(spec)
    inputs = operands(self.implementation, spec, arguments)
    whole, parts, done = run(self.implementation, spec, *inputs)[:length], [], 0
    for size in self.chunks:
      q = np.full_like(arguments.q, np.nan)
      q[:size] = arguments.q[done : done + size]
      done += size
      lens, starts = np.array([done, 0], np.int32), np.array([0, size, size], np.int32)
      rows = rows_of(self.implementation, spec, lens, starts)
      parts.append(run(self.implementation, spec, put(q.astype(jnp.dtype(self.dtype))), *inputs[1:3], *rows)[:size])
    assert done == length
    # Both may be off, and to different sides.
    close = {"rtol": 2 * relative(self.dtype), "atol": 2 * self.atol}
    np.testing.assert_allclose(np.concatenate(parts), whole, **close)

  def test_write_keeps_the_rest_and_padding_touches_block_0_only(self) -> None:
    spec = ArgSpec("write", ((1, 40), (1, 20)), 8, 4, **self._stored)
    arguments = arg_specs.make_arguments(spec)
    before = filled(self.implementation, spec, arguments)
    k, v = (put(np.full((6, spec.num_kv_heads, spec.head_dim), x, jnp.dtype(self.dtype))) for x in (1, 2))
    after = jitted(self.implementation.write_kv)(before, k, v, put(np.arange(6, dtype=np.int32)))
    zeroed = f32(after).copy()
    zeroed[0] = f32(before)[0]
    np.testing.assert_array_equal(zeroed, f32(before))

  def test_write_is_in_place_when_donated(self) -> None:
    """The compiled program aliases the pool, holds no second one, and hands back the same memory."""
    spec = ArgSpec("pool", (), 8, 8, **self._stored)
    kv = jnp.array(empty_buffer(self.implementation, spec, 256))
    k, slots = jnp.ones((8, 2, 64), self.dtype), self.block_size + jnp.arange(8, dtype=jnp.int32)
    program = jax.jit(self.implementation.write_kv, donate_argnums=0).lower(kv, k, k, slots).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == kv.nbytes
    assert memory.temp_size_in_bytes < kv.nbytes // 10
    address = kv.unsafe_buffer_pointer()
    assert program(kv, k, k, slots).unsafe_buffer_pointer() == address
