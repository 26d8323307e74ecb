"""tcgen05 on small kernels: layouts of the PTX ISA's tables, products, and what their order must not lack."""

import numpy as np
import pytest

from tests.tools.ptx_emulator.test_emulator import ELECT, INIT, SHARED, WAIT, make_kernel
from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.clocks import Agent, OrderError
from tools.ptx_emulator.emulator import run_kernel
from tools.ptx_emulator.floats import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16
from tools.ptx_emulator.matrix import MatrixDescriptor, ProductShape
from tools.ptx_emulator.memory import AccessError, GlobalMemory
from tools.ptx_emulator.reader import PtxError
from tools.ptx_emulator.tensor_map import TensorMap
from tools.ptx_emulator.tensor_memory import COLUMNS, TensorMemory

# Fields of the ISA's table "Shared memory descriptor layout": a swizzle of 128 bytes, the constant, a stride of 1,024.
_DESCRIPTOR = 2 << 61 | 1 << 46 | 64 << 32
# Of "Instruction descriptor format", .kind::f16: sums of f32, A and B of bf16, 64 columns, 64 rows.
_SHAPE = 1 << 4 | 1 << 7 | 1 << 10 | 64 >> 3 << 17 | 64 >> 4 << 24
_TRANSPOSED_RIGHT = 1 << 16
_SUMS = [f"%r{100 + number}" for number in range(32)]


def filled_memory() -> tuple[TensorMemory, int]:
  """Returns tensor memory with 64 columns, and the first of these."""
  memory = TensorMemory(4, np.random.default_rng(0))
  column = memory.allocate(64)
  assert column is not None
  return memory, column


