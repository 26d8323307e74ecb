"""Which models there are, and the names of their weights in a Hugging Face checkpoint. Opens no file, holds no array.

To add a family of this shape: a function in models/families.py, a line in FAMILIES, an entry in tools/parity/cases.py.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

from models import families
from models.config import ModelConfig
from models.families import UnsupportedModel


@dataclasses.dataclass(frozen=True)
class Family:
  """A row of the registry: config.json's `architectures` entry, and the function that reads the file."""

  architecture: str
  read_config: Callable[[Mapping[str, Any]], ModelConfig]


# Keyed by config.json's `model_type`, which is also ModelConfig.family.
FAMILIES: dict[str, Family] = {
  "llama": Family("LlamaForCausalLM", families.llama),
  "mistral": Family("MistralForCausalLM", families.mistral),
  "qwen2": Family("Qwen2ForCausalLM", families.qwen2),
  "qwen3": Family("Qwen3ForCausalLM", families.qwen3),
}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads a parsed config.json.

  Raises:
    UnsupportedModel: the file asks for what Sluice does not compute; says what, and what is supported.
    ValueError: the sizes contradict each other.
  """
  names = raw.get("architectures") or []
  found = [
    family
    for key, family in FAMILIES.items()
    if family.architecture in names or (not names and key == raw.get("model_type"))
  ]
  if len(found) != 1:
    asked = f"architectures={names!r}" if names else f"model_type={raw.get('model_type')!r} without architectures"
    raise UnsupportedModel(
      f"{asked} is not supported; supported are {', '.join(family.architecture for family in FAMILIES.values())}"
    )
  return found[0].read_config(raw)


@dataclasses.dataclass(frozen=True)
class Piece:
  """One tensor of a Hugging Face checkpoint, and its place in a parameter of ours.

  The parameter's part `[start : start + size]` of axis `axis` is `stored.reshape(split).transpose(order)`; both are
  views, so a part of a memory-mapped tensor is read without the rest.

  Attributes:
    name: in the checkpoint.
    shape: in the checkpoint.
    split: `shape` with grouped axes taken apart.
    order: the axes of `split` in the parameter's order.
    axis, start: where in the parameter; the whole of it when it is the only piece.
  """

  name: str
  shape: tuple[int, ...]
  split: tuple[int, ...]
  order: tuple[int, ...]
  axis: int = 0
  start: int = 0

  @property
  def size(self) -> int:
    """Length along `axis` of the part that this piece fills."""
    return self.split[self.order[self.axis]]

  def __post_init__(self):
    assert math.prod(self.shape) == math.prod(self.split) and sorted(self.order) == list(range(len(self.split))), self


def tensors(config: ModelConfig) -> dict[str, tuple[Piece, ...]]:
  """The checkpoint tensors of every parameter, keyed by its dotted path in models.llama.Decoder.

  All families keep the names that Llama's first checkpoints had; linear layers are stored [out, in].
  """
  v, d, f, h = config.vocab_size, config.model_dim, config.hidden_dim, config.head_dim
  n, k, g = config.num_heads, config.num_kv_heads, config.group_size

  def vector(name: str, size: int) -> tuple[Piece, ...]:
    return (Piece(name, (size,), (size,), (0,)),)

  def transposed(name: str, rows: int, columns: int) -> tuple[Piece, ...]:
    return (Piece(name, (rows, columns), (rows, columns), (1, 0)),)

  heads = (("q", n, g, 0), ("k", k, 1, g), ("v", k, 1, g + 1))  # name, heads, heads a KV head, place beside it
  out = {
    "embed": (Piece("model.embed_tokens.weight", (v, d), (v, d), (0, 1)),),
    "final_norm.scale": vector("model.norm.weight", d),
  }
  if not config.tie_embeddings:
    out["head"] = transposed("lm_head.weight", v, d)
  for layer in range(config.num_layers):
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    out[f"{ours}.attention_norm.scale"] = vector(f"{theirs}.input_layernorm.weight", d)
    out[f"{ours}.attention.qkv"] = tuple(
      Piece(f"{theirs}.self_attn.{name}_proj.weight", (count * h, d), (k, beside, h, d), (3, 0, 1, 2), 2, start)
      for name, count, beside, start in heads
    )
    out[f"{ours}.attention.out"] = (Piece(f"{theirs}.self_attn.o_proj.weight", (d, n * h), (d, k, g, h), (1, 2, 3, 0)),)
    if config.qkv_bias:
      out[f"{ours}.attention.qkv_bias"] = tuple(
        Piece(f"{theirs}.self_attn.{name}_proj.bias", (count * h,), (k, beside, h), (0, 1, 2), 1, start)
        for name, count, beside, start in heads
      )
    if config.qk_norm:
      out[f"{ours}.attention.q_norm.scale"] = vector(f"{theirs}.self_attn.q_norm.weight", h)
      out[f"{ours}.attention.k_norm.scale"] = vector(f"{theirs}.self_attn.k_norm.weight", h)
    out[f"{ours}.mlp_norm.scale"] = vector(f"{theirs}.post_attention_layernorm.weight", d)
    out[f"{ours}.mlp.gate_up"] = tuple(
      Piece(f"{theirs}.mlp.{name}_proj.weight", (f, d), (1, f, d), (2, 0, 1), 1, start)
      for start, name in enumerate(("gate", "up"))
    )
    out[f"{ours}.mlp.down"] = transposed(f"{theirs}.mlp.down_proj.weight", d, f)
  return out
