"""Finds Sluice's version."""

import functools
from importlib import metadata
import pathlib
import tomllib


@functools.cache
def server_version() -> str:
  """Returns the version in this checkout's pyproject.toml, else that of the installed package."""
  project = pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml"
  if project.is_file():
    return tomllib.loads(project.read_text("utf-8"))["project"]["version"]
  return metadata.version("sluice-serve")
