"""Turns kept runs into one HTML page that needs nothing else, and the same plots as PNG. Measures nothing.

  python -m tools.bench_report chunked_*.jsonl static_*.jsonl --output=report
  python -m tools.bench_report --step_trace=chunked=steps.jsonl --output=report

Runs are the files of --run_file (tools.run_file has the format). Runs of one label are one line in the plots over load,
and what is side by side is side by side at one load: the highest that most labels share. Goodput counts the objectives
that a run was made with, or those given here for all. Step traces (--trace_file of the server) have steps only, and
show up where steps do. Needs matplotlib, which the `dev` extra has. Exit code 2 with one line for bad input.
"""

import argparse
import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import html
import math
import pathlib
import sys
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from engine.batching import BATCHING
from engine.errors import ConfigError
from engine.recorder import StepRecord
from tools.arguments import CommandParser, positive_float
from tools.latency import Objectives, Outcome, percentile, summary
from tools.run_file import Run, read_run, steps_of_trace

_ORDER = ("static", "dynamic", "continuous", "chunked", "disaggregated")  # from the oldest idea to the newest
_COLORS = (
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#e69f00",
  "#56b4e9",
  "#6f4e7c",
  "#555555",
)  # after Okabe and Ito
_MARKERS = "osD^vPX*"
_DECODE, _PREFILL, _PADDING, _MIXED = "#0072b2", "#e69f00", "#d0d0d0", "#cc79a7"
_SHORTEST = 1e-4  # seconds, on axes of times: zeros, of tokens in one chunk, have no place on a logarithmic one
_DPI = 150
_BINS = 120  # of time, in plots of steps
assert set(_ORDER) == set(BATCHING)


@dataclasses.dataclass(frozen=True)
class Shown:
  """A run and what the report says of it.

  Attributes:
    run: as it was kept.
    load: requests a second that were offered; infinite for a burst.
    figures: of tools.latency.summary, with the report's objectives.
  """

  run: Run
  load: float
  figures: dict[str, Any]

  @property
  def label(self) -> str:
    return self.run.label


def offered_load(run: Run) -> float:
  """Requests a second over the time in which they were to arrive; infinite if that is no time."""
  times = [outcome.intended_s for outcome in run.outcomes]
  span = max(times) - min(times)
  return (len(times) - 1) / span if span > 0 else math.inf


def nominal_load(run: Run) -> float:
  """The rate that was asked for, where there was one; else what was offered."""
  rate = (run.about.get("workload") or {}).get("rate")
  return float(rate) if isinstance(rate, int | float) else offered_load(run)


def objectives_of(run: Run, given: Objectives) -> Objectives:
  """`given` where it limits anything, else the run's own."""
  return given if given != Objectives() else Objectives(**(run.about.get("slo") or {}))


def prepared(runs: Iterable[Run], given: Objectives) -> list[Shown]:
  """Runs by label and load, with their figures."""
  shown = []
  for run in runs:
    lens = zip(run.outcomes, run.prompt_lens, strict=True)
    prompt_tokens = sum(length for outcome, length in lens if outcome.ok)
    figures = summary(run.outcomes, prompt_tokens, objectives_of(run, given))
    shown.append(Shown(run, nominal_load(run), figures))
  return sorted(shown, key=lambda one: (_rank(one.label), one.label, one.load))


def _rank(label: str) -> int:
  return _ORDER.index(label) if label in _ORDER else len(_ORDER)


def side_by_side(shown: Sequence[Shown]) -> list[Shown]:
  """One run a label, all at one load: the highest of those that most labels share."""
  by_load: dict[str, dict[str, Shown]] = {}
  for one in shown:
    by_load.setdefault(f"{one.load:.3g}", {})[one.label] = one
  best = max(by_load.values(), key=lambda found: (len(found), max(one.load for one in found.values())), default={})
  return list(best.values())


# --- Plots ------------------------------------------------------------------------------------------------------------


