"""PTX instructions that synchronize, copy in the background or multiply matrices: what each does to a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tools.ptx_emulator.block import (
  LANES,
  Block,
  Group,
  KernelFault,
  MemoryBarrier,
  NamedBarrier,
  Operation,
  Waiting,
  Warp,
)
from tools.ptx_emulator.clocks import Knowledge
from tools.ptx_emulator.floats import bf16_to_f32, f16_to_f32
from tools.ptx_emulator.matrix import MatrixDescriptor, accumulator_places, operand_places
from tools.ptx_emulator.memory import AccessError, Buffer
from tools.ptx_emulator.operations import (
  Body,
  Context,
  require_whole_warp,
  take_register,
  unknown_instruction,
  write,
  write_shared,
)
from tools.ptx_emulator.reader import Address, Immediate, Operand, PtxError, PtxInstruction, Register, Vector
from tools.ptx_emulator.tensor_map import TensorMap

_BARRIER_BYTES = 8
_WARPS = 4  # of a warpgroup


def lane_of(mask: np.ndarray, what: str = "copy") -> int:
  """Returns the one lane of a mask. Raises KernelFault if there are several."""
  lanes = np.flatnonzero(mask)
  if len(lanes) != 1:
    raise KernelFault(f"{len(lanes)} lanes begin this {what}; one should")
  return int(lanes[0])


def same_in_all(values: np.ndarray, mask: np.ndarray, what: str) -> int:
  """Returns the value that all lanes have."""
  found = values[mask]
  if np.count_nonzero(found != found[0]):
    raise KernelFault(f"lanes differ in {what}")
  return int(found[0])


def find_barrier(block: Block, address: int) -> MemoryBarrier:
  """Returns the mbarrier at a shared address. Raises KernelFault if none was initialized there."""
  barrier = block.barriers.get(address)
  if barrier is None:
    raise KernelFault(f"no mbarrier was initialized at shared address {address:#x}")
  return barrier


# --- barriers ---------------------------------------------------------------------------------------------------------


def _synchronize(context: Context, instruction: PtxInstruction) -> Body:
  """bar.sync a{, threads}"""
  if instruction.name[1:] not in (("sync",), ("sync", "aligned")):
    raise unknown_instruction(instruction)
  fetched = [context.fetch(operand, np.uint32) for operand in instruction.operands]

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    require_whole_warp(warp, group)
    number = same_in_all(fetched[0](block, warp), mask, "the barrier")
    threads = same_in_all(fetched[1](block, warp), mask, "the number of threads") if fetched[1:] else block.num_threads
    if number > 15:
      raise KernelFault(f"barrier {number}; a block has 16")
    if threads % 32 and threads != block.num_threads:
      raise KernelFault(f"{threads} threads at barrier {number}; a multiple of 32 is needed")
    warps = len(block.warps)
    barrier = block.named.setdefault(number, NamedBarrier(threads, {}, Knowledge.nothing(warps)))
    if warp.number in barrier.passed:
      warp.agent.knowledge.join(barrier.passed.pop(warp.number))
      return
    if warp.number not in barrier.arrived:
      if barrier.arrived and barrier.threads != threads:
        raise KernelFault(f"barrier {number}: {threads} threads here, {barrier.threads} elsewhere")
      come = block.count_threads(mask)
      barrier.threads, barrier.arrived[warp.number] = threads, come
      warp.agent.release_to(barrier.knowledge)
      come = sum(barrier.arrived.values())
      if come > threads:
        raise KernelFault(f"barrier {number}: {come} threads came; it is for {threads}")
      if come == threads:
        block.version += 1
        barrier.passed |= dict.fromkeys(barrier.arrived, barrier.knowledge)
        barrier.arrived, barrier.knowledge = {}, Knowledge.nothing(warps)
        warp.agent.knowledge.join(barrier.passed.pop(warp.number))
        block.forget_known_reads()
        return
    come = sum(barrier.arrived.values())
    raise Waiting(f"barrier {number} has {come} of {threads} threads")

  return run


def _memory_barrier(context: Context, instruction: PtxInstruction) -> Body:
  """mbarrier.init, .inval, .arrive, .arrive.expect_tx, .expect_tx, .try_wait.parity"""
  modifiers = [part for part in instruction.name[1:] if part not in ("release", "cta", "shared", "shared::cta", "b64")]
  operands = instruction.operands
  if modifiers == ["init"]:
    where, count = context.fetch_address(operands[0]), context.fetch(operands[1], np.uint32)

    def initialize(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      address = same_in_all(where(block, warp), mask, "the mbarrier")
      offsets = block.shared.offsets(np.array([address]), _BARRIER_BYTES)
      if address in block.barriers:
        raise KernelFault(f"the mbarrier at {address:#x} is initialized twice")
      block.shadow.note_write(warp.agent, offsets.reshape(-1))
      arrivals, warps = same_in_all(count(block, warp), mask, "the count"), len(block.warps)
      if not 1 <= arrivals < 1 << 20:
        raise KernelFault(f"an mbarrier of {arrivals} arrivals")
      nothing = Knowledge.nothing(warps)
      block.barriers[address] = MemoryBarrier(arrivals, arrivals, nothing, nothing.copy(), maker=warp.number)

    return initialize
  if modifiers == ["inval"]:
    where = context.fetch_address(operands[0])

    def invalidate(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      address = same_in_all(where(block, warp), mask, "the mbarrier")
      find_barrier(block, address)
      block.check_barrier(warp, address)
      block.shadow.note_write(warp.agent, block.shared.offsets(np.array([address]), _BARRIER_BYTES).reshape(-1))
      del block.barriers[address]

    return invalidate
  if modifiers in (["arrive"], ["arrive", "expect_tx"], ["expect_tx"]):
    has_state = isinstance(operands[0], Register)
    address_at = 1 if has_state else 0
    where = context.fetch_address(operands[address_at])
    amount = context.fetch(operands[address_at + 1], np.uint32) if operands[address_at + 1 :] else None
    expects, arrives = "expect_tx" in modifiers, "arrive" in modifiers

    def arrive(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      addresses = where(block, warp)
      amounts = np.ones(len(mask), np.uint32) if amount is None else amount(block, warp)
      for address in np.unique(addresses[mask]).tolist():
        barrier, lanes = find_barrier(block, address), mask & (addresses == address)
        block.check_barrier(warp, address)
        if expects:
          barrier.transactions += int(amounts[lanes].sum())
        if arrives:
          barrier.pending -= int(lanes.sum()) if expects else int(amounts[lanes].sum())
          warp.agent.release_to(barrier.arrived)
        block.version += barrier.settle()
      if has_state:
        write(warp, take_register(operands[0]), np.zeros(len(mask), np.uint64), mask)

    return arrive
  if modifiers == ["try_wait", "parity"]:
    target = take_register(operands[0])
    where, parity = context.fetch_address(operands[1]), context.fetch(operands[2], np.uint32)

    def wait(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      address = same_in_all(where(block, warp), mask, "the mbarrier")
      wanted = same_in_all(parity(block, warp), mask, "the parity")
      barrier = find_barrier(block, address)
      block.check_barrier(warp, address)
      if barrier.phase & 1 == wanted:
        raise Waiting(
          f"the mbarrier at {address:#x} lacks {barrier.pending} of {barrier.count} arrivals and "
          f"{barrier.transactions} bytes of phase {barrier.phase}"
        )
      warp.agent.knowledge.join(barrier.completed)
      write(warp, target, np.ones(len(mask), np.bool_), mask)

    return wait
  raise unknown_instruction(instruction)


def _fence(context: Context, instruction: PtxInstruction) -> Body:
  kind = instruction.name[1:]
  if kind == ("mbarrier_init", "release", "cluster"):
    return lambda block, warp, group, mask: block.fence_barriers(warp)
  if kind in (("proxy", "async", "shared::cta"), ("proxy", "async")):

    def publish(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      require_whole_warp(warp, group)
      warp.agent.publish()
      block.fence_barriers(warp)

    return publish
  raise unknown_instruction(instruction)


# --- copies -----------------------------------------------------------------------------------------------------------


def _copy(context: Context, instruction: PtxInstruction) -> Body:
  name = instruction.name
  if name[:2] != ("cp", "async"):
    raise unknown_instruction(instruction)
  if name[2] != "bulk":
    return _copy_pieces(context, instruction)
  rest = name[3:]
  if rest == ("commit_group",):

    def commit(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      warp.committed.append(warp.uncommitted)
      warp.uncommitted = []

    return commit
  if rest in (("wait_group",), ("wait_group", "read")):
    most, is_read = instruction.operands[0], bool(rest[1:])
    assert isinstance(most, Immediate)

    def wait(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      done, rest_of_groups = _split_groups(warp.committed, most.value)
      for operation in done:
        (block.finish_reading if is_read else block.finish_operation)(operation)
        warp.agent.knowledge.operations |= 1 << operation.number
      if not is_read:  # what is only read is still to be waited for
        warp.committed = rest_of_groups

    return wait
  if rest == ("global", "shared::cta", "bulk_group"):
    return _copy_bytes(context, instruction)
  if rest[0] == "tensor":
    if rest[2:] == ("shared::cluster", "global", "mbarrier::complete_tx::bytes"):
      return _load_box(context, instruction)
    if rest[2:] == ("global", "shared::cta", "bulk_group"):
      return _store_box(context, instruction)
  raise unknown_instruction(instruction)


def _copy_pieces(context: Context, instruction: PtxInstruction) -> Body:
  """cp.async: each lane copies 4, 8 or 16 bytes, in the generic proxy; and its groups."""
  _, _, what, *rest = instruction.name
  operands = instruction.operands
  if what in ("commit_group", "wait_group"):
    # A lane has its own groups. Those of a warp are alike, because all lanes commit and wait together.
    most = operands[0] if operands else Immediate(0)
    if instruction.guard is not None or rest or not isinstance(most, Immediate):
      raise unknown_instruction(instruction)
    commits = what == "commit_group"

    def finish(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      require_whole_warp(warp, group)
      if commits:
        warp.copy_groups.append(warp.copies)
        warp.copies = []
        return
      done, warp.copy_groups = _split_groups(warp.copy_groups, most.value)
      for operation in done:
        block.finish_operation(operation)
        warp.agent.knowledge.operations |= 1 << operation.number

    return finish
  size = operands[2] if operands[2:] else None
  sizes = {"ca": (4, 8, 16), "cg": (16,)}.get(what, ())
  if not isinstance(size, Immediate) or size.value not in sizes or operands[4:]:
    raise unknown_instruction(instruction)
  if rest not in (["shared", "global"], ["shared::cta", "global"]):
    raise unknown_instruction(instruction)
  count, target, source = size.value, *(context.fetch_address(operand) for operand in operands[:2])
  read_sizes = context.fetch(operands[3] if operands[3:] else size, np.uint32)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    offsets = block.locate_shared(target(block, warp)[mask], mask, count)
    addresses, given = source(block, warp)[mask], read_sizes(block, warp)[mask]
    if (given > count).any():
      raise KernelFault(f"a copy of {count} bytes reads {int(given.max())}")
    if (addresses % count != 0).any():
      raise KernelFault(f"address {int(addresses[addresses % count != 0][0]):#x} is no multiple of {count}")
    block.shadow.begin_async_write(warp.agent.knowledge, block.next_operation(), offsets.reshape(-1), is_generic=True)
    is_read = np.arange(count) < given[:, None]
    places, serials = (addresses[:, None] + np.arange(count))[is_read], block.serials(mask)
    if isinstance(serials, np.ndarray):
      serials = np.broadcast_to(serials[:, None], is_read.shape)[is_read]

    def move() -> None:
      values = np.zeros(offsets.shape, np.uint8)  # of what is not read
      values[is_read] = block.launch.memory.read(places, 1, serials)[:, 0]
      block.shared.data[offsets] = values
      if not np.array_equal(block.shared.data[offsets], values):
        raise AccessError("two lanes copy different values to a byte of shared memory")

    warp.copies.append(block.begin_operation(move, instruction.text))

  return run


def _split_groups(groups: list[list[Operation]], keep: int) -> tuple[list[Operation], list[list[Operation]]]:
  """Returns the operations of all groups but the latest `keep`, and those groups."""
  count = max(0, len(groups) - keep)
  return [operation for group in groups[:count] for operation in group], groups[count:]


def _copy_bytes(context: Context, instruction: PtxInstruction) -> Body:
  target, source = (context.fetch_address(operand) for operand in instruction.operands[:2])
  size = context.fetch(instruction.operands[2], np.uint32)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    lane = lane_of(mask)
    count = int(size(block, warp)[lane])
    to, start = int(target(block, warp)[lane]), source(block, warp)[lane : lane + 1]
    if count % 16 or to % 16:
      raise KernelFault(f"{count} bytes to {to:#x}: both must be multiples of 16")
    offsets = block.shared.offsets(start, count, 16)[0] if count else np.zeros(0, np.int64)
    buffer, at = block.launch.memory.find(to, count)
    block.shadow.begin_async_read(warp.agent.knowledge, block.next_operation(), offsets)

    data = []

    def move() -> None:
      where = slice(at, at + count)
      buffer.data[where], buffer.owner[where] = data[0], block.serial

    def read() -> None:
      data.append(block.shared.data[offsets])

    warp.uncommitted.append(block.begin_operation(move, instruction.text, read=read))

  return run


class _Box(NamedTuple):
  """A box of a tensor map at its places.

  Attributes:
    tensor: the map.
    addresses, inside: see TensorMap.locate_box.
    offsets: of the bytes in shared memory, int64[elements, itemsize].
  """

  tensor: TensorMap
  addresses: np.ndarray
  inside: np.ndarray
  offsets: np.ndarray


def _find_box(
  context: Context, in_global: Operand, in_shared: Operand
) -> Callable[[Block, Warp, np.ndarray], tuple[int, _Box]]:
  """Returns a function that gives the lane of a copy and its box. Args: in_global: the map and coordinates."""
  if not isinstance(in_global, Address) or not in_global.coordinates:
    raise PtxError(f"{in_global} names no tensor map")
  base = context.fetch_address(in_global)
  coordinates = [context.fetch(each, np.int32) for each in in_global.coordinates]
  where = context.fetch_address(in_shared)

  def find(block: Block, warp: Warp, mask: np.ndarray) -> tuple[int, _Box]:
    lane = lane_of(mask)
    address = int(base(block, warp)[lane])
    tensor = block.launch.maps.get(address)
    if tensor is None:
      raise KernelFault(f"no tensor map is at {address:#x}")
    addresses, inside = tensor.locate_box(tuple(int(each(block, warp)[lane]) for each in coordinates))
    places = tensor.place_box(int(where(block, warp)[lane]))
    block.shared.offsets(np.array([places.min(), places.max()]), 1)
    return lane, _Box(tensor, addresses, inside, places - block.shared.START)

  return find


def _load_box(context: Context, instruction: PtxInstruction) -> Body:
  target, source, signal = instruction.operands
  find, barrier_at = _find_box(context, source, target), context.fetch_address(signal)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    lane, (tensor, addresses, inside, offsets) = find(block, warp, mask)
    at = int(barrier_at(block, warp)[lane])
    barrier = find_barrier(block, at)
    block.check_barrier(warp, at, through_async=True)
    number = block.next_operation()
    block.shadow.begin_async_write(warp.agent.knowledge, number, offsets.reshape(-1))

    def move() -> None:
      values = np.zeros(offsets.shape, np.uint8)
      if inside.any():
        buffer, spots = _spots(block, addresses[inside], tensor.itemsize)
        block.launch.memory.check_owner(buffer, spots, block.serial)
        values[inside] = buffer.data[spots]
      block.shared.data[offsets] = values
      barrier.transactions -= tensor.box_bytes
      barrier.arrived.operations |= 1 << number
      block.version += barrier.settle()

    block.begin_operation(move, instruction.text)

  return run


def _store_box(context: Context, instruction: PtxInstruction) -> Body:
  target, source = instruction.operands
  find = _find_box(context, target, source)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    _, (tensor, addresses, inside, offsets) = find(block, warp, mask)
    block.shadow.begin_async_read(warp.agent.knowledge, block.next_operation(), offsets.reshape(-1))

    data = []

    def move() -> None:
      if inside.any():
        buffer, spots = _spots(block, addresses[inside], tensor.itemsize)
        buffer.data[spots], buffer.owner[spots] = data[0], block.serial

    def read() -> None:
      data.append(block.shared.data[offsets[inside]])

    warp.uncommitted.append(block.begin_operation(move, instruction.text, read=read))

  return run


def _spots(block: Block, addresses: np.ndarray, itemsize: int) -> tuple[Buffer, np.ndarray]:
  """Returns the buffer of all elements, and the offsets [n, itemsize] in it. Raises AccessError."""
  first, last = int(addresses.min()), int(addresses.max())
  buffer, _ = block.launch.memory.find(first, itemsize)
  other, _ = block.launch.memory.find(last, itemsize)
  if other is not buffer:
    raise AccessError(f"a box reaches from {buffer.name} into {other.name}")
  return buffer, (addresses - buffer.address)[:, None] + np.arange(itemsize)


def _prefetch(context: Context, instruction: PtxInstruction) -> Body:
  if instruction.name[1:] != ("tensormap",):
    raise unknown_instruction(instruction)
  where = context.fetch_address(instruction.operands[0])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    for address in np.unique(where(block, warp)[mask]).tolist():
      if address not in block.launch.maps:
        raise KernelFault(f"no tensor map is at {address:#x}")

  return run


# --- matrices ---------------------------------------------------------------------------------------------------------


def _matrix_lines(instruction: PtxInstruction) -> tuple[int, bool]:
  """Returns the number of 8 x 8 matrices of ldmatrix or stmatrix, and whether they are transposed."""
  modifiers = [part for part in instruction.name[1:] if part not in ("sync", "aligned", "shared", "shared::cta", "b16")]
  transposed = "trans" in modifiers
  rest = [part for part in modifiers if part != "trans"]
  if len(rest) != 2 or rest[0] != "m8n8" or rest[1] not in ("x1", "x2", "x4"):
    raise unknown_instruction(instruction)
  return int(rest[1][1:]), transposed


def _load_matrix(context: Context, instruction: PtxInstruction) -> Body:
  count, transposed = _matrix_lines(instruction)
  target, source = instruction.operands
  names = [take_register(part) for part in target.parts] if isinstance(target, Vector) else [take_register(target)]
  where = context.fetch_address(source)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    require_whole_warp(warp, group)
    taking = _lanes_of_warps(mask)
    naming = taking & (np.arange(len(mask)) % LANES < 8 * count)  # lanes whose addresses count
    offsets = block.locate_shared(where(block, warp)[naming], naming, 16)
    block.shadow.note_read(warp.agent, offsets.reshape(-1))
    matrices = block.shared.data[offsets].view(np.uint16).reshape(-1, count, 8, 8)  # of each warp
    if transposed:
      matrices = matrices.swapaxes(2, 3)
    for name, matrix in zip(names, np.ascontiguousarray(matrices.swapaxes(0, 1)), strict=True):
      values = np.zeros(len(mask), np.uint32)
      values[taking] = matrix.reshape(-1).view(np.uint32)
      write(warp, name, values, mask)

  return run


def _lanes_of_warps(mask: np.ndarray) -> np.ndarray:
  """Returns bool[lanes]: all lanes of the warps that have lanes in a mask. Of several blocks, some may have ended."""
  return np.repeat(mask.reshape(-1, LANES).any(1), LANES)


def _store_matrix(context: Context, instruction: PtxInstruction) -> Body:
  count, transposed = _matrix_lines(instruction)
  target, source = instruction.operands
  parts = source.parts if isinstance(source, Vector) else (source,)
  where, values = context.fetch_address(target), [context.fetch(part, np.uint32) for part in parts]

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    require_whole_warp(warp, group)
    taking = _lanes_of_warps(mask)
    naming = taking & (np.arange(len(mask)) % LANES < 8 * count)
    offsets = block.locate_shared(where(block, warp)[naming], naming, 16)
    matrices = np.stack([value(block, warp)[taking] for value in values]).view(np.uint16).reshape(count, -1, 8, 8)
    matrices = matrices.swapaxes(0, 1)  # of each warp
    if transposed:
      matrices = matrices.swapaxes(2, 3)
    write_shared(block, warp, offsets, np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16))

  return run


def _multiply(context: Context, instruction: PtxInstruction) -> Body:
  """wgmma"""
  what = instruction.name[1]
  if what == "fence":

    def fence(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      require_whole_warp(warp, group)
      warp.dirty.clear()

    return fence
  if what == "commit_group":

    def commit(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      require_whole_warp(warp, group)
      warp.matrix_groups.append(warp.matrices)
      warp.matrices = []

    return commit
  if what == "wait_group":
    most = instruction.operands[0]
    assert isinstance(most, Immediate)

    def wait(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      require_whole_warp(warp, group)
      done, warp.matrix_groups = _split_groups(warp.matrix_groups, most.value)
      for operation in done:
        block.finish_operation(operation)
        warp.agent.knowledge.operations |= 1 << operation.number
      numbers = {operation.number for operation in done}
      warp.locked = {name: each for name, each in warp.locked.items() if each.number not in numbers}

    return wait
  return _multiply_async(context, instruction)


def _multiply_async(context: Context, instruction: PtxInstruction) -> Body:
  shape, *kinds = instruction.name[4:]
  if instruction.name[:4] != ("wgmma", "mma_async", "sync", "aligned") or kinds not in (
    ["f32", "bf16", "bf16"],
    ["f32", "f16", "f16"],
  ):
    raise unknown_instruction(instruction)
  widen = bf16_to_f32 if kinds[1] == "bf16" else f16_to_f32
  columns = int(shape.removeprefix("m64n").removesuffix("k16"))
  if shape != f"m64n{columns}k16" or columns % 8:
    raise unknown_instruction(instruction)
  operands = instruction.operands
  target, left, right, scale = operands[:4]
  from_registers = isinstance(left, Vector)
  flags = [operand.value for operand in operands[4:] if isinstance(operand, Immediate)]
  if flags[:2] != [1, 1] or len(flags) != (3 if from_registers else 4) or not isinstance(target, Vector):
    raise unknown_instruction(instruction)
  sums = [take_register(part) for part in target.parts]
  inputs = [take_register(part) for part in left.parts] if from_registers else []
  transposes_left, transposes_right = (False, bool(flags[2])) if from_registers else map(bool, flags[2:])
  rows, places = accumulator_places(columns)
  if len(sums) != len(rows):
    raise unknown_instruction(instruction)
  held = frozenset((*sums, *inputs))
  left_at = None if from_registers else context.fetch(left, np.uint64)
  right_at, adds = context.fetch(right, np.uint64), context.fetch(scale, np.bool_)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    require_whole_warp(warp, group)
    first = warp.number // _WARPS * _WARPS
    warps = block.warps[first : first + _WARPS]
    if len(warps) != _WARPS:
      raise KernelFault("wgmma needs a warpgroup of four warps")
    if not warp.dirty.isdisjoint(held):
      raise KernelFault(f"register {sorted(warp.dirty & held)[0]} was written; wgmma.fence comes first")
    if not block.meet(warp, group, _WARPS):
      return  # the last warp has begun it
    right_bits = {same_in_all(right_at(block, each), mask, "the descriptor") for each in warps}
    left_bits = {same_in_all(left_at(block, each), mask, "the descriptor") for each in warps} if left_at else {0}
    is_sum = {bool(same_in_all(adds(block, each), mask, "scale-d")) for each in warps}
    if len(right_bits) + len(left_bits) + len(is_sum) != 3:
      raise KernelFault("the warps of a warpgroup differ in their operands")
    knows = _common_knowledge(warps)
    number = block.next_operation()
    b_at = MatrixDescriptor.decode(right_bits.pop()).locate(columns, 16, 2, transposes_right)
    b_offsets = block.shared.offsets(b_at.reshape(-1), 2)
    block.shadow.begin_async_read(knows, number, b_offsets.reshape(-1))
    a_offsets = None
    if not from_registers:
      a_at = MatrixDescriptor.decode(left_bits.pop()).locate(64, 16, 2, transposes_left)
      a_offsets = block.shared.offsets(a_at.reshape(-1), 2)
      block.shadow.begin_async_read(knows, number, a_offsets.reshape(-1))
    keeps = is_sum.pop()

    def multiply() -> None:
      data = block.shared.data
      b = widen(data[b_offsets].view(np.uint16).reshape(columns, 16))
      if a_offsets is not None:
        a = widen(data[a_offsets].view(np.uint16).reshape(64, 16))
      else:
        a = np.empty((64, 16), np.float32)
        words = _join_lanes(warps, inputs)
        halves = np.stack([words & 0xFFFF, words >> 16], 1).astype(np.uint16)
        a_rows, a_columns = operand_places()
        a[a_rows, a_columns] = widen(halves)
      product = a @ b.T
      found = product[rows, places]
      if keeps:
        found = found + _join_lanes(warps, sums).view(np.float32)
      bits = np.ascontiguousarray(found.view(np.uint32).reshape(-1, _WARPS, LANES).swapaxes(0, 1))
      for each, own in zip(warps, bits, strict=True):
        each.registers.update(zip(sums, own, strict=True))

    operation = block.begin_operation(multiply, instruction.text[:120], warps[0].latest_matrix)
    for each in warps:
      each.latest_matrix = operation
      each.matrices.append(operation)
      each.locked |= dict.fromkeys(held, operation)

  return run


def _join_lanes(warps: list[Warp], names: list[str]) -> np.ndarray:
  """Returns the registers of a warpgroup, uint32[names, lanes]."""
  lanes = np.concatenate([each.registers[name] for each in warps for name in names])
  return lanes.reshape(_WARPS, len(names), LANES).swapaxes(0, 1).reshape(len(names), -1)


def _common_knowledge(warps: list[Warp]) -> Knowledge:
  """Returns what all of the warps know."""
  known = [warp.agent.knowledge for warp in warps]
  operations, fenced = known[0].operations, known[0].published_operations
  for each in known[1:]:
    operations &= each.operations
    fenced &= each.published_operations
  clock = np.minimum.reduce([each.clock for each in known])
  return Knowledge(clock, np.minimum.reduce([each.published for each in known]), operations, fenced)


def _limit_registers(context: Context, instruction: PtxInstruction) -> Body:
  count = instruction.operands[0]
  if not isinstance(count, Immediate) or count.value % 8 or not 24 <= count.value <= 256:
    raise PtxError(f"line {instruction.line}: {instruction.text}: a multiple of 8 from 24 to 256 is needed")
  return lambda block, warp, group, mask: require_whole_warp(warp, group)


TRANSLATORS: dict[str, Callable[[Context, PtxInstruction], Body]] = {
  "bar": _synchronize,
  "barrier": _synchronize,
  "mbarrier": _memory_barrier,
  "fence": _fence,
  "cp": _copy,
  "prefetch": _prefetch,
  "ldmatrix": _load_matrix,
  "stmatrix": _store_matrix,
  "wgmma": _multiply,
  "setmaxnreg": _limit_registers,
}
KEEPS = frozenset({"wgmma"})  # may use registers that a wgmma holds
