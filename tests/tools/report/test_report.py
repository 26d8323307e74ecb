"""The report of made-up runs: what is put side by side, what is drawn, and a page that needs nothing else."""

import base64
import dataclasses
import math
import re

import numpy as np
import pytest

from engine.recorder import StepRecord
from tests.tools.report.test_accounting import served, step
from tools.report import plots as report_plots
from tools.report.__main__ import main
from tools.report.latency import Objectives, Outcome
from tools.report.plots import plot_goodput, plot_padding, plot_phases, plot_steps, plot_throughput
from tools.report.run_file import RecordedRun, write_run
from tools.report.shown_runs import MODES, likeness, offered_load, padding_share, prepared, side_by_side


def made_up(
  label: str, rate: float, ttft_s: float = 0.1, failed: int = 0, steps: tuple[StepRecord, ...] = ()
) -> RecordedRun:
  """Ten requests at an even rate, four tokens each, a tenth of a second apart."""
  outcomes = []
  for number in range(10):
    arrival_s = number / rate
    if number < failed:
      outcomes.append(Outcome(number, 4, arrival_s, arrival_s, (), (), "RESOURCE_EXHAUSTED: full"))
    else:
      chunks = tuple((arrival_s + ttft_s + 0.1 * token, 1) for token in range(4))
      outcomes.append(Outcome(number, 4, arrival_s, arrival_s, chunks))
  about = {"label": label, "workload": {"rate": rate}, "num_blocks": 10, "block_size": 8, "slo": {"ttft_s": 0.15}}
  return RecordedRun(about, {}, tuple(outcomes), (5,) * 10, steps)


STEPS = tuple(
  step(number, 0.1 * number, prefill_tokens=4 * (number % 3 == 0), padding=5 - 4 * (number % 3 == 0))
  for number in range(30)
)


def test_figures_count_the_objectives_of_the_run_or_those_given():
  slow, quick = made_up("a", 5.0, ttft_s=0.2), made_up("b", 5.0, failed=3)
  met = {one.label: one.figures["slo_attainment"] for one in prepared([slow, quick], Objectives())}
  assert met == {"a": 0.0, "b": 0.7}
  met = {one.label: one.figures["slo_attainment"] for one in prepared([slow, quick], Objectives(ttft_s=1.0))}
  assert met == {"a": 1.0, "b": 0.7}


def test_side_by_side_is_where_most_share_a_load_and_one_does_best():
  runs = [
    made_up(label, rate) for label, rate in (("chunked", 8.0), ("static", 8.0), ("chunked", 4.0), ("static", 4.0))
  ]
  beside = side_by_side(prepared([*runs, made_up("chunked", 16.0)], Objectives()))
  assert [(one.label, one.load) for one in beside] == [("static", 8.0), ("chunked", 8.0)]
  # At 16 both have more to do, and hardly do any of it well.
  overload = [made_up("chunked", 16.0, failed=8), made_up("static", 16.0, failed=9)]
  assert {one.load for one in side_by_side(prepared([*runs, *overload], Objectives()))} == {8.0}
  assert side_by_side([]) == []


def test_what_is_side_by_side_says_whether_it_had_the_same_requests():
  same = prepared([made_up("a", 8.0), made_up("b", 8.0, failed=2)], Objectives())
  assert "same lengths" in likeness(same)
  other = dataclasses.replace(made_up("b", 8.0), prompt_lens=(6,) * 10)
  assert "differ" in likeness(prepared([made_up("a", 8.0), other], Objectives()))


def test_each_side_of_a_disaggregated_run_has_its_own_lines():
  prefill = [record._replace(side="prefill", num_rows=1) for record in STEPS]
  decode = [record._replace(side="decode", num_rows=3) for record in STEPS]
  lines = plot_steps({"a": prefill + decode}).axes[2].get_lines()
  rows = {str(line.get_label()): set(np.asarray(line.get_ydata())) for line in lines}
  assert rows["rows of the step, prefill side"] == {1} and rows["rows of the step"] == {3}


def test_steps_of_several_runs_share_their_axes():
  slow = [record._replace(time=2 * record.time, device_s=10 * record.device_s) for record in STEPS]
  axes = plot_steps({"a": STEPS, "b": slow}).axes
  for left, right in zip(axes[::2], axes[1::2], strict=True):
    assert left.get_ylim() == right.get_ylim() and left.get_xlim() == right.get_xlim() == (0.0, slow[-1].time)
  assert [axis.get_title() for axis in axes[:2]] == ["a: 30 steps", "b: 30 steps"]


def test_a_burst_has_no_rate():
  burst = made_up("a", math.inf)
  assert offered_load(burst) == math.inf and offered_load(made_up("a", 8.0)) == pytest.approx(8.0)


def test_lines_are_labels_and_points_are_runs():
  shown = prepared([made_up("static", 4.0), made_up("chunked", 8.0, failed=4), made_up("chunked", 4.0)], Objectives())
  figure = plot_goodput(shown)
  lines = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
  assert lines.keys() == {"all met", "static", "chunked"}
  assert list(lines["chunked"].get_xdata()) == pytest.approx([4.0, 8.0])
  attainment = {str(line.get_label()): list(line.get_ydata()) for line in figure.axes[1].get_lines()}
  assert attainment == {"static": [1.0], "chunked": [1.0, 0.6]}
  ttft = plot_throughput(shown).axes[0].get_lines()
  assert [list(line.get_ydata()) for line in ttft] == [pytest.approx([100.0]), pytest.approx([100.0, 100.0])]


