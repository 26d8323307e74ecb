"""The Responses API with the real openai client: whole, streamed, with tools, continued, stored, cancelled, refused."""

from collections.abc import Iterator
import json

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
import openai
from openai.types.responses import Response
import pydantic
import pytest

from server.lifecycle.host import HostOptions
from server.text.tokenizer import Tokenizer
from tests.server.harness import END, Served, running, tiny_config, write_tokenizer
from tests.server.http.conftest import url_of

TEMPLATE = (
  "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %} in <tool_call><|end|>{% endif %}"
  "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
  "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.at }}{% endfor %}"
  "<|end|>{% endfor %}<|assistant|>"
)
LOOK = {
  "type": "function",
  "name": "look",
  "parameters": {"type": "object", "properties": {"at": {"enum": ["cat", "dog"]}}, "required": ["at"]},
  "strict": False,
}
STOP = {"type": "function", "name": "stop"}
UNIQUE = {
  "type": "function",
  "name": "list",
  "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
  "strict": True,
}
NAMESPACE = {"type": "namespace", "name": "eyes", "description": "Sees.", "tools": [LOOK]}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "cat"}}</tool_call>'
TEXT = f'well\n{CALL}<tool_call>{{"name": "stop"}}</tool_call>'


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
  folder = tmp_path_factory.mktemp("hermes")
  write_tokenizer(folder)
  (folder / "chat_template.jinja").write_text(TEMPLATE)
  config = tiny_config(
    max_model_len=2048, num_blocks=512, block_size=16, token_budgets=(8, 64, 128), eos_token_ids=(END,)
  )
  with running(Tokenizer(folder), host=HostOptions(http_port=0, max_stored_responses=16), config=config) as server:
    yield server


@pytest.fixture(scope="module")
def hermes(served) -> Iterator[openai.OpenAI]:
  with openai.OpenAI(base_url=f"{url_of(served)}/v1", api_key="x", max_retries=0, timeout=60) as client:
    yield client


def ask(client: openai.OpenAI, **fields):
  body = {"model": "tiny", "input": "the cat", "max_output_tokens": 8, "extra_body": {"seed": 1}}
  return client.responses.create(**body | fields)


def wrote(client: openai.OpenAI, text: str, **fields):
  """A response whose model writes exactly this text: by a choice of one."""
  fields = {"tools": [LOOK, STOP], "max_output_tokens": None} | fields
  body = {"model": "tiny", "input": "the cat", "extra_body": {"structured_outputs": {"choice": [text]}}}
  return client.responses.create(**body | fields)


def said(items) -> list:
  """Items without what is new in each response."""
  shown = []
  for item in items:
    item = item.model_dump(exclude_none=True)
    shown.append({name: value for name, value in item.items() if name not in ("id", "call_id")})
  return shown


def check_events(events) -> Response:
  """Checks that events are numbered and consistent; returns the last one's response."""
  assert [event.sequence_number for event in events] == list(range(len(events)))
  assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
  assert events[0].response.status == "in_progress" and events[0].response.output == []
  added, items, texts, arguments, logprobs = [], [], {}, {}, {}
  for event in events[2:-1]:
    place = event.output_index
    match event.type:
      case "response.output_item.added":
        assert place == len(added) == len(items)
        added.append(event.item.id)
      case "response.output_text.delta":
        texts[place] = texts.get(place, "") + event.delta
        logprobs[place] = logprobs.get(place, []) + [entry.token for entry in event.logprobs]
      case "response.reasoning_text.delta":
        texts[place] = texts.get(place, "") + event.delta
      case "response.reasoning_text.done":
        assert event.text == texts[place]
      case "response.output_text.done":
        assert event.text == texts.get(place, "")
        assert [entry.token for entry in event.logprobs] == logprobs.get(place, [])
      case "response.function_call_arguments.delta":
        arguments[place] = arguments.get(place, "") + event.delta
      case "response.function_call_arguments.done":
        assert event.arguments == arguments[place]
      case "response.custom_tool_call_input.delta":
        arguments[place] = arguments.get(place, "") + event.delta
      case "response.custom_tool_call_input.done":
        assert event.input == arguments[place]
      case "response.output_item.done":
        items.append(event.item)
      case other:
        assert other in ("response.content_part.added", "response.content_part.done")
    if hasattr(event, "item_id"):
      assert event.item_id == added[place]
  assert events[-1].response.output == items
  return events[-1].response


