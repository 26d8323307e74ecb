"""JSON schemas as people write them: each keyword is enforced, of no effect, or named."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest

from engine.errors import InvalidRequest
from server.proto import sluice_pb2 as pb
from server.text.constraint_compiler import ConstraintCompiler, prepare_schema_text
from server.text.schema_keywords import KEYWORDS, Handling
from server.text.schema_preparation import prepare_schema

BYTES = llguidance.LLTokenizer("byte")
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "a": {}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "a": {}}, "required": ["kind"]}
# By keyword: (schema, valid values, invalid values, keywords that are left out). Objects stay open.
CASES: dict[str, list[tuple[Any, list[Any], list[Any], list[str]]]] = {
  "$ref": [({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, [{}, {"next": {"next": {}}}], [{"next": 1}], [])],
  "$defs": [({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, [None], [1], [])],
  "definitions": [({"$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}}, [None], [1], [])],
  "$anchor": [({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, [None], [1], [])],
  "$id": [({"$id": "https://a.example/x", "type": "null"}, [None], [1], [])],
  "id": [({"id": "https://a.example/x", "type": "null"}, [None], [1], [])],
  "$schema": [({"$schema": f"https://{host}", "type": "null"}, [None], [1], []) for host in ("a.example", "b.example")],
  "$vocabulary": [({"$vocabulary": {"https://a.example": True}, "type": "null"}, [None], [1], [])],
  "$comment": [({"$comment": "x", "type": "null"}, [None], [1], [])],
  "$dynamicRef": [
    ({"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x", "type": "null"}}}, [None], [1], []),
    ({"$dynamicRef": "#x", "$defs": {name: {"$dynamicAnchor": "x"} for name in "ab"}}, [], [], ["$dynamicRef"]),
    ({"$dynamicRef": "https://a.example/x", "type": ["null", "object"]}, [None], [1], ["$dynamicRef"]),
  ],
  "$dynamicAnchor": [({"$ref": "#x", "$defs": {"a": {"$dynamicAnchor": "x", "type": "null"}}}, [None], [1], [])],
  "$recursiveRef": [({"$recursiveRef": "#", "type": "null"}, [None], [1], ["$recursiveRef"])],
  "$recursiveAnchor": [({"$recursiveAnchor": True, "type": "null"}, [None], [1], [])],
  "type": [({"type": ["string", "integer"]}, ["a", 1], [None, 1.5, []], [])],
  "enum": [({"enum": ["a", 1, None, [1]]}, ["a", 1, None, [1]], ["b", 2, []], [])],
  "const": [({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}, 1], [])],
  "allOf": [({"allOf": [{"minimum": 3}, {"type": "integer"}]}, [3], [2, "a"], [])],
  "anyOf": [({"anyOf": [{"type": "null"}, {"type": "integer"}]}, [3, None], ["a"], [])],
  "oneOf": [
    ({"oneOf": [CAT, DOG]}, [{"kind": "cat"}, {"kind": "dog", "a": 1}], [{"kind": "x"}, {}], []),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"enum": [1]}}}, [1, None], [2], []),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, [1, "a"], [2.5, 3], []),
    ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"}, ["a"], ["c"], ["oneOf"]),
    (
      {"type": "object", "oneOf": [{"required": [name]} for name in "abc"]},
      [{"a": 1}, {"b": 1, "x": 1}, {"c": 1}],
      [{}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"x": 1}],
      [],
    ),
    ({"oneOf": [{"type": "number"}, {"minimum": 3}, {"type": "string"}]}, [1, None], [3, "a"], []),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}, True]}, [4, "a"], [1, 2, 3], []),
    ({"oneOf": [{"required": [str(at)]} for at in range(9)]}, [1], [], ["oneOf"]),
  ],
  "not": [
    ({"not": {"type": ["object", "array"]}}, [1, "a", None], [{}, []], []),
    ({"not": False, "type": "null"}, [None], [1], []),
    (
      {"type": "string", "not": {"enum": ["a", "abc", "x", ""]}},
      ["b", "ab", "abcd", "aa", "\n", "\u00e9", '"', "\\"],
      [1, "a", "abc", "x", ""],
      [],
    ),
    ({"not": {"const": ""}, "type": "string"}, ["a", "\n"], [""], []),
    ({"not": {"enum": [3, -1.5, True, None]}}, [2, 3.5, -2, False, "3", [], {}], [3, -1.5, True, None], []),
    ({"type": "integer", "not": {"const": 0}}, [1, -1], [0], []),
    ({"type": "object", "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}, {"c": 1}], [{"a": 1, "b": 1}], []),
    (
      {"type": "object", "not": {"properties": {"a": {"const": "x"}}, "required": ["a"]}},
      [{}, {"a": "y"}, {"a": 1}, {"b": "x"}],
      [{"a": "x"}],
      [],
    ),
    ({"not": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}, [2, -0.5], ["a", 3, 4.5, None], []),
    ({"not": {"allOf": [{"minLength": 2}, {"maxLength": 3}, {"type": "string"}]}}, [1, "a", "abcd"], ["ab", "abc"], []),
    ({"not": {"not": {"type": "null"}}}, [None], [1], []),
    ({"type": "array", "not": {"contains": {"type": "null"}}}, [[], [1]], [[None], [1, None]], []),
    (
      {"type": "array", "not": {"prefixItems": [{"const": 1}, {}], "minItems": 1}},
      [[], [2], [2, 1]],
      [[1], [1, 2]],
      [],
    ),
    ({"type": "array", "not": {"items": False}}, [[1]], [[]], []),
    ({"not": {"if": {"type": "null"}, "then": False, "else": {"type": "string"}}}, [None, 1], ["a"], []),
    ({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": ["null", "number"]}}}, ["a"], [1, None], []),
    ({"type": ["string", "null"], "not": {"format": "x-unknown"}}, ["a"], [1], ["not"]),
    ({"not": {"type": "integer"}}, ["a", None], [1], []),
    ({"type": "number", "not": {"type": "integer"}}, [1.5], ["a"], ["not"]),
    ({"type": "string", "not": {"pattern": "^a"}}, ["b"], [1], ["not"]),
    ({"type": "string", "not": {"format": "date"}}, ["b"], [1], ["not"]),
    ({"not": {"enum": [[1], {}]}}, [1], [], ["not"]),
  ],
  "if": [
    ({"if": {"type": "null"}, "then": True, "else": {"type": "integer"}}, [None, 1], ["a", 1.5], []),
    ({"if": {"type": "null"}, "type": "null"}, [None], [1], []),
    ({"if": {"pattern": "^a"}, "then": {"maxLength": 2}, "type": "string"}, ["a"], [1], ["if"]),
    (
      {"type": "object", "required": ["k"], "if": {"properties": {"k": {"const": "a"}}}}
      | {"then": {"required": ["x"]}, "else": {"required": ["y"]}},
      [{"k": "a", "x": 1}, {"k": "b", "y": 1}, {"k": 1, "y": 1}],
      [{"k": "a", "y": 1}, {"k": "b", "x": 1}, {"k": "a"}],
      [],
    ),
    (
      {
        "type": "object",
        "required": ["k"],
        "allOf": [
          {"if": {"properties": {"k": {"const": key}}}, "then": {"required": [f"x{key}"]}, "else": {"maxProperties": 3}}
          for key in range(7)
        ],
      },
      [{"k": 0, "x0": 1}, {"k": 6, "x6": 1}, {"k": 7}, {"k": "a"}],
      [{"k": 0}, {"k": 6, "x0": 1}, {}],
      [],
    ),
    (
      {
        "type": "object",
        "properties": {"k": {"type": "string"}},
        "allOf": [
          {"if": {"properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"]}, "then": {"required": ["x"]}},
          {"if": {"properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]}, "then": {"required": ["y"]}},
        ],
      },
      [{}, {"k": "a", "x": 1}, {"k": "b", "x": 1, "y": 1}, {"k": "c", "y": 1}, {"k": "d"}],
      [{"k": "a"}, {"k": "b", "x": 1}, {"k": "b", "y": 1}, {"k": "c"}, {"k": 1}],
      [],
    ),
  ],
  "then": [
    ({"if": True, "then": {"type": "null"}}, [None], [1], []),
    ({"then": False, "type": "null"}, [None], [], []),
    (
      {"type": "object", "if": True, "then": {"required": ["b"], "anyOf": [{"required": ["a"]}, {"type": "string"}]}},
      [{"a": 1, "b": 1}],
      [{"a": 1}, {"b": 1}],
      [],
    ),
  ],
  "else": [({"if": False, "else": {"type": "null"}}, [None], [1], [])],
  "minimum": [
    (
      {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
      [0, 2**63 - 1024, -(2**60)],
      [2**63, -(2**64)],
      [],
    ),
    ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2], [2**53], []),
  ],
  "maximum": [({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1, 2**64], [])],
  "exclusiveMinimum": [
    ({"type": "number", "exclusiveMinimum": 1}, [1.5, 2], [1, 0], []),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, [2], [1], []),
  ],
  "exclusiveMaximum": [({"type": "integer", "exclusiveMaximum": 1}, [0, -5], [1], [])],
  "multipleOf": [({"type": "number", "multipleOf": 0.25}, [0.25, 1.75], [0.3], [])],
  "minLength": [({"type": "string", "minLength": 2.0}, ["ab"], ["a"], [])],
  "maxLength": [({"type": "string", "maxLength": 2}, ["ab"], ["abc"], [])],
  "pattern": [
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["b"], []),
    ({"type": "string", "pattern": r"^[(?=)]$"}, ["="], ["a"], []),
    *(
      ({"type": "string", "pattern": pattern}, ["ab", "b"], [1], ["pattern"])
      for pattern in (r"(?=a)b", r"(?!a)b", r"(?<=a)b", r"(?<!a)b", r"\bb", r"(b)\1")
    ),
  ],
  "format": [
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"], []),
    ({"type": "string", "format": "password"}, ["x"], [1], []),
  ],
  "contentEncoding": [({"type": "string", "contentEncoding": "base64"}, ["x"], [1], [])],
  "contentMediaType": [({"type": "string", "contentMediaType": "text/html"}, ["x"], [1], [])],
  "contentSchema": [({"type": "string", "contentSchema": {"type": "null"}}, ["x"], [1], [])],
  "items": [
    ({"type": "array", "items": {"type": "null"}}, [[], [None]], [[1]], []),
    ({"type": "array", "items": [{"type": "null"}]}, [[None, 1]], [[1]], []),
  ],
  "prefixItems": [
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}}, [[None, 1]], [[1]], [])
  ],
  "additionalItems": [({"items": [{"type": "null"}], "additionalItems": False}, [[None]], [[None, 1]], [])],
  "minItems": [({"type": "array", "minItems": 1}, [[1]], [[]], [])],
  "maxItems": [({"type": "array", "maxItems": 1}, [[1]], [[1, 2]], [])],
  "uniqueItems": [
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, [[1, 2]], [["a"]], ["uniqueItems"]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]], []),
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [1], []),
    (
      {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}, "minItems": 1},
      [["a"], ["c", "a"], ["b", "c", "a"]],
      [[], ["a", "a"], ["a", "b", "a"], ["d"], ["a", "b", "c", "a"]],
      [],
    ),
    ({"uniqueItems": True, "items": {"type": "boolean"}}, [1, [], [True, False]], [[True, True], [1]], []),
    (
      {"type": "array", "uniqueItems": True, "prefixItems": [{"enum": [1, 2]}, {"enum": [1.0, 3]}], "items": False},
      [[1, 3], [2, 1], [2]],
      [[1, 1], [1, 2]],
      [],
    ),
    (
      {"type": "array", "uniqueItems": True, "items": {"enum": list("abcdefg")}},
      [["a", "b"]],
      [["x"]],
      ["uniqueItems"],
    ),
  ],
  "contains": [
    ({"type": "array", "contains": {"type": "null"}}, [[None], [1, None, 2]], [1, [], [1, 2]], []),
    ({"contains": False}, [1, "a"], [[], [1]], []),
    (
      {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 3},
      [[5], [1, 2, 6], [7, 7]],
      [[1], [1, 2, 3], [1, 2, 3, 7], [7, "a"], [7.5]],
      [],
    ),
    ({"type": "array", "contains": {"type": "null"}, "minContains": 9}, [[None]], [1], ["contains"]),
    ({"type": "array", "contains": {"type": "null"}, "minContains": 0}, [[], [1]], [1], []),
  ],
  "minContains": [
    ({"type": "array", "minContains": 2}, [[]], [1], []),
    ({"contains": {"const": 1}, "minContains": 2}, [[1, 1], [1, 2, 1, 3], "a"], [[], [1], [1, 2]], []),
  ],
  "maxContains": [
    ({"type": "array", "maxContains": 2}, [[]], [1], []),
    ({"contains": {"const": 1}, "maxContains": 1}, [[1], [2, 1, 3]], [[], [2], [1, 1], [1, 2, 1]], []),
    ({"contains": {"type": "null"}, "minContains": 0, "maxContains": 1}, [[], [1], [1, None]], [[None, None]], []),
    ({"type": "array", "contains": {"pattern": "^a"}, "maxContains": 1}, [["a"]], [1], ["contains"]),
  ],
  "unevaluatedItems": [
    ({"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False}, [[None]], [[None, 1]], []),
    ({"type": "array", "anyOf": [True], "unevaluatedItems": False}, [[]], [1, [1]], []),
    (
      {"prefixItems": [{"const": 1}], "if": {"prefixItems": [True, {"const": 2}]}, "unevaluatedItems": False}
      | {"then": {"prefixItems": [True, True, {"const": 3}]}, "else": {"prefixItems": [True, {"const": 4}]}},
      [[1], [1, 2], [1, 2, 3], [1, 4], "a"],
      [[1, 2, 4], [1, 5], [1, 4, 3]],
      [],
    ),
    (
      {"prefixItems": [True], "contains": {"type": "string"}, "unevaluatedItems": {"type": "null"}},
      [["a"], [1, "a", None], [1, None, "a"]],
      [[1], [1, 2, "a"], [1, "a", 2]],
      [],
    ),
    (
      {"type": "array", "if": {"items": {"format": "date"}}, "else": True, "unevaluatedItems": False},
      [[]],
      [1],
      ["unevaluatedItems", "if"],
    ),
  ],
  "properties": [({"type": "object", "properties": {"a": {"type": "null"}}}, [{"a": None}, {}], [{"a": 1}], [])],
  "required": [({"type": "object", "required": ["a"]}, [{"a": None}], [{}], [])],
  "additionalProperties": [
    ({"type": "object", "additionalProperties": {"type": "null"}}, [{}, {"x": None}], [{"x": 1}], [])
  ],
  "patternProperties": [
    (
      {"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False},
      [{"ab": None}],
      [{"ab": 1}, {"b": None}],
      [],
    )
  ],
  "propertyNames": [
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},)
    + ([{}, {"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}], []),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"xy": 1}], [{"a": 1}], []),
    ({"type": "object", "propertyNames": {"type": "string"}}, [{"xy": 1}], [1], []),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, [{"xy": 1}, {"\u00e9": 1}], [{"abcd": 1}], []),
    ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, [{"xy": 1}], [{"a": 1}, {"abcd": 1}], []),
    (
      {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "properties": {"ab": {"type": "null"}, "x": {}}},
      [{"ab": None}, {"c": 1}, {}],
      [{"ab": 1}, {"x": 1}, {"y": 1}],
      [],
    ),
    (
      {"type": "object", "propertyNames": {"maxLength": 2}, "unevaluatedProperties": {"type": "number"}},
      [{"ab": 1}],
      [{"ab": "x"}, {"abc": 1}],
      [],
    ),
    ({"type": "object", "propertyNames": {"format": "date"}}, [{"xy": 1}], [1], ["propertyNames"]),
  ],
  "minProperties": [
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}], []),
    ({"properties": {"a": {}}, "required": ["a"], "minProperties": 1, "type": "object"}, [{"a": 1}], [{}], []),
    (
      {"properties": {"a": {}, "b": {}}, "minProperties": 2, "type": "object"},
      [{"a": 1, "b": 1}],
      [1],
      ["minProperties"],
    ),
  ],
  "maxProperties": [
    ({"type": "object", "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 1}], []),
    ({"properties": {"a": {}}, "maxProperties": 3, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}], []),
    ({"properties": {"a": {}}, "maxProperties": 3, "type": "object"}, [{"a": 1}, {}], [1], ["maxProperties"]),
  ],
  "dependentRequired": [
    (
      {"type": "object", "dependentRequired": {"a": ["b", "c"], "d": ["a"]}},
      [{}, {"b": 1}, {"a": 1, "b": 1, "c": 1}],
      [{"a": 1}, {"a": 1, "c": 1}, {"d": 1}],
      [],
    ),
    ({"dependentRequired": {"a": ["b"]}}, [1, {}, {"a": 1, "b": 1}], [{"a": 1}], []),
    ({"type": "object", "dependentRequired": {}}, [{}], [1], []),
    (
      {"type": "object", "dependentRequired": {f"a{at}": ["b"] for at in range(12)}},
      [{}],
      [1],
      ["dependentRequired"],
    ),
  ],
  "dependentSchemas": [
    ({"type": "object", "dependentSchemas": {"a": False}}, [{}, {"b": 1}], [{"a": 1}], []),
    (
      {"dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}, "minProperties": 2, "required": ["b"]}}},
      [1, {"b": 1}, {"a": 1, "b": None}],
      [{"a": 1}, {"a": 1, "b": 1}],
      [],
    ),
    (
      {"type": "object", "dependentSchemas": {f"a{at}": {"required": ["b"]} for at in range(12)}},
      [{}],
      [1],
      ["dependentSchemas"],
    ),
  ],
  "dependencies": [
    (
      {"type": "object", "dependencies": {"a": ["b"], "c": {"properties": {"a": {"type": "null"}}}}},
      [{}, {"a": 1, "b": 1}, {"c": 1}],
      [{"a": 1}, {"c": 1, "a": 1, "b": 1}],
      [],
    ),
    ({"type": "object", "dependencies": {f"a{at}": ["b"] for at in range(12)}}, [{}], [1], ["dependencies"]),
  ],
  "unevaluatedProperties": [
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}], []),
    (
      {"allOf": [{"properties": {"a": {}}}], "type": "object", "properties": {"b": {}}, "unevaluatedProperties": False},
      [{"a": 1, "b": 2}, {"b": 1}],
      [{"c": 1}],
      [],
    ),
    (
      {"type": "object", "anyOf": [CAT, {"properties": {"b": {}}, "required": ["b"]}], "unevaluatedProperties": False},
      [{"kind": "cat"}, {"kind": "cat", "a": 1}, {"b": 1}, {"kind": "cat", "a": 1, "b": 2}],
      [{}, {"kind": "cat", "c": 1}, {"b": 1, "a": 1}, {"b": 1, "c": 1}],
      [],
    ),
    (
      {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}
      | {"dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
      [{}, {"a": 1}, {"a": 1, "b": None}],
      [{"b": None}, {"a": 1, "b": 1}, {"a": 1, "c": 1}],
      [],
    ),
    (
      {
        "type": "object",
        "allOf": [{"properties": {"a": {}}}],
        "required": ["x"],
        "unevaluatedProperties": {"type": "null"},
      },
      [{"x": None}, {"a": 1, "x": None}],
      [{}, {"x": 1}],
      [],
    ),
    (
      {"type": "object", "allOf": [{"patternProperties": {"^a": {}}}, {"patternProperties": {"^b": {}}}]}
      | {"unevaluatedProperties": False},
      [{"a": 1, "b": 1}],
      [1],
      ["unevaluatedProperties"],
    ),
  ],
  **{
    name: [({name: value, "type": "null"}, [None], [1], [])]
    for name, value in (
      ("title", "x"),
      ("description", "x"),
      ("default", 3),
      ("examples", [1]),
      ("deprecated", True),
      ("readOnly", True),
      ("writeOnly", True),
    )
  },
}


@pytest.fixture(scope="module")
def compiler(tokenizer):
  return ConstraintCompiler(tokenizer, 400, (2,), closes_objects=False)


def accepts(source: str, value: Any) -> bool:
  """Whether an output may be this value, with its properties in this or the reverse order."""
  values = [value, dict(reversed(value.items()))] if isinstance(value, dict) else [value]
  for each in values:
    matcher = llguidance.LLMatcher(BYTES, source, log_level=0)
    tokens = list(json.dumps(each, ensure_ascii=False).encode())
    if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
      return True
  return False


def source_of(compiler: ConstraintCompiler, schema: Any) -> str:
  return compiler.compile(pb.OutputConstraint(json_schema=json.dumps(schema))).source


def test_every_row_of_the_table_has_a_case():
  assert CASES.keys() == KEYWORDS.keys()
  named = {name for cases in CASES.values() for case in cases for name in case[3]}
  for name, keyword in KEYWORDS.items():
    outcomes = [bool(case[3]) for case in CASES[name]]
    if keyword.handling in (Handling.ENFORCED, Handling.ANNOTATION):
      assert not any(outcomes) and name not in named, name
  others = {name for name, keyword in KEYWORDS.items() if keyword.handling in (Handling.PARTLY, Handling.IGNORED)}
  assert named <= others
  # These follow from another keyword, which is named, or from the format's name.
  assert others - named == {"then", "else", "minContains", "maxContains", "format"}


@pytest.mark.parametrize("name", CASES)
def test_a_keyword_does_what_the_table_says(compiler, name):
  for schema, valid, invalid, unenforced in CASES[name]:
    text, found = prepare_schema_text(json.dumps(schema), closes=False)
    assert [keyword.keyword for keyword in found] == unenforced, schema
    assert all(keyword.path[-1] == keyword.keyword for keyword in found)
    source = source_of(compiler, json.loads(text))
    for value in valid:
      assert accepts(source, value), (schema, value)
    for value in invalid:
      assert not accepts(source, value), (schema, value)
    again = prepare_schema(json.loads(text), closes=False)
    assert again.schema == json.loads(text) and not again.unenforced
    if unenforced:
      with pytest.raises(InvalidRequest, match=f"{unenforced[0].strip('$')} at .*cannot be enforced: leave it out"):
        source_of(compiler, schema)


PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
  ("schema", "valid", "invalid"),
  [
    (PERSON, [{}, {"a": 1}], [{"a": 1, "x": 1}]),
    (PERSON | {"additionalProperties": True}, [{"a": 1, "x": 1}], []),
    (PERSON | {"additionalProperties": {"type": "null"}}, [{"a": 1, "x": None}], [{"x": 1}]),
    ({"type": "object"}, [{"x": 1}], []),
    ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, [{"ab": 1}], [{"ab": "x"}, {"x": 1}]),
    (
      {"$ref": "#/components/schemas/p", "components": {"schemas": {"p": PERSON | {"discriminator": 1}}}},
      [{"a": 1}],
      [{"a": 1, "x": 1}],
    ),
    ({"type": "array", "items": PERSON}, [[{"a": 1}]], [[{"x": 1}]]),
    ({"$ref": "#/$defs/p", "$defs": {"p": PERSON}}, [{"a": 1}], [{"x": 1}]),
    ({"allOf": [{"$ref": "#/$defs/p"}], "title": "x", "$defs": {"p": PERSON}}, [{"a": 1}], [{"x": 1}]),
    ({"anyOf": [PERSON, {"type": "null"}]}, [{"a": 1}, None], [{"x": 1}]),
    (PERSON | {"required": ["b"]}, [{"a": 1, "b": 2}, {"b": 0}], [{"a": 1}, {"b": 1, "x": 1}]),
    # Together they describe one object.
    ({"allOf": [PERSON, OTHER]}, [{"a": 1, "b": 1}], [{"a": "x"}, {"b": "x"}, {"x": 1}]),
    (OTHER | {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": PERSON}}, [{"a": 1, "b": 1}], [{"a": "x"}, {"x": 1}]),
    (
      {"$ref": "#/$defs/p", "required": ["b"], "$defs": {"p": PERSON}},
      [{"a": 1, "b": 1}],
      [{"a": 1}, {"b": 1, "x": 1}],
    ),
    (OTHER | {"anyOf": [PERSON, {"required": ["c"]}]}, [{"a": 1, "b": 1}, {"b": 1, "c": 2}], [{"x": 1}]),
    ({"allOf": [PERSON, {"additionalProperties": True}]}, [{"a": 1, "x": 1}], [{"a": "x"}]),
    (
      {"properties": {"p": {"$ref": "#/$defs/p"}}, "type": "object", "$defs": {"p": {"allOf": [PERSON, OTHER]}}},
      [{"p": {"a": 1, "b": 1}}],
      [{"p": {"x": 1}}, {"x": 1}],
    ),
  ],
)
def test_objects_are_closed_unless_they_say_otherwise(compiler, tokenizer, schema, valid, invalid):
  prepared = prepare_schema(schema, closes=True)
  assert not prepared.unenforced
  assert prepare_schema(prepared.schema, closes=True).schema == prepared.schema
  closed = source_of(ConstraintCompiler(tokenizer, 400, (2,)), schema)
  opened = source_of(compiler, schema)
  for value in valid:
    assert accepts(closed, value) and accepts(opened, value), value
  for value in invalid:
    assert not accepts(closed, value), value


def test_the_order_of_properties_stays_that_of_the_schema(tokenizer):
  source = source_of(ConstraintCompiler(tokenizer, 400, (2,)), {"allOf": [PERSON], "properties": {"c": {}}} | OTHER)
  matcher = llguidance.LLMatcher(BYTES, source, log_level=0)
  assert matcher.try_consume_tokens(list(b'{"a":1,"b":2}')) == 13


@pytest.mark.parametrize(
  ("options", "apart"),
  [
    ([{"type": "string"}, {"type": ["integer", "null"]}], True),
    ([{"type": "integer"}, {"type": "number"}], False),
    ([{"enum": [1, 2]}, {"enum": [2.0]}], False),
    ([{"enum": [1, 2]}, {"const": True}], True),
    ([{"allOf": [{"const": 1}]}, {"anyOf": [{"const": 2}, {"type": "string"}]}], True),
    ([CAT, DOG, {"type": "array"}], True),
    ([CAT, CAT], False),
    ([{"type": "object", "properties": {"k": {"const": word}}} for word in ("a", "b")], True),
    ([{"properties": {"k": {"const": word}}} for word in ("a", "b")], False),
    ([{"type": "object", "properties": {word: {}}, "required": [word]} for word in "ab"], False),
    (
      [{"type": "object", "properties": {w: {}}, "required": [w], "additionalProperties": False} for w in "ab"],
      True,
    ),
    ([False, {}], True),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/missing"}], False),
  ],
)
def test_one_of_several_is_enforced_where_they_are_apart(options, apart):
  definitions = {"a": {"type": "object", "properties": {"k": {"const": 1}}}, "b": {"type": "string"}}
  schema = {"oneOf": options, "$defs": definitions}
  before = json.dumps(schema)
  assert (not prepare_schema(schema, closes=False, expresses=False).unenforced) == apart
  assert json.dumps(schema) == before, "the caller's schema is its own"


def test_names_of_properties_are_no_keywords(compiler):
  names = ["not", "if", "uniqueItems", "$ref", "oneOf", "pattern"]
  schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": ["not"]}
  schema["properties"]["c"] = {"const": {"uniqueItems": True, "not": {}}}
  assert not prepare_schema(schema, closes=True).unenforced
  assert accepts(source_of(compiler, schema), {"not": None, "c": {"uniqueItems": True, "not": {}}})


@pytest.mark.parametrize(
  ("schema", "said"),
  [
    ({"const": 2**53 + 1}, "has 9007199254740993 in const, allowed are whole numbers up to"),
    ({"enum": [[{"a": -(2**60)}]]}, "in enum, allowed are whole numbers up to"),
    ({"multipleOf": 1234567}, "the limit is 20000"),
    ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 0.9967}]}, "least common multiple"),
    ({"$ref": "https://a.example/x"}, "is not one that can be followed"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "allows no output"),
    ({"x-guidance": {"lenient": True}, "patternProperties": {"a": {}, "b": {}}}, "not disjoint"),
  ],
)
def test_what_cannot_be_followed_is_refused(compiler, schema, said):
  with pytest.raises(InvalidRequest, match=said):
    source_of(compiler, schema)


def test_many_alternatives_and_much_depth_end(tokenizer):
  many = {"oneOf": [{"type": "object", "properties": {f"p{at}": {}}} for at in range(400)]}
  assert prepare_schema(many, closes=True).unenforced
  deep: Any = {"type": "null"}
  for _ in range(5000):
    deep = {"items": deep}
  assert prepare_schema(deep, closes=True)
  loop = {"allOf": [{"$ref": "#"}, {"$ref": "#/allOf/0"}], "oneOf": [{"$ref": "#"}, {"$ref": "#/oneOf/0"}]}
  assert prepare_schema(loop, closes=True).unenforced


WIDE = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(60)}}


@pytest.mark.parametrize(
  "schema",
  [
    WIDE | {"allOf": [{"if": {"required": [f"p{at}"]}, "then": {"required": [f"p{at + 10}"]}} for at in range(12)]},
    WIDE
    | {"properties": {f"p{at}": WIDE | {"dependentRequired": {f"p{n}": ["p9"] for n in range(6)}} for at in range(12)}},
    {
      "type": "object",
      "if": WIDE | {"required": ["a"]},
      "then": {"dependentRequired": {f"p{at}": ["y"] for at in range(7)}},
    },
    WIDE | {"properties": {f"p{at}": {"type": "string", "not": {"const": "a"}} for at in range(12)}},
    {"type": "array", "items": {"pattern": "^a"}, "contains": {"const": "a" * 999}, "minContains": 4, "maxContains": 4},
    {"type": "array", "prefixItems": [{"format": "date"}] * 9, "contains": {"const": 1}},
  ],
)
def test_what_is_too_much_to_write_is_named_and_the_rest_compiles(compiler, schema):
  text, unenforced = prepare_schema_text(json.dumps(schema), closes=False)
  assert unenforced
  source_of(compiler, json.loads(text))


VALUES: list[Any] = [None, True, 0, 1, 2.5, "", "a", "ab", [], [1], ["a", 1], [1, 1], [None, "a", 1], {}]
VALUES += [{"a": 1}, {"a": "a"}, {"b": 1}, {"a": 1, "b": "ab"}, {"a": "ab", "b": None}, {"b": [], "c": 1}]


def make_condition(chance: random.Random, level: int = 0) -> Any:
  """A random schema of keywords that are written as others."""

  def inner() -> Any:
    return make_condition(chance, level + 1)

  made: dict[str, Any] = {}
  for _ in range(chance.choice([1, 1, 2, 3])):
    name = chance.choice("a b c".split())
    kinds = ["type", "const", "enum", "bound", "length", "required", "contains", "dependent", "unique", "rest"]
    kinds += ["properties", "not", "if", "allOf", "anyOf", "oneOf", "dependents", "prefix"] if level < 3 else []
    match chance.choice(kinds):
      case "type":
        made["type"] = chance.sample(
          ["null", "boolean", "number", "string", "array", "object"], chance.choice([1, 3, 4])
        )
      case "const":
        made["const"] = chance.choice(["a", "ab", 1, 0, None, True])
      case "enum":
        made["enum"] = chance.sample(["a", "ab", "", 1, 2.5, None, True], 3)
      case "bound":
        made[chance.choice(["minimum", "exclusiveMaximum"])] = chance.choice([0, 1, 2.5])
      case "length":
        made[chance.choice(["minLength", "maxLength", "minItems", "maxItems"])] = chance.choice([1, 2])
      case "required":
        made["required"] = [name]
      case "contains":
        made |= {"contains": inner(), "minContains": chance.choice([0, 1, 2])}
        made |= {"maxContains": 2} if chance.random() < 0.5 else {}
      case "dependent":
        made["dependentRequired"] = {name: [chance.choice("ab")]}
      case "dependents":
        made["dependentSchemas"] = {name: inner()}
      case "properties":
        made["properties"] = {name: inner()}
      case "prefix":
        made["prefixItems"] = [inner(), inner()]
      case "rest":
        made[chance.choice(["unevaluatedItems", "unevaluatedProperties"])] = chance.choice([False, {"type": "number"}])
      case "unique":
        made |= {"uniqueItems": True, "items": {"enum": [1, "a", None]}}
      case "if":
        made |= {"if": inner(), "then": inner()} | ({"else": inner()} if chance.random() < 0.5 else {})
      case "not":
        made["not"] = inner()
      case kind:
        made[kind] = [inner(), inner()]
  return made


def check_random_conditions(compiler: ConstraintCompiler, seeds: range) -> int:
  """Compares what constraints accept with what the jsonschema package does; returns how many are enforced."""
  enforced = 0
  for seed in seeds:
    schema = make_condition(random.Random(seed))
    text, unenforced = prepare_schema_text(json.dumps(schema), closes=False)
    assert prepare_schema(json.loads(text), closes=False).schema == json.loads(text), (seed, schema)
    if unenforced:
      continue
    valid = [jsonschema.Draft202012Validator(schema).is_valid(value) for value in VALUES]
    try:
      source = source_of(compiler, json.loads(text))
    except InvalidRequest as error:
      assert not any(valid) or "too" in error.problem, (seed, schema, error)
      continue
    enforced += 1
    for value, expected in zip(VALUES, valid, strict=True):
      assert accepts(source, value) == expected, (seed, schema, value)
  return enforced


def test_random_conditions_accept_what_the_standard_does(compiler):
  assert check_random_conditions(compiler, range(100)) > 50


@pytest.mark.long
def test_many_random_conditions_accept_what_the_standard_does(compiler):
  assert check_random_conditions(compiler, range(1000, 3000)) > 1000
