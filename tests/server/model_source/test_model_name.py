"""What a model's name means, which files make a model, and which folder is none."""

import json
import pathlib

import pytest

from engine.errors import CheckpointError, ConfigError
from engine.model_folder import check_model_folder, leads_outside, name_of_model
from server.model_source.file_selection import select_model_files
from server.model_source.model_name import FOLDER, GCS, HUB, S3, ModelName, parse_model_name
from tests.server.model_source.model_files import INDEX, SHARDS, UNWANTED, WANTED

DEMO = pathlib.Path(__file__).resolve().parents[3] / "models" / "demo"


@pytest.mark.parametrize(
  ("text", "revision", "kind", "place", "path", "found"),
  [
    ("org/model-1.5_b", "", HUB, "org/model-1.5_b", "", ""),
    ("org/model@v1.0", "", HUB, "org/model", "", "v1.0"),
    ("org/model", "refs/pr/3", HUB, "org/model", "", "refs/pr/3"),
    ("hf://org/model", "", HUB, "org/model", "", ""),
    ("hf://org/model@refs/pr/3", "", HUB, "org/model", "", "refs/pr/3"),
    ("https://huggingface.co/org/model", "", HUB, "org/model", "", ""),
    ("https://huggingface.co/org/model/tree/v1/", "", HUB, "org/model", "", "v1"),
    ("gs://bucket/a/model/", "", GCS, "bucket", "a/model", ""),
    ("S3://my.bucket/model", "", S3, "my.bucket", "model", ""),
    ("/no/such/folder", "", FOLDER, "/no/such/folder", "", ""),
    ("./org/model", "", FOLDER, "org/model", "", ""),
    ("model", "", FOLDER, "model", "", ""),
    ("a/b/c", "", FOLDER, "a/b/c", "", ""),
  ],
)
def test_names(text, revision, kind, place, path, found):
  assert parse_model_name(text, revision) == ModelName(text, kind, place, path, found)


def test_a_folder_goes_before_a_repository_of_its_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert parse_model_name("org/model").kind == HUB
  (tmp_path / "org" / "model").mkdir(parents=True)
  assert parse_model_name("org/model").kind == FOLDER
  assert parse_model_name("hf://org/model").kind == HUB


@pytest.mark.parametrize(
  ("text", "revision", "complaint"),
  [
    ("", "", "model is empty"),
    ("http://example.com/model", "", "is at a http:// address"),
    ("hf://model", "", "must be hf://ORG/NAME"),
    ("gs://bucket", "", "must name a bucket and the model's folder"),
    ("s3://bucket/a/../b", "", "must name a bucket and the model's folder"),
    ("s3://bucket/a", "v1", "only repositories of the Hugging Face hub have revisions; leave out --revision"),
    (str(DEMO), "v1", "leave out --revision"),
    ("org/model@v1", "v2", "name two revisions"),
  ],
)
def test_bad_names(text, revision, complaint):
  with pytest.raises(ConfigError, match=complaint):
    parse_model_name(text, revision)


def select(files, **more) -> list[str]:
  return select_model_files(files, lambda: files[INDEX], "org/model", **more)


def test_what_is_downloaded():
  everything = WANTED | UNWANTED
  assert select(everything) == sorted(WANTED)
  assert select(everything, needs_weights=False) == sorted(set(WANTED) - {INDEX, *SHARDS})
  single = everything | {"model.safetensors": b""}  # the loader reads this one
  assert select(single) == sorted(set(WANTED) - {INDEX, *SHARDS} | {"model.safetensors"})
  gguf = {name: content for name, content in WANTED.items() if name not in (INDEX, *SHARDS)} | {"m.gguf": b""}
  assert select(gguf) == sorted(gguf)
  own = {"sluice.json", "config.json", "SHA256SUMS", "weights/d/0123", "weights/manifest.ocdbt"}
  assert select(dict.fromkeys([*own, "run.py"], b"")) == sorted(own)


