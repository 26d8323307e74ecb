"""Measures the parts of `tools.study.claims` on a real engine in this process: one part a call. Judges nothing.

  python -m tools.study.measured --part=azure_conv --model=DIR

All modes get the same requests, pool, executables and number of slots: a mode is a new Scheduler on one runner, which
compiles once. Outputs are greedy with forced lengths, and the tool compares tokens across modes. A failed or preempted
request is an error, since modes would not be comparable. tools.study calls this.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import gc
import json
import math
import pathlib
import random
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

from engine.device.options import BuildOptions
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.validation import validate_request
from extensions.disaggregated.build import build_any
from extensions.disaggregated.engine import DisaggregatedEngine
from tools.arguments import CommandParser
from tools.report.latency import Outcome
from tools.study import claims as claims
from tools.study import simulated as simulated

_STEPS_BETWEEN = 50  # decode steps before each long prompt: about as many as in the simulated part
_BUDGETS = (4, 8, 16, 32, 64, 128, 256, 512)
Arriving = tuple[float, int, int]  # arrival_s, prompt tokens, output tokens


class Bench:
  """One runner, and a new engine on it for each run."""

  def __init__(self, args: Any, slots: int, budgets: tuple[int, ...], **changes: Any):
    """Builds the runner. Raises EngineError."""
    options = BuildOptions(
      model_dir=args.model,
      num_blocks=args.num_blocks,
      max_num_seqs=slots,
      token_budgets=budgets,
      compile_cache_dir=args.compile_cache_dir,
      **{**claims.UNBOUNDED, "prefill_chunk": budgets[-1], **changes},
    )
    self._events: list[tuple[float, list[TokenEvent]]] = []
    self._left = 0
    self._done = threading.Event()
    self.built = build_any(options, progress=_progress, emit=self._emit)

  def _emit(self, events: list[TokenEvent]) -> None:
    self._events.append((time.monotonic(), events))
    self._left -= sum(event.finish_reason is not None for event in events)
    if not self._left:
      self._done.set()

  def serve(
    self,
    rows: Sequence[Arriving],
    *,
    at_once: bool = False,
    tenants: Sequence[str] = (),
    trace_file: str = "",
    **changes: Any,
  ) -> list[Outcome]:
    """Runs all requests on a new engine; returns each request's outcome, in order.

    Args:
      rows: in order of arrival; a row with the same number and lengths has the same prompt in every call.
      at_once: queues all before the first step.
      tenants: one a request.
      trace_file: path for the step trace.
      changes: settings of the engine, named as in EngineConfig; never of its shapes.

    Raises:
      EngineError: a request failed or was preempted.
    """
    engine = self.built.engine
    if not isinstance(engine, DisaggregatedEngine):
      config = dataclasses.replace(self.built.config, **changes)
      engine = Engine(Scheduler(config), self.built.runner, time.monotonic, self._emit)
    requests = [
      Request(
        str(index),
        _prompt(index, prompt_len, engine.config.vocab_size),
        SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, seed=0),
        tenant=tenants[index] if tenants else "",
      )
      for index, (_, prompt_len, output_len) in enumerate(rows)
    ]
    for request in requests:
      validate_request(engine.config, request)
    self._events, self._left = [], len(requests)
    self._done.clear()
    before = engine.stats().num_preemptions
    if trace_file:
      engine.start_trace(trace_file)
    if at_once:
      for request in requests:
        engine.submit(request)
    gc.collect()
    gc.freeze()
    stop = threading.Event()
    loop = threading.Thread(target=engine.run, args=(stop,), name="engine")
    begin = time.monotonic()
    loop.start()
    for request, (arrival_s, _, _) in zip(requests, rows, strict=True):
      if not at_once:
        time.sleep(max(0.0, begin + arrival_s - time.monotonic()))
        engine.submit(request)
    self._done.wait()
    stop.set()
    loop.join()
    gc.unfreeze()
    preemptions = engine.stats().num_preemptions - before
    if preemptions:
      raise ConfigError(f"{preemptions} preemptions, so modes are not comparable; raise --num_blocks")
    return self._outcomes(rows, begin)

  def _outcomes(self, rows: Sequence[Arriving], begin: float) -> list[Outcome]:
    chunks: list[list[tuple[float, int]]] = [[] for _ in rows]
    tokens: list[list[int]] = [[] for _ in rows]
    for now, events in self._events:
      for event in events:
        index = int(event.request_id)
        if event.token_ids:
          chunks[index].append((now - begin, len(event.token_ids)))
          tokens[index] += event.token_ids
        if event.finish_reason not in (None, FinishReason.LENGTH):
          raise ConfigError(f"request {index} ended with {event.finish_reason}: {event.message}")
    return [
      Outcome(index, output_len, arrival_s, arrival_s, tuple(chunks[index]), tuple(tokens[index]))
      for index, (arrival_s, _, output_len) in enumerate(rows)
    ]


def _progress(what: str, done: int, total: int) -> None:
  if done == total:
    print(what, file=sys.stderr, flush=True)


def _prompt(index: int, length: int, vocab_size: int) -> tuple[int, ...]:
  return tuple(random.Random(f"{index}/prompt").choices(range(vocab_size), k=length))


def _wall_s(outcomes: Sequence[Outcome]) -> float:
  return max(outcome.chunks[-1][0] for outcome in outcomes)


def _same_tokens(first: Sequence[Outcome], second: Sequence[Outcome]) -> dict[str, Any]:
  """Returns the number of requests with the same tokens, and the tokens before each first difference."""
  agreeing = total = same = 0
  for a, b in zip(first, second, strict=True):
    found = next(
      (number for number, pair in enumerate(zip(a.tokens, b.tokens, strict=True)) if pair[0] != pair[1]),
      len(a.tokens),
    )
    same, agreeing, total = same + (found == len(a.tokens)), agreeing + found, total + len(a.tokens)
  return {"requests": len(first), "identical_requests": same, "agreeing_prefix": round(agreeing / total, 5)}


# --- Parts ------------------------------------------------------------------------------------------------------------


def measure_case(args: Any, case: claims.ClaimCase) -> dict[str, Any]:
  """Runs static, continuous and chunked in turn; returns ratios of wall seconds, medians over rounds."""
  rows = case.scaled(args.traces, args.scale, args.num_requests)
  bench = Bench(args, case.slots, _BUDGETS)
  requests = [(0.0, *row) for row in rows]
  walls: dict[str, list[float]] = {mode: [] for mode in claims.MODES}
  runs: dict[str, list[Outcome]] = {}
  for _ in range(args.rounds):
    for mode, found in walls.items():
      runs[mode] = bench.serve(requests, at_once=True, batching=mode)
      found.append(round(_wall_s(runs[mode]), 4))
  middle = {mode: statistics.median(found) for mode, found in walls.items()}
  output = sum(row[1] for row in rows)
  return {
    **simulated.allowed(rows, case.slots),
    "scale": args.scale or case.scale,
    "wall_s": walls,
    "output_tok_s": {mode: round(output / wall_s, 1) for mode, wall_s in middle.items()},
    "chunked_over_static": round(middle["static"] / middle["chunked"], 3),
    "continuous_over_static": round(middle["static"] / middle["continuous"], 3),
    "tokens": _same_tokens(runs["static"], runs["chunked"]),
  }


def measure_formulas(args: Any) -> dict[str, Any]:
  """Evaluates both goodput formulas on step traces of the coding assistant's requests."""
  case = next(case for case in claims.CASES if case.name == "coding_assistant")
  rows = case.scaled(args.traces, args.scale, args.num_requests)
  bench = Bench(args, case.slots, _BUDGETS)
  found: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as folder:
    for mode in ("static", "chunked"):
      path = str(pathlib.Path(folder) / mode)
      bench.serve([(0.0, *row) for row in rows], at_once=True, batching=mode, trace_file=path)
      found[mode] = claims.goodput_formulas(claims.traced_steps(path), waves=mode == "static")
  return claims.with_ratios(found) | {"requests": len(rows), "scale": args.scale or case.scale}


