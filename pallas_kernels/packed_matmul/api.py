"""Matmuls over weights that are packed once, at load, for CPUs (cpu.cc). May not choose: whoever loads a model does.

`pack` changes the layout, `matmul` multiplies by it. XLA's own matmul, for weights as they lie, is the reference, and
what serves on other platforms, on several devices, and where there is no compiler.
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
  """Raises NotImplementedError, with the reason, where weights of `dtype` cannot be multiplied packed."""
  if jnp.dtype(dtype) not in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
    raise NotImplementedError(f"packed matmul: dtype {dtype} is neither float32 nor bfloat16")
  native.load("packed_matmul")


def packed_shape(inputs: int, outputs: int) -> tuple[int, int, int]:
  """[ceil(N / 32), D, 32] of a matrix [D, N]."""
  return (-(-outputs // COLUMNS), inputs, COLUMNS)


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """On huge pages where the system gives them: a step of one row then reads a fifth faster.

  Aligned, so that jax.device_put takes the memory as it is, with no copy to pages of another kind.
  """
  count = math.prod(shape)
  whole_pages = count * dtype.itemsize // _HUGE_PAGE * _HUGE_PAGE
  if not whole_pages or not hasattr(mmap, "MADV_HUGEPAGE"):
    return np.zeros(shape, dtype)
  memory = mmap.mmap(-1, count * dtype.itemsize + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  begin = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE
  with contextlib.suppress(OSError):  # a kernel without them
    memory.madvise(mmap.MADV_HUGEPAGE, begin, whole_pages)  # not the last, which may be next to empty
  return np.frombuffer(memory, dtype, count, begin).reshape(shape)


def copied(array: np.ndarray) -> np.ndarray:
  """The same in memory of its own, that jax.device_put takes as it is."""
  out = _zeros(array.shape, array.dtype)
  out[...] = array
  return out


def pack(weight: np.ndarray) -> np.ndarray:
  """[D, ...] -> [ceil(N / 32), D, 32], where N is the product of what follows D; the last columns may be padding.

  A view of another order, as of a checkpoint's transposed matrix, costs no more than one in order.

  Raises:
    NativeMissing: the library is not built.
  """
  inputs, outputs = weight.shape[0], math.prod(weight.shape[1:])
  matrix = weight.reshape(inputs, outputs)
  packed = _zeros(packed_shape(inputs, outputs), weight.dtype)
  size = weight.dtype.itemsize
  down, across = (stride // size for stride in matrix.strides)
  packs = native.load("packed_matmul").SluicePack
  packs.restype = ctypes.c_bool
  numbers = map(ctypes.c_int64, (size, inputs, outputs, down, across))
  if not packs(ctypes.c_void_p(matrix.ctypes.data), *numbers, ctypes.c_void_p(packed.ctypes.data)):
    raise ValueError(f"packed matmul: {weight.dtype} is of {size} bytes, not 1, 2 or 4")
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
  """x [..., D] times the matrix [D, N] that `packed` was made of: [..., N], summed in f32.

  Args:
    x: float32 or bfloat16.
    packed: of `pack`; of x's dtype, or int8.
    outputs: N.
    dtype: of the result: x's, or float32.
    scales: f32[N], for int8: what the sums are multiplied with.
    norm: scale [D] of x's dtype and epsilon of a root-mean-square norm (arXiv:1910.07467) that x goes through first.
    num_rows: int32[1], of x's rows how many are in use; those behind them are neither read nor paid for, and give
      zeros. None: all.
    gated: x is [..., 2 D] instead, gates and then values of SwiGLU (arXiv:2002.05202): silu(gates) * values is what
      is multiplied. Without a norm.
    residual: [..., N] of the result's dtype, added to the product.
    ordered: a row's bits are the same whatever other rows there are; for several rows slower on a processor with AMX,
      whose tiles add up in an order of their own (arXiv:1904.06376).

  Raises:
    NativeMissing: the library is not built.
    ValueError: the shapes do not fit.
  """
  inputs, dtype = x.shape[-1] // (2 if gated else 1), dtype or x.dtype
  if x.shape[-1] != inputs * (2 if gated else 1) or (gated and norm is not None):
    raise ValueError(f"packed matmul: gated x {x.shape} must be even, and has no norm before it")
  if residual is not None and (residual.shape != (*x.shape[:-1], outputs) or residual.dtype != dtype):
    raise ValueError(f"packed matmul: residual {residual.dtype}{list(residual.shape)} is not like the result")
  if packed.shape != packed_shape(inputs, outputs):
    raise ValueError(f"packed matmul: x {x.shape} and {packed.shape} do not make {outputs} outputs")
  scale, epsilon = (jnp.zeros(0, x.dtype), 0.0) if norm is None else norm
  if norm is not None and scale.shape != (inputs,):
    raise ValueError(f"packed matmul: the norm's scale {scale.shape} does not fit x {x.shape}")
  if (packed.dtype == jnp.int8) != (scales is not None) or (scales is not None and scales.shape != (outputs,)):
    raise ValueError(f"packed matmul: {packed.dtype} with scales {scales if scales is None else scales.shape}")
  num_rows = native.count("packed matmul", num_rows)
  rows = math.prod(x.shape[:-1])
  call = native.call("packed_matmul", jax.ShapeDtypeStruct((rows, outputs), dtype))
  residual = jnp.zeros((0, 0), dtype) if residual is None else residual.reshape(rows, outputs)
  scales = jnp.zeros(0, jnp.float32) if scales is None else scales
  x2 = x.reshape(rows, x.shape[-1])
  y = call(x2, packed, scales, scale, num_rows, residual, epsilon=np.float32(epsilon), gated=gated, ordered=ordered)
  return y.reshape(*x.shape[:-1], outputs)
