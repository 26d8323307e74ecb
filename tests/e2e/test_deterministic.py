"""With --deterministic a request has the same bits in any company, with every kernel that a CPU can run.

The same compiled programs serve one request in many ways: alone, in crowds of every sort of sampling, in chunks of any
length, preempted, with its prefix from the cache, in waves. Compared are the bits of all log probabilities.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from engine.device import deterministic
from engine.device.build import BuildOptions, Built, build
from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.shapes import ShapeLadder
from pallas_kernels import native
from tools.make_random_model import write_model
from tools.parity.cases import CASES

ROOT = pathlib.Path(__file__).resolve().parents[2]
NATIVE = native.compiler() is not None
PROMPT, _ROWS = 70, 8
SUBJECTS = {
  "greedy": SamplingParams(24, temperature=0.0, ignore_eos=True, logprobs=20, prompt_logprobs=20),
  "drawn": SamplingParams(24, temperature=1.1, top_p=0.9, top_k=40, seed=5, ignore_eos=True, logprobs=20),
}
# Attention, matmul, family (with a norm of queries and keys, or a window) and dtype.
KERNELS = [
  ("reference", "xla", "qwen3", "float32"),
  pytest.param("reference", "xla", "mistral", "bfloat16", marks=pytest.mark.long),
  *([("cpu", "packed", "qwen3", "float32")] if NATIVE else []),
  *([pytest.param("cpu", "xla", "llama3", "float32", marks=pytest.mark.long)] if NATIVE else []),
]


@functools.cache
def built(folder: str, deterministic: bool, attention: str, matmul: str, dtype: str) -> Built:
  """An engine's programs, compiled once for all schedules."""
  for name in ("packed_matmul", "paged_attention") if NATIVE else ():
    native.build(name)
  options = BuildOptions(
    folder,
    max_model_len=256,
    token_budgets=(4, 16),
    max_num_seqs=_ROWS,
    prefill_chunk=16,
    num_blocks=128,
    block_size=8,
    attention=attention,
    matmul=matmul,
    dtype=dtype,
    deterministic=deterministic,
  )
  return build(options, lambda *_: None, lambda events: None)


def model(tmp_path_factory: pytest.TempPathFactory, family: str) -> str:
  """A folder, the same for every test of this module."""
  folder = tmp_path_factory.getbasetemp() / f"deterministic-{family}"
  if not folder.exists():
    write_model(folder, CASES[family][0] | {"num_hidden_layers": 2}, seed=1)
  return str(folder)


def any_params(rng: random.Random) -> SamplingParams:
  """What a neighbour may ask for; each flag of a step adds work to the sampler's program."""
  return SamplingParams(
    rng.randrange(3, 50),
    temperature=rng.choice((0.0, 0.9)),
    seed=rng.randrange(99),
    top_k=rng.choice((0, 0, 7)),
    top_p=rng.choice((1.0, 0.8)),
    min_p=rng.choice((0.0, 0.1)),
    repetition_penalty=rng.choice((1.0, 1.2)),
    logit_bias=rng.choice(((), ((3, 2.0),))),
    logprobs=rng.choice((None, 3)),
    ignore_eos=True,
  )


def served(found: Built, subject: SamplingParams, others: int, seed: int = 0, **changes) -> tuple[bytes, Engine]:
  """The bits of the subject's tokens and log probabilities among `others`, and the engine that served it."""
  values: list[float] = []

  def emit(events: list[TokenEvent]) -> None:
    for event in events:
      if event.request_id == "subject":
        values.extend(event.token_ids)
        for entry in (*event.prompt_logprobs, *event.logprobs):
          values.extend((entry.logprob, *(value for pair in entry.top for value in pair)))

  rng = random.Random(seed)
  config = dataclasses.replace(found.config, **changes)
  clock = iter(range(10**9))
  engine = Engine(Scheduler(config), found.runner, lambda: next(clock) * 1e-6, emit)

  def prompt(length: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(3, config.vocab_size) for _ in range(length))

  own = prompt(PROMPT, random.Random(7))
  requests = [Request(str(number), prompt(rng.randrange(1, 90), rng), any_params(rng)) for number in range(others)]
  if seed % 2:  # whoever has the same prefix computes it first, in steps of his own
    engine.submit(Request("first", (*own[:50], 5), SamplingParams(3, temperature=0.0, ignore_eos=True)))
    while engine.num_live:
      engine.step()
  requests.insert(rng.randrange(others + 1), Request("subject", own, subject, seed=subject.seed or 0))
  for request in requests:
    engine.submit(request)
    for _ in range(rng.randrange(3)):
      engine.step()
  while engine.num_live:
    engine.step()
  assert engine.dead is None
  return np.array(values, np.float32).tobytes(), engine


