"""Ends a server that stands still or has lost a part, which no supervisor can see from outside. Serves nothing itself.

What is watched, from a thread of its own: that the engine's loop turns, and that the event loop answers. Where one has
stood too long, every thread's stack goes to standard error, the host is told, so that it tells its clients, and the
process ends a little later however that went. While all is well a timer in C (faulthandler's) is set anew at each look:
it ends the process where no Python runs any more, as when a thread keeps the interpreter's lock for ever.

Time is counted in looks, not by the clock: whoever stops the whole process (SIGSTOP, a paused machine) for less than
what the timer in C allows finds it alive.
"""

import asyncio
from collections.abc import Callable, Iterator
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from typing import Any

from server.lifecycle import systemd_notify

_STDERR = 2
EXIT_CODE = 1
_PACKAGES = ("/server/", "/engine/")

_log = logging.getLogger(__name__)


class _Stillness:
  """How long a number has not changed."""

  def __init__(self) -> None:
    self._seen: float | None = None
    self.stood_s = 0.0

  def look(self, beat: float, elapsed_s: float) -> None:
    self.stood_s = self.stood_s + elapsed_s if beat == self._seen else 0.0
    self._seen = beat


class Watchdog:
  """A thread that looks at the engine and at one event loop. Made and started on that loop.

  Attributes:
    lag_s: how long the event loop took to answer the latest look that it has answered.
  """

  def __init__(
    self,
    *,
    timeout_s: float,
    grace_s: float,
    heartbeat: Callable[[], float],
    on_stuck: Callable[[str], None],
    may_exit: bool,
  ):
    """Args:
    timeout_s: an engine or an event loop that stands this long is stuck.
    grace_s: from there to the end of the process.
    heartbeat: of the engine; a number that changes while it turns.
    on_stuck: called on the event loop, if that still runs, with what stands and for how long.
    may_exit: whether the process may be ended.
    """
    self._timeout_s = timeout_s
    self._grace_s = grace_s
    self._heartbeat = heartbeat
    self._on_stuck = on_stuck
    self._may_exit = may_exit
    self._loop = asyncio.get_running_loop()
    self._answers = 0
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
    self.lag_s = 0.0

  def start_watching(self) -> None:
    """Begins to look."""
    self._set_timer()
    self._thread.start()

  def stop_watching(self) -> None:
    """Looks no more, and lets the process live."""
    self._stop.set()
    self._thread.join()

  def _run(self) -> None:
    period_s = min(1.0, self._timeout_s / 4)
    engine, front = _Stillness(), _Stillness()
    looked = time.monotonic()
    try:
      while not self._stop.wait(period_s):
        now = time.monotonic()
        elapsed_s, looked = min(now - looked, 2 * period_s), now
        engine.look(self._heartbeat(), elapsed_s)
        front.look(self._answers, elapsed_s)
        for name, still in (("engine", engine), ("event loop", front)):
          if still.stood_s > self._timeout_s:
            self._stuck(f"the {name} has stood still for {still.stood_s:.1f} s")
            return
        self._loop.call_soon_threadsafe(self._answer, now)
        self._set_timer()
        systemd_notify.notify_systemd("WATCHDOG=1")
    except RuntimeError:
      if not self._loop.is_closed():
        raise
    finally:
      if self._may_exit:
        faulthandler.cancel_dump_traceback_later()

  def _set_timer(self) -> None:
    if self._may_exit:
      faulthandler.dump_traceback_later(self._timeout_s + self._grace_s, exit=True, file=_STDERR)

  def _answer(self, asked: float) -> None:
    self._answers += 1
    self.lag_s = time.monotonic() - asked

  def _stuck(self, what: str) -> None:
    _log.critical("%s; the server ends. All threads:", what)
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    self._loop.call_soon_threadsafe(self._on_stuck, what)
    if not self._stop.wait(self._grace_s) and self._may_exit:
      exit_now(EXIT_CODE)


def exit_now(code: int) -> None:
  """Ends the process without asking any of its threads."""
  sys.stderr.flush()
  os._exit(code)


def exit_soon(grace_s: float) -> None:
  """Ends the process if it has not ended by itself after `grace_s`, with all stacks on standard error."""
  faulthandler.dump_traceback_later(grace_s, exit=True, file=_STDERR)


@contextlib.contextmanager
def limit_seconds(limit_s: float) -> Iterator[None]:
  """Ends the process, with all stacks on standard error, if the block takes longer, and even if nothing else can run.

  Not while a Watchdog runs: there is one timer a process.
  """
  exit_soon(limit_s)
  try:
    yield
  finally:
    faulthandler.cancel_dump_traceback_later()


def watch_threads(on_death: Callable[[BaseException], None]) -> None:
  """From now on a thread of the process that dies of anything is told to `on_death`, on that thread.

  Deaths by SystemExit, which threads have in silence otherwise, are no exception.
  """

  def hook(died: threading.ExceptHookArgs) -> None:
    error = died.exc_value or died.exc_type()
    name = died.thread.name if died.thread is not None else "gone"
    _log.critical("the thread %r has died", name, exc_info=error)
    on_death(error)

  threading.excepthook = hook


def watch_loop(
  loop: asyncio.AbstractEventLoop, on_death: Callable[[BaseException], None], on_other: Callable[[], None]
) -> None:
  """Judges what a loop's callbacks and tasks have raised and nobody has taken.

  A callback of ours that fails has lost what it carried, for calls that wait for it: `on_death`. A task is one call's
  and has failed alone, and connections fail as they like: they are logged, and counted by `on_other`.
  """

  def handler(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    alone = any(context.get(key) is not None for key in ("task", "future", "transport", "protocol", "asyncgen"))
    fatal = error is not None and not alone and _is_ours(error)
    _log.log(
      logging.CRITICAL if fatal else logging.ERROR,
      "unhandled: %s",
      context.get("message", "no message"),
      exc_info=error,
    )
    on_death(error) if fatal and error is not None else on_other()

  loop.set_exception_handler(handler)


def _is_ours(error: BaseException) -> bool:
  """Whether it was raised in, or passed through, our own code."""
  at = error.__traceback__
  root = os.path.abspath(__file__).rsplit(os.sep, 3)[0]
  while at is not None:
    if at.tb_frame.f_code.co_filename.startswith(tuple(root + package for package in _PACKAGES)):
      return True
    at = at.tb_next
  return False
