"""Every bad body and every bad byte gets its status and one clear error object; nothing is queued and nobody harmed."""

import json
import re
import shutil
import socket

import httpx
import pytest

from engine.errors import Overloaded
from server.http import error_responses
from server.http.openai import request_fields
from server.lifecycle.host import HostOptions
from server.rpc import grpc_status
from server.text.tokenizer import Tokenizer
from tests.server.harness import running
from tests.server.http.conftest import url_of

IDS = [7, 8, 9]
CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def completion(**fields):
  return "/v1/completions", {"prompt": IDS, **fields}


def chat(**fields):
  return "/v1/chat/completions", {"messages": CHAT, **fields}


def message(**fields):
  return chat(messages=[fields])


# Name: (path, body), param, part of the message.
BAD_BODIES = {
  # Prompts.
  "no prompt": (("/v1/completions", {}), "prompt", "prompt is missing: send a string, a list of strings"),
  "empty prompt": (completion(prompt=""), "prompt", "prompt is empty: send at least one character"),
  "empty list": (completion(prompt=[]), "prompt", "prompt is an empty list: send a string"),
  "list of an empty list": (completion(prompt=[[]]), "prompt", "prompt is empty; send at least one token"),
  "prompt number": (completion(prompt=3), "prompt", "prompt is a whole number: send a string, a list of"),
  "mixed prompts": (completion(prompt=["a", [7]]), "prompt", "of several kinds"),
  "half an id": (completion(prompt=[7, 8.5]), "prompt[1]", "prompt[1] is a number: send a whole number or"),
  "an id of words": (completion(prompt=[[7, "a"]]), "prompt[0][1]", "is a string: send a whole number"),
  "boolean ids": (completion(prompt=[True, False]), "prompt[0]", "is a boolean: send a whole number"),
  "id outside": (completion(prompt=[400]), "prompt", "400 is not in the vocabulary"),
  "negative id": (completion(prompt=[-1]), "prompt", "-1 is not in the vocabulary; ids of this model are 0 to"),
  "huge id": (completion(prompt=[10**30]), "prompt[0]", "... is not allowed: send a whole number that fits into 32"),
  "id outside with echo": (completion(prompt=[400], echo=True), "prompt", "400"),
  "257 prompts": (completion(prompt=["a"] * 257), "prompt", "257 entries, the limit is 256"),
  "too long": (completion(prompt=[7] * 510, max_tokens=3), "prompt", "maximum context length is 512 tokens"),
  # Values.
  "temperature": (
    completion(temperature=-1),
    "temperature",
    "-1.0 is not allowed: send a finite number from 0 to 100",
  ),
  "temperature huge": (completion(temperature=1e300), "temperature", "=inf is not allowed: send a finite number from"),
  "temperature text": (completion(temperature="hot"), "temperature", "temperature is a string: send a number"),
  "temperature boolean": (completion(temperature=True), "temperature", "is a boolean"),
  "top_p 0": (completion(top_p=0), "top_p", "top_p=0.0 is not allowed: send a finite number above 0 to 1"),
  "top_k": (completion(top_k=-2), "top_k", "-2"),
  "top_k fraction": (completion(top_k=1.5), "top_k", "send a whole number"),
  "n 0": (completion(n=0), "n", "n=0 is not allowed: send a whole number from 1 to 16"),
  "n huge": (completion(n=2**40), "n", "n=1099511627776 is not allowed"),
  "n of many digits": (completion(n=10**200), "n", "n=100000000000000000000000000000... is not allowed: send a"),
  "max_tokens 0": (completion(max_tokens=0), "max_tokens", "from 1"),
  "max_tokens 0 in chat": (
    chat(max_completion_tokens=0),
    "max_completion_tokens",
    "max_completion_tokens=0 is not allowed: send",
  ),
  "max_tokens huge": (completion(max_tokens=2**31 - 1), "prompt", "maximum context length is 512 tokens"),
  "max_tokens list": (completion(max_tokens=[1]), "max_tokens", "is a list"),
  "min_tokens": (completion(max_tokens=4, min_tokens=5), "min_tokens", "from 0 to 4"),
  "seed": (completion(seed=2**63), "seed", "is not allowed"),
  "stop number": (completion(stop=3), "stop", "stop is a whole number: send a string or a list"),
  "stop numbers": (completion(stop=["a", 3]), "stop[1]", "stop[1] is a whole number: send a string"),
  "empty stop": (completion(stop=[""]), "stop[0]", "0 bytes, allowed are 1 to 256"),
  "17 stops": (completion(stop=list("abcdefghijklmnopq")), "stop", "17 strings, the limit is 16"),
  "stop ids": (completion(stop_token_ids=[400]), "stop_token_ids", "0 to 399"),
  "stop ids of 40 bits": (completion(stop_token_ids=[2**40]), "stop_token_ids[0]", "that fits into 32 bits"),
  "logit_bias list": (completion(logit_bias=[1]), "logit_bias", "send an object"),
  "logit_bias key": (completion(logit_bias={"a": 1}), "logit_bias", "has a key that is a string: send a whole number"),
  "logit_bias value": (completion(logit_bias={"7": "1"}), "logit_bias", "has an entry that is a string: send a number"),
  "logit_bias range": (completion(logit_bias={"7": 101}), "logit_bias[7]", "-100 to 100"),
  "logit_bias id": (completion(logit_bias={"400": 1}), "logit_bias", "0 to 399"),
  "no allowed ids": (completion(allowed_token_ids=[]), "allowed_token_ids", "at least one id"),
  "logprobs 21": (completion(logprobs=21), "logprobs", "from 0 to 20"),
  "logprobs of chat": (chat(logprobs=3), "logprobs", "send a boolean"),
  "top_logprobs 21": (chat(logprobs=True, top_logprobs=21), "top_logprobs", "top_logprobs=21 is not allowed: send a"),
  "top_logprobs alone": (chat(top_logprobs=2), "top_logprobs", "with logprobs=true alone"),
  "stream text": (completion(stream="yes"), "stream", "stream is a string: send a boolean"),
  "stream_options alone": (completion(stream_options={"include_usage": True}), "stream_options", "stream=true"),
  "stream_options list": (completion(stream=True, stream_options=[]), "stream_options", "send an object"),
  "include_usage": (
    completion(stream=True, stream_options={"include_usage": 1}),
    "stream_options.include_usage",
    "is a whole number: send a boolean",
  ),
  "request_id": (completion(request_id="a b"), "request_id", "1 to 128 of A-Z"),
  "cache_salt": (completion(cache_salt="s" * 129), "cache_salt", "129 bytes, the limit is 128"),
  "speculation": (completion(speculation="ngram"), "speculation", "send one of none, or serve with another"),
  "model number": (completion(model=3), "model", "send a string"),
  # What is not built.
  "suffix": (completion(suffix="x"), "suffix", "no infilling"),
  "best_of": (completion(best_of=2), "best_of", "send the same as n=1"),
  "beam": (completion(use_beam_search=True), "use_beam_search", "no beam search"),
  "json_schema": (
    completion(response_format={"type": "json_schema"}),
    "response_format.json_schema.schema",
    "send a JSON schema",
  ),
  "structural_tag": (chat(response_format={"type": "structural_tag"}), "response_format", "send a json_schema"),
  "response_format": (chat(response_format={"type": "xml"}), "response_format.type", "send text, json_object or"),
  "response_format text": (chat(response_format="text"), "response_format", "send an object"),
  "guided_regex": (completion(guided_regex=3), "guided_regex", "send a string"),
  "guided_choice": (completion(guided_choice=["a", 3]), "guided_choice[1]", "is a whole number: send a string"),
  "guided_json": (completion(guided_json=[]), "guided_json", "is a list: send a string or an object"),
  "guided_whitespace": (completion(guided_whitespace_pattern=" "), "guided_whitespace_pattern", "into the grammar"),
  "two constraints": (
    completion(guided_regex="a", structured_outputs={"json": {}}),
    "structured_outputs.json",
    "is not allowed beside guided_regex",
  ),
  "structured tag": (
    completion(structured_outputs={"structural_tag": "{}"}),
    "structured_outputs.structural_tag",
    "send one of json",
  ),
  "a schema of two": (
    completion(response_format={"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}),
    "response_format.schema",
    "is not allowed beside response_format.json_schema.schema: send one of them",
  ),
  "a schema for text": (
    completion(response_format={"type": "text", "schema": {}}),
    "response_format.schema",
    "is not supported with type text: send a schema as",
  ),
  "a schema of another type": (
    chat(response_format={"type": "json_object", "json_schema": {"schema": {}}}),
    "response_format.json_schema",
    "is not supported with type json_object",
  ),
  "a schema that is a list": (
    completion(response_format={"type": "json_object", "schema": [1]}),
    "response_format.schema",
    "is a list: send a string or an object",
  ),
  "bare regex": (completion(regex="("), "regex", "unclosed group"),
  "bare grammar": (completion(grammar="what"), "grammar", "is not GBNF either"),
  "bare grammar number": (completion(ebnf=3), "ebnf", "ebnf is a whole number: send a string"),
  "bare and format": (
    completion(json_schema={}, response_format={"type": "json_object"}),
    "response_format",
    "is not allowed beside json_schema: send one of them",
  ),
  "lazy grammar": (completion(grammar='root ::= "a"', grammar_lazy=True), "grammar_lazy", "from the first token on"),
  "guided by others": (completion(guided_thing="x"), "guided_thing", "send response_format, or one of json, regex"),
  "top level tag": (chat(structural_tag="{}"), "structural_tag", "send response_format, or one of json, regex"),
  "n_predict": (completion(n_predict=5), "n_predict", "n_predict=5 is not supported: send max_tokens"),
  "mirostat": (completion(mirostat=2), "mirostat", "mirostat=2 is not supported: it is not built; use temperature"),
  "repeat_penalty": (
    completion(repeat_penalty=1.1),
    "repeat_penalty",
    "=1.1 is not supported: send repetition_penalty",
  ),
  "stop_regex": (chat(stop_regex="a+"), "stop_regex", "send stop, with strings"),
  "lora": (chat(lora_path="x"), "lora_path", "send an adapter's name as model"),
  "thinking": (
    completion(thinking_token_budget=10),
    "thinking_token_budget",
    "=10 is not supported: reasoning has a budget in chats alone",
  ),
  "effort": (chat(reasoning_effort="huge"), "reasoning_effort", "send one of none, minimal, low"),
  "echo of a chat": (chat(echo=True), "echo", "echo=true is not supported: send the prompt to /v1/completions"),
  "chat's max": (completion(max_completion_tokens=5), "max_completion_tokens", "send max_tokens"),
  "chat's tools": (completion(tools=[TOOL]), "tools", "send messages to /v1/chat/completions"),
  "regex": (completion(guided_regex="("), "guided_regex", "unclosed group"),
  "lookaround": (completion(structured_outputs={"regex": "(?=a)b"}), "structured_outputs.regex", "look-around"),
  "long regex": (completion(guided_regex="a" * 8193), "guided_regex", "8193 bytes, allowed are 1 to 8192"),
  "schema": (chat(guided_json={"type": "objekt"}), "guided_json", "Invalid type: objekt"),
  "schema text": (chat(guided_json="{"), "guided_json", "is not JSON"),
  "grammar": (completion(guided_grammar="what"), "guided_grammar", "is not GBNF either"),
  "bad ebnf": (completion(ebnf="what"), "ebnf", "is not GBNF either"),
  "schema of an object": (
    chat(response_format={"type": "json_object", "schema": {"type": "objekt"}}),
    "response_format.schema",
    "Invalid type: objekt",
  ),
  "adapter": (completion(lora_request={"name": "a"}), "lora_request", "send an adapter's name as model"),
  "no choice": (completion(guided_choice=[]), "guided_choice", "0 strings, allowed are 1 to 1024"),
  "allowed ids": (
    completion(guided_choice=["a"], allowed_token_ids=[7]),
    "allowed_token_ids",
    "together with an output constraint",
  ),
  "template": (chat(chat_template="{{ x }}"), "chat_template", "the model's own"),
  "kwargs": (
    chat(chat_template_kwargs={"messages": 1}),
    "chat_template_kwargs.messages",
    "is not a variable that a request may set",
  ),
  "kwargs object": (
    chat(chat_template_kwargs={"a": {}}),
    "chat_template_kwargs",
    "has an entry that is an object: send a boolean",
  ),
  "tools": (chat(tools=[TOOL]), "tools", "template does not know them"),
  "forced tool": (chat(tool_choice="required"), "tool_choice", "there are no tools"),
  "nameless tool": (chat(tools=[{"type": "function"}]), "tools[0]", "is not a function with a name"),
  "functions": (chat(functions=[]), "functions", "send tools"),
  "audio": (chat(modalities=["audio"]), "modalities", "the model writes text"),
  # Messages.
  "no messages": (("/v1/chat/completions", {}), "messages", "messages is missing"),
  "empty messages": (chat(messages=[]), "messages", "send at least one message"),
  "messages text": (chat(messages="hi"), "messages", "is a string: send a list"),
  "message text": (chat(messages=["hi"]), "messages[0]", "is a string: send an object"),
  "no role": (message(content="a"), "messages[0].role", "is missing: send it as"),
  "role": (message(role="end|><|user", content="a"), "messages[0].role", "send one of system"),
  "no content": (message(role="user"), "messages[0].content", "send a string"),
  "content number": (
    message(role="user", content=3),
    "messages[0].content",
    "is a whole number: send a string or a list",
  ),
  "image": (message(role="user", content=[{"type": "image_url"}]), "messages[0].content[0]", "of type text alone"),
  "part without text": (
    message(role="user", content=[{"type": "text"}]),
    "messages[0].content[0].text",
    "send a string",
  ),
  "part text": (message(role="user", content=["a"]), "messages[0].content[0]", "is a string: send an object"),
  "calls": (
    message(role="assistant", tool_calls=[{"id": "1"}]),
    "messages[0].tool_calls[0].function",
    "is missing: send a function",
  ),
  "refused by template": (message(role="user", content="refuse me"), "chat", "refuses these messages"),
  # The tokenizer.
  "tokenize nothing": (("/tokenize", {}), "messages", "messages is missing"),
  "tokenize number": (("/tokenize", {"prompt": 3}), "prompt", "send a string"),
  "detokenize nothing": (("/detokenize", {}), "tokens", "tokens is missing"),
  "detokenize text": (("/detokenize", {"tokens": ["a"]}), "tokens[0]", "is a string: send a whole number"),
  "detokenize outside": (("/detokenize", {"tokens": [400]}), "tokens", "0 to 399"),
}


@pytest.mark.catalogue("E1", "E2", "E3", "E4", "E5", "E6", "F3")
@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_body(server, http, name):
  (path, body), param, said = BAD_BODIES[name]
  answer = http.post(path, json=body)
  assert answer.status_code == 400, answer.text
  error = answer.json()["error"]
  assert said in error["message"] and len(error["message"]) < 400
  assert (error["type"], error["param"]) == ("invalid_request_error", param)
  assert error["code"] in (None, "context_length_exceeded", "unsupported_parameter")
  assert answer.headers["x-request-id"]
  assert len(server.generations) == 0 and server.engine.num_live == 0


JSON = {"content-type": "application/json"}
FORM = {"content-type": "application/x-www-form-urlencoded"}  # what curl sends with -d
DEEP = b'{"prompt":"a","metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001
# Name: body, headers, status, part of the message.
BAD_BYTES = {
  "empty": (b"", JSON, 400, "the body is empty"),
  "not JSON": (b"{", JSON, 400, "body is not JSON that can be taken: Input data was truncated; send one"),
  "a list": (b"[]", JSON, 400, "got `array`; send one JSON object"),
  "null": (b"null", JSON, 400, "got `null`; send"),
  "two objects": (b"{}{}", JSON, 400, "is not JSON that can be taken: "),
  "is not JSON that can be taken: .*; send one JSON object in UTF-8": (
    b'{"prompt":"\xff"}',
    JSON,
    400,
    "can't decode byte 0xff",
  ),
  "UTF-16": (
    '{"prompt":"a"}'.encode("utf-16"),
    JSON,
    400,
    "is not JSON that can be taken: .*; send one JSON object in UTF-8",
  ),
  "BOM": (b'\xef\xbb\xbf{"prompt":"a"}', JSON, 400, "is not JSON that can be taken: "),
  "NaN": (b'{"prompt":"a","temperature":NaN}', JSON, 400, "invalid character .byte 28.; send .* with finite numbers"),
  "infinity": (
    b'{"prompt":"a","temperature":-Infinity}',
    JSON,
    400,
    "invalid character .byte 29.; send .* with finite numbers",
  ),
  "too large a number": (b'{"prompt":"a","temperature":1e999}', JSON, 400, "Number out of range"),
  "a million digits": (b'{"prompt":"a","n":' + b"1" * 1_000_000 + b"}", JSON, 400, "value out of range"),
  "a key twice": (b'{"prompt":"a","n":1,"n":2}', JSON, 400, "same key twice"),
  "half a surrogate": (b'{"prompt":"\\ud800"}', JSON, 400, "is not JSON that can be taken: "),
  "half a surrogate as key": (b'{"prompt":"a","\\uDFFF":1}', JSON, 400, "surrogate pair"),
  "deep": (DEEP, JSON, 400, "nested too deeply, the limit is 64"),
  "65 levels": (b'{"prompt":"a","metadata":' + b"[" * 65 + b"]" * 65 + b"}", JSON, 400, "nested too deeply"),
  "control character": (b'{"prompt":"a\nb"}', JSON, 400, "invalid character"),
  "no type of a page": (b"{}", {"content-type": "", "origin": "null"}, 415, "Content-Type: application/json"),
  "form of a page": (b"{}", FORM | {"origin": "http://localhost"}, 415, "Content-Type: application/json"),
  "form of a site": (b"{}", FORM | {"sec-fetch-site": "cross-site"}, 415, "Content-Type: application/json"),
  "form": (b"a=b", FORM, 400, "send one JSON object"),
  "text": (b"{}", {"content-type": "text/plain"}, 415, "Content-Type: application/json"),
  "charset": (b"{}", {"content-type": "application/json; charset=latin-1"}, 415, "charset='latin-1'"),
  "gzip": (b"{}", JSON | {"content-encoding": "gzip"}, 415, "content-encoding='gzip'"),
  "5 MiB": (b" " * (5 << 20), JSON, 413, "5242880 bytes, the limit is 4194304"),
  "long text": (json.dumps({"prompt": "a" * ((1 << 20) + 1)}).encode(), JSON, 400, "the limit is 1048576"),
}


@pytest.mark.catalogue("E8", "H1")
@pytest.mark.parametrize("name", BAD_BYTES)
def test_bad_bytes(server, http, name):
  body, headers, status, said = BAD_BYTES[name]
  answer = http.post("/v1/completions", content=body, headers=headers)
  assert answer.status_code == status, answer.text
  error = answer.json()["error"]
  assert re.search(said, error["message"]) and len(error["message"]) < 400
  assert error["type"] == "invalid_request_error"
  assert server.engine.num_live == 0


@pytest.mark.catalogue("E8", "F7")
def test_pairs_of_surrogates_and_nul_are_characters(http):
  answer = http.post("/tokenize", content=b'{"prompt":"\\ud83d\\ude00\\u0000"}', headers=JSON)
  assert answer.status_code == 200
  assert http.post("/detokenize", json={"tokens": answer.json()["tokens"][1:]}).json() == {"prompt": "\U0001f600\0"}


@pytest.mark.catalogue("H1")
def test_a_body_without_an_announced_length_is_cut_off_at_the_limit(http):
  sent = []

  def pieces():
    for _ in range(100):
      sent.append(1)
      yield b" " * 65536

  answer = http.post("/v1/completions", content=pieces(), headers=JSON)
  assert answer.status_code == 413 and "more than 4194304 bytes" in answer.json()["error"]["message"]


@pytest.mark.catalogue("E7")
def test_unknown_fields_are_named_in_a_header(http):
  body = {"prompt": IDS, "max_tokens": 1, "user": "me", "tempreature": 1, "a b": 1, "top_p": None}
  answer = http.post("/v1/completions", json=body)
  assert answer.status_code == 200
  assert answer.headers["x-sluice-ignored-fields"] == "tempreature, and 1 more"
  assert "x-sluice-ignored-fields" not in http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 1}).headers


