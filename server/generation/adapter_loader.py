"""Loads and unloads LoRA adapters while the engine serves. Belongs to the event loop of the engine's process.

A thread reads and checks an adapter's folder, and the engine's thread writes it between two steps, so requests wait for
neither. The engine decides which names and slots are free; this module decides which folders may be read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
import concurrent.futures
import functools
import logging
import pathlib
import re
import time
from typing import Any

from engine.adapters import AdapterWeights
from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequest
from server.errors import NotConfigured

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")

_log = logging.getLogger(__name__)


async def _tell_nobody() -> None:
  pass


class AdapterLoader:
  """The adapters of an engine, and the folders that they may come from.

  Attributes:
    tell_change: awaited after every change of the served names, before the caller learns of it.
  """

  def __init__(
    self,
    engine: Engine,
    read: Callable[[str], AdapterWeights] | None,
    *,
    model: str,
    lora_dir: str = "",
  ):
    """Args:
    engine: serves the adapters.
    read: reads and checks a folder; None where the engine has no slots for adapters.
    model: the served model's name, which no adapter may have.
    lora_dir: adapters load at run time only from below this folder; empty: from nowhere.
    """
    self.tell_change: Callable[[], Awaitable[None]] = _tell_nobody
    self._engine = engine
    self._read = read
    self._model = model
    self._lora_dir = lora_dir
    # One read at a time, so that calls cannot fill the memory with weights.
    self._reading = asyncio.Lock()
    self._tasks: set[asyncio.Task] = set()

  async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
    """Loads an adapter; returns when requests of every front end can use it.

    Args:
      name: what requests send as model.
      path: its folder below lora_dir; relative to it, or absolute.
      replaces: replace a loaded adapter of this name, if it has no requests.

    Raises:
      NotConfigured: the server has no slots for adapters, or no lora_dir.
      InvalidRequest: the name or the folder cannot be used, no slot is free, or the old adapter has requests.
    """
    read = self._require_read()
    check_adapter_name(name, self._model)
    folder = self._find_folder(path)
    self._engine.check_adapter_load(name, replaces)
    await self._finish(self._load(read, name, path, folder, replaces=replaces))

  async def unload_adapter(self, name: str) -> int:
    """Takes an adapter from new requests; returns the number of live requests that still use it.

    Raises:
      NotConfigured: the server has no slots for adapters.
      AdapterNotLoaded: no adapter of this name takes requests.
    """
    self._require_read()
    return await self._finish(self._unload(name))

  async def _load(
    self, read: Callable[[str], AdapterWeights], name: str, path: str, folder: pathlib.Path, *, replaces: bool
  ) -> None:
    async with self._reading:
      started = time.monotonic()
      self._engine.check_adapter_load(name, replaces)  # again: another load may have come first
      try:
        weights = await asyncio.to_thread(read, str(folder))
      except ConfigError as error:
        raise InvalidRequest(f"={path!r:.200} cannot be served: {error}", field="lora_path") from None
      try:
        await asyncio.wrap_future(self._engine.load_adapter(name, weights, replaces))
      except ValueError as error:
        raise InvalidRequest(f"={path!r:.200} does not fit the model: {error}", field="lora_path") from None
      await self.tell_change()
      _log.info("adapter %s: loaded from %s in %.2f s", name, folder, time.monotonic() - started)

  async def _unload(self, name: str) -> int:
    self._engine.unload_adapter(name).add_done_callback(functools.partial(_tell_end, name))
    num_live = next((adapter.num_live for adapter in self._engine.adapters() if adapter.name == name), 0)
    _log.info("adapter %s: takes no new requests, %d live ones", name, num_live)
    await self.tell_change()
    return num_live

  async def _finish[T](self, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which goes on if the caller leaves: half of a change would be worse than all of it."""
    task = asyncio.create_task(work)
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    return await asyncio.shield(task)

  def _require_read(self) -> Callable[[str], AdapterWeights]:
    if self._read is None:
      raise NotConfigured("this server has no slots for LoRA adapters; serve with --enable_lora")
    return self._read

  def _find_folder(self, path: str) -> pathlib.Path:
    """Returns the folder of a path. Says nothing about what is outside of lora_dir."""
    if not self._lora_dir:
      raise NotConfigured(
        "this server loads adapters at its start alone, from --lora_modules; serve with --lora_dir=FOLDER to load "
        "those below it at run time"
      )
    root = pathlib.Path(self._lora_dir).resolve()
    try:
      folder = (root / path).resolve()
      if not folder.is_relative_to(root):
        raise InvalidRequest(
          f"={path!r:.200} is outside of --lora_dir={root}: send a folder below it", field="lora_path"
        )
      is_folder = folder != root and folder.is_dir()
    except (OSError, ValueError):  # too long, or with a NUL
      is_folder = False
    if not is_folder:
      raise InvalidRequest(
        f"={path!r:.200} is not a folder below --lora_dir={root}: copy the adapter there", field="lora_path"
      )
    return folder


def check_adapter_name(name: str, model: str) -> None:
  """Raises InvalidRequest for a name that is unfit for a label or a log line, or is the served model's."""
  if not _NAME.fullmatch(name):
    raise InvalidRequest(
      f"={name!r:.80} is not allowed: send 1 to 128 of A-Z a-z 0-9 . _ : / @ + -, the first a letter or a digit",
      field="lora_name",
    )
  if name == model:
    raise InvalidRequest(f"={name!r} is the served model's name: choose another", field="lora_name")


def parse_lora_modules(modules: Sequence[str]) -> list[tuple[str, str]]:
  """Returns the names and folders of --lora_modules. Raises ConfigError."""
  found: dict[str, str] = {}
  for module in modules:
    name, equals, path = module.partition("=")
    if not equals or not path or not _NAME.fullmatch(name):
      raise ConfigError(
        f"lora_modules={module!r:.200} is not NAME=FOLDER, the name of 1 to 128 of A-Z a-z 0-9 . _ : / @ + -; separate "
        "several by commas"
      )
    if name in found:
      raise ConfigError(f"lora_modules={module!r:.200} has the name of an earlier one; give each a name of its own")
    found[name] = path
  return list(found.items())


def _tell_end(name: str, ended: concurrent.futures.Future[None]) -> None:
  """Logs the end of an unload, on the engine's thread."""
  error = None if ended.cancelled() else ended.exception()
  if error is None:
    _log.info("adapter %s: unloaded", name)
  else:
    _log.error("adapter %s: %s", name, error)
