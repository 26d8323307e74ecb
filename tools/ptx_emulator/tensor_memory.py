"""Tensor memory of a block (sm_100a): its columns, where matrices lie in it, and which accesses are ordered.

From the PTX ISA: "Tensor Memory", "Data Path Layout Organization" and "Data Movement Shape" of tcgen05. A cell has 32
bits. Its address has the lane above bit 16 and the column below. May not know instructions.
"""

from __future__ import annotations

import numpy as np

from tools.ptx_emulator.clocks import Agent, Shadow
from tools.ptx_emulator.memory import AccessError

ROWS = 128  # "lanes" in the ISA
COLUMNS = 512
_LEAST_COLUMNS = 32  # of an allocation, which is a power of two
_WARP_ROWS = 32  # that one warp of four reaches
_HALF = 16


class TensorMemory:
  """Tensor memory of one block.

  Attributes:
    cells: uint32[ROWS * COLUMNS], row by row; an allocation begins with any bits.
    shadow: of the cells.
    may_allocate: the block has not given up its right to allocate.
  """

  def __init__(self, num_warps: int, rng: np.random.Generator):
    self.cells = rng.integers(0, 1 << 32, ROWS * COLUMNS, np.uint32)
    self.shadow = Shadow(ROWS * COLUMNS, num_warps, "cell {} of tensor memory")
    self.may_allocate = True
    self._rng = rng
    self._columns: dict[int, int] = {}  # of allocations: the first column -> their number

  @property
  def is_free(self) -> bool:
    """Whether nothing is allocated."""
    return not self._columns

  def allocate(self, count: int) -> int | None:
    """Returns the first of `count` free columns, any that is a multiple of 32; None: so many are not free.

    Raises AccessError for another number of columns, or if the block has no right to allocate.
    """
    if not _LEAST_COLUMNS <= count <= COLUMNS or count & (count - 1):
      raise AccessError(f"{count} columns; a power of two from {_LEAST_COLUMNS} to {COLUMNS} is needed")
    if not self.may_allocate:
      raise AccessError("columns are allocated after tcgen05.relinquish_alloc_permit")
    used = np.zeros(COLUMNS, np.bool_)
    for first, number in self._columns.items():
      used[first : first + number] = True
    starts = [first for first in range(0, COLUMNS - count + 1, _LEAST_COLUMNS) if not used[first : first + count].any()]
    if not starts:
      return None
    column = starts[self._rng.integers(len(starts))]
    self._columns[column] = count
    return column

  def free(self, address: int, count: int, agent: Agent) -> None:
    """Frees an allocation. Raises AccessError if there is none like it, OrderError if accesses may be under way."""
    if self._columns.get(address) != count:
      raise AccessError(f"no {count} columns were allocated at {address:#x}")
    self.shadow.check_free(agent, self._cells(np.arange(ROWS)[:, None], address + np.arange(count)))
    del self._columns[address]

  def locate_matrix(self, address: int, rows: int, columns: int) -> np.ndarray:
    """Returns the cells int[rows, columns] of a matrix of a product of one block.

    128 rows lie in all lanes (layout D). Of 64 rows, each warp's 32 lanes have 16, in the lower or the upper half
    (layout F).

    Raises AccessError for lanes or columns outside.
    """
    lane = address >> 16
    if lane not in ((0,) if rows == ROWS else (0, _HALF)):
      raise AccessError(f"a matrix of {rows} rows at lane {lane}")
    row = np.arange(rows)
    lanes = row if rows == ROWS else lane + row // _HALF * _WARP_ROWS + row % _HALF
    return self._cells(lanes[:, None], (address & 0xFFFF) + np.arange(columns))

  def locate_halves(self, warp: int, address: int, count: int, split: int) -> np.ndarray:
    """Returns the cells int[count, 32] of shape .16x32bx2 by register and thread.

    The threads have 16 lanes twice: the first half `count` columns from the address on, the other half those from
    `split` columns behind it.

    Args: warp: number in the block. Raises AccessError for lanes of another warp, or columns outside.
    """
    lane = address >> 16
    if lane not in (first := warp % 4 * _WARP_ROWS, first + _HALF):
      raise AccessError(f"warp {warp} names lane {lane}; it has the lanes {first} to {first + _WARP_ROWS - 1}")
    thread = np.arange(_WARP_ROWS)
    columns = (address & 0xFFFF) + np.arange(count)[:, None] + thread // _HALF * split
    return self._cells(lane + thread % _HALF, columns)

  def _cells(self, lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
    own = np.zeros(columns.shape, np.bool_)
    for first, count in self._columns.items():
      own |= (columns >= first) & (columns < first + count)
    if not own.all():
      raise AccessError(f"column {int(columns[~own][0])} of tensor memory is not allocated")
    return lanes * COLUMNS + columns
