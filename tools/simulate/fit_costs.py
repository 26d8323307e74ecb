"""Fits a cost table to measured steps. Measures nothing, and samples nothing from the table.

Uses the standard library alone. Minimizes squared RELATIVE errors with non-negative slopes, so a step of 2 ms counts as
much as one of 200 ms. calibrated() then adjusts the table to the steps of a running engine.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import operator
import statistics
from typing import Any

from engine.errors import ConfigError
from tools.simulate.step_costs import WARM_AFTER, WORK_COSTS, After, HostCosts, Launch, StepCosts, corner
from tools.simulate.step_points import LaunchPoint, Point

_QUANTILES = 100  # of a rung's spread
_ENOUGH = 30  # steps of a rung for its own median
_ENOUGH_FOR_SPREAD = 300  # steps for its own spread: with fewer, one disturbed step would set the 99th percentile
_OUTLIER = 0.1  # relative error above which a step counts as disturbed
_REWEIGHTINGS = 12


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
  """Returns the x >= 0 for which value / (row . x) is near 1, robust to a few disturbed values.

  Errors are relative to the modeled value, so the fit iterates. Relative to the measured value, a time that a busy
  machine doubled would weigh less than a halved one, and the result would be too small. Errors above _OUTLIER count
  linearly rather than squared (Huber loss, by reweighting). The fit drops columns with negative coefficients one by
  one. It solves normal equations with columns scaled to length 1, precise enough for a dozen columns that are not
  parallel.

  Args:
    rows: rows of equal length, without negative entries.
    values: one positive value for each row.
  """
  floor = min(values) / 100
  modelled, weights = list(values), [1.0] * len(values)
  solution = [0.0] * len(rows[0])
  for _ in range(_REWEIGHTINGS):
    scaled = [[entry / scale for entry in row] for row, scale in zip(rows, modelled, strict=True)]
    targets = [value / scale for value, scale in zip(values, modelled, strict=True)]
    solution = _nonnegative(scaled, targets, weights)
    modelled = [max(math.fsum(a * b for a, b in zip(row, solution, strict=True)), floor) for row in rows]
    errors = [abs(value / scale - 1) for value, scale in zip(values, modelled, strict=True)]
    weights = [_OUTLIER / max(error, _OUTLIER) for error in errors]
  return solution


def _nonnegative(rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]) -> list[float]:
  """Returns an x >= 0 with a small sum of weight * (row . x - target)^2."""
  width = len(rows[0])
  norms = [math.sqrt(math.fsum(row[column] ** 2 for row in rows)) for column in range(width)]
  active = [column for column in range(width) if norms[column] > 0]
  result = [0.0] * width
  while active:
    lines = [[row[column] / norms[column] for column in active] for row in rows]
    matrix = []
    for a in range(len(active)):
      products = [weight * line[a] for weight, line in zip(weights, lines, strict=True)]
      matrix.append(
        [math.fsum(p * line[b] for p, line in zip(products, lines, strict=True)) for b in range(len(active))]
      )
      matrix[a][a] += 1e-9  # parallel columns share their coefficient; without this they would divide by zero
      matrix[a].append(math.fsum(p * target for p, target in zip(products, targets, strict=True)))
    solution = _solve(matrix)
    lowest = min(range(len(active)), key=lambda index: solution[index])
    if solution[lowest] >= 0:
      for column, entry in zip(active, solution, strict=True):
        result[column] = entry / norms[column]
      break
    del active[lowest]
  return result


def _solve(matrix: list[list[float]]) -> list[float]:
  """Solves [A | b] by Gauss-Jordan elimination with row exchange; A is regular."""
  size = len(matrix)
  for column in range(size):
    pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
    matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
    for row in range(size):
      if row != column:
        factor = matrix[row][column] / matrix[column][column]
        matrix[row] = [entry - factor * other for entry, other in zip(matrix[row], matrix[column], strict=True)]
  return [matrix[row][size] / matrix[row][row] for row in range(size)]


def fit(points: Sequence[Point], by_tokens: bool = False) -> tuple[dict[str, Any], dict[str, float]]:
  """Fits the device's part of a table to measured steps.

  Args:
    by_tokens: StepCosts.by_tokens. Rungs are then the corners of a piecewise linear function of the token count, with
      one more at the fewest tokens of a step, and tokens have no slope of their own.

  Returns:
    `rung_s` and the five slopes of StepCosts; and the errors of the fit, `mean_error` and `worst_error`, as shares of
    the measured time.

  Raises:
    ConfigError: there are fewer steps than parameters.
  """
  rungs = sorted({point.tokens for point in points})
  used = [point.work.decode_rows + point.work.prefill_tokens for point in points]
  if by_tokens and min(used) < rungs[0]:
    rungs.insert(0, min(used))
  if len(points) < len(rungs) + len(WORK_COSTS):
    raise ConfigError(f"{len(points)} steps cannot determine {len(rungs) + len(WORK_COSTS)} costs; measure more steps")
  kinds = [name for name in WORK_COSTS if not (by_tokens and name == "prefill_token_s")]
  columns = [WORK_COSTS.index(name) for name in kinds]
  rows = []
  for point, count in zip(points, used, strict=True):
    rows.append(_shares(rungs, count if by_tokens else point.tokens) + [float(point.work[c]) for c in columns])
  solution = least_squares(rows, [point.seconds for point in points])
  modelled = [math.fsum(a * b for a, b in zip(row, solution, strict=True)) for row in rows]
  errors = [abs(got / point.seconds - 1) for got, point in zip(modelled, points, strict=True)]
  table = {"rung_s": tuple(zip(rungs, solution, strict=False))}
  table |= dict.fromkeys(WORK_COSTS, 0.0) | dict(zip(kinds, solution[len(rungs) :], strict=True))
  return table, {"mean_error": round(math.fsum(errors) / len(errors), 4), "worst_error": round(max(errors), 4)}


def _shares(rungs: Sequence[int], tokens: int) -> list[float]:
  """Returns each rung's weight in the time of so many tokens, as StepCosts.rung interpolates."""
  index, share = corner(rungs, tokens)
  shares = [0.0] * len(rungs)
  shares[index - 1] = 1.0 - share  # the smallest rung has none below it
  shares[index] = share
  return shares


