"""A token of each line of logits, by temperature, min_p, top_k, top_p and a number that seed and position decide.

`reference` is plain jnp and runs anywhere; a CPU's own (cpu.cc) goes over lines in use alone, on XLA's threads. The two
round sums and exponentials differently: a draw that falls within that of a limit may be its neighbour.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.draw import reference
from pallas_kernels.draw.reference import NO_LIMIT as NO_LIMIT
from pallas_kernels.draw.reference import DrawParams as DrawParams

choose = functools.partial(native.choose, "draw")  # an implementation, for a platform and a number of devices


def draw(
  x: jax.Array,
  asked: DrawParams,
  num_rows: jax.Array | None = None,
  implementation: str = "reference",
  wide: bool = False,
) -> jax.Array:
  """int32[S]: the token at which each line's cumulative weight passes a random number, never one of weight 0.

  Temperature, min_p, top_k and top_p, in the order that engine/device/sampler.py gives. Tokens of equal weight at a
  limit are all kept. A line's token depends on that line and on what is asked for it alone.

  Args:
    x: f32[S, V], finite, or -inf where a token is not allowed; what else a line holds, its token is in range.
    asked: by line.
    num_rows: int32[1], how many lines are in use, those in front; of the others nothing is said but that the token is
      in range. None: all.
    implementation: of native.IMPLEMENTATIONS.
    wide: see `reference.draw`.

  Raises:
    NativeMissing: "cpu", and its library is not built.
    ValueError: an argument is of another type or shape.
  """
  native.check_lines("draw", x, implementation)
  for name, line in asked._asdict().items():
    if line.shape != x.shape[:1]:
      raise ValueError(f"draw: {name} is {line.dtype}{list(line.shape)}; it must have the {x.shape[0]} lines of x")
  num_rows = native.count("draw", num_rows)
  if implementation == "reference":
    return reference.draw(x, asked, wide)
  return native.call("draw", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))(x, native.bits(asked), num_rows)
