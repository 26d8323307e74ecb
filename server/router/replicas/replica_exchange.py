"""One request and its response on a connection of its own to a replica. Chooses nothing and retries nothing.

The connection closes with the request. So a replica sees at once that a client is gone, and no request meets a
connection that the replica has just closed. Sockets rather than asyncio's streams, which drop what they have received
when a write fails.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import socket

import h11

_READ_BYTES = 64 << 10
_MAX_HEAD_BYTES = 64 << 10


class ReplicaUnreachable(ConnectionError):
  """The replica has seen no byte of the request."""


class ReplicaBroken(ConnectionError):
  """The connection ended, or held bytes that are not HTTP, before the response was whole."""


class UnsendableRequest(ValueError):
  """The request's head is not HTTP that may be sent."""


class ReplicaExchange:
  """The client's side of one HTTP/1.1 request. Close it in any case.

  Attributes:
    has_ended: whether the whole response has been read.
  """

  def __init__(self) -> None:
    self._loop = asyncio.get_running_loop()
    self._socket: socket.socket | None = None
    self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
    self.has_ended = False

  async def connect(self, family: int, address: tuple, timeout_s: float) -> None:
    """Opens the connection.

    Args:
      family, address: of a resolved address, as `socket` takes them.
      timeout_s: longest wait.

    Raises:
      ReplicaUnreachable: there is no connection.
    """
    self._socket = connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
      async with asyncio.timeout(timeout_s):
        await self._loop.sock_connect(connection, address)
    except TimeoutError:
      raise ReplicaUnreachable(f"no connection within {timeout_s:g} s") from None
    except OSError as error:
      raise ReplicaUnreachable(error.strerror or "no connection") from None

  async def send_head(self, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Sends the request line and the headers, which say how long the body is. Raises ReplicaBroken.

    Raises:
      UnsendableRequest: a header or the method is malformed.
    """
    try:
      request = h11.Request(method=method, target=target, headers=[*headers, (b"connection", b"close")])
    except h11.LocalProtocolError as error:
      raise UnsendableRequest(str(error)) from None
    await self._write(request)

  async def send_data(self, data: bytes) -> None:
    """Sends a part of the body. Raises ReplicaBroken."""
    await self._write(h11.Data(data=data))

  async def end_request(self) -> None:
    """Ends the body. Raises ReplicaBroken."""
    await self._write(h11.EndOfMessage())

  async def _write(self, event: h11.Event) -> None:
    assert self._socket is not None
    try:
      if data := self._http.send(event):
        await self._loop.sock_sendall(self._socket, data)
    except (OSError, h11.LocalProtocolError) as error:
      raise ReplicaBroken(f"the request could not be sent: {error}") from None

  async def read_head(self) -> h11.Response:
    """Returns the response's status and headers. Raises ReplicaBroken."""
    while True:
      event = self._next_event()
      if isinstance(event, h11.Response):
        return event
      if event is h11.NEED_DATA:
        await self._receive()
      elif isinstance(event, h11.ConnectionClosed):
        raise ReplicaBroken("the connection ended before the response")

  async def read_data(self) -> bytes:
    """Returns what has come of the body, at least one byte; b"" at its end. Raises ReplicaBroken."""
    parts = []
    while not self.has_ended:
      event = self._next_event()
      if isinstance(event, h11.Data):
        parts.append(bytes(event.data))
      elif isinstance(event, h11.EndOfMessage):
        self.has_ended = True
      elif parts:
        return b"".join(parts)
      elif event is h11.NEED_DATA:
        await self._receive()
      else:
        raise ReplicaBroken("the connection ended within the response")
    return b"".join(parts)

  def _next_event(self) -> object:
    try:
      return self._http.next_event()
    except h11.RemoteProtocolError as error:
      raise ReplicaBroken(f"the response broke off: {error}") from None

  async def _receive(self) -> None:
    assert self._socket is not None
    try:
      self._http.receive_data(await self._loop.sock_recv(self._socket, _READ_BYTES))
    except OSError as error:
      raise ReplicaBroken(f"the connection ended: {error.strerror}") from None

  def break_off(self) -> None:
    """Ends the connection under a running read or write, which then raises ReplicaBroken."""
    if self._socket is not None:
      with contextlib.suppress(OSError):
        self._socket.shutdown(socket.SHUT_RDWR)

  def close(self) -> None:
    """Closes the connection."""
    if self._socket is not None:
      self._socket.close()
      self._socket = None


async def fetch_page(
  family: int, address: tuple, path: str, headers: Sequence[tuple[bytes, bytes]], timeout_s: float, max_bytes: int
) -> tuple[int, bytes]:
  """Returns status and body of a GET.

  Args:
    family, address: as for `connect`.
    path: path and query.
    headers: with the host.
    timeout_s: longest wait for all of it.
    max_bytes: the most of the body that is read; the rest is cut off.

  Raises:
    ReplicaUnreachable, ReplicaBroken: no whole answer came.
  """
  exchange = ReplicaExchange()
  try:
    async with asyncio.timeout(timeout_s):
      await exchange.connect(family, address, timeout_s)
      await exchange.send_head(b"GET", path.encode(), headers)
      await exchange.end_request()
      head, body = await exchange.read_head(), b""
      while len(body) < max_bytes and (data := await exchange.read_data()):
        body += data
      return head.status_code, body[:max_bytes]
  except TimeoutError:
    raise ReplicaBroken(f"no answer within {timeout_s:g} s") from None
  finally:
    exchange.close()
