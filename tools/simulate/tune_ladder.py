"""Finds the best ladder of token budgets for a trace and a number of executables, and writes it for the server.

  python -m tools.simulate.tune_ladder --costs=costs.json --trace=FILE.csv --max_rungs=8 --output=ladder.flags
  python -m tools.simulate.tune_ladder --costs=costs.json --step_trace=steps.jsonl --max_rungs=6 --output=ladder.flags
  python -m server.main --model=DIR --flagfile=ladder.flags

The tool needs the distribution of useful tokens a step. It simulates a request trace with a fine ladder, which pads
little; a server's step trace records the distribution directly. Dynamic programming over (rungs used, last rung) then
finds the ladder with the least modeled time. Every step costs its rung's time in the cost table (or, without one, its
tokens); attention does not depend on the ladder. The result is exact for a fixed distribution, but the ladder changes
the distribution: more requests arrive during a longer step. So the tool simulates a request trace again with the ladder
found, tunes on the steps of that simulation, and repeats this --iterations times. The ladder whose own simulation is
closest to its ideal (the same steps without padding) wins; powers of two with as many rungs are a candidate too. The
tool cannot simulate a step trace, so it prints the approximation. Compare ladders by mean TPOT: device seconds hardly
differ, since a device with work is always busy.

Drafts are tokens of a step: a step trace of a server with speculation has them, and a simulation with
--draft_acceptance or --draft_trace.

With a cost table the tool also chooses the prefill chunk. It takes the largest chunk for which a step of decodes and
the end of the longest prompt stays within --gap_factor times a step of decodes alone. Both steps have the running
batch: the average number of decodes in the step of a decoded token. The factor bounds how much an arriving prompt
lengthens other requests' ITL. Chunks fill a rung, so the chunk follows from the largest rung that is fast enough. The
tool then simulates requests without larger steps, unless the decodes of all slots need one. --gap_factor=inf tunes for
throughput alone; the chunk is then the step's token budget, --max_tokens.
"""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import sys
from typing import Any, NamedTuple

from engine.batch import Batch
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.shapes import ShapeLadder
from tools.arguments import CommandParser, output_file, positive_float, positive_int
from tools.report.latency import Objectives
from tools.simulate.__main__ import (
  add_draft_arguments,
  add_engine_arguments,
  add_request_arguments,
  arrivals_from,
  drafts_from,
  engine_config,
)
from tools.simulate.draft_chances import DraftChances
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.replica import Arrival
from tools.simulate.step_costs import StepCosts, work_of
from tools.simulate.step_points import read_step_trace


class Running(NamedTuple):
  """The running batch that an arriving prompt finds.

  Attributes:
    rows: decodes of a step, the mean over decoded tokens: a step of twenty counts twenty times.
    context: mean keys of each.
    longest_prompt: tokens of the longest prompt.
  """

  rows: int
  context: int
  longest_prompt: int


@dataclasses.dataclass(frozen=True)
class Steps:
  """The properties of a run's steps that matter to a ladder.

  Attributes:
    useful: number of steps by useful tokens.
    attention_s: total seconds of attention.
    decodes: number of steps by decode rows, without steps that have none.
    decode_keys: keys of all decode rows together.
    longest_prompt: tokens of the longest prompt.
  """

  useful: Mapping[int, int]
  attention_s: float = 0.0
  decodes: Mapping[int, int] = dataclasses.field(default_factory=dict)
  decode_keys: int = 0
  longest_prompt: int = 0

  def running(self) -> Running | None:
    """The running batch; None without decodes or without prompts."""
    if not self.decodes or not self.longest_prompt:
      return None
    total = sum(rows * steps for rows, steps in self.decodes.items())
    squares = sum(rows * rows * steps for rows, steps in self.decodes.items())
    return Running(round(squares / total), round(self.decode_keys / total), self.longest_prompt)

  def time(self, costs: StepCosts, ladder: Sequence[int]) -> float:
    """Returns the modeled device seconds of these steps on `ladder`, whose top rung fits them all."""
    rung_s = [costs.rung(tokens) for tokens in ladder]
    linear = (count * rung_s[bisect.bisect_left(ladder, tokens)] for tokens, count in self.useful.items())
    return math.fsum(linear) + self.attention_s

  def ideal_time(self, costs: StepCosts) -> float:
    """Returns the modeled device seconds without padding."""
    return math.fsum(count * costs.rung(tokens) for tokens, count in self.useful.items()) + self.attention_s

  def padding(self, ladder: Sequence[int]) -> float:
    """Returns padded over useful tokens."""
    padded = sum(count * ladder[bisect.bisect_left(ladder, tokens)] for tokens, count in self.useful.items())
    return padded / sum(count * tokens for tokens, count in self.useful.items())


