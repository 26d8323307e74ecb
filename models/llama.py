"""The dense decoder: Llama 2 and 3, and by their configs Mistral, Qwen2 and Qwen3. Structure only.

How attention reaches past tokens is the caller's: it passes `attend`, a pure function, and one cache a layer, which
this file hands through unread. Serving passes paged attention, training passes dense causal attention; there is one
forward for both. Every function works on any leading dimensions (`[T]` in serving, `[B, T]` in training).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.layers import GatedMLP, RMSNorm, matrix, param, rope_frequencies
from pallas_kernels.packed_matmul import api as packed_matmul

# (qkv [..., K, G + 2, H], cos [..., H / 2], sin, cache, meta) -> (out [..., N, H], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any]]


class Attention(nnx.Module):
  """Grouped-query attention (arXiv:2305.13245). Query, key and value are one matmul.

  `qkv` is [D, K, G + 2, H]: each KV head lies beside its query heads, so the K axis can be split over devices
  without moving anything.
  """

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, packed: bool = False):
    d, k, g, h = config.model_dim, config.num_kv_heads, config.group_size, config.head_dim
    self.sizes = (d, k, g, h)
    self.packed = packed
    self.qkv = matrix((d, k, g + 2, h), ("embed", "kv_heads", None, None), 1, dtype, packed)
    self.out = matrix((k, g, h, d), ("kv_heads", None, None, "embed"), 3, dtype, packed)
    self.qkv_bias = param((k, g + 2, h), ("kv_heads", None, None), dtype) if config.qkv_bias else None
    self.q_norm = RMSNorm(h, config.rms_norm_eps, dtype, packed) if config.qk_norm else None
    self.k_norm = RMSNorm(h, config.rms_norm_eps, dtype, packed) if config.qk_norm else None

  def __call__(self, x, norm: RMSNorm, cos, sin, cache, meta, attend: Attend):
    (d, k, g, h), lead = self.sizes, x.shape[:-1]
    outputs = k * (g + 2) * h
    if self.packed:
      qkv = packed_matmul.matmul(x, self.qkv[...], outputs, norm=(norm.scale[...], norm.eps))
    else:
      qkv = norm(x) @ self.qkv[...].reshape(d, outputs)
    qkv = qkv.reshape(*lead, k, g + 2, h)
    if self.qkv_bias is not None:
      qkv = qkv + jnp.broadcast_to(self.qkv_bias[...], qkv.shape)
    if self.q_norm is not None and self.k_norm is not None:
      normed = self.q_norm(qkv[..., :g, :]), self.k_norm(qkv[..., g : g + 1, :])
      qkv = jnp.concatenate([*normed, qkv[..., g + 1 :, :]], axis=-2)
    out, cache = attend(qkv, cos, sin, cache, meta)
    out = out.reshape(*lead, k * g * h)
    if self.packed:
      return packed_matmul.matmul(out, self.out[...], d), cache
    return out @ self.out[...].reshape(-1, d), cache


class Block(nnx.Module):
  """One pre-norm layer."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, packed: bool = False):
    self.attention_norm = RMSNorm(config.model_dim, config.rms_norm_eps, dtype)
    self.attention = Attention(config, dtype, packed)
    self.mlp_norm = RMSNorm(config.model_dim, config.rms_norm_eps, dtype)
    self.mlp = GatedMLP(config, dtype, packed)

  def __call__(self, x, cos, sin, cache, meta, attend: Attend):
    with jax.named_scope("attention"):
      out, cache = self.attention(x, self.attention_norm, cos, sin, cache, meta, attend)
    x = x + out
    with jax.named_scope("mlp"):
      return x + self.mlp(x, self.mlp_norm), cache


@partial(jax.jit, static_argnums=(0, 7))
def _run_block(graphdef, state, x, cos, sin, cache, meta, attend):
  """One layer as an inner jit: all layers share one trace and one compiled body; a scan would copy the cache."""
  return nnx.merge(graphdef, state)(x, cos, sin, cache, meta, attend)


class Decoder(nnx.Module):
  """Embedding, layers, final norm and head.

  Packed, every weight that is multiplied by has the layout of pallas_kernels/packed_matmul; so a tied embedding has it
  too, as the head's matrix [D, V], and its lines are picked out of that.
  """

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, packed: bool = False):
    d, v, tied = config.model_dim, config.vocab_size, config.tie_embeddings
    self.config = config
    self.packed = packed
    self.embed = (
      matrix((d, v), (None, None), 1, dtype, True) if packed and tied else param((v, d), ("vocab", "embed"), dtype)
    )
    self.layers = nnx.List([Block(config, dtype, packed) for _ in range(config.num_layers)])
    self.final_norm = RMSNorm(d, config.rms_norm_eps, dtype)
    self.head = None if tied else matrix((d, v), ("embed", "vocab"), 1, dtype, packed)

  def hidden(
    self, tokens: jax.Array, positions: jax.Array, caches: tuple, meta: Any, attend: Attend
  ) -> tuple[jax.Array, tuple]:
    """Runs the layers.

    Args:
      tokens: int32[...], ids inside the vocabulary (checked by the host: JAX clamps in silence).
      positions: int32[...], of the same shape.
      caches: one opaque value a layer, handed to `attend` and replaced by what it returns.
      meta: a pytree handed to `attend`.
      attend: a module-level function (it is static in the compiled layer).

    Returns:
      Hidden states [..., D] as the last layer leaves them, for `logits`; and the new caches.
    """
    config = self.config
    if self.packed and self.head is None:
      x = self.embed[...][tokens // packed_matmul.COLUMNS, :, tokens % packed_matmul.COLUMNS]
    else:
      x = self.embed[...][tokens]
    angle = positions[..., None].astype(jnp.float32) * jnp.broadcast_to(
      rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling),
      (*positions.shape, config.head_dim // 2),
    )
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    new_caches = []
    for layer, cache in zip(self.layers, caches, strict=True):
      graphdef, state = nnx.split(layer)
      x, cache = _run_block(graphdef, state, x, cos, sin, cache, meta, attend)
      new_caches.append(cache)
    return x, tuple(new_caches)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """[..., D] of `hidden` -> f32[..., V]: the final norm, and the head."""
    with jax.named_scope("head"):
      if self.packed:
        weight, norm = self.embed if self.head is None else self.head, self.final_norm
        return packed_matmul.matmul(
          hidden, weight[...], self.config.vocab_size, dtype=jnp.float32, norm=(norm.scale[...], norm.eps)
        )
      hidden = self.final_norm(hidden)
      if self.head is None:
        return jnp.einsum("...d,vd->...v", hidden, self.embed[...], preferred_element_type=jnp.float32)
      return jnp.einsum("...d,dv->...v", hidden, self.head[...], preferred_element_type=jnp.float32)


def abstract(config: ModelConfig, dtype: jnp.dtype, packed: bool = False) -> tuple[nnx.GraphDef, nnx.State]:
  """The model without arrays: a static graph and a tree of ShapeDtypeStructs with logical axes.

  Args:
    packed: whether weights have the layout of pallas_kernels/packed_matmul (`pack`).
  """
  return nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype, packed)))


def pack(name: str, weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """The weight called `name` of a model that is not packed, in the `shape` that `abstract` gives it packed."""
  if weight.shape == shape:
    return weight
  if name == "embed":
    weight = weight.T
  return packed_matmul.pack(weight.reshape(shape[1], -1))
