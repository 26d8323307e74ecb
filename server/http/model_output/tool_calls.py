"""Finds tool calls in a model's output. Knows no request and no socket; may not change text that is not a call.

A model writes calls as text, in the form of its training. The scanner returns a call once it is complete, if it is
well-formed and names an offered tool, and returns everything else as text. The result does not depend on how the output
is split into pieces. The time is linear in the output's length: the scanner parses a candidate again only when it has
grown by a quarter, and gives it up at MAX_CALL_CHARS.
"""

from collections.abc import Iterable
import dataclasses
import functools
import json
import re
import secrets
from typing import Any

# Limit of characters that wait for one call or one list of calls; a longer candidate is text.
MAX_CALL_CHARS = 256 << 10
# Limit of candidates in one output, calls or not; later ones are text.
MAX_CALLS = 128
_SPACE = " \t\r\n"
# Space between a marker and the JSON.
_MAX_SPACE = 16
_SEPARATORS = re.compile(r"[ \t\r\n;]*")
# Allows control characters in strings, since models write line breaks there.
_decode = json.JSONDecoder(strict=False).raw_decode


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
  """A call: the tool's name, and its arguments as the text of a JSON object."""

  name: str
  arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallFormat:
  """How a family of models writes calls.

  Attributes:
    marker: text before calls; may be empty.
    bare: whether an output that begins with `opener` is calls without a marker.
    opener: the first character of the JSON: "{" of a call, "[" of a list of calls.
    ending: text after each call; empty: calls last to the end of the output.
    arguments: the key of a call's arguments.
    short_ids: whether the model's template requires ids of nine letters and digits.
  """

  marker: str
  bare: bool
  opener: str
  ending: str
  arguments: str = "arguments"
  short_ids: bool = False

  def new_id(self) -> str:
    """Returns a new id for a call."""
    return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


