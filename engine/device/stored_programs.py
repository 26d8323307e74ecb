"""Loads programs from the compile cache without tracing them. May not change JAX's entries.

JAX names an entry after the lowered program, so a start had to trace and lower every program only to find it. A file
DIGEST.programs.json in the cache's folder names the entries of one engine's programs. Its digest is that of everything
that determines them (`made_for`). What the file does not name, or what cannot be restored, is traced as without it.

{"format": 1, "programs": {program's name: entry's name without its suffix}}; replaced as a whole
"""

from collections.abc import Mapping
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
import threading
from typing import Any

import jax
from jax._src import compilation_cache

from engine.device.compile_cache import INDEX_SUFFIX, SUFFIX
from engine.device.made_for import made_for, register_kernels
from engine.device.programs import Program, ProgramSpec
from engine.device.restore import NotRestored, restore_program
from engine.shapes import StepShape

_FORMAT, _LIMIT = 1, 1 << 20  # bytes of a file


class _LastRead(threading.local):
  """The entry that this thread looked for last."""

  key = ""


_of_thread = _LastRead()


def _note_reads(read: Any) -> Any:
  """Returns JAX's function that reads an entry, which then also notes the entry's name, whether it is there or not."""

  @functools.wraps(read)
  def read_noting(cache_key: str, *args: Any, **kwargs: Any) -> Any:
    _of_thread.key = cache_key
    return read(cache_key, *args, **kwargs)

  return read_noting


compilation_cache.get_executable_and_time = _note_reads(compilation_cache.get_executable_and_time)


class StoredPrograms:
  """The programs of one engine that the compile cache holds; all others are compiled."""

  def __init__(self, folder: str, wanted: Mapping[str, Any], devices: tuple[Any, ...]):
    """Reads the file that names the entries, if there is one.

    Args:
      folder: of the compile cache, which JAX uses already.
      wanted: result of `made_for`.
      devices: jax.Device of the programs.
    """
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
    self._folder, self._file, self._devices = (
      pathlib.Path(folder),
      pathlib.Path(folder) / f"{digest}{INDEX_SUFFIX}",
      devices,
    )
    self._entries = _read_names(self._file)
    self._found: dict[str, str] = {}
    self._lock = threading.Lock()
    if self._entries:
      register_kernels()

  def executable(self, program: Program) -> jax.stages.Compiled:
    """Returns the program's executable from the cache if its entry is known, else compiles it. Safe on any thread."""
    entry = self._entries.get(program.name)
    if entry is not None and (data := _read_entry(self._folder / f"{entry}{SUFFIX}")) is not None:
      with contextlib.suppress(NotRestored):
        return restore_program(program, data, self._devices)
    _of_thread.key = ""  # stays so if JAX has the program in this process
    compiled = program.compile()
    if _of_thread.key:
      with self._lock:
        self._found[program.name] = _of_thread.key
    return compiled

  def keep(self) -> None:
    """Names the entries of the programs that were compiled, for the next start. Ignores a disk that refuses it."""
    if not self._found:
      return
    text = json.dumps({"format": _FORMAT, "programs": self._entries | self._found}, indent=1, sort_keys=True) + "\n"
    with contextlib.suppress(OSError):
      with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".part", delete=False) as part:  # of mode 0600
        part.write(text)
      try:
        os.replace(part.name, self._file)
      except OSError:
        os.unlink(part.name)


def open_stored_programs(folder: str, spec: ProgramSpec, rungs: tuple[StepShape, ...]) -> StoredPrograms | None:
  """Returns the stored programs of an engine; None where each program is traced.

  That is without a compile cache, with several hosts, and on accelerators, where this was never tried.
  """
  devices = tuple(spec.mesh.devices.flat)
  if not folder or devices[0].platform != "cpu" or jax.process_count() > 1:
    return None
  return StoredPrograms(folder, made_for(spec, rungs), devices)


def _read_names(file: pathlib.Path) -> dict[str, str]:
  """Returns the entry of each program; {} for a file that is missing or broken."""
  try:
    with file.open("rb") as stream:
      found = json.loads(stream.read(_LIMIT))
    names = found["programs"] if found["format"] == _FORMAT else {}
    whole = all(isinstance(entry, str) and re.fullmatch(r"[\w.-]+", entry) for entry in names.values())
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
    return {}
  return names if whole else {}


def _read_entry(file: pathlib.Path) -> bytes | None:
  """Returns the executable's bytes; None if the entry is missing or broken."""
  try:
    return compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(file.read_bytes()))[0]
  except Exception:  # zlib and zstandard have exceptions of their own
    return None
