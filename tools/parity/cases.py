"""The small random checkpoints that parity compares Sluice and transformers on: all arithmetic that a family adds.

Every shape is asymmetric on purpose (groups of three, head size unlike the width), so that a swapped axis fails.
"""

import pathlib
import tempfile
from typing import Any

import numpy as np

from tools.make_random_model import write_model
from tools.quantize.__main__ import quantize_folder
from tools.quantize.compressed_folder import Scheme

# Long enough for Mistral's window, Llama 3's bands and all position wavelengths to matter.
PROMPT_LENGTHS = (61, 9)
NEW_TOKENS = 200
VOCAB_SIZE = 256
PAD_TOKEN_ID = 0

_SHAPE = {
  "vocab_size": VOCAB_SIZE,
  "hidden_size": 96,
  "intermediate_size": 208,
  "num_hidden_layers": 4,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "max_position_embeddings": 512,
  "rms_norm_eps": 1e-5,
  "hidden_act": "silu",
  "tie_word_embeddings": False,
  "bos_token_id": None,
  "eos_token_id": None,
}


def _config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
  return {"architectures": [architecture], "model_type": model_type, **_SHAPE, **changes}


def _without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
  return {key: value for key, value in config.items() if key not in keys}


GEMMA_ACTIVATION = "gelu_pytorch_tanh"

# name -> (config.json, number of safetensors files)
CASES: dict[str, tuple[dict[str, Any], int]] = {
  # As the first models were: as many KV heads as query heads, neither rope nor head size given. The epsilon is large
  # enough to matter.
  "llama2": (_config("LlamaForCausalLM", "llama", num_key_value_heads=6, rms_norm_eps=1e-2), 1),
  # An original length of 64 puts these frequencies in all three bands: kept, blended and stretched.
  "llama3": (
    _config(
      "LlamaForCausalLM",
      "llama",
      rope_theta=500_000.0,
      rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
      },
    ),
    3,
  ),
  "llama_linear": (
    _config(
      "LlamaForCausalLM", "llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    ),
    1,
  ),
  "mistral": (_config("MistralForCausalLM", "mistral", sliding_window=24, head_dim=32, rope_theta=10_000.0), 2),
  "qwen2": (
    _config(
      "Qwen2ForCausalLM",
      "qwen2",
      tie_word_embeddings=True,
      rope_theta=1_000_000.0,
      rms_norm_eps=1e-6,
      use_sliding_window=False,
      sliding_window=24,
      max_window_layers=2,
    ),
    1,
  ),
  "qwen3": (
    _config(
      "Qwen3ForCausalLM",
      "qwen3",
      head_dim=32,
      rms_norm_eps=1e-6,
      attention_bias=False,
      rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
    2,
  ),
  # Numbers unlike each other and unlike one, so that a missing or swapped one shows.
  "granite": (
    _config(
      "GraniteForCausalLM",
      "granite",
      rope_theta=10_000.0,
      attention_bias=False,
      mlp_bias=False,
      embedding_multiplier=3.0,
      attention_multiplier=0.4,
      residual_multiplier=0.6,
      logits_scaling=1.6,
    ),
    1,
  ),
  # A Mistral file that names the layers with the window, which makes it a Ministral one.
  "ministral": (
    _config(
      "MistralForCausalLM",
      "mistral",
      sliding_window=20,
      head_dim=32,
      rope_theta=10_000.0,
      layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    ),
    1,
  ),
  # Caps low enough that most scores and many logits bend, a scale that is not the head size's, and a tied head without
  # a key for it.
  "gemma2": (
    _without(
      _config(
        "Gemma2ForCausalLM",
        "gemma2",
        head_dim=32,
        rope_theta=10_000.0,
        hidden_act=GEMMA_ACTIVATION,
        hidden_activation=GEMMA_ACTIVATION,
        query_pre_attn_scalar=20,
        sliding_window=24,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=9.0,
      ),
      "tie_word_embeddings",
    ),
    1,
  ),
  # Layers with a window and the others have frequencies of different theta and scaling.
  "gemma3": (
    _without(
      _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        head_dim=32,
        rope_theta=200_000.0,
        rope_local_base_freq=5_000.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        hidden_activation=GEMMA_ACTIVATION,
        query_pre_attn_scalar=50,
        sliding_window=20,
        sliding_window_pattern=3,
      ),
      "hidden_act",
    ),
    2,
  ),
}


