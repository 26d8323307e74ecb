"""JSON from strangers: parsed with limits, then read field by field, each with its type. Knows no endpoint.

Python's parser takes more than JSON (NaN, lone surrogates, the last of two equal keys, other encodings) and fails in
more ways than one; here all of that is one error with a remedy. Values are named in errors, texts are not.
"""

from collections.abc import Sequence
import json
import re
from typing import Any, NoReturn

from engine.errors import InvalidRequest

MAX_DEPTH = 64
INT32 = (-(2**31), 2**31 - 1)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}


def parse_json_object(body: bytes) -> dict[str, Any]:
  """The object that a request's body is.

  Raises:
    InvalidRequest: it is not UTF-8, not JSON, not an object, or too deep.
  """
  try:
    text = body.decode()
  except UnicodeDecodeError as error:
    raise InvalidRequest(f"is not UTF-8 from byte {error.start} on; send JSON in UTF-8", field="body") from None
  try:
    value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
  except json.JSONDecodeError as error:
    raise InvalidRequest(
      f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; send one JSON object", field="body"
    ) from None
  except RecursionError:
    raise _too_deep() from None
  except ValueError:
    raise InvalidRequest("has a number of too many digits; send at most 4300", field="body") from None
  if not isinstance(value, dict):
    raise InvalidRequest(f"is {kind_of(value)}; send one JSON object", field="body")
  _check_depth(value)
  if _SURROGATE.search(text):
    try:
      json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
      raise InvalidRequest(
        "has half of a surrogate pair (\\ud800 to \\udfff); send whole characters", field="body"
      ) from None
  return value


def kind_of(value: Any) -> str:
  """What a JSON value is, in words."""
  return "null" if value is None else _KINDS[type(value)]


class Fields:
  """The fields of one JSON object. Each is taken once, by the name and type that somebody understands.

  A field that is null counts as absent, as with OpenAI.
  """

  def __init__(self, values: dict[str, Any], where: str = ""):
    """Args: values: the object. where: its own name with a dot, for errors."""
    self._values = {name: value for name, value in values.items() if value is not None}
    self._where = where

  def take_value(self, name: str) -> Any:
    """The value, whatever it is, or None."""
    return self._values.pop(name, None)

  def unknown(self) -> list[str]:
    """What nobody has taken."""
    return list(self._values)

  def text(self, name: str) -> str | None:
    """A string, or None."""
    value = self.take_value(name)
    if value is not None and not isinstance(value, str):
      self.wrong(name, value, "a string")
    return value

  def flag(self, name: str) -> bool | None:
    """A boolean, or None."""
    value = self.take_value(name)
    if value is not None and not isinstance(value, bool):
      self.wrong(name, value, "true or false")
    return value

  def whole(self, name: str, limits: tuple[int, int] = INT32) -> int | None:
    """A whole number that the wire type of sluice.v1 can hold, or None. 2.0 is whole."""
    value = self.take_value(name)
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if value is None:
      return None
    if not isinstance(value, int) or isinstance(value, bool):
      self.wrong(name, value, "a whole number")
    if not limits[0] <= value <= limits[1]:
      shown = str(value) if abs(value) < 10**30 else "of more than 30 digits"
      bits = 1 + limits[1].bit_length()
      raise InvalidRequest(
        f"={shown} is not allowed: send a whole number that fits into {bits} bits", field=f"{self._where}{name}"
      )
    return value

  def number(self, name: str) -> float | None:
    """A number, or None."""
    value = self.take_value(name)
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
      self.wrong(name, value, "a number")
    return None if value is None else as_float(value)

  def list_of(self, name: str, kind: type, what: str) -> list[Any] | None:
    """A list with entries of one type, or None."""
    value = self.take_value(name)
    if value is None:
      return None
    if not isinstance(value, list):
      self.wrong(name, value, f"a list of {what}")
    for index, entry in enumerate(value):
      if type(entry) is not kind:
        self.wrong(f"{name}[{index}]", entry, f"a list of {what}")
    return value

  def inner(self, name: str) -> "Fields | None":
    """An object, or None."""
    value = self.take_value(name)
    if value is None:
      return None
    if not isinstance(value, dict):
      self.wrong(name, value, "an object")
    return Fields(value, f"{self._where}{name}.")

  def wrong(self, name: str, value: Any, wanted: str) -> NoReturn:
    """Raises InvalidRequest for a value of another type than is wanted."""
    raise InvalidRequest(f"is {kind_of(value)}: send {wanted}", field=f"{self._where}{name}")


def as_float(value: float) -> float:
  """A JSON number as a float; one that is too large for it is infinite, which its owner refuses."""
  try:
    return float(value)
  except OverflowError:
    return float("inf") if value > 0 else float("-inf")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) != len(pairs):
    raise InvalidRequest("has an object with the same key twice; send each key once", field="body")
  return values


def _no_constant(name: str) -> NoReturn:
  raise InvalidRequest(f"has {name}, which is not JSON; send a finite number, or leave the field out", field="body")


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
