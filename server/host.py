"""One server's life: bind, say STARTING, serve, watch the engine, drain, end. Knows no model and no flag."""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import ipaddress
import logging
import socket
import threading

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from engine.disaggregated import AnyEngine
from engine.errors import ConfigError, InvariantBroken
from engine.request import TokenEvent
from server import sd_notify, watchdog
from server.admin import ADMIN_SERVICE, CHANNELZ_SERVICE, AdminActions, AdminService
from server.auth import ApiKeys
from server.call_log import CallLog
from server.errors import Draining, EngineDead, Starting
from server.http.app import make_app, make_probe_app
from server.http.listener import Listener
from server.http.options import HttpOptions
from server.interceptors import HEALTH_METHODS, REFLECTION_METHODS, CallInterceptor
from server.invariants import Invariants
from server.memory import MemoryLimit
from server.metrics import Metrics
from server.page.feed import Feed
from server.page.routes import PUBLIC_PATHS, metrics_route, routes
from server.proto.admin_pb2 import GetInvariantsResponse
from server.service import GENERATION_SERVICE, MODEL_SERVICE, Backend, Service
from server.tls import Certificates, make_certificates
from server.vllm_engine import VLLM_SERVICE, VllmEngine
from server.watchdog import Watchdog

# A process has to be told apart from a machine: liveness is "", readiness is each service's name.
LIVENESS = ""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Calls beside the limited ones: probes, and calls that are about to be refused.
_SPARE_RPCS = 1024
# Time for statuses to reach clients after the last generation has ended; and where somebody does not want to wait.
_FAREWELL_S = 2.0
_HURRIED_FAREWELL_S = 0.4
# An idle engine turns every 0.2 s, and a machine may be busy.
_SHORTEST_STEP_TIMEOUT_S = 0.5

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
  """What the network side may be told. Times in seconds.

  Attributes:
    host, port: address to bind; port 0 lets the system choose.
    max_request_bytes, max_response_bytes: larger messages are RESOURCE_EXHAUSTED.
    max_metadata_bytes: the same for a call's metadata.
    max_concurrent_rpcs: more are RESOURCE_EXHAUSTED at once.
    max_concurrent_streams: calls on one connection. gRPC's clients keep further ones to themselves until one ends, but
      what they sent before they knew is UNAVAILABLE; so it is above max_concurrent_rpcs, whose refusal says more.
    keepalive_time_s, keepalive_timeout_s: ping a silent client, and how long to wait for its answer.
    min_ping_interval_s: clients may ping this often while nothing is sent (a long prefill sends nothing).
    max_connection_idle_s: close connections without a call for this long; 0 is never.
    max_connection_age_s: close connections gracefully after it, so that balancers can rebalance; 0 is never.
    max_connection_age_grace_s: how long the calls on such a connection may still take.
    stream_stall_timeout_s: stop the work for a client that takes nothing for this long.
    drain_delay_s: after SIGTERM, go on accepting while balancers learn that the server is not ready.
    drain_timeout_s: how long what is running may take to finish then.
    step_timeout_s: an engine or an event loop that stands this long ends the server; 0: nothing is watched.
    watchdog_grace_s: from there to the hard end of the process, for clients to be told.
    enable_reflection: answer grpcurl and the like.
    api_key_file: calls need one of its keys, all but those of health; empty: none is asked for.
    open_reflection: reflection needs no key either.
    enable_vllm_api: also answer vllm.grpc.engine.VllmEngine, for routers made for it.
    tls_cert_file, tls_key_file, tls_client_ca_file: as in Certificates; empty: no TLS, no certificates of clients.
    access_log: a file, or "-" for standard error, that gets a line for each call; empty: none is written.
    admin_host, admin_port: address of the admin service; port -1 is none. Beyond this machine it uses the same TLS.
    admin_api_key_file: as api_key_file, for the admin service; the keys of users are not good there.
    enable_channelz: collect gRPC's own statistics, and give them on the admin port.
    http_host, http_port: address of the HTTP side; an empty host is `host`, port -1 is no HTTP.
    http_allowed_hosts, strict_requests, tool_call_parser: as in HttpOptions.
    vllm_metric_names: /metrics also has vLLM's names.
    debug_invariants: check the server's books all the time, and end of the first that is wrong.
    metrics_port: a port for /metrics, /health and /ready alone, in plain text and without a key; -1 is none.
    max_resident_mb: new work is RESOURCE_EXHAUSTED while the process is larger, MiB; 0 is no limit.
  """

  host: str = "127.0.0.1"
  port: int = 50051
  max_request_bytes: int = 4 << 20
  max_response_bytes: int = 64 << 20
  max_metadata_bytes: int = 16 << 10
  max_concurrent_rpcs: int = 2048
  max_concurrent_streams: int = 4096
  keepalive_time_s: float = 60.0
  keepalive_timeout_s: float = 20.0
  min_ping_interval_s: float = 10.0
  max_connection_idle_s: float = 1800.0
  max_connection_age_s: float = 0.0
  max_connection_age_grace_s: float = 600.0
  stream_stall_timeout_s: float = 30.0
  drain_delay_s: float = 0.0
  drain_timeout_s: float = 30.0
  step_timeout_s: float = 60.0
  watchdog_grace_s: float = 5.0
  enable_reflection: bool = True
  api_key_file: str = ""
  open_reflection: bool = False
  enable_vllm_api: bool = False
  tls_cert_file: str = ""
  tls_key_file: str = ""
  tls_client_ca_file: str = ""
  access_log: str = ""
  admin_host: str = "127.0.0.1"
  admin_port: int = -1
  admin_api_key_file: str = ""
  enable_channelz: bool = False
  http_host: str = ""
  http_port: int = -1
  http_allowed_hosts: tuple[str, ...] = ()
  strict_requests: bool = False
  tool_call_parser: str = "auto"
  vllm_metric_names: bool = False
  debug_invariants: bool = False
  metrics_port: int = -1
  max_resident_mb: int = 0


