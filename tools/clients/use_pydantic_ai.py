"""Uses a server through pydantic-ai as its users do; any fault is an exception. Knows nothing of Sluice.

python use_pydantic_ai.py http://127.0.0.1:8000/v1 MODEL
"""

import asyncio
import sys
from typing import Literal

import pydantic
from pydantic_ai import Agent, NativeOutput, ToolOutput  # pyright: ignore[reportMissingImports]
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # pyright: ignore[reportMissingImports]
from pydantic_ai.providers.openai import OpenAIProvider  # pyright: ignore[reportMissingImports]


class CityForecast(pydantic.BaseModel):
  """The weather of one day."""

  city: Literal["Oslo", "Paris", "Rome"]
  degrees: int = pydantic.Field(ge=-9, le=39)


async def _run(base_url: str, model: str) -> None:
  provider = OpenAIProvider(base_url=base_url, api_key="unused")
  settings = {"temperature": 0.0, "max_tokens": 100}
  found = []
  for kind in (OpenAIChatModel, OpenAIResponsesModel):
    served = kind(model, provider=provider)
    plain = Agent(served, model_settings=settings, instructions="Be brief.")
    whole = await plain.run("37 + 5 = ?")
    async with plain.run_stream("37 + 5 = ?") as stream:
      pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "".join(pieces) == whole.output and whole.usage.output_tokens > 0, (pieces, whole)
    again = await plain.run("And 1 + 1?", message_history=whole.all_messages())
    assert again.output, again
    for output in (NativeOutput(CityForecast), ToolOutput(CityForecast)):
      agent = Agent(served, model_settings=settings, output_type=output, retries=0)
      found.append((await agent.run("What is the weather in Oslo?")).output)
      assert isinstance(found[-1], CityForecast), found
  print(f"{whole.output!r}, {len(found)} outputs, {found[0]}")


def main(base_url: str, model: str) -> None:
  """Gets an answer whole, streamed and continued, and objects by schema and by tool, by chats and by responses."""
  asyncio.run(_run(base_url, model))


if __name__ == "__main__":
  main(*sys.argv[1:])
