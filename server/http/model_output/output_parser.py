"""Splits a model's output into text, reasoning and tool calls, piece by piece. Knows no API's form.

Concatenated, the pieces of one kind do not depend on how the output was split into pushes.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from server.http.model_output.call_formats import CallFormat
from server.http.model_output.channel_reader import ChannelReader
from server.http.model_output.custom_tools import InputReader
from server.http.model_output.output_pieces import CallPart, CallPiece, OutputPiece, ReasoningPiece, TextPiece
from server.http.model_output.reasoning import Reasoning, ReasoningSplitter
from server.http.model_output.tool_calls import CallScanner

__all__ = ["CallPiece", "Calls", "OutputParser", "OutputPiece", "ReasoningPiece", "TextPiece"]


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
  """The tool calls that an output may have.

  Attributes:
    form: how the model writes calls.
    tools: the tools' parameters, JSON schemas, by name. Calls of other names are calls, too.
    parallel: whether one output may have several; otherwise the parser drops those after the first.
    custom: the names of custom tools among them.
    whole: the custom tool whose input is the whole answer; empty: the model writes calls in its format.
  """

  form: CallFormat
  tools: Mapping[str, Any]
  parallel: bool
  custom: frozenset[str] = frozenset()
  whole: str = ""


class OutputParser:
  """Parses one output.

  Attributes:
    num_calls: calls found so far.
  """

  def __init__(self, calls: Calls | None, reasoning: Reasoning | None = None):
    """Args:
    calls: the possible calls; None leaves calls in the text.
    reasoning: the possible reasoning; None leaves reasoning in the text.
    """
    self.num_calls = 0
    self._calls = calls
    self._shows_reasoning = reasoning is None or reasoning.is_shown
    self._channels: ChannelReader | None = None
    self._splitter: ReasoningSplitter | None = None
    self._scanner: CallScanner | None = None
    has_calls_in_channels = calls is not None and calls.form.has_channels and not calls.whole
    if has_calls_in_channels or reasoning is not None and reasoning.form.has_channels:
      self._channels = ChannelReader(finds_calls=has_calls_in_channels, splits_reasoning=reasoning is not None)
    elif reasoning is not None:
      self._splitter = ReasoningSplitter(reasoning.form, is_open=reasoning.is_open)
    if calls is not None and not has_calls_in_channels and not calls.whole:
      self._scanner = CallScanner(calls.form, calls.tools)
    # Whether the current call is dropped.
    self._drops_call = False
    # Reads the input of the current call, if it is of a custom tool.
    self._input: InputReader | None = None

  def push_text(self, text: str, *, ended: bool) -> list[OutputPiece]:
    """Adds text; returns the pieces that have become certain. With `ended`, the output has no more text.

    No two pieces of one text, or of one call, follow each other in what one push returns.
    """
    found: list[TextPiece | ReasoningPiece | CallPart]
    if self._channels is not None:
      found = self._channels.push(text, ended=ended)
    elif self._splitter is not None:
      found = list(self._splitter.push(text, ended=ended))
    else:
      found = [TextPiece(text)] if text else []
    pieces: list[OutputPiece] = []
    for each in found:
      if isinstance(each, CallPart):
        pieces += self._number(each)
      elif isinstance(each, ReasoningPiece):
        pieces += [each] if self._shows_reasoning else []
      elif self._calls is not None and self._calls.whole:
        pieces.append(self._add_input(each.text, ended=False))
      elif self._scanner is None:
        pieces.append(each)
      else:
        pieces += self._scan(self._scanner.push(each.text))
    if ended and self._scanner is not None:
      pieces += self._scan(self._scanner.flush())
    if ended and self._calls is not None and self._calls.whole:
      pieces.append(self._add_input("", ended=True))
    return _merge_pieces(pieces)

  def _add_input(self, text: str, *, ended: bool) -> CallPiece:
    """Returns a part of the call whose input is the whole answer."""
    assert self._calls is not None, "the answer is a call"
    is_first, self.num_calls = not self.num_calls, 1
    call_id, name = (self._calls.form.new_id(), self._calls.whole) if is_first else (None, None)
    return CallPiece(0, call_id, name, text, is_last=ended, is_custom=True)

  def _scan(self, found: list[str | CallPart]) -> list[OutputPiece]:
    pieces: list[OutputPiece] = []
    for each in found:
      pieces += [TextPiece(each)] if isinstance(each, str) else self._number(each)
    return pieces

  def _number(self, part: CallPart) -> list[OutputPiece]:
    """Returns a call's part with the call's index, and its id in the first part; nothing if the call is dropped."""
    call_id = None
    if part.name is not None:
      assert self._calls is not None, "calls are found only where they are possible"
      self._drops_call = bool(self.num_calls) and not self._calls.parallel
      if not self._drops_call:
        self.num_calls += 1
        call_id = self._calls.form.new_id()
        self._input = InputReader() if part.name in self._calls.custom else None
    if self._drops_call:
      return []
    is_custom = self._input is not None
    arguments = part.arguments if self._input is None else self._input.push(part.arguments, ended=part.is_last)
    return [CallPiece(self.num_calls - 1, call_id, part.name, arguments, part.is_last, is_custom)]


def _merge_pieces(pieces: list[OutputPiece]) -> list[OutputPiece]:
  merged: list[OutputPiece] = []
  for piece in pieces:
    match (merged[-1] if merged else None), piece:
      case TextPiece(before), TextPiece(text):
        merged[-1] = TextPiece(before + text)
      case ReasoningPiece(before), ReasoningPiece(text):
        merged[-1] = ReasoningPiece(before + text)
      case CallPiece() as before, CallPiece() if before.index == piece.index:
        arguments = before.arguments + piece.arguments
        merged[-1] = dataclasses.replace(before, arguments=arguments, is_last=piece.is_last)
      case _:
        merged.append(piece)
  return merged
