"""Reads a compiled XLA:GPU program from its serialized form: buffers, and launches in order. May not run anything.

`read_executable` takes what `compiled.runtime_executable().serialize()` returns, as jaxlib 0.11 writes it: an
xla.gpu.GpuExecutableProto. Numbers below are those of its fields (xla/service/gpu/gpu_executable.proto,
xla/backends/gpu/runtime/thunk.proto and what they import).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses

from tools.ptx_emulator.records import RecordError, read_fields, read_records, read_varint

MOSAIC = "mosaic_gpu_v2"  # target of the calls of Mosaic GPU's kernels
MOSAIC_ALIGNMENT = 256  # bytes; kExpectedHbmAlignment of jaxlib/mosaic/gpu/passes.h, which each launch checks

# ThunkProto's oneof, for names of what is not known here.
_THUNKS = {
  2: "sequential",
  3: "copy",
  4: "device_to_host_copy",
  5: "host_to_device_copy",
  6: "conditional",
  7: "while",
  8: "kernel",
  9: "gemm",
  13: "device_to_device_copy",
  15: "cudnn",
  19: "memzero",
  20: "select_k",
  22: "cublas_lt_matmul",
  28: "memset32bit_value",
  30: "custom_call",
  36: "custom_kernel",
  57: "async_start",
  58: "async_done",
  60: "dynamic_slice_fusion",
}


@dataclasses.dataclass(frozen=True)
class BufferSlice:
  """Bytes of an allocation."""

  allocation: int
  offset: int
  size: int


@dataclasses.dataclass(frozen=True)
class KernelCall:
  """One launch of a kernel.

  Attributes:
    name: of the HLO instruction.
    kernel: the entry in its PTX.
    grid, threads: of the launch.
    shared_bytes: of dynamic shared memory.
    arguments: a pointer for each parameter.
    zeroed: arguments that are zeroed first.
  """

  name: str
  kernel: str
  grid: tuple[int, int, int]
  threads: tuple[int, int, int]
  shared_bytes: int
  arguments: tuple[BufferSlice, ...]
  zeroed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CustomCall:
  """A call of a library or of Mosaic GPU.

  Attributes:
    target: its name.
    key: the hash of Mosaic GPU's kernel; b"" for others.
  """

  name: str
  target: str
  key: bytes
  operands: tuple[BufferSlice, ...]
  results: tuple[BufferSlice, ...]


@dataclasses.dataclass(frozen=True)
class MemoryCopy:
  """A copy on the device."""

  name: str
  source: BufferSlice
  target: BufferSlice


@dataclasses.dataclass(frozen=True)
class MemoryFill:
  """Fills bytes with one value of 32 bits."""

  name: str
  target: BufferSlice
  value: int


@dataclasses.dataclass(frozen=True)
class Branches:
  """Runs one of several sequences.

  Attributes:
    index: int32 that chooses a branch, or bool, whose true chooses the first. Outside of the range, the last runs.
  """

  name: str
  index: BufferSlice
  sequences: tuple[tuple[Launch, ...], ...]


@dataclasses.dataclass(frozen=True)
class SlicedCall:
  """Launches on slices at fixed offsets.

  Attributes:
    buffers: what the allocations 0, 1, ... of `sequence` are.
  """

  name: str
  buffers: tuple[BufferSlice, ...]
  sequence: tuple[Launch, ...]


@dataclasses.dataclass(frozen=True)
class UnreadCall:
  """A launch of which only the kind is read, such as a matmul of cuBLASLt."""

  name: str
  kind: str


Launch = KernelCall | CustomCall | MemoryCopy | MemoryFill | Branches | SlicedCall | UnreadCall


@dataclasses.dataclass(frozen=True)
class ModuleExecutable:
  """A compiled program.

  Attributes:
    sizes: bytes of each allocation.
    parameters: argument of the program -> its allocation.
    results: allocation of each result.
    constants: allocation -> its bytes.
    sequence: the launches in order. What XLA may overlap runs where it starts.
  """

  sizes: tuple[int, ...]
  parameters: Mapping[int, int]
  results: tuple[int, ...]
  constants: Mapping[int, bytes]
  sequence: tuple[Launch, ...]


def _all(message: bytes, *path: int) -> list[bytes]:
  """Returns the messages at a path of field numbers, all of a repeated one."""
  found = [message]
  for number in path:
    found = [
      value for each in found for field, value in read_fields(each) if field == number and isinstance(value, bytes)
    ]
  return found


def _one(message: bytes, *path: int) -> bytes:
  return next(iter(_all(message, *path)), b"")


def _number(message: bytes, field: int, default: int = 0) -> int:
  return next((value for each, value in read_fields(message) if each == field and isinstance(value, int)), default)


def _numbers(message: bytes, field: int) -> list[int]:
  """Returns a repeated integer, packed or not."""
  found = []
  for each, value in read_fields(message):
    if each == field and isinstance(value, int):
      found.append(value)
    elif each == field and isinstance(value, bytes):
      at = 0
      while at < len(value):
        number, at = read_varint(value, at)
        found.append(number)
  return found


def _text(message: bytes, *path: int) -> str:
  return _one(message, *path).decode("utf-8")


def read_executable(data: bytes) -> ModuleExecutable:
  """Reads a serialized executable. Raises RecordError if it has another form."""
  records = read_records(data)
  if not records or b"ExecutableAndOptionsProto" not in records[0]:
    raise RecordError("the bytes are no executable of XLA:GPU")
  inner = read_records(b"".join(records[1:2]))
  if b"GpuExecutableProto" not in inner[0]:
    raise RecordError("the executable is no GpuExecutableProto")
  message = b"".join(inner[1:])  # parts of a protocol buffer that follow each other are one
  allocations = _all(message, 10, 1) or _all(message, 2, 3)
  sizes, parameters = {}, {}
  for allocation in allocations:
    index = _number(allocation, 1)
    sizes[index] = _number(allocation, 2)
    if _number(allocation, 5):
      parameters[_number(allocation, 6)] = index
  # By the index in the result's tuple: () is the tuple itself, or a result that is no tuple.
  outputs = {tuple(_numbers(_one(entry, 1), 1)): _number(_one(entry, 2), 1) for entry in _all(message, 11)}
  if len(outputs) > 1:
    del outputs[()]
  constants = {_number(each, 3): _one(each, 2, 1) for each in _all(message, 12)}
  return ModuleExecutable(
    tuple(sizes[index] for index in range(len(sizes))),
    parameters,
    tuple(outputs[index] for index in sorted(outputs)),
    constants,
    _sequence(_all(message, 13)),
  )


def walk_launches(
  sequence: Sequence[Launch], buffers: Sequence[BufferSlice] | None = None
) -> Iterator[tuple[Launch, Sequence[BufferSlice] | None]]:
  """Yields each launch, those within others too, with the buffers that its allocations name; None: the program's."""
  for launch in sequence:
    yield launch, buffers
    if isinstance(launch, SlicedCall):
      yield from walk_launches(launch.sequence, launch.buffers)
    elif isinstance(launch, Branches):
      for branch in launch.sequences:
        yield from walk_launches(branch, buffers)


