"""Serialized executables: records, their compression, and launches with the bytes that they read and write."""

import numpy as np
import pytest

from tools.ptx_emulator import module
from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.executable import (
  BufferSlice,
  KernelCall,
  MemoryCopy,
  SlicedCall,
  find_misaligned,
  read_executable,
)
from tools.ptx_emulator.reader import PtxError, read_kernels
from tools.ptx_emulator.records import RecordError, expand_snappy, read_records


def varint(value: int) -> bytes:
  out = bytearray()
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  return bytes([*out, value])


def field(number: int, *values: int | bytes) -> bytes:
  """Returns a field of a protocol buffer; several values are one message."""
  if isinstance(values[0], int):
    return varint(number << 3) + varint(values[0])
  body = b"".join(value for value in values if isinstance(value, bytes))
  return varint(number << 3 | 2) + varint(len(body)) + body


def chunk(kind: bytes, count: int, data: bytes) -> bytes:
  return bytes(8) + len(data).to_bytes(8, "little") + bytes(8) + kind + count.to_bytes(7, "little") + bytes(8) + data


def riegeli(*records: bytes, compression: bytes = b"\0") -> bytes:
  """Returns a file with a chunk of records. Hashes are zeros, as none is read."""
  parts = b"".join(varint(len(record)) for record in records), b"".join(records)
  if compression == b"s":
    parts = tuple(varint(len(part)) + snappy(part) for part in parts)
  data = compression + varint(len(parts[0])) + parts[0] + parts[1]
  found = bytearray(bytes.fromhex("83af70d10d884a3f") + bytes(16))
  for byte in chunk(b"s", 0, b"") + chunk(b"r", len(records), data):
    if len(found) % 65536 == 0:  # each block begins with a header
      found += bytes(24)
    found.append(byte)
  return bytes(found)


def snappy(data: bytes) -> bytes:
  """Returns literals of at most 60 bytes."""
  parts = [data[start : start + 60] for start in range(0, len(data), 60)]
  return varint(len(data)) + b"".join(bytes([len(part) - 1 << 2]) + part for part in parts)


@pytest.mark.parametrize("compression", [b"\0", b"s"])
def test_records_are_read_over_the_headers_of_blocks(compression: bytes):
  records = [b"", b"one", bytes(range(256)) * 600]
  assert read_records(b"before" + riegeli(*records, compression=compression)) == records


def test_other_formats_are_refused():
  with pytest.raises(RecordError, match="no Riegeli file"):
    read_records(b"something else")
  with pytest.raises(RecordError, match="compression b'b'"):
    read_records(riegeli(b"one", compression=b"b"))
  with pytest.raises(RecordError, match="ends within a chunk"):
    read_records(riegeli(b"a long record")[:-1])


@pytest.mark.parametrize(
  ("compressed", "expected"),
  [
    (b"\x05\x10hello", b"hello"),
    (b"\x0a\x04ab\x11\x02", b"ab" * 5),  # a copy of 8 bytes from 2 back, which repeats them
    (b"\x08\x0cabcd\x0e\x04\x00", b"abcdabcd"),
    (b"\x46\xf0\x45" + b"x" * 70, b"x" * 70),
  ],
)
def test_snappy(compressed: bytes, expected: bytes):
  assert expand_snappy(compressed) == expected


def test_snappy_refuses_a_copy_from_before_the_start():
  with pytest.raises(RecordError, match="before the start"):
    expand_snappy(b"\x08\x00a\x11\x02")


# --- executables ------------------------------------------------------------------------------------------------------


def place(allocation: int, offset: int, size: int) -> bytes:
  return b"".join(field(number, value) for number, value in ((1, offset), (2, size), (3, allocation)))


def shaped(number: int, *where: int) -> bytes:
  return field(number, field(1, place(*where)))


def thunk(kind: int, name: str, *body: bytes) -> bytes:
  return field(1, field(1, name.encode())) + field(kind, *body)


