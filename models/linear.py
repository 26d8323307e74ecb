"""Linear layers and embeddings, and how their weights are held. Pure; knows no decoder, and decides for none.

A representation is one class here: what it declares, what it makes of a plain weight, and its product, with the norm or
the gates before it and the residual behind, fused or not. A decoder asks for these and never for a representation. To
add one: a class, and a line in `_MATRICES`. Scales inside the sum are its own product's matter; a low-rank addition is
one more term in `Linear.__call__`, which then does the work around the products itself.

Stored parameters have names of their own (`stored_name`): a layer's is its weight's, whatever the modules are called.
"""

from collections.abc import Callable
import dataclasses
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.config import Activation
from models.layers import RMSNorm, param
from models.quantize import quantize
from pallas_kernels.packed_matmul import api as packed_matmul

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class WeightForm:
  """How a model holds the weights that it multiplies by; what is only looked up, and norms, are always plain.

  Attributes:
    packed: in the layout of pallas_kernels/packed_matmul, for one CPU.
    quantization: "none": of the model's dtype; "int8": whole numbers with a scale an output (models/quantize.py).
    ordered: packed ones are multiplied so that a row has the same bits in any batch; they are held alike.
  """

  packed: bool = False
  quantization: str = "none"
  ordered: bool = False

  @property
  def orders_norms(self) -> bool:
    """Whether norms beside the products add in an order that the batch does not change, as packed products can."""
    return self.packed

  @property
  def is_made_on_host(self) -> bool:
    """Whether a weight is brought into the form from the host's memory, so that it need not be the device's before."""
    return self.packed


PLAIN = WeightForm()


def _gate(x: jax.Array, activation: Activation) -> jax.Array:  # [..., 2, F] -> [..., F]
  gates = jax.nn.silu(x[..., 0, :]) if activation == "silu" else jax.nn.gelu(x[..., 0, :], approximate=True)
  return gates * x[..., 1, :]


# --- Representations --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MatrixSpec:
  """A weight as a checkpoint has it.

  Attributes:
    shape, axes: its dimensions and their logical names; the first `num_inputs` meet the input, the others are the
      output.
    num_inputs: at least 1.
    dtype: of the plain weight.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  num_inputs: int
  dtype: jnp.dtype

  @property
  def inputs(self) -> tuple[int, ...]:
    return self.shape[: self.num_inputs]

  @property
  def outputs(self) -> tuple[int, ...]:
    return self.shape[self.num_inputs :]


class Matrix(nnx.Module):
  """A weight in one representation.

  Attributes:
    array: the parameter that has the layer's stored name.
  """

  array: nnx.Param

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    del form
    self.spec = spec

  def arrange(self, weight: Array) -> dict[str, Array]:
    """The parameters of this module, by attribute, from a plain weight of `spec.shape`.

    What the host holds comes out in memory of its own: a weight may be a view of a file.
    """
    raise NotImplementedError

  def product(
    self,
    x: jax.Array,
    *,
    norm: RMSNorm | None = None,
    activation: Activation | None = None,
    residual: jax.Array | None = None,
    num_rows: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
  ) -> jax.Array:
    """x [..., *inputs] times the weight: [..., *outputs] of `dtype`, or x's. Arguments: those of `Linear.__call__`."""
    raise NotImplementedError


class PlainMatrix(Matrix):
  """As the checkpoint has it, multiplied by XLA."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(spec, form)
    self.array = param(spec.shape, spec.axes, spec.dtype)

  def arrange(self, weight: Array) -> dict[str, Array]:
    return {"array": _owned(weight)}

  def product(self, x, *, norm=None, activation=None, residual=None, num_rows=None, dtype=None):
    del num_rows
    x = x if norm is None else norm(x)
    x = x if activation is None else _gate(x, activation)
    y = self._scaled(self._times(x, self.array[...], dtype))
    return y if residual is None else residual + y

  def _times(self, x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None) -> jax.Array:
    spec = self.spec
    lead, inputs, outputs = x.shape[: x.ndim - spec.num_inputs], math.prod(spec.inputs), math.prod(spec.outputs)
    if any(spec.axes[spec.num_inputs + 1 :]):
      # Not x @ weight.reshape(D, 2F): that copies the weight on a TPU, and gathers it where F is split over devices.
      assert spec.num_inputs == 1 and len(spec.outputs) == 2, spec
      return jnp.einsum("...d,dcf->...cf", x, weight, preferred_element_type=dtype)
    x, weight = x.reshape(*lead, inputs), weight.reshape(inputs, outputs)
    return jnp.matmul(x, weight, preferred_element_type=dtype).reshape(*lead, *spec.outputs)

  def _scaled(self, product: jax.Array) -> jax.Array:
    return product


class Int8Matrix(PlainMatrix):
  """Whole numbers, and scales of the output's dimensions behind the sum. XLA converts on the way."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(dataclasses.replace(spec, dtype=jnp.dtype(jnp.int8)), form)
    self.scales = param(spec.outputs, spec.axes[spec.num_inputs :], jnp.dtype(jnp.float32))

  def arrange(self, weight: Array) -> dict[str, Array]:
    values, scales = quantize(jax.device_put(weight), self.spec.num_inputs)
    return {"array": values, "scales": scales}

  def _times(self, x, weight, dtype):
    return super()._times(x, weight.astype(x.dtype), dtype)  # exact in any dtype of x

  def _scaled(self, product):
    scales = jnp.broadcast_to(self.scales[...], product.shape)
    return (product.astype(jnp.float32) * scales).astype(product.dtype)


