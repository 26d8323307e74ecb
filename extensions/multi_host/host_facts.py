"""What must be equal on all hosts, and a line that names every difference. Reads files; may not load a model."""

from collections.abc import Mapping
import hashlib
from importlib import metadata
import pathlib
from typing import Any

import msgspec

from engine.model_folder import INDEX, SINGLE
from server.version import server_version

# Files that decide what a model computes, besides its weights.
_READ_WHOLE = ("config.json", "generation_config.json", "sluice.json", "tokenizer.json", "1_Pooling/config.json", INDEX)
# Weights are too many to read whole on every host: their size and three samples distinguish models.
_SAMPLE_BYTES = 1 << 16
_CODE = ("engine", "models", "pallas_kernels", "extensions/multi_host")
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MOST_NAMED = 5
_DIGEST_CHARS = 16

Facts = dict[str, str]
read_facts = msgspec.json.Decoder(Facts).decode


def collect_facts(model_dir: pathlib.Path, num_hosts: int, settings: Mapping[str, Any]) -> Facts:
  """Returns name -> value of all that must be equal.

  Args:
    model_dir: the model's folder.
    num_hosts: the setting.
    settings: the engine's settings by flag.
  """
  facts = {
    "Sluice": server_version(),
    "Sluice's code": _hash_code(),
    "jax": metadata.version("jax"),
    "jaxlib": metadata.version("jaxlib"),
    "--num_hosts": str(num_hosts),
  }
  facts |= {f"--{name}": str(value) for name, value in settings.items() if name != "compile_cache_dir"}
  return facts | hash_model(model_dir)


def hash_model(folder: pathlib.Path) -> Facts:
  """Returns a digest of each file that decides what a model computes. Weights count by size and samples."""
  found = {}
  for name in _READ_WHOLE:
    if (folder / name).is_file():
      found[f"the model's {name}"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()[:_DIGEST_CHARS]
  single = folder / SINGLE
  weights = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
  weights += sorted(file for file in (folder / "weights").rglob("*") if file.is_file())
  for file in weights:
    found[f"the model's {file.relative_to(folder)}"] = _hash_samples(file)
  return found


def compare_facts(mine: Facts, others: Mapping[int, Facts]) -> str:
  """Returns a line that names the differences between host 0 and the others, or "" if all agree."""
  lines = []
  for host, theirs in sorted(others.items()):
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    lines += [
      f"host {host} has {name} {_shown(theirs.get(name))}, host 0 {_shown(mine.get(name))}"
      for name in names[:_MOST_NAMED]
    ]
    if len(names) > _MOST_NAMED:
      lines.append(f"host {host} differs in {len(names) - _MOST_NAMED} more")
  if not lines:
    return ""
  return f"the hosts do not agree: {'; '.join(lines)}; run one Sluice, one model and one command on all hosts"


def _shown(value: str | None) -> str:
  return "nothing" if value is None else value[:100] or "(empty)"


def _hash_samples(file: pathlib.Path) -> str:
  size = file.stat().st_size
  digest = hashlib.sha256()
  with open(file, "rb") as stream:
    for start in (0, max(0, size // 2 - _SAMPLE_BYTES // 2), max(0, size - _SAMPLE_BYTES)):
      stream.seek(start)
      digest.update(stream.read(_SAMPLE_BYTES))
  return f"of {size} bytes, {digest.hexdigest()[:_DIGEST_CHARS]}"


def _hash_code() -> str:
  digest = hashlib.sha256()
  for package in _CODE:
    for file in sorted((_ROOT / package).rglob("*.py")):
      digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes() + b"\0")
  return digest.hexdigest()[:_DIGEST_CHARS]
