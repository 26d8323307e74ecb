"""Estimates of a step's time, from counted measurements: what is known, tried, between, scaled, forgotten."""

import pytest

from engine.shapes import ShapeLadder
from engine.speculation.step_seconds import UNKNOWN, StepSeconds


def note(times: StepSeconds, num_tokens: int, seconds: float, count: int = 3) -> None:
  """Several equal measurements."""
  for _ in range(count):
    times.note_step(num_tokens, seconds)


def test_a_size_without_a_known_one_below_is_unknown():
  times = StepSeconds(None)
  assert times.estimate_steps(1, 3) == [UNKNOWN] * 4
  note(times, 4, 0.01)
  assert times.estimate_steps(3, 2) == [UNKNOWN] * 3, "never decreasing"
  assert times.estimate_steps(4, 2) == [0.01] * 3


def test_a_size_is_known_after_three_measurements_of_which_the_least_counts():
  times = StepSeconds(None)
  note(times, 2, 0.01)
  for seconds in (0.09, 0.05):
    times.note_step(4, seconds)
    assert times.estimate_steps(2, 2) == [0.01] * 3 and not times.knows_size(4), "tried on"
  times.note_step(4, 0.06)
  assert times.estimate_steps(4, 0) == [0.05] and times.knows_size(4)


def test_sizes_between_are_interpolated_and_larger_ones_tried_within_a_limit():
  times = StepSeconds(None)
  note(times, 2, 0.01)
  assert times.estimate_steps(2, 3) == [0.01] * 3 + [UNKNOWN], "up to 2 * 2"
  note(times, 6, 0.03)
  assert times.estimate_steps(2, 5) == pytest.approx([0.01, 0.015, 0.02, 0.025, 0.03, 0.035])


def test_later_measurements_have_a_mean_without_outliers():
  times = StepSeconds(None)
  note(times, 1, 0.01, 8)
  times.note_step(1, 50.0)
  assert times.estimate_steps(1, 0) == pytest.approx([0.011]), "as 0.02: twice the estimate at most"
  times.note_step(1, 1e-6)
  assert times.estimate_steps(1, 0) == pytest.approx([0.01045]), "as 0.0055: half of it at least"
  note(times, 1, 0.02, 100)
  assert times.estimate_steps(1, 0) == pytest.approx([0.02], rel=0.01)


def test_a_few_measurements_have_a_lower_median():
  """Neither a lucky step nor those that waited for other work decide whether a size is tried again."""
  times = StepSeconds(None)
  for seconds in (0.012, 0.008, 0.011):
    times.note_step(8, seconds)
  assert times.estimate_steps(8, 0) == [0.008]
  times.note_step(8, 0.1)
  assert times.estimate_steps(8, 0) == [0.011]
  for seconds in (0.01, 0.1, 0.1, 0.01):
    times.note_step(8, seconds)
  assert times.estimate_steps(8, 0) == [0.011]


def test_a_smaller_step_that_took_longer_costs_no_less_than_it():
  times = StepSeconds(None)
  note(times, 1, 0.02)
  note(times, 3, 0.01)
  assert times.estimate_steps(1, 2) == [0.02] * 3


def test_as_measured_times_count_whole_for_longer():
  times = StepSeconds(None)
  note(times, 1, 0.01, 100)
  note(times, 2, 0.04, 8)
  note(times, 4, 0.05, 100)
  assert times.estimate_steps(1, 3) == times.estimate_steps(1, 3, as_measured=True)
  times.follow_others(800, 1.0)
  assert times.estimate_steps(1, 3)[3] < 0.04, "old times count less"
  assert times.estimate_steps(1, 3, as_measured=True) == pytest.approx([0.01, 0.04, 0.045, 0.05])
  times.follow_others(1300, 1.0)
  assert times.estimate_steps(1, 3, as_measured=True)[3] < 0.04, "the size is tried again"


