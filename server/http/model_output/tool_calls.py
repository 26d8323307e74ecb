"""Finds tool calls in a model's output. Knows no request and no socket; may not change text that is not a call.

A model writes calls as text, in the form of its training. A call's parts come out as soon as its name is known and its
arguments have begun; until then a malformed call comes out as the text it was. After that the arguments come out as the
model wrote them: if they break off, the call ends there, and what follows is text. The result does not depend on how
the output is split into pushes, and the time is linear in the output's length.
"""

from collections.abc import Callable, Mapping, Sequence
import json
from typing import Any

from server.http.model_output.argument_types import types_of_argument, write_argument
from server.http.model_output.call_formats import (
  BracedArguments,
  CallFormat,
  CallHead,
  CallObject,
  KeywordArguments,
  NoArguments,
  TaggedArguments,
)
from server.http.model_output.output_pieces import CallPart
from server.http.model_output.text_shapes import NAME, SPACE, Markers, Shape
from server.http.model_output.value_translator import JSON, PYTHON, Status, ValueTranslator, quote_text

# Limit of characters that wait for one call or one argument; a longer candidate is text.
MAX_CALL_CHARS = 256 << 10
# Limit of candidates in one output, calls or not; later ones are text.
MAX_CALLS = 128
_SPACE = " \t\r\n"
_MAX_SPACE = 64
_OBJECT_HEADS = [
  Shape("{", SPACE, '"name"', SPACE, ":", SPACE, '"', NAME, '"', SPACE, ",", SPACE, f'"{key}"', SPACE, ":", SPACE, "{")
  for key in ("arguments", "parameters")
]
# The first keys of objects that may be calls, in another order or with other fields.
_FIRST_KEYS = [Shape("{", SPACE, f'"{key}"') for key in ("name", "arguments", "parameters", "id", "type", "function")]


