"""Adds vLLM's engine protocol to a server with --enable_vllm_api. Loads none of it otherwise."""

import grpc

from server.generation.serving_state import ServingState
from server.host_options import HostOptions
from server.lifecycle.composition import Composition
from server.rpc.sluice_service import SluiceService
from server.telemetry.process_counts import Census


class VllmComposition(Composition):
  """The composition of a server that supports --enable_vllm_api, and of each of its front end processes."""

  def front_end_module(self, options: HostOptions) -> str:
    if options.enable_vllm_api:
      return "extensions.vllm_api.front_end_process"
    return super().front_end_module(options)

  def add_services(
    self,
    server: grpc.aio.Server,
    options: HostOptions,
    state: ServingState,
    service: SluiceService,
    census: Census,
  ) -> tuple[str, ...]:
    if not options.enable_vllm_api:
      return ()
    from extensions.vllm_api.service import VLLM_SERVICE, VllmEngineService

    VllmEngineService(state, service, census).register(server)
    return (VLLM_SERVICE,)
