"""Measures the engine in this process, beside the roofline of ceilings from the same run. Decides and tunes nothing.

  python -m tools.bench.engine --shape=llama-125m [--output=FILE.json] [--plot=FILE.png]
  python -m tools.bench.engine --model=DIR --parts=decode --batches=1,8,32 --contexts=512,1024

A shape is one of models/shapes (with random weights made on the device), a model is any folder. Parts:

  decode   steps of B rows with one new token each at context C, through the real runner, two in flight as in the
           engine. Roofline: the longer of bytes (weights once, and the rows' keys and values) over the read bandwidth,
           and operations over the matmul rate.
  prefill  steps of one prompt that fills the step. Roofline: the same.
  offline  --requests requests all at once, prompts and outputs uniform in --lengths, through the whole engine.
           Roofline: the sum of its steps'. Also the share of the time in which the device has no step, padding,
           compiles after ready, and the host's part.
  alone    one request through the whole engine at the shortest context, and the same step with eight in flight: the
           time in which the device waits for the host, which several steps on the device could save.
  sampler  the sampler alone on the fewest and the most rows of --batches: greedy, by temperature, with top_k and top_p,
           with the most likely tokens. With the part decode, also its share of the decode step of as many rows at the
           shortest context.
  trace    the profiler's times of each decode step on a GPU: kernels, the gaps between them, and the host's calls.

With --overlap=false the engine waits for each step before it plans the next.
The ceilings are measured between the figures, on the same devices (tools/bench/ceilings.py): reading memory, and a
square matmul in the model's dtype. The tool compares each figure with the mean of the measurements before and after it.
`of read` is bytes a second over the read bandwidth, `of rate` is operations a second over the matmul rate, and `over`
is the figure's time over the roofline's. (Roofline: Williams, Waterman and Patterson, CACM 2009.)
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import statistics
import sys
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.shapes import choose_ladder
from pallas_kernels.paged_attention.api import name_kv_dtype
from tools.arguments import CommandParser, output_file, positive_float, positive_int, positive_ints
from tools.bench.ceilings import Ceilings, CeilingWatch, in_words
from tools.bench.device_idle import DeviceWatch, alone
from tools.bench.sampler_times import sampler_times
from tools.bench.step_trace import trace_steps
from tools.bench_offline import OfflineRun, add_build_arguments, build_options
from tools.measure import ROOT, commit, machine, show, write_result
from tools.report.accounting import Flops
from tools.simulate.measure_costs import HandMade, Rows
from tools.simulate.step_costs import work_of
from tools.workload import synthetic

SHAPES = ROOT / "models" / "shapes"
PARTS = ("decode", "prefill", "alone", "offline", "sampler", "trace")


@dataclasses.dataclass(frozen=True)
class ModelWork:
  """The least that a model's steps read and compute.

  Attributes:
    flops: operations of a token, of a row that samples, and of a pair of query and key.
    weight_bytes: bytes of the matrices that every step streams; an embedding that is only looked up does not count.
    kv_bytes: bytes of keys and values, a token.
  """

  flops: Flops
  weight_bytes: int
  kv_bytes: int

  @classmethod
  def of(cls, folder: str, model: Any, dtype: Any, quantization: str = "none", kv_dtype: Any = None) -> "ModelWork":
    """Args: folder, model: its config.json, as folder and as ModelConfig. dtype: of weights not quantized. kv_dtype: of
    the KV pool; None: dtype."""
    from engine.device import kv_cache

    flops = Flops.of_model(folder)
    # A matrix of n weights does n multiply-adds a token, which are 2 n operations.
    size = {"int8": 1, "w8a8": 1, "fp8": 1, "int4": 0.5 + 2 / 32}.get(quantization, dtype.itemsize)
    weight_bytes = int(int(flops.token + flops.row) // 2 * size)
    return cls(flops, weight_bytes, kv_cache.bytes_per_block(model, 1, kv_dtype or dtype))

  def of_step(self, starts: Sequence[int], counts: Sequence[int]) -> tuple[float, float]:
    """Returns bytes and operations of a step whose rows cover positions [start, start + count)."""
    work = work_of(starts, counts)
    keys, pairs = work.decode_keys + work.prefill_keys, work.decode_keys + work.prefill_pairs
    return self.weight_bytes + keys * self.kv_bytes, self.flops.of(sum(counts), len(counts), pairs)


# --- Parts ------------------------------------------------------------------------------------------------------------


def steps(
  run: OfflineRun, kinds: Sequence[tuple[dict[str, int], Rows]], seconds: float, work: ModelWork, watch: CeilingWatch
) -> list[dict[str, Any]]:
  """Times steps made by hand, each with the ceilings around it.

  Args:
    kinds: for each kind, a function that builds the step, and its rows as (first position, tokens).
    seconds: duration for each.
  """
  config, runner = run.built.config, run.built.runner
  made, ladder = HandMade(runner, config), config.ladder
  found = []
  for name, rows in kinds:
    held = sum(-(-(start + count) // config.block_size) for start, count in rows)
    shape = ladder.fit(sum(count for _, count in rows))
    if held > config.num_blocks or len(rows) > shape.rows:
      print(f"{name}: left out, {held} blocks of {config.num_blocks} or {len(rows)} rows", file=sys.stderr)
      continue
    times = made.times(shape, rows, seconds)
    step_s = statistics.median(times)
    print(f"{name}: {1e3 * step_s:.3f} ms", file=sys.stderr, flush=True)
    about = name | {"tokens": shape.tokens, "steps": len(times), "step_s": step_s}
    found.append(about | beside_roofline(step_s, rows, work, watch.around()))
  return found


def traces(run: OfflineRun, kinds: Sequence[tuple[dict[str, int], Rows]], seconds: float) -> list[dict[str, Any]]:
  """Traces steps made by hand. Raises ConfigError on another platform than a GPU."""
  config = run.built.config
  made = HandMade(run.built.runner, config)
  try:
    return [name | trace_steps(made, config.ladder.fit(len(rows)), rows, seconds) for name, rows in kinds]
  except RuntimeError as error:
    raise ConfigError(f"--parts=trace: {error}; leave out trace") from error


def decode_kinds(batches: Sequence[int], contexts: Sequence[int], max_len: int) -> list[tuple[dict[str, int], Rows]]:
  """Returns the decode steps; a row's new token is at position context - 1."""
  return [
    ({"batch": batch, "context": context}, [(context - 1, 1)] * batch)
    for context in contexts
    if context <= max_len
    for batch in batches
  ]


