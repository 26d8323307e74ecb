"""Bounds what drafts may cost: steps without drafts earn a share of their time for trials. Pure Python, no clock.

The unit is a plain step: the time of a step of the same rows without drafts. A step with drafts costs its own time,
less the plain steps that its tokens would have taken. All drafts together cost at most EARNED_SHARE of the plain
steps, and FIRST_CREDIT - LEAST_CREDIT + MOST_COST steps more. Gains pay costs back, but are no credit for trials: or
texts that repeat would pay for trials in those that do not.
"""

EARNED_SHARE = 0.005  # of each step without drafts
FIRST_CREDIT = 4.0  # steps, and the most that is saved up
LEAST_CREDIT = -8.0
MOST_COST = 3.0  # of one step: a longer one waited for other work


class DraftCredit:
  """Counts what drafts cost and may still cost.

  Attributes:
    steps: above 0, drafts may be tried; down to LEAST_CREDIT, only those that have proved themselves; below, none.
  """

  def __init__(self):
    self.steps = FIRST_CREDIT

  @property
  def allows_trials(self) -> bool:
    """Whether drafts whose acceptance is not known may be verified."""
    return self.steps > 0

  @property
  def allows_drafts(self) -> bool:
    """Whether any drafts may be verified."""
    return self.steps > LEAST_CREDIT

  def earn_steps(self, num_steps: float) -> None:
    """Adds a share of steps without drafts."""
    self.steps = min(FIRST_CREDIT, self.steps + EARNED_SHARE * num_steps)

  def charge_step(self, num_taken: float, num_saved: float) -> None:
    """Charges a step because of drafts.

    Args:
      num_taken: its time, in plain steps.
      num_saved: plain steps that would have given its tokens; 1 without an accepted draft.
    """
    cost = min(num_taken, MOST_COST) - num_saved
    self.steps = self.steps - cost if cost > 0 else max(self.steps, min(0.0, self.steps - cost))
