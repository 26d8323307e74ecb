"""Paged attention as Pallas kernels for TPU v5e and v6e; it may not know of engines or models.

The buffer is [P, K, page, W]: a line of W lanes holds a position's key and then its value. One copy loads both, and
heads of 64 fill the 128 lanes of a register (separate, each would be padded to 128). If H is no multiple of 128, the
kernel never separates the key and value of a line: queries have zeros in the value lanes, and weights times whole lines
give the output in the value lanes. This costs nothing, because the matrix unit is 128 wide.
Lines of fp8 travel as bytes and become bfloat16 in registers, since chips before v7 multiply no fp8.

A buffer of int8 is [P, page / 128, 4 * K + ceil(K / 8), 32, W], tiles of 32 lines in spans of 128 positions. Tile
w * K + k of a span has its positions 32 * w to 32 * w + 31 of head k. The last tiles have the scales: as int32, each is
[8 heads, 128 positions] in the first 128 lanes, with the key's bfloat16 in the lower half and the value's in the upper.
So a span is one copy, and the scales of a head lie as its scores do. Scores take the keys' scales, and weights the
values' (int8_kv.py).

Attention is one kernel without a grid: it walks a list of query tiles that the device makes from `query_starts`. A tile
is one query (decode) or a run of queries of one row. It walks the row's pages in chunks with an online softmax
(arXiv:2205.14135), while copies load the next chunk and the next tile's queries and store the last tile's output.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.paged_attention.api import PagedAttention, RaggedMeta, name_kv_dtype
from pallas_kernels.paged_attention.fp8_kv import BYTES, from_fp8, to_fp8
from pallas_kernels.paged_attention.int8_kv import quantize_apart
from pallas_kernels.paged_attention.plan import Geometry
from pallas_kernels.paged_attention.reference import rotate

_INT8, _FLOAT32 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float32)
_SPAN = 128  # positions of an int8 buffer whose scales share a tile
_TILE = 32  # lines of int8 in a hardware tile
_HEADS = 8  # KV heads whose scales share a tile

# Not measured: these constants have never run on a TPU.
PREFERRED_BLOCK_SIZE = 32  # half the copies and scalar memory of 16, for devices with few heads
PREFERRED_BLOCK_SIZES = {_INT8: _SPAN}
_CHUNK = 256  # keys a pass
_TILE_ROWS = 256  # (query, head of the group) pairs a tile
_WRITE_TOKENS = 512  # new tokens in VMEM at a time
_RING = 16  # windows in flight in `write_kv`, half of them reads, half of them writes
_VMEM_BYTES = 64 * 2**20  # of 128 MiB
_TABLE_BYTES = 960 * 2**10  # of 1 MiB of scalar memory; tiles, lengths and the program need the rest
_LANES = 128
_MASKED = -1e30  # below every real score; finite, so that masked - masked is 0 and not NaN


def _lines(head_dim: int) -> tuple[int, slice, slice]:
  """Returns the lanes of a line, and the lanes that queries and that weights multiply."""
  if head_dim % _LANES == 0:
    return 2 * head_dim, slice(0, head_dim), slice(head_dim, 2 * head_dim)
  width = -(-2 * head_dim // _LANES) * _LANES
  return width, slice(0, width), slice(0, width)


def _window(dtype: jnp.dtype) -> int:
  """Returns the positions of one hardware tile, the smallest unit of a copy."""
  return 32 // jnp.dtype(dtype).itemsize


def check_supported(geometry: Geometry, dtype: jnp.dtype) -> None:
  """Raises NotImplementedError, with the value, for unsupported shapes and dtypes. Every head size is supported.

  Args:
    geometry: of a step.
    dtype: of queries, and of a buffer without a dtype of its own.
  """
  dtype = jnp.dtype(dtype)
  check_kv_dtype(geometry, dtype)
  rows, width = geometry.rows, geometry.table_width
  if 4 * (-(-rows // 8) * 8) * (-(-width // _LANES) * _LANES) > _TABLE_BYTES:
    raise NotImplementedError(
      f"paged attention on TPU: {rows} block tables of {width} entries exceed the {_TABLE_BYTES // 1024} KiB of scalar "
      "memory for them; raise --block_size, or lower --max_model_len or --max_num_seqs"
    )


def check_kv_dtype(geometry: Geometry, kv_dtype: jnp.dtype) -> None:
  """See api.check_supported."""
  unit = _SPAN if kv_dtype == _INT8 else _window(kv_dtype)
  if geometry.block_size % unit:
    raise NotImplementedError(
      f"paged attention on TPU: block_size={geometry.block_size} for {name_kv_dtype(kv_dtype)} is no multiple of {unit}"
    )


def kv_shape(
  num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype = _FLOAT32
) -> tuple[int, ...]:
  """Returns [P, K, page, W], where a page and each head's part of it are contiguous; see above for int8."""
  width = _lines(head_dim)[0]
  if dtype == _INT8:
    tiles = _SPAN // _TILE * num_kv_heads + -(-num_kv_heads // _HEADS)
    return (num_blocks, block_size // _SPAN, tiles, _TILE, width)
  return (num_blocks, num_kv_heads, block_size, width)


def _heads_and_page(kv: jax.Array) -> tuple[int, int]:
  """Returns the KV heads and the tokens of a block of a buffer."""
  if kv.dtype == _INT8:
    return _HEADS * kv.shape[2] // (_SPAN // _TILE * _HEADS + 1), kv.shape[1] * _SPAN
  return kv.shape[1], kv.shape[2]


def attend(attention: PagedAttention, qkv, cos, sin, kv, meta: RaggedMeta, slot_mapping):
  """See api.PagedAttention.attend. XLA applies the rotary embedding."""
  q, k, v = rotate(qkv, cos, sin)
  kv = write_kv(kv, k, v, slot_mapping)
  out = ragged_paged_attention(
    *(q, kv, meta.block_tables, meta.kv_lens, meta.query_starts),
    scale=attention.scale,
    sliding_window=attention.geometry.sliding_window,
    soft_cap=attention.soft_cap,
  )
  return out, kv


def _runs(slots: jax.Array, page: int, window: int, tokens: int) -> tuple[jax.Array, ...]:
  """Cuts the new tokens, without padding, into runs that are adjacent within one window of the buffer.

  Args:
    slots: int32[T].
    page, window: tokens of a block and of a hardware tile.
    tokens: new tokens in VMEM at a time; no run crosses a multiple of `tokens`.

  Returns:
    First token, number of tokens and first slot of each run, int32[T] with n valid entries; and the first run of each
    multiple of `tokens`, int32[1 + multiples].
  """
  size = slots.shape[0]
  index = jnp.arange(size, dtype=jnp.int32)
  edges = jnp.arange(0, size + tokens, tokens, dtype=jnp.int32)
  starts = (slots != jnp.roll(slots, 1) + 1) | (slots % window == 0) | (index % tokens == 0)
  real = slots >= page
  (begins,) = jnp.nonzero(starts & real, size=size, fill_value=size + tokens)
  (lasts,) = jnp.nonzero(jnp.roll(starts, -1).at[-1].set(True) & real, size=size, fill_value=0)
  begins = begins.astype(jnp.int32)
  firsts = jnp.sum((begins[None, :] < edges[:, None]).astype(jnp.int32), axis=1)
  return begins, lasts.astype(jnp.int32) + 1 - begins, slots.at[begins].get(mode="clip"), firsts


def _write_kernel(begins, counts, slots, firsts, new, _, kv, windows, reads, writes, *, window: int, place: Callable):
  """Stores the runs of one block of new tokens in their windows: read, merge, write.

  Args:
    begins, counts, slots, firsts: see `_runs`, in SMEM.
    new: [K, tokens, W], the block; or its scales, int32[heads, tokens].
    kv: the buffer, in HBM.
    windows: [ring, K, window, W]; of scales [ring, heads / 8, 32, 128] of int8.
    reads, writes: one semaphore for each window of the ring.
    window: positions of a window.
    place: takes the buffer and a slot; returns the window of it in the buffer.
  """
  ring, tokens = windows.shape[0], new.shape[1]
  first, stop = firsts[pl.program_id(0)], firsts[pl.program_id(0) + 1]

  def read(run):
    return pltpu.make_async_copy(place(kv, slots[run]), windows.at[run % ring], reads.at[run % ring])

  def write(run):
    return pltpu.make_async_copy(windows.at[run % ring], place(kv, slots[run]), writes.at[run % ring])

  def merge(run, carry):
    @pl.when(run + ring // 2 < stop)
    def _():
      @pl.when(run - ring // 2 >= first)
      def _():
        write(run - ring // 2).wait()

      read(run + ring // 2).start()

    read(run).wait()
    # The run lies within two aligned windows of the new tokens; a rotation aligns it with the buffer.
    token = begins[run] - pl.program_id(0) * tokens
    aligned = pl.multiple_of(jnp.minimum(token // window * window, tokens - 2 * window), window)
    offset = slots[run] % window
    wide = jnp.float32 if jnp.issubdtype(new.dtype, jnp.floating) else jnp.int32
    pair = new[:, pl.ds(aligned, 2 * window)].astype(wide)
    turned = pltpu.roll(pair, (offset - (token - aligned) + 2 * window) % (2 * window), 1)[:, :window]
    position = lax.broadcasted_iota(jnp.int32, turned.shape, 1)
    mine = (position >= offset) & (position < offset + counts[run])
    old = windows[run % ring]
    if new.ndim == 3:
      windows[run % ring] = jnp.where(mine, turned, old.astype(wide)).astype(old.dtype)
    else:
      words = pltpu.bitcast(old.reshape(-1, old.shape[-1]), jnp.int32)
      windows[run % ring] = pltpu.bitcast(jnp.where(mine, turned, words), old.dtype).reshape(old.shape)
    write(run).start()
    return carry

  def each(begin, end, act: Callable) -> None:
    lax.fori_loop(begin, end, lambda run, carry: (act(run), carry)[1], 0)

  each(first, jnp.minimum(first + ring // 2, stop), lambda run: read(run).start())
  lax.fori_loop(first, stop, merge, 0)
  each(jnp.maximum(stop - ring, first), stop, lambda run: write(run).wait())


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
  """Stores keys and values, [T, K, H].

  The tokens of a KV block must be consecutive positions in order; the kernel skips padding.
  """
  heads, page = _heads_and_page(kv)
  window, width = _window(kv.dtype), kv.shape[-1]
  if kv.dtype != _INT8:
    lines = jnp.concatenate([k, v], axis=2)
    lines = to_fp8(lines) if kv.dtype == BYTES else lines.astype(kv.dtype)

    def place(kv, slot):
      offset = pl.multiple_of(slot % page // window * window, window)
      return kv.at[slot // page, :, pl.ds(offset, window)]

    return _write_lines(kv, lines.transpose(1, 0, 2), slot_mapping, page, window, (heads, window, width), place)

  lines, scales = quantize_apart(jnp.stack([k, v], axis=2))  # [T, K, 2, H], [T, K, 2]
  tiles = kv.shape[2] - _SPAN // _TILE * heads
  words = jnp.pad(lax.bitcast_convert_type(scales, jnp.int32), ((0, 0), (0, tiles * _HEADS - heads)))

  def place_numbers(kv, slot):
    return kv.at[slot // page, slot % page // _SPAN, pl.ds(slot % _SPAN // window * heads, heads)]

  def place_scales(kv, slot):
    return kv.at[slot // page, slot % page // _SPAN, pl.ds(_SPAN // _TILE * heads, tiles), :, pl.ds(0, _LANES)]

  lines = lines.reshape(*lines.shape[:2], -1).transpose(1, 0, 2)
  kv = _write_lines(kv, lines, slot_mapping, page, window, (heads, window, width), place_numbers)
  # A tile of scales has four windows of positions, so it has runs of its own: a run must own what it reads and writes.
  return _write_lines(kv, words.T, slot_mapping, page, _SPAN, (tiles, _TILE, _LANES), place_scales)


def _write_lines(
  kv: jax.Array, new: jax.Array, slots: jax.Array, page: int, window: int, shape: tuple[int, ...], place: Callable
) -> jax.Array:
  """Stores the lines of new tokens, [K, T, up to W], or their scales, int32[heads, T].

  Args:
    page: tokens of a block.
    window: positions of a window.
    shape: of a window in the buffer.
    place: see `_write_kernel`.
  """
  tokens = min(_WRITE_TOKENS, -(-new.shape[1] // (2 * window)) * 2 * window)
  blocks = -(-new.shape[1] // tokens)
  rest = [(0, shape[-1] - size) for size in new.shape[2:]]
  new = jnp.pad(new, ((0, 0), (0, blocks * tokens - new.shape[1]), *rest))
  return pl.pallas_call(
    functools.partial(_write_kernel, window=window, place=place),
    out_shape=pltpu.HBM(kv.shape, kv.dtype),  # otherwise XLA would copy a small pool to VMEM and back
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(blocks,),
      in_specs=[
        pl.BlockSpec((new.shape[0], tokens, *new.shape[2:]), lambda block, *_: (0, block, 0)[: new.ndim]),
        pl.BlockSpec(memory_space=pltpu.HBM),
      ],
      out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
      scratch_shapes=[
        pltpu.VMEM((_RING, *shape), kv.dtype),
        pltpu.SemaphoreType.DMA((_RING,)),
        pltpu.SemaphoreType.DMA((_RING,)),
      ],
    ),
    input_output_aliases={5: 0},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES),
    name="write_kv",
  )(*_runs(slots, page, window, tokens), new, kv)


class _Tile(NamedTuple):
  """A run of queries of one row, as scalars.

  Attributes:
    row: number of the row.
    begin, stop: tokens of the tile.
    offset: difference from token to position.
    end: keys that the last query sees, counted from position 0.
    first_page: the first page that any query sees, in the row's table.
    chunks: passes over the keys; at least 1.
    decodes: the tile is the only query of its row.
  """

  row: jax.Array
  begin: jax.Array
  stop: jax.Array
  offset: jax.Array
  end: jax.Array
  first_page: jax.Array
  chunks: jax.Array
  decodes: jax.Array


def _attention_kernel(
  rows,
  begins,
  count,
  tables,
  lens,
  starts,
  q,
  kv,
  out,
  kv_chunks,
  q_tiles,
  out_tiles,
  queries,
  peaks,
  totals,
  accs,
  kv_copied,
  q_copied,
  out_copied,
  *,
  heads: int,
  page: int,
  group: int,
  keys_at: slice,
  values_at: slice,
  scale: float,
  sliding_window: int | None,
  soft_cap: float | None,
):
  """Computes attention of all tiles, one after the other.

  Args:
    rows, begins, count: int32[I], int32[I], int32[1]: row and first token of the tiles, and their number.
    tables, lens, starts: see api.RaggedMeta; all of these are in SMEM.
    q, kv, out: in HBM: [T, N, Wq], the buffer and [T, N, Wo].
    kv_chunks: [2, K, pages, page, W]; of int8 [2, spans, tiles of a span, 32, W].
    q_tiles, out_tiles: [2, tile, N, Wq], [2, tile, N, Wo].
    queries: [K, tile * G, Wq], the tile's queries by KV head.
    peaks, totals: f32[K, tile * G, 128], running maximum and sum of weights, the same in all lanes.
    accs: f32[K, tile * G, Wo], weighted values.
    kv_copied, q_copied, out_copied: two semaphores each.
    heads, page: K, and tokens of a block.
    group, keys_at, values_at: G, and the lanes of `_lines`.
  """
  is_int8, width = kv.dtype == _INT8, kv_chunks.shape[-1]
  spans = page // _SPAN  # of a page of int8
  pages = kv_chunks.shape[1] // spans if is_int8 else kv_chunks.shape[2]
  chunk, most = pages * page, q_tiles.shape[1]
  dtype = queries.dtype
  precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

  def tile_of(index) -> _Tile:
    row, begin = rows[index], begins[index]
    row_stop = starts[row + 1]
    stop, offset = jnp.minimum(begin + most, row_stop), lens[row] - row_stop
    low = 0 if sliding_window is None else jnp.maximum(begin + offset - (sliding_window - 1), 0)
    first_page = low // page
    last_page = pl.cdiv(stop + offset, page)
    chunks = pl.cdiv(last_page - first_page, pages)
    return _Tile(row, begin, stop, offset, stop + offset, first_page, chunks, row_stop - starts[row] == 1)  # pyright: ignore[reportArgumentType]

  def kv_copies(tile: _Tile, number, slot, act: Callable) -> None:
    """Starts or awaits the pages of chunk `number` of a tile."""
    first = tile.first_page + number * pages

    def copy(i, carry):
      source = kv.at[tables[tile.row, first + i]]
      target = kv_chunks.at[slot, pl.ds(i * spans, spans)] if is_int8 else kv_chunks.at[slot, :, i]
      act(pltpu.make_async_copy(source, target, kv_copied.at[slot]))
      return carry

    lax.fori_loop(0, jnp.minimum(pl.cdiv(tile.end, page) - first, pages), copy, 0)

  def first_loaded(tile: _Tile, size: int):
    """Returns the first token of a tile's copy in VMEM, moved back so that a whole tile stays within the tokens."""
    return tile.begin if size == 1 else jnp.minimum(tile.begin, q.shape[0] - size)

  def by_size(tile: _Tile, act: Callable[[int], None]) -> None:
    """Calls `act` with the number of queries to process: 1, or the size of a whole tile."""
    pl.when(tile.decodes)(lambda: act(1))
    pl.when(jnp.logical_not(tile.decodes))(lambda: act(most))

  def q_copy(tile: _Tile, size: int, slot):
    source = q.at[pl.ds(first_loaded(tile, size), size)]
    return pltpu.make_async_copy(source, q_tiles.at[slot, pl.ds(0, size)], q_copied.at[slot])

  def out_copy(tile: _Tile, size: int, slot):
    tokens = 1 if size == 1 else tile.stop - tile.begin
    source = out_tiles.at[slot, pl.ds(tile.begin - first_loaded(tile, size), tokens)]
    return pltpu.make_async_copy(source, out.at[pl.ds(tile.begin, tokens)], out_copied.at[slot])

  def clear_tail(tile: _Tile, number, slot) -> None:
    """Zeroes keys and values past the last key, because a weight of 0 times NaN is NaN."""
    left = tile.end - tile.first_page * page - number * chunk

    @pl.when(left < chunk)
    def _():
      for head in range(heads):
        lines = kv_chunks[slot, head].astype(jnp.int32 if kv.dtype == BYTES else jnp.float32).reshape(chunk, width)
        lines = jnp.where(lax.broadcasted_iota(jnp.int32, lines.shape, 0) < left, lines, jnp.zeros_like(lines))
        kv_chunks[slot, head] = lines.reshape(pages, page, width).astype(kv.dtype)

  def load_int8(slot, head: int, left) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a head's lines of a chunk and the scales of keys and values, f32[1, chunk].

    Scales past the last key become 0, because a weight of 0 times NaN is NaN. Args: left: keys of the chunk.
    """
    numbers, words = [], []
    for span in range(pages * spans):
      numbers += [kv_chunks[slot, span, window * heads + head] for window in range(_SPAN // _TILE)]
      tile = kv_chunks[slot, span, _SPAN // _TILE * heads + head // _HEADS, :, :_LANES]
      words.append(pltpu.bitcast(tile, jnp.int32)[head % _HEADS : head % _HEADS + 1])
    lines = jnp.concatenate(numbers, axis=0).astype(jnp.float32).astype(dtype)
    both = jnp.concatenate(words, axis=1)
    both = jnp.where(lax.broadcasted_iota(jnp.int32, both.shape, 1) < left, both, jnp.zeros_like(both))
    of_keys, of_values = both << 16, both & jnp.int32(-(1 << 16))
    return lines, lax.bitcast_convert_type(of_keys, jnp.float32), lax.bitcast_convert_type(of_values, jnp.float32)

  def attend_chunk(tile: _Tile, size: int, number, slot) -> None:
    shape = (size * group, chunk)
    position = first_loaded(tile, size) + tile.offset + lax.broadcasted_iota(jnp.int32, shape, 0) // group
    key = tile.first_page * page + number * chunk + lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = key <= position
    if sliding_window is not None:
      seen &= key > position - sliding_window
    of_tile = pl.ds(0, size * group)
    for head in range(heads):
      key_scales = value_scales = None
      if is_int8:
        left = tile.end - tile.first_page * page - number * chunk
        lines, key_scales, value_scales = load_int8(slot, head, left)
      else:
        lines = kv_chunks[slot, head].reshape(chunk, width)
      if kv.dtype == BYTES:
        lines = from_fp8(lines).astype(dtype)
      scores = lax.dot_general(
        queries[head, of_tile],
        lines[:, keys_at],
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
      )
      scores *= scale
      if key_scales is not None:
        scores *= key_scales
      if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
      scores = jnp.where(seen, scores, _MASKED)
      peak = peaks[head, of_tile]
      new_peak = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
      # Before its first visible key a query gives masked keys weight 1; that key's decay of 0 removes them.
      weights = jnp.exp(scores - new_peak[:, :1])
      decay = jnp.exp(peak - new_peak)
      peaks[head, of_tile] = new_peak
      totals[head, of_tile] = totals[head, of_tile] * decay + weights.sum(axis=1, keepdims=True)
      if value_scales is not None:
        weights *= value_scales
      accs[head, of_tile] = accs[head, of_tile] * decay[:, :1] + jnp.dot(
        weights.astype(dtype), lines[:, values_at], precision=precision, preferred_element_type=jnp.float32
      )

  def start_tile(index, slot) -> None:
    """Starts the first copies of a tile: its queries and its first chunk."""
    tile = tile_of(index)
    by_size(tile, lambda size: q_copy(tile, size, index % 2).start())
    kv_copies(tile, 0, slot, lambda copy: copy.start())

  def await_out(index) -> None:
    tile = tile_of(index)
    by_size(tile, lambda size: out_copy(tile, size, index % 2).wait())

  def begin_tile(tile: _Tile, index, size: int) -> None:
    q_copy(tile, size, index % 2).wait()
    of_tile = pl.ds(0, size * group)
    for head in range(heads):
      of_head = q_tiles[index % 2, :size, head * group : (head + 1) * group]
      queries[head, of_tile] = of_head.reshape(size * group, -1)
      peaks[head, of_tile] = jnp.full((size * group, _LANES), _MASKED, jnp.float32)
      totals[head, of_tile] = jnp.zeros((size * group, _LANES), jnp.float32)
      accs[head, of_tile] = jnp.zeros((size * group, accs.shape[2]), jnp.float32)

  def end_tile(tile: _Tile, index, size: int) -> None:
    of_tile = pl.ds(0, size * group)
    for head in range(heads):
      result = (accs[head, of_tile] / totals[head, of_tile][:, :1]).astype(out.dtype)
      out_tiles[index % 2, :size, head * group : (head + 1) * group] = result.reshape(size, group, -1)
    out_copy(tile, size, index % 2).start()

  def run_tile(index, done):
    """Processes one tile; `done` counts the chunks before it, so that chunks alternate between the two buffers."""
    tile = tile_of(index)
    pl.when(index >= 2)(lambda: await_out(index - 2))
    by_size(tile, lambda size: begin_tile(tile, index, size))

    def step(number, carry):
      slot = (done + number) % 2

      @pl.when(number + 1 < tile.chunks)
      def _():
        kv_copies(tile, number + 1, 1 - slot, lambda copy: copy.start())

      @pl.when((number + 1 == tile.chunks) & (index + 1 < count[0]))
      def _():
        start_tile(index + 1, 1 - slot)

      kv_copies(tile, number, slot, lambda copy: copy.wait())
      if not is_int8:  # whose numbers are finite
        clear_tail(tile, number, slot)
      by_size(tile, lambda size: attend_chunk(tile, size, number, slot))
      return carry

    lax.fori_loop(0, tile.chunks, step, 0)
    by_size(tile, lambda size: end_tile(tile, index, size))
    return done + tile.chunks

  pl.when(count[0] > 0)(lambda: start_tile(0, 0))
  lax.fori_loop(0, count[0], run_tile, 0)
  pl.when(count[0] > 1)(lambda: await_out(count[0] - 2))
  pl.when(count[0] > 0)(lambda: await_out(count[0] - 1))


def _tiles(query_starts: jax.Array, num_tokens: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Cuts rows into tiles of `size` queries; returns rows and first tokens, int32[I], and their number, int32[1]."""
  num_rows = query_starts.shape[0] - 1
  per_row = (query_starts[1:] - query_starts[:-1] + (size - 1)) // size
  ends = jnp.cumsum(per_row)
  # A row of n queries has at most n / size + 1 tiles, and rows with queries are at most T.
  index = jnp.arange(num_tokens // size + min(num_rows, num_tokens), dtype=jnp.int32)
  rows = jnp.minimum(jnp.sum((ends[None, :] <= index[:, None]).astype(jnp.int32), axis=1), num_rows - 1)
  return rows, query_starts[rows] + (index - (ends - per_row)[rows]) * size, ends[-1:]


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
  """See reference.ragged_paged_attention."""
  num_tokens, num_heads, head_dim = q.shape
  heads, page = _heads_and_page(kv)
  width = kv.shape[-1]
  group = num_heads // heads
  _, keys_at, values_at = _lines(head_dim)
  lanes = keys_at.stop - keys_at.start  # of a query and of an output
  size = min(max(1, _TILE_ROWS // group), num_tokens)
  pages = max(1, _CHUNK // page)
  tile = (size, num_heads, lanes)
  rows_of_tile = (heads, size * group)
  scratch = [
    pltpu.VMEM(
      (2, *((pages * kv.shape[1], *kv.shape[2:]) if kv.dtype == _INT8 else (heads, pages, page, width))), kv.dtype
    ),
    pltpu.VMEM((2, *tile), q.dtype),
    pltpu.VMEM((2, *tile), q.dtype),
    pltpu.VMEM((*rows_of_tile, lanes), q.dtype),
    pltpu.VMEM((*rows_of_tile, _LANES), jnp.float32),
    pltpu.VMEM((*rows_of_tile, _LANES), jnp.float32),
    pltpu.VMEM((*rows_of_tile, lanes), jnp.float32),
    *[pltpu.SemaphoreType.DMA((2,))] * 3,
  ]
  out = pl.pallas_call(
    functools.partial(
      _attention_kernel,
      heads=heads,
      page=page,
      group=group,
      keys_at=keys_at,
      values_at=values_at,
      scale=scale,
      sliding_window=sliding_window,
      soft_cap=soft_cap,
    ),
    out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads, lanes), q.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=6,
      in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM)],
      out_specs=pl.BlockSpec(memory_space=pl.ANY),
      scratch_shapes=scratch,
    ),
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES),
    name="ragged_paged_attention",
  )(
    *_tiles(query_starts, num_tokens, size),
    block_tables,
    kv_lens,
    query_starts,
    jnp.pad(q, ((0, 0), (0, 0), (0, lanes - head_dim))),
    pltpu.with_memory_space_constraint(kv, pltpu.HBM),
  )
  out = out[:, :, lanes - head_dim :] if lanes == head_dim else out[:, :, head_dim : 2 * head_dim]
  used = jnp.arange(num_tokens, dtype=jnp.int32) < query_starts[-1]
  return jnp.where(used[:, None, None], out, 0)
