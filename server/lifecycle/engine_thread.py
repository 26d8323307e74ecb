"""The engine's thread and who watches it. Knows neither network nor requests."""

import asyncio
from collections.abc import Callable
import contextlib
import threading

from server.errors import EngineDead
from server.generation.engine_client import EngineClient
from server.lifecycle.watchdog import Watchdog


class EngineThread:
  """Runs an engine until it is told to stop or the engine ends. Belongs to one event loop.

  Attributes:
    engine: what it runs.
    watchdog: looks at the engine and at the event loop; None where nothing is watched.
  """

  def __init__(
    self,
    engine: EngineClient,
    on_failure: Callable[[BaseException], None],
    ended: asyncio.Event,
    *,
    step_timeout_s: float,
    grace_s: float,
    may_exit: bool,
  ):
    """Args:
    engine: runs here.
    on_failure: called, on any thread, with what ended it or with what stands still.
    ended: set when the engine has ended without having been stopped.
    step_timeout_s: as in HostOptions.
    grace_s: from there to the hard end of the process, and how long the thread may take to stop.
    may_exit: the process may be ended where it cannot end itself.
    """
    self.engine = engine
    self._on_failure = on_failure
    self._grace_s = grace_s
    self._loop = asyncio.get_running_loop()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
    self._ended = ended
    self.watchdog: Watchdog | None = None
    if step_timeout_s:
      self.watchdog = Watchdog(
        timeout_s=step_timeout_s,
        grace_s=grace_s,
        heartbeat=lambda: engine.heartbeat,
        on_stuck=lambda what: on_failure(EngineDead(what)),
        may_exit=may_exit,
      )

  @property
  def is_alive(self) -> bool:
    """Whether the thread runs."""
    return self._thread.is_alive()

  def start_thread(self) -> None:
    """Begins."""
    self._thread.start()
    if self.watchdog is not None:
      self.watchdog.start_watching()

  async def stop_thread(self, idle_s: float, wait_s: float) -> None:
    """Ends it.

    Args:
      idle_s: how long it may still take in aborts.
      wait_s: how long its thread may take then; one that is stuck is left alone.
    """
    engine = self.engine
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(idle_s):
        while engine.num_live and engine.dead is None:
          await asyncio.sleep(0.005)
    self.stop_watching()
    self._stop.set()
    self.engine.wake()
    await self._loop.run_in_executor(None, self._thread.join, wait_s)

  def stop_watching(self) -> None:
    """It may stand still from now on."""
    if self.watchdog is not None:
      self.watchdog.stop_watching()

  def _run(self) -> None:
    try:
      self.engine.run(self._stop)
    except BaseException as error:
      # Exceptions end the engine, which says so itself; whatever is not one of those ends the thread.
      self._on_failure(error)
    finally:
      if not self._stop.is_set():
        self._loop.call_soon_threadsafe(self._ended.set)
