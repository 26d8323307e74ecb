"""Paged attention for CPUs in C++ (cpu.cc), as an XLA custom call: rotary embedding, KV write and attention in one.

XLA's own loops (reference.py) copy every page and synchronize threads at each product. This kernel reads each page once
and in place, on XLA's threads. It may not be the only implementation for CPUs: reference.py serves machines without a
compiler and shapes that `check_supported` rejects.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.paged_attention.api import PagedAttention, RaggedMeta
from pallas_kernels.paged_attention.int8_kv import stored_size
from pallas_kernels.paged_attention.plan import Geometry

PREFERRED_BLOCK_SIZE = 16
_FLOAT32 = jnp.dtype(jnp.float32)
_INT8_MULTIPLE = 16  # kLanes, at most


def kv_shape(
  num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype = _FLOAT32
) -> tuple[int, ...]:
  """Returns [P, K, 2, page * H]: for each page and head the keys as [H, page], then the values as [page, H].

  A buffer of int8 has int8_kv.stored_size instead of H, and int8.h describes its pages.
  """
  return (num_blocks, num_kv_heads, 2, block_size * stored_size(head_dim, dtype))


def check_supported(geometry: Geometry, dtype: jnp.dtype) -> None:
  """See api.check_supported."""
  native.load_library("paged_attention")


def check_kv_dtype(geometry: Geometry, kv_dtype: jnp.dtype) -> None:
  """See api.check_supported."""
  assert kv_dtype == jnp.int8
  for name, value in (("head_dim", geometry.head_dim), ("block_size", geometry.block_size)):
    if value % _INT8_MULTIPLE:
      raise NotImplementedError(
        f"paged attention (cpu): {name}={value} with kv_dtype=int8 is no multiple of {_INT8_MULTIPLE}"
      )


def attend(attention: PagedAttention, qkv, cos, sin, kv, meta: RaggedMeta, slot_mapping):
  """See api.PagedAttention.attend. Raises NativeMissing if the library is not built."""
  tokens, heads, wide, head_dim = qkv.shape
  out = jax.ShapeDtypeStruct((tokens, heads * (wide - 2), head_dim), qkv.dtype)
  result = (out, jax.ShapeDtypeStruct(kv.shape, kv.dtype))
  attended, kv = native.bind_call("paged_attention", result, input_output_aliases={3: 1})(
    *(qkv, cos, sin, kv, meta.block_tables, meta.kv_lens, meta.query_starts, slot_mapping),
    scale=np.float32(attention.scale),
    soft_cap=np.float32(attention.soft_cap or 0.0),
    window=np.int64(attention.geometry.sliding_window or 0),
  )
  return attended, kv
