"""What a front end needs of an engine, in this process or behind a socket (server/ipc/remote_engine.py).

Nothing here knows gRPC, HTTP or text. Events do not pass this way: an engine hands them to `Generations.dispatch`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import resource
from typing import Protocol

from engine.config import EngineConfig
from engine.engine import Engine
from engine.recorder import RING_STEPS, EngineStats
from engine.request import FinishReason, Request
from server.telemetry.latency_histograms import Histogram, Observations

# The engine keeps its latest RING_STEPS records of requests; looked at this often, none is missed.
_LOOK_UP_ENDINGS = RING_STEPS // 4


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
  """An engine at one instant.

  Attributes:
    stats: its counters, with as many records as were asked for.
    now_s, heartbeat_s: on its clock; the second is of its loop's latest turn.
    compiles_after_ready: XLA compilations.
    peak_rss_bytes: of all processes of the server.
    queue: seconds that requests which ended have waited.
    blocks: see BlockPool.block_states; empty where it was not asked for.
  """

  stats: EngineStats
  now_s: float
  heartbeat_s: float
  compiles_after_ready: int
  peak_rss_bytes: int
  queue: Histogram
  blocks: bytes = b""


class EngineClient(Protocol):
  """An engine as a front end sees it. All of it belongs to the front end's event loop."""

  config: EngineConfig

  def now(self) -> float:
    """The clock that deadlines are on, seconds."""
    ...

  def num_held(self) -> int:
    """Ids that are in use, of requests that nobody waits for, too."""
    ...

  def new_id(self, name: str) -> str:
    """An id for a request that goes by `name`: no other has it until ended() was called for it."""
    ...

  def ended(self, request_id: str) -> None:
    """The last event of this id has come, or none will come."""
    ...

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    """Accepts all outputs of a generation or none of them. After a cancellation either may be so; abort them.

    Raises:
      DuplicateRequest: a live generation of this owner has this name, perhaps at another front end.
      InvalidRequest, Overloaded, Unavailable: from the engine.
    """
    ...

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    """Ends a request; one that is unknown or has ended is ignored."""
    ...

  async def abort_elsewhere(self, owner: str, names: Sequence[str]) -> list[bool]:
    """Ends this owner's live generations at other front ends; returns, for each name, whether there was one."""
    ...

  async def report(self, num_records: int = 0, *, with_blocks: bool = False) -> Report:
    """The engine now, with its latest `num_records` records of steps and requests."""
    ...


class LocalEngine:
  """An engine in this process. Implements EngineClient for one front end, and is what the others' requests come to.

  Attributes:
    inner: the engine itself, for who runs it or checks its books.
  """

  def __init__(self, engine: Engine, compiles_after_ready: Callable[[], int] = lambda: 0):
    """Args: engine: gets the requests. compiles_after_ready: counts XLA compilations."""
    self.inner = engine
    self.config = engine.config
    self._compiles_after_ready = compiles_after_ready
    self._held: set[str] = set()
    self._observations = Observations()
    self._endings_to_look_up = 0

  def now(self) -> float:
    return self.inner.now()

  def num_held(self) -> int:
    return len(self._held)

  def new_id(self, name: str) -> str:
    """`name`, or a variant while the engine still holds a request of that id."""
    request_id, serial = name, 1
    while request_id in self._held:
      request_id, serial = f"{name}~{serial}", serial + 1
    self._held.add(request_id)
    return request_id

  def ended(self, request_id: str) -> None:
    self._held.discard(request_id)
    self._endings_to_look_up += 1
    if self._endings_to_look_up >= _LOOK_UP_ENDINGS:
      self._look_up_endings()

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    """Names are told apart by the only front end there is."""
    self.inner.submit_all(requests)

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    self.inner.abort(request_id, reason)

  async def abort_elsewhere(self, owner: str, names: Sequence[str]) -> list[bool]:
    """There is no other front end."""
    return [False] * len(names)

  async def report(self, num_records: int = 0, *, with_blocks: bool = False) -> Report:
    self._look_up_endings()
    return Report(
      stats=self.inner.stats(num_records),
      now_s=self.inner.now(),
      heartbeat_s=self.inner.heartbeat,
      compiles_after_ready=self._compiles_after_ready(),
      # Linux counts in KiB.
      peak_rss_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
      queue=self._observations.queue,
      blocks=self.inner.block_states() if with_blocks else b"",
    )

  def _look_up_endings(self) -> None:
    """Queue times, which only the engine's own records tell."""
    self._endings_to_look_up = 0
    self._observations.queued(self.inner.stats(RING_STEPS).requests)
