"""Bugs in the scheduler's part of drafts, put into its source: random worlds with drafts must notice each one."""

import pytest

from engine.errors import EngineError
from tests.engine.speculation import test_constrained
from tests.engine.speculation.guessing import GuessingWorld
from tests.engine.speculation.test_constrained import serve
from tests.engine.test_seeded_bugs import Bug, seeded

WORLDS = 60  # most worlds that a bug may survive before it counts as missed

BUGS = (
  Bug("drafts go past the longest output", "draft_rows", "min(left, spare)", "spare"),
  Bug(
    "a request has a row beside drafts that it awaits", "scheduler", "if awaits and request.num_drafts:", "if False:"
  ),
  Bug("a row does not know that it is behind drafts", "scheduler", "behind=behind,", "behind=(),"),
  Bug(
    "a row is behind its own drafts",
    "step_plan",
    "[request.num_drafts - (len(tokens) - 1) for",
    "[request.num_drafts for",
  ),
  Bug(
    "commit takes a row behind drafts for where it was planned",
    "scheduler",
    "planned, start = start, request.num_prompt_tokens + len(request.output_token_ids) - 1",
    "planned = start",
  ),
  Bug("a step behind drafts repeats", "scheduler", "not (more_requests or behind)", "not more_requests"),
  Bug(
    "drafts of two rows are over with the first",
    "scheduler",
    "request.num_drafts -= drafts[row]",
    "request.num_drafts = 0",
  ),
  Bug("a token in flight is taken for known", "draft_rows", "if request.num_in_flight > 1 else", "if False else"),
  Bug(
    "one rejected draft stays",
    "scheduler",
    "request.num_computed_tokens -= drafts[row] + 1 - len(tokens)",
    "request.num_computed_tokens -= max(0, drafts[row] - len(tokens))",
  ),
  Bug(
    "a preempted request takes drafts back",
    "scheduler",
    "        if request.status is running:\n          request.num_computed_tokens -=",
    "        if True:\n          request.num_computed_tokens -=",
  ),
  Bug("blocks of rejected drafts are published", "scheduler", "        end += len(tokens) - 1 - drafts[row]\n", ""),
  Bug(
    "tokens after the end are given",
    "scheduler",
    "tokens = cut_tokens_at_end(request, end - drafts[row], tokens)[",
    "tokens = tokens[",
  ),
  Bug(
    "log probabilities after the end are given",
    "scheduler",
    "        entries = entries[: len(entries) - (num_sampled - len(tokens))]\n",
    "",
  ),
  Bug(
    "drafts are counted at other rows",
    "step_plan",
    "(0,) * num_plain + tuple(drafts) +",
    "tuple(drafts) + (0,) * num_plain +",
  ),
  Bug("drafts have no logit rows", "scheduler", "more_logits.append(len(tokens))", "more_logits.append(1)"),
  Bug(
    "drafts exceed the logit rows",
    "draft_rows",
    "min(ladder.max_tokens - size.num_tokens, ladder.max_logits - size.num_logits)",
    "ladder.max_tokens - size.num_tokens",
  ),
  Bug(
    "drafts take blocks that are not there", "draft_rows", "num_blocks = min(blocks_left, -(-(", "num_blocks = (-(-("
  ),
  Bug("drafts in flight are never over", "scheduler", "request.num_drafts -= drafts[row]", "pass"),
  Bug("a step after drafts repeats", "scheduler", "not (more_requests or behind)", "not (plan.requests or behind)"),
  Bug("a repeated step takes a second block", "steady_decode", "elif self._may_spare:", "elif False:"),
  Bug(
    "a row with drafts begins one token late",
    "scheduler",
    "starts.append(request.num_computed_tokens - len(tokens))",
    "starts.append(request.num_computed_tokens - len(tokens) + 1)",
  ),
  Bug(
    "a step forgets the admissions into its padding",
    "scheduler",
    "num_tokens += self._admit(plan, shape.",
    "self._admit(plan, shape.",
  ),
)
OF_CONSTRAINTS = (
  Bug(
    "masks after drafts are in another order",
    "scheduler",
    "*later.get(request.id, ())",
    "*later.get(request.id, ())[::-1]",
  ),
  Bug("a step has too many masks", "draft_rows", "masks_left if candidate.masks else count", "count"),
  Bug(
    "a constraint judges a row for each mask",
    "row_values",
    "dict.fromkeys(row for row, _ in batch.masks)",
    "[row for row, _ in batch.masks]",
  ),
)
# One world in a hundred comes to the first, and one in fifteen to the second.
FIRST_SEED = {"a step forgets the admissions into its padding": 199, "drafts take blocks that are not there": 60}
CAUGHT = (AssertionError, EngineError, KeyError, IndexError, ValueError)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_bug_of_drafts_is_caught(bug: Bug) -> None:
  scheduler_class, _ = seeded(bug)
  first = FIRST_SEED.get(bug.name, 0)
  for seed in range(first, first + WORLDS):
    try:
      GuessingWorld(seed, scheduler_class=scheduler_class).live()
    except CAUGHT:
      return
  pytest.fail(f"{WORLDS} worlds did not notice: {bug.name}")


@pytest.mark.parametrize("bug", OF_CONSTRAINTS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_bug_of_drafts_under_constraints_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
  scheduler_class, _ = seeded(bug)
  monkeypatch.setattr("tests.engine.speculation.test_constrained.Scheduler", scheduler_class)
  for seed in range(20):
    try:
      serve(seed, overlap=seed % 4 > 1)
      if seed == 19:
        test_constrained.test_a_step_has_no_more_masks_than_the_device(False)
    except CAUGHT:
      return
  pytest.fail(f"20 runs did not notice: {bug.name}")
