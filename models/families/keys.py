"""The treatment of every known key of config.json. Sluice may never ignore a key that changes the result.

Families read a key, or it must have a neutral value, or it has no effect on the model's output. At start the server
logs all other keys as unknown.
"""

from collections.abc import Collection, Mapping
import dataclasses
from typing import Any, Literal


class UnsupportedModel(ValueError):
  """config.json describes a model that Sluice does not compute, or lacks a required key."""


@dataclasses.dataclass(frozen=True)
class Must:
  """A key that changes the result in some architecture: absent, null, or one of `values`.

  Attributes:
    values: neutral values, equivalent to a file without the key.
    supported: supported alternative, for the error text; "": the values themselves.
  """

  values: tuple[Any, ...] = ()
  supported: str = ""


Treatment = Must | Literal["read", "no effect"]

_OFF = Must((False, [], {}), "false")
_ONE = Must((1,))
_NULL = Must(supported="null")
_SILU = Must(("silu", "swish"))
_DENSE = Must((0, False, [], {}), "a dense model, not a mixture-of-experts one")
_PLAIN_WEIGHTS = Must(({}, False), "unquantized bfloat16, float16 and float32 weights")


def _each(treatment: Treatment, keys: str) -> dict[str, Treatment]:
  return dict.fromkeys(keys.split(), treatment)