def test_as_measured_larger_sizes_than_the_known_count_as_the_largest():
  times = StepSeconds(None)
  note(times, 1, 0.01, 100)
  note(times, 2, 0.012, 8)
  assert times.estimate_steps(1, 3)[3] == pytest.approx(0.016)
  assert times.estimate_steps(1, 3, as_measured=True) == pytest.approx([0.01, 0.012, 0.012, 0.012])


def test_a_size_counts_at_most_as_the_larger_ones():
  times = StepSeconds(None)
  note(times, 1, 0.01, 100)
  note(times, 4, 0.012, 8)
  note(times, 2, 0.03, 8)
  assert times.estimate_steps(1, 3) == pytest.approx([0.01, 0.012, 0.012, 0.012])


def test_a_change_of_a_well_known_size_is_one_of_all():
  times = StepSeconds(None)
  note(times, 4, 0.04)
  note(times, 1, 0.01, 8)
  assert times.note_step(1, 0.02) == pytest.approx(1.1)
  assert times.estimate_steps(4, 0) == pytest.approx([0.044])
  note(times, 1, 0.02, 100)
  assert times.estimate_steps(1, 3)[::3] == pytest.approx([0.02, 0.0725], rel=0.01), "a part is its own"
  assert times.note_step(4, 0.5) == 1.0, "a size with few measurements says nothing of others"
  times.follow_others(0, 0.5)
  assert times.estimate_steps(1, 0) == pytest.approx([0.01], rel=0.01)


def test_first_measurements_of_a_bad_moment_do_not_count_for_ever():
  times = StepSeconds(None)
  note(times, 1, 0.01, 8)
  note(times, 4, 0.03, 8)
  for _ in range(200):  # four tokens take 1.2 times as long as one
    times.note_step(1, 0.01)
    times.note_step(4, 0.012)
  one, _, _, four = times.estimate_steps(1, 3)
  assert four / one == pytest.approx(1.2, rel=0.1)
  twin = StepSeconds(None)
  twin.restore_state(times.state())
  assert [each.note_step(4, 0.013) for each in (times, twin)] == [pytest.approx(1.0, abs=0.02)] * 2
  assert twin.state() == times.state()


def test_the_time_of_another_kind_of_step_is_where_estimates_begin():
  times = StepSeconds(None)
  assert times.estimate_steps(4, 2, base=0.01) == [0.01] * 3
  note(times, 8, 0.05)
  found = times.estimate_steps(4, 5, base=0.01)
  assert found == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.0625]), "no more than in proportion, of the size of 10"
  note(times, 4, 0.03)
  assert times.estimate_steps(4, 1, base=0.01)[0] == 0.03


def test_where_padding_is_computed_a_rung_has_one_time_and_the_next_is_tried():
  times = StepSeconds(ShapeLadder((4, 8, 16), 4))
  note(times, 4, 0.01)
  assert times.estimate_steps(2, 7) == [0.01] * 7 + [UNKNOWN], "the rung after the next is not tried yet"
  note(times, 5, 0.03)
  assert times.estimate_steps(3, 6) == [0.01, 0.01, 0.03, 0.03, 0.03, 0.03, 0.03]


@pytest.mark.parametrize("sizes", [(9, 10), (15, 16), (17, 20), (29, 32), (33, 40), (57, 64), (65, 80)])
def test_large_sizes_share_measurements(sizes: tuple[int, int]):
  times = StepSeconds(None)
  note(times, sizes[0], 0.01)
  note(times, sizes[1], 0.01)
  assert [point[0] for point in times.state()["points"]] == [sizes[1]]


def test_a_measurement_expires():
  times = StepSeconds(None)
  note(times, 2, 0.51, 8)
  for _ in range(2048):
    times.note_step(1, 0.01)
    times.follow_others(1, 1.0)
  assert times.estimate_steps(1, 1) == pytest.approx([0.01, 0.26]), (
    "half of what is more, as it was not measured for long"
  )
  times.follow_others(4, 1.0)
  assert times.estimate_steps(1, 1) == pytest.approx([0.01, 0.01]), "it is tried again"


