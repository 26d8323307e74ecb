"""Ends a server that is stuck or has lost a thread, which no supervisor can see from outside. Serves nothing itself.

A thread checks that the engine's loop iterates and that the event loop answers. If one of them is stuck too long, the
watchdog writes every thread's stack to standard error and notifies the host and so its clients. The process then
ends after a grace period, whatever the host does. Each check also resets a timer in C (faulthandler's), which ends the
process if Python no longer runs, for example if a thread holds the interpreter's lock for ever.

Time is counted in checks, not by the clock. A process that is stopped as a whole (SIGSTOP, a paused machine) for less
than the C timer's limit therefore survives.
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
  """Counts how long a number has not changed."""

  def __init__(self) -> None:
    self._seen: float | None = None
    self.stood_s = 0.0

  def look(self, beat: float, elapsed_s: float) -> None:
    self.stood_s = self.stood_s + elapsed_s if beat == self._seen else 0.0
    self._seen = beat


class Watchdog:
  """A thread that checks the engine and one event loop. Made and started on that loop.

  Attributes:
    lag_s: seconds the event loop took to answer its latest answered check.
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
    timeout_s: an engine or an event loop without progress for this long is stuck.
    grace_s: from there to the end of the process.
    heartbeat: the engine's; a number that changes at each iteration.
    on_stuck: called on the event loop, if that still runs, with the name of the stuck part and the seconds.
    may_exit: whether the watchdog may end the process.
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
    """Starts the checks."""
    self._set_timer()
    self._thread.start()

  def stop_watching(self) -> None:
    """Stops the checks; the process lives on."""
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
            self._stuck(f"the {name} has been stuck for {still.stood_s:.1f} s")
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
  """Ends the process at once, without waiting for its threads."""
  sys.stderr.flush()
  os._exit(code)


def exit_soon(grace_s: float) -> None:
  """Ends the process unless it ends by itself within `grace_s`; writes all stacks to standard error."""
  faulthandler.dump_traceback_later(grace_s, exit=True, file=_STDERR)


@contextlib.contextmanager
def limit_seconds(limit_s: float) -> Iterator[None]:
  """Ends the process if the block takes longer, even if no Python runs; writes all stacks to standard error.

  Not while a Watchdog runs: there is one timer a process.
  """
  exit_soon(limit_s)
  try:
    yield
  finally:
    faulthandler.cancel_dump_traceback_later()


def watch_threads(on_death: Callable[[BaseException], None]) -> None:
  """From now on calls `on_death` when a thread of the process dies, on that thread.

  This includes SystemExit, which ends a thread silently otherwise.
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
  """Handles exceptions of a loop's callbacks and tasks that nothing has caught.

  A failed callback of Sluice has lost data that calls wait for, so `on_death` is called. A failed task loses only its
  own call, and connections fail on their own: both are logged and counted by `on_other`.
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
  """Whether Sluice's code raised the exception or passed it on."""
  at = error.__traceback__
  root = os.path.abspath(__file__).rsplit(os.sep, 3)[0]
  while at is not None:
    if at.tb_frame.f_code.co_filename.startswith(tuple(root + package for package in _PACKAGES)):
      return True
    at = at.tb_next
  return False
