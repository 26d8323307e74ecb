"""Stores compiled executables in a folder and loads those that fit this server. All others are compiled.

manifest.json        {"format": 1, "made_for": {...}, "num_blocks": ..., "step_bytes": ..., "programs":
                     {name: {"sha256": ..., "bytes": ...}}}; replaced as a whole, last
SHA256.executable    one for each program, never changed

Executables are code, so the folder must pass the compile cache's permission test. The compile cache must trace and
lower each program to know its key. A bundle only compares `made_for`: everything that determines the compiler's
input and output.
"""

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import stat
import tempfile
import threading
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from engine.device import kv_cache
from engine.device.compile_cache import refuse_writers
from engine.device.made_for import made_for, register_kernels
from engine.device.pool_size import PoolSize, PoolSizer
from engine.device.programs import Program, ProgramSpec
from engine.device.restore import NotRestored, restore_program, to_bytes
from engine.errors import ConfigError
from engine.shapes import StepShape

SETTING = "executable_bundle"
_MANIFEST, _SUFFIX, _PART, _FORMAT = "manifest.json", ".executable", ".part", 1
_MANIFEST_LIMIT = 1 << 20  # bytes


class _Unusable(Exception):
  """The reason why a bundle, or an entry of it, is not used."""


class Bundle:
  """One folder for one engine's programs. Implements engine.device.build.ExecutableSource.

  Attributes:
    has_draft_programs: see ExecutableSource.
    is_whole: whether every program of the engine is stored; valid once the engine is built.
  """

  has_draft_programs = False

  def __init__(self, folder: str, batching: str, write: bool = False):
    """Reads the manifest, if there is one.

    Args:
      batching: the engine's batching mode.
      write: whether to store newly compiled programs.

    Raises:
      ConfigError: other users may write to the folder or its files, it cannot be read, or there are two engines.
    """
    if batching == "disaggregated":
      raise ConfigError(
        f"{SETTING}={folder} holds the programs of one engine, and batching=disaggregated has two; leave --{SETTING} "
        "empty, or choose another --batching"
      )
    self._folder, self._writes = pathlib.Path(folder), write
    self.is_whole = False
    self._lock = threading.Lock()
    self._made_for: dict[str, Any] = {}
    self._devices: tuple[Any, ...] = ()
    self._compiled: dict[str, tuple[Program, jax.stages.Compiled]] = {}
    self._restored: dict[str, dict[str, Any]] = {}
    self._reasons: list[str] = []
    self._step_bytes = 0
    self._without_cache = contextlib.ExitStack()
    try:
      if not stat.S_ISDIR(self._folder.stat().st_mode):
        raise ConfigError(
          f"{SETTING}={folder}: not a folder; set --{SETTING} to a folder, or to a path that does not exist"
        )
      refuse_writers(self._folder, [*self._folder.glob(f"*{_SUFFIX}"), *self._folder.glob(_MANIFEST)], SETTING)
    except FileNotFoundError:
      pass  # if it cannot be created, the write reports that
    except OSError as error:
      raise ConfigError(f"{SETTING}={folder}: {error.strerror}; set --{SETTING} to another folder") from error
    try:
      self._manifest = _read_manifest(self._folder / _MANIFEST)
    except _Unusable as error:
      self._manifest = None
      self._reasons.append(str(error))

  def choose_pool(
    self,
    sizer: PoolSizer,
    spec: Callable[[int, int], ProgramSpec],
    rungs: tuple[StepShape, ...],
    cpu_bytes: int | None,
  ) -> PoolSize | None:
    """See ExecutableSource. Returns the pool size of the bundle if all else fits and the memory suffices.

    Free memory differs by some bytes at each start, but executables are for one pool size. On an accelerator, the
    stored size also saves compiling a step only to learn its memory.
    """
    if self._manifest is None:
      return None
    num_blocks = self._manifest["num_blocks"]
    if num_blocks * sizer.block_size < sizer.least_length:
      return None
    size = sizer.size_by_blocks(num_blocks, "the executable bundle was made for")
    stored = spec(num_blocks, size.max_model_len)
    if self._manifest["made_for"] != made_for(stored, rungs):
      return None
    kv_bytes = (num_blocks + 1) * sizer.block_bytes
    if cpu_bytes is not None:
      return size if 0.9 * cpu_bytes <= kv_bytes <= 1.1 * cpu_bytes else None
    step_bytes = stored.slot_bytes + self._manifest["step_bytes"]
    free = kv_cache.free_bytes(stored.mesh, step_bytes, reserve_share=0.02)
    return size if free is not None and kv_bytes <= free else None

  def begin(self, spec: ProgramSpec, rungs: tuple[StepShape, ...]) -> None:
    """Announces the engine's programs; `executable` may be called afterwards."""
    self.begin_for(made_for(spec, rungs), tuple(spec.mesh.devices.flat))

  def begin_for(self, wanted: dict[str, Any], devices: tuple[Any, ...]) -> None:
    """Does the same as `begin` for a caller that has the result of `made_for` (wanted). devices: jax.Device."""
    self._made_for, self._devices = wanted, devices
    if self._writes and devices[0].platform == "cpu":
      self._without_cache.enter_context(without_compile_cache())
    if self._manifest is not None and self._manifest["made_for"] != wanted:
      self._reasons.append(_difference(self._manifest["made_for"], wanted))
      self._manifest = None
    if self._manifest is not None:
      register_kernels()

  def executable(self, program: Program) -> jax.stages.Compiled:
    """Returns the program's executable: the stored one if it is whole and fits, else a new one.

    Safe on any thread.
    """
    if self._manifest is not None:
      try:
        entry = self._manifest["programs"].get(program.name)
        if entry is None:
          raise _Unusable("is not in it")
        restored = restore_program(program, _read_entry(self._folder, entry), self._devices)
      except (_Unusable, NotRestored) as error:
        with self._lock:
          self._reasons.append(f"{program.name} {error}")
      else:
        with self._lock:
          self._restored[program.name] = entry
        return restored
    compiled = program.compile()
    analysis = compiled.memory_analysis()
    with self._lock:
      self._compiled[program.name] = (program, compiled)
      self._step_bytes = max(self._step_bytes, analysis.temp_size_in_bytes if analysis else 0)
    return compiled

  def finish(self, num_blocks: int) -> str:
    """Finishes the build, and stores newly compiled programs if the bundle is writable.

    Args: num_blocks: blocks in the pool.

    Returns: one line on why programs were compiled; "" if none was.
    """
    self._without_cache.close()
    if not self._compiled:
      self.is_whole = True
      return ""
    if self._writes:
      self.is_whole = self._write(num_blocks)
    first, more = self._reasons[:3], len(self._reasons) - 3
    why = "; ".join(first) + (f"; and {more} more" if more > 0 else "")
    what = "compiled and stored" if self.is_whole else "compiled"
    return f"executable bundle {self._folder}: {why}; programs {what}: {len(self._compiled)}"

  def _write(self, num_blocks: int) -> bool:
    """Stores newly compiled programs for the next start. A reader sees the old bundle or the new one.

    The server also serves if the disk is full: this then adds the reason and returns False.
    """
    try:
      self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      with _locked(self._folder):
        entries = dict(self._restored)
        for name, (program, compiled) in self._compiled.items():
          data = to_bytes(compiled)
          restore_program(program, data, self._devices)  # an executable that cannot be read back is useless
          entries[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
          _write_whole(_entry_file(self._folder, entries[name]), data)
        step_bytes = max(self._step_bytes, self._manifest["step_bytes"] if self._manifest else 0)
        manifest = {
          "format": _FORMAT,
          "made_for": self._made_for,
          "num_blocks": num_blocks,
          "step_bytes": step_bytes,
          "programs": dict(sorted(entries.items())),
        }
        _write_whole(self._folder / _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        kept = {_entry_file(self._folder, entry) for entry in entries.values()}
        for file in (*self._folder.glob(f"*{_SUFFIX}"), *self._folder.glob(f"*{_PART}")):
          if file not in kept:
            file.unlink()
    except OSError as error:
      self._reasons.insert(0, f"cannot be written ({error.strerror})")
    except NotRestored as error:
      self._reasons.insert(0, f"cannot be written ({error})")
    else:
      return True
    return False


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
  """Disables JAX's compile cache, for programs that the bundle stores.

  The CPU backend cannot serialize an executable that it has loaded: the copy lacks functions. This also clears the
  executables that JAX holds in memory, because it may have loaded them for an earlier engine of this process.
  """
  enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()  # it caches whether it is used
  jax.clear_caches()
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


def _difference(stored: dict[str, Any], here: dict[str, Any]) -> str:
  for key in (*here, *stored):
    if stored.get(key) != here.get(key):
      return f"was made for {key} {_shown(stored.get(key))}, and here is {_shown(here.get(key))}"
  return "was made for another server"


def _shown(value: Any) -> str:
  text = json.dumps(value) if isinstance(value, dict | list) else str(value)
  return text if len(text) <= 200 else text[:200] + "..."


def _read_manifest(file: pathlib.Path) -> dict[str, Any]:
  try:
    with file.open("rb") as stream:
      data = stream.read(_MANIFEST_LIMIT + 1)
  except FileNotFoundError:
    raise _Unusable(f"has no {_MANIFEST}") from None
  except OSError as error:
    raise _Unusable(f"has a {_MANIFEST} that cannot be read ({error.strerror})") from None
  try:
    if len(data) > _MANIFEST_LIMIT:
      raise ValueError(f"over {_MANIFEST_LIMIT} bytes")
    manifest = json.loads(data)
    if manifest["format"] != _FORMAT:
      raise _Unusable(f"has format {manifest['format']!r:.20}, this server reads {_FORMAT}")
    whole = isinstance(manifest["made_for"], dict) and all(
      type(manifest[name]) is int and manifest[name] >= 0 for name in ("num_blocks", "step_bytes")
    )
    for entry in manifest["programs"].values():
      digest = entry["sha256"]
      whole &= (
        type(entry["bytes"]) is int
        and entry["bytes"] >= 0
        and len(digest) == 64
        and set(digest) <= set("0123456789abcdef")
      )
    if not whole:
      raise ValueError("an entry is of the wrong kind")
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
    raise _Unusable(f"has a {_MANIFEST} that is broken") from None
  return manifest


def _entry_file(folder: pathlib.Path, entry: dict[str, Any]) -> pathlib.Path:
  return folder / f"{entry['sha256']}{_SUFFIX}"


def _read_entry(folder: pathlib.Path, entry: dict[str, Any]) -> bytes:
  try:
    with _entry_file(folder, entry).open("rb") as stream:
      data = stream.read(entry["bytes"] + 1)
  except FileNotFoundError:
    raise _Unusable("has lost its file") from None
  except OSError as error:
    raise _Unusable(f"cannot be read ({error.strerror})") from None
  if len(data) != entry["bytes"]:
    raise _Unusable(f"has {'more than' if len(data) > entry['bytes'] else 'lost a part of'} {entry['bytes']} bytes")
  if hashlib.sha256(data).hexdigest() != entry["sha256"]:
    raise _Unusable("is not what was written (SHA-256)")
  return data


def _write_whole(file: pathlib.Path, data: bytes) -> None:
  with tempfile.NamedTemporaryFile(dir=file.parent, suffix=_PART, delete=False) as part:  # of mode 0600
    part.write(data)
    part.flush()
    os.fsync(part.fileno())
  os.replace(part.name, file)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """Admits one writer at a time, since each removes the files that its manifest does not name."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield
  finally:
    os.close(handle)
