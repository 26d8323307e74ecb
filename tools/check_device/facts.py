"""Reads facts about compiled programs from the compilers' texts. Pure: compiles and judges nothing.

The texts are optimized HLO (`compiled.as_text()`), XLA:GPU's thunk sequence (the launches in order; --xla_dump_to
dumps it) and ptxas's output for a Mosaic GPU kernel (MOSAIC_GPU_DUMP_PTXAS=1).
"""

from collections.abc import Collection, Sequence
import dataclasses
import math
import re

# Opcodes that compute nothing: a program of these alone only moves values.
_MOVES = frozenset(
  "parameter constant bitcast copy copy-start transpose reshape convert slice dynamic-slice pad concatenate reverse "
  "broadcast tuple get-tuple-element gather iota".split()
)
_FREE = frozenset("parameter constant bitcast tuple get-tuple-element broadcast iota".split())
# These write into their operand, or pass on another's result; if one may not, XLA inserts a copy before it.
_IN_PLACE = frozenset(
  "scatter dynamic-update-slice custom-call while conditional call async-start async-done opt-barrier copy-done".split()
)
_CONTAINERS = frozenset("kCommandBuffer kSequential kWhile kConditional".split())

_DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "f8e4m3fn": 1, "s4": 0.5}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_SORT = re.compile(
  r'^\s+(?:ROOT )?%?([\w.\-]+) = .*(?: (?:sort|topk|while)\(|custom_call_target="[^"]*(?:TopK|[Ss]ort)[^"]*")', re.M
)
_BODY = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+) ", re.MULTILINE)
_COLLECTIVES = frozenset("all-reduce all-gather all-to-all reduce-scatter collective-permute".split())
_THUNK = re.compile(r"^( *)(\d+): (k\w+)")
_NARROW = ("s8", "u8", "f8e4m3fn", "s4")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One HLO instruction.

  Attributes:
    opcode: such as "fusion"; a TPU's custom call that joins slices of an array is a "concatenate".
    arrays: (dtype, elements, layout) of each array of the result.
    calls: the computation of a fusion, or "".
    bodies: all computations that it runs or reduces with.
    origin: its place in the Python program, or "".
    text: the line, without what follows the operands.
  """

  name: str
  opcode: str
  arrays: tuple[tuple[str, int, str], ...]
  calls: str
  bodies: tuple[str, ...]
  origin: str
  text: str


def _closing(text: str, start: int) -> int:
  """Returns the index behind the bracket that closes the one at `start`."""
  depth = 0
  for index in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[index], 0)
    if not depth:
      return index + 1
  return len(text)


def computations(hlo: str) -> dict[str, list[Instruction]]:
  """Returns a module's computations: name -> instructions."""
  found: dict[str, list[Instruction]] = {}
  current: list[Instruction] | None = None
  for line in hlo.splitlines():
    if head := _COMPUTATION.match(line):
      current = found.setdefault(head[1], [])
    elif line.startswith("}"):
      current = None
    elif current is not None and (match := _INSTRUCTION.match(line)):
      start = match.end()
      end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
      opcode = _OPCODE.match(line, end)
      if opcode is None:
        continue
      arrays = tuple(
        (dtype, math.prod(int(extent) for extent in shape.split(",") if extent), layout)
        for dtype, shape, layout in _ARRAY.findall(line[start:end])
      )
      calls = re.search(r"calls=%?([\w.\-]+)", line)
      bodies = _BODY.findall(line, opcode.end())
      bodies += [name for names in _BRANCHES.findall(line, opcode.end()) for name in re.findall(r"[\w.\-]+", names)]
      text = line[match.start(1) : _closing(line, opcode.end() - 1)]
      origin = re.search(r'metadata=\{[^}]*?op_name="([^"]*)"', line)
      current.append(
        Instruction(
          name=match[1],
          opcode="concatenate" if 'custom_call_target="ConcatBitcast"' in line else opcode[1],
          arrays=arrays,
          calls=calls[1] if calls else "",
          bodies=tuple(bodies),
          origin=origin[1] if origin else "",
          text=text,
        )
      )
  return found


