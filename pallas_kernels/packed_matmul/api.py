"""Multiplies by weights that a loader packs once, for CPUs (cpu.cc). May not choose between kernels.

`pack_weight` changes the layout and `matmul` multiplies by the packed weight. XLA's own matmul on unpacked weights is
the reference; it serves other platforms, several devices, and machines without a C++ compiler.

`pack_groups` changes the layout of weights of 4, 6 or 8 bits with scales by group of inputs, and `grouped_matmul`
multiplies by them. It also quantizes x, to 8 bits by row and chunk of inputs; `reference_grouped_matmul` is the same
arithmetic in numpy.
"""

import ctypes
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import huge_pages, native

COLUMNS = 32  # kColumns
_STEPS = {4: 8, 6: 16, 8: 4}  # bits -> inputs of a column that lie together, in 4 bytes, or 12 at 6 bits
_LARGEST_CHUNK = 128  # kLargestChunk
_SHARED_FROM = 2**16  # bytes of an array that lies on huge pages, beside others
SUPER = 256  # kSuper: inputs of a superblock


def check_supported(dtype: jnp.dtype) -> None:
  """Raises NotImplementedError, with the reason, unless the kernel multiplies weights of `dtype`."""
  if jnp.dtype(dtype) not in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
    raise NotImplementedError(f"packed matmul: dtype {dtype} is neither float32 nor bfloat16")
  native.load_library("packed_matmul")


def find_tile_types() -> tuple[str, ...]:
  """Returns the types, "bfloat16" and "int8", of the AMX tiles that the kernel may use here.

  The library looks once, at the first call or product. SLUICE_AMX=off in the environment leaves it none.

  Raises:
    NativeMissing: the library is not built.
  """
  bits = native.load_library("packed_matmul").SluiceTileTypes()
  return tuple(name for bit, name in ((1, "bfloat16"), (2, "int8")) if bits & bit)


