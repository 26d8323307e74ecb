"""Declares the router's settings, and parses its command line. Starts nothing."""

import argparse
from collections.abc import Sequence
import dataclasses
import re
from typing import Any, NoReturn

from engine.errors import ConfigError
from engine.routing import POLICIES
from engine.settings import GROUPS, DeclaredSetting, check_settings, declared_settings, setting
from server.setting_text import describe_setting
from server.telemetry import log_lines

_REPLICAS, _ADDRESS, _LIMITS, _SECURITY = "Replicas", "Addresses", "Limits of clients", "Security"
_OBSERVE, _LIFE = "Observability", "Life of the server"
_MOST_REPLICAS = 1024
_ADDRESS_FORM = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSettings:
  """The settings of the router. Times are in seconds."""

  replicas: tuple[str, ...] = setting(
    (),
    "HOST:PORT of the replicas' HTTP ports, separated by commas; https://HOST:PORT for replicas with TLS.",
    group=_REPLICAS,
    common=True,
  )
  replica_ca_file: str = setting(
    "",
    "PEM certificate authorities of the replicas with https://; empty: those of the system. The router reads its "
    "files again when they change.",
    group=_REPLICAS,
  )
  client_cert_file: str = setting(
    "",
    "PEM certificate of the router, for replicas with https:// and prefill servers that have --tls_client_ca_file.",
    group=_REPLICAS,
  )
  client_key_file: str = setting("", "PEM key of --client_cert_file.", group=_REPLICAS)
  policy: str = setting(
    "prefix_aware",
    "How to choose a replica. prefix_aware: one that has seen the beginning of the prompt, unless it is much busier. "
    "least_loaded: one with the fewest requests. round_robin: one after the other.",
    group=_REPLICAS,
    choices=tuple(POLICIES),
    common=True,
  )
  prefix_piece_bytes: int = setting(
    256,
    "With prefix_aware: prompts are compared in pieces of this many bytes of JSON.",
    group=_REPLICAS,
    at_least=16,
    at_most=1 << 20,
  )
  max_prefix_pieces: int = setting(
    1024, "With prefix_aware: pieces of a prompt that are compared.", group=_REPLICAS, at_least=1, at_most=1 << 16
  )
  max_known_pieces: int = setting(
    1 << 18,
    "With prefix_aware: pieces that the router remembers, about 150 bytes each; the least recently used leave first.",
    group=_REPLICAS,
    at_least=1024,
    at_most=1 << 24,
  )
  prefill_servers: tuple[str, ...] = setting(
    (),
    "HOST:PORT of the prefill servers' gRPC ports, if the replicas have --role=decode. The router names one to the "
    "replica in the header x-prefiller-host-port, chosen like a replica.",
    group=_REPLICAS,
    common=True,
  )
  prefill_ca_file: str = setting(
    "",
    "PEM certificate authorities of the prefill servers, whose health is then checked over TLS; empty: plain text.",
    group=_REPLICAS,
  )
  min_prefill_bytes: int = setting(
    1024,
    "Name a prefill server for prompts of at least this many bytes of JSON; replicas compute others themselves.",
    group=_REPLICAS,
    at_least=0,
  )
  max_retries: int = setting(
    2,
    "Further replicas that a request may try before the first byte of its answer.",
    group=_REPLICAS,
    at_least=0,
    at_most=16,
    common=True,
  )
  probe_period_s: float = setting(
    1.0, "How often to check each replica's /ready and its load.", group=_REPLICAS, unit="s", at_least=0.05
  )
  probe_timeout_s: float = setting(
    2.0,
    "A replica that answers no check for this long gets no requests until it answers one.",
    group=_REPLICAS,
    unit="s",
    at_least=0.05,
  )
  replica_timeout_s: float = setting(
    4.0,
    "End the requests of a replica that answers no check for this long; at least --probe_timeout_s.",
    group=_REPLICAS,
    unit="s",
    at_least=0.1,
    common=True,
  )
  connect_timeout_s: float = setting(
    1.0,
    "Longest wait for a connection to a replica, without TLS's handshake.",
    group=_REPLICAS,
    unit="s",
    at_least=0.01,
  )
  probe_api_key_file: str = setting(
    "",
    "File of the API key for reading /metrics of replicas that have keys; the first line that is no comment. Without "
    "it, the router knows only the load that it sends itself.",
    group=_REPLICAS,
  )
  batch_replica: str = setting(
    "",
    "The one of --replicas that serves /v1/files and /v1/batches, since their files are in its folder; empty: the "
    "router refuses them.",
    group=_REPLICAS,
  )
  max_response_homes: int = setting(
    1 << 16,
    "Stored responses of /v1/responses whose replica the router remembers; it searches for others.",
    group=_REPLICAS,
    at_least=0,
    at_most=1 << 24,
  )
  host: str = setting(
    "127.0.0.1",
    "Address to bind. If other machines can reach it, also set up TLS, and API keys on the replicas.",
    group=_ADDRESS,
    common=True,
  )
  port: int = setting(9000, "HTTP port; 0: a free one.", group=_ADDRESS, at_least=0, at_most=65535, common=True)
  port_file: str = setting("", "File to write the HTTP port to when the router listens.", group=_ADDRESS)
  metrics_port: int = setting(
    -1,
    "Port for /metrics, /health and /ready alone, without TLS; 0: a free one; -1: on the HTTP port.",
    group=_OBSERVE,
    at_least=-1,
    at_most=65535,
    common=True,
  )
  max_request_bytes: int = setting(
    4 << 20,
    "Largest body, which the router holds until it has an answer; a larger one returns HTTP 413. Set it to the "
    "replicas' own limit.",
    group=_LIMITS,
    at_least=1024,
  )
  max_upload_bytes: int = setting(
    201 << 20, "Largest upload to /v1/files, which the router holds in no place.", group=_LIMITS, at_least=1024
  )
  max_header_bytes: int = setting(
    16 << 10, "Largest request line and headers; more returns HTTP 431.", group=_LIMITS, at_least=1024
  )
  max_requests: int = setting(2048, "Requests at once; further ones return HTTP 429.", group=_LIMITS, at_least=1)
  max_connections: int = setting(
    4096, "Connections of clients at once; the router closes further ones.", group=_LIMITS, at_least=1
  )
  body_timeout_s: float = setting(
    30.0, "Longest wait for a part of a request's body.", group=_LIMITS, unit="s", at_least=0.1
  )
  stream_stall_timeout_s: float = setting(
    30.0, "Abort a request whose client reads nothing for this long.", group=_LIMITS, unit="s", at_least=0.1
  )
  http_allowed_hosts: tuple[str, ...] = setting(
    (),
    "Allowed values of the Host header; * allows any. Empty: only local names, if the address is local; otherwise any.",
    group=_SECURITY,
  )
  tls_cert_file: str = setting(
    "", "PEM certificate; the router reloads it when it changes.", group=_SECURITY, common=True
  )
  tls_key_file: str = setting("", "PEM key of --tls_cert_file.", group=_SECURITY, common=True)
  tls_client_ca_file: str = setting(
    "", "PEM certificate authorities; clients need a certificate from one of them.", group=_SECURITY
  )
  access_log: str = setting(
    "",
    "File for one JSON line a request, without prompt or output; -: standard error; empty: none.",
    group=_OBSERVE,
    common=True,
  )
  log_format: str = setting(
    "text", "Format of the program's own lines on standard error.", group=_OBSERVE, choices=log_lines.FORMATS
  )
  drain_delay_s: float = setting(
    0.0,
    "After SIGTERM, keep accepting requests this long, until load balancers see that the router is not ready.",
    group=_LIFE,
    unit="s",
    at_least=0,
  )
  drain_timeout_s: float = setting(
    30.0, "Time for running requests to finish during a drain.", group=_LIFE, unit="s", at_least=0, common=True
  )

  def check_router(self) -> None:
    """Raises ConfigError for a value outside its limits, a bad address, or settings that contradict each other."""
    check_settings(self)
    if not self.replicas:
      raise ConfigError("replicas is empty; set --replicas=HOST:PORT,HOST:PORT")
    if len(self.replicas) > _MOST_REPLICAS:
      raise ConfigError(f"replicas has {len(self.replicas)} entries, the limit is {_MOST_REPLICAS}; list fewer")
    _check_addresses("replicas", [split_scheme(replica)[1] for replica in self.replicas], self.replicas)
    _check_addresses("prefill_servers", self.prefill_servers, self.prefill_servers)
    self._check_client_files()
    if self.prefill_ca_file and not self.prefill_servers:
      raise ConfigError(
        f"prefill_ca_file={self.prefill_ca_file:.200} needs --prefill_servers; set them, or leave it out"
      )
    if self.batch_replica and self.batch_replica not in self.replicas:
      raise ConfigError(
        f"batch_replica={self.batch_replica!r:.80} is none of --replicas; write it as one of them is written"
      )
    if self.replica_timeout_s < self.probe_timeout_s:
      raise ConfigError(
        f"replica_timeout_s={self.replica_timeout_s:g} is below probe_timeout_s={self.probe_timeout_s:g}; raise "
        "--replica_timeout_s, or lower --probe_timeout_s"
      )

  @property
  def has_tls_replica(self) -> bool:
    """Whether a replica has https://."""
    return any(split_scheme(replica)[0] == "https" for replica in self.replicas)

  def _check_client_files(self) -> None:
    if self.replica_ca_file and not self.has_tls_replica:
      raise ConfigError(
        f"replica_ca_file={self.replica_ca_file:.200} needs a replica with TLS; write --replicas=https://HOST:PORT, or "
        "leave it out"
      )
    if bool(self.client_cert_file) != bool(self.client_key_file):
      raise ConfigError(
        f"client_cert_file={self.client_cert_file!r:.200} and client_key_file={self.client_key_file!r:.200} need each "
        "other; set both, or none"
      )
    if self.client_cert_file and not (self.has_tls_replica or self.prefill_ca_file):
      raise ConfigError(
        f"client_cert_file={self.client_cert_file:.200} needs a replica with https://, or --prefill_ca_file; set one, "
        "or leave it out"
      )


