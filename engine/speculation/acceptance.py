"""Estimates how many drafts of a request are accepted: a rate for each source, by request and over all. Pure Python.

A row's drafts are accepted up to the first wrong one. So a row is a series of trials with one failure at most. The
chance that its first j drafts are accepted is rate * later**(j - 1): after an accepted draft, further ones are surer.
Rates are of recent rows: older ones lose weight. Over all requests only the first draft of each row counts for the
rate: a long copy says little about whether the next request copies. It says how far copies go.
"""

import math

# Rate of a source before it has been tried. It is optimistic, because a trial costs little.
_FIRST_GUESSES = {
  "ngram2": 0.4,
  "ngram3": 0.55,
  "ngram4": 0.7,
  "ngram8": 0.85,
  "prompt2": 0.5,
  "prompt3": 0.6,
  "prompt4": 0.75,
  "prompt8": 0.85,
  "grammar": 0.95,
}
_FIRST_GUESS = 0.6  # of other sources
_LEAST_SHARE = 0.5  # of the first guess, below which no rate over all requests falls for a trial: texts differ
_GUESS_WEIGHT = 4.0  # rows that the first guess of a source counts as
_PRIOR_WEIGHT = 2.0  # trials that the rate over all requests counts as, for a request
_KEEP_OF_SOURCE = 0.99  # weight that older rows keep at each row
_KEEP_OF_REQUEST = 0.85
_MOST = 0.98

LATER = "+"  # after a source: its drafts after accepted ones
Trials = dict[str, list[float]]  # source -> weights of accepted drafts and of trials


class AcceptanceRates:
  """The rates of sources over all requests, and with them the estimates for one request."""

  def __init__(self):
    self._sources: Trials = {}  # weights of rows whose first draft was accepted, and of all rows

  def estimate_rate(self, trials: Trials, source: str, is_trial: bool = True) -> float:
    """Returns the chance that the next draft of `source` is accepted, from the trials of a request and of all.

    Args: is_trial: a failure is worth its cost. Otherwise, the rate over all requests is one standard error lower.
    """
    prior = self._estimate_prior(source, is_trial)
    accepted, tried = trials.get(source, (0.0, 0.0))
    return min(_MOST, (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT))

  def estimate_later(self, trials: Trials, source: str, is_trial: bool) -> float:
    """Returns the chance of each further draft of `source` after accepted ones: at least that of the first draft.

    Args: as of estimate_rate.
    """
    first = self.estimate_rate(trials, source, is_trial)
    accepted, tried = self._sources.get(source + LATER, (0.0, 0.0))
    prior = (accepted + _GUESS_WEIGHT * first) / (tried + _GUESS_WEIGHT)
    accepted, tried = trials.get(source + LATER, (0.0, 0.0))
    return min(_MOST, max(first, (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)))

  def _estimate_prior(self, source: str, is_trial: bool) -> float:
    guess = _FIRST_GUESSES.get(source, _FIRST_GUESS)
    accepted, tried = self._sources.get(source, (0.0, 0.0))
    weight = tried + _GUESS_WEIGHT
    rate = (accepted + _GUESS_WEIGHT * guess) / weight
    return max(_LEAST_SHARE * guess, rate) if is_trial else max(0.0, rate - math.sqrt(rate * (1 - rate) / (weight + 1)))

  def note_row(self, trials: Trials, source: str, num_drafts: int, num_accepted: int) -> None:
    """Adds a row with `num_drafts` drafts to a request's trials and to those of all."""
    num_tried = min(num_drafts, num_accepted + 1)
    _add_trials(trials, source, _KEEP_OF_REQUEST, num_accepted, num_tried)
    _add_trials(self._sources, source, _KEEP_OF_SOURCE, num_accepted > 0, 1.0)
    if num_accepted and num_tried > 1:
      _add_trials(trials, source + LATER, _KEEP_OF_REQUEST, num_accepted - 1, num_tried - 1)
      _add_trials(self._sources, source + LATER, _KEEP_OF_SOURCE, num_accepted - 1, num_tried - 1)

  def state(self) -> Trials:
    """Returns the trials of all requests as plain JSON values; restore_state() takes them back."""
    return {source: list(totals) for source, totals in self._sources.items()}

  def restore_state(self, state: Trials) -> None:
    """Takes back what state() returned."""
    self._sources = {source: list(totals) for source, totals in state.items()}


def _add_trials(trials: Trials, source: str, keep: float, accepted: float, tried: float) -> None:
  before = trials.get(source, (0.0, 0.0))
  trials[source] = [before[0] * keep + accepted, before[1] * keep + tried]


def forget_trials(trials: Trials, keep: float) -> None:
  """Multiplies the weight of a request's trials by `keep`, 0 to 1: what they show is old, and others count more."""
  for totals in trials.values():
    totals[0] *= keep
    totals[1] *= keep
