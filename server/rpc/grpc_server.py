"""Makes gRPC servers and binds their ports: limits, reflection, the admin server. Knows no engine and no RPC."""

from collections.abc import Callable
import dataclasses
import ipaddress
import socket
from typing import Any

from google.protobuf import descriptor, descriptor_pool
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from engine.errors import ConfigError
from server.host_options import HostOptions
from server.rpc.admin_service import ADMIN_SERVICE, CHANNELZ_SERVICE
from server.rpc.awaited_operations import awaited_to_the_end
from server.rpc.call_interceptor import CallInterceptor
from server.security.api_keys import AdminKeys, ApiKeys
from server.security.certificates import Certificates
from server.telemetry.access_log import AccessLog

# For the admin server, which runs beside the users' server.
_ADMIN_CONNECTIONS = 64
# Seconds from the connection to the client's first SETTINGS frame, TLS included. gRPC's default is 120.
_HANDSHAKE_TIMEOUT_S = 20.0
# Calls above the limit: health checks, and calls that the interceptor is about to refuse.
_SPARE_RPCS = 1024
# Calls of all connections that wait for the event loop: as many as 80 connections may have by default. With gRPC's own
# limits, 1,000 and 3,000, clients that open and reset streams get other clients' calls cancelled. Each takes 15 kB.
_MAX_PENDING_RPCS = 16_384
# A loopback address that no server uses.
_ELSEWHERE = "127.83.67.1"


class Health(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
  """The health servicer of grpc_health, with List (gRFC A90), which the original does not implement."""

  async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
    """Returns the status of every service."""
    statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._server_status.items()}
    return health_pb2.HealthListResponse(statuses=statuses)  # pyright: ignore[reportAttributeAccessIssue]  (no stub)


class ReservedPort:
  """Holds a TCP port that several processes of one server will listen on, each with a socket of its own.

  gRPC accepts no listening socket from outside, so its servers can share a port only by SO_REUSEPORT, which lets any
  process of the same user join unnoticed. So the port is bound exclusively at first, which fails if it is in use. Then
  it is opened for the processes of this server, and shut when all of them listen: every socket on an address must allow
  sharing, and this one withdraws its consent. Linux skips that check in a fast path (inet_csk_get_port) until a socket
  that does not share is bound to the port on another address. A server on all addresses leaves no other address, so
  there programs of the same user that request sharing can still join.

  Attributes:
    port: its number.
    is_shut: whether other processes are kept out.
  """

  def __init__(self, host: str, port: int, flag: str = ""):
    """Binds the port.

    Args:
      host, port: address; port 0 lets the system choose.
      flag: prefix of the names of the flags "host" and "port", for errors.

    Raises:
      ConfigError: it cannot be bound.
    """
    self._elsewhere: socket.socket | None = None
    try:
      family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
      self._socket = socket.socket(family, kind, protocol)
      try:
        # Otherwise closing connections of an earlier server would keep the port busy.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
      except OSError:
        self._socket.close()
        raise
    except OSError as error:
      raise ConfigError(
        f"cannot listen on {_address(host, port)}: {error.strerror}; choose another --{flag}port or --{flag}host"
      ) from None
    self.port: int = self._socket.getsockname()[1]
    self.is_shut = self._end_short_cut()

  def open(self) -> None:
    """Lets processes of the same user that request sharing listen on the port."""
    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    self.is_shut = False

  def shut(self) -> None:
    """Keeps further processes out, where that is possible; those that listen continue."""
    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    self.is_shut = self._end_short_cut()

  def _end_short_cut(self) -> bool:
    if self._elsewhere is not None:
      self._elsewhere.close()
    self._elsewhere = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
      self._elsewhere.bind((_ELSEWHERE, self.port))
    except OSError:
      return False
    return True

  def close(self) -> None:
    """Closes the port."""
    self._socket.close()
    if self._elsewhere is not None:
      self._elsewhere.close()


async def start_admin(
  options: HostOptions,
  add_services: Callable[[grpc.aio.Server], None],
  health_servicer: health_pb2_grpc.HealthServicer,
  certificates: Certificates | None,
  access_log: AccessLog,
) -> tuple[grpc.aio.Server, int]:
  """Starts the admin server. Users' keys and load do not reach it, and it answers until the end of a drain.

  Args:
    options: its address and its callers.
    add_services: adds the services besides health and reflection.
    health_servicer: the one of the public port.
    certificates: for TLS beyond this machine; None is plain text.
    access_log: receives a line for each call.

  Returns:
    The running server and its port.

  Raises:
    ConfigError: the address cannot be bound, or others could reach it.
  """
  users = ApiKeys(options.api_key_file) if options.api_key_file else None
  keys = AdminKeys(ApiKeys(options.admin_api_key_file), users) if options.admin_api_key_file else None
  local = is_local(options.admin_host)
  if not local and (keys is None or certificates is None):
    raise ConfigError(
      f"admin_host={options.admin_host} can be reached by others, who could stop the server; give "
      "--admin_api_key_file, --tls_cert_file and --tls_key_file, or keep it at 127.0.0.1"
    )
  server = make_grpc_server(
    dataclasses.replace(options, max_grpc_connections=_ADMIN_CONNECTIONS),
    CallInterceptor(access_log, max_response_bytes=options.max_response_bytes, keys=keys),
    counts_connections=False,
  )
  port = bind_port(server, options.admin_host, options.admin_port, None if local else certificates, flag="admin_")
  add_services(server)
  health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
  if options.enable_reflection:
    add_reflection(server, ADMIN_SERVICE, *([CHANNELZ_SERVICE] if options.enable_channelz else []))
  await server.start()
  return server, port


