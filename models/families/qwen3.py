"""Qwen3, dense: RMS norms on query and key heads; the head size does not follow from the width."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.families.common import read_llama_shape
from models.families.qwen2 import WINDOW_KEYS, read_qwen_windows


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads Qwen3; its window rules are Qwen2's."""
  windows = read_qwen_windows(raw)
  return read_llama_shape(
    raw, "qwen3", max_position=32_768, head_dim=128, num_kv_heads=32, windows=windows, reads=WINDOW_KEYS, qk_norm=True
  )
