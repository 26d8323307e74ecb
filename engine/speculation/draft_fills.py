"""Decides when a draft model rests, because its drafts save less than it takes. Pure Python, no clock.

A draft model proposes from the keys and values of all tokens before, so it fills its KV after each step, also where it
proposes nothing. That takes a twentieth to a third of a step. While it rests, steps cost what they cost without it.
Requests that are then running lack some of its KV, so it proposes nothing for them, and begins again with a request
that is admitted later.

An account in plain steps decides, apart from DraftCredit. Fills and proposals are charged to it, and so is the time
that the model's drafts add to steps. What these save is added, but no more than was there at the start. At 0 the model
rests, and each later step adds EARNED_SHARE. So a model that never pays costs FIRST_CREDIT steps, and later this share
of all steps.
"""

from collections.abc import Sequence
from typing import Any

FIRST_CREDIT = 16.0  # plain steps, and the most that is saved up
RESUME_CREDIT = 4.0  # with which the model begins again
TRIAL_CREDIT = 2.0  # with which it may try what is not known
EARNED_SHARE = 0.0025  # of each step
MOST_COST = 3.0  # of one step: a longer one waited for other work
FILL_HOST_SECONDS = 150e-6  # of planning and launching a fill, on a CPU whose cores compute meanwhile


class DraftFills:
  """Knows which requests have whole KV of a draft model, and what its fills cost and save.

  Attributes:
    steps: the account.
  """

  def __init__(self):
    self.steps = FIRST_CREDIT
    self._whole: dict[str, None] = {}  # requests whose KV is whole, in the order of admission
    self._lacking: set[int] = set()  # blocks without its KV, which the prefix cache may share
    # Of the latest step with drafts: its rows, and the plain steps that each draft took.
    self._num_rows, self._cost_of_draft = 1, 0.0

  # Requests.

  def admit_request(self, request_id: str, blocks: Sequence[int], num_cached: int, wants_model: bool) -> None:
    """Decides whether the model fills its KV for a request that joins the next step.

    Args:
      blocks: its block table, of which the prefix cache had the first `num_cached` blocks.
      wants_model: the request may have the model's drafts.
    """
    self._whole.pop(request_id, None)
    has_most = 2 * sum(block in self._lacking for block in blocks[:num_cached]) <= len(blocks)
    is_paid = self.steps >= RESUME_CREDIT or (self._whole and self.steps > 0)
    if wants_model and has_most and is_paid:
      self._whole[request_id] = None
    self.note_blocks(request_id, blocks[num_cached:])

  def note_blocks(self, request_id: str, blocks: Sequence[int]) -> None:
    """Notes that a request will write into `blocks`."""
    if request_id in self._whole:
      self._lacking.difference_update(blocks)
    else:
      self._lacking.update(blocks)

  def end_request(self, request_id: str) -> None:
    """Forgets a request, known or not."""
    self._whole.pop(request_id, None)

  def has_kv(self, request_id: str) -> bool:
    """Returns whether the draft model may propose tokens for the request."""
    return request_id in self._whole

  @property
  def allows_trials(self) -> bool:
    """Whether drafts of the model may be verified whose acceptance is not known."""
    return self.steps > TRIAL_CREDIT

  @property
  def has_requests(self) -> bool:
    """Whether there is a request for which the draft model may propose tokens."""
    return bool(self._whole)

  # Steps.

  def wants_fill(self, request_ids: Sequence[str]) -> bool:
    """Returns whether the draft model fills its KV after a step without proposals. Args: request_ids: of its rows."""
    return bool(self._whole) and any(name in self._whole for name in request_ids)

  def earn_steps(self, num_steps: int) -> None:
    """Adds a share of steps of any kind."""
    self._charge(-EARNED_SHARE * num_steps)

  def charge_fill(self, seconds: float, plain_seconds: float) -> None:
    """Charges a fill after a step without proposals, and the host's part of it.

    Args:
      seconds: for which the host waited for it.
      plain_seconds: of a plain step.
    """
    self._charge(min(MOST_COST, (seconds + FILL_HOST_SECONDS) / plain_seconds))

  def charge_step(self, num_taken: float, num_rows: int, num_drafts: int, is_proposing: bool) -> None:
    """Charges a step after which the model proposed, or notes what drafts cost in one.

    Args: num_taken: its time, in plain steps.
    """
    num_taken = min(MOST_COST, num_taken)
    self._num_rows = num_rows
    self._cost_of_draft = 0.0
    if is_proposing:
      self._charge(num_taken - 1)
    elif num_drafts:
      self._cost_of_draft = (num_taken - 1) / num_drafts

  def note_row(self, num_drafts: int, num_accepted: int) -> None:
    """Charges the model's drafts of a row in the step of the latest charge_step, and adds what they saved."""
    self._charge(num_drafts * self._cost_of_draft - num_accepted / self._num_rows)

  def _charge(self, num_steps: float) -> None:
    self.steps = min(FIRST_CREDIT, self.steps - num_steps)
    if self.steps <= 0:
      self._whole.clear()

  # For traces.

  def state(self) -> dict[str, Any]:
    """Returns all state of later decisions as plain JSON values; restore_state() is the inverse."""
    return {
      "credit": self.steps,
      "whole": list(self._whole),
      "lacking": sorted(self._lacking),
    }

  def restore_state(self, state: dict[str, Any]) -> None:
    """Takes back what state() returned."""
    self.steps = state["credit"]
    self._whole = dict.fromkeys(state["whole"])
    self._lacking = set(state["lacking"])
