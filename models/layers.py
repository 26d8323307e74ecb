"""The pieces every decoder is made of. Pure: no page, no batch, no engine is known here.

Axis letters, used in comments all over Sluice:
  T tokens in the step   S sequences (rows)   D model   F hidden   N query heads   K KV heads
  G query heads a KV head (N = K * G)   H head size   V vocabulary   P pages   L layers

Parameters are `flax.nnx.Param`s that carry their logical axes as metadata (`axes=`); engine/device/mesh.py maps
those to mesh axes. Modules are only ever built inside `nnx.eval_shape`, so a declaration allocates nothing.
"""

import dataclasses
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from models.config import ModelConfig, RopeScaling
from pallas_kernels.packed_matmul import api as packed_matmul


def param(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> nnx.Param:
  """Declares a parameter of `shape` and `dtype` whose dimensions carry the logical names `axes`."""
  assert len(shape) == len(axes), (shape, axes)
  return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


@dataclasses.dataclass(frozen=True)
class WeightForm:
  """How a model holds the matrices of its linear layers and its head; embeddings and norms are always plain.

  Attributes:
    packed: in the layout of pallas_kernels/packed_matmul, for one CPU.
    int8: as whole numbers with a scale an output (models/quantize.py).
    ordered: packed ones are multiplied so that a row has the same bits in any batch; they are held alike.
  """

  packed: bool = False
  int8: bool = False
  ordered: bool = False


PLAIN = WeightForm()


def matrix(
  shape: tuple[int, ...], axes: tuple[str | None, ...], num_inputs: int, dtype: jnp.dtype, form: WeightForm
) -> tuple[nnx.Param, nnx.Param | None]:
  """Declares a weight whose first `num_inputs` dimensions meet the input and whose others are the output.

  Packed, it is one matrix [inputs, outputs].

  Returns:
    The weight; and its scales, f32 of the output's dimensions, where it is int8.
  """
  kept = jnp.dtype(jnp.int8) if form.int8 else dtype
  if form.packed:
    inputs, outputs = math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])
    weight, scales = param(packed_matmul.packed_shape(inputs, outputs), (None, None, None), kept), ((outputs,), (None,))
  else:
    weight, scales = param(shape, axes, kept), (shape[num_inputs:], axes[num_inputs:])
  return weight, param(*scales, jnp.dtype(jnp.float32)) if form.int8 else None


def operand(weight: nnx.Param, x: jax.Array) -> jax.Array:
  """A plain weight as x may be multiplied by it: int8 is exact in any dtype of x, and XLA converts it on the way."""
  return weight[...] if weight[...].dtype != jnp.int8 else weight[...].astype(x.dtype)


def scaled(product: jax.Array, scales: nnx.Param | None) -> jax.Array:
  """A product with `operand`, whose last dimensions are the output's, times its scales."""
  if scales is None:
    return product
  return (product.astype(jnp.float32) * jnp.broadcast_to(scales[...], product.shape)).astype(product.dtype)


def packed_product(
  x: jax.Array,
  weight: nnx.Param,
  scales: nnx.Param | None,
  outputs: int,
  norm: "RMSNorm | None" = None,
  dtype: jnp.dtype | None = None,
  **more: Any,
) -> jax.Array:
  """x [..., inputs], through `norm` if there is one, times a packed weight: [..., outputs] of `dtype` or x's.

  `more` is handed on: num_rows, gated, residual, ordered.
  """
  return packed_matmul.matmul(
    x,
    weight[...],
    outputs,
    dtype=dtype,
    scales=None if scales is None else scales[...],
    norm=None if norm is None else (norm.scale[...], norm.eps),
    **more,
  )


