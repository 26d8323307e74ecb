"""gRPC servers and their ports: limits, binding, reflection, the admin service. Knows no engine and no RPC of ours."""

from collections.abc import Callable
import dataclasses
import ipaddress
import socket
from typing import Any

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

# Of the admin service's server, beside which there are those of users.
_ADMIN_CONNECTIONS = 64
# From a connection to the client's first settings, TLS included. gRPC's own limit is 120.
_HANDSHAKE_TIMEOUT_S = 20.0
# Calls beside the limited ones: probes, and calls that are about to be refused.
_SPARE_RPCS = 1024
# That wait for the event loop, of all connections: what 80 of them may leave by default. With gRPC's own limits, 1,000
# and 3,000, connections that open and reset streams get their neighbours' calls cancelled. Each takes 15 kB.
_MAX_PENDING_RPCS = 16_384
# Of the loopback, and nobody's.
_ELSEWHERE = "127.83.67.1"


class Health(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
  """grpc_health's, with List (gRFC A90), which it answers with an exception."""

  async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
    """The status of every service."""
    statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._server_status.items()}
    return health_pb2.HealthListResponse(statuses=statuses)  # pyright: ignore[reportAttributeAccessIssue]  (no stub)


class ReservedPort:
  """Holds a TCP port that several processes of one server will listen on, each by a socket of its own.

  gRPC takes no listening socket from elsewhere, so its servers can share a port by SO_REUSEPORT alone, which lets any
  process of the same user join in silence. So the port is taken exclusively at first, which fails if anybody has it,
  then opened for the processes of this server, and shut when all of them listen: every socket on an address must
  consent, and this one withdraws. Linux has a short cut past that (inet_csk_get_port), which ends when a socket that
  does not share is bound to the port on another address. A server on all addresses leaves no other, so that programs
  of the same user that ask for sharing can still join.

  Attributes:
    port: its number.
    is_shut: nobody else can join.
  """

  def __init__(self, host: str, port: int, flag: str = ""):
    """Takes it.

    Args:
      host, port: address; port 0 lets the system choose.
      flag: what stands before "host" and "port" in the names of the flags.

    Raises:
      ConfigError: it cannot be bound.
    """
    self._elsewhere: socket.socket | None = None
    try:
      family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
      self._socket = socket.socket(family, kind, protocol)
      try:
        # Or connections of a server before this one, which are on their way out, would keep it.
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
    """Lets processes of the same user listen on it who ask for sharing."""
    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    self.is_shut = False

  def shut(self) -> None:
    """Lets no more of them, where that is possible; those who listen go on."""
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
    """Gives it back."""
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
  """A server of its own: no key and no load of a user reaches it, and it answers until the end of a drain.

  Args:
    options: where, and who may call.
    add_services: adds what it serves besides health and reflection.
    health_servicer: as on the public port.
    certificates: for TLS beyond this machine; None is plain text.
    access_log: gets a line for each call.

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
  """A server that is bound nowhere yet.

  Args:
    options: its limits.
    interceptor: stands before every method.
    shares_port: other processes of this server listen on its port; see ReservedPort.
    counts_connections: as `ConnectionWatch` needs it of the one server whose connections it tells of.
  """
  arguments = {
    # Where it is not meant, a second server would bind silently and take half of the connections.
    "grpc.so_reuseport": int(shares_port),
    "grpc.max_receive_message_length": options.max_request_bytes,
    "grpc.max_send_message_length": options.max_response_bytes,
    # The first is where gRPC begins to refuse at random, the second where it always does.
    "grpc.max_metadata_size": options.max_metadata_bytes,
    "grpc.absolute_max_metadata_size": options.max_metadata_bytes,
    "grpc.max_concurrent_streams": options.max_concurrent_streams,
    # Beside them those that are over, which the event loop has not seen yet. By default none: then clients that use all
    # the calls they may have are refused the one that follows one that has just ended.
    "grpc.http2.max_deallocating_streams": options.max_concurrent_streams,
    # The first is where gRPC begins to cancel anybody's at random, the second where it cancels all.
    "grpc.server.max_pending_requests": _MAX_PENDING_RPCS,
    "grpc.server.max_pending_requests_hard_limit": _MAX_PENDING_RPCS,
    "grpc.max_allowed_incoming_connections": options.max_grpc_connections,
    "grpc.server_handshake_timeout_ms": round(1000 * _HANDSHAKE_TIMEOUT_S),
    "grpc.keepalive_time_ms": round(1000 * options.keepalive_time_s),
    "grpc.keepalive_timeout_ms": round(1000 * options.keepalive_timeout_s),
    # Other pings than keepalive's (they measure bandwidth) keep it from being sent, and wait a minute by default.
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
      # gRPC's own limit says neither why nor when to retry, and would refuse probes of health: it is for what the
      # interceptor does not see, and leaves room for it: clients may watch health on every connection.
      maximum_concurrent_rpcs=options.max_concurrent_rpcs + options.max_grpc_connections + _SPARE_RPCS,
    )
  )


def add_reflection(server: grpc.aio.Server, *services: str) -> None:
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


def bind_port(
  server: grpc.aio.Server,
  host: str,
  port: int,
  certificates: Certificates | None,
  *,
  flag: str = "",
  is_reserved: bool = False,
) -> int:
  """Where a server will listen.

  Args:
    server: has not started.
    host, port: address; port 0 lets the system choose.
    certificates: for TLS; None is plain text.
    flag: what stands before "host" and "port" in the names of the flags.
    is_reserved: the port is held for this server, see ReservedPort.

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
