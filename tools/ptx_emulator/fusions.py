"""PTX instructions of the kernels that XLA itself writes: loop fusions and reductions, and Triton's programs.

Semantics are those of the PTX ISA 9.0. `approx` instructions compute the nearest f32, and .ftz flushes nothing: a GPU's
results differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
import re

import numpy as np

from tools.ptx_emulator import asynchronous, operations
from tools.ptx_emulator.block import LANES, Block, Group, Warp
from tools.ptx_emulator.floats import bf16_to_f32, f16_to_f32, f32_to_bf16
from tools.ptx_emulator.operations import (
  KINDS,
  Body,
  Context,
  require_whole_warp,
  take_register,
  unknown_instruction,
  write,
)
from tools.ptx_emulator.reader import Immediate, PtxInstruction, Vector

_CARRY = "CC.CF"  # the carry flag, kept among the registers
_HALF = re.compile(r"(bf16|f16)(x2)?")


# --- numbers of 16 bits ----------------------------------------------------------------------------------------------


def _widen(bits: np.ndarray, kind: str) -> np.ndarray:
  """Returns f32 of uint16 that hold bf16 or f16."""
  return bf16_to_f32(bits) if kind == "bf16" else f16_to_f32(bits)


def _narrow(values: np.ndarray, kind: str) -> np.ndarray:
  """Rounds f32 or f64 to the nearest bf16 or f16: uint16."""
  if kind == "bf16":
    return f32_to_bf16(values.astype(np.float32))
  return values.astype(np.float16).view(np.uint16)


_SUMS: dict[str, Callable[..., np.ndarray]] = {
  "add": np.add,
  "sub": np.subtract,
  "mul": np.multiply,
  "fma": lambda a, b, c: a * b + c,
  "neg": np.negative,
  "abs": np.abs,
}


_PAIRS = {"add": np.add, "mul": np.multiply, "fma": operations.fuse}


def _calculate(context: Context, instruction: PtxInstruction) -> Body:
  """Arithmetic in bf16 and f16, and in two numbers a register; other types are those of `operations`."""
  opcode, kind = instruction.name[0], _HALF.fullmatch(instruction.name[-1])
  if instruction.name[1:] == ("rn", "f32x2"):
    return _calculate_pairs(context, instruction)
  if kind is None:
    return operations.TRANSLATORS[opcode](context, instruction)
  modifiers = set(instruction.name[1:-1])
  if not modifiers <= {"rn", "ftz", "NaN"}:
    raise unknown_instruction(instruction)
  function = operations.EXTREMES.get((opcode, "NaN" in modifiers)) or _SUMS[opcode]
  register = np.uint32 if kind[2] else np.uint16
  target = take_register(instruction.operands[0])
  fetched = [context.fetch(operand, register) for operand in instruction.operands[1:]]
  name = kind[1]

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    # In f64 a product and a sum of these types are exact, or nearly so; they are then rounded once.
    parts = [_widen(each(block, warp).view(np.uint16), name).astype(np.float64) for each in fetched]
    write(warp, target, _narrow(function(*parts), name).view(register), mask)

  return run


def _calculate_pairs(context: Context, instruction: PtxInstruction) -> Body:
  """add, mul and fma of two f32 in a register of 64 bits."""
  target, function = take_register(instruction.operands[0]), _PAIRS[instruction.name[0]]
  fetched = [context.fetch(operand, np.uint64) for operand in instruction.operands[1:]]

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    write(warp, target, function(*(each(block, warp).view(np.float32) for each in fetched)).view(np.uint64), mask)

  return run


def _divide(context: Context, instruction: PtxInstruction) -> Body:
  """div and rem of integers, which round towards 0; a division of floats is `operations`' own."""
  opcode, kind = instruction.name[0], instruction.name[-1]
  if kind[0] not in "us":
    return operations.TRANSLATORS[opcode](context, instruction)
  target = take_register(instruction.operands[0])
  a, b = (context.fetch(operand, KINDS[kind]) for operand in instruction.operands[1:])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    x, y = a(block, warp), b(block, warp)
    y = np.where(y == 0, y.dtype.type(1), y)  # of 0 the result is not defined
    quotient = x // y
    quotient = quotient + ((quotient * y != x) & ((x < 0) != (y < 0)))  # // rounds down
    write(warp, target, (quotient if opcode == "div" else x - quotient * y).astype(KINDS[kind]), mask)

  return run


# --- comparing, rounding, carrying -----------------------------------------------------------------------------------

