"""Llama 1, 2, 3 and models of their shape."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.families.common import read_llama_shape


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads Llama; files of Llama 1 and early Llama 2 have neither KV heads nor a head size."""
  return read_llama_shape(raw, "llama", max_position=2048)
