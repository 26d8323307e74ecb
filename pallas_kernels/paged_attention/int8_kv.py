"""Keys and values as int8: the numbers of a token and head, and their scale beside them. Knows no layout of pages.

The scale is max |x| / 127, rounded up to bfloat16, so every number is in -127 to 127 and the largest error is half a
scale. It depends on this token and head alone: no batch, chunk or neighbor changes what a pool holds. The two bytes of
the scale lie in the same page as the numbers, so a copy of a block moves both.

Numbers that are not finite get a NaN for a scale: all that a query sees of them is NaN, as with KV in floats.
"""

import jax
from jax import lax
import jax.numpy as jnp

SCALE_BYTES = 2
_LEAST_SCALE = 2.0**-126


def stored_size(head_dim: int, dtype: jnp.dtype) -> int:
  """Returns the elements of a pool of `dtype` for the key or value of a token and head."""
  return head_dim + SCALE_BYTES if jnp.dtype(dtype) == jnp.int8 else head_dim


def quantize(x: jax.Array) -> jax.Array:
  """Returns the lines of keys or values, [..., H] -> int8[..., H + 2]: the numbers, then the bytes of the scale."""
  numbers, scale = quantize_apart(x)
  return jnp.concatenate([numbers, lax.bitcast_convert_type(scale, jnp.int8)], axis=-1)


def quantize_apart(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the numbers of keys or values [..., H], int8[..., H], and their scales, bfloat16[...]."""
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127.0
  bits = (lax.bitcast_convert_type(scale, jnp.uint32) + 0xFFFF) >> 16
  # XLA:CPU's maximum may lose a NaN.
  is_finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
  upper = jnp.where(is_finite, bits, 0x7FC0).astype(jnp.uint16)
  scale = lax.bitcast_convert_type(upper, jnp.bfloat16)
  wide = scale.astype(jnp.float32)
  # By the inverse, as XLA:CPU divides by something broadcast. A scale below the normal numbers of f32 counts as 0.
  numbers = jnp.where(wide >= _LEAST_SCALE, jnp.round(x * (1.0 / wide)), 0.0).astype(jnp.int8)
  return numbers, scale[..., 0]


def dequantize(lines: jax.Array) -> jax.Array:
  """Returns the keys or values of lines, int8[..., H + 2] -> f32[..., H]."""
  scale = lax.bitcast_convert_type(lines[..., -SCALE_BYTES:], jnp.bfloat16)
  return lines[..., :-SCALE_BYTES].astype(jnp.float32) * scale.astype(jnp.float32)[..., None]
