"""Runs a whole compiled XLA:GPU program on a CPU: buffers, copies, branches, and each kernel's PTX.

`compile_module` compiles a program for a GPU that is not here. Its executable says which kernel runs on which bytes;
the compilers' dumps hold the PTX. Launches run one after another, in XLA's order; what overlaps on a GPU does not here.
A kernel that leaves the bytes of its own arguments is an error, also where the memory behind them is the program's.
Only loads of XLA's kernels may go on to the next multiple of 256 bytes, where they find NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np

from engine.device.programs import Program
from tools.ptx_emulator import mosaic
from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.compiled import CompiledKernel
from tools.ptx_emulator.emulator import run_kernel
from tools.ptx_emulator.executable import (
  MOSAIC,
  MOSAIC_ALIGNMENT,
  Branches,
  BufferSlice,
  CustomCall,
  KernelCall,
  Launch,
  MemoryCopy,
  MemoryFill,
  ModuleExecutable,
  SlicedCall,
  UnreadCall,
  find_misaligned,
  read_executable,
  walk_launches,
)
from tools.ptx_emulator.memory import GlobalMemory
from tools.ptx_emulator.reader import Kernel, PtxError, read_kernels
from tools.ptx_emulator.records import RecordError

# XLA's own kernels in place of cuBLASLt's, whose code is not in the executable.
_OWN_KERNELS: dict[str, bool | int | str] = {"xla_gpu_enable_triton_gemm": True, "xla_gpu_cublas_fallback": False}
# Mosaic GPU compiles a kernel once a process, so only the first program that has it gets its PTX.
_known: dict[bytes, CompiledKernel] = {}


@dataclasses.dataclass(frozen=True)
class CompiledModule:
  """A program that is ready to run.

  Attributes:
    executable: its launches.
    kernels: XLA's kernels by name.
    mosaic: Mosaic GPU's by the hash in their calls.
    donated: numbers of the arguments that results replace.
  """

  executable: ModuleExecutable
  kernels: Mapping[str, Kernel]
  mosaic: Mapping[bytes, CompiledKernel]
  donated: frozenset[int]


def compile_module(program: Program) -> CompiledModule:
  """Compiles a program whose mesh is of a compile-only GPU.

  Raises:
    RecordError, PtxError: the executable has something that the emulator does not know.
    KernelFault: Mosaic GPU would refuse to launch a kernel, as an array of it has too small an alignment.
  """
  with tempfile.TemporaryDirectory(prefix="sluice-module-") as folder:
    options = (program.compiler_options or {}) | _OWN_KERNELS | {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
    with mosaic.collect_ptx() as dumped, mosaic.watch_lowering() as seen:
      compiled = dataclasses.replace(program, compiler_options=options).compile()
    runtime: Any = compiled.runtime_executable()
    executable = read_executable(runtime.serialize())
    if wrong := find_misaligned(executable):
      raise KernelFault(f"{wrong[0]}; Mosaic GPU wants a multiple of {MOSAIC_ALIGNMENT}")
    kernels = {}
    for path in pathlib.Path(folder).glob("*.ptx"):
      kernels |= {kernel.name: kernel for kernel in read_kernels(path.read_text("utf-8"))}
  calls = [launch for launch, _ in walk_launches(executable.sequence) if isinstance(launch, CustomCall)]
  keys = list(dict.fromkeys(call.key for call in calls if call.target == MOSAIC))
  fresh, texts = [key for key in keys if key not in _known], dumped()
  if len(fresh) != len(texts):
    raise PtxError(f"the program has {len(fresh)} new kernels of Mosaic GPU, which wrote {len(texts)} PTX files")
  for key, text in zip(fresh, texts, strict=True):
    _known[key] = seen.kernels[key].with_ptx(text)
  leaves = itertools.count()
  numbers = [[next(leaves) for _ in jax.tree.leaves(argument)] for argument in program.arguments]
  donated = frozenset(number for index in program.donated for number in numbers[index])
  return CompiledModule(executable, kernels, {key: _known[key] for key in keys}, donated)


class ModuleRunner:
  """Runs a program on numpy arrays.

  Attributes:
    times: seconds and runs of each kernel so far, by name.
  """

  def __init__(self, module: CompiledModule, seed: int = 0):
    """Prepares the program. Raises RecordError if it has a launch that the emulator does not know.

    Args: seed: of the kernels' schedules; each launch has the next one.
    """
    for launch, _ in walk_launches(module.executable.sequence):
      if isinstance(launch, UnreadCall):
        raise RecordError(
          f"{launch.name}: the emulator does not know the thunk {launch.kind}; no kernel of XLA's own replaces it"
        )
    self._module, self._seeds = module, itertools.count(seed)
    self.times: dict[str, tuple[float, int]] = {}

  def run(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the results as bytes, uint8[n] each. Arguments keep their values.

    Args: arguments: all leaves of the program's arguments.

    Raises:
      KernelFault: a kernel does something undefined; names the launch.
      PtxError: an instruction that the emulator does not know.
    """
    executable = self._module.executable
    memory: dict[int, np.ndarray] = {}
    for number, index in executable.parameters.items():
      # A view of what the program may not write: numpy refuses a write to it.
      data = np.ascontiguousarray(arguments[number]).reshape(-1).view(np.uint8)
      memory[index] = data.copy() if number in self._module.donated else data.view()
      memory[index].flags.writeable = number in self._module.donated
      if memory[index].size != executable.sizes[index]:
        raise ValueError(f"argument {number} has {data.size} bytes, not {executable.sizes[index]}")
    for index, data in executable.constants.items():
      memory[index] = np.frombuffer(data, np.uint8)
    for index, size in enumerate(executable.sizes):
      memory.setdefault(index, np.full(size, 0xFF, np.uint8))  # NaN as bf16, f32 and in 8 bits
    with np.errstate(all="ignore"):
      self._run_sequence(executable.sequence, memory)
    return [memory[index] for index in executable.results]

  def _run_sequence(self, sequence: Sequence[Launch], memory: Mapping[int, np.ndarray]) -> None:
    for launch in sequence:
      try:
        self._run_launch(launch, memory)
      except KernelFault as fault:
        if fault.args[0].startswith("launch "):
          raise
        raise KernelFault(f"launch {launch.name}: {fault}") from fault

  def _run_launch(self, launch: Launch, memory: Mapping[int, np.ndarray]) -> None:
    match launch:
      case MemoryCopy():
        view(memory, launch.target)[:] = view(memory, launch.source)
      case MemoryFill():
        view(memory, launch.target).view(np.uint32 if launch.value else np.uint8)[:] = launch.value
      case Branches():
        self._run_sequence(choose_branch(launch, view(memory, launch.index)), memory)
      case SlicedCall():
        self._run_sequence(launch.sequence, {index: view(memory, each) for index, each in enumerate(launch.buffers)})
      case KernelCall():
        for number in launch.zeroed:
          view(memory, launch.arguments[number])[:] = 0
        self._run_kernel(launch, memory)
      case CustomCall():
        kernel = self._module.mosaic.get(launch.key)
        if kernel is None:
          raise KernelFault(f"the emulator does not know the library call {launch.target}")
        places, addresses = place_slices(memory, (*launch.operands, *launch.results))
        started = time.perf_counter()
        kernel.launch(places, addresses, next(self._seeds))
        self._note(kernel.kernel.name, started)

  def _run_kernel(self, launch: KernelCall, memory: Mapping[int, np.ndarray]) -> None:
    kernel = self._module.kernels.get(launch.kernel)
    if kernel is None:
      raise PtxError(f"the compiler wrote no PTX for {launch.kernel}")
    if launch.threads != (kernel.threads, 1, 1):
      raise PtxError(f"{launch.kernel} is launched with {launch.threads} threads; its PTX has {kernel.threads}")
    places, addresses = place_slices(memory, launch.arguments, pads=True)
    started = time.perf_counter()
    run_kernel(kernel, places, addresses, launch.grid, launch.shared_bytes, next(self._seeds), is_of_xla=True)
    self._note(launch.kernel, started)

  def _note(self, name: str, started: float) -> None:
    seconds, count = self.times.get(name, (0.0, 0))
    self.times[name] = seconds + time.perf_counter() - started, count + 1


