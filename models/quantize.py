"""Quantizes weights and rows to 8 bits with one scale each. May not decide which weights, or how layers use them.

Quantization is symmetric: the largest magnitude of an output's weights, or of a row's numbers, sets its scale. A number
of int8 has an error of at most half a step, 1/254 of the largest. One of e4m3 has an error of at most 1/16 of itself,
but for numbers near 0.
"""

from functools import partial

import jax
import jax.numpy as jnp

INT8, E4M3 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)
# The largest number; int8 is without -128, so that the range is symmetric and needs no offset.
_LIMITS = {INT8: 127.0, E4M3: 448.0}


@partial(jax.jit, static_argnums=(1, 2))
def quantize(weight: jax.Array, num_inputs: int, dtype: jnp.dtype = INT8) -> tuple[jax.Array, jax.Array]:
  """Returns the numbers of a weight in 8 bits, and the scales of their products.

  Args:
    weight: finite; its first `num_inputs` dimensions are inputs, the others outputs.
    dtype: int8 or float8_e4m3fn.

  Returns:
    dtype[weight.shape]; f32[weight.shape[num_inputs:]], above 0; 1 for an output whose weights are all 0.
  """
  values, scale = _round_by_scale(weight, tuple(range(num_inputs)), dtype)
  return values, scale.reshape(weight.shape[num_inputs:])


def quantize_rows(x: jax.Array, num_inputs: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
  """Returns the numbers of each row in 8 bits, dtype[x.shape], and its scale, f32[x.shape[:-num_inputs]].

  A scale of its own makes a row's numbers independent of its batch, and a row with a large number harms no other.

  Args:
    x: [..., *inputs].
    num_inputs: dimensions of a row.
    dtype: int8 or float8_e4m3fn.
  """
  values, scale = _round_by_scale(x, tuple(range(x.ndim - num_inputs, x.ndim)), dtype)
  return values, scale.reshape(x.shape[: x.ndim - num_inputs])


def _round_by_scale(values: jax.Array, axes: tuple[int, ...], dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
  """Args: axes: those that share a scale, which keep an extent of 1 in the scales."""
  limit, exact = _LIMITS[dtype], values.astype(jnp.float32)
  greatest = jnp.max(jnp.abs(exact), axis=axes, keepdims=True)
  scale = jnp.where(greatest > 0, greatest / limit, jnp.ones_like(greatest))
  steps = exact / jnp.broadcast_to(scale, exact.shape)
  steps = jnp.round(steps) if dtype == jnp.int8 else steps
  return jnp.clip(steps, -limit, limit).astype(dtype), scale


@partial(jax.jit, static_argnums=(1, 2))
def quantize_groups(rows: jax.Array, bits: int, group: int) -> tuple[jax.Array, jax.Array]:
  """Returns what models.grouped_weight.quantize_by_group does, for a matrix [outputs, inputs], in all threads.

  XLA divides with another last bit, so a weight half-way between two codes may take the other one.

  Args:
    rows: finite, of a float dtype.
    bits, group: as there.

  Returns:
    uint8[outputs, inputs]; float16 (4 bits) or float32 [outputs, inputs / group].
  """
  zero = 1 << (bits - 1)
  grouped = rows.astype(jnp.float32).reshape(rows.shape[0], -1, group)
  low, high = grouped.min(axis=2), grouped.max(axis=2)
  scales = jnp.where(-low >= high, low, high) / jnp.float32(-zero)
  scales = scales.astype(jnp.float16 if bits == 4 else jnp.float32)
  used = scales.astype(jnp.float32)[:, :, None]
  steps = jnp.where(used == 0, 0, grouped / jnp.where(used == 0, 1, used))
  codes = jnp.clip(jnp.round(steps) + zero, 0, 2 * zero - 1)
  return codes.astype(jnp.uint8).reshape(rows.shape), scales
