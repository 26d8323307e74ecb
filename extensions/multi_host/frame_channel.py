"""Carries authenticated frames over one TCP connection between two hosts. Knows the meaning of none.

A frame is its body's length, its kind, a serial number, the body, and a MAC over all of these: BLAKE2b with a key of
this connection and direction (RFC 7693). So nobody without the cluster's secret can send, change, drop, repeat or
reorder frames unnoticed. Frames are not encrypted. Nothing in a frame is ever executed, and a length is checked before
it is read.
"""

import contextlib
import enum
import hashlib
import hmac
import socket
import struct
import threading
import time

MAX_FRAME_BYTES = 64 << 20
_HEAD = struct.Struct("<IBQ")  # body's length, kind, serial number
MAC_BYTES = 32
_BUFFER_BYTES = 1 << 16


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


_KINDS = {int(kind): kind for kind in Kind}


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
    # Copied for each frame. Right after a step, when a CPU's caches are cold, that takes 11 us, and HMAC-SHA256 36.
    self._send_mac, self._receive_mac = (
      hashlib.blake2b(key=key, digest_size=MAC_BYTES) for key in (send_key, receive_key)
    )
    self.peer = peer
    self._lock = threading.Lock()
    self._num_sent = self._num_received = 0
    self._buffer = bytearray(_BUFFER_BYTES)  # what has arrived: bytes _first to _last
    self._view = memoryview(self._buffer)
    self._first = self._last = 0

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
      mac = self._send_mac.copy()
      mac.update(text)
      try:
        self._socket.sendall(text + mac.digest())
      except OSError as error:
        raise HostLost(f"{self.peer} is gone ({error.strerror or error})") from None

  def poll_socket(self, limit_s: float) -> None:
    """Reads what arrives without sleeping, at most for `limit_s`, and returns when something has.

    A CPU that sleeps takes tens of microseconds to wake. The channel must have no timeout. Raises HostLost.
    """
    self._move_to_front()
    deadline = time.monotonic() + limit_s
    while not self.has_frame and time.monotonic() < deadline:
      with contextlib.suppress(BlockingIOError):
        self._last += self._receive_into(self._view[self._last :], socket.MSG_DONTWAIT)

  def receive_frame(self) -> tuple[Kind, bytes]:
    """Waits for the next frame. Raises HostLost if it does not come within the timeout, or is not authentic."""
    self._read_ahead(_HEAD.size)
    length, kind, serial = _HEAD.unpack_from(self._buffer, self._first)
    if length > MAX_FRAME_BYTES:
      raise HostLost(
        f"a frame of {length} bytes from {self.peer} exceeds the limit of {MAX_FRAME_BYTES}; it is corrupt"
      )
    frame = self._take_bytes(_HEAD.size + length + MAC_BYTES)
    mac = self._receive_mac.copy()
    mac.update(frame[:-MAC_BYTES])
    if not hmac.compare_digest(mac.digest(), frame[-MAC_BYTES:]):
      raise HostLost(
        f"frame {self._num_received} from {self.peer} does not match its MAC: something on the way changed it"
      )
    if serial != self._num_received:
      raise HostLost(f"frame {serial} from {self.peer} came instead of frame {self._num_received}")
    self._num_received += 1
    if kind not in _KINDS:
      raise HostLost(f"{self.peer} sent a frame of the unknown kind {kind}")
    return _KINDS[kind], bytes(frame[_HEAD.size : -MAC_BYTES])

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

  @property
  def has_frame(self) -> bool:
    """Whether bytes have arrived that select no longer shows."""
    return self._last > self._first

  def _take_bytes(self, count: int) -> memoryview:
    """Returns the next bytes, which the next call of this class may overwrite."""
    if count > _BUFFER_BYTES:
      return self._take_many(count)
    self._read_ahead(count)
    start, self._first = self._first, self._first + count
    return self._view[start : self._first]

  def _read_ahead(self, count: int) -> None:
    """Waits until the buffer holds `count` bytes; reads more if they are there: a small frame takes one system call."""
    while self._last - self._first < count:
      self._move_to_front()
      self._last += self._receive_into(self._view[self._last :])

  def _move_to_front(self) -> None:
    if self._first:
      self._buffer[: self._last - self._first] = self._buffer[self._first : self._last]
      self._first, self._last = 0, self._last - self._first

  def _take_many(self, count: int) -> memoryview:
    found = bytearray(count)
    ready = self._last - self._first
    found[:ready] = self._buffer[self._first : self._last]
    self._first = self._last = 0
    view = memoryview(found)
    while ready < count:
      ready += self._receive_into(view[ready:])
    return view

  def _receive_into(self, view: memoryview, flags: int = 0) -> int:
    try:
      size = self._socket.recv_into(view, 0, flags)
    except BlockingIOError:  # a poll found nothing
      raise
    except TimeoutError:
      raise HostLost(f"{self.peer} sent nothing for {self._socket.gettimeout():g} s") from None
    except OSError as error:
      raise HostLost(f"{self.peer} is gone ({error.strerror or error})") from None
    if not size:
      raise HostLost(f"{self.peer} has closed the connection")
    return size
