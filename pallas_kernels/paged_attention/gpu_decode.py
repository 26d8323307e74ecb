"""Attention of rows with few queries on Hopper (Pallas Mosaic GPU); it may not write tokens of other rows.

A work item is one part of one row for one KV head (Flash-Decoding, split KV: https://pytorch.org/blog/flash-decoding).
A producer warpgroup copies its pages by TMA into a ring of stages. A compute warpgroup multiplies them with the row's
queries under an online softmax (FlashAttention, arXiv:2205.14135); the G heads of a group are rows of one 64-row tile
(GQA, arXiv:2305.13245). The list of parts arrives as data, see plan.py.

Pages of fp8 travel as they are. The compute warpgroup widens each tile to bf16 in shared memory before it multiplies,
because Hopper's fp8 products would need values transposed and queries and weights rounded to 4 bits.

The parts of a split row leave partial results. Each block counts the parts that it has finished, and the one that
finishes a row's last part sums all of them (as in split-K with a counter, and Stream-K's fix-up, arXiv:2301.03598).
The order of the sum is that of the parts, so no result depends on timing.

A rung that holds no more tokens than rows has no other attention kernel (`Plan.has_prefill`): this one takes its
longer rows too, 64 pairs of query and head an item, and fills padding with zeros.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import memref
import jax.numpy as jnp

from pallas_kernels.paged_attention.fp8_kv import BYTES, from_fp8
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.tuning import Tuning

_ROWS = 64  # (query, head of the group) pairs of a tile: the rows of one warpgroup's wgmma
_KEYS = 64  # keys of a tile
_COLUMNS = 64  # bf16 values in 128 bytes, the unit that TMA and wgmma swizzle
_PART_COLUMNS = 32  # columns of a partial result staged at a time, because SMEM is scarce: one tile of _TILED_F32
_LOG2E = math.log2(math.e)
# Below every score; finite, so that a difference of two is 0 and not NaN. It serves only as a maximum and is never
# multiplied (unseen keys have -inf), so fused multiply-adds do not round it.
_FLOOR = -(2.0**100)
_SWIZZLED = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
# A TMA copy from or to a tiled array must begin at a whole tile. Otherwise it copies each tile from that row on and
# then zeros, without an error.
_TILED = (plgpu.TilingTransform((8, _COLUMNS)), _SWIZZLED)  # pyright: ignore[reportAbstractUsage]
_TILED_F32 = (plgpu.TilingTransform((8, 32)), _SWIZZLED)  # pyright: ignore[reportAbstractUsage]
_WGMMA = plgpu.Layout.WGMMA
_PER_ROW = _WGMMA.reduce(1)
# Layout of 8 rows of a partial result: 2 rows a warp, 16 lanes a row, 16 bytes a lane.
_CHUNK = plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
_WIDENED_ROWS = 32  # rows that are widened from fp8 at once
# Layout of these rows: 4 rows of 64 columns a warp, 8 bytes of fp8 and so 16 bytes of bf16 a lane.
_WIDENED = plgpu.Layout.TILED(
  plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def _i32(x) -> jax.Array:
  return jnp.asarray(x, jnp.int32)


def _div(x, y: int) -> jax.Array:
  return lax.div(x, _i32(y))


def _cdiv(x, y: int) -> jax.Array:
  return _div(x + _i32(y - 1), y)


def _over_rows(x: jax.Array, columns: int, layout) -> jax.Array:
  """Broadcasts [rows] to [rows, columns]."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, (x.shape[0], columns), [0]), layout)


class _Row(NamedTuple):
  """The queries of an item and the keys that they see; scalars.

  Attributes:
    index: number of the row.
    begin, count: tokens in the packed axis.
    length: positions up to the last query, which it includes. Of padding: 0 or less.
    position: position of the first query.
  """

  index: Any
  begin: Any
  count: Any
  length: Any
  position: Any


