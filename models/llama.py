"""The dense decoder: Llama 2 and 3, and by their configs Mistral, Qwen2 and Qwen3. Structure only.

How attention reaches past tokens is the caller's: it passes `attend`, a pure function, and one cache a layer, which
this file hands through unread. Serving passes paged attention, training passes dense causal attention; there is one
forward for both. Every function works on any leading dimensions (`[T]` in serving, `[B, T]` in training).
"""

from collections.abc import Callable
from functools import partial
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.layers import (
  PLAIN,
  GatedMLP,
  RMSNorm,
  WeightForm,
  matrix,
  operand,
  packed_product,
  param,
  rope_frequencies,
  scaled,
)
from models.quantize import quantize
from pallas_kernels.packed_matmul import api as packed_matmul

# (qkv [..., K, G + 2, H], cos [..., H / 2], sin, cache, meta) -> (out [..., N, H], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any]]
# (int32[S], indices into the tokens; int32[1], how many of these are in use, those in front)
Wanted = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
  """Grouped-query attention (arXiv:2305.13245). Query, key and value are one matmul.

  `qkv` is [D, K, G + 2, H]: each KV head lies beside its query heads, so the K axis can be split over devices
  without moving anything. The result has the residual x in it.
  """

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, form: WeightForm = PLAIN):
    d, k, g, h = config.model_dim, config.num_kv_heads, config.group_size, config.head_dim
    self.sizes = (d, k, g, h)
    self.packed, self.ordered = form.packed, form.ordered
    self.qkv, self.qkv_scale = matrix((d, k, g + 2, h), ("embed", "kv_heads", None, None), 1, dtype, form)
    self.out, self.out_scale = matrix((k, g, h, d), ("kv_heads", None, None, "embed"), 3, dtype, form)
    self.qkv_bias = param((k, g + 2, h), ("kv_heads", None, None), dtype) if config.qkv_bias else None
    self.q_norm = RMSNorm(h, config.rms_norm_eps, dtype, form.packed) if config.qk_norm else None
    self.k_norm = RMSNorm(h, config.rms_norm_eps, dtype, form.packed) if config.qk_norm else None

  def __call__(
    self, x, norm: RMSNorm, cos, sin, cache, meta, attend: Attend, num_tokens=None, wanted: Wanted | None = None
  ):
    (d, k, g, h), lead = self.sizes, x.shape[:-1]
    outputs = k * (g + 2) * h
    if self.packed:
      qkv = packed_product(x, self.qkv, self.qkv_scale, outputs, norm, num_rows=num_tokens, ordered=self.ordered)
      qkv = qkv.reshape(*lead, k, g + 2, h)
    else:
      qkv = norm(x) @ operand(self.qkv, x).reshape(d, outputs)
      qkv = scaled(qkv.reshape(*lead, k, g + 2, h), self.qkv_scale)
    if self.qkv_bias is not None:
      qkv = qkv + jnp.broadcast_to(self.qkv_bias[...], qkv.shape)
    if self.q_norm is not None and self.k_norm is not None:
      normed = self.q_norm(qkv[..., :g, :]), self.k_norm(qkv[..., g : g + 1, :])
      qkv = jnp.concatenate([*normed, qkv[..., g + 1 :, :]], axis=-2)
    out, cache = attend(qkv, cos, sin, cache, meta)
    out = out.reshape(*lead, k * g * h)
    if wanted is not None:
      tokens, num_tokens = wanted
      x, out = x[tokens], out[tokens]
    if self.packed:
      more = {"num_rows": num_tokens, "ordered": self.ordered}
      return packed_product(out, self.out, self.out_scale, d, residual=x, **more), cache
    return x + scaled(out @ operand(self.out, out).reshape(-1, d), self.out_scale), cache


