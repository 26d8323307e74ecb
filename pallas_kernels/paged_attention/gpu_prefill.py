"""Attention of rows of many queries over their pages, for Hopper; it may not write tokens of rows it was not given.

One thread block works on one item of the plan and one KV head: 128 packed rows, (query, head of the group) pairs. A
warpgroup brings pages into a ring of tiles, two others compute 64 rows each in the manner of FlashAttention-3
(arXiv:2407.08608): the scores of the next tile are multiplied while the softmax of this one is computed, and the two
take turns at the tensor core.
"""

import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_attention.plan import ROWS_PER_TILE, Plan

_HALF = ROWS_PER_TILE // 2  # packed rows a compute warpgroup
_LANES = 64  # bf16 values in a line of a swizzled tile, 128 bytes
# The score of a key that is not seen: finite, so that a row of nothing else gives no NaN; a power of two, so that its
# product with any scale is exact and (masked - largest masked) is 0 also when multiplied and subtracted at once.
_MASKED = -(2.0**100)


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
  sliding_window: int | None,
  soft_cap: float | None,
  tuning,
  interpret=None,
) -> jax.Array:
  geometry = plan.geometry
  group, head_dim, page = geometry.group, geometry.head_dim, geometry.block_size
  num_blocks, num_kv_heads = kv.shape[:2]
  num_tokens, table_width = geometry.tokens, geometry.table_width
  keys, stages = tuning.prefill_tile_keys, tuning.prefill_stages
  chunk = min(page, keys)
  chunks = keys // chunk
  slabs = head_dim // _LANES
  sizes = [1 << bit for bit in reversed(range(plan.tile_tokens.bit_length()))]
  dtype = q.dtype
  factor = math.log2(math.e) * (scale if soft_cap is None else soft_cap)
  row_layout = plgpu.Layout.WGMMA.reduce(1)

  def body(q_g, kv_g, tables_g, lens_g, starts_g, counts_g, items_g, out_g, scratch, barriers):
    lines, q_s, k_s, v_s, p_s = scratch
    q_full, k_full, v_full, k_free, v_free, turn, tail_full, out_full = barriers
    if lines is None:
      lines = q_s
    item, head, wg = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("wg")

    @pl.when(item < counts_g[1])
    def _():
      row, token = items_g[item, 0], items_g[item, 1]
      is_row = row >= 0
      row = jnp.maximum(row, 0)
      row_end, kv_len = starts_g[row + 1], lens_g[row]
      count = jnp.minimum(jnp.where(is_row, row_end, num_tokens) - token, plan.tile_tokens)
      first_position = kv_len - row_end + token
      lowest = 0 if sliding_window is None else jnp.maximum(first_position - (sliding_window - 1), 0)
      lo = 0 if sliding_window is None else lax.div(lowest, keys)
      hi = jnp.where(is_row, lax.div(first_position + count - 1, keys) + 1, lo)

      @pl.when(wg < 2)
      def _compute():
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(wg * _HALF, _HALF)
        wg_position = first_position + lax.div(wg * _HALF, group)

        def scores_of(s, i, m, l, masked):
          """p in the operand's dtype, the decay of what was, the new maximum and sum."""
          if soft_cap is not None:
            s = jnp.tanh(s * (scale / soft_cap))
          if masked:
            token_of_row = lax.div(plgpu.broadcasted_iota(jnp.int32, (_HALF,), 0, layout=row_layout) + wg * _HALF, group)
            edge = lax.broadcast_in_dim(token_of_row + (first_position - i * keys), s.shape, [0])
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            seen = key <= edge
            if sliding_window is not None:
              seen &= key > edge - sliding_window
            s = jnp.where(seen, s, _MASKED)
          new_m = jnp.maximum(m, s.max(axis=1) * factor)
          decay = jnp.exp2(m - new_m)
          p = jnp.exp2(s * factor - lax.broadcast_in_dim(new_m, s.shape, [0]))
          return lax.optimization_barrier((p, decay, new_m, l * decay + p.sum(axis=1)))

        def qk(acc, slot):
          for slab in range(slabs):
            lanes = pl.ds(slab * _LANES, _LANES)
            plgpu.wgmma(acc, q_s.at[slab, rows], k_s.at[slot, :, lanes].transpose((1, 0)))

        def pv(acc, p, slot):
          if interpret is not None:
            p_s[wg] = p
            plgpu.commit_smem()
            plgpu.wgmma(acc, p_s.at[wg], v_s.at[slot])
          else:
            plgpu.wgmma(acc, p, v_s.at[slot])

        def operand(p):
          return lax.optimization_barrier(lax.optimization_barrier(p).astype(dtype))

        def accumulate(f, o, like):
          """f(accumulator of scores, accumulator of values that holds o) -> what f returns, which is as `like`."""
          s_type = plgpu.ACC((_HALF, keys), jnp.float32)
          if interpret is not None:

            def scoped(s_acc, o_acc):
              results = f(s_acc, o_acc)
              return o + o_acc[...], results

            return pl.run_scoped(scoped, s_type, plgpu.ACC(o.shape, jnp.float32))

          def stateful(refs):
            s_acc, o_acc, result_refs = refs
            results = f(s_acc, o_acc)
            for ref, result in zip(result_refs, results, strict=True):
              ref[...] = result

          zero = plgpu.layout_cast(jnp.zeros((_HALF, keys), jnp.float32), plgpu.Layout.WGMMA)
          _, o, results = pl.run_state(stateful)((plgpu.ACC.init(zero), plgpu.ACC.init(o), like))
          return o, results

        @pl.when(is_row)
        def _():
          plgpu.barrier_wait(q_full)
          m = plgpu.layout_cast(jnp.full((_HALF,), _MASKED, jnp.float32), row_layout)
          l = plgpu.layout_cast(jnp.zeros((_HALF,), jnp.float32), row_layout)
          o = plgpu.layout_cast(jnp.zeros((_HALF, head_dim), jnp.float32), plgpu.Layout.WGMMA)

          plgpu.barrier_wait(k_full.at[0])

          @pl.when(wg == 1)
          def _():
            plgpu.barrier_wait(turn.at[1])

          def first(s_acc):
            qk(s_acc, 0)
            plgpu.barrier_arrive(turn.at[1 - wg])
            return s_acc[...]

          s = pl.run_scoped(first, plgpu.ACC((_HALF, keys), jnp.float32))
          plgpu.barrier_arrive(k_free.at[0])
          p, _, m, l = scores_of(s, lo, m, l, masked=True)
          p = operand(p)

          def step(i, carry, masked):
            o, p, m, l = carry
            slot, before = lax.rem(i - lo, stages), lax.rem(i - lo - 1, stages)
            plgpu.barrier_wait(k_full.at[slot])
            plgpu.barrier_wait(v_full.at[before])
            plgpu.barrier_wait(turn.at[wg])

            def both(s_acc, o_acc):
              qk(s_acc, slot)
              pv(o_acc, p, before)
              plgpu.barrier_arrive(turn.at[1 - wg])
              s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
              plgpu.barrier_arrive(k_free.at[slot])
              return scores_of(s, i, m, l, masked)

            like = jnp.zeros((_HALF, keys), jnp.float32)
            o, (new_p, decay, m, l) = accumulate(both, o, (plgpu.layout_cast(like, plgpu.Layout.WGMMA), m, m, l))
            plgpu.barrier_arrive(v_free.at[before])
            return o * lax.broadcast_in_dim(decay, o.shape, [0]), operand(new_p), m, l

          carry = o, p, m, l
          at = lo + 1
          if sliding_window is not None:
            past = lax.div(jnp.maximum(wg_position + lax.div(wg * _HALF + _HALF - 1, group) - lax.div(wg * _HALF, group) - sliding_window + 1, 0) + keys - 1, keys)
            whole = jnp.clip(past, at, jnp.maximum(hi, at))
            carry = lax.fori_loop(at, whole, lambda i, c: step(i, c, True), carry)
            at = whole
          whole = jnp.maximum(jnp.minimum(lax.div(wg_position + 1, keys), hi), at)
          carry = lax.fori_loop(at, whole, lambda i, c: step(i, c, False), carry)
          o, p, m, l = lax.fori_loop(whole, hi, lambda i, c: step(i, c, True), carry)

          last = lax.rem(hi - 1 - lo, stages)
          plgpu.barrier_wait(v_full.at[last])

          @pl.when(wg == 0)
          def _():
            plgpu.barrier_wait(turn.at[0])

          def final(_, o_acc):
            pv(o_acc, p, last)
            return ()

          o, _ = accumulate(final, o, ())
          plgpu.barrier_arrive(v_free.at[last])
          o = o * lax.broadcast_in_dim(1.0 / l, o.shape, [0])
          o = o.astype(dtype)
          for slab in range(slabs):
            q_s[slab, rows] = o[:, slab * _LANES : (slab + 1) * _LANES]

        @pl.when(jnp.logical_not(is_row))
        def _():
          for slab in range(slabs):
            q_s[slab, rows] = plgpu.layout_cast(jnp.zeros((_HALF, _LANES), dtype), plgpu.Layout.WGMMA)

        plgpu.commit_smem()
        plgpu.barrier_arrive(out_full)

      @pl.when(wg == 2)
      def _bring():
        plgpu.set_max_registers(40, action="decrease")
        pages = lax.div(kv_len + (page - 1), page)

        @pl.when(is_row)
        def _():
          for slab in range(slabs):
            lanes = pl.ds(slab * _LANES, _LANES)
            plgpu.copy_gmem_to_smem(q_g.at[head, pl.ds(token * group, ROWS_PER_TILE), lanes], lines.at[slab], q_full)

        @pl.loop(lo, hi)
        def _(i):
          slot = lax.rem(i - lo, stages)
          sources = []
          for c in range(chunks):
            position = i * keys + c * chunk
            index = lax.div(position, page)
            used = index < pages
            if sliding_window is not None:
              used &= index >= lax.div(lowest, page)
            block = jnp.where(used, tables_g[row, jnp.minimum(index, table_width - 1)], num_blocks)
            sources.append((block, position - index * page))

          def copy(which, ring, full):
            for c, (block, offset) in enumerate(sources):
              source = kv_g.at[block, head, which]
              if chunk != page:
                source = kv_g.at[block, head, which, pl.ds(offset, chunk)]
              plgpu.copy_gmem_to_smem(source, ring.at[slot, pl.ds(c * chunk, chunk)], full)

          @pl.when(i - lo >= stages)
          def _():
            plgpu.barrier_wait(k_free.at[slot])

          copy(0, k_s, k_full.at[slot])

          @pl.when(i - lo >= stages)
          def _():
            plgpu.barrier_wait(v_free.at[slot])

          held = kv_len - i * keys
          ragged = (held < keys) & (lax.rem(held, page) != 0)

          @pl.when(jnp.logical_not(ragged))
          def _():
            copy(1, v_s, v_full.at[slot])

          @pl.when(ragged)
          def _():
            copy(1, v_s, tail_full)
            plgpu.barrier_wait(tail_full)
            for block in range(keys // 64):

              @pl.when(held < (block + 1) * 64)
              def _(block=block):
                for slab in range(slabs):
                  at = v_s.at[slot, pl.ds(block * 64, 64), pl.ds(slab * _LANES, _LANES)]
                  values = plgpu.load(at, layout=plgpu.Layout.WGMMA)
                  key = plgpu.broadcasted_iota(jnp.int32, (64, _LANES), 0, layout=plgpu.Layout.WGMMA)
                  at[...] = jnp.where(key < held - block * 64, values, jnp.zeros_like(values))

            plgpu.commit_smem()
            for _ in range(chunks):
              plgpu.barrier_arrive(v_full.at[slot])

        @pl.loop(jnp.maximum(hi - stages, lo), hi)
        def _(i):
          slot = lax.rem(i - lo, stages)
          plgpu.barrier_wait(k_free.at[slot])
          plgpu.barrier_wait(v_free.at[slot])

        plgpu.barrier_wait(out_full)

        for size in sizes:
          done = count & ~(2 * size - 1)

          @pl.when((count & size) != 0)
          def _(size=size, done=done):
            for slab in range(slabs):
              lanes = pl.ds(slab * _LANES, _LANES)
              heads = pl.ds(head * group, group)
              if interpret is None:
                source = lines.at[slab, pl.ds(done * group, size * group)].reshape(size, group, _LANES)
                plgpu.copy_smem_to_gmem(source, out_g.at[pl.ds(token + done, size), heads, lanes])
              else:  # which knows no reshape
                for t in range(size):
                  source = lines.at[slab, pl.ds((done + t) * group, group)]
                  plgpu.copy_smem_to_gmem(source, out_g.at[token + done + t, heads, lanes])

        plgpu.wait_smem_to_gmem(0)

  tiled = (plgpu.TilingTransform((8, _LANES)), plgpu.SwizzleTransform(128))
  q_tiled = plgpu.SMEM((slabs, ROWS_PER_TILE, _LANES), dtype, transforms=tiled)
  q_scratch = [None, q_tiled]
  if interpret is None:
    q_lines = plgpu.SMEM((slabs, ROWS_PER_TILE, _LANES), dtype, transforms=(plgpu.SwizzleTransform(128),))
    q_scratch = plgpu.RefUnion(q_lines, q_tiled)

  def entry(*refs):
    refs, (q_refs, k_s, v_s, p_s), barriers = refs[:-12], refs[-12:-8], refs[-8:]
    body(*refs, (*q_refs, k_s, v_s, p_s), barriers)

  return plgpu.kernel(
    entry,
    out_type=jax.ShapeDtypeStruct((num_tokens, geometry.num_heads, head_dim), dtype),
    grid=(plan.max_prefill_items, num_kv_heads),
    grid_names=("item", "head"),
    num_threads=3,
    thread_name="wg",
    scratch_types=[
      q_scratch,
      plgpu.SMEM((stages, keys, head_dim), dtype, transforms=tiled),
      plgpu.SMEM((stages, keys, head_dim), dtype, transforms=tiled),
      plgpu.SMEM((2, _HALF, keys), dtype, transforms=tiled) if interpret is not None else None,
      plgpu.Barrier(num_arrivals=slabs),
      plgpu.Barrier(num_arrivals=chunks, num_barriers=stages),
      plgpu.Barrier(num_arrivals=chunks, num_barriers=stages),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_barriers=2),
      plgpu.Barrier(num_arrivals=chunks),
      plgpu.Barrier(num_arrivals=2),
    ],
    compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=tuning.lowering),
    **({} if interpret is None else {"interpret": interpret}),
  )(q, kv, block_tables, kv_lens, query_starts, pieces["counts"], pieces["prefill_items"])
