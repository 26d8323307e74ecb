"""The demo model with drafts gives the very outputs without, over 2,000 random requests in each way to serve them."""

import dataclasses
import json
import random
from typing import Any

import pytest

from engine.recorder import DraftCounts
from engine.request import Request
from engine.speculation.drafter import Draft
from sluice import LLM, SamplingParams
from tests.engine.speculation.guessing import RandomChoice

NUM_REQUESTS = 224
SETTINGS: dict[str, Any] = {
  "token_budgets": (16, 128),
  "max_num_seqs": 64,
  "num_blocks": 72,  # for some 10 requests, so that steps have logit rows for drafts
  "prefill_chunk": 112,
  "max_model_len": 256,
  "max_queued_requests": 4096,
  "max_queued_tokens": 1 << 20,
}
MODES: dict[str, dict[str, Any]] = {
  "alone": {"overlap": "false"},
  "overlap": {"overlap": "true"},
  "continuous": {"overlap": "false", "batching": "continuous", "prefill_chunk": 128},
  "continuous with overlap": {"overlap": "true", "batching": "continuous", "prefill_chunk": 128},
  "a pool for two requests": {"overlap": "false", "num_blocks": 18},
  "a pool for two requests with overlap": {"overlap": "true", "num_blocks": 18},
  "chunks of 5 tokens": {"overlap": "false", "prefill_chunk": 5},
  "chunks of 16 tokens, one rung": {"overlap": "true", "prefill_chunk": 16, "token_budgets": (32,), "max_num_seqs": 32},
  "one draft a row": {"overlap": "false", "num_speculative_tokens": 1},
  "deterministic": {"overlap": "false", "deterministic": True},
}
WORDS = "red cat sun tree fox hen the a big small went to and saw".split()
SCHEMAS = [
  {"type": "object", "properties": {"name": {"enum": ["Mira", "Tom"]}, "age": {"type": "integer", "maximum": 99}},
   "required": ["name", "age"], "additionalProperties": False},
  {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 5},
]  # fmt: skip


def random_request(rng: random.Random) -> tuple[str, SamplingParams]:
  """A text that repeats itself, or does not, and any parameters."""
  words = [rng.choice(WORDS) for _ in range(rng.randint(1, 12))]
  text = " ".join(words)
  prompt = rng.choice(
    (f"Copy: {text} Copy: {text} Copy:", f"Copy: {text}\n", f"One day {text}", "Make JSON: Mira is 7.")
  )
  params: dict[str, Any] = {"max_tokens": rng.randint(1, 120), "temperature": 0.0, "seed": rng.randrange(1 << 30)}
  params["ignore_eos"] = rng.random() < 0.7
  if rng.random() < 0.5:
    params |= {
      "temperature": rng.choice((0.3, 0.8, 1.0, 1.5)),
      "top_k": rng.choice((0, 1, 5, 40)),
      "top_p": rng.choice((1.0, 0.95, 0.5)),
      "min_p": rng.choice((0.0, 0.0, 0.1)),
    }
  options: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "frequency_penalty": -0.3, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.8},
    {"logit_bias": {rng.randrange(300): 4.0, rng.randrange(300): -100.0}},
    {"allowed_token_ids": sorted(rng.sample(range(5, 800), 200))},
    {"min_tokens": rng.randint(1, params["max_tokens"])},
    {"logprobs": rng.choice((0, 1, 5))},
    {"prompt_logprobs": rng.choice((0, 2))},
    {"stop": [rng.choice(WORDS)]},
    {"stop_token_ids": [rng.randrange(800), rng.randrange(800)]},
    {"n": rng.randint(2, 3)},
  ]
  for option in rng.sample(options, rng.randint(0, 3)):
    params |= option
  constraint = rng.random()
  if constraint < 0.15:
    params |= {"json_schema": json.dumps(rng.choice(SCHEMAS)), "max_tokens": 64}
  elif constraint < 0.25:
    params |= {"regex": r"(the red fox and the red hen, ){1,4}[a-z]{3,9}\."}
  elif constraint < 0.3:
    params |= {"choice": ["a red fox and a red hen", "a red fox and a blue hen"]}
  if constraint < 0.3:
    for name in ("allowed_token_ids", "logit_bias", "min_tokens"):
      params.pop(name, None)
  return prompt, SamplingParams(**params)


