"""Packed matmuls on AMX tiles, emulated (emulated_tiles.h): what no machine without AMX runs otherwise.

Tiles of bytes give the bits of every other instruction set; tiles of bfloat16 have an order of their own.
"""

from collections.abc import Callable, Iterator
import ctypes
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from tests.kernels import test_grouped_matmul as grouped
from tests.kernels import test_packed_matmul as plain

_CPUINFO = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
_CAN_EMULATE = native.compiler() is not None and native.level() == "x86-64-v4" and "avx512_vnni" in _CPUINFO
_EMULATION = pathlib.Path(__file__).with_name("emulated_tiles.h")

needs_vnni = pytest.mark.skipif(not _CAN_EMULATE, reason="tiles stand beside AVX-512 with VNNI")


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
  if native.compiler() is not None:
    native.build_library("packed_matmul")


# Seeded bugs: a statement or an expression that occurs once in the kernel, and what replaces it. One library has all of
# them, and a number selects one, because each library takes a minute to compile.
BUGS_OF_BYTES = {
  "columns_of_the_left_half": ("kInPlace ? kHalf : layout.padded() * kColumns / 2", "0"),
  "scales_of_the_left_half": ("half * kLanes * sizeof(S)", "0"),
  "sums_begun_once": ("Tiles::zero<kSums>();", ""),
  "values_of_the_first_tile": ("values += kDepth", "values"),
  "codes_of_the_first_tile": ("codes += kDepth / 4 * kApart", "codes"),
  "values_of_the_first_chunk": ("values + at.values", "values"),
  "codes_of_the_first_chunk": ("codes + at.codes", "codes"),
  "codes_without_their_scales": ("values * kColumns + before", "values * kColumns"),
  "scales_of_the_first_group": ("(g + 1) * layout.code_bytes + before", "layout.code_bytes"),
  "last_inputs_in_another_shape": (
    "add_tile(std::integral_constant<int, kLast>());",
    "add_tile(std::integral_constant<int, kRest>());",
  ),
  "shape_of_whole_tiles": ("shapes.set(tile, count, inputs);", "shapes.set(tile, amx::kRows, inputs);"),
  "start_left_out": ("all_ints(chunk.start[m])", "IntVec{}"),
  "codes_without_their_zero": ("_mm512_sub_epi8((__m512i)codes, (__m512i)zero)", "(__m512i)codes"),
  "chunks_of_the_first_tile": ("scalings + tile * chunks", "scalings"),
  "rows_of_an_earlier_call": ("last == std::pair(call, begin)", "last.second == begin && last.first"),
  "sums_of_the_next_chunk": ("dots[now]", "dots[1 - now]"),
  "rows_of_the_first_tile": ("std::min(tile * R, count - R)", "std::min<int64_t>(0, count - R)"),
  "results_of_the_first_row": ("results + (row - tiled.top(tile))", "results"),
  "residual_of_the_first_row": (
    "sluice::finish<O>(sums[m - row], columns, nullptr, residual ? residual + at : nullptr, y + at);",
    "sluice::finish<O>(sums[m - row], columns, nullptr, residual ? residual + left : nullptr, y + at);",
  ),
  "always_the_first_block_placed": (
    "place_block<kBits>(layout, from, to, supers.data());",
    "place_block<kBits>(layout, weight, to, supers.data());",
  ),
  "always_the_first_block_opened": ("blocks.open(block + 1)", "blocks.open(block)"),
  "superblocks_of_the_next_block": ("supers_of_two[block % 2]", "supers_of_two[0]"),
  "superblocks_of_the_last_group": ("supers += layout.value_rows * kColumns;", ""),
  "tiles_kept": ("Tiles::release();", ""),
}
BUGS_OF_BFLOAT16 = {
  "a_part_left_out": ("_mm512_sub_ps(v, _mm512_castsi512_ps(high))", "_mm512_setzero_ps()"),
  "middle_part_of_rows_left_out": ("load_rows(1);\n        add_part();", ""),
  "middle_part_of_columns_left_out": ("load_columns(1);\n      add_part();", ""),
  "columns_of_the_next_terms": ("(pair * deep(D) + k / kDepth)", "(pair * deep(D))"),
  "rows_of_the_first_pair": ("(pair * deep(D) + k / kDepth)", "(k / kDepth)"),
  "sums_begun_anew": ("k == 0", "true"),
  "sums_stored_at_the_end_alone": ("row_pairs > 1 || last", "last"),
  "what_was_made_twice_over": ("std::swap(ready, next);", ""),
  "always_the_first_block": ("last ? block + 1 : block", "block"),
  "rows_behind_the_last": ("m < std::min(M, top + 2 * tile_rows)", "m < std::min(M, top + 2 * tile_rows) - 1"),
  "one_row_of_a_tile": ("i * amx::kDepth", "(i ? i - 1 : 0) * amx::kDepth"),
  "one_tile_of_a_pair": ("tile % 2 * amx::kTile", "0"),
  "results_of_the_first_tile": ("(m - top) / tile_rows * 2 * amx::kRows", "0"),
  "odd_terms_left_out": (
    "k + 1 < left ? load(at + kColumns + half * 16) : Vec{}",
    "k + 2 < left ? load(at + kColumns + half * 16) : Vec{}",
  ),
}
BUGS = BUGS_OF_BYTES | BUGS_OF_BFLOAT16


