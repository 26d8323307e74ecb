"""The number of drafts that pays, by counts: against trying every choice, and by hand."""

import itertools
import random

import pytest

from engine.speculation.acceptance import AcceptanceRates, Trials, forget_trials
from engine.speculation.draft_choice import StepOption, choose_drafts, list_chances


def test_chances_are_powers_and_unknown_tokens_count_too():
  assert list_chances(0.5, 3) == [0.5, 0.25, 0.125]
  assert list_chances(0.5, 2, 1) == [0.25, 0.125]
  assert list_chances(0.5, 3, later=0.1) == pytest.approx([0.5, 0.05, 0.005]), "one draft is trial enough"
  assert list_chances(0.5, 3, 2, later=0.1) == pytest.approx([0.005, 0.0005, 0.00005]), (
    "only the first guess is the first"
  )


def test_where_tokens_are_free_all_drafts_pay():
  chances = [list_chances(0.5, 3), list_chances(0.9, 2)]
  assert choose_drafts(chances, StepOption(2, [1.0] * 6), 2.0, 5).counts == [3, 2]
  assert choose_drafts(chances, StepOption(2, [1.0] * 6), 2.0, 3).counts == [1, 2], "the likely ones first"


def test_where_time_grows_with_tokens_none_pays():
  chances = [list_chances(0.9, 7)]
  seconds = [1.0 + tokens for tokens in range(8)]
  assert choose_drafts(chances, StepOption(1, seconds), 1.0, 7).counts == [0]


def test_a_gain_below_the_margin_is_none():
  assert choose_drafts([[0.02]], StepOption(1, [1.0, 1.0]), 1.0, 1).counts == [0]
  assert choose_drafts([[0.04]], StepOption(1, [1.0, 1.0]), 1.0, 1).counts == [1]


def test_drafts_fill_a_rung_and_go_on_to_the_next_if_that_pays():
  seconds = [1.0] * 4 + [1.5] * 4
  assert choose_drafts([list_chances(0.5, 7)], StepOption(1, seconds), 1.0, 7).counts == [3]
  assert choose_drafts([list_chances(0.98, 7)], StepOption(1, seconds), 1.0, 7).counts == [7]


def test_required_rows_have_a_draft_or_nobody_has():
  chances = [[0.9, 0.8], [0.1]]
  seconds = [1.0, 1.0, 1.9, 1.9]
  assert choose_drafts(chances, StepOption(2, seconds), 2.0, 3).counts == [1, 0]
  assert choose_drafts(chances, StepOption(2, seconds, (0, 1)), 2.0, 3).counts == [0, 0]
  assert choose_drafts(chances, StepOption(2, [1.0] * 4, (0, 1)), 2.0, 2).counts == [1, 1]
  assert choose_drafts(chances, StepOption(2, [1.0] * 4, (0, 1)), 2.0, 1).counts == [0, 0]
  assert choose_drafts(chances, StepOption(2, [1.0] * 4, (1,)), 2.0, 1).counts == [0, 1]


def test_a_step_that_is_longer_for_most_rows_alone_is_none():
  """Six of eight drafts bring more tokens a second than none, but two rows would wait for them."""
  chances = [[0.7] for _ in range(8)]
  some = [1.0, *[1.27] * 6, 1.9, 1.9]
  assert choose_drafts(chances, StepOption(8, some), 8.0, 8).counts == [1] * 6 + [0] * 2
  some = [1.0, *[1.42] * 6, 1.9, 1.9]
  assert (8 + 6 * 0.7) / 1.42 > 1.05 * 8.0
  assert choose_drafts(chances, StepOption(8, some), 8.0, 8).counts == [0] * 8


def test_a_first_draft_comes_before_a_third_that_is_as_likely():
  chances = [[0.9, 0.8, 0.7], [0.6]]
  assert choose_drafts(chances, StepOption(2, [1.0] * 3), 2.0, 2).counts == [1, 1]
  assert choose_drafts(chances, StepOption(3, [1.0] * 3, row_tokens=(1, 2)), 3.0, 2).counts == [1, 1]


def mean_rate(option: StepOption, chances: list[list[float]], counts: tuple[int, ...]) -> float:
  """Returns the tokens a second of a step whose rows all have the mean time for a token."""
  base = option.row_tokens or [1] * len(chances)
  others = option.base_tokens - sum(base)
  rows = zip(base, chances, counts, strict=True)
  times = others + sum(tokens * tokens / (tokens + sum(row[:count])) for tokens, row, count in rows)
  return option.base_tokens**2 / (times * option.seconds[sum(counts)])


