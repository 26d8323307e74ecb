"""Counts of one process of a server and their sum, so that every process can report on the whole server."""

import asyncio
from collections.abc import Awaitable, Callable
import contextlib
import dataclasses
import os
import threading

from server.telemetry.access_log import AccessLog
from server.telemetry.latency_histograms import Observations


@dataclasses.dataclass(slots=True)
class ProcessCounts:
  """The counts of one process, or their sum over several.

  Attributes:
    observations: latencies and lengths, except queue times, which the engine's side knows.
    calls, failed: see AccessLog.
    num_started, num_live: generations.
    num_ended: generations by outcome.
    num_unhandled: unhandled errors of callbacks and tasks.
    num_lost_lines: access log lines that could not be written.
    num_late_events: see Generations.
    lag_s: lag of the event loop in seconds; the largest of several.
    num_tasks, num_threads, num_files, rss_bytes: resources in use.
    pids: ids of the processes.
  """

  observations: Observations = dataclasses.field(default_factory=Observations)
  calls: dict[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)
  failed: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
  num_started: int = 0
  num_live: int = 0
  num_ended: dict[str, int] = dataclasses.field(default_factory=dict)
  num_unhandled: int = 0
  num_lost_lines: int = 0
  num_late_events: int = 0
  lag_s: float = 0.0
  num_tasks: int = 0
  num_threads: int = 0
  num_files: int = 0
  rss_bytes: int = 0
  pids: list[int] = dataclasses.field(default_factory=list)

  def add_process(self, other: "ProcessCounts") -> None:
    """Adds the counts of another process."""
    self.observations.add_observations(other.observations)
    self.lag_s = max(self.lag_s, other.lag_s)
    for field in dataclasses.fields(self):
      mine, more = getattr(self, field.name), getattr(other, field.name)
      if isinstance(mine, dict):
        mine |= {key: mine.get(key, 0) + count for key, count in more.items()}
      elif isinstance(mine, int | list):
        setattr(self, field.name, mine + more)


def count_process(calls: AccessLog, lag_s: float) -> ProcessCounts:
  """Returns the counts of this process, without generations. Call it on the event loop; `lag_s` is the loop's lag."""
  num_files = resident_pages = 0
  with contextlib.suppress(OSError):
    num_files = len(os.listdir("/proc/self/fd"))
    with open("/proc/self/statm", encoding="ascii") as file:
      resident_pages = int(file.read().split()[1])
  return ProcessCounts(
    calls=calls.calls,
    failed=calls.failed,
    num_lost_lines=calls.num_lost,
    lag_s=lag_s,
    num_tasks=len(asyncio.all_tasks()),
    num_threads=threading.active_count(),
    num_files=num_files,
    rss_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
    pids=[os.getpid()],
  )


# Returns the summed counts of all processes of the server.
Census = Callable[[], Awaitable[ProcessCounts]]
