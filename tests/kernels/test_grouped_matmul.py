"""Products with weights of 4, 6 and 8 bits by group: the reference's bits, in any batch, on every instruction set."""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.grouped_weight import GroupedWeight
from models.layers import RMSNorm
from pallas_kernels import native
from pallas_kernels.packed_matmul import api

SUPERBLOCKS = ("Q4_K", "Q5_K", "Q6_K")
pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: XLA's matmul serves here")

_FUSES = not native.level().startswith("x86-64") or native.level() in ("x86-64-v3", "x86-64-v4")


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
  native.build_library("packed_matmul")


def make_weight(
  inputs: int, outputs: int, bits: int, groups: int = 1, offsets: bool = False, dtype: str = "float16"
) -> GroupedWeight:
  rng = np.random.default_rng(inputs + outputs)
  codes = rng.integers(0, 1 << bits, (inputs, outputs)).astype(np.uint8)
  scales = (rng.standard_normal((groups, outputs)) / (1 << bits)).astype(dtype)
  return GroupedWeight(codes, scales, bits, 1, scales[::-1] * scales.dtype.type(3) if offsets else None)


def make_superblocks(inputs: int, outputs: int, kind: str) -> GroupedWeight:
  """A weight as of GGUF's K types, whose scales are products of what a superblock holds."""
  rng = np.random.default_rng(inputs + outputs)
  bits, supers = (4 if kind == "Q4_K" else 6), (inputs // 256, outputs)
  codes = rng.integers(0, 1 << bits, (inputs, outputs)).astype(np.uint8)
  step = (rng.standard_normal(supers) / (1 << bits) / 32).astype(np.float16)
  step.flat[0] = 6e-8  # products that float16 rounds to its subnormal numbers, or ties
  steps = np.ascontiguousarray(step)[..., None]
  if kind == "Q6_K":
    factors = rng.integers(-128, 128, (*supers, 16)).astype(np.int8)
    parts, scales, offsets = [factors.view(np.uint8), steps.view(np.uint8)], steps.astype(np.float32) * factors, None
  else:
    factors, minima = rng.integers(0, 64, (2, *supers, 8)).astype(np.uint8)
    least = (steps * np.float16(0.7)).astype(np.float16)
    high = [values[..., :4] | values[..., 4:] >> 4 << 6 for values in (factors, minima)]
    parts = [steps.view(np.uint8), least.view(np.uint8), *high, factors[..., 4:] & 15 | minima[..., 4:] << 4]
    scales = steps.astype(np.float32) * factors
    offsets = np.float32(8 if bits == 4 else 16) * scales - least.astype(np.float32) * minima
  raw = np.concatenate(parts, axis=-1)

  def by_group(values: np.ndarray) -> np.ndarray:  # f32[supers, N, groups] -> f16[all groups, N]
    return values.transpose(0, 2, 1).reshape(-1, outputs).astype(np.float16)

  superblocks = raw.view(np.dtype((np.void, raw.shape[-1])))[..., 0]
  return GroupedWeight(codes, by_group(scales), bits, 1, None if offsets is None else by_group(offsets), superblocks)


def make_rows(rows: int, inputs: int) -> np.ndarray:
  return np.random.default_rng(rows).standard_normal((rows, inputs), np.float32) * 3


def pack(weight: GroupedWeight) -> tuple[jax.Array, api.GroupLayout]:
  layout = api.GroupLayout(
    weight.inputs,
    weight.bits,
    len(weight.scales),
    weight.scales.dtype.name,
    weight.offsets is not None,
    weight.superblocks is not None,
  )
  packed = api.pack_groups(weight.codes, weight.scales, weight.offsets, weight.bits, weight.superblocks)
  return jnp.asarray(packed), layout


def multiply(x: np.ndarray | jax.Array, weight: GroupedWeight, **more) -> np.ndarray:
  packed, layout = pack(weight)
  (outputs,) = weight.outputs
  return np.asarray(api.grouped_matmul(jnp.asarray(x), packed, outputs, layout, **more))


def check_product(x: np.ndarray, weight: GroupedWeight) -> None:
  """Compares with the reference, bit for bit where multiply-adds have one rounding, and with the weight in f64."""
  found = multiply(x, weight)
  expected = api.reference_grouped_matmul(x, weight.codes, weight.scales, bits=weight.bits, offsets=weight.offsets)
  if _FUSES:
    np.testing.assert_array_equal(found, expected)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
  exact = x.astype(np.float64) @ weight.dequantize()
  step = np.abs(x).max(axis=1, keepdims=True) / 127
  # Errors of the rows' rounding are independent, at most half a step each.
  bound = 3 * step * np.sqrt((weight.dequantize().astype(np.float64) ** 2).sum(axis=0)) + 1e-4
  assert (np.abs(found - exact) <= bound).all()


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 9, 11, 12, 13, 25, 70])
def test_any_number_of_rows(rows: int, bits: int) -> None:
  check_product(make_rows(rows, 192), make_weight(192, 70, bits, groups=3))


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(
  ("inputs", "outputs", "groups", "dtype"),
  [
    (128, 32, 4, "float16"),
    (256, 33, 2, "float32"),
    (96, 31, 12, "float16"),
    (512, 1, 1, "float32"),
    (2052, 64, 1, "float16"),
    (7, 5, 1, "float32"),
    (264, 100, 1, "float16"),
    (1040, 40, 5, "float32"),
  ],
)
def test_any_matrix(inputs: int, outputs: int, groups: int, dtype: str, bits: int, offsets: bool) -> None:
  if bits == 6 and groups > 1:
    groups = min(groups, inputs // 16)  # a group has a multiple of 16 inputs
  check_product(make_rows(5, inputs), make_weight(inputs, outputs, bits, groups, offsets, dtype))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_threads(bits: int) -> None:
  """Large enough to be spread: runs of several blocks and a last one that is not full; and parts of the rows."""
  check_product(make_rows(30, 256), make_weight(256, 2050, bits, 8, offsets=True))
  check_product(make_rows(131, 256), make_weight(256, 300, bits))


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_row_and_many_blocks(dtype: str, offsets: bool) -> None:
  """From 1,024 columns on, a thread multiplies two blocks at once if scales are float32, and then a last one alone."""
  x = make_rows(9, 272)
  for outputs in (1024, 1030, 1072, 1540):
    weight = make_weight(272, outputs, 8, 2, offsets, dtype)
    check_product(x[:1], weight)
    np.testing.assert_array_equal(multiply(x[:1], weight), multiply(x, weight)[:1])
    residual = jnp.asarray(make_rows(1, outputs))
    np.testing.assert_array_equal(
      multiply(x[:1], weight, residual=residual), residual + jnp.asarray(multiply(x[:1], weight))
    )


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_row_has_the_same_bits_in_any_batch(bits: int) -> None:
  x, weight = make_rows(100, 320), make_weight(320, 300, bits, 5, offsets=True)
  whole = multiply(x, weight)
  for begin, count in ((0, 1), (39, 1), (3, 2), (7, 12), (20, 13), (51, 49)):
    rows = slice(begin, begin + count)
    np.testing.assert_array_equal(multiply(x[rows], weight), whole[rows])


@pytest.mark.parametrize("kind", SUPERBLOCKS)
@pytest.mark.parametrize("outputs", [70, 2050])
def test_superblocks_are_the_weight_of_their_products(kind: str, outputs: int) -> None:
  """The bits of the same weight with a scale a group, for products of any number of rows and for lookups."""
  weight = make_superblocks(512, outputs, kind)
  expanded = dataclasses.replace(weight, superblocks=None)
  assert len(pack(weight)[0][0]) < len(pack(expanded)[0][0])
  for rows in (1, 5, 6, 7, 31):
    x = make_rows(rows, 512)
    check_product(x, weight)
    np.testing.assert_array_equal(multiply(x, weight), multiply(x, expanded))
  indices = jnp.arange(outputs)
  np.testing.assert_array_equal(*(api.look_up_columns(*pack(each), indices) for each in (weight, expanded)))
  np.testing.assert_array_equal(api.look_up_columns(*pack(weight), indices), weight.dequantize().T)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("code", ["least", "greatest", "both"])
def test_the_greatest_sums_do_not_saturate(code: str, bits: int) -> None:
  """Every product has the greatest magnitude; a sum of pairs would pass 16 bits, and sums of chunks fit in 32."""
  most = (1 << bits) - 1
  codes = np.full((512, 40), {"least": 0, "greatest": most, "both": 0}[code], np.uint8)
  if code == "both":
    codes[1::2] = most
  weight = GroupedWeight(codes, np.ones((1, 40), np.float32), bits)
  x = np.ones((3, 512), np.float32)
  x[1] = -1
  x[2, ::2] = -1
  expected = x.astype(np.float64) @ weight.dequantize()  # x is exact in 8 bits, and sums are below 2**24
  np.testing.assert_allclose(multiply(x, weight), expected, rtol=1e-6)
  check_product(x, weight)


def test_zeros_and_the_smallest_numbers() -> None:
  """A chunk of zeros gives zeros, not NaN; one below 2**-100 counts as zeros; the others of its row are as they are."""
  x, weight = make_rows(4, 256), make_weight(256, 40, 8, 2, offsets=True)
  x[0], x[1, :128], x[2, 128:] = 0, 0, 1e-38
  x[3] *= np.float32(2.0**-90)
  check_product(x, weight)
  np.testing.assert_array_equal(multiply(x, weight)[0], 0)
  np.testing.assert_array_equal(multiply(x * (np.abs(x) > 1e-30), weight)[2], multiply(x, weight)[2])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_stay_in_their_row(bad: float) -> None:
  x, weight = make_rows(20, 320), make_weight(320, 70, 4, 10)
  clean = multiply(x, weight)
  for place in (0, 17, 319):
    broken = x.copy()
    broken[7, place] = bad
    found = multiply(broken, weight)
    assert np.isnan(found[7]).all()
    np.testing.assert_array_equal(np.delete(found, 7, axis=0), np.delete(clean, 7, axis=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_norm_gate_and_residual_are_those_of_the_plain_kernel(bits: int, dtype: str) -> None:
  """What comes before has the bits of a matmul by the unit matrix, and the rest is the product alone."""
  rows, inputs, outputs = 13, 160, 72
  x, weight = jnp.asarray(make_rows(rows, inputs)).astype(dtype), make_weight(inputs, outputs, bits, 5, offsets=True)
  scale = jnp.linspace(0.5, 2, inputs).astype(dtype)
  unit = jnp.asarray(api.pack_weight(np.eye(inputs, dtype=jnp.dtype(dtype))))
  normed = api.matmul(x, unit, inputs, norm=(scale, 1e-5), ordered=True)
  norm = RMSNorm(inputs, 1e-5, jnp.dtype(dtype))
  norm.scale[...] = scale
  np.testing.assert_allclose(np.asarray(normed, np.float32), np.asarray(norm(x), np.float32), rtol=1e-2)
  np.testing.assert_array_equal(
    multiply(x, weight, norm=(scale, 1e-5), dtype=jnp.float32), multiply(normed, weight, dtype=jnp.float32)
  )
  both = jnp.concatenate([x, x[:, ::-1]], axis=1)
  gated = api.matmul(both, unit, inputs, gated=True, ordered=True)
  residual = jnp.asarray(make_rows(rows + 1, outputs)[:rows]).astype(dtype)
  found = multiply(both, weight, gated=True, residual=residual)
  product = jnp.asarray(multiply(gated, weight))
  assert found.dtype == product.dtype == jnp.dtype(dtype)
  np.testing.assert_array_equal(found, residual + product)
  one = multiply(both[-1:], weight, gated=True, residual=residual[-1:])
  np.testing.assert_array_equal(one[0], found[-1])


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_rows_behind_those_in_use_are_left_out(bits: int) -> None:
  x, weight = make_rows(30, 128), make_weight(128, 70, bits, 4)
  for used in (0, 1, 29, 30):
    padded = x.copy()
    padded[used:] = np.nan
    found = multiply(padded, weight, num_rows=jnp.full(1, used, jnp.int32))
    np.testing.assert_array_equal(found[used:], 0)
    if used:
      np.testing.assert_array_equal(found[:used], multiply(x[:used], weight))


def test_leading_dimensions_and_columns_by_index() -> None:
  for bits, offsets, dtype in ((4, True, "float16"), (6, True, "float16"), (8, False, "float32")):
    x, weight = make_rows(6, 96), make_weight(96, 50, bits, 3, offsets, dtype)
    flat = multiply(x, weight)
    np.testing.assert_array_equal(multiply(x.reshape(2, 3, 96), weight), flat.reshape(2, 3, 50))
    indices = jnp.asarray([[0, 49], [31, 32]])
    found = api.look_up_columns(*pack(weight), indices)
    np.testing.assert_allclose(found, weight.dequantize().T[np.asarray(indices)], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(1, 1, 1), (17, 33, 1), (48, 31, 3), (256, 100, 2)])
def test_any_view_is_packed(inputs: int, outputs: int, groups: int, bits: int) -> None:
  """Input d of a group lies in step d // 4, or d // 8 with the next four in the upper halves; padding is zeros.

  At 6 bits, two such steps precede the high bits of their inputs.
  """
  weight, step = make_weight(inputs, outputs, bits, groups, offsets=True), {4: 8, 6: 16, 8: 4}[bits]
  blocks, steps = -(-outputs // 32), -(-inputs // groups // step)
  padding = ((0, 0), (0, steps * step - inputs // groups), (0, blocks * 32 - outputs))
  codes = np.pad(weight.codes.reshape(groups, -1, outputs), padding)
  if bits == 4:
    halves = codes.reshape(groups, steps, 2, 4, blocks, 32)
    placed = (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(3, 0, 1, 4, 2)
  elif bits == 6:
    fours = codes.reshape(groups, steps, 4, 4, blocks, 32)
    low = [fours[:, :, part] & 15 | (fours[:, :, part + 1] & 15) << 4 for part in (0, 2)]
    high = sum(fours[:, :, part] >> 4 << 2 * part for part in range(4))
    placed = np.stack([*low, high], axis=2).transpose(4, 0, 1, 2, 5, 3)  # [blocks, groups, steps, 3, 32, 4]
  else:
    placed = codes.reshape(groups, steps, 4, blocks, 32).transpose(3, 0, 1, 4, 2)
  assert weight.offsets is not None
  values = [
    np.pad(each, ((0, 0), (0, blocks * 32 - outputs))).reshape(groups, blocks, 32).transpose(1, 0, 2).copy()
    for each in (weight.scales, weight.offsets)
  ]
  parts = [placed.reshape(blocks, groups, -1), *(each.view(np.uint8) for each in values)]
  expected = np.concatenate(parts, axis=2).reshape(blocks, -1)
  more = np.zeros((outputs + 3, 2, inputs + 1), np.uint8)
  more[3:, 1, 1:] = weight.codes.T
  for view in (weight.codes, np.ascontiguousarray(weight.codes.T).T, more[3:, 1, 1:].T):
    np.testing.assert_array_equal(api.pack_groups(view, weight.scales, weight.offsets, bits), expected)


@pytest.mark.parametrize(
  ("groups", "outputs", "offsets"), [(1, 32, False), (3, 70, True), (9, 33, False), (24, 5, True)]
)
def test_words_pack_like_bytes(groups: int, outputs: int, offsets: bool) -> None:
  """In the orders of memory of compressed-tensors and GPTQ, and as a part of a larger array."""
  weight = make_weight(576, outputs, 4, groups, offsets)
  shifts = np.uint32(4) * np.arange(8, dtype=np.uint32)[:, None]
  words = np.bitwise_or.reduce(weight.codes.reshape(72, 8, outputs).astype(np.uint32) << shifts, axis=1)
  larger = np.full((outputs + 2, 3, 80), 2**32 - 1, np.uint32)
  larger[1:-1, 1, 4:76] = words.T
  expected = api.pack_groups(weight.codes, weight.scales, weight.offsets, 4)
  for view in (words, np.ascontiguousarray(words.T).T, larger[1:-1, 1, 4:76].T):
    np.testing.assert_array_equal(api.pack_groups(view, weight.scales, weight.offsets, 4), expected)


def test_chunks_are_even_parts_of_groups() -> None:
  for group, chunk in ((32, 32), (128, 128), (256, 128), (768, 128), (288, 96), (404, 104), (132, 72), (2052, 128)):
    assert api.GroupLayout(group, 8).chunk == chunk
  for group, chunk in ((16, 16), (128, 128), (208, 112), (404, 112)):
    assert api.GroupLayout(group, 6).chunk == chunk


def test_what_does_not_fit_is_named() -> None:
  x, weight = jnp.asarray(make_rows(2, 96)), make_weight(96, 50, 4, 3)
  packed, layout = pack(weight)
  with pytest.raises(ValueError, match=r"the weight is uint8\[2, 1728\]; 70 outputs need uint8\[3, 1728\]"):
    api.grouped_matmul(x, packed, 70, layout)
  with pytest.raises(ValueError, match=r"need uint8\[2, 3264\]"):
    api.grouped_matmul(x, packed, 50, dataclasses.replace(layout, bits=8))
  with pytest.raises(ValueError, match=r"x \(2, 95\) does not have the 96 inputs"):
    api.grouped_matmul(x[:, :95], packed, 50, layout)
  with pytest.raises(ValueError, match=r"residual float32\[2, 49\]"):
    api.grouped_matmul(x, packed, 50, layout, residual=jnp.zeros((2, 49)))
  with pytest.raises(ValueError, match="codes of 3 bits; supported are 4, 6 and 8"):
    api.pack_groups(weight.codes, weight.scales, None, 3)
  with pytest.raises(ValueError, match=r"codes are int8\[96, 50\]; they must be uint8"):
    api.pack_groups(weight.codes.astype(np.int8), weight.scales, None, 4)
  with pytest.raises(ValueError, match=r"codes are uint32\[12, 50\]; they must be uint8\[D, N\], or at 4 bits uint32"):
    api.pack_groups(weight.codes[:12].astype(np.uint32), weight.scales, None, 8)
  with pytest.raises(ValueError, match="scales are float64; they must be float16 or float32"):
    api.pack_groups(weight.codes, weight.scales.astype(np.float64), None, 4)
  with pytest.raises(ValueError, match=r"offsets are float16\[2, 50\]; 50 outputs need float16\[groups, 50\] for both"):
    api.pack_groups(weight.codes, weight.scales, weight.scales[:2], 4)
  superblocks = np.zeros((1, 50), "V16")
  with pytest.raises(
    ValueError, match=r"superblocks of 96 inputs with float16 scales, groups of 32 and codes of 4 bits"
  ):
    api.pack_groups(weight.codes, weight.scales, weight.scales, 4, superblocks)
  nested = make_superblocks(256, 50, "Q6_K")
  with pytest.raises(ValueError, match=r"superblocks are \|V16\[1, 50\] .* must be \|V18\[1, 50\]"):
    api.pack_groups(nested.codes, nested.scales, None, 6, superblocks)
  with pytest.raises(ValueError, match="5 groups do not divide 96 inputs"):
    api.GroupLayout(96, 4, 5)
  with pytest.raises(ValueError, match=r"groups of 12 inputs at 4 bits; groups must be multiples of 8 inputs, or a"):
    api.GroupLayout(96, 4, 8)
  with pytest.raises(ValueError, match=r"groups of 24 inputs at 6 bits; groups must be multiples of 16 inputs, or a"):
    api.GroupLayout(96, 6, 4)


# --- Another way to multiply, and seeded bugs -------------------------------------------------------------------------

_NO_VNNI = ("if (groups::Vnni::available())", "if (false)")


def check_all(bits: int) -> None:
  """Of several tiles of rows, but so few rows that AMX does not multiply them."""
  check_product(make_rows(11, 192), make_weight(192, 70, bits, 3, offsets=True))
  inputs = 416 if bits == 6 else 272  # chunks of 112 and 96 inputs, or of 72 and 64
  check_product(make_rows(3, inputs), make_weight(inputs, 33, bits, 2, dtype="float32"))
  for kind in {4: ("Q4_K",), 6: ("Q5_K", "Q6_K"), 8: ()}[bits]:
    for rows in (3, 11):
      check_product(make_rows(rows, 512), make_superblocks(512, 40, kind))
  if bits == 8:
    check_product(make_rows(1, 256), make_weight(256, 1540, 8, 2, True, "float32"))  # pairs of blocks, and a single one


@pytest.mark.kernels
@pytest.mark.skipif(native.level() != "x86-64-v4", reason="the library for this level has one way")
def test_a_processor_without_vnni_gives_the_same_bits(with_bug: Callable[..., None]) -> None:
  """This also shows that the checks of the seeded bugs pass without one."""
  with_bug("packed_matmul", _NO_VNNI)
  for bits in (4, 6, 8):
    check_all(bits)


_BUGS = {
  "zero_left_out": ("chunk.start = -zero * sum;", "chunk.start = 0;"),
  "sum_without_factor": ("chunk.factor * static_cast<float>(sum);", "static_cast<float>(sum);"),
  "factor_of_another_row": ("every(of_row.factor)", "every(chunk->factor)"),
  "start_of_another_row": ("all_ints(chunk[m].start)", "all_ints(chunk->start)"),
  "scales_of_the_first_group": (
    "(w - 4 * first + layout.code_bytes)",
    "(block + layout.code_bytes)",
  ),
  "scales_instead_of_offsets": ("load_value(own_scales + kColumns)", "load_value(own_scales)"),
  "values_of_another_row": ("values + k * kStep * R + 4 * (part * R + m)", "values + k * kStep * R + 4 * part * R"),
  "upper_halves_left_out": ("if constexpr (kBits != 8) add_part(", "if constexpr (kBits == 6) add_part("),
  "bits_of_other_inputs": ("kPart == 1 ? all << 2 : kPart == 2 ? all", "kPart == 1 ? all : kPart == 2 ? all << 2"),
  "last_chunk_too_long": ("std::min(layout.chunk, layout.group - begin) / kStep", "layout.chunk / kStep"),
  "inverse_of_another_factor": ("inverse = 127.0f / magnitude", "inverse = 126.0f / magnitude"),
  "factors_of_other_groups": ("(mixed >> at & 15) | (factor", "(mixed >> (at + 4) & 15) | (factor"),
  "minima_without_their_high_bits": ("| (minimum >> (at + 2) & 48)", ""),
  "superblocks_of_the_first_inputs": (
    "reinterpret_cast<const S*>(own) + first",
    "reinterpret_cast<const S*>(supers) + first",
  ),
  "superblocks_expanded_once": ("first == 0, ahead);", "block == nullptr, ahead);"),
  "offsets_for_another_zero": ("zero(bits == 4 ? 8 : 16)", "zero(8)"),
  "widened_superblocks_of_one_group": (
    "super, g % layout.of_super, reinterpret_cast<uint16_t*>(to)",
    "super, 0, reinterpret_cast<uint16_t*>(to)",
  ),
  "wrong_block_of_columns": ("tiling, layout, weight + block * bytes,", "tiling, layout, weight,"),
  "wrong_pair_of_blocks": ("by_tile, layout, weight + block * bytes,", "by_tile, layout, weight,"),
  "first_block_of_a_pair_twice": ("w + j / V * apart + k * kBytes", "w + k * kBytes"),
  "scales_of_the_first_block_of_a_pair": ("scales + j / V * apart / static_cast<int64_t>(sizeof(S))", "scales"),
  "one_result_of_a_pair": ("store(y[m + j / V]", "store(y[m]"),
  "one_block_of_a_pair_left_out": ("std::min<int64_t>(2 * kColumns, N", "std::min<int64_t>(kColumns, N"),
  "rows_of_an_earlier_call": ("laid_out == std::pair(call, begin)", "laid_out.second == begin && laid_out.first"),
  "rows_of_the_first_tile": ("rows.from(first, layout)", "rows.from(0, layout)"),
  "inputs_of_a_row_together": ("to += 4 * size)", "to += 4)"),
  "chunks_of_a_row_together": ("chunks[c * size] = row.chunks[c]", "chunks[c] = row.chunks[c]"),
  "rows_of_the_last_tile_left_out": (
    "tiles = tiles_of(of_tile);",
    "tiles = rows / of_tile; this->rows -= rows % of_tile;",
  ),
  "groups_of_the_first_superblock": ("if (++in_super == layout.of_super) in_super = 0;", "++in_super;"),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", _BUGS)
def test_seeded_bug_is_caught(name: str, with_bug: Callable[..., None]) -> None:
  with_bug("packed_matmul", _BUGS[name])
  with pytest.raises(AssertionError):
    for bits in (4, 6, 8):
      check_all(bits)
