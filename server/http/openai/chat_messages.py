"""What a chat's prompt is made of: messages, tools and the template's own switches. Starts no generation."""

import dataclasses
import json
import re
from typing import Any, NoReturn

from engine.errors import InvalidRequest
from server.http.error_responses import UnsupportedField
from server.http.json_fields import Fields, kind_of, parse_json_object
from server.http.openai.tool_calls import CallFormat
from server.text.chat_template import Message
from server.text.tokenizer import Tokenizer

MAX_TOOLS = 128
# Of one answer that is held to calls, so that it comes to an end.
MAX_FORCED_CALLS = 16
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# OpenAI's, and those that some models have besides.
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_KWARG_TEXT = re.compile(r"[A-Za-z0-9_-]{0,32}")
# What a turn may have besides role and content; templates of models with tools read these.
TURN_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
  """What the model's template gets, and which calls its answer may or must have.

  Attributes:
    messages, add_generation_prompt, variables: as the template takes them.
    tools: OpenAI's descriptions; none under tool_choice "none".
    forced: the tools of which the answer must call one at least; it then has nothing but calls.
    parallel: it may have several.
    effort: reasoning_effort, for templates that read it or enable_thinking; may be empty.
  """

  messages: list[Message]
  add_generation_prompt: bool
  tools: list[dict[str, Any]]
  variables: dict[str, Any]
  forced: list[dict[str, Any]]
  parallel: bool
  effort: str = ""

  def token_ids(self, tokenizer: Tokenizer) -> list[int]:
    """Of the prompt. A template that does not know tools is no hindrance to calls that are forced."""
    tools = self.tools if self.tools and not (self.forced and not tokenizer.knows_tools) else None
    return tokenizer.encode_chat(
      self.messages,
      add_generation_prompt=self.add_generation_prompt,
      tools=tools,
      variables=self._effort_variables() | self.variables,
    )

  def ignored(self, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Fields that nothing acts on: variables that the model's template does not read, and `strict` of tools whose calls
    are not forced, as the model then writes what it likes.
    """
    ignored = [f"chat_template_kwargs.{name}" for name in tokenizer.unread_variables(self.variables)]
    effort = self._effort_variables()
    if effort and len(tokenizer.unread_variables(effort)) == len(effort):
      ignored.append("reasoning_effort")
    if not self.forced:
      strict = (index for index, tool in enumerate(self.tools) if tool["function"].get("strict"))
      ignored += (f"tools.{index}.function.strict" for index in strict)
    return tuple(ignored)

  def _effort_variables(self) -> dict[str, Any]:
    """What vLLM tells templates of it."""
    if not self.effort:
      return {}
    return {"reasoning_effort": self.effort, "enable_thinking": self.effort != "none"}

  def call_schema(self, form: CallFormat) -> str:
    """The JSON schema of the list of calls that is forced, as text."""
    schemas, definitions = [], {}
    for place, tool in enumerate(self.forced):
      function = tool["function"]
      parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
      if "$ref" in json.dumps(parameters):
        # References are from the root of the document, which is another one here.
        definitions[str(place)] = _rebased(parameters, f"#/$defs/{place}")
        parameters = {"$ref": f"#/$defs/{place}"}
      schemas.append(
        {
          "type": "object",
          "properties": {"name": {"const": function["name"]}, form.arguments: parameters},
          "required": ["name", form.arguments],
          "additionalProperties": False,
        }
      )
    most = MAX_FORCED_CALLS if self.parallel else 1
    return json.dumps(
      {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": schemas}, "$defs": definitions},
      ensure_ascii=False,
    )


def read_chat(fields: Fields) -> Chat:
  """Takes the fields of a chat's prompt.

  Raises:
    InvalidRequest: a value of the wrong kind.
    UnsupportedField: not text, or another template than the model's.
  """
  if fields.take_value("chat_template") is not None:
    raise UnsupportedField("is not supported: the template is the model's own; leave it out", field="chat_template")
  if fields.flag("continue_final_message"):
    raise UnsupportedField("is not supported: send the prompt to /v1/completions", field="continue_final_message")
  if fields.flag("add_special_tokens"):
    raise UnsupportedField(
      "is not supported: the model's template writes them; leave it out", field="add_special_tokens"
    )
  modalities = fields.take_value("modalities")
  if modalities is not None and modalities != ["text"]:
    raise UnsupportedField(
      'is not supported: the model writes text; leave it out, or send ["text"]', field="modalities"
    )
  if fields.take_value("audio") is not None:
    raise UnsupportedField("is not supported: the model writes text; leave it out", field="audio")
  messages = fields.list_of("messages", dict, "messages")
  if messages is None:
    raise InvalidRequest("is missing: send a list of messages with role and content", field="messages")
  open_turn, parallel = fields.flag("add_generation_prompt"), fields.flag("parallel_tool_calls")
  tools, forced, only_one = _tools(fields)
  return Chat(
    [_message(index, Fields(message, f"messages[{index}].")) for index, message in enumerate(messages)],
    True if open_turn is None else open_turn,
    tools,
    _variables(fields),
    forced,
    parallel is not False and not only_one,
    _effort(fields),
  )


def _effort(fields: Fields) -> str:
  effort = fields.text("reasoning_effort")
  if effort is not None and effort not in REASONING_EFFORTS:
    raise InvalidRequest(
      f"is not one that exists: send one of {', '.join(REASONING_EFFORTS)}", field="reasoning_effort"
    )
  return effort or ""


def _message(index: int, fields: Fields) -> Message:
  role = fields.text("role")
  if role is None:
    raise InvalidRequest("is missing: send system, user or assistant", field=f"messages[{index}].role")
  content = fields.take_value("content")
  if isinstance(content, list):
    content = "\n".join(_part(f"messages[{index}].content[{at}]", part) for at, part in enumerate(content))
  elif content is not None and not isinstance(content, str):
    fields.wrong("content", content, "a string or a list of text parts")
  more = {name: value for name in TURN_FIELDS if (value := fields.take_value(name)) is not None}
  if content is None and not more.get("tool_calls"):
    raise InvalidRequest("is missing: send a string", field=f"messages[{index}].content")
  return Message(role, content or "", _parsed_calls(index, more))


def _part(where: str, part: Any) -> str:
  if not isinstance(part, dict):
    raise InvalidRequest(f'is {kind_of(part)}: send parts like {{"type": "text", "text": "..."}}', field=where)
  kind, text = part.get("type"), part.get("text")
  if kind not in ("text", "input_text"):
    raise UnsupportedField("has a type that is not supported: this model reads parts of type text alone", field=where)
  if not isinstance(text, str):
    raise InvalidRequest(f"is {kind_of(text)}: send a string", field=f"{where}.text")
  return text


def _parsed_calls(index: int, more: dict[str, Any]) -> dict[str, Any]:
  """Templates read arguments of tool calls as objects; OpenAI sends their JSON text."""
  calls = more.get("tool_calls")
  if calls is None:
    return more

  def wrong() -> NoReturn:
    raise InvalidRequest(
      "is not a list of calls: send each with type function, and a function with a name and arguments as JSON text",
      field=f"messages[{index}].tool_calls",
    )

  if not isinstance(calls, list):
    wrong()
  parsed = []
  for call in calls:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
      wrong()
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
      try:
        arguments = parse_json_object(arguments.encode())
      except InvalidRequest:
        wrong()
    parsed.append({**call, "function": {**function, "arguments": arguments}})
  return {**more, "tool_calls": parsed}


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
  """(tools, those of which one must be called, whether that is a single call)."""
  tools = fields.list_of("tools", dict, "tools") or []
  choice = fields.take_value("tool_choice")
  if fields.take_value("functions") is not None or fields.take_value("function_call") is not None:
    raise UnsupportedField("is not supported: send tools, which took their place", field="functions")
  if len(tools) > MAX_TOOLS:
    raise InvalidRequest(f"has {len(tools)} entries, the limit is {MAX_TOOLS}: send fewer", field="tools")
  for index, tool in enumerate(tools):
    _check_tool(index, tool)
  names = [tool["function"]["name"] for tool in tools]
  if len(set(names)) < len(names):
    raise InvalidRequest("has two functions of one name: send each name once", field="tools")
  match choice:
    case None | "auto":
      return tools, [], False
    case "none":
      return [], [], False
    case "required":
      if not tools:
        raise InvalidRequest("is required, but there are no tools: send tools, or leave it out", field="tool_choice")
      return tools, tools, False
    case {"type": "function", "function": {"name": str(name)}}:
      if name not in names:
        raise InvalidRequest("is a function that is not among tools: name one of them", field="tool_choice")
      return tools, [tools[names.index(name)]], True
  raise InvalidRequest(
    'is not one that exists: send none, auto, required, or {"type": "function", "function": {"name": ...}}',
    field="tool_choice",
  )


def _check_tool(index: int, tool: dict[str, Any]) -> None:
  function = tool.get("function")
  name = function.get("name") if isinstance(function, dict) else None
  if tool.get("type") != "function" or not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
    raise InvalidRequest(
      "is not a function with a name: send type function, and a function with a name of 1 to 64 of A-Z a-z 0-9 _ -",
      field=f"tools[{index}]",
    )
  parameters = tool["function"].get("parameters")
  if parameters is not None and not isinstance(parameters, dict):
    raise InvalidRequest(
      f"is {kind_of(parameters)}: send a JSON schema, or leave it out", field=f"tools[{index}].function.parameters"
    )


def _rebased(schema: Any, root: str) -> Any:
  """A JSON schema whose references into itself start from `root` instead of "#"."""
  if isinstance(schema, list):
    return [_rebased(each, root) for each in schema]
  if not isinstance(schema, dict):
    return schema
  return {
    name: root + value[1:]
    if name == "$ref" and isinstance(value, str) and value.startswith("#")
    else value
    if name in ("const", "enum")
    else _rebased(value, root)
    for name, value in schema.items()
  }


def _variables(fields: Fields) -> dict[str, Any]:
  """chat_template_kwargs: switches that a template knows, such as enable_thinking."""
  values = fields.take_value("chat_template_kwargs")
  if values is None:
    return {}
  if not isinstance(values, dict):
    fields.wrong("chat_template_kwargs", values, "an object")
  for name, value in values.items():
    if isinstance(value, dict | list) or isinstance(value, str) and not _KWARG_TEXT.fullmatch(value):
      raise InvalidRequest(
        "has a value that is not taken: send true, false, numbers, or a word of at most 32 "
        f"letters{f' for {name}' if name.isidentifier() and len(name) < 40 else ''}",
        field="chat_template_kwargs",
      )
  return values
