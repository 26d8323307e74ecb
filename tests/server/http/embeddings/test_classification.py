"""Heads of classes, rerankers and backbones: tiny random checkpoints with the demo's tokenizer, over HTTP and gRPC."""

from collections.abc import Iterator
import contextlib
import json
import math
from pathlib import Path
import shutil
from typing import Any

import grpc
import httpx
import jsonschema
import pytest

from engine.device.build import build_engine
from engine.device.options import BuildOptions
from server.client import Client, SluiceError
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer
from tests.server.harness import Served, running
from tools.make_random_model import write_model
from tools.parity.cases import CASES
from tools.server_process import RunningServer

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
LABELS = ["sad", "neither", "glad"]
TEXTS = ["the cat sat on a mat", "37 + 5 = ?", "the cat sat"]
THREE = {"architectures": ["LlamaForSequenceClassification"], "id2label": dict(enumerate(LABELS)), "pad_token_id": 0}
ONE = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "relevance"}, "pad_token_id": None}
BACKBONE = {"architectures": ["MistralModel"]}


def write_checkpoint(folder: Path, case: str, change: dict[str, Any]) -> Path:
  write_model(folder, json.loads(json.dumps(CASES[case][0] | {"vocab_size": 2048} | change)), seed=7)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(DEMO / name, folder / name)
  return folder


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
  options = BuildOptions(str(folder), token_budgets=(64,), max_num_seqs=8, num_blocks=64, max_model_len=256)
  built = build_engine(options, lambda *_: None, lambda _: None)
  host = HostOptions(http_port=0)
  with running(Tokenizer(DEMO), config=built.config, device=built.runner, host=host, model="served") as served:
    yield served


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Iterator[Served]:
  with serving(write_checkpoint(tmp_path_factory.mktemp("three") / "m", "llama3", THREE)) as served:
    yield served


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> Iterator[Served]:
  with serving(write_checkpoint(tmp_path_factory.mktemp("one") / "m", "qwen3", ONE)) as served:
    yield served


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Iterator[Served]:
  with serving(write_checkpoint(tmp_path_factory.mktemp("backbone") / "m", "mistral", BACKBONE)) as served:
    yield served


def url_of(served: Served) -> str:
  return f"http://127.0.0.1:{served.host.http_port}"


def post(served: Served, path: str, **body: Any) -> httpx.Response:
  return httpx.post(url_of(served) + path, json=body, timeout=60)


def is_close(one: float, other: float) -> bool:
  return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_probabilities_are_softmax_of_the_numbers(classifier, path):
  said = post(classifier, path, input=TEXTS, model="served").json()
  raw = post(classifier, path, input=TEXTS, use_activation=False).json()
  assert said["usage"]["prompt_tokens"] > 10 and said["model"] == "served"
  for index, (shown, numbers) in enumerate(zip(said["data"], raw["data"], strict=True)):
    powers = [math.exp(number) for number in numbers["probs"]]
    assert all(is_close(one, power / sum(powers)) for one, power in zip(shown["probs"], powers, strict=True))
    assert shown["index"] == index and shown["num_classes"] == 3
    assert shown["label"] == numbers["label"] == LABELS[powers.index(max(powers))]
  assert len({shown["label"] for shown in said["data"]}) > 1, "the texts differ"


def test_token_ids_are_what_the_text_becomes_and_padding_is_not_read(classifier):
  ids = post(classifier, "/tokenize", prompt=TEXTS[0]).json()["tokens"]
  given = [TEXTS[0], ids, [*ids, 0, 0], [*ids, 5]]
  found = [post(classifier, "/classify", input=[each] if isinstance(each, list) else each) for each in given]
  by_text, by_ids, padded, longer = (each.json()["data"][0]["probs"] for each in found)
  assert all(is_close(one, other) for one, other in zip(by_text, by_ids, strict=True))
  assert all(is_close(one, other) for one, other in zip(by_ids, padded, strict=True))
  assert not all(is_close(one, other) for one, other in zip(by_ids, longer, strict=True))


