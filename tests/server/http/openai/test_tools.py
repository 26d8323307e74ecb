"""Calls of tools with the real openai client: found in what a model writes, forced, streamed, and refused."""

from collections.abc import Iterator
import contextlib
import json
import pathlib
import re

import openai
import pytest

from server.lifecycle.host import HostOptions
from server.text.tokenizer import Tokenizer
from tests.server.harness import END, Served, running, tiny_config, write_tokenizer
from tests.server.http.conftest import url_of

HERMES_TEMPLATE = (
  "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %} in <tool_call><|end|>{% endif %}"
  "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
)
CHAT = [{"role": "user", "content": "the cat"}]
LOOK = {
  "type": "function",
  "function": {
    "name": "look",
    "parameters": {
      "type": "object",
      "properties": {"at": {"enum": ["cat", "dog"]}},
      "required": ["at"],
      "additionalProperties": False,
      "x-guidance": {"whitespace_flexible": False},
    },
  },
}
COUNT = {
  "type": "function",
  "function": {
    "name": "count",
    "parameters": {
      "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 9}},
      "type": "object",
      "properties": {"to": {"$ref": "#/$defs/few"}},
      "required": ["to"],
      "additionalProperties": False,
    },
  },
}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [LOOK, COUNT, STOP]


def is_call(call) -> bool:
  arguments = json.loads(call.function.arguments)
  match call.function.name:
    case "look":
      return arguments in ({"at": "cat"}, {"at": "dog"})
    case "count":
      return list(arguments) == ["to"] and 1 <= arguments["to"] <= 9
  return call.function.name == "stop" and arguments == {}


def streamed(stream) -> tuple[str, list[dict], str | None]:
  """What a client puts together from deltas: (content, calls, finish reason)."""
  text, calls, reason = "", [], None
  for chunk in stream:
    for choice in chunk.choices:
      assert reason is None
      text += choice.delta.content or ""
      for part in choice.delta.tool_calls or []:
        if part.index == len(calls):
          calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
          assert part.type == "function"
        calls[part.index]["arguments"] += part.function.arguments or ""
      reason = choice.finish_reason
  return text, calls, reason


@contextlib.contextmanager
def serving(folder: pathlib.Path, template: str, **options) -> Iterator[tuple[Served, openai.OpenAI]]:
  write_tokenizer(folder)
  (folder / "chat_template.jinja").write_text(template)
  config = tiny_config(
    max_model_len=2048, num_blocks=512, block_size=16, token_budgets=(8, 64, 128), eos_token_ids=(END,)
  )
  with (
    running(Tokenizer(folder), host=HostOptions(http_port=0, **options), config=config) as server,
    openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="x", max_retries=0, timeout=60) as client,
  ):
    yield server, client


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
  with serving(tmp_path_factory.mktemp("hermes"), HERMES_TEMPLATE) as served:
    yield served[1]


def wrote(client, text: str, **fields):
  """A chat whose model writes exactly this text: by a choice of one."""
  return client.chat.completions.create(
    model="tiny", messages=CHAT, extra_body={"structured_outputs": {"choice": [text]}}, **{"tools": TOOLS} | fields
  )


TEXT = (
  'well\n<tool_call>\n{"name": "look", "arguments": {"at": "caf\u00e9"}}\n</tool_call>\n'
  '<tool_call>{"name": "stop"}</tool_call>'
)


def test_calls_that_the_model_writes(hermes):
  answer = wrote(hermes, TEXT)
  [choice] = answer.choices
  assert choice.finish_reason == "tool_calls" and choice.message.content == "well\n"
  assert [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
    ("function", "look", '{"at": "caf\u00e9"}'),
    ("function", "stop", "{}"),
  ]
  ids = [call.id for call in choice.message.tool_calls]
  assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
  text, calls, reason = streamed(wrote(hermes, TEXT, stream=True))
  assert (text, reason) == ("well\n", "tool_calls") and len({call["id"] for call in calls} | set(ids)) == 4
  assert [(call["name"], call["arguments"]) for call in calls] == [("look", '{"at": "caf\u00e9"}'), ("stop", "{}")]
  alone = wrote(hermes, TEXT[5:]).choices[0]
  assert alone.message.content is None and len(alone.message.tool_calls) == 2


def test_strict_is_named_where_it_is_not_held(hermes):
  """A forced call conforms to the schema; of one that the model may write, nobody can be sure."""
  tools = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": {"type": "object"}}}]
  for choice, ignored in (("auto", "tools[0].function.strict"), ("required", None), ("none", None)):
    answer = hermes.chat.completions.with_raw_response.create(
      model="tiny", messages=CHAT, tools=tools, tool_choice=choice, max_tokens=3
    )
    assert answer.headers.get("x-sluice-ignored-fields") == ignored, choice


