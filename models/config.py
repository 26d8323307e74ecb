"""A decoder's configuration, frozen and hashable so that programs may take it as static. May not import jax."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Rotary frequency scaling.

  `llama3` scales only the low frequencies (Llama 3.1, section on long context). `linear` divides every frequency by
  `factor` (position interpolation, arXiv:2306.15595).
  """

  kind: Literal["llama3", "linear"]
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192


# The activation of the MLP's gates; gelu_tanh is the tanh approximation of GELU.
Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class LayerAttention:
  """The attention of one layer.

  Layers with equal declarations form a group: one plan a step, one KV layout, one block table.

  Attributes:
    num_heads, num_kv_heads, head_dim: N, K, H.
    scale: factor of the scores.
    rope_theta: base of the rotary frequencies.
    rope_scaling: scaling of these frequencies.
    rotary_dim: number of leading head dimensions that rotate.
    window: tokens that a query sees, including itself; None: all up to itself.
    soft_cap: a score s becomes soft_cap * tanh(s / soft_cap); None: no cap.
    has_sinks: each query head has a learned score that joins the softmax without a value.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  scale: float
  rope_theta: float
  rope_scaling: RopeScaling | None
  rotary_dim: int
  window: int | None = None
  soft_cap: float | None = None
  has_sinks: bool = False

  @property
  def group_size(self) -> int:
    """Query heads that share one KV head (G)."""
    return self.num_heads // self.num_kv_heads

  @property
  def rope(self) -> tuple[float, RopeScaling | None, int, int]:
    """The parameters of the rotation; layers with equal parameters rotate alike."""
    return self.rope_theta, self.rope_scaling, self.rotary_dim, self.head_dim


# Far above every known model. A larger value is a mistake in the file, which the reader reports before it allocates.
_LIMITS = {
  "vocab_size": 2**24,
  "num_layers": 2**10,
  "model_dim": 2**18,
  "hidden_dim": 2**20,
  "num_heads": 2**12,
  "num_kv_heads": 2**12,
  "head_dim": 2**12,
  "max_position": 2**27,
}


def check_size(name: str, value: int) -> None:
  """Raises ValueError unless `value` is valid for the field `name`."""
  if not isinstance(value, int) or value < 1:
    raise ValueError(f"model config: {name}={value!r} must be a positive integer")
  limit = _LIMITS[name]
  if value > limit:
    raise ValueError(f"model config: {name}={value!r:.40} is above the limit {limit}; correct the file")


# What an output of a head of classes becomes.
ClassActivation = Literal["softmax", "sigmoid", "none"]


@dataclasses.dataclass(frozen=True)
class ClassHead:
  """A head that scores classes from the hidden state of a text's last token; a product with a matrix [C, D].

  Attributes:
    labels: the name of each class.
    activation: what makes probabilities of the C outputs.
    pair_activation: the same for the score of a pair of texts, from a head with one class.
    pad_token_id: a text ends before trailing tokens of this id, as in transformers; -1: there is none.
  """

  labels: tuple[str, ...]
  activation: ClassActivation
  pair_activation: ClassActivation
  pad_token_id: int = -1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The sizes and constants of a decoder. Axis letters are those of `models/layers.py`.

  `layers` holds the attention of every layer, and callers need no other field for it. It follows from the fields here,
  unless a family whose layers differ declares `layer_attention`.
  """

  family: str  # a key of models.registry.FAMILIES
  vocab_size: int  # V
  num_layers: int  # L
  model_dim: int  # D
  hidden_dim: int  # F
  num_heads: int  # N
  num_kv_heads: int  # K
  head_dim: int  # H
  max_position: int  # longest sequence of the training, in tokens
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  rms_norm_eps: float = 1e-5
  tie_embeddings: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int | None = None
  attention_scale: float | None = None  # factor of the scores; None: 1 / sqrt(H)
  embedding_multiplier: float = 1.0  # factor of the embedding, before the first layer
  residual_multiplier: float = 1.0  # factor of each addition to the residual stream
  logits_divisor: float = 1.0
  logits_soft_cap: float | None = None  # a logit x becomes cap * tanh(x / cap)
  activation: Activation = "silu"
  post_norms: bool = False  # norms after attention and MLP, besides those before
  norm_offset: float = 0.0  # added to the scale of every norm
  layer_attention: tuple[LayerAttention, ...] = ()
  has_token_head: bool = True  # logits of tokens; without, the model generates nothing
  class_head: ClassHead | None = None

  def __post_init__(self):
    for name in _LIMITS:
      check_size(name, getattr(self, name))
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"model config: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"model config: head_dim={self.head_dim} must be even for rotary embedding")
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(f"model config: sliding_window={self.sliding_window} must be at least 1")
    if self.layer_attention and len(self.layer_attention) != self.num_layers:
      raise ValueError(
        f"model config: layer_attention has {len(self.layer_attention)} entries for {self.num_layers} layers"
      )
    for layer in self.layer_attention:
      if layer.window is not None and layer.window < 1:
        raise ValueError(f"model config: a layer's window={layer.window} must be at least 1")

  @property
  def group_size(self) -> int:
    """Query heads that share one KV head (G)."""
    return self.num_heads // self.num_kv_heads

  @property
  def layers(self) -> tuple[LayerAttention, ...]:
    """The attention of every layer."""
    if self.layer_attention:
      return self.layer_attention
    every = LayerAttention(
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
      rope_theta=self.rope_theta,
      rope_scaling=self.rope_scaling,
      rotary_dim=self.head_dim,
      window=self.sliding_window,
    )
    return (every,) * self.num_layers

  @property
  def groups(self) -> dict[LayerAttention, tuple[int, ...]]:
    """The layers of every group, ordered by first layer."""
    groups: dict[LayerAttention, tuple[int, ...]] = {}
    for number, layer in enumerate(self.layers):
      groups[layer] = (*groups.get(layer, ()), number)
    return groups
