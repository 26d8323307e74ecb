"""When to launch the next step: shortly before the one at hand ends, so that who arrives until then still joins it.

A step launched ahead keeps the device busy, but whoever comes after its launch waits for all of it. So a launch waits
while the step before it is computed, and leaves the host the time that it needs. This file expects when steps end, from
how long their like took; it waits for nothing and plans nothing. Nothing but time hangs on it: a launch too early costs
an arrival a step, as a launch at once would have, one too late costs everybody the device. Pure Python.
"""

from collections import deque
import math

from engine.recorder import StepRecord

RECENT = 8  # launches, and steps of a kind, that are remembered; two launches may be slower, one step faster
FEWEST = 3  # steps of a kind before anything is expected
MARGIN_S = 5e-4
MARGIN_SHARE = 0.05  # of the expected time of a step
LEAST_WAIT_S = 2e-4  # values that came sooner than this after they were asked for may have been there long before


class Pacer:
  """Learns from every step how long its kind takes, and the host beside it. Told of each: woke, launched, ended."""

  def __init__(self):
    self._steps: dict[tuple[int, bool], deque[tuple[int, float]]] = {}  # by kind: tokens and seconds
    self._launch_s = deque[float](maxlen=RECENT)
    self._late_s = 0.0
    self._expected_end = math.inf  # of the step at hand

  def woke(self, late_s: float) -> None:
    """Who slept until the next launch woke so much later: on a busy machine, milliseconds."""
    self._late_s = late_s

  def launched(self, host_s: float) -> None:
    """A step was planned, packed and dispatched in so much time."""
    self._launch_s.append(self._late_s + host_s)
    self._late_s = 0.0

  def ended(self, record: StepRecord, asked_at: float, came_at: float) -> None:
    """The step at hand has ended: when its values were asked for, with the next one launched, and when they came."""
    tokens, kind = _kind(record)
    steps = self._steps.get(kind)
    if steps is None:
      steps = self._steps[kind] = deque(maxlen=RECENT)
    if came_at - asked_at >= LEAST_WAIT_S:
      steps.append((tokens, record.device_s))
    elif asked_at < self._expected_end:
      # It had ended before it should have, nobody knows when: what is remembered of its kind may be too long.
      for _ in range(len(steps) - len(steps) // 2):
        steps.popleft()

  def launch_at(self, record: StepRecord, begins_at: float) -> float:
    """When to plan the step after this one, which the device begins at `begins_at`; 0.0 is at once.

    At once where nothing is known, and where the host's part is not small beside the step.
    """
    tokens, kind = _kind(record)
    steps = self._steps.get(kind, ())
    if len(steps) < FEWEST:
      self._expected_end = math.inf
      return 0.0
    # With fewer tokens a step may be shorter; with more it need not be longer, where a rung's padding is computed.
    likely_s = sorted([seconds * min(1.0, tokens / others) for others, seconds in steps])
    expected_s = likely_s[len(steps) // RECENT]
    self._expected_end = begins_at + expected_s
    launch_s = sorted(self._launch_s)[-1 - 2 * len(self._launch_s) // RECENT]
    lead_s = launch_s + MARGIN_S + MARGIN_SHARE * expected_s
    return self._expected_end - lead_s if lead_s < expected_s / 2 else 0.0


def _kind(record: StepRecord) -> tuple[int, tuple[int, bool]]:
  """The tokens of a step, and of what else its time depends: its rung, and whether it has prompt tokens."""
  return record.decode_tokens + record.prefill_tokens, (record.shape_tokens, record.prefill_tokens > 0)
