"""Pools a prompt's hidden states into one embedding, as the checkpoint or --pooling says."""

import json
import pathlib

import numpy as np

from engine.device.options import BuildOptions
from engine.errors import CheckpointError, ConfigError
from models.config import ModelConfig
from models.registry import architecture_of

_FILE = "1_Pooling/config.json"  # of sentence-transformers
_MODULES = "modules.json"
_PREFIX = "pooling_mode_"
_KNOWN = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
# Scaling to length 1 is the request's `normalize`.
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


def choose_pooling(options: BuildOptions, model: ModelConfig) -> str:
  """Returns last or mean: the setting, or for auto that of the checkpoint, or else last; auto without embeddings.

  A head of classes takes the last token's state.

  Raises:
    ConfigError: the checkpoint names a pooling, or a module, that Sluice does not have, or there are no embeddings.
    CheckpointError: its files of pooling are broken.
  """
  folder = pathlib.Path(options.model_dir)
  if model.class_head is not None:
    if options.pooling == "mean":
      raise ConfigError(
        f"pooling=mean: {architecture_of(model)} scores classes from the last token's state; leave --pooling out"
      )
    if options.pooling == "auto" and (modules := _read_json(folder / _MODULES)) is not None:
      _check_modules(folder / _MODULES, modules)
    return "last"
  if not options.enable_embeddings and options.pooling != "auto":
    raise ConfigError(
      f"pooling={options.pooling}: the server serves no embeddings; add --enable_embeddings, or leave --pooling out"
    )
  if not options.enable_embeddings or options.pooling != "auto":
    return options.pooling
  modules = _read_json(folder / _MODULES)
  if modules is not None:
    _check_modules(folder / _MODULES, modules)
  path = folder / _FILE
  modes = _read_json(path)
  if modes is None:
    return "last"
  if not isinstance(modes, dict):
    raise CheckpointError(f"{path}: it holds no JSON object; download the file again")
  named = sorted(
    name.removeprefix(_PREFIX) for name, value in modes.items() if name.startswith(_PREFIX) and value is True
  )
  if isinstance(modes.get("pooling_mode"), str):  # the newer form
    named = [modes["pooling_mode"]]
  if len(named) > 1 or any(name not in _KNOWN for name in named):
    raise ConfigError(
      f"enable_embeddings: {path} names pooling by {', '.join(named)}, and Sluice has lasttoken and mean_tokens; "
      "choose one with --pooling=last or --pooling=mean, or serve another model"
    )
  if named and _KNOWN[named[0]] == "mean" and modes.get("include_prompt") is False:
    raise ConfigError(
      f"enable_embeddings: {path} says include_prompt=false, and Sluice averages all tokens; choose that with "
      "--pooling=mean, or serve another model"
    )
  return _KNOWN[named[0]] if named else "last"


class PooledStates:
  """Pools the hidden states of one prompt, which come from one step or several."""

  def __init__(self, pooling: str, class_weights: np.ndarray | None = None):
    """Args:
    pooling: last or mean.
    class_weights: f64[C, D] of a head of classes, or None.
    """
    self.needs_every_state = pooling == "mean"
    self._class_weights = class_weights
    self._sum, self._num_states = np.zeros(1), 0

  def add_states(self, states: np.ndarray) -> None:
    """Adds the states of the next positions, f32[n, D], in float64."""
    if self.needs_every_state:
      self._sum = self._sum + states.sum(axis=0, dtype=np.float64)
      self._num_states += len(states)
    else:
      self._sum = states[-1]

  def make_embedding(self) -> bytes:
    """Returns the embedding, or the head's output for each class, as little-endian float32; not before add_states().

    The head's sums are in float64, so no order of summation shows.
    """
    made = self._sum / self._num_states if self.needs_every_state else self._sum
    if self._class_weights is not None:
      made = self._class_weights @ made.astype(np.float64)
    return made.astype("<f4").tobytes()


def _read_json(path: pathlib.Path):
  """Returns a file's JSON; None without the file. Raises CheckpointError."""
  try:
    return json.loads(path.read_text("utf-8"))
  except FileNotFoundError:
    return None
  except (OSError, ValueError, RecursionError) as error:
    raise CheckpointError(f"{path}: {error}; download the file again") from None


def _check_modules(path: pathlib.Path, modules) -> None:
  """Refuses modules that would change an embedding, such as Dense."""
  try:
    kinds = [module["type"].rpartition(".")[2] for module in modules]
  except (TypeError, KeyError, AttributeError):
    raise CheckpointError(f"{path}: it holds no list of modules with a type; download the file again") from None
  for kind in kinds:
    if kind not in _KNOWN_MODULES:
      raise ConfigError(
        f"enable_embeddings: {path} has a module {kind}, and Sluice has {', '.join(_KNOWN_MODULES)}; serve "
        "without it by --pooling=last or --pooling=mean, or serve another model"
      )
