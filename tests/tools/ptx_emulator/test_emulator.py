"""The PTX emulator on small kernels: what they compute, and that a missing barrier, wait or fence is an error."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.emulator import run_kernel
from tools.ptx_emulator.floats import bf16_to_f32, e4m3_to_f16, f32_to_bf16, f32_to_e4m3, f32_to_f16
from tools.ptx_emulator.memory import AccessError, GlobalMemory
from tools.ptx_emulator.reader import PtxError, read_kernels
from tools.ptx_emulator.tensor_map import TensorMap, swizzle_offsets

SHARED = 65536
SEEDS = range(12)
ELECT = """
  elect.sync %r90|%p90, -1;
  mov.u32 %r91, %tid.x;
  setp.lt.u32 %p91, %r91, 32;
  and.pred %p1, %p90, %p91;
"""
# One thread initializes mbarrier 0 of shared memory's end, for `arrivals`.
INIT = """
  mov.b64 %rd1, shmem;
  cvt.u32.u64 %r1, %rd1;
  add.s32 %r2, %r1, 65528;
  mov.b32 %r3, {arrivals};
  @%p1 mbarrier.init.shared.b64 [%r2], %r3;
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
WAIT = """
  mov.b32 %r80, {parity};
  {{ .reg .pred P1;
  LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r2], %r80, 1000;
  @P1 bra.uni DONE;
  bra.uni LAB_WAIT;
  DONE: }}
"""
WAIT_FIRST = WAIT.format(parity=0)
LOAD = """
  @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2], {bytes};
  mov.b64 %rd5, maps;
  cvta.param.u64 %rd6, %rd5;
  mov.b32 %r10, 0;
  @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd6, {{%r10, %r10}}], [%r2];
"""
STORE = """
  add.s64 %rd7, %rd6, 128;
  mov.b32 %r11, 0;
  @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd7, {%r11, %r11}], [%r1];
  cp.async.bulk.commit_group;
"""
# Each thread adds 1 to its four bytes of a tile.
ADD = """
  mov.u32 %r20, %tid.x;
  shl.b32 %r21, %r20, 2;
  add.s32 %r22, %r1, %r21;
  ld.shared.b32 %r23, [%r22];
  add.s32 %r24, %r23, 1;
  st.shared.b32 [%r22], %r24;
"""


UNWAITED = "operation 0 writes; nobody has waited|which warp . (wrote|reads); nothing orders the two"


def make_kernel(body: str, params: str = ".param .u64 .ptr .align 256 a", threads: int = 128):
  """Returns a kernel of `body`."""
  (kernel,) = read_kernels(
    f".version 9.0\n.target sm_90a\n.visible .entry k({params})\n.maxntid {threads}, 1, 1\n{{\n"
    ".reg .pred %p<99>;\n.reg .b16 %rs<99>;\n.reg .b32 %r<300>;\n.reg .b64 %rd<99>;\n"
    f".shared .align 16 .b8 shmem[];\n{body}\nret;\n}}\n"
  )
  return kernel


def run(body: str, arrays: Sequence[np.ndarray], seed: int = 0, grid=(1, 1, 1), threads: int = 128) -> None:
  """Runs a kernel whose parameters a, b, ... are arrays."""
  memory = GlobalMemory()
  names = "abcdef"[: len(arrays)]
  addresses = [memory.add_buffer(name, array).address for name, array in zip(names, arrays, strict=True)]
  params = ", ".join(f".param .u64 .ptr .align 256 {name}" for name in names)
  run_kernel(make_kernel(body, params, threads), memory, addresses, grid, SHARED, seed)


def run_tiles(body: str, seed: int, swizzle: int = 0, load_box=(32, 4)) -> tuple[np.ndarray, np.ndarray]:
  """Runs a kernel with two tensor maps of int32[4, 32]: a source and a target. Returns both."""
  memory = GlobalMemory()
  source, target = np.arange(128, dtype=np.int32).reshape(4, 32), np.full((4, 32), -7, np.int32)
  maps = [
    TensorMap(memory.add_buffer(name, array).address, 4, (32, 4), (4, 128), box, swizzle)
    for name, array, box in (("source", source, load_box), ("target", target, (32, 4)))
  ]
  kernel = make_kernel(body, ".param .align 64 .b8 maps[256]")
  run_kernel(kernel, memory, [maps], (1, 1, 1), SHARED, seed)
  return source, target


