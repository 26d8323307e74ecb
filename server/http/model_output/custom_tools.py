"""Custom tools, whose input is free text, as functions of one string: what the model reads, and what it writes.

Every format of calls carries an object of arguments, so all of them carry such a text. Knows no API and no format.
"""

import json
import re
from typing import Any, Final

# The one argument.
INPUT: Final = "input"
_HEAD: Final = f'{{"{INPUT}": "'
# The complete characters of a JSON string. The first half of a surrogate pair waits for what follows it.
_COMPLETE = re.compile(
  r"""(?:
    [^"\\]
    | \\["\\/bfnrt]
    | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
    | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=\\[^u]) | (?!\\|\Z) )
  )*""",
  re.VERBOSE,
)


def describe_custom_tool(name: str, description: str | None, syntax: str, definition: str) -> dict[str, Any]:
  """Returns OpenAI's description of the function that stands for a custom tool.

  Args:
    name, description: the tool's.
    syntax, definition: of the grammar of its input; empty for any text. The model reads both.
  """
  parts = [description] if description else []
  if definition:
    parts.append(f"The input follows this {syntax} grammar:\n{definition}")
  function: dict[str, Any] = {"name": name}
  if parts:
    function["description"] = "\n\n".join(parts)
  function["parameters"] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
  }
  return {"type": "function", "function": function}


class InputReader:
  """Reads the input of one call from its arguments, {"input": "..."}, while they arrive.

  Arguments of another form are the input as they are.
  """

  def __init__(self) -> None:
    self._held = ""
    # None until the form of the arguments is known.
    self._is_wrapped: bool | None = None
    self._has_ended = False

  def push(self, text: str, *, ended: bool) -> str:
    """Adds text of the arguments; returns more of the input. With `ended`, the call has no more arguments."""
    self._held += text
    if self._is_wrapped is None:
      if not ended and len(self._held) < len(_HEAD) and _HEAD.startswith(self._held):
        return ""
      self._is_wrapped = self._held.startswith(_HEAD)
      if self._is_wrapped:
        self._held = self._held[len(_HEAD) :]
    if not self._is_wrapped:
      text, self._held = self._held, ""
      return text
    if self._has_ended:
      return ""
    found = _COMPLETE.match(self._held)
    end = 0 if found is None else found.end()
    written, self._held = self._held[:end], self._held[end:]
    self._has_ended = self._held.startswith('"')
    # Halves of surrogate pairs without the other half, which cannot be sent, become question marks.
    return json.loads(f'"{written}"', strict=False).encode("utf-8", "replace").decode()
