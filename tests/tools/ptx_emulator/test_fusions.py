"""PTX instructions of XLA's own kernels, each compared with numpy on the values of its lanes."""

from collections.abc import Mapping
from fractions import Fraction
import math

import ml_dtypes
import numpy as np
import pytest

from tools.ptx_emulator import lockstep
from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.emulator import run_kernel
from tools.ptx_emulator.memory import GlobalMemory
from tools.ptx_emulator.reader import Kernel, PtxError, read_kernels

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, S32, U32, F64, U64 = (np.dtype(kind) for kind in ("f4", "i4", "u4", "f8", "u8"))
WORDS = {"b8": "rs", "b16": "rs", "b32": "r", "b64": "rd"}


def make_kernel(body: str, names: str, threads: int = 32, head: str = "") -> Kernel:
  """Returns a kernel with a pointer parameter for each letter of `names`."""
  parameters = ", ".join(f".param .u64 .ptr .align 16 {name}" for name in names)
  (kernel,) = read_kernels(
    f".version 9.0\n.target sm_90a\n{head}\n.visible .entry k({parameters})\n.reqntid {threads}, 1, 1\n{{\n"
    ".reg .pred %p<99>;\n.reg .b16 %rs<99>;\n.reg .b32 %r<99>;\n.reg .b64 %rd<99>;\n" + body + "\nret;\n}\n"
  )
  return kernel


def run(
  body: str,
  arrays: Mapping[str, np.ndarray],
  threads: int = 32,
  grid: int = 1,
  head: str = "",
  shared: int = 0,
  is_of_xla: bool = False,
) -> None:
  """Runs `body` with an array a parameter."""
  memory = GlobalMemory()
  kernel = make_kernel(body, "".join(arrays), threads, head)
  addresses = [memory.add_buffer(name, array).address for name, array in arrays.items()]
  run_kernel(kernel, memory, addresses, (grid, 1, 1), shared, is_of_xla=is_of_xla)


def bits(dtype: np.dtype) -> str:
  return f"b{8 * dtype.itemsize}"


def apply(operation: str, inputs: list[np.ndarray], dtype: np.dtype, before: str = "") -> np.ndarray:
  """Returns what `operation` makes of one element a lane. {d}, {a}, {b} and {c} in it are registers."""
  result = np.zeros(len(inputs[0]), dtype)
  arrays = dict(zip("abc", inputs, strict=False)) | {"d": result}
  lines, places = ["mov.u32 %r90, %tid.x;"], {}
  for number, (name, array) in enumerate(arrays.items()):
    word = bits(array.dtype)
    places[name] = f"%{WORDS[word]}{20 + number}"
    lines += [f"ld.param::entry.b64 %rd{number}, [{name}];"]
    lines += [f"mul.wide.u32 %rd{10 + number}, %r90, {array.dtype.itemsize};"]
    lines += [f"add.s64 %rd{10 + number}, %rd{10 + number}, %rd{number};"]
    if name != "d":
      lines += [f"ld.global.nc.{word} {places[name]}, [%rd{10 + number}];"]
  last = len(arrays) - 1
  lines += [before, operation.format(**places), f"st.global.{bits(dtype)} [%rd{10 + last}], {places['d']};"]
  run("\n".join(lines), arrays, threads=len(inputs[0]))
  return result


RNG = np.random.default_rng(0)
X, Y, Z = (RNG.standard_normal(32).astype(F32) * 3 for _ in range(3))
ODD = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 2.5, -2.5, 3e9] * 4, F32)
N, J, K = (RNG.integers(-(2**31), 2**31, 32).astype(S32) for _ in range(3))
U, V = N.view(U32), J.view(U32)
B, C = X.astype(BF16), Y.astype(BF16)
XY = np.stack([X, Y], 1)
PAIRS, SWAPPED = XY.view(U64)[:, 0].copy(), np.stack([Y, X], 1).view(U64)[:, 0].copy()


