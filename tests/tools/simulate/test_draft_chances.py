"""Drafts of the simulator: chances, given or measured, in requests that the engine's own code serves."""

import dataclasses
import json
import pathlib

import pytest

from engine.errors import ConfigError
from tests.tools.simulate.test_simulate import FAST, LOAD, config, run
from tools.simulate import __main__ as simulate
from tools.simulate import tune_ladder
from tools.simulate.draft_chances import DraftChances, measure_chances
from tools.simulate.events import Fleet
from tools.simulate.replica import made_up
from tools.workload import WorkRequest, write_requests

DRAFTING = config(speculation="ngram")
# Two requests of long outputs, on a device whose steps of up to 8 tokens take as long as those of one.
PAIR = made_up([(0.0, 20, 300), (0.0, 20, 300)])


def served(acceptance: float, share: float = 1.0, **settings) -> dict:
  drafts = DraftChances(acceptance, share)
  simulation = run(PAIR, dataclasses.replace(DRAFTING, **settings), fleet=Fleet(drafts=drafts))
  figures = simulation.figures()
  assert figures["completed"] == 2 and figures["output_tokens"] == 600
  return figures


@pytest.mark.parametrize("overlap", [True, False])
def test_accepted_drafts_save_steps(overlap: bool):
  plain = run(PAIR, config(overlap=overlap)).figures()
  assert plain["draft_tokens"] == plain["accepted_draft_tokens"] == 0
  steps = [served(acceptance, overlap=overlap)["steps"] for acceptance in (0.0, 0.5, 0.9, 1.0)]
  assert plain["steps"] >= 0.97 * steps[0] and steps == sorted(steps, reverse=True)
  assert steps[-1] < (0.6 if overlap else 0.4) * plain["steps"]
  figures = served(0.9, overlap=overlap)
  assert figures["itl_p50_ms"] == 0 < figures["chunk_gap_p50_ms"], "most tokens come with the one before"


def test_fewer_positions_with_drafts_save_fewer_steps():
  assert served(0.9, share=0.2)["steps"] > served(0.9, share=0.8)["steps"]


def test_disaggregated_replicas_take_drafts():
  fleet = Fleet(prefill_replicas=1, decode_replicas=1, drafts=DraftChances(0.8))
  figures = run(LOAD, DRAFTING, fleet=fleet).figures()
  assert figures["completed"] == len(LOAD) and figures["accepted_draft_tokens"] > 100


def record(path: pathlib.Path, drafts: DraftChances) -> None:
  """The step trace of one request after another, so that drafts are tried at nearly every position."""
  arrivals = made_up([(30.0 * number, 20, 400) for number in range(8)])
  settings = dataclasses.replace(DRAFTING, max_model_len=512, overlap=False)
  simulation = simulate.Simulation(settings, FAST, Fleet(drafts=drafts), simulate.Collector(simulate.Objectives()))
  recorder = simulation.replicas[0].engine
  recorder.start_trace(str(path))
  simulation.run(arrivals)
  recorder.recorder.stop_trace()


def test_chances_are_measured_from_a_step_trace(tmp_path):
  record(tmp_path / "steps.jsonl", DraftChances(0.8, 0.7))
  found = measure_chances(str(tmp_path / "steps.jsonl"))
  assert found.acceptance == pytest.approx(0.8, abs=0.04) and found.share == pytest.approx(0.7, abs=0.08)


def test_a_trace_may_begin_with_drafts_in_flight(tmp_path):
  """What the step before them rejected is unknown, so the first row's drafts do not count."""
  lines = []
  for step, (num_drafts, behind, end) in enumerate([(2, 3, 1), (2, 0, 2)]):
    batch = {"step": step, "ids": ["a"], "counts": [1 + num_drafts], "samples": [1]}
    batch |= {"num_drafts": [num_drafts], "behind": [behind]}
    lines.append({"event": "schedule", "batch": batch})
    lines.append({"event": "commit", "step": step, "row_ends": [end]})
  (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
  assert measure_chances(str(tmp_path / "steps.jsonl")) == DraftChances(0.5, 1.0)


def test_the_commands_take_drafts(tmp_path, capsys):
  """The simulator from a trace, and the tuner from the same trace and from a simulation: larger steps, larger rungs."""
  record(tmp_path / "steps.jsonl", DraftChances(1.0))
  FAST.save(str(tmp_path / "costs.json"))
  requests = [WorkRequest(str(number), 10.0 * number, (1,) * 20, 300) for number in range(4)]
  with open(tmp_path / "requests.jsonl", "w", encoding="utf-8") as file:
    write_requests(file, requests, {})
  load = [f"--costs={tmp_path}/costs.json", f"--requests={tmp_path}/requests.jsonl"]
  flags = [*load, "--token_budgets=8,32,128", "--prefill_chunk=128", "--json"]
  assert simulate.main([*flags, f"--draft_trace={tmp_path}/steps.jsonl"]) == 0
  figures = json.loads(capsys.readouterr().out)
  assert figures["draft_tokens"] == figures["accepted_draft_tokens"] > 500
  assert figures["fleet"]["drafts"]["acceptance"] == 1.0
  tuned = ["--max_rungs=2", "--max_tokens=128", "--gap_factor=inf", "--align=1"]
  ladders = []
  for more in ([*load], [*load, "--draft_acceptance=1"], [f"--step_trace={tmp_path}/steps.jsonl"]):
    assert tune_ladder.main([*tuned, *more]) == 0, capsys.readouterr().err
    ladders.append(json.loads(capsys.readouterr().out)["ladder"])
  assert ladders[0][0] < ladders[1][0] == ladders[2][0]


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--draft_acceptance=1.5"], "acceptance=1.5 must be from 0 to 1"),
    (["--draft_acceptance=0.5", "--draft_share=0"], "share=0 must be above 0"),
    (["--draft_share=0.5"], "draft_share=0.5 needs --draft_acceptance"),
    (["--draft_trace=x", "--draft_share=0.5"], "--draft_trace measures both chances"),
    (["--draft_trace=missing"], "step trace missing cannot be read"),
    (["--draft_acceptance=0.5", "--batching=static"], "static"),
  ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys):
  assert simulate.main([*flags, "--num_requests=10"]) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_a_trace_without_drafts_is_refused(tmp_path):
  simulation = simulate.Simulation(config(), FAST, Fleet(), simulate.Collector(simulate.Objectives()))
  simulation.replicas[0].engine.start_trace(str(tmp_path / "steps.jsonl"))
  simulation.run(PAIR)
  simulation.replicas[0].engine.recorder.stop_trace()
  with pytest.raises(ConfigError, match="holds no drafts; record one with --speculation"):
    measure_chances(str(tmp_path / "steps.jsonl"))
  (tmp_path / "text").write_text("{}\n", "utf-8")
  with pytest.raises(ConfigError, match="line 1 is no line of a step trace"):
    measure_chances(str(tmp_path / "text"))
