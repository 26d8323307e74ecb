"""Reads Harmony's channels, in which gpt-oss writes: reasoning, calls and the answer. Knows no API.

A message is <|start|>assistant<|channel|>NAME<|message|>TEXT and an end marker; the prompt has written the first
<|start|>assistant. A recipient (to=functions.NAME) before or after the channel makes it a call.
"""

from collections.abc import Callable
import re
from typing import Final

from server.http.model_output.output_pieces import CallPart, ReasoningPiece, TextPiece
from server.http.model_output.text_shapes import Markers
from server.http.model_output.tool_calls import MAX_CALLS
from server.http.model_output.value_translator import JSON, Status, ValueTranslator

CHANNEL_MARKERS: Final = (
  "<|start|>",
  "<|channel|>",
  "<|message|>",
  "<|constrain|>",
  "<|end|>",
  "<|call|>",
  "<|return|>",
)
# A longer header is text.
_MAX_HEADER: Final = 512
_MESSAGE: Final = Markers(["<|message|>"])
_ENDS: Final = Markers(["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"])
_STARTS: Final = Markers(["<|start|>", "<|channel|>"])
_BEGINNINGS: Final = ("<|start|>", "<|channel|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>(analysis|commentary|final)\b")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]{1,128})")
_SPACE = " \t\r\n"


class ChannelReader:
  """Reads one output. An output that does not begin with a header is text up to the first one."""

  def __init__(self, *, finds_calls: bool, splits_reasoning: bool):
    """Args:
    finds_calls: whether messages to functions are calls; otherwise they are reasoning.
    splits_reasoning: whether reasoning is apart from the text.
    """
    self._finds_calls = finds_calls
    self._splits_reasoning = splits_reasoning
    self._text = ""
    self._at = 0
    self._ended = False
    self._found: list[TextPiece | ReasoningPiece | CallPart] = []
    self._read: Callable[[], bool] = self._read_start
    self._is_reasoning = False
    self._name = ""
    self._num_calls = 0
    self._translator = ValueTranslator(JSON)

  def push(self, text: str, *, ended: bool) -> list[TextPiece | ReasoningPiece | CallPart]:
    """Adds text; returns what has become certain. With `ended`, the output has no more text."""
    self._text = self._text[self._at :] + text
    self._at, self._ended = 0, ended
    while self._at < len(self._text) and self._read():
      pass
    if ended and self._read == self._read_arguments:
      self._read()
    found, self._found = self._found, []
    return found

  # Each of the following methods reads from `_text` at `_at` and returns whether it got on; else it needs more text.

  def _show(self, text: str) -> None:
    if text:
      self._found.append(ReasoningPiece(text) if self._is_reasoning and self._splits_reasoning else TextPiece(text))

  def _read_start(self) -> bool:
    rest = self._text[self._at : self._at + _MAX_HEADER].lstrip(_SPACE)
    if any(rest.startswith(begin) for begin in _BEGINNINGS):
      self._read = self._read_header
      return True
    if not self._ended and len(self._text) < _MAX_HEADER and any(begin.startswith(rest) for begin in _BEGINNINGS):
      return False
    self._read = self._read_body
    return True

  def _read_header(self) -> bool:
    text, at = self._text, self._at
    found = _MESSAGE.find(text, at)
    is_long = len(text) - at >= _MAX_HEADER + len("<|message|>") if found is None else found.start() - at >= _MAX_HEADER
    if is_long:
      self._is_reasoning = False
      self._at = at + _MAX_HEADER
      self._show(text[at : self._at])
      self._read = self._read_body
      return True
    if found is None:  # an output that ends inside a header lacks nothing but a message
      self._at = len(text) if self._ended else at
      return False
    header = text[at : found.start()]
    self._at = found.end()
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    # Messages to something else than the user are no part of the answer.
    self._is_reasoning = recipient is not None or (channel is not None and channel[1] == "analysis")
    self._read = self._read_body
    if recipient is not None and self._finds_calls and self._num_calls < MAX_CALLS:
      self._num_calls += 1
      self._name = recipient[1]
      self._read = self._read_call_start
    return True

  def _read_body(self) -> bool:
    """The text of a message, up to its end."""
    text, at = self._text, self._at
    found = _ENDS.find(text, at)
    self._at = found.start() if found else len(text) if self._ended else _ENDS.find_beginning(text, at)
    self._show(text[at : self._at])
    if found is None:
      return False
    self._read = self._read_between
    return True

  def _read_between(self) -> bool:
    """What stands between messages: an end marker, and text that is dropped."""
    text, at = self._text, self._at
    found = _STARTS.find(text, at)
    self._at = found.start() if found else len(text) if self._ended else _STARTS.find_beginning(text, at)
    if found is None:
      return False
    self._read = self._read_header
    return True

  def _read_call_start(self) -> bool:
    """Space before the arguments. What is no object is no call."""
    rest = self._text[self._at :].lstrip(_SPACE)
    self._at = len(self._text) - len(rest)
    if not rest:
      return False
    if rest[0] == "{":
      self._translator = ValueTranslator(JSON)
      self._found.append(CallPart(self._name, "", is_last=False))
      self._read = self._read_arguments
    else:
      self._read = self._read_body
    return True

  def _read_arguments(self) -> bool:
    written, self._at, status = self._translator.feed(self._text, self._at, ended=self._ended)
    is_last = status is not Status.MORE
    if written or is_last:
      self._found.append(CallPart(None, written, is_last))
    if is_last:
      self._read = self._read_between
    return is_last
