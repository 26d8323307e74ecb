"""A bar on standard error for what takes longer than a second; silent where nobody looks. Measures nothing."""

from collections.abc import Callable, Iterator
import contextlib
import sys
import threading
from typing import Any

_DELAY_S = 1.0
_UNITS = {"compile": "program", "warm up": "program"}  # of what the engine's build tells; all else is counted in MiB


def is_watched() -> bool:
  """Whether standard error is a terminal, or the program a notebook."""
  return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextlib.contextmanager
def show_progress(what: str, total: int, progress: bool | None, unit: str = "prompt") -> Iterator[Any]:
  """A tqdm bar, or None where there is to be none.

  Args:
    what: its title.
    total: at which it is full.
    progress: None: where somebody looks.
    unit: what is counted.
  """
  if not (is_watched() if progress is None else progress):
    yield None
    return
  from tqdm import tqdm

  with tqdm(total=total, desc=what, unit=unit, delay=_DELAY_S, file=sys.stderr, dynamic_ncols=True) as bar:
    yield bar


def advance_bar(bar: Any, done: int) -> None:
  """Moves a bar to `done`."""
  if bar is not None and done > bar.n:
    bar.update(done - bar.n)


@contextlib.contextmanager
def show_parts(progress: bool | None) -> Iterator[Callable[[str, int, int], None]]:
  """A bar for each part of a start, moved by calls as of engine.device.runner.Progress, from any thread."""
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
