"""The engine's process of a server with several: owns the engine, its front end processes and the public port.

It has the same face as server.host.Host. Requests come over links and go to the engine; a step's events go, sorted, to
the front ends whose requests they are of. Names of live generations are kept here, and nowhere else, so that they are
unique however connections fall on processes. No text, protobuf or HTTP is touched here.

A front end that dies ends the server, as a crash of the whole would: what runs in it runs in the others, the port's
group is closed, and a supervisor starts all anew from a known state. Its requests are aborted, all others are told.
"""

import asyncio
from collections.abc import Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import socket
import subprocess
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from engine.constraint import Constraint
from engine.errors import ConfigError, DuplicateRequest, EngineError
from engine.recorder import RING_STEPS
from engine.request import FinishReason, TokenEvent
from server import plain, sd_notify, spawn, watchdog, wire
from server.admin import AdminActions, AdminService
from server.call_log import CallLog
from server.constraints import ConstraintCompiler
from server.counts import Counts, process_counts
from server.engine_thread import EngineThread
from server.errors import AbortedByRequest, EngineDead, Starting
from server.grpc_server import ReservedPort, start_admin
from server.host import LIVENESS, first_of
from server.host_options import HostOptions
from server.http.listener import listen
from server.invariants import Invariants
from server.port import LocalEngine
from server.proto.admin_pb2 import GetInvariantsResponse
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


class _FrontEnd:
  """One of the processes, as the engine's knows it.

  Attributes:
    ids: the engine's ids of its live requests, by its own.
    compiling: its own ids of requests whose constraint is being compiled, and whether they were aborted since.
    request_ids, token_ids, others: of the step whose events are being sorted, on the engine's thread.
    counts: the latest known.
  """

  def __init__(self, index: int, process: subprocess.Popen):
    loop = asyncio.get_running_loop()
    self.index = index
    self.process = process
    self.link: wire.Link
    self.listening: asyncio.Future[None] = loop.create_future()
    self.serving: asyncio.Future[None] = loop.create_future()
    self.ids: dict[str, str] = {}
    self.compiling: dict[str, bool] = {}
    self.request_ids: list[str] = []
    self.token_ids: list[int] = []
    self.others: list[list[Any]] = []
    self.counts = Counts(pids=[process.pid])


@dataclasses.dataclass(slots=True)
class _Claim:
  """A live generation's owner and name.

  Attributes:
    front_end: whose it is.
    num_live: its requests that have not ended.
    is_aborted: an Abort call has named it.
  """

  front_end: _FrontEnd
  num_live: int
  is_aborted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Route:
  """Where the events of a request go: to a front end, which knows it by its own id; and its generation's claim."""

  front_end: _FrontEnd
  request_id: str
  claim: tuple[str, str]


