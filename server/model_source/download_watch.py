"""Reports a download's progress, stops it, and checks the free disk. Downloads nothing itself."""

from collections.abc import Callable
import errno
import os
import pathlib
import shutil
import threading
import time

from engine.errors import ConfigError

_FIRST_LINE_S = 2.0
# The interval of lines as a share of the elapsed time, so that a long download does not fill the log.
_PACE = 0.05
_MIB = 1 << 20


class DownloadStopped(Exception):
  """The caller stopped the download, which left no partial file in a model's folder."""


class DownloadWatch:
  """Reports a download's lines and progress, and stops it. All methods may be called from any thread.

  Args of the constructor:
    report: called with each line; None: discards them.
    tell_progress: called often with (what, MiB done, MiB in total); None: progress goes to `report` as lines.
  """

  def __init__(
    self,
    report: Callable[[str], None] | None = None,
    tell_progress: Callable[[str, int, int], None] | None = None,
  ):
    self._report = report
    self.tell_progress = tell_progress
    self._stopped = threading.Event()

  def report_line(self, line: str) -> None:
    """Passes one line to `report`."""
    if self._report is not None:
      self._report(line)

  def begin_progress(self, what: str, total: int) -> "ByteProgress":
    """Begins to count the `total` bytes of `what`, for example "downloading ORG/NAME"."""
    if self.tell_progress is None:
      self.report_line(f"{what}: {format_bytes(total)}")
    return ByteProgress(what, total, self)

  def request_stop(self) -> None:
    """Stops the download: its next piece raises DownloadStopped."""
    self._stopped.set()

  def check_stopped(self) -> None:
    """Raises DownloadStopped after `request_stop`."""
    if self._stopped.is_set():
      raise DownloadStopped


class ByteProgress:
  """Counts bytes, and reports them every two seconds at first, then less often. `begin_progress` makes it."""

  def __init__(self, what: str, total: int, watch: DownloadWatch):
    self._what, self._total, self._watch = what, total, watch
    self._lock = threading.Lock()
    self._done, self._reported = 0, -1
    self._began = time.monotonic()
    self._next_line = self._began + _FIRST_LINE_S
    self.add_bytes(0)

  def add_bytes(self, count: int) -> None:
    """Adds `count` bytes. Raises DownloadStopped after `request_stop`."""
    self._watch.check_stopped()
    with self._lock:
      self._done += count
      if self._watch.tell_progress is not None:
        total = -(-self._total // _MIB)
        done = total if self._done >= self._total else self._done // _MIB
        if done != self._reported:
          self._reported = done
          self._watch.tell_progress(self._what, done, total)
      elif (now := time.monotonic()) >= self._next_line:
        elapsed = now - self._began
        self._next_line = now + max(_FIRST_LINE_S, _PACE * elapsed)
        self._watch.report_line(self._progress_line(elapsed))

  def _progress_line(self, elapsed: float) -> str:
    speed = self._done / elapsed
    left = max(0, self._total - self._done) / speed if speed else 0.0
    duration = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    done, total = format_bytes(self._done), format_bytes(self._total)
    return f"{self._what}: {done} of {total}, {format_bytes(int(speed))}/s, {duration} left"


def format_bytes(count: int) -> str:
  """Formats bytes, for example "1.5 GB"; 1 GB is 10^9 bytes, as on the hub's pages."""
  for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
    if count >= size:
      return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
  return f"{count} bytes"


def make_cache_folder(folder: pathlib.Path, remedy: str) -> None:
  """Makes a folder for downloads. Raises ConfigError if it cannot be written."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
      raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
  except OSError as error:
    raise ConfigError(
      f"{folder}: cannot be written ({error.strerror}), and downloads go there; set {remedy} to a folder that can be"
    ) from error


def check_free_disk(folder: pathlib.Path, needed: int, what: str, remedy: str) -> None:
  """Raises ConfigError unless the disk of `folder`, which exists, has `needed` bytes free."""
  free = shutil.disk_usage(folder).free
  if needed > free:
    raise ConfigError(
      f"{what}: {format_bytes(needed)} are to be downloaded, and the disk of {folder} has {format_bytes(free)} free; "
      f"free some, or set {remedy} to a folder on a larger disk"
    )


def describe_disk_error(error: OSError, folder: pathlib.Path, remedy: str) -> str | None:
  """Returns why a file could not be written to `folder`, and what to do; None if the error is not the disk's."""
  if error.errno in (errno.ENOSPC, errno.EDQUOT):
    return f"the disk of {folder} is full; free some of it, or set {remedy} to a folder on a larger disk"
  if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
    return f"{error.filename or folder} cannot be written ({error.strerror}); set {remedy} to a folder that can be"
  return None


def name_error(error: BaseException) -> str:
  """Returns the error's type and text in one line."""
  return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
