"""Reads the parts of a chat's prompt: messages, tools and the template's variables. Starts no generation."""

import dataclasses
import json
import re
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from server.http.error_responses import UnsupportedField
from server.http.json_fields import parse_json_object
from server.http.model_output.call_formats import CallFormat
from server.http.model_output.custom_tools import INPUT, describe_custom_tool
from server.http.openai.generate_request import relax_schema
from server.http.openai.request_fields import (
  REASONING_EFFORTS,
  SYNTAXES,
  TOOL_NAME,
  ChatCompletionRequest,
  ChatTurn,
  ChosenTools,
  ContentPart,
  CustomTool,
  EarlierCall,
  InputGrammar,
  TokenizeChat,
)
from server.text.chat_template import Message
from server.text.tokenizer import Tokenizer

# Limit of calls in one response under forced calls, so that it ends.
MAX_FORCED_CALLS = 16
# The key of an earlier call's arguments that are no JSON object.
RAW_ARGUMENTS = "__raw"
_KWARG_TEXT = re.compile(r"[A-Za-z0-9_-]{0,32}")
# Fields of a message besides role, content and tool calls; templates of models with tools read them.
_TURN_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning")


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
  """The input of the model's template, and the calls that the response may or must have.

  Attributes:
    fields: the request's fields.
    messages: messages in the template's form.
    tools: OpenAI's descriptions; empty under tool_choice "none".
    forced: the response must call at least one of these tools, and then consists of calls alone.
    custom: the custom tools among them, by name; the model reads them as functions.
    places: the place of each tool in the body, by name.
  """

  fields: ChatCompletionRequest | TokenizeChat
  messages: list[Message]
  tools: list[dict[str, Any]]
  forced: list[dict[str, Any]]
  custom: dict[str, CustomTool]
  places: dict[str, int]

  @property
  def forced_input(self) -> tuple[str, InputGrammar] | None:
    """The one tool that is forced, if it is a custom tool with a grammar, and that grammar."""
    if len(self.forced) != 1:
      return None
    name = self.forced[0]["function"]["name"]
    grammar = self._grammar_of(name)
    return None if grammar is None else (name, grammar)

  def name_of_tool(self, name: str) -> str:
    """Returns the path of a tool in the body."""
    return f"tools[{self.places[name]}].{'custom' if name in self.custom else 'function'}"

  def _grammar_of(self, name: str) -> InputGrammar | None:
    tool = self.custom.get(name)
    return None if tool is None or tool.format is None else tool.format.grammar

  @property
  def parallel(self) -> bool:
    """Whether the response may have several calls. Forced calls are one by default: a weak model would not stop."""
    return bool(self.fields.parallel_tool_calls) if self.forced else self.fields.parallel_tool_calls is not False

  def token_ids(self, tokenizer: Tokenizer) -> list[int]:
    """Returns the prompt's token ids. Forced calls need no template that knows tools."""
    tools = self.tools if self.tools and not (self.forced and not tokenizer.knows_tools) else None
    return tokenizer.encode_chat(
      self.messages,
      add_generation_prompt=self.fields.add_generation_prompt is not False,
      tools=tools,
      variables=self._effort_variables() | (self.fields.chat_template_kwargs or {}),
    )

  def ignored(self, tokenizer: Tokenizer) -> list[str]:
    """Names of fields without effect: variables that the template does not read, and what would constrain a call
    where none is forced: `strict`, and a custom tool's grammar.
    """
    ignored = [
      f"chat_template_kwargs.{name}" for name in tokenizer.unread_variables(self.fields.chat_template_kwargs or {})
    ]
    effort = self._effort_variables()
    if effort and len(tokenizer.unread_variables(effort)) == len(effort):
      ignored.append("reasoning_effort")
    if not self.forced:
      for tool in self.tools:
        name = tool["function"]["name"]
        if tool["function"].get("strict"):
          ignored.append(f"{self.name_of_tool(name)}.strict")
        if self._grammar_of(name) is not None:
          ignored.append(f"{self.name_of_tool(name)}.format")
    return ignored

  def _effort_variables(self) -> dict[str, Any]:
    """Returns the variables that vLLM passes to templates for it."""
    effort = self.fields.reasoning_effort
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}

  def call_schema(self, form: CallFormat, *, closes: bool, strict: bool) -> tuple[str, list[str]]:
    """Returns the JSON schema of the forced list of calls, as text, and names of its keywords that are not enforced.

    Args:
      form: the format of calls.
      closes, strict: see `relax_schema`. A tool may also be strict itself.

    Raises:
      InvalidRequest: a tool's parameters are no schema, or exceed a limit.
      UnsupportedField: a strict tool has a keyword that is not enforced.
    """
    schemas, definitions, ignored = [], {}, []
    for place, tool in enumerate(self.forced):
      function = tool["function"]
      if self._grammar_of(function["name"]) is not None:
        raise UnsupportedField(
          "is not supported where one of several tools is forced: name this tool in tool_choice, or send no grammar",
          field=f"{self.name_of_tool(function['name'])}.format",
        )
      parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
      text, names = relax_schema(
        json.dumps(parameters),
        f"{self.name_of_tool(function['name'])}.parameters",
        closes=closes,
        strict=strict or bool(function.get("strict")),
      )
      parameters = json.loads(text)
      ignored += names
      if "$ref" in text:
        # References start at the document's root, and here the tool's schema is inside another document.
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
    whole = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": schemas}, "$defs": definitions}
    return json.dumps(whole, ensure_ascii=False), ignored