class CallScanner:
  """Splits text into text and parts of calls, in order. Between pushes it holds text that may begin a call."""

  def __init__(self, form: CallFormat, tools: Mapping[str, Any]):
    """Args: form: how the model writes calls. tools: the offered tools' parameters, JSON schemas, by name."""
    self._form = form
    self._tools = tools
    self._markers = Markers(form.markers)
    self._text = ""
    self._at = 0
    self._ended = False
    self._found: list[str | CallPart] = []
    self._read: Callable[[], bool] = self._read_start if form.bare_heads else self._read_text
    self._num_candidates = 0
    # Space after a call is part of it.
    self._after_call = False
    # What a candidate has consumed, in case it is text.
    self._kept: list[str] = []
    self._num_kept = 0
    self._translator = ValueTranslator(JSON)
    self._closers: Sequence[Shape] = ()
    self._name = ""
    self._tags: TaggedArguments | None = None
    self._closer = Markers(())
    self._types: frozenset[str] = frozenset()
    self._num_arguments = 0
    self._trims_line = False

  def push(self, text: str) -> list[str | CallPart]:
    """Adds text; returns what has become certain."""
    self._text = self._text[self._at :] + text
    self._at = 0
    while self._at < len(self._text) and self._read():
      pass
    found, self._found = self._found, []
    return found

  def flush(self) -> list[str | CallPart]:
    """Ends the output; returns all held text, and the last part of a call that is not complete."""
    self._ended = True
    while self._read():
      pass
    found, self._found = self._found, []
    return found

  # Each of the following methods reads from `_text` at `_at` and returns whether it got on; else it needs more text.

  def _show(self, text: str) -> None:
    if self._after_call:
      text = text.lstrip(_SPACE)
    if text:
      self._after_call = False
      self._found.append(text)

  def _read_start(self) -> bool:
    """Space, and a call without a marker if there is one."""
    first = self._at + len(self._text[self._at :]) - len(self._text[self._at :].lstrip(_SPACE))
    is_undecided = not self._ended and first - self._at <= _MAX_SPACE
    if first == len(self._text) and is_undecided:
      return False
    if first < len(self._text) and first - self._at <= _MAX_SPACE:
      began = self._begin_call(self._form.bare_heads, first)
      if began is not False:
        return began is True
    self._read = self._read_text
    return True

  def _begin_call(self, heads: Sequence[CallHead], at: int) -> bool | None:
    """Returns whether a call's head begins at `at`, and then goes on to its arguments; None while it is undecided."""
    if self._num_candidates >= MAX_CALLS:
      return False
    for head in heads:
      found = head.shape.match(self._text, at)
      if found is not None:
        self._num_candidates += 1
        self._enter_call(head, found.groupdict().get("name"), self._text[self._at : found.end() - head.num_unread])
        if isinstance(head.arguments, KeywordArguments):
          self._at = found.start("first")
        else:
          self._at = found.end() - head.num_unread
        return True
    if not self._ended and any(head.shape.may_begin(self._text, at) for head in heads):
      return None
    return False

  def _enter_call(self, head: CallHead, name: str | None, text: str) -> None:
    self._name = name or ""
    match head.arguments:
      case CallObject():
        self._kept, self._num_kept = [text], len(text)
        self._read = self._read_object_head
      case BracedArguments(notation):
        self._start_arguments(ValueTranslator(notation))
        self._read = self._read_arguments
      case KeywordArguments():
        self._start_arguments(ValueTranslator(PYTHON, keywords=True))
        self._read = self._read_arguments
      case NoArguments():
        self._found.append(CallPart(self._name, "{}", is_last=True))
        self._end_call()
      case TaggedArguments():
        self._tags = head.arguments
        self._num_arguments = 0
        self._found.append(CallPart(self._name, "", is_last=False))
        self._read = self._read_tags

  def _start_arguments(self, translator: ValueTranslator) -> None:
    self._translator = translator
    self._found.append(CallPart(self._name, "", is_last=False))

  def _end_call(self) -> None:
    self._closers = self._form.closers
    self._after_call = True
    self._read = self._read_end

  def _break_call(self) -> None:
    """Ends a call whose arguments are malformed or incomplete. What follows is text."""
    self._found.append(CallPart(None, "", is_last=True))
    if self._ended:
      self._at = len(self._text)
    self._end_call()

  def _read_text(self) -> bool:
    """Text, up to a marker."""
    text, at = self._text, self._at
    if at == len(text):
      return False
    found = self._markers.find(text, at) if self._num_candidates < MAX_CALLS else None
    if found is None:
      self._at = len(text) if self._ended else self._markers.find_beginning(text, at)
      self._show(text[at : self._at])
      return False
    self._show(text[at : found.start()])
    self._at = found.start()
    began = self._begin_call(self._form.heads, self._at)
    if began is False:
      self._show(found[0])
      self._at = found.end()
      return True
    return began is True

  def _read_object_head(self) -> bool:
    """The beginning of a call object, up to its arguments."""
    text, at = self._text, self._at
    for shape in _OBJECT_HEADS:
      if found := shape.match(text, at):
        self._name = found["name"]
        self._start_arguments(ValueTranslator(JSON))
        self._at = found.end() - 1
        self._read = self._read_object_arguments
        return True
    if not self._ended and any(shape.may_begin(text, at) for shape in _OBJECT_HEADS):
      return False
    if not any(shape.match(text, at) for shape in _FIRST_KEYS):
      if not self._ended and any(shape.may_begin(text, at) for shape in _FIRST_KEYS):
        return False
      self._give_up()
      return True
    self._translator = ValueTranslator(JSON)
    self._read = self._read_whole_object
    return True

  def _give_up(self) -> None:
    """Turns a candidate into text, as far as it was read."""
    self._show("".join(self._kept))
    self._kept = []
    self._read = self._read_text

  def _read_whole_object(self) -> bool:
    """An object with its keys in another order, or with arguments that are no object: held until it is complete."""
    at, limit = self._at, self._at + MAX_CALL_CHARS - self._num_kept
    is_long = len(self._text) > limit
    text = self._text[:limit] if is_long else self._text
    _, self._at, status = self._translator.feed(text, at, ended=self._ended)
    self._kept.append(text[at : self._at])
    self._num_kept += self._at - at
    if status is Status.MORE and not is_long:
      return False
    head = self._kept[0]
    call = (
      _read_call("".join(self._kept[1:]), self._tools, is_marked=bool(head.strip(_SPACE)))
      if (status is Status.DONE)
      else None
    )
    if call is None:
      self._give_up()
      return True
    self._kept = []
    self._found.append(CallPart(call[0], call[1], is_last=True))
    self._end_call()
    return True

  def _translate(self) -> Status:
    written, self._at, status = self._translator.feed(self._text, self._at, ended=self._ended)
    if written or status is Status.DONE:
      self._found.append(CallPart(None, written, is_last=status is Status.DONE))
    return status

  def _read_arguments(self) -> bool:
    status = self._translate()
    if status is Status.DONE:
      self._end_call()
    elif status is Status.WRONG:
      self._break_call()
    return status is not Status.MORE

  def _read_object_arguments(self) -> bool:
    status = self._translate()
    if status is Status.DONE:
      # Reads the rest of the object as an object with a key already there.
      self._translator = ValueTranslator(JSON)
      self._translator.feed('{"":0 ', 0, ended=False)
      self._read = self._read_object_rest
    elif status is Status.WRONG:
      self._break_call()
    return status is not Status.MORE

  def _read_object_rest(self) -> bool:
    """What follows the arguments in a call object, such as the call's id. It is dropped."""
    _, self._at, status = self._translator.feed(self._text, self._at, ended=self._ended)
    if status is not Status.MORE:
      if self._ended and status is Status.WRONG:
        self._at = len(self._text)
      self._end_call()
    return status is not Status.MORE

  def _read_end(self) -> bool:
    """What may follow a call."""
    began = self._begin_call(self._form.next_heads, self._at)
    if began is not False:
      return began is True
    while self._closers:
      closer, text = self._closers[0], self._text
      if found := closer.match(text, self._at):
        self._at = found.end()
      elif closer.may_begin(text, self._at):
        if not self._ended:
          return False
        self._at = len(text)
      self._closers = self._closers[1:]
    self._read = self._read_text
    return True

  def _read_tags(self) -> bool:
    """The beginning of an argument, or the end of the call."""
    tags, text, at = self._tags, self._text, self._at
    assert tags is not None, "a call with tags has them"
    for shape in tags.endings:
      if found := shape.match(text, at):
        self._at = found.end()
        self._found.append(CallPart(None, "}" if self._num_arguments else "{}", is_last=True))
        self._end_call()
        return True
    for shape in tags.openers:
      if found := shape.match(text, at):
        self._at = found.end()
        self._begin_argument(tags, found.groupdict())
        return True
    if not self._ended and any(shape.may_begin(text, at) for shape in (*tags.endings, *tags.openers)):
      return False
    self._break_call()
    return True

  def _begin_argument(self, tags: TaggedArguments, groups: dict[str, str]) -> None:
    ((kind, key),) = groups.items()
    key = key.strip(_SPACE)
    self._types = frozenset({"string"}) if kind == "string_key" else types_of_argument(self._tools.get(self._name), key)
    if kind == "json_key":
      self._types -= {"string"}
    separator = ", " if self._num_arguments else "{"
    self._num_arguments += 1
    self._found.append(CallPart(None, f'{separator}"{quote_text(key)}": ', is_last=False))
    self._trims_line = tags.trims_lines
    self._closer = Markers([f"\n{tags.closer}", tags.closer] if tags.trims_lines else [tags.closer])
    self._kept, self._num_kept = [], 0
    if self._types == {"string"}:
      self._found.append(CallPart(None, '"', is_last=False))
    self._read = self._read_argument

  def _read_argument(self) -> bool:
    """The text of an argument: strings come out at once, other types once they are complete."""
    text = self._text
    if self._trims_line and self._at < len(text):
      closer = self._closer.find(text, self._at)
      if closer is None or closer.start() != self._at:
        if closer is None and not self._ended and self._closer.find_beginning(text, self._at) == self._at:
          return False
        self._at += text.startswith("\n", self._at)
      self._trims_line = False
    found = self._closer.find(text, self._at)
    end = found.start() if found else len(text) if self._ended else self._closer.find_beginning(text, self._at)
    is_long = end - self._at + self._num_kept > MAX_CALL_CHARS and self._types != {"string"}
    if is_long:
      found, end = None, self._at + MAX_CALL_CHARS - self._num_kept
    part = text[self._at : end]
    self._at = end
    if self._types == {"string"}:
      if part or found:
        self._found.append(CallPart(None, quote_text(part) + ('"' if found else ""), is_last=False))
    else:
      self._kept.append(part)
      self._num_kept += len(part)
      if found:
        self._found.append(CallPart(None, write_argument("".join(self._kept), self._types), is_last=False))
        self._kept = []
    if found:
      self._at = found.end()
      self._read = self._read_tags
      return True
    if self._ended or is_long:
      self._break_call()
      return True
    return False


def _read_call(text: str, tools: Mapping[str, Any], *, is_marked: bool) -> tuple[str, str] | None:
  """Returns the name and the arguments of a call object; None if it is not one.

  An object without arguments, in an output without a marker, is a call only of an offered tool.
  """
  try:
    value = json.loads(text, strict=False)
    if isinstance(value.get("function"), dict):
      value = value["function"]
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or len(name) > _MAX_SPACE * 2:
      return None
    if arguments is None and not is_marked and name not in tools:
      return None
    if isinstance(arguments, str):
      arguments = json.loads(arguments, strict=False)
    if not isinstance(arguments, dict | None):
      return None
    # Python reads more than JSON, such as infinities and lone surrogates, which cannot be sent.
    written = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    (written + name).encode()
  except (ValueError, RecursionError):
    return None
  return name, written
