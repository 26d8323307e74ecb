"""One replica: a Sluice server as a child process, and what Serve calls to reach, watch, scale and stop it.

Serve calls methods by name: those of sluice.v1 and gRPC's health service, and check_health, record_autoscaling_stats,
__serve_build_asgi_app__ and __del__ of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from deploy.ray.autoscaling import LoadFigures
from deploy.ray.child_server import ChildServer
from deploy.ray.grpc_relay import GrpcRelay
from deploy.ray.http_relay import HttpRelay
from server.lifecycle import watchdog
from server.lifecycle.lifetime import LIVENESS
from server.proto import sluice_pb2 as pb
from server.rpc.sluice_service import GENERATION_SERVICE

_WATCH_PERIOD_S = 1.0
_FAREWELL_S = 0.2  # for the last errors to reach Serve's proxies


class UnhealthyServer(RuntimeError):
  """The replica's server cannot serve, so Serve must replace the replica."""


class SluiceReplica:
  """The class that Serve deploys. Its methods run on one event loop."""

  async def __init__(self, server_flags: Sequence[str], drain_timeout_s: float, server_timeout_s: float):
    """Returns once the server is ready, compiled steps included.

    Args:
      server_flags: flags of server.main that `check_server_flags` accepts.
      drain_timeout_s: seconds that running requests have when the replica stops.
      server_timeout_s: the replica kills a server that answers no health check for this long, in seconds.

    Raises:
      ConfigError: the server did not start.
    """
    self._server = ChildServer(server_flags, drain_timeout_s=drain_timeout_s)
    await self._server.start()
    self._relay = GrpcRelay(self._server.grpc_port, lambda: self._server.is_alive)
    self._watches = [
      asyncio.create_task(self._end_with_server()),
      asyncio.create_task(self._kill_silent_server(server_timeout_s)),
    ]

  def __serve_build_asgi_app__(self) -> HttpRelay:
    """Returns the HTTP API."""
    return HttpRelay(lambda: self._server.http_port)

  async def _end_with_server(self) -> None:
    """Ends the replica's process after its server, so that Serve's routers drop it at once and replace it.

    Alive, it would fail each request quickly, and the routers send most requests where the fewest are running.
    """
    await self._server.wait_ended()
    print(f"sluice: {self._server.describe_end()}; the replica ends with it", file=sys.stderr, flush=True)
    await asyncio.sleep(_FAREWELL_S)
    watchdog.exit_now(watchdog.EXIT_CODE)

  async def _kill_silent_server(self, timeout_s: float) -> None:
    """Kills a server that stands still, so that its clients learn of it."""
    request = health_pb2.HealthCheckRequest(service=LIVENESS)
    while True:
      await asyncio.sleep(_WATCH_PERIOD_S)
      try:
        await self._relay.health.Check(request, timeout=timeout_s)
      except grpc.aio.AioRpcError as error:
        print(f"sluice: the server's health check ended {error.code().name}", file=sys.stderr, flush=True)
        self._server.kill()
        return

  async def check_health(self) -> None:
    """Raises UnhealthyServer if the server cannot serve; Serve then replaces the replica."""
    request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
    try:
      answer = await self._relay.health.Check(request)
    except grpc.aio.AioRpcError as error:
      raise UnhealthyServer(f"the server's health check ended {error.code().name}: {error.details()}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
      raise UnhealthyServer("the server is alive and accepts no requests")

  async def record_autoscaling_stats(self) -> dict[str, float]:
    """Returns the figures that the autoscaling policy reads."""
    load = await self._relay.model.GetLoad(pb.GetLoadRequest())
    return LoadFigures(
      requests=load.running_requests + load.queued_requests,
      rows=load.max_num_seqs,
      kv_usage=load.kv_blocks_in_use / max(1, load.kv_blocks_total),
    ).report()

  async def __del__(self) -> None:
    """Ends the server. Serve has waited for running requests before."""
    for watch in self._watches:
      watch.cancel()
    await self._relay.close()
    await self._server.stop()

  # sluice.v1 and grpc.health.v1, as Serve's gRPC proxy calls them.

  async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> AsyncIterator[Any]:
    method = self._relay.generation.Generate
    async for message in self._relay.relay_stream(method, request, grpc_context, pb.GenerateResponse()):
      yield message

  async def GenerateUnary(self, request: pb.GenerateRequest, grpc_context: Any) -> Any:
    method = self._relay.generation.GenerateUnary
    return await self._relay.relay_unary(method, request, grpc_context, pb.GenerateUnaryResponse())

  async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Any) -> Any:
    return await self._relay.relay_unary(self._relay.generation.Tokenize, request, grpc_context, pb.TokenizeResponse())

  async def Detokenize(self, request: pb.DetokenizeRequest, grpc_context: Any) -> Any:
    method = self._relay.generation.Detokenize
    return await self._relay.relay_unary(method, request, grpc_context, pb.DetokenizeResponse())

  async def Embed(self, request: pb.EmbedRequest, grpc_context: Any) -> Any:
    return await self._relay.relay_unary(self._relay.generation.Embed, request, grpc_context, pb.EmbedResponse())

  async def Classify(self, request: pb.ClassifyRequest, grpc_context: Any) -> Any:
    method = self._relay.generation.Classify
    return await self._relay.relay_unary(method, request, grpc_context, pb.ClassifyResponse())

  async def Abort(self, request: pb.AbortRequest, grpc_context: Any) -> Any:
    grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
    grpc_context.set_details("Abort would reach one replica of several; cancel the call of the generation instead")
    return pb.AbortResponse()

  async def GetModelInfo(self, request: pb.GetModelInfoRequest, grpc_context: Any) -> Any:
    return await self._relay.relay_unary(
      self._relay.model.GetModelInfo, request, grpc_context, pb.GetModelInfoResponse()
    )

  async def GetLoad(self, request: pb.GetLoadRequest, grpc_context: Any) -> Any:
    return await self._relay.relay_unary(self._relay.model.GetLoad, request, grpc_context, pb.GetLoadResponse())

  async def Check(self, request: Any, grpc_context: Any) -> Any:
    return await self._relay.relay_unary(
      self._relay.health.Check, request, grpc_context, health_pb2.HealthCheckResponse()
    )

  async def Watch(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
    # A watch never ends, so it would hold every drain until its timeout. Clients take this status as healthy.
    grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
    grpc_context.set_details("Watch would hold a replica's drain; poll with Check instead")
    yield health_pb2.HealthCheckResponse()
