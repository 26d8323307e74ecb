"""Frames between the engine's process and its front ends, over a Unix socket. Knows no request: kinds and fields only.

A frame is its length (four bytes, little-endian) and one msgpack array: a kind and its fields. Some kinds are asked and
get one answer, under the serial number of whoever asks. Neither side believes the other: a frame that is too long, is
not msgpack, has no known kind or fields of other types than its reader takes closes the link, and with it the server.
The sockets are a pair that only these two processes have: they have no name, so that nobody else can connect and
nothing is left behind, whichever way a process ends.
"""

import asyncio
from collections.abc import Callable, Mapping
import contextlib
import itertools
import logging
import secrets
import socket
import threading
from typing import Any

import msgpack

from engine.errors import EngineError
from server import errors

VERSION = 1
MAX_FRAME_BYTES = 64 << 20
# What may wait for a reader that does not read.
MAX_BACKLOG_BYTES = 256 << 20
_HEADER_BYTES = 4
_READ_BYTES = 1 << 20
_BUFFER_BYTES = 4 << 20

# Kinds. Those of the engine's side, then those of a front end's.
SETTINGS, SERVE, EVENTS, ABORT_NAMES, COUNTS, DRAIN, DIE = range(1, 8)
HELLO, LISTENING, FAILED, SERVING, SUBMIT, ABORT, REPORT, TOTALS, ABORT_ELSEWHERE = range(32, 41)
_ASK, _ANSWER, _REFUSAL = range(64, 67)

_NOT_UNDERSTOOD = (TypeError, ValueError, KeyError, IndexError, AttributeError)

_log = logging.getLogger(__name__)


class WireError(Exception):
  """The other side does not speak this protocol, or has gone."""


