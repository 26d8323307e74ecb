"""Time and room that a server keeps: deadlines in the queue, what never fits, and the most of everything at once."""

import dataclasses

import grpc
import httpx
import pytest

from engine.request import FinishReason
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.harness import endings_of, generate, reason_of, running, tiny_config, token_ids_of

IDS = pb.TokenIds(ids=[7, 8, 9])
FOREVER = pb.StopParams(max_tokens=400, ignore_eos=True)
CONFIG = tiny_config(max_num_seqs=1)


@pytest.mark.catalogue("B6")
def test_no_deadline_that_passes_in_the_queue_is_ever_scheduled():
  """A hundred of each kind wait behind one that runs: all are told, none is computed, and the counts say so."""
  config = dataclasses.replace(CONFIG, max_queued_requests=300)
  with running(None, config=config, host=HostOptions(max_concurrent_streams=300)) as served:
    served.runner.seconds = 0.001
    first = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER), timeout=120)
    message = next(first)
    served.runner.go.clear()
    asked = pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)
    of_clients = [served.generation.GenerateUnary.future(asked, timeout=0.3) for _ in range(100)]
    asked.queue_timeout.FromMilliseconds(300)
    of_the_queue = [served.generation.GenerateUnary.future(asked, timeout=120) for _ in range(100)]
    for call in of_clients:
      assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # All of the others wait: their time is over before the first one, which takes longer, has ended.
    served.wait_until(lambda: len(served.generations) == 101)
    served.runner.go.set()
    for call in of_the_queue:
      assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and reason_of(call.exception()) == "DEADLINE_EXCEEDED"
      assert "its queue deadline; try again when the server is less busy" in call.details()
    assert len(token_ids_of([message, *first])) == 400
    served.wait_until(lambda: served.engine.num_live == 0 and len(served.generations) == 0)
    stats = served.engine.stats()
    assert stats.num_prefill_tokens == 3, "the prompt of the first alone"
    ended = stats.finished
    assert ended[FinishReason.LENGTH] == 1
    assert ended[FinishReason.TIMEOUT] + ended[FinishReason.ABORT] == served.generations.num_started - 1


@pytest.mark.catalogue("B8")
def test_deadlines_are_refused_clamped_or_the_servers_own():
  with running(None, config=dataclasses.replace(CONFIG, request_timeout_s=0.5, max_num_seqs=8)) as served:
    asked = pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)
    for timeout in (0, -1):
      with pytest.raises(grpc.RpcError) as caught:
        served.generation.GenerateUnary(asked, timeout=timeout)
      assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    served.wait_until(lambda: served.engine.num_live == 0 and len(served.generations) == 0)
    # gRPC makes a millisecond of it, in which one may get in on its way out.
    assert served.engine.stats().finished[FinishReason.LENGTH] == 0
    served.runner.seconds = 0.005
    for timeout in (None, 1e9):
      with pytest.raises(grpc.RpcError, match="not finished after .* its deadline; lower max_tokens") as caught:
        served.generation.GenerateUnary(asked, timeout=timeout)
      assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
      assert reason_of(caught.value) == "DEADLINE_EXCEEDED"


@pytest.mark.catalogue("C3")
def test_what_the_pool_can_never_hold_is_refused_and_holds_nobody_up():
  """vLLM queued it, and everything behind it, for ever."""
  config = dataclasses.replace(CONFIG, num_blocks=16)  # 128 tokens, of 512 that the model takes
  with running(None, host=HostOptions(http_port=0), config=config) as served:
    said = (
      "prompt of 100 tokens plus max_tokens=29 is 129, but the maximum context length is 128 tokens, which the KV pool "
      "holds; lower max_tokens or serve with a larger pool (--kv_cache_mb, --num_blocks)"
    )
    prompt = pb.TokenIds(ids=[7] * 100)
    served.runner.go.clear()
    waiting = served.generation.GenerateUnary.future(
      pb.GenerateRequest(token_ids=prompt, stopping=pb.StopParams(max_tokens=28, ignore_eos=True)), timeout=60
    )
    served.wait_until(lambda: served.engine.stats().num_running == 1)
    with pytest.raises(grpc.RpcError) as caught:
      generate(served, token_ids=prompt, stopping=pb.StopParams(max_tokens=29))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, said)
    assert reason_of(caught.value) == "REQUEST_TOO_LONG"
    url = f"http://127.0.0.1:{served.host.http_port}/v1/completions"
    answer = httpx.post(url, json={"prompt": [7] * 100, "max_tokens": 29}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
      "message": said,
      "type": "invalid_request_error",
      "param": "prompt",
      "code": "context_length_exceeded",
    }
    assert served.engine.num_live == 1
    served.runner.go.set()
    assert len(waiting.result(60).completions[0].token_ids) == 28, "what just fits is served"
    assert endings_of(generate(served, token_ids=IDS, stopping=pb.StopParams(max_tokens=3)))[-1].last


@pytest.mark.catalogue("C13")
def test_the_most_of_everything_at_once(tokenizer):
  """Every list at its limit, the longest prompt with log probabilities of each token: served, and of a bounded size."""
  config = dataclasses.replace(CONFIG, max_num_seqs=16)
  with running(tokenizer, host=HostOptions(http_port=0), config=config) as served:
    request = pb.GenerateRequest(
      token_ids=pb.TokenIds(ids=[7] * 500),
      sampling=pb.SamplingParams(
        n=16,
        temperature=1.0,
        logit_bias={i % 400: float(i % 100) for i in range(400)},
        allowed_token_ids=pb.TokenIds(ids=range(400)),
      ),
      stopping=pb.StopParams(
        max_tokens=12,
        min_tokens=12,
        stop=["x" * 240 + f"{i:016d}" for i in range(16)],
        stop_token_ids=range(16),
        ignore_eos=True,
      ),
      output=pb.OutputParams(logprobs=20, prompt_logprobs=20),
      request_id="r" * 128,
      cache_salt="s" * 128,
      tenant="t" * 128,
    )
    answer = served.generation.GenerateUnary(request, timeout=120)
    assert len(answer.completions) == 16 and len(answer.prompt_logprobs) == 499
    assert all(len(each.logprobs) == 12 for each in answer.completions)
    # 499 prompt tokens and 16 * 12 others, each with at most 21 entries of an id and a number.
    assert answer.ByteSize() < (499 + 16 * 12) * 21 * 16 + 16 * 12 * 16
    body = {"prompt": [7] * 500, "n": 16, "max_tokens": 12, "echo": True, "logprobs": 20, "ignore_eos": True}
    url = f"http://127.0.0.1:{served.host.http_port}/v1/completions"
    whole = httpx.post(url, json=body, timeout=120)
    assert whole.status_code == 200 and len(whole.json()["choices"]) == 16


@pytest.mark.catalogue("C13")
def test_log_probabilities_of_prompts_have_a_limit():
  config = dataclasses.replace(CONFIG, max_model_len=16_384, num_blocks=2048, max_queued_tokens=100_000)
  with running(None, config=config) as served:
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 8193), output=pb.OutputParams(prompt_logprobs=0))
    with pytest.raises(grpc.RpcError) as caught:
      served.generation.GenerateUnary(asked, timeout=60)
    assert (caught.value.code(), caught.value.details()) == (
      grpc.StatusCode.INVALID_ARGUMENT,
      "prompt_logprobs of a prompt of 8193 tokens is not allowed, the limit is 8192 tokens: shorten the prompt, or "
      "leave it out",
    )