class PackedMatrix(Matrix):
  """In the layout of pallas_kernels/packed_matmul, as one matrix [inputs, outputs]."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(spec, form)
    self.ordered = form.ordered
    shape = packed_matmul.packed_shape(math.prod(spec.inputs), math.prod(spec.outputs))
    self.array = param(shape, (None, None, None), spec.dtype)

  def arrange(self, weight: Array) -> dict[str, Array]:
    return {"array": packed_matmul.pack(np.asarray(weight).reshape(math.prod(self.spec.inputs), -1))}

  def product(self, x, *, norm=None, activation=None, residual=None, num_rows=None, dtype=None):
    if norm is not None and norm.offset and x.dtype != jnp.float32:
      x, norm = norm(x), None  # the kernel's scale has x's dtype: offset + scale would be rounded to it
    if activation is not None and activation != "silu":
      x, activation = _gate(x, activation), None
    spec, gated = self.spec, activation is not None
    lead = x.shape[: x.ndim - spec.num_inputs - gated]
    outputs = math.prod(spec.outputs)
    product = packed_matmul.matmul(
      x.reshape(*lead, math.prod(spec.inputs) * (2 if gated else 1)),
      self.array[...],
      outputs,
      dtype=dtype,
      scales=self._scales(),
      norm=None if norm is None else (_norm_scale(norm), norm.eps),
      num_rows=num_rows,
      gated=gated,
      residual=None if residual is None else residual.reshape(*lead, outputs),
      ordered=self.ordered,
    )
    return product.reshape(*lead, *spec.outputs)

  def arrange_table(self, table: Array) -> dict[str, Array]:
    """As `arrange`, from the transposed matrix."""
    return self.arrange(table.T)

  def lines(self, indices: jax.Array) -> jax.Array:
    """Columns of a matrix [D, V], int32[...] -> [..., D]."""
    return self.array[...][indices // packed_matmul.COLUMNS, :, indices % packed_matmul.COLUMNS]

  def _scales(self) -> jax.Array | None:
    return None


def _norm_scale(norm: RMSNorm) -> jax.Array:
  return norm.scale[...] + jnp.asarray(norm.offset, norm.scale.dtype) if norm.offset else norm.scale[...]


class PackedInt8Matrix(PackedMatrix):
  """Whole numbers in the packed layout, and f32[outputs] scales, which the kernel puts behind the sum."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(dataclasses.replace(spec, dtype=jnp.dtype(jnp.int8)), form)
    self.scales = param((math.prod(spec.outputs),), (None,), jnp.dtype(jnp.float32))

  def arrange(self, weight: Array) -> dict[str, Array]:
    values, scales = quantize(jax.device_put(weight), self.spec.num_inputs)
    return super().arrange(values) | {"scales": scales.reshape(-1)}

  def _scales(self) -> jax.Array | None:
    return self.scales[...]


