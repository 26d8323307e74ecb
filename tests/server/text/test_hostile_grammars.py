"""About 250 schemas, expressions and grammars that somebody might send to hurt a server: served or refused in words."""

from collections.abc import Iterator
import json
import random
from typing import Any

import llguidance
import pytest

from engine.constraint import ConstraintFailed
from engine.errors import InvalidRequest
from server.proto import sluice_pb2 as pb
from server.text import constraint_compiler
from server.text.constraint_compiler import ConstraintCompiler


def corpus() -> Iterator[tuple[str, str, Any]]:
  """(name, kind of constraint, its value)."""
  yield from (("regex", "regex", text) for text in _regexes())
  yield from ((f"schema {name}", "json_schema", json.dumps(schema)) for name, schema in _schemas())
  yield from (("text", "json_schema", text) for text in _texts())
  yield from (("grammar", "grammar", text) for text in _grammars())
  yield from (("choice", "choice", values) for values in _choices())


def _regexes() -> Iterator[str]:
  for low, high in ((1, 10**9), (1, 10**5), (1, 10**4), (0, 2000), (1000, 1000), (1, 200)):
    for inner in ("a", ".", "[a-z]", "(ab|a)", r"\w", r"\p{L}", "(.*a)"):
      yield f"{inner}{{{low},{high}}}"
  for depth in (4, 12, 40, 200):
    yield "(" * depth + "a" + ")+" * depth
    yield "(" * depth + "a|b" + ")*c" * depth
    yield "(a?" * depth + ")" * depth
  for count in (8, 16, 32, 64, 500):
    yield f"(.*a.{{{count}}}b)+"  # 2**count states, if all were made
    yield f"(a|b)*a(a|b){{{count}}}"
    yield f"[^x]*x[^y]{{{count}}}y.*z"
    yield "|".join("abcdefgh"[i % 8] * (i + 1) for i in range(min(count, 100)))
    yield "(" + "|".join(f"{i:b}.*" for i in range(count)) + ")*"
  for count in (2, 3, 4):
    yield "a" + "{9}" * count
    yield "(.{1,50}){1,50}" * count
    yield "((a{1,30}){1,30}){1,30}"[: 9 + 9 * count]
  yield from ("a{99999}", "(ab){50000}", "x?(\u00e9\u65e5\U0001f600){3000}", "((a{300}){300})b")
  yield from ("(a+)+$", "^(a+)+", "(?=a)a", "(?!a).", r"(a)\1", r"\b\w+\b", "(?i)" + "straße" * 50, r"\p{Greek}{1,500}")
  yield from (r"[\s\S]{0,4000}", r"(\d{1,9}\.){1,400}", "(" * 3000, "[" * 3000, "a|" * 4000, "\\", "a{,", "(?P<n>a)")
  yield from ("(é|ü|日本|😀){1,900}", r"[\u{0}-\u{10FFFF}]{100}", "(.|\n)*(.|\n)*(.|\n)*x" * 20)


