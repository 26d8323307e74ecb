"""The low-rank product against numpy: every split of rows over slots, every dtype, and rows that nobody uses."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.low_rank.api import RANK_MULTIPLE, add_low_rank, choose_low_rank

SHAPES = {  # inputs, runs, repeats, rank
  "qkv": (96, (64, 32, 32), 3, 16),
  "wide runs": (40, (1600, 1600), 1, 32),
  "odd": (33, (5, 17), 2, 16),
  "one": (1, (1,), 1, 16),
}
SLOTS = {
  "none": (0, 0, 0),
  "one row": (3,),
  "some": (0, 2, 1, 2, 0, 3, 1, 2),
  "many of one": (2,) * 37,
  "all": tuple(number % 4 for number in range(61)),
}
IMPLEMENTATIONS = [
  "reference",
  pytest.param("cpu", marks=pytest.mark.skipif(not native.path("low_rank").exists(), reason="no C++ compiler")),
]


def arrays(inputs: int, runs: Sequence[int], repeats: int, rank: int, tokens: int, dtype: str) -> list[jax.Array]:
  """y, x, a, b for 4 slots, of which slot 0 is zeros."""
  rng, outputs = np.random.default_rng(1), sum(runs) * repeats
  shapes = ((tokens, outputs), (tokens, inputs), (4, inputs, len(runs) * rank), (4, rank, outputs))
  made = [rng.standard_normal(shape, np.float32) for shape in shapes]
  made[2] *= inputs**-0.5
  for array in made[2:]:
    array[0] = 0
  return [jnp.asarray(array, dtype) for array in made]


def expected(y, x, slots, a, b, runs, repeats) -> np.ndarray:
  y, x, a, b = (np.asarray(array, np.float64) for array in (y, x, a, b))
  out, rank = y.copy(), b.shape[1]
  part_of = np.tile(np.repeat(np.arange(len(runs)), runs), repeats)
  for token, slot in enumerate(slots):
    h = (x[token] @ a[slot]).reshape(len(runs), rank)
    out[token] += np.einsum("nr,rn->n", h[part_of], b[slot])
  return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_adds_the_product_of_each_rows_slot(implementation: str, dtype: str, slots, shape):
  inputs, runs, repeats, rank = shape
  y, x, a, b = arrays(inputs, runs, repeats, rank, len(slots), dtype)
  found = add_low_rank(y, x, jnp.array(slots, jnp.int32), a, b, runs, repeats, implementation)
  wanted = expected(y, x, slots, a, b, runs, repeats)
  # f32: sums of at most 128 terms of size 1. bfloat16 rounds the result, and the reference also rounds h, to 8 bits;
  # float16 has three bits more.
  tolerance = 1e-4 if dtype == "float32" else 2**-7
  assert found.dtype == y.dtype
  assert np.abs(np.asarray(found, np.float64) - wanted).max() < tolerance * max(4, np.abs(wanted).max())
  for token, slot in enumerate(slots):
    if slot == 0:
      assert np.array_equal(np.asarray(found[token]), np.asarray(y[token])), "slot 0 changed a row"


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_reference_adds_products_of_float16(slots):
  test_adds_the_product_of_each_rows_slot("reference", "float16", slots, SHAPES["qkv"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_gives_a_row_the_same_bits_in_any_batch(dtype: str):
  if not native.path("low_rank").exists():
    pytest.skip("no C++ compiler")
  inputs, runs, repeats, rank = SHAPES["qkv"]
  slots = jnp.array(SLOTS["all"], jnp.int32)
  y, x, a, b = arrays(inputs, runs, repeats, rank, len(slots), dtype)
  together = np.asarray(add_low_rank(y, x, slots, a, b, runs, repeats, "cpu"))
  for token in range(0, len(slots), 7):
    row = slice(token, token + 1)
    alone = add_low_rank(y[row], x[row], slots[row], a, b, runs, repeats, "cpu")
    assert np.array_equal(np.asarray(alone)[0], together[token])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_of_a_row_stays_in_it(implementation: str):
  inputs, runs, repeats, rank = SHAPES["qkv"]
  slots = SLOTS["some"]
  y, x, a, b = arrays(inputs, runs, repeats, rank, len(slots), "float32")
  x = x.at[1].set(jnp.nan)
  found = np.asarray(add_low_rank(y, x, jnp.array(slots, jnp.int32), a, b, runs, repeats, implementation))
  assert np.isnan(found[1]).all() and np.isfinite(np.delete(found, 1, 0)).all()


def test_float16_takes_the_reference():
  assert (
    choose_low_rank("cpu", jnp.dtype(jnp.float16)) == choose_low_rank("cuda", jnp.dtype(jnp.float16)) == "reference"
  )
  assert choose_low_rank("cpu", jnp.dtype(jnp.float32)) == native.choose_implementation("low_rank", "cpu")


def test_refuses_arguments_that_do_not_match():
  inputs, runs, repeats, rank = SHAPES["qkv"]
  y, x, a, b = arrays(inputs, runs, repeats, rank, 3, "float32")
  slots = jnp.zeros(3, jnp.int32)
  with pytest.raises(ValueError, match="do not match x"):
    add_low_rank(y, x[:, 1:], slots, a, b, runs, repeats)
  with pytest.raises(ValueError, match="do not match x"):
    add_low_rank(y, x, slots, a, b, runs, repeats + 1)
  with pytest.raises(ValueError, match="must all be one of float32, bfloat16, float16"):
    add_low_rank(y, x.astype(jnp.bfloat16), slots, a, b, runs, repeats)
  halves = [each.astype(jnp.float16) for each in (y, x, a, b)]
  with pytest.raises(ValueError, match="must all be one of float32, bfloat16$"):
    add_low_rank(halves[0], halves[1], slots, *halves[2:], runs, repeats, "cpu")
  with pytest.raises(ValueError, match="implementation 'gpu' is not one of"):
    add_low_rank(y, x, slots, a, b, runs, repeats, "gpu")
  with pytest.raises(ValueError, match=f"has rank 8, and needs a multiple of {RANK_MULTIPLE}"):
    add_low_rank(y, x, slots, a[..., : 3 * 8], b[:, :8], runs, repeats, "cpu")
  with pytest.raises(ValueError, match="reference takes no norm or gates"):
    add_low_rank(y, x, slots, a, b, runs, repeats, "reference", gated=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gated", [False, True])
def test_kernel_applies_the_norm_or_the_gates_first(dtype: str, gated: bool):
  if not native.path("low_rank").exists():
    pytest.skip("no C++ compiler")
  inputs, runs, repeats, rank = SHAPES["odd"]
  slots = SLOTS["all"]
  y, x, a, b = arrays(inputs * (1 + gated), runs, repeats, rank, len(slots), dtype)
  a = a[:, :inputs]
  scale = jnp.linspace(0.5, 2.0, inputs).astype(dtype)
  x32 = np.asarray(x, np.float32)
  if gated:
    prepared, norm = x32[:, :inputs] / (1 + np.exp(-x32[:, :inputs])) * x32[:, inputs:], None
  else:
    norm = scale, 1e-5
    prepared = x32 / np.sqrt(np.square(x32).mean(axis=1, keepdims=True) + 1e-5) * np.asarray(scale, np.float32)
  found = add_low_rank(y, x, jnp.array(slots, jnp.int32), a, b, runs, repeats, "cpu", norm, gated)
  wanted = expected(y, prepared, slots, a, b, runs, repeats)
  tolerance = 1e-4 if dtype == "float32" else 2**-6  # bfloat16 also rounds the prepared input, twice
  assert np.abs(np.asarray(found, np.float64) - wanted).max() < tolerance * max(4, np.abs(wanted).max())
