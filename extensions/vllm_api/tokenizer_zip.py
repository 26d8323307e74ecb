"""Packs a model's tokenizer into one zip, for clients that tokenize. May not read outside the model's folder.

The files and the limits follow the gateway that reads them (smg: its servicers' tokenizer_bundle.py and its
grpc_client's tokenizer_bundle.rs). Vocabularies that replace a tokenizer.json are left out, since Sluice has no
tokenizer without that file.
"""

from collections.abc import Iterator
import dataclasses
import hashlib
import io
import pathlib
import zipfile

from engine.model_folder import leads_outside
from server.errors import NotConfigured

CHUNK_BYTES = 64 << 10
_TOKENIZER = "tokenizer.json"
_FILES = (
  _TOKENIZER,
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.json",
  "config.json",
  "generation_config.json",
)
_TEMPLATES = "*.jinja"
_MAX_FILES = 50
# Limit for all files. Readers accept 200 MiB of zip and 500 MiB of files; a zip is hardly larger than its files.
_MAX_BYTES = 192 << 20
# The smallest header, so that the zip's bytes depend on names and contents alone.
_TIME = (1980, 1, 1, 0, 0, 0)
_UNIX, _READABLE = 3, 0o100644 << 16


@dataclasses.dataclass(frozen=True)
class TokenizerZip:
  """A tokenizer's zip: the same bytes for the same files.

  Attributes:
    data: the zip.
    sha256: its digest in hexadecimal digits.
  """

  data: bytes
  sha256: str

  def chunks(self) -> Iterator[tuple[bytes, str]]:
    """Yields the data in pieces of CHUNK_BYTES, each with a text: the digest with the last piece, else empty."""
    for start in range(0, len(self.data), CHUNK_BYTES):
      piece = self.data[start : start + CHUNK_BYTES]
      yield piece, self.sha256 if start + CHUNK_BYTES >= len(self.data) else ""


def make_zip(folder: pathlib.Path, tokenizer_digest: bytes) -> TokenizerZip:
  """Reads and compresses the files. Slow, so not for the event loop.

  Args:
    folder: the model's folder.
    tokenizer_digest: SHA-256 of the tokenizer.json in use.

  Raises:
    NotConfigured: a file cannot be sent, or differs from the one in use.
  """
  names = sorted({*_FILES, *(path.name for path in folder.glob(_TEMPLATES))})
  names = [name for name in names if (folder / name).is_file()]
  if len(names) > _MAX_FILES:
    raise NotConfigured(
      f"the model's folder has {len(names)} files of a tokenizer, the limit is {_MAX_FILES}: remove templates"
    )
  allowed = _MAX_BYTES
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
    for name in names:
      raw = _read(folder / name, allowed)
      allowed -= len(raw)
      if name == _TOKENIZER and hashlib.sha256(raw).digest() != tokenizer_digest:
        raise NotConfigured(f"{name} has changed since the server read it; restart the server")
      entry = zipfile.ZipInfo(name, _TIME)
      entry.compress_type, entry.create_system, entry.external_attr = zipfile.ZIP_DEFLATED, _UNIX, _READABLE
      archive.writestr(entry, raw)
  if _TOKENIZER not in names:
    raise NotConfigured(f"{_TOKENIZER} has gone since the server read it; restore it")
  data = buffer.getvalue()
  return TokenizerZip(data, hashlib.sha256(data).hexdigest())


def _read(file: pathlib.Path, allowed: int) -> bytes:
  if leads_outside(file) is not None:
    raise NotConfigured(f"{file.name} links to a file outside the model's folder; copy that file there")
  try:
    with open(file, "rb") as source:
      raw = source.read(allowed + 1)  # its size may change while it is read
  except OSError as error:
    raise NotConfigured(f"{file.name} cannot be read: {error.strerror}; restore it from its source") from error
  if len(raw) > allowed:
    raise NotConfigured(
      f"the tokenizer's files up to {file.name} have more than the limit of {_MAX_BYTES} bytes: restore that file"
    )
  return raw
