"""Reads safetensors files tensor by tensor, so that a bad file is refused with its tensor named. Writes nothing.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes of little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the bytes. The library's own reader maps the whole file for as long as it is
open, takes a name twice and 200,000 dimensions, and names no tensor of a wrong size; here a tensor is mapped alone and
its pages leave with it.
"""

import dataclasses
import json
import math
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

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
  num_bytes: int

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
      size = stream.seek(0, 2)
      stream.seek(0)
      length = int.from_bytes(stream.read(8), "little")
      if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
          f"{file}: {size} bytes cannot hold the header of {length} bytes that it announces (at most "
          f"{_MAX_HEADER_BYTES} are read); the file is truncated or no safetensors file: copy it again"
        )
      text = stream.read(length)
  except OSError as error:
    raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
  try:
    header = json.loads(text, object_pairs_hook=_no_duplicates)
    if not isinstance(header, dict):
      raise ValueError("it is no object")
  except (ValueError, RecursionError) as error:
    raise CheckpointError(f"{file}: the header is corrupt ({error}); copy the file again") from error
  header.pop("__metadata__", None)
  end = 8 + length
  tensors = [_stored_tensor(file, name, entry, end) for name, entry in header.items()]
  for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
    if tensor.offset != end:
      raise CheckpointError(
        f"{file}: tensor {tensor.name:.200} begins at byte {tensor.offset} where {end} is expected; the header is "
        "corrupt: copy the file again"
      )
    end += tensor.num_bytes
    if end > size:
      raise CheckpointError(
        f"{file}: tensor {tensor.name:.200} ends at byte {end} of a file of {size}; the file is truncated: copy it "
        "again"
      )
  if end != size:
    raise CheckpointError(f"{file}: {size - end} bytes follow the last tensor; the file is corrupt: copy it again")
  return {tensor.name: tensor for tensor in tensors}


def _stored_tensor(file: pathlib.Path, name: str, entry: Any, data_start: int) -> StoredTensor:
  """A header's entry, whose bytes are as many as its shape needs if it has a dtype that can be read."""
  try:
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    # Before any product: one of thousands of long numbers would take for ever.
    whole = (
      isinstance(dtype, str)
      and isinstance(shape, list)
      and len(shape) <= _MAX_DIMS
      and all(type(number) is int and 0 <= number < 2**63 for number in (*shape, start, stop))
      and start <= stop
    )
  except (TypeError, KeyError, ValueError) as error:
    raise CheckpointError(
      f"{file}: tensor {name:.200} has a corrupt entry {entry!s:.200}; copy the file again"
    ) from error
  if not whole or (dtype in _DTYPES and stop - start != math.prod(shape) * _DTYPES[dtype].itemsize):
    raise CheckpointError(
      f"{file}: tensor {name:.200} of {dtype!s:.20}{shape!s:.200} cannot lie in bytes {start!s:.30} to {stop!s:.30}; "
      "the header is corrupt: copy the file again"
    )
  return StoredTensor(file, name, dtype, tuple(shape), data_start + start, stop - start)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  out = dict(pairs)
  if len(out) != len(pairs):
    raise ValueError("a name occurs twice")
  return out
