"""Reads safetensors files tensor by tensor, so that a bad file is refused with its tensor named. Writes nothing.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes of little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the bytes. The library's own reader maps the whole file for as long as it is
open and names no tensor in its errors; here a tensor is mapped alone and its pages leave with it.
"""

from collections.abc import Iterator
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

  def check_dtype(self) -> None:
    """Raises CheckpointError unless the dtype is one that `map` can read."""
    if self.dtype not in _DTYPES:
      raise CheckpointError(
        f"{self.file}: tensor {self.name} has dtype {self.dtype}; supported are {', '.join(_DTYPES)}"
      )

  def map(self) -> np.ndarray:
    """The values, as a read-only map of the file that lives as long as the array does. Not for empty tensors."""
    return np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset, self.shape)


# Bits of every dtype that the format knows; only those in _DTYPES can be read.
_BITS = {
  "BOOL": 8,
  "U8": 8,
  "I8": 8,
  "F8_E5M2": 8,
  "F8_E4M3": 8,
  "F8_E8M0": 8,
  "F4": 4,
  "F6_E2M3": 6,
  "F6_E3M2": 6,
  "U16": 16,
  "I16": 16,
  "F16": 16,
  "BF16": 16,
  "U32": 32,
  "I32": 32,
  "F32": 32,
  "U64": 64,
  "I64": 64,
  "F64": 64,
  "C64": 64,
}


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
  out, end = {}, 8 + length
  for entry in sorted(_entries(file, header), key=lambda entry: (entry.start, entry.size)):
    begin = 8 + length + entry.start
    if begin != end:
      raise CheckpointError(
        f"{file}: tensor {entry.name:.200} begins at byte {begin} where {end} is expected; the header "
        "is corrupt: copy the file again"
      )
    end = begin + entry.size
    if end > size:
      raise CheckpointError(
        f"{file}: tensor {entry.name:.200} ends at byte {end} of a file of {size}; the file is truncated: copy it again"
      )
    out[entry.name] = StoredTensor(file, entry.name, entry.dtype, entry.shape, begin)
  if end != size:
    raise CheckpointError(f"{file}: {size - end} bytes follow the last tensor; the file is corrupt: copy it again")
  return out


@dataclasses.dataclass(frozen=True)
class _Entry:
  name: str
  dtype: str
  shape: tuple[int, ...]
  start: int  # bytes after the header
  size: int  # bytes


def _entries(file: pathlib.Path, header: dict[str, Any]) -> Iterator[_Entry]:
  for name, entry in header.items():
    try:
      dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
      bits_each = _BITS[dtype]
      # Before any product: one of thousands of long numbers would take for ever.
      whole = (
        isinstance(shape, list)
        and len(shape) <= _MAX_DIMS
        and all(type(number) is int and 0 <= number < 2**63 for number in (*shape, start, stop))
      )
      bits = bits_each * math.prod(shape) if whole else 0
    except (TypeError, KeyError, ValueError) as error:
      raise CheckpointError(
        f"{file}: tensor {name:.200} has a corrupt entry {entry!s:.200}; copy the file again"
      ) from error
    if not whole or bits % 8 or stop - start != bits // 8:
      raise CheckpointError(
        f"{file}: tensor {name:.200} of {dtype}{shape!s:.200} cannot lie in bytes {start!s:.30} to {stop!s:.30}; the "
        "header is corrupt: copy the file again"
      )
    yield _Entry(name, dtype, tuple(shape), start, stop - start)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  out = dict(pairs)
  if len(out) != len(pairs):
    raise ValueError("a name occurs twice")
  return out
