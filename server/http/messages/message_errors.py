"""Gives errors the form of Anthropic's Messages API.

{"type": "error", "error": {"type": "invalid_request_error", "message": "..."}, "request_id": "req-..."}
"""

from typing import Any

from server.http.error_responses import ErrorAnswer, ErrorForm

# Other statuses from 500 on are api_error, and other ones below invalid_request_error.
_TYPES = {
  401: "authentication_error",
  403: "permission_error",
  404: "not_found_error",
  413: "request_too_large",
  429: "rate_limit_error",
  503: "overloaded_error",
  504: "timeout_error",
}


def _make_body(answer: ErrorAnswer, request_id: str) -> dict[str, Any]:
  kind = _TYPES.get(answer.status, "api_error" if answer.status >= 500 else "invalid_request_error")
  return {
    "type": "error",
    "error": {"type": kind, "message": answer.body["error"]["message"]},
    "request_id": request_id,
  }


MESSAGES_ERRORS = ErrorForm(_make_body, event="error", id_header=b"request-id")
