"""Turns tokens into text as they arrive: whole characters, cut before a stop string. Knows no requests and no gRPC.

The work is amortized O(1) a token, and the text does not depend on how the tokens are split into steps.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
import functools


class Detokenizer:
  """Decodes token ids into text of whole characters.

  The bytes of a character may span several tokens, so they go through an incremental UTF-8 decoder, which holds back an
  incomplete tail. Invalid bytes become U+FFFD, one for each maximal invalid piece (Unicode 15, section 3.9, as in every
  browser). A tail that is incomplete when the tokens end is dropped.
  """

  def __init__(self, token_bytes: Callable[[int], bytes]):
    """Args: token_bytes: returns a token's bytes; empty for a token that is not text."""
    self._token_bytes = token_bytes
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

  def push(self, token_ids: Iterable[int]) -> str:
    """Returns the text that these tokens complete."""
    return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))


class TokenPlaces:
  """Finds where tokens begin in the text of a `Detokenizer`, in characters.

  A token that adds nothing to the text (an omitted special token, a part of a character) begins where the next one
  does. Tokens of a stop string, which the text excludes, begin where they would be.
  """

  def __init__(self, token_bytes: Callable[[int], bytes]):
    """Args: token_bytes: see Detokenizer."""
    self._token_bytes = token_bytes
    self._detokenizer = Detokenizer(token_bytes)
    self._end = 0

  def push(self, token_id: int) -> int:
    """Returns where the next token begins."""
    begin = self._end
    self._end += len(self._detokenizer.push((token_id,)))
    try:
      # The token's own whole characters are the last ones; U+FFFD for earlier invalid bytes may precede them.
      return self._end - len(self._token_bytes(token_id).decode())
    except UnicodeDecodeError:
      return begin

  @property
  def end(self) -> int:
    """The number of characters so far."""
    return self._end


class StopStrings:
  """Finds the stop string that completes first, and holds back text that may begin one.

  Each string has a Knuth-Morris-Pratt automaton (SIAM J. Comput. 6(2), 1977). Its state is the length of the longest
  suffix of the text that begins the string, which is exactly the text to hold back. If one character completes two
  strings, the longer wins, so the text ends before both.

  min_tokens follows vLLM: a stop string counts if its last character comes after the first min_tokens tokens, wherever
  it began; the text then ends before its beginning. A string that is complete within them remains text.
  """

  def __init__(self, stops: Sequence[str]):
    """Args: stops: non-empty strings."""
    self._automata = [(stop, _failure(stop)) for stop in dict.fromkeys(stops)]
    self._states = [0] * len(self._automata)
    self._held = ""
    self.matched: str | None = None

  def push(self, text: str, *, may_match: bool = True) -> str:
    """Returns the text that is now safe to show; after a match, an empty one. Sets `matched`.

    Args:
      text: the next text.
      may_match: False for text of the first min_tokens tokens: a stop string may begin in it, but not end.
    """
    if not self._automata or self.matched is not None:
      return text if self.matched is None else ""
    for at, char in enumerate(text):
      complete = ""
      for index, (stop, failure) in enumerate(self._automata):
        state = self._states[index]
        while state and stop[state] != char:
          state = failure[state]
        if stop[state] == char:
          state += 1
        if state == len(stop):
          complete = max(complete, stop, key=len)
          state = failure[state]
        self._states[index] = state
      if complete and may_match:
        self.matched = complete
        seen = self._held + text[: at + 1]
        self._held = ""
        return seen[: len(seen) - len(complete)]
    seen = self._held + text
    shown = len(seen) - max(self._states)
    self._held = seen[shown:]
    return seen[:shown]

  def flush(self) -> str:
    """Returns the held text when the output has ended, since no stop string can complete."""
    held, self._held = self._held, ""
    return held


@functools.lru_cache(maxsize=256)
def _failure(stop: str) -> tuple[int, ...]:
  """Returns failure[k], the length of the longest proper prefix of `stop` that is also a suffix of stop[:k]."""
  failure = [0] * (len(stop) + 1)
  state = 0
  for index in range(1, len(stop)):
    while state and stop[index] != stop[state]:
      state = failure[state]
    if stop[index] == stop[state]:
      state += 1
    failure[index + 1] = state
  return tuple(failure)
