"""Counts the gaps between tokens in bins of equal ratio, so that memory does not grow with tokens. Arithmetic only."""

from collections import defaultdict
import math

_PER_E = 200.0  # bins for a factor of e: a bin is 0.5 % wide


class GapCounts:
  """Gaps in seconds by logarithmic bin; a percentile is off by at most half a bin, 0.25 %."""

  __slots__ = ("_counts",)

  def __init__(self):
    self._counts: defaultdict[int, int] = defaultdict(int)

  def add(self, gap_s: float, count: int) -> None:
    """Counts `count` equal gaps."""
    self._counts[round(math.log(gap_s) * _PER_E) if gap_s > 1e-9 else -5000] += count

  def add_run(self, first_s: float, slope_s: float, steps: int, count: int) -> None:
    """Counts `count` gaps in each of `steps` steps, which take first_s, first_s + slope_s, and so on."""
    last_s = first_s + slope_s * (steps - 1)
    parts = min(steps, 1 + int((last_s / first_s - 1.0) * _PER_E)) if first_s > 0 else 1
    begin = 0
    for part in range(parts):
      end = steps * (part + 1) // parts
      self.add(first_s + slope_s * (begin + end - 1) / 2, (end - begin) * count)
      begin = end

  @property
  def total(self) -> int:
    """The number of gaps."""
    return sum(self._counts.values())

  def percentile(self, percent: float) -> float | None:
    """Returns the gap in seconds below which this share lies; None without gaps."""
    if not self._counts:
      return None
    left = math.ceil(self.total * percent / 100)
    for index in sorted(self._counts):
      left -= self._counts[index]
      if left <= 0:
        return math.exp(index / _PER_E)
    raise AssertionError("a percentile above 100")

  def merge(self, other: "GapCounts") -> None:
    """Adds the counts of `other`."""
    for index, count in other._counts.items():
      self._counts[index] += count
