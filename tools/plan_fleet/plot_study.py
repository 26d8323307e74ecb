"""Plots the fewest devices for each limit of gaps, out of a file of tools.plan_fleet.fleet_study, as SVG.

  python -m tools.plan_fleet.plot_study --study=benchmarks/fleet/study.json --output=benchmarks/fleet/devices.svg

Needs matplotlib, which the `dev` extra has. The same file gives the same plot, byte by byte.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import sys
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from engine.errors import ConfigError
from tools.arguments import CommandParser, output_file

_LINES = (("together", "#0072b2", "o"), ("apart", "#d55e00", "s"))
_TITLES = {"AZURE": "Azure's chat sample, 147 requests/s", "MOONCAKE": "Mooncake's conversations, 20 requests/s"}


def plot_fewest(rows: Sequence[Mapping[str, Any]]) -> Figure:
  """Returns a figure with a panel for each trace of fleet_study.find_fewest()."""
  traces = list(dict.fromkeys(row["trace"] for row in rows))
  figure = Figure(figsize=(5.0 * len(traces), 3.4), layout="constrained")
  for axis, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
    mine = [row for row in rows if row["trace"] == trace]
    for way, color, marker in _LINES:
      points = [(row["gap_p99_ms"], row[way]) for row in mine if row[way] is not None]
      axis.plot(*zip(*points, strict=True), color=color, marker=marker, label=f"prefill and decode {way}")
    axis.set_xscale("log")
    limits = [row["gap_p99_ms"] for row in mine]
    axis.set_xticks(limits, [str(limit) for limit in limits])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(bottom=0)
    axis.set(xlabel="limit of the p99 gap, ms", ylabel="fewest devices", title=_TITLES.get(trace, trace))
    axis.grid(True, color="#e6e6e6", linewidth=0.8)
    axis.legend(frameon=False)
  figure.suptitle("Modelled: Llama-3-8B's shape on H200", fontsize=10)
  return figure


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line for bad input."""
  parser = CommandParser("tools.plan_fleet.plot_study", __doc__)
  parser.add_argument("--study", default="benchmarks/fleet/study.json", help="file of tools.plan_fleet.fleet_study")
  parser.add_argument("--output", type=output_file, required=True, help="SVG file to write")
  args = parser.parse_args(argv)
  try:
    try:
      rows = json.loads(pathlib.Path(args.study).read_text("utf-8"))["disaggregation"]["fewest"]
    except (ValueError, KeyError, TypeError) as error:
      raise ConfigError(
        f"study={args.study} has no part disaggregation ({type(error).__name__}: {error}); make it with "
        "python -m tools.plan_fleet.fleet_study"
      ) from error
    with rc_context({"svg.hashsalt": "sluice", "svg.fonttype": "none", "font.size": 9}):
      plot_fewest(rows).savefig(args.output, format="svg", metadata={"Date": None})
  except (ConfigError, OSError) as error:
    return parser.failed(error)
  print(args.output)
  return 0


if __name__ == "__main__":
  sys.exit(main())
