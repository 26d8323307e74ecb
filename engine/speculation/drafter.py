"""The interface of what proposes draft tokens. Pure Python; may not know steps or costs."""

from typing import NamedTuple, Protocol

from engine.request import Request


class Draft(NamedTuple):
  """Tokens that a request may produce next.

  Attributes:
    tokens: after the last known token, in order; may be empty.
    source: what the proposal rests on. Drafts of one source have about the same chance of acceptance.
  """

  tokens: tuple[int, ...] = ()
  source: str = ""


NO_DRAFT = Draft()


class Drafter(Protocol):
  """Proposes tokens of requests. Depends on their known tokens alone, so that a replay proposes the same.

  An error of a drafter costs a request its drafts, never its tokens.
  """

  def update(self, request: Request) -> bool:
    """Takes in the request's new tokens; returns whether `propose` may find something. Cheap: every step calls it."""
    ...

  def propose(self, request: Request, count: int) -> Draft:
    """Returns at most `count` tokens that may follow the known tokens of an updated request."""
    ...

  def forget(self, request_id: str) -> None:
    """Drops all state of a request, known or not."""
    ...

  def num_indexed(self, request_id: str) -> int:
    """Returns how many of a request's tokens it has taken in, for a trace."""
    ...

  def restore_index(self, request: Request, num_indexed: int) -> None:
    """Takes in the first `num_indexed` tokens of a request."""
    ...
