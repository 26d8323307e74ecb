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
from models.config import ModelConfig
from pallas_kernels import native
from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.fp8_kv import BYTES
from tests.device.serving import serve
from tests.device.test_host_blocks import Talks
from tests.device.tiny_model import TINY, make_runner, random_params
from tests.kernels.test_gpu import one_sm, short_splits

MODEL = dataclasses.replace(TINY, num_layers=1, head_dim=64, num_heads=4, num_kv_heads=2)
# Two groups of layers, each with its own plan, scores and shape of KV.
_WINDOW = dataclasses.replace(MODEL.layers[0], window=9, rope_theta=300.0)
_CAP = dataclasses.replace(MODEL.layers[0], num_kv_heads=4, soft_cap=2.0)
MIXED = dataclasses.replace(MODEL, num_layers=2, layer_attention=(_WINDOW, _CAP))
each_model = pytest.mark.parametrize(
  "model", [MODEL, pytest.param(MIXED, marks=pytest.mark.long)], ids=["alike", "mixed"]
)
REQUESTS = [
  (list(range(2, 40)), SamplingParams(3, temperature=0.0, ignore_eos=True)),
  (list(range(50, 53)), SamplingParams(5, temperature=0.0, ignore_eos=True)),
]


def tokens(
  attention: str, model: ModelConfig, dtype=jnp.bfloat16, kv_dtype=None, block_size: int = 16
) -> list[list[int]]:
  runner = make_runner(
    model,
    dtype=dtype,
    kv_dtype=kv_dtype,
    num_blocks=8,
    block_size=block_size,
    token_budgets=(24,),
    max_num_seqs=2,
    attention=attention,
    model=random_params(model, dtype),
  )
  served, _ = serve(
    runner, REQUESTS, num_blocks=8, block_size=block_size, max_num_seqs=2, prefill_chunk=24, prefix_cache_scope="off"
  )
  return [one.tokens for one in served]


@functools.cache
def expected(model: ModelConfig, dtype=jnp.bfloat16, kv_dtype=None) -> list[list[int]]:
  return tokens("reference", model, dtype, kv_dtype)


@pytest.mark.kernels
@pytest.mark.parametrize("kv_dtype", [None, BYTES], ids=["kv", "fp8_kv"])
@each_model
@pytest.mark.usefixtures("gpu_interpreter")
def test_gpu(model: ModelConfig, kv_dtype, monkeypatch: pytest.MonkeyPatch) -> None:
  wanted = expected(model, kv_dtype=kv_dtype)
  monkeypatch.setattr(gpu, "tuning_for", short_splits)
  monkeypatch.setattr(gpu, "count_sms", one_sm)
  monkeypatch.setattr(gpu, "attend", functools.partial(gpu.attend, interpret=plgpu.InterpretGPUParams()))
  assert tokens("gpu", model, kv_dtype=kv_dtype) == wanted


@each_model
@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(  # in float32 whole engines serve by it in tests/e2e
  "dtype", [pytest.param(jnp.float32, marks=pytest.mark.long), jnp.bfloat16], ids=["float32", "bfloat16"]
)
def test_cpu(model: ModelConfig, dtype) -> None:
  native.build_library("paged_attention")
  assert tokens("cpu", model, dtype) == expected(model, dtype)


@pytest.mark.kernels
@pytest.mark.parametrize("kv_dtype", [None, BYTES, jnp.dtype(jnp.int8)], ids=["kv", "fp8_kv", "int8_kv"])
@each_model
@pytest.mark.usefixtures("quick_compilation")
def test_tpu(model: ModelConfig, kv_dtype) -> None:
  wanted = expected(model, kv_dtype=kv_dtype)
  pltpu.set_tpu_interpret_mode(pltpu.InterpretParams())
  try:
    block_size = 128 if kv_dtype == jnp.int8 else 32
    assert tokens("tpu", model, kv_dtype=kv_dtype, block_size=block_size) == wanted
  finally:
    pltpu.set_tpu_interpret_mode(None)
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.kernels
@pytest.mark.usefixtures("quick_compilation")
def test_int8_blocks_of_a_tpu_are_shared_and_come_back_from_the_host() -> None:
  """A prompt's first block serves the next request from the pool, and after its eviction from the host."""
  prompts = [[(7 * number + 3 * place) % 90 + 2 for place in range(131)] for number in range(2)]
  pltpu.set_tpu_interpret_mode(pltpu.InterpretParams())
  try:
    runner = make_runner(
      MODEL,
      kv_dtype=jnp.dtype(jnp.int8),
      num_blocks=2,
      block_size=128,
      token_budgets=(136,),
      max_num_seqs=1,
      max_model_len=256,
      attention="tpu",
      model=random_params(MODEL, jnp.float32),
      num_host_blocks=4,
    )
    settings = {"block_size": 128, "max_num_seqs": 1, "max_model_len": 256, "num_blocks": 2, "prefill_chunk": 136}
    talks = Talks(runner, num_host_blocks=4, **settings)
    first, second = (talks.ask(prompt, 3) for prompt in prompts)
    assert talks.ask(prompts[1], 3) == second and talks.engine.stats().num_cached_tokens == 128
    assert talks.ask(prompts[0], 3) == first and talks.counts.num_loaded == 1 and not talks.counts.num_failed
  finally:
    pltpu.set_tpu_interpret_mode(None)
    pltpu.reset_tpu_interpret_mode_state()
