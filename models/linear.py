"""Linear layers and embeddings. May not know how a weight is stored (models/matrices.py), or a decoder.

A decoder uses layers and never names a representation. Low-rank adapters are one more term in `Linear.__call__`, from
the input after norm or gates.

A stored parameter has a separate name (`stored_name`): the layer's name, independent of the module that holds the
weight.
"""

from collections.abc import Callable

from flax import nnx
import jax
import jax.numpy as jnp

from models.adapters import LinearAdapter
from models.config import Activation
from models.layers import RMSNorm, param, sum_over_devices
from models.matrices import (
  Array,
  LowPrecision,
  Matrix,
  MatrixSpec,
  Part,
  TableMatrix,
  Weight,
  declare_matrix,
  declare_table,
  declare_tied,
  norm_scale,
  own_array,
  prepare_inputs,
)
from models.weight_form import WeightForm

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
    """Declares a layer whose weight has `shape` in a checkpoint of `dtype`; see MatrixSpec.

    Args: form: of the layer, by its stored name. Raises UnsupportedForm.
    """
    spec = MatrixSpec(shape, axes, num_inputs, dtype)
    matrix = declare_matrix(spec, form)
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
      x, norm, activation = prepare_inputs(x, norm, activation, adapter.prepares_inputs)
      scale = None if norm is None else (norm_scale(norm), norm.eps)
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

  def __init__(self, matrix: TableMatrix, multiplier: float = 1.0, axis: str = ""):
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
  """Declares the embedding and the head [D, V], if any. If tied, they share a weight, where possible also in memory.

  Args: form: of the model. A tied weight has the form of the embedding's name.
  """
  spec = MatrixSpec((model_dim, size), ("embed", "vocab"), 1, dtype)
  of_embed = form.at("embed")
  table = declare_tied(spec, of_embed) if tied and has_head else None
  if table is not None:
    return Embedding(table, multiplier, form.axis), Linear(table, multiplier=head_multiplier)
  embed = Embedding(declare_table(spec, of_embed), multiplier, form.axis)
  if not has_head:
    return embed, None
  return embed, (TiedHead if tied else Linear)(declare_matrix(spec, form.at("head")), multiplier=head_multiplier)


# --- Conversion of a plain model's parameters -------------------------------------------------------------------------

# Suffixes of parameters' paths in the modules, and of their stored names.
_ENDINGS = {".matrix.array": "", ".matrix.scales": "_scale", ".matrix.offsets": "_offset", ".bias": "_bias"}


def stored_name(path: str) -> str:
  """Returns `layers.0.attention.qkv` for `layers.0.attention.qkv.matrix.array`; others keep their path."""
  for ending, stored in _ENDINGS.items():
    if path.endswith(ending):
      return path.removesuffix(ending) + stored
  return path


def arranger(model: nnx.Module) -> Callable[..., dict[str, Array]]:
  """Returns a function that converts parameters of a checkpoint to those of `model`, which may be abstract.

  The function takes a stored name, the value and, for a model that is one device's share, its part of the value
  (Matrix.arrange). It returns values by stored name, in the shapes of `model`.
  """
  modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
  tied = [(name, module.matrix) for name, module in modules.items() if isinstance(module, TiedHead)]

  def arrange(name: str, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    made: dict[str, dict[str, Array]] = {}
    match modules.get(name):
      case Embedding(matrix=table):
        made[name] = table.arrange_table(weight, part)
        if tied:
          assert not isinstance(weight, LowPrecision), "a form of its own"
          made |= {head: matrix.arrange(weight.T, None if part is None else part[::-1]) for head, matrix in tied}
      case Linear(matrix=matrix):
        made[name] = matrix.arrange(weight, part)
      case _:
        assert not isinstance(weight, LowPrecision), name
        return {name: own_array(weight if part is None else weight[part])}
    return {
      stored_name(f"{owner}.matrix.{part}"): value for owner, parts in made.items() for part, value in parts.items()
    }

  return arrange
