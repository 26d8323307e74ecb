"""Gemma 2 and Gemma 3 (its text models): four norms a layer, GELU gates, scaled embeddings, windows in some layers."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from models.config import LayerAttention, ModelConfig
from models.families.common import read, read_llama_shape, read_num_layers, read_positive, read_rope, read_windows
from models.families.keys import UnsupportedModel, check_keys
from models.families.tensor_map import TensorMap, llama_tensors, vector

_ACTIVATION = "gelu_pytorch_tanh"
_READS = (
  "hidden_act",
  "hidden_activation",
  "query_pre_attn_scalar",
  "final_logit_softcapping",
  "sliding_window",
  "sliding_window_size",
)


def read_gemma2(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads Gemma 2: every other layer from the first on has a window; scores and logits have soft caps."""
  num_layers = read_num_layers(raw)
  windows = _read_windows(raw, ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)])
  config = _read_shape(
    raw,
    "gemma2",
    max_position=8192,
    windows=windows,
    reads=("attn_logit_softcapping",),
    logits_soft_cap=_read_cap(raw, "final_logit_softcapping", 30.0),
  )
  cap = _read_cap(raw, "attn_logit_softcapping", 50.0)
  return _with_layers(config, tuple(dataclasses.replace(layer, soft_cap=cap) for layer in config.layers))


def read_gemma3(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads Gemma 3: all but every sixth layer have a window and local frequencies; queries and keys have norms.

  The frequencies are in `rope_theta`, `rope_scaling` and `rope_local_base_freq` or, from transformers 5 on, by layer
  type in `rope_parameters`.
  """
  num_layers, pattern = read_num_layers(raw), read(raw, "sliding_window_pattern", int, 6)
  if pattern < 1:
    raise UnsupportedModel(f"sliding_window_pattern={pattern} must be at least 1")
  types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
  by_type = _rope_by_type(raw)
  config = _read_shape(
    {**raw, **by_type["full_attention"]},
    "gemma3_text",
    max_position=131_072,
    windows=_read_windows(raw, types),
    reads=("sliding_window_pattern", "rope_local_base_freq"),
    logits_soft_cap=_read_cap(raw, "final_logit_softcapping", None),
    qk_norm=True,
  )
  check_keys(by_type["sliding_attention"])
  theta, scaling = read_rope(by_type["sliding_attention"], config.max_position)

  def local(layer: LayerAttention) -> LayerAttention:
    return layer if layer.window is None else dataclasses.replace(layer, rope_theta=theta, rope_scaling=scaling)

  return _with_layers(config, tuple(map(local, config.layers)))


def _rope_by_type(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns, for each layer type, the frequency keys in the form of a file with a single type."""
  thetas = {
    "full_attention": read_positive(raw, "rope_theta", 1_000_000.0),
    "sliding_attention": read_positive(raw, "rope_local_base_freq", 10_000.0),
  }
  given = raw.get("rope_parameters")
  if not given:
    scalings = {"full_attention": raw.get("rope_scaling"), "sliding_attention": None}
    return {kind: {"rope_theta": theta, "rope_scaling": scalings[kind]} for kind, theta in thetas.items()}
  if not isinstance(given, Mapping) or not all(
    kind in thetas and (values is None or isinstance(values, Mapping)) for kind, values in given.items()
  ):
    raise UnsupportedModel(
      f"rope_parameters={given!r:.200} must be an object by layer type; supported are {', '.join(thetas)}"
    )
  if raw.get("rope_scaling"):
    raise UnsupportedModel("rope_parameters and rope_scaling are both given; remove rope_scaling")
  return {
    kind: {"rope_theta": theta, "rope_parameters": dict(given.get(kind) or {"rope_type": "default"})}
    for kind, theta in thetas.items()
  }


def _read_windows(raw: Mapping[str, Any], layer_types: list[str]) -> tuple[int | None, ...]:
  window = read(raw, "sliding_window", int, None) if "sliding_window" in raw else 4096
  again = read(raw, "sliding_window_size", int, window)
  if again != window:
    raise UnsupportedModel(f"sliding_window={window} and sliding_window_size={again} differ; correct one of them")
  return read_windows(raw, window, layer_types)


def _read_cap(raw: Mapping[str, Any], key: str, default: float | None) -> float | None:
  """Reads a soft cap; null, unlike an absent key, means none."""
  if key not in raw:
    return default
  return None if raw[key] is None else read_positive(raw, key)


def _read_shape(raw: Mapping[str, Any], family: str, *, reads: tuple[str, ...], **traits: Any) -> ModelConfig:
  for key in ("hidden_act", "hidden_activation"):
    activation = read(raw, key, str, _ACTIVATION)
    if activation != _ACTIVATION:
      raise UnsupportedModel(f"{key}={activation!r:.80} is not supported; supported is {_ACTIVATION!r}")
  config = read_llama_shape(
    {"tie_word_embeddings": True, **raw},
    family,
    head_dim=256,
    num_kv_heads=4,
    reads=(*_READS, *reads),
    attention_scale=read_positive(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
    activation="gelu_tanh",
    post_norms=True,
    norm_offset=1.0,
    **traits,
  )
  return dataclasses.replace(config, embedding_multiplier=config.model_dim**0.5)


def _with_layers(config: ModelConfig, layers: tuple[LayerAttention, ...]) -> ModelConfig:
  return dataclasses.replace(config, sliding_window=None, layer_attention=layers)


def gemma_tensors(config: ModelConfig) -> TensorMap:
  """Returns Llama's tensors with Gemma's norms, whose `post_attention_layernorm` follows attention."""
  out = llama_tensors(config)
  for layer in range(config.num_layers):
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    for norm, name in (
      ("attention_post_norm", "post_attention_layernorm"),
      ("mlp_norm", "pre_feedforward_layernorm"),
      ("mlp_post_norm", "post_feedforward_layernorm"),
    ):
      out[f"{ours}.{norm}.scale"] = vector(f"{theirs}.{name}.weight", config.model_dim)
  return out
