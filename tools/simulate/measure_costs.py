"""Measures step times on this machine's device, and writes the simulator's cost table. Fits no trace.

  python -m tools.simulate.measure_costs --model=DIR --output=costs.json        about a minute
  python -m tools.simulate.measure_costs --model=DIR --step_trace=FILE --output=costs.json
  python -m tools.simulate.measure_costs --roofline=config.json --tflops=989 --gb_s=4800 --output=costs.json

Every rung of the ladder runs synthetic steps: decodes with short, long and mixed contexts, the beginnings and ends of
prompts, both together, and half-empty steps; two in flight, as in the engine. The best median of --rounds counts. Then
the real engine runs loads: a burst, and random arrivals with idle moments. They give the host's part, the slowdown of
each rung's steps (`engine_over_table`, included in the table), and the spread of equal steps (`cold_s`, `spread`). With
--step_trace, the device's part and the host's planning come from a server's recorded steps, which shared the machine
with front end and clients. --roofline estimates the table of an unavailable device and measures nothing.
"""

from collections import deque
from collections.abc import Sequence
import contextlib
import dataclasses
import datetime
import gc
import json
import math
import random
import statistics
import sys
import time
from typing import Any, NamedTuple

from engine.batch import Admission, Batch, Launched, Runner
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.recorder import StepRecord
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.shapes import StepShape
from pallas_kernels.paged_attention.api import name_kv_dtype
from tools.arguments import CommandParser, output_file, positive_float, positive_int
from tools.bench_offline import add_build_arguments, build_options
from tools.measure import ROOT, commit, machine
from tools.simulate.fit_costs import calibrated, fit, fit_host, with_launch_spread
from tools.simulate.step_costs import StepCosts, roofline, work_of
from tools.simulate.step_points import Point, RecordedStep, points_of, read_step_trace

_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_TOKEN = 7
_SHARES = (0.05, 0.15, 0.4, 0.6)  # shares of the engine's capacity
_SHORT_SHARE, _SHORT = 0.4, 8  # share of that rate, most tokens of an answer: most requests begin after a pause
Rows = list[tuple[int, int]]  # (first position, tokens) of each


