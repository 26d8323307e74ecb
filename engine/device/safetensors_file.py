"""Locates the tensors of safetensors files and maps each one separately. May not write.

The library (https://github.com/huggingface/safetensors) checks dtypes and shapes of a header, and that tensors fill the
file without holes. It accepts duplicate names and tensors of 200,000 dimensions. Its reader also maps the whole file
while it is open, and copies tensors. So this module reads a tensor's location from the checked header and maps only
that tensor, whose pages the system drops with the map.
"""

import dataclasses
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from engine.errors import CheckpointError

# The library's own limit is four times larger, and such a JSON header could become gigabytes of objects. The largest
# known models have headers below one megabyte.
_MAX_HEADER_BYTES = 25_000_000
_MAX_DIMS = 32
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Of the parts of quantized weights.
_PART_DTYPES = {
  "I8": np.dtype(np.int8),
  "U8": np.dtype(np.uint8),
  "I32": np.dtype(np.int32),
  "I64": np.dtype(np.int64),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """The location of a tensor's bytes, which are not read yet.

  Attributes:
    dtype: safetensors' name for it, for example "BF16".
    offset: offset of the first byte in the file.
  """

  file: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]
  offset: int

  def check_dtype(self) -> None:
    """Raises CheckpointError unless the dtype is one of plain weights."""
    if not self.is_plain:
      raise CheckpointError(
        f"{self.file}: tensor {self.name} has dtype {self.dtype}; supported are {', '.join(_DTYPES)}"
      )

  @property
  def is_plain(self) -> bool:
    """Whether the dtype is one of plain weights."""
    return self.dtype in _DTYPES

  @property
  def numpy_dtype(self) -> np.dtype:
    """The dtype of `map`, for plain weights and parts of quantized ones."""
    return (_DTYPES | _PART_DTYPES)[self.dtype]

  def map(self) -> np.ndarray:
    """Returns the values as a read-only map of the file that lives as long as the array. Not for empty tensors."""
    return np.memmap(self.file, self.numpy_dtype, "r", self.offset, self.shape)


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns every tensor of the file, after checking that tensors fill the file without holes.

  Raises:
    CheckpointError: the file is unreadable, truncated or inconsistent.
  """
  try:
    if not file.is_file() and file.exists():
      raise CheckpointError(f"{file}: is no regular file; copy the weights there")
    with open(file, "rb") as stream:
      length = int.from_bytes(stream.read(8), "little")
      if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes; supported are at most {_MAX_HEADER_BYTES}")
      with safetensors.safe_open(file, "numpy"):
        pass
      header = json.loads(stream.read(length), object_pairs_hook=_no_duplicates)
  except OSError as error:
    raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
  except (ValueError, safetensors.SafetensorError) as error:
    raise CheckpointError(
      f"{file}: is truncated, corrupt or no safetensors file ({error!s:.300}); copy it again"
    ) from error
  header.pop("__metadata__", None)
  tensors = {}
  for name, entry in header.items():
    if len(entry["shape"]) > _MAX_DIMS:
      raise CheckpointError(
        f"{file}: tensor {name:.200} has {len(entry['shape'])} dimensions, at most {_MAX_DIMS} are supported; copy the "
        "file again"
      )
    start, _ = entry["data_offsets"]
    tensors[name] = StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + start)
  return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  out = dict(pairs)
  if len(out) != len(pairs):
    raise ValueError("a name occurs twice")
  return out
