"""Matmuls over packed weights: right for every shape, the same bits in any batch, and a whole model on them.

Of many rows a processor with AMX has another way (amx.h), which a test of 70 rows goes unless it says `ordered`;
test_tiles.py has its seeded bugs, and runs it on other processors.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device.weights import parameter_name
from models.config import ModelConfig
from models.layers import RMSNorm
from models.linear import arranger
from models.quantize import quantize
from models.registry import abstract
from models.weight_form import INT8, PLAIN, WeightForm
from pallas_kernels import native
from pallas_kernels.packed_matmul import api
from tests.device.tiny_model import TINY, dense_logits, random_params

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: XLA's matmul serves here")


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
  native.build_library("packed_matmul")


def numbers(rows: int, inputs: int, outputs: int, dtype: str) -> tuple[jax.Array, jax.Array]:
  rng = np.random.default_rng(rows)
  x = rng.standard_normal((rows, inputs), np.float32)
  w = rng.standard_normal((inputs, outputs), np.float32) * inputs**-0.5
  return jax.device_put(x.astype(jnp.dtype(dtype))), jax.device_put(w.astype(jnp.dtype(dtype)))


def multiply(x: jax.Array, w: jax.Array, int8: bool = False, **more) -> tuple[jax.Array, np.ndarray]:
  """The product, and the matrix in f64 that it is a product with."""
  if not int8:
    return api.matmul(x, jax.device_put(api.pack_weight(np.asarray(w))), w.shape[1], **more), np.asarray(w, np.float64)
  values, scales = quantize(w, 1)
  held = jax.device_put(api.pack_weight(np.asarray(values)))
  return api.matmul(x, held, w.shape[1], scales=scales, **more), np.asarray(values, np.float64) * np.asarray(scales)


def check(
  rows: int,
  inputs: int,
  outputs: int,
  dtype: str = "float32",
  result: str | None = None,
  int8: bool = False,
  ordered: bool = False,
) -> None:
  """Against f64: sums of at most some thousand terms in f32, and the result's own rounding."""
  x, w = numbers(rows, inputs, outputs, dtype)
  y, matrix = multiply(x, w, int8, dtype=None if result is None else jnp.dtype(result), ordered=ordered)
  assert y.shape == (rows, outputs) and y.dtype == jnp.dtype(result or dtype)
  relative = 2.0**-8 if y.dtype == jnp.bfloat16 else 0.0
  np.testing.assert_allclose(np.asarray(y, np.float64), np.asarray(x, np.float64) @ matrix, rtol=relative, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 12, 13, 16, 24, 25, 37, 64, 65, 100])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_any_number_of_rows(rows: int, int8: bool, ordered: bool) -> None:
  check(rows, 96, 160, int8=int8, ordered=ordered)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 31), (64, 33), (300, 1000), (2048, 64)])
@pytest.mark.parametrize(("dtype", "result"), [("float32", None), ("bfloat16", None), ("bfloat16", "float32")])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("rows", "ordered"), [(14, True), (30, False), (100, False)])
def test_any_matrix(
  inputs: int, outputs: int, dtype: str, result: str | None, int8: bool, rows: int, ordered: bool
) -> None:
  check(rows, inputs, outputs, dtype, result, int8, ordered)


@pytest.mark.parametrize("int8", [False, True])
def test_threads(int8: bool) -> None:
  """Large enough to be spread: runs of several blocks and a last one that is not full; and parts of the rows."""
  for ordered in (False, True):
    check(70, 256, 2050, int8=int8, ordered=ordered)
    check(131, 256, 300, int8=int8, ordered=ordered)
  check(700, 1100, 70, int8=int8)  # more rows than are placed in tiles for one cache


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(int8: bool) -> None:
  """Over tiles, over the parts that rows are shared in, and whether an int8 block is converted once or on the way."""
  x, w = numbers(100, 128, 320, "float32")
  whole = np.asarray(multiply(x, w, int8, ordered=True)[0])
  for begin, count in ((0, 1), (39, 1), (3, 2), (7, 12), (20, 13), (51, 49)):
    rows = slice(begin, begin + count)
    np.testing.assert_array_equal(np.asarray(multiply(x[rows], w, int8, ordered=True)[0]), whole[rows])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_bfloat16_matrix_is_widened_exactly(ordered: bool) -> None:
  for rows in (1, 2, 7, 12, 70):
    x, w = numbers(rows, 96, 2050, "float32")
    narrow = w.astype(jnp.bfloat16)
    found, expected = (multiply(x, each, ordered=ordered)[0] for each in (narrow, narrow.astype(jnp.float32)))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("int8", [False, True])
