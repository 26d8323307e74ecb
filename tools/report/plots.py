"""Makes a report's plots of runs and steps as matplotlib figures. Chooses no runs and writes no file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from engine.recorder import StepRecord
from tools.report.accounting import Phases, phases
from tools.report.latency import Outcome, percentile
from tools.report.shown_runs import MODES, Shown, offered_load, padding_share, rank

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
_PHASES = {"queue": "#d0d0d0", "prefill": _PREFILL, "decode": _DECODE}
_SHORTEST = (
  1e-4  # least seconds on a time axis: tokens of one chunk have gaps of 0, which a logarithmic axis cannot show
)
_CDF_POINTS = 2000  # of a line; more look the same but take seconds to plot
_BINS = 120  # of time, in plots of steps
_WIDTH = 13.5  # inches of every figure, so all have one font size on a page
MOST_COLUMNS = 5  # of plot_steps


def _style(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
  """Returns the color and marker of each label; a batching mode has the same in every plot."""
  distinct = sorted(set(labels), key=lambda label: (rank(label), label))
  free = [index for index in range(len(_COLORS)) if index >= len(MODES) or MODES[index] not in distinct]
  style, others = {}, 0
  for label in distinct:
    index = rank(label)
    if index >= len(MODES):
      index, others = free[others % len(free)], others + 1
    style[label] = _COLORS[index], _MARKERS[index]
  return style


def _figure(columns: int, rows: int = 1, height: float = 3.5) -> tuple[Figure, list[Axes]]:
  """Returns a figure with its axes, row by row; the height is that of a row, in inches."""
  figure = Figure(figsize=(_WIDTH, height * rows), layout="constrained")
  figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)  # type: ignore[union-attr]
  axes = figure.subplots(rows, columns, squeeze=False)
  flat = [axis for line in axes for axis in line]
  for axis in flat:
    axis.grid(True, color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
      axis.spines[side].set_visible(False)
  return figure, flat


def _log_axis(axis: Axes, which: Literal["x", "y"]) -> None:
  """Makes an axis logarithmic, with a few plain numbers at its ticks; its data are already plotted."""
  if which == "x":
    axis.set_xscale("log")
  else:
    axis.set_yscale("log")
  scaled, (low, high) = (axis.xaxis, axis.get_xlim()) if which == "x" else (axis.yaxis, axis.get_ylim())
  scaled.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 150 * low else (1.0,)))
  scaled.set_major_formatter(_plain)
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
  """Plots latency over throughput; each point is a run, with its offered load."""
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
    axis.set_xlim(0, 1.05 * max((one.figures["output_tok_s"] or 0.0 for one in shown), default=0.0) or 1.0)
  _legend_below(figure, axes[0])
  return figure


def plot_goodput(shown: Sequence[Shown]) -> Figure:
  """Plots the requests that met their objectives, and their share, over the offered load."""
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
  """Plots the cumulative distributions of latencies over requests or tokens."""
  figure, axes = _figure(4)
  style = _style(one.label for one in shown)
  kinds: dict[str, Callable[[Outcome], Iterable[float | None]]] = {
    "TTFT, s": lambda outcome: (outcome.ttft_s,),
    "time per output token, s": lambda outcome: (outcome.tpot_s,),
    "time between tokens, s": lambda outcome: outcome.itl_s,
    "whole answer, s": lambda outcome: (outcome.e2e_s,),
  }
  for axis, (title, values_of) in zip(axes, kinds.items(), strict=True):
    lowest: list[float] = []  # a low percentile, since a few fast values would stretch the axis
    for one in shown:
      values = sorted(
        value for outcome in one.run.outcomes if outcome.ok for value in values_of(outcome) if value is not None
      )
      kept = [*range(0, len(values) - 1, max(1, len(values) // _CDF_POINTS)), len(values) - 1] if values else []
      shares = [(index + 1) / len(values) for index in kept]
      times = [max(values[index], _SHORTEST) for index in kept]
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
  """Plots one bar for each run and main figure."""
  figure, axes = _figure(4, rows=2, height=2.7)
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
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0) if name == "padding" else _plain)
  return figure


def plot_senders(shown: Sequence[Shown]) -> Figure:
  """Plots TTFT by tenant and by priority, one bar for each run; omits groups that no run has."""
  style = _style(one.label for one in shown)
  kinds = [
    ("tenants", "ttft_p50_ms", "TTFT p50 by tenant, ms"),
    ("tenants", "of_fair_share", "part of its fair share, by tenant"),
    ("priorities", "ttft_p99_ms", "TTFT p99 by priority (lower is more urgent), ms"),
  ]
  kinds = [kind for kind in kinds if any(one.figures.get(kind[0]) for one in shown)]
  figure, axes = _figure(len(kinds))
  for axis, (group, name, title) in zip(axes, kinds, strict=True):
    senders = sorted({sender for one in shown for sender in one.figures.get(group) or {}})
    width = 0.8 / len(shown)
    for index, one in enumerate(shown):
      found = one.figures.get(group) or {}
      values = [(found.get(sender) or {}).get(name) or 0.0 for sender in senders]
      left = [position + (index - (len(shown) - 1) / 2) * width for position in range(len(senders))]
      axis.bar(left, values, width, color=style[one.label][0], label=one.label)
    axis.set_xticks(range(len(senders)), [sender or "none" for sender in senders], fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.grid(False, axis="x")
    axis.yaxis.set_major_formatter(_plain)
  _legend_below(figure, axes[0])
  return figure


def plot_phases(shown: Sequence[Shown]) -> Figure:
  """Plots the phases of requests in the engine: the mean on the left, the slowest requests on the right."""
  figure, axes = _figure(2, height=1.2 + 0.36 * len(shown))
  titles = ("mean of all requests, s", "mean of the slowest tenth, s")
  for axis, title, share in zip(axes, titles, (1.0, 0.1), strict=True):
    left = [0.0] * len(shown)
    for name, color in _PHASES.items():
      widths = [_mean_phase(one, name, share) for one in shown]
      axis.barh(range(len(shown)), widths, left=left, color=color, label=name, height=0.65)
      left = [before + width for before, width in zip(left, widths, strict=True)]
    for position, total in enumerate(left):
      axis.annotate(f" {_number(total)}", (total, position), ha="left", va="center", fontsize=8, color="#555555")
    axis.set_yticks(range(len(shown)), [one.label for one in shown])
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.margins(x=0.12)
    axis.set_title(title, fontsize=11)
  _legend_below(figure, axes[0])
  return figure


def _mean_phase(one: Shown, name: str, share: float) -> float:
  """Returns the mean seconds of a phase, over the share of requests with the longest time in the engine."""
  ordered = sorted(one.run.served, key=lambda record: record.arrival - record.end)
  found = [phases(record) for record in ordered[: max(1, round(share * len(ordered)))]]
  index = Phases._fields.index(name)
  return math.fsum(phase[index] or 0.0 for phase in found) / len(found)


def plot_padding(steps: Mapping[str, Sequence[StepRecord]]) -> Figure:
  """Plots the tokens of all steps by rung and kind; one panel for each label, with the same axis."""
  columns = len(steps) if len(steps) <= MOST_COLUMNS else 4
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
        axis.annotate(f"{share:.0%}", (position, base[position]), ha="center", va="bottom", fontsize=7, color="#555555")
    top = max(top, *base)
    axis.set_xticks(range(len(rungs)), [str(rung) for rung in rungs], fontsize=8, rotation=45)
    axis.set_xlabel("rung, tokens")
    axis.set_title(f"{label}\n{padding_share(records):.0%} padding", fontsize=11)
    axis.grid(False, axis="x")
  for axis in axes[: len(steps)]:
    axis.set_ylim(0, top * 1.1)
    axis.yaxis.set_major_formatter(_plain)
  for axis in axes[len(steps) :]:
    axis.set_visible(False)
  axes[0].set_ylabel("tokens computed")
  _legend_below(figure, axes[0])
  return figure


def plot_steps(steps: Mapping[str, Sequence[StepRecord]]) -> Figure:
  """Plots runs over time, one column for each label: step durations, step contents, and occupancy of the engine."""
  columns = len(steps)
  figure, axes = _figure(columns, rows=3, height=2.5)
  rows = [axes[columns * row : columns * (row + 1)] for row in range(3)]
  for index, (label, records) in enumerate(steps.items()):
    _step_times(rows[0][index], records)
    rows[0][index].set_title(f"{label}: {len(records):,} steps", fontsize=11)
    _composition(rows[1][index], records)
    _fullness(rows[2][index], records)
    rows[2][index].set_xlabel("seconds")
  begin = min(step.time for records in steps.values() for step in records)
  end = max(step.time for records in steps.values() for step in records)
  for row, title in zip(rows, ("device, ms a step", "tokens a second", "requests, slots"), strict=True):
    row[0].set_ylabel(title)
    low, high = min(axis.get_ylim()[0] for axis in row), max(axis.get_ylim()[1] for axis in row)
    named: dict[str, Any] = {}
    for index, axis in enumerate(row):
      axis.set_xlim(begin, end if end > begin else begin + 1)
      axis.set_ylim(low, high)
      axis.tick_params(labelsize=8, labelleft=index == 0)
      named |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    row[-1].legend(
      named.values(),
      named.keys(),
      loc="upper left",
      bbox_to_anchor=(1.0, 1.02),
      frameon=False,
      fontsize=8,
      markerscale=3,
    )
  for axis in rows[0]:
    _log_axis(axis, "y")
    axis.tick_params(labelleft=axis is rows[0][0])
  return figure


def _step_times(axis: Axes, steps: Sequence[StepRecord]) -> None:
  kinds = {
    "only decodes": (_DECODE, [step for step in steps if not step.prefill_tokens]),
    "only prefill": (_PREFILL, [step for step in steps if not step.decode_tokens]),
    "both": (_MIXED, [step for step in steps if step.decode_tokens and step.prefill_tokens]),
  }
  for name, (color, found) in kinds.items():
    times, seconds = [step.time for step in found], [step.device_s * 1e3 for step in found]
    axis.plot(times, seconds, "o", color=color, label=name, markersize=2, markeredgewidth=0)
  axis.set_yscale("log")


def _composition(axis: Axes, steps: Sequence[StepRecord]) -> None:
  times, width, bins = _binned(steps)
  kinds = {"decode_tokens": _DECODE, "prefill_tokens": _PREFILL, "padding": _PADDING}
  rates = [[sum(getattr(step, name) for step in found) / width for found in bins] for name in kinds]
  labels = [name.removesuffix("_tokens") for name in kinds]
  axis.stackplot(times, rates, colors=list(kinds.values()), labels=labels, step="mid")
  axis.yaxis.set_major_formatter(_plain)


def _fullness(axis: Axes, steps: Sequence[StepRecord]) -> None:
  # Idle slots often equal waiting requests, so one line must show beneath the other.
  names = {"num_waiting": ("waiting", _PREFILL, 2.5), "idle_slots": ("idle slots", "#d55e00", 1.0)}
  names |= {"num_rows": ("rows of the step", _DECODE, 1.0)}
  for side in sorted({step.side for step in steps}):
    found = [step for step in steps if step.side == side]
    where, dashes = (", prefill side", "--") if side == "prefill" else ("", "-")
    for name, (text, color, width) in names.items():
      values = [getattr(step, name) for step in found]
      axis.plot([step.time for step in found], values, dashes, color=color, linewidth=width, label=text + where)
  axis.yaxis.set_major_locator(MaxNLocator(integer=True))


def _binned(steps: Sequence[StepRecord]) -> tuple[list[float], float, list[list[StepRecord]]]:
  """Divides a run's time into _BINS parts; returns their middles, their length, and the steps planned in each."""
  begin, end = min(step.time for step in steps), max(step.time for step in steps)
  width = max(end - begin, 1e-9) / _BINS
  bins: list[list[StepRecord]] = [[] for _ in range(_BINS)]
  for step in steps:
    bins[min(int((step.time - begin) / width), _BINS - 1)].append(step)
  return [begin + (index + 0.5) * width for index in range(_BINS)], width, bins


