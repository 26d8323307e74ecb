"""The engine's process of a server with several processes: owns the engine, the front ends and the public port.

It has the interface of `server.lifecycle.host.Host`; `server.ipc.request_router` carries requests and events. Touches
no text, protobuf or HTTP.

A front end that dies ends the server, as a crash of a single process would. All front ends run the same code, and the
port's group is closed, so a supervisor restarts the whole server from a known state. The engine aborts the requests of
the dead front end, and the others notify their clients.
"""

import asyncio
from collections.abc import Awaitable, Sequence
import contextlib
import dataclasses
import functools
import logging
import os
import socket
import subprocess

from engine.errors import ConfigError, EngineError
from engine.request import TokenEvent
from server.errors import EngineDead, Starting
from server.generation.engine_client import LocalEngine, Report
from server.generation.response_store import ResponseStore
from server.host_options import HostOptions
from server.http.http_listener import open_listening_socket
from server.ipc import front_end_spawn
from server.ipc.frame_link import Link
from server.ipc.messages import (
  AbortElsewhere,
  AdapterLoad,
  AdapterUnload,
  CensusQuestion,
  CountsQuestion,
  DrainOrder,
  EngineDeath,
  FrontEndSettings,
  ItemsQuestion,
  LinkMessage,
  ReportQuestion,
  RequestAbort,
  ResponseQuestion,
  ResponseRemoval,
  ResponseToKeep,
  ServedAdapters,
  ServedModel,
  Submission,
  TextOptions,
)
from server.ipc.request_router import Peer, Router
from server.lifecycle import systemd_notify, watchdog
from server.lifecycle.composition import Composition
from server.lifecycle.lifetime import Lifetime, wait_first_of
from server.rpc.admin_service import AdminActions
from server.rpc.grpc_server import ReservedPort
from server.telemetry.process_counts import ProcessCounts
from server.text.tokenizer import Tokenizer

# Added to the time that a front end needs by itself.
_MARGIN_S = 3.0
_HURRIED_S = 1.5
_POLL_S = 0.01
_COUNTS_S = 1.0

_log = logging.getLogger(__name__)


class _FrontEndPeer(Peer):
  """A front end process.

  Attributes:
    index, process: its number and its process.
    counts: its latest known counts.
  """

  def __init__(self, index: int, process: subprocess.Popen):
    super().__init__()
    self.index = index
    self.process = process
    self.counts = ProcessCounts(pids=[process.pid])


