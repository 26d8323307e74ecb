"""Writes a JSON schema of the values that another one refuses. Changes no schema.

It has all of them, but numbers with a fraction where integers are refused.
"""

from collections.abc import Iterator
import re
from typing import Any

from server.text.schema_alternatives import find_pointer
from server.text.schema_keywords import KEYWORDS, Handling

TYPES = ("null", "boolean", "number", "string", "array", "object")
# Schemas of one negation, and constants of one; then there is none.
_MOST_STEPS = 200
_MOST_VALUES = 64
_MOST_PATTERN_CHARS = 2048
_MOST_TEXT_CHARS = 128
# Keywords whose absence from a value cannot be written, or that the compiler follows in some forms alone.
_NO_NEGATION = frozenset(
  ("multipleOf", "pattern", "uniqueItems", "maxContains", "minContains", "patternProperties", "propertyNames")
  + ("minProperties", "maxProperties", "dependentSchemas", "dependencies", "unevaluatedItems")
  + ("unevaluatedProperties", "$dynamicRef", "$recursiveRef", "oneOf", "format")
)
_ANNOTATIONS = frozenset(name for name, keyword in KEYWORDS.items() if keyword.handling is Handling.ANNOTATION)
_DEFINITIONS = ("$defs", "definitions", "$id", "$anchor", "then", "else")


class _NotNegatable(Exception):
  """The values that a schema refuses cannot be written as a schema."""


def combine(keyword: str, parts: list[Any]) -> Any:
  """Returns allOf or anyOf of schemas. It is open: nothing adds further limits to its objects."""
  parts = [part for part in parts if part is not (keyword == "allOf")]
  if not parts:
    return keyword == "allOf"
  if any(part is (keyword != "allOf") for part in parts):
    return keyword != "allOf"
  return parts[0] if len(parts) == 1 else {keyword: parts, "additionalProperties": True}


def negate_schema(schema: Any, root: Any) -> Any:
  """Returns a schema of all values that are invalid under another, or None if that cannot be written.

  Args:
    schema: the schema, as its author wrote it or rewritten.
    root: the whole schema, in which references are looked up.
  """
  try:
    return _Negation(root).negate(schema, 0)
  except _NotNegatable:
    return None


