"""The program's own lines: text for people, or one JSON object a line for a collector. Never a prompt or an output."""

from collections.abc import Callable
import contextlib
import datetime
import json
import logging
import sys
import threading
import time
from typing import TextIO

FORMATS = ("text", "json")
_LOGGER = "server"

_log = logging.getLogger("server.main")


class JsonFormatter(logging.Formatter):
  """Time (UTC), level, logger and message; a traceback as one field. JSON escapes what could forge a line."""

  def format(self, record: logging.LogRecord) -> str:
    line = {
      "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
      "level": record.levelname.lower(),
      "logger": record.name,
      "message": record.getMessage(),
    }
    if record.exc_info:
      line["exception"] = self.formatException(record.exc_info)
    return json.dumps(line, separators=(",", ":"), default=str)


class RateLimit(logging.Filter):
  """Lets at most BURST lines of one kind through in PERIOD_S; the first of the next period says how many were not.

  A kind is the place in the source, so that nothing a client sends makes another. What can be repeated by asking again
  must not fill a disk.
  """

  BURST = 20
  PERIOD_S = 60.0

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    super().__init__()
    self._clock = clock
    self._lock = threading.Lock()
    self._kinds: dict[tuple[str, int], tuple[float, int]] = {}  # when its period began, and lines since

  def filter(self, record: logging.LogRecord) -> bool:
    """Whether the line is written; those about the program itself, and of its end, always are."""
    if not logging.WARNING <= record.levelno < logging.CRITICAL:
      return True
    kind, now = (record.pathname, record.lineno), self._clock()
    with self._lock:
      began, count = self._kinds.get(kind, (now, 0))
      left_out = 0
      if now - began >= self.PERIOD_S:
        left_out = max(0, count - self.BURST)
        began, count = now, 0
      self._kinds[kind] = began, count + 1
    if left_out:
      record.msg, record.args = f"{record.getMessage()} ({left_out} more like this were left out)", None
    return count < self.BURST


class Lines:
  """Where the program's lines go. One a process."""

  def __init__(self) -> None:
    self._json = False

  def set_up(self, form: str, stream: TextIO | None = None) -> None:
    """Sets what is logged, and how.

    Args:
      form: one of FORMATS.
      stream: None is standard error.
    """
    self._json = form == "json"
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    logging.getLogger(_LOGGER).setLevel(logging.INFO)
    if self._json:
      handler = logging.StreamHandler(stream or sys.stderr)
      handler.setFormatter(JsonFormatter())
      # absl's handler would write each line again, its own way.
      root.handlers[:] = [handler]
    limit = RateLimit()
    for handler in root.handlers:
      handler.addFilter(limit)

  def say(self, line: str) -> None:
    """A line for whoever started the program."""
    if not self._json:
      with contextlib.suppress(OSError):  # a full disk is no reason not to serve
        print(line, file=sys.stderr, flush=True)
      return
    level = logging.INFO
    for word, of_word in (("error: ", logging.ERROR), ("warning: ", logging.WARNING)):
      if line.startswith(word):
        line, level = line.removeprefix(word), of_word
    _log.log(level, "%s", line)
