"""Translates a Responses body into the body of a chat completion, whose checks do the rest. Starts no generation.

The texts of `instructions` and of leading system and developer messages become one system message, since many chat
templates take no second one. A reasoning item becomes the reasoning of the assistant's next turn.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
import secrets
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from server.http.error_responses import UnsupportedField
from server.http.openai.request_fields import TOOL_TYPES, SamplingFields
from server.http.responses.response_fields import (
  ENCRYPTED,
  INCLUDABLE,
  ITEM_TYPES,
  LOGPROBS,
  MAX_METADATA_CHARS,
  MAX_METADATA_NAME,
  MESSAGE_ROLES,
  FlatInputFormat,
  FlatTool,
  FunctionSelection,
  InputItem,
  InputPart,
  ReasoningOptions,
  ResponseRequest,
  TextFormat,
  TextSettings,
)

_SYSTEM_ROLES = ("system", "developer")
_TEXT_PARTS = ("input_text", "output_text")
_TOOL_FIELD = re.compile(r"(tools\[\d+\])\.(?:function|custom)\.")
_PREFIXES = {
  "message": "msg",
  "function_call": "fc",
  "function_call_output": "fco",
  "custom_tool_call": "ctc",
  "custom_tool_call_output": "ctco",
  "reasoning": "rs",
}
_NO_HOSTED_TOOLS = "the server runs no tools; send tools of type function or custom, and call them yourself"
# Names of a chat's fields in a Responses body.
_NAMES = {
  "chat": "input",
  "chat.messages": "input",
  "messages": "input",
  "prompt": "input",
  "max_tokens": "max_output_tokens",
  "max_completion_tokens": "max_output_tokens",
  "response_format": "text.format",
  "response_format.json_schema.schema": "text.format.schema",
  "logprobs": "include",
  "reasoning_effort": "reasoning.effort",
  "thinking_token_budget": "reasoning.max_tokens",
}
# Of `reasoning`; what else is in it is ignored.
_APPLIED = ("effort", "max_tokens")


def new_id(item_type: str) -> str:
  """Returns a new id for an item of a type."""
  return f"{_PREFIXES[item_type]}_{secrets.token_hex(24)}"


@dataclasses.dataclass(frozen=True, slots=True)
class ToolName:
  """What a client calls a function: its name, and its namespace if it is in one."""

  name: str
  namespace: str | None = None


@dataclasses.dataclass
class TranslatedChat:
  """A Responses body as a chat.

  Attributes:
    body: the body of the chat completion.
    names: the caller's names of the chat's fields.
    ignored: the caller's names of fields without effect.
    tools: the functions by the names that the model calls them.
    items: the items of the prompt, all with a type and an id: those of earlier responses, then the request's own.
  """

  body: dict[str, Any]
  names: dict[str, str]
  ignored: list[str]
  tools: dict[str, ToolName]
  items: list[dict[str, Any]]

  def name_field(self, name: str) -> str:
    """Returns the caller's name of a field of the chat."""
    tool = _TOOL_FIELD.match(name)
    if tool and tool[1] in self.names:
      return f"{self.names[tool[1]]}.{name[tool.end() :].replace('format.grammar.', 'format.')}"
    return self.names.get(name, name)


def translate_response(
  values: Mapping[str, Any],
  fields: ResponseRequest,
  earlier: Sequence[dict[str, Any]],
  known: Mapping[str, dict[str, Any]],
) -> TranslatedChat:
  """Translates a body.

  Args:
    values: the body.
    fields: its fields.
    earlier: the items of the previous response.
    known: the stored items that `list_references` names, by id, as far as they exist.

  Raises:
    InvalidRequest: a value is not allowed.
    UnsupportedField: a tool, an item or an option is not supported.
  """
  chat = TranslatedChat({}, dict(_NAMES), [], {}, [])
  chat.body |= {name: values.get(name) for name in SamplingFields.__struct_fields__}
  chat.body["max_completion_tokens"] = fields.max_output_tokens
  _translate_include(fields, chat)
  _check_metadata(fields.metadata or {})
  chat.body["chat_template_kwargs"] = fields.chat_template_kwargs
  chat.body["parallel_tool_calls"] = fields.parallel_tool_calls
  _translate_tools(values, fields, chat)
  _translate_text(values.get("text"), fields.text, chat)
  _translate_reasoning(values.get("reasoning"), fields.reasoning, chat)
  own = _read_items(values, fields, known)
  chat.items = [*earlier, *(item for _, item in own)]
  _translate_items([*(("previous_response_id", item) for item in earlier), *own], fields.instructions, chat)
  if chat.body.get("logprobs") and chat.tools:
    raise UnsupportedField(
      f"with {LOGPROBS} is not supported beside tools, whose calls have no log probabilities: send tool_choice=none, "
      "or leave one of them out",
      field="include",
    )
  chat.body = {name: value for name, value in chat.body.items() if value is not None}
  return chat