def _style(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
  """Color and marker of each label; a way of batching has the same in every plot."""
  distinct = sorted(set(labels), key=lambda label: (_rank(label), label))
  free = [index for index in range(len(_COLORS)) if index >= len(_ORDER) or _ORDER[index] not in distinct]
  style, others = {}, 0
  for label in distinct:
    index = _rank(label)
    if index == len(_ORDER):
      index, others = free[others % len(free)], others + 1
    style[label] = _COLORS[index], _MARKERS[index]
  return style


def _figure(columns: int, rows: int = 1, width: float = 4.6, height: float = 3.5) -> tuple[Figure, list[Axes]]:
  figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
  axes = figure.subplots(rows, columns, squeeze=False)
  flat = [axis for line in axes for axis in line]
  for axis in flat:
    axis.grid(True, color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
      axis.spines[side].set_visible(False)
  return figure, flat


def _log_axis(axis: Axes, which: Literal["x", "y"]) -> None:
  """Logarithmic, with a few plain numbers at its ticks; for an axis whose data are drawn."""
  if which == "x":
    axis.set_xscale("log")
  else:
    axis.set_yscale("log")
  scaled, (low, high) = (axis.xaxis, axis.get_xlim()) if which == "x" else (axis.yaxis, axis.get_ylim())
  scaled.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 150 * low else (1.0,)))
  scaled.set_major_formatter(lambda value, _: _number(value))
  scaled.set_minor_formatter(NullFormatter())
  axis.tick_params(axis=which, labelsize=8)


def _legend_below(figure: Figure, axis: Axes) -> None:
  handles, labels = axis.get_legend_handles_labels()
  if handles:
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)


def _series(shown: Sequence[Shown], name: str) -> dict[str, list[tuple[Shown, float]]]:
  lines: dict[str, list[tuple[Shown, float]]] = {}
  for one in shown:
    value = one.figures.get(name)
    if value is not None:
      lines.setdefault(one.label, []).append((one, value))
  return lines


def plot_throughput(shown: Sequence[Shown]) -> Figure:
  """Latency over throughput; each point is a run, with the load that was offered."""
  figure, axes = _figure(3)
  style = _style(one.label for one in shown)
  names = {
    "ttft_p99_ms": "TTFT p99, ms",
    "itl_p99_ms": "time between tokens p99, ms",
    "tpot_p50_ms": "time per output token p50, ms",
  }
  for axis, (name, title) in zip(axes, names.items(), strict=True):
    for label, points in _series(shown, name).items():
      color, marker = style[label]
      x, y = [one.figures["output_tok_s"] for one, _ in points], [value for _, value in points]
      axis.plot(x, y, color=color, marker=marker, label=label, linewidth=1.6, markersize=6)
    axis.set_xlabel("output tokens a second")
    axis.set_title(title, fontsize=11)
    _log_axis(axis, "y")
    axis.set_xlim(left=0)
  _legend_below(figure, axes[0])
  return figure


