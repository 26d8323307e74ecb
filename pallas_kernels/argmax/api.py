"""The largest number of each line, and whether the line is finite, in one pass (cpu.cc). Samples nothing.

`reference` is plain jnp and runs anywhere; a CPU's own goes over lines in use alone, on XLA's threads.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import native

choose = functools.partial(native.choose, "argmax")  # an implementation, for a platform and a number of devices


def reference(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """See `argmax`. Two plain reductions: XLA's variadic argmax takes 8 times as long on a CPU."""
  index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  most = jnp.broadcast_to(jnp.max(x, axis=1)[:, None], x.shape)
  return jnp.min(jnp.where(x == most, index, x.shape[1] - 1), axis=1), jnp.all(jnp.isfinite(x), axis=1)


def argmax(
  x: jax.Array, num_rows: jax.Array | None = None, implementation: str = "reference"
) -> tuple[jax.Array, jax.Array]:
  """The lowest index of the largest number of each line (int32[S]), and whether all its numbers are finite (bool[S]).

  Args:
    x: f32[S, V]. Of a line with a NaN the index is in range, and means nothing.
    num_rows: int32[1], how many lines are in use, those in front; of the others nothing is said but that the index is
      in range. None: all.
    implementation: of native.IMPLEMENTATIONS.

  Raises:
    NativeMissing: "cpu", and its library is not built.
    ValueError: an argument is of another type or shape.
  """
  native.check_lines("argmax", x, implementation)
  num_rows = native.count("argmax", num_rows)
  if implementation == "reference":
    return reference(x)
  result = tuple(jax.ShapeDtypeStruct(x.shape[:1], dtype) for dtype in (jnp.int32, jnp.bool_))
  best, finite = native.call("argmax", result)(x, num_rows)
  return best, finite
