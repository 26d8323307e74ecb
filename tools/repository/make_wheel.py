"""Builds the server's and the client's wheels from this checkout. Builds no kernels and downloads nothing.

  python -m tools.repository.make_wheel FOLDER

sluice-serve holds the server, the tools, the demo model, and the C++ kernels that are already built. With kernels it is
for one platform, but for any Python, since they depend only on XLA. pallas_kernels/native.py chooses the kernels that a
machine loads. sluice-client holds server/client.py and its messages as the package sluice_client, and needs no JAX.
Each build runs in a copy, so it leaves nothing beside the sources.
"""

from collections.abc import Sequence
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib

from pallas_kernels import native
from tools.measure import ROOT

_BUILD = """
import sys
from setuptools.build_meta import build_wheel
print(build_wheel(sys.argv[1], {"--build-option": sys.argv[2:]}))
"""

# Files of the client's wheel, by name in the wheel.
_CLIENT_FILES = {
  "client.py": "server/client.py",
  "sluice_pb2.py": "server/proto/sluice_pb2.py",
  "sluice_pb2.pyi": "server/proto/sluice_pb2.pyi",
  "sluice_pb2_grpc.py": "server/proto/sluice_pb2_grpc.py",
}
# Modules that move, in each form of import. The proto keeps its name, since one process may load both packages.
_RENAMED = (
  (r"\bfrom server\.proto import (sluice_pb2\w*)", r"from sluice_client import \1"),
  (r"\bfrom server\.client import", "from sluice_client import"),
  (r"'server\.proto\.(sluice_pb2)'", r"'sluice_client.\1'"),
)
_CLIENT_INIT = '''"""A Python client of Sluice, a server of large language models. Needs neither JAX nor the server."""

from sluice_client.client import Client, Completion, Ending, Options, Piece, SluiceError, Stream

__all__ = ["Client", "Completion", "Ending", "Options", "Piece", "SluiceError", "Stream"]
'''
_CLIENT_README = """# sluice-client

A Python client of [Sluice](https://pypi.org/project/sluice-serve), a server of large language models.

```python
from sluice_client import Client

with Client("127.0.0.1:50051") as client:
  print(client.generate("Once upon a time", max_tokens=40).text)
  with client.stream([{"role": "user", "content": "Hello"}]) as stream:
    for piece in stream:
      print(piece.text, end="", flush=True)
```
"""
_CLIENT_PROJECT = """
[build-system]
requires = ["setuptools>=80"]
build-backend = "setuptools.build_meta"

[project]
name = "sluice-client"
version = "{version}"
description = "A Python client of Sluice, a server of large language models."
readme = "README.md"
license = "{license}"
license-files = ["LICENSE"]
requires-python = "{python}"
dependencies = [{dependencies}]

[tool.setuptools]
packages = ["sluice_client"]

[tool.setuptools.package-data]
sluice_client = ["py.typed", "*.pyi"]
"""


def make_wheel(folder: pathlib.Path) -> pathlib.Path:
  """Writes the server's wheel into `folder`, which may not exist yet; returns its path. Raises CalledProcessError."""
  options = []
  if any(native.libraries()):
    options = ["--plat-name", sysconfig.get_platform().replace("-", "_").replace(".", "_")]
  setuptools = _read_project()["tool"]["setuptools"]
  with tempfile.TemporaryDirectory() as copy:
    for package in {name.partition(".")[0] for name in setuptools["packages"]}:
      shutil.copytree(ROOT / package, f"{copy}/{package}", ignore=shutil.ignore_patterns("__pycache__"))
    modules = (f"{name}.py" for name in setuptools["py-modules"])
    for file in ("pyproject.toml", "README.md", "LICENSE", *modules):
      shutil.copy(ROOT / file, copy)
    for library in pathlib.Path(copy, "pallas_kernels", "built").glob("*"):
      if library.name not in {each.name for each in native.libraries()}:
        library.unlink()  # of other sources, so never loaded
    return _build_wheel(copy, folder, options)


def make_client_wheel(folder: pathlib.Path) -> pathlib.Path:
  """Writes the client's wheel into `folder`, which may not exist yet; returns its path. Raises CalledProcessError."""
  project = _read_project()["project"]
  texts = {name: (ROOT / source).read_text("utf-8") for name, source in _CLIENT_FILES.items()}
  with tempfile.TemporaryDirectory() as copy:
    package = pathlib.Path(copy, "sluice_client")
    package.mkdir()
    for name, text in texts.items():
      for pattern, renamed in _RENAMED:
        text = re.sub(pattern, renamed, text)
      (package / name).write_text(text, "utf-8")
    (package / "__init__.py").write_text(_CLIENT_INIT, "utf-8")
    (package / "py.typed").touch()
    shutil.copy(ROOT / "LICENSE", copy)
    pathlib.Path(copy, "README.md").write_text(_CLIENT_README, "utf-8")
    filled = _CLIENT_PROJECT.format(
      version=project["version"],
      license=project["license"],
      python=project["requires-python"],
      dependencies=", ".join(f'"{each}"' for each in _client_dependencies(texts)),
    )
    pathlib.Path(copy, "pyproject.toml").write_text(filled, "utf-8")
    return _build_wheel(copy, folder, [])


def _read_project() -> dict:
  return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def _client_dependencies(texts: dict[str, str]) -> list[str]:
  """Returns gRPC and protobuf, at least in the versions that generated the messages, and gRPC's packages for both."""
  protobuf = re.search(r"^# Protobuf Python Version: ([\d.]+)$", texts["sluice_pb2.py"], re.MULTILINE)
  grpcio = re.search(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", texts["sluice_pb2_grpc.py"], re.MULTILINE)
  assert protobuf and grpcio, "the generated files say their versions"
  oldest = grpcio[1]
  return [
    f"protobuf>={protobuf[1]}",
    *(f"{name}>={oldest}" for name in ("grpcio", "grpcio-status", "grpcio-health-checking")),
  ]


def _build_wheel(copy: str, folder: pathlib.Path, options: Sequence[str]) -> pathlib.Path:
  """Builds a wheel from `copy` into `folder`."""
  folder.mkdir(parents=True, exist_ok=True)
  command = [sys.executable, "-c", _BUILD, str(folder.resolve()), *options]
  done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
  return folder / done.stdout.splitlines()[-1]


def main(arguments: Sequence[str]) -> int:
  """Runs the command line; prints the wheels' paths, one a line."""
  if len(arguments) != 1:
    print("tools.repository.make_wheel: give one folder to write the wheels to", file=sys.stderr)
    return 2
  try:
    for wheel in (make_wheel(pathlib.Path(arguments[0])), make_client_wheel(pathlib.Path(arguments[0]))):
      print(os.path.relpath(wheel))
  except (OSError, subprocess.CalledProcessError) as error:
    print(f"tools.repository.make_wheel: {error}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