def make_grpc_server(
  options: HostOptions,
  interceptor: CallInterceptor,
  *,
  shares_port: bool = False,
  counts_connections: bool = True,
) -> grpc.aio.Server:
  """Makes a server that is not bound yet.

  Args:
    options: its limits.
    interceptor: wraps every method.
    shares_port: whether other processes of this server listen on its port; see ReservedPort.
    counts_connections: whether channelz numbers its connections, as `ConnectionWatch` needs it.
  """
  arguments = {
    # Otherwise a second server would bind the same port silently and take half of the connections.
    "grpc.so_reuseport": int(shares_port),
    "grpc.max_receive_message_length": options.max_request_bytes,
    "grpc.max_send_message_length": options.max_response_bytes,
    # gRPC refuses at random above the first limit, and always above the second.
    "grpc.max_metadata_size": options.max_metadata_bytes,
    "grpc.absolute_max_metadata_size": options.max_metadata_bytes,
    "grpc.max_concurrent_streams": options.max_concurrent_streams,
    # Ended streams that the event loop has not seen yet. With gRPC's default of none, a client that uses all its
    # streams is refused a call right after one of its calls has ended.
    "grpc.http2.max_deallocating_streams": options.max_concurrent_streams,
    # gRPC cancels calls at random above the first limit, and all calls above the second.
    "grpc.server.max_pending_requests": _MAX_PENDING_RPCS,
    "grpc.server.max_pending_requests_hard_limit": _MAX_PENDING_RPCS,
    "grpc.max_allowed_incoming_connections": options.max_grpc_connections,
    "grpc.server_handshake_timeout_ms": round(1000 * _HANDSHAKE_TIMEOUT_S),
    "grpc.keepalive_time_ms": round(1000 * options.keepalive_time_s),
    "grpc.keepalive_timeout_ms": round(1000 * options.keepalive_timeout_s),
    # gRPC's bandwidth pings delay keepalive pings, and by default time out after a minute.
    "grpc.http2.ping_timeout_ms": round(1000 * options.keepalive_timeout_s),
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_recv_ping_interval_without_data_ms": round(1000 * options.min_ping_interval_s),
    "grpc.http2.max_ping_strikes": 2,
    "grpc.enable_channelz": int(counts_connections),
  }
  if options.max_connection_idle_s:
    arguments["grpc.max_connection_idle_ms"] = round(1000 * options.max_connection_idle_s)
  if options.max_connection_age_s:
    arguments["grpc.max_connection_age_ms"] = round(1000 * options.max_connection_age_s)
    arguments["grpc.max_connection_age_grace_ms"] = round(1000 * options.max_connection_age_grace_s)
  return awaited_to_the_end(
    lambda: grpc.aio.server(
      interceptors=(interceptor,),
      options=tuple(arguments.items()),
      # A backstop for calls that the interceptor does not see: gRPC's own limit gives no reason and no retry time, and
      # would refuse health checks. It allows a health watch on every connection.
      maximum_concurrent_rpcs=options.max_concurrent_rpcs + options.max_grpc_connections + _SPARE_RPCS,
    )
  )


class _Symbols:
  """protobuf's pool of descriptors, whose search for a symbol also finds methods; its own finds none."""

  def __getattr__(self, name: str) -> Any:
    return getattr(descriptor_pool.Default(), name)

  def FindFileContainingSymbol(self, symbol: str) -> descriptor.FileDescriptor:
    """Returns the file that defines a symbol. Raises KeyError."""
    pool = descriptor_pool.Default()
    try:
      return pool.FindFileContainingSymbol(symbol)
    except KeyError:
      return pool.FindMethodByName(symbol).containing_service.file


def add_reflection(server: grpc.aio.Server, *services: str) -> None:
  """Adds reflection as v1alpha and as v1, which newer tools try first; both have the same messages on the wire."""
  names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
  pool: Any = _Symbols()
  reflection.enable_server_reflection(names, server, pool=pool)
  servicer = reflection.aio.ReflectionServicer(names, pool=pool)
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
  """Whether only this machine can reach the address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"


def bind_port(
  server: grpc.aio.Server,
  host: str,
  port: int,
  certificates: Certificates | None,
  *,
  flag: str = "",
  is_reserved: bool = False,
) -> int:
  """Binds a server to its address.

  Args:
    server: a server that has not started.
    host, port: address; port 0 lets the system choose.
    certificates: for TLS; None is plain text.
    flag: prefix of the names of the flags "host" and "port", for errors.
    is_reserved: whether a ReservedPort holds the port for this server.

  Returns:
    The port.

  Raises:
    ConfigError: it cannot be bound.
  """
  if not is_reserved:
    ReservedPort(host, port, flag).close()  # gRPC reports a busy port in several log lines; this does in one
  address = _address(host, port)
  try:
    if certificates is not None:
      return server.add_secure_port(address, certificates.credentials(counts=not flag))  # of the public port
    return server.add_insecure_port(address)
  except RuntimeError as error:
    raise ConfigError(f"cannot listen on {address}: {error}; choose another --{flag}port or --{flag}host") from None


def _address(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