def test_a_response_has_every_field_that_the_client_requires(hermes):
  raw = hermes.responses.with_raw_response.create(
    model="tiny",
    input="the cat",
    instructions="be brief",
    max_output_tokens=4,
    metadata={"a": "b"},
    temperature=0.5,
    user="u",
    tools=[LOOK],
    reasoning={"effort": "low"},
  )
  response = Response.model_validate_json(raw.text, strict=True)
  assert response.id.startswith("resp_") and response.status in ("completed", "incomplete") and response.error is None
  assert (response.instructions, response.metadata, response.temperature) == ("be brief", {"a": "b"}, 0.5)
  assert (response.max_output_tokens, response.user, response.tool_choice) == (4, "u", "auto")
  assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
  assert response.tools[0].name == "look" and response.text.format.type == "text"
  assert raw.headers["x-sluice-ignored-fields"] == "reasoning.effort"


def test_the_stream_says_what_the_whole_says(hermes):
  for fields in ({}, {"max_output_tokens": 3}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}):
    whole = ask(hermes, **fields)
    events = list(ask(hermes, stream=True, **fields))
    last = check_events(events)
    assert said(last.output) == said(whole.output) and last.status == whole.status
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert events[-1].type == f"response.{whole.status}"
    [message] = whole.output
    if fields.get("max_output_tokens") == 3:
      assert whole.incomplete_details.reason == "max_output_tokens" and message.status == "incomplete"
    if "include" in fields:
      entries = message.content[0].logprobs
      assert len(entries) >= 3 and all(len(entry.top_logprobs) == 2 for entry in entries)


def test_the_clients_own_stream_and_events_with_names(hermes, served):
  with hermes.responses.stream(model="tiny", input="the cat", max_output_tokens=6, extra_body={"seed": 1}) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text
  with httpx.Client(base_url=url_of(served)) as http:
    lines = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 2, "stream": True}).text.split("\n\n")
  for event in filter(None, lines):
    name, data = event.split("\n")
    assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


class Person(pydantic.BaseModel):
  name: str
  age: int


def test_structured_output(hermes):
  parsed = hermes.responses.parse(model="tiny", input="who?", text_format=Person, temperature=0, max_output_tokens=400)
  assert parsed.status == "incomplete" or isinstance(parsed.output_parsed, Person)
  schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
  text = {
    "format": {"type": "json_schema", "name": "x", "schema": schema | {"x-guidance": {"whitespace_flexible": False}}}
  }
  assert json.loads(ask(hermes, text=text, max_output_tokens=None).output_text) == {"a": 1}
  assert ask(hermes, text={"format": {"type": "json_object"}}, max_output_tokens=4).output_text.lstrip()[:1] in (
    "{",
    "",
  )


def test_tools_there_and_back(hermes):
  for parallel in (True, False):
    whole = wrote(hermes, TEXT, parallel_tool_calls=parallel)
    assert [item.type for item in whole.output] == ["message", *["function_call"] * (1 + parallel)]
    assert (
      whole.output_text == "well\n" and whole.output[1].arguments == '{"at": "cat"}' and whole.status == "completed"
    )
    last = check_events(list(wrote(hermes, TEXT, parallel_tool_calls=parallel, stream=True)))
    assert said(last.output) == said(whole.output)
  call = whole.output[1]
  result = {"type": "function_call_output", "call_id": call.call_id, "output": "sleeps"}
  items = [{"role": "user", "content": "the cat"}, *(item.model_dump() for item in whole.output), result]
  by_items = ask(hermes, input=items, tools=[LOOK, STOP])
  by_id = ask(hermes, input=[result], previous_response_id=whole.id, tools=[LOOK, STOP])
  by_reference = ask(
    hermes,
    input=[items[0], *({"type": "item_reference", "id": item.id} for item in whole.output), result],
    tools=[LOOK, STOP],
  )
  assert by_items.usage.input_tokens == by_id.usage.input_tokens == by_reference.usage.input_tokens
  assert said(by_items.output) == said(by_id.output) == said(by_reference.output)


