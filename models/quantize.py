"""Quantizes weights to int8 with one scale an output. May not decide which weights, or how layers use them.

Quantization is symmetric and weight-only: the largest magnitude of an output's weights sets its scale, and activations
keep their dtype. Each weight has an error of at most half a step, 1/254 of the output's largest weight.
"""

from functools import partial

import jax
import jax.numpy as jnp

LIMIT = 127  # without -128, so that the range is symmetric and needs no offset


@partial(jax.jit, static_argnums=1)
def quantize(weight: jax.Array, num_inputs: int) -> tuple[jax.Array, jax.Array]:
  """Returns the integers of a weight, and the scales of their products.

  Args:
    weight: finite; its first `num_inputs` dimensions are inputs, the others outputs.

  Returns:
    int8[weight.shape]; f32[weight.shape[num_inputs:]], above 0; 1 for an output whose weights are all 0.
  """
  exact = weight.astype(jnp.float32)
  greatest = jnp.max(jnp.abs(exact), axis=tuple(range(num_inputs)), keepdims=True)
  scale = jnp.where(greatest > 0, greatest / LIMIT, jnp.ones_like(greatest))
  values = jnp.clip(jnp.round(exact / scale), -LIMIT, LIMIT).astype(jnp.int8)
  return values, scale.reshape(weight.shape[num_inputs:])
