"""The dense decoder of Llama 2 and 3 and similar families. May not know how weights are stored.

models/matrices.py owns the representations of weights and their products. The caller owns attention: it passes
`attend`, a pure function, and one cache a layer, which this module passes on unread. Serving passes paged attention and
training dense causal attention to the same forward. Every function accepts any leading dimensions (`[T]` in serving,
`[B, T]` in training).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from models.adapters import LayerAdapters
from models.config import Activation, LayerAttention, ModelConfig
from models.layers import ClassWeights, RMSNorm, rotation
from models.linear import Linear, declare_vocabulary
from models.weight_form import WeightForm

# (the layer's declaration, qkv [..., K, G + 2, H], cos [..., H / 2], sin, cache, meta) -> (out [..., N, H], cache)
Attend = Callable[[LayerAttention, jax.Array, jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any]]
# (int32[S], indices into the tokens; int32[1], the number of leading indices in use)
Wanted = tuple[jax.Array, jax.Array]


def _norm(config: ModelConfig, size: int, dtype: jnp.dtype, form: WeightForm) -> RMSNorm:
  return RMSNorm(size, config.rms_norm_eps, dtype, offset=config.norm_offset, ordered=form.orders_norms)


class Attention(nnx.Module):
  """Grouped-query attention (arXiv:2305.13245). Query, key and value are one product.

  `qkv` is [D, K, G + 2, H]: each KV head is next to its query heads, so devices can split the K axis without moving
  data.
  """

  def __init__(self, config: ModelConfig, declared: LayerAttention, dtype: jnp.dtype, form: WeightForm):
    d, k, g, h = config.model_dim, declared.num_kv_heads, declared.group_size, declared.head_dim
    self.declared = declared
    heads = ("kv_heads", None, None)
    self.qkv = Linear.declare((d, k, g + 2, h), ("embed", *heads), dtype, form.at("qkv"), bias=config.qkv_bias)
    self.q_norm = _norm(config, h, dtype, form) if config.qk_norm else None
    self.k_norm = _norm(config, h, dtype, form) if config.qk_norm else None
    self.out = Linear.declare(
      (k, g, h, d), (*heads, "embed"), dtype, form.at("out"), num_inputs=3, multiplier=config.residual_multiplier
    )

  def __call__(
    self,
    x: jax.Array,
    norm: RMSNorm,
    post_norm: RMSNorm | None,
    rotation: tuple[jax.Array, jax.Array],
    cache: Any,
    meta: Any,
    attend: Attend,
    num_tokens: jax.Array | None,
    wanted: Wanted | None,
    adapters: LayerAdapters | None,
  ) -> tuple[jax.Array, Any]:
    """[..., D] -> [..., D] for the wanted tokens: x plus the attention output; and the cache."""
    adapter = None if adapters is None else adapters.of_linear("attention.qkv")
    qkv = self.qkv(x, norm=norm, num_rows=num_tokens, adapter=adapter)
    if self.q_norm is not None and self.k_norm is not None:
      q, k, v = jnp.split(qkv, [self.declared.group_size, self.declared.group_size + 1], axis=-2)
      qkv = jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=-2)
    attended, cache = attend(self.declared, qkv, *rotation, cache, meta)
    attended = attended.reshape(*x.shape[:-1], -1)
    if wanted is not None:
      tokens, num_tokens = wanted
      x, attended = x[tokens], attended[tokens]
      adapters = None if adapters is None else adapters.of_tokens(tokens)
    attended = attended.reshape(*x.shape[:-1], *self.out.inputs)
    adapter = None if adapters is None else adapters.of_linear("attention.out")
    return self.out(attended, residual=x, residual_norm=post_norm, num_rows=num_tokens, adapter=adapter), cache


class GatedMLP(nnx.Module):
  """A gated MLP such as SwiGLU (arXiv:2002.05202). Gate and up are one product."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, form: WeightForm):
    d, f = config.model_dim, config.hidden_dim
    self.gate_up = Linear.declare((d, 2, f), ("embed", None, "mlp"), dtype, form.at("gate_up"))
    self.down = Linear.declare((f, d), ("mlp", "embed"), dtype, form.at("down"), multiplier=config.residual_multiplier)
    self.activation: Activation = config.activation

  def __call__(
    self,
    x: jax.Array,
    norm: RMSNorm,
    post_norm: RMSNorm | None,
    num_tokens: jax.Array | None,
    adapters: LayerAdapters | None,
  ) -> jax.Array:
    """[..., D] -> [..., D]: x plus the MLP output."""
    adapter = None if adapters is None else adapters.of_linear("mlp.gate_up")
    both = self.gate_up(x, norm=norm, num_rows=num_tokens, adapter=adapter)
    return self.down(
      both,
      activation=self.activation,
      residual=x,
      residual_norm=post_norm,
      num_rows=num_tokens,
      adapter=None if adapters is None else adapters.of_linear("mlp.down"),
    )


