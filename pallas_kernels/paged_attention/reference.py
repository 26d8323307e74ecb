"""Paged attention in plain jnp: runs anywhere, is the default on CPU, and is what other implementations must equal.

It may not cost in proportion to the pool, nor to the width of the block table: every loop ends at a value computed
from the batch, and each pass gathers the pages of a few rows only. README.md tells what else was tried.

Two kinds of work, one loop nest each. Rows with one query (decode) go in groups of similar length; rows with several
(prefill chunks) go in tiles of queries. Both walk their keys in chunks of some pages and keep the softmax online
(arXiv:2205.14135). A chunk that a row does not have is masked, and a masked chunk changes nothing, to the bit; so a
row's result does not depend on its neighbours.
"""

import jax
import jax.numpy as jnp
from jax import lax

_DECODE_ROWS = 8  # rows of a decode group
_TILE = 32  # queries of a prefill tile
_CHUNK = 128  # keys a pass, rounded to whole pages
_MASKED = -1e30  # a score no real one reaches; finite, so that masked - masked is 0 and not NaN


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
  """[P, page, 2, K, H]: a token's keys and values lie together, so that it is written with one copy."""
  return (num_blocks, block_size, 2, num_kv_heads, head_dim)


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
  """See api.write_kv."""
  page = kv.shape[1]
  return kv.at[slot_mapping // page, slot_mapping % page].set(jnp.stack([k, v], axis=1).astype(kv.dtype))


def ragged_paged_attention(q: jax.Array, kv: jax.Array, block_tables: jax.Array, kv_lens: jax.Array,
                           query_starts: jax.Array, *, scale: float, sliding_window: int | None,
                           soft_cap: float | None) -> jax.Array:
  """See api.ragged_paged_attention."""
  num_tokens, num_heads, head_dim = q.shape
  _, page, _, num_kv_heads, _ = kv.shape
  num_rows, table_width = block_tables.shape
  pages = min(max(1, _CHUNK // page), table_width)
  chunk = pages * page
  counts = query_starts[1:] - query_starts[:-1]
  grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)

  def load(rows, starts):
    """Keys and values [R, C, K, H] in f32 of pages `starts` and on of `rows`."""
    columns = jnp.minimum(starts[:, None] + jnp.arange(pages, dtype=jnp.int32)[None, :], table_width - 1)
    ids = block_tables[jnp.broadcast_to(rows[:, None], columns.shape), columns]
    both = kv[ids].reshape(rows.shape[0], chunk, 2, num_kv_heads, head_dim).astype(jnp.float32)
    return both[:, :, 0], both[:, :, 1]

  def capped(scores):
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)

  def first_seen(positions):
    """The first key a query at `positions` sees."""
    return jnp.zeros_like(positions) if sliding_window is None else jnp.maximum(positions - (sliding_window - 1), 0)

  def update(state, queries, keys, values, seen, any_seen):
    """One online-softmax step: queries [R, K, M, H], seen bool[R, M, C], any_seen bool[R, C]."""
    peak, total, acc = state
    scores = capped(jnp.einsum("rkmh,rckh->rkmc", queries, keys, preferred_element_type=jnp.float32))
    seen = jnp.broadcast_to(seen[:, None], scores.shape)
    scores = jnp.where(seen, scores, _MASKED)
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
    decay = jnp.exp(peak - new_peak)
    values = jnp.where(any_seen[:, :, None, None], values, 0.0)
    acc = acc * decay[..., None] + jnp.einsum("rkmc,rckh->rkmh", weights, values, preferred_element_type=jnp.float32)
    return new_peak, total * decay + weights.sum(axis=-1), acc

  def start(rows, queries):
    shape = (rows, num_kv_heads, queries)
    return (jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32))

  def finish(state):
    _, total, acc = state
    return acc / jnp.where(total == 0.0, 1.0, total)[..., None]

  # Decode rows, longest first: a group then has rows of about one length.
  group = min(_DECODE_ROWS, num_rows)
  first_key = first_seen(kv_lens - 1)
  num_chunks = jnp.where(counts == 1, (kv_lens + (chunk - 1)) // chunk - first_key // chunk, 0)
  padded_rows = -(-num_rows // group) * group
  order = jnp.pad(jnp.argsort(-num_chunks).astype(jnp.int32), (0, padded_rows - num_rows))

  def decode_group(index, out):
    rows = lax.dynamic_slice(order, (index * group,), (group,))
    live = (counts[rows] == 1) & (index * group + jnp.arange(group, dtype=jnp.int32) < num_rows)
    lens, first, tokens = jnp.where(live, kv_lens[rows], 0), first_key[rows], query_starts[rows]
    queries = grouped[tokens].astype(jnp.float32) * scale

    def step(j, state):
      chunks = first // chunk + j
      positions = (chunks * chunk)[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
      seen = (positions >= first[:, None]) & (positions < lens[:, None])
      keys, values = load(rows, chunks * pages)
      return update(state, queries, keys, values, seen[:, None, :], seen)

    result = finish(lax.fori_loop(0, num_chunks[rows[0]], step, start(group, num_heads // num_kv_heads)))
    return out.at[jnp.where(live, tokens, num_tokens)].set(result.astype(out.dtype), mode="drop")

  num_decodes = jnp.sum((num_chunks > 0).astype(jnp.int32))
  out = lax.fori_loop(0, (num_decodes + (group - 1)) // group, decode_group, jnp.zeros_like(grouped))

  # Prefill rows: `tile` queries of one row at a time.
  tile = min(_TILE, num_tokens)
  num_tiles = jnp.where(counts > 1, (counts + (tile - 1)) // tile, 0)
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
    queries = queries.transpose(1, 2, 0, 3).reshape(1, num_kv_heads, -1, head_dim)  # [1, K, G * tile, H]

    def step(j, state):
      keys, values = load(row[None], (j * pages)[None])
      keyed = j * chunk + jnp.arange(chunk, dtype=jnp.int32)
      seen = (keyed[None, :] <= positions[:, None]) & mine[:, None] & (
          keyed[None, :] >= first_seen(positions)[:, None])
      seen = jnp.tile(seen, (num_heads // num_kv_heads, 1))[None]
      any_seen = (keyed >= low) & (keyed < end + offset)
      return update(state, queries, keys, values, seen, any_seen[None])

    state = lax.fori_loop(low // chunk, (end + offset + (chunk - 1)) // chunk, step,
                          start(1, num_heads // num_kv_heads * tile))
    result = finish(state).reshape(num_kv_heads, -1, tile, head_dim).transpose(2, 0, 1, 3).astype(out.dtype)
    kept = lax.dynamic_slice_in_dim(out, at, tile)
    return lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None, None, None], result, kept), at, 0)

  out = lax.fori_loop(0, tile_ends[-1], prefill_tile, out)
  return out.reshape(q.shape)
