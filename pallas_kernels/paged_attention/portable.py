"""Paged attention for any NVIDIA GPU since Ampere (Pallas Triton); it may use no feature of a single architecture.

XLA's own Triton compiles these kernels for the device at hand, with its matrix instructions and asynchronous copies.

A layer runs three kernels, none of which needs a work list of the host:

  rotate_and_write   rotary embedding, and keys and values to their slots of the donated buffer
  prefill            rows of many queries, in tiles of queries of one row (FlashAttention, arXiv:2205.14135)
  decode             rows of few queries, whose keys one thread block reads once for all heads of a group (GQA,
                     arXiv:2305.13245)

Where a step has too few rows to keep a GPU busy, `decode` splits rows over thread blocks, and a fourth kernel sums
their partial results in order (Flash-Decoding, https://pytorch.org/blog/flash-decoding).

A row's bits do not depend on its batch. A query's sums have the same terms in the same order in any tile, and a chunk
of keys that it does not see changes no bit of them. A row's own length alone decides where a rung splits it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_attention.api import PagedAttention, RaggedMeta
from pallas_kernels.paged_attention.fp8_kv import BYTES, LARGEST
from pallas_kernels.paged_attention.plan import Geometry

PREFERRED_BLOCK_SIZE = 16
_LEAST_ROWS = 16  # rows of a tensor core's operand
_BUSY_BLOCKS = 256  # thread blocks that keep any GPU busy: two for each SM of an A100 or a B200
_PART_CHUNKS = 4  # chunks of keys in a part of a split row, but for its last
_CHUNK_BYTES = 8192  # of a chunk's keys; XLA's Triton keeps a chunk of keys and one of values in shared memory
_WRITE_ELEMENTS = 2048  # of a tile of one line for each of its tokens
_MOST_SPLITS = 32
_LOG2E = math.log2(math.e)
# Below every score; finite, so that a difference of two is 0 and not NaN. It serves only as a maximum.
_FLOOR = -(2.0**100)


def kv_shape(
  num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any = None
) -> tuple[int, ...]:  # the same in any dtype
  """Returns [P, K, 2, page, H]: for each block and KV head the keys, then the values."""
  return num_blocks, num_kv_heads, 2, block_size, head_dim


def _i32(x) -> jax.Array:
  return jnp.asarray(x, jnp.int32)


def _cdiv(x, y) -> jax.Array:
  return lax.div(x + _i32(y) - 1, _i32(y))


def _round_up(x: int) -> int:
  """Returns the least power of two that is not less: the sizes of Triton's arrays."""
  return 1 << (x - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class _PortableCall:
  """The static arguments of a call.

  Attributes:
    geometry: of the rung.
    scale, soft_cap: see api.
    dtype: of queries and results.
  """

  geometry: Geometry
  scale: float
  soft_cap: float | None
  dtype: jnp.dtype

  @property
  def width(self) -> int:
    """Columns of a tile: the head size, up to the next power of two."""
    return max(_round_up(self.geometry.head_dim), 16)

  @property
  def keys(self) -> int:
    """Keys a chunk. It depends on nothing that differs between the steps of a model."""
    return max(64 // self.dtype.itemsize, min(64, _CHUNK_BYTES // (self.width * self.dtype.itemsize)))

  @property
  def prefill_warps(self) -> int:
    """Warps of a thread block of the prefill kernel: with 4, tiles of 256 columns spill registers."""
    return 8 if self.width > 128 else 4

  @property
  def decode_rows(self) -> int:
    """(Query, head of the group) pairs of a row of the decode kernel."""
    return max(_LEAST_ROWS, _round_up(self.geometry.group))

  @property
  def decode_queries(self) -> int:
    """The decode kernel takes rows of 1 to so many queries. 0: none, as an invariant step has one kernel for all."""
    return 0 if self.geometry.invariant else self.decode_rows // self.geometry.group

  @property
  def prefill_rows(self) -> int:
    """(Query, head of the group) pairs a tile of the prefill kernel; fewer of f32, which needs twice the registers."""
    most = 32 if self.dtype == jnp.float32 else 64
    needed = _round_up(self.geometry.tokens * self.geometry.group)
    return max(_LEAST_ROWS, _round_up(self.geometry.group), min(most, needed))

  @property
  def prefill_tiles(self) -> int:
    """The most tiles of a step: whole ones, one more for each row of many queries, and those of padding tokens."""
    geometry, tile = self.geometry, self.prefill_rows // self.geometry.group
    return geometry.tokens // tile + min(geometry.rows, geometry.tokens // (self.decode_queries + 1)) + 1

  @property
  def splits(self) -> int:
    """The most parts of a row of the decode kernel."""
    geometry = self.geometry
    wanted = _BUSY_BLOCKS // (geometry.rows * geometry.num_kv_heads)
    chunks = -(-geometry.table_width * geometry.block_size // self.keys)
    return max(1, min(wanted, chunks // _PART_CHUNKS, _MOST_SPLITS))

  @property
  def factor(self) -> float:
    """What scores are multiplied by, so that a weight is a power of two."""
    return self.scale * _LOG2E

  def dot(self, x, y) -> jax.Array:
    """Returns x y as f32; products of f32 are of f32, not of tf32."""
    precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)

  def columns(self) -> tuple[jax.Array, jax.Array]:
    """Returns the columns of a tile, int32[1, W], and which of them a head has."""
    columns = lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
    return columns, columns < self.geometry.head_dim

  def heads(self, head, rows: int) -> jax.Array:
    """Returns the query head of each (query, head of the group) pair of a tile, int32[rows, 1]."""
    group = _i32(self.geometry.group)
    return head * group + lax.rem(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), group)

  def tokens(self, first, rows: int) -> jax.Array:
    """Returns the token of each (query, head of the group) pair of a tile that begins at `first`, int32[rows]."""
    return first + lax.div(lax.iota(jnp.int32, rows), _i32(self.geometry.group))

  def first_seen(self, position) -> jax.Array:
    """Returns the first position that a query sees. Args: position: of the query."""
    window = self.geometry.sliding_window
    return _i32(0) if window is None else jnp.maximum(position - (window - 1), 0)

  def parts(self, low, high) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the first chunk of a row's keys, the last + 1, and the chunks a part. Args: low, high: positions."""
    begin, end = lax.div(low, _i32(self.keys)), _cdiv(high, self.keys)
    return begin, end, jnp.maximum(_cdiv(end - begin, self.splits), _PART_CHUNKS)


def _start(rows: int, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns weighted values f32[M, W], the maximum of scores and the sum of weights, f32[M], of no key."""
  return (
    jnp.zeros((rows, width), jnp.float32),
    jnp.full((rows,), _FLOOR, jnp.float32),
    jnp.zeros((rows,), jnp.float32),
  )


def _widen(x: jax.Array) -> jax.Array:
  """Returns the numbers of bytes of e4m3, uint8 -> f32, as `from_fp8` does; GPUs before 8.9 cannot convert them.

  The bits of a float16 with the same bits of exponent and mantissa make 2^-8 of the number.
  """
  bits = x.astype(jnp.int32)
  same = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
  numbers = lax.bitcast_convert_type(same.astype(jnp.int16), jnp.float16).astype(jnp.float32) * 256.0
  return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, numbers)


def _narrow(x: jax.Array) -> jax.Array:
  """Returns the bytes of e4m3, f32 -> uint8, as `to_fp8` does."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  size = lax.bitcast_convert_type(bits & 0x7FFFFFFF, jnp.float32)
  is_finite = size < jnp.inf
  size = jnp.where(size > LARGEST, LARGEST, size)
  near = lax.bitcast_convert_type(size, jnp.int32)
  normal = ((near + 0x7FFFF + ((near >> 20) & 1)) >> 20) - (120 << 3)
  small = lax.bitcast_convert_type(size + 16384.0, jnp.int32) & 0xFF  # in which the last bit is 2^-9
  rounded = jnp.where(size < 2.0**-6, small, normal)
  return (jnp.where(is_finite, rounded, 0x7F) | ((bits >> 24) & 0x80)).astype(BYTES)


def _attend(call: _PortableCall, tables, q, kv, row, head, tokens, stop, offset, low, high, begin, end):
  """Walks chunks of a row's keys with an online softmax.

  Args:
    tables, q, kv: refs.
    row, head: scalars.
    tokens: int32[M], the token of each (query, head of the group) pair.
    stop: the first token that is none of the tile's.
    offset: from token to position.
    low, high: the first position that a query sees, and the first that none does.
    begin, end: first chunk, and last chunk + 1.

  Returns:
    The weighted values f32[M, W], the maximum of scores and the sum of weights f32[M].
  """
  page, window, count, rows = call.geometry.block_size, call.geometry.sliding_window, call.keys, tokens.shape[0]
  columns, in_head = call.columns()
  mask = (tokens < stop)[:, None] & in_head
  queries = plgpu.load(q.at[tokens[:, None], call.heads(head, rows), columns], mask=mask, other=0.0)
  positions = (tokens + offset)[:, None]

  def step(chunk, carry):
    acc, peak, total = carry
    keyed = chunk * count + lax.iota(jnp.int32, count)
    used = (keyed >= low) & (keyed < high)
    # Entries of the table past a row's end, and positions past it, are never read: they may hold anything.
    entries = jnp.broadcast_to(row, (count,)), lax.div(keyed, _i32(page))
    blocks = plgpu.load(tables.at[entries], mask=used, other=0)[:, None]
    places = lax.rem(keyed, _i32(page))[:, None]

    def load(which):
      at = blocks, jnp.full((count, 1), head), jnp.full((count, 1), which, jnp.int32), places, columns
      loaded = plgpu.load(kv.at[at], mask=used[:, None] & in_head, other=0)
      return _widen(loaded).astype(call.dtype) if kv.dtype == BYTES else loaded

    scores = call.dot(queries, load(0).T) * call.factor
    if call.soft_cap is not None:
      # tanh by exp2: the tanh instruction has an error of 5e-4 of the cap.
      cap = call.soft_cap * _LOG2E
      scores = cap * (1.0 - 2.0 / (jnp.exp2(scores * (2.0 / call.soft_cap)) + 1.0))
    seen = keyed[None, :] <= positions
    if window is not None:
      seen &= keyed[None, :] > positions - window
    scores = jnp.where(seen, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max(axis=1))
    decay = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores - new_peak[:, None])
    acc = acc * decay[:, None] + call.dot(weights.astype(call.dtype), load(1))
    return acc, new_peak, total * decay + weights.sum(axis=1)

  return lax.fori_loop(begin, end, step, _start(rows, call.width))


def _store(call: _PortableCall, out, head, tokens, stop, acc, total) -> None:
  """Stores weighted values over their sum of weights; zeros for tokens that see no key."""
  columns, in_head = call.columns()
  mine = (tokens < stop)[:, None]
  result = (acc / jnp.where(total == 0.0, 1.0, total)[:, None]).astype(out.dtype)
  # The interpreter writes masked places too, with what they hold; it drops those outside of the array.
  at = jnp.where(mine, tokens[:, None], call.geometry.tokens), call.heads(head, tokens.shape[0]), columns
  plgpu.store(out.at[at], result, mask=mine & in_head)


def _prefill_kernel(call: _PortableCall, tables, lens, starts, q, kv, out):
  geometry, head = call.geometry, pl.program_id(1)
  num_rows, tile = geometry.rows, call.prefill_rows // geometry.group
  # Padding tokens are a row behind the others.
  ids = lax.iota(jnp.int32, _round_up(num_rows + 1))
  firsts = plgpu.load(starts.at[ids], mask=ids <= num_rows, other=geometry.tokens)
  lasts = plgpu.load(starts.at[ids + 1], mask=ids < num_rows, other=geometry.tokens)
  counts = lasts - firsts
  tiles = jnp.where((counts > call.decode_queries) | (ids == num_rows), _cdiv(counts, tile), 0)
  ends = jnp.cumsum(tiles)
  # The last tiles first: of one prompt they have the most keys.
  index = jnp.sum(tiles) - 1 - pl.program_id(0)

  @pl.when(index >= 0)
  def _():
    row = jnp.sum((ends <= index).astype(jnp.int32))
    number = index - jnp.sum(jnp.where(ids < row, tiles, 0))
    first, last = (jnp.sum(jnp.where(ids == row, x, 0)) for x in (firsts, lasts))
    length = plgpu.load(lens.at[row], mask=row < num_rows, other=0)
    begin = first + number * tile
    stop, offset = jnp.minimum(begin + tile, last), length - last
    tokens = call.tokens(begin, call.prefill_rows)
    low, high = call.first_seen(begin + offset), jnp.where(row < num_rows, stop + offset, 0)
    chunks = lax.div(low, _i32(call.keys)), _cdiv(high, call.keys)
    acc, _, total = _attend(call, tables, q, kv, row, head, tokens, stop, offset, low, high, *chunks)
    _store(call, out, head, tokens, stop, acc, total)


def _decode_kernel(call: _PortableCall, tables, lens, starts, q, kv, *refs):
  """See `ragged_paged_attention`. The grid is rows, KV heads and parts."""
  row, head, part = (pl.program_id(axis) for axis in range(3))
  first, last, length = starts[row], starts[row + 1], lens[row]

  @pl.when((first < last) & (last - first <= call.decode_queries))
  def _():
    tokens, offset = call.tokens(first, call.decode_rows), length - last
    low = call.first_seen(first + offset)
    begin, end, chunks = call.parts(low, length)
    begin += part * chunks
    end = jnp.minimum(begin + chunks, end)

    def run():
      return _attend(call, tables, q, kv, row, head, tokens, last, offset, low, length, begin, end)

    if call.splits == 1:
      acc, _, total = run()
      _store(call, refs[-1], head, tokens, last, acc, total)
      return

    @pl.when(begin < end)
    def _():
      parts, logs = refs
      acc, peak, total = run()
      total = jnp.maximum(total, 1.0)  # the key of the peak has weight 1; 0 if a query saw none
      columns, in_head = call.columns()
      pairs = lax.iota(jnp.int32, call.decode_rows)
      fill = functools.partial(jnp.full, (call.decode_rows,))
      plgpu.store(logs.at[fill(row), fill(head), fill(part), pairs], peak + jnp.log2(total))
      at = *(fill(index)[:, None] for index in (row, head, part)), pairs[:, None], columns
      plgpu.store(parts.at[at], acc / total[:, None], mask=jnp.broadcast_to(in_head, acc.shape))


def _combine_kernel(call: _PortableCall, lens, starts, parts, logs, _, out):
  """Sums the parts of each row and KV head, in order."""
  row, head = (pl.program_id(axis) for axis in range(2))
  first, last, length = starts[row], starts[row + 1], lens[row]

  @pl.when((first < last) & (last - first <= call.decode_queries))
  def _():
    begin, end, chunks = call.parts(call.first_seen(first + length - last), length)
    columns, in_head = call.columns()
    pairs = lax.iota(jnp.int32, call.decode_rows)
    fill = functools.partial(jnp.full, (call.decode_rows,))

    def add(part, carry):
      acc, peak, total = carry
      log = plgpu.load(logs.at[fill(row), fill(head), fill(part), pairs])
      at = *(fill(index)[:, None] for index in (row, head, part)), pairs[:, None], columns
      values = plgpu.load(parts.at[at], mask=jnp.broadcast_to(in_head, acc.shape), other=0.0)
      new_peak = jnp.maximum(peak, log)
      decay, weight = jnp.exp2(peak - new_peak), jnp.exp2(log - new_peak)
      return acc * decay[:, None] + values * weight[:, None], new_peak, total * decay + weight

    acc, _, total = lax.fori_loop(0, _cdiv(end - begin, chunks), add, _start(call.decode_rows, call.width))
    _store(call, out, head, call.tokens(first, call.decode_rows), last, acc, total)


def _write_kernel(tile: int, qkv, cos, sin, slots, _, q, kv):
  """Rotates and stores a tile of tokens of one KV head; all columns come in two halves."""
  num_tokens, _, lines, head_dim = qkv.shape
  half, group, page = head_dim // 2, lines - 2, _i32(kv.shape[3])
  head, tokens = pl.program_id(1), (pl.program_id(0) * tile + lax.iota(jnp.int32, tile))[:, None]
  columns = lax.broadcasted_iota(jnp.int32, (1, _round_up(half)), 1)
  mine = tokens < num_tokens
  mask = mine & (columns < half)
  c, s = (plgpu.load(ref.at[tokens, columns], mask=mask, other=0.0) for ref in (cos, sin))
  places = plgpu.load(slots.at[tokens], mask=mine, other=0)
  # The interpreter writes masked places too, with what they hold; it drops those outside of the array.
  blocks, places = jnp.where(mine, lax.div(places, page), kv.shape[0]), lax.rem(places, page)
  kept = jnp.where(mine, tokens, num_tokens)
  fill = functools.partial(jnp.full, (tile, 1), dtype=jnp.int32)

  def load(line):
    at = tokens, fill(head), fill(line)
    return tuple(plgpu.load(qkv.at[(*at, columns + shift)], mask=mask, other=0.0) for shift in (0, half))

  def rotate(line):
    x, y = (part.astype(jnp.float32) for part in load(line))
    return tuple(part.astype(qkv.dtype) for part in (x * c - y * s, y * c + x * s))

  def write_query(line, carry):
    for shift, part in zip((0, half), rotate(line), strict=True):
      plgpu.store(q.at[kept, fill(head * group + line), columns + shift], part, mask=mask)
    return carry

  lax.fori_loop(0, group, write_query, 0)
  for which, parts in enumerate((rotate(group), load(group + 1))):
    for shift, part in zip((0, half), parts, strict=True):
      stored = _narrow(part.astype(jnp.float32)) if kv.dtype == BYTES else part
      plgpu.store(kv.at[blocks, fill(head), fill(which), places, columns + shift], stored, mask=mask)


def rotate_and_write(
  qkv: jax.Array, cos: jax.Array, sin: jax.Array, kv: jax.Array, slot_mapping: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Rotates queries and keys, and stores keys and values.

  Args:
    qkv: [T, K, G + 2, H]; for each KV head its G query heads, its key and its value.
    cos, sin: f32[T, H / 2].
    kv: [P, K, 2, page, H] of qkv's dtype, or uint8 for fp8; updated in place if the caller's jit donates it.
    slot_mapping: int32[T], block * page + offset. If tokens share a slot, any one of them stays.
    interpret: runs on a CPU.

  Returns:
    q [T, N, H] of qkv's dtype, and the buffer.

  Raises:
    NotImplementedError: Pallas would address the buffer with offsets that overflow.
  """
  if 2**31 < kv.size <= 2**32 and kv.dtype.itemsize == 1:  # it takes offsets of 64 bits for more than 2^32 bytes
    raise NotImplementedError(
      f"paged attention (portable): {kv.size} bytes of 8-bit KV a layer are not supported; up to 2 GiB or over 4 GiB "
      "are: set --num_kv_blocks, or --kv_dtype=auto"
    )
  num_tokens, heads, lines, head_dim = qkv.shape
  tile = max(1, min(_round_up(num_tokens), _WRITE_ELEMENTS // _round_up(head_dim)))
  return pl.pallas_call(
    functools.partial(_write_kernel, tile),
    grid=(-(-num_tokens // tile), heads),
    out_shape=(
      jax.ShapeDtypeStruct((num_tokens, heads * (lines - 2), head_dim), qkv.dtype),
      jax.ShapeDtypeStruct(kv.shape, kv.dtype),
    ),
    input_output_aliases={4: 1},
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
    interpret=interpret,
    name="rotate_and_write",
  )(qkv, cos, sin, slot_mapping, kv)


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
  interpret: bool = False,
) -> jax.Array:
  """See reference.ragged_paged_attention. Args: interpret: runs on a CPU."""
  num_tokens, num_heads, head_dim = q.shape
  num_rows, table_width = block_tables.shape
  geometry = Geometry(
    *(num_tokens, num_rows, table_width, kv.shape[3], num_heads, kv.shape[1], head_dim, sliding_window, invariant)
  )
  call = _PortableCall(geometry, scale, soft_cap, jnp.dtype(q.dtype))
  result, rows = jax.ShapeDtypeStruct(q.shape, q.dtype), (block_tables, kv_lens, query_starts)

  def run(kernel, grid, out_shape, *inputs, stages=3, warps=4, aliases=None):
    return pl.pallas_call(
      functools.partial(kernel, call),
      grid=grid,
      out_shape=out_shape,
      input_output_aliases=aliases or {},
      compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
      interpret=interpret,
      name=kernel.__name__.strip("_"),
    )(*inputs)

  tiles = call.prefill_tiles, geometry.num_kv_heads
  out = run(_prefill_kernel, tiles, result, *rows, q, kv, warps=call.prefill_warps)
  if not call.decode_queries:
    return out
  grid = num_rows, geometry.num_kv_heads, call.splits
  if call.splits == 1:
    return run(_decode_kernel, grid, result, *rows, q, kv, out, aliases={5: 0})
  logs = jax.ShapeDtypeStruct((*grid, call.decode_rows), jnp.float32)
  parts = jax.ShapeDtypeStruct((*logs.shape, head_dim), jnp.float32)
  partial = run(_decode_kernel, grid, (parts, logs), *rows, q, kv)
  return run(_combine_kernel, grid[:2], result, *rows[1:], *partial, out, stages=1, aliases={4: 0})


# Jitted separately, so that a program lowers the layer and compiles its kernels once, not once a layer.
@functools.partial(jax.jit, static_argnames=("attention", "interpret"))
def attend(attention: PagedAttention, qkv, cos, sin, kv, meta: RaggedMeta, slot_mapping, interpret: bool = False):
  """See api.PagedAttention.attend. Args: interpret: runs on a CPU."""
  q, kv = rotate_and_write(qkv, cos, sin, kv, slot_mapping, interpret=interpret)
  out = ragged_paged_attention(
    *(q, kv, meta.block_tables, meta.kv_lens, meta.query_starts),
    scale=attention.scale,
    sliding_window=attention.geometry.sliding_window,
    soft_cap=attention.soft_cap,
    invariant=attention.geometry.invariant,
    interpret=interpret,
  )
  return out, kv
