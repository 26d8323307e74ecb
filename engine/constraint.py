"""The engine's interface to constrained output: allowed tokens and completion. Pure Python; may not know grammars.

The grammar belongs to the submitter of the request. Its state depends only on the output's tokens, so a preemption,
which recomputes KV, does not change it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class ConstraintFailed(Exception):
  """A constraint cannot continue, because of a limit or because it allows no token. Clients may see the message."""


class Constraint(Protocol):
  """The constraint of one output. After submission only the engine's thread may call it."""

  @property
  def is_done(self) -> bool:
    """Whether the output is complete and no token can follow."""
    ...

  def allowed(self) -> bytes:
    """Returns the allowed next tokens as ceil(V / 32) little-endian int32 words: token t is bit t % 32 of word t // 32.

    Cheap and repeatable, because `accept` does the work. Allows at least one token until the output is done.
    """
    ...

  def accept(self, token: int) -> None:
    """Takes the next token of the output.

    Raises:
      ConstraintFailed: the token is not allowed, or no token could follow an incomplete output.
    """
    ...


class ConstrainedDraft(NamedTuple):
  """Tokens that may come next under a constraint.

  Attributes:
    tokens: in order, each allowed after those before.
    masks: after each token, the allowed next ones, as from Constraint.allowed().
    is_forced: the first token is the constraint's own, which leaves no choice about it.
  """

  tokens: tuple[int, ...] = ()
  masks: tuple[bytes, ...] = ()
  is_forced: bool = False


@runtime_checkable
class DraftingConstraint(Protocol):
  """A Constraint that takes part in speculative decoding."""

  def find_forced(self) -> int:
    """Returns the only token that `allowed` allows; -1 if there are several, or the output is done. Cheap."""
    ...

  def find_draft(self, proposed: Sequence[int], count: int, forces: bool) -> ConstrainedDraft:
    """Returns at most `count` tokens; does not change the state. An error costs drafts only.

    Args:
      proposed: tokens that may come next; the draft ends before the first one that is not allowed.
      count: most tokens.
      forces: prefers tokens that the constraint leaves no choice about, and adds them after others.
    """
    ...


CONSTRAINT_BROKE = "the output constraint failed on a token; send the request without it"


class FailedConstraint:
  """Replaces a constraint that failed: allows one more token and ends the request with it."""

  is_done = False

  def __init__(self, vocab_size: int):
    self._vocab_size = vocab_size

  def allowed(self) -> bytes:
    return ((1 << self._vocab_size) - 1).to_bytes(4 * -(-self._vocab_size // 32), "little")

  def accept(self, token: int) -> None:
    raise ConstraintFailed(CONSTRAINT_BROKE)


class Recorded:
  """Replaces the constraint of a traced request; the trace holds its verdicts and drafts.

  Attributes:
    draft: tokens of the next draft, and whether it is forced.
  """

  is_done = False

  def __init__(self):
    self.draft: tuple[tuple[int, ...], bool] = (), False

  def find_draft(self, proposed: Sequence[int], count: int, forces: bool) -> ConstrainedDraft:
    """See DraftingConstraint."""
    tokens, is_forced = self.draft
    return ConstrainedDraft(tokens, (b"",) * len(tokens), is_forced)

  def find_forced(self) -> int:
    """See DraftingConstraint; the trace holds forced tokens."""
    return -1

  def allowed(self) -> bytes:
    return b""

  def accept(self, token: int) -> None:
    raise AssertionError("a replay never calls the constraint of a request")


class Verdicts(NamedTuple):
  """The verdicts of constraints on the tokens of a step, by row of its Batch.

  Attributes:
    done: rows whose token completes the output.
    failed: rows whose constraint cannot continue, and why.
    num_taken: rows of these with several tokens -> number of accepted tokens; other rows: all, or none if failed.
    forced: row -> the tokens that follow those of the step because the constraint allows no others.
  """

  done: frozenset[int] = frozenset()
  failed: Mapping[int, str] = {}
  num_taken: Mapping[int, int] = {}
  forced: Mapping[int, tuple[int, ...]] = {}


NO_VERDICTS = Verdicts()
