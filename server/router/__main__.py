"""Runs the router: sends HTTP requests to replicas of the server.

    python -m server.router --replicas=127.0.0.1:8000,127.0.0.1:8001

SIGTERM and SIGINT drain: readiness ends first, then running requests finish; a second signal exits at once. Exit codes:
0 after a drain, 1 if a port cannot be bound, 2 for bad flags.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import gc
import logging
import pathlib
import signal
import sys

import uvloop

from engine.errors import ConfigError
from engine.routing import PrefixAware, RoutingPolicy, make_routing_policy
from server.http.http_listener import Listener
from server.http.http_options import HttpOptions
from server.lifecycle import systemd_notify
from server.router.replicas.prefill_servers import PrefillServers
from server.router.replicas.replica_pool import ReplicaPool
from server.router.replicas.replica_probes import ReplicaProbes
from server.router.replicas.replica_tls import ReplicaTls
from server.router.router_app import OwnPagesApp, RouterApp
from server.router.router_metrics import RouterMetrics
from server.router.router_settings import RouterSettings, parse_router_flags
from server.security.certificates import make_certificates
from server.telemetry import log_lines
from server.telemetry.access_log import AccessLog

_POLL_S = 0.01

_LINES = log_lines.Lines()


def make_policy(settings: RouterSettings) -> RoutingPolicy:
  """Returns the policy of the settings."""
  if settings.policy == "prefix_aware":
    return PrefixAware(settings.max_known_pieces)
  return make_routing_policy(settings.policy)


class RouterProgram:
  """The router from start to end. Belongs to one event loop.

  Attributes:
    port, metrics_port: the ports, once started; -1 without a port for metrics.
  """

  def __init__(self, settings: RouterSettings):
    """Raises ConfigError for files that cannot be used. Needs a running event loop."""
    self._settings = settings
    self._prefill = PrefillServers(
      settings.prefill_servers,
      make_policy(settings),
      settings.prefill_ca_file,
      settings.probe_period_s,
      settings.probe_timeout_s,
      (settings.client_cert_file, settings.client_key_file),
    )
    tls = None
    if settings.has_tls_replica:
      tls = ReplicaTls(settings.replica_ca_file, settings.client_cert_file, settings.client_key_file)
    pool = ReplicaPool(settings.replicas, make_policy(settings), tls)
    metrics = RouterMetrics(pool, self._prefill)
    self._access_log = AccessLog(settings.access_log)
    self._probes = ReplicaProbes(pool, settings, metrics.count_probe)
    self._app = RouterApp(pool, self._prefill, self._probes, metrics, settings, self._access_log)
    certificates = make_certificates(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
    options = HttpOptions(
      host=settings.host,
      port=settings.port,
      max_header_bytes=settings.max_header_bytes,
      max_connections=settings.max_connections,
    )
    self._listeners = [Listener(self._app, options, certificates, flag="port")]
    if settings.metrics_port >= 0:
      of_metrics = HttpOptions(host=settings.host, port=settings.metrics_port)
      self._listeners.append(Listener(OwnPagesApp(self._app), of_metrics, flag="metrics_port"))
    self._stop, self._hurry = asyncio.Event(), asyncio.Event()
    self.port = self.metrics_port = -1

  async def start_router(self) -> None:
    """Binds the ports and begins to check replicas. Raises ConfigError."""
    ports = [await listener.start_listening() for listener in self._listeners]
    self.port, self.metrics_port = ports[0], ports[1] if len(ports) > 1 else -1
    self._probes.start_probes()
    self._prefill.start_checks()

  def request_stop(self) -> None:
    """Begins the drain; a second call ends it at once."""
    if self._stop.is_set():
      self._hurry.set()
    self._stop.set()

  async def wait_stopped(self) -> None:
    """Waits for a stop, lets running requests finish, and closes everything."""
    await self._stop.wait()
    self._app.is_stopping = True
    await self._wait_unless_hurried(self._settings.drain_delay_s)
    self._app.is_draining = True
    deadline = asyncio.get_running_loop().time() + self._settings.drain_timeout_s
    while self._app.num_requests and not self._hurry.is_set() and asyncio.get_running_loop().time() < deadline:
      await asyncio.sleep(_POLL_S)
    for listener in self._listeners:
      await listener.stop_listening(0.0 if self._hurry.is_set() else 1.0)
    await self._probes.stop_probes()
    await self._prefill.stop_checks()
    self._access_log.close()

  async def _wait_unless_hurried(self, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(seconds):
        await self._hurry.wait()


async def _run(settings: RouterSettings) -> None:
  program, loop = RouterProgram(settings), asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, program.request_stop)
  await program.start_router()
  scheme = "https" if settings.tls_cert_file else "http"
  _LINES.say(f"open      {scheme}://{settings.host}:{program.port}")
  if program.metrics_port >= 0:
    _LINES.say(f"metrics   http://{settings.host}:{program.metrics_port}/metrics")
  _LINES.say(f"replicas  {', '.join(settings.replicas)} ({settings.policy})")
  if settings.port_file:
    path = pathlib.Path(settings.port_file)
    part = path.with_name(path.name + ".part")
    part.write_text(f"{program.port}\n")
    part.replace(path)
  systemd_notify.notify_systemd("READY=1")
  gc.collect()
  gc.freeze()  # the start's objects live as long as the process
  await program.wait_stopped()


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  try:
    settings = parse_router_flags(argv)
  except ConfigError as error:
    _LINES.say(f"error: {error}")
    return 2
  logging.basicConfig(format="%(levelname)s %(message)s")
  _LINES.set_up(settings.log_format)
  try:
    asyncio.run(_run(settings), loop_factory=uvloop.new_event_loop)
  except (ConfigError, OSError) as error:
    _LINES.say(f"error: {' '.join(str(error).split())}")
    return 1
  _LINES.say("stopped")
  return 0


if __name__ == "__main__":
  sys.exit(main())
