"""Rewrites a JSON schema into keywords that the compiler enforces, and names the others. Compiles nothing.

A rewritten schema allows a part of what the original allows, but for the keywords named in the result. Objects that
list properties, or patterns of their names, and do not say what else they may have are closed on request: a model that
may add properties adds them until max_tokens.
"""

from collections.abc import Iterable, Iterator
import copy
import dataclasses
import math
import re
from typing import Any

from server.text.schema_alternatives import SchemaAlternatives, find_pointer, walk_objects
from server.text.schema_conditions import (
  MOST_CHARS,
  count_alternatives,
  express_condition,
  express_contains,
  express_dependencies,
  express_unevaluated,
  express_unique,
  find_discriminator,
  schema_size,
)
from server.text.schema_keywords import FORMATS, KEYWORDS, Handling
from server.text.schema_negation import combine, negate_schema

# Patterns of a schema that must match together: the compiler intersects them in exponential time (16 take 0.07 s, 20
# take 2 s, 60 take minutes), and has no limit for it.
MAX_PATTERNS_TOGETHER = 8
# Alternatives that are written for one object, which multiply; and those of a whole schema, each times its properties:
# 128 of 30 properties take 0.1 s to compile.
_MOST_TOGETHER = 128
_MOST_ALTERNATIVES = 5000
_MOST_OPTIONS = 8
# Levels of schemas that are rewritten; the compiler refuses deeper ones.
_MAX_LEVELS = 80
_LARGEST_INT64 = 2**63 - 1024  # that a double holds; the compiler's bounds are doubles
_LARGEST_EXACT = 2**53
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# What applies to the same value, and so may describe further properties or items of it.
_IN_PLACE = (
  *("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef"),
  *("if", "then", "else", "dependentSchemas", "dependencies"),
)
_OF_OBJECTS = (
  *_IN_PLACE,
  *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required"),
  *("propertyNames", "not", "dependentRequired"),
)
_ANNOTATIONS = frozenset(name for name, keyword in KEYWORDS.items() if keyword.handling is Handling.ANNOTATION)
# What the compiler's regular expressions lack, but not within a class of characters.
# Patterns that regular expressions of Python and of the compiler read alike.
_PLAIN_PATTERN = re.compile(r"[a-zA-Z0-9_ ^$.*+?(){},|\[\]-]*+")
_NO_CLASS = re.compile(r"\\[^bBk1-9]|\[\^?\]?(?:\\.|[^\]\\])*+\]|(?P<lacking>\(\?<?[=!]|\\[bBk1-9])|.", re.DOTALL)


