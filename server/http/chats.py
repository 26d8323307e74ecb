"""What a chat's prompt is made of: messages, tools and the template's own switches. Starts no generation."""

import dataclasses
import re
from typing import Any, NoReturn

from engine.errors import InvalidRequest
from server.chat_template import Message
from server.http.errors import UnsupportedField
from server.http.fields import Fields, kind_of, parse
from server.tokenizer import Tokenizer

MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KWARG_TEXT = re.compile(r"[A-Za-z0-9_-]{0,32}")
# What a turn may have besides role and content; templates of models with tools read these.
_TURN_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
  """What the model's template gets."""

  messages: list[Message]
  add_generation_prompt: bool
  tools: list[dict[str, Any]] | None
  variables: dict[str, Any]

  def token_ids(self, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_chat(
      self.messages,
      add_generation_prompt=self.add_generation_prompt,
      tools=self.tools,
      variables=self.variables,
    )


def read_chat(fields: Fields) -> Chat:
  """Takes the fields of a chat's prompt.

  Raises:
    InvalidRequest: a value of the wrong kind.
    UnsupportedField: not text, or another template than the model's.
  """
  if fields.take("chat_template") is not None:
    raise UnsupportedField("chat_template is not supported: the template is the model's own; leave it out")
  if fields.flag("continue_final_message"):
    raise UnsupportedField("continue_final_message is not supported: send the prompt to /v1/completions")
  if fields.flag("add_special_tokens"):
    raise UnsupportedField("add_special_tokens is not supported: the model's template writes them; leave it out")
  modalities = fields.take("modalities")
  if modalities is not None and modalities != ["text"]:
    raise UnsupportedField('modalities is not supported: the model writes text; leave it out, or send ["text"]')
  if fields.take("audio") is not None:
    raise UnsupportedField("audio is not supported: the model writes text; leave it out")
  messages = fields.list_of("messages", dict, "messages")
  if messages is None:
    raise InvalidRequest("messages is missing: send a list of messages with role and content")
  open_turn = fields.flag("add_generation_prompt")
  return Chat(
    [_message(index, Fields(message, f"messages[{index}].")) for index, message in enumerate(messages)],
    True if open_turn is None else open_turn,
    _tools(fields),
    _variables(fields),
  )


def _message(index: int, fields: Fields) -> Message:
  role = fields.text("role")
  if role is None:
    raise InvalidRequest(f"messages[{index}].role is missing: send system, user or assistant")
  content = fields.take("content")
  if isinstance(content, list):
    content = "\n".join(_part(f"messages[{index}].content[{at}]", part) for at, part in enumerate(content))
  elif content is not None and not isinstance(content, str):
    fields.wrong("content", content, "a string or a list of text parts")
  more = {name: value for name in _TURN_FIELDS if (value := fields.take(name)) is not None}
  if content is None and not more.get("tool_calls"):
    raise InvalidRequest(f"messages[{index}].content is missing: send a string")
  return Message(role, content or "", _parsed_calls(index, more))


def _part(where: str, part: Any) -> str:
  if not isinstance(part, dict):
    raise InvalidRequest(f'{where} is {kind_of(part)}: send parts like {{"type": "text", "text": "..."}}')
  kind, text = part.get("type"), part.get("text")
  if kind not in ("text", "input_text"):
    raise UnsupportedField(f"{where} has a type that is not supported: this model reads parts of type text alone")
  if not isinstance(text, str):
    raise InvalidRequest(f"{where}.text is {kind_of(text)}: send a string")
  return text


def _parsed_calls(index: int, more: dict[str, Any]) -> dict[str, Any]:
  """Templates read arguments of tool calls as objects; OpenAI sends their JSON text."""
  calls = more.get("tool_calls")
  if calls is None:
    return more

  def wrong() -> NoReturn:
    raise InvalidRequest(
      f"messages[{index}].tool_calls is not a list of calls: send each with type function, and a function with a name "
      "and arguments as JSON text"
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
        arguments = parse(arguments.encode())
      except InvalidRequest:
        wrong()
    parsed.append({**call, "function": {**function, "arguments": arguments}})
  return {**more, "tool_calls": parsed}


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
  tools = fields.list_of("tools", dict, "tools")
  choice = fields.take("tool_choice")
  if fields.take("functions") is not None or fields.take("function_call") is not None:
    raise UnsupportedField("functions is not supported: send tools, which took their place")
  if choice not in (None, "none", "auto"):
    raise UnsupportedField(
      "tool_choice is not supported but as none and auto: forced calls are not there yet; send the call's schema as "
      "response_format"
    )
  if not tools or choice == "none":
    return None
  if len(tools) > MAX_TOOLS:
    raise InvalidRequest(f"tools has {len(tools)} entries, the limit is {MAX_TOOLS}: send fewer")
  for index, tool in enumerate(tools):
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
      raise InvalidRequest(
        f"tools[{index}] is not a function with a name: send type function, and a function with a name of 1 to 64 of "
        "A-Z a-z 0-9 _ -"
      )
  return tools


def _variables(fields: Fields) -> dict[str, Any]:
  """chat_template_kwargs: switches that a template knows, such as enable_thinking."""
  values = fields.take("chat_template_kwargs")
  if values is None:
    return {}
  if not isinstance(values, dict):
    fields.wrong("chat_template_kwargs", values, "an object")
  for name, value in values.items():
    if isinstance(value, dict | list) or isinstance(value, str) and not _KWARG_TEXT.fullmatch(value):
      raise InvalidRequest(
        "chat_template_kwargs has a value that is not taken: send true, false, numbers, or a word of at most 32 "
        f"letters{f' for {name}' if name.isidentifier() and len(name) < 40 else ''}"
      )
  return values
