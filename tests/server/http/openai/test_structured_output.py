"""OpenAI's response_format and vLLM's structured_outputs and guided_ fields: the outputs are what was asked for."""

import json
import re

import httpx
import pytest

from server.host_options import HostOptions
from tests.server.harness import running
from tests.server.http.conftest import url_of

SCHEMA = {
  "type": "object",
  "properties": {"b": {"type": "boolean"}, "a": {"enum": ["x", "y"]}},
  "required": ["b", "a"],
  "additionalProperties": False,
  "x-guidance": {"whitespace_flexible": False},
}


def is_of_schema(text: str) -> bool:
  value = json.loads(text)
  # In the order of the schema, which the model was perhaps told.
  return list(value) == ["b", "a"] and type(value["b"]) is bool and value["a"] in ("x", "y")


def ask(http, **fields) -> list[str]:
  answer = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 60, "n": 8, "seed": 1} | fields)
  assert answer.status_code == 200, answer.text
  choices = answer.json()["choices"]
  assert {choice["finish_reason"] for choice in choices} == {"stop"}
  return [choice["text"] for choice in choices]


def test_response_format_of_the_real_client(client):
  answer = client.chat.completions.create(
    model="tiny",
    messages=[{"role": "user", "content": "the"}],
    n=4,
    response_format={"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}},
  )
  assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
  assert all(is_of_schema(choice.message.content) for choice in answer.choices)


def test_a_stream_of_the_real_client(client):
  stream = client.chat.completions.create(
    model="tiny",
    messages=[{"role": "user", "content": "the"}],
    stream=True,
    response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
  )
  chunks = [chunk for chunk in stream if chunk.choices]
  assert is_of_schema("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
  assert chunks[-1].choices[0].finish_reason == "stop"


def test_any_object(http):
  body = {"prompt": "the", "max_tokens": 300, "n": 16, "seed": 1, "response_format": {"type": "json_object"}}
  choices = http.post("/v1/completions", json=body).json()["choices"]
  whole = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
  assert whole and all(isinstance(json.loads(text), dict) for text in whole)


@pytest.mark.parametrize(
  "fields",
  [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "disable_fallback": False}},
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA)},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}, "schema": None}},
  ],
  ids=str,
)
def test_json_by_the_names_of_vllm_llama_cpp_and_sglang(http, fields):
  assert all(map(is_of_schema, ask(http, **fields)))


@pytest.mark.parametrize(
  "fields",
  [
    {"guided_regex": "[ab]{3}"},
    {"structured_outputs": {"regex": "[ab]{3}"}},
    {"guided_choice": ["aaa", "bab"]},
    {"structured_outputs": {"choice": ["aaa", "bab"]}},
    {"guided_grammar": "root ::= [ab] [ab] [ab]"},
    {"structured_outputs": {"grammar": "start: /[ab]{3}/"}},
    {"regex": "[ab]{3}"},
    {"grammar": "root ::= [ab] [ab] [ab]"},
    {"ebnf": 'root ::= x x x\nx ::= "a" | "b"'},
  ],
  ids=str,
)
def test_others_by_the_names_of_vllm_llama_cpp_and_sglang(http, fields):
  assert all(re.fullmatch("[ab]{3}", text) for text in ask(http, **fields))


@pytest.mark.parametrize(
  "fields",
  [
    {"grammar": "root ::= [ab] [ab] [ab]"},
    {"ebnf": 'root ::= x x x\nx ::= "a" | "b"'},
    {"regex": "[ab]{3}"},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"json_schema": SCHEMA},
  ],
  ids=str,
)
def test_chats_take_the_fields_of_llama_cpp_and_sglang_as_completions_do(http, fields):
  body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 60, "n": 8, "seed": 1} | fields
  answer = http.post("/v1/chat/completions", json=body)
  assert answer.status_code == 200, answer.text
  texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
  follows = is_of_schema if "schema" in str(fields) else re.compile("[ab]{3}").fullmatch
  assert texts and all(map(follows, texts))
  assert "x-sluice-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
  ("fields", "param", "said"),
  [
    ({"ebnf": "root ::= missing"}, "ebnf", "is not one that can be followed"),
    ({"grammar": "no grammar"}, "grammar", "is not one that can be followed"),
    ({"regex": "("}, "regex", "is not one that can be followed"),
    ({"regex": "(?=a)b"}, "regex", "is not one that can be followed"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "is not allowed beside regex"),
    ({"grammar": 'root ::= "a"', "grammar_lazy": True}, "grammar_lazy", "a grammar holds from the first token"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "is not supported with type text"),
    ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema", "send"),
  ],
  ids=str,
)
def test_what_they_cannot_mean_is_refused_by_name(http, path, fields, param, said):
  body = {"prompt": "the"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "the"}]}
  answer = http.post(path, json=body | {"max_tokens": 8} | fields)
  error = answer.json()["error"]
  assert answer.status_code == 400 and error["param"] == param and said in error["message"], error


