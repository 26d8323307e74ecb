"""Settings are declared once: their limits are checked wherever their class is, and flags can have their types."""

import dataclasses

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import (
  GROUPS,
  DeviceSettings,
  SchedulingSettings,
  check_settings,
  declared_settings,
  setting,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
  word: str = setting("a", "A word.", group="Tests", choices=("a", "b"))
  count: int = setting(1, "A count.", group="Tests", at_least=1, at_most=9)
  seconds: float = setting(0.5, "A time.", group="Tests", unit="s", at_least=0)
  names: tuple[str, ...] = setting((), "Names.", group="Tests")
  plain: int = 7


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"word": "c"}, "word='c' must be one of a, b; set --word"),
    ({"count": 0}, "count=0 must be at least 1 and at most 9; set --count"),
    ({"count": 10}, "count=10 must be at least 1 and at most 9; set --count"),
    ({"seconds": -0.1}, "seconds=-0.1 must be at least 0; set --seconds"),
    ({"seconds": float("inf")}, "seconds=inf must be a finite number, at least 0; set --seconds"),
  ],
)
def test_a_value_outside_its_limits_is_refused(changes: dict, message: str):
  with pytest.raises(ConfigError) as caught:
    check_settings(Declared(**changes))
  assert str(caught.value) == message


def test_good_values_pass_and_plain_fields_are_no_settings():
  check_settings(Declared(word="b", count=9, seconds=0.0, names=("x",), plain=-1))
  assert [declared.name for declared in declared_settings(Declared)] == ["word", "count", "seconds", "names"]


def test_the_defaults_of_the_engine_are_inside_their_limits():
  check_settings(SchedulingSettings())
  check_settings(DeviceSettings())


def test_what_the_build_resolves_is_in_the_engines_config():
  names = {field.name for field in dataclasses.fields(EngineConfig)}
  assert {declared.name for declared in declared_settings(DeviceSettings) if declared.setting.resolved} <= names


@pytest.mark.parametrize("cls", [SchedulingSettings, DeviceSettings])
def test_every_declaration_says_what_it_is(cls: type):
  for declared in declared_settings(cls):
    assert declared.setting.group in GROUPS and declared.setting.help.endswith("."), declared.name
