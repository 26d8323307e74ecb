"""An EAGLE-3 head in plain numpy, over tensors under their checkpoint names; and folders of such heads.

It knows no blocks, steps or chunks: it computes everything anew from the tokens and the served model's states.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from models.config import ModelConfig

# Names of the layer and prefix of each kind of checkpoint.
STYLES = {"eagle": ("midlayer.", ""), "vllm": ("layers.0.", ""), "transformers": ("layers.0.", "model.")}


@dataclasses.dataclass(frozen=True)
class HeadSizes:
  """Sizes of a head: D, F, query and KV heads, H, tokens that it proposes, and of the served model D and tokens."""

  width: int
  hidden: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  vocab: int
  target: ModelConfig
  feature_layers: tuple[int, ...]
  norm_before_residual: bool = False
  has_embedding: bool = False
  theta: float = 10_000.0

  def make_config(self) -> dict[str, Any]:
    return {
      "architectures": ["LlamaForCausalLMEagle3"],
      "model_type": "llama",
      "hidden_size": self.width,
      "intermediate_size": self.hidden,
      "num_hidden_layers": 1,
      "num_attention_heads": self.num_heads,
      "num_key_value_heads": self.num_kv_heads,
      "head_dim": self.head_dim,
      "rms_norm_eps": 1e-5,
      "rope_theta": self.theta,
      "max_position_embeddings": 128,
      "vocab_size": self.target.vocab_size,
      "draft_vocab_size": self.vocab,
      "norm_before_residual": self.norm_before_residual,
      "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
    }


def make_tensors(sizes: HeadSizes, seed: int) -> dict[str, np.ndarray]:
  """Random tensors under EAGLE's own names. No norm is 1 everywhere, and tokens are permuted and not all there."""
  rng, d, h = np.random.default_rng(seed), sizes.width, sizes.head_dim
  shapes = {
    "fc": (d, 3 * sizes.target.model_dim),
    "midlayer.self_attn.q_proj": (sizes.num_heads * h, 2 * d),
    "midlayer.self_attn.k_proj": (sizes.num_kv_heads * h, 2 * d),
    "midlayer.self_attn.v_proj": (sizes.num_kv_heads * h, 2 * d),
    "midlayer.self_attn.o_proj": (d, sizes.num_heads * h),
    "midlayer.mlp.gate_proj": (sizes.hidden, d),
    "midlayer.mlp.up_proj": (sizes.hidden, d),
    "midlayer.mlp.down_proj": (d, sizes.hidden),
    "lm_head": (sizes.vocab, d),
  }
  tensors = {f"{name}.weight": rng.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
  for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
    tensors[f"{name}.weight"] = rng.uniform(0.5, 1.5, d)
  if sizes.has_embedding:
    tensors["embed_tokens.weight"] = rng.normal(0, 1, (sizes.target.vocab_size, d))
  tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
  if sizes.vocab < sizes.target.vocab_size:
    ids = rng.permutation(sizes.target.vocab_size)[: sizes.vocab]
    tensors["d2t"] = (ids - np.arange(sizes.vocab)).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(sizes.target.vocab_size), ids)
  return tensors


def write_head(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], style: str = "eagle") -> Path:
  """Writes a folder; returns it."""
  path.mkdir()
  layer, prefix = STYLES[style]
  unprefixed = ("lm_head.weight", "d2t", "t2d")
  named = {
    name if name in unprefixed else prefix + name.replace("midlayer.", layer): value for name, value in tensors.items()
  }
  safetensors.numpy.save_file(named, path / "model.safetensors")
  (path / "config.json").write_text(json.dumps(config))
  return path


def _normalize(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
  return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def _rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
  """[heads, H] at a position."""
  half = x.shape[-1] // 2
  angle = position / theta ** (np.arange(half) / half)
  first, second = x[:, :half], x[:, half:]
  return np.concatenate(
    [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
  )


class ReferenceHead:
  """Attributes: sizes, tensors: of the head; embedding: the served model's, or its own."""

  def __init__(self, sizes: HeadSizes, tensors: dict[str, np.ndarray], served_embedding: np.ndarray):
    self.sizes, self.tensors = sizes, {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    self.embedding = self.tensors.get("embed_tokens.weight", np.asarray(served_embedding, np.float64))

  def propose(self, tokens: list[int], states: np.ndarray, count: int) -> list[int]:
    """Returns `count` proposals after `tokens`. Args: states: f[n, 3 * D] of all tokens but the last, or more."""
    features = np.asarray(states[: len(tokens) - 1], np.float64) @ self._weight("fc").T
    keys, values, found = [], [], []
    for position in range(len(tokens) - 1):
      before = features[position - 1] if position else None
      _, key, value, _ = self._project(tokens[position], before, position)
      keys.append(key)
      values.append(value)
    token, feature = tokens[-1], features[-1]
    for position in range(len(tokens) - 1, len(tokens) - 1 + count):
      query, key, value, residual = self._project(token, feature, position)
      keys.append(key)
      values.append(value)
      feature = self._finish(residual, self._attend(query, np.array(keys), np.array(values)))
      scores = self._weight("lm_head") @ _normalize(feature, self.tensors["norm.weight"])
      best = int(np.argmax(scores))
      token = best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best
      found.append(token)
    return found

  def _weight(self, name: str) -> np.ndarray:
    return self.tensors[f"{name}.weight"]

  def _project(self, token: int, feature: np.ndarray | None, position: int):
    """Query, key, value and residual of a position; the first one has no feature, and zeros for all of them."""
    s = self.sizes
    if feature is None:
      nothing = np.zeros((s.num_kv_heads, s.head_dim))
      return np.zeros((s.num_heads, s.head_dim)), nothing, nothing, np.zeros(s.width)
    normed = _normalize(feature, self._weight("midlayer.hidden_norm"))
    x = np.concatenate([_normalize(self.embedding[token], self._weight("midlayer.input_layernorm")), normed])
    query, key, value = (
      (self._weight(f"midlayer.self_attn.{name}_proj") @ x).reshape(-1, s.head_dim) for name in "qkv"
    )
    residual = normed if s.norm_before_residual else feature
    return _rotate(query, position, s.theta), _rotate(key, position, s.theta), value, residual

  def _attend(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    group = self.sizes.num_heads // self.sizes.num_kv_heads
    out = []
    for head, own in enumerate(query):
      scores = keys[:, head // group] @ own * self.sizes.head_dim**-0.5
      weights = np.exp(scores - scores.max())
      out.append(weights / weights.sum() @ values[:, head // group])
    return np.concatenate(out)

  def _finish(self, residual: np.ndarray, attended: np.ndarray) -> np.ndarray:
    y = residual + self._weight("midlayer.self_attn.o_proj") @ attended
    normed = _normalize(y, self._weight("midlayer.post_attention_layernorm"))
    gate = self._weight("midlayer.mlp.gate_proj") @ normed
    gated = gate / (1 + np.exp(-gate)) * (self._weight("midlayer.mlp.up_proj") @ normed)
    return y + self._weight("midlayer.mlp.down_proj") @ gated