@pytest.mark.parametrize(
  "choice, names",
  [
    ("required", {"look", "stop"}),
    ({"type": "function", "name": "look"}, {"look"}),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}, {"stop"}),
  ],
  ids=["required", "function", "allowed"],
)
def test_forced_calls(hermes, choice, names):
  response = ask(
    hermes, tools=[LOOK, STOP], tool_choice=choice, max_output_tokens=400, parallel_tool_calls=False, temperature=0
  )
  assert response.status == "incomplete" or {item.name for item in response.output} <= names
  assert response.model_dump(exclude_none=True)["tool_choice"] == choice


THINK_TEMPLATE = (
  "{% for message in messages %}<|{{ message.role }}|>"
  "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
  "{{ message.content }}<|end|>{% endfor %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}"
)
THOUGHT = "<think>\nthe dog\n</think>\n\nthe cat"


def test_reasoning_there_and_back(tmp_path):
  write_tokenizer(tmp_path)
  (tmp_path / "chat_template.jinja").write_text(THINK_TEMPLATE)
  config = tiny_config(max_model_len=512, token_budgets=(8, 64, 128), eos_token_ids=(END,))
  with (
    running(Tokenizer(tmp_path), host=HostOptions(http_port=0), config=config) as server,
    openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="x", max_retries=0, timeout=60) as client,
  ):
    whole = wrote(client, THOUGHT, tools=[])
    last = check_events(list(wrote(client, THOUGHT, tools=[], stream=True)))
    assert said(last.output) == said(whole.output) and last.usage == whole.usage
    thought, message = whole.output
    assert thought.type == "reasoning" and thought.content[0].text == "the dog\n" and thought.summary == []
    assert message.content[0].text == whole.output_text == "the cat"
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    question, more = {"role": "user", "content": "the cat"}, {"role": "user", "content": "and?"}
    by_id = ask(client, input="and?", previous_response_id=whole.id)
    by_items = ask(client, input=[question, thought.model_dump(), message.model_dump(), more])
    without = ask(client, input=[question, message.model_dump(), more])
    assert by_id.usage.input_tokens == by_items.usage.input_tokens > without.usage.input_tokens
    opened = {"chat_template_kwargs": {"enable_thinking": True}, "structured_outputs": {"choice": ["yes"]}}
    budgeted = ask(client, input="the cat", extra_body=opened | {"reasoning": {"max_tokens": 5}}, max_output_tokens=60)
    assert budgeted.output[0].content[0].text and budgeted.output_text == "yes"
    with pytest.raises(openai.BadRequestError, match="reasoning.max_tokens=-2 is not allowed"):
      ask(client, input="the cat", extra_body={"reasoning": {"max_tokens": -2}})
    with pytest.raises(
      openai.BadRequestError, match="thinking_token_budget=5 is not supported: send reasoning.max_tok"
    ):
      ask(client, input="the cat", extra_body={"thinking_token_budget": 5})


def test_a_call_of_an_unknown_tool_and_broken_arguments_come_back(hermes):
  [call] = wrote(hermes, CALL.replace("look", "fly")).output
  assert (call.type, call.name, call.arguments) == ("function_call", "fly", '{"at": "cat"}')
  question = {"role": "user", "content": "the cat"}
  for arguments in ('{"at": "the', "[1]", "the cat", ""):
    item = call.model_dump() | {"arguments": arguments}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "there is no such tool"}
    assert ask(hermes, input=[question, item, output]).usage.output_tokens


PATCH = {
  "type": "custom",
  "name": "apply_patch",
  "description": "Edits files.",
  "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" LF "\\"x" LF\nLF: /\\n/'},
}
PATCHED = '*** Begin\n"x\n'


