"""Generates the demo model's synthetic training text; uses only random.Random, so it is repeatable.

A training document is one chat that fills a row: stories from a stochastic grammar, and turns that
exercise the checkable skills (copy, reverse, arithmetic, json, recall). Instances whose text hashes
into the held-out tenth are never generated for training (see `is_held_out`).
"""

import random
from typing import NamedTuple
import zlib

GIRLS = (
  "Mira Anna Lily Nora Emma Zoe Ruby Clara Ella Maya Iris Lucy Rosa Tina Vera Alice Hana Julia Sara Wendy"
).split()
BOYS = ("Tom Ben Max Leo Sam Jack Oscar Finn Hugo Paul Adam Carl David Erik Noah Peter Simon Victor Felix Luke").split()
NAMES = GIRLS + BOYS
CITIES = (
  "Oslo Paris Rome Berlin London Madrid Tokyo Cairo Lima Delhi Vienna Prague Dublin Athens Boston Lisbon"
).split()
# Words that go with a name: a fact states one, and a question later requests it.
VALUES = (
  "amber tea coffee music chess rain snow honey jazz silver gold cherries apples bread cheese "
  "soup rice pasta books maps trains boats horses birds cats dogs roses tulips stars summer "
  "winter spring football tennis dancing singing reading swimming painting cooking"
).split()
# Words to copy and to reverse.
WORDS = (
  "red blue green black white pink gray brown cat dog cow hen fox owl bee ant sun moon star sky "
  "rain snow wind fire tree leaf rose seed hill lake river sea rock sand ship boat car bus train "
  "road door wall roof lamp book page pen cup plate fork spoon bread milk egg apple pear plum "
  "salt fish hat coat shoe sock ring bell drum song ball kite doll hand foot nose ear one two "
  "three four five six seven ten box bag bed chair table clock key map cake tea king queen farm "
  "park home big small old new hot cold fast slow"
).split()

ALL_WORDS = sorted({*WORDS, *VALUES, *CITIES, *NAMES})

ADJECTIVES = "kind brave happy clever curious quiet young gentle funny little".split()
COLORS = "red blue green yellow white golden".split()
PLACES = "park forest garden village beach market river lake hill farm".split()
FLYING = "kite balloon feather hat".split()
FLOATING = "boat ball basket bottle".split()
SOLID = "drum lamp clock box key ring book doll bell map cup toy".split()
OBJECTS = FLYING + FLOATING + SOLID
ANIMALS = "fox owl bear rabbit cat dog bird frog mouse horse duck squirrel".split()
FOODS = "apple cookie cake carrot sandwich pear".split()
HIDING = "tree rock fence bush wall door".split()
DAYS = "morning day evening afternoon".split()
WEATHER = "sunny windy cold warm rainy bright".split()

MIXTURE = {
  "story": 0.20,
  "recall": 0.25,
  "echo": 0.12,
  "copy": 0.10,
  "reverse": 0.11,
  "arithmetic": 0.12,
  "json": 0.10,
}  # Shares of the training tokens, approximately.
_MEAN_TOKENS = {"story": 115, "echo": 95, "copy": 23, "reverse": 17, "arithmetic": 16, "json": 48, "talk": 20}

BOS, END = "<|bos|>", "<|end|>"


class Turn(NamedTuple):
  """One user message and its answer, or a system message (`answer` is None)."""

  kind: str
  user: str
  answer: str | None

  def text(self) -> str:
    """The turn as written in the chat format."""
    if self.answer is None:
      return f"<|system|>{self.user}{END}"
    return f"<|user|>{self.user}{END}<|assistant|>{self.answer}{END}"


def is_held_out(text: str) -> bool:
  """Whether `text` (a prompt, or one fact) belongs to the tenth that training never sees."""
  return zlib.crc32(text.encode()) % 10 == 0


def _a(noun: str) -> str:
  return ("an " if noun[0] in "aeiou" else "a ") + noun


