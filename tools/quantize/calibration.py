"""Finds what calibration changes before rounding: scales of input channels, moved into the operation before.

AWQ (arXiv:2306.00978): weights of channels with large inputs are multiplied by s and so rounded more finely; the norm
or the linear layer before divides the channel by s, so the exact product stays. s is the channel's mean magnitude to an
exponent that a grid search chooses by the layer's output error on the calibration text.
"""

from collections.abc import Sequence
import dataclasses
from functools import partial

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from engine.device.weights import parameter_name
from models.attention import dense_causal_attend
from models.config import LayerAttention
from models.decoder import Block
from models.layers import rotation
from models.weight_form import PLAIN
from tools.quantize.compressed_folder import Scheme
from tools.quantize.rounding import dequantize_matrix, round_matrix
from tools.quantize.source_model import SourceModel

_EXPONENTS = np.arange(20, dtype=np.float32) / 20  # the paper's grid; 0 changes nothing
_MOST_ROWS = 1024  # tokens on which an exponent is judged; more change little and take longer
_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


@dataclasses.dataclass
class Calibration:
  """Changes by tensor name.

  Attributes:
    inputs: f32[K], factors of a matrix's input channels.
    outputs: f32[N], divisors of a matrix's outputs, or of a bias.
    norms: the new weights of norms, f32[D], exact in the stored dtype.
    moments: f32[groups, group, group] of the scaled inputs of a matrix (see round_matrix).
  """

  inputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  outputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  norms: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  moments: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def change(self, name: str, value: np.ndarray) -> np.ndarray:
    """Returns a tensor, f32, with its changes."""
    if name in self.norms:
      return self.norms[name]
    if name in self.outputs:
      value = value / self.outputs[name].reshape(-1, *(1,) * (value.ndim - 1))
    return value * self.inputs[name] if name in self.inputs else value


def calibrate(source: SourceModel, windows: Sequence[Sequence[int]], scheme: Scheme) -> Calibration:
  """Runs the plain model on the calibration text, a layer at a time, and returns the changes of all layers.

  Args: windows: token ids, each a text of its own.
  """
  config, found = source.config, Calibration()
  (embed,) = source.pieces["embed"]
  table = source.tensors[embed.name].read()
  states = [table[list(window)].astype(np.float32) * np.float32(config.embedding_multiplier) for window in windows]
  for index, declared in enumerate(config.layers):
    block = _load_block(source, index, declared)
    inputs: list[tuple[np.ndarray, ...]] = []
    for place, state in enumerate(states):
      angles = rotation(jnp.arange(len(state), dtype=jnp.int32)[None], declared)
      output, *seen = _run_block(config.activation, *block, state[None], angles)
      states[place] = np.asarray(output[0])
      inputs.append(tuple(np.asarray(each).reshape(len(state), -1) for each in seen))
    attention, attended, mlp, hidden = (np.concatenate(each) for each in zip(*inputs, strict=True))
    here = f"layers.{index}"
    _fold_into_norm(source, found, scheme, f"{here}.attention_norm.scale", f"{here}.attention.qkv", attention)
    _fold_into_norm(source, found, scheme, f"{here}.mlp_norm.scale", f"{here}.mlp.gate_up", mlp)
    *_, value = source.pieces[f"{here}.attention.qkv"]
    biases = source.pieces.get(f"{here}.attention.qkv_bias", ())
    shared = (declared.num_kv_heads, declared.group_size, declared.head_dim)
    names = [value.name, *(piece.name for piece in biases[-1:])]
    _fold_into_linear(source, found, scheme, names, f"{here}.attention.out", attended, shared)
    *_, up = source.pieces[f"{here}.mlp.gate_up"]
    _fold_into_linear(source, found, scheme, [up.name], f"{here}.mlp.down", hidden, (config.hidden_dim, 1, 1))
  return found


