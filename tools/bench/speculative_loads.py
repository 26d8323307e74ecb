"""Compares an engine with speculation and one without at Poisson loads; prints a JSON line for each load.

  python -m tools.bench.speculative_loads [--speculation=auto] [--shares=0.1,0.4,0.7,1] [--turns=5]

Both engines serve the demo model in this process, in turns, with the same requests at the same times: stories, copies,
reversals, JSON and recall, greedily. A load is a share of the requests a second that the plain engine serves when all
of them are there at the start. `tokens_per_s`, `gap_p99` (between the messages of a request), `ttft_p50` and `e2e_p50`
are medians over turns of the figures with speculation over those without: above 1 is better for the first one, below 1
for the others. `same` has the quartiles of the plain engine's ratios to itself, which serves twice a turn: what differs
from 1 there is noise. All outputs must be the same.
"""

from collections.abc import Sequence
import json
import pathlib
import random
import statistics
import sys
import time
from typing import NamedTuple

from tokenizers import Tokenizer

from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.errors import EngineError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.settings import SPECULATION, UNBOUNDED_QUEUE
from tools.arguments import CommandParser, positive_int
from tools.demo_model.measure_draft import KINDS, make_messages
from tools.demo_model.train import chat_ids
from tools.make_random_model import find_bench_model
from tools.measure import commit, freeze_start, machine
from tools.report.latency import percentile

_LONGEST = 512  # tokens of a prompt and its output
_OUTPUT = 100
_WAIT_S = 2e-4  # least sleep before an arrival


class _Served(NamedTuple):
  """Attributes: outputs: tokens of each request; the others are figures of the turn."""

  outputs: list[tuple[int, ...]]
  tokens_per_s: float
  gap_p99: float
  ttft_p50: float
  e2e_p50: float


