"""The one table from errors to gRPC statuses, with google.rpc details. May not decide what is an error.

Texts of our own exceptions never leave the server: what is not an EngineError becomes INTERNAL with a number that is
also in the log.
"""

import dataclasses

from google.protobuf import any as protobuf_any
from google.rpc import error_details_pb2, status_pb2
import grpc

from engine import errors as engine_errors
from server import errors

DOMAIN = "sluice.v1"
_DETAILS_KEY = "grpc-status-details-bin"

# Of each class and those that are special cases of it. Whatever else is raised, no client should see.
_CODES = (
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
  info = error_details_pb2.ErrorInfo(domain=DOMAIN)
  code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
  if code is not None and isinstance(error, engine_errors.EngineError):
    message, info.reason = errors.shorten_message(str(error)), error.reason
  else:
    code = grpc.StatusCode.INTERNAL
    hidden = errors.log_incident(error, "a request failed in our own code")
    message, info.reason = str(hidden), hidden.reason
    info.metadata["incident"] = hidden.incident
  details = [protobuf_any.pack(info)]
  metadata: list[tuple[str, str | bytes]] = []
  if isinstance(error, engine_errors.InvalidRequest):
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field=error.field, description=message)
    details.append(protobuf_any.pack(bad))
  retry_s = errors.seconds_to_retry(error)
  if retry_s is not None:
    retry_ms = round(1000 * retry_s)
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(retry_ms)
    details.append(protobuf_any.pack(retry))
    if isinstance(error, engine_errors.Overloaded | errors.Starting):
      # A6: a client with a retry policy waits this long, if no header was sent yet. Where the server goes down it need
      # not: another one may take the call at once.
      metadata.append(("grpc-retry-pushback-ms", str(retry_ms)))
  status = status_pb2.Status(code=code.value[0], message=message, details=details)
  metadata.append((_DETAILS_KEY, status.SerializeToString()))
  return StatusAnswer(code, message, info.reason, tuple(metadata))