@pytest.mark.parametrize(
  ("left_out", "added", "complaint"),
  [
    ({"config.json"}, {}, r"org/model/pytorch_model\.bin: a pickled"),
    ({INDEX, *SHARDS}, {}, r"org/model/pytorch_model\.bin: a pickled checkpoint can run code .*save_pretrained"),
    ({"config.json", INDEX, *SHARDS, *UNWANTED}, {"m-Q4.gguf": b""}, r"/m-Q4\.gguf: .* needs .*config\.json"),
    (
      {"config.json", INDEX, *SHARDS, *UNWANTED},
      {"adapter_config.json": b"", "adapter_model.safetensors": b""},
      "an adapter is no whole model; merge it",
    ),
    ({"config.json", *UNWANTED}, {}, "holds no config.json; it is no model"),
    ({SHARDS[1]}, {}, f"{INDEX} lists {SHARDS[1]}, which is not there; the upload is incomplete"),
    (set(), {INDEX: b"{}"}, "is no index"),
    (set(), {INDEX: json.dumps({"weight_map": {"a": "pytorch_model.bin"}}).encode()}, "lists pytorch_model.bin"),
    (set(), {"../config.json": b""}, "which no folder can hold"),
  ],
)
def test_what_is_no_model(left_out, added, complaint):
  files = {name: content for name, content in (WANTED | UNWANTED).items() if name not in left_out} | added
  with pytest.raises(CheckpointError, match=complaint):
    select(files)


def write_files(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
  for name, content in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
  return folder


def test_folders_that_are_models(tmp_path):
  check_model_folder(DEMO)
  check_model_folder(write_files(tmp_path / "m", WANTED | UNWANTED))
  check_model_folder(write_files(tmp_path / "gguf", {"config.json": b"{}", "model.gguf": b""}))
  check_model_folder(write_files(tmp_path / "config", {"config.json": b"{}"}), needs_weights=False)


@pytest.mark.parametrize(
  ("files", "complaint"),
  [
    ({"config.json": b"{}", "pytorch_model.bin": b""}, r"/m/pytorch_model\.bin: a pickled checkpoint .*safetensors"),
    ({"config.json": b"{}", "a.gguf": b"", "b.gguf": b""}, r"/m: holds 2 GGUF files, a\.gguf and b\.gguf among them"),
    ({"model.gguf": b""}, r"/m/model\.gguf: a GGUF file needs the model's config\.json and tokenizer\.json beside it"),
    ({"adapter_config.json": b"{}", "adapter_model.bin": b""}, r"adapter_config\.json: an adapter is no whole model"),
    ({"tokenizer.json": b"{}"}, r"/m/config\.json: no such file; a model folder needs one"),
    ({"inner/config.json": b"{}"}, r"/m/config\.json: no such file; .*/m/inner holds one"),
    ({"snapshots/abc/config.json": b"{}"}, r"/m/config\.json: no such file; .*/m/snapshots/abc holds one"),
    ({"config.json": b"{}", "other.safetensors": b""}, r"/m: holds neither .*, but other\.safetensors; it is no model"),
    ({"config.json": b"{}", INDEX: WANTED[INDEX], SHARDS[0]: b""}, rf"/m/{SHARDS[1]}: no such file.* is incomplete"),
    ({"config.json": b"{}", INDEX: WANTED[INDEX]}, rf"/m/{SHARDS[0]} and 1 more: no such file, though {INDEX} lists"),
  ],
)
def test_folders_that_are_none(tmp_path, files, complaint):
  with pytest.raises(CheckpointError, match=complaint):
    check_model_folder(write_files(tmp_path / "m", files))


def test_paths_that_are_no_folders(tmp_path):
  with pytest.raises(CheckpointError, match="nowhere: no such folder; --model takes a model folder, ORG/NAME"):
    check_model_folder(tmp_path / "nowhere")
  for name, complaint in (
    ("m.gguf", "a GGUF file needs the model's config"),
    ("model.safetensors", "give --model the"),
  ):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"is no folder.*{complaint}"):
      check_model_folder(tmp_path / name)


def test_links_of_the_hubs_cache_lead_nowhere_else(tmp_path):
  """From a snapshot to the repository's blobs, and from there to those that all repositories of the cache share."""
  repository, shared = tmp_path / "models--org--name", tmp_path / "blobs"
  snapshot = repository / "snapshots" / "abc"
  for folder in (snapshot, repository / "blobs", shared / "12"):
    folder.mkdir(parents=True)
  (shared / "12" / "1234").touch()
  (repository / "blobs" / "own").touch()
  (repository / "blobs" / "common").symlink_to("../../blobs/12/1234")
  for name in ("own", "common"):
    (snapshot / name).symlink_to(f"../../blobs/{name}")
  assert leads_outside(snapshot / "own") is None
  assert leads_outside(snapshot / "common") == shared / "12" / "1234"  # a folder of that name, made by anybody
  (shared / ".huggingface-shared-blobs").write_text("1\n")
  assert leads_outside(snapshot / "common") is None
  (snapshot / "other").symlink_to("/etc/passwd")
  assert leads_outside(snapshot / "other") == pathlib.Path("/etc/passwd")
  assert name_of_model(snapshot) == "org/name"
  assert name_of_model(tmp_path / "plain") == "plain"
