"""Shows progress bars on standard error after one second, on a terminal or in a notebook. Measures nothing."""

from collections.abc import Callable, Iterator
import contextlib
import sys
import threading
from typing import Any

_DELAY_S = 1.0
_UNITS = {"compile": "program", "warm up": "program"}  # of the engine's build; other parts count MiB


def is_watched() -> bool:
  """Returns whether standard error is a terminal or the program runs in a notebook."""
  return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextlib.contextmanager
def show_progress(what: str, total: int, progress: bool | None, unit: str = "prompt") -> Iterator[Any]:
  """Yields a tqdm bar, or None for no bar.

  Args:
    what: the title.
    total: the count at which the bar is full.
    progress: whether to show a bar; None: if `is_watched`.
    unit: the unit of the count.
  """
  if not (is_watched() if progress is None else progress):
    yield None
    return
  from tqdm import tqdm

  with tqdm(total=total, desc=what, unit=unit, delay=_DELAY_S, file=sys.stderr, dynamic_ncols=True) as bar:
    yield bar


def advance_bar(bar: Any, done: int) -> None:
  """Sets a bar to `done`."""
  if bar is not None and done > bar.n:
    bar.update(done - bar.n)


@contextlib.contextmanager
def show_parts(progress: bool | None) -> Iterator[Callable[[str, int, int], None]]:
  """Yields an engine.device.runner.Progress that shows a bar for each part of the start, from any thread."""
  lock = threading.Lock()
  with contextlib.ExitStack() as shown:
    what_now, bar = "", None

    def advance(what: str, done: int, total: int) -> None:
      nonlocal what_now, bar
      with lock:
        if what != what_now:
          shown.close()
          what_now = what
          bar = shown.enter_context(show_progress(what, total, progress, _UNITS.get(what, "MiB")))
        advance_bar(bar, done)

    yield advance
