"""Measures how much of JSON Schema an output follows, by the JSON-Schema-Test-Suite. Changes nothing.

  pip download jsonschema==4.26.0 --no-deps --no-binary :all: && tar xzf jsonschema-4.26.0.tar.gz
  python -m tools.study.measure_json_schema --suite=jsonschema-4.26.0/json/tests/draft2020-12

The sdist of jsonschema has the suite in it. For each schema, the constraint reads the suite's values as if a model had
written them, in every order of up to four properties. A schema is one of:

  enforced  every invalid value is rejected, and nothing is left out of the schema
  ignored   a keyword is left out and named; under `strict` the schema is refused
  refused   the schema returns 400 with a reason
  wrong     an invalid value is accepted, and no keyword is named

--strict measures what `strict` does: ignored keywords are refused, and objects that list properties are closed.
"""

import collections
from collections.abc import Iterator
import datetime
import itertools
import json
import pathlib
from typing import Any

import llguidance

from engine.errors import ConfigError, InvalidRequest
from server.proto import sluice_pb2 as pb
from server.text.constraint_compiler import ConstraintCompiler, prepare_schema_text
from server.text.tokenizer import load_tokenizer
from tools.arguments import CommandParser
from tools.measure import ROOT, commit, machine

OUTCOMES = ("enforced", "ignored", "refused", "wrong")
_MOST_ORDERED = 4


class SchemaJudge:
  """Compiles schemas and reads values with them."""

  def __init__(self, *, strict: bool = False):
    """Args: strict: whether to compile as under `strict`."""
    tokenizer = load_tokenizer(ROOT / "models" / "demo", max_prompt_bytes=1 << 20)
    if tokenizer is None:
      raise ConfigError("models/demo has no tokenizer; restore the folder from the repository")
    self._strict = strict
    self._compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size, (), closes_objects=strict)
    self._bytes = llguidance.LLTokenizer("byte")

  def judge_schema(self, schema: Any, tests: list[dict[str, Any]]) -> tuple[str, list[str], int]:
    """Returns the outcome, what it is about (keywords, a reason, or accepted values), and valid values rejected."""
    try:
      text, unenforced = json.dumps(schema), []
      if not self._strict:
        text, unenforced = prepare_schema_text(text, closes=False)
      source = self._compiler.compile(pb.OutputConstraint(json_schema=text)).source
    except InvalidRequest as error:
      return "refused", [error.problem], 0
    accepted = [self._accepts(source, test["data"]) for test in tests]
    rejected = sum(test["valid"] and not taken for test, taken in zip(tests, accepted, strict=True))
    if unenforced:
      return "ignored", sorted({keyword.keyword for keyword in unenforced}), rejected
    wrong = [json.dumps(test["data"]) for test, taken in zip(tests, accepted, strict=True) if taken > test["valid"]]
    return ("wrong", wrong, rejected) if wrong else ("enforced", [], rejected)

  def _accepts(self, source: str, value: Any) -> bool:
    return any(self._accepts_text(source, json.dumps(each, ensure_ascii=False)) for each in _orders(value))

  def _accepts_text(self, source: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(self._bytes, source, log_level=0)
    tokens = list(text.encode("utf-8", "surrogatepass"))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _orders(value: Any) -> Iterator[Any]:
  """Yields a value with its properties in every order, as long as there are few."""
  if isinstance(value, dict) and len(value) <= _MOST_ORDERED:
    for names in itertools.permutations(value):
      for inner in itertools.product(*(list(_orders(value[name])) for name in names)):
        yield dict(zip(names, inner, strict=True))
  elif isinstance(value, list) and len(value) <= _MOST_ORDERED:
    yield from map(list, itertools.product(*(list(_orders(each)) for each in value)))
  else:
    yield value


def measure_suite(
  suite: pathlib.Path, *, strict: bool = False
) -> tuple[dict[str, collections.Counter[str]], list[str]]:
  """Returns the number of outcomes of each file of a suite, and a line for each schema that is not enforced."""
  judge, counts, lines = SchemaJudge(strict=strict), {}, []
  for file in sorted(suite.glob("*.json")):
    counter = counts[file.stem] = collections.Counter[str]()
    for case in json.loads(file.read_text()):
      outcome, about, rejected = judge.judge_schema(case["schema"], case["tests"])
      counter[outcome] += 1
      counter[f"{outcome} values"] += len(case["tests"])
      counter["narrower"] += bool(rejected) and outcome != "refused"
      if outcome != "enforced" or rejected:
        lines.append(f"{outcome:8} {file.stem}: {case['description']}: {'; '.join(about)} ({rejected} valid rejected)")
  return counts, lines


def _page(counts: dict[str, collections.Counter[str]]) -> str:
  total = sum(counts.values(), collections.Counter[str]())
  schemas = sum(total[outcome] for outcome in OUTCOMES)
  values = sum(total[f"{outcome} values"] for outcome in OUTCOMES)
  shares = ", ".join(
    f"{total[outcome]} {outcome} ({total[outcome] / schemas:.1%}; {total[f'{outcome} values']} of {values} values)"
    for outcome in OUTCOMES
  )
  found = machine()
  lines = [
    f"On {found['cores']} cores of an {found['cpu']}, {datetime.date.today().isoformat()}, commit {commit()}.",
    "",
    f"Of {schemas} schemas: {shares}.",
    f"{total['narrower']} of those compiled also reject a value that is valid: the output is narrower than the schema.",
    "",
    "| file | " + " | ".join(OUTCOMES) + " | narrower |",
    "| --- |" + " ---: |" * (len(OUTCOMES) + 1),
    *(
      f"| {name} | {' | '.join(str(counter[outcome]) for outcome in OUTCOMES)} | {counter['narrower']} |"
      for name, counter in counts.items()
    ),
  ]
  return "\n".join(lines) + "\n"


def main() -> None:
  """Runs the command line."""
  parser = CommandParser("tools.study.measure_json_schema", __doc__ or "")
  parser.add_argument("--suite", type=pathlib.Path, required=True, help="folder of a draft's tests")
  parser.add_argument("--strict", action="store_true", help="compile as under strict")
  parser.add_argument("--lines", action="store_true", help="also print a line for each schema that is not enforced")
  arguments = parser.parse_args()
  counts, lines = measure_suite(arguments.suite, strict=arguments.strict)
  if not counts:
    parser.error(f"--suite={arguments.suite} has no tests; name a folder such as tests/draft2020-12")
  if arguments.lines:
    print("\n".join(lines))
  print(_page(counts))


if __name__ == "__main__":
  main()
