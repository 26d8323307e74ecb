"""What a model calls for attention over paged keys and values; it may not compute anything itself.

An implementation is a module with the public functions of `reference.py`, of the same signatures. It owns the layout
of the KV buffer: callers treat a buffer as opaque and get its shape from `kv_shape`. Choosing happens here, once, at
trace time.
"""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedMeta:
  """Which tokens of the packed axis belong to which row, and where each row's keys and values lie.

  Row r owns tokens `query_starts[r]:query_starts[r + 1]`; they are its LAST positions, so its first query is at
  position `kv_lens[r] - (query_starts[r + 1] - query_starts[r])`. Unused rows have no token and kv_len 0. Tokens from
  `query_starts[S]` on are padding.

  Attributes:
    block_tables: int32[S, B], ids of physical blocks; entries past a row's length are never read (0 by custom).
    kv_lens: int32[S], positions of the row including those written in this step.
    query_starts: int32[S + 1], not decreasing.
  """

  block_tables: jax.Array
  kv_lens: jax.Array
  query_starts: jax.Array


def _implementation() -> ModuleType:
  return reference


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
  """Shape of one layer's KV buffer.

  Args:
    num_blocks: physical blocks, the padding block 0 included.
    block_size: tokens a block.
    num_kv_heads: K.
    head_dim: H.
  """
  for name, value in (
    ("num_blocks", num_blocks),
    ("block_size", block_size),
    ("num_kv_heads", num_kv_heads),
    ("head_dim", head_dim),
  ):
    if value < 1:
      raise ValueError(f"paged attention: {name}={value} must be at least 1")
  return _implementation().kv_shape(num_blocks, block_size, num_kv_heads, head_dim)


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
  """Stores this step's keys and values; in place where the caller's jit donates `kv`.

  Args:
    kv: a buffer of `kv_shape`, of any float dtype (k and v are cast to it).
    k, v: [T, K, H].
    slot_mapping: int32[T], block id * block_size + offset in the block; padding tokens map into block 0, whose
      content is never read.

  Returns:
    The buffer with the tokens written.
  """
  if k.shape != v.shape or slot_mapping.shape != k.shape[:1]:
    raise ValueError(
      f"write_kv: k {k.shape}, v {v.shape} and slot_mapping {slot_mapping.shape} must be [T, K, H], [T, K, H] and [T]"
    )
  return _implementation().write_kv(kv, k, v, slot_mapping)


def ragged_paged_attention(
  q: jax.Array,
  kv: jax.Array,
  meta: RaggedMeta,
  *,
  scale: float,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
) -> jax.Array:
  """Causal attention of every packed token over its row's paged keys and values.

  Args:
    q: [T, N, H]; N is a multiple of the buffer's K.
    kv: a buffer of `kv_shape` that already holds this step's keys and values (see `write_kv`).
    meta: the rows.
    scale: factor on q.k, usually H ** -0.5.
    sliding_window: a query sees its last `sliding_window` positions, itself included; None sees all.
    soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118); None leaves them.

  Returns:
    [T, N, H] of q's dtype; zeros at padding tokens.
  """
  if sliding_window is not None and sliding_window < 1:
    raise ValueError(f"paged attention: sliding_window={sliding_window} must be at least 1, or None")
  if soft_cap is not None and soft_cap <= 0:
    raise ValueError(f"paged attention: soft_cap={soft_cap} must be above 0, or None")
  num_kv_heads = _implementation().num_kv_heads(kv)
  if q.shape[1] % num_kv_heads:
    raise ValueError(
      f"paged attention: {q.shape[1]} query heads are not a multiple of the {num_kv_heads} KV heads of the buffer"
    )
  rows = meta.kv_lens.shape[0]
  if meta.block_tables.ndim != 2 or meta.block_tables.shape[0] != rows or meta.query_starts.shape != (rows + 1,):
    raise ValueError(
      f"paged attention: block_tables {meta.block_tables.shape}, kv_lens {meta.kv_lens.shape} and "
      f"query_starts {meta.query_starts.shape} must be [S, B], [S] and [S + 1]"
    )
  for name, array in (
    ("block_tables", meta.block_tables),
    ("kv_lens", meta.kv_lens),
    ("query_starts", meta.query_starts),
  ):
    if array.dtype != jnp.int32:
      raise ValueError(f"paged attention: {name} has dtype {array.dtype}; it must be int32")
  return _implementation().ragged_paged_attention(
    q,
    kv,
    meta.block_tables,
    meta.kv_lens,
    meta.query_starts,
    scale=scale,
    sliding_window=sliding_window,
    soft_cap=soft_cap,
  )
