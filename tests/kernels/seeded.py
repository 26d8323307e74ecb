"""Modules of kernels with a bug put in."""

import pathlib
import types


def seed_bug(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
  """Returns a module like this one, with `new` in place of `old` in its source.

  Raises:
    ValueError: the text does not occur exactly once, so the list of bugs has rotted. Not an AssertionError, which is
      what a bug that is noticed raises.
  """
  path = pathlib.Path(str(module.__file__))
  source = path.read_text("utf-8")
  if source.count(old) != 1:
    raise ValueError(f"{old!r} occurs {source.count(old)} times in {path.name}")
  made = types.ModuleType(f"seeded_{path.stem}")
  exec(compile(source.replace(old, new), f"seeded {path.name}", "exec"), vars(made))
  return made
