"""Several hosts give the tokens of one device. Each is a process of its own, connected by real sockets and gloo."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from engine.device.build import build_engine
from tests.extensions.multi_host import host_program
from tests.extensions.multi_host.host_program import Task, make_options
from tools.make_random_model import family_config, write_model
from tools.server_process import find_free_port

ROOT = pathlib.Path(__file__).parents[3]
DEMO = ROOT / "models" / "demo"
LIMIT_S = 280
# Greedy, sampled, penalties and biases, log probabilities, allowed tokens.
CHOICES = [
  {"temperature": 0.0},
  {"top_p": 0.9, "top_k": 30},
  {"presence_penalty": 1.0, "logit_bias": [[5, 2.0]]},
  {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
  {"temperature": 0.0, "allowed_token_ids": list(range(4, 60)), "min_tokens": 4},
]


def find_port() -> int:
  """A port whose successor is free too, since a cluster takes both."""
  return find_free_port()


def make_requests(count: int, longest: int, max_tokens: int) -> list[tuple[list[int], dict]]:
  requests = []
  for index in range(count):
    prompt = [3 + (7 * index + 5 * position) % 80 for position in range(5 + index * longest // count)]
    requests.append((prompt, {"max_tokens": max_tokens, "ignore_eos": True} | CHOICES[index % len(CHOICES)]))
  return requests


def start(task: Task, devices: int) -> subprocess.Popen:
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
  }
  return subprocess.Popen(
    [sys.executable, "-m", "tests.extensions.multi_host.host_program", json.dumps(dataclasses.asdict(task))],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def run_hosts(num_hosts: int, devices: int, model: pathlib.Path, settings: dict, requests: list) -> list[dict]:
  """Returns what each host printed."""
  base = Task(num_hosts, 0, find_port(), str(model), settings, requests)
  hosts = [start(dataclasses.replace(base, host_id=host), devices) for host in range(num_hosts)]
  found = []
  try:
    for host in hosts:
      out, errors = host.communicate(timeout=LIMIT_S)
      assert host.returncode == 0, errors[-3000:]
      found.append(json.loads(out.splitlines()[-1]))
  finally:
    for host in hosts:
      if host.poll() is None:
        host.kill()
      host.wait()
  return found


def serve_requests(model: pathlib.Path, settings: dict, requests: list) -> dict:
  """The same on one device, in this process."""
  events = []
  return host_program.serve(
    build_engine(make_options(str(model), settings), lambda *_: None, events.extend), events, requests
  )


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("models") / "tiny"
  write_model(
    folder,
    family_config(
      "llama",
      None,
      num_hidden_layers=1,
      hidden_size=32,
      num_attention_heads=4,
      num_key_value_heads=2,
      intermediate_size=48,
      vocab_size=96,
      max_position_embeddings=128,
    ),
    seed=0,
  )
  return folder


def test_two_hosts_give_the_tokens_of_one_device(tiny_model: pathlib.Path) -> None:
  settings = {"token_budgets": [16], "max_num_seqs": 4, "num_blocks": 10, "block_size": 4, "max_model_len": 40}
  settings |= {"prefill_chunk": 12, "overlap": "true"}
  requests = make_requests(5, 24, 8)
  one = serve_requests(tiny_model, settings, requests)
  leader, follower = run_hosts(2, 1, tiny_model, settings, requests)
  assert leader["tokens"] == one["tokens"]
  assert one["preemptions"] == leader["preemptions"] > 0
  assert leader["compiles"] == follower["compiles"] == 0
  metrics = leader["metrics"]
  assert metrics["sluice_hosts"] == [2] and metrics["sluice_host_broadcast_steps"][0] == follower["steps"] > 10
  assert metrics["sluice_host_broadcast_seconds"][0] > 0 and metrics["sluice_host_compiles"] == [0]
  weights = (tiny_model / "model.safetensors").stat().st_size
  assert 0.4 * weights < follower["bytes_read"] < 0.65 * weights


@pytest.mark.long
@pytest.mark.parametrize(("num_hosts", "devices"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("kernels", [{}, {"attention": "reference", "matmul": "xla"}], ids=["packed", "xla"])
def test_four_devices_on_several_hosts_give_the_tokens_of_one(
  tiny_model: pathlib.Path, num_hosts: int, devices: int, overlap: str, kernels: dict
) -> None:
  settings = {"token_budgets": [8, 24], "max_num_seqs": 6, "num_blocks": 30, "block_size": 4, "max_model_len": 96}
  settings |= {"prefill_chunk": 12, "overlap": overlap} | kernels
  requests = make_requests(15, 60, 20)
  one = serve_requests(tiny_model, settings, requests)
  leader, *followers = run_hosts(num_hosts, devices, tiny_model, settings, requests)
  assert leader["tokens"] == one["tokens"] and one["preemptions"] > 0
  assert [each["compiles"] for each in (leader, *followers)] == [0] * num_hosts
  steps = leader["metrics"]["sluice_host_broadcast_steps"][0]
  assert [each["steps"] for each in followers] == [steps] * (num_hosts - 1)


@pytest.mark.long
@pytest.mark.parametrize(
  "changes",
  [
    {"quantization": "int8"},
    {"deterministic": True, "prefill_chunk": 8},
    {"enable_embeddings": True},
    {"num_blocks": 0},
    {"random_weights": True},
  ],
  ids=lambda changes: next(iter(changes)),
)
def test_other_settings_give_the_tokens_of_one_device(tiny_model: pathlib.Path, changes: dict) -> None:
  settings = {"token_budgets": [16], "max_num_seqs": 4, "num_blocks": 16, "block_size": 4, "max_model_len": 40}
  settings |= {"attention": "reference", "matmul": "xla"} | changes
  requests = make_requests(5, 24, 8)
  one = serve_requests(tiny_model, settings, requests)
  leader, follower = run_hosts(2, 1, tiny_model, settings, requests)
  assert leader["tokens"] == one["tokens"] and leader["compiles"] == follower["compiles"] == 0


@pytest.mark.long
def test_the_demo_model_on_two_hosts_gives_the_tokens_of_one_device() -> None:
  settings = {"token_budgets": [8, 64], "max_num_seqs": 8, "num_blocks": 18, "max_model_len": 256}
  settings |= {"prefill_chunk": 48, "matmul": "xla"}
  requests = make_requests(12, 120, 40)
  one = serve_requests(DEMO, settings, requests)
  leader, follower = run_hosts(2, 1, DEMO, settings, requests)
  assert leader["tokens"] == one["tokens"] and one["preemptions"] > 0
  assert leader["compiles"] == follower["compiles"] == 0
