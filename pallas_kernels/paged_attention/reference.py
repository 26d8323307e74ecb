"""Paged attention in plain jnp: runs anywhere, is the default on CPU, and is what other implementations must equal.

It may not cost in proportion to the pool, nor to the width of the block table: every loop ends at a value computed
from the batch, and each pass gathers one chunk of one row, small enough for a core's own cache. README.md tells what
else was tried.

Two kinds of work: rows with one query (decode), one row at a time; and rows with several (prefill chunks), one tile
of queries at a time. Both walk their keys in chunks of some pages and keep the softmax online (arXiv:2205.14135). No
row shares an operation with another, so a row's result depends neither on its neighbours nor on its place, to the bit.
"""

import jax
from jax import lax
import jax.numpy as jnp

_CHUNK = 64  # keys a pass, rounded to whole pages: 128 KiB of K and V for 4 heads of 64 in f32
_TILE = 16  # queries of a prefill tile
_MASKED = -1e30  # a score no real one reaches; finite, so that masked - masked is 0 and not NaN


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
  """[P, 2, K, page, H]: a page of one head is contiguous, so gathered pages of a head need no transposition."""
  return (num_blocks, 2, num_kv_heads, block_size, head_dim)


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
  """See api.write_kv."""
  page = kv.shape[3]
  return kv.at[slot_mapping // page, :, :, slot_mapping % page].set(jnp.stack([k, v], axis=1).astype(kv.dtype))


def _load(kv: jax.Array, block_table: jax.Array, chunk: jax.Array, pages: int, which: jax.Array) -> jax.Array:
  """Keys (`which` 0) or values (1) of a row's `chunk`-th run of `pages` pages, f32[K, C, H]."""
  num_blocks, _, num_kv_heads, page, head_dim = kv.shape
  columns = jnp.minimum(chunk * pages + jnp.arange(pages, dtype=jnp.int32), block_table.shape[0] - 1)
  heads = which * num_kv_heads + jnp.arange(num_kv_heads, dtype=jnp.int32)
  ids = block_table[columns][None, :] * (2 * num_kv_heads) + heads[:, None]
  # As [P * 2 * K, page * H] the gather copies long rows. The barrier keeps it a copy: fused into the mask that
  # follows, it computes an index an element.
  pages_of_heads = kv.reshape(num_blocks * 2 * num_kv_heads, page * head_dim)
  loaded = lax.optimization_barrier(pages_of_heads.at[ids.reshape(-1)].get(mode="clip"))
  return loaded.reshape(num_kv_heads, pages * page, head_dim).astype(jnp.float32)


def _start(num_kv_heads: int, queries: int, head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Running maximum, sum of weights and weighted values of no keys at all."""
  return (jnp.full((num_kv_heads, queries), _MASKED, jnp.float32), jnp.zeros((num_kv_heads, queries), jnp.float32),
          jnp.zeros((num_kv_heads, queries, head_dim), jnp.float32))


def _step(state, queries, kv, block_table, chunk, pages, seen, in_use, soft_cap):
  """Adds a chunk of keys and values to the online softmax.

  Args:
    state: see `_start`.
    queries: f32[K, M, H], scaled.
    kv, block_table, chunk, pages: see `_load`.
    seen: bool[M or 1, C], which keys a query sees.
    in_use: bool[C], which positions hold values at all: whatever lies elsewhere must not meet a weight of 0, since
      0 * NaN is NaN.
    soft_cap: see api.
  """
  peak, total, acc = state
  keys = _load(kv, block_table, chunk, pages, jnp.zeros((), jnp.int32))
  if queries.shape[1] < 16:  # few queries: the keys go first, since the second operand is packed anew
    scores = jnp.einsum("kch,kmh->kcm", keys, queries, preferred_element_type=jnp.float32).transpose(0, 2, 1)
  else:
    scores = jnp.einsum("kmh,kch->kmc", queries, keys, preferred_element_type=jnp.float32)
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  seen = jnp.broadcast_to(seen[None], scores.shape)
  scores = jnp.where(seen, scores, _MASKED)
  new_peak = jnp.maximum(peak, scores.max(axis=-1))
  weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
  decay = jnp.exp(peak - new_peak)
  # The index of the values is made to depend on the weights. XLA:CPU would otherwise start both gathers at once on
  # two threads, and waking one takes longer than the gather (README.md, 2026-11-21).
  values = _load(kv, block_table, chunk, pages, 1 + (weights[0, 0, 0] * 0.0).astype(jnp.int32))
  values = jnp.where(jnp.broadcast_to(in_use[None, :, None], values.shape), values, 0.0)
  acc = acc * decay[..., None] + jnp.einsum("kmc,kch->kmh", weights, values, preferred_element_type=jnp.float32)
  return new_peak, total * decay + weights.sum(axis=-1), acc


def _finish(state) -> jax.Array:
  """The attention output f32[K, M, H]; zeros for a query that saw nothing."""
  _, total, acc = state
  return acc / jnp.where(total == 0.0, 1.0, total)[..., None]


def ragged_paged_attention(q: jax.Array, kv: jax.Array, block_tables: jax.Array, kv_lens: jax.Array,
                           query_starts: jax.Array, *, scale: float, sliding_window: int | None,
                           soft_cap: float | None) -> jax.Array:
  """See api.ragged_paged_attention."""
  num_tokens, num_heads, head_dim = q.shape
  _, _, num_kv_heads, page, _ = kv.shape
  num_rows, table_width = block_tables.shape
  group = num_heads // num_kv_heads
  pages = min(max(1, _CHUNK // page), table_width)
  chunk = pages * page
  counts = query_starts[1:] - query_starts[:-1]
  grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim)
  in_chunk = jnp.arange(chunk, dtype=jnp.int32)

  def first_seen(positions):
    """The first key that a query at `positions` sees."""
    return jnp.zeros_like(positions) if sliding_window is None else jnp.maximum(positions - (sliding_window - 1), 0)

  # Decode rows, one at a time. They are brought to the front, since a turn for nothing is not free.
  decodes_first = jnp.argsort(counts != 1).astype(jnp.int32)

  def decode_row(index, out):
    row = decodes_first[index]
    length, token = kv_lens[row], query_starts[row]
    first = first_seen(length - 1)
    queries = lax.dynamic_index_in_dim(grouped, token, keepdims=False).astype(jnp.float32) * scale

    def step(j, state):
      positions = j * chunk + in_chunk
      seen = (positions >= first) & (positions < length)
      return _step(state, queries, kv, block_tables[row], j, pages, seen[None], seen, soft_cap)

    state = lax.fori_loop(first // chunk, -(-length // chunk), step, _start(num_kv_heads, group, head_dim))
    return lax.dynamic_update_index_in_dim(out, _finish(state).astype(out.dtype), token, 0)

  out = lax.fori_loop(0, jnp.sum((counts == 1).astype(jnp.int32)), decode_row, jnp.zeros_like(grouped))

  # Prefill rows: a tile of queries of one row at a time.
  tile = min(_TILE, num_tokens)
  num_tiles = jnp.where(counts > 1, -(-counts // tile), 0)
  tile_ends = jnp.cumsum(num_tiles)

  def prefill_tile(index, out):
    row = jnp.sum((tile_ends <= index).astype(jnp.int32))
    begin = query_starts[row] + (index - (tile_ends[row] - num_tiles[row])) * tile
    end = jnp.minimum(begin + tile, query_starts[row + 1])
    at = jnp.minimum(begin, num_tokens - tile)  # the slice may not pass the end of the axis
    tokens = at + jnp.arange(tile, dtype=jnp.int32)
    mine = (tokens >= begin) & (tokens < end)
    offset = kv_lens[row] - query_starts[row + 1]
    positions = tokens + offset
    low = first_seen(begin + offset)
    queries = lax.dynamic_slice_in_dim(grouped, at, tile).astype(jnp.float32) * scale
    queries = queries.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * tile, head_dim)

    def step(j, state):
      keyed = j * chunk + in_chunk
      seen = (keyed[None, :] <= positions[:, None]) & (keyed[None, :] >= first_seen(positions)[:, None])
      seen = jnp.tile(seen & mine[:, None], (group, 1))
      in_use = (keyed >= low) & (keyed < end + offset)
      return _step(state, queries, kv, block_tables[row], j, pages, seen, in_use, soft_cap)

    state = lax.fori_loop(low // chunk, -(-(end + offset) // chunk), step,
                          _start(num_kv_heads, group * tile, head_dim))
    result = _finish(state).reshape(num_kv_heads, group, tile, head_dim).transpose(2, 0, 1, 3).astype(out.dtype)
    kept = lax.dynamic_slice_in_dim(out, at, tile)
    mine = jnp.broadcast_to(mine[:, None, None, None], kept.shape)
    return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, result, kept), at, 0)

  return lax.fori_loop(0, tile_ends[-1], prefill_tile, out).reshape(q.shape)
