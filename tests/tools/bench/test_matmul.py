"""The matmul benchmark: what it counts, its arithmetic by hand, and the whole tool on the demo model."""

import pytest

from models.config import ModelConfig
from tests.tools.conftest import json_line, run_here
from tools.bench import matmul as bench_matmul
from tools.bench.ceilings import Ceilings
from tools.bench.matmul import Matrix, beside_ceilings, matrices

MODEL = ModelConfig("llama", 100, 2, 8, 24, 4, 2, 6, 64)


def test_the_matrices_of_a_step_in_order():
  layer = [Matrix(8, 48), Matrix(24, 8), Matrix(8, 48), Matrix(24, 8)]
  assert matrices(MODEL) == [*layer, *layer, Matrix(8, 100)]


def test_shares_of_the_ceilings():
  row = {"rows": 10, "way": "xla", "best_ms": 800.0, "median_ms": 1000.0}
  found = beside_ceilings(row, [Matrix(1000, 1000)], Ceilings(bytes_s=8e6, flops_s=25e6, median_bytes_s=5e6))
  # 20 million operations and 4 million bytes in a second; at best they take 0.8 and 0.5 seconds.
  assert (found["of_rate"], found["of_read"], found["of_roofline"]) == (0.8, 0.5, 0.8)
  assert (found["of_median_read"], found["best_of_read"]) == (0.8, 0.625)
  assert (found["gflops"], found["ceilings"]["bytes_s"]) == (0.02, 8e6)


@pytest.mark.usefixtures("small_ceilings")
def test_the_whole_tool():
  done = run_here("tools.bench.matmul", "--shapes=demo", "--rows=1,3", "--seconds=0.01")
  assert done.returncode == 0, done.stderr
  result = json_line(done)
  assert {(row["rows"], row["shape"]) for row in result["steps"]} == {(1, "demo"), (3, "demo")}
  assert "xla" in {row["way"] for row in result["steps"]}
  assert all(0 < row["best_ms"] <= row["median_ms"] and row["of_roofline"] > 0 for row in result["steps"])
  assert "of rate" in done.stderr
  assert f"AMX tiles in use: {', '.join(result['tiles']) or 'none'}" in done.stderr


def test_ways_of_one_layout_share_their_weights():
  weights = bench_matmul.hold_weights([Matrix(4, 6), Matrix(6, 3)], ("packed", "xla", "ordered"))
  assert weights["packed"] is weights["ordered"] and [each.shape for each in weights["xla"]] == [(4, 6), (6, 3)]


@pytest.mark.usefixtures("small_ceilings")
def test_chosen_ways_alone_are_measured():
  done = run_here("tools.bench.matmul", "--shapes=demo", "--rows=1", "--ways=xla", "--seconds=0.01")
  assert done.returncode == 0, done.stderr
  assert [row["way"] for row in json_line(done)["steps"]] == ["xla"]


@pytest.mark.parametrize(
  ("flag", "complaint"),
  [
    ("--shapes=llama9", "'llama9' is unknown"),
    ("--rows=0", "whole number of at least 1"),
    ("--ways=int4,int3", "--ways: 'int3' is not one of xla, packed, "),
  ],
)
def test_bad_flags_are_one_line_and_exit_code_2(flag, complaint, capsys):
  try:
    code = bench_matmul.main([flag, "--seconds=0.01"])
  except SystemExit as stop:
    code = stop.code
  error = capsys.readouterr().err
  assert code == 2
  assert complaint in error and error.count("\n") == 1