def _head(name: str, architecture: str) -> dict[str, Any]:
  return {"architectures": [architecture]} | ({"model_type": name} if name == "ministral" else {})


# Checkpoints without a head of tokens: name -> (config.json, number of files). Heads of one class have no padding.
HEAD_CASES: dict[str, tuple[dict[str, Any], int]] = {
  **{
    f"{name}_classes": (
      CASES[name][0]
      | _head(name, architecture)
      | {"id2label": {str(index): f"class {index}" for index in range(number)}}
      | ({"pad_token_id": PAD_TOKEN_ID} if number > 1 else {}),
      CASES[name][1],
    )
    for name, architecture, number in (
      ("llama3", "LlamaForSequenceClassification", 3),
      ("mistral", "MistralForSequenceClassification", 5),
      ("ministral", "MinistralForSequenceClassification", 1),
      ("qwen2", "Qwen2ForSequenceClassification", 4),
      ("qwen3", "Qwen3ForSequenceClassification", 1),
      ("gemma2", "Gemma2ForSequenceClassification", 2),
      ("gemma3", "Gemma3TextForSequenceClassification", 3),
    )
  },
  **{
    f"{name}_states": (CASES[name][0] | _head(name, architecture), CASES[name][1])
    for name, architecture in (
      ("llama3", "LlamaModel"),
      ("mistral", "MistralModel"),
      ("ministral", "MinistralModel"),
      ("qwen2", "Qwen2Model"),
      ("qwen3", "Qwen3Model"),
      ("granite", "GraniteModel"),
      ("gemma2", "Gemma2Model"),
      ("gemma3", "Gemma3TextModel"),
    )
  },
}


# Folders that tools.quantize writes of a case, in all its forms.
QUANTIZED_CASES: dict[str, tuple[str, Scheme]] = {
  "int4": ("llama3", Scheme(4, 16)),
  "int8": ("qwen2", Scheme(8)),
  "w8a8": ("llama3", Scheme(8, quantizes_activations=True)),
}


def seed(name: str) -> int:
  """Returns the seed of a case's weights and prompts."""
  if name in HEAD_CASES:
    return 40 + list(HEAD_CASES).index(name)
  return 20 + list(CASES).index(name)


def head_prompts(name: str) -> list[list[int]]:
  """Returns the prompts of a case of HEAD_CASES; the second ends with padding, the third is nothing else."""
  rng = np.random.default_rng(seed(name))
  first, second = ([int(token) for token in rng.integers(1, VOCAB_SIZE, size=length)] for length in PROMPT_LENGTHS)
  return [first, [*second, PAD_TOKEN_ID, PAD_TOKEN_ID], [PAD_TOKEN_ID, PAD_TOKEN_ID]]


def write_case(name: str, output: pathlib.Path) -> None:
  """Writes the Hugging Face folder of a case, f32."""
  raw, num_shards = (CASES | HEAD_CASES)[name]
  write_model(output, raw, seed(name), num_shards=num_shards)


def quantized_prompt(name: str) -> list[int]:
  """Returns the prompt of a case of QUANTIZED_CASES."""
  rng = np.random.default_rng(60 + list(QUANTIZED_CASES).index(name))
  return rng.integers(VOCAB_SIZE, size=PROMPT_LENGTHS[0]).tolist()


def write_quantized_case(name: str, output: pathlib.Path) -> None:
  """Writes the folder of a case of QUANTIZED_CASES."""
  base, scheme = QUANTIZED_CASES[name]
  with tempfile.TemporaryDirectory() as plain:
    write_case(base, pathlib.Path(plain) / base)
    quantize_folder(pathlib.Path(plain) / base, output, scheme)
