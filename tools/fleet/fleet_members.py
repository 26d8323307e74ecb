"""Starts the processes of a fleet, loses them and brings them back. Sends no load, and judges nothing.

clients -- HTTP --> router --+--> Ray Serve --> 2 replicas <-- gRPC -- clients
                             +--> decode server <-- KV -- prefill server

With TLS, a proxy stands in each of these connections but those of gRPC clients, since Serve's gRPC proxy has no TLS.
"""

from collections.abc import Callable
import contextlib
import enum
import os
import pathlib
import secrets
import signal
import ssl
import time
from typing import TYPE_CHECKING, Self

from engine.errors import ConfigError
from tools.certificates import Authority
from tools.faulty_link import FaultyLink
from tools.fleet.checked_streams import KnownRequest, learn_outputs
from tools.server_process import RunningRouter, RunningServer, find_free_port

if TYPE_CHECKING:
  from tools.ray_check.cluster import RayCluster

# --deterministic makes every output known. The demo model fits each process several times over.
_FLAGS = ("--deterministic", "--max_num_seqs=8")
# So few blocks that prefixes of long prompts leave, and come from the prefill server again.
_DECODE_FLAGS = ("--num_blocks=224",)
_CPU = {"JAX_PLATFORMS": "cpu"}
NUM_REPLICAS = 2
# Long prompts, and those that the load sends at a time: so some are new to every cache.
NUM_LONG, LONG_AT_ONCE = 64, 8
BACK_WITHIN_S = 120.0
_SERVER_TIMEOUT_S = 3.0
_OUTPUT_TOKENS = (48, 240)
_STOPPED_S = 8.0  # longer than any limit of silence in the fleet


class MemberState(enum.Enum):
  """What a member of the fleet does."""

  STARTING = "starting"
  SERVING = "serving"
  LOST = "lost"
  STOPPED = "stopped"


class LossKind(enum.Enum):
  """How a process is lost."""

  KILL = "kill"
  STOP = "stop"


class LinkFault(enum.Enum):
  """What happens to what passes between processes."""

  CORRUPT = "corrupt"
  DELAY = "delay"


class FleetTls:
  """A certificate for all members of a fleet, from an authority of its own.

  Attributes:
    ca_file, files: PEM of the authority; PEM of the certificate and its key.
    context: verifies the members.
  """

  def __init__(self, folder: pathlib.Path):
    """Writes the files into `folder`."""
    authority = Authority(folder)
    self.ca_file, self.files = authority.file, authority.issue("member")
    self.context = ssl.create_default_context(cafile=str(self.ca_file))

  @property
  def server_flags(self) -> tuple[str, ...]:
    """Flags of a server or router with this certificate."""
    return f"--tls_cert_file={self.files[0]}", f"--tls_key_file={self.files[1]}"


class FleetMember:
  """A process that the fleet can lose and get back, on fixed ports.

  Attributes:
    name, address: for the view.
    state: what it does now.
    first_start_s: seconds of its first start.
    stood_still: when the last stop of the process began and ended, on the machine's monotonic clock.
  """

  def __init__(self, name: str, address: str, make: Callable[[], RunningServer | RunningRouter]):
    """Args:
    name, address: see the class.
    make: makes the process, not started yet.
    """
    self.name, self.address, self._make = name, address, make
    self.state, self.first_start_s, self.stood_still = MemberState.STARTING, 0.0, (0.0, 0.0)
    self._process: RunningServer | RunningRouter | None = None

  def start(self) -> float:
    """Returns the seconds until it is ready. Raises ConfigError."""
    began = time.monotonic()
    self.state = MemberState.STARTING
    self._process = self._make()
    self._process.__enter__()
    self.state, took = MemberState.SERVING, time.monotonic() - began
    self.first_start_s = self.first_start_s or took
    return took

  def end(self) -> None:
    """Ends the process, if it runs."""
    process, self._process = self._process, None
    if process is not None:
      with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)
      process.__exit__()

  def start_anew(self) -> float:
    """Ends the process in an orderly way and starts it; returns the seconds of the start. Raises ConfigError."""
    self.end()
    return self.start()

  def lose(self, fault: LossKind) -> None:
    """Kills or stops the process."""
    assert self._process is not None, "start comes first"
    os.kill(self._process.pid, signal.SIGKILL if fault is LossKind.KILL else signal.SIGSTOP)
    self.state = MemberState.LOST if fault is LossKind.KILL else MemberState.STOPPED

  def bring_back(self, fault: LossKind) -> float:
    """Starts it again, or continues it after a while; returns the seconds until it is ready. Raises ConfigError."""
    if fault is LossKind.KILL:
      self.end()
      return self.start()
    assert self._process is not None, "start comes first"
    began = time.monotonic()
    time.sleep(_STOPPED_S)
    os.kill(self._process.pid, signal.SIGCONT)
    self.state, self.stood_still = MemberState.SERVING, (began, time.monotonic())
    return _STOPPED_S


