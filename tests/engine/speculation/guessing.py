"""Worlds whose requests get drafts, right and wrong ones: no text foresees the fake device's tokens."""

import dataclasses
import random

from engine.batch import Batch
from engine.config import EngineConfig
from engine.request import Request
from engine.scheduler import Scheduler
from engine.speculation.draft_costs import PlannedStep
from engine.speculation.drafter import NO_DRAFT, Draft
from engine.speculation.speculation import DraftCandidate, Speculation
from tests.engine.world import MAX_MODEL_LEN, World, random_config
from tests.fakes import oracle


class GuessingDrafter:
  """Proposes a request's next tokens, some of them wrong. What is wrong depends on the request and its length alone."""

  def __init__(self, config: EngineConfig, right: float, often: float = 0.8):
    """Args: right: chance of a right token. often: chance of a draft at a step."""
    self._config, self._right, self._often = config, right, often
    self._truth: dict[str, tuple[int, ...]] = {}
    self.num_forgotten = 0

  def update(self, request: Request) -> bool:
    return random.Random(f"{request.id} {len(request.output_token_ids)}").random() < self._often

  def propose(self, request: Request, count: int) -> Draft:
    if request.constraint is not None:
      return NO_DRAFT
    if request.id not in self._truth:
      self._truth[request.id] = oracle(self._config, request)[0]
    rng = random.Random(f"{request.id} {len(request.output_token_ids)} x")
    truth = self._truth[request.id][len(request.output_token_ids) :]
    vocab_size = self._config.vocab_size
    tokens = [
      token if rng.random() < self._right else rng.randrange(vocab_size) for token in [*truth, *range(9)][:count]
    ]
    return Draft(tuple(tokens[: rng.randint(0, count)]), rng.choice(("ngram2", "ngram8")))

  def forget(self, request_id: str) -> None:
    self.num_forgotten += 1
    self._truth.pop(request_id, None)

  def num_indexed(self, request_id: str) -> int:
    return 0

  def restore_index(self, request: Request, num_indexed: int) -> None:
    pass


class RandomChoice(Speculation):
  """Any number of drafts that a step can hold, whether it pays or not; and no request rests."""

  def _sleep(self, tracked, until: int, is_tired: bool = True) -> None:
    pass

  def knows_step(self, planned: PlannedStep) -> bool:
    return True

  def choose_counts(self, step: int, planned: PlannedStep, candidates: list[DraftCandidate]) -> list[int]:
    rng, left, counts = random.Random(step), planned.most_drafts, []
    if planned.num_others:
      left = min(left, planned.num_padding)
    self.waits = self._overlap and planned.may_wait and rng.random() < 0.3
    for candidate in candidates:
      counts.append(rng.randint(0, min(left, len(candidate.tokens))))
      left -= counts[-1]
    return counts


def guessing_config(seed: int, **settings) -> EngineConfig:
  """A random one of a mode that takes drafts."""
  rng = random.Random(seed)
  config = random_config(rng)
  if config.batching in ("static", "dynamic"):
    config = dataclasses.replace(config, batching="chunked")
  most = rng.choice((1, 3, 7, 7))
  if rng.random() < 0.5:  # many requests in a pool that preempts much, with logit rows for drafts
    block_size = rng.choice((1, 2, 4))
    settings |= {
      "block_size": block_size,
      "num_blocks": -(-(MAX_MODEL_LEN - 8) // block_size),
      "token_budgets": (8, 32),
      "prefill_chunk": 16,
      "max_num_seqs": rng.choice((8, 16)),
    }
  settings.setdefault("max_num_seqs", max(2, config.max_num_seqs))
  return dataclasses.replace(config, speculation="ngram", num_speculative_tokens=most, **settings)


def guess(scheduler: Scheduler, seed: int) -> None:
  """Replaces the drafter of a scheduler, and in most cases the choice of drafts."""
  rng = random.Random(seed)
  config = scheduler.config
  if rng.random() < 0.6:
    scheduler._speculation = RandomChoice(config)
  assert scheduler._speculation is not None
  scheduler._speculation.drafter = GuessingDrafter(config, rng.choice((0.3, 0.8, 1.0)), rng.choice((0.1, 0.8, 0.8)))


class GuessingWorld(World):
  """A world with drafts.

  Attributes:
    num_drafts, num_accepted: over all rows.
    num_unknown: rows with drafts whose first token was in flight.
    num_behind, num_drafted_behind: rows behind drafts, and those of them with drafts.
  """

  def __init__(self, seed: int, overlap: bool | None = None, scheduler_class: type[Scheduler] = Scheduler, **settings):
    super().__init__(seed, scheduler_class, guessing_config(seed, **settings), overlap)
    guess(self.scheduler, seed)
    self.num_drafts = self.num_accepted = self.num_unknown = self.num_behind = self.num_drafted_behind = 0
    self._ends: dict[str, int] = {}  # by request: positions planned since its admission
    launch = self.runner.launch

    def watch(batch):
      self.num_drafts += sum(batch.num_drafts)
      self._check_blocks(batch)
      self.num_unknown += sum(tokens[0] == -1 for tokens in batch.token_ids if tokens)
      self.num_behind += sum(map(bool, batch.behind))
      self.num_drafted_behind += sum(map(bool, map(min, batch.behind, batch.num_drafts)))
      return launch(batch)

    self.runner.launch = watch  # type: ignore[method-assign]
    assert self.scheduler._speculation is not None
    note_row = self.scheduler._speculation.note_row

    def count_row(request: Request, num_drafts: int, num_accepted: int, *arguments) -> None:
      self.num_accepted += num_accepted
      note_row(request, num_drafts, num_accepted, *arguments)

    self.scheduler._speculation.note_row = count_row  # type: ignore[method-assign]

  def _check_blocks(self, batch: Batch) -> None:
    """Asserts that tables are as long as what was planned, and that drafts left a block for each running request."""
    block_size = self.config.block_size
    admitted = {admission.slot for admission in batch.admissions}
    for name, slot, start, count in zip(batch.request_ids, batch.slots, batch.starts, batch.counts, strict=True):
      self._ends[name] = max(0 if slot in admitted else self._ends[name], start + count)
      table = self.scheduler._requests[name].block_table
      assert len(table) == -(-self._ends[name] // block_size), "a request holds a block too many"
    ends = {
      slot: start + 1
      for slot, start, count in zip(batch.slots, batch.starts, batch.num_drafts or (0,) * len(batch.slots), strict=True)
      if count
    }
    for slot, index, _ in batch.new_blocks:
      if slot in ends and index >= -(-ends[slot] // block_size):
        assert self.scheduler.pool.num_free >= self.scheduler.num_running, "drafts take blocks that others need"

  def live(self, num_ops: int = 120) -> None:
    """Random operations with bursts of requests, to the end."""
    for number in range(num_ops):
      if number % 20 == 0:
        for _ in range(6):
          self.submit()
      self.random_op()
    self.drain()
