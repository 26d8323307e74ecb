"""When a start touches memory ahead of its weights: on a CPU, for weights that stay as their files hold them."""

import pathlib
import types

import pytest

from engine.accelerator import MachineAccelerators
from engine.model_folder import count_weight_bytes
from server import main

SETTINGS = {"random_weights": False, "quantization": "auto", "matmul": "auto"}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  for name, size in (("a.safetensors", 5000), ("b.safetensors", 700), ("tokenizer.json", 90), ("model.gguf", 1)):
    (tmp_path / name).write_bytes(bytes(size))
  return tmp_path


def test_the_bytes_of_weight_files_are_counted(folder: pathlib.Path) -> None:
  assert count_weight_bytes(folder) == 5701


@pytest.mark.parametrize(
  ("changes", "platforms", "machine", "free", "expected"),
  [
    ({}, "", MachineAccelerators(), 2**30, [5701]),
    ({}, "cpu", MachineAccelerators(nvidia_nodes=("/dev/nvidia0",)), 2**30, [5701]),
    ({}, "", MachineAccelerators(nvidia_nodes=("/dev/nvidia0",)), 2**30, []),
    ({}, "", MachineAccelerators(tpu_nodes=("/dev/accel0",)), 2**30, []),
    ({}, "cuda", MachineAccelerators(), 2**30, []),
    ({}, "", MachineAccelerators(), 11401, []),
    ({}, "", MachineAccelerators(), None, []),
    ({"random_weights": True}, "", MachineAccelerators(), 2**30, []),
    ({"quantization": "int4"}, "", MachineAccelerators(), 2**30, []),
    ({"matmul": "xla"}, "", MachineAccelerators(), 2**30, []),
  ],
  ids=str,
)
def test_memory_is_touched_only_where_weights_will_need_it(
  folder, monkeypatch, changes, platforms, machine, free, expected
) -> None:
  found: list[int] = []
  monkeypatch.setattr(main.huge_pages, "fetch_ahead", found.append)
  monkeypatch.setattr(main, "read_free_bytes", lambda: free)
  monkeypatch.setattr(main.accelerator, "read_machine", lambda: machine)
  monkeypatch.setattr(main.os, "cpu_count", lambda: 2)
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  program = types.SimpleNamespace(model=str(folder))
  main._fetch_memory(program, SETTINGS | changes)  # pyright: ignore[reportArgumentType]
  assert found == expected
