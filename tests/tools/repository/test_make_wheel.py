"""The wheel brings kernels for more than this machine, and finds its own where there is no compiler."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from pallas_kernels import native
from tools.repository.make_wheel import main, make_wheel

_OTHER = "x86-64-v2"  # runs on every machine that runs this one's
_LOADS = """
from pallas_kernels import native
assert native.compiler() is None
print(native.__file__)
print(native.load("packed_matmul")._name)
"""


@pytest.mark.skipif(
  native.compiler() is None or not native.level().startswith("x86-64-v"), reason="needs a C++ compiler and x86-64"
)
def test_a_wheel_without_a_compiler_loads_the_kernels_of_its_machine(tmp_path: pathlib.Path) -> None:
  for level in (_OTHER, native.level()):
    native.build("packed_matmul", level)
  wheel = make_wheel(tmp_path / "dist")
  assert wheel.name.startswith("sluice_serve-") and wheel.name.endswith("-linux_x86_64.whl")
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    archive.extractall(tmp_path / "installed")
  libraries = {f"pallas_kernels/built/{file.name}" for file in native.libraries()}
  assert {name for name in names if name.endswith(".so")} == libraries
  environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path / "installed"), "HOME": os.environ.get("HOME", "/")}
  for chosen, expected in (("", native.level()), (_OTHER, _OTHER)):
    done = subprocess.run(
      [sys.executable, "-c", _LOADS],
      cwd=tmp_path,
      env=environment | {"SLUICE_NATIVE_LEVEL": chosen},
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    module, loaded = done.stdout.splitlines()
    assert module.startswith(str(tmp_path / "installed"))
    assert pathlib.Path(loaded).name == native.path("packed_matmul", expected).name


def test_a_level_that_is_none_is_named(capsys) -> None:
  assert native.main(["x86-64-v9"]) == 2
  assert "'x86-64-v9' is not one of x86-64-v4, x86-64-v3, x86-64-v2" in capsys.readouterr().err


def test_one_folder_is_needed(capsys) -> None:
  assert main([]) == 2
  assert "give one folder" in capsys.readouterr().err
