"""Weights as 8-bit whole numbers with a scale an output. Pure; may not decide which weights, nor how they are used.

Symmetric, by the greatest magnitude of each output's weights; activations are not touched ("weight-only"). So a
product's error is that of its weights, of which each is off by half a step at most: 1/254 of the output's greatest.
"""

from functools import partial

import jax
import jax.numpy as jnp

LIMIT = 127  # -128 is left out: what is symmetric needs no offset


@partial(jax.jit, static_argnums=1)
def quantize(weight: jax.Array, num_inputs: int) -> tuple[jax.Array, jax.Array]:
  """Whole numbers of the weight's shape, and what to multiply a product by them with.

  Args:
    weight: its first `num_inputs` dimensions meet the input, the others are the output; finite.

  Returns:
    int8[weight.shape]; f32[weight.shape[num_inputs:]], above 0, and 1 where all weights of an output are 0.
  """
  exact = weight.astype(jnp.float32)
  greatest = jnp.max(jnp.abs(exact), axis=tuple(range(num_inputs)), keepdims=True)
  scale = jnp.where(greatest > 0, greatest / LIMIT, jnp.ones_like(greatest))
  values = jnp.clip(jnp.round(exact / scale), -LIMIT, LIMIT).astype(jnp.int8)
  return values, scale.reshape(weight.shape[num_inputs:])
