"""Maps errors to gRPC statuses with google.rpc details, in one table. May not decide what is an error.

The text of an unexpected exception never leaves the server: an exception that is no EngineError becomes INTERNAL with
an incident number, which the log has too.
"""

import dataclasses

from google.protobuf import any as protobuf_any
from google.rpc import error_details_pb2, status_pb2
import grpc

from engine import errors as engine_errors
from server import errors

DOMAIN = "sluice.v1"
_DETAILS_KEY = "grpc-status-details-bin"

# Each row holds for a class and its subclasses. Clients never see any other exception.
_CODES = (
  (engine_errors.AdapterNotLoaded, grpc.StatusCode.NOT_FOUND),
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
  """The status of a failed RPC.

  Attributes:
    code, message: the status.
    reason: the reason in its ErrorInfo.
    metadata: trailing metadata with the details and, where a retry makes sense, the retry pushback.
  """

  code: grpc.StatusCode
  message: str
  reason: str
  metadata: tuple[tuple[str, str | bytes], ...]


def make_status_answer(error: Exception) -> StatusAnswer:
  """Returns the status of an error. Logs unexpected errors under an incident number, which the client gets."""
  info = error_details_pb2.ErrorInfo(domain=DOMAIN)
  code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
  if code is not None and isinstance(error, engine_errors.EngineError):
    message, info.reason = errors.shorten_message(str(error)), error.reason
  else:
    code = grpc.StatusCode.INTERNAL
    hidden = errors.log_incident(error, "a request failed in the server's own code")
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
      # gRFC A6: a client with a retry policy waits this long, if no header was sent yet. While the server drains it
      # need not wait: another server may take the call at once.
      metadata.append(("grpc-retry-pushback-ms", str(retry_ms)))
  status = status_pb2.Status(code=code.value[0], message=message, details=details)
  metadata.append((_DETAILS_KEY, status.SerializeToString()))
  return StatusAnswer(code, message, info.reason, tuple(metadata))
