"""Counts as they stand in expressions, grammars and schemas, and texts that are meant to be read wrongly."""

import re

from hypothesis import given
from hypothesis import strategies as st
import llguidance
from llguidance.gbnf_to_lark import any_to_lark
import pytest

from server.text.repetition_limits import (
  MAX_REPEATS,
  count_grammar_repeats,
  count_pattern_repeats,
  count_schema_repeats,
  of_regex,
)

REGEXES = {
  "": 1,
  "ab*c+d?": 1,
  "a{7}": 7,
  "a{7,}": 7,
  "a{3,7}": 7,
  "a{,7}": 7,
  "a{ 3 , 7 }": 7,
  "a{7}b{5}": 7,
  "(a{7}){5}": 35,
  "((a{7}b){5}c|d{50}){2}": 100,
  "(?:a{7}){5}x": 35,
  "(a{7})+{5}": 35,
  "(a{7})*b{5}": 7,
  "(a{0}){9}": 9,
  "a{2}{3}{4}": 24,
  # No bounds: characters of a class, escapes, what belongs to an escape, and braces without numbers.
  "[{9}]": 1,
  "[]{9}]{2}": 2,
  "[^]{9}]{2}": 2,
  "[a[{9}]b{9}]{2}": 2,
  "[\\]{9}]{2}": 2,
  r"\{9}": 1,
  r"\({2}a{3}": 3,
  r"\x{10FFFF}{2}": 2,
  r"\p{Greek}{2}": 2,
  r"\u{99}{2}": 2,
  "{}": 1,
  "a{b}": 1,
  # A class ends, and so does a name, where the compiler says.
  "[+-[]{9}": 9,
  "[+-[{9}]]": 1,
  "[-]{9}": 9,
  "[^-]{9}": 9,
  "[a--[{9}]]": 1,
  "[[:alpha:]{9}]{2}": 2,
  "(?P<a[>b){9}": 9,
  "(?i)a{9}": 9,
  # With the flag x blanks and comments mean nothing, wherever it is set, until its group ends.
  "(?x)a{1 0, 2 0#0\n0}": 200,
  "(?x)# {9}\n a{2}": 2,
  "(?x)[ ]{9}]{2}": 2,
  "(?x)[a-#]\n]{9}": 9,
  "(?x) ( [#]\n{9}] ) {2}": 2,
  "(?x)\\p{Greek#}[\n}{9}": 9,
  "(?i-x:(?x) a{1 0} b)#{9}": 10,
  "(?i-x:(?x) a{1 0} b){9}": 90,
  "((?x)a)#{9}": 9,
  "(?x)(?-x:a#{9})#{7}": 9,
  "#{9}": 9,
  # No expressions; they are refused when they are compiled.
  "a{9": 1,
  "a)b){9}": 9,
  "((((a{9}": 9,
  "[a{9}": 1,
  "(?iq{9}": 9,
  "{" * 4000 + " " * 4000: 1,
  r"\p{" * 2000 + "}": 1,
}


@pytest.mark.parametrize("pattern", REGEXES)
def test_counts_of_an_expression(pattern):
  assert of_regex(pattern) == REGEXES[pattern]


def test_counts_end_somewhere():
  for pattern in ("a{" + "9" * 8000 + "}", "(" * 200 + "a" + "){99999}" * 200):
    assert of_regex(pattern) == 10**12
  assert count_grammar_repeats('start: "a"{' + "9" * 8000 + "}") == 10**12
  assert dict(count_schema_repeats({"minLength": 10**4000, "minItems": float("inf")})) == {
    "minLength": 10**12,
    "minItems": 10**12,
  }


@pytest.mark.parametrize(
  "grammar, times",
  [
    ('start: "a"', 1),
    ('start: "a"{7} "b"{3,5}', 7),
    ("start: A~7", 7),
    ("start: A~3..7 B ~ 2 .. 5", 7),
    ("start: /a{7,}/", 7),
    ("start: [A{7}]", 7),
    ('start: "a"{+7} "b"~+5', 7),
    ("start: /(a{7}){5}/ /b{30}/", 35),
    ("start: /a{1 0}/", 1),
    ("start: /a{1 0}/x", 10),
    ('start: %regex {"substring_chars": "{9}\x7f#"} A{7}', 7),
    # No counts: what is in a text, a comment, the name of a token, or a class of characters.
    ('start: "{9}" "\\"{9}" "a~9"i', 1),
    ('start: "//" "a"{7} // "b"{9}', 7),
    ('# {9}\nstart: "#"{7} // "b"~9', 7),
    ("start: <[9]> <a{9}> <b~9>", 1),
    ("start: /[{9}]/ /\\/{2}[~9]/", 2),
    ('start: /"/ A{7} /"/', 7),
    ('start: "/" A{7} "/"', 7),
    ('start: "{9', 1),
    ("start: /[{9", 1),
    ("A: ~/a/", 1),
    (r"start: /\x{10FFFF}/", 1),
    ("~" + " " * 8000, 1),
  ],
)
def test_counts_of_a_grammar(grammar, times):
  assert count_grammar_repeats(grammar) == times


