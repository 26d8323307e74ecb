"""Combines the Hopper kernels into paged attention; it may not compute anything itself.

A layer runs three kernels: rotary embedding with the KV write (gpu_write.py), rows of many queries (gpu_prefill.py) and
rows of few (gpu_decode.py). A rung for decodes runs the first and the last. All read a plan that the host makes
(plan.py), and none copies the buffer or the output.
"""

import functools
from typing import Any

import jax

from pallas_kernels.paged_attention import plan as plans
from pallas_kernels.paged_attention.api import PagedAttention, RaggedMeta
from pallas_kernels.paged_attention.gpu_decode import decode
from pallas_kernels.paged_attention.gpu_prefill import prefill
from pallas_kernels.paged_attention.gpu_write import rotate_and_write
from pallas_kernels.paged_attention.plan import Geometry, Plan
from pallas_kernels.paged_attention.tuning import count_sms, tuning_for

PREFERRED_BLOCK_SIZE = 64  # one tile of keys, loaded by one copy


def kv_shape(
  num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any = None
) -> tuple[int, ...]:  # the same in any dtype
  """Returns [P, K, 2, page, H]: for each block and KV head the keys, then the values."""
  return num_blocks, num_kv_heads, 2, block_size, head_dim


def make_plan(geometry: Geometry, device_kind: str) -> Plan:
  """Returns the layout of the work lists that the host fills for every step of a rung."""
  tuning = tuning_for(device_kind, geometry.head_dim, geometry.block_size)
  return plans.make_plan(geometry, tuning.split_tokens, count_sms(device_kind), tuning.decode_ctas_per_sm)


# Jitted separately, so that a program lowers the layer and compiles its kernels once, not once a layer: every lowering
# gives a kernel a new name, and that name is part of the compiler's cache key.
@functools.partial(jax.jit, static_argnames=("attention", "interpret"))
def attend(attention: PagedAttention, qkv, cos, sin, kv, meta: RaggedMeta, slot_mapping, interpret=None):
  """See api.PagedAttention.attend.

  Args:
    qkv: bf16[T, K, G + 2, H].
    kv: bf16[P, K, 2, page, H], or uint8 for fp8.
    interpret: plgpu.InterpretGPUParams, for a machine without a GPU.
  """
  plan, geometry = attention.plan, attention.geometry
  assert plan is not None and meta.work is not None
  tuning = tuning_for(attention.device_kind, geometry.head_dim, geometry.block_size)
  q, kv, finished = rotate_and_write(qkv, cos, sin, kv, slot_mapping, tuning=tuning, interpret=interpret)
  rows = meta.block_tables, meta.kv_lens, meta.query_starts, meta.work
  static = {
    "plan": plan,
    "scale": attention.scale,
    "soft_cap": attention.soft_cap,
    "tuning": tuning,
    "interpret": interpret,
  }
  out = prefill(q, kv, *rows, **static) if plan.has_prefill else None
  if plan.decode_queries:
    out = decode(q, kv, *rows, finished, out, **static)
  assert out is not None
  return out, kv
