"""Custom tools with the real openai client: their input is text, streamed, forced under a grammar, and sent back."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st
import openai
import pytest

from server.http.model_output.call_formats import FORMATS, forced_format
from server.http.model_output.custom_tools import InputReader, describe_custom_tool
from server.http.model_output.output_parser import CallPiece, Calls, OutputParser
from tests.server.http.openai.test_tools import CHAT, HERMES_TEMPLATE, LOOK, serving

WRITE = {"type": "custom", "custom": {"name": "write", "description": "Writes a text."}}
DATE = {
  "type": "custom",
  "custom": {
    "name": "date",
    "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{4}-[0-9]{2}"}},
  },
}
# The grammar of OpenAI's apply_patch.
PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = {
  "type": "custom",
  "custom": {
    "name": "apply_patch",
    "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH_GRAMMAR}},
  },
}
TEXT = 'She said: "caf\u00e9" \\ \n\t\U0001f600'


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
  with serving(tmp_path_factory.mktemp("hermes"), HERMES_TEMPLATE) as served:
    yield served[1]


def complete(client, *, stream: bool = False, text: str | None = None, **fields) -> tuple[str, list[dict], str]:
  """Returns (content, calls, finish reason); `text` is what the model writes."""
  body = {} if text is None else {"structured_outputs": {"choice": [text]}}
  answer = client.chat.completions.create(
    model="tiny", messages=CHAT, stream=stream, extra_body=body, **{"seed": 1} | fields
  )
  if not stream:
    [choice] = answer.choices
    calls = [call.model_dump(exclude_none=True) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason
  content, calls, reason = "", [], None
  for chunk in answer:
    [choice] = chunk.choices
    content += choice.delta.content or ""
    for part in choice.delta.tool_calls or []:
      part = part.model_dump(exclude_none=True)
      if part.pop("index") == len(calls):
        calls.append(part)
      else:
        assert set(part) == {"custom"} and set(part["custom"]) == {"input"}
        calls[-1]["custom"]["input"] += part["custom"]["input"]
    reason = choice.finish_reason
  return content, calls, reason


def called(name: str, text: str) -> str:
  return f'<tool_call>{{"name": "{name}", "arguments": {{"input": {json.dumps(text)}}}}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_the_input_is_text(hermes, stream):
  content, [call], reason = complete(hermes, stream=stream, text="well" + called("write", TEXT), tools=[LOOK, WRITE])
  assert (content, reason, call["type"]) == ("well", "tool_calls", "custom")
  assert call["custom"] == {"name": "write", "input": TEXT} and call["id"].startswith("call_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_of_a_tool_that_is_forced_by_its_name(hermes, stream):
  forced = {"type": "custom", "custom": {"name": "date"}}
  _, [call], reason = complete(hermes, stream=stream, tools=[LOOK, DATE], tool_choice=forced, max_tokens=60)
  assert reason == "tool_calls" and re.fullmatch("[0-9]{4}-[0-9]{2}", call["custom"]["input"])
  _, [same], _ = complete(hermes, stream=stream, tools=[DATE], tool_choice="required", max_tokens=60)
  assert re.fullmatch("[0-9]{4}-[0-9]{2}", same["custom"]["input"])


def test_the_grammar_of_apply_patch_is_followed(hermes):
  forced = {"type": "custom", "custom": {"name": "apply_patch"}}
  _, [call], reason = complete(hermes, tools=[PATCH], tool_choice=forced, max_tokens=120)
  assert call["custom"]["input"].startswith("*** Begin Patch\n*** ")
  _, [cut], reason = complete(hermes, tools=[PATCH], tool_choice=forced, max_tokens=4)
  assert reason == "length" and "*** Begin Patch\n".startswith(cut["custom"]["input"])


def test_a_forced_text_among_several_tools(hermes):
  for seed in range(6):
    _, [call], _ = complete(hermes, tools=[LOOK, WRITE], tool_choice="required", max_tokens=400, seed=seed)
    assert call["type"] in ("function", "custom")
  for forced in ({"type": "custom", "custom": {"name": "write"}}, "required"):
    _, [call], _ = complete(hermes, tools=[WRITE], tool_choice=forced, max_tokens=400)
    assert call["type"] == "custom"


def test_a_grammar_that_nothing_enforces_is_named(hermes):
  answer = hermes.chat.completions.with_raw_response.create(
    model="tiny", messages=CHAT, tools=[LOOK, DATE], max_tokens=3
  )
  assert answer.headers["x-sluice-ignored-fields"] == "tools[1].custom.format"
  with pytest.raises(openai.BadRequestError, match="where one of several tools is forced") as caught:
    complete(hermes, tools=[LOOK, DATE], tool_choice="required")
  assert caught.value.param == "tools[1].custom.format"


def test_what_the_model_reads():
  tool = describe_custom_tool("date", "Says when.", "regex", "[0-9]+")["function"]
  assert tool["description"] == "Says when.\n\nThe input follows this regex grammar:\n[0-9]+"
  assert tool["parameters"]["required"] == ["input"]
  assert "description" not in describe_custom_tool("a", None, "", "")["function"]


def test_an_earlier_call_comes_back(tmp_path):
  template = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}="
    "{{ call.function.arguments.input }}{% endfor %};{% endfor %}"
  )
  call = {"id": "call_1", "type": "custom", "custom": {"name": "write", "input": "the dog"}}
  history = [
    *CHAT,
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
  ]
  with serving(tmp_path, template) as (server, client):
    answer = client.chat.completions.create(model="tiny", messages=history, max_tokens=1)
    tokenizer = server.host._state.require_backend().tokenizer
    wanted = "userthe cat;assistantwrite=the dog;tooldone;"
    assert answer.usage.prompt_tokens == len(tokenizer.encode(wanted, add_special_tokens=False))
    del call["custom"]
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls\[0\].function is missing"):
      client.chat.completions.create(model="tiny", messages=history, max_tokens=1)


@given(st.text(max_size=20), st.lists(st.integers(0, 150), max_size=6), st.booleans())
def test_every_input_however_it_is_split(text, cuts, is_ascii):
  written = json.dumps({"input": text}, ensure_ascii=is_ascii)
  cuts = sorted({0, len(written), *(cut % (len(written) + 1) for cut in cuts)})
  reader, found = InputReader(), ""
  for low, high in zip(cuts, cuts[1:], strict=False):
    found += reader.push(written[low:high], ended=high == len(written))
  assert found == text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize(
  "arguments, wanted",
  [
    ('{"patch": "a"}', '{"patch": "a"}'),
    ("{}", "{}"),
    ('{"input": "ab\\', "ab"),
    ('{"input": "a\\ud83d"}', "a?"),
    ('{"input": "a\\ud83dx"}', "a?x"),
    ('{"input": "a\\ude00"}', "a?"),
    ('{"input": "a\\ud83d\\n"}', "a?\n"),
    ('{"input": "a", "b": "c"}', "a"),
    ('{"inp', '{"inp'),
  ],
)
def test_other_arguments(arguments, wanted):
  for size in (1, 3, 100):
    reader = InputReader()
    parts = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    assert "".join(reader.push(part, ended=False) for part in parts) + reader.push("", ended=True) == wanted


CALLS_OF_FORMATS = {
  "hermes": '<tool_call>{"name": "write", "arguments": {"input": "a \\"b\\"\\n<c>"}}</tool_call>',
  "qwen3_coder": '<tool_call><function=write><parameter=input>a "b"\n<c></parameter></function></tool_call>',
  "llama3": '{"name": "write", "parameters": {"input": "a \\"b\\"\\n<c>"}}',
  "mistral": '[TOOL_CALLS]write[ARGS]{"input": "a \\"b\\"\\n<c>"}',
  "harmony": '<|channel|>commentary to=functions.write<|message|>{"input": "a \\"b\\"\\n<c>"}<|call|>',
  "glm45": '<tool_call>write<arg_key>input</arg_key><arg_value>a "b"\n<c></arg_value></tool_call>',
  "gemma4": '<|tool_call>call:write{input:<|"|>a "b"\n<c><|"|>}<tool_call|>',
}


@pytest.mark.parametrize("name", CALLS_OF_FORMATS)
def test_every_format_carries_an_input(name):
  parameters = describe_custom_tool("write", None, "", "")["function"]["parameters"]
  calls = Calls(FORMATS[name], {"write": parameters}, True, frozenset({"write"}))
  text = CALLS_OF_FORMATS[name]
  for size in (1, 1000):
    parser = OutputParser(calls)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    pieces = [piece for part in parts for piece in parser.push_text(part, ended=False)]
    pieces += parser.push_text("", ended=True)
    assert all(isinstance(piece, CallPiece) and piece.is_custom for piece in pieces), pieces
    assert "".join(piece.arguments for piece in pieces) == 'a "b"\n<c>' and pieces[-1].is_last


def test_a_whole_answer_as_input():
  calls = Calls(forced_format(None), {}, False, whole="write")
  for parts in (["ab", "c"], ["abc"], []):
    parser = OutputParser(calls)
    pieces = [piece for part in parts for piece in parser.push_text(part, ended=False)]
    pieces += parser.push_text("", ended=True)
    assert "".join(piece.arguments for piece in pieces) == "".join(parts)
    assert [piece.name for piece in pieces] == ["write"] + [None] * (len(pieces) - 1) and pieces[-1].is_last
