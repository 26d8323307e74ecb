"""What every implementation of paged attention must do, as one class to inherit; no implementation is named here.

Pages that no row uses, and positions past a row's length in its last page, hold NaN in every test: whatever reads them
shows. The oracle is dense attention in f64.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import arg_specs
from pallas_kernels.paged_attention.arg_specs import ArgSpec, Arguments


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
  """The numbers that `dtype` keeps, in f32: the oracle gets what the kernel gets."""
  return np.asarray(jnp.asarray(array).astype(dtype).astype(jnp.float32))


def oracle(spec: ArgSpec, arguments: Arguments) -> np.ndarray:
  """What the call must return, f64[T, N, H]."""
  out = np.zeros(arguments.q.shape)
  for row, (keys, values) in enumerate(zip(arguments.keys, arguments.values, strict=True)):
    begin, end = arguments.query_starts[row : row + 2]
    if begin < end:
      three = (rounded(x, spec.dtype) for x in (arguments.q[begin:end], keys, values))
      out[begin:end] = dense(*three, spec)
  return out


def filled(implementation: ModuleType, spec: ArgSpec, arguments: Arguments) -> jax.Array:
  """A buffer of NaN with every row's keys and values written, by write_kv, in one call."""
  shape = implementation.kv_shape(arguments.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
  kv = jnp.full(shape, jnp.nan, spec.dtype)
  if not spec.rows:
    return kv
  slots = np.concatenate([arguments.slots(row, spec.block_size) for row in range(len(spec.rows))])
  keys, values = (jnp.asarray(np.concatenate(x)).astype(spec.dtype) for x in (arguments.keys, arguments.values))
  return implementation.write_kv(kv, keys, values, jnp.asarray(slots))


def attend(implementation: ModuleType, spec: ArgSpec):
  """The call as serving makes it: jitted, with everything dynamic but the geometry."""
  return jax.jit(
    functools.partial(
      implementation.ragged_paged_attention,
      scale=spec.scale,
      sliding_window=spec.sliding_window,
      soft_cap=spec.soft_cap,
    )
  )


def operands(implementation: ModuleType, spec: ArgSpec, arguments: Arguments) -> tuple[jax.Array, ...]:
  """The arguments on the device."""
  return (
    jnp.asarray(arguments.q).astype(spec.dtype),
    filled(implementation, spec, arguments),
    jnp.asarray(arguments.block_tables),
    jnp.asarray(arguments.kv_lens),
    jnp.asarray(arguments.query_starts),
  )


def check(implementation: ModuleType, spec: ArgSpec, seed: int = 0) -> None:
  """Compares one call with the oracle."""
  arguments = arg_specs.make(spec, seed)
  out = attend(implementation, spec)(*operands(implementation, spec, arguments))
  assert out.dtype == jnp.dtype(spec.dtype)
  # f32: sums of at most some thousand terms of order 1 whose weights sum to 1, each rounded to 6e-8. bf16: arithmetic
  # is f32 as well, and the result is rounded once, to 8 bits.
  relative = 2.0**-8 if spec.dtype == "bfloat16" else 0.0
  np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), oracle(spec, arguments), rtol=relative, atol=1e-5)
  padding = np.asarray(out.astype(jnp.float32))[arguments.query_starts[-1] :]
  assert not padding.any(), "padding tokens must give zeros"


