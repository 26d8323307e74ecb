"""What an operator may set of the HTTP side. Only values."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpOptions:
  """What the HTTP side may be told. Times in seconds.

  Attributes:
    host, port: address to bind; port 0 lets the system choose.
    max_body_bytes: larger bodies are 413.
    max_header_bytes: more headers are 431.
    max_requests: more at once are 429.
    max_connections: more are closed at once.
    head_timeout_s, body_timeout_s: how long a client may take to send a request's headers, and its body.
    idle_timeout_s: a connection without a request is closed after it.
    stream_stall_timeout_s: stop the work for a client that takes nothing for this long, and cut its connection.
    strict_requests: unknown fields are 400, instead of ignored and named in a header.
    tool_call_parser: how the model writes calls of tools: one of `tool_calls.PARSERS`.
    allowed_hosts: what the Host header may say, "*" for anything. Empty: local names alone, where the address is a
      local one and no key is asked for (a page of somebody's site must not reach the model through DNS rebinding),
      else anything.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  max_body_bytes: int = 4 << 20
  max_header_bytes: int = 16 << 10
  max_requests: int = 2048
  max_connections: int = 4096
  head_timeout_s: float = 10.0
  body_timeout_s: float = 30.0
  idle_timeout_s: float = 75.0
  stream_stall_timeout_s: float = 30.0
  strict_requests: bool = False
  tool_call_parser: str = "auto"
  allowed_hosts: tuple[str, ...] = ()
