"""The engine's interface for a front end, in this process or behind a socket. Knows neither gRPC, HTTP nor text.

`server/ipc/remote_engine.py` is the one behind a socket. Events take another way: an engine hands them to
`Generations.dispatch_events`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import resource
from typing import Protocol

from engine.adapters import AdapterInfo, AdapterState
from engine.config import EngineConfig
from engine.engine import Engine
from engine.recorder import RING_STEPS, EngineStats
from engine.request import FinishReason, Request
from server.generation.adapter_loader import AdapterLoader
from server.generation.response_store import KeptResponses
from server.telemetry.latency_histograms import Histogram, Observations

# Seconds between two reads. The engine keeps its latest RING_STEPS records of requests, so none is missed.
_LOOK_UP_ENDINGS = RING_STEPS // 4


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
  """The state of an engine at one instant.

  Attributes:
    stats: its counters, with the requested number of records.
    now_s, heartbeat_s: times on its clock: now, and its loop's latest iteration.
    compiles_after_ready: XLA compilations since ready.
    peak_rss_bytes: peak resident memory of all processes of the server.
    queue: queue times of finished requests, in seconds.
    blocks: see BlockPool.block_states; empty unless requested.
    adapters: the LoRA adapters that hold a slot.
  """

  stats: EngineStats
  now_s: float
  heartbeat_s: float
  compiles_after_ready: int
  peak_rss_bytes: int
  queue: Histogram
  blocks: bytes = b""
  adapters: tuple[AdapterInfo, ...] = ()


class EngineClient(Protocol):
  """The engine's interface for a front end. Belongs to the front end's event loop.

  Attributes:
    config: the engine's.
    responses: the stored responses that all front ends share; None: this process keeps its own.
  """

  config: EngineConfig
  responses: KeptResponses | None

  def now(self) -> float:
    """Returns the time in seconds on the clock of deadlines."""
    ...

  def num_held(self) -> int:
    """Returns the number of ids in use, including those of requests whose client has gone."""
    ...

  def new_id(self, name: str) -> str:
    """Returns an id for a request with this name; it stays unique until `ended` is called for it."""
    ...

  def ended(self, request_id: str) -> None:
    """Frees an id: its last event has arrived, or none will."""
    ...

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    """Submits all outputs of a generation, or none. After a cancellation either is possible, so abort them.

    Raises:
      DuplicateRequest: a live generation of this owner has this name, perhaps at another front end.
      InvalidRequest, Overloaded, Unavailable: the engine refused it.
    """
    ...

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    """Aborts a request; ignores an unknown or finished one."""
    ...

  async def abort_elsewhere(self, owner: str, names: Sequence[str]) -> list[bool]:
    """Aborts this owner's live generations at other front ends; returns for each name whether there was one."""
    ...

  async def report(self, num_records: int = 0, *, with_blocks: bool = False) -> Report:
    """Returns the engine's state, with its latest `num_records` records of steps and requests."""
    ...

  def adapters(self) -> Sequence[AdapterInfo]:
    """Returns the LoRA adapters that take requests."""
    ...

  async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
    """See AdapterLoader.load_adapter."""
    ...

  async def unload_adapter(self, name: str) -> int:
    """See AdapterLoader.unload_adapter."""
    ...


class LocalEngine:
  """An engine in this process. Implements EngineClient for one front end, and receives other front ends' requests.

  Attributes:
    inner: the engine itself, for the code that runs it.
    adapter_loader: loads LoRA adapters.
  """

  def __init__(
    self,
    engine: Engine,
    compiles_after_ready: Callable[[], int] = lambda: 0,
    adapter_loader: AdapterLoader | None = None,
  ):
    """Args:
    engine: receives the requests.
    compiles_after_ready: counts XLA compilations.
    adapter_loader: for this engine; None loads no adapters.
    """
    self.inner = engine
    self.adapter_loader = adapter_loader or AdapterLoader(engine, None, model="")
    self.config = engine.config
    self.responses: KeptResponses | None = None
    self._compiles_after_ready = compiles_after_ready
    self._held: set[str] = set()
    self._observations = Observations()
    self._endings_to_look_up = 0

  def now(self) -> float:
    return self.inner.now()

  def num_held(self) -> int:
    return len(self._held)

  def new_id(self, name: str) -> str:
    """Returns `name`, or a variant of it while the engine still holds a request of that id."""
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
    """Submits to the engine. The only front end keeps names unique."""
    self.inner.submit_all(requests)

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    self.inner.abort(request_id, reason)

  async def abort_elsewhere(self, owner: str, names: Sequence[str]) -> list[bool]:
    """Aborts nothing: there is no other front end."""
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
      adapters=tuple(self.inner.adapters()),
    )

  def adapters(self) -> Sequence[AdapterInfo]:
    return [adapter for adapter in self.inner.adapters() if adapter.state == AdapterState.LOADED.value]

  async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
    await self.adapter_loader.load_adapter(name, path, replaces=replaces)

  async def unload_adapter(self, name: str) -> int:
    return await self.adapter_loader.unload_adapter(name)

  def _look_up_endings(self) -> None:
    """Adds queue times, which only the engine's records hold."""
    self._endings_to_look_up = 0
    self._observations.queued(self.inner.stats(RING_STEPS).requests)
