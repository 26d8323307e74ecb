"""Builds the Ray Serve application. The only module besides the tools that imports Ray.

serve run deploy/ray/serve.yaml
serve run deploy.ray.app:build_app model=/models/llama max_replicas=4
"""

from typing import Any

from deploy.ray.arguments import SluiceArguments
from deploy.ray.autoscaling import SluicePolicy
from deploy.ray.replica import SluiceReplica
import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy  # pyright: ignore[reportMissingImports]

_STOP_MARGIN_S = 15.0  # Serve's polls, and the server's own end after its drain


def build_app(arguments: SluiceArguments) -> serve.Application:
  """Returns the application; Serve validates the arguments first.

  One placement group a replica keeps all of its devices on one node.
  """
  return make_deployment(arguments).bind(arguments.all_flags(), arguments.drain_timeout_s, arguments.server_timeout_s)


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
    autoscaling_config=_scale(arguments),
  )


def _scale(arguments: SluiceArguments) -> AutoscalingConfig:
  """Returns the bounds, delays and policy.

  A fixed number is one of equal bounds: replicas that began without a policy would never report to a later one.
  """
  policy = AutoscalingPolicy(
    policy_function=SluicePolicy,
    policy_kwargs={"target_rows": arguments.target_rows, "target_kv": arguments.target_kv},
  )
  return AutoscalingConfig(
    min_replicas=arguments.min_replicas,
    max_replicas=arguments.max_replicas,
    initial_replicas=arguments.initial_replicas,
    upscale_delay_s=arguments.upscale_delay_s,
    downscale_delay_s=arguments.downscale_delay_s,
    metrics_interval_s=arguments.metrics_interval_s,
    look_back_period_s=arguments.look_back_period_s,
    policy=policy,
  )


def _has_gpus() -> bool:
  cluster: Any = ray
  return cluster.is_initialized() and cluster.cluster_resources().get("GPU", 0) > 0
