"""Proposes what a draft model on the device proposed after a step. Pure Python; may not know the device.

A proposal continues the tokens that its step gave. It holds as long as later tokens agree with it, so it also serves
behind a token in flight, and after a step that had no proposals.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.request import Request
from engine.speculation.drafter import NO_DRAFT, Draft
from engine.speculation.ngram import LONG_MATCHES, NgramDrafter

MODEL = "draft"  # the source of its drafts


class _Proposal(NamedTuple):
  """Attributes: position: number of known tokens that `tokens` continue."""

  position: int
  tokens: tuple[int, ...]


def _num_known(request: Request) -> int:
  return len(request.prompt_token_ids) + len(request.output_token_ids)


class ModelDrafter:
  """Implements engine.speculation.drafter.Drafter with a request's latest proposal."""

  def __init__(self):
    self._proposals: dict[str, _Proposal] = {}

  def take_proposal(self, request_id: str, position: int, tokens: Sequence[int]) -> None:
    """Keeps a live request's proposal, in place of an earlier one.

    Args: position: number of known tokens that it continues.
    """
    self._proposals[request_id] = _Proposal(position, tuple(tokens))

  def update(self, request: Request) -> bool:
    """See Drafter."""
    proposal = self._proposals.get(request.id)
    return proposal is not None and _num_known(request) < proposal.position + len(proposal.tokens)

  def propose(self, request: Request, count: int) -> Draft:
    """See Drafter."""
    proposal = self._proposals.get(request.id)
    if proposal is None:
      return NO_DRAFT
    position, tokens = proposal
    num_known = _num_known(request)
    num_new = num_known - position
    if num_new < 0 or request.known_tokens(position, num_known) != tokens[:num_new]:
      return NO_DRAFT
    found = tokens[num_new : num_new + count]
    return Draft(found, MODEL) if found else NO_DRAFT

  def forget(self, request_id: str) -> None:
    """See Drafter."""
    self._proposals.pop(request_id, None)

  def num_indexed(self, request_id: str) -> int:
    """See Drafter; its state is `state`."""
    return 0

  def restore_index(self, request: Request, num_indexed: int) -> None:
    """See Drafter."""

  def state(self) -> dict[str, list]:
    """Returns the proposals as plain JSON values; restore_state() takes them back."""
    return {name: [proposal.position, *proposal.tokens] for name, proposal in self._proposals.items()}

  def restore_state(self, state: dict[str, list[int]]) -> None:
    """Takes back what state() returned."""
    self._proposals = {name: _Proposal(position, tuple(tokens)) for name, (position, *tokens) in state.items()}


class JointDrafter:
  """Implements engine.speculation.drafter.Drafter with n-grams of long matches, else the draft model, else n-grams.

  A request gets the drafts that its own `speculation` allows.
  """

  def __init__(self, model: ModelDrafter):
    self._model, self._ngram = model, NgramDrafter()

  def update(self, request: Request) -> bool:
    """See Drafter."""
    has_ngram = request.speculation != MODEL and self._ngram.update(request)
    return has_ngram or (request.speculation != "ngram" and self._model.update(request))

  def propose(self, request: Request, count: int) -> Draft:
    """See Drafter."""
    ngram = NO_DRAFT
    if request.speculation != MODEL:
      if self._ngram.update(request):
        ngram = self._ngram.propose(request, count)
      if ngram.source in LONG_MATCHES or request.speculation == "ngram":
        return ngram
    proposed = self._model.propose(request, count)
    return proposed if proposed.tokens else ngram

  def forget(self, request_id: str) -> None:
    """See Drafter."""
    self._model.forget(request_id)
    self._ngram.forget(request_id)

  def num_indexed(self, request_id: str) -> int:
    """See Drafter."""
    return self._ngram.num_indexed(request_id)

  def restore_index(self, request: Request, num_indexed: int) -> None:
    """See Drafter."""
    self._ngram.restore_index(request, num_indexed)
