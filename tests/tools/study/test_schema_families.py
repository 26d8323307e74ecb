"""Schemas in the kinds of JSONSchemaBench: each compiles, and every output of an enforced one is valid."""

import random

import jsonschema
import pytest

from sluice import LLM, SamplingParams
from tools.study import compare_schema_compilers as compared
from tools.study.measure_json_schema import SchemaJudge

FAMILIES = compared.read_families()
# Keywords that stay ignored, by family.
NAMED = {
  "GitHub medium": ["uniqueItems"],
  "JsonSchemaStore": ["uniqueItems", "pattern", "uniqueItems"],
}


@pytest.fixture(scope="module")
def start():
  return compared.use_sluice()


def test_there_are_schemas_of_ten_kinds():
  assert len(FAMILIES) == 10 and sum(map(len, FAMILIES.values())) >= 40
  for schemas in FAMILIES.values():
    for schema in schemas:
      compared.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_outputs_are_valid_and_what_is_ignored_is_named(start, family):
  named = []
  for at, schema in enumerate(FAMILIES[family]):
    _, ignored = start(schema)
    named += ignored
    for seed in range(4):
      walker, _ = start(schema)
      output = compared.walk_output(walker, random.Random(100 * at + seed))
      assert output is None or ignored or compared.is_valid(schema, output), (schema, output)
  assert named == NAMED.get(family, [])


def test_a_walk_that_breaks_the_schema_is_invalid(start):
  walker, _ = start({"type": "integer", "minimum": 5})
  output = compared.walk_output(walker, random.Random(1))
  assert output is not None and not compared.is_valid({"type": "string"}, output)
  assert not compared.is_valid({}, "{")


def test_counts_say_what_came_of_each_schema(start):
  lines: list[str] = []
  schemas = [{"type": "null"}, {"$ref": "https://a.example/x"}, {"uniqueItems": True, "type": "array"}]
  counts = compared.measure_schemas(start, schemas, 2, lines.append)
  found = {name: counts[name] for name in ("schemas", "compiled", "refused", "named", "outputs", "invalid")}
  assert found == {"schemas": 3, "compiled": 1, "refused": 1, "named": 1, "outputs": 2, "invalid": 0}
  assert [line.split()[0] for line in lines] == ["refused", "names"]


def test_under_strict_what_would_be_ignored_is_refused():
  schema, tests = {"type": "array", "uniqueItems": True}, [{"data": [1, 1], "valid": False}]
  assert SchemaJudge().judge_schema(schema, tests)[0] == "ignored"
  assert SchemaJudge(strict=True).judge_schema(schema, tests)[0] == "refused"
  assert SchemaJudge(strict=True).judge_schema({"maxItems": 1}, tests)[0] == "enforced"


@pytest.mark.long
def test_greedy_outputs_of_the_demo_model_are_valid():
  judged = 0
  with LLM("demo", token_budgets=[64], max_num_seqs=16, compile_cache_dir="") as llm:
    schemas = [schema for family, schemas in FAMILIES.items() if family not in NAMED for schema in schemas]
    params = [SamplingParams(json_schema=schema, max_tokens=400, temperature=0) for schema in schemas]
    for schema, output in zip(schemas, llm.generate(["Here is the JSON: "] * len(schemas), params), strict=True):
      if output.outputs[0].ending.reason == "stop":
        judged += 1
        assert compared.is_valid(schema, output.text), (schema, output.text)
  assert judged >= len(schemas) // 2