def packed_shape(inputs: int, outputs: int) -> tuple[int, int, int]:
  """Returns the packed shape [ceil(N / 32), D, 32] of a matrix [D, N]."""
  return (-(-outputs // COLUMNS), inputs, COLUMNS)


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns zeros on huge pages if the system has them; a step of one row then reads weights a fifth faster.

  The memory is aligned, so jax.device_put adopts it without a copy to ordinary pages.
  """
  count = math.prod(shape)
  if count * dtype.itemsize < _SHARED_FROM:
    return np.zeros(shape, dtype)
  memory, begin = huge_pages.take_zeros(count * dtype.itemsize)
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
    packed: result of `pack_weight`, of x's dtype, bfloat16 or int8. Beside float32 rows, bfloat16 is widened exactly:
      the result has the bits of the same weight in float32.
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
  if packed.shape != packed_shape(_count_inputs(x, gated, norm), outputs):
    raise ValueError(f"packed matmul: x {x.shape} and packed {packed.shape} do not give {outputs} outputs")
  if (packed.dtype == jnp.int8) != (scales is not None) or (scales is not None and scales.shape != (outputs,)):
    raise ValueError(f"packed matmul: {packed.dtype} with scales {scales if scales is None else scales.shape}")
  return _multiply(x, packed, outputs, dtype, norm, num_rows, gated, residual, scales=scales, ordered=ordered)


def _count_inputs(x: jax.Array, gated: bool, norm: tuple[jax.Array, float] | None) -> int:
  inputs = x.shape[-1] // (2 if gated else 1)
  if x.shape[-1] != inputs * (2 if gated else 1) or (gated and norm is not None):
    raise ValueError(f"packed matmul: gated x {x.shape} needs an even last axis, and no norm")
  return inputs


def _multiply(
  x: jax.Array,
  packed: jax.Array,
  outputs: int,
  dtype: jnp.dtype | None,
  norm: tuple[jax.Array, float] | None,
  num_rows: jax.Array | None,
  gated: bool,
  residual: jax.Array | None,
  *,
  scales: jax.Array | None = None,
  ordered: bool = True,
  layout: "GroupLayout | None" = None,
) -> jax.Array:
  """Checks what both kinds of weights have in common and calls the kernel."""
  inputs, dtype = _count_inputs(x, gated, norm), dtype or x.dtype
  if residual is not None and (residual.shape != (*x.shape[:-1], outputs) or residual.dtype != dtype):
    raise ValueError(f"packed matmul: residual {residual.dtype}{list(residual.shape)} is not like the result")
  scale, epsilon = (jnp.zeros(0, x.dtype), 0.0) if norm is None else norm
  if norm is not None and scale.shape != (inputs,):
    raise ValueError(f"packed matmul: the norm's scale {scale.shape} does not match x {x.shape}")
  num_rows = native.pack_row_count("packed matmul", num_rows)
  rows = math.prod(x.shape[:-1])
  call = native.bind_call("packed_matmul", jax.ShapeDtypeStruct((rows, outputs), dtype))
  residual = jnp.zeros((0, 0), dtype) if residual is None else residual.reshape(rows, outputs)
  scales = jnp.zeros(0, jnp.float32) if scales is None else scales
  y = call(
    x.reshape(rows, x.shape[-1]),
    packed,
    scales,
    scale,
    num_rows,
    residual,
    epsilon=np.float32(epsilon),
    gated=gated,
    ordered=ordered,
    bits=np.int32(layout.bits if layout else 0),
    num_groups=np.int64(layout.groups if layout else 0),
    halves=layout is not None and layout.scale_dtype == "float16",
    has_offsets=layout is not None and layout.has_offsets,
    superblocks=layout is not None and layout.superblocks,
  )
  return y.reshape(*x.shape[:-1], outputs)


# --- Weights of 4, 6 and 8 bits by group ------------------------------------------------------------------------------


# Scale dtype, offsets, group and bits of what superblocks are for.
_SUPERBLOCKS = (("float16", True, 32, 4), ("float16", True, 32, 6), ("float16", False, 16, 6))


@dataclasses.dataclass(frozen=True)
class GroupLayout:
  """How a weight [D, N] of 4, 6 or 8 bits lies: for each block of 32 columns one stream of bytes, group after group.

  A group's bytes are its codes [group / 4, 32, 4], its scales [32] and its offsets [32], if any. At 4 bits the codes
  are [group / 8, 32, 4], and a byte holds the code of input d in its lower half and of d + 4 in its upper half.
  At 6 bits they are [group / 16, 3, 32, 4]: the low four bits of 8 inputs in that way, those of the next 8, and the
  high two of all 16. A byte of the last has those of inputs d, d + 4, d + 8 and d + 12, the first in the lowest bits.

  Attributes:
    inputs: D.
    bits: 4, 6 or 8.
    groups: of adjacent inputs; each has a multiple of 4 inputs (at 4 bits of 8, at 6 of 16), unless there is a single
      group.
    scale_dtype: of scales and offsets, "float16" or "float32".
    has_offsets: whether there are offsets.
    superblocks: scales and offsets, float16, are products of fewer bits, as in GGUF's K types. Each block of 256 inputs
      begins with float16[32], another float16[32] for offsets, and the file's bytes of factors [3 or 4, 32, 4]. With
      offsets, groups have 32 inputs and codes 4 or 6 bits; without, 16 and 6.

  Raises:
    ValueError: a value is not supported.
  """

  inputs: int
  bits: int
  groups: int = 1
  scale_dtype: str = "float32"
  has_offsets: bool = False
  superblocks: bool = False

  def __post_init__(self):
    if self.bits not in _STEPS:
      raise ValueError(f"packed matmul: codes of {self.bits} bits; supported are 4, 6 and 8")
    if self.scale_dtype not in ("float16", "float32"):
      raise ValueError(f"packed matmul: scales are {self.scale_dtype}; they must be float16 or float32")
    if self.groups < 1 or self.inputs % self.groups:
      raise ValueError(f"packed matmul: {self.groups} groups do not divide {self.inputs} inputs")
    if self.groups > 1 and self.group % _STEPS[self.bits]:
      raise ValueError(
        f"packed matmul: groups of {self.group} inputs at {self.bits} bits; groups must be multiples of "
        f"{_STEPS[self.bits]} inputs, or a single one"
      )
    kind = self.scale_dtype, self.has_offsets, self.group, self.bits
    if self.superblocks and (kind not in _SUPERBLOCKS or self.inputs % SUPER):
      raise ValueError(
        f"packed matmul: superblocks of {self.inputs} inputs with {self.scale_dtype} scales, groups of {self.group} "
        f"and codes of {self.bits} bits; supported are multiples of {SUPER} inputs and GGUF's Q4_K, Q5_K and Q6_K"
      )

  @property
  def group(self) -> int:
    """Adjacent inputs that share a scale."""
    return self.inputs // self.groups

  @property
  def chunk(self) -> int:
    """Adjacent inputs of x that the kernel quantizes with one factor.

    A chunk is a whole group of up to 128 inputs. A larger group has the smallest number of even chunks of at most 128,
    rounded up to 8 inputs (16 at 6 bits), and its last chunk may be smaller.
    """
    step = _STEPS[self.bits]
    parts, even = -(-self.steps * step // _LARGEST_CHUNK), max(8, step)
    return -(-self.steps * step // (even * parts)) * even

  def shape(self, outputs: int) -> tuple[int, int]:
    """Returns the packed shape: blocks of 32 columns, and bytes of a block."""
    values = self.num_values * np.dtype(self.scale_dtype).itemsize
    if self.superblocks:
      of_block = self.groups * self.code_bytes + self.inputs // SUPER * COLUMNS * self.super_bytes
      return (-(-outputs // COLUMNS), of_block)
    return (-(-outputs // COLUMNS), self.groups * (self.code_bytes + COLUMNS * values))

  @property
  def num_values(self) -> int:
    """Numbers of a group and output: a scale, and an offset if there are any."""
    return 2 if self.has_offsets else 1

  @property
  def super_bytes(self) -> int:
    """Bytes of the scales of an output in a superblock, as in a GGUF file."""
    return 2 * self.num_values + (12 if self.has_offsets else 16)

  @property
  def code_bytes(self) -> int:
    """Bytes of a group's codes in a block."""
    return self.steps * _STEPS[self.bits] * COLUMNS * self.bits // 8

  @property
  def steps(self) -> int:
    """The number of a group's pieces of 4, 8 or 16 inputs whose codes lie together; zeros pad the last one."""
    return -(-self.group // _STEPS[self.bits])


def pack_groups(
  codes: np.ndarray,
  scales: np.ndarray,
  offsets: np.ndarray | None,
  bits: int,
  superblocks: np.ndarray | None = None,
) -> np.ndarray:
  """Packs a weight into `GroupLayout.shape`, as uint8.

  Args:
    codes: uint8[D, N], each below 2**bits; or, of 4 bits, uint32[D / 8, N], each of eight adjacent inputs, the first in
      the lowest bits. A transposed view costs no more than a contiguous array.
    scales: float16 or float32 [G, N]; G divides D.
    offsets: like `scales`, or None.
    bits: 4, 6 or 8.
    superblocks: what `scales` and `offsets` are products of, void[D / 256, N], each GGUF's bytes of 256 inputs; the
      layout then holds these instead. Codes are bytes.

  Raises:
    NativeMissing: the library is not built.
    ValueError: a dtype or shape is not supported.
  """
  in_words = codes.dtype == np.uint32 and bits == 4
  if codes.dtype != np.uint8 and not in_words or codes.ndim != 2:
    raise ValueError(
      f"packed matmul: codes are {codes.dtype}{list(codes.shape)}; they must be uint8[D, N], or at 4 bits "
      "uint32[D / 8, N]"
    )
  inputs, outputs = codes.shape[0] * (_STEPS[4] if in_words else 1), codes.shape[1]
  for values in (scales, scales if offsets is None else offsets):
    if values.dtype != scales.dtype or values.shape != (len(scales), outputs):
      raise ValueError(
        f"packed matmul: scales or offsets are {values.dtype}{list(values.shape)}; {outputs} outputs need "
        f"{scales.dtype}[groups, {outputs}] for both"
      )
  has_superblocks = superblocks is not None
  layout = GroupLayout(inputs, bits, len(scales), scales.dtype.name, offsets is not None, has_superblocks)
  if superblocks is not None:
    wanted = np.dtype((np.void, layout.super_bytes)), (inputs // SUPER, outputs)
    if (superblocks.dtype, superblocks.shape) != wanted or in_words:
      raise ValueError(
        f"packed matmul: superblocks are {superblocks.dtype}{list(superblocks.shape)} beside codes of {codes.dtype}; "
        f"they must be {wanted[0]}{list(wanted[1])} beside uint8"
      )
    superblocks = np.ascontiguousarray(superblocks)
  packed = _zeros(layout.shape(outputs), np.dtype(np.uint8))
  packs = native.load_library("packed_matmul").SluicePackGroups
  packs.restype = None
  scales = np.ascontiguousarray(scales)
  offsets = None if offsets is None else np.ascontiguousarray(offsets)
  packs(
    ctypes.c_void_p(codes.ctypes.data),
    *map(
      ctypes.c_int64, (bits, codes.itemsize, inputs, outputs, *(stride // codes.itemsize for stride in codes.strides))
    ),
    ctypes.c_void_p(scales.ctypes.data),
    ctypes.c_void_p(None if offsets is None else offsets.ctypes.data),
    ctypes.c_void_p(None if superblocks is None else superblocks.ctypes.data),
    *map(ctypes.c_int64, (layout.groups, scales.itemsize)),
    ctypes.c_void_p(packed.ctypes.data),
  )
  return packed


def grouped_matmul(
  x: jax.Array,
  packed: jax.Array,
  outputs: int,
  layout: GroupLayout,
  *,
  dtype: jnp.dtype | None = None,
  norm: tuple[jax.Array, float] | None = None,
  num_rows: jax.Array | None = None,
  gated: bool = False,
  residual: jax.Array | None = None,
) -> jax.Array:
  """Returns x [..., D] times the weight scales * (codes - 2**(bits - 1)) + offsets, [D, N], as [..., N].

  The kernel quantizes each row of x, after the norm or the gates, to signed 8-bit integers with a factor for each chunk
  (`GroupLayout.chunk`). Sums of a chunk are exact, and sums of chunks are f32 in a fixed order: a row has the same bits
  in any batch. A row with a number that is not finite gives NaN; a chunk whose numbers are all below 2**-100 counts as
  0.

  Args:
    x: float32 or bfloat16.
    packed: uint8, result of `pack_groups`.
    outputs: N.
    layout: of `packed`.
    dtype, norm, num_rows, gated, residual: as in `matmul`.

  Raises:
    NativeMissing: the library is not built.
    ValueError: the shapes or dtypes do not match.
  """
  if _count_inputs(x, gated, norm) != layout.inputs:
    raise ValueError(f"packed matmul: x {x.shape} does not have the {layout.inputs} inputs of the weight")
  if packed.shape != layout.shape(outputs) or packed.dtype != jnp.uint8:
    raise ValueError(
      f"packed matmul: the weight is {packed.dtype}{list(packed.shape)}; {outputs} outputs need "
      f"uint8{list(layout.shape(outputs))}"
    )
  return _multiply(x, packed, outputs, dtype, norm, num_rows, gated, residual, layout=layout)


def look_up_columns(packed: jax.Array, layout: GroupLayout, indices: jax.Array) -> jax.Array:
  """Returns columns of the weight that `grouped_matmul` multiplies by: int32[...] -> f32[..., D]."""
  size, groups, steps = np.dtype(layout.scale_dtype).itemsize, layout.groups, layout.steps
  blocks, columns = (indices // COLUMNS).reshape(-1, 1, 1), (indices % COLUMNS).reshape(-1, 1, 1)
  parts = layout.inputs // SUPER if layout.superblocks else groups  # what a block of columns repeats
  first_bytes = layout.super_bytes * COLUMNS if layout.superblocks else 0  # before the codes of a part

  def gather(
    num_bytes: int, start: int, count: int
  ) -> jax.Array:  # from byte `start` of a part: [n, parts, count, bytes]
    split = packed.reshape(packed.shape[0], parts, -1, num_bytes)
    elements = start // num_bytes + COLUMNS * jnp.arange(count).reshape(1, 1, -1) + columns
    return split[blocks, jnp.arange(parts).reshape(1, -1, 1), elements]

  codes = gather(4, first_bytes, groups // parts * layout.code_bytes // (4 * COLUMNS))
  codes = codes.reshape(-1, groups, layout.code_bytes // (4 * COLUMNS), 4)
  if layout.bits == 4:
    codes = jnp.stack([codes & 15, codes >> 4], axis=-2)
  elif layout.bits == 6:
    first, second, high = jnp.unstack(codes.reshape(*codes.shape[:2], steps, 3, 4), axis=3)
    low = jnp.stack([first & 15, first >> 4, second & 15, second >> 4], axis=-2)
    codes = low | jnp.stack([high << 4 & 48, high << 2 & 48, high & 48, high >> 2 & 48], axis=-2)
  weight = codes.reshape(*blocks.shape[:1], groups, -1)[..., : layout.group].astype(jnp.float32)
  weight -= 1 << (layout.bits - 1)
  start = 0 if layout.superblocks else layout.code_bytes
  values = gather(size, start, layout.num_values)
  values = jax.lax.bitcast_convert_type(values, jnp.dtype(layout.scale_dtype)).astype(jnp.float32)
  if layout.superblocks:
    words = gather(4, layout.num_values * COLUMNS * size, 3 if layout.has_offsets else 4)
    values = _multiply_factors(layout, values, words)
  weight = weight * values[..., :1] + values[..., 1:] if layout.has_offsets else weight * values
  return weight.reshape(*indices.shape, layout.inputs)


def _multiply_factors(layout: GroupLayout, values: jax.Array, words: jax.Array) -> jax.Array:
  """Returns the scales, and the offsets if there are any, of superblocks of some columns.

  Args:
    values: f32[n, superblocks, 1 or 2], their numbers.
    words: uint8[n, superblocks, 3 or 4, 4], their factors as in a file.

  Returns:
    f32[n, groups, 1 or 2].
  """
  if not layout.has_offsets:
    found = values * jax.lax.bitcast_convert_type(words, jnp.int8).reshape(*words.shape[:2], -1).astype(jnp.float32)
    found = found[..., None]
  else:
    low, high, mixed = jnp.unstack(words, axis=2)  # of the first four groups, and the others' bits beyond the low four
    factors = jnp.concatenate([low & 63, mixed & 15 | low >> 2 & 48], axis=-1).astype(jnp.float32)
    minima = jnp.concatenate([high & 63, mixed >> 4 | high >> 2 & 48], axis=-1).astype(jnp.float32)
    scales = values[..., :1] * factors
    to_zero = {4: 8, 6: 16}[layout.bits]
    found = jnp.stack([scales, to_zero * scales - values[..., 1:] * minima], axis=-1)
  return found.astype(jnp.float16).astype(jnp.float32).reshape(len(words), layout.groups, -1)


def reference_grouped_matmul(
  x: np.ndarray,
  codes: np.ndarray,
  scales: np.ndarray,
  *,
  bits: int,
  offsets: np.ndarray | None = None,
  residual: np.ndarray | None = None,
) -> np.ndarray:
  """Returns what `grouped_matmul` does, with the same bits on processors that fuse multiply and add.

  Args:
    x: f32[M, D], finite, after the norm or the gates.
    codes: uint8[D, N], not packed.
    scales, offsets: float16 or float32 [G, N], not packed.
    residual: f32[M, N].

  Returns:
    f32[M, N].
  """
  (rows, inputs), x = x.shape, np.asarray(x, np.float32)
  layout = GroupLayout(inputs, bits, len(scales))
  group, chunk = layout.group, layout.chunk
  zero = 1 << (bits - 1)
  sums = np.zeros((rows, codes.shape[1]), np.float32)
  for begin in range(0, inputs, group):
    scale = scales[begin // group].astype(np.float32)
    for first in range(begin, begin + group, chunk):
      part = slice(first, min(first + chunk, begin + group))
      values, factor = _quantized(x[:, part])
      total = values.sum(axis=1, keepdims=True)
      dots = values @ codes[part].astype(np.int64) - zero * total
      sums = _fused(factor, dots.astype(np.float32) * scale, sums)
      if offsets is not None:
        sums = _fused(factor * total.astype(np.float32), offsets[begin // group].astype(np.float32), sums)
  return sums if residual is None else residual + sums


def _quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the integers of a chunk [M, K], int64, and the factors of the rows, f32[M, 1]."""
  greatest = np.abs(x).max(axis=1, keepdims=True)
  counts = greatest >= np.float32(2.0**-100)
  inverse = np.divide(np.float32(127), greatest, out=np.zeros_like(greatest), where=counts)
  values = np.rint(x.astype(np.float64) * inverse).astype(np.int64)
  return values, np.where(counts, greatest / np.float32(127), np.float32(0))


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """Returns a * b + c in f32 with a single rounding."""
  product = a.astype(np.float64) * b  # exact
  total = product + c
  high = total - product
  rest = (product - (total - high)) + (c - high)  # what the rounding of `total` left out
  # To odd: an inexact sum moves to the adjacent number whose last bit is 1, so that the second rounding sees no tie.
  even = (total.view(np.int64) & 1) == 0
  toward = np.where((rest > 0) == (total > 0), 1, -1)
  odd = np.where((rest != 0) & even, total.view(np.int64) + toward, total.view(np.int64))
  return odd.view(np.float64).astype(np.float32)
