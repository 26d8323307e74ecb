"""Scenarios: floods of a gRPC port with non-HTTP/2 connections, with streams and with frames, beside good streams.

The scenario measures the cost from outside: the log, memory, descriptors and threads, and the server's processor time
before, during and after, with the same control streams throughout.
"""

from collections.abc import Callable
import dataclasses
import time
from typing import Any

import psutil

from tools.chaos import flood_clients
from tools.chaos.flood_clients import Flooded
from tools.chaos.process import Server, Usage
from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig, wait_for
from tools.chaos.streams import Control, StreamRequest

_CLIENTS = 2
_QUIET_S = 3.0
_MAX_LOG = 1e6
_MAX_JUNK_RSS = 20e6
# As many calls as may wait for the event loop (server/rpc/grpc_server.py), with 15 kB each.
_MAX_RESET_RSS = 256e6
_CORES_AFTER = 1.5  # limit, as a multiple of the cores before the flood, for the same streams
_LONGEST_GAP_S = 2.0
_SLOWEST_FIRST_S = 5.0
# Streams before the next connection: the event loop still handles the old one's streams after its end.
_PER_CONNECTION = 100_000
_GOAWAY_CALM = 11

# A client's job, and its arguments beside the port.
type _Job = tuple[Callable[..., Flooded], *tuple[Any, ...]]


@dataclasses.dataclass
class _Seen:
  """One flood of `asked`: the server's cores before, during and after; growth of its resources, and of its peak memory.

  `ran` is the actual count, for figures of one kind of several.
  """

  asked: int
  ran: int
  flooded: Flooded
  seconds: float
  cores: tuple[float, float, float]
  growth: Usage
  peak: int
  log: int
  control: Control
  faults: list[str]

  def came(self, check: str, target: str, text: str, passed: bool) -> Row:
    """The row of the flood itself."""
    faults = self.flooded.faults
    text = f"{text} in {self.seconds:.1f} s" + (f"; {len(faults)} faults: {faults[0]}" if faults else "")
    return Row(check, target, text, passed and not faults, self.asked, self.ran)

  def cost(self, max_rss: float) -> Row:
    """The row of resources that the flood used and left."""
    held = max(self.growth.fds, 0)
    return Row(
      "what it costs",
      f"log < 1 MB, memory < {max_rss / 1e6:g} MB more at the peak, 0 descriptors held",
      f"log {self.log / 1e3:.1f} kB; memory {self.peak / 1e6:+.1f} MB at the peak, {self.growth.rss / 1e6:+.1f} after; "
      f"{held} descriptors held, threads {self.growth.threads:+d}",
      self.log < _MAX_LOG and self.peak < max_rss and not held,
      self.asked,
      self.ran,
    )

  def processor(self) -> Row:
    """The row of processor time, which must end with the flood."""
    before, during, after = self.cores
    return Row(
      "the server's processor time",
      f"after it at most {_CORES_AFTER:g} times before it",
      f"{before:.2f} cores before, {during:.2f} during, {after:.2f} after",
      after <= _CORES_AFTER * before,
      self.asked,
      self.ran,
    )

  def beside(self) -> Row:
    """The row of the control streams."""
    check = f"control streams beside it ({self.control.tokens:,} tokens)"
    return none_of(check, "all exact, nothing held", self.control.faults + self.faults, self.control.streams, 0)

  def waits(self) -> Row:
    """The row of their waits."""
    longest = max((gap for _, gap in self.control.gaps), default=0.0)
    slowest = max(self.control.firsts, default=0.0)
    return Row(
      "how long they waited",
      f"for a token <= {_LONGEST_GAP_S:g} s, for the first <= {_SLOWEST_FIRST_S:g} s",
      f"longest gap {1000 * longest:.0f} ms, slowest first token {slowest:.1f} s",
      longest <= _LONGEST_GAP_S and slowest <= _SLOWEST_FIRST_S,
      self.asked,
      self.ran,
    )


