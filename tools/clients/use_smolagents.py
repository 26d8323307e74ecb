"""Uses a server through smolagents as its users do; any fault is an exception. Knows nothing of Sluice.

python use_smolagents.py http://127.0.0.1:8000/v1 MODEL
"""

import sys

from smolagents import (  # pyright: ignore[reportMissingImports]
  ActionStep,
  AgentGenerationError,
  ChatMessage,
  OpenAIModel,
  Tool,
  ToolCallingAgent,
)


class WeatherTool(Tool):
  """A tool without free text, since a small model's text may use up all tokens."""

  name = "get_weather"
  description = "The weather in a city."
  inputs = {"city": {"type": "string", "description": "The city.", "enum": ["Oslo", "Paris", "Rome"]}}
  output_type = "string"

  def forward(self, city: str) -> str:
    """Returns the weather."""
    return f"sunny in {city}"


def main(base_url: str, model: str) -> None:
  """Gets an answer whole and streamed, and forces a tool call, and runs an agent with that tool, whole and streamed."""
  served = OpenAIModel(model_id=model, api_base=base_url, api_key="unused", temperature=0, max_tokens=100)
  question = [ChatMessage(role="user", content=[{"type": "text", "text": "37 + 5 = ?"}])]
  whole = served.generate(question)
  pieces = list(served.generate_stream(question))
  assert "".join(piece.content or "" for piece in pieces) == whole.content, pieces
  assert sum(piece.token_usage.output_tokens for piece in pieces if piece.token_usage) > 0, pieces
  called = served.generate(question, tools_to_call_from=[WeatherTool()])
  [call] = called.tool_calls
  assert call.function.name == "get_weather", called
  for stream in (False, True):
    # The agent chooses among its tools; a small model's choice, and the text it returns, are its own.
    agent = ToolCallingAgent(tools=[WeatherTool()], model=served, stream_outputs=stream, max_steps=1, verbosity_level=0)
    agent.run("What is the weather in Oslo?")
    [step] = [step for step in agent.memory.steps if isinstance(step, ActionStep) and step.step_number == 1]
    assert not isinstance(step.error, AgentGenerationError) and step.token_usage.output_tokens > 0, step
  print(f"\n{whole.content!r}, {call.function.name}({call.function.arguments}), 2 agents")


if __name__ == "__main__":
  main(*sys.argv[1:])
