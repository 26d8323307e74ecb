"""The C++ kernel for CPUs: the conformance suite, its fused form, what it refuses, and bugs that these must catch."""

from collections.abc import Callable
import dataclasses
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.paged_attention import api, arg_specs, cpu, int8_kv
from pallas_kernels.paged_attention.api import PagedAttention
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.plan import Geometry
from pallas_kernels.paged_attention.reference import rotate
from tests.kernels import conformance

_CPUINFO = pathlib.Path("/proc/cpuinfo")
_HAS_VNNI = native.level() == "x86-64-v4" and _CPUINFO.exists() and "avx512_vnni" in _CPUINFO.read_text()

pytestmark = [
  pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: XLA's attention serves here"),
  pytest.mark.usefixtures("quick_compilation"),  # of what is around the kernel
]


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
  native.build_library("paged_attention")


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
  """Stores keys and values in plain jnp, where the kernel looks for them."""
  head_dim = k.shape[2]
  page = page_of(kv, head_dim)
  block, offset = slots[:, None, None] // page, slots[:, None, None] % page
  head = jnp.arange(kv.shape[1], dtype=jnp.int32)[None, :, None]
  lane = jnp.arange(head_dim, dtype=jnp.int32)[None, None, :]
  if kv.dtype == jnp.int8:
    quad, scale = lane // 4 * 4, page * head_dim + 2 * offset + jnp.arange(2, dtype=jnp.int32)[None, None, :]
    places = quad * page + offset * 4 + lane - quad, offset // 4 * 4 * head_dim + lane * 4 + offset % 4
    for which, line in enumerate(map(int8_kv.quantize, (k, v))):
      numbers, bits = line[..., :-2], line[..., -2:]
      kv = kv.at[block, head, which, places[which]].set(numbers if which else numbers ^ -128)
      kv = kv.at[block, head, which, scale].set(bits)
    return kv
  kv = kv.at[block, head, 0, lane * page + offset].set(k.astype(kv.dtype))
  return kv.at[block, head, 1, offset * head_dim + lane].set(v.astype(kv.dtype))


def page_of(kv: jax.Array, head_dim: int) -> int:
  """Positions of a page."""
  return kv.shape[3] // int8_kv.stored_size(head_dim, kv.dtype)


