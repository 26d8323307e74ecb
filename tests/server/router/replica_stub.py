"""A small HTTP server on a real socket that fails in every way a replica can."""

from collections.abc import Iterator
import contextlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import socket
import ssl
import struct
import threading

EVENTS = [b'data: {"n": 0}\n\n', b'data: {"n": 1}\n\n', b"data: [DONE]\n\n"]


class ReplicaStub:
  """One replica.

  Attributes:
    mode: what it does with a request: "json", "stream", "503", "proxy" (a proxy's 500), "close" (before an answer),
      "break" (a stream's second event comes half, then a reset), "end" (the same, with the end of the connection),
      "break_json" or "hang".
    is_ready: what /ready says.
    frozen: cleared, requests of every kind wait, also checks.
    go: cleared, a stream waits after its first event.
    seen: (method, path with query, headers, body) of each request but checks.
    gone: set when a client has closed its connection within a stream.
    stored: ids of stored responses.
    load: its gauges, as /metrics reports them.
    tls: for https://; None for plain HTTP.
  """

  def __init__(self):
    self.mode = "json"
    self.is_ready = True
    self.frozen, self.go = threading.Event(), threading.Event()
    self.frozen.set()
    self.go.set()
    self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
    self.gone = threading.Event()
    self.stored: set[str] = set()
    self.load = (0, 0)
    self.status = 200
    self.events = EVENTS
    self.tls: ssl.SSLContext | None = None
    self._server: ThreadingHTTPServer | None = None
    self._port = 0

  def start(self) -> None:
    """Listens, on the same port each time."""
    stub = self

    class Handler(_Handler):
      replica = stub

    self._server = _Server(("127.0.0.1", self._port), Handler)
    self._port = self._server.server_address[1]
    if self.tls is not None:  # the handshake runs on the connection's own thread, with its first read
      self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

  def stop(self) -> None:
    """Stops listening, so that connections are refused."""
    if self._server is not None:
      self._server.shutdown()
      self._server.server_close()
      self._server = None

  @property
  def name(self) -> str:
    return f"{'' if self.tls is None else 'https://'}127.0.0.1:{self._port}"


class _Server(ThreadingHTTPServer):
  allow_reuse_address = True
  daemon_threads = True
  block_on_close = False


class _Handler(BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  replica: ReplicaStub

  def do_GET(self) -> None:
    self.replica.frozen.wait(60)
    if self.path == "/ready":
      self._answer(200 if self.replica.is_ready else 503, b"{}")
    elif self.path == "/metrics":
      waiting, running = self.replica.load
      page = f"# HELP x\nsluice_requests_waiting {waiting}\nsluice_requests_running {running}\n"
      self._answer(200, f"{page}sluice_kv_cache_usage_ratio 0.25\n".encode())
    else:
      self._serve(b"")

  def do_POST(self) -> None:
    self.replica.frozen.wait(60)
    self._serve(self._read_body())

  do_DELETE = do_POST

  def _read_body(self) -> bytes:
    if self.headers.get("transfer-encoding") != "chunked":
      return self.rfile.read(int(self.headers.get("content-length", 0)))
    body = b""
    while size := int(self.rfile.readline(), 16):
      body += self.rfile.read(size)
      self.rfile.readline()
    self.rfile.readline()
    return body

  def _serve(self, body: bytes) -> None:
    stub = self.replica
    stub.seen.append((self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body))
    mode = stub.mode
    if self.path.startswith("/v1/responses/") and self.path.split("/")[3] not in stub.stored:
      self._answer(404, b'{"error": {"message": "no such response"}}')
    elif mode == "json":
      answer = {"id": next(iter(stub.stored), "x"), "from": stub.name, "size": len(body)}
      self._answer(stub.status, json.dumps(answer).encode(), {"connection": "x-hop", "x-hop": "1", "x-kept": "2"})
    elif mode == "503":
      self._answer(503, b'{"error": {"code": "starting"}}', {"retry-after": "7"})
    elif mode == "proxy":
      self._answer(500, b"Internal Server Error", {"content-type": "text/plain; charset=utf-8"})
    elif mode == "close":
      self._reset()
    elif mode == "break_json":
      self.send_response(200)
      self.send_header("content-length", "100")
      self.end_headers()
      self.wfile.write(b"{")
      self._reset()
    elif mode == "hang":
      stub.go.wait(60)
    else:
      self._stream(mode)

  def _stream(self, mode: str) -> None:
    self.send_response(200)
    self.send_header("content-type", "text/event-stream; charset=utf-8")
    self.send_header("transfer-encoding", "chunked")
    self.end_headers()
    events = self.replica.events
    self._chunk(events[0])
    self._wait_for_go()
    if mode in ("break", "end"):
      self._chunk(events[1][:9])
      if mode == "break":
        self._reset()
      self.close_connection = True
      return
    for event in events[1:]:
      self._chunk(event)
    self._chunk(b"")

  def _wait_for_go(self) -> None:
    self.connection.settimeout(0.01)
    while not self.replica.go.is_set() or not self.replica.frozen.is_set():
      with contextlib.suppress(TimeoutError):
        if not self.connection.recv(1):
          self.replica.gone.set()
          raise ConnectionResetError
    self.connection.settimeout(None)

  def _chunk(self, data: bytes) -> None:
    self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
    self.wfile.flush()

  def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    self.send_response(status)
    for name, value in {
      "content-type": "application/json",
      "content-length": str(len(body)),
      **(headers or {}),
    }.items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(body)

  def _reset(self) -> None:
    """Ends the connection as the system does for a process that is killed."""
    self.wfile.flush()
    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    self.close_connection = True
    self.connection.close()

  def handle(self) -> None:
    with contextlib.suppress(OSError, ValueError):
      super().handle()

  def finish(self) -> None:
    with contextlib.suppress(OSError, ValueError):
      super().finish()

  def log_message(self, *_: object) -> None:
    pass


@contextlib.contextmanager
def running_stubs(count: int) -> Iterator[list[ReplicaStub]]:
  """Runs replicas until the block ends."""
  stubs = [ReplicaStub() for _ in range(count)]
  try:
    for stub in stubs:
      stub.start()
    yield stubs
  finally:
    for stub in stubs:
      stub.go.set()
      stub.frozen.set()
      stub.stop()
