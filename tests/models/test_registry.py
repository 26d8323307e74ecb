"""config.json of every family, in old and new spellings; and by name what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device.weights import parameter_name
from models.config import ClassHead, ModelConfig, RopeScaling
from models.families.keys import KEYS, Must, UnsupportedModel, unknown_keys
from models.registry import FAMILIES, abstract, architecture_of, config_from_hf, refuse_uncomputed, tensors
from tools.parity.cases import CASES, HEAD_CASES

IDENTITY = "torch.nn.modules.linear.Identity"

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


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
  "old, new, said",
  [
    # As transformers 5 saves a model, and what its user then adds for long prompts.
    (YARN, {"rope_type": "default", "rope_theta": 1e6}, "'yarn' is not supported"),
    (
      LINEAR | {"type": "linear"},
      {"rope_type": "default", "rope_theta": 1e4},
      "rope_scaling=.*rope_parameters=.*contra",
    ),
    # transformers reads the first, and takes 10,000 for the theta that only the second has.
    (LINEAR | {"type": "linear"}, LINEAR | {"rope_type": "linear", "rope_theta": 1e6}, "contradict each other"),
    (LLAMA3 | {"factor": 4.0}, LLAMA3, "contradict each other"),
  ],
)
def test_two_rope_dicts_must_say_the_same(old, new, said):
  with pytest.raises(UnsupportedModel, match=said):
    config_from_hf(LLAMA_2_7B_EARLY | {"rope_scaling": old, "rope_parameters": new})


@pytest.mark.parametrize(
  "change",
  [
    {
      "rope_scaling": LINEAR | {"type": "linear"},
      "rope_parameters": LINEAR | {"rope_type": "linear", "rope_theta": 1e4},
    },
    {"rope_scaling": LINEAR | {"type": "linear"}, "rope_parameters": {}},
    {"rope_scaling": {}, "rope_parameters": LINEAR | {"rope_type": "linear"}},
    {"rope_scaling": None, "rope_parameters": LINEAR | {"rope_type": "linear"}},
  ],
)
def test_two_rope_dicts_that_agree(change):
  assert config_from_hf(LLAMA_2_7B_EARLY | change).rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
  "beside, inside, original",
  [(None, 4096, 4096), (1024, 4096, 1024), (1024, None, 1024), (None, None, 131072)],
)
def test_the_original_length_of_llama3_scaling(beside, inside, original):
  """The key beside the dict goes before the one in it; without either it is max_position_embeddings."""
  scaling = LLAMA3 | {"original_max_position_embeddings": inside}
  config = config_from_hf(LLAMA_3_1_8B | {"rope_scaling": scaling, "original_max_position_embeddings": beside})
  assert config.rope_scaling is not None and config.rope_scaling.original_max_position == original


def test_mistral_window_of_a_config_that_does_not_say():
  assert config_from_hf(without(MISTRAL_7B_V01, "sliding_window")).sliding_window == 4096
  assert config_from_hf(MISTRAL_7B_V01 | {"sliding_window": None}).sliding_window is None


FULL, SLIDING = "full_attention", "sliding_attention"


def windows(raw: dict) -> list[int | None]:
  return [layer.window for layer in config_from_hf(raw).layers]


@pytest.mark.parametrize(
  "change, expected",
  [
    ({}, [None] * 24),  # every layer is below max_window_layers
    ({"max_window_layers": 0}, [1024] * 24),
    ({"max_window_layers": 12}, [None] * 12 + [1024] * 12),
    ({"layer_types": [FULL, SLIDING] * 12}, [None, 1024] * 12),
    ({"layer_types": [FULL] * 24, "max_window_layers": 0}, [None] * 24),
    ({"sliding_window": None, "max_window_layers": 0}, [None] * 24),  # null is no window, absent is one of 4096
    ({"use_sliding_window": False, "max_window_layers": 0}, [None] * 24),
    ({"use_sliding_window": False, "layer_types": [FULL] * 24}, [None] * 24),
  ],
)
def test_qwen_windows(change, expected):
  assert windows(QWEN2_5_05B | {"use_sliding_window": True, "sliding_window": 1024} | change) == expected


def test_qwen_window_that_the_file_does_not_give():
  raw = without(QWEN2_5_05B, "sliding_window") | {"use_sliding_window": True, "max_window_layers": 0}
  assert windows(raw) == [4096] * 24


@pytest.mark.parametrize(
  "change, expected",
  [
    ({"layer_types": None}, [4096] * 32),
    ({"layer_types": [FULL] * 32}, [None] * 32),
    ({"layer_types": [SLIDING] * 32}, [4096] * 32),
    ({"layer_types": [SLIDING, FULL] * 16}, [4096, None] * 16),
    ({"layer_types": ["attention"] * 32}, [None] * 32),  # as older files call it
    ({"layer_types": [FULL] * 32, "sliding_window": None}, [None] * 32),
  ],
)
def test_mistral_layer_types(change, expected):
  assert windows(MISTRAL_7B_V01 | change) == expected
  ministral = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
  assert windows(MISTRAL_7B_V01 | ministral | change) == expected


@pytest.mark.parametrize(
  "raw, change, said",
  [
    (QWEN2_5_05B, {"layer_types": [SLIDING] * 24}, "no window: sliding_window=32768, use_sliding_window=False"),
    (QWEN3_06B, {"layer_types": [FULL, SLIDING] * 14}, "no window"),
    (MISTRAL_7B_V01, {"layer_types": [SLIDING] * 32, "sliding_window": None}, "no window"),
    (LLAMA_3_1_8B, {"layer_types": [SLIDING] * 32}, "no window"),
    (MISTRAL_7B_V01, {"layer_types": [FULL] * 31}, "one entry for each of 32 layers"),
    (MISTRAL_7B_V01, {"layer_types": FULL}, "must be a list"),
    (MISTRAL_7B_V01, {"layer_types": [FULL] * 31 + ["linear_attention"]}, "'linear_attention'"),
    (MISTRAL_7B_V01, {"layer_types": [FULL] * 31 + [[]]}, r"has \[\]"),
    (MISTRAL_7B_V01, {"num_hidden_layers": 10**15}, "num_layers=1000000000000000 is above"),
    (QWEN3_06B, {"num_hidden_layers": 10**15}, "num_layers=1000000000000000 is above"),
  ],
)
def test_layer_types_that_do_not_fit(raw, change, said):
  with pytest.raises(ValueError, match=said):
    config_from_hf(raw | change)


def test_layers_with_equal_attention_form_a_group():
  config = config_from_hf(MISTRAL_7B_V01 | {"layer_types": [SLIDING, SLIDING, FULL, SLIDING] * 8})
  first, second = config.groups.items()
  assert (first[0].window, first[1][:4]) == (4096, (0, 1, 3, 4))
  assert (second[0].window, second[1][:2]) == (None, (2, 6))
  assert (first[0].num_heads, first[0].head_dim, first[0].scale) == (32, 128, 128**-0.5)
  assert len(config_from_hf(MISTRAL_7B_V01).groups) == 1


def test_key_value_heads_that_a_file_does_not_give():
  """As many as query heads; but an absent key, unlike null, has a default of the family's."""
  assert config_from_hf(without(MISTRAL_7B_V01, "num_key_value_heads")).num_kv_heads == 8
  assert config_from_hf(MISTRAL_7B_V01 | {"num_key_value_heads": None}).num_kv_heads == 32
  assert config_from_hf(without(LLAMA_3_1_8B, "num_key_value_heads")).num_kv_heads == 32
  qwen = without(QWEN3_06B, "num_key_value_heads") | {"num_attention_heads": 64}
  assert config_from_hf(qwen).num_kv_heads == 32


