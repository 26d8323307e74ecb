"""A vocabulary on four devices: the sampler gives each row what one device gives it, for the same logits.

In a process of its own, since devices are counted at start.
"""

import os
import pathlib
import subprocess
import sys

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from engine.device import split_sampler
from engine.device.mesh import AXIS, make_mesh
from engine.device.model_input import unpack
from engine.device.sampler import Sampled, SlotState, accept_drafts
from engine.device.split_sampler import VocabularySplit
from engine.device.step_packer import Packer
from engine.sampling_params import SamplingParams
from pallas_kernels import native
from tests.device.test_sampler import EOS, KERNELS, SHAPE, SLOTS, Row, V, packed_step, run

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = 4
SHARE = 96  # 4 times 96 is 84 more than 300: the last device has 12 tokens
SPLIT = VocabularySplit(AXIS, DEVICES, V, SHARE)
PARAMS = [
  {"temperature": 0.0},
  {"temperature": 0.0, "logprobs": 20},
  {"temperature": 1.5, "top_k": 7, "logprobs": 3},
  {"temperature": 0.8, "top_p": 0.7, "min_p": 0.02},
  {"temperature": 1.0, "presence_penalty": 1.5, "repetition_penalty": 1.3, "frequency_penalty": -0.5},
  {"temperature": 0.0, "allowed_token_ids": (3, 4, 7, 99, 299), "min_tokens": 9},
  {"temperature": 1.0, "allowed_token_ids": (3, 4), "min_tokens": 9},  # no token but those that end the request
  {"temperature": 0.0, "logit_bias": ((299, 9.0), (288, 9.5)), "logprobs": 1},
]


def run_split(wide: bool):
  """The function `run` of test_sampler, of padded arguments, on DEVICES devices."""
  kernels = ("reference",) * 3 if wide else [native.choose_implementation(name, "cpu") for name in KERNELS]

  def on_each(logits, packed, history, bias, mask):
    inputs = unpack(Packer(SLOTS, 32, 4, EOS).layout(SHAPE), packed)
    rows, state = inputs.sampling, SlotState(history, bias, mask)
    sampled = split_sampler.sample_split(logits, rows, state, SPLIT, wide, inputs.num_logit_rows, *kernels)
    accepted, _ = accept_drafts(rows, sampled)
    return sampled, split_sampler.remember_split(state, rows, sampled.tokens, accepted, SPLIT).history

  split, whole = P(None, AXIS), P()
  function = jax.shard_map(
    on_each,
    mesh=make_mesh(jax.devices()[:DEVICES]),
    in_specs=(split, whole, split, split, split),
    out_specs=(Sampled(*[whole] * 5), split),
    check_vma=False,
  )
  return jax.jit(function, compiler_options={"xla_backend_optimization_level": 1})


def pad(array: np.ndarray, width: int) -> np.ndarray:
  return np.pad(array, ((0, 0), (0, width - array.shape[1])))


def compare(wide: bool) -> None:
  rng = np.random.default_rng(0)
  function = run_split(wide)
  for trial in range(24):
    count = int(rng.integers(1, SHAPE.rows)) if trial else SLOTS
    rows = []
    for _ in range(count):
      params = SamplingParams(20, **PARAMS[int(rng.integers(len(PARAMS)))])
      allowed = tuple(rng.choice(V, 5, replace=False).tolist()) if rng.random() < 0.3 else None
      if params.allowed_token_ids is not None:
        allowed = None
      rows.append(Row(params, seed=int(rng.integers(2**32)), allowed=allowed))
    logits = rng.normal(size=(count, V)).astype(np.float32) * 3
    if trial % 3 == 1:
      logits = np.round(logits)  # equal logits, on different devices
    if trial % 4 == 3:
      logits[0, int(rng.integers(V))] = rng.choice([np.nan, np.inf, -np.inf])
    (whole, packed, history, bias, mask), _ = packed_step(rows, logits)
    given = pad(whole, 4 * SHARE), packed, pad(history, 4 * SHARE), pad(bias, 4 * SHARE), pad(mask, 4 * SHARE // 32)
    expected, after = run(whole, packed, history, bias, mask, wide)
    found, split_after = function(*given)
    for name in ("tokens", "bad", "top_ids"):
      one, four = (np.asarray(getattr(each, name))[:count] for each in (expected, found))
      np.testing.assert_array_equal(four, one, f"{name} of trial {trial}, wide={wide}")
    for name in ("logprobs", "top_logprobs"):
      one, four = (np.asarray(getattr(each, name))[:count] for each in (expected, found))
      np.testing.assert_allclose(four, one, atol=1e-5, err_msg=f"{name} of trial {trial}")
    # The padding slot counts tokens of rows without penalties, and nobody reads it.
    np.testing.assert_array_equal(np.asarray(split_after)[:-1, :V], np.asarray(after)[:-1])
    assert not np.asarray(split_after)[:, V:].any()


@pytest.mark.long  # tests of whole engines on several devices stay in `make test`
@pytest.mark.parametrize("wide", ["wide", "narrow"])
def test_four_devices_sample_what_one_does(wide: str) -> None:
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
  }
  command = [sys.executable, "-m", "tests.device.test_split_sampler", wide]
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and done.stdout == "compared\n", done.stderr[-4000:]


if __name__ == "__main__":
  compare(sys.argv[1] == "wide")
  print("compared")
