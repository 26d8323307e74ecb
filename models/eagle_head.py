"""EAGLE-3's head (arXiv:2503.01840): one layer that proposes tokens from another model's features.

Its input at a position is the token there and the feature of the position before: the states that enter three layers of
the served model, or, after a proposal, the head's own hidden state. May not know how weights are stored, or pages.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.decoder import Attend, GatedMLP
from models.families.common import read, read_llama_shape
from models.families.keys import UnsupportedModel
from models.families.tensor_map import Piece, TensorMap, transposed, vector
from models.layers import RMSNorm, param, rotation
from models.linear import Embedding, Linear, declare_table
from models.matrices import MatrixSpec
from models.weight_form import WeightForm

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
NUM_FEATURES = 3
# Keys that change what a head computes, besides those of a Llama layer.
_NOT_SUPPORTED = ("norm_before_fc", "norm_output", "fc_norm", "parallel_drafting")
_NESTED = "transformer_layer_config"  # holds the layer's keys in files of the speculators library


@dataclasses.dataclass(frozen=True)
class EagleConfig:
  """The sizes and constants of a head.

  Attributes:
    model: those of its layer; vocab_size is the number of tokens that it may propose.
    target_dim: D of the served model.
    feature_layers: numbers of the served model's layers, from 0, whose inputs are its features.
    target_vocab_size: tokens of the served model.
    has_embedding: it has an embedding of its own, of these tokens; otherwise the served model's.
    norm_before_residual: the residual is the feature after its norm.
  """

  model: ModelConfig
  target_dim: int
  feature_layers: tuple[int, ...]
  target_vocab_size: int
  has_embedding: bool
  norm_before_residual: bool


def is_eagle_config(raw: Mapping[str, Any]) -> bool:
  """Returns whether a parsed config.json is that of a head."""
  names = raw.get("architectures")
  return isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES


def read_eagle_config(raw: Mapping[str, Any], target: ModelConfig, has_embedding: bool) -> EagleConfig:
  """Reads a parsed config.json of a head of vLLM, SGLang or the speculators library.

  Args:
    target: configuration of the served model.
    has_embedding: the weights hold an embedding.

  Raises:
    UnsupportedModel: Sluice does not compute this head, or it is one of another model.
  """
  nested = raw.get(_NESTED) or {}
  if not isinstance(nested, Mapping):
    raise UnsupportedModel(f"{_NESTED}={nested!r:.80} must be an object")
  for key in _NOT_SUPPORTED:
    if raw.get(key):
      raise UnsupportedModel(f"{key}={raw[key]!r:.40} is not supported; supported is a head without it")
  layer = dict(raw) | dict(nested)
  given = read(layer, "vocab_size", int, target.vocab_size)
  if given != target.vocab_size:
    raise UnsupportedModel(f"vocab_size={given}, but the model's is {target.vocab_size}; use the head of this model")
  size = read(raw, "draft_vocab_size", int, given)
  config = read_llama_shape(layer | {"vocab_size": size, "layer_types": None}, "llama", max_position=2048)
  if config.num_layers != 1:
    raise UnsupportedModel(f"num_hidden_layers={config.num_layers} is not supported; supported is a head of 1 layer")
  if size > target.vocab_size:
    raise UnsupportedModel(f"draft_vocab_size={size} is above the model's {target.vocab_size} tokens")
  target_dim = read(raw, "target_hidden_size", int, target.model_dim if has_embedding else config.model_dim)
  if target_dim != target.model_dim or not has_embedding and config.model_dim != target_dim:
    found = target_dim if target_dim != target.model_dim else config.model_dim
    raise UnsupportedModel(f"hidden size {found}, but the model's is {target.model_dim}; use the head of this model")
  return EagleConfig(
    model=config,
    target_dim=target_dim,
    feature_layers=_read_feature_layers(raw, target.num_layers),
    target_vocab_size=target.vocab_size,
    has_embedding=has_embedding,
    norm_before_residual=read(raw, "norm_before_residual", bool, False),
  )


def _read_feature_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
  """Returns the layers of the field's default, of the key of vLLM, or of SGLang's, which counts layers by outputs."""
  key = "eagle_aux_hidden_state_layer_ids"
  inner = raw.get("eagle_config")
  found, offset = raw.get(key), 0
  if found is None and isinstance(inner, Mapping):
    if inner.get("use_aux_hidden_state") is False:
      raise UnsupportedModel("use_aux_hidden_state=false is not supported; supported are heads of three features")
    found, offset = inner.get(key), 1
  if found is None:
    found, offset = [2, num_layers // 2, num_layers - 3], 0
  if not isinstance(found, list) or len(found) != NUM_FEATURES or not all(type(each) is int for each in found):
    raise UnsupportedModel(f"{key}={found!r:.80} must be a list of {NUM_FEATURES} numbers of layers")
  layers = tuple(each + offset for each in found)
  if min(layers) < 0 or max(layers) >= num_layers:
    raise UnsupportedModel(
      f"{key}={found} names inputs of layers {min(layers)} to {max(layers)}, but the model has layers 0 to "
      f"{num_layers - 1}; use the head of this model, or add the key"
    )
  return layers


class EagleHead(nnx.Module):
  """The head, on one device. T: tokens, D: width of the head, V: tokens that it may propose."""

  def __init__(self, config: EagleConfig, dtype: jnp.dtype, form: WeightForm):
    layer = config.model
    (declared,) = layer.layers
    d, k, g, h = layer.model_dim, declared.num_kv_heads, declared.group_size, declared.head_dim

    def norm() -> RMSNorm:
      return RMSNorm(d, layer.rms_norm_eps, dtype, ordered=form.orders_norms)

    self.config, self.declared = config, declared
    self.fc = Linear.declare((NUM_FEATURES * config.target_dim, d), (None, "embed"), dtype, form.at("fc"))
    self.token_norm, self.feature_norm = norm(), norm()
    heads = ("kv_heads", None, None)
    self.qkv = Linear.declare((2 * d, k, g + 2, h), ("embed", *heads), dtype, form.at("qkv"))
    self.out = Linear.declare((k, g, h, d), (*heads, "embed"), dtype, form.at("out"), num_inputs=3)
    self.mlp_norm = norm()
    self.mlp = GatedMLP(layer, dtype, form.at("mlp"))
    self.final_norm = norm()
    self.head = Linear.declare((d, layer.vocab_size), ("embed", "vocab"), dtype, form.at("head"))
    self.target_ids = param((layer.vocab_size,), (None,), jnp.dtype(jnp.int32))

  def fuse_features(self, states: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """[T, 3 * target_dim], the states of the three layers side by side -> features [T, D]."""
    return self.fc(states, num_rows=num_tokens)

  def project(self, embedded: jax.Array, features: jax.Array, positions: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """Returns queries, keys and values [T, K, G + 2, H] before rotation.

    Args:
      embedded: [T, D], rows of the embedding.
      features: [T, D], each of the position before the token's.
      positions: int32[T].
      num_tokens: int32[1], as in Decoder.hidden.
    """
    x = jnp.concatenate([self.token_norm(embedded), self.feature_norm(features)], axis=-1)
    # The first token has no feature before it, and heads are trained without it. With zeros for its whole input, its
    # key scores 0 and its value adds nothing.
    x = jnp.where((positions > 0)[:, None], x, 0)
    return self.qkv(x, num_rows=num_tokens)

  def attend_to_pages(
    self, qkv: jax.Array, positions: jax.Array, cache: Any, meta: Any, attend: Attend
  ) -> tuple[jax.Array, Any]:
    """Stores keys and values and attends: [T, K, G + 2, H] -> [T, N, H], cache."""
    return attend(self.declared, qkv, *rotation(positions, self.declared), cache, meta)

  def finish_layer(self, features: jax.Array, attended: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """[T, D], [T, N, H] -> hidden states [T, D] before the last norm, which are features of the next position."""
    residual = self.feature_norm(features) if self.config.norm_before_residual else features
    attended = attended.reshape(attended.shape[0], *self.out.inputs)
    y = self.out(attended, residual=residual, num_rows=num_tokens)
    return self.mlp(y, self.mlp_norm, None, num_tokens, None)

  def score_tokens(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
    """[T, D] -> logits f32[T, V]; `target_ids` has the served model's ids."""
    return self.head(hidden, norm=self.final_norm, num_rows=num_rows, dtype=jnp.dtype(jnp.float32))


