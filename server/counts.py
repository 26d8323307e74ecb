"""What the processes of a server have counted, and their sum: whoever asks any of them is told of all. Plain values."""

from collections.abc import Awaitable, Callable, Sequence
import dataclasses
import os
from typing import Any

from server.call_log import CallLog
from server.observations import Observations
from server.service import Service


@dataclasses.dataclass(slots=True)
class Counts:
  """Of one process, or of several together.

  Attributes:
    observations: latencies and lengths; but queue times, which the engine's side knows.
    calls, failed: see CallLog.
    num_started, num_live: generations.
    num_unhandled: see Service.
    lag_s: of the event loop; of several the longest.
    pids: of the processes.
  """

  observations: Observations = dataclasses.field(default_factory=Observations)
  calls: dict[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)
  failed: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
  num_started: int = 0
  num_live: int = 0
  num_unhandled: int = 0
  lag_s: float = 0.0
  pids: list[int] = dataclasses.field(default_factory=list)

  def plain(self) -> list[Any]:
    """As lists, texts and numbers."""
    return [
      self.observations.plain(),
      [[*labels, count] for labels, count in self.calls.items()],
      [[*labels, count] for labels, count in self.failed.items()],
      *(self.num_started, self.num_live, self.num_unhandled, self.lag_s, self.pids),
    ]

  @classmethod
  def from_plain(cls, plain: Sequence[Any]) -> "Counts":
    """The inverse; raises TypeError or ValueError for anything else."""
    seen, calls, failed, num_started, num_live, num_unhandled, lag_s, pids = plain
    return cls(
      observations=Observations.from_plain(seen),
      calls={(str(protocol), str(method), str(code)): int(count) for protocol, method, code, count in calls},
      failed={(str(protocol), str(reason)): int(count) for protocol, reason, count in failed},
      num_started=int(num_started),
      num_live=int(num_live),
      num_unhandled=int(num_unhandled),
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
    self.num_started += other.num_started
    self.num_live += other.num_live
    self.num_unhandled += other.num_unhandled
    self.lag_s = max(self.lag_s, other.lag_s)
    self.pids += other.pids


# Of all processes of the server.
Census = Callable[[], Awaitable[Counts]]


def own_counts(service: Service, calls: CallLog) -> Counts:
  """Of this process; what it returns is read, never changed."""
  backend = service.backend
  counts = Counts(
    calls=calls.calls,
    failed=calls.failed,
    num_unhandled=service.num_unhandled,
    lag_s=service.watchdog.lag_s if service.watchdog is not None else 0.0,
    pids=[os.getpid()],
  )
  if backend is not None:
    generations = backend.generations
    counts.observations = generations.observations
    counts.num_started, counts.num_live = generations.num_started, len(generations)
  return counts


def own_census(service: Service, calls: CallLog) -> Census:
  """Where there is one process."""

  async def census() -> Counts:
    return own_counts(service, calls)

  return census
