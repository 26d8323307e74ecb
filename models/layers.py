"""The pieces every decoder is made of. Pure: no page, no batch, no engine is known here.

Axis letters, used in comments all over Sluice:
  T tokens in the step   S sequences (rows)   D model   F hidden   N query heads   K KV heads
  G query heads a KV head (N = K * G)   H head size   V vocabulary   P pages   L layers

Parameters are `flax.nnx.Param`s that carry their logical axes as metadata (`axes=`); engine/device/mesh.py maps
those to mesh axes. Modules are only ever built inside `nnx.eval_shape`, so a declaration allocates nothing.
"""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from models.config import ModelConfig, RopeScaling
from pallas_kernels.packed_matmul import api as packed_matmul


def param(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> nnx.Param:
  """Declares a parameter of `shape` and `dtype` whose dimensions carry the logical names `axes`."""
  assert len(shape) == len(axes), (shape, axes)
  return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def matrix(
  shape: tuple[int, ...], axes: tuple[str | None, ...], num_inputs: int, dtype: jnp.dtype, packed: bool
) -> nnx.Param:
  """Declares a weight whose first `num_inputs` dimensions meet the input and whose others are the output.

  Packed, it is one matrix [inputs, outputs] in the layout of pallas_kernels/packed_matmul, for one device.
  """
  if not packed:
    return param(shape, axes, dtype)
  sizes = math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])
  return param(packed_matmul.packed_shape(*sizes), (None, None, None), dtype)


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

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, packed: bool = False):
    d, f = config.model_dim, config.hidden_dim
    self.gate_up = matrix((d, 2, f), ("embed", None, "mlp"), 1, dtype, packed)
    self.down = matrix((f, d), ("mlp", "embed"), 1, dtype, packed)
    self.sizes = (d, f)
    self.packed = packed

  def __call__(self, x: jax.Array, norm: RMSNorm) -> jax.Array:  # [..., D] -> [..., D]
    if self.packed:
      d, f = self.sizes
      both = packed_matmul.matmul(x, self.gate_up[...], 2 * f, norm=(norm.scale[...], norm.eps))
      return packed_matmul.matmul(jax.nn.silu(both[..., :f]) * both[..., f:], self.down[...], d)
    # Not x @ gate_up.reshape(D, 2F): that copies the weight on a TPU, and gathers it where F is split over devices.
    both = jnp.einsum("...d,dcf->...cf", norm(x), self.gate_up[...])
    return (jax.nn.silu(both[..., 0, :]) * both[..., 1, :]) @ self.down[...]


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
