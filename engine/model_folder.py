"""Which files of a model folder are its own, and why a folder is no model. Reads names and one index, no weights.

A download's links are a folder's own; links of anybody's making are not.
"""

from collections.abc import Collection
import json
import pathlib

from engine.errors import CheckpointError

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SLUICE_MARKER, _SLUICE_WEIGHTS = "sluice.json", "weights"
# Formats that can run code when they are opened.
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_SHARED_BLOBS_MARKER = ".huggingface-shared-blobs"
_CHOOSE_SAFETENSORS = "choose a repository or folder of the model that holds safetensors"
_GGUF_FOLDER = (
  f"a GGUF file needs the model's {CONFIG} and tokenizer.json beside it; put one GGUF file and those files of the "
  "model's own repository into a folder, and set --model to the folder"
)


def leads_outside(file: pathlib.Path) -> pathlib.Path | None:
  """Where a file of a folder really lies, if that is neither in the folder nor among the same download's blobs.

  huggingface_hub keeps what it loads as models--X/snapshots/REVISION/FILE -> models--X/blobs/DIGEST, which may itself
  be a link into the blobs that all models of the cache share: -> blobs/PREFIX/DIGEST.
  """
  folder, found = file.parent.resolve(), file.resolve()
  homes = [folder]
  if folder.parent.name == "snapshots":
    repository = folder.parent.parent
    homes.append(repository / "blobs")
    shared = repository.parent / "blobs"
    if (shared / _SHARED_BLOBS_MARKER).is_file():
      homes.append(shared)
  return None if any(found.is_relative_to(home) for home in homes) else found


def name_of_model(folder: pathlib.Path) -> str:
  """ORG/NAME of a snapshot of the Hugging Face hub's cache, models--ORG--NAME/snapshots/REVISION; else the folder's."""
  folder = folder.resolve()
  kind, _, repository = folder.parent.parent.name.partition("--")
  if folder.parent.name == "snapshots" and kind == "models" and repository:
    return repository.replace("--", "/", 1)
  return folder.name


def check_model_folder(folder: pathlib.Path, *, needs_weights: bool = True) -> None:
  """Finds what is wrong with a folder by the names of its files alone, in milliseconds.

  Args:
    needs_weights: false: only config.json is needed.

  Raises:
    CheckpointError: it is no folder, no model, a model in a format that Sluice does not read, or half a model.
  """
  if not folder.is_dir():
    raise CheckpointError(f"{folder}: {_describe_no_folder(folder)}")
  names = sorted(path.name for path in folder.iterdir())
  if SLUICE_MARKER in names or (folder / _SLUICE_WEIGHTS).is_dir():
    return  # engine/device/orbax_folder.py compares every file with its digest
  if CONFIG not in names:
    raise CheckpointError(_describe_no_config(folder, names))
  if not needs_weights or SINGLE in names:
    return
  if INDEX not in names and find_gguf(folder) is None:
    raise CheckpointError(describe_missing_weights(str(folder), names))
  missing = [name for name in _listed_shards(folder / INDEX) if name not in names] if INDEX in names else []
  if missing:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise CheckpointError(
      f"{folder / missing[0]}{more}: no such file, though {INDEX} lists it; the copy is incomplete: copy or download "
      "the missing files"
    )


def count_weight_bytes(folder: pathlib.Path) -> int:
  """Returns the bytes of a folder's safetensors and GGUF files, without what is missing; 0 for a Sluice folder."""
  files = (file for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf"))
  return sum(file.stat().st_size for file in files if file.is_file())


def find_gguf(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the GGUF file of a folder without safetensors. Raises CheckpointError if there are several."""
  if (folder / SINGLE).exists() or (folder / INDEX).exists():
    return None
  files = sorted(folder.glob("*.gguf"))
  if len(files) > 1:
    raise CheckpointError(
      f"{folder}: holds {len(files)} GGUF files, {files[0].name} and {files[1].name} among them; keep one in the folder"
    )
  return files[0] if files else None


def describe_missing_weights(place: str, names: Collection[str]) -> str:
  """Why none of a folder's or repository's files are weights that Sluice loads, and what to do.

  Args:
    place: a folder or a repository, as the user knows it.
    names: of its files.
  """
  pickles = sorted((name for name in names if name.endswith(PICKLE_SUFFIXES)), key=lambda name: ("/" in name, name))
  ggufs = sorted(name for name in names if name.endswith(".gguf"))
  if pickles:
    return (
      f"{place}/{pickles[0]}: a pickled checkpoint can run code when it is opened, so Sluice never does; "
      f"{_CHOOSE_SAFETENSORS}, or convert it where you trust it: transformers' "
      "AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER) writes safetensors"
    )
  if ggufs:
    return f"{place}/{ggufs[0]}: {_GGUF_FOLDER}"
  if "adapter_config.json" in names:
    return (
      f"{place}/adapter_config.json: an adapter is no whole model; merge it into its base model with peft's "
      "merge_and_unload() and save_pretrained(FOLDER)"
    )
  found = sorted(name for name in names if name.endswith(".safetensors"))
  return (
    f"{place}: holds neither {SINGLE} nor {INDEX} nor {SLUICE_MARKER}{f', but {found[0]}' if found else ''}; it is no "
    "model folder: transformers' save_pretrained(FOLDER) writes one"
  )


def _describe_no_folder(path: pathlib.Path) -> str:
  if not path.exists():
    return (
      "no such folder; --model takes a model folder, ORG/NAME of the Hugging Face hub, gs://BUCKET/PATH or "
      "s3://BUCKET/PATH"
    )
  if path.suffix == ".gguf":
    return f"is no folder; {_GGUF_FOLDER}"
  return f"is no folder; give --model the folder that holds {CONFIG} and {SINGLE}"


def _describe_no_config(folder: pathlib.Path, names: list[str]) -> str:
  if "adapter_config.json" in names or any(name.endswith(".gguf") for name in names):
    return describe_missing_weights(str(folder), [name for name in names if not name.endswith(PICKLE_SUFFIXES)])
  inner = sorted([*folder.glob(f"*/{CONFIG}"), *folder.glob(f"snapshots/*/{CONFIG}")])
  if inner:
    return f"{folder / CONFIG}: no such file; {inner[0].parent} holds one: give --model that folder"
  return f"{folder / CONFIG}: no such file; a model folder needs one: copy it from the model's source"


def _listed_shards(index: pathlib.Path) -> list[str]:
  """Returns the file names of an index; none if it is unreadable, which loading the weights reports."""
  if leads_outside(index) is not None:
    return []
  try:
    names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
  except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError):
    return []
  plain = all(isinstance(name, str) and pathlib.PurePath(name).name == name for name in names)
  return sorted(names) if plain and all(name.endswith(".safetensors") for name in names) else []