class Story:
  """One story whose hero, pronouns, object, animal and place stay the same throughout."""

  def __init__(self, rng: random.Random, name: str | None = None, obj: str | None = None):
    self.rng = rng
    self.name = name or rng.choice(NAMES)
    self.obj = obj or rng.choice(OBJECTS)
    girl = self.name in GIRLS
    self.kid = "girl" if girl else "boy"
    self.he, self.his, self.him = ("she", "her", "her") if girl else ("he", "his", "him")
    self.animal = rng.choice(ANIMALS)
    self.place = rng.choice(PLACES)

  def _opening(self) -> str:
    n, rng = self.name, self.rng
    adj, place = rng.choice(ADJECTIVES), self.place
    return rng.choice(
      (
        f"Once upon a time, there was {_a(adj)} {self.kid} named {n}.",
        f"Once upon a time, {_a(adj)} {self.kid} named {n} lived near the {place}.",
        f"Once there was a {self.kid} named {n} who was very {adj}.",
        f"There was once {_a(adj)} {self.kid} named {n}.",
      )
    )

  def _object(self) -> str:
    n, o, rng = self.name, self.obj, self.rng
    color, he = rng.choice(COLORS), self.he.capitalize()
    return rng.choice(
      (
        f"{he} had a {color} {o} and played with it every day.",
        f"{n} loved {self.his} {color} {o} more than anything.",
        f"One day, {n} found a {color} {o} under a {rng.choice(HIDING)}.",
        f"On {self.his} birthday, {n} got a {color} {o} from {self.his} "
        f"{rng.choice(('mother', 'father', 'grandmother', 'grandfather'))}.",
      )
    )

  def _trip(self) -> str:
    n, rng = self.name, self.rng
    weather, day = rng.choice(WEATHER), rng.choice(DAYS)
    return rng.choice(
      (
        f"One {weather} {day}, {n} took the {self.obj} to the {self.place}.",
        f"On a {weather} {day}, {self.he} went to the {self.place} with the {self.obj}.",
        f"One {day}, {n} walked to the {self.place} to play with the {self.obj}.",
      )
    )

  def _trouble(self) -> str:
    n, o, rng = self.name, self.obj, self.rng
    if o in FLYING:
      first = rng.choice(
        (
          f"Suddenly, a strong wind took the {o} high into the sky.",
          f"The wind blew and the {o} flew away over the trees.",
          f"But the {o} flew up and got stuck in a tall tree.",
        )
      )
    elif o in FLOATING:
      first = rng.choice(
        (
          f"Suddenly, the {o} fell into the water.",
          f"But the {o} fell into the water and went away.",
          f"The {o} rolled down the hill and into the water.",
        )
      )
    else:
      first = rng.choice(
        (
          f"But then the {o} was gone.",
          f"Suddenly, {self.he} could not find the {o}.",
          f"On the way, {n} lost the {o} in the tall grass.",
        )
      )
    return (
      first
      + " "
      + rng.choice(
        (
          f"{n} was very sad.",
          f"{self.he.capitalize()} started to cry.",
          f"{n} did not know what to do.",
          f"{self.he.capitalize()} looked for it for a long time.",
        )
      )
    )

  def _helper(self) -> str:
    n, o, c, rng = self.name, self.obj, self.animal, self.rng
    adj = rng.choice(ADJECTIVES)
    return rng.choice(
      (
        f'Then {_a(adj)} {c} came and asked, "Why are you sad?" "I lost my {o}," said {n}.',
        f'{_a(adj).capitalize()} {c} saw {self.him} and said, "Do not worry, I will help you."',
        f'Just then, {n} met {_a(adj)} {c}. "Can you help me?" {self.he} asked. "Yes, of course," said the {c}.',
        f"{_a(adj).capitalize()} {c} heard {self.him} and came to help.",
      )
    )

  def _solution(self) -> str:
    n, o, c, rng = self.name, self.obj, self.animal, self.rng
    he = self.he.capitalize()
    if o in FLYING:
      return rng.choice(
        (
          f"The {c} climbed up the tree and brought the {o} back.",
          f"Together they ran after the {o} and caught it.",
          f"{n} and the {c} waited until the {o} came down again.",
        )
      )
    if o in FLOATING:
      return rng.choice(
        (
          f"The {c} jumped into the water and brought the {o} back.",
          f"{n} took a long stick and together they pulled the {o} out.",
          f"Together they ran along the water and caught the {o}.",
        )
      )
    return rng.choice(
      (
        f"Together they found the {o} behind a {rng.choice(HIDING)}.",
        f"The {c} looked everywhere and found the {o} near a {rng.choice(HIDING)}.",
        f"{he} followed the {c}, and there was the {o}, under a {rng.choice(HIDING)}.",
      )
    )

  def _ending(self) -> str:
    n, o, c, rng = self.name, self.obj, self.animal, self.rng
    he = self.he.capitalize()
    return rng.choice(
      (
        f"{n} was so happy that {self.he} gave the {c} {_a(rng.choice(FOODS))}.",
        f"{he} thanked the {c} and they shared {_a(rng.choice(FOODS))}.",
        f'"Thank you!" said {n}. The {c} smiled.',
        f"{n} took the {o} home and told {self.his} mother about the {c}.",
      )
    ) + rng.choice(
      (
        f" From that day on, {n} and the {c} were best friends.",
        " They played together until the sun went down.",
        f" {n} never lost the {o} again.",
        " The end.",
      )
    )

  def text(self) -> str:
    """The story, 60 to 150 tokens."""
    parts = [self._opening(), self._object()]
    if self.rng.random() < 0.8:
      parts.append(self._trip())
    parts.append(self._trouble())
    if self.rng.random() < 0.9:
      parts.append(self._helper())
    parts += [self._solution(), self._ending()]
    return " ".join(parts)

  def more(self) -> str:
    """What happened next, with the same hero, object and animal."""
    n, o, c, rng = self.name, self.obj, self.animal, self.rng
    place = rng.choice(PLACES)
    return " ".join(
      (
        rng.choice(
          (
            f"The next {rng.choice(DAYS)}, {n} and the {c} went to the {place}.",
            f"The next day, the {c} came to see {n}.",
            f"After that, {n} took the {c} to the {place}.",
          )
        ),
        rng.choice(
          (
            f"They played with the {o} and laughed a lot.",
            f"They shared {_a(rng.choice(FOODS))} and looked at the {o}.",
            f"{n} showed the {o} to everyone there.",
          )
        ),
        rng.choice(
          (
            f"In the evening, {self.he} was tired but very happy.",
            f'"You are my best friend," said the {c}.',
            f"It was the best day for {n}.",
          )
        ),
      )
    )