def test_64_rows_have_half_of_each_warps_lanes():
  """Layout F: rows 0 to 15 in lanes 0 to 15, 16 to 31 in 32 to 47, and so on; or the upper half of each 32 lanes."""
  memory, column = filled_memory()
  lanes = np.r_[0:16, 32:48, 64:80, 96:112]
  for start in (0, 16):
    cells = memory.locate_matrix(start << 16 | column, 64, 64)
    np.testing.assert_array_equal(cells // COLUMNS, np.broadcast_to((lanes + start)[:, None], (64, 64)))
    np.testing.assert_array_equal(cells % COLUMNS, np.broadcast_to(column + np.arange(64), (64, 64)))
  with pytest.raises(AccessError, match="64 rows at lane 8"):
    memory.locate_matrix(8 << 16 | column, 64, 64)


def test_128_rows_have_all_lanes():
  """Layout D."""
  memory, column = filled_memory()
  cells = memory.locate_matrix(column, 128, 32)
  np.testing.assert_array_equal(cells // COLUMNS, np.broadcast_to(np.arange(128)[:, None], (128, 32)))
  with pytest.raises(AccessError, match="128 rows at lane 16"):
    memory.locate_matrix(16 << 16 | column, 128, 32)


def test_the_halves_of_a_warp_have_the_same_lanes_and_other_columns():
  """Shape .16x32bx2: two accesses of 16 lanes, the second `split` columns behind the first."""
  memory, column = filled_memory()
  cells = memory.locate_halves(2, 64 << 16 | column, 16, 40)
  for register in (0, 5, 15):
    for thread in range(32):
      lane, place = 64 + thread % 16, column + register + (40 if thread >= 16 else 0)
      assert cells[register, thread] == lane * COLUMNS + place
  with pytest.raises(AccessError, match="warp 1 names lane 0; it has the lanes 32 to 63"):
    memory.locate_halves(1, column, 16, 16)
  with pytest.raises(AccessError, match="is not allocated"):
    memory.locate_halves(0, column, 16, 64)


def test_columns_are_allocated_and_freed():
  memory, agent = TensorMemory(1, np.random.default_rng(0)), Agent.start(0, 1)
  for count in (16, 48, 1024):
    with pytest.raises(AccessError, match="a power of two from 32 to 512 is needed"):
      memory.allocate(count)
  first, second = memory.allocate(256), memory.allocate(128)
  assert first is not None and second is not None and memory.allocate(256) is None
  with pytest.raises(AccessError, match="no 64 columns were allocated"):
    memory.free(second, 64, agent)
  memory.shadow.begin_async_write(agent.knowledge, 0, memory.locate_matrix(first, 64, 8).reshape(-1))
  with pytest.raises(OrderError, match="frees cell .* of tensor memory, which asynchronous operation 0 writes"):
    memory.free(first, 256, agent)
  memory.free(second, 128, agent)
  memory.may_allocate = False
  with pytest.raises(AccessError, match="relinquish"):
    memory.allocate(32)


def test_descriptors_have_the_fields_of_the_tables():
  for mode, swizzle in ((0, 0), (2, 128), (4, 64), (6, 32)):
    found = MatrixDescriptor.decode_tensor_core(mode << 61 | 1 << 46 | 5 << 32 | 3 << 16 | 7)
    assert found == MatrixDescriptor(7 << 4, 3 << 4, 5 << 4, swizzle)
  # The constant, the offset of a base, absolute addresses, a swizzle of 32-byte atoms, a mode that does not exist.
  for bits in (0, 1 << 46 | 1 << 49, 1 << 46 | 1 << 52, 1 << 61 | 1 << 46, 3 << 61 | 1 << 46):
    with pytest.raises(AccessError, match="matrix descriptor"):
      MatrixDescriptor.decode_tensor_core(bits)
  assert ProductShape.decode(_SHAPE | _TRANSPOSED_RIGHT) == ProductShape(64, 64, "bf16", False, True)
  f16 = _SHAPE & ~(1 << 7 | 1 << 10) | 1 << 15
  assert ProductShape.decode(f16 + (4 << 24) + (24 << 17)) == ProductShape(128, 256, "f16", True, False)
  # Sparse, sums of f16, two kinds, A negated, no columns, 96 rows.
  for bits in (_SHAPE | 4, _SHAPE ^ 1 << 4, _SHAPE ^ 1 << 7, _SHAPE | 1 << 13, _SHAPE ^ 8 << 17, _SHAPE + (2 << 24)):
    with pytest.raises(AccessError, match="instruction descriptor"):
      ProductShape.decode(bits)


# --- products -------------------------------------------------------------------------------------------------------

_ALLOCATE = """
  @%p91 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r92], 128;
  bar.sync 0;
  ld.shared.b32 %r50, [%r92];
  @%p91 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
"""
_WARP = "mov.u32 %r40, %tid.x; shr.u32 %r41, %r40, 5; shl.b32 %r42, %r41, 21; and.b32 %r43, %r40, 31;"
_LOAD = "tcgen05.ld.sync.aligned.16x32bx2.x32.b32 {SUMS}, [%r44 + 0], 32;".replace("SUMS", ", ".join(_SUMS))
_WAIT_LOAD = "tcgen05.wait::ld.sync.aligned;"
_WAIT_STORE = "tcgen05.wait::st.sync.aligned;"
_COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];"
_FREE = "@%p91 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r50, 128;"
_LAST_BARRIER = "bar.sync 0; // before it is freed"
# A from global memory to columns 64 to 95: each thread has sixteen words, a half of a row.
_WORDS = [f"%r{200 + number}" for number in range(16)]
_STORE_LEFT = (
  """
  ld.param.b64 %rd40, [left];
  and.b32 %r60, %r43, 15; shl.b32 %r61, %r41, 4; add.s32 %r60, %r60, %r61; shl.b32 %r60, %r60, 1;
  shr.u32 %r62, %r43, 4; add.s32 %r60, %r60, %r62; mul.wide.u32 %rd41, %r60, 64; add.s64 %rd41, %rd40, %rd41;
"""
  + "\n".join(f"ld.global.b32 {name}, [%rd41+{4 * number}];" for number, name in enumerate(_WORDS))
  + f"""
  add.s32 %r63, %r50, %r42; add.s32 %r63, %r63, 64;
  tcgen05.st.sync.aligned.16x32bx2.x16.b32 [%r63 + 0], 16, {{{", ".join(_WORDS)}}};
  {_WAIT_STORE}
  bar.sync 0;
"""
)


def product_body(transposed: bool, in_tensor_memory: bool, shapes: tuple[int, ...] = (_SHAPE,) * 4) -> str:
  """A product of 64 x 64 x 64. Args: transposed: B is [K, N] instead of [N, K]. in_tensor_memory: A is."""
  step = 16 * 128 if transposed else 32
  parts = []
  for part, shape in enumerate(shapes):
    left = f"[%r64 + {8 * part}]" if in_tensor_memory else "%rd21"
    parts.append(
      f"add.s64 %rd21, %rd20, {part * 32 >> 4}; add.s64 %rd23, %rd22, {part * step >> 4};\n"
      f"setp.ne.b32 %p2, {part}, 0; mov.b32 %r51, {shape | _TRANSPOSED_RIGHT * transposed};\n"
      f"@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r50 + 0], {left}, %rd23, %r51, %p2;"
    )
  stores = [f"st.global.b32 [%rd33+{4 * number}], {name};" for number, name in enumerate(_SUMS)]
  return (
    ELECT
    + INIT.format(arrivals=1)
    + """
  add.s32 %r4, %r1, 65512; add.s32 %r92, %r1, 65504;
  @%p1 mbarrier.init.shared.b64 [%r4], 1;
"""
    + _ALLOCATE
    + """
  @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2], 16384;
  mov.b64 %rd5, maps;
  cvta.param.u64 %rd6, %rd5;
  add.s64 %rd7, %rd6, 128;
  mov.b32 %r10, 0;
  add.s32 %r11, %r1, 8192;
  @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd6, {%r10, %r10}], [%r2];
  @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r11], [%rd7, {%r10, %r10}], [%r2];
"""
    + WAIT.format(parity=0)
    + _WARP
    + (_STORE_LEFT if in_tensor_memory else "")
    + f"""
  shr.u32 %r12, %r1, 4; cvt.u64.u32 %rd18, %r12; or.b64 %rd20, %rd18, {_DESCRIPTOR};
  shr.u32 %r13, %r11, 4; cvt.u64.u32 %rd19, %r13; or.b64 %rd22, %rd19, {_DESCRIPTOR};
  add.s32 %r64, %r50, 64;
"""
    + "\n".join(parts)
    + f"\n{_COMMIT}\n"
    + WAIT.format(parity=0).replace("[%r2]", "[%r4]")
    + f"""
  add.s32 %r44, %r50, %r42;
  {_LOAD}
  {_WAIT_LOAD}
  ld.param.b64 %rd30, [out];
  and.b32 %r45, %r43, 15; shl.b32 %r46, %r41, 4; add.s32 %r45, %r45, %r46; shl.b32 %r45, %r45, 1;
  shr.u32 %r47, %r43, 4; add.s32 %r45, %r45, %r47; mul.wide.u32 %rd31, %r45, 128; add.s64 %rd33, %rd30, %rd31;
"""
    + "\n".join(stores)
    + f"\n{_LAST_BARRIER}\n@%p1 mbarrier.inval.shared::cta.b64 [%r4];\n{_FREE}\n"
  )


def run_product(body: str, seed: int = 0, narrow=f32_to_bf16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the bits of A and B as they lie in memory, uint16[64, 64] each, and the kernel's product."""
  memory, out, rng = GlobalMemory(), np.zeros((64, 64), np.float32), np.random.default_rng(1)
  a, b = (narrow(rng.standard_normal((64, 64)).astype(np.float32)) for _ in range(2))
  places = [memory.add_buffer(name, array).address for name, array in (("a", a), ("b", b))]
  maps = [TensorMap(place, 2, (64, 64), (2, 128), (64, 64), 128) for place in places]
  parameters = ".param .u64 .ptr .align 256 out, .param .u64 .ptr .align 256 left, .param .align 64 .b8 maps[256]"
  arguments = [memory.add_buffer("out", out).address, places[0], maps]
  run_kernel(make_kernel(body, parameters), memory, arguments, (1, 1, 1), SHARED, seed)
  return a, b, out


@pytest.mark.parametrize("in_tensor_memory", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product(transposed: bool, in_tensor_memory: bool):
  for seed in range(4):
    a, b, out = run_product(product_body(transposed, in_tensor_memory), seed)
    wanted = bf16_to_f32(a) @ (bf16_to_f32(b) if transposed else bf16_to_f32(b).T)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-4)


def test_a_product_of_f16():
  body = product_body(False, False, (_SHAPE & ~(1 << 7 | 1 << 10),) * 4)
  a, b, out = run_product(body, narrow=f32_to_f16)
  np.testing.assert_allclose(out, f16_to_f32(a) @ f16_to_f32(b).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
  ("old", "new", "words"),
  [
    (_WAIT_LOAD, "", "is used while a load from tensor memory runs; tcgen05.wait::ld comes first"),
    (_WAIT_STORE, "", "asynchronous operation . writes; nobody has waited"),
    (_WAIT_STORE + "\n  bar.sync 0;", _WAIT_STORE, "asynchronous operation . (reads|writes); nobody has waited"),
    (_COMMIT, "", "(?s)deadlock.*lacks 1 of 1 arrivals"),
    (_COMMIT, "@%p1 mbarrier.arrive.release.cta.shared::cta.b64 %rd9, [%r4], 1;", "writes; nobody has waited"),
    (_COMMIT, f"{_COMMIT} @%p1 mbarrier.inval.shared::cta.b64 [%r4];", "no mbarrier was initialized|is invalid"),
    (_LAST_BARRIER, "", "nobody has waited|no mbarrier was initialized"),
    (_FREE, "", "the kernel ends before tcgen05.dealloc"),
    (_FREE, _FREE.replace("@%p91 ", ""), "no 128 columns were allocated"),
    (_FREE, _FREE.replace("%p91", "%p1"), "lanes of the warp differ in the predicate"),
    (_ALLOCATE, _ALLOCATE.replace("128;", "32;"), "of tensor memory is not allocated"),
    ("@%p1 tcgen05.mma", "@%p91 tcgen05.mma", "32 lanes begin this product; one should"),
    ("shl.b32 %r42, %r41, 21", "shl.b32 %r42, %r41, 20", "warp . names lane ..; it has the lanes"),
    ("[%r64 + 0]", "[%r50 + 0]", "asynchronous operation . reads; nobody has waited|writes; nobody has waited"),
  ],
)
def test_what_a_product_may_not_lack(old: str, new: str, words: str):
  body = product_body(False, True)
  assert old in body
  for seed in range(3):
    with pytest.raises(KernelFault, match=words):
      run_product(body.replace(old, new), seed)


def test_products_of_other_shapes_are_not_ordered():
  """The ISA orders products with the same sums and shape: the second one here has half of the columns."""
  narrow = _SHAPE - (4 << 17)
  with pytest.raises(KernelFault, match="overwrites .*cell .* of tensor memory, which asynchronous operation . writes"):
    run_product(product_body(False, False, (_SHAPE, narrow)))


@pytest.mark.parametrize(
  ("old", "new"),
  [("16x32bx2.x32", "32x32b.x32"), ("kind::f16", "kind::tf32"), ("cta_group::1.kind", "cta_group::2.kind")],
)
def test_other_forms_stop_with_the_line(old: str, new: str):
  with pytest.raises(PtxError, match=r"line \d+: the emulator does not know"):
    run_product(product_body(False, True).replace(old, new))