def test_a_field_of_an_allowed_tool_has_its_place_in_the_body(hermes):
  tools = [STOP, LOOK | {"function": LOOK["function"] | {"strict": True}}]
  answer = hermes.chat.completions.with_raw_response.create(
    model="tiny", messages=CHAT, tools=tools, tool_choice=allow("auto", "look"), max_tokens=3
  )
  assert answer.headers["x-sluice-ignored-fields"] == "tools[1].function.strict"


def test_one_call_alone_where_several_are_not_wanted(hermes):
  answer = wrote(hermes, TEXT, parallel_tool_calls=False)
  assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["look"]
  _, calls, reason = streamed(wrote(hermes, TEXT, parallel_tool_calls=False, stream=True))
  assert [call["name"] for call in calls] == ["look"] and reason == "tool_calls"


@pytest.mark.parametrize(
  "text, fields",
  [
    ('<tool_call>{"name": "look", "arguments": ["at"]}</tool_call> the', {}),
    (TEXT, {"tool_choice": "none"}),
    (TEXT, {"tools": openai.omit}),
  ],
  ids=["malformed", "choice none", "no tools"],
)
def test_everything_else_stays_text(hermes, text, fields):
  [choice] = wrote(hermes, text, **fields).choices
  assert choice.message.content == text and choice.message.tool_calls is None and choice.finish_reason == "stop"
  assert streamed(wrote(hermes, text, stream=True, **fields)) == (text, [], "stop")


def test_a_call_of_an_unknown_tool_is_a_call(hermes):
  """The client can answer it with an error, which the model understands."""
  [choice] = wrote(hermes, '<tool_call>{"name": "fly", "arguments": {"to": "the sun"}}</tool_call>').choices
  assert choice.finish_reason == "tool_calls" and choice.message.content is None
  assert [call.function.name for call in choice.message.tool_calls] == ["fly"]


def test_arguments_arrive_while_the_model_writes_them(tmp_path):
  arguments = {"at": "the cat and the dog " * 5, "n": [1, 2, {"a": None}]}
  text = f'<tool_call>{{"name": "look", "arguments": {json.dumps(arguments)}}}</tool_call>'
  with serving(tmp_path, HERMES_TEMPLATE) as (served, client):
    served.runner.seconds = 0.005  # a device so fast that all tokens are there at once would need one chunk
    chunks = [chunk.choices[0].delta for chunk in wrote(client, text, stream=True)]
    with client.chat.completions.stream(
      model="tiny", messages=CHAT, tools=TOOLS, extra_body={"structured_outputs": {"choice": [text]}}
    ) as stream:
      [call] = stream.get_final_completion().choices[0].message.tool_calls
  assert json.loads(call.function.arguments) == arguments
  parts = [part for delta in chunks for part in delta.tool_calls or []]
  assert len(parts) > 4 and parts[0].function.name == "look" and parts[0].id
  assert all(part.index == 0 and part.id is None and part.function.name is None for part in parts[1:])
  assert json.loads("".join(part.function.arguments for part in parts)) == arguments


def test_what_max_tokens_cuts_off(hermes):
  """Before the arguments begin, it is text; later, the call is as long as the model wrote it."""
  for cut in (3, 30, 60):
    [choice] = wrote(hermes, TEXT[5:], max_tokens=cut).choices
    text, calls, reason = streamed(wrote(hermes, TEXT[5:], max_tokens=cut, stream=True))
    assert choice.finish_reason == reason == "length"
    assert (choice.message.content or "") == text
    assert [call.function.arguments for call in choice.message.tool_calls or []] == [
      each["arguments"] for each in calls
    ]
    assert calls or TEXT[5:].startswith(text)


def test_logprobs_and_usage_of_a_call_are_whole(hermes):
  whole = wrote(hermes, TEXT, logprobs=True, seed=1)
  stream = wrote(hermes, TEXT, logprobs=True, seed=1, stream=True, stream_options={"include_usage": True})
  chunks = list(stream)
  entries = [entry for chunk in chunks for choice in chunk.choices for entry in choice.logprobs.content]
  assert len(entries) >= whole.usage.completion_tokens - 1 and chunks[-1].usage.completion_tokens > 0
  assert "".join(entry.token for entry in entries).replace("\ufffd", "")[:20] == TEXT[:20]