def test_model_type_stands_in_for_architectures():
  assert config_from_hf(without(QWEN3_06B, "architectures")) == config_from_hf(QWEN3_06B)
  assert config_from_hf(without(QWEN3_06B, "model_type")) == config_from_hf(QWEN3_06B)


@pytest.mark.parametrize("key", [key for key, treatment in KEYS.items() if isinstance(treatment, Must)])
def test_keys_that_change_the_result_elsewhere(key):
  """Refused with a value that does, and without effect where they are neutral or null."""
  treatment = KEYS[key]
  assert isinstance(treatment, Must)
  for neutral in (None, *treatment.values):
    assert config_from_hf(LLAMA_3_1_8B | {key: neutral}) == config_from_hf(LLAMA_3_1_8B)
  for value in (0.3, "other", ["other"]):
    with pytest.raises(UnsupportedModel, match=f"{key}=.*not supported"):
      config_from_hf(LLAMA_3_1_8B | {key: value})


CLASSES = {"architectures": ["LlamaForSequenceClassification"]}


@pytest.mark.parametrize(
  "change, labels, activation, pair_activation",
  [
    ({}, ("LABEL_0", "LABEL_1"), "softmax", "sigmoid"),
    ({"num_labels": 1}, ("LABEL_0",), "sigmoid", "sigmoid"),
    ({"id2label": {"1": "b", "0": "a"}, "num_labels": 2}, ("a", "b"), "softmax", "sigmoid"),
    ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none", "sigmoid"),
    ({"problem_type": "single_label_classification"}, ("LABEL_0", "LABEL_1"), "softmax", "sigmoid"),
    ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid", "sigmoid"),
    ({"sentence_transformers": {"activation_fn": IDENTITY}}, ("LABEL_0", "LABEL_1"), "softmax", "none"),
    ({"sbert_ce_default_activation_function": IDENTITY}, ("LABEL_0", "LABEL_1"), "softmax", "none"),
  ],
)
def test_heads_of_classes_are_read(change, labels, activation, pair_activation):
  config = config_from_hf(LLAMA_3_1_8B | CLASSES | change)
  assert config.class_head == ClassHead(labels, activation, pair_activation, -1)
  assert not config.has_token_head and architecture_of(config) == "LlamaForSequenceClassification"
  assert unknown_keys(LLAMA_3_1_8B | CLASSES | change) == ()
  plain = dataclasses.replace(config, has_token_head=True, class_head=None)
  assert plain == config_from_hf(LLAMA_3_1_8B | change)


