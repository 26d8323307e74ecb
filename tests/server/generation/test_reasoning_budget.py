"""Limits of reasoning: where it begins and ends, what is forced, and the answer's constraint, under every schedule."""

import dataclasses
import random

import pytest

from engine.constraint import Constraint, ConstraintFailed
from engine.engine import Engine
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from server.generation.reasoning_budget import MAX_SPACE, ReasoningBudget, ReasoningLimit
from tests.engine.test_engine import Front
from tests.fakes import FakeConstraint, FakeRunner, VirtualClock, oracle, small_config, tokens_of

# Texts of tokens; every other token is a letter that begins no marker.
TEXTS = {2: " ", 3: "<think>", 4: "</think>", 5: "</th", 6: "ink>", 7: "<th", 8: "ink>x", 9: "\n"}
CONFIG = small_config(eos_token_ids=(1,), max_queued_requests=64, queue_timeout_s=0.0, request_timeout_s=0.0)
EVERY = set(range(CONFIG.vocab_size))
TAGS = ReasoningLimit(3, "<think>", "</think>", (3,), (5, 6))
CHANNELS = ReasoningLimit(3, "<think>", "</think>", (7, 6), (4,), answer_ids=(20, 21))


def token_bytes(token: int) -> bytes:
  return TEXTS.get(token, "z").encode()


def budget(limit: ReasoningLimit, answer: Constraint | None = None, **changes) -> ReasoningBudget:
  return ReasoningBudget(dataclasses.replace(limit, **changes), answer, token_bytes, CONFIG)


def follow(constraint: ReasoningBudget, *tokens: int) -> set[int]:
  """Takes tokens, each of which must be allowed; returns what may follow."""
  for token in tokens:
    assert token in tokens_of(constraint.allowed()), token
    assert not constraint.is_done
    constraint.accept(token)
  return set(tokens_of(constraint.allowed()))


class Letters:
  """Allows 30 or 31, then is done after two tokens."""

  def __init__(self) -> None:
    self.tokens: list[int] = []

  @property
  def is_done(self) -> bool:
    return len(self.tokens) == 2

  def allowed(self) -> bytes:
    return (0b11 << 30).to_bytes(8, "little")

  def accept(self, token: int) -> None:
    self.tokens.append(token)


@pytest.mark.parametrize("start", [(3,), (2, 9, 3), (7, 6), (7, 8)])
def test_the_closing_text_is_forced_at_the_budget(start):
  constraint = budget(TAGS)
  assert follow(constraint, *start, 10, 11) == EVERY
  assert follow(constraint, 12) == {5}
  assert follow(constraint, 5) == {6}
  assert follow(constraint, 6) == EVERY
  assert follow(constraint, 3, *range(10, 30)) == EVERY, "the answer has no budget"


@pytest.mark.parametrize("number", [0, 1, 7])
def test_an_open_prompt_counts_from_the_first_token(number):
  constraint = budget(TAGS, is_open=True, num_tokens=number)
  assert follow(constraint, *range(10, 10 + number)) == {5}


@pytest.mark.parametrize("closer", [(4,), (5, 6), (5, 8)])
def test_reasoning_that_ends_by_itself_is_not_ended_again(closer):
  constraint = budget(TAGS, is_open=True)
  assert follow(constraint, 10, *closer, *range(10, 30)) == EVERY


@pytest.mark.parametrize("start", [(10, 3), (7, 10, 3), (2,) * (MAX_SPACE + 1) + (3,), (9, 7, 7)])
def test_an_output_that_begins_otherwise_has_no_reasoning(start):
  assert follow(budget(TAGS), *start, *range(10, 30)) == EVERY


def test_a_constraint_holds_from_the_answer_on():
  constraint = budget(TAGS, answer := Letters())
  assert follow(constraint) == {3, 30, 31}
  assert follow(constraint, 3) == EVERY - {1}, "reasoning cannot end the output"
  assert follow(constraint, 10, 11, 12) == {5}
  assert follow(constraint, 5, 6) == {30, 31}
  constraint.accept(30)
  assert not constraint.is_done
  constraint.accept(31)
  assert constraint.is_done and answer.tokens == [30, 31]


def test_a_constraint_may_hold_from_the_first_token_on():
  constraint = budget(TAGS, Letters())
  assert follow(constraint, 30) == {30, 31}
  constraint.accept(30)
  assert constraint.is_done


def test_an_opening_text_of_several_tokens_is_forced_once_it_has_begun():
  constraint = budget(TAGS, Letters(), opener_ids=(7, 6))
  assert follow(constraint, 7) == {6}
  assert follow(constraint, 6, 10, 4) == {30, 31}


def test_a_token_with_the_end_of_reasoning_and_a_part_of_the_answer_fails():
  constraint = budget(TAGS, Letters(), is_open=True)
  follow(constraint, 5)
  with pytest.raises(ConstraintFailed, match="send no budget"):
    constraint.accept(8)


def test_all_reasoning_shares_the_budget_where_the_answer_has_a_header():
  constraint = budget(CHANNELS)
  assert follow(constraint, 3, 10, 4, 20, 22, 3, 10) == EVERY
  assert follow(constraint, 10) == {4}
  assert follow(constraint, 4) == {20}
  assert follow(constraint, 20) == {21}
  assert follow(constraint, 21, *range(10, 30)) == EVERY


def test_the_header_is_forced_before_a_constraint():
  for tokens in ((10, 11, 12, 4), (10, 4)):
    constraint = budget(CHANNELS, Letters())
    assert follow(constraint, 7) == {6}
    assert follow(constraint, 6, *tokens) == {20}
    assert follow(constraint, 20, 21) == {30, 31}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_one_request_at_a_time(seed: int, overlap: bool):
  """Also where rows are preempted with a token in flight."""

  def requests() -> list[Request]:
    rng = random.Random(seed)
    found = []
    for number in range(16):
      limit = dataclasses.replace(
        rng.choice((TAGS, CHANNELS)), num_tokens=rng.randrange(12), is_open=rng.random() < 0.7
      )
      answer = FakeConstraint(50, rng.randint(2, 8)) if number % 2 else None
      params = SamplingParams(max_tokens=rng.randint(8, 30), temperature=1.0, seed=number)
      constraint = ReasoningBudget(limit, answer, token_bytes, CONFIG)
      found.append(Request(f"r{number}", [rng.randrange(50) for _ in range(6)], params, constraint=constraint))
    return found

  config = dataclasses.replace(CONFIG, num_blocks=13, overlap=overlap)
  wanted = {}
  for request in requests():
    request.seed = request.params.seed or 0
    wanted[request.id] = oracle(config, request)
  scheduler, front, clock = Scheduler(config), Front(), VirtualClock()
  engine = Engine(scheduler, FakeRunner(config), clock, front)
  engine.submit_all(requests())
  while engine.num_live:
    engine.step()
    assert engine.dead is None, engine.dead
    clock.advance(0.01)
  assert {name: (front.tokens(name), *front.endings()[name]) for name in wanted} == wanted
  assert scheduler.num_preemptions > 0
