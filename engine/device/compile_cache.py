"""Owns JAX's folder of compiled programs and keeps its entries whole. Besides, only stored_programs.py writes to it.

A user who can write to the folder can run code in the server, because JAX loads programs unchecked. JAX writes entries
in place and never over an old one, so an entry that a kill or a full disk truncated would stay forever. Therefore this
module checks entries younger than the folder's stamp before the first use and after the last.
"""

from collections.abc import Iterable
import contextlib
import importlib
import os
import pathlib
import stat
import zlib

import jax
from jax.experimental.compilation_cache import compilation_cache

from engine.errors import ConfigError

SUFFIX = "-cache"  # suffix of JAX's entries
INDEX_SUFFIX = ".programs.json"  # of the files of stored_programs.py
# XLA:GPU stores the fastest algorithm of each matmul there, so that later programs need not time it again.
_AUTOTUNED = "xla_gpu_per_fusion_autotune_cache_dir"
_STAMP = ".looked-through"
_ZSTD = b"\x28\xb5\x2f\xfd"


def use_compile_cache(folder: str) -> str:
  """Makes JAX cache every program in `folder`, and on a GPU the results of autotuning.

  Returns:
    Why JAX can read but not write programs there, or "".

  Raises:
    ConfigError: the system cannot create the folder, or other users may write to it.
  """
  path = pathlib.Path(folder)
  try:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_writers(
      path, (*path.glob(f"*{SUFFIX}"), *path.glob(f"*{INDEX_SUFFIX}"), *path.glob(_AUTOTUNED)), "compile_cache_dir"
    )
  except OSError as error:
    raise ConfigError(
      f"compile_cache_dir={folder}: {error.strerror}; set --compile_cache_dir to a writable folder, or "
      "leave it empty to cache no programs"
    ) from error
  writable = os.access(path, os.W_OK | os.X_OK)
  if writable:
    with contextlib.suppress(OSError):  # a full disk
      (path / _AUTOTUNED).mkdir(mode=0o700, exist_ok=True)  # XLA would create it with the umask's mode
    check_cached_programs(folder)
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_enable_xla_caches", _AUTOTUNED)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  compilation_cache.reset_cache()  # JAX may have cached that there is no folder
  return "" if writable else f"compile cache: {folder} is not writable, so every start compiles new programs"


def has_cached_programs(folder: str) -> bool:
  """Returns whether the folder holds any program; False for ""."""
  return bool(folder) and any(pathlib.Path(folder).glob(f"*{SUFFIX}"))


def refuse_writers(folder: pathlib.Path, files: Iterable[pathlib.Path], setting: str) -> None:
  """Raises ConfigError if users other than this one and root could change `folder` or one of `files`.

  Args:
    folder: holds the files.
    files: files with code that the server will run.
    setting: the flag that names the folder.
  """
  for each in (folder, *files):
    found = each.stat()
    others = stat.S_IMODE(found.st_mode) & 0o022
    if others or found.st_uid not in (os.geteuid(), 0):
      raise ConfigError(
        f"{setting}={folder}: {each} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}, so "
        f"that others could put code into the server of user {os.geteuid()}; remove it, or chown it to that user "
        f"and chmod -R go-w, or set --{setting} to another folder"
      )


def check_cached_programs(folder: str) -> None:
  """Removes truncated entries among those written since the last call.

  Ignores a disk that does not accept writes, because the server can run without the cache.
  """
  path = pathlib.Path(folder)
  with contextlib.suppress(OSError):
    stamp = path / _STAMP
    since = stamp.stat().st_mtime_ns if stamp.exists() else 0
    for entry in path.glob(f"*{SUFFIX}"):
      if entry.stat().st_mtime_ns >= since and not _is_whole(entry.read_bytes()):
        entry.unlink()
    stamp.touch(mode=0o600)


def _is_whole(data: bytes) -> bool:
  """Returns whether a compressed entry is complete."""
  try:
    if data.startswith(_ZSTD):
      importlib.import_module("zstandard").ZstdDecompressor().decompress(data)
    else:
      zlib.decompress(data)
  except ImportError:  # JAX uses zstandard if it is installed, else zlib
    return True
  except Exception:  # both libraries have their own exceptions
    return False
  return True