def copy(name: str, source: tuple[int, int, int], target: tuple[int, int, int]) -> bytes:
  return thunk(13, name, field(1, shaped(1, *source), shaped(2, *target), field(3, source[2])))


def kernel(name: str, *arguments: tuple[int, int, int], grid: int = 1, threads: int = 4) -> bytes:
  sizes = field(3, field(2, field(1, grid))) + field(4, field(1, field(1, threads)))
  return thunk(36, name, *(shaped(1, *each) for each in arguments), field(3, field(1, name.encode()), sizes))


def executable(*thunks: bytes) -> bytes:
  """Returns a program with argument 0 in allocation 0, its result in 1 and temporaries in 2."""
  allocations = [
    field(1, field(2, 64), field(5, 1)),
    field(1, field(1, 1), field(2, 64)),
    field(1, field(1, 2), field(2, 256)),
  ]
  outputs = field(11, field(1, b""), field(2, field(1, 1)))
  message = field(10, *allocations) + b"".join(field(13, each) for each in thunks) + outputs
  inner = riegeli(field(1, b"xla.gpu.GpuExecutableProto"), message)
  return b"header" + riegeli(field(1, b"xla.ExecutableAndOptionsProto"), inner, compression=b"s")


COPY = copy("take", (0, 0, 16), (2, 128, 16))
PTX = """
.visible .entry double(.param .u64 .ptr .align 16 a, .param .u64 .ptr .align 16 b)
.reqntid 4, 1, 1
{
  .reg .b32 %r<9>; .reg .b64 %rd<9>;
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
  ld.param::entry.b64 %rd1, [a]; ld.param::entry.b64 %rd2, [b];
  add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  ld.global.b32 %r2, [%rd4]; shl.b32 %r3, %r2, 1; st.global.b32 [%rd5], %r3;
  ret;
}
"""


def make_runner(*thunks: bytes) -> module.ModuleRunner:
  kernels = {each.name: each for each in read_kernels(PTX)}
  return module.ModuleRunner(module.CompiledModule(read_executable(executable(*thunks)), kernels, {}, frozenset()))


def run(*thunks: bytes) -> np.ndarray:
  """Returns the result of a program on 0, 1, ..., 15."""
  argument = np.arange(16, dtype=np.int32)
  (result,) = make_runner(*thunks).run([argument])
  np.testing.assert_array_equal(argument, np.arange(16))
  return result.view(np.int32)


def test_an_executable_is_read():
  found = read_executable(executable(COPY, kernel("double", (2, 128, 16), (1, 0, 16))))
  assert found.sizes == (64, 64, 256)
  assert found.parameters == {0: 0} and found.results == (1,)
  first, second = found.sequence
  assert first == MemoryCopy("take", BufferSlice(0, 0, 16), BufferSlice(2, 128, 16))
  assert isinstance(second, KernelCall) and second.grid == (1, 1, 1) and second.threads == (4, 1, 1)


def test_launches_run_in_order_on_their_slices():
  result = run(COPY, kernel("double", (2, 128, 16), (1, 16, 16)), kernel("double", (1, 16, 16), (1, 0, 16)))
  np.testing.assert_array_equal(result[:8], [0, 4, 8, 12, 0, 2, 4, 6])
  assert (result[8:] == -1).all()  # nobody wrote it


@pytest.mark.parametrize(("index", "expected"), [(0, 0), (1, 4), (3, 4)])
def test_a_number_chooses_a_branch_and_the_last_one_if_there_is_none(index: int, expected: int):
  branches = [field(2, field(1, copy(f"branch {n}", (0, 16 * n, 4), (1, 0, 4)))) for n in range(2)]
  choice = thunk(6, "choose", shaped(1, 2, 0, 4), *branches)
  assert run(copy("index", (0, 4 * index, 4), (2, 0, 4)), choice)[0] == expected