def attention_alone(q, kv, block_tables, kv_lens, query_starts, *, scale, sliding_window, soft_cap) -> jax.Array:
  """`attend` with angles of 0, which stores again what the buffer holds at the queries' positions.

  In a buffer of int8 it stores into padding's block, as a line made from its own numbers may have another scale.
  """
  tokens, num_heads, head_dim = q.shape
  heads, page = kv.shape[1], page_of(kv, head_dim)
  token = jnp.arange(tokens, dtype=jnp.int32)
  row = jnp.clip(jnp.searchsorted(query_starts, token, side="right") - 1, 0, kv_lens.shape[0] - 1)
  used = token < query_starts[-1]
  position = jnp.where(used, kv_lens[row] - query_starts[row + 1] + token, 0)
  block = jnp.where(used, block_tables.at[row, position // page].get(mode="clip"), 0)
  if kv.dtype == jnp.int8:
    stored, slots = (jnp.zeros((tokens, heads, head_dim), q.dtype),) * 2, jnp.zeros_like(token)
  else:
    keys, values = jnp.moveaxis(kv.at[block].get(mode="clip"), 2, 0)  # [T, K, page * H] each
    at = (position % page)[:, None, None]
    lane = jnp.broadcast_to(jnp.arange(head_dim, dtype=jnp.int32), (tokens, heads, head_dim))
    stored = (jnp.take_along_axis(keys, lane * page + at, 2), jnp.take_along_axis(values, at * head_dim + lane, 2))
    slots = block * page + position % page
  qkv = jnp.concatenate([q.reshape(tokens, heads, -1, head_dim), *(x[:, :, None] for x in stored)], axis=2)
  geometry = Geometry(tokens, *block_tables.shape, page, num_heads, heads, head_dim, sliding_window)
  attention = PagedAttention("cpu", geometry, scale, soft_cap)
  one, zero = (jnp.full((tokens, head_dim // 2), x, jnp.float32) for x in (1, 0))
  meta = attention.meta(block_tables, kv_lens, query_starts)
  return attention.attend(qkv, one, zero, kv, meta, slots)[0]


ALONE = types.ModuleType("attention_alone")
ALONE.__dict__.update(kv_shape=cpu.kv_shape, write_kv=write_kv, ragged_paged_attention=attention_alone)


class TestFloat32(conformance.Conformance):
  implementation = ALONE
  test_write_keeps_the_rest_and_padding_touches_block_0_only = None  # of `attend`: further below
  test_write_is_in_place_when_donated = None


class TestBfloat16(conformance.Conformance):
  implementation = ALONE
  dtype = "bfloat16"
  test_equals_dense_attention = None  # its specs have dtypes of their own: TestFloat32 has run them all
  test_write_keeps_the_rest_and_padding_touches_block_0_only = None
  test_write_is_in_place_when_donated = None


class TestInt8KV(conformance.Conformance):
  """The kernel rounds queries and weights of values to 16 bits where it sums integers."""

  implementation = ALONE
  kv_dtype = "int8"
  atol = 2e-4
  test_write_keeps_the_rest_and_padding_touches_block_0_only = None
  test_write_is_in_place_when_donated = None

  @pytest.mark.parametrize(
    "spec", [spec for spec in arg_specs.CONFORMANCE if spec.block_size % 16 == spec.head_dim % 16 == 0], ids=str
  )
  def test_equals_dense_attention(self, spec: ArgSpec) -> None:
    super().test_equals_dense_attention(spec)


@pytest.mark.parametrize("kv_dtype", ["", "int8"], ids=["float32", "int8"])
def test_a_query_gives_the_same_bits_in_any_chunk(kv_dtype: str) -> None:
  """More than the suite checks: the sums of a query do not depend on the number of others in the step."""
  spec = ArgSpec("whole", ((150, 150),), 160, 2, kv_dtype=kv_dtype)
  arguments = arg_specs.make_arguments(spec)
  inputs = conformance.operands(ALONE, spec, arguments)
  whole, done = conformance.run(ALONE, spec, *inputs), 0
  for size in (16, 1, 37, 64, 31, 1):
    q = np.zeros_like(arguments.q)
    q[:size] = arguments.q[done : done + size]
    done += size
    rows = conformance.rows_of(ALONE, spec, np.array([done, 0], np.int32), np.array([0, size, size], np.int32))
    part = conformance.run(ALONE, spec, jnp.asarray(q), *inputs[1:3], *rows)[:size]
    np.testing.assert_array_equal(part, whole[done - size : done])


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("kv_dtype", ["", "int8"], ids=["float32", "int8"])
def test_what_is_not_finite_spoils_its_row_alone(kv_dtype: str, which: str) -> None:
  """So a row ends with NUMERICAL_ERROR, and no other. Earlier queries may be spoiled, too."""
  spec = ArgSpec("nan", ((20, 90), (1, 150)), 24, 2, num_heads=4, kv_dtype=kv_dtype)
  arguments = arg_specs.make_arguments(spec)
  getattr(arguments, which)[0][80, 1, 5] = np.nan
  out = conformance.run(ALONE, spec, *conformance.operands(ALONE, spec, arguments))
  spoiled = np.isnan(out).any(-1)  # [T, N]
  assert spoiled[10:20, 2:].all() and not spoiled[:, :2].any() and not spoiled[20:].any()


# --- Rotary embedding, KV write and attention in one ------------------------------------------------------------------

_FUSED = [
  ArgSpec("mixed", ((1, 40), (1, 129), (7, 7), (20, 90), (1, 1)), 40, 8),
  ArgSpec("mixed_bf16", ((1, 40), (1, 129), (7, 7), (20, 90), (1, 1)), 40, 8, dtype="bfloat16"),
  ArgSpec("many_threads", ((1, 300),) * 6 + ((60, 200),), 70, 8, num_heads=8, num_kv_heads=4),
  ArgSpec("page_8_head_24", ((1, 40), (13, 30)), 16, 3, block_size=8, num_heads=3, num_kv_heads=3, head_dim=24),
  ArgSpec("window_soft_cap", ((1, 140), (13, 130)), 16, 3, sliding_window=33, soft_cap=8.0),
]


def _inputs(spec: ArgSpec):
  """A step whose keys and values before it are in a buffer of NaN; and the rows, with other queries."""
  arguments, rng = arg_specs.make_arguments(spec), np.random.default_rng(3)
  group = spec.num_heads // spec.num_kv_heads
  shape = (spec.num_tokens, spec.num_kv_heads, group + 2, spec.head_dim)
  dtype = jnp.dtype(spec.dtype)
  qkv = rng.standard_normal(shape, np.float32).astype(dtype)
  angle = rng.uniform(0, 6, (spec.num_tokens, spec.head_dim // 2)).astype(np.float32)
  slots = np.zeros(spec.num_tokens, np.int32)
  before = ([], [], [])  # keys, values and places
  for row, (queries, length) in enumerate(spec.rows):
    places, begin = arguments.slots(row, spec.block_size), arguments.query_starts[row]
    slots[begin : begin + queries] = places[length - queries :]
    for kept, part in zip(before, (arguments.keys[row], arguments.values[row], places), strict=True):
      kept.append(part[: length - queries])

  buffer = np.full(cpu.kv_shape(arguments.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim), np.nan, dtype)
  kv = conformance.jitted(write_kv)(*map(conformance.put, (buffer, *map(np.concatenate, before))))
  rows = (arguments.block_tables, arguments.kv_lens, arguments.query_starts)
  qkv, cos, sin, slots = map(conformance.put, (qkv, np.cos(angle), np.sin(angle), slots))
  return (qkv, cos, sin, kv, *map(conformance.put, rows), slots), arguments


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_is_stored_as_the_reference_stores_it(dtype: str) -> None:
  """Bit for bit, over larger numbers that were in the slots; a number that is not finite spoils its line alone."""
  spec = ArgSpec("int8", ((1, 40), (7, 7), (20, 90)), 40, 8, dtype=dtype, kv_dtype="int8", num_heads=4)
  (qkv, cos, sin, _, *rows, slots), arguments = _inputs(dataclasses.replace(spec, kv_dtype=""))
  qkv = qkv.at[3, 0, -2, 5].set(jnp.nan).at[4, 1, -1, 6].set(-jnp.inf).at[5, 1, -2:].set(0.0)
  cos, sin = jnp.ones_like(cos), jnp.zeros_like(sin)  # no rotation, whose rounding depends on the compiler
  empty = conformance.put(conformance.empty_buffer(cpu, spec, arguments.num_blocks))
  used = int(arguments.query_starts[-1])
  before = conformance.jitted(write_kv)(empty, *(100 * qkv[:used, :, which] for which in (-2, -1)), slots[:used])
  _, written = _fused(spec, donate=False)(qkv, cos, sin, before, *rows, slots)
  wanted = conformance.jitted(write_kv)(empty, *(qkv[:used, :, which] for which in (-2, -1)), slots[:used])
  np.testing.assert_array_equal(written, wanted)


def _fused(spec: ArgSpec, donate: bool = True):
  attention = PagedAttention("cpu", spec.geometry, scale=spec.scale, soft_cap=spec.soft_cap)
  assert attention.plan is None

  def call(qkv, cos, sin, kv, tables, lens, starts, slots):
    return attention.attend(qkv, cos, sin, kv, attention.meta(tables, lens, starts), slots)

  return jax.jit(call, donate_argnums=3 if donate else ())


def check_fused(spec: ArgSpec) -> None:
  """Equals rotary embedding, write and dense attention: outputs, and every page."""
  operands, arguments = _inputs(spec)
  out, written = _fused(spec)(*operands)
  blocks, heads, page, size = arguments.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim
  q, *new = map(conformance.f32, conformance.jitted(rotate)(*operands[:3]))
  arguments.q[:] = q
  pages = np.full((2, blocks, page, heads, size), np.nan, np.float32)
  for row, (queries, length) in enumerate(spec.rows):
    block, offset = np.divmod(arguments.slots(row, page), page)
    for which, of_rows in enumerate((arguments.keys, arguments.values)):
      of_rows[row][length - queries :] = new[which][slice(*arguments.query_starts[row : row + 2])]
      pages[which, block, offset] = conformance.rounded(of_rows[row], spec.dtype)
  used = arguments.query_starts[-1]
  exact = spec.dtype == "float32"
  close = {"rtol": 0 if exact else 2.0**-7, "atol": 1e-5 if exact else 2e-2}
  np.testing.assert_allclose(conformance.f32(out)[:used], conformance.oracle(spec, arguments)[:used], **close)
  assert not conformance.f32(out)[used:].any(), "padding tokens must give zeros"
  # Block 0 is padding's. Keys lie as [K, H, page], values as [K, page, H].
  keys, values = np.moveaxis(conformance.f32(written).reshape(blocks, heads, 2, -1)[1:], 2, 0)
  keys = keys.reshape(-1, heads, size, page).transpose(0, 3, 1, 2)
  np.testing.assert_allclose(keys, pages[0, 1:], rtol=close["rtol"], atol=1e-5)
  np.testing.assert_array_equal(values.reshape(-1, heads, page, size).swapaxes(1, 2), pages[1, 1:])


@pytest.mark.parametrize("spec", _FUSED, ids=str)
def test_fused_equals_its_three_parts(spec: ArgSpec) -> None:
  check_fused(spec)


def test_fused_is_in_place_when_donated_and_harmless_otherwise() -> None:
  spec = _FUSED[0]
  operands, _ = _inputs(spec)
  buffer = operands[3]
  program = _fused(spec).lower(*operands).compile()
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes == buffer.nbytes
  assert memory.temp_size_in_bytes < buffer.nbytes // 10
  before, address = conformance.f32(buffer).copy(), buffer.unsafe_buffer_pointer()
  _, kept = _fused(spec, donate=False)(*operands)
  np.testing.assert_array_equal(conformance.f32(buffer), before)
  _, written = program(*operands)
  assert written.unsafe_buffer_pointer() == address
  np.testing.assert_array_equal(conformance.f32(written)[1:], conformance.f32(kept)[1:])


# --- What it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("index", "value", "words"),
  [
    (1, [[0, 9999, 0, 0], [1, 1, 1, 1]], r"block_tables\[0\]\[1\]=9999"),
    (1, [[0, -1, 0, 0], [1, 1, 1, 1]], r"block_tables\[0\]\[1\]=-1"),
    (2, [65, 0], r"kv_lens\[0\]=65"),
    (2, [0, 0], r"kv_lens\[0\]=0"),
    (3, [0, 3, 3], "query_starts of row 0"),
    (3, [1, 1, 1], r"query_starts\[0\]"),
  ],
)
def test_rows_that_do_not_fit_are_an_error_and_no_access(index: int, value: list, words: str) -> None:
  """A host that plans wrongly must not read or write somewhere else in the process."""
  spec = ArgSpec("bad", ((1, 20),), 2, 2, table_width=4)
  operands = list(conformance.operands(ALONE, spec, arg_specs.make_arguments(spec)))
  operands[index + 1] = jnp.asarray(value, jnp.int32)
  with pytest.raises(jax.errors.JaxRuntimeError, match=words):
    conformance.attend(ALONE, spec)(*operands).block_until_ready()


def test_a_slot_outside_of_the_pool_is_an_error() -> None:
  spec = _FUSED[0]
  (*operands, slots), _ = _inputs(spec)
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"slot_mapping\[2\]=1000000"):
    jax.block_until_ready(_fused(spec)(*operands, slots.at[2].set(1_000_000)))


@pytest.mark.parametrize(
  ("changes", "dtype", "words"),
  [
    ({"head_dim": 512}, "float32", "head_dim=512 .* are 1 to 256"),
    ({"num_heads": 98}, "float32", "49 query heads .* are 1 to 48"),
    ({}, "float16", "dtype=float16 .* are float32, bfloat16"),
  ],
)
def test_what_it_cannot_do_is_named(changes: dict, dtype: str, words: str) -> None:
  geometry = dataclasses.replace(_FUSED[0].geometry, **changes)
  with pytest.raises(NotImplementedError, match=words):
    api.check_supported("cpu", geometry, dtype)


class TestWithoutALibrary:
  @pytest.fixture(autouse=True)
  def nothing_built(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "_BUILT", tmp_path / "built")
    native.path.cache_clear()
    native.load_library.cache_clear()
    yield
    native.path.cache_clear()
    native.load_library.cache_clear()

  def test_auto_takes_the_reference_and_says_why(self) -> None:
    def check(name: str) -> None:
      api.check_supported(name, _FUSED[0].geometry, "float32")

    name, reason = api.choose_attention(api.candidates("auto", "cpu"), check)
    assert name == "reference" and "not built" in reason and "make setup" in reason
    assert api.candidates("cpu", "cpu") == ("cpu",)
    with pytest.raises(NotImplementedError, match="not built"):
      check("cpu")

  def test_no_compiler_is_one_line_and_no_failure(self, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native.main() == 0
    assert "no C++ compiler" in capsys.readouterr().err

  def test_a_compiler_that_fails_is_quoted(self, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-include", "/nowhere.h"))
    assert native.main() == 0
    assert "nowhere.h" in capsys.readouterr().err
    assert list(native._BUILT.iterdir()) == []


def test_other_sources_are_another_library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  before = native.path("paged_attention")
  source = tmp_path / "cpu.cc"
  source.write_text(native.source("paged_attention").read_text() + "\n")
  monkeypatch.setattr(native, "source", lambda name: source)
  native.path.cache_clear()
  assert native.path("paged_attention") != before
  monkeypatch.undo()
  native.path.cache_clear()
  assert native.path("paged_attention") == before


# --- Seeded bugs ------------------------------------------------------------------------------------------------------

_ROTATED = "assign(keys_to[(h + half) * page], value(key[h + half]) * c[h] "
_BUGS = {
  "mask_off_by_one": ("<int32_t>(position - begin)", "<int32_t>(position + 1 - begin)"),
  "window_off_by_one": ("position - size.window + 1 - begin, -1)", "position - size.window - begin, -1)"),
  "wrong_page": ("pool + (table[column] *", "pool + (table[column ? column - 1 : 0] *"),
  "wrong_head": ("* heads + head) * 2 * half", "* heads + (head + 1) % heads) * 2 * half"),
  "total_not_decayed": ("s.total[m] * decay + sum_of(sum)", "s.total[m] + sum_of(sum)"),
  "output_not_decayed": ("if (decay != 1.0f)", "if (decay != decay)"),
  "last_value_left_out": ("kBlock, value_at, count - from, s.out", "kBlock, value_at, count - from - 1, s.out"),
  "padding_not_zero": ("used * width), 0,", "used * width), 1,"),
  "keys_rotated_wrongly": (_ROTATED + "+", _ROTATED + "-"),
  "written_one_late": ("offset = slots[token] % page;", "offset = (slots[token] + 1) % page;"),
  "only_a_first_piece_written": ("(used + kWritten - 1) / kWritten, write_piece", "1, write_piece"),
}


_INT8_BUGS = {
  "scale_of_another_head": (
    "key_scales[j] = int8::scales_at(at,",
    "key_scales[j] = int8::scales_at(at + (pages.head ? -2 : 2) * pages.half,",
  ),
  "scales_of_keys_for_values": (
    "value_scales[j] = int8::scales_at(at,",
    "value_scales[j] = int8::scales_at(at - pages.half,",
  ),
  "quads_of_another_page": ("+ i * int8::kQuad) * H;", "+ (i ? i - 1 : i) * int8::kQuad) * H;"),
  "last_quad_left_out": ("(count + int8::kQuad - 1) / int8::kQuad", "count / int8::kQuad"),
}


def _checks() -> None:
  check_fused(_FUSED[0])
  check_fused(_FUSED[2])
  check_fused(_FUSED[4])
  spec = ArgSpec("bugs", ((1, 70), (1, 200), (20, 90)), 24, 3)
  conformance.check(ALONE, spec)


@pytest.mark.kernels
@pytest.mark.parametrize("name", _BUGS)
def test_seeded_bug_is_caught(name: str, with_bug: Callable[..., None]) -> None:
  with_bug("paged_attention", _BUGS[name])
  with pytest.raises(AssertionError):
    _checks()


def test_without_a_bug_the_same_checks_pass() -> None:
  _checks()


def _check_int8() -> None:
  spec = ArgSpec("bugs", ((1, 70), (1, 200), (20, 90)), 24, 3, kv_dtype="int8")
  conformance.check(ALONE, spec, atol=TestInt8KV.atol)


@pytest.mark.kernels
@pytest.mark.skipif(not _HAS_VNNI, reason="no VNNI: the other path serves")
@pytest.mark.parametrize(
  "name", ["scale_of_another_head", *(pytest.param(name, marks=pytest.mark.long) for name in list(_INT8_BUGS)[1:])]
)
def test_seeded_bug_of_int8_is_caught(name: str, with_bug: Callable[..., None]) -> None:
  with_bug("paged_attention", _INT8_BUGS[name])
  with pytest.raises(AssertionError):
    _check_int8()


def test_without_a_bug_int8_passes_the_same_check() -> None:
  _check_int8()
