"""Tokens to text as they arrive: whole characters only, cut before a stop string. Knows no requests and no gRPC.

Both classes do work in proportion to what they are given (amortised O(1) a token) and give the same text however the
tokens are split into steps.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
import functools


class Detokenizer:
  """Token ids in, text out, never half a character.

  A character's bytes may be spread over several tokens, so the bytes of the tokens go through an incremental UTF-8
  decoder, which keeps an unfinished tail to itself. Bytes that cannot be UTF-8 become U+FFFD, one for each maximal
  invalid piece (Unicode 15, section 3.9, as in every browser), and a tail still unfinished when the tokens end is
  never shown: it is half a character.
  """

  def __init__(self, token_bytes: Callable[[int], bytes]):
    """Args: token_bytes: the bytes that a token id stands for; empty for one that is not text."""
    self._token_bytes = token_bytes
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

  def push(self, token_ids: Iterable[int]) -> str:
    """Returns the text that these tokens complete."""
    return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))


class TokenPlaces:
  """Where tokens begin in the text that a `Detokenizer` makes of them, in characters.

  A token that adds nothing to the text (a special token that is left out, a part of a character) begins where the next
  one does. Tokens of a stop string, which the text ends before, begin where they would stand.
  """

  def __init__(self, token_bytes: Callable[[int], bytes]):
    """Args: token_bytes: as the detokenizer's."""
    self._token_bytes = token_bytes
    self._detokenizer = Detokenizer(token_bytes)
    self._end = 0

  def push(self, token_id: int) -> int:
    """Where the next token begins."""
    begin = self._end
    self._end += len(self._detokenizer.push((token_id,)))
    try:
      # Whole characters of its own are the last ones; before them may stand the sign for what never became one.
      return self._end - len(self._token_bytes(token_id).decode())
    except UnicodeDecodeError:
      return begin

  @property
  def end(self) -> int:
    """Characters so far."""
    return self._end


class StopStrings:
  """Finds the stop string that is completed first, and holds back text that may turn out to begin one.

  One Knuth-Morris-Pratt automaton a string (SIAM J. Comput. 6(2), 1977), fed character by character: its state is the
  length of the longest suffix of the text that begins the string, which is exactly what must be held back. Of two
  strings completed by one character the longer wins, so the text ends before both.

  min_tokens, by vLLM's rule: a stop string counts if its last character comes after the first min_tokens tokens,
  wherever it began; the text then ends before its beginning. One that is complete within them is text, and stays so.
  """

  def __init__(self, stops: Sequence[str]):
    """Args: stops: non-empty strings."""
    self._automata = [(stop, _failure(stop)) for stop in dict.fromkeys(stops)]
    self._states = [0] * len(self._automata)
    self._held = ""
    self.matched: str | None = None

  def push(self, text: str, *, may_match: bool = True) -> str:
    """Returns the text that is now safe to show; after a match, nothing more. Sets `matched`.

    Args:
      text: what comes next.
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
    """Returns what was held back: the text ended, so it begins no stop string."""
    held, self._held = self._held, ""
    return held


@functools.lru_cache(maxsize=256)
def _failure(stop: str) -> tuple[int, ...]:
  """failure[k]: the longest proper prefix of `stop` that is also a suffix of stop[:k]."""
  failure = [0] * (len(stop) + 1)
  state = 0
  for index in range(1, len(stop)):
    while state and stop[index] != stop[state]:
      state = failure[state]
    if stop[index] == stop[state]:
      state += 1
    failure[index + 1] = state
  return tuple(failure)
