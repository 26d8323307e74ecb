"""The plain jnp implementation: the conformance suite, what holds for it alone, and bugs that the suite must catch."""

import contextlib
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from engine.device.options import BuildOptions
from engine.settings import declared_settings
from pallas_kernels.paged_attention import api, arg_specs, fp8_kv, int8_kv, reference
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from tests.kernels import conformance


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> None:
  """Compiles quickly, but where bits are compared."""
  if request.node.get_closest_marker("compares_bits") is None:
    request.getfixturevalue("quick_compilation")


class TestReference(conformance.Conformance):
  implementation = reference


@pytest.mark.long
class TestInt8KV(conformance.Conformance):
  implementation = reference
  kv_dtype = "int8"
  num_random = 3


@pytest.mark.long
class TestFp8KV(conformance.Conformance):
  implementation = reference
  kv_dtype = "uint8"
  num_random = 3


def test_memory_grows_neither_with_the_pool_nor_with_the_table() -> None:
  """Nothing of the pool's or the table's size is ever made: the temporaries of the compiled program stay the same."""

  def temporaries(spec: ArgSpec) -> int:
    inputs = conformance.operands(reference, spec, arg_specs.make_arguments(spec))
    return conformance.attend(reference, spec).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

  rows = ((1, 30), (20, 40))
  small = temporaries(ArgSpec("small", rows, 32, 4, table_width=8))
  large = temporaries(ArgSpec("large", rows, 32, 4, table_width=512, spare_blocks=4000))
  row_of_table = 4 * (512 - 8)
  assert large <= small + 8 * row_of_table


@pytest.mark.parametrize(
  ("name", "kv_dtype", "choices"),
  [("gpu", "int8", "auto or fp8"), ("portable", "int8", "auto or fp8"), ("cpu", "fp8", "auto or int8")],
)
def test_kv_that_a_kernel_does_not_have_is_refused_with_what_it_has(name: str, kv_dtype: str, choices: str) -> None:
  geometry = ArgSpec("refused", (), 8, 8, 32).geometry
  words = rf"kv_dtype={kv_dtype}: paged attention \({name}\) has no {kv_dtype} KV; set --kv_dtype to {choices}$"
  with pytest.raises(NotImplementedError, match=words):
    api.check_supported(name, geometry, "bfloat16", api.EIGHT_BIT_KV[kv_dtype])


@pytest.mark.parametrize(("name", "kv_dtype"), [("gpu", "fp8"), ("portable", "fp8"), ("tpu", "fp8"), ("tpu", "int8")])
def test_kv_of_8_bits_is_supported_at_the_preferred_block_size(name: str, kv_dtype: str) -> None:
  dtype = api.EIGHT_BIT_KV[kv_dtype]
  size = max(32, api.preferred_block_size(name, dtype))
  api.check_supported(name, ArgSpec("", (), 8, 8, size).geometry, "bfloat16", dtype)


def test_the_settings_name_the_same_dtypes() -> None:
  (declared,) = [each for each in declared_settings(BuildOptions) if each.name == "kv_dtype"]
  assert declared.setting.choices == ("auto", *api.EIGHT_BIT_KV)


_SEEDED = ArgSpec("bugs", ((1, 70), (1, 200), (20, 90)), 24, 3)


def _check_seeded(kv_dtype: str = "") -> None:
  """With every query a tile of its own, which compiles in half the time: what the bugs are in serves both forms."""
  spec = dataclasses.replace(_SEEDED, kv_dtype=kv_dtype)
  conformance.check(reference, spec, conformance.attend(reference, spec, invariant=True))


def _off_by_one(*args, original, seen=None, **masks):
  return original(*args, seen=None if seen is None else jnp.roll(seen, 1, -1), **masks)


def _tail_unmasked(*args, original, in_use=None, **masks):
  return original(*args, in_use=None if in_use is None else jnp.ones_like(in_use), **masks)


def _past_the_end_of_a_shorter_row(*args, original, live=None, **masks):
  return original(*args, live=None if live is None else jnp.ones_like(live), **masks)


def _a_query_left_out(queries, keys, *, original):
  return original((queries[0], *queries[:-1]) if isinstance(queries, tuple) else queries, keys)


def _wrong_page(kv, tables, chunks, pages, which, *, original):
  return original(kv, jnp.roll(tables, 1, axis=1), chunks, pages, which)


def _next_chunk_not_read(kv, tables, chunks, pages, which, *, original):
  return original(kv, tables, jnp.zeros_like(chunks), pages, which)


def _keys_for_values(kv, tables, chunks, pages, which, *, original):
  return original(kv, tables, chunks, pages, jnp.zeros_like(which))


def _sum_not_used(state, *, original):
  del original
  return state[2]


