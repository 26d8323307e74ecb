"""The one table from errors to gRPC statuses, with google.rpc details. May not decide what is an error.

Texts of our own exceptions never leave the server: what is not an EngineError becomes INTERNAL with a number that is
also in the log.
"""

import dataclasses
import logging
import secrets

from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
import grpc

from engine import errors as engine_errors
from server import errors

DOMAIN = "sluice.v1"
_DETAILS_KEY = "grpc-status-details-bin"

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
class StatusAnswer:
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


def make_status_answer(error: Exception) -> StatusAnswer:
  """The status of an error. One that no client should see goes to the log, under a number that the client gets."""
  code = code_of(error)
  known = any(isinstance(error, kind) for kind, _ in _CODES)
  info = error_details_pb2.ErrorInfo(domain=DOMAIN)
  if known and isinstance(error, engine_errors.EngineError):
    message, info.reason = errors.shorten_message(str(error)), error.reason
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
            error_details_pb2.BadRequest.FieldViolation(
              field=error.field if isinstance(error, engine_errors.EngineError) else "", description=message
            )
          ]
        )
      )
    )
  retry_s = errors.seconds_to_retry(error)
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
  return StatusAnswer(code, message, info.reason, tuple(metadata))


def _pack(message) -> any_pb2.Any:
  packed = any_pb2.Any()
  packed.Pack(message)
  return packed