_ORDERED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
  "eq": np.equal,
  "ne": lambda a, b: (a < b) | (a > b),
  "lt": np.less,
  "le": np.less_equal,
  "gt": np.greater,
  "ge": np.greater_equal,
}
_INTEGERS = _ORDERED | {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_JOINS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compare(context: Context, instruction: PtxInstruction) -> Body:
  """setp.how{.join}{.ftz}.type; a comparison of floats whose name ends in u is true where one is NaN."""
  how, *rest, kind = [part for part in instruction.name[1:] if part != "ftz"]
  join = _JOINS.get(rest[0]) if rest else None
  if len(rest) > (join is not None):
    raise unknown_instruction(instruction)
  half = _HALF.fullmatch(kind)
  if half and half[2]:
    raise unknown_instruction(instruction)
  is_float = bool(half) or kind in ("f32", "f64")
  unordered = is_float and how not in _ORDERED and how not in ("num", "nan")
  name = how.removesuffix("u") if unordered else how
  target = take_register(instruction.operands[0])
  a, b = (context.fetch(operand, np.uint16 if half else KINDS[kind]) for operand in instruction.operands[1:3])
  other = context.fetch(instruction.operands[3], np.bool_) if join else None
  function = None if name in ("num", "nan") else (_ORDERED if is_float else _INTEGERS)[name]

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    x, y = a(block, warp), b(block, warp)
    if half:
      x, y = _widen(x, half[1]), _widen(y, half[1])
    missing = np.isnan(x) | np.isnan(y) if is_float else np.zeros(len(mask), np.bool_)
    if function is None:
      found = missing if name == "nan" else ~missing
    else:
      found = function(x, y) | (missing if unordered else np.False_)
    if join is not None and other is not None:
      found = join(found, other(block, warp))
    write(warp, target, found, mask)

  return run


_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _convert(context: Context, instruction: PtxInstruction) -> Body:
  """cvt between integers and floats; those that `operations` knows are its own."""
  *modifiers, to, source = instruction.name[1:]
  flags = set(modifiers) - {"ftz"}
  if to not in KINDS or source not in KINDS or not flags <= {"rn", "sat", *_TO_INTEGER}:
    return operations.TRANSLATORS["cvt"](context, instruction)
  target = take_register(instruction.operands[0])
  kind, width = KINDS[to], context.register_kind(target)
  a = context.fetch_low(instruction.operands[1], KINDS[source])
  rounds = [_TO_INTEGER[flag] for flag in flags & _TO_INTEGER.keys()]
  floats = np.dtype(kind).kind == "f", np.dtype(KINDS[source]).kind == "f"
  if not floats[0] and floats[1] and not rounds:
    raise unknown_instruction(instruction)  # PTX requires a rounding
  # A register may be wider than its value, which is then extended by its sign or by zeros.
  wide = kind if np.dtype(kind).itemsize == np.dtype(width).itemsize or floats[0] else _extended(kind, width)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    values = a(block, warp)
    for function in rounds:
      values = function(values)
    if floats[0]:
      values = values.astype(kind)
      if "sat" in flags:
        values = np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(kind)
    elif floats[1]:
      values = _to_integers(values, kind)
    elif "sat" in flags:
      limits = np.iinfo(np.dtype(kind).name)
      values = np.clip(values.astype(object), limits.min, limits.max).astype(kind)
    else:
      values = values.astype(kind)
    write(warp, target, values.astype(wide), mask)

  return run


def _to_integers(values: np.ndarray, kind: type[np.generic]) -> np.ndarray:
  """Returns floats that are whole numbers as integers: the nearest that `kind` holds, and 0 for NaN."""
  limits = np.iinfo(np.dtype(kind).name)
  found = np.zeros(values.shape, kind)
  high, low = values >= float(limits.max), values <= float(limits.min)
  inside = ~(high | low | np.isnan(values))
  found[inside] = values[inside].astype(kind)
  found[high], found[low] = limits.max, limits.min
  return found


def _extended(kind: type[np.generic], register: type[np.generic]) -> type[np.generic]:
  return KINDS[f"{'s' if np.dtype(kind).kind == 'i' else 'u'}{8 * np.dtype(register).itemsize}"]


def _multiply_add(context: Context, instruction: PtxInstruction) -> Body:
  """mad and fma; mad.lo.cc and madc add with carry, fma.rm and fma.rp round down and up."""
  opcode, *modifiers, kind = instruction.name
  target = take_register(instruction.operands[0])
  if opcode == "madc" or "cc" in modifiers:
    if kind != "u32" or not set(modifiers) <= {"lo", "hi", "cc"}:
      raise unknown_instruction(instruction)
    a, b, c = (context.fetch(operand, np.uint32) for operand in instruction.operands[1:])
    takes, gives, shift = opcode == "madc", "cc" in modifiers, 32 if "hi" in modifiers else 0

    def carry(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      product = a(block, warp).astype(np.uint64) * b(block, warp)
      total = (product >> np.uint64(shift) & np.uint64(0xFFFFFFFF)) + c(block, warp)
      if takes:
        total = total + warp.registers[_CARRY]
      write(warp, target, total.astype(np.uint32), mask)
      if gives:
        write(warp, _CARRY, total >> np.uint64(32) != 0, mask)

    return carry
  if opcode == "fma" and kind == "f32" and {"rm", "rp"} & set(modifiers):
    a, b, c = (context.fetch(operand, np.float32) for operand in instruction.operands[1:])
    sign = np.float32(1 if "rm" in modifiers else -1)

    def directed(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      write(warp, target, sign * _add_down(sign * a(block, warp), b(block, warp), sign * c(block, warp)), mask)

    return directed
  return _calculate(context, instruction)


def _add_down(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """Returns a * b + c in f32, rounded down."""
  product, addend = a.astype(np.float64) * b, c.astype(np.float64)  # the product is exact
  total = product + addend
  rest = operations.find_rest(product, addend, total)
  nearest = total.astype(np.float32)
  passed = (nearest > total) | ((nearest == total) & (rest < 0))
  return np.where(passed, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _funnel(context: Context, instruction: PtxInstruction) -> Body:
  """shf.l and shf.r: a shift of {b, a}, 64 bits."""
  _, direction, mode, kind = instruction.name
  if kind != "b32" or mode not in ("wrap", "clamp") or direction not in "lr":
    raise unknown_instruction(instruction)
  target = take_register(instruction.operands[0])
  low, high, amount = (context.fetch(operand, np.uint32) for operand in instruction.operands[1:])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    count = amount(block, warp)
    count = (count & np.uint32(31) if mode == "wrap" else np.minimum(count, np.uint32(32))).astype(np.uint64)
    both = high(block, warp).astype(np.uint64) << np.uint64(32) | low(block, warp)
    shifted = both >> count if direction == "r" else both >> (np.uint64(32) - count)
    write(warp, target, shifted.astype(np.uint32), mask)

  return run


# --- between lanes and blocks ----------------------------------------------------------------------------------------

_REDUCED: dict[str, np.ufunc] = {
  "add": np.add,
  "min": np.minimum,
  "max": np.maximum,
  "and": np.bitwise_and,
  "or": np.bitwise_or,
  "xor": np.bitwise_xor,
}


def _reduce(context: Context, instruction: PtxInstruction) -> Body:
  """redux.sync over all lanes of each warp."""
  _, _, how, kind = instruction.name
  target = take_register(instruction.operands[0])
  a, members = context.fetch(instruction.operands[1], KINDS[kind]), context.fetch(instruction.operands[2], np.uint32)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    require_whole_warp(warp, group)
    lanes = np.arange(len(mask))
    named = members(block, warp) >> (lanes % LANES).astype(np.uint32) & 1 != 0
    values, found = a(block, warp), np.zeros(len(mask), KINDS[kind])
    for first in range(0, len(mask), LANES):
      own = slice(first, first + LANES)
      taking = mask[own] & named[own]
      if taking.any():
        found[own] = _REDUCED[how].reduce(values[own][taking])
    write(warp, target, found, mask)

  return run


def _swap_memory(context: Context, instruction: PtxInstruction) -> Body:
  """atom and red, lane by lane: in global memory other blocks may do the same. Only acq_rel orders other accesses."""
  opcode, *modifiers, kind = instruction.name
  words = [word for word in modifiers if word not in ("relaxed", "acq_rel", "sys", "gpu", "cta", "noftz")]
  if len(words) != 2 or words[0] != "global" or words[1] not in {*_REDUCED, "exch", "cas"} or kind not in KINDS:
    raise unknown_instruction(instruction)
  how, is_ordered = words[1], "acq_rel" in modifiers
  target = take_register(instruction.operands[0]) if opcode == "atom" else "_"
  where, *rest = instruction.operands[1 if opcode == "atom" else 0 :]
  at, dtype = context.fetch_address(where), KINDS[kind]
  operands = [context.fetch(operand, dtype) for operand in rest]

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    addresses, values = at(block, warp), [each(block, warp) for each in operands]
    old = np.zeros(len(mask), dtype)
    for lane in np.flatnonzero(mask).tolist():
      if is_ordered:
        block.serial = block.launch.memory.synchronize(int(addresses[lane]), block.serial)
      data = block.launch.memory.share(int(addresses[lane]), np.dtype(dtype).itemsize).view(dtype)
      old[lane] = before = data[0]
      if how == "cas":
        data[0] = values[1][lane] if before == values[0][lane] else before
      else:
        data[0] = values[0][lane] if how == "exch" else _REDUCED[how](before, values[0][lane])
    write(warp, target, old, mask)

  return run


def _synchronize_warp(context: Context, instruction: PtxInstruction) -> Body:
  """bar.warp.sync of all lanes; `asynchronous` knows the other barriers."""
  if instruction.name[1:] != ("warp", "sync"):
    return asynchronous.TRANSLATORS["bar"](context, instruction)
  if instruction.operands != (Immediate(-1),):
    raise unknown_instruction(instruction)
  return lambda block, warp, group, mask: require_whole_warp(warp, group)


def _depend_on_grid(context: Context, instruction: PtxInstruction) -> Body:
  """griddepcontrol: the kernels of a step run one after another here."""
  if instruction.name[1:] not in (("wait",), ("launch_dependents",)):
    raise unknown_instruction(instruction)
  return lambda block, warp, group, mask: None


# --- matrices --------------------------------------------------------------------------------------------------------


def fragment_places(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows and columns int[registers, 2, 32] of a fragment of 16-bit elements, two a register.

  Lane 4 * r + c has columns 2c and 2c + 1 of row r of each 8 x 8 part. Parts follow down the rows, then across. See
  "Matrix Fragments for mma.m16n8k16" of the PTX ISA: this is A, and B with the depth as its columns.
  """
  lane, half = np.arange(LANES)[None, None, :], np.arange(2)[None, :, None]
  part = np.arange(rows // 8 * (columns // 8))[:, None, None]
  row = lane // 4 + 8 * (part % (rows // 8)) + 0 * half
  column = lane % 4 * 2 + half + 8 * (part // (rows // 8))
  shape = np.broadcast_shapes(row.shape, column.shape)
  return np.broadcast_to(row, shape), np.broadcast_to(column, shape)


def _multiply_matrices(context: Context, instruction: PtxInstruction) -> Body:
  """mma.sync of each warp: f32[16, 8] += A[16, 8 or 16] B[16 or 8, 8]."""
  name = instruction.name
  shape, kinds = "".join(name[3:4]), list(name[6:])
  depth = {"m16n8k16": 16, "m16n8k8": 8}.get(shape, 0)
  if name[:3] != ("mma", "sync", "aligned") or name[4:6] != ("row", "col") or not depth:
    raise unknown_instruction(instruction)
  if kinds not in (["f32", "bf16", "bf16", "f32"], ["f32", "f16", "f16", "f32"]):
    raise unknown_instruction(instruction)
  vectors = [operand for operand in instruction.operands if isinstance(operand, Vector)]
  targets = [take_register(part) for part in vectors[0].parts]
  left, right = ([context.fetch(part, np.uint32) for part in vector.parts] for vector in vectors[1:3])
  sums = [context.fetch(part, np.float32) for part in vectors[3].parts]
  left_places, right_places = fragment_places(16, depth), fragment_places(8, depth)
  rows, columns = (places.reshape(4, LANES) for places in fragment_places(16, 8))
  if (len(targets), len(left), len(right), len(sums)) != (4, depth // 4, depth // 8, 4):
    raise unknown_instruction(instruction)

  def matrix(block: Block, warp: Warp, parts: list, places: tuple[np.ndarray, np.ndarray], size: int) -> np.ndarray:
    bits = np.stack([part(block, warp).reshape(-1, LANES) for part in parts], 1)  # [warps, registers, lanes]
    halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], 2).astype(np.uint16)
    found = np.empty((len(bits), size, depth), np.float32)
    found[:, *places] = _widen(halves, kinds[1])
    return found

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    require_whole_warp(warp, group)
    product = matrix(block, warp, left, left_places, 16) @ matrix(block, warp, right, right_places, 8).swapaxes(1, 2)
    found = product[:, rows, columns].swapaxes(0, 1).reshape(4, -1) + np.stack([each(block, warp) for each in sums])
    for target, values in zip(targets, found, strict=True):
      write(warp, target, values, mask)

  return run


TRANSLATORS: dict[str, Callable[[Context, PtxInstruction], Body]] = {
  **dict.fromkeys(("add", "sub", "mul", "min", "max", "neg", "abs"), _calculate),
  **dict.fromkeys(("fma", "mad", "madc"), _multiply_add),
  **dict.fromkeys(("div", "rem"), _divide),
  "setp": _compare,
  "cvt": _convert,
  "shf": _funnel,
  "redux": _reduce,
  "atom": _swap_memory,
  "red": _swap_memory,
  "bar": _synchronize_warp,
  "griddepcontrol": _depend_on_grid,
  "mma": _multiply_matrices,
}
