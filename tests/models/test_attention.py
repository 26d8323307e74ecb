"""Serving's attention against training's: a sequence in chunks over pages equals the sequence at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import AttentionMeta, dense_causal_attend, paged_attend
from pallas_kernels.paged_attention import api

_LENGTH, _PAGE, _HEADS, _KV_HEADS, _HEAD_DIM = 40, 8, 6, 2, 16


def _sequence() -> tuple[jax.Array, jax.Array, jax.Array]:
  rng = np.random.default_rng(0)
  shapes = ((_LENGTH, _HEADS, _HEAD_DIM), (_LENGTH, _KV_HEADS, _HEAD_DIM), (_LENGTH, _KV_HEADS, _HEAD_DIM))
  return tuple(jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)


@pytest.mark.parametrize("window", [None, 5])
def test_chunks_over_pages_equal_the_whole_sequence(window: int | None) -> None:
  q, k, v = _sequence()
  whole, _ = dense_causal_attend(window)(q[None], k[None], v[None], None, None)
  blocks = np.array([4, 2, 6, 1, 3], np.int32)
  layer = functools.partial(jax.jit, static_argnums=5)(lambda q, k, v, kv, meta, attend: attend(q, k, v, kv, meta))
  kv = jnp.full(api.kv_shape(8, _PAGE, _KV_HEADS, _HEAD_DIM), jnp.nan)
  done, parts = 0, []
  for size in (17, 1, 20, 1, 1):  # in a step of 24 tokens: the rest is padding
    positions = np.arange(done, done + size)
    done += size
    slots = np.zeros(24, np.int32)
    slots[:size] = blocks[positions // _PAGE] * _PAGE + positions % _PAGE
    padded = [jnp.zeros((24, *x.shape[1:])).at[:size].set(x[positions]) for x in (q, k, v)]
    ragged = api.RaggedMeta(
      jnp.asarray(np.stack([blocks, np.zeros_like(blocks)])),
      jnp.array([done, 0], jnp.int32),
      jnp.array([0, size, size], jnp.int32),
    )
    out, kv = layer(*padded, kv, AttentionMeta(ragged, jnp.asarray(slots)), paged_attend(window))
    parts.append(np.asarray(out[:size]))
  np.testing.assert_allclose(np.concatenate(parts), np.asarray(whole[0]), rtol=0, atol=1e-5)
  assert layer._cache_size() == 1


def test_the_same_arguments_give_the_same_function() -> None:
  """It is static in compiled layers: another object would compile another layer."""
  assert paged_attend(5) is paged_attend(5)
  assert paged_attend(5) is not paged_attend(6)
  assert dense_causal_attend() is dense_causal_attend()


def test_dense_attention_is_differentiable() -> None:
  q, k, v = (x[None] for x in _sequence())
  gradient = jax.grad(lambda q: dense_causal_attend(3)(q, k, v, None, None)[0].sum())(q)
  assert np.isfinite(np.asarray(gradient)).all() and np.asarray(gradient).any()
