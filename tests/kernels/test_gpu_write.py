"""Rotary embedding and KV write on GPU, in Pallas' interpreter with its race detector, against models/layers.py."""

import dataclasses

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import gpu_write
from pallas_kernels.paged_attention.reference import rotate
from pallas_kernels.paged_attention.tuning import tuning_for
from tests.kernels import conformance
from tests.kernels.conformance import f32, rounded
from tests.kernels.seeded import seed_bug

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("gpu_interpreter")]

RACES = plgpu.InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class Case:
  """A call: T, how many of those tokens are padding, K, G, H, tokens a block, tokens a tile (None: as tuned), fp8."""

  tokens: int
  padding: int = 0
  heads: int = 2
  group: int = 2
  head_dim: int = 64
  page: int = 16
  tile: int | None = None
  is_fp8: bool = False


@dataclasses.dataclass(frozen=True)
class Numbers:
  """Operands of a case: random numbers, tokens at random slots, padding in block 0, a buffer of distinct values."""

  qkv: jax.Array
  cos: jax.Array
  sin: jax.Array
  kv: jax.Array
  slots: jax.Array


def numbers(case: Case) -> Numbers:
  rng = np.random.default_rng(case.tokens)
  blocks = -(-case.tokens // case.page) + 3
  slots = rng.permutation(np.arange(case.page, blocks * case.page))[: case.tokens]
  slots[case.tokens - case.padding :] = rng.permutation(case.page)[: case.padding]
  angles = rng.uniform(0, 2 * np.pi, (case.tokens, case.head_dim // 2))
  kv = rng.standard_normal((blocks, case.heads, 2, case.page, case.head_dim)).astype(jnp.bfloat16)
  qkv = rng.standard_normal((case.tokens, case.heads, case.group + 2, case.head_dim)).astype(jnp.bfloat16)
  if case.is_fp8:
    kv, qkv = conformance.stored(kv, "uint8"), qkv * 200  # every fortieth number is beyond 448
    qkv[0, 0, -1, :3] = np.inf, -np.inf, np.nan
  arrays = (
    qkv,
    np.cos(angles).astype(np.float32),
    np.sin(angles).astype(np.float32),
    kv,
    slots.astype(np.int32),
  )
  return Numbers(*map(conformance.put, arrays))


def numbers_of(x: jax.Array, case: Case) -> np.ndarray:
  """What a buffer holds, or what it should hold of keys or values, f32."""
  if not case.is_fp8:
    return f32(x)
  return np.asarray(x).view(jnp.float8_e4m3fn).astype(np.float32) if x.dtype == np.uint8 else rounded(f32(x), "uint8")


def check(case: Case, module=gpu_write) -> None:
  """Runs a case and compares it with `rotate` and a plain scatter."""
  given = numbers(case)
  tuning = tuning_for("", 64, case.page)
  if case.tile:
    tuning = dataclasses.replace(tuning, write_tokens=case.tile)
  run = jax.jit(lambda *args: module.rotate_and_write(*args, tuning=tuning, interpret=RACES))
  q, kv, finished = run(given.qkv, given.cos, given.sin, given.kv, given.slots)
  assert finished.shape[0] == case.heads and finished.shape[1] >= case.tokens and not f32(finished).any()
  assert q.dtype == jnp.bfloat16 and kv.dtype == given.kv.dtype

  queries, keys, values = conformance.jitted(rotate)(given.qkv, given.cos, given.sin)
  # Of two products that are added one may be rounded to f32 before, or not (a fused multiply-add, as on the GPU; on the
  # CPU it is LLVM's choice). That moves a result by 2^-23 of the products at most, so now and then to the next number
  # of bf16. Values are copied.
  close = {"rtol": 2.0**-7, "atol": 1e-6}
  packed = f32(queries).reshape(case.tokens, case.heads, case.group, -1).transpose(1, 0, 2, 3).reshape(q.shape)
  np.testing.assert_allclose(f32(q), packed, **close)
  assert (f32(q) == packed).mean() > 0.99
  kv, want, keys, values = (numbers_of(x, case) for x in (kv, given.kv, keys, values))
  want, real = want.copy(), slice(0, case.tokens - case.padding)
  block, offset = np.divmod(np.asarray(given.slots[real]), case.page)
  want[block, :, 0, offset], want[block, :, 1, offset] = keys[real], values[real]
  # The whole buffer but block 0, so also that slots without a token do not change.
  close = {"rtol": 2.0**-3, "atol": 2.0**-9} if case.is_fp8 else close  # e4m3 has 4 bits
  np.testing.assert_allclose(kv[1:, :, 0], want[1:, :, 0], **close)
  np.testing.assert_array_equal(kv[1:, :, 1], want[1:, :, 1])


def check_without_races(case: Case, capfd: pytest.CaptureFixture[str], module=gpu_write) -> None:
  check(case, module)
  assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(
  "case",
  [
    Case(8),
    Case(1, heads=1),
    Case(8, padding=8),
    Case(13, padding=3, group=3, page=32),
    Case(20, padding=1, heads=1, group=1, head_dim=128, page=128),
    Case(9, group=5, head_dim=128, page=64, tile=4),
    Case(17, heads=1, group=12, head_dim=256, tile=16),
    Case(5, heads=1, group=64, head_dim=256, tile=32),
    Case(35, padding=2, heads=1, tile=32),
    Case(11, padding=2, tile=8, is_fp8=True),
    pytest.param(Case(7, heads=1, head_dim=128, tile=4, is_fp8=True), marks=pytest.mark.long),
  ],
  ids=str,
)
def test_equals_rotate_and_scatter(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
  check_without_races(case, capfd)


def test_padding_may_hold_nan_and_share_a_slot() -> None:
  """Padding may change only its own rows of q and block 0. No race detector, because sharing a slot is a race."""
  case = Case(12, padding=5, tile=8)
  given = numbers(case)
  tuning = dataclasses.replace(tuning_for("", 64, case.page), write_tokens=8)
  run = jax.jit(lambda *args: gpu_write.rotate_and_write(*args, tuning=tuning, interpret=plgpu.InterpretGPUParams()))
  q, kv, _ = run(given.qkv.at[7:].set(jnp.nan), given.cos, given.sin, given.kv, given.slots.at[7:].set(0))
  assert np.isfinite(f32(q).reshape(case.heads, case.tokens, -1)[:, :7]).all()
  assert np.isfinite(f32(kv)[1:]).all()


# What is put out of order, the text, and what it becomes; the text occurs once, so that the list cannot rot silently.
BUGS = (
  ("sine with the other sign", "(x * c - y * s)", "(x * c + y * s)"),
  ("the key is not rotated", "  rotate(new, 0)\n", ""),
  ("counters of one head are cleared", "finished[head, ", "finished[0, "),
  ("the value is rotated", "rotate(new, 0)", "rotate(new, 1)"),
  ("the last head of a group is not rotated", "for row in range(group)", "for row in range(group - 1)"),
  ("angles of the first tile", "cos.at[here]", "cos.at[pl.ds(0, tokens)]"),
  ("the page before", "lax.div(place, page)", "(lax.div(place, page) - 1)"),
  ("another token's slot", "slots[jnp.minimum(start + i,", "slots[jnp.minimum(start + i + 1,"),
  ("queries of the first head only", "q.at[head, here]", "q.at[0, here]"),
  ("what is past the end is stored", "start + i < num_tokens", "start + i >= 0"),
  ("nothing waits for the copies in", "  plgpu.barrier_wait(ready)\n", ""),
  ("copies out start before the numbers are there", "  plgpu.commit_smem()\n", ""),
)

# Twins of bugs above: the other half, the other part of a place, the other array, a part of the same wait.
MORE_BUGS = (
  ("halves swapped", "y * c + x * s", "x * c + y * s"),
  ("the slot after", "lax.rem(place, page)", "lax.rem(place + 1, page)"),
  ("keys of the first head only", "page), head, :", "page), 0, :"),
  ("one copy in is not waited for", "num_arrivals=4", "num_arrivals=3"),
)


SUBJECT = Case(11, tile=8)
FP8_BUGS = (
  ("keys are stored as values", "new.at[:, row, part], layout", "new.at[:, 0, part], layout"),
  ("another token's bytes", "source.at[i]", "source.at[(i + 1) % tokens]"),
)


@pytest.mark.parametrize(
  ("old", "new"),
  [pytest.param(*bug, id=name.replace(" ", "-")) for name, *bug in BUGS]
  + [pytest.param(*bug, id=name.replace(" ", "-"), marks=pytest.mark.long) for name, *bug in MORE_BUGS],
)
def test_seeded_bug_is_caught(old: str, new: str, capfd: pytest.CaptureFixture[str]) -> None:
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
    check_without_races(SUBJECT, capfd, seed_bug(gpu_write, old, new))


@pytest.mark.parametrize(("old", "new"), [pytest.param(*bug, id=name.replace(" ", "-")) for name, *bug in FP8_BUGS])
def test_seeded_bug_of_fp8_is_caught(old: str, new: str, capfd: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(AssertionError):
    check_without_races(dataclasses.replace(SUBJECT, is_fp8=True), capfd, seed_bug(gpu_write, old, new))


def test_no_bug_is_not_caught(capfd: pytest.CaptureFixture[str]) -> None:
  check_without_races(SUBJECT, capfd, seed_bug(gpu_write, "_THREADS = 128", "_THREADS = 128 "))
