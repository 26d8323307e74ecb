"""Says what determines the executables of a runner's programs. Compiles nothing and reads no weights."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
from typing import Any

import jax
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

from engine.device.programs import ProgramSpec, step_options
from engine.shapes import StepShape
from pallas_kernels import native

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_SOURCES = ("engine", "models", "pallas_kernels")
# Tracing depends on these, and users may set them by environment variables.
_SETTINGS = (
  "jax_default_matmul_precision",
  "jax_enable_x64",
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
  "jax_debug_nans",
  "jax_debug_infs",
  "jax_disable_most_optimizations",
)
_NO_EFFECT = ("--xla_dump", "--xla_force_host_platform_device_count")  # XLA's flags; the second is in `topology`


def made_for(spec: ProgramSpec, rungs: tuple[StepShape, ...]) -> dict[str, Any]:
  """Returns all that determines the executables, as JSON values. Weights are arguments, so they do not count."""
  devices = list(spec.mesh.devices.flat)
  client = devices[0].client
  shapes = [(leaf.shape, str(leaf.dtype), str(leaf.sharding.spec)) for leaf in spec.params]
  kinds = collections.Counter(f"{buffer.dtype}{list(buffer.shape)}" for buffer in spec.kv)
  found: dict[str, Any] = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "flax")}
  found |= {
    "platform": client.platform,
    "platform version": client.platform_version,
    "device": spec.device_kind or devices[0].device_kind,
    "device ids": [device.id for device in devices],
    "mesh": [list(map(str, spec.mesh.axis_names)), list(spec.mesh.devices.shape)],
    "topology": _topology(devices),
    "XLA flags": _xla_flags(),
    "JAX settings": {name: str(jax.config.values[name]) for name in _SETTINGS},
    "Sluice's programs": _sources(),
    "kernel libraries": {name: _library(name) for name in native.ENTRIES} if client.platform == "cpu" else {},
    "model": _digest(repr(spec.model)),
    "parameters": _digest(repr(shapes)),
    "dtype": spec.dtype.name,
    "feature_layers": list(spec.feature_layers),
    "KV": ", ".join(f"{count} of {kind}" for kind, count in kinds.items()),
    "ladder": [dataclasses.astuple(shape) for shape in rungs],
    "compiler options": step_options(spec),
  }
  if client.platform == "cpu":
    found["processors"] = len(os.sched_getaffinity(0))  # XLA splits loops by the number of cores
  plain = {key: value for key, value in vars(spec).items() if isinstance(value, str | int | float | bool)}
  return json.loads(json.dumps(found | plain))


def register_kernels() -> None:
  """Registers the C++ kernels with the backend. Tracing registers them otherwise, but nothing is traced here."""
  for name in native.ENTRIES:
    with contextlib.suppress(native.NativeMissing):
      native.register_library(name)


def _library(name: str) -> str:
  """Returns the kernels' library; its file name holds a digest of its sources, flags and jaxlib."""
  file = native.path(name)
  return file.name if file.exists() else "not built"


def _topology(devices: list[Any]) -> str:
  """Returns the topology as JAX's compile cache reads it; on a CPU, with the instruction set."""
  try:
    return f"{xla_client.get_topology_for_devices(devices).fingerprint():016x}"
  except jax.errors.JaxRuntimeError:
    return ""


def _xla_flags() -> list[str]:
  flags = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
  return sorted(flag for flag in flags if not flag.startswith(_NO_EFFECT))


@functools.cache
def _sources() -> str:
  digest = hashlib.sha256()
  for package in _SOURCES:
    for file in sorted((_ROOT / package).rglob("*.py")):
      digest.update(file.relative_to(_ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
  return digest.hexdigest()


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()
