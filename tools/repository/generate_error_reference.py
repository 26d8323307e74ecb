"""Writes docs/reference/errors.md from the error classes and the two tables of statuses. Decides no status itself.

python -m tools.repository.generate_error_reference
"""

from engine.errors import ConfigError, EngineError, ShapeNotOnLadder
from server import errors
from server.http import error_responses
from server.http.error_responses import Refused, UnsupportedField, make_error_answer
from server.rpc.grpc_status import make_status_answer
from tools.measure import ROOT
from tools.repository.markdown import make_table

PAGE = ROOT / "docs" / "reference" / "errors.md"
_HEAD = """# Errors

`make docs` writes this page from the error classes and the tables of statuses; a test compares. A message says what was
given, what is allowed, and what to do.

- **gRPC**: the status carries `google.rpc.ErrorInfo` with `domain` `sluice.v1` and the `reason` of this table. An
  invalid request also carries `BadRequest` with the field; an error worth a retry carries `RetryInfo`.
- **HTTP**: the body is OpenAI's error object with `message`, `type`, `param` and `code`. An error worth a retry has the
  headers `retry-after` and `retry-after-ms`. Others have `x-should-retry: false` where the openai client would repeat.
- **HTTP under `/v1/messages`**: the body is Anthropic's error object, and the status gives the type. It is
  `authentication_error` (401), `permission_error` (403), `not_found_error` (404), `request_too_large` (413),
  `rate_limit_error` (429), `overloaded_error` (503) or `timeout_error` (504). Other statuses are `api_error` from 500
  on and `invalid_request_error` below.
- **In a stream**: an HTTP stream that fails later ends with an event that holds the error object. A gRPC stream ends
  with the status.
- `INTERNAL` names an incident. The server's log explains it under that number.

`server.client` raises `SluiceError` with `code`, `reason` and `retry_after_s`.
"""
_TAIL = """
HTTP itself also returns 400, 403, 404, 405, 411, 413, 415, 431 and 505 for a bad path, method, body, header or host.

## Exit codes of the server

| code | when |
| --- | --- |
| 0 | after a drain |
| 1 | the start failed, or the engine died |
| 2 | a flag is wrong |
"""
# They end a start or an engine; callers never see these names.
_NEVER_SENT = (ConfigError, ShapeNotOnLadder, Refused)


def _kinds(base: type[EngineError]) -> list[type[EngineError]]:
  """Returns all subclasses in the table of statuses, general ones first."""
  found = []
  for kind in base.__subclasses__():
    if not issubclass(kind, _NEVER_SENT) and kind.__module__ in (
      "engine.errors",
      "server.errors",
      "server.http.error_responses",
    ):
      found += [kind, *_kinds(kind)]
  return list(dict.fromkeys(found))


def _example(kind: type[EngineError]) -> EngineError:
  return errors.InternalError("0123abcd") if kind is errors.InternalError else kind("an example")


def _retry(error: EngineError) -> str:
  seconds = errors.seconds_to_retry(error)
  if seconds is None:
    return "no"
  if isinstance(error, errors.Overloaded):
    return "after the time that the error says"
  return f"after {seconds:g} s"


def _http_cells(error: EngineError) -> tuple[str, str]:
  """Returns the HTTP status, and type with code; empty for an error of gRPC alone."""
  if not any(isinstance(error, kind) for kind, _ in error_responses._TABLE):
    return "", ""
  answer = make_error_answer(error)
  said = answer.body["error"]
  return str(answer.status), f"`{said['type']}`" + (f" `{said['code']}`" if said["code"] else "")


def error_reference() -> str:
  """Returns the page's text."""
  rows = []
  for kind in _kinds(EngineError):
    error = _example(kind)
    status = make_status_answer(error)
    assert status.reason == kind.reason, f"{kind.__name__} has no row in the table of statuses"
    grpc_code = "" if kind is UnsupportedField else status.code.name
    summary = (kind.__doc__ or "").strip().partition("\n")[0]
    rows.append((f"`{kind.reason}`", summary, grpc_code, *_http_cells(error), _retry(error)))
  head = ("reason", "when", "gRPC", "HTTP", "OpenAI type, code", "retry")
  return f"{_HEAD}\n{make_table(head, rows)}\n{_TAIL}"


def main() -> None:
  """Runs the command line."""
  PAGE.write_text(error_reference())


if __name__ == "__main__":
  main()