class Host:
  """A gRPC server, an HTTP server and the thread of their engine. All methods but `emit` belong to one event loop.

  Attributes:
    http_port: where HTTP listens, once started; -1 is nowhere.
    admin_port: where the admin service listens, once started; -1 is nowhere.
    metrics_port: where metrics are, once started; -1 is nowhere but on the HTTP port.
  """

  def __init__(self, options: HostOptions, admin: AdminActions | None = None, *, may_exit: bool = False):
    """Must be made inside the running event loop.

    Args:
      options: flags' values.
      admin: what the admin service may do; needed where it has a port.
      may_exit: the process is the server's own, and may be ended where the server cannot end itself.

    Raises:
      ConfigError: a file of keys or certificates cannot be used, the admin service would be open to others, or
        step_timeout_s is too short.
    """
    if 0 < options.step_timeout_s < _SHORTEST_STEP_TIMEOUT_S:
      raise ConfigError(
        f"step_timeout_s={options.step_timeout_s:g} is below {_SHORTEST_STEP_TIMEOUT_S:g}, within which a healthy "
        "engine may not turn; raise --step_timeout_s, or set it to 0 for no watchdog"
      )
    self._options = options
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
    self._feed = Feed(self._service)
    self._metrics = Metrics(self._service, self._access_log, vllm_names=options.vllm_metric_names)
    open_methods = (HEALTH_METHODS, REFLECTION_METHODS) if options.open_reflection else (HEALTH_METHODS,)
    self._server = _new_server(
      options,
      CallInterceptor(
        keys=self._keys,
        open_methods=open_methods,
        max_concurrent_rpcs=options.max_concurrent_rpcs,
        max_response_bytes=options.max_response_bytes,
        access_log=self._access_log,
      ),
    )
    self._admin = admin
    self._admin_server: grpc.aio.Server | None = None
    self.admin_port = -1
    self._http: Listener | None = None
    self.http_port = -1
    self._metrics_http: Listener | None = None
    self.metrics_port = -1
    self._backend: Backend | None = None
    self._thread: threading.Thread | None = None
    self._stop_engine = threading.Event()
    self._stop = asyncio.Event()
    self._hurry = asyncio.Event()
    self._engine_ended = asyncio.Event()
    self._failure: BaseException | None = None
    self._watchdog: Watchdog | None = None

  async def start(self) -> int:
    """Binds and answers STARTING; returns the port.

    Raises:
      ConfigError: the address cannot be bound.
    """
    options = self._options
    watchdog.watch_loop(self._loop, self.fail, self._service.count_unhandled)
    port = _bind(self._server, options.host, options.port, "", self._certificates)
    self._service.register(self._server)
    health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
    if options.enable_vllm_api:
      VllmEngine(self._service).register(self._server)
    if options.enable_reflection:
      vllm = (VLLM_SERVICE,) if options.enable_vllm_api else ()
      _add_reflection(self._server, GENERATION_SERVICE, MODEL_SERVICE, *vllm)
    await self._health.set(LIVENESS, _SERVING)
    await self._set_ready(False)
    await self._start_http()
    await self._start_metrics()
    await self._start_admin()
    await self._server.start()
    return port

  async def _start_admin(self) -> None:
    """A server of its own: no key and no load of a user reaches it, and it answers until the end of a drain."""
    options = self._options
    if options.admin_port < 0:
      return
    assert self._admin is not None, "an admin port needs its actions"
    keys = ApiKeys.load(options.admin_api_key_file) if options.admin_api_key_file else None
    local = is_local(options.admin_host)
    if not local and (keys is None or self._certificates is None):
      raise ConfigError(
        f"admin_host={options.admin_host} can be reached by others, who could stop the server; give "
        "--admin_api_key_file, --tls_cert_file and --tls_key_file, or keep it at 127.0.0.1"
      )
    server = _new_server(options, CallInterceptor(keys=keys, access_log=self._access_log))
    self.admin_port = _bind(
      server, options.admin_host, options.admin_port, "admin_", None if local else self._certificates
    )
    AdminService(self._admin, self._begin_drain, self._report).register(server, enable_channelz=options.enable_channelz)
    health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
    if options.enable_reflection:
      _add_reflection(server, ADMIN_SERVICE, *([CHANNELZ_SERVICE] if options.enable_channelz else []))
    await server.start()
    self._admin_server = server

  @property
  def invariants(self) -> Invariants | None:
    """The server's books, once it serves."""
    return self._service.invariants

  def _report(self) -> GetInvariantsResponse:
    if self._service.invariants is None:
      raise Starting("the model is loading; try again when the health check says SERVING")
    return self._service.invariants.report()

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
    self._http = Listener(app, http_options, self._certificates)
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
    self._metrics_http = Listener(app, http_options, flag="metrics_port")
    self.metrics_port = await self._metrics_http.start()

  def emit(self, events: list[TokenEvent]) -> None:
    """The engine's way out: one wake of the loop a step. Called on the engine's thread."""
    self._loop.call_soon_threadsafe(self._dispatch, events)

  async def serve(self, backend: Backend) -> None:
    """Starts the engine's thread and says ready."""
    self._backend = backend
    self._thread = threading.Thread(target=self._run_engine, args=(backend.engine,), name="engine", daemon=True)
    self._thread.start()
    self._service.open(backend)
    self._service.invariants = Invariants(backend.engine, backend.generations, self.fail)
    if self._options.debug_invariants:
      self._service.invariants.start()
    if self._options.step_timeout_s:
      self._watchdog = self._service.watchdog = Watchdog(
        timeout_s=self._options.step_timeout_s,
        grace_s=self._options.watchdog_grace_s,
        heartbeat=lambda: backend.engine.heartbeat,
        on_stuck=lambda what: self.fail(EngineDead(what)),
        may_exit=self._may_exit,
      )
      self._watchdog.start()
    await self._set_ready(True)
    sd_notify.tell("READY=1\nSTATUS=serving")

  def fail(self, error: BaseException) -> None:
    """Ends the server as the engine's death does. Any thread; what comes first is what is told."""

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

  @property
  def stopping(self) -> bool:
    """Whether a stop was asked for."""
    return self._stop.is_set()

  async def wait_stopped(self) -> int:
    """Watches the engine until a stop is asked for or the engine ends, then takes everything down.

    Returns:
      The process's exit code: 0 after a drain, 1 after the engine's death or another thread's, or if the engine stands.
    """
    await _first(self._stop.wait(), self._engine_ended.wait())
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
    await _first(asyncio.sleep(options.drain_delay_s), self._hurry.wait(), self._engine_ended.wait())
    self._service.close(Draining("the server is going down; send the request to another one"))
    await _first(
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
    await self._stop_thread(farewell_s)
    self._service.shutdown()
    self._access_log.close()
    if self._thread is not None and self._thread.is_alive():
      _log.critical("the engine did not stop")
      return watchdog.EXIT_CODE
    backend = self._backend
    if backend is not None:
      stats = backend.engine.stats()
      _log.info("stopped: %d requests served, %d KV blocks in use", backend.generations.num_started, stats.blocks_used)
    return 0

  async def _stop_thread(self, farewell_s: float) -> None:
    """Lets the engine take in the last aborts, and its thread end; one that is stuck is not waited for."""
    backend = self._backend
    if backend is not None and self._failure is None:
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(farewell_s):
          while backend.engine.num_live and backend.engine.dead is None:
            await asyncio.sleep(0.005)
    if self._watchdog is not None:
      self._watchdog.stop()
    self._stop_engine.set()
    if self._thread is not None:
      wait_s = _HURRIED_FAREWELL_S if self._hurry.is_set() or self._failure else self._options.watchdog_grace_s
      await self._loop.run_in_executor(None, self._thread.join, wait_s)

  async def _take_down_dead(self) -> int:
    backend = self._backend
    cause = self._failure or (backend.engine.dead if backend is not None else None)
    if isinstance(cause, InvariantBroken):
      _log.critical("invariant broken: %s", cause)
    _log.critical("the engine has failed, the server ends", exc_info=cause)
    if self._watchdog is not None:
      self._watchdog.stop()
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

  def _run_engine(self, engine: AnyEngine) -> None:
    try:
      engine.run(self._stop_engine)
    except BaseException as error:
      # Exceptions end the engine, which says so itself; whatever is not one of those ends the thread.
      self.fail(error)
    finally:
      if not self._stop_engine.is_set():
        self._loop.call_soon_threadsafe(self._engine_ended.set)

  async def _set_ready(self, ready: bool) -> None:
    self._service.ready = ready
    for name in (GENERATION_SERVICE, MODEL_SERVICE):
      await self._health.set(name, _SERVING if ready else _NOT_SERVING)


async def _first(*waits) -> None:
  """Returns when the first of several waits is over, with the others cancelled."""
  tasks = [asyncio.ensure_future(wait) for wait in waits]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
  finally:
    for task in tasks:
      task.cancel()


def _new_server(options: HostOptions, interceptor: CallInterceptor) -> grpc.aio.Server:
  arguments = {
    # With port sharing a second server would bind silently and take half of the connections.
    "grpc.so_reuseport": 0,
    "grpc.max_receive_message_length": options.max_request_bytes,
    "grpc.max_send_message_length": options.max_response_bytes,
    # The first is where gRPC begins to refuse at random, the second where it always does.
    "grpc.max_metadata_size": options.max_metadata_bytes,
    "grpc.absolute_max_metadata_size": options.max_metadata_bytes,
    "grpc.max_concurrent_streams": options.max_concurrent_streams,
    "grpc.keepalive_time_ms": round(1000 * options.keepalive_time_s),
    "grpc.keepalive_timeout_ms": round(1000 * options.keepalive_timeout_s),
    # Other pings than keepalive's (they measure bandwidth) keep it from being sent, and wait a minute by default.
    "grpc.http2.ping_timeout_ms": round(1000 * options.keepalive_timeout_s),
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_recv_ping_interval_without_data_ms": round(1000 * options.min_ping_interval_s),
    "grpc.http2.max_ping_strikes": 2,
    "grpc.enable_channelz": int(options.enable_channelz),
  }
  if options.max_connection_idle_s:
    arguments["grpc.max_connection_idle_ms"] = round(1000 * options.max_connection_idle_s)
  if options.max_connection_age_s:
    arguments["grpc.max_connection_age_ms"] = round(1000 * options.max_connection_age_s)
    arguments["grpc.max_connection_age_grace_ms"] = round(1000 * options.max_connection_age_grace_s)
  return grpc.aio.server(
    interceptors=(interceptor,),
    options=tuple(arguments.items()),
    # gRPC's own limit says neither why nor when to retry, and would refuse probes of health: it is for what the
    # interceptor does not see, and leaves room for it.
    maximum_concurrent_rpcs=options.max_concurrent_rpcs + _SPARE_RPCS,
  )


def _add_reflection(server: grpc.aio.Server, *services: str) -> None:
  """v1alpha, and the same under v1's name, which newer tools ask first: the messages are the same on the wire."""
  names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
  reflection.enable_server_reflection(names, server)
  servicer = reflection.aio.ReflectionServicer(names)
  server.add_generic_rpc_handlers(
    (
      grpc.method_handlers_generic_handler(
        "grpc.reflection.v1.ServerReflection",
        {
          "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
          )
        },
      ),
    )
  )


def is_local(host: str) -> bool:
  """Whether only this machine reaches what is bound there."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"


def _bind(server: grpc.aio.Server, host: str, port: int, flag: str, certificates: Certificates | None) -> int:
  """The bound port. `flag` is what stands before "host" and "port" in the names of the flags."""
  _check_free(host, port, flag)
  address = _address(host, port)
  try:
    if certificates is not None:
      return server.add_secure_port(address, certificates.credentials())
    return server.add_insecure_port(address)
  except RuntimeError as error:
    raise ConfigError(f"cannot listen on {address}: {error}; choose another --{flag}port or --{flag}host") from None


def _check_free(host: str, port: int, flag: str) -> None:
  """gRPC reports a busy port in several log lines; ask the system first and say it in one."""
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      probe.bind(address)
  except OSError as error:
    raise ConfigError(
      f"cannot listen on {_address(host, port)}: {error.strerror}; choose another --{flag}port or --{flag}host"
    ) from None


def _address(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
