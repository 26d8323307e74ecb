"""Reads the text of a PTX kernel as LLVM's NVPTX back end and Mosaic GPU write it. May not execute anything.

It knows the syntax, and no instruction: which opcodes exist is the machine's business. Scopes in braces, which inline
assembly opens, may declare registers and labels of their own; these get the number of the scope behind their names.
"""

from collections.abc import Mapping
import dataclasses
import re

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.DOTALL)
_PARAM = re.compile(r"\.param\s+((?:\.\w+\s+|\d+\s+)*)([\w$]+)(?:\[(\d+)\])?")
_LABEL = re.compile(r"([\w$%]+):(?!:)\s*")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_ARRAY = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)(?:\[(\d*)\])?")
_DYNAMIC = re.compile(r"^\s*\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\]", re.MULTILINE)
_ADDRESS = re.compile(r"(.*?)(?:\s*([+-])\s*(-?\d+))?")
_SIZES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8, "f64": 8}


class PtxError(ValueError):
  """Text that this reader does not know. Names the line."""


@dataclasses.dataclass(frozen=True)
class Register:
  """A register, or a predicate."""

  name: str


@dataclasses.dataclass(frozen=True)
class Symbol:
  """A name that is no register: a parameter, a shared variable, a label, or a special register such as %tid.x."""

  name: str


@dataclasses.dataclass(frozen=True)
class Immediate:
  """A constant. Floats are their bits.

  Attributes:
    value: of any size; negative as written.
  """

  value: int


@dataclasses.dataclass(frozen=True)
class Address:
  """[base + offset], or [base, {coordinates}] of a tensor map."""

  base: "Register | Symbol | Immediate"
  offset: int = 0
  coordinates: tuple["Register | Immediate", ...] = ()


@dataclasses.dataclass(frozen=True)
class Vector:
  """{a, b, ...}"""

  parts: tuple["Register | Immediate", ...]


@dataclasses.dataclass(frozen=True)
class Pair:
  """value|predicate, the two results of an instruction."""

  first: Register
  second: Register


Operand = Register | Symbol | Immediate | Address | Vector | Pair


@dataclasses.dataclass(frozen=True)
class PtxInstruction:
  """One statement.

  Attributes:
    name: the opcode with its modifiers, such as ("add", "s32").
    operands: in the order of the text.
    guard: the predicate that a lane needs to take part; None: all do.
    negated: lanes without the predicate take part.
    line: in the text, from 1.
    text: as written, for errors.
  """

  name: tuple[str, ...]
  operands: tuple[Operand, ...]
  guard: Register | None
  negated: bool
  line: int
  text: str