def test_padding_of_heads_of_classes_is_the_familys():
  gemma = HEAD_CASES["gemma2_classes"][0]
  for raw, pad in ((gemma, 0), (without(gemma, "pad_token_id"), 0), (gemma | {"pad_token_id": None}, -1)):
    head = config_from_hf(raw).class_head
    assert head is not None and head.pad_token_id == pad


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.backbone)
def test_backbones_have_no_head(family):
  raw, _ = next(raw for raw in HEAD_CASES.values() if raw[0]["architectures"] == [family.backbone])
  config = config_from_hf(raw)
  assert (config.has_token_head, config.class_head, architecture_of(config)) == (False, None, family.backbone)
  assert "lm_head.weight" not in {piece.name for parts in tensors(config).values() for piece in parts}


class Recording(dict):
  """A config.json that records which of its keys are read."""

  def __init__(self, raw: dict, asked: set[str]):
    super().__init__(raw)
    self.asked = asked

  def get(self, key, default=None):
    self.asked.add(key)
    return super().get(key, default)


def test_keys_that_are_listed_as_read_are_read():
  asked: set[str] = set()
  windowed = QWEN2_5_05B | {"use_sliding_window": True}
  for raw in (windowed, LLAMA_3_1_8B):
    config_from_hf(Recording(raw, asked))
  listed = {key for key, treatment in KEYS.items() if treatment == "read"}
  assert listed - asked == {"eos_token_id", "quantization_config"}  # which engine/device/ reads
  assert asked <= KEYS.keys()


def test_unknown_keys_are_told():
  assert unknown_keys(LLAMA_3_1_8B | {"foo": 1, "bar": True, "none": None, "_name_or_path": "x"}) == ("foo", "bar")
  yarn = {"rope_parameters": {"rope_type": "default", "beta_fast": 32}}
  assert unknown_keys(LLAMA_2_7B_EARLY | yarn) == ("rope_parameters.beta_fast",)
  for raw in (
    LLAMA_2_7B_EARLY,
    LLAMA_3_1_8B,
    MISTRAL_7B_V01,
    QWEN2_5_05B,
    QWEN3_06B,
    *(raw for raw, _ in (CASES | HEAD_CASES).values()),
  ):
    assert unknown_keys(raw) == ()


