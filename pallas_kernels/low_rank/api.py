"""Adds products with low-rank matrices that each token chooses (LoRA, arXiv:2106.09685). May not know adapters' names.

`reference` (reference.py) is plain jnp and runs anywhere. The CPU kernel (cpu.cc) skips tokens of slot 0 and reads the
matrices of the slots in use alone.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.low_rank.reference import reference

RANK_MULTIPLE = 16  # kRankMultiple
_DTYPES = {"reference": ("float32", "bfloat16", "float16"), "cpu": ("float32", "bfloat16")}  # by implementation


def choose_low_rank(platform: str, dtype: jnp.dtype) -> str:
  """Returns the implementation for a platform and a dtype of activations, a name of native.IMPLEMENTATIONS."""
  chosen = native.choose_implementation("low_rank", platform)
  return chosen if jnp.dtype(dtype).name in _DTYPES[chosen] else "reference"


def add_low_rank(
  y: jax.Array,
  x: jax.Array,
  slots: jax.Array,
  a: jax.Array,
  b: jax.Array,
  runs: tuple[int, ...],
  repeats: int = 1,
  implementation: str = "reference",
  norm: tuple[jax.Array, float] | None = None,
  gated: bool = False,
) -> jax.Array:
  """Returns y plus x times the matrices of each token's slot: y[t, n] + sum over r of b[s, r, n] h[t, part of n, r].

  Here s = slots[t] and h[t, p, r] = sum over d of a[s, d, p * R + r] x[t, d]. A matrix of several parts is several
  low-rank matrices of the same input whose outputs lie in turns.

  Args:
    y: [T, N], float32 or bfloat16; float16 with "reference" alone.
    x: [T, D] of y's dtype.
    slots: int32[T], below S; slot 0 adds nothing.
    a: [S, D, parts * R] of x's dtype. Zeros in slot 0.
    b: [S, R, N] of x's dtype. Zeros in slot 0. The CPU kernel needs a multiple of RANK_MULTIPLE for R.
    runs: for each part, the length of its run of outputs.
    repeats: how often the runs follow each other in N.
    implementation: a name of native.IMPLEMENTATIONS.
    norm: for "cpu", scale [D] of x's dtype and epsilon of a root-mean-square norm, applied to x first.
    gated: for "cpu", x is [T, 2 D], the gates and then the values of SwiGLU, which the kernel applies first. Excludes
      `norm`.

  Raises:
    NativeMissing: the implementation is "cpu" and its library is not built.
    ValueError: an argument has another dtype or shape.
  """
  (tokens, inputs), (num_slots, rank, outputs) = x.shape, b.shape
  if (norm is not None or gated) and (implementation != "cpu" or (norm is not None and gated) or inputs % (1 + gated)):
    raise ValueError(f"low rank: {implementation} takes no norm or gates, or not both, for x {x.shape}")
  inputs //= 1 + gated
  scale, epsilon = (jnp.zeros(0, x.dtype), 0.0) if norm is None else norm
  shapes = (y.shape, slots.shape, a.shape)
  if shapes != ((tokens, outputs), (tokens,), (num_slots, inputs, len(runs) * rank)) or sum(runs) * repeats != outputs:
    raise ValueError(f"low rank: y, slots, a of shapes {shapes} do not match x {x.shape}, b {b.shape} and runs {runs}")
  if implementation not in native.IMPLEMENTATIONS:
    raise ValueError(f"low rank: implementation {implementation!r} is not one of {', '.join(native.IMPLEMENTATIONS)}")
  if not y.dtype == x.dtype == a.dtype == b.dtype or x.dtype.name not in _DTYPES[implementation]:
    raise ValueError(
      f"low rank: {y.dtype}, {x.dtype}, {a.dtype} and {b.dtype} must all be one of {', '.join(_DTYPES[implementation])}"
    )
  if implementation == "reference":
    return reference(y, x, slots, a, b, runs, repeats)
  if rank % RANK_MULTIPLE:
    raise ValueError(f"low rank: the CPU kernel has rank {rank}, and needs a multiple of {RANK_MULTIPLE}")
  call = native.bind_call("low_rank", jax.ShapeDtypeStruct(y.shape, y.dtype), input_output_aliases={0: 0})
  attributes = {"runs": np.array(runs, np.int64), "repeats": np.int64(repeats), "epsilon": np.float32(epsilon)}
  return call(y, x, slots, a, b, scale, gated=gated, **attributes)