class SchemaRefused(Exception):
  """A value in the schema cannot be followed exactly, and leaving it out would not do. The text has the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnenforcedKeyword:
  """A keyword that was left out.

  Attributes:
    keyword: its name.
    path: the names on the way to it, itself last.
  """

  keyword: str
  path: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedSchema:
  """A rewritten schema.

  Attributes:
    schema: the schema; another object than the original.
    unenforced: keywords that it lacks, in order.
  """

  schema: Any
  unenforced: list[UnenforcedKeyword]


def prepare_schema(schema: Any, *, closes: bool, expresses: bool = True) -> PreparedSchema:
  """Rewrites a schema. To rewrite it again changes nothing.

  Args:
    schema: a parsed JSON schema.
    closes: whether objects with `properties` or `patternProperties`, and without additionalProperties, have no others.
    expresses: whether to write conditions and the like as alternatives, which makes the schema larger.

  Raises:
    SchemaRefused: const or enum has a whole number beyond 2^53.
  """
  expresses = expresses and not _has_resources(schema)
  rewriter = _Rewriter(schema, closes=closes, expresses=expresses)
  prepared = rewriter.rewrite(schema, (), 0)
  choices = _ChoiceRewriter(prepared, expresses=expresses)
  prepared = choices.rewrite(prepared, (), 0)
  return PreparedSchema(prepared, rewriter.unenforced + choices.unenforced)


class _Rewriter:
  """Rewrites everything but oneOf."""

  def __init__(self, root: Any, *, closes: bool, expresses: bool):
    self._root = root
    self._closes = closes
    self._left = _MOST_ALTERNATIVES if expresses else 0
    self._together, self._width = 1, 1  # alternatives and properties of the object that is rewritten
    self._patterns = _count_patterns(root)
    self._composed = _find_composed(root) if closes else set[int]()
    self._alternatives = SchemaAlternatives(root)
    self._referenced = _referenced_names(root)
    self._anchors = _dynamic_anchors(root)
    self.unenforced: list[UnenforcedKeyword] = []

  def rewrite(self, schema: Any, path: tuple[str, ...], level: int) -> Any:
    """Rewrites a schema of a value that nothing around it describes."""
    outer, self._together, self._width = (self._together, self._width), 1, 1
    made = self._rewrite_part(schema, path, level)
    self._together, self._width = outer
    return made

  def _rewrite_part(self, schema: Any, path: tuple[str, ...], level: int) -> Any:
    """Rewrites a schema that describes a value together with others."""
    if not isinstance(schema, dict) or level > _MAX_LEVELS:
      return schema
    made: dict[str, Any] = {}
    self._width += len(schema["properties"]) if isinstance(schema.get("properties"), dict) else 0
    expressed, parts, merged = self._express_keywords(schema)
    for name, value in schema.items():
      if name in ("const", "enum"):
        _check_exact(value, name)
      if name in expressed:
        continue
      if name == "$dynamicAnchor" and "$anchor" not in schema:
        made["$anchor"] = value
      elif name == "x-guidance" and not path:
        made[name] = value
      elif name not in KEYWORDS and name in self._referenced:
        made[name] = self.rewrite(value, (*path, name), level + 1)
      elif name in _ANNOTATIONS or name not in KEYWORDS:
        continue  # beside a reference, the compiler would take it for a part of the schema
      elif name in _MAPS and isinstance(value, dict):
        made[name] = {key: self.rewrite(each, (*path, name, key), level + 1) for key, each in value.items()}
      elif name in _LISTS and isinstance(value, list):
        rewrite = self._rewrite_part if name in _IN_PLACE else self.rewrite
        made[name] = [
          rewrite(each, (*path, name, str(at)), level + 1)
          for at, each in enumerate(value)
          if not (name == "allOf" and at in merged)
        ]
      elif name in _SCHEMAS:
        made[name] = self.rewrite(value, (*path, name), level + 1)
      elif name in _COUNTS and isinstance(value, float) and value.is_integer():
        made[name] = int(value)
      elif name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        made[name] = _bound_inward(value, up=name.endswith("inimum"))
      else:
        made[name] = value
    self._rewrite_strings(schema, made, path)
    self._rewrite_arrays(schema, made, path, level)
    self._rewrite_objects(schema, made, path, level)
    self._rewrite_logic(schema, made, path)
    if parts:
      written = [self._rewrite_part(part, (*path, "allOf"), level + 1) for part in parts]
      if False in written:
        return False
      made["allOf"] = [*made.get("allOf", []), *written]
    return made

  def _express_keywords(self, schema: dict[str, Any]) -> tuple[set[str], list[Any], set[int]]:
    """Writes keywords that the compiler lacks as alternatives.

    Returns:
      The keywords, what holds in place of them, and the indices of parts of allOf that are among the latter.
    """
    expressed, written, merged = set[str](), [], set[int]()

    def add(parts: list[Any] | None) -> bool:
      if parts is None or None in parts:
        return False
      given, parts = parts, [_drop_other_types(part, schema.get("type")) for part in parts]
      if False in parts and False not in given:
        return False
      count, patterns = math.prod(map(count_alternatives, parts)), _count_patterns(parts)
      together = self._together * count
      work = together * self._width if count > 1 else 0
      if together > _MOST_TOGETHER or work > self._left or schema_size(parts) > MOST_CHARS:
        return False
      if patterns and self._patterns + patterns > MAX_PATTERNS_TOGETHER:
        return False
      self._together, self._left, self._patterns = together, self._left - work, self._patterns + patterns
      written.extend(part for part in parts if part is not True)
      return True

    if self._left <= 0:
      return expressed, written, merged
    conditions = {at: each for at, each in enumerate(_list(schema.get("allOf"))) if _is_condition(each)}
    if "if" in schema:
      conditions[-1] = schema
    one = find_discriminator(list(conditions.values()), schema) is not None
    for group in [conditions] if one else [{at: each} for at, each in conditions.items()]:
      if add([express_condition(list(group.values()), self._root)]):
        merged.update(group)
        expressed.update(("if", "then", "else") if -1 in group else ())
    if schema.get("uniqueItems") is True and add([express_unique(schema, self._root)]):
      expressed.add("uniqueItems")
    if "contains" in schema and add([express_contains(schema, self._root)]):
      expressed.update(("contains", "minContains", "maxContains"))
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
      if schema.get(name) and add(express_dependencies(schema[name])):
        expressed.add(name)
    for name in ("unevaluatedProperties", "unevaluatedItems"):
      has_parts = name in schema and any(each in schema for each in (*_IN_PLACE, "contains"))
      if has_parts and not _is_any(schema[name]) and add([express_unevaluated(schema, name, self._root)]):
        expressed.add(name)
    target = schema.get("$dynamicRef")
    if str(target)[:1] == "#" and self._anchors.count(str(target)[1:]) <= 1 and add([{"$ref": target}]):
      expressed.add("$dynamicRef")
    if "not" in schema and add([negate_schema(schema["not"], self._root)]):
      expressed.add("not")
    return expressed, written, merged

  def _leave_out(self, made: dict[str, Any], name: str, path: tuple[str, ...]) -> None:
    del made[name]
    self.unenforced.append(UnenforcedKeyword(name, (*path, name)))

  def _rewrite_strings(self, schema: dict[str, Any], made: dict[str, Any], path: tuple[str, ...]) -> None:
    if "format" in made and made["format"] not in FORMATS:
      del made["format"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _has_lookaround(pattern):
      self._leave_out(made, "pattern", path)

  def _rewrite_arrays(self, schema: dict[str, Any], made: dict[str, Any], path: tuple[str, ...], level: int) -> None:
    if "uniqueItems" in made:
      most = schema.get("maxItems")
      if schema["uniqueItems"] is False or (isinstance(most, int | float) and most <= 1):
        del made["uniqueItems"]
      else:
        self._leave_out(made, "uniqueItems", path)
    if "contains" in made:
      if schema.get("minContains") == 0 and "maxContains" not in schema:
        del made["contains"]
      else:
        self._leave_out(made, "contains", path)
    made.pop("minContains", None)
    made.pop("maxContains", None)
    if "unevaluatedItems" in made:
      rest = schema["unevaluatedItems"]
      if _is_any(rest):
        del made["unevaluatedItems"]
      elif "contains" in schema or any(name in schema for name in _IN_PLACE):
        self._leave_out(made, "unevaluatedItems", path)
      else:
        del made["unevaluatedItems"]
        name = "additionalItems" if isinstance(schema.get("items"), list) else "items"
        if name not in schema:
          made[name] = self.rewrite(rest, (*path, "unevaluatedItems"), level + 1)

  def _rewrite_objects(self, schema: dict[str, Any], made: dict[str, Any], path: tuple[str, ...], level: int) -> None:
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
      if schema.get(name) == {}:
        del made[name]
      elif name in made:
        self._leave_out(made, name, path)
    if "unevaluatedProperties" in made:
      rest = schema["unevaluatedProperties"]
      if _is_any(rest):
        del made["unevaluatedProperties"]
        made.setdefault("additionalProperties", True)
      elif not any(name in schema for name in _IN_PLACE):
        del made["unevaluatedProperties"]
        if "additionalProperties" not in schema:
          made["additionalProperties"] = self.rewrite(rest, (*path, "unevaluatedProperties"), level + 1)
      else:
        self._leave_out(made, "unevaluatedProperties", path)
    if "propertyNames" in made and not self._enforce_names(schema, made):
      self._leave_out(made, "propertyNames", path)
    if self._closes and "unevaluatedProperties" not in schema and id(schema) not in self._composed:
      self._close(schema, made)
    self._rewrite_counts(made, path)

  def _enforce_names(self, schema: dict[str, Any], made: dict[str, Any]) -> bool:
    """Enforces propertyNames with other keywords, and removes it; returns whether that is possible."""
    names = self._alternatives.resolve_reference(schema["propertyNames"])
    if isinstance(names, dict):
      names = {name: value for name, value in names.items() if name in KEYWORDS and name not in _ANNOTATIONS}
      if names.get("type") == "string":
        del names["type"]
    if _is_any(names):
      del made["propertyNames"]
      return True
    if names is False:
      names = {"enum": []}
    if isinstance(names, dict) and names.keys() <= {"minLength", "maxLength"}:
      least, most = names.get("minLength", 0), names.get("maxLength", "")
      names = (
        {"pattern": f"^(?s:.{{{least},{most}}})$"} if isinstance(least, int) and isinstance(most, int | str) else {}
      )
    values = [names["const"]] if set(names) == {"const"} else names.get("enum") if set(names) == {"enum"} else None
    if "patternProperties" in schema:
      return False
    rest, properties = made.get("additionalProperties", True), made.get("properties", {})
    if isinstance(values, list) and isinstance(properties, dict):
      allowed = [value for value in values if isinstance(value, str)]
      made["properties"] = {name: value if name in allowed else False for name, value in properties.items()} | {
        name: copy.deepcopy(rest) for name in allowed if name not in properties
      }
    elif set(names) == {"pattern"} and not _has_lookaround(str(names["pattern"])):
      matched = _match_names(str(names["pattern"]), properties)
      if matched is None:
        return False
      made["properties"] = {name: value if name in matched else False for name, value in properties.items()}
      made["patternProperties"] = {str(names["pattern"]): rest}
    else:
      return False
    made["additionalProperties"] = False
    del made["propertyNames"]
    return True

  def _close(self, schema: dict[str, Any], made: dict[str, Any]) -> None:
    """Lets an object have no properties but those that it or what applies to the same object lists.

    Does nothing where a part says something of further properties.
    """
    kinds = schema.get("type", "object")
    if "additionalProperties" in made or "object" not in kinds:
      return
    if not any(name in schema for name in _IN_PLACE):
      if "properties" not in made and "patternProperties" not in made:
        return
    elif "patternProperties" in made:
      return
    names: dict[str, None] = {}
    has_properties = False
    for part in self._parts(schema, set(), 0):
      if not isinstance(part, dict):
        continue
      if part is not schema and not part.keys().isdisjoint(
        ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "$dynamicRef")
      ):
        return
      properties = part.get("properties")
      has_properties |= isinstance(properties, dict) or "patternProperties" in part
      names |= dict.fromkeys(properties if isinstance(properties, dict) else ())
      names |= dict.fromkeys(_required_names(part))
    if not has_properties or _is_one_part(schema):
      return
    own = made.get("properties", {})
    if names:
      made["properties"] = {**own, **{name: True for name in names if name not in own}}
    made["additionalProperties"] = False

  def _parts(self, schema: Any, seen: set[int], level: int) -> Iterator[Any]:
    """Yields a schema and what applies to the same value."""
    if id(schema) in seen or level > _MAX_LEVELS:
      return
    seen.add(id(schema))
    yield schema
    for part in _in_place(schema, self._root):
      yield from self._parts(part, seen, level + 1)

  def _rewrite_counts(self, made: dict[str, Any], path: tuple[str, ...]) -> None:
    """Removes counts of properties that follow from others, or that the compiler cannot follow."""
    properties, required = made.get("properties"), made.get("required")
    listed = set(properties) if isinstance(properties, dict) else set()
    needed = {str(name) for name in required} if isinstance(required, list) else set()
    least, most = made.get("minProperties", 0), made.get("maxProperties")
    if not isinstance(least, int) or not isinstance(most, int | None):
      return
    closed = made.get("additionalProperties") is False and not made.get("patternProperties")
    if least <= len(needed):
      made.pop("minProperties", None)
      least = 0
    if most is not None and closed and most >= len(listed):
      del made["maxProperties"]
      most = None
    if not listed - needed or (not least and most is None):
      return
    if closed and least - len(needed) <= 1 and (most is None or most - len(needed) == 1):
      return
    for name in ("minProperties", "maxProperties"):
      if name in made:
        self._leave_out(made, name, path)

  def _rewrite_logic(self, schema: dict[str, Any], made: dict[str, Any], path: tuple[str, ...]) -> None:
    for name in ("$dynamicRef", "$recursiveRef", "not"):
      if name in made:
        self._leave_out(made, name, path)
    then, otherwise = made.pop("then", None), made.pop("else", None)
    if "if" in made:
      if then is None and otherwise is None:
        del made["if"]
      else:
        self._leave_out(made, "if", path)


class _ChoiceRewriter:
  """Turns oneOf into anyOf; changes the schema."""

  def __init__(self, root: Any, *, expresses: bool):
    self._root = root
    self._expresses = expresses
    self._alternatives = SchemaAlternatives(root)
    self.unenforced: list[UnenforcedKeyword] = []

  def rewrite(self, schema: Any, path: tuple[str, ...], level: int) -> Any:
    if not isinstance(schema, dict) or level > _MAX_LEVELS:
      return schema
    for name, value in schema.items():
      if name in _MAPS and isinstance(value, dict):
        for key, each in value.items():
          value[key] = self.rewrite(each, (*path, name, key), level + 1)
      elif name in _LISTS and isinstance(value, list):
        value[:] = [self.rewrite(each, (*path, name, str(at)), level + 1) for at, each in enumerate(value)]
      elif name in _SCHEMAS:
        schema[name] = self.rewrite(value, (*path, name), level + 1)
    if not isinstance(schema.get("oneOf"), list):
      return schema
    options = schema["oneOf"]
    if not self._are_apart(options):
      options = self._exclude_others(options)
      if options is None:
        options = schema["oneOf"]
        self.unenforced.append(UnenforcedKeyword("oneOf", (*path, "oneOf")))
    if "anyOf" in schema:
      del schema["oneOf"]
      schema["allOf"] = [*schema.get("allOf", []), {"anyOf": options}]
      return schema
    return {
      "anyOf" if name == "oneOf" else name: options if name == "oneOf" else value for name, value in schema.items()
    }

  def _exclude_others(self, options: list[Any]) -> list[Any] | None:
    """Returns options of which each refuses the values of those that it shares some with, None if that is too much."""
    if not self._expresses or len(options) > _MOST_OPTIONS:
      return None
    apart, count = [], 0
    for at, option in enumerate(options):
      others = options[:at] + options[at + 1 :]
      others = [each for each in others if not self._alternatives.are_disjoint(option, each)]
      refused = [negate_schema(each, self._root) for each in others]
      if None in refused:
        return None
      apart.append(combine("allOf", [option, *refused]))
      count += math.prod(map(count_alternatives, refused))
    return apart if count <= 4 * _MOST_TOGETHER else None

  def _are_apart(self, options: list[Any]) -> bool:
    """Returns whether no value is valid under two options.

    A property by which they differ becomes required: pydantic refuses a value without its discriminator, also one that
    has a default.
    """
    name = self._alternatives.find_discriminator(options)
    targets = [self._target(option) for option in options]
    if name is None or not all(targets):
      pairs = ((one, other) for at, one in enumerate(options) for other in options[at + 1 :])
      return all(self._alternatives.are_disjoint(one, other) for one, other in pairs)
    for target in targets:
      if name not in target.get("required", []):
        target["required"] = [*target.get("required", []), name]
    return True

  def _target(self, option: Any) -> dict[str, Any]:
    """Returns the schema itself that an option or its reference is; an empty one if there is none."""
    for _ in range(16):
      if not isinstance(option, dict) or "$ref" not in option:
        break
      option = find_pointer(self._root, option["$ref"]) if len(option) == 1 else None
    return option if isinstance(option, dict) and option.get("type") == "object" else {}


def _find_composed(root: Any) -> set[int]:
  """Returns the ids of schemas that describe an object together with others, by which it has further properties."""
  composed: list[Any] = []
  inherits: dict[int, list[Any]] = {}  # by the id of a schema: what describes all that it describes
  left, seen = [root], set[int]()
  while left:
    schema = left.pop()
    if not isinstance(schema, dict) or id(schema) in seen:
      continue
    seen.add(id(schema))
    parts = _in_place(schema, root)
    inherits[id(schema)] = parts
    if not _is_one_part(schema):
      composed += parts
    left += parts
    for name in _SCHEMAS:
      left.append(schema.get(name))
    for name in (*_LISTS, *_MAPS):
      value = schema.get(name)
      left += value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
  found = set[int]()
  while composed:
    schema = composed.pop()
    if id(schema) not in found:
      found.add(id(schema))
      composed += inherits.get(id(schema), ())
  return found


def _is_one_part(schema: dict[str, Any]) -> bool:
  """Returns whether every object of this schema is described by one of its parts alone."""
  names = [name for name in _OF_OBJECTS if name in schema]
  return names in (["$ref"], ["anyOf"], ["oneOf"]) or (
    names == ["allOf"] and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1
  )


def _in_place(schema: Any, root: Any) -> list[Any]:
  """Returns the schemas that apply to the same value."""
  if not isinstance(schema, dict):
    return []
  parts = [part for name in ("allOf", "anyOf", "oneOf") for part in _list(schema.get(name))]
  parts += (schema[name] for name in ("if", "then", "else") if name in schema)
  for name in ("dependentSchemas", "dependencies"):
    parts += schema[name].values() if isinstance(schema.get(name), dict) else ()
  if isinstance(schema.get("$ref"), str):
    parts.append(find_pointer(root, schema["$ref"]))
  return [part for part in parts if isinstance(part, dict)]


def _referenced_names(root: Any) -> set[str]:
  """Returns the names on the way to what references name."""
  references = (value["$ref"] for value in walk_objects(root) if isinstance(value.get("$ref"), str))
  return {part.replace("~1", "/").replace("~0", "~") for reference in references for part in reference.split("/")}


def _required_names(schema: dict[str, Any]) -> Iterator[str]:
  """Yields the names that an object must have, always or beside others."""
  lists = [schema.get("required")]
  for keyword in ("dependentRequired", "dependencies"):
    lists += schema[keyword].values() if isinstance(schema.get(keyword), dict) else ()
  yield from (name for names in lists for name in _list(names) if isinstance(name, str))


def _list(value: Any) -> list[Any]:
  return value if isinstance(value, list) else []


def _is_any(schema: Any) -> bool:
  """Returns whether a schema certainly allows everything."""
  return schema is True or (
    isinstance(schema, dict) and all(name in _ANNOTATIONS or name not in KEYWORDS for name in schema)
  )


def _is_condition(schema: Any) -> bool:
  """Returns whether a schema says nothing but if, then and else."""
  return (
    isinstance(schema, dict)
    and "if" in schema
    and all(name in ("if", "then", "else") or name in _ANNOTATIONS or name not in KEYWORDS for name in schema)
  )


def _drop_other_types(part: Any, types: Any) -> Any:
  """Returns a schema without its alternatives of other types; False if none is left."""
  if not isinstance(part, dict) or not isinstance(types, str | list):
    return part
  allowed = {"number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)}
  options = []
  is_choice = part.keys() == {"anyOf", "additionalProperties"} and part["additionalProperties"] is True
  for option in part["anyOf"] if is_choice else [part]:
    own = option.get("type") if isinstance(option, dict) else None
    if own is None or not allowed.isdisjoint([own] if isinstance(own, str) else own):
      options.append(option)
  return combine("anyOf", options)


def _match_names(pattern: str, names: Iterable[str]) -> set[str] | None:
  """Returns the names that a pattern matches; None where Python may read pattern or names in another way."""
  names = list(names)
  if not names:
    return set()
  if not _PLAIN_PATTERN.fullmatch(pattern) or not all(name.isascii() and name.isprintable() for name in names):
    return None
  try:
    return {name for name in names if re.search(pattern, name)}
  except re.error:
    return None


def _count_patterns(root: Any) -> int:
  """Returns the number of patterns of texts in a schema."""
  return sum(("pattern" in value) + ("format" in value) for value in walk_objects(root))


def _dynamic_anchors(root: Any) -> list[str]:
  return [str(value["$dynamicAnchor"]) for value in walk_objects(root) if "$dynamicAnchor" in value]


def _has_resources(root: Any) -> bool:
  """Returns whether a schema has another within, with an $id of its own, by which references have other meanings."""
  return any(value is not root and isinstance(value.get("$id"), str) for value in walk_objects(root))


def _has_lookaround(pattern: str) -> bool:
  return any(piece["lacking"] for piece in _NO_CLASS.finditer(pattern))


def _bound_inward(value: Any, *, up: bool) -> Any:
  """Returns a bound that a double holds exactly, not outside of the given one, and within int64."""
  if not isinstance(value, int) or abs(value) <= _LARGEST_EXACT:
    return value
  if (up and value < -_LARGEST_INT64) or (not up and value > _LARGEST_INT64):
    return -_LARGEST_INT64 if up else _LARGEST_INT64
  if abs(value) > _LARGEST_INT64:
    return value
  near = float(value)
  if near < value if up else near > value:
    near = math.nextafter(near, math.inf if up else -math.inf)
  return int(near)


def _check_exact(value: Any, name: str) -> None:
  left = [value]
  while left:
    inner = left.pop()
    if isinstance(inner, list):
      left += inner
    elif isinstance(inner, dict):
      left += inner.values()
    elif isinstance(inner, int) and abs(inner) > _LARGEST_EXACT:
      raise SchemaRefused(f"has {inner} in {name}, allowed are whole numbers up to 2^53: send it as a string")