class _Item(NamedTuple):
  """One part of the keys of a row's queries, for one KV head; scalars.

  Attributes:
    number: of the item in plan.py's `decode_items`.
    row, head: of the item.
    slot: slot of the partial result; negative if there is one part.
    low, high: positions of the part; its tiles begin at `low`.
    tiles: number of tiles.
  """

  number: Any
  row: _Row
  slot: Any
  head: Any
  low: Any
  high: Any
  tiles: Any


@dataclasses.dataclass(frozen=True)
class _Call:
  """The static arguments of a call.

  Attributes:
    plan: of the rung.
    scale, soft_cap: see api.
    tuning: see tuning.py.
    interpreted: the interpreter runs the kernel; it supports no registers as left operand of wgmma.
    is_fp8: the buffer has bytes of fp8.
  """

  plan: Plan
  scale: float
  soft_cap: float | None
  tuning: Tuning
  interpreted: bool
  is_fp8: bool

  @property
  def copies(self) -> int:
    """Copies a tile of keys: one a page, or one if the page is longer than the tile."""
    return max(1, _KEYS // self.plan.geometry.block_size)

  def row(self, index, begin, kv_lens, query_starts) -> _Row:
    """Returns the extent of an item's queries; index -1 is padding.

    Args: begin: token of the first one.
    """
    if not self.plan.has_prefill:
      is_row = index >= 0
      index = jnp.maximum(index, 0)
      end = jnp.where(is_row, query_starts[index + 1], self.plan.geometry.tokens)
      length = jnp.where(is_row, kv_lens[index], 0)
    else:
      end, length = query_starts[index + 1], kv_lens[index]
    position = length - (end - begin)
    count = jnp.minimum(end - begin, self.plan.item_queries)
    return _Row(index, begin, count, position + count, position)

  def item(self, number, items, kv_lens, query_starts) -> _Item:
    """Returns work item `number` of plan.py's `decode_items`."""
    geometry = self.plan.geometry
    row = self.row(items[number, 0], items[number, 4], kv_lens, query_starts)
    head, slot = items[number, 1], items[number, 5]
    low = items[number, 2] * geometry.block_size
    high = jnp.minimum(items[number, 3] * geometry.block_size, row.length)
    if geometry.sliding_window is not None and geometry.block_size > _KEYS:
      first_seen = jnp.maximum(row.position - (geometry.sliding_window - 1), 0)
      low = jnp.maximum(low, _div(first_seen, _KEYS) * _KEYS)  # skips the part of a page that no query sees
    # A row that is shorter than planned may leave its last part without keys, and padding has none: then one tile, in
    # which all are masked.
    return _Item(number, row, slot, head, low, high, jnp.maximum(_cdiv(high - low, _KEYS), 1))


def _count_part(counter, count_before) -> None:
  """Counts a finished part in global memory, and writes the count before it to `count_before` in shared memory.

  The count orders this part before it, and the other parts that it counts before what follows. The warpgroup has waited
  for its copies of the part, which the asynchronous proxy wrote.
  """

  def count(_, counter, count_before):
    i32 = ir.IntegerType.get_signless(32)
    mosaic.inline_ptx("fence.proxy.async;", has_side_effects=True)
    mosaic.warpgroup_barrier()
    with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
      before = mosaic.inline_ptx(
        "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;",
        mosaic.memref_ptr(counter),
        result_types=i32,
        has_side_effects=True,
      )
      memref.store(before, count_before, [])
    mosaic.warpgroup_barrier()

  inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(count)
  inlined(counter, count_before)


def _decode_kernel(call: _Call, q, kv, tables, kv_lens, query_starts, items, worker_starts, finished, *refs):
  """See `decode`. The grid is the SMs; an SM holds pairs of a compute and a producer warpgroup.

  Two pairs share a thread block: while one multiplies or finishes an item, the other's copies keep the memory busy. Two
  thread blocks would not fit an SM, because ptxas allocates the registers of `set_max_registers` at launch.

  Copies bound this kernel: at 4.8 TB/s an SM receives 64 keys and values of 128 bf16 in 1,600 cycles, and a pair
  multiplies them in about 1,000. So nothing overlaps within a pair, and a 64-row tile for a few queries costs nothing.
  """
  plan, geometry, stages = call.plan, call.plan.geometry, call.tuning.decode_stages
  group, size, page = geometry.group, geometry.head_dim, geometry.block_size
  out, *refs = refs
  if plan.max_slots:
    parts, part_sums, *refs = refs
  q_views, k_ring, v_ring, wide_tiles, staging, weight_buffers, counts_before, *barriers = refs
  q_ready, k_ready, v_ready, k_free, v_free, pairs_done = barriers

  warpgroup, pairs = lax.axis_index("warpgroup"), plan.pairs
  pair = lax.rem(warpgroup, _i32(pairs))
  # The queries, [slab of columns, row, column]: one view for TMA, which may start at any row, and one for wgmma. Both
  # have the same bytes, because 64 columns are one tile wide.
  q_lines, q_tiles, q_ready = q_views[0].at[pair], q_views[-1].at[pair], q_ready.at[pair]
  slabs = [(slab, pl.ds(slab * _COLUMNS, _COLUMNS)) for slab in range(size // _COLUMNS)]
  # A pair knows its items from the start, so its producer can run ahead across them.
  sm = lax.axis_index("sm")
  worker = pair * plan.num_sms + sm
  start = worker_starts[worker]
  num_items = worker_starts[worker + 1] - start

  def item_of(n) -> _Item:
    number = jnp.minimum(start + n, items.shape[0] - 1)  # a pair without items reads another's first one
    return call.item(number, items, kv_lens, query_starts)

  def stage_of(tile):
    return pair * stages + lax.rem(tile, _i32(stages))

  @pl.when(warpgroup < pairs)
  def _compute():
    # Two pairs with 216 and 40 registers a thread use all registers of an SM.
    plgpu.set_max_registers(216 if pairs > 1 else 240, action="increase")

    def operand(ring, which, stage, free):
      """Returns a tile of keys (`which` 0) or values (1) in bf16; frees the stage if that is a copy.

      Keys and values have a tile each, and both are written before a barrier of the warpgroup: no warp overwrites one
      that another warp is still multiplying.
      """
      if not call.is_fp8:
        return ring.at[stage]
      tile = wide_tiles[which].at[pair]

      @pl.loop(0, _KEYS // _WIDENED_ROWS)  # not unrolled, because addresses of all pieces would take too many registers
      def _(piece):
        rows = pl.ds(piece * _WIDENED_ROWS, _WIDENED_ROWS)
        for _, columns in slabs:
          loaded = plgpu.load(ring.at[stage, rows, columns], layout=_WIDENED, optimized=False)
          tile[rows, columns] = from_fp8(loaded).astype(jnp.bfloat16)

      plgpu.commit_smem()
      plgpu.barrier_arrive(free.at[stage])
      return tile

    def load_queries(item):
      """Copies only the row's own rows of the tile; the kernel discards the results of the others."""

      def load(count):
        for slab, columns in slabs:
          rows = pl.ds(item.row.begin * group, count)
          plgpu.copy_gmem_to_smem(q.at[item.head, rows, columns], q_lines.at[slab, pl.ds(0, count)], q_ready)

      if plan.item_rows == plan.part_rows:
        load(plan.part_rows)
      else:
        is_short = item.row.count <= plan.decode_queries
        pl.when(is_short)(functools.partial(load, plan.part_rows))
        pl.when(jnp.logical_not(is_short))(functools.partial(load, plan.item_rows))

    def run_item(n, carry):
      tiles_before, item, earlier = carry
      # Loads the extent of the next item long before its queries' copy needs it: three dependent loads.
      following = item_of(jnp.minimum(n + 1, num_items - 1))
      plgpu.barrier_wait(q_ready)
      if plan.decode_queries > 1:
        rows = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_PER_ROW)
        position = item.row.position + _div(rows, group)
        end = jnp.minimum(position + 1, item.high)
      else:
        position = plgpu.layout_cast(jnp.full((_ROWS,), item.row.position), _PER_ROW)
        end = plgpu.layout_cast(jnp.full((_ROWS,), item.high), _PER_ROW)

      def run_tile(i, carry):
        acc, peak, total = carry
        stage, base = stage_of(tiles_before + i), item.low + i * _KEYS
        plgpu.barrier_wait(k_ready.at[stage])
        keys_tile = operand(k_ring, 0, stage, k_free)

        def multiply_keys(ref):
          for slab, columns in slabs:
            plgpu.wgmma(ref, q_tiles.at[slab], keys_tile.at[:, columns].transpose((1, 0)))
          return ref[...]

        scores = pl.run_scoped(multiply_keys, plgpu.WGMMAAccumulatorRef((_ROWS, _KEYS), jnp.float32))
        if not call.is_fp8:
          plgpu.barrier_arrive(k_free.at[stage])

        # The last product with these queries is complete, so the next item's queries load while this item finishes. A
        # copy begins with a barrier of the warpgroup, so no warp is still multiplying.
        @pl.when((i + 1 == item.tiles) & (n + 1 < num_items))
        def _():
          load_queries(following)

        # The remaining factor and the subtraction of the peak are one instruction.
        factor = call.scale * _LOG2E
        if call.soft_cap is not None:
          # tanh by exp2: the tanh instruction has an error of 5e-4 of the cap.
          scores = 1.0 - 2.0 / (jnp.exp2(scores * (2.0 * factor / call.soft_cap)) + 1.0)
          factor = call.soft_cap * _LOG2E

        def mask(scores):
          keys = plgpu.broadcasted_iota(jnp.int32, (_ROWS, _KEYS), 1, layout=_WGMMA)
          seen = keys < _over_rows(end - base, _KEYS, _WGMMA)
          if geometry.sliding_window is not None:
            seen &= keys > _over_rows(position - geometry.sliding_window - base, _KEYS, _WGMMA)
          return jnp.where(seen, scores, -jnp.inf)

        # Masks only tiles that some query does not see whole: the first query at the end, the last at the window's
        # start.
        edge = base + _KEYS > jnp.minimum(item.row.position + 1, item.high)
        if geometry.sliding_window is not None:
          edge |= base < item.row.length - geometry.sliding_window
        scores = lax.cond(edge, mask, lambda scores: scores, scores)

        new_peak = jnp.maximum(peak, scores.max(axis=1) * factor)
        decay = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores * factor - _over_rows(new_peak, _KEYS, _WGMMA))
        total = total * decay + weights.sum(axis=1)
        acc = acc * _over_rows(decay, size, _WGMMA)
        weights = weights.astype(jnp.bfloat16)
        plgpu.barrier_wait(v_ready.at[stage])
        values_tile = operand(v_ring, 1, stage, v_free)

        @pl.when(base + _KEYS > item.high)
        def _():
          # Values past the end may be NaN, and 0 * NaN is NaN. One piece at a time, because registers are scarce here.
          keys = plgpu.broadcasted_iota(jnp.int32, (_KEYS, _COLUMNS), 0, layout=_WGMMA)
          for _, columns in slabs:
            values = values_tile.at[:, columns]
            loaded = plgpu.load(values, layout=_WGMMA)
            values[...] = jnp.where(keys < item.high - base, loaded, jnp.zeros_like(loaded))
          plgpu.commit_smem()

        acc = _add_values(call, acc, weights, values_tile, weight_buffers, pair)
        if not call.is_fp8:
          plgpu.barrier_arrive(v_free.at[stage])
        return acc, new_peak, total

      nothing = (
        plgpu.layout_cast(jnp.zeros((_ROWS, size), jnp.float32), _WGMMA),
        plgpu.layout_cast(jnp.full((_ROWS,), _FLOOR, jnp.float32), _PER_ROW),
        plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _PER_ROW),
      )
      acc, peak, total = lax.fori_loop(0, item.tiles, run_tile, nothing)
      # The key of the peak has weight 1, so this changes the sum only if no query saw a key of the split: then to 0.
      total = jnp.maximum(total, 1.0)
      acc = acc * _over_rows(1.0 / total, size, _WGMMA)
      finish_copies(earlier)  # staging of the previous item

      def write_out():
        # Not tiled like the operands: a token may have other than 8 rows, and the kernel may not write those of others.
        result = staging[0].at[pair]
        result[...] = acc.astype(jnp.bfloat16)
        plgpu.commit_smem()

        @pl.loop(0, item.row.count)
        def _(token):
          rows = pl.ds(item.head * group, group)
          plgpu.copy_smem_to_gmem(result.at[pl.ds(token * group, group)], out.at[item.row.begin + token, rows])

      def write_part():
        part, part_sum = staging[1].at[pair], staging[2].at[pair]
        part_sum[...] = peak + jnp.log2(total)
        for column in range(0, size, _PART_COLUMNS):
          columns = pl.ds(column, _PART_COLUMNS)
          if column:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          part[...] = acc[:, column : column + _PART_COLUMNS]
          plgpu.commit_smem()

          @pl.loop(0, _cdiv(item.row.count * group, 8))
          def _(chunk, columns=columns):
            rows = pl.ds(chunk * 8, 8)
            plgpu.copy_smem_to_gmem(part.at[rows], parts.at[item.slot, rows, columns])

        plgpu.copy_smem_to_gmem(part_sum, part_sums.at[item.slot])

      if not plan.max_slots:
        write_out()
      else:
        pl.when(item.slot < 0)(write_out)
        pl.when(item.slot >= 0)(write_part)
      return tiles_before + item.tiles, following, item

    def finish_copies(item):
      """Waits until the staging of an item is free. Counts its part, whose copies have ended during the next item."""
      if not plan.max_slots or call.interpreted:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return
      plgpu.wait_smem_to_gmem(0)
      pl.when(item.slot >= 0)(functools.partial(finish_part, item))
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def finish_part(item):
      """Counts a part whose copies have ended, and sums the row's parts if it is the last one."""
      count = items[item.number, 7]
      counter = finished.at[item.head, item.row.begin]
      if call.interpreted:
        before = counter[...]
        counter[...] = before + 1
      else:
        _count_part(counter, counts_before.at[pair])
        before = counts_before[pair]

      @pl.when(before + 1 == count)
      def _():
        _sum_parts(call, item, items[item.number, 6], count, parts, part_sums, out, staging[0].at[pair])

    # The loop is not under `pl.when`: there the fp8 kernel spills registers.
    first = item_of(_i32(0))
    pl.when(num_items > 0)(functools.partial(load_queries, first))
    nothing = first._replace(slot=_i32(-1))
    _, _, last = lax.fori_loop(0, num_items, run_item, (_i32(0), first, nothing))
    finish_copies(last)

    plgpu.wait_smem_to_gmem(0)
    if call.interpreted and plan.max_slots:
      # The interpreter has no atomic addition. So one warpgroup counts all parts of the block, when all have ended.
      plgpu.barrier_arrive(pairs_done)

      @pl.when(pair == 0)
      def _():
        plgpu.barrier_wait(pairs_done)

        for other in range(pairs):

          @pl.loop(worker_starts[other * plan.num_sms + sm], worker_starts[other * plan.num_sms + sm + 1])
          def _(n):
            item = call.item(n, items, kv_lens, query_starts)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # staging of the item before
            pl.when(item.slot >= 0)(functools.partial(finish_part, item))

        plgpu.wait_smem_to_gmem(0)

  @pl.when(warpgroup >= pairs)
  def _produce():
    plgpu.set_max_registers(40, action="decrease")
    rows = min(page, _KEYS)

    def run_item(n, tiles_before):
      item = item_of(n)
      last_block = _div(item.high - 1, page)

      def run_tile(i, _):
        tile, base = tiles_before + i, item.low + i * _KEYS
        stage, at = stage_of(tile), lax.rem(base, _i32(page))
        # Loads the page id before the wait, which hides its latency. A partial tile copies its last page several times,
        # so that every tile has the same number of copies.
        blocks = [
          tables[item.row.index, jnp.minimum(_div(base, page) + piece, last_block)] for piece in range(call.copies)
        ]
        for which, ring, ready, free in ((0, k_ring, k_ready, k_free), (1, v_ring, v_ready, v_free)):
          pl.when(tile >= stages)(functools.partial(plgpu.barrier_wait, free.at[stage]))
          for piece, block in enumerate(blocks):
            source = (
              kv.at[block, item.head, which] if page <= _KEYS else kv.at[block, item.head, which, pl.ds(at, rows)]
            )
            plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(piece * rows, rows)], ready.at[stage])

      lax.fori_loop(0, item.tiles, run_tile, None)
      return tiles_before + item.tiles

    tiles = lax.fori_loop(0, num_items, run_item, _i32(0))

    # Waits for every arrival, as the interpreter requires; this costs nothing.
    @pl.loop(jnp.maximum(tiles - stages, 0), tiles)
    def _(tile):
      plgpu.barrier_wait(k_free.at[stage_of(tile)])
      plgpu.barrier_wait(v_free.at[stage_of(tile)])


