"""Turns run files into one self-contained HTML page, and the same plots as PNG. Measures nothing.

  python -m tools.report chunked_*.jsonl static_*.jsonl --output=report
  python -m tools.report --step_trace=chunked=steps.jsonl --output=report

Run files come from --run_file or from tools.simulate --report (tools.report.run_file defines the format). Runs of one
label make one line in the plots over load. Bars compare runs at one load: of the loads that most labels share, the one
where the best label has most goodput. Goodput uses each run's own objectives, unless the flags here set them for all.
Step traces (the server's --trace_file) appear only in plots of steps. Needs matplotlib, which the `dev` extra has. Exit
code 2 with one line for bad input.
"""

import argparse
import base64
from collections.abc import Mapping, Sequence
import dataclasses
import html
import math
import pathlib
import sys
from typing import Any

from matplotlib.figure import Figure

from engine.errors import ConfigError
from engine.recorder import StepRecord
from tools.arguments import CommandParser, positive_float
from tools.report import plots as plots
from tools.report.latency import Objectives
from tools.report.run_file import read_run, steps_of_trace
from tools.report.shown_runs import Shown, likeness, prepared, side_by_side

_DPI = 150
_OF_A_RATE = ("rate", "seed", "num_requests")  # not a condition: the table has a row for each rate