def test_true_chooses_the_first_branch():
  branches = [field(2, field(1, copy(f"branch {n}", (0, 16 * n, 4), (1, 0, 4)))) for n in range(2)]
  for byte, expected in ((4, 0), (0, 4)):  # argument byte 4 is 1, byte 0 is 0
    choice = thunk(6, "choose", shaped(1, 2, 0, 1), *branches)
    assert run(copy("index", (0, byte, 1), (2, 0, 1)), choice)[0] == expected


def test_a_call_on_slices_numbers_its_own_allocations():
  allocations = field(5, field(2, 16)), field(5, field(1, 1), field(2, 16))
  source = field(1, field(1, 0), field(4, field(2, 8)))  # 8 bytes into the argument
  target = field(2, field(1, 1), field(2, 0), field(5, field(2, 32)))
  inner = field(6, field(1, kernel("double", (0, 0, 16), (1, 0, 16))))
  call = thunk(60, "sliced", source, target, field(3, place(0, 0, 64)), field(4, place(1, 0, 64)), *allocations, inner)
  (launch,) = read_executable(executable(call)).sequence
  assert isinstance(launch, SlicedCall)
  assert launch.buffers == (BufferSlice(0, 8, 16), BufferSlice(1, 32, 16))
  np.testing.assert_array_equal(run(call)[8:12], [4, 6, 8, 10])


def test_a_kernel_may_not_leave_its_slice():
  # The allocation goes on behind the slice, so only the slice's own end shows that the kernel writes too much.
  with pytest.raises(KernelFault, match="launch double: .*at offset 12 of argument 1, which has 12"):
    run(COPY, kernel("double", (2, 128, 16), (2, 0, 12)))


def test_a_program_may_not_write_an_argument_that_it_did_not_take():
  with pytest.raises(KernelFault, match="launch double: .*read-only"):
    run(kernel("double", (0, 0, 16), (0, 0, 16)))


def test_an_unknown_thunk_stops_with_its_name():
  with pytest.raises(RecordError, match="custom-call.3: the emulator does not know the thunk cublas_lt_matmul"):
    run(thunk(22, "custom-call.3", field(1, b"")))


def mosaic(name: str, operand: tuple[int, int, int], result: tuple[int, int, int]) -> bytes:
  return thunk(30, name, field(1, b"mosaic_gpu_v2"), shaped_call(2, operand), shaped_call(3, result))


def shaped_call(number: int, where: tuple[int, int, int]) -> bytes:
  return field(number, shaped(1, *where))


def test_arrays_that_mosaic_gpu_would_refuse_are_found():
  allocations = field(5, field(2, 16)), field(5, field(1, 1), field(2, 16))
  source = field(1, field(1, 0), field(4, field(2, 128)))  # 128 bytes into the argument
  target = field(2, field(1, 1), field(2, 0), field(5, field(2, 256)))
  inner = field(6, field(1, mosaic("inner", (0, 0, 16), (1, 0, 16))))
  sliced = thunk(
    60, "sliced", source, target, field(3, place(0, 0, 512)), field(4, place(1, 0, 512)), *allocations, inner
  )
  plain = mosaic("plain", (0, 256, 16), (1, 384, 16))
  other = thunk(30, "other", field(1, b"cub_sort"), shaped_call(2, (0, 8, 16)))
  assert find_misaligned(read_executable(executable(sliced, plain, other))) == [
    "inner: argument 0 is at byte 128 of its buffer",
    "plain: argument 1 is at byte 384 of its buffer",
  ]


def test_a_call_of_a_library_stops_with_its_name():
  with pytest.raises(KernelFault, match="launch sort: the emulator does not know the library call cub_sort"):
    run(thunk(30, "sort", field(1, b"cub_sort")))


def test_threads_other_than_those_of_the_ptx_are_refused():
  with pytest.raises(PtxError, match="double is launched with .8, 1, 1. threads; its PTX has 4"):
    run(COPY, kernel("double", (2, 128, 16), (1, 0, 16), threads=8))
