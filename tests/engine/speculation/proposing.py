"""Worlds whose device has a draft model, which proposes right and wrong tokens."""

import dataclasses
import random

from engine.batch import Batch, StepResult
from engine.config import EngineConfig
from engine.request import Request
from engine.speculation.draft_costs import PlannedStep
from engine.speculation.model_drafter import MODEL
from engine.speculation.speculation import DraftCandidate
from tests.engine.speculation.guessing import RandomChoice, guessing_config
from tests.engine.world import World
from tests.fakes import oracle


class RandomProposals(RandomChoice):
  """Any choice of drafts, as RandomChoice, and of steps after which the draft model proposes."""

  def choose_proposals(self, batch: Batch, in_flight) -> int:
    return self._num_proposals if random.Random(~batch.step).random() < 0.5 else 0

  def wants_fill(self, batch: Batch) -> bool:
    return random.Random(batch.step).random() < 0.7


class AllProposals(RandomProposals):
  """Proposals after each step, and as many drafts as a step holds, first rows first."""

  def choose_proposals(self, batch: Batch, in_flight) -> int:
    return self._num_proposals

  def choose_counts(self, step: int, planned: PlannedStep, candidates: list[DraftCandidate]) -> list[int]:
    left = planned.num_padding if planned.num_others else planned.most_drafts
    counts = []
    for candidate in candidates:
      counts.append(min(left, len(candidate.tokens)))
      left -= counts[-1]
    return counts


class _ProposedStep:
  """A launched step whose result has proposals."""

  def __init__(self, launched, batch: Batch, requests: list[Request], config: EngineConfig, right: float):
    self._launched, self._batch, self._requests = launched, batch, requests
    self._config, self._right = config, right

  def result(self) -> StepResult:
    result, batch = self._launched.result(), self._batch
    found = {}
    for row, request in enumerate(self._requests):
      if not batch.samples[row] or row in result.bad_rows:
        continue
      num_drafts = batch.num_drafts[row] if batch.num_drafts else 0
      known = batch.starts[row] + batch.counts[row] - num_drafts + len(result.tokens_of(row))
      rng = random.Random(f"{request.id} {known}")
      truth = (*oracle(self._config, request)[0][known - request.num_prompt_tokens :], *range(9))
      found[row] = tuple(
        token if rng.random() < self._right else rng.randrange(self._config.vocab_size)
        for token in truth[: batch.num_proposals]
      )
    return dataclasses.replace(result, proposals=found)


class ProposingWorld(World):
  """Attributes: num_drafts: of the draft model; num_unknown: rows whose first token was in flight."""

  def __init__(self, seed: int, overlap: bool, at_random: bool = True):
    """Args: at_random: chooses drafts and proposals at random in most worlds, and not by what pays."""
    rng = random.Random(seed)
    settings = {"has_draft_model": True, "speculation": rng.choice((MODEL, "auto"))}
    super().__init__(seed, config=dataclasses.replace(guessing_config(seed), **settings), overlap=overlap)
    if at_random and rng.random() < 0.7:
      self.scheduler._speculation = RandomProposals(self.scheduler.config)
    self.num_drafts = self.num_unknown = 0
    launch, right = self.runner.launch, rng.choice((0.6, 0.9, 1.0))

    def propose(batch: Batch):
      self.num_drafts += sum(batch.num_drafts)
      self.num_unknown += sum(tokens[0] == -1 for tokens in batch.token_ids if tokens)
      launched = launch(batch)
      assert batch.num_proposals in (0, self.config.num_proposals)
      if not batch.num_proposals:
        return launched
      return _ProposedStep(launched, batch, self.scheduler._launched[batch.step], self.config, right)

    self.runner.launch = propose  # type: ignore[method-assign]
