"""The wheel brings kernels for more than this machine, and finds its own where there is no compiler."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from pallas_kernels import native
from tools.measure import ROOT
from tools.repository.make_wheel import main, make_client_wheel, make_wheel

_OTHER = "x86-64-v2"  # runs on every machine that runs this one's
_LOADS = """
from pallas_kernels import native
assert native.compiler() is None
print(native.__file__)
print(native.load_library("argmax")._name)
"""


@pytest.mark.skipif(
  native.compiler() is None or not native.level().startswith("x86-64-v"), reason="needs a C++ compiler and x86-64"
)
def test_a_wheel_without_a_compiler_loads_the_kernels_of_its_machine(tmp_path: pathlib.Path) -> None:
  for level in (_OTHER, native.level()):
    native.build_library("argmax", level)
  wheel = make_wheel(tmp_path / "dist")
  assert wheel.name.startswith("sluice_serve-") and wheel.name.endswith("-linux_x86_64.whl")
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    archive.extractall(tmp_path / "installed")
  libraries = {f"pallas_kernels/built/{file.name}" for file in native.libraries()}
  assert {name for name in names if name.endswith(".so")} == libraries
  assert "sluice = sluice:main" in points and "sluice.py" in names
  demo = (file for file in (ROOT / "models").rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc"))
  assert {str(file.relative_to(ROOT)) for file in demo} <= set(names)
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
    assert pathlib.Path(loaded).name == native.path("argmax", expected).name


_CLIENT_ALONE = """
import sys
sys.modules["jax"] = None
if len(sys.argv) == 1:
  sys.modules["server"] = sys.modules["engine"] = None
else:
  from server.proto import sluice_pb2  # the same messages twice in a process
from sluice_client import Client, SluiceError
with Client("127.0.0.1:9") as client:
  try:
    client.generate("a", max_tokens=3, timeout_s=20)
  except SluiceError as error:
    print(error.code.name)
"""


def test_the_clients_wheel_needs_neither_jax_nor_the_server(tmp_path: pathlib.Path) -> None:
  wheel = make_client_wheel(tmp_path / "dist")
  assert wheel.name.startswith("sluice_client-") and wheel.name.endswith("-py3-none-any.whl")
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(tmp_path / "installed")
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
  needs = {line.partition(": ")[2].partition(">")[0] for line in metadata.splitlines() if line.startswith("Requires-D")}
  assert needs == {"grpcio", "grpcio-health-checking", "grpcio-status", "protobuf"}
  for beside in ([], ["with the server"]):
    path = os.pathsep.join([str(tmp_path / "installed"), *([str(ROOT)] if beside else [])])
    done = subprocess.run(
      [sys.executable, "-c", _CLIENT_ALONE, *beside],
      cwd=tmp_path,
      env={"PATH": str(tmp_path), "PYTHONPATH": path},
      capture_output=True,
      text=True,
    )
    assert (done.stdout, done.returncode) == ("UNAVAILABLE\n", 0), done.stderr


def test_a_level_that_is_none_is_named(capsys) -> None:
  assert native.main(["x86-64-v9"]) == 2
  assert "'x86-64-v9' is not one of x86-64-v4, x86-64-v3, x86-64-v2" in capsys.readouterr().err


def test_one_folder_is_needed(capsys) -> None:
  assert main([]) == 2
  assert "give one folder" in capsys.readouterr().err
