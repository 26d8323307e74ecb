"""Errors of the server. `server.rpc.grpc_status` maps these and the engine's to gRPC statuses. Knows no gRPC."""

import logging
import secrets

from engine.errors import EngineError, InvalidRequest, Overloaded, Unavailable

_log = logging.getLogger(__name__)

# gRPC sends details in trailers, of which clients accept 8 KiB; grpc-message escapes one byte as three.
_MAX_MESSAGE_BYTES = 1024
# Retry delay for clients of a server that shuts down; another server should have replaced it by then.
_DOWN_RETRY_S = 5.0


class MalformedRequest(InvalidRequest):
  """The bytes are not the method's protobuf message."""

  reason = "MALFORMED_REQUEST"


class ModelNotFound(EngineError):
  """The request names a model that the server does not serve."""

  reason = "MODEL_NOT_FOUND"


class NoTokenizer(EngineError):
  """The request sends or requests text, and the model's folder has no tokenizer."""

  reason = "NO_TOKENIZER"


class NoChatTemplate(EngineError):
  """The request sends a chat, and the model has no chat template."""

  reason = "NO_CHAT_TEMPLATE"


class UnknownMethod(EngineError):
  """The server has no such method."""

  reason = "UNKNOWN_METHOD"


class Unauthenticated(EngineError):
  """The call has no API key, or one that is not in the file."""

  reason = "UNAUTHENTICATED"


class PermissionDenied(EngineError):
  """The authenticated caller may not do this."""

  reason = "PERMISSION_DENIED"


class NotConfigured(EngineError):
  """The server was started without a setting that the call needs."""

  reason = "NOT_CONFIGURED"


class DeadlineExceeded(EngineError):
  """The deadline of the client, the queue or the server has passed."""

  reason = "DEADLINE_EXCEEDED"


class AbortedByRequest(EngineError):
  """A caller of Abort ended the request."""

  reason = "ABORTED_BY_REQUEST"


class GenerationFailed(EngineError):
  """The engine could not continue this request."""

  reason = "GENERATION_FAILED"


class NumericalError(GenerationFailed):
  """The model's output for this request was NaN or infinite."""

  reason = "NUMERICAL_ERROR"


class EngineFailed(GenerationFailed):
  """The engine failed while it ran this request, and so failed all requests."""

  reason = "ENGINE_FAILURE"


class GrammarLimit(GenerationFailed):
  """The output constraint allows no further token, or takes too much work to continue."""

  reason = "GRAMMAR_LIMIT"


class InternalError(GenerationFailed):
  """The server's own code failed on this request. The log has the cause under the number `incident`."""

  reason = "INTERNAL"

  def __init__(self, incident: str):
    super().__init__(f"internal error, incident {incident} in the server's log")
    self.incident = incident


class SlowConsumer(EngineError):
  """The client stopped reading its stream."""

  reason = "SLOW_CONSUMER"


class AnswerTooLarge(EngineError):
  """A response message exceeds the size limit."""

  reason = "ANSWER_TOO_LARGE"


class MemoryPressure(Overloaded):
  """The process exceeds its memory limit."""

  reason = "MEMORY_PRESSURE"


class Starting(Unavailable):
  """The model is loading or compiling. Clients may retry after `retry_after_s`."""

  reason = "STARTING"
  retry_after_s = 1.0

  def __init__(
    self, message: str = "the model is loading; try again when /ready answers 200, or gRPC's health check SERVING"
  ):
    super().__init__(message)


class Draining(Unavailable):
  """The server is shutting down."""

  reason = "DRAINING"


class EngineDead(Unavailable):
  """The engine has failed; the process is about to exit."""

  reason = "ENGINE_DEAD"


def log_incident(error: Exception, what: str) -> InternalError:
  """Logs an error that no client should see, under a number; returns the error for the client."""
  incident = secrets.token_hex(4)
  _log.error("incident %s: %s", incident, what, exc_info=error)
  return InternalError(incident)


def seconds_to_retry(error: Exception) -> float | None:
  """Returns the seconds until this server or its replacement may accept the request; None if a retry cannot help."""
  if isinstance(error, Overloaded | Starting):
    return error.retry_after_s
  return _DOWN_RETRY_S if isinstance(error, Unavailable) else None


def shorten_message(message: str) -> str:
  """Returns the message, cut to the length that clients accept."""
  raw = message.encode("utf-8", "replace")
  if len(raw) <= _MAX_MESSAGE_BYTES:
    return message
  return raw[: _MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."
