"""Builds the C++ kernels for CPUs, loads them and registers them with XLA. May not know what they compute.

  python -m pallas_kernels.native             builds the kernels for this machine's processor, unless they exist
  python -m pallas_kernels.native LEVEL ...   builds them for these levels of x86-64, for instance for a wheel

Each kernel folder's `cpu.cc` becomes one shared library in pallas_kernels/built/. The library's name holds the
instruction set and a digest of sources, flags and jaxlib's version, so the loader never takes a stale library. Building
needs a C++17 compiler (CXX, c++, g++ or clang++) and takes some seconds. Importing this module builds, loads and
registers nothing.
"""

from collections.abc import Callable, Iterable, Sequence
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # functions import jax where they need it, so that building or finding a path does not wait for it
  import jax

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_BUILT = _ROOT / "pallas_kernels" / "built"
IMPLEMENTATIONS = ("reference", "cpu")  # what `choose_implementation` returns
# Kernel folder -> the library's entry point, which is also the name of the custom call.
ENTRIES = {
  "adjust": "SluiceAdjust",
  "argmax": "SluiceArgmax",
  "low_rank": "SluiceLowRank",
  "packed_matmul": "SluicePackedMatmul",
  "paged_attention": "SluicePagedAttend",
  "sampling": "SluiceSampling",
  "zeros": "SluiceZeros",
}
_INCLUDE = re.compile(r'^#include "(pallas_kernels/[^"]+)"', re.MULTILINE)
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno")
# The /proc/cpuinfo flags that a level of the x86-64 psABI needs beyond the baseline; best level first.
_LEVELS = {
  "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
  "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
  "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
}
# Overrides the level, for instance to build an image for many machines. A machine loads only libraries of its level.
_LEVEL_VARIABLE = "SLUICE_NATIVE_LEVEL"

_REGISTERING = threading.Lock()
_REGISTERED: set[str] = set()


class NativeMissing(NotImplementedError):
  """No library exists for this machine and these sources; the text gives the reason and the remedy."""


@functools.cache
def level() -> str:
  """Returns the instruction set to build for: an x86-64 level, or the machine's name on other architectures."""
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
  """Returns the C++ file of `name`, a key of ENTRIES."""
  return _ROOT / "pallas_kernels" / name / "cpu.cc"


def _flags(target: str) -> list[str]:
  return [*_FLAGS, f"-march={target}"] if target.startswith("x86-64") else list(_FLAGS)


@functools.cache
def path(name: str, target: str = "") -> pathlib.Path:
  """Returns the path that the library of `name`, a key of ENTRIES, has for `target`, or for this machine's level."""
  target = target or level()
  digest = hashlib.sha256(repr((_flags(target), importlib.metadata.version("jaxlib"))).encode())
  text = source(name).read_text("utf-8")
  digest.update(text.encode())
  for header in _INCLUDE.findall(text):
    digest.update((_ROOT / header).read_bytes())
  return _BUILT / f"{name}-{target}-{digest.hexdigest()[:16]}.so"


def libraries() -> list[pathlib.Path]:
  """Returns the built libraries of the present sources, for all levels."""
  wanted = {path(name, target) for name in ENTRIES for target in (level(), *_LEVELS)}
  return sorted(file for file in wanted if file.exists())


def compiler() -> str | None:
  """Returns the path of the C++ compiler, or None."""
  for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
    if candidate and (found := shutil.which(candidate)):
      return found
  return None