def schedules(found: Built) -> list[dict]:
  """Ways to serve the subject: some of every sort, and some drawn."""
  rng, budgets = random.Random(3), found.config.token_budgets
  ways: list[dict] = [
    {"others": 0},
    {"others": 0, "prefill_chunk": 1},
    {"others": 7, "prefill_chunk": 5, "seed": 1},
    {"others": 12, "num_blocks": 24, "seed": 2},
    {"others": 9, "batching": "static"},
    {"others": 5, "batching": "continuous", "seed": 3},
  ]
  for seed in range(4, 8):
    ways.append(
      {
        "others": rng.randrange(14),
        "seed": seed,
        "prefill_chunk": rng.randrange(1, budgets[-1] + 1),
        "num_blocks": rng.choice((20, 30, 128)),
        "policy": rng.choice(("fcfs", "sjf")),
      }
    )
  return ways + [{"others": 3, "token_budgets": (one,), "prefill_chunk": 4} for one in budgets if one >= _ROWS]


@pytest.mark.parametrize(("attention", "matmul", "family", "dtype"), KERNELS)
def test_same_bits_in_any_company(attention: str, matmul: str, family: str, dtype: str, tmp_path_factory) -> None:
  found = built(model(tmp_path_factory, family), True, attention, matmul, dtype)
  assert (found.attention, found.matmul) == (attention, matmul)
  packed = (attention, matmul) == ("cpu", "packed")
  assert found.config.token_budgets == ((4, 16) if packed else (16,))
  preempted = cached = 0
  for subject in SUBJECTS.values():
    alone, _ = served(found, subject, 0)
    for way in schedules(found):
      bits, engine = served(found, subject, **way)
      assert bits == alone, way
      preempted += engine.stats().num_preemptions
      cached += engine.stats().num_cached_tokens
  assert preempted > 5 and cached > 100, "schedules that try nothing"
  assert found.runner.compiles_after_ready == 0


def test_without_it_the_same_test_fails(tmp_path_factory) -> None:
  """XLA's products add in an order that depends on their shape: the schedules above show it, and the trial too."""
  found = built(model(tmp_path_factory, "qwen3"), False, "reference", "xla", "float32")
  subject = SUBJECTS["greedy"]
  alone, _ = served(found, subject, 0)
  assert any(served(found, subject, **way)[0] != alone for way in schedules(found))
  with pytest.raises(ConfigError, match="other bits in chunks of .* serve without --deterministic"):
    deterministic.try_out(found.runner, found.config, ShapeLadder(found.config.token_budgets, 8))


@pytest.mark.long
def test_another_process_gives_the_same_bits(tmp_path_factory) -> None:
  folder = model(tmp_path_factory, "qwen3")
  way = {"others": 4, "seed": 1, "prefill_chunk": 9}
  found = built(folder, True, "reference", "xla", "float32")
  program = (
    "from tests.e2e import test_deterministic as t\n"
    f"found = t.built({folder!r}, True, 'reference', 'xla', 'float32')\n"
    f"print(t.served(found, t.SUBJECTS['drawn'], **{way!r})[0].hex())\n"
  )
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.strip() == served(found, SUBJECTS["drawn"], 0)[0].hex()


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: deterministic.check([0] * 3, ("cpu",)), "over 3 devices .* at most 2 .* lower --num_devices"),
    (lambda: deterministic.check([0] * 3, ("cpu",), 1), "1 devices for prefill and 2 .* set --prefill_devices to half"),
    (lambda: deterministic.check([0], ("tpu",)), "attention=tpu .* set --attention=reference"),
  ],
)
def test_what_cannot_be_guaranteed_is_refused(call: Callable[[], None], message: str) -> None:
  with pytest.raises(ConfigError, match=message):
    call()


def test_which_ladder() -> None:
  budgets = (8, 16, 64, 128, 512)
  assert deterministic.ladder_of(budgets, 64, "cpu", "cpu", "packed") == budgets
  assert deterministic.ladder_of(budgets, 40, "cpu", "reference", "packed") == (64,)
  assert deterministic.ladder_of(budgets, 512, "cpu", "cpu", "xla") == (512,)
  assert deterministic.ladder_of(budgets, 8, "gpu", "gpu", "xla") == (128,)
  assert deterministic.ladder_of((8, 64), 32, "gpu", "gpu", "xla") == (64,)
  assert "padded to 64 tokens and 40 rows" in deterministic.cost(ShapeLadder((64,), 40))
  assert "padded, to 40 rows" in deterministic.cost(ShapeLadder(budgets, 40))


def test_a_small_pool_and_a_single_row_can_be_tried(tmp_path_factory) -> None:
  folder = model(tmp_path_factory, "llama3")
  options = BuildOptions(
    folder, max_model_len=8, token_budgets=(2,), max_num_seqs=1, prefill_chunk=2, num_blocks=1, block_size=8
  )
  options = dataclasses.replace(options, attention="reference", matmul="xla", deterministic=True)
  assert build(options, lambda *_: None, lambda events: None).config.token_budgets == (2,)
