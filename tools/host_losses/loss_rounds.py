"""Loses a host under load, in one way after the other, and checks the streams and processes. Prints nothing."""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import enum
import random
import signal
import statistics
import time

from engine.errors import ConfigError
from server.client import Client
from tools.chaos.report import Row, none_of
from tools.chaos.restart_times import judge_restarts
from tools.fleet.checked_streams import StreamLoad, Verdict
from tools.fleet.idle_server import find_leaks
from tools.host_losses.host_cluster import Cluster, Proxy

STREAMS = 8
HEARD_WITHIN_S = 5.0
ENDS_WITHIN_S = 20.0
_FINISHED_BETWEEN = 8  # streams that finish before the next loss
_WAIT_S = 120.0
_LONGEST_DELAY_S = 0.2
_DELAYED_S = 1.0
_CLOSED_S = 0.3  # clients of a process that has ended learn of it within this time


class HostFault(enum.Enum):
  """What happens to a host."""

  KILL = "kill"
  STOP = "stop"
  CORRUPT = "corrupt"
  DELAY = "delay"


@dataclasses.dataclass
class _Rounds:
  """What the rounds of one fault have caused.

  Attributes:
    ended, errors: streams that ended, and those with an error.
    heard_s, over_s, back_s: for each round, seconds until the last client learned of it, until the last process ended,
      and until the cluster served again.
    faults: what breaks the rules.
  """

  ended: int = 0
  errors: int = 0
  heard_s: list[float] = dataclasses.field(default_factory=list)
  over_s: list[float] = dataclasses.field(default_factory=list)
  back_s: list[float] = dataclasses.field(default_factory=list)
  faults: list[str] = dataclasses.field(default_factory=list)


