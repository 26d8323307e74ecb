"""A step while the Scheduler plans it. Pure Python."""

from engine.batch import Admission
from engine.block_pool import BlockPool
from engine.request import Request


class StepPlan:
  """The remaining budget of a step, and all its rows but plain decodes.

  Attributes:
    tokens_left, logits_left: besides one reserved for each running request.
    requests, counts: rows of prompts.
    admissions, new_blocks: as in Batch.
    drafted: decodes with drafts, their input tokens, and for constrained ones the mask after each draft.
  """

  def __init__(self, tokens_left: int, logits_left: int):
    self.tokens_left = tokens_left
    self.logits_left = logits_left
    self.requests: list[Request] = []
    self.counts: list[int] = []
    self.admissions: list[Admission] = []
    self.new_blocks: list[tuple[int, int, int]] = []
    self.drafted: list[tuple[Request, tuple[int, ...], tuple[bytes, ...]]] = []

  def add_row(self, request: Request, count: int) -> None:
    """Adds a row of `count` prompt tokens."""
    self.requests.append(request)
    self.counts.append(count)

  def extend_table(self, request: Request, num_blocks: int, pool: BlockPool) -> None:
    """Appends free blocks of the pool to a request's table."""
    table = request.block_table
    for block in pool.allocate_blocks(num_blocks):
      self.new_blocks.append((request.slot, len(table), block))
      table.append(block)

  def count_drafts(self, num_plain: int) -> tuple[int, ...]:
    """Returns Batch.num_drafts: of plain decodes, those with drafts and rows of prompts, in this order."""
    if not self.drafted:
      return ()
    drafts = [len(tokens) - 1 for _, tokens, _ in self.drafted]
    return (0,) * num_plain + tuple(drafts) + (0,) * len(self.requests)

  def list_behind(self, decodes: list[Request]) -> tuple[int, ...]:
    """Returns Batch.behind, for rows in the same order."""
    behind = [request.num_drafts for request in decodes]
    behind += [request.num_drafts - (len(tokens) - 1) for request, tokens, _ in self.drafted]
    return (*behind, *(0,) * len(self.requests)) if any(behind) else ()