def _schemas() -> Iterator[tuple[str, Any]]:
  for count in (10, 100, 400, 1000):
    yield "many properties", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}
    yield (
      "all optional",
      {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(count)},
        "additionalProperties": False,
      },
    )
    yield "enum", {"enum": [f"value number {i}" for i in range(count)]}
    yield "enum of numbers", {"enum": [i * 7919 for i in range(2 * count)]}
    yield "anyOf", {"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}.*b$"} for i in range(1, count)]}
    one_of = [{"type": "object", "properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(count)]
    yield "oneOf", {"oneOf": one_of}
    yield "allOf", {"allOf": [{"type": "object", "properties": {f"p{i}": {"type": "null"}}} for i in range(count)]}
    yield "patterns at once", {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(min(count, 60))]}
    yield "lengths", {"type": "string", "minLength": count, "maxLength": 1000 * count}
    yield "items", {"type": "array", "items": {"type": "integer"}, "minItems": count, "maxItems": 100 * count}
    yield "tuple", {"type": "array", "prefixItems": [{"enum": ["a", i]} for i in range(count)], "minItems": count}
    yield "range", {"type": "integer", "minimum": -(10**count), "maximum": 10**count}
    yield "decimals", {"type": "number", "minimum": 10.0**-15, "maximum": 10**15 + 1 / 3, "multipleOf": 0.01}
    yield (
      "pattern properties",
      {
        "type": "object",
        "patternProperties": {f"^{'a' * (i % 40)}.*{i}$": {"type": "string"} for i in range(min(count, 200))},
      },
    )
    yield (
      "definitions in a chain",
      {
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"const": i}]} for i in range(count)}
        | {f"d{count}": {"type": "string"}},
        "$ref": "#/$defs/d0",
      },
    )
    yield (
      "definitions each to all",
      {
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(8)]} for i in range(min(count, 8))},
        "type": "array",
        "items": {"$ref": "#/$defs/d0"},
      },
    )
  for depth in (8, 30, 60, 300):
    inner: dict[str, Any] = {"type": "string"}
    arrays: dict[str, Any] = {"type": "null"}
    either: dict[str, Any] = {"const": 1}
    for _ in range(depth // 2):
      inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
      arrays = {"type": "array", "items": arrays, "minItems": 1, "maxItems": 9}
      either = {"anyOf": [either, {"type": "array", "items": either}]} if depth <= 30 else {"not": either}
    yield "deep objects", inner
    yield "deep arrays", arrays
    yield "deep choices", either
  tree = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}, "v": {}}}
  yield "tree", tree
  yield "itself", {"$ref": "#"}
  yield "itself and itself", {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}
  each_other = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
  yield "two that are each other", {"$defs": each_other, "$ref": "#/$defs/a"}
  yield "elsewhere", {"$ref": "http://127.0.0.1:1/x"}
  yield "no such place", {"$ref": "#/nowhere"}
  yield "false", False
  yield "contradiction", {"type": "string", "minLength": 5, "maxLength": 2}
  yield "empty intersection", {"allOf": [{"const": 1}, {"const": 2}]}
  yield "regex in strings", {"type": "array", "items": {"type": "string", "pattern": "(.*a.{40}b)+"}}
  yield "unknown format", {"type": "string", "format": "everything"}
  yield "formats", {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": 1000}
  yield "conditions", {"if": {"type": "object"}, "then": {"minProperties": 3}, "else": {"type": "null"}}
  yield "unique", {"type": "array", "uniqueItems": True, "items": {"enum": list(range(300))}}
  yield "negation", {"not": {"type": "string", "pattern": "(.*a){9}"}}
  yield "long key", {"type": "object", "properties": {"k" * 20_000: {}}, "required": ["k" * 20_000]}
  yield "long constant", {"const": "c" * 30_000}
  yield "nested constant", {"const": [[[["x"] * 50] * 10] * 5]}


def _texts() -> Iterator[str]:
  yield from ("", "{", "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, '{"const": "' + "x" * (1 << 20) + '"}')
  yield from ('{"enum": [' + "1," * 400_000 + "1]}", "NaN", '{"maximum": 1e999}', f'{{"const": {"9" * 5000}}}', "null")


def _grammars() -> Iterator[str]:
  for count in (10, 100, 400):
    yield "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(count)) + f'a{count}: "x"'
    either = "".join(f'a{i}: "x" a{i + 1} | "x" a{i + 1} "y" | \n' for i in range(count))
    yield f'start: a0\n{either}a{count}: "x"'
    yield "start: " + " | ".join(f'"k{i}" /[a-z]*{i}/' for i in range(count))
    yield "start: " + "(" * count + '"a"' + ")*" * count
    yield f'start: "a"{{1,{count * 1000}}}'
    yield f"start: /.*/ /(.*a.{{{count}}})*/"
  yield 'start: start start | "a"'
  yield 'start: start start start | "a" | ""'
  yield 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/ | e e'
  yield 'start: a | b\na: "x" a | "x"\nb: "x" b "y" | "x"'
  yield "start: start"
  yield 'start: "a" start'
  yield "start: undefined"
  yield "root ::= root root | [a-z]"
  yield "root ::= " + "( " * 500 + "[a]" + " )*" * 500
  yield "root ::= [a-z]{1,100000}"
  yield "start: A\nA: /(.*b.{200}c)+/ & /(.*d.{200}e)+/"
  yield "start: A\nA: ~/(a.{60}b)+/"
  yield "start: /(?s:.*)/ /(?s:.*)/ /(?s:.*)/ /(?s:.*)/"
  yield 'start: %json {"type": "object"}'
  yield "start: <[0]> <[1-1000]>{1,5000}"
  yield "start: @other"
  yield 'start[stop=/a*/]: "a"{10000}'
  yield "not a grammar"


def _choices() -> Iterator[list[str]]:
  yield [f"{'a' * (i % 30)}{i}" for i in range(1024)]
  yield ["a" * n for n in range(1, 250)]
  yield ["x" * 32_000]
  yield ["x"] * 2000
  yield [""]
  yield [chr(0x1F600 + i % 50) * 7 for i in range(1000)]


@pytest.mark.catalogue("E6", "F4")
def test_each_is_followed_or_refused(tokenizer):
  """None takes the process with it or goes on for ever, and what goes wrong is one of two errors."""
  compiler = ConstraintCompiler(tokenizer, 400, (2,))
  chance, followed, refused, num_tokens = random.Random(1), 0, 0, 0
  for name, kind, value in corpus():
    constraint = pb.OutputConstraint(**{kind: pb.Choices(values=value) if kind == "choice" else value})
    try:
      output = compiler.compile(constraint)
    except InvalidRequest as error:
      assert str(error).startswith("constraint.") and len(str(error)) < 600, name
      refused += 1
      continue
    followed += 1
    try:
      for _ in range(40):
        if output.is_done:
          break
        allowed = int.from_bytes(output.allowed(), "little")
        token_ids = [token for token in range(allowed.bit_length()) if allowed >> token & 1]
        output.accept(chance.choice(token_ids))
        num_tokens += 1
    except ConstraintFailed:
      pass
  assert followed > 150 and refused > 50 and num_tokens > 3000


# Where expressions backtrack, each takes time that grows exponentially, or with a high power, with what is pumped in.
PUMPED = {
  "(a+)+": "a",
  "(a+)+b": "a",
  "((((a+)+)+)+)+b": "a",
  "((a*)*)*b": "a",
  "(a|aa)+b": "a",
  "(a|a)*b": "a",
  "(x+x+)+y": "x",
  "(.*a){20}": "ba",
  "(.*)*(.*)*(.*)*=": "x",
  "([a-z]*[a-z]*)*[0-9]": "z",
  "(([a-z])+.)+[A-Z]([a-z])+": "a",
  r"(\d+\s?)+!": "1 ",
}
# Of what is allowed: a hundredth of the work of compiling, a tenth of that of a token, a fortieth of the states.
A_LITTLE = llguidance.LLParserLimits(
  initial_lexer_fuel=2_000,
  step_lexer_fuel=5_000,
  step_max_items=1_000,
  max_lexer_states=500,
  max_grammar_size=1_000,
  verbose_errors=False,
)


@pytest.mark.catalogue("E6", "F4")
def test_what_backtracks_elsewhere_takes_a_little_here(tokenizer, monkeypatch):
  """Over 2,000 characters; in units of work, which a loaded machine does not change."""
  monkeypatch.setattr(constraint_compiler, "_LIMITS", A_LITTLE)
  compiler = ConstraintCompiler(tokenizer, 400, (2,))

  def pump(pattern: str, text: str) -> None:
    output = compiler.compile(pb.OutputConstraint(regex=pattern))
    for character in text * (2_000 // len(text)):
      (token_id,) = tokenizer.encode_plain(character)
      output.accept(token_id)
      assert not output.is_done

  for pattern, text in PUMPED.items():
    pump(pattern, text)
  with pytest.raises(ConstraintFailed):  # 2**40 states, if all were made: what this test would find
    pump("(.*a.{40}b)+", "ab")


@pytest.mark.catalogue("F4")
def test_of_a_text_without_choice_only_the_beginning_is_made_tokens_at_a_time(tokenizer, monkeypatch):
  asked = []
  encode = tokenizer.encode_plain
  monkeypatch.setattr(tokenizer, "encode_plain", lambda text: asked.append(len(text)) or encode(text))
  wanted = "".join([f"the cat \u00e9 {number} " for number in range(400)])  # of which no part returns
  output = ConstraintCompiler(tokenizer, 400, (2,)).compile(pb.OutputConstraint(regex=wanted))
  written = b""
  for token_id in encode(wanted[:500]):
    output.accept(token_id)
    written += tokenizer.token_bytes(token_id)
    assert wanted.encode().startswith(written)
  assert len(asked) > 50 and max(asked) <= 256
