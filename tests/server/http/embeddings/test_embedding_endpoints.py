"""Embeddings, scores and rankings on the demo model, with the official client, over one process and several."""

from collections.abc import Iterator
import json
import math
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest

from engine.device.build import build_engine
from engine.device.options import BuildOptions
from server.lifecycle.host import HostOptions
from server.text.tokenizer import Tokenizer
from tests.server.harness import running
from tools.server_process import RunningServer

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
TEXTS = ["the cat sat on a mat", "37 + 5 = ?", "the cat sat"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
  options = BuildOptions(
    str(DEMO), token_budgets=(64,), max_num_seqs=8, num_blocks=256, max_model_len=512, enable_embeddings=True
  )
  built = build_engine(options, lambda *_: None, lambda _: None)
  host = HostOptions(http_port=0)
  with running(Tokenizer(DEMO), config=built.config, device=built.runner, host=host, model="sluice-demo") as served:
    yield f"http://127.0.0.1:{served.host.http_port}"


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
  with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
    yield client


@pytest.fixture(scope="module")
def http(url) -> Iterator[httpx.Client]:
  with httpx.Client(base_url=url, timeout=60) as client:
    yield client


def test_the_official_client_gets_vectors_of_length_one_in_order(client):
  model = client.models.list().data[0].id
  found = client.embeddings.create(model=model, input=TEXTS)
  assert [each.index for each in found.data] == [0, 1, 2] and found.usage.prompt_tokens > 10
  for each, text in zip(found.data, TEXTS, strict=True):
    assert len(each.embedding) == 256 and math.isclose(math.hypot(*each.embedding), 1, abs_tol=1e-5)
    alone = client.embeddings.create(model=model, input=text, encoding_format="float").data[0].embedding
    assert max(abs(one - other) for one, other in zip(alone, each.embedding, strict=True)) < 1e-4


def test_token_ids_are_what_the_text_becomes(client, http):
  ids = http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
  by_text, by_ids, by_list = (
    client.embeddings.create(model="", input=given).data[0].embedding for given in (TEXTS[0], ids, [ids])
  )
  assert max(abs(one - other) for one, other in zip(by_text, by_ids, strict=True)) < 1e-4
  assert max(abs(one - other) for one, other in zip(by_ids, by_list, strict=True)) < 1e-4


def test_shortened_vectors_are_the_first_numbers_scaled_again(client):
  whole = client.embeddings.create(model="", input="a dog").data[0].embedding
  short = client.embeddings.create(model="", input="a dog", dimensions=16).data[0].embedding
  scale = math.hypot(*whole[:16])
  assert len(short) == 16
  assert max(abs(one - other / scale) for one, other in zip(short, whole[:16], strict=True)) < 1e-4


def test_dimensions_beyond_the_model_are_refused_before_anything_runs(http):
  def count_prompt_tokens() -> float:
    (line,) = [
      line for line in http.get("/metrics").text.splitlines() if line.startswith("sluice_prefill_tokens_total")
    ]
    return float(line.split()[-1])

  before = count_prompt_tokens()
  said = http.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 257})
  assert said.status_code == 400 and said.json()["error"]["param"] == "dimensions"
  assert count_prompt_tokens() == before
  http.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 256})
  assert count_prompt_tokens() > before


def test_raw_vectors_are_not_scaled(http):
  body = {"input": "a dog", "normalize": False}
  vector = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
  assert math.hypot(*vector) > 2


def test_more_inputs_than_the_queue_holds_are_served(client):
  found = client.embeddings.create(model="", input=[f"number {index}" for index in range(600)])
  assert [each.index for each in found.data] == list(range(600))
  assert len({tuple(each.embedding[:8]) for each in found.data}) > 500


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_are_cosines(http, path):
  said = http.post(path, json={"text_1": "the cat sat", "text_2": TEXTS}).json()
  assert [each["index"] for each in said["data"]] == [0, 1, 2]
  scores = [each["score"] for each in said["data"]]
  assert math.isclose(scores[2], 1, abs_tol=1e-5) and max(scores[:2]) < 0.999
  pairs = http.post(path, json={"text_1": TEXTS, "text_2": TEXTS}).json()
  assert all(math.isclose(each["score"], 1, abs_tol=1e-5) for each in pairs["data"])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked(http, path):
  documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
  said = http.post(path, json={"query": "the cat sat", "documents": documents, "top_n": 2}).json()
  assert [each["index"] for each in said["results"]][0] == 2 and len(said["results"]) == 2
  assert said["results"][0]["document"] == {"text": TEXTS[2]}
  bare = http.post(path, json={"query": "a", "documents": ["a", "b"], "return_documents": False}).json()
  assert all("document" not in each for each in bare["results"])


@pytest.mark.parametrize(
  ("path", "body"),
  [
    ("/v1/embeddings", {"input": TEXTS}),
    ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
    ("/v1/score", {"text_1": "a", "text_2": TEXTS}),
    ("/v1/rerank", {"query": "a", "documents": TEXTS}),
  ],
)
def test_responses_are_as_the_document_says(http, path, body):
  document = http.get("/openapi.json").json()
  schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
  validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
  validator.validate(http.post(path, json=body).json())


@pytest.mark.parametrize(
  ("path", "body", "words"),
  [
    ("/v1/embeddings", {}, "input is missing: send a string"),
    ("/v1/embeddings", {"input": []}, "input is an empty list"),
    ("/v1/embeddings", {"input": ["a", 5]}, "input is a list of several kinds"),
    ("/v1/embeddings", {"input": [[5000]]}, "token id"),
    ("/v1/embeddings", {"input": [[]]}, "empty"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input has 2049 entries, the limit is 2048"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 257}, "dimensions=257 is not allowed: send 1 to the model's 256"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format is not one that exists"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a " * 2000}, "maximum context length is 512 tokens"),
    ("/v1/embeddings", {"input": "a", "model": "other"}, "other"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "send one text_1, or as many as text_2"),
    ("/v1/score", {"text_1": [], "text_2": ["a"]}, "send one text_1"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents is an empty list"),
    ("/v1/rerank", {"query": "a", "documents": [3]}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
  ],
)
def test_bad_requests_are_one_error(http, path, body, words):
  response = http.post(path, json=body)
  said = response.json()["error"]
  assert response.status_code in (400, 404) and words in said["message"], said
  assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_front_ends_of_their_own_serve_them(tmp_path):
  port_file = tmp_path / "http"
  flags = [
    f"--model={DEMO}", "--enable_embeddings", "--frontend_processes=2", "--http_port=0",
    f"--http_port_file={port_file}", "--token_budgets=64", "--max_model_len=512", "--num_blocks=256",
  ]  # fmt: skip
  with RunningServer(flags, tmp_path / "log"), httpx.Client(timeout=60) as client:
    url = f"http://127.0.0.1:{port_file.read_text().strip()}"
    for _ in range(4):
      said = client.post(f"{url}/v1/embeddings", json={"input": TEXTS})
      assert said.status_code == 200 and len(json.loads(said.content)["data"]) == 3


def test_a_server_without_the_flag_says_so(server):
  """`server` is the HTTP tests' own, on a fake model."""
  with httpx.Client(base_url=f"http://127.0.0.1:{server.host.http_port}") as client:
    for path, body in (
      ("/v1/embeddings", {"input": "a"}),
      ("/score", {"text_1": "a", "text_2": "a"}),
      ("/rerank", {"query": "a", "documents": ["a"]}),
    ):
      said = client.post(path, json=body)
      assert said.status_code == 400 and "serve it with --enable_embeddings" in said.json()["error"]["message"]
