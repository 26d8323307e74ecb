"""Proposes what followed the latest tokens when they occurred before (prompt lookup). Pure Python, O(1) a token.

Answers repeat their prompt in edits, extraction and summaries, and repeat themselves in code and tables. The index is
that of LZ77 compressors: a table from the hash of two tokens to their latest position, and a link from each position to
the one before. Memory is 8 bytes a token, and the table of at most 256 KiB.
"""

from array import array
from collections.abc import Iterable

from engine.request import Request
from engine.speculation.drafter import NO_DRAFT, Draft

LEAST_MATCH = 2  # tokens that must have occurred before
LONGEST_MATCH = 8  # tokens compared; longer matches count as this
MOST_LINKS = 8  # earlier positions compared for a proposal
MOST_NEW_TOKENS = 1024  # tokens indexed in an update, in 0.2 ms; a long prompt takes several updates
_TABLE_SIZES = 256, 1 << 16
_MULTIPLIER = 40503  # odd, near 2**16 divided by the golden ratio

# Proposals after short matches are accepted less often, and so are repetitions of the output's own common words: a copy
# of the prompt goes on. Length of a match -> source, by where it occurred before.
_OF_OUTPUT = ("", "", "ngram2", "ngram3", "ngram4", "ngram4", "ngram4", "ngram4", "ngram8")
_OF_PROMPT = tuple(source.replace("ngram", "prompt") for source in _OF_OUTPUT)
LONG_MATCHES = ("ngram4", "ngram8", "prompt4", "prompt8")


class NgramIndex:
  """The tokens of a sequence, and where their last ones occurred before."""

  def __init__(self, num_tokens: int, most_links: int = MOST_LINKS):
    """Args:
    num_tokens: expected length of the sequence, which sizes the table.
    most_links: earlier positions that `find_match` compares at most.
    """
    least, most = _TABLE_SIZES
    size = min(most, max(least, 1 << (num_tokens - 1).bit_length()))
    self._most_links = most_links
    self._mask = size - 1
    self._latest = array("i", [-1]) * size  # hash of two tokens -> latest position of the second one
    self._earlier = array("i")  # position -> earlier position with the same hash, or -1
    self._tokens = array("i")

  def __len__(self) -> int:
    return len(self._tokens)

  def extend(self, tokens: Iterable[int]) -> None:
    """Appends tokens; about 0.2 us each."""
    known, earlier, latest, mask = self._tokens, self._earlier, self._latest, self._mask
    position = len(known)
    before = known[-1] if position else -1
    for token in tokens:
      place = (before * _MULTIPLIER + token) & mask
      earlier.append(latest[place])
      latest[place] = position
      known.append(token)
      before = token
      position += 1

  @property
  def may_match(self) -> bool:
    """Whether the last two tokens may have occurred before; False is certain."""
    return bool(self._earlier) and self._earlier[-1] > 0

  def find_match(self) -> tuple[int, int]:
    """Returns the length of the longest earlier match of the last tokens, and the position after it.

    Of matches with one length it takes the latest. The length is 0 or LEAST_MATCH to LONGEST_MATCH.
    """
    tokens, earlier = self._tokens, self._earlier
    end = len(tokens) - 1
    best, position = 0, -1
    at = earlier[end] if end > 0 else -1
    for _ in range(self._most_links):
      if at <= 0:
        break
      # A match longer than the best one must also agree in this token.
      if best <= at and tokens[at - best] == tokens[end - best]:
        longest = min(LONGEST_MATCH, at + 1)
        length = 0
        while length < longest and tokens[at - length] == tokens[end - length]:
          length += 1
        if length > best and length >= LEAST_MATCH:
          best, position = length, at + 1
          if best == LONGEST_MATCH:
            break
      at = earlier[at]
    return best, position

  def read_continuation(self, position: int, count: int) -> tuple[int, ...]:
    """Returns the `count` tokens from `position` on. After the last token, those from `position` on repeat."""
    tokens = self._tokens
    found = tokens[position : position + count]
    if not found:
      return ()
    while len(found) < count:
      found += found[: count - len(found)]
    return tuple(found)


class NgramDrafter:
  """Implements engine.speculation.drafter.Drafter with an index of each request's prompt and output."""

  def __init__(self):
    self._indexes: dict[str, NgramIndex] = {}

  def num_indexed(self, request_id: str) -> int:
    """Returns how many of a request's tokens the index holds."""
    index = self._indexes.get(request_id)
    return 0 if index is None else len(index)

  def restore_index(self, request: Request, num_indexed: int) -> None:
    """Makes the index of the first `num_indexed` tokens of a request."""
    index = self._indexes[request.id] = NgramIndex(request.num_prompt_tokens + request.params.max_tokens)
    index.extend(request.known_tokens(0, num_indexed))

  def update(self, request: Request) -> bool:
    """See Drafter."""
    index = self._indexes.get(request.id)
    if index is None:
      index = self._indexes[request.id] = NgramIndex(request.num_prompt_tokens + request.params.max_tokens)
    first = len(index)
    outputs = request.output_token_ids
    num_prompt = len(request.prompt_token_ids)
    num_known = num_prompt + len(outputs)
    if first < num_known:
      if first >= num_prompt and num_known - first <= MOST_NEW_TOKENS:
        index.extend(outputs[first - num_prompt :])
      else:
        index.extend(request.known_tokens(first, min(num_known, first + MOST_NEW_TOKENS)))
    return len(index) == num_known and index.may_match

  def propose(self, request: Request, count: int) -> Draft:
    """See Drafter. Takes up to 5 us."""
    index = self._indexes.get(request.id)
    if index is None:
      return NO_DRAFT
    length, position = index.find_match()
    if not length:
      return NO_DRAFT
    sources = _OF_PROMPT if position <= request.num_prompt_tokens else _OF_OUTPUT
    return Draft(index.read_continuation(position, count), sources[length])

  def forget(self, request_id: str) -> None:
    """See Drafter."""
    self._indexes.pop(request_id, None)
