"""How a layer reaches past tokens: paged attention in serving, dense in training. No batch is planned here."""

from collections.abc import Callable
import dataclasses
import functools

import jax

from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.api import RaggedMeta


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
def paged_attend(sliding_window: int | None = None, soft_cap: float | None = None) -> Callable:
  """Serving's `attend`: stores this step's keys and values, then attends over the row's pages.

  The same arguments give the same function object: it is static in compiled layers.
  """

  def attend(q, k, v, cache, meta: AttentionMeta):  # q [T, N, H], k and v [T, K, H] -> [T, N, H], cache
    cache = api.write_kv(cache, k, v, meta.slot_mapping)
    out = api.ragged_paged_attention(
      q, cache, meta.ragged, scale=q.shape[-1] ** -0.5, sliding_window=sliding_window, soft_cap=soft_cap
    )
    return out, cache

  return attend


@functools.cache
def dense_causal_attend(sliding_window: int | None = None) -> Callable:
  """Training's and parity's `attend`: whole sequences [B, T], no cache (pass None), differentiable.

  The same argument gives the same function object.
  """

  def attend(q, k, v, cache, meta):  # q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H], cache
    del meta
    return jax.nn.dot_product_attention(
      q, k, v, is_causal=True, local_window_size=None if sliding_window is None else (sliding_window - 1, 0)
    ), cache

  return attend
