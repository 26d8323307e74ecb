"""Runs a block of a kernel: warps in an adversarial order, barriers, and asynchronous operations. Knows no opcodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
import copy
import dataclasses

import numpy as np

from tools.ptx_emulator.clocks import Agent, Knowledge, Shadow
from tools.ptx_emulator.memory import AccessError, GlobalMemory, SharedMemory
from tools.ptx_emulator.reader import PtxInstruction
from tools.ptx_emulator.tensor_map import TensorMap
from tools.ptx_emulator.tensor_memory import TensorMemory

LANES = 32
_BURST = 24  # most instructions of a warp before another one may run
_MOST_TRANSACTIONS = (1 << 20) - 1  # bytes that an mbarrier counts


class KernelFault(Exception):
  """A kernel does something wrong or undefined on a GPU. Names the instruction."""


class Waiting(Exception):
  """Raised by an instruction that cannot go on yet. It runs again later."""

  def __init__(self, reason: str):
    super().__init__(reason)
    self.reason = reason


@dataclasses.dataclass
class Group:
  """Lanes of a warp at the same instruction.

  Attributes:
    pc: index of the instruction.
    mask: bool[32].
    waits_for: why it does not go on; "": it does.
    waits_since: Block.version when it last tried.
  """

  pc: int
  mask: np.ndarray
  waits_for: str = ""
  waits_since: int = -1


@dataclasses.dataclass
class MemoryBarrier:
  """An mbarrier (PTX ISA, "mbarrier").

  Attributes:
    count: arrivals of a phase.
    pending: arrivals that the phase still lacks.
    transactions: bytes that the phase still lacks.
    phase: number of the phase; its parity is what waits name.
    arrived: what those know that have arrived in this phase.
    completed: what a waiter learns.
    maker: the warp that initialized it.
    is_fenced: others, and the asynchronous proxy, see that it is initialized.
  """

  count: int
  pending: int
  arrived: Knowledge
  completed: Knowledge
  transactions: int = 0
  phase: int = 0
  maker: int = 0
  is_fenced: bool = False

  def settle(self) -> bool:
    """Completes the phase if nothing is pending; returns whether it did."""
    if self.pending < 0:
      raise AccessError(f"mbarrier: more than {self.count} arrivals in phase {self.phase}")
    if abs(self.transactions) > _MOST_TRANSACTIONS:
      raise AccessError(f"mbarrier: {self.transactions} bytes pending; the limit is {_MOST_TRANSACTIONS}")
    if self.pending == 0 and self.transactions == 0:
      self.phase += 1
      self.pending = self.count
      self.completed.join(self.arrived)
      return True
    return False


@dataclasses.dataclass
class NamedBarrier:
  """A barrier of bar.sync.

  Attributes:
    threads: that it is for.
    arrived: warp -> its threads.
    knowledge: of the warps that have arrived.
    passed: warps that may leave -> what they learn.
  """

  threads: int
  arrived: dict[int, int]
  knowledge: Knowledge
  passed: dict[int, Knowledge] = dataclasses.field(default_factory=dict)

  def copy(self) -> NamedBarrier:
    """Returns the same state, for other blocks."""
    passed = {warp: knowledge.copy() for warp, knowledge in self.passed.items()}
    return NamedBarrier(self.threads, dict(self.arrived), self.knowledge.copy(), passed)


@dataclasses.dataclass
class Operation:
  """An asynchronous operation.

  Attributes:
    number: its bit in Knowledge.operations.
    run: moves the data.
    text: of the instruction.
    after: an operation that comes first; None: none.
    is_done: whether it has run.
    read: takes the data from where they come, before `run`; None: `run` does.
    is_read: whether it has.
  """

  number: int
  run: Callable[[], None]
  text: str
  after: Operation | None = None
  is_done: bool = False
  read: Callable[[], None] | None = None
  is_read: bool = False


class Warp:
  """32 threads.

  Attributes:
    number: in the block.
    registers: by name: uint16, uint32 or uint64[32]; bool[32] for predicates.
    groups: of lanes that have not ended.
    full: the mask of all lanes, the same object wherever lanes are together.
    agent: of the warp.
    uncommitted, committed: bulk operations without a group, and the groups (cp.async.bulk.commit_group).
    copies, copy_groups: the same of cp.async.
    matrices: wgmma operations: uncommitted, and groups.
    latest_matrix: the wgmma operation begun last.
    locked: registers that an operation of wgmma or a load from tensor memory uses -> that operation.
    dirty: registers written since the last wgmma.fence.
    transfers: loads ("ld") and stores ("st") of tensor memory that the warp has not waited for.
  """

  def __init__(self, number: int, num_threads: int, num_warps: int):
    self.number = number
    self.registers: dict[str, np.ndarray] = {}
    self.full = np.ones(LANES, np.bool_)
    mask = np.arange(LANES) + number * LANES < num_threads
    self.groups = [Group(0, self.full if mask.all() else mask)]
    self.agent = Agent.start(number, num_warps)
    self.uncommitted: list[Operation] = []
    self.committed: list[list[Operation]] = []
    self.copies: list[Operation] = []
    self.copy_groups: list[list[Operation]] = []
    self.matrices: list[Operation] = []
    self.matrix_groups: list[list[Operation]] = []
    self.latest_matrix: Operation | None = None
    self.locked: dict[str, Operation] = {}
    self.dirty: set[str] = set()
    self.transfers: dict[str, list[Operation]] = {"ld": [], "st": []}
    self.threads = np.arange(LANES) + number * LANES
    self._local: np.ndarray | None = None

  def take(self, lanes: np.ndarray) -> Warp:
    """Returns a warp of some of the lanes, in the state of this one, which no wgmma uses. Args: lanes: int[n]."""
    warp = copy.copy(self)
    warp.registers = {name: values[lanes] for name, values in self.registers.items()}
    warp.full, warp.threads = np.ones(len(lanes), np.bool_), self.threads[lanes]
    masks = [(group.pc, group.mask[lanes]) for group in self.groups]
    warp.groups = [Group(pc, warp.full if mask.all() else mask) for pc, mask in masks if mask.any()]
    warp.agent = Agent(self.number, self.agent.knowledge.copy())
    warp.copies, warp.copy_groups = list(self.copies), [list(group) for group in self.copy_groups]
    warp.dirty = set(self.dirty)
    warp._local = None if self._local is None else self._local[lanes]
    return warp

  def is_whole(self, mask: np.ndarray) -> bool:
    """Returns whether a group's mask has all lanes that have not ended."""
    return len(self.groups) == 1 or int(mask.sum()) == self.live

  def read_local(self, addresses: np.ndarray, size: int, mask: np.ndarray, total: int) -> np.ndarray:
    """Returns uint8[n, size] of local memory. Args: total: bytes of a lane. Raises AccessError."""
    return self._local_bytes(len(mask), total)[self._local_places(addresses, size, mask, total)]

  def write_local(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, total: int) -> None:
    """Writes uint8[n, size] to local memory; the other arguments are those of `read_local`."""
    self._local_bytes(len(mask), total)[self._local_places(addresses, values.shape[1], mask, total)] = values

  def _local_bytes(self, lanes: int, total: int) -> np.ndarray:
    if self._local is None:
      self._local = np.full((lanes, total), 0xFF, np.uint8)
    return self._local

  def _local_places(
    self, addresses: np.ndarray, size: int, mask: np.ndarray, total: int
  ) -> tuple[np.ndarray, np.ndarray]:
    wrong = (addresses < 0) | (addresses + size > total) | (addresses % size != 0)
    if wrong.any():
      raise AccessError(f"{size} bytes at {int(addresses[wrong][0])} of a thread's local memory, which has {total}")
    return np.flatnonzero(mask)[:, None], addresses[:, None] + np.arange(size)

  @property
  def live(self) -> int:
    """Lanes that have not ended."""
    return int(sum(group.mask.sum() for group in self.groups))


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
  """A kernel launch.

  Attributes:
    memory: global memory.
    grid: blocks in x, y, z.
    shared_bytes: dynamic shared memory of a block.
    maps: tensor maps by address.
    is_lazy: asynchronous operations end only when no warp can go on, or hardly ever before.
  """

  memory: GlobalMemory
  grid: tuple[int, int, int]
  shared_bytes: int
  maps: Mapping[int, TensorMap]
  allows_equal_writes: bool = False
  is_lazy: bool = False