def _translate_include(fields: ResponseRequest, chat: TranslatedChat) -> None:
  for index, name in enumerate(fields.include or []):
    if name not in INCLUDABLE:
      raise InvalidRequest(f"is not one that exists: send {LOGPROBS}, or leave it out", field=f"include[{index}]")
    if name == ENCRYPTED:
      chat.ignored.append(f"include[{index}]")
  if LOGPROBS in (fields.include or []):
    chat.body |= {"logprobs": True, "top_logprobs": fields.top_logprobs}
  elif fields.top_logprobs:
    raise InvalidRequest(
      f"={fields.top_logprobs} is allowed with {LOGPROBS} in include alone: send both", field="top_logprobs"
    )


def _check_metadata(metadata: Mapping[str, str]) -> None:
  for name, value in metadata.items():
    if len(name) > MAX_METADATA_NAME or len(value) > MAX_METADATA_CHARS:
      raise InvalidRequest(
        f"has a name of {len(name)} characters with a value of {len(value)}: send at most {MAX_METADATA_NAME} and "
        f"{MAX_METADATA_CHARS}",
        field="metadata",
      )


def _translate_text(values: Any, text: TextSettings | None, chat: TranslatedChat) -> None:
  if text is None:
    return
  chat.ignored += (f"text.{name}" for name in values.keys() - set(TextSettings.__struct_fields__))
  if text.verbosity not in (None, "medium"):
    raise UnsupportedField(
      "is not supported: send medium, and say in the input how long the answer should be", field="text.verbosity"
    )
  match text.format:
    case None | TextFormat(type="text"):
      return
    case TextFormat(type="json_object"):
      chat.body["response_format"] = {"type": "json_object"}
    case TextFormat(type="json_schema", schema=schema, strict=strict):
      if schema is None:
        raise InvalidRequest("is missing: send a JSON schema", field="text.format.schema")
      chat.body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
    case _:
      raise InvalidRequest("is not one that exists: send text, json_object or json_schema", field="text.format.type")


def _translate_reasoning(values: Any, reasoning: ReasoningOptions | None, chat: TranslatedChat) -> None:
  if reasoning is None:
    return
  chat.ignored += (f"reasoning.{name}" for name, value in values.items() if value is not None and name not in _APPLIED)
  chat.body |= {"reasoning_effort": reasoning.effort, "thinking_token_budget": reasoning.max_tokens}


# Tools.


