"""Linear layers and embeddings, and the representations of their weights. May not know a decoder.

A representation is one class: its declared parameters, its conversion of a plain weight, and its product with the norm
or gates before it and the residual after it. A decoder uses layers and never names a representation. To add one, write
a class and add a line to `_MATRICES`. Scales inside the sum belong to the class's product. Low-rank adapters are one
more term in `Linear.__call__`, from the input after norm or gates.

A stored parameter has a separate name (`stored_name`): the layer's name, independent of the module that holds the
weight.
"""

from collections.abc import Callable
import dataclasses
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.adapters import LinearAdapter
from models.config import Activation
from models.layers import SPLIT_AXES, RMSNorm, param, sum_over_devices
from models.quantize import quantize
from pallas_kernels.packed_matmul import api as packed_matmul

Array = jax.Array | np.ndarray
Part = tuple[slice, ...]  # of an array, by dimension


@dataclasses.dataclass(frozen=True)
class WeightForm:
  """The representation of the weights of matrix products; embeddings that are only looked up, and norms, are plain.

  Attributes:
    packed: the layout of pallas_kernels/packed_matmul, for one CPU.
    quantization: "none": the model's dtype; "int8": integers with a scale an output (models/quantize.py).
    ordered: packed products give a row the same bits in any batch; the layout does not change.
    flat: a plain matrix is stored as [inputs, outputs], because a TPU tiles the last two dimensions of an array. Of the
      shape [D, K, G + 2, H] it copies the whole weight in every step.
    axis: the mesh axis whose devices share the weights; a layer is then one device's share, and runs inside of a
      shard_map over this axis. "": one device has the whole.
  """

  packed: bool = False
  quantization: str = "none"
  ordered: bool = False
  flat: bool = False
  axis: str = ""

  @property
  def orders_norms(self) -> bool:
    """Whether norms outside the products sum in an order that does not depend on the batch."""
    return self.packed

  @property
  def is_made_on_host(self) -> bool:
    """Whether the loader converts a weight in host memory, before it moves to the device."""
    return self.packed


PLAIN = WeightForm()


def _gate(x: jax.Array, activation: Activation) -> jax.Array:  # [..., 2, F] -> [..., F]
  gates = jax.nn.silu(x[..., 0, :]) if activation == "silu" else jax.nn.gelu(x[..., 0, :], approximate=True)
  return gates * x[..., 1, :]


# --- Representations --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MatrixSpec:
  """A weight in a checkpoint.

  Attributes:
    shape, axes: dimensions and their logical names; the first `num_inputs` are inputs, the others outputs.
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

  @property
  def splits_inputs(self) -> bool:
    """Whether each device has a share of the inputs, and so a part of every sum."""
    return any(axis in SPLIT_AXES for axis in self.axes[: self.num_inputs])

  @property
  def splits_outputs(self) -> bool:
    return any(axis in SPLIT_AXES for axis in self.axes[self.num_inputs :])


class Matrix(nnx.Module):
  """A weight in one representation.

  Attributes:
    array: the parameter under the layer's stored name.
  """

  array: nnx.Param

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    del form
    self.spec = spec

  def arrange(self, weight: Array, part: Part | None = None) -> dict[str, Array]:
    """Converts a plain weight to the parameters of this module, by attribute.

    Copies arrays in host memory, because a weight may be a view of a file.

    Args:
      weight: of `spec.shape`; with a part, of any shape.
      part: the part of `weight` that has `spec.shape`. The rest decides scales with it. Only packed forms take one.
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
    """Multiplies x [..., *inputs] by the weight: [..., *outputs]. Arguments as in `Linear.__call__`."""
    raise NotImplementedError


