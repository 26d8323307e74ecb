"""One request and its response on a connection of its own to a replica. Chooses nothing and retries nothing.

The connection closes with the request. So a replica sees at once that a client is gone, and no request meets a
connection that the replica has just closed. Sockets rather than asyncio's streams, which drop what they have received
when a write fails.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import socket
import ssl

import h11

from server.router.replicas.replica_tls import ReplicaTls, TlsSession

_READ_BYTES = 64 << 10
_MAX_HEAD_BYTES = 64 << 10


class ReplicaUnreachable(ConnectionError):
  """The replica has seen no byte of the request."""


class ReplicaBroken(ConnectionError):
  """The connection ended, or held bytes that are not HTTP, before the response was whole; or a proxy says so."""


class UnsendableRequest(ValueError):
  """The request's head is not HTTP that may be sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaPlace:
  """Where a replica is.

  Attributes:
    family, address: the resolved address, as `socket` takes them.
    host: the name or address that its certificate must be for.
    tls: None for plain HTTP.
  """

  family: int
  address: tuple
  host: str
  tls: ReplicaTls | None = None


class ReplicaExchange:
  """The client's side of one HTTP/1.1 request. Close it in any case.

  Attributes:
    has_ended: whether the whole response has been read.
  """

  def __init__(self) -> None:
    self._loop = asyncio.get_running_loop()
    self._socket: socket.socket | None = None
    self._tls: TlsSession | None = None
    self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
    self.has_ended = False

  async def connect(self, place: ReplicaPlace, timeout_s: float) -> None:
    """Opens the connection, with TLS where the place has it.

    A handshake takes processor time of a replica that may be busy. Like a request's answer, it ends with `break_off`.

    Args:
      place: the replica's.
      timeout_s: longest wait, without TLS's handshake.

    Raises:
      ReplicaUnreachable: there is no connection.
    """
    self._socket = connection = socket.socket(place.family, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
      async with asyncio.timeout(timeout_s):
        await self._loop.sock_connect(connection, place.address)
    except TimeoutError:
      raise ReplicaUnreachable(f"no connection within {timeout_s:g} s") from None
    except OSError as error:
      raise ReplicaUnreachable(error.strerror or "no connection") from None
    if place.tls is not None:
      await self._shake_hands(connection, place.tls.open_session(place.host))

  async def _shake_hands(self, connection: socket.socket, session: TlsSession) -> None:
    received = None
    try:
      while self._tls is None:
        data, is_over = session.continue_handshake(received)
        if data:
          await self._loop.sock_sendall(connection, data)
        if is_over:
          self._tls = session
        else:
          received = await self._loop.sock_recv(connection, _READ_BYTES)
    except OSError as error:
      if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        raise ReplicaUnreachable(session.explain_error(error)) from None
      raise ReplicaUnreachable(
        "it ended the connection within the handshake; if it has no TLS, list it without https://"
      ) from None

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
        if self._tls is not None:
          data = self._tls.encrypt(data)
        await self._loop.sock_sendall(self._socket, data)
    except OSError as error:
      raise ReplicaBroken(self._explain_loss(error, f"the request could not be sent: {error}")) from None
    except h11.LocalProtocolError as error:
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
      data = await self._loop.sock_recv(self._socket, _READ_BYTES)
      if self._tls is not None:
        data = self._tls.decrypt(data)
        if not data and not self._tls.has_ended:
          return  # a part of a record
      self._http.receive_data(data)
    except OSError as error:
      raise ReplicaBroken(self._explain_loss(error, f"the connection ended: {error.strerror}")) from None

  def _explain_loss(self, error: OSError, text: str) -> str:
    """Returns why the connection was lost: `text`, or what TLS says."""
    if self._tls is None or self._socket is None:
      return text
    if not isinstance(error, ssl.SSLError):
      try:
        self._tls.decrypt(self._socket.recv(_READ_BYTES))  # the alert that came before the end
      except OSError as alert:
        error = alert
    return self._tls.explain_error(error)

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
  place: ReplicaPlace, path: str, headers: Sequence[tuple[bytes, bytes]], timeout_s: float, max_bytes: int
) -> tuple[int, bytes]:
  """Returns status and body of a GET.

  Args:
    place: the replica's.
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
      await exchange.connect(place, timeout_s)
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
