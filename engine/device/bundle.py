"""A folder of executables that were compiled before, and what for. What it cannot vouch for is compiled.

  manifest.json        {"format": 1, "made_for": {...}, "num_blocks": ..., "step_bytes": ..., "programs":
                       {name: {"sha256": ..., "bytes": ...}}}; replaced as a whole, last
  SHA256.executable    one for each program, never changed

Executables are code: the folder is judged as the compile cache's is. Beyond the compile cache, which needs each program
traced and lowered to know its key, a bundle needs only that `made_for` is the same here: everything that decides what a
compiler would be given, and would make of it.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import stat
import tempfile
import threading
from typing import Any

import jax
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh

from engine.device.code_folder import refuse_writers
from engine.device.executables import NotRestored, Program, to_bytes
from engine.device.programs import ProgramSpec, step_options
from engine.errors import ConfigError
from engine.shapes import StepShape
from pallas_kernels import native

SETTING = "executable_bundle"
_MANIFEST, _SUFFIX, _PART, _FORMAT = "manifest.json", ".executable", ".part", 1
_MANIFEST_LIMIT = 1 << 20  # bytes
_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_SOURCES = ("engine", "models", "pallas_kernels")
# What is traced depends on these, and users may set them by environment variables.
_SETTINGS = (
  "jax_default_matmul_precision",
  "jax_enable_x64",
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
  "jax_debug_nans",
  "jax_debug_infs",
)
_NO_EFFECT = ("--xla_dump", "--xla_force_host_platform_device_count")  # XLA's flags; the second is in `topology`


class _Unusable(Exception):
  """Why a bundle, or an entry of it, is not used."""


class Bundle:
  """One folder, for one set of programs. `executable` may be called from several threads."""

  def __init__(self, folder: str):
    """Reads the manifest, if there is one.

    Raises:
      ConfigError: others may write to the folder or to what is in it, or it cannot be read.
    """
    self._folder = pathlib.Path(folder)
    self._lock = threading.Lock()
    self._made_for: dict[str, Any] = {}
    self._devices: tuple[Any, ...] = ()
    self._compiled: dict[str, tuple[Program, jax.stages.Compiled]] = {}
    self._restored: dict[str, dict[str, Any]] = {}
    self._reasons: list[str] = []
    self._step_bytes = 0
    self._written = False
    try:
      if not stat.S_ISDIR(self._folder.stat().st_mode):
        raise ConfigError(f"{SETTING}={folder}: is no folder; set --{SETTING} to one, or to a path that is free")
      refuse_writers(self._folder, [*self._folder.glob(f"*{_SUFFIX}"), *self._folder.glob(_MANIFEST)], SETTING)
    except FileNotFoundError:
      pass  # what cannot be made either is told when it is written
    except OSError as error:
      raise ConfigError(f"{SETTING}={folder}: {error.strerror}; set --{SETTING} to another folder") from error
    try:
      self._manifest = _read_manifest(self._folder / _MANIFEST)
    except _Unusable as error:
      self._manifest = None
      self._reasons.append(str(error))

  @property
  def pool(self) -> tuple[int, int] | None:
    """(num_blocks, step_bytes) that it was made with, for where the pool's size follows from free memory."""
    return None if self._manifest is None else (self._manifest["num_blocks"], self._manifest["step_bytes"])

  def fits(self, made_for: dict[str, Any]) -> bool:
    """Whether the bundle was made for this; see the function `made_for`."""
    return self._manifest is not None and self._manifest["made_for"] == made_for

  def begin(self, made_for: dict[str, Any], mesh: Mesh) -> None:
    """Says what programs will be asked for; from here on `executable` may be called."""
    self._made_for, self._devices = made_for, tuple(mesh.devices.flat)
    if self._manifest is not None and not self.fits(made_for):
      self._reasons.append(_difference(self._manifest["made_for"], made_for))
      self._manifest = None
    if self._manifest is not None:
      _register_kernels()

  def executable(self, program: Program) -> jax.stages.Compiled:
    """The program's executable: the stored one, if it is whole and what it should be, else a new one."""
    if self._manifest is not None:
      try:
        entry = self._manifest["programs"].get(program.name)
        if entry is None:
          raise _Unusable("is not in it")
        restored = program.restore(_read_entry(self._folder, entry), self._devices)
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

  @property
  def is_whole(self) -> bool:
    """Whether every program that was asked for is stored."""
    return self._written or not self._compiled

  def note(self) -> str:
    """Why programs were compiled; "" if none was."""
    if not self._compiled:
      return ""
    first, more = self._reasons[:3], len(self._reasons) - 3
    why = "; ".join(first) + (f"; and {more} more" if more > 0 else "")
    what = "compiled and stored" if self._written else "compiled"
    return f"executable bundle {self._folder}: {why}; programs {what}: {len(self._compiled)}"

  def write(self, num_blocks: int) -> None:
    """Stores what was compiled, so that the next start finds it; a reader sees the old bundle or the new one.

    A disk that takes nothing is no reason not to serve: `note` says so.
    """
    if not self._compiled:
      return
    try:
      self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      with _locked(self._folder):
        entries = dict(self._restored)
        for name, (program, compiled) in self._compiled.items():
          data = to_bytes(compiled)
          program.restore(data, self._devices)  # what cannot be read back is no use
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
      self._written = True


