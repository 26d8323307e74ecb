"""Finds this host's place in the cluster, and reads the cluster's secret. Opens no connection."""

import dataclasses
import importlib
import os
import pathlib
import stat
from typing import Any

from engine.errors import ConfigError
from server.host_options import ClusterSettings, split_address

_LEAST_SECRET_BYTES = 32
_MOST_SECRET_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class ClusterPlace:
  """The place of a host.

  Attributes:
    host, port: address of JAX's coordinator on host 0; Sluice's leader listens at the next port.
    num_hosts: 2 or more.
    host_id: 0 is the leader.
    is_found: JAX found a part of this in the environment.
  """

  host: str
  port: int
  num_hosts: int
  host_id: int
  is_found: bool

  @property
  def leader_port(self) -> int:
    """The port at which the leader waits for followers."""
    return self.port + 1

  @property
  def is_leader(self) -> bool:
    return self.host_id == 0


def find_place(settings: ClusterSettings) -> ClusterPlace:
  """Returns the place that the settings give, completed by JAX's own detection of TPU pods, SLURM and Kubernetes.

  Raises:
    ConfigError: a part is missing and JAX does not find it, or the parts contradict each other.
  """
  address, num_hosts = settings.coordinator_address or None, settings.num_hosts or None
  host_id = settings.host_id if settings.host_id >= 0 else None
  is_found = None in (address, num_hosts, host_id)
  if is_found:
    address, num_hosts, host_id = _detect_missing(address, num_hosts, host_id, settings.host_start_timeout_s)
  flags = {"coordinator_address": address, "num_hosts": num_hosts, "host_id": host_id}
  missing = [f"--{name}" for name, value in flags.items() if value is None]
  if address is None or num_hosts is None or host_id is None:
    raise ConfigError(
      f"num_hosts={settings.num_hosts}: JAX finds no TPU pod, SLURM job or Kubernetes job here; set "
      f"{' and '.join(missing)}"
    )
  if num_hosts < 2:
    raise ConfigError(
      f"num_hosts={num_hosts} was found by JAX here, and several hosts are 2 or more; set --num_hosts=1"
    )
  if not 0 <= host_id < num_hosts:
    raise ConfigError(f"host_id={host_id} must be from 0 to {num_hosts - 1}, as num_hosts={num_hosts}; set --host_id")
  host, port = split_address(address)
  return ClusterPlace(host, port, num_hosts, host_id, is_found)


def _detect_missing(
  address: str | None, num_hosts: int | None, host_id: int | None, limit_s: float
) -> tuple[str | None, int | None, int | None]:
  """Completes the place as jax.distributed.initialize does, before which the hosts must have met."""
  clusters: Any = importlib.import_module("jax._src.clusters")
  try:
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
      address, num_hosts, host_id, [], None, int(limit_s)
    )
  except Exception as error:  # each environment has its own
    raise ConfigError(
      f"num_hosts={num_hosts or 0}: JAX cannot read its place from this environment "
      f"({' '.join(str(error).split())}); set --coordinator_address, --num_hosts and --host_id"
    ) from error
  return found[:3]


def read_secret(path: str) -> bytes:
  """Returns the cluster's secret, without white space around it.

  Raises:
    ConfigError: the file cannot be read, other users may read or change it, or it is too short.
  """
  file = pathlib.Path(path)
  remedy = f"make one with: (umask 077; head -c 32 /dev/urandom | base64 > {path}), and copy it to all hosts"
  try:
    found = file.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
      raise ConfigError(f"cluster_secret_file={path} is no regular file; {remedy}")
    if mode & 0o037 or found.st_uid not in (os.geteuid(), 0):
      raise ConfigError(
        f"cluster_secret_file={path} has mode {mode:04o} and owner {found.st_uid}, so that others may read or change "
        f"it; chown it to user {os.geteuid()} and chmod 600"
      )
    with open(file, "rb") as stream:
      secret = stream.read(_MOST_SECRET_BYTES + 1)
  except OSError as error:
    raise ConfigError(f"cluster_secret_file={path}: {error.strerror}; {remedy}") from None
  secret, size = secret.strip(), len(secret)
  if not len(secret) >= _LEAST_SECRET_BYTES or size > _MOST_SECRET_BYTES:
    raise ConfigError(
      f"cluster_secret_file={path} has {min(size, _MOST_SECRET_BYTES + 1)} bytes, and a secret has "
      f"{_LEAST_SECRET_BYTES} to {_MOST_SECRET_BYTES}; {remedy}"
    )
  return secret