def _watch(rig: Rig, server: Server, asked: int, ran: int, jobs: list[_Job]) -> _Seen:
  """Runs a flood between two quiet periods, with control streams throughout."""
  process = psutil.Process(server.process.pid)

  def spent() -> float:
    times = process.cpu_times()
    return times.user + times.system

  def quiet() -> float:
    since = spent()
    time.sleep(_QUIET_S)
    return (spent() - since) / _QUIET_S

  with rig.controls(server, num_streams=8, max_tokens=60) as control:
    cores_before = quiet()
    before, log, since, began = server.usage(), server.log.stat().st_size, spent(), time.monotonic()
    peak = before.rss
    running = [rig.submit(job, server.port, *args) for job, *args in jobs]
    while not all(job.done() for job in running):
      time.sleep(0.1)
      peak = max(peak, server.usage().rss)
    seconds = time.monotonic() - began
    cores_during = (spent() - since) / seconds
    time.sleep(_QUIET_S)  # the server still handles data it read before the end
    peak = max(peak, server.usage().rss)
    cores_after = quiet()
    wait_for(lambda: server.usage().fds <= before.fds, 15.0, 0.2)
    after = server.usage()
  flooded = Flooded()
  for job in running:
    flooded.add(job.result())
  return _Seen(
    asked,
    ran,
    flooded,
    seconds,
    (cores_before, cores_during, cores_after),
    Usage(after.rss - before.rss, after.fds - before.fds, after.threads - before.threads),
    peak - before.rss,
    server.log.stat().st_size - log,
    control(),
    server.settle() + server.imbalance() + ([] if server.is_serving() else ["its health is not SERVING"]),
  )


def _flooded(
  rig: Rig, asked: int, ran: int, max_rss: float, jobs: list[_Job], judge: Callable[[_Seen], Row]
) -> list[Row]:
  """Floods a new server; returns the rows of `judge`, of the cost, and of the control streams."""
  # The invariants scan all blocks after every step: with many blocks, control streams make steps ever slower.
  with rig.server("--fake_step_ms=10", "--num_blocks=256") as server:
    seen = _watch(rig, server, asked, ran, jobs)
  return [judge(seen), seen.cost(max_rss), seen.processor(), seen.beside(), seen.waits()]


def _shares(count: int) -> list[int]:
  return [share for share in (len(range(index, count, _CLIENTS)) for index in range(_CLIENTS)) if share]


def junk(rig: Rig, count: int = 100_000, asked: int = 100_000) -> list[Row]:
  """Floods the port with connections of scanners and of programs that use the wrong port."""

  def judge(seen: _Seen) -> Row:
    closed = seen.flooded.closed
    return seen.came(
      f"connections to the gRPC port that say {', '.join(flood_clients.JUNK)}",
      "each closed by the server, which serves on",
      f"{closed:,} closed",
      closed == seen.flooded.sent == count,
    )

  jobs: list[_Job] = [(flood_clients.junk, share, seed) for seed, share in enumerate(_shares(count))]
  return _flooded(rig, asked, count, _MAX_JUNK_RSS, jobs, judge)


def resets(rig: Rig, count: int = 100_000, asked: int = 100_000) -> list[Row]:
  """Floods the port with streams that are reset on opening."""

  def judge(seen: _Seen) -> Row:
    sent = seen.flooded.sent
    return seen.came("streams opened and reset at once", "nothing held, it serves on", f"{sent:,}", sent >= count)

  jobs: list[_Job] = [(flood_clients.resets, _request(), share) for share in _shares(count)]
  return _flooded(rig, asked, count, _MAX_RESET_RSS, jobs, judge)


def resets_on(rig: Rig, seconds: float = 60.0, asked: int = 60) -> list[Row]:
  """Does the same without end, over one lasting connection and over successive ones, whose calls stay for a while."""

  def judge(seen: _Seen) -> Row:
    sent = seen.flooded.sent
    target = f"for {asked} s; nothing held, it serves on"
    return seen.came("streams opened and reset without end", target, f"{sent:,}", seen.seconds >= seconds and sent > 0)

  jobs: list[_Job] = [(flood_clients.resets, _request(), 0, seconds, per) for per in (0, _PER_CONNECTION)]
  return _flooded(rig, asked, int(seconds), _MAX_RESET_RSS, jobs, judge)


def _request() -> bytes:
  return StreamRequest((1, 2, 3), 400).message().SerializeToString()


def frames(rig: Rig, count: int = 100_000, asked: int = 100_000) -> list[Row]:
  """Floods the port with frames without a request, `count` of each kind."""
  kinds = list(flood_clients.FRAMES)

  def judge(seen: _Seen) -> Row:
    sent, calmed = seen.flooded.sent, seen.flooded.codes[_GOAWAY_CALM]
    return seen.came(
      f"frames of each kind: {', '.join(kinds)}",
      "nothing held, pings calmed",
      f"{sent:,}, {calmed:,} GOAWAYs ENHANCE_YOUR_CALM",
      calmed > 0 and sent >= count * len(kinds),
    )

  return _flooded(rig, asked, count, _MAX_JUNK_RSS, [(flood_clients.frames, count, kind) for kind in kinds], judge)
