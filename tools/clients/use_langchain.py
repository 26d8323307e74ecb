"""Uses a server through langchain-openai as its users do; any fault is an exception. Knows nothing of Sluice.

python use_langchain.py http://127.0.0.1:8000/v1 MODEL
"""

import sys

from langchain_core.messages import HumanMessage, SystemMessage  # pyright: ignore[reportMissingImports]
from langchain_core.tools import tool  # pyright: ignore[reportMissingImports]
from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]


@tool
def weather(city: str, days: int) -> str:
  """Looks up the weather of a city."""
  return f"{days} days of rain in {city}"


def main(base_url: str, model: str) -> None:
  """Gets a whole answer, a streamed one with usage, several at once, one with a schema, and a forced tool call."""
  chat = ChatOpenAI(base_url=base_url, api_key="unused", model=model, temperature=0, max_tokens=24)
  question = [SystemMessage("Answer shortly."), HumanMessage("37 + 5 = ?")]
  whole = chat.invoke(question)
  assert whole.content and whole.response_metadata["finish_reason"] in ("stop", "length"), whole
  assert whole.usage_metadata["output_tokens"] > 0, whole
  pieces = list(chat.stream(question, stream_usage=True))
  assert "".join(piece.content for piece in pieces) == whole.content, pieces
  assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) > 0, pieces
  assert [each.content for each in chat.batch([question] * 3)] == [whole.content] * 3
  # The server guarantees only the form; a small model's text may use up all tokens.
  schema = {
    "title": "Sum",
    "type": "object",
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["value"],
    "additionalProperties": False,
  }
  held = chat.with_structured_output(schema, method="json_schema").invoke(question)
  assert 0 <= held["value"] <= 99, held
  called = chat.bind(max_tokens=300).bind_tools([weather], tool_choice="weather").invoke("Will it rain in Oslo?")
  assert [call["name"] for call in called.tool_calls] == ["weather"] or called.response_metadata["finish_reason"] == (
    "length"
  ), called
  print(f"{whole.content!r}, {held}, {called.tool_calls or called.response_metadata['finish_reason']}")


if __name__ == "__main__":
  main(*sys.argv[1:])
