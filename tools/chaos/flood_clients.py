"""Clients that flood a port: connections of junk, streams reset on opening, frames without a request.

Uses the standard library on bare sockets, since the client shares its cores with the server. Judges nothing.
"""

from collections import Counter
from collections.abc import Callable
import contextlib
import dataclasses
import random
import selectors
import socket
import struct
import time

from tools.chaos import wire

_AT_ONCE = 32  # connections of one client, each with a pending response
_PATIENCE_S = 30.0
_BURST = 100  # streams or frames in one write
_LAST_STREAM = 2**31 - 1
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_CANCEL = struct.pack(">I", 8)


@dataclasses.dataclass
class Flooded:
  """The result of a flood.

  Attributes:
    sent: connections, streams or frames.
    closed: connections that the server closed.
    codes: the server's GOAWAYs, by error code.
    faults: descriptions of faults.
  """

  sent: int = 0
  closed: int = 0
  codes: Counter[int] = dataclasses.field(default_factory=Counter)
  faults: list[str] = dataclasses.field(default_factory=list)

  def add(self, other: "Flooded") -> None:
    """Adds another process's result."""
    self.sent += other.sent
    self.closed += other.closed
    self.codes += other.codes
    self.faults += other.faults


# --- Junk -------------------------------------------------------------------------------------------------------------


def _http1(rng: random.Random) -> bytes:
  path = "".join(rng.choices("abcdefghij/.%?=", k=rng.randint(1, 40)))
  return f"{rng.choice(('GET', 'POST', 'OPTIONS'))} /{path} HTTP/1.1\r\nHost: x\r\nUser-Agent: scan\r\n\r\n".encode()


def _tls_hello(rng: random.Random) -> bytes:
  body = b"\x03\x03" + rng.randbytes(32) + b"\0" + b"\0\4\x13\x01\x13\x02" + b"\1\0" + b"\0\0"
  return b"\x16\x03\x01" + struct.pack(">H", len(body) + 4) + b"\1" + struct.pack(">I", len(body))[1:] + body


def _bytes(rng: random.Random) -> bytes:
  return bytes([rng.randrange(128, 256)]) + rng.randbytes(rng.randint(0, 1000))


def _preface_and_bytes(rng: random.Random) -> bytes:
  """Yields the bytes of an HTTP/2 connection up to its first frame."""
  return wire.PREFACE + b"\xff" + rng.randbytes(rng.randint(40, 1000))


JUNK: dict[str, Callable[[random.Random], bytes]] = {
  "HTTP/1.1": _http1,
  "TLS": _tls_hello,
  "bytes": _bytes,
  "HTTP/2 and bytes": _preface_and_bytes,
}


def junk(port: int, count: int, seed: int) -> Flooded:
  """A job: makes `count` connections that send no HTTP/2, each until the server closes it.

  Raises:
    OSError: a connection could not be made.
  """
  rng = random.Random(seed)
  kinds = list(JUNK.values())
  flooded = Flooded()
  with selectors.DefaultSelector() as selector:
    since: dict[socket.socket, float] = {}
    while flooded.sent < count or since:
      while len(since) < _AT_ONCE and flooded.sent < count:
        said = rng.choice(kinds)(rng)
        flooded.sent += 1
        try:
          client = wire.connect(port, said)
        except (ConnectionResetError, BrokenPipeError):  # the server hung up early
          flooded.closed += 1
          continue
        selector.register(client, selectors.EVENT_READ)
        since[client] = time.monotonic()
      for key, _ in selector.select(1.0):
        client = key.fileobj
        assert isinstance(client, socket.socket)
        if _has_ended(client):
          flooded.closed += 1
          _drop(selector, since, client)
      if since and time.monotonic() - min(since.values()) > _PATIENCE_S:
        for client in [client for client, began in since.items() if time.monotonic() - began > _PATIENCE_S]:
          flooded.faults.append(f"a connection of junk was still open after {_PATIENCE_S:g} s")
          _drop(selector, since, client)
  return flooded


def _has_ended(client: socket.socket) -> bool:
  try:
    return not client.recv(65536)
  except ConnectionError:
    return True


def _drop(selector: selectors.BaseSelector, since: dict[socket.socket, float], client: socket.socket) -> None:
  selector.unregister(client)
  del since[client]
  wire.leave(client, "rst")  # otherwise its port would stay in use for a minute


# --- Frames -----------------------------------------------------------------------------------------------------------


