"""Maps errors to HTTP statuses and OpenAI's error object, in one table. May not decide what is an error.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "top_p", "code": null}}

As in `server.rpc.grpc_status`, an exception that is no EngineError becomes an opaque 500 with an incident number, which
the log has too.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException

from engine import errors as engine_errors
from server import errors

_INVALID = "invalid_request_error"


class Refused(engine_errors.EngineError):
  """An error of HTTP itself: a path, a method, a body's size or kind.

  Attributes:
    status: the status of the response.
    headers: extra headers of the response.
  """

  def __init__(self, status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None):
    super().__init__(message)
    self.status = status
    self.code = code
    self.headers = headers or {}


class UnsupportedField(engine_errors.InvalidRequest):
  """A field that would change the output and that Sluice does not support, so it must not be ignored."""

  reason = "UNSUPPORTED_FIELD"


# Subclasses stand before their bases: status, type, code. None is the type's default code.
_TABLE: tuple[tuple[type[engine_errors.EngineError], tuple[int, str, str | None]], ...] = (
  (engine_errors.AdapterNotLoaded, (404, _INVALID, "model_not_found")),
  (engine_errors.RequestTooLong, (400, _INVALID, "context_length_exceeded")),
  (UnsupportedField, (400, _INVALID, "unsupported_parameter")),
  (engine_errors.InvalidRequest, (400, _INVALID, None)),
  (engine_errors.DuplicateRequest, (409, _INVALID, "duplicate_request")),
  (engine_errors.Overloaded, (429, "rate_limit_error", "server_overloaded")),
  (errors.Starting, (503, "server_error", "starting")),
  (errors.Draining, (503, "server_error", "draining")),
  (errors.EngineDead, (503, "server_error", "engine_dead")),
  (engine_errors.Unavailable, (503, "server_error", "unavailable")),
  (errors.Unauthenticated, (401, "authentication_error", "invalid_api_key")),
  (errors.PermissionDenied, (403, "permission_error", "permission_denied")),
  (errors.ModelNotFound, (404, _INVALID, "model_not_found")),
  (errors.NotConfigured, (400, _INVALID, "not_configured")),
  (errors.NoTokenizer, (400, _INVALID, "no_tokenizer")),
  (errors.NoChatTemplate, (400, _INVALID, "no_chat_template")),
  (errors.DeadlineExceeded, (504, "timeout", "deadline_exceeded")),
  (errors.AbortedByRequest, (499, "request_cancelled", "aborted_by_request")),
  (errors.SlowConsumer, (408, "timeout", "slow_consumer")),
  (errors.NumericalError, (500, "server_error", "numerical_error")),
  (errors.EngineFailed, (500, "server_error", "engine_failure")),
  (errors.GrammarLimit, (500, "server_error", "grammar_limit")),
  (errors.InternalError, (500, "server_error", "internal_error")),
  (errors.GenerationFailed, (500, "server_error", "generation_failed")),
)
# The openai client retries these by itself, with the same result or with the work done twice.
_NOT_WORTH_A_RETRY = (408, 409, 500, 501, 504)
# Messages inside sluice.v1's requests, which OpenAI's flat fields lack.
_PARTS = frozenset(("chat", "constraint", "output", "stopping", "sampling"))


@dataclasses.dataclass(frozen=True)
class ErrorAnswer:
  """An error in the form that the client gets."""

  status: int
  body: dict[str, Any]
  headers: dict[str, str]


@dataclasses.dataclass(frozen=True)
class ErrorForm:
  """How the clients of one API expect errors. The guard chooses it by path and keeps it in the request's state.

  Attributes:
    make_body: returns the JSON body of an error from (error, id of the request).
    event: the event's name for an error inside a stream; empty: no name.
    id_header: a further response header for the request's id; empty: none.
  """

  make_body: Callable[[ErrorAnswer, str], dict[str, Any]]
  event: str = ""
  id_header: bytes = b""


OPENAI_ERRORS = ErrorForm(lambda answer, _: answer.body)


def make_error_answer(error: Exception, names: Mapping[str, str] = MappingProxyType({})) -> ErrorAnswer:
  """Returns the response for an error; logs unexpected errors, whose text no client gets.

  Args:
    error: any exception.
    names: the caller's names of sluice.v1 fields, where they differ from the field's own name.
  """
  if isinstance(error, HTTPException):
    error = _of_starlette(error)
  if isinstance(error, Refused):
    status, name, code = error.status, _INVALID if error.status < 500 else "server_error", error.code
    headers = error.headers
  else:
    row = next((row for kind, row in _TABLE if isinstance(error, kind)), None)
    if row is None:
      return make_error_answer(errors.log_incident(error, "a request failed in the server's own code"))
    status, name, code = row
    headers = _headers(error, status)
  assert isinstance(error, engine_errors.EngineError), "the table has no others"
  field = _name_of(error.field, names)
  message = errors.shorten_message(error.message_about(field))
  if status in _NOT_WORTH_A_RETRY:
    headers = headers | {"x-should-retry": "false"}
  body = {"message": message, "type": name, "param": field or None, "code": code}
  return ErrorAnswer(status, {"error": body}, headers)


def _name_of(field: str, names: Mapping[str, str]) -> str:
  """Returns the caller's name of a sluice.v1 field."""
  if field in names:
    return names[field]
  part, dot, rest = field.partition(".")
  return rest if dot and part in _PARTS else field


def _headers(error: Exception, status: int) -> dict[str, str]:
  retry_s = errors.seconds_to_retry(error)
  if retry_s is not None:
    # Retry-After has whole seconds; the openai client prefers retry-after-ms.
    return {"retry-after": str(max(1, math.ceil(retry_s))), "retry-after-ms": str(round(1000 * retry_s))}
  if status == 401:
    return {"www-authenticate": "Bearer"}
  return {}


def _of_starlette(error: HTTPException) -> Refused:
  headers = dict(error.headers or {})
  if error.status_code == 405:
    allowed = headers.get("Allow", "")
    return Refused(405, f"this path does not take this method; send {allowed}", headers={"allow": allowed})
  return Refused(error.status_code, str(error.detail), headers=headers)
