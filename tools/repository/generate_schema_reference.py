"""Writes docs/reference/json-schema.md, which says for each keyword of JSON Schema whether an output follows it.

python -m tools.repository.generate_schema_reference
"""

from server.text.schema_keywords import KEYWORDS, Handling
from tools.measure import ROOT

PAGE = ROOT / "docs" / "reference" / "json-schema.md"
_HEAD = """# JSON Schema: what is enforced

`make docs` writes this page from `server/text/schema_keywords.py`; a test compares. It holds for every schema that a
request sends: `response_format`, the fields of other servers, the parameters of forced tool calls, and gRPC.

| word | meaning |
| --- | --- |
| enforced | Every output follows it. |
| partly | Enforced in the forms that the last column names. Other forms are ignored. |
| ignored | Sluice leaves it out of the schema and names it in the header `x-sluice-ignored-fields`. |
| annotation | It says nothing of which values are valid, by the standard. So does every name that is not here. |

With `"strict": true` in `json_schema` or in a tool's `function`, under `--strict_requests`, over gRPC and in `LLM`,
Sluice refuses what it would ignore: HTTP 400 or INVALID_ARGUMENT with the keyword, its path and the remedy.

## Objects are closed

An object that lists `properties` or `patternProperties` and does not set `additionalProperties` has no others. A model
that may add properties adds them until `max_tokens`, and callers who leave the keyword out mean the properties that
they list. What `allOf`, `anyOf` or `$ref` add to the same object counts as listed, and so do names in `required`. An
object without such a list stays open.

Set `"additionalProperties": true` to open one object. `--json_schema_additional_properties` restores the standard's
meaning for the server, except under `strict`. `LLM(json_schema_additional_properties=True)` does so in Python.

## Keywords

| keyword | | |
| --- | --- | --- |
"""
_FOOT = """
Patterns are searched for in the whole text unless they have `^` and `$`. A whole number is written without a fraction:
`1`, not `1.0`. Properties come in the order of the schema.

[JSON-Schema-Test-Suite](../../benchmarks/json_schema.md) has the figures.
"""
_WORDS = {
  Handling.ENFORCED: "enforced",
  Handling.PARTLY: "partly",
  Handling.IGNORED: "ignored",
  Handling.ANNOTATION: "annotation",
}


def schema_reference() -> str:
  """Returns the page's text."""
  rows = (f"| `{name}` | {_WORDS[keyword.handling]} | {keyword.note} |\n" for name, keyword in KEYWORDS.items())
  return _HEAD + "".join(rows) + _FOOT


def main() -> None:
  """Runs the command line."""
  PAGE.parent.mkdir(parents=True, exist_ok=True)
  PAGE.write_text(schema_reference(), "utf-8")


if __name__ == "__main__":
  main()
