"""On a CPU a deterministic request has the same bits alone, in any batch, in any chunks, and after preemption.

Every sum of a row is made by the C++ kernels in one order that nothing but the row decides (pallas_kernels). What is
compared are the bits of log probabilities, which show what a token hides.
"""

import random

import numpy as np
import pytest

from engine.device.build import build_engine
from engine.device.options import BuildOptions
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from pallas_kernels import native
from tools.make_random_model import write_model
from tools.parity.cases import CASES

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: XLA's kernels sum by shape")


def served(folder: str, others: int, **options) -> tuple[list[int], bytes, int]:
  """Tokens of one request among `others`, the bits of its log probabilities, and how often anybody was preempted."""
  tokens: list[int] = []
  numbers: list[float] = []

  def emit(events: list[TokenEvent]) -> None:
    for event in events:
      if event.request_id == "subject":
        tokens.extend(event.token_ids)
        for entry in (*event.prompt_logprobs, *event.logprobs):
          numbers.extend((entry.logprob, *(value for _, value in entry.top)))

  built = build_engine(BuildOptions(folder, max_model_len=256, **options), lambda *_: None, emit)
  assert (built.attention, built.matmul) == ("cpu", "packed")
  rng = random.Random(1)

  def prompt(length: int) -> list[int]:
    return [rng.randrange(3, built.config.vocab_size) for _ in range(length)]

  params = SamplingParams(30, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
  requests = [Request("subject", prompt(70), params)]
  for number in range(others):
    drawn = SamplingParams(rng.randrange(3, 60), temperature=0.9, seed=number, ignore_eos=True)
    requests.append(Request(str(number), prompt(rng.randrange(1, 90)), drawn))
  rng.shuffle(requests)
  for request in requests:
    built.engine.submit(request)
  while built.engine.num_live:
    built.engine.step()
  return tokens, np.array(numbers, np.float32).tobytes(), built.engine.stats().num_preemptions


@pytest.mark.parametrize(
  ("case", "dtype", "quantization", "kv_dtype"),
  [
    # The kernels of the next, without its norms.
    pytest.param("llama3", "float32", "none", "auto", marks=pytest.mark.long),
    ("qwen3", "float32", "none", "auto"),
    pytest.param("mistral", "bfloat16", "none", "auto", marks=pytest.mark.long),
    pytest.param("llama3", "float32", "int8", "auto", marks=pytest.mark.long),
    ("llama3", "float32", "w8a8", "int8"),
    ("gemma2", "bfloat16", "int4", "int8"),
  ],
)
def test_same_bits(case: str, dtype: str, quantization: str, kv_dtype: str, tmp_path) -> None:
  for name in ("packed_matmul", "paged_attention"):
    native.build_library(name)
  folder = tmp_path / case
  write_model(folder, CASES[case][0] | {"num_hidden_layers": 2}, seed=1)
  held = {"dtype": dtype, "quantization": quantization, "kv_dtype": kv_dtype, "deterministic": True}
  if quantization == "int4":
    held["quantization_group_size"] = 16  # divides the inputs of each layer
  alone = served(str(folder), 0, **held, token_budgets=(2, 128), max_num_seqs=2, prefill_chunk=128)
  crowd = served(
    str(folder), 12, **held, token_budgets=(8, 32), max_num_seqs=8, prefill_chunk=7, num_blocks=24, block_size=16
  )
  assert crowd[2] > 0, "the pool must be too small for all"
  assert len(alone[0]) == 30 and len(alone[1]) == 4 * (69 * 3 + 30 * 4)
  assert crowd[:2] == alone[:2]
