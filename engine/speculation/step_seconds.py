"""Learns how long a step of decodes takes by its number of tokens, from the steps themselves. Pure Python, no clock.

Where the device computes padding, all steps of a rung take the same time, so padding costs nothing, and the next rung
counts as cheap as the largest known one: then it is tried, and soon known. Otherwise a size of up to twice the tokens
of the largest known one counts as the known ones suggest, so drafts grow with what is known.

Contexts grow, and other work comes and goes. That changes steps of all sizes alike, so a change at a well-known size
changes the others in proportion; a part of it is the size's own. One bad moment must not decide for ever: what a size
takes more than smaller ones counts less and less if it was not measured for long, and its measurements begin anew. One
that few steps showed, and that is longer than its tokens would take one after another, counts no more then: these steps
waited for other work.
"""

from bisect import bisect_left
import itertools

from engine.shapes import ShapeLadder

UNKNOWN = float("inf")  # seconds of a size that is too far from the measured ones to be tried
# Measurements that make a size known. The least counts: a size that seems cheap is used, and so measured again. Then
# their lower median counts, which a step that waited for other work does not change.
_FEW = 3
_MANY = 8  # measurements from which on a mean counts, and a change is one of all sizes
_RECENT = 0.1  # weight of a measurement among the later ones
# Of a change, so much is the size's own: its first measurements may have been of a bad moment. It is added up before it
# counts, since estimates are made anew then.
_OWN_SHARE = 0.2
_LEAST_DRIFT = 0.03
# A longer or shorter step counts as so many times the estimate, or so small a part: it waited for something else, or
# the commit of the one before did.
_MOST_CHANGE = 2.0
_LEAST_SECONDS = 1e-9  # of a step, for clocks that stand still
_HALVES_AFTER = 1024  # steps without a measurement of a size, after which its time, or what is more, counts as half
_BEGINS_ANEW_AFTER = 128
_EXPIRES_AFTER = 4096
_COUNTS_WHOLE = 2048  # the same for estimates of what was measured
_STEPS_OF_AN_AGE = 4
_EXACT_TOKENS = 8  # sizes up to this are apart; above, a power of two has a few
_SIZES_OF_A_POWER = 4


