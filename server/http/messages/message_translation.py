"""Turns the body of a message into that of a chat completion, which the chat pipeline checks. Starts nothing."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from server.http.error_responses import UnsupportedField
from server.http.messages.message_fields import (
  EFFORTS,
  HARMLESS_OF_PARTS,
  MESSAGE_ROLES,
  Block,
  ClientTool,
  CountTokensRequest,
  MessageRequest,
  MessageTurn,
  OutputFormat,
  ToolPreference,
)
from server.http.openai.generate_request import read_fields
from server.http.openai.request_fields import TOOL_NAME

_TEXT_REMEDY = "this model reads text alone, so send blocks of type text"
_THINKING = ("enabled", "adaptive", "disabled")


@dataclasses.dataclass(frozen=True, slots=True)
class TranslatedMessage[T: CountTokensRequest]:
  """A message as a chat.

  Attributes:
    fields: the body's fields.
    body: the same in the form of /v1/chat/completions.
    ignored: names of ignored fields.
    field_names: the caller's names of the body's fields, for errors.
  """

  fields: T
  body: dict[str, Any]
  ignored: list[str]
  field_names: dict[str, str]

  def name_ignored(self, names: Sequence[str]) -> list[str]:
    """Returns the caller's names of all ignored fields; `names` are those that the chat pipeline ignores."""
    found = list(self.ignored)
    for name in names:
      if name == "chat_template_kwargs.enable_thinking":
        # Under adaptive, a model that cannot think has decided not to.
        kind = "adaptive" if self.fields.thinking is None else self.fields.thinking.type
        found += ["thinking"] if kind != "adaptive" else []
      elif name == "reasoning_effort":
        found.append("output_config.effort")
      else:
        found.append(self.name_field(name))
    return found

  def name_field(self, name: str) -> str:
    """Returns the caller's name of a field of the body."""
    config = self.fields.output_config
    schema = "output_format.schema" if config is None or config.format is None else "output_config.format.schema"
    name = name.replace("response_format.json_schema.schema", schema)
    name = name.replace("thinking_token_budget", "thinking.budget_tokens")
    return name.replace(".function.parameters", ".input_schema").replace(".function.strict", ".strict")

  def name_constraint(self, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the pipeline's names of fields, with the caller's name of the output's schema."""
    return {name: self.name_field(shown) for name, shown in names.items()}


def translate_message(values: dict[str, Any]) -> TranslatedMessage[MessageRequest]:
  """Reads the body of /v1/messages.

  Raises:
    InvalidRequest: a field is wrong.
    UnsupportedField: a field or a block is not supported and must not be ignored.
  """
  translated = _translate(values, MessageRequest)
  fields, stops = translated.fields, translated.fields.stop_sequences or []
  translated.field_names.update(
    {"stop": "stop_sequences"} | {f"stop[{at}]": f"stop_sequences[{at}]" for at in range(len(stops))}
  )
  translated.body.update(
    max_tokens=fields.max_tokens,
    temperature=fields.temperature,
    top_p=fields.top_p,
    top_k=fields.top_k,
    stop=stops or None,
    stream=fields.stream,
    thinking_token_budget=_budget(fields),
    response_format=_response_format(fields),
  )
  return translated


def translate_prompt(values: dict[str, Any]) -> TranslatedMessage[CountTokensRequest]:
  """Reads the body of /v1/messages/count_tokens. Raises: see `translate_message`."""
  return _translate(values, CountTokensRequest)


def _translate[T: CountTokensRequest](values: dict[str, Any], kind: type[T]) -> TranslatedMessage[T]:
  fields, ignored = read_fields(values, kind)
  ignored += _undeclared_of_parts(values, fields)
  effort = fields.output_config.effort if fields.output_config is not None else None
  if effort is not None and effort not in EFFORTS:
    raise InvalidRequest(f"is not one that exists: send one of {', '.join(EFFORTS)}", field="output_config.effort")
  body: dict[str, Any] = {
    "model": fields.model,
    "messages": [*_system(fields), *_messages(fields.messages)],
    "reasoning_effort": effort,
    "chat_template_kwargs": {"enable_thinking": _enables_thinking(fields, ignored)},
  }
  if fields.tools:
    body["tools"] = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(fields.tools)]
  if fields.tool_choice is not None:
    body |= _tool_choice(fields.tool_choice, fields.tools or [])
  return TranslatedMessage(fields, body, ignored, {"chat": "messages"})