def _translate_tools(values: Mapping[str, Any], fields: ResponseRequest, chat: TranslatedChat) -> None:
  """Sets the chat's tools and its choice among them; a namespace's functions become functions of longer names."""
  found: list[tuple[str, ToolName, FlatTool]] = []
  for index, tool in enumerate(fields.tools or []):
    place = f"tools[{index}]"
    if tool.type in TOOL_TYPES:
      found.append((place, ToolName(tool.name or ""), tool))
    elif tool.type == "namespace":
      for at, inner in enumerate(tool.tools or []):
        if inner.type not in TOOL_TYPES:
          raise _unsupported_tool(f"{place}.tools[{at}]")
        found.append((f"{place}.tools[{at}]", ToolName(inner.name or "", tool.name), inner))
    elif tool.type == "web_search" and values["tools"][index].get("external_web_access") is False:
      # Codex sends it. Nobody can miss a search that may not reach the web.
      chat.ignored.append(f"tools[{index}]")
    else:
      raise _unsupported_tool(place)
  choice = fields.tool_choice
  if isinstance(choice, FunctionSelection) and choice.type == "allowed_tools":
    wanted = [_selected_name(f"tool_choice.tools[{at}]", each) for at, each in enumerate(choice.tools or [])]
    for at, name in enumerate(wanted):
      if all(name != known for _, known, _ in found):
        raise InvalidRequest("is not among tools: name one of them", field=f"tool_choice.tools[{at}]")
    found = [each for each in found if each[1] in wanted]
    if choice.mode not in (None, "auto", "required"):
      raise InvalidRequest("is not one that exists: send auto or required", field="tool_choice.mode")
    chat.body["tool_choice"] = choice.mode
  elif isinstance(choice, FunctionSelection):
    name = _chat_name(_selected_name("tool_choice", choice))
    chat.body["tool_choice"] = {"type": choice.type, choice.type: {"name": name}}
  else:
    chat.body["tool_choice"] = choice
  tools: list[dict[str, Any]] = []
  for place, name, tool in found:
    chat.names[f"tools[{len(tools)}]"] = place
    if choice != "none":
      chat.tools[_chat_name(name)] = name
    content: dict[str, Any] = {"name": _chat_name(name), "description": tool.description}
    if tool.type == "custom":
      content["format"] = _input_format(tool.format)
    else:
      content |= {"parameters": tool.parameters, "strict": tool.strict}
    tools.append({"type": tool.type, tool.type: {key: value for key, value in content.items() if value is not None}})
  if tools:
    chat.body["tools"] = tools


def _input_format(form: FlatInputFormat | None) -> dict[str, Any] | None:
  if form is None:
    return None
  if form.syntax is None and form.definition is None:
    return {"type": form.type}
  return {"type": form.type, "grammar": {"syntax": form.syntax or "", "definition": form.definition or ""}}


def _unsupported_tool(place: str) -> UnsupportedField:
  return UnsupportedField(f"has a type that is not supported: {_NO_HOSTED_TOOLS}", field=place)


def _selected_name(place: str, choice: FunctionSelection) -> ToolName:
  if choice.type not in TOOL_TYPES:
    raise UnsupportedField(f"has a type that is not supported: {_NO_HOSTED_TOOLS}", field=place)
  if choice.name is None:
    raise InvalidRequest("is missing: send the tool's name", field=f"{place}.name")
  return ToolName(choice.name, choice.namespace)


def _chat_name(name: ToolName) -> str:
  return f"{name.namespace}__{name.name}" if name.namespace else name.name


# Items.


def list_references(fields: ResponseRequest) -> list[str]:
  """Returns the ids of stored items to which the input refers."""
  items = fields.input if isinstance(fields.input, list) else []
  return [item.id for item in items if item.id and _kind_of(item) == "item_reference"]


def _kind_of(item: InputItem) -> str:
  return item.type or ("item_reference" if item.id and item.role is None else "message")


def _read_items(
  values: Mapping[str, Any],
  fields: ResponseRequest,
  known: Mapping[str, dict[str, Any]],
) -> list[tuple[str, dict[str, Any]]]:
  """Returns the path and the item of each item of the input, with references replaced by what they stand for."""
  if fields.input is None:
    if fields.previous_response_id is None:
      raise InvalidRequest("is missing: send a string or a list of items", field="input")
    return []
  if isinstance(fields.input, str):
    content = [{"type": "input_text", "text": fields.input}]
    return [("input", {"type": "message", "id": new_id("message"), "role": "user", "content": content})]
  items: list[tuple[str, dict[str, Any]]] = []
  for index, (item, value) in enumerate(zip(fields.input, values["input"], strict=True)):
    place = f"input[{index}]"
    kind = _kind_of(item)
    if kind == "item_reference":
      stored = known.get(item.id or "")
      if stored is None:
        raise InvalidRequest("is not the id of a stored item: send the item itself", field=f"{place}.id")
      items.append((place, stored))
      continue
    if kind not in ITEM_TYPES:
      raise UnsupportedField(
        f"is a type that is not supported: send {', '.join(ITEM_TYPES[:-1])} or {ITEM_TYPES[-1]}", field=f"{place}.type"
      )
    items.append((place, {**value, "type": kind, "id": item.id or new_id(kind)}))
  return items