class Block(nnx.Module):
  """One pre-norm layer."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, form: WeightForm = PLAIN):
    self.attention_norm = RMSNorm(config.model_dim, config.rms_norm_eps, dtype)
    self.attention = Attention(config, dtype, form)
    self.mlp_norm = RMSNorm(config.model_dim, config.rms_norm_eps, dtype)
    self.mlp = GatedMLP(config, dtype, form)

  def __call__(self, x, cos, sin, cache, meta, attend: Attend, num_tokens=None, wanted: Wanted | None = None):
    with jax.named_scope("attention"):
      x, cache = self.attention(x, self.attention_norm, cos, sin, cache, meta, attend, num_tokens, wanted)
    with jax.named_scope("mlp"):
      return self.mlp(x, self.mlp_norm, num_tokens if wanted is None else wanted[1]), cache


@partial(jax.jit, static_argnums=(0, 7))
def _run_block(graphdef, state, x, cos, sin, cache, meta, attend, num_tokens, wanted):
  """One layer as an inner jit: all but the last share one trace and one compiled body; a scan would copy the cache."""
  return nnx.merge(graphdef, state)(x, cos, sin, cache, meta, attend, num_tokens, wanted)


class Decoder(nnx.Module):
  """Embedding, layers, final norm and head.

  Packed, every weight that is multiplied by has the layout of pallas_kernels/packed_matmul; so a tied embedding has it
  too, as the head's matrix [D, V], and its lines are picked out of that. As int8, a tied embedding stays as it is, and
  the head is a matrix of its own.
  """

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, form: WeightForm = PLAIN):
    d, v, tied = config.model_dim, config.vocab_size, config.tie_embeddings
    self.config = config
    self.packed, self.ordered = form.packed, form.ordered
    shared = tied and not form.int8
    if shared and form.packed:
      self.embed, _ = matrix((d, v), (None, None), 1, dtype, form)
    else:
      self.embed = param((v, d), ("vocab", "embed"), dtype)
    self.layers = nnx.List([Block(config, dtype, form) for _ in range(config.num_layers)])
    self.final_norm = RMSNorm(d, config.rms_norm_eps, dtype)
    head = (None, None) if shared else matrix((d, v), ("embed", "vocab"), 1, dtype, form)
    self.head, self.head_scale = head

  def hidden(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    caches: tuple,
    meta: Any,
    attend: Attend,
    num_tokens: jax.Array | None = None,
    wanted: Wanted | None = None,
  ) -> tuple[jax.Array, tuple]:
    """Runs the layers.

    Args:
      tokens: int32[...], ids inside the vocabulary (checked by the host: JAX clamps in silence).
      positions: int32[...], of the same shape.
      caches: one opaque value a layer, handed to `attend` and replaced by what it returns.
      meta: a pytree handed to `attend`.
      attend: a module-level function (it is static in the compiled layer).
      num_tokens: int32[1], how many of the tokens are in use, those in front; None: all. Where a matmul can, it leaves
        the others out. What comes out for them means nothing.
      wanted: which tokens, int32[T], are asked for, since only these get logits: behind its attention the last layer
        has no others. None: all.

    Returns:
      Hidden states [..., D] (of those wanted, [S, D]) as the last layer leaves them, for `logits`; and the new caches.
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
    for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), 1):
      graphdef, state = nnx.split(layer)
      now = wanted if index == len(self.layers) else None
      x, cache = _run_block(graphdef, state, x, cos, sin, cache, meta, attend, num_tokens, now)
      new_caches.append(cache)
    return x, tuple(new_caches)

  def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """[..., D] of `hidden` -> f32[..., V]: the final norm, and the head.

    num_rows: int32[1], as num_tokens of `hidden`.
    """
    with jax.named_scope("head"):
      if self.packed:
        weight, size = self.embed if self.head is None else self.head, self.config.vocab_size
        f32 = jnp.dtype(jnp.float32)
        more = {"num_rows": num_rows, "ordered": self.ordered}
        return packed_product(hidden, weight, self.head_scale, size, self.final_norm, f32, **more)
      hidden = self.final_norm(hidden)
      if self.head is None:
        return jnp.einsum("...d,vd->...v", hidden, self.embed[...], preferred_element_type=jnp.float32)
      head = operand(self.head, hidden)
      return scaled(
        jnp.einsum("...d,dv->...v", hidden, head, preferred_element_type=jnp.float32),
        self.head_scale,
      )


def abstract(config: ModelConfig, dtype: jnp.dtype, form: WeightForm = PLAIN) -> tuple[nnx.GraphDef, nnx.State]:
  """The model without arrays: a static graph and a tree of ShapeDtypeStructs with logical axes."""
  return nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype, form)))


# By the last part of a matrix's name: how many of its dimensions meet the input.
_NUM_INPUTS = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1, "head": 1}


def arrange(
  name: str, weight: jax.Array | np.ndarray, config: ModelConfig, form: WeightForm
) -> dict[str, jax.Array | np.ndarray]:
  """What a parameter of the plain model becomes in `form`, by the names and in the shapes of `abstract`.

  What the host holds comes out in memory of its own: a weight may be a view of a file.
  """
  made: dict[str, jax.Array | np.ndarray] = {}
  if name == "embed" and config.tie_embeddings and form != PLAIN:
    if form.int8:
      made["embed"], name = weight, "head"
    weight, num_inputs = weight.T, 1
  else:
    num_inputs = _NUM_INPUTS.get(name.rpartition(".")[2], 0)
  if not num_inputs:
    return {name: packed_matmul.copied(weight) if isinstance(weight, np.ndarray) else weight}
  if form.int8:
    weight, scales = quantize(jax.device_put(weight), num_inputs)
    made[f"{name}_scale"] = scales.reshape(-1) if form.packed else scales
  if form.packed:
    inputs = math.prod(weight.shape[:num_inputs])
    made[name] = packed_matmul.pack(np.asarray(weight).reshape(inputs, -1))
  else:
    made[name] = weight
  return made
