"""Opens the folder of a draft model or an EAGLE-3 head, and rejects one that does not fit the served model.

Both models must agree in what a token id means, since the draft model's tokens become inputs of the other.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any, Protocol

import jax

from engine.device import kv_cache
from engine.device.draft_programs import choose_draft_attention, draft_programs, make_following_spec
from engine.device.eagle_folder import holds_eagle_head, open_eagle_head
from engine.device.programs import Program, ProgramSpec
from engine.device.served_model import ServedModel
from engine.device.weights import Checkpoint, open_checkpoint
from engine.errors import ConfigError
from engine.shapes import StepShape
from models.weight_form import PLAIN_MATRIX

_MODELS = pathlib.Path(__file__).resolve().parents[2] / "models"
_BUILT_IN = {"demo": _MODELS / "demo_draft", "demo_eagle": _MODELS / "demo_eagle"}
_TOKENIZER = "tokenizer.json"


class OpenDraft(Protocol):
  """A checked folder of what proposes tokens beside a model, whose weights are not read yet.

  Attributes:
    name: for the log.
    num_parameters: of its own.
    kept: its own parameters by name, abstract.
    block_bytes: bytes that a KV block adds to the served model's.
    feature_layers: layers of the served model whose inputs its programs read; () for none.
  """

  @property
  def name(self) -> str: ...
  @property
  def num_parameters(self) -> int: ...
  @property
  def kept(self) -> dict[str, jax.ShapeDtypeStruct]: ...
  @property
  def block_bytes(self) -> int: ...
  @property
  def feature_layers(self) -> tuple[int, ...]: ...

  def check_length(self, max_model_len: int) -> None:
    """Raises ConfigError if it cannot propose in sequences of this length."""
    ...

  def make_spec(self, target: ProgramSpec, num_blocks: int) -> ProgramSpec:
    """Returns the spec of its programs beside those of `target`, with as many KV blocks."""
    ...

  def make_programs(
    self, spec: ProgramSpec, target: ProgramSpec, rungs: Sequence[StepShape], num_proposals: int
  ) -> dict[StepShape | str, Program]:
    """Returns its programs, for rungs of the served model's steps. Args: spec: of make_spec."""
    ...

  def load_leaves(self, spec: ProgramSpec, served: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Reads its weights; returns the leaves of spec.params. Args: served: the served model's leaves by name."""
    ...


@dataclasses.dataclass(frozen=True)
class DraftFolder:
  """A checked folder of a draft model whose weights are not read yet; implements OpenDraft.

  Attributes:
    path: the folder.
    checkpoint: its weights.
    attention: the implementation of its attention.
    block_bytes: bytes of one KV block over all layers.
  """

  path: str
  checkpoint: Checkpoint
  attention: str
  block_bytes: int
  feature_layers: tuple[int, ...] = ()

  @property
  def name(self) -> str:
    """The name in its checkpoint."""
    return self.checkpoint.declared.name

  @property
  def num_parameters(self) -> int:
    """See OpenDraft."""
    return self.checkpoint.num_parameters

  @property
  def kept(self) -> dict[str, jax.ShapeDtypeStruct]:
    """See OpenDraft."""
    return self.checkpoint.kept

  def check_length(self, max_model_len: int) -> None:
    """Raises ConfigError if the draft model has fewer positions than a sequence may have."""
    longest = self.checkpoint.declared.config.max_position
    if longest < max_model_len:
      raise ConfigError(
        f"draft_model={self.path:.200} has {longest} positions, but max_model_len is {max_model_len}; set "
        f"--max_model_len={longest}, or another --draft_model"
      )

  def make_spec(self, target: ProgramSpec, num_blocks: int) -> ProgramSpec:
    """Returns the spec of the draft model's programs beside those of `target`, with as many KV blocks."""
    declared = self.checkpoint.declared
    leaves, tree = jax.tree.flatten(declared.params)
    return make_following_spec(
      target,
      model=declared.config,
      graphdef=declared.graphdef,
      params_tree=tree,
      params=tuple(leaves),
      num_blocks=num_blocks,
      attention=self.attention,
    )

  def make_programs(
    self, spec: ProgramSpec, target: ProgramSpec, rungs: Sequence[StepShape], num_proposals: int
  ) -> dict[StepShape | str, Program]:
    """See OpenDraft."""
    return draft_programs(spec, target, rungs, num_proposals)

  def load_leaves(self, spec: ProgramSpec, served: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """See OpenDraft; nothing is shared with the served model."""
    return tuple(jax.tree.leaves(self.checkpoint.load().params))


def open_draft(path: str, served: ServedModel) -> OpenDraft:
  """Opens and checks the folder of a draft model, or of an EAGLE-3 head, as its config.json says.

  Args: path: the folder; "demo": the draft model of the demo model; "demo_eagle": its head.

  Raises:
    CheckpointError: the folder is no model.
    ConfigError: its model has no head of tokens, or another vocabulary, or the device cannot run it.
  """
  if served.mesh.size > 1:
    raise ConfigError(
      f"draft_model={path:.200} needs one device, and the model is on {served.mesh.size}; leave out --draft_model"
    )
  folder = str(_BUILT_IN.get(path, path))
  if holds_eagle_head(pathlib.Path(folder)):
    if _read_tokens(folder) not in (None, _read_tokens(served.folder)):
      raise ConfigError(_other_tokens(path))
    return open_eagle_head(path, pathlib.Path(folder), served)
  form = dataclasses.replace(served.form, matrix=PLAIN_MATRIX, ordered=False)
  checkpoint = open_checkpoint(folder, served.mesh, served.dtype, form, served.random_weights)
  config, vocab_size = checkpoint.declared.config, served.config.vocab_size
  if not (config.has_token_head and served.config.has_token_head):
    raise ConfigError(f"draft_model={path:.200}: drafts need two models with a head of tokens; leave out --draft_model")
  if config.vocab_size != vocab_size:
    raise ConfigError(
      f"draft_model={path:.200} has vocab_size={config.vocab_size}, but the model's is {vocab_size}; set "
      "--draft_model to a model with the same tokenizer"
    )
  if _read_tokens(folder) != _read_tokens(served.folder):
    raise ConfigError(_other_tokens(path))
  attention = choose_draft_attention(served.attention)
  block_bytes = kv_cache.bytes_per_block(config, served.block_size, served.kv_dtype, attention)
  return DraftFolder(path, checkpoint, attention, block_bytes)


def _other_tokens(path: str) -> str:
  return (
    f"draft_model={path:.200}: its {_TOKENIZER} has other tokens than the model's; set --draft_model to a model with "
    "the same tokenizer"
  )


def _read_tokens(folder: str) -> Any:
  """Returns what the token ids of a folder's tokenizer mean, to compare; None without a tokenizer."""
  path = pathlib.Path(folder) / _TOKENIZER
  try:
    content = path.read_bytes()
  except FileNotFoundError:
    return None
  except OSError as error:
    raise ConfigError(f"{path}: {error.strerror}; make the file readable") from error
  try:
    raw = json.loads(content)
    return raw["model"]["vocab"], {token["id"]: token["content"] for token in raw["added_tokens"]}
  except (ValueError, RecursionError, KeyError, TypeError):
    return content  # of another form, which only an equal file has