class LossRounds:
  """Checks a cluster of two hosts under load. Belongs to one event loop.

  Attributes:
    rows: the results so far.
  """

  def __init__(self, cluster: Cluster, proxy: Proxy, load: StreamLoad, target: str, flags: Sequence[str], seed: int):
    """Args:
    cluster: not started.
    proxy: between follower and leader.
    load: without streams.
    target: HOST:PORT of the leader's gRPC port.
    flags: of the leader.
    seed: determines hosts and instants.
    """
    self._cluster, self._proxy, self._load = cluster, proxy, load
    self._target, self._flags = target, flags
    self._rng = random.Random(seed)
    self._start_s: list[float] = []
    self.rows: list[Row] = []

  def start_hosts(self) -> float:
    """Starts both hosts; returns the seconds until they serve."""
    began = time.monotonic()
    self._proxy.change = lambda number, data: data
    self._proxy.forget_connections()
    self._cluster.start_host(0, *self._flags)
    self._cluster.start_host(1, port=self._proxy.port)
    self._cluster.wait_ready()
    return time.monotonic() - began

  async def measure_starts(self, count: int) -> list[float]:
    """Starts the hosts `count` times while clients wait; returns the seconds of each start. The last one serves."""
    self._load.set_streams(STREAMS)
    while len(self._start_s) < count:
      for host, process in self._cluster.hosts.items():
        self._cluster.send_signal(host, signal.SIGKILL)
        process.wait()
      self._start_s.append(await asyncio.to_thread(self.start_hosts))
    return self._start_s

  async def check_all(self, faults: Sequence[HostFault], rounds: int, report: Callable[[str], None]) -> None:
    """Runs `rounds` rounds of each fault, then ends the cluster, which serves at the call.

    Raises:
      ConfigError: no stream finishes any more.
    """
    for fault in faults:
      began, found = time.monotonic(), _Rounds()
      for index in range(rounds):
        await self._wait_for_finished(_FINISHED_BETWEEN)
        await asyncio.sleep(self._rng.random() / 2)
        await (self._delay(found) if fault is HostFault.DELAY else self._lose(fault, index % 2, found))
        report(f"{fault.value} {index + 1} of {rounds}: {found.ended} streams ended, {len(found.faults)} faults")
      rows = self._judge(fault, rounds, found)
      self.rows += [dataclasses.replace(row, scenario=_DEEDS[fault], seconds=time.monotonic() - began) for row in rows]
    began = time.monotonic()
    await self._wait_for_finished(_FINISHED_BETWEEN)
    await self._load.stop()
    row = none_of("nothing is held", "no request, block or compile", await asyncio.to_thread(self._end_idle), 2, 0)
    self.rows.append(dataclasses.replace(row, scenario="idle", seconds=time.monotonic() - began))

  def _judge(self, fault: HostFault, rounds: int, found: _Rounds) -> list[Row]:
    fails = fault is not HostFault.DELAY
    measured = f"{found.ended} ended, {found.errors} with an error"
    if found.faults:
      measured = f"{len(found.faults)} faults, {found.ended} ended: {found.faults[0]}"
    target = "0 wrong, cut or silent" if fails else "0 errors"
    rows = [Row("every stream ends by the rules", target, measured, not found.faults, 100, rounds)]
    if fails:
      for check, limit, times in (
        ("clients learn of it", HEARD_WITHIN_S, found.heard_s),
        ("every process has ended", ENDS_WITHIN_S, found.over_s),
      ):
        half, most = statistics.median(times), max(times)
        rows.append(Row(check, f"in {limit:.1f} s", f"p50 {half:.1f} s, at most {most:.1f} s", most <= limit))
      rows.append(judge_restarts(self._start_s, found.back_s))
    return rows

  async def _delay(self, found: _Rounds) -> None:
    """Delays what the leader sends, for a while; no stream may notice more than the time."""
    since = len(self._load.ends)
    longest = self._rng.uniform(0.02, _LONGEST_DELAY_S)

    def delay(number: int, data: bytes) -> bytes:
      time.sleep(longest)
      return data

    self._proxy.change = delay
    await asyncio.sleep(_DELAYED_S)
    self._proxy.change = lambda number, data: data
    await self._wait_for_finished(_FINISHED_BETWEEN)
    found.ended += len(self._load.ends) - since
    found.faults += self._load.find_faults(since, allow_errors=False)

  async def _lose(self, fault: HostFault, host: int, found: _Rounds) -> None:
    """Loses a host, waits until every process has ended, and starts the cluster again."""
    since, began = len(self._load.ends), time.monotonic()
    if fault is HostFault.CORRUPT:
      self._proxy.change = _make_flip(host)
    else:
      self._cluster.send_signal(host, signal.SIGKILL if fault is HostFault.KILL else signal.SIGSTOP)
    faults, over_s = await asyncio.to_thread(self._await_ends, fault, host, began)
    await asyncio.sleep(_CLOSED_S)
    ends = self._load.ends[since:]
    # The others found no server.
    failed = [end for end in ends if end.verdict is Verdict.ERROR and (end.size or end.waited_s > _CLOSED_S)]
    found.ended, found.errors = found.ended + len(ends), found.errors + len(failed)
    if not (fault is HostFault.STOP and host == 0):  # a leader that stands still cannot speak to its clients
      found.heard_s.append(max((end.ended - began for end in failed), default=0.0))
    found.over_s.append(over_s)
    found.faults += faults
    found.back_s.append(await asyncio.to_thread(self.start_hosts))
    found.faults += self._load.find_faults(since)

  def _await_ends(self, fault: HostFault, host: int, began: float) -> tuple[list[str], float]:
    """Returns what is wrong with how the processes end, and the seconds until the last one has ended."""
    cluster, faults = self._cluster, []
    # One that stands still ends when it goes on, after the other has given it up.
    for each in (1 - host, host):
      if each == host and fault is HostFault.STOP:
        cluster.send_signal(host, signal.SIGCONT)
      try:
        code = cluster.hosts[each].wait(ENDS_WITHIN_S)
      except Exception:
        faults.append(f"host {each} runs on after host {host} had a fault: {fault.value}")
        cluster.hosts[each].kill()
        cluster.hosts[each].wait()
        continue
      is_killed = each == host and fault is HostFault.KILL
      if code == 0 or (code == -signal.SIGKILL) != is_killed:
        faults.append(f"host {each} ended with code {code} after host {host} had a fault: {fault.value}")
    return faults, time.monotonic() - began

  async def _wait_for_finished(self, count: int) -> None:
    wanted, deadline = self._load.count_verdicts()[Verdict.FINISHED] + count, time.monotonic() + _WAIT_S
    while self._load.count_verdicts()[Verdict.FINISHED] < wanted:
      if time.monotonic() > deadline:
        raise ConfigError(f"fewer than {count} streams finished in {_WAIT_S:g} s; read {self._cluster.log_file(0)}")
      await asyncio.sleep(0.05)

  def _end_idle(self) -> list[str]:
    """Returns what the idle leader still holds, and what the hosts compiled after ready; then ends them."""
    with Client(self._target) as client:
      leaks = find_leaks(client, self._cluster.metric("sluice_host_compiles_total"))
    self._cluster.send_signal(0, signal.SIGTERM)
    codes = self._cluster.exit_codes()
    return leaks + ([] if codes == [0, 0] else [f"hosts ended with codes {codes}"])


_DEEDS = {
  HostFault.KILL: "a host is killed",
  HostFault.STOP: "a host is stopped",
  HostFault.CORRUPT: "a byte to a host is changed",
  HostFault.DELAY: "what a host gets is delayed",
}


def _make_flip(connection: int) -> Callable[[int, bytes], bytes]:
  """Returns a change of one bit in all that passes on a connection to a follower: 0 has steps, 1 heartbeats."""

  def flip(number: int, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 4]) if number == connection else data

  return flip