class _Negation:
  """Negates one schema: it is invalid where one of its keywords is."""

  def __init__(self, root: Any):
    self._root = root
    self._steps = 0

  def negate(self, schema: Any, level: int) -> Any:
    self._steps += 1
    if self._steps > _MOST_STEPS or level > 16:
      raise _NotNegatable
    if isinstance(schema, bool):
      return not schema
    if not isinstance(schema, dict):
      raise _NotNegatable
    options: list[Any] = []
    for name, value in schema.items():
      if name in KEYWORDS and name not in _ANNOTATIONS and name not in _DEFINITIONS:
        if name in _NO_NEGATION:
          raise _NotNegatable
        options += self._negate_keyword(schema, name, value, level + 1)
    return combine("anyOf", options)

  def _negate_keyword(self, schema: dict[str, Any], name: str, value: Any, level: int) -> Iterator[Any]:
    """Yields schemas of the values that break a keyword."""
    match name, value:
      case "type", str() | list():
        yield from _negate_types([value] if isinstance(value, str) else value)
      case "$ref", str():
        yield self.negate(find_pointer(self._root, value), level)
      case "const", _:
        yield from self._negate_values([value])
      case "enum", list():
        yield from self._negate_values(value)
      case "allOf", list():
        yield from (self.negate(part, level) for part in value)
      case "anyOf", list():
        yield combine("allOf", [self.negate(part, level) for part in value])
      case "not", _:
        yield value
      case "if", _:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        yield combine("allOf", [value, self.negate(then, level)])
        yield combine("allOf", [self.negate(value, level), self.negate(otherwise, level)])
      case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", int() | float():
        if any(isinstance(schema.get(each), bool) for each in ("exclusiveMinimum", "exclusiveMaximum")):
          raise _NotNegatable  # draft 4
        opposite = {"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum"}
        opposite |= {other: each for each, other in opposite.items()}
        yield {"type": "number", opposite[name]: value}
      case "minLength" | "minItems", int() | float():
        if value >= 1:
          kind = "string" if name == "minLength" else "array"
          yield {"type": kind, name.replace("min", "max"): int(value) - 1}
      case "maxLength" | "maxItems", int() | float():
        kind = "string" if name == "maxLength" else "array"
        yield {"type": kind, name.replace("max", "min"): int(value) + 1}
      case "required", list():
        yield from (_with_property(str(each), False) for each in value)
      case "properties", dict():
        for each, inner in value.items():
          refused = self.negate(inner, level)
          if refused is not False:
            yield _with_property(each, refused) | {"required": [each]}
      case "dependentRequired", dict():
        for each, others in value.items():
          yield from (_with_property(other, False) | {"required": [each]} for other in others)
      case "additionalProperties", True | dict():
        if self.negate(value, level) is not False:
          raise _NotNegatable
      case "prefixItems", list():
        yield from self._negate_items(value, level)
      case "items" | "additionalItems", _:
        prefix = schema.get("prefixItems", [])
        if name == "items" and isinstance(value, list):
          yield from self._negate_items(value, level)
        elif name == "additionalItems":
          raise _NotNegatable
        elif value is False and isinstance(prefix, list):
          yield {"type": "array", "minItems": len(prefix) + 1}
        elif self.negate(value, level) is not False:
          raise _NotNegatable
      case "contains", _:
        if "minContains" in schema or "maxContains" in schema:
          raise _NotNegatable
        yield {"type": "array", "items": self.negate(value, level)}
      case _:
        raise _NotNegatable

  def _negate_items(self, prefix: list[Any], level: int) -> Iterator[Any]:
    for at, item in enumerate(prefix):
      refused = self.negate(item, level)
      if refused is not False:
        yield {"type": "array", "prefixItems": [*([True] * at), refused], "minItems": at + 1}

  def _negate_values(self, values: list[Any]) -> Iterator[Any]:
    """Yields schemas of all values but these."""
    if len(values) > _MOST_VALUES or any(isinstance(value, list | dict) for value in values):
      raise _NotNegatable
    yield {"type": ["array", "object"]}
    if None not in values:
      yield {"type": "null"}
    yield from ({"const": truth} for truth in (False, True) if not any(value is truth for value in values))
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True):
      yield {"type": "number"} | _bounds(low, high)
    texts = sorted({value for value in values if isinstance(value, str)})
    if any(len(text) > _MOST_TEXT_CHARS for text in texts):
      raise _NotNegatable
    if not texts:
      yield {"type": "string"}
    else:
      pattern = f"^(?s:{_pattern_of_others(texts)})$"
      if len(pattern) > _MOST_PATTERN_CHARS:
        raise _NotNegatable
      yield {"type": "string", "pattern": pattern}


def _negate_types(types: list[Any]) -> Iterator[Any]:
  # Numbers with a fraction cannot be written: without integers there are no numbers.
  left = [name for name in TYPES if name not in types and not (name == "number" and "integer" in types)]
  if left:
    yield {"type": left}


def _bounds(low: float | None, high: float | None) -> dict[str, float]:
  return ({} if low is None else {"exclusiveMinimum": low}) | ({} if high is None else {"exclusiveMaximum": high})


def _with_property(name: str, schema: Any) -> dict[str, Any]:
  return {"type": "object", "properties": {name: schema}, "additionalProperties": True}


def _pattern_of_others(texts: list[str]) -> str:
  """Returns a regular expression of all texts but these, without its anchors."""
  heads = sorted({text[0] for text in texts if text})
  options = [] if "" in texts else [""]
  if heads:
    options.append(f"[^{''.join(map(_escape, heads))}].*")
  else:
    options.append(".+")
  for head in heads:
    options.append(f"{_escape(head)}(?:{_pattern_of_others([text[1:] for text in texts if text[:1] == head])})")
  return "|".join(options)


def _escape(char: str) -> str:
  return char if re.fullmatch("[a-zA-Z0-9_ ]", char) else f"\\x{{{ord(char):x}}}"