def moved(
  hlo: str, kv_sizes: Collection[int], weight_sizes: Collection[int], whole_sizes: Collection[int] = ()
) -> list[str]:
  """Returns instructions that make a new array as large as a KV buffer or a weight instead of using the old one.

  For a KV buffer's size: every instruction that is not known to write in place. For a weight's size: instructions that
  only move values; a fusion is judged by its parts, since an activation may have a weight's size. A new array in a
  TPU's vector memory (space 1 of its layout; 3 is a v4's CMEM) is a prefetch, as a TPU reads weights. For the size of a
  weight that is split over devices: instructions that gather it, also inside a fusion. Weights are bf16 or have 8
  bits, and logits, which are f32, may have the size of one.

  Args:
    hlo: the module's text.
    kv_sizes, weight_sizes: elements on one device.
    whole_sizes: elements of the weights on all devices together.
  """
  module = computations(hlo)
  fused = {one.calls for body in module.values() for one in body if one.opcode == "fusion"}
  found = []
  for name, body in module.items():
    for one in body:
      if one.opcode.startswith("all-gather") and any(size in whole_sizes for _, size, _ in one.arrays):
        found.append(one.text)
      if name in fused:
        continue
      opcodes = {inner.opcode for inner in module.get(one.calls, ())} or {one.opcode}
      moves = opcodes <= _MOVES and not opcodes <= _FREE
      replaces = not opcodes & _IN_PLACE and not opcodes <= _FREE
      arrays = one.arrays[:1] if one.opcode == "copy-start" else one.arrays
      if (replaces and any(size in kv_sizes for _, size, _ in arrays)) or (
        moves
        and any(
          size in weight_sizes
          and not re.search(r"S\([13]\)", layout)
          and (dtype in ("bf16", "f16", *_NARROW) or "convert" in opcodes)
          for dtype, size, layout in arrays
        )
      ):
        found.append(one.text)
  return found


def operand_types(hlo: str) -> list[str]:
  """Returns the dtypes of each product's operands, such as "s8 x s8", in fusions and in the library's f8 matmul."""
  found = ["f8e4m3fn x f8e4m3fn"] * hlo.count('custom_call_target="__cublas$lt$matmul$f8"')
  for body in computations(hlo).values():
    types = {one.name: one.arrays[0][0] for one in body if one.arrays}
    for one in body:
      if one.opcode in ("dot", "convolution"):
        names = re.findall(r"%?([\w.\-]+)[,)]", one.text[one.text.index(f" {one.opcode}(") :])[:2]
        found.append(" x ".join(types.get(name, "?") for name in names))
  return found


def widened(hlo: str, weight_sizes: Collection[int]) -> list[str]:
  """Returns instructions that make an array of 16 or 32 bits as large as a weight from one of 8 or 4 bits.

  A matmul may widen a weight inside of its own fusion. Args: weight_sizes: elements of weights on one device.
  """
  module = computations(hlo)
  fused = {one.calls for body in module.values() for one in body if one.opcode == "fusion"}
  found = []
  for name, body in module.items():
    for one in body if name not in fused else ():
      inner = module.get(one.calls, [])
      takes = any(dtype in _NARROW for part in inner if part.opcode == "parameter" for dtype, _, _ in part.arrays)
      multiplies = any(part.opcode in ("dot", "convolution") or part.calls for part in inner)
      makes = any(dtype in ("bf16", "f16", "f32") and size in weight_sizes for dtype, size, _ in one.arrays)
      if makes and takes and not multiplies:
        found.append(one.text)
  return found


@dataclasses.dataclass(frozen=True)
class Collective:
  """An operation in which all devices take part.

  Attributes:
    opcode: such as "all-reduce".
    elements: of the largest array of its result.
    is_conditional: only some steps execute it.
  """

  opcode: str
  elements: int
  is_conditional: bool


def collectives(hlo: str) -> list[Collective]:
  """Returns the collective operations that one execution of a module may execute, calls of one computation each."""
  module, entry = computations(hlo), _ENTRY.search(hlo)
  assert entry is not None, "the text has no ENTRY"
  found = []

  def visit(name: str, is_conditional: bool) -> None:
    for one in module.get(name, ()):
      opcode = one.opcode.removesuffix("-start")
      if opcode in _COLLECTIVES:
        found.append(Collective(opcode, max((size for _, size, _ in one.arrays), default=0), is_conditional))
      else:
        for body in one.bodies:
          visit(body, is_conditional or one.opcode == "conditional")

  visit(entry[1], False)
  return found


def sorts_and_loops(hlo: str) -> list[str]:
  """Returns names of instructions that sort, pick the largest by a library, or loop; the sampler needs none."""
  return _SORT.findall(hlo)


