"""Runs one server: binds, answers STARTING, serves, watches the engine, drains and ends. Knows no model and no flag."""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import logging
import socket
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2_grpc

from engine.request import TokenEvent
from server.errors import Draining, EngineDead
from server.generation.engine_client import EngineClient, LocalEngine
from server.generation.serving_state import Backend, ServingState
from server.host_options import HostOptions
from server.http.batches.batch_routes import make_refusing_routes
from server.http.http_listener import Listener
from server.http.http_options import HttpOptions
from server.http.openai.app import make_app, make_probe_app
from server.lifecycle import systemd_notify
from server.lifecycle.composition import Composition
from server.lifecycle.lifetime import LIVENESS, NOT_SERVING, SERVING, Lifetime, wait_first_of
from server.page.live_feed import Feed
from server.page.page_routes import PUBLIC_PATHS, make_metrics_route, make_page_routes
from server.page.prometheus_metrics import Metrics
from server.rpc import graceful_stop
from server.rpc.admin_service import AdminActions
from server.rpc.call_interceptor import HEALTH_METHODS, REFLECTION_METHODS, CallInterceptor
from server.rpc.connection_watch import ConnectionWatch
from server.rpc.grpc_server import add_reflection, bind_port, make_grpc_server
from server.rpc.sluice_service import GENERATION_SERVICE, MODEL_SERVICE, SluiceService
from server.security.api_keys import AdminKeys, ApiKeys
from server.security.memory_limit import MemoryLimit
from server.telemetry.process_counts import Census, ProcessCounts

if TYPE_CHECKING:
  from server.http.batches.batch_endpoints import BatchEndpoints

__all__ = ["Host", "HostOptions", "SharedPorts"]

_METRICS_CONNECTIONS = 64

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SharedPorts:
  """The parts that several front end processes share.

  Attributes:
    http, metrics: listening sockets that all of them accept from; None if there is no such port.
    census: counts of all the server's processes.
    others: the ids of the server's other processes, once it serves.
  """

  http: socket.socket | None
  metrics: socket.socket | None
  census: Census
  others: Callable[[], Sequence[int]]


