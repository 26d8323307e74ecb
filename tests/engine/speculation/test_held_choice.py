"""A choice of drafts holds for a few more steps that are alike."""

import dataclasses

import pytest

from engine.speculation.draft_costs import _MOST_REPEATS, DraftCosts, PlannedStep
from tests.engine.speculation.test_speculation import CONFIG

PLANNED = PlannedStep(num_tokens=1, num_decodes=1, num_constrained=0, num_others=0, most_drafts=15, num_padding=0)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> DraftCosts:
  """With known times of one to four tokens. `num_evaluated` counts its choices."""
  costs = DraftCosts(dataclasses.replace(CONFIG, overlap=False))
  for tokens in (1, 2, 4):
    for _ in range(8):
      costs._alone_seconds.note_step(tokens, 0.01)
  choose_anew = costs._choose_anew
  costs.num_evaluated = 0  # type: ignore[attr-defined]

  def count(*arguments):
    costs.num_evaluated += 1  # type: ignore[attr-defined]
    return choose_anew(*arguments)

  monkeypatch.setattr(costs, "_choose_anew", count)
  return costs


def choose(costs: DraftCosts, *chances: float, planned: PlannedStep = PLANNED) -> list[int]:
  return costs.choose_counts(planned, [chances], [True], proposing=False).counts


def test_a_choice_with_drafts_holds_for_alike_steps_and_is_then_made_anew(costs):
  for _ in range(_MOST_REPEATS + 1):
    assert choose(costs, 0.9, 0.8, 0.7) == [3]
  assert costs.num_evaluated == 1
  assert choose(costs, 0.9, 0.8, 0.7) == [3] and costs.num_evaluated == 2


def test_another_number_of_drafts_or_another_chance_ends_it(costs):
  assert choose(costs, 0.9, 0.8, 0.7) == [3]
  assert choose(costs, 0.9) == [1], "a request near its end has fewer"
  assert choose(costs, 0.9, 0.8, 0.7) == [3]
  assert choose(costs, 0.0, 0.0, 0.0) == [0], "they fail now"
  assert choose(costs, 0.9, 0.8, 0.7, planned=PLANNED._replace(most_drafts=2)) == [2], "the rung has fewer left"
  assert costs.num_evaluated == 5


def test_better_chances_keep_a_choice_of_all_drafts_alone(costs):
  assert choose(costs, 0.7, 0.5, 0.4) == [3]
  assert choose(costs, 0.9, 0.8, 0.7) == [3] and costs.num_evaluated == 1
  assert choose(costs, 0.6, 0.5, 0.4) == [3] and costs.num_evaluated == 2, "worse ones end it"
  fewer = PLANNED._replace(most_drafts=2)
  assert choose(costs, 0.7, 0.5, 0.4, planned=fewer) == [2]
  assert choose(costs, 0.9, 0.8, 0.7, planned=fewer) == [2] and costs.num_evaluated == 4, "it left a draft out"


def test_neither_no_drafts_nor_a_size_that_is_tried_holds(costs):
  for _ in range(2):
    assert choose(costs, 0.0) == [0]
    assert choose(costs, *[0.9] * 6) == [6], "seven tokens have no time yet"
  assert costs.num_evaluated == 4


def test_a_restored_choice_holds_on(costs):
  assert choose(costs, 0.9, 0.8, 0.7) == [3]
  twin = DraftCosts(dataclasses.replace(CONFIG, overlap=False))
  twin.restore_state(costs.state())
  assert twin.state() == costs.state() and choose(twin, 0.9, 0.8, 0.7) == [3]
  assert twin.state()["held"][2] == _MOST_REPEATS - 1
