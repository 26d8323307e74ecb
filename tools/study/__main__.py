"""Studies batching: answers each part by arithmetic, bound, measurement and simulation. Measures nothing itself.

A part is a published statement about batching (`tools.study.claims`).

  python -m tools.study                                 everything, a quarter of an hour on two quiet cores
  python -m tools.study --sides=modelled                the part without a model: seconds
  python -m tools.study --only=tail,long_prompt         some parts; the others keep their last answers

Writes study.json and README.md into --output. There are three sides: `modelled`, the Scheduler's own batches and the
simulator with a cost table; `demo`, a model folder on this machine; `wide`, a model of 125M random parameters, whose
steps are mostly matmuls. Measured parts run in separate processes (tools.study.measured), one at a time. Lengths are
scaled to the machine, and the table shows the scale. Exit code 1 if tokens differ between modes; 2 with one line for
bad input or a failed part, after the other parts have run.
"""

from collections.abc import Sequence
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from engine.errors import ConfigError, EngineError
from tools.arguments import CommandParser
from tools.measure import ROOT, commit, machine, run_tool, write_result
from tools.simulate.step_costs import StepCosts
from tools.study import claims as claims
from tools.study import simulated as simulated

SIDES = ("modelled", "demo", "wide")
_CASES = {case.name: case for case in claims.CASES}
_OTHERS = {
  "formulas": "the goodput formulas of static and continuous batching, computed from step traces",
  "tail": "tail latency is 1.5 to 2 times the median, at 50, 70 and 90 % load",
  "long_prompt": "a 4,000-token prompt as 8 chunks of 500 among steady decodes: the largest gap between tokens",
  "batch_size": "throughput grows with the batch: 64 requests give 64 times as much",
  "tenants": "two tenants offering 100 to 1: the small one's time to first token",
}
_WIDE = {"num_layers": 12, "model_dim": 768, "num_heads": 12, "num_kv_heads": 4, "hidden_dim": 2048}
# A tenth of the demo's speed: shorter lengths and fewer requests, but as long a prompt beside a step of decodes.
_WIDE_SCALE = {"idle_490": 0.2, "padding_4b": 0.4, "long_prompt": 0.06, "tenants": 0.025}
_WIDE_REQUESTS = {"tail": 160, "batch_size": 256, "tenants": 4}
_TWO_DEVICES = "--xla_force_host_platform_device_count=2"


# --- Answers ----------------------------------------------------------------------------------------------------------


def modelled(part: str, traces: pathlib.Path, costs: StepCosts) -> dict[str, Any]:
  """Returns arithmetic and simulation of a part. Raises EngineError."""
  if part in _CASES:
    case = _CASES[part]
    rows = case.rows(traces)
    found: dict[str, Any] = {"claim": case.claim, **simulated.allowed(rows, case.slots)}
    if part.startswith("padding"):
      slots, _ = simulated.static_slots(rows[: case.slots], case.slots)
      found["one_batch"] = slots._asdict() | {"padding_share": round(1 - slots.useful / slots.paid, 4)}
    if part == "idle_490":
      found["idle_steps"] = simulated.idle_steps(10, 500)
    return found | simulated.simulate_case(rows, case.slots, costs)
  claim = {"claim": _OTHERS[part]}
  match part:
    case "formulas":
      chosen = _CASES["coding_assistant"]
      return claim | simulated.simulate_formulas(chosen.rows(traces), chosen.slots, costs)
    case "tail":
      return claim | simulated.simulate_tail(_CASES["azure_conv"].rows(traces), costs)
    case "long_prompt":
      return claim | simulated.simulate_long_prompts(costs)
    case "batch_size":
      return claim | simulated.simulate_batch_sizes(costs)
  return claim | simulated.simulate_tenants(costs)


def measured(part: str, side: str, args: Any) -> dict[str, Any]:
  """Runs one part in its own process. Raises ConfigError."""
  command = [sys.executable, "-m", "tools.study.measured", f"--part={part}", f"--traces={args.traces}"]
  command += [f"--{name}={getattr(args, name)}" for name in ("rounds", "output_tokens", "num_blocks")]
  command += [f"--compile_cache_dir={args.compile_cache_dir}"]
  scale, count = args.scale, args.num_requests
  if side == "wide":
    scale, count = scale or _WIDE_SCALE.get(part, 0.04), count or _WIDE_REQUESTS.get(part, 64)
  command += [f"--model={wide_model(args.wide_model) if side == 'wide' else args.model}"]
  command += [f"--scale={scale}"] * (scale is not None) + [f"--num_requests={count}"] * (count is not None)
  if part == "long_prompt":
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), _TWO_DEVICES]).strip()
    command = ["env", f"XLA_FLAGS={flags}", *command]
  return run_tool(command, f"{part}, {side}")