@pytest.mark.catalogue("E7")
def test_fields_of_other_servers_that_ask_for_nothing_are_taken(http):
  """What clients of vLLM, SGLang and llama.cpp send although it is off."""
  for name, (values, _) in request_fields.CompletionRequest.unsupported.items():
    for value in values:
      answer = http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 1, name: value})
      assert answer.status_code == 200, (name, value, answer.text)
      assert "x-sluice-ignored-fields" not in answer.headers
    refused = http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 1, name: {"a": [7]}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name, refused.text
    assert f"{name} is not supported: " in refused.json()["error"]["message"]


@pytest.mark.catalogue("E7")
def test_reasoning_effort_reaches_templates_that_read_it(tokenizer_dir, tmp_path):
  folder = shutil.copytree(tokenizer_dir, tmp_path / "model")
  source = (folder / "chat_template.jinja").read_text()

  def lengths(template: str) -> list[tuple[int, str | None]]:
    (folder / "chat_template.jinja").write_text(source + template)
    with running(Tokenizer(folder), host=HostOptions(http_port=0)) as server:
      answers = [
        httpx.post(f"{url_of(server)}/tokenize", json={"messages": CHAT} | fields)
        for fields in ({}, {"reasoning_effort": "none"}, {"reasoning_effort": "high"})
      ]
    return [(answer.json()["count"], answer.headers.get("x-sluice-ignored-fields")) for answer in answers]

  (plain, _), *asked_for = lengths("")
  assert asked_for == [(plain, "reasoning_effort")] * 2
  for template in ("{% if reasoning_effort == 'high' %}the{% endif %}", "{% if enable_thinking %}the{% endif %}"):
    assert lengths(template) == [(plain, None), (plain, None), (plain + 1, None)]


