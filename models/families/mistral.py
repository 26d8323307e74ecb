"""Mistral 7B, later dense Mistral models, and Ministral, whose layers differ in their window."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.families.common import read, read_llama_shape, read_windows


def read_config(raw: Mapping[str, Any], family: str = "mistral") -> ModelConfig:
  """Reads Mistral: all layers have the window unless it is null (from v0.2 on) or `layer_types` selects layers.

  As in transformers, a Mistral file with `layer_types` is a Ministral file, and neither reads `use_sliding_window`.
  """
  window = read(raw, "sliding_window", int, None) if "sliding_window" in raw else 4096
  return read_llama_shape(
    raw,
    family,
    max_position=131_072,
    num_kv_heads=8,
    windows=read_windows(raw, window),
    reads=("sliding_window", "use_sliding_window"),
  )


def read_ministral(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads Ministral, like Mistral."""
  return read_config(raw, "ministral")
