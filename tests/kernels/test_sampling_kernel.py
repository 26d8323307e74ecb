"""Tests that the C++ sampling kernel and the reference invert the same distribution for all sampling parameters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.sampling import api, reference
from tests import numpy_sampler

# Sampling parameters of a row: temperature, top_p, min_p, top_k.
_PLAIN = (1.0, 2.0, 0.0, api.NO_LIMIT)
_CHOICES = (
  _PLAIN,
  (0.3, 2.0, 0.0, api.NO_LIMIT),
  (1e-30, 2.0, 0.0, api.NO_LIMIT),
  (100.0, 2.0, 0.0, api.NO_LIMIT),
  (1.0, 2.0, 0.0, 1),
  (2.0, 2.0, 0.0, 7),
  (1.0, 0.5, 0.0, api.NO_LIMIT),
  (1.0, 1e-30, 0.0, api.NO_LIMIT),
  (1.0, 2.0, 0.2, api.NO_LIMIT),
  (1.5, 0.7, 0.05, 12),
  (1.5, 0.8, 0.2, api.NO_LIMIT),
)


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
  if native.compiler() is not None:
    native.build_library("sampling")


needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: the reference samples here")
implementations = pytest.mark.parametrize("name", ["reference", pytest.param("cpu", marks=needs_compiler)])


def sampling_inputs(rows: int, choices=_CHOICES) -> api.SamplingInputs:
  """The choices in turn; each row has its own seed and position."""
  chosen = np.array([choices[row % len(choices)] for row in range(rows)])
  rng = np.random.default_rng(rows)
  return api.SamplingInputs(
    temperature=jnp.asarray(chosen[:, 0], jnp.float32),
    top_p=jnp.asarray(chosen[:, 1], jnp.float32),
    min_p=jnp.asarray(chosen[:, 2], jnp.float32),
    top_k=jnp.asarray(chosen[:, 3], jnp.int32),
    seed=jnp.asarray(rng.integers(2**32, size=rows), jnp.uint32),
    position=jnp.asarray(rng.integers(2**17, size=rows), jnp.int32),
  )


def logits(rows: int, vocab: int) -> np.ndarray:
  x = (np.random.default_rng(vocab).normal(size=(rows, vocab)) * 3).astype(np.float32)
  x[1::3, ::5] = -np.inf  # not allowed
  x[1::3, vocab - 1] = 0.0
  return x


def run(x: np.ndarray, of: api.SamplingInputs, name: str, num_rows: int | None = None) -> np.ndarray:
  count = None if num_rows is None else jnp.full(1, num_rows, jnp.int32)
  tokens = np.asarray(jax.jit(lambda x, of: api.sample_tokens(x, of, count, name))(x, of))
  assert tokens.shape == x.shape[:1] and tokens.dtype == np.int32
  assert ((tokens >= 0) & (tokens < x.shape[1])).all()
  return tokens


def check(x: np.ndarray, of: api.SamplingInputs, name: str, num_rows: int | None = None) -> None:
  tokens = run(x, of, name, num_rows)
  numbers = np.asarray(jax.vmap(reference.uniform)(of.seed, of.position))
  for row, token in enumerate(tokens[:num_rows]):
    temperature, top_p, min_p = (float(line[row]) for line in of[:3])
    weights = numpy_sampler.truncate(x[row], temperature, min_p, int(of.top_k[row]), top_p)
    numpy_sampler.check_sample(weights, numbers[row], token)


@implementations
@pytest.mark.parametrize("vocab", [2, 16, 129, 300, 32000])
def test_any_width(vocab: int, name: str) -> None:
  check(logits(20, vocab), sampling_inputs(20), name)


@implementations
def test_the_random_number_is_jax_own(name: str) -> None:
  vocab = 2**15
  of = sampling_inputs(40, (_PLAIN,))
  key = [
    jax.random.fold_in(jax.random.key(seed), position) for seed, position in zip(of.seed, of.position, strict=True)
  ]
  words = np.array([jax.random.key_data(each)[0] for each in key])
  expected = (words >> 17).astype(np.int32)  # all weights are 1, so that sums are exact
  np.testing.assert_array_equal(run(np.zeros((40, vocab), np.float32), of, name), expected)


@implementations
@pytest.mark.parametrize("used", [0, 1, 19, 20])
def test_padding_rows_change_nothing(used: int, name: str) -> None:
  x = logits(20, 3000)  # enough for threads
  x[used:] = np.nan
  check(x, sampling_inputs(20), name, used)


@needs_compiler
def test_a_row_samples_the_same_token_in_any_batch() -> None:
  x, of = logits(20, 3000), sampling_inputs(20)
  together = run(x, of, "cpu")
  for row in range(20):
    one = slice(row, row + 1)
    assert run(x[one], api.SamplingInputs(*(line[one] for line in of)), "cpu").tolist() == [together[row]]


@implementations
def test_tokens_of_equal_weight_at_a_threshold_all_stay(name: str) -> None:
  x = np.full((60, 300), -5.0, np.float32)
  x[:, [10, 20, 30]] = 1.0
  for choice in ((1.0, 2.0, 0.0, 2), (1.0, 0.4, 0.0, api.NO_LIMIT), (1.0, 2.0, 1.0, api.NO_LIMIT)):
    assert set(run(x, sampling_inputs(60, (choice,)), name).tolist()) == {10, 20, 30}


@implementations
def test_a_nonfinite_row_leaves_others_alone(name: str) -> None:
  x, of = logits(20, 300), sampling_inputs(20)
  expected = run(x, of, name)
  for value in (np.nan, np.inf, -np.inf):
    broken = x.copy()
    broken[4] = value
    broken[5, 17] = value if value != -np.inf else np.nan
    np.testing.assert_array_equal(np.delete(run(broken, of, name), (4, 5)), np.delete(expected, (4, 5)))


def sampled_tokens(x: list[float], choice: tuple[float, ...], name: str) -> set[int]:
  """The set of tokens in 2,000 samples of one row."""
  return set(run(np.tile(np.array(x, np.float32), (2000, 1)), sampling_inputs(2000, (choice,)), name).tolist())


@implementations
def test_min_p_comes_before_top_p(name: str) -> None:
  # min_p leaves the first two, of which the first alone has 0.6; of all four it takes two to reach 0.6.
  line = np.log([0.5, 0.2, 0.16, 0.14]).tolist()
  assert sampled_tokens(line, (1.0, 2.0, 0.35, api.NO_LIMIT), name) == {0, 1}
  assert sampled_tokens(line, (1.0, 0.6, 0.0, api.NO_LIMIT), name) == {0, 1}
  assert sampled_tokens(line, (1.0, 0.6, 0.35, api.NO_LIMIT), name) == {0}
  assert sampled_tokens(line, (1.0, 0.6, 0.35, 3), name) == {0}


@implementations
def test_top_k_comes_before_top_p(name: str) -> None:
  line = np.log([0.4, 0.3, 0.15, 0.15]).tolist()
  assert sampled_tokens(line, (1.0, 0.55, 0.0, api.NO_LIMIT), name) == {0, 1}
  assert sampled_tokens(line, (1.0, 0.55, 0.0, 2), name) == {0}  # 0.57 of the weight that top_k leaves


@implementations
def test_temperature_comes_before_min_p(name: str) -> None:
  assert sampled_tokens([0.0, -2.0, -9.0], (1.0, 2.0, 0.3, api.NO_LIMIT), name) == {0}
  assert sampled_tokens([0.0, -2.0, -9.0], (4.0, 2.0, 0.3, api.NO_LIMIT), name) == {0, 1}


@implementations
def test_every_token_left_is_sampled_and_no_other(name: str) -> None:
  """For random combinations of thresholds, 600 samples match a sorting implementation one by one."""
  rng = np.random.default_rng(11)
  rows, vocab = 600, 70
  for _ in range(5):
    line = (rng.normal(size=vocab) * 2).astype(np.float32)
    line[rng.random(vocab) < 0.1] = -np.inf
    choice = (
      float(rng.choice([0.5, 1.0, 2.5])),
      float(rng.choice([2.0, 0.5, 0.9])),
      float(rng.choice([0.0, 0.02, 0.15])),
      int(rng.choice([api.NO_LIMIT, 2, 15, 60])),
    )
    x, of = np.tile(line, (rows, 1)), sampling_inputs(rows, (choice,))
    check(x, of, name)
    temperature, top_p, min_p, top_k = choice
    weights = numpy_sampler.truncate(line, temperature, min_p, top_k, top_p)
    often = np.flatnonzero(weights > 0.03 * weights.sum())
    assert set(often.tolist()) <= set(run(x, of, name).tolist()), choice


def test_wrong_shapes_raise() -> None:
  x, of = jnp.zeros((3, 4)), sampling_inputs(3)
  with pytest.raises(ValueError, match=r"x is float32\[3\]"):
    api.sample_tokens(jnp.zeros(3), of)
  with pytest.raises(ValueError, match=r"temperature is float32\[2\]; it needs the 3 rows of x"):
    api.sample_tokens(x, sampling_inputs(2))
  with pytest.raises(ValueError, match=r"num_rows is int32\[2\]"):
    api.sample_tokens(x, of, jnp.zeros(2, jnp.int32))
  with pytest.raises(ValueError, match="'gpu' is not one of reference, cpu"):
    api.sample_tokens(x, of, None, "gpu")


@needs_compiler
def test_a_wrong_row_count_is_an_error() -> None:
  for count in (-1, 4):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{count} rows in use of 3"):
      jax.block_until_ready(
        api.sample_tokens(jnp.zeros((3, 4)), sampling_inputs(3), jnp.full(1, count, jnp.int32), "cpu")
      )


# --- Seeded bugs ------------------------------------------------------------------------------------------------------

_BUGS = {
  "another_number": ("group + 1;", "group;"),
  "top_k_left_out": ("if (inputs[kTopK * S] < kNoLimit)", "if (false)"),
  "top_p_left_out": ("least = std::max(least, threshold<false>(some, need, some_z, some_weights));", ""),
  "min_p_left_out": ("float least = std::log(number(kMinP));", "float least = kLeast;"),
  "min_p_after_top_p": (
    "const Tokens some = left();",
    "const Tokens some{z, weights, padded};",
  ),
  "the_first_of_equals": (">= need) low", "> need) low"),
  "what_lies_above_is_forgotten": ("dropped += from_high.weight;", ""),
  "what_lies_above_is_counted_again": ("high = t, from_high = here;", "from_high = here;"),
  "what_lies_below_is_counted": ("between(every, least,", "between(every, kNegligible,"),
  "one_token_on": ("if (end > wanted) break;", "if (before > wanted) break;"),
  "not_what_is_left": ("wanted -= before;", ""),
  "another_row": ("sample(from + s * V", "sample(from + (s ? s - 1 : 0) * V"),
  "the_rest_left_out": ("std::copy(x, x + V, z)", "std::copy(x, x + V / 16 * 16, z)"),
}


@needs_compiler
@pytest.mark.kernels
@pytest.mark.parametrize("name", _BUGS)
def test_seeded_bug_is_caught(name: str, with_bug: Callable[..., None]) -> None:
  with_bug("sampling", _BUGS[name])
  with pytest.raises(AssertionError):
    check(logits(40, 300), sampling_inputs(40), "cpu")
    x = np.full((60, 300), -5.0, np.float32)
    x[:, [10, 20, 30]] = 1.0
    assert set(run(x, sampling_inputs(60, ((1.0, 2.0, 0.0, 3),)), "cpu").tolist()) == {10, 20, 30}