def test_any_json_by_the_names_of_llama_cpp_and_sglang(http):
  """An empty schema is any JSON; any object where that is asked for."""
  for fields, kinds in (
    ({"json_schema": {}}, object),
    ({"response_format": {"type": "json_object", "schema": {}}}, dict),
  ):
    body = {"prompt": "the", "max_tokens": 300, "n": 16, "seed": 1} | fields
    choices = http.post("/v1/completions", json=body).json()["choices"]
    whole = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert whole and all(isinstance(json.loads(text), kinds) for text in whole)


def test_each_of_several_prompts(http):
  texts = ask(http, prompt=["the", "cat"], guided_choice=["aaa", "bab"], n=3)
  assert len(texts) == 6 and set(texts) <= {"aaa", "bab"}


def test_what_asks_for_nothing(http):
  for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}):
    answer = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 5, "ignore_eos": True} | fields)
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length"


LOOSE = {
  "type": "object",
  "properties": {"b": {"type": "array", "items": {"$ref": "#/$defs/one"}, "uniqueItems": True, "maxItems": 2}},
  "required": ["b"],
  "not": {"pattern": "^c"},
  "$defs": {"one": {"type": "integer", "minimum": 1, "maximum": 1}},
  "x-guidance": {"whitespace_flexible": False},
}


def completion_with(http, schema, **wrapper):
  form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema} | wrapper}
  return http.post("/v1/completions", json={"prompt": "the", "max_tokens": 60, "n": 8, "response_format": form})


def test_keywords_that_are_not_enforced_are_named_in_the_header(http):
  answer = completion_with(http, LOOSE)
  assert answer.status_code == 200, answer.text
  field = "response_format.json_schema.schema"
  assert answer.headers["x-sluice-ignored-fields"] == f"{field}.uniqueItems, {field}.not"
  for choice in answer.json()["choices"]:
    value = json.loads(choice["text"])
    assert list(value) == ["b"] and set(value["b"]) <= {1} and len(value["b"]) <= 2
  answer = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 60, "guided_json": json.dumps(LOOSE)})
  assert answer.headers["x-sluice-ignored-fields"] == "guided_json.uniqueItems, guided_json.not"
  assert "x-sluice-ignored-fields" not in completion_with(http, SCHEMA).headers


def test_strict_refuses_them_with_their_path(http):
  answer = completion_with(http, LOOSE, strict=True)
  error = answer.json()["error"]
  assert answer.status_code == 400 and error["param"] == "response_format.json_schema.schema.uniqueItems"
  assert "has uniqueItems at properties/b/uniqueItems, which cannot be enforced" in error["message"]
  assert "strict=false" in error["message"]
  assert completion_with(http, SCHEMA, strict=True).status_code == 200


def test_objects_are_closed_by_default(http):
  schema = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
  for wrapper in ({}, {"strict": True}, {"strict": False}):
    choices = completion_with(http, schema, **wrapper).json()["choices"]
    assert all(is_of_schema(choice["text"]) for choice in choices)


def test_the_parameters_of_forced_calls_are_treated_alike(http):
  body = {
    "messages": [{"role": "user", "content": "the"}],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": LOOSE}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 300,
  }
  answer = http.post("/v1/chat/completions", json=body)
  assert answer.status_code == 200, answer.text
  where = "tools[0].function.parameters"
  assert answer.headers["x-sluice-ignored-fields"] == f"{where}.uniqueItems, {where}.not"
  body["tools"][0]["function"]["strict"] = True
  answer = http.post("/v1/chat/completions", json=body)
  assert answer.status_code == 400 and answer.json()["error"]["param"] == f"{where}.uniqueItems"


def test_a_setting_opens_objects_as_the_standard_says(tokenizer):
  schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
  options = HostOptions(http_port=0, json_schema_additional_properties=True)
  with running(tokenizer, host=options) as server, httpx.Client(base_url=url_of(server), timeout=30) as http:
    texts = [choice["text"] for choice in completion_with(http, schema).json()["choices"]]
    assert any(text.count(",") for text in texts)
    texts = [choice["text"] for choice in completion_with(http, schema, strict=True).json()["choices"]]
    assert all(json.loads(text) == {"a": 1} for text in texts)
