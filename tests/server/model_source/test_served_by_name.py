"""A server of a model of the hub, as a user starts it."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

from openai import OpenAI
import pytest

from tests.server.harness import CHILDREN, write_tokenizer
from tests.server.model_source.hub_server import running_hub

ROOT = pathlib.Path(__file__).resolve().parents[3]
CONFIG = b'{"architectures": ["LlamaForCausalLM"], "vocab_size": 384, "max_position_embeddings": 512}'


def start(hub, tmp_path: pathlib.Path, *arguments: str) -> subprocess.Popen:
  own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "own")}
  process = subprocess.Popen(
    [sys.executable, "-m", "server.main", "--port=0", *arguments],
    cwd=ROOT,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | own,
  )
  CHILDREN.append(process)
  return process


@pytest.fixture
def hub(tmp_path):
  folder = tmp_path / "published"
  folder.mkdir()
  write_tokenizer(folder)
  (folder / "config.json").write_bytes(CONFIG)
  (folder / "model.safetensors").write_bytes(bytes(2_000_000))
  with running_hub() as hub:
    hub.add_folder("org/tiny", folder)
    yield hub


def test_served_under_its_name_with_another_template(hub, tmp_path):
  """By a front end of its own, which must know both."""
  template = tmp_path / "short.jinja"
  template.write_text("{{ messages[0]['content'] }}")
  port_file = tmp_path / "port"
  flags = ["--fake_device", "--frontend-processes=1", f"--chat-template={template}", f"--http_port_file={port_file}"]
  process = start(hub, tmp_path, "org/tiny", *flags)
  assert process.stderr is not None
  lines = []
  for line in process.stderr:
    lines.append(line)
    if line.startswith("ready on"):
      break
  assert process.poll() is None, "".join(lines)
  client = OpenAI(base_url=f"http://127.0.0.1:{port_file.read_text().strip()}/v1", api_key="none")
  assert [model.id for model in client.models.list()] == ["org/tiny"]
  answer = client.chat.completions.create(model="org/tiny", messages=[{"role": "user", "content": "the"}], max_tokens=1)
  assert answer.usage is not None and answer.usage.prompt_tokens <= 2
  assert "model.safetensors" not in hub.downloads()  # a fake device needs none
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=60)
  assert process.returncode == 0


def test_told_before_anything_listens(hub, tmp_path):
  process = start(hub, tmp_path, "org/none", "--verbose")
  _, lines = process.communicate(timeout=120)
  assert process.returncode == 1
  (error,) = [line for line in lines.splitlines() if line.startswith("error: ")]
  assert error.startswith("error: model='org/none' is no folder here, and the Hugging Face hub")
  assert "listening" not in lines and "Traceback" not in lines


def test_a_signal_ends_a_download(hub, tmp_path):
  """The hub sends half of a file and then nothing."""
  stalled = threading.Event()
  hub.stalls["model.safetensors"] = stalled
  process = start(hub, tmp_path, "org/tiny")
  assert stalled.wait(120)
  process.send_signal(signal.SIGINT)
  _, lines = process.communicate(timeout=60)
  assert process.returncode == 0 and "stopped while looking for the model" in lines and "Traceback" not in lines
