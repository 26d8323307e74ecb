"""Attention of rows of many queries over their pages, for Hopper; it may not write tokens of other rows.

A thread block is an SM's, and takes one item of the plan after the other. An item and a KV head are 128 packed rows,
that is (query, head of the group) pairs. One warpgroup copies pages into a ring of tiles; two
others compute 64 packed rows each as in FlashAttention-3 (arXiv:2407.08608). The product for a tile's scores runs along
with the product for the previous tile's values, the softmax overlaps the latter, and the two warpgroups take turns at
the tensor core. Pages of fp8 go into a ring of their own, from which the copying warpgroup widens them into the tiles.

The copying warpgroup runs ahead across items: it brings the next item's queries and its first tiles while the others
compute, and stores an item's result while they compute the next one.

A row's result depends only on its own queries, pages and length: tiles of keys lie at fixed positions, and a row's
items start at its first query. So its bits are the same in every batch.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_attention.fp8_kv import BYTES, from_fp8
from pallas_kernels.paged_attention.plan import ROWS_PER_TILE, Plan
from pallas_kernels.paged_attention.tuning import Tuning

_HALF = ROWS_PER_TILE // 2  # packed rows of a compute warpgroup
_LANES = 64  # bf16 values in 128 bytes, the unit that TMA and wgmma swizzle
# The score of an unseen key. Finite, so that a tile without visible keys gives no NaN; the first visible key resets its
# contribution, because exp2 of about -1e29 is 0. A power of two, so that its product with any factor is exact and its
# difference from the row's maximum is 0 even in a fused multiply-add.
_MASKED = -(2.0**100)
_MOST_SHARED = 227 * 1024  # bytes of shared memory of a thread block
_BARRIER_BYTES = 1024  # more than all barriers take, and what aligns the arrays
_WIDENED_ROWS = 16  # rows that are widened from fp8 at once: the copying warpgroup has few registers
# Layout of these rows: 4 rows of 64 columns a warp, 8 bytes of fp8 and so 16 bytes of bf16 a lane.
_WIDENED = plgpu.Layout.TILED(
  plgpu.Tiling(((_WIDENED_ROWS, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


class _PrefillItem(NamedTuple):
  """An item of the plan and a KV head, as scalars of the device; see `prefill`.

  Attributes:
    is_row: False: padding, which has no queries, no tiles and zeros as its result.
    row, head: of block_tables and kv.
    token, count: first token and number of tokens.
    kv_len: of the row.
    position: of the first query.
    lowest: first key that a query sees.
    first, end: tiles of keys.
  """

  is_row: jax.Array
  row: jax.Array
  head: jax.Array
  token: jax.Array
  count: jax.Array
  kv_len: jax.Array
  position: jax.Array
  lowest: jax.Array
  first: jax.Array
  end: jax.Array


def _tanh(x: jax.Array) -> jax.Array:
  """Computes tanh by exp2 to f32 rounding; the tanh instruction has an error of 2^-11, or 2.4 % at a cap of 50."""
  root = lax.rsqrt(1.0 + jnp.exp2((2 * math.log2(math.e)) * x))
  return 1.0 - 2.0 * root * root


def prefill(
  q: jax.Array,
  kv: jax.Array,
  block_tables: jax.Array,
  kv_lens: jax.Array,
  query_starts: jax.Array,
  pieces: dict[str, jax.Array],
  *,
  plan: Plan,
  scale: float,
  soft_cap: float | None,
  tuning: Tuning,
  interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
  """Computes causal attention of the plan's prefill items.

  Args:
    q: bf16[K, T * G, H], row t * G + g of head k is query head k * G + g of token t. Rows of padding may hold anything.
    kv: bf16[P, K, 2, page, H], or uint8 for fp8 (fp8_kv.py): keys and values; slots past a row's length may hold NaN.
    block_tables, kv_lens, query_starts: see api.RaggedMeta.
    pieces: result of `plan.split`.
    plan: of the rung.
    scale, soft_cap: see api.PagedAttention; scale is above 0.
    tuning: prefill_stages, prefill_tile_keys and lowering.
    interpret: plgpu.InterpretGPUParams to run on a CPU; None compiles for the GPU.

  Returns:
    bf16[T, N, H] with the tokens of the prefilled rows and zeros at padding; other tokens are undefined.
  """
  geometry = plan.geometry
  group, head_dim, page = geometry.group, geometry.head_dim, geometry.block_size
  sliding_window = geometry.sliding_window
  keys, stages = tuning.prefill_tile_keys, tuning.prefill_stages
  num_blocks, num_kv_heads = kv.shape[:2]
  chunk = min(page, keys)  # keys a copy: a page, or a tile of a larger page
  chunks = keys // chunk
  slabs = [(slab, pl.ds(slab * _LANES, _LANES)) for slab in range(head_dim // _LANES)]
  # The softmax takes 2 to the power of score * factor.
  factor = math.log2(math.e) * (scale if soft_cap is None else soft_cap)
  f32, dtype, per_row, per_score = jnp.float32, q.dtype, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
  is_fp8 = kv.dtype == BYTES
  ring_bytes = 2 * stages * keys * head_dim * (dtype.itemsize + is_fp8)
  query_bytes = ROWS_PER_TILE * head_dim * dtype.itemsize
  # Two tiles of queries, unless the rings leave memory for one.
  query_tiles = 2 if ring_bytes + 2 * query_bytes + _BARRIER_BYTES <= _MOST_SHARED else 1

  def body(
    q_g, kv_g, tables_g, lens_g, starts_g, count_g, items_g, out_g, tile_refs, k_s, v_s, p_s, narrow,
    *barriers,
  ):  # fmt: skip
    # Tiles of queries and finally of the output, [tile, slab, packed row, 64]. `all_lines` and `all_tiles` are two
    # views of the same bytes. TMA needs the first: it can copy an array in tiles of 8 rows only from multiples of 8
    # rows (Lane lowering compiles others to wrong addresses, Warpgroup lowering rejects them).
    all_lines, all_tiles = tile_refs if interpret is None else (tile_refs[0], tile_refs[0])
    all_q_full, k_full, v_full, k_free, v_free, turn, tail_full, all_out_full = barriers
    sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
    # SMs take items and KV heads back and forth: round n goes from the first SM to the last or, if n is odd, back.
    rounds, left = lax.div(count_g[0] * num_kv_heads, plan.num_sms), lax.rem(count_g[0] * num_kv_heads, plan.num_sms)

    def turn_in(n):
      return jnp.where(lax.rem(n, 2) == 0, sm, plan.num_sms - 1 - sm)

    num_items = rounds + (turn_in(rounds) < left).astype(jnp.int32)

    def read_item(n) -> _PrefillItem:
      """Returns the SM's n-th item; each warpgroup reads it itself, which saves registers."""
      number = n * plan.num_sms + turn_in(n)
      index, head = lax.div(number, num_kv_heads), lax.rem(number, num_kv_heads)
      row, token = items_g[index, 0], items_g[index, 1]
      is_row = row >= 0
      of_row = jnp.maximum(row, 0)
      row_end, kv_len = starts_g[of_row + 1], lens_g[of_row]
      count = jnp.minimum(jnp.where(is_row, row_end, geometry.tokens) - token, plan.tile_tokens)
      position = kv_len - row_end + token
      lowest = jnp.int32(0) if sliding_window is None else jnp.maximum(position - (sliding_window - 1), 0)
      first = lax.div(lowest, keys)
      end = jnp.where(is_row, lax.div(position + (count - 1), keys) + 1, first)
      return _PrefillItem(is_row, of_row, head, token, count, kv_len, position, lowest, first, end)

    def slot_of(number):
      return lax.rem(number, stages)

    def query_slot_of(n):
      return lax.rem(n, query_tiles)

    def bring(n, tiles_before):
      """Brings an item's queries and, in turns, tiles of keys and of values into the ring; returns all tiles so far.

      Stores the result of the item before.
      """
      item = read_item(n)
      row, head, kv_len, lowest, first, end = item.row, item.head, item.kv_len, item.lowest, item.first, item.end
      query_slot = query_slot_of(n)
      lines, q_full = all_lines.at[query_slot], all_q_full.at[query_slot]

      def find_sources(i):
        """Returns first row in the tile, block, and first row in the block of each copy of tile i."""
        # Reads blocks without a visible key from past the pool's end, for which TMA fills in zeros.
        sources = []
        for start in range(0, keys, chunk):
          key = i * keys + start
          index = lax.div(key, page)
          exists = index * page < kv_len
          if sliding_window is not None:
            exists &= (index + 1) * page > lowest
          block = tables_g[row, jnp.minimum(index, geometry.table_width - 1)]
          sources.append((start, jnp.where(exists, block, num_blocks), key - index * page))
        return sources

      def copy(sources, slot, which, ring, full):
        for start, block, offset in sources:
          page_g = kv_g.at[block, head, which]
          if chunk < page:
            page_g = kv_g.at[block, head, which, pl.ds(offset, chunk)]
          plgpu.copy_gmem_to_smem(page_g, ring.at[slot, pl.ds(start, chunk)], full)

      def clear_tail(slot, held):
        """Clears values past the end: their weight is 0, and 0 * NaN is NaN. The mask suffices for keys."""
        for start in range(0, keys, _HALF):

          @pl.when(held < start + _HALF)
          def _(start=start):
            exists = plgpu.broadcasted_iota(jnp.int32, (_HALF, _LANES), 0, layout=per_score) < held - start
            for _, lanes in slabs:
              values = v_s.at[slot, pl.ds(start, _HALF), lanes]
              loaded = plgpu.load(values, layout=per_score)
              values[...] = jnp.where(exists, loaded, jnp.zeros_like(loaded))

        plgpu.commit_smem()

      def fetch(i):
        """Starts the copies of tile i of fp8."""
        k_bytes, v_bytes, k_fetched, v_fetched = narrow
        sources, slot = find_sources(i), slot_of(tiles_before + i - first)
        copy(sources, slot, 0, k_bytes, k_fetched.at[slot])
        copy(sources, slot, 1, v_bytes, v_fetched.at[slot])

      def widen(slot, bytes_ring, fetched, ring):
        plgpu.barrier_wait(fetched.at[slot])
        for start in range(0, keys, _WIDENED_ROWS):
          for _, lanes in slabs:
            piece = slot, pl.ds(start, _WIDENED_ROWS), lanes
            loaded = plgpu.load(bytes_ring.at[piece], layout=_WIDENED, optimized=False)
            ring[piece] = from_fp8(loaded).astype(dtype)
        plgpu.commit_smem()

      if is_fp8:
        pl.loop(first, jnp.minimum(first + stages, end))(fetch)

      def finish_before():
        pl.when(n > 0)(functools.partial(store, n - 1))

      if query_tiles == 1:
        finish_before()
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last result from this tile

      @pl.when(item.is_row)
      def _():
        for slab, lanes in slabs:
          plgpu.copy_gmem_to_smem(q_g.at[head, pl.ds(item.token * group, ROWS_PER_TILE), lanes], lines.at[slab], q_full)

      @pl.when(jnp.logical_not(item.is_row))
      def _():
        for _ in slabs:
          plgpu.barrier_arrive(q_full)

      @pl.loop(first, end)
      def _(i):
        number = tiles_before + i - first
        slot, reused = slot_of(number), number >= stages
        held = kv_len - i * keys  # keys from the tile's first to the row's end
        cut = (held < keys) & (lax.rem(held, page) != 0)  # the row ends inside a block of this tile
        sources = [] if is_fp8 else find_sources(i)

        @pl.when(reused)
        def _():
          plgpu.barrier_wait(k_free.at[slot])

        if is_fp8:
          widen(slot, narrow[0], narrow[2], k_s)
          plgpu.barrier_arrive(k_full.at[slot])
        else:
          copy(sources, slot, 0, k_s, k_full.at[slot])

        @pl.when(reused)
        def _():
          plgpu.barrier_wait(v_free.at[slot])

        if is_fp8:
          widen(slot, narrow[1], narrow[3], v_s)

          @pl.when(cut)
          def _():
            clear_tail(slot, held)

          plgpu.barrier_arrive(v_full.at[slot])

          @pl.when(i + stages < end)
          def _():
            fetch(i + stages)

        else:

          @pl.when(jnp.logical_not(cut))
          def _():
            copy(sources, slot, 1, v_s, v_full.at[slot])

          @pl.when(cut)
          def _():
            # The values arrive at a separate barrier, and at the usual one once clean, so that no warpgroup reads the
            # tile earlier.
            copy(sources, slot, 1, v_s, tail_full)
            plgpu.barrier_wait(tail_full)
            clear_tail(slot, held)
            for _ in sources:
              plgpu.barrier_arrive(v_full.at[slot])

      if query_tiles > 1:
        finish_before()
      return tiles_before + (end - first)

    def store(n):
      """Starts to copy the result of item n out, in runs of powers of two tokens, and touches no other token."""
      item, query_slot = read_item(n), query_slot_of(n)
      token, count, lines = item.token, item.count, all_lines.at[query_slot]
      heads = pl.ds(item.head * group, group)
      plgpu.barrier_wait(all_out_full.at[query_slot])
      for bit in reversed(range(plan.tile_tokens.bit_length())):
        run = 1 << bit

        @pl.when((count & run) != 0)
        def _(run=run):
          done = count & ~(2 * run - 1)
          for slab, lanes in slabs:
            if interpret is None:
              source = lines.at[slab, pl.ds(done * group, run * group)].reshape(run, group, _LANES)
              plgpu.copy_smem_to_gmem(source, out_g.at[pl.ds(token + done, run), heads, lanes])
            else:  # the interpreter supports no reshaped source

              @pl.loop(0, run)
              def _(t, slab=slab, lanes=lanes):
                source = lines.at[slab, pl.ds((done + t) * group, group)]
                plgpu.copy_smem_to_gmem(source, out_g.at[token + done + t, heads, lanes])

    def compute(n, tiles_before):
      """Attends for 64 packed rows and writes the result over the queries; returns the number of all tiles so far."""
      item, query_slot = read_item(n), query_slot_of(n)
      tile, rows = all_tiles.at[query_slot], pl.ds(wg * _HALF, _HALF)
      # Behind a barrier, or their inputs would occupy registers through the loops.
      position, tiles = lax.optimization_barrier((item.position - item.first * keys, item.end - item.first))
      plgpu.barrier_wait(all_q_full.at[query_slot])

      @pl.when(item.is_row)
      def _():
        out = attend(tile, rows, position, tiles, tiles_before).astype(dtype)
        for slab, lanes in slabs:
          tile[slab, rows] = out[:, lanes.start : lanes.start + _LANES]

      @pl.when(jnp.logical_not(item.is_row))
      def _():
        for slab, _ in slabs:
          tile[slab, rows] = plgpu.layout_cast(jnp.zeros((_HALF, _LANES), dtype), per_score)

      plgpu.commit_smem()
      plgpu.barrier_arrive(all_out_full.at[query_slot])
      return tiles_before + tiles

    def multiply_keys(scores_acc, tile, rows, slot):
      for slab, lanes in slabs:
        plgpu.wgmma(scores_acc, tile.at[slab, rows], k_s.at[slot, :, lanes].transpose((1, 0)))

    def multiply_values(out_acc, weights, slot):
      if interpret is None:
        plgpu.wgmma(out_acc, weights, v_s.at[slot])
      else:  # the interpreter supports no operand in registers
        p_s[wg] = weights
        plgpu.commit_smem()
        plgpu.wgmma(out_acc, p_s.at[wg], v_s.at[slot])

    def accumulate(f, out, like):
      """Calls f(accumulator of scores, accumulator that holds `out`).

      Returns:
        The second accumulator's value, and the tuple that f returns, with the shapes of `like`.
      """
      if interpret is not None:  # an accumulator starts at zero there
        types = plgpu.WGMMAAccumulatorRef((_HALF, keys), f32), plgpu.WGMMAAccumulatorRef(out.shape, f32)

        def from_zero(scores_acc, out_acc):
          results = f(scores_acc, out_acc)
          return out + out_acc[...], results

        return pl.run_scoped(from_zero, *types)

      def in_place(refs):
        scores_acc, out_acc, result_refs = refs
        for ref, result in zip(result_refs, f(scores_acc, out_acc), strict=True):
          ref[...] = result

      zeros = plgpu.layout_cast(jnp.zeros((_HALF, keys), f32), per_score)
      # The scores go first. All operations that make an accumulator must precede the fence of another, or ptxas
      # serializes the products.
      start = plgpu.WGMMAAccumulatorRef.init
      run: Any = pl.run_state(in_place)  # a program over references; its type annotation knows only arrays
      _, out, results = run((start(zeros), start(out), like))
      return out, results

    def attend(tile, rows, position, tiles, tiles_before):
      """Returns f32[64, H]: attention of the warpgroup's packed rows over `tiles` tiles of keys, at least one.

      `position` is the item's first query, counted from the first key of the first tile. `tiles_before` were in the
      ring before the first.
      """

      def softmax(scores, i, peak, total, masked):
        """Returns the weights of tile i's keys, the factor for older sums, and the new maximum and sum."""
        if soft_cap is not None:
          scores = _tanh(scores * (scale / soft_cap))
        if masked:
          packed = plgpu.broadcasted_iota(jnp.int32, (_HALF,), 0, layout=per_row) + wg * _HALF
          edge = lax.broadcast_in_dim(lax.div(packed, group) + (position - i * keys), scores.shape, [0])
          key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=per_score)
          seen = key <= edge
          if sliding_window is not None:
            seen &= key > edge - sliding_window
          scores = jnp.where(seen, scores, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=1) * factor)
        decay = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
        # The barrier keeps the softmax before the wait that follows.
        return lax.optimization_barrier((weights, decay, new_peak, total * decay + weights.sum(axis=1)))

      def operand(weights):
        # Rounds only now, because the product that just finished was reading the registers of the last operand. Without
        # the barriers, LLVM would round before the wait or carry f32 through the loop.
        return lax.optimization_barrier(lax.optimization_barrier(weights).astype(dtype))

      def first_scores(scores_acc):
        multiply_keys(scores_acc, tile, rows, slot_of(tiles_before))
        plgpu.barrier_arrive(turn.at[1 - wg])
        return scores_acc[...]

      def step(i, carry, masked):
        """Computes the scores of tile i and adds the values of tile i - 1."""
        out, weights, peak, total = carry
        slot, before = slot_of(tiles_before + i), slot_of(tiles_before + i - 1)
        plgpu.barrier_wait(k_full.at[slot])
        plgpu.barrier_wait(v_full.at[before])
        plgpu.barrier_wait(turn.at[wg])

        def products(scores_acc, out_acc):
          multiply_keys(scores_acc, tile, rows, slot)
          multiply_values(out_acc, weights, before)
          plgpu.barrier_arrive(turn.at[1 - wg])
          scores = plgpu.wgmma_accumulator_load(scores_acc, wait_n=1)
          plgpu.barrier_arrive(k_free.at[slot])
          return softmax(scores, i, peak, total, masked)

        any_weights = plgpu.layout_cast(jnp.zeros((_HALF, keys), f32), per_score)
        out, (new_weights, decay, peak, total) = accumulate(products, out, (any_weights, peak, peak, total))
        plgpu.barrier_arrive(v_free.at[before])
        return out * lax.broadcast_in_dim(decay, out.shape, [0]), operand(new_weights), peak, total

      peak = plgpu.layout_cast(jnp.full((_HALF,), _MASKED, f32), per_row)
      total = plgpu.layout_cast(jnp.zeros((_HALF,), f32), per_row)
      out = plgpu.layout_cast(jnp.zeros((_HALF, head_dim), f32), per_score)
      plgpu.barrier_wait(k_full.at[slot_of(tiles_before)])

      @pl.when(wg == 1)
      def _():
        plgpu.barrier_wait(turn.at[1])

      scores = pl.run_scoped(first_scores, plgpu.WGMMAAccumulatorRef((_HALF, keys), f32))
      plgpu.barrier_arrive(k_free.at[slot_of(tiles_before)])
      weights, _, peak, total = softmax(scores, jnp.int32(0), peak, total, masked=True)
      carry = out, operand(weights), peak, total

      # Masked tiles at the window's start, then tiles that all queries see whole, then tiles at the causal edge.
      at = jnp.int32(1)
      if sliding_window is not None:
        last_position = position + lax.div(wg * _HALF + (_HALF - 1), group)
        in_window = lax.div(jnp.maximum(last_position - (sliding_window - 1), 0) + (keys - 1), keys)
        begin_whole = jnp.clip(in_window, at, tiles)
        carry = lax.fori_loop(at, begin_whole, lambda i, carry: step(i, carry, masked=True), carry)
        at = begin_whole
      below_edge = lax.div(position + lax.div(wg * _HALF, group) + 1, keys)
      end_whole = jnp.clip(below_edge, at, tiles)
      carry = lax.fori_loop(at, end_whole, lambda i, carry: step(i, carry, masked=False), carry)
      carry = lax.fori_loop(end_whole, tiles, lambda i, carry: step(i, carry, masked=True), carry)

      out, weights, _, total = carry
      slot = slot_of(tiles_before + tiles - 1)
      plgpu.barrier_wait(v_full.at[slot])

      @pl.when(wg == 0)
      def _():
        plgpu.barrier_wait(turn.at[0])  # for the other warpgroup's last step: as many waits as arrivals

      def last_values(_, out_acc):
        multiply_values(out_acc, weights, slot)
        return ()

      out, _ = accumulate(last_values, out, ())
      plgpu.barrier_arrive(v_free.at[slot])
      return out * lax.broadcast_in_dim(1.0 / total, out.shape, [0])

    @pl.when(wg < 2)
    def _():
      plgpu.set_max_registers(232, action="increase")
      lax.fori_loop(0, num_items, compute, jnp.int32(0))

    @pl.when(wg == 2)
    def _():
      plgpu.set_max_registers(40, action="decrease")
      tiles = lax.fori_loop(0, num_items, bring, jnp.int32(0))

      @pl.when(num_items > 0)
      def _():
        store(num_items - 1)

      @pl.loop(jnp.maximum(tiles - stages, 0), tiles)
      def _(number):  # no warp may leave while others still arrive at a barrier
        plgpu.barrier_wait(k_free.at[slot_of(number)])
        plgpu.barrier_wait(v_free.at[slot_of(number)])

      plgpu.wait_smem_to_gmem(0)

  swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
  tiled = (plgpu.TilingTransform((8, _LANES)), swizzle)  # pyright: ignore[reportAbstractUsage]
  tile_shape = (query_tiles, len(slabs), ROWS_PER_TILE, _LANES)
  tile_types = [plgpu.SMEM(tile_shape, dtype, transforms=tiled)]
  if interpret is None:
    tile_types = plgpu.RefUnion(plgpu.SMEM(tile_shape, dtype, transforms=(swizzle,)), *tile_types)
  narrow_types = []
  if is_fp8:
    narrow_types += [plgpu.SMEM((stages, keys, head_dim), BYTES)] * 2
    narrow_types += [plgpu.Barrier(num_arrivals=chunks, num_barriers=stages)] * 2
  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((geometry.tokens, geometry.num_heads, head_dim), dtype),
    grid=(plan.num_sms,),
    grid_names=("sm",),
    num_threads=3,
    thread_name="wg",
    scratch_types=[
      tile_types,
      plgpu.SMEM((stages, keys, head_dim), dtype, transforms=tiled),
      plgpu.SMEM((stages, keys, head_dim), dtype, transforms=tiled),
      None if interpret is None else plgpu.SMEM((2, _HALF, keys), dtype, transforms=tiled),
      narrow_types,
      plgpu.Barrier(num_arrivals=len(slabs), num_barriers=query_tiles),
      *[plgpu.Barrier(num_arrivals=1 if is_fp8 else chunks, num_barriers=stages)] * 2,
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_barriers=2),
      plgpu.Barrier(num_arrivals=chunks),
      plgpu.Barrier(num_arrivals=2, num_barriers=query_tiles),
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=tuning.lowering),
    interpret=interpret,
  )(q, kv, block_tables, kv_lens, query_starts, pieces["prefill_count"], pieces["prefill_items"])
