"""Outputs made to cost much: the work is linear in their length, and little is held back."""

import pytest

from server.http.model_output import tool_calls
from server.http.model_output.call_formats import FORMATS, forced_format
from server.http.model_output.output_parser import CallPiece, Calls, OutputParser, TextPiece
from server.http.model_output.reasoning import REASONING_FORMATS, Reasoning
from server.http.model_output.text_shapes import Markers, Shape
from server.http.model_output.tool_calls import MAX_CALL_CHARS, MAX_CALLS, CallScanner
from server.http.model_output.value_translator import ValueTranslator

LENGTH = 200_000
ALL = {**FORMATS, "forced": forced_format(None)}
BEGINNINGS = {
  "hermes": '<tool_call>{"name": "look", "arguments": ',
  "llama3": '<|python_tag|>{"name": "look", "parameters": ',
  "llama4": "<|python_start|>[look(a=",
  "mistral": "[TOOL_CALLS]look[ARGS]",
  "qwen3_coder": "<tool_call><function=look><parameter=a>",
  "glm45": "<tool_call>look<arg_key>a</arg_key><arg_value>",
  "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>",
  "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="a" string="false">',
  "kimi_k2": "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>",
  "minimax_m2": '<minimax:tool_call><invoke name="look"><parameter name="a">',
  "harmony": "<|channel|>commentary to=functions.look<|message|>",
  "gemma": "```tool_code look(a=",
  "functiongemma": "<start_function_call>call:look{a:",
  "gemma4": "<|tool_call>call:look{a:",
  "granite": '<|tool_call|>[{"name": "look", "arguments": ',
  "phi4": 'functools[{"name": "look", "arguments": ',
  "forced": '[{"name": "look", "arguments": ',
}
HOSTILE = {
  "beginnings": ("", "{begin}"),
  "markers": ("", "{marker}"),
  "half markers": ("", "{half}"),
  "blanks": ("{marker}", " \n"),
  "open strings": ("{begin}", '{{"a": "\\n'),
  "escapes": ('{begin}{{"a": "', "\\u00e9\\"),
  "brackets": ('{begin}{{"a": ', "["),
  "numbers": ('{begin}{{"a": ', "1"),
  "closers": ("{begin}", "</parameter></arg_value>\n</tool_call><|end|>"),
  "half closers": ("{begin}", "\n</parameter\n</arg_value</｜DSML｜parameter"),
  "another order": ('{marker}{{"id": "', "x, "),
  "names": ("{marker}", "look"),
}


def hostile(name: str, kind: str) -> str:
  begin = BEGINNINGS[name]
  marker = next((each for each in ALL[name].markers if begin.startswith(each)), begin[:1])
  first, more = (part.format(begin=begin, marker=marker, half=marker[:-1]) for part in HOSTILE[kind])
  return (first + more * (LENGTH // max(1, len(more)) + 1))[:LENGTH]


@pytest.mark.catalogue("F6")
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ALL)
def test_hostile_output_takes_work_by_its_length(monkeypatch, name, kind):
  """In characters that a search may look at, for time says nothing on a busy machine."""
  looked_at = 0

  def count(cls, method: str, limit: int) -> None:
    original = getattr(cls, method)

    def counted(self, text, at, **more):
      nonlocal looked_at
      looked_at += min(limit, len(text) - at) + 1
      return original(self, text, at, **more)

    monkeypatch.setattr(cls, method, counted)

  for cls, method, limit in (
    (Shape, "match", 400), (Shape, "may_begin", 400), (Markers, "find", LENGTH), (Markers, "find_beginning", 40),
    (ValueTranslator, "feed", LENGTH),
  ):  # fmt: skip
    count(cls, method, limit)
  text = hostile(name, kind)
  parser = OutputParser(Calls(ALL[name], {}, True))
  reader = parser._channels or parser._scanner
  assert reader is not None
  pieces = []
  for at in range(0, LENGTH, 64):
    pieces += parser.push_text(text[at : at + 64], ended=False)
    assert len(reader._text) - reader._at < 2048, "little is held back"
  pieces += parser.push_text("", ended=True)
  assert looked_at < 60 * LENGTH
  assert sum(piece.is_last for piece in pieces if isinstance(piece, CallPiece)) == parser.num_calls <= MAX_CALLS
  if not parser.num_calls and name != "harmony":
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == text


@pytest.mark.parametrize("form", ["qwen3", "gpt_oss"])
def test_long_reasoning_is_not_held(form):
  parser = OutputParser(None, Reasoning(REASONING_FORMATS[form], is_open=True, is_shown=True))
  for text in ["<|channel|>analysis<|message|>" if form == "gpt_oss" else "", *["</thin<|en"] * 2000]:
    parser.push_text(text, ended=False)
    held = parser._splitter._held if parser._splitter else parser._channels._text[parser._channels._at :]
    assert len(held) < 64


def test_what_is_held_has_a_limit(monkeypatch):
  """An object in another order, and an argument that is no string, wait for their end; too long, they are text."""
  monkeypatch.setattr(tool_calls, "MAX_CALL_CHARS", 200)
  assert MAX_CALL_CHARS == 256 << 10
  for size, is_call in ((100, True), (300, False)):
    text = f'<tool_call>{{"arguments": {{"at": "{"x" * size}"}}, "name": "look"}}</tool_call>'
    for chunks in ([text], list(text)):
      scanner = CallScanner(FORMATS["hermes"], {})
      found = [part for chunk in chunks for part in scanner.push(chunk)] + scanner.flush()
      assert any(not isinstance(part, str) for part in found) is is_call
      assert is_call or "".join(part for part in found if isinstance(part, str)) == text
  broken = []
  text = f"<function=look><parameter=a>[{'1,' * 200}1]</parameter></function>"
  for chunks in ([text], list(text)):
    scanner = CallScanner(FORMATS["qwen3_coder"], {})
    found = [part for chunk in chunks for part in scanner.push(chunk)] + scanner.flush()
    broken.append("".join(part if isinstance(part, str) else f"({part.arguments})" for part in found))
    assert [part.is_last for part in found if not isinstance(part, str)].count(True) == 1
  assert broken[0].replace(")(", "") == broken[1].replace(")(", "")


def test_only_so_many_calls():
  call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
  parser = OutputParser(Calls(FORMATS["hermes"], {}, True))
  pieces = parser.push_text(call * (MAX_CALLS + 2), ended=True)
  assert parser.num_calls == MAX_CALLS
  assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == call * 2
