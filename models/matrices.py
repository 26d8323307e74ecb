"""Representations of the weights of matrix products. May not know layers or decoders.

A representation is one class: its declared parameters, its conversion of a weight, and its product with the norm or
gates before it and the residual after it. To add one, write a class and add a line to `_MATRICES`. Scales inside the
sum belong to the class's product.
"""

import dataclasses
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.config import Activation
from models.fp8_weight import Fp8Weight
from models.grouped_weight import GroupedWeight
from models.layers import SPLIT_AXES, RMSNorm, param
from models.quantize import E4M3, INT8, quantize, quantize_groups, quantize_rows
from models.weight_form import PLAIN_MATRIX, MatrixForm, UnsupportedForm, WeightForm
from pallas_kernels.packed_matmul import api as packed_matmul

Array = jax.Array | np.ndarray
LowPrecision = GroupedWeight | Fp8Weight
Weight = Array | LowPrecision
Part = tuple[slice, ...]  # of an array, by dimension


def apply_gates(x: jax.Array, activation: Activation) -> jax.Array:  # [..., 2, F] -> [..., F]
  gates = jax.nn.silu(x[..., 0, :]) if activation == "silu" else jax.nn.gelu(x[..., 0, :], approximate=True)
  return gates * x[..., 1, :]


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
    """Args: form: of the matrix, whose name errors mention. Raises UnsupportedForm."""
    del form
    self.spec = spec

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    """Converts a weight to the parameters of this module, by attribute.

    Copies arrays in host memory, because a weight may be a view of a file.

    Args:
      weight: of `spec.shape`; with a part, of any shape. Only grouped forms take a GroupedWeight, of their own form,
        and only Fp8Matrix an Fp8Weight.
      part: the part of `weight` that has `spec.shape`. The rest decides scales with it. Only forms that are made on the
        host take one.
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

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    assert part is None, "made on the device"
    assert not isinstance(weight, LowPrecision), "a plain layer"
    return {"array": own_array(weight).reshape(self.shape)}

  def product(self, x, *, norm=None, activation=None, residual=None, num_rows=None, dtype=None):
    del num_rows
    x = x if norm is None else norm(x)
    x = x if activation is None else apply_gates(x, activation)
    y = self._scaled(self._times(x, self.array[...], dtype), jnp.dtype(dtype or x.dtype))
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

  def _scaled(self, product: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return product


def _choose_sums(dtype: jnp.dtype | None, operand: jnp.dtype) -> jnp.dtype | None:
  """Returns the dtype of sums that scales multiply afterwards: float16 ends at 65504, which sums of codes exceed."""
  return jnp.dtype(jnp.float32) if (dtype or operand) == jnp.float16 else dtype


class Int8Matrix(PlainMatrix):
  """Integers, with scales of the output's dimensions applied after the sum. XLA converts during the product."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(dataclasses.replace(spec, dtype=jnp.dtype(jnp.int8)), form)
    self.scales = param(spec.outputs, spec.axes[spec.num_inputs :], jnp.dtype(jnp.float32))

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    assert part is None, "made on the device"
    assert not isinstance(weight, LowPrecision), "a form of its own"
    values, scales = quantize(jnp.asarray(weight), self.spec.num_inputs)
    return {"array": values.reshape(self.shape), "scales": scales}

  def _times(self, x, weight, dtype):
    return super()._times(x, weight.astype(x.dtype), _choose_sums(dtype, x.dtype))  # exact in any dtype of x

  def _scaled(self, product, dtype):
    scales = jnp.broadcast_to(self.scales[...], product.shape)
    return (product.astype(jnp.float32) * scales).astype(dtype)