class PlainMatrix(Matrix):
  """The checkpoint's layout, multiplied by XLA; with `form.flat` one matrix unless devices split an inner dimension."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(spec, form)
    self.shape, axes, num_inputs = spec.shape, spec.axes, spec.num_inputs
    if form.flat and not any(axes[1:num_inputs]) and not any(axes[num_inputs + 1 :]):
      self.shape, axes = (math.prod(spec.inputs), math.prod(spec.outputs)), (axes[0], axes[num_inputs])
    self.array = param(self.shape, axes, spec.dtype)

  def arrange(self, weight: Array, part: Part | None = None) -> dict[str, Array]:
    assert part is None, "only packed forms take a part"
    return {"array": _owned(weight).reshape(self.shape)}

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
  """Integers, with scales of the output's dimensions applied after the sum. XLA converts during the product."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(dataclasses.replace(spec, dtype=jnp.dtype(jnp.int8)), form)
    self.scales = param(spec.outputs, spec.axes[spec.num_inputs :], jnp.dtype(jnp.float32))

  def arrange(self, weight: Array, part: Part | None = None) -> dict[str, Array]:
    assert part is None, "only packed forms take a part"
    values, scales = quantize(jnp.asarray(weight), self.spec.num_inputs)
    return {"array": values.reshape(self.shape), "scales": scales}

  def _times(self, x, weight, dtype):
    return super()._times(x, weight.astype(x.dtype), dtype)  # exact in any dtype of x

  def _scaled(self, product):
    scales = jnp.broadcast_to(self.scales[...], product.shape)
    return (product.astype(jnp.float32) * scales).astype(product.dtype)


class PackedMatrix(Matrix):
  """The layout of pallas_kernels/packed_matmul, as one matrix [inputs, outputs]."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(spec, form)
    self.ordered = form.ordered
    shape = packed_matmul.packed_shape(math.prod(spec.inputs), math.prod(spec.outputs))
    is_split = spec.splits_inputs or spec.splits_outputs
    self.array = param(shape, ("share" if is_split else None, None, None), spec.dtype)

  def arrange(self, weight: Array, part: Part | None = None) -> dict[str, Array]:
    weight = weight if part is None else weight[part]
    return {"array": packed_matmul.pack_weight(np.asarray(weight).reshape(math.prod(self.spec.inputs), -1))}

  def product(self, x, *, norm=None, activation=None, residual=None, num_rows=None, dtype=None):
    x, norm, activation = _prepared(x, norm, activation)
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

  def arrange_table(self, table: Array, part: Part | None = None) -> dict[str, Array]:
    """Like `arrange`, from the transposed matrix."""
    return self.arrange(table.T, None if part is None else part[::-1])

  def lines(self, indices: jax.Array) -> jax.Array:
    """Looks up columns of a matrix [D, V]: int32[...] -> [..., D]."""
    return self.array[...][indices // packed_matmul.COLUMNS, :, indices % packed_matmul.COLUMNS]

  def _scales(self) -> jax.Array | None:
    return None


def _prepared(
  x: jax.Array, norm: RMSNorm | None, activation: Activation | None, in_kernel: bool = True
) -> tuple[jax.Array, RMSNorm | None, Activation | None]:
  """Returns the arguments after applying the norm or the gates, unless a C++ kernel applies them.

  Args: in_kernel: whether the kernel does so where it can.
  """
  # The kernels' scale has x's dtype, to which offset + scale would round.
  if norm is not None and (not in_kernel or norm.offset and x.dtype != jnp.float32):
    x, norm = norm(x), None
  if activation is not None and (not in_kernel or activation != "silu"):
    x, activation = _gate(x, activation), None
  return x, norm, activation


def _norm_scale(norm: RMSNorm) -> jax.Array:
  return norm.scale[...] + jnp.asarray(norm.offset, norm.scale.dtype) if norm.offset else norm.scale[...]


class PackedInt8Matrix(PackedMatrix):
  """Integers in the packed layout, with f32[outputs] scales that the kernel applies after the sum."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(dataclasses.replace(spec, dtype=jnp.dtype(jnp.int8)), form)
    axes = ("share" if spec.splits_outputs else None,)
    self.scales = param((math.prod(spec.outputs),), axes, jnp.dtype(jnp.float32))

  def arrange(self, weight: Array, part: Part | None = None) -> dict[str, Array]:
    values, scales = quantize(jnp.asarray(weight), self.spec.num_inputs)
    scales = scales if part is None else scales[part[self.spec.num_inputs :]]
    return super().arrange(values, part) | {"scales": scales.reshape(-1)}

  def _scales(self) -> jax.Array | None:
    return self.scales[...]


