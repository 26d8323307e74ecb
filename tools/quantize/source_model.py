"""Reads the tensors of a plain model folder one at a time. May not quantize or write."""

from collections.abc import Callable
import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np

from engine.device.mesh import make_mesh
from engine.device.orbax_folder import is_orbax_folder
from engine.device.safetensors_file import read_header
from engine.device.weights import open_checkpoint, parameter_name
from engine.errors import CheckpointError, ConfigError
from engine.model_folder import CONFIG, INDEX, SINGLE
from models.config import ModelConfig
from models.families.tensor_map import TensorMap
from models.registry import tensors

_BACKBONE = "model."


@dataclasses.dataclass(frozen=True)
class SourceTensor:
  """A tensor of the checkpoint.

  Attributes:
    stored_name: its name in the file; a backbone's lacks `model.`.
    file: name of its safetensors file.
    read: returns the values, in host memory or as a map of the file.
  """

  stored_name: str
  file: str
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class SourceModel:
  """A checked folder.

  Attributes:
    raw: config.json.
    tensors: by the name in a whole model, in the order of the files.
  """

  folder: pathlib.Path
  raw: dict[str, Any]
  config: ModelConfig
  tensors: dict[str, SourceTensor]

  @property
  def pieces(self) -> TensorMap:
    """The tensors of every parameter of the decoder."""
    return tensors(self.config)

  def linear_names(self) -> list[str]:
    """The matrices inside layers; embeddings and heads are not among them."""
    return [
      piece.name
      for parameter, pieces in self.pieces.items()
      for piece in pieces
      if parameter.startswith("layers.") and len(piece.shape) == 2
    ]


def open_source(folder: pathlib.Path) -> SourceModel:
  """Opens a folder of Hugging Face's kind, or of Sluice's own, which is read whole.

  Raises:
    ConfigError: its weights are quantized already.
    CheckpointError: Sluice cannot serve the model.
  """
  try:
    raw = json.loads((folder / CONFIG).read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{folder / CONFIG}: cannot be read ({error}); copy the file again") from error
  if isinstance(raw, dict) and raw.get("quantization_config"):
    found = raw["quantization_config"]
    method = found.get("quant_method") if isinstance(found, dict) else found
    raise ConfigError(
      f"{folder / CONFIG}: the weights are quantized already (quant_method={method!r:.80}); set --model to the plain "
      "checkpoint"
    )
  mesh = make_mesh(jax.devices("cpu")[:1])
  checkpoint = open_checkpoint(str(folder), mesh, "float32")
  config = checkpoint.declared.config
  if is_orbax_folder(folder):
    (dtype,) = checkpoint.stored_dtypes
    loaded = open_checkpoint(str(folder), mesh, dtype).load()
    values = {parameter_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(loaded.params)}
    return SourceModel(folder, raw, config, _split_parameters(config, values))
  return SourceModel(folder, raw, config, _stored_tensors(folder))


def _split_parameters(config: ModelConfig, values: dict[str, np.ndarray]) -> dict[str, SourceTensor]:
  found = {}
  for parameter, pieces in tensors(config).items():
    for piece in pieces:
      part = values[parameter][piece.box()].transpose(np.argsort(piece.order)).reshape(piece.shape)
      found[piece.name] = SourceTensor(piece.name, SINGLE, piece.shape, part.dtype, lambda part=part: part)
  return found


def _stored_tensors(folder: pathlib.Path) -> dict[str, SourceTensor]:
  files = [SINGLE]
  if not (folder / SINGLE).exists():
    files = sorted(set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()))
  stored = {name: (file, tensor) for file in files for name, tensor in read_header(folder / file).items()}
  is_backbone = not any(name.startswith(_BACKBONE) for name in stored)
  found = {}
  for name, (file, tensor) in stored.items():
    tensor.check_dtype()
    whole = _BACKBONE + name if is_backbone and not name.startswith(("lm_head.", "score.")) else name
    found[whole] = SourceTensor(name, file, tensor.shape, tensor.numpy_dtype, tensor.map)
  return found