class Host(Lifetime):
  """A gRPC server, an HTTP server and their engine's thread. All methods but `emit` belong to one event loop."""

  def __init__(
    self,
    options: HostOptions,
    admin: AdminActions | None = None,
    *,
    may_exit: bool = False,
    shared: SharedPorts | None = None,
    composition: Composition | None = None,
  ):
    """Must be made inside the running event loop.

    Args:
      options: values of the flags.
      admin: actions of the admin service; required with an admin port.
      may_exit: whether the host may end the process; only in the server's own process.
      shared: parts shared with other front ends, whose port is reserved; None for a single front end.
      composition: the program's; None adds no parts.

    Raises:
      ConfigError: a file of keys or certificates cannot be used, the admin service would be open to others, or
        step_timeout_s is too short.
    """
    super().__init__(options, admin, may_exit=may_exit, composition=composition)
    self._shared = shared
    self._state = ServingState(
      MemoryLimit(options.max_resident_mb, shared.others if shared is not None else tuple),
      closes_objects=not options.json_schema_additional_properties,
    )
    self._service = SluiceService(
      self._state,
      stream_stall_timeout_s=options.stream_stall_timeout_s,
      strict_requests=options.strict_requests,
    )
    self._keys = ApiKeys(options.api_key_file) if options.api_key_file else None
    self._admin_keys = (
      AdminKeys(ApiKeys(options.admin_api_key_file), self._keys) if options.admin_api_key_file else None
    )
    self._census = shared.census if shared is not None else self._own_census
    self._feed = Feed(self._state, self._census)
    self._metrics = Metrics(
      self._state, self._census, vllm_names=options.vllm_metric_names, more=lambda: self._composition.collect_metrics()
    )
    open_methods = (HEALTH_METHODS, *self._composition.open_methods(options))
    open_methods += (REFLECTION_METHODS,) if options.open_reflection else ()
    certificates = self._certificates
    self.connections = ConnectionWatch((lambda: certificates.num_handshakes) if certificates is not None else None)
    self._calls = CallInterceptor(
      self._access_log,
      max_response_bytes=options.max_response_bytes,
      keys=self._keys,
      open_methods=open_methods,
      max_concurrent_rpcs=options.max_concurrent_rpcs,
      on_peer=self.connections.called,
    )
    self._server = make_grpc_server(options, self._calls, shares_port=shared is not None)
    self._port = 0
    self._services = (GENERATION_SERVICE, MODEL_SERVICE)  # services that generate or describe the model
    self._http: Listener | None = None
    self._batches: BatchEndpoints | None = None
    self._metrics_http: Listener | None = None
    self._backend: Backend | None = None

  async def start_listening(self) -> int:
    """Binds and answers STARTING; returns the port.

    Raises:
      ConfigError: the address cannot be bound.
    """
    options = self._options
    is_reserved = self._shared is not None
    self._port = bind_port(self._server, options.host, options.port, self._certificates, is_reserved=is_reserved)
    self.connections.start_counting()
    self._service.register(self._server)
    health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
    self._services += self._composition.add_services(self._server, options, self._state, self._service, self._census)
    if options.enable_reflection:
      add_reflection(self._server, *self._services)
    await self._health.set(LIVENESS, SERVING)
    await self._set_ready(False)
    await self._start_http()
    await self._start_metrics()
    await self._start_admin(self._census)
    await self._server.start()
    self._reserve = graceful_stop.DescriptorReserve()
    return self._port

  def _num_live(self) -> int:
    return len(self._backend.generations) if self._backend is not None else 0

  def _require_engine(self) -> EngineClient:
    return self._state.require_backend().engine

  async def _start_http(self) -> None:
    options = self._options
    if options.http_port < 0:
      return
    http_options = HttpOptions(
      host=options.http_host or options.host,
      port=options.http_port,
      max_body_bytes=options.max_request_bytes,
      max_header_bytes=options.max_metadata_bytes,
      max_requests=options.max_concurrent_rpcs,
      max_connections=options.max_http_connections,
      stream_stall_timeout_s=options.stream_stall_timeout_s,
      allowed_hosts=tuple(options.http_allowed_hosts),
      allowed_origins=tuple(options.http_allowed_origins),
      strict_requests=options.strict_requests,
      tool_call_parser=options.tool_call_parser,
      reasoning_parser=options.reasoning_parser,
      max_stored_responses=options.max_stored_responses,
    )
    extra_routes = make_page_routes(
      self._state, self._metrics, self._feed, stream_stall_timeout_s=options.stream_stall_timeout_s
    )
    if options.batch_dir:
      # Imported here, because SQLite and the parser of uploads would slow every start.
      from server.http.batches.batch_endpoints import BatchEndpoints
      from server.http.batches.batch_store import BatchLimits

      limits = BatchLimits(
        max_file_bytes=options.max_batch_file_bytes, max_tenant_bytes=options.max_batch_storage_mb << 20
      )
      self._batches = BatchEndpoints(
        self._state, http_options, options.batch_dir, limits, max_lines_at_once=options.max_batch_lines_at_once
      )
    extra_routes += make_refusing_routes() if self._batches is None else self._batches.make_routes()
    app = make_app(
      self._state,
      http_options,
      api_keys=self._keys,
      admin_keys=self._admin_keys,
      access_log=self._access_log,
      extra_routes=extra_routes,
      public_paths=PUBLIC_PATHS,
    )
    self._http = Listener(app, http_options, self._certificates, None if self._shared is None else self._shared.http)
    self.http_port = await self._http.start_listening()

  async def _start_metrics(self) -> None:
    """Starts a port for scrapers and probes without keys or certificates; it serves only metrics and health."""
    options = self._options
    if options.metrics_port < 0:
      return
    http_options = HttpOptions(
      host=options.http_host or options.host,
      port=options.metrics_port,
      max_connections=_METRICS_CONNECTIONS,
      allowed_hosts=tuple(options.http_allowed_hosts),
    )
    app = make_probe_app(
      self._state,
      http_options,
      access_log=self._access_log,
      extra_routes=[make_metrics_route(self._state, self._metrics)],
    )
    listening = None if self._shared is None else self._shared.metrics
    self._metrics_http = Listener(app, http_options, None, listening, flag="metrics_port")
    self.metrics_port = await self._metrics_http.start_listening()

  def emit(self, events: list[TokenEvent]) -> None:
    """Receives the engine's events; wakes the loop once a step. Called on the engine's thread."""
    self._loop.call_soon_threadsafe(self._dispatch, events)

  async def serve(self, backend: Backend) -> None:
    """Starts the engine's thread and reports ready."""
    self._backend = backend
    engine = backend.engine.inner if isinstance(backend.engine, LocalEngine) else None
    self._composition.begin_serving(
      engine,
      backend.generations,
      backend.tokenizer,
      num_held=backend.engine.num_held,
      fail=self.fail,
    )
    self._start_engine(engine)
    self._state.begin_serving(backend)
    if self._batches is not None:
      await self._batches.start_running(backend)
    await self._set_ready(True)
    systemd_notify.notify_systemd("READY=1\nSTATUS=serving")

  def own_counts(self) -> ProcessCounts:
    """Returns this process's counts; read, never changed."""
    counts = self._count_process()
    if self._backend is not None:
      generations = self._backend.generations
      counts.observations = generations.observations
      counts.num_started, counts.num_live = generations.num_started, len(generations)
      counts.num_ended = generations.num_ended
      counts.num_late_events = generations.num_late_events
    return counts

  async def _own_census(self) -> ProcessCounts:
    """The census of a server with one process."""
    return self.own_counts()

  async def _drain(self) -> None:
    options, backend = self._options, self._backend
    # Readiness only: a draining process is alive, and must not be killed for that.
    await self._set_ready(False)
    if self._batches is not None:
      await self._batches.stop_running()
    if backend is None:
      return
    _log.info("draining: %d live requests, at most %g s", len(backend.generations), options.drain_timeout_s)
    await wait_first_of(asyncio.sleep(options.drain_delay_s), self._hurry.wait(), self._engine_ended.wait())
    self._state.refuse_work(Draining("the server is shutting down; send the request to another server"))
    await wait_first_of(
      self._state.wait_idle(),
      asyncio.sleep(options.drain_timeout_s),
      self._hurry.wait(),
      self._engine_ended.wait(),
    )
    if len(backend.generations):
      _log.warning("drain: ending %d requests that did not finish", len(backend.generations))
    backend.generations.end_all(Draining("the server shut down before this request finished; retry on another server"))

  async def _take_down(self) -> int:
    self._feed.close()
    self.connections.stop_counting()
    farewell_s = self._farewell_s
    farewells = [graceful_stop.stop_grpc_server(self._server, self._port, self._calls, self._reserve, farewell_s)]
    if self._http is not None:
      farewells.append(self._http.stop_listening(farewell_s))
    await asyncio.gather(*farewells)
    if self._batches is not None:
      await self._batches.close()
    if self._metrics_http is not None:
      await self._metrics_http.stop_listening(farewell_s)
    code = await self._stop_engine(self._backend.generations.num_started if self._backend is not None else 0)
    self._state.end_threads()
    return code

  async def _take_down_dead(self, cause: BaseException) -> None:
    backend = self._backend
    error = EngineDead("the engine has failed; retry on another server")
    self._state.refuse_work(error)
    self._state.ready = self._state.alive = False
    await self._health.enter_graceful_shutdown()
    if backend is not None:
      backend.generations.end_all(error)
    if self._batches is not None:
      await self._batches.stop_running()
    await self._take_down()

  def _dispatch(self, events: Sequence[TokenEvent]) -> None:
    assert self._backend is not None, "serve() comes before the first request"
    self._backend.generations.dispatch_events(events)

  async def _set_ready(self, ready: bool) -> None:
    self._state.ready = ready
    for name in self._services:
      await self._health.set(name, SERVING if ready else NOT_SERVING)