def make_prompts(model: pathlib.Path, count: int) -> list[list[int]]:
  """Returns token ids of conversations of all kinds, mixed."""
  tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
  prompts = [
    chat_ids(tokenizer, messages) for kind in KINDS for messages in make_messages(kind, -(-count // len(KINDS)))
  ]
  prompts = [prompt for prompt in prompts if len(prompt) + _OUTPUT <= _LONGEST]
  random.Random(1).shuffle(prompts)
  return prompts[:count]


def build(
  model: pathlib.Path, speculation: str, overlap: str, max_num_seqs: int, limit: float
) -> tuple[Built, dict[str, list]]:
  """Returns an engine, and what it emits: (time, number of tokens) by request."""
  chunks: dict[str, list] = {}
  options = BuildOptions(
    str(model),
    max_model_len=_LONGEST,
    max_num_seqs=max_num_seqs,
    num_blocks=max_num_seqs * (_LONGEST // 16) // 2,
    block_size=16,
    overlap=overlap,
    speculation=speculation,
    draft_step_limit=limit,
    prefix_cache_scope="off",
    **UNBOUNDED_QUEUE,
  )

  def take_events(events) -> None:
    now = time.perf_counter()
    for event in events:
      if event.token_ids:
        chunks.setdefault(event.request_id, []).append((now, len(event.token_ids)))

  return build_engine(options, lambda *_: None, take_events), chunks


def serve(built: Built, chunks: dict[str, list], prompts: Sequence[list[int]], arrivals: Sequence[float]) -> _Served:
  """Serves all prompts, each at its time in seconds."""
  chunks.clear()
  engine, params = built.engine, SamplingParams(max_tokens=_OUTPUT, temperature=0.0)
  requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
  began, next_one = time.perf_counter(), 0
  while next_one < len(requests) or engine.num_live:
    now = time.perf_counter() - began
    while next_one < len(requests) and arrivals[next_one] <= now:
      engine.submit(requests[next_one])
      next_one += 1
    if not engine.step() and not engine.num_live and next_one < len(requests):
      time.sleep(max(_WAIT_S, arrivals[next_one] - (time.perf_counter() - began)))
  times = [[time for time, _ in chunks[request.id]] for request in requests]
  starts = [began + arrival for arrival in arrivals]
  gaps = [after - before for each in times for before, after in zip(each, each[1:], strict=False)]
  outputs = [tuple(request.output_token_ids) for request in requests]
  return _Served(
    outputs,
    sum(map(len, outputs)) / (max(each[-1] for each in times) - began),
    percentile(gaps, 99) or 0.0,
    statistics.median(each[0] - start for each, start in zip(times, starts, strict=True)),
    statistics.median(each[-1] - start for each, start in zip(times, starts, strict=True)),
  )


def _spread(ratios: list[float]) -> tuple[float, list[float]]:
  """Returns the median and the quartiles, rounded."""
  ratios = sorted(ratios)
  return round(statistics.median(ratios), 3), [round(ratios[len(ratios) * part // 4], 3) for part in (1, 3)]


def measure_loads(
  model: pathlib.Path,
  speculation: str,
  shares: Sequence[float],
  turns: int,
  requests: int,
  overlap: str,
  rows: int,
  limit: float,
) -> None:
  """Prints a line for each load."""
  prompts = make_prompts(model, requests)
  engines = [build(model, kind, overlap, rows, limit) for kind in ("none", speculation)]
  freeze_start()
  at_once = [0.0] * len(prompts)
  for _ in range(2):  # the first one warms up
    plain, drafted = (serve(*engine, prompts, at_once) for engine in engines)
  if plain.outputs != drafted.outputs:
    raise AssertionError("drafts changed an output")
  capacity = len(prompts) * plain.tokens_per_s / sum(map(len, plain.outputs))
  for share in shares:
    rng, now, arrivals = random.Random(2), 0.0, []
    for _ in prompts:
      now += rng.expovariate(share * capacity)
      arrivals.append(now)
    found: list[list[_Served]] = []  # plain, with drafts, plain again
    for turn in range(turns):
      order = (0, 1, 2) if turn % 2 else (2, 1, 0)
      served = {place: serve(*engines[place % 2], prompts, arrivals) for place in order}
      found.append([served[place] for place in range(3)])
      if any(each.outputs != plain.outputs for each in found[-1]):
        raise AssertionError("drafts changed an output")
    line: dict[str, object] = {"share": share, "requests_per_s": round(share * capacity, 2)}
    same: dict[str, list[float]] = {}
    for name in _Served._fields[1:]:
      figures = [[getattr(each, name) for each in turn] for turn in found]
      line[name], line[f"{name}_quartiles"] = _spread([theirs / ((a + b) / 2) for a, theirs, b in figures])
      same[name] = _spread([b / a for a, _, b in figures])[1]
    line["same"] = same
    drafts = engines[1][0].engine.stats().drafts
    print(json.dumps(line | {"drafts_so_far": drafts.tokens, "accepted_so_far": drafts.accepted}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("python -m tools.bench.speculative_loads", __doc__)
  parser.add_argument("--speculation", default="auto", choices=[name for name in SPECULATION if name != "none"])
  parser.add_argument("--shares", default="0.1,0.4,0.7,1", help="loads as shares of the capacity, with commas")
  parser.add_argument("--turns", type=positive_int, default=5, help="turns of each engine at each load")
  parser.add_argument("--requests", type=positive_int, default=100, help="requests of a turn")
  parser.add_argument("--max_num_seqs", type=positive_int, default=64, help="see the server's flag")
  parser.add_argument("--overlap", default="auto", choices=("auto", "true", "false"), help="see the server's flag")
  parser.add_argument("--draft_step_limit", type=float, default=0.0, help="see the server's flag")
  args = parser.parse_args(argv)
  try:
    shares = [float(share) for share in args.shares.split(",")]
  except ValueError:
    shares = []
  if not shares or min(shares) <= 0:
    parser.error(f"--shares={args.shares} must be numbers above 0 with commas")
  try:
    model, _ = find_bench_model("demo")
    print(json.dumps(vars(args) | {"machine": machine(), "commit": commit()}), flush=True)
    measured = (args.turns, args.requests, args.overlap, args.max_num_seqs, args.draft_step_limit)
    measure_loads(model, args.speculation, shares, *measured)
  except EngineError as error:
    return parser.failed(error)
  return 0


if __name__ == "__main__":
  sys.exit(main())
