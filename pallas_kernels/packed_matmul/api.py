"""Multiplies by weights that a loader packs once, for CPUs (cpu.cc). May not choose between kernels.

`pack_weight` changes the layout and `matmul` multiplies by the packed weight. XLA's own matmul on unpacked weights is
the reference; it serves other platforms, several devices, and machines without a C++ compiler.
"""

import contextlib
import ctypes
import math
import mmap

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native

COLUMNS = 32  # kColumns
_HUGE_PAGE = 2**21


def check_supported(dtype: jnp.dtype) -> None:
  """Raises NotImplementedError, with the reason, unless the kernel multiplies weights of `dtype`."""
  if jnp.dtype(dtype) not in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
    raise NotImplementedError(f"packed matmul: dtype {dtype} is neither float32 nor bfloat16")
  native.load_library("packed_matmul")


def packed_shape(inputs: int, outputs: int) -> tuple[int, int, int]:
  """Returns the packed shape [ceil(N / 32), D, 32] of a matrix [D, N]."""
  return (-(-outputs // COLUMNS), inputs, COLUMNS)


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns zeros on huge pages if the system has them; a step of one row then reads weights a fifth faster.

  The memory is aligned, so jax.device_put adopts it without a copy to ordinary pages.
  """
  count = math.prod(shape)
  whole_pages = count * dtype.itemsize // _HUGE_PAGE * _HUGE_PAGE
  if not whole_pages or not hasattr(mmap, "MADV_HUGEPAGE"):
    return np.zeros(shape, dtype)
  memory = mmap.mmap(-1, count * dtype.itemsize + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  begin = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE
  with contextlib.suppress(OSError):  # an operating system without huge pages
    memory.madvise(mmap.MADV_HUGEPAGE, begin, whole_pages)  # not the last page, which may be almost empty
  return np.frombuffer(memory, dtype, count, begin).reshape(shape)


def copy_array(array: np.ndarray) -> np.ndarray:
  """Returns a copy that owns its memory, which jax.device_put adopts without another copy."""
  out = _zeros(array.shape, array.dtype)
  out[...] = array
  return out


def pack_weight(weight: np.ndarray) -> np.ndarray:
  """Packs [D, ...] into [ceil(N / 32), D, 32], where N is the product of the other axes. Pads the last columns.

  A transposed view, such as a checkpoint's matrix, costs no more than a contiguous array.

  Raises:
    NativeMissing: the library is not built.
  """
  inputs, outputs = weight.shape[0], math.prod(weight.shape[1:])
  matrix = weight.reshape(inputs, outputs)
  packed = _zeros(packed_shape(inputs, outputs), weight.dtype)
  size = weight.dtype.itemsize
  down, across = (stride // size for stride in matrix.strides)
  packs = native.load_library("packed_matmul").SluicePack
  packs.restype = ctypes.c_bool
  numbers = map(ctypes.c_int64, (size, inputs, outputs, down, across))
  if not packs(ctypes.c_void_p(matrix.ctypes.data), *numbers, ctypes.c_void_p(packed.ctypes.data)):
    raise ValueError(f"packed matmul: {weight.dtype} has {size} bytes an element; supported are 1, 2 and 4")
  return packed


def matmul(
  x: jax.Array,
  packed: jax.Array,
  outputs: int,
  *,
  dtype: jnp.dtype | None = None,
  scales: jax.Array | None = None,
  norm: tuple[jax.Array, float] | None = None,
  num_rows: jax.Array | None = None,
  gated: bool = False,
  residual: jax.Array | None = None,
  ordered: bool = False,
) -> jax.Array:
  """Returns x [..., D] times the packed matrix [D, N], as [..., N], with sums in f32.

  Args:
    x: float32 or bfloat16.
    packed: result of `pack_weight`, of x's dtype or int8.
    outputs: N.
    dtype: of the result: x's dtype or float32.
    scales: f32[N], the factors of the sums for an int8 matrix.
    norm: scale [D] of x's dtype and epsilon of a root-mean-square norm (arXiv:1910.07467), applied to x first.
    num_rows: int32[1], the number of rows in use, which come first. The kernel skips the other rows and returns zeros
      for them. None: all rows.
    gated: x is [..., 2 D], the gates and then the values of SwiGLU (arXiv:2002.05202); the kernel multiplies
      silu(gates) * values. Excludes `norm`.
    residual: [..., N] of the result's dtype, added to the product.
    ordered: a row's bits do not depend on other rows. On a processor with AMX this is slower for several rows, because
      AMX tiles sum in another order (arXiv:1904.06376).

  Raises:
    NativeMissing: the library is not built.
    ValueError: the shapes do not match.
  """
  inputs, dtype = x.shape[-1] // (2 if gated else 1), dtype or x.dtype
  if x.shape[-1] != inputs * (2 if gated else 1) or (gated and norm is not None):
    raise ValueError(f"packed matmul: gated x {x.shape} needs an even last axis, and no norm")
  if residual is not None and (residual.shape != (*x.shape[:-1], outputs) or residual.dtype != dtype):
    raise ValueError(f"packed matmul: residual {residual.dtype}{list(residual.shape)} is not like the result")
  if packed.shape != packed_shape(inputs, outputs):
    raise ValueError(f"packed matmul: x {x.shape} and packed {packed.shape} do not give {outputs} outputs")
  scale, epsilon = (jnp.zeros(0, x.dtype), 0.0) if norm is None else norm
  if norm is not None and scale.shape != (inputs,):
    raise ValueError(f"packed matmul: the norm's scale {scale.shape} does not match x {x.shape}")
  if (packed.dtype == jnp.int8) != (scales is not None) or (scales is not None and scales.shape != (outputs,)):
    raise ValueError(f"packed matmul: {packed.dtype} with scales {scales if scales is None else scales.shape}")
  num_rows = native.pack_row_count("packed matmul", num_rows)
  rows = math.prod(x.shape[:-1])
  call = native.bind_call("packed_matmul", jax.ShapeDtypeStruct((rows, outputs), dtype))
  residual = jnp.zeros((0, 0), dtype) if residual is None else residual.reshape(rows, outputs)
  scales = jnp.zeros(0, jnp.float32) if scales is None else scales
  x2 = x.reshape(rows, x.shape[-1])
  y = call(x2, packed, scales, scale, num_rows, residual, epsilon=np.float32(epsilon), gated=gated, ordered=ordered)
  return y.reshape(*x.shape[:-1], outputs)
