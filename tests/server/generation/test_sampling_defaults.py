"""A model's own sampling defaults: read from its folder, applied over every protocol where a request names none."""

import contextlib
import json
import os
import pathlib
import signal

import httpx
import pytest

from engine.errors import ConfigError
from extensions.vllm_api.proto import vllm_engine_pb2 as vllm_pb
from extensions.vllm_api.proto import vllm_engine_pb2_grpc
from server.client import Client
from server.generation.sampling_defaults import describe_defaults, read_sampling_defaults
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.harness import Served, endings_of, generate, running, token_ids_of
from tests.server.test_main import DEMO, start, wait_for_file

IDS = [7, 8, 9]
# Greedy, so that no seed matters; on the fake device every value that is used changes the tokens.
DEFAULTS = {"temperature": 0.0, "top_k": 1, "repetition_penalty": 1.5, "max_tokens": 12}
PLAIN = {"temperature": 5.0, "top_k": 0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def server(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0, enable_vllm_api=True), defaults=DEFAULTS) as served:
    yield served


def over_grpc(server: Served, **sampling) -> list[int]:
  return token_ids_of(
    generate(
      server,
      token_ids=pb.TokenIds(ids=IDS),
      sampling=pb.SamplingParams(**sampling),
      stopping=pb.StopParams(ignore_eos=True),
    )
  )


def over_http(server: Served, path: str = "/v1/completions", **sampling) -> list[int]:
  prompt = {"prompt": IDS} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "the cat"}]}
  body = prompt | {"ignore_eos": True, "return_token_ids": True} | sampling
  answer = httpx.post(f"http://127.0.0.1:{server.host.http_port}{path}", json=body, timeout=30)
  assert answer.status_code == 200, answer.text
  return answer.json()["choices"][0]["token_ids"]


def over_vllm(server: Served, **sampling) -> list[int]:
  request = vllm_pb.GenerateRequest(
    tokenized=vllm_pb.TokenizedInput(input_ids=IDS),
    sampling_params=vllm_pb.SamplingParams(ignore_eos=True, **sampling),
  )
  (answer,) = vllm_engine_pb2_grpc.VllmEngineStub(server.channel).Generate(request, timeout=30)
  return list(answer.complete.output_ids)


def test_they_are_applied_over_every_protocol(server):
  """Without a seed the same tokens come each time, and they are those of a request that names all the values."""
  named = {name: value for name, value in DEFAULTS.items() if name != "max_tokens"}
  wanted = over_grpc(server, **named)
  assert len(wanted) == 12, "max_tokens, too"
  for ask in (over_grpc, over_vllm):
    assert ask(server) == ask(server) == ask(server, seed=4) == wanted
  assert over_http(server, max_tokens=12) == wanted
  assert over_http(server) == wanted
  chat = over_http(server, "/v1/chat/completions")
  assert len(chat) == 12 and chat == over_http(server, "/v1/chat/completions", **named)
  assert over_grpc(server, repetition_penalty=1.0) != wanted
  one = over_grpc(server, temperature=5.0, seed=4)
  assert one == over_grpc(server, **named | {"temperature": 5.0}, seed=4)
  assert one != over_grpc(server, temperature=5.0, seed=4, top_k=0)


