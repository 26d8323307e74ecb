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


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A dense decoder of the Llama shape.

  The families differ only in these values: Qwen2 has `qkv_bias`, Qwen3 has `qk_norm`, Mistral may have a
  `sliding_window`. Axis letters are those of `models/layers.py`.
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

  def __post_init__(self):
    for name, limit in _LIMITS.items():
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"model config: {name}={value!r} must be a positive integer")
      if value > limit:
        raise ValueError(f"model config: {name}={value!r:.40} is above {limit}, which no model needs; correct the file")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"model config: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"model config: head_dim={self.head_dim} must be even for rotary embedding")
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(f"model config: sliding_window={self.sliding_window} must be at least 1")

  @property
  def group_size(self) -> int:
    """Query heads that share one KV head (G)."""
    return self.num_heads // self.num_kv_heads