class Table(PlainMatrix):
  """An embedding in the checkpoint's layout, [V, D], for lookups and, if tied, for x [..., D] times [D, V]."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    """Args: spec: the spec of the matrix [D, V]."""
    super().__init__(dataclasses.replace(spec, shape=spec.shape[::-1], axes=spec.axes[::-1]), form)
    self.spec = spec

  def arrange_table(self, table: Array, part: Part | None = None) -> dict[str, Array]:
    """Like `arrange`, from [V, D]."""
    return self.arrange(table if part is None else table[part])

  def lines(self, indices: jax.Array) -> jax.Array:
    """Looks up rows: int32[...] -> [..., D]."""
    return self.array[...][indices]

  def _times(self, x, weight, dtype):
    return jnp.einsum("...d,vd->...v", x, weight, preferred_element_type=dtype)


def _owned(weight: Array) -> Array:
  return packed_matmul.copy_array(weight) if isinstance(weight, np.ndarray) else weight


# By packed and quantization.
_MATRICES: dict[tuple[bool, str], type[Matrix]] = {
  (False, "none"): PlainMatrix,
  (False, "int8"): Int8Matrix,
  (True, "none"): PackedMatrix,
  (True, "int8"): PackedInt8Matrix,
}
# Types that serve as both embedding and tied head; otherwise the head is a separate matrix made from the embedding.
_TIED: dict[type[Matrix], type[Table | PackedMatrix]] = {PlainMatrix: Table, PackedMatrix: PackedMatrix}


def _matrix_type(form: WeightForm) -> type[Matrix]:
  return _MATRICES[form.packed, form.quantization]


# --- Layers -----------------------------------------------------------------------------------------------------------


class Linear(nnx.Module):
  """y = multiplier * (x times weight + bias), with optional norm, gates and residual.

  If several devices have a share of the inputs each, x is a share and y the whole.
  """

  def __init__(
    self,
    matrix: Matrix,
    bias: nnx.Param | None = None,
    multiplier: float = 1.0,
    sum_axis: str = "",
    ordered: bool = False,
  ):
    """See `declare`; sum_axis, ordered: as in `sum_over_devices`."""
    self.matrix, self.bias, self.multiplier = matrix, bias, multiplier
    self.sum_axis, self.ordered = sum_axis, ordered

  @property
  def inputs(self) -> tuple[int, ...]:
    """The input dimensions, which follow x's leading ones."""
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
    """Declares a layer whose weight has `shape` in a checkpoint of `dtype`; see MatrixSpec."""
    spec = MatrixSpec(shape, axes, num_inputs, dtype)
    matrix = _matrix_type(form)(spec, form)
    own = param(spec.outputs, axes[num_inputs:], dtype) if bias else None
    return cls(matrix, own, multiplier, form.axis if spec.splits_inputs else "", form.ordered)

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
    adapter: LinearAdapter | None = None,
  ) -> jax.Array:
    """x [..., *inputs] -> [..., *outputs] of `dtype`, or x's.

    Args:
      norm: applied to x first; needs a single input dimension.
      activation: x is [..., 2, inputs], gates and then values; the layer multiplies activation(gates) * values
        (arXiv:2002.05202).
      residual: [..., *outputs], added to the result.
      residual_norm: applied to the result before the residual.
      num_rows: int32[1], the number of leading rows in use; None: all. Kernels skip the others if they can; results of
        the others are arbitrary.
      adapter: low-rank adapters to add to the product, for x [T, ...].
    """
    is_last = self.bias is None and self.multiplier == 1.0 and residual_norm is None and not self.sum_axis
    y = self.matrix.product(
      x,
      norm=norm,
      activation=activation,
      residual=residual if is_last else None,
      num_rows=num_rows,
      dtype=dtype,
    )
    if adapter is not None:
      x, norm, activation = _prepared(x, norm, activation, adapter.prepares_inputs)
      scale = None if norm is None else (_norm_scale(norm), norm.eps)
      y = adapter.add_to(y, x, scale, gated=activation is not None)
    if is_last:
      return y
    y = sum_over_devices(y, self.sum_axis, self.ordered)
    if self.bias is not None:
      y = y + jnp.broadcast_to(self.bias[...], y.shape)
    if self.multiplier != 1.0:
      y = y * jnp.asarray(self.multiplier, y.dtype)
    if residual_norm is not None:
      y = residual_norm(y)
    return y if residual is None else residual + y


