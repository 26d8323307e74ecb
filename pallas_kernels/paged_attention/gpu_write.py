"""Rotary embedding and the KV write of a layer in one Hopper kernel; it may not touch slots of other tokens.

It moves each byte once; separate programs would move it three times. TMA loads projections, threads rotate them in
registers (arXiv:2104.09864), and TMA stores them: queries packed for the attention kernels, keys and values at their
slots of the donated buffer, in fp8 if it has that. It also clears the counters of the decode kernel. A layer calls it
once for 8 to some thousand tokens, so the latency of one thread block counts: the kernel waits once for all copies in,
and for copies out only until they have read their source.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_attention.fp8_kv import BYTES, to_fp8
from pallas_kernels.paged_attention.tuning import Tuning

_THREADS = 128  # of a thread block: one warpgroup
_MOST_BYTES = 128 * 1024  # shared memory of a thread block
_UNROLLED = 8  # largest group whose heads the kernel rotates without a loop


def _tile_tokens(write_tokens: int, group: int, head_dim: int) -> int:
  """Returns the tokens a thread block: `write_tokens`, but fewer for large groups."""
  tokens = write_tokens
  while tokens > 4 and tokens * (group + 2) * head_dim * 2 > _MOST_BYTES:
    tokens //= 2
  return tokens


def _layout(tokens: int, half: int):
  """Returns the layout of [tokens, half] over threads, with the longest vectors that leave work for all threads."""
  vector = min(tokens * half // _THREADS, 8)
  per_warp = _THREADS * vector // half // 4  # rows that one vector of each thread covers
  if per_warp == 1:
    return plgpu.Layout.TILED(plgpu.Tiling(((4, half), (vector,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
  tiling = plgpu.Tiling(((4 * per_warp, half), (per_warp, half), (vector,)))
  return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _body(
  page: int, num_tokens: int, qkv, cos, sin, slots, kv, q, finished, queries, new, cosines, sines, narrow, ready
):
  """Processes a tile of tokens of one KV head; `kv` is the buffer, and `narrow` holds its bytes of fp8, if any."""
  tokens, group, head_dim = queries.shape
  half = head_dim // 2
  layout = _layout(tokens, half)
  head, start = lax.axis_index("head"), lax.axis_index("tile") * tokens
  here = pl.ds(start, tokens)
  plgpu.copy_gmem_to_smem(qkv.at[here, head, pl.ds(group, 2)], new, ready)
  plgpu.copy_gmem_to_smem(cos.at[here], cosines.at[:, 0], ready)
  plgpu.copy_gmem_to_smem(sin.at[here], sines.at[:, 0], ready)
  plgpu.copy_gmem_to_smem(qkv.at[here, head, pl.ds(0, group)], queries, ready)
  # Reads the slots while the copies run.
  places = [slots[jnp.minimum(start + i, num_tokens - 1)] for i in range(tokens)]
  for i in range(tokens):
    finished[head, start + i] = jnp.int32(0)
  plgpu.barrier_wait(ready)
  c, s = (plgpu.load(ref.at[:, 0], layout=layout, optimized=False) for ref in (cosines, sines))

  def rotate(ref, row):
    low, high = ref.at[:, row, pl.ds(0, half)], ref.at[:, row, pl.ds(half, half)]
    x, y = (plgpu.load(part, layout=layout, optimized=False).astype(jnp.float32) for part in (low, high))
    low[...] = (x * c - y * s).astype(ref.dtype)
    high[...] = (y * c + x * s).astype(ref.dtype)

  rotate(new, 0)
  if group <= _UNROLLED:
    for row in range(group):
      rotate(queries, row)
  else:
    pl.loop(0, group)(functools.partial(rotate, queries))
  for stored in narrow:
    for row in range(2):
      for part in (pl.ds(0, half), pl.ds(half, half)):
        stored[:, row, part] = to_fp8(plgpu.load(new.at[:, row, part], layout=layout, optimized=False))
  plgpu.commit_smem()
  for i, place in enumerate(places):

    @pl.when(start + i < num_tokens)
    def _(i=i, place=place):
      source = narrow[0] if narrow else new
      plgpu.copy_smem_to_gmem(
        source.at[i], kv.at[lax.div(place, page), head, :, lax.rem(place, page)], commit_group=False
      )

  plgpu.copy_smem_to_gmem(queries, q.at[head, here])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def rotate_and_write(
  qkv: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  kv: jax.Array,
  slot_mapping: jax.Array,
  *,
  tuning: Tuning,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rotates queries and keys, packs the queries, and stores keys and values.

  Args:
    qkv: bf16[T, K, G + 2, H]; for each KV head its G query heads, its key and its value.
    cos, sin: f32[T, H / 2].
    kv: bf16[P, K, 2, page, H], or uint8 for fp8 (fp8_kv.py); updated in place if the caller's jit donates it.
    slot_mapping: int32[T], block * page + offset. Slots of padding tokens lie in block 0. If tokens share a slot, any
      one of them stays.
    tuning: see tuning.py.
    interpret: plgpu.InterpretGPUParams to run on a CPU; None compiles for the GPU.

  Returns:
    q, bf16[K, T * G, H], with query head g of token t at row t * G + g of a KV head; and the buffer. Third, zeros,
    int32[K, T or more], in which the decode kernel counts.
  """
  num_tokens, heads, rows, head_dim = qkv.shape
  group = rows - 2
  tokens = _tile_tokens(tuning.write_tokens, group, head_dim)
  tiles = pl.cdiv(num_tokens, tokens)
  ref = jax.new_ref(kv)
  q, finished = plgpu.kernel(
    functools.partial(_body, kv.shape[3], num_tokens),
    # Whole tiles: a bulk copy knows no bounds, and would write over the queries of the next head.
    out_type=(
      jax.ShapeDtypeStruct((heads, tiles * tokens, group, head_dim), qkv.dtype),
      jax.ShapeDtypeStruct((heads, tiles * tokens), jnp.int32),
    ),
    grid=(tiles, heads),
    grid_names=("tile", "head"),
    scratch_types=[
      plgpu.SMEM((tokens, group, head_dim), qkv.dtype),
      plgpu.SMEM((tokens, 2, head_dim), qkv.dtype),
      plgpu.SMEM((tokens, 1, head_dim // 2), jnp.float32),
      plgpu.SMEM((tokens, 1, head_dim // 2), jnp.float32),
      [plgpu.SMEM((tokens, 2, head_dim), BYTES)] if kv.dtype == BYTES else [],
      plgpu.Barrier(num_arrivals=4),
    ],
    # Lane lowering swizzles no array here. Warpgroup lowering swizzles arrays of heads of 128 and slices single rows of
    # them, whose elements threads and TMA would place differently. Every thread reads and writes only its own values,
    # so loads and stores need no barriers between them.
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
    interpret=interpret,
  )(qkv, cos, sin, slot_mapping, ref)
  return q[:, :num_tokens].reshape(heads, num_tokens * group, head_dim), jax.freeze(ref), finished
