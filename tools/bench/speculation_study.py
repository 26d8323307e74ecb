"""Measures what each drafter is worth, by acceptance and number of sequences; prints a table of Markdown.

  python -m tools.bench.speculation_study [--drafters=oracle,draft,ngram,grammar] [--rows=1,8] [--turns=5]

  oracle    knows the outputs; --shape, drafts of each of --acceptances (tools.bench.speculation)
  draft     the same with the passes of a draft model of the demo draft's shape
  ngram     the demo model on stories that the prompt holds twice (tools.bench.speculative_texts)
  grammar   the demo model on JSON under a schema, with --speculation=auto

Each line compares an engine with drafts to one without, which is the drafter `none`: the ratio of their tokens a
second, with its quartiles. `acceptance` is the oracle's, or what the text showed. `rung` is that of most steps.
"""

from collections.abc import Iterator, Sequence
import pathlib
import sys
import tempfile
from typing import Any

from engine.errors import EngineError
from tools.arguments import CommandParser, chances, positive_int, positive_ints
from tools.bench.speculation import measure, write_draft_shape
from tools.bench.speculative_texts import measure_texts
from tools.make_random_model import find_bench_model
from tools.measure import commit, machine

DRAFTERS = ("oracle", "draft", "ngram", "grammar")
_TITLES = ("drafter", "sequences", "acceptance", "rung", "tokens/s over none", "quartiles", "tokens a row and step")


def measure_lines(args: Any, drafter: str, rows: int) -> Iterator[tuple[str, ...]]:
  """Yields the table's lines of a drafter."""
  if drafter in ("ngram", "grammar"):
    kind, speculation = ("repeat", "ngram") if drafter == "ngram" else ("schema", "auto")
    for found in measure_texts([kind], speculation, max(rows, args.requests), rows, args.turns, args.overlap):
      acceptance = "forced" if found["forced"] else f"{found['accepted'] / max(1, found['drafts']):.2f}"  # type: ignore[operator]
      yield _make_line(drafter, rows, acceptance, found, found["tokens_per_step"] / rows)  # type: ignore[operator]
    return
  model, is_random = find_bench_model(args.shape)
  with tempfile.TemporaryDirectory() as folder:
    draft = ""
    if drafter == "draft" and is_random:
      draft = write_draft_shape(pathlib.Path(folder), "demo_draft", model)
    elif drafter == "draft":  # the demo model has one
      draft = str(find_bench_model("demo_draft")[0])
    for acceptance in args.acceptances:
      chosen = rows, acceptance, args.drafts, args.tokens, args.turns, args.overlap
      found = measure(model, *chosen, is_random, draft)
      yield _make_line(drafter, rows, f"{acceptance:g}", found, found["tokens_per_row_and_step"])


def _make_line(drafter: str, rows: int, acceptance: str, found: dict[str, Any], tokens: Any) -> tuple[str, ...]:
  low, high = found["quartiles"]
  return (
    drafter,
    str(rows),
    acceptance,
    str(found["rung"]),
    f"{found['ratio']:.2f}",
    f"{low:.2f} to {high:.2f}",
    f"{tokens:.2f}",
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("tools.bench.speculation_study", __doc__)
  parser.add_argument("--drafters", default=",".join(DRAFTERS), help=f"of {', '.join(DRAFTERS)}")
  parser.add_argument(
    "--shape", default="llama-125m", help="model of oracle and draft: a folder of models/shapes, or demo"
  )
  parser.add_argument("--acceptances", type=chances, default=(0.0, 0.7, 0.9), help="of oracle and draft")
  parser.add_argument("--rows", type=positive_ints, default=(1, 8), help="sequences that decode together")
  parser.add_argument("--drafts", type=positive_int, default=3, help="most drafts of a row of oracle and draft")
  parser.add_argument("--tokens", type=positive_int, default=96, help="tokens of each sequence of oracle and draft")
  parser.add_argument("--requests", type=positive_int, default=8, help="texts of ngram and grammar")
  parser.add_argument("--turns", type=positive_int, default=5, help="turns of each engine, after one to warm up")
  parser.add_argument("--overlap", default="auto", choices=("auto", "true", "false"), help="see the server's flag")
  args = parser.parse_args(argv)
  drafters = args.drafters.split(",")
  if unknown := set(drafters) - set(DRAFTERS):
    parser.error(f"--drafters: {', '.join(sorted(unknown))} is not one of {', '.join(DRAFTERS)}")
  about = machine()
  print(f"{about.get('cpu')}, {about.get('cores')} cores, {commit()}, overlap {args.overlap}, {args.turns} turns\n")
  print(f"| {' | '.join(_TITLES)} |\n|{' --- |' * len(_TITLES)}", flush=True)
  try:
    for drafter in drafters:
      for rows in args.rows:
        for line in measure_lines(args, drafter, rows):
          print(f"| {' | '.join(line)} |", flush=True)
  except EngineError as error:
    return parser.failed(error)
  return 0


if __name__ == "__main__":
  sys.exit(main())
