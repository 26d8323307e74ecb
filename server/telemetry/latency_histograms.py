"""Records latencies and lengths of requests on the event loop. Knows no metrics format.

The event loop's thread updates the histograms while it dispatches tokens. For a step of 256 streams this costs one
clock reading and 256 comparisons; a histogram is a list of counts.
"""

import bisect
from collections.abc import Sequence
import dataclasses
import itertools

from engine.recorder import RequestRecord

# Seconds; dense where users notice a difference, and up to minutes for queues.
_LATENCY_BUCKETS = (
  *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
  *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
_TOKEN_GAP_BUCKETS = (
  *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
  *(0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_LENGTH_BUCKETS = tuple(float(1 << power) for power in range(18))
# Values kept for percentiles of the latest seconds.
NUM_RECENT = 1024


@dataclasses.dataclass
class Histogram:
  """Counts of values by bucket.

  Attributes:
    bounds: inclusive upper bounds of the buckets, ascending; the last bucket has none.
    counts: count of each bucket, not cumulative; one more than bounds.
    total: sum of the values.
  """

  bounds: tuple[float, ...]
  counts: list[int] = dataclasses.field(default_factory=list)
  total: float = 0.0

  def __post_init__(self) -> None:
    self.counts = self.counts or [0] * (len(self.bounds) + 1)

  def observe(self, value: float, times: int = 1) -> None:
    """Counts a value `times` times."""
    self.counts[bisect.bisect_left(self.bounds, value)] += times
    self.total += value * times

  def add_histogram(self, other: "Histogram") -> None:
    """Adds the values of another histogram with the same bounds."""
    self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
    self.total += other.total


def _histogram(bounds: tuple[float, ...]) -> Histogram:
  return dataclasses.field(default_factory=lambda: Histogram(bounds))


@dataclasses.dataclass
class Observations:
  """The latencies and lengths of one server's requests since its start.

  Attributes:
    time_to_first_token, inter_token, per_output_token, end_to_end, queue: histograms, seconds. They begin when the
      engine receives a request; queue ends when it is first scheduled, end_to_end with its last token. The gap between
      two tokens is the time between their steps.
    prompt_tokens, output_tokens: histograms of lengths, of requests that ended with stop or length.
    recent_first: the latest times to the first token, (moment, seconds).
    recent_gaps: the latest gaps between tokens, (moment, seconds, how many), a few a step. Moments are on the engine's
      clock.
  """

  time_to_first_token: Histogram = _histogram(_LATENCY_BUCKETS)
  inter_token: Histogram = _histogram(_TOKEN_GAP_BUCKETS)
  per_output_token: Histogram = _histogram(_TOKEN_GAP_BUCKETS)
  end_to_end: Histogram = _histogram(_LATENCY_BUCKETS)
  queue: Histogram = _histogram(_LATENCY_BUCKETS)
  prompt_tokens: Histogram = _histogram(_LENGTH_BUCKETS)
  output_tokens: Histogram = _histogram(_LENGTH_BUCKETS)
  recent_first: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  recent_gaps: list[tuple[float, float, int]] = dataclasses.field(default_factory=list)

  def __post_init__(self) -> None:
    self._last_queued: RequestRecord | None = None

  def add_observations(self, other: "Observations") -> None:
    """Adds the observations of another process."""
    for field in dataclasses.fields(self):
      mine, more = getattr(self, field.name), getattr(other, field.name)
      mine.add_histogram(more) if isinstance(mine, Histogram) else mine.extend(more)

  def first_token(self, now: float, seconds: float) -> None:
    """Records a first token that arrives now, this long after its submission."""
    self.time_to_first_token.observe(seconds)
    _keep_recent(self.recent_first, (now, seconds))

  def gap(self, now: float, seconds: float, times: int) -> None:
    """Records a gap between tokens for so many requests."""
    self.inter_token.observe(seconds, times)
    _keep_recent(self.recent_gaps, (now, seconds, times))

  def finished(self, *, seconds: float, first_token_s: float, num_prompt_tokens: int, num_tokens: int) -> None:
    """Records a request that finished with stop or length."""
    self.end_to_end.observe(seconds)
    self.prompt_tokens.observe(num_prompt_tokens)
    self.output_tokens.observe(num_tokens)
    if num_tokens > 1:
      self.per_output_token.observe((seconds - first_token_s) / (num_tokens - 1))

  def queued(self, records: Sequence[RequestRecord]) -> None:
    """Adds the queue times of requests that finished since the last call, from the engine's latest records."""
    fresh: list[RequestRecord] = []
    for record in reversed(records):
      if record is self._last_queued:
        break
      fresh.append(record)
    if fresh:
      self._last_queued = fresh[0]
    for record in fresh:
      # The decode side of a disaggregated engine continues requests that the prefill side has counted.
      if record.first_scheduled is not None and record.side != "decode":
        self.queue.observe(max(0.0, record.first_scheduled - record.arrival))


class NoObservations(Observations):
  """Keeps nothing: for a program that shows no latencies."""

  def first_token(self, now: float, seconds: float) -> None:
    """Does nothing."""

  def gap(self, now: float, seconds: float, times: int) -> None:
    """Does nothing."""

  def finished(self, *, seconds: float, first_token_s: float, num_prompt_tokens: int, num_tokens: int) -> None:
    """Does nothing."""


def _keep_recent[T](recent: list[T], value: T) -> None:
  recent.append(value)
  if len(recent) >= 2 * NUM_RECENT:  # rarely, since it moves all remaining values
    del recent[:-NUM_RECENT]


def percentiles(values: Sequence[tuple[float, int]], wanted: Sequence[float]) -> list[float | None]:
  """Returns the nearest-rank percentile for each share in `wanted` (0 to 1); None without values.

  Args:
    values: (value, count).
    wanted: shares, such as 0.99.
  """
  ordered = sorted(values)
  seen = list(itertools.accumulate(times for _, times in ordered))
  return [ordered[bisect.bisect_left(seen, share * seen[-1])][0] if ordered else None for share in wanted]
