"""How a layer reaches past tokens: paged attention in serving, dense in training. No batch is planned here.

An `attend` takes the projections of a layer as one array, before rotary embedding: on a GPU one kernel rotates and
stores them. It is static in the compiled layer, so equal arguments must give the same function object.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax

from models.layers import rotate
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.api import PagedAttention, RaggedMeta


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMeta:
  """What serving's attention needs to know of a step.

  Attributes:
    ragged: the rows.
    slot_mapping: int32[T], where each token's key and value are stored (see `api.write_kv`).
  """

  ragged: RaggedMeta
  slot_mapping: jax.Array


@functools.cache
def paged_attend(attention: PagedAttention) -> Callable:
  """Serving's `attend`: stores this step's keys and values, then attends over the rows' pages."""

  def attend(qkv, cos, sin, cache, meta: AttentionMeta):  # qkv [T, K, G + 2, H] -> [T, N, H], cache
    if attention.fused:
      return attention.attend(qkv, cos, sin, cache, meta.ragged, meta.slot_mapping)
    q, k, v = rotate(qkv, cos, sin)
    cache = api.write_kv(cache, k, v, meta.slot_mapping, attention.implementation)
    invariant = {"invariant": True} if attention.geometry.invariant else {}
    out = api.ragged_paged_attention(
      q,
      cache,
      meta.ragged,
      scale=attention.scale,
      sliding_window=attention.geometry.sliding_window,
      soft_cap=attention.soft_cap,
      name=attention.implementation,
      **invariant,
    )
    return out, cache

  return attend


@functools.cache
def dense_causal_attend(sliding_window: int | None = None) -> Callable:
  """Training's and parity's `attend`: whole sequences [B, T], no cache (pass None), differentiable."""

  def attend(qkv, cos, sin, cache, meta):  # qkv [B, T, K, G + 2, H] -> [B, T, N, H], cache
    del meta
    q, k, v = rotate(qkv, cos, sin)
    return jax.nn.dot_product_attention(
      q, k, v, is_causal=True, local_window_size=None if sliding_window is None else (sliding_window - 1, 0)
    ), cache

  return attend