@pytest.mark.parametrize("template", ["{{ tools }}[TOOL_CALLS]", '{{ tools }}"parameters"'], ids=["mistral", "llama3"])
def test_other_formats(tmp_path, template):
  with serving(tmp_path, "{% if false %}" + template + "{% endif %}the cat") as (_, client):
    if "TOOL" in template:
      texts = ['[TOOL_CALLS] [{"name": "look", "arguments": {"at": "cat"}}, {"name": "stop", "arguments": {}}]']
    else:
      texts = [
        '{"name": "look", "parameters": {"at": "cat"}}; {"name": "stop", "parameters": {}}',
        '<|python_tag|>{"name": "look", "parameters": {"at": "cat"}};{"name": "stop"}',
      ]
    for text in texts:
      calls = wrote(client, text).choices[0].message.tool_calls
      assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("look", '{"at": "cat"}'),
        ("stop", "{}"),
      ]
      assert re.fullmatch("[a-z0-9]{9}" if "TOOL" in template else "call_[a-z0-9]{24}", calls[0].id)


def test_a_marker_that_is_a_special_token(tmp_path):
  """It is shown to the scanner, though special tokens are left out of texts, and it is not shown to the client."""
  from tests.server import harness

  special = [*harness.SPECIAL, "[TOOL_CALLS]"]
  before, harness.SPECIAL = harness.SPECIAL, special
  try:
    with serving(tmp_path, "{{ tools }}{% if false %}[TOOL_CALLS]{% endif %}the cat") as (_, client):
      grammar = f'start: <[{len(special) - 1}]> " [{{\\"name\\": \\"look\\", \\"arguments\\": {{}}}}]"'
      asked = {
        "model": "tiny", "messages": CHAT, "extra_body": {"structured_outputs": {"grammar": grammar}},
      }  # fmt: skip
      message = client.chat.completions.create(tools=TOOLS, **asked).choices[0].message
      assert message.content is None and message.tool_calls[0].function.name == "look"
      assert client.chat.completions.create(**asked).choices[0].message.content.startswith(' [{"name"')
  finally:
    harness.SPECIAL = before


def test_the_parser_can_be_chosen(tmp_path):
  with serving(tmp_path, HERMES_TEMPLATE, tool_call_parser="none") as (_, client):
    assert wrote(client, TEXT).choices[0].message.content == TEXT
    forced = client.chat.completions.create(model="tiny", messages=CHAT, tools=[LOOK], tool_choice="required", seed=1)
    assert all(map(is_call, forced.choices[0].message.tool_calls))


FORCED = [
  "required",
  *({"type": "function", "function": {"name": name}} for name in ("look", "count", "stop")),
]


@pytest.mark.parametrize("choice", FORCED, ids=["required", "look", "count", "stop"])
def test_forced_calls(hermes, client, choice):
  """Whatever the model is: here, one that draws tokens at random; with a template that knows tools, and without."""
  for each in (hermes, client):
    asked = {
      "model": "tiny", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 400,
      "extra_body": {"top_k": 3},
    }  # fmt: skip
    answer = each.chat.completions.create(**asked, n=8, seed=1, parallel_tool_calls=False)
    ended = [choice for choice in answer.choices if choice.finish_reason == "tool_calls"]
    assert ended
    for one in ended:
      assert one.message.content is None
      [call] = one.message.tool_calls
      assert is_call(call)
      assert choice == "required" or call.function.name == choice["function"]["name"]
    text, calls, reason = streamed(each.chat.completions.create(**asked, seed=2, stream=True))
    assert reason == "length" or (not text and calls and reason == "tool_calls")


@pytest.mark.parametrize("choice", FORCED[:2], ids=["required", "look"])
@pytest.mark.parametrize("parallel", [None, False, True])
def test_a_forced_call_is_one_unless_several_are_requested(client, choice, parallel):
  asked = {"parallel_tool_calls": parallel} if parallel is not None else {}
  answer = client.chat.completions.create(
    model="tiny", messages=CHAT, tools=[LOOK], tool_choice=choice, max_tokens=400, n=8, seed=1, **asked
  )
  counts = [len(choice.message.tool_calls) for choice in answer.choices if choice.finish_reason == "tool_calls"]
  assert counts and (max(counts) > 1) == bool(parallel)


def test_a_forced_call_that_is_cut_off_is_text(hermes):
  [choice] = hermes.chat.completions.create(
    model="tiny", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=5
  ).choices
  assert choice.finish_reason == "length" and choice.message.tool_calls is None
  assert choice.message.content.startswith("[")


def allow(mode: str, *names: str, flat: bool = False) -> dict:
  """The tool_choice that allows a part of the tools, in the form of chats or in that of the Responses API."""
  if flat:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
  tools = [{"type": "function", "function": {"name": name}} for name in names]
  return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("flat", [False, True])
