"""Models of buckets, from servers of S3's and Google Cloud Storage's protocols on this machine, and every fault."""

from collections.abc import Callable, Iterator
import dataclasses
import logging
import pathlib
import shutil
import threading
import time

import boto3
from boto3.s3.transfer import TransferConfig
from gcp_storage_emulator.server import create_server
from google.api_core.retry import Retry
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from moto.server import ThreadedMotoServer
import pytest

from engine.errors import ConfigError
from server.model_source import bucket_copy, gcs_bucket, s3_bucket
from server.model_source.download_watch import DownloadStopped, DownloadWatch
from server.model_source.resolve_model import resolve_model_folder
from tests.server.model_source.cutting_proxy import CuttingProxy, running_proxy
from tests.server.model_source.model_files import SHARDS, UNWANTED, WANTED

# What no protocol has a part in, by the library that starts sooner.
GCS_ALONE = pytest.mark.parametrize("place", ["gs"], indirect=True)


@dataclasses.dataclass
class Place:
  """A bucket with a model, behind a proxy.

  Attributes:
    name: of the model, as the user gives it.
    put: writes an object: its path in the bucket, and its bytes.
  """

  name: str
  put: Callable[[str, bytes], object]
  proxy: CuttingProxy


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
  logging.getLogger("werkzeug").setLevel(logging.ERROR)
  server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
  server.start()
  yield server.get_host_and_port()[1]
  server.stop()


@pytest.fixture(scope="module")
def gcs_port() -> Iterator[int]:
  server = create_server("127.0.0.1", 0, in_memory=True)
  server.start()
  while server._api._httpd is None:
    time.sleep(0.01)
  yield server._api._httpd.server_address[1]
  server.stop()


@pytest.fixture(params=["s3", "gs"])
def place(request, monkeypatch, tmp_path) -> Iterator[Place]:
  """Either protocol, each test with a path of its own."""
  monkeypatch.setattr(bucket_copy, "_PAUSE_S", 0.005)
  monkeypatch.setattr(bucket_copy, "_MAX_FRUITLESS", 2)
  monkeypatch.setattr(gcs_bucket, "_RETRY", Retry(predicate=lambda _: False))
  monkeypatch.setattr(gcs_bucket, "_RANGE", 500_000)
  path = tmp_path.name.replace("[", "").replace("]", "")
  is_s3 = request.param == "s3"
  with running_proxy(request.getfixturevalue("s3_port" if is_s3 else "gcs_port")) as proxy:
    use_address(f"http://127.0.0.1:{proxy.port}", monkeypatch)
    put = write_to_s3() if is_s3 else write_to_gcs()
    for name, content in (WANTED | UNWANTED).items():
      put(f"{path}/tiny/{name}", content)
    yield Place(f"{request.param}://models/{path}/tiny", lambda name, data: put(f"{path}/tiny/{name}", data), proxy)


