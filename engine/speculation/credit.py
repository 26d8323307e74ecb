"""Bounds what drafts and the search for them may cost: steps without drafts earn a share of their time for both.

Pure Python, no clock.

The unit is a plain step: the time of a step of the same rows without drafts. A step with drafts costs its own time,
less the plain steps that its tokens would have taken. All drafts together cost at most EARNED_SHARE of the plain
steps, and FIRST_CREDIT - LEAST_CREDIT + MOST_COST steps more. Gains pay costs back, but are no credit for trials: or
texts that repeat would pay for trials in those that do not. A draft model has an account of its own (draft_fills.py).

A trial that fails costs one step at least, unless it was free: cheap trials would be many, and each of them lengthens a
gap between tokens, and the gap after it. The 99th percentile of gaps counts them, not their length. So EARNED_SHARE is
a tenth of the hundredth that it leaves out, and without credit no size is tried whose time is unknown or old.

A look at requests for drafts takes the host's time before a step: 80 us right after a step, when caches are cold. Of a
step of 0.4 ms that is a fifth, so looks at requests without accepted drafts have an account of their own. Gains fill
it, since they saved at least as much before.
"""

EARNED_SHARE = 0.001  # of each step without drafts
FIRST_CREDIT = 4.0  # steps, and the most that is saved up
LEAST_CREDIT = -8.0
LEAST_CHARGE = 1.0  # of a step that took longer for trials of which none succeeded
FREE_COST = 0.02  # of a step that took no longer
MOST_COST = 3.0  # of one step: a longer one waited for other work
LOOKS_SHARE = 0.0025  # of each step without drafts, for looks
MOST_LOOKS_CREDIT = 2.0  # steps, from the start
LOOKS_RESERVE = 1.0  # of them, for requests that were not looked at
LOOK_SECONDS = 60e-6  # of a look, on a CPU right after a step
LOOK_SECONDS_A_REQUEST = 10e-6
LOOK_SECONDS_A_TOKEN = 0.3e-6  # that a drafter takes in


class DraftCredit:
  """Counts what drafts cost and may still cost.

  Attributes:
    steps: above 0, drafts may be tried; down to LEAST_CREDIT, only those that have proved themselves; below, none.
    look_steps: above 0, steps look for drafts of requests without accepted ones.
  """

  def __init__(self):
    self.steps = FIRST_CREDIT
    self.look_steps = MOST_LOOKS_CREDIT

  @property
  def allows_trials(self) -> bool:
    """Whether drafts whose acceptance is not known may be verified."""
    return self.steps > 0

  @property
  def allows_measuring(self) -> bool:
    """Whether sizes of steps may be tried whose time is not known, or old: also if gains have paid all costs back."""
    return self.steps >= 0

  @property
  def allows_drafts(self) -> bool:
    """Whether any drafts may be verified."""
    return self.steps > LEAST_CREDIT

  @property
  def allows_looks(self) -> bool:
    """Whether steps may look for drafts of requests without accepted ones."""
    return self.look_steps > 0

  @property
  def has_reserve(self) -> bool:
    """Whether looks at a request whose drafts were accepted may be many, since enough is left for other requests."""
    return self.look_steps > LOOKS_RESERVE

  def earn_steps(self, num_steps: float) -> None:
    """Adds a share of steps without drafts."""
    self.steps = min(FIRST_CREDIT, self.steps + EARNED_SHARE * num_steps)
    self.look_steps = min(MOST_LOOKS_CREDIT, self.look_steps + LOOKS_SHARE * num_steps)

  @property
  def steps_to_look(self) -> int:
    """Steps without drafts after which a look is allowed; at least 1."""
    return 1 + max(0, int(-self.look_steps / LOOKS_SHARE))

  def charge_look(self, num_requests: int, num_tokens: int, plain_seconds: float) -> None:
    """Charges a look.

    Args:
      num_requests: without accepted drafts, that it looked at.
      num_tokens: of these, that the drafter took in.
      plain_seconds: of a step without drafts; 0: not known.
    """
    if plain_seconds > 0:
      seconds = LOOK_SECONDS + LOOK_SECONDS_A_REQUEST * num_requests + LOOK_SECONDS_A_TOKEN * num_tokens
      self.look_steps -= seconds / plain_seconds

  def charge_step(self, num_taken: float, num_saved: float, is_trial: bool = True) -> None:
    """Charges a step because of drafts.

    Args:
      num_taken: its time, in plain steps.
      num_saved: plain steps that would have given its tokens; 1 without an accepted draft.
      is_trial: it had drafts, or followed some. A step after which a draft model proposes has none of its own.
    """
    cost = min(num_taken, MOST_COST) - num_saved
    if is_trial and cost > FREE_COST and num_saved <= 1 and self.allows_trials:
      self.steps -= max(cost, LEAST_CHARGE)
    elif cost > 0:
      self.steps -= cost
    else:
      self.steps = max(self.steps, min(0.0, self.steps - cost))
      self.look_steps = min(MOST_LOOKS_CREDIT, self.look_steps - cost)