def test_a_custom_tool_there_and_back(hermes):
  call = f'<tool_call>{{"name": "apply_patch", "arguments": {{"input": {json.dumps(PATCHED)}}}}}</tool_call>'
  raw = hermes.responses.with_raw_response.create(
    model="tiny", input="the cat", tools=[LOOK, PATCH], extra_body={"structured_outputs": {"choice": [call]}}
  )
  assert raw.headers["x-sluice-ignored-fields"] == "tools[1].format"
  [item] = raw.parse().output
  assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCHED)
  assert item.id.startswith("ctc_") and item.call_id.startswith("call_")
  last = check_events(list(wrote(hermes, call, tools=[LOOK, PATCH], stream=True)))
  assert said(last.output) == said([item])
  done = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
  by_id = ask(hermes, input=[done], previous_response_id=raw.parse().id, tools=[PATCH])
  question = {"role": "user", "content": "the cat"}
  by_items = ask(hermes, input=[question, item.model_dump(), done], tools=[PATCH])
  assert by_id.usage.input_tokens == by_items.usage.input_tokens


def test_a_forced_custom_tool_follows_its_grammar(hermes):
  forced = {"tools": [LOOK, PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}, "max_output_tokens": 60}
  [item] = ask(hermes, **forced).output
  assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCHED)
  assert said(check_events(list(ask(hermes, stream=True, **forced))).output) == said([item])
  with pytest.raises(openai.BadRequestError, match=r"tools\[1\].format is not supported where one") as caught:
    ask(hermes, **forced | {"tool_choice": "required"})
  assert caught.value.param == "tools[1].format"
  broken = PATCH | {"format": PATCH["format"] | {"definition": "start: FOO"}}
  with pytest.raises(openai.BadRequestError, match="is not one that can be followed") as caught:
    ask(hermes, **forced | {"tools": [LOOK, broken]})
  assert caught.value.param == "tools[1].format.definition"


def test_functions_in_a_namespace(hermes):
  text = CALL.replace("look", "eyes__look")
  [call] = wrote(hermes, text, tools=[NAMESPACE, LOOK]).output
  assert (call.name, call.namespace) == ("look", "eyes")
  last = check_events(list(wrote(hermes, text, tools=[NAMESPACE, LOOK], stream=True)))
  assert (last.output[0].name, last.output[0].namespace) == ("look", "eyes")
  [plain] = wrote(hermes, CALL, tools=[NAMESPACE, LOOK]).output
  assert (plain.name, plain.namespace) == ("look", None)
  result = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "it"}]}
  assert ask(hermes, input=[call.model_dump(exclude_none=True), result], tools=[NAMESPACE]).status