def prefill_kinds(lengths: Sequence[int], max_len: int) -> list[tuple[dict[str, int], Rows]]:
  """Returns the prefill steps: one prompt from its beginning."""
  return [({"prompt": length}, [(0, length)]) for length in lengths if length <= max_len]


def beside_roofline(step_s: float, rows: Rows, work: ModelWork, ceilings: Ceilings) -> dict[str, Any]:
  """Returns rates of a step of `step_s` seconds, their shares of the ceilings, and tokens a second."""
  num_bytes, flops = work.of_step(*zip(*rows, strict=True))
  roofline_s = ceilings.seconds(num_bytes, flops)
  return {
    "ceilings": dataclasses.asdict(ceilings),
    "roofline_s": roofline_s,
    "over_roofline": round(step_s / roofline_s, 3),
    "bytes_s": num_bytes / step_s,
    "flops_s": flops / step_s,
    "intensity": flops / num_bytes,
    "tok_s": round(sum(count for _, count in rows) / step_s, 1),
  } | ceilings.shares(num_bytes, flops, step_s)


def offline(run: OfflineRun, args: Any, work: ModelWork, ceilings: CeilingWatch) -> dict[str, Any]:
  """Runs all requests at once; the roofline is the sum of the steps', by the ceilings around the run."""
  built = run.built
  low, high = args.lengths
  distribution = f"uniform:{low}:{high}"
  requests = synthetic(args.requests, distribution, distribution, built.model.vocab_size, seed=0)
  engine, watch = built.engine, DeviceWatch(built.runner)
  engine.keep_all()
  with watch.watching(built.runner):
    outcomes = run.serve(requests)
  started = min(o.sent_s for o in outcomes)
  wall_s = max(o.chunks[-1][0] for o in outcomes if o.chunks) - started
  stats = engine.stats(sys.maxsize)
  records = list(stats.steps)[-len(watch.held) :]
  computed = sum(record.decode_tokens + record.prefill_tokens + record.padding for record in records)
  output_tokens = sum(outcome.num_tokens for outcome in outcomes)
  prompt_tokens = sum(len(request.prompt) for request in requests)
  around = ceilings.around()
  roofline_s = sum(around.seconds(*work.of_step(*step)) for step in watch.held)
  return {
    "requests": len(requests),
    "failed": sum(not outcome.ok for outcome in outcomes),
    "lengths": list(args.lengths),
    "wall_s": round(wall_s, 4),
    "output_tok_s": round(output_tokens / wall_s, 2),
    "total_tok_s": round((output_tokens + prompt_tokens) / wall_s, 2),
    "steps": len(records),
    "device_idle_share": round(watch.idle_s(started) / wall_s, 4),
    "padding_share": round(sum(record.padding for record in records) / computed, 5),
    "preemptions": stats.num_preemptions,
    "host_us": {
      name: round(1e6 * statistics.median(getattr(record, f"{name}_s") for record in records), 1)
      for name in ("host", "commit")
    },
    "ceilings": dataclasses.asdict(around),
    "roofline_s": round(roofline_s, 4),
    "over_roofline": round(wall_s / roofline_s, 3),
  }


