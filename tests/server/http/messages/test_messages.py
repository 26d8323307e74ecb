"""Anthropic's Messages API with the real anthropic client: whole and streamed messages, tools, counts and errors."""

from collections.abc import Iterator
import contextlib
import json
import pathlib
import re

import anthropic
import httpx
import pytest

from server.http.messages.message_reply import ContentEvents, fold_content
from server.http.model_output.output_parser import CallPiece, OutputPiece, ReasoningPiece, TextPiece
from server.lifecycle.host import HostOptions
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT_TEMPLATE, Served, running, tiny_config, write_tokenizer
from tests.server.http.conftest import url_of

CHAT = [{"role": "user", "content": "the cat"}]
LOOK = {
  "name": "look",
  "description": "Looks at an animal.",
  "input_schema": {
    "type": "object",
    "properties": {"at": {"enum": ["cat", "dog"]}},
    "required": ["at"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
  },
}
STOP = {"name": "stop", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
SHORT = {"model": "tiny", "messages": CHAT, "max_tokens": 16}
# Its const keeps the random model to one text: "the cat sat", with its quotes.
SAT = {"format": {"type": "json_schema", "schema": {"const": "the cat sat"}}}


def connected(served: Served, **options) -> anthropic.Anthropic:
  return anthropic.Anthropic(
    base_url=url_of(served), **{"api_key": "unused", "max_retries": 0, "timeout": 30} | options
  )


@pytest.fixture(scope="module")
def claude(server) -> Iterator[anthropic.Anthropic]:
  with connected(server) as client:
    yield client


def both(client: anthropic.Anthropic, **fields) -> list[anthropic.types.Message]:
  """The message, whole and put together by the client from its events."""
  whole = client.messages.create(**SHORT | fields)
  with client.messages.stream(**SHORT | fields) as stream:
    return [whole, stream.get_final_message()]


def test_a_text_that_ends_by_itself(claude):
  prompt = {"messages": CHAT, "system": "the cat sat on the mat and the dog ran"}
  whole, streamed = both(claude, **prompt, output_config=SAT)
  num_prompt_tokens = claude.messages.count_tokens(model="tiny", **prompt).input_tokens
  assert whole.id.startswith("msg_") and whole.id != streamed.id
  for message in (whole, streamed):
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    [block] = message.content
    assert (block.type, block.text) == ("text", '"the cat sat"')
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt_tokens
    assert usage.cache_creation_input_tokens == 0 and 0 < usage.output_tokens <= 16
  assert whole.usage.output_tokens == streamed.usage.output_tokens
  assert streamed.usage.cache_read_input_tokens > 0, "the prompt's blocks were in the prefix cache"


def test_other_ends(claude):
  for message in both(claude, output_config=SAT, stop_sequences=["dog", "cat"]):
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "cat")
    assert message.content[0].text == '"the '
  for message in both(claude, output_config=SAT, max_tokens=2):
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


def test_the_order_of_events(http):
  answer = http.post("/v1/messages", json=SHORT | {"stream": True, "output_config": SAT})
  assert answer.headers["content-type"].startswith("text/event-stream")
  events = [part.split("\n") for part in answer.text.strip().split("\n\n")]
  names = [name.removeprefix("event: ") for name, _ in events]
  bodies = [json.loads(data.removeprefix("data: ")) for _, data in events]
  assert names == [body["type"] for body in bodies]
  assert names[:2] == ["message_start", "content_block_start"]
  assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
  assert set(names[2:-3]) == {"content_block_delta"}
  assert bodies[0]["message"]["content"] == [] and bodies[0]["message"]["stop_reason"] is None


def test_system_and_sampling_reach_the_engine(claude):
  prompt = claude.messages.count_tokens(model="tiny", messages=CHAT, system="the dog").input_tokens
  assert prompt > claude.messages.count_tokens(model="tiny", messages=CHAT).input_tokens
  blocks = [{"type": "text", "text": "the dog", "cache_control": {"type": "ephemeral"}}]
  extra = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}
  message = claude.messages.create(**SHORT, system=blocks, metadata={"user_id": "1"}, extra_body=extra)
  assert message.usage.input_tokens + message.usage.cache_read_input_tokens == prompt


@pytest.mark.parametrize(
  "choice", [{"type": "any"}, {"type": "tool", "name": "look"}, {"type": "tool", "name": "stop"}]
)
def test_forced_calls(claude, choice):
  """Whatever the model is: here, one that samples tokens at random."""
  asked = {"tools": [LOOK, STOP], "tool_choice": choice | {"disable_parallel_tool_use": True}, "max_tokens": 200}
  for message in both(claude, **asked):
    [block] = message.content
    assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
    assert block.name == choice.get("name", block.name)
    assert block.input in ([{"at": "cat"}, {"at": "dog"}] if block.name == "look" else [{}])


