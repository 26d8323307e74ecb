"""Runs Pallas kernels for Mosaic GPU on a CPU: compiles each for a GPU that is not here, and emulates its PTX.

`emulate_kernels` gives the kernels' primitive a lowering for CPUs. So whole programs run, with XLA's part compiled for
the CPU. Needs the packages of requirements-device.lock. Reads private parts of JAX 0.11: the module that Mosaic GPU
lowers says which arrays and tensor maps a kernel gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import os
import pathlib
import tempfile
import threading
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.sharding import SingleDeviceSharding
import numpy as np

from tools.check_device import targets
from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.compiled import ArrayCall, CompiledKernel, MapSpec
from tools.ptx_emulator.reader import PtxError

_compiling = threading.Lock()  # what Mosaic GPU dumps goes to one place a process
_ARGUMENT = "mosaic_gpu.from_kernel_arg_idx"  # an attribute of the kernel's arrays
# Operations without an effect.
_PURE = ("memref.", "arith.", "builtin.", "llvm.getelementptr", "llvm.inttoptr", "index.")


@dataclasses.dataclass(frozen=True)
class LoweredKernel:
  """A kernel before its PTX exists; attributes as of CompiledKernel."""

  grid: tuple[int, int, int]
  shared_bytes: int
  pointers: tuple[int, ...]
  maps: tuple[MapSpec, ...]

  def with_ptx(self, text: str) -> CompiledKernel:
    """Returns the kernel with its PTX."""
    return CompiledKernel(text, self.grid, self.shared_bytes, self.pointers, self.maps)


class _Watch:
  """What Mosaic GPU lowers: tensor maps in the order of the kernel's parameter, and each kernel by its hash."""

  def __init__(self) -> None:
    self.maps: list[MapSpec] = []
    self.kernels: dict[bytes, LoweredKernel] = {}


@contextlib.contextmanager
def watch_lowering() -> Iterator[_Watch]:
  """Notes the kernels that Mosaic GPU lowers while open."""
  from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration
  from jax.experimental.mosaic.gpu import launch_context
  from jax.extend.mlir import ir

  found = _Watch()
  refs, packed = [], []
  inside: Any = launch_context
  describe, pack = inside.memref.extract_strided_metadata, inside.utils.pack_array
  call, emit = inside.func.call, registration._emit_mosaic_gpu_custom_call

  def watched_describe(ref: Any, *args: Any, **kwargs: Any) -> Any:
    refs.append(ref)
    return describe(ref, *args, **kwargs)

  def watched_pack(values: Any) -> Any:
    packed.append(list(values))
    return pack(values)

  def watched_call(results: Any, callee: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    if callee == "mosaic_gpu_init_tma_desc":
      kind = ir.MemRefType(refs[-1].type)
      strides, offset = kind.get_strides_and_offset()
      element: Any = kind.element_type
      swizzle = _constant(args[6])
      found.maps.append(
        MapSpec(
          _argument(refs[-1]),
          offset,
          tuple(kind.shape),
          tuple(strides),
          tuple(_constant(value) for value in packed[-1]),
          swizzle if swizzle > 16 else 0,
          element.width // 8,
        )
      )
    return call(results, callee, args, *more, **kwargs)

  def watched_emit(ctx: Any, args: Any, result: Any, *more: Any, **kwargs: Any) -> Any:
    shared, pointers = _launch_facts(result.module)
    kernel = LoweredKernel(tuple(result.grid), shared, pointers, tuple(found.maps))
    found.maps.clear()
    outs = emit(ctx, args, result, *more, **kwargs)
    found.kernels[_kernel_hash(outs[0])] = kernel
    return outs

  with (
    mock.patch.object(inside.memref, "extract_strided_metadata", watched_describe),
    mock.patch.object(inside.utils, "pack_array", watched_pack),
    mock.patch.object(inside.func, "call", watched_call),
    mock.patch.object(registration, "_emit_mosaic_gpu_custom_call", watched_emit),
  ):
    yield found


def _kernel_hash(value: Any) -> bytes:
  """Returns the hash of the kernel whose call has a result."""
  from jax.extend.mlir import ir

  configuration = ir.DictAttr(value.owner.attributes["mhlo.backend_config"])
  return ir.StringAttr(configuration["kernel_hash"]).value_bytes


def _constant(value: Any) -> int:
  from jax.extend.mlir import ir

  return ir.IntegerAttr(value.owner.attributes["value"]).value


def _argument(value: Any) -> int:
  """Returns the number of the kernel's argument that a reference is a view of."""
  from jax.extend.mlir import ir

  while _ARGUMENT not in value.owner.attributes:
    value = value.owner.operands[0]
  return ir.IntegerAttr(value.owner.attributes[_ARGUMENT]).value


def _walk(operation: Any) -> Iterator[Any]:
  """Yields an operation and all within it, in order."""
  yield operation
  for region in operation.regions:
    for block in region.blocks:
      for each in block.operations:
        yield from _walk(each.operation)


def _launch_facts(module: Any) -> tuple[int, tuple[int, ...]]:
  """Returns the bytes of dynamic shared memory, and the arrays that the kernel has pointers to, in order."""
  (launch,) = (each for each in _walk(module.operation) if each.name == "gpu.launch")
  # Operands: a token, grid, threads, and the dynamic shared memory.
  shared = _constant(launch.operands[len(launch.operands) - 1])
  order: dict[int, None] = {}
  for operation in _walk(launch):
    used = [value for value in operation.operands if _ARGUMENT in getattr(value.owner, "attributes", ())]
    if used and operation != launch and _is_live(operation):
      order |= dict.fromkeys(map(_argument, used))
  return shared, tuple(order)


def _is_live(operation: Any) -> bool:
  """Whether the compilers keep an operation: it has an effect, or a live one needs its result."""
  name = operation.name
  if not name.startswith(_PURE) or name == "memref.store":
    return True
  return any(_is_live(use.owner) for result in operation.results for use in result.uses)


def compile_kernel(avals_in: Sequence[Any], params: Mapping[str, Any]) -> CompiledKernel:
  """Compiles one kernel for an H200.

  Args: avals_in, params: of its mpmd_map.

  Raises:
    PtxError: the PTX is not what the emulator reads.
    ImportError, RuntimeError: the compilers for GPUs are not installed.
  """
  from jax._src.pallas.mpmd import mpmd_map_p

  (device,) = targets.devices(targets.TARGETS["h200"])
  sharding = SingleDeviceSharding(device)
  shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval in avals_in]
  with collect_ptx() as dumped, watch_lowering() as seen:
    jax.jit(lambda *args: mpmd_map_p.bind(*args, **params)).lower(*shapes).compile()
  (kernel,), texts = seen.kernels.values(), dumped()
  if len(texts) != 1:
    raise PtxError(f"Mosaic GPU wrote {len(texts)} PTX files for a kernel, not one")
  return kernel.with_ptx(texts[0])