def test_in_any_order_it_is_no_further_from_the_product(int8: bool) -> None:
  """Three parts of each number instead of the number: as exact as a sum of f32, and no row is another's business."""
  x, w = numbers(80, 2000, 130, "float32")
  errors = {}
  for ordered in (False, True):
    y, matrix = multiply(x, w, int8, ordered=ordered)
    errors[ordered] = np.sqrt(np.mean((np.asarray(y, np.float64) - np.asarray(x, np.float64) @ matrix) ** 2))
  assert 0 < errors[False] <= errors[True]
  bad = x.at[3].set(jnp.nan).at[40, 7].set(jnp.inf).at[41, 7].set(-1e36)
  y, found = (np.asarray(multiply(rows, w, int8)[0]) for rows in (x, bad))
  assert not np.isfinite(found[[3, 40]]).any()
  others = np.delete(np.arange(80), [3, 40, 41])
  np.testing.assert_array_equal(found[others], y[others])
  np.testing.assert_allclose(found[41], -1e36 * matrix[7], rtol=1e-5, atol=1e30)


def test_large_matrices_lie_on_aligned_memory_that_jax_takes_over() -> None:
  packed = api.pack_weight(np.ones((1024, 1100), np.float32))
  assert packed.nbytes > 2**22 and packed.ctypes.data % 2**12 == 0
  taken = jax.device_put(packed, jax.devices()[0])
  assert taken.unsafe_buffer_pointer() == packed.ctypes.data
  np.testing.assert_array_equal(packed.transpose(1, 0, 2).reshape(1024, -1).sum(axis=1), np.full(1024, 1100))


@pytest.mark.parametrize("kind", [np.float32, np.uint16, np.int8])
@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (40, 31), (5, 64), (768, 100)], ids=str)
def test_any_view_is_packed(shape: tuple[int, int], kind: type) -> None:
  """As it lies, transposed as in a checkpoint, and as part of more: always block by block of 32 columns."""
  (inputs, outputs), (blocks, _, columns) = shape, api.packed_shape(*shape)
  matrix = np.random.default_rng(0).integers(1, 100, shape).astype(kind)
  padded = np.pad(matrix, ((0, 0), (0, blocks * columns - outputs)))
  expected = padded.reshape(inputs, blocks, columns).transpose(1, 0, 2)
  more = np.zeros((outputs + 3, 2, inputs + 1), kind)
  more[3:, 1, 1:] = matrix.T
  for view in (matrix, np.ascontiguousarray(matrix.T).T, more[3:, 1, 1:].T):
    np.testing.assert_array_equal(api.pack_weight(view), expected)
  assert api.pack_weight(matrix).dtype == kind
  with pytest.raises(ValueError, match="has 8 bytes an element; supported are 1, 2 and 4"):
    api.pack_weight(matrix.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 64), (9, 100), (200, 768)], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_the_norm_before_it(shape: tuple[int, int], dtype: str, ordered: bool) -> None:
  x, w = numbers(*shape, 96, dtype)
  x = x * jnp.asarray(5.0, dtype)
  scale = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, shape[1])).astype(dtype)
  norm = RMSNorm(shape[1], 1e-5, jnp.dtype(dtype))
  norm.scale[...] = scale
  packed = jnp.asarray(api.pack_weight(np.asarray(w)))
  found = api.matmul(x, packed, 96, dtype=jnp.float32, norm=(scale, 1e-5), ordered=ordered)
  expected = np.asarray(norm(x), np.float64) @ np.asarray(w, np.float64)
  # In bf16 a factor that is off in its last bit rounds some numbers the other way.
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if dtype == "float32" else 3e-2)
  if ordered:
    row = np.asarray(api.matmul(x[-1:], packed, 96, dtype=jnp.float32, norm=(scale, 1e-5), ordered=True))
    np.testing.assert_array_equal(row[0], np.asarray(found)[-1])


