"""Calls in a model's text: each format, every way to split it, and what is no call comes out as it was."""

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from server.http.model_output.call_formats import FORMATS, PARSERS, find_format, forced_format
from server.http.model_output.output_parser import CallPiece, Calls, OutputParser, ReasoningPiece, TextPiece
from server.text.constraint_compiler import WHITESPACE

TOOLS = {
  "look": {"type": "object", "properties": {"at": {"type": "string"}, "near": {"$ref": "#/$defs/near"}},
           "$defs": {"near": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
  "add_2": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
}  # fmt: skip
LOOK = ("look", '{"at": "the cat"}')
ADD = ("add_2", '{"a": 1, "b": [2.5, null]}')
NOW = ("now", "{}")
ALL = {**FORMATS, "forced": forced_format(FORMATS["llama3"])}


def pieces_of(form, *chunks: str, parallel: bool = True) -> list[object]:
  """What comes out of pushes: texts merged, calls as (name, arguments)."""
  parser = OutputParser(Calls(form, TOOLS, parallel), None)
  out: list[object] = []
  pieces = [piece for chunk in chunks for piece in parser.push_text(chunk, ended=False)]
  pieces += parser.push_text("", ended=True)
  current: CallPiece | None = None
  for piece in pieces:
    match piece:
      case TextPiece(text):
        assert text
        out[-1:] = [out[-1] + text] if out and isinstance(out[-1], str) else [*out[-1:], text]
      case CallPiece():
        assert (piece.name is not None) == (piece.call_id is not None) == (current is None)
        if piece.name is not None:
          out.append((piece.name, ""))
        name, arguments = out[-1]
        out[-1] = (name, arguments + piece.arguments)
        current = None if piece.is_last else piece
        assert piece.index == sum(isinstance(each, tuple) for each in out) - 1
      case ReasoningPiece():
        raise AssertionError("there is no reasoning here")
  assert current is None, "every call ends"
  return out


def said(call, key: str = "arguments") -> str:
  return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


def tagged(call) -> str:
  return f"<tool_call>\n{said(call)}\n</tool_call>"


FUNCTION = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
PLAIN = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DSML = '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>\n'
QWEN = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
QWEN_ADD = QWEN.format("add_2", "<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2.5, null]\n</parameter>\n")
GLM_LOOK = "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the cat</arg_value>\n</tool_call>"
GLM_ADD = (
  "<tool_call>add_2<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>[2.5, null]</arg_value>"
  "</tool_call>"
)
CALLS = [
  ("hermes", tagged(LOOK), [LOOK]),
  ("hermes", f"I look.\n{tagged(LOOK)}\n{tagged(ADD)}\n", ["I look.\n", LOOK, ADD]),
  ("hermes", f"{tagged(LOOK)} and so", [LOOK, "and so"]),
  # An ending inside a string; arguments as text; none at all; a line break in a string; a name that is not offered.
  ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "</tool_call>"}}</tool_call>',
   [("look", '{"at": "</tool_call>"}')]),
  ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"at\\": 1}"}</tool_call>', [("look", '{"at": 1}')]),
  ("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
  ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
  ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', [NOW]),
  ("hermes", '<tool_call>{"arguments": {"at": "the cat"}, "name": "look"}</tool_call>', [LOOK]),
  ("hermes", '<tool_call>{"name": "look", "arguments": {"at":"the cat"}, "id": "a}b"}</tool_call>.', [LOOK, "."]),
  ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>', [NOW]),
  ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "a\nb\\d"}}</tool_call>',
   [("look", '{"at": "a\\nb\\\\d"}')]),
  # The model stopped before the ending, or within it.
  ("hermes", f"<tool_call>{said(LOOK)}", [LOOK]),
  ("hermes", f"<tool_call>{said(LOOK)}\n</tool", [LOOK]),
  # The arguments break off: the call is as long as the model wrote it.
  ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "the c', [("look", '{"at": "the c')]),
  ("hermes", '<tool_call>{"name": "look", "arguments": {"at": </tool_call> the', [("look", '{"at": '), "the"]),
  # After one that is none.
  ("hermes", f"<tool_call>{{no}}</tool_call>{tagged(LOOK)}", ["<tool_call>{no}</tool_call>", LOOK]),
  ("hermes", f"<tool_call><tool_call>{said(LOOK)}</tool_call>", ["<tool_call>", LOOK]),
  ("llama3", said(LOOK, "parameters"), [LOOK]),
  ("llama3", f" \n{said(LOOK, 'parameters')}", [LOOK]),
  ("llama3", f"<|python_tag|>{said(LOOK, 'parameters')}; {said(ADD, 'parameters')}", [LOOK, ADD]),
  ("llama3", f"So:<|python_tag|>{said(LOOK)}\n", ["So:", LOOK]),
  ("llama3", '{"type": "function", "name": "look", "parameters": {"at": "the cat"}}', [LOOK]),
  ("llama4", '[look(at="the cat"), add_2(a=1, b=[2.5, None]), now()]', [LOOK, ADD, NOW]),
  ("llama4", "<|python_start|>[look(at='the cat')]<|python_end|>", [LOOK]),
  ("llama4", 'So: <|python_start|>{"name": "look", "parameters": {"at": "the cat"}}<|python_end|>', ["So: ", LOOK]),
  ("llama4", '[f(a={"k": (1, True)}, b="it\\\'s\\n",)]', [("f", '{"a": {"k": [1, true]}, "b": "it\'s\\n"}')]),
  ("mistral", f"[TOOL_CALLS] [{said(LOOK)}, {said(ADD)}]", [LOOK, ADD]),
  ("mistral", f"well[TOOL_CALLS][{said(LOOK)}]\n", ["well", LOOK]),
  ("mistral", f'[TOOL_CALLS]look{LOOK[1]}[TOOL_CALLS]add_2[ARGS]{ADD[1]}', [LOOK, ADD]),
  ("mistral", f'[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{LOOK[1]}', [LOOK]),
  ("qwen3_coder", QWEN.format("look", "<parameter=at>\nthe cat\n</parameter>\n"), [LOOK]),
  ("qwen3_coder", f"So\n{QWEN_ADD}\n{QWEN.format('now', '')}", ["So\n", ADD, NOW]),
  ("qwen3_coder", '<function=look><parameter=at>a "b"\n</p></parameter></tool_call>',
   [("look", '{"at": "a \\"b\\"\\n</p>"}')]),
  ("qwen3_coder", QWEN.format("look", "<parameter=near>null</parameter><parameter=at>null</parameter>"),
   [("look", '{"near": null, "at": "null"}')]),
  ("qwen3_coder", QWEN.format("f", "<parameter=a>True</parameter><parameter=b>x y</parameter>"),
   [("f", '{"a": true, "b": "x y"}')]),
  ("qwen3_coder", QWEN.format("look", "<parameter=at>\n\n</parameter>"), [("look", '{"at": ""}')]),
  ("qwen3_coder", tagged(LOOK), [LOOK]),
  ("qwen3_coder", "<function=look>\n<parameter=at>\nthe", [("look", '{"at": "the')]),
  ("glm45", f"{GLM_LOOK}\n{GLM_ADD}", [LOOK, ADD]),
  ("glm45", "<tool_call>now\n</tool_call>", [NOW]),
  ("deepseek_v3", f"ok<｜tool▁calls▁begin｜>{FUNCTION.format(*LOOK)}\n{FUNCTION.format(*ADD)}<｜tool▁calls▁end｜>",
   ["ok", LOOK, ADD]),
  ("deepseek_v3", f"<｜tool▁calls▁begin｜>{PLAIN.format(*LOOK)}{PLAIN.format(*ADD)}<｜tool▁calls▁end｜>", [LOOK, ADD]),
  ("deepseek_v32",
   "ok\n\n<｜DSML｜function_calls>\n"
   + DSML.format("look", '<｜DSML｜parameter name="at" string="true">the cat</｜DSML｜parameter>\n')
   + DSML.format("add_2", '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
                 '<｜DSML｜parameter name="b" string="false">[2.5, null]</｜DSML｜parameter>\n')
   + "</｜DSML｜function_calls>", ["ok\n\n", LOOK, ADD]),
  ("gemma", '```tool_code\nlook(at="the cat")\nadd_2(a=1, b=[2.5, None])\n```', [LOOK, ADD]),
  (
    "kimi_k2",
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{LOOK[1]}"
    f"<|tool_call_end|><|tool_call_begin|>add_2:1<|tool_call_argument_begin|> {ADD[1]}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    [LOOK, ADD],
  ),
  (
    "minimax_m2",
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">the cat</parameter>\n</invoke>\n'
    '<invoke name="add_2"><parameter name="a">1</parameter><parameter name="b">[2.5, null]</parameter></invoke>\n'
    "</minimax:tool_call>",
    [LOOK, ADD],
  ),
  ("gemma", "[look(at='the cat'), now()]", [LOOK, NOW]),
  ("functiongemma", "<start_function_call>call:look{at:<escape>the cat<escape>}<end_function_call>"
   "<start_function_call>call:add_2{a:1,b:[2.5,null]}<end_function_call>", [LOOK, ADD]),
  ("gemma4", '<|tool_call>call:look{at:<|"|>the cat<|"|>}<tool_call|>', [LOOK]),
  ("granite", f"<|tool_call|>[{said(LOOK)}, {said(ADD)}]", [LOOK, ADD]),
  ("granite", tagged(LOOK), [LOOK]),
  ("phi4", f"functools[{said(LOOK)}]", [LOOK]),
  ("phi4", f"<|tool_call|>[{said(LOOK)}, {said(ADD)}]<|/tool_call|>", [LOOK, ADD]),
  ("harmony", f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{LOOK[1]}<|call|>", [LOOK]),
  ("harmony", f" to=functions.look<|channel|>commentary json<|message|>{LOOK[1]}", [LOOK]),
  ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
   f"to=functions.look<|message|>{LOOK[1]}<|call|>", ["I look.", LOOK]),
  ("harmony", "<|channel|>final<|message|>Hello", ["Hello"]),
  ("forced", f"[{said(LOOK, 'parameters')},{said(ADD, 'parameters')}]", [LOOK, ADD]),
  ("forced", f"[{said(LOOK)}, {said(ADD)[:-4]}", [LOOK, ("add_2", '{"a": 1, "b": [2.5')]),
]  # fmt: skip


