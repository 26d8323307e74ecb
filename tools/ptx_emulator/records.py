"""Reads what XLA serializes: Riegeli records, Snappy's compression and protocol buffers. May not know their meaning.

Formats: google/riegeli's doc/riegeli_records_file_format.md, google/snappy's format_description.txt, and protobuf's
encoding guide. Checksums are not verified: the bytes come from a compiler in the same process.
"""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40  # bytes
_SIGNATURE = bytes.fromhex("83af70d10d884a3f")  # the hash that begins each file


class RecordError(ValueError):
  """Bytes of another format."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
  """Returns the number at an offset, and the offset behind it."""
  value = shift = 0
  while True:
    byte = data[at]
    at += 1
    value |= (byte & 127) << shift
    shift += 7
    if byte < 128:
      return value, at


def read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
  """Yields each field of a protocol buffer: its number, and an integer or bytes."""
  at = 0
  while at < len(message):
    tag, at = read_varint(message, at)
    kind = tag & 7
    if kind == 0:
      value, at = read_varint(message, at)
      yield tag >> 3, value
      continue
    if kind == 2:
      size, at = read_varint(message, at)
    elif kind in (1, 5):
      size = 8 if kind == 1 else 4
    else:
      raise RecordError(f"a protocol buffer has wire type {kind}")
    yield tag >> 3, message[at : at + size]
    at += size


def read_records(data: bytes) -> list[bytes]:
  """Returns the records of the first Riegeli file in `data`. Raises RecordError."""
  start = data.find(_SIGNATURE)
  if start < 0:
    raise RecordError("the bytes hold no Riegeli file")
  data = data[start:]
  at, found = 0, []
  while at < len(data):
    header, at = _take(data, at, _CHUNK_HEADER)
    size, kind, count = int.from_bytes(header[8:16], "little"), header[24:25], int.from_bytes(header[25:32], "little")
    chunk, at = _take(data, at, size)
    if kind == b"r":
      found += _split_chunk(chunk, count)
    elif kind != b"s":
      raise RecordError(f"a Riegeli chunk of type {kind!r}; known are simple chunks")
  return found


def _take(data: bytes, at: int, size: int) -> tuple[bytes, int]:
  """Returns `size` bytes at an offset without the headers of blocks, and the offset behind them."""
  parts = []
  while size:
    if at % _BLOCK == 0:
      at += _BLOCK_HEADER
    count = min(size, _BLOCK - at % _BLOCK)
    part = data[at : at + count]
    if len(part) < count:
      raise RecordError("a Riegeli file ends within a chunk")
    parts.append(part)
    at, size = at + count, size - count
  return b"".join(parts), at


def _split_chunk(chunk: bytes, count: int) -> list[bytes]:
  compression, (size, at) = chunk[0:1], read_varint(chunk, 1)
  sizes, values = (_expand(compression, part) for part in (chunk[at : at + size], chunk[at + size :]))
  found, place, at = [], 0, 0
  for _ in range(count):
    size, place = read_varint(sizes, place)
    found.append(values[at : at + size])
    at += size
  return found


def _expand(compression: bytes, data: bytes) -> bytes:
  if compression == b"\0":
    return data
  if compression != b"s":
    raise RecordError(f"Riegeli's compression {compression!r}; known are none and Snappy")
  _, at = read_varint(data, 0)  # the size, which Snappy repeats
  return expand_snappy(data[at:])


def expand_snappy(data: bytes) -> bytes:
  """Decompresses. Raises RecordError."""
  size, at = read_varint(data, 0)
  out = bytearray()
  while at < len(data):
    tag = data[at]
    at += 1
    kind, upper = tag & 3, tag >> 2
    if kind == 0:
      length = upper
      if upper >= 60:
        length = int.from_bytes(data[at : at + upper - 59], "little")
        at += upper - 59
      out += data[at : at + length + 1]
      at += length + 1
      continue
    if kind == 1:
      length, back, width = 4 + (upper & 7), (upper >> 3) << 8 | data[at], 1
    else:
      width = 2 if kind == 2 else 4
      length, back = 1 + upper, int.from_bytes(data[at : at + width], "little")
    at += width
    if not 0 < back <= len(out):
      raise RecordError("Snappy: a copy from before the start")
    start = len(out) - back
    while length:
      part = out[start : start + min(length, len(out) - start)]
      out += part
      start, length = start + len(part), length - len(part)
  if len(out) != size:
    raise RecordError(f"Snappy: {len(out)} bytes instead of {size}")
  return bytes(out)
