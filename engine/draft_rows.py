"""Lengthens the decodes of a planned step by drafts that pay. Pure Python; may not decide whether they pay.

Drafts join a step that is otherwise planned. They take free blocks beyond those that running requests soon need, and
tokens and logit rows that the rung has left, so they preempt nobody and delay no admission.
"""

from collections.abc import Collection
from typing import NamedTuple

from engine.batch import IN_FLIGHT, MAX_DRAFT_MASKS
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.request import Request
from engine.shapes import StepShape
from engine.speculation.draft_costs import PlannedStep
from engine.speculation.speculation import Speculation
from engine.step_plan import StepPlan


class StepSize(NamedTuple):
  """A planned step before drafts: its number, running requests, useful tokens, logit rows and rung."""

  step: int
  num_running: int
  num_tokens: int
  num_logits: int
  shape: StepShape


class DraftPlanner:
  """Plans the rows with drafts.

  Attributes:
    drafted_step: the latest step with drafts.
    awaited_step: the latest step whose requests have no other row until it commits.
  """

  def __init__(self, config: EngineConfig):
    self.drafted_step = self.awaited_step = -1
    self._config, self._ladder = config, config.ladder

  def find_drafts(
    self, speculation: Speculation, step: int, num_running: int, in_flight: Collection[int], may_repeat: bool
  ) -> bool:
    """Returns whether a request has drafts that step `step` could verify.

    Args:
      in_flight: uncommitted steps.
      may_repeat: the step could repeat the one before, in which all requests decode. Then it also returns False for
        drafts that do not pay.
    """
    if self.awaited_step in in_flight or num_running >= self._ladder.max_logits:
      speculation.skip_drafts()
      return False
    if not speculation.find_drafts(step):
      return False
    if not may_repeat:
      return True
    most = min(self._ladder.max_tokens, self._ladder.max_logits) - num_running
    return speculation.may_pay(PlannedStep(num_running, num_running, 0, 0, most, 0, may_wait=True), len(in_flight))

  def add_drafts(
    self,
    speculation: Speculation,
    decodes: list[Request],
    starts: list[int],
    plan: StepPlan,
    size: StepSize,
    pool: BlockPool,
  ) -> int:
    """Moves the decodes whose drafts pay from `decodes` and `starts` to plan.drafted; returns the number of drafts.

    Args:
      decodes, starts: the step's decode rows.
      plan: the rest of the step.
      size: its size.
      pool: of the blocks.
    """
    block_size, ladder = self._config.block_size, self._ladder
    num_constrained, is_behind = 0, False
    for request in decodes:
      num_constrained += request.constraint is not None
      is_behind = is_behind or request.num_drafts > 0
    # Each running request may need a block soon, as admissions assume.
    blocks_left = max(0, pool.num_free - size.num_running)
    step = PlannedStep(
      num_tokens=size.num_tokens,
      num_decodes=len(decodes),
      num_constrained=num_constrained,
      num_others=len(plan.requests),
      most_drafts=min(ladder.max_tokens - size.num_tokens, ladder.max_logits - size.num_logits),
      num_padding=size.shape.tokens - size.num_tokens if self._config.computes_padding else 0,
      may_wait=len(decodes) == size.num_running,
      is_behind=is_behind,
    )
    if not speculation.knows_step(step):
      return 0
    candidates = []
    for row, request in enumerate(decodes):
      end = starts[row] + 1
      spare = (len(request.block_table) + blocks_left) * block_size - end
      # With overlap the next step has a position left to compute: else it is planned alone, and takes longer.
      left = request.max_computed_tokens - end - (self._config.overlap and request.constraint is None)
      candidate = speculation.make_candidate(row, request, min(left, spare))
      if candidate is not None:
        candidates.append(candidate)
    if not candidates:
      return 0
    counts = speculation.choose_counts(size.step, step, candidates)
    drafted, total, masks_left = set(), 0, MAX_DRAFT_MASKS
    for candidate, count in zip(candidates, counts, strict=True):
      request = decodes[candidate.row]
      end = starts[candidate.row] + 1
      spare = len(request.block_table) * block_size - end
      if count > spare and blocks_left:
        num_blocks = min(blocks_left, -(-(count - spare) // block_size))
        plan.extend_table(request, num_blocks, pool)
        blocks_left -= num_blocks
        spare += num_blocks * block_size
      count = min(count, spare, masks_left if candidate.masks else count)
      if count <= 0:
        continue
      known = (IN_FLIGHT,) if request.num_in_flight > 1 else request.known_tokens(end - 1, end)
      plan.drafted.append((request, known + candidate.tokens[:count], candidate.masks[:count]))
      masks_left -= len(candidate.masks[:count])
      request.num_computed_tokens += count
      request.num_drafts += count
      speculation.start_row(request)
      drafted.add(candidate.row)
      total += count
    if drafted:
      rows = [row for row in range(len(decodes)) if row not in drafted]
      decodes[:], starts[:] = [decodes[row] for row in rows], [starts[row] for row in rows]
      self.drafted_step = size.step
      if speculation.waits:
        self.awaited_step = size.step
    return total
