"""Writes tiny random checkpoints in each quantized format, with the plain checkpoint of the same weights beside them.

The packing here is written from the formats' descriptions, a bit at a time, and shares nothing with the readers.
"""

from collections.abc import Callable
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from models.families.tensor_map import Piece
from models.registry import config_from_hf, tensors
from tools.make_random_model import random_tensor

RAW: dict[str, Any] = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 96,
  "hidden_size": 256,
  "intermediate_size": 512,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 64,
  "max_position_embeddings": 128,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": False,
}
QWEN2 = RAW | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}

Layer = Callable[[np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]  # [N, K] -> parts, dequantized [N, K]


def pack_words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
  """Packs integers along an axis into int32, the lowest bits first."""
  moved = np.moveaxis(codes.astype(np.uint64), axis, -1)
  words = moved.reshape(*moved.shape[:-1], -1, 32 // bits)
  packed = np.zeros(words.shape[:-1], np.uint64)
  for place in range(32 // bits):
    packed |= words[..., place] << np.uint64(bits * place)
  return np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis))


def quantize_range(weight: np.ndarray, bits: int, group: int, has_zeros: bool):
  """Returns codes [N, K], float16 scales and zero points [N, K / group], and the weight that they mean."""
  outputs, inputs = weight.shape
  grouped = weight.reshape(outputs, inputs // group, group)
  top = 2**bits - 1
  if has_zeros:
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, top)
  else:
    scales = (np.abs(grouped).max(-1) * 2 / top).astype(np.float16)
    zeros = np.full(scales.shape, 2.0 ** (bits - 1))
  wide = scales.astype(np.float32)[..., None]
  codes = np.clip(np.rint(grouped / wide) + zeros[..., None], 0, top)
  exact = (codes - zeros[..., None]).astype(np.float32) * wide
  return codes.reshape(weight.shape).astype(int), scales, zeros.astype(int), exact.reshape(weight.shape)


def awq_layer(weight: np.ndarray):
  codes, scales, zeros, exact = quantize_range(weight, 4, 64, True)

  def packed(values):  # [rows, N]: nibble i of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight
    eights = values.reshape(values.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return pack_words(eights.reshape(values.shape), 4, 1)

  parts = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": np.ascontiguousarray(scales.T)}
  return parts, exact


def gptq_layer(weight: np.ndarray, bits: int = 4, has_zeros: bool = False, less: int = 1):
  codes, scales, zeros, exact = quantize_range(weight, bits, 32, has_zeros)
  return {
    "qweight": pack_words(codes.T, bits, 0),
    "qzeros": pack_words((zeros.T - less) % 2**bits, bits, 1),
    "scales": np.ascontiguousarray(scales.T),
    "g_idx": (np.arange(weight.shape[1]) // 32).astype(np.int32),
  }, exact


def compressed_layer(weight: np.ndarray, bits: int = 4, group: int = 128, has_zeros: bool = False):
  codes, scales, zeros, exact = quantize_range(weight, bits, group, has_zeros)
  parts = {
    "weight_packed": pack_words(codes, bits, 1),
    "weight_scale": scales,
    "weight_shape": np.array(weight.shape, np.int64),
  }
  if has_zeros:
    parts["weight_zero_point"] = pack_words(zeros, bits, 0)
  return parts, exact


def int8_layer(weight: np.ndarray):
  codes, scales, _, exact = quantize_range(weight, 8, weight.shape[1], False)
  return {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}, exact


def fp8_blocks(weight: np.ndarray):
  """Blocks, of which the last ones have fewer rows."""
  rows, columns = 96, 128
  scales = np.empty((-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)), np.float32)
  values = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
  exact = np.empty(weight.shape, np.float32)
  for row, column in np.ndindex(scales.shape):
    block = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
    scales[row, column] = np.abs(weight[block]).max() / 448
    values[block] = (weight[block] / scales[row, column]).astype(values.dtype)
    exact[block] = values[block].astype(np.float32) * scales[row, column]
  return {"weight": values, "weight_scale_inv": scales}, exact


def fp8_outputs(weight: np.ndarray):
  """A scale an output, in the dtype of the plain weights."""
  scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
  values = np.clip(weight / scales.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
  return {"weight": values, "weight_scale": scales}, values.astype(np.float32) * scales.astype(np.float32)


def fp8_tensor(weight: np.ndarray):
  """One scale, and a static one of activations."""
  scale = np.float32(np.abs(weight).max() / 448)
  values = np.clip(weight / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
  parts = {"weight": values, "weight_scale": np.array(scale), "input_scale": np.array(0.1, np.float32)}
  return parts, values.astype(np.float32) * scale


def compressed_config(stored: str, *weights: dict[str, Any], **more: Any) -> dict[str, Any]:
  groups = {f"group_{n}": {"targets": ["Linear"], "weights": each, **more} for n, each in enumerate(weights)}
  return {
    "quant_method": "compressed-tensors",
    "format": stored,
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": groups,
  }


_GROUPS = {"strategy": "group", "type": "int", "symmetric": True}
# Format -> quantization_config, and the writer of a layer.
FORMATS: dict[str, tuple[dict[str, Any], Layer]] = {
  "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq_layer),
  "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, gptq_layer),
  "gptq v2": (
    {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
    lambda weight: gptq_layer(weight, 8, True, less=0),
  ),
  "int4": (compressed_config("pack-quantized", {**_GROUPS, "num_bits": 4, "group_size": 128}), compressed_layer),
  "int4 zeros": (
    compressed_config("pack-quantized", {**_GROUPS, "num_bits": 4, "group_size": 32, "symmetric": False}),
    lambda weight: compressed_layer(weight, 4, 32, True),
  ),
  "int8 groups": (
    compressed_config("pack-quantized", {**_GROUPS, "num_bits": 8, "group_size": 64}),
    lambda weight: compressed_layer(weight, 8, 64),
  ),
  "bits by layer": (  # query has 8 bits, key and value 4
    compressed_config(
      "pack-quantized",
      {**_GROUPS, "num_bits": 8, "group_size": 128},
      {**_GROUPS, "num_bits": 4, "group_size": 64, "symmetric": False},
    ),
    lambda weight: (
      compressed_layer(weight, 8, 128) if weight.shape[0] == 256 else compressed_layer(weight, 4, 64, True)
    ),
  ),
  "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [96, 128]}, fp8_blocks),
  "fp8 outputs": (
    compressed_config("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    fp8_outputs,
  ),
  "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
  "w8a8": (
    compressed_config(
      "int-quantized",
      {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
      input_activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
    ),
    int8_layer,
  ),
}


def write_pair(root: pathlib.Path, raw: dict[str, Any], config: dict[str, Any], write_layer: Layer, seed: int = 0):
  """Writes ROOT/quantized, and ROOT/plain with the weights that it means; returns both."""
  quantized, plain = root / "quantized", root / "plain"
  for folder in (quantized, plain):
    folder.mkdir(parents=True)
  packed: dict[str, np.ndarray] = {}
  exact: dict[str, np.ndarray] = {}
  for piece in every_piece(raw):
    value = random_tensor(config_from_hf(raw), piece.name, piece.shape, seed)
    if is_linear(piece):
      parts, exact[piece.name] = write_layer(value)
      packed |= {f"{piece.name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    else:
      packed[piece.name] = exact[piece.name] = value.astype(np.float16).astype(np.float32)
  save_file(packed, quantized / "model.safetensors")
  save_file(exact, plain / "model.safetensors")
  (quantized / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
  (plain / "config.json").write_text(json.dumps(raw))
  return quantized, plain


def every_piece(raw: dict[str, Any]) -> list[Piece]:
  return [piece for parts in tensors(config_from_hf(raw)).values() for piece in parts]


def is_linear(piece: Piece) -> bool:
  return piece.name.endswith("_proj.weight")


# --- GGUF -------------------------------------------------------------------------------------------------------------

_GGUF_LAYER = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}
_GGUF_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
  stem, _, kind = name.rpartition(".")
  if stem in _GGUF_WHOLE:
    return f"{_GGUF_WHOLE[stem]}.{kind}"
  _, _, number, part = stem.split(".", 3)
  return f"blk.{number}.{_GGUF_LAYER[part]}.{kind}"


def random_blocks(rng: np.random.Generator, kind: str, outputs: int, inputs: int) -> np.ndarray:
  """Random blocks of a K type, whose weights have the variance of a random matrix; uint8[outputs, bytes]."""
  size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
  blocks = rng.integers(0, 256, (outputs, inputs // 256, size), dtype=np.uint8)
  step = np.float16(inputs**-0.5 / {"Q4_K": 300, "Q5_K": 600, "Q6_K": 1300}[kind])
  if kind == "Q6_K":
    blocks[..., 208:] = np.array([step]).view(np.uint8)
  else:
    middle = np.float16(step * {"Q4_K": 7.5, "Q5_K": 15.5}[kind])
    blocks[..., :4] = np.array([step, middle]).view(np.uint8)
  return blocks.reshape(outputs, -1)


def write_gguf_pair(root: pathlib.Path, raw: dict[str, Any], types: Callable[[str], str], seed: int = 0):
  """Writes ROOT/quantized with config.json and a GGUF file, and ROOT/plain as `gguf` dequantizes it; returns both.

  Args: types: GGUF's type for a tensor of Hugging Face's name; norms and biases are F32.
  """
  import gguf  # pyright: ignore[reportMissingImports]

  quantized, plain = root / "quantized", root / "plain"
  for folder in (quantized, plain):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
  config, rng = config_from_hf(raw), np.random.default_rng(seed)
  architecture = "llama" if raw["model_type"] == "mistral" else raw["model_type"]
  writer = gguf.GGUFWriter(str(quantized / "model.gguf"), architecture)
  writer.add_context_length(config.max_position)
  writer.add_embedding_length(config.model_dim)
  writer.add_block_count(config.num_layers)
  writer.add_feed_forward_length(config.hidden_dim)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.rms_norm_eps)
  writer.add_tokenizer_model("gpt2")
  writer.add_token_list([f"<{token}>" for token in range(config.vocab_size)])
  exact: dict[str, np.ndarray] = {}
  for piece in every_piece(raw):
    value = random_tensor(config, piece.name, piece.shape, seed)
    kind = types(piece.name) if len(piece.shape) == 2 else "F32"
    stored = gguf.GGMLQuantizationType[kind]
    rows = np.arange(piece.shape[0])
    if architecture == "llama" and ("q_proj" in piece.name or "k_proj" in piece.name):
      # Row 2 j + i of a head in GGUF is row i * half + j of Hugging Face.
      heads = config.num_heads if "q_proj" in piece.name else config.num_kv_heads
      half = len(rows) // heads // 2
      rows = np.array([head * 2 * half + i * half + j for head in range(heads) for j in range(half) for i in (0, 1)])
    data = random_blocks(rng, kind, *piece.shape) if "K" in kind else gguf.quantize(value[rows], stored)
    value = np.empty(piece.shape, np.float32)
    value[rows] = gguf.dequantize(data, stored).reshape(piece.shape)
    exact[piece.name] = value
    writer.add_tensor(gguf_name(piece.name), data, raw_dtype=stored)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  save_file(exact, plain / "model.safetensors")
  return quantized, plain
