"""A draft model whose drafts never pay rests; steps then take what they take without it."""

import dataclasses

import pytest

from engine.batch import Batch, StepResult
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.speculation.draft_fills import EARNED_SHARE, FIRST_CREDIT, MOST_COST, RESUME_CREDIT, DraftFills
from engine.speculation.model_drafter import MODEL
from tests.engine.speculation.test_model_drafter import ProposedScript, fresh_text
from tests.engine.speculation.test_speculation import CONFIG, Script, flat

STEP = flat(1)  # seconds


class FilledScript(ProposedScript):
  """A device whose draft model takes time for each step that it does not leave out.

  Attributes: fill_seconds: of all steps without proposals.
  """

  def __init__(self, *settings, fill_seconds: float):
    super().__init__(*settings)
    self._seconds_of_fill, self.fill_seconds = fill_seconds, 0.0

  def _values(self, batch: Batch) -> StepResult:
    result = super()._values(batch)
    if batch.num_proposals:
      self.now += self._seconds_of_fill
    elif batch.fills_draft:
      self.now += self._seconds_of_fill
      self.fill_seconds += self._seconds_of_fill
      result = dataclasses.replace(result, fill_seconds=self._seconds_of_fill)
    return result


def run_in_pairs(script: Script, texts: dict[str, tuple[list[int], list[int]]]) -> Script:
  """Runs requests to their ends, two at a time."""
  script.texts, script.outputs = texts, {name: [] for name in texts}
  waiting, in_flight, scheduler = list(texts), None, script.scheduler
  while waiting or scheduler.num_running or scheduler.num_waiting or in_flight is not None:
    while waiting and scheduler.num_running + scheduler.num_waiting < 2:
      prompt, answer = texts[name := waiting.pop(0)]
      scheduler.add_request(Request(name, prompt, SamplingParams(max_tokens=len(answer), seed=1)))
    batch = scheduler.schedule(script.now)
    if batch is not None:
      script.batches.append(batch)
    if scheduler.config.overlap:
      batch, in_flight = in_flight, batch
    if batch is not None:
      script.commit(batch)
  assert script.outputs == {name: answer for name, (_, answer) in texts.items()}
  return script


def run_filled(right: float, fill_share: float, overlap: bool, num_requests: int = 12) -> tuple[float, FilledScript]:
  """Returns the speed-up over no speculation, and the script."""
  texts = {str(number): fresh_text(number) for number in range(num_requests)}
  config = dataclasses.replace(CONFIG, speculation=MODEL, has_draft_model=True, overlap=overlap)
  plain = Script(dataclasses.replace(config, speculation="none", has_draft_model=False), {}, flat)
  script = FilledScript(config, {}, flat, right, 0.05 * STEP, fill_seconds=fill_share * STEP)
  run_in_pairs(plain, texts)
  run_in_pairs(script, texts)
  return plain.now / script.now, script


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fill_share", [0.04, 0.3])
def test_fills_that_never_pay_cost_the_account(fill_share: float, overlap: bool):
  speed_up, script = run_filled(0.0, fill_share, overlap, num_requests=24)
  num_steps = len(script.batches)
  most = FIRST_CREDIT + EARNED_SHARE * num_steps + MOST_COST
  assert speed_up > num_steps / (num_steps + most) - 0.01, (speed_up, num_steps)
  assert 0 < script.fill_seconds <= most * STEP * 1.05
  filled = [batch.fills_draft or batch.num_proposals > 0 for batch in script.batches]
  rests_at = filled.index(False)
  later = filled[rests_at:]
  assert 0 < sum(later) < len(later) / 2, "it rests, but for later trials"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_that_pays_never_rests(overlap: bool):
  speed_up, script = run_filled(0.9, 0.2, overlap)
  assert speed_up > 1.5, speed_up
  assert all(batch.fills_draft or batch.num_proposals for batch in script.batches)


def test_requests_that_lack_some_of_its_kv_get_no_proposals():
  _, script = run_filled(0.0, 0.3, overlap=False)
  whole: set[str] = set()
  for batch in script.batches:
    admitted = {admission.slot for admission in batch.admissions}
    whole |= {name for name, slot in zip(batch.request_ids, batch.slots, strict=True) if slot in admitted}
    if batch.num_proposals:
      assert whole & {*batch.request_ids}
    elif not batch.fills_draft:
      whole -= {*batch.request_ids}


def test_the_account_decides_who_has_whole_kv():
  fills = DraftFills()
  fills.admit_request("a", [1, 2], 0, wants_model=True)
  assert fills.has_kv("a") and fills.wants_fill(["b", "a"]) and not fills.wants_fill(["b"])
  for _ in range(int(FIRST_CREDIT / MOST_COST) + 1):
    fills.charge_fill(100.0, 1.0)  # other work delayed it: it counts as MOST_COST
  assert fills.steps <= 0 and not fills.has_kv("a") and not fills.wants_fill(["a"])
  fills.admit_request("b", [1, 2, 3], 2, wants_model=True)
  assert not fills.has_kv("b") and not fills.allows_trials
  fills.earn_steps(int((RESUME_CREDIT - fills.steps) / EARNED_SHARE) + 1)
  fills.admit_request("c", [1, 2, 4], 2, wants_model=True)
  assert fills.has_kv("c") and not fills.has_kv("b") and fills.allows_trials
  twin = DraftFills()
  twin.restore_state(fills.state())
  assert twin.state() == fills.state() and twin.has_kv("c")
  fills.end_request("c")
  assert not fills.has_requests and not fills.wants_fill(["c"])


def test_cached_blocks_without_its_kv_keep_requests_from_it():
  fills = DraftFills()
  fills.admit_request("plain", [1, 2], 0, wants_model=False)
  fills.note_blocks("plain", [3])
  fills.admit_request("most", [1, 2, 3, 4, 5], 3, wants_model=True)
  fills.admit_request("half", [1, 2, 6, 7], 2, wants_model=True)
  assert not fills.has_kv("plain") and not fills.has_kv("most") and fills.has_kv("half")
  fills.admit_request("again", [3, 1, 2, 4], 0, wants_model=True)  # these blocks are written anew
  fills.admit_request("shares", [3, 1, 2, 5], 3, wants_model=True)
  assert fills.has_kv("again") and fills.has_kv("shares")


def test_what_its_drafts_save_pays_for_fills():
  fills = DraftFills()
  fills.admit_request("a", [1], 0, wants_model=True)
  for _ in range(100):
    fills.charge_fill(0.5, 1.0)
    fills.charge_step(1.5, 2, 4, is_proposing=False)
    fills.note_row(2, 2)  # of two rows: a step saved, and a quarter of one charged
  assert fills.has_kv("a") and fills.steps == FIRST_CREDIT - 0.0
  for _ in range(100):
    fills.charge_fill(0.5, 1.0)
    fills.charge_step(1.5, 2, 4, is_proposing=True)
    fills.note_row(2, 1)
  assert not fills.has_kv("a")
