"""Writes text of the kind that the demo model was trained on to a file, for calibration.

python -m tools.demo_model.write_text --output=FILE [--kinds=story,json] [--num_turns=300] [--seed=1]
"""

import argparse
from collections.abc import Sequence
import pathlib
import random
import sys

from tools.arguments import CommandParser, output_file, positive_int
from tools.demo_model import corpus

_KINDS = tuple(kind for kind in corpus.MIXTURE if kind != "recall")  # recall needs the facts of a whole chat


def parse_kinds(text: str) -> list[str]:
  """Parses kinds of turns, separated by commas; raises the error that argparse prints."""
  kinds = text.split(",")
  for kind in kinds:
    if kind not in _KINDS:
      raise argparse.ArgumentTypeError(f"{kind!r} is no kind of turn; use {', '.join(_KINDS)}")
  return kinds


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line."""
  parser = CommandParser("tools.demo_model.write_text", __doc__)
  parser.add_argument("--output", type=output_file, required=True, help="file to write")
  parser.add_argument("--kinds", type=parse_kinds, default="story", help=f"of {', '.join(_KINDS)}")
  parser.add_argument("--num_turns", type=positive_int, default=300, help="questions with their answers, at least")
  parser.add_argument("--seed", type=int, default=1, help="seed of the text")
  args = parser.parse_args(argv)
  rng, turns = random.Random(args.seed), []
  while len(turns) < args.num_turns:
    turns += corpus.filler_turns(rng, {kind: corpus.MIXTURE[kind] for kind in args.kinds})
  pathlib.Path(args.output).write_text("".join(turn.text() for turn in turns), "utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main())
