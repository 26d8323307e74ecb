"""Counts how often a constraint repeats a part of itself, from its text. Compiles nothing.

The compiler follows a count one state of its lexer after the other, and an output may use some ten thousand: an upper
bound beyond MAX_REPEATS is never reached, and a lower one never fulfilled. Counts nested in a regular expression
multiply. A schema's keywords for upper bounds may have any: programs write 2147483647 where they mean none, and it
costs nothing.

This gives users an early error; it protects nothing. The compiler's own limits stop counts that are missed here, such
as those between blanks and comments under the flag x.
"""

from collections.abc import Iterator
import re
from typing import Any

from server.text.schema_alternatives import walk_objects

# More characters than outputs have.
MAX_REPEATS = 100_000
# Counting ends here.
_MOST = 10**12
_LEAST = ("minLength", "minItems", "minProperties")
# What is compared, not followed.
_VALUES = ("const", "enum", "default", "examples")
# Escapes, classes of characters (with a `]` that belongs to them; one without an end is none, but is not looked at
# twice), groups with their names, counts, or anything else.
_REGEX = re.compile(
  r"""\\[pPxuU]\{[^}]*+\} | \\. | \[\^?\]?(?:\\.|[^\]\\])*+\]? | (?P<open>\((?:\?P?<[^>=!][^>]{0,64}+>)?)
  | (?P<close>\)) | \{\s*+(?P<low>[0-9]*+)\s*+(?:,\s*+(?P<high>[0-9]*+)\s*+)?+\} | (?P<any>[?*+]) | .""",
  re.DOTALL | re.VERBOSE,
)
# What Lark is made of: a comment, a text, a regular expression, a special token, the two forms of a count, or anything
# else. A text or an expression without an end is none, but is not looked at twice.
_LARK = re.compile(
  r"""(?:\#|//)[^\n]*+ | "(?:\\.|[^"\\])*+"? | /(?P<regex>(?:\\.|[^/\\])++)/? | <[^<>\s]++>
  | \{\s*+\+?(?P<low>[0-9]*+)\s*+(?:,\s*+\+?(?P<high>[0-9]*+)\s*+)?+\}
  | ~\s*+\+?(?P<first>[0-9]++)(?:\s*+\.\.\s*+\+?(?P<last>[0-9]++))?+
  | .""",
  re.DOTALL | re.VERBOSE,
)


def count_pattern_repeats(pattern: str) -> int:
  """The most that bounds in a regular expression let a part of it be repeated; 1 if there are none.

  A{m,n} counts n, A{m} and A{m,} count m, (A{m}){n} counts m * n. At most 10**12.
  """
  # `most` is that of the innermost open group so far, `last` that of what a quantifier would follow; `outer` holds
  # what was `most` around each open group.
  most, last, outer = 1, 1, []
  for piece in _REGEX.finditer(pattern):
    kind = piece.lastgroup
    if kind == "any":
      continue
    if kind in ("low", "high"):
      last = min(last * (_bound(piece["low"], piece["high"]) or 1), _MOST)
    elif kind == "close" and outer:
      last, most = most, outer.pop()
    else:
      last = 1
    if kind == "open":
      outer.append(most)
      most = 1
    most = max(most, last)
  return max([most, *outer])


def count_grammar_repeats(lark: str) -> int:
  """The largest bound in a grammar of Lark; 1 if there are none. Those of one regular expression multiply."""
  most = 1
  for piece in _LARK.finditer(lark):
    if piece["regex"]:
      most = max(most, count_pattern_repeats(piece["regex"]))
    else:
      most = max(most, _bound(*piece.group("low", "high", "first", "last")))
  return most


def count_schema_repeats(schema: Any) -> Iterator[tuple[str, int]]:
  """The counts of a JSON schema: of its patterns, and those that are the least. Each with its keyword."""
  for value in walk_objects(schema, skipped=_VALUES):
    yield from ((name, int(min(value[name], _MOST))) for name in _LEAST if isinstance(value.get(name), int | float))
    if isinstance(value.get("pattern"), str):
      yield "pattern", count_pattern_repeats(value["pattern"])
    if isinstance(value.get("patternProperties"), dict):
      yield from (("patternProperties", count_pattern_repeats(name)) for name in value["patternProperties"])


def _bound(*numbers: str | None) -> int:
  """The largest of numbers as they are written, at most 10**12; 0 where there are none."""
  return max([min(int(number[:30]), _MOST) for number in numbers if number], default=0)
