"""The one owner of the folder of compiled programs that JAX keeps, and of what is there being whole.

Whoever can write to it can run code in the server, since programs are loaded as they lie. JAX writes entries in place
and never over an old one, so one that a kill or a full disk has cut would be in the way for ever: entries that are
younger than the folder's stamp are looked through, before the first use and after the last.
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

_SUFFIX = "-cache"  # of JAX's entries
# XLA:GPU keeps there which way of doing each matmul was fastest, so that other programs need not time it again.
_AUTOTUNED = "xla_gpu_per_fusion_autotune_cache_dir"
_STAMP = ".looked-through"
_ZSTD = b"\x28\xb5\x2f\xfd"


def use(folder: str) -> str:
  """Makes JAX keep every program in `folder`, however small or quick, and on a GPU what autotuning found.

  Returns:
    Why programs cannot be kept there, though old ones may be read; "" where they can.

  Raises:
    ConfigError: the folder cannot be made, or others may write to it.
  """
  path = pathlib.Path(folder)
  try:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_writers(path, (*path.glob(f"*{_SUFFIX}"), *path.glob(_AUTOTUNED)), "compile_cache_dir")
  except OSError as error:
    raise ConfigError(
      f"compile_cache_dir={folder}: {error.strerror}; set --compile_cache_dir to a folder that can be written, or "
      "leave it empty to keep no programs"
    ) from error
  writable = os.access(path, os.W_OK | os.X_OK)
  if writable:
    with contextlib.suppress(OSError):  # a full disk
      (path / _AUTOTUNED).mkdir(mode=0o700, exist_ok=True)  # XLA would make it by the umask
    look_through(folder)
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_enable_xla_caches", _AUTOTUNED)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  compilation_cache.reset_cache()  # it may have looked before and found none
  return "" if writable else f"compile cache: {folder} cannot be written, so new programs are compiled at every start"


def refuse_writers(folder: pathlib.Path, files: Iterable[pathlib.Path], setting: str) -> None:
  """Raises ConfigError if anybody but this user and root could change `folder` or one of `files`.

  Args:
    folder: holds the files.
    files: those whose contents will be run.
    setting: name of the flag that gave the folder.
  """
  for each in (folder, *files):
    found = each.stat()
    others = stat.S_IMODE(found.st_mode) & 0o022
    if others or found.st_uid not in (os.geteuid(), 0):
      raise ConfigError(
        f"{setting}={folder}: {each} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}, so "
        f"that others could put code into the server of user {os.geteuid()}; remove the folder, or make it that user's "
        f"and chmod -R go-w, or set --{setting} to another"
      )


def look_through(folder: str) -> None:
  """Removes entries that are not whole, of those written since this was last called.

  A disk that takes nothing is no reason not to serve.
  """
  path = pathlib.Path(folder)
  with contextlib.suppress(OSError):
    stamp = path / _STAMP
    since = stamp.stat().st_mtime_ns if stamp.exists() else 0
    for entry in path.glob(f"*{_SUFFIX}"):
      if entry.stat().st_mtime_ns >= since and not _is_whole(entry.read_bytes()):
        entry.unlink()
    stamp.touch(mode=0o600)


def _is_whole(data: bytes) -> bool:
  """Whether a compressed entry ends where its end is."""
  try:
    if data.startswith(_ZSTD):
      importlib.import_module("zstandard").ZstdDecompressor().decompress(data)
    else:
      zlib.decompress(data)
  except ImportError:  # JAX takes zstandard where it is installed, else zlib
    return True
  except Exception:  # two libraries' own
    return False
  return True
