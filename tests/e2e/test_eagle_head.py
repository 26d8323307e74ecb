"""The demo model's EAGLE-3 head is mostly right, also after chunks of prompts, wrong drafts and shared prefixes.

Greedy decoding with drafts in each step is deterministic, so the accepted drafts are numbers to compare.
"""

from typing import NamedTuple

import pytest

from sluice import LLM, SamplingParams
from tests.engine.speculation.proposing import AllProposals

SETTINGS = {
  "token_budgets": (8, 32),
  "max_num_seqs": 8,
  "prefill_chunk": 24,
  "max_model_len": 256,
  "block_size": 16,
  "overlap": "false",
}
FIRST_TURN = "<|user|>Make JSON: Tom is 9 years old and lives in Rome.<|end|><|assistant|>" + (
  '{"name": "Tom", "age": 9, "city": "Rome"}<|end|>'
)
PROMPTS = [
  FIRST_TURN + f"<|user|>{text}<|end|><|assistant|>"
  for text in (
    "Tell me a story about Mira and a kite.",
    "Tell me a story about Hugo and a drum.",
    "Make JSON: Mira is 7 years old and lives in Oslo.",
  )
]


class Served(NamedTuple):
  """An output, its rows with drafts, those accepted, the prompt's cached tokens, and blocks that came from the host."""

  token_ids: list[int]
  rows: int
  accepted: int
  num_cached: int
  num_returned: int


def serve_prompts(**settings) -> list[Served]:
  """Serves each prompt alone, then a long one that takes all blocks of a small pool, and then each once more."""
  found = []
  with LLM("demo", **SETTINGS | settings) as llm:
    params = SamplingParams(max_tokens=90, temperature=0.0)
    for number, prompt in enumerate(PROMPTS * 2):
      if number == len(PROMPTS):
        llm.generate(["moon fish " * 60], SamplingParams(max_tokens=1), progress=False)
      before = llm.engine.stats()
      (output,) = llm.generate([prompt], params, progress=False)
      after = llm.engine.stats()
      found.append(
        Served(
          list(output.outputs[0].token_ids),
          after.drafts.rows - before.drafts.rows,
          after.drafts.accepted - before.drafts.accepted,
          after.num_cached_tokens - before.num_cached_tokens,
          after.host_pool.num_loaded - before.host_pool.num_loaded if before.host_pool and after.host_pool else 0,
        )
      )
    assert llm.engine._runner.compiles_after_ready == 0  # type: ignore[attr-defined]
  return found


def test_the_head_is_right_where_it_should_be(monkeypatch: pytest.MonkeyPatch):
  plain = serve_prompts(speculation="none")
  monkeypatch.setattr("engine.scheduler.Speculation", AllProposals)
  drafted = serve_prompts(speculation="draft", draft_model="demo_eagle")
  assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
  first, again = drafted[: len(PROMPTS)], drafted[len(PROMPTS) :]
  assert sum(each.accepted for each in first) > 3.5 * sum(each.rows for each in first) > 50
  # The prefix cache has the features of a block's last token, too.
  for one, other in zip(first, again, strict=True):
    assert other.num_cached >= 32 and (other.rows, other.accepted) == (one.rows, one.accepted)


@pytest.mark.parametrize(
  ("settings", "least_share"), [({"kv_dtype": "int8"}, 3.5), ({"num_blocks": 17, "host_kv_mb": 8}, 3.0)]
)
def test_the_head_proposes_with_other_kv(monkeypatch: pytest.MonkeyPatch, settings: dict, least_share: float):
  """With KV in 8 bits, and with blocks that come back from the host, where the head's KV never was."""
  plain = serve_prompts(speculation="none", **settings)
  monkeypatch.setattr("engine.scheduler.Speculation", AllProposals)
  drafted = serve_prompts(speculation="draft", draft_model="demo_eagle", **settings)
  assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
  assert sum(each.accepted for each in drafted) > least_share * sum(each.rows for each in drafted) > 100
  assert any(each.num_returned for each in drafted) == ("host_kv_mb" in settings)
