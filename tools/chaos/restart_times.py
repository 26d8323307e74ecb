"""Compares restarts after a loss with starts of the same processes under the same load. Measures nothing itself."""

from collections.abc import Sequence
import statistics

from tools.chaos.report import Row

LEAST_STARTS = 3  # fewer are no measure of how long a start takes
_USUAL, _SLOWEST = 1.1, 1.5  # limits: of the median restart by the median start, and of each by the longest start


def judge_restarts(starts: Sequence[float], restarts: Sequence[float]) -> Row:
  """Returns whether restarts take what starts take.

  Args:
    starts: seconds of each start; at least one.
    restarts: seconds of each restart; at least one.
  """
  usual_s, slowest_s = _USUAL * statistics.median(starts), _SLOWEST * max(starts)
  half, most = statistics.median(restarts), max(restarts)
  return Row(
    "a restart takes what a start takes",
    f"p50 in {usual_s:.1f} s, all in {slowest_s:.1f} s",
    f"p50 {half:.1f} s, at most {most:.1f} s",
    half <= usual_s and most <= slowest_s,
  )
