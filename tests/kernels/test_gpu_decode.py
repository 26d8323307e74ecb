"""The decode kernel on GPU, in Pallas' interpreter with its race detector, against dense attention in f64.

The interpreter knows nothing of how arrays lie in shared memory, so what depends on that is checked where Pallas lowers
the kernel, which takes no GPU.
Unused pages, positions past a row's end and the queries of padding hold NaN, as everywhere (conformance.py).
"""

import dataclasses
from typing import Any

import jax
from jax.experimental.mosaic.gpu import launch_context, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import arg_specs, gpu_decode
from pallas_kernels.paged_attention.arg_specs import ArgSpec, Arguments
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.tuning import tuning_for
from tests.kernels import conformance
from tests.kernels.conformance import f32
from tests.kernels.seeded import seed_bug

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("gpu_interpreter")]

# Not for several blocks: the interpreter knows no order between them, whose counters are atomic on a GPU. The emulator
# of PTX checks that order (tools/ptx_emulator).
RACES = plgpu.InterpretGPUParams(detect_races=True)
UNTOUCHED = 7.0  # what `out` holds before


@dataclasses.dataclass(frozen=True)
class Case:
  """A batch, how it is planned and how the kernel is set.

  Attributes:
    spec: the batch; rows of more than `queries` queries are not the decode kernel's.
    split_blocks, queries: see plan.Plan.
    sms, pairs, stages: a grid small enough that a pair has several items, and a ring that all of them share. A grid of
      one pair cuts no row.
    ahead: positions that the plan counts in each row beyond its length.
    alone: the rung has no prefill kernel.
  """

  spec: ArgSpec
  split_blocks: int
  queries: int = 4
  sms: int = 1
  pairs: int = 2
  stages: int = 2
  ahead: int = 0
  alone: bool = False

  def __str__(self) -> str:
    return self.spec.name

  @property
  def plan(self) -> Plan:
    return Plan(self.spec.geometry, self.split_blocks, self.queries, self.sms, self.pairs, not self.alone)


def _case(name: str, rows: tuple[tuple[int, int], ...], page: int, split_blocks: int, **changes: Any) -> Case:
  """One KV head of 64, tables of 256 positions by default, and a few unused tokens and rows."""
  names = "queries", "sms", "pairs", "stages", "ahead", "alone"
  of_case = {key: changes.pop(key) for key in names if key in changes}
  heads = changes.pop("kv_heads", 1)
  spec = ArgSpec(
    name,
    rows,
    sum(queries for queries, _ in rows) + changes.pop("padding", 2),
    len(rows) + 1,
    block_size=page,
    table_width=changes.pop("positions", 256) // page,
    num_heads=changes.pop("group", 2) * heads,
    num_kv_heads=heads,
    dtype="bfloat16",
    **dict[str, Any](head_dim=64) | changes,
  )
  return Case(spec, split_blocks, **of_case)


