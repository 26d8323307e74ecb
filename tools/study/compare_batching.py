"""Compares static and continuous batching on the same kernels and requests: the ratio, and the bound from idle slots.

  python -m tools.study.compare_batching [--model=DIR]

Output lengths are log-uniform from 20 to 2,000 times --scale, in random order. Static batching fills all slots, pads,
and runs until the longest request of the wave is done; continuous batching gives a free slot to the next request at
once. Each run is tools.bench_offline in its own process; runs alternate, figures are medians.
"""

from collections.abc import Sequence
import heapq
import json
import pathlib
import sys
import tempfile
from typing import Any

from engine.errors import ConfigError, EngineError
from tools import workload
from tools.arguments import CommandParser, output_file, positive_float, positive_int
from tools.measure import ROOT, machine, median_of, run_tool, write_result

MODES = ("static", "continuous")
FIGURES = (
  "output_tok_s",
  "total_tok_s",
  "wall_s",
  "padding_share",
  "steps",
  "decode_tokens",
  "prefill_tokens",
  "ttft_p50_ms",
  "ttft_p99_ms",
  "itl_p50_ms",
  "itl_p99_ms",
  "warmup_s",
  "peak_rss_mb",
  "compiles_after_ready",
)


def slot_bound(output_lens: Sequence[int], num_slots: int) -> dict[str, float]:
  """Returns the gain that idle slots allow if every step of both modes takes the same time.

  Args:
    output_lens: in the order of arrival; all requests are there at the start.
    num_slots: sequences that run at once.

  Returns:
    static_steps: each wave of num_slots lasts as long as its longest request.
    continuous_steps: a free slot takes the next request; includes the end, when slots empty.
    bound: their ratio.
    bound_endless: the ratio for an endless queue: static steps over tokens spread evenly over the slots.
    idle_slot_share: share of static batching's slot-steps that do nothing.
  """
  waves = [output_lens[start : start + num_slots] for start in range(0, len(output_lens), num_slots)]
  static_steps = sum(map(max, waves))
  ends = [0] * num_slots
  for length in output_lens:
    heapq.heapreplace(ends, ends[0] + length)
  continuous_steps = max(ends)
  even_steps = sum(output_lens) / num_slots
  return {
    "static_steps": static_steps,
    "continuous_steps": continuous_steps,
    "bound": round(static_steps / continuous_steps, 3),
    "bound_endless": round(static_steps / even_steps, 3),
    "idle_slot_share": round(1 - even_steps / static_steps, 4),
  }


def compare(args: Any, requests_file: str) -> dict[str, list[dict[str, Any]]]:
  """Runs both modes alternately; returns each mode's figures by round."""
  runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
  for number in range(args.rounds):
    for mode in MODES:
      figures = run_tool(
        [
          sys.executable,
          "-m",
          "tools.bench_offline",
          f"--model={args.model}",
          f"--requests={requests_file}",
          f"--batching={mode}",
          f"--max_num_seqs={args.max_num_seqs}",
          "--prefix_cache_scope=off",
          "--speculation=none",
          f"--token_budgets={args.token_budgets}",
          f"--prefill_chunk={args.token_budgets.split(',')[-1]}",
          f"--kv_cache_mb={args.kv_cache_mb}",
          f"--compile_cache_dir={args.compile_cache_dir}",
        ],
        f"{mode} batching, round {number + 1} of {args.rounds}",
      )
      if figures["preemptions"]:
        raise ConfigError(
          f"{mode} batching preempted {figures['preemptions']} times, so the modes are not comparable; "
          "raise --kv_cache_mb"
        )
      print(f"  {figures['output_tok_s']:.1f} output tokens/s", file=sys.stderr)
      runs[mode].append(figures)
  return runs


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; writes a table to standard error and one JSON line to standard output."""
  parser = CommandParser("tools.study.compare_batching", __doc__)
  parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="model folder")
  parser.add_argument("--num_requests", type=positive_int, default=384)
  parser.add_argument("--scale", type=positive_float, default=0.25, help="output lengths are 20 to 2,000 times this")
  parser.add_argument("--prompt_len", default="uniform:8:32", help="distribution of prompt lengths")
  parser.add_argument("--max_num_seqs", type=positive_int, default=32, help="slots")
  parser.add_argument("--token_budgets", default="8,16,32,64,128,256", help="the shape ladder of both modes")
  parser.add_argument("--kv_cache_mb", type=positive_int, default=512)
  parser.add_argument("--rounds", type=positive_int, default=3)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--vocab_size", type=positive_int, default=2048, help="token ids of prompts are below this")
  parser.add_argument("--compile_cache_dir", default=str(pathlib.Path.home() / ".cache" / "sluice" / "programs"))
  parser.add_argument("--output", type=output_file, default="", help="also write the result here")
  args = parser.parse_args(argv)
  low, high = (max(1, round(limit * args.scale)) for limit in (20, 2000))
  try:
    requests = workload.synthetic(
      args.num_requests, args.prompt_len, f"loguniform:{low}:{high}", args.vocab_size, args.seed
    )
    bound = slot_bound([request.output_len for request in requests], args.max_num_seqs)
    with tempfile.TemporaryDirectory() as folder:
      path = str(pathlib.Path(folder) / "requests.jsonl")
      with open(path, "w", encoding="utf-8") as file:
        workload.write_requests(file, requests, {"output_len": f"loguniform:{low}:{high}"})
      runs = compare(args, path)
  except (EngineError, OSError) as error:
    return parser.failed(error, 1)
  figures = {mode: {name: median_of(runs[mode], name) for name in FIGURES} for mode in MODES}
  result = {
    "ratio": round(figures["continuous"]["output_tok_s"] / figures["static"]["output_tok_s"], 3),
    **bound,
    **figures,
    "workload": {
      "num_requests": args.num_requests,
      "output_len": f"loguniform:{low}:{high}",
      "scale": args.scale,
      "prompt_len": args.prompt_len,
      "slots": args.max_num_seqs,
      "seed": args.seed,
    },
    "rounds": {mode: [run["output_tok_s"] for run in runs[mode]] for mode in MODES},
    "machine": machine(),
  }
  _print_table(result)
  write_result(args.output, result)
  print(json.dumps(result))
  return 0


def _print_table(result: dict[str, Any]) -> None:
  lines = ["", f"{'':14}{'output tok/s':>14}{'wall s':>10}{'steps':>9}{'padding':>10}{'TTFT p50 ms':>14}"]
  for mode in MODES:
    row = result[mode]
    lines.append(
      f"{mode:14}{row['output_tok_s']:14.1f}{row['wall_s']:10.1f}{row['steps']:9.0f}"
      f"{row['padding_share']:10.1%}{row['ttft_p50_ms']:14.0f}"
    )
  lines.append(
    f"continuous / static: {result['ratio']:.2f} times the tokens a second; idle slots allow "
    f"{result['bound']:.2f} on these requests, {result['bound_endless']:.2f} with an endless queue "
    f"(static leaves {result['idle_slot_share']:.0%} of slot-steps idle)"
  )
  print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
  sys.exit(main())
