"""The program's own log lines: text, or one JSON object a line for a collector. No prompts and no outputs."""

from collections.abc import Callable
import contextlib
import datetime
import json
import logging
import os
import sys
import threading
import time
from typing import Any, TextIO

FORMATS = ("text", "json")
_LOGGER = "server"

_log = logging.getLogger("server.main")


class JsonFormatter(logging.Formatter):
  """Formats time (UTC), level, logger, message, fields and traceback. JSON escapes prevent forged lines."""

  def format(self, record: logging.LogRecord) -> str:
    line = {
      "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
      "level": record.levelname.lower(),
      "logger": record.name,
      "message": record.getMessage(),
    }
    line |= getattr(record, "fields", {})
    if record.exc_info:
      line["exception"] = self.formatException(record.exc_info)
    return json.dumps(line, separators=(",", ":"), default=str)


class RateLimit(logging.Filter):
  """Passes at most BURST lines of one kind in PERIOD_S; the first line of the next period counts the omitted ones.

  A kind is a place in the source, so clients cannot create kinds. Repeated requests must not fill a disk.
  """

  BURST = 20
  PERIOD_S = 60.0

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    super().__init__()
    self._clock = clock
    self._lock = threading.Lock()
    self._kinds: dict[tuple[str, int], tuple[float, int]] = {}  # start of the period, and lines since

  def filter(self, record: logging.LogRecord) -> bool:
    """Whether the line is written. Lines below WARNING, and CRITICAL ones, always are."""
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
  """Writes the program's lines. A process has one.

  On a terminal the last line may be a status line, which is rewritten in place and removed before the next line.

  Attributes:
    said_at: the time.monotonic() of the latest line.
  """

  def __init__(self) -> None:
    self.said_at = time.monotonic()
    self._json = False
    self._lock = threading.RLock()
    self._status = ""

  @property
  def is_terminal(self) -> bool:
    """Whether standard error is a terminal that can show a status line."""
    return not self._json and sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")

  def set_up(self, form: str, stream: TextIO | None = None) -> None:
    """Configures the logging levels and format.

    Args:
      form: one of FORMATS.
      stream: None: standard error.
    """
    self._json = form == "json"
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    logging.getLogger(_LOGGER).setLevel(logging.INFO)
    if self._json:
      handler = logging.StreamHandler(stream or sys.stderr)
      handler.setFormatter(JsonFormatter())
      # absl's handler would write each line a second time in its own format.
      root.handlers[:] = [handler]
    limit = RateLimit()
    for handler in root.handlers:
      handler.addFilter(limit)
      handler.addFilter(self._make_way)

  def show_status(self, text: str) -> None:
    """Rewrites the terminal's last line, cut to its width (80 if unknown); "" removes it."""
    with self._lock, contextlib.suppress(OSError, ValueError):
      text = text[: max(1, (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1)]
      if text != self._status:
        self._status = text
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

  def _make_way(self, record: logging.LogRecord) -> bool:
    """A logging filter that removes the status line before a log line."""
    if self._status:
      self.show_status("")
    return True

  def say(self, line: str, **fields: Any) -> None:
    """Writes a line for the operator.

    Args:
      line: the text; the field `message` in JSON.
      fields: the same facts as values, only for JSON.
    """
    self.said_at = time.monotonic()
    if not self._json:
      with self._lock, contextlib.suppress(OSError):  # a full disk must not stop the server
        if self._status:
          self.show_status("")
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # one write, so no other line interleaves
      return
    level = logging.INFO
    for word, of_word in (("error: ", logging.ERROR), ("warning: ", logging.WARNING)):
      if line.startswith(word):
        line, level = line.removeprefix(word), of_word
    _log.log(level, "%s", line, extra={"fields": fields})