@pytest.mark.parametrize(
  ("operation", "inputs", "expected"),
  [
    ("abs.f32 {d}, {a};", [X], np.abs(X)),
    ("neg.s32 {d}, {a};", [N], -N),
    ("ex2.approx.ftz.f32 {d}, {a};", [X], np.exp2(X)),
    ("lg2.approx.f32 {d}, {a};", [np.abs(X)], np.log2(np.abs(X))),
    ("rsqrt.approx.f32 {d}, {a};", [np.abs(X)], 1 / np.sqrt(np.abs(X))),
    ("div.full.f32 {d}, {a}, {b};", [X, Y], X / Y),
    ("cvt.sat.f32.f32 {d}, {a};", [ODD], np.array([0, 1, 0, 0, 0, 1, 0, 1] * 4, F32)),
    ("cvt.rni.f32.f32 {d}, {a};", [X], np.rint(X)),
    ("cvt.rzi.s32.f32 {d}, {a};", [ODD], np.array([0, 2**31 - 1, -(2**31), 0, 0, 2, -2, 2**31 - 1] * 4, S32)),
    ("cvt.rni.s32.f32 {d}, {a};", [ODD], np.array([0, 2**31 - 1, -(2**31), 0, 0, 2, -2, 2**31 - 1] * 4, S32)),
    ("cvt.rn.f32.s32 {d}, {a};", [N], N.astype(F32)),
    ("cvt.rn.f32.u32 {d}, {a};", [U], U.astype(F32)),
    ("cvt.f32.bf16 {d}, {a};", [B], B.astype(F32)),
    ("cvt.rn.bf16.f32 {d}, {a};", [X], B),
    ("add.rn.bf16 {d}, {a}, {b};", [B, C], np.add(B, C)),
    ("mul.rn.bf16 {d}, {a}, {b};", [B, C], np.multiply(B, C)),
    ("fma.rn.bf16 {d}, {a}, {b}, {c};", [B, C, B], (B.astype(F64) * C.astype(F64) + B.astype(F64)).astype(BF16)),
    ("cvt.rn.f16x2.f32 {d}, {a}, {b};", [X, Y], np.stack([Y, X], 1).astype(np.float16).view(U32)[:, 0]),
    ("add.rn.f32x2 {d}, {a}, {b};", [PAIRS, SWAPPED], (XY + XY[:, ::-1]).view(U64)[:, 0]),
    ("mul.rn.f32x2 {d}, {a}, {b};", [PAIRS, SWAPPED], (XY * XY[:, ::-1]).view(U64)[:, 0]),
    ("max.f32 {d}, {a}, {b}, {c};", [ODD, X, Y], np.fmax(np.fmax(ODD, X), Y)),
    ("prmt.b32 {d}, {a}, {b}, 0x5410U;", [U, V], V << 16 | U & 0xFFFF),
    ("prmt.b32 {d}, {a}, {b}, 0x0123U;", [U, V], U.byteswap()),
    ("prmt.b32 {d}, {a}, {b}, 0xFFF7U;", [U, V], (V.view(S32) >> 24).view(U32)),
    ("mul.hi.u32 {d}, {a}, {b};", [U, V], (U.astype("u8") * V >> np.uint64(32)).astype(U32)),
    ("mul.rn.f64 {d}, {a}, {b};", [X.astype(F64), Y.astype(F64)], X.astype(F64) * Y),
    ("div.s32 {d}, {a}, {b};", [N, J >> 20 | 1], np.trunc(N / (J >> 20 | 1)).astype(S32)),
    ("rem.u32 {d}, {a}, {b};", [U, V >> 20 | 1], U % (V >> 20 | 1)),
    ("shf.l.wrap.b32 {d}, {a}, {b}, 9;", [U, V], V << 9 | U >> 23),
    ("shf.r.clamp.b32 {d}, {a}, {b}, 40;", [U, V], V),
    ("setp.lt.s32 %p1, {a}, {b}; selp.b32 {d}, 1, 2, %p1;", [N, J], np.where(N < J, 1, 2).astype(S32)),
    ("setp.neu.f32 %p1, {a}, 0f00000000; selp.b32 {d}, 1, 0, %p1;", [ODD], ((ODD != 0) * 1).astype(S32)),
    ("setp.ne.f32 %p1, {a}, 0f00000000; selp.b32 {d}, 1, 0, %p1;", [ODD], ((np.abs(ODD) > 0) * 1).astype(S32)),
    ("setp.ltu.f32 %p1, {a}, {b}; selp.b32 {d}, 1, 0, %p1;", [ODD, Y], (~(ODD >= Y) * 1).astype(S32)),
    ("setp.nan.f32 %p1, {a}, {a}; selp.b32 {d}, 1, 0, %p1;", [ODD], (np.isnan(ODD) * 1).astype(S32)),
    (
      "setp.gt.s32 %p2, {b}, 0; setp.gt.and.s32 %p1, {a}, 0, %p2; selp.b32 {d}, 1, 0, %p1;",
      [N, J],
      (((N > 0) & (J > 0)) * 1).astype(S32),
    ),
  ],
  ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_an_instruction_computes_what_numpy_does(operation: str, inputs: list[np.ndarray], expected: np.ndarray):
  np.testing.assert_array_equal(apply(operation, inputs, expected.dtype), expected)


ZERO, MINUS, NAN, INF, ONE = 0.0, -0.0, math.nan, math.inf, 1.0
TINY = 2.0**-149  # the least f32


def nearest_f32(exact: Fraction) -> float:
  """Returns the f32 that is nearest to a finite number, ties to an even last bit."""
  near = F32.type(float(exact))
  found = (np.nextafter(near, F32.type(-INF)), near, np.nextafter(near, F32.type(INF)))
  return float(min(found, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(U32)) & 1)))


