"""Describes devices that this machine lacks: topologies to compile for, by numbers and names. Nothing can run on them.

Functions import jax inside, since jax finds these devices only once `environment()` is set.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
from typing import Any

from pallas_kernels.paged_attention import capabilities


@dataclasses.dataclass(frozen=True)
class GpuChip:
  """A GPU's data sheet and CUDA occupancy figures. XLA chooses tiles and fusions by them.

  Attributes:
    kind: JAX's name of the device; Pallas knows the compute capability of a device that is absent by it alone.
    capability: compute capability.
    sms: streaming multiprocessors.
    clock_ghz: boost clock.
    memory_gib, bandwidth_gb: memory, and its GB/s.
    l2_mib: second-level cache.
    shared_kib: of an SM; a thread block has 1 KiB less.
    threads: resident threads an SM.
    f32_units: units of f32 an SM.
    bf16_rate: operations a clock of each of an SM's four matrix units; an H200 has 1024.
  """

  kind: str
  capability: tuple[int, int]
  sms: int
  clock_ghz: float
  memory_gib: int
  bandwidth_gb: int
  l2_mib: int
  shared_kib: int
  threads: int
  f32_units: int
  bf16_rate: int


_CHIPS = {
  "sm_80": GpuChip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 80, 2039, 40, 164, 2048, 64, 512),
  "sm_86": GpuChip("NVIDIA A10", (8, 6), 72, 1.70, 24, 600, 6, 100, 1536, 128, 256),
  "sm_89": GpuChip("NVIDIA L4", (8, 9), 58, 2.04, 24, 300, 48, 100, 1536, 128, 256),
  "h200": GpuChip("NVIDIA H200", (9, 0), 132, 1.98, 141, 4800, 50, 228, 2048, 128, 1024),
  "sm_100a": GpuChip("NVIDIA B200", (10, 0), 148, 1.97, 180, 8000, 126, 228, 2048, 128, 2048),
  "sm_120": GpuChip("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 2.62, 96, 1792, 128, 100, 1536, 128, 256),
}
# XLA's cost model needs throughputs: per SM and clock, units times operations. Types are numbered as in xla_data.proto.
# Here are units a unit of f32, and matrix operations of an H200.
_SCALAR_UNITS = {4: (0.5, 1), 8: (0.5, 1), 10: (1, 2), 11: (1, 1), 12: (0.5, 1), 16: (1, 2)}
_MATRIX_OPS = {2: 1024, 6: 1024, 10: 512, 11: 256, 12: 32, 16: 512, 19: 1024, 20: 1024}
_CONFIG = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{kind}"  device_vendor: "NVIDIA Corporation"  model_str: "sm_{major}{minor}{suffix}, {sms} SMs"
  platform_version: "Compute Capability {major}.{minor}{suffix}"
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"  dnn_version: "9.10.0"
  device_address_bits: 64  ecc_enabled: true
  core_count: {sms}  fpus_per_core: {units}  clock_rate_ghz: {clock}
  device_memory_size: {memory}  memory_bandwidth: {bandwidth}  l2_cache_size: {l2}
  pcie_bandwidth: 64000000000
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: {threads}
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: {shared}  shared_memory_per_block: 49152  shared_memory_per_block_optin: {optin}
  scalar_unit_description {{ {scalar} }}
  matrix_unit_description {{ {matrix} }}
}}
"""


def gpu_config(chip: GpuChip) -> str:
  """Returns XLA's target configuration, as text proto."""

  def rates(units: dict[int, tuple[int, int]]) -> str:
    return " ".join(
      f"rate_infos {{ key: {kind} value {{ clock_rate_ghz: {chip.clock_ghz} units_per_core: {count} "
      f"ops_per_clock: {ops} }} }}"
      for kind, (count, ops) in units.items()
    )

  major, minor = chip.capability
  is_accelerated = major >= 9  # instructions of this architecture alone, such as wgmma of 9.0
  return _CONFIG.format(
    kind=chip.kind,
    major=major,
    minor=minor,
    suffix="a" if is_accelerated else "",
    feature="feature_extension: ACCELERATED_FEATURES" if is_accelerated else "",
    sms=chip.sms,
    units=chip.f32_units,
    clock=chip.clock_ghz,
    memory=chip.memory_gib * 2**30,
    bandwidth=chip.bandwidth_gb * 10**9,
    l2=chip.l2_mib * 2**20,
    threads=chip.threads,
    shared=chip.shared_kib * 2**10,
    optin=(chip.shared_kib - 1) * 2**10,
    scalar=rates({kind: (round(share * chip.f32_units), ops) for kind, (share, ops) in _SCALAR_UNITS.items()}),
    matrix=rates({kind: (4, ops * chip.bf16_rate // 1024) for kind, ops in _MATRIX_OPS.items()}),
  )


@dataclasses.dataclass(frozen=True)
class Target:
  """A machine to compile for.

  Attributes:
    name: its name on the command line.
    platform: "cuda" or "tpu".
    topology: JAX's name of it.
    chips: devices that the model is spread over.
    chip: of a GPU, a name of _CHIPS.
  """

  name: str
  platform: str
  topology: str
  chips: int = 1
  chip: str = ""

  @property
  def attention(self) -> str:
    """The name of this platform's paged attention."""
    capability = "{}.{}".format(*_CHIPS[self.chip].capability) if self.chip else ""
    return capabilities.candidates(self.platform, capability)[0]


TARGETS = {
  target.name: target
  for target in (
    Target("h200", "cuda", "1x1x1", chip="h200"),
    Target("h200-8", "cuda", "1x1x8", chips=8, chip="h200"),
    *(Target(name, "cuda", "1x1x1", chip=name) for name in ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120")),
    Target("v4", "tpu", "v4:2x2x1"),
    Target("v5p", "tpu", "v5p:2x2x1"),
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
    config = gpu_config(_CHIPS[target.chip])
    topology = topologies.get_topology_desc(platform="cuda", topology=target.topology, target_config=config)
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

  is_gpu = target.platform == "cuda"
  kind = AbstractDevice(
    device_kind=device.device_kind, num_cores=None if is_gpu else 1, platform="gpu" if is_gpu else "tpu"
  )
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
    yield
