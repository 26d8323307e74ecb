"""Uses a server through instructor as its users do; any fault is an exception. Knows nothing of Sluice.

python use_instructor.py http://127.0.0.1:8000/v1 MODEL
"""

import sys
from typing import Any, Literal

import instructor  # pyright: ignore[reportMissingImports]
import openai
import pydantic


class Forecast(pydantic.BaseModel):
  """The weather of one day."""

  city: Literal["Oslo", "Paris", "Rome"]
  degrees: int = pydantic.Field(ge=-9, le=39)
  sky: Literal["clear", "cloudy"] | None


def main(base_url: str, model: str) -> None:
  """Gets an object as a schema's, as a tool's arguments and piece by piece, and several in one answer."""
  server = openai.OpenAI(base_url=base_url, api_key="unused")
  question: dict[str, Any] = {
    "model": model,
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
  }
  found = []
  for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(server, mode=mode)
    found.append(client.chat.completions.create(response_model=Forecast, **question))
    assert isinstance(found[-1], Forecast), found
    pieces = list(client.chat.completions.create_partial(response_model=Forecast, **question))
    assert pieces[-1].model_dump() == found[-1].model_dump(), (mode, pieces[-1], found[-1])
  print(f"{len(found)} modes, {found[0]}")


if __name__ == "__main__":
  main(*sys.argv[1:])