def test_grpc_has_the_numbers_of_http(classifier):
  said = post(classifier, "/classify", input=TEXTS).json()["data"]
  with Client(classifier.address) as client:
    found = client.classify([*TEXTS, client.tokenize(TEXTS[0]), (TEXTS[0], TEXTS[1])])
    raw = client.classify(TEXTS, use_activation=False)
    assert client.model_info().labels == LABELS
    assert client.model_info().headless_architecture == "LlamaForSequenceClassification"
  for http, grpc_ in zip(said, found, strict=False):
    assert list(grpc_) == LABELS
    assert all(is_close(one, other) for one, other in zip(http["probs"], grpc_.values(), strict=True))
  assert all(is_close(found[0][label], found[3][label]) for label in LABELS)
  assert any(sum(each.values()) < 0.9 or sum(each.values()) > 1.1 for each in raw)
  response = classifier.generation.Classify(pb.ClassifyRequest(inputs=[pb.ClassifyInput(text=TEXTS[0])]))
  assert response.classifications[0].label == said[0]["label"] and response.classifications[0].num_tokens > 2


def test_a_reranker_scores_pairs_by_its_head(reranker):
  """The tokenizer joins a pair, the head gives one number, and the score is its sigmoid."""
  said = post(reranker, "/v1/score", text_1="a cat", text_2=TEXTS).json()["data"]
  raw = post(reranker, "/score", text_1=["a cat"] * 3, text_2=TEXTS, use_activation=False).json()["data"]
  pairs = [Tokenizer(DEMO).encode_pair("a cat", text) for text in TEXTS]
  classes = post(reranker, "/classify", input=pairs, use_activation=False).json()["data"]
  with Client(reranker.address) as client:
    by_grpc = client.classify([("a cat", text) for text in TEXTS])
  for score, number, by_class, probability in zip(said, raw, classes, by_grpc, strict=True):
    assert is_close(score["score"], 1 / (1 + math.exp(-number["score"])))
    assert is_close(number["score"], by_class["probs"][0]) and by_class["label"] == "relevance"
    assert is_close(probability["relevance"], score["score"])
  ranked = post(reranker, "/v1/rerank", query="a cat", documents=TEXTS).json()["results"]
  assert [each["index"] for each in ranked] == sorted(range(3), key=lambda index: -said[index]["score"])
  assert all(is_close(each["relevance_score"], said[each["index"]]["score"]) for each in ranked)


def test_a_backbone_serves_embeddings_and_cosines_without_a_flag(backbone):
  found = post(backbone, "/v1/embeddings", input=TEXTS).json()["data"]
  assert all(is_close(math.hypot(*each["embedding"]), 1) and len(each["embedding"]) == 96 for each in found)
  scores = post(backbone, "/v1/score", text_1=TEXTS[2], text_2=TEXTS).json()["data"]
  assert is_close(scores[2]["score"], 1) and scores[0]["score"] < 0.999


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
  ("path", "body"),
  [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
    ("/v1/responses", {"input": "a"}),
  ],
)
@pytest.mark.parametrize("kind", ["classifier", "reranker", "backbone"])
def test_generation_is_refused_by_name(request, kind, path, body):
  served: Served = request.getfixturevalue(kind)
  words = {
    "classifier": "LlamaForSequenceClassification has no head of tokens; it serves classes: send texts to /classify",
    "reranker": "Qwen3ForSequenceClassification has no head of tokens; it serves scores: send texts to /v1/score",
    "backbone": "MistralModel has no head of tokens; it serves embeddings: send texts to /v1/embeddings",
  }
  for stream in (False, True):
    said = post(served, path, **body, stream=stream)
    assert said.status_code == 400 and words[kind] in said.json()["error"]["message"], said.text
  with Client(served.address) as client, pytest.raises(SluiceError, match="has no head of tokens") as caught:
    client.generate("a", max_tokens=1)
  assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
  assert served.engine.num_live == 0


