"""Chooses a prefill server for a prompt, which its decode server then has compute it. Sends no prompt.

The choice goes to the decode server in the header `x-prefiller-host-port`, as llm-d's router sends it. It is advice: a
decode server computes short and known prompts itself, and any prompt whose prefill server fails.
"""

import asyncio
from collections.abc import Hashable, Sequence
import logging
import pathlib
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.errors import ConfigError
from engine.routing import RoutingPolicy

# Its readiness in gRPC's health service.
_SERVICE = "sluice.transfer.v1.TransferService"

_log = logging.getLogger(__name__)


class PrefillServer:
  """One prefill server.

  Attributes:
    name: HOST:PORT of its gRPC port.
    is_ready: whether its latest check succeeded.
    num_waiting: requests that name it and have no byte of an answer yet.
  """

  def __init__(self, name: str):
    self.name = name
    self.is_ready = False
    self.num_waiting = 0

  @property
  def load(self) -> float:
    """Prompts that it may have to compute."""
    return self.num_waiting


class PrefillServers:
  """All prefill servers, and their checks."""

  def __init__(
    self,
    names: Sequence[str],
    policy: RoutingPolicy,
    ca_file: str,
    period_s: float,
    timeout_s: float,
    own_files: tuple[str, str] = ("", ""),
  ):
    """Args:
    names: HOST:PORT of each.
    policy: chooses among them; another object than that of the replicas.
    ca_file: PEM authorities of their certificates; empty: plain text.
    period_s, timeout_s: of the checks.
    own_files: PEM certificate and key of the router, for servers that require one; empty for none.

    Raises:
      ConfigError: a file cannot be read.
    """
    self.servers = [PrefillServer(name) for name in names]
    self._policy = policy
    self._period_s, self._timeout_s = period_s, timeout_s
    self._credentials: grpc.ChannelCredentials | None = None
    if ca_file:
      try:
        authorities, certificate, key = (
          pathlib.Path(file).read_bytes() if file else None for file in (ca_file, *own_files)
        )
      except OSError as error:
        raise ConfigError(
          f"{error.filename} cannot be read: {error.strerror}; check --prefill_ca_file, --client_cert_file and "
          "--client_key_file"
        ) from None
      self._credentials = grpc.ssl_channel_credentials(authorities, key, certificate)
    self._tasks: list[asyncio.Task] = []

  def start_checks(self) -> None:
    """Begins to check."""
    self._tasks = [asyncio.create_task(self._watch_server(server)) for server in self.servers]

  async def stop_checks(self) -> None:
    """Ends the checks."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  def choose_server(self, keys: Sequence[Hashable]) -> PrefillServer | None:
    """Returns the server for a prompt with these keys; None if none is ready."""
    ready = [server for server in self.servers if server.is_ready]
    return self._policy.choose(ready, keys) if ready else None

  async def _watch_server(self, server: PrefillServer) -> None:
    options = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 2000))
    if self._credentials is None:
      channel = grpc.aio.insecure_channel(server.name, options)
    else:
      channel = grpc.aio.secure_channel(server.name, self._credentials, options)
    async with channel:
      stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods have no stubs
      while True:
        try:
          answer = await stub.Check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=self._timeout_s)
          is_ready, trouble = answer.status == health_pb2.HealthCheckResponse.SERVING, "it is not ready"
        except grpc.aio.AioRpcError as error:
          is_ready, trouble = False, error.details() or error.code().name
          if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._policy.forget(server.name)  # a process that has ended has lost its cache
        if server.is_ready and not is_ready:
          _log.warning("the prefill server %s gets no prompts: %s", server.name, trouble)
        elif is_ready and not server.is_ready:
          _log.info("the prefill server %s gets prompts", server.name)
        server.is_ready = is_ready
        await asyncio.sleep(self._period_s)
