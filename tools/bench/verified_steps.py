"""Measures what drafts add to a step's time, accepted or not; prints one JSON line.

  python -m tools.bench.verified_steps [--shape=llama-125m] [--rows=1] [--most_drafts=7] [--context=200] [--turns=14]

Each step decodes `rows` sequences at one context, each with as many drafts. Kinds of steps, from no drafts to
--most_drafts a row, take turns of `steps` steps, two in flight as in the engine. `step_ms` is the median over turns of
a turn's median, by number of drafts. `ratio` is the median over turns of a turn's time to that without drafts in the
same round, and `quartiles` are around it. `least_ratio` compares the fastest steps of all turns, which other programs
on the machine delay least. Drafts are worth the tokens that they bring over this ratio; tools.bench.speculation
measures both together.
"""

from collections import deque
from collections.abc import Sequence
import json
import pathlib
import statistics
import sys
import time

from engine.batch import MAX_DRAFTS, Admission, Batch
from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.errors import EngineError
from engine.sampling_params import SamplingParams
from engine.settings import UNBOUNDED_QUEUE
from tools.arguments import CommandParser, positive_int
from tools.make_random_model import find_bench_model

_BLOCK_SIZE = 16
_TOKEN = 7  # every input and every draft
_DEPTH = 2  # steps in flight


def make_batch(built: Built, rows: int, drafts: int, context: int, *, admits: bool) -> Batch:
  """Returns a step of `rows` decodes with `drafts` drafts each; with `admits`, it also gives them their blocks."""
  width = -(-built.config.max_model_len // _BLOCK_SIZE)
  admissions = []
  for slot in range(rows if admits else 0):
    blocks = tuple(range(1 + slot * width, 1 + (slot + 1) * width))
    admissions.append(Admission(slot, (_TOKEN,) * context, 1, blocks, SamplingParams(1, temperature=0.0), 0))
  slots, size = tuple(range(rows)), 1 + drafts
  return Batch(
    step=-1,
    shape=built.config.ladder.fit(rows * size),
    request_ids=tuple(map(str, slots)),
    slots=slots,
    starts=(context - 1,) * rows,
    counts=(size,) * rows,
    num_logits=(size,) * rows,
    samples=(True,) * rows,
    token_ids=((_TOKEN,) * size if drafts else (),) * rows,
    admissions=tuple(admissions),
    num_drafts=(drafts,) * rows if drafts else (),
  )


def measure_turn(built: Built, rows: int, drafts: int, context: int, steps: int) -> list[float]:
  """Returns the seconds of each of `steps` steps, after one that admits and one that fills the queue."""
  runner = built.runner
  batch = make_batch(built, rows, drafts, context, admits=False)
  in_flight = deque([runner.launch(make_batch(built, rows, drafts, context, admits=True))])
  moments = []
  while len(moments) < steps + 2:
    while len(in_flight) < _DEPTH:
      in_flight.append(runner.launch(batch))
    in_flight.popleft().result()
    moments.append(time.perf_counter())
  for launched in in_flight:
    launched.result()
  return [end - begin for begin, end in zip(moments[1:], moments[2:], strict=False)]


def measure(
  model: pathlib.Path, rows: int, most_drafts: int, context: int, steps: int, turns: int, is_random: bool
) -> dict[str, object]:
  """Returns the figures of one setting; lists are by number of drafts, from 0."""
  longest = context + MAX_DRAFTS + 1
  num_logits = rows * (1 + most_drafts)
  options = BuildOptions(
    str(model),
    random_weights=is_random,
    max_model_len=longest,
    max_num_seqs=num_logits,  # a rung has as many logit rows
    token_budgets=tuple(sorted({max(2, rows * (1 + drafts)) for drafts in range(most_drafts + 1)})),
    num_blocks=rows * -(-longest // _BLOCK_SIZE),
    block_size=_BLOCK_SIZE,
    speculation="none",
    **UNBOUNDED_QUEUE,
  )
  built = build_engine(options, lambda *_: None, lambda _: None)
  kinds = range(most_drafts + 1)
  medians: list[list[float]] = [[] for _ in kinds]
  least = [float("inf")] * len(kinds)
  for turn in range(turns + 1):
    for drafts in kinds if turn % 2 else reversed(kinds):
      found = measure_turn(built, rows, drafts, context, steps)
      if turn:  # the first one warms up
        medians[drafts].append(statistics.median(found))
        least[drafts] = min(least[drafts], *found)
  ratios = [sorted(mine / base for mine, base in zip(of, medians[0], strict=True)) for of in medians]
  return {
    "step_ms": [round(1e3 * statistics.median(of), 3) for of in medians],
    "ratio": [round(statistics.median(of), 3) for of in ratios],
    "quartiles": [[round(of[len(of) * part // 4], 3) for part in (1, 3)] for of in ratios],
    "least_ratio": [round(seconds / least[0], 3) for seconds in least],
    "compiles_after_ready": built.runner.compiles_after_ready,
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("bench_verified_steps", __doc__)
  parser.add_argument("--shape", default="llama-125m", help="a folder of models/shapes, with random weights, or demo")
  parser.add_argument("--rows", type=positive_int, default=1, help="sequences that decode")
  parser.add_argument(
    "--most_drafts", type=positive_int, default=MAX_DRAFTS, help=f"drafts of a row, at most {MAX_DRAFTS}"
  )
  parser.add_argument("--context", type=positive_int, default=200, help="tokens before each new one")
  parser.add_argument("--steps", type=positive_int, default=8, help="steps of a turn")
  parser.add_argument("--turns", type=positive_int, default=14, help="turns of each kind, after one to warm up")
  args = parser.parse_args(argv)
  if args.most_drafts > MAX_DRAFTS:
    parser.error(f"--most_drafts={args.most_drafts} is above {MAX_DRAFTS}, the limit of a row")
  try:
    model, is_random = find_bench_model(args.shape)
    found = measure(model, args.rows, args.most_drafts, args.context, args.steps, args.turns, is_random)
  except EngineError as error:
    return parser.failed(error)
  print(json.dumps({"shape": args.shape, "rows": args.rows, "context": args.context} | found))
  return 0


if __name__ == "__main__":
  sys.exit(main())
