"""How a Hugging Face config.json becomes a ModelConfig, family by family. Reads a dict, opens no file, imports no jax.

What Sluice does not compute is refused by name here: a setting that is read past in silence gives fluent nonsense.
"""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig, RopeScaling


class UnsupportedModel(ValueError):
  """config.json asks for what Sluice does not compute, or does not say what it must."""


_REQUIRED = object()


def _read(raw: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
  """`raw[key]` as an int, float, bool or str; null counts as absent."""
  value = raw.get(key)
  if value is None:
    if default is _REQUIRED:
      raise UnsupportedModel(f"{key} is missing; the file must give it as {kind.__name__}")
    return default
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
    raise UnsupportedModel(f"{key}={value!r:.80} must be of type {kind.__name__}")
  return value


def _positive(raw: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> float:
  value = _read(raw, key, float, default)
  if not 0 < value < float("inf"):
    raise UnsupportedModel(f"{key}={value!r} must be a positive finite number")
  return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
  """Settings that change the arithmetic and that no supported family has."""
  if raw.get("quantization_config") is not None:
    method = raw["quantization_config"].get("quant_method") if isinstance(raw["quantization_config"], Mapping) else None
    raise UnsupportedModel(
      f"quantization_config (quant_method={method!r}) is not supported; supported are unquantised "
      "bfloat16, float16 and float32 weights"
    )
  if raw.get("auto_map"):
    raise UnsupportedModel(
      "auto_map asks to run code from the model folder, which Sluice never does; remove auto_map "
      "if the weights are of a supported architecture"
    )
  for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size"):
    if raw.get(key):
      raise UnsupportedModel(
        f"{key}={raw[key]!r}: mixture-of-experts models are not supported; supported are dense ones"
      )
  for key in ("attention_bias", "mlp_bias"):
    if raw.get(key):
      raise UnsupportedModel(
        f"{key}={raw[key]!r} is not supported; supported is false (Qwen2 alone has biases, on query, key and value)"
      )
  act = _read(raw, "hidden_act", str, "silu")
  if act not in ("silu", "swish"):
    raise UnsupportedModel(f"hidden_act={act!r} is not supported; supported is 'silu'")
  partial = _read(raw, "partial_rotary_factor", float, 1.0)
  if partial != 1.0:
    raise UnsupportedModel(f"partial_rotary_factor={partial} is not supported; supported is 1.0")


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Theta and scaling, from either spelling.

  Up to transformers 4: `rope_theta` beside `rope_scaling` (null, or a dict whose kind is `rope_type`, earlier `type`).
  From transformers 5: one dict `rope_parameters` that holds both.
  """
  scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  if not isinstance(scaling, Mapping):
    raise UnsupportedModel(f"rope scaling {scaling!r} must be an object")
  theta = _positive(raw, "rope_theta", 10_000.0)
  theta = _positive(scaling, "rope_theta", theta)
  if any(isinstance(value, Mapping) for value in scaling.values()):
    raise UnsupportedModel(
      f"rope parameters by layer type ({', '.join(scaling)}) are not supported; supported is one set for all layers"
    )
  partial = _read(scaling, "partial_rotary_factor", float, 1.0)
  if partial != 1.0:
    raise UnsupportedModel(f"rope partial_rotary_factor={partial} is not supported; supported is 1.0")
  kind = _read(scaling, "rope_type", str, None) or _read(scaling, "type", str, "default")
  if kind == "default":
    return theta, None
  if kind == "linear":
    return theta, RopeScaling("linear", _positive(scaling, "factor"))
  if kind == "llama3":
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    if low >= high:
      raise UnsupportedModel(f"llama3 rope scaling: low_freq_factor={low} must be below high_freq_factor={high}")
    return theta, RopeScaling(
      "llama3", _positive(scaling, "factor"), low, high, _read(scaling, "original_max_position_embeddings", int)
    )
  raise UnsupportedModel(f"rope type {kind!r} is not supported; supported are 'default', 'linear' and 'llama3'")


def _dense(
  raw: Mapping[str, Any],
  family: str,
  *,
  max_position: int,
  head_dim: int | None = None,
  qkv_bias: bool = False,
  qk_norm: bool = False,
  sliding_window: int | None = None,
) -> ModelConfig:
  """What all families share; the keywords are what differs: defaults of absent keys, and fixed traits."""
  _refuse_unsupported(raw)
  model_dim, num_heads = _read(raw, "hidden_size", int), _read(raw, "num_attention_heads", int)
  if head_dim is None:
    if num_heads < 1 or model_dim % num_heads and raw.get("head_dim") is None:
      raise UnsupportedModel(
        f"hidden_size={model_dim} is not a multiple of num_attention_heads={num_heads}, and head_dim is not given"
      )
    head_dim = model_dim // num_heads
  theta, scaling = _rope(raw)
  return ModelConfig(
    family=family,
    vocab_size=_read(raw, "vocab_size", int),
    num_layers=_read(raw, "num_hidden_layers", int),
    model_dim=model_dim,
    hidden_dim=_read(raw, "intermediate_size", int),
    num_heads=num_heads,
    num_kv_heads=_read(raw, "num_key_value_heads", int, num_heads),
    head_dim=_read(raw, "head_dim", int, head_dim),
    max_position=_read(raw, "max_position_embeddings", int, max_position),
    rope_theta=theta,
    rope_scaling=scaling,
    rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
    tie_embeddings=_read(raw, "tie_word_embeddings", bool, False),
    qkv_bias=qkv_bias,
    qk_norm=qk_norm,
    sliding_window=sliding_window,
  )


def llama(raw: Mapping[str, Any]) -> ModelConfig:
  """Llama 1, 2, 3 and what copies their shape. Llama 1 and early 2 name neither KV heads nor a head size."""
  return _dense(raw, "llama", max_position=2048)


def mistral(raw: Mapping[str, Any]) -> ModelConfig:
  """Mistral 7B and later dense ones: a sliding window in every layer, unless it is null (from v0.2 on)."""
  window = _read(raw, "sliding_window", int, None) if "sliding_window" in raw else 4096
  return _dense(raw, "mistral", max_position=131_072, sliding_window=window)


def _qwen_window(raw: Mapping[str, Any]) -> int | None:
  """The window of every layer; Qwen can leave the first `max_window_layers` without one, Sluice cannot."""
  if not _read(raw, "use_sliding_window", bool, False):
    return None
  window, layers = _read(raw, "sliding_window", int, 4096), _read(raw, "num_hidden_layers", int)
  types = raw.get("layer_types")
  if types is None:
    first = _read(raw, "max_window_layers", int, 28)
    types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
  if types == ["full_attention"] * layers:
    return None
  if types == ["sliding_attention"] * layers:
    return window
  raise UnsupportedModel(
    "use_sliding_window=true with a window in some layers only is not supported; supported is the "
    "same attention in every layer"
  )


def qwen2(raw: Mapping[str, Any]) -> ModelConfig:
  """Qwen2 and Qwen2.5 dense: biases on query, key and value; the small ones tie the head to the embedding."""
  return _dense(raw, "qwen2", max_position=32_768, qkv_bias=True, sliding_window=_qwen_window(raw))


def qwen3(raw: Mapping[str, Any]) -> ModelConfig:
  """Qwen3 dense: RMS norms on query and key heads; the head size is free of the width."""
  return _dense(raw, "qwen3", max_position=32_768, head_dim=128, qk_norm=True, sliding_window=_qwen_window(raw))