def test_pairs_of_products_and_sums_are_rounded_once():
  """Of fma.rn.f32x2: sums that separate roundings, also a first one to 53 bits, would change."""
  numbers = RNG.standard_normal((32, 2, 3)) * [1, 1, 1e-3]
  numbers[:4, 0] = [
    (1 + 2**-12, 1 + 2**-12, -1),  # the product alone would lose 2^-24
    (24929, 673, 2**-40),  # the product is 2^24 + 1, in the middle of two f32; the addend decides
    (24929, 673, -(2**-40)),
    (-24929, 673, -(2**-40)),
  ]
  numbers[:4, 1] = [
    (24929, 673, 0),  # a tie, to even: 2^24
    (2**-75, 2**-75, TINY),  # the product alone would be 0, and is less than half of the addend's last bit
    (3 * 2.0**-75, 2.0**-75, TINY),  # and here more than half of it
    (2**-75, -(2**-75), 2**-126),
  ]
  parts = numbers.astype(F32)
  operands = [np.ascontiguousarray(parts[:, :, each]).view(U64)[:, 0] for each in range(3)]
  found = apply("fma.rn.f32x2 {d}, {a}, {b}, {c};", operands, U64).view(F32).reshape(32, 2)
  expected = [
    [nearest_f32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))) for a, b, c in pair] for pair in parts
  ]
  np.testing.assert_array_equal(found, np.array(expected, F32))
  assert found[1, 0] == 2**24 + 2 and found[2, 0] == 2**24 and found[0, 1] == 2**24


def test_pairs_of_products_and_sums_keep_what_no_number_is():
  """Of fma.rn.f32x2, each half for itself: NaN, infinities and the sign of zeros, IEEE 754 6.3."""
  cases = [  # a, b, c and the result
    (NAN, 1, 1, NAN),
    (1, NAN, 1, NAN),
    (1, 1, NAN, NAN),
    (INF, ZERO, 1, NAN),
    (INF, 1, -INF, NAN),
    (INF, -1, 5, -INF),
    (1, 2, INF, INF),
    (3e38, 3e38, -INF, -INF),  # the product overflows nothing
    (3e38, 2, 0, INF),
    (3e38, 2, -3e38, 3e38),
    (ZERO, MINUS, MINUS, MINUS),
    (ZERO, MINUS, ZERO, ZERO),
    (ZERO, ONE, MINUS, ZERO),
    (MINUS, ONE, MINUS, MINUS),
    (2, 3, -6, ZERO),
    (-TINY, TINY, ZERO, MINUS),
  ]
  low = np.array(cases, F32)
  pairs = np.stack([low, low[::-1]], 1)  # [16, 2, 4]
  operands = [np.ascontiguousarray(pairs[:, :, each]).view(U64)[:, 0] for each in range(3)]
  found = apply("fma.rn.f32x2 {d}, {a}, {b}, {c};", operands, U64).view(F32).reshape(-1, 2)
  np.testing.assert_array_equal(found, pairs[:, :, 3])
  signs = ~np.isnan(found)
  np.testing.assert_array_equal(np.signbit(found[signs]), np.signbit(pairs[:, :, 3][signs]))