def split_scheme(replica: str) -> tuple[str, str]:
  """Returns "https" or "http", and the rest, of https://HOST:PORT or HOST:PORT; checks nothing."""
  return ("https", replica[8:]) if replica.startswith("https://") else ("http", replica)


def split_replica_address(address: str) -> tuple[str, int]:
  """Returns host and port of HOST:PORT, an IPv6 address without its brackets. Raises ValueError."""
  match = _ADDRESS_FORM.fullmatch(address)
  if match is None or not 0 < int(match[2]) < 65536:
    raise ValueError(address)
  return match[1].strip("[]"), int(match[2])


def _check_addresses(name: str, addresses: Sequence[str], written: Sequence[str]) -> None:
  """Raises ConfigError for a bad address, or one that is there twice; `written` has them as the operator wrote them."""
  for address, text in zip(addresses, written, strict=True):
    try:
      split_replica_address(address)
    except ValueError:
      raise ConfigError(
        f"{name}={text!r:.80} is not HOST:PORT; write for example --{name}=10.0.0.7:8000,10.0.0.8:8000"
      ) from None
  if len(set(addresses)) < len(addresses):
    twice = next(address for address in addresses if addresses.count(address) > 1)
    raise ConfigError(f"{name} has {twice} twice; list each address once")


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise ConfigError(f"{message}; --help lists the flags")


def router_flags() -> list[DeclaredSetting]:
  """Returns every flag of the router, group by group."""
  found = list(declared_settings(RouterSettings))
  return [declared for group in GROUPS for declared in found if declared.setting.group == group]


def parse_router_flags(argv: Sequence[str] | None) -> RouterSettings:
  """Parses the command line; prints --help and exits with 0 if that is requested.

  Raises:
    ConfigError: a flag is unknown, or a value is not allowed; the message is one line.
  """
  parser = _Parser(prog="server.router", description="Sends requests to replicas of the server.", allow_abbrev=False)
  groups: dict[str, Any] = {}
  for declared in router_flags():
    name = declared.setting.group
    if name not in groups:
      groups[name] = parser.add_argument_group(name)
    kind = _read_list if declared.type == tuple[str, ...] else declared.type
    text = describe_setting(declared).replace("%", "%%")
    groups[name].add_argument(f"--{declared.name}", type=kind, default=declared.default, help=text, metavar="X")
  settings = RouterSettings(**vars(parser.parse_args(argv)))
  settings.check_router()
  return settings


def _read_list(text: str) -> tuple[str, ...]:
  return tuple(part.strip() for part in text.split(",") if part.strip())