class _Connection:
  """A flooding connection: reads GOAWAYs alone, and waits for nothing."""

  def __init__(self, port: int, flooded: Flooded):
    opening = wire.PREFACE + wire.frame(_SETTINGS, 0, 0, b"") + wire.frame(_SETTINGS, 1, 0, b"")
    self._socket = wire.connect(port, opening)
    self._flooded = flooded
    self._rest = b""
    self.is_open = True

  def send(self, raw: bytes) -> None:
    """Sends all data, unless the server has hung up."""
    self._socket.settimeout(_PATIENCE_S)
    try:
      self._socket.sendall(raw)
    except TimeoutError:
      self._end(f"a connection took nothing for {_PATIENCE_S:g} s")
    except OSError:
      self._read()
      self._end()
    else:
      self._read()

  def _read(self, wait_s: float = 0.0) -> None:
    """Reads until nothing arrives for this long."""
    self._socket.settimeout(wait_s)
    with contextlib.suppress(BlockingIOError, TimeoutError):
      while self.is_open:
        try:
          more = self._socket.recv(1 << 18)
        except ConnectionError:
          more = b""
        if not more:
          self._end()
        self._take(more)

  def _take(self, more: bytes) -> None:
    data, at = self._rest + more, 0
    while len(data) - at >= 9:
      size = int.from_bytes(data[at : at + 3])
      if len(data) - at < 9 + size:
        break
      if data[at + 3] == _GOAWAY and size >= 8:
        self._flooded.codes[int.from_bytes(data[at + 13 : at + 17])] += 1
      at += 9 + size
    self._rest = data[at:]

  def _end(self, fault: str = "") -> None:
    if self.is_open:
      self.is_open = False
      self._flooded.closed += not fault
      self._flooded.faults += [fault] if fault else []

  def close(self) -> None:
    """Closes, once the server has read all of it: an RST drops unread data."""
    if self.is_open:
      with contextlib.suppress(OSError):
        self._socket.shutdown(socket.SHUT_WR)
      self._read(_PATIENCE_S)
      if self.is_open:
        self._end(f"a flood was not read within {_PATIENCE_S:g} s")
      else:
        self._flooded.closed -= 1  # since the client closed first
    wire.leave(self._socket, "rst")


def resets(port: int, message: bytes, count: int, seconds: float = 0.0, per_connection: int = 0) -> Flooded:
  """A job: rapid reset. Opens streams, each with a whole request, and resets them in the same write.

  Args:
    port: the gRPC port.
    message: the request.
    count, seconds: the least number of streams, and the least duration.
    per_connection: streams before the next connection; 0: a new one only when the server closes the old.
  """
  headers = wire.header_block(wire.GENERATE)
  body = struct.pack(">BI", 0, len(message)) + message

  def burst(stream: int) -> bytes:
    return b"".join(
      wire.frame(_HEADERS, _END_HEADERS, each, headers)
      + wire.frame(_DATA, _END_STREAM, each, body)
      + wire.frame(_RST_STREAM, 0, each, _CANCEL)
      for each in range(stream, stream + 2 * _BURST, 2)
    )

  return _flood(port, count, burst, 2 * _BURST, seconds, per_connection)


def frames(port: int, count: int, kind: str) -> Flooded:
  """A job: sends `count` frames of one kind of FRAMES."""
  opening, one = FRAMES[kind]()
  whole = one * _BURST
  return _flood(port, count, lambda at: (opening if at == 1 else b"") + whole, 1)


def _flood(
  port: int,
  count: int,
  burst: Callable[[int], bytes],
  step: int,
  seconds: float = 0.0,
  per_connection: int = 0,
) -> Flooded:
  """Writes bursts, and opens a new connection whenever the server closes one."""
  flooded = Flooded()
  last = min(_LAST_STREAM, step * per_connection // _BURST + 1) if per_connection else _LAST_STREAM
  until = time.monotonic() + seconds
  while flooded.sent < count or time.monotonic() < until:
    connection = _Connection(port, flooded)
    at = 1
    while connection.is_open and at + step <= last and (flooded.sent < count or time.monotonic() < until):
      connection.send(burst(at))
      at += step
      flooded.sent += _BURST
    connection.close()
  return flooded


def _open_stream() -> bytes:
  return wire.frame(_HEADERS, _END_HEADERS, 1, wire.header_block(wire.GENERATE))


def _continuations() -> tuple[bytes, bytes]:
  more = wire.literal("x-more", "a" * 100)
  return wire.frame(_HEADERS, 0, 1, wire.header_block(wire.GENERATE)), wire.frame(_CONTINUATION, 0, 1, more)


# The opening bytes, and the frame.
FRAMES: dict[str, Callable[[], tuple[bytes, bytes]]] = {
  "CONTINUATION": _continuations,
  "SETTINGS": lambda: (b"", wire.frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))),
  "PING": lambda: (b"", wire.frame(_PING, 0, 0, b"12345678")),
  "WINDOW_UPDATE": lambda: (_open_stream(), wire.frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))),
  "empty DATA": lambda: (_open_stream(), wire.frame(_DATA, 0, 1, b"")),
}
