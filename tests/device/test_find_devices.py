"""JAX on the CPU of a machine that has a GPU: refused, unless the user chose the CPU."""

from collections.abc import Iterator

import jax
import pytest

from engine import accelerator
from engine.device.build import find_devices
from engine.errors import ConfigError
from tests.engine.test_accelerator import nvidia


@pytest.fixture
def machine_with_a_gpu(tmp_path, monkeypatch) -> Iterator[None]:
  """JAX's backends are there already, so only the inputs of find_devices change."""
  root, read = nvidia(tmp_path, "580.82.07"), accelerator.read_machine
  monkeypatch.setattr(accelerator, "read_machine", lambda **settings: read(root, **settings))
  monkeypatch.setenv("PATH", str(tmp_path))
  asked = jax.config.jax_platforms
  jax.config.update("jax_platforms", None)
  yield
  jax.config.update("jax_platforms", asked)


@pytest.mark.usefixtures("machine_with_a_gpu")
def test_the_cpu_is_not_taken_in_silence(monkeypatch):
  with pytest.raises(ConfigError, match=r"JAX runs on the CPU, .*install JAX for it \(make setup ACCELERATOR=cuda13"):
    find_devices(1)
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
  assert find_devices(1)[0].platform == "cpu"
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
  jax.config.update("jax_platforms", "cpu")  # as JAX_PLATFORMS=cpu does
  assert find_devices(1)[0].platform == "cpu"
