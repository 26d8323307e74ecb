"""Turns published statements about batching into requests, and computes figures from outcomes. Serves nothing itself.

A statement becomes a list of (prompt tokens, output tokens) and a number of slots. tools.study.simulated and
tools.study.measured answer it. The units are tokens, steps and seconds.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import pathlib
import random
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.settings import UNBOUNDED_QUEUE
from tools import workload
from tools.arguments import CommandParser, positive_float, positive_int
from tools.measure import ROOT
from tools.report.latency import Outcome, percentile

Rows = list[tuple[int, int]]  # (prompt tokens, output tokens)

MODES = ("static", "continuous", "chunked")
SAMPLE = ROOT / "benchmarks" / "traces" / "azure_conv_500.csv"
UNBOUNDED = {**UNBOUNDED_QUEUE, "prefix_cache_scope": "off", "speculation": "none"}

# --- Statements about throughput --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ClaimCase:
  """A published statement about the waste of static batching or the gain of continuous batching.

  Attributes:
    name: for --only and the table.
    `claim`: its text.
    rows: returns the requests at full size, in order of arrival; takes the folder of traces.
    slots: sequences that run at once.
    scale: factor of lengths on a small machine.
    num_measured: requests that a small machine serves; all of them if there are fewer.
    is_trace: whether the target figure (a share of the bound) applies to it.
  """

  name: str
  claim: str
  rows: Callable[[pathlib.Path], Rows]
  slots: int = 32
  scale: float = 0.1
  num_measured: int = 160
  is_trace: bool = False

  def scaled(self, folder: pathlib.Path, scale: float | None = None, count: int | None = None) -> Rows:
    """Returns the requests as a small machine serves them; lengths are at least 1."""
    scale, count = scale or self.scale, min(count or self.num_measured, self.num_measured)
    return [(max(1, round(p * scale)), max(1, round(o * scale))) for p, o in self.rows(folder)[:count]]


def _sampled_rows(prompt_len: str, output_len: str, count: int = 512, seed: int = 0) -> Callable[[pathlib.Path], Rows]:
  def rows(_: pathlib.Path) -> Rows:
    samplers = [workload.parse_lengths(spec) for spec in (prompt_len, output_len)]
    rngs = [random.Random(f"{seed}/{number}") for number in range(2)]
    return [tuple(sample(rng) for sample, rng in zip(samplers, rngs, strict=True)) for _ in range(count)]  # type: ignore[misc]

  return rows


def _trace(name: str, longest: int = 16_000) -> Callable[[pathlib.Path], Rows]:
  """Returns the first 512 rows of a trace that fit an engine; the sample replaces Azure's conversations if needed.

  Raises ConfigError if the file is missing.
  """

  def rows(folder: pathlib.Path) -> Rows:
    path = folder / name
    if name == "AzureLLMInferenceTrace_conv.csv" and not path.exists():
      path = SAMPLE
    found = [(prompt, max(1, output)) for _, prompt, output in workload.read_trace(str(path)) if prompt]
    return [row for row in found if sum(row) <= longest][:512]

  return rows


def _mean_800_longest_8000(_: pathlib.Path) -> Rows:
  """Returns 32 prompts: one of 8,000 tokens, the others alike, 25,600 in all."""
  rest, more = divmod(25_600 - 8_000, 31)
  return [(8_000 if number == 13 else rest + (number < more + (more > 13)), 1) for number in range(32)]


CASES = (
  ClaimCase(
    "padding_4",
    "prompts of 50, 200, 1,000 and 4,000 tokens: 5,250 useful of 16,000 slots",
    lambda _: [(50, 1), (200, 1), (1000, 1), (4000, 1)] * 8,
    slots=4,
  ),
  ClaimCase(
    "padding_4b",
    "prompts of 400, 50, 200 and 30 tokens: 680 useful of 1,600 slots",
    lambda _: [(400, 1), (50, 1), (200, 1), (30, 1)] * 8,
    slots=4,
    scale=1.0,
  ),
  ClaimCase("padding_32", "32 prompts of mean 800, longest 8,000: 90 % padding", _mean_800_longest_8000, scale=0.1),
  ClaimCase(
    "idle_490",
    "10 against 500 output tokens: a slot idles for 490 steps",
    lambda _: [(16, 10), (16, 500)] * 16,
    slots=4,
    scale=0.5,
  ),
  ClaimCase(
    "azure_conv",
    "2 to 8 times on realistic lengths: Azure conversations",
    _trace("AzureLLMInferenceTrace_conv.csv"),
    is_trace=True,
  ),
  ClaimCase(
    "azure_code",
    "2 to 8 times on realistic lengths: Azure code completion",
    _trace("AzureLLMInferenceTrace_code.csv"),
    is_trace=True,
  ),
  ClaimCase(
    "sharegpt",
    "2 to 8 times on realistic lengths: ShareGPT",
    _trace("sharegpt_8k_lengths.csv"),
    is_trace=True,
  ),
  ClaimCase(
    "coding_assistant",
    "4 times on a coding assistant's 20 to 2,000 output tokens",
    _sampled_rows("uniform:80:320", "loguniform:20:2000"),
  ),
  ClaimCase(
    "heterogeneous",
    "5 to 10 times on heterogeneous lengths (outputs log-normal, sigma 1.6, 1 to 4,000)",
    _sampled_rows("uniform:80:320", "lognormal:200:1:4000:1.6", seed=1),
  ),
)


# All parts: the statements about throughput, and the others.
PARTS = (*(case.name for case in CASES), "formulas", "tail", "long_prompt", "batch_size", "tenants")


# --- The two formulas of goodput --------------------------------------------------------------------------------------


class TracedStep(NamedTuple):
  """A step of a step trace: time of its plan and of its values, its requests, its sampled tokens."""

  planned_s: float
  done_s: float
  ids: tuple[str, ...]
  num_sampled: int


def traced_steps(path: str) -> list[TracedStep]:
  """Returns the complete steps of a step trace, in order."""
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
  """Returns tokens a second by formula, and as measured.

  With n_i the tokens of request i and T_i the time from its first step's plan to its last one's values:
    static      sum(n_i) / (B * max T_i), tokens a second and SLOT of one wave. Times B, over all waves, it is
                sum(n_i) / sum over waves of max T_i.
    continuous  sum(n_i) / (sum(T_i) / B_eff), where B_eff is the mean number of requests in a step.

  Args:
    waves: uses the static formula; otherwise the continuous one.
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


