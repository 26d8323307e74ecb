"""Chooses how many drafts pay in a step: those with the least mean time of a row's token. Pure Python, pure functions.

A draft lengthens the step for all rows, and shortens its own row's way. The sum of tokens a second would count only
that: it would give most rows drafts and slow the others down. So what is compared is the mean over rows of the seconds
for a token, and the expected tokens a second are those at which all rows had this mean. The sum gains as much or more.
"""

from collections.abc import Collection, Sequence
import math
from typing import NamedTuple

_MARGIN = 1.03  # least gain in expected tokens a second: measured times are that exact
_CAUTION = 1.25  # times that drafts must bring what they cost: estimates err, and a longer step delays other requests


class StepOption(NamedTuple):
  """A step that may take drafts, as its expected tokens and seconds.

  Attributes:
    base_tokens: expected tokens without drafts, in all steps that `seconds` covers.
    seconds: of the step with 0, 1, 2, ... drafts, and of what must follow it.
    required: indices of rows that must all have a draft, or the step takes none.
    row_tokens: of base_tokens, those of each row that may have drafts; (): one each.
  """

  base_tokens: float
  seconds: Sequence[float]
  required: Collection[int] = ()
  row_tokens: Sequence[float] = ()


class DraftChoice(NamedTuple):
  """What a step gets.

  Attributes:
    counts: number of drafts for each row.
    rate: expected tokens a second with them, of rows that are all as fast as the mean.
    waits: the next step waits for them.
  """

  counts: list[int]
  rate: float
  waits: bool = False


def choose_drafts(chances: Sequence[Sequence[float]], option: StepOption, least_rate: float, most: int) -> DraftChoice:
  """Chooses the number of drafts of each row for the least mean time of a token over rows; none if no choice pays.

  Drafts join in the order in which they shorten it. All numbers of drafts are compared, because time by tokens has
  steps.

  Args:
    chances: for each row, the chance that its first 1, 2, ... drafts are all accepted; decreasing.
    option: the step.
    least_rate: tokens a second of the best other choice, of which the gain must be a margin.
    most: most drafts of all rows together.
  """
  counts, required = [0] * len(chances), frozenset(option.required)
  gains = []
  for index, row in enumerate(chances):
    base = expected = option.row_tokens[index] if option.row_tokens else 1
    for place, chance in enumerate(row):
      # What the draft takes off the row's weight times its time for a token, in steps.
      gain = base * base * chance / (expected * (expected + chance))
      expected += chance
      gains.append((place > 0 or index not in required, -gain, place, index))
  gains.sort()
  best, best_rate = 0, least_rate * _MARGIN
  total = left = option.base_tokens
  for number, (_, negative, _, _) in enumerate(gains[: min(most, len(option.seconds) - 1)], 1):
    left += negative
    rate = total * total / (left * option.seconds[number])
    if number >= len(required) and rate > best_rate:
      best, best_rate = number, rate
  for _, _, _, index in gains[:best]:
    counts[index] += 1
  return DraftChoice(counts, best_rate if best else least_rate)


def add_caution(seconds: Sequence[float], base: float) -> list[float]:
  """Returns the times of steps with drafts, further above that of a step without, `base`, than they are."""
  return [base + _CAUTION * (each - base) if each > base else each for each in seconds]


def limit_seconds(seconds: list[float], measured: Sequence[float], longest: float) -> list[float]:
  """Returns the times of steps with 0, 1, 2, ... drafts, up to the first that took longer than `longest`.

  Args:
    seconds: the times, as a choice estimates them. The first one stays.
    measured: the same, as they were measured; infinity: not yet.
  """
  for number in range(1, len(seconds)):
    if longest < measured[number] < math.inf:
      return seconds[:number]
  return seconds


def list_chances(rate: float, count: int, num_unknown: int = 0, later: float | None = None) -> list[float]:
  """Returns the chance that the first 1, 2, ..., `count` drafts are accepted.

  Args:
    rate: chance of the first draft, or of the first guess before the drafts.
    num_unknown: guesses before the drafts.
    later: chance of each further guess or draft after right ones; None: `rate`.
  """
  later = rate if later is None else later
  return [rate * later ** (num_unknown + place) for place in range(count)]
