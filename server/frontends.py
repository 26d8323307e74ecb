"""The engine's process of a server with several: owns the engine, its front end processes and the public port.

It has the same face as server.host.Host; requests and their events are server.router's. No text, protobuf or HTTP is
touched here.

A front end that dies ends the server, as a crash of the whole would: what runs in it runs in the others, the port's
group is closed, and a supervisor starts all anew from a known state. Its requests are aborted, all others are told.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import logging
import os
import socket
import subprocess
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.recorder import RING_STEPS
from engine.request import TokenEvent
from server import plain, sd_notify, spawn, watchdog, wire
from server.admin import AdminActions
from server.call_log import CallLog
from server.counts import Counts, process_counts
from server.errors import EngineDead, Starting
from server.grpc_server import ReservedPort
from server.host_options import HostOptions
from server.http.listener import listen
from server.invariants import Invariants
from server.lifetime import Lifetime, first_of
from server.port import LocalEngine
from server.proto.admin_pb2 import GetInvariantsResponse
from server.router import Peer, Router
from server.tls import make_certificates
from server.tokenizer import Tokenizer

# Beyond what a front end takes by itself.
_MARGIN_S = 3.0
_HURRIED_S = 1.5
_POLL_S = 0.01
_COUNTS_S = 1.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
  """What front ends need besides HostOptions.

  Attributes:
    model_dir: has the tokenizer, if there is one.
    max_prompt_bytes: longest text that is tokenized.
    otlp_endpoint: as in tracing.Tracer; empty is none.
    log_format: one of logs.FORMATS.
  """

  model_dir: str
  max_prompt_bytes: int = 1 << 20
  otlp_endpoint: str = ""
  log_format: str = "text"


class _FrontEnd(Peer):
  """One of the processes.

  Attributes:
    index, process: which.
    listening, serving: how far it is.
    counts: the latest known.
  """

  def __init__(self, index: int, process: subprocess.Popen):
    super().__init__()
    loop = asyncio.get_running_loop()
    self.index = index
    self.process = process
    self.listening: asyncio.Future[None] = loop.create_future()
    self.serving: asyncio.Future[None] = loop.create_future()
    self.counts = Counts(pids=[process.pid])


class Frontends(Lifetime):
  """All methods but `emit` belong to one event loop, on the main thread.

  Attributes:
    http_port, metrics_port: see Host.
  """

  _parts = "the engine or a front end"

  def __init__(
    self,
    count: int,
    options: HostOptions,
    texts: TextOptions,
    admin: AdminActions | None = None,
    *,
    may_exit: bool = False,
  ):
    """Args:
    count: processes, at least 1.
    options, admin, may_exit: see Host.
    texts: for the front ends.
    """
    options.check()
    if options.enable_channelz:
      raise ConfigError(
        "enable_channelz shows the connections of one process, and frontend_processes makes several; set one of them"
      )
    super().__init__(options, admin, may_exit=may_exit)
    self._count = count
    self._texts = texts
    self._certificates = make_certificates(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    self._calls = CallLog(options.access_log)
    self.http_port = self.metrics_port = -1
    self._reserved: ReservedPort | None = None
    self._front_ends: list[_FrontEnd] = []
    self._all_gone = asyncio.Event()
    self._router = Router()
    self._engine: LocalEngine | None = None
    self._invariants: Invariants | None = None
    self._num_unhandled = 0
    self._is_stopping = False
    self._exit_code = 0

  # Its life, as Host has it.

  async def start(self) -> int:
    """Starts the front ends; returns when all of them listen and answer STARTING. Returns the port.

    Raises:
      ConfigError: an address cannot be bound, or a front end cannot start.
    """
    options = self._options
    watchdog.watch_loop(self._loop, self.fail, self._count_unhandled)
    reserved = self._reserved = ReservedPort(options.host, options.port)
    listening: list[socket.socket | None] = []
    try:
      for flag, port in (("http_port", options.http_port), ("metrics_port", options.metrics_port)):
        listening.append(None if port < 0 else listen(options.http_host or options.host, port, flag))
      self.http_port, self.metrics_port = [-1 if each is None else each.getsockname()[1] for each in listening]
      lent = dataclasses.replace(
        options.share(self._count),
        **{"port": reserved.port, "http_port": self.http_port, "metrics_port": self.metrics_port},
        **{"admin_port": -1, "admin_api_key_file": ""},
      )
      reserved.open()
      for index in range(self._count):
        self._front_ends.append(self._begin(index, listening, lent))
      await self._all(front_end.listening for front_end in self._front_ends)
      reserved.shut()
      if not reserved.is_shut:
        _log.info(
          "port %d is open to other programs of this user that ask to share it; an address in --host shuts it",
          reserved.port,
        )
      await self._start_admin(self._books, self._certificates, self._calls)
    except BaseException:
      await self._end_processes(0.0)
      raise
    finally:
      for each in listening:
        if each is not None:
          each.close()
    return reserved.port

  def _begin(self, index: int, listening: Sequence[socket.socket | None], options: HostOptions) -> _FrontEnd:
    process, socket_ = spawn.spawn(listening)
    front_end = _FrontEnd(index, process)

    def bound(method: Any) -> Any:
      return functools.partial(method, front_end)

    front_end.link = wire.Link(
      socket_,
      told={
        wire.HELLO: bound(self._hello),
        wire.LISTENING: bound(self._listening),
        wire.FAILED: bound(self._failed),
        wire.SERVING: bound(self._serving),
        wire.ABORT: bound(self._router.abort),
      },
      asked={
        wire.SUBMIT: bound(self._router.submit),
        wire.REPORT: bound(self._report),
        wire.TOTALS: bound(self._totals),
        wire.ABORT_ELSEWHERE: bound(self._router.abort_elsewhere),
      },
      closed=bound(self._lost),
    )
    texts = self._texts
    front_end.link.tell(
      wire.SETTINGS,
      wire.VERSION,
      dataclasses.asdict(options),
      *(texts.model_dir, texts.max_prompt_bytes, texts.otlp_endpoint, texts.log_format),
    )
    return front_end

  async def _all(self, futures: Any) -> None:
    """Waits for a step of all front ends; raises what one of them failed with."""
    ended = asyncio.ensure_future(self._engine_ended.wait())
    whole = asyncio.gather(*futures)
    await asyncio.wait((ended, whole), return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if whole.done():
      whole.result()
    else:
      whole.cancel()

  @property
  def invariants(self) -> Invariants | None:
    """See Host."""
    return self._invariants

  def _num_live(self) -> int:
    return self._router.num_live

  def emit(self, events: list[TokenEvent]) -> None:
    """The engine's way out. On the engine's thread."""
    self._router.emit(events)

  async def serve(
    self, engine: LocalEngine, *, model: str, tokenizer: Tokenizer | None, load_s: float, warmup_s: float
  ) -> None:
    """Starts the engine's thread, and returns when all front ends say ready.

    Args:
      engine: emits into `emit`.
      model, load_s, warmup_s: see Backend.
      tokenizer: of the model, which constraints are followed with.
    """
    self._engine, config = engine, engine.config
    self._router.open(engine, tokenizer)
    self._start_engine(engine)
    self._invariants = Invariants(engine.inner, None, self._router.num_held, self.fail)
    if self._options.debug_invariants:
      self._invariants.start()
    processes = [os.getpid(), *(front_end.process.pid for front_end in self._front_ends)]
    for front_end in self._front_ends:
      others = [pid for pid in processes if pid != front_end.process.pid]
      front_end.link.tell(wire.SERVE, model, dataclasses.asdict(config), load_s, warmup_s, others)
    await self._all(front_end.serving for front_end in self._front_ends)
    sd_notify.tell("READY=1\nSTATUS=serving")

  async def _drain(self) -> None:
    """Front ends drain as a server of one process does, and end."""
    options = self._options
    self._is_stopping = True
    self._tell_all(wire.DRAIN)
    limit_s = options.drain_delay_s + options.drain_timeout_s + _MARGIN_S
    await first_of(self._all_gone.wait(), self._hurry.wait(), self._engine_ended.wait(), asyncio.sleep(limit_s))
    if self._hurry.is_set() and not self._all_gone.is_set():
      self._tell_all(wire.DRAIN)
      await first_of(self._all_gone.wait(), self._engine_ended.wait(), asyncio.sleep(_HURRIED_S))

  async def _take_down(self) -> int:
    await self._end_processes(0.0 if self._failure is None else min(_MARGIN_S, self._options.watchdog_grace_s / 2))
    if self._admin_server is not None:
      await self._admin_server.stop(None)
    if self._thread is not None:
      failed = self._failure is not None
      await self._thread.stop(0.0 if failed else _MARGIN_S, _HURRIED_S if failed else self._options.watchdog_grace_s)
      if self._thread.is_alive:
        _log.critical("the engine did not stop")
        self._exit_code = watchdog.EXIT_CODE
    if self._reserved is not None:
      self._reserved.close()
    self._router.close()
    self._calls.close()
    if self._engine is not None:
      used = self._engine.report_now().stats.blocks_used
      _log.info("stopped: %d requests served, %d KV blocks in use", self._router.num_started, used)
    return self._exit_code

  async def _take_down_dead(self, cause: BaseException) -> None:
    self._is_stopping = True
    self._tell_all(wire.DIE, str(cause) or type(cause).__name__)
    await self._health.enter_graceful_shutdown()
    await self._take_down()

  def _tell_all(self, kind: int, *fields: Any) -> None:
    for front_end in self._front_ends:
      front_end.link.tell(kind, *fields)

  async def _end_processes(self, wait_s: float) -> None:
    """Waits for them to end by themselves; then they are killed."""
    self._is_stopping = True
    processes = [front_end.process for front_end in self._front_ends]
    # One that has closed its link is on its last lines.
    deadline = self._loop.time() + max(wait_s, _HURRIED_S if self._all_gone.is_set() else 0.0)
    while any(process.poll() is None for process in processes) and self._loop.time() < deadline:
      await asyncio.sleep(_POLL_S)
    for front_end in self._front_ends:
      if front_end.process.poll() is None:
        _log.warning("front end %d did not end and is killed", front_end.index)
        front_end.process.kill()
        front_end.process.wait()
      if front_end.process.returncode:
        _log.warning("front end %d ended with exit code %d", front_end.index, front_end.process.returncode)
        self._exit_code = watchdog.EXIT_CODE
      front_end.link.close()

  # What front ends tell.

  def _hello(self, front_end: _FrontEnd, version: Any, pid: Any) -> None:
    if version != wire.VERSION or pid != front_end.process.pid:
      raise wire.WireError(f"a front end of version {version!r:.20}: {wire.VERSION} is wanted")

  def _listening(self, front_end: _FrontEnd) -> None:
    if not front_end.listening.done():
      front_end.listening.set_result(None)

  def _serving(self, front_end: _FrontEnd) -> None:
    if not front_end.serving.done():
      front_end.serving.set_result(None)

  def _failed(self, front_end: _FrontEnd, reason: Any) -> None:
    """It cannot start, for a reason that whoever started the server must know."""
    error = ConfigError(str(reason))
    if not front_end.listening.done():
      front_end.listening.set_exception(error)
    else:
      self.fail(error)

  def _lost(self, front_end: _FrontEnd, reason: str) -> None:
    self._router.lost(front_end)
    if not any(each.link.is_open for each in self._front_ends):
      self._all_gone.set()
    if not self._is_stopping:
      text = f"front end {front_end.index} (process {front_end.process.pid}) has ended: {reason}"
      _log.critical("%s", text)
      if not front_end.listening.done():
        front_end.listening.set_exception(ConfigError(text))
      self.fail(EngineDead(text))

  # What front ends ask.

  def _report(self, front_end: _FrontEnd, num_records: Any, with_blocks: Any) -> list[Any]:
    if self._engine is None or type(num_records) is not int:
      raise wire.WireError("a report that nobody can give")
    report = self._engine.report_now(min(num_records, RING_STEPS), with_blocks=bool(with_blocks))
    others = sum(spawn.peak_rss_bytes(each.process.pid) for each in self._front_ends)
    return plain.plain_report(dataclasses.replace(report, peak_rss_bytes=report.peak_rss_bytes + others))

  async def _totals(self, front_end: _FrontEnd) -> list[Any]:
    """Of all processes; for one that does not answer soon, what it said the last time."""
    return (await self._sum()).plain()

  async def _sum(self) -> Counts:
    total = Counts()
    watch = self._thread.watchdog if self._thread is not None else None
    total.add(process_counts(self._calls, watch, self._invariants))
    total.num_unhandled += self._num_unhandled
    for counts in await asyncio.gather(*map(self._counts_of, self._front_ends)):
      total.add(counts)
    return total

  async def _books(self) -> GetInvariantsResponse:
    if self._invariants is None:
      raise Starting()
    return self._invariants.report(await self._sum())

  async def _counts_of(self, front_end: _FrontEnd) -> Counts:
    with contextlib.suppress(TimeoutError, EngineError):
      async with asyncio.timeout(_COUNTS_S):
        front_end.counts = Counts.from_plain(await front_end.link.ask(wire.COUNTS))
    return front_end.counts

  def _count_unhandled(self) -> None:
    self._num_unhandled += 1
