"""Steps that bring several tokens of a row, as guesses that came true do; no part of the engine makes guesses yet.

A wrapper of schedule() lengthens decodes by guesses, some of them wrong, and the fake device verifies them. Without
overlap: where guesses are to come true, the token before them must be known.
"""

from collections.abc import Callable
import copy
import dataclasses
import json
from pathlib import Path
import random
from typing import Any

import pytest

from engine.batch import Batch, StepResult, TokenLogprobs
from engine.config import EngineConfig
from engine.constraint import ConstraintFailed
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.steady_decode import SteadyDecode
from engine.step_plan import StepPlan
from tests.engine.world import World, random_config
from tests.fakes import oracle
from tools import replay
from tools.chaos.server.books import check_scheduler

MOST = 4  # guesses of a row


def with_guesses(scheduler: Scheduler, batch: Batch, guesses: dict[int, tuple[int, ...]]) -> Batch:
  """`batch`, whose decode rows have these guesses too, and a scheduler that knows of them."""
  scheduler.settle_counts()
  scheduler._steady = SteadyDecode(scheduler.config.block_size, scheduler._batching.reserves)
  rows = scheduler._launched[batch.step]
  plan = StepPlan(0, 0)
  counts, num_logits, token_ids = list(batch.counts), list(batch.num_logits), list(batch.token_ids)
  for row, tokens in guesses.items():
    request, start = rows[row], batch.starts[row]
    assert scheduler._cover(request, len(tokens), plan) == len(tokens)
    request.num_computed_tokens += len(tokens)
    request.num_drafts += len(tokens)
    counts[row] += len(tokens)
    num_logits[row] += len(tokens)
    token_ids[row] = (*request.known_tokens(start, start + 1), *tokens)
  return dataclasses.replace(
    batch,
    counts=tuple(counts),
    num_logits=tuple(num_logits),
    token_ids=tuple(token_ids),
    new_blocks=(*batch.new_blocks, *plan.new_blocks),
    masks=tuple(
      entry
      for row, mask in batch.masks
      for entry in ((row, mask), *((row, after) for after in masks_after(rows[row].constraint, guesses.get(row, ()))))
    ),
    num_drafts=tuple(len(guesses.get(row, ())) for row in range(len(counts))),
    repeats=False,
  )


def masks_after(constraint: Any, guesses: tuple[int, ...]) -> list[bytes]:
  """The masks after each guess; any mask after one that the constraint does not take, since none is accepted there."""
  if not guesses:
    return []
  ahead, masks = copy.deepcopy(constraint), []
  for guess in guesses:
    try:
      ahead.accept(guess)
      masks.append(ahead.allowed())
    except (AssertionError, ConstraintFailed):
      break
  return masks + [bytes(len(constraint.allowed()))] * (len(guesses) - len(masks))


class GuessingWorld(World):
  """Attributes: num_several: rows that brought more than one token; num_wrong: rows of which guesses were wrong."""

  def __init__(self, seed: int, **settings):
    super().__init__(seed, config=dataclasses.replace(random_config(random.Random(seed)), **settings), overlap=False)
    watched = self.scheduler.schedule
    self.scheduler.schedule = lambda now: self.guess(watched(now))  # type: ignore[method-assign]
    commit = self.scheduler.commit
    self.scheduler.commit = lambda *arguments: self.counted(commit, *arguments)  # type: ignore[method-assign]
    self.num_several = self.num_wrong = 0

  def guess(self, batch: Batch | None) -> Batch | None:
    """Returns drafts for some decodes, as many as rung, request and blocks can hold."""
    if batch is None:
      return None
    scheduler, rng = self.scheduler, self.rng
    scheduler.settle_counts()
    num_free = scheduler.pool.num_free
    tokens_left = min(batch.shape.tokens - sum(batch.counts), batch.shape.logits - sum(batch.num_logits))
    guesses = {}
    for row, inputs in enumerate(batch.token_ids):
      request, end = scheduler._launched[batch.step][row], batch.starts[row] + 1
      count = min(rng.randint(0, MOST), tokens_left, request.max_computed_tokens - end)
      if inputs or count <= 0:
        continue
      block_size = self.config.block_size
      room = len(request.block_table) * block_size - end
      wrong = rng.random() < 0.4
      # check() wants no request to hold a block too many, which one does whose guesses are wrong.
      count = min(count, room if wrong or self.config.batching in ("static", "dynamic") else room + block_size)
      if count <= 0 or (count > room and not num_free):
        continue
      num_free -= count > room
      truth = oracle(self.config, request)[0][len(request.output_token_ids) :]
      found = [*truth, *(0,) * count][:count]
      if wrong:
        at = rng.randrange(count)
        found[at] = (found[at] + 1) % self.config.vocab_size
      guesses[row] = tuple(found)
      tokens_left -= count
    return with_guesses(scheduler, batch, guesses) if guesses else batch

  def counted(self, commit: Callable, batch: Batch, result: StepResult, *arguments) -> list[TokenEvent]:
    for row, drafts in enumerate(batch.num_drafts):
      self.num_several += len(result.tokens_of(row)) > 1
      self.num_wrong += len(result.tokens_of(row)) < drafts + 1
    return commit(batch, result, *arguments)


