"""What the event loop sees of requests, as numbers: latencies and lengths. Knows no exposition.

Everything here is written by the event loop's thread, in the middle of its work: a step of 256 streams costs one clock
reading and 256 comparisons, and a histogram is a list of counts.
"""

import bisect
from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.recorder import RequestRecord

# Seconds. Dense where people notice a difference; a queue can be minutes long.
_LATENCY_BUCKETS = (
  *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
  *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
_TOKEN_GAP_BUCKETS = (
  *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
  *(0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_LENGTH_BUCKETS = tuple(float(1 << power) for power in range(18))
# Enough for percentiles of the latest seconds.
_RECENT = 1024


class Histogram:
  """Counts of values by bucket.

  Attributes:
    bounds: upper bounds of the buckets, ascending; a value on a bound is inside. The last bucket has none.
    counts: of each bucket, not cumulative; one more than bounds.
    total: sum of the values.
  """

  def __init__(self, bounds: Sequence[float]):
    self.bounds = tuple(bounds)
    self.counts = [0] * (len(self.bounds) + 1)
    self.total = 0.0

  def observe(self, value: float, times: int = 1) -> None:
    """Counts a value, `times` times."""
    self.counts[bisect.bisect_left(self.bounds, value)] += times
    self.total += value * times

  def add(self, other: "Histogram") -> None:
    """Takes in all values of another with the same bounds."""
    self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
    self.total += other.total

  @property
  def num_values(self) -> int:
    return sum(self.counts)


class Observations:
  """Of one server, from its start.

  Attributes:
    time_to_first_token, inter_token, per_output_token, end_to_end, queue: histograms, seconds. They begin when a
      request is handed to the engine; queue ends when it is first scheduled, end_to_end with its last token. A gap
      between tokens is one between the steps that brought them.
    prompt_tokens, output_tokens: histograms of lengths, of requests that ended with stop or length.
    recent_first: the latest times to the first token, seconds.
    recent_gaps: the latest gaps between tokens, (seconds, how many), a few a step.
  """

  def __init__(self) -> None:
    self.time_to_first_token = Histogram(_LATENCY_BUCKETS)
    self.inter_token = Histogram(_TOKEN_GAP_BUCKETS)
    self.per_output_token = Histogram(_TOKEN_GAP_BUCKETS)
    self.end_to_end = Histogram(_LATENCY_BUCKETS)
    self.queue = Histogram(_LATENCY_BUCKETS)
    self.prompt_tokens = Histogram(_LENGTH_BUCKETS)
    self.output_tokens = Histogram(_LENGTH_BUCKETS)
    self.recent_first: deque[float] = deque(maxlen=_RECENT)
    self.recent_gaps: deque[tuple[float, int]] = deque(maxlen=_RECENT)
    self._last_queued: RequestRecord | None = None

  @property
  def _histograms(self) -> tuple[Histogram, ...]:
    return (
      *(self.time_to_first_token, self.inter_token, self.per_output_token, self.end_to_end, self.queue),
      *(self.prompt_tokens, self.output_tokens),
    )

  def plain(self) -> list[Any]:
    """As lists and numbers."""
    histograms = [[histogram.counts, histogram.total] for histogram in self._histograms]
    return [histograms, list(self.recent_first), [list(gap) for gap in self.recent_gaps]]

  @classmethod
  def from_plain(cls, plain: Sequence[Any]) -> "Observations":
    """The inverse; raises TypeError or ValueError for anything else."""
    seen = cls()
    histograms, recent_first, recent_gaps = plain
    for histogram, (counts, total) in zip(seen._histograms, histograms, strict=True):
      if len(counts) != len(histogram.counts):
        raise ValueError(f"a histogram has {len(counts)} buckets instead of {len(histogram.counts)}")
      histogram.counts, histogram.total = [int(count) for count in counts], float(total)
    seen.recent_first.extend(float(seconds) for seconds in recent_first)
    seen.recent_gaps.extend((float(seconds), int(times)) for seconds, times in recent_gaps)
    return seen

  def add(self, other: "Observations") -> None:
    """Takes in all that another has seen."""
    for histogram, more in zip(self._histograms, other._histograms, strict=True):
      histogram.add(more)
    self.recent_first = deque((*self.recent_first, *other.recent_first))
    self.recent_gaps = deque((*self.recent_gaps, *other.recent_gaps))

  def first_token(self, seconds: float) -> None:
    """A request's first token came this long after its submission."""
    self.time_to_first_token.observe(seconds)
    self.recent_first.append(seconds)

  def gap(self, seconds: float, times: int) -> None:
    """So many requests had a token now and their one before this long ago."""
    self.inter_token.observe(seconds, times)
    self.recent_gaps.append((seconds, times))

  def finished(self, *, seconds: float, first_token_s: float, num_prompt_tokens: int, num_tokens: int) -> None:
    """A request came to its own end."""
    self.end_to_end.observe(seconds)
    self.prompt_tokens.observe(num_prompt_tokens)
    self.output_tokens.observe(num_tokens)
    if num_tokens > 1:
      self.per_output_token.observe((seconds - first_token_s) / (num_tokens - 1))

  def queued(self, records: Sequence[RequestRecord]) -> None:
    """Takes the queue times of requests that ended since the last call from the engine's latest records."""
    fresh: list[RequestRecord] = []
    for record in reversed(records):
      if record is self._last_queued:
        break
      fresh.append(record)
    if fresh:
      self._last_queued = fresh[0]
    for record in fresh:
      # The decode side of two takes over what the other has queued already.
      if record.first_scheduled is not None and record.side != "decode":
        self.queue.observe(max(0.0, record.first_scheduled - record.arrival))


def percentiles(values: Sequence[tuple[float, int]], wanted: Sequence[float]) -> list[float | None]:
  """The smallest value that this share of all is not above, for each of `wanted` (0 to 1); None where there is none.

  Args:
    values: (value, how often).
    wanted: ascending.
  """
  ordered = sorted(values)
  total = sum(times for _, times in ordered)
  found: list[float | None] = []
  seen = place = 0
  for share in wanted:
    while place < len(ordered) and seen + ordered[place][1] < share * total:
      seen += ordered[place][1]
      place += 1
    found.append(ordered[min(place, len(ordered) - 1)][0] if ordered else None)
  return found
