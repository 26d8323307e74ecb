"""Uses the Responses API of a server through the openai package as its users do; any fault is an exception.

python use_responses.py http://127.0.0.1:8000/v1 MODEL
"""

import json
import sys

import openai

_WEATHER = {
  "type": "function",
  "name": "get_weather",
  "description": "The weather in a city.",
  "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
  },
  "strict": True,
}


def main(base_url: str, model: str) -> None:
  """Gets a whole and a streamed response, calls a tool there and back, and reads and deletes what is stored."""
  client = openai.OpenAI(base_url=base_url, api_key="unused")
  whole = client.responses.create(model=model, input="37 + 5 = ?", temperature=0, max_output_tokens=12)
  with client.responses.stream(model=model, input="37 + 5 = ?", temperature=0, max_output_tokens=12) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == stream.get_final_response().output_text == whole.output_text, text
  called = client.responses.create(
    model=model,
    input="What is the weather in Oslo?",
    tools=[_WEATHER],  # pyright: ignore[reportArgumentType]
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
  )
  [call] = called.output
  assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Oslo", "Paris", "Rome"), call
  told = client.responses.create(
    model=model,
    previous_response_id=called.id,
    input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
    max_output_tokens=12,
  )
  assert len(client.responses.input_items.list(told.id).data) == 3
  client.responses.delete(told.id)
  try:
    client.responses.retrieve(told.id)
  except openai.NotFoundError:
    print(f"{whole.output_text!r}, {call.name}({call.arguments})")
  else:
    raise AssertionError("a deleted response is still there")


if __name__ == "__main__":
  main(*sys.argv[1:])
