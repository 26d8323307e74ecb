"""The OpenAPI document: valid, public, true to the names that the endpoints read and to what they answer."""

import httpx
import jsonschema
import pytest
import schemathesis

from server.http.openai import openapi
from server.lifecycle.host import HostOptions
from tests.server.harness import running
from tests.server.http.conftest import url_of

CHAT = [{"role": "user", "content": "hi"}]
BODIES = {
  "/v1/completions": {"prompt": "the cat", "max_tokens": 3, "logprobs": 2, "echo": True, "return_token_ids": True},
  "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
  "/v1/messages": {"messages": CHAT, "max_tokens": 3},
  "/v1/messages/count_tokens": {"messages": CHAT},
  "/v1/responses": {"input": "hi", "max_output_tokens": 3, "metadata": {"a": "b"}},
  "/v1/responses/input_tokens": {"input": "hi", "instructions": "be brief"},
  "/tokenize": {"messages": CHAT, "return_token_strs": True},
  "/detokenize": {"tokens": [7, 8]},
  "/v1/embeddings": {"input": "a"},
  "/classify": {"input": "a"},
  "/v1/score": {"text_1": "a", "text_2": ["b"]},
  "/v1/rerank": {"query": "a", "documents": ["b"]},
}
KINDS = (
  ("/v1/completions", "CompletionRequest"),
  ("/v1/chat/completions", "ChatCompletionRequest"),
  ("/v1/messages", "MessageRequest"),
  ("/v1/messages/count_tokens", "CountTokensRequest"),
  ("/v1/responses", "ResponseRequest"),
  ("/v1/responses/input_tokens", "ResponseRequest"),
  ("/v1/embeddings", "EmbeddingRequest"),
  ("/classify", "ClassifyRequest"),
  ("/v1/score", "ScoreRequest"),
  ("/v1/rerank", "RerankRequest"),
  ("/tokenize", "TokenizeText"),
  ("/tokenize", "TokenizeChat"),
  ("/detokenize", "DetokenizeRequest"),
)


@pytest.fixture(scope="module")
def document(http):
  return http.get("/openapi.json").json()


def resolved(document, schema) -> dict:
  return {**schema, "components": document["components"]}


def test_it_is_a_valid_document(document):
  schemathesis.openapi.from_dict(document).validate()
  for schema in document["components"]["schemas"].values():
    jsonschema.Draft202012Validator.check_schema(schema)


def test_it_needs_no_key(tokenizer, tmp_path):
  (tmp_path / "keys").write_text("rW5vJ8Jk2nq4uYt1sXzB8mE0\n")
  (tmp_path / "keys").chmod(0o600)
  host = HostOptions(http_port=0, api_key_file=str(tmp_path / "keys"))
  with running(tokenizer, host=host) as server, httpx.Client(base_url=url_of(server)) as http:
    assert http.get(openapi.PATH).json()["openapi"] == "3.1.0"
    assert http.get("/v1/models").status_code == 401


@pytest.mark.parametrize("path, kind", KINDS, ids=str)
def test_its_names_are_those_that_are_understood(http, document, path, kind):
  """None of a body's is refused or ignored as a field that nobody has heard of."""
  schema = document["components"]["schemas"][kind]
  given = BODIES[path] if set(BODIES[path]) & {"input", *schema["required"]} else {"prompt": "a"}
  for name in schema["properties"].keys() - given:
    answer = http.post(path, json=given | {name: ["?"]})
    if answer.status_code == 400:
      error = answer.json()["error"]
      named = error.get("param", error["message"]).startswith(name)
      unserved = ("--enable_embeddings", "has no head of classes")
      assert named or any(words in error["message"] for words in unserved), answer.text
    else:
      assert answer.status_code in (200, 404) and "x-sluice-ignored-fields" not in answer.headers


def test_answers_are_as_it_says(http, document):
  response_id = http.post("/v1/responses", json=BODIES["/v1/responses"]).json()["id"]
  for path, methods in document["paths"].items():
    for method, operation in methods.items():
      if path.endswith("/cancel"):
        continue  # only of a response that is not there yet
      if path.startswith(("/v1/files", "/v1/batches")):
        continue  # tests/server/http/batches has a server that serves them
      real = path.replace("{model}", "tiny").replace("{response_id}", response_id)
      answer = http.request(method, real, json=BODIES.get(path))
      if path == "/classify":
        assert "has no head of classes" in answer.json()["error"]["message"]
        continue
      if path in ("/v1/embeddings", "/v1/score", "/v1/rerank"):
        # tests/server/http/embeddings has a server that serves them.
        assert "--enable_embeddings" in answer.json()["error"]["message"]
        continue
      if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert answer.status_code == 403  # test_adapters.py has a server that serves them
        continue
      assert answer.status_code == 200, path
      schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
      jsonschema.Draft202012Validator(resolved(document, schema)).validate(answer.json())
      if method == "post":
        jsonschema.Draft202012Validator(
          resolved(document, operation["requestBody"]["content"]["application/json"]["schema"])
        ).validate(BODIES[path])
        refused = http.post(real, json={})
        assert refused.status_code == 400
        schema = operation["responses"]["default"]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator(resolved(document, schema)).validate(refused.json())


def test_metrics_count_its_paths_by_name(http, document):
  """But for those with ids."""
  own = [path for path in document["paths"] if "{" not in path and path not in ("/health", "/ready")]
  for path in own:
    http.request("HEAD", path)
  counted = http.get("/metrics").text
  assert len(own) > 15
  assert not [path for path in own if f'method="HEAD {path}"' not in counted]


def test_its_limits_are_those_of_the_server(http, document):
  """The first value past each limit of a number or a list is refused."""
  completion = document["components"]["schemas"]["CompletionRequest"]["properties"]
  bad = []
  for name, field in completion.items():
    schema = field["anyOf"][0] if "anyOf" in field else {}
    if schema.get("type") == "number":
      bad.append({name: schema["maximum"] + 0.5})
      bad.append({name: schema["minimum"] - 0.5 if "minimum" in schema else schema["exclusiveMinimum"]})
    if schema.get("type") == "integer":
      bad += [{name: schema["maximum"] + 1}, {name: schema["minimum"] - 1}]
    if "maxItems" in schema:
      bad.append({name: [7] * (schema["maxItems"] + 1)})
  assert len(bad) >= 30
  for fields in bad:
    answer = http.post("/v1/completions", json={"prompt": "a"} | fields)
    assert answer.status_code == 400, fields
