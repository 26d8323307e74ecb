"""Finds out whether a value can be valid under two JSON schemas. Changes no schema."""

from collections.abc import Collection, Iterator
import json
from typing import Any

_NUMBERS = {"number", "integer"}
_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
# Comparisons of one schema; then the answer is that there may be such a value.
_MOST_STEPS = 20_000


class SchemaAlternatives:
  """Compares parts of one JSON schema."""

  def __init__(self, root: Any):
    """Args: root: the whole schema, in which references are looked up."""
    self._root = root
    self._steps = 0

  def resolve_reference(self, schema: Any) -> Any:
    """Returns the schema that a schema of nothing but a reference names, or the schema itself."""
    for _ in range(16):
      if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
        return schema
      found = find_pointer(self._root, schema["$ref"])
      if found is None:
        return schema
      beside = {name: value for name, value in schema.items() if name != "$ref"}
      schema = {**found, **beside} if isinstance(found, dict) and not found.keys() & beside.keys() else found
    return schema

  def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
    """Returns whether certainly no value is valid under both schemas."""
    self._steps += 1
    if self._steps > _MOST_STEPS or depth > 8:
      return False
    one, other = self.resolve_reference(one), self.resolve_reference(other)
    if one is False or other is False:
      return True
    if not isinstance(one, dict) or not isinstance(other, dict):
      return False
    if self._types(one).isdisjoint(self._types(other)):
      return True
    for first, second in ((one, other), (other, one)):
      for name in ("anyOf", "oneOf"):
        options = first.get(name)
        if isinstance(options, list) and all(self.are_disjoint(option, second, depth + 1) for option in options):
          return True
      parts = first.get("allOf")
      if isinstance(parts, list) and any(self.are_disjoint(part, second, depth + 1) for part in parts):
        return True
    values, others = allowed_values(one), allowed_values(other)
    if values is not None and others is not None:
      return values.isdisjoint(others)
    if self._types(one) & self._types(other) != {"object"}:
      return False
    return any(
      self.are_disjoint(_property(one, name), _property(other, name), depth + 1)
      for name in [*_required(one), *_required(other)]
    )

  def find_discriminator(self, options: list[Any]) -> str | None:
    """Returns the name of a property with fixed values in every option, no value in two of them; None if none has."""
    found = [self.resolve_reference(option) for option in options]
    if not all(isinstance(option, dict) and isinstance(option.get("properties"), dict) for option in found):
      return None
    for name in found[0]["properties"]:
      seen: set[str] = set()
      for option in found:
        values = allowed_values(self.resolve_reference(option["properties"].get(name)))
        if self._types(option) != {"object"} or not values or values & seen:
          break
        seen |= values
      else:
        return name
    return None

  def _types(self, schema: dict[str, Any]) -> frozenset[str]:
    """The types that a schema allows; integers are numbers."""
    named = schema.get("type", list(_TYPES))
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else _TYPES
    types = frozenset("number" if name in _NUMBERS else str(name) for name in names)
    values = allowed_values(schema)
    return types if values is None else types & {_type_of(json.loads(value)) for value in values}


def walk_objects(root: Any, skipped: Collection[str] = ()) -> Iterator[dict[str, Any]]:
  """Yields every object in a schema, since a reference may lead to any: also lists of properties, const and examples.

  Args:
    root: the schema.
    skipped: names of what is left out.
  """
  left = [root]
  while left:
    value = left.pop()
    if isinstance(value, dict):
      yield value
      left += (inner for name, inner in value.items() if name not in skipped) if skipped else value.values()
    elif isinstance(value, list):
      left += value


def find_pointer(root: Any, reference: str) -> Any:
  """Returns what a reference such as #/$defs/name names, or None."""
  if reference != "#" and not reference.startswith("#/"):
    return None
  found = root
  for part in reference[2:].split("/") if len(reference) > 1 else []:
    name = part.replace("~1", "/").replace("~0", "~")
    if isinstance(found, dict) and name in found:
      found = found[name]
    elif isinstance(found, list) and name.isdecimal() and len(name) < 6 and int(name) < len(found):
      found = found[int(name)]
    else:
      return None
  return found


def allowed_values(schema: Any) -> set[str] | None:
  """The values that const or enum allow, as text; None if there are others."""
  if not isinstance(schema, dict):
    return None
  if "const" in schema:
    return {value_text(schema["const"])}
  if isinstance(schema.get("enum"), list):
    return {value_text(value) for value in schema["enum"]}
  return None


def value_text(value: Any) -> str:
  """A value as text; equal for equal values, of which 1 and 1.0 are."""
  return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
  if isinstance(value, dict):
    return {name: _whole(each) for name, each in value.items()}
  if isinstance(value, list):
    return [_whole(each) for each in value]
  return int(value) if isinstance(value, float) and value.is_integer() else value


def _type_of(value: Any) -> str:
  names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
  return names.get(type(value), "object")


def _required(schema: dict[str, Any]) -> list[str]:
  names = schema.get("required")
  return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(schema: dict[str, Any], name: str) -> Any:
  """The schema of a property, True if there is none."""
  properties = schema.get("properties")
  if isinstance(properties, dict) and name in properties:
    return properties[name]
  return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