@pytest.mark.parametrize("name, text, wanted", CALLS, ids=[f"{name}-{at}" for at, (name, *_) in enumerate(CALLS)])
def test_calls(name, text, wanted):
  assert pieces_of(ALL[name], text) == wanted
  assert pieces_of(ALL[name], *text) == wanted
  for at in range(1, len(text)):
    assert pieces_of(ALL[name], text[:at], text[at:]) == wanted
  for each in wanted:
    if isinstance(each, tuple) and each in (LOOK, ADD, NOW):
      json.loads(each[1])


def test_calls_with_all_the_space_of_a_constrained_output():
  """A model that samples at random wrote 18 characters of it, and its call came out as text."""
  space = "\r\n" + 32 * " "
  text = '[@{@"name"@:@"look"@,@"arguments"@:@{"at": "the cat"}@}@]'.replace("@", space)
  assert re.fullmatch(WHITESPACE, space) and not re.fullmatch(WHITESPACE, space + " ")
  assert pieces_of(ALL["forced"], text) == [LOOK]


def test_every_format_is_tested():
  assert {name for name, *_ in CALLS} == set(ALL)


NO_CALLS = [
  ("hermes", "a plain < text <tool"),
  ("hermes", "<tool_call>"),
  ("hermes", '<tool_call>{"name": "look", "arguments": '),
  ("hermes", '<tool_call>{"name": ["look"], "arguments": {}}</tool_call>'),
  ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
  ("hermes", '<tool_call>{"name": "look", "arguments": "not json"}</tool_call>'),
  ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"a\\": NaN}"}</tool_call>'),
  ("hermes", f"<tool_call>{' ' * 65}{said(LOOK)}</tool_call>"),
  ("llama3", f"first {said(LOOK)}"),
  ("llama3", "<|python_tag|>print(1)"),
  ("llama3", '{"name": "Mira", "age": 7}'),
  ("llama3", '  {"answer": 1}'),
  ("llama4", "[a link](https://example.com)"),
  ("llama4", "[look(this), 1]"),
  ("mistral", f"[TOOL_CALLS] {said(LOOK)}"),
  ("mistral", f"[{said(LOOK)}]"),
  ("qwen3_coder", "<tool_call>look</tool_call>"),
  ("glm45", "<tool_call>{}</tool_call>"),
  ("deepseek_v3", "<｜tool▁calls▁begin｜>what?"),
  ("gemma", "```tool_code\nprint(look('x'))\n```"),
  ("functiongemma", "<start_function_call>look{}<end_function_call>"),
  ("phi4", "import functools\nfunctools.cache"),
  ("harmony", "plain text <"),
  ("forced", said(LOOK)),
]


