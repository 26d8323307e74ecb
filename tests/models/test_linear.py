"""Linear layers: whatever holds the weight, the same work around the product gives the same result."""

import dataclasses
import math
import pathlib
import typing

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device.mesh import make_mesh
from engine.device.weights import open_checkpoint, parameter_name
from models.config import Activation
from models.grouped_weight import GroupedWeight, quantize_by_group
from models.layers import RMSNorm
from models.linear import Embedding, Linear, arranger, declare_vocabulary
from models.quantize import E4M3, quantize, quantize_rows
from models.quantize import INT8 as INT8_NUMBERS
from models.weight_form import INT8, MatrixForm, UnsupportedForm, WeightForm
from pallas_kernels import native

DEMO = pathlib.Path(__file__).resolve().parents[2] / "models" / "demo"
FORMS = {
  "plain": WeightForm(),
  "int8": WeightForm(matrix=INT8),
  "flat": WeightForm(flat=True),
  "flat int8": WeightForm(matrix=INT8, flat=True),
  "packed": WeightForm(packed=True),
  "ordered": WeightForm(packed=True, ordered=True),
  "packed int8": WeightForm(packed=True, matrix=INT8),
  "by output": WeightForm(matrix=MatrixForm("grouped", 8, scale_dtype="float32")),
  "by group": WeightForm(matrix=MatrixForm("grouped", 4, 6, scale_dtype="float16")),
  "flat by output": WeightForm(matrix=MatrixForm("grouped", 8, scale_dtype="float32"), flat=True),
  "flat by group": WeightForm(matrix=MatrixForm("grouped", 4, 6, scale_dtype="float16"), flat=True),
  "rows of int8": WeightForm(matrix=MatrixForm("w8a8")),
  "flat rows of int8": WeightForm(matrix=MatrixForm("w8a8"), flat=True),
  "rows of e4m3": WeightForm(matrix=MatrixForm("fp8")),
  "packed by output": WeightForm(packed=True, matrix=MatrixForm("grouped", 8, scale_dtype="float32")),
  "packed by group": WeightForm(packed=True, matrix=MatrixForm("grouped", 4, 8, scale_dtype="float16")),
}
# What int8 is off by, of outputs of about 1: half a step of 1/127 of the greatest weight, over 24 inputs. Products with
# groups are compared with those of the dequantized weight; packed ones round x to 1/127 of its greatest number. e4m3
# has four bits of precision.
TOLERANCE = {name: 0.4 if "e4m3" in name else 0.1 if "int8" in name or "packed by" in name else 2e-5 for name in FORMS}
_D, _OUTPUTS = 24, (3, 4, 2)

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: XLA's matmul serves here")
pytestmark = [needs_compiler, pytest.mark.usefixtures("quick_compilation")]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def held(form: str, weight: np.ndarray, num_inputs: int = 1) -> np.ndarray:
  """The weight that products with groups multiply by."""
  own = FORMS[form].matrix
  if own.kind != "grouped":
    return weight
  inputs = math.prod(weight.shape[:num_inputs])
  return quantize_by_group(weight, num_inputs, own.bits, own.group or inputs).dequantize()


def filled(layer: Linear, weight: np.ndarray | GroupedWeight) -> Linear:
  """With the weight in the layer's own form; a bias is filled with numbers."""
  model = nnx.Dict(it=layer)
  for name, value in arranger(model)("it", weight).items():
    parameter = getattr(layer.matrix, {"it": "array", "it_scale": "scales", "it_offset": "offsets"}[name])
    assert parameter[...].shape == value.shape and parameter[...].dtype == value.dtype
    parameter[...] = jnp.asarray(value)
  if layer.bias is not None:
    layer.bias[...] = jnp.asarray(numbers(*layer.bias[...].shape, seed=1))
  return layer


def norm(offset: float = 0.0, size: int = _D) -> RMSNorm:
  made = RMSNorm(size, 1e-5, jnp.dtype(jnp.float32), offset=offset)
  made.scale[...] = jnp.asarray(numbers(size, seed=2)) - offset
  return made


