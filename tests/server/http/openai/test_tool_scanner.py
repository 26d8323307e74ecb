"""Calls in a model's text: each format, every way to split it, and what is no call comes out as it was."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from server.http.model_output import tool_calls
from server.http.model_output.tool_calls import (
  FORMATS,
  MAX_CALL_CHARS,
  MAX_CALLS,
  PARSERS,
  CallScanner,
  ToolCall,
  find_format,
  forced_format,
)

HERMES, LLAMA3, MISTRAL = FORMATS["hermes"], FORMATS["llama3"], FORMATS["mistral"]
FORCED = forced_format(HERMES)
ALL = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "forced": FORCED}
NAMES = ("look", "add_2")
LOOK = ToolCall("look", '{"at": "the cat"}')
ADD = ToolCall("add_2", '{"a": 1, "b": [2.5, null]}')


def merged(pieces) -> list[str | ToolCall]:
  """Neighbouring texts as one."""
  out: list[str | ToolCall] = []
  for piece in pieces:
    if out and isinstance(piece, str) and isinstance(out[-1], str):
      out[-1] += piece
    else:
      out.append(piece)
  return out


def scan(form, *chunks: str) -> list[str | ToolCall]:
  scanner = CallScanner(form, NAMES)
  pieces = [piece for chunk in chunks for piece in scanner.push(chunk)]
  return merged([*pieces, *scanner.flush()])


def said(call: ToolCall, key: str = "arguments") -> str:
  return f'{{"name": "{call.name}", "{key}": {call.arguments}}}'


def hermes(call: ToolCall) -> str:
  return f"<tool_call>\n{said(call)}\n</tool_call>"


CALLS = [
  (HERMES, hermes(LOOK), [LOOK]),
  (HERMES, f"I look.\n{hermes(LOOK)}\n{hermes(ADD)}\n", ["I look.\n", LOOK, ADD]),
  (HERMES, f"{hermes(LOOK)} and so", [LOOK, "and so"]),
  # An ending inside of a string; arguments as text; none at all; a line break in a string.
  (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "</tool_call>"}}</tool_call>',
   [ToolCall("look", '{"at": "</tool_call>"}')]),
  (HERMES, '<tool_call>{"name": "look", "arguments": "{\\"at\\": 1}"}</tool_call>', [ToolCall("look", '{"at": 1}')]),
  (HERMES, '<tool_call>{"name": "look"}</tool_call>', [ToolCall("look", "{}")]),
  (HERMES, '<tool_call>{"name": "look", "arguments": null}</tool_call>', [ToolCall("look", "{}")]),
  (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "a\nb"}}</tool_call>',
   [ToolCall("look", '{"at": "a\\nb"}')]),
  # The model stopped before the ending, or within it.
  (HERMES, f"<tool_call>{said(LOOK)}", [LOOK]),
  (HERMES, f"<tool_call>{said(LOOK)}\n</tool", [LOOK]),
  # After one that is none.
  (HERMES, f"<tool_call>{{no}}</tool_call>{hermes(LOOK)}", ["<tool_call>{no}</tool_call>", LOOK]),
  (HERMES, f"<tool_call><tool_call>{said(LOOK)}</tool_call>", ["<tool_call>", LOOK]),
  (LLAMA3, said(LOOK, "parameters"), [LOOK]),
  (LLAMA3, f"<|python_tag|>{said(LOOK, 'parameters')}; {said(ADD, 'parameters')}", [LOOK, ADD]),
  (LLAMA3, f"So:<|python_tag|>{said(LOOK)}\n", ["So:", LOOK]),
  (MISTRAL, f"[TOOL_CALLS] [{said(LOOK)}, {said(ADD)}]", [LOOK, ADD]),
  (MISTRAL, f"well[TOOL_CALLS][{said(LOOK)}]\n", ["well", LOOK]),
  (FORCED, f"[{said(LOOK)},{said(ADD)}]", [LOOK, ADD]),
]  # fmt: skip


@pytest.mark.parametrize("form, text, wanted", CALLS)
def test_calls(form, text, wanted):
  assert scan(form, text) == wanted
  assert scan(form, *text) == wanted


NO_CALLS = [
  (HERMES, "a plain < text <tool"),
  (HERMES, "<tool_call>"),
  (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "the c'),
  (HERMES, '<tool_call>{"name": "look", "arguments": {"at": '),
  (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call> more'),
  (HERMES, '<tool_call>{"name": ["look"], "arguments": {}}</tool_call>'),
  (HERMES, '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
  (HERMES, '<tool_call>{"name": "look", "arguments": "not json"}</tool_call>'),
  (HERMES, '<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>'),
  (HERMES, '<tool_call>{"name": "look", "arguments": {"a": 1e999}}</tool_call>'),
  (HERMES, '<tool_call>{"name": "look", "arguments": {"a": "\\ud800"}}</tool_call>'),
  (HERMES, f'<tool_call>{{"name": "look", "arguments": {{"a": {"1" * 5000}}}}}</tool_call>'),
  (HERMES, f'<tool_call>{{"name": "look", "arguments": {{"a": {"[" * 9000}{"]" * 9000}}}}}</tool_call>'),
  (HERMES, f"<tool_call>{said(LOOK)} and</tool_call>"),
  (HERMES, f"<tool_call>{' ' * 17}{said(LOOK)}</tool_call>"),
  (LLAMA3, f"{said(LOOK)} and so"),
  (LLAMA3, f"first {said(LOOK)}"),
  (LLAMA3, "<|python_tag|>print(1)"),
  (LLAMA3, '{"name": "Bob", "parameters": {}}'),
  (MISTRAL, f"[TOOL_CALLS] [{said(LOOK)}, 1]"),
  (MISTRAL, f"[TOOL_CALLS] {said(LOOK)}"),
  (MISTRAL, f"[{said(LOOK)}]"),
  (FORCED, f"[{said(LOOK)}, {said(ADD)[:-3]}"),
  (FORCED, said(LOOK)),
]


@pytest.mark.parametrize("form, text", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_call_is_text(form, text):
  assert scan(form, text) == [text]
  assert scan(form, *text) == [text]


def test_text_is_not_held_back_without_need():
  scanner = CallScanner(HERMES, NAMES)
  assert scanner.push("the cat <") == ["the cat "]
  assert scanner.push("b> sat <tool_") == ["<b> sat "]
  assert scanner.push("call>") == []
  assert scanner.push("no") == ["<tool_call>no"]
  assert scanner.push(hermes(LOOK) + "\n") == [LOOK]


def test_a_long_call_is_text():
  fits = "x" * (MAX_CALL_CHARS - len(hermes(ToolCall("look", '{"at": ""}'))) - 1)
  call = ToolCall("look", f'{{"at": "{fits}"}}')
  long = ToolCall("look", f'{{"at": "{fits}{"x" * 40}"}}')
  assert scan(HERMES, hermes(call)) == [call]
  for text in (hermes(long), f"<tool_call>{said(long)}"):
    assert scan(HERMES, text + hermes(LOOK)) == [text, LOOK]
  parts = [hermes(long)[at : at + 1000] for at in range(0, len(hermes(long)), 1000)]
  assert scan(HERMES, *parts, hermes(LOOK)) == [hermes(long), LOOK]


MEGABYTE = 1 << 20
HOSTILE = {
  "markers": "<tool_call>",
  "markers and names": '<tool_call>{"name": "look", ',
  "endings in a string": '<tool_call>{"name": "look", "arguments": {"at": "' + "</tool_call>" * 99,
  "endings": "</tool_call>",
  "half markers": "<tool_cal",
  "brackets": "<tool_call>" + "[" * 5000,
  "numbers": "<tool_call>" + "1" * 5000,
  "blanks": "<tool_call> \n",
  "empty calls": "<tool_call>{}</tool_call>",
}


@pytest.mark.catalogue("F6")
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=["hermes", "llama3", "mistral"])
def test_a_megabyte_of_hostile_output_takes_work_by_its_length(monkeypatch, form, name):
  """In characters that are looked at, for time says nothing on a busy machine; and little is held back."""
  looked_at = 0
  scan, decode = CallScanner._scan, tool_calls._decode

  def counted_scan(self, *, ended):
    nonlocal looked_at
    looked_at += self._size
    return scan(self, ended=ended)

  def counted_decode(text, at=0):
    nonlocal looked_at
    looked_at += len(text) - at
    return decode(text, at)

  monkeypatch.setattr(CallScanner, "_scan", counted_scan)
  monkeypatch.setattr(tool_calls, "_decode", counted_decode)
  piece = HOSTILE[name].replace("<tool_call>", form.marker).replace("</tool_call>", form.ending or "}")
  text = (piece * (MEGABYTE // len(piece) + 1))[:MEGABYTE]
  scanner, pieces = CallScanner(form, NAMES), []
  for at in range(0, MEGABYTE, 64):
    pieces += scanner.push(text[at : at + 64])
    assert scanner._size <= MAX_CALL_CHARS + 64
  assert merged([*pieces, *scanner.flush()]) == [text]
  assert looked_at < 20 * MEGABYTE


def test_only_so_many():
  text = hermes(LOOK) * (MAX_CALLS + 2)
  pieces = scan(HERMES, text)
  assert pieces == [LOOK] * MAX_CALLS + [hermes(LOOK) * 2]
  many = f"[{', '.join([said(LOOK)] * (MAX_CALLS + 1))}]"
  assert scan(FORCED, many) == [many]


PARTS = st.one_of(
  st.sampled_from(
    [
      *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[", "]", "{", "}", '"', "\\", ";", ","),
      *("<tool", "</", "\n", " ", "a", "\u00e9", said(LOOK), said(ADD), said(LOOK, "parameters"), hermes(ADD)),
      f'{{"name": "look", "arguments": {{"at": "{hermes(LOOK)}'.replace("\n", " "),
    ]
  ),
  st.text(max_size=6),
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(ALL)), st.lists(PARTS, max_size=14).map("".join), st.data())
def test_any_split_gives_the_same(name, text, data):
  cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
  chunks = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
  whole = scan(ALL[name], text)
  assert scan(ALL[name], *chunks) == whole == scan(ALL[name], *text)
  if not any(isinstance(piece, ToolCall) for piece in whole):
    assert "".join(whole) == text
  for piece in whole:
    assert isinstance(piece, str) or (piece.name in NAMES and isinstance(json.loads(piece.arguments), dict))


def test_the_template_tells_the_format():
  assert PARSERS == ("auto", "hermes", "llama3", "mistral", "none")
  assert find_format("auto", "say <tool_call> in {{ tools }}") is HERMES
  assert find_format("auto", '{{ "[TOOL_CALLS]" }}') is MISTRAL
  assert find_format("auto", 'like {"name": function name, "parameters": a dictionary}') is LLAMA3
  assert find_format("auto", "{{ messages }}") is None and find_format("auto", None) is None
  assert find_format("none", "<tool_call>") is None and find_format("mistral", "<tool_call>") is MISTRAL
  assert len(MISTRAL.new_id()) == 9 and MISTRAL.new_id().isalnum() and HERMES.new_id().startswith("call_")
