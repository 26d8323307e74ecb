"""What each PTX instruction does to a warp. An instruction that is not here stops the emulator before anything runs.

Semantics are those of the PTX ISA 9.0. Each translator makes a function of an instruction. Registers hold unsigned
arrays of 32 lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import re

import numpy as np

from tools.ptx_emulator.block import LANES, Block, Execute, Group, KernelFault, Waiting, Warp
from tools.ptx_emulator.floats import bf16_to_f32, e4m3_to_f16, f32_to_bf16, f32_to_e4m3, f32_to_f16
from tools.ptx_emulator.memory import SharedMemory
from tools.ptx_emulator.reader import (
  Address,
  Immediate,
  Kernel,
  Operand,
  Pair,
  PtxError,
  PtxInstruction,
  Register,
  Symbol,
  Vector,
)

Fetch = Callable[[Block, Warp], np.ndarray]
Body = Callable[[Block, Warp, Group, np.ndarray], None]
PARAMETERS = 0x6000_0000_0000  # address of the first parameter
PARAMETER_BYTES = 1 << 16  # between the addresses of two

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS: dict[str, type[np.generic]] = {"f32": np.float32, "f64": np.float64}
for _bits in (8, 16, 32, 64):
  KINDS |= {f"u{_bits}": _UNSIGNED[_bits // 8], f"b{_bits}": _UNSIGNED[_bits // 8]}
  KINDS[f"s{_bits}"] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[_bits // 8]
KINDS["pred"] = np.bool_
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
# Of loads and stores: caching, and an order that blocks which run one after another have anyway.
_HINTS = frozenset(("nc", "relaxed", "gpu", "sys", "weak", "volatile"))
_LANE = np.arange(LANES)
# By mode: the lane that a lane reads, from its own number and the operand, and the limit that leaves a warp whole. A
# lane that would read from outside of its warp reads its own value.
_SHUFFLES: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], int]] = {
  "idx": (lambda own, operand: operand, 31),
  "bfly": (np.bitwise_xor, 31),
  "down": (np.add, 31),
  "up": (np.subtract, 0),
}


@dataclasses.dataclass(frozen=True)
class Context:
  """What operands refer to.

  Attributes:
    kernel: the kernel.
    parameters: value (of 8 bytes) of each parameter that is not a block of tensor maps, by name.
    addresses: address of each parameter, by name.
    lanes: that execute an instruction together: those of a warp, or of a whole grid.
  """

  kernel: Kernel
  parameters: Mapping[str, int]
  addresses: Mapping[str, int]
  lanes: int = LANES

  def register_kind(self, name: str) -> type[np.generic]:
    """Returns the dtype of a register's lanes."""
    kind = self.kernel.registers.get(name) or self.kernel.registers.get(re.sub(r"\d+$", "", name))
    if kind is None:
      raise PtxError(f"register {name} is not declared")
    if kind == "pred":
      return np.bool_
    return _UNSIGNED[np.dtype(KINDS[kind]).itemsize]

  def fetch(self, operand: Operand, kind: type[np.generic]) -> Fetch:
    """Returns a function that gives an operand's lanes as `kind`."""
    if isinstance(operand, Register):
      name, own = operand.name, self.register_kind(operand.name)
      if np.dtype(own).itemsize != np.dtype(kind).itemsize or (own is np.bool_) != (kind is np.bool_):
        raise PtxError(f"register {name} has {np.dtype(own).itemsize} bytes, not {np.dtype(kind).itemsize}")

      def read(block: Block, warp: Warp) -> np.ndarray:
        try:
          return warp.registers[name]
        except KeyError:
          raise KernelFault(f"register {name} is read before it is written") from None

      return read if own is kind else lambda block, warp: read(block, warp).view(kind)
    if isinstance(operand, Immediate):
      size = np.dtype(kind).itemsize
      value = operand.value & ((1 << 8 * size) - 1) if kind is not np.bool_ else operand.value
      lanes = np.full(self.lanes, value, np.bool_ if kind is np.bool_ else _UNSIGNED[size]).view(kind)
      return lambda block, warp: lanes
    if isinstance(operand, Symbol):
      return self._fetch_symbol(operand.name, kind)
    raise PtxError(f"operand {operand} has no value")

  def fetch_low(self, operand: Operand, kind: type[np.generic]) -> Fetch:
    """As `fetch`; of a register that is wider than `kind`, its low bytes."""
    if not isinstance(operand, Register):
      return self.fetch(operand, kind)
    own, size = self.register_kind(operand.name), np.dtype(kind).itemsize
    if own is np.bool_ or np.dtype(own).itemsize <= size:
      return self.fetch(operand, kind)
    whole = self.fetch(operand, own)
    return lambda block, warp: whole(block, warp).astype(_UNSIGNED[size]).view(kind)

  def _fetch_symbol(self, name: str, kind: type[np.generic]) -> Fetch:
    address = self.addresses.get(name)
    if name in self.kernel.shared:
      address = SharedMemory.START + self.kernel.shared_offsets[name]
    if name in self.kernel.local:
      address = self.kernel.local_offsets[name]
    if address is not None:
      lanes = np.full(self.lanes, address, kind)
      return lambda block, warp: lanes
    axis = {"x": 0, "y": 1, "z": 2}.get(name[-1], -1)
    if name == "%laneid":
      lanes = (np.arange(self.lanes) % LANES).astype(kind)
      return lambda block, warp: lanes
    if name == "%tid.x":
      return lambda block, warp: warp.threads.astype(kind)
    if name in ("%tid.y", "%tid.z"):
      return lambda block, warp: np.zeros(self.lanes, kind)
    if name == "%ntid.x":
      return lambda block, warp: np.full(self.lanes, block.num_threads, kind)
    if name[:-1] == "%ctaid.":
      return lambda block, warp: np.full(self.lanes, block.index[axis], kind)
    if name[:-1] == "%nctaid.":
      return lambda block, warp: np.full(self.lanes, block.launch.grid[axis], kind)
    raise PtxError(f"unknown symbol {name}")

  def fetch_address(self, operand: Operand) -> Fetch:
    """Returns a function that gives the addresses int64[lanes] of [base + offset]."""
    if not isinstance(operand, Address):
      raise PtxError(f"operand {operand} is no address")
    kind = self.register_kind(operand.base.name) if isinstance(operand.base, Register) else np.uint64
    base, offset = self.fetch(operand.base, kind), operand.offset
    if not offset:
      return lambda block, warp: base(block, warp).astype(np.int64)
    return lambda block, warp: base(block, warp).astype(np.int64) + offset


