"""Reads the lines of a batch's input file, and writes those of its output files. Knows no queue and no endpoint.

A line of the input is {"custom_id", "method", "url", "body"}. A line of the output has the same custom_id.
"""

import dataclasses
import pathlib
import secrets
from typing import Any

import msgspec

from server.http.error_responses import UnsupportedField

MAX_CUSTOM_ID_CHARS = 512
# Of one read: few enough that the thread of the store is soon free for others.
_MAX_LINES = 500
_MAX_BYTES = 1 << 20
# Lower numbers go first, and requests have 0 unless they set another. No aging makes up for this number.
BATCH_PRIORITY = 1_000_000_000
_REMEDY = 'send one JSON object a line, with "custom_id", "method", "url" and "body"'
# Fields that no line may have: endpoint ("": all), values that are allowed, and what is wrong with others.
_REFUSED = {
  "stream": ("", (b"false",), "is not allowed in a batch; leave it out"),
  "priority": ("", (), "is not allowed in a batch, which sets its own; leave it out"),
  "store": (
    "/v1/responses",
    (b"false",),
    "is not allowed in a batch, whose output has the response; leave it out",
  ),
  "previous_response_id": ("/v1/responses", (), "is not allowed in a batch; send all items in input"),
}


class _InputLine(msgspec.Struct, forbid_unknown_fields=True):
  """A line as it is sent; the body stays text until it runs."""

  custom_id: str
  method: str
  url: str
  body: msgspec.Raw


@dataclasses.dataclass(frozen=True, slots=True)
class InputLine:
  """A line of an input file.

  Attributes:
    number: counted from 1, as in an editor.
    custom_id: the caller's name of it; None if the line is bad.
    offset, size: place of the line in the file, in bytes.
    code, message, param: what is wrong with it; empty if nothing is.
  """

  number: int
  custom_id: str | None
  offset: int
  size: int
  code: str = ""
  message: str = ""
  param: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReadLines:
  """Some lines of a file, and where to go on.

  Attributes:
    lines: without blank ones.
    offset: of the next line.
    number: of the next line.
    at_end: whether there is none.
  """

  lines: list[InputLine]
  offset: int
  number: int
  at_end: bool


def read_lines(path: pathlib.Path, endpoint: str, max_line_bytes: int, offset: int, number: int) -> ReadLines:
  """Reads and checks the next lines of an input file.

  Args:
    path: the file.
    endpoint: the path that every line must name.
    max_line_bytes: longer lines are bad, and are not read.
    offset, number: of the first line to read.
  """
  lines: list[InputLine] = []
  start = offset
  with path.open("rb") as file:
    file.seek(offset)
    while len(lines) < _MAX_LINES and offset - start < _MAX_BYTES:
      raw = file.readline(max_line_bytes + 1)
      if not raw:
        return ReadLines(lines, offset, number, True)
      size = len(raw)
      too_long = size > max_line_bytes and not raw.endswith(b"\n")
      while too_long and (more := file.readline(1 << 20)):
        size += len(more)
        if more.endswith(b"\n"):
          break
      if too_long:
        message = f"the line has {size} bytes, the limit is {max_line_bytes}: send less, or raise --max_request_bytes"
        lines.append(InputLine(number, None, offset, size, "line_too_long", message))
      elif raw.strip():
        lines.append(_check_line(raw, endpoint, offset, number))
      offset += size
      number += 1
  return ReadLines(lines, offset, number, False)


def _check_line(raw: bytes, endpoint: str, offset: int, number: int) -> InputLine:
  def refuse(code: str, message: str, param: str | None = None) -> InputLine:
    return InputLine(number, None, offset, len(raw), code, message, param)

  try:
    line = msgspec.json.decode(raw, type=_InputLine)
  except msgspec.ValidationError as error:
    return refuse("invalid_request_line", f"the line is not a request: {error}; {_REMEDY}")
  except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
    return refuse("invalid_json_line", f"the line is not JSON: {error}; {_REMEDY}")
  if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
    count = len(line.custom_id)
    message = f"custom_id has {count} characters, it must have 1 to {MAX_CUSTOM_ID_CHARS}; send another"
    return refuse("invalid_custom_id", message, "custom_id")
  if line.method != "POST":
    return refuse("invalid_method", "method is not POST; send POST", "method")
  if line.url != endpoint:
    return refuse("mismatched_url", f"url is not the batch's endpoint; send {endpoint}", "url")
  if not bytes(line.body).lstrip().startswith(b"{"):
    return refuse("invalid_body", "body is no object; send the endpoint's JSON object", "body")
  return InputLine(number, line.custom_id, offset, len(raw))


def make_request_body(raw: bytes) -> bytes:
  """Returns the body of a checked line, with the batch's priority.

  Raises:
    UnsupportedField: the body sets what a batch sets itself, requests a stream, or needs stored responses.
  """
  line = msgspec.json.decode(raw, type=_InputLine)
  values = msgspec.json.decode(line.body, type=dict[str, msgspec.Raw])
  for name, (endpoint, harmless, problem) in _REFUSED.items():
    if endpoint in (line.url, "") and bytes(values.get(name, b"null")).strip() not in (*harmless, b"null"):
      raise UnsupportedField(problem, field=name)
  return msgspec.json.encode(values | {"priority": BATCH_PRIORITY})


def write_answer(custom_id: str | None, status: int, request_id: str, body: bytes) -> str:
  """Returns the output file's line for a response. Args: body: its JSON."""
  response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
  return _write_line(custom_id, response, None)


def write_failure(custom_id: str | None, code: str, message: str, number: int | None = None) -> str:
  """Returns the error file's line for a request that had no response. Args: number: the line in the input file."""
  error: dict[str, Any] = {"code": code, "message": message}
  return _write_line(custom_id, None, error if number is None else error | {"line": number})


def _write_line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> str:
  line = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}
  return msgspec.json.encode(line).decode()


def encode_body(body: dict[str, Any]) -> bytes:
  """Returns the JSON of a response's body."""
  return msgspec.json.encode(body)
