"""Makes the messages of the demo's users: multi-turn chats, many about one of a few shared texts. Sends nothing.

Shared texts and earlier turns hit the prefix cache; stories fill the KV pool during decode.
"""

from collections.abc import Iterator
import dataclasses
import itertools
import random

from server.proto import sluice_pb2 as pb
from tools.demo_model import corpus, skills

CHECKED = ("copy", "reverse", "arithmetic", "json", "recall")
# Kind of turn -> its share, in a chat about a shared text and in one of its own.
SHARED_TURNS = {"story": 0.44, "recall": 0.3, "copy": 0.06, "reverse": 0.06, "arithmetic": 0.07, "json": 0.07}
OWN_TURNS = {"story": 0.44, "talk": 0.1, "copy": 0.1, "reverse": 0.1, "arithmetic": 0.14, "json": 0.12}
# Kind of chat -> its share. "long" is one question about an unshared long text.
CHATS = {"shared": 0.75, "own": 0.2, "long": 0.05}
MAX_TURNS = 2
NUM_SHARED_TEXTS = 4
SHARED_TOKENS = (120, 240)  # approximate least and most tokens of a shared text
LONG_DISTANCE = (150, 300)  # tokens between a fact and its question in a long chat
STORY_TOKENS, ANSWER_TOKENS = 220, 80
# The first chats, which clients begin at the same moment, open with a long story each: together they outgrow the KV
# pool, and some are preempted.
NUM_OPENING_CHATS = 64
OPENING_MIN_TOKENS = 128
# One batch covers every sampling parameter.
STORY_SAMPLING = (
  pb.SamplingParams(temperature=0.7),
  pb.SamplingParams(temperature=1.0, top_p=0.9),
  pb.SamplingParams(temperature=0.9, top_k=20),
  pb.SamplingParams(temperature=1.0, min_p=0.1),
  pb.SamplingParams(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.2),
  pb.SamplingParams(temperature=0.0),
)
GREEDY = pb.SamplingParams(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class DemoTurn:
  """One user message; `answer` is the only right answer, or None if the demo checks none."""

  kind: str
  text: str
  sampling: pb.SamplingParams
  max_tokens: int
  answer: str | None = None
  min_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class DemoChat:
  """A user's chat: the messages (role, content) before it, and the turns, sent one after the other."""

  before: tuple[tuple[str, str], ...]
  turns: tuple[DemoTurn, ...]


@dataclasses.dataclass(frozen=True)
class SharedText:
  """The first messages of many chats, and the facts (name, word) in them."""

  messages: tuple[tuple[str, str], ...]
  facts: tuple[tuple[str, str], ...]


def make_shared_text(rng: random.Random) -> SharedText:
  """Makes facts first, then other turns up to a length within SHARED_TOKENS."""
  facts = tuple(corpus.facts(rng, 6))
  turns = [corpus.fact_turn(list(facts[:3])), corpus.fact_turn(list(facts[3:]))]
  wanted = rng.randint(*SHARED_TOKENS)
  while (size := sum(map(skills.count_tokens, turns))) < wanted:
    turn = corpus.filler_turns(rng)[0]
    if size + skills.count_tokens(turn) <= SHARED_TOKENS[1]:
      turns.append(turn)
  messages = tuple(pair for turn in turns for pair in (("user", turn.user), ("assistant", turn.answer or "")))
  return SharedText(messages, facts)


def make_chats(seed: int) -> Iterator[DemoChat]:
  """Yields an endless mixture of chats; the same seed gives the same chats."""
  rng = random.Random(seed)
  texts = [make_shared_text(rng) for _ in range(NUM_SHARED_TEXTS)]
  samplings = itertools.cycle(STORY_SAMPLING)
  for index in itertools.count():
    opens = index < NUM_OPENING_CHATS
    kind = rng.choices(list(CHATS), list(CHATS.values()))[0]
    if kind == "long" and not opens:
      instance = skills.make_instances("recall", 1, rng.getrandbits(32), rng.randint(*LONG_DISTANCE))[0]
      *before, (_, question) = ((message["role"], message["content"]) for message in instance.messages)
      yield DemoChat(tuple(before), (DemoTurn("recall", question, GREEDY, ANSWER_TOKENS, instance.answer),))
      continue
    text = rng.choice(texts) if kind == "shared" else SharedText((), ())
    shares = SHARED_TURNS if kind == "shared" else OWN_TURNS
    kinds = rng.choices(list(shares), list(shares.values()), k=rng.randint(1, MAX_TURNS))
    if opens:
      kinds[0] = "story"
    first, *others = (_make_turn(rng, each, text, samplings) for each in kinds)
    yield DemoChat(text.messages, (dataclasses.replace(first, min_tokens=OPENING_MIN_TOKENS if opens else 0), *others))


def _make_turn(rng: random.Random, kind: str, text: SharedText, samplings: Iterator[pb.SamplingParams]) -> DemoTurn:
  if kind == "story":
    return DemoTurn(kind, corpus.story_turns(rng)[0].user, next(samplings), STORY_TOKENS)
  if kind == "talk":
    return DemoTurn(kind, corpus.talk_turn(rng).user, GREEDY, ANSWER_TOKENS)
  turn = (
    corpus.question_turn(rng.choice(text.facts)) if kind == "recall" else corpus.skill_turn(kind, rng, held_out=True)
  )
  return DemoTurn(kind, turn.user, GREEDY, ANSWER_TOKENS, turn.answer)
