"""The attention benchmark: its naive version is right, and its tables have every line."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import api, arg_specs
from tools import bench_attention


def test_naive_equals_ours() -> None:
  spec = dataclasses.replace(arg_specs.BENCHMARK[1], table_width=10)
  q, meta = bench_attention.operands(spec, 100)
  shape = api.kv_shape(100, spec.block_size, spec.num_kv_heads, spec.head_dim)
  slots = jnp.arange(100 * spec.block_size, dtype=jnp.int32)
  k, v = (jnp.asarray(np.random.default_rng(seed).standard_normal((slots.size, 4, 64), np.float32)) for seed in (1, 2))
  theirs = jnp.stack([k, v], axis=1).reshape(100, spec.block_size, 2, 4, 64)
  ours = api.write_kv(jnp.zeros(shape), k, v, slots)
  np.testing.assert_allclose(
    np.asarray(api.ragged_paged_attention(q, ours, meta, scale=spec.scale)),
    np.asarray(bench_attention.naive(q, theirs, meta, scale=spec.scale)),
    rtol=0,
    atol=1e-5,
  )


def test_a_line_holds_our_time_and_the_floor() -> None:
  spec = arg_specs.BENCHMARK[1]
  name, best, median, naive, held, floor, ratio = bench_attention.line("name", spec, 100, 0.001, 1e7).split()
  assert name == "name" and 0 < float(best) <= float(median) and float(naive) > 0
  assert float(held) == round(8 * 128 * 2 * 4 * 64 * 4 / 1e6, 2)
  assert float(floor) == round(8 * 128 * 2 * 4 * 64 * 4 / 1e7, 3)
  assert abs(float(ratio) - float(best) / float(floor)) < 0.1
