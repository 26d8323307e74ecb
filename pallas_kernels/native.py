"""Builds the C++ kernels for CPUs, finds them and has XLA call them. May not know what they compute: their folders do.

  python -m pallas_kernels.native             builds what this machine's processor runs, unless it is there already
  python -m pallas_kernels.native LEVEL ...   builds for these levels of x86-64 instead, as for a wheel

Each `cpu.cc` of a kernel's folder becomes one shared library in pallas_kernels/built/, whose name holds the instruction
set and a digest of sources, flags and jaxlib's version: a library of other sources is never loaded. Building needs a
C++17 compiler (CXX, c++, g++ or clang++) and takes some seconds; nothing is built when something is imported, and
nothing is loaded or told to XLA before it is asked for.
"""

from collections.abc import Callable, Iterable, Sequence
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported by what needs it: whoever builds or asks for a path need not wait for it
  import jax

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_BUILT = _ROOT / "pallas_kernels" / "built"
IMPLEMENTATIONS = ("reference", "cpu")  # what `choose` chooses among
# By kernel, whose folder has the source: the library's entry, also the name of the custom call.
ENTRIES = {
  "adjust": "SluiceAdjust",
  "argmax": "SluiceArgmax",
  "draw": "SluiceDraw",
  "packed_matmul": "SluicePackedMatmul",
  "paged_attention": "SluicePagedAttend",
}
_HEADER = "pallas_kernels/native.h"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno")
# What /proc/cpuinfo must list for a level of the x86-64 psABI (beyond what every such processor has); best first.
_LEVELS = {
  "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
  "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
  "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
}
# Builds for another machine, as for an image that many run; only where that machine's level is the same is it loaded.
_LEVEL_VARIABLE = "SLUICE_NATIVE_LEVEL"

_REGISTERING = threading.Lock()
_REGISTERED: set[str] = set()


class NativeMissing(NotImplementedError):
  """There is no library for this machine and these sources; the text says why, and what to do."""


@functools.cache
def level() -> str:
  """The instruction set to build for: an x86-64 level, or the machine's name where there are none."""
  if platform.machine() not in ("x86_64", "AMD64"):
    return platform.machine()
  if (wanted := os.environ.get(_LEVEL_VARIABLE)) in _LEVELS:
    return wanted
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text()
  except OSError:
    return "x86-64"
  line = next((line for line in text.splitlines() if line.startswith("flags")), "")
  flags = set(line.partition(":")[2].split())
  return next((name for name, needed in _LEVELS.items() if needed <= flags), "x86-64")


def source(name: str) -> pathlib.Path:
  """The C++ file of `name`, a key of ENTRIES."""
  return _ROOT / "pallas_kernels" / name / "cpu.cc"


def _flags(target: str) -> list[str]:
  return [*_FLAGS, f"-march={target}"] if target.startswith("x86-64") else list(_FLAGS)


@functools.cache
def path(name: str, target: str = "") -> pathlib.Path:
  """Where the library of `name`, a key of ENTRIES, is once it is built; for this machine, or the level `target`."""
  target = target or level()
  digest = hashlib.sha256(repr((_flags(target), importlib.metadata.version("jaxlib"))).encode())
  for file in (source(name), _ROOT / _HEADER, *sorted(source(name).parent.glob("*.h"))):
    digest.update(file.read_bytes())
  return _BUILT / f"{name}-{target}-{digest.hexdigest()[:16]}.so"


def libraries() -> list[pathlib.Path]:
  """Those of these sources that are built, for any level."""
  wanted = {path(name, target) for name in ENTRIES for target in (level(), *_LEVELS)}
  return sorted(file for file in wanted if file.exists())


def compiler() -> str | None:
  """The C++ compiler's path, or None."""
  for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
    if candidate and (found := shutil.which(candidate)):
      return found
  return None


def compile_library(
  file: pathlib.Path, library: pathlib.Path, more_flags: tuple[str, ...] = (), target: str = ""
) -> pathlib.Path:
  """Compiles a C++ file for this machine, or the level `target`, into `library`, and returns that.

  Raises:
    NativeMissing: no compiler was found, or it failed (its first error is in the text).
  """
  chosen = compiler()
  if chosen is None:
    raise NativeMissing(
      f"{file.parent.name}: no C++ compiler (CXX, c++, g++, clang++): install one, run make setup again"
    )
  import jax.ffi

  paths = [f"-I{jax.ffi.include_dir()}", f"-I{_ROOT}", str(file), "-o", str(library)]
  done = subprocess.run(
    [chosen, *_flags(target or level()), *more_flags, *paths], cwd=_ROOT, capture_output=True, text=True
  )
  if done.returncode:
    first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
    raise NativeMissing(f"{file.parent.name}: {chosen} failed: {first}")
  return library