def _add_values(call: _Call, acc, weights, values, weight_buffers, pair) -> Any:
  """Returns acc + weights @ values. Weights stay in registers; the interpreter needs them in SMEM."""
  if not call.interpreted:
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.WGMMAAccumulatorRef.init(acc))
  buffer = weight_buffers[0].at[pair]
  buffer[...] = weights
  plgpu.commit_smem()

  def multiply(ref):
    plgpu.wgmma(ref, buffer, values)
    return ref[...]

  return acc + pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))


def _sum_parts(call: _Call, item: _Item, first_slot, count, parts, part_sums, out, staging) -> None:
  """Sums the partial results of an item's row for its KV head, in order, and starts the copies of the result."""
  group, size, row, head = call.plan.geometry.group, call.plan.geometry.head_dim, item.row, item.head
  at_once = min(4, call.plan.max_parts)  # loads in flight

  @pl.loop(0, _cdiv(row.count * group, 8))
  def _(chunk):
    rows = pl.ds(chunk * 8, 8)

    def add(i, carry):
      loaded = []
      for j in range(at_once):
        number = i * at_once + j
        slot = first_slot + jnp.minimum(number, count - 1)
        part_sum = plgpu.load(part_sums.at[slot, rows], layout=_CHUNK.reduce(1), optimized=False)
        part = plgpu.load(parts.at[slot, rows], layout=_CHUNK, optimized=False)
        loaded.append((jnp.where(number < count, part_sum, _FLOOR), part))
      acc, peak, total = carry
      for part_sum, part in loaded:
        new_peak = jnp.maximum(peak, part_sum)
        decay, weight = jnp.exp2(peak - new_peak), jnp.exp2(part_sum - new_peak)
        acc = acc * _over_rows(decay, size, _CHUNK) + part * _over_rows(weight, size, _CHUNK)
        total = total * decay + weight
        peak = new_peak
      return acc, peak, total

    nothing = (
      plgpu.layout_cast(jnp.zeros((8, size), jnp.float32), _CHUNK),
      plgpu.layout_cast(jnp.full((8,), _FLOOR, jnp.float32), _CHUNK.reduce(1)),
      plgpu.layout_cast(jnp.zeros((8,), jnp.float32), _CHUNK.reduce(1)),
    )
    acc, _, total = lax.fori_loop(0, _cdiv(count, at_once), add, nothing)
    staging[rows] = (acc / _over_rows(total, size, _CHUNK)).astype(jnp.bfloat16)

  plgpu.commit_smem()

  @pl.loop(0, row.count)
  def _(token):
    rows = pl.ds(head * group, group)
    plgpu.copy_smem_to_gmem(staging.at[pl.ds(token * group, group)], out.at[row.begin + token, rows])


