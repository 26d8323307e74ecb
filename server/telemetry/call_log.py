"""Where both fronts say that a call has ended: counted always, and passed to the access log if there is one."""

from typing import Any

from server.telemetry.access_log import AccessLog

_GRPC_METHODS = {
  "sluice.v1.GenerationService": ("Generate", "GenerateUnary", "Abort", "Tokenize", "Detokenize"),
  "sluice.v1.ModelService": ("GetModelInfo", "GetLoad"),
  "grpc.reflection.v1.ServerReflection": ("ServerReflectionInfo",),
  "grpc.reflection.v1alpha.ServerReflection": ("ServerReflectionInfo",),
  "vllm.grpc.engine.VllmEngine": (
    *("Generate", "Embed", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"),
  ),
}
# Whatever else is asked for is "other".
_HTTP_PATHS = (
  "/",
  "/detokenize",
  "/live",
  "/metrics",
  "/page.css",
  "/page.js",
  "/tokenize",
  "/tokenizer_info",
  "/v1/chat/completions",
  "/v1/completions",
  "/v1/models",
  "/version",
)
_HTTP_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


_CLIENT_GONE = 499
# Different endings that are told apart; all of ours are fewer.
_MAX_SERIES = 256
_OTHER = "other"


class CallLog(AccessLog):
  """An access log whose lines are counted, with or without a file.

  Attributes:
    calls: ended calls by (protocol, method, code).
    failed: those that ended with an error, by (protocol, the error's reason).
  """

  def __init__(self, path: str = ""):
    """Args: path: as of AccessLog; empty: calls are only counted.

    Raises:
      ConfigError: it cannot be opened.
    """
    self.calls: dict[tuple[str, str, str], int] = {}
    self.failed: dict[tuple[str, str], int] = {}
    self.num_lost = 0
    self._writes = bool(path)
    if path:
      super().__init__(path)

  def write(self, **fields: Any) -> None:
    """Counts a call, and adds its line."""
    code, reason = fields["code"], fields.get("reason")
    protocol, method = _name(fields["method"])
    # Whoever closes a page or a stream has refused nothing.
    if reason is None and isinstance(code, int) and code >= 400 and code != _CLIENT_GONE:
      reason = f"http_{code}"
    _count(self.calls, (protocol, method, str(code)), (protocol, _OTHER, _OTHER))
    if reason is not None:
      _count(self.failed, (protocol, reason.lower()), (protocol, _OTHER))
    if self._writes:
      super().write(**fields)

  def close(self) -> None:
    """Lets go of the file."""
    if self._writes:
      super().close()


def _count[T](counts: dict[T, int], key: T, otherwise: T) -> None:
  if key not in counts and len(counts) >= _MAX_SERIES:
    key = otherwise
  counts[key] = counts.get(key, 0) + 1


def _name(method: str) -> tuple[str, str]:
  """(protocol, method) in words of ours: what a client has made up must not become a series."""
  if method.startswith("/"):
    service, _, name = method[1:].partition("/")
    known = name in _GRPC_METHODS.get(service, ())
    return "grpc", method[1:] if known else _OTHER
  verb, _, path = method.partition(" ")
  if verb in _HTTP_METHODS and path in _HTTP_PATHS:
    return "http", f"{verb} {path}"
  return "http", _OTHER
