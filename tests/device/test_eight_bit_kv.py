"""A KV pool of int8 or fp8: the same tokens whatever batch, chunks and place of blocks, and close to a float pool."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from engine.device import kv_cache
from engine.device.runner import ModelRunner
from engine.sampling_params import SamplingParams
from extensions.prefill_decode.identity import describe_difference, describe_identity
from pallas_kernels.paged_attention import api, int8_kv
from tests.device.serving import Served, serve
from tests.device.test_host_blocks import NUM_BLOCKS, NUM_HOST_BLOCKS, PROMPTS, Talks
from tests.device.tiny_model import TINY, make_runner

pytestmark = pytest.mark.usefixtures("quick_steps")

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
REQUESTS = [(prompt, GREEDY) for prompt in PROMPTS]


def make(**settings) -> ModelRunner:
  runner = make_runner(num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS, token_budgets=(32,), **settings)
  runner.warm_up(lambda *_: None)
  runner.seal()
  return runner


@pytest.fixture(scope="module", params=["int8", "fp8"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
  return make(kv_dtype=api.EIGHT_BIT_KV[request.param])


def only_int8(runner: ModelRunner) -> None:
  if runner.kv[0].dtype != jnp.int8:
    pytest.skip("fp8 has no scales")


def tokens_of(served: list[Served]) -> list[list[int]]:
  return [each.tokens for each in served]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[Served]:
  """Each request by itself, without shared prefixes."""
  return [serve(runner, [each], num_blocks=NUM_BLOCKS, prefix_cache_scope="off")[0][0] for each in REQUESTS]


@pytest.mark.parametrize("chunk", [32, 7, 1])
def test_neither_the_batch_nor_chunks_nor_preemption_change_tokens(runner: ModelRunner, chunk: int) -> None:
  params = dataclasses.replace(GREEDY, max_tokens=14)
  requests = [(prompt[number:][:10], params) for number, prompt in enumerate(PROMPTS + PROMPTS)]
  settings = {"num_blocks": NUM_BLOCKS, "prefix_cache_scope": "off"}
  served, engine = serve(runner, requests, prefill_chunk=chunk, **settings)
  assert engine.stats().num_preemptions > 0, "the pool must be too small for all"
  assert tokens_of(served) == [serve(runner, [each], **settings)[0][0].tokens for each in requests]


def test_shared_prefixes_and_copies_on_the_host_change_no_token(runner: ModelRunner, alone) -> None:
  talks = Talks(runner)
  for _ in range(2):
    assert [talks.ask(prompt) for prompt in PROMPTS for _ in range(2)] == [
      tokens for tokens in tokens_of(alone) for _ in range(2)
    ]
  assert talks.engine.stats().num_cached_tokens > 0
  assert talks.counts.num_loaded > 0 and not talks.counts.num_failed


def test_log_probabilities_are_those_of_a_float_pool_within_the_rounding(runner: ModelRunner, alone) -> None:
  other = make()
  plain, _ = serve(other, REQUESTS[:1], num_blocks=NUM_BLOCKS)
  ours, theirs = (np.array([entry.logprob for entry in served.logprobs]) for served in (alone[0], plain[0]))
  assert alone[0].tokens == plain[0].tokens
  difference = np.abs(ours - theirs).max()
  name = api.name_kv_dtype(runner.kv[0].dtype)
  assert 0 < difference < {"int8": 0.02, "fp8": 0.1}[name]
  refused = describe_difference(describe_identity(runner), describe_identity(other))
  assert refused == f"kv_dtype=float32 here kv_dtype={name}", (
    "a prefill and a decode server with these exchange no blocks"
  )


def test_a_block_has_the_numbers_and_the_scales_if_any(runner: ModelRunner) -> None:
  heads = 2 * TINY.num_layers * TINY.num_kv_heads * 4
  block_bytes = kv_cache.bytes_per_block(TINY, 4, runner.kv[0].dtype)
  assert block_bytes == heads * int8_kv.stored_size(TINY.head_dim, runner.kv[0].dtype)
  assert sum(leaf.nbytes for leaf in runner.kv) == block_bytes * (NUM_BLOCKS + 1)


def test_a_copy_without_its_scales_is_noticed(runner: ModelRunner, alone) -> None:
  """What the test of copies would miss if tokens did not depend on scales."""
  only_int8(runner)
  talks = Talks(runner)
  for prompt in PROMPTS:
    talks.ask(prompt)
  writer = talks.engine._runner.host_blocks._writer
  write = writer.write_piece

  def without_scales(kv, blocks, piece):
    return write(kv, blocks, tuple(leaf.at[..., -int8_kv.SCALE_BYTES :].set(0) for leaf in piece))

  writer.write_piece = without_scales
  try:
    assert [talks.ask(prompt) for prompt in PROMPTS] != tokens_of(alone)
    assert talks.counts.num_loaded > 0
  finally:
    writer.write_piece = write