def test_what_the_model_reads(served, hermes):
  """Counts by the prompt's tokens, which the template makes of a chat."""
  with httpx.Client(base_url=url_of(served)) as http:

    def count(**fields) -> int:
      return hermes.responses.input_tokens.count(model="tiny", **fields).input_tokens

    def count_chat(*turns: tuple[str, str]) -> int:
      messages = [{"role": role, "content": content} for role, content in turns]
      return http.post("/tokenize", json={"messages": messages}).json()["count"]

    system = {"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]}
    user = {"type": "message", "role": "user", "content": "hi"}
    assert count(input="hi") == count(input=[user]) == count_chat(("user", "hi"))
    assert count(input=[system, user], instructions="be brief") == count_chat(
      ("system", "be brief\n\nbe kind"), ("user", "hi")
    )
    assert count(input=[user, system]) == count_chat(("user", "hi"), ("system", "be kind"))
    parts = [{"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "b"}]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    turn = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": parts}
    assert count(input=[user, thought, turn, user]) == count_chat(("user", "hi"), ("assistant", "a\nb"), ("user", "hi"))


def test_continued_stored_listed_and_deleted(hermes):
  first = ask(hermes, instructions="be brief")
  second = ask(hermes, input="and?", previous_response_id=first.id)
  listed = list(hermes.responses.input_items.list(second.id, order="asc", limit=2))
  assert [item.role for item in listed] == ["user", "assistant", "user"] and listed[1].id == first.output[0].id
  assert [item.id for item in hermes.responses.input_items.list(second.id)] == [item.id for item in listed][::-1]
  own = [{"role": "user", "content": "the cat"}, first.output[0].model_dump(), {"role": "user", "content": "and?"}]
  assert hermes.responses.input_tokens.count(model="tiny", input=own).input_tokens == second.usage.input_tokens
  assert hermes.responses.retrieve(first.id) == first
  hermes.responses.delete(first.id)
  for call in (hermes.responses.retrieve, hermes.responses.delete, hermes.responses.cancel):
    with pytest.raises(openai.NotFoundError):
      call(first.id)
  with pytest.raises(openai.BadRequestError) as caught:
    ask(hermes, previous_response_id=first.id)
  assert caught.value.param == "previous_response_id"
  assert ask(hermes, previous_response_id=second.id).status  # it has the items of the deleted one
  with pytest.raises(openai.BadRequestError, match="has ended"):
    hermes.responses.cancel(second.id)
  streamed = list(ask(hermes, stream=True))[-1].response
  assert hermes.responses.retrieve(streamed.id).output == streamed.output
  for _ in range(16):
    ask(hermes, max_output_tokens=1)
  with pytest.raises(openai.NotFoundError):
    hermes.responses.retrieve(streamed.id)


def test_what_is_not_stored(hermes):
  response = ask(hermes, store=False)
  assert response.store is False
  with pytest.raises(openai.NotFoundError):
    hermes.responses.retrieve(response.id)


def test_a_server_without_a_store(tokenizer):
  with (
    running(tokenizer, host=HostOptions(http_port=0, max_stored_responses=0)) as server,
    openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="x", max_retries=0) as client,
  ):
    response = client.responses.create(model="tiny", input="a", max_output_tokens=2)
    assert response.store is False
    with pytest.raises(openai.NotFoundError, match="max_stored_responses"):
      client.responses.retrieve(response.id)
    for fields in ({"store": True}, {"previous_response_id": response.id}):
      with pytest.raises(openai.BadRequestError, match="max_stored_responses"):
        client.responses.create(model="tiny", input="a", **fields)


def test_a_tenants_responses_are_its_own(tokenizer, tmp_path):
  keys = {"ann": "rW5vJ8Jk2nq4uYt1sXzB8mE0", "bob": "aB5vJ8Jk2nq4uYt1sXzB8mE1"}
  (tmp_path / "keys").write_text("".join(f"{key} {tenant}\n" for tenant, key in keys.items()))
  (tmp_path / "keys").chmod(0o600)
  with running(tokenizer, host=HostOptions(http_port=0, api_key_file=str(tmp_path / "keys"))) as server:
    ann, bob = (openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key=key, max_retries=0) for key in keys.values())
    response = ask(ann)
    assert ann.responses.retrieve(response.id) == response
    for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
      errors = []
      for response_id in (response.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError) as caught:
          call(response_id)
        errors.append(caught.value.body)
      assert errors[0] == errors[1]
    for fields in (
      {"previous_response_id": response.id},
      {"input": [{"type": "item_reference", "id": response.output[0].id}]},
    ):
      with pytest.raises(openai.BadRequestError):
        ask(bob, **fields)
    assert ask(ann, input=[{"id": response.output[0].id}]).status
    ann.close()
    bob.close()


