"""Translates a value, in the notation that a model writes, into JSON while it arrives. Knows no call.

The time is linear, and at most a word or a part of an escape is held back. What comes out of a complete value is valid
JSON, with the separators of Python's json module.
"""

from collections.abc import Mapping
import dataclasses
import enum
import functools
import json
import re

# Limit of nested lists and objects, and of a number's or a word's characters.
MAX_DEPTH = 128
_MAX_WORD = 1024
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]*")
# Escapes of one letter that JSON has.
_JSON_ESCAPES = frozenset('"\\/bfnrt')


class Status(enum.Enum):
  """How far a translation has come."""

  MORE = enum.auto()
  DONE = enum.auto()
  WRONG = enum.auto()


class _Expected(enum.Enum):
  """What may come next."""

  VALUE = enum.auto()
  FIRST_VALUE = enum.auto()
  KEY = enum.auto()
  FIRST_KEY = enum.auto()
  COLON = enum.auto()
  COMMA = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Notation:
  """How a model writes values.

  Attributes:
    quotes: the marks around strings.
    has_escapes: whether a backslash begins an escape in a string.
    words: words and the JSON that they mean.
    bare_keys: whether an object's keys may lack quotes.
    bare_strings: whether other words are strings.
    has_tuples: whether (...) is a list.
  """

  quotes: tuple[str, ...]
  has_escapes: bool
  words: Mapping[str, str]
  bare_keys: bool = False
  bare_strings: bool = False
  has_tuples: bool = False


_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
JSON = Notation(('"',), has_escapes=True, words=_JSON_WORDS)
PYTHON = Notation(
  ('"', "'"),
  has_escapes=True,
  words={"True": "true", "False": "false", "None": "null", **_JSON_WORDS},
  has_tuples=True,
)
FUNCTION_GEMMA = Notation(("<escape>", '"'), has_escapes=False, words=_JSON_WORDS, bare_keys=True, bare_strings=True)
GEMMA4 = dataclasses.replace(FUNCTION_GEMMA, quotes=('<|"|>', '"'))


def quote_text(text: str) -> str:
  """Returns the inside of a JSON string with this text."""
  return json.dumps(text, ensure_ascii=False)[1:-1]


@functools.lru_cache(maxsize=16)
def _string_stops(quote: str, *, has_escapes: bool) -> re.Pattern[str]:
  """Returns the pattern of what ends a string's plain text."""
  return re.compile(re.escape(quote) + (r"|\\" if has_escapes else ""))


