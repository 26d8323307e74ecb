"""The instructions of tcgen05 that Triton's kernels for sm_100a have, and what each does to a block.

Products, loads and stores are asynchronous: those of one thread are ordered only if they are products with the same
sums and shape. tcgen05.wait orders a warp's loads and stores, an mbarrier the products that tcgen05.commit names.
tcgen05.fence is not needed here, though the ISA's patterns between threads have it: Triton writes a block's barrier
alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tools.ptx_emulator.asynchronous import find_barrier, lane_of, same_in_all
from tools.ptx_emulator.block import Block, Group, KernelFault, Waiting, Warp
from tools.ptx_emulator.floats import bf16_to_f32, f16_to_f32
from tools.ptx_emulator.matrix import MatrixDescriptor, ProductShape
from tools.ptx_emulator.memory import AccessError
from tools.ptx_emulator.operations import Body, Context, require_whole_warp, take_register, unknown_instruction
from tools.ptx_emulator.reader import Address, Immediate, Operand, PtxInstruction, Vector
from tools.ptx_emulator.tensor_memory import TensorMemory

_DEPTH = 16  # of a product of 16-bit elements
_WIDEN = {"bf16": bf16_to_f32, "f16": f16_to_f32}


def _find_memory(block: Block) -> TensorMemory:
  if block.tensor_memory is None:
    raise KernelFault("no tensor memory is allocated")
  return block.tensor_memory


def _require_all(warp: Warp, group: Group, mask: np.ndarray) -> None:
  """Waits for the warp's other lanes. Raises KernelFault if a predicate leaves some out."""
  require_whole_warp(warp, group)
  if np.count_nonzero(mask) != np.count_nonzero(group.mask):
    raise KernelFault("lanes of the warp differ in the predicate")


def _take_number(operand: Operand) -> int:
  if not isinstance(operand, Immediate):
    raise ValueError(f"operand {operand} is no constant")
  return operand.value


# --- allocation -------------------------------------------------------------------------------------------------------


def _allocate(context: Context, instruction: PtxInstruction) -> Body:
  if instruction.name[2:] != ("cta_group::1", "sync", "aligned", "shared::cta", "b32"):
    raise unknown_instruction(instruction)
  where, count = context.fetch_address(instruction.operands[0]), _take_number(instruction.operands[1])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    _require_all(warp, group, mask)
    offsets = block.shared.offsets(where(block, warp)[mask][:1], 4)[0]
    if block.tensor_memory is None:
      block.tensor_memory = TensorMemory(len(block.warps), block.rng)
    column = block.tensor_memory.allocate(count)
    if column is None:
      raise Waiting(f"{count} columns of tensor memory are not free")
    block.shadow.note_write(warp.agent, offsets)
    block.shared.data[offsets] = np.array([column], np.uint32).view(np.uint8)

  return run


def _relinquish(context: Context, instruction: PtxInstruction) -> Body:
  if instruction.name[2:] != ("cta_group::1", "sync", "aligned"):
    raise unknown_instruction(instruction)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    _require_all(warp, group, mask)
    _find_memory(block).may_allocate = False

  return run


def _free(context: Context, instruction: PtxInstruction) -> Body:
  if instruction.name[2:] != ("cta_group::1", "sync", "aligned", "b32"):
    raise unknown_instruction(instruction)
  where, count = context.fetch(instruction.operands[0], np.uint32), _take_number(instruction.operands[1])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    _require_all(warp, group, mask)
    address = same_in_all(where(block, warp), mask, "the address")
    _find_memory(block).free(address, count, warp.agent)
    block.version += 1

  return run


# --- loads and stores -------------------------------------------------------------------------------------------------


def _transfer(context: Context, instruction: PtxInstruction) -> Body:
  """tcgen05.ld and .st of shape .16x32bx2"""
  loads = instruction.name[1] == "ld"
  count = int(instruction.name[5].removeprefix("x"))
  if instruction.name[2:] != ("sync", "aligned", "16x32bx2", f"x{count}", "b32"):
    raise unknown_instruction(instruction)
  vector, at, split = instruction.operands if loads else [instruction.operands[place] for place in (2, 0, 1)]
  if not isinstance(vector, Vector) or len(vector.parts) != count:
    raise unknown_instruction(instruction)
  where, behind = context.fetch_address(at), _take_number(split)
  names = [take_register(part) for part in vector.parts] if loads else []
  values = [] if loads else [context.fetch(part, np.uint32) for part in vector.parts]

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    _require_all(warp, group, mask)
    memory, number = _find_memory(block), block.next_operation()
    cells = memory.locate_halves(warp.number, same_in_all(where(block, warp), mask, "the address"), count, behind)
    if loads:
      memory.shadow.begin_async_read(warp.agent.knowledge, number, cells.reshape(-1))

      def load() -> None:
        warp.registers.update(zip(names, memory.cells[cells], strict=True))

      operation = block.begin_operation(load, instruction.text[:120])
      warp.locked |= dict.fromkeys(names, operation)
    else:
      memory.shadow.begin_async_write(warp.agent.knowledge, number, cells.reshape(-1))
      data = np.stack([value(block, warp) for value in values])

      def store() -> None:
        memory.cells[cells] = data

      operation = block.begin_operation(store, instruction.text[:120])
    warp.transfers[instruction.name[1]].append(operation)

  return run