FORMATS = {
  # Hermes, Qwen2.5, Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
  "hermes": CallFormat("<tool_call>", False, "{", "</tool_call>"),
  # Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}; several have semicolons between them.
  "llama3": CallFormat("<|python_tag|>", True, "{", "", "parameters"),
  # Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
  "mistral": CallFormat("[TOOL_CALLS]", False, "[", "", short_ids=True),
}
PARSERS = ("auto", *FORMATS, "none")
# Text in the chat template by which each format is recognized.
_SIGNS = (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama3", '"parameters"'))


def find_format(parser: str, template: str | None) -> CallFormat | None:
  """Returns the format that --tool_call_parser selects for this chat template; None leaves calls in the text."""
  if parser == "auto":
    parser = next((name for name, sign in _SIGNS if sign in (template or "")), "none")
  return FORMATS.get(parser)


def forced_format(form: CallFormat | None) -> CallFormat:
  """Returns the format of forced calls, a list, for a model with this format."""
  return dataclasses.replace(form or FORMATS["hermes"], marker="", bare=True, opener="[", ending="")


@functools.lru_cache(maxsize=16)
def _beginning(form: CallFormat) -> re.Pattern[str]:
  """Returns the pattern of a call's beginning inside text."""
  if not form.marker:
    return re.compile(r"(?!)")
  return re.compile(f"{re.escape(form.marker)}[{_SPACE}]{{0,{_MAX_SPACE}}}{re.escape(form.opener)}")


class CallScanner:
  """Splits text into text and calls, in order. Between pushes it holds text that may begin a call."""

  def __init__(self, form: CallFormat, names: Iterable[str]):
    """Args: form: how the model writes calls. names: names of the offered tools."""
    self._form = form
    self._names = frozenset(names)
    self._held: list[str] = []
    self._size = 0
    # In a candidate: the held text begins with its marker.
    self._in_call = False
    self._look_at = 0
    # Only space has arrived.
    self._at_start = form.bare
    # Space after a call is part of it.
    self._after_call = False
    self._num_candidates = 0

  def push(self, text: str) -> list[str | ToolCall]:
    """Adds text; returns what has become certain."""
    if not (self._size or self._at_start or self._after_call or self._form.marker[:1] in text):
      return [text] if text else []  # nearly always
    self._held.append(text)
    self._size += len(text)
    return [] if self._size < self._look_at else self._scan(ended=False)

  def flush(self) -> list[str | ToolCall]:
    """Ends the output; returns all held text."""
    return self._scan(ended=True)

  def _scan(self, *, ended: bool) -> list[str | ToolCall]:
    text, at = "".join(self._held), 0
    found: list[str | ToolCall] = []
    while at < len(text):
      calls: list[ToolCall] = []
      if self._in_call:
        judged = self._judge(text, at, ended=ended)
        if judged is None:
          break
        stop, calls = judged
        self._in_call = False
      else:
        stop = self._find_candidate(text, at, ended=ended)
      if calls:
        found += calls
        self._after_call = True
      else:
        self._show(found, text[at:stop])
      if stop == at and not self._in_call:
        break
      at = stop
    self._held, self._size = [text[at:]], len(text) - at
    # A candidate is parsed again only when it has grown by a quarter, which keeps the total linear.
    self._look_at = min(self._size + self._size // 4 + _MAX_SPACE, MAX_CALL_CHARS) if self._in_call else 0
    return found

  def _show(self, found: list[str | ToolCall], text: str) -> None:
    if self._after_call:
      text = text.lstrip(_SPACE)
    if text:
      self._after_call = False
      found.append(text)

  def _find_candidate(self, text: str, at: int, *, ended: bool) -> int:
    """Returns where plain text from `at` ends. The rest is a candidate if `_in_call` is set, or may become one."""
    form = self._form
    if self._num_candidates >= MAX_CALLS:
      return len(text)
    start = -1
    if self._at_start:
      first = len(text) - len(text[at:].lstrip(_SPACE))
      self._at_start = first == len(text)
      if text.startswith(form.opener, first):
        start = first
    if start < 0:
      begun = _beginning(form).search(text, at)
      start = begun.start() if begun else -1
    if start >= 0:
      self._in_call = True
      self._num_candidates += 1
      return start
    if ended or not form.marker:
      return len(text)
    # A marker with only space after it, or a part of a marker.
    last = text.rfind(form.marker, max(at, len(text) - len(form.marker) - _MAX_SPACE))
    if last >= 0 and not text[last + len(form.marker) :].strip(_SPACE):
      return last
    for size in range(min(len(form.marker) - 1, len(text) - at), 0, -1):
      if text.endswith(form.marker[:size]):
        return len(text) - size
    return len(text)

  def _judge(self, text: str, at: int, *, ended: bool) -> tuple[int, list[ToolCall]] | None:
    """Returns (end of the candidate at text[at:], its calls, empty if it is text), or None while it is undecided."""
    form, limit = self._form, at + MAX_CALL_CHARS
    begun = _beginning(form).match(text, at)
    begin = begun.end() - 1 if begun else at
    is_long = len(text) >= limit
    if not form.ending:
      if is_long:
        return limit, []
      return (len(text), self._calls(text[begin:])) if ended else None
    span = 0
    while True:
      stop = text.find(form.ending, begin + 2 * span, limit)
      if stop < 0 and not (is_long or ended):
        return None
      body = text[begin : stop if stop >= 0 else min(len(text), limit)]
      try:
        value, end = _decode(body)
      except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") and stop >= 0:
          # The ending is inside a string of the arguments. Each attempt is twice as long as the one before.
          span = stop - begin
          continue
        wrong = error.pos
      except (ValueError, RecursionError):
        wrong = 0
      else:
        close = begin + end + len(body) - end - len(body[end:].lstrip(_SPACE))
        if text.startswith(form.ending, close) and close + len(form.ending) <= limit:
          return close + len(form.ending), self._checked([value])
        if ended and not is_long and form.ending.startswith(text[close:]):
          return len(text), self._checked([value])
        wrong = end
      stop = text.find(form.ending, begin + wrong, limit)
      return (stop + len(form.ending) if stop >= 0 else min(len(text), limit)), []

  def _calls(self, text: str) -> list[ToolCall]:
    """Returns the calls in JSON that consists of calls; else none."""
    values, at = [], 0
    try:
      while at < len(text) and len(values) <= MAX_CALLS:
        value, at = _decode(text, at)
        values += value if self._form.opener == "[" else [value]
        at = _SEPARATORS.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]  (it matches anything)
    except (ValueError, RecursionError, TypeError):
      return []
    return self._checked(values)

  def _checked(self, values: list[Any]) -> list[ToolCall]:
    """Returns all values as calls; empty if one is not a call, or if there are too many."""
    calls = [call for value in values[: MAX_CALLS + 1] if (call := self._call(value)) is not None]
    return calls if len(calls) == len(values) <= MAX_CALLS else []

  def _call(self, value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self._names:
      return None
    arguments = value.get("arguments", value.get("parameters"))
    try:
      if isinstance(arguments, str):
        arguments = json.loads(arguments)
      if not isinstance(arguments, dict | None):
        return None
      # Python reads more than JSON, such as infinities and lone surrogates, which cannot be sent.
      text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
      text.encode()
    except (ValueError, RecursionError):
      return None
    return ToolCall(value["name"], text)
