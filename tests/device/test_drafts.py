"""Steps that verify drafts: any drafts in any batch give the tokens and log probabilities of no drafts."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import native
from tests.device.drafts import DraftCounts, serve_with_drafts
from tests.device.tiny_model import TINY, make_runner, random_params

POISON = 50
KERNELS = ("argmax", "sampling", "adjust")


@pytest.fixture(scope="module")
def model():
  """A model in which the embedding of POISON is NaN."""
  graphdef, state = random_params(TINY, jnp.float32)
  state = jax.tree.map(lambda leaf: leaf, state)
  embed = state["embed"]["matrix"]
  embed["array"] = embed["array"].replace(embed["array"].get_value().at[POISON].set(jnp.nan))
  return graphdef, state


@pytest.mark.parametrize("kernels", ["reference", "cpu", "deterministic"])
def test_drafts_change_no_token_and_no_log_probability(model, kernels):
  spec = {}
  if kernels == "cpu":
    spec = {name: native.choose_implementation(name, "cpu") for name in KERNELS}
  elif kernels == "deterministic":
    spec = {"deterministic": True}
  runner = make_runner(model=model, num_blocks=140, spec_settings=spec)
  runner.warm_up(lambda *_: None)
  runner.seal()
  counts = DraftCounts()
  for seed in range(6):
    counts += serve_with_drafts(runner, seed, poison=POISON)
  assert counts.accepted > 800 and counts.rejected > 500 and counts.in_flight > 100, counts
  assert counts.bad > 5 and counts.preempted > 10, counts
  assert runner.compiles_after_ready == 0
