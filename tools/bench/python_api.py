"""Measures LLM.generate beside the bare engine of tools.bench_offline: the same requests, alternating. Tunes nothing.

  python -m tools.bench.python_api --model=DIR

One engine serves the same token ids alternately, through LLM.generate and in the bare loop of tools.bench_offline,
greedily and to the same lengths; the tokens must agree. Two engines would not do: where their arrays lie in memory
makes equal ones differ by up to 3 %. A turn's figure is output tokens over seconds. For the bare engine the seconds run
from the first submission to the last token; for LLM.generate they cover the whole call, with its checks and texts.
Prints one line of JSON: the medians over turns, and the median of each pair's ratio.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from typing import Any

from engine.errors import EngineError
from extensions.python_api.llm import DEMO_MODEL, LLM
from extensions.python_api.sampling_params import SamplingParams
from tools.arguments import CommandParser, positive_int
from tools.bench_offline import EngineLoop
from tools.measure import machine
from tools.report.latency import summary
from tools.workload import WorkRequest, synthetic


@dataclasses.dataclass(frozen=True)
class MeasuredCall:
  """One run of all requests.

  Attributes:
    output_tok_s: output tokens a second.
    cpu_s: processor time of the whole process in seconds; other work on the machine disturbs it less.
    tokens: tokens of each request.
  """

  output_tok_s: float
  cpu_s: float
  tokens: list[tuple[int, ...]]


def measure_turns(model_dir: str, requests: Sequence[WorkRequest], turns: int) -> dict[str, list[MeasuredCall]]:
  """Runs both sides in turn, and swaps their order after each pair. Raises EngineError if their tokens differ."""
  num_tokens = sum(request.output_len for request in requests)
  prompts = [list(request.prompt) for request in requests]
  params = [SamplingParams(max_tokens=request.output_len, temperature=0, ignore_eos=True) for request in requests]
  with LLM(model_dir, prefix_cache_scope="off", speculation="none") as llm:
    offline = EngineLoop()
    offline.engine = llm.engine
    emit = llm.engine.emit

    def run_offline() -> MeasuredCall:
      cpu = time.process_time()
      llm.engine.emit = offline.take_events
      try:
        outcomes = offline.serve(requests)
      finally:
        llm.engine.emit = emit
      cpu_s = time.process_time() - cpu
      return MeasuredCall(summary(outcomes, 0)["output_tok_s"], cpu_s, [outcome.tokens for outcome in outcomes])

    def run_python_api() -> MeasuredCall:
      cpu, started = time.process_time(), time.perf_counter()
      outputs = llm.generate(prompts, params, progress=False)
      seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
      return MeasuredCall(num_tokens / seconds, cpu_s, [output.token_ids for output in outputs])

    ways = {"offline": run_offline, "python_api": run_python_api}
    found: dict[str, list[MeasuredCall]] = {name: [] for name in ways}
    for number in range(turns + 1):
      for name in sorted(ways, reverse=bool(number % 2)):
        found[name].append(ways[name]())
      latest = {name: each[-1] for name, each in found.items()}
      if latest["offline"].tokens != latest["python_api"].tokens:
        raise EngineError(
          "LLM.generate and the engine gave different tokens for the same requests; run tests/extensions/python_api"
        )
      said = ", ".join(f"{name} {turn.output_tok_s:.1f} tokens/s" for name, turn in latest.items())
      print(f"turn {number}: {said}", file=sys.stderr, flush=True)
  return {name: each[1:] for name, each in found.items()}  # the first pair warms both up


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 after one line about a model that cannot be served."""
  parser = CommandParser("tools.bench.python_api", __doc__)
  parser.add_argument("--model", default=str(DEMO_MODEL), help="a Hugging Face or a Sluice folder")
  parser.add_argument("--num_requests", type=positive_int, default=64, help="prompts of a call")
  parser.add_argument("--prompt_len", default="uniform:32:128", help="as tools.workload")
  parser.add_argument("--output_len", default="uniform:128:256", help="as tools.workload")
  parser.add_argument("--turns", type=positive_int, default=7, help="measured turns, after a warm-up turn")
  args = parser.parse_args(argv)
  vocab_size = json.loads((pathlib.Path(args.model) / "config.json").read_text("utf-8"))["vocab_size"]
  requests = synthetic(args.num_requests, args.prompt_len, args.output_len, vocab_size, seed=0)
  try:
    found = measure_turns(args.model, requests, args.turns)
  except EngineError as error:
    return parser.failed(error, 1)
  figures: dict[str, Any] = {}
  for name, each in found.items():
    figures[f"{name}_output_tok_s"] = round(statistics.median(turn.output_tok_s for turn in each), 1)
    figures[f"{name}_cpu_s"] = round(statistics.median(turn.cpu_s for turn in each), 3)
  pairs = zip(found["python_api"], found["offline"], strict=True)
  figures["median_ratio"] = round(statistics.median(api.output_tok_s / bare.output_tok_s for api, bare in pairs), 4)
  print(json.dumps(figures | {"turns": args.turns, "machine": machine()}), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
