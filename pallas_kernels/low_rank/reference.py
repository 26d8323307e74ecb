"""The low-rank product in plain jnp, for every platform. May not know adapters' names.

Each token multiplies by the matrices of all slots, and a mask keeps those of its own. So the cost grows with the slots,
but the shapes do not depend on the batch, and the products are large matmuls, which suit GPUs and TPUs.
"""

import jax
import jax.numpy as jnp


def reference(
  y: jax.Array, x: jax.Array, slots: jax.Array, a: jax.Array, b: jax.Array, runs: tuple[int, ...], repeats: int
) -> jax.Array:
  """See pallas_kernels.low_rank.api.add_low_rank. Needs zeros in slot 0."""
  num_slots, rank, outputs = b.shape
  parts, tokens = len(runs), x.shape[0]
  h = jnp.einsum("td,sdp->tsp", x, a, preferred_element_type=jnp.float32)
  own = slots[:, None] == jnp.arange(num_slots, dtype=slots.dtype)[None, :]
  h = jnp.where(own[:, :, None], h, jnp.float32(0)).astype(x.dtype).reshape(tokens, num_slots, parts, rank)
  columns = b.reshape(num_slots, rank, repeats, outputs // repeats)
  added, start = [], 0
  for part, length in enumerate(runs):
    of_part = columns[..., start : start + length]
    added.append(jnp.einsum("tsr,srkn->tkn", h[:, :, part], of_part, preferred_element_type=jnp.float32))
    start += length
  delta = jnp.concatenate(added, axis=-1).reshape(tokens, outputs)
  return (y.astype(jnp.float32) + delta).astype(y.dtype)
