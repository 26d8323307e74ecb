"""What the event loop sees of requests, as numbers: latencies and lengths. Knows no exposition.

Everything here is written by the event loop's thread, in the middle of its work: a step of 256 streams costs one clock
reading and 256 comparisons, and a histogram is a list of counts.
"""

import bisect
from collections.abc import Sequence
import dataclasses
import itertools

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


@dataclasses.dataclass
class Histogram:
  """Counts of values by bucket.

  Attributes:
    bounds: upper bounds of the buckets, ascending; a value on a bound is inside. The last bucket has none.
    counts: of each bucket, not cumulative; one more than bounds.
    total: sum of the values.
  """

  bounds: tuple[float, ...]
  counts: list[int] = dataclasses.field(default_factory=list)
  total: float = 0.0

  def __post_init__(self) -> None:
    self.counts = self.counts or [0] * (len(self.bounds) + 1)

  def observe(self, value: float, times: int = 1) -> None:
    """Counts a value, `times` times."""
    self.counts[bisect.bisect_left(self.bounds, value)] += times
    self.total += value * times

  def add_histogram(self, other: "Histogram") -> None:
    """Takes in all values of another with the same bounds."""
    self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
    self.total += other.total


def _histogram(bounds: tuple[float, ...]) -> Histogram:
  return dataclasses.field(default_factory=lambda: Histogram(bounds))


@dataclasses.dataclass
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

  time_to_first_token: Histogram = _histogram(_LATENCY_BUCKETS)
  inter_token: Histogram = _histogram(_TOKEN_GAP_BUCKETS)
  per_output_token: Histogram = _histogram(_TOKEN_GAP_BUCKETS)
  end_to_end: Histogram = _histogram(_LATENCY_BUCKETS)
  queue: Histogram = _histogram(_LATENCY_BUCKETS)
  prompt_tokens: Histogram = _histogram(_LENGTH_BUCKETS)
  output_tokens: Histogram = _histogram(_LENGTH_BUCKETS)
  recent_first: list[float] = dataclasses.field(default_factory=list)
  recent_gaps: list[tuple[float, int]] = dataclasses.field(default_factory=list)

  def __post_init__(self) -> None:
    self._last_queued: RequestRecord | None = None

  def add_observations(self, other: "Observations") -> None:
    """Takes in all that another has seen."""
    for field in dataclasses.fields(self):
      mine, more = getattr(self, field.name), getattr(other, field.name)
      mine.add_histogram(more) if isinstance(mine, Histogram) else mine.extend(more)

  def first_token(self, seconds: float) -> None:
    """A request's first token came this long after its submission."""
    self.time_to_first_token.observe(seconds)
    _keep_recent(self.recent_first, seconds)

  def gap(self, seconds: float, times: int) -> None:
    """So many requests had a token now and their one before this long ago."""
    self.inter_token.observe(seconds, times)
    _keep_recent(self.recent_gaps, (seconds, times))

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


def _keep_recent[T](recent: list[T], value: T) -> None:
  recent.append(value)
  if len(recent) >= 2 * _RECENT:  # rarely, for it moves all that stay
    del recent[:-_RECENT]


def percentiles(values: Sequence[tuple[float, int]], wanted: Sequence[float]) -> list[float | None]:
  """The smallest value that this share of all is not above, for each of `wanted` (0 to 1); None where there is none.

  Args:
    values: (value, how often).
    wanted: shares of all.
  """
  ordered = sorted(values)
  seen = list(itertools.accumulate(times for _, times in ordered))
  return [ordered[bisect.bisect_left(seen, share * seen[-1])][0] if ordered else None for share in wanted]
