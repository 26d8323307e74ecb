"""Badly behaved clients on bare sockets: they vanish, hang or never read. Standard library alone; judges nothing.

  python -S -m tools.chaos.wire PORT COUNT REQUEST_HEX     # opens COUNT requests, prints "open", and waits to be killed

Bare sockets, because a gRPC client closes politely, and because the client shares its cores with the server.
"""

import contextlib
import random
import socket
import struct
import sys
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4
GENERATE = "/sluice.v1.GenerationService/Generate"
# Ways to leave.
WAYS = ("rst", "fin", "half")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
  """Returns one frame of HTTP/2 (RFC 9113)."""
  return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def grpc_request(message: bytes, method: str = GENERATE, *, window: int = 65_535) -> bytes:
  """Returns all that a client sends on a new connection for one call.

  Args: message: serialized. method: path. window: bytes the server may send before the client reads any.
  """
  body = struct.pack(">BI", 0, len(message)) + message
  return b"".join(
    (
      PREFACE,
      frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)),
      frame(_HEADERS, _END_HEADERS, 1, header_block(method)),
      frame(_DATA, _END_STREAM, 1, body),
    )
  )


def header_block(method: str) -> bytes:
  """Returns HPACK of a call's headers, without tables."""
  fields = {
    ":method": "POST",
    ":scheme": "http",
    ":path": method,
    ":authority": "chaos",
    "content-type": "application/grpc",
    "te": "trailers",
  }
  return b"".join(literal(name, value) for name, value in fields.items())


def literal(name: str, value: str) -> bytes:
  """Returns HPACK of one header that enters no table."""
  return b"\0" + _string(name) + _string(value)


def http_request(body: bytes, path: str = "/v1/completions") -> bytes:
  """Returns a POST of JSON."""
  lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
  return "\r\n".join((*lines, "", "")).encode() + body


def _string(text: str) -> bytes:
  raw = text.encode()
  assert len(raw) < 127
  return bytes((len(raw),)) + raw


def connect(port: int, request: bytes, *, receive_buffer: int = 0) -> socket.socket:
  """Opens a connection and sends `request`."""
  client = socket.socket()
  if receive_buffer:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
  client.settimeout(30)
  client.connect(("127.0.0.1", port))
  client.sendall(request)
  return client


def leave(client: socket.socket, way: str) -> None:
  """Closes with RST, or politely with FIN after reading the available data."""
  if way == "rst":
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  else:
    client.setblocking(False)
    with contextlib.suppress(OSError):
      client.recv(1 << 20)
      client.shutdown(socket.SHUT_WR)
  client.close()


def vanish(requests: list[tuple[int, bytes]], count: int, open_at_once: int, pause_s: float, seed: int) -> int:
  """Opens `count` requests and leaves each at a random moment, in a random way; returns how many it left.

  Args:
    requests: (port, bytes) to choose from.
    open_at_once: open connections; a random one makes way for the next.
    pause_s: longest pause between two, so that the moments are spread over a step.
  """
  rng = random.Random(seed)
  clients: list[tuple[socket.socket, str]] = []

  def leave_one() -> None:
    index = rng.randrange(len(clients))
    clients[index], clients[-1] = clients[-1], clients[index]
    leave(*clients.pop())

  for _ in range(count):
    port, request = rng.choice(requests)
    way = rng.choice(WAYS)
    if way == "half":
      request = request[: rng.randrange(len(request))]
    clients.append((connect(port, request), way))
    if len(clients) >= open_at_once:
      leave_one()
    time.sleep(rng.random() * pause_s)
  while clients:
    leave_one()
  return count


class Deaf:
  """Clients that never read: neither their sockets nor their flow control accept a response."""

  def __init__(self, port: int, messages: list[bytes]):
    """Opens a connection for each message."""
    self._clients = [connect(port, grpc_request(message, window=0), receive_buffer=4096) for message in messages]

  def close(self) -> None:
    """Closes with RST."""
    for client in self._clients:
      leave(client, "rst")


def main(arguments: list[str]) -> None:
  """Holds requests open until it is killed."""
  port, count, request = int(arguments[0]), int(arguments[1]), bytes.fromhex(arguments[2])
  clients = [connect(port, request) for _ in range(count)]
  print("open", flush=True)
  for client in clients:  # a killed client has read some, as real ones do
    client.recv(65536)
  time.sleep(3600)


if __name__ == "__main__":
  main(sys.argv[1:])