def tile_body(
  *,
  arrivals: int = 1,
  size: int = 512,
  wait: str = WAIT_FIRST,
  fence: str = "fence.proxy.async.shared::cta;",
  bar: str = "bar.sync 0;",
  last: str = "cp.async.bulk.wait_group.read 0;",
) -> str:
  """A tile is loaded, changed and stored; each part may be left out."""
  return ELECT + INIT.format(arrivals=arrivals) + LOAD.format(bytes=size) + wait + ADD + fence + bar + STORE + last


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tile_is_loaded_changed_and_stored(seed: int):
  source, target = run_tiles(tile_body(), seed)
  np.testing.assert_array_equal(target, source + 1)


@pytest.mark.parametrize(
  ("parts", "words"),
  [
    ({"wait": ""}, UNWAITED),
    ({"wait": WAIT.format(parity=1)}, UNWAITED),
    ({"size": 256}, f"{UNWAITED}|deadlock"),
    ({"size": 1024}, "(?s)deadlock.*mbarrier.try_wait.*lacks 0 of 1 arrivals and 512 bytes"),
    ({"arrivals": 2}, "(?s)deadlock.*lacks 1 of 2 arrivals"),
    ({"fence": ""}, "no fence.proxy.async is between them"),
    ({"bar": ""}, "nothing orders the two|operation 1 reads; nobody has waited"),
    ({"last": ""}, "the kernel ends before its bulk copies have read shared memory"),
    (
      {"last": "add.s32 %r24, %r24, 1; st.shared.b32 [%r22], %r24; cp.async.bulk.wait_group.read 0;"},
      "operation 1 reads; nobody has waited|nothing orders the two",
    ),
  ],
  ids=["no_wait", "wrong_parity", "expects_too_few_bytes", "expects_too_many_bytes", "an_arrival_too_few", "no_fence",
       "no_barrier", "no_wait_at_the_end", "overwritten_while_it_is_stored"],
)  # fmt: skip
def test_what_a_tile_may_not_lack(parts: dict, words: str):
  """A fault is found under any schedule: the order is wrong, whether or not the numbers are."""
  for seed in SEEDS:
    with pytest.raises(KernelFault, match=words):
      run_tiles(tile_body(**parts), seed)


def test_an_mbarrier_needs_its_fence():
  body = tile_body().replace("fence.mbarrier_init.release.cluster;", "")
  with pytest.raises(KernelFault, match=r"no fence.mbarrier_init followed"):
    run_tiles(body, 0)