class RowScaledMatrix(PlainMatrix):
  """Integers of 8 bits with a scale an output, and products with rows of x in the same type, each with a scale, too.

  The device multiplies numbers of 8 bits; both scales multiply the sums. Numbers of x that are not finite make their
  row NaN.
  """

  _DTYPE, _SUMS = INT8, jnp.dtype(jnp.int32)

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(dataclasses.replace(spec, dtype=self._DTYPE), form)
    self.scales = param(spec.outputs, spec.axes[spec.num_inputs :], jnp.dtype(jnp.float32))

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    assert part is None, "made on the device"
    assert not isinstance(weight, LowPrecision), "a form of its own"
    values, scales = quantize(jnp.asarray(weight), self.spec.num_inputs, self._DTYPE)
    return {"array": values.reshape(self.shape), "scales": scales}

  def _times(self, x, weight, dtype):
    spec, dtype = self.spec, jnp.dtype(dtype or x.dtype)
    values, factors = quantize_rows(x, spec.num_inputs, self._DTYPE)
    sums = self._sum(values, weight, self._SUMS or _choose_sums(dtype, dtype))
    factors = factors.reshape(*factors.shape, *(1 for _ in spec.outputs))
    scales = jnp.broadcast_to(factors, sums.shape) * jnp.broadcast_to(self.scales[...], sums.shape)
    return (sums.astype(jnp.float32) * scales).astype(dtype)

  def _sum(self, values: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return super()._times(values, weight, dtype)


class Fp8Matrix(RowScaledMatrix):
  """The same with numbers of e4m3, stored as [outputs, inputs], the only order in which cuBLASLt takes them.

  Sums are f32 inside of a product. A result of f32 would need memory for its parts, so it has the layer's dtype.
  """

  _DTYPE, _SUMS = E4M3, None

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(spec, form)
    axes = spec.axes[: spec.num_inputs], spec.axes[spec.num_inputs :]
    (inputs, of_inputs), (outputs, of_outputs) = _merge(spec.inputs, axes[0]), _merge(spec.outputs, axes[1])
    assert len(inputs) == 1, spec
    self.shape = (*outputs, *inputs)
    self.array = param(self.shape, (*of_outputs, *of_inputs), E4M3)

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    assert part is None, "made on the device"
    assert not isinstance(weight, GroupedWeight), "a form of its own"
    count, dims = self.spec.num_inputs, len(self.spec.shape)
    order = (*range(count, dims), *range(count))
    if isinstance(weight, Fp8Weight):
      codes = weight.values.view(np.uint8).transpose(order).reshape(self.shape)
      return {"array": own_array(codes).view(E4M3), "scales": own_array(weight.scales)}
    values, scales = quantize(jnp.asarray(weight), count, E4M3)
    return {"array": values.transpose(order).reshape(self.shape), "scales": scales}

  def _sum(self, values, weight, dtype):
    lead = values.shape[: values.ndim - self.spec.num_inputs]
    rule = "...d,cfd->...cf" if weight.ndim == 3 else "...d,nd->...n"
    sums = jnp.einsum(rule, values.reshape(*lead, -1), weight, preferred_element_type=dtype)
    return sums.reshape(*lead, *self.spec.outputs)


def _merge(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
  """Returns a shape and its logical axes as one dimension, unless devices split an inner one."""
  return (shape, axes) if any(axes[1:]) else ((math.prod(shape),), axes[:1])


class GroupedMatrix(PlainMatrix):
  """Codes with scales and offsets by group of inputs, which XLA dequantizes in the product.

  x keeps its dtype: only the packed kernel quantizes activations. A byte holds two codes of 4 bits, adjacent ones of
  the last input dimension, the first in the low bits, or one code of 6 or 8. With one group, and no offsets, the scales
  multiply the sums.
  """

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    own, count = form.own, check_groups(spec, form)
    shape = list(spec.shape)
    if own.bits == 4:
      shape[spec.num_inputs - 1] //= 2
    super().__init__(dataclasses.replace(spec, shape=tuple(shape), dtype=jnp.dtype(jnp.uint8)), form)
    self.spec, self.form = spec, own
    axes = ("share" if spec.splits_inputs and count > 1 else None, *spec.axes[spec.num_inputs :])
    self.scales = param((count, *spec.outputs), axes, jnp.dtype(own.scale_dtype))
    self.offsets = param((count, *spec.outputs), axes, jnp.dtype(own.scale_dtype)) if own.has_offsets else None

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    held = group_weight(weight, self.spec, self.form, part)
    codes = held.pair_codes() if self.form.bits == 4 else held.codes
    made = {"array": own_array(codes).reshape(self.shape), "scales": own_array(held.scales)}
    return made if held.offsets is None else made | {"offsets": own_array(held.offsets)}

  def arrange_table(self, table: Weight, part: Part | None = None) -> dict[str, Array]:
    """Like `arrange`, from an array [V, D], or from a GroupedWeight with codes [D, V]."""
    assert not isinstance(table, Fp8Weight), "a plain layer"
    return self.arrange(table if isinstance(table, GroupedWeight) else table.T, None if part is None else part[::-1])

  def lines(self, indices: jax.Array) -> jax.Array:
    """Looks up columns of a matrix [D, V]: int32[...] -> [..., D]."""
    codes = self._unpack(self.array[...][:, indices], 1)
    offsets = None if self.offsets is None else self.offsets[...][:, indices]
    weight = self._dequantize(codes, self.scales[...][:, indices], offsets, self.spec.dtype)
    return jnp.moveaxis(weight, 0, -1)

  def _unpack(self, codes: jax.Array, num_inputs: int) -> jax.Array:  # [*inputs, ...] of bytes -> of codes
    if self.form.bits != 4:
      return codes
    pairs = jnp.stack([codes & 15, codes >> 4], num_inputs)
    return pairs.reshape(*codes.shape[: num_inputs - 1], -1, *codes.shape[num_inputs:])

  def _dequantize(self, codes, scales, offsets, dtype) -> jax.Array:  # [D, ...], [groups, ...] -> [D, ...]
    grouped = codes.reshape(scales.shape[0], -1, *scales.shape[1:]).astype(jnp.float32)
    weight = (grouped - self._zero) * scales[:, None].astype(jnp.float32)
    if offsets is not None:
      weight += offsets[:, None].astype(jnp.float32)
    return weight.reshape(codes.shape).astype(dtype)

  @property
  def _zero(self) -> int:
    return 1 << (self.form.bits - 1)

  @property
  def _scales_sums(self) -> bool:
    return self.scales.shape[0] == 1 and self.offsets is None

  def _times(self, x, weight, dtype):
    spec = self.spec
    codes = self._unpack(weight.reshape(*spec.inputs[:-1], -1, *spec.outputs), spec.num_inputs)
    if self._scales_sums:
      codes = codes.astype(x.dtype) - jnp.asarray(self._zero, x.dtype)  # exact in any dtype of x
      return super()._times(x, codes, _choose_sums(dtype, x.dtype))
    offsets = None if self.offsets is None else self.offsets[...]
    flat = codes.reshape(math.prod(spec.inputs), *spec.outputs)
    return super()._times(x, self._dequantize(flat, self.scales[...], offsets, x.dtype).reshape(spec.shape), dtype)

  def _scaled(self, product, dtype):
    if not self._scales_sums:
      return product
    scales = jnp.broadcast_to(self.scales[...][0].astype(jnp.float32), product.shape)
    return (product.astype(jnp.float32) * scales).astype(dtype)


class GroupSumMatrix(GroupedMatrix):
  """The same codes as integers of 4 or 8 bits, [groups, inputs of one, *outputs]. Scales multiply each group's sum.

  For a TPU, where XLA converts codes inside of the product and adds the groups' sums there, in f32: neither takes
  memory (tools/check_device). XLA:GPU would write the sums of all groups.
  """

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(spec, form)
    count, inputs = self.scales.shape[0], math.prod(spec.inputs)
    outputs, axes = _merge(spec.outputs, spec.axes[spec.num_inputs :])
    share = "share" if spec.splits_inputs else None
    self.shape = (count, inputs // count, *outputs)
    by_group = (share, None) if count > 1 else (None, share)
    self.dtype = jnp.dtype(jnp.int4 if self.form.bits == 4 else jnp.int8)
    self.array = param(self.shape, (*by_group, *axes), self.dtype)

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    held = group_weight(weight, self.spec, self.form, part)
    codes = (held.unpack().codes.reshape(self.shape) - np.uint8(self._zero)).view(np.int8)
    made = {"array": codes.astype(self.dtype), "scales": own_array(held.scales)}
    return made if held.offsets is None else made | {"offsets": own_array(held.offsets)}

  def _times(self, x, weight, dtype):
    spec = self.spec
    lead = x.shape[: x.ndim - spec.num_inputs]
    rows = x.reshape(-1, *weight.shape[:2])  # [T, groups, inputs of one]
    outputs = "cf" if weight.ndim == 4 else "n"
    sums = jnp.einsum(f"tgd,gd{outputs}->gt{outputs}", rows, weight.astype(x.dtype), preferred_element_type=jnp.float32)

    def by_group(values: nnx.Param) -> jax.Array:
      return values[...].astype(jnp.float32).reshape(weight.shape[0], *weight.shape[2:])

    y = jnp.sum(sums * jnp.broadcast_to(by_group(self.scales)[:, None], sums.shape), 0)
    if self.offsets is not None:
      totals = jnp.sum(rows.astype(jnp.float32), 2)
      exact = jax.lax.Precision.HIGHEST
      y += jnp.einsum(f"tg,g{outputs}->t{outputs}", totals, by_group(self.offsets), precision=exact)
    return y.astype(dtype or x.dtype).reshape(*lead, *spec.outputs)

  def _scaled(self, product, dtype):
    return product


def check_groups(spec: MatrixSpec, form: WeightForm) -> int:
  """Returns the groups of a matrix, or of one device's share. Raises UnsupportedForm unless its inputs make groups."""
  own, inputs = form.own, math.prod(spec.inputs)
  where = " on each of these devices" if form.axis and spec.splits_inputs else ""
  if own.group and inputs % own.group:
    raise UnsupportedForm(f"{form.name} has {inputs} inputs{where}, which groups of {own.group} do not divide")
  if own.bits == 4 and spec.inputs[-1] % 2:
    raise UnsupportedForm(f"{form.name} has {spec.inputs[-1]} inputs{where}, an odd number of codes of 4 bits")
  return own.num_groups(inputs)


def group_weight(weight: Weight, spec: MatrixSpec, form: MatrixForm, part: Part | None = None) -> GroupedWeight:
  """Returns a weight, or a part of it, in groups; quantizes one that is plain.

  Args: spec: of the whole or of the part.
  """
  if isinstance(weight, GroupedWeight):
    assert MatrixForm.of_weight(weight) == form, (MatrixForm.of_weight(weight), form)
    return weight if part is None else weight.cut(part)
  assert not isinstance(weight, Fp8Weight), "a form of its own"
  if part is not None and not (spec.splits_inputs and not form.group):  # else other parts decide the scales, too
    weight, part = weight[part], None
  count, inputs = spec.num_inputs, weight.shape[: spec.num_inputs]
  outputs, size = weight.shape[count:], math.prod(inputs)
  # Outputs first, as in a checkpoint's file, of which the weight is often a transposed view.
  rows = weight.transpose(*range(count, weight.ndim), *range(count)).reshape(-1, size)
  codes, scales = map(np.asarray, quantize_groups(jnp.asarray(rows), form.bits, form.group or size))
  codes = codes.reshape(*outputs, *inputs).transpose(*range(len(outputs), weight.ndim), *range(len(outputs)))
  made = GroupedWeight(codes, scales.T.reshape(-1, *outputs), form.bits, count)
  return made if part is None else made.cut(part)


class PackedMatrix(Matrix):
  """The layout of pallas_kernels/packed_matmul, as one matrix [inputs, outputs]; `arrange` keeps the weight's dtype."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(spec, form)
    self.ordered = form.ordered
    shape = packed_matmul.packed_shape(math.prod(spec.inputs), math.prod(spec.outputs))
    is_split = spec.splits_inputs or spec.splits_outputs
    self.array = param(shape, ("share" if is_split else None, None, None), stored_dtype(spec, form))

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    assert not isinstance(weight, LowPrecision), "a plain layer"
    weight = weight if part is None else weight[part]
    return {"array": packed_matmul.pack_weight(np.asarray(weight).reshape(math.prod(self.spec.inputs), -1))}

  def product(self, x, *, norm=None, activation=None, residual=None, num_rows=None, dtype=None):
    x, norm, activation = prepare_inputs(x, norm, activation)
    spec, gated = self.spec, activation is not None
    lead = x.shape[: x.ndim - spec.num_inputs - gated]
    outputs = math.prod(spec.outputs)
    product = self._multiply(
      x.reshape(*lead, math.prod(spec.inputs) * (2 if gated else 1)),
      outputs,
      dtype=dtype,
      norm=None if norm is None else (norm_scale(norm), norm.eps),
      num_rows=num_rows,
      gated=gated,
      residual=None if residual is None else residual.reshape(*lead, outputs),
    )
    return product.reshape(*lead, *spec.outputs)

  def _multiply(self, x: jax.Array, outputs: int, **others: Any) -> jax.Array:
    """Multiplies x [..., D] by the matrix [D, outputs]; arguments as in packed_matmul."""
    return packed_matmul.matmul(x, self.array[...], outputs, scales=self._scales(), ordered=self.ordered, **others)

  def arrange_table(self, table: Weight, part: Part | None = None) -> dict[str, Array]:
    """Like `arrange`, from the transposed matrix."""
    assert not isinstance(table, LowPrecision), "a plain layer"
    return self.arrange(table.T, None if part is None else part[::-1])

  def lines(self, indices: jax.Array) -> jax.Array:
    """Looks up columns of a matrix [D, V]: int32[...] -> [..., D]."""
    count = jnp.int32(packed_matmul.COLUMNS)
    # Ids are not negative; XLA would correct the signs of // and % for each number of each column.
    found = self.array[...][jax.lax.div(indices, count), :, jax.lax.rem(indices, count)]
    return found.astype(self.spec.dtype)

  def _scales(self) -> jax.Array | None:
    return None


def stored_dtype(spec: MatrixSpec, form: WeightForm) -> jnp.dtype:
  """Returns the dtype in memory of a weight that is plain or of the kind "bfloat16"."""
  return jnp.dtype(jnp.bfloat16) if form.own.kind == "bfloat16" else spec.dtype


def prepare_inputs(
  x: jax.Array, norm: RMSNorm | None, activation: Activation | None, in_kernel: bool = True
) -> tuple[jax.Array, RMSNorm | None, Activation | None]:
  """Returns the arguments after applying the norm or the gates, unless a C++ kernel applies them.

  Args: in_kernel: whether the kernel does so where it can.
  """
  # The kernels' scale has x's dtype, to which offset + scale would round.
  if norm is not None and (not in_kernel or norm.offset and x.dtype != jnp.float32):
    x, norm = norm(x), None
  if activation is not None and (not in_kernel or activation != "silu"):
    x, activation = apply_gates(x, activation), None
  return x, norm, activation


def norm_scale(norm: RMSNorm) -> jax.Array:
  return norm.scale[...] + jnp.asarray(norm.offset, norm.scale.dtype) if norm.offset else norm.scale[...]


class PackedInt8Matrix(PackedMatrix):
  """Integers in the packed layout, with f32[outputs] scales that the kernel applies after the sum."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    super().__init__(dataclasses.replace(spec, dtype=jnp.dtype(jnp.int8)), form)
    axes = ("share" if spec.splits_outputs else None,)
    self.scales = param((math.prod(spec.outputs),), axes, jnp.dtype(jnp.float32))

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    assert not isinstance(weight, LowPrecision), "a form of its own"
    values, scales = quantize(jnp.asarray(weight), self.spec.num_inputs)
    scales = scales if part is None else scales[part[self.spec.num_inputs :]]
    return super().arrange(values, part) | {"scales": scales.reshape(-1)}

  def _scales(self) -> jax.Array | None:
    return self.scales[...]


class PackedGroupedMatrix(PackedMatrix):
  """Codes, scales and offsets in the packed layout. The kernel quantizes x by row and part of a group."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    own, count = form.own, check_groups(spec, form)
    inputs, outputs = math.prod(spec.inputs), math.prod(spec.outputs)
    try:
      self.layout = packed_matmul.GroupLayout(
        inputs,
        own.bits,
        count,
        own.scale_dtype,
        own.has_offsets,
        own.has_superblocks and inputs % packed_matmul.SUPER == 0,  # a device's share may end within one
      )
    except ValueError as error:
      raise UnsupportedForm(f"{form.name}: {error}") from error
    Matrix.__init__(self, spec, form)
    self.form = own
    is_split = spec.splits_outputs or spec.splits_inputs
    self.array = param(self.layout.shape(outputs), ("share" if is_split else None, None), jnp.dtype(jnp.uint8))

  def arrange(self, weight: Weight, part: Part | None = None) -> dict[str, Array]:
    held = group_weight(weight, self.spec, self.form, part)
    codes = held.codes.reshape(-1, math.prod(self.spec.outputs))
    scales = held.scales.reshape(self.layout.groups, -1)
    offsets = None if held.offsets is None else held.offsets.reshape(scales.shape)
    superblocks = None
    if self.layout.superblocks:
      assert held.superblocks is not None, "a share of whole superblocks"
      superblocks = held.superblocks.reshape(-1, scales.shape[1])
    return {"array": packed_matmul.pack_groups(codes, scales, offsets, self.form.bits, superblocks)}

  def _multiply(self, x, outputs, **others):
    return packed_matmul.grouped_matmul(x, self.array[...], outputs, self.layout, **others)

  def arrange_table(self, table: Weight, part: Part | None = None) -> dict[str, Array]:
    """Like `arrange`, from an array [V, D], or from a GroupedWeight with codes [D, V]."""
    assert not isinstance(table, Fp8Weight), "a plain layer"
    return self.arrange(table if isinstance(table, GroupedWeight) else table.T, None if part is None else part[::-1])

  def lines(self, indices: jax.Array) -> jax.Array:
    found = packed_matmul.look_up_columns(self.array[...], self.layout, indices)
    return found.astype(self.spec.dtype)


class Table(PlainMatrix):
  """An embedding in the checkpoint's layout, [V, D], for lookups and, if tied, for x [..., D] times [D, V]."""

  def __init__(self, spec: MatrixSpec, form: WeightForm):
    """Args: spec: the spec of the matrix [D, V]."""
    stored = dataclasses.replace(spec, shape=spec.shape[::-1], axes=spec.axes[::-1], dtype=stored_dtype(spec, form))
    super().__init__(stored, form)
    self.spec = spec

  def arrange_table(self, table: Weight, part: Part | None = None) -> dict[str, Array]:
    """Like `arrange`, from [V, D]."""
    assert not isinstance(table, LowPrecision), "a plain layer"
    return self.arrange(table if part is None else table[part])

  def lines(self, indices: jax.Array) -> jax.Array:
    """Looks up rows: int32[...] -> [..., D]."""
    return self.array[...][indices].astype(self.spec.dtype)

  def _times(self, x, weight, dtype):
    return jnp.einsum("...d,vd->...v", x, weight, preferred_element_type=dtype)


def own_array(weight: Array) -> Array:
  return packed_matmul.copy_array(weight) if isinstance(weight, np.ndarray) else weight


# By packed and kind.
_MATRICES: dict[tuple[bool, str], type[Matrix]] = {
  (False, "plain"): PlainMatrix,
  (False, "int8"): Int8Matrix,
  (False, "w8a8"): RowScaledMatrix,
  (False, "fp8"): Fp8Matrix,
  (False, "grouped"): GroupedMatrix,
  (True, "plain"): PackedMatrix,
  (True, "bfloat16"): PackedMatrix,
  (True, "int8"): PackedInt8Matrix,
  (True, "grouped"): PackedGroupedMatrix,
}
# A matrix whose lines can be looked up.
TableMatrix = Table | PackedMatrix | GroupedMatrix
# Those that are both embedding and tied head; otherwise the head is a separate matrix made from the embedding.
_TIED: dict[tuple[bool, str], type[TableMatrix]] = {
  (False, "plain"): Table,
  (True, "plain"): PackedMatrix,
  (True, "bfloat16"): PackedMatrix,
  (False, "grouped"): GroupedMatrix,
  (True, "grouped"): PackedGroupedMatrix,
}


def declare_matrix(spec: MatrixSpec, form: WeightForm) -> Matrix:
  """Declares a matrix in the form of its name. Raises UnsupportedForm."""
  if form.flat and form.own.kind == "grouped" and not form.packed:
    return GroupSumMatrix(spec, form)
  return _MATRICES[form.packed, form.own.kind](spec, form)


def declare_tied(spec: MatrixSpec, form: WeightForm) -> TableMatrix | None:
  """Declares an embedding and tied head as one matrix [D, V]; None if the form has none. Raises UnsupportedForm."""
  if form.flat and form.own == form.matrix != PLAIN_MATRIX:
    return None  # a TPU looks up lines of a plain table faster than columns of codes
  kind = _TIED.get((form.packed, form.own.kind))
  return None if kind is None else kind(spec, form)


def declare_table(spec: MatrixSpec, form: WeightForm) -> TableMatrix:
  """Declares an embedding that is only looked up, of the matrix [D, V]: plain unless its name has a form of its own."""
  alone = dataclasses.replace(form, matrix=PLAIN_MATRIX)
  return GroupedMatrix(spec, alone) if alone.own.kind == "grouped" else Table(spec, form)
