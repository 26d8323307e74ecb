"""An ASGI app that relays each request to a server on loopback, byte for byte. Knows no path and no body.

Each request has a connection of its own, closed with it: the server sees at once that a client is gone, and no request
meets a connection that the server has just closed. Statuses, headers, bodies and errors are the server's own. Three
errors are not: a server that cannot be reached and a body that Serve loses return 503 in Sluice's form, and a response
that breaks off raises, so that Serve cuts the client's connection instead of ending the response as if it were whole.
"""

import asyncio
from collections.abc import Callable
import json
import socket
from typing import Any
import urllib.parse

import h11
from starlette.types import Receive, Scope, Send

from server.errors import EngineDead, Unavailable
from server.http.error_responses import make_error_answer

# Of one connection only (RFC 9110, section 7.6.1).
_NOT_RELAYED = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"))
# Serve's proxy gives each request its id, and writes it into the response itself.
_WRITTEN_BY_PROXY = frozenset((b"x-request-id",))
_READ_BYTES = 64 << 10
_ENDED = "this replica's server has ended; Serve replaces it, so send the request again"


class RelayBroken(ConnectionError):
  """The server ended before its response did."""


class BodyLost(Unavailable):
  """Serve has lost its connection to the client's proxy before the request's body had come."""


class HttpRelay:
  """The app of one replica."""

  def __init__(self, find_port: Callable[[], int]):
    """Args:
    find_port: returns the server's HTTP port on 127.0.0.1.
    """
    self._find_port = find_port

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Relays one request; see the ASGI specification."""
    if scope["type"] == "lifespan":
      await _answer_lifespan(receive, send)
    elif scope["type"] == "http":
      await self._relay_request(scope, receive, send)
    else:
      raise RelayBroken(f"Sluice speaks HTTP, not {scope['type']}; send a plain request")

  async def _relay_request(self, scope: Scope, receive: Receive, send: Send) -> None:
    # A socket rather than a stream: asyncio's streams drop what they have received when a write fails.
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
      try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._find_port()))
      except OSError:
        await _answer_error(send, EngineDead(_ENDED))
        return
      exchange = _Exchange(scope, connection)
      upload = asyncio.ensure_future(exchange.send_request(receive))
      download = asyncio.ensure_future(exchange.relay_response(send))
      try:
        await asyncio.wait((upload, download), return_when=asyncio.FIRST_COMPLETED)
        if not download.done() and upload.exception() is None:
          return  # the client is gone
        if not download.done() and isinstance(lost := upload.exception(), BodyLost) and not exchange.has_response:
          download.cancel()
          await _answer_error(send, lost)
          return
        # A server may refuse a body before it has read all of it: its response counts, not the failed upload.
        await download
      finally:
        for task in (upload, download):
          task.cancel()
        await asyncio.gather(upload, download, return_exceptions=True)
    finally:
      connection.close()


class _Exchange:
  """One request and its response on one connection."""

  def __init__(self, scope: Scope, connection: socket.socket):
    self._scope, self._connection = scope, connection
    self._loop = asyncio.get_running_loop()
    self._http = h11.Connection(h11.CLIENT)

  @property
  def has_response(self) -> bool:
    """Whether a response has begun."""
    return self._http.their_state not in (h11.IDLE, h11.SEND_RESPONSE)

  async def send_request(self, receive: Receive) -> None:
    """Sends head and body; returns when the client is gone. Raises BodyLost."""
    headers = [(name, value) for name, value in self._scope["headers"] if name.lower() not in _NOT_RELAYED]
    names = {name.lower() for name, _ in headers}
    if b"content-length" not in names and self._scope["method"] not in ("GET", "HEAD"):
      headers.append((b"transfer-encoding", b"chunked"))
    headers.append((b"connection", b"close"))
    if b"host" not in names:
      headers.append((b"host", b"localhost"))
    await self._write(h11.Request(method=self._scope["method"], target=_target(self._scope), headers=headers))
    whole = False
    while True:
      try:
        message = await receive()
      except Exception as error:
        if whole:
          raise
        text = f"Serve lost the request's body on its way to this replica ({type(error).__name__}); send it again"
        raise BodyLost(text) from None
      if message["type"] != "http.request":
        return
      if whole:
        continue
      if body := message.get("body"):
        await self._write(h11.Data(data=body))
      if not message.get("more_body"):
        whole = True
        await self._write(h11.EndOfMessage())

  async def _write(self, event: Any) -> None:
    await self._loop.sock_sendall(self._connection, self._http.send(event) or b"")

  async def relay_response(self, send: Send) -> None:
    """Relays the response as it comes. Raises RelayBroken if it breaks off."""
    try:
      while not isinstance(event := await self._read_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
          left_out = _NOT_RELAYED | _WRITTEN_BY_PROXY
          headers = [(name, value) for name, value in event.headers if name not in left_out]
          await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
        elif isinstance(event, h11.Data):
          await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        elif isinstance(event, h11.ConnectionClosed):
          raise RelayBroken("the server closed the connection before its response")
    except (h11.RemoteProtocolError, ConnectionError) as error:
      if not self.has_response:
        await _answer_error(send, EngineDead(_ENDED))
        return
      raise RelayBroken(f"the server's response broke off: {error}") from None
    await send({"type": "http.response.body", "body": b"", "more_body": False})

  async def _read_event(self) -> Any:
    while (event := self._http.next_event()) is h11.NEED_DATA:
      self._http.receive_data(await self._loop.sock_recv(self._connection, _READ_BYTES))
    return event


def _target(scope: Scope) -> bytes:
  """Returns the request's path and query as they stood on the wire, below Serve's route prefix."""
  path: bytes = scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode()
  path = path.partition(b"?")[0].removeprefix(scope.get("root_path", "").rstrip("/").encode()) or b"/"
  query: bytes = scope.get("query_string", b"")
  return path + b"?" + query if query else path


async def _answer_error(send: Send, error: Unavailable) -> None:
  answer = make_error_answer(error)
  headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
  headers.append((b"content-type", b"application/json"))
  await send({"type": "http.response.start", "status": answer.status, "headers": headers})
  await send({"type": "http.response.body", "body": json.dumps(answer.body).encode(), "more_body": False})


async def _answer_lifespan(receive: Receive, send: Send) -> None:
  while (message := await receive())["type"] == "lifespan.startup":
    await send({"type": "lifespan.startup.complete"})
  await send({"type": message["type"] + ".complete"})