def _load_block(source: SourceModel, index: int, declared: LayerAttention) -> tuple[nnx.GraphDef, nnx.State]:
  def assemble(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    value = np.zeros(leaf.shape, np.float32)
    for piece in source.pieces[f"layers.{index}.{parameter_name(path)}"]:
      value[piece.box()] = source.tensors[piece.name].read().reshape(piece.split).transpose(piece.order)
    return value

  made = nnx.eval_shape(lambda: Block(source.config, declared, jnp.dtype(jnp.float32), PLAIN))
  graphdef, leaves = nnx.split(made)
  return graphdef, jax.tree_util.tree_map_with_path(assemble, leaves)


def _attend_and_keep(declared: LayerAttention, qkv, cos, sin, cache, meta):
  """Dense attention whose new cache is its output."""
  out, _ = dense_causal_attend(declared, qkv, cos, sin, cache, meta)
  return out, out


@partial(jax.jit, static_argnums=(0, 1))
def _run_block(activation: str, graphdef: nnx.GraphDef, state: nnx.State, x: jax.Array, angles: tuple):
  """Returns a layer's output [1, T, D], and the inputs of qkv, out, gate_up and down."""
  block = nnx.merge(graphdef, state)
  norms = block.attention_norm, block.attention_post_norm
  middle, attended = block.attention(x, *norms, angles, None, None, _attend_and_keep, None, None, None)
  both = block.mlp.gate_up(middle, norm=block.mlp_norm)
  hidden = _ACTIVATIONS[activation](both[..., 0, :]) * both[..., 1, :]
  output = block.mlp(middle, block.mlp_norm, block.mlp_post_norm, None, None)
  return output, block.attention_norm(x), attended, block.mlp_norm(middle), hidden


def _read_matrices(source: SourceModel, parameter: str) -> dict[str, np.ndarray]:
  return {piece.name: source.tensors[piece.name].read().astype(np.float32) for piece in source.pieces[parameter]}


def _fold_into_norm(
  source: SourceModel, found: Calibration, scheme: Scheme, norm: str, parameter: str, inputs: np.ndarray
) -> None:
  """Scales the inputs of a linear layer that follows a norm. Args: inputs: f32[tokens, K]."""
  matrices = _read_matrices(source, parameter)
  scales = search_input_scales(np.concatenate(list(matrices.values())), inputs, scheme, np.abs(inputs).mean(axis=0))
  (piece,) = source.pieces[norm]
  offset = np.float32(source.config.norm_offset)
  stored = source.tensors[piece.name]
  factors = stored.read().astype(np.float32) + offset
  rounded = (factors / scales - offset).astype(stored.dtype).astype(np.float32)
  # The norm's stored dtype rounds it, so the matrix is scaled by what the norm then lacks.
  lacks = np.divide(factors, rounded + offset, out=np.ones_like(factors), where=rounded + offset != 0)
  is_kept = ~np.isfinite(lacks) | (lacks <= 0)
  found.norms[piece.name] = np.where(is_kept, factors - offset, rounded)
  _keep_scales(found, scheme, list(matrices), np.where(is_kept, np.float32(1), lacks), inputs)


def _fold_into_linear(
  source: SourceModel,
  found: Calibration,
  scheme: Scheme,
  before: Sequence[str],
  parameter: str,
  inputs: np.ndarray,
  shared: tuple[int, int, int],
) -> None:
  """Scales the inputs of a linear layer that are outputs of another, linearly.

  Args:
    before: the tensors whose outputs are divided.
    inputs: f32[tokens, K].
    shared: K as (outer, copies, inner): the copies of a channel come from one output, as query heads share a KV head.
  """
  matrices = _read_matrices(source, parameter)
  sizes = np.abs(inputs).mean(axis=0).reshape(shared).mean(axis=1, keepdims=True)
  whole = np.broadcast_to(sizes, shared).reshape(-1)
  (matrix,) = matrices.values()
  scales = search_input_scales(matrix, inputs, scheme, whole)
  for name in before:
    found.outputs[name] = scales.reshape(shared)[:, 0].reshape(-1)
  _keep_scales(found, scheme, list(matrices), scales, inputs)


def search_input_scales(matrix: np.ndarray, inputs: np.ndarray, scheme: Scheme, sizes: np.ndarray) -> np.ndarray:
  """Returns the scales f32[K] of input channels with the least output error after rounding.

  Args:
    matrix: f32[N, K].
    inputs: f32[tokens, K].
    sizes: f32[K], the channels' magnitudes, at least 0.
  """
  rows = inputs[:: max(1, len(inputs) // _MOST_ROWS)]
  group = scheme.group_of(matrix.shape[1])
  sizes = np.maximum(sizes, np.float32(1e-4) * max(sizes.mean(), np.finfo(np.float32).tiny))
  best, least = np.ones_like(sizes), np.inf
  for exponent in _EXPONENTS:
    scales = sizes**exponent
    scales = scales / np.sqrt(scales.max() * scales.min())
    rounded = dequantize_matrix(*round_matrix(matrix * scales, scheme.bits, group, np.dtype(np.float32)), scheme.bits)
    error = float(np.square(rows @ (rounded / scales - matrix).T).sum())
    if error < least:
      best, least = scales, error
  return best


def _keep_scales(
  found: Calibration, scheme: Scheme, names: Sequence[str], scales: np.ndarray, inputs: np.ndarray
) -> None:
  group = scheme.group_of(len(scales))
  grouped = (inputs / scales).reshape(len(inputs), -1, group).transpose(1, 0, 2)
  moments = np.matmul(grouped.transpose(0, 2, 1), grouped)
  for name in names:
    found.inputs[name], found.moments[name] = scales, moments
