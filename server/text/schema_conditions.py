"""Writes keywords of JSON Schema that the compiler lacks as alternatives in keywords that it has. Changes no schema.

Each function returns a schema to hold beside the others, or None where that cannot be written.
"""

from collections.abc import Iterator
import dataclasses
import itertools
import json
from typing import Any

from server.text.schema_alternatives import allowed_values, find_pointer, value_text
from server.text.schema_negation import TYPES, combine, negate_schema

# Alternatives that a keyword may become.
MOST_ALTERNATIVES = 64
# Characters of what is written for a keyword.
MOST_CHARS = 8 << 10
# Items of an array without a bound among which `contains` looks.
_LOOKED_AT = 8


def express_condition(conditions: list[dict[str, Any]], root: Any) -> Any:
  """Writes if, then and else.

  Args:
    conditions: one schema with `if`; or several whose conditions exclude each other: `find_discriminator` says so.
    root: the whole schema.
  """
  met = {"if": conditions[0]["if"]} if len(conditions) == 1 else {"if": _unite([each["if"] for each in conditions])}
  unmet = negate_schema(met["if"], root)
  if unmet is None:
    return None
  options = [combine("allOf", [unmet, *(each.get("else", True) for each in conditions)])]
  for taken in conditions:
    others = [each.get("else", True) for each in conditions if each is not taken]
    options.append(combine("allOf", [taken["if"], taken.get("then", True), *others]))
  return combine("anyOf", options[1:] + options[:1])


def find_discriminator(conditions: list[dict[str, Any]], base: dict[str, Any]) -> str | None:
  """Returns the property whose value decides which of several conditions is met, of which it is at most one."""
  names, seen = set[str](), set[str]()
  for condition in [each["if"] for each in conditions]:
    if not isinstance(condition, dict) or not condition.keys() <= {"properties", "required", "type"}:
      return None
    properties = condition.get("properties")
    if not isinstance(properties, dict) or len(properties) != 1:
      return None
    ((name, value),) = properties.items()
    names.add(name)
    values = allowed_values(value)
    if values is None or set(value) & {"const", "enum"} != set(value) or values & seen:
      return None
    seen |= values
    required = condition.get("required", [])
    if required not in ([], [name]) or (not required and name not in base.get("required", [])):
      return None
    if "object" not in (condition.get("type"), base.get("type")) or condition.get("type", "object") != "object":
      return None
  return names.pop() if len(names) == 1 else None