@pytest.mark.parametrize(
  "grammar, times",
  [
    ("root ::= [a-z]{3,7}", 7),
    ("root ::= [a-z]{٧}", 7),
    ('root ::= [{9}] "{9}" # {9}', 1),
    ('root ::= ("{9}"){ 2 , }', 2),
  ],
)
def test_counts_of_gbnf_are_those_of_the_lark_it_becomes(grammar, times):
  assert count_grammar_repeats(any_to_lark(grammar)) == times


def test_a_pattern_is_compiled_in_one_line():
  assert count_pattern_repeats("(?x)[\n]{9}]") == 9 and of_regex("(?x)[\n]{9}]") == 1
  assert list(count_schema_repeats({"pattern": "(?x)[\n]{9}]"})) == [("pattern", 9)]


@pytest.mark.parametrize(
  "begin",
  [*r"""{ {1 (?P<a (?x \p{ [ [[:a a- ( " \" / /\ <""".split(), "{ ", "~ ", "(?x) # ", "(?x)[a-#"],
)
def test_long_texts_are_read_once(begin):
  """Of which each part could be the begin of much: in quadratic time these tests would take minutes."""
  text = begin * (40_000 // len(begin))
  assert of_regex(text) == of_regex("(?x)" + text) == count_grammar_repeats(text) == 1


def test_counts_of_a_schema():
  schema = {
    "properties": {
      "maxLength": {"minLength": 1, "maxLength": 2},
      "pattern": {"pattern": "a{3}"},
      "minItems": {
        "anyOf": [{"minItems": 4, "maxItems": 5.0}, {"patternProperties": {"a{6}": {}, "b{7}": {"minProperties": 8}}}]
      },
    },
    "$defs": {"x": [{"maxProperties": 9, "maxLength": "10", "pattern": 11, "patternProperties": ["a{12}"]}]},
    "const": {"maxLength": 13, "pattern": "a{14}"},
    "enum": [{"minLength": 15}],
  }
  assert sorted(count_schema_repeats(schema), key=lambda found: found[1]) == [
    ("minLength", 1),
    ("pattern", 3),
    ("minItems", 4),
    ("patternProperties", 6),
    ("patternProperties", 7),
    ("minProperties", 8),
  ]


def test_what_programs_write_is_within_the_limit():
  """No limit on a length, and expressions for addresses, times and versions."""
  assert (
    max(times for _, times in count_schema_repeats({"minLength": 1, "maxLength": 2**31 - 1, "minItems": 100}))
    <= MAX_REPEATS
  )
  for pattern in (
    r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*$",
    r"^(?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}$",
    r"^(\w{1,50} ){1,500}\w+\.$",
  ):
    assert re.compile(pattern) and of_regex(pattern) <= MAX_REPEATS


# --- The compiler's own opinion ---------------------------------------------------------------------------------------

_BYTES = llguidance.LLTokenizer("byte")
# A count that every compiler refuses, by a word of its own: so it says whether it takes that for a count.
_IMPOSSIBLE = "{5,3}"
_OF_REGEX = r"a b [ [ ] ] ^ - - \ ( ( ) ) # & && -- | ? * { } p : [:alpha:] \p{Greek} \x{41} \[ \] \\ \# \b".split()
_OF_REGEX += ["(?x)", "(?x)", "(?x:", "(?-x:", "(?-x)", "(?P<a[>", " ", "\n", "\x1c", "{ 5,#}\n3}", "{5 ,3}"]
_OF_REGEX.append(_IMPOSSIBLE)
_OF_LARK = r"""" " " / / // # \ < > [ ] ( ) A x i | @ { } \" [^/] \/ "a" /a/ <x> "{5,3}" /[{5,3}]/ /(?x) /x""".split()
_OF_LARK += ["\n", " ", "\x7f", '%regex {"substring_chars": "', "{ 5 , 3 }", "{+5,3}", "~5 .. 3", "# {5,3}\n"]
_OF_LARK.append(_IMPOSSIBLE)


def says_the_compiler(grammar: str, words: str) -> bool | None:
  """Whether it saw the impossible count; None where it refuses the grammar for something else."""
  error = llguidance.LLMatcher.validate_grammar(grammar, _BYTES)
  return words in error if words in error or not error else None


def joined(parts: list[str]) -> st.SearchStrategy[str]:
  pieces = st.lists(st.sampled_from(parts), max_size=8).map("".join)
  return st.builds(lambda before, after: before + _IMPOSSIBLE + after, pieces, pieces)


@given(joined(_OF_REGEX))
def test_a_count_in_an_expression_is_what_the_compiler_takes_for_one(pattern):
  words = "invalid repetition count range"
  seen = says_the_compiler(llguidance.LLMatcher.grammar_from_regex(pattern), words)
  assert seen is None or (count_pattern_repeats(pattern) >= 5) == seen
  if "/" not in pattern:
    seen = says_the_compiler(llguidance.LLMatcher.grammar_from_lark(f"start: /{pattern}/"), words)
    assert seen is None or (count_grammar_repeats(f"start: /{pattern}/") >= 5) == seen


@given(joined(_OF_LARK))
def test_a_count_in_a_grammar_is_what_the_compiler_takes_for_one(rule):
  grammar = f'start: A {rule}\nA: "a"'
  seen = says_the_compiler(llguidance.LLMatcher.grammar_from_lark(grammar), "range end must be >= start")
  assert seen is None or (count_grammar_repeats(grammar) >= 5) == seen