def test_guesses_change_nothing_but_the_number_of_steps():
  """Each request gets the tokens of one served alone, its log probabilities and ending; and each block comes back."""
  several = wrong = preemptions = 0
  endings = dict.fromkeys(FinishReason, 0)
  for seed in range(60):
    world = GuessingWorld(seed)
    for _ in range(100):
      world.random_op()
    world.drain()
    several, wrong = several + world.num_several, wrong + world.num_wrong
    preemptions += world.scheduler.num_preemptions
    for reason, count in world.endings.items():
      endings[reason] += count
  assert several > 100 and wrong > 50 and preemptions > 5, (several, wrong, preemptions)
  assert all(endings.values()), endings


def test_a_trace_with_several_tokens_a_row_is_recorded(tmp_path: Path):
  path = tmp_path / "trace.jsonl"
  world = GuessingWorld(3)
  world.engine.start_trace(str(path))
  for _ in range(100):
    world.random_op()
  world.drain()
  world.engine.stop_trace()
  world.step()
  entries = [json.loads(line) for line in path.read_text().splitlines()]
  commits = [entry for entry in entries if entry["event"] == "commit" and "row_ends" in entry]
  assert commits and all(entry["row_ends"][-1] == len(entry["tokens"]) for entry in commits)
  # A scheduler that does not guess decides otherwise, and that is what the replay says.
  assert "counts was" in (replay.replay(path.read_text().splitlines()).difference or "")


CONFIG = EngineConfig(
  vocab_size=100,
  max_model_len=64,
  num_blocks=16,
  block_size=4,
  token_budgets=(4, 8, 16),
  max_num_seqs=4,
  prefill_chunk=8,
  eos_token_ids=(1,),
  overlap=False,
)


class Guessed:
  """One request whose first token is out; then one step with guesses, and what commit made of it."""

  def __init__(self, params: SamplingParams, prompt: int = 5, constraint=None, **changes):
    self.scheduler = Scheduler(dataclasses.replace(CONFIG, **changes))
    self.request = Request("r", list(range(10, 10 + prompt)), params, constraint=constraint)
    self.scheduler.add_request(self.request)
    self.events: list[TokenEvent] = []
    self.commit((50,))

  def commit(self, tokens: tuple[int, ...], guesses: int = 0, **values) -> TokenEvent:
    """The next step, with so many guesses, brings these tokens."""
    batch = self.scheduler.schedule(0.0)
    assert batch is not None
    if guesses:
      batch = with_guesses(self.scheduler, batch, {0: (0,) * guesses})
    result = StepResult(tokens, row_ends=(len(tokens),) if guesses else (), **values)
    self.events = self.scheduler.commit(batch, result, 0.0, self.scheduler.judge_tokens(batch, result))
    return self.events[-1]

  @property
  def counts(self) -> tuple[int, int, int]:
    request = self.request
    return request.num_computed_tokens, request.num_in_flight, request.num_published_blocks


def test_tokens_of_a_row_are_one_event_and_what_was_wrong_is_taken_back():
  guessed = Guessed(SamplingParams(max_tokens=20))
  assert guessed.counts == (5, 0, 1)
  event = guessed.commit((60, 61, 62), guesses=4)
  assert event.token_ids == (60, 61, 62) and event.finish_reason is None
  assert guessed.request.output_token_ids == [50, 60, 61, 62]
  assert guessed.counts == (8, 0, 2), "two blocks are full: 5 of the prompt, and 50, 60, 61"
  assert guessed.commit((63,)).token_ids == (63,)
  assert guessed.counts == (9, 0, 2)
  event = guessed.commit((64, 65, 66, 67, 68, 69, 70, 71), guesses=7)
  assert event.token_ids == tuple(range(64, 72)) and guessed.counts == (17, 0, 4)
  check_scheduler(guessed.scheduler)


