"""Reads the header of GGUF files: metadata, and where each tensor lies. May not decode weights.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. All counts and lengths are
checked against limits and the file's size before anything is made of them.
"""

import dataclasses
import math
import mmap
import pathlib
import struct

from engine.errors import CheckpointError

# Every type number, its elements a block and bytes a block; (0, 0): known by name alone.
TYPES: dict[int, tuple[str, int, int]] = {
  0: ("F32", 1, 4),
  1: ("F16", 1, 2),
  2: ("Q4_0", 32, 18),
  3: ("Q4_1", 32, 20),
  6: ("Q5_0", 32, 22),
  7: ("Q5_1", 32, 24),
  8: ("Q8_0", 32, 34),
  12: ("Q4_K", 256, 144),
  13: ("Q5_K", 256, 176),
  14: ("Q6_K", 256, 210),
  30: ("BF16", 1, 2),
  39: ("MXFP4", 32, 17),
}
_OTHER_TYPES = {
  **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
  **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
  **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0"},
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# The largest known vocabularies have 300,000 tokens and as many merges, in below 20 megabytes.
_MAX_HEADER_BYTES = 200_000_000
_MAX_ENTRIES, _MAX_ELEMENTS, _MAX_NAME, _MAX_TEXT = 100_000, 10_000_000, 200, 1000

Scalar = int | float | bool | str


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
  """The location of a tensor.

  Attributes:
    type: GGUF's name, such as "Q4_K".
    shape: rows first, as in a Hugging Face checkpoint.
    offset: of the first byte in the file.
    row_bytes, block_bytes: bytes of a row, and of each block of it.
  """

  name: str
  type: str
  shape: tuple[int, ...]
  offset: int
  row_bytes: int
  block_bytes: int


def read_gguf_header(file: pathlib.Path) -> tuple[dict[str, Scalar], dict[str, GGUFTensor]]:
  """Returns the metadata without arrays, and every tensor by name.

  Raises:
    CheckpointError: the file is unreadable, truncated or inconsistent, or has a type that is not supported.
  """
  try:
    with open(file, "rb") as stream:
      size = stream.seek(0, 2)
      if not size:
        raise _error(file, "is empty")
      with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(file, data, size).read()
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{file}: cannot be read ({error}); copy it again") from error


def _error(file: pathlib.Path, what: str) -> CheckpointError:
  return CheckpointError(f"{file}: {what}: the file is truncated, corrupt or no GGUF file; copy it again")


class _Header:
  """A position in the header of a file of `size` bytes."""

  def __init__(self, file: pathlib.Path, data: mmap.mmap, size: int):
    self.file, self.data, self.size = file, data, size
    self.place = 0

  def read(self) -> tuple[dict[str, Scalar], dict[str, GGUFTensor]]:
    magic = bytes(self.data[:4])
    if magic != b"GGUF":
      raise _error(self.file, f"begins with {magic!r}, not b'GGUF'")
    self.place = 4
    (version,) = self.take("I")
    if version not in (2, 3):
      raise CheckpointError(f"{self.file}: GGUF version {version} is not supported; supported are 2 and 3")
    num_tensors, num_fields = self.take("QQ")
    for name, count in (("tensors", num_tensors), ("fields", num_fields)):
      if count > _MAX_ENTRIES:
        raise _error(self.file, f"declares {count} {name}, at most {_MAX_ENTRIES} are supported")
    fields: dict[str, Scalar] = {}
    for _ in range(num_fields):
      name = self.text(_MAX_NAME)
      if name in fields:
        raise _error(self.file, f"has the field {name!r:.80} twice")
      value = self.value(*self.take("I"))
      if value is not None:
        fields[name] = value
    entries = [self.entry() for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in (1 << bit for bit in range(3, 20)):
      raise _error(self.file, f"has general.alignment={alignment!r:.80}, no power of two from 8 to 524288")
    start = -(-self.place // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, number, offset in entries:
      if name in tensors:
        raise _error(self.file, f"has the tensor {name!r:.80} twice")
      tensors[name] = self.locate(name, shape, number, start + offset, alignment)
    return fields, tensors

  def take(self, layout: str) -> tuple:
    """Returns numbers at the position, and moves behind them."""
    layout = f"<{layout}"
    size = struct.calcsize(layout)
    self.skip(size)
    return struct.unpack_from(layout, self.data, self.place - size)

  def skip(self, size: int) -> None:
    self.place += size
    if self.place > min(self.size, _MAX_HEADER_BYTES):
      raise _error(self.file, f"has {self.size} bytes, and its header does not end within {_MAX_HEADER_BYTES} of them")

  def text(self, limit: int) -> str:
    (length,) = self.take("Q")
    self.skip(length)
    if length > limit:
      raise _error(self.file, f"has a name of {length} bytes, at most {limit} are supported")
    try:
      return self.data[self.place - length : self.place].decode("utf-8")
    except UnicodeDecodeError:
      raise _error(self.file, f"has a name that is no UTF-8 before byte {self.place}") from None

  def value(self, kind: int) -> Scalar | None:
    """Returns a field's value; None for arrays and long texts, such as vocabularies and chat templates."""
    if kind in _SCALARS:
      return self.take(_SCALARS[kind])[0]
    if kind == _STRING:
      (length,) = self.take("Q")
      self.skip(length)
      if length > _MAX_TEXT:
        return None
      return self.data[self.place - length : self.place].decode("utf-8", "replace")
    if kind != _ARRAY:
      raise _error(self.file, f"has a field of the unknown type {kind}")
    element, count = self.take("IQ")
    if count > _MAX_ELEMENTS:
      raise _error(self.file, f"has an array of {count} elements, at most {_MAX_ELEMENTS} are supported")
    if element in _SCALARS:
      self.skip(count * struct.calcsize(f"<{_SCALARS[element]}"))
    elif element == _STRING:
      for _ in range(count):
        self.skip(self.take("Q")[0])
    else:
      raise _error(self.file, f"has an array of the unsupported type {element}")
    return None

  def entry(self) -> tuple[str, tuple[int, ...], int, int]:
    """Returns the name, shape, type number and offset of a tensor."""
    name = self.text(_MAX_NAME)
    (rank,) = self.take("I")
    if not 1 <= rank <= 4:
      raise _error(self.file, f"has the tensor {name!r:.80} of {rank} dimensions; supported are 1 to 4")
    shape = self.take(f"{rank}Q")[::-1]
    number, offset = self.take("IQ")
    return name, shape, number, offset

  def locate(self, name: str, shape: tuple[int, ...], number: int, offset: int, alignment: int) -> GGUFTensor:
    if number not in TYPES:
      supported = ", ".join(kind for kind, _, _ in TYPES.values())
      kind = _OTHER_TYPES.get(number, f"number {number}")
      raise CheckpointError(
        f"{self.file}: tensor {name!r:.80} has type {kind}, which is not supported; supported are {supported}: use "
        "another file of the model, such as Q4_K_M or Q8_0"
      )
    kind, block, block_bytes = TYPES[number]
    if shape[-1] % block or not all(0 < size < 2**40 for size in shape):
      raise _error(
        self.file,
        f"has the tensor {name!r:.80} of shape {list(shape)} and type {kind}, whose rows are blocks of {block}",
      )
    num_bytes = math.prod(shape) // block * block_bytes
    if offset % alignment or offset + num_bytes > self.size:
      raise _error(
        self.file, f"has {self.size} bytes, but the tensor {name!r:.80} takes bytes {offset} to {offset + num_bytes}"
      )
    return GGUFTensor(name, kind, shape, offset, shape[-1] // block * block_bytes, block_bytes)
