"""The settings of the HTTP side. Holds values and does nothing."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpOptions:
  """The settings of the HTTP side. Times in seconds.

  Attributes:
    host, port: address to bind; port 0 lets the system choose.
    max_body_bytes: larger bodies get 413.
    max_header_bytes: larger headers get 431.
    max_requests: limit of concurrent requests; more get 429.
    max_connections: limit of connections; the server closes further ones at once.
    head_timeout_s, body_timeout_s: time for a client to send a request's headers, and its body.
    idle_timeout_s: the server closes a connection after this time without a request.
    stream_stall_timeout_s: the server aborts a stream whose client reads nothing for this long, and disconnects.
    strict_requests: refuse unknown fields with 400, instead of ignoring them and naming them in a header.
    tool_call_parser: how the model writes tool calls: one of `call_formats.PARSERS`.
    reasoning_parser: how the model writes reasoning: one of `reasoning.REASONING_PARSERS`.
    max_stored_responses: limit of responses that the server keeps for later requests; 0 keeps none.
    allowed_hosts: allowed Host headers; "*" is any. Empty: only local names where the address is local and no key is
      required, so that a foreign web page cannot reach the model through DNS rebinding; else any.
    allowed_origins: origins of web pages whose scripts may call the server (CORS); "*" is any.
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
  reasoning_parser: str = "auto"
  max_stored_responses: int = 1024
  allowed_hosts: tuple[str, ...] = ()
  allowed_origins: tuple[str, ...] = ()
