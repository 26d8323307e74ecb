"""Layers with different attention in one model: each group has its plan and its shape of KV, all one block table."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from engine.batch import Admission, Batch
from engine.device import kv_cache
from engine.device.model_input import StepLayout, unpack
from engine.device.step_packer import Packer
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from pallas_kernels.paged_attention.plan import Geometry, make_plan
from tests.device.serving import serve
from tests.device.tiny_model import TINY, dense_greedy, make_runner, random_params

pytestmark = pytest.mark.usefixtures("quick_steps")

_NARROW = dataclasses.replace(TINY.layers[0], window=5, rope_theta=300.0, scale=0.5)
_WIDE = dataclasses.replace(TINY.layers[0], num_kv_heads=4, soft_cap=1.5)
MIXED = dataclasses.replace(TINY, num_layers=3, layer_attention=(_NARROW, _WIDE, _NARROW))
GREEDY = SamplingParams(8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("attention", ["auto", pytest.param("reference", marks=pytest.mark.long)])
def test_a_mixed_model_serves_what_it_computes(attention):
  """Prompts in chunks beside decodes, over pages of two shapes, against the same model without a cache."""
  model = random_params(MIXED, jnp.float32)
  rng = np.random.default_rng(1)
  prompts = [rng.integers(2, MIXED.vocab_size, size=size).tolist() for size in (23, 4, 11)]
  runner = make_runner(MIXED, model=model, attention=attention, token_budgets=(16,))
  assert runner.kv[0].size * 2 == runner.kv[1].size and runner.kv[0].shape == runner.kv[2].shape
  served, _ = serve(runner, [(prompt, GREEDY) for prompt in prompts], prefill_chunk=8)
  assert [one.tokens for one in served] == [dense_greedy(model, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("part", ["window", "soft_cap", "scale", "rope_theta"])
def test_each_part_of_a_declaration_counts(part):
  """What the test above compares would differ, if a layer took another's."""
  model = random_params(MIXED, jnp.float32)
  layers = tuple(dataclasses.replace(layer, **{part: getattr(TINY.layers[0], part)}) for layer in MIXED.layers)
  other = random_params(dataclasses.replace(MIXED, layer_attention=layers), jnp.float32)
  prompt = list(range(2, 32))
  assert dense_greedy(model, prompt, 8) != dense_greedy(other, prompt, 8)


def test_bytes_of_a_block_are_those_of_all_layers():
  # K and V, 4 tokens, heads of 8, f32: of 2, 4 and 2 heads
  assert kv_cache.bytes_per_block(MIXED, 4, jnp.dtype(jnp.float32)) == 2 * 4 * 8 * 4 * (2 + 4 + 2)


def test_every_plan_travels_with_the_step():
  """Each at its own place, made of the step's rows; also where a step of decodes is made from the one before."""
  shape, width, block = StepShape(32, 4, 4), 16, 4
  geometry = Geometry(32, 4, width, block, 4, 2, 8)
  plans = tuple(make_plan(dataclasses.replace(geometry, sliding_window=window), 8, 4, 2) for window in (None, 5))
  layout = StepLayout(shape, width, 4, 1, plans)
  packer = Packer(4, width, block, (1,))
  lengths = (20, 5)
  for slot, length in enumerate(lengths):
    packer.admit(Admission(slot, tuple(range(length)), length, tuple(range(1, width + 1)), GREEDY, 0))
  steps = [((0, 0), lengths, tuple(tuple(range(length)) for length in lengths))]
  steps += [(tuple(length + step for length in lengths), (1, 1), ((), ())) for step in range(4)]
  for starts, counts, ids in steps:
    batch = Batch(0, shape, ("0", "1"), (0, 1), starts, counts, (1, 1), (True, True), ids)
    inputs = unpack(layout, jnp.asarray(packer.pack(batch, layout)[0]))
    rows = np.asarray(inputs.query_starts), np.asarray(inputs.kv_lens)
    assert rows[1].tolist() == [start + count for start, count in zip(starts, counts, strict=True)] + [0, 0]
    for plan, made in zip(plans, inputs.plans, strict=True):
      np.testing.assert_array_equal(made, plan.make_work(*rows))
    if counts == (1, 1):  # only decodes are split by what a window leaves of them
      assert np.asarray(inputs.plans[0]).tolist() != np.asarray(inputs.plans[1]).tolist()
