"""Shared readers of config.json: typed values, rotary embedding, windows by layer, and Llama's sizes.

This module reads a dict; it may not open files or import jax.
"""

from collections.abc import Collection, Mapping
import dataclasses
from typing import Any

from models.config import ModelConfig, RopeScaling, check_size
from models.families.keys import ROPE_DICTS, UnsupportedModel, check_keys

_REQUIRED = object()


def read(raw: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
  """Returns `raw[key]` as an int, float, bool or str; null counts as absent."""
  value = raw.get(key)
  if value is None:
    if default is _REQUIRED:
      raise UnsupportedModel(f"{key} is missing; add it to the file as {kind.__name__}")
    return default
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
    raise UnsupportedModel(f"{key}={value!r:.80} must be of type {kind.__name__}")
  return value


def read_positive(raw: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> float:
  """Like `read`, for a float above 0."""
  value = read(raw, key, float, default)
  if not 0 < value < float("inf"):
    raise UnsupportedModel(f"{key}={value!r} must be a positive finite number")
  return value


def read_num_layers(raw: Mapping[str, Any]) -> int:
  """Reads the number of layers, within the limit of a model."""
  num_layers = read(raw, "num_hidden_layers", int)
  check_size("num_layers", num_layers)
  return num_layers


def read_rope(raw: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
  """Reads theta and scaling in either spelling.

  Up to transformers 4, a file has `rope_theta` and `rope_scaling` (null, or a dict with its kind under `rope_type` or
  `type`). From transformers 5, one dict `rope_parameters` holds both. If a file has both dicts, transformers reads only
  `rope_scaling` and ignores a theta in the other; so both must agree.
  """
  given: dict[str, Mapping[str, Any]] = {}
  for name in ROPE_DICTS:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
      raise UnsupportedModel(f"{name}={value!r:.80} must be an object")
    if value:
      given[name] = value
  found = {name: _read_rope_dict(raw, name, values, max_position) for name, values in given.items()}
  if not found:
    return _read_rope_dict(raw, "", {}, max_position)
  first, *others = found.values()
  if any(other != first for other in others):
    both = " and ".join(f"{name}={dict(values)!r:.200}" for name, values in given.items())
    raise UnsupportedModel(f"{both} contradict each other; remove one, and give rope_theta in the other")
  return first


def _read_rope_dict(
  raw: Mapping[str, Any], name: str, values: Mapping[str, Any], max_position: int
) -> tuple[float, RopeScaling | None]:
  if any(isinstance(value, Mapping) for value in values.values()):
    raise UnsupportedModel(
      f"{name} by layer type ({', '.join(values):.80}) is not supported; supported is one set for all layers"
    )
  theta = read_positive(values, "rope_theta", read_positive(raw, "rope_theta", 10_000.0))
  partial = read(values, "partial_rotary_factor", float, read(raw, "partial_rotary_factor", float, 1.0))
  if partial != 1.0:
    raise UnsupportedModel(f"partial_rotary_factor={partial} is not supported; supported is 1.0")
  kind = read(values, "rope_type", str, None) or read(values, "type", str, "default")
  if kind == "default":
    return theta, None
  if kind == "linear":
    return theta, RopeScaling("linear", read_positive(values, "factor"))
  if kind == "llama3":
    low, high = read_positive(values, "low_freq_factor"), read_positive(values, "high_freq_factor")
    if low >= high:
      raise UnsupportedModel(f"llama3 rope scaling: low_freq_factor={low} must be below high_freq_factor={high}")
    # The key next to the dict takes precedence over the one in it.
    original = read(values, "original_max_position_embeddings", int, max_position)
    original = read(raw, "original_max_position_embeddings", int, original)
    if original < 1:
      raise UnsupportedModel(f"original_max_position_embeddings={original} must be at least 1")
    return theta, RopeScaling("llama3", read_positive(values, "factor"), low, high, original)
  raise UnsupportedModel(f"rope type {kind!r:.80} is not supported; supported are 'default', 'linear' and 'llama3'")


def read_windows(
  raw: Mapping[str, Any], window: int | None, layer_types: list[str] | None = None
) -> tuple[int | None, ...]:
  """Returns the window of every layer.

  Args:
    raw: config.json; its `layer_types` names the attention of every layer.
    window: window of the sliding layers; None: no layer may slide.
    layer_types: default for a file without the key; None: all layers slide if there is a window.

  Raises:
    UnsupportedModel: the list has another length, an unknown kind, or a sliding layer without a window.
  """
  num_layers = read_num_layers(raw)
  given = raw.get("layer_types")
  if given is None and layer_types is None:
    return (window,) * num_layers
  types = layer_types if given is None else given
  if not isinstance(types, list) or len(types) != num_layers:
    raise UnsupportedModel(f"layer_types={types!r:.80} must be a list with one entry for each of {num_layers} layers")
  windows = {"full_attention": None, "attention": None, "sliding_attention": window}
  for kind in types:
    if not isinstance(kind, str) or kind not in windows:
      raise UnsupportedModel(
        f"layer_types has {kind!r:.80}; supported are 'full_attention' and 'sliding_attention'; use another model"
      )
  if window is None and "sliding_attention" in types:
    raise UnsupportedModel(
      f"layer_types has 'sliding_attention', but there is no window: sliding_window={raw.get('sliding_window')!r:.80}, "
      f"use_sliding_window={raw.get('use_sliding_window')!r:.80}; set both, or make all layers 'full_attention'"
    )
  return tuple(windows[kind] for kind in types)


def read_llama_shape(
  raw: Mapping[str, Any],
  family: str,
  *,
  max_position: int,
  head_dim: int | None = None,
  num_kv_heads: int | None = None,
  windows: tuple[int | None, ...] | None = None,
  reads: Collection[str] = (),
  **traits: Any,
) -> ModelConfig:
  """Reads the configuration of a decoder with Llama's shape.

  Args:
    raw: config.json.
    family: a key of models.registry.FAMILIES.
    max_position, head_dim, num_kv_heads: defaults for a file without the key. Null, unlike an absent key, and a default
      of None mean that the heads share the width and that there are as many KV heads as query heads.
    windows: window of every layer; None: no layer may slide.
    reads: keys that the family reads itself.
    traits: further fields of ModelConfig.
  """
  check_keys(raw, reads)
  model_dim, num_heads = read(raw, "hidden_size", int), read(raw, "num_attention_heads", int)
  if head_dim is None:
    if num_heads < 1 or model_dim % num_heads and raw.get("head_dim") is None:
      raise UnsupportedModel(
        f"hidden_size={model_dim} is not a multiple of num_attention_heads={num_heads}; correct them or add head_dim"
      )
    head_dim = model_dim // num_heads
  default_kv_heads = num_heads if num_kv_heads is None or "num_key_value_heads" in raw else num_kv_heads
  max_position = read(raw, "max_position_embeddings", int, max_position)
  theta, scaling = read_rope(raw, max_position)
  windows = read_windows(raw, None) if windows is None else windows
  config = ModelConfig(
    family=family,
    vocab_size=read(raw, "vocab_size", int),
    num_layers=len(windows),
    model_dim=model_dim,
    hidden_dim=read(raw, "intermediate_size", int),
    num_heads=num_heads,
    num_kv_heads=read(raw, "num_key_value_heads", int, default_kv_heads),
    head_dim=read(raw, "head_dim", int, head_dim),
    max_position=max_position,
    rope_theta=theta,
    rope_scaling=scaling,
    rms_norm_eps=read_positive(raw, "rms_norm_eps", 1e-6),
    tie_embeddings=read(raw, "tie_word_embeddings", bool, False),
    sliding_window=windows[0],
    **traits,
  )
  if len(set(windows)) < 2:
    return config
  layers = tuple(dataclasses.replace(config.layers[0], window=window) for window in windows)
  return dataclasses.replace(config, sliding_window=None, layer_attention=layers)
