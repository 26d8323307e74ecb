"""The sweep over ways of batching: real servers, tiny loads, one page; what fails is left out in one line."""

import json

import pytest

from tests.tools.conftest import run_module
from tools.bench import modes as bench_modes
from tools.report.run_file import read_run

SMALL = ("--token_budgets=8,32", "--prefill_chunk=16", "--max_num_seqs=8", "--server_flags=--num_blocks=128 --verbose")


@pytest.mark.long
def test_two_modes_side_by_side_and_one_that_does_not_start(tiny_model, compile_cache, tmp_path):
  done = run_module(
    "tools.bench.modes",
    f"--model={tiny_model}",
    f"--compile_cache_dir={compile_cache}",
    "--modes=disaggregated,static,chunked",
    "--num_devices=2",
    "--prefill_devices=2",  # leaves none to decode
    "--rates=30,60",
    "--seconds=0.2",
    "--warmup_requests=1",
    "--load=--prompt_len=uniform:4:40 --output_len=uniform:2:20",
    *SMALL,
    f"--output={tmp_path}",
  )
  assert done.returncode == 1, "something was left out"
  result = json.loads(done.stdout)
  assert result["left_out"].keys() == {"disaggregated"} and "0 for decode" in result["left_out"]["disaggregated"]
  (said,) = [line for line in done.stderr.splitlines() if "left out" in line]
  assert said.startswith("tools.bench.modes: disaggregated left out: ")
  assert [(run["mode"], run["rate"]) for run in result["runs"]] == [
    ("static", 30.0),
    ("static", 60.0),
    ("chunked", 30.0),
    ("chunked", 60.0),
  ]
  runs = [read_run(run["run_file"]) for run in result["runs"]]
  for run, (mode, count) in zip(runs, [("static", 6), ("static", 12), ("chunked", 6), ("chunked", 12)], strict=True):
    assert (run.label, run.about["batching"], len(run.outcomes)) == (mode, mode, count)
    assert all(outcome.ok for outcome in run.outcomes) and run.steps
    assert len(run.served) == count and all(record.reason == "length" for record in run.served)
    assert run.figures["compiles_after_ready"] == 0
  # The same requests in both modes, others at the other rate.
  assert runs[0].prompt_lens == runs[2].prompt_lens and runs[1].prompt_lens == runs[3].prompt_lens
  assert runs[0].prompt_lens != runs[1].prompt_lens[:6]
  page = (tmp_path / "report.html").read_text("utf-8")
  assert result["report"] == str(tmp_path / "report.html") and page.count("<td>static</td>") == 4
  for mode in ("static", "chunked"):
    log = (tmp_path / f"{mode}.log").read_text("utf-8")
    assert f"--batching={mode}" in log and log.endswith("stopped, exit code 0\n")


@pytest.mark.long
def test_policies_side_by_side(tiny_model, tmp_path):
  own = "tests.engine.policies:LeastLeft"
  done = run_module(
    "tools.bench.modes",
    f"--model={tiny_model}",
    "--modes=chunked",
    f"--policies=sjf,{own}",
    "--rates=60",
    "--seconds=0.2",
    "--warmup_requests=1",
    "--load=--prompt_len=uniform:4:40 --output_len=uniform:2:20 --num_tenants=2 --batch_share=0.5",
    *SMALL[:-1],
    "--server_flags=--num_blocks=128 --fake_device --verbose",
    f"--output={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout)
  assert [(run["mode"], run["policy"]) for run in result["runs"]] == [("chunked", "sjf"), ("chunked", own)]
  runs = [read_run(run["run_file"]) for run in result["runs"]]
  assert [run.label for run in runs] == ["sjf", "LeastLeft"]
  for run in runs:
    assert all(outcome.ok for outcome in run.outcomes) and {outcome.priority for outcome in run.outcomes} == {0, 1}
    assert {outcome.tenant for outcome in run.outcomes} == {"tenant0", "tenant1"}
  assert runs[0].prompt_lens == runs[1].prompt_lens
  assert f"--policy={own}" in (tmp_path / "LeastLeft.log").read_text("utf-8")
  page = (tmp_path / "report.html").read_text("utf-8")
  assert "policies side by side" in page and (tmp_path / "senders.png").exists()


@pytest.mark.parametrize(
  ("flags", "complaint"),
  [
    (["--modes=static,lockstep"], "lockstep"),
    (["--policies=fcfs,no_module:Mine"], "no_module"),
    (["--policies=sjf,sjf"], "twice"),
    (["--modes=static,static"], "each once"),
    (["--rates=0"], "above 0"),
    (["--rates=4,4"], "twice"),
    (["--rates=inf"], "finite"),
    (["--load=--prompt_len='fixed"], "quotation"),
  ],
)
def test_bad_flags_are_one_line_and_exit_code_2(flags, complaint, capsys, tmp_path):
  try:
    code = bench_modes.main([*flags, f"--output={tmp_path}"])
  except SystemExit as stop:
    code = stop.code
  captured = capsys.readouterr()
  assert code == 2 and captured.out == ""
  assert complaint in captured.err and captured.err.count("\n") == 1
