"""Types the arguments of formats that write them as text between tags. Knows no format."""

from collections.abc import Mapping
import json
from typing import Any

_MAX_REFERENCES = 16
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPE_OF: Mapping[type, str] = {
  str: "string",
  bool: "boolean",
  int: "integer",
  float: "number",
  dict: "object",
  list: "array",
  type(None): "null",
}


def types_of_argument(parameters: Any, key: str) -> frozenset[str]:
  """Returns the JSON types that a tool's schema allows for an argument; empty if the schema does not say."""
  properties = parameters.get("properties") if isinstance(parameters, dict) else None
  schema = properties.get(key) if isinstance(properties, dict) else None
  return frozenset(_types(schema, parameters, _MAX_REFERENCES))


def _types(schema: Any, root: Any, depth: int) -> set[str]:
  if not isinstance(schema, dict) or depth == 0:
    return set()
  kinds = schema.get("type")
  if isinstance(kinds, str):
    return {kinds}
  if isinstance(kinds, list):
    return {kind for kind in kinds if isinstance(kind, str)}
  if "const" in schema:
    return {_TYPE_OF.get(type(schema["const"]), "object")}
  if isinstance(values := schema.get("enum"), list):
    return {_TYPE_OF.get(type(value), "object") for value in values}
  found: set[str] = set()
  for name in ("anyOf", "oneOf", "allOf"):
    if isinstance(parts := schema.get(name), list):
      for part in parts[:64]:
        found |= _types(part, root, depth - 1)
  if isinstance(path := schema.get("$ref"), str) and path.startswith("#/"):
    target = root
    for step in path[2:].split("/"):
      target = target.get(step) if isinstance(target, dict) else None
    found |= _types(target, root, depth - 1)
  return found


def write_argument(text: str, types: frozenset[str]) -> str:
  """Returns the JSON of an argument that a model wrote as text.

  A text that is the JSON of an allowed type other than string is that value. Otherwise it is a string.

  Args:
    text: what stands between the tags.
    types: what `types_of_argument` returned.
  """
  stripped = text.strip()
  try:
    value = json.loads(_PYTHON_WORDS.get(stripped, stripped))
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    written.encode()
  except (ValueError, RecursionError):
    return json.dumps(text, ensure_ascii=False)
  kind = _TYPE_OF[type(value)]
  is_allowed = not types or kind in types or kind == "integer" and "number" in types or "string" not in types
  return (
    written if is_allowed and not (kind == "string" and "string" in types) else json.dumps(text, ensure_ascii=False)
  )
