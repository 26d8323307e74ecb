"""What tests of kernels need of Pallas' interpreters."""

from collections.abc import Callable, Iterator
import ctypes
import pathlib
import threading
import types
from typing import Any

import jax
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
def with_bug(
  tmp_path: pathlib.Path, quick_cpp: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, tuple[str, str]], None]:
  """Has a C++ kernel called with a seeded bug, until the test ends."""

  def seed(kernel: str, bug: tuple[str, str]) -> None:
    """Args: kernel: of native.ENTRIES; bug: what is in its source once, and what takes its place."""
    right, wrong = bug
    source = native.source(kernel)
    text = source.read_text()
    for header in source.parent.glob("*.h"):
      line = f'#include "{header.relative_to(native._ROOT)}"\n'
      assert line in text
      text = text.replace(line, header.read_text().replace("#pragma once\n", ""))
    assert text.count(right) == 1, f"{right!r} is not once in {source.name}"
    (tmp_path / "cpu.cc").write_text(text.replace(right, wrong))
    library = ctypes.CDLL(str(native.compile_library(tmp_path / "cpu.cc", tmp_path / "cpu.so", quick_cpp)))
    entry = jax.ffi.pycapsule(getattr(library, native.ENTRIES[kernel]))
    jax.ffi.register_ffi_target(tmp_path.name, entry, platform="cpu")

    def call(name: str, result: Any, **options: Any) -> Callable[..., Any]:
      assert name == kernel
      return jax.ffi.ffi_call(tmp_path.name, result, **options)

    monkeypatch.setattr(native, "call", call)

  return seed


@pytest.fixture
def gpu_interpreter(monkeypatch: pytest.MonkeyPatch, quick_compilation: None) -> Iterator[None]:
  """Compiles quickly, does not hang, and leaves no state."""
  names = vars(threading) | {"Condition": _Impatient}
  monkeypatch.setattr(shared_memory, "threading", types.SimpleNamespace(**names))
  yield
  gpu_callbacks.reset_gpu_interpret_mode_state()
