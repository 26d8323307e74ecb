"""A server on the demo model with real adapters: good ones by their tokens, and bad folders beside a running stream."""

from collections.abc import Callable, Iterator
import concurrent.futures
import json
import pathlib
import shutil

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.server.certificates import ADMIN_KEY
from tools import make_random_adapter
from tools.certificates import replace_file
from tools.server_process import ROOT, RunningServer

pytestmark = pytest.mark.long

ADMIN = {"x-api-key": ADMIN_KEY}
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  """A folder of three adapters, for --lora_dir."""
  folder = tmp_path_factory.mktemp("adapters")
  for seed, name in enumerate(NAMES):
    arguments = ["--model", str(ROOT / "models" / "demo"), "--output", str(folder / name), "--seed", str(seed)]
    assert make_random_adapter.main([*arguments, "--strength", "0.3"]) == 0
  return folder


@pytest.fixture(scope="module")
def http(folder, tmp_path_factory) -> Iterator[httpx.Client]:
  files = tmp_path_factory.mktemp("server")
  replace_file(files / "admin_keys", f"{ADMIN_KEY}\n".encode())
  flags = ["--http_port=0", f"--http_port_file={files / 'http'}", f"--admin_api_key_file={files / 'admin_keys'}"]
  flags += ["--enable_lora", "--max_loras=3", f"--lora_dir={folder}", "--token_budgets=8,64", "--max_model_len=512"]
  with RunningServer([*flags, "--num_blocks=256"], files / "log", {"JAX_PLATFORMS": "cpu"}):
    url = f"http://127.0.0.1:{(files / 'http').read_text().strip()}"
    with httpx.Client(base_url=url, timeout=120) as client:
      yield client


def load(http: httpx.Client, name: str, path: str, **more: bool) -> httpx.Response:
  return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more}, headers=ADMIN)


def unload(http: httpx.Client, name: str) -> None:
  assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN).status_code == 200


def body_of(model: str, **more: object) -> dict[str, object]:
  body = {"model": model, "prompt": "the cat sat on", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
  return body | {"return_token_ids": True} | more


def tokens(http: httpx.Client, model: str, **more: object) -> list[int]:
  answer = http.post("/v1/completions", json=body_of(model, **more))
  assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
  return answer.json()["choices"][0]["token_ids"]


def test_requests_of_several_adapters_get_the_tokens_that_each_gets_alone(http):
  models = ("sluice-demo", *NAMES)
  for name in NAMES:
    assert load(http, name, name).status_code == 200
  alone = {model: tokens(http, model) for model in models}
  assert len({tuple(found) for found in alone.values()}) == len(models)
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    mixed = [(model, pool.submit(tokens, http, model)) for model in models * 6]
    assert all(found.result() == alone[model] for model, found in mixed)
  for round_ in range(20):  # each load takes the slot of another
    unload(http, "c")
    assert load(http, "c", "a" if round_ % 2 else "c").status_code == 200
    assert tokens(http, "c") == alone["a" if round_ % 2 else "c"]
  assert load(http, "c", "c", load_inplace=True).status_code == 200
  assert tokens(http, "c") == alone["c"]
  assert "sluice_compiles_total 0.0" in http.get("/metrics").text
  for name in NAMES:
    unload(http, name)


def _change_weights(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[pathlib.Path], None]:
  def spoil(folder: pathlib.Path) -> None:
    values = load_file(folder / "adapter_model.safetensors")
    change(values)
    save_file(values, folder / "adapter_model.safetensors")

  return spoil


def _change_config(**changes: object) -> Callable[[pathlib.Path], None]:
  def spoil(folder: pathlib.Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))

  return spoil


def _poison(values: dict[str, np.ndarray]) -> None:
  next(iter(values.values()))[0, 0] = np.nan


def _widen(values: dict[str, np.ndarray]) -> None:
  name = next(name for name in values if name.endswith("lora_A.weight"))
  values[name] = np.zeros((values[name].shape[0], values[name].shape[1] + 1), np.float32)


def _cut(folder: pathlib.Path) -> None:
  file = folder / "adapter_model.safetensors"
  file.write_bytes(file.read_bytes()[:-100])


def _pickle(folder: pathlib.Path) -> None:
  (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _link(folder: pathlib.Path) -> None:
  file = folder / "adapter_model.safetensors"
  file.unlink()
  file.symlink_to("/etc/hostname")


BAD_FOLDERS = {
  "without weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no such file"),
  "without settings": (lambda folder: (folder / "adapter_config.json").unlink(), "no such file"),
  "settings that are no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "JSON"),
  "cut weights": (_cut, "adapter_model.safetensors"),
  "pickled weights": (_pickle, "adapter_model.bin"),
  "a link that leads outside": (_link, "outside"),
  "NaN": (_change_weights(_poison), "NaN"),
  "another shape": (_change_weights(_widen), "shape"),
  "DoRA": (_change_config(use_dora=True), "use_dora"),
  "a bias": (_change_config(bias="all"), "bias"),
  "a large rank": (_change_config(r=512), "512"),
  "modules to save": (_change_config(modules_to_save=["lm_head"]), "modules_to_save"),
}


def test_bad_folders_get_one_error_each_and_leave_a_running_stream_alone(http, folder):
  assert load(http, "a", "a").status_code == 200
  expected = tokens(http, "a", max_tokens=450)
  with http.stream("POST", "/v1/completions", json=body_of("a", max_tokens=450, stream=True)) as stream:
    lines = stream.iter_lines()
    first = next(lines)
    for name, (spoil, said) in BAD_FOLDERS.items():
      shutil.rmtree(folder / "bad", ignore_errors=True)
      shutil.copytree(folder / "b", folder / "bad")
      spoil(folder / "bad")
      answer = load(http, "bad", "bad")
      assert answer.status_code == 400, f"{name}: {answer.text}"
      message = answer.json()["error"]["message"]
      assert message.startswith("lora_path='bad' cannot be served: ") and said in message, f"{name}: {message}"
    events = [json.loads(line[6:]) for line in [first, *lines] if line.startswith("data: {")]
  found = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]
  assert found == expected
  assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["sluice-demo", "a"]
  assert tokens(http, "a", max_tokens=450) == expected
  unload(http, "a")
