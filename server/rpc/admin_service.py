"""Serves sluice.admin.v1, the operator's API. Decides nothing: each method calls one action."""

from collections.abc import Callable, Sequence
import dataclasses

import grpc
from grpc_channelz.v1 import channelz

from engine.adapters import AdapterState
from server.generation.engine_client import EngineClient
from server.proto import admin_pb2 as pb
from server.proto import admin_pb2_grpc
from server.version import server_version

ADMIN_SERVICE = "sluice.admin.v1.AdminService"
CHANNELZ_SERVICE = "grpc.channelz.v1.Channelz"


@dataclasses.dataclass(frozen=True)
class AdminActions:
  """The actions that the composition root provides. The service calls them on the event loop; they return at once.

  Attributes:
    flags: returns the settings in force, one "--name=value" each.
    set_trace: switches the step trace; returns its path, or raises NotConfigured or Unavailable.
  """

  flags: Callable[[], Sequence[str]]
  set_trace: Callable[[bool], str]


class AdminService(admin_pb2_grpc.AdminServiceServicer):
  """Implements the admin API; a server has one."""

  def __init__(self, actions: AdminActions, drain: Callable[[], int], engine: Callable[[], EngineClient]):
    """Args:
    actions: the composition root's actions.
    drain: begins the drain; returns the number of live requests.
    engine: returns the engine; raises Unavailable unless it serves.
    """
    self._actions = actions
    self._drain = drain
    self._engine = engine

  def register(self, server: grpc.aio.Server, *, enable_channelz: bool) -> None:
    """Adds the service to a server that has not started, and gRPC's channelz where the options enable it."""
    admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)
    if enable_channelz:
      channelz.add_channelz_servicer(server)

  async def GetConfig(self, request: pb.GetConfigRequest, context: grpc.aio.ServicerContext) -> pb.GetConfigResponse:
    return pb.GetConfigResponse(server_version=server_version(), flags=self._actions.flags())

  async def SetTrace(self, request: pb.SetTraceRequest, context: grpc.aio.ServicerContext) -> pb.SetTraceResponse:
    return pb.SetTraceResponse(path=self._actions.set_trace(request.on))

  async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
    return pb.DrainResponse(live_requests=self._drain())

  async def LoadAdapter(
    self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
  ) -> pb.LoadAdapterResponse:
    await self._engine().load_adapter(request.lora_name, request.lora_path, replaces=request.load_inplace)
    return pb.LoadAdapterResponse()

  async def UnloadAdapter(
    self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
  ) -> pb.UnloadAdapterResponse:
    return pb.UnloadAdapterResponse(live_requests=await self._engine().unload_adapter(request.lora_name))

  async def ListAdapters(
    self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
  ) -> pb.ListAdaptersResponse:
    report = await self._engine().report()
    return pb.ListAdaptersResponse(
      adapters=[
        pb.Adapter(
          name=adapter.name,
          path=adapter.path,
          rank=adapter.rank,
          live_requests=adapter.num_live,
          draining=adapter.state == AdapterState.DRAINING.value,
        )
        for adapter in report.adapters
      ]
    )
