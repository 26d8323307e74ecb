"""Row copies for TPUs, in Pallas' simulator of a TPU, equal the plain ones; and the bugs that this must notice.

The simulator fills fresh memory with NaN and carries a copy out only when it is awaited.
"""

from collections.abc import Iterator
import math
import types

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_copies import api, reference, tpu
from tests.kernels.seeded import seed_bug

NUM_ROWS = 21


@pytest.fixture
def simulated(quick_compilation: None) -> Iterator[None]:
  with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
    yield
  pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("width", [1, 384, 1024, 1025, 2560, 4096])
def test_a_row_fills_whole_tiles(width: int) -> None:
  """A TPU would pad other rows, and then a buffer takes more memory than the engine counted."""
  rows, sublanes, lanes = api.make_buffer_shape(NUM_ROWS, width, "tpu")
  assert (rows, sublanes, lanes % 128) == (NUM_ROWS, 8, 0)
  assert 0 <= sublanes * lanes - width < 8 * 128


def test_an_unknown_implementation_is_refused() -> None:
  with pytest.raises(ValueError, match="row copies: implementation 'gpu' is not one of reference, tpu"):
    api.make_buffer_shape(NUM_ROWS, 8, "gpu")


def test_the_reference_reads_and_writes_rows() -> None:
  """Rows past the end are dropped; NaN in a row reaches no other one."""
  old, new = np.arange(12, dtype=np.float32).reshape(4, 3), -np.arange(9, dtype=np.float32).reshape(3, 3)
  new[1] = np.nan
  written = reference.write_rows(jnp.asarray(old), jnp.array([2, 4, 0]), jnp.asarray(new))
  wanted = np.stack([new[2], old[1], new[0], old[3]])
  np.testing.assert_array_equal(written, wanted)
  np.testing.assert_array_equal(reference.read_rows(written, jnp.array([3, 0, 0]), 3), wanted[[3, 0, 0]])


def copy_and_compare(module: types.ModuleType, width: int, dtype: str, num_written: int = 13) -> None:
  """Compares all rows after a write, and rows in any order, with those of the reference, bit for bit.

  Written rows are scattered over the buffer, and some lie past its end, as those of padding do. The simulator fails if
  a kernel reads outside of the buffer.
  """
  rng = np.random.default_rng(width)
  old, new = (
    jnp.asarray(rng.standard_normal((size, width), np.float32)).astype(dtype) for size in (NUM_ROWS, num_written)
  )
  rows = rng.permutation(NUM_ROWS)[:num_written].astype(np.int32)
  rows[::4] = NUM_ROWS + np.arange(len(rows[::4]))
  found = np.append(rng.integers(0, NUM_ROWS, 17), (NUM_ROWS + 300, -(2**31))).astype(np.int32)
  shape = module.make_buffer_shape(NUM_ROWS, width)
  spare = math.prod(shape[1:]) - width
  buffer = jnp.pad(old, ((0, 0), (0, spare)), constant_values=jnp.nan).reshape(shape)

  @jax.jit
  def run(buffer, rows, new, found):
    written = module.write_rows(buffer, rows, new)
    every = jnp.arange(NUM_ROWS, dtype=jnp.int32)
    return module.read_rows(written, every, width), module.read_rows(written, found, width)[:-2]

  wanted = reference.write_rows(old, jnp.asarray(rows), new)
  for result, expected in zip(run(buffer, rows, new, found), (wanted, wanted[found[:-2]]), strict=True):
    assert result.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.kernels
@pytest.mark.parametrize(("width", "dtype"), [(384, "bfloat16"), (1024, "bfloat16"), (2560, "float32")])
@pytest.mark.usefixtures("simulated")
def test_rows_are_those_of_the_reference(width: int, dtype: str) -> None:
  copy_and_compare(tpu, width, dtype)


BUGS = {
  "copies are not awaited": ("  copy_each(lambda copy: copy.wait())\n", ""),
  "the last row is left out": ("lax.fori_loop(0, sources.shape[0]", "lax.fori_loop(0, sources.shape[0] - 1"),
  "the last row is dropped": ("targets[i] < target.shape[0]", "targets[i] < target.shape[0] - 1"),
  "rows lie one after the other": ("target.at[targets[i]]", "target.at[i]"),
}


@pytest.mark.kernels
@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.usefixtures("simulated")
def test_a_seeded_bug_is_noticed(bug: str) -> None:
  module = seed_bug(tpu, *BUGS[bug])
  with pytest.raises(AssertionError):
    copy_and_compare(module, 384, "bfloat16")


@pytest.mark.kernels
@pytest.mark.usefixtures("simulated")
def test_a_read_outside_of_the_buffer_is_noticed() -> None:
  module = seed_bug(tpu, "jnp.clip(rows, 0, buffer.shape[0] - 1)", "rows")
  with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds read"):
    copy_and_compare(module, 384, "bfloat16")
