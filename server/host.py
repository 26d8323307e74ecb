"""One server's life: bind, say STARTING, serve, watch the engine, drain, end. Knows no model and no flag."""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import logging
import socket

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine.errors import InvariantBroken
from engine.request import TokenEvent
from server import sd_notify, watchdog
from server.admin import AdminActions, AdminService
from server.auth import ApiKeys
from server.call_log import CallLog
from server.counts import Census, Counts, own_census, own_counts
from server.engine_thread import EngineThread
from server.errors import Draining, EngineDead, Starting
from server.grpc_server import add_reflection, bind, is_local, new_server, start_admin
from server.host_options import HostOptions
from server.http.app import make_app, make_probe_app
from server.http.listener import Listener
from server.http.options import HttpOptions
from server.interceptors import HEALTH_METHODS, REFLECTION_METHODS, CallInterceptor
from server.invariants import Invariants
from server.memory import MemoryLimit
from server.metrics import Metrics
from server.page.feed import Feed
from server.page.routes import PUBLIC_PATHS, metrics_route, routes
from server.port import LocalEngine
from server.proto.admin_pb2 import GetInvariantsResponse
from server.service import GENERATION_SERVICE, MODEL_SERVICE, Backend, Service
from server.tls import make_certificates
from server.vllm_engine import VLLM_SERVICE, VllmEngine

__all__ = ["Host", "HostOptions", "SharedPorts", "is_local"]

# A process has to be told apart from a machine: liveness is "", readiness is each service's name.
LIVENESS = ""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Time for statuses to reach clients after the last generation has ended; and where somebody does not want to wait.
_FAREWELL_S = 2.0
_HURRIED_FAREWELL_S = 0.4

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SharedPorts:
  """What one of several front end processes is lent.

  Attributes:
    http, metrics: listening sockets that all of them accept from; None where there is no such port.
    census: what all of them have counted.
  """

  http: socket.socket | None
  metrics: socket.socket | None
  census: Census