def decode(
  q: jax.Array,
  kv: jax.Array,
  block_tables: jax.Array,
  kv_lens: jax.Array,
  query_starts: jax.Array,
  pieces: dict[str, jax.Array],
  finished: jax.Array,
  out: jax.Array | None,
  *,
  plan: Plan,
  scale: float,
  soft_cap: float | None,
  tuning: Tuning,
  interpret: Any = None,
) -> jax.Array:
  """Computes attention of the rows of 1 to `plan.decode_queries` queries, or of all rows if the plan has no prefill.

  Args:
    q: bf16[K, T*G, H]; row t*G + g of KV head k is query head k*G + g of token t.
    kv: bf16[P, K, 2, page, H]: keys, values; or uint8 for fp8 (fp8_kv.py).
    block_tables, kv_lens, query_starts: see api.RaggedMeta.
    pieces: result of `plan.split`.
    finished: int32[K, T or more], zeros: the parts finished of a KV head and of a row, at the row's first token.
    out: bf16[T, N, H]; written in place if the caller's jit has no other use for it. None if the plan has no prefill.
    plan, scale, soft_cap: see api; the scale is positive.
    tuning: see tuning.py.
    interpret: None, or plgpu.InterpretGPUParams to run on a CPU.

  Returns:
    `out` with the tokens of those rows written and all others unchanged; without `out`, zeros at padding.
  """
  geometry = plan.geometry
  call = _Call(plan, scale, soft_cap, tuning, interpret is not None, kv.dtype == BYTES)
  split, size = plan.max_slots > 0, geometry.head_dim
  pairs, stages = plan.pairs, plan.pairs * tuning.decode_stages
  smem = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16)
  staging, parts = [smem((pairs, _ROWS, size))], []
  if split:
    staging.append(plgpu.SMEM((pairs, _ROWS, _PART_COLUMNS), jnp.float32, transforms=_TILED_F32))
    staging.append(plgpu.SMEM((pairs, _ROWS), jnp.float32))
    parts = [
      jax.ShapeDtypeStruct((plan.max_slots, plan.part_rows, size), jnp.float32),
      jax.ShapeDtypeStruct((plan.max_slots, _ROWS), jnp.float32),  # log2 of the sums of weights
    ]
  q_shape = pairs, size // _COLUMNS, _ROWS, _COLUMNS
  q_views = [smem(q_shape, transforms=_TILED)]  # the only one the interpreter needs: it tiles nothing, has no unions
  if interpret is None:
    q_views = plgpu.RefUnion(smem(q_shape, transforms=(_SWIZZLED,)), *q_views)
  outputs = [] if out is None else [jax.new_ref(out)]
  new = [jax.ShapeDtypeStruct((geometry.tokens, geometry.num_heads, size), q.dtype)] if out is None else []
  results = plgpu.kernel(
    functools.partial(_decode_kernel, call),
    out_type=(*new, *parts),
    grid=(plan.num_sms,),
    grid_names=("sm",),
    num_threads=2 * pairs,
    thread_name="warpgroup",
    scratch_types=[
      q_views,
      *[plgpu.SMEM((stages, _KEYS, size), BYTES) if call.is_fp8 else smem((stages, _KEYS, size), transforms=_TILED)]
      * 2,
      [smem((pairs, _KEYS, size), transforms=_TILED)] * 2 if call.is_fp8 else [],
      staging,
      [smem((pairs, _ROWS, _KEYS), transforms=_TILED)] if call.interpreted else [],
      plgpu.SMEM((pairs,), jnp.int32),
      plgpu.Barrier(num_barriers=pairs, num_arrivals=size // _COLUMNS),
      plgpu.Barrier(num_barriers=stages, num_arrivals=call.copies),
      plgpu.Barrier(num_barriers=stages, num_arrivals=call.copies),
      plgpu.Barrier(num_barriers=stages),
      plgpu.Barrier(num_barriers=stages),
      plgpu.Barrier(num_arrivals=pairs) if call.interpreted and split else None,
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
  )(
    *(q, kv, block_tables, kv_lens, query_starts),
    *(pieces["decode_items"], pieces["worker_starts"], jax.new_ref(finished), *outputs),
  )
  return results[0] if out is None else jax.freeze(outputs[0])