def pack(fields: tuple[Any, ...]) -> bytes:
  """A frame with its header. Raises WireError if it is too long."""
  body = msgpack.packb(fields, use_bin_type=True)
  assert body is not None, "as the stubs have it"
  if len(body) > MAX_FRAME_BYTES:
    raise WireError(f"a frame of kind {fields[0]} has {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
  return len(body).to_bytes(_HEADER_BYTES, "little") + body


def unpack(body: bytes | bytearray | memoryview) -> tuple[Any, ...]:
  """Kind and fields, with tuples for arrays. Raises WireError."""
  try:
    frame = msgpack.unpackb(body, raw=False, use_list=False, strict_map_key=True)
  except Exception as error:
    raise WireError(f"a frame of {len(body)} bytes is not msgpack: {type(error).__name__}") from None
  if type(frame) is not tuple or not frame or type(frame[0]) is not int:
    raise WireError("a frame is no array that begins with its kind")
  return frame


class Link:
  """One end of the socket. Belongs to an event loop, but for `tell`, which any thread may call."""

  def __init__(
    self,
    sock: socket.socket,
    *,
    told: Mapping[int, Callable[..., None]],
    asked: Mapping[int, Callable[..., Any]],
    closed: Callable[[str], None],
  ):
    """Must be made inside the running loop.

    Args:
      sock: connected; belongs to this link from now on.
      told: what to do with each kind that wants no answer, given its fields.
      asked: the same for kinds that do; gives the answer or something to await for it. An EngineError travels.
      closed: called once, with the reason, when the other side has gone or is not understood.
    """
    self._socket = sock
    self._told = told
    self._asked = asked
    self._on_closed = closed
    self._loop = asyncio.get_running_loop()
    self._lock = threading.Lock()
    # Of its own and used again: a fresh object of this size would be mapped, faulted in and unmapped at every read.
    self._arrived = memoryview(bytearray(_READ_BYTES))
    self._unread = bytearray()
    self._unsent = bytearray()
    self._is_open = True
    self._serials = itertools.count()
    self._waiting: dict[int, asyncio.Future[Any]] = {}
    self._tasks: set[asyncio.Task] = set()
    sock.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
      with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    self._loop.add_reader(sock, self._read)

  @property
  def is_open(self) -> bool:
    return self._is_open

  def tell(self, kind: int, *fields: Any) -> None:
    """Sends a frame, or keeps it until the other side reads; it never waits. What a closed link is told is lost."""
    frame = pack((kind, *fields))
    with self._lock:
      if not self._is_open:
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

  async def ask(self, kind: int, *fields: Any) -> Any:
    """Sends a frame and returns its answer.

    Raises:
      EngineError: the other side's.
      Unavailable: the link has closed, and nobody knows what came of it.
    """
    serial = next(self._serials)
    answer = self._waiting[serial] = self._loop.create_future()
    if self._is_open:
      self.tell(_ASK, serial, kind, *fields)
    else:
      answer.set_exception(_gone())
    try:
      return await answer
    finally:
      self._waiting.pop(serial, None)

  def close(self, reason: str = "") -> None:
    """Ends the link. With a reason, `closed` hears of it."""
    with self._lock:
      if not self._is_open:
        return
      self._is_open = False
    self._loop.remove_reader(self._socket)
    self._loop.remove_writer(self._socket)
    self._socket.close()
    for answer in self._waiting.values():
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
    if self._is_open:
      self._loop.add_writer(self._socket, self._write)

  def _write(self) -> None:
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

  def _read(self) -> None:
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
      self._take_frames()
    except WireError as error:
      self.close(str(error))
    except _NOT_UNDERSTOOD as error:
      _log.critical("a frame was not understood", exc_info=error)
      self.close(f"a frame was not understood: {type(error).__name__}")

  def _take_frames(self) -> None:
    unread, at = self._unread, 0
    while len(unread) - at >= _HEADER_BYTES and self._is_open:
      start = at + _HEADER_BYTES
      size = int.from_bytes(unread[at:start], "little")
      if size > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {size} bytes was announced, the limit is {MAX_FRAME_BYTES}")
      if len(unread) < start + size:
        break
      at = start + size
      self._take(unpack(unread[start:at]))
    del unread[:at]

  def _take(self, frame: tuple[Any, ...]) -> None:
    kind = frame[0]
    handler = self._told.get(kind)
    if handler is not None:
      handler(*frame[1:])
    elif kind == _ASK:
      _, serial, asked, *fields = frame
      if asked not in self._asked or type(serial) is not int:
        raise WireError(f"a question of kind {asked!r:.20} is not known")
      self._answer(serial, self._asked[asked], fields)
    elif kind in (_ANSWER, _REFUSAL):
      _, serial, *fields = frame
      waiting = self._waiting.get(serial)
      if waiting is not None and not waiting.done():  # whoever asked may have left
        if kind == _ANSWER:
          waiting.set_result(fields[0])
        else:
          waiting.set_exception(error_from(fields))
    else:
      raise WireError(f"a frame of kind {kind} is not known")

  def _answer(self, serial: int, handler: Callable[..., Any], fields: list[Any]) -> None:
    try:
      answer = handler(*fields)
    except EngineError as error:
      self.tell(_REFUSAL, serial, *plain_error(error))
      return
    except _NOT_UNDERSTOOD:
      raise
    except Exception as error:  # of ours, but about this question alone
      incident = secrets.token_hex(4)
      _log.error("incident %s: a question was not answered", incident, exc_info=error)
      failed = errors.InternalError(f"internal error, incident {incident} in the server's log")
      self.tell(_REFUSAL, serial, *plain_error(failed))
      return
    if not asyncio.iscoroutine(answer):
      self.tell(_ANSWER, serial, answer)
      return

    async def wait() -> None:
      try:
        self.tell(_ANSWER, serial, await answer)
      except EngineError as error:
        self.tell(_REFUSAL, serial, *plain_error(error))
      except Exception as error:
        _log.critical("a question was not answered", exc_info=error)
        self.close(f"a question was not answered: {type(error).__name__}")

    task = self._loop.create_task(wait())
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)


def _gone() -> EngineError:
  return errors.EngineDead("the engine has failed; send the request again, to another server")


def _all_kinds(kind: type[EngineError]) -> dict[str, type[EngineError]]:
  found = {kind.reason: kind}
  for special in kind.__subclasses__():
    found.update(_all_kinds(special))
  return found


def plain_error(error: EngineError) -> tuple[str, str, float | None]:
  """Its reason, its message, and when to try again."""
  return error.reason, str(error), getattr(error, "retry_after_s", None)


def error_from(fields: Any) -> EngineError:
  """The inverse."""
  reason, message, retry_after_s = fields
  error = _all_kinds(EngineError).get(reason, EngineError)(str(message))
  if retry_after_s is not None:
    error.retry_after_s = float(retry_after_s)  # pyright: ignore[reportAttributeAccessIssue]
  return error