@pytest.mark.parametrize(
  ("kind", "path", "body", "words"),
  [
    ("classifier", "/v1/embeddings", {"input": "a"}, "has a head of classes (LlamaForSequenceClassification)"),
    ("classifier", "/v1/score", {"text_1": "a", "text_2": "b"}, "has a head of 3 classes, and a score needs"),
    ("classifier", "/rerank", {"query": "a", "documents": ["b"]}, "a head of one: send the texts to /classify"),
    ("classifier", "/classify", {}, "input is missing: send a string"),
    ("classifier", "/classify", {"input": []}, "input is an empty list"),
    ("classifier", "/classify", {"input": ""}, "input has an empty entry"),
    ("classifier", "/classify", {"input": ["a", 5]}, "input is a list of several kinds"),
    ("classifier", "/classify", {"input": [[5000]]}, "token id"),
    ("classifier", "/classify", {"input": [[]]}, "empty"),
    ("classifier", "/classify", {"input": [[-1]]}, "token id"),
    ("classifier", "/classify", {"input": 5}, "input"),
    ("classifier", "/classify", {"input": ["a"] * 2049}, "input has 2049 entries, the limit is 2048"),
    ("classifier", "/classify", {"input": "a " * 2000}, "maximum context length is 256 tokens"),
    ("classifier", "/classify", {"input": "a", "use_activation": "no"}, "use_activation"),
    ("classifier", "/classify", {"input": "a", "priority": "high"}, "priority"),
    ("classifier", "/classify", {"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ("classifier", "/classify", {"messages": CHAT, "input": "a"}, "messages"),
    ("classifier", "/classify", {"input": "a", "model": "other"}, "other"),
    ("reranker", "/v1/embeddings", {"input": "a"}, "gives no embeddings: send texts to /classify"),
    ("reranker", "/v1/score", {"text_1": "", "text_2": ["a"]}, "text_1 has an empty entry"),
    ("reranker", "/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "send one text_1, or as many as text_2"),
    ("reranker", "/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents has an empty entry"),
    ("reranker", "/v1/rerank", {"query": "a " * 999, "documents": ["b"]}, "maximum context length is 256 tokens"),
    ("backbone", "/classify", {"input": "a"}, "has no head of classes: serve a checkpoint with one"),
  ],
)  # fmt: skip
def test_bad_requests_are_one_error(request, kind, path, body, words):
  served: Served = request.getfixturevalue(kind)
  response = post(served, path, **body)
  said = response.json()["error"]
  assert response.status_code in (400, 404) and words in said["message"] and len(said["message"]) < 400, said
  assert served.engine.num_live == 0


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (pb.ClassifyRequest(), "inputs is an empty list"),
    (pb.ClassifyRequest(inputs=[pb.ClassifyInput()]), "inputs has an entry with neither text nor token_ids"),
    (pb.ClassifyRequest(inputs=[pb.ClassifyInput(pair=pb.TextPair(first="a"))]), "inputs has an empty entry"),
    (pb.ClassifyRequest(inputs=[pb.ClassifyInput(text="a")] * 2049), "inputs has 2049 entries"),
    (pb.ClassifyRequest(inputs=[pb.ClassifyInput(text="a")], tenant="a" * 129), "tenant has 129 bytes"),
  ],
)
def test_bad_calls_are_one_error(classifier, given, words):
  with pytest.raises(grpc.RpcError) as caught:
    classifier.generation.Classify(given)
  assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # pyright: ignore[reportAttributeAccessIssue]
  assert words in caught.value.details()  # pyright: ignore[reportAttributeAccessIssue]


def test_classify_of_grpc_needs_a_head(backbone):
  with Client(backbone.address) as client, pytest.raises(SluiceError, match="has no head of classes"):
    client.classify(["a"])
  with Client(backbone.address) as client:
    assert len(client.embed(["a"])[0]) == 96 and not client.model_info().labels


def test_models_pages_and_metrics_are_served(classifier):
  with httpx.Client(base_url=url_of(classifier), timeout=60) as http:
    assert http.get("/v1/models").json()["data"][0]["id"] == "served"
    assert http.get("/").status_code == 200
    before = http.get("/metrics").text
    document = http.get("/openapi.json").json()
    schema = document["paths"]["/classify"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    validator.validate(http.post("/classify", json={"input": TEXTS}).json())
    assert before != http.get("/metrics").text and 'method="POST /classify"' in http.get("/metrics").text


@pytest.mark.long
def test_front_ends_of_their_own_classify(tmp_path):
  port_file = tmp_path / "http"
  flags = [
    f"--model={write_checkpoint(tmp_path / 'm', 'llama3', THREE)}", "--frontend_processes=2", "--http_port=0",
    f"--http_port_file={port_file}", "--token_budgets=64", "--max_model_len=256", "--num_blocks=64",
  ]  # fmt: skip
  with RunningServer(flags, tmp_path / "log"), httpx.Client(timeout=60) as client:
    url = f"http://127.0.0.1:{port_file.read_text().strip()}"
    for _ in range(4):
      said = client.post(f"{url}/classify", json={"input": TEXTS}).json()
      assert len(said["data"]) == 3 and said["data"][0]["label"] in LABELS
