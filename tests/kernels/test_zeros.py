"""Zeros whose memory comes at the first access: all are zero, whatever the memory held, and none is there before."""

from collections.abc import Callable
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.zeros import api

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def built() -> None:
  if native.compiler() is not None:
    native.build_library("zeros")


def check_zeros() -> None:
  """Makes arrays of many sizes where numbers have been: a freed array's memory is handed out again."""
  for size in (1, 5, 1000, 4095, 4096, 5000, 100_003, 3_000_000):
    make = jax.jit(lambda size=size: api.make_zeros((size,), jnp.uint8, "cpu")).lower().compile()
    fill = jax.jit(lambda size=size: jnp.full((size,), 7, jnp.uint8)).lower().compile()
    for _ in range(3):
      fill().block_until_ready()
      assert not np.asarray(make()).any(), size


@needs_compiler
def test_all_are_zero() -> None:
  check_zeros()
  made = jax.jit(lambda: api.make_zeros((3, 70, 16), jnp.bfloat16, "cpu"))()
  np.testing.assert_array_equal(made, api.make_zeros((3, 70, 16), jnp.bfloat16))


@needs_compiler
def test_memory_comes_at_the_first_access_and_a_donated_array_stays_in_place() -> None:
  size = 256 * 2**20
  make = jax.jit(lambda: api.make_zeros((size,), jnp.uint8, "cpu")).lower().compile()
  argument = jax.ShapeDtypeStruct((size,), jnp.uint8)
  write = jax.jit(lambda x: x.at[5].set(3), donate_argnums=0).lower(argument).compile()
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  made = make()
  address = made.unsafe_buffer_pointer()
  made = write(made).block_until_ready()
  faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
  assert made.unsafe_buffer_pointer() == address and made[5] == 3
  assert faults * resource.getpagesize() < size // 8


def test_an_unknown_implementation_is_refused() -> None:
  with pytest.raises(ValueError, match="'gpu' is not one of reference, cpu"):
    api.make_zeros((2,), jnp.float32, "gpu")


@needs_compiler
@pytest.mark.kernels
@pytest.mark.parametrize(
  "bug",
  [
    ("std::memset(begin, 0, static_cast<size_t>(first - begin));", ""),
    ("std::memset(last, 0, static_cast<size_t>(end - last));", ""),
    ("madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED) == 0", "true"),
    ("  std::memset(begin, 0, static_cast<size_t>(end - begin));\n  return", "  return"),
  ],
  ids=["the_first_part", "the_last_part", "the_pages", "small_arrays"],
)
def test_seeded_bug_is_caught(bug: tuple[str, str], with_bug: Callable[..., None]) -> None:
  with_bug("zeros", bug)
  with pytest.raises(AssertionError):
    check_zeros()
