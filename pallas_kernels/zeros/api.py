"""Makes an array of zeros, such as a KV pool that is larger than what the first requests need. May not know pools.

`reference` is plain jnp and runs anywhere. It writes the whole array, so the system has to provide all of its memory.
The CPU kernel (cpu.cc) returns memory that the system provides, cleared, page by page at the first access.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import native


def make_zeros(shape: tuple[int, ...], dtype: DTypeLike, implementation: str = "reference") -> jax.Array:
  """Returns zeros, on one device.

  Args:
    shape, dtype: of the array.
    implementation: a name of native.IMPLEMENTATIONS.

  Raises:
    NativeMissing: the implementation is "cpu" and its library is not built.
    ValueError: the implementation is unknown.
  """
  if implementation not in native.IMPLEMENTATIONS:
    raise ValueError(f"zeros: implementation {implementation!r} is not one of {', '.join(native.IMPLEMENTATIONS)}")
  if implementation == "reference":
    return jnp.zeros(shape, dtype)
  return native.bind_call("zeros", jax.ShapeDtypeStruct(shape, dtype))()