def _peak_starts_too_high(shape, head_dim, *, original):
  peak, *rest = original(shape, head_dim)
  return jnp.full_like(peak, 200.0), *rest


def _written_one_slot_late(kv, k, v, slots, *, original):
  return original(kv, k, v, slots + 1)


@pytest.mark.kernels
@pytest.mark.parametrize(
  ("name", "bug"),
  [
    ("_step", _off_by_one),
    ("_step", _tail_unmasked),
    ("_step", _past_the_end_of_a_shorter_row),
    ("_scores", _a_query_left_out),
    ("_load", _wrong_page),
    ("_load", _next_chunk_not_read),
    ("_load", _keys_for_values),
    ("_finish", _sum_not_used),
    ("_start", _peak_starts_too_high),
    ("write_kv", _written_one_slot_late),
  ],
  ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_seeded_bug_is_caught(name: str, bug, monkeypatch: pytest.MonkeyPatch) -> None:
  original = getattr(reference, name)
  monkeypatch.setattr(reference, name, lambda *args, **named: bug(*args, original=original, **named))
  with pytest.raises(AssertionError):
    _check_seeded()


def _scale_of_another_head(lines):
  return int8_kv.dequantize(lines.at[..., -int8_kv.SCALE_BYTES :].set(jnp.roll(lines, 1, axis=1)[..., -2:]))


def _scale_of_an_earlier_token(kv, k, v, slots, *, write_kv):
  """Keeps the scales that are in the slots."""
  after = write_kv(write_kv(kv, 2 * k, 2 * v, slots), k, v, slots)
  return after.at[..., -2:].set(write_kv(kv, 2 * k, 2 * v, slots)[..., -2:])


@pytest.mark.parametrize("bug", ["", "scale of another head", "scale of an earlier token"])
def test_bugs_of_int8_scales_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
  if bug == "scale of another head":
    monkeypatch.setattr(reference, "dequantize", _scale_of_another_head)
  if bug == "scale of an earlier token":
    monkeypatch.setattr(
      reference, "write_kv", functools.partial(_scale_of_an_earlier_token, write_kv=reference.write_kv)
    )
  with pytest.raises(AssertionError) if bug else contextlib.nullcontext():
    _check_seeded("int8")


def test_an_overwritten_slot_has_the_new_scale() -> None:
  """A large key before does not spoil a small one after it."""
  kv = jnp.zeros(api.kv_shape(2, 4, 1, 8, dtype=jnp.int8), jnp.int8)
  small, slots = jnp.full((1, 1, 8), 1e-3), jnp.array([5])
  for x in (1e3 * jnp.ones_like(small), small):
    kv = reference.write_kv(kv, x, -x, slots)
  found = int8_kv.dequantize(kv)[1, :, 0, 1]
  np.testing.assert_allclose(found, [small[0, 0], -small[0, 0]], rtol=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_stays_so(bad: float) -> None:
  """So the row ends with NUMERICAL_ERROR, as with float KV."""
  x = np.ones((3, 16), np.float32)
  x[1, 7] = bad
  found = np.asarray(int8_kv.dequantize(int8_kv.quantize(jnp.asarray(x))))
  assert np.isnan(found[1]).all() and np.array_equal(found[[0, 2]], conformance.rounded(x[[0, 2]], "int8"))


_BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)  # every number of it


def _check_fp8(to_fp8) -> None:
  """Compares fp8 with ml_dtypes' rounding of finite numbers up to 448; beyond that it is 448, and never NaN."""
  found = np.asarray(fp8_kv.from_fp8(to_fp8(jnp.asarray(_BFLOAT16))))
  given = _BFLOAT16.astype(np.float32)
  finite = np.isfinite(given)
  wanted = np.clip(given[finite], -448, 448).astype(jnp.float8_e4m3fn).astype(np.float32)
  np.testing.assert_array_equal(found[finite], wanted)
  assert np.isnan(found[~finite]).all()


def test_numbers_beyond_the_largest_of_fp8_become_the_largest() -> None:
  _check_fp8(fp8_kv.to_fp8)


@pytest.mark.parametrize(
  "bug",
  [
    lambda x: x.astype(jnp.float8_e4m3fn),  # NaN beyond 448
    lambda x: jnp.clip(x, -240, 240).astype(jnp.float8_e4m3fn),  # the largest of another fp8
    lambda x: jnp.nan_to_num(jnp.clip(x, -448, 448)).astype(jnp.float8_e4m3fn),
  ],
  ids=["not clamped", "clamped too low", "NaN lost"],
)
def test_wrong_conversions_to_fp8_are_caught(bug) -> None:
  with pytest.raises(AssertionError):
    _check_fp8(lambda x: bug(x).view(fp8_kv.BYTES))


def test_without_a_bug_the_same_check_passes() -> None:
  _check_seeded()
