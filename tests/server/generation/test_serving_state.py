"""A request is let in once, whatever its protocol; what was let in is served to its end, also where a drain begins."""

import concurrent.futures
import threading

import grpc
import httpx
import pytest

from extensions.vllm_api.proto import vllm_engine_pb2 as vllm_pb
from extensions.vllm_api.proto import vllm_engine_pb2_grpc as vllm_grpc
from server.generation.serving_state import ServingState
from server.host_options import HostOptions
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer
from tests.server.harness import Served, running, tiny_config

TWO = pb.StopParams(max_tokens=2, ignore_eos=True)


def complete(served: Served, path: str, **body) -> httpx.Response:
  url = f"http://127.0.0.1:{served.host.http_port}/v1/{path}"
  return httpx.post(url, json={"max_tokens": 2, "ignore_eos": True, **body}, timeout=60)


def test_every_protocol_lets_a_request_in_once(tokenizer, monkeypatch):
  admitted = []
  admit = ServingState.admit
  monkeypatch.setattr(ServingState, "admit", lambda self: admitted.append(1) or admit(self))
  with running(tokenizer, host=HostOptions(http_port=0, enable_vllm_api=True)) as served:
    prompt = vllm_pb.TokenizedInput(input_ids=[5, 6])
    wishes = vllm_pb.SamplingParams(max_tokens=2, ignore_eos=True)
    calls = {
      "Generate": lambda: list(served.generation.Generate(pb.GenerateRequest(text="the cat", stopping=TWO))),
      "GenerateUnary": lambda: served.generation.GenerateUnary(pb.GenerateRequest(text="the cat", stopping=TWO)),
      "VllmEngine": lambda: list(
        vllm_grpc.VllmEngineStub(served.channel).Generate(
          vllm_pb.GenerateRequest(tokenized=prompt, sampling_params=wishes)
        )
      ),
      "completions": lambda: complete(served, "completions", prompt="the cat").raise_for_status(),
      "chat": lambda: complete(
        served, "chat/completions", messages=[{"role": "user", "content": "cat"}]
      ).raise_for_status(),
    }
    for name, call in calls.items():
      admitted.clear()
      call()
      assert len(admitted) == 1, name


@pytest.mark.catalogue("A2")
@pytest.mark.parametrize("protocol", ["gRPC", "HTTP"])
def test_a_drain_waits_for_prompts_that_are_being_tokenized(tokenizer, monkeypatch, protocol):
  begun, go = threading.Event(), threading.Event()
  encode = Tokenizer.encode

  def slowly(self, *arguments, **more):
    begun.set()
    assert go.wait(60)
    return encode(self, *arguments, **more)

  monkeypatch.setattr(Tokenizer, "encode", slowly)
  text = "cat " * 600  # tokenized in a thread of its own
  with (
    running(
      tokenizer,
      host=HostOptions(http_port=0, drain_timeout_s=60),
      config=tiny_config(max_model_len=2048, num_blocks=512, token_budgets=(8, 64, 128)),
    ) as served,
    concurrent.futures.ThreadPoolExecutor(1) as pool,
  ):
    if protocol == "gRPC":
      request = pb.GenerateRequest(text=text, stopping=TWO)
      answer = pool.submit(served.generation.GenerateUnary, request, timeout=60)
    else:
      answer = pool.submit(complete, served, "completions", prompt=text)
    assert begun.wait(60)
    served.stop()
    with pytest.raises(grpc.RpcError, match="shutting down; send the request to another"):
      while True:  # until the drain has begun
        served.generation.GenerateUnary(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), stopping=TWO), timeout=60)
    assert served.thread.is_alive() and not answer.done()
    go.set()
    done = answer.result(60)
    if protocol == "gRPC":
      assert done.completions[0].finished.usage.completion_tokens == 2
    else:
      assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 2, done.text
    served.thread.join(180)
    assert served.exit_code == [0]
