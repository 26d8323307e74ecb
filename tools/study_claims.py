"""The claims about batching as requests, arithmetic and simulation: what tools.study_batching prints. Loads no jax.

A claim is a list of (prompt tokens, output tokens) and a number of slots. Arithmetic comes from the batches that the
real Scheduler plans: static batching is charged width * longest row in every step, the ladder's rounding left out.
Simulated answers are tools.simulation's, for the cost table given. Tokens, steps and seconds throughout.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import pathlib
import random
import tempfile
from typing import Any, NamedTuple

from engine.config import EngineConfig
from engine.errors import ConfigError
from tools import workload
from tools.arguments import CommandParser, positive_float, positive_int
from tools.compare_batching import slot_bound
from tools.latency import Objectives, Outcome, percentile
from tools.measure import ROOT
from tools.replica import Arrival, made_up
from tools.simulation import Collector, Fleet, Simulation
from tools.step_costs import StepCosts

Rows = list[tuple[int, int]]  # (prompt tokens, output tokens)

MODES = ("static", "continuous", "chunked")
SAMPLE = ROOT / "benchmarks" / "traces" / "azure_conv_500.csv"
VOCAB_SIZE = 2**31 - 1  # token ids are not looked at
UNBOUNDED = {
  "max_queued_requests": 1 << 30,
  "max_queued_tokens": 1 << 40,
  "queue_timeout_s": 0.0,
  "request_timeout_s": 0.0,
  "enable_prefix_caching": False,
}
_ONE = Fleet()
_PAIR = Fleet(prefill_replicas=1, decode_replicas=1)
# An H200-class part that holds an 8B model: about 100 GB of KV at 128 KiB a token.
LARGE = {
  "max_model_len": 16_384,
  "num_blocks": 50_000,
  "token_budgets": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
  "prefill_chunk": 512,
}


def large_config(**changes: Any) -> EngineConfig:
  """The settings of the simulated part."""
  return EngineConfig(vocab_size=VOCAB_SIZE, **{**UNBOUNDED, **LARGE, **changes})


# --- Claims of throughput ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
  """A claim that static batching wastes so much, or that continuous batching gains so much.

  Attributes:
    name: for --only and the table.
    claim: in words.
    rows: the requests at full size, given the folder of traces; in order of arrival.
    slots: that run at once.
    scale: lengths are multiplied by it on a small machine.
    num_measured: how many of the requests a small machine serves; all of them if there are fewer.
    is_trace: whether the figure to reach (a share of the bound) is asked of it.
  """

  name: str
  claim: str
  rows: Callable[[pathlib.Path], Rows]
  slots: int = 32
  scale: float = 0.1
  num_measured: int = 160
  is_trace: bool = False

  def scaled(self, folder: pathlib.Path, scale: float | None = None, count: int | None = None) -> Rows:
    """The requests as a small machine serves them; lengths at least 1."""
    scale, count = scale or self.scale, min(count or self.num_measured, self.num_measured)
    return [(max(1, round(p * scale)), max(1, round(o * scale))) for p, o in self.rows(folder)[:count]]


def _drawn(prompt_len: str, output_len: str, count: int = 512, seed: int = 0) -> Callable[[pathlib.Path], Rows]:
  def rows(_: pathlib.Path) -> Rows:
    draws = [workload.parse_lengths(spec) for spec in (prompt_len, output_len)]
    rngs = [random.Random(f"{seed}/{number}") for number in range(2)]
    return [tuple(draw(rng) for draw, rng in zip(draws, rngs, strict=True)) for _ in range(count)]  # type: ignore[misc]

  return rows


def _trace(name: str, longest: int = 16_000) -> Callable[[pathlib.Path], Rows]:
  """The first 512 rows of a trace that an engine of that length takes; the sample stands in for Azure's conversations.

  Raises ConfigError when there is no such file.
  """

  def rows(folder: pathlib.Path) -> Rows:
    path = folder / name
    if name == "AzureLLMInferenceTrace_conv.csv" and not path.exists():
      path = SAMPLE
    found = [(prompt, max(1, output)) for _, prompt, output in workload.read_trace(str(path)) if prompt]
    return [row for row in found if sum(row) <= longest][:512]

  return rows


def _mean_800_longest_8000(_: pathlib.Path) -> Rows:
  """32 prompts: one of 8,000 tokens, the others alike, 25,600 in all."""
  rest, more = divmod(25_600 - 8_000, 31)
  return [(8_000 if number == 13 else rest + (number < more + (more > 13)), 1) for number in range(32)]


CASES = (
  Case(
    "padding_4",
    "prompts of 50, 200, 1,000 and 4,000 tokens: 5,250 useful of 16,000 slots",
    lambda _: [(50, 1), (200, 1), (1000, 1), (4000, 1)] * 8,
    slots=4,
  ),
  Case(
    "padding_4b",
    "prompts of 400, 50, 200 and 30 tokens: 680 useful of 1,600 slots",
    lambda _: [(400, 1), (50, 1), (200, 1), (30, 1)] * 8,
    slots=4,
    scale=1.0,
  ),
  Case("padding_32", "32 prompts of mean 800, longest 8,000: 90 % padding", _mean_800_longest_8000, scale=0.1),
  Case(
    "idle_490",
    "10 against 500 output tokens: a slot idles for 490 steps",
    lambda _: [(16, 10), (16, 500)] * 16,
    slots=4,
    scale=0.5,
  ),
  Case(
    "azure_conv",
    "2 to 8 times on realistic lengths: Azure conversations",
    _trace("AzureLLMInferenceTrace_conv.csv"),
    is_trace=True,
  ),
  Case(
    "azure_code",
    "2 to 8 times on realistic lengths: Azure code completion",
    _trace("AzureLLMInferenceTrace_code.csv"),
  ),
  Case(
    "sharegpt",
    "2 to 8 times on realistic lengths: ShareGPT",
    _trace("sharegpt_8k_lengths.csv"),
    is_trace=True,
  ),
  Case(
    "coding_assistant",
    "4 times on a coding assistant's 20 to 2,000 output tokens",
    _drawn("uniform:80:320", "loguniform:20:2000"),
    is_trace=True,
  ),
  Case(
    "heterogeneous",
    "5 to 10 times on heterogeneous lengths (outputs log-normal, sigma 1.6, 1 to 4,000)",
    _drawn("uniform:80:320", "lognormal:200:1:4000:1.6", seed=1),
  ),
)


# Every claim: those of throughput, and the others.
PARTS = (*(case.name for case in CASES), "formulas", "tail", "long_prompt", "batch_size", "tenants")


class Slots(NamedTuple):
  """Token slots of static batching: those paid for, those that did something."""

  paid: int
  useful: int


def static_slots(rows: Rows, num_slots: int) -> tuple[Slots, list[tuple[int, tuple[str, ...]]]]:
  """What the Scheduler's own static batches pay for, before the ladder rounds up; and (width, ids) of each step."""
  longest = max(map(sum, rows))
  blocks = num_slots * (longest // 16 + 1)  # static batching reserves so many at most
  config = large_config(batching="static", max_num_seqs=num_slots, num_blocks=blocks, max_model_len=longest)
  simulation = Simulation(config, StepCosts(((8192, 1.0),)), _ONE, Collector(Objectives()))
  paid = useful = width = 0
  steps: list[tuple[int, tuple[str, ...]]] = []

  def watch(batch: Any, _: float) -> None:
    nonlocal paid, useful, width
    width = len(batch.admissions) or width
    paid += width * max(batch.counts)
    useful += sum(batch.counts)
    steps.append((width, batch.request_ids))

  simulation.replicas[0].runner.watch = watch
  simulation.run(at_once(rows))
  return Slots(paid, useful), steps


def idle_steps(short: int, long: int) -> int:
  """Steps for which the slot of the shorter of two answers idles, by the Scheduler's own static batches."""
  _, steps = static_slots([(16, short), (16, long)], 2)
  return sum("0" not in ids for _, ids in steps)


def at_once(rows: Rows) -> list[Arrival]:
  """All of them at the start."""
  return made_up([(0.0, *row) for row in rows])


def allowed(rows: Rows, num_slots: int) -> dict[str, Any]:
  """What batching discipline alone can gain on these requests.

  Returns:
    idle_bound, idle_slot_share: of tools.compare_batching.slot_bound, from output lengths and nothing else.
    static_slots, useful_slots, padding_share: token slots, prompts included.
    padding_bound: the ratio, were every token slot paid for equally and continuous batching never padded.
  """
  bound = slot_bound([output for _, output in rows], num_slots)
  slots, _ = static_slots(rows, num_slots)
  return {
    "requests": len(rows),
    "slots": num_slots,
    "idle_bound": bound["bound"],
    "idle_slot_share": bound["idle_slot_share"],
    "static_slots": slots.paid,
    "useful_slots": slots.useful,
    "padding_share": round(1 - slots.useful / slots.paid, 4),
    "padding_bound": round(slots.paid / slots.useful, 3),
  }


def simulate_case(rows: Rows, num_slots: int, costs: StepCosts) -> dict[str, Any]:
  """Wall seconds of each mode on the modelled part, and what the others gain over static."""
  walls = {}
  for mode in MODES:
    figures, _ = simulated(large_config(batching=mode, max_num_seqs=num_slots), costs, at_once(rows))
    walls[mode] = figures["wall_s"]
  return {
    "wall_s": walls,
    "chunked_over_static": round(walls["static"] / walls["chunked"], 3),
    "continuous_over_static": round(walls["static"] / walls["continuous"], 3),
  }


def simulated(
  config: EngineConfig,
  costs: StepCosts,
  arrivals: Sequence[Arrival],
  fleet: Fleet = _ONE,
  trace_file: str = "",
) -> tuple[dict[str, Any], list[Outcome]]:
  """Figures and outcomes of one run in which nothing may fail and nothing may be computed twice."""
  simulation = Simulation(config, costs, fleet, Collector(Objectives(), keep=True))
  if trace_file:
    simulation.replicas[0].engine.start_trace(trace_file)
  simulation.run(arrivals)
  for replica in simulation.replicas:
    replica.engine.recorder.stop_trace()
  figures = simulation.figures()
  if figures["failed"] or figures["preemptions"]:
    raise ConfigError(
      f"{config.batching}: {figures['failed']} requests failed and {figures['preemptions']} were preempted, so that "
      "modes are not comparable; the simulated pool is too small"
    )
  return figures, simulation.collector.outcomes


# --- The two formulas of goodput --------------------------------------------------------------------------------------


class TracedStep(NamedTuple):
  """A step of a step trace: when it was planned and when its values came, whom it had, how many tokens it sampled."""

  planned_s: float
  done_s: float
  ids: tuple[str, ...]
  num_sampled: int


def traced_steps(path: str) -> list[TracedStep]:
  """The complete steps of a step trace, in order."""
  planned: dict[int, tuple[float, dict[str, Any]]] = {}
  steps = []
  with open(path, encoding="utf-8") as file:
    for line in file:
      entry = json.loads(line)
      if entry["event"] == "schedule" and entry["batch"] is not None:
        planned[entry["batch"]["step"]] = entry["now"], entry["batch"]
      elif entry["event"] == "commit":
        now, batch = planned.pop(entry["step"])
        steps.append(TracedStep(now, entry["now"], tuple(batch["ids"]), sum(batch["samples"])))
  return steps


def goodput_formulas(steps: Sequence[TracedStep], waves: bool) -> dict[str, float]:
  """Tokens a second by formula, and as they came.

  With n_i the tokens of request i and T_i the time from its first step's plan to its last one's values:
    static      sum(n_i) / (B * max T_i), tokens a second and SLOT of one wave. Times B, over all waves, it is
                sum(n_i) / sum over waves of max T_i.
    continuous  sum(n_i) / (sum(T_i) / B_eff), where B_eff is the mean number of requests in a step.

  Args:
    waves: the static formula; otherwise the continuous one.
  """
  first: dict[str, int] = {}
  last: dict[str, int] = {}
  for number, step in enumerate(steps):
    for name in step.ids:
      first.setdefault(name, number)
      last[name] = number
  times = {name: steps[last[name]].done_s - steps[first[name]].planned_s for name in first}
  tokens = sum(step.num_sampled for step in steps)
  wall_s = max(step.done_s for step in steps) - steps[0].planned_s
  if waves:
    longest: dict[int, float] = {}
    for name, seconds in times.items():
      longest[first[name]] = max(longest.get(first[name], 0.0), seconds)
    formula = tokens / sum(longest.values())
  else:
    mean_rows = sum(len(step.ids) for step in steps) / len(steps)
    formula = tokens / (sum(times.values()) / mean_rows)
  return {
    "formula_tok_s": round(formula, 2),
    "measured_tok_s": round(tokens / wall_s, 2),
    "formula_over_measured": round(formula * wall_s / tokens, 4),
  }


def simulate_formulas(rows: Rows, num_slots: int, costs: StepCosts) -> dict[str, Any]:
  """Both formulas on simulated step traces."""
  found: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as folder:
    for mode in ("static", "chunked"):
      path = str(pathlib.Path(folder) / mode)
      simulated(large_config(batching=mode, max_num_seqs=num_slots), costs, at_once(rows), trace_file=path)
      found[mode] = goodput_formulas(traced_steps(path), waves=mode == "static")
  return with_ratios(found)


def with_ratios(found: dict[str, Any]) -> dict[str, Any]:
  """Adds what the formulas, and what reality, say that chunked gains over static."""
  for name in ("formula_tok_s", "measured_tok_s"):
    found[f"{name.removesuffix('_tok_s')}_ratio"] = round(found["chunked"][name] / found["static"][name], 3)
  return found


# --- Tail latency -----------------------------------------------------------------------------------------------------

LOADS = (0.5, 0.7, 0.9)


def timed(rows: Rows, rate: float, seed: int = 0) -> list[tuple[float, int, int]]:
  """Poisson arrivals of `rate` requests a second."""
  times = workload.arrivals(len(rows), rate, 1.0, seed)
  return [(time, *row) for time, row in zip(times, rows, strict=True)]


def tail(outcomes: Sequence[Outcome]) -> dict[str, float]:
  """p99 over p50 of the end-to-end latency, whole and a token of output."""
  figures = {}
  for name, values in (
    ("e2e", [outcome.e2e_s for outcome in outcomes]),
    ("e2e_per_token", [outcome.e2e_s / outcome.output_len for outcome in outcomes]),
    ("ttft", [outcome.ttft_s for outcome in outcomes]),
    ("itl", [gap for outcome in outcomes for gap in outcome.itl_s]),
  ):
    middle, end = percentile(values, 50) or 0.0, percentile(values, 99) or 0.0
    figures |= {f"{name}_p50_ms": round(middle * 1e3, 3), f"{name}_p99_ms": round(end * 1e3, 3)}
    figures[f"{name}_p99_over_p50"] = round(end / middle, 2) if middle else 0.0
  return figures


def simulate_tail(rows: Rows, costs: StepCosts, num_slots: int = 256) -> dict[str, Any]:
  """The tail at shares of the rate that the part sustains."""
  config = large_config(max_num_seqs=num_slots)
  capacity = simulated(config, costs, at_once(rows))[0]["request_s"]
  found: dict[str, Any] = {"capacity_request_s": capacity}
  for load in LOADS:
    _, outcomes = simulated(config, costs, made_up(timed(rows, load * capacity)))
    found[f"load_{load:.0%}"] = tail(outcomes)
  return found


# --- Long prompts among steady decodes --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LongPrompts:
  """Answers that go on, and long prompts that arrive among them, each for a few tokens.

  Attributes:
    num_steady, context, steady_tokens: answers, tokens before them, tokens of each.
    num_long, prompt: long prompts, tokens of each; an eighth of it is a chunk.
    first_s, every_s: when the first arrives, and the time between two.
  """

  num_steady: int = 64
  context: int = 1000
  steady_tokens: int = 1800
  num_long: int = 16
  prompt: int = 4000
  first_s: float = 3.0
  every_s: float = 0.4

  @property
  def chunk(self) -> int:
    return self.prompt // 8

  def rows(self, quiet: bool) -> list[tuple[float, int, int]]:
    """Requests in order of arrival; none of the long ones if `quiet`."""
    steady = [(0.0, self.context, self.steady_tokens)] * self.num_steady
    times = [self.first_s + number * self.every_s for number in range(self.num_long)]
    return steady if quiet else steady + [(time, self.prompt, 2) for time in times]

  def gaps(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Gaps between tokens of the steady answers from first_s until the last long prompt is done."""
    steady = [outcome for outcome in outcomes if outcome.output_len == self.steady_tokens]
    ends = [outcome.chunks[-1][0] for outcome in outcomes if outcome.output_len != self.steady_tokens]
    last_s = max(ends, default=self.first_s + self.num_long * self.every_s)
    found = [
      after - before
      for outcome in steady
      for (before, _), (after, _) in zip(outcome.chunks, outcome.chunks[1:], strict=False)
      if after >= self.first_s and before <= last_s
    ]
    if not found or min(outcome.chunks[-1][0] for outcome in steady) < max(ends, default=0.0):
      raise ConfigError("the steady answers end before the last long prompt is done; make steady_tokens larger")
    return {
      "gap_p50_ms": round((percentile(found, 50) or 0.0) * 1e3, 3),
      "gap_p99_ms": round((percentile(found, 99) or 0.0) * 1e3, 3),
      "gap_max_ms": round(max(found) * 1e3, 3),
      "long_ttft_p50_ms": round(
        (percentile([o.ttft_s for o in outcomes if o.output_len != self.steady_tokens], 50) or 0.0) * 1e3, 3
      ),
    }


def against_quiet(found: dict[str, Any]) -> dict[str, Any]:
  """Adds to each way the p99 gap in quiet values of its own."""
  for name, ways in found.items():
    if name != "about":
      ways["p99_over_quiet"] = round(ways["busy"]["gap_p99_ms"] / ways["quiet"]["gap_p99_ms"], 2)
  return found


def simulate_long_prompts(costs: StepCosts, load: LongPrompts = LongPrompts()) -> dict[str, Any]:
  """Gaps inline, chunked (an eighth, and a sixteenth), and disaggregated (two devices)."""
  found: dict[str, Any] = {"about": dataclasses.asdict(load)}
  slots = load.num_steady + load.num_long
  budgets = sorted({*LARGE["token_budgets"], load.num_steady + load.chunk, load.num_steady + load.chunk // 2})
  for name, mode, chunk, fleet in (
    ("inline", "continuous", load.chunk, _ONE),
    ("chunked", "chunked", load.chunk, _ONE),
    ("chunked_half", "chunked", load.chunk // 2, _ONE),
    ("disaggregated", "disaggregated", load.chunk, _PAIR),
  ):
    config = large_config(batching=mode, max_num_seqs=slots, prefill_chunk=chunk, token_budgets=tuple(budgets))
    found[name] = {}
    for state in ("quiet", "busy"):
      _, outcomes = simulated(config, costs, made_up(load.rows(state == "quiet")), fleet)
      found[name][state] = load.gaps(outcomes)
  return against_quiet(found)


# --- Throughput against batch size ------------------------------------------------------------------------------------

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def knee(tok_s: dict[int, float]) -> int:
  """The last batch size whose doubling still gave 1.5 times the tokens a second, doubled; the first if none did."""
  sizes = sorted(tok_s)
  found = sizes[0]
  for size, double in zip(sizes, sizes[1:], strict=False):
    if tok_s[double] < 1.5 * tok_s[size]:
      break
    found = double
  return found


def decode_rate(outcomes: Sequence[Outcome]) -> float:
  """Tokens a second while all of them decode: their number over the median time between two tokens."""
  begun = max(outcome.chunks[0][0] for outcome in outcomes)
  gaps = [
    after - before
    for outcome in outcomes
    for (before, _), (after, _) in zip(outcome.chunks, outcome.chunks[1:], strict=False)
    if before >= begun
  ]
  middle = percentile(gaps, 50)
  if not middle:
    raise ConfigError("the first answers end before the last prompt is done; make the answers longer")
  return len(outcomes) / middle


def simulate_batch_sizes(costs: StepCosts, context: int = 1000, tokens: int = 96) -> dict[str, Any]:
  """Decode tokens a second with 1 to 256 requests of one context."""
  rates = {}
  for size in BATCH_SIZES:
    config = large_config(max_num_seqs=size, prefill_chunk=LARGE["token_budgets"][-1])
    _, outcomes = simulated(config, costs, at_once([(context, tokens)] * size))
    rates[size] = round(decode_rate(outcomes), 1)
  return {"context": context, "decode_tok_s": rates, "knee": knee(rates), "gain_at_64": round(rates[64] / rates[1], 2)}


# --- Two tenants ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tenants:
  """Two tenants of the same lengths; the large one sends 100 requests for each of the small one's.

  Attributes:
    num_small: requests of the small tenant.
    prompt_len, output_len: distributions.
    overload: requests a second of both, as a multiple of what the device sustains.
    slots, chunk: max_num_seqs and prefill_chunk. Who comes waits for the step at hand and the one that is launched
      already, so the chunk must be small beside a prompt for the wait to be small beside the prefill.
  """

  num_small: int = 20
  prompt_len: str = "uniform:1500:2500"
  output_len: str = "uniform:16:48"
  overload: float = 1.5
  slots: int = 128
  chunk: int = 256

  def rows(self) -> Rows:
    return _drawn(self.prompt_len, self.output_len, 101 * self.num_small, seed=2)(pathlib.Path())

  def arrivals(self, capacity: float) -> tuple[list[tuple[float, int, int]], list[bool]]:
    """(arrival_s, prompt, output) of both, and which are the small tenant's: one of every 101, drawn."""
    rows, rng = timed(self.rows(), self.overload * capacity, seed=3), random.Random(3)
    small = [False] * len(rows)
    for start in range(0, len(rows), 101):
      small[start + rng.randrange(101)] = True
    return rows, small


def compare_tenants(ways: Mapping[str, Sequence[Outcome]], small: set[int | str]) -> dict[str, Any]:
  """Median time to first token of the small tenant: alone, and beside the large one under each policy."""
  found: dict[str, Any] = {}
  for name, outcomes in ways.items():
    ttfts = [outcome.ttft_s for outcome in outcomes if outcome.id in small]
    found[name] = {f"ttft_p{p}_ms": round((percentile(ttfts, p) or 0.0) * 1e3, 3) for p in (50, 90)}
  for name in ("fcfs", "fair"):
    found[name]["p50_over_alone"] = round(found[name]["ttft_p50_ms"] / found["alone"]["ttft_p50_ms"], 2)
  return found


def simulate_tenants(costs: StepCosts, load: Tenants = Tenants()) -> dict[str, Any]:
  """The small tenant alone, and under fcfs and fair."""
  budgets = tuple(sorted({*LARGE["token_budgets"], load.chunk + 64}))  # else decodes push a chunk to the next rung
  config = large_config(max_num_seqs=load.slots, prefill_chunk=load.chunk, token_budgets=budgets)
  capacity = simulated(config, costs, at_once(load.rows()))[0]["request_s"]
  rows, small = load.arrivals(capacity)
  arrivals = [
    row._replace(tenant="small" if is_small else "large") for row, is_small in zip(made_up(rows), small, strict=True)
  ]
  alone = [arrival for arrival in arrivals if arrival.tenant == "small"]
  ways = {"alone": simulated(config, costs, alone)[1]}
  for policy in ("fcfs", "fair"):
    ways[policy] = simulated(dataclasses.replace(config, policy=policy), costs, arrivals)[1]
  about = dataclasses.asdict(load) | {"capacity_request_s": capacity}
  return compare_tenants(ways, {arrival.id for arrival in alone}) | {"about": about}


# --- Flags ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: CommandParser) -> None:
  """The flags that tools.study_batching and tools.study_measured share."""
  parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="model folder")
  parser.add_argument("--traces", type=pathlib.Path, default=ROOT.parent / "shared" / "traces", help="folder of traces")
  parser.add_argument("--rounds", type=positive_int, default=1, help="of each throughput claim; medians count")
  parser.add_argument("--scale", type=positive_float, help="of lengths, instead of each part's own")
  parser.add_argument("--num_requests", type=positive_int, help="at most so many, instead of each part's own")
  parser.add_argument("--output_tokens", type=positive_int, default=48, help="batch_size: of each request")
  parser.add_argument("--pause_s", type=positive_float, default=0.5, help="long_prompt: before each long prompt")
  parser.add_argument("--num_blocks", type=positive_int, default=4096, help="as the server's flag")
  parser.add_argument("--compile_cache_dir", default=str(pathlib.Path.home() / ".cache" / "sluice" / "programs"))