class ValueTranslator:
  """Translates one value, which must be an object, or the keyword arguments of a Python call as an object."""

  def __init__(self, notation: Notation, *, keywords: bool = False):
    """Args: notation: how the model writes it. keywords: whether the text is a call's `name=value, ...)`."""
    self._notation = notation
    # The closing characters of what is open.
    self._open: list[str] = [")"] if keywords else []
    self._keywords = keywords
    self._expected = _Expected.FIRST_KEY if keywords else _Expected.VALUE
    self._began = not keywords
    self._quote = ""
    self._is_key = False

  def feed(self, text: str, at: int, *, ended: bool) -> tuple[str, int, Status]:
    """Translates text[at:], as far as it is certain.

    Args:
      text, at: the text, from the first character that was not consumed yet.
      ended: whether the text is all there will be.

    Returns:
      (JSON text, where the rest of the text begins, status). After DONE the rest is what follows the value; after WRONG
      it begins with what cannot be.
    """
    out: list[str] = [] if self._began else ["{"]
    self._began = True
    status = Status.MORE
    while status is Status.MORE:
      if self._quote:
        before = at
        at = self._read_string(text, at, out)
        if at == before or at == len(text):
          break
        continue
      at = self._skip_space(text, at)
      if at == len(text):
        break
      step = self._read_token(text, at, out, ended=ended)
      if step is None:
        break
      at, status = step
    if ended and status is Status.MORE:
      status = Status.WRONG
    return "".join(out), at, status

  def _skip_space(self, text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()

  def _read_token(self, text: str, at: int, out: list[str], *, ended: bool) -> tuple[int, Status] | None:
    """Returns (where the token ends, status), or None while it is incomplete."""
    char, expected = text[at], self._expected
    top = self._open[-1] if self._open else ""
    is_object = top == "}" or self._is_call(top)
    if char == top and expected is not _Expected.COLON and not (expected is _Expected.FIRST_VALUE and is_object):
      return self._close(at, out)
    match expected:
      case _Expected.COMMA:
        if char != ",":
          return at, Status.WRONG
        # A closing character may follow, so the separator comes with the next token.
        self._expected = _Expected.KEY if is_object else _Expected.VALUE
        return at + 1, Status.MORE
      case _Expected.COLON:
        if char != ("=" if self._is_call(top) else ":"):
          return at, Status.WRONG
        self._expected = _Expected.FIRST_VALUE
        out.append(": ")
        return at + 1, Status.MORE
      case _:
        return self._read_item(text, at, out, ended=ended)

  def _is_call(self, top: str) -> bool:
    return self._keywords and len(self._open) == 1 and top == ")"

  def _read_item(self, text: str, at: int, out: list[str], *, ended: bool) -> tuple[int, Status] | None:
    """Reads a key, or the beginning of a value."""
    is_key = self._expected in (_Expected.KEY, _Expected.FIRST_KEY)
    separator = ", " if self._expected in (_Expected.KEY, _Expected.VALUE) and self._open else ""
    top = self._open[-1] if self._open else ""
    for quote in () if is_key and self._is_call(top) else self._notation.quotes:
      if text.startswith(quote, at):
        out.append(f'{separator}"')
        self._quote, self._is_key = quote, is_key
        return at + len(quote), Status.MORE
      if not ended and quote.startswith(text[at:]):
        return None
    if not is_key:
      opened = {"{": ("{", "}"), "[": ("[", "]")} | ({"(": ("[", ")")} if self._notation.has_tuples else {})
      if text[at] in opened:
        written, closer = opened[text[at]]
        if len(self._open) >= MAX_DEPTH or (not self._open and closer != "}"):
          return at, Status.WRONG
        out.append(separator + written)
        self._open.append(closer)
        self._expected = _Expected.FIRST_KEY if closer == "}" else _Expected.FIRST_VALUE
        return at + 1, Status.MORE
    found = _WORD.match(text, at)
    if found is None or not self._open or len(found[0]) > _MAX_WORD:
      return at, Status.WRONG
    if found.end() == len(text):
      return None
    word = found[0]
    if is_key:
      if not (self._notation.bare_keys or self._is_call(top)):
        return at, Status.WRONG
      out.append(f'{separator}"{quote_text(word)}"')
      self._expected = _Expected.COLON
      return found.end(), Status.MORE
    written = word if _NUMBER.fullmatch(word) else self._notation.words.get(word)
    if written is None:
      if not self._notation.bare_strings:
        return at, Status.WRONG
      written = f'"{quote_text(word)}"'
    out.append(separator + written)
    self._expected = _Expected.COMMA
    return found.end(), Status.MORE

  def _close(self, at: int, out: list[str]) -> tuple[int, Status]:
    closer = self._open[-1]
    out.append("}" if closer == "}" or self._is_call(closer) else "]")
    self._open.pop()
    self._expected = _Expected.COMMA
    return at + 1, Status.MORE if self._open else Status.DONE

  def _read_string(self, text: str, at: int, out: list[str]) -> int:
    """Reads the string's text, and its end if it is there; returns where it stopped."""
    quote = self._quote
    found = _string_stops(quote, has_escapes=self._notation.has_escapes).search(text, at)
    end = len(text) if found is None else found.start()
    if found is None and len(quote) > 1:
      end = max(at, next((end - size for size in range(len(quote) - 1, 0, -1) if text.endswith(quote[:size])), end))
    if end > at:
      out.append(quote_text(text[at:end]))
    if found is None:
      return end
    if found[0] == "\\":
      return self._read_escape(text, end, out)
    out.append('"')
    self._quote = ""
    self._expected = _Expected.COLON if self._is_key else _Expected.COMMA
    return found.end()

  def _read_escape(self, text: str, at: int, out: list[str]) -> int:
    """Reads an escape; returns where it ends, or `at` while it is incomplete. An unknown one keeps its backslash."""
    if at + 1 >= len(text):
      return at
    char = text[at + 1]
    size = 4 if char == "u" else 2 if char == "x" and "'" in self._notation.quotes else 0
    if size:
      digits = text[at + 2 : at + 2 + size]
      found = _HEX.fullmatch(digits)
      if found is not None and len(digits) < size:
        return at
      out.append(f"\\u{digits:0>4}" if found is not None else quote_text("\\" + char))
      return at + 2 + (size if found is not None else 0)
    if char in _JSON_ESCAPES:
      out.append("\\" + char)
    elif char == "'":
      out.append("'")
    elif char != "\n" or "'" not in self._notation.quotes:  # in Python, the string goes on in the next line
      out.append(quote_text("\\" + char))
    return at + 2
