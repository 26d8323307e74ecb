"""Tests that a model which does not fit is rejected, with the missing bytes, before its weights are read."""

import pathlib
import re

import jax
import pytest

from engine import free_memory
from engine.device import kv_cache, memory_check, weights
from engine.device.build import build_engine
from engine.device.options import BuildOptions
from engine.errors import ConfigError
from tools.make_random_model import write_model
from tools.parity.cases import CASES

MIB = 2**20
SHAPES = pathlib.Path(__file__).parents[2] / "models" / "shapes"


def loaded(folder: str, **changes) -> None:
  build_engine(BuildOptions(folder, **changes), lambda *_: None, lambda _: None)


@pytest.fixture
def nothing_is_read(monkeypatch):
  for name in ("assemble_pieces", "_mapped", "_generate"):
    monkeypatch.setattr(weights, name, lambda *_: pytest.fail("weights were read"))


def test_it_is_said_by_how_much(monkeypatch, nothing_is_read):
  monkeypatch.setattr(kv_cache, "free_bytes", lambda mesh, step_bytes: 8 * 2**30)
  with pytest.raises(ConfigError) as refused:
    loaded(
      str(SHAPES / "llama3-8b"),
      random_weights=True,
      dtype="bfloat16",
      max_model_len=8192,
      attention="reference",
      prefill_chunk=512,
    )
  # 8,030,261,248 parameters of 2 bytes; 512 blocks and the padding block, 16 tokens, 32 layers, K and V of 8 x 128.
  weights_mib, kv_mib = -(-8_030_261_248 * 2 // MIB), -(-513 * 16 * 32 * 8 * 128 * 2 * 2 // MIB)
  # 512 tokens of 2 x 4096 and 2 x 14336 numbers, 64 rows of 3 x 128256.
  step = 512 * 2 * (4096 + 14336) * 2 + 64 * 3 * 128_256 * 4
  missing = -(-(8_030_261_248 * 2 + 513 * 16 * 32 * 8 * 128 * 2 * 2 + step - 8 * 2**30) // MIB)
  found = str(refused.value)
  assert f"needs {weights_mib} MiB for weights, {kv_mib} MiB for KV (one sequence of 8192 tokens) and at" in found
  assert f"at least {-(-step // MIB)} MiB for a step (512 tokens of 64 sequences) on each device" in found
  assert f"on each device, and 8192 MiB are free: {missing} MiB are missing; use more devices (--num_devices)" in found


@pytest.mark.parametrize("setting", [{"kv_cache_mb": 10**9}, {"num_blocks": 10**9}], ids=str)
def test_a_pool_that_does_not_fit_is_refused_first(tmp_path, setting, nothing_is_read):
  write_model(tmp_path / "tiny", CASES["llama3"][0] | {"num_hidden_layers": 2}, seed=3)
  ((name, value),) = setting.items()
  with pytest.raises(ConfigError, match=rf"for KV \(--{name}={value}\) .* of this machine's memory .* MiB are missing"):
    loaded(str(tmp_path / "tiny"), **setting)


def test_a_step_that_does_not_fit_is_refused_first(tmp_path, nothing_is_read):
  write_model(tmp_path / "tiny", CASES["llama3"][0] | {"num_hidden_layers": 2}, seed=3)
  with pytest.raises(
    ConfigError, match=r"for a step \(2000000000 tokens of 64 sequences\).* smaller .*--token_budgets"
  ):
    loaded(str(tmp_path / "tiny"), token_budgets=(8, 64, 2 * 10**9))


def test_what_fits_is_not_refused():
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
  leaf = jax.ShapeDtypeStruct((MIB,), "float32", sharding=jax.NamedSharding(mesh, jax.P()))
  free = memory_check.host_free_bytes()
  assert free is not None and free > 16 * MIB
  memory_check.check_fits("m", mesh, {"a": leaf}, 0, "nothing")
  with pytest.raises(ConfigError, match=re.escape("m needs 4 MiB for weights")):
    memory_check.check_fits("m", mesh, {"a": leaf}, free + 2**34, "much")


@pytest.mark.parametrize(
  ("files", "free"),
  [
    ({}, None),
    ({"meminfo": "MemAvailable: many kB\n"}, None),
    ({"meminfo": "MemAvailable: 2048 kB\nSwapFree: 1024 kB\n"}, 3 * MIB),
    ({"meminfo": "MemAvailable: 2048 kB\nSwapFree: 0 kB\n", "memory.max": "max\n"}, 2 * MIB),
    (
      {
        "meminfo": "MemAvailable: 9000 kB\nSwapFree: 0 kB\n",
        "memory.max": f"{5 * MIB}\n",
        "memory.current": f"{4 * MIB}\n",
        "memory.stat": f"anon 1\ninactive_file {2 * MIB}\n",
      },
      3 * MIB,
    ),
  ],
  ids=str,
)
def test_memory_of_the_machine_or_of_the_container(tmp_path, monkeypatch, files, free):
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
  monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
  assert memory_check.host_free_bytes() == free
