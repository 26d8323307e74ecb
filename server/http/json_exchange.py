"""Reads a request body within limits, and writes JSON or server-sent events. Knows no endpoint."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.generation.serving_state import ServingState
from server.http import json_fields
from server.http.error_responses import Refused, make_error_answer
from server.http.http_options import HttpOptions

# Bytes. Smaller bodies are parsed on the loop: handing them to a thread would take longer.
_INLINE_BYTES = 16 << 10
# What curl sends with -d, and what clients without a content type send. The body is JSON all the same.
_FROM_COMMANDS = ("application/x-www-form-urlencoded", "")


class ClientGone(Exception):
  """The client has closed its connection, so no response is possible."""


async def read_json_object(request: Request, state: ServingState, options: HttpOptions) -> dict[str, Any]:
  """Returns the JSON object in a request's body, read only as far as the limits allow.

  Args:
    request: a request whose body is unread.
    state: its text pool parses long bodies.
    options: the limits.

  Raises:
    Refused: 408, 413 or 415.
    InvalidRequest: the body is not a JSON object.
    ClientGone: the client left before the body was complete.
  """
  max_bytes, timeout_s = options.max_body_bytes, options.body_timeout_s
  _check_headers(request.headers, max_bytes)
  body = bytearray()
  try:
    async with asyncio.timeout(timeout_s):
      more = True
      while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
          raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > max_bytes:
          raise _too_large(f"more than {max_bytes}", max_bytes)
  except TimeoutError:
    raise Refused(408, f"the body did not come within {timeout_s:g} s; send it at once") from None
  if not body:
    raise Refused(400, "the body is empty; send a JSON object")
  if len(body) <= _INLINE_BYTES:
    return json_fields.parse_json_object(bytes(body))
  return await state.run_in_text_pool(lambda: json_fields.parse_json_object(bytes(body)))


def _check_headers(headers: Headers, max_bytes: int) -> None:
  kind, _, parameters = headers.get("content-type", "").partition(";")
  kind = kind.strip().lower()
  # Any web page may send the kinds of forms here without a preflight, but never without these headers.
  from_page = "origin" in headers or "sec-fetch-site" in headers
  is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
  if not is_json and (from_page or kind not in _FROM_COMMANDS):
    raise Refused(415, f"content-type={kind!r:.80} is not taken here; send the header Content-Type: application/json")
  charset = parameters.partition("charset=")[2].strip().strip('"').lower()
  if charset not in ("", "utf-8", "utf8"):
    raise Refused(415, f"charset={charset!r:.40} is not taken here; send UTF-8")
  encoding = headers.get("content-encoding", "identity").strip().lower()
  if encoding != "identity":
    raise Refused(415, f"content-encoding={encoding!r:.40} is not taken here; send the body as it is")
  length = headers.get("content-length", "")
  if length.isdigit() and int(length) > max_bytes:
    raise _too_large(length, max_bytes)


def _too_large(size: str, max_bytes: int) -> Refused:
  return Refused(413, f"the body has {size} bytes, the limit is {max_bytes}: send less, or raise --max_request_bytes")


async def unless_gone[T](receive: Receive, work: Awaitable[T]) -> T:
  """Awaits `work`, and cancels it if the client disconnects. The request's body must have been read.

  Raises:
    ClientGone: the client disconnected.
  """
  working = asyncio.ensure_future(work)
  gone = asyncio.ensure_future(_wait_gone(receive))
  try:
    await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
      return working.result()
    raise ClientGone
  finally:
    for task in (working, gone):
      task.cancel()
    # `work` must have freed its resources before this returns.
    await asyncio.gather(working, gone, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


def encode_sse_event(payload: dict[str, Any], name: str = "") -> bytes:
  """Returns one server-sent event (HTML standard, section 9.2), with a name if there is one."""
  head = f"event: {name}\n".encode() if name else b""
  return head + b"data: " + msgspec.json.encode(payload) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
  """Sends server-sent events from an iterator, and closes it when the client disconnects or stops reading.

  Headers go out with the first events, so an error before them has an HTTP status of its own. A later error is the last
  event, in the form of the path's API.
  """

  def __init__(
    self,
    events: AsyncGenerator[bytes],
    *,
    stall_timeout_s: float,
    stalled: Callable[[], None],
    close: Callable[[], None],
    headers: dict[str, str] | None = None,
  ):
    """Sets the stream's source and limits.

    Args:
      events: items of one or more whole events.
      stall_timeout_s: how long the client may read nothing, in seconds.
      stalled: called after that time; aborts the work.
      close: always called at the end.
      headers: extra headers.
    """
    super().__init__(
      None, headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **(headers or {})}
    )
    del self.headers["content-length"]
    self._events = events
    self._stall_timeout_s = stall_timeout_s
    self._stalled = stalled
    self._close = close

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    # Not in the iterator, which may be cancelled before it starts.
    try:
      await unless_gone(receive, self._send_all(scope, send))
    finally:
      self._close()

  async def _send_all(self, scope: Scope, send: Send) -> None:
    first = True
    try:
      try:
        async for part in self._events:
          if first:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            first = False
          await self._send(send, part)
      except Exception as error:
        if first or isinstance(error, _Stalled):
          raise
        state, said = scope["state"], make_error_answer(error)
        state["notes"]["stream_error"] = said.body["error"]["code"]
        form = state["error_form"]
        await self._send(send, encode_sse_event(form.make_body(said, state["request_id"]), form.event))
      await self._send(send, b"", last=True)
    except _Stalled:
      # The socket's buffer is full of unread bytes, for which a graceful close would wait.
      scope["state"]["abort"]()
      raise ClientGone from None
    finally:
      await self._events.aclose()

  async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
    message = {"type": "http.response.body", "body": body, "more_body": not last}
    try:
      async with asyncio.timeout(self._stall_timeout_s):
        await send(message)
    except TimeoutError:
      self._stalled()
      raise _Stalled from None


class _Stalled(Exception):
  """The client reads nothing."""
