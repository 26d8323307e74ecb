"""The program's own lines: text for people, or one JSON object a line for a collector. Never a prompt or an output."""

import contextlib
import datetime
import json
import logging
import sys
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