class Block(nnx.Module):
  """One layer: attention and MLP, each with a norm before it and, in some families, a norm after it."""

  def __init__(self, config: ModelConfig, declared: LayerAttention, dtype: jnp.dtype, form: WeightForm):
    norm = partial(_norm, config, config.model_dim, dtype, form)
    self.attention_norm = norm()
    self.attention = Attention(config, declared, dtype, form.at("attention"))
    self.attention_post_norm = norm() if config.post_norms else None
    self.mlp_norm = norm()
    self.mlp = GatedMLP(config, dtype, form.at("mlp"))
    self.mlp_post_norm = norm() if config.post_norms else None

  def __call__(
    self,
    x,
    rotation,
    cache,
    meta,
    attend: Attend,
    num_tokens=None,
    wanted: Wanted | None = None,
    adapters: LayerAdapters | None = None,
  ):
    with jax.named_scope("attention"):
      norms = self.attention_norm, self.attention_post_norm
      x, cache = self.attention(x, *norms, rotation, cache, meta, attend, num_tokens, wanted, adapters)
    with jax.named_scope("mlp"):
      norms = self.mlp_norm, self.mlp_post_norm
      if wanted is not None:
        tokens, num_tokens = wanted
        adapters = None if adapters is None else adapters.of_tokens(tokens)
      return self.mlp(x, *norms, num_tokens, adapters), cache


@partial(jax.jit, static_argnums=(0, 6))
def _run_block(graphdef, state, x, rotation, cache, meta, attend, num_tokens, wanted, adapters):
  """Runs one layer as an inner jit. Equal layers except the last share one trace and one compiled body; a scan would
  copy the cache."""
  return nnx.merge(graphdef, state)(x, rotation, cache, meta, attend, num_tokens, wanted, adapters)


class Decoder(nnx.Module):
  """Embedding, layers, final norm and head.

  No program reads the weights of a head of classes: the host multiplies the few states that need it. A row's sum then
  has one order in every batch, and steps are those of other models.
  """

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, form: WeightForm):
    self.config = config
    self.embed, self.head = declare_vocabulary(
      config.vocab_size,
      config.model_dim,
      dtype,
      form,
      tied=config.tie_embeddings,
      has_head=config.has_token_head,
      multiplier=config.embedding_multiplier,
      head_multiplier=1.0 / config.logits_divisor,
    )
    self.layers = nnx.List(
      [Block(config, declared, dtype, form.at(f"layers.{index}")) for index, declared in enumerate(config.layers)]
    )
    self.final_norm = _norm(config, config.model_dim, dtype, form)
    self.score = None if config.class_head is None else ClassWeights(len(config.class_head.labels), config.model_dim)

  def hidden(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    caches: tuple,
    meta: Any,
    attend: Attend,
    num_tokens: jax.Array | None = None,
    wanted: Wanted | None = None,
    adapters: tuple[LayerAdapters, ...] | None = None,
  ) -> tuple[jax.Array, tuple]:
    """Runs the layers.

    Args:
      tokens: int32[...], ids inside the vocabulary. The host checks this; JAX would clamp them silently.
      positions: int32[...], the shape of `tokens`.
      caches: one opaque value a layer, which `attend` takes and returns updated.
      meta: a pytree for `attend`.
      attend: a module-level function; it is static in the compiled layer.
      num_tokens: int32[1], the number of leading tokens in use; None: all. Matmuls skip the others if they can; hidden
        states of the others are arbitrary.
      wanted: the tokens that get logits, int32[S]; after its attention the last layer computes only these. None: all.
      adapters: low-rank adapters of each layer, for tokens int32[T]; see models/adapters.py. None: none.

    Returns:
      Hidden states of the last layer, [..., D] or [S, D] for wanted tokens, for `logits`; and the new caches.
    """
    return self.hidden_and_features((), tokens, positions, caches, meta, attend, num_tokens, wanted, adapters)[:2]

  def hidden_and_features(
    self,
    feature_layers: tuple[int, ...],
    tokens: jax.Array,
    positions: jax.Array,
    caches: tuple,
    meta: Any,
    attend: Attend,
    num_tokens: jax.Array | None = None,
    wanted: Wanted | None = None,
    adapters: tuple[LayerAdapters, ...] | None = None,
  ) -> tuple[jax.Array, tuple, tuple[jax.Array, ...]]:
    """Runs the layers like `hidden`, and also returns the inputs of some of them, [..., D] each, for all tokens.

    Args: feature_layers: numbers of these layers, from 0; the others as in `hidden`.
    """
    x = self.embed(tokens)
    rotations = {declared.rope: rotation(positions, declared) for declared in self.config.groups}
    new_caches, layer_inputs = [], []
    for index, (layer, declared, cache) in enumerate(zip(self.layers, self.config.layers, caches, strict=True), 1):
      graphdef, state = nnx.split(layer)
      now = wanted if index == len(self.layers) else None
      own = None if adapters is None else adapters[index - 1]
      layer_inputs.append(x)
      x, cache = _run_block(graphdef, state, x, rotations[declared.rope], cache, meta, attend, num_tokens, now, own)
      new_caches.append(cache)
    return x, tuple(new_caches), tuple(layer_inputs[number] for number in feature_layers)

  def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """[..., D] of `hidden` -> f32[..., V]: applies the final norm and the head.

    num_rows: int32[1], like num_tokens of `hidden`.
    """
    assert self.head is not None, "a model without a head of tokens has no logits"
    with jax.named_scope("head"):
      logits = self.head(hidden, norm=self.final_norm, num_rows=num_rows, dtype=jnp.dtype(jnp.float32))
      cap = self.config.logits_soft_cap
      return logits if cap is None else cap * jnp.tanh(logits / cap)
