"""Writes declared settings as text: their help, their defaults, their values. Reads no flag."""

import pathlib
from typing import Any

from engine.settings import DeclaredSetting

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def describe_setting(declared: DeclaredSetting) -> str:
  """Returns the help text of a setting, with its choices, unit and default."""
  found = declared.setting
  more = [found.limits()] if found.choices is not None else []
  more += [f"in {found.unit}"] if found.unit else []
  more += [f"default {text}"] if (text := default_text(declared)) else []
  return f"{found.help} ({'; '.join(more)})" if more else found.help


def default_text(declared: DeclaredSetting) -> str:
  """Returns a default as a user would type it, without this machine's folders; "" if it is empty."""
  home, checkout = str(pathlib.Path.home()), f"{_ROOT}/"
  return value_text(declared.default).replace(checkout, "").replace(home, "~")


def value_text(value: Any) -> str:
  """Returns a value as the command line spells it; "" for None."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    return ",".join(map(str, value))
  if isinstance(value, float):
    return f"{value:g}"
  return "" if value is None else str(value)
