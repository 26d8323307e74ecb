"""Paged attention for CPUs in C++ (cpu.cc), as XLA custom calls: rotary embedding, KV write and attention in one.

XLA's own loops (reference.py) gather a copy of every page and wait for threads at each product; this reads the pages
where they lie, once, on XLA's threads. It may not be the only way to run on a CPU: where there is no compiler, and for
what `check_supported` refuses, reference.py serves.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.paged_attention.plan import Geometry

PREFERRED_BLOCK_SIZE = 16
_MOST_HEAD_DIM, _MOST_GROUP = 256, 48  # kMostHeadDim, kMostQueries


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
  """[P, K, 2, page * H]: of each page and head, its keys as [H, page], then its values as [page, H]."""
  return (num_blocks, num_kv_heads, 2, block_size * head_dim)


def num_kv_heads(kv: jax.Array) -> int:
  """K of a buffer."""
  return kv.shape[1]


def check_supported(geometry: Geometry, dtype: jnp.dtype) -> None:
  """See api.check_supported."""
  if geometry.head_dim > _MOST_HEAD_DIM:
    raise NotImplementedError(f"paged attention (cpu): head_dim={geometry.head_dim} is over {_MOST_HEAD_DIM}")
  if geometry.group > _MOST_GROUP:
    raise NotImplementedError(f"paged attention (cpu): {geometry.group} query heads a KV head are over {_MOST_GROUP}")
  if dtype not in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
    raise NotImplementedError(f"paged attention (cpu): dtype {dtype} is neither float32 nor bfloat16")
  native.load("paged_attention")


def _attributes(scale: float, soft_cap: float | None, sliding_window: int | None) -> dict:
  return {
    "scale": np.float32(scale),
    "soft_cap": np.float32(soft_cap or 0.0),
    "window": np.int64(sliding_window or 0),
  }


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
  """See api.write_kv. For whoever writes apart from attending: `attend` does both."""
  head_dim = k.shape[2]
  page = kv.shape[3] // head_dim
  block, offset = slot_mapping[:, None, None] // page, slot_mapping[:, None, None] % page
  head = jnp.arange(kv.shape[1], dtype=jnp.int32)[None, :, None]
  lane = jnp.arange(head_dim, dtype=jnp.int32)[None, None, :]
  kv = kv.at[block, head, 0, lane * page + offset].set(k.astype(kv.dtype))
  return kv.at[block, head, 1, offset * head_dim + lane].set(v.astype(kv.dtype))


def ragged_paged_attention(
  q: jax.Array,
  kv: jax.Array,
  block_tables: jax.Array,
  kv_lens: jax.Array,
  query_starts: jax.Array,
  *,
  scale: float,
  sliding_window: int | None,
  soft_cap: float | None,
) -> jax.Array:
  """See api.ragged_paged_attention. Raises NativeMissing."""
  call = native.call("paged_attention", "SluicePagedAttention", jax.ShapeDtypeStruct(q.shape, q.dtype))
  return call(q, kv, block_tables, kv_lens, query_starts, **_attributes(scale, soft_cap, sliding_window))


def attend(
  qkv: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  kv: jax.Array,
  block_tables: jax.Array,
  kv_lens: jax.Array,
  query_starts: jax.Array,
  slot_mapping: jax.Array,
  work: None,
  *,
  plan: None,
  scale: float,
  sliding_window: int | None,
  soft_cap: float | None,
  device_kind: str,
) -> tuple[jax.Array, jax.Array]:
  """See api.PagedAttention.attend; nothing is planned, and every CPU is served alike. Raises NativeMissing."""
  del work, plan, device_kind
  tokens, heads, wide, head_dim = qkv.shape
  out = jax.ShapeDtypeStruct((tokens, heads * (wide - 2), head_dim), qkv.dtype)
  result = (out, jax.ShapeDtypeStruct(kv.shape, kv.dtype))
  call = native.call("paged_attention", "SluicePagedAttend", result, input_output_aliases={3: 1})
  attributes = _attributes(scale, soft_cap, sliding_window)
  attended, kv = call(qkv, cos, sin, kv, block_tables, kv_lens, query_starts, slot_mapping, **attributes)
  return attended, kv
