"""Folders whose files are run as they lie (compiled programs): who may write there. Reads no file and writes none."""

from collections.abc import Iterable
import os
import pathlib
import stat

from engine.errors import ConfigError


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
