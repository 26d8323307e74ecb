"""Recognizes markers and short headers in text that is still arriving. Knows no format.

Every function answers from the text so far alone, and an answer other than "wait" never changes with more text.
"""

from collections.abc import Sequence
import functools
import re

# Space between the parts of a header; more of it makes the header no header. A constrained output has up to 34
# characters of it (constraint_compiler.WHITESPACE).
SPACE = re.compile(r"[ \t\r\n]{0,64}")
# A tool's name in a header, and the name of an argument.
NAME = re.compile(r"(?P<name>[^\s\"'<>\[\](){}=,:｜|]{1,128})")
KEY = re.compile(r"(?P<key>[^\n\"<>]{1,256})")
PYTHON_NAME = re.compile(r"(?P<name>[A-Za-z_][\w.]{0,127})")


class Shape:
  """A sequence of literals and runs of characters, such as a call's header."""

  def __init__(self, *parts: str | re.Pattern[str]):
    """Args: parts: a literal, or a pattern of one run of characters. The last one must be a literal."""
    self._atoms: list[str] = []
    for part in parts:
      self._atoms += map(re.escape, part) if isinstance(part, str) else [part.pattern]

  # Compiled at the first use: a server uses the shapes of one model's format, and all of them would take 20 ms of its
  # start.
  @functools.cached_property
  def _whole(self) -> re.Pattern[str]:
    return re.compile("".join(self._atoms))

  @functools.cached_property
  def _beginning(self) -> re.Pattern[str]:
    # Each further atom is optional, and the text must end where the atoms do.
    return re.compile("(?:".join(["", *self._atoms]) + ")?" * len(self._atoms) + r"\Z")

  def match(self, text: str, at: int) -> re.Match[str] | None:
    """Returns the match that begins at text[at], or None."""
    return self._whole.match(text, at)

  def may_begin(self, text: str, at: int) -> bool:
    """Returns whether more text could make text[at:] match."""
    return self._beginning.match(text, at) is not None


class Markers:
  """A set of literals to find in text."""

  def __init__(self, markers: Sequence[str]):
    self._pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")
    self._markers = tuple(markers)
    self._firsts = frozenset(marker[0] for marker in markers)
    self._longest = max(map(len, markers), default=0)

  def find(self, text: str, at: int) -> re.Match[str] | None:
    """Returns the first marker from text[at] on."""
    return self._pattern.search(text, at)

  def find_beginning(self, text: str, at: int) -> int:
    """Returns where an incomplete marker begins at the end of text[at:]; the text's length if there is none."""
    for place in range(max(at, len(text) - self._longest + 1), len(text)):
      if text[place] in self._firsts and any(marker.startswith(text[place:]) for marker in self._markers):
        return place
    return len(text)