def find_misaligned(executable: ModuleExecutable) -> list[str]:
  """Returns a line for each array of a Mosaic GPU kernel that is not at a multiple of `MOSAIC_ALIGNMENT` bytes."""
  found = []
  for launch, buffers in walk_launches(executable.sequence):
    if isinstance(launch, CustomCall) and launch.target == MOSAIC:
      for number, array in enumerate((*launch.operands, *launch.results)):
        offset = array.offset + (buffers[array.allocation].offset if buffers else 0)
        if offset % MOSAIC_ALIGNMENT:
          found.append(f"{launch.name}: argument {number} is at byte {offset} of its buffer")
  return found


def _sequence(thunks: Sequence[bytes]) -> tuple[Launch, ...]:
  return tuple(launch for thunk in thunks for launch in _read_thunk(thunk))


def _read_thunk(thunk: bytes) -> Sequence[Launch]:
  ((kind, body),) = [(field, value) for field, value in read_fields(thunk) if field != 1]
  assert isinstance(body, bytes)
  name = _text(thunk, 1, 1)
  match _THUNKS.get(kind, str(kind)):
    case "sequential":
      return _sequence(_all(body, 1))
    case "async_start":
      return _sequence(_all(body, 3, 1))
    case "async_done":
      return ()
    case "device_to_device_copy":
      source, target = _shaped(_one(body, 1, 1)), _shaped(_one(body, 1, 2))
      size = _number(_one(body, 1), 3)
      return (MemoryCopy(name, dataclasses.replace(source, size=size), dataclasses.replace(target, size=size)),)
    case "memzero":
      return (MemoryFill(name, _shaped(_one(body, 1)), 0),)
    case "memset32bit_value":
      return (MemoryFill(name, _slice(_one(body, 1)), _number(body, 2)),)
    case "conditional":
      return (Branches(name, _shaped(_one(body, 1)), tuple(_sequence(_all(each, 1)) for each in _all(body, 2))),)
    case "kernel":
      arguments = tuple(_slice(each) for each in _all(body, 1))
      sizes = _dimensions(_one(body, 4, 1, 2)), _dimensions(_one(body, 4, 2, 1))
      zeroed = tuple(_numbers(body, 9))
      return (KernelCall(name, _text(body, 3), *sizes, _number(body, 6), arguments, zeroed),)
    case "custom_kernel":
      kernel = _one(body, 3)
      arguments = tuple(_shaped(each) for each in _all(body, 1))
      sizes = _dimensions(_one(kernel, 3, 2)), _dimensions(_one(kernel, 4, 1))
      zeroed = tuple(_numbers(body, 5))
      return (KernelCall(name, _text(kernel, 1), *sizes, _number(kernel, 6), arguments, zeroed),)
    case "custom_call":
      operands, results = (tuple(_shaped(_one(each, 1)) for each in _all(body, field)) for field in (2, 3))
      attributes = {_text(each, 1): _one(each, 2, 3) for each in _all(body, 6, 1)}
      return (CustomCall(name, _text(body, 1), attributes.get("kernel_hash", b""), operands, results),)
    case "dynamic_slice_fusion":
      return (_read_sliced(name, body),)
    case known:
      return (UnreadCall(name, known),)


