"""How often steps look for drafts: seldom where none are found, in each step while they are accepted."""

import dataclasses
import random

import pytest

from engine.speculation.credit import LOOKS_SHARE, MOST_LOOKS_CREDIT, DraftCredit
from engine.speculation.ngram import NgramDrafter
from tests.engine.speculation.test_speculation import CONFIG, Script, copy_text


class _CountingDrafter(NgramDrafter):
  """Attributes: num_looks: calls of `update`."""

  def __init__(self):
    super().__init__()
    self.num_looks = 0

  def update(self, request):
    self.num_looks += 1
    return super().update(request)


def test_looks_cost_a_share_of_steps_without_drafts():
  credit = DraftCredit()
  assert credit.allows_looks
  while credit.allows_looks:
    credit.charge_look(1, 0, 4e-4)
  num_steps = credit.steps_to_look
  assert num_steps > 10
  credit.earn_steps(num_steps - 1)
  assert not credit.allows_looks
  credit.earn_steps(1)
  assert credit.allows_looks and credit.look_steps < LOOKS_SHARE * 2
  credit.charge_look(1, 0, 4e-4)
  credit.charge_step(1.5, 4.0)
  assert credit.look_steps == MOST_LOOKS_CREDIT, "gains fill it"
  credit.earn_steps(10**6)
  assert credit.look_steps == MOST_LOOKS_CREDIT
  credit.charge_look(1, 0, 0.0)
  assert credit.look_steps == MOST_LOOKS_CREDIT, "without a known step time, nothing is charged"


@pytest.mark.parametrize(("seconds", "most"), [(0.01, 0.15), (0.0004, 0.07)])
def test_texts_without_repeats_are_seldom_looked_at(seconds: float, most: float):
  """The shorter steps are, the fewer of them look."""
  rng = random.Random(1)
  texts = {f"{number}": (rng.sample(range(1000), 30), rng.sample(range(1000), 200)) for number in range(4)}
  drafter = _CountingDrafter()
  script = Script(CONFIG, texts, lambda _: seconds)
  assert script.scheduler._speculation is not None
  script.scheduler._speculation.replace_drafter(drafter)
  script.run()
  looks, steps = drafter.num_looks, sum(len(batch.slots) for batch in script.batches)
  assert 0 < looks < most * steps, (looks, steps)


def test_a_copy_is_looked_at_in_each_step_and_still_gains():
  drafter = _CountingDrafter()
  script = Script(CONFIG, {"a": copy_text(1)}, lambda _: 0.01)
  assert script.scheduler._speculation is not None
  script.scheduler._speculation.replace_drafter(drafter)
  script.run()
  plain = Script(dataclasses.replace(CONFIG, speculation="none"), {"a": copy_text(1)}, lambda _: 0.01).run()
  assert len(script.batches) < 0.6 * len(plain.batches)
  assert drafter.num_looks >= len(script.batches) - 3
