"""Fixtures for kernel tests: C++ kernels with seeded bugs, and the Pallas GPU interpreter."""

from collections.abc import Callable, Iterator
import ctypes
import functools
import pathlib
import re
import threading
import types
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
import pytest

from pallas_kernels import native

NATIVE_H = pathlib.Path(native.__file__).with_name("native.h")


class _Impatient(threading.Condition):
  """Fails the test on a deadlock of the kernel instead of waiting forever."""

  def wait(self, timeout: float | None = None) -> bool:
    if not super().wait(timeout=180.0 if timeout is None else timeout):
      raise TimeoutError("a warpgroup waits forever")
    return True


@pytest.fixture(scope="session")
def quick_cpp(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
  """Flags for modified C++ kernels: no optimization, and a precompiled native.h, which halves the compile time."""
  header, flags = tmp_path_factory.mktemp("header") / "native.h", ("-O0", "-w")
  header.write_bytes(NATIVE_H.read_bytes())
  native.compile_library(NATIVE_H, header.with_name("native.h.gch"), (*flags, "-x", "c++-header"))
  return *flags, "-include", str(header)


@pytest.fixture(scope="session")
def compile_kernel(
  tmp_path_factory: pytest.TempPathFactory, quick_cpp: tuple[str, ...]
) -> Callable[[str, tuple[tuple[str, str], ...], tuple[str, ...]], tuple[str, ctypes.CDLL]]:
  """Compiles C++ kernels, each once; `with_bug` has the arguments. Returns the custom call's name and the library."""

  @functools.cache
  def compile_changed(
    kernel: str, changes: tuple[tuple[str, str], ...], flags: tuple[str, ...]
  ) -> tuple[str, ctypes.CDLL]:
    source, folder = native.source(kernel), tmp_path_factory.mktemp(kernel)
    text = source.read_text()
    included = {str(NATIVE_H.relative_to(native._ROOT))}  # which the flags include

    def include_once(line: re.Match[str]) -> str:
      if line[1] in included:
        return ""
      included.add(line[1])
      header = (native._ROOT / line[1]).read_text().replace("#pragma once\n", "")
      return native._INCLUDE.sub(include_once, header)

    text = native._INCLUDE.sub(include_once, text)
    for right, wrong in changes:
      assert text.count(right) == 1, f"{right!r} does not occur once in {source.name}"
      text = text.replace(right, wrong)
    (folder / "cpu.cc").write_text(text)
    library = ctypes.CDLL(str(native.compile_library(folder / "cpu.cc", folder / "cpu.so", (*quick_cpp, *flags))))
    entry = jax.ffi.pycapsule(getattr(library, native.ENTRIES[kernel]))
    jax.ffi.register_ffi_target(folder.name, entry, platform="cpu")
    return folder.name, library

  return compile_changed


@pytest.fixture
def with_bug(compile_kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., ctypes.CDLL]:
  """Replaces a C++ kernel by one with a seeded bug until the test ends."""

  def seed(kernel: str, *changes: tuple[str, str], flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Returns the library.

    Args:
      kernel: a key of native.ENTRIES.
      changes: each a text that occurs once in its source, and its replacement.
      flags: further ones for the compiler.
    """
    target, library = compile_kernel(kernel, changes, flags)

    def bind_call(name: str, result: Any, **options: Any) -> Callable[..., Any]:
      assert name == kernel
      return jax.ffi.ffi_call(target, result, **options)

    monkeypatch.setattr(native, "bind_call", bind_call)
    return library

  return seed


@pytest.fixture
def gpu_interpreter(monkeypatch: pytest.MonkeyPatch, quick_compilation: None) -> Iterator[None]:
  """Makes the GPU interpreter compile quickly, fail on a deadlock, and leave no state."""
  names = vars(threading) | {"Condition": _Impatient}
  monkeypatch.setattr(shared_memory, "threading", types.SimpleNamespace(**names))
  yield
  gpu_callbacks.reset_gpu_interpret_mode_state()
