"""Paged attention in plain jnp: runs anywhere, and defines the result of the other implementations.

Its cost may not grow with the pool or with the width of the block table. Every loop ends at a value computed from the
batch, and each pass gathers one chunk of the keys of a few rows. docs/decisions/paged-attention.md lists the
alternatives and their times.

The code cuts a row's queries into tiles: of 1 query for decode rows, of many for prefill rows. It sorts tiles by the
length of their walk and groups them, so that the tiles of a group are similar. A group walks its keys in chunks of some
pages with an online softmax (arXiv:2205.14135). In decode, chunks that every tile sees whole come first and need no
mask. Chunks beyond a tile's end change no bit of it, so a row's result does not depend on its neighbors.
"""

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels.paged_attention.api import PagedAttention, RaggedMeta
from pallas_kernels.paged_attention.fp8_kv import BYTES, from_fp8, to_fp8
from pallas_kernels.paged_attention.int8_kv import dequantize, quantize, stored_size

_CHUNK = 64  # keys a pass, rounded to whole pages
_DECODE_GROUP = 8  # tiles of one query a group; measured like the others: docs/decisions/paged-attention.md
_PREFILL_TILE = 32
_PREFILL_GROUP = 1
_FEW = 8  # most queries of a tile and KV head for which each query is a separate product with the keys
_FLOAT32 = jnp.dtype(jnp.float32)
_MASKED = -1e30  # below every real score; finite, so that masked - masked is 0 and not NaN


def kv_shape(
  num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype = _FLOAT32
) -> tuple[int, ...]:
  """Returns [P, 2, K, page, int8_kv.stored_size]: gathered pages of one head need no transposition."""
  return (num_blocks, 2, num_kv_heads, block_size, stored_size(head_dim, dtype))


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates pairs (i, i + H/2), in f32, as Hugging Face checkpoints expect.

  Args:
    x: [..., heads, H].
    cos, sin: f32[..., H/2], one row a token.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[..., None, :], sin[..., None, :]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def rotate(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Splits a layer's projections and rotates queries and keys.

  Args:
    qkv: [..., K, G + 2, H]: for each KV head its queries, its key and its value.
    cos, sin: f32[..., H/2], one row a token.

  Returns:
    q [..., N, H], k [..., K, H], v [..., K, H].
  """
  q = qkv[..., :-2, :]
  q = q.reshape(*q.shape[:-3], -1, q.shape[-1])
  return rope(q, cos, sin), rope(qkv[..., -2, :], cos, sin), qkv[..., -1, :]


def attend(attention: PagedAttention, qkv, cos, sin, kv, meta: RaggedMeta, slot_mapping):
  """See api.PagedAttention.attend."""
  q, k, v = rotate(qkv, cos, sin)
  kv = write_kv(kv, k, v, slot_mapping)
  out = ragged_paged_attention(
    *(q, kv, meta.block_tables, meta.kv_lens, meta.query_starts),
    scale=attention.scale,
    sliding_window=attention.geometry.sliding_window,
    soft_cap=attention.soft_cap,
    invariant=attention.geometry.invariant,
  )
  return out, kv


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
  """Stores this step's keys and values, [T, K, H], cast to the buffer's dtype, as int8 with scales, or as fp8."""
  page, both = kv.shape[3], jnp.stack([k, v], axis=1)
  encode = {jnp.dtype(jnp.int8): quantize, BYTES: to_fp8}.get(kv.dtype, lambda lines: lines.astype(kv.dtype))
  return kv.at[slot_mapping // page, :, :, slot_mapping % page].set(encode(both))


def _load(kv: jax.Array, tables: jax.Array, chunks: jax.Array, pages: int, which: jax.Array) -> jax.Array:
  """Gathers keys (`which` 0) or values (1) of chunk `chunks[r]`, `pages` pages, of each row r: f32[R, K, C, H]."""
  num_blocks, _, heads, page, size = kv.shape
  columns = (chunks * pages)[:, None] + jnp.arange(pages, dtype=jnp.int32)[None, :]
  blocks = jnp.take_along_axis(tables, jnp.minimum(columns, tables.shape[1] - 1), axis=1, mode="clip")
  lines = blocks[:, None, :] * (2 * heads) + (which * heads + jnp.arange(heads, dtype=jnp.int32))[None, :, None]
  # As [P * 2 * K, page * size] the gather copies long rows. The barrier prevents fusion into the mask that follows,
  # which would compute an index for every element.
  by_head = kv.reshape(num_blocks * 2 * heads, page * size)
  loaded = lax.optimization_barrier(by_head.at[lines.reshape(-1)].get(mode="clip"))
  loaded = loaded.reshape(tables.shape[0], heads, pages * page, size)
  decode = {jnp.dtype(jnp.int8): dequantize, BYTES: from_fp8}.get(kv.dtype, lambda lines: lines.astype(jnp.float32))
  return decode(loaded)


def _start(shape: tuple[int, ...], head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Initial state: maximum and sum of weights, [R, K, M], and weighted values, [R, K, M, H]."""
  return (
    jnp.full(shape, _MASKED, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, head_dim), jnp.float32),
  )