def make_switchable(number: int, right: str, wrong: str) -> tuple[str, str]:
  """Returns the text and a replacement that is wrong while the bug of this number is selected."""
  if right.endswith(";"):
    return right, f"if (SluiceSeededBug == {number}) {{ {wrong} }} else {{ {right} }}"
  return right, f"(SluiceSeededBug == {number} ? ({wrong}) : ({right}))"


SEEDED = [make_switchable(number, *bug) for number, bug in enumerate(BUGS.values(), 1)]


_EMULATES = (f'-DSLUICE_EMULATED_TILES="{_EMULATION}"',)


@dataclasses.dataclass(frozen=True)
class Emulated:
  """A library whose tiles are emulated."""

  compiled_library: ctypes.CDLL

  def count_products(self) -> int:
    """Returns the number of products of tiles of bytes since the last call."""
    self.compiled_library.SluiceTileProducts.restype = ctypes.c_int64
    return self.compiled_library.SluiceTileProducts()

  def forget(self) -> None:
    """Begins the counts and faults anew."""
    for name in ("SluiceTileFault", "SluiceTileProducts", "SluiceTilesHeld"):
      getattr(self.compiled_library, name)()

  def check_faults(self) -> None:
    """Fails if an instruction would have faulted on a processor, or a thread has kept its tiles."""
    self.compiled_library.SluiceTileFault.restype = ctypes.c_char_p
    assert self.compiled_library.SluiceTileFault() is None
    self.compiled_library.SluiceTilesHeld.restype = ctypes.c_int64
    assert self.compiled_library.SluiceTilesHeld() == 0


@pytest.fixture
def with_tiles(with_bug: Callable[..., ctypes.CDLL]) -> Iterator[Callable[..., Emulated]]:
  """Replaces the kernel by one with emulated tiles, and the seeded bug of a name, if any, until the test ends."""
  number = None

  def replace(bug: str = "") -> Emulated:
    nonlocal number
    emulated = Emulated(with_bug("packed_matmul", *SEEDED, flags=_EMULATES))
    number = ctypes.c_int32.in_dll(emulated.compiled_library, "SluiceSeededBug")
    assert emulated.compiled_library.SluiceTileTypes() & 1
    emulated.forget()
    number.value = 1 + list(BUGS).index(bug) if bug else 0
    return emulated

  yield replace
  if number is not None:
    number.value = 0


def check_grouped(emulated: Emulated, x: np.ndarray, weight: grouped.GroupedWeight, uses_tiles: bool = True) -> None:
  """Compares with the reference, bit for bit, and notes whether tiles multiplied."""
  emulated.count_products()
  grouped.check_product(x, weight)
  assert (emulated.count_products() > 0) == uses_tiles
  emulated.check_faults()


# --- Tiles of bytes ---------------------------------------------------------------------------------------------------