def _undeclared_of_parts(values: dict[str, Any], fields: CountTokensRequest) -> list[str]:
  """Returns the paths of unknown fields inside blocks, tools and options."""
  parts: list[tuple[str, Any, type[msgspec.Struct]]] = []
  if isinstance(fields.system, list):
    parts += ((f"system[{at}]", part, Block) for at, part in enumerate(values["system"]))
  for at, turn in enumerate(values["messages"]):
    parts.append((f"messages[{at}]", turn, MessageTurn))
    if isinstance(turn["content"], list):
      for place, part in enumerate(turn["content"]):
        where = f"messages[{at}].content[{place}]"
        parts.append((where, part, Block))
        if isinstance(part.get("content"), list):
          parts += ((f"{where}.content[{inner}]", each, Block) for inner, each in enumerate(part["content"]))
  if fields.tools is not None:
    parts += ((f"tools[{at}]", tool, ClientTool) for at, tool in enumerate(values["tools"]))
  for name in ("tool_choice", "thinking", "output_config", "output_format"):
    if (part := getattr(fields, name)) is not None:
      parts.append((name, values[name], type(part)))
  return [
    f"{where}.{name}"
    for where, part, kind in parts
    for name, value in part.items()
    if value is not None and name not in kind.__struct_fields__ and name not in HARMLESS_OF_PARTS
  ]


def _enables_thinking(fields: CountTokensRequest, ignored: list[str]) -> bool:
  """Returns whether the model should think; names a budget as ignored where it has no reasoning to limit."""
  thinking = fields.thinking
  if thinking is None:
    return False
  if thinking.type not in _THINKING:
    raise InvalidRequest(f"is not one that is served: send one of {', '.join(_THINKING)}", field="thinking.type")
  if thinking.display not in (None, "summarized", "omitted"):
    raise InvalidRequest("is not one that exists: send summarized or omitted", field="thinking.display")
  if thinking.budget_tokens is not None and thinking.type != "enabled":
    ignored.append("thinking.budget_tokens")
  return thinking.type != "disabled"


def _budget(fields: MessageRequest) -> int | None:
  thinking = fields.thinking
  if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
    return None
  if thinking.budget_tokens < 0:
    raise InvalidRequest(f"={thinking.budget_tokens} is not allowed: send 0 or more", field="thinking.budget_tokens")
  return thinking.budget_tokens


def _response_format(fields: MessageRequest) -> dict[str, Any] | None:
  config = fields.output_config
  found: list[tuple[str, OutputFormat]] = []
  if config is not None and config.format is not None:
    found.append(("output_config.format", config.format))
  if fields.output_format is not None:
    found.append(("output_format", fields.output_format))
  if not found:
    return None
  if len(found) > 1:
    raise InvalidRequest("is not allowed beside output_config.format: send one of them", field="output_format")
  [(name, form)] = found
  if form.type != "json_schema":
    raise InvalidRequest("is not one that exists: send json_schema", field=f"{name}.type")
  return {"type": "json_schema", "json_schema": {"schema": form.schema}}


def _system(fields: CountTokensRequest) -> list[dict[str, Any]]:
  """Returns the system message, if there is text for it."""
  if not fields.system:
    return []
  if isinstance(fields.system, str):
    return [{"role": "system", "content": fields.system}]
  return [{"role": "system", "content": [_text_part(f"system[{at}]", part) for at, part in enumerate(fields.system)]}]


def _messages(turns: Sequence[MessageTurn]) -> list[dict[str, Any]]:
  messages: list[dict[str, Any]] = []
  for at, turn in enumerate(turns):
    if turn.role not in MESSAGE_ROLES:
      raise InvalidRequest(
        f"is not one that exists: send one of {', '.join(MESSAGE_ROLES)}", field=f"messages[{at}].role"
      )
  if turns and turns[-1].role == "assistant":
    raise UnsupportedField(
      "of the last message is assistant, and the beginning of an answer is not supported: end with a message of "
      "role user",
      field=f"messages[{len(turns) - 1}].role",
    )
  # Consecutive messages of one role are one turn, since many templates accept only turns that alternate.
  for role, group in itertools.groupby(enumerate(turns), key=lambda each: each[1].role):
    blocks = [pair for at, turn in group for pair in _blocks(f"messages[{at}].content", turn.content)]
    if role == "assistant":
      messages += _assistant(blocks)
    else:
      messages += _user(role, blocks)
  return messages


