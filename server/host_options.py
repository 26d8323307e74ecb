"""What an operator may set of the network side: declarations, and nothing that acts."""

import dataclasses

from engine.errors import ConfigError
from engine.settings import setting

# An idle engine turns every 0.2 s, and a machine may be busy.
_SHORTEST_STEP_TIMEOUT_S = 0.5
_ADDRESS, _LIMITS, _SECURITY = "Addresses", "Limits of clients", "Security"
_OBSERVE, _LIFE = "Observability", "Life of the server"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
  """The settings of the network side. Times in seconds."""

  host: str = setting(
    "127.0.0.1", "Address to bind. Beyond this machine, give it TLS and API keys.", group=_ADDRESS, common=True
  )
  port: int = setting(50051, "gRPC's TCP port; 0: a free one.", group=_ADDRESS, at_least=0, at_most=65535, common=True)
  http_host: str = setting("", "Address of the HTTP side; empty: that of --host.", group=_ADDRESS)
  http_port: int = -1  # -1: no HTTP; server/flags.py declares the flag, whose default depends on --port
  metrics_port: int = setting(
    -1,
    "Port for /metrics, /health and /ready alone, without TLS and keys; 0: a free one; -1: on the HTTP port only.",
    group=_OBSERVE,
    at_least=-1,
    at_most=65535,
    common=True,
  )
  admin_host: str = setting(
    "127.0.0.1", "Address of the admin service. Beyond this machine it uses the same TLS.", group=_ADDRESS
  )
  admin_port: int = setting(
    -1, "Port of the admin service; 0: a free one; -1: none.", group=_ADDRESS, at_least=-1, at_most=65535, common=True
  )
  max_request_bytes: int = setting(
    4 << 20, "Largest message taken; a larger one is RESOURCE_EXHAUSTED or 413.", group=_LIMITS, at_least=1024
  )
  max_response_bytes: int = setting(64 << 20, "Largest message sent.", group=_LIMITS, at_least=1024)
  max_metadata_bytes: int = setting(16 << 10, "Largest metadata or headers of a call.", group=_LIMITS, at_least=1024)
  max_concurrent_rpcs: int = setting(
    2048, "Calls at once; more are refused with RESOURCE_EXHAUSTED or 429.", group=_LIMITS, at_least=1
  )
  # As many again may be over without the event loop having seen it, and then it refuses more: floods come no further.
  max_concurrent_streams: int = setting(
    100,
    "Calls at once on one gRPC connection; clients queue further ones. Raise it for routers that send everything over "
    "one connection, where no stranger reaches the port: it bounds what a flood of resets does to others.",
    group=_LIMITS,
    at_least=1,
    common=True,
  )
  max_grpc_connections: int = setting(4096, "More are closed at once.", group=_LIMITS, at_least=1)
  max_http_connections: int = setting(4096, "More are closed at once.", group=_LIMITS, at_least=1)
  keepalive_time_s: float = setting(60.0, "Ping a silent client this often.", group=_LIMITS, unit="s", at_least=1)
  keepalive_timeout_s: float = setting(20.0, "Longest wait for a ping's answer.", group=_LIMITS, unit="s", at_least=1)
  min_ping_interval_s: float = setting(
    10.0,
    "Clients may ping this often while nothing is sent; a long prefill sends nothing.",
    group=_LIMITS,
    unit="s",
    at_least=0,
  )
  max_connection_idle_s: float = setting(
    1800.0, "Close connections without a call for this long; 0: never.", group=_LIMITS, unit="s", at_least=0
  )
  max_connection_age_s: float = setting(
    0.0,
    "Close older connections gracefully, so that balancers can rebalance; 0: never.",
    group=_LIMITS,
    unit="s",
    at_least=0,
  )
  max_connection_age_grace_s: float = setting(
    600.0, "How long the calls on such a connection may still take.", group=_LIMITS, unit="s", at_least=0
  )
  stream_stall_timeout_s: float = setting(
    30.0, "Stop the work for a client that reads nothing for this long.", group=_LIMITS, unit="s", at_least=0.1
  )
  strict_requests: bool = setting(
    False,
    "Refuse unknown fields with HTTP 400, instead of naming them in the header x-sluice-ignored-fields.",
    group=_LIMITS,
    common=True,
  )
  http_allowed_hosts: tuple[str, ...] = setting(
    (),
    "Values that the Host header may have; * is anything. Empty: local names alone, if the address is local and there "
    "are no API keys, so that no web page can reach the model through DNS; else anything.",
    group=_SECURITY,
  )
  api_key_file: str = setting(
    "",
    "Keys, one a line with its tenant if it has one, # for comments; every call but health needs one. The server reads "
    "the file again when it changes.",
    group=_SECURITY,
    common=True,
  )
  admin_api_key_file: str = setting(
    "", "As --api_key_file, for the admin service, which refuses the keys of users.", group=_SECURITY
  )
  tls_cert_file: str = setting(
    "", "PEM certificate; the server reads it again when it changes.", group=_SECURITY, common=True
  )
  tls_key_file: str = setting("", "The PEM key of --tls_cert_file.", group=_SECURITY, common=True)
  tls_client_ca_file: str = setting(
    "", "PEM authorities; clients need a certificate of theirs.", group=_SECURITY, common=True
  )
  enable_reflection: bool = setting(True, "Answer grpcurl and the like.", group=_SECURITY)
  open_reflection: bool = setting(False, "With API keys: reflection needs none.", group=_SECURITY)
  enable_vllm_api: bool = setting(
    False, "Also answer vllm.grpc.engine.VllmEngine, for routers made for it.", group=_ADDRESS, common=True
  )
  tool_call_parser: str = "auto"  # declared in server/flags.py, which knows the parsers
  access_log: str = setting(
    "",
    "File for a line of JSON a call, without prompt or output; - is standard error; empty: none.",
    group=_OBSERVE,
    common=True,
  )
  vllm_metric_names: bool = setting(
    False, "/metrics also has vLLM's names, for dashboards made for vLLM.", group=_OBSERVE
  )
  enable_channelz: bool = setting(False, "gRPC's own statistics, on the admin port.", group=_OBSERVE)
  drain_delay_s: float = setting(
    0.0,
    "After SIGTERM, go on accepting this long while balancers learn that the server is not ready: about 15 behind one.",
    group=_LIFE,
    unit="s",
    at_least=0,
  )
  drain_timeout_s: float = setting(
    30.0, "How long running requests may take to finish then.", group=_LIFE, unit="s", at_least=0, common=True
  )
  step_timeout_s: float = setting(
    60.0,
    "An engine or an event loop that stands still this long ends the server; 0: nothing is watched.",
    group=_LIFE,
    unit="s",
    at_least=0,
  )
  watchdog_grace_s: float = setting(
    5.0, "From there to the hard end of the process, for clients to be told.", group=_LIFE, unit="s", at_least=0.1
  )
  max_resident_mb: int = setting(
    0,
    "Refuse new work while the server holds more memory, before the system kills it; 0: no limit.",
    group=_LIFE,
    unit="MiB",
    at_least=0,
    common=True,
  )

  def share(self, count: int) -> "HostOptions":
    """For each of `count` processes that connections fall on by chance: together they let in no more than one would."""
    return dataclasses.replace(
      self,
      max_concurrent_rpcs=max(1, self.max_concurrent_rpcs // count),
      max_grpc_connections=max(1, self.max_grpc_connections // count),
      max_http_connections=max(1, self.max_http_connections // count),
    )

  def check_options(self) -> None:
    """Raises ConfigError for what no server can be run with, beside the limits of single settings."""
    if 0 < self.step_timeout_s < _SHORTEST_STEP_TIMEOUT_S:
      raise ConfigError(
        f"step_timeout_s={self.step_timeout_s:g} is below {_SHORTEST_STEP_TIMEOUT_S:g}, within which a healthy "
        "engine may not turn; raise --step_timeout_s, or set it to 0 for no watchdog"
      )
