"""Estimates of a step's time, from counted measurements: what is known, tried, between, forgotten."""

import pytest

from engine.shapes import ShapeLadder
from engine.speculation.step_seconds import UNKNOWN, StepSeconds


def test_a_size_without_a_measured_one_below_is_unknown():
  times = StepSeconds(None)
  assert times.estimate_steps(1, 3) == [UNKNOWN] * 4
  times.note_step(4, 0.01)
  assert times.estimate_steps(3, 2) == [UNKNOWN] * 3, "never decreasing"
  assert times.estimate_steps(4, 2) == [0.01] * 3


def test_sizes_between_are_interpolated_and_larger_ones_tried_within_a_limit():
  times = StepSeconds(None)
  times.note_step(2, 0.01)
  assert times.estimate_steps(2, 11) == [0.01] * 11 + [UNKNOWN], "up to 2 * 2 + 8"
  times.note_step(6, 0.03)
  assert times.estimate_steps(2, 5) == pytest.approx([0.01, 0.015, 0.02, 0.025, 0.03, 0.03])


def test_the_least_of_the_first_measurements_counts_then_a_mean_without_outliers():
  times = StepSeconds(None)
  for seconds in (0.09, 0.01, 0.05):
    times.note_step(1, seconds)
  assert times.estimate_steps(1, 0) == [0.01]
  times.note_step(1, 50.0)
  assert times.estimate_steps(1, 0) == pytest.approx([0.011])
  for _ in range(100):
    times.note_step(1, 0.02)
  assert times.estimate_steps(1, 0) == pytest.approx([0.02], rel=0.01)


def test_a_smaller_step_that_took_longer_costs_no_less_than_it():
  times = StepSeconds(None)
  times.note_step(1, 0.02)
  times.note_step(3, 0.01)
  assert times.estimate_steps(1, 2) == [0.02] * 3


def test_where_padding_is_computed_a_rung_has_one_time_and_the_next_is_tried():
  times = StepSeconds(ShapeLadder((4, 8, 16), 4))
  times.note_step(4, 0.01)
  assert times.estimate_steps(2, 7) == [0.01] * 7 + [UNKNOWN], "the rung after the next is not tried yet"
  times.note_step(5, 0.03)
  assert times.estimate_steps(3, 6) == [0.01, 0.01, 0.03, 0.03, 0.03, 0.03, 0.03]


def test_the_time_of_another_kind_of_step_is_where_estimates_begin():
  times = StepSeconds(None)
  assert times.estimate_steps(4, 2, base=0.01) == [0.01] * 3
  times.note_step(8, 0.05)
  assert times.estimate_steps(4, 5, base=0.01) == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.05])
  times.note_step(4, 0.03)
  assert times.estimate_steps(4, 1, base=0.01)[0] == 0.03


def test_large_sizes_share_a_measurement():
  times = StepSeconds(None)
  times.note_step(33, 0.01)
  times.note_step(36, 0.02)
  assert times.estimate_steps(33, 0) == pytest.approx([0.01])
  assert len(times.state()["points"]) == 1


def test_a_measurement_expires():
  times = StepSeconds(None)
  times.note_step(8, 0.5)
  for _ in range(512):
    times.note_step(1, 0.01)
  assert times.estimate_steps(1, 7)[-1] == 0.5
  times.note_step(1, 0.01)
  assert times.estimate_steps(1, 7)[-1] == pytest.approx(0.01), "it is tried again"


def test_a_restored_state_continues():
  times, twin = StepSeconds(None), StepSeconds(None)
  for tokens in (1, 3, 40, 3):
    times.note_step(tokens, tokens / 100)
  twin.restore_state(times.state())
  for each in (times, twin):
    each.note_step(3, 0.09)
  assert twin.state() == times.state()
  assert twin.estimate_steps(1, 50) == times.estimate_steps(1, 50)
