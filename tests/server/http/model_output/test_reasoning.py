"""Reasoning and the answer, apart: each form, every way to split it, and calls after it."""

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from server.http.model_output.call_formats import FORMATS
from server.http.model_output.output_parser import CallPiece, Calls, OutputParser, ReasoningPiece, TextPiece
from server.http.model_output.reasoning import (
  REASONING_FORMATS,
  REASONING_PARSERS,
  Reasoning,
  find_reasoning_format,
)


def split(
  name: str, *chunks: str, is_open: bool = False, is_shown: bool = True, calls: str = ""
) -> tuple[str, str, str]:
  """Returns (reasoning, text, calls)."""
  form = REASONING_FORMATS[name]
  parser = OutputParser(Calls(FORMATS[calls], {}, True) if calls else None, Reasoning(form, is_open, is_shown))
  pieces = [piece for chunk in chunks for piece in parser.push_text(chunk, ended=False)]
  pieces += parser.push_text("", ended=True)
  assert all(piece.text for piece in pieces if not isinstance(piece, CallPiece))
  return (
    "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)),
    "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)),
    "".join((piece.name or "") + piece.arguments for piece in pieces if isinstance(piece, CallPiece)),
  )


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
SPLITS = [
  ("qwen3", False, "<think>\nSo.\n</think>\n\nYes.", ("So.\n", "Yes.", "")),
  ("qwen3", True, "So.\n</think>\n\nYes.", ("So.\n", "Yes.", "")),
  ("deepseek_r1", True, "<think>\nSo.</think>Yes.", ("So.", "Yes.", "")),
  ("glm45", False, "\n<think></think>\nYes </think>", ("", "Yes </think>", "")),
  ("qwen3", False, "Yes. <think>so</think>", ("", "Yes. <think>so</think>", "")),
  ("qwen3", False, "  Yes.", ("", "  Yes.", "")),
  ("qwen3", False, "<thin", ("", "<thin", "")),
  ("qwen3", True, "So I thought </thi", ("So I thought </thi", "", "")),
  ("qwen3", False, f"<think>I look {CALL[:20]}</think>\n{CALL}", (f"I look {CALL[:20]}", "", 'look{"at": 1}')),
  ("mistral", False, "[THINK]So.[/THINK]Yes.", ("So.", "Yes.", "")),
  ("granite", False, "Here is my thought process: So. Here is my response: Yes.", ("So. ", "Yes.", "")),
  ("gpt_oss", False, f"<|channel|>analysis<|message|>So. <{FINAL}Yes.<|return|>", ("So. <", "Yes.", "")),
  ("gpt_oss", False, "Yes.", ("", "Yes.", "")),
  ("gpt_oss", False, f"<|channel|>commentary<|message|>I look.{FINAL}Yes.", ("", "I look.Yes.", "")),
  ("gpt_oss", False, "<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", "")),
  ("gpt_oss", False, "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>fin", ("So.", "", "")),
]  # fmt: skip


@pytest.mark.parametrize("name, is_open, text, wanted", SPLITS, ids=range(len(SPLITS)))
def test_splits(name, is_open, text, wanted):
  calls = "hermes" if wanted[2] else ""
  assert split(name, *text, is_open=is_open, calls=calls) == wanted
  for at in range(len(text)):
    assert split(name, text[:at], text[at:], is_open=is_open, calls=calls) == wanted
  assert split(name, text, is_open=is_open, is_shown=False, calls=calls) == ("", *wanted[1:])


def test_a_call_in_a_channel():
  text = (
    f'<|channel|>analysis<|message|>So.{FINAL.replace("final", "commentary to=functions.look json")}{{"at":1}}<|call|>'
  )
  assert split("gpt_oss", *text, calls="harmony") == ("So.", "", 'look{"at": 1}')
  assert split("gpt_oss", text) == ('So.{"at":1}', "", "")
  parser = OutputParser(Calls(FORMATS["harmony"], {}, True))  # reasoning stays in the text
  found = parser.push_text(text, ended=True)
  assert [type(piece) for piece in found] == [TextPiece, CallPiece] and found[0] == TextPiece("So.")


@settings(max_examples=200, deadline=None)
@given(
  st.sampled_from(sorted(REASONING_FORMATS)),
  st.booleans(),
  st.lists(
    st.sampled_from(
      [
        *("<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:", "Here is my response:"),
        *(
          "<|channel|>",
          "analysis",
          "final",
          "<|message|>",
          "<|end|>",
          "<|start|>",
          "to=functions.x",
          "{",
          "<",
          "[",
          " ",
        ),
        *("\n", "a", "</thi", "{}"),
      ]
    ),
    max_size=12,
  ).map("".join),
  st.data(),
)
def test_any_split_gives_the_same(name, is_open, text, data):
  cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
  chunks = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
  calls = data.draw(st.sampled_from(["", "hermes", "harmony"]))
  whole = split(name, text, is_open=is_open, calls=calls)
  assert split(name, *chunks, is_open=is_open, calls=calls) == whole == split(name, *text, is_open=is_open, calls=calls)


def test_the_template_tells_the_form():
  assert [*REASONING_FORMATS] == list(REASONING_PARSERS[1:-1])
  for name, template in {
    "qwen3": "{{ '<think>' }}",
    "gpt_oss": "<|channel|>",
    "mistral": "[THINK]",
    "granite": "Here is my thought process:",
  }.items():
    assert find_reasoning_format("auto", template) is REASONING_FORMATS[name]
    assert find_reasoning_format("none", template) is None
  assert find_reasoning_format("auto", None) is None and find_reasoning_format("auto", "{{ messages }}") is None
  assert find_reasoning_format("mistral", "<think>") is REASONING_FORMATS["mistral"]