class Table(PlainMatrix):
  """An embedding as the checkpoint has it, [V, D]: for its lines, and where it is tied, for x [..., D] times [D, V]."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    """Args: spec: of the matrix [D, V]."""
    super().__init__(dataclasses.replace(spec, shape=spec.shape[::-1], axes=spec.axes[::-1]), form)
    self.spec = spec

  def arrange_table(self, table: Array) -> dict[str, Array]:
    """As `arrange`, from [V, D]."""
    return self.arrange(table)

  def lines(self, indices: jax.Array) -> jax.Array:
    """int32[...] -> [..., D]."""
    return self.array[...][indices]

  def _times(self, x, weight, dtype):
    return jnp.einsum("...d,vd->...v", x, weight, preferred_element_type=dtype)


def _owned(weight: Array) -> Array:
  return packed_matmul.copied(weight) if isinstance(weight, np.ndarray) else weight


# By packed and quantization.
_MATRICES: dict[tuple[bool, str], type[Matrix]] = {
  (False, "none"): PlainMatrix,
  (False, "int8"): Int8Matrix,
  (True, "none"): PackedMatrix,
  (True, "int8"): PackedInt8Matrix,
}
# What serves as embedding and tied head both; else the head is a matrix of its own, made of the embedding.
_TIED: dict[type[Matrix], type[Table | PackedMatrix]] = {PlainMatrix: Table, PackedMatrix: PackedMatrix}


def _matrix_type(form: WeightForm) -> type[Matrix]:
  return _MATRICES[form.packed, form.quantization]


# --- Layers -----------------------------------------------------------------------------------------------------------


class Linear(nnx.Module):
  """y = multiplier * (x times weight + bias), and the work before and behind it."""

  def __init__(self, matrix: Matrix, bias: nnx.Param | None = None, multiplier: float = 1.0):
    """See `declare`."""
    self.matrix, self.bias, self.multiplier = matrix, bias, multiplier

  @property
  def inputs(self) -> tuple[int, ...]:
    """Dimensions that x has behind its leading ones."""
    return self.matrix.spec.inputs

  @classmethod
  def declare(
    cls,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: jnp.dtype,
    form: WeightForm,
    *,
    num_inputs: int = 1,
    bias: bool = False,
    multiplier: float = 1.0,
  ) -> "Linear":
    """A layer whose weight has `shape` in a checkpoint of `dtype`; see MatrixSpec."""
    spec = MatrixSpec(shape, axes, num_inputs, dtype)
    matrix = _matrix_type(form)(spec, form)
    return cls(matrix, param(spec.outputs, axes[num_inputs:], dtype) if bias else None, multiplier)

  def __call__(
    self,
    x: jax.Array,
    *,
    norm: RMSNorm | None = None,
    activation: Activation | None = None,
    residual: jax.Array | None = None,
    residual_norm: RMSNorm | None = None,
    num_rows: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
  ) -> jax.Array:
    """x [..., *inputs] -> [..., *outputs] of `dtype`, or x's.

    Args:
      norm: x goes through it first; there is one input dimension.
      activation: x is [..., 2, inputs], gates and then values: activation(gates) * values is what is multiplied
        (arXiv:2002.05202).
      residual: [..., *outputs], added to the result.
      residual_norm: what is added to the residual goes through it first.
      num_rows: int32[1], of x's rows how many are in use, those in front; None: all. Where a kernel can, it leaves the
        others out. What comes out for them means nothing.
    """
    is_last = self.bias is None and self.multiplier == 1.0 and residual_norm is None
    y = self.matrix.product(
      x,
      norm=norm,
      activation=activation,
      residual=residual if is_last else None,
      num_rows=num_rows,
      dtype=dtype,
    )
    if is_last:
      return y
    if self.bias is not None:
      y = y + jnp.broadcast_to(self.bias[...], y.shape)
    if self.multiplier != 1.0:
      y = y * jnp.asarray(self.multiplier, y.dtype)
    if residual_norm is not None:
      y = residual_norm(y)
    return y if residual is None else residual + y


class TiedHead(Linear):
  """The head where it is made of the embedding, but held apart from it."""


class Embedding(nnx.Module):
  """Token ids to vectors: lines of the embedding, times `multiplier`."""

  def __init__(self, matrix: Table | PackedMatrix, multiplier: float = 1.0):
    self.matrix, self.multiplier = matrix, multiplier

  def __call__(self, tokens: jax.Array) -> jax.Array:  # int32[...] -> [..., D]
    x = self.matrix.lines(tokens)
    return x if self.multiplier == 1.0 else x * jnp.asarray(self.multiplier, x.dtype)


def declare_vocabulary(
  size: int,
  model_dim: int,
  dtype: jnp.dtype,
  form: WeightForm,
  *,
  tied: bool,
  multiplier: float = 1.0,
  head_multiplier: float = 1.0,
) -> tuple[Embedding, Linear]:
  """The embedding and the head, [D, V]; tied, they are one weight in the checkpoint, and in memory where that works."""
  spec = MatrixSpec((model_dim, size), ("embed", "vocab"), 1, dtype)
  kind = _matrix_type(form)
  if tied and kind in _TIED:
    table = _TIED[kind](spec, form)
    return Embedding(table, multiplier), Linear(table, multiplier=head_multiplier)
  head = (TiedHead if tied else Linear)(kind(spec, form), multiplier=head_multiplier)
  return Embedding(Table(spec, form), multiplier), head


# --- From a plain model's parameters to a form's ----------------------------------------------------------------------

# Ends of parameters' paths in the modules, and of their stored names.
_ENDINGS = {".matrix.array": "", ".matrix.scales": "_scale", ".bias": "_bias"}


def stored_name(path: str) -> str:
  """`layers.0.attention.qkv` for the parameter `layers.0.attention.qkv.matrix.array`; others keep their path."""
  for ending, stored in _ENDINGS.items():
    if path.endswith(ending):
      return path.removesuffix(ending) + stored
  return path


def arranger(model: nnx.Module) -> Callable[[str, Array], dict[str, Array]]:
  """What turns a parameter of the plain model into those of `model`, which may hold no arrays.

  It takes a stored name and the plain value, and gives values by stored name, in the shapes that `model` declares.
  """
  modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
  tied = [(name, module.matrix) for name, module in modules.items() if isinstance(module, TiedHead)]

  def arrange(name: str, weight: Array) -> dict[str, Array]:
    made: dict[str, dict[str, Array]] = {}
    match modules.get(name):
      case Embedding(matrix=table):
        made[name] = table.arrange_table(weight)
        made |= {head: matrix.arrange(weight.T) for head, matrix in tied}
      case Linear(matrix=matrix):
        made[name] = matrix.arrange(weight)
      case _:
        return {name: _owned(weight)}
    return {
      stored_name(f"{owner}.matrix.{part}"): value for owner, parts in made.items() for part, value in parts.items()
    }

  return arrange
