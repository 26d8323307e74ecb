"""The TPU kernels in Pallas' simulator of a TPU: the conformance suite, races, and bugs that these checks must notice.

The simulator fills fresh memory with NaN, carries a copy out only when it is awaited, and refuses reads out of bounds;
so a wait that is missing shows as NaN. That the kernels compile for TPUs is checked elsewhere, with the whole step.
"""

from collections.abc import Callable, Iterator
import dataclasses
import types

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, arg_specs, int8_kv, tpu
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.fp8_kv import BYTES, to_fp8
from tests.kernels import conformance
from tests.kernels.seeded import seed_bug

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def simulated(quick_compilation: None) -> Iterator[None]:
  """Every kernel runs in the simulator; what a failed one left behind is dropped."""
  with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
    yield
  pltpu.reset_tpu_interpret_mode_state()


def scattered(kv: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
  """What `write_kv` must do, in plain jnp; the simulator takes a second for a thousand tokens."""
  if kv.dtype == jnp.int8:
    return scattered_int8(kv, k, v, slots)
  page, width = kv.shape[2:]
  lines = jnp.concatenate([k, v], axis=2)
  lines = jnp.pad(lines, ((0, 0), (0, 0), (0, width - lines.shape[2])))
  lines = to_fp8(lines) if kv.dtype == BYTES else lines.astype(kv.dtype)
  return kv.at[slots // page, :, slots % page].set(lines)


def scattered_int8(kv: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
  """The same for int8: each position of a head has its numbers in a line, and four bytes of scales behind the heads."""
  spans, heads, size = kv.shape[1], k.shape[1], k.shape[2]
  block, span, place = slots // (spans * 128), slots // 128 % spans, slots % 128
  kv = kv.at[block, span, 4 * heads :, :, place].set(0)  # the scales of heads that do not exist, too
  for head in range(heads):
    key, value = (int8_kv.quantize(x[:, head]) for x in (k, v))  # [T, H + 2]
    tile = place // 32 * heads + head
    line = jnp.concatenate([key[:, :size], value[:, :size]], axis=1)
    line = jnp.pad(line, ((0, 0), (0, kv.shape[4] - line.shape[1])))
    kv = kv.at[block, span, tile, place % 32].set(line)
    scales = jnp.concatenate([key[:, size:], value[:, size:]], axis=1)  # [T, 4]
    for byte in range(4):
      kv = kv.at[block, span, 4 * heads + head // 8, head % 8 * 4 + byte, place].set(scales[:, byte])
  return kv


def with_write(module: types.ModuleType, write: Callable) -> types.ModuleType:
  other = types.ModuleType(module.__name__)
  other.__dict__.update(module.__dict__, write_kv=write)
  return other


def check(module: types.ModuleType, spec: ArgSpec, call: Callable | None = None) -> None:
  """Compares one call, of a program of its own if none is given, over a buffer filled by `scattered` with the oracle.

  In bf16 the matrix unit takes weights of 8 bits. That gives relative errors of up to 2^-9, of either sign, in a sum
  whose weights add up to 1. The result is rounded once more.
  """
  arguments = arg_specs.make_arguments(spec)
  inputs = conformance.operands(with_write(module, scattered), spec, arguments)
  out = (call or conformance.attend(module, spec))(*inputs)
  assert out.dtype == jnp.dtype(spec.dtype)
  result = conformance.f32(out)
  relative, absolute = (2.0**-8, 4e-3) if spec.dtype == "bfloat16" else (0.0, 1e-5)
  np.testing.assert_allclose(result, conformance.oracle(spec, arguments), rtol=relative, atol=absolute)
  assert not result[arguments.query_starts[-1] :].any(), "padding tokens must give zeros"


def check_write(module: types.ModuleType, spec: ArgSpec, padding: int = 5) -> None:
  """Compares `write_kv` with `scattered`, bit for bit, over a buffer that held something before; block 0 is free."""
  arguments, rng = arg_specs.make_arguments(spec), np.random.default_rng(1)
  dtype = jnp.dtype(spec.stored_dtype)
  shape = tpu.kv_shape(arguments.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim, dtype)
  kv = conformance.put(conformance.stored(rng.standard_normal(shape, np.float32), spec.stored_dtype))
  slots = np.concatenate([arguments.slots(row, spec.block_size) for row in range(len(spec.rows))])
  # As in a step: of each row the last positions only, then padding, which is NaN.
  ends = np.cumsum(arguments.kv_lens[: len(spec.rows)])
  chosen = np.concatenate([np.arange(end - new, end) for end, (new, _) in zip(ends, spec.rows, strict=True)])
  keys, values = (
    conformance.put(np.pad(np.concatenate(x)[chosen], ((0, padding), (0, 0), (0, 0)), constant_values=np.nan))
    for x in (arguments.keys, arguments.values)
  )
  slots = conformance.put(np.pad(slots[chosen], (0, padding)))
  result, wanted = (np.asarray(jax.jit(f)(kv, keys, values, slots)) for f in (module.write_kv, scattered))
  np.testing.assert_array_equal(result[1:], wanted[1:])


# `mixed` has the rows of the first; a window over many pages and a cap are in the batch of the seeded bugs.
SELDOM = ("decode", "mixed_window", "soft_cap")


class TestTpu(conformance.Conformance):
  """Buffers are filled by `scattered` but where writing is what is tested, and in the test of chunks."""

  implementation = with_write(tpu, scattered)
  whole = with_write(tpu, jax.jit(tpu.write_kv))

  @pytest.mark.parametrize(
    "spec",
    [
      pytest.param(spec, id=spec.name, marks=pytest.mark.long if spec.name in SELDOM else ())
      for spec in arg_specs.CONFORMANCE
    ],
  )
  def test_equals_dense_attention(self, spec: ArgSpec) -> None:
    if spec.block_size % 8:
      with pytest.raises(NotImplementedError, match=f"block_size={spec.block_size}"):
        api.check_supported("tpu", spec.geometry, spec.dtype)
    else:
      api.check_supported("tpu", spec.geometry, spec.dtype)
      spec = conformance.with_spare_blocks(spec) if spec.name in conformance.WITH_SPARE_BLOCKS else spec
      check(self.implementation, spec, conformance.program(self.implementation, spec))

  def test_chunks_of_any_size_give_the_whole(self) -> None:
    self.implementation = self.whole
    super().test_chunks_of_any_size_give_the_whole()

  def test_write_keeps_the_rest_and_padding_touches_block_0_only(self) -> None:
    self.implementation = self.whole
    super().test_write_keeps_the_rest_and_padding_touches_block_0_only()

  def test_write_is_in_place_when_donated(self) -> None:
    """The simulator copies what it is given; that the compiled program does not is checked with the whole step."""
    kv = jnp.zeros(tpu.kv_shape(4, 16, 2, 64))
    k, slots = jnp.ones((8, 2, 64)), jnp.arange(16, 24, dtype=jnp.int32)
    (call,) = [eqn for eqn in jax.make_jaxpr(tpu.write_kv)(kv, k, k, slots).eqns if eqn.primitive.name == "pallas_call"]
    ((operand, result),) = call.params["input_output_aliases"]
    assert result == 0 and call.invars[operand].aval == call.outvars[0].aval


@pytest.mark.long  # writing and attention have a case of fp8 each in `make test`
class TestFp8KV(TestTpu):
  """In blocks of 32, one hardware tile of bytes."""

  dtype = "bfloat16"
  kv_dtype = "uint8"
  block_size = 32
  atol = 4e-3
  num_random = 2

  @pytest.mark.parametrize("spec", arg_specs.CONFORMANCE, ids=str)
  def test_equals_dense_attention(self, spec: ArgSpec) -> None:
    spec = dataclasses.replace(spec, block_size=max(32, spec.block_size), dtype=self.dtype, kv_dtype=self.kv_dtype)
    api.check_supported("tpu", spec.geometry, spec.dtype, spec.kv_dtype)
    spec = conformance.with_spare_blocks(spec) if spec.name in conformance.WITH_SPARE_BLOCKS else spec
    check(self.implementation, spec, conformance.program(self.implementation, spec))

  test_write_is_in_place_when_donated = None


@pytest.mark.long  # as above
class TestInt8KV(TestTpu):
  """In blocks of 128, a span that shares tiles of scales."""

  kv_dtype = "int8"
  block_size = 128
  num_random = 2

  @pytest.mark.parametrize("spec", arg_specs.CONFORMANCE, ids=str)
  def test_equals_dense_attention(self, spec: ArgSpec) -> None:
    spec = dataclasses.replace(spec, block_size=128, table_width=max(3, spec.table_width // 8), kv_dtype="int8")
    api.check_supported("tpu", spec.geometry, spec.dtype, spec.kv_dtype)
    spec = conformance.with_spare_blocks(spec) if spec.name in conformance.WITH_SPARE_BLOCKS else spec
    check(self.implementation, spec, conformance.program(self.implementation, spec))

  test_write_is_in_place_when_donated = None


_ROWS = ((1, 30), (40, 90), (1, 64), (3, 20), (1, 17), (2, 2))
WRITE = ArgSpec("write", (*_ROWS, *((1, 16 + i) for i in range(20)), (40, 40)), 128, 32)

ATTENTION = ArgSpec("bugs", _ROWS, 50, 6, table_width=6, num_heads=3, num_kv_heads=1, sliding_window=70, soft_cap=5.0)
ATTENTION_FP8 = dataclasses.replace(ATTENTION, block_size=32, table_width=3, dtype="bfloat16", kv_dtype="uint8")


_INT8_ROWS = ((1, 30), (40, 300), (1, 258), (3, 20), (1, 129), (2, 2))
ATTENTION_INT8 = dataclasses.replace(ATTENTION, rows=_INT8_ROWS, block_size=128, table_width=3, num_heads=9,
                                     num_kv_heads=9, sliding_window=200, kv_dtype="int8")  # fmt: skip
WRITE_INT8 = ArgSpec("int8", ((200, 300), (1, 40), (9, 260)), 210, 3, 256, 2, 9, 9, kv_dtype="int8")


class TestWrite:
  @pytest.mark.parametrize(
    "spec",
    [
      WRITE,
      dataclasses.replace(WRITE, dtype="bfloat16", block_size=32),
      dataclasses.replace(WRITE, dtype="bfloat16", block_size=32, kv_dtype="uint8"),
      dataclasses.replace(WRITE, block_size=128, kv_dtype="int8"),
      dataclasses.replace(WRITE_INT8, dtype="bfloat16"),
      ArgSpec("more_than_fits_at_once", ((1100, 1100), (1, 40)), 1101, 2, table_width=90, num_kv_heads=1),
      ArgSpec("head_128", ((1, 9), (20, 20)), 21, 2, head_dim=128, block_size=8),
    ],
    ids=["f32", "bf16", "fp8", "int8", "int8_two_spans", "more_than_fits_at_once", "head_128"],
  )
  def test_equals_a_scatter(self, spec: ArgSpec) -> None:
    check_write(tpu, spec)


class TestSupport:
  @pytest.mark.parametrize(
    ("change", "dtype", "words"),
    [
      ({}, "float16", "dtype=float16"),
      ({"block_size": 8}, "bfloat16", "block_size=8"),
      ({"block_size": 16, "kv_dtype": "uint8"}, "bfloat16", "block_size=16 for fp8 is no multiple of 32"),
      ({"block_size": 64, "kv_dtype": "int8"}, "float32", "block_size=64 for int8 is no multiple of 128"),
      ({"num_heads": 514}, "bfloat16", "257 query heads"),
      ({"num_rows": 256, "table_width": 2048}, "bfloat16", "256 block tables of 2048"),
    ],
  )
  def test_what_is_not_supported_is_named(self, change: dict, dtype: str, words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
      spec = dataclasses.replace(ArgSpec("", (), 8, 8), **change)
      api.check_supported("tpu", spec.geometry, dtype, spec.kv_dtype or None)


@dataclasses.dataclass(frozen=True)
class Bug:
  """Text of tpu.py and what it is replaced by; it must occur exactly once, so that the list cannot rot silently."""

  name: str
  old: str
  new: str


WRITE_BUGS = (
  Bug("a window is not awaited", "    read(run).wait()\n", ""),
  Bug("the last windows are not sent", "lambda run: write(run).wait())\n", "lambda run: None)\n"),
  Bug("a window is filled anew while it is sent", "        write(run - ring // 2).wait()\n", "        pass\n"),
  Bug("one position too many is written", "position < offset + counts[run]", "position <= offset + counts[run]"),
  Bug("a run is not turned", "(offset - (token - aligned) + 2 * window)", "(2 * window)"),
)

ATTENTION_BUGS = (
  Bug("pages are not awaited", "lambda copy: copy.wait())\n", "lambda copy: None)\n"),
  Bug("queries are not awaited", "    q_copy(tile, size, index % 2).wait()\n", ""),
  Bug("the last output is not awaited", "(lambda: await_out(count[0] - 1))", "(lambda: None)"),
  Bug("output is overwritten before it is sent", "(lambda: await_out(index - 2))", "(lambda: None)"),
  Bug("the pages are those of the row's begin", "tables[tile.row, first + i]", "tables[tile.row, i]"),
  Bug("all chunks go to one place", "kv_chunks.at[slot, :, i]", "kv_chunks.at[0, :, i]"),
  Bug("a query does not see itself", "seen = key <= position", "seen = key < position"),
  Bug("the window is one too wide", "key > position - sliding_window", "key >= position - sliding_window"),
  Bug("the tail is not cleared", "@pl.when(left < chunk)", "@pl.when(left < 0)"),
  Bug("sums do not decay", "totals[head, of_tile] * decay + ", "totals[head, of_tile] + "),
  Bug("queries count from a tile that was not moved", "position = first_loaded(tile, size)", "position = tile.begin"),
)


INT8_BUGS = (
  Bug(
    "scales of keys and values change places",
    "of_keys, of_values = both << 16, both &",
    "of_values, of_keys = both << 16, both &",
  ),
  Bug("all heads have the first one's scales", "[head % _HEADS : head % _HEADS + 1]", "[:1]"),
  Bug("the ninth head has scales of the first", "* heads + head // _HEADS, :, :_LANES]", "* heads, :, :_LANES]"),
  Bug("scales past the end are not cleared", "1) < left, both, jnp", "1) < chunk, both, jnp"),
  Bug("values are not scaled", "        weights *= value_scales\n", "        pass\n"),
  Bug(
    "scales weigh the sum of weights, too",
    "weights.sum(axis=1, keepdims=True)\n      if",
    "(weights * (1 if value_scales is None else value_scales)).sum(axis=1, keepdims=True)\n      if",
  ),
)
WRITE_INT8_BUGS = (
  Bug(
    "scales have runs of a window of numbers", "_runs(slots, page, window, tokens)", "_runs(slots, page, 32, tokens)"
  ),
  Bug("scales of the second span go to the first", "_SPAN, pl.ds(_SPAN // _TILE", "_SPAN * 0, pl.ds(_SPAN // _TILE"),
)


FP8_BUGS = (Bug("bytes are taken for numbers", "lines = from_fp8(lines)", "lines = lines.astype(jnp.float32)"),)


def seeded(bug: Bug) -> types.ModuleType:
  """The module with a bug in it, and with chunks and tiles so small that short rows have several."""
  module = seed_bug(tpu, bug.old, bug.new)
  module.__dict__.update(_CHUNK=32, _TILE_ROWS=32)
  return module


NO_BUG = Bug("none", '"""Paged attention as Pallas', '"""Paged attention as Pallas')


def races_of(bug: Bug, run: Callable, spec: ArgSpec) -> bool:
  """Whether the simulator sees two accesses that nothing orders; wrong numbers are not looked at."""
  with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
    run(seeded(bug), spec)
  assert simulator.races is not None
  return simulator.races.races_found


@pytest.mark.parametrize(
  ("run", "spec"),
  [
    (check_write, WRITE),
    (check_write, WRITE_INT8),
    (check, ATTENTION),
    (check, ATTENTION_FP8),
    (check, ATTENTION_INT8),
  ],
  ids=["write", "write-int8", "attention", "attention-fp8", "attention-int8"],
)
def test_no_race(run: Callable, spec: ArgSpec) -> None:
  """And small tiles and chunks give what large ones do."""
  assert not races_of(NO_BUG, run, spec)


@pytest.mark.parametrize(
  ("bug", "run", "spec"),
  [(bug, check_write, WRITE) for bug in WRITE_BUGS]
  + [(bug, check, ATTENTION) for bug in ATTENTION_BUGS]
  + [(bug, check, ATTENTION_FP8) for bug in FP8_BUGS]
  + [(bug, check, ATTENTION_INT8) for bug in INT8_BUGS]
  + [(bug, check_write, WRITE_INT8) for bug in WRITE_INT8_BUGS],
  ids=lambda value: value.name.replace(" ", "-") if isinstance(value, Bug) else "",
)
def test_seeded_bug_is_caught(bug: Bug, run: Callable, spec: ArgSpec) -> None:
  with pytest.raises(AssertionError):
    run(seeded(bug), spec)
