"""Learns a quantile of the seconds of steps, one step at a time. Pure Python, no clock.

A longer step than the estimate raises it by a share, and another one lowers it by less, so that both balance where the
quantile is. So one very long step counts as much as any other one, and no step is kept.
"""

_RAISES_BY = 0.005  # a step


class StepQuantile:
  """An estimate of the seconds that a share of all steps do not exceed.

  Attributes:
    seconds: the estimate; 0 before the first step.
  """

  def __init__(self, share: float):
    self.seconds = 0.0
    self._lowers_by = _RAISES_BY * (1 - share) / share

  def note_step(self, seconds: float, num_steps: int = 1) -> None:
    """Learns from a step.

    Args: num_steps: equal steps that it stands for.
    """
    if not self.seconds:
      self.seconds = seconds
    elif seconds > self.seconds:
      self.seconds = min(seconds, self.seconds * (1 + _RAISES_BY) ** num_steps)
    else:
      self.seconds = max(seconds, self.seconds * (1 - self._lowers_by) ** num_steps)