# Path: a body that it takes.
ALL_POSTS = {
  "/v1/completions": {"prompt": IDS, "max_tokens": 1},
  "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
  "/tokenize": {"prompt": "a"},
  "/detokenize": {"tokens": IDS},
}


@pytest.mark.catalogue("E3", "E7")
def test_what_the_tokenizer_does_not_take_is_named_in_a_header(http):
  for path, body, ignored in (
    ("/tokenize", {"prompt": "a", "messages": CHAT}, "messages"),
    ("/tokenize", {"prompt": "a", "add_specials": False}, "add_specials"),
    ("/tokenize", {"messages": CHAT, "add_generation_promt": False}, "add_generation_promt"),
    ("/detokenize", {"tokens": IDS, "skip": True, "a b": 1}, "skip, and 1 more"),
  ):
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.headers["x-sluice-ignored-fields"]) == (200, ignored)
  for path, body in ALL_POSTS.items():
    assert "x-sluice-ignored-fields" not in http.post(path, json=body).headers


@pytest.mark.catalogue("E7")
def test_variables_that_the_template_does_not_read_are_named_in_a_header(tokenizer_dir, tmp_path):
  """As in transformers they change nothing; so one that is misspelt is found."""
  folder = shutil.copytree(tokenizer_dir, tmp_path / "model")
  source = (folder / "chat_template.jinja").read_text()
  (folder / "chat_template.jinja").write_text(
    "{% set enable_thinking = enable_thinking | default(true) %}" + source + "{% if enable_thinking %}the{% endif %}"
  )
  cases = (
    (tokenizer_dir, {"enable_thinking": False}, "chat_template_kwargs.enable_thinking"),
    (folder, {"enable_thinking": False}, None),
    (folder, {"enable_thinking": False, "enable_thinkng": False}, "chat_template_kwargs.enable_thinkng"),
  )
  for path, variables, ignored in cases:
    with running(Tokenizer(path), host=HostOptions(http_port=0)) as server:
      prompts = []
      for route in ("/tokenize", "/v1/chat/completions"):
        for more in ({"chat_template_kwargs": variables}, {}):
          body = {"messages": CHAT, **more} | ({} if route == "/tokenize" else {"max_tokens": 1})
          answer = httpx.post(f"{url_of(server)}{route}", json=body)
          assert answer.status_code == 200, answer.text
          assert answer.headers.get("x-sluice-ignored-fields") == (ignored if more else None)
          prompts.append(answer.json().get("count") or answer.json()["usage"]["prompt_tokens"])
      assert prompts[:2] == prompts[2:] and (prompts[0] < prompts[1]) == (path == folder)
  with running(Tokenizer(folder), host=HostOptions(http_port=0, strict_requests=True)) as server:
    answer = httpx.post(
      f"{url_of(server)}/v1/chat/completions", json={"messages": CHAT, "chat_template_kwargs": {"enable_thinkng": 1}}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("chat_template_kwargs.enable_thinkng is not a field that")


@pytest.mark.catalogue("E7")
def test_unknown_fields_are_refused_on_demand(tokenizer):
  message = "is not a field that this server knows: leave it out, or serve with --nostrict_requests to ignore it"
  with running(tokenizer, host=HostOptions(http_port=0, strict_requests=True)) as server:
    for path, body in ALL_POSTS.items():
      assert httpx.post(f"{url_of(server)}{path}", json=body).status_code == 200
      answer = httpx.post(f"{url_of(server)}{path}", json=body | {"tempreature": 1})
      assert (answer.status_code, answer.json()["error"]) == (
        400,
        {
          "message": f"tempreature {message}",
          "type": "invalid_request_error",
          "param": "tempreature",
          "code": "unsupported_parameter",
        },
      )


@pytest.mark.catalogue("C1")
@pytest.mark.parametrize("wait_s, seconds", [(0.1, 1), (1.0, 1), (2.5, 3), (60.0, 60)])
def test_an_overload_names_one_time_everywhere(wait_s, seconds):
  """In the text, in the headers and in gRPC's metadata."""
  error = Overloaded("4 requests are queued, the limit is 4", wait_s)
  said = error_responses.make_error_answer(error)
  assert said.body["error"]["message"] == f"4 requests are queued, the limit is 4; try again in {seconds} s"
  assert said.headers == {"retry-after": str(seconds), "retry-after-ms": str(1000 * seconds)}
  assert dict(grpc_status.make_status_answer(error).metadata)["grpc-retry-pushback-ms"] == str(1000 * seconds)


@pytest.mark.catalogue("H9")
def test_paths_methods_and_hosts(http):
  missing = http.get("/v1/nothing")
  assert missing.status_code == 404
  assert re.search("no such path here; served are .*/v1/chat/completions.*/v1/models/{model}", missing.text)
  wrong = http.get("/v1/completions")
  assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
  foreign = http.get("/v1/models", headers={"host": "evil.example"})
  assert foreign.status_code == 403 and foreign.json()["error"]["code"] == "host_not_allowed"
  assert "--http_allowed_hosts" in foreign.json()["error"]["message"]
  for local in ("LOCALHOST:80", "host.docker.internal:8000", "[::1]"):
    assert http.get("/v1/models", headers={"host": local}).status_code == 200
  assert http.head("/health").status_code == 200
  assert "access-control-allow-origin" not in http.get("/v1/models", headers={"origin": "http://evil.example"}).headers


def test_a_trailing_slash_changes_nothing(http):
  for path in ("/v1/models", "/v1/models/tiny", "/health", "/version", "/metrics"):
    assert http.get(f"{path}/").status_code == 200 == http.get(path).status_code
  assert http.post("/v1/completions/", json={"prompt": "a", "max_tokens": 1}).status_code == 200
  assert http.post("/v1/messages/", json={}).json()["type"] == "error"


@pytest.mark.parametrize("headers", [FORM, {"content-type": ""}], ids=["form", "none"])
def test_json_without_its_content_type_is_json(http, headers):
  answer = http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
  assert answer.status_code == 200, answer.text


def test_keys_hold_with_a_trailing_slash(tokenizer, tmp_path):
  (tmp_path / "keys").write_text("rW5vJ8Jk2nq4uYt1sXzB8mE0\n")
  (tmp_path / "keys").chmod(0o600)
  host = HostOptions(http_port=0, api_key_file=str(tmp_path / "keys"))
  with running(tokenizer, host=host) as server, httpx.Client(base_url=url_of(server)) as http:
    for path in ("/v1/models", "/v1/models/", "/v1/nothing"):
      assert http.get(path).status_code == 401


@pytest.mark.catalogue("H7")
def test_an_id_that_could_not_stand_in_a_log_is_replaced(http):
  assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
  assert http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")


def exchange(server, data: bytes) -> bytes:
  """What a connection answers to these bytes until it is closed."""
  with socket.create_connection(("127.0.0.1", server.host.http_port), timeout=30) as connection:
    connection.sendall(data)
    received = b""
    while piece := connection.recv(65536):
      received += piece
    return received


RAW = {
  "junk": (b"\x16\x03\x01\x02\x00junk\r\n\r\n", 400),
  "no version": (b"GET /health\r\n\r\n", 400),
  "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
  "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
  "bad length": (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
  "two lengths": (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    400,
  ),
  "bad chunk": (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    400,
  ),
  "other coding": (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n",
    501,
  ),
  "long path": (b"GET /v1/" + b"a" * 17_000 + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 431),
  "long query": (b"GET /health?" + b"a" * 17_000 + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 431),
  "endless header": (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (1 << 20), 431),
  "many headers": (
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
    431,
  ),
  "space before colon": (b"GET /health HTTP/1.1\r\nhost : localhost\r\n\r\n", 400),
}


@pytest.mark.catalogue("H2")
@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_request(server, name):
  data, status = RAW[name]
  try:
    answer = exchange(server, data)
  except (ConnectionResetError, BrokenPipeError):
    assert name == "endless header", "a whole request must be answered"
    return
  head, _, body = answer.partition(b"\r\n\r\n")
  assert head.startswith(b"HTTP/1.1 %d" % status), answer[:300]
  assert json.JSONDecoder().raw_decode(body.decode())[0]["error"]["message"]


def test_two_requests_at_once_on_one_connection(server):
  one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
  last = b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
  answer = exchange(server, one + last)
  assert answer.count(b"HTTP/1.1 200") == 2 and answer.index(b"ok") < answer.index(b"true")


def test_the_server_serves_after_all_that(server, http):
  answer = http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 5, "ignore_eos": True})
  assert answer.json()["usage"]["completion_tokens"] == 5


def test_the_limit_of_metadata_is_that_of_headers(tokenizer: Tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0, max_metadata_bytes=40_000)) as served:
    url = f"{url_of(served)}/version"
    assert httpx.get(url, headers={"x-long": "a" * 30_000}).status_code == 200
    assert httpx.get(url, headers={"x-long": "a" * 41_000}).status_code == 431
