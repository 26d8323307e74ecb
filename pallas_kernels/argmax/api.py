"""Finds the largest number of each row and checks that the row is finite. May not sample.

`reference` is plain jnp and runs anywhere. The CPU kernel (cpu.cc) makes one pass over rows in use, on XLA's threads.
"""

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import native


def reference(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """See `argmax`. Uses two plain reductions: on a CPU, XLA's variadic argmax takes 8 times as long."""
  index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  most = jnp.broadcast_to(jnp.max(x, axis=1)[:, None], x.shape)
  return jnp.min(jnp.where(x == most, index, x.shape[1] - 1), axis=1), jnp.all(jnp.isfinite(x), axis=1)


def argmax(
  x: jax.Array, num_rows: jax.Array | None = None, implementation: str = "reference"
) -> tuple[jax.Array, jax.Array]:
  """Returns the lowest index of each row's largest number, int32[S], and whether the row is finite, bool[S].

  Args:
    x: f32[S, V]. In a row with NaN the index is arbitrary but in range.
    num_rows: int32[1], the number of rows in use, which come first. Indices of the other rows are arbitrary but in
      range. None: all rows.
    implementation: a name of native.IMPLEMENTATIONS.

  Raises:
    NativeMissing: the implementation is "cpu" and its library is not built.
    ValueError: an argument has another dtype or shape.
  """
  native.check_rows("argmax", x, implementation)
  num_rows = native.pack_row_count("argmax", num_rows)
  if implementation == "reference":
    return reference(x)
  result = tuple(jax.ShapeDtypeStruct(x.shape[:1], dtype) for dtype in (jnp.int32, jnp.bool_))
  best, finite = native.bind_call("argmax", result)(x, num_rows)
  return best, finite