# A family passes `check_keys` the keys that it reads and others must not have.
KEYS: dict[str, Treatment] = {
  **_each(
    "read",
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings rope_theta rope_scaling
    rope_parameters partial_rotary_factor rms_norm_eps tie_word_embeddings layer_types max_window_layers eos_token_id
    """,
  ),
  # Storage of weights, and code next to them.
  "quantization_config": "read",
  **_each(_PLAIN_WEIGHTS, "quantization compression_config"),
  "auto_map": Must(
    ({},), "no code in a model folder, which Sluice never runs; remove auto_map if the weights are plain"
  ),
  "configuration_files": Must(({}, []), "one config.json"),
  "per_layer_config": Must(({},), "the same sizes in every layer"),
  "pruned_heads": Must(({},), "every head of every layer"),
  # The feed-forward part.
  **_each(_SILU, "hidden_act hidden_activation activation_function"),
  **_each(_DENSE, "num_local_experts num_experts n_routed_experts moe_intermediate_size n_shared_experts"),
  **_each(_OFF, "mlp_bias use_mlp_bias mlp_only_layers moe_layers"),
  # Biases and norms.
  "attention_bias": Must((False,), "false (Qwen2 alone has biases, on query, key and value)"),
  **_each(_OFF, "qkv_bias use_qkv_bias add_qkv_bias add_bias_linear use_bias bias attention_out_bias o_proj_bias"),
  **_each(_OFF, "lm_head_bias use_qk_norm qk_norm qk_layernorm use_qk_layernorm"),
  **_each(_OFF, "norm_after use_post_norm post_norm apply_layernorm_1p zero_centered_gamma sandwich_norm"),
  # The tokens that a query sees.
  "is_causal": Must((True,), "true: causal attention"),
  **_each(_OFF, "use_bidirectional_attention bidirectional prefix_lm is_prefix_lm"),
  **_each(_OFF, "is_encoder_decoder add_cross_attention cross_attention_hidden_size"),
  **_each(_OFF, "use_sliding_window attention_sinks attention_sink use_attention_sinks attention_sink_bias"),
  **_each(_OFF, "add_full_attention_sink_bias add_swa_attention_sink_bias"),
  **_each(_NULL, "sliding_window sliding_window_pattern sliding_window_size attention_chunk_size num_sink_tokens"),
  # Scores.
  **_each(_NULL, "attn_logit_softcapping attention_logit_softcapping attn_soft_cap query_pre_attn_scalar"),
  **_each(_NULL, "attention_multiplier attention_scale attn_scale"),
  **_each(_OFF, "attn_temperature_tuning scale_attn_by_inverse_layer_idx alibi use_alibi"),
  **_each(_NULL, "clip_qkv max_alibi_bias"),
  # Latent attention.
  **_each(_NULL, "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"),
  # Rotary embedding.
  **_each(_NULL, "rope_local_base_freq rope_local_theta local_rope_theta global_rope_theta swa_rope_theta rotary_dim"),
  **_each(_ONE, "rotary_pct rotary_percent rope_pct rope_ratio"),
  **_each(_OFF, "rope_interleave rope_interleaved use_mrope no_rope_layers no_rope_layer_interval nope_layer_interval"),
  "position_embedding_type": Must(("rope", "rotary")),
  # Multipliers of activations and logits.
  **_each(_ONE, "embedding_multiplier residual_multiplier logits_scaling scale_emb embedding_scale embed_scale"),
  **_each(_ONE, "logit_scale lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier"),
  **_each(_ONE, "attn_output_multiplier embedding_multiplier_scale output_multiplier_scale width_multiplier"),
  **_each(_NULL, "final_logit_softcapping final_logits_soft_cap logits_soft_cap scale_depth dim_model_base"),
  **_each(_OFF, "scale_embedding scale_embeddings normalize_embedding parallel_attn parallel_residual"),
  **_each(_OFF, "use_parallel_residual tie_encoder_decoder"),
  # Training, storage, generation, and heads other than the language model's.
  **_each(
    "no effect",
    """
    transformers_version torch_dtype dtype use_cache pretraining_tp initializer_range initializer_cutoff_factor
    attention_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob embedding_dropout embd_pdrop
    resid_pdrop attn_pdrop residual_dropout mlp_dropout classifier_dropout is_decoder return_dict
    output_attentions output_hidden_states output_scores return_dict_in_generate chunk_size_feed_forward torchscript
    use_bfloat16 use_flash_attn use_flash_attention_2 attn_implementation tie_last_hidden_states gradient_checkpointing
    attn_dropout is_llama_config max_sequence_length transformers.js_config cache_implementation
    bos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    bos_token eos_token pad_token tokenizer_class model_max_length finetuning_task task_specific_params prefix
    name_or_path unsloth_fixed unsloth_version license language tags
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences remove_invalid_values repetition_penalty suppress_tokens target_lookbehind temperature top_k
    top_p typical_p
    """,
  ),
  # Read by models/families/class_head.py, and of no effect on other heads.
  **_each("no effect", "id2label label2id num_labels problem_type sentence_transformers"),
  **_each("no effect", "sbert_ce_default_activation_function"),
}

# The keys inside rope_scaling and rope_parameters.
ROPE_KEYS: dict[str, Treatment] = {
  **_each("read", "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings"),
  **_each("read", "partial_rotary_factor full_attention sliding_attention"),
  **_each(_NULL, "mrope_section llama_4_scaling_beta"),
}
ROPE_DICTS = ("rope_scaling", "rope_parameters")


def check_keys(raw: Mapping[str, Any], reads: Collection[str] = ()) -> None:
  """Raises UnsupportedModel if a key changes the result and the family does not read it.

  Args:
    raw: config.json.
    reads: keys that the family reads itself, besides those that every family reads.
  """
  _check(raw, {key: treatment for key, treatment in KEYS.items() if key not in reads}, "")
  for name in ROPE_DICTS:
    if isinstance(raw.get(name), Mapping):
      _check(raw[name], ROPE_KEYS, f"{name}.")


def _check(raw: Mapping[str, Any], treatments: Mapping[str, Treatment], prefix: str) -> None:
  for key, treatment in treatments.items():
    if not isinstance(treatment, Must):
      continue
    value = raw.get(key)
    if value is not None and value not in treatment.values:
      supported = treatment.supported or " or ".join(repr(neutral) for neutral in treatment.values)
      raise UnsupportedModel(
        f"{prefix}{key}={value!r:.200} changes the result and is not supported for this architecture; supported is "
        f"{supported}; correct the file or use another model"
      )


def unknown_keys(raw: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the unknown keys with a value other than null, such as `foo` or `rope_scaling.foo`.

  Keys that begin with an underscore are internal to transformers and do not count.
  """
  found = [key for key, value in raw.items() if key not in KEYS and value is not None and not key.startswith("_")]
  for name in ROPE_DICTS:
    inside = raw.get(name)
    if isinstance(inside, Mapping):
      found += [f"{name}.{key}" for key, value in inside.items() if key not in ROPE_KEYS and value is not None]
  return tuple(found)