def by_hand(norm: RMSNorm, x: np.ndarray) -> np.ndarray:
  scale = np.asarray(norm.scale[...]) + norm.offset
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + norm.eps) * scale


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("residual", ["none", "plain", "through a norm"])
@pytest.mark.parametrize("multiplier", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
def test_the_work_around_a_product(form, offset, residual, multiplier, bias):
  """Each combination, fused or not, as numpy does it."""
  made = Linear.declare((_D, 30), (None, None), jnp.dtype(jnp.float32), FORMS[form], bias=bias, multiplier=multiplier)
  weight, x, added = numbers(_D, 30) * _D**-0.5, numbers(2, 7, _D), numbers(2, 7, 30, seed=3)
  layer = filled(made, weight)
  before, behind = None if offset is None else norm(offset), norm(1.0, 30) if residual == "through a norm" else None
  stream = None if residual == "none" else jnp.asarray(added)
  found = layer(jnp.asarray(x), norm=before, residual=stream, residual_norm=behind)
  expected = (x if before is None else by_hand(before, x)) @ held(form, weight)
  expected = multiplier * (expected + (0 if layer.bias is None else np.asarray(layer.bias[...])))
  expected = expected if behind is None else by_hand(behind, expected)
  np.testing.assert_allclose(found, expected + (0 if residual == "none" else added), atol=TOLERANCE[form], rtol=0)


@pytest.mark.parametrize(
  "form", [name for name in FORMS if name not in ("plain", "flat", "ordered") and "packed" not in name]
)
def test_sums_of_codes_may_exceed_float16(form: str):
  """Scales multiply them afterwards; the result is held."""
  half, weight, x = jnp.dtype(jnp.float16), numbers(_D, 6) * 0.2, 3000 * np.abs(numbers(5, _D))
  found = filled(Linear.declare((_D, 6), (None, None), half, FORMS[form]), weight)(jnp.asarray(x, half))
  assert found.dtype == half
  expected = x @ held(form, weight)
  np.testing.assert_allclose(found, expected, atol=3000 * max(TOLERANCE[form], 3e-3), rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", typing.get_args(Activation))
def test_gates_go_through_their_activation(form: str, activation: Activation):
  layer = filled(Linear.declare((_D, 6), (None, None), jnp.dtype(jnp.float32), FORMS[form]), numbers(_D, 6) * _D**-0.5)
  x = numbers(5, 2, _D)
  gates, values = x[:, 0], x[:, 1]
  if activation == "silu":
    gated = gates / (1 + np.exp(-gates))
  else:
    gated = 0.5 * gates * (1 + np.tanh((2 / np.pi) ** 0.5 * (gates + 0.044715 * gates**3)))
  expected = gated * values @ held(form, numbers(_D, 6) * _D**-0.5)
  np.testing.assert_allclose(layer(jnp.asarray(x), activation=activation), expected, atol=TOLERANCE[form], rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_inputs", [1, 3])
@pytest.mark.parametrize("split_behind", [False, True])
def test_several_dimensions(form, num_inputs, split_behind):
  """The input's, the output's, and the output's with a split one behind: whatever is merged, each number stays."""
  shape = (_D, *_OUTPUTS) if num_inputs == 1 else (*_OUTPUTS, _D)
  axes = (None,) * len(shape)
  if split_behind and num_inputs == 1:
    shape, axes = (_D, 2, 15), (None, None, "mlp")
  weight, x = numbers(*shape) * 0.2, numbers(4, *shape[:num_inputs])
  layer = filled(Linear.declare(shape, axes, jnp.dtype(jnp.float32), FORMS[form], num_inputs=num_inputs), weight)
  found = layer(jnp.asarray(x))
  assert found.shape == (4, *shape[num_inputs:])
  np.testing.assert_allclose(
    found, np.tensordot(x, held(form, weight, num_inputs), num_inputs), atol=2 * TOLERANCE[form], rtol=0
  )


@pytest.mark.parametrize("form", ["plain", "packed", "ordered"])
def test_a_norm_with_an_offset_is_not_rounded(form):
  """1 + scale is not made in bfloat16, in which it would lose most of the scale."""
  dtype = jnp.dtype(jnp.bfloat16)
  layer = filled(Linear.declare((_D, _D), (None, None), dtype, FORMS[form]), np.asarray(jnp.eye(_D, dtype=dtype)))
  before = RMSNorm(_D, 1e-6, dtype, offset=1.0)
  before.scale[...] = jnp.asarray(0.01 * numbers(_D), dtype)
  x = jnp.asarray(numbers(9, _D), dtype)
  np.testing.assert_array_equal(layer(x, norm=before), before(x))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_vocabulary(form, tied):
  """Lines are those of the embedding, multiplied; the head's product is with its own weight or with the embedding's."""
  embed, head = declare_vocabulary(
    40, _D, jnp.dtype(jnp.float32), FORMS[form], tied=tied, multiplier=3.0, head_multiplier=0.5
  )
  model, table, weight = nnx.Dict(embed=embed, head=head), numbers(40, _D), numbers(_D, 40, seed=4)
  arrange = arranger(model)
  made = arrange("embed", table) | ({} if tied else arrange("head", weight))
  graphdef, state = nnx.split(model)
  leaves = {parameter_name(path): value for path, value in jax.tree.leaves_with_path(state)}
  assert {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()} == {
    name: (value.shape, value.dtype) for name, value in made.items()
  }
  model = nnx.merge(graphdef, jax.tree.map_with_path(lambda path, _: jnp.asarray(made[parameter_name(path)]), state))
  ids, x = np.array([[3, 39], [0, 33]], np.int32), numbers(5, _D) * _D**-0.5
  assert isinstance(model.embed, Embedding) and isinstance(model.head, Linear)
  lines = held(form, table.T).T if tied and not FORMS[form].flat else table  # flat: a table of its own
  np.testing.assert_array_equal(model.embed(jnp.asarray(ids)), lines[ids] * np.float32(3.0))
  expected = 0.5 * x @ held(form, table.T if tied else weight)
  np.testing.assert_allclose(model.head(jnp.asarray(x)), expected, atol=TOLERANCE[form], rtol=0)


def test_stored_folders_keep_their_names():
  """The demo model's folder was written before linear layers were modules of their own."""
  loaded = open_checkpoint(str(DEMO), make_mesh(jax.devices()[:1]), "float32").load()  # refuses other names
  names = [parameter_name(path) for path, _ in jax.tree.leaves_with_path(loaded.params)]
  assert {"embed", "layers.0.attention.qkv", "layers.3.mlp.down", "final_norm.scale"} <= set(names)


def test_what_the_host_holds_comes_out_in_memory_of_its_own():
  """A weight may be a view of a file that is closed later."""
  for form in FORMS.values():
    embed, head = declare_vocabulary(40, _D, jnp.dtype(jnp.float32), form, tied=True)
    table = numbers(40, _D)
    for value in arranger(nnx.Dict(embed=embed, head=head))("embed", table).values():
      assert not np.shares_memory(np.asarray(value), table)


@pytest.mark.parametrize("bits, groups", [(4, 1), (4, 3), (6, 1), (8, 1), (8, 3)])
@pytest.mark.parametrize("num_inputs", [1, 2])
@pytest.mark.parametrize("layout", [{}, {"flat": True}, {"packed": True}], ids=["xla", "flat", "packed"])
def test_a_checkpoints_codes_are_multiplied_as_they_are(bits, groups, num_inputs, layout):
  """With offsets, whose scales are f16, and in the layer that the name has, beside a plain one."""
  shape = (_D, 5) if num_inputs == 1 else (4, 6, 5)
  rng = np.random.default_rng(groups)
  codes = rng.integers(0, 1 << bits, shape, np.uint8)
  scales, offsets = (rng.standard_normal((groups, 5)).astype(np.float16) for _ in range(2))
  weight = GroupedWeight(codes, scales, bits, num_inputs, offsets)
  form = WeightForm(**layout, forms=(("layers.1.it", MatrixForm.of_weight(weight)),))
  for name, given in (("layers.0", weight.dequantize()), ("layers.1", weight)):
    made = Linear.declare(
      shape, (None,) * len(shape), jnp.dtype(jnp.float32), form.at(name).at("it"), num_inputs=num_inputs
    )
    x = numbers(3, *shape[:num_inputs])
    expected = np.tensordot(x, weight.dequantize(), num_inputs)
    atol = (1e-2 if form.packed and name == "layers.1" else 1e-5) * np.abs(expected).max()
    np.testing.assert_allclose(filled(made, given)(jnp.asarray(x)), expected, atol=atol)


def test_sums_of_groups_lose_nothing_in_bfloat16():
  """Codes, products and sums are exact; only the result is rounded, so codes may lie in less than a byte."""
  weight = quantize_by_group(numbers(64, 40), 1, 4, 16)
  form = WeightForm(flat=True, forms=(("it", MatrixForm.of_weight(weight)),))
  dtype = jnp.dtype(jnp.bfloat16)
  layer = filled(Linear.declare((64, 40), (None, None), dtype, form.at("it")), weight)
  assert layer.matrix.array[...].dtype == jnp.int4 and layer.matrix.array[...].shape == (4, 16, 40)
  x = jnp.asarray(numbers(3, 64), dtype)
  exact = np.asarray(x, np.float64) @ weight.dequantize()
  found = layer(x, dtype=jnp.dtype(jnp.float32))
  np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
  assert layer(x).dtype == dtype


@pytest.mark.parametrize("packed", [False, True])
def test_an_embedding_of_codes_is_looked_up_and_multiplied(packed):
  """An embedding with a form of its own keeps its codes; tied, the head has the same ones."""
  weight = quantize_by_group(numbers(_D, 40), 1, 4, 8)
  form = WeightForm(packed=packed, forms=(("embed", MatrixForm.of_weight(weight)),))
  for tied in (True, False):
    embed, head = declare_vocabulary(40, _D, jnp.dtype(jnp.float32), form, tied=tied)
    model = nnx.Dict(embed=embed, head=head)
    assert isinstance(embed, Embedding) and isinstance(head, Linear)
    assert (embed.matrix is head.matrix) == tied
    for name, value in arranger(model)("embed", weight).items():
      setattr(embed.matrix, "array" if name == "embed" else "scales", nnx.Param(jnp.asarray(value)))
    ids = np.array([[3, 39], [0, 33]], np.int32)
    np.testing.assert_array_equal(embed(jnp.asarray(ids)), weight.dequantize().T[ids])


@pytest.mark.parametrize("kind", ["w8a8", "fp8"])
@pytest.mark.parametrize("num_inputs", [1, 2])
def test_rows_of_8_bits_are_multiplied_exactly(kind, num_inputs):
  """Rows and weights lose what their types round; the sums and both scales lose nothing more, a row alone or not."""
  dtype = INT8_NUMBERS if kind == "w8a8" else E4M3
  shape = (_D, 5, 2) if num_inputs == 1 else (4, 6, 5)
  form = WeightForm(matrix=MatrixForm(kind))
  made = Linear.declare(shape, (None,) * 3, jnp.dtype(jnp.float32), form, num_inputs=num_inputs)
  weight, x = numbers(*shape), numbers(3, *shape[:num_inputs])
  x[1] *= 1000  # another row's numbers change nothing
  layer = filled(made, weight)
  values, scales = (np.asarray(part, np.float32) for part in quantize(jnp.asarray(weight), num_inputs, dtype))
  rows, factors = (np.asarray(part, np.float32) for part in quantize_rows(jnp.asarray(x), num_inputs, dtype))
  factors = factors.reshape(3, *(1 for _ in shape[num_inputs:]))
  expected = np.tensordot(rows.astype(np.float64), values.astype(np.float64), num_inputs) * factors * scales
  np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(layer(jnp.asarray(x))[2], layer(jnp.asarray(x[2:]))[0], rtol=1e-5)


def test_inputs_that_make_no_groups():
  form = WeightForm(matrix=MatrixForm("grouped", 4, 32, scale_dtype="float16")).at("layers.0.mlp.down")
  with pytest.raises(UnsupportedForm, match="down has 24 inputs, which groups of 32 do not divide"):
    Linear.declare((_D, 4), (None, None), jnp.dtype(jnp.float32), form)
  shared = dataclasses.replace(form, axis="model", name="layers.0.mlp.down")
  with pytest.raises(UnsupportedForm, match="has 24 inputs on each of these devices, which groups of 32 do not divide"):
    Linear.declare((_D, 4), ("mlp", None), jnp.dtype(jnp.float32), shared)
  odd = WeightForm(matrix=MatrixForm("grouped", 4, scale_dtype="float16")).at("it")
  with pytest.raises(UnsupportedForm, match="it has 7 inputs, an odd number of codes of 4 bits"):
    Linear.declare((7, 4), (None, None), jnp.dtype(jnp.float32), odd)
  packed = WeightForm(packed=True, matrix=MatrixForm("grouped", 4, 6, scale_dtype="float16")).at("it")
  with pytest.raises(
    UnsupportedForm, match="it: packed matmul: groups of 6 inputs at 4 bits; groups must be multiples"
  ):
    Linear.declare((_D, 4), (None, None), jnp.dtype(jnp.float32), packed)
