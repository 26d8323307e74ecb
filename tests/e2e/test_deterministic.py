"""With --deterministic a request has the same bits in any company, with every kernel that a CPU can run.

The same compiled programs serve one request in many ways: alone, in crowds of every sort of sampling, in chunks of any
length, preempted, with its prefix from the cache, in waves. Compared are the bits of all log probabilities.
"""

import dataclasses
import functools
import pathlib
import subprocess
import sys

import pytest

from engine.device import deterministic
from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.errors import ConfigError
from engine.shapes import ShapeLadder
from pallas_kernels import native
from tools.bench import batch_invariance
from tools.make_random_model import write_model
from tools.parity.cases import CASES

ROOT = pathlib.Path(__file__).resolve().parents[2]
NATIVE = native.compiler() is not None
# Attention, matmul, family (with a norm of queries and keys, or a window) and dtype.
KERNELS = [
  pytest.param("reference", "xla", "qwen3", "float32", marks=pytest.mark.long if NATIVE else ()),
  pytest.param("reference", "xla", "mistral", "bfloat16", marks=pytest.mark.long),
  *([("cpu", "packed", "qwen3", "float32")] if NATIVE else []),
  *([pytest.param("cpu", "xla", "llama3", "float32", marks=pytest.mark.long)] if NATIVE else []),
]


@functools.cache
def built(folder: str, deterministic: bool, attention: str, matmul: str, dtype: str) -> Built:
  """An engine's programs, compiled once for all schedules."""
  for name in ("packed_matmul", "paged_attention") if NATIVE else ():
    native.build_library(name)
  options = BuildOptions(
    folder,
    max_model_len=256,
    token_budgets=(4, 16),
    max_num_seqs=8,
    prefill_chunk=16,
    num_blocks=128,
    block_size=8,
    attention=attention,
    matmul=matmul,
    dtype=dtype,
    deterministic=deterministic,
  )
  return build_engine(options, lambda *_: None, lambda events: None)


def model(tmp_path_factory: pytest.TempPathFactory, family: str) -> str:
  """A folder, the same for every test of this module."""
  folder = tmp_path_factory.getbasetemp() / f"deterministic-{family}"
  if not folder.exists():
    write_model(folder, CASES[family][0] | {"num_hidden_layers": 2}, seed=1)
  return str(folder)


def served(found: Built, subject: str, **way) -> batch_invariance.Served:
  """The request called `subject`, served in a way."""
  return batch_invariance.serve(found.runner, found.config, batch_invariance.SUBJECTS[subject], **way)


@pytest.mark.parametrize(("attention", "matmul", "family", "dtype"), KERNELS)
def test_same_bits_in_any_company(attention: str, matmul: str, family: str, dtype: str, tmp_path_factory) -> None:
  found = built(model(tmp_path_factory, family), True, attention, matmul, dtype)
  assert (found.attention, found.matmul) == (attention, matmul)
  packed = (attention, matmul) == ("cpu", "packed")
  assert found.config.token_budgets == ((4, 16) if packed else (16,))
  preempted = cached = 0
  for subject in batch_invariance.SUBJECTS:
    alone = served(found, subject).bits
    for way in batch_invariance.ways(found.config):
      one = served(found, subject, **way)
      assert one.bits == alone, way
      preempted += one.stats.num_preemptions
      cached += one.stats.num_cached_tokens
  assert preempted >= 4 and cached >= 40, "schedules that try nothing"
  assert found.runner.compiles_after_ready == 0


@pytest.mark.long
def test_without_it_the_same_test_fails(tmp_path_factory) -> None:
  """XLA's products add in an order that depends on their shape: the schedules above show it, and the trial too."""
  found = built(model(tmp_path_factory, "qwen3"), False, "reference", "xla", "float32")
  alone = served(found, "greedy").bits
  assert any(served(found, "greedy", **way).bits != alone for way in batch_invariance.ways(found.config))
  with pytest.raises(ConfigError, match="other bits in chunks of .* serve without --deterministic"):
    deterministic.try_determinism(found.runner, found.config, ShapeLadder(found.config.token_budgets, 8))


@pytest.mark.long
def test_another_process_gives_the_same_bits(tmp_path_factory) -> None:
  folder = model(tmp_path_factory, "qwen3")
  way = {"others": 4, "seed": 1, "prefill_chunk": 9}
  found = built(folder, True, "reference", "xla", "float32")
  program = (
    "from tests.e2e import test_deterministic as t\n"
    f"found = t.built({folder!r}, True, 'reference', 'xla', 'float32')\n"
    f"print(t.served(found, 'sampled', **{way!r}).bits.hex())\n"
  )
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.strip() == served(found, "sampled").bits.hex()


def test_what_cannot_be_guaranteed_is_refused() -> None:
  with pytest.raises(ConfigError, match="attention=tpu .* set --attention=reference"):
    deterministic.check_determinism_support(("tpu",))


def test_which_ladder() -> None:
  budgets = (8, 16, 64, 128, 512)
  assert not deterministic.needs_one_size("cpu", "packed")
  assert all(deterministic.needs_one_size(*how) for how in (("reference", "packed"), ("cpu", "xla"), ("gpu", "xla")))
  assert "padded to 64 tokens and 40 rows" in deterministic.describe_cost(ShapeLadder((64,), 40))
  assert "padded, to 40 rows" in deterministic.describe_cost(ShapeLadder(budgets, 40))


def test_a_small_pool_and_a_single_row_can_be_tried(tmp_path_factory) -> None:
  folder = model(tmp_path_factory, "llama3")
  options = BuildOptions(
    folder, max_model_len=8, token_budgets=(2,), max_num_seqs=1, prefill_chunk=2, num_blocks=1, block_size=8
  )
  options = dataclasses.replace(options, attention="reference", matmul="xla", deterministic=True)
  assert build_engine(options, lambda *_: None, lambda events: None).config.token_budgets == (2,)


@pytest.mark.parametrize("budgets", [(2, 4), (4,)])
def test_a_ladder_smaller_than_the_trial_prompt(tmp_path_factory, budgets) -> None:
  folder = model(tmp_path_factory, "llama3")
  options = BuildOptions(
    folder, max_model_len=64, token_budgets=budgets, max_num_seqs=4, prefill_chunk=4, num_blocks=16, deterministic=True
  )
  found = build_engine(options, lambda *_: None, lambda events: None).config.token_budgets
  assert found == (budgets if native.compiler() is not None else budgets[-1:])
