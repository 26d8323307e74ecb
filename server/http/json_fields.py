"""Parses untrusted JSON within limits, and converts it to the fields that a class declares. Knows no endpoint.

Python's parser accepts more than JSON (NaN, lone surrogates, duplicate keys, other encodings). Here all of that is an
error with a remedy, and so is each error of msgspec about a field. Errors show numbers, never texts.
"""

from collections.abc import Mapping, Sequence
import json
import re
from typing import Any

import msgspec

from engine.errors import InvalidRequest

MAX_DEPTH = 64
_MAX_DIGITS = 30
# Patterns of msgspec's messages, and words for its types and limits.
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_OTHER_TYPE = re.compile(r"Expected `(.+)`, got `(\w+)`")
_OTHER_LENGTH = re.compile(r"Expected `\w+` of length (\S+) (\d+)")
_BEYOND_LIMIT = re.compile(r"Expected `int` \S+ (\S+)")
_BOUNDS = {"<=": "at most", ">=": "at least"}
_BITS = {str(bound): bits for bits in (32, 64) for bound in (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)}
_WORDS = {
  "null": "null",
  "object": "an object",
  "array": "a list",
  "str": "a string",
  "bool": "a boolean",
  "int": "a whole number",
  "float": "a number",
}


def parse_json_object(body: bytes) -> dict[str, Any]:
  """Parses a request's body.

  Raises:
    InvalidRequest: it is not UTF-8, not JSON, not an object, or too deep.
  """
  try:
    # It refuses what Python's parser takes, but for keys that come twice.
    msgspec.json.decode(body, type=dict[str, Any])
    value = json.loads(body, object_pairs_hook=_object)
  except RecursionError:
    raise _too_deep() from None
  except (msgspec.DecodeError, UnicodeDecodeError) as error:
    raise InvalidRequest(
      f"is not JSON that can be taken: {error}; send one JSON object in UTF-8, with finite numbers", field="body"
    ) from None
  _check_depth(value)
  return value


def convert_fields[T: msgspec.Struct](values: Mapping[str, Any], kind: type[T]) -> T:
  """Returns the fields that `kind` declares, and drops others. A null counts as absent, and 2.0 as an integer.

  Raises:
    InvalidRequest: a field is missing, has a wrong type, or is outside its limits.
  """
  given = {
    name: int(value) if isinstance(value, float) and value.is_integer() else value
    for name, value in values.items()
    if value is not None
  }
  try:
    return msgspec.convert(given, kind, str_keys=True)
  except msgspec.ValidationError as error:
    raise _refusal(str(error), given, getattr(kind, "remedies", {})) from None


def show_number(value: object) -> str:
  """ "=VALUE" for an error about a number or a boolean; nothing for a value with texts of the caller's."""
  if not isinstance(value, int | float):
    return ""
  text = json.dumps(value)
  return f"={text}" if len(text) <= _MAX_DIGITS else f"={text[:_MAX_DIGITS]}..."


def _refusal(said: str, given: Mapping[str, Any], remedies: Mapping[str, str]) -> InvalidRequest:
  """Returns msgspec's error about a field with value, limit and remedy; `remedies` has better ones for some fields."""
  problem, _, place = said.partition(" - at ")
  field = place.rpartition("$")[2].strip(".`")
  if missing := _MISSING.match(problem):
    field = f"{field}.{missing[1]}".lstrip(".")
    return InvalidRequest(f"is missing: send {remedies.get(field, 'it as /openapi.json describes it')}", field=field)
  # msgspec does not name the entry of an object that it means.
  subject = "has a key that " if "`key`" in place else "has an entry that " if field.endswith("[...]") else ""
  field = field.removesuffix("[...]")
  value = _value_at(given, field)
  if other := _OTHER_TYPE.match(problem):
    wanted = remedies.get(field) or " or ".join(_WORDS[name] for name in other[1].split(" | ") if name != "null")
    return InvalidRequest(f"{subject}is {_WORDS[other[2]]}: send {wanted}", field=field)
  if length := _OTHER_LENGTH.match(problem):
    unit = "characters" if isinstance(value, str) else "entries"
    return InvalidRequest(f"has {len(value)} {unit}: send {_BOUNDS[length[1]]} {length[2]}", field=field)
  limit = _BEYOND_LIMIT.match(problem)
  if limit and limit[1] in _BITS:
    problem = f"send a whole number that fits into {_BITS[limit[1]]} bits"
  else:
    problem += "; see /openapi.json for what is"
  return InvalidRequest(f"{subject or show_number(value) + ' '}is not allowed: {problem}", field=field)


def _value_at(values: Any, path: str) -> Any:
  """Returns the value at a path such as "messages[0].content"."""
  for name in re.findall(r"\w+", path):
    values = values[int(name)] if isinstance(values, list) else values[name]
  return values


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) != len(pairs):
    raise InvalidRequest("has an object with the same key twice; send each key once", field="body")
  return values


def _check_depth(value: dict[str, Any]) -> None:
  level: list[Any] = [value]
  for _ in range(MAX_DEPTH):
    level = [
      inner
      for outer in level
      for inner in (outer.values() if isinstance(outer, dict) else outer)
      if isinstance(inner, dict | list)
    ]
    if not level:
      return
  raise _too_deep()


def _too_deep() -> InvalidRequest:
  return InvalidRequest(f"is nested too deeply, the limit is {MAX_DEPTH} levels; send a flatter object", field="body")