@pytest.mark.parametrize(
  "change, said",
  [
    ({"architectures": ["GemmaForCausalLM"]}, r"GemmaForCausalLM.*LlamaForCausalLM, MistralForCausalLM, Ministral"),
    ({"architectures": None, "model_type": "mixtral"}, "mixtral"),
    ({"model_type": "mistral"}, r"\['LlamaForCausalLM'\] and model_type='mistral' contradict each other"),
    ({"model_type": ["llama"]}, "contradict each other"),
    ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' is not supported"),
    ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "is not supported; supported are"),
    ({"architectures": ["BertForSequenceClassification"]}, "supported heads of classes are LlamaForSequenceClass"),
    ({"architectures": ["GraniteForSequenceClassification"]}, "supported heads of classes are LlamaForSequenceClass"),
    ({"architectures": ["LlamaForTokenClassification"]}, "supported heads of classes are LlamaForSequenceClass"),
    ({"architectures": ["Qwen2ForProcessRewardModel"]}, "is not supported; supported heads of classes are Llama"),
    ({"architectures": ["BertModel"]}, r"\['BertModel'\] is not supported; supported are LlamaForCausalLM"),
    (CLASSES | {"id2label": []}, r"id2label=\[\] must be an object with 1 to 65536 labels"),
    (CLASSES | {"id2label": {}}, "id2label={} must be an object"),
    (CLASSES | {"id2label": {"1": "a"}}, "must map the keys 0 to 0 to texts"),
    (CLASSES | {"id2label": {"0": 5}}, "must map the keys 0 to 0 to texts"),
    (CLASSES | {"id2label": {"0": "a"}, "num_labels": 2}, "num_labels=2 and the 1 entries of id2label contradict"),
    (CLASSES | {"num_labels": 0}, "num_labels=0 is not supported; supported are 1 to 65536"),
    (CLASSES | {"num_labels": 10**9}, "num_labels=1000000000 is not supported"),
    (CLASSES | {"problem_type": "ranking"}, "problem_type='ranking' is not supported; supported are regression"),
    (CLASSES | {"pad_token_id": 32000}, "pad_token_id=32000 must be a token id from 0 to 31999"),
    (CLASSES | {"pad_token_id": "<pad>"}, "pad_token_id='<pad>' must be a token id"),
    (CLASSES | {"sentence_transformers": 5}, "sentence_transformers=5 must be an object"),
    (CLASSES | {"sentence_transformers": {"activation_fn": "os.system"}}, "activation_fn='os.system' is not supported"),
    (CLASSES | {"model_type": "mistral"}, "contradict each other; with these architectures model_type is 'llama'"),
    ({"architectures": 5}, "architectures=5 is not supported; supported are"),
    ({"is_causal": False}, "is_causal=False.*supported is true: causal attention"),
    ({"sliding_window": 4096}, "sliding_window=4096"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, r"rope_scaling.mrope_section=\[1\]"),
    ({"rope_parameters": LLAMA3, "original_max_position_embeddings": -1}, "original_max_position_embeddings=-1"),
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
    ({"quantization": {"bits": 4, "group_size": 64}}, "quantization="),
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


@pytest.mark.parametrize("name", CASES | HEAD_CASES)
def test_the_tensor_map_is_the_decoder(name):
  """Every parameter has its tensors, and they fill its shape exactly, with no others."""
  config = config_from_hf((CASES | HEAD_CASES)[name][0])
  assert config.family in FAMILIES
  declared = abstract(config, jnp.float32)[1]
  shapes = {parameter_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(declared)}
  pieces = tensors(config)
  assert set(pieces) == set(shapes)
  for parameter, parts in pieces.items():
    times_filled = np.zeros(shapes[parameter], np.int8)
    for part in parts:
      times_filled[part.box()] += 1
      assert times_filled[part.box()].shape == part.sizes
    assert (times_filled == 1).all()


@pytest.mark.parametrize("change", [{"has_sinks": True}, {"rotary_dim": 64}, {"head_dim": 64}, {"num_kv_heads": 4}])
def test_declared_attention_that_no_decoder_computes_is_refused(change):
  config = config_from_hf(LLAMA_3_1_8B)
  same = dataclasses.replace(config, layer_attention=config.layers)
  refuse_uncomputed(same)
  (name, value), layer = *change.items(), dataclasses.replace(config.layers[0], **change)
  with pytest.raises(UnsupportedModel, match=f"attention {name}={value} is not supported"):
    refuse_uncomputed(dataclasses.replace(config, layer_attention=(layer,) * config.num_layers))