def test_a_size_without_more_tokens_counts_as_half_if_it_was_not_measured_for_long():
  times = StepSeconds(None)
  note(times, 8, 0.5)
  times.follow_others(128 + 1024 + 1, 1.0)
  assert times.estimate_steps(8, 0) == pytest.approx([0.25])


def test_a_size_that_was_not_measured_for_long_begins_anew():
  times = StepSeconds(None)
  note(times, 8, 0.5, 8)
  note(times, 1, 0.01, 127)
  times.note_step(8, 0.5)
  note(times, 1, 0.01, 128)
  assert times.estimate_steps(1, 7)[-1] == pytest.approx(0.5)
  note(times, 1, 0.01, 512)
  old = 0.01 + 0.49 / 1.5
  assert times.estimate_steps(1, 7)[-1] == pytest.approx(old)
  for _ in range(2):
    times.note_step(8, 0.04)
    assert times.estimate_steps(1, 7)[-1] == pytest.approx(old, rel=0.01), "the old time, until a new one is known"
  times.note_step(8, 0.04)
  assert times.estimate_steps(1, 7)[-1] == pytest.approx(0.04)


def test_few_steps_longer_than_their_tokens_one_after_another_count_for_a_while_only():
  """They waited for other work."""
  times = StepSeconds(None)
  note(times, 1, 0.01)
  note(times, 2, 0.05)
  note(times, 4, 0.039)
  note(times, 1, 0.01, 125)
  assert times.estimate_steps(1, 1) == pytest.approx([0.01, 0.039]), "no more than four tokens"
  times.follow_others(4, 1.0)
  found = times.estimate_steps(1, 3)
  assert 0.01 < found[1] < 0.02 and found[3] == pytest.approx(0.039, rel=0.01), "four tokens may take as long"
  times.set_hope(False)
  assert times.estimate_steps(1, 1) == pytest.approx([0.01, 0.039]), "a known time keeps a size from trials"
  times.set_hope(True)
  times.note_step(2, 0.012)
  assert times.estimate_steps(1, 1) == pytest.approx([0.01, 0.012], rel=0.01), "the least of few counts"


def test_a_restored_state_continues():
  times, twin = StepSeconds(None), StepSeconds(None)
  for tokens in (1, 3, 40, 3) * 5:
    times.note_step(tokens, tokens / 100)
  twin.restore_state(times.state())
  for each in (times, twin):
    each.note_step(3, 0.09)
  assert twin.state() == times.state()
  assert twin.estimate_steps(1, 50) == times.estimate_steps(1, 50)


@pytest.mark.parametrize("ladder", [None, ShapeLadder((2, 8, 16), 16)])
def test_without_hope_only_known_sizes_have_a_time_and_old_ones_keep_theirs(ladder: ShapeLadder | None):
  times = StepSeconds(ladder)
  note(times, 2, 0.01)
  assert UNKNOWN not in times.estimate_steps(2, 2)
  times.set_hope(False)
  assert times.estimate_steps(2, 2) == [0.01, UNKNOWN, UNKNOWN]
  note(times, 4, 0.03)
  known = times.estimate_steps(2, 2)
  assert known[2] == 0.03 and UNKNOWN not in known
  times.follow_others(2000, 1.0)
  assert times.estimate_steps(2, 2) == known
  times.set_hope(True)
  assert times.estimate_steps(2, 2)[2] < 0.03


def test_estimates_are_kept_until_the_next_measurement():
  times, other = StepSeconds(None), StepSeconds(None).state()
  note(times, 2, 0.01)
  assert times.estimate_step(2) == 0.01 and times.estimate_steps(2, 2) == [0.01] * 3
  note(times, 2, 0.02, 9)
  measured = times.estimate_step(2)
  assert measured > 0.01
  times.follow_others(0, 2.0)
  assert times.estimate_step(2) == pytest.approx(2 * measured)
  times.restore_state(other)
  assert times.estimate_step(2) == UNKNOWN
