"""When to launch the next step: shortly before the one at hand ends, so that who arrives until then still joins it.

A step launched ahead keeps the device busy, but whoever comes after its launch waits for all of it. So a launch waits
while the step before it is computed, and leaves the host the time that it needs. This file expects when steps end, from
how long their like took; it waits for nothing and plans nothing. It errs to the short side: a launch too early costs
an arrival a step, as a launch at once would have, but a launch too late costs everybody the device. Nothing but time
hangs on it. Pure Python.
"""

from collections import deque

from engine.recorder import StepRecord

RECENT = 8  # steps of a kind that are remembered, the shortest of which counts
FEWEST = 3  # of them, before anything is expected
MARGIN_S = 5e-4  # for what has not happened of late
MARGIN_SHARE = 0.05  # of the expected time, for steps that end earlier
LEAST_WAIT_S = 2e-4  # values that came sooner than this after they were asked for may have been there long before


class Pacer:
  """Learns from every step how long its kind takes, and the host beside it."""

  def __init__(self):
    self._steps: dict[tuple[int, bool], deque[tuple[int, float]]] = {}  # by kind: tokens and seconds
    self._host_s = deque[float](maxlen=RECENT)
    self._late_s = deque[float]((0.0,), maxlen=RECENT)

  def woke(self, late_s: float) -> None:
    """Who slept until the launch woke so much later: on a busy machine, milliseconds."""
    self._late_s.append(late_s)

  def ended(self, record: StepRecord, waited_s: float) -> None:
    """A step has ended.

    Args:
      record: of it.
      waited_s: from when its values were asked for until they came.
    """
    tokens, kind = _kind(record)
    steps = self._steps.get(kind)
    if steps is None:
      steps = self._steps[kind] = deque(maxlen=RECENT)
    self._host_s.append(record.host_s)
    if waited_s < LEAST_WAIT_S:
      steps.clear()  # its time is not known, and what was expected of its kind may be too long
    else:
      steps.append((tokens, record.device_s))

  def launch_at(self, record: StepRecord, begins_at: float) -> float:
    """When to plan the step after this one, which the device begins at `begins_at`; 0.0 is at once.

    At once where nothing is known, and where the host's part is not small beside the step.
    """
    tokens, kind = _kind(record)
    steps = self._steps.get(kind, ())
    if len(steps) < FEWEST:
      return 0.0
    # With fewer tokens a step may be shorter; with more it need not be longer, where a rung's padding is computed.
    expected_s = min([seconds * min(1.0, tokens / others) for others, seconds in steps])
    lead_s = max(self._host_s) + max(self._late_s) + MARGIN_S + MARGIN_SHARE * expected_s
    return begins_at + expected_s - lead_s if lead_s < expected_s / 2 else 0.0


def _kind(record: StepRecord) -> tuple[int, tuple[int, bool]]:
  """The tokens of a step, and of what else its time depends: its rung, and whether it has prompt tokens."""
  return record.decode_tokens + record.prefill_tokens, (record.shape_tokens, record.prefill_tokens > 0)