def calibrated(costs: StepCosts, points: Sequence[Point]) -> StepCosts:
  """Adjusts a table to the steps of a running engine: `cold_s`, `spread` and each rung's median.

  `cold_s` comes from the smallest rung, where cold steps show most. A rung's median is that of steps after similar
  steps; the spreads hold the extra time of others. Rungs with too few of these steps move by the median factor of all
  rungs, and share spreads.

  Args:
    costs: a table with the same rungs.
    points: measured steps, at least one.
  """
  smallest = min(point.tokens for point in points)
  excess: list[list[float]] = [[] for _ in range(WARM_AFTER.bit_length() + 1)]
  for tokens, work, seconds, since, _ in points:
    if tokens == smallest and not work.prefill_tokens:
      excess[min(since, WARM_AFTER).bit_length()].append(seconds - costs.seconds(tokens, work))
  *cold, warm = (statistics.median(each) if len(each) >= _ENOUGH else None for each in excess)
  base = 0.0 if warm is None else warm
  cold_s = tuple(0.0 if each is None or warm is None else max(0.0, each - base) for each in cold)
  costs = dataclasses.replace(costs, cold_s=cold_s)

  by_rung: dict[int, list[Point]] = {tokens: [] for tokens, _ in costs.rung_s}
  for point in points:
    by_rung[point.tokens].append(point._replace(seconds=max(0.0, point.seconds - costs.cold(point.since_cold))))
  factor = statistics.median(p.seconds / costs.seconds(p.tokens, p.work) for each in by_rung.values() for p in each)
  rung_s = []
  for tokens, seconds in costs.rung_s:
    steps = by_rung[max(tokens, smallest)]  # a corner of few tokens moves as the smallest rung does
    alike = [point for point in steps if point.after is After.ALIKE]
    seen = alike if len(alike) >= _ENOUGH else steps
    # By tokens the rung is the upper end of these steps, so it moves by its share of the factor.
    found = [
      (point.seconds - (attention := costs.attention(point.work)))
      * (seconds / (costs.seconds(point.tokens, point.work) - attention or 1.0) if costs.by_tokens else 1.0)
      for point in seen
    ]
    moved = statistics.median(found) if len(found) >= _ENOUGH else seconds * factor
    rung_s.append((tokens, max(moved, seconds / 10)))  # the rung does not compensate errors of attention's slopes
  costs = dataclasses.replace(costs, rung_s=tuple(rung_s))

  groups: dict[After, dict[int, list[float]]] = {after: {tokens: [] for tokens in by_rung} for after in After}
  for p in points:
    modelled = costs.seconds(p.tokens, p.work) + costs.cold(p.since_cold)
    groups[p.after][p.tokens].append(p.seconds / modelled)
  everything = [ratio for rungs in groups.values() for ratios in rungs.values() for ratio in ratios]
  spread = {after: _spread(rungs, everything) for after, rungs in groups.items()}
  return dataclasses.replace(costs, spread=spread)