def _unite(conditions: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns the condition that one of several with a discriminator is met."""
  values = []
  for condition in conditions:
    ((name, value),) = condition["properties"].items()
    values += [value["const"]] if "const" in value else value["enum"]
  return {"properties": {name: {"enum": values}}, "required": [name], "type": "object"}


def express_dependencies(dependencies: Any) -> list[Any] | None:
  """Writes dependentRequired, dependentSchemas or dependencies, one schema for each property."""
  if not isinstance(dependencies, dict):
    return None
  parts = []
  for name, needed in dependencies.items():
    wanted = {"required": needed} if isinstance(needed, list) else needed
    absent = {"properties": {name: False}, "additionalProperties": True}
    present = {"required": [name]}
    if wanted not in (True, {}, {"required": []}):
      parts.append(combine("anyOf", [absent, combine("allOf", [present, wanted])]))
  return parts


def express_contains(schema: dict[str, Any], root: Any) -> Any:
  """Writes contains with minContains and maxContains.

  The items that are counted are among the first eight in an array without maxItems, and in one with many.
  """
  wanted, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
  if not isinstance(least, int | float) or not isinstance(most, int | float | None) or least > _LOOKED_AT:
    return None
  least, most = int(least), None if most is None else int(most)
  other: Any = True
  if most is not None:
    other = negate_schema(wanted, root)
    if other is None:
      return None
  if wanted is False:
    return {"type": [name for name in TYPES if name != "array"]} if least else True
  length = _LOOKED_AT
  if isinstance(schema.get("maxItems"), int):
    length = min(length, schema["maxItems"])
  while length > 0:
    options = list(_place_items(length, least, most, wanted, other))
    if len(options) <= MOST_ALTERNATIVES and schema_size(options) < MOST_CHARS:
      return combine("anyOf", [*options, {"type": [name for name in TYPES if name != "array"]}])
    length -= 1
  return None


def _place_items(length: int, least: int, most: int | None, wanted: Any, other: Any) -> Iterator[Any]:
  """Yields schemas of arrays, one for each choice of places that the wanted items have."""
  for count in range(least, (least if most is None else min(most, length)) + 1):
    for places in itertools.combinations(range(length), count):
      end = places[-1] + 1 if places else 0
      prefix = [wanted if at in places else other for at in range(end)]
      yield {"type": "array"} | ({"prefixItems": prefix, "minItems": end} if prefix else {}) | {"items": other}


def express_unique(schema: dict[str, Any], root: Any) -> Any:
  """Writes uniqueItems as a list of all arrays, where they are few: items have few values, or there are few items."""
  prefix = schema.get("prefixItems", [])
  rest = schema.get("items", True)
  if isinstance(rest, list):
    prefix, rest = rest, schema.get("additionalItems", True)
  arrays: list[list[Any]] = [[]]
  longest, most = [[]], schema.get("maxItems")
  if not isinstance(prefix, list) or not isinstance(most, int | float | None):
    return None
  for at in itertools.count():
    item = prefix[at] if at < len(prefix) else rest
    if not longest or (most is not None and at >= most) or item is False:
      break
    values = _few_values(item, root)
    if values is None:
      return None
    longest = [[*array, value] for array in longest for value in values if not _holds(array, value)]
    arrays += longest
    if len(arrays) > MOST_ALTERNATIVES + 1:
      return None
  least = schema.get("minItems", 0)
  arrays = [array for array in arrays if not isinstance(least, int | float) or len(array) >= least]
  return combine("anyOf", [{"enum": arrays}, {"type": [name for name in TYPES if name != "array"]}])


def _few_values(schema: Any, root: Any, level: int = 0) -> list[Any] | None:
  """Returns a list that has every value of a schema."""
  if not isinstance(schema, dict):
    return None
  if "const" in schema:
    return [schema["const"]]
  if isinstance(schema.get("enum"), list):
    return schema["enum"]
  if "$ref" in schema and level < 8:
    return _few_values(find_pointer(root, str(schema["$ref"])), root, level + 1)
  return {"boolean": [False, True], "null": [None]}.get(str(schema.get("type")))


def _holds(array: list[Any], value: Any) -> bool:
  return any(value_text(each) == value_text(value) for each in array)


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
  """What a value evaluates if some schemas hold.

  Attributes:
    parts: the schemas.
    names, patterns: the properties; every one if `all_names`.
    items: the number of items at the beginning; every one if `all_items`, and all that one of `contained` allows.
  """

  parts: tuple[Any, ...] = ()
  names: frozenset[str] = frozenset()
  patterns: frozenset[str] = frozenset()
  all_names: bool = False
  items: int = 0
  all_items: bool = False
  contained: tuple[Any, ...] = ()

  def join(self, other: "_Case") -> "_Case":
    """Returns the case that both hold."""
    return _Case(
      self.parts + other.parts,
      self.names | other.names,
      self.patterns | other.patterns,
      self.all_names or other.all_names,
      max(self.items, other.items),
      self.all_items or other.all_items,
      self.contained + other.contained,
    )


class _Uncountable(Exception):
  """There are too many cases, or one that is not known."""


def express_unevaluated(schema: dict[str, Any], keyword: str, root: Any) -> Any:
  """Writes unevaluatedProperties or unevaluatedItems, one alternative for each way in which the schema may hold."""
  rest = schema[keyword]
  try:
    cases = _list_cases({name: value for name, value in schema.items() if name != keyword}, root, 0)
  except _Uncountable:
    return None
  options = []
  for case in cases:
    closed: Any = True
    if keyword == "unevaluatedItems":
      if not case.all_items:
        closed = {"prefixItems": [True] * case.items, "items": combine("anyOf", [*case.contained, rest])}
    elif not case.all_names:
      if len(case.patterns) > 1:
        return None
      closed = {"properties": dict.fromkeys(sorted(case.names), True), "additionalProperties": rest}
      closed |= {"patternProperties": dict.fromkeys(case.patterns, True)} if case.patterns else {}
    options.append(combine("allOf", [*case.parts, closed]))
  return combine("anyOf", options)


def _list_cases(schema: Any, root: Any, level: int) -> list[_Case]:
  """Returns the cases of a schema that holds. Raises _Uncountable."""
  if not isinstance(schema, dict):
    return [_Case()]
  if level > 8 or any(name in schema for name in ("$dynamicRef", "$recursiveRef", "dependencies")):
    raise _Uncountable
  prefix = schema.get("items") if isinstance(schema.get("items"), list) else schema.get("prefixItems", [])
  own = _Case(
    names=frozenset(schema.get("properties", ())),
    patterns=frozenset(schema.get("patternProperties", ())),
    all_names=any(name in schema for name in ("additionalProperties", "unevaluatedProperties")),
    items=len(prefix) if isinstance(prefix, list) else 0,
    all_items="unevaluatedItems" in schema
    or isinstance(schema.get("items"), bool | dict)
    or (isinstance(schema.get("items"), list) and "additionalItems" in schema),
    contained=(schema["contains"],) if "contains" in schema else (),
  )
  groups = [[own]]
  for part in schema.get("allOf", ()):
    groups.append(_list_cases(part, root, level + 1))
  if "$ref" in schema:
    target = find_pointer(root, str(schema["$ref"]))
    if target is None:
      raise _Uncountable
    groups.append(_list_cases(target, root, level + 1))
  if isinstance(schema.get("oneOf"), list):
    groups.append([case for option in schema["oneOf"] for case in _held(option, root, level)])
  if isinstance(schema.get("anyOf"), list):
    options = schema["anyOf"]
    most = len(options) if len(options) <= 3 else 1
    chosen = [each for count in range(1, most + 1) for each in itertools.combinations(options, count)]
    groups.append([case for each in chosen for case in _join_cases([_held(option, root, level) for option in each])])
  if "if" in schema:
    unmet = negate_schema(schema["if"], root) if "else" in schema else True
    if unmet is None:
      raise _Uncountable
    met = [_held(schema["if"], root, level), _held(schema.get("then", True), root, level)]
    otherwise = [[_Case((unmet,))], _held(schema.get("else", True), root, level)]
    groups.append(_join_cases(met) + _join_cases(otherwise))
  for name, part in schema.get("dependentSchemas", {}).items():
    absent = {"properties": {name: False}, "additionalProperties": True}
    groups.append([_Case((absent,)), *_join_cases([[_Case(({"required": [name]},))], _held(part, root, level)])])
  return _join_cases(groups)


def _held(schema: Any, root: Any, level: int) -> list[_Case]:
  return [_Case((schema,)).join(case) for case in _list_cases(schema, root, level + 1)]


def _join_cases(groups: list[list[_Case]]) -> list[_Case]:
  """Returns a case for each choice of one from every group."""
  cases = [_Case()]
  for group in groups:
    cases = [case.join(other) for case in cases for other in group]
    if len(cases) > MOST_ALTERNATIVES:
      raise _Uncountable
  return cases


def count_alternatives(schema: Any) -> int:
  """Returns how many alternatives a schema of this module has."""
  if not isinstance(schema, dict):
    return 1
  options = schema.get("anyOf")
  if not isinstance(options, list):
    return 1
  return sum(len(option["enum"]) if isinstance(option, dict) and "enum" in option else 1 for option in options)


def schema_size(schema: Any) -> int:
  """Returns the characters of a schema's text."""
  return len(json.dumps(schema))
