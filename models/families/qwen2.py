"""Qwen2 and Qwen2.5, dense: biases on query, key and value; small models tie the head to the embedding."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.families.common import read, read_llama_shape, read_num_layers, read_windows

WINDOW_KEYS = ("sliding_window", "use_sliding_window")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads Qwen2; `read_qwen_windows` reads its windows."""
  windows = read_qwen_windows(raw)
  return read_llama_shape(
    raw, "qwen2", max_position=32_768, num_kv_heads=32, windows=windows, reads=WINDOW_KEYS, qkv_bias=True
  )


def read_qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
  """Returns every layer's window: none without `use_sliding_window`, else by `layer_types` or `max_window_layers`."""
  window = None
  if read(raw, "use_sliding_window", bool, False):
    window = read(raw, "sliding_window", int, None) if "sliding_window" in raw else 4096
  num_layers = read_num_layers(raw)
  first = num_layers if window is None else read(raw, "max_window_layers", int, 28)
  types = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
  return read_windows(raw, window, types)
