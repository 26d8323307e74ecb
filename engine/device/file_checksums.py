"""Reads and verifies SHA256SUMS of a model folder, in the format of `sha256sum`. May not know formats of weights.

Neither safetensors nor Orbax stores digests of array bytes, so only this file detects a flipped bit.
"""

import hashlib
import pathlib
import re

from engine.errors import CheckpointError

SUMS = "SHA256SUMS"
# Text and binary mode; no model has names that sha256sum would escape.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")


def read_sums(folder: pathlib.Path) -> list[tuple[str, str]]:
  """Returns (file, digest) of every line; files are relative to the folder and inside it.

  Raises:
    CheckpointError: the list is unreadable or invalid.
  """
  try:
    lines = (folder / SUMS).read_text("ascii").splitlines()
  except (OSError, ValueError) as error:
    raise CheckpointError(
      f"{folder / SUMS}: cannot be read ({error}); the folder is an unfinished conversion or an "
      "incomplete copy; make it again"
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
  """Returns the SHA-256 of the file's bytes, in hexadecimal."""
  with open(file, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()