@pytest.mark.parametrize(
  ("operation", "expected"),
  [
    ("max", [3, 3, 3, 2, 2, 5, NAN, INF, ZERO, ZERO, ZERO, MINUS, -1]),
    ("max.NaN", [3, 3, 3, NAN, NAN, NAN, NAN, INF, ZERO, ZERO, ZERO, MINUS, -1]),
    ("min", [1, 1, 1, 1, 1, 5, NAN, -INF, MINUS, MINUS, MINUS, MINUS, -3]),
    ("min.NaN", [1, 1, 1, NAN, NAN, NAN, NAN, -INF, MINUS, MINUS, MINUS, MINUS, -3]),
  ],
)
def test_the_extreme_of_three_numbers(operation: str, expected: list[float]):
  """Of min and max of three f32 (PTX ISA): a NaN is left out, or stays with .NaN, and +0 is more than -0."""
  inputs = [
    (1, 2, 3),
    (3, 1, 2),
    (2, 3, 1),
    (NAN, 1, 2),
    (2, 1, NAN),
    (NAN, 5, NAN),
    (NAN, NAN, NAN),
    (INF, 0, -INF),
    (ZERO, MINUS, MINUS),
    (MINUS, ZERO, MINUS),
    (MINUS, MINUS, ZERO),
    (MINUS, MINUS, MINUS),
    (-1, -2, -3),
  ]
  a, b, c = np.array(inputs, F32).T
  # All lanes, since numpy's own choice between zeros depends on a lane's place.
  for start in range(len(inputs)):
    lanes = (np.arange(32) + start) % len(inputs)
    found = apply(f"{operation}.f32 {{d}}, {{a}}, {{b}}, {{c}};", [a[lanes], b[lanes], c[lanes]], F32)
    wanted = np.array(expected, F32)[lanes]
    np.testing.assert_array_equal(found, wanted)
    signs = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[signs]), np.signbit(wanted[signs]))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_zeros_have_an_order_in_extremes_of_two(kind: str):
  dtype = {"f32": F32, "f16": np.dtype(np.float16), "bf16": BF16}[kind]
  a, b = np.array([ZERO, MINUS] * 16).astype(dtype), np.array([MINUS, ZERO] * 16).astype(dtype)
  for name, is_negative in (("max", False), ("min", True), ("max.NaN", False), ("min.NaN", True)):
    assert (np.signbit(apply(f"{name}.{kind} {{d}}, {{a}}, {{b}};", [a, b], dtype)) == is_negative).all(), name


def test_four_numbers_have_no_extreme():
  with pytest.raises(PtxError, match="the emulator does not know max.f32"):
    apply("max.f32 {d}, {a}, {b}, {c}, {c};", [X, Y, Z], F32)
  with pytest.raises(PtxError, match="the emulator does not know max.s32"):
    apply("max.s32 {d}, {a}, {b}, {c};", [N, J, K], S32)


def test_a_product_and_sum_are_rounded_down_once():
  a, b = (RNG.standard_normal(32).astype(F32) for _ in range(2))
  c = (RNG.standard_normal(32) * 1e4).astype(F32)
  found = apply("fma.rm.f32 {d}, {a}, {b}, {c};", [a, b, c], F32)
  for value, *parts in zip(found, a, b, c, strict=True):
    exact = Fraction(float(parts[0])) * Fraction(float(parts[1])) + Fraction(float(parts[2]))
    above = np.nextafter(value, F32.type(np.inf))
    assert Fraction(float(value)) <= exact < Fraction(float(above))


def test_a_carry_goes_from_the_low_product_into_the_high_one():
  high = apply("mad.lo.cc.u32 %r60, {a}, {b}, {c}; madc.hi.u32 {d}, {a}, {b}, 0;", [U, V, K.view(U32)], U32)
  total = U.astype(object) * V.astype(object) + K.view(U32).astype(object)
  np.testing.assert_array_equal(high, np.array(total >> 32, U32))


