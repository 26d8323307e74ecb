"""Opens the folder of an EAGLE-3 head, rejects one that does not fit the served model, and loads its weights.

Folders are those of vLLM, SGLang and the speculators library: config.json and safetensors. May not choose shapes.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from engine.device import kv_cache
from engine.device.draft_programs import choose_draft_attention, make_following_spec
from engine.device.eagle_programs import head_programs, make_features_shape
from engine.device.mesh import place_array
from engine.device.programs import Program, ProgramSpec
from engine.device.safetensors_file import StoredTensor
from engine.device.served_model import ServedModel
from engine.device.weights import (
  assemble_pieces,
  declare_leaves,
  find_tensors,
  parameter_name,
  read_json_object,
  verify_folder_sums,
)
from engine.errors import CheckpointError, ConfigError
from engine.model_folder import CONFIG, check_model_folder, name_of_model
from engine.shapes import StepShape
from models.eagle_head import (
  EagleConfig,
  EmbeddedHead,
  canonical_name,
  declare_head,
  eagle_tensors,
  is_eagle_config,
  read_eagle_config,
)
from models.linear import arranger
from models.weight_form import PLAIN, PLAIN_MATRIX, UnsupportedForm, WeightForm

_EMBEDDING, _OFFSETS, _TARGET_IDS = "embed_tokens.weight", "d2t", "head.target_ids"
# Tensors that follow from others: which tokens of the model a head may propose, and rotary frequencies.
_REDUNDANT = ("t2d", ".inv_freq")


@dataclasses.dataclass(frozen=True)
class EagleFolder:
  """A checked folder of a head whose weights are not read yet; implements engine.device.draft_folder.OpenDraft.

  Attributes:
    path: as the user gave it.
    folder: where it is.
    config: of the head.
    dtype: of its parameters.
    form: representation of its matrices.
    kept: its parameters by name, abstract; without the served model's embedding.
    stored: its tensors by canonical name; {} for random weights.
    target_ids: int32[V'], the served model's id of each token that the head may propose.
    attention: the implementation of its attention.
    block_bytes: bytes of one KV block and of the feature that goes with it.
  """

  path: str
  folder: pathlib.Path
  config: EagleConfig
  dtype: jnp.dtype
  form: WeightForm
  kept: dict[str, jax.ShapeDtypeStruct]
  stored: dict[str, StoredTensor]
  target_ids: np.ndarray
  attention: str
  block_bytes: int

  @property
  def name(self) -> str:
    """Its name, for the log."""
    return name_of_model(self.folder)

  @property
  def num_parameters(self) -> int:
    """The number of its own parameters."""
    return sum(leaf.size for name, leaf in self._plain_leaves().items() if name != _TARGET_IDS)

  @property
  def feature_layers(self) -> tuple[int, ...]:
    """See OpenDraft."""
    return self.config.feature_layers

  def check_length(self, max_model_len: int) -> None:
    """Accepts any length: past the positions of its training a head proposes worse, and no output changes."""

  def make_spec(self, target: ProgramSpec, num_blocks: int) -> ProgramSpec:
    """Returns the spec of the head's programs beside those of `target`, with as many KV blocks.

    Its last buffer has the feature of each block's last known token.
    """
    declared = declare_head(self.config, self.dtype, self.form)
    served = nnx.merge(target.graphdef, jax.tree.unflatten(target.params_tree, target.params))
    graphdef, state = nnx.split(EmbeddedHead(declared.head, declared.embed or served.embed))
    placed = declare_leaves(target.mesh, nnx.split(declared)[1])
    leaves, tree = jax.tree.flatten_with_path(state)
    params: tuple[Any, ...] = tuple(placed.get(parameter_name(path), leaf) for path, leaf in leaves)
    spec = make_following_spec(
      target,
      model=self.config.model,
      graphdef=graphdef,
      params_tree=tree,
      params=params,
      num_blocks=num_blocks,
      attention=self.attention,
    )
    shape = make_features_shape(num_blocks + 1, self.config.model.model_dim, self.attention)
    return dataclasses.replace(spec, kv=(*spec.kv, target.whole(shape, self.dtype)))

  def make_programs(
    self, spec: ProgramSpec, target: ProgramSpec, rungs: Sequence[StepShape], num_proposals: int
  ) -> dict[StepShape | str, Program]:
    """See OpenDraft."""
    return head_programs(spec, target, rungs, num_proposals)

  def load_leaves(self, spec: ProgramSpec, served: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """See OpenDraft. A head without an embedding shares the served model's."""
    arrange = arranger(declare_head(self.config, self.dtype, self.form))
    held: dict[str, jax.Array] = {}
    for name, leaf in self._plain_leaves().items():
      values = {name: self.target_ids} if name == _TARGET_IDS else arrange(name, self._read_value(name, leaf))
      for own, value in values.items():
        held[own] = place_array(value, self.kept[own].sharding).block_until_ready()
    paths = jax.tree.leaves_with_path(jax.tree.unflatten(spec.params_tree, spec.params))
    names = [parameter_name(path) for path, _ in paths]
    return tuple(held[name] if name in held else served[name] for name in names)

  def _plain_leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters as a checkpoint has them, by name."""
    return _name_leaves(nnx.split(declare_head(self.config, self.dtype, PLAIN))[1])

  def _read_value(self, name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    if not self.stored:
      return _make_random(name, leaf)
    everything = (slice(None),) * len(leaf.shape)
    return assemble_pieces(eagle_tensors(self.config)[name], self.stored, leaf.shape, leaf.dtype, everything)


def _name_leaves(state: nnx.State) -> dict[str, Any]:
  return {parameter_name(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _make_random(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
  """Returns fixed values for measurements; each output is a sum of numbers of variance 1."""
  if name.endswith(".scale"):
    return np.ones(leaf.shape, leaf.dtype)
  inputs = leaf.shape[-1] if name == "embed" else leaf.shape[0]
  return np.random.default_rng(len(name)).normal(0, inputs**-0.5, leaf.shape).astype(leaf.dtype)


def holds_eagle_head(folder: pathlib.Path) -> bool:
  """Returns whether a folder's config.json is that of a head; False for what is no model folder."""
  if not (folder / CONFIG).is_file():
    return False
  return is_eagle_config(read_json_object(folder / CONFIG))


def open_eagle_head(path: str, folder: pathlib.Path, served: ServedModel) -> EagleFolder:
  """Opens and checks the folder of a head.

  Args: path: as in engine.device.draft_folder.open_draft. folder: what it means.

  Raises:
    CheckpointError: the folder is no head that Sluice computes, or one of another model.
    ConfigError: the served model has no head of tokens, or a matrix cannot have the form.
  """
  if not served.config.has_token_head:
    raise ConfigError(f"draft_model={path:.200}: drafts need a model with a head of tokens; leave out --draft_model")
  check_model_folder(folder, needs_weights=not served.random_weights)
  if not served.random_weights:
    verify_folder_sums(folder)
  found = {} if served.random_weights else find_tensors(folder)
  stored = {canonical_name(name): each for name, each in found.items()}
  try:
    config = read_eagle_config(read_json_object(folder / CONFIG), served.config, _EMBEDDING in stored)
  except ValueError as error:
    raise CheckpointError(f"{folder / CONFIG}: {error}") from error
  if stored:
    _check_head_tensors(folder, stored, config)
  target_ids = _read_target_ids(folder, stored, config)
  form = dataclasses.replace(served.form, matrix=PLAIN_MATRIX, ordered=False)
  try:
    declared = declare_head(config, served.dtype, form)
  except UnsupportedForm as error:
    raise ConfigError(f"{folder}: {error}; set --matmul=xla") from error
  attention = choose_draft_attention(served.attention)
  block_bytes = kv_cache.bytes_per_block(config.model, served.block_size, served.kv_dtype, attention)
  feature = math.prod(make_features_shape(1, config.model.model_dim, attention))
  return EagleFolder(
    path=path,
    folder=folder,
    config=config,
    dtype=served.dtype,
    form=form,
    kept=declare_leaves(served.mesh, nnx.split(declared)[1]),
    stored=stored,
    target_ids=target_ids,
    attention=attention,
    block_bytes=block_bytes + feature * served.dtype.itemsize,
  )


def _check_head_tensors(folder: pathlib.Path, stored: dict[str, StoredTensor], config: EagleConfig) -> None:
  """Raises CheckpointError for missing, misshapen and unknown tensors."""
  pieces = {piece.name: piece for parts in eagle_tensors(config).values() for piece in parts}
  for name, piece in pieces.items():
    if name not in stored:
      raise CheckpointError(
        f"{folder}: tensor {name} of shape {list(piece.shape)} is missing from the head; copy all files of one head"
      )
    tensor = stored[name]
    if tensor.shape != piece.shape:
      raise CheckpointError(
        f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, but config.json and the model require "
        f"{list(piece.shape)}; use the head of this model"
      )
    tensor.check_dtype()
  for name, tensor in stored.items():
    if name not in pieces and name != _OFFSETS and not name.endswith(_REDUNDANT):
      raise CheckpointError(
        f"{tensor.file}: tensor {tensor.name} is not part of an EAGLE-3 head that Sluice computes; use another head"
      )


def _read_target_ids(folder: pathlib.Path, stored: dict[str, StoredTensor], config: EagleConfig) -> np.ndarray:
  """Returns the served model's id of each token of the head; `d2t` holds the differences to the head's own ids."""
  size, vocab = config.model.vocab_size, config.target_vocab_size
  own = np.arange(size)
  tensor = stored.get(_OFFSETS)
  if tensor is None:
    if stored and size != vocab:
      raise CheckpointError(
        f"{folder}: tensor {_OFFSETS} of shape {[size]} is missing from the head, whose draft_vocab_size={size} is not "
        f"the model's {vocab}; copy all files of one head"
      )
    return own.astype(np.int32)
  if tensor.dtype not in ("I32", "I64") or math.prod(tensor.shape) != size:
    raise CheckpointError(
      f"{tensor.file}: tensor {_OFFSETS} of dtype {tensor.dtype} has shape {list(tensor.shape)}, but needs I64 or I32 "
      f"and {[size]}; copy the head again"
    )
  ids = own + tensor.map().reshape(-1).astype(np.int64)
  outside = np.flatnonzero((ids < 0) | (ids >= vocab))
  if outside.size:
    at = int(outside[0])
    raise CheckpointError(
      f"{tensor.file}: {_OFFSETS}[{at}] leads to token {ids[at]}, outside the model's 0 to {vocab - 1}; use the head "
      "of this model"
    )
  return ids.astype(np.int32)