# Those that the seeded bugs are put to are small.
_WHOLE = _case("whole", ((2, 128), (1, 130), (1, 20)), 64, 4, pairs=1, kv_heads=2)
_SPLIT = _case("split", ((1, 70), (2, 400)), 64, 1, positions=512)
_SMALL_PAGES = _case("page_32", ((1, 150),), 32, 8, pairs=1)
_LARGE_PAGES = _case("page_128_window", ((1, 250),), 128, 2, pairs=1, sliding_window=100)
_CAPPED = _case("soft_cap", ((1, 100),), 64, 4, pairs=1, soft_cap=2.0)
_FP8 = _case("fp8", ((2, 128), (1, 130), (1, 20)), 64, 1, pairs=1, kv_heads=2, kv_dtype="uint8")
_ROWS = ((1, 380), (5, 9), (0, 0), (3, 64))
# Six parts of one row, more than a sum of parts loads at once, among rows of one part, of two and of none.
_LONG = _case("one_long_row", ((1, 3), (2, 1000), (0, 0), (1, 290)), 64, 1, sms=9, pairs=1, positions=1024)
# The last part of the second row begins at position 128, so it has no keys.
_BEHIND = _case("shorter_than_planned", ((1, 125), (2, 127), (1, 20)), 64, 1, ahead=300, positions=512)
# Longer rows, one of them a tile and a part of the next, and padding for two tiles.
_ALONE = _case("alone", ((35, 150), (1, 130), (0, 0), (5, 9)), 64, 1, pairs=1, padding=40, alone=True)
CASES = (
  _ALONE,
  _case(
    "alone_window_head_128",
    ((20, 100), (4, 70), (3, 66)),
    16,
    2,
    head_dim=128,
    group=4,
    alone=True,
    ahead=5,
    sliding_window=40,
  ),
  _case("alone_group_of_64", ((3, 70), (1, 150)), 128, 1, group=64, queries=1, alone=True),
  _BEHIND,
  _case(
    "shorter_than_planned_in_two_blocks",
    ((2, 125), (1, 200), (1, 124), (1, 9), (1, 240)),
    32,
    1,
    ahead=250,
    sms=2,
    positions=512,
  ),
  _case("window_of_a_row_shorter_than_planned", ((1, 444), (2, 60)), 64, 1, ahead=6, sliding_window=400, positions=512),
  _WHOLE,
  _SPLIT,
  _LONG,
  _SMALL_PAGES,
  _LARGE_PAGES,
  _CAPPED,
  _FP8,
  _case("fp8_head_128", ((1, 40), (3, 330)), 16, 4, head_dim=128, group=4, kv_dtype="uint8", positions=512),
  _case("head_128", _ROWS, 64, 1, head_dim=128, group=4, positions=512),
  _case("page_16", ((1, 380), (3, 130), (5, 9), (0, 0), (1, 64)), 16, 4, pairs=1, sms=3, stages=3, positions=512),
  _case("page_16_in_two_pairs", ((2, 380), (1, 5)), 16, 3, positions=512),
  _case("page_32_window", ((3, 130), (5, 9), (1, 20)), 32, 2, sliding_window=50),
  _case("page_128_window_at_splits", ((3, 900), (1, 90)), 128, 1, sliding_window=650, positions=1024),
  _case("window_of_one", ((1, 90), (3, 200)), 64, 1, sliding_window=1),
  _case("soft_cap_at_splits", ((3, 250),), 64, 1, soft_cap=20.0),
  _case("group_of_3_at_splits", ((1, 70), (2, 600), (4, 20)), 64, 1, group=3, positions=640),
  _case("group_of_64", ((1, 380), (1, 1)), 64, 1, group=64, queries=1, positions=512),
  _case("fewer_rows_of_q_than_a_tile", ((1, 70),), 64, 1, group=1, padding=0, pairs=1),
  _case("nothing", ((5, 20),), 64, 1),
)


def test_the_long_row_has_more_parts_than_are_loaded_at_once() -> None:
  arguments = arg_specs.make_arguments(_LONG.spec)
  pieces = _LONG.plan.split(_LONG.plan.make_work(arguments.query_starts, arguments.kv_lens))
  items = pieces["decode_items"][: pieces["worker_starts"][-1]]
  assert [(items[:, 0] == row).sum() for row in range(4)] == [1, 6, 0, 2]
  assert (np.diff(pieces["worker_starts"]) > 0).all()


@pytest.mark.parametrize("case", [case for case in CASES if "split" in str(case) or "shorter" in str(case)], ids=str)
def test_these_cases_have_split_rows(case: Case) -> None:
  pieces = case.plan.split(make_work(case, arg_specs.make_arguments(case.spec)))
  assert (pieces["decode_items"][: pieces["worker_starts"][-1], 7] > 1).any()


def make_work(case: Case, arguments: Arguments) -> np.ndarray:
  """Returns the plan's array."""
  lens = arguments.kv_lens
  return case.plan.make_work(arguments.query_starts, np.where(lens > 0, lens + case.ahead, 0), lens)


