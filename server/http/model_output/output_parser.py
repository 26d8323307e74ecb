"""Splits a model's output into text, reasoning and tool calls, piece by piece. Knows no API's form.

Concatenated, the pieces of one kind do not depend on how the output was split into pushes.
"""

from collections.abc import Sequence
import dataclasses

from server.http.model_output.tool_calls import CallFormat, CallScanner, ToolCall


@dataclasses.dataclass(frozen=True, slots=True)
class TextPiece:
  """Text of the answer."""

  text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPiece:
  """Text of the model's reasoning, which comes before the answer."""

  text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallPiece:
  """A part of a tool call.

  Attributes:
    index: the call's index in the output.
    call_id, name: the call's id and tool in its first piece; None later.
    arguments: more of the arguments' JSON text; the pieces of a call concatenate to the whole.
    is_last: whether the call is complete.
  """

  index: int
  call_id: str | None
  name: str | None
  arguments: str
  is_last: bool


type OutputPiece = TextPiece | ReasoningPiece | CallPiece


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
  """The tool calls that an output may have.

  Attributes:
    form: how the model writes calls.
    names: names of the tools.
    parallel: whether one output may have several; otherwise the parser drops those after the first.
  """

  form: CallFormat
  names: Sequence[str]
  parallel: bool


class OutputParser:
  """Parses one output.

  Attributes:
    num_calls: calls found so far.
  """

  def __init__(self, calls: Calls | None):
    """Args: calls: the possible calls; None leaves calls in the text."""
    self.num_calls = 0
    self._calls = calls
    self._scanner = None if calls is None else CallScanner(calls.form, calls.names)

  def push_text(self, text: str, *, ended: bool) -> list[OutputPiece]:
    """Adds text; returns the pieces that have become certain. With `ended`, the output has no more text."""
    if self._calls is None or self._scanner is None:
      return [TextPiece(text)] if text else []
    found = self._scanner.push(text)
    if ended:
      found += self._scanner.flush()
    pieces: list[OutputPiece] = []
    for each in found:
      if not isinstance(each, ToolCall):
        pieces.append(TextPiece(each))
      elif self._calls.parallel or not self.num_calls:
        pieces.append(CallPiece(self.num_calls, self._calls.form.new_id(), each.name, each.arguments, is_last=True))
        self.num_calls += 1
    return pieces
