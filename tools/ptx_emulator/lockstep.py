"""Runs blocks that share nothing in lockstep, as lanes of one array. May not know instructions.

XLA's loop fusions and many of its reductions have no shared memory and no barrier of a block. No order of their warps
can then change what they do, and a numpy operation costs nearly the same for 32 lanes as for thousands.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math

import numpy as np

from tools.ptx_emulator.block import LANES, Block, Group, KernelFault, KernelLaunch, Program, Waiting, Warp
from tools.ptx_emulator.reader import Kernel

_MOST_LANES = 1 << 16
_MOST_STEPS = 1 << 20  # instructions of a kernel before it counts as one that never ends
# Opcodes that need the warps of one block, or that order their accesses to memory.
_TOGETHER = frozenset(
  "barrier cp ldmatrix stmatrix wgmma mma mbarrier fence prefetch setmaxnreg elect atom red".split()
)


@dataclasses.dataclass(frozen=True)
class GridPart:
  """Blocks that run together.

  Attributes:
    serials: their numbers in the grid, from 0: int[n].
    grid: of the launch.
    num_lanes: a block has whole warps.
  """

  serials: np.ndarray
  grid: tuple[int, int, int]
  num_lanes: int


def is_independent(kernel: Kernel) -> bool:
  """Returns whether neither the blocks nor the warps of a kernel share anything."""
  together = any(
    each.name[0] in _TOGETHER or each.name[:2] == ("bar", "sync") or "shared" in each.name
    for each in kernel.instructions
  )
  return not kernel.shared and not together


def split_grid(kernel: Kernel, grid: tuple[int, int, int], rng: np.random.Generator) -> Iterator[GridPart]:
  """Yields parts of a grid, in any order of the blocks."""
  lanes = -(-kernel.threads // LANES) * LANES
  serials = rng.permutation(math.prod(grid))
  for part in np.array_split(serials, max(1, -(-len(serials) * lanes // _MOST_LANES))):
    yield GridPart(part, grid, len(part) * lanes)


class _WideWarp(Warp):
  """The lanes of many warps."""

  def __init__(self, num_threads: int, part: GridPart):
    super().__init__(0, LANES, 1)
    self.threads = np.arange(part.num_lanes) % (part.num_lanes // len(part.serials))
    self.groups = [Group(0, self.threads < num_threads)]

  def is_whole(self, mask: np.ndarray) -> bool:
    """Returns whether a mask has all or none of the live lanes of each warp."""
    live = np.logical_or.reduce([group.mask for group in self.groups]).reshape(-1, LANES)
    own = mask.reshape(-1, LANES)
    return bool(((own == live).all(1) | ~own.any(1)).all())


class Lockstep(Block):
  """Blocks whose lanes execute together; those that are behind go first, so that branches join again."""

  def __init__(
    self, launch: KernelLaunch, num_threads: int, part: GridPart, program: Program, rng: np.random.Generator
  ):
    super().__init__(launch, (0, 0, 0), LANES, rng, program)
    x, y, _ = part.grid
    serials = np.repeat(part.serials, part.num_lanes // len(part.serials))
    self.index = serials % x, serials // x % y, serials // (x * y)
    self.num_threads = num_threads
    self._serials = serials + 1
    self.warps = [_WideWarp(num_threads, part)]

  def serials(self, mask: np.ndarray) -> np.ndarray:
    """Returns the serial of the block of each lane of a mask."""
    return self._serials[mask]

  def run(self) -> None:
    """Runs the blocks to their end. Raises KernelFault."""
    (warp,) = self.warps
    steps = 0
    while warp.groups:
      steps += 1
      if steps > _MOST_STEPS:
        raise KernelFault(f"the kernel has not ended after {_MOST_STEPS} instructions")
      group = min(warp.groups, key=lambda each: each.pc)
      instruction, execute = self.program[group.pc]
      try:
        execute(self, warp, group)
      except Waiting as waiting:
        raise KernelFault(f"line {instruction.line}: {instruction.text[:200]}: {waiting.reason}") from waiting
      except Exception as error:
        raise KernelFault(f"line {instruction.line}: {instruction.text[:200]}: {error}") from error
      if len(warp.groups) > 1:
        self.merge(warp)