class Block:
  """One block.

  Attributes:
    index: in the grid, x, y, z.
    serial: from 1, for global memory.
    launch, shared, shadow, warps, barriers: its state; mbarriers by shared address.
    version: counts what lets waiting warps go on: barriers that are complete, and meetings.
    rng: of the schedule.
    tensor_memory: once some is allocated.
    threads_of_products: warp and lane -> the products of tcgen05 that it has begun: operation, and a key that those
      in one order have in common.
  """

  def __init__(
    self,
    launch: KernelLaunch,
    index: tuple[int, int, int],
    num_threads: int,
    rng: np.random.Generator,
    program: Program,
  ):
    self.launch, self.index, self.rng, self.program = launch, index, rng, program
    x, y, z = index
    self.serial = 1 + x + launch.grid[0] * (y + launch.grid[1] * z)
    num_warps = -(-num_threads // LANES)
    self.num_threads = num_threads
    self.shared = SharedMemory(launch.shared_bytes, rng)
    self.shadow = Shadow(launch.shared_bytes, num_warps)
    self.warps = [Warp(number, num_threads, num_warps) for number in range(num_warps)]
    self.barriers: dict[int, MemoryBarrier] = {}
    self.version = 0
    self.named: dict[int, NamedBarrier] = {}
    self.tensor_memory: TensorMemory | None = None
    self.threads_of_products: dict[tuple[int, int], list[tuple[Operation, Hashable]]] = {}
    self._meetings: dict[tuple[int, int], set[int]] = {}  # (first warp, pc) -> warps that have come
    self._met: dict[tuple[int, int], set[int]] = {}  # the same -> warps that may leave
    self._operations: list[Operation] = []
    self._num_operations = 0

  def locate_shared(self, addresses: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    """Returns the offsets int64[n, size] in shared memory of addresses int64[n]. Args: mask: of their lanes."""
    return self.shared.offsets(addresses, size)

  def count_threads(self, mask: np.ndarray) -> int:
    """Returns the threads of a block in a mask."""
    return int(mask.sum())

  @property
  def label(self) -> str:
    """The name of the block, for errors."""
    return f"block {self.index}"

  def serials(self, mask: np.ndarray) -> int | np.ndarray:
    """Returns the block's serial, or those of the blocks that the lanes of a mask belong to."""
    return self.serial

  def begin_operation(
    self,
    run: Callable[[], None],
    text: str,
    after: Operation | None = None,
    read: Callable[[], None] | None = None,
  ) -> Operation:
    """Starts an asynchronous operation, which runs at any later time."""
    operation = Operation(self._num_operations, run, text, after, read=read)
    self._num_operations += 1
    self._operations.append(operation)
    return operation

  def next_operation(self) -> int:
    """Returns the number that the next operation will have."""
    return self._num_operations

  def finish_reading(self, operation: Operation) -> None:
    """Lets an operation take its data now; it may put them anywhere later."""
    if not operation.is_read and operation.read is not None:
      operation.read()
    operation.is_read = True

  def finish_operation(self, operation: Operation) -> None:
    """Runs an operation, and those before it, now."""
    if operation.is_done:
      return
    if operation.after is not None:
      self.finish_operation(operation.after)
    self.finish_reading(operation)
    operation.is_done = True
    self._operations.remove(operation)
    try:
      operation.run()
    except (AccessError, ValueError) as error:
      raise KernelFault(f"{self.label}: {operation.text}: {error}") from error

  def meet(self, warp: Warp, group: Group, count: int) -> bool:
    """Waits until `count` neighboring warps are at one instruction; returns whether this one came last."""
    key = warp.number // count * count, group.pc
    met = self._met.get(key)
    if met and warp.number in met:
      met.remove(warp.number)
      return False
    come = self._meetings.setdefault(key, set())
    come.add(warp.number)
    if len(come) < count:
      raise Waiting(f"{len(come)} of {count} warps have come")
    self.version += 1
    self._met[key] = come - {warp.number}
    del self._meetings[key]
    return True

  def check_barrier(self, warp: Warp, address: int, through_async: bool = False) -> None:
    """Raises KernelFault unless the warp knows that an mbarrier is initialized, and so does the asynchronous proxy.

    Args: through_async: the mbarrier counts bytes of a copy. Other threads need only what orders shared memory.
    """
    barrier = self.barriers[address]
    offsets = address - SharedMemory.START + np.arange(8)
    self.shadow.check_known(warp.agent, offsets)
    if not barrier.is_fenced and through_async:
      raise KernelFault(f"the mbarrier at {address:#x} was initialized, but no fence.mbarrier_init followed")

  def fence_barriers(self, warp: Warp) -> None:
    """fence.mbarrier_init, or a stronger fence."""
    for barrier in self.barriers.values():
      barrier.is_fenced |= barrier.maker == warp.number

  def forget_known_reads(self) -> None:
    """Drops what no access can conflict with any more."""
    known = -1
    for warp in self.warps:
      known &= warp.agent.knowledge.operations
    self.shadow.forget_reads(known)
    if self.tensor_memory is not None:
      self.tensor_memory.shadow.forget_reads(known)

  def run(self) -> None:
    """Runs the block to its end. Raises KernelFault."""
    rng = self.rng
    early = 0.01 if self.launch.is_lazy else 0.3  # not 0, because a warp may wait for an operation without a barrier
    while True:
      # A warp whose lanes are together, and which waits, goes on when something has happened.
      live, version = [warp for warp in self.warps if warp.groups], self.version
      ready = [warp for warp in live if warp.groups[1:] or warp.groups[0].waits_since != version]
      progress = False
      if self._operations and (not ready or rng.random() < early):
        self.finish_operation(self._operations[rng.integers(len(self._operations))])
        progress = True
      while ready:
        if self._run_warp(ready.pop(rng.integers(len(ready))), int(rng.integers(1, _BURST))):
          progress = True
          break
      if progress:
        continue
      if self._operations:
        self.finish_operation(self._operations[rng.integers(len(self._operations))])
      elif live := [warp for warp in self.warps if warp.groups]:
        if not any(self._run_warp(warp, 1) for warp in live):  # each says what it lacks now
          self.handle_deadlock(live)
      else:
        break
    if self.tensor_memory is not None and not self.tensor_memory.is_free:
      raise KernelFault(f"{self.label}: the kernel ends before tcgen05.dealloc")

  def handle_deadlock(self, live: list[Warp]) -> None:
    """Ends the block if its warps wait for ever. Raises KernelFault. Args: live: the warps that have not ended."""
    raise KernelFault(self._describe_deadlock(live))

  def _run_warp(self, warp: Warp, count: int) -> bool:
    """Runs at most `count` instructions; returns whether any ran."""
    ran = False
    for _ in range(count):
      groups = warp.groups if len(warp.groups) == 1 else sorted(warp.groups, key=lambda group: group.pc)
      for group in groups:
        if self._step(warp, group):
          ran = True
          break
      else:
        return ran
      if not warp.groups:
        return True
    return ran

  def _step(self, warp: Warp, group: Group) -> bool:
    """Runs the next instruction of a group; returns whether it went on."""
    instruction, execute = self.program[group.pc]
    try:
      execute(self, warp, group)
    except Waiting as waiting:
      group.waits_for, group.waits_since = waiting.reason, self.version
      return False
    except Exception as error:
      raise KernelFault(
        f"{self.label}, warp {warp.number}, line {instruction.line}: {instruction.text[:200]}: {error}"
      ) from error
    group.waits_for, group.waits_since = "", -1
    if len(warp.groups) > 1:
      self.merge(warp)
    return True

  def merge(self, warp: Warp) -> None:
    """Joins the groups of lanes that are at one instruction."""
    by_pc: dict[int, Group] = {}
    for group in warp.groups:
      if not group.mask.any():
        continue
      if group.pc in by_pc:
        mask = by_pc[group.pc].mask | group.mask
        by_pc[group.pc].mask = warp.full if mask.all() else mask
      else:
        by_pc[group.pc] = group
    warp.groups = list(by_pc.values())

  def _describe_deadlock(self, live: list[Warp]) -> str:
    lines = [f"{self.label}: deadlock; nothing is under way that could end it"]
    for warp in live:
      for group in warp.groups:
        instruction, _ = self.program[group.pc]
        lines.append(
          f"  warp {warp.number}, {int(group.mask.sum())} lanes, line {instruction.line}: {instruction.text[:120]}: "
          f"{group.waits_for}"
        )
    return "\n".join(lines)


Execute = Callable[[Block, Warp, Group], None]
Program = list[tuple[PtxInstruction, Execute]]