def check_gated(rows: int, inputs: int, dtype: str, ordered: bool = True) -> None:
  """SwiGLU before, and the residual behind."""
  x, w = numbers(rows, inputs, 96, dtype)
  both = jnp.concatenate([x * jnp.asarray(30, dtype), x[:, ::-1]], axis=1)
  residual = jnp.asarray(np.random.default_rng(2).standard_normal((rows, 96), np.float32)).astype(dtype)
  packed = jnp.asarray(api.pack_weight(np.asarray(w)))
  product = functools.partial(api.matmul, gated=True, ordered=ordered)
  found = product(both, packed, 96, residual=residual)
  hidden = jax.nn.silu(both[:, :inputs]) * both[:, inputs:]
  expected = np.asarray(hidden, np.float64) @ np.asarray(w, np.float64)
  # bf16: the gate is rounded as XLA rounds it, but for ties; then the product, and the sum.
  rtol, atol = (1e-5, 1e-4) if dtype == "float32" else (2e-2, 0.3)
  expected += np.asarray(residual, np.float64)
  np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=rtol, atol=atol)
  left_out = product(both, packed, 96, residual=residual, num_rows=jnp.ones(1, jnp.int32))
  if ordered:
    row = product(both[-1:], packed, 96, residual=residual[-1:])
    np.testing.assert_array_equal(np.asarray(row)[0], np.asarray(found)[-1])
    np.testing.assert_array_equal(np.asarray(left_out)[0], np.asarray(found)[0])
  np.testing.assert_array_equal(np.asarray(left_out)[1:], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (9, 100), (70, 768)])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_gate_before_and_a_residual_behind(rows: int, inputs: int, dtype: str, ordered: bool) -> None:
  check_gated(rows, inputs, dtype, ordered)


def test_a_gate_of_any_size_is_finite() -> None:
  gates = np.array([[-1e38, -90.0, -87.4, -20.0, -0.0, 0.0, 20.0, 1e38]], np.float32)
  both = jnp.asarray(np.concatenate([gates, np.ones_like(gates)], axis=1))
  found = api.matmul(both, jnp.asarray(api.pack_weight(np.eye(8, dtype=np.float32))), 8, gated=True)
  np.testing.assert_allclose(np.asarray(found), np.asarray(jax.nn.silu(gates)), rtol=1e-6, atol=1e-35)
  nan = api.matmul(both.at[0, 0].set(jnp.nan), jnp.asarray(api.pack_weight(np.eye(8, dtype=np.float32))), 8, gated=True)
  assert np.isnan(np.asarray(nan)).all()


@pytest.mark.parametrize("rows", [9, 70])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_rows_behind_those_in_use_are_left_out(rows: int, int8: bool, normed: bool) -> None:
  """NaN in, zeros out; and those in use have the bits that they have without the others."""
  x, w = numbers(rows, 128, 2050, "float32")
  norm = {"norm": (jnp.linspace(0.5, 2, 128), 1e-5)} if normed else {}
  for used in (0, 1, rows - 1, rows):
    padded = x.at[used:].set(jnp.nan)
    found = np.asarray(multiply(padded, w, int8, num_rows=jnp.full(1, used, jnp.int32), **norm)[0])
    np.testing.assert_array_equal(found[used:], 0)
    if used:
      np.testing.assert_array_equal(found[:used], np.asarray(multiply(x[:used], w, int8, **norm)[0]))


@pytest.mark.parametrize("count", [-1, 4])
def test_a_count_of_rows_that_does_not_fit_is_an_error(count: int) -> None:
  x, w = numbers(3, 32, 50, "float32")
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"{count} rows in use of 3"):
    multiply(x, w, num_rows=jnp.full(1, count, jnp.int32))[0].block_until_ready()


def test_leading_dimensions() -> None:
  x, w = numbers(6, 32, 50, "float32")
  packed = jnp.asarray(api.pack_weight(np.asarray(w)))
  flat = np.asarray(api.matmul(x, packed, 50))
  np.testing.assert_array_equal(np.asarray(api.matmul(x.reshape(2, 3, 32), packed, 50)), flat.reshape(2, 3, 50))


def test_what_does_not_fit_is_named() -> None:
  x, w = numbers(2, 32, 50, "float32")
  packed = jnp.asarray(api.pack_weight(np.asarray(w)))
  with pytest.raises(ValueError, match="do not give 70 outputs"):
    api.matmul(x, packed, 70)
  with pytest.raises(ValueError, match=r"scale \(5,\) does not match"):
    api.matmul(x, packed, 50, norm=(jnp.ones(5), 1e-5))
  with pytest.raises(ValueError, match=r"x \(2, 31\)"):
    api.matmul(x[:, :31], packed, 50)
  with pytest.raises(ValueError, match=r"num_rows is int32\[\]"):
    api.matmul(x, packed, 50, num_rows=jnp.int32(1))
  with pytest.raises(ValueError, match=r"gated x \(2, 32\)"):
    api.matmul(x, packed, 50, gated=True, norm=(jnp.ones(16), 1e-5))
  with pytest.raises(ValueError, match=r"residual float32\[2, 49\]"):
    api.matmul(x, packed, 50, residual=jnp.zeros((2, 49)))
  values, scales = quantize(w, 1)
  with pytest.raises(ValueError, match="int8 with scales None"):
    api.matmul(x, jnp.asarray(api.pack_weight(np.asarray(values))), 50)
  with pytest.raises(ValueError, match=r"int8 with scales \(49,\)"):
    api.matmul(x, jnp.asarray(api.pack_weight(np.asarray(values))), 50, scales=scales[:49])
  with pytest.raises(NotImplementedError, match="dtype float16"):
    api.check_supported(jnp.dtype("float16"))


