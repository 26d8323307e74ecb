"""Declares the settings of the network side. Does nothing else."""

import dataclasses
import ipaddress
import re

from engine.errors import ConfigError
from engine.settings import setting

# An idle engine's loop turns every 0.2 s; the rest is a margin for a busy machine.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]+")  # as browsers write it
_SHORTEST_STEP_TIMEOUT_S = 0.5
_ADDRESS, _LIMITS, _SECURITY = "Addresses", "Limits of clients", "Security"
_OBSERVE, _LIFE = "Observability", "Life of the server"
_ROLE = "Prefill and decode servers"
ROLES = ("both", "prefill", "decode")
KV_TRANSPORTS = ("auto", "grpc", "jax")
_DEVICES = "Devices and programs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemaSettings:
  """What a JSON schema means, in the server and in LLM."""

  json_schema_additional_properties: bool = setting(
    False,
    "Let objects of a JSON schema that list properties, or patterns of their names, and do not set "
    "additionalProperties have others too, as the standard says. By default, and under strict, they have none: a model "
    "that may add properties adds them until max_tokens.",
    group=_LIMITS,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions(SchemaSettings):
  """The settings of the network side. Times are in seconds."""

  host: str = setting(
    "127.0.0.1",
    "Address to bind. If other machines can reach it, also set up TLS and API keys.",
    group=_ADDRESS,
    common=True,
  )
  port: int = setting(50051, "gRPC's TCP port; 0: a free one.", group=_ADDRESS, at_least=0, at_most=65535, common=True)
  http_host: str = setting("", "Address of the HTTP API; empty: that of --host.", group=_ADDRESS)
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
    "127.0.0.1",
    "Address of the admin service. If other machines can reach it, it uses the same TLS.",
    group=_ADDRESS,
  )
  admin_port: int = setting(
    -1, "Port of the admin service; 0: a free one; -1: none.", group=_ADDRESS, at_least=-1, at_most=65535, common=True
  )
  max_request_bytes: int = setting(
    4 << 20,
    "Largest request message; a larger one returns RESOURCE_EXHAUSTED or HTTP 413.",
    group=_LIMITS,
    at_least=1024,
  )
  max_response_bytes: int = setting(64 << 20, "Largest response message.", group=_LIMITS, at_least=1024)
  max_metadata_bytes: int = setting(16 << 10, "Largest metadata or headers of a call.", group=_LIMITS, at_least=1024)
  max_concurrent_rpcs: int = setting(
    2048, "Calls at once; further ones return RESOURCE_EXHAUSTED or HTTP 429.", group=_LIMITS, at_least=1
  )
  # The same number of calls may have ended unseen by the event loop; the server refuses more, which bounds a flood.
  max_concurrent_streams: int = setting(
    100,
    "Calls at once on one gRPC connection; clients queue further ones. Raise it for routers that use one connection, "
    "if only trusted clients reach the port: it bounds the effect of a flood of resets on other clients.",
    group=_LIMITS,
    at_least=1,
    common=True,
  )
  max_grpc_connections: int = setting(
    4096, "gRPC connections at once; the server closes further ones.", group=_LIMITS, at_least=1
  )
  max_http_connections: int = setting(
    4096, "HTTP connections at once; the server closes further ones.", group=_LIMITS, at_least=1
  )
  keepalive_time_s: float = setting(60.0, "Ping a silent client this often.", group=_LIMITS, unit="s", at_least=1)
  keepalive_timeout_s: float = setting(
    20.0, "Longest wait for the answer to a ping.", group=_LIMITS, unit="s", at_least=1
  )
  min_ping_interval_s: float = setting(
    10.0,
    "Shortest interval of clients' pings while no data flows, as during a long prefill.",
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
    600.0, "Time for calls on a connection beyond that age to finish.", group=_LIMITS, unit="s", at_least=0
  )
  stream_stall_timeout_s: float = setting(
    30.0, "Abort a request whose client reads nothing for this long.", group=_LIMITS, unit="s", at_least=0.1
  )
  batch_dir: str = setting(
    "",
    "Folder for the files and batches of /v1/files and /v1/batches, which survive restarts; empty: none are served. "
    "One server a folder; not with --frontend_processes.",
    group=_LIMITS,
  )
  max_batch_file_bytes: int = setting(200 << 20, "Largest input file of a batch.", group=_LIMITS, at_least=1024)
  max_batch_storage_mb: int = setting(
    10240,
    "Files in --batch_dir of one tenant together; further uploads return HTTP 413.",
    group=_LIMITS,
    unit="MiB",
    at_least=1,
  )
  max_batch_lines_at_once: int = setting(
    0,
    "Lines of batches that run at once; 0: as many as leave an eighth of --max_num_seqs to other requests.",
    group=_LIMITS,
    at_least=0,
  )
  strict_requests: bool = setting(
    False,
    "Refuse unknown fields with HTTP 400, instead of naming them in the header x-sluice-ignored-fields.",
    group=_LIMITS,
    common=True,
  )
  max_stored_responses: int = setting(
    1024,
    "Responses of /v1/responses that the server keeps in memory for later requests; the oldest leave first, also "
    "beyond 256 MiB. All front end processes share them. 0: none.",
    group=_LIMITS,
    at_least=0,
  )
  http_allowed_hosts: tuple[str, ...] = setting(
    (),
    "Allowed values of the Host header; * allows any. Empty: only local names, if the address is local and there are "
    "no API keys, so that no web page can reach the model through DNS; otherwise any.",
    group=_SECURITY,
  )
  http_allowed_origins: tuple[str, ...] = setting(
    (),
    "Origins of web pages whose scripts may call the server, such as https://chat.example.com; * allows any. The "
    "server's own page needs none.",
    group=_SECURITY,
  )
  api_key_file: str = setting(
    "",
    "File of API keys, one a line with an optional tenant; # starts a comment. Every call except health checks needs a "
    "key. The server reloads the file when it changes.",
    group=_SECURITY,
    common=True,
  )
  admin_api_key_file: str = setting(
    "",
    "File of API keys for the admin service and for loading LoRA adapters over HTTP; both refuse users' keys.",
    group=_SECURITY,
  )
  tls_cert_file: str = setting(
    "", "PEM certificate; the server reloads it when it changes.", group=_SECURITY, common=True
  )
  tls_key_file: str = setting("", "PEM key of --tls_cert_file.", group=_SECURITY, common=True)
  tls_client_ca_file: str = setting(
    "", "PEM certificate authorities; clients need a certificate from one of them.", group=_SECURITY, common=True
  )
  enable_reflection: bool = setting(True, "Serve gRPC reflection, which grpcurl uses.", group=_SECURITY)
  open_reflection: bool = setting(False, "Serve reflection without an API key.", group=_SECURITY)
  enable_vllm_api: bool = setting(
    False, "Also serve vllm.grpc.engine.VllmEngine, for routers made for it.", group=_ADDRESS, common=True
  )
  role: str = setting(
    "both",
    "Which part of a request this server runs. prefill: prompts of decode servers, and no others. decode: everything, "
    "but prefill servers compute long prompts. both: everything.",
    group=_ROLE,
    choices=ROLES,
  )
  prefill_servers: tuple[str, ...] = setting(
    (), "With --role=decode: HOST:PORT of the prefill servers' gRPC ports, separated by commas.", group=_ROLE
  )
  transfer_secret_file: str = setting(
    "",
    "With --role: file with one line of 16 to 256 printable characters, the same on all servers; without it a prefill "
    "server refuses. Mode 0600 or 0640.",
    group=_ROLE,
  )
  transfer_ca_file: str = setting(
    "",
    "With --role=decode: PEM certificate authorities of the prefill servers, which then are called over TLS, with "
    "--tls_cert_file as the certificate of the client; empty: plain text.",
    group=_ROLE,
  )
  kv_transport: str = setting(
    "auto",
    "With --role: how KV moves. auto: through shared memory on one machine, else over gRPC. grpc: over gRPC. jax: by "
    "jax.experimental.transfer, on both servers. That is experimental: it has no TLS and no secret, and a wrong frame "
    "at its port ends the process, so only the other servers may reach it.",
    group=_ROLE,
    choices=KV_TRANSPORTS,
  )
  kv_transport_address: str = setting(
    "127.0.0.1:0",
    "With --kv_transport=jax: IP:PORT of a prefill server, as its peers reach it; the next port carries the data. Port "
    "0: any two. Of a decode server: the IP address from which it pulls, with port 0.",
    group=_ROLE,
  )
  trust_prefill_header: bool = setting(
    False,
    "With --role=decode: let the header x-prefiller-host-port name any prefill server, not only those of "
    "--prefill_servers. Whoever can set it learns the secret and the prompts: only behind a router that sets it.",
    group=_ROLE,
  )
  min_remote_prefill_tokens: int = setting(
    256,
    "With --role=decode: compute prompts here if fewer of their tokens are not cached.",
    group=_ROLE,
    unit="tokens",
    at_least=1,
  )
  remote_prefill_timeout_s: float = setting(
    30.0,
    "With --role=decode: longest wait for a prefill server, with its queue and the transfer; then the prompt is "
    "computed here.",
    group=_ROLE,
    unit="s",
    at_least=0.1,
  )
  max_lease_mb: int = setting(
    512,
    "With --role=prefill: memory for KV that decode servers have yet to take; a prompt that finds it full is refused.",
    group=_ROLE,
    unit="MiB",
    at_least=1,
  )
  lease_timeout_s: float = setting(
    10.0,
    "With --role=prefill: time until KV that no decode server took is dropped.",
    group=_ROLE,
    unit="s",
    at_least=0.1,
  )
  tool_call_parser: str = "auto"  # declared in server/flags.py, which knows the parsers
  reasoning_parser: str = "auto"  # as above
  access_log: str = setting(
    "",
    "File for one JSON line a call, without prompt or output; -: standard error; empty: none.",
    group=_OBSERVE,
    common=True,
  )
  vllm_metric_names: bool = setting(
    False, "Also export metrics under vLLM's names, for dashboards made for vLLM.", group=_OBSERVE
  )
  enable_channelz: bool = setting(False, "Serve gRPC's channelz statistics on the admin port.", group=_OBSERVE)
  drain_delay_s: float = setting(
    0.0,
    "After SIGTERM, keep accepting requests this long, until load balancers see that the server is not ready; about 15 "
    "behind a load balancer.",
    group=_LIFE,
    unit="s",
    at_least=0,
  )
  drain_timeout_s: float = setting(
    30.0, "Time for running requests to finish during a drain.", group=_LIFE, unit="s", at_least=0, common=True
  )
  step_timeout_s: float = setting(
    60.0,
    "End the server if the engine or an event loop makes no progress for this long; 0: no watchdog.",
    group=_LIFE,
    unit="s",
    at_least=0,
  )
  watchdog_grace_s: float = setting(
    5.0,
    "Time to send errors to clients before the watchdog kills the process.",
    group=_LIFE,
    unit="s",
    at_least=0.1,
  )
  max_resident_mb: int = setting(
    0,
    "Refuse new requests while the server holds more memory than this; 0: no limit.",
    group=_LIFE,
    unit="MiB",
    at_least=0,
    common=True,
  )

  def share(self, count: int) -> "HostOptions":
    """Returns the options of each of `count` processes, which together admit no more than one process would."""
    return dataclasses.replace(
      self,
      max_concurrent_rpcs=max(1, self.max_concurrent_rpcs // count),
      max_grpc_connections=max(1, self.max_grpc_connections // count),
      max_http_connections=max(1, self.max_http_connections // count),
    )

  def check_options(self) -> None:
    """Raises ConfigError for values that no server can run with. Limits of single settings are checked elsewhere."""
    for origin in self.http_allowed_origins:
      if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ConfigError(
          f"http_allowed_origins={origin!r:.80} is not an origin; write SCHEME://HOST or SCHEME://HOST:PORT in lower "
          "case and without a path, or *"
        )
    if 0 < self.step_timeout_s < _SHORTEST_STEP_TIMEOUT_S:
      raise ConfigError(
        f"step_timeout_s={self.step_timeout_s:g} is below {_SHORTEST_STEP_TIMEOUT_S:g}, within which a healthy "
        "engine may not turn; raise --step_timeout_s, or set it to 0 for no watchdog"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSettings:
  """The settings of several hosts that compute one model together."""

  num_hosts: int = setting(
    1,
    "Hosts that share the model, each with all of its devices; every host runs the same command. 0: as JAX finds them "
    "on a TPU pod, in SLURM or in Kubernetes.",
    group=_DEVICES,
    at_least=0,
    at_most=4096,
  )
  coordinator_address: str = setting(
    "",
    "With --num_hosts: HOST:PORT of host 0, equal on every host. JAX uses this port, and Sluice the next one; open "
    "both between the hosts only. Empty: as JAX finds it.",
    group=_DEVICES,
  )
  host_id: int = setting(
    -1,
    "With --num_hosts: the number of this host, from 0. Host 0 serves clients. -1: as JAX finds it.",
    group=_DEVICES,
    at_least=-1,
  )
  cluster_secret_file: str = setting(
    "",
    "With --num_hosts: file with at least 32 random bytes, equal on every host and readable by its owner (and group) "
    "only. A peer without it cannot join, and cannot change a step unnoticed.",
    group=_DEVICES,
  )
  host_timeout_s: float = setting(
    4.0,
    "With --num_hosts: longest silence of a host, and longest delay of its steps. Then all hosts end, so that a "
    "supervisor can restart them.",
    group=_DEVICES,
    unit="s",
    at_least=0.5,
    at_most=60,
  )
  host_start_timeout_s: float = setting(
    300.0,
    "With --num_hosts: longest wait for all hosts at the start, and for each common part of it.",
    group=_DEVICES,
    unit="s",
    at_least=1,
  )

  @property
  def has_several_hosts(self) -> bool:
    """Whether the model lies on several hosts."""
    return self.num_hosts != 1

  def check_cluster(self) -> None:
    """Raises ConfigError for settings that contradict each other."""
    if not self.has_several_hosts:
      for name, value in (
        ("coordinator_address", self.coordinator_address),
        ("host_id", self.host_id),
        ("cluster_secret_file", self.cluster_secret_file),
      ):
        if value not in ("", -1):
          raise ConfigError(
            f"{name}={value} is for several hosts, and num_hosts=1; set --num_hosts (0: as JAX finds it), or leave out "
            f"--{name}"
          )
      return
    if not self.cluster_secret_file:
      raise ConfigError(
        f"num_hosts={self.num_hosts} needs a secret that all hosts share; set --cluster_secret_file to a file with at "
        "least 32 random bytes"
      )
    if self.num_hosts and self.host_id >= self.num_hosts:
      raise ConfigError(
        f"host_id={self.host_id} must be from 0 to {self.num_hosts - 1}, as num_hosts={self.num_hosts}; set --host_id"
      )
    if self.coordinator_address:
      split_address(self.coordinator_address)


def split_address(address: str) -> tuple[str, int]:
  """Returns host and port of --coordinator_address. Raises ConfigError."""
  host, _, port = address.rpartition(":")
  host = host.strip("[]")
  if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65535:
    raise ConfigError(
      f"coordinator_address={address:.200} must be HOST:PORT with a port from 1 to 65534; set --coordinator_address"
    )
  return host, int(port)


def split_kv_address(address: str) -> tuple[str, int]:
  """Returns the host, as in a URL, and the port of --kv_transport_address. Raises ConfigError."""
  host, _, port = address.rpartition(":")
  try:
    ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
  except ValueError:
    ip = None
  if ip is None or ip.is_unspecified or not port.isascii() or not port.isdigit() or int(port) > 65535:
    raise ConfigError(
      f"kv_transport_address={address!r:.80} is not IP:PORT with an address of this machine that its peers reach; "
      "write for example 10.0.0.7:7000, or port 0 for any"
    )
  return f"[{ip}]" if ip.version == 6 else str(ip), int(port)
