"""Uses a server through openai-agents, which speaks the Responses API; any fault is an exception.

python use_agents.py http://127.0.0.1:8000/v1 MODEL
"""

import asyncio
import sys
from typing import Literal

from agents import (  # pyright: ignore[reportMissingImports]
  Agent,
  ModelSettings,
  Runner,
  function_tool,
  set_default_openai_client,
  set_tracing_disabled,
)
import openai

_CALLS: list[str] = []


@function_tool
def get_weather(city: Literal["Oslo", "Paris", "Rome"]) -> str:
  """The weather in a city."""
  _CALLS.append(city)
  return "sunny"


async def _run(base_url: str, model: str) -> None:
  set_tracing_disabled(True)
  set_default_openai_client(openai.AsyncOpenAI(base_url=base_url, api_key="unused"))
  plain = Agent(name="plain", instructions="Be brief.", model=model, model_settings=ModelSettings(temperature=0))
  answer = await Runner.run(plain, "37 + 5 = ?")
  settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
  agent = Agent(name="weather", model=model, tools=[get_weather], model_settings=settings)
  await Runner.run(agent, "What is the weather in Oslo?")
  assert len(_CALLS) == 1, _CALLS
  streamed = Runner.run_streamed(agent, "What is the weather in Oslo?")
  kinds = {event.type async for event in streamed.stream_events()}
  assert {"raw_response_event", "run_item_stream_event"} <= kinds and len(_CALLS) == 2, (kinds, _CALLS)
  await Runner.run(plain, "And then?", previous_response_id=streamed.last_response_id)
  print(f"{answer.final_output!r}, {len(_CALLS)} calls of a tool")


def main(base_url: str, model: str) -> None:
  """Gets an answer, calls a tool whole and streamed, and continues a stored response."""
  asyncio.run(_run(base_url, model))


if __name__ == "__main__":
  main(*sys.argv[1:])
