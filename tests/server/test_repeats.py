"""Counts as they stand in expressions, grammars and schemas, and texts that are meant to be read wrongly."""

import re

import pytest

from server.repeats import MAX_REPEATS, of_grammar, of_regex, of_schema

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
  # No expressions; they are refused when they are compiled.
  "a{9": 1,
  "a)b){9}": 9,
  "((((a{9}": 9,
  "[a{9}": 1,
  "{" * 4000 + " " * 4000: 1,
  r"\p{" * 2000 + "}": 1,
}


@pytest.mark.parametrize("pattern", REGEXES)
def test_counts_of_an_expression(pattern):
  assert of_regex(pattern) == REGEXES[pattern]


def test_counts_end_somewhere():
  for pattern in ("a{" + "9" * 8000 + "}", "(" * 200 + "a" + "){99999}" * 200):
    assert of_regex(pattern) == 10**12
  assert of_grammar('start: "a"{' + "9" * 8000 + "}") == 10**12
  assert dict(of_schema({"minLength": 10**4000, "minItems": float("inf")})) == {"minLength": 10**12, "minItems": 10**12}


@pytest.mark.parametrize(
  "grammar, times",
  [
    ('start: "a"', 1),
    ('start: "a"{7} "b"{3,5}', 7),
    ("start: A~7", 7),
    ("start: A~3..7 B ~ 2 .. 5", 7),
    ("start: /a{7,}/", 7),
    ("start: [A{7}]", 7),
    ("A: ~/a/", 1),
    (r"start: /\x{10FFFF}/", 1),
    ("root ::= [a-z]{3,7}", 7),
    ("~" + " " * 8000, 1),
  ],
)
def test_counts_of_a_grammar(grammar, times):
  assert of_grammar(grammar) == times


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
  assert sorted(of_schema(schema), key=lambda found: found[1]) == [
    ("minLength", 1),
    ("pattern", 3),
    ("minItems", 4),
    ("patternProperties", 6),
    ("patternProperties", 7),
    ("minProperties", 8),
  ]


def test_what_programs_write_is_within_the_limit():
  """No limit on a length, and expressions for addresses, times and versions."""
  assert max(times for _, times in of_schema({"minLength": 1, "maxLength": 2**31 - 1, "minItems": 100})) <= MAX_REPEATS
  for pattern in (
    r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*$",
    r"^(?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}$",
    r"^(\w{1,50} ){1,500}\w+\.$",
  ):
    assert re.compile(pattern) and of_regex(pattern) <= MAX_REPEATS