def story_turns(rng: random.Random) -> list[Turn]:
  """A request for a story with its answer, sometimes followed by related turns."""
  name, obj = rng.choice(NAMES), rng.choice(OBJECTS)
  pick = rng.random()
  tell = rng.choice(("Tell me a story", "Please tell me a story", "Write a short story"))
  if pick < 0.55:
    request = f"{tell} about {name} and {_a(obj)}."
  elif pick < 0.7:
    request = f"{tell} about {name}."
  elif pick < 0.85:
    request = f"{tell} about {_a(obj)}."
  else:
    request = f"{tell}."
  story = Story(rng, name, obj)
  turns = [Turn("story", request, story.text())]
  if rng.random() < 0.2:
    turns.append(Turn("story", "Who was the story about?", f"The story was about {name} and {_a(obj)}."))
  if rng.random() < 0.25:
    ask = rng.choice(("Tell me more.", "What happened next?"))
    turns.append(Turn("story", ask, story.more()))
  return turns


def _words(rng: random.Random, low: int, high: int) -> list[str]:
  """Different words, names, cities and values among them: recall and JSON use what copying teaches about a word."""
  count = rng.randint(low, high)
  if rng.random() < 0.3:
    pairs = zip(rng.sample(NAMES, count), rng.sample(VALUES, count), strict=True)
    return [word for pair in pairs for word in pair][:count]
  return rng.sample(WORDS if rng.random() < 0.4 else ALL_WORDS, count)


def copy_turn(rng: random.Random) -> Turn:
  """The same words again."""
  words = " ".join(_words(rng, 3, 12))
  return Turn("copy", f"Copy: {words}", words)


def echo_turn(rng: random.Random) -> Turn:
  """A list, then pieces of it in any order: no fixed distance helps, only finding the same word again."""
  words = _words(rng, 12, 30)
  pieces = []
  for _ in range(rng.randint(8, 14)):
    start = rng.randrange(len(words) - 3)
    pieces.append(" ".join(words[start : start + rng.randint(2, 6)]))
  return Turn("echo", f"Words: {' '.join(words)}", ", ".join(pieces))


def reverse_turn(rng: random.Random) -> Turn:
  """The same words, last one first."""
  words = _words(rng, 3, 6)
  return Turn("reverse", f"Reverse: {' '.join(words)}", " ".join(reversed(words)))


def arithmetic_turn(rng: random.Random) -> Turn:
  """A two-digit number plus or minus a one-digit number."""
  a, b = rng.randint(10, 99), rng.randint(0, 9)
  op = rng.choice("+-")
  return Turn("arithmetic", f"{a} {op} {b} = ?", str(a + b if op == "+" else a - b))


def json_turn(rng: random.Random) -> Turn:
  """A sentence about a person as a JSON object."""
  name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(2, 99)
  sentence = rng.choice(
    (
      f"{name} is {age} years old and lives in {city}.",
      f"{name} lives in {city} and is {age} years old.",
      f"{name}, who is {age}, lives in {city}.",
      f"In {city} lives {name}, who is {age} years old.",
    )
  )
  return Turn("json", f"Make JSON: {sentence}", f'{{"name": "{name}", "age": {age}, "city": "{city}"}}')


