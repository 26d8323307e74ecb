"""Says for each keyword of JSON Schema whether an output follows it. Reads no schema.

The names are those of draft 2020-12 and of older drafts. Other names are annotations, as the standard says.
docs/reference/json-schema.md shows the table.
"""

import dataclasses
import enum


class Handling(enum.Enum):
  """What happens to a keyword."""

  ENFORCED = "enforced"
  ANNOTATION = "annotation"  # of no effect on which values are valid
  PARTLY = "partly"  # enforced in some forms, else as IGNORED
  IGNORED = "ignored"  # ignored and named in a header, or refused under `strict`


@dataclasses.dataclass(frozen=True, slots=True)
class Keyword:
  """A row of the table.

  Attributes:
    handling: what happens to the keyword.
    note: which forms are enforced, or how, in a sentence; may be empty.
  """

  handling: Handling
  note: str = ""


_E, _A, _P, _I = Handling.ENFORCED, Handling.ANNOTATION, Handling.PARTLY, Handling.IGNORED

# Formats with a grammar. All others are annotations, as every format is by the standard.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

KEYWORDS: dict[str, Keyword] = {
  # Identity and references
  "$ref": Keyword(_E, "Within the schema, cycles included. References to elsewhere return 400."),
  "$defs": Keyword(_E),
  "definitions": Keyword(_E),
  "$anchor": Keyword(_E),
  "$id": Keyword(_E),
  "id": Keyword(_A),
  "$schema": Keyword(_A, "Every schema is read alike, whatever its draft."),
  "$vocabulary": Keyword(_A),
  "$comment": Keyword(_A),
  "$dynamicRef": Keyword(
    _P, "Within a schema that has one `$dynamicAnchor` of this name at most, and no `$id` inside."
  ),
  "$dynamicAnchor": Keyword(_A, "`$dynamicRef` is what would read it."),
  "$recursiveRef": Keyword(_I),
  "$recursiveAnchor": Keyword(_A, "`$recursiveRef` is what would read it."),
  # Any value
  "type": Keyword(_E),
  "enum": Keyword(_E, "Whole numbers beyond 2^53 return 400."),
  "const": Keyword(_E, "Whole numbers beyond 2^53 return 400."),
  "allOf": Keyword(_E),
  "anyOf": Keyword(_E),
  "oneOf": Keyword(
    _P,
    "Where Sluice finds that no value fits two of its schemas: by type, by const or enum, or by a required property; a "
    "property that has one value in each becomes required. Also where every schema has a form that `not` enforces, up "
    "to 8 of them. Elsewhere it counts as anyOf.",
  ),
  "not": Keyword(
    _P,
    "Of a schema with `type`, `const` and `enum` of simple values, bounds of numbers, lengths, `required`, "
    "`properties`, `dependentRequired`, `prefixItems`, `contains`, `allOf`, `anyOf`, `not`, `if` and `$ref`. Not of "
    "`pattern` and `format`. A value that must be no integer is no number.",
  ),
  "if": Keyword(
    _P,
    "A condition that `not` enforces. In `allOf`, any number of conditions on the value of one required property; "
    "others multiply, up to 128 alternatives in one object.",
  ),
  "then": Keyword(_P, "As `if`."),
  "else": Keyword(_P, "As `if`."),
  # Numbers
  "minimum": Keyword(_E, "Bounds of integers beyond 2^53 move inward by less than 2^11, to within int64."),
  "maximum": Keyword(_E, "As `minimum`."),
  "exclusiveMinimum": Keyword(_E, "As `minimum`; a Boolean, as in draft 4, too."),
  "exclusiveMaximum": Keyword(_E, "As `exclusiveMinimum`."),
  "multipleOf": Keyword(
    _E,
    "Up to 20,000 times a power of ten, as is the least common multiple of all in a schema. Outputs have all "
    "decimals: 0.50 for a multiple of 0.25.",
  ),
  # Strings
  "minLength": Keyword(_E),
  "maxLength": Keyword(_E),
  "pattern": Keyword(
    _P,
    "Rust's regular expressions. Patterns with lookarounds, word boundaries or backreferences are ignored, or refused.",
  ),
  "format": Keyword(_P, f"Enforced: {', '.join(FORMATS)}. Others are annotations. February has 29 days in every year."),
  "contentEncoding": Keyword(_A),
  "contentMediaType": Keyword(_A),
  "contentSchema": Keyword(_A),
  # Arrays
  "items": Keyword(_E, "A list, as in older drafts, is `prefixItems`."),
  "prefixItems": Keyword(_E),
  "additionalItems": Keyword(_E, "Beside a list in `items`; elsewhere it means nothing."),
  "minItems": Keyword(_E),
  "maxItems": Keyword(_E),
  "uniqueItems": Keyword(
    _P,
    "Where `maxItems` is at most 1, or at most 64 arrays are possible: items with `enum`, `const` or Booleans, also "
    "through `$ref`.",
  ),
  "contains": Keyword(_P, "The items that count are among the first 8. With `maxContains`, in the forms of `not`."),
  "minContains": Keyword(_P, "Up to 8. Of no effect without `contains`."),
  "maxContains": Keyword(_P, "As `contains`."),
  "unevaluatedItems": Keyword(
    _P,
    "Beside `allOf`, `anyOf`, `oneOf`, `if`, `$ref`, `contains` and `dependentSchemas`, up to 64 cases of what holds.",
  ),
  # Objects
  "properties": Keyword(_E, "In the order of the schema."),
  "required": Keyword(_E),
  "additionalProperties": Keyword(_E, "See below for objects without it. A name may occur twice, as in any JSON."),
  "patternProperties": Keyword(_E, "Patterns that can match one name return 400, as do lookarounds."),
  "propertyNames": Keyword(
    _P, "With `enum`, `const`, `pattern`, or lengths, in an object without `patternProperties`."
  ),
  "minProperties": Keyword(
    _P, "Where every property in `properties` is required, or the number of properties follows from the others."
  ),
  "maxProperties": Keyword(_P, "As `minProperties`."),
  "dependentRequired": Keyword(_P, "Up to 7 properties; they multiply with the conditions of `if`."),
  "dependentSchemas": Keyword(_P, "As `dependentRequired`."),
  "dependencies": Keyword(_P, "As `dependentRequired`."),
  "unevaluatedProperties": Keyword(_P, "As `unevaluatedItems`, with one pattern in `patternProperties` at most."),
  # For people and programs
  "title": Keyword(_A),
  "description": Keyword(_A),
  "default": Keyword(_A),
  "examples": Keyword(_A),
  "deprecated": Keyword(_A),
  "readOnly": Keyword(_A),
  "writeOnly": Keyword(_A),
}
