"""Tests that the C++ argmax kernel and the reference agree for all rows, finite or not."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.argmax import api


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
  if native.compiler() is not None:
    native.build_library("argmax")


needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: XLA's reductions serve here")
implementations = pytest.mark.parametrize("name", ["reference", pytest.param("cpu", marks=needs_compiler)])


def numbers(rows: int, vocab: int) -> np.ndarray:
  """Few distinct values, so that most occur several times."""
  return np.random.default_rng(vocab).integers(-5, 5, (rows, vocab)).astype(np.float32)


def check(x: np.ndarray, name: str, num_rows: int | None = None) -> None:
  used = len(x) if num_rows is None else num_rows
  count = None if num_rows is None else jnp.full(1, num_rows, jnp.int32)
  best, finite = api.argmax(jnp.asarray(x), count, name)
  assert best.shape == finite.shape == x.shape[:1]
  assert ((np.asarray(best) >= 0) & (np.asarray(best) < x.shape[1])).all()
  expected = np.isfinite(x[:used]).all(axis=1)
  np.testing.assert_array_equal(np.asarray(finite)[:used], expected)
  known = ~np.isnan(x[:used]).any(axis=1)
  np.testing.assert_array_equal(np.asarray(best)[:used][known], x[:used][known].argmax(axis=1))


def check_special(name: str) -> None:
  for vocab in (3, 40):
    x = numbers(7, vocab)
    x[0, 1], x[1, vocab - 1], x[2, 0], x[3, :] = np.nan, np.inf, -np.inf, -np.inf
    x[4, :], x[5, :], x[5, vocab - 2] = 2.0, -3e38, -2e38
    check(x, name)


@implementations
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 300, 32000])
def test_any_width(vocab: int, name: str) -> None:
  check(numbers(9, vocab), name)


@implementations
def test_nonfinite_rows(name: str) -> None:
  check_special(name)


@implementations
@pytest.mark.parametrize("used", [0, 1, 8, 9])
def test_padding_rows_change_nothing(used: int, name: str) -> None:
  x = numbers(9, 20000)  # enough for threads
  x[used:] = np.nan
  check(x, name, used)


def test_wrong_shapes_raise() -> None:
  with pytest.raises(ValueError, match=r"x is float32\[3\]"):
    api.argmax(jnp.zeros(3))
  with pytest.raises(ValueError, match=r"num_rows is int32\[2\]"):
    api.argmax(jnp.zeros((3, 4)), jnp.zeros(2, jnp.int32))
  with pytest.raises(ValueError, match="'gpu' is not one of reference, cpu"):
    api.argmax(jnp.zeros((3, 4)), None, "gpu")


@needs_compiler
def test_a_wrong_row_count_is_an_error() -> None:
  for count in (-1, 4):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{count} rows in use of 3"):
      jax.block_until_ready(api.argmax(jnp.zeros((3, 4)), jnp.full(1, count, jnp.int32), "cpu"))


# --- Seeded bugs ------------------------------------------------------------------------------------------------------

_BUGS = {
  "the_last_of_equals": ("const IntVec more = v > most", "const IntVec more = v >= most"),
  "any_lane_of_equals": ("at[j] < where)) top", "at[j] > where)) top"),
  "the_rest_left_out": ("for (; i < V; ++i)", "for (; i + 1 < V; ++i)"),
  "not_finite_unseen": ("zeros += v * 0.0f", "zeros += 0.0f"),
  "another_row": ("scan_row(from + s * V", "scan_row(from + (s ? s - 1 : 0) * V"),
}


@needs_compiler
@pytest.mark.kernels
@pytest.mark.parametrize("name", _BUGS)
def test_seeded_bug_is_caught(name: str, with_bug: Callable[..., None]) -> None:
  with_bug("argmax", _BUGS[name])
  with pytest.raises(AssertionError):
    check(numbers(9, 300), "cpu")
    check(np.eye(9, 37, 36 - 8, dtype=np.float32), "cpu")
    check_special("cpu")
