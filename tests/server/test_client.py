"""The Python client and the command line, against a real server."""

from typing import Any

from google.rpc import status_pb2
import grpc
import pytest

from server.client import Client, SluiceError
from server.client import _errors as client_errors
from tests.commands import run_module
from tests.server.harness import running

GREEDY = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}


@pytest.fixture
def client(served):
  with Client(served.address) as connected:
    connected.wait_ready(60)
    yield connected


def test_all_ways_to_ask_say_the_same(client, tokenizer):
  whole = client.generate("the cat", **GREEDY)
  ids = client.tokenize("the cat")
  assert client.generate(ids, **GREEDY).token_ids == whole.token_ids
  with client.stream("the cat", **GREEDY) as stream:
    pieces = list(stream)
  assert stream.request_id
  assert "".join(piece.text for piece in pieces) == whole.text
  assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
  assert [piece.ending is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
  assert (whole.ending.reason, whole.ending.matched, whole.ending.completion_tokens) == ("length", None, 30)
  assert client.detokenize(ids) == "the cat"
  chat = [{"role": "user", "content": "the cat"}]
  assert client.generate(chat, **GREEDY).ending.prompt_tokens == len(ids) + 3


def test_outputs_under_a_constraint(client):
  assert client.generate("the", choice=["yes", "no"]).text in ("yes", "no")
  assert client.generate("the", regex="[ab]{4}").text.strip("ab") == ""
  assert client.generate("the", json_schema='{"type": "boolean"}').text in ("true", "false")
  with pytest.raises(TypeError, match="choice and regex|regex and choice"):
    client.generate("the", choice=["yes"], regex="a")


def test_every_option_arrives(client):
  options: dict[str, Any] = {
    "model": "tiny",
    "priority": 2,
    "cache_salt": "s",
    "speculation": "none",
    "tenant": "t",
    "queue_timeout_s": 9.5,
    "timeout_s": 30,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 1,
    "logit_bias": {5: 0.5},
    "allowed_token_ids": range(400),
    "min_tokens": 1,
    "stop_token_ids": [399],
    "logprobs": 0,
    "prompt_logprobs": 0,
    "return_text": True,
    "return_token_ids": True,
    "skip_special_tokens": False,
    **GREEDY,
  }
  first = client.generate("the", request_id="r-1", **options)
  cut = client.generate("the", stop=[first.text[3:6]], **options)
  assert cut.ending.reason == "stop" and cut.ending.matched == first.text[3:6]
  assert len(cut.logprobs) == len(cut.token_ids)
  assert len(client.generate_all("the", n=3, max_tokens=4)) == 3
  with pytest.raises(TypeError, match="unknown options .'temprature'"):
    client.generate("the", temprature=1.0)  # pyright: ignore[reportCallIssue]


def test_errors_have_code_and_reason(client):
  with pytest.raises(SluiceError, match="top_p=7.0 is not allowed") as caught:
    client.generate("the", top_p=7.0)
  assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
  with pytest.raises(SluiceError, match="prompt is empty"):
    list(client.stream([]))
  with Client("127.0.0.1:1") as nowhere:
    with pytest.raises(SluiceError) as caught:
      nowhere.model_info()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(SluiceError, match="not ready within 0.2 s"):
      nowhere.wait_ready(0.2)


def test_leaving_a_stream_stops_the_work(client, served):
  served.runner.seconds = 0.005
  with client.stream("the", request_id="left", max_tokens=400, ignore_eos=True) as stream:
    next(iter(stream))
    served.runner.go.clear()  # it does not end while it is looked at
    assert client.load().running_requests == 1
    served.runner.go.set()
  served.wait_until(lambda: served.engine.num_live == 0)
  with client.stream("the", request_id="aborted", max_tokens=400, ignore_eos=True) as stream:
    pieces = iter(stream)
    next(pieces)
    served.runner.go.clear()  # nor does it while it is aborted
    assert client.abort("aborted", "left") == [True, False]
    with pytest.raises(SluiceError) as caught:
      list(pieces)
    assert caught.value.reason == "ABORTED_BY_REQUEST"
    served.runner.go.set()


def test_command_line(served, client):
  wanted = client.generate("the cat", **GREEDY).text
  target = f"--target={served.address}"
  one = run_module("tools.client", target, "--prompt=the cat", "--temperature=0", "--max_tokens=30")
  assert one.returncode == 0 and one.stdout.rstrip("\n") and wanted.startswith(one.stdout.rstrip("\n"))
  assert "tokens/s" in one.stderr
  chat = run_module(
    "tools.client", target, "--chat", "--max_tokens=8", "--nostats", "--system=be", text="hello\nagain\n"
  )
  assert chat.returncode == 0 and chat.stderr == ""
  refused = run_module("tools.client", target, "--prompt=the", "--max_tokens=100000")
  assert refused.returncode == 1 and refused.stderr.startswith("INVALID_ARGUMENT REQUEST_TOO_LONG: prompt of 2 tokens")
  assert len(refused.stderr.splitlines()) == 1


def test_wait_ready_waits(tokenizer):
  with (
    running(tokenizer, serve=False) as starting,
    Client(starting.address) as client,
    pytest.raises(SluiceError, match="not ready within 0.3 s"),
  ):
    client.wait_ready(0.3)


class _Mixed(grpc.RpcError, grpc.Call):
  """What gRPC gives when it ends a call itself after the server's status was on its way: words of both."""

  def code(self):
    return grpc.StatusCode.DEADLINE_EXCEEDED

  def details(self):
    return "Deadline Exceeded"

  def trailing_metadata(self):
    status = status_pb2.Status(code=grpc.StatusCode.DEADLINE_EXCEEDED.value[0], message="ran out of time")
    return (("grpc-status-details-bin", status.SerializeToString()), ("x-request-id", "r1"))

  def initial_metadata(self):
    return ()

  is_active = time_remaining = cancel = add_callback = lambda self, *_: None


def test_a_status_in_words_of_grpc_is_still_an_error_of_ours():
  with pytest.raises(SluiceError, match="Deadline Exceeded") as caught, client_errors():
    raise _Mixed
  assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
  assert caught.value.request_id == "r1"
