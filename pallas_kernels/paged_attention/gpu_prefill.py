"""Attention of rows of many queries over their pages, for Hopper; it may not write tokens it was not given.

A thread block takes one item of the plan and one KV head: 128 packed rows, that is (query, head of the group) pairs.
One warpgroup brings pages into a ring of tiles; two others compute 64 packed rows each as in FlashAttention-3
(arXiv:2407.08608): the scores of a tile are multiplied along with the values of the tile before, the softmax may run
under the latter, and the two warpgroups take turns at the tensor core.

All that a row's result depends on is its own queries, pages and length: tiles of keys lie at fixed positions, and a
row's items start at its first query. So results equal to the bit whatever else is in the batch.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_attention.plan import ROWS_PER_TILE, Plan
from pallas_kernels.paged_attention.tuning import Tuning

_HALF = ROWS_PER_TILE // 2  # packed rows a compute warpgroup
_LANES = 64  # bf16 values in a line of 128 bytes, which is what TMA and wgmma swizzle
# The score of a key that is not seen. Finite, so that a tile of which a row sees nothing gives no NaN (what it adds is
# forgotten at the first key seen: exp2 of about -1e29 is 0). A power of two, so that its product with any factor is
# exact, and the difference from the row's maximum 0 even where the compiler fuses product and difference.
_MASKED = -(2.0**100)


def _tanh(x: jax.Array) -> jax.Array:
  """By exp2, to f32 rounding: the device's own tanh instruction is good to 2^-11, which a cap of 50 makes 2.4%."""
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
  """Causal attention of the plan's prefill items.

  Args:
    q: bf16[K, T * G, H], row t * G + g of head k is query head k * G + g of token t. Rows of padding may hold anything.
    kv: bf16[P, K, 2, page, H], keys and values; what is past a row's length may be NaN.
    block_tables, kv_lens, query_starts: see api.RaggedMeta.
    pieces: `plan.split` of the plan's array.
    plan: the layout of the work.
    scale, soft_cap: see api.PagedAttention; scale is above 0.
    tuning: prefill_stages, prefill_tile_keys and lowering.
    interpret: how to run on a CPU; None compiles for the GPU.

  Returns:
    bf16[T, N, H] with the tokens of the prefilled rows and zeros at padding; other tokens are undefined.
  """
  geometry = plan.geometry
  group, head_dim, page = geometry.group, geometry.head_dim, geometry.block_size
  sliding_window = geometry.sliding_window
  keys, stages = tuning.prefill_tile_keys, tuning.prefill_stages
  num_blocks, num_kv_heads = kv.shape[:2]
  chunk = min(page, keys)  # keys that one copy brings: a page, or a tile of a larger one
  chunks = keys // chunk
  slabs = [(slab, pl.ds(slab * _LANES, _LANES)) for slab in range(head_dim // _LANES)]
  # A score times `factor` is the exponent of 2 that the softmax takes.
  factor = math.log2(math.e) * (scale if soft_cap is None else soft_cap)
  f32, dtype, per_row, per_score = jnp.float32, q.dtype, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

  def body(q_g, kv_g, tables_g, lens_g, starts_g, counts_g, items_g, out_g, tile_refs, k_s, v_s, p_s, *barriers):
    # The tile of queries, and of the output in the end, [slab, packed row, 64]. `lines` and `tile` are two views of the
    # same bytes. TMA needs the first: cut into tiles of 8 rows, an array can be copied from multiples of 8 rows only
    # (Lane lowering then compiles to wrong addresses, Warpgroup lowering refuses).
    lines, tile = tile_refs if interpret is None else (tile_refs[0], tile_refs[0])
    q_full, k_full, v_full, k_free, v_free, turn, tail_full, out_full = barriers
    item, head, wg = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("wg")
    row, token = items_g[item, 0], items_g[item, 1]

    def slot_of(number):
      return lax.rem(number, stages)

    def bring(is_row, row, token, kv_len, lowest, first, end):
      """Fills the tile of queries and, in turns, the ring's tiles of keys and of values."""

      @pl.when(is_row)
      def _():
        for slab, lanes in slabs:
          plgpu.copy_gmem_to_smem(q_g.at[head, pl.ds(token * group, ROWS_PER_TILE), lanes], lines.at[slab], q_full)

      @pl.loop(first, end)
      def _(i):
        slot, reused = slot_of(i - first), i - first >= stages
        # Blocks of which no key exists, or none is seen, are read from past the pool's end: TMA fills in zeros.
        sources = []
        for start in range(0, keys, chunk):
          key = i * keys + start
          index = lax.div(key, page)
          exists = index * page < kv_len
          if sliding_window is not None:
            exists &= (index + 1) * page > lowest
          block = tables_g[row, jnp.minimum(index, geometry.table_width - 1)]
          sources.append((start, jnp.where(exists, block, num_blocks), key - index * page))

        def copy(which, ring, full):
          for start, block, offset in sources:
            page_g = kv_g.at[block, head, which]
            if chunk < page:
              page_g = kv_g.at[block, head, which, pl.ds(offset, chunk)]
            plgpu.copy_gmem_to_smem(page_g, ring.at[slot, pl.ds(start, chunk)], full)

        @pl.when(reused)
        def _():
          plgpu.barrier_wait(k_free.at[slot])

        copy(0, k_s, k_full.at[slot])

        @pl.when(reused)
        def _():
          plgpu.barrier_wait(v_free.at[slot])

        held = kv_len - i * keys  # keys from the tile's first to the row's end
        cut = (held < keys) & (lax.rem(held, page) != 0)  # the row ends inside a block of this tile

        @pl.when(jnp.logical_not(cut))
        def _():
          copy(1, v_s, v_full.at[slot])

        @pl.when(cut)
        def _():
          # What lies past the end would meet a weight of 0, and 0 * NaN is NaN; for keys the mask is enough. The values
          # arrive at a barrier of their own, and at the usual one when clean: others read the tile only then.
          copy(1, v_s, tail_full)
          plgpu.barrier_wait(tail_full)
          for start in range(0, keys, _HALF):

            @pl.when(held < start + _HALF)
            def _(start=start):
              exists = plgpu.broadcasted_iota(jnp.int32, (_HALF, _LANES), 0, layout=per_score) < held - start
              for _, lanes in slabs:
                values = v_s.at[slot, pl.ds(start, _HALF), lanes]
                loaded = plgpu.load(values, layout=per_score)
                values[...] = jnp.where(exists, loaded, jnp.zeros_like(loaded))

          plgpu.commit_smem()
          for _ in sources:
            plgpu.barrier_arrive(v_full.at[slot])

      @pl.loop(jnp.maximum(end - stages, first), end)
      def _(i):  # nobody may leave a barrier that others still arrive at
        plgpu.barrier_wait(k_free.at[slot_of(i - first)])
        plgpu.barrier_wait(v_free.at[slot_of(i - first)])

    def store(token, count):
      """Copies the first `count` tokens of the tile out, in runs of powers of two: no other tokens are touched."""
      heads = pl.ds(head * group, group)
      for bit in reversed(range(plan.tile_tokens.bit_length())):
        run = 1 << bit

        @pl.when((count & run) != 0)
        def _(run=run):
          done = count & ~(2 * run - 1)
          for slab, lanes in slabs:
            if interpret is None:
              source = lines.at[slab, pl.ds(done * group, run * group)].reshape(run, group, _LANES)
              plgpu.copy_smem_to_gmem(source, out_g.at[pl.ds(token + done, run), heads, lanes])
            else:  # it knows no reshaped source

              @pl.loop(0, run)
              def _(t, slab=slab, lanes=lanes):
                source = lines.at[slab, pl.ds((done + t) * group, group)]
                plgpu.copy_smem_to_gmem(source, out_g.at[token + done + t, heads, lanes])

      plgpu.wait_smem_to_gmem(0)

    def compute(is_row, position, tiles):
      """Attends for 64 packed rows and leaves the result in place of the queries."""
      rows = pl.ds(wg * _HALF, _HALF)

      @pl.when(is_row)
      def _():
        out = attend(rows, position, tiles).astype(dtype)
        for slab, lanes in slabs:
          tile[slab, rows] = out[:, lanes.start : lanes.start + _LANES]

      @pl.when(jnp.logical_not(is_row))
      def _():
        for slab, _ in slabs:
          tile[slab, rows] = plgpu.layout_cast(jnp.zeros((_HALF, _LANES), dtype), per_score)

      plgpu.commit_smem()
      plgpu.barrier_arrive(out_full)

    def multiply_keys(scores_acc, rows, slot):
      for slab, lanes in slabs:
        plgpu.wgmma(scores_acc, tile.at[slab, rows], k_s.at[slot, :, lanes].transpose((1, 0)))

    def multiply_values(out_acc, weights, slot):
      if interpret is None:
        plgpu.wgmma(out_acc, weights, v_s.at[slot])
      else:  # it takes no operand from registers
        p_s[wg] = weights
        plgpu.commit_smem()
        plgpu.wgmma(out_acc, p_s.at[wg], v_s.at[slot])

    def accumulate(f, out, like):
      """Calls f(accumulator of scores, accumulator that holds `out`).

      Returns:
        What the second then holds, and what f returned: a tuple, of the shapes of `like`.
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
      # The scores go first. Whatever makes an accumulator must be done before the fence of another: ptxas would else
      # run the products one by one.
      start = plgpu.WGMMAAccumulatorRef.init
      run: Any = pl.run_state(in_place)  # a program over references, typed as of arrays only
      _, out, results = run((start(zeros), start(out), like))
      return out, results

    def attend(rows, position, tiles):
      """f32[64, H]: attention of the warpgroup's packed rows over `tiles` tiles of keys, at least one.

      `position` is that of the item's first query, counted from the first key of the first tile.
      """

      def softmax(scores, i, peak, total, masked):
        """Weights of tile i's keys, what to multiply older sums with, and the new maximum and sum."""
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
        # The barrier keeps all this before the wait that follows.
        return lax.optimization_barrier((weights, decay, new_peak, total * decay + weights.sum(axis=1)))

      def operand(weights):
        # Rounded only now: the last product, just waited for, was reading the registers of the last operand. Without
        # the barriers LLVM moves the rounding to before the wait, or f32 through the loop.
        return lax.optimization_barrier(lax.optimization_barrier(weights).astype(dtype))

      def first_scores(scores_acc):
        multiply_keys(scores_acc, rows, 0)
        plgpu.barrier_arrive(turn.at[1 - wg])
        return scores_acc[...]

      def step(i, carry, masked):
        """Scores of tile i, and the values of the tile before."""
        out, weights, peak, total = carry
        slot, before = slot_of(i), slot_of(i - 1)
        plgpu.barrier_wait(k_full.at[slot])
        plgpu.barrier_wait(v_full.at[before])
        plgpu.barrier_wait(turn.at[wg])

        def products(scores_acc, out_acc):
          multiply_keys(scores_acc, rows, slot)
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
      plgpu.barrier_wait(q_full)
      plgpu.barrier_wait(k_full.at[0])

      @pl.when(wg == 1)
      def _():
        plgpu.barrier_wait(turn.at[1])

      scores = pl.run_scoped(first_scores, plgpu.WGMMAAccumulatorRef((_HALF, keys), f32))
      plgpu.barrier_arrive(k_free.at[0])
      weights, _, peak, total = softmax(scores, jnp.int32(0), peak, total, masked=True)
      carry = out, operand(weights), peak, total

      # Tiles at the window's start are masked, then come those seen whole, then those at the causal edge.
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
      slot = slot_of(tiles - 1)
      plgpu.barrier_wait(v_full.at[slot])

      @pl.when(wg == 0)
      def _():
        plgpu.barrier_wait(turn.at[0])  # for the other's last step: as many waits as arrivals

      def last_values(_, out_acc):
        multiply_values(out_acc, weights, slot)
        return ()

      out, _ = accumulate(last_values, out, ())
      plgpu.barrier_arrive(v_free.at[slot])
      return out * lax.broadcast_in_dim(1.0 / total, out.shape, [0])

    def work():
      """The item's numbers; read by each warpgroup for itself, so that they take no register of both."""
      is_row = row >= 0
      of_row = jnp.maximum(row, 0)
      row_end, kv_len = starts_g[of_row + 1], lens_g[of_row]
      count = jnp.minimum(jnp.where(is_row, row_end, geometry.tokens) - token, plan.tile_tokens)
      position = kv_len - row_end + token  # of the first query
      lowest = 0 if sliding_window is None else jnp.maximum(position - (sliding_window - 1), 0)  # key seen
      first = lax.div(jnp.int32(lowest), keys)  # tile of keys
      end = jnp.where(is_row, lax.div(position + (count - 1), keys) + 1, first)
      return is_row, of_row, kv_len, count, position, lowest, first, end

    busy = item < counts_g[1]

    @pl.when(busy & (wg < 2))
    def _():
      plgpu.set_max_registers(232, action="increase")
      is_row, *_, position, _, first, end = work()
      # Behind a barrier, else what they are made of takes registers through the loops.
      compute(is_row, *lax.optimization_barrier((position - first * keys, end - first)))

    @pl.when(busy & (wg == 2))
    def _():
      plgpu.set_max_registers(40, action="decrease")
      is_row, of_row, kv_len, count, _, lowest, first, end = work()
      bring(is_row, of_row, token, kv_len, lowest, first, end)
      plgpu.barrier_wait(out_full)
      store(token, count)

  swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
  tiled = (plgpu.TilingTransform((8, _LANES)), swizzle)  # pyright: ignore[reportAbstractUsage]
  tile_shape = (len(slabs), ROWS_PER_TILE, _LANES)
  tile_types = [plgpu.SMEM(tile_shape, dtype, transforms=tiled)]
  if interpret is None:
    tile_types = plgpu.RefUnion(plgpu.SMEM(tile_shape, dtype, transforms=(swizzle,)), *tile_types)
  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((geometry.tokens, geometry.num_heads, head_dim), dtype),
    grid=(plan.max_prefill_items, num_kv_heads),  # heads vary fastest: the items start in the plan's order
    grid_names=("item", "head"),
    num_threads=3,
    thread_name="wg",
    scratch_types=[
      tile_types,
      plgpu.SMEM((stages, keys, head_dim), dtype, transforms=tiled),
      plgpu.SMEM((stages, keys, head_dim), dtype, transforms=tiled),
      None if interpret is None else plgpu.SMEM((2, _HALF, keys), dtype, transforms=tiled),
      plgpu.Barrier(num_arrivals=len(slabs)),
      plgpu.Barrier(num_arrivals=chunks, num_barriers=stages),
      plgpu.Barrier(num_arrivals=chunks, num_barriers=stages),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_barriers=2),
      plgpu.Barrier(num_arrivals=chunks),
      plgpu.Barrier(num_arrivals=2),
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=tuning.lowering),
    interpret=interpret,
  )(q, kv, block_tables, kv_lens, query_starts, pieces["counts"], pieces["prefill_items"])
