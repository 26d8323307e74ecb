"""Granite 3, dense: Llama with multipliers of embeddings, scores, residual branches and logits."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.families.common import read_llama_shape, read_positive

_READS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads Granite: `attention_multiplier` replaces 1 / sqrt(head size), and `logits_scaling` divides logits."""
  return read_llama_shape(
    raw,
    "granite",
    max_position=2048,
    reads=_READS,
    embedding_multiplier=read_positive(raw, "embedding_multiplier", 1.0),
    attention_scale=read_positive(raw, "attention_multiplier", 1.0),
    residual_multiplier=read_positive(raw, "residual_multiplier", 1.0),
    logits_divisor=read_positive(raw, "logits_scaling", 1.0),
  )