def operands(case: Case, arguments: Arguments) -> tuple:
  """On the device, packed as the kernel wants them; what no row uses is NaN."""
  spec, page = case.spec, case.spec.block_size
  q = arguments.q.reshape(spec.num_tokens, spec.num_kv_heads, -1, spec.head_dim).transpose(1, 0, 2, 3)
  kv = np.full((arguments.num_blocks, spec.num_kv_heads, 2, page, spec.head_dim), np.nan, np.float32)
  for row, (keys, values) in enumerate(zip(arguments.keys, arguments.values, strict=True)):
    block, offset = np.divmod(arguments.slots(row, page), page)
    kv[block, :, 0, offset], kv[block, :, 1, offset] = keys, values
  arrays = (
    q.reshape(spec.num_kv_heads, -1, spec.head_dim).astype(jnp.bfloat16),
    conformance.stored(kv.astype(jnp.bfloat16), case.spec.stored_dtype),
    arguments.block_tables,
    arguments.kv_lens,
    arguments.query_starts,
    case.plan.split(make_work(case, arguments)),
    np.zeros((spec.num_kv_heads, spec.num_tokens), np.int32),
    None if case.alone else np.full((spec.num_tokens, spec.num_heads, spec.head_dim), UNTOUCHED, jnp.bfloat16),
  )
  return jax.tree.map(conformance.put, arrays)


def program(case: Case, module=gpu_decode, is_lowered: bool = False):
  """The call, jitted, for the interpreter unless it is only lowered."""
  interpret = None if is_lowered else RACES if case.sms == 1 else plgpu.InterpretGPUParams()
  tuning = dataclasses.replace(
    tuning_for("", case.spec.head_dim, case.spec.block_size),
    decode_ctas_per_sm=case.pairs,
    decode_stages=case.stages,
  )

  def run(*args):
    return module.decode(
      *args,
      plan=case.plan,
      scale=case.spec.scale,
      soft_cap=case.spec.soft_cap,
      tuning=tuning,
      interpret=interpret,
    )

  return jax.jit(run)


def check(case: Case, capfd: pytest.CaptureFixture[str], module=gpu_decode) -> None:
  """Runs a case, compares the decoded tokens with dense attention, the others with what was there; no races."""
  arguments = arg_specs.make_arguments(case.spec)
  out = f32(program(case, module)(*operands(case, arguments)))
  want = conformance.oracle(case.spec, arguments)
  counts = np.diff(arguments.query_starts)
  decoded = np.zeros(case.spec.num_tokens, bool)
  for row in np.flatnonzero((counts > 0) & (case.alone | (counts <= case.queries))):
    decoded[slice(*arguments.query_starts[row : row + 2])] = True
  # The result is rounded to bf16, and so were the weights, of 8 bits each; the latter errors average out.
  np.testing.assert_allclose(out[decoded], want[decoded], rtol=2.0**-8, atol=4e-3)
  np.testing.assert_array_equal(out[~decoded], 0 if case.alone else UNTOUCHED)
  assert "RACE" not in capfd.readouterr().out


# Each of these joins two things that cases above have alone: small pages and a window, a cap and splits.
SELDOM = ("page_32_window", "soft_cap_at_splits", "fp8_head_128")


