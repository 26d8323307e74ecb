"""Maps tensors of a Hugging Face checkpoint to a decoder's parameters. May not open files or hold arrays."""

import dataclasses
import math

from models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Piece:
  """One tensor of a Hugging Face checkpoint, and its place in a parameter.

  The place is a box: `[offset : offset + size]` on every axis in `place`, where size is the piece's own, and the whole
  of all other axes. It holds `stored.reshape(split).transpose(order)`. Both operations are views, so the loader can
  read part of a memory-mapped tensor without the rest.

  Attributes:
    name: name in the checkpoint.
    shape: shape in the checkpoint.
    split: `shape` with grouped axes separated.
    order: the axes of `split` in the parameter's order.
    place: (axis of the parameter, offset), for the axes that several pieces fill; empty for a single piece.
  """

  name: str
  shape: tuple[int, ...]
  split: tuple[int, ...]
  order: tuple[int, ...]
  place: tuple[tuple[int, int], ...] = ()

  @property
  def sizes(self) -> tuple[int, ...]:
    """The sizes of the box, by axis of the parameter."""
    return tuple(self.split[axis] for axis in self.order)

  def box(self) -> tuple[slice, ...]:
    """The box, a slice for each axis of the parameter."""
    offsets = dict(self.place)
    return tuple(slice(offsets.get(axis, 0), offsets.get(axis, 0) + size) for axis, size in enumerate(self.sizes))

  def __post_init__(self):
    assert math.prod(self.shape) == math.prod(self.split) and sorted(self.order) == list(range(len(self.split))), self


TensorMap = dict[str, tuple[Piece, ...]]


def vector(name: str, size: int) -> tuple[Piece, ...]:
  """Returns the piece of a parameter [size] that is one tensor."""
  return (Piece(name, (size,), (size,), (0,)),)


def transposed(name: str, outputs: int, inputs: int) -> tuple[Piece, ...]:
  """Returns the piece of a parameter [inputs, outputs] that is one tensor, stored [outputs, inputs]."""
  return (Piece(name, (outputs, inputs), (outputs, inputs), (1, 0)),)


def llama_tensors(config: ModelConfig) -> TensorMap:
  """Returns the tensors of every parameter, by dotted path in the decoder, with the names of Llama's checkpoints."""
  v, d, f, h = config.vocab_size, config.model_dim, config.hidden_dim, config.head_dim
  n, k, g = config.num_heads, config.num_kv_heads, config.group_size
  heads = (("q", n, g, 0), ("k", k, 1, g), ("v", k, 1, g + 1))  # name, heads, heads a KV head, offset in its group
  out = {
    "embed": (Piece("model.embed_tokens.weight", (v, d), (v, d), (0, 1)),),
    "final_norm.scale": vector("model.norm.weight", d),
  }
  if config.has_token_head and not config.tie_embeddings:
    out["head"] = transposed("lm_head.weight", v, d)
  if config.class_head is not None:
    shape = len(config.class_head.labels), d
    out["score.weight"] = (Piece("score.weight", shape, shape, (0, 1)),)
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
