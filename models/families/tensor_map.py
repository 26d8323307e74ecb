"""Where the tensors of a Hugging Face checkpoint lie in the parameters of a decoder. Opens no file, holds no array."""

import dataclasses
import math

from models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Piece:
  """One tensor of a Hugging Face checkpoint, and its place in a parameter.

  The place is a box: the whole parameter, but `[offset : offset + size]` of every axis in `place`, where size is the
  piece's own. It holds `stored.reshape(split).transpose(order)`; both are views, so a part of a memory-mapped tensor is
  read without the rest.

  Attributes:
    name: in the checkpoint.
    shape: in the checkpoint.
    split: `shape` with grouped axes taken apart.
    order: the axes of `split` in the parameter's order.
    place: (axis of the parameter, offset), for the axes that several pieces fill; none, where it is the only piece.
  """

  name: str
  shape: tuple[int, ...]
  split: tuple[int, ...]
  order: tuple[int, ...]
  place: tuple[tuple[int, int], ...] = ()

  @property
  def sizes(self) -> tuple[int, ...]:
    """Of the box, by axis of the parameter."""
    return tuple(self.split[axis] for axis in self.order)

  def box(self) -> tuple[slice, ...]:
    """The place, a slice for each axis of the parameter."""
    offsets = dict(self.place)
    return tuple(slice(offsets.get(axis, 0), offsets.get(axis, 0) + size) for axis, size in enumerate(self.sizes))

  def __post_init__(self):
    assert math.prod(self.shape) == math.prod(self.split) and sorted(self.order) == list(range(len(self.split))), self


TensorMap = dict[str, tuple[Piece, ...]]


def vector(name: str, size: int) -> tuple[Piece, ...]:
  """A parameter [size] that is one tensor."""
  return (Piece(name, (size,), (size,), (0,)),)


def transposed(name: str, outputs: int, inputs: int) -> tuple[Piece, ...]:
  """A parameter [inputs, outputs] that is one tensor: linear layers are stored [outputs, inputs]."""
  return (Piece(name, (outputs, inputs), (outputs, inputs), (1, 0)),)


def llama_tensors(config: ModelConfig) -> TensorMap:
  """The tensors of every parameter, keyed by its dotted path in the decoder, with the names of Llama's checkpoints."""
  v, d, f, h = config.vocab_size, config.model_dim, config.hidden_dim, config.head_dim
  n, k, g = config.num_heads, config.num_kv_heads, config.group_size
  heads = (("q", n, g, 0), ("k", k, 1, g), ("v", k, 1, g + 1))  # name, heads, heads a KV head, offset beside it
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
      Piece(f"{theirs}.self_attn.{name}_proj.weight", (count * h, d), (k, beside, h, d), (3, 0, 1, 2), ((2, offset),))
      for name, count, beside, offset in heads
    )
    out[f"{ours}.attention.out"] = (Piece(f"{theirs}.self_attn.o_proj.weight", (d, n * h), (d, k, g, h), (1, 2, 3, 0)),)
    if config.qkv_bias:
      out[f"{ours}.attention.qkv_bias"] = tuple(
        Piece(f"{theirs}.self_attn.{name}_proj.bias", (count * h,), (k, beside, h), (0, 1, 2), ((1, offset),))
        for name, count, beside, offset in heads
      )
    if config.qk_norm:
      out[f"{ours}.attention.q_norm.scale"] = vector(f"{theirs}.self_attn.q_norm.weight", h)
      out[f"{ours}.attention.k_norm.scale"] = vector(f"{theirs}.self_attn.k_norm.weight", h)
    out[f"{ours}.mlp_norm.scale"] = vector(f"{theirs}.post_attention_layernorm.weight", d)
    out[f"{ours}.mlp.gate_up"] = tuple(
      Piece(f"{theirs}.mlp.{name}_proj.weight", (f, d), (1, f, d), (2, 0, 1), ((1, offset),))
      for offset, name in enumerate(("gate", "up"))
    )
    out[f"{ours}.mlp.down"] = transposed(f"{theirs}.mlp.down_proj.weight", d, f)
  return out