class RunningFleet:
  """Two replicas under Ray Serve, a decode and a prefill server, and a router, for the length of a block.

  Attributes:
    known: requests and their outputs; the first NUM_LONG have long prompts.
    cluster: Ray.
    tls: None: the connections are plain text, and there are no links.
    links: whether streams may fail when the link breaks, and the link, by a name; in each connection of the fleet.
    prefill, decode, router: the processes beside Ray.
    http_url: what HTTP clients call.
    replicas: what the router calls.
    decode_target, prefill_metrics: HOST:PORT of the decode server's gRPC port, and of the prefill server's HTTP port.
    ray_state: what the replicas do.
    ray_start_s: seconds until Ray served.
  """

  def __init__(
    self, cluster: "RayCluster", folder: pathlib.Path, report: Callable[[str], None], tls: FleetTls | None = None
  ):
    """Args:
    cluster: entered already, with the certificate of `tls`.
    folder: for logs and the secret.
    report: called with a line at each stage of the start.
    tls: encrypts the connections and puts a link in each; None: they are plain text, without links.
    """
    self.cluster, self._folder, self._report, self.tls = cluster, folder, report, tls
    self.known: list[KnownRequest] = []
    self.links: dict[str, tuple[bool, FaultyLink]] = {}
    self.ray_state, self.ray_start_s = MemberState.STARTING, 0.0
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(24), "ascii")
    ports = [find_free_port() for _ in range(5)]
    prefill, prefill_http, decode, decode_http, router = (f"127.0.0.1:{port}" for port in ports)
    seen_prefill = self._add_link("the prefill server and its clients", prefill, can_fail=False)
    seen_decode = self._add_link("the router and the decode server", decode_http, can_fail=True)
    serve = self.cluster.http_url.rpartition("/")[2]
    seen_serve = self._add_link("the router and Ray Serve", serve, can_fail=True)
    self.http_url = f"{self.scheme}://{self._add_link('clients and the router', router, can_fail=True)}"
    roles = (*_FLAGS, f"--transfer_secret_file={secret}", *(tls.server_flags if tls else ()))
    prefill_flags = (*roles, "--role=prefill", f"--port={ports[0]}", f"--http_port={ports[1]}")
    decode_flags = (*roles, "--role=decode", f"--port={ports[2]}", f"--http_port={ports[3]}")
    decode_flags += (f"--prefill_servers={seen_prefill}", "--trust_prefill_header", *_DECODE_FLAGS)
    router_flags = (f"--port={ports[4]}", f"--prefill_servers={seen_prefill}")
    self.replicas = (seen_serve, seen_decode)
    if tls:
      # Shared memory would pass KV beside the link.
      decode_flags += (f"--transfer_ca_file={tls.ca_file}", "--kv_transport=grpc")
      router_flags += (*tls.server_flags, f"--replica_ca_file={tls.ca_file}", f"--prefill_ca_file={tls.ca_file}")
      self.replicas = tuple(f"https://{each}" for each in self.replicas)
    self.prefill = FleetMember("prefill server", prefill, lambda: self._make_server("prefill", *prefill_flags))
    self.decode = FleetMember("decode server", decode_http, lambda: self._make_server("decode", *decode_flags))
    context = tls.context if tls else None
    self.router = FleetMember(
      "router", router, lambda: RunningRouter(self.replicas, folder / "router.log", router_flags, context)
    )
    self.decode_target, self.prefill_metrics = decode, prefill_http

  @property
  def scheme(self) -> str:
    """Of the members' URLs: http or https."""
    return "https" if self.tls else "http"

  @property
  def ca_file(self) -> str:
    """The authority of the members' certificates; empty without TLS."""
    return str(self.tls.ca_file) if self.tls else ""

  def _add_link(self, between: str, address: str, can_fail: bool) -> str:
    """Returns where clients reach a member: through a link to it, with TLS."""
    if not self.tls:
      return address
    link = FaultyLink(int(address.rpartition(":")[2]))
    self.links[between] = can_fail, link
    return f"127.0.0.1:{link.port}"

  def _make_server(self, name: str, *flags: str) -> RunningServer:
    return RunningServer(flags, self._folder / f"{name}.log", _CPU)

  @property
  def members(self) -> tuple[FleetMember, ...]:
    """The processes beside Ray."""
    return self.prefill, self.decode, self.router

  def __enter__(self) -> Self:
    """Returns once every process serves. Raises ConfigError or RuntimeError if one does not."""
    with contextlib.ExitStack() as stack:
      for _, link in self.links.values():
        stack.enter_context(link)
      self._report("learning the outputs from one plain server")
      with self._make_server("plain", *_FLAGS) as plain:
        self.known = learn_outputs(
          plain.target, count=NUM_LONG + 24, max_tokens=_OUTPUT_TOKENS, num_long=NUM_LONG, ignore_eos=True
        )
      self._report(f"starting {NUM_REPLICAS} replicas under Ray Serve")
      began = time.monotonic()
      self.cluster.deploy(
        server_flags=_FLAGS,
        environment=_CPU,
        server_timeout_s=_SERVER_TIMEOUT_S,
        health_check_period_s=1.0,
        drain_timeout_s=60.0,
        min_replicas=NUM_REPLICAS,
        max_replicas=NUM_REPLICAS,
      )
      self.ray_state, self.ray_start_s = MemberState.SERVING, time.monotonic() - began
      for member in self.members:
        self._report(f"starting the {member.name}")
        stack.callback(member.end)
        member.start()
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *_: object) -> None:
    self._stack.close()

  def lose_replica(self, fault: LossKind, index: int, is_server: bool) -> int:
    """Loses a replica of Ray Serve; returns the process id of its server.

    Args:
      fault: kills or stops it.
      index: chooses the replica.
      is_server: the replica's server, not Ray's worker.
    """
    servers = self.cluster.find_servers()
    victim = sorted(servers)[index % len(servers)]
    os.kill(victim if is_server else servers[victim], signal.SIGKILL if fault is LossKind.KILL else signal.SIGSTOP)
    self.ray_state = MemberState.LOST if fault is LossKind.KILL else MemberState.STOPPED
    return victim

  def await_replicas(self, lost: int) -> tuple[float, float]:
    """Waits until Ray Serve has replaced the server with this process id.

    Returns:
      The seconds until Serve missed it, and those from then on.

    Raises:
      ConfigError: it did not happen in time.
    """
    took = self.cluster.wait_for_replacement(NUM_REPLICAS, BACK_WITHIN_S, lost)
    if took is None:
      raise ConfigError(f"{self.cluster.count_replicas()} of {NUM_REPLICAS} replicas serve after {BACK_WITHIN_S:g} s")
    self.ray_state = MemberState.SERVING
    return took
