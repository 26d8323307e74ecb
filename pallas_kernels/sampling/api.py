"""Samples a token for each row of logits by temperature, min_p, top_k and top_p. May not change the logits.

Seed and position decide the random number. `reference` is plain jnp and runs anywhere. The CPU kernel (cpu.cc) reads
only rows in use, on XLA's threads. The two round sums and exponentials differently, so a sample that lies within
rounding of a threshold may differ.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.sampling import reference
from pallas_kernels.sampling.reference import NO_LIMIT as NO_LIMIT
from pallas_kernels.sampling.reference import SamplingInputs as SamplingInputs


def sample_tokens(
  x: jax.Array,
  inputs: SamplingInputs,
  num_rows: jax.Array | None = None,
  implementation: str = "reference",
  wide: bool = False,
) -> jax.Array:
  """Returns int32[S]: the token at which each row's cumulative weight passes a random number.

  engine/device/sampler.py gives the order of temperature, min_p, top_k and top_p. Tokens of equal weight at a threshold
  all stay. A row's token has a weight above 0 and depends only on that row and its inputs.

  Args:
    x: f32[S, V], finite, or -inf where a token is not allowed. For any other values the token is still in range.
    inputs: one entry a row.
    num_rows: int32[1], the number of rows in use, which come first. Tokens of the other rows are arbitrary but in
      range. None: all rows.
    implementation: a name of native.IMPLEMENTATIONS.
    wide: see `reference.sample_tokens`.

  Raises:
    NativeMissing: the implementation is "cpu" and its library is not built.
    ValueError: an argument has another dtype or shape.
  """
  native.check_rows("sampling", x, implementation)
  for name, column in inputs._asdict().items():
    if column.shape != x.shape[:1]:
      raise ValueError(f"sampling: {name} is {column.dtype}{list(column.shape)}; it needs the {x.shape[0]} rows of x")
  num_rows = native.pack_row_count("sampling", num_rows)
  if implementation == "reference":
    return reference.sample_tokens(x, inputs, wide)
  call = native.bind_call("sampling", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
  return call(x, native.pack_bits(inputs), num_rows)
