"""The program itself: HTTP flags, the port file, a real model's logprobs, and one process for both protocols."""

import signal

import openai
import pytest

from server.client import Client
from tests.commands import run_module
from tests.server.test_main import SMALL, model, start, wait_for_file

__all__ = ["model"]  # a fixture


@pytest.fixture(scope="module")
def ports(model, tmp_path_factory):
  folder = tmp_path_factory.mktemp("ports")
  process = start(
    f"--model={model}",
    "--port=0",
    f"--port_file={folder}/grpc",
    f"--http_port_file={folder}/http",
    "--served_model_name=named",
    *SMALL,
  )
  grpc_port = wait_for_file(folder / "grpc", process).strip()
  yield grpc_port, wait_for_file(folder / "http", process).strip()
  process.send_signal(signal.SIGTERM)
  _, said = process.communicate(timeout=180)
  assert process.returncode == 0, said
  assert "open      http://127.0.0.1:" in said and "Traceback" not in said


@pytest.fixture
def client(ports):
  with openai.OpenAI(base_url=f"http://127.0.0.1:{ports[1]}/v1", api_key="x", max_retries=0, timeout=60) as client:
    yield client


def test_both_protocols_give_the_same_tokens(ports, client):
  with Client(f"127.0.0.1:{ports[0]}") as other:
    wanted = other.generate("the cat", temperature=0, max_tokens=12)
  answer = client.completions.create(model="named", prompt="the cat", temperature=0, max_tokens=12)
  assert answer.choices[0].text == wanted.text
  chunks = client.completions.create(model="named", prompt="the cat", temperature=0, max_tokens=12, stream=True)
  assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == wanted.text


def test_a_greedy_token_is_exactly_the_best_of_the_top(client):
  """What evaluation harnesses compare, without a tolerance."""
  answer = client.completions.create(
    model="named", prompt="the cat", temperature=0, max_tokens=5, echo=True, logprobs=3, extra_body={"ignore_eos": True}
  )
  logprobs = answer.choices[0].logprobs
  prompt = len(logprobs.tokens) - 5
  assert prompt >= 2 and logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
  for logprob, top in list(zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[1:]:
    assert logprob in top.values() and logprob <= max(top.values())
  for logprob, top in list(zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[prompt:]:
    assert logprob == max(top.values())


def test_chat_logprobs(client):
  answer = client.chat.completions.create(
    model="named",
    messages=[{"role": "user", "content": "hi"}],
    temperature=0,
    max_tokens=5,
    logprobs=True,
    top_logprobs=3,
    extra_body={"ignore_eos": True},
  )
  content = answer.choices[0].logprobs.content
  assert len(content) == 5
  for entry in content:
    assert [top.logprob for top in entry.top_logprobs] == sorted(top.logprob for top in entry.top_logprobs)[::-1]
    assert entry.logprob == entry.top_logprobs[0].logprob and entry.token == entry.top_logprobs[0].token


def test_a_busy_port_is_one_line(ports, model):
  done = run_module("server.main", f"--model={model}", "--port=0", f"--http_port={ports[1]}", *SMALL)
  assert done.returncode == 1
  assert f"error: cannot listen for HTTP on 127.0.0.1:{ports[1]}: Address already in use" in done.stderr
  assert "Traceback" not in done.stderr