LLAMA = '{% if tools %}{{ tools }} "parameters"{% endif %}' + CHAT_TEMPLATE
THINKS = CHAT_TEMPLATE + "{% if enable_thinking %}<think>{% endif %}"
SPEAKS = (
  "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
  "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
  "{% for call in m.tool_calls %}{{ call.function.name }}={{ call.function.arguments | tojson }}{% endfor %}"
  "]{% endfor %}"
)


@contextlib.contextmanager
def serving(folder: pathlib.Path, template: str, **options) -> Iterator[tuple[Served, anthropic.Anthropic]]:
  write_tokenizer(folder)
  (folder / "chat_template.jinja").write_text(template)
  config = tiny_config(max_model_len=2048, num_blocks=1024)
  with (
    running(Tokenizer(folder), host=HostOptions(http_port=0, **options), config=config) as server,
    connected(server) as client,
  ):
    yield server, client


def test_a_call_that_the_model_makes_by_itself(tmp_path):
  call = {"name": "look", "parameters": {"at": "cat"}}
  wanted = {"format": {"type": "json_schema", "schema": {"const": call}}}
  with serving(tmp_path, LLAMA) as (_, client):
    for message in both(client, tools=[LOOK], output_config=wanted, max_tokens=200):
      [block] = message.content
      assert (block.type, block.name, block.input, message.stop_reason) == (
        "tool_use",
        "look",
        {"at": "cat"},
        "tool_use",
      )
    for message in both(client, tools=[LOOK], tool_choice={"type": "none"}, output_config=wanted, max_tokens=200):
      assert json.loads(message.content[0].text) == call and message.stop_reason == "end_turn"


def test_a_call_of_an_unknown_tool_is_a_call(tmp_path):
  call = {"name": "fly", "parameters": {"at": "cat"}}
  wanted = {"format": {"type": "json_schema", "schema": {"const": call}}}
  with serving(tmp_path, LLAMA) as (_, client):
    for message in both(client, tools=[LOOK], output_config=wanted, max_tokens=200):
      [block] = message.content
      assert (block.type, block.name, message.stop_reason) == ("tool_use", "fly", "tool_use")