def read_chat(values: dict[str, Any], fields: ChatCompletionRequest | TokenizeChat) -> Chat:
  """Reads a chat from a body.

  Args:
    values: the body. Templates get its tools unchanged.
    fields: the body's fields, from `read_fields`.

  Raises:
    InvalidRequest: a value is not allowed.
    UnsupportedField: a part of a message is not text.
  """
  if fields.reasoning_effort is not None and fields.reasoning_effort not in REASONING_EFFORTS:
    raise InvalidRequest(
      f"is not one that exists: send one of {', '.join(REASONING_EFFORTS)}", field="reasoning_effort"
    )
  for name, value in (fields.chat_template_kwargs or {}).items():
    if isinstance(value, str) and not _KWARG_TEXT.fullmatch(value):
      raise InvalidRequest(
        "has a value that is not taken: send true, false, numbers, or a word of at most 32 "
        f"letters{f' for {name}' if name.isidentifier() and len(name) < 40 else ''}",
        field="chat_template_kwargs",
      )
  functions = _list_functions(values.get("tools") or [], fields)
  places = {tool["function"]["name"]: place for place, tool in enumerate(functions)}
  tools, forced = _choose_tools(functions, fields)
  messages = [_message(f"messages[{index}]", turn) for index, turn in enumerate(fields.messages)]
  custom = {tool.custom.name: tool.custom for tool in fields.tools or [] if tool.custom is not None}
  return Chat(fields, messages, tools, forced, custom, places)


def _message(where: str, turn: ChatTurn) -> Message:
  content = turn.content
  if isinstance(content, list):
    content = "\n".join(_text_of(f"{where}.content[{at}]", part) for at, part in enumerate(content))
  if content is None and not turn.tool_calls and turn.role != "assistant":
    raise InvalidRequest("is missing: send a string", field=f"{where}.content")
  more = {name: value for name in _TURN_FIELDS if (value := getattr(turn, name)) is not None}
  reasoning = turn.reasoning_content or turn.reasoning
  if reasoning is not None:  # templates read one name or the other
    more |= {"reasoning_content": reasoning, "reasoning": reasoning}
  if turn.tool_calls is not None:
    more["tool_calls"] = [_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(turn.tool_calls)]
  return Message(turn.role, content or "", more)


def _text_of(where: str, part: ContentPart) -> str:
  if part.type not in ("text", "input_text"):
    raise UnsupportedField("has a type that is not supported: this model reads parts of type text alone", field=where)
  if part.text is None:
    raise InvalidRequest("is missing: send a string", field=f"{where}.text")
  return part.text


def _call(where: str, call: EarlierCall) -> dict[str, Any]:
  """Returns a call with its arguments as an object, as templates read them; OpenAI sends JSON text.

  A model may have written arguments that are no JSON object. Templates read the keys of an object, so that text becomes
  the value of one key.
  """
  if call.custom is not None:
    function = {"name": call.custom.name, "arguments": {INPUT: call.custom.input}}
    return {"id": call.id, "type": "function", "function": function}
  if call.function is None:
    raise InvalidRequest("is missing: send a function with its name and arguments", field=f"{where}.function")
  arguments = call.function.arguments or {}
  if isinstance(arguments, str):
    try:
      arguments = parse_json_object(arguments.encode())
    except InvalidRequest:
      arguments = {RAW_ARGUMENTS: arguments}
  return msgspec.to_builtins(call) | {"function": {"name": call.function.name, "arguments": arguments}}