def matmuls(hlo: str) -> list[str]:
  """Returns how each matmul is done: by XLA's kernel, with tile, stages and warps; by a library; or "dot" as it is."""
  fused = set(re.findall(r"fusion\(.*?calls=%?([\w.\-]+)", hlo))
  found = []
  for name, body in computations(hlo).items():
    found += ["dot" for one in body if one.opcode == "dot" and name not in fused]
  for line in hlo.splitlines():
    if '"kind":"__triton_nested_gemm_fusion"' in line or '"kind":"__triton_gemm"' in line:
      sizes = re.search(r'"output_tiles":\[\{"sizes":\[([^\]]*)\]', line)
      stages, warps = (re.search(rf'"{word}":"?(\d+)', line) for word in ("num_stages", "num_warps"))
      tile = "?" if sizes is None else "x".join(size for size in re.findall(r"\d+", sizes[1]) if size != "1")
      found.append(f"triton {tile}, {stages and stages[1]} stages, {warps and warps[1]} warps")
    elif library := re.search(r'custom_call_target="(__cu[\w$]*(?:gemm|matmul)[\w$]*)"', line):
      found.append(library[1])
  return found


def aliased(hlo: str) -> list[int]:
  """Returns the numbers of the arguments that a result replaces in place, in ascending order."""
  head = hlo.split("entry_computation_layout", 1)[0]
  return sorted(int(number) for number in re.findall(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, \w+-alias\)", head))


def argument_bytes(hlo: str) -> list[int]:
  """Returns the bytes of each of the program's arguments on one device, including padding by a TPU's tiles.

  The tile of a layout such as {1,0:T(8,128)(2,1)} rounds up the two dimensions that come first in it; a second tile
  only orders the inside of the first.
  """
  types = hlo.split("entry_computation_layout={(", 1)[1].split(")->", 1)[0]
  found = []
  for dtype, shape, layout in _ARRAY.findall(types):
    extents = [int(extent) for extent in shape.split(",") if extent]
    minor_to_major = [int(axis) for axis in re.findall(r"\d+", layout.split(":")[0])]
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile:
      for axis, size in zip(minor_to_major, reversed([int(size) for size in tile[1].split(",")]), strict=False):
        extents[axis] = -(-extents[axis] // size) * size
    found.append(int(math.prod(extents) * _DTYPE_BYTES[dtype]))
  return found


@dataclasses.dataclass(frozen=True)
class Thunk:
  """One line of a thunk sequence.

  Attributes:
    number: as printed.
    depth: its indentation in columns; 0 is the step itself.
    kind: such as "kCommandBuffer".
  """

  number: int
  depth: int
  kind: str


def thunks(text: str) -> list[Thunk]:
  """Returns the lines of a thunk sequence, in order."""
  return [
    Thunk(int(match[2]), len(match[1]), match[3])
    for match in (_THUNK.match(line) for line in text.splitlines())
    if match is not None
  ]


def thunk_names(metadata: str) -> dict[int, str]:
  """Returns the HLO instruction of each thunk by its number, from XLA's thunk metadata."""
  found = {}
  for block in metadata.split("thunk_metadata {")[1:]:
    name, number = re.search(r'profile_annotation: "([^"]*)"', block), re.search(r"thunk_id: (\d+)", block)
    if name and number:
      found[int(number[1])] = name[1]
  return found


def origins(hlo: str) -> dict[str, str]:
  """Maps each instruction to its place in the Python program; a fusion without one gets those of its parts."""
  module = computations(hlo)
  return {
    one.name: one.origin or next((inner.origin for inner in reversed(module.get(one.calls, ())) if inner.origin), "")
    for body in module.values()
    for one in body
  }


def launches(sequence: Sequence[Thunk]) -> list[Thunk]:
  """Returns the launches on the device: kernels, copies, library calls. A loop's body counts once, and every branch.

  A call on slices of its operands (kDynamicSliceFusion) is one launch: its own line follows, indented.
  """
  found, inside = [], None
  for thunk in sequence:
    if inside is not None and thunk.depth > inside:
      continue
    inside = thunk.depth if thunk.kind == "kDynamicSliceFusion" else None
    if thunk.kind not in _CONTAINERS:
      found.append(thunk)
  return found


@dataclasses.dataclass(frozen=True)
class KernelUse:
  """ptxas's figures of a kernel: registers a thread, bytes spilled (stores and loads)."""

  name: str
  registers: int
  spill_bytes: int


def kernel_uses(ptxas: str) -> list[KernelUse]:
  """Returns every kernel that ptxas reported on, in order."""
  found = []
  for part in ptxas.split("Compiling entry function ")[1:]:
    name = re.match(r"'([^']+)'", part)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
    registers = re.search(r"Used (\d+) registers", part)
    if not (name and spills and registers):
      raise ValueError(f"ptxas printed an unknown line: {part[:200]!r}")
    found.append(KernelUse(name[1], int(registers[1]), int(spills[1]) + int(spills[2])))
  return found
