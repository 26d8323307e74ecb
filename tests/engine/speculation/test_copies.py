"""Requests that copy again and again: their looks, what steps beside good drafts cost, and times of waiting steps."""

import dataclasses
import random

import pytest

from engine.batch import Batch
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from engine.speculation import speculation
from engine.speculation.credit import FIRST_CREDIT, LOOKS_RESERVE, DraftCredit
from engine.speculation.draft_costs import _FIRST_DRAFTED, _MOST_SLOWED, DraftCosts, PlannedStep
from engine.speculation.speculation import _ACCEPTED_A_TRIAL, _Tracked
from tests.engine.speculation.test_speculation import CONFIG, Script, flat

OVERLAP = dataclasses.replace(CONFIG, overlap=True)
WAITING = PlannedStep(num_tokens=1, num_decodes=1, num_constrained=0, num_others=0, most_drafts=15, num_padding=0)


def copies_with_pauses(seed: int) -> tuple[list[int], list[int]]:
  """Four copies of the prompt, with new text of random lengths between."""
  rng = random.Random(seed)
  prompt = rng.sample(range(500), 40)
  answer = []
  for _ in range(4):
    answer += prompt + rng.sample(range(500, 1000), rng.randrange(10, 24))
  return prompt, answer


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_copied_is_looked_at_soon_again(overlap: bool, monkeypatch: pytest.MonkeyPatch):
  texts = {str(seed): copies_with_pauses(seed) for seed in range(8)}
  config = dataclasses.replace(CONFIG, overlap=overlap)

  def count_steps() -> int:
    return sum(len(Script(config, {name: text}, flat).run().batches) for name, text in texts.items())

  soon = count_steps()
  monkeypatch.setattr(speculation, "_LONGEST_GAP_OF_COPIES", speculation._LONGEST_GAP)
  assert soon < 0.93 * count_steps()


def test_looks_at_copies_leave_a_reserve_for_other_requests():
  credit = DraftCredit()
  assert credit.has_reserve
  credit.look_steps = LOOKS_RESERVE
  assert credit.allows_looks and not credit.has_reserve


@pytest.mark.parametrize("num_unspent", [_ACCEPTED_A_TRIAL - 1, _ACCEPTED_A_TRIAL])
def test_what_a_request_copied_pays_for_its_own_trials(num_unspent: int):
  """Otherwise bad luck in the first trials of short matches decided for all later copies."""
  script = Script(CONFIG, {"a": copies_with_pauses(1)}, flat)
  drafts = script.scheduler._speculation
  tracked = drafts._tracked["a"] = _Tracked(Request("a", [1], SamplingParams(max_tokens=9)))
  drafts.costs.credit.steps = -1.0
  tracked.num_unspent = num_unspent
  proved = drafts._rates.estimate_rate({}, "prompt2", is_trial=False)
  assert (drafts._estimate_rate(tracked, "prompt2") > proved) is (num_unspent == _ACCEPTED_A_TRIAL)
  assert drafts._estimate_later(tracked, "prompt2") == proved, "one draft is trial enough"
  tracked.rows.append(("prompt2", 0))
  drafts.note_row(tracked.request, 3, 0, 5)
  assert tracked.num_unspent == 0
  tracked.rows.append(("prompt8", 0))
  drafts.note_row(tracked.request, 7, 5, 6)
  assert tracked.num_unspent == 5


def make_step(step: int, num_drafts: int) -> Batch:
  """Returns a decode of one row."""
  count = 1 + num_drafts
  return Batch(
    step=step,
    shape=StepShape(8, 8, 8),
    request_ids=("a",),
    slots=(0,),
    starts=(40,),
    counts=(count,),
    num_logits=(count,),
    samples=(True,),
    token_ids=(tuple(range(count)) if num_drafts else (),),
    num_drafts=(num_drafts,) if num_drafts else (),
  )


@pytest.fixture
def costs() -> DraftCosts:
  """With plain steps of 10 ms behind others, and past the first steps with drafts."""
  costs = DraftCosts(OVERLAP)
  for step in range(8):
    costs.note_step(make_step(step, 0), 1, 0.01, was_behind=True)
  costs._num_drafted = _FIRST_DRAFTED
  return costs


def note_pair(costs: DraftCosts, num_accepted: int, slow_seconds: float) -> float:
  """Notes a step with three drafts and the plain step after it; returns what the plain one is charged."""
  costs.note_step(make_step(8, 3), 1 + num_accepted, 0.01, was_behind=True)
  before = costs.credit.steps
  costs.note_slow_step(9)
  costs.note_step(make_step(9, 0), 1, slow_seconds, was_behind=True)
  return before - costs.credit.steps


def test_a_step_that_good_drafts_slow_is_no_trial(costs):
  assert note_pair(costs, num_accepted=3, slow_seconds=0.012) == pytest.approx(0.2, abs=0.01)
  twin = DraftCosts(OVERLAP)
  twin.restore_state(costs.state())
  assert twin.state() == costs.state() and twin.state()["has_gained"]


def test_a_step_that_failed_drafts_slow_counts_as_a_trial(costs):
  assert note_pair(costs, num_accepted=0, slow_seconds=0.012) == pytest.approx(1.0)


def test_lost_drafts_behind_good_ones_are_no_trial(costs):
  """They fit one number of accepted drafts. If it is another one, they cost what they took, and not a step."""
  costs.note_step(make_step(8, 3), 3, 0.01, was_behind=True)
  before = costs.credit.steps
  lost = dataclasses.replace(make_step(9, 3), behind=(3,))
  costs.note_step(lost, 1, 0.013, was_behind=True)
  assert before - costs.credit.steps == pytest.approx(0.3, abs=0.01)
  costs.note_slow_step(10)
  before = costs.credit.steps
  costs.note_step(make_step(10, 0), 1, 0.012, was_behind=True)
  assert before - costs.credit.steps == pytest.approx(0.2, abs=0.01), "the plain step after it is none either"


def test_a_long_plain_step_after_drafts_ends_no_drafts(costs):
  """Its time stays until drafts are tried again."""
  for _ in range(8):
    for num_tokens in range(1, 9):
      costs._behind_seconds.note_step(num_tokens, 0.01)
    costs._slowed_seconds.note_step(1, 0.1)
  chances = [[0.9] * 7]
  choice = costs.choose_counts(WAITING, chances, [True], proposing=False, chances_later=chances)
  assert choice.counts == [7]


def test_a_plain_step_that_waited_for_other_work_costs_one_step_at_most(costs):
  assert note_pair(costs, num_accepted=3, slow_seconds=0.3) == pytest.approx(_MOST_SLOWED - 1.0)
  assert costs.credit.steps > FIRST_CREDIT - 2


def test_a_measured_step_that_waits_may_take_less_than_a_plain_one_planned_alone(costs):
  """The latter is mostly the first of its request, when caches are cold."""
  for _ in range(8):
    costs._behind_seconds.note_step(2, 0.013)
    costs._alone_seconds.note_step(1, 0.03)
  behind = costs._behind_seconds.estimate_steps(1, 1)
  inferred = costs._estimate_alone(1, behind)
  assert inferred[1] == pytest.approx(behind[1] + 0.02, rel=0.05), "the host's part is that of the plain step"
  for _ in range(8):
    costs._alone_seconds.note_step(2, 0.011)
  assert costs._estimate_alone(1, behind)[1] == pytest.approx(0.011, rel=0.01)
  chances = [[0.95]]
  choice = costs.choose_counts(WAITING._replace(may_wait=True), chances, [True], proposing=False, chances_later=chances)
  assert choice.counts == [1] and choice.waits
