"""The tokenizer as a zip: just its files, the same bytes each time, and nothing from outside of the model's folder."""

import hashlib
import io
import os
import pathlib
import shutil
import zipfile

import pytest

from extensions.vllm_api import tokenizer_zip
from extensions.vllm_api.tokenizer_zip import CHUNK_BYTES, TokenizerZip, make_zip
from server.errors import NotConfigured
from server.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tokenizer_dir, tmp_path) -> pathlib.Path:
  """A model with what is not a tokenizer's beside it."""
  made = tmp_path / "model"
  shutil.copytree(tokenizer_dir, made)
  (made / "config.json").write_text("{}")
  for name in ("model.safetensors", "secrets", "notes.json", "tokenizer.json.part"):
    (made / name).write_text("not for anybody")
  (made / "generation_config.json").mkdir()
  return made


def zipped(folder: pathlib.Path) -> TokenizerZip:
  return make_zip(folder, Tokenizer(folder).digest)


def names_in(made: TokenizerZip) -> list[str]:
  with zipfile.ZipFile(io.BytesIO(made.data)) as archive:
    assert archive.testzip() is None
    return archive.namelist()


def test_its_files_and_no_others(folder):
  made = zipped(folder)
  assert names_in(made) == ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"]
  assert made.sha256 == hashlib.sha256(made.data).hexdigest()


def test_the_same_bytes_of_another_copy_at_another_time(folder, tmp_path):
  other = shutil.copytree(folder, tmp_path / "other")
  for path in other.iterdir():
    os.utime(path, (1, 1))
    path.chmod(0o700)
  assert zipped(other) == zipped(folder)


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_chunks_are_the_zip_and_the_last_has_its_digest(size):
  made = TokenizerZip(os.urandom(size), "digest")
  pieces, digests = zip(*made.chunks(), strict=True)
  assert b"".join(pieces) == made.data and max(map(len, pieces)) <= CHUNK_BYTES
  assert digests == ("",) * ((size - 1) // CHUNK_BYTES) + ("digest",)


@pytest.mark.catalogue("G3")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "more.jinja"])
def test_links_out_of_the_folder_are_not_followed(folder, name):
  outside = folder.parent / "outside"
  (folder / name).rename(outside) if (folder / name).exists() else outside.write_text("secret")
  (folder / name).symlink_to(outside)
  with pytest.raises(
    NotConfigured, match=f"{name} links to a file outside the model's folder; copy that file there"
  ) as caught:
    zipped(folder)
  assert str(folder.parent) not in str(caught.value)


@pytest.mark.catalogue("G3")
def test_links_of_a_download_are_its_own(tokenizer_dir, tmp_path):
  """As huggingface_hub lays models out."""
  snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
  snapshot.mkdir(parents=True)
  shutil.copytree(tokenizer_dir, blobs)
  for path in blobs.iterdir():
    (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
  assert zipped(snapshot) == zipped(tokenizer_dir)


def test_links_that_lead_nowhere_and_pipes_are_no_files(folder):
  wanted = zipped(folder)
  (folder / "special_tokens_map.json").symlink_to("special_tokens_map.json")
  (folder / "chat_template.json").symlink_to("nowhere")
  os.mkfifo(folder / "more.jinja")
  assert zipped(folder) == wanted


def test_what_is_too_much(folder, monkeypatch):
  sizes = sum((folder / name).stat().st_size for name in names_in(zipped(folder)))
  monkeypatch.setattr(tokenizer_zip, "_MAX_BYTES", sizes)
  zipped(folder)
  monkeypatch.setattr(tokenizer_zip, "_MAX_BYTES", sizes - 1)
  with pytest.raises(NotConfigured, match=rf"tokenizer_config\.json have more than the limit of {sizes - 1} bytes"):
    zipped(folder)
  monkeypatch.undo()
  for number in range(46):
    (folder / f"{number}.jinja").touch()
  assert len(names_in(zipped(folder))) == 50
  (folder / "46.jinja").touch()
  with pytest.raises(NotConfigured, match="has 51 files of a tokenizer, the limit is 50"):
    zipped(folder)


def test_a_tokenizer_that_is_not_the_one_that_is_served(folder):
  digest = Tokenizer(folder).digest
  with open(folder / "tokenizer.json", "a") as file:
    file.write("\n")
  with pytest.raises(NotConfigured, match=r"tokenizer\.json has changed since the server read it"):
    make_zip(folder, digest)
  (folder / "tokenizer.json").unlink()
  with pytest.raises(NotConfigured, match=r"tokenizer\.json has gone since the server read it"):
    make_zip(folder, digest)