@pytest.mark.parametrize("name, text", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_call_is_text(name, text):
  for at in range(len(text)):
    assert pieces_of(ALL[name], text[:at], text[at:]) == [text]
  assert pieces_of(ALL[name], *text) == [text]


def test_only_the_first_call_where_several_are_not_wanted():
  assert pieces_of(FORMATS["hermes"], f"{tagged(LOOK)}{tagged(ADD)} so", parallel=False) == [LOOK, "so"]


PARTS = st.one_of(
  st.sampled_from(
    [*"[]{}\"'\\;,:=()<> \nae", "</tool_call>", "</arg_value>", "\n</parameter>", "]", "\u00e9", "1", "true"]
  ),
  st.sampled_from([text for _, text, _ in CALLS]).flatmap(
    lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
      lambda cut: text[min(cut) : max(cut)]
    )
  ),
  st.text(max_size=6),
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(ALL)), st.lists(PARTS, max_size=10).map("".join), st.data())
def test_any_split_gives_the_same(name, text, data):
  cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
  chunks = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
  whole = pieces_of(ALL[name], text)
  assert pieces_of(ALL[name], *chunks) == whole == pieces_of(ALL[name], *text)
  if not any(isinstance(piece, tuple) for piece in whole) and name != "harmony":
    assert "".join(map(str, whole)) == text


