"""Carries frames between the engine's process and its front ends, over a Unix socket. Knows none of the messages.

A frame is its length (four bytes, little-endian) and msgpack of a serial number and a message. The sender of a question
chooses its number, and the answer carries the same number; every other message carries 0. Neither side trusts the
other: a frame that is too long, or a message without a handler, closes the link and with it the server. The two sockets
are an unnamed pair, so no other process can connect, and a process that dies leaves nothing behind.
"""

import asyncio
from collections.abc import Callable, Mapping
import contextlib
import inspect
import itertools
import logging
import socket
import threading
from typing import Any, Union

import msgspec

from engine.errors import EngineError
from server import errors
from server.ipc.messages import LinkMessage

MAX_FRAME_BYTES = 64 << 20
# Limit of bytes that wait for the other side to read.
MAX_BACKLOG_BYTES = 256 << 20
_HEADER_BYTES = 4
_READ_BYTES = 1 << 20
_BUFFER_BYTES = 4 << 20

_encode = msgspec.msgpack.encode
_log = logging.getLogger(__name__)


class FrameError(Exception):
  """The other side does not speak this protocol, or has closed the link."""


class Answer(LinkMessage):
  """The answer to the question of the same number."""

  value: msgspec.Raw


class Refusal(LinkMessage):
  """An EngineError in place of an answer."""

  reason: str
  problem: str
  field: str
  retry_after_s: float | None