def use_address(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Sets the variables by which a user turns the libraries to a server."""
  monkeypatch.setenv("AWS_ENDPOINT_URL", url)
  monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
  for key, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
    monkeypatch.setenv(f"AWS_{key}", value)


def write_to_s3() -> Callable[[str, bytes], object]:
  client = boto3.client("s3")
  client.create_bucket(Bucket="models")
  return lambda name, content: client.put_object(Bucket="models", Key=name, Body=content)


def write_to_gcs() -> Callable[[str, bytes], object]:
  client = storage.Client(project="p", credentials=AnonymousCredentials())
  if not client.bucket("models").exists():
    client.create_bucket("models")
  return lambda name, content: client.bucket("models").blob(name).upload_from_string(content)


def resolve(tmp_path: pathlib.Path, name: str, **more) -> pathlib.Path:
  return resolve_model_folder(name, cache_dir=str(tmp_path / "cache"), **more)


def refusal(tmp_path: pathlib.Path, name: str, **more) -> str:
  """The one line of what cannot be."""
  with pytest.raises(ConfigError) as caught:
    resolve(tmp_path, name, **more)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_copied_once(place: Place, tmp_path):
  lines: list[str] = []
  folder = resolve(tmp_path, place.name, watch=DownloadWatch(lines.append))
  assert folder.name == "tiny"
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == WANTED
  assert lines == [f"downloading {place.name}: 3.33 MB"]
  assert resolve(tmp_path, f"{place.name}/", watch=DownloadWatch(lines.append)) == folder
  assert len(lines) == 1
  place.put("config.json", WANTED["config.json"] + b" ")
  changed = resolve(tmp_path, place.name, watch=DownloadWatch(lines.append))
  assert changed != folder and (changed / "config.json").read_bytes() == WANTED["config.json"] + b" "
  assert lines[1:] == [f"downloading {place.name}: {len(WANTED['config.json']) + 1} bytes"]
  assert (changed / SHARDS[0]).samefile(folder / SHARDS[0])


@GCS_ALONE
def test_the_configuration_alone(place: Place, tmp_path):
  folder = resolve(tmp_path, place.name, needs_weights=False)
  assert not (folder / SHARDS[0]).exists() and (folder / "tokenizer.json").is_file()
  assert (resolve(tmp_path, place.name) / SHARDS[0]).is_file()


def test_without_a_network(place: Place, tmp_path):
  folder = resolve(tmp_path, place.name)
  place.proxy.is_dead = True
  lines: list[str] = []
  assert resolve(tmp_path, place.name, watch=DownloadWatch(lines.append)) == folder
  assert lines[0].startswith(f"warning: {place.name} cannot be reached (") and str(folder) in lines[0]
  said = refusal(tmp_path, f"{place.name}2")
  assert said.startswith(f"{place.name}2 cannot be reached (") and "check the network and start again" in said


def test_half_a_download_goes_on(place: Place, tmp_path):
  place.proxy.cut_after(2_000_000)
  folder = resolve(tmp_path, place.name)
  assert place.proxy.has_cut
  assert (folder / SHARDS[0]).read_bytes() == WANTED[SHARDS[0]]


def test_half_a_download_is_no_model(place: Place, tmp_path):
  """It is kept, and the next start goes on with it; what was damaged meanwhile is thrown away."""
  place.proxy.cut_after(2_000_000, dies=True)
  assert "what was copied is kept" in refusal(tmp_path, place.name)
  place.proxy.is_dead = False
  (partial,) = (tmp_path / "cache").rglob(f"{SHARDS[0]}.partial")
  size = partial.stat().st_size
  assert 500_000 <= size < len(WANTED[SHARDS[0]])
  partial.write_bytes(bytes(size))
  said = refusal(tmp_path, place.name)
  assert f"{place.name}/{SHARDS[0]}: the copy has 3072000 of 3072000 bytes and another digest" in said
  assert not list((tmp_path / "cache").rglob("*.partial"))
  assert (resolve(tmp_path, place.name) / SHARDS[0]).read_bytes() == WANTED[SHARDS[0]]


@GCS_ALONE
def test_stopped(place: Place, tmp_path):
  watch = DownloadWatch(None, lambda what, done, total: watch.request_stop())
  with pytest.raises(DownloadStopped):
    resolve(tmp_path, place.name, watch=watch)
  assert (resolve(tmp_path, place.name) / SHARDS[0]).is_file()


@GCS_ALONE
def test_a_copy_that_lost_a_file(place: Place, tmp_path):
  folder = resolve(tmp_path, place.name)
  (folder / SHARDS[0]).write_bytes(b"short")
  assert (resolve(tmp_path, place.name) / SHARDS[0]).read_bytes() == WANTED[SHARDS[0]]


def test_an_object_that_changes_meanwhile(place: Place, tmp_path):
  """The copy is of one listing."""
  told = []

  def change(what: str, done: int, total: int) -> None:
    if not told:
      told.append(what)
      for name in (*SHARDS, "tokenizer.json"):
        place.put(name, b"another content")

  assert "start again" in refusal(tmp_path, place.name, watch=DownloadWatch(None, change))
  assert (resolve(tmp_path, place.name) / SHARDS[0]).read_bytes() == b"another content"


def test_places_that_hold_no_model(place: Place, tmp_path):
  assert "holds no objects; check the bucket and the path" in refusal(tmp_path, f"{place.name}/none")
  kind = place.name.partition(":")[0]
  assert "knows no bucket 'other'" in refusal(tmp_path, f"{kind}://other/model")
  assert "holds no config.json; it is no model" in refusal(tmp_path, place.name.removesuffix("/tiny") + "/tiny/onnx")


@GCS_ALONE
def test_a_full_disk(place: Place, tmp_path, monkeypatch):
  """No other fault is made up here: a disk that is really full needs a file system of its own."""
  usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
  said = refusal(tmp_path, place.name)
  assert f"{place.name}: 3.33 MB are to be downloaded, and the disk of" in said and "has 1 MB free" in said


@GCS_ALONE
def test_a_cache_that_cannot_be_written(place: Place, tmp_path):
  (tmp_path / "cache").write_text("a file")
  said = refusal(tmp_path, place.name)
  assert "cannot be written" in said and "set --model_cache_dir" in said


@GCS_ALONE
def test_two_at_once(place: Place, tmp_path):
  """The lock is of the open file, so threads meet it as processes do."""
  lines: list[str] = []
  found: list[pathlib.Path] = []
  threads = [
    threading.Thread(target=lambda: found.append(resolve(tmp_path, place.name, watch=DownloadWatch(lines.append))))
    for _ in range(2)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found[0] == found[1]
  began = [line for line in lines if line.startswith("downloading") and " of " not in line]  # the rest is progress
  assert len(began) == 1


@pytest.mark.long
def test_digests_of_an_upload_in_parts(s3_port, tmp_path, monkeypatch):
  use_address(f"http://127.0.0.1:{s3_port}", monkeypatch)
  client = boto3.client("s3")
  client.create_bucket(Bucket="parts")
  file = tmp_path / "file"
  file.write_bytes(bytes(range(250)) * 44_000)  # 11 MB
  client.upload_file(
    str(file), "parts", "m/even", Config=TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
  )
  upload = client.create_multipart_upload(Bucket="parts", Key="m/odd")["UploadId"]
  content, parts = file.read_bytes(), []
  for number, (start, end) in enumerate(((0, 6_000_000), (6_000_000, 11_000_000)), 1):
    part = client.upload_part(Bucket="parts", Key="m/odd", UploadId=upload, PartNumber=number, Body=content[start:end])
    parts.append({"PartNumber": number, "ETag": part["ETag"]})
  client.complete_multipart_upload(Bucket="parts", Key="m/odd", UploadId=upload, MultipartUpload={"Parts": parts})
  bucket = s3_bucket.S3Bucket("parts", "m")
  items = {item.name: item for item in bucket.list_objects()}
  assert items["even"].version.endswith('-3"') and items["odd"].version.endswith('-2"')
  assert all(bucket.has_digest_of(item, file) for item in items.values())
  file.write_bytes(content[:-1] + b"?")
  assert not any(bucket.has_digest_of(item, file) for item in items.values())
  client.close()
