"""SHA256SUMS in a model folder, as `sha256sum` writes and checks it. Reads and compares; knows no format of weights.

Neither safetensors nor Orbax keeps digests of array bytes: without this file a flipped bit would be served.
"""

import hashlib
import pathlib
import re

from engine.errors import CheckpointError

SUMS = "SHA256SUMS"
# Text and binary mode; sha256sum's escaped names are none that a model has.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")


def read_sums(folder: pathlib.Path) -> list[tuple[str, str]]:
  """(file, digest) of every line, the files relative to the folder and inside it.

  Raises:
    CheckpointError: the list cannot be read, or is none.
  """
  try:
    lines = (folder / SUMS).read_text("ascii").splitlines()
  except (OSError, ValueError) as error:
    raise CheckpointError(
      f"{folder / SUMS}: cannot be read ({error}); the folder is an unfinished conversion or an "
      "incomplete copy: make it again"
    ) from error
  out = []
  for line in lines:
    found = _LINE.fullmatch(line)
    if found is None or found[2].startswith("/") or ".." in pathlib.PurePath(found[2]).parts:
      raise CheckpointError(f"{folder / SUMS}: line {line[:80]!r} is no digest of a file; copy the folder again")
    out.append((found[2], found[1]))
  return out


def verify_sum(folder: pathlib.Path, file: str, digest: str) -> None:
  """Raises CheckpointError unless the file is there and has this digest."""
  if not (folder / file).is_file():
    raise CheckpointError(f"{folder / file}: is missing, though {SUMS} lists it; copy the folder again")
  if sha256(folder / file) != digest:
    raise CheckpointError(f"{folder / file}: is corrupt, its SHA-256 is not the one in {SUMS}; copy the folder again")


def sha256(file: pathlib.Path) -> str:
  """Of the file's bytes, in hexadecimal."""
  with open(file, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()