def candidates(max_tokens: int, align: int) -> list[int]:
  """Returns a ladder's possible rungs: multiples of `align` and powers of two up to `max_tokens`, and that itself."""
  powers = {1 << bit for bit in range(1, max_tokens.bit_length()) if 1 << bit <= max_tokens}
  return sorted({*range(align, max_tokens + 1, align), *powers, max_tokens} - {1})


def powers_of_two(max_tokens: int, max_rungs: int) -> tuple[int, ...]:
  """Returns a ladder of at most `max_rungs` rungs from 2 up to `max_tokens`, each half of the next."""
  rungs = [max_tokens]
  while len(rungs) < max_rungs and rungs[-1] // 2 >= 2:
    rungs.append(rungs[-1] // 2)
  return tuple(reversed(rungs))


def best_ladder(useful: Mapping[int, int], costs: StepCosts, max_rungs: int, rungs: Sequence[int]) -> tuple[int, ...]:
  """Returns the ladder of at most `max_rungs` of `rungs` with the least modeled time of the steps.

  Dynamic programming: best[k][j] = min over i < j of best[k-1][i] + (steps with rungs[i] < tokens <= rungs[j]) *
  time(rungs[j]). Work grows with max_rungs * len(rungs)^2.

  Args:
    useful: number of steps by useful tokens, which are at most rungs[-1].
    rungs: the candidates, increasing; the ladder always has the last one, since a step may need it.
  """
  counted = sorted(useful.items())
  below, total, index = [], 0, 0
  for rung in rungs:  # steps that fit the rung
    while index < len(counted) and counted[index][0] <= rung:
      total += counted[index][1]
      index += 1
    below.append(total)
  rung_s = [costs.rung(rung) for rung in rungs]
  best = [count * seconds for count, seconds in zip(below, rung_s, strict=True)]
  choices: list[list[int]] = []
  for _ in range(1, min(max_rungs, len(rungs))):
    found, choice = list(best), [-1] * len(rungs)  # -1: fewer rungs suffice
    for last in range(1, len(rungs)):
      count, seconds = below[last], rung_s[last]
      value, at = min((best[i] + (count - below[i]) * seconds, i) for i in range(last))
      if value < found[last]:
        found[last], choice[last] = value, at
    choices.append(choice)
    best = found
  ladder, last = [rungs[-1]], len(rungs) - 1
  for choice in reversed(choices):
    if choice[last] >= 0:
      last = choice[last]
      ladder.append(rungs[last])
  return tuple(reversed(ladder))


class Chunk(NamedTuple):
  """A prefill chunk, and the time of a step with it.

  Attributes:
    tokens: tokens of the chunk.
    step_tokens: the rung of a step with decodes and prompt.
    step_s, decode_s: seconds of that step, and of a step of decodes alone.
  """

  tokens: int
  step_tokens: int
  step_s: float
  decode_s: float


def largest_chunk(costs: StepCosts, ladder: Sequence[int], running: Running, factor: float) -> Chunk:
  """Returns the largest chunk whose steps take at most `factor` times a step of decodes alone.

  A chunk fills the step's rung, so the function finds the largest rung, and the chunk is what its decodes leave. The
  chunk lies at the end of the prompt, where attention costs most.

  Raises:
    ConfigError: no chunk is that fast.
  """

  def seconds(rung: int, prompt: int) -> float:
    starts, counts = [max(0, running.context - 1)] * running.rows, [1] * running.rows
    if prompt:
      starts, counts = [*starts, running.longest_prompt - prompt], [*counts, prompt]
    return costs.seconds(rung, work_of(starts, counts))

  decode_s = seconds(ladder[bisect.bisect_left(ladder, running.rows)], 0)
  found = None
  for rung in ladder:
    left = rung - running.rows
    if left < 1:
      continue
    chunk = Chunk(left, rung, seconds(rung, min(left, running.longest_prompt)), decode_s)
    if found is None or chunk.step_s <= factor * decode_s:
      found = chunk
  if found is None or found.step_s > factor * decode_s:
    least = found.step_s / decode_s if found else math.inf
    raise ConfigError(
      f"gap_factor={factor:g} cannot be kept: even the smallest step with a prompt beside {running.rows} decodes takes "
      f"{least:.3g} times the {decode_s * 1e3:.3g} ms of those alone; raise --gap_factor, or keep prompts apart with "
      "--batching=disaggregated"
    )
  return found


# --- Where steps come from --------------------------------------------------------------------------------------------


def simulated_steps(
  config: EngineConfig, costs: StepCosts, arrivals: Sequence[Arrival], drafts: DraftChances | None = None
) -> tuple[Steps, float | None]:
  """Returns the trace's steps under `config`, and the mean TPOT in milliseconds. Raises EngineError."""
  simulation = Simulation(config, costs, Fleet(drafts=drafts), Collector(Objectives()))
  useful: Counter[int] = Counter()
  decodes: Counter[int] = Counter()
  attention_s, decode_keys = 0.0, 0

  def watch(batch: Batch, seconds: float) -> None:
    nonlocal attention_s, decode_keys
    useful[batch.num_tokens] += 1
    attention_s += seconds - costs.rung(costs.charged(batch.shape.tokens, batch.computed_tokens))
    rows = batch.token_ids.count(())
    if batch.num_drafts:
      rows += len(batch.num_drafts) - batch.num_drafts.count(0)
    if rows:
      decodes[rows] += 1
      decode_keys += sum(batch.starts[:rows]) + rows

  simulation.replicas[0].runner.watch = watch
  simulation.run(arrivals)
  figures = simulation.figures()
  if figures["errors"]:
    print(f"note: {figures['failed']} requests were not served ({figures['errors']})", file=sys.stderr)
  longest = max(len(arrival.prompt) for arrival in arrivals)
  return Steps(useful, attention_s, decodes, decode_keys, longest), figures["tpot_mean_ms"]


def recorded_steps(path: str, costs: StepCosts) -> Steps:
  """Returns the steps of a step trace. Raises ConfigError."""
  steps = read_step_trace(path)
  useful = Counter(sum(step.counts) for step in steps)
  decodes: Counter[int] = Counter()
  decode_keys = longest = 0
  for step in steps:
    num_decodes = 0
    num_drafts = step.num_drafts or (0,) * len(step.counts)
    for start, count, drafts in zip(step.starts, step.counts, num_drafts, strict=True):
      if count == 1 + drafts:
        num_decodes += 1
        decode_keys += start + 1
      else:
        longest = max(longest, start + count)
    if num_decodes:
      decodes[num_decodes] += 1
  attention_s = math.fsum(costs.attention(work_of(step.starts, step.counts)) for step in steps)
  return Steps(useful, attention_s, decodes, decode_keys, longest)


def tokens_only(max_tokens: int) -> StepCosts:
  """Returns a cost table in which a step costs its tokens; printed times are then tokens."""
  return StepCosts(((1, 1.0), (max_tokens, float(max_tokens))), about={"source": "tokens only"})


# --- Tuning -----------------------------------------------------------------------------------------------------------


def row(name: str, ladder: Sequence[int], steps: Steps, costs: StepCosts) -> dict[str, Any]:
  """Returns a ladder's printed figures on these steps."""
  time = steps.time(costs, ladder)
  return {
    "name": name,
    "token_budgets": list(ladder),
    "padded_over_useful_tokens": round(steps.padding(ladder), 4),
    "time_s": round(time, 4),
    "time_over_ideal": round(time / steps.ideal_time(costs), 4),
    "steps": sum(steps.useful.values()),
  }


def tune_simulated(
  config: EngineConfig,
  costs: StepCosts,
  arrivals: Sequence[Arrival],
  max_rungs: int,
  rungs: Sequence[int],
  iterations: int,
  drafts: DraftChances | None = None,
) -> list[dict[str, Any]]:
  """Returns ladders, best first, with figures of their own simulations and on the steps of the fine ladder.

  Args: drafts: what drafters find in the requests, if `config` allows speculation.
  """

  def run(name: str, ladder: Sequence[int], asked: Steps | None) -> tuple[Steps, dict[str, Any]]:
    steps, tpot_ms = simulated_steps(dataclasses.replace(config, token_budgets=tuple(ladder)), costs, arrivals, drafts)
    on_asked = row(name, ladder, asked or steps, costs)["time_over_ideal"]
    return steps, row(name, ladder, steps, costs) | {"tpot_mean_ms": tpot_ms, "asked_time_over_ideal": on_asked}

  fine, fine_row = run(f"fine, {len(rungs)} rungs", rungs, None)
  ladder = best_ladder(fine.useful, costs, max_rungs, rungs)
  tried: dict[tuple[int, ...], dict[str, Any]] = {}
  for number in range(iterations):
    if ladder in tried:
      break
    steps, tried[ladder] = run(f"tuned, iteration {number + 1}", ladder, fine)
    ladder = best_ladder(steps.useful, costs, max_rungs, rungs)
  powers = powers_of_two(rungs[-1], max_rungs)
  if powers not in tried:
    _, tried[powers] = run("powers of two", powers, fine)
  best_first = sorted(tried.values(), key=lambda found: found["time_over_ideal"])
  return [*best_first, fine_row | {"token_budgets": None}]


def limited(config: EngineConfig, chunk: Chunk, rungs: Sequence[int]) -> tuple[EngineConfig, list[int]]:
  """Returns settings and candidates that limit steps to what the chunk allows or the decodes of all slots need."""
  top = rungs[bisect.bisect_left(rungs, max(chunk.step_tokens, config.max_num_seqs))]
  kept = [rung for rung in rungs if rung <= top]
  return dataclasses.replace(config, token_budgets=tuple(kept), prefill_chunk=chunk.tokens), kept


def tune_recorded(steps: Steps, costs: StepCosts, max_rungs: int, rungs: Sequence[int]) -> list[dict[str, Any]]:
  """Returns the best ladder for recorded steps, and powers of two on the same steps."""
  ladder = best_ladder(steps.useful, costs, max_rungs, rungs)
  return [
    row("tuned", ladder, steps, costs),
    row("powers of two", powers_of_two(rungs[-1], max_rungs), steps, costs),
  ]


def write_flagfile(path: str, ladder: Sequence[int], prefill_chunk: int, max_num_seqs: int, about: str) -> None:
  """Writes a --flagfile for the server and the simulator."""
  lines = [
    f"# {about}",
    f"--token_budgets={','.join(map(str, ladder))}",
    f"--prefill_chunk={prefill_chunk}",
    f"--max_num_seqs={max_num_seqs}",
  ]
  with open(path, "w", encoding="utf-8") as file:
    file.write("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line: a table on standard error, one JSON line on standard output. Returns 2 for bad input."""
  parser = CommandParser("tools.simulate.tune_ladder", __doc__)
  parser.add_argument(
    "--costs", default="", help="cost table of tools.simulate.measure_costs; empty: a step costs its tokens"
  )
  parser.add_argument("--step_trace", default="", help="a server's step trace, instead of requests")
  parser.add_argument("--max_rungs", type=positive_int, default=8, help="most executables")
  parser.add_argument("--max_tokens", type=positive_int, default=2048, help="token budget of a step, the top rung")
  parser.add_argument("--align", type=positive_int, default=8, help="rungs are multiples of this, or powers of two")
  parser.add_argument("--iterations", type=positive_int, default=3, help="with requests: simulations of tuned ladders")
  parser.add_argument(
    "--gap_factor",
    type=positive_float,
    default=3.0,
    help="with --costs: largest factor by which a prompt may lengthen a step of decodes; inf: no limit",
  )
  parser.add_argument("--output", type=output_file, default="", help="flag file to write, for --flagfile of the server")
  add_request_arguments(parser)
  add_engine_arguments(parser)
  add_draft_arguments(parser)
  args = parser.parse_args(argv)
  try:
    if bool(args.step_trace) == bool(args.trace or args.requests):
      raise ConfigError("give either --step_trace, or requests with --trace or --requests")
    costs = StepCosts.load(args.costs) if args.costs else tokens_only(args.max_tokens)
    if costs.by_tokens:
      print("note: this table's device leaves padding out; times below are as if it did not", file=sys.stderr)
    rungs = candidates(args.max_tokens, args.align)
    costs.rung(args.max_tokens)
    args.token_budgets, args.prefill_chunk = tuple(rungs), args.max_tokens
    with_chunk = bool(args.costs) and args.gap_factor < math.inf
    running = None
    if args.step_trace:
      max_num_seqs = args.max_num_seqs or EngineConfig.max_num_seqs
      steps = recorded_steps(args.step_trace, costs)
      largest = max(steps.useful)
      if largest > args.max_tokens:
        raise ConfigError(
          f"the step trace has a step of {largest} tokens, above max_tokens={args.max_tokens}; raise --max_tokens"
        )
      ShapeLadder(tuple(rungs), max_num_seqs)
      running = steps.running() if with_chunk else None
      found = tune_recorded(steps, costs, args.max_rungs, rungs)
    else:
      if not args.costs:
        raise ConfigError("requests are simulated, which needs a cost table; set --costs, or give --step_trace")
      drafts = drafts_from(args)
      config = engine_config(args, costs, drafts is not None)
      ShapeLadder(tuple(rungs), config.max_num_seqs)
      max_num_seqs = config.max_num_seqs
      arrivals, _ = arrivals_from(args, config.max_model_len)
      with contextlib.redirect_stdout(sys.stderr):
        if with_chunk:
          running = simulated_steps(config, costs, arrivals, drafts)[0].running()
        if running:
          config, rungs = limited(config, largest_chunk(costs, rungs, running, args.gap_factor), rungs)
        found = tune_simulated(config, costs, arrivals, args.max_rungs, rungs, args.iterations, drafts)
    ladder = found[0]["token_budgets"]
    chunk = largest_chunk(costs, ladder, running, args.gap_factor) if running else None
    if args.output:
      source = args.step_trace or args.trace or args.requests
      about = f"Ladder of python -m tools.simulate.tune_ladder for {source}, cost table {args.costs or 'none: tokens'}."
      write_flagfile(args.output, ladder, chunk.tokens if chunk else ladder[-1], max_num_seqs, about)
  except (EngineError, OSError) as error:
    return parser.failed(error)
  _print_table(found)
  result = {"ladder": ladder, "ladders": found, "costs": args.costs or "tokens", "prefill_chunk": ladder[-1]}
  if chunk and running:
    print(
      f"prefill_chunk={chunk.tokens}: a step of {chunk.step_tokens} tokens takes {chunk.step_s * 1e3:.3g} ms, "
      f"{chunk.step_s / chunk.decode_s:.2f} times the {chunk.decode_s * 1e3:.3g} ms of {running.rows} decodes alone",
      file=sys.stderr,
    )
    result |= {"prefill_chunk": chunk.tokens, "chunk": chunk._asdict() | running._asdict()}
  print(json.dumps(result), flush=True)
  return 0


def _print_table(found: Sequence[Mapping[str, Any]]) -> None:
  """Prints padding and time on the ladder's own steps, time on the steps of the fine ladder, and TPOT."""
  print(f"{'':22}{'padded/useful':>14}{'time/ideal':>12}{'as asked':>10}{'TPOT ms':>9}  token_budgets", file=sys.stderr)
  for entry in found:
    asked = entry.get("asked_time_over_ideal", entry["time_over_ideal"])
    tpot = "" if entry.get("tpot_mean_ms") is None else f"{entry['tpot_mean_ms']:.2f}"
    ladder = ",".join(map(str, entry["token_budgets"] or ("...",)))
    print(
      f"{entry['name']:22}{entry['padded_over_useful_tokens']:14.3f}{entry['time_over_ideal']:12.3f}{asked:10.3f}"
      f"{tpot:>9}  {ladder}",
      file=sys.stderr,
    )


if __name__ == "__main__":
  sys.exit(main())