class Conformance:
  """Inherit as `class TestX(Conformance): implementation = module`."""

  implementation: ModuleType

  @pytest.mark.parametrize("spec", arg_specs.CONFORMANCE, ids=str)
  def test_equals_dense_attention(self, spec: ArgSpec) -> None:
    check(self.implementation, spec)

  def test_random_batches_in_one_executable(self) -> None:
    """Any mix of rows runs in one compiled program: bounds are values, not shapes."""
    rng = np.random.default_rng(7)
    geometry = ArgSpec("random", (), 48, 10, table_width=12)
    program = None
    for seed in range(10):
      budget, rows = 48, []
      while budget and len(rows) < int(rng.integers(1, 11)):
        queries = int(rng.choice([0, 1, 1, 1, min(budget, 2), rng.integers(1, budget + 1)]))
        rows.append((queries, int(rng.integers(queries, 193)) if queries else 0))
        budget -= queries
      # The same number of blocks for every draw, since the pool is a shape.
      used = sum(-(-length // 16) for _, length in rows)
      spec = ArgSpec("random", tuple(rows), 48, 10, table_width=12, spare_blocks=121 - used)
      arguments = arg_specs.make(spec, seed)
      inputs = operands(self.implementation, spec, arguments)
      program = program or attend(self.implementation, geometry).lower(*inputs).compile()
      np.testing.assert_allclose(np.asarray(program(*inputs)), oracle(spec, arguments), rtol=0, atol=1e-5)

  @pytest.mark.parametrize("queries", [1, 20], ids=["decode", "prefill"])
  def test_a_row_depends_neither_on_neighbours_nor_on_its_place(self, queries: int) -> None:
    """Bit for bit, in one executable: alone, in front, at the end, among long rows, beside a row full of NaN."""
    subject, program, results = (queries, 150), None, []
    companies = [
      ([], []),
      ([], [(1, 7), (1, 350), (9, 100)]),
      ([(1, 350), (1, 1), (30, 30), (1, 2)], []),
      ([(16, 16), (1, 90)], [(2, 5), (1, 151)]),
    ]
    for number, (before, after) in enumerate(companies):
      rows = (*before, subject, *after)
      used = sum(-(-length // 16) for _, length in rows)
      spec = ArgSpec("company", rows, 64, 8, spare_blocks=100 - used)
      arguments = arg_specs.make(spec, number)
      at = len(before)
      begin, end = arguments.query_starts[at : at + 2]
      fixed = arg_specs.make(ArgSpec("subject", (subject,), queries, 1))
      arguments.q[begin:end] = fixed.q
      arguments.keys[at][:], arguments.values[at][:] = fixed.keys[0], fixed.values[0]
      for row in range(len(rows)):
        if row != at and number == 3:
          arguments.keys[row][:] = np.nan
          arguments.values[row][:] = np.nan
      inputs = operands(self.implementation, spec, arguments)
      program = program or attend(self.implementation, spec).lower(*inputs).compile()
      results.append(np.asarray(program(*inputs))[begin:end])
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
      np.testing.assert_array_equal(other, results[0])

  def test_chunks_of_any_size_give_the_whole(self) -> None:
    """A prompt in chunks (the last of one token) equals the prompt at once."""
    length, spec = 150, ArgSpec("whole", ((150, 150),), 160, 2)
    arguments = arg_specs.make(spec)
    inputs = operands(self.implementation, spec, arguments)
    program = attend(self.implementation, spec).lower(*inputs).compile()
    whole, parts, done = np.asarray(program(*inputs))[:length], [], 0
    for size in (16, 1, 37, 64, 31, 1):
      q = np.full_like(arguments.q, np.nan)
      q[:size] = arguments.q[done : done + size]
      done += size
      lens, starts = np.array([done, 0], np.int32), np.array([0, size, size], np.int32)
      parts.append(np.asarray(program(jnp.asarray(q), *inputs[1:3], jnp.asarray(lens), jnp.asarray(starts)))[:size])
    assert done == length
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-5)

  def test_write_keeps_the_rest_and_padding_touches_block_0_only(self) -> None:
    spec = ArgSpec("write", ((1, 40), (1, 20)), 8, 4)
    arguments = arg_specs.make(spec)
    before = filled(self.implementation, spec, arguments)
    k = jnp.ones((6, spec.num_kv_heads, spec.head_dim))
    after = self.implementation.write_kv(before, k, 2 * k, jnp.arange(6, dtype=jnp.int32))
    zeroed = np.asarray(after).copy()
    zeroed[0] = np.asarray(before)[0]
    np.testing.assert_array_equal(zeroed, np.asarray(before))

  def test_write_is_in_place_when_donated(self) -> None:
    """The compiled program aliases the pool, holds no second one, and hands back the same memory."""
    kv = jnp.zeros(self.implementation.kv_shape(256, 16, 2, 64))
    k, slots = jnp.ones((8, 2, 64)), jnp.arange(16, 24, dtype=jnp.int32)
    program = jax.jit(self.implementation.write_kv, donate_argnums=0).lower(kv, k, k, slots).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == kv.nbytes
    assert memory.temp_size_in_bytes < kv.nbytes // 10
    address = kv.unsafe_buffer_pointer()
    assert program(kv, k, k, slots).unsafe_buffer_pointer() == address
