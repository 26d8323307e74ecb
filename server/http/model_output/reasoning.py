"""Splits a model's reasoning from its answer. Knows no API and no tool call; may not change the answer's text.

A model writes its reasoning first, between two markers. The chat template of some models writes the first marker into
the prompt, so that the output begins inside the reasoning. Harmony's channels are read by `ChannelReader`.
"""

import dataclasses
from typing import Final

from server.http.model_output.output_pieces import ReasoningPiece, TextPiece
from server.http.model_output.text_shapes import Markers

_SPACE: Final = " \t\r\n"
# Space before the first marker; after more of it, the output has no reasoning.
_MAX_SPACE: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningFormat:
  """How a family of models writes reasoning.

  Attributes:
    opener, closer: the markers around the reasoning.
    answer: the header of the answer after it, or empty.
    has_channels: whether the output consists of Harmony's channels, some of which are reasoning.
  """

  opener: str
  closer: str
  answer: str = ""
  has_channels: bool = False


_THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = {
  "deepseek_r1": _THINK,
  "glm45": _THINK,
  "gpt_oss": ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    answer="<|start|>assistant<|channel|>final<|message|>",
    has_channels=True,
  ),
  "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
  "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
  "qwen3": _THINK,
}
REASONING_PARSERS = ("auto", *REASONING_FORMATS, "none")
# Text in the chat template by which each format is recognized.
_SIGNS = (
  ("gpt_oss", "<|channel|>"),
  ("mistral", "[THINK]"),
  ("granite", "Here is my thought process:"),
  ("qwen3", "<think>"),
  ("qwen3", "</think>"),
)


def find_reasoning_format(parser: str, template: str | None) -> ReasoningFormat | None:
  """Returns the format that --reasoning_parser selects for this chat template; None leaves reasoning in the text."""
  if parser == "auto":
    parser = next((name for name, sign in _SIGNS if sign in (template or "")), "none")
  return REASONING_FORMATS.get(parser)


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
  """The reasoning that an output may have.

  Attributes:
    form: how the model writes it.
    is_open: whether the prompt has opened it, so that the output begins inside.
    is_shown: whether the response has it; otherwise the parser drops it.
  """

  form: ReasoningFormat
  is_open: bool
  is_shown: bool


class ReasoningSplitter:
  """Splits one output. Between pushes it holds text that may begin a marker.

  Space at the beginning of the reasoning, and of the answer after it, is dropped.
  """

  def __init__(self, form: ReasoningFormat, *, is_open: bool):
    """Args: form: how the model writes reasoning. is_open: whether the output begins inside the reasoning."""
    self._form = form
    self._closer = Markers([form.closer])
    self._held = ""
    self._is_inside = is_open
    # No text but space has arrived, so that a first marker may follow.
    self._at_start = True
    # Space at the beginning is dropped.
    self._drops_space = False

  def push(self, text: str, *, ended: bool) -> list[TextPiece | ReasoningPiece]:
    """Adds text; returns what has become certain. With `ended`, the output has no more text."""
    text, self._held = self._held + text, ""
    pieces: list[TextPiece | ReasoningPiece] = []
    if self._at_start:
      first = len(text) - len(text.lstrip(_SPACE))
      rest = text[first : first + len(self._form.opener)]
      if (
        not ended and first <= _MAX_SPACE and len(rest) < len(self._form.opener) and self._form.opener.startswith(rest)
      ):
        self._held = text
        return pieces
      self._at_start = False
      if rest == self._form.opener and first <= _MAX_SPACE:
        self._is_inside = True
        text = text[first + len(rest) :]
      self._drops_space = self._is_inside
    if self._is_inside:
      found = self._closer.find(text, 0)
      end = found.start() if found else len(text) if ended else self._closer.find_beginning(text, 0)
      if shown := self._without_space(text[:end]):
        pieces.append(ReasoningPiece(shown))
      if not found:
        self._held = text[end:]
        return pieces
      self._is_inside = False
      self._drops_space = True
      text = text[found.end() :]
    if shown := self._without_space(text):
      pieces.append(TextPiece(shown))
    return pieces

  def _without_space(self, text: str) -> str:
    if self._drops_space:
      text = text.lstrip(_SPACE)
      self._drops_space = not text
    return text
