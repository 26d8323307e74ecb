"""Tests that the C++ kernel for logit adjustments returns the reference's bits for every mixture of adjustments."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.adjust import api
from pallas_kernels.adjust.api import PROMPT_BIT, AdjustParams, Kind, Memory

SLOTS, MASKS = 5, 7


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
  if native.compiler() is not None:
    native.build_library("adjust")


needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: XLA's passes serve here")


def inputs(rows: int, vocab: int, seed: int = 0) -> tuple[np.ndarray, AdjustParams, np.ndarray, np.ndarray, Memory]:
  """Rows with every mixture of adjustments in turn; each slot has its own memory, and some rows have drafts."""
  random = np.random.default_rng(seed)
  x = random.normal(0, 4, (rows, vocab)).astype(np.float32)
  history = random.integers(0, 8, (SLOTS, vocab)) * (random.random((SLOTS, vocab)) < 0.5)
  history += PROMPT_BIT * (random.random((SLOTS, vocab)) < 0.3)
  bias = random.normal(0, 2, (SLOTS, vocab)) + np.where(random.random((SLOTS, vocab)) < 0.1, -np.inf, 0)
  mask = random.integers(-(2**31), 2**31, (MASKS, -(-vocab // 32)))
  params = AdjustParams(
    kinds=(np.arange(rows) + seed).astype(np.int32) % 16,
    slot=random.integers(0, SLOTS, rows).astype(np.int32),
    mask=random.integers(0, MASKS, rows).astype(np.int32),
    repetition=random.uniform(0.5, 2, rows).astype(np.float32),
    frequency=random.uniform(-2, 2, rows).astype(np.float32),
    presence=random.uniform(-2, 2, rows).astype(np.float32),
  )
  stop_ids = random.integers(-1, vocab, (rows, 3)).astype(np.int32)
  drafts = random.integers(0, min(vocab, 9), (rows, 7))  # some twice
  drafts = np.where(np.arange(7) < random.integers(0, 8, rows)[:, None] * (seed % 3 != 1), drafts, -1).astype(np.int32)
  memory = Memory(history.astype(np.int32), bias.astype(np.float32), mask.astype(np.int32))
  return x, params, stop_ids, drafts, memory


# Compiled as steps are: without optimization XLA rounds a product and its sum separately.
_run = jax.jit(api.adjust_logits, static_argnums=6, compiler_options={"xla_backend_optimization_level": 1})


def check(
  x: np.ndarray,
  params: AdjustParams,
  stop_ids: np.ndarray,
  drafts: np.ndarray,
  memory: Memory,
  used: int | None = None,
) -> None:
  arguments = jax.tree.map(jnp.asarray, (x, params, stop_ids, drafts, memory))
  expected = np.asarray(_run(*arguments, None, "reference"))
  count = None if used is None else jnp.full(1, used, jnp.int32)
  found = np.asarray(jax.jit(functools.partial(api.adjust_logits, implementation="cpu"))(*arguments, count))
  np.testing.assert_array_equal(found[:used].view(np.int32), expected[:used].view(np.int32))


def check_endings() -> None:
  """An ending goes but where nothing else is allowed; -1 is none, and the first id and the last are like others."""
  x, params, _, drafts, memory = inputs(6, 40)
  params = params._replace(kinds=np.full(6, Kind.MASK | Kind.SUPPRESS, np.int32), mask=np.zeros(6, np.int32))
  memory.mask[0] = [1 << 5 | 1 << 9, 0]
  stop_ids = np.asarray([[5, 9], [5, -1], [9, 5], [-1, -1], [0, 39], [9, 9]], np.int32)
  check(x, params, stop_ids, drafts, memory)
  memory.mask[0] = -1
  check(x, params, stop_ids, drafts, memory)


@needs_compiler
@pytest.mark.parametrize("vocab", [2, 31, 32, 33, 300, 32000])
def test_every_mixture_has_the_bits_of_the_reference(vocab: int) -> None:
  for seed in range(3):
    check(*inputs(17, vocab, seed))


@needs_compiler
def test_endings_are_held_back_but_where_nothing_else_is_allowed() -> None:
  check_endings()


@needs_compiler
@pytest.mark.parametrize("used", [0, 1, 8, 9])
def test_lines_of_padding_change_nothing(used: int) -> None:
  x, *rest = inputs(9, 20000)  # enough for threads
  x[used:] = np.nan
  check(x, *rest, used=used)


@needs_compiler
def test_penalties_stay_finite() -> None:
  x, params, stop_ids, drafts, memory = inputs(4, 50)
  params = params._replace(kinds=np.full(4, Kind.PENALTY, np.int32), repetition=np.full(4, 1e-30, np.float32))
  check(x * 1e20, params, stop_ids, drafts, memory)
  check(x * 1e20, params._replace(repetition=np.full(4, 1e30, np.float32)), stop_ids, drafts, memory)


def test_wrong_shapes_raise() -> None:
  x, params, stop_ids, drafts, memory = jax.tree.map(jnp.asarray, inputs(3, 40))
  with pytest.raises(ValueError, match=r"x is float32\[3\]"):
    api.adjust_logits(x[:, 0], params, stop_ids, drafts, memory)
  with pytest.raises(ValueError, match=r"slot is int32\[2\]"):
    api.adjust_logits(x, params._replace(slot=params.slot[:2]), stop_ids, drafts, memory)
  with pytest.raises(ValueError, match=r"stop_ids is int32\[2, 3\]"):
    api.adjust_logits(x, params, stop_ids[:2], drafts, memory)
  with pytest.raises(ValueError, match=r"drafts is int32\[2, 7\]"):
    api.adjust_logits(x, params, stop_ids, drafts[:2], memory)
  with pytest.raises(ValueError, match=r"mask is int32\[7, 1\]"):
    api.adjust_logits(x, params, stop_ids, drafts, memory._replace(mask=memory.mask[:, :1]))
  with pytest.raises(ValueError, match=r"num_rows is int32\[2\]"):
    api.adjust_logits(x, params, stop_ids, drafts, memory, jnp.zeros(2, jnp.int32))
  with pytest.raises(ValueError, match="'gpu' is not one of reference, cpu"):
    api.adjust_logits(x, params, stop_ids, drafts, memory, None, "gpu")


@needs_compiler
def test_a_wrong_row_count_is_an_error() -> None:
  arguments = jax.tree.map(jnp.asarray, inputs(3, 40))
  for count in (-1, 4):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{count} rows in use of 3"):
      jax.block_until_ready(api.adjust_logits(*arguments, jnp.full(1, count, jnp.int32), "cpu"))


# --- Seeded bugs ------------------------------------------------------------------------------------------------------

_BUGS = {
  "prompts_not_repeated": ("past == 0 ? x :", "count == 0 ? x :"),
  "repetition_the_wrong_way": ("x > 0.0f ? lower", "x < 0.0f ? lower"),
  "presence_of_prompts": ("count > 0 ? present", "past != 0 ? present"),
  "not_held_finite": ("std::min(std::max(count > 0 ? present : y, -kHuge), kHuge)", "(count > 0 ? present : y)"),
  "the_sign_before_the_bias": ("repeated = x > 0.0f", "repeated = from > 0.0f"),
  "the_forbidden_let_through": ("kBiased && x == kForbidden ? kForbidden : held", "held"),
  "penalties_for_all": ("if (kinds & kPenalty)", "if (true)"),
  "the_rest_of_a_word": ("i < V; i += 32", "i + 32 <= V; i += 32"),
  "bits_the_other_way": ("(word >> j) & 1", "(word >> (31 - j)) & 1"),
  "the_first_ending_let_through": ("ids[i] >= 0 &&", "ids[i] > 0 &&"),
  "nothing_left": ("if (!left) std::copy", "if (false) std::copy"),
  "drafts_not_counted": ("j < d; ++j", "j < 0; ++j"),
  "a_draft_counted_once": ("std::count(drafts, drafts + d, drafts[j])", "1"),
  "drafts_before_the_first": ("i < 0 || i >= V", "i <= 0 || i >= V"),
  "the_mask_of_the_slot": ("params[kMaskLine * S], 0", "params[kSlot * S], 0"),
  "another_slot": ("slots.bias + slot * V", "slots.bias + (slot ? slot - 1 : 0) * V"),
}


@needs_compiler
@pytest.mark.kernels
@pytest.mark.parametrize("name", _BUGS)
def test_seeded_bug_is_caught(name: str, with_bug: Callable[..., None]) -> None:
  with_bug("adjust", _BUGS[name])
  with pytest.raises(AssertionError):
    test_penalties_stay_finite()
    check_endings()
    check(*inputs(17, 300))
