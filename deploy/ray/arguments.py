"""The arguments of the Ray Serve application, checked before Ray allocates anything. Imports no Ray."""

import pydantic

from deploy.ray.child_server import check_server_flags
from engine.errors import ConfigError


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
