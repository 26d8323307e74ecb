"""Counts as they stand in expressions, grammars and schemas, and texts that are meant to be read wrongly."""

import re

from llguidance.gbnf_to_lark import any_to_lark
import pytest

from server.text.repetition_limits import (
  MAX_REPEATS,
  count_grammar_repeats,
  count_pattern_repeats,
  count_schema_repeats,
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
  "(?P<a[>b){9}": 9,
  "(?i)a{9}": 9,
  # No expressions; they are refused when they are compiled.
  "a{9": 1,
  "a)b){9}": 9,
  "((((a{9}": 9,
  "{" * 4000 + " " * 4000: 1,
  r"\p{" * 2000 + "}": 1,
}


@pytest.mark.parametrize("pattern", REGEXES)
def test_counts_of_an_expression(pattern):
  assert count_pattern_repeats(pattern) == REGEXES[pattern]


def test_counts_end_somewhere():
  for pattern in ("a{" + "9" * 8000 + "}", "(" * 200 + "a" + "){99999}" * 200):
    assert count_pattern_repeats(pattern) == 10**12
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


@pytest.mark.parametrize(
  "begin",
  [*r"""{ {1 (?P<a (?x \p{ [ [[:a a- ( " \" / /\ <""".split(), "{ ", "~ "],
)
def test_long_texts_are_read_once(begin):
  """Of which each part could be the begin of much: in quadratic time these tests would take minutes."""
  text = begin * (40_000 // len(begin))
  assert count_pattern_repeats(text) == count_grammar_repeats(text) == 1


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
    assert re.compile(pattern) and count_pattern_repeats(pattern) <= MAX_REPEATS