@pytest.mark.parametrize(
  ("operation", "expected"),
  [
    ("shfl.sync.down.b32 {d}, {a}, 4, 31, -1;", [*N[4:], *N[28:]]),
    ("shfl.sync.up.b32 {d}, {a}, 4, 0, -1;", [*N[:4], *N[:28]]),
    ("shfl.sync.bfly.b32 {d}, {a}, 3, 31, -1;", N[np.arange(32) ^ 3]),
    ("redux.sync.min.s32 {d}, {a}, -1;", [N.min()] * 32),
    ("redux.sync.add.s32 {d}, {a}, 255;", [N[:8].sum(dtype=S32)] * 32),
  ],
)
def test_lanes_exchange_values(operation: str, expected: list):
  before = "mov.b32 %r80, -1;" if "255" not in operation else "mov.b32 %r80, 255;"
  operation = operation.replace("-1;", "%r80;").replace("255;", "%r80;") if "redux" in operation else operation
  np.testing.assert_array_equal(apply(operation, [N], S32, before), np.array(expected, S32))


def test_each_thread_has_its_own_local_memory():
  body = """
  .local .align 4 .b8 depot[16];
  .reg .b64 %SPL;
  mov.b64 %SPL, depot;
  st.local.b32 [%SPL+4], {a};
  ld.local.b32 {d}, [%SPL+4];
  """
  np.testing.assert_array_equal(apply(body, [N], S32), N)
  with pytest.raises(KernelFault, match="4 bytes at 16 of a thread's local memory, which has 16"):
    apply(body.replace("%SPL+4", "%SPL+16"), [N], S32)


def test_blocks_add_to_one_number_atomically():
  total, old = np.zeros(1, U32), np.zeros(96, U32)
  body = """
  ld.param::entry.b64 %rd1, [a]; ld.param::entry.b64 %rd2, [b];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.s32 %r3, %r1, 32, %r2;
  atom.relaxed.sys.global.add.u32 %r4, [%rd1], 3;
  mul.wide.u32 %rd3, %r3, 4; add.s64 %rd4, %rd2, %rd3; st.global.b32 [%rd4], %r4;
  """
  run(body, {"a": total, "b": old}, grid=3)
  assert total[0] == 3 * 96
  np.testing.assert_array_equal(np.sort(old), np.arange(0, 3 * 96, 3))
  with pytest.raises(KernelFault, match="reads bytes that an atomic operation has written"):
    run(body + "ld.global.b32 %r5, [%rd1];", {"a": total, "b": old}, grid=3)


# Matrix A is 16 x 16, B is 16 x 8 and the sum 16 x 8; lane 4r + c. ("Matrix Fragments for mma.m16n8k16")
def test_a_warp_multiplies_fragments_of_matrices():
  a, b = RNG.standard_normal((16, 16)).astype(BF16), RNG.standard_normal((16, 8)).astype(BF16)
  c, d = RNG.standard_normal((16, 8)).astype(F32), np.zeros((32, 4), F32)
  left, right, start = np.zeros((32, 4, 2), BF16), np.zeros((32, 2, 2), BF16), np.zeros((32, 4), F32)
  for lane in range(32):
    row, column = lane // 4, 2 * (lane % 4)
    for half in range(2):
      for part, (down, across) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        left[lane, part, half] = a[row + down, column + half + across]
      for part in range(2):
        right[lane, part, half] = b[column + half + 8 * part, row]
        start[lane, 2 * part + half] = c[row + 8 * part, column + half]
  registers = ", ".join(f"%r{number}" for number in range(30, 34))
  body = f"""
  ld.param::entry.b64 %rd1, [a]; ld.param::entry.b64 %rd2, [b]; ld.param::entry.b64 %rd3, [c];
  ld.param::entry.b64 %rd4, [d]; mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd5, %r1, 16; mul.wide.u32 %rd6, %r1, 8;
  add.s64 %rd1, %rd1, %rd5; add.s64 %rd2, %rd2, %rd6; add.s64 %rd3, %rd3, %rd5; add.s64 %rd4, %rd4, %rd5;
  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd1]; ld.global.v2.b32 {{%r14, %r15}}, [%rd2];
  ld.global.v4.b32 {{{registers}}}, [ %rd3 + 0 ];
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{ {registers} }}, {{ %r10, %r11, %r12, %r13 }},
    {{ %r14, %r15 }}, {{ {registers} }};
  st.global.v4.b32 [%rd4], {{{registers}}};
  """
  run(body, {"a": left, "b": right, "c": start, "d": d})
  expected, found = a.astype(F32) @ b.astype(F32) + c, np.zeros((16, 8), F32)
  for lane in range(32):
    row, column = lane // 4, 2 * (lane % 4)
    found[row, column : column + 2], found[row + 8, column : column + 2] = d[lane, :2], d[lane, 2:]
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


