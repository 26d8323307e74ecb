"""Ends a server, in one process or several: after a drain, at once, or on a failure. Serves nothing itself."""

import abc
import asyncio
import contextlib
import logging
import threading
import time

import grpc
from grpc_health.v1 import health_pb2

from engine.engine import Engine
from server.errors import EngineDead
from server.generation.engine_client import EngineClient
from server.host_options import HostOptions
from server.lifecycle import systemd_notify, watchdog
from server.lifecycle.composition import Composition
from server.rpc.admin_service import AdminActions, AdminService
from server.rpc.grpc_server import Health, start_admin
from server.security.certificates import make_certificates
from server.telemetry.access_log import AccessLog
from server.telemetry.process_counts import Census, ProcessCounts, count_process

# Liveness distinguishes a process from a machine: liveness is "", readiness is each service's name.
LIVENESS = ""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# Time for statuses to reach clients after the last generation; the shorter one after a second signal.
_FAREWELL_S = 2.0
_HURRIED_FAREWELL_S = 0.4

_log = logging.getLogger(__name__)


class Lifetime(abc.ABC):
  """Starts an engine's thread and ends with it. All methods but `fail` belong to one event loop.

  Attributes:
    http_port: the HTTP port, once started; -1 if there is none.
    metrics_port: the metrics port, once started; -1 if only the HTTP port serves metrics.
    admin_port: the admin service's port, once started; -1 if there is none.
  """

  _parts = "the engine"  # their failure ends the server

  def __init__(
    self, options: HostOptions, admin: AdminActions | None, *, may_exit: bool, composition: Composition | None
  ):
    """Must be made inside the running event loop. Args: see server.lifecycle.host.Host."""
    options.check_options()
    self._options = options
    self._admin = admin
    self._may_exit = may_exit
    self._composition = composition or Composition()
    self._loop = asyncio.get_running_loop()
    self._health = Health()
    self._certificates = make_certificates(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    self._access_log = AccessLog(options.access_log)
    self._admin_server: grpc.aio.Server | None = None
    self.http_port = self.metrics_port = self.admin_port = -1
    self._inner: Engine | None = None  # in this process
    self._engine_stop = threading.Event()
    self._engine_thread: threading.Thread | None = None
    self._watchdog: watchdog.Watchdog | None = None
    self._stop = asyncio.Event()
    self._hurry = asyncio.Event()
    self._engine_ended = asyncio.Event()
    self._failure: BaseException | None = None
    self._num_unhandled = 0
    watchdog.watch_loop(self._loop, self.fail, self._count_unhandled)

  # For subclasses.

  @abc.abstractmethod
  def _num_live(self) -> int:
    """Returns the number of live generations."""

  @abc.abstractmethod
  def _require_engine(self) -> EngineClient:
    """Returns the engine; raises Unavailable unless it serves."""

  @abc.abstractmethod
  async def _drain(self) -> None:
    """Refuses new work; returns when nothing is live or the wait is over."""

  @abc.abstractmethod
  async def _take_down(self) -> int:
    """Ends everything; returns the exit code."""

  @abc.abstractmethod
  async def _take_down_dead(self, cause: BaseException) -> None:
    """Ends everything after a failure; notifies clients first."""

  # Shared by subclasses.

  async def _start_admin(self, census: Census) -> None:
    if self._options.admin_port >= 0:
      assert self._admin is not None, "an admin port needs its actions"
      await self._health.set(LIVENESS, SERVING)
      service = AdminService(self._admin, self._begin_drain, self._require_engine)

      def add_services(server: grpc.aio.Server) -> None:
        service.register(server, enable_channelz=self._options.enable_channelz)
        self._composition.add_admin_services(server, census)

      self._admin_server, self.admin_port = await start_admin(
        self._options, add_services, self._health, self._certificates, self._access_log
      )

  def _count_process(self) -> ProcessCounts:
    """Returns this process's counts, except those of generations."""
    counts = count_process(self._access_log, self._watchdog.lag_s if self._watchdog is not None else 0.0)
    counts.num_unhandled = self._num_unhandled
    return counts

  def _count_unhandled(self) -> None:
    self._num_unhandled += 1

  def _start_engine(self, engine: Engine | None) -> None:
    """Starts and watches the engine's thread. None, for an engine in another process, watches the event loop alone."""
    options = self._options
    if engine is not None:
      self._inner = engine
      self._engine_thread = threading.Thread(target=self._run_engine, args=(engine,), name="engine", daemon=True)
      self._engine_thread.start()
    if options.step_timeout_s:
      self._watchdog = watchdog.Watchdog(
        timeout_s=options.step_timeout_s,
        grace_s=options.watchdog_grace_s,
        heartbeat=time.monotonic if engine is None else lambda: engine.heartbeat,
        on_stuck=lambda what: self.fail(EngineDead(what)),
        may_exit=self._may_exit,
      )
      self._watchdog.start_watching()

  def _run_engine(self, engine: Engine) -> None:
    try:
      engine.run(self._engine_stop)
    except BaseException as error:
      # Exceptions end the engine, which reports them itself; anything else ends the thread.
      self.fail(error)
    finally:
      if not self._engine_stop.is_set():
        self._loop.call_soon_threadsafe(self._engine_ended.set)

  @property
  def _farewell_s(self) -> float:
    """Returns the seconds that the last statuses have to reach clients, and the engine to end its last aborts."""
    return _HURRIED_FAREWELL_S if self._hurry.is_set() else _FAREWELL_S

  async def _stop_engine(self, num_served: int) -> int:
    """Ends the admin service and the engine's thread; leaves a stuck thread alone. Returns the exit code."""
    if self._admin_server is not None:
      await self._admin_server.stop(None)
    failed = self._failure is not None
    engine, thread = self._inner, self._engine_thread
    if engine is not None and not failed:
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(self._farewell_s):
          while engine.num_live and engine.dead is None:
            await asyncio.sleep(0.005)
    if self._watchdog is not None:
      self._watchdog.stop_watching()
    self._access_log.close()
    if engine is None or thread is None:
      return 0
    self._engine_stop.set()
    engine.wake()
    wait_s = _HURRIED_FAREWELL_S if failed or self._hurry.is_set() else self._options.watchdog_grace_s
    await self._loop.run_in_executor(None, thread.join, wait_s)
    if thread.is_alive():
      _log.critical("the engine did not stop")
      return watchdog.EXIT_CODE
    _log.info("stopped: %d requests served, %d KV blocks in use", num_served, engine.stats().blocks_used)
    return 0

  def fail(self, error: BaseException) -> None:
    """Ends the server as on an engine failure. Safe on any thread; only the first failure is reported."""

    def note_failure() -> None:
      self._failure = self._failure or error
      self._engine_ended.set()

    with contextlib.suppress(RuntimeError):  # the loop has already ended
      self._loop.call_soon_threadsafe(note_failure)

  def request_stop(self) -> None:
    """Begins the drain; a second call ends the server at once. Safe as a signal handler of the loop."""
    if self._stop.is_set():
      self._hurry.set()
    self._stop.set()

  @property
  def stopping(self) -> bool:
    """Whether the server is stopping."""
    return self._stop.is_set()

  def _begin_drain(self) -> int:
    """Begins the drain; unlike a second signal, never ends it early. Returns the number of live generations."""
    if not self.stopping:
      self.request_stop()
    return self._num_live()

  async def wait_stopped(self) -> int:
    """Watches the engine until a stop is requested or the engine ends, then takes everything down.

    Returns:
      The exit code: 0 after a drain; 1 if the engine or another thread failed, or if the engine is stuck.
    """
    await wait_first_of(self._stop.wait(), self._engine_ended.wait())
    self._composition.end_serving()
    if not self._engine_ended.is_set():
      systemd_notify.notify_systemd("STOPPING=1\nSTATUS=draining")
      await self._drain()
    engine = self._inner
    dead = engine.dead if engine is not None else None
    if not self._engine_ended.is_set() and dead is None:
      return await self._take_down()
    cause = self._failure = self._failure or dead or EngineDead("the engine's thread has ended")
    incident = f"incident {engine.incident}: " if engine is not None else ""
    _log.critical("%s%s has failed, the server ends", incident, self._parts, exc_info=cause)
    if self._watchdog is not None:
      self._watchdog.stop_watching()
    if self._may_exit:
      watchdog.exit_soon(self._options.watchdog_grace_s)
    systemd_notify.notify_systemd("STOPPING=1\nSTATUS=failed")
    await self._take_down_dead(cause)
    return watchdog.EXIT_CODE


async def wait_first_of(*waits) -> None:
  """Returns when the first of several waits is over; cancels the others."""
  tasks = [asyncio.ensure_future(wait) for wait in waits]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
  finally:
    for task in tasks:
      task.cancel()