def pack_frame(serial: int, message: LinkMessage) -> bytes:
  """Returns a frame with its header. Raises FrameError if it is too long."""
  body = _encode((serial, message))
  if len(body) > MAX_FRAME_BYTES:
    raise FrameError(f"a frame of {type(message).__name__} has {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
  return len(body).to_bytes(_HEADER_BYTES, "little") + body


class Link:
  """One end of the socket. Belongs to an event loop, except `tell_peer`, which any thread may call.

  Attributes:
    is_open: whether messages can pass.
  """

  def __init__(
    self,
    sock: socket.socket,
    handlers: Mapping[type[LinkMessage], Callable[[Any], Any]],
    closed: Callable[[str], None],
  ):
    """Must be made inside the running loop.

    Args:
      sock: a connected socket, which the link owns from now on.
      handlers: by type of message. The handler of a question returns the answer or an awaitable of it. If it raises an
        EngineError, the other side gets that.
      closed: called once, with the reason, when the other side has closed the link or sent a bad frame.
    """
    self._socket = sock
    self._handlers = handlers
    self._decoder = msgspec.msgpack.Decoder(tuple[int, Union[(*handlers, Answer, Refusal)]])
    self._on_closed = closed
    self._loop = asyncio.get_running_loop()
    self._lock = threading.Lock()
    # Reused: a new object of this size would be mapped, faulted in and unmapped at every read.
    self._arrived = memoryview(bytearray(_READ_BYTES))
    self._unread = bytearray()
    self._unsent = bytearray()
    self.is_open = True
    self._serials = itertools.count(1)
    self._waiting: dict[int, tuple[asyncio.Future[Any], type]] = {}
    self._tasks: set[asyncio.Task] = set()
    sock.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
      with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    self._loop.add_reader(sock, self._read_socket)

  def tell_peer(self, message: LinkMessage, serial: int = 0) -> None:
    """Sends a message, or buffers it until the other side reads; never waits. A closed link drops messages."""
    frame = pack_frame(serial, message)
    with self._lock:
      if not self.is_open:
        return
      sent = 0
      if not self._unsent:
        try:
          sent = self._socket.send(frame)
        except BlockingIOError:
          pass
        except OSError:
          return  # the reader finds out
        if sent == len(frame):
          return
        self._post(self._want_to_write)
      self._unsent += memoryview(frame)[sent:]
      too_much = len(self._unsent) > MAX_BACKLOG_BYTES
    if too_much:
      self._post(self.close, f"the other side has left {MAX_BACKLOG_BYTES} bytes unread")

  async def ask_peer(self, question: LinkMessage, answer_type: Any) -> Any:
    """Sends a question and returns its answer.

    Raises:
      EngineError: the other side's error.
      Unavailable: the link has closed; whether the question took effect is unknown.
    """
    if not self.is_open:
      raise _gone()
    serial, answer = next(self._serials), self._loop.create_future()
    self._waiting[serial] = answer, answer_type
    try:
      self.tell_peer(question, serial)
      return await answer
    finally:
      del self._waiting[serial]

  def close(self, reason: str = "") -> None:
    """Closes the link, and calls `closed` if there is a reason."""
    with self._lock:
      if not self.is_open:
        return
      self.is_open = False
    self._loop.remove_reader(self._socket)
    self._loop.remove_writer(self._socket)
    self._socket.close()
    for answer, _ in self._waiting.values():
      if not answer.done():
        answer.set_exception(_gone())
    for task in self._tasks:
      task.cancel()
    if reason:
      self._on_closed(reason)

  def _post(self, work: Callable[..., object], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
      self._loop.call_soon_threadsafe(work, *arguments)

  def _want_to_write(self) -> None:
    if self.is_open:
      self._loop.add_writer(self._socket, self._write_socket)

  def _write_socket(self) -> None:
    with self._lock:
      try:
        sent = self._socket.send(self._unsent)
      except BlockingIOError:
        return
      except OSError:
        sent = len(self._unsent)  # the reader finds out
      del self._unsent[:sent]
      if not self._unsent:
        self._loop.remove_writer(self._socket)

  def _read_socket(self) -> None:
    try:
      size = self._socket.recv_into(self._arrived)
    except BlockingIOError:
      return
    except OSError as error:
      self.close(f"reading failed: {error.strerror}")
      return
    if not size:
      self.close("the other side has gone")
      return
    self._unread += self._arrived[:size]
    try:
      self._handle_frames()
    except (FrameError, msgspec.DecodeError) as error:
      self.close(f"a frame was not understood: {error}")
    except Exception as error:
      _log.critical("a frame was not understood", exc_info=error)
      self.close(f"a frame was not understood: {type(error).__name__}")

  def _handle_frames(self) -> None:
    unread, at = self._unread, 0
    while len(unread) - at >= _HEADER_BYTES and self.is_open:
      start = at + _HEADER_BYTES
      size = int.from_bytes(unread[at:start], "little")
      if size > MAX_FRAME_BYTES:
        raise FrameError(f"{size} bytes were announced, the limit is {MAX_FRAME_BYTES}")
      if len(unread) < start + size:
        break
      at = start + size
      self._handle_message(*self._decoder.decode(unread[start:at]))
    del unread[:at]

  def _handle_message(self, serial: int, message: Any) -> None:
    if isinstance(message, Answer | Refusal):
      answer, answer_type = self._waiting.get(serial, (None, None))
      if answer is None or answer.done():
        return  # the caller has left
      if isinstance(message, Answer):
        answer.set_result(msgspec.msgpack.decode(message.value, type=answer_type))
      else:
        answer.set_exception(decode_error(message))
    elif not serial:
      self._handlers[type(message)](message)
    else:
      # Eager, so that later messages find the question handled up to its first await.
      task = asyncio.Task(self._answer_question(serial, message), loop=self._loop, eager_start=True)
      if not task.done():
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

  async def _answer_question(self, serial: int, question: LinkMessage) -> None:
    try:
      value = self._handlers[type(question)](question)
      if inspect.isawaitable(value):
        value = await value
      answer = Answer(msgspec.Raw(_encode(value)))
    except EngineError as error:
      answer = encode_error(error)
    except Exception as error:  # an unexpected error, which concerns this question alone
      answer = encode_error(errors.log_incident(error, "a question was not answered"))
    self.tell_peer(answer, serial)


def _gone() -> EngineError:
  return errors.EngineDead("the engine has failed; retry on another server")


def _all_kinds(kind: type[EngineError]) -> dict[str, type[EngineError]]:
  found = {kind.reason: kind}
  for special in kind.__subclasses__():
    found.update(_all_kinds(special))
  return found


def encode_error(error: EngineError) -> Refusal:
  return Refusal(error.reason, error.problem, error.field, getattr(error, "retry_after_s", None))


def decode_error(refusal: Refusal) -> EngineError:
  kind = _all_kinds(EngineError).get(refusal.reason, EngineError)
  error = kind.__new__(kind)
  EngineError.__init__(error, refusal.problem, field=refusal.field)  # not its own, which may add to the text
  if refusal.retry_after_s is not None:
    error.retry_after_s = refusal.retry_after_s  # pyright: ignore[reportAttributeAccessIssue]
  return error
