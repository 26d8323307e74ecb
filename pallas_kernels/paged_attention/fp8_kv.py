"""Keys and values as fp8 (e4m3) without a scale: half the bytes of bfloat16 in the same layout. Knows no kernel.

e4m3 has 4 bits of precision from 2^-6 up to 448, which covers the keys and values of usual models, and no infinity.
Larger numbers become 448 of their sign. Numbers that are not finite become NaN: all that a query sees of them is NaN,
as with KV in wider floats. Rounding depends on each number alone, so no batch, chunk or neighbor changes what a pool
holds.

A pool has the bytes of e4m3 as uint8. Where XLA copies single lines of fp8, it would widen the whole pool on a CPU.
"""

import jax
from jax import lax
import jax.numpy as jnp

BYTES = jnp.dtype(jnp.uint8)
LARGEST = 448.0


def to_fp8(x: jax.Array) -> jax.Array:
  """Rounds keys or values to the nearest number of e4m3, ties to even; also inside kernels. Returns its bytes."""
  x = x.astype(jnp.float32)
  # Devices differ in what becomes of numbers beyond the largest: XLA makes NaN of them, a GPU's instruction 448.
  limited = jnp.minimum(jnp.maximum(x, -LARGEST), LARGEST)
  numbers = jnp.where(jnp.abs(x) < jnp.inf, limited, jnp.nan).astype(jnp.float8_e4m3fn)
  return lax.bitcast_convert_type(numbers, BYTES)


def from_fp8(x: jax.Array) -> jax.Array:
  """Returns the numbers of bytes, uint8 -> f32 of the same shape; also inside kernels. bfloat16 has all of them."""
  return lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32)
