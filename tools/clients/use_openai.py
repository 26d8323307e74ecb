"""Uses a server through the openai package as its users do; any fault is an exception. Knows nothing of Sluice.

python use_openai.py http://127.0.0.1:8000/v1 MODEL
"""

import json
import sys
import time
from typing import Any, Literal

import openai
import pydantic


class DayForecast(pydantic.BaseModel):
  """The weather of one day."""

  city: Literal["Oslo", "Paris", "Rome"]
  degrees: int


def _run_batch(client: openai.OpenAI, body: dict[str, Any]) -> str:
  """Returns the answer to a batch of one line."""
  line = {"custom_id": "sum-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
  file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
  batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
  while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
  assert batch.status == "completed" and batch.output_file_id, batch
  answer = json.loads(client.files.content(batch.output_file_id).text)
  return answer["response"]["body"]["choices"][0]["message"]["content"]


def main(base_url: str, model: str) -> None:
  """Gets a chat whole, streamed and by a batch, a parsed object, a forced tool call, a completion and embeddings."""
  client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)
  assert [each.id for each in client.models.list()] == [model]
  messages: list[Any] = [{"role": "user", "content": "37 + 5 = ?"}]
  options: dict[str, Any] = {"model": model, "max_tokens": 12, "temperature": 0}
  whole = client.chat.completions.create(messages=messages, **options).choices[0].message.content
  pieces = [
    each.choices[0].delta.content for each in client.chat.completions.create(messages=messages, stream=True, **options)
  ]
  assert "".join(piece or "" for piece in pieces) == whole, pieces
  weather: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
  options["max_tokens"] = 100
  held = client.chat.completions.parse(messages=weather, response_format=DayForecast, **options)
  assert isinstance(held.choices[0].message.parsed, DayForecast), held
  tool = openai.pydantic_function_tool(DayForecast)
  called = client.chat.completions.parse(messages=weather, tools=[tool], tool_choice="required", **options)
  [call] = called.choices[0].message.tool_calls or []
  assert isinstance(call.function.parsed_arguments, DayForecast), call
  assert client.completions.create(prompt="Once upon a time", **options).choices[0].text
  found = client.embeddings.create(model=model, input=["the cat sat", "37 + 5 = ?"])
  assert len(found.data) == 2, found
  assert _run_batch(client, {"messages": messages, **options}) == whole
  try:
    client.chat.completions.create(messages=messages, **{**options, "model": "another"})
  except openai.NotFoundError as error:
    assert error.request_id, error
  else:
    raise AssertionError("a model that is not there was served")
  print(f"{whole!r}, {call.function.name}({call.function.arguments}), {len(found.data[0].embedding)} numbers, a batch")


if __name__ == "__main__":
  main(*sys.argv[1:])