@settings(max_examples=100, deadline=None)
@given(
  st.sampled_from(["hermes", "llama3", "mistral", "forced"]),
  st.dictionaries(st.text(max_size=8), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=8,
  ), max_size=4),
)  # fmt: skip
def test_arguments_come_out_as_the_same_values(name, arguments):
  marker = {"hermes": "<tool_call>", "llama3": "", "mistral": "[TOOL_CALLS][", "forced": "["}[name]
  [(tool, written)] = pieces_of(ALL[name], f'{marker}{{"name": "f", "arguments": {json.dumps(arguments)}}}')
  assert tool == "f" and json.loads(written) == arguments


def test_the_template_tells_the_format():
  assert [*FORMATS] == list(PARSERS[1:-1]) and {PARSERS[0], PARSERS[-1]} == {"auto", "none"}
  for name, template in {
    "hermes": "say <tool_call> in {{ tools }}",
    "mistral": '{{ "[TOOL_CALLS]" }}',
    "llama3": 'like {"name": function name, "parameters": a dictionary}',
    "llama4": '"parameters" <|python_start|>',
    "qwen3_coder": "<tool_call>\n<function=",
    "glm45": "<tool_call><arg_key>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "harmony": "<|channel|>analysis",
    "gemma4": "<|tool_call>",
    "granite": "<|tool_call|>",
  }.items():
    assert find_format("auto", template) is FORMATS[name]
  assert find_format("auto", "{{ messages }}") is None and find_format("auto", None) is None
  assert find_format("none", "<tool_call>") is None and find_format("mistral", "<tool_call>") is FORMATS["mistral"]
  assert len(FORMATS["mistral"].new_id()) == 9 and FORMATS["hermes"].new_id().startswith("call_")
