"""Reads and writes Sluice's own model folder: Orbax weights and digests. May not know families or Hugging Face names.

  sluice.json        {"format": 1, "name": ..., "dtype": ...}
  config.json        Hugging Face's file, like the tokenizer and generation_config.json
  weights/           an Orbax PyTree {parameter: array}, OCDBT: a dozen files for every model
  SHA256SUMS         digests of the files above, in the format of `sha256sum --check`; written last

The folder needs digests because Orbax and TensorStore store none of array bytes, so they miss a flipped bit.
"""

from collections.abc import Iterator
import contextlib
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from engine.device.file_checksums import SUMS, read_sums, sha256, verify_sum
from engine.errors import CheckpointError, ConfigError

MARKER = "sluice.json"
_WEIGHTS, _FORMAT = "weights", 1
_SECONDS_TO_REMOVE = 10.0


def is_orbax_folder(folder: pathlib.Path) -> bool:
  """Returns whether the folder has Sluice's marker, complete or not."""
  return (folder / MARKER).exists() or (folder / _WEIGHTS).is_dir()


def verify_orbax_folder(folder: pathlib.Path) -> dict[str, str]:
  """Compares every file with its digest.

  Returns:
    "name": the model's name; "dtype": JAX name of the stored weights' dtype.

  Raises:
    CheckpointError: with the first file that is missing, changed or unlisted.
  """
  sums = dict(read_sums(folder))
  for file in sorted(set(_covered(folder)) | {MARKER, "config.json"}):
    if file not in sums:
      raise CheckpointError(f"{folder / file}: is not listed in {SUMS}; convert the model again")
  for file, digest in sorted(sums.items()):
    verify_sum(folder, file, digest)
  marker = json.loads((folder / MARKER).read_text("utf-8"))
  if marker.get("format") != _FORMAT or not all(isinstance(marker.get(key), str) for key in ("name", "dtype")):
    raise CheckpointError(
      f"{folder / MARKER}: format={marker.get('format')!r} is not supported; supported is "
      f"{_FORMAT}; convert the model again with tools/convert_checkpoint.py"
    )
  return marker


def load_orbax_arrays(
  folder: pathlib.Path, wanted: dict[str, jax.ShapeDtypeStruct], on_host: bool = False
) -> dict[str, Any]:
  """Restores a verified folder to the dtypes of `wanted`, by parameter name.

  Args: on_host: as numpy arrays; else as jax.Arrays with the shardings of `wanted`.
  """
  import orbax.checkpoint as ocp  # takes 0.3 s, and Hugging Face folders do not need it

  directory = (folder / _WEIGHTS).resolve()
  # Orbax needs more memory than its largest array; a little more limits the bytes in flight.
  limit = 1 + max(leaf.size * leaf.dtype.itemsize for leaf in wanted.values()) // 2**29
  with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)) as checkpointer:
    try:
      stored = {key: list(entry.shape) for key, entry in checkpointer.metadata(directory).item_metadata.items()}
    except Exception as error:  # Orbax raises errors of many types
      raise CheckpointError(
        f"{directory}: cannot be read as an Orbax checkpoint ({error}); convert the model again"
      ) from error
    shapes = {key: list(leaf.shape) for key, leaf in wanted.items()}
    for key in sorted(shapes.keys() | stored.keys()):
      if stored.get(key) != shapes.get(key):
        raise CheckpointError(
          f"{directory}: tensor {key} has shape {stored.get(key, 'none')}, but config.json requires "
          f"{shapes.get(key, 'none')}; use files of one model"
        )
    arguments = {
      key: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
      if on_host
      else ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape)
      for key, leaf in wanted.items()
    }
    return checkpointer.restore(directory, args=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments))


def save_orbax_folder(
  folder: pathlib.Path, params: dict[str, jax.Array], model_name: str, files: tuple[pathlib.Path, ...]
) -> None:
  """Writes a folder atomically: under a temporary name next to `folder`, then renames it.

  Args:
    folder: must not exist.
    params: arrays by parameter name.
    files: config.json and other files to copy next to the weights.

  Raises:
    ConfigError: the folder exists, or the disk is too small.
    CheckpointError: writing failed; no partial folder remains.
  """
  if folder.exists():
    raise ConfigError(f"{folder}: exists already; choose a new folder or remove this one")
  folder.parent.mkdir(parents=True, exist_ok=True)
  needed, free = sum(value.nbytes for value in params.values()), shutil.disk_usage(folder.parent).free
  if needed > free:
    raise ConfigError(f"{folder}: needs {needed} bytes, and {free} are free; free disk space, or choose another folder")
  import orbax.checkpoint as ocp

  try:
    with _temporary_folder(folder) as parent:
      draft = parent.resolve() / folder.name
      draft.mkdir()
      for file in files:
        shutil.copyfile(file, draft / file.name)
      with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(draft / _WEIGHTS, args=ocp.args.PyTreeSave(params))
      # Orbax's commit marker is for object stores, and it contains a path of this machine. SHA256SUMS replaces it.
      (draft / _WEIGHTS / "commit_success.txt").unlink(missing_ok=True)
      marker = {"format": _FORMAT, "name": model_name, "dtype": str(next(iter(params.values())).dtype)}
      (draft / MARKER).write_text(json.dumps(marker, indent=1) + "\n", "utf-8")
      (draft / SUMS).write_text("".join(f"{sha256(draft / file)}  {file}\n" for file in _covered(draft)), "ascii")
      os.rename(draft, folder)
  except Exception as error:  # Orbax raises errors of many types
    raise CheckpointError(f"{folder}: cannot be written ({' '.join(str(error).split())})") from error


@contextlib.contextmanager
def _temporary_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a folder next to `folder`, and removes it.

  After an error, Orbax's threads may add files for a moment, so the folder is removed until it stays away. Callers see
  the error of the writing.
  """
  temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
  try:
    yield temporary
  finally:
    deadline = time.monotonic() + _SECONDS_TO_REMOVE
    while temporary.exists() and time.monotonic() < deadline:
      shutil.rmtree(temporary, ignore_errors=True)
      if sys.exception() is not None:
        time.sleep(0.1)


def _covered(folder: pathlib.Path) -> list[str]:
  """Returns the files that determine the weights; users may edit a chat template or model card freely."""
  weights = [file for file in (folder / _WEIGHTS).rglob("*") if file.is_file()]
  beside = [file for file in (folder / "config.json", folder / MARKER) if file.is_file()]
  return sorted(file.relative_to(folder).as_posix() for file in [*weights, *beside])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Silences Orbax's forty lines of information for a folder, but not its warnings."""
  logger = logging.getLogger("absl")
  level = logger.level
  logger.setLevel(logging.WARNING)
  try:
    yield
  finally:
    logger.setLevel(level)