def test_bars_stack_to_what_a_rung_computed():
  wide = step(30, 9.0, shape_tokens=64, prefill_tokens=50, padding=11)
  figure = plot_padding({"chunked": (*STEPS, wide), "static": STEPS})
  heights = [patch.get_height() for patch in figure.axes[0].patches]  # decode, prefill, padding; two rungs each
  assert heights == [30 * 3, 3, 10 * 4, 50, 20 * 5 + 10, 11]
  assert padding_share((*STEPS, wide)) == (110 + 11) / (30 * 8 + 64)
  assert padding_share(()) is None


def test_phases_stack_to_the_time_in_the_engine():
  records = tuple(served(str(number), 10.0 + number) for number in range(9)) + (served("slow", 50.0, arrival=26.0),)
  run = dataclasses.replace(made_up("a", 8.0), served=records)
  mean, slowest = plot_phases(prepared([run], Objectives())).axes
  assert [patch.get_width() for patch in mean.patches] == pytest.approx([(9 * 1 + 21) / 10, 1.0, 2.0])
  assert [patch.get_width() for patch in slowest.patches] == pytest.approx([21.0, 1.0, 2.0])


def test_a_way_of_batching_keeps_its_color():
  few, many = report_plots._style(["chunked"]), report_plots._style(["mine", *MODES])
  assert few["chunked"] == many["chunked"] and len({color for color, _ in many.values()}) == 6


@pytest.mark.parametrize("value", [0.00123, 0.5, 7, 99.4, 1234, 56_789, 2_345_678])
def test_numbers_on_axes_are_short(value):
  text = report_plots._number(value)
  assert len(text) <= 7 and "e" not in text
  factor = {"k": 1e3, "M": 1e6}.get(text[-1], 1)
  assert float(text.rstrip("kM").replace(",", "")) * factor == pytest.approx(value, rel=0.01)


def test_the_page_holds_its_plots_and_needs_nothing_else(tmp_path, capsys):
  files = []
  for label, rate in (("static", 4.0), ("chunked <b>", 4.0)):
    files.append(str(tmp_path / f"{len(files)}.jsonl"))
    run = dataclasses.replace(made_up(label, rate, failed=1, steps=STEPS), served=(served("1", 5.0),))
    write_run(files[-1], run, start_s=0.0)
  assert main([*files, f"--output={tmp_path / 'out'}", "--title=A & B"]) == 0
  page, *plots = capsys.readouterr().out.split()
  assert {plot.rsplit("/", 1)[1] for plot in plots} == {
    f"{name}.png" for name in "throughput_latency goodput_load modes cdf phases padding kv steps_1".split()
  }
  text = (tmp_path / "out" / "report.html").read_text("utf-8")
  assert (
    page.endswith("report.html") and "A &amp; B" in text and "chunked &lt;b&gt;" in text and "chunked <b>" not in text
  )
  sources = re.findall(r'src="([^"]*)"', text)
  embedded = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources]
  on_disk = {(tmp_path / "out" / plot.rsplit("/", 1)[1]).read_bytes() for plot in plots}
  assert set(embedded) == on_disk and all(image.startswith(b"\x89PNG") for image in embedded)
  assert "http" not in text and "<script" not in text


def test_runs_without_steps_or_with_one_burst_make_a_page(tmp_path, capsys):
  write_run(str(tmp_path / "run"), made_up("a", math.inf), start_s=0.0)
  assert main([str(tmp_path / "run"), f"--output={tmp_path / 'out'}"]) == 0
  names = [path.rsplit("/", 1)[1] for path in capsys.readouterr().out.split()]
  assert names == ["report.html", "throughput_latency.png", "modes.png", "cdf.png"]


@pytest.mark.parametrize(
  ("arguments", "complaint"),
  [([], "nothing to report"), (["nowhere.jsonl"], "nowhere.jsonl"), (["--step_trace=a=nowhere"], "nowhere")],
)
def test_bad_input_is_one_line(arguments, complaint, capsys):
  assert main(arguments) == 2
  captured = capsys.readouterr()
  assert captured.out == "" and captured.err.count("\n") == 1 and complaint in captured.err


def test_a_run_of_failures_only_makes_a_page_too(tmp_path):
  write_run(str(tmp_path / "run"), made_up("a", 4.0, failed=10), start_s=0.0)
  assert main([str(tmp_path / "run"), f"--output={tmp_path / 'out'}"]) == 0
  assert "0%" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_the_page_says_what_ran_each_condition_once(tmp_path):
  runs = [made_up("static", 4.0), made_up("chunked", 4.0), made_up("chunked", 8.0)]
  files = []
  for number, run in enumerate(runs):
    files.append(str(tmp_path / f"{number}.jsonl"))
    write_run(files[-1], run, start_s=0.0)
  assert main([*files, f"--output={tmp_path}"]) == 0
  assert (tmp_path / "report.html").read_text("utf-8").count("<li><b>all</b>") == 1
  write_run(files[0], dataclasses.replace(runs[0], about=runs[0].about | {"slots": 7}), start_s=0.0)
  assert main([*files, f"--output={tmp_path}"]) == 0
  text = (tmp_path / "report.html").read_text("utf-8")
  assert "<b>static at 4</b>" in text and "<b>chunked at 4, 8</b>" in text and "7 slots" in text
