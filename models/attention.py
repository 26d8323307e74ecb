"""Attention over past tokens: paged in serving, dense in training. May not plan a batch.

An `attend` takes a layer's declaration and its projections as one array, before rotary embedding, because on a GPU one
kernel rotates and stores them. It is static in the compiled layer, so equal arguments must give the same function
object.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp

from models.config import LayerAttention
from pallas_kernels.paged_attention.api import PagedAttention, RaggedMeta
from pallas_kernels.paged_attention.reference import rotate

# A step's attention of every group of layers, in the order of ModelConfig.groups.
PagedGroups = tuple[tuple[LayerAttention, PagedAttention], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMeta:
  """A step's metadata for attention in serving.

  Attributes:
    ragged: the rows of each group of layers, in the order of the groups.
    slot_mapping: int32[T], the slot of each token's key and value (see PagedAttention.attend).
  """

  ragged: tuple[RaggedMeta, ...]
  slot_mapping: jax.Array


@functools.cache
def paged_attend(groups: PagedGroups) -> Callable:
  """Returns the `attend` of serving, which stores this step's keys and values and attends over the rows' pages."""
  number = {declared: index for index, (declared, _) in enumerate(groups)}

  def attend(declared: LayerAttention, qkv, cos, sin, cache, meta: AttentionMeta):
    """qkv [T, K, G + 2, H] -> [T, N, H], cache."""
    index = number[declared]
    return groups[index][1].attend(qkv, cos, sin, cache, meta.ragged[index], meta.slot_mapping)

  return attend


def dense_causal_attend(declared: LayerAttention, qkv, cos, sin, cache, meta):
  """The `attend` of training and parity tests: whole sequences [B, T], no cache (pass None), differentiable.

  qkv [B, T, K, G + 2, H] -> [B, T, N, H], cache.
  """
  del meta
  q, k, v = rotate(qkv, cos, sin)
  if declared.soft_cap is not None:
    return _soft_capped(declared, q, k, v), cache
  window = None if declared.window is None else (declared.window - 1, 0)
  return jax.nn.dot_product_attention(q, k, v, scale=declared.scale, is_causal=True, local_window_size=window), cache


def _soft_capped(declared: LayerAttention, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """jax.nn.dot_product_attention with a soft cap: q [B, T, N, H], k and v [B, T, K, H]."""
  batch, length, heads, size = q.shape
  q = q.reshape(batch, length, declared.num_kv_heads, declared.group_size, size)
  scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * declared.scale
  assert declared.soft_cap is not None
  scores = declared.soft_cap * jnp.tanh(scores / declared.soft_cap)
  back = jnp.arange(length, dtype=jnp.int32)[:, None] - jnp.arange(length, dtype=jnp.int32)[None, :]
  seen = back >= 0 if declared.window is None else (back >= 0) & (back < declared.window)
  seen = jnp.broadcast_to(seen, scores.shape)
  weights = jax.nn.softmax(jnp.where(seen, scores, jnp.full_like(scores, -1e30)), axis=-1).astype(v.dtype)
  return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, length, heads, size)
