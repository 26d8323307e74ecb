"""What a decoder is, as numbers: frozen and hashable, so that it may be static in a program. No jax here."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Rotary frequency scaling.

  `llama3` stretches only the low frequencies (Llama 3.1, section on long context); `linear` divides
  every frequency by `factor` (position interpolation, arXiv:2306.15595).
  """

  kind: Literal["llama3", "linear"]
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192


# What the gates of the MLP go through; gelu_tanh is GELU by its approximation with tanh.
Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class LayerAttention:
  """How one layer attends.

  Layers with equal declarations form a group: one plan a step, one KV layout, one block table.

  Attributes:
    num_heads, num_kv_heads, head_dim: N, K, H.
    scale: what a score is multiplied by.
    rope_theta: base of the rotary frequencies.
    rope_scaling: of these frequencies.
    rotary_dim: how many of the head's dimensions, those in front, are rotated.
    window: how many tokens a query sees, itself among them; None: all up to itself.
    soft_cap: a score s becomes soft_cap * tanh(s / soft_cap); None: it stays.
    has_sinks: each query head has a learned score that takes part in the softmax and has no value.
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
    """What decides on the rotation; layers in which this is equal rotate alike."""
    return self.rope_theta, self.rope_scaling, self.rotary_dim, self.head_dim


# Well above any model there is: what a file asks for beyond these is a mistake, found before anything is made of it.
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
  """Raises ValueError unless the value of a field, by the field's name, is one that a model may have."""
  if not isinstance(value, int) or value < 1:
    raise ValueError(f"model config: {name}={value!r} must be a positive integer")
  limit = _LIMITS[name]
  if value > limit:
    raise ValueError(f"model config: {name}={value!r:.40} is above {limit}, which no model needs; correct the file")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder, as numbers. Axis letters are those of `models/layers.py`.

  What a layer's attention is, `layers` says, and nothing else need be asked. It follows from the fields here, unless
  `layer_attention` gives a declaration for each layer, as families do whose layers differ.
  """

  family: str  # a key of models.registry.FAMILIES
  vocab_size: int  # V
  num_layers: int  # L
  model_dim: int  # D
  hidden_dim: int  # F
  num_heads: int  # N
  num_kv_heads: int  # K
  head_dim: int  # H
  max_position: int  # longest sequence the weights were made for, in tokens
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  rms_norm_eps: float = 1e-5
  tie_embeddings: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int | None = None
  attention_scale: float | None = None  # what a score is multiplied by; None: one over the root of H
  embedding_multiplier: float = 1.0  # of the embedding, before the first layer
  residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
  logits_divisor: float = 1.0
  logits_soft_cap: float | None = None  # a logit x becomes cap * tanh(x / cap)
  activation: Activation = "silu"
  post_norms: bool = False  # of what attention and MLP add, besides those of what they get
  norm_offset: float = 0.0  # added to the scale of every norm
  layer_attention: tuple[LayerAttention, ...] = ()

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
        f"model config: {len(self.layer_attention)} attentions are declared for {self.num_layers} layers"
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
    """The layers of every group, in the order of their first ones."""
    groups: dict[LayerAttention, tuple[int, ...]] = {}
    for number, layer in enumerate(self.layers):
      groups[layer] = (*groups.get(layer, ()), number)
    return groups
