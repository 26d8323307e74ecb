"""Compares the proposals of a runner's steps with what its draft model would continue with."""

from collections.abc import Callable
import dataclasses
import random

from engine.batch import Batch, StepResult
from engine.device.runner import ModelRunner

# (known tokens, count) -> the next `count` tokens
ContinueTokens = Callable[[list[int], int], list[int]]


class ProposalChecker:
  """A Runner that wants proposals of random steps, and compares them with those of `continue_tokens`.

  Attributes:
    num_checked: proposals that were compared.
    num_after_drafts: those of rows with drafts.
    num_after_chunks: those of rows whose step began inside of a prompt.
  """

  def __init__(self, runner: ModelRunner, continue_tokens: ContinueTokens, num_proposals: int, max_len: int, seed: int):
    self._runner, self._continue_tokens, self._rng = runner, continue_tokens, random.Random(seed)
    self._num_proposals, self._max_len = num_proposals, max_len
    self._tokens: dict[int, list[int]] = {}
    self._known: dict[tuple[int, ...], list[int]] = {}
    self.num_checked = self.num_after_drafts = self.num_after_chunks = 0

  def launch(self, batch: Batch):
    wants = self._rng.random() < 0.15
    batch = dataclasses.replace(batch, num_proposals=self._num_proposals * wants, fills_draft=True)
    launched = self._runner.launch(batch)
    checker = self

    class Checked:
      def result(self) -> StepResult:
        result = launched.result()
        checker.check(batch, result, wants)
        return result

    return Checked()

  def check(self, batch: Batch, result: StepResult, wants: bool) -> None:
    for admission in batch.admissions:
      self._tokens[admission.slot] = list(admission.token_ids)
    assert set(result.proposals) == {row for row, samples in enumerate(batch.samples) if samples and wants}
    for row, slot in enumerate(batch.slots):
      if batch.samples[row]:
        self._tokens[slot] += result.tokens_of(row)
    for row, proposals in result.proposals.items():
      known = self._tokens[batch.slots[row]]
      count = min(self._num_proposals, self._max_len - len(known))
      assert len(proposals) == self._num_proposals
      if count > 0:
        assert list(proposals[:count]) == self._continue(known, count)
        num_drafts = batch.num_drafts[row] if batch.num_drafts else 0
        self.num_checked += 1
        self.num_after_drafts += bool(num_drafts)
        self.num_after_chunks += batch.starts[row] > 0 and batch.counts[row] - num_drafts > 1

  def _continue(self, known: list[int], count: int) -> list[int]:
    key = tuple(known)
    if len(self._known.get(key, ())) < count:
      self._known[key] = self._continue_tokens(known, count)
    return self._known[key][:count]