LOOP = """
  ld.param::entry.b64 %rd1, [a]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.s32 %r3, %r1, {threads}, %r2;
  mov.b32 %r4, 0; mov.b32 %r5, 0;
AGAIN:
  add.s32 %r4, %r4, %r5; add.s32 %r5, %r5, 1;
  setp.le.s32 %p1, %r5, %r3; @%p1 bra AGAIN;
  mul.wide.u32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3], %r4;
"""


def test_independent_blocks_run_in_lockstep_and_loop_as_often_as_each_thread_wants():
  kernel = make_kernel(LOOP.format(threads=8), "a", threads=8)
  assert lockstep.is_independent(kernel)
  found = np.zeros(24, S32)
  run(LOOP.format(threads=8), {"a": found}, threads=8, grid=3)
  np.testing.assert_array_equal(found, [n * (n + 1) // 2 for n in range(24)])


def test_blocks_in_lockstep_may_not_read_what_another_one_has_written():
  body = "ld.param::entry.b64 %rd1, [a]; st.global.b32 [%rd1], 7; ld.global.b32 %r1, [%rd1];"
  run(body, {"a": np.zeros(1, S32)})
  with pytest.raises(
    KernelFault, match=r"line \d+: ld.global.b32 .*: a: block \d reads bytes that block \d has written"
  ):
    run(body, {"a": np.zeros(1, S32)}, grid=2)


def test_a_barrier_of_a_warp_that_not_all_lanes_reach_is_an_error():
  body = "mov.u32 %r1, %tid.x; setp.gt.s32 %p1, %r1, 4; @%p1 bra AWAY; bar.warp.sync -1; AWAY:"
  with pytest.raises(KernelFault, match="other lanes of the warp are elsewhere"):
    run(body, {"a": np.zeros(1, S32)})


def test_a_shared_array_lies_behind_another_one_and_the_dynamic_part_behind_both():
  head = ".extern .shared .align 16 .b8 rest[];"
  body = """
  .shared .align 4 .b8 one[4];
  .shared .align 8 .b8 two[8];
  mov.b64 %rd5, one; mov.b64 %rd6, two; mov.b64 %rd7, rest; ld.param::entry.b64 %rd1, [a];
  sub.s64 %rd8, %rd6, %rd5; sub.s64 %rd9, %rd7, %rd6; st.global.b64 [%rd1], %rd8; st.global.b64 [%rd1+8], %rd9;
  st.shared.b32 [%rd7+28], 5;
  """
  found = np.zeros(2, np.int64)
  run(body, {"a": found}, threads=1, head=head, shared=32)
  assert found[0] == 8 and found[1] >= 8
  with pytest.raises(KernelFault, match="4 bytes at shared address"):
    run(body, {"a": found}, threads=1, head=head, shared=28)


@pytest.mark.parametrize(
  "operation", ["mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 %r1, %r2, %r3, %r4;", "brev.b32 %r1, %r2;"]
)
def test_an_unknown_instruction_stops_before_anything_runs(operation: str):
  body = f"ld.param::entry.b64 %rd1, [a]; st.global.b32 [%rd1], 7;\n{operation}"
  array = np.zeros(1, S32)
  with pytest.raises(PtxError, match=r"line \d+: the emulator does not know"):
    run(body, {"a": array})
  assert array[0] == 0


# Warp 0 of each block loads an 8 x 8 matrix, transposed, that warp 1 has stored, and writes it at the block's place.
EXCHANGE = """
  ld.param::entry.b64 %rd1, [a]; ld.param::entry.b64 %rd2, [b];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; and.b32 %r3, %r2, 31; shr.u32 %r4, %r2, 5;
  mad.lo.s32 %r5, %r1, 32, %r3; mul.wide.u32 %rd3, %r5, 4;
  add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
  mov.b64 %rd4, tile; mul.wide.u32 %rd5, %r3, 16; and.b64 %rd5, %rd5, 127; add.s64 %rd4, %rd4, %rd5;
  setp.eq.s32 %p1, %r4, 0; @%p1 bra MEET;
  ld.global.b32 %r6, [%rd1];
  stmatrix.sync.aligned.m8n8.x1.shared.b16 [%rd4], {%r6};
MEET:
  BARRIER
  @!%p1 bra DONE;
  ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r7}, [%rd4];
  st.global.b32 [%rd2], %r7;
DONE:
"""


@pytest.mark.parametrize("is_of_xla", [False, True], ids=["one by one", "side by side"])
def test_blocks_have_shared_memory_of_their_own(is_of_xla: bool):
  source = RNG.integers(0, 1000, (5, 8, 8)).astype(np.uint16)
  found = np.zeros_like(source)
  rest = {
    "threads": 64,
    "grid": 5,
    "head": ".extern .shared .align 16 .b8 tile[];",
    "shared": 128,
    "is_of_xla": is_of_xla,
  }
  run(EXCHANGE.replace("BARRIER", "bar.sync 0;"), {"a": source, "b": found}, **rest)
  np.testing.assert_array_equal(found, source.swapaxes(1, 2))
  with pytest.raises(KernelFault, match="nothing orders the two"):
    run(EXCHANGE.replace("BARRIER", ""), {"a": source, "b": found}, **rest)


def test_warps_of_xla_may_write_equal_bytes_without_an_order():
  body = """
  mov.b64 %rd4, tile; ld.param::entry.b64 %rd1, [a]; ld.global.b32 %r1, [%rd1];
  st.shared.b32 [%rd4], %r1;
  """
  rest = {"threads": 64, "head": ".extern .shared .align 16 .b8 tile[];", "shared": 128}
  run(body, {"a": np.array([5], S32)}, **rest, is_of_xla=True)
  with pytest.raises(
    KernelFault, match="overwrites byte 0 of shared memory, which warp . wrote; nothing orders the two"
  ):
    run(body, {"a": np.array([5], S32)}, **rest)
  with pytest.raises(KernelFault, match="nothing orders the two"):
    run("mov.u32 %r2, %tid.x; shr.u32 %r2, %r2, 5;" + body.replace("], %r1", "], %r2"), {"a": np.zeros(1, S32)}, **rest)


# Two warps of each block exchange numbers as often as their block wants, sum them, and then exchange the sums. A block
# that wants a negative number ends at once.
ROUNDS = """
  ld.param::entry.b64 %rd1, [a]; ld.param::entry.b64 %rd2, [b];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd3, %r1, 4; add.s64 %rd3, %rd1, %rd3; ld.global.b32 %r3, [%rd3];
  setp.lt.s32 %p1, %r3, 0; @%p1 ret;
  mad.lo.s32 %r4, %r1, 64, %r2; mul.wide.u32 %rd4, %r4, 4; add.s64 %rd2, %rd2, %rd4;
  mov.b64 %rd5, tile; xor.b32 %r5, %r2, 32;
  mul.wide.u32 %rd6, %r2, 4; add.s64 %rd6, %rd5, %rd6; mul.wide.u32 %rd7, %r5, 4; add.s64 %rd7, %rd5, %rd7;
  mov.b32 %r6, 0; mov.b32 %r7, 0;
  setp.ge.s32 %p1, %r6, %r3; @%p1 bra LAST;
AGAIN:
  add.s32 %r8, %r4, %r6; st.shared.b32 [%rd6], %r8;
  bar.sync 0;
  ld.shared.b32 %r9, [%rd7]; add.s32 %r7, %r7, %r9;
  INSIDE
  add.s32 %r6, %r6, 1; setp.lt.s32 %p1, %r6, %r3; @%p1 bra AGAIN;
LAST:
  st.shared.b32 [%rd6], %r7;
  BEHIND
  ld.shared.b32 %r9, [%rd7]; st.global.b32 [%rd2], %r9;
"""


def run_rounds(found: np.ndarray, inside: str = "bar.sync 0;", behind: str = "bar.sync 0;", side: bool = True) -> None:
  """Runs ROUNDS in a block for each of six counts, which it sums into `found`, int32[6, 64]."""
  body = ROUNDS.replace("INSIDE", inside).replace("BEHIND", behind)
  arrays = {"a": np.array(COUNTS, S32), "b": found}
  run(body, arrays, 64, 6, ".extern .shared .align 16 .b8 tile[];", 256, is_of_xla=side)


COUNTS = (3, 0, 1, 3, 2, -1)


@pytest.mark.parametrize("side", [False, True], ids=["one by one", "side by side"])
def test_blocks_that_differ_in_length_go_on_as_rows_of_their_own(side: bool):
  """Those without a round wait at the last barrier, while others wait at one in the loop: no deadlock."""
  found = np.zeros((6, 64), S32)
  run_rounds(found, side=side)
  own = np.arange(6 * 64, dtype=S32).reshape(6, 64)  # a thread gets the sum of what it wrote itself, twice exchanged
  counts = np.maximum(COUNTS, 0)[:, None]
  expected = own * counts + counts * (counts - 1) // 2
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  ("parts", "words"),
  [
    ({"inside": ""}, "nothing orders the two"),
    ({"behind": ""}, "nothing orders the two"),
    (
      {"behind": "setp.eq.s32 %p2, %r3, 1; setp.gt.and.s32 %p2, %r2, 31, %p2; @%p2 ret; bar.sync 0;"},
      r"block 2: deadlock[^$]*warp 0, 32 lanes, line 29: bar.sync 0: barrier 0 has 32 of 64 threads",
    ),
  ],
)
def test_what_rows_of_their_own_may_not_lack(parts: dict, words: str):
  with pytest.raises(KernelFault, match=words):
    run_rounds(np.zeros((6, 64), S32), **parts)


# Each block copies as many pieces of 16 bytes a thread as it wants, and thread t then reads what thread t + 32 copied.
PIECES = """
  ld.param::entry.b64 %rd1, [a]; ld.param::entry.b64 %rd2, [b]; ld.param::entry.b64 %rd9, [c];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd3, %r1, 4; add.s64 %rd3, %rd9, %rd3; ld.global.b32 %r3, [%rd3];
  mad.lo.s32 %r4, %r1, 64, %r2; mul.wide.u32 %rd4, %r4, 16; add.s64 %rd1, %rd1, %rd4; add.s64 %rd2, %rd2, %rd4;
  mov.b64 %rd5, tile; xor.b32 %r5, %r2, 32;
  mul.wide.u32 %rd6, %r2, 16; add.s64 %rd6, %rd5, %rd6; mul.wide.u32 %rd7, %r5, 16; add.s64 %rd7, %rd5, %rd7;
  mov.b32 %r6, 0;
AGAIN:
  cp.async.cg.shared.global [%rd6], [%rd1], 16;
  cp.async.commit_group;
  WAIT
  bar.sync 0;
  ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%rd7]; st.global.v4.b32 [%rd2], {%r10, %r11, %r12, %r13};
  bar.sync 0;
  add.s64 %rd1, %rd1, 6144; add.s64 %rd2, %rd2, 6144;
  add.s32 %r6, %r6, 1; setp.lt.s32 %p1, %r6, %r3; @%p1 bra AGAIN;
  bar.sync 0;
"""


@pytest.mark.parametrize("side", [False, True], ids=["one by one", "side by side"])
def test_copies_of_threads_run_in_blocks_of_different_length(side: bool):
  counts = np.array([3, 1, 1, 3, 2, 1], S32)
  source = RNG.integers(0, 1000, (3, 6, 2, 32, 4)).astype(S32)
  found = np.full_like(source, -1)
  rest = {"threads": 64, "grid": 6, "head": ".extern .shared .align 16 .b8 tile[];", "shared": 1024, "is_of_xla": side}
  arrays = {"a": source, "b": found, "c": counts}
  run(PIECES.replace("WAIT", "cp.async.wait_group 0;"), arrays, **rest)
  copied = (np.arange(3)[:, None] < counts)[..., None, None, None]
  np.testing.assert_array_equal(found, np.where(copied, source[:, :, ::-1], -1))
  assert lockstep.is_regular(make_kernel(PIECES.replace("WAIT", ""), "abc", 64, rest["head"]))
  with pytest.raises(KernelFault, match="nobody has waited"):
    run(PIECES.replace("WAIT", ""), arrays, **rest)