class RMSNorm(nnx.Module):
  """y = x / rms(x) * scale, in f32 (arXiv:1910.07467).

  Ordered, the squares are added halves onto halves: XLA's own reduction adds those of few rows in another order than
  those of many, so that a row's last bits depend on the batch.
  """

  def __init__(self, size: int, eps: float, dtype: jnp.dtype, ordered: bool = False):
    self.scale = param((size,), (None,), dtype)
    self.eps = eps
    self.ordered = ordered

  def __call__(self, x: jax.Array) -> jax.Array:  # [..., size] -> same
    x32 = x.astype(jnp.float32)
    squares = x32 * x32
    mean = _ordered_sum(squares) / x.shape[-1] if self.ordered else jnp.mean(squares, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(mean + self.eps)
    return x32.astype(x.dtype) * jnp.broadcast_to(self.scale[...].astype(x.dtype), x.shape)


def _ordered_sum(x: jax.Array) -> jax.Array:  # [..., n] -> [..., 1]
  size = 1 << (x.shape[-1] - 1).bit_length()
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
  while size > 1:
    size //= 2
    x = x[..., :size] + x[..., size:]
  return x


class GatedMLP(nnx.Module):
  """SwiGLU (arXiv:2002.05202); gate and up are one matmul."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, form: WeightForm = PLAIN):
    d, f = config.model_dim, config.hidden_dim
    self.gate_up, self.gate_up_scale = matrix((d, 2, f), ("embed", None, "mlp"), 1, dtype, form)
    self.down, self.down_scale = matrix((f, d), ("mlp", "embed"), 1, dtype, form)
    self.sizes = (d, f)
    self.packed, self.ordered = form.packed, form.ordered

  def __call__(self, x: jax.Array, norm: RMSNorm, num_tokens: jax.Array | None = None) -> jax.Array:
    """[..., D] -> [..., D]: x, and what the norm and the layer make of it."""
    if self.packed:
      d, f = self.sizes
      more = {"num_rows": num_tokens, "ordered": self.ordered}
      both = packed_product(x, self.gate_up, self.gate_up_scale, 2 * f, norm, **more)
      return packed_product(both, self.down, self.down_scale, d, gated=True, residual=x, **more)
    # Not x @ gate_up.reshape(D, 2F): that copies the weight on a TPU, and gathers it where F is split over devices.
    both = scaled(jnp.einsum("...d,dcf->...cf", norm(x), operand(self.gate_up, x)), self.gate_up_scale)
    return x + scaled((jax.nn.silu(both[..., 0, :]) * both[..., 1, :]) @ operand(self.down, x), self.down_scale)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
  """Angular frequencies of rotary embedding, f32[H/2] in radians a position (arXiv:2104.09864)."""
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  freq = 1.0 / (jnp.float32(theta) ** exponent)
  if scaling is None:
    return freq
  if scaling.kind == "linear":
    return freq / scaling.factor
  wavelength = 2.0 * math.pi / freq
  low = scaling.original_max_position / scaling.low_freq_factor
  high = scaling.original_max_position / scaling.high_freq_factor
  smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
    scaling.high_freq_factor - scaling.low_freq_factor
  )
  blended = (1.0 - smooth) * freq / scaling.factor + smooth * freq
  return jnp.where(wavelength > low, freq / scaling.factor, jnp.where(wavelength < high, freq, blended))


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates pairs (i, i + H/2), in f32, as Hugging Face checkpoints expect.

  Args:
    x: [..., heads, H].
    cos, sin: f32[..., H/2], one row a token.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[..., None, :], sin[..., None, :]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def rotate(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Splits a layer's projections and rotates queries and keys.

  Args:
    qkv: [..., K, G + 2, H]: of each KV head its queries, its key, its value.
    cos, sin: f32[..., H/2], one row a token.

  Returns:
    q [..., N, H], k [..., K, H], v [..., K, H].
  """
  q = qkv[..., :-2, :]
  q = q.reshape(*q.shape[:-3], -1, q.shape[-1])
  return rope(q, cos, sin), rope(qkv[..., -2, :], cos, sin), qkv[..., -1, :]
