"""Frames of HTTP/2 by hand (RFC 9113), for what no well-behaved client would send or show. No HPACK but literals."""

from collections.abc import Iterator
import contextlib
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
ACK = END_STREAM = 1
END_HEADERS = 4
MAX_CONCURRENT_STREAMS, MAX_HEADER_LIST_SIZE = 3, 6  # settings
ENHANCE_YOUR_CALM = 11  # an error code


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
  """One frame."""
  return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers(method: str, **extra: str) -> bytes:
  """The header block of a gRPC call."""
  fields = {
    ":method": "POST",
    ":scheme": "http",
    ":path": method,
    ":authority": "test",
    "content-type": "application/grpc",
    "te": "trailers",
    **extra,
  }
  return block(fields)


def block(fields: dict[str, str]) -> bytes:
  """Fields as literals that are not indexed."""
  return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields.items())


def _string(text: str) -> bytes:
  raw = text.encode()
  assert len(raw) < 127
  return bytes((len(raw),)) + raw


class Connection:
  """A socket that speaks frames."""

  def __init__(self, address: str):
    host, port = address.rsplit(":", 1)
    self._socket = socket.create_connection((host, int(port)), timeout=30)
    self._rest = b""

  def send(self, *frames: bytes) -> None:
    """Sends; what the server no longer takes is lost."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
      self._socket.sendall(b"".join(frames))

  def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of what the server sends, until it closes."""
    while True:
      head = self._take(9)
      if head is None:
        return
      size = int.from_bytes(head[:3])
      payload = self._take(size) if size else b""
      if payload is None:
        return
      yield head[3], head[4], int.from_bytes(head[5:9]), payload

  def wait_for(self, wanted: int) -> bytes:
    """The payload of the next frame of this kind; answers settings on the way."""
    for kind, flags, _, payload in self.frames():
      if kind == SETTINGS and not flags & ACK:
        self.send(frame(SETTINGS, ACK))
      if kind == wanted and not (kind == SETTINGS and flags & ACK):
        return payload
    raise AssertionError(f"the server closed the connection without a frame of kind {wanted}")

  def hurry(self) -> None:
    """From now on waits only a moment for a server that takes nothing."""
    self._socket.settimeout(0.1)

  def reset_on_close(self) -> None:
    """Closing then sends RST, as the kernel does for a killed process with unread data."""
    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

  def _take(self, size: int) -> bytes | None:
    while len(self._rest) < size:
      try:
        more = self._socket.recv(65536)
      except ConnectionResetError:
        more = b""
      if not more:
        return None
      self._rest += more
    taken, self._rest = self._rest[:size], self._rest[size:]
    return taken

  def __enter__(self):
    return self

  def __exit__(self, *_: object) -> None:
    self._socket.close()
