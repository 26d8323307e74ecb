"""The books of a whole server, as seen on its event loop: what was accepted, what became of it, what is left of it.

`report_books` is always there, for tests that look from outside. With --debug_invariants the books are also checked,
and the server dies of the first that is wrong. Changes nothing.
"""

import asyncio
from collections.abc import Callable

from engine.engine import Engine
from engine.request import FinishReason
from extensions.disaggregated.engine import DisaggregatedEngine
from server.generation.generations import Generations
from server.telemetry.process_counts import ProcessCounts
from tools.chaos.proto import chaos_pb2 as pb
from tools.chaos.server.checked_engine import CheckedEngine, InvariantBroken

_PERIOD_S = 0.2
# Between the engine's end of a request and its arrival here, a loaded machine may take a while.
_PATIENCE = 25  # looks
# Tasks of a call in progress, of gRPC and of HTTP.
_CALLS = ("_schedule_rpc_coro", "_handle_exceptions", "RequestResponseCycle.run_asgi")
# gRPC's tasks that wait for the next call of each method; between a call and the next turn there is one fewer.
_WAITING = ("AioServer._request_call", "AioServer._request_registered_call")


class Invariants:
  """Of one process of a server, which has the engine, or generations, or both. Everything runs on its event loop."""

  def __init__(
    self,
    engine: Engine | None,
    generations: Generations | None,
    num_held: Callable[[], int],
    on_breach: Callable[[BaseException], None],
  ):
    """Args:
    engine: None where it is in another process.
    generations: None where they are in others.
    num_held: counts the outputs that the server holds; none may be left when no request is live.
    on_breach: receives the first breach, once; a dead engine notifies its host itself.
    """
    self._engine = engine
    self._generations = generations
    self._num_held = num_held
    self._on_breach = on_breach
    self._loop = asyncio.get_running_loop()
    self._num_checks = 0
    self._breach: BaseException | None = None
    self._watch: asyncio.Task | None = None
    self._tasks_at_rest: int | None = None
    self._unrest = 0

  def start_checking(self) -> None:
    """Begins to check, until a breach or stop()."""
    self._watch = asyncio.create_task(self._run())

  def stop_checking(self) -> None:
    """Checks no more: a server that is taken down has tasks of its own."""
    if self._watch is not None:
      self._watch.cancel()

  @property
  def num_checks(self) -> int:
    """Turns of the engine's loop after which, and looks from here at which, everything was right."""
    return self._num_checks + sum(side.num_checks for side in self._sides())

  @property
  def breach(self) -> BaseException | None:
    """What was found wrong, here or in the engine."""
    if self._breach is None and self._engine is not None and isinstance(self._engine.dead, InvariantBroken):
      return self._engine.dead
    return self._breach

  def _sides(self) -> list[CheckedEngine]:
    engine = self._engine
    sides = (engine.prefill, engine.decode) if isinstance(engine, DisaggregatedEngine) else (engine,)
    return [side for side in sides if isinstance(side, CheckedEngine)]

  async def _run(self) -> None:
    while self._engine is None or self._engine.dead is None:
      await asyncio.sleep(_PERIOD_S)
      try:
        self.check_books()
      except AssertionError as error:
        self._breach = InvariantBroken(str(error))
        self._on_breach(self._breach)
        return
      self._num_checks += 1

  def check_books(self) -> None:
    """Asserts what holds at every turn of the event loop, and what must come to hold when no request is live."""
    engine, generations = self._engine, self._generations
    if generations is not None:
      _check_generations(generations)
    names = [name for task in asyncio.all_tasks(self._loop) if (name := _name(task)) not in _WAITING]
    is_asked = bool(generations) or engine is not None and engine.num_live
    if is_asked or any(name in _CALLS for name in names):
      self._unrest = 0
      return
    if self._tasks_at_rest is None:
      self._tasks_at_rest = len(names)
    lingering, tasks = self._num_held(), len(names) - self._tasks_at_rest
    used = engine.stats().blocks_used if engine is not None else 0
    if not lingering and tasks <= 0 and not used:
      self._unrest = 0
      return
    self._unrest += 1
    found = f"{lingering} outputs, {used} KV blocks and {tasks} tasks more than at the start ({sorted(names)})"
    assert self._unrest < _PATIENCE, f"no request is live, and there are still {found}"

  def report_books(self, counts: ProcessCounts) -> pb.GetInvariantsResponse:
    """All the books as they stand; where the engine is. `counts` are those of all processes."""
    engine, outcomes = self._engine, counts.num_ended
    assert engine is not None, "whoever has no engine has not all the books"
    stats = engine.stats()
    ended = stats.finished
    breach = self.breach
    return pb.GetInvariantsResponse(
      enabled=bool(self._sides()),
      checks_total=self.num_checks,
      breaches_total=int(breach is not None),
      breach=str(breach) if breach is not None else "",
      requests_accepted_total=engine.num_accepted,
      requests_finished_total=ended[FinishReason.STOP] + ended[FinishReason.LENGTH],
      requests_failed_total=ended[FinishReason.ERROR] + ended[FinishReason.TIMEOUT],
      requests_cancelled_total=ended[FinishReason.ABORT],
      requests_live=engine.num_live,
      generations_started_total=counts.num_started,
      generations_finished_total=outcomes.get("finished", 0),
      generations_failed_total=outcomes.get("failed", 0),
      generations_cancelled_total=outcomes.get("cancelled", 0),
      generations_live=counts.num_live,
      kv_blocks=stats.num_blocks,
      kv_blocks_in_use=stats.blocks_used,
      kv_blocks_cached=stats.blocks_cached,
      asyncio_tasks=counts.num_tasks,
      threads=counts.num_threads,
      open_files=counts.num_files,
      rss_bytes=counts.rss_bytes,
    )


def _name(task: asyncio.Task) -> str:
  return getattr(task.get_coro(), "__qualname__", "")


def _check_generations(generations: Generations) -> None:
  """Asserts that every generation is somewhere, once."""
  ended, live = sum(generations.num_ended.values()), len(generations._live)
  started = generations.num_started + generations._num_starting
  assert started == ended + live, f"{started} generations started, {ended} ended, {live} live"
  for engine_id, output in generations._outputs.items():
    generation = output.generation
    key = generation.owner, generation.request_id
    assert generations._live.get(key) is generation, f"output {engine_id!r:.80} outlived its generation"
