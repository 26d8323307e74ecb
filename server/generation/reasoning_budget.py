"""Bounds the tokens of an output's reasoning, in front of the constraint of the answer. Pure Python; knows no request.

The output is free until it closes its reasoning. At the budget the closing text is forced, and the answer follows.
"""

from collections.abc import Callable
import dataclasses
import enum
from typing import Final

from engine.config import EngineConfig
from engine.constraint import Constraint, ConstraintFailed

_SPACE: Final = b" \t\r\n"
# Space before the opening text; after more of it, the output has no reasoning.
MAX_SPACE: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningLimit:
  """The limit of an output's reasoning.

  Attributes:
    num_tokens: tokens between the opening and the closing text, at least 0; of all reasoning together.
    opener, closer: the texts around the reasoning.
    opener_ids, closer_ids: their token ids, at least one each.
    answer_ids: the token ids of the answer's header. An output with such headers may reason several times.
    is_open: whether the prompt has opened the reasoning.
  """

  num_tokens: int
  opener: str
  closer: str
  opener_ids: tuple[int, ...]
  closer_ids: tuple[int, ...]
  answer_ids: tuple[int, ...] = ()
  is_open: bool = False


class _Part(enum.Enum):
  """Where an output is."""

  START = enum.auto()
  BETWEEN = enum.auto()
  OPENING = enum.auto()
  REASONING = enum.auto()
  CLOSING = enum.auto()
  ANSWER = enum.auto()


class ReasoningBudget:
  """The reasoning of one output, then its answer; implements engine.constraint.Constraint.

  Without a constraint of the answer, an output that does not begin with reasoning is free. With one, it begins with
  the opening text or with the answer, and the reasoning has no end-of-sequence.

  Attributes:
    limit: the limit.
    answer: the constraint of the answer, or None.
  """

  def __init__(
    self, limit: ReasoningLimit, answer: Constraint | None, token_bytes: Callable[[int], bytes], config: EngineConfig
  ):
    """Args: limit, answer: see the class. token_bytes: returns the bytes of a token. config: the engine's."""
    self.limit = limit
    self.answer = answer
    self._token_bytes = token_bytes
    self._num_bytes = 4 * -(-config.vocab_size // 32)
    free = (1 << config.vocab_size) - 1
    self._free = self._pack(free)
    without_end = free
    for token in config.eos_token_ids if answer is not None else ():
      without_end &= ~(1 << token)
    self._thinking = self._pack(without_end)
    self._opener, self._closer = limit.opener.encode(), limit.closer.encode()
    # The output's text so far at the start, and the end of the reasoning's text.
    self._text = b""
    self._num_tokens = 0
    # The forced tokens that are left, last first.
    self._forced: list[int] = []
    self._part = _Part.START
    if limit.is_open:
      self._begin_reasoning(b"")

  @property
  def is_done(self) -> bool:
    """See engine.constraint.Constraint."""
    return self._part is _Part.ANSWER and self.answer is not None and self.answer.is_done

  def allowed(self) -> bytes:
    """See engine.constraint.Constraint."""
    match self._part:
      case _Part.OPENING | _Part.CLOSING:
        return self._pack(1 << self._forced[-1])
      case _Part.REASONING:
        return self._thinking
      case _Part.BETWEEN:
        return self._free
      case _ if self.answer is None:
        return self._free
      case _Part.START:
        either = int.from_bytes(self.answer.allowed(), "little") | 1 << self.limit.opener_ids[0]
        return self._pack(either)
      case _:
        return self.answer.allowed()

  def accept(self, token: int) -> None:
    """See engine.constraint.Constraint."""
    match self._part:
      case _Part.OPENING | _Part.CLOSING:
        if token != self._forced.pop():
          raise ConstraintFailed("the output left the text that opens or closes its reasoning")
        if not self._forced:
          if self._part is _Part.OPENING:
            self._begin_reasoning(b"")
          else:
            self._part = _Part.ANSWER
      case _Part.REASONING:
        self._read_reasoning(self._token_bytes(token), 1)
      case _Part.START if self.answer is None:
        self._read_start(self._token_bytes(token))
      case _Part.BETWEEN:
        self._read_between(self._token_bytes(token))
      case _Part.START if token == self.limit.opener_ids[0]:
        self._part = _Part.OPENING
        self._forced = list(reversed(self.limit.opener_ids[1:]))
        if not self._forced:
          self._begin_reasoning(b"")
      case _:
        self._part = _Part.ANSWER
        if self.answer is not None:
          self.answer.accept(token)

  def _pack(self, bits: int) -> bytes:
    return bits.to_bytes(self._num_bytes, "little")

  def _read_start(self, text: bytes) -> None:
    """Reads the output's beginning, which is space and the opening text, or else the answer."""
    self._text += text
    rest = self._text.lstrip(_SPACE)
    if len(self._text) - len(rest) > MAX_SPACE or not self._opener.startswith(rest[: len(self._opener)]):
      self._part = _Part.ANSWER
    elif len(rest) >= len(self._opener):
      self._begin_reasoning(rest[len(self._opener) :])

  def _read_between(self, text: bytes) -> None:
    """Reads what follows the reasoning, which may be more of it."""
    self._text += text
    place = self._text.find(self._opener)
    if place >= 0:
      self._begin_reasoning(self._text[place + len(self._opener) :])
    else:
      self._text = self._text[-len(self._opener) :]

  def _begin_reasoning(self, text: bytes) -> None:
    """Begins the reasoning, of which the opening token may hold the first `text`."""
    self._part = _Part.REASONING
    self._text = b""
    self._read_reasoning(text, 0)

  def _read_reasoning(self, text: bytes, num_tokens: int) -> None:
    self._text += text
    place = self._text.find(self._closer)
    if place < 0:
      self._num_tokens += num_tokens
      self._text = self._text[-len(self._closer) :]
      if self._num_tokens >= self.limit.num_tokens:
        self._force_answer(self.limit.closer_ids + self.limit.answer_ids)
      return
    self._text = self._text[place + len(self._closer) :]
    if self.answer is None:
      self._part = _Part.BETWEEN if self.limit.answer_ids else _Part.ANSWER
    elif self._text.strip(_SPACE):
      raise ConstraintFailed("a token holds the end of the reasoning and a part of the answer; send no budget")
    else:
      self._force_answer(self.limit.answer_ids)

  def _force_answer(self, token_ids: tuple[int, ...]) -> None:
    """Forces tokens, after which the answer begins."""
    self._part = _Part.CLOSING if token_ids else _Part.ANSWER
    self._forced = list(reversed(token_ids))
