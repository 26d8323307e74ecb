"""Compiles Pallas kernels for XLA's Triton, and a GPU that is not here, into calls that the emulator runs.

Needs the packages of requirements-device.lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import pathlib
import tempfile
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
import numpy as np

from tools.check_device import targets
from tools.ptx_emulator.compiled import ArrayCall, CompiledKernel
from tools.ptx_emulator.executable import KernelCall, MemoryCopy, read_executable
from tools.ptx_emulator.reader import PtxError, read_kernels


def compile_kernels(program: Callable, arguments: tuple, target: str) -> Mapping[str, ArrayCall]:
  """Compiles the kernels of a program, by their names; runs none.

  Args:
    program: calls each kernel once, outside of any inner jit.
    target: a name of check_device's TARGETS.

  Raises:
    PtxError: XLA launches a kernel of its own; copies of arguments that are not donated are left out.
    ImportError, RuntimeError: the compilers for GPUs are not installed.
  """
  where = targets.TARGETS[target]
  (device,) = targets.devices(where)
  sharding = SingleDeviceSharding(device)
  shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in arguments]
  with targets.tracing_for(where, device), tempfile.TemporaryDirectory(prefix="sluice-triton-") as folder:
    traced = jax.jit(program).trace(*shapes)
    compiled = traced.lower().compile({"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"})
    texts = {}
    for path in pathlib.Path(folder).glob("*.ptx"):
      text = path.read_text("utf-8")
      texts |= {kernel.name: text for kernel in read_kernels(text)}
  calls = {each.params["name"]: each for each in traced.jaxpr.eqns if each.primitive.name == "pallas_call"}
  runtime: Any = compiled.runtime_executable()
  found = {}
  for launch in read_executable(runtime.serialize()).sequence:
    if isinstance(launch, MemoryCopy):
      continue
    if not isinstance(launch, KernelCall) or launch.kernel not in calls:
      raise PtxError(f"{launch.name} launches no kernel of the program")
    call = calls[launch.kernel]
    made = tuple((tuple(var.aval.shape), np.dtype(var.aval.dtype).name) for var in call.outvars)
    pointers = tuple(range(len(call.invars) + len(made)))
    kernel = CompiledKernel(
      texts[launch.kernel], launch.grid, launch.shared_bytes, pointers, (), allows_equal_writes=True
    )
    found[launch.kernel] = ArrayCall(kernel, made, tuple(call.params["input_output_aliases"]))
  return found