def with_ratios(found: dict[str, Any]) -> dict[str, Any]:
  """Adds the gain of chunked over static batching, by the formulas and as measured."""
  for name in ("formula_tok_s", "measured_tok_s"):
    found[f"{name.removesuffix('_tok_s')}_ratio"] = round(found["chunked"][name] / found["static"][name], 3)
  return found


# --- Tail latency -----------------------------------------------------------------------------------------------------

LOADS = (0.5, 0.7, 0.9)


def timed(rows: Rows, rate: float, seed: int = 0) -> list[tuple[float, int, int]]:
  """Returns rows with Poisson arrivals of `rate` requests a second."""
  times = workload.arrivals(len(rows), rate, 1.0, seed)
  return [(time, *row) for time, row in zip(times, rows, strict=True)]


def tail(outcomes: Sequence[Outcome]) -> dict[str, float]:
  """Returns p99 over p50 of the end-to-end latency, of whole requests and for each output token."""
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


# --- Long prompts among steady decodes --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LongPrompts:
  """Steady answers, and long prompts that arrive among them and generate a few tokens each.

  Attributes:
    num_steady, context, steady_tokens: answers, tokens before them, tokens of each.
    num_long, prompt: long prompts, tokens of each; a chunk is an eighth of it.
    first_s, every_s: time of the first arrival, and time between two.
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
    """Returns requests in order of arrival; without the long ones if `quiet`."""
    steady = [(0.0, self.context, self.steady_tokens)] * self.num_steady
    times = [self.first_s + number * self.every_s for number in range(self.num_long)]
    return steady if quiet else steady + [(time, self.prompt, 2) for time in times]

  def gaps(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Returns the steady answers' gaps between tokens from first_s until the last long prompt is done."""
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
  """Adds to each mode the ratio of its p99 gap to its own quiet run."""
  for name, ways in found.items():
    if name != "about":
      ways["p99_over_quiet"] = round(ways["busy"]["gap_p99_ms"] / ways["quiet"]["gap_p99_ms"], 2)
  return found