@dataclasses.dataclass(frozen=True)
class Parameter:
  """A kernel's parameter.

  Attributes:
    size: bytes.
    align: bytes.
    is_pointer: the parameter is an address in global memory.
  """

  name: str
  size: int
  align: int
  is_pointer: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A kernel.

  Attributes:
    name: of the entry.
    parameters: in order.
    threads: of a block.
    instructions: in order, without declarations.
    labels: name -> index of the instruction behind it.
    shared: name -> bytes of a shared variable; 0 for dynamic shared memory.
    shared_offsets: name -> where it begins; dynamic shared memory is behind all others.
    local: name -> bytes of an array that each thread has.
    local_offsets: name -> where it begins.
    registers: type by register, such as "b32"; those of the kernel declared as a range (%r<9>) by their prefix ("%r").
  """

  name: str
  parameters: tuple[Parameter, ...]
  threads: int
  instructions: tuple[PtxInstruction, ...]
  labels: Mapping[str, int]
  shared: Mapping[str, int]
  shared_offsets: Mapping[str, int]
  local: Mapping[str, int]
  local_offsets: Mapping[str, int]
  registers: Mapping[str, str]

  @property
  def shared_bytes(self) -> int:
    """Bytes of shared memory in front of the dynamic part."""
    return max((offset + self.shared[name] for name, offset in self.shared_offsets.items()), default=0)

  @property
  def local_bytes(self) -> int:
    """Bytes of local memory of a thread."""
    return max((offset + self.local[name] for name, offset in self.local_offsets.items()), default=0)


def read_kernels(text: str) -> list[Kernel]:
  """Returns the kernels of a module. Raises PtxError."""
  text = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
  kernels = []
  for found in _ENTRY.finditer(text):
    kernels.append(_read_kernel(text, found))
  if not kernels:
    raise PtxError("the text has no '.visible .entry'")
  return kernels


def _read_kernel(text: str, head: re.Match[str]) -> Kernel:
  threads = re.search(r"\.(?:max|req)ntid\s+([\d,\s]+)", head[3])
  if threads is None:
    raise PtxError(f"kernel {head[1]} has no .maxntid or .reqntid")
  count = 1
  for size in threads[1].split(","):
    count *= int(size)
  body = _Body(text, head.end())
  body.read()
  # An array lies at a multiple of its alignment behind those before it; what has no size is the dynamic part.
  shared = {name: size for name, (size, _) in body.shared.items()} | dict.fromkeys(_DYNAMIC.findall(text), 0)
  sized = {name: array for name, array in body.shared.items() if array[0]}
  end = -(-sum(-(-size // align) * align for size, align in sized.values()) // 1024) * 1024
  shared_offsets = {name: end for name, size in shared.items() if not size} | _place_arrays(sized)
  return Kernel(
    head[1],
    tuple(_read_parameter(each) for each in head[2].split(",") if each.strip()),
    count,
    tuple(body.instructions),
    body.labels,
    shared,
    shared_offsets,
    {name: size for name, (size, _) in body.local.items()},
    _place_arrays(body.local),
    body.registers,
  )


def _place_arrays(arrays: Mapping[str, tuple[int, int]]) -> dict[str, int]:
  """Returns the offset of each array. Args: arrays: bytes and alignment by name."""
  found, end = {}, 0
  for name, (size, align) in arrays.items():
    found[name] = -(-end // align) * align
    end = found[name] + size
  return found


def _read_parameter(text: str) -> Parameter:
  found = _PARAM.search(text)
  if found is None:
    raise PtxError(f"unknown parameter: {text.strip()}")
  words = found[1].replace(".", " ").split()
  kind = next((word for word in words if word in _SIZES), None)
  if kind is None:
    raise PtxError(f"unknown type of a parameter: {text.strip()}")
  size = _SIZES[kind] * int(found[3] or 1)
  align = int(words[words.index("align") + 1]) if "align" in words and "ptr" not in words else _SIZES[kind]
  return Parameter(found[2], size, align, "ptr" in words)


class _Body:
  """Reads the statements between a kernel's braces."""

  def __init__(self, text: str, start: int):
    self._text, self._at = text, start
    self._scopes: list[tuple[int, set[str]]] = [(0, set())]  # number, and names declared in it
    self._num_scopes = 0
    self.instructions: list[PtxInstruction] = []
    self.labels: dict[str, int] = {}
    self.shared: dict[str, tuple[int, int]] = {}  # bytes and alignment
    self.local: dict[str, tuple[int, int]] = {}
    self.registers: dict[str, str] = {}

  def read(self) -> None:
    while self._scopes:
      self._skip_space()
      rest = self._text[self._at :]
      if not rest:
        raise PtxError("the text ends within a kernel")
      if rest[0] == "{":
        self._open_scope()
      elif rest[0] == "}":
        self._scopes.pop()
        self._at += 1
      elif rest.startswith((".loc ", ".loc\t", ".pragma", ".file", ".section")):
        self._at += rest.index("\n")
      elif label := _LABEL.match(rest):
        self.labels[self._resolve(label[1])] = len(self.instructions)
        self._at += label.end()
      else:
        self._read_statement()

  def _skip_space(self) -> None:
    while self._at < len(self._text) and self._text[self._at] in " \t\r\n;":
      self._at += 1

  def _open_scope(self) -> None:
    """Opens a scope; finds the labels that it declares, because a branch may come before its label."""
    self._at += 1
    self._num_scopes += 1
    depth, end = 1, self._at
    while depth:
      depth += {"{": 1, "}": -1}.get(self._text[end], 0)
      end += 1
    inside = self._text[self._at : end]
    names = {found[1] for found in re.finditer(r"(?:^|[;{]|\n)\s*([\w$]+):(?!:)", inside)}
    self._scopes.append((self._num_scopes, names))

  def _resolve(self, name: str) -> str:
    for number, names in reversed(self._scopes):
      if name in names and number:
        return f"{name}#{number}"
    return name

  def _read_statement(self) -> None:
    end = self._text.find(";", self._at)
    if end < 0:
      raise PtxError(f"line {self._line()}: a statement without ';'")
    text = " ".join(self._text[self._at : end].split())
    line = self._line()
    self._at = end + 1
    if text.startswith(".reg"):
      self._declare_registers(text, line)
    elif text.startswith((".shared", ".local")):
      found = _ARRAY.match(text)
      if found is None:
        raise PtxError(f"line {line}: unknown declaration: {text}")
      (self.shared if found[1] == "shared" else self.local)[found[3]] = int(found[4] or 0), int(found[2])
    elif text.startswith("."):
      raise PtxError(f"line {line}: unknown directive: {text}")
    elif text:
      self.instructions.append(self._read_instruction(text, line))

  def _line(self) -> int:
    return self._text.count("\n", 0, self._at) + 1

  def _declare_registers(self, text: str, line: int) -> None:
    found = _REGISTERS.match(text)
    if found is None:
      raise PtxError(f"line {line}: unknown declaration: {text}")
    number, names = self._scopes[-1]
    for declared in found[2].split(","):
      name, _, count = declared.strip().removesuffix(">").partition("<")
      for each in [f"{name}{index}" for index in range(int(count))] if count and number else [name]:
        names.add(each)
        self.registers[self._resolve(each)] = found[1]

  def _read_instruction(self, text: str, line: int) -> PtxInstruction:
    guard, negated, rest = None, False, text
    if found := _GUARD.match(rest):
      guard, negated = Register(self._resolve(found[2])), bool(found[1])
      rest = rest[found.end() :]
    name, _, rest = rest.partition(" ")
    operands = tuple(self._read_operand(part, line) for part in _split_operands(rest))
    return PtxInstruction(tuple(part for part in re.split(r"\.", name) if part), operands, guard, negated, line, text)

  def _read_operand(self, text: str, line: int) -> Operand:
    if text.startswith("{"):
      return Vector(self._read_values(text, line))
    if text.startswith("["):
      parts = _split_operands(text[1:-1])
      found = _ADDRESS.fullmatch(parts[0])
      assert found is not None, parts
      base, sign, offset = found.groups()
      coordinates = self._read_values(parts[1], line) if len(parts) > 1 else ()
      return Address(self._read_simple(base, line), int(offset or 0) * (-1 if sign == "-" else 1), coordinates)
    if "|" in text:
      first, second = text.split("|")
      return Pair(Register(self._resolve(first.strip())), Register(self._resolve(second.strip())))
    return self._read_simple(text, line)

  def _read_values(self, text: str, line: int) -> tuple[Register | Immediate, ...]:
    """Returns the parts of {a, b, ...}."""
    parts = [self._read_simple(part, line) for part in _split_operands(text[1:-1])]
    values = tuple(part for part in parts if not isinstance(part, Symbol))
    if len(values) != len(parts):
      raise PtxError(f"line {line}: unknown operand: {text}")
    return values

  def _read_simple(self, text: str, line: int) -> Register | Symbol | Immediate:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
      return Immediate(int(text[2:], 16))
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
      return Immediate(int(text[2:], 16))
    if re.fullmatch(r"(-?\d+|-?0[xX][0-9a-fA-F]+)U?", text):
      return Immediate(int(text.removesuffix("U"), 0))
    if not re.fullmatch(r"[%$\w.]+", text):
      raise PtxError(f"line {line}: unknown operand: {text}")
    name = self._resolve(text)
    if name in self.registers or re.sub(r"\d+$", "", name) in self.registers or text == "_":
      return Register(name)
    return Symbol(name)


def _split_operands(text: str) -> list[str]:
  """Splits at commas outside of brackets."""
  parts, depth, current = [], 0, ""
  for character in text:
    depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
    if character == "," and not depth:
      parts.append(current.strip())
      current = ""
    else:
      current += character
  return [*parts, current.strip()] if current.strip() else parts
