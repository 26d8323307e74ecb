"""Relays sluice.v1 and gRPC's health service from Serve's gRPC proxy to a server on loopback. Checks nothing itself.

Serve calls a method of the replica by the RPC's name, and carries code, details and trailing metadata in the context of
a message. Where a stream ends with an error, or with names of ignored fields, an empty last message therefore carries
the server's status with all of its details; a raised exception would lose them.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from google.protobuf.message import Message
import grpc
from grpc_health.v1 import health_pb2_grpc

from server.errors import EngineDead
from server.proto import sluice_pb2_grpc as pb_grpc
from server.rpc.grpc_status import make_status_answer

# Import paths of what Serve's proxy must register: its option grpc_servicer_functions.
SERVICER_FUNCTIONS = (
  "server.proto.sluice_pb2_grpc.add_GenerationServiceServicer_to_server",
  "server.proto.sluice_pb2_grpc.add_ModelServiceServicer_to_server",
  "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
_IGNORED_FIELDS = "x-sluice-ignored-fields"
# Serve's own keys, and those that gRPC writes.
_NOT_RELAYED = frozenset(("application", "multiplexed_model_id", "request_id", "session_id", "user-agent"))


class GrpcRelay:
  """Calls of one replica, on one connection to its server. Belongs to one event loop."""

  def __init__(self, port: int, is_alive: Callable[[], bool]):
    """Args:
    port: the server's gRPC port on 127.0.0.1.
    is_alive: whether its process runs.
    """
    options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
    self._is_alive = is_alive
    self.generation: Any = pb_grpc.GenerationServiceStub(self._channel)
    self.model: Any = pb_grpc.ModelServiceStub(self._channel)
    self.health: Any = health_pb2_grpc.HealthStub(self._channel)

  async def close(self) -> None:
    """Ends every call."""
    await self._channel.close(None)

  async def relay_unary(self, method: Any, request: Message, context: Any, empty: Message) -> Message:
    """Returns the response, or `empty` with the error's status in the context."""
    call = method(request, metadata=_metadata(context))
    try:
      response = await call
    except grpc.aio.AioRpcError:
      await self._copy_status(call, context)
      return empty
    context.set_trailing_metadata(_text_pairs(await call.trailing_metadata()))
    return response

  async def relay_stream(self, method: Any, request: Message, context: Any, empty: Message) -> AsyncIterator[Message]:
    """Yields the messages as they come. A cancelled iteration cancels the call, and so the generation."""
    call = method(request, metadata=_metadata(context))
    try:
      try:
        async for message in call:
          yield message
      except grpc.aio.AioRpcError:
        await self._copy_status(call, context)
        yield empty
        return
      trailing = _text_pairs(await call.trailing_metadata())
      if any(name == _IGNORED_FIELDS for name, _ in trailing):
        context.set_trailing_metadata(trailing)
        yield empty
    finally:
      call.cancel()

  async def _copy_status(self, call: Any, context: Any) -> None:
    code, details = await call.code(), await call.details()
    trailing = _text_pairs(await call.trailing_metadata())
    if code is grpc.StatusCode.UNAVAILABLE and not self._is_alive():
      answer = make_status_answer(
        EngineDead("this replica's server has ended; Serve replaces it, so send the call again")
      )
      code, details, trailing = answer.code, answer.message, list(answer.metadata)
    context.set_code(code)
    context.set_details(details or code.name)
    context.set_trailing_metadata(trailing)


def _metadata(context: Any) -> list[tuple[str, str | bytes]]:
  """Returns the caller's metadata, with its API key and request id, without what is Serve's or gRPC's own."""
  return [
    (name, value)
    for name, value in context.invocation_metadata()
    if name not in _NOT_RELAYED and not name.startswith("grpc-")
  ]


def _text_pairs(metadata: Iterable[tuple[str, Any]] | None) -> list[tuple[str, Any]]:
  """Returns metadata as plain tuples, which Serve can pickle."""
  return [(name, value) for name, value in metadata or ()]
