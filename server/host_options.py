"""What an operator may set of the network side. Only values."""

import dataclasses

from engine.errors import ConfigError

# An idle engine turns every 0.2 s, and a machine may be busy.
_SHORTEST_STEP_TIMEOUT_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
  """What the network side may be told. Times in seconds.

  Attributes:
    host, port: address to bind; port 0 lets the system choose.
    max_request_bytes, max_response_bytes: larger messages are RESOURCE_EXHAUSTED.
    max_metadata_bytes: the same for a call's metadata.
    max_concurrent_rpcs: more are RESOURCE_EXHAUSTED at once.
    max_concurrent_streams: calls on one connection; gRPC's clients keep further ones to themselves until one ends. As
      many again may be over without the event loop having seen it, and then it is refused more: floods come no further.
    keepalive_time_s, keepalive_timeout_s: ping a silent client, and how long to wait for its answer.
    min_ping_interval_s: clients may ping this often while nothing is sent (a long prefill sends nothing).
    max_grpc_connections: more are closed at once.
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
    admin_api_key_file: as api_key_file, for the admin service, which refuses the keys of users.
    enable_channelz: give gRPC's own statistics on the admin port.
    http_host, http_port: address of the HTTP side; an empty host is `host`, port -1 is no HTTP.
    max_http_connections: more are closed at once.
    http_allowed_hosts, strict_requests, tool_call_parser: as in HttpOptions.
    vllm_metric_names: /metrics also has vLLM's names.
    debug_invariants: check the server's books all the time, and end of the first that is wrong.
    metrics_port: a port for /metrics, /health and /ready alone, in plain text and without a key; -1 is none.
    max_resident_mb: new work is RESOURCE_EXHAUSTED while the server is larger, MiB; 0 is no limit.
  """

  host: str = "127.0.0.1"
  port: int = 50051
  max_request_bytes: int = 4 << 20
  max_response_bytes: int = 64 << 20
  max_metadata_bytes: int = 16 << 10
  max_concurrent_rpcs: int = 2048
  max_concurrent_streams: int = 100
  keepalive_time_s: float = 60.0
  keepalive_timeout_s: float = 20.0
  min_ping_interval_s: float = 10.0
  max_grpc_connections: int = 4096
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
  max_http_connections: int = 4096
  http_allowed_hosts: tuple[str, ...] = ()
  strict_requests: bool = False
  tool_call_parser: str = "auto"
  vllm_metric_names: bool = False
  debug_invariants: bool = False
  metrics_port: int = -1
  max_resident_mb: int = 0

  def share(self, count: int) -> "HostOptions":
    """For each of `count` processes that connections fall on by chance: together they let in no more than one would."""
    return dataclasses.replace(
      self,
      max_concurrent_rpcs=max(1, self.max_concurrent_rpcs // count),
      max_grpc_connections=max(1, self.max_grpc_connections // count),
      max_http_connections=max(1, self.max_http_connections // count),
    )

  def check(self) -> None:
    """Raises ConfigError for what no server can be run with."""
    if 0 < self.step_timeout_s < _SHORTEST_STEP_TIMEOUT_S:
      raise ConfigError(
        f"step_timeout_s={self.step_timeout_s:g} is below {_SHORTEST_STEP_TIMEOUT_S:g}, within which a healthy "
        "engine may not turn; raise --step_timeout_s, or set it to 0 for no watchdog"
      )