def check_all_bytes(emulated: Emulated) -> None:
  """What the seeded bugs must not pass: rests of tiles, last chunks, odd rows and columns, superblocks, residuals.

  From 1,024 columns on, a thread multiplies several blocks without a pause.
  """
  check_grouped(emulated, grouped.make_rows(21, 192), grouped.make_weight(192, 70, 4, 6, offsets=True))
  check_grouped(emulated, grouped.make_rows(19, 208), grouped.make_weight(208, 33, 6, 1, dtype="float32"))
  check_grouped(emulated, grouped.make_rows(37, 268), grouped.make_weight(268, 40, 8, 1, dtype="float32"))
  check_grouped(emulated, grouped.make_rows(18, 256), grouped.make_superblocks(256, 1030, "Q4_K"))
  for rows in (13, 14):  # one tile of the same weight, from call to call
    check_grouped(emulated, grouped.make_rows(rows, 256), grouped.make_weight(256, 1030, 8, 4))
  x, weight = grouped.make_rows(19, 256), grouped.make_weight(256, 40, 8)
  residual = grouped.make_rows(20, 40)[:19]
  found = grouped.multiply(x, weight, residual=jnp.asarray(residual))
  np.testing.assert_array_equal(found, residual + grouped.multiply(x, weight))
  emulated.check_faults()


@pytest.mark.kernels
@needs_vnni
def test_tiles_of_bytes_have_the_bits_of_the_reference(with_tiles: Callable[..., Emulated]) -> None:
  emulated = with_tiles()
  assert emulated.compiled_library.SluiceTileTypes() == 3
  check_all_bytes(emulated)
  for bits in (4, 6, 8):
    for rows in (12, 13, 16, 17, 25, 31, 33, 70):  # up to five tiles of one size, of which the last begins earlier
      check_grouped(emulated, grouped.make_rows(rows, 192), grouped.make_weight(192, 70, bits, 3))
    for offsets in (False, True):
      for inputs, outputs, groups, dtype in (
        (128, 32, 4, "float16"),
        (256, 33, 2, "float32"),
        (128, 33, 2, "float16"),
        (512, 1, 1, "float32"),
        (2052, 64, 1, "float16"),
        (264, 100, 1, "float16"),
        (1040, 40, 5, "float32"),
      ):
        weight = grouped.make_weight(inputs, outputs, bits, groups, offsets, dtype)
        check_grouped(emulated, grouped.make_rows(22, inputs), weight)
  for kind in ("Q4_K", "Q5_K"):
    for outputs, rows in ((70, 17), (2050, 31)):
      check_grouped(emulated, grouped.make_rows(rows, 512), grouped.make_superblocks(512, outputs, kind))


@pytest.mark.kernels
@needs_vnni
def test_few_rows_and_small_chunks_stay_with_vnni(with_tiles: Callable[..., Emulated]) -> None:
  emulated = with_tiles()
  for rows, groups, uses_tiles in ((11, 3, False), (12, 3, True), (15, 6, False), (16, 6, True), (70, 12, False)):
    weight = grouped.make_weight(192, 70, 8, groups)
    check_grouped(emulated, grouped.make_rows(rows, 192), weight, uses_tiles)
  check_grouped(emulated, grouped.make_rows(70, 128), grouped.make_weight(128, 70, 8), False)  # one chunk
  check_grouped(emulated, grouped.make_rows(70, 512), grouped.make_superblocks(512, 70, "Q6_K"), False)


@pytest.mark.kernels
@needs_vnni
def test_the_tests_of_other_instruction_sets_pass_on_tiles(with_tiles: Callable[..., Emulated]) -> None:
  """Batches, greatest sums, zeros, NaN, norms, gates, residuals, and rows that are not in use."""
  emulated = with_tiles()
  for bits in (4, 6, 8):
    grouped.test_threads(bits)
    grouped.test_a_row_has_the_same_bits_in_any_batch(bits)
    grouped.test_rows_behind_those_in_use_are_left_out(bits)
    for dtype in ("float32", "bfloat16"):
      grouped.test_norm_gate_and_residual_are_those_of_the_plain_kernel(bits, dtype)
    assert emulated.count_products()
    most = (1 << bits) - 1
    codes = np.full((512, 40), most, np.uint8)
    codes[::3] = 0
    x = np.ones((16, 512), np.float32)
    x[8:] = -1
    check_grouped(emulated, x, grouped.GroupedWeight(codes, np.ones((1, 40), np.float32), bits))
  for bad in (np.nan, np.inf, -np.inf):
    grouped.test_numbers_that_are_not_finite_stay_in_their_row(bad)
  x, weight = grouped.make_rows(20, 256), grouped.make_weight(256, 40, 8, 2, offsets=True)
  x[0], x[9, :128], x[19, 128:] = 0, 0, 1e-38
  check_grouped(emulated, x, weight)