@pytest.mark.parametrize("seed", range(30))
def test_no_choice_has_a_shorter_mean_time_of_a_token(seed: int):
  rng = random.Random(seed)
  chances = [list_chances(rng.random(), rng.randint(1, 4), rng.randint(0, 1)) for _ in range(rng.randint(1, 3))]
  most = rng.randint(1, 12)
  seconds = list(itertools.accumulate(rng.choice((0.0, 0.0, 0.1, 0.5)) for _ in range(13)))
  seconds = [1.0 + each for each in seconds]
  row_tokens = [rng.choice((1, 2)) for _ in chances]
  option = StepOption(sum(row_tokens) + rng.randint(0, 2), seconds, row_tokens=row_tokens)
  rate = option.base_tokens / seconds[0]
  choice = choose_drafts(chances, option, rate, most)
  best = 1.03 * rate
  for counts in itertools.product(*(range(len(row) + 1) for row in chances)):
    if 0 < sum(counts) <= most:
      best = max(best, mean_rate(option, chances, counts))
  if any(choice.counts):
    assert choice.rate == pytest.approx(best) and sum(choice.counts) <= most
    assert mean_rate(option, chances, tuple(choice.counts)) == pytest.approx(best)
    tokens = option.base_tokens + sum(sum(row[:count]) for row, count in zip(chances, choice.counts, strict=True))
    assert tokens / seconds[sum(choice.counts)] >= choice.rate * (1 - 1e-9), "the sum of tokens a second gains as much"
  else:
    assert best == pytest.approx(1.03 * rate) and choice.rate == rate


def test_a_rate_is_the_share_of_accepted_trials():
  rates, trials = AcceptanceRates(), Trials()
  for _ in range(100):
    rates.note_row(trials, "ngram4", 4, 2)  # two accepted, one failed, one never tried
  assert rates.estimate_rate(trials, "ngram4") == pytest.approx(2 / 3, abs=0.03)
  assert rates.estimate_rate({}, "ngram4") > 0.95, "each first draft was right"
  for number in range(600):
    rates.note_row(trials, "ngram4", 7, 7 * (number % 2))
  assert rates.estimate_rate({}, "ngram4") == pytest.approx(0.5, abs=0.05), "a long copy is one row"
  for _ in range(100):
    rates.note_row(trials, "ngram4", 4, 4)
  assert rates.estimate_rate(trials, "ngram4") > 0.95


def test_a_rate_follows_a_request_and_not_only_all():
  rates, good, bad = AcceptanceRates(), Trials(), Trials()
  for _ in range(50):
    rates.note_row(good, "ngram2", 3, 3)
    rates.note_row(bad, "ngram2", 3, 0)
  assert rates.estimate_rate(good, "ngram2") > 0.9 > 0.2 > rates.estimate_rate(bad, "ngram2")


def test_further_drafts_of_long_copies_are_surer_than_the_first():
  rates = AcceptanceRates()
  for number in range(60):  # half of the matches are copies, to their end
    rates.note_row({}, "prompt2", 7, 7 * (number % 2))
  assert rates.estimate_rate({}, "prompt2") == pytest.approx(0.5, abs=0.05)
  assert rates.estimate_later({}, "prompt2", is_trial=False) > 0.9
  twin = AcceptanceRates()
  twin.restore_state(rates.state())
  assert twin.estimate_later({}, "prompt2", is_trial=False) == rates.estimate_later({}, "prompt2", is_trial=False)


def test_further_drafts_are_no_less_likely_than_the_first():
  """Copies that end after a token say nothing about the next request's."""
  rates = AcceptanceRates()
  for _ in range(60):
    rates.note_row({}, "prompt8", 7, 1)
  for is_trial in (False, True):
    assert rates.estimate_later({}, "prompt8", is_trial) == rates.estimate_rate({}, "prompt8", is_trial) > 0.9


def test_only_trials_are_tried_whatever_others_say():
  rates = AcceptanceRates()
  assert 0.4 < rates.estimate_rate({}, "ngram4", is_trial=False) < 0.7 == rates.estimate_rate({}, "ngram4")
  for _ in range(300):
    rates.note_row({}, "ngram4", 3, 0)
  assert rates.estimate_rate({}, "ngram4") == 0.35 and rates.estimate_rate({}, "ngram4", is_trial=False) < 0.03
  for _ in range(300):
    rates.note_row({}, "ngram4", 3, 3)
  assert rates.estimate_rate({}, "ngram4", is_trial=False) > 0.9


def test_what_fails_for_all_is_still_tried_by_new_requests():
  rates, trials = AcceptanceRates(), Trials()
  for _ in range(1000):
    rates.note_row(trials, "ngram8", 7, 0)
  low = rates.estimate_rate(trials, "ngram8")
  assert low < 0.15 and rates.estimate_rate({}, "ngram8") > 0.4
  forget_trials(trials, 0.5)
  assert low < rates.estimate_rate(trials, "ngram8") < 0.4
