"""Models of a hub on this machine, through huggingface_hub: what is downloaded, kept and checked, and every fault."""

import os
import pathlib
import shutil
import subprocess
import sys

from huggingface_hub import constants, file_download
import pytest

from engine.errors import CheckpointError, ConfigError
from server.model_source import hub_repository
from server.model_source.download_watch import DownloadStopped, DownloadWatch
from server.model_source.resolve_model import resolve_model_folder
from tests.server.harness import CHILDREN
from tests.server.model_source.hub_server import Hub, running_hub
from tests.server.model_source.model_files import SHARDS, UNWANTED, WANTED

ROOT = pathlib.Path(__file__).resolve().parents[3]
NAME = "org/model"


@pytest.fixture
def hub(monkeypatch):
  """A hub with one model, to which the library is turned; nothing of the user's environment counts."""
  with running_hub() as hub:
    hub.repositories[NAME] = WANTED | UNWANTED
    point_to(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
      monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)  # before it tries again
    yield hub


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Turns the library, which has read the environment, to another hub."""
  monkeypatch.setattr(constants, "ENDPOINT", url)
  monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def resolve(tmp_path: pathlib.Path, name: str = NAME, **more) -> pathlib.Path:
  return resolve_model_folder(name, cache_dir=str(tmp_path / "cache"), **more)


def refusal(tmp_path: pathlib.Path, name: str = NAME, **more) -> str:
  """The one line of what cannot be."""
  with pytest.raises(ConfigError) as caught:
    resolve(tmp_path, name, **more)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_downloaded_once(hub: Hub, tmp_path):
  lines: list[str] = []
  folder = resolve(tmp_path, watch=DownloadWatch(lines.append))
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == WANTED
  assert sorted(hub.downloads()) == sorted(WANTED)
  assert [line.split(":")[0] for line in lines] == [f"downloading {NAME}", f"checking {NAME}"]
  hub.requests.clear()
  lines.clear()
  assert resolve(tmp_path, "hf://org/model@main", watch=DownloadWatch(lines.append)) == folder
  assert hub.downloads() == [] and lines == []  # nor is anything checked again


def test_progress_counts_every_byte_once(hub: Hub, tmp_path, monkeypatch):
  monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
  told: list[tuple[str, int, int]] = []
  resolve(tmp_path, watch=DownloadWatch(None, lambda *progress: told.append(progress)))
  total = sum(map(len, WANTED.values()))
  downloads = [progress for progress in told if progress[0] == f"downloading {NAME}"]
  assert downloads[0] == (f"downloading {NAME}", 0, -(-total // 2**20))
  assert [done for _, done, _ in downloads] == sorted({done for _, done, _ in downloads})
  assert downloads[-1][1] == downloads[-1][2]


def test_a_new_commit_takes_what_has_changed(hub: Hub, tmp_path):
  first = resolve(tmp_path)
  hub.requests.clear()
  hub.repositories[NAME]["config.json"] = WANTED["config.json"] + b" "
  second = resolve(tmp_path)
  assert second != first and second.name == hub.commit_of(NAME)
  assert hub.downloads() == ["config.json"]


def test_the_configuration_alone(hub: Hub, tmp_path):
  folder = resolve(tmp_path, needs_weights=False)
  assert not set(hub.downloads()) & set(SHARDS)
  assert (folder / "tokenizer.json").is_file()
  assert resolve(tmp_path).joinpath(SHARDS[1]).is_file()


def test_half_a_download_goes_on(hub: Hub, tmp_path, monkeypatch):
  monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
  hub.cuts[SHARDS[0]] = 2
  folder = resolve(tmp_path)
  assert (folder / SHARDS[0]).read_bytes() == WANTED[SHARDS[0]]
  ranges = [request.split(" ")[2] for request in hub.requests if request.count(" ") == 2]
  assert ranges == ["bytes=1500000-", "bytes=2200000-"]  # half of 3,072,000 bytes, then half of what is left


def test_half_a_download_is_no_model(hub: Hub, tmp_path, monkeypatch):
  hub.refused.add(SHARDS[0])
  said = refusal(tmp_path)
  assert said.startswith(f"{NAME} was not downloaded from the Hugging Face hub ({hub.url}) (")
  assert said.endswith("start again: files that are complete are kept")
  assert not list((tmp_path / "cache").rglob("*.incomplete"))
  point_to("http://127.0.0.1:9", monkeypatch)
  assert "cannot be reached" in refusal(tmp_path)
  point_to(hub.url, monkeypatch)
  hub.refused.clear()
  hub.requests.clear()
  resolve(tmp_path)
  assert SHARDS[0] in hub.downloads() and "config.json" not in hub.downloads()


@pytest.mark.parametrize("file", ["config.json", SHARDS[0]])
def test_other_bytes_than_the_digests(hub: Hub, tmp_path, file):
  hub.lies[file] = WANTED[file][:-1] + b"?"
  said = refusal(tmp_path)
  assert said.endswith(
    f"{file}: does not have the digest that the hub lists; it is removed: start again to download it"
  )
  hub.lies.clear()
  assert (resolve(tmp_path) / file).read_bytes() == WANTED[file]


def test_a_file_of_the_cache_that_has_changed(hub: Hub, tmp_path):
  folder = resolve(tmp_path)
  (folder / SHARDS[1]).resolve().write_bytes(WANTED[SHARDS[1]][:-7])
  with pytest.raises(CheckpointError, match=rf"{SHARDS[1]}: has \d+ bytes, and the hub lists"):
    resolve(tmp_path)
  assert (resolve(tmp_path) / SHARDS[1]).read_bytes() == WANTED[SHARDS[1]]


def test_without_a_network(hub: Hub, tmp_path, monkeypatch):
  folder = resolve(tmp_path)
  point_to("http://127.0.0.1:9", monkeypatch)
  assert resolve(tmp_path) == folder
  said = refusal(tmp_path, "org/other")
  assert "model='org/other' is no folder here, and the Hugging Face hub (http://127.0.0.1:9) cannot be reached" in said
  assert "check the network, HTTPS_PROXY and HF_ENDPOINT" in said
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  assert resolve(tmp_path) == folder
  assert "start once without HF_HUB_OFFLINE" in refusal(tmp_path, "org/other")
  (folder / SHARDS[1]).unlink()
  assert "start once without HF_HUB_OFFLINE" in refusal(tmp_path)


def test_what_the_hub_refuses(hub: Hub, tmp_path, monkeypatch):
  said = refusal(tmp_path, "org/none")
  assert said.startswith("model='org/none' is no folder here, and the Hugging Face hub") and "without a token" in said
  assert "has no revision 'v9'; leave out --revision" in refusal(tmp_path, revision="v9")
  hub.tokens[NAME] = "sesame"
  said = refusal(tmp_path)
  assert f"{NAME} is gated" in said and f"accept its terms at {hub.url}/{NAME}, and set HF_TOKEN" in said
  monkeypatch.setenv("HF_TOKEN", "mustard")
  assert "with the token in use" in refusal(tmp_path)
  monkeypatch.setenv("HF_TOKEN", "sesame")
  assert (resolve(tmp_path) / SHARDS[0]).is_file()


def test_formats_that_are_not_served(hub: Hub, tmp_path):
  hub.repositories["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
  assert "org/pickled of the Hugging Face hub/pytorch_model.bin: a pickled" in refusal(tmp_path, "org/pickled")
  hub.repositories["org/gguf"] = {"model-Q4.gguf": b"x", "README.md": b"x"}
  assert "a GGUF file needs the model's config.json" in refusal(tmp_path, "org/gguf")
  assert "pytorch_model.bin" not in hub.downloads() and "model-Q4.gguf" not in hub.downloads()


def test_a_full_disk(hub: Hub, tmp_path, monkeypatch):
  """No other fault is made up here: a disk that is really full needs a file system of its own."""
  usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
  said = refusal(tmp_path)
  assert said.startswith(f"{NAME}: 3.33 MB are to be downloaded, and the disk of {tmp_path / 'cache'} has 1 MB free;")
  assert said.endswith("set --model_cache_dir to a folder on a larger disk")
  assert not set(hub.downloads()) & set(SHARDS)


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path):
  (tmp_path / "cache").write_text("a file")
  said = refusal(tmp_path)
  assert str(tmp_path / "cache") in said and "set --model_cache_dir" in said


def test_stopped(hub: Hub, tmp_path, monkeypatch):
  monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
  watch = DownloadWatch(None, lambda what, done, total: watch.request_stop() if done else None)
  with pytest.raises(DownloadStopped):
    resolve(tmp_path, watch=watch)
  assert not list((tmp_path / "cache").rglob("*.incomplete"))
  assert (resolve(tmp_path) / SHARDS[0]).is_file()


def test_two_processes_at_once(hub: Hub, tmp_path):
  """By the library's own variables, as a user sets them."""
  environment = os.environ | {
    "HF_ENDPOINT": hub.url,
    "HF_HOME": str(tmp_path / "home"),
    "HF_TOKEN": "sesame",
    "XDG_CACHE_HOME": str(tmp_path / "own"),
  }
  hub.tokens[NAME] = "sesame"
  code = f"from server.model_source import resolve_model; print(resolve_model.resolve_model_folder({NAME!r}))"
  processes = [
    subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    for _ in range(2)
  ]
  CHILDREN.extend(processes)
  found = [process.communicate(timeout=120)[0].strip() for process in processes]
  assert found[0] == found[1] and found[0].startswith(str(tmp_path / "home" / "hub"))
  assert {path.name: path.read_bytes() for path in pathlib.Path(found[0]).iterdir()} == WANTED
  assert len(list((tmp_path / "own" / "sluice" / "models" / "checked").iterdir())) == 1


def test_the_counted_bar_is_the_one_of_the_disk():
  """The library makes three bars; were their names others, progress would stand still or count twice."""
  counting = hub_repository._CountingBar(None, unit="B", desc="Reconstructing (incomplete total...)", total=0)
  assert counting._counts
  assert not hub_repository._CountingBar(None, unit="B", desc="Downloading bytes")._counts
  assert not hub_repository._CountingBar(None, desc="Fetching 3 files")._counts
