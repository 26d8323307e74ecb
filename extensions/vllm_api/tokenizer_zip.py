"""A model's tokenizer as one zip, for clients that tokenize by themselves. May not read outside of the model's folder.

Which files, and the limits that their readers have, are those of the gateway that asks for them (smg: its servicers'
tokenizer_bundle.py and its grpc_client's tokenizer_bundle.rs). Vocabularies that stand in for a tokenizer.json are left
out, for without that file there is no tokenizer here.
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
# Of all files. Readers take 200 MiB of zip and 500 MiB of files; a zip of these can hardly be larger than they are.
_MAX_BYTES = 192 << 20
# The least that a zip can say: so that its bytes depend on names and contents alone.
_TIME = (1980, 1, 1, 0, 0, 0)
_UNIX, _READABLE = 3, 0o100644 << 16


@dataclasses.dataclass(frozen=True)
class TokenizerZip:
  """The same bytes for the same files.

  Attributes:
    data: the zip.
    sha256: of it, in hexadecimal digits.
  """

  data: bytes
  sha256: str

  def chunks(self) -> Iterator[tuple[bytes, str]]:
    """The data in pieces of CHUNK_BYTES, each with a text beside it: the digest with the last one."""
    for start in range(0, len(self.data), CHUNK_BYTES):
      piece = self.data[start : start + CHUNK_BYTES]
      yield piece, self.sha256 if start + CHUNK_BYTES >= len(self.data) else ""


def make_zip(folder: pathlib.Path, tokenizer_digest: bytes) -> TokenizerZip:
  """Reads and compresses, which is nothing for an event loop.

  Args:
    folder: of the model.
    tokenizer_digest: SHA-256 of the tokenizer.json that is served.

  Raises:
    NotConfigured: a file cannot be sent, or is not the one that is served.
  """
  names = sorted({*_FILES, *(path.name for path in folder.glob(_TEMPLATES))})
  names = [name for name in names if (folder / name).is_file()]
  if len(names) > _MAX_FILES:
    raise NotConfigured(
      f"the model's folder has {len(names)} files of a tokenizer, the limit is {_MAX_FILES}: remove templates"
    )
  room = _MAX_BYTES
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
    for name in names:
      raw = _read(folder / name, room)
      room -= len(raw)
      if name == _TOKENIZER and hashlib.sha256(raw).digest() != tokenizer_digest:
        raise NotConfigured(f"{name} has changed since the server read it; start the server anew")
      entry = zipfile.ZipInfo(name, _TIME)
      entry.compress_type, entry.create_system, entry.external_attr = zipfile.ZIP_DEFLATED, _UNIX, _READABLE
      archive.writestr(entry, raw)
  if _TOKENIZER not in names:
    raise NotConfigured(f"{_TOKENIZER} has gone since the server read it; restore it")
  data = buffer.getvalue()
  return TokenizerZip(data, hashlib.sha256(data).hexdigest())


def _read(file: pathlib.Path, room: int) -> bytes:
  if leads_outside(file) is not None:
    raise NotConfigured(f"{file.name} is a link out of the model's folder and is not sent; copy the file there")
  try:
    with open(file, "rb") as source:
      raw = source.read(room + 1)  # its size may change under a look at it
  except OSError as error:
    raise NotConfigured(f"{file.name} cannot be read: {error.strerror}; restore it from its source") from error
  if len(raw) > room:
    raise NotConfigured(
      f"the tokenizer's files up to {file.name} have more than the limit of {_MAX_BYTES} bytes: restore that file"
    )
  return raw
