"""Runs a PTX kernel on numpy arrays: every block, with an adversarial schedule from a seed.

Blocks run one after another in any order, those of XLA's programs side by side where they may (`lockstep`). They may
not read each other's writes, unless an atomic addition with release and one with acquire order them. No kernel has a
block that waits for another one, so they need not be on the device together. Not modelled, and why:

  tcgen05 of other shapes and kinds      `tensor_core` has what Triton's kernels use: 16-bit products of one block, and
                                         loads and stores of .16x32bx2; another form stops with the line
  tcgen05.fence                          Triton writes none; a wait and a block's barrier order tensor memory here
  clusters, several SMs' shared memory   no kernel uses them
  caches                                 they change no number
  weak order of warps in global memory   a block's warps exchange nothing through it but behind barriers
  blocks that write different numbers    padding tokens may share a slot; only the numbers of several schedules differ
    to the same byte
  .read of a bulk wait                   a copy writes global memory in the moment when it reads shared memory
  lanes that commit or wait for their    a warp's lanes do both together; one that never comes is a deadlock
    cp.async copies apart
  registers and their limits             ptxas allocates them, and `make check-device` reads its report
  rounding of approximate functions      ex2 and lg2 have numpy's, whose error is the smaller one
  the one rounding of an fma of f64      numpy has no exact product of f64, so it is rounded, too
  the bits of a NaN                      this CPU makes several, of which a GPU has one; two lanes may write any of them
                                         to one word, as those of a row do that a tile has and no token uses
  time                                   it is what a device is for
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import math

import numpy as np

from tools.ptx_emulator import asynchronous, fusions, lockstep, operations, tensor_core
from tools.ptx_emulator.block import LANES, Block, KernelLaunch, Program
from tools.ptx_emulator.memory import GlobalMemory
from tools.ptx_emulator.reader import Kernel, PtxError
from tools.ptx_emulator.tensor_map import MAP_BYTES, TensorMap

_LAZY = 4  # in one of so many schedules, copies and products end as late as they can
# The first that knows an opcode.
_TABLES = (fusions.TRANSLATORS, operations.TRANSLATORS, asynchronous.TRANSLATORS, tensor_core.TRANSLATORS)


def run_kernel(
  kernel: Kernel,
  memory: GlobalMemory,
  arguments: Sequence[int | Sequence[TensorMap]],
  grid: tuple[int, int, int],
  shared_bytes: int,
  seed: int = 0,
  is_of_xla: bool = False,
  allows_equal_writes: bool = False,
) -> None:
  """Runs all blocks of a kernel.

  Args:
    memory: holds the buffers.
    arguments: an address, or tensor maps, for each parameter of the kernel.
    shared_bytes: dynamic shared memory of a block.
    seed: of the schedule.
    is_of_xla: the kernel is XLA's own. It allows equal writes, and its blocks run side by side where they may.
    allows_equal_writes: warps may write what a byte of shared memory already holds, without any order. Triton's do,
      where several have the same part of a small tile.

  Raises:
    PtxError: the kernel has an instruction that is not known, or other arguments.
    KernelFault: the kernel does something undefined, or never ends.
  """
  if len(arguments) != len(kernel.parameters):
    raise PtxError(f"kernel {kernel.name} has {len(kernel.parameters)} parameters, not {len(arguments)}")
  values, addresses, maps = {}, {}, {}
  for number, (parameter, argument) in enumerate(zip(kernel.parameters, arguments, strict=True)):
    address = addresses[parameter.name] = operations.PARAMETERS + number * operations.PARAMETER_BYTES
    if isinstance(argument, int):
      values[parameter.name] = argument
      continue
    if parameter.size != MAP_BYTES * len(argument):
      raise PtxError(f"parameter {parameter.name} has {parameter.size} bytes, not {len(argument)} tensor maps")
    maps |= {address + MAP_BYTES * index: tensor for index, tensor in enumerate(argument)}
  equal_writes, is_lazy = is_of_xla or allows_equal_writes, seed % _LAZY == 0
  launch = KernelLaunch(memory, grid, kernel.shared_bytes + shared_bytes, maps, equal_writes, is_lazy)
  rng = np.random.default_rng(seed)
  with np.errstate(all="ignore"):
    if lockstep.is_independent(kernel):
      for part in lockstep.split_grid(kernel, grid, rng):
        context = operations.Context(kernel, values, addresses, part.num_lanes)
        lockstep.Lockstep(launch, kernel.threads, part, translate_kernel(kernel, context), rng).run()
      return

    @functools.cache
    def translate(lanes: int) -> Program:
      return translate_kernel(kernel, operations.Context(kernel, values, addresses, lanes))

    if is_of_xla and lockstep.is_regular(kernel):
      for part in lockstep.split_grid(kernel, grid, rng, launch.shared_bytes):
        lockstep.BlockRow(launch, kernel.threads, part, translate, rng).run()
      return
    program = translate(LANES)
    for serial in rng.permutation(math.prod(grid)).tolist():
      index = serial % grid[0], serial // grid[0] % grid[1], serial // (grid[0] * grid[1])
      Block(launch, index, kernel.threads, rng, program).run()


def translate_kernel(kernel: Kernel, context: operations.Context) -> Program:
  """Returns a function for each instruction. Raises PtxError for one that is not known."""
  program: Program = []
  for instruction in kernel.instructions:
    opcode = instruction.name[0]
    try:
      if opcode in operations.CONTROL:
        execute = operations.CONTROL[opcode](context, instruction)
      else:
        translate = next((table[opcode] for table in _TABLES if opcode in table), None)
        if translate is None:
          raise PtxError(f"line {instruction.line}: the emulator does not know {opcode}: {instruction.text[:200]}")
        body = translate(context, instruction)
        execute = operations.wrap(context, instruction, body, opcode in asynchronous.KEEPS)
    except PtxError:
      raise
    except (KeyError, ValueError, IndexError) as error:
      raise PtxError(
        f"line {instruction.line}: the emulator does not know these operands: {instruction.text[:200]}"
      ) from error
    program.append((instruction, execute))
  return program
