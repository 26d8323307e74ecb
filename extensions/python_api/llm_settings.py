"""What an LLM may be made with: the engine's declared settings by name, and those of model and text. Builds nothing.

Light to import: no JAX.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import difflib
import os
from typing import Any

from engine.errors import ConfigError
from engine.settings import (
  UNBOUNDED_QUEUE,
  DeclaredSetting,
  DeviceSettings,
  SchedulingSettings,
  check_settings,
  declared_settings,
)
from server.flag_spellings import INSTEAD, SYNONYMS
from server.host_options import SchemaSettings
from server.model_settings import ModelSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings(ModelSettings, SchemaSettings):
  """The settings of model and text."""


def split_settings(given: Mapping[str, Any]) -> tuple[TextSettings, dict[str, Any]]:
  """The settings of text, checked, and the values of the engine's.

  Raises:
    ConfigError: a setting is unknown, or its value of another type or outside its limits.
  """
  text = {declared.name: declared for declared in declared_settings(TextSettings)}
  engine = {
    declared.name: declared for cls in (DeviceSettings, SchedulingSettings) for declared in declared_settings(cls)
  }
  known = text | engine
  values: dict[str, Any] = {}
  for spelled, value in given.items():
    name = SYNONYMS.get(spelled, spelled)
    if name in INSTEAD:
      raise ConfigError(f"{name}={value!r:.80} is a setting of vLLM that Sluice does not have; {INSTEAD[name]}")
    if name not in known:
      near = difflib.get_close_matches(name, known, 1)
      remedy = f"the nearest is {near[0]}" if near else f"known are {', '.join(sorted(known))}"
      raise ConfigError(f"{name}={value!r:.80} is not a setting of LLM; {remedy} (docs/reference/flags.md lists all)")
    values[name] = _checked_type(known[name], value)
  chosen = TextSettings(**{name: value for name, value in values.items() if name in text})
  check_settings(chosen)
  defaults = {name: declared.default for name, declared in engine.items()} | UNBOUNDED_QUEUE
  return chosen, defaults | {name: value for name, value in values.items() if name in engine}


def _checked_type(declared: DeclaredSetting, value: Any) -> Any:
  """The value, a list as the tuple it stands for; raises ConfigError for one of another type."""
  wanted = declared.type
  if wanted in (tuple[int, ...], tuple[str, ...]):
    each = int if wanted == tuple[int, ...] else str
    if isinstance(value, Sequence) and not isinstance(value, str) and all(_is_a(each, item) for item in value):
      return tuple(value)
    raise _refusal(declared, value, f"a list of {'whole numbers' if each is int else 'texts'}")
  if wanted is str and isinstance(value, os.PathLike):
    return os.fspath(value)
  if not _is_a(wanted, value):
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
    raise _refusal(declared, value, words.get(wanted, str(wanted)))
  return float(value) if wanted is float else value


def _is_a(wanted: type, value: Any) -> bool:
  if isinstance(value, bool):
    return wanted is bool
  return isinstance(value, int | float) if wanted is float else isinstance(value, wanted)


def _refusal(declared: DeclaredSetting, value: Any, allowed: str) -> ConfigError:
  return ConfigError(
    f"{declared.name}={value!r:.80} is not allowed: it must be {allowed}; correct it, or leave it out for "
    f"{declared.default!r}"
  )