class Host:
  """A gRPC server, an HTTP server and the thread of their engine. All methods but `emit` belong to one event loop.

  Attributes:
    http_port: where HTTP listens, once started; -1 is nowhere.
    admin_port: where the admin service listens, once started; -1 is nowhere.
    metrics_port: where metrics are, once started; -1 is nowhere but on the HTTP port.
  """

  def __init__(
    self,
    options: HostOptions,
    admin: AdminActions | None = None,
    *,
    may_exit: bool = False,
    shared: SharedPorts | None = None,
  ):
    """Must be made inside the running event loop.

    Args:
      options: flags' values.
      admin: what the admin service may do; needed where it has a port.
      may_exit: the process is the server's own, and may be ended where the server cannot end itself.
      shared: of one of several front ends, whose port is reserved; None is the only one.

    Raises:
      ConfigError: a file of keys or certificates cannot be used, the admin service would be open to others, or
        step_timeout_s is too short.
    """
    options.check()
    self._options = options
    self._shared = shared
    self._may_exit = may_exit
    self._loop = asyncio.get_running_loop()
    self._service = Service(
      stream_stall_timeout_s=options.stream_stall_timeout_s,
      strict_requests=options.strict_requests,
      memory=MemoryLimit(options.max_resident_mb),
    )
    self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    self._keys = ApiKeys.load(options.api_key_file) if options.api_key_file else None
    self._certificates = make_certificates(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    self._access_log = CallLog(options.access_log)
    self._census = shared.census if shared is not None else own_census(self._service, self._access_log)
    self._feed = Feed(self._service, self._census)
    self._metrics = Metrics(self._service, self._census, vllm_names=options.vllm_metric_names)
    open_methods = (HEALTH_METHODS, REFLECTION_METHODS) if options.open_reflection else (HEALTH_METHODS,)
    self._server = new_server(
      options,
      CallInterceptor(
        keys=self._keys,
        open_methods=open_methods,
        max_concurrent_rpcs=options.max_concurrent_rpcs,
        max_response_bytes=options.max_response_bytes,
        access_log=self._access_log,
      ),
      shares_port=shared is not None,
    )
    self._admin = admin
    self._admin_server: grpc.aio.Server | None = None
    self.admin_port = -1
    self._http: Listener | None = None
    self.http_port = -1
    self._metrics_http: Listener | None = None
    self.metrics_port = -1
    self._backend: Backend | None = None
    self._engine: EngineThread | None = None
    self._stop = asyncio.Event()
    self._hurry = asyncio.Event()
    self._engine_ended = asyncio.Event()
    self._failure: BaseException | None = None

  async def start(self) -> int:
    """Binds and answers STARTING; returns the port.

    Raises:
      ConfigError: the address cannot be bound.
    """
    options = self._options
    watchdog.watch_loop(self._loop, self.fail, self._service.count_unhandled)
    is_reserved = self._shared is not None
    port = bind(self._server, options.host, options.port, self._certificates, is_reserved=is_reserved)
    self._service.register(self._server)
    health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
    if options.enable_vllm_api:
      VllmEngine(self._service, self._census).register(self._server)
    if options.enable_reflection:
      vllm = (VLLM_SERVICE,) if options.enable_vllm_api else ()
      add_reflection(self._server, GENERATION_SERVICE, MODEL_SERVICE, *vllm)
    await self._health.set(LIVENESS, _SERVING)
    await self._set_ready(False)
    await self._start_http()
    await self._start_metrics()
    await self._start_admin()
    await self._server.start()
    return port

  async def _start_admin(self) -> None:
    if self._options.admin_port >= 0:
      assert self._admin is not None, "an admin port needs its actions"
      service = AdminService(self._admin, self._begin_drain, self._report)
      self._admin_server, self.admin_port = await start_admin(
        self._options, service, self._health, self._certificates, self._access_log
      )

  @property
  def invariants(self) -> Invariants | None:
    """The server's books, once it serves."""
    return self._service.invariants

  async def _report(self) -> GetInvariantsResponse:
    if self._service.invariants is None:
      raise Starting("the model is loading; try again when the health check says SERVING")
    return self._service.invariants.report(await self._census())

  def _begin_drain(self) -> int:
    """Unlike a second signal, never makes it end early. Returns the live requests."""
    if not self.stopping:
      self.request_stop()
    return len(self._backend.generations) if self._backend is not None else 0

  async def _start_http(self) -> None:
    options = self._options
    if options.http_port < 0:
      return
    http_options = HttpOptions(
      host=options.http_host or options.host,
      port=options.http_port,
      max_body_bytes=options.max_request_bytes,
      max_requests=options.max_concurrent_rpcs,
      stream_stall_timeout_s=options.stream_stall_timeout_s,
      allowed_hosts=tuple(options.http_allowed_hosts),
      strict_requests=options.strict_requests,
      tool_call_parser=options.tool_call_parser,
    )
    extra_routes = routes(
      self._service, self._metrics, self._feed, stream_stall_timeout_s=options.stream_stall_timeout_s
    )
    app = make_app(
      self._service,
      http_options,
      api_keys=self._keys,
      access_log=self._access_log,
      extra_routes=extra_routes,
      public_paths=PUBLIC_PATHS,
    )
    self._http = Listener(app, http_options, self._certificates, None if self._shared is None else self._shared.http)
    self.http_port = await self._http.start()

  async def _start_metrics(self) -> None:
    """A port for scrapers and probes, which have neither keys nor certificates; it tells counts alone."""
    options = self._options
    if options.metrics_port < 0:
      return
    http_options = HttpOptions(
      host=options.http_host or options.host,
      port=options.metrics_port,
      allowed_hosts=tuple(options.http_allowed_hosts),
    )
    app = make_probe_app(
      self._service,
      http_options,
      access_log=self._access_log,
      extra_routes=[metrics_route(self._service, self._metrics)],
    )
    listening = None if self._shared is None else self._shared.metrics
    self._metrics_http = Listener(app, http_options, None, listening, flag="metrics_port")
    self.metrics_port = await self._metrics_http.start()

  def emit(self, events: list[TokenEvent]) -> None:
    """The engine's way out: one wake of the loop a step. Called on the engine's thread."""
    self._loop.call_soon_threadsafe(self._dispatch, events)

  async def serve(self, backend: Backend) -> None:
    """Starts the engine's thread and says ready."""
    self._backend = backend
    self._engine = EngineThread(
      backend.engine,
      self.fail,
      self._engine_ended,
      step_timeout_s=self._options.step_timeout_s,
      grace_s=self._options.watchdog_grace_s,
      may_exit=self._may_exit,
    )
    self._engine.start()
    self._service.open(backend)
    self._service.watchdog = self._engine.watchdog
    engine = backend.engine.inner if isinstance(backend.engine, LocalEngine) else None
    self._service.invariants = Invariants(engine, backend.generations, backend.engine.num_held, self.fail)
    if self._options.debug_invariants:
      self._service.invariants.start()
    await self._set_ready(True)
    sd_notify.tell("READY=1\nSTATUS=serving")

  def fail(self, error: BaseException) -> None:
    """Ends the server as the engine's death does. Any thread; what comes first is what is told."""

    def take() -> None:
      self._failure = self._failure or error
      self._engine_ended.set()

    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
      self._loop.call_soon_threadsafe(take)

  def own_counts(self) -> Counts:
    """What this process has counted."""
    return own_counts(self._service, self._access_log)

  def request_stop(self) -> None:
    """Begins the drain; the second time, ends at once. Safe as a signal handler of the loop."""
    if self._stop.is_set():
      self._hurry.set()
    self._stop.set()

  @property
  def stopping(self) -> bool:
    """Whether a stop was asked for."""
    return self._stop.is_set()

  async def wait_stopped(self) -> int:
    """Watches the engine until a stop is asked for or the engine ends, then takes everything down.

    Returns:
      The process's exit code: 0 after a drain, 1 after the engine's death or another thread's, or if the engine stands.
    """
    await first_of(self._stop.wait(), self._engine_ended.wait())
    if self._service.invariants is not None:
      self._service.invariants.stop()
    if not self._engine_ended.is_set():
      sd_notify.tell("STOPPING=1\nSTATUS=draining")
      await self._drain()
    if self._engine_ended.is_set() or self._backend is not None and self._backend.engine.dead is not None:
      return await self._take_down_dead()
    return await self._take_down()

  async def _drain(self) -> None:
    options, backend = self._options, self._backend
    # Readiness only: a process that drains is alive, and must not be killed for it.
    await self._set_ready(False)
    if backend is None:
      return
    _log.info("draining: %d live requests, at most %g s", len(backend.generations), options.drain_timeout_s)
    await first_of(asyncio.sleep(options.drain_delay_s), self._hurry.wait(), self._engine_ended.wait())
    self._service.close(Draining("the server is going down; send the request to another one"))
    await first_of(
      backend.generations.wait_idle(),
      asyncio.sleep(options.drain_timeout_s),
      self._hurry.wait(),
      self._engine_ended.wait(),
    )
    if len(backend.generations):
      _log.warning("drain: ending %d requests that did not finish", len(backend.generations))
      backend.generations.fail_all(
        Draining("the server went down before this request was finished; send it again, to another one")
      )

  async def _take_down(self) -> int:
    self._feed.close()
    farewell_s = _HURRIED_FAREWELL_S if self._hurry.is_set() else _FAREWELL_S
    farewells = [self._server.stop(farewell_s)]
    if self._http is not None:
      farewells.append(self._http.stop(farewell_s))
    await asyncio.gather(*farewells)
    if self._admin_server is not None:
      await self._admin_server.stop(None)
    if self._metrics_http is not None:
      await self._metrics_http.stop(farewell_s)
    if self._engine is not None:
      hurried = self._hurry.is_set() or self._failure is not None
      await self._engine.stop(
        0.0 if self._failure is not None else farewell_s,
        _HURRIED_FAREWELL_S if hurried else self._options.watchdog_grace_s,
      )
    self._service.shutdown()
    self._access_log.close()
    if self._engine is not None and self._engine.is_alive:
      _log.critical("the engine did not stop")
      return watchdog.EXIT_CODE
    backend = self._backend
    if backend is not None and self._shared is None:
      used = (await backend.engine.report()).stats.blocks_used
      _log.info("stopped: %d requests served, %d KV blocks in use", backend.generations.num_started, used)
    return 0

  async def _take_down_dead(self) -> int:
    backend = self._backend
    cause = self._failure or (backend.engine.dead if backend is not None else None)
    if isinstance(cause, InvariantBroken):
      _log.critical("invariant broken: %s", cause)
    local = backend.engine if backend is not None else None
    incident = f"incident {local.incident}: " if isinstance(local, LocalEngine) else ""
    _log.critical("%sthe engine has failed, the server ends", incident, exc_info=cause)
    if self._engine is not None:
      self._engine.stop_watching()
    if self._may_exit:
      watchdog.exit_soon(self._options.watchdog_grace_s)
    sd_notify.tell("STOPPING=1\nSTATUS=failed")
    error = EngineDead("the engine has failed; send the request again, to another server")
    self._service.close(error)
    self._service.ready = self._service.alive = False
    await self._health.enter_graceful_shutdown()
    if backend is not None:
      backend.generations.fail_all(error)
    await self._take_down()
    return watchdog.EXIT_CODE

  def _dispatch(self, events: Sequence[TokenEvent]) -> None:
    assert self._backend is not None, "no request can be submitted before serve()"
    self._backend.generations.dispatch(events)

  async def _set_ready(self, ready: bool) -> None:
    self._service.ready = ready
    for name in (GENERATION_SERVICE, MODEL_SERVICE):
      await self._health.set(name, _SERVING if ready else _NOT_SERVING)


async def first_of(*waits) -> None:
  """Returns when the first of several waits is over, with the others cancelled."""
  tasks = [asyncio.ensure_future(wait) for wait in waits]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
  finally:
    for task in tasks:
      task.cancel()