def view(memory: Mapping[int, np.ndarray], where: BufferSlice) -> np.ndarray:
  """Returns the bytes of a slice."""
  return memory[where.allocation][where.offset : where.offset + where.size]


def choose_branch(launch: Branches, index: np.ndarray) -> tuple[Launch, ...]:
  """Returns the branch that runs. Args: index: the bytes of the launch's index."""
  if index.size == 1:
    return launch.sequences[0 if index[0] else 1]
  number = int(index.view(np.int32)[0])
  last = len(launch.sequences) - 1
  return launch.sequences[number if 0 <= number <= last else last]


def place_slices(
  memory: Mapping[int, np.ndarray], slices: Sequence[BufferSlice], pads: bool = False
) -> tuple[GlobalMemory, list[int]]:
  """Returns the memory of one launch and the address of each slice in it.

  Slices that overlap are one buffer; all others are far apart, so that an address behind one is in no other.

  Args: pads: as of GlobalMemory.add_buffer.
  """
  found = GlobalMemory()
  addresses = [0] * len(slices)
  order = sorted(range(len(slices)), key=lambda number: (slices[number].allocation, slices[number].offset))
  group: list[int] = []
  end = -1

  def place() -> None:
    if group:
      first = slices[group[0]]
      names = ", ".join(f"argument {number}" for number in sorted(group))
      data = memory[first.allocation][first.offset : end]
      buffer = found.add_buffer(names, data, first.offset, pads)
      for number in group:
        addresses[number] = buffer.address + slices[number].offset - first.offset

  for number in order:
    each = slices[number]
    if not group or each.allocation != slices[group[0]].allocation or each.offset >= end:
      place()
      group, end = [], -1
    group.append(number)
    end = max(end, each.offset + each.size)
  place()
  return found, addresses