def _list_functions(tools: list[dict[str, Any]], fields: ChatCompletionRequest | TokenizeChat) -> list[dict[str, Any]]:
  """Returns the tools, each of which is a function; one stands for each custom tool."""
  functions = []
  for index, (tool, value) in enumerate(zip(fields.tools or [], tools, strict=True)):
    place = f"tools[{index}]"
    if tool.type == "custom":
      functions.append(_describe_custom_tool(f"{place}.custom", tool.custom))
      continue
    if tool.type != "function" or tool.function is None or not TOOL_NAME.fullmatch(tool.function.name):
      raise InvalidRequest(
        "is not a function with a name: send type function, and a function with a name of 1 to 64 of A-Z a-z 0-9 _ -",
        field=place,
      )
    functions.append(value)
  return functions


def _describe_custom_tool(where: str, tool: CustomTool | None) -> dict[str, Any]:
  if tool is None or not TOOL_NAME.fullmatch(tool.name):
    raise InvalidRequest(
      "is not a custom tool with a name: send a name of 1 to 64 of A-Z a-z 0-9 _ -",
      field=where if tool is None else f"{where}.name",
    )
  form, syntax, definition = tool.format, "", ""
  if form is not None and form.type == "grammar":
    if form.grammar is None:
      raise InvalidRequest("is missing: send syntax and definition", field=f"{where}.format.grammar")
    syntax, definition = form.grammar.syntax, form.grammar.definition
    if syntax not in SYNTAXES:
      raise InvalidRequest("is not one that exists: send lark or regex", field=f"{where}.format.grammar.syntax")
    if not definition:
      raise InvalidRequest("is empty: send a grammar", field=f"{where}.format.grammar.definition")
  elif form is not None and (form.type != "text" or form.grammar is not None):
    raise InvalidRequest("is not one that exists: send text, or grammar with a grammar", field=f"{where}.format.type")
  return describe_custom_tool(tool.name, tool.description, syntax, definition)


def _choose_tools(
  tools: list[dict[str, Any]], fields: ChatCompletionRequest | TokenizeChat
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Returns (tools, forced tools)."""
  names = [tool["function"]["name"] for tool in tools]
  if len(set(names)) < len(names):
    raise InvalidRequest("has two functions of one name: send each name once", field="tools")
  match fields.tool_choice:
    case None | "auto":
      return tools, []
    case "none":
      return [], []
    case "required":
      if not tools:
        raise InvalidRequest("is required, but there are no tools: send tools, or leave it out", field="tool_choice")
      return tools, tools
    case ChosenTools(type="function" | "custom" as kind) if chosen := getattr(fields.tool_choice, kind):
      if chosen.name not in names:
        raise InvalidRequest("is a tool that is not among tools: name one of them", field="tool_choice")
      return tools, [tools[names.index(chosen.name)]]
    case ChosenTools(type="allowed_tools") as chosen:
      return _choose_allowed(tools, names, chosen)
    case _:
      pass
  raise InvalidRequest(
    'is not one that exists: send none, auto, required, {"type": "function", "function": {"name": ...}}, or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}',
    field="tool_choice",
  )


def _choose_allowed(
  tools: list[dict[str, Any]], names: list[str], chosen: ChosenTools
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Returns (allowed tools, forced tools). The template gets the allowed ones alone."""
  nested = chosen.allowed_tools
  mode, selected = (chosen.mode, chosen.tools) if nested is None else (nested.mode, nested.tools)
  where = "tool_choice" if nested is None else "tool_choice.allowed_tools"
  if mode not in ("auto", "required"):
    raise InvalidRequest("is not one that exists: send auto or required", field=f"{where}.mode")
  if not selected:
    raise InvalidRequest("is empty: send at least one of tools", field=f"{where}.tools")
  allowed: set[str] = set()
  for at, each in enumerate(selected):
    named = each.custom if each.type == "custom" else each.function
    name = each.name if named is None else named.name
    if name not in names:
      raise InvalidRequest("is not among tools: name one of them", field=f"{where}.tools[{at}]")
    allowed.add(name)
  found = [tool for tool in tools if tool["function"]["name"] in allowed]
  return found, found if mode == "required" else []


def _rebased(schema: Any, root: str) -> Any:
  """Returns a JSON schema whose references to itself start at `root` instead of "#"."""
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