def test_swizzled_tiles_lie_where_the_isa_says():
  """In 8 lines of 128 bytes, chunk j of line i lies at j ^ i; of 64 bytes, at j ^ (i / 2); of 32, at j ^ (i / 4)."""
  for swizzle, divisor in ((128, 1), (64, 2), (32, 4)):
    lines, chunks = np.arange(16)[:, None], np.arange(swizzle // 16)[None, :]
    placed = swizzle_offsets(lines * swizzle + chunks * 16, swizzle)
    np.testing.assert_array_equal(placed, lines * swizzle + (chunks ^ (lines // divisor % (swizzle // 16))) * 16)


def test_a_swizzled_tile_is_not_read_as_a_plain_one():
  _, target = run_tiles(tile_body(), 0, swizzle=128)
  np.testing.assert_array_equal(target, np.arange(128).reshape(4, 32) + 1)  # the same places for both copies
  body = tile_body().replace("ld.shared.b32 %r23, [%r22];", "ld.shared.b32 %r23, [%r22]; add.s32 %r23, %r23, %r20;")
  _, target = run_tiles(body, 0, swizzle=128)
  assert (target != 2 * np.arange(128).reshape(4, 32) + 1).any()
  _, target = run_tiles(body, 0)
  np.testing.assert_array_equal(target, 2 * np.arange(128).reshape(4, 32) + 1)


def test_parts_of_a_box_outside_of_the_tensor_are_zeros_and_count():
  memory = GlobalMemory()
  tensor = TensorMap(memory.add_buffer("x", np.ones((4, 32), np.int32)).address, 4, (32, 4), (4, 128), (32, 8))
  addresses, inside = tensor.locate_box((0, -2))
  assert tensor.box_bytes == 1024 and inside.reshape(8, 32).any(1).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
  assert addresses.reshape(8, 32)[2, 0] == tensor.address


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"address": 8}, "address 0x8 is no multiple of 16"),
    ({"strides": (4, 12)}, "no multiples of 16"),
    ({"box": (32, 300)}, "exceeds 256"),
    ({"box": (3, 1)}, "a line of the box has 12 bytes"),
    ({"swizzle": 32}, "more than its swizzle of 32"),
  ],
)
def test_a_tensor_map_that_the_driver_refuses(change: dict, words: str):
  with pytest.raises(AccessError, match=words):
    TensorMap(**({"address": 0, "itemsize": 4, "sizes": (32, 4), "strides": (4, 128), "box": (32, 4)} | change))


SUM = """
  ld.param.b64 %rd1, [a];
  ld.param.b64 %rd2, [b];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  ld.global.b32 %r2, [%rd4];
  mov.b32 %r3, 0;
$LOOP:
  setp.ge.s32 %p1, %r3, %r2;
  @%p1 bra $END;
  add.s32 %r3, %r3, 3;
  bra.uni $LOOP;
$END:
  st.global.b32 [%rd5], %r3;
"""