def plot_goodput(shown: Sequence[Shown]) -> Figure:
  """Requests that met their objectives, and their share, over the load offered."""
  figure, axes = _figure(2)
  finite = [one for one in shown if math.isfinite(offered_load(one.run))]
  style = _style(one.label for one in shown)
  top = max((offered_load(one.run) for one in finite), default=1.0)
  axes[0].plot([0, top], [0, top], color="#999999", linestyle=":", linewidth=1.2, label="all met")
  for axis, name in zip(axes, ("goodput_request_s", "slo_attainment"), strict=True):
    for label, points in _series(finite, name).items():
      color, marker = style[label]
      x, y = [offered_load(one.run) for one, _ in points], [value for _, value in points]
      axis.plot(x, y, color=color, marker=marker, label=label, linewidth=1.6, markersize=6)
    axis.set_xlabel("requests a second offered")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
  axes[0].set_title("goodput, requests a second", fontsize=11)
  axes[1].set_title("requests that met their objectives", fontsize=11)
  axes[1].set_ylim(0, 1.05)
  axes[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  _legend_below(figure, axes[0])
  return figure


def plot_cdfs(shown: Sequence[Shown]) -> Figure:
  """What share of requests, or tokens, was at least so quick."""
  figure, axes = _figure(4, width=3.7)
  style = _style(one.label for one in shown)
  kinds: dict[str, Callable[[Outcome], Iterable[float | None]]] = {
    "TTFT, s": lambda outcome: (outcome.ttft_s,),
    "time per output token, s": lambda outcome: (outcome.tpot_s,),
    "time between tokens, s": lambda outcome: outcome.itl_s,
    "whole answer, s": lambda outcome: (outcome.e2e_s,),
  }
  for axis, (title, values_of) in zip(axes, kinds.items(), strict=True):
    lowest: list[float] = []  # what nearly all exceed: single quick ones would stretch the axis
    for one in shown:
      values = sorted(
        value for outcome in one.run.outcomes if outcome.ok for value in values_of(outcome) if value is not None
      )
      shares = [(index + 1) / len(values) for index in range(len(values))]
      times = [max(value, _SHORTEST) for value in values]
      lowest += [max(value, _SHORTEST) for value in (percentile(values, 4),) if value is not None]
      axis.step(times, shares, where="post", color=style[one.label][0], label=one.label)
    axis.set_xscale("log")
    if lowest:
      axis.set_xlim(left=min(lowest) / 1.5)
    _log_axis(axis, "x")
    axis.set_ylim(0, 1.02)
    axis.set_title(title, fontsize=11)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  _legend_below(figure, axes[0])
  return figure


def plot_modes(shown: Sequence[Shown]) -> Figure:
  """One bar a run for each figure that matters."""
  figure, axes = _figure(4, rows=2, width=3.7, height=2.9)
  style = _style(one.label for one in shown)
  names = {
    "output_tok_s": "output tokens a second",
    "goodput_request_s": "goodput, requests a second",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "tpot_p99_ms": "time per output token p99, ms",
    "itl_p99_ms": "time between tokens p99, ms",
    "stall_p99_ms": "longest gap of a request p99, ms",
    "padding": "padding, share of computed tokens",
  }
  for axis, (name, title) in zip(axes, names.items(), strict=True):
    values = [padding_share(one.run.steps) if name == "padding" else one.figures[name] for one in shown]
    positions = range(len(shown))
    bars = axis.bar(positions, [value or 0.0 for value in values], color=[style[one.label][0] for one in shown])
    texts = ["-" if value is None else f"{value:.0%}" if name == "padding" else _number(value) for value in values]
    axis.bar_label(bars, texts, fontsize=8, padding=2)
    axis.set_xticks(list(positions), [one.label for one in shown], rotation=25, ha="right", fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_title(title, fontsize=10)
    axis.grid(False, axis="x")
    axis.margins(y=0.15)
    if name == "padding":
      axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  return figure


def padding_share(steps: Sequence[StepRecord]) -> float | None:
  """Of all tokens that steps computed; None without steps."""
  computed = sum(step.shape_tokens for step in steps)
  return sum(step.padding for step in steps) / computed if computed else None


def plot_padding(steps: Mapping[str, Sequence[StepRecord]]) -> Figure:
  """Tokens of all steps of a rung, by what they were; a panel a label, the same axis for all."""
  columns = min(len(steps), 3)
  rows = math.ceil(len(steps) / columns)
  figure, axes = _figure(columns, rows, height=3.0)
  rungs = sorted({step.shape_tokens for records in steps.values() for step in records})
  top = 0
  for axis, (label, records) in zip(axes, steps.items(), strict=False):
    base = [0] * len(rungs)
    parts = {
      "decode": (_DECODE, lambda step: step.decode_tokens),
      "prefill": (_PREFILL, lambda step: step.prefill_tokens),
      "padding": (_PADDING, lambda step: step.padding),
    }
    for name, (color, count) in parts.items():
      heights = [sum(count(step) for step in records if step.shape_tokens == rung) for rung in rungs]
      axis.bar(range(len(rungs)), heights, bottom=base, color=color, label=name, width=0.75)
      base = [below + height for below, height in zip(base, heights, strict=True)]
    for position, rung in enumerate(rungs):
      share = padding_share([step for step in records if step.shape_tokens == rung])
      if share is not None:
        axis.annotate(f"{share:.0%}", (position, base[position]), ha="center", va="bottom", fontsize=8, color="#555555")
    top = max(top, *base)
    axis.set_xticks(range(len(rungs)), [str(rung) for rung in rungs])
    axis.set_xlabel("rung, tokens")
    axis.set_title(f"{label}: {padding_share(records):.0%} padding", fontsize=11)
    axis.grid(False, axis="x")
  for axis in axes[: len(steps)]:
    axis.set_ylim(0, top * 1.1)
    axis.yaxis.set_major_formatter(lambda value, _: _number(value))
  for axis in axes[len(steps) :]:
    axis.set_visible(False)
  axes[0].set_ylabel("tokens computed")
  _legend_below(figure, axes[0])
  return figure


def plot_steps(label: str, steps: Sequence[StepRecord]) -> Figure:
  """A run over time: how long steps took, what they held, and how full the engine was."""
  figure, axes = _figure(1, rows=3, width=9.5, height=2.3)
  begin = min(step.time for step in steps)
  end = max(step.time for step in steps)
  width = max(end - begin, 1e-9) / _BINS
  kinds = {
    "only decodes": (_DECODE, [step for step in steps if not step.prefill_tokens]),
    "only prefill": (_PREFILL, [step for step in steps if not step.decode_tokens]),
    "both": (_MIXED, [step for step in steps if step.decode_tokens and step.prefill_tokens]),
  }
  for name, (color, found) in kinds.items():
    axes[0].scatter(
      [step.time for step in found], [step.device_s * 1e3 for step in found], s=5, color=color, label=name, linewidths=0
    )
  _log_axis(axes[0], "y")
  axes[0].set_ylabel("device, ms a step")
  axes[0].set_title(f"{label}: {len(steps):,} steps", fontsize=11)
  bins: list[list[StepRecord]] = [[] for _ in range(_BINS)]
  for step in steps:
    bins[min(int((step.time - begin) / width), _BINS - 1)].append(step)
  times = [begin + (index + 0.5) * width for index in range(_BINS)]
  rates = [
    [sum(getattr(step, name) for step in found) / width for found in bins]
    for name in ("decode_tokens", "prefill_tokens", "padding")
  ]
  names = ("decode", "prefill", "padding")
  axes[1].stackplot(times, rates, colors=(_DECODE, _PREFILL, _PADDING), labels=names, step="mid")
  axes[1].set_ylabel("tokens a second")
  axes[1].yaxis.set_major_formatter(lambda value, _: _number(value))
  for side in sorted({step.side for step in steps}):
    found = [step for step in steps if step.side == side]
    where = f", {side} side" if side else ""
    dashes = "--" if side == "prefill" else "-"
    for name, color in (("num_rows", _DECODE), ("num_waiting", _PREFILL), ("idle_slots", "#d55e00")):
      text = {"num_rows": "rows of the step", "num_waiting": "waiting", "idle_slots": "idle slots"}[name] + where
      values = [getattr(step, name) for step in found]
      axes[2].plot([step.time for step in found], values, dashes, color=color, linewidth=1.0, label=text)
  axes[2].set_ylabel("requests, slots")
  axes[2].yaxis.set_major_locator(MaxNLocator(integer=True))
  axes[2].set_xlabel("seconds")
  for axis in axes:
    axis.set_xlim(begin, end if end > begin else begin + 1)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=8, markerscale=2)
  return figure


def plot_kv(steps: Mapping[str, Sequence[StepRecord]], num_blocks: Mapping[str, int]) -> Figure:
  """KV blocks in use over time, and how much of the room in them is filled."""
  figure, axes = _figure(2)
  style = _style(steps)
  for label, records in steps.items():
    found = [step for step in records if step.side != "prefill" and step.kv_slots] or list(records)
    times = [step.time for step in found]
    used = [step.blocks_used / num_blocks[label] for step in found]
    filled = [step.kv_tokens / step.kv_slots if step.kv_slots else 0.0 for step in found]
    axes[0].plot(times, used, color=style[label][0], label=label, linewidth=1.2)
    axes[1].plot(times, filled, color=style[label][0], linewidth=1.2)
  axes[0].set_title("KV blocks in use", fontsize=11)
  axes[1].set_title("of their room filled with tokens", fontsize=11)
  for axis in axes:
    axis.set_xlabel("seconds")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  axes[1].set_ylim(0, 1.05)
  _legend_below(figure, axes[0])
  return figure


def _number(value: float) -> str:
  """Three digits that matter, and no exponent."""
  if value >= 1e6:
    return f"{value / 1e6:.3g}M"
  if value >= 1e4:
    return f"{value / 1e3:.3g}k"
  return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- The page ---------------------------------------------------------------------------------------------------------

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 2px solid #888; vertical-align: bottom; }
.wide { overflow-x: auto; } img { max-width: 100%; } .note { color: #555; max-width: 60em; }
"""

_COLUMNS: tuple[tuple[str, str, str], ...] = (
  ("ok", "completed", "{:,.0f}"),
  ("of", "requests", "{:,.0f}"),
  ("output tok/s", "output_tok_s", "{:,.1f}"),
  ("goodput req/s", "goodput_request_s", "{:.2f}"),
  ("met SLO", "slo_attainment", "{:.0%}"),
  ("TTFT p50 ms", "ttft_p50_ms", "{:,.1f}"),
  ("TTFT p99 ms", "ttft_p99_ms", "{:,.1f}"),
  ("TPOT p50 ms", "tpot_p50_ms", "{:,.1f}"),
  ("TPOT p99 ms", "tpot_p99_ms", "{:,.1f}"),
  ("ITL p99 ms", "itl_p99_ms", "{:,.1f}"),
  ("chunk gap p99 ms", "chunk_gap_p99_ms", "{:,.1f}"),
  ("stall p99 ms", "stall_p99_ms", "{:,.1f}"),
)


def _row(one: Shown) -> str:
  cells = [html.escape(one.label), "burst" if math.isinf(one.load) else f"{one.load:.3g}"]
  for _, name, form in _COLUMNS:
    value = one.figures.get(name)
    cells.append("-" if value is None else form.format(value))
  account = one.run.figures.get("account") or {}
  kv = account.get("kv") or {}
  for share in (
    account.get("padding_share"),
    account.get("padding_flops_share"),
    kv.get("occupancy_max"),
    kv.get("fragmentation_mean"),
    account.get("host_share"),
  ):
    cells.append("-" if share is None else f"{share:.1%}")
  idle = account.get("idle_slots")
  cells.append("-" if idle is None else f"{idle:,}")
  return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def page(title: str, shown: Sequence[Shown], images: Sequence[tuple[str, str, pathlib.Path]]) -> str:
  """The report as HTML.

  Args:
    title: of the page.
    shown: the runs of the table.
    images: heading, caption and PNG file of each plot.
  """
  titles = ["run", "req/s offered", *(column for column, _, _ in _COLUMNS)]
  titles += ["padding", "of FLOPs", "KV most", "KV unfilled", "host", "idle slot-steps"]
  parts = [f"<h1>{html.escape(title)}</h1>"]
  if shown:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in titles)
    rows = "\n".join(_row(one) for one in shown)
    parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>')
    parts.append(
      '<p class="note">Latencies count from the intended arrival; a request that failed or was refused misses its '
      "objectives and is in no percentile; a chunk of m tokens is one gap and m - 1 zeros in ITL (chunk gap: between "
      "messages); stall is a request's longest gap. Padding is the share of the tokens that steps computed, beside it "
      "weighted by FLOPs; KV unfilled is the room in running requests' blocks that no token fills; an idle slot-step "
      "is a slot without a row in a step while a request waits for one.</p>"
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
  """What ran, each different condition once."""
  lines: dict[str, list[str]] = {}
  for one in shown:
    about = one.run.about
    workload = ", ".join(f"{name} {value}" for name, value in (about.get("workload") or {}).items() if name != "rate")
    machine = ", ".join(str(value) for value in (about.get("machine") or {}).values() if value)
    objectives = ", ".join(f"{name} {value:g}" for name, value in (about.get("slo") or {}).items()) or "none"
    text = (
      f"model {about.get('model')}; workload: {workload}; {about.get('slots')} slots, {about.get('num_blocks')} "
      f"KV blocks of {about.get('block_size')}, rungs {about.get('token_budgets')}; objectives: {objectives}; {machine}"
    )
    lines.setdefault(text, []).append(f"{one.label} at {one.load:.3g}")
  items = "".join(
    f"<li><b>{html.escape(', '.join(names))}</b>: {html.escape(text)}</li>" for text, names in lines.items()
  )
  return f"<details><summary>What ran</summary><ul class='note'>{items}</ul></details>"


def _likeness(beside: Sequence[Shown]) -> str:
  """Whether runs that are put side by side had the same requests."""
  offered = {
    tuple(
      (length, outcome.output_len, round(outcome.intended_s, 3))
      for length, outcome in zip(one.run.prompt_lens, one.run.outcomes, strict=True)
    )
    for one in beside
  }
  if len(offered) == 1:
    return "All had requests of the same lengths at the same times."
  return "Their requests differ in length, number or time, so that the bars differ for that reason too."


def make_report(
  shown: Sequence[Shown], traces: Mapping[str, Sequence[StepRecord]], folder: pathlib.Path, title: str
) -> list[pathlib.Path]:
  """Writes report.html and the plots into `folder`; returns the files, the page first."""
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
      plot_throughput(shown),
    )
    if any(math.isfinite(one.load) for one in shown):
      add(
        "goodput_load",
        "Goodput against load",
        "Requests that met their objectives; those that failed or were refused did not.",
        plot_goodput(shown),
      )
  beside = side_by_side(shown)
  at = f"at {beside[0].load:.3g} requests a second" if beside else ""
  if beside:
    at = "all at once" if math.isinf(beside[0].load) else at
    add("modes", f"Side by side, {at}", _likeness(beside), plot_modes(beside))
    caption = "The share of requests (of tokens, in the third) up to a time."
    add("cdf", f"Distributions, {at}", caption, plot_cdfs(beside))
  steps: dict[str, Sequence[StepRecord]] = {one.label: one.run.steps for one in beside if one.run.steps}
  blocks = {one.label: int(one.run.about.get("num_blocks") or 0) for one in beside}
  steps |= traces
  if steps:
    add(
      "padding",
      f"Padding by rung{', ' + at if at else ''}",
      "All tokens that steps of a rung computed; the number above is the share of padding.",
      plot_padding(steps),
    )
  held = {label: records for label, records in steps.items() if blocks.get(label)}
  if held:
    caption = "Of the decode side, where prefill and decode have pools of their own."
    add("kv", f"KV cache, {at}", caption, plot_kv(held, blocks))
  for label, records in steps.items():
    name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in label)
    caption = "Device time of each step; tokens a second by kind; rows, queue and idle slots."
    add(f"steps_{name}", f"Steps over time: {label}{', ' + at if at else ''}", caption, plot_steps(label, records))
  target = folder / "report.html"
  target.write_text(page(title, shown, images), "utf-8")
  return [target, *(path for _, _, path in images)]


# --- Command line -----------------------------------------------------------------------------------------------------


def _named_path(text: str) -> tuple[str, str]:
  label, _, path = text.partition("=")
  if not label or not path:
    raise argparse.ArgumentTypeError(f"{text!r} must be LABEL=FILE")
  return label, path


def main(argv: Sequence[str] | None = None) -> int:
  """The command: writes the files and prints their paths; exit code 2 with one line for bad input."""
  parser = CommandParser("tools.bench_report", __doc__)
  parser.add_argument("runs", nargs="*", help="run files of tools.bench_serving or tools.bench_offline")
  parser.add_argument("--step_trace", type=_named_path, action="append", default=[], help="LABEL=FILE, a step trace")
  parser.add_argument("--output", default="report", help="folder to write into")
  parser.add_argument("--title", default="Sluice: measured runs", help="of the page")
  parser.add_argument("--slo_ttft_ms", type=positive_float, default=math.inf, help="instead of the runs' own")
  parser.add_argument("--slo_tpot_ms", type=positive_float, default=math.inf, help="likewise")
  parser.add_argument("--slo_e2e_ms", type=positive_float, default=math.inf, help="likewise")
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
    print(f"tools.bench_report: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  print("\n".join(map(str, files)))
  return 0


if __name__ == "__main__":
  sys.exit(main())