class StepSeconds:
  """Estimates of a step's seconds by its number of tokens.

  Attributes:
    is_hopeful: see set_hope.
  """

  def __init__(self, ladder: ShapeLadder | None, tries_all: bool = False):
    """Sets what sizes are, and which are tried.

    Args:
      ladder: its rungs are the sizes, since the device computes padding; None: it computes tokens in use.
      tries_all: a step that is far larger than the known ones may be tried, too.
    """
    self._ladder, self._tries_all = ladder, tries_all
    # Size -> number of measurements, seconds or 0 before they are known, time of the latest; also the measurements
    # while they are fewer than _MANY, and then the size's own change that does not count yet. Seconds are in units of
    # the scale, so that a change of all sizes is one number.
    self._points: dict[int, list[float]] = {}
    self._scale = 1.0
    self._num_steps = 0
    self.is_hopeful = True
    # Estimates in units of the scale, by arguments, since what they depend on has changed, and the age then.
    self._found: dict[tuple, list[float]] = {}
    self._found_at = 0

  def note_step(self, num_tokens: int, seconds: float, num_steps: int = 1) -> float:
    """Adds a measured step of `num_tokens`; returns the factor by which steps of all sizes have changed.

    Args: num_steps: equal steps that it stands for.
    """
    size = self._size_of(num_tokens)
    seconds = max(seconds, _LEAST_SECONDS) / self._scale
    self._num_steps += num_steps
    point = self._points.setdefault(size, [0, 0.0, self._num_steps])
    count, known, latest, *first = point
    is_stale = self._num_steps - latest > _BEGINS_ANEW_AFTER
    if is_stale or count < _MANY:
      self._found.clear()  # otherwise only the scale changes
    if is_stale and (count >= _FEW or not known):
      if known and count < _MANY:  # the least of few
        known = min(known, seconds)
      count, first = 0, []
    if count < _MANY:
      count += 1
      first.append(seconds)
      if count >= _FEW:
        known, latest = min(first) if count == _FEW else sorted(first)[(len(first) - 1) // 2], self._num_steps
      elif not known:  # otherwise the old time counts until the new one is known
        latest = self._num_steps
      point[:] = count, known, latest, *(first if count < _MANY else ())
      return 1.0
    seconds = min(max(seconds, known / _MOST_CHANGE), _MOST_CHANGE * known)
    change = _RECENT * (seconds / known - 1.0)
    drift = (first[0] if first else 1.0) * (1.0 + _OWN_SHARE * change)
    if abs(drift - 1.0) > _LEAST_DRIFT:
      self._found.clear()
      known, drift = known * drift, 1.0
    point[:] = count + 1, known, self._num_steps, drift
    factor = 1.0 + change
    self._scale *= factor
    return factor

  def knows_size(self, num_tokens: int) -> bool:
    """Returns whether steps of `num_tokens` were measured often enough; otherwise their estimate is a trial."""
    return self.read_seconds(num_tokens) != UNKNOWN

  def read_seconds(self, num_tokens: int) -> float:
    """Returns the measured seconds of a step of `num_tokens`, whatever smaller sizes take, or UNKNOWN."""
    point = self._points.get(self._size_of(num_tokens))
    return self._scale * point[1] if point is not None and point[1] > 0 else UNKNOWN

  def follow_others(self, num_steps: int, factor: float) -> None:
    """Notes steps of another kind, by which steps of all kinds have changed by `factor`."""
    self._num_steps += num_steps
    self._scale *= factor

  def estimate_steps(
    self, num_tokens: int, count: int, base: float = UNKNOWN, as_measured: bool = False
  ) -> list[float]:
    """Returns the seconds of steps of `num_tokens` and of up to `count` more tokens; never decreasing.

    [UNKNOWN, ...] if no smaller or equal size is known: such a step must be measured first.

    A choice needs the same steps again and again, at 12 us each (70 right after a step), so they are kept while only
    the scale changes.

    Args:
      base: seconds of a step of `num_tokens` of another kind, if this one is not known.
      as_measured: times count whole for longer, so that a size that took too long is tried again only once in so many
        steps. Larger sizes than the known ones count as the largest, so that they are tried.
    """
    age = self._num_steps // _STEPS_OF_AN_AGE
    if age != self._found_at:
      self._found.clear()
      self._found_at = age
      self._drop_expired()
    if base != UNKNOWN:
      base = UNKNOWN if self.knows_size(num_tokens) else base / self._scale
    found = self._found.get((num_tokens, base, as_measured))
    if found is None or len(found) <= count:
      found = self._estimate_steps(num_tokens, count, base, as_measured)
      self._found[num_tokens, base, as_measured] = found
    scale = self._scale
    return [scale * each for each in found[: count + 1]]

  def set_hope(self, is_hopeful: bool) -> None:
    """Sets whether sizes above the known ones, and those not measured for long, count as cheap enough to be tried."""
    if is_hopeful != self.is_hopeful:
      self.is_hopeful = is_hopeful
      self._found.clear()

  def estimate_step(self, num_tokens: int) -> float:
    """Returns the seconds of a step of `num_tokens`, or UNKNOWN."""
    return self.estimate_steps(num_tokens, 0)[0]

  def _estimate_steps(self, num_tokens: int, count: int, base: float, as_measured: bool) -> list[float]:
    """Does what estimate_steps does, in units of the scale."""
    now = self._num_steps - self._num_steps % _STEPS_OF_AN_AGE
    first = self._size_of(num_tokens)
    seconds, shares = {}, {}
    for size, (_, known, latest, *_) in self._points.items():
      if known:
        age = max(0, min(_HALVES_AFTER, now - latest - _BEGINS_ANEW_AFTER))
        is_old = not as_measured or now - latest > _COUNTS_WHOLE
        shares[size] = 1.0 / (1.0 + age / _HALVES_AFTER) if self.is_hopeful and is_old else 1.0
        seconds[size] = known * (shares[size] if size <= first else 1.0)
    if base != UNKNOWN and first not in seconds:
      seconds[first] = base
    sizes = sorted(seconds)
    least = self._estimate_step(first, sizes, seconds, as_measured)
    if least == UNKNOWN:
      return [UNKNOWN] * (count + 1)
    for size, share in shares.items():
      if size > first and seconds[size] > least:
        if share < 1 and _FEW <= self._points[size][0] < _MANY and first * seconds[size] > size * least:
          del seconds[size]
        else:
          seconds[size] = least + share * (seconds[size] - least)
    sizes = sorted(seconds)
    for larger, smaller in itertools.pairwise(sizes[::-1]):  # other work delayed the smaller one
      seconds[smaller] = min(seconds[smaller], seconds[larger])
    found = []
    largest = sizes[-1]
    for tokens in range(num_tokens, num_tokens + count + 1):
      size = self._size_of(tokens)
      is_known = self.is_hopeful or size <= largest or size == first
      least = max(least, self._estimate_step(size, sizes, seconds, as_measured)) if is_known else UNKNOWN
      found.append(least)
    return found

  def _estimate_step(self, size: int, sizes: list[int], seconds: dict[int, float], as_measured: bool) -> float:
    if size in seconds:
      return seconds[size]
    above = bisect_left(sizes, size)
    if not above:
      return UNKNOWN
    below = sizes[above - 1]
    if above == len(sizes):
      if size > self._largest_trial(below) and not self._tries_all:
        return UNKNOWN
      return seconds[below] if as_measured else self._extrapolate(size, sizes, seconds)
    share = (size - below) / (sizes[above] - below)
    return seconds[below] + share * (seconds[sizes[above]] - seconds[below])

  def _extrapolate(self, size: int, sizes: list[int], seconds: dict[int, float]) -> float:
    """Returns the seconds of a size above the known ones: as the largest known, or on the line of the last two."""
    known = seconds[sizes[-1]]
    if self._ladder is not None or len(sizes) < 2:
      return known
    slope = (known - seconds[sizes[-2]]) / (sizes[-1] - sizes[-2])
    return known + (size - sizes[-1]) * max(0.0, min(slope, known / sizes[-1]))

  def _largest_trial(self, known: int) -> int:
    """Returns the largest size that may be tried if `known` is the largest known one."""
    if self._ladder is None:
      return 2 * known
    budgets = self._ladder.token_budgets
    return budgets[min(bisect_left(budgets, known) + 1, len(budgets) - 1)]

  def _size_of(self, num_tokens: int) -> int:
    if self._ladder is not None:
      return self._ladder.fit(num_tokens).tokens
    if num_tokens <= _EXACT_TOKENS:
      return num_tokens
    step = (1 << (num_tokens - 1).bit_length() - 1) // _SIZES_OF_A_POWER
    return -(-num_tokens // step) * step

  def _drop_expired(self) -> None:
    oldest = self._num_steps - self._num_steps % _STEPS_OF_AN_AGE - _EXPIRES_AFTER
    if any(point[2] < oldest for point in self._points.values()):
      self._points = {size: point for size, point in self._points.items() if point[2] >= oldest}

  def state(self) -> dict:
    """Returns the measurements as plain JSON values; restore_state() takes them back."""
    points = [[size, *point] for size, point in self._points.items()]
    return {"num_steps": self._num_steps, "scale": self._scale, "points": points, "is_hopeful": self.is_hopeful}

  def restore_state(self, state: dict) -> None:
    """Takes back what state() returned."""
    self._found.clear()
    self._found_at = -1
    self._num_steps, self._scale = state["num_steps"], state["scale"]
    self.is_hopeful = state.get("is_hopeful", True)  # traces of earlier versions lack it
    self._points = {size: point for size, *point in state["points"]}
