"""config.json of every family, in old and new spellings; and by name what is refused."""

import jax
import jax.numpy as jnp
import pytest

from engine.device.weights import parameter_name
from models import llama
from models.config import ModelConfig, RopeScaling
from models.families import UnsupportedModel
from models.registry import FAMILIES, config_from_hf, tensors
from tools.parity.cases import CASES

# As published, what Sluice does not read left in.
LLAMA_2_7B_EARLY = {
  "architectures": ["LlamaForCausalLM"],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 11008,
  "max_position_embeddings": 2048,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "pad_token_id": 0,
  "rms_norm_eps": 1e-06,
  "tie_word_embeddings": False,
  "torch_dtype": "float16",
  "use_cache": True,
  "vocab_size": 32000,
}
LLAMA_3_1_8B = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "eos_token_id": [128001, 128008, 128009],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "vocab_size": 128256,
}
MISTRAL_7B_V01 = {
  "architectures": ["MistralForCausalLM"],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 32768,
  "model_type": "mistral",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "sliding_window": 4096,
  "tie_word_embeddings": False,
  "vocab_size": 32000,
}
QWEN2_5_05B = {
  "architectures": ["Qwen2ForCausalLM"],
  "hidden_act": "silu",
  "hidden_size": 896,
  "intermediate_size": 4864,
  "max_position_embeddings": 32768,
  "max_window_layers": 24,
  "model_type": "qwen2",
  "num_attention_heads": 14,
  "num_hidden_layers": 24,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 32768,
  "tie_word_embeddings": True,
  "use_mrope": False,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
QWEN3_06B = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 1024,
  "intermediate_size": 3072,
  "max_position_embeddings": 40960,
  "max_window_layers": 28,
  "model_type": "qwen3",
  "num_attention_heads": 16,
  "num_hidden_layers": 28,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": True,
  "use_sliding_window": False,
  "vocab_size": 151936,
}


def without(raw: dict, *keys: str) -> dict:
  return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize(
  "raw, expected",
  [
    (LLAMA_2_7B_EARLY, ModelConfig("llama", 32000, 32, 4096, 11008, 32, 32, 128, 2048, rms_norm_eps=1e-6)),
    (
      LLAMA_3_1_8B,
      ModelConfig(
        "llama", 128256, 32, 4096, 14336, 32, 8, 128, 131072, 500_000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
      ),
    ),
    (MISTRAL_7B_V01, ModelConfig("mistral", 32000, 32, 4096, 14336, 32, 8, 128, 32768, sliding_window=4096)),
    (
      QWEN2_5_05B,
      ModelConfig(
        "qwen2", 151936, 24, 896, 4864, 14, 2, 64, 32768, 1e6, rms_norm_eps=1e-6, tie_embeddings=True, qkv_bias=True
      ),
    ),
    (
      QWEN3_06B,
      ModelConfig(
        "qwen3", 151936, 28, 1024, 3072, 16, 8, 128, 40960, 1e6, rms_norm_eps=1e-6, tie_embeddings=True, qk_norm=True
      ),
    ),
  ],
  ids=["llama2", "llama3.1", "mistral", "qwen2.5", "qwen3"],
)
def test_published_configs(raw, expected):
  assert config_from_hf(raw) == expected


LINEAR = {"factor": 4.0}


@pytest.mark.parametrize(
  "change, theta, scaling",
  [
    ({}, 10_000.0, None),
    ({"rope_scaling": None, "rope_theta": 5e5}, 5e5, None),
    ({"rope_scaling": LINEAR | {"type": "linear"}}, 10_000.0, RopeScaling("linear", 4.0)),
    ({"rope_scaling": LINEAR | {"rope_type": "linear", "type": "linear"}}, 10_000.0, RopeScaling("linear", 4.0)),
    ({"rope_parameters": LINEAR | {"rope_type": "linear", "rope_theta": 5e5}}, 5e5, RopeScaling("linear", 4.0)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
  ],
)
def test_rope_spellings(change, theta, scaling):
  config = config_from_hf(LLAMA_2_7B_EARLY | change)
  assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_mistral_window_of_a_config_that_does_not_say():
  assert config_from_hf(without(MISTRAL_7B_V01, "sliding_window")).sliding_window == 4096
  assert config_from_hf(MISTRAL_7B_V01 | {"sliding_window": None}).sliding_window is None


def test_qwen_window_is_all_layers_or_none():
  windowed = QWEN2_5_05B | {"use_sliding_window": True, "sliding_window": 1024}
  assert config_from_hf(windowed).sliding_window is None  # every layer is below max_window_layers
  assert config_from_hf(windowed | {"max_window_layers": 0}).sliding_window == 1024
  with pytest.raises(UnsupportedModel, match="some layers only"):
    config_from_hf(windowed | {"max_window_layers": 12})
  with pytest.raises(UnsupportedModel, match="some layers only"):
    config_from_hf(windowed | {"layer_types": ["full_attention", "sliding_attention"] * 12})


def test_model_type_stands_in_for_architectures():
  assert config_from_hf(without(QWEN3_06B, "architectures")) == config_from_hf(QWEN3_06B)


@pytest.mark.parametrize(
  "change, said",
  [
    ({"architectures": ["GemmaForCausalLM"]}, r"GemmaForCausalLM.*LlamaForCausalLM, MistralForCausalLM, Qwen2"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"architectures": None, "model_type": "mixtral"}, "mixtral"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*'default', 'linear' and 'llama3'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "'yarn'"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0.0 must be a positive"),
    (
      {
        "rope_scaling": {
          "rope_type": "llama3",
          "factor": 8.0,
          "low_freq_factor": 4.0,
          "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192,
        }
      },
      "low_freq_factor=4.0",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"num_local_experts": 8}, "mixture-of-experts"),
    ({"hidden_act": "gelu"}, "'gelu'.*'silu'"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "4096"}, "hidden_size='4096' must be of type int"),
    ({"vocab_size": True}, "vocab_size=True"),
    ({"num_hidden_layers": -1}, "num_layers=-1"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"num_attention_heads": 30}, "not a multiple"),
    ({"num_key_value_heads": 5}, "num_kv_heads=5"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
  ],
)
def test_unsupported_is_refused_by_name(change, said):
  with pytest.raises(ValueError, match=said):
    config_from_hf(LLAMA_2_7B_EARLY | change)


@pytest.mark.parametrize("name", CASES)
def test_the_tensor_map_is_the_decoder(name):
  """Every parameter has its tensors, and they fill its shape exactly; nothing else is asked for."""
  config = config_from_hf(CASES[name][0])
  assert config.family in FAMILIES
  shapes = {
    parameter_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(llama.abstract(config, jnp.float32)[1])
  }
  pieces = tensors(config)
  assert set(pieces) == set(shapes)
  for parameter, parts in pieces.items():
    filled = 0
    for part in parts:
      permuted = [part.split[axis] for axis in part.order]
      assert part.start == filled
      filled += permuted[part.axis]
      permuted[part.axis] = shapes[parameter][part.axis]
      assert tuple(permuted) == shapes[parameter]
    assert filled == shapes[parameter][parts[0].axis]
