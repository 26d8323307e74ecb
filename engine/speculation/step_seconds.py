"""Learns how long a step of decodes takes by its number of tokens, from the steps themselves. Pure Python, no clock.

Where the device computes padding, all steps of a rung take the same time, so padding costs nothing. A size that was not
measured often enough counts as cheap as the largest smaller one, within a limit: then it is tried, and soon known.

Contexts grow, and other work comes and goes. That changes steps of all sizes alike, so a change at a well-known size
changes the others in proportion. A size that was not measured for long counts as cheaper and cheaper, so it is tried
again, and then its measurements begin anew: one bad moment must not decide for ever.
"""

from bisect import bisect_left

from engine.shapes import ShapeLadder

UNKNOWN = float("inf")  # seconds of a size that is too far from the measured ones to be tried
_FEW = 3  # measurements that make a size known; of these the median counts
_MANY = 8  # measurements from which on a change is one of all sizes
_RECENT = 0.1  # weight of a measurement among the later ones
# A longer or shorter step counts as so many times the estimate, or so small a part: it waited for something else, or
# the commit of the one before did.
_MOST_CHANGE = 2.0
_LEAST_SECONDS = 1e-9  # of a step, for clocks that stand still
_HALVES_AFTER = 1024  # steps without a measurement of a size, after which it counts as half
_BEGINS_ANEW_AFTER = 128
_EXPIRES_AFTER = 4096
_EXACT_TOKENS = 8  # sizes up to this are apart; above, a power of two has a few
_SIZES_OF_A_POWER = 4


class StepSeconds:
  """Estimates of a step's seconds by its number of tokens."""

  def __init__(self, ladder: ShapeLadder | None):
    """Args: ladder: its rungs are the sizes, since the device computes padding; None: it computes tokens in use."""
    self._ladder = ladder
    # Size -> number of measurements, seconds, time of the latest; until it is known, also the measurements. Seconds are
    # in units of the scale, so that a change of all sizes is one number.
    self._points: dict[int, list[float]] = {}
    self._scale = 1.0
    self._num_steps = 0

  def note_step(self, num_tokens: int, seconds: float, num_steps: int = 1) -> float:
    """Adds a measured step of `num_tokens`; returns the factor by which steps of all sizes have changed.

    Args: num_steps: equal steps that it stands for.
    """
    size = self._size_of(num_tokens)
    seconds = max(seconds, _LEAST_SECONDS) / self._scale
    self._num_steps += num_steps
    point = self._points.get(size)
    if point is None or self._num_steps - point[2] > _BEGINS_ANEW_AFTER:
      self._points[size] = [1, seconds, self._num_steps, seconds]
      return 1.0
    count, known, _, *first = point
    factor = 1.0
    if count < _FEW:
      first.append(seconds)
      known = sorted(first)[len(first) // 2]
    else:
      first = []
      seconds = min(max(seconds, known / _MOST_CHANGE), _MOST_CHANGE * known)
      changed = known + _RECENT * (seconds - known)
      if count >= _MANY:
        factor = changed / known
        self._scale *= factor
      else:
        known = changed
    point[:] = count + 1, known, self._num_steps, *first
    return factor

  def knows_size(self, num_tokens: int) -> bool:
    """Returns whether steps of `num_tokens` were measured often enough; otherwise their estimate is a trial."""
    point = self._points.get(self._size_of(num_tokens))
    return point is not None and point[0] >= _FEW

  def scale_all(self, factor: float) -> None:
    """Multiplies all estimates, because steps of another kind have changed by `factor`."""
    self._scale *= factor

  def pass_steps(self, num_steps: int = 1) -> None:
    """Notes steps of another kind."""
    self._num_steps += num_steps

  def estimate_steps(self, num_tokens: int, count: int, base: float = UNKNOWN) -> list[float]:
    """Returns the seconds of steps of `num_tokens` and of up to `count` more tokens; never decreasing.

    [UNKNOWN, ...] if no smaller or equal size is known: such a step must be measured first.

    Args: base: seconds of a step of `num_tokens` of another kind, if this one is not known.
    """
    self._drop_expired()
    seconds = {size: self._known_seconds(point) for size, point in self._points.items() if point[0] >= _FEW}
    first = self._size_of(num_tokens)
    if base != UNKNOWN and first not in seconds:
      seconds[first] = base
    sizes = sorted(seconds)
    found, least = [], 0.0
    for tokens in range(num_tokens, num_tokens + count + 1):
      least = max(least, self._estimate_step(self._size_of(tokens), sizes, seconds))
      found.append(least)
    return found

  def _known_seconds(self, point: list[float]) -> float:
    """Returns a size's seconds; after some steps without a measurement less and less, down to half."""
    age = max(0, min(_HALVES_AFTER, self._num_steps - point[2] - _BEGINS_ANEW_AFTER))
    return self._scale * point[1] / (1.0 + age / _HALVES_AFTER)

  def _estimate_step(self, size: int, sizes: list[int], seconds: dict[int, float]) -> float:
    if size in seconds:
      return seconds[size]
    above = bisect_left(sizes, size)
    if not above:
      return UNKNOWN
    below = sizes[above - 1]
    if above == len(sizes):
      return seconds[below] if size <= self._largest_trial(below) else UNKNOWN
    share = (size - below) / (sizes[above] - below)
    return seconds[below] + share * (seconds[sizes[above]] - seconds[below])

  def _largest_trial(self, known: int) -> int:
    """Returns the largest size that may be tried if `known` is the largest known one."""
    if self._ladder is None:
      return 2 * known + 8
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
    oldest = self._num_steps - _EXPIRES_AFTER
    if any(point[2] < oldest for point in self._points.values()):
      self._points = {size: point for size, point in self._points.items() if point[2] >= oldest}

  def state(self) -> dict:
    """Returns the measurements as plain JSON values; restore_state() takes them back."""
    points = [[size, *point] for size, point in self._points.items()]
    return {"num_steps": self._num_steps, "scale": self._scale, "points": points}

  def restore_state(self, state: dict) -> None:
    """Takes back what state() returned."""
    self._num_steps, self._scale = state["num_steps"], state["scale"]
    self._points = {size: point for size, *point in state["points"]}
