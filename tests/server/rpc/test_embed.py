"""Embed of sluice.v1 on the demo model, over real sockets: the same vectors, limits and errors as over HTTP."""

from collections.abc import Iterator
import math
from pathlib import Path

import grpc
import httpx
import pytest

from engine.device.build import build_engine
from engine.device.options import BuildOptions
from server.client import Client, SluiceError
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer
from tests.server.harness import reason_of, running

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
TEXTS = ["the cat sat on a mat", "37 + 5 = ?", "the cat sat"]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def embedding_server() -> Iterator:
  options = BuildOptions(
    str(DEMO), token_budgets=(64,), max_num_seqs=8, num_blocks=256, max_model_len=512, enable_embeddings=True
  )
  built = build_engine(options, lambda *_: None, lambda _: None)
  host = HostOptions(http_port=0)
  with running(Tokenizer(DEMO), config=built.config, device=built.runner, host=host, model="sluice-demo") as served:
    yield served


@pytest.fixture(scope="module")
def client(embedding_server) -> Iterator[Client]:
  with Client(embedding_server.address) as client:
    yield client


def are_close(one, other) -> bool:
  return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-4


def test_vectors_are_those_of_http(client, embedding_server):
  url = f"http://127.0.0.1:{embedding_server.host.http_port}/v1/embeddings"
  said = httpx.post(url, json={"input": TEXTS}, timeout=60).json()["data"]
  found = client.embed(TEXTS)
  assert all(are_close(each, data["embedding"]) for each, data in zip(found, said, strict=True))
  assert all(len(each) == 256 and math.isclose(math.hypot(*each), 1, abs_tol=1e-5) for each in found)


def test_token_ids_are_what_the_text_becomes(client):
  by_text, by_ids = client.embed([TEXTS[0], client.tokenize(TEXTS[0])])
  assert are_close(by_text, by_ids)


def test_more_inputs_than_the_queue_holds_come_in_order(client):
  numbers = [str(index) for index in range(600)]
  found = client.embed(numbers)
  assert are_close(found[417], client.embed(["417"])[0]) and not are_close(found[417], found[418])


def test_dimensions_and_raw_vectors(client):
  raw = client.embed(["a dog"], normalize=False)[0]
  short = client.embed(["a dog"], dimensions=16)[0]
  assert math.hypot(*raw) > 2 and len(short) == 16
  assert are_close(short, [value / math.hypot(*raw[:16]) for value in raw[:16]])


def test_the_response_has_model_and_tokens(embedding_server):
  inputs = [pb.EmbedInput(token_ids=pb.TokenIds(ids=[5, 6, 7])), pb.EmbedInput(text="a")]
  said = embedding_server.generation.Embed(pb.EmbedRequest(inputs=inputs, add_special_tokens=False, priority=3))
  assert said.model == "sluice-demo" and [each.num_tokens for each in said.embeddings] == [3, 1]


@pytest.mark.parametrize(
  ("request_", "words"),
  [
    (pb.EmbedRequest(), "inputs is an empty list"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "inputs has an entry with neither text nor token_ids"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput(text="")]), "inputs has an empty entry"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[5000]))]), "token id"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[5] * 600))]), "maximum context length"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")] * 2049), "inputs has 2049 entries, the limit is 2048"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], dimensions=0), "dimensions=0 is not allowed"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], dimensions=257), "send 1 to the model's 256"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], tenant="a" * 129), "tenant has 129 bytes"),
  ],
)
def test_bad_calls_are_one_error(embedding_server, request_, words):
  with pytest.raises(grpc.RpcError) as caught:
    embedding_server.generation.Embed(request_)
  assert caught.value.code() is INVALID and words in caught.value.details()
  assert len(embedding_server.generation.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")])).embeddings) == 1
  assert embedding_server.engine.num_live == 0 and len(embedding_server.generations) == 0


def test_another_model_and_a_server_without_the_flag(client, embedding_server, served):
  """`served` is the tests' own, on a fake model."""
  with pytest.raises(grpc.RpcError) as caught:
    embedding_server.generation.Embed(pb.EmbedRequest(model="other", inputs=[pb.EmbedInput(text="a")]))
  assert caught.value.code() is grpc.StatusCode.NOT_FOUND and reason_of(caught.value) == "MODEL_NOT_FOUND"
  with (
    Client(served.address) as plain,
    pytest.raises(SluiceError, match="serve it with --enable_embeddings") as refused,
  ):
    plain.embed(["a"])
  assert refused.value.code is INVALID