def build(name: str, target: str = "") -> pathlib.Path:
  """Compiles the library of `name`, if it is not there, and returns its path; for this machine, or the level `target`.

  Raises:
    NativeMissing: no compiler was found, or it failed (its first error is in the text).
  """
  target = target or level()
  wanted = path(name, target)
  if wanted.exists():
    return wanted
  _BUILT.mkdir(exist_ok=True)
  with tempfile.TemporaryDirectory(dir=_BUILT) as folder:
    part = compile_library(source(name), pathlib.Path(folder) / wanted.name, target=target)
    part.replace(wanted)  # whole or not at all
  for old in _BUILT.glob(f"{name}-{target}-*.so"):
    if old != wanted:
      old.unlink(missing_ok=True)
  return wanted


@functools.cache
def load(name: str) -> ctypes.CDLL:
  """The library of `name`.

  Raises:
    NativeMissing: it was not built, or for other sources, or cannot be loaded.
  """
  file = path(name)
  if not file.exists():
    raise NativeMissing(f"native {name} is not built for {level()} and these sources: run make setup")
  try:
    return ctypes.CDLL(str(file))
  except OSError as error:
    raise NativeMissing(f"native {name} cannot be loaded: {error}") from error


def choose(name: str, platform: str, num_devices: int = 1) -> str:
  """What serves there: "cpu", the library of `name`, on one CPU where it is built; else "reference"."""
  if platform != "cpu" or num_devices != 1:
    return "reference"
  try:
    load(name)
  except NativeMissing:
    return "reference"
  return "cpu"


def register(name: str) -> None:
  """Tells XLA of the entry of the library of `name`, once; before an executable that calls it is loaded.

  Raises:
    NativeMissing: see `load`.
  """
  import jax.ffi

  library = load(name)
  with _REGISTERING:  # programs are traced on several threads, and jax.ffi.pycapsule sets up what they would share
    if name not in _REGISTERED:
      entry = ENTRIES[name]
      jax.ffi.register_ffi_target(entry, jax.ffi.pycapsule(getattr(library, entry)), platform="cpu")
      _REGISTERED.add(name)


def call(name: str, result: Any, **options: Any) -> Callable[..., Any]:
  """A function of arrays, and of attributes by name, that runs the library of `name`.

  Args:
    name: a key of ENTRIES.
    result, options: as of `jax.ffi.ffi_call`.

  Raises:
    NativeMissing: see `load`.
  """
  import jax.ffi

  register(name)
  return jax.ffi.ffi_call(ENTRIES[name], result, **options)


def check_lines(name: str, x: "jax.Array", implementation: str) -> None:
  """What kernels over lines of logits ask of them.

  Raises:
    ValueError: x is not float32[S, V], or the implementation none of IMPLEMENTATIONS; the text begins with `name`.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"{name}: implementation {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
  if x.ndim != 2 or x.dtype != "float32" or not x.shape[1]:
    raise ValueError(f"{name}: x is {x.dtype}{list(x.shape)}; it must be float32[S, V]")


def bits(lines: "Iterable[jax.Array]") -> "jax.Array":
  """Numbers of lines as the kernels take them: int32[k, S] of k arrays of 32 bits each, floats by their bits."""
  from jax import lax
  import jax.numpy as jnp

  return jnp.stack([lax.bitcast_convert_type(line, jnp.int32) for line in lines])


def count(name: str, num_rows: "jax.Array | None") -> "jax.Array":
  """How many lines are in use as the kernels take it: int32[1], or int32[0] for all (None).

  Raises:
    ValueError: it is anything else; the text begins with `name`.
  """
  import jax.numpy as jnp

  if num_rows is None:
    return jnp.zeros(0, jnp.int32)
  if num_rows.shape != (1,) or num_rows.dtype != jnp.int32:
    raise ValueError(f"{name}: num_rows is {num_rows.dtype}{list(num_rows.shape)}; it must be int32[1]")
  return num_rows


def main(targets: Sequence[str] = ()) -> int:
  """Builds everything; a machine that cannot is told in one line, and is no failure: XLA does the work there.

  What was asked for by name is: exit code 1, or 2 for a name that is no level's.
  """
  if unknown := [target for target in targets if target not in _LEVELS]:
    print(f"pallas_kernels.native: {unknown[0]!r} is not one of {', '.join(_LEVELS)}", file=sys.stderr)
    return 2
  for target in targets or ("",):
    for name in ENTRIES:
      try:
        build(name, target)
      except NativeMissing as error:
        print(f"sluice: {error}; XLA's own does its work, more slowly", file=sys.stderr)
        if targets:
          return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
