"""The engine's own steps with the attention of CPU, and of GPU and TPU in Pallas' interpreters: all parts fit.

Greedy tokens of a small random model, of prompts in chunks beside decodes, against those of the reference.
"""

import dataclasses
import functools

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import pytest

from engine.sampling_params import SamplingParams
from pallas_kernels import native
from pallas_kernels.paged_attention import gpu
from tests.device.serving import serve
from tests.device.tiny_model import TINY, make_runner, random_params
from tests.kernels.test_gpu import small_grid

MODEL = dataclasses.replace(TINY, num_layers=1, head_dim=64, num_heads=4, num_kv_heads=2)
REQUESTS = [
  (list(range(2, 40)), SamplingParams(3, temperature=0.0, ignore_eos=True)),
  (list(range(50, 53)), SamplingParams(5, temperature=0.0, ignore_eos=True)),
]


def tokens(attention: str, dtype=jnp.bfloat16) -> list[list[int]]:
  runner = make_runner(
    MODEL,
    dtype=dtype,
    num_blocks=8,
    block_size=16,
    token_budgets=(24,),
    max_num_seqs=2,
    attention=attention,
    model=random_params(MODEL, dtype),
  )
  served, _ = serve(
    runner, REQUESTS, num_blocks=8, block_size=16, max_num_seqs=2, prefill_chunk=24, enable_prefix_caching=False
  )
  return [one.tokens for one in served]


@functools.cache
def expected(dtype=jnp.bfloat16) -> list[list[int]]:
  return tokens("reference", dtype)


@pytest.mark.usefixtures("gpu_interpreter")
def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
  wanted = expected()
  monkeypatch.setattr(gpu, "tuning_for", small_grid)
  monkeypatch.setattr(gpu, "attend", functools.partial(gpu.attend, interpret=plgpu.InterpretGPUParams()))
  assert tokens("gpu") == wanted


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(  # in float32 whole engines serve by it in tests/e2e
  "dtype", [pytest.param(jnp.float32, marks=pytest.mark.long), jnp.bfloat16], ids=["float32", "bfloat16"]
)
def test_cpu(dtype) -> None:
  native.build("paged_attention")
  assert tokens("cpu", dtype) == expected(dtype)


@pytest.mark.usefixtures("quick_compilation")
def test_tpu() -> None:
  wanted = expected()
  pltpu.set_tpu_interpret_mode(pltpu.InterpretParams())
  try:
    assert tokens("tpu") == wanted
  finally:
    pltpu.set_tpu_interpret_mode(None)
    pltpu.reset_tpu_interpret_mode_state()
