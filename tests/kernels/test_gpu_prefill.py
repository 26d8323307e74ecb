"""The prefill kernel in Pallas' GPU interpreter, with its detection of races, against dense attention in f64.

Unused pages, what lies past a row's end in its last page and the queries of padding are NaN, as in conformance.py.
"""

from collections.abc import Iterator
import dataclasses
import os
import types
from typing import Any

# The interpreter blocks a thread of XLA's pool a warpgroup; a pool of two cores has none left for the third.
os.environ.setdefault("NPROC", "8")

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import arg_specs, gpu_prefill
from pallas_kernels.paged_attention.arg_specs import ArgSpec, Arguments
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.tuning import tuning_for
from tests.kernels import conformance
from tests.kernels.seeded import seed_bug

pytestmark = [
  pytest.mark.kernels,
  pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),  # NaN, which is on purpose
  pytest.mark.usefixtures("gpu_interpreter"),
]

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
DECODED = 2  # rows of at most so many queries are none of this kernel's business


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
  """Nearly all the time goes into compiling the interpreter's programs, which run once."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def plan_of(spec: ArgSpec) -> Plan:
  """Of as many SMs as KV heads, so that a thread block has several items."""
  queries = min(DECODED, 64 // spec.geometry.group)
  return Plan(spec.geometry, split_blocks=8, decode_queries=queries, num_sms=spec.num_kv_heads)


def operands(spec: ArgSpec, arguments: Arguments) -> tuple[jax.Array, ...]:
  """q, kv, block_tables, kv_lens, query_starts and the plan's array, in the kernel's layouts."""
  heads, page = spec.num_kv_heads, spec.block_size
  kv = np.full((arguments.num_blocks, heads, 2, page, spec.head_dim), np.nan, np.float32)
  for row, (keys, values) in enumerate(zip(arguments.keys, arguments.values, strict=True)):
    block, offset = np.divmod(arguments.slots(row, page), page)
    kv[block, :, 0, offset], kv[block, :, 1, offset] = keys, values
  q = arguments.q.reshape(spec.num_tokens, heads, -1, spec.head_dim).swapaxes(0, 1).reshape(heads, -1, spec.head_dim)
  plan = plan_of(spec).make_work(arguments.query_starts, arguments.kv_lens)
  numbers = q.astype(jnp.dtype(spec.dtype)), conformance.stored(kv.astype(jnp.dtype(spec.dtype)), spec.stored_dtype)
  integers = (arguments.block_tables, arguments.kv_lens, arguments.query_starts, plan)
  return tuple(map(conformance.put, (*numbers, *integers)))


def prefill(spec: ArgSpec, module: types.ModuleType = gpu_prefill, **tuning: Any):
  """The kernel, jitted, on `operands`."""
  plan = plan_of(spec)
  tuned = dataclasses.replace(tuning_for("", min(spec.head_dim, 128), spec.block_size), **tuning)  # none for 256

  def run(q, kv, block_tables, kv_lens, query_starts, packed):
    return module.prefill(
      q,
      kv,
      block_tables,
      kv_lens,
      query_starts,
      plan.split(packed),
      plan=plan,
      scale=spec.scale,
      soft_cap=spec.soft_cap,
      tuning=tuned,
      interpret=INTERPRET,
    )

  return jax.jit(run)


def check(spec: ArgSpec, module: types.ModuleType = gpu_prefill, **tuning: Any) -> None:
  """One call: numbers, zeros at padding, nothing written at rows of few queries (the interpreter's NaN), no race."""
  arguments = arg_specs.make_arguments(spec)
  out = conformance.f32(prefill(spec, module, **tuning)(*operands(spec, arguments)))
  assert not gpu_callbacks.get_races().races_found
  counts = np.diff(arguments.query_starts)
  mine = np.repeat(counts > plan_of(spec).decode_queries, counts)
  mine = np.concatenate([mine, np.ones(spec.num_tokens - len(mine), bool)])
  want = conformance.oracle(spec, arguments)
  # Weights and result are rounded to bf16: 2^-9 of the result, and of the numbers that cancel in it.
  np.testing.assert_allclose(out[mine], want[mine], rtol=2.0**-8, atol=4e-3)
  assert not out[arguments.query_starts[-1] :].any(), "padding tokens must give zeros"
  assert np.isnan(out[~mine]).all(), "a token of another row is written"


def _spec(
  name: str, rows: tuple[tuple[int, int], ...], num_tokens: int, page: int, group: int = 4, **changes
) -> ArgSpec:
  width = -(-max([1, *(length for _, length in rows)]) // page) + 1
  kv_heads = changes.pop("num_kv_heads", 1)
  return ArgSpec(
    name,
    rows,
    num_tokens,
    len(rows) + 2,
    block_size=page,
    table_width=width,
    num_heads=group * kv_heads,
    num_kv_heads=kv_heads,
    dtype="bfloat16",
    **changes,
  )


_MIXED = ((1, 5), (7, 7), (2, 30), (40, 140), (1, 16), (0, 0), (9, 128))

SPECS = (
  (_spec("nothing", (), 8, 16), {}),
  (_spec("mixed", _MIXED, 64, 16, num_kv_heads=2), {}),
  (_spec("window", _MIXED, 64, 32, group=3, sliding_window=50), {"prefill_tile_keys": 64, "prefill_stages": 2}),
  (_spec("many_tiles", ((33, 600),), 40, 64, head_dim=128), {"prefill_stages": 2, "prefill_tile_keys": 64}),
  (_spec("one_stage", ((9, 300),), 9, 32, sliding_window=140), {"prefill_stages": 1, "prefill_tile_keys": 64}),
  (_spec("half_a_page_a_tile", ((5, 170),), 6, 128, group=5, soft_cap=2.0), {"prefill_tile_keys": 64}),
  (_spec("group_of_64_window_of_one", ((3, 70),), 4, 64, group=64, sliding_window=1), {}),
  (_spec("group_of_1", ((140, 140),), 150, 64, group=1), {}),
  (_spec("fp8", ((9, 150), (5, 70)), 16, 16, kv_dtype="uint8"), {"prefill_tile_keys": 64, "prefill_stages": 2}),
  (_spec("fp8_with_one_tile_of_queries", ((9, 150), (5, 70)), 16, 32, head_dim=128, kv_dtype="uint8"), {}),
  (_spec("head_of_256", ((4, 100),), 6, 64, group=2, head_dim=256), {"prefill_tile_keys": 64, "prefill_stages": 1}),
)


@pytest.mark.parametrize(("spec", "tuning"), SPECS, ids=[spec.name for spec, _ in SPECS])
def test_equals_dense_attention(spec: ArgSpec, tuning: dict[str, Any]) -> None:
  check(spec, **tuning)


def test_a_row_depends_neither_on_neighbors_nor_on_its_place_nor_on_the_order_of_items() -> None:
  """Bit for bit, in one executable; once beside rows full of NaN, once with the items in reverse."""
  subject, program, results = (37, 150), None, []
  for number, (before, after) in enumerate((((), ()), (((1, 300), (5, 40)), ()), (((3, 20),), ((20, 200), (2, 9))))):
    rows = (*before, subject, *after)
    used = sum(-(-length // 16) for _, length in rows)
    spec = ArgSpec("neighbors", rows, 64, 5, 16, 20, 4, 1, 64, dtype="bfloat16", spare_blocks=60 - used)
    arguments = arg_specs.make_arguments(spec, number)
    at = len(before)
    begin, end = arguments.query_starts[at : at + 2]
    fixed = arg_specs.make_arguments(ArgSpec("subject", (subject,), subject[0], 1, 16, 20, 4, 1, 64))
    arguments.q[begin:end] = fixed.q
    arguments.keys[at][:], arguments.values[at][:] = fixed.keys[0], fixed.values[0]
    for row in range(len(rows)):
      if row != at and number == 2:
        arguments.keys[row][:], arguments.values[row][:] = np.nan, np.nan
    *inputs, packed = operands(spec, arguments)
    if number == 1:
      pieces = plan_of(spec).split(np.array(packed))
      items = pieces["prefill_items"][: pieces["prefill_count"][0]]
      order, (offset, _) = items[::-1].copy(), plan_of(spec).fields["prefill_items"]
      packed = packed.at[offset : offset + order.size].set(order.reshape(-1))
    program = program or prefill(spec)
    results.append(np.asarray(program(*inputs, packed).astype(jnp.float32))[begin:end])
  assert np.isfinite(results[0]).all()
  for other in results[1:]:
    np.testing.assert_array_equal(other, results[0])


# Two items of a row, the second of 5 tokens, and one of a row that ends where a page does but no tile; three tiles of
# keys each, two stages, two pages a tile, a window that begins inside a tile, an end inside a page, a row of the other
# kernel right behind, and padding.
_SEEDED = _spec("seeded", ((37, 183), (5, 160), (1, 9)), 46, 32, sliding_window=90)
_SEEDED_FP8 = _spec("seeded_fp8", ((9, 183),), 12, 32, kv_dtype="uint8")
_TUNING: dict[str, Any] = {"prefill_tile_keys": 64, "prefill_stages": 2}

# What is wrong, a text that occurs once in the kernel, and what takes its place.
BUGS = (
  ("the page after", "tables_g[row, jnp.minimum(index,", "tables_g[row, jnp.minimum(index + 1,"),
  ("pages of no key are read", "jnp.where(exists, block, num_blocks)", "block"),
  ("a query sees the next key", "seen = key <= edge", "seen = key <= edge + 1"),
  ("the window is one too long", "key > edge - sliding_window", "key >= edge - sliding_window"),
  ("values past the end are not cleaned", "cut = (held < keys)", "cut = (held < 0)"),
  ("values of the wrong stage", "multiply_values(out_acc, weights, before)", "multiply_values(out_acc, weights, slot)"),
  ("values are not waited for", "        plgpu.barrier_wait(v_full.at[before])\n", ""),
  ("keys overwrite keys in use", "number >= stages", "number >= stages + 1"),
  ("all of the tile is written", "item.token, item.count,", "item.token, jnp.int32(plan.tile_tokens),"),
  ("the result is not handed to TMA", "      plgpu.commit_smem()\n      plgpu.barrier_arrive(all_out_full",
   "      plgpu.barrier_arrive(all_out_full"),
  ("an item begins at the start of the ring", "slot, before = slot_of(tiles_before + i), slot_of(tiles_before + i - 1)",
   "slot, before = slot_of(i), slot_of(i - 1)"),
  ("the result of the item before is not stored", "pl.when(n > 0)", "pl.when(n > 1)"),
  ("padding is not zero", "jnp.zeros((_HALF, _LANES), dtype)", "jnp.ones((_HALF, _LANES), dtype)"),
)  # fmt: skip

# Slower, or of less use; the first two end in a deadlock.
MORE_BUGS = (
  ("values are not given back", "        plgpu.barrier_arrive(v_free.at[before])\n", ""),
  ("values are handed out before they are clean", "copy(sources, slot, 1, v_s, tail_full)",
   "copy(sources, slot, 1, v_s, v_full.at[slot])"),
  ("a copy brings the wrong part", "ring.at[slot, pl.ds(start, chunk)]", "ring.at[slot, pl.ds(0, chunk)]"),
  ("keys are taken for values", "copy(sources, slot, 1, v_s, v_full", "copy(sources, slot, 0, v_s, v_full"),
  ("a query does not see its own key", "seen = key <= edge", "seen = key < edge"),
  ("the walk begins a tile late", "first = lax.div(lowest, keys)", "first = lax.div(lowest, keys) + 1"),
  ("the edge is reached too late", "position + lax.div(wg * _HALF, group) + 1, keys)", "position + 64, keys)"),
  ("the window is left too early", "in_window = lax.div(", "in_window = 0 * lax.div("),
  ("values are cleaned up to one too far", "< held - start", "<= held - start"),
  ("the first keys are not waited for", "      plgpu.barrier_wait(k_full.at[slot_of(tiles_before)])\n", ""),
  ("values are given back too early",
   "          multiply_keys(scores_acc, tile, rows, slot)\n          multiply_values",
   "          multiply_keys(scores_acc, tile, rows, slot)\n          plgpu.barrier_arrive(v_free.at[before])\n"
   "          multiply_values"),
  ("the other warpgroup never gets its turn", "        plgpu.barrier_arrive(turn.at[1 - wg])\n        return",
   "        return"),
  ("older sums do not decay", "return out * lax.broadcast_in_dim(decay, out.shape, [0])", "return out"),
  ("the sum of weights does not decay", "total * decay + weights", "total + weights"),
  ("a run of tokens is written at the wrong place", "done = count & ~(2 * run - 1)", "done = count & ~(run - 1)"),
  ("the result is stored before it is there", "      plgpu.barrier_wait(all_out_full.at[query_slot])\n", ""),
  ("a result is overwritten while it is stored",
   "      plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last result from this tile\n", ""),
  ("the last result comes from the wrong tile", "item.count, all_lines.at[query_slot]", "item.count, all_lines.at[0]"),
  ("padding does not give its tile away", "          plgpu.barrier_arrive(q_full)\n", "          pass\n"),
)  # fmt: skip


@pytest.mark.parametrize(
  ("old", "new"),
  [pytest.param(*bug, id=name.replace(" ", "_")) for name, *bug in BUGS]
  + [pytest.param(*bug, id=name.replace(" ", "_"), marks=pytest.mark.long) for name, *bug in MORE_BUGS],
)
def test_seeded_bug_is_caught(old: str, new: str) -> None:
  check_bug(_SEEDED, old, new)


@pytest.mark.long
def test_items_of_another_sm_are_noticed() -> None:
  mixed, _ = SPECS[1]
  check_bug(mixed, "n * plan.num_sms + turn_in(n)", "n * plan.num_sms")


def check_bug(spec: ArgSpec, old: str, new: str) -> None:
  """Checks that a spec notices `new` in place of `old` in the kernel's source."""
  module = seed_bug(gpu_prefill, old, new)
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
    check(spec, module, **_TUNING)


# As above, of what only fp8 has.
FP8_BUGS = (
  ("bytes are taken for numbers", "from_fp8(loaded)", "loaded.astype(f32)", False),
  ("bytes are not waited for", "        plgpu.barrier_wait(fetched.at[slot])\n", "", False),
  ("bytes of the tile after", "fetch(i + stages)", "fetch(i + stages - 1)", True),
  (
    "values past the end",
    "            clear_tail(slot, held)\n\n          plgpu",
    "            pass\n\n          plgpu",
    True,
  ),
  (
    "half of a tile",
    "for start in range(0, keys, _WIDENED_ROWS)",
    "for start in range(0, keys // 2, _WIDENED_ROWS)",
    True,
  ),
)


@pytest.mark.parametrize(
  ("old", "new"),
  [
    pytest.param(*bug, id=name.replace(" ", "_"), marks=pytest.mark.long if seldom else ())
    for name, *bug, seldom in FP8_BUGS
  ],
)
def test_seeded_bug_of_fp8_is_caught(old: str, new: str) -> None:
  check_bug(_SEEDED_FP8, old, new)


@pytest.mark.parametrize("spec", [_SEEDED, pytest.param(_SEEDED_FP8, marks=pytest.mark.long)], ids=["bf16", "fp8"])
def test_the_kernel_without_a_bug_passes(spec: ArgSpec) -> None:
  check(spec, **_TUNING)
