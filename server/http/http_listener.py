"""Runs uvicorn's HTTP protocol in the event loop of the gRPC server. Knows no path.

uvicorn's own `Server` would take over the process's signals and wake ten times a second, so Sluice uses its protocol
class alone. It adds a time limit for headers, a limit of connections, a JSON response to bytes that are not HTTP, and
a way to cut connections whose clients read nothing.
"""

import asyncio
import json
import logging
import socket
import sys
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from engine.errors import ConfigError
from server.http.http_options import HttpOptions
from server.security.certificates import Certificates

_BACKLOG = 2048
_STOP_POLL_S = 0.005


class _Protocol(H11Protocol):
  """One connection."""

  def __init__(self, options: HttpOptions, config: Config, server_state: ServerState):
    super().__init__(config, server_state, {})
    self._options = options
    self._head_timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
    super().connection_made(transport)
    self.app_state = {"abort": transport.abort}
    if len(self.connections) > self._options.max_connections:
      transport.abort()
      return
    self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

  def connection_lost(self, exc: Exception | None) -> None:
    self._stop_head_timer()
    self._unset_keepalive_if_required()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if self._idle and self._head_timer is None:
      self._head_timer = self.loop.call_later(self._options.head_timeout_s, self._head_timed_out)
    super().data_received(data)
    if not self._idle:
      self._stop_head_timer()

  def send_400_response(self, msg: str) -> None:
    """Answers bytes that are not HTTP. uvicorn calls it where it catches h11's error."""
    error = sys.exception()
    status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
    self._send_error(status, "these bytes are not an HTTP/1.1 request that this server takes")

  @property
  def _idle(self) -> bool:
    """Whether no request is being answered."""
    return self.cycle is None or self.cycle.response_complete

  def _stop_head_timer(self) -> None:
    if self._head_timer is not None:
      self._head_timer.cancel()
      self._head_timer = None

  def _head_timed_out(self) -> None:
    self._head_timer = None
    if not self.transport.is_closing():
      self._send_error(408, f"the headers did not come within {self._options.head_timeout_s:g} s; send them at once")

  def _send_error(self, status: int, message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    body = json.dumps({"error": error}).encode()
    headers = [
      (b"content-type", b"application/json"),
      (b"content-length", str(len(body)).encode()),
      (b"connection", b"close"),
    ]
    try:
      for event in (
        h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES.get(status, b"")),
        h11.Data(data=body),
        h11.EndOfMessage(),
      ):
        self.transport.write(self.conn.send(event) or b"")
    except h11.LocalProtocolError:
      pass  # a response has begun, so it is too late for another
    self.transport.close()


def open_listening_socket(host: str, port: int, flag: str = "http_port") -> socket.socket:
  """Returns a listening socket; port 0 lets the system choose. Errors name `flag`.

  Raises:
    ConfigError: the address cannot be bound.
  """
  try:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
  except OSError as error:
    raise ConfigError(
      f"cannot listen for HTTP on {host}:{port}: {error.strerror}; choose another --{flag} (-1: no HTTP) or --http_host"
    ) from None
  # asyncio does it only for sockets that name their protocol, and these, accepted from here, do not: each answer would
  # wait 40 ms for the client to acknowledge its headers.
  listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  # The system detects clients whose machine has died.
  listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 80_000)):
    if hasattr(socket, name):
      listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
  return listening


class Listener:
  """A listening socket with its connections. Belongs to one event loop."""

  def __init__(
    self,
    app: ASGIApp,
    options: HttpOptions,
    certificates: Certificates | None = None,
    listening: socket.socket | None = None,
    *,
    flag: str = "http_port",
  ):
    """Args:
    app: receives the requests.
    options: address and limits.
    certificates: for TLS; None is plain text.
    listening: a socket that other processes may accept from too; None opens one.
    flag: the flag that sets the port, for errors.
    """
    self._listening = listening
    self._flag = flag
    self._options = options
    self._certificates = certificates
    self._tls = None if certificates is None else certificates.context()
    self._state = ServerState()
    self._server: asyncio.Server | None = None
    self._config = Config(
      app,
      http=H11Protocol,
      ws="none",
      lifespan="off",
      log_config=None,
      access_log=False,
      proxy_headers=False,
      timeout_keep_alive=round(options.idle_timeout_s),
      h11_max_incomplete_event_size=options.max_header_bytes,
    )
    self._config.load()
    # uvicorn warns once for each piece of junk that a scanner sends.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

  async def start_listening(self) -> int:
    """Binds and listens; returns the port.

    Raises:
      ConfigError: the address cannot be bound.
    """
    listening = self._listening or open_listening_socket(self._options.host, self._options.port, self._flag)
    loop = asyncio.get_running_loop()
    self._server = await loop.create_server(self._protocol, sock=listening, backlog=_BACKLOG, ssl=self._tls)
    return listening.getsockname()[1]

  async def stop_listening(self, grace_s: float) -> None:
    """Stops listening; closes idle connections at once, others after their response or after `grace_s` seconds."""
    if self._server is None:
      return
    self._server.close()
    for connection in list(self._state.connections):
      connection.shutdown()
    try:
      async with asyncio.timeout(grace_s):
        while self._state.connections or self._state.tasks:
          await asyncio.sleep(_STOP_POLL_S)
    except TimeoutError:
      for task in list(self._state.tasks):
        task.cancel()
      for connection in list(self._state.connections):
        connection.transport.abort()
      await asyncio.sleep(0)

  def _protocol(self) -> Any:
    """Returns the protocol of a new connection, before its handshake."""
    if self._certificates is not None and self._tls is not None:
      self._certificates.renew(self._tls)
    return _Protocol(self._options, self._config, self._state)
