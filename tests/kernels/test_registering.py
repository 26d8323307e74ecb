"""Tests registering the C++ kernels with XLA from threads that trace programs concurrently."""

import concurrent.futures
import time
import types
from typing import Any

import jax.ffi

from pallas_kernels import native


def test_threads_register_each_entry_once_and_one_after_the_other(monkeypatch) -> None:
  """jax.ffi.pycapsule sets up what two calls at once would share: one of them failed, and with it a server's start."""
  inside: list[str] = []
  overlaps: list[list[str]] = []
  registered: list[str] = []

  def pycapsule(function: str) -> str:
    inside.append(function)
    time.sleep(0.005)
    overlaps.append(list(inside))
    inside.remove(function)
    return function

  def register_ffi_target(entry: str, function: Any, *, platform: str) -> None:
    assert (function, platform) == (entry, "cpu")
    registered.append(entry)

  def load(name: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{native.ENTRIES[name]: native.ENTRIES[name]})

  monkeypatch.setattr(jax.ffi, "pycapsule", pycapsule)
  monkeypatch.setattr(jax.ffi, "register_ffi_target", register_ffi_target)
  monkeypatch.setattr(native, "load_library", load)
  monkeypatch.setattr(native, "_REGISTERED", set())
  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    list(threads.map(native.register_library, [*native.ENTRIES] * 4))
  assert sorted(registered) == sorted(native.ENTRIES.values())
  assert all(len(each) == 1 for each in overlaps)