@contextlib.contextmanager
def collect_ptx() -> Iterator[Callable[[], list[str]]]:
  """Yields a function that gives the PTX of all kernels that Mosaic GPU compiled while open, in order."""
  texts: list[str] = []
  with _compiling, tempfile.TemporaryDirectory(prefix="sluice-ptx-") as folder:
    dumps = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder}
    with mock.patch.dict(os.environ, dumps):
      yield lambda: texts
    # Files have the name of the kernel's function and a number that counts all kernels of the process.
    paths = pathlib.Path(folder).glob("*.ptx")
    texts += [path.read_text("utf-8") for path in sorted(paths, key=lambda path: int(path.stem.rpartition("_")[2]))]


class Emulation(NamedTuple):
  """What has been emulated so far; both lists grow.

  Attributes:
    kernels: those that were compiled.
    faults: what they did wrong. JAX raises an error of its own that only quotes it.
  """

  kernels: list[ArrayCall]
  faults: list[Exception]


def emulate_kernels(seed: int = 0) -> Emulation:
  """Lowers kernels for Mosaic GPU to the emulator, in all programs for CPUs that this process lowers from now on.

  Args: seed: of the schedules; each call of a kernel has the next one.
  """
  from jax._src.interpreters import mlir
  from jax._src.pallas import mpmd

  compiled, faults = Emulation([], [])
  seeds = itertools.count(seed)

  def lower(ctx: Any, *args: Any, **params: Any) -> Any:
    made = tuple((tuple(aval.shape), np.dtype(aval.dtype).name) for aval in ctx.avals_out)
    aliases = tuple(sorted(dict(params["input_output_aliases"]).items()))
    call = ArrayCall(compile_kernel(ctx.avals_in, params), made, aliases)
    compiled.append(call)
    outputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_out]

    def run(*inputs: Any) -> list[np.ndarray]:
      try:
        return call.run(inputs, next(seeds))
      except (KernelFault, PtxError) as error:
        faults.append(error)
        raise

    emit = mlir.lower_fun(lambda *values: jax.pure_callback(run, outputs, *values), multiple_results=True)
    return emit(ctx, *args)

  mlir.register_lowering(mpmd.mpmd_map_p, lower, platform="cpu")
  return Emulation(compiled, faults)


def compile_kernels(program: Callable, arguments: tuple) -> list[ArrayCall]:
  """Compiles the kernels of a program, in the order in which it calls them; runs none. Raises as `compile_kernel`."""
  found = emulate_kernels().kernels
  jax.jit(program).lower(*arguments)
  return found