def answer(part: str, side: str, args: Any, costs: StepCosts) -> dict[str, Any]:
  """Returns one side's answer. Public traces that do not ship with Sluice may be missing. Raises EngineError."""
  if part in _CASES:
    try:
      _CASES[part].rows(args.traces)
    except ConfigError as error:
      print(f"{part}: {error}", file=sys.stderr)
      return {"skipped": "trace not at hand"}
  found = modelled(part, args.traces, costs) if side == "modelled" else measured(part, side, args)
  return found | {"commit": commit()}


def wide_model(folder: str) -> str:
  """Makes the model of 125M parameters if it does not exist."""
  if not (pathlib.Path(folder) / "config.json").exists():
    pathlib.Path(folder).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tools.make_random_model", f"--output={folder}", "--family=llama"]
    command += [f"--{name}={value}" for name, value in _WIDE.items()] + ["--vocab_size=32000", "--dtype=float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
      raise ConfigError(f"the 125M model cannot be made in {folder}: {done.stderr.strip().splitlines()[-1:]}")
  return folder


def targets(parts: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the target figures: the figure, its side, the value, the limit, whether it is reached."""
  found: list[dict[str, Any]] = []

  def add(what: str, side: str, value: float, limit: float, reached: bool) -> None:
    found.append({"what": what, "side": side, "value": round(value, 3), "limit": limit, "reached": reached})

  for name, case in _CASES.items():
    for side, answer in parts.get(name, {}).items():
      for mode in ("continuous", "chunked"):
        if case.is_trace and f"{mode}_over_static" in answer:
          share = answer[f"{mode}_over_static"] / answer["idle_bound"]
          add(f"{name}: {mode} over static, in shares of what idle slots allow", side, share, 0.9, share >= 0.9)
  for side, answer in parts.get("long_prompt", {}).items():
    if "chunked" in answer:
      for way, least in (("chunked", False), ("chunked_half", False), ("disaggregated", False), ("inline", True)):
        value = answer[way]["p99_over_quiet"]
        what = f"long prompts {way.replace('_half', ', half as large')}: p99 gap in quiet ones"
        add(what + (", which is to be above" if least else ""), side, value, 3.0, value > 3 if least else value <= 3)
  for side, answer in parts.get("tenants", {}).items():
    if "fair" in answer:
      value = answer["fair"]["p50_over_alone"]
      add("two tenants: the small one's TTFT p50 over that alone", side, value, 2.0, value <= 2)
  return found


# --- The page ---------------------------------------------------------------------------------------------------------


def markdown(study: dict[str, Any]) -> str:
  """Formats the answered parts of the study as a page."""
  parts = study["parts"]
  lines = [
    "# Batching modes: statements, bounds, answers",
    "",
    "`python -m tools.study` makes this page; `study.json` has the numbers with all digits. Every mode has the same"
    " requests,",
    "pool, slots and executables. Commit: "
    + ", ".join(sorted({answer.get("commit", "unknown") for part in parts.values() for answer in part.values()}))
    + ".",
    "",
    "| word | meaning |",
    "| --- | --- |",
    "| *idle slots allow* | the ratio of steps, if all steps took equal time |",
    "| *padding allows* | the ratio of token slots, prompts included, if each cost the same |",
    "| *simulated*, `modelled` | the real scheduler in virtual time under a **modeled** table of step times "
    f"({study['costs'].get('model')}, {study['costs'].get('source')}) |",
    f"| *demo*, *125M* (`wide` further down) | runs on {study['machine']['cores']} cores ({study['machine']['cpu']}), "
    "with lengths scaled as stated, greedy and forced |",
    "",
    "## Static against chunked",
    "",
    "| statement | slots | padding | idle slots allow | padding allows | simulated, full lengths | demo | 125M |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
  ]
  for name, case in _CASES.items():
    answers = parts.get(name)
    if answers:
      model = answers.get("modelled", {})
      cells = [
        model.get(key) for key in ("slots", "padding_share", "idle_bound", "padding_bound", "chunked_over_static")
      ]
      if model.get("padding_share") is not None:
        cells[1] = f"{model['padding_share']:.1%}"
      cells += [_ratio(answers.get(side)) for side in ("demo", "wide")]
      if "skipped" in model:
        cells[0] = model["skipped"]
      lines.append(_row(case.claim, *cells))
  lines += [
    "",
    "A measured cell has the ratio, and in parentheses: idle slots allow, padding allows on those requests; scale of"
    " lengths.",
    "Idle slots count steps of outputs alone, as if prompts took no time. Where prompts take most of it, as in Azure's"
    " code",
    "trace at full length, padding bounds the gain.",
    "",
  ]
  for name in ("padding_4", "padding_4b", "padding_32"):
    batch = parts.get(name, {}).get("modelled", {}).get("one_batch")
    if batch:
      lines.append(
        f"- {_CASES[name].claim}. By the scheduler: {batch['useful']:,} of {batch['paid']:,} slots are useful, "
        f"{batch['padding_share']:.1%} is padding."
      )
  idle = parts.get("idle_490", {}).get("modelled", {}).get("idle_steps")
  if idle is not None:
    lines.append(f"- {_CASES['idle_490'].claim}. By the scheduler: {idle} steps.")
  tokens = [answer["tokens"] for part in parts.values() for answer in part.values() if "tokens" in answer]
  if tokens:
    same, total = (sum(entry[key] for entry in tokens) for key in ("identical_requests", "requests"))
    lines.append(f"- Static and chunked runs give identical tokens for {same} of {total} requests.")
  for part, section in (
    ("formulas", _formulas),
    ("tail", _tail),
    ("long_prompt", _long_prompt),
    ("batch_size", _batch_size),
    ("tenants", _tenants),
  ):
    answers = {side: answer for side, answer in parts.get(part, {}).items() if "skipped" not in answer}
    if answers:
      lines += ["", f"## {_OTHERS[part][0].upper()}{_OTHERS[part][1:]}", "", *section(answers)]
  lines += [
    "",
    "## Figures to reach",
    "",
    '"In shares of what idle slots allow" and "p99 gap in quiet ones" are ratios: of the speed-up over its bound, and'
    " of the",
    "busy p99 gap over the quiet one.",
    "",
    "| figure | side | value | limit | reached |",
    "| --- | --- | --- | --- | --- |",
  ]
  for entry in study["targets"]:
    lines.append(
      _row(entry["what"], entry["side"], entry["value"], entry["limit"], "yes" if entry["reached"] else "**no**")
    )
  return "\n".join(lines) + "\n"


def _row(*cells: Any) -> str:
  return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def _ratio(answer: dict[str, Any] | None) -> str | None:
  if not answer:
    return None
  if "skipped" in answer:
    return answer["skipped"]
  return (
    f"**{answer['chunked_over_static']}** ({answer['idle_bound']}, {answer['padding_bound']}; x{answer['scale']:g})"
  )


def _formulas(answers: dict[str, Any]) -> list[str]:
  lines = [
    "Static: sum(n) / (B max T), times B. Continuous: sum(n) / (sum(T) / B_eff), where B_eff is the mean requests a "
    "step.",
    "",
    "| side | mode | by formula, tokens/s | measured, tokens/s | formula / measured |",
    "| --- | --- | --- | --- | --- |",
  ]
  for side, answer in answers.items():
    for mode in ("static", "chunked"):
      row = answer[mode]
      lines.append(_row(side, mode, row["formula_tok_s"], row["measured_tok_s"], row["formula_over_measured"]))
    lines.append(_row(side, "ratio", answer["formula_ratio"], answer["measured_ratio"], ""))
  return lines


def _tail(answers: dict[str, Any]) -> list[str]:
  lines = [
    "Azure conversations with Poisson arrivals. The load is a share of the rate sustained with all requests there at"
    " once.",
    "Cells are p99 / p50.",
    "",
    "| side | load | end to end, a token | end to end | TTFT | ITL |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  for side, answer in answers.items():
    for load in claims.LOADS:
      row = answer[f"load_{load:.0%}"]
      values = [row[f"{name}_p99_over_p50"] for name in ("e2e_per_token", "e2e", "ttft", "itl")]
      lines.append(_row(side, f"{load:.0%}", *values))
  return lines


def _long_prompt(answers: dict[str, Any]) -> list[str]:
  lines = [
    "| side | steady answers, long prompt, chunk | mode | quiet p99, ms | busy p99, ms | ratio | largest gap, ms | "
    "TTFT of the long prompts, ms |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
  ]
  for side, answer in answers.items():
    about = answer["about"]
    for way in ("inline", "chunked", "chunked_half", "disaggregated"):
      row, busy = answer[way], answer[way]["busy"]
      chunk = {"inline": "whole", "disaggregated": "elsewhere", "chunked_half": about["prompt"] // 16}
      what = f"{about['num_steady']}, {about['prompt']}, {chunk.get(way, about['prompt'] // 8)}"
      cells = (row["quiet"]["gap_p99_ms"], busy["gap_p99_ms"], row["p99_over_quiet"], busy["gap_max_ms"])
      lines.append(_row(side, what, way.removesuffix("_half"), *cells, busy["long_ttft_p50_ms"]))
  return [*lines, "", "On the CPU both devices of disaggregated batching share the same cores."]


def _batch_size(answers: dict[str, Any]) -> list[str]:
  lines = [_row("side", *claims.BATCH_SIZES, "gain at 64", "knee"), "| --- " * (len(claims.BATCH_SIZES) + 3) + "|"]
  for side, answer in answers.items():
    rates = {int(size): rate for size, rate in answer["decode_tok_s"].items()}
    cells = [f"{rates[size]:,.0f}" if size in rates else "" for size in claims.BATCH_SIZES]
    lines.append(_row(side, *cells, answer["gain_at_64"], answer["knee"]))
  return ["Decode tokens a second, by requests at once. The knee is the last doubling that gave 1.5 times.", "", *lines]


def _tenants(answers: dict[str, Any]) -> list[str]:
  lines = ["| side | policy | TTFT p50, ms | p90, ms | p50 over alone |", "| --- | --- | --- | --- | --- |"]
  for side, answer in answers.items():
    for way in ("alone", "fcfs", "fair"):
      row = answer[way]
      lines.append(_row(side, way, row["ttft_p50_ms"], row["ttft_p90_ms"], row.get("p50_over_alone")))
  about = next(iter(answers.values()))["about"]
  return [
    f"Both offer {about['overload']} times the sustained rate. 100 of 101 requests are the large one's.",
    "",
    *lines,
  ]


# --- The command ------------------------------------------------------------------------------------------------------


def _names(text: str, known: Sequence[str], flag: str) -> list[str]:
  names = [name for name in text.split(",") if name]
  bad = [name for name in names if name not in known]
  if bad:
    raise ConfigError(f"{flag} names {bad[0]!r}; known are {', '.join(known)}")
  return names or list(known)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; writes the targets to standard error and one JSON line to standard output."""
  parser = CommandParser("tools.study", __doc__)
  parser.add_argument("--only", default="", help="parts, separated by commas; empty: all")
  parser.add_argument("--sides", default="", help=f"some of {', '.join(SIDES)}, separated by commas; empty: all")
  parser.add_argument("--output", type=pathlib.Path, default=ROOT / "benchmarks" / "batching", help="folder")
  parser.add_argument("--costs", default=str(ROOT / "benchmarks" / "costs" / "llama_8b_h200_roofline.json"))
  parser.add_argument(
    "--wide_model", default=str(pathlib.Path.home() / ".cache" / "sluice" / "models" / "random-125m"), help="made once"
  )
  claims.add_arguments(parser)
  args = parser.parse_args(argv)
  file = args.output / "study.json"
  try:
    only, wanted = _names(args.only, claims.PARTS, "--only"), _names(args.sides, SIDES, "--sides")
    costs = StepCosts.load(args.costs)
    parts: dict[str, Any] = json.loads(file.read_text("utf-8"))["parts"] if file.exists() else {}
    args.output.mkdir(parents=True, exist_ok=True)
    failed = False
    for part in only:
      for side in wanted:
        try:
          parts.setdefault(part, {})[side] = answer(part, side, args, costs)
        except EngineError as error:
          failed = True
          print(f"tools.study: {part}, {side}: {' '.join(str(error).split())}", file=sys.stderr)
      study = {"parts": parts, "targets": targets(parts), "costs": dict(costs.about), "machine": machine()}
      write_result(str(file), study)  # after each part, so that finished answers are kept
      (args.output / "README.md").write_text(markdown(study), "utf-8")
  except (EngineError, OSError, KeyError, ValueError) as error:
    return parser.failed(error)
  for entry in study["targets"]:
    verdict = "reached" if entry["reached"] else "NOT reached"
    print(f"{entry['what']} ({entry['side']}): {entry['value']}, limit {entry['limit']}: {verdict}", file=sys.stderr)
  tokens = [answer["tokens"] for part in only for answer in parts[part].values() if "tokens" in answer]
  differing = sum(entry["requests"] - entry["identical_requests"] for entry in tokens)
  print(json.dumps({"targets": study["targets"], "differing_requests": differing}), flush=True)
  return 2 if failed else int(differing > 0)


if __name__ == "__main__":
  sys.exit(main())