def _wait(context: Context, instruction: PtxInstruction) -> Body:
  """tcgen05.wait::ld and .wait::st"""
  kind = instruction.name[1].removeprefix("wait::")
  if instruction.name[2:] != ("sync", "aligned"):
    raise unknown_instruction(instruction)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    _require_all(warp, group, mask)
    done, warp.transfers[kind] = warp.transfers[kind], []
    for operation in done:
      block.finish_operation(operation)
      warp.agent.knowledge.operations |= 1 << operation.number
    warp.locked = {name: each for name, each in warp.locked.items() if each not in done}

  return run


# --- products ---------------------------------------------------------------------------------------------------------


def _multiply(context: Context, instruction: PtxInstruction) -> Body:
  """tcgen05.mma.cta_group::1.kind::f16: f32[rows, columns] (+)= A[rows, 16] B[16, columns]."""
  if instruction.name[2:] != ("cta_group::1", "kind::f16") or len(instruction.operands) != 5:
    raise unknown_instruction(instruction)
  target, left, right, shape_at, scale = instruction.operands
  in_tensor_memory = isinstance(left, Address)
  sums_at, right_at = context.fetch_address(target), context.fetch(right, np.uint64)
  left_at = context.fetch_address(left) if in_tensor_memory else context.fetch(left, np.uint64)
  shapes, adds = context.fetch(shape_at, np.uint32), context.fetch(scale, np.bool_)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    lane, memory, number = lane_of(mask, "product"), _find_memory(block), block.next_operation()
    shape, keeps = ProductShape.decode(int(shapes(block, warp)[lane])), bool(adds(block, warp)[lane])
    sums_address, left_value = int(sums_at(block, warp)[lane]), int(left_at(block, warp)[lane])
    thread = block.threads_of_products.setdefault((warp.number, lane), [])
    chain = [operation for operation, key in thread if key == (sums_address, shape)]
    knows = warp.agent.knowledge.copy()
    for operation in chain:
      knows.operations |= 1 << operation.number

    def find_operand(descriptor: int, size: int, transposed: bool) -> np.ndarray:
      at = MatrixDescriptor.decode_tensor_core(descriptor).locate(size, _DEPTH, 2, transposed)
      offsets = block.shared.offsets(at.reshape(-1), 2)
      block.shadow.begin_async_read(knows, number, offsets.reshape(-1))
      return offsets

    right_places = find_operand(int(right_at(block, warp)[lane]), shape.columns, shape.transposes_right)
    if in_tensor_memory:
      if left_value >> 16 != sums_address >> 16 or shape.transposes_left:
        raise KernelFault("A in tensor memory must begin at the lane of the sums, and have its depth in columns")
      left_places = memory.locate_matrix(left_value, shape.rows, _DEPTH // 2)
      memory.shadow.begin_async_read(knows, number, left_places.reshape(-1))
    else:
      left_places = find_operand(left_value, shape.rows, shape.transposes_left)
    sums = memory.locate_matrix(sums_address, shape.rows, shape.columns)
    memory.shadow.begin_async_write(knows, number, sums.reshape(-1))

    def multiply() -> None:
      widen = _WIDEN[shape.kind]
      b = widen(block.shared.data[right_places].view(np.uint16).reshape(shape.columns, _DEPTH))
      bits = memory.cells[left_places] if in_tensor_memory else block.shared.data[left_places]
      product = widen(bits.view(np.uint16).reshape(shape.rows, _DEPTH)) @ b.T
      found = product + memory.cells[sums].view(np.float32) if keeps else product
      memory.cells[sums] = found.view(np.uint32)

    operation = block.begin_operation(multiply, instruction.text[:120], chain[-1] if chain else None)
    thread.append((operation, (sums_address, shape)))

  return run


def _commit(context: Context, instruction: PtxInstruction) -> Body:
  """tcgen05.commit: an mbarrier gets an arrival when all products of the thread have ended."""
  if instruction.name[2:] != ("cta_group::1", "mbarrier::arrive::one", "shared::cluster", "b64"):
    raise unknown_instruction(instruction)
  where = context.fetch_address(instruction.operands[0])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    lane = lane_of(mask, "commit")
    address = int(where(block, warp)[lane])
    barrier = find_barrier(block, address)
    block.check_barrier(warp, address)
    products = [operation for operation, _ in block.threads_of_products.get((warp.number, lane), [])]

    def arrive() -> None:
      for operation in products:
        block.finish_operation(operation)
        barrier.arrived.operations |= 1 << operation.number
      if block.barriers.get(address) is not barrier:
        raise AccessError(f"the mbarrier at {address:#x} is invalid before tcgen05.commit arrives")
      barrier.pending -= 1
      block.version += barrier.settle()

    block.begin_operation(arrive, instruction.text[:120])

  return run


_BY_NAME: dict[str, Callable[[Context, PtxInstruction], Body]] = {
  "alloc": _allocate,
  "relinquish_alloc_permit": _relinquish,
  "dealloc": _free,
  "ld": _transfer,
  "st": _transfer,
  "wait::ld": _wait,
  "wait::st": _wait,
  "mma": _multiply,
  "commit": _commit,
}


def _translate(context: Context, instruction: PtxInstruction) -> Body:
  if instruction.name[1] not in _BY_NAME:
    raise unknown_instruction(instruction)
  return _BY_NAME[instruction.name[1]](context, instruction)


TRANSLATORS: dict[str, Callable[[Context, PtxInstruction], Body]] = {"tcgen05": _translate}
