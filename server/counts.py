"""What the processes of a server have counted, and their sum: whoever asks any of them is told of all. Plain values."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
import contextlib
import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Any

from server.call_log import CallLog
from server.observations import Observations
from server.watchdog import Watchdog

if TYPE_CHECKING:
  from server.invariants import Invariants
  from server.service import Service


_SUMS = (
  *("num_started", "num_live", "num_checks", "num_breaches"),
  *("num_unhandled", "num_lost_lines", "num_late_events"),
  *("num_tasks", "num_threads", "num_files", "rss_bytes"),
)


@dataclasses.dataclass(slots=True)
class Counts:
  """Of one process, or of several together.

  Attributes:
    observations: latencies and lengths; but queue times, which the engine's side knows.
    calls, failed: see CallLog.
    num_started, num_live: generations.
    num_ended: generations by their outcome.
    num_checks, num_breaches: of invariants.
    num_unhandled: see Service.
    num_lost_lines: of the access log, that could not be written.
    num_late_events: see Generations.
    lag_s: of the event loop; of several the longest.
    num_tasks, num_threads, num_files, rss_bytes: what they hold of the system.
    pids: of the processes.
  """

  observations: Observations = dataclasses.field(default_factory=Observations)
  calls: dict[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)
  failed: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
  num_started: int = 0
  num_live: int = 0
  num_ended: dict[str, int] = dataclasses.field(default_factory=dict)
  num_checks: int = 0
  num_breaches: int = 0
  num_unhandled: int = 0
  num_lost_lines: int = 0
  num_late_events: int = 0
  lag_s: float = 0.0
  num_tasks: int = 0
  num_threads: int = 0
  num_files: int = 0
  rss_bytes: int = 0
  pids: list[int] = dataclasses.field(default_factory=list)

  def plain(self) -> list[Any]:
    """As lists, texts and numbers."""
    return [
      self.observations.plain(),
      [[*labels, count] for labels, count in self.calls.items()],
      [[*labels, count] for labels, count in self.failed.items()],
      list(self.num_ended.items()),
      [getattr(self, name) for name in _SUMS],
      *(self.lag_s, self.pids),
    ]

  @classmethod
  def from_plain(cls, plain: Sequence[Any]) -> "Counts":
    """The inverse; raises TypeError or ValueError for anything else."""
    seen, calls, failed, num_ended, sums, lag_s, pids = plain
    return cls(
      observations=Observations.from_plain(seen),
      calls={(str(protocol), str(method), str(code)): int(count) for protocol, method, code, count in calls},
      failed={(str(protocol), str(reason)): int(count) for protocol, reason, count in failed},
      num_ended={str(outcome): int(count) for outcome, count in num_ended},
      **{name: int(count) for name, count in zip(_SUMS, sums, strict=True)},
      lag_s=float(lag_s),
      pids=[int(pid) for pid in pids],
    )

  def add(self, other: "Counts") -> None:
    """Takes another's into this one."""
    self.observations.add(other.observations)
    for labels, count in other.calls.items():
      self.calls[labels] = self.calls.get(labels, 0) + count
    for labels, count in other.failed.items():
      self.failed[labels] = self.failed.get(labels, 0) + count
    for outcome, count in other.num_ended.items():
      self.num_ended[outcome] = self.num_ended.get(outcome, 0) + count
    for name in _SUMS:
      setattr(self, name, getattr(self, name) + getattr(other, name))
    self.lag_s = max(self.lag_s, other.lag_s)
    self.pids += other.pids


# Of all processes of the server.
Census = Callable[[], Awaitable[Counts]]


def own_counts(service: "Service", calls: CallLog) -> Counts:
  """Of this process; what it returns is read, never changed."""
  backend = service.backend
  counts = process_counts(calls, service.watchdog, service.invariants)
  counts.num_unhandled = service.num_unhandled
  if backend is not None:
    generations = backend.generations
    counts.observations = generations.observations
    counts.num_started, counts.num_live = generations.num_started, len(generations)
    counts.num_ended = generations.num_ended
    counts.num_late_events = generations.num_late_events
  return counts


def process_counts(calls: CallLog, watchdog: Watchdog | None, invariants: "Invariants | None") -> Counts:
  """Of a process that may have no service; on its event loop."""
  return Counts(
    calls=calls.calls,
    failed=calls.failed,
    num_checks=invariants.num_checks if invariants is not None else 0,
    num_breaches=int(invariants is not None and invariants.breach is not None),
    num_lost_lines=calls.num_lost,
    lag_s=watchdog.lag_s if watchdog is not None else 0.0,
    num_tasks=len(asyncio.all_tasks()),
    num_threads=threading.active_count(),
    num_files=_open_files(),
    rss_bytes=_rss_bytes(),
    pids=[os.getpid()],
  )


def _open_files() -> int:
  with contextlib.suppress(OSError):
    return len(os.listdir("/proc/self/fd"))
  return 0


def _rss_bytes() -> int:
  with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  return 0


def own_census(service: "Service", calls: CallLog) -> Census:
  """Where there is one process."""

  async def census() -> Counts:
    return own_counts(service, calls)

  return census
