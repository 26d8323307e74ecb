"""Which representation each matrix of a model has. May not know arrays, layers or kernels."""

import dataclasses
from typing import Literal

from models.grouped_weight import GroupedWeight


class UnsupportedForm(ValueError):
  """A matrix cannot have the representation that was chosen; the text names the matrix, the value and the limit."""


@dataclasses.dataclass(frozen=True)
class MatrixForm:
  """The representation of one matrix. Equal layers have equal forms.

  Attributes:
    kind: "plain": the model's dtype. "bfloat16": a file's bfloat16 in a model of float32, widened in the product, which
      gives the same bits. "int8": integers with a scale an output (models/quantize.py); "w8a8": the same,
      with x rounded to int8 by row; "fp8": the same of e4m3, x too; "grouped": codes with scales
      (models/grouped_weight.py). The other attributes are of this kind alone.
    bits: of a code: 4, 6 or 8.
    group: adjacent inputs, in row-major order, that share a scale; 0: one scale an output.
    has_offsets: whether each group has an offset, too.
    scale_dtype: of scales and offsets, "float16" or "float32".
    has_superblocks: whether the scales are products of GGUF's numbers, which a product may read instead.
  """

  kind: Literal["plain", "bfloat16", "int8", "w8a8", "fp8", "grouped"] = "plain"
  bits: int = 0
  group: int = 0
  has_offsets: bool = False
  scale_dtype: str = ""
  has_superblocks: bool = False

  @classmethod
  def of_weight(cls, weight: GroupedWeight) -> "MatrixForm":
    """Returns the form that holds a weight as it is."""
    group = 0 if weight.scales.shape[0] == 1 else weight.group
    return cls(
      "grouped",
      weight.bits,
      group,
      weight.offsets is not None,
      weight.scales.dtype.name,
      weight.superblocks is not None,
    )

  def num_groups(self, inputs: int) -> int:
    """Returns the scales of an output. Args: inputs: their number, a multiple of the group."""
    return inputs // self.group if self.group else 1


PLAIN_MATRIX = MatrixForm()
BFLOAT16_MATRIX = MatrixForm("bfloat16")


@dataclasses.dataclass(frozen=True)
class WeightForm:
  """The representations of a model's matrices. Embeddings that are only looked up, and norms, are plain by default.

  Attributes:
    packed: the layouts of pallas_kernels/packed_matmul, for one CPU.
    matrix: of each matrix that `forms` does not name.
    forms: by stored name, such as `layers.0.attention.qkv`.
    ordered: packed products give a row the same bits in any batch; the layout does not change.
    flat: for a TPU. A plain matrix is stored as [inputs, outputs], because a TPU tiles the last two dimensions of an
      array. Of the shape [D, K, G + 2, H] it copies the whole weight in every step. Codes are signed integers.
    keeps_fp8: a checkpoint's matrices of e4m3 with a scale an output stay so, because the device multiplies them.
    axis: the mesh axis whose devices share the weights; a layer is then one device's share, and runs inside of a
      shard_map over this axis. "": one device has the whole.
    name: stored name of the module that this form is for, or its beginning; "": the model.
  """

  packed: bool = False
  matrix: MatrixForm = PLAIN_MATRIX
  forms: tuple[tuple[str, MatrixForm], ...] = ()
  ordered: bool = False
  flat: bool = False
  keeps_fp8: bool = False
  axis: str = ""
  name: str = ""

  def at(self, name: str) -> "WeightForm":
    """Returns the form for a module of this one."""
    return dataclasses.replace(self, name=f"{self.name}.{name}" if self.name else name)

  @property
  def own(self) -> MatrixForm:
    """The representation of the matrix `name`."""
    return dict(self.forms).get(self.name, self.matrix)

  @property
  def orders_norms(self) -> bool:
    """Whether norms outside the products sum in an order that does not depend on the batch."""
    return self.packed

  @property
  def is_made_on_host(self) -> bool:
    """Whether the loader converts weights in host memory, before they move to the devices."""
    return self.packed or any(form.kind == "grouped" for form in (self.matrix, *(own for _, own in self.forms)))

  @property
  def is_plain(self) -> bool:
    """Whether every matrix is plain."""
    return not self.forms and self.matrix == PLAIN_MATRIX


PLAIN = WeightForm()
INT8 = MatrixForm("int8")
