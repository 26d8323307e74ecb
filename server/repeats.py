"""How often a constraint asks for a part of itself to be repeated, read from its text. Compiles nothing.

The compiler follows a count one state of its lexer after the other, and an output may use some ten thousand: an upper
bound beyond MAX_REPEATS is never reached, and a lower one never fulfilled. Nested counts multiply. A schema's keywords
for upper bounds may have any: programs write 2147483647 where they mean none, and it costs nothing.
"""

from collections.abc import Iterator
import re
from typing import Any

# More characters than outputs have.
MAX_REPEATS = 100_000
# Counting ends here.
_MOST = 10**12
_LEAST = ("minLength", "minItems", "minProperties")
# What is compared, not followed.
_VALUES = ("const", "enum", "default", "examples")
# Possessive, or a text of blanks would take quadratic time.
_BRACES = r"\{\s*+(?P<low>[0-9]*+)\s*+(?:,\s*+(?P<high>[0-9]*+)\s*+)?+\}"
# An escape, the begin of a class with a `]` that belongs to it, a bounded repetition, or a character.
_PIECE = re.compile(rf"\\[pPxuU]\{{[^}}]{{0,64}}\}}|\\.|\[\^?\]?|{_BRACES}|.", re.DOTALL)
# Of Lark or GBNF, also within their regular expressions and texts; and Lark's ~2..5.
_IN_GRAMMAR = re.compile(rf"(?<!\\[pPxuU]){_BRACES}|~\s*+(?P<first>[0-9]++)(?:\s*+\.\.\s*+(?P<last>[0-9]++))?+")


def of_regex(pattern: str) -> int:
  """The most that bounds in a regular expression let a part of it be repeated; 1 if there are none.

  A{m,n} counts n, A{m} and A{m,} count m, (A{m}){n} counts m * n. At most 10**12. What is no regular expression has any
  count.
  """
  # Of each open group the most in it so far; `last` is that of what a quantifier would follow.
  groups, last, depth = [1], 1, 0
  for piece in _PIECE.finditer(pattern):
    text = piece[0]
    if text[0] == "[":
      depth, last = depth + 1, 1
    elif depth:
      depth -= text == "]"
    elif text == "(":
      groups.append(1)
    elif text == ")" and len(groups) > 1:
      last = groups.pop()
    elif bound := _bound(piece["low"], piece["high"]):
      last = min(last * bound, _MOST)
    elif text not in ("?", "*", "+"):
      last = 1
    groups[-1] = max(groups[-1], last)
  return max(groups)


def of_grammar(grammar: str) -> int:
  """The largest bound in a grammar of Lark or GBNF; 1 if there are none."""
  return max([1, *(_bound(*bound.groups()) for bound in _IN_GRAMMAR.finditer(grammar))])


def of_schema(schema: Any) -> Iterator[tuple[str, int]]:
  """The counts of a JSON schema: of its patterns, and those that are the least. Each with its keyword."""
  left = [schema]
  while left:
    value = left.pop()
    if isinstance(value, list):
      left += value
    elif isinstance(value, dict):
      yield from ((name, int(min(value[name], _MOST))) for name in _LEAST if isinstance(value.get(name), int | float))
      if isinstance(value.get("pattern"), str):
        yield "pattern", of_regex(value["pattern"])
      if isinstance(value.get("patternProperties"), dict):
        yield from (("patternProperties", of_regex(name)) for name in value["patternProperties"])
      left += (inner for name, inner in value.items() if name not in _VALUES)


def _bound(*numbers: str | None) -> int:
  """The largest of numbers as they are written, at most 10**12; 0 where there are none."""
  return max([min(int(number[:30]), _MOST) for number in numbers if number], default=0)