def _blocks(where: str, content: str | list[Block]) -> list[tuple[str, Block]]:
  """Returns blocks with their places in the body."""
  if isinstance(content, str):
    return [(where, Block(type="text", text=content))]
  return [(f"{where}[{at}]", block) for at, block in enumerate(content)]


def _user(role: str, blocks: Sequence[tuple[str, Block]]) -> list[dict[str, Any]]:
  """Returns the messages of a user's turn: results of tools are messages of their own, in order."""
  messages: list[dict[str, Any]] = []
  for where, block in blocks:
    if block.type == "tool_result" and role == "user":
      call_id = _need(block.tool_use_id, f"{where}.tool_use_id")
      messages.append({"role": "tool", "tool_call_id": call_id, "content": _result_text(where, block)})
      continue
    if not messages or messages[-1]["role"] != role:
      messages.append({"role": role, "content": []})
    messages[-1]["content"].append(_text_part(where, block))
  return messages


def _result_text(where: str, block: Block) -> str:
  parts = [_text_part(place, part)["text"] for place, part in _blocks(f"{where}.content", block.content or [])]
  return ("Error: " if block.is_error else "") + "\n".join(parts)


def _assistant(blocks: Sequence[tuple[str, Block]]) -> list[dict[str, Any]]:
  """Returns the message of an assistant's turn."""
  texts, thoughts, calls = [], [], []
  for where, block in blocks:
    match block.type:
      case "thinking":
        thoughts.append(_need(block.thinking, f"{where}.thinking"))
      case "redacted_thinking":
        pass  # only Anthropic can read its data, which is named as ignored
      case "tool_use":
        call_id, name = _need(block.id, f"{where}.id"), _need(block.name, f"{where}.name")
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": block.input or {}}})
      case _:
        texts.append(_text_part(where, block)["text"])
  if not blocks:
    return []
  message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
  if thoughts:
    message["reasoning_content"] = "\n".join(thoughts)
  if calls:
    message["tool_calls"] = calls
  return [message]


def _text_part(where: str, block: Block) -> dict[str, Any]:
  if block.type != "text":
    raise UnsupportedField(f"has type {block.type!r:.40}, which is not supported: {_TEXT_REMEDY}", field=where)
  return {"type": "text", "text": _need(block.text, f"{where}.text")}


def _need(value: str | None, field: str) -> str:
  if value is None:
    raise InvalidRequest("is missing: send a string", field=field)
  return value


def _tool(where: str, tool: ClientTool) -> dict[str, Any]:
  if tool.type not in (None, "custom"):
    raise UnsupportedField(
      f"={tool.type!r:.40} is not supported: the server runs no tools and knows no schema of this one; send a tool "
      "with name, description and input_schema",
      field=f"{where}.type",
    )
  if not TOOL_NAME.fullmatch(tool.name):
    raise InvalidRequest("is not a tool's name: send 1 to 64 of A-Z a-z 0-9 _ -", field=f"{where}.name")
  if tool.input_schema is None:
    raise InvalidRequest("is missing: send a JSON schema", field=f"{where}.input_schema")
  function = {
    "name": tool.name,
    "description": tool.description,
    "parameters": tool.input_schema,
    "strict": tool.strict,
  }
  return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: ToolPreference, tools: Sequence[ClientTool]) -> dict[str, Any]:
  """Returns the fields tool_choice and parallel_tool_calls."""
  body: dict[str, Any] = {}
  if choice.disable_parallel_tool_use is not None:
    body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
  match choice.type:
    case "auto" | "none":
      return body | {"tool_choice": choice.type}
    case "any":
      if not tools:
        raise InvalidRequest("=any forces a call, but there are no tools: send tools", field="tool_choice.type")
      return body | {"tool_choice": "required"}
    case "tool":
      if choice.name not in [tool.name for tool in tools]:
        raise InvalidRequest("is not the name of one of tools: send one of them", field="tool_choice.name")
      return body | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    case _:
      raise InvalidRequest("is not one that exists: send auto, any, tool or none", field="tool_choice.type")
