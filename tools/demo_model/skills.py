"""Checkable skill instances that training never saw; pure stdlib, for evaluation and server tests."""

import dataclasses
import random
import re

from tools.demo_model import corpus

SKILLS = ("copy", "reverse", "arithmetic", "json", "recall")


@dataclasses.dataclass(frozen=True)
class SkillInstance:
  """A conversation that ends with a user turn, and the one correct answer to it."""

  messages: list[dict[str, str]]
  answer: str


def _messages(turns: list[corpus.Turn]) -> list[dict[str, str]]:
  """Chat messages of `turns`."""
  result = []
  for turn in turns:
    if turn.answer is None:
      result.append({"role": "system", "content": turn.user})
    else:
      result.append({"role": "user", "content": turn.user})
      result.append({"role": "assistant", "content": turn.answer})
  return result


def _instance(turns: list[corpus.Turn]) -> SkillInstance:
  """The conversation up to the last question, and the answer to it."""
  answer = turns[-1].answer
  assert answer is not None, "the last turn must be a user turn: a system message has no answer"
  return SkillInstance(_messages(turns)[:-1], answer)


def count_tokens(turn: corpus.Turn) -> int:
  """Tokens of a turn, special ones included (a close estimate that needs no tokenizer)."""
  text = f"{turn.user} {turn.answer or ''}"
  return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]+", text)) + 4


def _recall(rng: random.Random, distance: int) -> SkillInstance:
  """A fact, about `distance` tokens of other conversation and other facts, then the question."""
  others = corpus.facts(rng, 8)
  name = rng.choice([n for n in corpus.NAMES if n not in dict(others)])
  values = [v for v in corpus.VALUES if corpus.is_held_out(corpus.fact_text(name, v))]
  fact = (name, rng.choice(values or corpus.VALUES))
  others = others[: min(7, max(1, distance // 60))]
  group = [fact] + [others.pop() for _ in range(rng.randint(0, min(2, len(others))))]
  rng.shuffle(group)
  start = corpus.fact_turn(group)
  between = [corpus.fact_turn([other]) for other in others]
  size = sum(count_tokens(turn) for turn in between)
  while size < distance:
    unit = corpus.filler_turns(rng)
    turn = rng.choice(unit[:1])
    if size + count_tokens(turn) > distance + 60:
      turn = corpus.skill_turn("arithmetic", rng, held_out=False)
    between.insert(rng.randint(0, len(between)), turn)
    size += count_tokens(turn)
  question = corpus.question_turn(fact)
  return _instance([start, *between, question])


def make_instances(skill: str, count: int, seed: int, distance: int | None = None) -> list[SkillInstance]:
  """Returns `count` instances of `skill` that are not in the training part.

  Args:
    skill: one of SKILLS.
    count: how many.
    seed: the same seed gives the same instances.
    distance: for recall only: about how many tokens lie between the fact and the question;
      by default anything from 50 to 1500.
  """
  if skill not in SKILLS:
    raise ValueError(f"unknown skill {skill!r}; known: {', '.join(SKILLS)}")
  rng = random.Random(f"{skill} {seed}")
  if skill == "recall":
    return [_recall(rng, distance or rng.randint(50, 1500)) for _ in range(count)]
  turns = [corpus.skill_turn(skill, rng, held_out=True) for _ in range(count)]
  return [_instance([turn]) for turn in turns]


def is_correct(instance: SkillInstance, answer: str) -> bool:
  """Whether `answer`, as generated, is the expected one."""
  return answer.strip() == instance.answer
