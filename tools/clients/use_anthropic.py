"""Uses a server through the anthropic SDK as its users do; any fault is an exception. Knows nothing of Sluice.

python use_anthropic.py http://127.0.0.1:8000 MODEL
"""

import sys
from typing import Any

import anthropic

_WEATHER = {
  "name": "get_weather",
  "description": "The weather in a city.",
  "input_schema": {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
  },
}


def main(base_url: str, model: str) -> None:
  """Gets a whole and a streamed message, counts tokens, has a tool called and answered, and meets an error."""
  client = anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0)
  question: list[Any] = [{"role": "user", "content": "37 + 5 = ?"}]
  options: dict[str, Any] = {"model": model, "max_tokens": 12, "extra_body": {"temperature": 0}}
  whole = client.messages.create(messages=question, **options)
  [block] = whole.content
  assert block.type == "text" and whole.stop_reason in ("end_turn", "max_tokens"), whole
  with client.messages.stream(messages=question, **options) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
  assert "".join(pieces) == block.text == final.content[0].to_dict()["text"], pieces
  assert final.usage.output_tokens == whole.usage.output_tokens, final
  counted = client.messages.count_tokens(model=model, messages=question).input_tokens
  assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0), (counted, whole.usage)

  talk: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
  tools: dict[str, Any] = {**options, "tools": [_WEATHER], "max_tokens": 100}
  called = client.messages.create(messages=talk, tool_choice={"type": "any"}, **tools)
  [call] = called.content
  assert call.type == "tool_use" and call.name == "get_weather" and called.stop_reason == "tool_use", called
  assert call.input["city"] in ("Oslo", "Paris", "Rome"), call
  talk += [
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
  ]
  followed = client.messages.create(messages=talk, tool_choice={"type": "auto"}, **tools)
  assert followed.stop_reason in ("end_turn", "max_tokens", "tool_use"), followed
  try:
    client.messages.create(model="another", max_tokens=1, messages=question)
  except anthropic.NotFoundError as error:
    assert error.request_id, error
  else:
    raise AssertionError("a model that is not there was served")
  print(f"{block.text!r}, {call.name}({call.input}), {counted} tokens counted")


if __name__ == "__main__":
  main(*sys.argv[1:])
