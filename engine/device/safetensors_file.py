"""Finds the tensors of safetensors files, each to be mapped alone. Judges no header itself; writes nothing.

The library (https://github.com/huggingface/safetensors) checks a header against the file: dtypes, shapes, and that the
tensors fill it without holes. It does not refuse a name that occurs twice or a tensor of 200,000 dimensions, and its
reader keeps the whole file mapped for as long as it is open and copies what is asked for. So where a tensor lies is
read from the header once it is found sound, and a tensor's pages leave with its own map.
"""

import dataclasses
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from engine.errors import CheckpointError

# The library's own limit is four times this; so much JSON can become gigabytes of objects, and the largest known models
# have headers of less than a megabyte.
_MAX_HEADER_BYTES = 25_000_000
_MAX_DIMS = 32
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """Where a tensor's bytes lie. Nothing of them has been read.

  Attributes:
    dtype: safetensors' name for it, for example "BF16".
    offset: of the first byte, from the start of the file.
  """

  file: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]
  offset: int

  def check_dtype(self) -> None:
    """Raises CheckpointError unless the dtype is one that `map` can read."""
    if self.dtype not in _DTYPES:
      raise CheckpointError(
        f"{self.file}: tensor {self.name} has dtype {self.dtype}; supported are {', '.join(_DTYPES)}"
      )

  @property
  def numpy_dtype(self) -> np.dtype:
    """Of `map`. Only of a tensor that check_dtype lets pass."""
    return _DTYPES[self.dtype]

  def map(self) -> np.ndarray:
    """The values, as a read-only map of the file that lives as long as the array does. Not for empty tensors."""
    return np.memmap(self.file, self.numpy_dtype, "r", self.offset, self.shape)


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
  """Every tensor of the file, checked to lie inside it, side by side and without holes.

  Raises:
    CheckpointError: unreadable, truncated or contradicting itself.
  """
  try:
    if not file.is_file() and file.exists():
      raise CheckpointError(f"{file}: is no regular file; copy the weights there")
    with open(file, "rb") as stream:
      length = int.from_bytes(stream.read(8), "little")
      if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes, and at most {_MAX_HEADER_BYTES} are read")
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
        f"{file}: tensor {name:.200} has {len(entry['shape'])} dimensions, at most {_MAX_DIMS} are read; copy the file "
        "again"
      )
    start, _ = entry["data_offsets"]
    tensors[name] = StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + start)
  return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  out = dict(pairs)
  if len(out) != len(pairs):
    raise ValueError("a name occurs twice")
  return out
