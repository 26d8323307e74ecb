"""Builds the Ray Serve application. The only module besides the tools that imports Ray.

    serve run deploy/ray/serve.yaml
    serve run deploy.ray.app:build_app model=/models/llama max_replicas=4
"""

from typing import Any

import pydantic
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deploy.ray.autoscaling import SluicePolicy
from deploy.ray.child_server import check_server_flags
from deploy.ray.replica import SluiceReplica
from engine.errors import ConfigError

_STOP_MARGIN_S = 15.0  # Serve's polls, and the server's own end after its drain


class SluiceArguments(pydantic.BaseModel):
  """The application's arguments: on `serve run`'s command line, or under `args` in a config file."""

  model_config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())

  model: str = pydantic.Field("", description="The server's --model; empty: the demo model.")
  server_flags: list[str] = pydantic.Field([], description="Further flags of server.main, --name=value each.")
  min_replicas: int = pydantic.Field(1, ge=0)
  max_replicas: int = pydantic.Field(1, ge=1)
  initial_replicas: int | None = pydantic.Field(None, ge=0, description="None: min_replicas.")
  num_devices: int = pydantic.Field(1, ge=1, description="Devices of a replica: the server's --num_devices.")
  num_cpus: float = pydantic.Field(1.0, gt=0, description="CPUs that Ray reserves for a replica.")
  num_gpus: float | None = pydantic.Field(None, ge=0, description="None: num_devices where the cluster has GPUs.")
  resources: dict[str, float] = pydantic.Field({}, description='Custom resources of a replica, such as {"TPU": 4}.')
  max_ongoing_requests: int = pydantic.Field(
    1024, ge=1, description="Requests of a replica at once. Above its engine's queue, so that the server's 429 answers."
  )
  max_queued_requests: int = pydantic.Field(
    1024, ge=-1, description="Requests that wait at a proxy; further ones get Serve's 503. -1: no limit."
  )
  target_rows: float = pydantic.Field(0.7, gt=0, description="Wanted share of --max_num_seqs in use, for autoscaling.")
  target_kv: float = pydantic.Field(0.8, gt=0, le=1, description="Wanted share of KV blocks in use, for autoscaling.")
  upscale_delay_s: float = pydantic.Field(30.0, ge=0)
  downscale_delay_s: float = pydantic.Field(600.0, ge=0)
  metrics_interval_s: float = pydantic.Field(10.0, gt=0)
  look_back_period_s: float = pydantic.Field(30.0, gt=0)
  drain_timeout_s: float = pydantic.Field(60.0, ge=0, description="Time for running requests when a replica stops.")
  server_timeout_s: float = pydantic.Field(
    10.0, gt=0, description="A replica kills its server, and is replaced, when a health check takes this long."
  )
  health_check_period_s: float = pydantic.Field(5.0, gt=0)
  health_check_timeout_s: float = pydantic.Field(30.0, gt=0)
  environment: dict[str, str] = pydantic.Field({}, description="Environment variables of the replicas.")

  @pydantic.model_validator(mode="after")
  def check_together(self) -> "SluiceArguments":
    """Raises ValueError, in one line, for what no replica could run with."""
    if self.min_replicas > self.max_replicas:
      raise ValueError(f"min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}; raise the latter")
    try:
      check_server_flags(self.all_flags())
    except ConfigError as error:
      raise ValueError(str(error)) from None
    return self

  def all_flags(self) -> list[str]:
    """Returns the flags of a replica's server."""
    model = [f"--model={self.model}"] if self.model else []
    devices = [f"--num_devices={self.num_devices}"] if self.num_devices > 1 else []
    return [*model, *devices, *self.server_flags]


def build_app(arguments: SluiceArguments) -> serve.Application:
  """Returns the application; Serve validates the arguments first.

  One placement group a replica keeps all of its devices on one node.
  """
  return make_deployment(arguments).bind(
    arguments.all_flags(), arguments.drain_timeout_s, arguments.server_timeout_s
  )


def make_deployment(arguments: SluiceArguments) -> serve.Deployment:
  """Returns the deployment of these arguments."""
  num_gpus = float(arguments.num_devices if _has_gpus() else 0) if arguments.num_gpus is None else arguments.num_gpus
  bundle = {"CPU": arguments.num_cpus} | ({"GPU": num_gpus} if num_gpus else {}) | arguments.resources
  environment = {"env_vars": arguments.environment} if arguments.environment else {}
  return serve.deployment(
    serve.ingress()(SluiceReplica),
    name="sluice",
    ray_actor_options={
      "num_cpus": arguments.num_cpus,
      "num_gpus": num_gpus,
      "resources": arguments.resources,
      "runtime_env": environment,
    },
    placement_group_bundles=[bundle],
    placement_group_strategy="STRICT_PACK",
    max_ongoing_requests=arguments.max_ongoing_requests,
    max_queued_requests=arguments.max_queued_requests,
    graceful_shutdown_timeout_s=arguments.drain_timeout_s + _STOP_MARGIN_S,
    graceful_shutdown_wait_loop_s=1.0,
    health_check_period_s=arguments.health_check_period_s,
    health_check_timeout_s=arguments.health_check_timeout_s,
    **_scale(arguments),
  )


def _scale(arguments: SluiceArguments) -> dict[str, Any]:
  if arguments.min_replicas == arguments.max_replicas:
    return {"num_replicas": arguments.max_replicas}
  policy = AutoscalingPolicy(
    policy_function=SluicePolicy,
    policy_kwargs={"target_rows": arguments.target_rows, "target_kv": arguments.target_kv},
  )
  config = AutoscalingConfig(
    min_replicas=arguments.min_replicas,
    max_replicas=arguments.max_replicas,
    initial_replicas=arguments.initial_replicas,
    upscale_delay_s=arguments.upscale_delay_s,
    downscale_delay_s=arguments.downscale_delay_s,
    metrics_interval_s=arguments.metrics_interval_s,
    look_back_period_s=arguments.look_back_period_s,
    policy=policy,
  )
  return {"autoscaling_config": config}


def _has_gpus() -> bool:
  import ray

  return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