def _scores(queries: jax.Array | tuple[jax.Array, ...], keys: jax.Array) -> jax.Array:
  """Returns q.k of a group, f32[R, K, M, C].

  Args:
    queries: see `_step`.
    keys: f32[R, K, C, H].
  """
  if not isinstance(queries, tuple):
    return jnp.einsum("rkmh,rkch->rkmc", queries, keys, preferred_element_type=jnp.float32)
  # XLA:CPU packs the second operand of a matrix product at each call; a product with a vector reads it in place.
  products = [jnp.einsum("rkch,rkh->rkc", keys, query, preferred_element_type=jnp.float32) for query in queries]
  return jnp.stack(products, axis=2)


def _step(state, queries, kv, tables, chunks, pages, soft_cap, live=None, seen=None, in_use=None):
  """Adds a chunk of keys and values to the online softmax of each tile of a group.

  Args:
    state: see `_start`.
    queries: f32[R, K, M, H], scaled; for few queries a tuple of M f32[R, K, H].
    kv, tables, chunks, pages: see `_load`.
    soft_cap: see api.
    live: bool[R], the tiles that see the whole chunk; the others keep their state. None: see `seen`.
    seen: bool[R, M, C], the keys that a query sees.
    in_use: bool[R, C], the positions that hold values; others are cleared, because a weight of 0 times NaN is NaN.
  """
  peak, total, acc = state
  scores = _scores(queries, _load(kv, tables, chunks, pages, jnp.zeros((), jnp.int32)))
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  if seen is not None:
    seen = jnp.broadcast_to(seen[:, None], scores.shape)
    scores = jnp.where(seen, scores, _MASKED)
  new_peak = jnp.maximum(peak, scores.max(axis=-1))
  weights = jnp.exp(scores - new_peak[..., None])
  if seen is not None:
    weights = jnp.where(seen, weights, 0.0)
  decay = jnp.exp(peak - new_peak)
  # The index of the values depends on the weights. Otherwise XLA:CPU would run both gathers on two threads, and waking
  # a thread takes longer than the gather (docs/decisions/paged-attention.md).
  values = _load(kv, tables, chunks, pages, 1 + (weights[0, 0, 0, 0] * 0.0).astype(jnp.int32))
  if in_use is not None:
    values = jnp.where(jnp.broadcast_to(in_use[:, None, :, None], values.shape), values, 0.0)
  new_acc = acc * decay[..., None] + jnp.einsum("rkmc,rkch->rkmh", weights, values, preferred_element_type=jnp.float32)
  new = new_peak, total * decay + weights.sum(axis=-1), new_acc
  if live is None:
    return new
  return tuple(
    jnp.where(jnp.broadcast_to(live.reshape(-1, *[1] * (old.ndim - 1)), old.shape), changed, old)
    for changed, old in zip(new, state, strict=True)
  )


