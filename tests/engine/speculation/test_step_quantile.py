"""An estimate of a quantile of step times: near the true one, slow to move, and weighted by steps."""

import random

import pytest

from engine.speculation.step_quantile import StepQuantile


@pytest.mark.parametrize("share", [0.5, 0.9, 0.985])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_estimate_comes_near_the_quantile(share: float, num_steps: int):
  rng, quantile = random.Random(1), StepQuantile(share)
  found = []
  for number in range(40_000):
    quantile.note_step(0.01 * (1 + rng.random()), num_steps)
    if number >= 20_000:
      found.append(quantile.seconds)
  assert sum(found) / len(found) == pytest.approx(0.01 * (1 + share), rel=0.02)
  assert max(found) <= 0.02, "no longer than the longest step"


def test_one_long_step_raises_it_by_little():
  quantile = StepQuantile(0.985)
  for _ in range(10):
    quantile.note_step(0.01)
  quantile.note_step(10.0)
  assert 0.01 < quantile.seconds < 0.0101
  for _ in range(100):
    quantile.note_step(0.01)
  assert quantile.seconds == 0.01, "and is soon forgotten"


def test_a_step_that_stands_for_several_counts_as_these():
  one, several = StepQuantile(0.9), StepQuantile(0.9)
  for seconds, num_steps in ((0.01, 1), (0.02, 5), (0.005, 7), (0.012, 3)):
    several.note_step(seconds, num_steps)
    for _ in range(num_steps):
      one.note_step(seconds)
  assert several.seconds == pytest.approx(one.seconds) and 0.01 < one.seconds < 0.012


def test_it_does_not_pass_the_step_that_it_learns_from():
  quantile = StepQuantile(0.5)
  quantile.note_step(0.01)
  quantile.note_step(0.0101, 64)
  assert quantile.seconds == 0.0101
  quantile.note_step(0.01, 64)
  assert quantile.seconds == 0.01