def test_a_running_response_can_be_read_and_cancelled(paced):
  with openai.OpenAI(base_url=f"{url_of(paced)}/v1", api_key="x", max_retries=0, timeout=60) as client:
    stream = client.responses.create(
      model="tiny", input="a", stream=True, max_output_tokens=400, extra_body={"ignore_eos": True}
    )
    events = [next(stream), next(stream)]
    response_id = events[0].response.id
    assert client.responses.retrieve(response_id).status == "in_progress"
    assert client.responses.cancel(response_id).status == "cancelled"
    events += stream
    assert events[-1].type == "response.failed" and events[-1].response.status == "cancelled"
    assert client.responses.retrieve(response_id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has ended"):
      client.responses.cancel(response_id)
  assert len(paced.generations) == 0


def test_an_error_in_a_stream_is_its_last_event(paced):
  with openai.OpenAI(base_url=f"{url_of(paced)}/v1", api_key="x", max_retries=0, timeout=60) as client:
    stream = client.responses.create(
      model="tiny", input="a", stream=True, max_output_tokens=400, extra_body={"ignore_eos": True}
    )
    response_id = next(stream).response.id
    assert response_id
    stream.close()


BAD = [
  ({"input": 3}, "input"),
  ({"input": []}, "input"),
  ({"input": None}, "input"),
  ({"input": [3]}, "input[0]"),
  ({"input": [{"role": "user"}]}, "input[0].content"),
  ({"input": [{"content": "a"}]}, "input[0].role"),
  ({"input": [{"role": "narrator", "content": "a"}]}, "input[0].role"),
  ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
  ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
  ({"input": [{"role": "user", "content": "a"}, {"type": "computer_call"}]}, "input[1].type"),
  ({"input": [{"type": "function_call", "name": "look", "arguments": "{}"}]}, "input[0].call_id"),
  ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]}, "input[0].call_id"),
  ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
  ({"instructions": 3}, "instructions"),
  ({"model": "other"}, None),
  ({"max_output_tokens": 0}, "max_output_tokens"),
  ({"max_output_tokens": 10**6}, "input"),
  ({"max_output_tokens": "3"}, "max_output_tokens"),
  ({"temperature": -1}, "temperature"),
  ({"top_logprobs": 3}, "top_logprobs"),
  ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
  ({"include": ["thoughts"]}, "include[0]"),
  ({"include": ["message.output_text.logprobs"], "tools": [LOOK]}, "include"),
  ({"tools": [{"type": "web_search"}]}, "tools[0]"),
  ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
  ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format.grammar"),
  (
    {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "abnf", "definition": "a"}}]},
    "tools[0].format.syntax",
  ),
  ({"tools": [LOOK, {"type": "function", "name": "a b"}]}, "tools[1]"),
  (
    {"tools": [{"type": "web_search", "external_web_access": False}, {"type": "function", "name": ""}, LOOK]},
    "tools[1]",
  ),
  ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0]"),
  ({"tools": [LOOK, LOOK]}, "tools"),
  ({"tools": [STOP, UNIQUE], "tool_choice": "required"}, "tools[1].parameters.uniqueItems"),
  ({"tools": [LOOK], "tool_choice": "maybe"}, "tool_choice"),
  ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice.name"),
  ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice"),
  ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice"),
  (
    {"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}},
    "tool_choice.tools[0]",
  ),
  ({"tool_choice": "required"}, "tool_choice"),
  ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
  ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
  ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "text.format.schema"),
  ({"text": {"verbosity": "low"}}, "text.verbosity"),
  ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
  ({"metadata": {"a" * 65: "b"}}, "metadata"),
  ({"metadata": {str(number): "b" for number in range(17)}}, "metadata"),
  ({"store": "yes"}, "store"),
  ({"background": True}, "background"),
  ({"truncation": "auto"}, "truncation"),
  ({"conversation": "conv_1"}, "conversation"),
  ({"prompt": {"id": "pmpt_1"}}, "prompt"),
  ({"previous_response_id": "resp_1"}, "previous_response_id"),
  ({"messages": []}, "messages"),
  ({"max_tokens": 3}, "max_tokens"),
  ({"n": 2}, "n"),
  ({"response_format": {"type": "json_object"}}, "response_format"),
  ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
  ({"input": "a" * 6000}, "input"),
  ({"input": [{"role": "user", "content": "a"}] * 1025}, "input"),
]


@pytest.mark.parametrize("fields, param", BAD, ids=lambda value: value if isinstance(value, str) else None)
def test_bad_fields_are_named(served, fields, param):
  body = {"model": "tiny", "input": "a"} | fields
  with httpx.Client(base_url=url_of(served)) as http:
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
      answer = http.post(path, json=body)
      if path.endswith("tokens") and answer.status_code == 200:
        continue  # a field of the output
      error = answer.json()["error"]
      assert answer.status_code == (404 if "model" in fields else 400), answer.text
      assert param is None or error["param"] == param, error
      assert error["message"]
  assert len(served.generations) == 0


