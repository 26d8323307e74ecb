"""What a folder of low-precision weights gives to the loader. May not read files itself."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from models.grouped_weight import GroupedWeight
from models.weight_form import MatrixForm


class QuantizedSource(Protocol):
  """The parameters that a checked folder stores at low precision, of which no byte is read yet."""

  @property
  def forms(self) -> Mapping[str, MatrixForm]:
    """The form of each low-precision parameter, by stored name. That of `embed` is of the matrix [D, V]."""
    ...

  @property
  def label(self) -> str:
    """What the folder holds, for reports and errors, such as "int4 by 128 (awq)"."""
    ...

  @property
  def reads_all(self) -> bool:
    """Whether `read` gives the folder's plain parameters, too; else they are safetensors beside the others."""
    ...

  def read(self, name: str) -> np.ndarray | GroupedWeight:
    """Returns a whole parameter: in its form, or as a plain array of any float dtype.

    Raises:
      CheckpointError: with file, tensor and value.
    """
    ...
