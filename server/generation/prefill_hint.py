"""Keeps the prefill server that a router chose for the current call. May not judge it.

The header's name is llm-d's (llm-d-inference-scheduler, docs/disaggregation.md), so its router serves, too.
"""

from collections.abc import Mapping
import contextvars
from typing import Any

PREFILL_HEADER = "x-prefiller-host-port"
_MAX_CHARS = 262  # of a host name, a colon and a port

_server: contextvars.ContextVar[str] = contextvars.ContextVar("prefill_server", default="")


def keep_prefill_server(headers: Mapping[str, Any]) -> None:
  """Stores the server that the current call names.

  Args:
    headers: HTTP headers or gRPC metadata, keys in lower case.
  """
  named = headers.get(PREFILL_HEADER)
  _server.set(named if isinstance(named, str) and len(named) <= _MAX_CHARS else "")


def requested_prefill_server() -> str:
  """Returns HOST:PORT as the current call gives it, or ""."""
  return _server.get()
