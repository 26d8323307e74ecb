"""What tests of kernels need of Pallas' interpreters."""

from collections.abc import Iterator
import threading
import types

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
import pytest


class _Impatient(threading.Condition):
  """A deadlock of the kernel fails the test instead of waiting for ever."""

  def wait(self, timeout: float | None = None) -> bool:
    if not super().wait(timeout=60.0 if timeout is None else timeout):
      raise TimeoutError("a warpgroup waits for ever")
    return True


@pytest.fixture
def quick_compilation() -> Iterator[None]:
  """Nearly all the time goes into compiling the interpreters' programs, which run once."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def gpu_interpreter(monkeypatch: pytest.MonkeyPatch, quick_compilation: None) -> Iterator[None]:
  """Compiles quickly, does not hang, and leaves no state."""
  names = vars(threading) | {"Condition": _Impatient}
  monkeypatch.setattr(shared_memory, "threading", types.SimpleNamespace(**names))
  yield
  gpu_callbacks.reset_gpu_interpret_mode_state()