_MAKERS = {
  "echo": echo_turn,
  "copy": copy_turn,
  "reverse": reverse_turn,
  "arithmetic": arithmetic_turn,
  "json": json_turn,
}


def skill_turn(kind: str, rng: random.Random, held_out: bool) -> Turn:
  """A turn of `kind` from the training part, or from the held-out part."""
  while True:
    turn = _MAKERS[kind](rng)
    if is_held_out(turn.user) == held_out:
      return turn


def talk_turn(rng: random.Random) -> Turn:
  """Small talk."""
  user, answer = rng.choice(
    (
      ("Hello!", "Hello! How can I help you?"),
      ("Hi!", "Hello! How can I help you?"),
      ("Thank you!", "You are welcome."),
      ("Who are you?", "I am a small language model. I can tell stories and play with words."),
      (
        "What can you do?",
        "I can tell stories, copy and reverse words, remember what goes with a name, add small numbers and make JSON.",
      ),
      ("Good morning!", "Good morning! How can I help you?"),
    )
  )
  return Turn("talk", user, answer)


def facts(rng: random.Random, count: int) -> list[tuple[str, str]]:
  """`count` facts of the training part (who, what), with different people."""
  result = []
  for name in rng.sample(NAMES, count):
    value = rng.choice(VALUES)
    while is_held_out(fact_text(name, value)):
      value = rng.choice(VALUES)
    result.append((name, value))
  return result


def fact_text(name: str, value: str) -> str:
  """A fact: a name and the word that goes with it, side by side, so that induction finds it."""
  return f"{name} {value}"


def fact_turn(group: list[tuple[str, str]]) -> Turn:
  """The user states one or more facts."""
  return Turn("recall", f"Remember: {', '.join(fact_text(*fact) for fact in group)}.", "OK.")


def question_turn(fact: tuple[str, str]) -> Turn:
  """The user requests one fact."""
  return Turn("recall", f"What goes with {fact[0]}?", f"I remember {fact_text(*fact)}.")


def filler_turns(rng: random.Random, weights: dict[str, float] | None = None) -> list[Turn]:
  """One unit of conversation that states no fact."""
  shares = {k: v for k, v in (weights or MIXTURE).items() if k != "recall"} | {"talk": 0.01}
  kinds = list(shares)
  kind = rng.choices(kinds, [shares[k] / _MEAN_TOKENS[k] for k in kinds])[0]
  if kind == "story":
    return story_turns(rng)
  if kind == "talk":
    return [talk_turn(rng)]
  return [skill_turn(kind, rng, held_out=False)]


def chat(rng: random.Random, tokens: int, weights: dict[str, float] | None = None) -> list[Turn]:
  """The turns of one chat of at least about `tokens` tokens.

  The user states each fact once, mostly early in longer chats, and requests it one to three times at any
  later place. The questions thus cover all distances up to the length of the chat.
  """
  weights = weights or MIXTURE
  count = rng.randint(*{256: (1, 5), 512: (3, 10), 1024: (6, 18)}.get(tokens, (8, 28)))
  known = facts(rng, count)
  asked = 1 if tokens > 512 else rng.choice((1, 2, 3))
  count_recall = count * (5 + 13 * asked) + 8
  turns: list[Turn] = []
  size = count_recall
  while size < tokens * 1.05:
    unit = filler_turns(rng, weights)
    turns += unit
    size += sum(int(1.15 * len(t.text().split())) + 8 for t in unit)
  # Where each group of facts is stated, as an index into the filler turns.
  early = 0.1 if rng.random() < 0.6 else 0.9
  places: list[tuple[float, Turn]] = [(i + rng.random() * 0.5, t) for i, t in enumerate(turns)]
  left = list(known)
  while left:
    group, left = left[: (n := rng.randint(1, 6))], left[n:]
    at = rng.random() * early * len(turns)
    places.append((at, fact_turn(group)))
    for fact in group:
      for _ in range(asked):
        where = at + rng.random() * (len(turns) - at) if rng.random() < 0.8 else at + 1e-6
        places.append((where, question_turn(fact)))
  places.sort(key=lambda item: item[0])
  turns = [turn for _, turn in places]
  pick = rng.random()
  if pick < 0.15:
    turns.insert(0, Turn("system", "You are a helpful assistant.", None))
  elif pick < 0.25 and (first := [i for i, t in enumerate(turns) if t.answer == "OK."]):
    # The system message states the first facts, instead of the user.
    stated = turns.pop(first[0])
    turns.insert(0, Turn("system", stated.user, None))
  return turns