def plot_kv(steps: Mapping[str, Sequence[StepRecord]], num_blocks: Mapping[str, int]) -> Figure:
  """Plots KV blocks in use over time, and the filled share of their slots, as means over parts of the time."""
  figure, axes = _figure(2)
  style = _style(steps)
  for label, records in steps.items():
    times, _, bins = _binned([step for step in records if step.side != "prefill" and step.kv_slots] or records)
    parts = [(time, found) for time, found in zip(times, bins, strict=True) if found]
    used = [sum(step.blocks_used for step in found) / len(found) / num_blocks[label] for _, found in parts]
    in_use = [(sum(step.kv_tokens for step in found), sum(step.kv_slots for step in found)) for _, found in parts]
    filled = [tokens / slots if slots else 0.0 for tokens, slots in in_use]
    times = [time for time, _ in parts]
    axes[0].plot(times, used, color=style[label][0], label=label, linewidth=1.4)
    axes[1].plot(times, filled, color=style[label][0], linewidth=1.4)
  axes[0].set_title("KV blocks in use", fontsize=11)
  axes[1].set_title("share of their slots that tokens fill", fontsize=11)
  for axis in axes:
    axis.set_xlabel("seconds")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
  axes[1].set_ylim(0, 1.05)
  _legend_below(figure, axes[0])
  return figure


def _plain(value: float, _: float) -> str:
  """Formats ticks as plain numbers."""
  return _number(value)


def _number(value: float) -> str:
  """Returns a number with three significant digits and no exponent."""
  if value >= 1e6:
    return f"{value / 1e6:.3g}M"
  if value >= 1e4:
    return f"{value / 1e3:.3g}k"
  return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