class FrontEndGroup(Lifetime):
  """A server's engine and its front ends. All methods but `emit` belong to one event loop, on the main thread."""

  _parts = "the engine or a front end"

  def __init__(
    self,
    count: int,
    options: HostOptions,
    texts: TextOptions,
    admin: AdminActions | None = None,
    *,
    may_exit: bool = False,
    composition: Composition | None = None,
  ):
    """Args:
    count: front end processes, at least 1.
    options, admin, may_exit, composition: see Host.
    texts: the front ends' texts.
    """
    if options.enable_channelz:
      raise ConfigError(
        "enable_channelz shows the connections of one process, and frontend_processes makes several; set one of them"
      )
    super().__init__(options, admin, may_exit=may_exit, composition=composition)
    self._count = count
    self._texts = texts
    self._reserved: ReservedPort | None = None
    self._front_ends: list[_FrontEndPeer] = []
    self._all_gone = asyncio.Event()
    self._router = Router()
    self._responses = ResponseStore(options.max_stored_responses)
    self._engine: LocalEngine | None = None
    self._is_stopping = False
    self._exit_code = 0

  # Life cycle, with Host's interface.

  async def start_listening(self) -> int:
    """Starts the front ends; returns when all of them listen and answer STARTING. Returns the port.

    Raises:
      ConfigError: an address cannot be bound, or a front end cannot start.
    """
    options = self._options
    reserved = self._reserved = ReservedPort(options.host, options.port)
    listening: list[socket.socket | None] = []
    try:
      for flag, port in (("http_port", options.http_port), ("metrics_port", options.metrics_port)):
        listening.append(None if port < 0 else open_listening_socket(options.http_host or options.host, port, flag))
      self.http_port, self.metrics_port = [-1 if each is None else each.getsockname()[1] for each in listening]
      lent = dataclasses.replace(
        options.share(self._count),
        **{"port": reserved.port, "http_port": self.http_port, "metrics_port": self.metrics_port},
        admin_port=-1,
      )
      reserved.open()
      for index in range(self._count):
        self._front_ends.append(self._begin(index, listening))
      await self._ask_all(FrontEndSettings(lent, self._texts))
      reserved.shut()
      if not reserved.is_shut:
        _log.info(
          "other programs of this user can share port %d; set an address in --host to prevent that",
          reserved.port,
        )
      await self._start_admin(self._sum)
    except BaseException:
      await self._end_processes(0.0)
      raise
    finally:
      for each in listening:
        if each is not None:
          each.close()
    return reserved.port

  def _begin(self, index: int, listening: Sequence[socket.socket | None]) -> _FrontEndPeer:
    process, socket_ = front_end_spawn.spawn_front_end(self._composition.front_end_module(self._options), listening)
    front_end = _FrontEndPeer(index, process)
    handlers = {
      Submission: self._router.submit,
      RequestAbort: self._router.abort,
      AbortElsewhere: self._router.abort_elsewhere,
      AdapterLoad: self._load_adapter,
      AdapterUnload: self._unload_adapter,
      ReportQuestion: self._report,
      CensusQuestion: self._count_for,
      ResponseToKeep: lambda _, asked: self._responses.put_response(asked.owner, asked.stored),
      ResponseQuestion: lambda _, asked: self._responses.find_response(asked.owner, asked.response_id),
      ResponseRemoval: lambda _, asked: self._responses.remove_response(asked.owner, asked.response_id),
      ItemsQuestion: lambda _, asked: self._responses.find_items(asked.owner, asked.item_ids),
    }
    front_end.link = Link(
      socket_,
      {kind: functools.partial(handler, front_end) for kind, handler in handlers.items()},
      functools.partial(self._lost, front_end),
    )
    return front_end

  async def _ask_all(self, question: LinkMessage) -> None:
    """Queries every front end. Raises the error of one that cannot start; if one is gone, `_lost` ends the server."""
    with contextlib.suppress(EngineDead):
      await asyncio.gather(*(front_end.link.ask_peer(question, None) for front_end in self._front_ends))

  def _num_live(self) -> int:
    return self._router.num_live

  def _require_engine(self) -> LocalEngine:
    if self._engine is None:
      raise Starting()
    return self._engine

  def emit(self, events: list[TokenEvent]) -> None:
    """Receives the engine's events, on the engine's thread."""
    self._router.emit(events)

  async def serve(
    self, engine: LocalEngine, *, model: str, tokenizer: Tokenizer | None, load_s: float, warmup_s: float
  ) -> None:
    """Starts the engine's thread; returns when all front ends report ready.

    Args:
      engine: emits into `emit`.
      model, load_s, warmup_s: see Backend.
      tokenizer: the model's, for constraints.
    """
    self._engine = engine
    self._router.open(engine, tokenizer)
    self._composition.begin_serving(engine.inner, None, tokenizer, num_held=self._router.num_held, fail=self.fail)
    self._start_engine(engine.inner)
    engine.adapter_loader.tell_change = self._tell_adapters
    processes = [os.getpid(), *(front_end.process.pid for front_end in self._front_ends)]
    await self._ask_all(ServedModel(model, engine.config, load_s, warmup_s, list(engine.adapters()), processes))
    systemd_notify.notify_systemd("READY=1\nSTATUS=serving")

  async def _drain(self) -> None:
    """Drains and ends the front ends, as a server of one process does."""
    options = self._options
    self._is_stopping = True
    self._tell_all(DrainOrder())
    limit_s = options.drain_delay_s + options.drain_timeout_s + _MARGIN_S
    await wait_first_of(self._all_gone.wait(), self._hurry.wait(), self._engine_ended.wait(), asyncio.sleep(limit_s))
    if self._hurry.is_set() and not self._all_gone.is_set():
      self._tell_all(DrainOrder())
      await wait_first_of(self._all_gone.wait(), self._engine_ended.wait(), asyncio.sleep(_HURRIED_S))

  async def _take_down(self) -> int:
    await self._end_processes(0.0 if self._failure is None else min(_MARGIN_S, self._options.watchdog_grace_s / 2))
    code = await self._stop_engine(self._router.num_started)
    if self._reserved is not None:
      self._reserved.close()
    self._router.close()
    return code or self._exit_code

  async def _take_down_dead(self, cause: BaseException) -> None:
    self._is_stopping = True
    self._tell_all(EngineDeath(str(cause) or type(cause).__name__))
    await self._health.enter_graceful_shutdown()
    await self._take_down()

  def _tell_all(self, message: LinkMessage) -> None:
    for front_end in self._front_ends:
      front_end.link.tell_peer(message)

  async def _end_processes(self, wait_s: float) -> None:
    """Waits for the front ends to end by themselves, then kills the rest."""
    self._is_stopping = True
    processes = [front_end.process for front_end in self._front_ends]
    # A front end that has closed its link is about to end.
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

  # Questions of front ends, and their deaths.

  def _lost(self, front_end: _FrontEndPeer, reason: str) -> None:
    self._router.lost(front_end)
    if not any(each.link.is_open for each in self._front_ends):
      self._all_gone.set()
    if not self._is_stopping:
      text = f"front end {front_end.index} (process {front_end.process.pid}) has ended: {reason}"
      _log.critical("%s", text)
      self.fail(EngineDead(text))

  async def _tell_adapters(self) -> None:
    """Returns when every front end knows which adapters take requests."""
    await self._ask_all(ServedAdapters(list(self._require_engine().adapters())))

  async def _load_adapter(self, front_end: _FrontEndPeer, asked: AdapterLoad) -> None:
    await self._require_engine().load_adapter(asked.name, asked.path, replaces=asked.replaces)

  async def _unload_adapter(self, front_end: _FrontEndPeer, asked: AdapterUnload) -> int:
    return await self._require_engine().unload_adapter(asked.name)

  async def _report(self, front_end: _FrontEndPeer, asked: ReportQuestion) -> Report:
    assert self._engine is not None, "front ends serve once there is one"
    report = await self._engine.report(asked.num_records, with_blocks=asked.with_blocks)
    others = sum(front_end_spawn.peak_rss_bytes(each.process.pid) for each in self._front_ends)
    return dataclasses.replace(report, peak_rss_bytes=report.peak_rss_bytes + others)

  def _count_for(self, front_end: _FrontEndPeer, asked: CensusQuestion) -> Awaitable[ProcessCounts]:
    return self._sum()

  async def _sum(self) -> ProcessCounts:
    """Sums the counts of all processes; uses the last known counts of one that does not answer soon."""
    total = ProcessCounts()
    total.add_process(self._count_process())
    for counts in await asyncio.gather(*map(self._counts_of, self._front_ends)):
      total.add_process(counts)
    return total

  async def _counts_of(self, front_end: _FrontEndPeer) -> ProcessCounts:
    with contextlib.suppress(TimeoutError, EngineError):
      async with asyncio.timeout(_COUNTS_S):
        front_end.counts = await front_end.link.ask_peer(CountsQuestion(), ProcessCounts)
    return front_end.counts