def _translate_items(
  items: Sequence[tuple[str, dict[str, Any]]], instructions: str | None, chat: TranslatedChat
) -> None:
  """Sets the chat's messages."""
  messages: list[dict[str, Any]] = []
  calls: set[str] = set()
  reasoning: list[str] = []
  is_open = False  # the last message is the assistant's, and takes calls

  def add_message(place: str, message: dict[str, Any]) -> None:
    for name in ("messages", "chat.messages"):
      chat.names |= {f"{name}[{len(messages)}]{part}": f"{place}{part}" for part in ("", ".role", ".content")}
    messages.append(message)

  if instructions:
    add_message("instructions", {"role": "system", "content": instructions})
  for place, value in items:
    item = msgspec.convert(value, InputItem)
    if item.type == "reasoning":
      text = _join_parts(item.content or [], f"{place}.content", ("reasoning_text",))
      if text:
        reasoning.append(text)
      elif place != "previous_response_id":
        chat.ignored.append(place)
      is_open = False
    elif item.type in ("function_call", "custom_tool_call"):
      text_field = "arguments" if item.type == "function_call" else "input"
      name, text, call_id = (_need(place, item, field) for field in ("name", text_field, "call_id"))
      if not is_open:
        add_message(place, {"role": "assistant", "content": "", **_take_reasoning(reasoning)})
        is_open = True
      turn = messages[-1].setdefault("tool_calls", [])
      chat.names[f"messages[{len(messages) - 1}].tool_calls[{len(turn)}].function.arguments"] = f"{place}.arguments"
      kind = "function" if item.type == "function_call" else "custom"
      called = {"name": _chat_name(ToolName(name, item.namespace)), text_field: text}
      turn.append({"id": call_id, "type": kind, kind: called})
      calls.add(call_id)
    elif item.type in ("function_call_output", "custom_tool_call_output"):
      call_id = _need(place, item, "call_id")
      if call_id not in calls:
        raise InvalidRequest(
          "is of no call in the input: send the call before it, or previous_response_id",
          field=f"{place}.call_id",
        )
      if item.output is None:
        raise InvalidRequest("is missing: send a string", field=f"{place}.output")
      output = _join_parts(item.output, f"{place}.output", _TEXT_PARTS)
      add_message(place, {"role": "tool", "tool_call_id": call_id, "content": output})
      is_open = False
    else:
      role = _need(place, item, "role")
      if role not in MESSAGE_ROLES:
        raise InvalidRequest(f"is unknown: send one of {', '.join(MESSAGE_ROLES)}", field=f"{place}.role")
      if item.content is None:
        raise InvalidRequest("is missing: send a string or a list of parts", field=f"{place}.content")
      content = _join_parts(item.content, f"{place}.content", _TEXT_PARTS)
      if role in _SYSTEM_ROLES and messages and all(message["role"] == "system" for message in messages):
        messages[0]["content"] += f"\n\n{content}"
        continue
      is_open = role == "assistant"
      add_message(
        place,
        {
          "role": "system" if role in _SYSTEM_ROLES else role,
          "content": content,
          **(_take_reasoning(reasoning) if is_open else {}),
        },
      )
    if item.type not in ("reasoning", "function_call", "custom_tool_call") and not is_open:
      reasoning.clear()  # of a turn that never came
  if not messages:
    raise InvalidRequest("is empty: send at least one message", field="input")
  chat.body["messages"] = messages


def _take_reasoning(reasoning: list[str]) -> dict[str, str]:
  text = "\n".join(reasoning)
  reasoning.clear()
  return {"reasoning_content": text} if text else {}


def _need(place: str, item: InputItem, field: str) -> str:
  value = getattr(item, field)
  if value is None:
    raise InvalidRequest("is missing: send a string", field=f"{place}.{field}")
  return value


def _join_parts(content: str | Sequence[InputPart], place: str, types: Sequence[str]) -> str:
  if isinstance(content, str):
    return content
  texts: list[str] = []
  for index, part in enumerate(content):
    if part.type not in types and part.type != "refusal":
      raise UnsupportedField(
        f"has a type that is not supported: the model reads parts of type {' and '.join(types)} alone",
        field=f"{place}[{index}]",
      )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
      raise InvalidRequest(
        "is missing: send a string", field=f"{place}[{index}].{'refusal' if part.type == 'refusal' else 'text'}"
      )
    texts.append(text)
  return "\n".join(texts)