def _spread(rungs: Mapping[int, list[float]], otherwise: list[float]) -> tuple[tuple[int, tuple[float, ...]], ...]:
  """Returns quantiles for each rung; rungs with few values share one shape around their own medians.

  A median needs fewer values than a 99th percentile. Rungs with too few for a median take the shape unchanged, and
  `otherwise` if even all of them together have few.
  """
  few = {tokens: values for tokens, values in rungs.items() if len(values) < _ENOUGH_FOR_SPREAD}
  medians = {tokens: statistics.median(values) for tokens, values in few.items() if len(values) >= _ENOUGH}
  together = [value for values in few.values() for value in values]
  shape = [value / median for tokens, median in medians.items() for value in few[tokens]]
  shared = _quantiles(together if len(together) >= _ENOUGH else otherwise)
  shape = _quantiles(shape) if shape else shared

  def of(tokens: int) -> tuple[float, ...]:
    if tokens not in few:
      return _quantiles(rungs[tokens])
    return tuple(round(factor * medians[tokens], 4) for factor in shape) if tokens in medians else shared

  return tuple((tokens, of(tokens)) for tokens in rungs)


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
  """Returns the middles of _QUANTILES equal parts of the sorted values."""
  ordered = sorted(values)
  return tuple(round(ordered[int((part + 0.5) / _QUANTILES * len(ordered))], 4) for part in range(_QUANTILES))


def with_launch_spread(costs: StepCosts, launches: Sequence[LaunchPoint]) -> StepCosts:
  """Returns the table with the spread of `launches`; rare kinds of launch get none."""
  left: dict[Launch, list[float]] = {kind: [] for kind in Launch}
  for rows, tokens, admissions, seconds, kind in launches:
    left[kind].append(seconds / costs.launch_seconds(rows, tokens, admissions))
  spread = {kind: _quantiles(each) for kind, each in left.items() if len(each) >= _ENOUGH}
  return dataclasses.replace(costs, launch_spread=spread)


def fit_host(launches: Sequence[LaunchPoint], commits: Sequence[tuple[int, float]]) -> HostCosts:
  """Fits the host's part to measured steps.

  Args:
    launches: measured launches, at least one.
    commits: (rows, seconds) of commits.
  """
  launches, commits = _without_slowest(launches, 3), _without_slowest(commits, 1)
  rows = [(1.0, float(rows), float(tokens), float(new), float(tokens > 0)) for rows, tokens, new, *_ in launches]
  *launch, prefill_s = least_squares(rows, [launch.seconds for launch in launches])
  commit = least_squares([(1.0, float(rows)) for rows, _ in commits], [seconds for _, seconds in commits])
  return HostCosts(*launch, *commit, launch_prefill_s=prefill_s)


def _without_slowest[Entry: tuple[Any, ...]](entries: Sequence[Entry], column: int) -> Sequence[Entry]:
  """Returns all rows but the 1% with the largest `column`, so that outliers do not affect means."""
  ordered = sorted(entries, key=operator.itemgetter(column))
  return ordered[: len(ordered) - len(ordered) // 100]