def write(warp: Warp, name: str, values: np.ndarray, mask: np.ndarray) -> None:
  """Writes lanes of a register. Args: values: [lanes] of any dtype of the register's size, or bool."""
  if name == "_":
    return
  if values.dtype.kind in "if":
    values = values.view(_UNSIGNED[values.dtype.itemsize])
  if mask is not warp.full and np.count_nonzero(mask) < mask.size:
    before = warp.registers.get(name)
    values = np.where(mask, values, np.zeros_like(values) if before is None else before)
  warp.registers[name] = values


def names_of(operand: Operand) -> set[str]:
  """Returns the registers in an operand."""
  if isinstance(operand, Register):
    return {operand.name}
  if isinstance(operand, Pair):
    return {operand.first.name, operand.second.name}
  if isinstance(operand, Vector):
    return {part.name for part in operand.parts if isinstance(part, Register)}
  if isinstance(operand, Address):
    parts = (operand.base, *operand.coordinates)
    return {part.name for part in parts if isinstance(part, Register)}
  return set()


def take_register(operand: Operand) -> str:
  if not isinstance(operand, Register):
    raise PtxError(f"operand {operand} is no register")
  return operand.name


def require_whole_warp(warp: Warp, group: Group) -> None:
  """Waits until all lanes of the warp are here, as .aligned and .sync with all lanes require."""
  if not warp.is_whole(group.mask):
    raise Waiting("other lanes of the warp are elsewhere")


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _shift_left(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  bits = a.dtype.itemsize * 8
  return np.where(b >= bits, a.dtype.type(0), a << np.minimum(b, bits - 1).astype(a.dtype))


def _shift_right(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  bits = a.dtype.itemsize * 8
  shifted = a >> np.minimum(b, bits - 1).astype(a.dtype)
  return shifted if a.dtype.kind == "i" else np.where(b >= bits, a.dtype.type(0), shifted)


def fuse(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """Returns a * b + c of f32, rounded once to the nearest f32, ties to even."""
  product = a.astype(np.float64) * b  # exact
  total = product + c
  bits = total.view(np.int64)
  if np.count_nonzero(bits & 0x0FFF_FFFF) != bits.size:  # the middle of two f32, or subnormal ones, has zeros there
    # A sum that was rounded must not seem to lie in the middle of two f32. Rounded to an odd last bit, it never does.
    lost = find_rest(product, c, total)
    inexact = (lost != 0) & np.isfinite(lost) & (bits & 1 == 0)
    total = np.where(inexact, bits + np.where((lost > 0) == (total > 0), 1, -1), bits).view(np.float64)
  return total.astype(np.float32)


def find_rest(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
  """Returns what the rounding of the f64 sum `total` of a and b has left out (Knuth). NaN where the sum is infinite."""
  from_b = total - a
  return a - (total - from_b) + (b - from_b)


def _choose_zeros(
  function: np.ufunc, join: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
  def choose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = _UNSIGNED[a.dtype.itemsize]
    equal = join(a.view(bits), b.view(bits))  # the same number, or zeros of two signs
    return np.where(a == b, equal, function(a, b).view(bits)).view(a.dtype)

  return choose


# min and max of floats, where +0 is more than -0, which numpy leaves open; by name, and whether a NaN stays.
EXTREMES: dict[tuple[str, bool], Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
  ("min", False): _choose_zeros(np.fmin, np.bitwise_or),
  ("max", False): _choose_zeros(np.fmax, np.bitwise_and),
  ("min", True): _choose_zeros(np.minimum, np.bitwise_or),
  ("max", True): _choose_zeros(np.maximum, np.bitwise_and),
}

_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
  "add": np.add,
  "sub": np.subtract,
  "and": np.bitwise_and,
  "or": np.bitwise_or,
  "xor": np.bitwise_xor,
  "min": np.minimum,
  "max": np.maximum,
  "mul": np.multiply,
  "div": np.divide,
}
_UNARY_FLOATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
  "neg": np.negative,
  "abs": np.abs,
  "ex2": np.exp2,
  "lg2": np.log2,
  "rcp": np.reciprocal,
  "sqrt": np.sqrt,
  "rsqrt": lambda a: 1 / np.sqrt(a),
}
_ROUNDING = {"rn", "approx", "ftz", "full", "NaN", "lo"}


def _clamp_below_zero(function: Callable[..., np.ndarray], a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.maximum(function(a, b), 0, dtype=a.dtype)


def _binary(context: Context, instruction: PtxInstruction) -> Body:
  name, kind = instruction.name[0], instruction.name[-1]
  modifiers = set(instruction.name[1:-1])
  is_clamped = (name, kind) in (("min", "s32"), ("max", "s32")) and modifiers == {"relu"}
  if not (is_clamped or modifiers <= _ROUNDING) or kind not in KINDS:
    raise unknown_instruction(instruction)
  dtype, function = KINDS[kind], _BINARY[name]
  if is_clamped:
    function = functools.partial(_clamp_below_zero, function)
  if kind[0] == "f" and name in ("min", "max"):
    function = EXTREMES[name, "NaN" in modifiers]
  target = take_register(instruction.operands[0])
  a, b, *more = (context.fetch(operand, dtype) for operand in instruction.operands[1:])
  if more:  # min and max of three f32
    if name not in ("min", "max") or kind != "f32" or more[1:]:
      raise unknown_instruction(instruction)
    (c,) = more
    return lambda block, warp, group, mask: write(
      warp, target, function(function(a(block, warp), b(block, warp)), c(block, warp)), mask
    )
  return lambda block, warp, group, mask: write(warp, target, function(a(block, warp), b(block, warp)), mask)


def _ternary(context: Context, instruction: PtxInstruction) -> Body:
  dtype = KINDS[instruction.name[-1]]
  if not set(instruction.name[1:-1]) <= _ROUNDING:
    raise unknown_instruction(instruction)
  target = take_register(instruction.operands[0])
  a, b, c = (context.fetch(operand, dtype) for operand in instruction.operands[1:])
  function = fuse if dtype is np.float32 else lambda x, y, z: x * y + z
  return lambda block, warp, group, mask: write(
    warp, target, function(a(block, warp), b(block, warp), c(block, warp)), mask
  )


def _mul(context: Context, instruction: PtxInstruction) -> Body:
  if instruction.name[1:-1] == ("hi",):
    return _mul_high(context, instruction)
  if "wide" not in instruction.name:
    return _binary(context, instruction)
  kind = KINDS[instruction.name[-1]]
  wide = KINDS[f"{instruction.name[-1][0]}{np.dtype(kind).itemsize * 16}"]
  target = take_register(instruction.operands[0])
  a, b = (context.fetch(operand, kind) for operand in instruction.operands[1:])
  return lambda block, warp, group, mask: write(
    warp, target, np.multiply(a(block, warp).astype(wide), b(block, warp).astype(wide)), mask
  )


def _mul_high(context: Context, instruction: PtxInstruction) -> Body:
  kind = KINDS[instruction.name[-1]]
  bits = np.dtype(kind).itemsize * 8
  if bits > 32:
    raise unknown_instruction(instruction)
  wide = KINDS[f"{instruction.name[-1][0]}{2 * bits}"]
  target = take_register(instruction.operands[0])
  a, b = (context.fetch(operand, kind) for operand in instruction.operands[1:])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    product = np.multiply(a(block, warp).astype(wide), b(block, warp).astype(wide))
    write(warp, target, (product >> bits).astype(kind), mask)

  return run


def _unary_float(context: Context, instruction: PtxInstruction) -> Body:
  kind = instruction.name[-1]
  if not set(instruction.name[1:-1]) <= _ROUNDING or kind not in KINDS:
    raise unknown_instruction(instruction)
  function, target = _UNARY_FLOATS[instruction.name[0]], take_register(instruction.operands[0])
  a = context.fetch(instruction.operands[1], KINDS[kind])
  if kind[0] == "f":
    return lambda block, warp, group, mask: write(warp, target, function(a(block, warp)).astype(np.float32), mask)
  return lambda block, warp, group, mask: write(warp, target, function(a(block, warp)), mask)


def _not(context: Context, instruction: PtxInstruction) -> Body:
  target = take_register(instruction.operands[0])
  a = context.fetch(instruction.operands[1], KINDS[instruction.name[-1]])
  return lambda block, warp, group, mask: write(warp, target, ~a(block, warp), mask)


def _shift(context: Context, instruction: PtxInstruction) -> Body:
  target = take_register(instruction.operands[0])
  a = context.fetch(instruction.operands[1], KINDS[instruction.name[-1]])
  b = context.fetch(instruction.operands[2], np.uint32)
  function = _shift_left if instruction.name[0] == "shl" else _shift_right
  return lambda block, warp, group, mask: write(warp, target, function(a(block, warp), b(block, warp)), mask)


def _extract_bits(context: Context, instruction: PtxInstruction) -> Body:
  kind = KINDS[instruction.name[-1]]
  unsigned = _UNSIGNED[np.dtype(kind).itemsize]
  target = take_register(instruction.operands[0])
  a = context.fetch(instruction.operands[1], unsigned)
  start, length = (context.fetch(operand, np.uint32) for operand in instruction.operands[2:])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    size, one = length(block, warp), np.ones(len(mask), unsigned)
    found = _shift_right(a(block, warp), start(block, warp)) & (_shift_left(one, size) - one)
    if np.dtype(kind).kind == "i":  # the field's highest bit is its sign
      sign = _shift_left(one, size - np.uint32(1))
      found = (found ^ sign) - sign
    write(warp, target, found, mask)

  return run


def _permute_bytes(context: Context, instruction: PtxInstruction) -> Body:
  """prmt.b32: of the bytes 0 to 3 of a and 4 to 7 of b, those that four digits of the selector name."""
  if instruction.name[1:] != ("b32",):
    raise unknown_instruction(instruction)
  target = take_register(instruction.operands[0])
  a, b, selector = (context.fetch(operand, np.uint32) for operand in instruction.operands[1:])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    both = np.stack([a(block, warp), b(block, warp)], 1).view(np.uint8)
    digits = selector(block, warp)[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    found = np.take_along_axis(both, (digits & 7).astype(np.int64), 1)
    found = np.where(digits & 8, (found.view(np.int8) >> 7).view(np.uint8), found)  # copies of the byte's sign
    write(warp, target, np.ascontiguousarray(found).view(np.uint32)[:, 0], mask)

  return run


def _select(context: Context, instruction: PtxInstruction) -> Body:
  target = take_register(instruction.operands[0])
  a, b = (context.fetch(operand, KINDS[instruction.name[-1]]) for operand in instruction.operands[1:3])
  chooses = context.fetch(instruction.operands[3], np.bool_)
  return lambda block, warp, group, mask: write(
    warp, target, np.where(chooses(block, warp), a(block, warp), b(block, warp)), mask
  )


def _move(context: Context, instruction: PtxInstruction) -> Body:
  target, source = instruction.operands
  kind = KINDS[instruction.name[-1]]
  if isinstance(source, Vector):  # {low, high} becomes one register
    part = _UNSIGNED[np.dtype(kind).itemsize // len(source.parts)]
    parts, name = [context.fetch(each, part) for each in source.parts], take_register(target)

    def pack(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      write(warp, name, np.stack([each(block, warp) for each in parts], 1).view(kind).reshape(-1), mask)

    return pack
  if isinstance(target, Vector):
    part = _UNSIGNED[np.dtype(kind).itemsize // len(target.parts)]
    names, whole = [take_register(each) for each in target.parts], context.fetch(source, kind)

    def unpack(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      for name, value in zip(names, whole(block, warp).view(part).reshape(len(mask), -1).T, strict=True):
        write(warp, name, np.ascontiguousarray(value), mask)

    return unpack
  name, value = take_register(target), context.fetch(source, kind)
  return lambda block, warp, group, mask: write(warp, name, value(block, warp).copy(), mask)


def _convert(context: Context, instruction: PtxInstruction) -> Body:
  target, modifiers = take_register(instruction.operands[0]), instruction.name[1:]
  if modifiers in (("rn", "bf16x2", "f32"), ("rn", "f16x2", "f32")):
    high, low = (context.fetch(operand, np.float32) for operand in instruction.operands[1:])
    rounded = f32_to_bf16 if modifiers[1] == "bf16x2" else f32_to_f16

    def pack(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      upper = rounded(high(block, warp)).astype(np.uint32) << 16
      write(warp, target, upper | rounded(low(block, warp)), mask)

    return pack
  if modifiers == ("rn", "bf16", "f32"):
    a = context.fetch(instruction.operands[1], np.float32)
    return lambda block, warp, group, mask: write(warp, target, f32_to_bf16(a(block, warp)), mask)
  if modifiers == ("f32", "bf16"):
    a = context.fetch(instruction.operands[1], np.uint16)
    return lambda block, warp, group, mask: write(warp, target, bf16_to_f32(a(block, warp)), mask)
  if modifiers == ("rn", "satfinite", "e4m3x2", "f32"):
    high, low = (context.fetch(operand, np.float32) for operand in instruction.operands[1:])

    def narrow(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
      upper = f32_to_e4m3(high(block, warp)).astype(np.uint16) << 8
      write(warp, target, upper | f32_to_e4m3(low(block, warp)), mask)

    return narrow
  if modifiers == ("rn", "f16x2", "e4m3x2"):
    pair = context.fetch(instruction.operands[1], np.uint16)
    return lambda block, warp, group, mask: write(
      warp, target, e4m3_to_f16(pair(block, warp).view(np.uint8)).view(np.uint32), mask
    )
  if modifiers == ("f32", "f16"):
    half = context.fetch(instruction.operands[1], np.uint16)
    return lambda block, warp, group, mask: write(
      warp, target, half(block, warp).view(np.float16).astype(np.float32), mask
    )
  to, source = modifiers[-2:]
  rounding = modifiers[:-2]
  if to not in KINDS or source not in KINDS or rounding not in ((), ("rn",)):
    raise unknown_instruction(instruction)
  floats = np.dtype(KINDS[to]).kind == "f", np.dtype(KINDS[source]).kind == "f"
  if any(floats) and (not floats[0] or rounding != ("rn",)):  # no kernel rounds to integers
    raise unknown_instruction(instruction)
  a = context.fetch(instruction.operands[1], KINDS[source])
  return lambda block, warp, group, mask: write(warp, target, a(block, warp).astype(KINDS[to]), mask)


def _convert_address(context: Context, instruction: PtxInstruction) -> Body:
  if instruction.name[1:] not in (("to", "global", "u64"), ("global", "u64"), ("param", "u64"), ("local", "u64")):
    raise unknown_instruction(instruction)
  target, a = take_register(instruction.operands[0]), context.fetch(instruction.operands[1], np.uint64)
  return lambda block, warp, group, mask: write(warp, target, a(block, warp).copy(), mask)


# --- between lanes ----------------------------------------------------------------------------------------------------


def _elect(context: Context, instruction: PtxInstruction) -> Body:
  target, members = instruction.operands
  if not isinstance(target, Pair) or members != Immediate(-1):
    raise unknown_instruction(instruction)

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    require_whole_warp(warp, group)
    leader = int(np.flatnonzero(mask)[0])
    write(warp, target.first.name, np.full(LANES, leader, np.uint32), mask)
    write(warp, target.second.name, np.isin(_LANE, leader), mask)

  return run


def _shuffle(context: Context, instruction: PtxInstruction) -> Body:
  how = instruction.name[2]
  target, value, lane, clamp, members = instruction.operands
  source_of, limit = _SHUFFLES.get(how, (None, 0))
  if source_of is None or clamp != Immediate(limit) or members != Immediate(-1) or isinstance(target, Pair):
    raise unknown_instruction(instruction)
  a, b, name = context.fetch(value, np.uint32), context.fetch(lane, np.uint32), take_register(target)
  lanes = np.arange(context.lanes)
  own, first = lanes % LANES, lanes // LANES * LANES

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    require_whole_warp(warp, group)
    source = source_of(own, b(block, warp).astype(np.int64) & 31)
    source = first + np.where((source >= 0) & (source < LANES), source, own)
    # What a lane reads from one that does not take part is undefined.
    write(warp, name, np.where(mask[source], a(block, warp)[source], np.uint32(0xFFFFFFFF)), mask)

  return run


# --- memory -----------------------------------------------------------------------------------------------------------


def _access(instruction: PtxInstruction) -> tuple[str, int, type[np.generic]]:
  """Returns the state space, the number of registers and their dtype of a load or store."""
  words = [word for word in instruction.name[1:] if word not in _HINTS]
  kind = KINDS[words.pop()]
  count = _VECTORS[words.pop()] if words and words[-1] in _VECTORS else 1
  space = words[0].split("::")[0] if words else "generic"
  if words[1:] or space not in ("global", "shared", "param", "local", "generic"):
    raise unknown_instruction(instruction)
  return space, count, kind


def _widen(kind: type[np.generic], register: type[np.generic]) -> type[np.generic]:
  """Returns the dtype of a value of `kind` in a register that may be wider."""
  size = np.dtype(register).itemsize
  return kind if size == np.dtype(kind).itemsize else KINDS[f"{'s' if np.dtype(kind).kind == 'i' else 'u'}{8 * size}"]


def _registers(operand: Operand) -> list[str]:
  return [take_register(part) for part in operand.parts] if isinstance(operand, Vector) else [take_register(operand)]


def _load(context: Context, instruction: PtxInstruction) -> Body:
  space, count, kind = _access(instruction)
  size = np.dtype(kind).itemsize
  targets = _registers(instruction.operands[0])
  widths = [_widen(kind, context.register_kind(name)) for name in targets]
  if space == "param":
    address = instruction.operands[1]
    if not isinstance(address, Address) or not isinstance(address.base, Symbol) or address.offset or count != 1:
      raise unknown_instruction(instruction)
    lanes = np.full(context.lanes, context.parameters[address.base.name], kind)
    return lambda block, warp, group, mask: write(warp, targets[0], lanes.copy(), mask)
  where = context.fetch_address(instruction.operands[1])

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    addresses = where(block, warp)[mask]
    if space == "shared":
      offsets = block.locate_shared(addresses, mask, size * count)
      block.shadow.note_read(warp.agent, offsets.reshape(-1))
      found = block.shared.data[offsets]
    elif space == "local":
      found = warp.read_local(addresses, size * count, mask, context.kernel.local_bytes)
    else:
      found = block.launch.memory.read(addresses, size * count, block.serials(mask))
    values = np.zeros((len(mask), count), kind)
    values[mask] = found.view(kind)
    for number, name in enumerate(targets):
      write(warp, name, values[:, number].astype(widths[number]), mask)

  return run


def _store(context: Context, instruction: PtxInstruction) -> Body:
  space, count, kind = _access(instruction)
  size = np.dtype(kind).itemsize
  where, source = context.fetch_address(instruction.operands[0]), instruction.operands[1]
  parts = source.parts if isinstance(source, Vector) else (source,)
  values = [context.fetch_low(part, kind) for part in parts]

  def run(block: Block, warp: Warp, group: Group, mask: np.ndarray) -> None:
    addresses = where(block, warp)[mask]
    data = np.stack([value(block, warp) for value in values], 1)[mask].view(np.uint8).reshape(len(addresses), -1)
    if space == "shared":
      offsets = block.locate_shared(addresses, mask, size * count)
      write_shared(block, warp, offsets, data)
    elif space == "local":
      warp.write_local(addresses, data, mask, context.kernel.local_bytes)
    else:
      block.launch.memory.write(addresses, data, block.serials(mask))

  return run


def write_shared(block: Block, warp: Warp, offsets: np.ndarray, data: np.ndarray) -> None:
  """Writes bytes of shared memory through the generic proxy, with its checks."""
  if block.launch.allows_equal_writes:
    changed = block.shared.data[offsets] != data
    offsets, data = offsets[changed], data[changed]
  block.shadow.note_write(warp.agent, offsets.reshape(-1))
  block.shared.data[offsets] = data
  stored = block.shared.data[offsets]
  if not np.array_equal(stored, data) and not (data.shape[1] == 4 and _differ_in_nans(stored, data)):
    raise KernelFault("two lanes write different values to a byte of shared memory")


def _differ_in_nans(one: np.ndarray, other: np.ndarray) -> bool:
  """Whether words, uint8[n, 4], are the same but for the bits of NaNs: a GPU makes one NaN, this CPU several."""
  are_nan = np.isnan(one.view(np.float32)) & np.isnan(other.view(np.float32))
  return bool((are_nan | (one.view(np.uint32) == other.view(np.uint32))).all())


# --- control ----------------------------------------------------------------------------------------------------------


def _end_warp(context: Context, instruction: PtxInstruction) -> Execute:
  def run(block: Block, warp: Warp, group: Group) -> None:
    ends = group.mask & guard(block, warp)
    if warp.locked:
      raise KernelFault("the kernel ends before wgmma.wait_group, or tcgen05.wait::ld")
    if any(not operation.is_read for each in (*warp.committed, warp.uncommitted) for operation in each):
      raise KernelFault("the kernel ends before its bulk copies have read shared memory (cp.async.bulk.wait_group)")
    group.mask = group.mask & ~ends
    group.pc += 1
    warp.groups = [each for each in warp.groups if each.mask.any()]

  guard = _guard(context, instruction)
  return run


def _branch(context: Context, instruction: PtxInstruction) -> Execute:
  target = instruction.operands[0]
  if not isinstance(target, Symbol) or target.name not in context.kernel.labels:
    raise PtxError(f"line {instruction.line}: unknown label: {instruction.text}")
  goal, guard = context.kernel.labels[target.name], _guard(context, instruction)

  def run(block: Block, warp: Warp, group: Group) -> None:
    goes = group.mask if instruction.guard is None else group.mask & guard(block, warp)
    count = np.count_nonzero(goes)
    if not count:
      group.pc += 1
    elif count == np.count_nonzero(group.mask):
      group.pc = goal
    else:
      warp.groups.append(Group(goal, goes))
      group.mask = group.mask & ~goes
      group.pc += 1

  return run


def _guard(context: Context, instruction: PtxInstruction) -> Fetch:
  if instruction.guard is None:
    lanes = np.ones(context.lanes, np.bool_)
    return lambda block, warp: lanes
  value = context.fetch(instruction.guard, np.bool_)
  return (lambda block, warp: ~value(block, warp)) if instruction.negated else value


def _nothing(context: Context, instruction: PtxInstruction) -> Body:
  return lambda block, warp, group, mask: None


def unknown_instruction(instruction: PtxInstruction) -> PtxError:
  return PtxError(
    f"line {instruction.line}: the emulator does not know {'.'.join(instruction.name)}: {instruction.text[:200]}"
  )


TRANSLATORS: dict[str, Callable[[Context, PtxInstruction], Body]] = {
  **dict.fromkeys(("add", "sub", "and", "or", "xor", "min", "max", "div"), _binary),
  **dict.fromkeys(("fma", "mad"), _ternary),
  "mul": _mul,
  **dict.fromkeys(_UNARY_FLOATS, _unary_float),
  "not": _not,
  "shl": _shift,
  "shr": _shift,
  "bfe": _extract_bits,
  "prmt": _permute_bytes,
  "selp": _select,
  "mov": _move,
  "cvt": _convert,
  "cvta": _convert_address,
  "elect": _elect,
  "shfl": _shuffle,
  "ld": _load,
  "st": _store,
}
CONTROL: dict[str, Callable[[Context, PtxInstruction], Execute]] = {"bra": _branch, "ret": _end_warp, "exit": _end_warp}


def wrap(context: Context, instruction: PtxInstruction, body: Body, keeps: bool = False) -> Execute:
  """Returns the whole step of an instruction: its guard, the registers that are held, and the next instruction.

  Args: keeps: the instruction may use registers that wgmma holds.
  """
  guard = None if instruction.guard is None else _guard(context, instruction)
  names = (
    frozenset().union(*(names_of(operand) for operand in instruction.operands)) if instruction.operands else frozenset()
  )
  has_target = bool(instruction.operands) and instruction.name[0] not in (
    "st",
    "stmatrix",
    "cp",
    "bar",
    "prefetch",
    "wgmma",
  )
  written = frozenset(names_of(instruction.operands[0])) if has_target else frozenset()

  def run(block: Block, warp: Warp, group: Group) -> None:
    mask = group.mask if guard is None else group.mask & guard(block, warp)
    if guard is None or np.count_nonzero(mask):
      if warp.locked and not keeps and not names.isdisjoint(warp.locked):
        name = sorted(names & warp.locked.keys())[0]
        is_load = "tcgen05" in warp.locked[name].text
        what, wait = ("load from tensor memory", "tcgen05.wait::ld") if is_load else ("wgmma", "wgmma.wait_group")
        raise KernelFault(f"register {name} is used while a {what} runs; {wait} comes first")
      body(block, warp, group, mask)
      warp.dirty |= written
    group.pc += 1

  return run
