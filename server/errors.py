"""Errors that only a server can have. `server.rpc.grpc_status` turns these and the engine's into gRPC statuses.

No gRPC here.
"""

import logging
import secrets

from engine.errors import EngineError, InvalidRequest, Overloaded, Unavailable

_log = logging.getLogger(__name__)

# gRPC's details travel in trailers, of which clients take 8 KiB; grpc-message escapes a byte as three.
_MAX_MESSAGE_BYTES = 1024
# What a client of a server that goes down is told: by then another one should have taken its place.
_DOWN_RETRY_S = 5.0


class MalformedRequest(InvalidRequest):
  """The bytes are not the protobuf message that the method takes."""

  reason = "MALFORMED_REQUEST"


class ModelNotFound(EngineError):
  """Another model than the served one was asked for."""

  reason = "MODEL_NOT_FOUND"


class NoTokenizer(EngineError):
  """Text was sent or asked for, and the model's folder has no tokenizer."""

  reason = "NO_TOKENIZER"


class NoChatTemplate(EngineError):
  """A chat was sent, and the model has no chat template."""

  reason = "NO_CHAT_TEMPLATE"


class UnknownMethod(EngineError):
  """No such method here."""

  reason = "UNKNOWN_METHOD"


class Unauthenticated(EngineError):
  """No API key, or one that is not in the file."""

  reason = "UNAUTHENTICATED"


class PermissionDenied(EngineError):
  """A known caller may not do this."""

  reason = "PERMISSION_DENIED"


class NotConfigured(EngineError):
  """The server was started without what this needs."""

  reason = "NOT_CONFIGURED"


class DeadlineExceeded(EngineError):
  """The client's deadline, the queue's or the server's has passed."""

  reason = "DEADLINE_EXCEEDED"


class AbortedByRequest(EngineError):
  """Somebody called Abort."""

  reason = "ABORTED_BY_REQUEST"


class GenerationFailed(EngineError):
  """The engine could not go on with this request."""

  reason = "GENERATION_FAILED"


class NumericalError(GenerationFailed):
  """The model's numbers for this request were NaN or infinite."""

  reason = "NUMERICAL_ERROR"


class EngineFailed(GenerationFailed):
  """The engine failed while it worked on this request, and on all others."""

  reason = "ENGINE_FAILURE"


class GrammarLimit(GenerationFailed):
  """The output constraint allows no token more, or takes too much work to go on."""

  reason = "GRAMMAR_LIMIT"


class InternalError(GenerationFailed):
  """The server's own code failed on this request; `incident` is the number under which the log says how."""

  reason = "INTERNAL"

  def __init__(self, incident: str):
    super().__init__(f"internal error, incident {incident} in the server's log")
    self.incident = incident


class SlowConsumer(EngineError):
  """The client does not read its stream."""

  reason = "SLOW_CONSUMER"


class AnswerTooLarge(EngineError):
  """One message of the answer is larger than may be sent."""

  reason = "ANSWER_TOO_LARGE"


class MemoryPressure(Overloaded):
  """The process is larger than it may be."""

  reason = "MEMORY_PRESSURE"


class Starting(Unavailable):
  """The model is loading or compiling; `retry_after_s` is when asking again makes sense."""

  reason = "STARTING"
  retry_after_s = 1.0

  def __init__(
    self, message: str = "the model is loading; try again when /ready answers 200, or gRPC's health check SERVING"
  ):
    super().__init__(message)


class Draining(Unavailable):
  """The server is going down."""

  reason = "DRAINING"


class EngineDead(Unavailable):
  """The engine has failed; the process is about to exit."""

  reason = "ENGINE_DEAD"


def log_incident(error: Exception, what: str) -> InternalError:
  """Logs an error that no client should see, under a number; returns what the client gets instead."""
  incident = secrets.token_hex(4)
  _log.error("incident %s: %s", incident, what, exc_info=error)
  return InternalError(incident)


def seconds_to_retry(error: Exception) -> float | None:
  """When the same server, or one in its place, may take the request; None where sending it again is of no use."""
  if isinstance(error, Overloaded | Starting):
    return error.retry_after_s
  return _DOWN_RETRY_S if isinstance(error, Unavailable) else None


def shorten_message(message: str) -> str:
  """A message as long as clients can take."""
  raw = message.encode("utf-8", "replace")
  if len(raw) <= _MAX_MESSAGE_BYTES:
    return message
  return raw[: _MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."
