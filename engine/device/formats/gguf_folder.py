"""Finds a model's tensors in a GGUF file: Llama, Mistral, Qwen2 and Qwen3. config.json and the tokenizer lie beside it.

llama.cpp rotates adjacent pairs of a head where Hugging Face rotates its halves, so its files of the architecture
`llama` have the rows of query and key in another order, which the readers here undo.
"""

import dataclasses
import math
import pathlib

import numpy as np

from engine.device.formats.gguf_blocks import BLOCK_TYPES, BlockType
from engine.device.formats.gguf_file import GGUFTensor, Scalar, read_gguf_header
from engine.device.formats.quantized_source import QuantizedSource, make_source
from engine.device.formats.quantized_tensor import QuantizedTensor
from engine.device.safetensors_file import StoredTensor
from engine.errors import CheckpointError
from models.config import ModelConfig
from models.families.tensor_map import TensorMap
from models.grouped_weight import GroupedWeight
from models.layers import rope_frequencies

# Hugging Face's family -> general.architecture.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "ministral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_ROPE = "rope_freqs.weight"  # the divisors of the rotary frequencies, which follow from config.json
# Metadata that must agree with config.json.
_SIZES = {
  "block_count": "num_layers",
  "embedding_length": "model_dim",
  "feed_forward_length": "hidden_dim",
  "attention.head_count": "num_heads",
  "attention.head_count_kv": "num_kv_heads",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
  "rope.freq_base": "rope_theta",
}


@dataclasses.dataclass(frozen=True)
class InterleavedTensor(StoredTensor):
  """A plain tensor whose rows lie in llama.cpp's order. Attributes: heads: of its rows."""

  heads: int = 1

  def map(self) -> np.ndarray:
    return _restore_rows(super().map(), self.heads)


def _restore_rows(values: np.ndarray, heads: int) -> np.ndarray:
  """[N * H, ...] in llama.cpp's order of rows -> the same in Hugging Face's."""
  pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
  return pairs.swapaxes(1, 2).reshape(values.shape)


def open_gguf(
  file: pathlib.Path, config: ModelConfig, pieces: TensorMap
) -> tuple[dict[str, StoredTensor], QuantizedSource]:
  """Returns the plain tensors of a file by Hugging Face's names, and the source of the others.

  Args:
    config: from config.json, with which the file must agree.
    pieces: the tensors of a plain model.

  Raises:
    CheckpointError: the file is truncated or of another model, or has a type that is not supported.
  """
  fields, tensors = read_gguf_header(file)
  _check_fields(file, fields, config)
  shapes = {piece.name: piece.shape for parts in pieces.values() for piece in parts}
  stored: dict[str, StoredTensor] = {}
  quantized: dict[str, QuantizedTensor] = {}
  for tensor in tensors.values():
    if tensor.name == _ROPE:
      _check_rope(file, tensor, config)
      continue
    name = _hugging_face_name(tensor.name)
    heads = _interleaved_heads(name, config)
    block = BLOCK_TYPES.get(tensor.type)
    shape = shapes.get(name, tensor.shape)
    if block is None:
      plain = file, name, tensor.type, tensor.shape, tensor.offset
      stored[name] = InterleavedTensor(*plain, heads) if heads > 1 else StoredTensor(*plain)
    elif shape != tensor.shape or len(shape) != 2:
      raise CheckpointError(
        f"{file}: tensor {tensor.name} has shape {list(tensor.shape)}, but config.json requires {list(shape)} of "
        f"{name}; use files of one model"
      )
    else:
      quantized[name] = _quantized(file, name, tensor, block, heads)
  extra = sorted(set(quantized) - set(shapes))
  if extra:
    raise CheckpointError(
      f"{file}: tensor {extra[0]} is not part of a {config.family} model of this config.json; use files of one model"
    )
  return stored, make_source("gguf", pieces, quantized, stored)


