"""What this process has counted, gathered from those who count. Changes nothing."""

import asyncio
import contextlib
import os
import threading

from server.generation.serving_state import ServingState
from server.lifecycle.watchdog import Watchdog
from server.telemetry.call_log import CallLog
from server.telemetry.process_counts import ProcessCounts


def count_front_end(state: ServingState, calls: CallLog, watchdog: Watchdog | None) -> ProcessCounts:
  """Of a process with a front end; what it returns is read, never changed."""
  counts = count_process(calls, watchdog)
  counts.num_unhandled = state.num_unhandled
  if state.backend is not None:
    generations = state.backend.generations
    counts.observations = generations.observations
    counts.num_started, counts.num_live = generations.num_started, len(generations)
    counts.num_ended = generations.num_ended
    counts.num_late_events = generations.num_late_events
  return counts


def count_process(calls: CallLog, watchdog: Watchdog | None) -> ProcessCounts:
  """Of a process that may have no front end; on its event loop."""
  return ProcessCounts(
    calls=calls.calls,
    failed=calls.failed,
    num_lost_lines=calls.num_lost,
    lag_s=watchdog.lag_s if watchdog is not None else 0.0,
    num_tasks=len(asyncio.all_tasks()),
    num_threads=threading.active_count(),
    num_files=_count_open_files(),
    rss_bytes=_resident_bytes(),
    pids=[os.getpid()],
  )


def _count_open_files() -> int:
  with contextlib.suppress(OSError):
    return len(os.listdir("/proc/self/fd"))
  return 0


def _resident_bytes() -> int:
  with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  return 0
