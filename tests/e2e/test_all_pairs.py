"""Row E9: every value of every parameter beside every value of every other, on a real model behind the real server.

One combination that nobody had tried has killed engines (vLLM's CVE-2026-44223); a fake device takes any.
"""

from collections.abc import Iterator, Sequence
import itertools
from pathlib import Path
import random
from typing import Any

import pytest

from engine.device.build import build_engine
from engine.device.options import BuildOptions
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer
from tests.server.harness import Served, endings_of, running, text_of, token_ids_of

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="37 + 5 = ?")])
MAX_TOKENS = 12
BATCH = 32  # at once

# The prompt's kind, then parameters as "message.field"; None is not set.
PARAMETERS: dict[str, Sequence[Any]] = {
  "prompt": ({"text": "Once"}, {"token_ids": pb.TokenIds(ids=[7, 8, 9] * 20)}, {"chat": CHAT}),
  "sampling.temperature": (None, 0.0, 1.5, 1e-30),
  "sampling.top_p": (None, 0.5, 1e-30),
  "sampling.top_k": (None, 1, 40, 2**31 - 1),
  "sampling.min_p": (None, 0.2, 1.0),
  "sampling.frequency_penalty": (None, 2.0, -2.0),
  "sampling.presence_penalty": (None, 2.0, -2.0),
  "sampling.repetition_penalty": (None, 1.3, 1e-30, 100.0),
  "sampling.seed": (None, -(2**63), 7),
  "sampling.n": (None, 3),
  "sampling.logit_bias": (None, {7: -100.0, 8: 100.0, 9: 0.0}),
  "sampling.allowed_token_ids": (None, pb.TokenIds(ids=[7, 8, 300])),
  "stopping.min_tokens": (None, 1, MAX_TOKENS),
  "stopping.stop": (None, ("a", "the"), ("never in any text",)),
  "stopping.stop_token_ids": (None, (9, 10)),
  "stopping.ignore_eos": (None, True),
  "output.logprobs": (None, 0, 20),
  "output.prompt_logprobs": (None, 0, 20),
  "output.return_text": (None, False),
  "output.return_token_ids": (None, False),
  "output.skip_special_tokens": (None, False),
  "constraint.": (None, {"json_object": True}, {"regex": "[a-z ]{3,30}"}, {"choice": pb.Choices(values=["yes", "no"])}),
  "cache_salt": (None, "s"),
  "priority": (None, -5, 5),
  "speculation": (None, "none"),
}


def all_pairs(choices: Sequence[int], seed: int) -> list[tuple[int, ...]]:
  """Rows that hold every pair of values of two columns at least once.

  Greedy: a row begins with a pair that is missing, then takes for each column in any order the value with the most
  missing pairs beside what it has.

  Args:
    choices: how many values each column has.
  """
  rng = random.Random(seed)
  missing = {
    ((one, i), (other, j))
    for one, other in itertools.combinations(range(len(choices)), 2)
    for i in range(choices[one])
    for j in range(choices[other])
  }
  rows = []
  while missing:
    first, second = rng.choice(sorted(missing))
    row = dict((first, second))
    for column in rng.sample(range(len(choices)), len(choices)):
      if column not in row:
        values = rng.sample(range(choices[column]), choices[column])
        row[column] = max(
          values,
          key=lambda value: sum(
            (min((column, value), taken), max((column, value), taken)) in missing for taken in row.items()
          ),
        )
    missing -= set(itertools.combinations(sorted(row.items()), 2))
    rows.append(tuple(row[column] for column in range(len(choices))))
  return rows


def request_of(row: Sequence[int]) -> pb.GenerateRequest:
  request = pb.GenerateRequest(stopping=pb.StopParams(max_tokens=MAX_TOKENS))
  for (name, values), pick in zip(PARAMETERS.items(), row, strict=True):
    value = values[pick]
    if value is None:
      continue
    if name == "prompt":
      request.MergeFrom(pb.GenerateRequest(**value))
    elif name == "constraint.":
      request.constraint.MergeFrom(pb.OutputConstraint(**value))
    elif "." not in name:
      setattr(request, name, value)
    else:
      group, field = name.split(".")
      kind = {"sampling": pb.SamplingParams, "stopping": pb.StopParams, "output": pb.OutputParams}[group]
      getattr(request, group).MergeFrom(kind(**{field: value}))
  if request.HasField("constraint"):
    request.sampling.ClearField("allowed_token_ids")  # the one pair that contradicts itself, and is refused
  return request


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
  options = BuildOptions(
    model_dir=str(DEMO), token_budgets=(16, 64), max_num_seqs=16, prefill_chunk=64, num_blocks=256, max_model_len=256
  )
  built = build_engine(options, lambda *_: None, lambda _: None)
  built.runner.seal()
  with running(Tokenizer(DEMO), config=built.config, device=built.runner) as served:
    yield served
  assert built.runner.compiles_after_ready == 0


def test_the_generator_leaves_no_pair_out():
  choices = (2, 3, 4, 2, 5)
  rows = all_pairs(choices, 1)
  for one, other in itertools.combinations(range(len(choices)), 2):
    pairs = {(row[one], row[other]) for row in rows}
    assert len(pairs) == choices[one] * choices[other]
  assert len(rows) < 40, "of 240 combinations"


@pytest.mark.catalogue("E9")
def test_every_pair_is_served(server: Served):
  choices = [len(values) for values in PARAMETERS.values()]
  rows = [row for seed in range(3) for row in all_pairs(choices, seed)]  # each pair in several companies
  assert len(rows) > 75
  for start in range(0, len(rows), BATCH):
    requests = [request_of(row) for row in rows[start : start + BATCH]]
    calls = [server.generation.Generate(request, timeout=240) for request in requests]
    for request, call in zip(requests, calls, strict=True):
      check(request, list(call))
  assert server.engine.num_live == 0 and server.engine.dead is None


def check(request: pb.GenerateRequest, messages: list[pb.GenerateResponse]) -> None:
  """The answer is whole, and is what was asked for."""
  sampling, stopping, output = request.sampling, request.stopping, request.output
  n = sampling.n if sampling.HasField("n") else 1
  endings = {ending.index: ending for ending in endings_of(messages)}
  assert sorted(endings) == list(range(n)) and endings_of(messages)[-1].last, request
  for index, ending in endings.items():
    tokens, text = token_ids_of(messages, index), text_of(messages, index)
    usage = ending.usage
    assert stopping.min_tokens <= usage.completion_tokens <= MAX_TOKENS or request.HasField("constraint"), request
    assert output.return_text or not output.HasField("return_text") or not text, request
    if output.HasField("return_token_ids"):
      assert not tokens
    elif not stopping.stop:
      assert len(tokens) in (usage.completion_tokens, usage.completion_tokens - 1), request
    if sampling.HasField("allowed_token_ids"):
      assert set(tokens) <= set(sampling.allowed_token_ids.ids), request
    entries = [
      entry for message in messages for delta in message.deltas for entry in delta.logprobs if delta.index == index
    ]
    assert bool(entries) <= output.HasField("logprobs")
    assert all(entry.logprob <= 0.0 and entry.logprob == entry.logprob for entry in entries), request
  prompt_entries = sum(len(delta.prompt_logprobs) for message in messages for delta in message.deltas)
  assert bool(prompt_entries) == output.HasField("prompt_logprobs"), request
