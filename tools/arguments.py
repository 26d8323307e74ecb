"""Parses command lines of the measuring tools: a wrong flag gives one line and exit code 2. Measures nothing.

argparse rather than absl flags: absl has one registry a process, and tests import several tools into one process. Tools
with absl flags share `parse_flags`, which alone imports absl: `make audit` runs without it.
"""

import argparse
from collections.abc import Sequence
import pathlib
import sys
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
  """An ArgumentParser without abbreviations whose errors are one line."""

  def __init__(self, prog: str, description: str | None):
    super().__init__(
      prog=prog, description=description, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"{self.prog}: {message}; see --help\n")

  def failed(self, error: Exception, code: int = 2) -> int:
    """Prints one line about an error after the flags were parsed; returns the exit code."""
    print(f"{self.prog}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def parse_flags(argv: Sequence[str]) -> list[str]:
  """The `flags_parser` of tools with absl flags: absl's own, except that help exits with 0."""
  from absl import app, flags

  try:
    return flags.FLAGS(list(argv))
  except SystemExit:  # absl exits with 1 after printing help
    sys.exit(0)
  except flags.Error:
    return app.parse_flags_with_usage(list(argv))  # prints the error and exits


def positive_int(text: str) -> int:
  """Parses a whole number of at least 1; raises the error that argparse prints."""
  try:
    value = int(text)
  except ValueError:
    value = 0
  if value < 1:
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
  return value


def positive_ints(text: str) -> tuple[int, ...]:
  """Parses whole numbers of at least 1, separated by commas; raises the error that argparse prints."""
  return tuple(positive_int(item) for item in text.split(","))


def positive_float(text: str) -> float:
  """Parses a number above 0, infinity allowed; raises the error that argparse prints."""
  try:
    value = float(text)
  except ValueError:
    value = 0.0
  if not value > 0:
    raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
  return value


def positive_floats(text: str) -> tuple[float, ...]:
  """Parses numbers above 0, separated by commas; raises the error that argparse prints."""
  return tuple(positive_float(item) for item in text.split(","))


def chances(text: str) -> tuple[float, ...]:
  """Parses numbers from 0 to 1, separated by commas; raises the error that argparse prints."""
  try:
    found = tuple(map(float, text.split(",")))
  except ValueError:
    found = (-1.0,)
  if not all(0 <= chance <= 1 for chance in found):
    raise argparse.ArgumentTypeError(f"{text!r} must be numbers from 0 to 1 with commas")
  return found


def output_file(text: str) -> str:
  """Parses an empty text or a path in an existing folder, before anything is measured; raises argparse's error."""
  if text and not pathlib.Path(text).parent.is_dir():
    raise argparse.ArgumentTypeError(f"{text}: the folder does not exist; create it first")
  return text
