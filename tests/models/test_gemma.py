"""Gemma 2 and 3: what config.json says becomes what each layer and the decoder compute."""

import pytest

from models.config import RopeScaling
from models.families.keys import UnsupportedModel, unknown_keys
from models.registry import config_from_hf, tensors

# As published, what Sluice does not read left in.
GEMMA_2_2B = {
  "architectures": ["Gemma2ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "attn_logit_softcapping": 50.0,
  "bos_token_id": 2,
  "cache_implementation": "hybrid",
  "eos_token_id": 1,
  "final_logit_softcapping": 30.0,
  "head_dim": 256,
  "hidden_act": "gelu_pytorch_tanh",
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 2304,
  "initializer_range": 0.02,
  "intermediate_size": 9216,
  "max_position_embeddings": 8192,
  "model_type": "gemma2",
  "num_attention_heads": 8,
  "num_hidden_layers": 26,
  "num_key_value_heads": 4,
  "pad_token_id": 0,
  "query_pre_attn_scalar": 224,
  "rms_norm_eps": 1e-06,
  "rope_theta": 10000.0,
  "sliding_window": 4096,
  "torch_dtype": "float32",
  "transformers_version": "4.42.4",
  "use_cache": True,
  "vocab_size": 256000,
}
GEMMA_3_1B = {
  "architectures": ["Gemma3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "attn_logit_softcapping": None,
  "cache_implementation": "hybrid",
  "eos_token_id": [1, 106],
  "final_logit_softcapping": None,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 1152,
  "intermediate_size": 6912,
  "max_position_embeddings": 32768,
  "model_type": "gemma3_text",
  "num_attention_heads": 4,
  "num_hidden_layers": 26,
  "num_key_value_heads": 1,
  "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06,
  "rope_local_base_freq": 10000,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": 512,
  "sliding_window_pattern": 6,
  "torch_dtype": "bfloat16",
  "vocab_size": 262144,
}


def test_gemma_2():
  config = config_from_hf(GEMMA_2_2B)
  assert unknown_keys(GEMMA_2_2B) == ()
  (local, local_layers), (whole, whole_layers) = config.groups.items()
  assert (local.window, whole.window) == (4096, None)
  assert (local_layers, whole_layers) == (tuple(range(0, 26, 2)), tuple(range(1, 26, 2)))
  assert local.scale == whole.scale == 224**-0.5
  assert local.soft_cap == whole.soft_cap == 50.0
  assert local.rope == whole.rope == (10_000.0, None, 256, 256)
  assert (config.logits_soft_cap, config.activation, config.norm_offset) == (30, "gelu_tanh", 1) and config.post_norms
  assert (config.embedding_multiplier, config.tie_embeddings, config.qk_norm) == (48.0, True, False)


def test_gemma_3():
  config = config_from_hf(GEMMA_3_1B)
  assert unknown_keys(GEMMA_3_1B) == ()
  (local, _), (whole, whole_layers) = config.groups.items()
  assert (local.window, local.rope_theta, local.scale, local.soft_cap) == (512, 10_000.0, 1 / 16, None)
  assert (whole.window, whole.rope_theta, whole_layers) == (None, 1_000_000.0, (5, 11, 17, 23))
  assert (config.qk_norm, config.logits_soft_cap, config.tie_embeddings) == (True, None, True)


@pytest.mark.parametrize(
  "change",
  [
    {"rope_theta": 3e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2e4},
    {
      "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
      }
    },
  ],
  ids=["keys", "by layer type"],
)
def test_frequencies_by_layer_type(change):
  """From either spelling; the scaling is of the layers without a window alone."""
  config = config_from_hf(GEMMA_3_1B | {"layer_types": ["full_attention", "sliding_attention"] * 13} | change)
  whole, local = config.groups
  assert (whole.rope_theta, whole.rope_scaling) == (3e5, RopeScaling("linear", 8.0))
  assert (local.rope_theta, local.rope_scaling) == (2e4, None)
  assert unknown_keys(GEMMA_3_1B | change) == ()


def test_absent_and_null_are_not_the_same():
  absent = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "query_pre_attn_scalar", "head_dim")
  defaults = config_from_hf({key: value for key, value in GEMMA_2_2B.items() if key not in absent})
  assert (defaults.layers[0].soft_cap, defaults.logits_soft_cap, defaults.layers[0].window) == (50.0, 30.0, 4096)
  assert (defaults.layers[0].scale, defaults.head_dim) == (1 / 16, 256)
  nulls = config_from_hf(GEMMA_2_2B | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
  assert (nulls.layers[0].soft_cap, nulls.logits_soft_cap) == (None, None)


@pytest.mark.parametrize(
  ("raw", "change", "said"),
  [
    (GEMMA_2_2B, {"hidden_activation": "gelu"}, "hidden_activation='gelu'.*supported is 'gelu_pytorch_tanh'"),
    (GEMMA_2_2B, {"attn_logit_softcapping": -1}, "attn_logit_softcapping=-1.0 must be a positive"),
    (GEMMA_2_2B, {"sliding_window_size": 12}, "sliding_window=4096 and sliding_window_size=12 differ"),
    (GEMMA_2_2B, {"sliding_window": None}, "no window"),
    (GEMMA_2_2B, {"num_hidden_layers": 10**15}, "num_layers=1000000000000000 is above"),
    (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 changes the result"),
    (GEMMA_3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (GEMMA_3_1B, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters=.*by layer type"),
    (GEMMA_3_1B, {"rope_parameters": [1]}, "rope_parameters=.*by layer type"),
    (
      GEMMA_3_1B,
      {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}},
      "'yarn'",
    ),
    (GEMMA_3_1B, {"rope_parameters": {"full_attention": {"mrope_section": [1]}}}, "mrope_section"),
  ],
)
def test_what_gemma_does_not_have_is_refused(raw, change, said):
  with pytest.raises(ValueError, match=said):
    config_from_hf(raw | change)


def test_norms_lie_where_hugging_face_has_them():
  found = tensors(config_from_hf(GEMMA_2_2B))
  names = {name: pieces[0].name for name, pieces in found.items() if name.startswith("layers.3.") and "norm" in name}
  assert names == {
    "layers.3.attention_norm.scale": "model.layers.3.input_layernorm.weight",
    "layers.3.attention_post_norm.scale": "model.layers.3.post_attention_layernorm.weight",
    "layers.3.mlp_norm.scale": "model.layers.3.pre_feedforward_layernorm.weight",
    "layers.3.mlp_post_norm.scale": "model.layers.3.post_feedforward_layernorm.weight",
  }


def test_a_family_that_is_not_text_alone_is_refused():
  with pytest.raises(UnsupportedModel, match="Gemma3ForConditionalGeneration.*is not supported"):
    config_from_hf(GEMMA_3_1B | {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"})
