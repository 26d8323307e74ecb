"""Relays server-sent events whole, and makes the event that ends a broken stream. Knows no socket.

A replica that dies may leave half an event. Passed on, it would join the error event behind it. So the relay holds back
what follows the last whole event until the rest comes, and drops it if the stream breaks.
"""

import re

import msgspec

from server.http.error_responses import OPENAI_ERRORS, ErrorAnswer
from server.http.json_exchange import encode_sse_event
from server.http.messages.message_errors import MESSAGES_ERRORS

_END = b"\n\n"
_MAX_HELD_BYTES = 8 << 20  # beyond this, the relay passes on what it has
_SEQUENCE = re.compile(rb'"sequence_number":\s*(\d+)')


class EventRelay:
  """The events of one stream."""

  def __init__(self) -> None:
    self._held = b""
    self._latest = b""

  def take_data(self, data: bytes) -> bytes:
    """Returns what can be passed on of the data that came, up to the end of the last whole event."""
    if self._held:
      data = self._held + data
      self._held = b""
    if not data.endswith(_END):
      whole = data.rfind(_END) + len(_END) if _END in data else 0
      if len(data) - whole <= _MAX_HELD_BYTES:
        self._held, data = data[whole:], data[:whole]
    if data:
      self._latest = data
    return data

  def take_rest(self) -> bytes:
    """Returns what is held back, when the stream has ended as it should."""
    rest, self._held = self._held, b""
    return rest

  @property
  def next_sequence_number(self) -> int:
    """The number after that of the latest event of /v1/responses; 0 if none had one."""
    numbers = _SEQUENCE.findall(self._latest)
    return int(numbers[-1]) + 1 if numbers else 0


def make_last_event(path: str, answer: ErrorAnswer, request_id: str, sequence_number: int) -> bytes:
  """Returns the error event that ends a broken stream, in the form of the path's API.

  Args:
    path: the request's path.
    answer: the error.
    request_id: the request's id.
    sequence_number: the event's number in a stream of /v1/responses.
  """
  if path == "/v1/responses":
    error = answer.body["error"]
    event = {"type": "error", "sequence_number": sequence_number, "code": error["code"], "message": error["message"]}
    return b"event: error\ndata: " + msgspec.json.encode({**event, "param": None}) + _END
  form = MESSAGES_ERRORS if path.startswith("/v1/messages") else OPENAI_ERRORS
  return encode_sse_event(form.make_body(answer, request_id), form.event)
