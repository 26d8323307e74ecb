"""Uses a server through litellm as its users do; any fault is an exception. Knows nothing of Sluice.

python use_litellm.py http://127.0.0.1:8000/v1 MODEL
"""

import json
import sys
from typing import Any, Literal

import litellm  # pyright: ignore[reportMissingImports]
import pydantic

_WEATHER = {
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris", "Rome"]}},
      "required": ["city"],
      "additionalProperties": False,
    },
  },
}


class City(pydantic.BaseModel):
  """The weather of one day."""

  city: Literal["Oslo", "Paris", "Rome"]


def main(base_url: str, model: str) -> None:
  """Gets chats, streams, a tool call, a schema's object, a completion, a response and embeddings; meets an error."""
  litellm.suppress_debug_info = True
  for provider in ("openai", "hosted_vllm"):
    options: dict[str, Any] = {
      "model": f"{provider}/{model}",
      "api_base": base_url,
      "api_key": "unused",
      "temperature": 0,
      "max_tokens": 100,
    }
    messages = [{"role": "user", "content": "37 + 5 = ?"}]
    whole = litellm.completion(messages=messages, **options)
    text = whole.choices[0].message.content
    chunks = list(litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text, chunks
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == whole.usage.completion_tokens, chunks
    weather = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = litellm.completion(messages=weather, tools=[_WEATHER], tool_choice="required", **options)
    [call] = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris", "Rome"), call
    held = litellm.completion(messages=weather, response_format=City, **options)
    assert City.model_validate_json(held.choices[0].message.content), held
    try:
      litellm.completion(messages=messages, **{**options, "model": f"{provider}/another", "num_retries": 0})
    except litellm.NotFoundError:
      pass
    else:
      raise AssertionError("a model that is not there was served")
    found = litellm.embedding(
      input=["the cat sat", "37 + 5 = ?"], **{name: options[name] for name in ("model", "api_base", "api_key")}
    )
    assert len(found.data) == 2 and len(found.data[0]["embedding"]) == len(found.data[1]["embedding"]), found
  options["model"] = f"openai/{model}"
  answered = litellm.responses(
    input="37 + 5 = ?", **{name: options[name] for name in ("model", "api_base", "api_key", "temperature")}
  )
  assert answered.output[0].content[0].text == text, answered
  completed = litellm.text_completion(
    prompt="Once upon a time", **{**options, "model": f"text-completion-openai/{model}"}
  )
  assert completed.choices[0].text, completed
  print(f"{text!r}, {call.function.name}({call.function.arguments}), {len(found.data[0]['embedding'])} numbers")


if __name__ == "__main__":
  main(*sys.argv[1:])
