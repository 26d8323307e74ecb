"""Serving's attention against training's: a sequence in chunks over pages equals the sequence at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import AttentionMeta, PagedGroups, dense_causal_attend, paged_attend
from models.config import LayerAttention
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.plan import Geometry
from pallas_kernels.paged_attention.reference import rope

pytestmark = pytest.mark.usefixtures("quick_compilation")

_LENGTH, _PAGE, _HEADS, _KV_HEADS, _HEAD_DIM = 40, 8, 6, 2, 16


def _sequence() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """A layer's projections, and the angles of each position."""
  rng = np.random.default_rng(0)
  qkv = rng.standard_normal((_LENGTH, _KV_HEADS, _HEADS // _KV_HEADS + 2, _HEAD_DIM), np.float32)
  angle = np.arange(_LENGTH, dtype=np.float32)[:, None] * 10.0 ** -np.arange(_HEAD_DIM // 2, dtype=np.float32)
  return qkv, np.cos(angle), np.sin(angle)


def _declared(window: int | None, soft_cap: float | None = None) -> LayerAttention:
  scale = 1.3 * _HEAD_DIM**-0.5
  return LayerAttention(_HEADS, _KV_HEADS, _HEAD_DIM, scale, 1e4, None, _HEAD_DIM, window, soft_cap)


def _groups(*groups: LayerAttention) -> PagedGroups:
  def attention(declared: LayerAttention) -> api.PagedAttention:
    geometry = Geometry(24, 2, 5, _PAGE, _HEADS, _KV_HEADS, _HEAD_DIM, declared.window)
    return api.PagedAttention("reference", geometry, declared.scale, declared.soft_cap)

  return tuple((declared, attention(declared)) for declared in groups)


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 5])
def test_chunks_over_pages_equal_the_whole_sequence(window: int | None, soft_cap: float | None) -> None:
  """Of a layer in the second of two groups."""
  sequence, declared = _sequence(), _declared(window, soft_cap)
  groups = _groups(_declared(9), declared)
  whole, _ = jax.jit(dense_causal_attend, static_argnums=0)(declared, *(x[None] for x in sequence), None, None)
  blocks = np.array([4, 2, 6, 1, 3], np.int32)
  layer = functools.partial(jax.jit, static_argnums=5)(
    lambda qkv, cos, sin, kv, meta, attend: attend(declared, qkv, cos, sin, kv, meta)
  )
  kv = jax.device_put(np.full(api.kv_shape(8, _PAGE, _KV_HEADS, _HEAD_DIM), np.nan, np.float32))
  done, parts = 0, []
  for size in (17, 1, 20, 1, 1):  # in a step of 24 tokens: the rest is padding
    positions = np.arange(done, done + size)
    done += size
    slots = np.zeros(24, np.int32)
    slots[:size] = blocks[positions // _PAGE] * _PAGE + positions % _PAGE
    padded = [np.zeros((24, *x.shape[1:]), np.float32) for x in sequence]
    for part, x in zip(padded, sequence, strict=True):
      part[:size] = x[positions]
    rows = ([blocks, np.zeros_like(blocks)], [done, 0], [0, size, size])
    arrays = [jax.device_put(np.array(x, np.int32)) for x in rows]
    ragged = tuple(attention.meta(*arrays) for _, attention in groups)
    out, kv = layer(*padded, kv, AttentionMeta(ragged, slots), paged_attend(groups))
    parts.append(np.asarray(out)[:size])
  np.testing.assert_allclose(np.concatenate(parts), np.asarray(whole[0]), rtol=0, atol=1e-5)
  assert layer._cache_size() == 1


def test_the_same_arguments_give_the_same_function() -> None:
  """It is static in compiled layers: another object would compile another layer."""
  assert paged_attend(_groups(_declared(5))) is paged_attend(_groups(_declared(5)))
  assert paged_attend(_groups(_declared(5))) is not paged_attend(_groups(_declared(6)))


def test_the_reference_rotates_before_it_stores() -> None:
  """Keys lie in the buffer rotated, values as they came."""
  qkv, cos, sin = _sequence()
  kv = jnp.zeros(api.kv_shape(8, _PAGE, _KV_HEADS, _HEAD_DIM))
  declared = _declared(None)
  ((_, attention),) = groups = _groups(declared)
  ragged = attention.meta(jnp.ones((2, 5), jnp.int32), jnp.array([1, 0]), jnp.array([0, 1, 1]))
  slots = jnp.zeros(24, jnp.int32).at[0].set(_PAGE)
  at = 7  # a position whose angles are not 0
  three = (jnp.zeros((24, *x.shape[1:])).at[0].set(x[at]) for x in (qkv, cos, sin))
  _, kv = jax.jit(paged_attend(groups), static_argnums=0)(declared, *three, kv, AttentionMeta((ragged,), slots))
  wanted = jax.jit(rope)(qkv[at, :, -2], cos[at], sin[at])
  np.testing.assert_allclose(kv[1, 0, :, 0], wanted, rtol=0, atol=1e-6)  # a product and a sum may be one operation
  np.testing.assert_array_equal(kv[1, 1, :, 0], qkv[at, :, -1])


def test_dense_attention_is_differentiable() -> None:
  sequence = [x[None] for x in _sequence()]

  def total(qkv):
    return dense_causal_attend(_declared(3), qkv, *sequence[1:], None, None)[0].sum()

  gradient = jax.jit(jax.grad(total))(sequence[0])
  assert np.isfinite(np.asarray(gradient)).all() and np.asarray(gradient).any()