def made_steps(shape: StepShape, max_len: int, is_smallest: bool) -> list[Rows]:
  """Returns the steps to run on one rung: rows that fit it, with positions below `max_len`.

  The smallest rung also has steps of few tokens, whose time matters where the device skips padding.
  """
  t, s = shape.tokens, shape.rows
  half = max(1, s // 2)
  steps: list[Rows] = [
    [(min(15, max_len - 1), 1)] * s,
    [(max_len // 8, 1)] * s,
    [(max_len // 2, 1)] * half,
    [(max_len * row // (2 * s), 1) for row in range(s)],
    _prompts(t, s, max_len, at_end=False),
    _prompts(t, s, max_len, at_end=True),
  ]
  if t >= 16 and s >= 4:
    steps.append([(0, min(t // 4, max_len))] * 4)
  if is_smallest:
    steps += [[(max_len // 8, count)] for count in (1, 2, min(4, t))]
  if t - half > 1:
    steps.append([(max_len // 4, 1)] * half + _prompts(t - half, s - half or 1, max_len, at_end=False)[: s - half])
  return steps


def _prompts(tokens: int, most_rows: int, max_len: int, *, at_end: bool) -> Rows:
  """Returns `tokens` prompt tokens in the fewest rows, at the beginning or the end of the longest sequence."""
  rows: Rows = []
  while tokens > 0 and len(rows) < most_rows:
    count = min(tokens, max_len)
    rows.append((max_len - count if at_end else 0, count))
    tokens -= count
  return rows


class HandMade:
  """Launches steps without a scheduler."""

  def __init__(self, runner: Runner, config: EngineConfig):
    self._runner, self._config = runner, config

  def batch(self, shape: StepShape, rows: Rows, *, admit: bool) -> Batch:
    """Returns a step of `rows`, one slot each; `admit` adds block tables, which share the blocks of a small pool."""
    config, next_block, admissions = self._config, 0, []
    for slot, (start, count) in enumerate(rows):
      needed = -(-(start + count) // config.block_size)
      blocks = tuple((next_block + index) % config.num_blocks + 1 for index in range(needed))
      next_block += needed
      admissions.append(Admission(slot, (_TOKEN,), 1, blocks, _PARAMS, 0))
    numbers = tuple(range(len(rows)))
    return Batch(
      step=-1,
      shape=shape,
      request_ids=tuple(map(str, numbers)),
      slots=numbers,
      starts=tuple(start for start, _ in rows),
      counts=tuple(count for _, count in rows),
      num_logits=(1,) * len(rows),
      samples=(True,) * len(rows),
      token_ids=tuple(() if count == 1 else (_TOKEN,) * count for _, count in rows),
      admissions=tuple(admissions) if admit else (),
    )

  def times(self, shape: StepShape, rows: Rows, seconds: float, depth: int = 2) -> list[float]:
    """Returns times of steps with `depth` in flight, for about `seconds` and at least three steps."""
    in_flight = deque([self._runner.launch(self.batch(shape, rows, admit=True))])
    batch = self.batch(shape, rows, admit=False)
    times: list[float] = []
    started = last = time.perf_counter()
    while len(times) < 4 or (last - started < seconds and len(times) < 200):
      while len(in_flight) < depth:
        in_flight.append(self._runner.launch(batch))
      in_flight.popleft().result()
      now = time.perf_counter()
      times.append(now - last)
      last = now
    for launched in in_flight:
      launched.result()
    return times[1:]  # the first has the admissions


def measure_device(runner: Runner, config: EngineConfig, max_context: int, seconds: float, rounds: int) -> list[Point]:
  """Runs made_steps on every rung.

  Args:
    max_context: the limit on positions.
    seconds: the time for each kind of step in each round.
    rounds: the number of rounds over all kinds. The round with the best median counts: disturbances only add time.
  """
  made = HandMade(runner, config)
  shapes = config.ladder.rungs()
  kinds = [(shape, rows) for shape in shapes for rows in made_steps(shape, max_context, shape is shapes[0])]
  times: list[list[float]] = [[] for _ in kinds]
  for number in range(rounds):
    _progress("measure steps", number, rounds)
    for found, (shape, rows) in zip(times, kinds, strict=True):
      found.append(statistics.median(made.times(shape, rows, seconds)))
  return [
    Point(shape.tokens, work_of(*zip(*rows, strict=True)), min(found))
    for found, (shape, rows) in zip(times, kinds, strict=True)
  ]


class Watched:
  """A runner that records each step's contents: positions, counts, and the number of new requests."""

  def __init__(self, runner: Runner):
    self._runner = runner
    self.seen: dict[int, tuple[tuple[int, ...], tuple[int, ...], int]] = {}

  def launch(self, batch: Batch) -> Launched:
    """Launches a step and records it."""
    self.seen[batch.step] = tuple(batch.starts), tuple(batch.counts), len(batch.admissions)
    return self._runner.launch(batch)

  def steps(self, records: Sequence[StepRecord]) -> list[RecordedStep]:
    """Returns the records with their steps' contents."""
    steps = []
    for r in records:
      starts, counts, admissions = self.seen[r.step]
      steps.append(RecordedStep(r.step, r.time, r.shape_tokens, starts, counts, r.host_s, r.device_s, admissions))
    return steps


class EngineRun(NamedTuple):
  """The result of run_engine: step records, their contents, and a request's seconds outside the engine."""

  records: list[StepRecord]
  watched: Watched
  front_s: float


def run_engine(runner: Runner, config: EngineConfig, max_context: int, seconds: float) -> EngineRun:
  """Runs the real engine on requests of many lengths.

  The first load is a burst, so every number of rows up to all slots occurs. Poisson loads follow, for about `seconds`
  each, at shares of the rate that the burst reached; the last one has short answers. Steps of a busy engine differ
  from steps after a pause, and the table needs both.
  """
  watched = Watched(runner)
  live: set[str] = set()
  woke: dict[str, float] = {}  # arrival times of requests that found the engine asleep
  answered: dict[str, float] = {}

  def emit(events: list[TokenEvent]) -> None:
    now = time.monotonic()
    for event in events:
      answered.setdefault(event.request_id, now)
      if event.finish_reason is not None:
        live.discard(event.request_id)

  engine = Engine(Scheduler(config), watched, time.monotonic, emit)
  engine.keep_all()
  slots = config.max_num_seqs
  longest = max(1, min(max_context // 4, config.pool_tokens // slots // 2, 256))

  # At low rates few requests run at once, so prompts alone can fill the large rungs.
  longest_prompt = max(longest, min(max_context, config.pool_tokens // 4) - longest)

  def run(name: str, count: int, rate: float, longest_output: int = longest) -> float:
    """Serves `count` requests; returns the seconds it took."""
    _progress(f"run the engine, {name}", 0, count)
    rng = random.Random(name)
    start = time.monotonic()
    due = start
    for number in range(count):
      due += rng.expovariate(rate) if rate < math.inf else 0.0
      request_id = f"{name}/{number}"
      while time.monotonic() < due:
        if not engine.step() and not live:
          woke[request_id] = due
          time.sleep(max(0.0, due - time.monotonic()))
        _raise_if_dead(engine)
      prompt = round(rng.lognormvariate(math.log(longest / 4), 1.0 if rate == math.inf else 1.5))
      prompt = max(1, min(prompt, longest if rate == math.inf else longest_prompt))
      output = max(1, min(round(rng.lognormvariate(math.log(longest_output / 4), 1.0)), longest_output))
      live.add(request_id)
      params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
      engine.submit(Request(request_id, (_TOKEN,) * prompt, params, cache_salt=request_id.encode()))
    while live:
      engine.step()
      _raise_if_dead(engine)
    return time.monotonic() - start

  gc.collect()
  gc.freeze()  # as the server does, so the garbage collector skips the model's objects
  for turn, count in enumerate((max(1, slots // 4), slots // 2 or 1)):
    run(f"at once {turn}", count, math.inf)
  capacity = 2 * slots / run("capacity", 2 * slots, math.inf)
  for share in _SHARES:
    run(f"share {share}", max(4, round(share * capacity * seconds)), share * capacity)
  run("short answers", max(4, round(_SHORT_SHARE * capacity * seconds)), _SHORT_SHARE * capacity, _SHORT)
  # The engine's clock covers neither arrival to plan nor values to event.
  outside = [
    request.first_scheduled - woke[request.id] + answered[request.id] - request.first_token
    for request in engine.recorder.requests
    if request.id in woke and request.first_scheduled is not None and request.first_token is not None
  ]
  return EngineRun(list(engine.recorder.steps), watched, statistics.median(outside) if outside else 0.0)


def _raise_if_dead(engine: Engine) -> None:
  if engine.dead is not None:
    raise engine.dead


def _progress(what: str, done: int, total: int) -> None:
  print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)


def measure(args: Any) -> StepCosts:
  """Measures the table of args.model on this machine's device."""
  # Imported here, so flag errors come first.
  import jax

  from engine.device import kv_cache
  from engine.device.build import build_engine

  built = build_engine(dataclasses.replace(build_options(args), all_rungs=True), _progress, lambda events: None)
  config, runner, model = built.config, built.runner, built.model
  max_context = min(args.max_context or config.max_model_len, config.max_model_len, config.pool_tokens)
  recorded = read_step_trace(args.step_trace) if args.step_trace else []
  points = points_of(recorded)[0] or measure_device(runner, config, max_context, args.seconds, args.rounds)
  by_tokens = not config.computes_padding
  table, error = fit(points, by_tokens)
  records, watched, front_s = run_engine(runner, config, max_context, args.load_seconds)
  # A step trace has no commit times, so they always come from the engine's loads.
  running, launches = points_of(recorded or watched.steps(records))
  host = fit_host(launches, [(record.num_rows, record.commit_s) for record in records if record.commit_s > 0])
  host = dataclasses.replace(host, front_s=max(0.0, front_s - host.commit_s - host.commit_row_s))
  dtype, kv_dtype = runner.spec.dtype, runner.kv[0].dtype
  about = {
    "source": f"step trace {args.step_trace}" if recorded else "measured",
    "device": next(iter(built.runner.kv[0].devices())).device_kind,
    "machine": machine(),
    "model": built.model_name,
    "dtype": str(dtype),
    "kv_dtype": name_kv_dtype(kv_dtype),
    "attention": built.attention,
    "jax": jax.__version__,
    "commit": commit(),
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "max_num_seqs": config.max_num_seqs,
    "block_size": config.block_size,
    "num_blocks": config.num_blocks,
    "max_model_len": config.max_model_len,
    "max_context": max_context,
    "fit": error | {"points": len(points)},
  }
  if not recorded:
    about["points"] = [[point.tokens, *point.work, round(point.seconds, 7)] for point in points]
  block_bytes = kv_cache.bytes_per_block(model, config.block_size, kv_dtype, built.attention)
  costs = StepCosts(**table, by_tokens=by_tokens, host=host, kv_bytes_per_token=block_bytes // config.block_size)
  # In the engine the host plans while the device works; if they share cores, both slow down.
  made, costs = costs, calibrated(with_launch_spread(costs, launches), running)
  bases = {tokens: made.rung(tokens) for tokens, _ in costs.rung_s}  # 0 if a rung costs no more than its contents
  about["engine_over_table"] = {
    str(tokens): round(seconds / bases[tokens], 4) if bases[tokens] else None for tokens, seconds in costs.rung_s
  }
  return dataclasses.replace(costs, about=about)


def estimate(args: Any) -> StepCosts:
  """Returns the roofline table of a device that is not available."""
  try:
    with open(args.roofline, encoding="utf-8") as file:
      model = json.load(file)
  except (OSError, ValueError) as error:
    raise ConfigError(f"model config {args.roofline} cannot be read ({error}); give a config.json") from error
  return roofline(
    model,
    tflops=args.tflops,
    gb_s=args.gb_s,
    compute_efficiency=args.compute_efficiency,
    bandwidth_efficiency=args.bandwidth_efficiency,
    overhead_s=args.overhead_ms / 1e3,
    max_tokens=args.max_tokens,
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line if something cannot be measured."""
  parser = CommandParser("tools.simulate.measure_costs", __doc__)
  parser.add_argument("--output", type=output_file, required=True, help="cost table (JSON) to write")
  parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="model folder")
  parser.add_argument("--max_context", type=positive_int, help="longest context that matters (default: the model's)")
  parser.add_argument("--seconds", type=positive_float, default=0.2, help="time of each kind of step in a round")
  parser.add_argument("--rounds", type=positive_int, default=3, help="rounds over all steps")
  parser.add_argument(
    "--load_seconds", type=positive_float, default=8.0, help="seconds of each load with random arrivals"
  )
  parser.add_argument("--step_trace", default="", help="recorded steps for the device's part of the table")
  parser.add_argument("--roofline", default="", help="measure nothing: a Llama-shaped config.json, for the flags below")
  parser.add_argument("--tflops", type=positive_float, default=989.0, help="roofline: peak, 10^12 operations a second")
  parser.add_argument("--gb_s", type=positive_float, default=4800.0, help="roofline: peak, 10^9 bytes a second")
  parser.add_argument("--compute_efficiency", type=positive_float, default=0.7, help="roofline: share of --tflops")
  parser.add_argument("--bandwidth_efficiency", type=positive_float, default=0.9, help="roofline: share of --gb_s")
  parser.add_argument("--overhead_ms", type=positive_float, default=0.5, help="roofline: fixed time of a step")
  parser.add_argument("--max_tokens", type=positive_int, default=8192, help="roofline: the largest rung")
  add_build_arguments(parser)
  args = parser.parse_args(argv)
  try:
    with contextlib.redirect_stdout(sys.stderr):
      costs = estimate(args) if args.roofline else measure(args)
    costs.save(args.output)
  except (EngineError, OSError) as error:
    return parser.failed(error)
  print(json.dumps({"output": args.output, "host": dataclasses.asdict(costs.host)} | _short(costs)), flush=True)
  return 0


def _short(costs: StepCosts) -> dict[str, Any]:
  """Returns a table's summary: milliseconds by rung, and the quality of the fit."""
  about = {name: costs.about[name] for name in ("source", "device", "fit", "engine_over_table") if name in costs.about}
  return about | {"rung_ms": {tokens: round(seconds * 1e3, 3) for tokens, seconds in costs.rung_s}}


if __name__ == "__main__":
  sys.exit(main())
