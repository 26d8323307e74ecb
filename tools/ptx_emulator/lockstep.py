"""Runs the blocks of a kernel in lockstep, as lanes of one array. May not know instructions.

A numpy operation costs nearly the same for 32 lanes as for thousands. XLA's loop fusions and many of its reductions
have no shared memory and no barrier of a block. No order of their warps can change what they do, so all threads of a
grid are one array (`Lockstep`). Triton's matmuls share memory within a block. There a warp is an array of the warps of
one number in all blocks, and warps take turns in an adversarial order, the same one in each block (`BlockRow`). Where
nothing can go on because blocks are at different instructions, those that agree go on as a row of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import copy
import dataclasses
import math

import numpy as np

from tools.ptx_emulator.block import LANES, Block, Group, KernelFault, KernelLaunch, Program, Waiting, Warp
from tools.ptx_emulator.clocks import Shadow
from tools.ptx_emulator.memory import SharedMemory
from tools.ptx_emulator.reader import Kernel

_MOST_LANES = 1 << 16
_MOST_SHARED = 1 << 22  # bytes of shared memory of the blocks of a row; what is known of each byte takes fifty more
_MOST_STEPS = 1 << 20  # instructions of a kernel before it counts as one that never ends
# Opcodes for the warps of one block at a time: asynchronous operations but for cp.async, and those of one thread.
_ONE_BLOCK = frozenset("barrier cp wgmma tcgen05 mbarrier fence prefetch setmaxnreg elect".split())
# Opcodes that need the warps of a block.
_TOGETHER = _ONE_BLOCK | {"ldmatrix", "stmatrix", "mma", "atom", "red"}


@dataclasses.dataclass(frozen=True)
class GridPart:
  """Blocks that run together.

  Attributes:
    serials: their numbers in the grid, from 0: int[n].
    grid: of the launch.
    num_lanes: of all of them; a block has whole warps.
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


def is_regular(kernel: Kernel) -> bool:
  """Returns whether blocks of a kernel can run side by side: none waits for another, or for a copy of one thread."""
  return not any(
    (each.name[0] in _ONE_BLOCK and (each.name[:2] != ("cp", "async") or "bulk" in each.name)) or "acq_rel" in each.name
    for each in kernel.instructions
  )


def split_grid(
  kernel: Kernel, grid: tuple[int, int, int], rng: np.random.Generator, shared_bytes: int = 0
) -> Iterator[GridPart]:
  """Yields parts of a grid, in any order of the blocks. Args: shared_bytes: of a block."""
  lanes = -(-kernel.threads // LANES) * LANES
  serials = rng.permutation(math.prod(grid))
  most = max(1, min(_MOST_LANES // lanes, _MOST_SHARED // max(shared_bytes, 1)))
  for part in np.array_split(serials, max(1, -(-len(serials) // most))):
    yield GridPart(part, grid, len(part) * lanes)


class _WideWarp(Warp):
  """The lanes of many warps."""

  def __init__(self, num_threads: int, part: GridPart):
    super().__init__(0, LANES, 1)
    self.threads = np.arange(part.num_lanes) % (part.num_lanes // len(part.serials))
    self.full = np.ones(part.num_lanes, np.bool_)
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


class BlockRow(Block):
  """Blocks side by side, each with its own shared memory; a warp holds the lanes of the same warp of all blocks."""

  def __init__(
    self,
    launch: KernelLaunch,
    num_threads: int,
    part: GridPart,
    translate: Callable[[int], Program],
    rng: np.random.Generator,
  ):
    """Args: translate: returns the program for warps of so many lanes."""
    super().__init__(launch, (0, 0, 0), num_threads, rng, translate(len(part.serials) * LANES))
    self._translate = translate
    self._num_blocks = len(part.serials)
    self._block = np.repeat(np.arange(self._num_blocks), LANES)  # of each lane
    serials = part.serials[self._block]
    x, y, _ = part.grid
    self.index = serials % x, serials // x % y, serials // (x * y)
    self._serials = serials + 1
    self.shared = SharedMemory(launch.shared_bytes, rng, self._num_blocks)
    self.shadow = Shadow(launch.shared_bytes * self._num_blocks, len(self.warps))
    for warp in self.warps:
      warp.threads = np.tile(warp.threads, self._num_blocks)
      warp.full = np.ones(len(warp.threads), np.bool_)
      warp.groups = [Group(0, warp.threads < num_threads)]

  @property
  def label(self) -> str:
    """The name of the blocks, for errors."""
    return f"{self._num_blocks} blocks" if self._num_blocks > 1 else f"block {int(self._serials[0]) - 1}"

  def serials(self, mask: np.ndarray) -> np.ndarray:
    """Returns the serial of the block of each lane of a mask."""
    return self._serials[mask]

  def count_threads(self, mask: np.ndarray) -> int:
    """Returns the threads of a block in a mask. Waits if blocks that have not ended differ in it."""
    live = np.logical_or.reduce([group.mask for warp in self.warps for group in warp.groups])
    counts = np.unique(np.count_nonzero(mask.reshape(-1, LANES), 1)[live.reshape(-1, LANES).any(1)])
    if len(counts) > 1:
      raise Waiting(f"{counts.tolist()} threads of blocks have come")
    return int(counts[0])

  def locate_shared(self, addresses: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    """See Block."""
    return self.shared.offsets(addresses, size) + (self._block[mask] * self.launch.shared_bytes)[:, None]

  def handle_deadlock(self, live: list[Warp]) -> None:
    """Runs blocks that are at the same instructions to their end, as rows of their own. Raises KernelFault."""
    places = np.full((len(self.warps), self._num_blocks * LANES), -1)
    for warp in self.warps:
      for group in warp.groups:
        places[warp.number, group.mask] = group.pc
    by_block = places.reshape(len(self.warps), self._num_blocks, LANES).swapaxes(0, 1).reshape(self._num_blocks, -1)
    kinds, kind = np.unique(by_block, axis=0, return_inverse=True)
    if len(kinds) == 1:
      super().handle_deadlock(live)
    for number in self.rng.permutation(len(kinds)).tolist():
      self._take(np.flatnonzero(kind.reshape(-1) == number)).run()
    for warp in self.warps:
      warp.groups = []

  def _take(self, blocks: np.ndarray) -> BlockRow:
    """Returns the row of some of the blocks, as they are now; no copy is under way. Args: blocks: int[n], from 0."""
    row, size = copy.copy(self), self.launch.shared_bytes
    lanes = (blocks[:, None] * LANES + np.arange(LANES)).reshape(-1)
    row.program = self._translate(len(lanes))
    row._num_blocks, row._block = len(blocks), np.repeat(np.arange(len(blocks)), LANES)
    x, y, z = self.index
    row.index, row._serials = (x[lanes], y[lanes], z[lanes]), self._serials[lanes]
    row.shared = self.shared.take(blocks)
    row.shadow = self.shadow.take((blocks[:, None] * size + np.arange(size)).reshape(-1))
    row.warps = [warp.take(lanes) for warp in self.warps]
    row._operations = []
    row.named = {number: barrier.copy() for number, barrier in self.named.items()}
    return row