def made_for(spec: ProgramSpec, rungs: tuple[StepShape, ...]) -> dict[str, Any]:
  """All that decides what executables are, as JSON values; weights are arguments and do not."""
  devices = list(spec.mesh.devices.flat)
  client = devices[0].client
  shapes = [(leaf.shape, str(leaf.dtype), str(leaf.sharding.spec)) for leaf in spec.params]
  found: dict[str, Any] = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "flax")}
  found |= {
    "platform": client.platform,
    "platform version": client.platform_version,
    "device": spec.device_kind or devices[0].device_kind,
    "device ids": [device.id for device in devices],
    "mesh": [list(map(str, spec.mesh.axis_names)), list(spec.mesh.devices.shape)],
    "topology": _topology(devices),
    "XLA flags": _xla_flags(),
    "JAX settings": {name: str(jax.config.values[name]) for name in _SETTINGS},
    "Sluice's programs": _sources(),
    "kernel libraries": {name: _library(name) for name in native.SOURCES} if client.platform == "cpu" else {},
    "model": _digest(repr(spec.model)),
    "parameters": _digest(repr(shapes)),
    "KV": f"{len(spec.kv)} of {spec.kv[0].dtype}{list(spec.kv[0].shape)}",
    "ladder": [dataclasses.astuple(shape) for shape in rungs],
    "compiler options": step_options(spec),
  }
  if client.platform == "cpu":
    found["processors"] = len(os.sched_getaffinity(0))  # XLA splits loops by their number
  plain = {key: value for key, value in vars(spec).items() if isinstance(value, str | int | float | bool)}
  return json.loads(json.dumps(found | plain))


def _difference(stored: dict[str, Any], here: dict[str, Any]) -> str:
  for key in (*here, *stored):
    if stored.get(key) != here.get(key):
      return f"was made for {key} {_shown(stored.get(key))}, and here is {_shown(here.get(key))}"
  return "was made for something else"


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
      raise _Unusable(f"has format {manifest['format']!r:.20}, and this reads {_FORMAT}")
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
  """One writer at a time: each removes what its manifest does not name."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield
  finally:
    os.close(handle)


def _register_kernels() -> None:
  """Lets the backend find the C++ kernels: nothing is traced here, which is when they are registered otherwise."""
  for name in native.SOURCES:
    with contextlib.suppress(native.NativeMissing):
      native.register(name)


def _library(name: str) -> str:
  """Its file's name holds a digest of its sources, flags and jaxlib."""
  file = native.path(name)
  return file.name if file.exists() else "not built"


def _topology(devices: list[Any]) -> str:
  """On a CPU with the instructions it has; as JAX's compile cache takes it."""
  try:
    return f"{xla_client.get_topology_for_devices(devices).fingerprint():016x}"
  except jax.errors.JaxRuntimeError:
    return ""


def _xla_flags() -> list[str]:
  flags = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
  return sorted(flag for flag in flags if not flag.startswith(_NO_EFFECT))


def _sources() -> str:
  digest = hashlib.sha256()
  for package in _SOURCES:
    for file in sorted((_ROOT / package).rglob("*.py")):
      digest.update(file.relative_to(_ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
  return digest.hexdigest()


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()