# --- Throughput against batch size ------------------------------------------------------------------------------------

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def knee(tok_s: dict[int, float]) -> int:
  """Returns the knee: the last batch size that a doubling with 1.5 times the tokens a second led to; else the first."""
  sizes = sorted(tok_s)
  found = sizes[0]
  for size, double in zip(sizes, sizes[1:], strict=False):
    if tok_s[double] < 1.5 * tok_s[size]:
      break
    found = double
  return found


def decode_rate(outcomes: Sequence[Outcome]) -> float:
  """Returns tokens a second while all requests decode: their number over the median gap between two tokens."""
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


# --- Two tenants ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tenants:
  """Two tenants with the same lengths; the large one sends 100 requests for each of the small one's.

  Attributes:
    num_small: requests of the small tenant.
    prompt_len, output_len: distributions.
    overload: requests a second of both, as a multiple of the device's capacity.
    slots, chunk: max_num_seqs and prefill_chunk. A new request waits for the running step and the launched one, so the
      chunk must be small beside a prompt for the wait to be small beside the prefill.
  """

  num_small: int = 20
  prompt_len: str = "uniform:1500:2500"
  output_len: str = "uniform:16:48"
  overload: float = 1.5
  slots: int = 128
  chunk: int = 256

  def rows(self) -> Rows:
    return _sampled_rows(self.prompt_len, self.output_len, 101 * self.num_small, seed=2)(pathlib.Path())

  def arrivals(self, capacity: float) -> tuple[list[tuple[float, int, int]], list[bool]]:
    """Returns (arrival_s, prompt, output) of both, and which are the small tenant's: one of every 101, at random."""
    rows, rng = timed(self.rows(), self.overload * capacity, seed=3), random.Random(3)
    small = [False] * len(rows)
    for start in range(0, len(rows), 101):
      small[start + rng.randrange(101)] = True
    return rows, small


def compare_tenants(ways: Mapping[str, Sequence[Outcome]], small: set[int | str]) -> dict[str, Any]:
  """Returns the small tenant's median time to first token: alone, and beside the large one under each policy."""
  found: dict[str, Any] = {}
  for name, outcomes in ways.items():
    ttfts = [outcome.ttft_s for outcome in outcomes if outcome.id in small]
    found[name] = {f"ttft_p{p}_ms": round((percentile(ttfts, p) or 0.0) * 1e3, 3) for p in (50, 90)}
  for name in ("fcfs", "fair"):
    found[name]["p50_over_alone"] = round(found[name]["ttft_p50_ms"] / found["alone"]["ttft_p50_ms"], 2)
  return found


# --- Flags ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: CommandParser) -> None:
  """Adds the flags that tools.study and tools.study.measured share."""
  parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="model folder")
  parser.add_argument("--traces", type=pathlib.Path, default=ROOT.parent / "shared" / "traces", help="folder of traces")
  parser.add_argument("--rounds", type=positive_int, default=1, help="rounds of each throughput part; medians count")
  parser.add_argument("--scale", type=positive_float, help="factor of lengths, instead of each part's own")
  parser.add_argument("--num_requests", type=positive_int, help="limit of requests, instead of each part's own")
  parser.add_argument("--output_tokens", type=positive_int, default=48, help="batch_size: tokens of each request")
  parser.add_argument("--num_blocks", type=positive_int, default=4096, help="see the server's flag of this name")
  parser.add_argument("--compile_cache_dir", default=str(pathlib.Path.home() / ".cache" / "sluice" / "programs"))
