"""Carries authenticated frames over one TCP connection between two hosts. Knows the meaning of none.

A frame is its body's length, its kind, a serial number, the body, and an HMAC-SHA256 over all of these with a key of
this connection and direction. So nobody without the cluster's secret can send, change, drop, repeat or reorder frames
unnoticed. Frames are not encrypted. Nothing in a frame is ever executed, and a length is checked before it is read.
"""

import enum
import hmac
import socket
import struct
import threading
import time

MAX_FRAME_BYTES = 64 << 20
_HEAD = struct.Struct("<IBQ")  # body's length, kind, serial number
MAC_BYTES = 32


class HostLost(Exception):
  """Another host is gone, hangs, or sent what no host of this cluster sends. Ends the whole cluster."""


class Kind(enum.IntEnum):
  """What a frame holds."""

  FACTS = 1  # a follower's facts, JSON
  VERDICT = 2  # the leader's: empty, or why the cluster does not start
  BLOCKS = 3  # a number of KV blocks, JSON
  READY = 4  # a digest of what a host has built, JSON
  GO = 5  # empty: steps follow
  STEP = 6  # a Batch; see step_codec
  REPEAT = 7  # a Batch that repeats the one before it
  BYE = 8  # empty: the leader has drained
  PULSE = 9  # JSON; see pulse
  LEAVE = 10  # empty: a follower has a SIGTERM
  FAULT = 11  # why the sender ends, UTF-8


class FrameChannel:
  """One end of a connection. One thread may receive; any thread may send."""

  def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes, peer: str):
    """Args:
    sock: connected, and owned by the channel from now on.
    send_key, receive_key: keys of the two directions.
    peer: the other host's name in messages, such as "host 1".
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._socket = sock
    self._send_key, self._receive_key = send_key, receive_key
    self.peer = peer
    self._lock = threading.Lock()
    self._num_sent = self._num_received = 0

  def fileno(self) -> int:
    """The socket's descriptor, for select."""
    return self._socket.fileno()

  def set_timeout(self, seconds: float | None) -> None:
    """Sets the longest wait for the other side's next bytes, in either direction; None: for ever."""
    self._socket.settimeout(seconds)

  def send_frame(self, kind: Kind, body: bytes = b"") -> None:
    """Sends a frame. Raises HostLost if the other side is gone or takes nothing within the timeout."""
    if len(body) > MAX_FRAME_BYTES:
      raise HostLost(f"a frame of {len(body)} bytes for {self.peer} exceeds the limit of {MAX_FRAME_BYTES}")
    with self._lock:
      text = _HEAD.pack(len(body), kind, self._num_sent) + body
      self._num_sent += 1
      try:
        self._socket.sendall(text + hmac.digest(self._send_key, text, "sha256"))
      except OSError as error:
        raise HostLost(f"{self.peer} is gone ({error.strerror or error})") from None

  def receive_frame(self) -> tuple[Kind, bytes]:
    """Waits for the next frame. Raises HostLost if it does not come within the timeout, or is not authentic."""
    head = self._read_bytes(_HEAD.size)
    length, kind, serial = _HEAD.unpack(head)
    if length > MAX_FRAME_BYTES:
      raise HostLost(
        f"a frame of {length} bytes from {self.peer} exceeds the limit of {MAX_FRAME_BYTES}; it is corrupt"
      )
    rest = self._read_bytes(length + MAC_BYTES)
    body = rest[:length]
    if not hmac.compare_digest(hmac.digest(self._receive_key, head + body, "sha256"), rest[length:]):
      raise HostLost(
        f"frame {self._num_received} from {self.peer} does not match its HMAC: something on the way changed it"
      )
    if serial != self._num_received:
      raise HostLost(f"frame {serial} from {self.peer} came instead of frame {self._num_received}")
    self._num_received += 1
    try:
      return Kind(kind), body
    except ValueError:
      raise HostLost(f"{self.peer} sent a frame of the unknown kind {kind}") from None

  def expect_frame(self, wanted: Kind) -> bytes:
    """Waits for the next frame and returns its body. Raises HostLost if it is of another kind."""
    kind, body = self.receive_frame()
    if kind is not wanted:
      raise HostLost(f"{self.peer} sent {kind.name}, not {wanted.name}")
    return body

  def wait_closed(self, limit_s: float) -> None:
    """Waits until the other side closes, at most `limit_s`; drops frames."""
    deadline = time.monotonic() + limit_s
    try:
      while (left := deadline - time.monotonic()) > 0:
        self.set_timeout(left)
        self.receive_frame()
    except HostLost:
      pass

  def close(self) -> None:
    """Closes the connection."""
    self._socket.close()

  def _read_bytes(self, count: int) -> bytes:
    found = bytearray(count)
    view = memoryview(found)
    while view:
      try:
        size = self._socket.recv_into(view)
      except TimeoutError:
        raise HostLost(f"{self.peer} sent nothing for {self._socket.gettimeout():g} s") from None
      except OSError as error:
        raise HostLost(f"{self.peer} is gone ({error.strerror or error})") from None
      if not size:
        raise HostLost(f"{self.peer} has closed the connection")
      view = view[size:]
    return bytes(found)
