"""Ray and the Sluice application on this machine, for the length of a block. Checks nothing itself.

Runs in the environment of `make setup-ray`. Nothing else in tools imports Ray.
"""

import contextlib
import logging
import os
import pathlib
import secrets
import tempfile
import time
from typing import Any, Self

import psutil
import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]

from deploy.ray.app import build_app
from deploy.ray.arguments import SluiceArguments
from deploy.ray.grpc_relay import SERVICER_FUNCTIONS
from tools.server_process import find_free_port

_OBJECT_STORE_BYTES = 80 << 20
_ANOTHER = "another"
_SETTINGS = {
  # Ray runs replicas at niceness 15; processes beside them would keep these from starting on two cores.
  "RAY_worker_niceness": "0",
  # Within seconds, Ray's processes notice that another one stands still; docs/how-to/ray-nodes.md has these, too.
  "RAY_grpc_client_keepalive_time_ms": "1000",
  "RAY_grpc_client_keepalive_timeout_ms": "2000",
  "RAY_grpc_keepalive_time_ms": "1000",
  "RAY_grpc_keepalive_timeout_ms": "2000",
  # A call whose connection has ended fails at once; by default Ray waits another one to two seconds for the cause.
  "RAY_timeout_ms_task_wait_for_death_info": "0",
}


class RayCluster:
  """A Ray of its own, without a dashboard, with Serve's proxies on free ports of 127.0.0.1.

  Attributes:
    grpc_target: HOST:PORT of Serve's gRPC proxy.
    http_url: URL of its HTTP proxy.
    mark: served name of the model, by which the check finds its servers.
    application: name of the application in Serve.
  """

  application = "sluice"

  def __init__(self, num_devices: int = 4, certificate: tuple[pathlib.Path, pathlib.Path] | None = None):
    """Args:
    num_devices: units of the custom resource "device" that the node offers.
    certificate: PEM files of a certificate and its key, for Serve's HTTP proxy; None: plain HTTP.
    """
    self._num_devices, self._certificate = num_devices, certificate
    self.mark = f"ray-check-{secrets.token_hex(4)}"
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> Self:
    with contextlib.ExitStack() as stack:
      os.environ |= _SETTINGS | os.environ
      folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sray-", ignore_cleanup_errors=True))
      ray.init(
        num_cpus=2,
        resources={"device": self._num_devices},
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="warning",
        _temp_dir=folder,
      )
      stack.callback(ray.shutdown)
      logging.getLogger("ray.serve").setLevel(logging.WARNING)
      http_port, grpc_port = find_free_port(), find_free_port()
      http_options: dict[str, Any] = {"host": "127.0.0.1", "port": http_port}
      if self._certificate:
        http_options["ssl_certfile"], http_options["ssl_keyfile"] = map(str, self._certificate)
      serve.start(
        http_options=http_options,
        grpc_options={"port": grpc_port, "grpc_servicer_functions": list(SERVICER_FUNCTIONS)},
      )
      stack.callback(serve.shutdown)
      self.grpc_target = f"127.0.0.1:{grpc_port}"
      self.http_url = f"{'https' if self._certificate else 'http'}://127.0.0.1:{http_port}"
      self._logs = pathlib.Path(folder)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *_: object) -> None:
    self._stack.close()

  def deploy(self, **arguments: Any) -> None:
    """Deploys the application, in place of an earlier one; returns once it is ready.

    Args:
      **arguments: of SluiceArguments. The server's name is the check's own, by which it finds its processes.

    Raises:
      RuntimeError: a replica did not start.
    """
    self._arguments = arguments
    self._run(self.application, "/", self.mark, arguments)

  def measure_start(self) -> float:
    """Returns the seconds in which one replica more starts, as an application of its own, which then ends again.

    Meanwhile, gRPC calls must name `application` in their metadata, or Serve refuses them.
    """
    began = time.monotonic()
    self._run(_ANOTHER, "/another", f"{self.mark}-another", {**self._arguments, "min_replicas": 1, "max_replicas": 1})
    took = time.monotonic() - began
    serve.delete(_ANOTHER)
    return took

  def _run(self, name: str, route: str, mark: str, arguments: dict[str, Any]) -> None:
    flags = [*arguments.get("server_flags", ()), f"--served_model_name={mark}"]
    given = SluiceArguments(num_cpus=0.1, num_gpus=0, **{**arguments, "server_flags": flags})
    serve.run(build_app(given), name=name, route_prefix=route, logging_config={"log_level": "WARNING"})

  def count_replicas(self) -> int:
    """Returns the replicas that run and are healthy."""
    application = serve.status().applications[self.application]
    return sum(deployment.replica_states.get("RUNNING", 0) for deployment in application.deployments.values())

  def find_servers(self) -> dict[int, int]:
    """Returns the process id of each replica's server -> that of its replica."""
    found = {}
    for process in psutil.process_iter(("cmdline",)):
      command = process.info["cmdline"] or ()
      if "deploy.ray.guarded_server" in command and f"--served_model_name={self.mark}" in command:
        with contextlib.suppress(psutil.NoSuchProcess):
          found[process.pid] = process.ppid()
    return found

  def wait_for_replicas(self, count: int, timeout_s: float, replacing: frozenset[int] = frozenset()) -> float | None:
    """Waits until exactly `count` replicas run, none with a server in `replacing`.

    Returns:
      The seconds it took; None if it did not happen in time.
    """
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
      servers = self.find_servers()
      if self.count_replicas() == count == len(servers) and not replacing & servers.keys():
        return time.monotonic() - began
      time.sleep(0.2)
    return None

  def wait_for_replacement(self, count: int, timeout_s: float, lost: int) -> tuple[float, float] | None:
    """Waits until Serve misses a replica that has just been lost, and then until `count` replicas run again.

    Args:
      count: replicas that ran before.
      timeout_s: for all of it.
      lost: process id of the server that was lost, or whose replica was.

    Returns:
      The seconds until Serve missed it, and those from then on; None if it did not happen in time.
    """
    began = time.monotonic()
    while self.count_replicas() >= count:
      if time.monotonic() - began > timeout_s:
        return None
      time.sleep(0.1)
    missed_s = time.monotonic() - began
    took = self.wait_for_replicas(count, timeout_s - missed_s, frozenset((lost,)))
    return None if took is None else (missed_s, took)

  def find_bundles(self) -> list[dict[str, float]]:
    """Returns the resources of the bundles of every placement group that replicas hold."""
    from ray.util import placement_group_table  # pyright: ignore[reportMissingImports]

    table: dict[str, Any] = placement_group_table()
    return [
      dict(bundle) for group in table.values() if group["state"] == "CREATED" for bundle in group["bundles"].values()
    ]