def test_lanes_that_part_meet_again():
  a, b = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
  run(SUM, [a, b], threads=64)
  np.testing.assert_array_equal(b, -(-a // 3) * 3)


@pytest.mark.parametrize("convert", ["cvta.to.global.u64", "cvta.global.u64"])
def test_an_address_of_global_memory_is_a_generic_one(convert: str):
  found = np.zeros(128, np.int32)
  body = f"""
  ld.param.b64 %rd1, [a];
  {convert} %rd2, %rd1;
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  cvt.u64.u32 %rd3, %r2;
  add.s64 %rd4, %rd2, %rd3;
  st.global.b32 [%rd4], %r1;
"""
  run(body, [found])
  np.testing.assert_array_equal(found, np.arange(128))


def test_an_access_outside_of_a_buffer_names_it():
  with pytest.raises(KernelFault, match=r"line \d+: ld.global.b32 .*: 4 bytes at offset 128 of a, which has 128"):
    run(SUM, [np.zeros(32, np.int32), np.zeros(64, np.int32)], threads=64)


def test_a_block_that_reads_what_another_wrote_is_noticed():
  with pytest.raises(KernelFault, match="a: block . reads bytes that block . has written"):
    run(SUM.replace("[b]", "[a]"), [np.zeros(32, np.int32)], threads=32, grid=(2, 1, 1))


# Each block copies 16 bytes to its place of a and counts; the last one adds up all places and writes b.
LAST_BLOCK_SUMS = """
  ld.param.b64 %rd1, [a];
  ld.param.b64 %rd2, [b];
  ld.param.b64 %rd3, [c];
  mov.b64 %rd4, shmem;
  cvt.u32.u64 %r1, %rd4;
  mov.u32 %r2, %ctaid.x;
  add.s32 %r3, %r2, 1;
  st.shared.b32 [%r1], %r3;
  fence.proxy.async.shared::cta;
  mul.wide.u32 %rd5, %r2, 16;
  add.s64 %rd6, %rd1, %rd5;
  elect.sync %r90|%p1, -1;
  {early}
  @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd6], [%r1], 16;
  cp.async.bulk.commit_group;
  {wait}
  {late}
  shfl.sync.idx.b32 %r5, %r4, 0, 31, -1;
  setp.ne.s32 %p2, %r5, 7;
  @%p2 bra $END;
  mov.b32 %r6, 0;
  mov.b32 %r7, 0;
$LOOP:
  ld.global.b32 %r8, [%rd1];
  add.s32 %r6, %r6, %r8;
  add.s64 %rd1, %rd1, 16;
  add.s32 %r7, %r7, 1;
  setp.lt.s32 %p3, %r7, 8;
  @%p3 bra $LOOP;
  st.global.b32 [%rd2], %r6;
$END:
  cp.async.bulk.wait_group 0;
"""
COUNT = "mov.b32 %r4, 0; @%p1 atom.acq_rel.gpu.global.add.u32 %r4, [%rd3], 1;"


def sum_in_the_last_block(seed: int, early: str = "", wait: str = "cp.async.bulk.wait_group 0;", late: str = COUNT):
  out = np.zeros(1, np.int32)
  body = LAST_BLOCK_SUMS.format(early=early, wait=wait, late=late)
  run(body, [np.zeros(32, np.int32), out, np.zeros(1, np.int32)], seed, threads=32, grid=(8, 1, 1))
  return int(out[0])


def test_a_counter_orders_blocks():
  assert {sum_in_the_last_block(seed) for seed in SEEDS} == {36}


@pytest.mark.parametrize(
  "parts",
  [{"wait": "cp.async.bulk.wait_group.read 0;"}, {"wait": ""}, {"early": COUNT, "late": ""}],
  ids=["waits_for_the_read_only", "does_not_wait", "counts_before_the_copy"],
)
def test_a_counter_does_not_order_what_has_not_ended(parts: dict):
  """The sum may be right, since the copies may have ended; the order never is."""
  faults = 0
  for seed in SEEDS:
    try:
      sum_in_the_last_block(seed, **parts)
    except KernelFault as fault:
      assert "reads bytes that block" in str(fault)
      faults += 1
  assert faults >= len(SEEDS) // 2


SHARE = """
  ld.param.b64 %rd2, [a];
  mov.b64 %rd1, shmem;
  cvt.u32.u64 %r1, %rd1;
  mov.u32 %r2, %tid.x;
  shl.b32 %r3, %r2, 2;
  add.s32 %r4, %r1, %r3;
  st.shared.b32 [%r4], %r2;
  {barrier}
  xor.b32 %r5, %r3, 256;
  add.s32 %r6, %r1, %r5;
  ld.shared.b32 %r7, [%r6];
  cvt.u64.u32 %rd3, %r3;
  add.s64 %rd4, %rd2, %rd3;
  st.global.b32 [%rd4], %r7;
"""


def test_warps_exchange_numbers_behind_a_barrier():
  for seed in SEEDS:
    out = np.zeros(128, np.int32)
    run(SHARE.format(barrier="bar.sync 0;"), [out], seed)
    np.testing.assert_array_equal(out, np.arange(128) ^ 64)
    with pytest.raises(KernelFault, match="nothing orders the two"):
      run(SHARE.format(barrier=""), [out], seed)


def test_a_barrier_that_not_all_reach_is_a_deadlock_with_both_sides():
  body = SHARE.format(barrier="setp.lt.u32 %p1, %r2, 64; @%p1 bra $SKIP; bar.sync 0; $SKIP: bar.sync 1;")
  with pytest.raises(KernelFault, match=r"(?s)deadlock.*barrier 1 has 64 of 128 threads.*barrier 0 has 64 of 128"):
    run(body, [np.zeros(128, np.int32)])


def test_an_unknown_instruction_stops_it_before_anything_runs():
  out = np.zeros(128, np.int32)
  with pytest.raises(PtxError, match=r"line \d+: the emulator does not know dp4a"):
    run(SHARE.format(barrier="bar.sync 0;") + "dp4a.s32.s32 %r1, %r2, %r3, %r4;", [out])
  assert not out.any()


def test_a_register_that_nothing_wrote_is_an_error():
  with pytest.raises(KernelFault, match="register %r9 is read before it is written"):
    run("add.s32 %r1, %r9, 1;", [np.zeros(4, np.int32)])


def test_floats_are_those_of_the_isa():
  values = np.array([1.0, -2.5, np.nan, np.inf, 3.0e38, 1e-3, 0.3, 1.00390625], np.float32)
  found = bf16_to_f32(f32_to_bf16(values))
  np.testing.assert_array_equal(found[[0, 1, 3, 7]], [1.0, -2.5, np.inf, 1.0])  # 1 + 1/256 is a tie: to even
  assert np.isnan(found[2]) and abs(found[6] - 0.3) <= 0.3 * 2**-8


# Each thread copies its 16 bytes of a, in two groups, and writes b: the first part from the next thread's place.
PIECES = """
  ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; ld.param.b64 %rd3, [c];
  mov.b64 %rd4, shmem; cvt.u32.u64 %r1, %rd4;
  mov.u32 %r2, %tid.x; mul.wide.u32 %rd5, %r2, 16; cvt.u32.u64 %r3, %rd5; add.s32 %r4, %r1, %r3;
  add.s64 %rd6, %rd1, %rd5; add.s64 %rd7, %rd2, %rd5;
  mul.wide.u32 %rd8, %r2, 4; add.s64 %rd9, %rd3, %rd8; ld.global.b32 %r5, [%rd9];
  cp.async.cg.shared.global [ %r4 + 0 ], [ %rd6 + 0 ], 0x10, %r5;
  {commit}
  cp.async.ca.shared.global [%r4+2048], [%rd6], 8;
  cp.async.commit_group;
  {wait}
  {bar}
  xor.b32 %r6, %r3, 1024; add.s32 %r7, %r1, %r6;
  ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r7];
  {middle}
  ld.shared.v2.b32 {{%r14, %r15}}, [%r4+2048];
  st.global.v4.b32 [%rd7], {{%r10, %r11, %r12, %r13}};
  st.global.v2.b32 [%rd7+2048], {{%r14, %r15}};
  {last}
"""
PIECE_PARTS = {
  "commit": "cp.async.commit_group;",
  "wait": "cp.async.wait_group 1;",
  "bar": "bar.sync 0;",
  "middle": "cp.async.wait_group 0;",
  "last": "",
}


def copy_pieces(seed: int, sizes: np.ndarray, threads: int = 128, **parts: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns a and b of PIECES. Args: sizes: bytes that each thread's first copy reads."""
  source, seen = np.arange(1, 1 + 16 * threads, dtype=np.uint16), np.zeros((2, 16 * threads), np.uint8)
  run(PIECES.format(**PIECE_PARTS | parts), [source.astype(np.uint8), seen, sizes.astype(np.int32)], seed)
  return source.astype(np.uint8), seen


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_copy_pieces_and_fill_the_rest_with_zeros(seed: int):
  sizes = np.arange(128) % 17
  source, (first, second) = copy_pieces(seed, sizes)
  wanted = np.where(np.arange(16) < sizes[:, None], source.reshape(128, 16), 0)
  np.testing.assert_array_equal(first.reshape(128, 16), np.roll(wanted, 64, 0))
  np.testing.assert_array_equal(second.reshape(128, 16)[:, :8], source.reshape(128, 16)[:, :8])


@pytest.mark.parametrize(
  "parts",
  [
    {"wait": ""},
    {"wait": "cp.async.wait_group 2;"},
    {"commit": ""},
    {"bar": ""},
    {"middle": ""},
    {"last": "cp.async.ca.shared.global [%r4], [%rd6], 4;"},
  ],
  ids=["no_wait", "waits_for_too_little", "no_group", "no_barrier", "no_wait_for_the_second", "copied_anew_while_read"],
)
def test_what_copies_of_threads_may_not_lack(parts: dict):
  """A wait is for the thread's own copies: those of other threads need a barrier too."""
  for seed in SEEDS:
    with pytest.raises(KernelFault, match="writes; nobody has waited|which warp . reads; nothing orders the two"):
      copy_pieces(seed, np.full(128, 16), **parts)


def test_a_copy_that_reads_nothing_may_name_any_address():
  last = "add.s64 %rd6, %rd6, 1048576; cp.async.cg.shared.global [%r4], [%rd6], 16, {};"
  copy_pieces(0, np.full(128, 16), last="bar.sync 0;" + last.format(0))
  with pytest.raises(KernelFault, match="cp.async.cg.*is in no buffer|cp.async.cg.*at offset"):
    copy_pieces(0, np.full(128, 16), last="bar.sync 0;" + last.format(16))


@pytest.mark.parametrize(
  ("copy", "words"),
  [
    ("cp.async.cg.shared.global [%r4], [%rd6], 16, 17;", "a copy of 16 bytes reads 17"),
    ("cp.async.cg.shared.global [%r4], [%rd6+8], 16;", "is no multiple of 16"),
    ("cp.async.cg.shared.global [%r4+4], [%rd6], 16;", "is no multiple of 16"),
  ],
)
def test_a_copy_of_a_thread_that_a_gpu_refuses(copy: str, words: str):
  with pytest.raises(KernelFault, match=words):
    copy_pieces(0, np.full(128, 16), last="bar.sync 0;" + copy)


@pytest.mark.parametrize(
  "copy",
  [
    "cp.async.cg.shared.global [%r4], [%rd6], 8;",  # .cg copies 16 bytes
    "cp.async.ca.shared.global [%r4], [%rd6], 12;",
    "cp.async.ca.shared.global.L2::128B [%r4], [%rd6], 16;",
    "@%p1 cp.async.commit_group;",
  ],
)
def test_a_copy_of_a_thread_that_is_not_known(copy: str):
  with pytest.raises(PtxError, match="the emulator does not know"):
    copy_pieces(0, np.full(128, 16), last=copy)


@pytest.mark.parametrize("transposed", [False, True])
def test_lanes_get_the_fragments_of_four_matrices(transposed: bool):
  """Lanes 8i to 8i + 7 name the lines of matrix i; register i of lane 4r + c has elements 2c and 2c + 1 of row r."""
  out, matrices = np.zeros((32, 4, 2), np.uint16), np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
  body = """
  ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; mov.b64 %rd4, shmem; cvt.u32.u64 %r1, %rd4;
  mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 4; add.s32 %r4, %r1, %r3;
  mul.wide.u32 %rd5, %r2, 16; add.s64 %rd6, %rd1, %rd5; add.s64 %rd7, %rd2, %rd5;
  ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd6];
  st.shared.v4.b32 [%r4], {%r10, %r11, %r12, %r13};
  ldmatrix.sync.aligned.m8n8.x4TRANS.shared.b16 {%r14, %r15, %r16, %r17}, [%r4];
  st.global.v4.b32 [%rd7], {%r14, %r15, %r16, %r17};
"""
  run(body.replace("TRANS", ".trans" * transposed), [matrices, out], threads=32)
  for lane in range(32):
    for number, matrix in enumerate(matrices):
      row, column = lane // 4, 2 * (lane % 4)
      wanted = matrix.T[row, column : column + 2] if transposed else matrix[row, column : column + 2]
      np.testing.assert_array_equal(out[lane, number], wanted)


# Products of bf16[64, 64] by wgmma: both operands come by TMA, swizzled by 128 bytes.
_DESCRIPTOR = 1 << 62 | 64 << 32  # swizzle of 128 bytes, 1024 bytes between groups of 8 lines
_SUMS = [f"%r{100 + number}" for number in range(32)]


def multiply_body(
  transposed: bool,
  fence: str = "wgmma.fence.sync.aligned;",
  wait: str = "wgmma.wait_group.sync.aligned 0;",
) -> str:
  """A product of m64n64k64. Args: transposed: B is [K, N] instead of [N, K]."""
  step = (32, 16 * 128 if transposed else 32)  # bytes from one part of the sum to the next
  parts = []
  for part in range(4):
    parts.append(f"add.s64 %rd21, %rd20, {part * step[0] >> 4}; add.s64 %rd23, %rd22, {part * step[1] >> 4};")
    parts.append(
      f"{{ .reg .pred p; setp.ne.b32 p, {part}, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      f"{{{', '.join(_SUMS)}}}, %rd21, %rd23, p, 1, 1, 0, {int(transposed)}; }}"
    )
  stores = [
    f"st.global.b32 [%rd33+{4 * (8 * (number >> 1 & 1) * 64 + 8 * (number >> 2) + (number & 1))}], {name};"
    for number, name in enumerate(_SUMS)
  ]
  return (
    ELECT
    + INIT.format(arrivals=1)
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
    + "".join(f"mov.b32 {name}, 0;\n" for name in _SUMS)
    + f"""
  shr.u32 %r12, %r1, 4; cvt.u64.u32 %rd18, %r12; or.b64 %rd20, %rd18, {_DESCRIPTOR};
  shr.u32 %r13, %r11, 4; cvt.u64.u32 %rd19, %r13; or.b64 %rd22, %rd19, {_DESCRIPTOR};
  {fence}
"""
    + "\n".join(parts)
    + f"wgmma.commit_group.sync.aligned;\n{wait}\n"
    + """
  ld.param.b64 %rd30, [out];
  mov.u32 %r40, %tid.x;
  shr.u32 %r41, %r40, 5; shl.b32 %r42, %r41, 4;
  bfe.u32 %r43, %r40, 2, 3; add.s32 %r44, %r42, %r43; shl.b32 %r45, %r44, 6;
  and.b32 %r46, %r40, 3; shl.b32 %r47, %r46, 1; add.s32 %r48, %r45, %r47;
  mul.wide.u32 %rd31, %r48, 4; add.s64 %rd33, %rd30, %rd31;
"""
    + "\n".join(stores)
  )


def run_product(body: str, b_box: np.ndarray, seed: int, narrow=f32_to_bf16) -> tuple[np.ndarray, np.ndarray]:
  """Returns the bits of A and the kernel's product. Args: b_box: uint16[64, 64] as it lies in memory."""
  memory, out = GlobalMemory(), np.zeros((64, 64), np.float32)
  a = narrow(np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32))
  maps = [
    TensorMap(memory.add_buffer(name, array).address, 2, (64, 64), (2, 128), (64, 64), 128)
    for name, array in (("a", a), ("b", b_box))
  ]
  kernel = make_kernel(body, ".param .u64 .ptr .align 256 out, .param .align 64 .b8 maps[256]")
  run_kernel(kernel, memory, [memory.add_buffer("out", out).address, maps], (1, 1, 1), SHARED, seed)
  return a, out


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_swizzled_operands(transposed: bool):
  b = f32_to_bf16(np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32))
  for seed in range(4):
    a, out = run_product(multiply_body(transposed), b, seed)
    wanted = bf16_to_f32(a) @ (bf16_to_f32(b) if transposed else bf16_to_f32(b).T)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-4)