def test_what_a_request_names_wins(server, tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as plain:
    for seed in range(3):
      wanted = over_grpc(plain, temperature=5.0, seed=seed)[:12]
      assert over_grpc(server, **PLAIN, seed=seed) == wanted
      assert over_http(server, **PLAIN, seed=seed, max_tokens=12) == wanted
  greedy = generate(
    server,
    token_ids=pb.TokenIds(ids=IDS),
    sampling=pb.SamplingParams(temperature=0.0),
    stopping=pb.StopParams(max_tokens=3, ignore_eos=True),
  )
  assert endings_of(greedy)[0].usage.completion_tokens == 3


def test_model_info_tells_them(server, tokenizer):
  info = server.model.GetModelInfo(pb.GetModelInfoRequest())
  assert info.default_sampling == pb.SamplingParams(temperature=0.0, top_k=1, repetition_penalty=1.5)
  assert info.default_stopping == pb.StopParams(max_tokens=12)
  with running(tokenizer) as plain:
    info = plain.model.GetModelInfo(pb.GetModelInfoRequest())
    assert not info.default_sampling.ListFields() and not info.default_stopping.ListFields()


def test_the_default_of_max_tokens_is_cut_to_what_is_left(tokenizer):
  host = HostOptions(http_port=0, enable_vllm_api=True)
  with running(tokenizer, host=host, defaults={"max_tokens": 5000}) as server:
    assert len(over_grpc(server)) == len(over_vllm(server)) == 509
    assert len(over_http(server, "/v1/chat/completions")) > 450


def test_the_keys_that_are_read(tmp_path):
  assert read_sampling_defaults(tmp_path) == {}
  raw = {
    **{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05, "max_new_tokens": 2048},
    **{"do_sample": True, "eos_token_id": [1, 2], "num_beams": 4, "typical_p": None},
  }
  (tmp_path / "generation_config.json").write_text(json.dumps(raw))
  defaults = read_sampling_defaults(tmp_path)
  assert describe_defaults(defaults) == (
    "temperature=0.6, top_k=20, top_p=0.95, min_p=0, repetition_penalty=1.05, max_tokens=2048"
  )
  assert defaults["temperature"] == pb.SamplingParams(temperature=0.6).temperature, "as a request would have it"
  (tmp_path / "generation_config.json").write_text('{"top_k": -1, "temperature": null, "temprature": 3}')
  assert read_sampling_defaults(tmp_path) == {"top_k": 0}


BAD = {
  "temperature": ("-0.5", "-0.5 is not allowed: it must be a number from 0 to 100"),
  "top_p": ("0", "0 is not allowed: it must be a number above 0 to 1"),
  "min_p": ("NaN", "nan is not allowed: it must be a number from 0 to 1"),
  "repetition_penalty": ("1e-60", "1e-60 is not allowed: it must be a number above 0 to 100"),
  "top_k": ("2.5", "2.5 is not allowed: it must be a whole number from -1 to 2147483647"),
  "max_new_tokens": ("0", "0 is not allowed: it must be a whole number from 1 to 2147483647"),
}


@pytest.mark.parametrize("key", BAD)
def test_a_value_outside_the_limits_is_refused(tmp_path, key):
  """With file, key, value, limit and remedy."""
  text, said = BAD[key]
  file = tmp_path / "generation_config.json"
  for value, shown in ((text, said), ('"1"', "'1' is not allowed"), ("true", "True is not allowed")):
    file.write_text(f'{{"{key}": {value}}}')
    with pytest.raises(ConfigError) as caught:
      read_sampling_defaults(tmp_path)
    assert str(caught.value).startswith(f"{file}: {key}={shown}")
    assert str(caught.value).endswith("; correct it there, or serve with --generation_config=none")


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_a_file_that_is_broken_is_refused(tmp_path, raw):
  (tmp_path / "generation_config.json").write_bytes(raw)
  with pytest.raises(ConfigError, match=r"generation_config.json .*; restore it .* --generation_config=none"):
    read_sampling_defaults(tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
  folder = tmp_path / "model"
  folder.mkdir()
  (tmp_path / "secret").write_text("{}")
  os.symlink(tmp_path / "secret", folder / "generation_config.json")
  with pytest.raises(ConfigError, match="outside of its folder; copy the file there"):
    read_sampling_defaults(folder)


@contextlib.contextmanager
def process(folder: pathlib.Path, tmp_path: pathlib.Path, *flags: str):
  """A server as a process on the fake device: yields a client; the lines that it has said come at its end."""
  port_file, said = tmp_path / "port", []
  port_file.unlink(missing_ok=True)
  server = start(f"--model={folder}", "--fake_device", "--port=0", f"--port_file={port_file}", *flags)
  try:
    with Client(f"127.0.0.1:{wait_for_file(port_file, server).strip()}") as client:
      yield client, said
  finally:
    server.send_signal(signal.SIGTERM)
    said += server.communicate(timeout=180)[1].splitlines()
  assert server.returncode == 0


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  made = tmp_path / "model"
  made.mkdir()
  for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
    (made / name).write_bytes((DEMO / name).read_bytes())
  return made


@pytest.mark.parametrize("processes", [0, 2])
def test_the_server_reads_them_at_start(folder, tmp_path, processes):
  (folder / "generation_config.json").write_text('{"top_k": 3, "temperature": 0.0, "max_new_tokens": 9}')
  said_at_start = "temperature=0, top_k=3, max_tokens=9 (--generation_config=none leaves them out)"
  line = f"sampling defaults of generation_config.json: {said_at_start}"
  for flag, length in (("auto", 9), ("none", 256)):
    flags = (f"--generation_config={flag}", f"--frontend_processes={processes}", "--verbose")
    with process(folder, tmp_path, *flags) as (client, said):
      answers = [tuple(client.generate("the cat", ignore_eos=True).token_ids) for _ in range(3)]
      assert {len(answer) for answer in answers} == {length}
      assert (len(set(answers)) == 1) == (flag == "auto")
      assert client.model_info().default_sampling.top_k == (3 if flag == "auto" else 0)
    assert (line in said) == (flag == "auto")


def test_the_server_does_not_start_with_a_broken_value(folder):
  (folder / "generation_config.json").write_text('{"top_p": 1.5}')
  server = start(f"--model={folder}", "--fake_device", "--port=0")
  said = server.communicate(timeout=180)[1].splitlines()
  assert server.returncode == 1
  assert said[-1] == (
    f"error: {folder / 'generation_config.json'}: top_p=1.5 is not allowed: it must be a number above 0 to 1; correct "
    "it there, or serve with --generation_config=none"
  )