def test_ignored_fields_are_named_or_refused(tokenizer, served):
  body = {
    "input": [{"role": "user", "content": "a"}, {"type": "reasoning", "id": "rs_1", "encrypted_content": "x"}],
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "tools": [{"type": "web_search", "external_web_access": False}, {**LOOK, "strict": True}],
    "client_metadata": {"a": "b"},
    "service_tier": "flex",
    "novel": 1,
    "max_output_tokens": 2,
  }
  with httpx.Client(base_url=url_of(served)) as http:
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    assert set(answer.headers["x-sluice-ignored-fields"].split(", ")) == {
      "novel", "include[0]", "input[1]", "reasoning.summary", "tools[0]", "tools[1].strict",
    }  # fmt: skip
  with (
    running(tokenizer, host=HostOptions(http_port=0, strict_requests=True)) as strict,
    httpx.Client(base_url=url_of(strict)) as http,
  ):
    answer = http.post("/v1/responses", json={"input": "a", "reasoning": {"summary": "auto"}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning.summary"


@pytest.mark.parametrize(
  "query, param",
  [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_bad_queries_of_lists(hermes, served, query, param):
  response = ask(hermes, max_output_tokens=1)
  with httpx.Client(base_url=url_of(served)) as http:
    answer = http.get(f"/v1/responses/{response.id}/input_items?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert http.get(f"/v1/responses/{response.id}?stream=true").json()["error"]["param"] == "stream"
    assert http.get("/v1/responses").status_code == 405 and http.get("/v1/responses/a/b").status_code == 404


VALUES = st.one_of(
  st.none(), st.booleans(), st.integers(-2, 3), st.text(max_size=4), st.lists(st.integers(), max_size=2), st.just({})
)
PARTS = st.lists(
  st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "reasoning_text", "input_file"])},
    optional={"text": st.one_of(st.text(max_size=4), VALUES), "refusal": st.text(max_size=4)},
  ),
  max_size=2,
)
TEXTS = st.one_of(st.text(max_size=4), PARTS, VALUES)
ITEMS = st.fixed_dictionaries(
  {},
  optional={
    "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference", "x"]),
    "id": st.sampled_from(["msg_1", "", 3]),
    "role": st.sampled_from(["user", "assistant", "developer", "tool", 3]),
    "content": TEXTS,
    "call_id": st.sampled_from(["1", "2", None]),
    "name": st.sampled_from(["look", "stop", ""]),
    "namespace": st.sampled_from(["eyes", "", None]),
    "arguments": st.sampled_from(["{}", "{", "[]", ""]),
    "output": TEXTS,
    "summary": VALUES,
  },
)
TOOLS = st.one_of(
  st.sampled_from([LOOK, STOP, NAMESPACE, {"type": "web_search", "external_web_access": False}]),
  st.fixed_dictionaries({"type": st.sampled_from(["function", "namespace", "mcp"])}, optional={"tools": VALUES}),
)


@settings(max_examples=60, deadline=None)
@given(
  st.fixed_dictionaries(
    {"input": st.lists(ITEMS, max_size=4)},
    optional={
      "tools": st.lists(TOOLS, max_size=3),
      "tool_choice": st.one_of(st.just("none"), VALUES, st.fixed_dictionaries({"type": st.just("allowed_tools")})),
      "text": st.one_of(VALUES, st.fixed_dictionaries({"format": VALUES})),
      "reasoning": st.one_of(VALUES, st.fixed_dictionaries({"effort": VALUES, "summary": VALUES})),
      "include": st.lists(VALUES, max_size=2),
      "stream": st.booleans(),
    },
  )
)
def test_any_items_are_served_or_refused(served, body):
  with httpx.Client(base_url=url_of(served)) as http:
    answer = http.post("/v1/responses", json={"max_output_tokens": 2} | body)
  assert answer.status_code in (200, 400), answer.text
  if answer.status_code == 400:
    assert answer.json()["error"]["message"]
  elif body.get("stream"):
    assert "response.completed" in answer.text or "response.incomplete" in answer.text
  assert len(served.generations) == 0
