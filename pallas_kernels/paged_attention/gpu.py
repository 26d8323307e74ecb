"""Paged attention for Hopper GPUs: puts the kernels together; it may not compute anything itself.

A layer is three kernels, four where rows of few queries may be split: rotary embedding with the KV write
(gpu_write.py), rows of many queries (gpu_prefill.py), rows of few (gpu_decode.py) and the sum of their parts. All of
them read a plan made on the host (plan.py) and none moves the buffer or the output.
"""

import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_attention import plan as plans
from pallas_kernels.paged_attention.gpu_decode import decode
from pallas_kernels.paged_attention.gpu_prefill import prefill
from pallas_kernels.paged_attention.gpu_write import rotate_and_write
from pallas_kernels.paged_attention.plan import Geometry, Plan
from pallas_kernels.paged_attention.tuning import count_sms, tuning_for

PREFERRED_BLOCK_SIZE = 64  # one tile of keys, one copy
_BLOCK_SIZES = (16, 32, 64, 128)
_HEAD_DIMS = (64, 128)
_LARGEST_GROUP = 64  # packed rows of a decode tile
# Jitted for itself, since a layer is then lowered, and its kernels compiled, once a program and not once a layer: every
# lowering of a kernel gets a name of its own, which is part of what the compiler's cache goes by.
_jit = functools.partial(
  jax.jit, static_argnames=("plan", "scale", "sliding_window", "soft_cap", "device_kind", "interpret")
)


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
  """[P, K, 2, page, H]: the keys of a block and KV head lie together, then its values."""
  return num_blocks, num_kv_heads, 2, block_size, head_dim


def num_kv_heads(kv: jax.Array) -> int:
  """K of a buffer."""
  return kv.shape[1]


def check_supported(geometry: Geometry, dtype: Any) -> None:
  """Raises NotImplementedError for what the kernels cannot do; see api.check_supported."""
  for what, value, supported in (
    ("dtype", jnp.dtype(dtype).name, ("bfloat16",)),
    ("head_dim", geometry.head_dim, _HEAD_DIMS),
    ("block_size", geometry.block_size, _BLOCK_SIZES),
  ):
    if value not in supported:
      raise NotImplementedError(
        f"paged attention on GPU: {what}={value} is not supported; supported are {', '.join(map(str, supported))}, and "
        "--attention=reference takes any"
      )
  if geometry.group > _LARGEST_GROUP:
    raise NotImplementedError(
      f"paged attention on GPU: {geometry.group} query heads a KV head are not supported; supported are 1 to "
      f"{_LARGEST_GROUP}, and --attention=reference takes any"
    )


def make_plan(geometry: Geometry, device_kind: str) -> Plan:
  """The layout of the work that the host decides for every step of a rung."""
  tuning = tuning_for(device_kind, geometry.head_dim, geometry.block_size)
  return plans.make_plan(geometry, tuning.split_tokens, count_sms(device_kind))


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
  """Stores keys and values that need no rotary embedding, by XLA's scatter; see api.write_kv. Serving uses `attend`."""
  page = kv.shape[3]
  both = jnp.stack([k, v], axis=2).astype(kv.dtype)
  return kv.at[slot_mapping // page, :, :, slot_mapping % page].set(both)


def _attend_packed(
  q, kv, block_tables, kv_lens, query_starts, work, *, plan: Plan, sliding_window: int | None, **static
) -> jax.Array:
  """Attention of queries [K, T * G, H] whose keys and values are stored, [T, N, H]."""
  if sliding_window != plan.geometry.sliding_window:
    raise ValueError(f"paged attention: sliding_window={sliding_window}, the plan's is {plan.geometry.sliding_window}")
  static |= {"plan": plan, "sliding_window": sliding_window}
  out = prefill(q, kv, block_tables, kv_lens, query_starts, work, **static)
  if not plan.decode_queries:
    return out
  return decode(q, kv, block_tables, kv_lens, query_starts, work, out, **static)


@_jit
def ragged_paged_attention(
  q: jax.Array,
  kv: jax.Array,
  block_tables: jax.Array,
  kv_lens: jax.Array,
  query_starts: jax.Array,
  *,
  work: dict[str, jax.Array],
  plan: Plan,
  scale: float,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
  device_kind: str = "",
  interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
  """Attention alone, see api.ragged_paged_attention; it packs the queries, which `attend` does not need.

  Args:
    q: bf16[T, N, H].
    kv, block_tables, kv_lens, query_starts: see api.
    work: the pieces of `plan.make`'s array.
    plan: of `make_plan`.
    scale, sliding_window, soft_cap: see api.
    device_kind: for tuned settings.
    interpret: for a machine without a GPU.
  """
  geometry = plan.geometry
  grouped = q.reshape(geometry.tokens, geometry.num_kv_heads, geometry.group, geometry.head_dim)
  return _attend_packed(
    grouped.transpose(1, 0, 2, 3).reshape(geometry.num_kv_heads, -1, geometry.head_dim),
    kv,
    block_tables,
    kv_lens,
    query_starts,
    work,
    plan=plan,
    scale=scale,
    sliding_window=sliding_window,
    soft_cap=soft_cap,
    tuning=tuning_for(device_kind, geometry.head_dim, geometry.block_size),
    interpret=interpret,
  )


@_jit
def attend(
  qkv: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  kv: jax.Array,
  block_tables: jax.Array,
  kv_lens: jax.Array,
  query_starts: jax.Array,
  slot_mapping: jax.Array,
  work: dict[str, jax.Array],
  *,
  plan: Plan,
  scale: float,
  sliding_window: int | None,
  soft_cap: float | None,
  device_kind: str,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Rotary embedding, KV write and attention of a layer; see api.PagedAttention.attend.

  Args:
    qkv: bf16[T, K, G + 2, H].
    cos, sin: f32[T, H / 2].
    kv: bf16[P, K, 2, page, H]; updated in place where the caller's jit donates it.
    block_tables, kv_lens, query_starts, slot_mapping: see api.
    work, plan, scale, sliding_window, soft_cap, device_kind, interpret: see ragged_paged_attention.

  Returns:
    bf16[T, N, H], zeros at padding tokens; and the buffer.
  """
  tuning = tuning_for(device_kind, plan.geometry.head_dim, plan.geometry.block_size)
  q, kv = rotate_and_write(qkv, cos, sin, kv, slot_mapping, tuning=tuning, interpret=interpret)
  out = _attend_packed(
    q,
    kv,
    block_tables,
    kv_lens,
    query_starts,
    work,
    plan=plan,
    scale=scale,
    sliding_window=sliding_window,
    soft_cap=soft_cap,
    tuning=tuning,
    interpret=interpret,
  )
  return out, kv
