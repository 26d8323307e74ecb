"""Describes devices that this machine lacks: topologies to compile for, by numbers and names. Nothing can run on them.

Functions import jax inside, since jax finds these devices only once `environment()` is set.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
from typing import Any

# Data sheet and CUDA occupancy figures of an H200 SXM. XLA chooses tiles and fusions by them, and its cost model needs
# the throughputs: per SM and clock, units times operations. Types are numbered as in xla_data.proto.
_SCALAR_UNITS = {4: (64, 1), 8: (64, 1), 10: (128, 2), 11: (128, 1), 12: (64, 1), 16: (128, 2)}
_MATRIX_OPS = {2: 1024, 6: 1024, 10: 512, 11: 256, 12: 32, 16: 512, 19: 1024, 20: 1024}
_H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "NVIDIA H200"  device_vendor: "NVIDIA Corporation"  model_str: "sm_90a, 132 SMs"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"  dnn_version: "9.10.0"
  device_address_bits: 64  ecc_enabled: true
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: {clock}
  device_memory_size: {memory_bytes}  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  pcie_bandwidth: 64000000000
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  scalar_unit_description {{ {scalar} }}
  matrix_unit_description {{ {matrix} }}
}}
"""


def _h200() -> str:
  """Returns XLA's target configuration, as text proto."""

  def rates(units: dict[int, tuple[int, int]]) -> str:
    return " ".join(
      f"rate_infos {{ key: {kind} value {{ clock_rate_ghz: 1.98 units_per_core: {count} ops_per_clock: {ops} }} }}"
      for kind, (count, ops) in units.items()
    )

  return _H200.format(
    clock=1.98,
    memory_bytes=141 * 2**30,
    scalar=rates(_SCALAR_UNITS),
    matrix=rates({kind: (4, ops) for kind, ops in _MATRIX_OPS.items()}),
  )


@dataclasses.dataclass(frozen=True)
class Target:
  """A machine to compile for.

  Attributes:
    name: its name on the command line.
    platform: "cuda" or "tpu".
    topology: JAX's name of it.
    chips: devices that the model is spread over.
  """

  name: str
  platform: str
  topology: str
  chips: int = 1

  @property
  def attention(self) -> str:
    """The name of this platform's paged attention."""
    return {"cuda": "gpu", "tpu": "tpu"}[self.platform]


TARGETS = {
  target.name: target
  for target in (
    Target("h200", "cuda", "1x1x1"),
    Target("h200-8", "cuda", "1x1x8", chips=8),
    Target("v5e", "tpu", "v5e:2x2"),
    Target("v5e-4", "tpu", "v5e:2x2", chips=4),
    Target("v5e-16", "tpu", "v5e:4x4", chips=16),
    Target("v6e", "tpu", "v6e:1x1"),
    Target("v7", "tpu", "tpu7x:1x1x1"),  # one of the chip's two cores, each a device with half of its memory
  )
}


def environment(target: Target, dump: pathlib.Path | None) -> dict[str, str]:
  """Returns variables for a process that compiles for `target`; XLA dumps into `dump` unless it is None."""
  common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
  if target.platform == "cuda":
    if dump is None:
      return common
    return common | {"XLA_FLAGS": f"--xla_dump_to={dump}", "MOSAIC_GPU_DUMP_PTXAS": "1"}
  # Otherwise libtpu queries the metadata server of a cloud machine, and a second process fails at a lock file: both
  # protect chips, of which a compiler uses none.
  return common | {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }


def devices(target: Target) -> list[Any]:
  """Returns the compile-only jax.Devices of `target`. Raises ImportError or RuntimeError if the plugin is missing."""
  from jax.experimental import topologies

  if target.platform == "cuda":
    topology = topologies.get_topology_desc(platform="cuda", topology=target.topology, target_config=_h200())
  else:
    x, y, *z = (int(extent) for extent in target.topology.split(":")[1].split("x"))
    topology = topologies.get_topology_desc(
      platform="tpu",
      topology_name=target.topology,
      chips_per_host_bounds=(x, y, *(z or (1,))),
      chip_config_name="default",
      num_slices=1,
    )
  return list(topology.devices[: target.chips])


@contextlib.contextmanager
def tracing_for(target: Target, device: Any) -> Iterator[None]:
  """Traces Pallas kernels for `device` rather than for the process's own backend, while open."""
  from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

  if target.platform == "cuda":
    yield
    return
  kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
    yield
