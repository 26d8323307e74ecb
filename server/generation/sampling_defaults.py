"""Reads a model's sampling defaults from its generation_config.json, once at start. Knows no request.

It reads the keys that vLLM reads, so not `do_sample`. End-of-sequence ids are read with the weights.
"""

from collections.abc import Mapping
import json
import pathlib
import struct
from typing import Any

from engine.errors import ConfigError
from engine.model_folder import leads_outside
from engine.sampling_params import RANGES

# Integers and floats.
SamplingDefaults = Mapping[str, Any]
FILE = "generation_config.json"
_MAX_FILE_BYTES = 1 << 20
_REMEDY = "restore it from its source, or serve with --generation_config=none"
# Keys of the file, and their names in SamplingParams.
_NAMES = {
  **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
  "max_new_tokens": "max_tokens",
}
# Lowest and highest integer; in vLLM a top_k of -1 means all tokens.
_WHOLE = {"top_k": (-1, 2**31 - 1), "max_new_tokens": (1, 2**31 - 1)}


def read_sampling_defaults(folder: pathlib.Path) -> SamplingDefaults:
  """Returns the defaults by their names in SamplingParams; empty without the file.

  Raises:
    ConfigError: the file cannot be read, or a value is outside the limits of requests.
  """
  file = folder / FILE
  if not file.is_file():
    return {}
  found = leads_outside(file)
  if found is not None:
    raise ConfigError(f"{file} is a link to {found}, outside of its folder; copy the file there")
  values = _read(file)
  defaults: dict[str, int | float] = {}
  for key, name in _NAMES.items():
    if values.get(key) is not None:
      defaults[name] = _checked(file, key, values[key])
  return defaults


def describe_defaults(defaults: SamplingDefaults) -> str:
  """Returns a text such as "temperature=0.7, top_k=20"."""
  return ", ".join(f"{name}={value if isinstance(value, int) else f'{value:g}'}" for name, value in defaults.items())


def _read(file: pathlib.Path) -> dict[str, Any]:
  try:
    size = file.stat().st_size
    values = json.loads(file.read_text("utf-8")) if size <= _MAX_FILE_BYTES else None
  except (OSError, ValueError, RecursionError) as error:
    raise ConfigError(f"{file} cannot be read as JSON: {str(error):.200}; {_REMEDY}") from error
  if not isinstance(values, dict):
    raise ConfigError(f"{file} has {size} bytes and is not a JSON object of at most {_MAX_FILE_BYTES}; {_REMEDY}")
  return values


def _checked(file: pathlib.Path, key: str, value: Any) -> int | float:
  """Returns the value as a request holds it: a float of 32 bits, or an integer."""
  if key in _WHOLE:
    low, high = _WHOLE[key]
    if type(value) is int and low <= value <= high:
      return max(0, value)
    allowed = f"a whole number from {low} to {high}"
  else:
    low, high, above = RANGES[key]
    if type(value) in (int, float) and low <= value <= high:
      rounded = struct.unpack("<f", struct.pack("<f", value))[0]
      if rounded > low or not above:
        return rounded
    allowed = f"a number {'above' if above else 'from'} {low:g} to {high:g}"
  raise ConfigError(
    f"{file}: {key}={value!r:.80} is not allowed: it must be {allowed}; correct it there, or serve with "
    "--generation_config=none"
  )
