"""The demo model's skills, end to end: right only if attention, paging, chunking, reuse and preemption are right.

A skill's answer is checked as text, by what was asked; and every way of scheduling must give the very same tokens.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.engine import Engine
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from server.text.chat_template import Message
from server.text.tokenizer import Tokenizer
from tools.chaos.server.books import check_scheduler
from tools.demo_model.skills import SKILLS, SkillInstance, is_correct, make_instances

pytestmark = pytest.mark.usefixtures("quick_steps")

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
PER_SKILL = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
STORY = SamplingParams(temperature=0.0, max_tokens=160)


@pytest.fixture(scope="module")
def built() -> Built:
  options = BuildOptions(
    model_dir=str(DEMO),
    token_budgets=(8, 32, 128),
    max_num_seqs=32,
    prefill_chunk=128,
    num_blocks=1024,
    max_model_len=2048,
  )
  return build_engine(options, lambda *_: None, lambda _: None)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
  return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def instances() -> list[SkillInstance]:
  """Unseen ones of every skill; recall from 100 to 1,000 tokens back."""
  found = [instance for skill in SKILLS if skill != "recall" for instance in make_instances(skill, PER_SKILL, 77)]
  for distance in (100, 300, 600, 1000):
    found += make_instances("recall", PER_SKILL // 4, 77, distance)
  return found


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer, instances: list[SkillInstance]) -> list[list[int]]:
  return [tokenizer.encode_chat([Message(**message) for message in instance.messages]) for instance in instances]


def serve(
  built: Built,
  prompts: list[list[int]],
  *,
  at_once: int,
  params: SamplingParams = GREEDY,
  **changes,
) -> tuple[list[list[int]], Scheduler, int]:
  """Greedy answers, `at_once` requests live at a time, under changed settings on the same executables and pool.

  Also returns the scheduler, and how many prompt tokens came from the prefix cache.
  """
  # Static batching takes no drafts.
  unlimited: dict[str, Any] = {"speculation": "none", "queue_timeout_s": 0.0, "request_timeout_s": 0.0}
  scheduler = Scheduler(dataclasses.replace(built.config, **unlimited | changes))
  answers: list[list[int]] = [[] for _ in prompts]
  cached = 0

  def emit(events: list[TokenEvent]) -> None:
    nonlocal cached
    for event in events:
      cached += event.num_cached_tokens
      answers[int(event.request_id)] += event.token_ids
      assert event.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH), event

  engine = Engine(scheduler, built.runner, lambda: 0.0, emit)
  todo = list(enumerate(prompts))
  while todo or engine.num_live:
    while todo and engine.num_live < at_once:
      index, prompt = todo.pop(0)
      engine.submit(Request(str(index), prompt, params))
    engine.step()
    assert engine.dead is None, engine.dead
  check_scheduler(scheduler)
  return answers, scheduler, cached


@pytest.fixture(scope="module")
def alone(built: Built, prompts: list[list[int]]) -> list[list[int]]:
  return serve(built, prompts, at_once=1, prefix_cache_scope="off")[0]


@pytest.mark.parametrize("skill", SKILLS)
def test_skill(skill: str, tokenizer: Tokenizer, instances: list[SkillInstance], alone: list[list[int]]) -> None:
  start = SKILLS.index(skill) * PER_SKILL
  right = [is_correct(instance, tokenizer.decode(answer)) for instance, answer in zip(instances, alone, strict=True)][
    start : start + PER_SKILL
  ]
  assert len(right) == PER_SKILL
  assert sum(right) >= PER_SKILL - 1, f"{skill}: {sum(right)} of {PER_SKILL} right"


def test_full_batch_answers_the_same(built: Built, prompts: list[list[int]], alone: list[list[int]]) -> None:
  answers, scheduler, _ = serve(built, prompts, at_once=32)
  assert answers == alone
  assert scheduler.num_preemptions == 0


def test_without_overlap_answers_the_same(built: Built, prompts: list[list[int]], alone: list[list[int]]) -> None:
  assert serve(built, prompts, at_once=32, overlap=False)[0] == alone


@pytest.mark.parametrize("chunk", [7, 24, 100])
def test_any_chunk_size_answers_the_same(
  built: Built, prompts: list[list[int]], alone: list[list[int]], chunk: int
) -> None:
  assert serve(built, prompts, at_once=32, prefill_chunk=chunk)[0] == alone


@pytest.mark.catalogue("C4")
def test_constant_preemption_answers_the_same(
  built: Built, tokenizer: Tokenizer, prompts: list[list[int]], alone: list[list[int]]
) -> None:
  """Stories outgrow a small pool together; skills of short prompts are mixed in, so that right answers stay right."""
  asks = [
    f"Tell me a story about {name} and a {thing}."
    for name in ("Mira", "Tom", "Zoe")
    for thing in ("kite", "drum", "ship")
  ]
  stories = [tokenizer.encode_chat([Message("user", ask)]) for ask in asks]
  told = serve(built, stories, at_once=1, params=STORY)[0]
  assert all(len(story) > 40 for story in told)
  pool = {"num_blocks": 24, "max_model_len": 256}
  answers, scheduler, _ = serve(built, stories, at_once=32, params=STORY, **pool)
  assert answers == told
  assert scheduler.num_preemptions >= len(stories) // 2
  short = [index for index, prompt in enumerate(prompts) if len(prompt) < 64]
  answers, _, _ = serve(built, [prompts[index] for index in short], at_once=32, **pool)
  assert answers == [alone[index] for index in short]


def test_prefix_reuse_answers_the_same(built: Built, prompts: list[list[int]], alone: list[list[int]]) -> None:
  answers, _, cached = serve(built, prompts + prompts, at_once=32)
  assert answers == alone + alone
  assert cached > sum(map(len, prompts)) // 2


@pytest.mark.catalogue("C15")
def test_nothing_compiled(built: Built) -> None:
  assert built.runner.compiles_after_ready == 0