def test_a_product_of_f16():
  b = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float16)
  body = multiply_body(False).replace("f32.bf16.bf16", "f32.f16.f16")
  a, out = run_product(body, b.view(np.uint16), 0, narrow=f32_to_f16)
  wanted = a.view(np.float16).astype(np.float32) @ b.astype(np.float32).T
  np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
  ("parts", "words"),
  [
    ({"fence": ""}, "was written; wgmma.fence comes first"),
    ({"wait": ""}, "is used while a wgmma runs; wgmma.wait_group comes first"),
    ({"wait": "wgmma.wait_group.sync.aligned 1;"}, "is used while a wgmma runs; wgmma.wait_group comes first"),
  ],
  ids=["no_fence", "no_wait", "waits_for_too_little"],
)
def test_what_a_product_may_not_lack(parts: dict, words: str):
  with pytest.raises(KernelFault, match=words):
    run_product(multiply_body(False, **parts), np.zeros((64, 64), np.uint16), 0)


def test_fields_of_bits_have_their_sign():
  body = """
  ld.param.b64 %rd1, [a];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  bfe.{kind} %r2, %r1, 1, 3;
  st.global.b32 [%rd3], %r2;
"""
  for kind, wanted in (("u32", np.arange(32) // 2 % 8), ("s32", (np.arange(32) // 2 + 4) % 8 - 4)):
    out = np.zeros(32, np.int32)
    run(body.format(kind=kind), [out], threads=32)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(("operation", "function"), [("max", np.maximum), ("min", np.minimum)])
def test_relu_replaces_a_negative_extreme(operation: str, function: np.ufunc):
  a, b, found = np.arange(-64, 64, dtype=np.int32), np.full(128, -5, np.int32), np.zeros(128, np.int32)
  b[::2] = 3
  body = f"""
  ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; ld.param.b64 %rd3, [c];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd4, %r1, 4;
  add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4; add.s64 %rd7, %rd3, %rd4;
  ld.global.b32 %r2, [%rd5]; ld.global.b32 %r3, [%rd6];
  {operation}.relu.s32 %r4, %r2, %r3;
  st.global.b32 [%rd7], %r4;
"""
  run(body, [a, b, found])
  np.testing.assert_array_equal(found, np.maximum(function(a, b), 0))


def test_fp8_is_that_of_ml_dtypes():
  bits = np.arange(256, dtype=np.uint8)
  np.testing.assert_array_equal(e4m3_to_f16(bits), bits.view(ml_dtypes.float8_e4m3fn).astype(np.float16))
  finite = np.sort(bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[np.r_[0:0x7F, 0x80:0xFF]])
  middles = (finite[1:] + finite[:-1]) / 2  # ties, and their neighbors
  values = np.concatenate([finite, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])
  wanted = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
  np.testing.assert_array_equal(f32_to_e4m3(values.astype(np.float32)), wanted)
  # Numbers beyond the largest become it (.satfinite), where ml_dtypes gives NaN.
  beyond = np.array([465, 1e9, np.inf, -465, -np.inf], np.float32)
  assert f32_to_e4m3(beyond).tolist() == [0x7E] * 3 + [0xFE] * 2
  assert f32_to_e4m3(np.array([np.nan, -np.nan], np.float32)).tolist() == [0x7F, 0x7F]


def test_conversions_of_fp8_pack_their_first_operand_high():
  """Inline assembly declares ranges of registers within its braces."""
  out = np.zeros(128, np.int32)
  body = """
  ld.param.b64 %rd1, [a];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  { .reg .b16 pair<2>; .reg .b32 wide<1>;
  cvt.rn.satfinite.e4m3x2.f32 pair0, 0f44800000, 0fBF800000;
  mov.b16 pair1, pair0;
  cvt.rn.f16x2.e4m3x2 wide0, pair1;
  mov.b32 %r2, wide0; }
  st.global.b32 [%rd3], %r2;
"""
  run(body, [out])
  assert out.view(np.float16).reshape(-1, 2)[0].tolist() == [-1.0, 448.0]  # 1024 is beyond the largest
  assert (out == out[0]).all()


def test_lanes_may_write_any_nan_to_one_word():
  """As the four lanes do that have a row of a wgmma, where the row holds what no token uses."""
  body = """
  mov.b64 %rd1, shmem;
  cvt.u32.u64 %r1, %rd1;
  mov.u32 %r2, %tid.x;
  setp.eq.u32 %p1, %r2, 7;
  selp.b32 %r3, {low}, {high}, %p1;
  st.shared.b32 [%r1], %r3;
"""
  run(body.format(low=0xFFC00000, high=0x7FC40000), [np.zeros(4, np.int32)], threads=32)
  for low, high in ((0xFFC00000, 0x3F800000), (0x80000000, 0)):  # NaN and 1; -0 and 0
    with pytest.raises(KernelFault, match="two lanes write different values"):
      run(body.format(low=low, high=high), [np.zeros(4, np.int32)], threads=32)
