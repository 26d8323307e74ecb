"""How often a constraint asks for a part of itself to be repeated, read from its text. Compiles nothing.

The compiler follows a count one state of its lexer after the other, and an output may use some ten thousand: an upper
bound beyond MAX_REPEATS is never reached, and a lower one never fulfilled. Counts nested in a regular expression
multiply. A schema's keywords for upper bounds may have any: programs write 2147483647 where they mean none, and it
costs nothing.
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
# What the compiler takes for blanks where it skips them. Python's has four more.
_BLANK = r"[^\S\x1c-\x1f]"
_COMMENT = rf"(?:{_BLANK}|#[^\n]*+\n?)*+"


def _pieces(skipped: str, blank: str, peeked: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
  """What a regular expression is made of, outside of classes of characters and in them.

  As in the compiler's parser, the crate regex-syntax. All quantifiers over what a caller may write much of are
  possessive, or some texts would take quadratic time.

  Args:
    skipped: what is skipped between any two pieces.
    blank: what may stand around the numbers of a count.
    peeked: what is looked past to see whether `-` begins a range.
  """
  count = rf"\{{{blank}(?P<low>(?:[0-9]{skipped})*+){blank}(?:,{blank}(?P<high>(?:[0-9]{skipped})*+){blank})?\}}"
  item = rf"(?:\\[pPxuU]{skipped}\{{(?:{skipped}[^}}]){{0,64}}+{skipped}\}}|\\.|.)"
  # With a `]` or several `-` that belong to it.
  begin = rf"(?P<begin>\[{skipped}(?:\^{skipped})?(?:(?:-{skipped})++|\]{skipped})?)"
  group = rf"\({skipped}\?(?P<flags>[a-zA-Z-]*+)(?:(?P<colon>:)|(?P<alone>\)))"
  named = rf"\((?:{skipped}\?P?<[^>()]*+>)?"
  outside = rf"{group}|(?P<open>{named})|(?P<close>\))|{begin}|{count}|(?P<any>[?*+])|{item}"
  inside = rf"\[:\^?[a-z]++:\]|{begin}|(?P<end>\])|&&|--|~~|{item}(?:{skipped}-(?!{peeked}[\]-]){skipped}{item})?"
  return re.compile(f"{skipped}(?:{outside})", re.DOTALL), re.compile(f"{skipped}(?:{inside})", re.DOTALL)


# Usually, and where the flag x is set. Of blanks the compiler looks past a `#` too, but not to the end of its line.
_PIECES = (_pieces("", f"{_BLANK}*+", ""), _pieces(_COMMENT, _COMMENT, rf"{_BLANK}*+(?:#{_BLANK}*+)?+"))
# The compiler gets patterns of schemas, and the one of a request, in one line.
_IN_ONE_LINE = str.maketrans({"\n": r"\n", "\r": r"\r", "\t": r"\t"})
# What Lark is made of: a comment, a text, a regular expression, a special token, the two forms of a count, or anything
# else. A text or an expression without an end is none, but is not looked at twice.
_LARK = re.compile(
  r"""(?:\#|//)[^\n]*+ | "(?:\\.|[^"\\])*+"? | /(?P<regex>(?:\\.|[^/\\])++)/?(?P<flags>[imslux]*+) | <[^<>\s]++>
  | \{\s*+\+?(?P<low>[0-9]*+)\s*+(?:,\s*+\+?(?P<high>[0-9]*+)\s*+)?+\}
  | ~\s*+\+?(?P<first>[0-9]++)(?:\s*+\.\.\s*+\+?(?P<last>[0-9]++))?+
  | .""",
  re.DOTALL | re.VERBOSE,
)


def count_pattern_repeats(pattern: str) -> int:
  """`of_regex` of a pattern of a schema, or of a request's only one."""
  return of_regex(pattern.translate(_IN_ONE_LINE))


def of_regex(pattern: str, verbose: bool = False) -> int:
  """The most that bounds in a regular expression let a part of it be repeated; 1 if there are none.

  A{m,n} counts n, A{m} and A{m,} count m, (A{m}){n} counts m * n. At most 10**12. What is no regular expression has any
  count.

  Args:
    pattern: in the syntax of the crate regex-syntax.
    verbose: whether the flag x is set from the beginning.
  """
  # `most` is that of the innermost open group so far, `last` that of what a quantifier would follow. `outer` holds what
  # was `most` and `verbose` around each open group.
  most, last, depth, at = 1, 1, 0, 0
  outer: list[tuple[int, bool]] = []
  while piece := _PIECES[verbose][depth > 0].match(pattern, at):
    at = piece.end()
    kind = piece.lastgroup
    if kind == "any":
      continue
    if kind in ("low", "high"):
      last = min(last * (_bound(piece["low"], piece["high"]) or 1), _MOST)
    elif kind == "close" and outer:
      last = most
      most, verbose = outer.pop()
    else:
      last = 1
    if kind in ("open", "colon"):
      outer.append((most, verbose))
      most = 1
    if kind in ("colon", "alone"):
      on, _, off = piece["flags"].partition("-")
      verbose = ("x" in on or verbose) and "x" not in off
    depth += (kind == "begin") - (kind == "end")
    most = max(most, last)
  return max([most, *(before for before, _ in outer)])


def count_grammar_repeats(lark: str) -> int:
  """The largest bound in a grammar of Lark; 1 if there are none. Those of one regular expression multiply."""
  most = 1
  for piece in _LARK.finditer(lark):
    if piece["regex"]:
      most = max(most, of_regex(piece["regex"], "x" in piece["flags"]))
    else:
      most = max(most, _bound(*piece.group("low", "high", "first", "last")))
  return most


def count_schema_repeats(schema: Any) -> Iterator[tuple[str, int]]:
  """The counts of a JSON schema: of its patterns, and those that are the least. Each with its keyword."""
  left = [schema]
  while left:
    value = left.pop()
    if isinstance(value, list):
      left += value
    elif isinstance(value, dict):
      yield from ((name, int(min(value[name], _MOST))) for name in _LEAST if isinstance(value.get(name), int | float))
      if isinstance(value.get("pattern"), str):
        yield "pattern", count_pattern_repeats(value["pattern"])
      if isinstance(value.get("patternProperties"), dict):
        yield from (("patternProperties", count_pattern_repeats(name)) for name in value["patternProperties"])
      left += (inner for name, inner in value.items() if name not in _VALUES)


def _bound(*numbers: str | None) -> int:
  """The largest of numbers as they are written, at most 10**12; 0 where there are none."""
  digits = [re.sub("[^0-9]", "", re.sub("#[^\n]*", "", number)) for number in numbers if number]
  return max([min(int(number[:30]), _MOST) for number in digits], default=0)