@pytest.mark.parametrize(
  "case",
  [pytest.param(case, id=str(case), marks=pytest.mark.long if str(case) in SELDOM else ()) for case in CASES],
)
def test_equals_dense_attention(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
  check(case, capfd)


def reverse_items(pieces: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns a plan whose workers have each other's items, in another order."""
  items = int(pieces["worker_starts"][-1])
  return pieces | {"decode_items": pieces["decode_items"].at[:items].set(pieces["decode_items"][:items][::-1])}


def test_a_split_row_does_not_depend_on_the_order_of_items() -> None:
  """Bit for bit."""
  given, run = operands(_SPLIT, arg_specs.make_arguments(_SPLIT.spec)), program(_SPLIT)
  backwards = reverse_items(given[5])
  assert backwards["decode_items"][0, 7] > 1
  np.testing.assert_array_equal(f32(run(*given[:5], backwards, *given[6:])), f32(run(*given)))


def test_a_row_depends_neither_on_neighbors_nor_on_its_place_nor_on_the_order_of_items() -> None:
  """Bit for bit, in one executable, over three tiles and two queries, where the row is whole."""
  subject, run, results = (2, 150), None, []
  companies = ([], []), ([(3, 90), (5, 9), (1, 64)], [(1, 1)])
  for number, (before, after) in enumerate(companies):
    rows = (*before, subject, *after)
    used = sum(-(-length // 64) for _, length in rows)
    spec = ArgSpec("neighbors", rows, 16, 6, 64, 4, 2, 1, 64, dtype="bfloat16", spare_blocks=20 - used)
    case, at = Case(spec, 1), len(before)
    arguments = arg_specs.make_arguments(spec, number)
    here = slice(*arguments.query_starts[at : at + 2])
    fixed = arg_specs.make_arguments(ArgSpec("subject", (subject,), 2, 1, 64, 4, 2, 1, 64))
    arguments.q[here] = fixed.q
    arguments.keys[at][:], arguments.values[at][:] = fixed.keys[0], fixed.values[0]
    for row in range(len(rows)):
      if row != at and number == 1:
        arguments.keys[row][:], arguments.values[row][:] = np.nan, np.nan
    given = operands(case, arguments)
    run = run or program(case)
    results.append(f32(run(*given))[here])
    assert (given[5]["decode_items"][:, 7] <= 1).all()
    backwards = reverse_items(given[5])
    results.append(f32(run(*given[:5], backwards, *given[6:]))[here])
  assert np.isfinite(results[0]).all()
  for other in results[1:]:
    np.testing.assert_array_equal(other, results[0])


def unaligned_copies(case: Case, monkeypatch: pytest.MonkeyPatch, module=gpu_decode) -> list[str]:
  """Lowers the kernel for a GPU, and returns the offsets of copies between tiles and memory that may be amid a tile.

  For a copy from or to a tiled array, Pallas cuts each offset of the slice in two, tile and place in the tile
  (TileTransform), and gives both to TMA. TMA then takes of every tile what comes from that place on, and zeros for the
  rest: right for multiples of the tile only, and so wrong for queries, whose row is any multiple of the group's size.
  Warpgroup lowering requires a proof of that; Lane lowering, which this kernel is pinned to, does not. So this checks.
  """
  found, transform = [], launch_context.TileTransform.transform_index

  def checked(self, idx):
    offsets = zip(idx[-len(self.tiling) :], self.tiling, strict=True)
    found.extend(f"{i.owner} by {tile}" for i, tile in offsets if not utils.is_known_divisible(i, tile))
    checked.calls += 1
    return transform(self, idx)

  checked.calls = 0
  monkeypatch.setattr(launch_context.TileTransform, "transform_index", checked)
  given = operands(case, arg_specs.make_arguments(case.spec))
  program(case, module, is_lowered=True).trace(*given).lower(lowering_platforms=("cuda",))
  assert checked.calls >= 2, "keys and values are copied into tiles"
  return found


@pytest.mark.parametrize(
  "name", ["split", "page_128_window", "page_16", "group_of_3_at_splits", "fewer_rows_of_q_than_a_tile"]
)
def test_copies_begin_at_whole_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  case = next(case for case in CASES if case.spec.name == name)
  assert not unaligned_copies(case, monkeypatch)


def test_queries_copied_into_tiles_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
  tiled = seed_bug(gpu_decode, "smem(q_shape, transforms=(_SWIZZLED,))", "smem(q_shape, transforms=_TILED)")
  case = _case("whole_tiles", ((1, 150), (2, 129)), 64, 1, padding=1)  # else Pallas refuses q for its length already
  assert unaligned_copies(case, monkeypatch, tiled)


# A case, what is put out of order, the text, and what it becomes; the text occurs once, so that no bug rots silently.
BUGS = (
  (_SMALL_PAGES, "wrong page", "_div(base, page) + piece", "_div(base, page)"),
  (_LARGE_PAGES, "wrong half of a page", "which, pl.ds(at, rows)]", "which, pl.ds(0, rows)]"),
  (_LARGE_PAGES, "the window one too long", "seen &= keys > ", "seen &= keys >= "),
  (_WHOLE, "a query does not see itself", "end = jnp.minimum(position + 1,", "end = jnp.minimum(position,"),
  (_WHOLE, "later keys are seen", "jnp.minimum(item.row.position + 1, item.high)", "item.high"),
  (_WHOLE, "wrong head", "items[number, 1]", "_i32(0)"),
  (_WHOLE, "nothing waits for keys", "        plgpu.barrier_wait(k_ready.at[stage])\n", ""),
  (_WHOLE, "nothing waits for a free stage", "pl.when(tile >= stages)(", "pl.when(tile < 0)("),
  (_WHOLE, "always the first stage", "return ring.at[stage]", "return ring.at[pair * stages]"),
  (_WHOLE, "values past the end", "base + _KEYS > item.high)\n        def", "base > item.high)\n        def"),
  (_WHOLE, "sums are not rescaled", "acc = acc * _over_rows(decay, size, _WGMMA)", "acc = acc * 1.0"),
  (_WHOLE, "a token too many", "@pl.loop(0, item.row.count)", "@pl.loop(0, item.row.count + 1)"),
  (_WHOLE, "staged anew before it is copied",
   "      finish_copies(earlier)  # staging of the previous item\n", ""),
  (_WHOLE, "copied before it is staged",
   "result[...] = acc.astype(jnp.bfloat16)\n        plgpu.commit_smem()\n", "result[...] = acc.astype(jnp.bfloat16)\n"),
  (_SPLIT, "a tile of the next part", "items[number, 3] * geometry.block_size,",
   "items[number, 3] * geometry.block_size + 64,"),
  (_SPLIT, "an item is left out", "worker_starts[worker + 1] - start", "worker_starts[worker + 1] - start - 1"),
  (_LONG, "items of the first SM", "worker = pair * plan.num_sms + sm", "worker = pair * plan.num_sms"),
  (_SPLIT, "items of the first pair", "worker = pair * plan.num_sms + sm", "worker = sm"),
  (_LONG, "no more parts than are loaded at once", "_cdiv(count, at_once)", "_i32(1)"),
  (_SPLIT, "wrong weight of a part", "part * _over_rows(weight,", "part * _over_rows(decay,"),
  (_LONG, "parts of another row", "slot = first_slot + jnp", "slot = jnp"),
  (_SPLIT, "no part is the last one", "before + 1 == count", "before == count"),
  (_ALONE, "the first queries of a row in each item", "items[number, 4], kv_lens",
   "query_starts[items[number, 0]], kv_lens"),
  (_ALONE, "too few queries of a longer row", "functools.partial(load, plan.item_rows)",
   "functools.partial(load, plan.part_rows)"),
  (_ALONE, "padding is not filled", "jnp.where(is_row, query_starts[index + 1], self.plan.geometry.tokens)",
   "query_starts[index + 1]"),
  (_FP8, "bytes are taken for numbers", "from_fp8(loaded)", "loaded.astype(jnp.float32)"),
  (_CAPPED, "the cap not given back", "factor = call.soft_cap * _LOG2E", "factor = _LOG2E"),
)  # fmt: skip

# Twins of bugs above: another barrier of the same ring, another end of the same mask, another number of the same part.
MORE_BUGS = (
  (_FP8, "widened from the first stage", "plgpu.load(ring.at[stage, ", "plgpu.load(ring.at[0, "),
  (_FP8, "a stage is not given back", "      plgpu.barrier_arrive(free.at[stage])\n", ""),
  (_WHOLE, "nothing waits for values", "        plgpu.barrier_wait(v_ready.at[stage])\n", ""),
  (_WHOLE, "nothing waits for queries", "      plgpu.barrier_wait(q_ready)\n", ""),
  (_WHOLE, "queries of the next item too early", "(i + 1 == item.tiles) &", "(i == 0) &"),
  (_WHOLE, "a value past the end", "keys < item.high - base, loaded", "keys <= item.high - base, loaded"),
  (_SPLIT, "sum of a part not used", "part_sum[...] = peak + jnp.log2(total)", "part_sum[...] = peak"),
)  # fmt: skip


@pytest.mark.parametrize(
  ("case", "old", "new"),
  [pytest.param(case, *bug, id=name.replace(" ", "-")) for case, name, *bug in BUGS]
  + [pytest.param(case, *bug, id=name.replace(" ", "-"), marks=pytest.mark.long) for case, name, *bug in MORE_BUGS],
)
def test_seeded_bug_is_caught(case: Case, old: str, new: str, capfd: pytest.CaptureFixture[str]) -> None:
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
    check(case, capfd, seed_bug(gpu_decode, old, new))


def test_no_bug_is_not_caught(capfd: pytest.CaptureFixture[str]) -> None:
  check(_SPLIT, capfd, seed_bug(gpu_decode, "_KEYS = 64", "_KEYS = 64 "))
