"""Paged attention for CPUs in C++ (cpu.cc), as an XLA custom call: rotary embedding, KV write and attention in one.

XLA's own loops (reference.py) gather a copy of every page and wait for threads at each product; this reads the pages
where they lie, once, on XLA's threads. It may not be the only way to run on a CPU: where there is no compiler, and for
what `check_supported` refuses, reference.py serves.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.paged_attention.api import PagedAttention, RaggedMeta
from pallas_kernels.paged_attention.plan import Geometry

PREFERRED_BLOCK_SIZE = 16
_MOST_HEAD_DIM, _MOST_GROUP = 256, 48  # kMostHeadDim, kMostQueries


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
  """[P, K, 2, page * H]: of each page and head, its keys as [H, page], then its values as [page, H]."""
  return (num_blocks, num_kv_heads, 2, block_size * head_dim)


def check_supported(geometry: Geometry, dtype: jnp.dtype) -> None:
  """See api.check_supported."""
  if geometry.head_dim > _MOST_HEAD_DIM:
    raise NotImplementedError(f"paged attention (cpu): head_dim={geometry.head_dim} is over {_MOST_HEAD_DIM}")
  if geometry.group > _MOST_GROUP:
    raise NotImplementedError(f"paged attention (cpu): {geometry.group} query heads a KV head are over {_MOST_GROUP}")
  if dtype not in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
    raise NotImplementedError(f"paged attention (cpu): dtype {dtype} is neither float32 nor bfloat16")
  native.load("paged_attention")


def attend(attention: PagedAttention, qkv, cos, sin, kv, meta: RaggedMeta, slot_mapping):
  """See api.PagedAttention.attend. Raises NativeMissing."""
  tokens, heads, wide, head_dim = qkv.shape
  out = jax.ShapeDtypeStruct((tokens, heads * (wide - 2), head_dim), qkv.dtype)
  result = (out, jax.ShapeDtypeStruct(kv.shape, kv.dtype))
  attended, kv = native.call("paged_attention", result, input_output_aliases={3: 1})(
    *(qkv, cos, sin, kv, meta.block_tables, meta.kv_lens, meta.query_starts, slot_mapping),
    scale=np.float32(attention.scale),
    soft_cap=np.float32(attention.soft_cap or 0.0),
    window=np.int64(attention.geometry.sliding_window or 0),
  )
  return attended, kv
