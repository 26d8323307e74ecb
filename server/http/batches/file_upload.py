"""Reads an uploaded file from a multipart body onto the disk, as it arrives. Knows no database.

At most a few pieces of the file are in memory. python-multipart parses the body; this module has the limits.
"""

import asyncio
import dataclasses
import os
import pathlib
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from server.http.error_responses import Refused
from server.http.json_exchange import ClientGone

_MAX_FIELDS = 8
_MAX_FIELD_BYTES = 4096
_MAX_NAME_CHARS = 255
_MAX_HEAD_BYTES = 4096  # of one header of a part, of which there may be 8; python-multipart checks both
_PIECE_BYTES = 1 << 20
_REMEDY = "send multipart/form-data with the fields purpose and file, as the openai client does"


@dataclasses.dataclass
class UploadedFile:
  """What a body held. Attributes: name: the file's, of the client. fields: other fields."""

  name: str | None = None
  fields: dict[str, str] = dataclasses.field(default_factory=dict)


class _Parts:
  """Receives python-multipart's events of one body."""

  def __init__(self, max_file_bytes: int):
    self.upload = UploadedFile()
    self.piece = bytearray()  # of the file, not written yet
    self.has_ended = False
    self._num_bytes = 0
    self._max_file_bytes = max_file_bytes
    self._header, self._value = bytearray(), bytearray()
    self._field = ""  # the part's; empty: the file's
    self._disposition = b""

  def on_part_begin(self) -> None:
    self._header, self._value, self._disposition = bytearray(), bytearray(), b""

  def on_header_field(self, data: bytes, start: int, end: int) -> None:
    self._header += data[start:end]

  def on_header_value(self, data: bytes, start: int, end: int) -> None:
    self._value += data[start:end]

  def on_header_end(self) -> None:
    if self._header.lower() == b"content-disposition":
      self._disposition = bytes(self._value)
    self._header, self._value = bytearray(), bytearray()

  def on_headers_finished(self) -> None:
    _, options = parse_options_header(self._disposition)
    field = options.get(b"name", b"").decode("utf-8", "replace")
    upload = self.upload
    if b"filename" in options:
      if field != "file":
        raise Refused(400, f"there is a file in a field that is not named file; {_REMEDY}")
      if upload.name is not None:
        raise Refused(400, "there are several files, the limit is 1: send a request for each")
      name = pathlib.PurePosixPath(options[b"filename"].decode("utf-8", "replace").replace("\\", "/")).name
      upload.name = "".join(filter(str.isprintable, name))[:_MAX_NAME_CHARS] or "upload"
      self._field = ""
    elif not field or field == "file":
      raise Refused(400, f"a part has no name or no file; {_REMEDY}")
    elif field in upload.fields or len(upload.fields) == _MAX_FIELDS:
      raise Refused(400, f"a field comes twice, or there are more than {_MAX_FIELDS}; {_REMEDY}")
    else:
      self._field = field
      upload.fields[field] = ""

  def on_part_data(self, data: bytes, start: int, end: int) -> None:
    if self._field:
      fields = self.upload.fields
      fields[self._field] += data[start:end].decode("utf-8", "replace")
      if len(fields[self._field]) > _MAX_FIELD_BYTES:
        raise Refused(413, f"a field has more than {_MAX_FIELD_BYTES} bytes; {_REMEDY}")
      return
    self._num_bytes += end - start
    if self._num_bytes > self._max_file_bytes:
      raise too_large(self._max_file_bytes)
    self.piece += data[start:end]

  def on_end(self) -> None:
    self.has_ended = True


def too_large(max_file_bytes: int) -> Refused:
  """Returns the error for a file beyond the limit."""
  return Refused(
    413,
    f"the file has more than {max_file_bytes} bytes, which is the limit: send several files, or raise "
    "--max_batch_file_bytes",
    code="file_too_large",
  )


async def receive_upload(
  request: Request, path: pathlib.Path, max_file_bytes: int, stall_timeout_s: float
) -> UploadedFile:
  """Writes the body's file to `path`, and returns its name and the other fields. Leaves no file if it raises.

  Args:
    request: a request whose body is unread.
    path: a new file.
    max_file_bytes: limit of the file.
    stall_timeout_s: the longest that the client may send nothing, in seconds.

  Raises:
    Refused: the body is not multipart/form-data with one file, is too large, or does not come.
    ClientGone: the client left.
    OSError: the file cannot be written.
  """
  kind, options = parse_options_header(request.headers.get("content-type", ""))
  boundary = options.get(b"boundary", b"")
  if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
    raise Refused(415, f"the content-type is not multipart/form-data with a boundary; {_REMEDY}")
  if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
    raise Refused(415, "a content-encoding is not taken here; send the body as it is")
  length = request.headers.get("content-length", "")
  if length.isdigit() and int(length) > max_file_bytes + _MAX_FIELDS * (_MAX_FIELD_BYTES + 8 * _MAX_HEAD_BYTES):
    raise too_large(max_file_bytes)
  parts = _Parts(max_file_bytes)
  parser = MultipartParser(
    boundary,
    {
      "on_part_begin": parts.on_part_begin,
      "on_part_data": parts.on_part_data,
      "on_header_field": parts.on_header_field,
      "on_header_value": parts.on_header_value,
      "on_header_end": parts.on_header_end,
      "on_headers_finished": parts.on_headers_finished,
      "on_end": parts.on_end,
    },
  )
  file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
  try:
    with file:
      await _write_body(request, parser, parts, file, stall_timeout_s)
    if not parts.has_ended or parts.upload.name is None:
      raise Refused(400, f"the body is cut, or has no file; {_REMEDY}")
  except FormParserError:
    path.unlink()
    raise Refused(400, f"the body is not the multipart/form-data that its header says; {_REMEDY}") from None
  except BaseException:
    path.unlink()
    raise
  return parts.upload


async def _write_body(
  request: Request, parser: MultipartParser, parts: _Parts, file: BinaryIO, stall_timeout_s: float
) -> None:
  more = True
  while more:
    try:
      async with asyncio.timeout(stall_timeout_s):
        message = await request.receive()
    except TimeoutError:
      raise Refused(408, f"nothing of the body came for {stall_timeout_s:g} s; send it at once") from None
    if message["type"] == "http.disconnect":
      raise ClientGone
    parser.write(message.get("body", b""))
    more = message.get("more_body", False)
    if len(parts.piece) >= _PIECE_BYTES or not more:
      piece, parts.piece = parts.piece, bytearray()
      writing = asyncio.ensure_future(asyncio.to_thread(_write_all, file, piece))
      try:
        await asyncio.shield(writing)
      finally:
        await asyncio.wait((writing,))  # nobody may close a file that a thread writes


def _write_all(file: BinaryIO, data: bytearray) -> None:
  left = memoryview(data)
  while left:
    left = left[file.write(left) :]