@pytest.mark.kernels
@needs_vnni
@pytest.mark.parametrize("name", BUGS_OF_BYTES)
def test_seeded_bug_of_tiles_of_bytes_is_caught(name: str, with_tiles: Callable[..., Emulated]) -> None:
  emulated = with_tiles(name)
  with pytest.raises(AssertionError):
    check_all_bytes(emulated)


@pytest.mark.kernels
@needs_vnni
@pytest.mark.parametrize("bug", [-1, -2])
def test_tiles_that_multiply_differently_are_not_used(
  bug: int, tmp_path: pathlib.Path, with_tiles: Callable[..., Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
  """The kernel multiplies a small matrix at first. Here tiles take unsigned codes for signed ones, or the other way."""
  copy = tmp_path / "copy.so"  # which has not looked yet
  shutil.copyfile(with_tiles().compiled_library._name, copy)
  emulated = Emulated(ctypes.CDLL(str(copy)))
  ctypes.c_int32.in_dll(emulated.compiled_library, "SluiceSeededBug").value = bug
  assert emulated.compiled_library.SluiceTileTypes() == 1
  entry = jax.ffi.pycapsule(emulated.compiled_library.SluicePackedMatmul)
  jax.ffi.register_ffi_target(tmp_path.name, entry, platform="cpu")
  monkeypatch.setattr(
    native, "bind_call", lambda _, *result, **options: jax.ffi.ffi_call(tmp_path.name, *result, **options)
  )
  check_grouped(emulated, grouped.make_rows(30, 192), grouped.make_weight(192, 70, 8, 3), uses_tiles=False)


# --- Tiles of bfloat16 ------------------------------------------------------------------------------------------------


def check_all_bfloat16() -> None:
  plain.check(70, 162, 100)
  plain.check(70, 163, 100, "bfloat16", "float32")


@pytest.mark.kernels
@needs_vnni
def test_tiles_of_bfloat16_are_as_exact_as_other_sums(with_tiles: Callable[..., Emulated]) -> None:
  emulated = with_tiles()
  check_all_bfloat16()
  for int8 in (False, True):
    for rows in (16, 25, 37, 64, 65, 100):
      plain.test_any_number_of_rows(rows, int8, False)
    plain.check(131, 256, 300, int8=int8)
    plain.test_in_any_order_it_is_no_further_from_the_product(int8)
  for dtype, result in (("float32", None), ("bfloat16", None), ("bfloat16", "float32")):
    for inputs, outputs in ((1, 1), (7, 31), (64, 33), (300, 100)):
      plain.test_any_matrix(inputs, outputs, dtype, result, False, 30, False)
  plain.test_rows_behind_those_in_use_are_left_out(70, False, True)
  plain.test_a_bfloat16_matrix_is_widened_exactly(False)
  for dtype in ("float32", "bfloat16"):
    plain.test_the_norm_before_it((200, 768), dtype, False)
    plain.check_gated(70, 768, dtype, False)
  emulated.check_faults()


@pytest.mark.kernels
@needs_vnni
@pytest.mark.parametrize("name", BUGS_OF_BFLOAT16)
def test_seeded_bug_of_tiles_of_bfloat16_is_caught(name: str, with_tiles: Callable[..., Emulated]) -> None:
  with_tiles(name)
  with pytest.raises(AssertionError):
    check_all_bfloat16()


# --- The emulation and the instructions themselves --------------------------------------------------------------------

_PROBE = """
#include "pallas_kernels/packed_matmul/tiles.h"
using sluice::amx::Tiles;
extern "C" {
void Configure(const void* from) {
  sluice::amx::Shapes shapes;  // aligned
  std::memcpy(&shapes, from, sizeof shapes);
  Tiles::configure(shapes);
}
void Release() { Tiles::release(); }
void Load(int tile, const void* from, int64_t stride) {
  tile == 0 ? Tiles::load<0>(from, stride) : tile == 1 ? Tiles::load<1>(from, stride) : Tiles::load<2>(from, stride);
}
void Store(void* to, int64_t stride) { Tiles::store<0>(to, stride); }
void Zero() { Tiles::zero<0>(); }
void AddSigned() { Tiles::add_signed<0, 1, 2>(); }
void AddUnsigned() { Tiles::add_unsigned<0, 1, 2>(); }
void AddBfloat16() { Tiles::add_bfloat16<0, 1, 2>(); }
void AddTwice() { Tiles::add_signed<0, 1, 1>(); }
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
  """The emulated instructions alone."""
  folder = tmp_path_factory.mktemp("probe")
  (folder / "probe.cc").write_text(_PROBE)
  flags = ("-O0", "-w", *_EMULATES)
  library = ctypes.CDLL(str(native.compile_library(folder / "probe.cc", folder / "probe.so", flags)))
  library.SluiceTileFault.restype = ctypes.c_char_p
  for name in ("Load", "Store"):
    getattr(library, name).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64][-2 if name == "Store" else 0 :]
  return library


def shapes_of(*tiles: tuple[int, int], palette: int = 1) -> np.ndarray:
  """What `ldtilecfg` reads, for tiles of some rows and bytes."""
  memory = np.zeros(64, np.uint8)
  memory[0] = palette
  for tile, (rows, row_bytes) in enumerate(tiles):
    memory[16 + 2 * tile], memory[48 + tile] = row_bytes, rows
  return memory


def configure(library: ctypes.CDLL, shapes: np.ndarray) -> bytes | None:
  library.Configure(ctypes.c_void_p(shapes.ctypes.data))
  return library.SluiceTileFault()


@needs_vnni
def test_emulated_tiles_multiply_as_documented(probe: ctypes.CDLL) -> None:
  """Rows of any stride, tiles of any shape, the greatest sums without saturation, and zeros beyond a tile's shape."""
  rng = np.random.default_rng(0)
  for m, n, k in ((16, 16, 16), (5, 16, 3), (1, 1, 1), (16, 7, 16)):
    a = rng.integers(-128, 128, (m, 4 * k + 12)).astype(np.int8)
    b = rng.integers(0, 256, (k, 4 * n + 20)).astype(np.uint8)
    a[0, : 4 * k], b[:, :4] = -128, 255
    c = rng.integers(-(2**30), 2**30, (m, n + 3)).astype(np.int32)
    assert configure(probe, shapes_of((m, 4 * n), (m, 4 * k), (k, 4 * n))) is None
    for tile, array in enumerate((c, a, b)):
      probe.Load(tile, array.ctypes.data, array.strides[0])
    probe.AddUnsigned()
    probe.AddUnsigned()
    probe.AddSigned()
    found = np.full((m, n + 5), 7, np.int32)
    probe.Store(found.ctypes.data, found.strides[0])
    columns = b[:, : 4 * n].reshape(k, n, 4).transpose(0, 2, 1).reshape(4 * k, n)
    twice, once = columns.astype(np.int64), columns.view(np.int8).astype(np.int64)
    expected = c[:, :n] + a[:, : 4 * k].astype(np.int64) @ (2 * twice + once)
    np.testing.assert_array_equal(found[:, :n], expected)
    np.testing.assert_array_equal(found[:, n:], 7)
    assert probe.SluiceTileFault() is None
  probe.Zero()
  probe.Store(found.ctypes.data, found.strides[0])
  np.testing.assert_array_equal(found[:, :7], 0)


@needs_vnni
def test_emulated_tiles_add_bfloat16_as_documented(probe: ctypes.CDLL) -> None:
  """Even and odd terms have a sum each, and numbers below 2**-126 are zeros."""
  rng = np.random.default_rng(1)
  a = rng.standard_normal((6, 20)).astype(jnp.bfloat16)
  b = rng.standard_normal((20, 9)).astype(jnp.bfloat16)
  a[2, 3], a[3], b[:, 4] = 1e-39, 1e-30, 1e-20
  b[:, 4][a[0] != 0] = 1e-20
  paired = np.ascontiguousarray(b.reshape(10, 2, 9).transpose(0, 2, 1))
  assert configure(probe, shapes_of((6, 36), (6, 40), (10, 36))) is None
  found = np.ones((6, 9), np.float32)
  for tile, array in enumerate((found, a, paired)):
    probe.Load(tile, array.ctypes.data, array.strides[0])
  probe.AddBfloat16()
  probe.Store(found.ctypes.data, found.strides[0])
  left, right = a.astype(np.float64), b.astype(np.float64)
  np.testing.assert_allclose(found, 1 + left @ right, rtol=1e-5, atol=1e-6)
  found[...] = 0
  probe.Zero()
  probe.AddBfloat16()
  probe.Store(found.ctypes.data, found.strides[0])
  assert found[3, 4] == 0  # products of 1e-50
  assert found[3, 0] != 0
  assert probe.SluiceTileFault() is None


@needs_vnni
def test_what_faults_on_a_processor_is_noted(probe: ctypes.CDLL) -> None:
  right = shapes_of((5, 64), (5, 64), (16, 64))

  def check(fault: bytes, *calls: str) -> None:
    for call in calls:
      getattr(probe, call)()
    assert probe.SluiceTileFault() == fault

  probe.Release()
  check(b"no tiles are configured", "AddSigned")
  wrong = {
    b"ldtilecfg: palette": shapes_of((5, 64), palette=2),
    b"ldtilecfg: rows": shapes_of((17, 64)),
    b"ldtilecfg: bytes of a row": shapes_of((5, 68)),
    b"ldtilecfg: either rows or bytes are 0": shapes_of((0, 64)),
    b"ldtilecfg: tile beyond the last": shapes_of(*[(1, 4)] * 9),
  }
  for fault, shapes in wrong.items():
    assert configure(probe, shapes) == fault
  reserved = right.copy()
  reserved[15] = 1
  assert configure(probe, reserved) == b"ldtilecfg: reserved bytes"
  for fault, shapes in {
    b"columns do not match": shapes_of((5, 60), (5, 64), (16, 64)),
    b"rows do not match": shapes_of((4, 64), (5, 64), (16, 64)),
    b"terms do not match": shapes_of((5, 64), (5, 60), (16, 64)),
    b"the tile has no rows": shapes_of((5, 64), (5, 64)),
    b"bytes of a row are no multiple of 4": shapes_of((5, 64), (5, 62), (16, 64)),
  }.items():
    assert configure(probe, shapes) is None
    check(fault, "AddSigned")
  assert configure(probe, right) is None
  check(b"a tile occurs twice", "AddTwice")
  probe.AddUnsigned()
  assert probe.SluiceTileFault() is None


@needs_vnni
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_library_has_the_instructions() -> None:
  done = subprocess.run(
    ["objdump", "-d", "--no-show-raw-insn", str(native.path("packed_matmul"))],
    capture_output=True,
    text=True,
    check=True,
  )
  found = set(re.findall(r"\t(ldtilecfg|tile\w+|tdp\w+|xgetbv|cpuid|syscall)\b", done.stdout))
  wanted = {"ldtilecfg", "tilezero", "tileloadd", "tilestored", "tdpbssd", "tdpbsud", "tdpbf16ps", "tilerelease"}
  assert found >= wanted | {"xgetbv", "cpuid"}
  # Codes, values and sums, as objdump prints them: of whole tiles, rests and last chunks.
  for name in ("tdpbssd", "tdpbsud"):
    products = set(re.findall(name + r" +(%tmm\d,%tmm\d,%tmm\d)", done.stdout))
    assert products == {f"%tmm{tile + 1},%tmm{tile},%tmm0" for tile in (2, 4, 6)}


def test_the_environment_forbids_tiles() -> None:
  """And a processor without them has none, although the library has the instructions."""
  script = "from pallas_kernels.packed_matmul import api; print(*api.find_tile_types())"
  for wanted, flags in (("", ("amx_bf16", "amx_int8")), ("off", ())):
    done = subprocess.run(
      [sys.executable, "-c", script],
      env={"SLUICE_AMX": wanted, "PATH": "", "JAX_PLATFORMS": "cpu"},
      cwd=native._ROOT,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    if not all(flag in _CPUINFO for flag in flags) or wanted == "off":
      assert done.stdout.split() == []
