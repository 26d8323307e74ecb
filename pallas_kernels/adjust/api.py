"""Logits as requests want them before a draw: the mask of a constraint, a bias, endings held back, and penalties.

`reference` is plain jnp and runs anywhere; a CPU's own (cpu.cc) does all of it in one pass over lines in use alone, on
XLA's threads, to the same bits.
"""

import functools

import jax

from pallas_kernels import native
from pallas_kernels.adjust import reference
from pallas_kernels.adjust.reference import PROMPT_BIT as PROMPT_BIT
from pallas_kernels.adjust.reference import AdjustParams as AdjustParams
from pallas_kernels.adjust.reference import Kind as Kind
from pallas_kernels.adjust.reference import Memory as Memory

choose = functools.partial(native.choose, "adjust")  # an implementation, for a platform and a number of devices


def adjust(
  x: jax.Array,
  asked: AdjustParams,
  stop_ids: jax.Array,
  memory: Memory,
  num_rows: jax.Array | None = None,
  implementation: str = "reference",
) -> jax.Array:
  """f32[S, V]: each line of x after what it asks for, in the order of Kind.

  Args:
    x: f32[S, V], finite.
    asked: by line.
    stop_ids: int32[S, n], for SUPPRESS: what is forbidden, unless nothing else is allowed; -1 where there is none.
    memory: what lines look up by their slot.
    num_rows: int32[1], how many lines are in use, those in front; None: all. What comes out for the others means
      nothing.
    implementation: of native.IMPLEMENTATIONS.

  Raises:
    NativeMissing: "cpu", and its library is not built.
    ValueError: an argument is of another type or shape.
  """
  native.check_lines("adjust", x, implementation)
  (rows, vocab), slots = x.shape, memory.history.shape[0]
  for name, array, shape in (
    *((name, line, (rows,)) for name, line in asked._asdict().items()),
    ("stop_ids", stop_ids, (rows, stop_ids.shape[-1])),
    ("history", memory.history, (slots, vocab)),
    ("bias", memory.bias, (slots, vocab)),
    ("mask", memory.mask, (slots, -(-vocab // 32))),
  ):
    if array.shape != shape:
      raise ValueError(
        f"adjust: {name} is {array.dtype}{list(array.shape)}; beside x {list(x.shape)} it is {list(shape)}"
      )
  num_rows = native.count("adjust", num_rows)
  if implementation == "reference":
    return reference.adjust(x, asked, stop_ids, memory)
  call = native.call("adjust", jax.ShapeDtypeStruct(x.shape, x.dtype))
  return call(x, native.bits(asked), stop_ids, *memory, num_rows)