class Frontends:
  """All methods but `emit` belong to one event loop, on the main thread.

  Attributes:
    http_port, admin_port, metrics_port: see Host.
  """

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
    self._count = count
    self._options = options
    self._texts = texts
    self._admin = admin
    self._may_exit = may_exit
    self._loop = asyncio.get_running_loop()
    self._certificates = make_certificates(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    self._calls = CallLog(options.access_log)
    self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    self._admin_server: grpc.aio.Server | None = None
    self.http_port = self.admin_port = self.metrics_port = -1
    self._port: ReservedPort | None = None
    self._front_ends: list[_FrontEnd] = []
    self._all_gone = asyncio.Event()
    self._engine: LocalEngine | None = None
    self._thread: EngineThread | None = None
    self._compiler: ConstraintCompiler | None = None
    self._invariants: Invariants | None = None
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
    self._routes: dict[str, _Route] = {}
    self._claims: dict[tuple[str, str], _Claim] = {}
    self._num_started = 0
    self._num_unhandled = 0
    self._is_stopping = False
    self._exit_code = 0
    self._stop = asyncio.Event()
    self._hurry = asyncio.Event()
    self._engine_ended = asyncio.Event()
    self._failure: BaseException | None = None

  # Its life, as Host has it.

  async def start(self) -> int:
    """Starts the front ends; returns when all of them listen and answer STARTING. Returns the port.

    Raises:
      ConfigError: an address cannot be bound, or a front end cannot start.
    """
    options = self._options
    watchdog.watch_loop(self._loop, self.fail, self._count_unhandled)
    reserved = self._port = ReservedPort(options.host, options.port)
    listening: list[socket.socket | None] = []
    try:
      for flag, port in (("http_port", options.http_port), ("metrics_port", options.metrics_port)):
        listening.append(None if port < 0 else listen(options.http_host or options.host, port, flag))
      self.http_port, self.metrics_port = [-1 if each is None else each.getsockname()[1] for each in listening]
      lent = dataclasses.replace(
        options,
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
      await self._start_admin()
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
        wire.ABORT: bound(self._abort),
      },
      asked={
        wire.SUBMIT: bound(self._submit),
        wire.REPORT: bound(self._report),
        wire.TOTALS: bound(self._totals),
        wire.ABORT_ELSEWHERE: bound(self._abort_elsewhere),
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

  async def _start_admin(self) -> None:
    if self._options.admin_port >= 0:
      assert self._admin is not None, "an admin port needs its actions"
      await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
      service = AdminService(self._admin, self._begin_drain, self._books)
      self._admin_server, self.admin_port = await start_admin(
        self._options, service, self._health, self._certificates, self._calls
      )

  def emit(self, events: list[TokenEvent]) -> None:
    """The engine's way out: one frame a step to each front end that has a request in it. On the engine's thread."""
    routes, ended, touched = self._routes, [], set()
    for event in events:
      engine_id, token_ids, logprobs, prompt_logprobs, reason, _, _, _, _ = event
      if reason is not None:
        ended.append(engine_id)
      route = routes.get(engine_id)
      if route is None:
        continue  # nobody waits for it any more
      front_end = route.front_end
      touched.add(front_end)
      if reason is None and not logprobs and not prompt_logprobs and len(token_ids) == 1:
        front_end.request_ids.append(route.request_id)
        front_end.token_ids.append(token_ids[0])
      else:
        front_end.others.append(plain.plain_event(event, route.request_id))
    if ended:  # before a client can know it and use the name again
      with contextlib.suppress(RuntimeError):  # the loop has ended
        self._loop.call_soon_threadsafe(self._forget, ended)
    for front_end in touched:
      front_end.link.tell(wire.EVENTS, front_end.request_ids, front_end.token_ids, front_end.others)
      front_end.request_ids, front_end.token_ids, front_end.others = [], [], []

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
    if tokenizer is not None:
      self._compiler = ConstraintCompiler(tokenizer, config.vocab_size, config.eos_token_ids)
    self._thread = EngineThread(
      engine,
      self.fail,
      self._engine_ended,
      step_timeout_s=self._options.step_timeout_s,
      grace_s=self._options.watchdog_grace_s,
      may_exit=self._may_exit,
    )
    self._thread.start()
    self._invariants = Invariants(
      engine.inner, None, lambda: engine.num_held() + len(self._routes) + len(self._claims), self.fail
    )
    if self._options.debug_invariants:
      self._invariants.start()
    for front_end in self._front_ends:
      front_end.link.tell(wire.SERVE, model, dataclasses.asdict(config), load_s, warmup_s)
    await self._all(front_end.serving for front_end in self._front_ends)
    sd_notify.tell("READY=1\nSTATUS=serving")

  def fail(self, error: BaseException) -> None:
    """See Host.fail."""

    def take() -> None:
      self._failure = self._failure or error
      self._engine_ended.set()

    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
      self._loop.call_soon_threadsafe(take)

  def request_stop(self) -> None:
    """Begins the drain; the second time, ends at once. Safe as a signal handler of the loop."""
    if self._stop.is_set():
      self._hurry.set()
    self._stop.set()

  def _begin_drain(self) -> int:
    if not self._stop.is_set():
      self.request_stop()
    return len(self._claims)

  async def wait_stopped(self) -> int:
    """See Host.wait_stopped; the death of a front end is as the engine's."""
    await first_of(self._stop.wait(), self._engine_ended.wait())
    if self._invariants is not None:
      self._invariants.stop()
    if not self._engine_ended.is_set():
      sd_notify.tell("STOPPING=1\nSTATUS=draining")
      await self._drain()
    if self._engine_ended.is_set() or self._engine is not None and self._engine.dead is not None:
      return await self._take_down_dead()
    return await self._take_down(0.0)

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

  async def _take_down(self, wait_s: float) -> int:
    await self._end_processes(wait_s)
    if self._admin_server is not None:
      await self._admin_server.stop(None)
    if self._thread is not None:
      failed = self._failure is not None
      await self._thread.stop(0.0 if failed else _MARGIN_S, _HURRIED_S if failed else self._options.watchdog_grace_s)
      if self._thread.is_alive:
        _log.critical("the engine did not stop")
        self._exit_code = watchdog.EXIT_CODE
    if self._port is not None:
      self._port.close()
    self._pool.shutdown(wait=False, cancel_futures=True)
    self._calls.close()
    if self._engine is not None:
      used = self._engine.report_now().stats.blocks_used
      _log.info("stopped: %d requests served, %d KV blocks in use", self._num_started, used)
    return self._exit_code

  async def _take_down_dead(self) -> int:
    cause = self._failure or (self._engine.dead if self._engine is not None else None)
    incident = f"incident {self._engine.incident}: " if self._engine is not None else ""
    _log.critical("%sthe engine or a front end has failed, the server ends", incident, exc_info=cause)
    if self._thread is not None:
      self._thread.stop_watching()
    if self._may_exit:
      watchdog.exit_soon(self._options.watchdog_grace_s)
    sd_notify.tell("STOPPING=1\nSTATUS=failed")
    self._is_stopping = True
    self._tell_all(wire.DIE, str(cause) or type(cause).__name__)
    await self._health.enter_graceful_shutdown()
    await self._take_down(min(_MARGIN_S, self._options.watchdog_grace_s / 2))
    return watchdog.EXIT_CODE

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
    for engine_id in list(front_end.ids.values()):
      self._drop(engine_id, FinishReason.ABORT)
    front_end.ids.clear()
    if not any(each.link.is_open for each in self._front_ends):
      self._all_gone.set()
    if not self._is_stopping:
      text = f"front end {front_end.index} (process {front_end.process.pid}) has ended: {reason}"
      _log.critical("%s", text)
      if not front_end.listening.done():
        front_end.listening.set_exception(ConfigError(text))
      self.fail(EngineDead(text))

  def _abort(self, front_end: _FrontEnd, request_id: Any, reason: Any) -> None:
    engine_id = front_end.ids.pop(request_id, None)
    if engine_id is not None:
      self._drop(engine_id, FinishReason(reason))
    elif request_id in front_end.compiling:
      front_end.compiling[request_id] = True

  def _drop(self, engine_id: str, reason: FinishReason) -> None:
    """Its events have nowhere to go from now on; its name is free."""
    route = self._routes.pop(engine_id, None)
    if route is not None and self._engine is not None:
      self._unclaim(route.claim)
      self._engine.abort(engine_id, reason)

  def _forget(self, engine_ids: Sequence[str]) -> None:
    """The engine has ended them."""
    assert self._engine is not None, "nothing ends before anything runs"
    for engine_id in engine_ids:
      route = self._routes.pop(engine_id, None)
      if route is not None:
        route.front_end.ids.pop(route.request_id, None)
        self._unclaim(route.claim)
      self._engine.ended(engine_id)

  def _unclaim(self, key: tuple[str, str]) -> None:
    claim = self._claims[key]
    claim.num_live -= 1
    if not claim.num_live:
      del self._claims[key]

  # What front ends ask.

  def _submit(self, front_end: _FrontEnd, owner: Any, name: Any, *fields: Any) -> Any:
    """Answers at once, or after a constraint was compiled."""
    asked = plain.generation_from(*fields)
    if self._engine is None or type(name) is not str or type(owner) is not str:
      raise wire.WireError("a request that no engine can take")
    key = owner, name
    if key in self._claims:
      raise DuplicateRequest(f"request_id={name} is in use by a live request; choose another, or leave it empty")
    self._claims[key] = _Claim(front_end, len(asked.outputs))
    if asked.grammar is not None:
      return self._compile_and_accept(front_end, key, asked, asked.grammar)
    self._accept(front_end, key, asked, [None] * len(asked.outputs))
    return None

  async def _compile_and_accept(
    self, front_end: _FrontEnd, key: tuple[str, str], asked: plain.Asked, grammar: str
  ) -> None:
    request_ids = [request_id for request_id, _ in asked.outputs]
    front_end.compiling.update(dict.fromkeys(request_ids, False))
    compiler = self._compiler
    try:
      if compiler is None:
        raise wire.WireError("a constraint for a model without a tokenizer")
      first = await self._loop.run_in_executor(self._pool, compiler.compile_source, grammar)
      if not front_end.link.is_open or any(front_end.compiling[request_id] for request_id in request_ids):
        raise AbortedByRequest("the request was aborted")
    except BaseException:
      del self._claims[key]
      raise
    finally:
      for request_id in request_ids:
        del front_end.compiling[request_id]
    self._accept(front_end, key, asked, [first, *(first.copy() for _ in request_ids[1:])])

  def _accept(
    self,
    front_end: _FrontEnd,
    key: tuple[str, str],
    asked: plain.Asked,
    constraints: Sequence[Constraint | None],
  ) -> None:
    engine, name = self._engine, key[1]
    assert engine is not None, "looked at before"
    ids = [engine.new_id(name if index == 0 else f"{name}/{index}") for index in range(len(asked.outputs))]
    for engine_id, (request_id, _) in zip(ids, asked.outputs, strict=True):
      self._routes[engine_id] = _Route(front_end, request_id, key)
    try:
      engine.submit_now(asked.requests(ids, constraints))
    except Exception:
      del self._claims[key]
      for engine_id in ids:
        del self._routes[engine_id]
        engine.ended(engine_id)
      raise
    front_end.ids.update((request_id, engine_id) for engine_id, (request_id, _) in zip(ids, asked.outputs, strict=True))
    self._num_started += 1

  def _abort_elsewhere(self, front_end: _FrontEnd, owner: Any, names: Any) -> list[bool]:
    found = []
    for name in names:
      claim = self._claims.get((owner, name))
      found.append(claim is not None and claim.front_end is not front_end and not claim.is_aborted)
      if claim is not None and found[-1]:
        claim.is_aborted = True
        claim.front_end.link.tell(wire.ABORT_NAMES, owner, [name])
    return found

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
      raise Starting("the model is loading; try again when the health check says SERVING")
    return self._invariants.report(await self._sum())

  async def _counts_of(self, front_end: _FrontEnd) -> Counts:
    with contextlib.suppress(TimeoutError, EngineError):
      async with asyncio.timeout(_COUNTS_S):
        front_end.counts = Counts.from_plain(await front_end.link.ask(wire.COUNTS))
    return front_end.counts

  def _count_unhandled(self) -> None:
    self._num_unhandled += 1
