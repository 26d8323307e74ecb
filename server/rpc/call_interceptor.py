"""Wraps every RPC: API key, limits, request id, opaque errors, access log. Knows no method of the services.

A call that the interceptor refuses, or whose handler fails before it writes, ends with a status and no header, so a
client with a retry policy may retry it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
import contextlib
import contextvars
import dataclasses
import secrets
import time
from typing import Any

import grpc
from grpc._cython import cygrpc

from engine.errors import EngineError, Overloaded
from server.errors import AnswerTooLarge, DeadlineExceeded, MalformedRequest, UnknownMethod
from server.generation import request_validation
from server.generation.prefill_hint import keep_prefill_server
from server.rpc import grpc_status
from server.security.api_keys import AdminKeys, ApiKeys
from server.telemetry import tracing
from server.telemetry.access_log import AccessLog

REQUEST_ID = "x-request-id"
HEALTH_METHODS = "/grpc.health.v1.Health/"
REFLECTION_METHODS = "/grpc.reflection."
_OVERLOAD_RETRY_S = 1.0
# A call whose message has not arrived counts against the limit on concurrent calls.
_MESSAGE_TIMEOUT_S = 60.0


@dataclasses.dataclass(slots=True)
class RpcCall:
  """One RPC, for the access log and the handlers.

  Attributes:
    method: its name on the wire, "/package.Service/Method".
    metadata: the client's metadata, with keys in lower case.
    request_id: the client's `x-request-id`, or one that the server made.
    tenant: the tenant of its API key; None where the server requires no keys.
    notes: names and counts that a handler adds to the log line.
  """

  method: str
  metadata: Mapping[str, Any]
  request_id: str
  tenant: str | None = None
  notes: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def trailers(self) -> tuple[tuple[str, str], ...]:
    """Returns the trailing metadata of every response. A header would be one more message before the first token."""
    return ((REQUEST_ID, self.request_id),)


_current: contextvars.ContextVar[RpcCall] = contextvars.ContextVar("call")


def current_call() -> RpcCall:
  """Returns the RPC whose handler is running."""
  return _current.get()


class CallInterceptor(grpc.aio.ServerInterceptor):
  """Wraps every handler of a server. Runs on the server's event loop."""

  def __init__(
    self,
    access_log: AccessLog,
    *,
    max_response_bytes: int,
    keys: ApiKeys | AdminKeys | None = None,
    open_methods: tuple[str, ...] = (HEALTH_METHODS,),
    max_concurrent_rpcs: int | None = None,
    on_peer: Callable[[str], None] | None = None,
  ):
    """Sets what calls must fulfill.

    Args:
      access_log: receives a line for each call except health checks.
      max_response_bytes: limit of one message; a larger one ends its call.
      keys: the accepted API keys; None accepts every caller.
      open_methods: prefixes of methods that need no key.
      max_concurrent_rpcs: limit of concurrent calls; health checks do not count.
      on_peer: called with the peer of each call.
    """
    self._keys = keys
    self._open_methods = open_methods
    self._max_concurrent_rpcs = max_concurrent_rpcs
    self._max_response_bytes = max_response_bytes
    self._access_log = access_log
    self._on_peer = on_peer
    self._num_calls = 0
    self._num_unanswered = 0
    self._num_answered = 0

  async def intercept_service(
    self,
    continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
    handler_call_details: grpc.HandlerCallDetails,
  ) -> grpc.RpcMethodHandler:
    """Returns the wrapped handler, or one that refuses the call."""
    metadata = dict(handler_call_details.invocation_metadata or ())
    request_id = metadata.get(REQUEST_ID)
    if not isinstance(request_id, str) or not request_validation.REQUEST_ID.fullmatch(request_id):
      request_id = secrets.token_hex(16)
    call = RpcCall(handler_call_details.method, metadata, request_id)
    handler = await continuation(handler_call_details)
    try:
      self._check(call)
      if handler is None:
        raise UnknownMethod(f"method={call.method!r:.120} is not served here; reflection lists what is")
    except EngineError as error:
      return self._refusal(call, error)
    return self._wrapped(call, handler)

  async def wait_quiet(self, quiet_s: float) -> None:
    """Returns once no call has waited for its status for that many seconds. Health checks do not count."""
    seen = -1
    while self._num_unanswered or seen != self._num_answered:
      seen = self._num_answered
      await asyncio.sleep(quiet_s)

  def _answered(self, _: asyncio.Task) -> None:
    self._num_unanswered -= 1
    self._num_answered += 1

  def _check(self, call: RpcCall) -> None:
    if self._keys is not None and not call.method.startswith(self._open_methods):
      call.tenant = self._keys.check_credentials(call.metadata.get("authorization"), call.metadata.get("x-api-key"))
    limit = self._max_concurrent_rpcs
    if limit is not None and self._num_calls >= limit and not call.method.startswith(HEALTH_METHODS):
      raise Overloaded(f"{self._num_calls} calls are in progress, the limit is {limit}", _OVERLOAD_RETRY_S)

  def _refusal(self, call: RpcCall, error: EngineError) -> grpc.RpcMethodHandler:
    """Returns a handler that refuses; it reads no message, so it fits methods of every kind."""

    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
      async with self._running(call, context):
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)

  def _wrapped(self, call: RpcCall, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """Returns a handler that reads bytes and passes the parsed message on.

    gRPC itself would send an exception's text for bytes that it cannot parse, and nothing for a call whose message is
    missing or incomplete.
    """
    parse, serialize = handler.request_deserializer, self._serializer(handler)
    # Any, since the stubs know handlers of the threaded server only.
    behaviour: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
    assert behaviour is not None, "no method takes a stream and gives one message"
    if handler.response_streaming:

      async def stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async with self._running(call, context):
          if not handler.request_streaming:
            await behaviour(_parsed(parse, await _read(context)), context)
            return
          async for response in behaviour((_parsed(parse, raw) async for raw in requests), context):
            await context.write(response)

      return grpc.stream_stream_rpc_method_handler(stream, None, serialize)

    async def unary_unary(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
      async with self._running(call, context):
        return serialize(await behaviour(_parsed(parse, await _read(context)), context))
      raise AssertionError("not reached")

    return grpc.stream_unary_rpc_method_handler(unary_unary)

  def _serializer(self, handler: grpc.RpcMethodHandler) -> Callable[[Any], bytes]:
    """Returns the handler's serializer with a limit: gRPC would tear the call down without a reason."""
    serialize, limit = handler.response_serializer, self._max_response_bytes
    assert serialize is not None, "what is sent is bytes"

    def checked(message: Any) -> bytes:
      raw = serialize(message)
      if len(raw) > limit:
        raise AnswerTooLarge(
          f"a message of {len(raw)} bytes cannot be sent, the limit is {limit}; request fewer tokens, outputs or log "
          "probabilities, or a stream"
        )
      return raw

    return checked

  @contextlib.asynccontextmanager
  async def _running(self, call: RpcCall, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Runs a handler: every error becomes a status, and every call a line of the access log."""
    _current.set(call)
    tracing.keep_trace_parent(call.metadata)
    keep_prefill_server(call.metadata)
    context.set_trailing_metadata(call.trailers)
    is_probe = call.method.startswith(HEALTH_METHODS)
    self._num_calls += not is_probe
    task = asyncio.current_task()
    if task is not None and not is_probe:  # gRPC's for this call, which goes on until the status is sent
      self._num_unanswered += 1
      task.add_done_callback(self._answered)
    started, peer = time.monotonic(), context.peer()  # later it may be gone
    if self._on_peer is not None:
      self._on_peer(peer)
    code, reason = "OK", None
    try:
      yield
    except asyncio.CancelledError:
      # How gRPC says that nobody waits any more. Swallowing it would leak the call.
      code = "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
      raise
    except grpc.aio.AbortError:
      code = "ABORTED_BY_HANDLER"
      raise
    except (grpc.aio.InternalError, cygrpc._ServerStoppedError):
      # The connection went away under a write, or the server was stopped: no status can pass either.
      code = "CANCELLED"
      raise _gone() from None
    except Exception as error:
      answer = grpc_status.make_status_answer(error)
      code, reason = answer.code.name, answer.reason
      try:
        await context.abort(answer.code, answer.message, answer.metadata + call.trailers)
      except grpc.aio.InternalError:
        # gRPC has ended the call with a status of its own, as one whose message is too large.
        raise _gone() from None
    finally:
      self._num_calls -= not is_probe
      if not is_probe:
        self._access_log.write(
          request_id=call.request_id,
          method=call.method,
          peer=peer,
          tenant=call.tenant,
          code=code,
          reason=reason,
          duration_s=round(time.monotonic() - started, 6),
          **call.notes,
        )


def _gone() -> asyncio.CancelledError:
  """Returns the error that ends a handler whose client has gone.

  gRPC logs a traceback for its own error unless it already knows that the call is over.
  """
  return asyncio.CancelledError()


async def _read(context: Any) -> bytes:
  """Returns the one message of a call. The read is a task of its own: it ends with the call, not by a timeout."""

  async def read() -> Any:
    try:
      return await context.read()
    except cygrpc._ServerStoppedError:
      raise _gone() from None  # asyncio.run reports any other error of a task that it ends

  reading = asyncio.ensure_future(read())
  # Takes the error of a read whose call is gone: asyncio would report one that nobody takes.
  reading.add_done_callback(lambda read: read.cancelled() or read.exception())
  try:
    async with asyncio.timeout(_MESSAGE_TIMEOUT_S):
      raw = await asyncio.shield(reading)
  except TimeoutError:
    raise DeadlineExceeded(
      f"the request's message did not arrive within {_MESSAGE_TIMEOUT_S:g} s; send it with the call"
    ) from None
  if raw is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]  (missing in the stubs)
    raise MalformedRequest("the call ended without a whole message; send one, framed as its length says")
  return raw


def _parsed(parse: Callable[[bytes], Any] | None, raw: bytes) -> Any:
  if parse is None:
    return raw
  try:
    return parse(raw)
  except Exception:
    kind = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
    raise MalformedRequest(
      f"the {len(raw)} bytes are no {kind.full_name if kind else 'request of this method'}; generate the client from "
      "this server's proto (reflection has it)"
    ) from None
