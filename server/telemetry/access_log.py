"""Counts ended calls of gRPC and HTTP, and writes a line of JSON for each if there is a file for it.

A line never holds a prompt, an output, a key or an error text.
"""

import contextlib
import datetime
import json
import logging
from logging import handlers
import sys
from typing import Any

from engine.errors import ConfigError

_STDERR = "-"
# Values are names and numbers; longer ones are cut.
_MAX_VALUE_CHARS = 256

_GRPC_METHODS = {
  "sluice.v1.GenerationService": ("Generate", "GenerateUnary", "Abort", "Tokenize", "Detokenize", "Embed", "Classify"),
  "sluice.v1.ModelService": ("GetModelInfo", "GetLoad"),
  "grpc.reflection.v1.ServerReflection": ("ServerReflectionInfo",),
  "grpc.reflection.v1alpha.ServerReflection": ("ServerReflectionInfo",),
  "vllm.grpc.engine.VllmEngine": (
    *("Generate", "Embed", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"),
  ),
}
# All other methods count as "other".
_HTTP_PATHS = (
  "/",
  "/classify",
  "/detokenize",
  "/live",
  "/metrics",
  "/page.css",
  "/page.js",
  "/rerank",
  "/score",
  "/tokenize",
  "/tokenizer_info",
  "/v1/batches",
  "/v1/chat/completions",
  "/v1/classify",
  "/v1/completions",
  "/v1/embeddings",
  "/v1/files",
  "/v1/load_lora_adapter",
  "/v1/messages",
  "/v1/messages/count_tokens",
  "/v1/models",
  "/v1/rerank",
  "/v1/responses",
  "/v1/responses/input_tokens",
  "/v1/score",
  "/v1/unload_lora_adapter",
  "/v2/rerank",
  "/version",
)
_HTTP_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

_CLIENT_GONE = 499
# Limit of different codes, above the number that Sluice itself has.
_MAX_SERIES = 256
_OTHER = "other"


class AccessLog:
  """Counts calls, and appends lines to a file, which may be rotated by moving it away, or to standard error.

  Attributes:
    calls: ended calls by (protocol, method, code).
    failed: calls that ended with an error, by (protocol, the error's reason).
    num_lost: lines that could not be written.
  """

  def __init__(self, path: str = ""):
    """Args: path: the file, or "-" for standard error; empty: calls are only counted.

    Raises:
      ConfigError: the file cannot be opened.
    """
    self.calls: dict[tuple[str, str, str], int] = {}
    self.failed: dict[tuple[str, str], int] = {}
    self.num_lost = 0
    self._handler: logging.Handler | None = None
    if not path:
      return
    try:
      self._handler = (
        logging.StreamHandler(sys.stderr) if path == _STDERR else handlers.WatchedFileHandler(path, encoding="utf-8")
      )
    except OSError as error:
      raise ConfigError(f"access_log={path} cannot be opened: {error.strerror}; choose another file, or -") from None
    self._handler.handleError = self._lose

  def write(self, **fields: Any) -> None:
    """Counts a call and adds a line with the time (UTC) and these fields, without those that are None. Thread-safe."""
    code, reason = fields["code"], fields.get("reason")
    protocol, method = _name(fields["method"])
    # A client that closes a page or a stream is no error.
    if reason is None and isinstance(code, int) and code >= 400 and code != _CLIENT_GONE:
      reason = f"http_{code}"
    _count(self.calls, (protocol, method, str(code)), (protocol, _OTHER, _OTHER))
    if reason is not None:
      _count(self.failed, (protocol, reason.lower()), (protocol, _OTHER))
    if self._handler is None:
      return
    line = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")}
    for name, value in fields.items():
      if value is not None:
        line[name] = value[:_MAX_VALUE_CHARS] if isinstance(value, str) else value
    # JSON escapes line ends and control characters, so no value can forge a line.
    record = logging.makeLogRecord({"msg": json.dumps(line, separators=(",", ":"))})
    try:
      self._handler.handle(record)
    except OSError:  # a removed directory counts like a full disk
      self._lose(record)

  def _lose(self, record: logging.LogRecord) -> None:
    """Counts a lost line: a full disk must neither fail calls nor fill standard error."""
    self.num_lost += 1

  def close(self) -> None:
    """Closes the file."""
    if self._handler is not None:
      with contextlib.suppress(OSError):  # the disk is still full
        self._handler.close()


def _count[T](counts: dict[T, int], key: T, otherwise: T) -> None:
  if key not in counts and len(counts) >= _MAX_SERIES:
    key = otherwise
  counts[key] = counts.get(key, 0) + 1


def _name(method: str) -> tuple[str, str]:
  """Returns (protocol, method) with known names only, so that clients cannot make up metric series."""
  if method.startswith("/"):
    service, _, name = method[1:].partition("/")
    known = name in _GRPC_METHODS.get(service, ())
    return "grpc", method[1:] if known else _OTHER
  verb, _, path = method.partition(" ")
  if verb in _HTTP_METHODS and path in _HTTP_PATHS:
    return "http", f"{verb} {path}"
  return "http", _OTHER
