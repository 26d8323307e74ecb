"""Runs queued batches below interactive requests: checks their files, answers their lines, writes their outputs.

A line goes through the endpoint's own code, without a socket. It starts while interactive requests leave slots free;
one line runs even if they do not, so that batches cannot starve. The engine's policy orders what waits after that, by
`BATCH_PRIORITY`. While the disk refuses writes, batches pause. A stop ends running lines, which the next start repeats.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
import contextlib
import logging
import secrets
import sqlite3

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from engine.errors import Overloaded, Unavailable
from server import errors
from server.generation.serving_state import Backend
from server.http.batches import batch_lines
from server.http.batches.batch_store import UNFINISHED, BatchStore, LineResult, PendingLine, wall_time
from server.http.error_responses import OPENAI_ERRORS, make_error_answer
from server.telemetry import tracing

type Endpoint = Callable[[Request], Awaitable[Response]]

# Between looks for a free slot, attempts of a full queue, and attempts of a disk or a server that refuses.
_SLOT_POLL_S = 0.02
_QUEUE_RETRY_S = 0.2
_DISK_RETRY_S = 2.0
# A line whose time in the queue passed runs again; one that always takes longer than --request_timeout_s fails.
_MAX_TIMEOUTS = 3
_CHATS = ("/v1/chat/completions", "/v1/responses")

_log = logging.getLogger(__name__)


class BatchRunner:
  """The work on all unfinished batches, a task each. Belongs to the server's event loop."""

  def __init__(
    self, store: BatchStore, endpoints: Mapping[str, Endpoint], *, max_line_bytes: int, max_lines_at_once: int
  ):
    """Args:
    store: has the batches.
    endpoints: by path.
    max_line_bytes: longer lines of an input file are bad.
    max_lines_at_once: limit of running lines; 0: as many as leave an eighth of the engine's slots free.
    """
    self._store = store
    self._endpoints = endpoints
    self._max_line_bytes = max_line_bytes
    self._max_lines_at_once = max_lines_at_once
    self._backend: Backend | None = None
    self._num_running = 0
    self._freed = asyncio.Event()
    self._slot_lock = asyncio.Lock()
    self._tenant_locks: dict[str, asyncio.Lock] = {}
    self._work: dict[int, asyncio.Task[None]] = {}
    self._cancelled: dict[int, asyncio.Event] = {}
    self._results = _ResultWriter(store)
    self._stopped = False

  async def start_running(self, backend: Backend) -> None:
    """Goes on with the batches of the store."""
    self._backend = backend
    for seq in await self._store.run(self._store.leftover_batches):
      self._start_task(seq, self._drop_lines)
    for batch in await self._store.run(self._store.unfinished_batches):
      self.start_batch(batch)

  def start_batch(self, batch: sqlite3.Row) -> None:
    """Begins work on a batch; without a backend the start will do so."""
    seq = batch["seq"]
    if self._backend is not None and not self._stopped and seq not in self._work:
      self._cancelled[seq] = asyncio.Event()
      self._start_task(seq, self._finish_batch)

  def cancel_batch(self, batch: sqlite3.Row) -> None:
    """Ends a batch's running lines; the store knows already that it is cancelled."""
    if (event := self._cancelled.get(batch["seq"])) is not None:
      event.set()

  async def stop_running(self) -> None:
    """Ends all work, at once; what has no result will run after the next start."""
    self._stopped = True
    tasks = [*self._work.values()]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self._results.stop_writing()

  def _start_task(self, seq: int, work: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
      try:
        await work(seq)
      except errors.Draining:
        pass
      except Exception as error:
        errors.log_incident(error, "a batch stopped; it goes on after the next start")
      finally:
        del self._work[seq]
        self._cancelled.pop(seq, None)

    self._work[seq] = asyncio.create_task(run())

  async def _finish_batch(self, seq: int) -> None:
    """Brings a batch from any state to its end."""
    cancelled = self._cancelled[seq]
    batch = await self._patiently(lambda: self._store.run(self._store.batch_of, seq))
    if batch["status"] == "validating":
      batch = await self._validate(batch, cancelled)
    if batch["status"] == "in_progress":
      await self._answer_lines(batch, cancelled)
      batch = await self._patiently(lambda: self._store.run(self._store.batch_of, seq))
    if batch["status"] == "cancelling" and batch["in_progress_at"] is None:
      await self._drop_lines(seq)  # a part of the file, of which nothing ran
    ids = (self._store.make_file_id(), self._store.make_file_id())
    await self._patiently(lambda: self._write_outputs(seq, ids))
    await self._drop_lines(seq)

  async def _validate(self, batch: sqlite3.Row, cancelled: asyncio.Event) -> sqlite3.Row:
    store, seq = self._store, batch["seq"]
    await self._drop_lines(seq)  # of a validation that a crash ended
    offset, number, at_end = 0, 1, False
    while not at_end and not cancelled.is_set():
      at, of_line = offset, number
      try:
        read = await self._patiently(lambda: store.run(store.read_input, batch, self._max_line_bytes, at, of_line))  # noqa: B023
      except FileNotFoundError:
        await self._patiently(lambda: store.run(store.fail_batch, seq, "input_file_lost", "the input file is gone"))
        break
      offset, number, at_end = read.offset, read.number, read.at_end
    if at_end and not cancelled.is_set():
      return await self._patiently(lambda: store.run(store.end_validation, seq))
    return await self._patiently(lambda: store.run(store.batch_of, seq))

  async def _answer_lines(self, batch: sqlite3.Row, cancelled: asyncio.Event) -> None:
    """Returns when each line has a result, or when the batch is cancelled or has expired."""
    answering = asyncio.create_task(self._answer_each_line(batch))
    cancelling = asyncio.create_task(cancelled.wait())
    try:
      time_left_s = max(0, batch["expires_at"] - wall_time())
      await asyncio.wait((answering, cancelling), timeout=time_left_s, return_when=asyncio.FIRST_COMPLETED)
      ending = "completed" if answering.done() else "expired"
    finally:
      for task in (answering, cancelling):
        task.cancel()
      await asyncio.gather(answering, cancelling, return_exceptions=True)
    if not answering.cancelled() and (error := answering.exception()) is not None:
      raise error
    if not cancelled.is_set():
      await self._patiently(lambda: self._store.run(self._store.begin_ending, batch["seq"], ending))

  async def _answer_each_line(self, batch: sqlite3.Row) -> None:
    store, after = self._store, 0
    lock = self._tenant_locks.setdefault(batch["tenant"], asyncio.Lock())
    async with asyncio.TaskGroup() as group:
      while True:
        last = after
        lines = await self._patiently(lambda: store.run(store.pending_lines, batch, last))  # noqa: B023
        if not lines:
          return
        for line in lines:
          async with lock:  # one waiter a tenant, so tenants take turns
            await self._take_slot()
          group.create_task(self._answer_line(batch, line)).add_done_callback(self._free_slot)
        after = lines[-1].number

  async def _take_slot(self) -> None:
    assert self._backend is not None, "start_running() comes first"
    most = self._backend.most_background
    async with self._slot_lock:  # first come, first served
      await asyncio.sleep(0)  # a line a turn of the loop: a flood of bad ones must not keep others waiting
      while self._num_running and (
        self._num_running >= (self._max_lines_at_once or most) or len(self._backend.generations) >= most
      ):
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(_SLOT_POLL_S):  # other requests end without a word here
            await self._freed.wait()
      self._num_running += 1

  def _free_slot(self, _: asyncio.Task[None]) -> None:
    self._num_running -= 1
    self._freed.set()

  async def _answer_line(self, batch: sqlite3.Row, line: PendingLine) -> None:
    """Runs a line until it has a response, and stores that."""
    num_timeouts = 0
    while True:
      request_id = f"req-{secrets.token_hex(16)}"
      request = None
      try:
        request = _make_request(batch, batch_lines.make_request_body(line.raw), request_id)
        response = await self._endpoints[batch["endpoint"]](request)
        status, body = response.status_code, bytes(response.body)
        break
      except (Overloaded, Unavailable, errors.EngineFailed) as error:
        # Temporary, or the end of this process: a line never fails for the state of the server.
        await asyncio.sleep(_QUEUE_RETRY_S if isinstance(error, Overloaded) else _DISK_RETRY_S)
      except Exception as error:
        num_timeouts += isinstance(error, errors.DeadlineExceeded)
        if not isinstance(error, errors.DeadlineExceeded) or num_timeouts == _MAX_TIMEOUTS:
          said = make_error_answer(error, request.state.field_names if request is not None else {})
          status, body = said.status, batch_lines.encode_body(said.body)
          break
    text = batch_lines.write_answer(line.custom_id, status, request_id, body)
    result = LineResult(batch["seq"], line.number, status != 200, text)
    await self._patiently(lambda: self._results.write_result(result))

  async def _write_outputs(self, seq: int, ids: tuple[str, str]) -> None:
    """Writes both files and ends the batch; a repetition writes them anew."""
    store = self._store
    batch = await store.run(store.batch_of, seq)
    if batch["status"] not in UNFINISHED:  # an attempt did it, and failed later
      return
    after: int | None = 0
    while after is not None:
      after = await store.run(store.write_outputs, batch, ids, after)
    await store.run(store.end_batch, batch, ids)

  async def _drop_lines(self, seq: int) -> None:
    while await self._patiently(lambda: self._store.run(self._store.drop_lines, seq)):
      pass

  async def _patiently[T](self, work: Callable[[], Awaitable[T]]) -> T:
    """Repeats work until the disk takes it."""
    paused = False
    while True:
      try:
        result = await work()
      except FileNotFoundError:
        raise
      except (OSError, sqlite3.OperationalError) as error:
        if not paused:
          _log.error("batches pause, since the disk of --batch_dir refuses: %s; free space there", error)
        paused = True
        await asyncio.sleep(_DISK_RETRY_S)
        continue
      if paused:
        _log.info("batches go on")
      return result


class _ResultWriter:
  """Stores results, those that come during one transaction together in the next."""

  def __init__(self, store: BatchStore):
    self._store = store
    self._waiting: list[tuple[LineResult, asyncio.Future[None]]] = []
    self._writing: asyncio.Task[None] | None = None

  async def write_result(self, result: LineResult) -> None:
    """Returns when the result is on disk. Raises OSError, sqlite3.Error: the disk refuses."""
    done = asyncio.get_running_loop().create_future()
    self._waiting.append((result, done))
    if self._writing is None:
      self._writing = asyncio.create_task(self._write_waiting())
    await done

  async def stop_writing(self) -> None:
    """Returns when what waits is on disk."""
    if self._writing is not None:
      await self._writing

  async def _write_waiting(self) -> None:
    while self._waiting:
      taken, self._waiting = self._waiting, []
      error = None
      try:
        await self._store.run(self._store.add_results, [result for result, _ in taken])
      except Exception as caught:  # each waiter raises it
        error = caught
      for _, done in taken:
        if not done.done():
          if error is None:
            done.set_result(None)
          else:
            done.set_exception(error)
    self._writing = None


def _make_request(batch: sqlite3.Row, body: bytes, request_id: str) -> Request:
  """Returns a request as the guard hands it on, whose client never leaves."""
  messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

  async def receive() -> Message:
    if messages:
      return messages.pop()
    await asyncio.Event().wait()
    raise AssertionError("nothing sets this event")

  headers = Headers({"content-type": "application/json"})
  tracing.keep_trace_parent(headers, tracing.CHAT if batch["endpoint"] in _CHATS else tracing.TEXT_COMPLETION)
  state = {
    "tenant": batch["tenant"],
    "notes": {},
    "field_names": {},
    "request_id": request_id,
    "error_form": OPENAI_ERRORS,
    "takes_free_slots": True,
  }
  scope = {
    "type": "http",
    "method": "POST",
    "path": batch["endpoint"],
    "query_string": b"",
    "headers": headers.raw,
    "state": state,
  }
  return Request(scope, receive)
