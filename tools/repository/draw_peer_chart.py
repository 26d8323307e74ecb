"""Renders the chart of output tokens/s against peers from benchmarks/peers.json. May not hold a figure itself."""

import json
from typing import Any

from tools.measure import ROOT
from tools.repository.svg_canvas import Canvas, Theme

FIGURES = ROOT / "benchmarks" / "peers.json"
_SHAPE = "llama-125m"
_NAMES = {
  "transformers": "transformers",
  "llama_cpp": "llama.cpp server",
  "vllm": "vLLM, CPU build",
  "openvino": "OpenVINO GenAI",
}


def read_ratios() -> tuple[list[tuple[str, float, float, float]], str]:
  """Returns (peer, ratio, Sluice's output tokens/s, the peer's) of each offline run by falling ratio; and the source.

  Raises:
    KeyError: the file holds no such run.
  """
  plain = [run for run in json.loads(FIGURES.read_text())["runs"] if run.get("precision", "f32") == "f32"]
  runs = [run for run in plain if run["shape"] == _SHAPE and run["mode"] == "offline"]
  rows = []
  for run in runs:
    ours = _rate(run, "sluice")
    rows += [
      (_NAMES[name], ours / _rate(run, name), ours, _rate(run, name)) for name in run["engines"] if name != "sluice"
    ]
  machine, work = runs[0]["machine"], runs[0]["workload"]
  source = (
    f"Output tokens/s, 125M parameters, f32, {work['num_requests']} requests at once; "
    f"{machine['cpu']}, {machine['cores']} cores; commit {runs[0]['commit']}; make peers"
  )
  return sorted(rows, key=lambda row: -row[1]), source


def _rate(run: dict[str, Any], engine: str) -> float:
  return run["engines"][engine]["figures"]["output_tok_s"]


def draw_peer_chart(theme: Theme) -> str:
  """Returns a chart with a bar for each peer, as SVG text."""
  rows, source = read_ratios()
  canvas = Canvas(
    760,
    72 + 40 * len(rows) + 34,
    theme,
    "Sluice against peers on the same two cores",
    "; ".join(f"{ratio:.2f} times {name}" for name, ratio, _, _ in rows),
  )
  left, scale = 150, 420 / max(ratio for _, ratio, _, _ in rows)
  canvas.add_text(
    16, 30, "Throughput of Sluice over that of each peer, offline, on the same two cores", size=15, weight=600
  )
  bottom = 54 + 40 * len(rows)
  for index, (name, ratio, ours, theirs) in enumerate(rows):
    y = 54 + 40 * index
    canvas.add_text(left - 10, y + 19, name, anchor="end")
    canvas.add_box(left, y, scale * ratio, 28, fill=theme.accents[0], radius=3)
    end = left + scale * ratio
    canvas.add_text(end + 8, y + 19, f"{ratio:.2f}×", weight=600)
    canvas.add_text(end + 52, y + 19, f"{ours:.0f} and {theirs:.0f} tokens/s", size=12, color=theme.muted)
  canvas.add_line(left + scale, 46, left + scale, bottom, color=theme.ink, dashed=True)
  canvas.add_text(left + scale, bottom + 14, "1×: as fast as the peer", size=11.5, color=theme.muted, anchor="middle")
  canvas.add_text(16, bottom + 38, source, size=11.5, color=theme.muted)
  return canvas.to_svg()
