"""What the engine knows of a constrained output: which tokens may come next, and whether it is complete. Pure Python.

The grammar itself belongs to whoever submits the request; nothing here may look into it. Its state follows the tokens
of the output alone, so a preemption, which recomputes KV, leaves it as it is.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class ConstraintFailed(Exception):
  """The constraint cannot go on: a limit is reached or no token is left. The message is fit for a client."""


class Constraint(Protocol):
  """One output's constraint. Its request's owner makes it; from submission on the engine's thread alone calls it."""

  @property
  def is_done(self) -> bool:
    """The output is complete and nothing can follow."""
    ...

  def allowed(self) -> bytes:
    """Which tokens may be the next: little-endian int32 words, ceil(V / 32) of them, token t is bit t % 32 of t // 32.

    Cheap and repeatable: the work is done by `accept`. Never empty while not done.
    """
    ...

  def accept(self, token: int) -> None:
    """Takes the next token of the output.

    Raises:
      ConstraintFailed: it is not allowed, or nothing could follow although the output is not complete.
    """
    ...


CONSTRAINT_BROKE = "the output constraint failed on a token; send the request without it"


class FailedConstraint:
  """Stands for a constraint that failed when it was asked: allows one token more, and ends the request with it."""

  is_done = False

  def __init__(self, vocab_size: int):
    self._vocab_size = vocab_size

  def allowed(self) -> bytes:
    return ((1 << self._vocab_size) - 1).to_bytes(4 * -(-self._vocab_size // 32), "little")

  def accept(self, token: int) -> None:
    raise ConstraintFailed(CONSTRAINT_BROKE)


class Recorded:
  """Stands for the constraint of a request in a trace: what became of it is recorded with each commit."""

  is_done = False

  def allowed(self) -> bytes:
    return b""

  def accept(self, token: int) -> None:
    raise AssertionError("the constraint of a replayed request is never asked")


class Verdicts(NamedTuple):
  """What constraints say to the tokens of a step, by row of its Batch.

  Attributes:
    done: rows whose output is complete with its token.
    failed: rows whose constraint cannot go on, and why.
    num_taken: of these, rows with several tokens -> how many the constraint took; else all, or none if it failed.
  """

  done: frozenset[int] = frozenset()
  failed: Mapping[int, str] = {}
  num_taken: Mapping[int, int] = {}


NO_VERDICTS = Verdicts()
