"""Serves sluice.chaos.v1, the calls that only tests need, beside the admin service. Decides nothing."""

from collections.abc import Callable

import grpc

from engine.errors import ConfigError, InvalidRequest
from server.errors import NotConfigured, Starting
from server.telemetry.process_counts import Census
from tools.chaos.proto import chaos_pb2 as pb
from tools.chaos.proto import chaos_pb2_grpc as pb_grpc
from tools.chaos.server.faults import FaultPlan, Injector
from tools.chaos.server.invariants import Invariants

_NO_FAULTS = '{"faults": []}'


class ChaosService(pb_grpc.ChaosServiceServicer):
  """One object a server."""

  def __init__(self, injector: Injector | None, invariants: Callable[[], Invariants | None], census: Census):
    """Args:
    injector: follows the plans; None where there are no points.
    invariants: the books of the process that has the engine; None while it loads.
    census: counts all of the server's processes.
    """
    self._injector = injector
    self._invariants = invariants
    self._census = census

  def register(self, server: grpc.aio.Server) -> None:
    """Adds the service to a server that has not started."""
    pb_grpc.add_ChaosServiceServicer_to_server(self, server)

  async def GetInvariants(
    self, request: pb.GetInvariantsRequest, context: grpc.aio.ServicerContext
  ) -> pb.GetInvariantsResponse:
    """The books as they stand."""
    invariants = self._invariants()
    if invariants is None:
      raise Starting()
    return invariants.report_books(await self._census())

  async def SetFaultPlan(
    self, request: pb.SetFaultPlanRequest, context: grpc.aio.ServicerContext
  ) -> pb.SetFaultPlanResponse:
    """Another plan from now on; how often each fault of the old one has acted."""
    if self._injector is None:
      raise NotConfigured("this server has no points for faults: it was started without --fault_plan")
    try:
      return pb.SetFaultPlanResponse(acted=self._injector.replace_plan(FaultPlan.parse(request.plan or _NO_FAULTS)))
    except ConfigError as error:
      raise InvalidRequest(str(error)) from None
