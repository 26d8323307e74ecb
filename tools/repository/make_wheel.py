"""Makes Sluice's wheel of this checkout, with the C++ kernels that are built. May not build those, nor fetch anything.

  python -m tools.repository.make_wheel FOLDER

The wheel is for one platform if libraries are in it, and for any Python: they know XLA alone. Which of them a machine
loads is pallas_kernels/native.py's to choose. It is made in a copy, so nothing is left beside the sources.
"""

from collections.abc import Sequence
import os
import pathlib
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


def make_wheel(folder: pathlib.Path) -> pathlib.Path:
  """Writes the wheel into `folder`, which is made if need be, and returns its path. Raises CalledProcessError."""
  folder.mkdir(parents=True, exist_ok=True)
  options = []
  if any(native.libraries()):
    options = ["--plat-name", sysconfig.get_platform().replace("-", "_").replace(".", "_")]
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
  with tempfile.TemporaryDirectory() as copy:
    for package in {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}:
      shutil.copytree(ROOT / package, f"{copy}/{package}", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(f"{copy}/models/demo")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
      shutil.copy(ROOT / file, copy)
    for library in pathlib.Path(copy, "pallas_kernels", "built").glob("*"):
      if library.name not in {each.name for each in native.libraries()}:
        library.unlink()  # of other sources: never loaded
    command = [sys.executable, "-c", _BUILD, str(folder.resolve()), *options]
    done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
  return folder / done.stdout.splitlines()[-1]


def main(arguments: Sequence[str]) -> int:
  """The command; prints the wheel's path."""
  if len(arguments) != 1:
    print("tools.repository.make_wheel: give one folder to write the wheel to", file=sys.stderr)
    return 2
  try:
    wheel = make_wheel(pathlib.Path(arguments[0]))
  except (OSError, subprocess.CalledProcessError) as error:
    print(f"tools.repository.make_wheel: {error}", file=sys.stderr)
    return 1
  print(os.path.relpath(wheel))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