# --- Command ----------------------------------------------------------------------------------------------------------


def model_folder(shape: str) -> str:
  """Returns the folder of a shape. Raises ConfigError with the known names."""
  names = sorted(path.name for path in SHAPES.iterdir() if (path / "config.json").is_file())
  if shape == "demo":
    return str(ROOT / "models" / "demo")
  if shape not in names:
    raise ConfigError(f"shape={shape!r} is unknown; set --shape to one of demo, {', '.join(names)}, or give --model")
  return str(SHAPES / shape)


def measure(args: Any, keep: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
  """Measures all requested parts; calls `keep` with the results after each. Raises EngineError."""
  if not args.model:
    args.model = model_folder(args.shape)
    args.random_weights = args.shape != "demo"
  import jax

  from engine.device.build import find_devices

  # Defaults that fit the sweeps.
  default, most = choose_ladder(find_devices(1)[0].platform, all_rungs=True), max(args.batches)
  args.max_num_seqs = max(args.max_num_seqs or default.max_num_seqs, most)
  args.token_budgets = tuple(
    sorted({*(args.token_budgets or default.token_budgets), *args.batches, *args.prompts} - {1})
  )
  options = dataclasses.replace(build_options(args), all_rungs=True)
  source = None
  if args.executable_bundle:
    from extensions.executable_bundle.bundle import Bundle

    source = Bundle(args.executable_bundle, options.batching, args.write_executable_bundle)
  run = OfflineRun(options, source=source)
  built = run.built
  dtype, kv_dtype = built.runner.spec.dtype, built.runner.kv[0].dtype
  devices = len(built.runner.kv[0].devices())
  watch = CeilingWatch(dtype, args.seconds, devices)
  compiles = built.runner.compiles_after_ready  # devices of the ceilings
  work = ModelWork.of(options.model_dir, built.model, dtype, built.quantization, kv_dtype)
  max_len = built.config.max_model_len
  found: dict[str, Any] = {}
  about = {
    "work": dataclasses.asdict(work),
    "model": built.model_name,
    "random_weights": options.random_weights,
    "overlap": built.config.overlap,
    "dtype": str(dtype),
    "kv_dtype": name_kv_dtype(kv_dtype),
    "attention": built.attention,
    "matmul": built.matmul,
    "quantization": built.quantization,
    "token_budgets": list(built.config.token_budgets),
    "num_blocks": built.config.num_blocks,
    "block_size": built.config.block_size,
    "load_s": round(built.load_s, 3),
    "warmup_s": round(built.warmup_s, 3),
    "fallbacks": list(built.fallbacks),
    "devices": devices,
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "machine": machine(),
    "commit": commit(),
  }

  def result() -> dict[str, Any]:
    return found | {"ceilings": dataclasses.asdict(watch.best()), "ceilings_seen": watch.range()} | about

  keep(result())
  kinds_of_decode = decode_kinds(args.batches, args.contexts, max_len)
  if "decode" in args.parts:
    found["decode"] = steps(run, kinds_of_decode, args.seconds, work, watch)
    keep(result())
  if "trace" in args.parts:
    found["trace"] = traces(run, kinds_of_decode, args.seconds)
    keep(result())
  if "prefill" in args.parts:
    found["prefill"] = steps(run, prefill_kinds(args.prompts, max_len), args.seconds, work, watch)
    keep(result())
  if "alone" in args.parts:
    found["alone"] = alone(run, min(args.contexts), args.seconds)
    keep(result())
  if "offline" in args.parts:
    watch.around()  # excludes the time since the previous figure
    found["offline"] = offline(run, args, work, watch)
  about["compiles_after_ready"] = built.runner.compiles_after_ready - compiles
  if "sampler" in args.parts:  # compiles its own programs
    keep(result())
    found["sampler"] = sampler_times(built.model.vocab_size, sorted({min(args.batches), most}), args.seconds)
    for row in found["sampler"]:
      same = [step["step_s"] for step in found.get("decode", []) if step["batch"] == row["batch"]]
      row["of_step"] = round(row["s"] / min(same), 4) if same else None
  keep(result())
  return result()


def table(result: dict[str, Any]) -> str:
  """Formats the result as tables."""
  lines = [
    f"{result['model']}, {result['dtype']}, attention {result['attention']}, matmul {result['matmul']}, "
    f"quantization {result['quantization']}; {in_words(result['ceilings_seen'])}"
  ]
  columns = (
    f"{'step ms':>10}{'roofline':>10}{'over':>7}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>10}{'of rate':>9}{'tok/s':>10}"
  )
  for part in ("decode", "prefill"):
    if result.get(part):
      lines.append(f"\n{part:22}{columns}")
    for row in result.get(part, []):
      name = f"{row['batch']} x {row['context']}" if part == "decode" else f"1 x {row['prompt']}"
      lines.append(
        f"{name:22}{1e3 * row['step_s']:10.3f}{1e3 * row['roofline_s']:10.3f}{row['over_roofline']:7.2f}"
        f"{row['bytes_s'] / 1e9:8.1f}{row['of_read']:9.2f}{row['flops_s'] / 1e9:10.1f}{row['of_rate']:9.2f}"
        f"{row['tok_s']:10.0f}"
      )
  for row in result.get("trace", []):
    lines.append(
      f"\n{row['batch']} x {row['context']}: kernels run {row['busy_us'] / 1e3:.3f} of {row['span_us'] / 1e3:.3f} ms "
      "a step"
    )
    for what in ("kernels", "host"):
      lines += [f"  {what:8}{micros / 1e3:10.4f} ms{count:8.2f} times  {name}" for name, micros, count in row[what]]
  for row in result.get("sampler", []):
    share = "" if row["of_step"] is None else f", {row['of_step']:.1%} of the decode step"
    lines.append(f"sampler, {row['batch']} rows, {row['asked']}: {1e3 * row['s']:.3f} ms{share}")
  if "deep_s" in result.get("alone", {}):
    row = result["alone"]
    lines.append(
      f"one request alone at {row['context']}: {1e3 * row['engine_s']:.3f} ms a step, {1e3 * row['deep_s']:.3f} where "
      f"the device never waits for the host; it waits {row['waits_share']:.1%} of the time"
    )
  if "offline" in result:
    row = result["offline"]
    lines.append(
      f"\noffline, {row['requests']} requests: {row['output_tok_s']:.0f} output tok/s, {row['total_tok_s']:.0f} in all;"
      f" {row['over_roofline']:.2f} of the roofline's time; device idle {row['device_idle_share']:.1%}, padding "
      f"{row['padding_share']:.1%}, host {row['host_us']['host']:.0f} us/step before launch and "
      f"{row['host_us']['commit']:.0f} after; {result['compiles_after_ready']} compiles after ready"
    )
  return "\n".join(lines)


def plot(result: dict[str, Any], path: str) -> None:
  """Plots every step by intensity, with its share of the roofline at that time (a dash), and the fastest roofline."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot, ticker

  ceilings = result["ceilings"]
  figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
  points = [row for part in ("decode", "prefill") for row in result.get(part, [])]
  knee = ceilings["flops_s"] / ceilings["bytes_s"]
  low = min([0.5, *(row["intensity"] / 2 for row in points)])
  high = max([4 * knee, *(2 * row["intensity"] for row in points)])
  roofline = [low * ceilings["bytes_s"] / 1e9] + [ceilings["flops_s"] / 1e9] * 2
  axes.plot([low, knee, high], roofline, "k-", lw=1, label="fastest ceilings seen")
  for part, marker in (("decode", "o"), ("prefill", "s")):
    rows = result.get(part, [])
    axes.plot([row["intensity"] for row in rows], [row["flops_s"] / 1e9 for row in rows], marker, label=part)
    for row, above in zip(sorted(rows, key=lambda row: row["intensity"]), itertools.cycle((4, -4)), strict=False):
      name = f"{row['batch']}x{row['context']}" if part == "decode" else str(row["prompt"])
      axes.annotate(
        f"{name}: {row['of_roofline']:.2f}",
        (row["intensity"], row["flops_s"] / 1e9),
        fontsize=6,
        xytext=(6, above),
        textcoords="offset points",
        verticalalignment="center",
      )
  then = [min(row["ceilings"]["flops_s"], row["intensity"] * row["ceilings"]["bytes_s"]) / 1e9 for row in points]
  axes.plot([row["intensity"] for row in points], then, "k_", label="roofline around a step")
  axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="GFLOP/s")
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())
  axes.set_title(f"{result['model']}, {result['dtype']}, {result['device']}; at each step its share of its roofline")
  axes.legend()
  axes.grid(True, which="both", alpha=0.3)
  figure.savefig(path, dpi=150)
  pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line if something cannot be measured."""
  parser = CommandParser("tools.bench.engine", __doc__)
  parser.add_argument("--shape", default="llama-125m", help="a folder of models/shapes, or demo")
  parser.add_argument(
    "--model", default="", help="a model folder instead; with --random_weights, config.json is enough"
  )
  parser.add_argument("--parts", default=",".join(PARTS[:-1]), help="what to measure; trace needs a GPU")
  parser.add_argument("--batches", type=positive_ints, default=(1, 8, 32, 64), help="rows of decode steps")
  parser.add_argument("--contexts", type=positive_ints, default=(128, 512, 1024), help="their positions")
  parser.add_argument("--prompts", type=positive_ints, default=(128, 512), help="tokens of prefill steps")
  parser.add_argument("--requests", type=positive_int, default=64, help="offline: how many")
  parser.add_argument(
    "--lengths", type=positive_ints, default=(16, 128), help="offline: shortest and longest prompt, output"
  )
  parser.add_argument("--seconds", type=positive_float, default=1.0, help="seconds for each step and each ceiling")
  parser.add_argument("--output", type=output_file, default="", help="JSON file to write")
  parser.add_argument("--plot", type=output_file, default="", help="PNG file to write")
  parser.add_argument("--executable_bundle", default="", help="see the server's flag of this name")
  parser.add_argument(
    "--write_executable_bundle", action="store_true", help="store newly compiled programs in the bundle"
  )
  add_build_arguments(parser)
  args = parser.parse_args(argv)
  if args.write_executable_bundle and not args.executable_bundle:
    parser.error("--write_executable_bundle needs a folder to write to; set --executable_bundle")
  args.parts = args.parts.split(",")
  if unknown := set(args.parts) - set(PARTS):
    parser.error(f"--parts: {', '.join(sorted(unknown))} is not one of {', '.join(PARTS)}")
  if len(args.lengths) != 2 or args.lengths[0] > args.lengths[1]:
    parser.error(f"--lengths: {args.lengths} must be two numbers, the smaller first")
  try:
    result = measure(args, lambda found: write_result(args.output, found))  # a killed run keeps its results so far
  except EngineError as error:
    return parser.failed(error)
  show(result, table(result), args.output)
  if args.plot:
    plot(result, args.plot)
  return 0


if __name__ == "__main__":
  sys.exit(main())
