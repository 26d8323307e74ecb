"""A tiny engine whose programs are stored, and requests that touch them all."""

from typing import Any

import pytest

from engine.device.build import Built
from engine.request import Request
from engine.sampling_params import SamplingParams
from tools.make_random_model import write_model
from tools.parity.cases import CASES

RAW = CASES["llama3"][0] | {"num_hidden_layers": 2}
SMALL: dict[str, Any] = {
  "token_budgets": (8, 16),
  "max_num_seqs": 4,
  "prefill_chunk": 16,
  "kv_cache_mb": 1,
  "max_model_len": 64,
  "speculation": "none",  # the choice of drafts depends on time, and events on drafts
}


def write_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
  """Returns the folder of a new model of RAW."""
  path = tmp_path_factory.mktemp("models") / "tiny"
  write_model(path, RAW, seed=3)
  return str(path)


def answers(built: Built, events: list) -> list:
  """Tokens and log probabilities, to the bit, of requests that touch every program."""
  params = (
    SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.9, seed=5, top_p=0.9, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=12, presence_penalty=1.0, logit_bias=((3, 2.0),), seed=1, ignore_eos=True),
  )
  for index, each in enumerate(params):
    built.engine.submit(Request(f"{index}", [3 + index, 4, 5, 9, 11] * 5, each))
  while built.engine.num_live:
    built.engine.step()
  assert built.runner.compiles_after_ready == 0
  found = [(event.request_id, tuple(event.token_ids), event.logprobs) for event in events]
  assert sum(len(tokens) for _, tokens, _ in found) == 36
  return found