def _read_sliced(name: str, body: bytes) -> SlicedCall:
  given, made = ([_slice(each) for each in _all(body, field)] for field in (3, 4))
  buffers, allocations = [], _all(body, 5)
  for parameter in _all(body, 1):
    if _all(parameter, 5):
      raise RecordError(f"{name}: a slice at an offset that the device computes is not known")
    buffers.append(_shift(given[_number(parameter, 1)], _one(parameter, 4)))
  for result in _all(body, 2):
    if any(_has_value(each) for each in _all(result, 6)):
      raise RecordError(f"{name}: a result at an offset that the device computes is not known")
    buffers.append(_shift(made[_number(result, 2)], _one(result, 5)))
  sizes = [_number(each, 2) for each in allocations]
  if len(buffers) != len(sizes):
    raise RecordError(f"{name}: {len(sizes)} slices, of which {len(buffers)} are described")
  sliced = tuple(dataclasses.replace(each, size=size) for each, size in zip(buffers, sizes, strict=True))
  return SlicedCall(name, sliced, _sequence(_all(body, 6, 1)))


def _has_value(offset: bytes) -> bool:
  """Whether an OffsetProto is an expression with parts that only the device knows."""
  expression = _one(offset, 4)
  return _number(expression, 1) != 1


def _shift(buffer: BufferSlice, config: bytes) -> BufferSlice:
  """Applies a DynamicSliceConfig."""
  if _number(config, 3):
    raise RecordError("a slice that moves in a loop is not known")
  return dataclasses.replace(buffer, offset=buffer.offset + _number(config, 2))


def _slice(message: bytes) -> BufferSlice:
  return BufferSlice(_number(message, 3), _number(message, 1), _number(message, 2))


def _shaped(message: bytes) -> BufferSlice:
  return _slice(_one(message, 1))


def _dimensions(message: bytes) -> tuple[int, int, int]:
  x, y, z = (_number(message, field, 1) for field in (1, 2, 3))
  return x, y, z
