"""Scenarios: floods of a gRPC port, of connections that are no HTTP/2, of streams and of frames, beside good streams.

What they cost is seen from outside: the log, memory, descriptors and threads, and the server's processor time before,
during and after, while the same control streams go on.
"""

from collections.abc import Callable
from concurrent.futures import Future
import dataclasses
import time

import psutil

from tools.chaos import flood_clients
from tools.chaos.flood_clients import Flooded
from tools.chaos.process import Server, Usage
from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig, wait_for
from tools.chaos.streams import Ask, Control

_CLIENTS = 2
_QUIET_S = 3.0
_MAX_LOG = 1e6
_MAX_JUNK_RSS = 20e6
# As many calls as may wait for the event loop (server/grpc_server.py), with 15 kB each.
_MAX_RESET_RSS = 256e6
_CORES_AFTER = 1.5  # times those before, for the same streams
_GOAWAY_CALM = 11


@dataclasses.dataclass
class _Seen:
  """One flood of `asked`. Cores of the server before, during and after; growth of what it holds, and of its peak.

  `ran` is the count that came of `asked`, for figures of one kind of several.
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

  def cost(self, max_rss: float) -> Row:
    """What it left behind."""
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
    """That it ends with the flood."""
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
    """What control streams had of it."""
    longest = max((gap for _, gap in self.control.gaps), default=0.0)
    slowest = max(self.control.firsts, default=0.0)
    told = f"longest gap {1000 * longest:.0f} ms, slowest first token {slowest:.1f} s"
    claim = f"control streams beside it ({self.control.tokens:,} tokens)"
    row = none_of(claim, "all exact, nothing held", self.control.faults + self.faults, self.control.streams, 0)
    return dataclasses.replace(row, measured=f"{row.measured}; {told}")


def _watch(rig: Rig, server: Server, asked: int, ran: int, jobs: Callable[[], list[Future[Flooded]]]) -> _Seen:
  """Runs a flood between two quiet times, with control streams all along."""
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
    running = jobs()
    while not all(job.done() for job in running):
      time.sleep(0.1)
      peak = max(peak, server.usage().rss)
    seconds = time.monotonic() - began
    cores_during = (spent() - since) / seconds
    time.sleep(_QUIET_S)  # what was read before the end is still worked on
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
    server.settle() + server.imbalance(),
  )


def _shares(count: int) -> list[int]:
  return [len(range(index, count, _CLIENTS)) for index in range(_CLIENTS)]


def junk(rig: Rig, count: int = 100_000, asked: int = 100_000) -> list[Row]:
  """Connections of scanners and of programs that took the wrong port."""
  with rig.server("--fake_step_ms=10") as server:
    seen = _watch(
      rig,
      server,
      asked,
      count,
      lambda: [
        rig.submit(flood_clients.junk, server.port, share, seed) for seed, share in enumerate(_shares(count)) if share
      ],
    )
  ran, closed = seen.flooded.sent, seen.flooded.closed
  told = f"{closed:,} closed in {seen.seconds:.1f} s"
  if seen.flooded.faults:
    told += f"; {len(seen.flooded.faults)} faults: {seen.flooded.faults[0]}"
  return [
    Row(
      f"connections to the gRPC port that say {', '.join(flood_clients.JUNK)}",
      "each closed by the server, which serves on",
      told,
      closed == ran == count and not seen.flooded.faults,
      asked,
      ran,
    ),
    seen.cost(_MAX_JUNK_RSS),
    seen.processor(),
    seen.beside(),
  ]


def resets(rig: Rig, count: int = 100_000, asked: int = 100_000) -> list[Row]:
  """Streams that are reset as soon as they are open."""
  message = Ask((1, 2, 3), 400).message().SerializeToString()
  with rig.server("--fake_step_ms=10") as server:
    seen = _watch(
      rig,
      server,
      asked,
      count,
      lambda: [rig.submit(flood_clients.resets, server.port, share, message) for share in _shares(count) if share],
    )
  told = f"{seen.flooded.sent:,} in {seen.seconds:.1f} s"
  row = none_of("streams opened and reset at once", "nothing held, it serves on", seen.flooded.faults, count, asked)
  return [
    dataclasses.replace(row, measured=f"{row.measured} ({told})", passed=row.passed and seen.flooded.sent >= count),
    seen.cost(_MAX_RESET_RSS),
    seen.processor(),
    seen.beside(),
  ]


def frames(rig: Rig, count: int = 100_000, asked: int = 100_000) -> list[Row]:
  """Frames that ask for nothing, so many of each kind."""
  kinds = list(flood_clients.FRAMES)
  with rig.server("--fake_step_ms=10") as server:
    seen = _watch(
      rig,
      server,
      asked,
      count,
      lambda: [rig.submit(flood_clients.frames, server.port, count, kind) for kind in kinds],
    )
  calmed = seen.flooded.codes[_GOAWAY_CALM]
  told = f"{seen.flooded.sent:,} in {seen.seconds:.1f} s, {calmed:,} GOAWAYs ENHANCE_YOUR_CALM"
  row = none_of(
    f"frames of each kind: {', '.join(kinds)}", "nothing held, pings calmed", seen.flooded.faults, count, asked
  )
  passed = row.passed and calmed > 0 and seen.flooded.sent >= count * len(kinds)
  return [
    dataclasses.replace(row, measured=f"{row.measured} ({told})", passed=passed),
    seen.cost(_MAX_JUNK_RSS),
    seen.processor(),
    seen.beside(),
  ]