def measure_tail(args: Any) -> dict[str, Any]:
  """Measures the tail at shares of the engine's capacity, on Azure conversations."""
  case = next(case for case in claims.CASES if case.name == "azure_conv")
  rows = case.scaled(args.traces, args.scale, args.num_requests)
  bench = Bench(args, case.slots, _BUDGETS, prefill_chunk=64)
  capacity = len(rows) / _wall_s(bench.serve([(0.0, *row) for row in rows], at_once=True))
  found: dict[str, Any] = {"capacity_request_s": round(capacity, 2), "requests": len(rows)}
  for load in claims.LOADS:
    found[f"load_{load:.0%}"] = claims.tail(bench.serve(claims.timed(rows, load * capacity)))
  return found | {"scale": args.scale or case.scale}


def measure_long_prompts(args: Any) -> dict[str, Any]:
  """Measures gaps inline, in chunks, and with disaggregation. Needs two devices, which share the CPU's cores."""
  factor = args.scale or 0.25
  load = claims.LongPrompts(num_steady=16, context=32, steady_tokens=64, num_long=8, prompt=round(4000 * factor))
  slots = load.num_steady + 4
  half = load.num_steady + load.chunk // 2
  budgets = (4, load.num_steady, half, load.num_steady + load.chunk, load.num_steady + load.prompt)
  about = dataclasses.asdict(load) | {"chunk": load.chunk}
  found: dict[str, Any] = {"about": about | {"scale": factor}}
  bench = Bench(args, slots, tuple(sorted({*budgets})))
  # One long prompt every few steps; steady answers outlast the last one by a third.
  step_s = load.num_steady / claims.decode_rate(bench.serve(load.rows(quiet=True), at_once=True))
  every_s = _STEPS_BETWEEN * step_s
  lasts = math.ceil(1.3 * _STEPS_BETWEEN * (1 + load.num_long))
  most = bench.built.config.max_model_len - load.context
  load = dataclasses.replace(load, first_s=every_s, every_s=every_s, steady_tokens=min(most, lasts))
  found["about"] |= dataclasses.asdict(load)
  for name, mode, chunk in (
    ("inline", "continuous", load.prompt),
    ("chunked", "chunked", load.chunk),
    ("chunked_half", "chunked", load.chunk // 2),
    ("disaggregated", "disaggregated", load.chunk),
  ):
    if mode == "disaggregated":
      del bench
      bench = Bench(args, slots, tuple(sorted({*budgets})), batching=mode, num_devices=2, prefill_chunk=load.prompt)
    found[name] = {}
    for state in ("quiet", "busy"):
      outcomes = bench.serve(load.rows(state == "quiet"), batching=mode, prefill_chunk=chunk)
      found[name][state] = load.gaps(outcomes)
  return claims.against_quiet(found)


def measure_batch_sizes(args: Any) -> dict[str, Any]:
  """Measures decode tokens a second with 1 to 256 requests."""
  sizes = [size for size in claims.BATCH_SIZES if size <= (args.num_requests or 256)]
  context, tokens = 16, args.output_tokens
  bench = Bench(args, sizes[-1], tuple(sorted({*sizes[1:], 512})))
  rates: dict[int, float] = {}
  for size in sizes:
    rows = [(0.0, context, tokens + 2 * (size * context // 512))] * size
    rates[size] = round(claims.decode_rate(bench.serve(rows, at_once=True)), 1)
  return {
    "context": context,
    "decode_tok_s": rates,
    "knee": claims.knee(rates),
    "gain_at_64": round(rates.get(64, rates[sizes[-1]]) / rates[1], 2),
  }


def measure_tenants(args: Any) -> dict[str, Any]:
  """Measures the small tenant alone, and under fcfs and fair."""
  factor = args.scale or 0.1
  load = claims.Tenants(
    num_small=args.num_requests or 6,
    prompt_len=f"uniform:{round(1500 * factor)}:{round(2500 * factor)}",
    output_len="uniform:2:6",
    slots=32,
    chunk=round(320 * factor),
  )
  bench = Bench(args, load.slots, (4, 8, 16, 32, 48, 64), prefill_chunk=load.chunk)
  sample = [(0.0, *row) for row in load.rows()[:64]]
  capacity = len(sample) / _wall_s(bench.serve(sample, at_once=True))
  rows, small = load.arrivals(capacity)
  tenants = ["small" if is_small else "large" for is_small in small]
  indices = [index for index, is_small in enumerate(small) if is_small]
  gap_s = max(0.05, 5 * bench.serve(sample[:1], at_once=True)[0].e2e_s)
  alone = bench.serve([(number * gap_s, *rows[index][1:]) for number, index in enumerate(indices)])
  ways = {"alone": [dataclasses.replace(outcome, id=index) for outcome, index in zip(alone, indices, strict=True)]}
  for policy in ("fcfs", "fair"):
    ways[policy] = bench.serve(rows, tenants=tenants, policy=policy)
  about = dataclasses.asdict(load) | {"capacity_request_s": round(capacity, 2), "scale": factor}
  return claims.compare_tenants(dict(ways), set(indices)) | {"about": about}


def measure(part: str, args: Any) -> dict[str, Any]:
  """Returns the figures of a part. Raises EngineError."""
  for case in claims.CASES:
    if case.name == part:
      return measure_case(args, case)
  others = {
    "formulas": measure_formulas,
    "tail": measure_tail,
    "long_prompt": measure_long_prompts,
    "batch_size": measure_batch_sizes,
    "tenants": measure_tenants,
  }
  return others[part](args)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line for bad input and for runs that are not comparable."""
  parser = CommandParser("tools.study.measured", __doc__)
  parser.add_argument("--part", choices=claims.PARTS, required=True)
  claims.add_arguments(parser)
  args = parser.parse_args(argv)
  try:
    with contextlib.redirect_stdout(sys.stderr):  # keeps output of libraries apart from the JSON line
      started = time.monotonic()
      figures = measure(args.part, args)
  except (EngineError, OSError) as error:
    return parser.failed(error)
  print(json.dumps(figures | {"took_s": round(time.monotonic() - started, 1)}), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
