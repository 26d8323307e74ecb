"""What tests of kernels need of Pallas' interpreters."""

from collections.abc import Iterator
import pathlib
import threading
import types

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
import pytest

from pallas_kernels import native

NATIVE_H = pathlib.Path(native.__file__).with_name("native.h")


class _Impatient(threading.Condition):
  """A deadlock of the kernel fails the test instead of waiting for ever."""

  def wait(self, timeout: float | None = None) -> bool:
    if not super().wait(timeout=180.0 if timeout is None else timeout):
      raise TimeoutError("a warpgroup waits for ever")
    return True


@pytest.fixture(scope="session")
def quick_cpp(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
  """Flags for changed C++ kernels: not optimized, and with native.h compiled before, which takes as long as they do."""
  header, flags = tmp_path_factory.mktemp("header") / "native.h", ("-O0", "-w")
  header.write_bytes(NATIVE_H.read_bytes())
  native.compile_library(NATIVE_H, header.with_name("native.h.gch"), (*flags, "-x", "c++-header"))
  return *flags, "-include", str(header)


@pytest.fixture
def gpu_interpreter(monkeypatch: pytest.MonkeyPatch, quick_compilation: None) -> Iterator[None]:
  """Compiles quickly, does not hang, and leaves no state."""
  names = vars(threading) | {"Condition": _Impatient}
  monkeypatch.setattr(shared_memory, "threading", types.SimpleNamespace(**names))
  yield
  gpu_callbacks.reset_gpu_interpret_mode_state()