def compile_library(
  file: pathlib.Path, library: pathlib.Path, more_flags: tuple[str, ...] = (), target: str = ""
) -> pathlib.Path:
  """Compiles a C++ file for `target`, or for this machine's level, into `library`, and returns `library`.

  Raises:
    NativeMissing: no compiler is installed, or it failed; the text holds its first error.
  """
  chosen = compiler()
  if chosen is None:
    raise NativeMissing(
      f"{file.parent.name}: no C++ compiler (CXX, c++, g++, clang++); install one and run make setup again"
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


def build_library(name: str, target: str = "") -> pathlib.Path:
  """Compiles the library of `name` for `target`, or for this machine's level, unless it exists; returns its path.

  Raises:
    NativeMissing: no compiler is installed, or it failed; the text holds its first error.
  """
  target = target or level()
  wanted = path(name, target)
  if wanted.exists():
    return wanted
  _BUILT.mkdir(exist_ok=True)
  with tempfile.TemporaryDirectory(dir=_BUILT) as folder:
    part = compile_library(source(name), pathlib.Path(folder) / wanted.name, target=target)
    part.replace(wanted)  # atomic: no other process sees a partial library
  for old in _BUILT.glob(f"{name}-{target}-*.so"):
    if old != wanted:
      old.unlink(missing_ok=True)
  return wanted


@functools.cache
def load_library(name: str) -> ctypes.CDLL:
  """Loads and returns the library of `name`.

  Raises:
    NativeMissing: the library is not built for these sources, or the system cannot load it.
  """
  file = path(name)
  if not file.exists():
    raise NativeMissing(f"native {name} is not built for {level()} and these sources; run make setup")
  try:
    return ctypes.CDLL(str(file))
  except OSError as error:
    raise NativeMissing(f"native {name} cannot be loaded: {error}") from error


def choose_implementation(name: str, platform: str) -> str:
  """Returns "cpu" for a CPU on which the library of `name` loads; else "reference"."""
  if platform != "cpu":
    return "reference"
  try:
    load_library(name)
  except NativeMissing:
    return "reference"
  return "cpu"


def register_library(name: str) -> None:
  """Registers the library of `name` with XLA, once. XLA needs this before it loads an executable that calls it.

  Raises:
    NativeMissing: see `load_library`.
  """
  import jax.ffi

  library = load_library(name)
  with _REGISTERING:  # several threads trace programs, and jax.ffi.pycapsule initializes shared state
    if name not in _REGISTERED:
      entry = ENTRIES[name]
      jax.ffi.register_ffi_target(entry, jax.ffi.pycapsule(getattr(library, entry)), platform="cpu")
      _REGISTERED.add(name)


def bind_call(name: str, result: Any, **options: Any) -> Callable[..., Any]:
  """Returns a function that runs the library of `name` on arrays and keyword attributes.

  Args:
    name: a key of ENTRIES.
    result, options: as in `jax.ffi.ffi_call`.

  Raises:
    NativeMissing: see `load_library`.
  """
  import jax.ffi

  register_library(name)
  return jax.ffi.ffi_call(ENTRIES[name], result, **options)


def check_rows(name: str, x: "jax.Array", implementation: str) -> None:
  """Checks the arguments of a kernel over rows of logits.

  Raises:
    ValueError: x is not float32[S, V], or the implementation is not in IMPLEMENTATIONS; the text begins with `name`.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"{name}: implementation {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
  if x.ndim != 2 or x.dtype != "float32" or not x.shape[1]:
    raise ValueError(f"{name}: x is {x.dtype}{list(x.shape)}; it must be float32[S, V]")


def pack_bits(columns: "Iterable[jax.Array]") -> "jax.Array":
  """Packs k arrays [S] of 32-bit values into int32[k, S], with floats as their bits."""
  from jax import lax
  import jax.numpy as jnp

  return jnp.stack([lax.bitcast_convert_type(column, jnp.int32) for column in columns])


def pack_row_count(name: str, num_rows: "jax.Array | None") -> "jax.Array":
  """Returns the number of rows in use as kernels take it: int32[1], or int32[0] for None, which means all rows.

  Raises:
    ValueError: num_rows has another dtype or shape; the text begins with `name`.
  """
  import jax.numpy as jnp

  if num_rows is None:
    return jnp.zeros(0, jnp.int32)
  if num_rows.shape != (1,) or num_rows.dtype != jnp.int32:
    raise ValueError(f"{name}: num_rows is {num_rows.dtype}{list(num_rows.shape)}; it must be int32[1]")
  return num_rows


def main(targets: Sequence[str] = ()) -> int:
  """Builds all kernels. Without a compiler it prints one line and still returns 0, because XLA's own kernels serve.

  Returns:
    An exit code: 1 if a level of `targets` fails to build, 2 if `targets` holds an unknown level.
  """
  if unknown := [target for target in targets if target not in _LEVELS]:
    print(f"pallas_kernels.native: {unknown[0]!r} is not one of {', '.join(_LEVELS)}", file=sys.stderr)
    return 2
  for target in targets or ("",):
    for name in ENTRIES:
      try:
        build_library(name, target)
      except NativeMissing as error:
        print(f"sluice: {error}; until then XLA's slower kernel serves", file=sys.stderr)
        if targets:
          return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
