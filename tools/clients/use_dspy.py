"""Uses a server through DSPy as its users do; any fault is an exception. Knows nothing of Sluice.

python use_dspy.py http://127.0.0.1:8000/v1 MODEL
"""

import sys
from typing import Literal

import dspy  # pyright: ignore[reportMissingImports]
from dspy import lm15  # pyright: ignore[reportMissingImports]


class WeatherSignature(dspy.Signature):
  """Says the weather in a city."""

  question: str = dspy.InputField()
  city: Literal["Oslo", "Paris", "Rome"] = dspy.OutputField()
  rain: bool = dspy.OutputField()


def main(base_url: str, model: str) -> None:
  """Gets a chat's answers, a typed prediction with a JSON schema, a batch of them, and embeddings."""
  # DSPy sends a schema only to a provider that says it takes one.
  access = lm15.AccessPolicy(provider="sluice", env_keys=("SLUICE_API_KEY",), base_url=base_url)
  provider = lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat.preset("vllm"))
  lm15.register_provider(provider, supports=lm15.ModelSupport(response_schema=True, function_calling=True))
  lm = dspy.LM(f"sluice/{model}", api_base=base_url, api_key="unused", temperature=0, max_tokens=200, cache=False)
  [answer] = lm("37 + 5 = ?")
  with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
    predict = dspy.Predict(WeatherSignature)
    found = predict(question="What is the weather in Oslo?")
    assert found.city in ("Oslo", "Paris", "Rome") and isinstance(found.rain, bool), found
    examples = [dspy.Example(question=f"Will it rain in {city}?").with_inputs("question") for city in ("Oslo", "Rome")]
    assert all(
      isinstance(each.rain, bool) for each in predict.batch(examples, num_threads=2, disable_progress_bar=True)
    )
  embed = dspy.Embedder(f"openai/{model}", api_base=base_url, api_key="unused", caching=False)
  vectors = embed(["the cat sat", "37 + 5 = ?"])
  assert vectors.shape[0] == 2, vectors
  print(f"{answer!r}, city={found.city!r} rain={found.rain}, embeddings {vectors.shape}")


if __name__ == "__main__":
  main(*sys.argv[1:])