@pytest.mark.parametrize("stop", [{}, {"stop_token_ids": (61,)}])
def test_a_stop_token_ends_the_row_where_it_stands(stop):
  guessed = Guessed(SamplingParams(max_tokens=20, **stop))
  end = 61 if stop else 1
  event = guessed.commit((60, end, 62), guesses=3)
  assert (event.token_ids, event.finish_reason, event.stop_token_id) == ((60, end), FinishReason.STOP, end)
  assert guessed.request.output_token_ids == [50, 60, end]
  assert guessed.scheduler.pool.num_used == 0


def test_ignored_stop_tokens_end_nothing():
  assert Guessed(SamplingParams(max_tokens=20, ignore_eos=True)).commit((1, 1), guesses=1).finish_reason is None


@pytest.mark.parametrize("most", [2, 3, 4])
def test_no_token_is_given_beyond_the_length(most: int):
  guessed = Guessed(SamplingParams(max_tokens=most))
  event = guessed.commit((60, 61, 62), guesses=2)
  assert (event.token_ids, event.finish_reason) == ((60, 61, 62)[: most - 1], FinishReason.LENGTH)


def test_nothing_of_a_row_with_bad_values_is_given():
  event = Guessed(SamplingParams(max_tokens=20)).commit((60, 61), guesses=1, bad_rows=frozenset({0}))
  assert (event.token_ids, event.finish_reason) == ((), FinishReason.ERROR)


def test_log_probabilities_are_those_of_the_tokens_that_are_given():
  def entries(*tokens: int) -> dict[int, tuple[TokenLogprobs, ...]]:
    return {0: tuple(TokenLogprobs(token, -0.5, ()) for token in tokens)}

  guessed = Guessed(SamplingParams(max_tokens=20, logprobs=0))
  event = guessed.commit((60, 61), guesses=3, logprobs=entries(60, 61))
  assert [entry.token_id for entry in event.logprobs] == [60, 61]
  event = guessed.commit((62, 1, 63), guesses=2, logprobs=entries(62, 1, 63))
  assert [entry.token_id for entry in event.logprobs] == [62, 1]


class Counted:
  """A constraint that takes so many tokens; then it is complete, or fails."""

  def __init__(self, length: int, fails: bool):
    self.tokens: list[int] = []
    self._length, self._fails = length, fails

  @property
  def is_done(self) -> bool:
    return not self._fails and len(self.tokens) == self._length

  def allowed(self) -> bytes:
    return b"\xff" * 16

  def accept(self, token: int) -> None:
    if len(self.tokens) == self._length:
      raise ConstraintFailed("enough")
    self.tokens.append(token)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_constraint_takes_the_tokens_in_order(length: int, fails: bool):
  constraint = Counted(length, fails)
  guessed = Guessed(SamplingParams(max_tokens=20), constraint=constraint)
  event = guessed.commit((60, 61, 62, 63), guesses=3)
  assert event.token_ids == (60, 61, 62)[: length - 1], "what it took is given, and nothing behind"
  assert event.finish_reason is (FinishReason.ERROR if fails else FinishReason.STOP)
  assert event.message == ("enough" if fails else "")
  assert constraint.tokens == guessed.request.output_token_ids == [50, 60, 61, 62][:length]


def test_a_constraint_is_not_shown_what_follows_the_end():
  constraint = Counted(9, True)
  event = Guessed(SamplingParams(max_tokens=20), constraint=constraint).commit((60, 1, 61), guesses=2)
  assert (event.token_ids, event.finish_reason, constraint.tokens) == ((60, 1), FinishReason.STOP, [50, 60, 1])
  constraint = Counted(9, True)
  event = Guessed(SamplingParams(max_tokens=2), constraint=constraint).commit((60, 61), guesses=1)
  assert (event.token_ids, event.finish_reason, constraint.tokens) == ((60,), FinishReason.LENGTH, [50, 60])


def test_rows_beside_one_with_guesses_bring_their_one_token():
  result = StepResult((5, 6, 7, 8), row_ends=(1, 3, 4))
  assert [*result.tokens_by_row()] == [result.tokens_of(row) for row in range(3)] == [(5,), (6, 7), (8,)]
  assert (
    [*StepResult((5, 6)).tokens_by_row()] == [StepResult((5, 6)).tokens_of(row) for row in range(2)] == [(5,), (6,)]
  )


def test_several_tokens_of_a_row_without_guesses_are_a_mistake():
  guessed = Guessed(SamplingParams(max_tokens=20))
  batch = guessed.scheduler.schedule(0.0)
  assert batch is not None
  with pytest.raises(AssertionError, match="several tokens of a row without drafts"):
    guessed.scheduler.commit(batch, StepResult((60, 61), row_ends=(2,)), 0.0)
