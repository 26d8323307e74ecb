"""The one table from errors to gRPC statuses, with google.rpc details. May not decide what is an error.

Texts of our own exceptions never leave the server: what is not an EngineError becomes INTERNAL with a number that is
also in the log.
"""

import dataclasses
import logging
import re
import secrets

from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
import grpc

from engine import errors as engine_errors
from server import errors

DOMAIN = "sluice.v1"
# Details travel in trailers, of which clients take 8 KiB; grpc-message escapes a byte as three.
_MAX_MESSAGE_BYTES = 1024
_DETAILS_KEY = "grpc-status-details-bin"
# What a client of a server that goes down is told: by then another one should have taken its place.
_DOWN_RETRY_S = 5.0
# Messages about a field begin with its name, as in "top_p=2.0 is not allowed: ...".
_FIELD = re.compile(r"(?:the )?([a-z_][a-z_0-9.]*(?:\[\d+\](?:\.[a-z_]+)?)*)(?:=| has | is | of | token | entries|:)")

# From the most special class to the most general.
_CODES: tuple[tuple[type[engine_errors.EngineError], grpc.StatusCode], ...] = (
  (engine_errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
  (engine_errors.DuplicateRequest, grpc.StatusCode.ALREADY_EXISTS),
  (engine_errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
  (engine_errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
  (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
  (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
  (errors.UnknownMethod, grpc.StatusCode.UNIMPLEMENTED),
  (errors.ModelNotFound, grpc.StatusCode.NOT_FOUND),
  (errors.NotConfigured, grpc.StatusCode.FAILED_PRECONDITION),
  (errors.NoTokenizer, grpc.StatusCode.FAILED_PRECONDITION),
  (errors.NoChatTemplate, grpc.StatusCode.FAILED_PRECONDITION),
  (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
  (errors.AbortedByRequest, grpc.StatusCode.CANCELLED),
  (errors.SlowConsumer, grpc.StatusCode.RESOURCE_EXHAUSTED),
  (errors.AnswerTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
  (errors.GenerationFailed, grpc.StatusCode.INTERNAL),
)

_log = logging.getLogger(__name__)


def code_of(error: Exception) -> grpc.StatusCode:
  """The status code of an error; INTERNAL for one that no client should see."""
  return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


@dataclasses.dataclass(frozen=True)
class Answer:
  """How an RPC that failed ends.

  Attributes:
    code, message: the status.
    reason: of the ErrorInfo among the details.
    metadata: trailing, with the details and, where a retry makes sense, the pushback.
  """

  code: grpc.StatusCode
  message: str
  reason: str
  metadata: tuple[tuple[str, str | bytes], ...]


def answer(error: Exception) -> Answer:
  """The status of an error. One that no client should see goes to the log, under a number that the client gets."""
  code = code_of(error)
  known = any(isinstance(error, kind) for kind, _ in _CODES)
  info = error_details_pb2.ErrorInfo(domain=DOMAIN)
  if known and isinstance(error, engine_errors.EngineError):
    message, info.reason = shorten(str(error)), error.reason
  else:
    incident = secrets.token_hex(4)
    _log.error("incident %s: a request failed in our own code", incident, exc_info=error)
    message, info.reason = f"internal error, incident {incident} in the server's log", "INTERNAL"
    info.metadata["incident"] = incident
  details = [_pack(info)]
  metadata: list[tuple[str, str | bytes]] = []
  if code is grpc.StatusCode.INVALID_ARGUMENT:
    details.append(
      _pack(
        error_details_pb2.BadRequest(
          field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=field_of(message) or "", description=message)
          ]
        )
      )
    )
  retry_s = retry_after_s(error)
  if retry_s is not None:
    retry_ms = round(1000 * retry_s)
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(retry_ms)
    details.append(_pack(retry))
    if isinstance(error, engine_errors.Overloaded | errors.Starting):
      # A6: a client with a retry policy waits this long, if no header was sent yet. Where the server goes down it need
      # not: another one may take the call at once.
      metadata.append(("grpc-retry-pushback-ms", str(retry_ms)))
  status = status_pb2.Status(code=code.value[0], message=message, details=details)
  metadata.append((_DETAILS_KEY, status.SerializeToString()))
  return Answer(code, message, info.reason, tuple(metadata))


def retry_after_s(error: Exception) -> float | None:
  """When the same server, or one in its place, may take the request; None where sending it again is of no use."""
  if isinstance(error, engine_errors.Overloaded | errors.Starting):
    return error.retry_after_s
  return _DOWN_RETRY_S if isinstance(error, engine_errors.Unavailable) else None


def _pack(message) -> any_pb2.Any:
  packed = any_pb2.Any()
  packed.Pack(message)
  return packed


def field_of(message: str) -> str | None:
  """The field that a message of an InvalidRequest is about, if it names one."""
  found = _FIELD.match(message)
  return found[1] if found else None


def shorten(message: str) -> str:
  """A message as long as clients can take."""
  raw = message.encode("utf-8", "replace")
  if len(raw) <= _MAX_MESSAGE_BYTES:
    return message
  return raw[: _MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."
