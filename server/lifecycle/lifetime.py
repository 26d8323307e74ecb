"""How a server's life ends, in one process or in several: a drain, a hurry, or a death. Serves nothing itself."""

import abc
import asyncio
import contextlib
import logging

import grpc
from grpc_health.v1 import health_pb2

from server.errors import EngineDead
from server.generation.engine_client import EngineClient, LocalEngine
from server.host_options import HostOptions
from server.lifecycle import systemd_notify, watchdog
from server.lifecycle.composition import Composition
from server.lifecycle.engine_thread import EngineThread
from server.rpc.admin_service import AdminActions, AdminService
from server.rpc.grpc_server import Health, start_admin
from server.security.certificates import Certificates
from server.telemetry.call_log import CallLog
from server.telemetry.process_counts import Census

# A process has to be told apart from a machine: liveness is "", readiness is each service's name.
LIVENESS = ""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_log = logging.getLogger(__name__)


class Lifetime(abc.ABC):
  """What starts an engine's thread and ends with it. All methods but `fail` belong to one event loop.

  Attributes:
    admin_port: where the admin service listens, once started; -1 is nowhere.
  """

  _parts = "the engine"  # that end the server when they fail

  def __init__(
    self, options: HostOptions, admin: AdminActions | None, *, may_exit: bool, composition: Composition | None
  ):
    """Must be made inside the running event loop. Args: see server.lifecycle.host.Host."""
    self._options = options
    self._admin = admin
    self._may_exit = may_exit
    self._composition = composition or Composition()
    self._loop = asyncio.get_running_loop()
    self._health = Health()
    self._admin_server: grpc.aio.Server | None = None
    self.admin_port = -1
    self._thread: EngineThread | None = None
    self._stop = asyncio.Event()
    self._hurry = asyncio.Event()
    self._engine_ended = asyncio.Event()
    self._failure: BaseException | None = None

  # What differs.

  @abc.abstractmethod
  def _num_live(self) -> int:
    """Generations."""

  @abc.abstractmethod
  async def _drain(self) -> None:
    """Lets no new work in, and returns when nothing is live, or no more is waited for."""

  @abc.abstractmethod
  async def _take_down(self) -> int:
    """Ends all there is; returns the exit code."""

  @abc.abstractmethod
  async def _take_down_dead(self, cause: BaseException) -> None:
    """The same after a failure, which clients are told of first."""

  # What does not.

  async def _start_admin(self, census: Census, certificates: Certificates | None, access_log: CallLog) -> None:
    if self._options.admin_port >= 0:
      assert self._admin is not None, "an admin port needs its actions"
      await self._health.set(LIVENESS, SERVING)
      service = AdminService(self._admin, self._begin_drain)

      def add_services(server: grpc.aio.Server) -> None:
        service.register(server, enable_channelz=self._options.enable_channelz)
        self._composition.add_admin_services(server, census)

      self._admin_server, self.admin_port = await start_admin(
        self._options, add_services, self._health, certificates, access_log
      )

  def _start_engine(self, engine: EngineClient) -> EngineThread:
    self._thread = EngineThread(
      engine,
      self.fail,
      self._engine_ended,
      step_timeout_s=self._options.step_timeout_s,
      grace_s=self._options.watchdog_grace_s,
      may_exit=self._may_exit,
    )
    self._thread.start_thread()
    return self._thread

  def fail(self, error: BaseException) -> None:
    """Ends the server as the engine's death does. Any thread; what comes first is what is told."""

    def note_failure() -> None:
      self._failure = self._failure or error
      self._engine_ended.set()

    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
      self._loop.call_soon_threadsafe(note_failure)

  def request_stop(self) -> None:
    """Begins the drain; the second time, ends at once. Safe as a signal handler of the loop."""
    if self._stop.is_set():
      self._hurry.set()
    self._stop.set()

  @property
  def failure(self) -> BaseException | None:
    """What ended the server, if something has."""
    return self._failure

  @property
  def stopping(self) -> bool:
    """Whether a stop was asked for."""
    return self._stop.is_set()

  def _begin_drain(self) -> int:
    """Unlike a second signal, never makes it end early. Returns the live generations."""
    if not self.stopping:
      self.request_stop()
    return self._num_live()

  async def wait_stopped(self) -> int:
    """Watches the engine until a stop is asked for or the engine ends, then takes everything down.

    Returns:
      The process's exit code: 0 after a drain, 1 after the engine's death or another thread's, or if the engine stands.
    """
    await wait_first_of(self._stop.wait(), self._engine_ended.wait())
    self._composition.end_serving()
    if not self._engine_ended.is_set():
      systemd_notify.notify_systemd("STOPPING=1\nSTATUS=draining")
      await self._drain()
    engine = self._thread.engine if self._thread is not None else None
    dead = engine.dead if engine is not None else None
    if not self._engine_ended.is_set() and dead is None:
      return await self._take_down()
    cause = self._failure = self._failure or dead or EngineDead("the engine's thread has ended")
    incident = f"incident {engine.incident}: " if isinstance(engine, LocalEngine) else ""
    _log.critical("%s%s has failed, the server ends", incident, self._parts, exc_info=cause)
    if self._thread is not None:
      self._thread.stop_watching()
    if self._may_exit:
      watchdog.exit_soon(self._options.watchdog_grace_s)
    systemd_notify.notify_systemd("STOPPING=1\nSTATUS=failed")
    await self._take_down_dead(cause)
    return watchdog.EXIT_CODE


async def wait_first_of(*waits) -> None:
  """Returns when the first of several waits is over, with the others cancelled."""
  tasks = [asyncio.ensure_future(wait) for wait in waits]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
  finally:
    for task in tasks:
      task.cancel()
