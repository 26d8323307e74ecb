"""One line of JSON a call, for whoever counts and searches calls. Never a prompt, an output, a key or an error text."""

import contextlib
import datetime
import json
import logging
from logging import handlers
import sys
from typing import Any

from engine.errors import ConfigError

STDERR = "-"
# Names and numbers only; what is longer was meant for something else.
_MAX_VALUE_CHARS = 256


class AccessLog:
  """Appends lines to a file, which may be rotated by moving it away, or to standard error.

  Attributes:
    num_lost: lines that could not be written.
  """

  def __init__(self, path: str):
    """Args: path: of the file, or "-".

    Raises:
      ConfigError: it cannot be opened.
    """
    self.num_lost = 0
    try:
      self._handler = logging.StreamHandler(sys.stderr) if path == STDERR else _Watched(path, encoding="utf-8")
    except OSError as error:
      raise ConfigError(f"access_log={path} cannot be opened: {error.strerror}; choose another file, or -") from None
    self._handler.setFormatter(logging.Formatter("%(message)s"))
    self._handler.handleError = self._lose

  def _lose(self, record: logging.LogRecord) -> None:
    """No call may fail, nor standard error fill up, because a disk is full."""
    self.num_lost += 1

  def write(self, **fields: Any) -> None:
    """Adds a line with the time (UTC) and these fields; None is left out. Threads may share it."""
    line = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")}
    for name, value in fields.items():
      if value is not None:
        line[name] = value[:_MAX_VALUE_CHARS] if isinstance(value, str) else value
    # JSON escapes line ends and control characters, so that no value can forge a line.
    text = json.dumps(line, separators=(",", ":"))
    self._handler.handle(logging.LogRecord("access", logging.INFO, "", 0, text, None, None))

  def close(self) -> None:
    """Lets go of the file."""
    with contextlib.suppress(OSError):  # what a full disk did not take before, it does not take now
      self._handler.close()


class _Watched(handlers.WatchedFileHandler):
  """Reopens a moved file; a directory that has gone away is the same as a full disk."""

  def emit(self, record: logging.LogRecord) -> None:
    try:
      super().emit(record)
    except OSError:
      self.handleError(record)