def _quantized(file: pathlib.Path, name: str, tensor: GGUFTensor, block: BlockType, heads: int) -> QuantizedTensor:
  outputs, inputs = tensor.shape

  def decode() -> GroupedWeight:
    rows = np.memmap(file, np.uint8, "r", tensor.offset, (outputs, tensor.row_bytes))
    rows = _restore_rows(rows, heads) if heads > 1 else rows
    blocks = rows.reshape(-1, tensor.block_bytes)
    codes, scales, offsets = block.decode(blocks)
    superblocks = block.superblocks(blocks)
    groups = (outputs, inputs // block.group)
    return GroupedWeight(
      codes.reshape(outputs, inputs).T,
      scales.reshape(groups).T,
      block.bits,
      1,
      None if offsets is None else offsets.reshape(groups).T,
      None if superblocks is None else superblocks.reshape(outputs, -1).T,
    )

  return QuantizedTensor(
    name=name,
    file=file,
    shape=(outputs, inputs),
    bits=block.bits,
    group=block.group,
    has_offsets=block.has_offsets,
    scale_dtype=np.dtype(block.scale_dtype if inputs > block.group else np.float32),
    decode=decode,
    parts=(name,),
    has_superblocks=block.super_bytes is not None,
  )


def _hugging_face_name(name: str) -> str:
  stem, _, kind = name.rpartition(".")
  if stem in _WHOLE:
    return f"{_WHOLE[stem]}.{kind}"
  match stem.split("."):
    case ["blk", number, part] if part in _LAYER:
      return f"model.layers.{number}.{_LAYER[part]}.{kind}"
  return name  # reported as no part of the model


def _interleaved_heads(name: str, config: ModelConfig) -> int:
  """Returns how many heads' rows are in llama.cpp's order; 1: none."""
  if _ARCHITECTURES[config.family] == "llama":
    if ".q_proj." in name:
      return config.num_heads
    if ".k_proj." in name:
      return config.num_kv_heads
  return 1


def _check_fields(file: pathlib.Path, fields: dict[str, Scalar], config: ModelConfig) -> None:
  """Raises CheckpointError unless the metadata are those of config.json."""
  if config.family not in _ARCHITECTURES:
    supported = ", ".join(_ARCHITECTURES)
    raise CheckpointError(
      f"{file}: GGUF of {config.family} is not supported; supported are {supported}: use the model's safetensors"
    )
  if fields.get("split.count", 0) not in (0, 1):
    raise CheckpointError(
      f"{file}: is one of {fields['split.count']} parts, which are not supported; merge them with llama.cpp's "
      "llama-gguf-split --merge"
    )
  architecture = fields.get("general.architecture")
  expected = _ARCHITECTURES[config.family]
  if architecture != expected:
    raise CheckpointError(
      f"{file}: general.architecture={architecture!r:.80}, but config.json describes {config.family}, which is "
      f"{expected!r} in GGUF; use files of one model"
    )
  for key, name in _SIZES.items():
    value, wanted = fields.get(f"{architecture}.{key}"), getattr(config, name)
    if isinstance(value, str) or value is not None and not math.isclose(value, wanted, rel_tol=1e-6):
      raise CheckpointError(
        f"{file}: {architecture}.{key}={value!r:.80}, but config.json requires {wanted}; use files of one model"
      )


def _check_rope(file: pathlib.Path, tensor: GGUFTensor, config: ModelConfig) -> None:
  """Raises CheckpointError unless the divisors of the frequencies are those of config.json."""
  plain = np.asarray(rope_frequencies(config.head_dim, config.rope_theta, None))
  scaled = np.asarray(rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
  if tensor.type == "F32" and tensor.shape == plain.shape:
    found = np.memmap(file, np.float32, "r", tensor.offset, tensor.shape)
    if np.allclose(found, plain / scaled, rtol=1e-4):
      return
  raise CheckpointError(
    f"{file}: tensor {_ROPE} does not hold the rope scaling of config.json ({config.rope_scaling}); use files of one "
    "model"
  )