REQUESTS = [random_request(random.Random(seed)) for seed in range(NUM_REQUESTS)]


class RecallingDrafter:
  """Proposes what a request's like produced before, and now and then a wrong token. Depends on the request alone."""

  def __init__(self, outputs: dict[tuple, tuple[int, ...]]):
    """Args: outputs: by `identify_request`."""
    self._outputs = outputs

  def update(self, request: Request) -> bool:
    return True

  def propose(self, request: Request, count: int) -> Draft:
    first = len(request.output_token_ids)
    rng = random.Random(f"{request.seed} {first}")
    truth = self._outputs[identify_request(request)][first : first + rng.randint(0, count)]
    return Draft(tuple(token if rng.random() < 0.8 else rng.randrange(2000) for token in truth), "recalled")

  def forget(self, request_id: str) -> None:
    pass

  def num_indexed(self, request_id: str) -> int:
    return 0

  def restore_index(self, request: Request, num_indexed: int) -> None:
    pass


def identify_request(request: Request) -> tuple:
  return tuple(request.prompt_token_ids), request.seed, repr(request.params)


@dataclasses.dataclass(frozen=True)
class Served:
  """Attributes: outputs: what a client sees of each output; requests: the engine's; drafts, preemptions: counts."""

  outputs: list[Any]
  requests: list[Request]
  drafts: DraftCounts
  num_preemptions: int


def serve_all(truth: dict[tuple, tuple[int, ...]] | None, mode: dict[str, Any]) -> Served:
  """All requests at once; with `truth`, any number of drafts in each row, whether they pay or not."""
  with LLM("demo", speculation="none" if truth is None else "auto", **SETTINGS | mode) as llm:
    scheduler, requests = llm.engine._scheduler, []
    if truth is not None:
      scheduler._speculation = RandomChoice(scheduler.config)
      llm.engine.replace_drafter(RecallingDrafter(truth))
    add_request = scheduler.add_request

    def note_request(request: Request) -> None:
      requests.append(request)
      add_request(request)

    scheduler.add_request = note_request  # type: ignore[method-assign]
    results = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    stats = llm.engine.stats()
    assert stats.blocks_used == 0
    outputs = []
    for result in results:
      for each in result.outputs:
        ids = [[each.token_id for each in entry.top] for entry in each.logprobs]
        logprobs = [entry.logprob for entry in each.logprobs]
        outputs.append(((each.text, each.token_ids, each.ending.reason, each.ending.matched, ids), logprobs))
    return Served(outputs, requests, stats.drafts, stats.num_preemptions)


@pytest.fixture(scope="module")
def plain() -> dict[bool, Served]:
  """The outputs without drafts; other matmuls make the deterministic ones."""
  return {each: serve_all(None, {"overlap": "false", "deterministic": each}) for each in (False, True)}


@pytest.mark.long
@pytest.mark.parametrize("name", MODES)
def test_drafts_change_no_output(name: str, plain: dict[bool, Served]):
  wanted = plain["deterministic" in MODES[name]]
  truth = {identify_request(request): tuple(request.output_token_ids) for request in wanted.requests}
  found = serve_all(truth, MODES[name])
  rejected = found.drafts.tokens - found.drafts.accepted
  assert not wanted.drafts.tokens
  assert found.drafts.accepted > 100 and rejected > 50
  assert "pool" not in name or found.num_preemptions > 20
  for number, (one, other) in enumerate(zip(wanted.outputs, found.outputs, strict=True)):
    assert one[0] == other[0], number
    assert one[1] == pytest.approx(other[1], abs=1e-4), number
