"""The demo model with drafts gives the very tokens of the demo model without, with any parameter."""

import json

import pytest

from server.client import Completion
from sluice import LLM, SamplingParams
from tests.engine.speculation.proposing import RandomProposals

SETTINGS = {"token_budgets": (16, 128), "max_num_seqs": 16, "prefill_chunk": 112, "max_model_len": 512}
COPY = "Copy: red cat sun tree Copy: red cat sun tree Copy:"
SCHEMA = {
  "type": "object",
  "properties": {
    "full_name": {"enum": ["Mira", "Tom"]},
    "age_in_years": {"type": "integer", "maximum": 99, "minimum": 0},
  },
  "required": ["full_name", "age_in_years"],
  "additionalProperties": False,
  "x-guidance": {"whitespace_flexible": False},
}
REQUESTS = [
  (COPY, {}),
  (COPY, {"temperature": 0.9, "seed": 5, "top_k": 20, "top_p": 0.9}),
  (COPY, {"frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.2}),
  (COPY, {"logprobs": 3, "min_tokens": 20}),
  (COPY, {"stop": ["tree"], "min_tokens": 5}),
  (COPY, {"n": 3, "temperature": 0.7, "seed": 9}),
  ("Make JSON: Mira is 7 years old and lives in Oslo.", {"json_schema": json.dumps(SCHEMA), "ignore_eos": False}),
  ("Make JSON: Tom is 8 years old.", {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "presence_penalty": 0.5}),
  ("One day", {"regex": r"(the red fox and the red hen, ){2,6}[a-z]{3,9}\.", "temperature": 1.0, "seed": 3}),
]


def generate(speculation: str, overlap: str, **settings) -> list[Completion]:
  """The outputs of all requests together, then one after another."""
  with LLM("demo", speculation=speculation, overlap=overlap, **SETTINGS | settings) as llm:
    params = [
      SamplingParams(**{"max_tokens": 60, "temperature": 0.0, "ignore_eos": True} | more) for _, more in REQUESTS
    ]
    outputs = llm.generate([prompt for prompt, _ in REQUESTS], params)
    for (prompt, _), each in zip(REQUESTS, params, strict=True):
      outputs += llm.generate([prompt], each)
    stats = llm.engine.stats()
    if speculation == "draft":  # of 2,048 tokens, with every parameter
      assert stats.drafts.accepted_at[0] > 0.3 * stats.drafts.rows > 10
    assert llm.engine._runner.compiles_after_ready == 0  # type: ignore[attr-defined]
    assert bool(stats.drafts.forced) == (speculation == "auto")
    assert stats.blocks_used == 0 and bool(stats.drafts.accepted) == (speculation != "none")
    return [each for output in outputs for each in output.outputs]


@pytest.mark.parametrize("overlap", ["false", pytest.param("true", marks=pytest.mark.long)])
def test_drafts_are_accepted_and_change_no_output(overlap: str):
  compare_outputs(generate("none", overlap), generate("auto", overlap))


@pytest.mark.long
@pytest.mark.parametrize("draft_model", ["demo", "demo_eagle"])
@pytest.mark.parametrize(
  ("speculation", "overlap", "num_blocks"), [("draft", "false", 0), ("auto", "true", 0), ("draft", "true", 40)]
)
def test_drafts_of_a_model_change_no_output(
  speculation: str, overlap: str, num_blocks: int, draft_model: str, monkeypatch
):
  """Any of them, whether they pay or not; also in a pool that preempts."""
  monkeypatch.setattr("engine.scheduler.Speculation", RandomProposals)
  more = {"num_blocks": num_blocks}
  compare_outputs(generate("none", overlap, **more), generate(speculation, overlap, draft_model=draft_model, **more))


def compare_outputs(wanted: list[Completion], found: list[Completion]) -> None:
  assert len(found) == len(wanted) == 2 * (len(REQUESTS) + 2)
  for one, other in zip(wanted, found, strict=True):
    assert (one.text, one.token_ids) == (other.text, other.token_ids)
    assert (one.ending.reason, one.ending.matched) == (other.ending.reason, other.ending.matched)
    values = ([entry.logprob for entry in each.logprobs] for each in (one, other))
    assert next(values) == pytest.approx(next(values), abs=1e-4)
