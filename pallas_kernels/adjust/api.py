"""Applies constraint masks, biases, stop-token suppression and penalties to logits. May not sample.

`reference` is plain jnp and runs anywhere. The CPU kernel (cpu.cc) makes one pass over rows in use, on XLA's threads,
and returns the same bits.
"""

import jax

from pallas_kernels import native
from pallas_kernels.adjust import reference
from pallas_kernels.adjust.reference import PROMPT_BIT as PROMPT_BIT
from pallas_kernels.adjust.reference import AdjustParams as AdjustParams
from pallas_kernels.adjust.reference import Kind as Kind
from pallas_kernels.adjust.reference import Memory as Memory


def adjust_logits(
  x: jax.Array,
  params: AdjustParams,
  stop_ids: jax.Array,
  drafts: jax.Array,
  memory: Memory,
  num_rows: jax.Array | None = None,
  implementation: str = "reference",
) -> jax.Array:
  """Returns x, f32[S, V], with each row's adjustments applied in the order of Kind.

  Args:
    x: f32[S, V], finite.
    params: one entry a row.
    stop_ids: int32[S, n], the tokens that SUPPRESS forbids while another token is allowed; -1 is padding.
    drafts: int32[S, d], tokens that count once more each as the row's outputs, besides its history; -1, or V and more,
      is padding. PENALTY reads them.
    memory: data that rows look up.
    num_rows: int32[1], the number of rows in use, which come first. The result's other rows are arbitrary. None: all.
    implementation: a name of native.IMPLEMENTATIONS.

  Raises:
    NativeMissing: the implementation is "cpu" and its library is not built.
    ValueError: an argument has another dtype or shape.
  """
  native.check_rows("adjust", x, implementation)
  (rows, vocab), slots = x.shape, memory.history.shape[0]
  for name, array, shape in (
    *((name, column, (rows,)) for name, column in params._asdict().items()),
    ("stop_ids", stop_ids, (rows, stop_ids.shape[-1])),
    ("drafts", drafts, (rows, drafts.shape[-1])),
    ("history", memory.history, (slots, vocab)),
    ("bias", memory.bias, (slots, vocab)),
    ("mask", memory.mask, (memory.mask.shape[0], -(-vocab // 32))),
  ):
    if array.shape != shape:
      raise ValueError(
        f"adjust: {name} is {array.dtype}{list(array.shape)}; for x {list(x.shape)} it must be {list(shape)}"
      )
  num_rows = native.pack_row_count("adjust", num_rows)
  if implementation == "reference":
    return reference.adjust_logits(x, params, stop_ids, drafts, memory)
  call = native.bind_call("adjust", jax.ShapeDtypeStruct(x.shape, x.dtype))
  return call(x, native.pack_bits(params), stop_ids, drafts, *memory, num_rows)
