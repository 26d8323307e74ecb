"""Selects a model's files in a repository or bucket by their names. Reads no weights."""

from collections.abc import Callable, Collection
import json
import pathlib

from engine.errors import CheckpointError
from engine.model_folder import CONFIG, INDEX, PICKLE_SUFFIXES, SINGLE, SLUICE_MARKER, describe_missing_weights

_TEXT_FILES = ("tokenizer.model", "merges.txt", "vocab.txt")
# Code, and formats that can hold code or that Sluice does not read.
_NEVER = (*PICKLE_SUFFIXES, ".py", ".pyc", ".so", ".h5", ".msgpack", ".gguf", ".onnx")


def select_model_files(
  names: Collection[str], read_index: Callable[[], bytes], place: str, *, needs_weights: bool = True
) -> list[str]:
  """Returns the files to download: configuration, tokenizer, chat template, license, and the loaded safetensors.

  If there are several copies of the weights, it selects those that the loader reads: model.safetensors, else the files
  in model.safetensors.index.json, else the only GGUF file. It selects every file of a Sluice folder.

  Args:
    names: the names of all files, relative to the model's folder.
    read_index: returns the bytes of model.safetensors.index.json; called only if they are needed.
    place: the repository or bucket in the user's spelling, for messages.
    needs_weights: false: omits the files of the weights.

  Raises:
    CheckpointError: the place holds no model, or one in a format that Sluice does not read.
  """
  for name in names:
    if name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
      raise CheckpointError(f"{place}: holds a file of the name {name!r}, which no folder can hold; remove it there")
  if SLUICE_MARKER in names:
    return sorted(name for name in names if not name.endswith(_NEVER))
  if CONFIG not in names:
    if any(name.endswith((".gguf", *PICKLE_SUFFIXES)) for name in names) or "adapter_config.json" in names:
      raise CheckpointError(describe_missing_weights(place, names))
    raise CheckpointError(f"{place}: holds no {CONFIG}; it is no model: check the name and the path")
  wanted = {name for name in names if "/" not in name and _is_companion(name)}
  if needs_weights:
    if SINGLE in names:
      wanted.add(SINGLE)
    elif INDEX in names:
      wanted |= {INDEX, *_listed_shards(names, read_index(), place)}
    elif len(ggufs := [name for name in names if "/" not in name and name.endswith(".gguf")]) == 1:
      wanted.update(ggufs)
    else:
      raise CheckpointError(describe_missing_weights(place, names))
  return sorted(wanted)


def _is_companion(name: str) -> bool:
  suffix = pathlib.PurePath(name).suffix
  is_json = suffix == ".json" and not name.endswith(".index.json")
  return is_json or suffix == ".jinja" or name in _TEXT_FILES or name.startswith("LICENSE")


def _listed_shards(names: Collection[str], index: bytes, place: str) -> set[str]:
  try:
    shards = set(json.loads(index)["weight_map"].values())
    unknown = sorted(str(name) for name in shards if name not in names or not str(name).endswith(".safetensors"))
  except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
    raise CheckpointError(f"{place}/{INDEX}: is no index ({str(error):.100}); restore it there") from error
  if unknown:
    raise CheckpointError(
      f"{place}: {INDEX} lists {unknown[0]}{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}, which is "
      "not there; the upload is incomplete: upload the missing files"
    )
  return shards