# --- A model ----------------------------------------------------------------------------------------------------------


def in_form(
  config: ModelConfig, dtype: jnp.dtype, state: nnx.State, form: WeightForm
) -> tuple[nnx.GraphDef, nnx.State]:
  """The plain model's parameters, arranged."""
  graphdef, declared = abstract(config, dtype, form)
  arrange = arranger(nnx.merge(graphdef, declared))
  made: dict[str, jax.Array | np.ndarray] = {}
  for key, leaf in jax.tree.leaves_with_path(state):
    made |= arrange(parameter_name(key), leaf)
  return graphdef, jax.tree.map_with_path(lambda key, _: jnp.asarray(made[parameter_name(key)]), declared)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"qkv_bias": True}, {"qk_norm": True}], ids=str)
def test_a_model_gives_the_same_logits(changes: dict, int8: bool) -> None:
  """Packed as not packed, in f32 as in int8."""
  config = dataclasses.replace(TINY, **changes)
  _, state = random_params(config, jnp.float32)
  tokens = list(range(2, 30))
  plain = WeightForm(matrix=INT8) if int8 else PLAIN
  expected = dense_logits(in_form(config, jnp.float32, state, plain), tokens)
  found = dense_logits(in_form(config, jnp.float32, state, dataclasses.replace(plain, packed=True)), tokens)
  assert np.abs(expected).max() > 1
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


# --- Seeded bugs ------------------------------------------------------------------------------------------------------

# None leaves memory unwritten: what lies there may be the right answer of an earlier call.
_BUGS = {
  "last_term_left_out": ("k < D; ++k, w +=", "k + 1 < D; ++k, w +="),
  "epsilon_left_out": ("static_cast<float>(D) + epsilon", "static_cast<float>(D)"),
  "residual_of_another_row": ("residual + (m + i) * N : nullptr", "residual + m * N : nullptr"),
  "gate_of_the_wrong_sign": ("(g < 0.0f ? e : all(1.0f))", "(g < 0.0f ? all(1.0f) : e)"),
  "value_of_another_column": ("* load(x + D + k))", "* load(x + k))"),
  "scale_left_out": ("value(normed) * value(scale[k])", "value(normed)"),
  "wrong_row": ("x[m * stride + k] * row[j]", "x[(m ? m - 1 : 0) * stride + k] * row[j]"),
  "row_in_the_place_of_another": ("nullptr, y + (m + i) * N", "nullptr, y + (m + count - 1 - i) * N"),
  "wrong_block": ("from = w + block * D * kColumns", "from = w + (block ? block - 1 : 0) * D * kColumns"),
  "scale_of_another_column": ("sums[n] *= scales[n]", "sums[n] *= scales[n ? n - 1 : 0]"),
  "wrong_column": ("assign(to[n], sums[n])", "assign(to[n], sums[n ? n - 1 : 0])"),
}


def check_norm() -> None:
  """With numbers so small that epsilon counts."""
  x, w = numbers(3, 40, 20, "float32")
  x, scale = x * 1e-3, jnp.linspace(0.5, 2, 40)
  normed = x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-5) * scale[None]
  found = api.matmul(x, jnp.asarray(api.pack_weight(np.asarray(w))), 20, norm=(scale, 1e-5))
  np.testing.assert_allclose(found, np.asarray(normed) @ np.asarray(w), rtol=0, atol=1e-5)


def test_without_a_bug_the_same_checks_pass() -> None:
  check_norm()


@pytest.mark.kernels
@pytest.mark.parametrize("name", _BUGS)
def test_seeded_bug_is_caught(name: str, with_bug: Callable[..., None]) -> None:
  with_bug("packed_matmul", _BUGS[name])
  with pytest.raises(AssertionError):
    check(14, 64, 33)
    check(14, 64, 33, int8=True, ordered=True)
    check(70, 64, 2050, ordered=True)
    check_norm()
    check_gated(9, 100, "float32")
