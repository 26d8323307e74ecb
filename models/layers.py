"""The layers that every decoder shares. May not know pages, batches or engines.

Axis letters, used in comments all over Sluice:
  T tokens in the step   S sequences (rows)   D model   F hidden   N query heads   K KV heads
  G query heads a KV head (N = K * G)   H head size   V vocabulary   P pages   L layers

Parameters are `flax.nnx.Param`s with their logical axes as metadata (`axes=`); engine/device/mesh.py maps those to mesh
axes. Callers build modules only inside `nnx.eval_shape`, so a declaration allocates nothing.
"""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from models.config import LayerAttention, RopeScaling

# Logical axes that several devices split; `share` is that of arrays whose layout holds one device's share after the
# other's. Devices hold all other axes whole.
SPLIT_AXES = ("vocab", "mlp", "kv_heads", "share")


def sum_over_devices(x: jax.Array, axis: str, ordered: bool = False) -> jax.Array:
  """Returns the sum of all devices' `x`, on each of them.

  Args:
    axis: the mesh axis; "": there is one device.
    ordered: adds in the devices' order. An all-reduce may order the sum of an element by its place in the array.
  """
  if not axis:
    return x
  if not ordered:
    return jax.lax.psum(x, axis)
  first, *others = jax.lax.all_gather(x, axis)
  for other in others:
    first = first + other
  return first


def param(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> nnx.Param:
  """Declares a parameter of `shape` and `dtype` with the logical axes `axes`."""
  assert len(shape) == len(axes), (shape, axes)
  return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


class RMSNorm(nnx.Module):
  """y = x / rms(x) * (offset + scale), in f32 (arXiv:1910.07467).

  With an offset (Gemma's is 1) the product is in f32 too.

  An ordered norm sums squares pairwise in a fixed order. XLA's own reduction uses another order for few rows than for
  many, so a row's last bits would depend on the batch.
  """

  def __init__(self, size: int, eps: float, dtype: jnp.dtype, *, offset: float = 0.0, ordered: bool = False):
    self.scale = param((size,), (None,), dtype)
    self.eps = eps
    self.offset = offset
    self.ordered = ordered

  def __call__(self, x: jax.Array) -> jax.Array:  # [..., size] -> same
    x32 = x.astype(jnp.float32)
    squares = x32 * x32
    mean = _ordered_sum(squares) / x.shape[-1] if self.ordered else jnp.mean(squares, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(mean + self.eps)
    if self.offset:
      scale = self.scale[...].astype(jnp.float32) + self.offset
      return (x32 * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)
    return x32.astype(x.dtype) * jnp.broadcast_to(self.scale[...].astype(x.dtype), x.shape)


class ClassWeights(nnx.Module):
  """The weights of a head of classes, f32[C, D] whatever the model's dtype."""

  def __init__(self, num_classes: int, size: int):
    self.weight = param((num_classes, size), (None, None), jnp.dtype(jnp.float32))


def _ordered_sum(x: jax.Array) -> jax.Array:  # [..., n] -> [..., 1]
  size = 1 << (x.shape[-1] - 1).bit_length()
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
  while size > 1:
    size //= 2
    x = x[..., :size] + x[..., size:]
  return x


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
  """Returns the angular frequencies of rotary embedding, f32[H/2] in radians a position (arXiv:2104.09864)."""
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


def rotation(positions: jax.Array, attention: LayerAttention) -> tuple[jax.Array, jax.Array]:
  """Returns cos and sin of a layer's rotation angles, f32[..., H/2] for int32[...] positions."""
  shape = (*positions.shape, attention.head_dim // 2)
  frequencies = rope_frequencies(attention.head_dim, attention.rope_theta, attention.rope_scaling)
  angle = positions[..., None].astype(jnp.float32) * jnp.broadcast_to(frequencies, shape)
  return jnp.cos(angle), jnp.sin(angle)
