"""Command-line parsing shared by the measuring tools: a wrong flag is one line and exit code 2. No measuring here.

argparse rather than absl flags: absl's registry is one per process, and tests import several tools into one. Tools that
have absl flags all the same share `parse_flags`, which alone imports absl: `make audit` runs where that is missing.
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
    """Says in one line what went wrong after the flags were read; returns the exit code."""
    print(f"{self.prog}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def parse_flags(argv: Sequence[str]) -> list[str]:
  """The `flags_parser` of tools that have absl flags: as absl's own, but help ends the program with 0."""
  from absl import app, flags

  try:
    return flags.FLAGS(list(argv))
  except SystemExit:  # absl ends a program with 1 once it has printed help
    sys.exit(0)
  except flags.Error:
    return app.parse_flags_with_usage(list(argv))  # says what is wrong, and ends the program


def positive_int(text: str) -> int:
  """A whole number of at least 1, or the error argparse shows."""
  try:
    value = int(text)
  except ValueError:
    value = 0
  if value < 1:
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
  return value


def positive_ints(text: str) -> tuple[int, ...]:
  """Whole numbers of at least 1 with commas between, or the error argparse shows."""
  return tuple(positive_int(item) for item in text.split(","))


def positive_float(text: str) -> float:
  """A number above 0, infinity allowed, or the error argparse shows."""
  try:
    value = float(text)
  except ValueError:
    value = 0.0
  if not value > 0:
    raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
  return value


def output_file(text: str) -> str:
  """A path in a folder that exists, or nothing, or the error argparse shows: told before anything is measured."""
  if text and not pathlib.Path(text).parent.is_dir():
    raise argparse.ArgumentTypeError(f"{text}: its folder does not exist; make it first")
  return text