# --- The page ---------------------------------------------------------------------------------------------------------

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 2px solid #888; vertical-align: bottom; }
th { white-space: normal; } tr.first td { border-top: 1px solid #888; }
.wide { overflow-x: auto; } img { max-width: 100%; } .note { color: #555; max-width: 60em; }
"""

# A run's figures: title, name, format.
_LATENCY: tuple[tuple[str, str, str], ...] = (
  ("ok", "completed", "{:,.0f}"),
  ("of", "requests", "{:,.0f}"),
  ("output tok/s", "output_tok_s", "{:,.1f}"),
  ("goodput req/s", "goodput_request_s", "{:.2f}"),
  ("met SLO", "slo_attainment", "{:.0%}"),
  ("TTFT p50 ms", "ttft_p50_ms", "{:,.1f}"),
  ("p99", "ttft_p99_ms", "{:,.1f}"),
  ("TPOT p50 ms", "tpot_p50_ms", "{:,.1f}"),
  ("p99", "tpot_p99_ms", "{:,.1f}"),
  ("ITL p99 ms", "itl_p99_ms", "{:,.1f}"),
  ("chunk gap p99 ms", "chunk_gap_p99_ms", "{:,.1f}"),
  ("stall p99 ms", "stall_p99_ms", "{:,.1f}"),
)
_FAIRNESS = (("fairness", "fairness", "{:.2f}"),)
# The accounts of a run's steps and requests: title, path, format.
_ACCOUNT: tuple[tuple[str, str, str], ...] = (
  ("padding", "account.padding_share", "{:.1%}"),
  ("of FLOPs", "account.padding_flops_share", "{:.1%}"),
  ("idle slot-steps", "account.idle_slots", "{:,}"),
  ("KV most", "account.kv.occupancy_max", "{:.1%}"),
  ("KV unfilled", "account.kv.fragmentation_mean", "{:.1%}"),
  ("host", "account.host_share", "{:.1%}"),
  ("queue p50 ms", "account_requests.queue_p50_ms", "{:,.1f}"),
  ("p99", "account_requests.queue_p99_ms", "{:,.1f}"),
  ("prefill p99 ms", "account_requests.prefill_p99_ms", "{:,.1f}"),
  ("decode p99 ms", "account_requests.decode_p99_ms", "{:,.1f}"),
  ("prompt cached", "account_requests.cached_share", "{:.1%}"),
  ("preempted", "account_requests.preempted_requests", "{:,}"),
)


def _table(shown: Sequence[Shown], columns: Sequence[tuple[str, str, str]]) -> str:
  head = "".join(f"<th>{html.escape(title)}</th>" for title in ("run", "req/s", *(column[0] for column in columns)))
  lines = []
  for index, one in enumerate(shown):
    cells = [html.escape(one.label), "burst" if math.isinf(one.load) else f"{one.load:.3g}"]
    for _, path, form in columns:
      value: Any = one.run.figures | one.figures
      for name in path.split("."):
        value = (value or {}).get(name)
      cells.append("-" if value is None else form.format(value))
    first = index == 0 or shown[index - 1].label != one.label
    lines.append(f"<tr{' class=first' * first}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
  rows = "\n".join(lines)
  return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def page(title: str, shown: Sequence[Shown], images: Sequence[tuple[str, str, pathlib.Path]], lead: str = "") -> str:
  """Returns the report as HTML.

  Args:
    title: the page's title.
    shown: the table's runs.
    images: heading, caption and PNG file of each plot.
    lead: HTML below the title.
  """
  parts = [f"<h1>{html.escape(title)}</h1>", lead]
  if shown:
    has_tenants = any("tenants" in one.figures for one in shown)
    parts.append(_table(shown, _LATENCY + _FAIRNESS * has_tenants))
    parts.append(
      '<p class="note">TTFT is the time from the intended arrival to the first token, TPOT the mean time of each token '
      "after it, ITL the time between tokens, stall the longest such time of a request. A request that failed or was "
      "refused misses its objectives and is in no percentile. A chunk of m tokens is one gap and m - 1 zeros in ITL; "
      "chunk gap is the time between messages.</p>"
    )
    if has_tenants:
      parts.append(
        '<p class="note">Fairness is the least that a tenant got of its max-min fair share of the tokens that were '
        "served while requests arrived; 1 is a fair division.</p>"
      )
    if any(one.run.steps or one.run.served for one in shown):
      parts.append(_table(shown, _ACCOUNT))
      parts.append(
        '<p class="note">Padding is the share of the tokens that steps computed, beside it weighted by FLOPs. An idle '
        "slot-step is a slot without a row in a step while a request waits for one. KV most is the largest share of "
        "the pool in use, KV unfilled the slots in running requests' blocks that no token fills. Host is its share of "
        "host and device time. Queue, prefill and decode are a request's phases in the engine.</p>"
      )
    parts.append(_conditions(shown))
  for heading, caption, path in images:
    data = base64.b64encode(path.read_bytes()).decode()
    parts.append(
      f"<h2>{html.escape(heading)}</h2>\n<p class='note'>{html.escape(caption)}</p>\n"
      f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{data}">'
    )
  body = "\n".join(parts)
  return (
    f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
    f"<style>{_CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
  )


def _conditions(shown: Sequence[Shown]) -> str:
  """Lists the runs' conditions, each different one once."""
  runs: dict[str, dict[str, list[str]]] = {}
  for one in shown:
    about = one.run.about
    workload = ", ".join(
      f"{name} {value}"
      for name, value in (about.get("workload") or {}).items()
      if value is not None and name not in _OF_A_RATE
    )
    machine = about.get("machine") or {}
    text = (
      f"model {about.get('model')}; workload: {workload}; {about.get('slots')} slots, {about.get('num_blocks')} "
      f"KV blocks of {about.get('block_size')}, rungs {', '.join(map(str, about.get('token_budgets') or ()))}; "
      f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('vector')}, Python {machine.get('python')}"
    )
    if costs := about.get("costs"):
      text = f"simulated, with step times of {costs.get('file')} ({costs.get('source')}); {text}"
    load = "all at once" if math.isinf(one.load) else f"{one.load:.3g}"
    runs.setdefault(text, {}).setdefault(one.label, []).append(load)
  items = []
  for text, loads in runs.items():
    names = "; ".join(f"{label} at {', '.join(found)}" for label, found in loads.items())
    items.append(f"<li><b>{html.escape('all' if len(runs) == 1 else names)}</b>: {html.escape(text)}</li>")
  return f"<details><summary>What ran</summary><ul class='note'>{''.join(items)}</ul></details>"


def _objectives(shown: Sequence[Shown]) -> str:
  """Lists the objectives, if all runs have the same."""
  found = {one.objectives for one in shown}
  if len(found) > 1:
    return ", which differ from run to run"
  limits = {name: limit for name, limit in dataclasses.asdict(found.pop()).items() if limit < math.inf}
  texts = [f"{name.removesuffix('_s').upper()} at most {limit * 1e3:g} ms" for name, limit in limits.items()]
  return f" ({', '.join(texts)})" if texts else " (none were set, so all did that ended well)"


def make_report(
  shown: Sequence[Shown], traces: Mapping[str, Sequence[StepRecord]], folder: pathlib.Path, title: str, lead: str = ""
) -> list[pathlib.Path]:
  """Writes report.html and the plots into `folder`; returns the files, the page first. `lead` is as for `page`."""
  images: list[tuple[str, str, pathlib.Path]] = []

  def add(name: str, heading: str, caption: str, figure: Figure) -> None:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=_DPI)
    images.append((heading, caption, path))

  if shown:
    add(
      "throughput_latency",
      "Throughput against latency",
      "Each point is a run; along a line the load that is offered grows. Right and low is good.",
      plots.plot_throughput(shown),
    )
    if any(math.isfinite(one.load) for one in shown):
      add(
        "goodput_load",
        "Goodput against load",
        f"Requests that met their objectives{_objectives(shown)}; those that failed or were refused did not.",
        plots.plot_goodput(shown),
      )
  beside = side_by_side(shown)
  at = f"at {beside[0].load:.3g} requests a second" if beside else ""
  if beside:
    at = "all at once" if math.isinf(beside[0].load) else at
    add("modes", f"Side by side, {at}", likeness(beside), plots.plot_modes(beside))
    caption = "The share of requests (of tokens, in the third) up to a time."
    add("cdf", f"Distributions, {at}", caption, plots.plot_cdfs(beside))
  sent = [one for one in beside if "tenants" in one.figures or "priorities" in one.figures]
  if sent:
    caption = "A tenant's fair share is what a max-min fair division of the served tokens gives it."
    add("senders", f"Tenants and priorities, {at}", caption, plots.plot_senders(sent))
  served = [one for one in beside if one.run.served]
  if served:
    add(
      "phases",
      f"Where requests spent their time, {at}",
      "In the engine: from arrival to the first step, from there to the first token, from there to the end.",
      plots.plot_phases(served),
    )
  steps: dict[str, Sequence[StepRecord]] = {one.label: one.run.steps for one in beside if one.run.steps}
  blocks = {one.label: int(one.run.about.get("num_blocks") or 0) for one in beside}
  steps |= traces
  if steps:
    add(
      "padding",
      f"Padding by rung{', ' + at if at else ''}",
      "All tokens that steps of a rung computed; the number above is the share of padding.",
      plots.plot_padding(steps),
    )
  held = {label: records for label, records in steps.items() if blocks.get(label)}
  if held:
    caption = "Of the decode side, where prefill and decode have pools of their own."
    add("kv", f"KV cache, {at}", caption, plots.plot_kv(held, blocks))
  labels = list(steps)
  for first in range(0, len(labels), plots.MOST_COLUMNS):
    add(
      f"steps_{first // plots.MOST_COLUMNS + 1}",
      f"Steps over time{', ' + at if at else ''}",
      "Device time of each step; tokens a second by kind; rows, queue, and slots that idle while requests wait.",
      plots.plot_steps({label: steps[label] for label in labels[first : first + plots.MOST_COLUMNS]}),
    )
  target = folder / "report.html"
  target.write_text(page(title, shown, images, lead), "utf-8")
  return [target, *(path for _, _, path in images)]