class TiedHead(Linear):
  """A head that the loader makes from the embedding and stores separately."""


class Embedding(nnx.Module):
  """Maps token ids to rows of the embedding, times `multiplier`.

  With an `axis` each of its devices has a share of the rows, and the others' rows are zeros in the sum.
  """

  def __init__(self, matrix: Table | PackedMatrix, multiplier: float = 1.0, axis: str = ""):
    self.matrix, self.multiplier, self.axis = matrix, multiplier, axis

  def __call__(self, tokens: jax.Array) -> jax.Array:  # int32[...] -> [..., D]
    if self.axis:
      (size,) = self.matrix.spec.outputs
      tokens = tokens - jax.lax.axis_index(self.axis) * size
      inside = (tokens >= 0) & (tokens < size)
      x = self.matrix.lines(jnp.where(inside, tokens, 0))
      x = jnp.where(jnp.broadcast_to(inside[..., None], x.shape), x, 0)
      x = sum_over_devices(x, self.axis)  # of one number and zeros, so exact in any order
    else:
      x = self.matrix.lines(tokens)
    return x if self.multiplier == 1.0 else x * jnp.asarray(self.multiplier, x.dtype)


def declare_vocabulary(
  size: int,
  model_dim: int,
  dtype: jnp.dtype,
  form: WeightForm,
  *,
  tied: bool,
  has_head: bool = True,
  multiplier: float = 1.0,
  head_multiplier: float = 1.0,
) -> tuple[Embedding, Linear | None]:
  """Declares the embedding and the head [D, V], if any. If tied, they share a weight, where possible also in memory."""
  spec = MatrixSpec((model_dim, size), ("embed", "vocab"), 1, dtype)
  if not has_head:
    return Embedding(Table(spec, form), multiplier, form.axis), None
  kind = _matrix_type(form)
  if tied and kind in _TIED:
    table = _TIED[kind](spec, form)
    return Embedding(table, multiplier, form.axis), Linear(table, multiplier=head_multiplier)
  head = (TiedHead if tied else Linear)(kind(spec, form), multiplier=head_multiplier)
  return Embedding(Table(spec, form), multiplier, form.axis), head


# --- Conversion of a plain model's parameters -------------------------------------------------------------------------

# Suffixes of parameters' paths in the modules, and of their stored names.
_ENDINGS = {".matrix.array": "", ".matrix.scales": "_scale", ".bias": "_bias"}


def stored_name(path: str) -> str:
  """Returns `layers.0.attention.qkv` for `layers.0.attention.qkv.matrix.array`; others keep their path."""
  for ending, stored in _ENDINGS.items():
    if path.endswith(ending):
      return path.removesuffix(ending) + stored
  return path


def arranger(model: nnx.Module) -> Callable[..., dict[str, Array]]:
  """Returns a function that converts parameters of the plain model to those of `model`, which may be abstract.

  The function takes a stored name, the plain value and, for a model that is one device's share, its part of the value
  (Matrix.arrange). It returns values by stored name, in the shapes of `model`.
  """
  modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
  tied = [(name, module.matrix) for name, module in modules.items() if isinstance(module, TiedHead)]

  def arrange(name: str, weight: Array, part: Part | None = None) -> dict[str, Array]:
    made: dict[str, dict[str, Array]] = {}
    match modules.get(name):
      case Embedding(matrix=table):
        made[name] = table.arrange_table(weight, part)
        made |= {head: matrix.arrange(weight.T, None if part is None else part[::-1]) for head, matrix in tied}
      case Linear(matrix=matrix):
        made[name] = matrix.arrange(weight, part)
      case _:
        return {name: _owned(weight if part is None else weight[part])}
    return {
      stored_name(f"{owner}.matrix.{part}"): value for owner, parts in made.items() for part, value in parts.items()
    }

  return arrange