def test_allowed_tools(hermes, flat):
  """The model sees the allowed tools alone, and must call one of them where that is required."""
  answer = hermes.chat.completions.create(
    model="tiny", messages=CHAT, tools=TOOLS, tool_choice=allow("required", "count", "stop", flat=flat), max_tokens=400,
    n=8, seed=1, parallel_tool_calls=False, extra_body={"top_k": 3},
  )  # fmt: skip
  calls = [call for choice in answer.choices for call in choice.message.tool_calls or []]
  ended = [choice.message.tool_calls[0] for choice in answer.choices if choice.finish_reason == "tool_calls"]
  assert ended and all(map(is_call, ended)) and {call.function.name for call in calls} <= {"count", "stop"}
  lengths = [
    hermes.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1, **fields).usage.prompt_tokens
    for fields in ({"tools": TOOLS, "tool_choice": allow("auto", "stop", flat=flat)}, {"tools": [STOP]})
  ]
  assert lengths[0] == lengths[1]


HISTORY_TEMPLATE = (
  "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or [] %}"
  "<tool_call>{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}{% endfor %}"
  "{% endfor %}{{ tools }}<|assistant|>"
)


def test_a_history_with_null_content_or_broken_arguments_is_served(tmp_path):
  """What a model wrote once must not end the conversation. Templates iterate over the arguments' keys."""
  with serving(tmp_path, HISTORY_TEMPLATE) as (_, client):
    for arguments in ('{"at": "the', "[1]", "the cat", "", '{"at": "cat"}'):
      call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
      history = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "nothing"},
        {"role": "assistant", "content": None},
        *CHAT,
      ]
      answer = client.chat.completions.create(model="tiny", messages=history, tools=[LOOK], max_tokens=3)
      assert answer.usage.completion_tokens


BAD = {
  "tool_choice is required, but there are no tools": {"tool_choice": "required"},
  "tool_choice is a tool that is not among tools": {
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "fly"}},
  },
  "tool_choice is not one that exists": {"tools": TOOLS, "tool_choice": "sometimes"},
  r"tools\[0\].custom is not a custom tool with a name": {"tools": [{"type": "custom"}]},
  r"tools\[0\].custom.format.grammar is missing": {
    "tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}],
  },
  r"tool_choice.allowed_tools.tools\[0\] is not among tools": {"tools": TOOLS, "tool_choice": allow("auto", "fly")},
  "tool_choice.mode is not one that exists": {"tools": TOOLS, "tool_choice": allow("any", "look", flat=True)},
  "tool_choice.allowed_tools.tools is empty": {"tools": TOOLS, "tool_choice": allow("auto")},
  "tools has two functions of one name": {"tools": [LOOK, LOOK]},
  "parameters is a list: send an object": {
    "tools": [{"type": "function", "function": {"name": "a", "parameters": []}}],
  },
  "tools has 129 entries": {"tools": [LOOK] * 129},
  "tool_choice is not allowed to force calls beside another constraint": {
    "tools": TOOLS,
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
  },
  "tools is not one that can be followed": {
    "tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/nowhere"}}}],
    "tool_choice": "required",
  },
  "tools.* has [0-9]+ bytes, allowed are 1 to": {
    "tools": [{"type": "function", "function": {"name": "a", "parameters": {"enum": ["x" * 40000]}}}],
    "tool_choice": "required",
  },
  "parallel_tool_calls is a whole number: send a boolean": {"tools": TOOLS, "parallel_tool_calls": 1},
}  # fmt: skip


@pytest.mark.parametrize("said", BAD)
def test_bad_tools(hermes, said):
  with pytest.raises(openai.BadRequestError, match=said) as caught:
    hermes.chat.completions.create(model="tiny", messages=CHAT, **BAD[said])
  assert caught.value.param is None or re.split(r"[\[.]", caught.value.param)[0] in (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
  )


def test_langchain(hermes, server):
  """bind_tools and its streams, where the package is there."""
  langchain = pytest.importorskip("langchain_openai")
  model = langchain.ChatOpenAI(base_url=hermes.base_url, api_key="x", model="tiny", max_tokens=400)
  bound = model.bind_tools([LOOK, STOP], tool_choice="required", parallel_tool_calls=False)
  message = bound.invoke("the cat")
  assert message.tool_calls[0]["name"] in ("look", "stop")
  streamed_message = sum(list(bound.stream("the cat"))[1:], next(iter(bound.stream("the cat"))))
  assert streamed_message.tool_calls