# --- Command line -----------------------------------------------------------------------------------------------------


def _named_path(text: str) -> tuple[str, str]:
  label, _, path = text.partition("=")
  if not label or not path:
    raise argparse.ArgumentTypeError(f"{text!r} must be LABEL=FILE")
  return label, path


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line: writes the files and prints their paths; returns 2 after one line for bad input."""
  parser = CommandParser("tools.report", __doc__)
  parser.add_argument(
    "runs", nargs="*", help="run files of tools.bench_serving, tools.bench_offline or tools.simulate --report"
  )
  parser.add_argument("--step_trace", type=_named_path, action="append", default=[], help="LABEL=FILE, a step trace")
  parser.add_argument("--output", default="report", help="folder to write into")
  parser.add_argument("--title", default="Sluice: measured runs", help="title of the page")
  parser.add_argument("--slo_ttft_ms", type=positive_float, default=math.inf, help="TTFT objective of all runs")
  parser.add_argument("--slo_tpot_ms", type=positive_float, default=math.inf, help="TPOT objective of all runs")
  parser.add_argument("--slo_e2e_ms", type=positive_float, default=math.inf, help="latency objective of all runs")
  args = parser.parse_args(argv)
  try:
    if not args.runs and not args.step_trace:
      raise ConfigError("there is nothing to report; give run files, or --step_trace=LABEL=FILE")
    runs = [read_run(path) for path in args.runs]
    for path, run in zip(args.runs, runs, strict=True):
      if not run.outcomes:
        raise ConfigError(f"run {path} has no request; make one with at least one")
    traces = {label: steps_of_trace(path) for label, path in args.step_trace}
    given = Objectives(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3, args.slo_e2e_ms / 1e3)
    folder = pathlib.Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    files = make_report(prepared(runs, given), traces, folder, args.title)
  except (ConfigError, OSError) as error:
    return parser.failed(error)
  print("\n".join(map(str, files)))
  return 0


if __name__ == "__main__":
  sys.exit(main())
