"""The check of the simulator against reality: what counts as near, and both of its sides end to end."""

import argparse
import json

import pytest

from tests.tools.conftest import VOCAB_SIZE, run_module
from tools import check_simulation

LIMITS = argparse.Namespace(throughput_tolerance=0.1, tolerance=0.15)
FIGURES = dict.fromkeys((*check_simulation.THROUGHPUT, *check_simulation.LATENCIES, *check_simulation.OTHERS), 100.0)


@pytest.mark.parametrize(
  ("change", "timed", "within"),
  [
    ({}, True, True),
    ({"output_tok_s": 109.0, "ttft_p99_ms": 86.0}, True, True),
    ({"output_tok_s": 111.0}, True, False),
    ({"itl_p50_ms": 84.0}, True, False),
    # All at once, latencies are the queue's.
    ({"ttft_p50_ms": 300.0}, False, True),
    ({"total_tok_s": 80.0}, False, False),
    # Nobody promised the number of steps.
    ({"steps": 300.0}, True, True),
  ],
)
def test_what_is_near(change, timed, within, capsys):
  runs = [FIGURES | {"output_tok_s": value} for value in (90.0, 100.0, 190.0)]
  result = check_simulation.compare("load", runs, [FIGURES | change] * 3, LIMITS, timed)
  assert result["within"] is within
  assert result["figures"]["output_tok_s"]["measured"] == 100.0
  printed = capsys.readouterr().err
  for name, value in change.items():
    assert result["figures"][name]["difference"] == pytest.approx(value / 100 - 1)
    assert name in printed


@pytest.mark.long
@pytest.mark.parametrize("over_grpc", [False, True])
def test_both_sides_serve_the_same_load(tiny_model, compile_cache, over_grpc):
  flags = [
    "--num_requests=30",
    "--scale=0.02",
    "--max_len=120",
    "--rounds=1",
    "--max_model_len=256",
    "--max_context=200",
  ]
  flags += ["--token_budgets=8,32", "--prefill_chunk=32", "--max_num_seqs=8", "--num_blocks=256", "--rate=20"]
  flags += ["--tolerance=1000", "--throughput_tolerance=1000", f"--vocab_size={VOCAB_SIZE}"]
  flags += [f"--model={tiny_model}", f"--compile_cache_dir={compile_cache}"] + ["--over_grpc"] * over_grpc
  done = run_module("tools.check_simulation", *flags)
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout)
  assert result["loads"].keys() == {"azure_conv_500", "poisson"} | (
    {"azure_conv_500 at once"} if not over_grpc else set()
  )
  if not over_grpc:
    # Without arrival times nothing depends on how long steps take: the same steps, to the token.
    steps = result["loads"]["azure_conv_500 at once"]["figures"]
    assert steps["steps"]["difference"] == steps["padding_share"]["difference"] == 0.0


def test_a_bad_flag_is_one_line_and_exit_code_2(capsys):
  assert check_simulation.main(["--trace=/nowhere.csv"]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert "/nowhere.csv" in error