class EmbeddedHead(nnx.Module):
  """A head and the embedding of its tokens: the served model's, its own, or None where nobody looks tokens up."""

  def __init__(self, head: EagleHead, embed: Embedding | None):
    self.head, self.embed = head, embed

  def look_up(self, tokens: jax.Array, dtype: Any) -> jax.Array:
    """int32[T] -> [T, D] of `dtype`; without a family's multiplier, which heads are not trained with."""
    assert self.embed is not None
    return self.embed.matrix.lines(tokens).astype(dtype)


def declare_head(config: EagleConfig, dtype: jnp.dtype, form: WeightForm) -> EmbeddedHead:
  """Returns a head of abstract arrays, with its own embedding if it has one.

  Args: form: of its matrices. Raises UnsupportedForm.
  """

  def declare() -> EmbeddedHead:
    embed = None
    if config.has_embedding:
      spec = MatrixSpec((config.model.model_dim, config.target_vocab_size), ("embed", "vocab"), 1, dtype)
      embed = Embedding(declare_table(spec, form.at("embed")))
    return EmbeddedHead(EagleHead(config, dtype, form.at("head")), embed)

  return nnx.eval_shape(declare)


def eagle_tensors(config: EagleConfig) -> TensorMap:
  """Returns the tensors of every parameter, by dotted path in the EmbeddedHead.

  The names are those of EAGLE's own checkpoints; `canonical_name` maps others to them. `target_ids` has no piece.
  """
  layer, v = config.model, config.model.vocab_size
  d, f, h = layer.model_dim, layer.hidden_dim, layer.head_dim
  n, k, g = layer.num_heads, layer.num_kv_heads, layer.group_size
  heads = (("q", n, g, 0), ("k", k, 1, g), ("v", k, 1, g + 1))  # as in llama_tensors
  out: TensorMap = {
    "head.fc": transposed("fc.weight", d, NUM_FEATURES * config.target_dim),
    "head.token_norm.scale": vector("midlayer.input_layernorm.weight", d),
    "head.feature_norm.scale": vector("midlayer.hidden_norm.weight", d),
    "head.qkv": tuple(
      Piece(
        f"midlayer.self_attn.{name}_proj.weight", (count * h, 2 * d), (k, beside, h, 2 * d), (3, 0, 1, 2), ((2, at),)
      )
      for name, count, beside, at in heads
    ),
    "head.out": (Piece("midlayer.self_attn.o_proj.weight", (d, n * h), (d, k, g, h), (1, 2, 3, 0)),),
    "head.mlp_norm.scale": vector("midlayer.post_attention_layernorm.weight", d),
    "head.mlp.gate_up": tuple(
      Piece(f"midlayer.mlp.{name}_proj.weight", (f, d), (1, f, d), (2, 0, 1), ((1, at),))
      for at, name in enumerate(("gate", "up"))
    ),
    "head.mlp.down": transposed("midlayer.mlp.down_proj.weight", d, f),
    "head.final_norm.scale": vector("norm.weight", d),
    "head.head": transposed("lm_head.weight", v, d),
  }
  if config.has_embedding:
    shape = config.target_vocab_size, d
    out["embed"] = (Piece("embed_tokens.weight", shape, shape, (0, 1)),)
  return out


def canonical_name(name: str) -> str:
  """Returns the name that EAGLE's own checkpoints give a tensor, from that of any checkpoint."""
  name = name.removeprefix("model.")
  return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