def test_a_conversation_with_tools_and_thinking_is_rendered(tmp_path):
  call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "cat"}}
  messages = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": [
      {"type": "thinking", "thinking": "hm", "signature": "x"},
      {"type": "redacted_thinking", "data": "secret"},
      {"type": "text", "text": "I look."},
      call,
      call | {"id": "toolu_2", "input": {}},
    ]},
    {"role": "user", "content": [
      {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sleeps"},
      {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": [{"type": "text", "text": "no"}]},
      {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
    ]},
  ]  # fmt: skip
  rendered = (
    '[system:be brief][user:a\nb\nc][assistant:I look.(hm)look={"at": "cat"}look={}][tool:sleeps][tool:Error: no]'
    "[user:so?]"
  )
  with serving(tmp_path, SPEAKS) as (server, client):
    raw = client.messages.with_raw_response.count_tokens(model="tiny", messages=messages, system="be brief")
    tokenizer = server.host._state.require_backend().tokenizer
    assert raw.parse().input_tokens == len(tokenizer.encode(rendered, add_special_tokens=False))
    assert raw.headers["x-sluice-ignored-fields"] == "messages[2].content[1].data"


def test_thinking_sets_the_templates_variable(tmp_path):
  def count(client, **fields) -> tuple[int, str | None]:
    raw = client.messages.with_raw_response.count_tokens(model="tiny", messages=CHAT, **fields)
    return raw.parse().input_tokens, raw.headers.get("x-sluice-ignored-fields")

  with serving(tmp_path, THINKS) as (_, client):
    off, _ = count(client)
    assert count(client, thinking={"type": "disabled"}) == (off, None)
    on, ignored = count(client, thinking={"type": "adaptive"})
    assert on > off and ignored is None
    budget = {"type": "enabled", "budget_tokens": 1024}
    assert count(client, thinking=budget) == (on, None)
    assert count(client, thinking=budget | {"type": "disabled"}) == (off, "thinking.budget_tokens")
  with serving(tmp_path, CHAT_TEMPLATE) as (_, client):
    assert count(client, thinking=budget)[1] == "thinking"
    assert count(client, output_config={"effort": "low"})[1] == "output_config.effort"


def test_thinking_is_a_block_of_its_own(tmp_path):
  """The prompt opens the reasoning, and the random model does not close it."""
  with serving(tmp_path, THINKS) as (_, client):
    for kind, shown in (("disabled", "text"), ("adaptive", "thinking")):
      for message in both(client, thinking={"type": kind}):
        assert [block.type for block in message.content] == [shown]
    for message in both(client, thinking={"type": "adaptive", "display": "omitted"}):
      assert [(block.type, block.thinking) for block in message.content] == [("thinking", "")]


def test_a_budget_of_thinking_ends_it(tmp_path):
  """The random model does not end it by itself."""
  for name, template in (("a", THINKS), ("b", CHAT_TEMPLATE)):
    (tmp_path / name).mkdir()
    with serving(tmp_path / name, template) as (_, client):
      fields = {"model": "tiny", "messages": CHAT, "max_tokens": 40, "thinking": {"type": "enabled"}}
      fields["thinking"]["budget_tokens"] = 5
      fields["output_config"] = {"format": {"type": "json_schema", "schema": {"const": "yes"}}}
      raw = client.messages.with_raw_response.create(**fields)
      kinds, ignored = [block.type for block in raw.parse().content], raw.headers.get("x-sluice-ignored-fields")
      if name == "a":
        assert (kinds, ignored) == (["thinking", "text"], None)
        for message in both(client, **fields):
          assert message.content[1].text == '"yes"' and message.content[0].thinking
        fields["thinking"]["budget_tokens"] = -1
        with pytest.raises(anthropic.BadRequestError, match="thinking.budget_tokens=-1 is not allowed"):
          client.messages.create(**fields)
      else:
        assert (kinds, ignored) == (["text"], "thinking.budget_tokens, thinking")


def test_a_budget_needs_a_parser(tmp_path):
  with (
    serving(tmp_path, THINKS, reasoning_parser="none") as (_, client),
    pytest.raises(anthropic.BadRequestError, match="thinking.budget_tokens=5 is not supported: the server finds no"),
  ):
    client.messages.create(model="tiny", messages=CHAT, max_tokens=9, thinking={"type": "enabled", "budget_tokens": 5})


PIECES: list[OutputPiece] = [
  ReasoningPiece("I "),
  ReasoningPiece("think"),
  TextPiece("so"),
  CallPiece(0, "call_1", "look", '{"at":', is_last=False),
  CallPiece(0, None, None, ' "cat"}', is_last=True),
  CallPiece(1, "call_2", "stop", "{}", is_last=True),
  TextPiece("done"),
]


@pytest.mark.parametrize("shows_thinking", [True, False])
def test_blocks_of_every_kind(shows_thinking):
  content = ContentEvents(shows_thinking=shows_thinking)
  events = [event for piece in PIECES for event in content.add_piece(piece)] + content.close_block()
  assert fold_content(events) == [
    {"type": "thinking", "thinking": "I think" if shows_thinking else "", "signature": "unsigned"},
    {"type": "text", "text": "so"},
    {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "cat"}},
    {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
    {"type": "text", "text": "done"},
  ]
  assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2, 3, 4]
  starts, stops = ([e for e in events if e["type"] == f"content_block_{kind}"] for kind in ("start", "stop"))
  assert len(starts) == len(stops) and events[-1]["type"] == "content_block_stop"


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
BAD = {
  "max_tokens is missing": {"max_tokens": None},
  "max_tokens=0 is not allowed": {"max_tokens": 0},
  "messages is missing": {"messages": None},
  "messages=[] is empty": {"messages": []},
  "messages[0].role is not one that exists": {"messages": [{"role": "tool", "content": "a"}]},
  "messages[1].role of the last message is assistant": {"messages": [*CHAT, {"role": "assistant", "content": "It"}]},
  "messages[0].content[1] has type 'image'": {"messages": [{"role": "user", "content": [
    {"type": "text", "text": "a"}, IMAGE]}]},
  "messages[0].content[0] has type 'document'": {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
  "messages[0].content[0].content[0] has type 'image'": {"messages": [{"role": "user", "content": [
    {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}]},
  "messages[0].content[0].tool_use_id is missing": {"messages": [{"role": "user", "content": [
    {"type": "tool_result"}]}]},
  "messages[0].content[0].text is missing": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
  "messages[0].content is a whole number": {"messages": [{"role": "user", "content": 3}]},
  "system[0] has type 'image'": {"system": [IMAGE]},
  "tools[0].type='web_search_20250305' is not supported": {"tools": [
    {"type": "web_search_20250305", "name": "web_search"}]},
  "tools[0].input_schema is missing": {"tools": [{"name": "look"}]},
  "tools[0].name is not a tool's name": {"tools": [LOOK | {"name": "look at"}]},
  "tools has two functions of one name": {"tools": [LOOK, LOOK]},
  "tool_choice.type=any forces a call, but there are no tools": {"tool_choice": {"type": "any"}},
  "tool_choice.name is not the name of one of tools": {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "fly"}},
  "tool_choice.type is not one that exists": {"tools": [LOOK], "tool_choice": {"type": "required"}},
  r"tools\[0\].input_schema has [0-9]+ bytes": {"tools": [LOOK | {"input_schema": {"enum": ["x" * 40000]}}],
    "tool_choice": {"type": "any"}},
  "thinking.type is not one that is served": {"thinking": {"type": "between_tools"}},
  "output_config.effort is not one that exists": {"output_config": {"effort": "none"}},
  "output_config.format.schema is not": {"output_config": {"format": {
    "type": "json_schema", "schema": {"$ref": "#/no"}}}},
  "stop_sequences[1] has 0 bytes": {"stop_sequences": ["a", ""]},
  "stop_sequences has 17 strings": {"stop_sequences": ["a"] * 17},
  "temperature=101.0 is not allowed": {"temperature": 101},
  "top_k=-2 is not allowed": {"top_k": -2},
  "mcp_servers is not supported": {"mcp_servers": [{"type": "url", "url": "http://x"}]},
  "container is not supported": {"container": "c"},
  "context_management is not supported": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
  "prompt is too long: [0-9]+ tokens > 511 maximum": {"messages": [{"role": "user", "content": "a b " * 600}]},
  "input length and `max_tokens` exceed context limit: [0-9]+ \\+ 512 > 512": {"max_tokens": 512},
}  # fmt: skip


@pytest.mark.parametrize("said", BAD)
def test_bad_messages(http, said):
  answer = http.post("/v1/messages", json=SHORT | BAD[said])
  assert answer.status_code == 400, answer.text
  body = answer.json()
  assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
  message = body["error"]["message"]
  assert message.startswith(said) or re.match(said, message), message
  assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_unknown_fields_are_named_or_refused(http, tokenizer):
  body = SHORT | {
    "brightness": 1,
    "messages": [{"role": "user", "content": "a", "mood": 1}],
    "tools": [LOOK | {"x": 1}],
  }
  body |= {"tool_choice": {"type": "none"}}
  answer = http.post("/v1/messages", json=body)
  assert answer.status_code == 200
  assert answer.headers["x-sluice-ignored-fields"] == "brightness, messages[0].mood, tools[0].x"
  with running(tokenizer, host=HostOptions(http_port=0, strict_requests=True)) as strict:
    for path in ("", "/count_tokens"):
      refused = httpx.post(f"{url_of(strict)}/v1/messages{path}", json=body)
      assert refused.status_code == 400 and "brightness is not a field" in refused.json()["error"]["message"]


def test_errors_are_the_clients_own_types(claude, http):
  with pytest.raises(anthropic.NotFoundError) as caught:
    claude.messages.create(**SHORT | {"model": "other"})
  assert caught.value.body["error"]["type"] == "not_found_error"
  assert caught.value.request_id.startswith("req-")
  assert http.post("/v1/messages/batches", json={}).json()["error"]["type"] == "not_found_error"
  assert http.get("/v1/messages").json()["type"] == "error"
  assert "type" not in http.post("/v1/messagesx", json={}).json(), "other paths keep OpenAI's form"


def test_keys_and_limits(tokenizer, tmp_path):
  key = "rW5vJ8Jk2nq4uYt1sXzB8mE0"
  (tmp_path / "keys").write_text(f"{key}\n")
  (tmp_path / "keys").chmod(0o600)
  host = HostOptions(http_port=0, api_key_file=str(tmp_path / "keys"), max_request_bytes=2048)
  with running(tokenizer, host=host) as server:
    with connected(server, api_key=key) as client:
      assert client.messages.count_tokens(model="tiny", messages=CHAT).input_tokens > 0
      with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**SHORT | {"system": "x" * 4096})
      assert (caught.value.status_code, caught.value.body["error"]["type"]) == (413, "request_too_large")
    with connected(server, api_key="another") as client, pytest.raises(anthropic.AuthenticationError) as caught:
      client.messages.create(**SHORT)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_server_that_is_not_ready_is_overloaded(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0), serve=False) as server, connected(server) as client:
    with pytest.raises(anthropic.APIStatusError) as caught:
      client.messages.create(**SHORT)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (503, "overloaded_error")


def test_an_error_inside_a_stream(paced):
  schema = {"type": "string", "minLength": 400}
  long = SHORT | {"max_tokens": 300, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
  with (
    connected(paced) as client,
    pytest.raises(anthropic.APIStatusError) as caught,
    client.messages.stream(**long) as stream,
  ):
    for event in stream:
      if event.type == "content_block_delta":
        paced.runner.fail = RuntimeError("a secret")
  assert caught.value.body["error"]["type"] in ("overloaded_error", "api_error")
  assert "secret" not in str(caught.value)
  paced.thread.join(180)
