"""Starts the processes of a fleet, loses them and brings them back. Sends no load, and judges nothing.

clients -- HTTP --> router --+--> Ray Serve --> 2 replicas <-- gRPC -- clients
                             +--> decode server <-- KV -- prefill server
"""

from collections.abc import Callable
import contextlib
import enum
import os
import pathlib
import secrets
import signal
import time
from typing import TYPE_CHECKING, Self

from engine.errors import ConfigError
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
    prefill, decode, router: the processes beside Ray.
    decode_target, prefill_metrics: HOST:PORT of the decode server's gRPC port, and of the prefill server's HTTP port.
    ray_state: what the replicas do.
    ray_start_s: seconds until Ray served.
  """

  def __init__(self, cluster: "RayCluster", folder: pathlib.Path, report: Callable[[str], None]):
    """Args:
    cluster: entered already.
    folder: for logs and the secret.
    report: called with a line at each stage of the start.
    """
    self.cluster, self._folder, self._report = cluster, folder, report
    self.known: list[KnownRequest] = []
    self.ray_state, self.ray_start_s = MemberState.STARTING, 0.0
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(24), "ascii")
    ports = [find_free_port() for _ in range(5)]
    prefill, prefill_http, decode, decode_http, router = (f"127.0.0.1:{port}" for port in ports)
    roles = (*_FLAGS, f"--transfer_secret_file={secret}")
    prefill_flags = (*roles, "--role=prefill", f"--port={ports[0]}", f"--http_port={ports[1]}")
    decode_flags = (*roles, "--role=decode", f"--port={ports[2]}", f"--http_port={ports[3]}")
    decode_flags += (f"--prefill_servers={prefill}", "--trust_prefill_header", *_DECODE_FLAGS)
    router_flags = (f"--port={ports[4]}", f"--prefill_servers={prefill}")
    replicas = (self.cluster.http_url.removeprefix("http://"), decode_http)
    self.prefill = FleetMember("prefill server", prefill, lambda: self._make_server("prefill", *prefill_flags))
    self.decode = FleetMember("decode server", decode_http, lambda: self._make_server("decode", *decode_flags))
    self.router = FleetMember("router", router, lambda: RunningRouter(replicas, folder / "router.log", router_flags))
    self.decode_target, self.prefill_metrics = decode, prefill_http

  def _make_server(self, name: str, *flags: str) -> RunningServer:
    return RunningServer(flags, self._folder / f"{name}.log", _CPU)

  @property
  def members(self) -> tuple[FleetMember, ...]:
    """The processes beside Ray."""
    return self.prefill, self.decode, self.router

  def __enter__(self) -> Self:
    """Returns once every process serves. Raises ConfigError or RuntimeError if one does not."""
    with contextlib.ExitStack() as stack:
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

  def await_replicas(self, lost: int) -> float:
    """Returns the seconds until Ray Serve has replaced the server with this process id. Raises ConfigError."""
    took = self.cluster.wait_for_replicas(NUM_REPLICAS, BACK_WITHIN_S, frozenset((lost,)))
    if took is None:
      raise ConfigError(f"{self.cluster.count_replicas()} of {NUM_REPLICAS} replicas serve after {BACK_WITHIN_S:g} s")
    self.ray_state = MemberState.SERVING
    return took