def _finish(state) -> jax.Array:
  """Returns the attention output f32[R, K, M, H]; zeros for a query without visible keys."""
  _, total, acc = state
  return acc / jnp.where(total == 0.0, 1.0, total)[..., None]


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
  invariant: bool = False,
) -> jax.Array:
  """Computes causal attention of every packed token over its row's stored keys and values.

  Args:
    q: [T, N, H].
    invariant: as in Geometry; every query, also of a prompt, is a separate tile.

  Returns:
    [T, N, H] of q's dtype; zeros at padding tokens.
  """
  num_tokens, num_heads, head_dim = q.shape
  num_rows, table_width = block_tables.shape
  heads, page = kv.shape[2:4]
  pages = min(max(1, _CHUNK // page), table_width)
  chunk = pages * page
  heads_a_group = num_heads // heads
  counts = query_starts[1:] - query_starts[:-1]
  grouped = q.reshape(num_tokens, heads, heads_a_group, head_dim)

  def first_seen(positions):
    """Returns the first key that a query at `positions` sees."""
    return jnp.zeros_like(positions) if sliding_window is None else jnp.maximum(positions - (sliding_window - 1), 0)

  def attend(out, tiles_of_row, most_tiles, tile, group):
    """Fills `out` [T, K, G, H] for the rows that have tiles.

    Args:
      tiles_of_row: int32[S].
      most_tiles: static bound on their sum.
      tile, group: queries a tile, tiles a group.
    """
    # Plan: the extent of each tile, and its walk in chunks.
    ends = jnp.cumsum(tiles_of_row)
    index = jnp.arange(-(-most_tiles // group) * group, dtype=jnp.int32)
    used = index < ends[-1]
    rows = jnp.minimum(jnp.sum((ends[None, :] <= index[:, None]).astype(jnp.int32), axis=1), num_rows - 1)
    begins = query_starts[rows] + (index - (ends - tiles_of_row)[rows]) * tile
    stops = jnp.where(used, jnp.minimum(begins + tile, query_starts[rows + 1]), begins)
    offsets = kv_lens[rows] - query_starts[rows + 1]  # from token to position
    lows = first_seen(begins + offsets)
    walks = jnp.where(used, -(-(stops + offsets) // chunk) - lows // chunk, 0)
    # Leading chunks that a tile sees whole. Tiles of many queries mask all chunks: separate loops would save 6 % of a
    # long walk but compile longer.
    apart = tile == 1 and sliding_window is None
    whole = jnp.where(used, (begins + offsets + 1) // chunk, 0) if apart else jnp.zeros_like(walks)
    plan = jnp.stack([rows, begins, stops, offsets, lows, walks, whole])[:, jnp.argsort(-walks)]

    def run_group(number, out):
      rows, begins, stops, offsets, lows, walks, whole = lax.dynamic_slice_in_dim(plan, number * group, group, axis=1)
      tokens = begins[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
      mine = tokens < stops[:, None]
      positions = (tokens + offsets[:, None])[:, :, None]
      queries = grouped.at[tokens].get(mode="clip").astype(jnp.float32) * scale
      queries = queries.transpose(0, 2, 3, 1, 4).reshape(group, heads, -1, head_dim)
      state = _start(queries.shape[:3], head_dim)
      if queries.shape[2] <= _FEW:
        queries = tuple(queries[:, :, m] for m in range(queries.shape[2]))
      tables = block_tables[rows]

      def step_whole(j, state):
        return _step(state, queries, kv, tables, jnp.broadcast_to(j, (group,)), pages, soft_cap, live=j < whole)

      def step_masked(j, state):
        chunks = lows // chunk + whole + j
        keyed = (chunks * chunk)[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        seen = (keyed[:, None, :] <= positions) & (keyed[:, None, :] >= first_seen(positions)) & mine[:, :, None]
        seen = jnp.tile(seen, (1, heads_a_group, 1))
        in_use = (keyed >= lows[:, None]) & (keyed < (stops + offsets)[:, None])
        return _step(state, queries, kv, tables, chunks, pages, soft_cap, seen=seen, in_use=in_use)

      if apart:
        state = lax.fori_loop(0, whole.max(), step_whole, state)
      state = lax.fori_loop(0, (walks - whole).max(), step_masked, state)
      result = _finish(state).reshape(group, heads, -1, tile, head_dim).transpose(0, 3, 1, 2, 4).astype(out.dtype)
      return out.at[jnp.where(mine, tokens, num_tokens)].set(result, mode="drop")

    return lax.fori_loop(0, (ends[-1] + (group - 1)) // group, run_group, out)

  if invariant:
    return attend(jnp.zeros_like(grouped), counts, num_tokens, 1, min(_DECODE_GROUP, num_tokens)).reshape(q.shape)
  decodes = (counts == 1).astype(jnp.int32)
  out = attend(jnp.zeros_like(grouped), decodes, num_rows, 1, min(_DECODE_GROUP, num_rows))
  tile = min(_PREFILL_TILE, num_tokens)
  prefills = jnp.where(counts > 1, -(-counts // tile), 0)
  # A row of n > 1 queries has at most n / tile + 1 tiles, and there are at most T / 2 such rows.
  most_tiles = num_tokens // tile + min(num_rows, num_tokens // 2)
  return attend(out, prefills, most_tiles, tile, _PREFILL_GROUP).reshape(q.shape)
