"""Bugs in the real kernels' PTX that the emulator must notice, and what Pallas' interpreter can know of each.

`recorded` holds the kernels of tools/ptx_emulator/subjects.py as Mosaic GPU and XLA's Triton compiled them, so that no
test compiles.
In the environment of requirements-device.lock, these commands write them anew:

  python -m tools.ptx_emulator --record=tests/tools/ptx_emulator/recorded
  python -m tests.tools.ptx_emulator.test_bugs

Most bugs change the PTX. Those of tests/kernels/unseen_bugs.py change a kernel's source, and `recorded` has their PTX.

Pallas' interpreter runs the kernel's Python, so it has no notion of most of these: UNSEEN says what it lacks. For the
bugs in sources, tests/kernels/test_gpu_unseen.py runs it: it finds neither a wrong number nor a race.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib
import re
from typing import NamedTuple

import pytest

from tests.kernels import unseen_bugs
from tests.kernels.seeded import seed_bug
from tools.gpu.cases import Wrong
from tools.ptx_emulator import subjects
from tools.ptx_emulator.__main__ import recorded_path, run_schedules
from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.compiled import ArrayCall
from tools.ptx_emulator.reader import PtxError

RECORDED = pathlib.Path(__file__).with_name("recorded")
CAUGHT = (KernelFault, Wrong, PtxError)
UNSEEN = {
  "proxy": "A barrier orders all accesses; it has no second proxy that needs a fence.",
  "layout": "Shared arrays have no addresses: no swizzle, no tile, no matrix descriptor.",
  "wgmma": "A product is complete at once, so nothing is under way that a fence or a wait would be for.",
  "bytes": "A copy arrives at its barrier once; it counts no bytes.",
  "lanes": "A warpgroup is one thread: no lanes, no warps, no barriers between them.",
  "bounds": "A copy is of the part of an array that the program names, never of bytes behind it.",
  "init": "Barriers exist from the start.",
  "copies": "A load is complete at once; a loop has no copies under way, and no buffers that it uses again.",
  "tensor": "A product is a value at once: its sums have no memory that is allocated, addressed or waited for.",
}

Edit = Callable[[ArrayCall], ArrayCall]


def edited(call: ArrayCall, **changes) -> ArrayCall:
  return dataclasses.replace(call, kernel=dataclasses.replace(call.kernel, **changes))


def text(pattern: str, new: str, which: int = 0) -> Edit:
  """Replaces an occurrence of a pattern in the PTX; see re.Match.expand for `new`."""

  def edit(call: ArrayCall) -> ArrayCall:
    before = call.kernel.text
    found = list(re.finditer(pattern, before))
    if len(found) <= which:
      raise ValueError(f"{pattern!r} occurs {len(found)} times")
    at = found[which]
    return edited(call, text=before[: at.start()] + at.expand(new) + before[at.end() :])

  return edit


def tensor_map(which: int, **changes) -> Edit:
  """Changes a tensor map. Args: changes: functions of the old value, by field."""

  def edit(call: ArrayCall) -> ArrayCall:
    maps = list(call.kernel.maps)
    new = {name: change(getattr(maps[which], name)) for name, change in changes.items()}
    maps[which] = dataclasses.replace(maps[which], **new)
    return edited(call, maps=tuple(maps))

  return edit


class Bug(NamedTuple):
  """A bug.

  Attributes:
    subject: name of the kernel and of its pool's dtype.
    edit: makes it.
    words: of the error.
    unseen: a key of UNSEEN; "": the interpreter could notice it.
  """

  subject: str
  edit: Edit
  words: str
  unseen: str = ""


FENCE = r"fence\.proxy\.async\.shared::cta;"
FENCE_AND_BARRIER = rf"({FENCE}[\s\S]*?)bar\.sync %\w+, 128;"
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, (\[%\w+\]), (%\w+), %\w+;"
OTHER_PHASE = r"xor.b32 %r99999, \2, 1; mbarrier.try_wait.parity.shared.b64 P1, \1, %r99999;"
ARRIVE = r"mbarrier\.arrive\.release\.cta\.shared::cta\.b64 _, \[%\w+\], 1;"
EXPECT = r"(mbarrier\.arrive\.expect_tx\.shared\.b64 %\w+, \[[^\]]+\]), %\w+;"
INIT = r"(mbarrier\.init\.shared(?:::cta)?\.b64 \[%\w+\]), %\w+;"
BULK_WAIT = r"cp\.async\.bulk\.wait_group(?:\.read)?\s+0;"
BULK_COPY = r"(cp\.async\.bulk\.global\.shared::cta\.bulk_group \[%rd\d+\], \[%rd\d+\]), %r\d+;"
PRODUCT = r"(wgmma\.mma_async[^{]*\{[^}]*\}), (%rd\d+), (%rd\d+), p, 1, 1, 0, (\d);"
FLAGS = r"(wgmma\.mma_async[^;]*, p, 1, 1, (?:0, )?)[01];"
PLACE = r"(ld\.global\.\w*\.?b32\s+%r\d+, \[%rd\d+)(?:\+\d+)?\]"
STORE = r"(st\.shared\.(?:v\d\.)?b\d+\s+\[%\w+)(?:\+\d+)?\]"
TO_FP8 = r"(cvt\.rn\.satfinite\.e4m3x2\.f32 \w+), (%r\d+), (%r\d+);"
# Swizzle of 128 bytes, 1,024 bytes between groups of 8 lines.
DESCRIPTOR = 1 << 62 | 64 << 32

# Kernels that run without a bug in `make test`.
QUICK = frozenset(
  (
    *(f"{kernel}_{dtype}" for kernel in ("write", "decode", "decode-only") for dtype in subjects.KV_DTYPES),
    *(f"sm_80-{kernel}_bf16" for kernel in ("write", "decode", "parts", "combine")),
    *(f"sm_100a-prefill_{dtype}" for dtype in ("bf16", "f16", "fp8")),
    "sm_120-parts_bf16",
  )
)
# Those of the write and combine kernels are quick.
WRITE_BUGS = {
  "no proxy fence before a copy out": Bug("write_bf16", text(FENCE, ""), "no fence.proxy.async", "proxy"),
  "no barrier before a copy out": Bug("write_bf16", text(FENCE_AND_BARRIER, r"\1"), "nothing orders the two", "lanes"),
  "nothing waits for copies in": Bug("write_bf16", text(WAIT, "setp.eq.u32 P1, 0, 0;"), "waited|orders"),
  "waits for the phase before": Bug("write_bf16", text(WAIT, OTHER_PHASE), "waited|orders"),
  "expects too few bytes": Bug("write_bf16", text(EXPECT, r"\1, 256;"), "deadlock[^$]*mbarrier.try_wait", "bytes"),
  "expects too many bytes": Bug("write_bf16", text(EXPECT, r"\1, 512;"), "deadlock[^$]*mbarrier.try_wait", "bytes"),
  "counts an arrival too few": Bug("write_bf16", text(INIT, r"\1, 3;"), "more than 3 arrivals|lacks"),
  "counts an arrival too many": Bug("write_bf16", text(INIT, r"\1, 513;"), "(?s)deadlock.*lacks 1 of 513 arrivals"),
  "barrier without its fence": Bug(
    "write_bf16", text(r"fence\.mbarrier_init\.release\.cluster;", ""), "no fence.mbarrier_init followed", "init"
  ),
  "ends while copies read": Bug("write_bf16", text(BULK_WAIT, ""), "ends before its bulk copies"),
  "waits for a group too few": Bug(
    "write_bf16", text(BULK_WAIT, "cp.async.bulk.wait_group.read 1;"), "ends before its bulk copies"
  ),
  "copies in no group": Bug("write_bf16", text(r"cp\.async\.bulk\.commit_group;", ""), "ends before its bulk copies"),
  "all lanes copy": Bug(
    "write_bf16", text(r"@%p\d+ (cp\.async\.bulk\.tensor\.4d)", r"\1"), "32 lanes begin this copy", "lanes"
  ),
  "box too large": Bug(
    "write_bf16", tensor_map(0, box=lambda box: (*box[:-3], 16, *box[-2:])), "operation . writes; nobody", "bounds"
  ),
  "swizzle of a line that is too long": Bug(
    "write_bf16", tensor_map(0, swizzle=lambda _: 128), "256 bytes, more than its swizzle of 128", "layout"
  ),
  "copies the next array": Bug(
    "write_bf16", text(BULK_COPY, r"\1, 8192;"), "bytes at offset|other bits|queries|at shared address", "bounds"
  ),
  "store beside its place": Bug("write_bf16", text(STORE, r"\1+2]"), "is no multiple of 8", "layout"),
  "slots behind the list": Bug("write_bf16", text(PLACE, r"\1+4096]"), "4 bytes at offset"),
  "fp8 numbers of a pair swapped": Bug("write_fp8", text(TO_FP8, r"\1, \3, \2;"), "keys: error", "lanes"),
  "fp8 without saturation": Bug("write_fp8", text(r"\.satfinite", ""), r"line \d+: the emulator does not know cvt"),
  "reads behind the parts": Bug("decode_bf16", text(PLACE, r"\1+1048576]", 3), "is in no buffer|at offset", "bounds"),
  "result leaves without a fence": Bug("decode_bf16", text(FENCE, ""), "no fence.proxy.async", "proxy"),
}
ATTENTION_BUGS = {
  "no wgmma.fence": Bug(
    "prefill_bf16", text(r"wgmma\.fence\.sync\.aligned;", ""), "was written; wgmma.fence comes first", "wgmma"
  ),
  "no wait for a product": Bug(
    "prefill_bf16", text(r"wgmma\.wait_group\.sync\.aligned 0;", ""), "while a wgmma runs", "wgmma"
  ),
  "waits for a product too few": Bug(
    "prefill_bf16",
    text(r"wgmma\.wait_group\.sync\.aligned 1;", "wgmma.wait_group.sync.aligned 2;"),
    "while a wgmma runs",
    "wgmma",
  ),
  "descriptor of half the stride": Bug(
    "prefill_bf16", text(str(DESCRIPTOR), str(DESCRIPTOR - (32 << 32))), "attention: error", "layout"
  ),
  "descriptor of another swizzle": Bug(
    "prefill_bf16", text(str(DESCRIPTOR), str(DESCRIPTOR + (1 << 62) - (1 << 64))), "attention: error", "layout"
  ),
  "operands of a product swapped": Bug(
    "prefill_bf16", text(PRODUCT, r"\1, \3, \2, p, 1, 1, 0, \4;"), "attention: ", "layout"
  ),
  "operand taken as transposed": Bug("prefill_bf16", text(FLAGS, r"\g<1>1;"), "attention: error", "layout"),
  "other warpgroup gets no turn": Bug(
    "prefill_bf16", text(ARRIVE, ""), r"(?s)deadlock.*warp \d, .*mbarrier.try_wait.*warp 8, .*mbarrier.try_wait"
  ),
  "stage given back twice": Bug(
    "prefill_bf16", text(f"({ARRIVE})", r"\1 \1", 1), "nobody has waited|more than|deadlock"
  ),
  "values cleaned without a fence": Bug("prefill_bf16", text(FENCE, "", 1), "no fence.proxy.async", "proxy"),
  "staged in rows for columns": Bug(
    "prefill_bf16", text(r"(stmatrix\.sync\.aligned\.m8n8\.x4)", r"\1.trans"), "attention: ", "layout"
  ),
  "named barrier of five warps": Bug(
    "prefill_bf16", text(r"(bar\.sync %r\d+), 128;", r"\1, 160;"), "(?s)deadlock.*has 128 of 160 threads", "lanes"
  ),
  "map behind the pool": Bug(
    "prefill_bf16", tensor_map(1, shape=lambda shape: (shape[0] + 64, *shape[1:])), "2 bytes at offset", "bounds"
  ),
  "keys unswizzled": Bug("prefill_bf16", tensor_map(1, swizzle=lambda _: 0), "attention: error", "layout"),
  "staged anew while a copy reads": Bug("decode_bf16", text(BULK_WAIT, "", 2), "reads; nobody has waited"),
  "maximum over other lanes": Bug(
    "decode_bf16",
    text(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 1,", r"\1, 4,"),
    "two lanes write different values|error",
    "lanes",
  ),
  "stage free a phase early": Bug(
    "prefill_bf16", text(WAIT, OTHER_PHASE, 11), "nobody has waited|orders the two|deadlock"
  ),
  "widened without a fence": Bug("decode_fp8", text(FENCE, ""), "no fence.proxy.async", "proxy"),
  "fp8 halves swapped": Bug(
    "decode_fp8", text(r"\{ source_pair0, source_pair1 \}", "{ source_pair1, source_pair0 }"), "error", "lanes"
  ),
}


COPY_WAIT = r"cp\.async\.wait_group\s+0;"
COPY_WAIT_AND_BARRIER = rf"({COPY_WAIT}\s+)bar\.sync\s+0;"
COPY = r"(cp\.async\.cg\.shared\.global \[ %r\d+ \+ 0 \], \[ %rd\d+ \+ )0( \], 0x10), (%r\d+);"
LOAD_MATRIX = r"(ldmatrix\.sync\.aligned\.m8n8\.x4{}\.shared\.b16\s+\{{[^}}]*\}}, \[%rd\d+)\]"
MMA = r"(mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+),"
BARRIER = r"bar\.sync\s+0;"
# Those of the portable kernels for an A100. A kernel has a copy of blocks of the table before the loop and one in it.
PORTABLE_BUGS = {
  "no wait for copies": Bug("sm_80-decode_bf16", text(COPY_WAIT, "", 1), "nobody has waited", "copies"),
  "waits for a group of copies too few": Bug(
    "sm_80-decode_bf16", text(COPY_WAIT, "cp.async.wait_group 1;", 1), "nobody has waited", "copies"
  ),
  "copies in no group of cp.async": Bug(
    "sm_80-decode_bf16", text(r"cp\.async\.commit_group;", "", 3), "nobody has waited", "copies"
  ),
  "no barrier behind the wait": Bug(
    "sm_80-decode_bf16", text(COPY_WAIT_AND_BARRIER, r"\1", 1), "nobody has waited", "lanes"
  ),
  "no barrier before a buffer's next copy": Bug(
    "sm_80-decode_bf16", text(BARRIER, "", 8), "which warp . reads; nothing orders the two", "lanes"
  ),
  "no barrier before warps sum up": Bug("sm_80-decode_bf16", text(BARRIER, "", 3), "nothing orders the two", "lanes"),
  "keys past the row's end are read": Bug(
    "sm_80-decode_bf16", text(COPY, r"\g<1>0\2;", 7), "is in no buffer|hold NaN", "copies"
  ),
  "copies the next chunk of a line": Bug(
    "sm_80-decode_bf16", text(COPY, r"\g<1>16\2, \3;"), "attention: |at offset", "layout"
  ),
  "copy from the middle of a chunk": Bug(
    "sm_80-decode_bf16", text(COPY, r"\g<1>8\2, \3;"), "is no multiple of 16", "layout"
  ),
  "swizzle without its exclusive or": Bug(
    "sm_80-decode_bf16", text(r"xor(\.b32\s+%r\d+, %r\d+, 64;)", r"or\1"), "attention: error", "layout"
  ),
  "matrix of the next chunk": Bug(
    "sm_80-decode_bf16", text(LOAD_MATRIX.format(""), r"\1+16]"), "attention: error", "layout"
  ),
  "matrix between chunks": Bug(
    "sm_80-decode_bf16", text(LOAD_MATRIX.format(""), r"\1+8]"), "is no multiple of 16", "layout"
  ),
  "wgmma reads copies that no fence followed": Bug(
    "h200-prefill_bf16", text(rf"(cp\.async\.wait_group[\s\S]*?){FENCE}", r"\1"), "wrote; no fence.proxy.async", "proxy"
  ),
  "values not transposed": Bug("sm_80-decode_bf16", text(r"(ldmatrix\S+)\.trans", r"\1"), "attention: error", "layout"),
  "rows of a fragment swapped": Bug("sm_80-decode_bf16", text(MMA, r"\1\3, \2,"), "attention: error", "layout"),
}


def product_bug(edit: Edit, words: str) -> Bug:
  """Returns a bug of the prefill kernel for a B200, which no interpreter sees."""
  return Bug("sm_100a-prefill_bf16", edit, words, "tensor")


OPERAND = r"(mov\.b32\s+%r\d+), 1073758272;"  # upper half of a descriptor: 1,024 bytes between lines, a swizzle of 128
SHAPE, SHAPE_OF_VALUES = 68158608, 68224144  # 64 x 64 of bf16; the values' depth is not contiguous
TRY_WAIT = r"(mbarrier\.try_wait\.parity\.shared::cta\.b64 complete, \[%r\d+\]), (%r\d+);"
# Those of tcgen05 alone. The kernel stores zeros, then weights and scaled sums of each chunk, to tensor memory.
TENSOR_CORE_BUGS = {
  "no wait for stored sums": product_bug(text(r"tcgen05\.wait::st\.sync\.aligned;", "", 2), "nobody has waited"),
  "no wait for loaded sums": product_bug(
    text(r"tcgen05\.wait::ld\.sync\.aligned;", ""), "tcgen05.wait::ld comes first"
  ),
  "half of a row stored beside its place": product_bug(
    text(r"(tcgen05\.st\.sync\.aligned\.16x32bx2\.x16\.b32 \[%r\d+ \+ 0\], )16", r"\g<1>8"), "attention: "
  ),
  "half of a row loaded beside its place": product_bug(
    text(r"(tcgen05\.ld[^;]*\}, \[%r\d+ \+ \d+\], )32", r"\g<1>16"), "attention: error"
  ),
  "lanes of another warp": product_bug(text(r"(shl\.b32\s+%r\d+, %r\d+), 21;", r"\1, 20;"), "warp . names lane"),
  "operand of half the stride": product_bug(text(OPERAND, rf"\1, {1073758272 - 32};"), "attention: "),
  "operand of another swizzle": product_bug(text(OPERAND, rf"\1, {1073758272 + (2 << 29)};"), "attention: "),
  "values not taken as transposed": product_bug(
    text(str(SHAPE_OF_VALUES), str(SHAPE)), "attention: |nobody has waited"
  ),
  "half of the columns": product_bug(text(str(SHAPE), str(SHAPE - (4 << 17))), "attention: "),
  "weights of the next keys": product_bug(
    text(r"(tcgen05\.mma\S+ \[ %r\d+ \+ 0 \], \[ %r\d+ \+ )8", r"\g<1>16"), "attention: error"
  ),
  "adds to what was there": product_bug(text(r"mov\.pred\s+(%p41), 0;", r"mov.pred \1, -1;"), "attention: "),
  "scores in the lanes of the sums": product_bug(text("1048576", "0"), "of tensor memory.*nobody has waited"),
  "product without a commit": product_bug(
    text(r"@%p\d+ tcgen05\.commit[^;]*;", ""), "(?s)deadlock.*try_wait.*lacks 1 of 1 arrivals"
  ),
  "waits for no product": product_bug(text(TRY_WAIT, "setp.eq.u32 complete, 0, 0;"), "nobody has waited|deadlock"),
  "copies seen without a proxy fence": product_bug(text(FENCE, ""), "no fence.proxy.async"),
  "too few columns": product_bug(
    text(r"(tcgen05\.alloc[^;]*), 128", r"\1, 64"), "is not allocated|no 128 columns were allocated"
  ),
  "columns kept": product_bug(text(r"@%p\d+ tcgen05\.dealloc[^;]*;", ""), "ends before tcgen05.dealloc"),
}


@functools.cache
def recorded(name: str) -> ArrayCall:
  return ArrayCall.load(recorded_path(RECORDED, name))


subject = functools.cache(subjects.make_subject)


@pytest.mark.parametrize("name", WRITE_BUGS)
def test_a_bug_of_the_small_kernels_is_noticed(name: str):
  check(WRITE_BUGS[name], (1,))


@pytest.mark.parametrize("name", PORTABLE_BUGS)
def test_a_bug_of_the_portable_kernels_is_noticed(name: str):
  check(PORTABLE_BUGS[name], (1,))


@pytest.mark.parametrize("name", TENSOR_CORE_BUGS)
def test_a_bug_of_a_tensor_core_kernel_is_noticed(name: str):
  check(TENSOR_CORE_BUGS[name], (1,))


@pytest.mark.kernels
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", TENSOR_CORE_BUGS)
def test_a_bug_of_a_tensor_core_kernel_is_noticed_in_any_schedule(name: str, seed: int):
  check(TENSOR_CORE_BUGS[name], (seed,))


@pytest.mark.kernels
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", PORTABLE_BUGS)
def test_a_bug_of_the_portable_kernels_is_noticed_in_any_schedule(name: str, seed: int):
  check(PORTABLE_BUGS[name], (seed,))


@pytest.mark.kernels
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", WRITE_BUGS)
def test_a_bug_of_the_small_kernels_is_noticed_in_any_schedule(name: str, seed: int):
  check(WRITE_BUGS[name], (seed,))


@pytest.mark.kernels
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ATTENTION_BUGS)
def test_a_bug_of_the_attention_kernels_is_noticed(name: str, seed: int):
  check(ATTENTION_BUGS[name], (seed,))


def check(bug: Bug, seeds: tuple[int, ...]) -> None:
  assert not bug.unseen or bug.unseen in UNSEEN
  call = bug.edit(recorded(bug.subject))
  with pytest.raises(CAUGHT, match=bug.words):
    run_schedules(subject(bug.subject), call, seeds)


@pytest.mark.parametrize(
  ("which", "words", "seeds"),
  [
    pytest.param(0, "reads bytes that block . has written", range(4, 24, 4), id="counted too early"),
    pytest.param(3, "attention: error|NaN or Inf", (4,), id="counted too early at the end"),
    pytest.param(1, "reads; nobody has waited", (1,), id="staged anew while a sum is copied"),
  ],
)
def test_a_part_that_does_not_wait_for_copies_is_noticed(which: int, words: str, seeds: Sequence[int]):
  """In some schedules a copy is still under way, and the block that sums the row reads what it has not seen counted."""
  call = text(BULK_WAIT, "", which)(recorded("decode_bf16"))
  with pytest.raises(CAUGHT, match=words):
    run_schedules(subject("decode_bf16"), call, seeds)


@pytest.mark.parametrize("name", unseen_bugs.BUGS)
def test_a_bug_in_the_source_is_noticed(name: str):
  """The one without whole tiles is a race of two blocks: some schedules give the right numbers."""
  with pytest.raises(Wrong, match="queries: error|attention: error"):
    run_schedules(subject(unseen_bugs.BUGS[name][0]), recorded(name), range(1, 6))


@pytest.mark.parametrize(
  ("name", "seeds"),
  [pytest.param(name, range(1, 3), marks=() if name in QUICK else pytest.mark.kernels) for name in subjects.NAMES],
)
def test_the_kernels_without_a_bug_pass(name: str, seeds: range):
  run_schedules(subject(name), recorded(name), seeds)


def record_bugs() -> None:
  """Compiles the kernels whose source has a bug."""
  from tools.ptx_emulator import mosaic

  for name, (of, old, new) in unseen_bugs.BUGS.items():
    module = seed_bug(subject(of).module, old, new)
    (call,) = mosaic.compile_kernels(*subject(of).program(module))
    call.save(recorded_path(RECORDED, name))


if __name__ == "__main__":
  record_bugs()
