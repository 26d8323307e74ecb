"""The check of the simulator against reality: what counts as near, and both of its sides end to end."""

import argparse
import json

import pytest

from engine.errors import ConfigError
from tests.tools.conftest import VOCAB_SIZE, run_module
from tools.simulate import check_against_server

LIMITS = argparse.Namespace(throughput_tolerance=0.1, tolerance=0.15)
NAMES = (*check_against_server.THROUGHPUT, *check_against_server.LATENCIES, *check_against_server.OTHERS)
FIGURES = dict.fromkeys(NAMES, 100.0)


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
  result = check_against_server.compare("load", runs, [FIGURES | change] * 3, LIMITS, timed)
  assert result["within"] is within
  assert result["figures"]["output_tok_s"]["measured"] == 100.0
  assert result["figures"]["output_tok_s"]["runs_apart"] == pytest.approx(0.9), "the median over pairs"
  printed = capsys.readouterr().err
  for name, value in change.items():
    assert result["figures"][name]["difference"] == pytest.approx(value / 100 - 1)
    assert name in printed


@pytest.mark.long
@pytest.mark.parametrize(("over_grpc", "planner"), [(False, False), (True, False), (False, True)])
def test_both_sides_serve_the_same_load(tiny_model, compile_cache, over_grpc, planner, tmp_path):
  flags = [
    "--num_requests=30",
    "--scale=0.02",
    "--max_len=120",
    "--rounds=1",
    "--max_model_len=256",
    "--max_context=200",
  ]
  flags += ["--token_budgets=8,32", "--prefill_chunk=32", "--max_num_seqs=8", "--num_blocks=256", "--rate=20"]
  (tmp_path / "lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "300,200\n" * 30, "utf-8")
  flags += [f"--trace={check_against_server.SAMPLE},{tmp_path}/lengths.csv", "--load_seconds=0.3"]
  flags += ["--tolerance=1000", "--throughput_tolerance=1000", f"--vocab_size={VOCAB_SIZE}"]
  flags += (
    [f"--model={tiny_model}", f"--compile_cache_dir={compile_cache}"]
    + ["--over_grpc"] * over_grpc
    + ["--planner"] * planner
  )
  done = run_module("tools.simulate.check_against_server", *flags)
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout)
  assert result["loads"].keys() == {"azure_conv_500", "lengths", "poisson"} | (
    {"azure_conv_500 at once"} if not over_grpc else set()
  )
  paced = result["loads"]["lengths"]
  assert paced["load"] == 0.6 and len(paced["requests_per_s"]) == 1
  if not over_grpc:
    # Without arrival times nothing depends on how long steps take: the same steps, to the token.
    steps = result["loads"]["azure_conv_500 at once"]["figures"]
    assert steps["steps"]["difference"] == 0.0
    assert planner or steps["padding_share"]["difference"] == 0.0


def test_loads_without_times_are_paced_and_others_are_left_out(tmp_path):
  (tmp_path / "lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "30,20\n" * 3, "utf-8")
  args = argparse.Namespace(
    trace=f"{tmp_path}/lengths.csv", scale=0.1, rate_scale=6.0, num_requests=3, max_len=64, rate=1.0
  )
  for wanted, found in (("", ["lengths", "poisson", "lengths at once"]), ("poisson", ["poisson"])):
    args.loads = wanted
    assert list(check_against_server.loads(args, 10)) == found
  args.loads = "lengths"
  load = check_against_server.loads(args, 10)["lengths"]
  assert load.paced and not load.timed
  slow, fast = load.at(5.0), load.at(10.0)
  assert [(len(request.prompt), request.output_len) for request in slow] == [(3, 2)] * 3
  assert 0.0 == slow[0].arrival_s < slow[1].arrival_s < slow[2].arrival_s
  assert [2 * request.arrival_s for request in fast] == pytest.approx([request.arrival_s for request in slow])
  args.loads = "other"
  with pytest.raises(ConfigError, match="'other' is none of lengths, poisson"):
    check_against_server.loads(args, 10)


def test_results_are_added_to_those_there(tmp_path):
  assert check_against_server.kept_loads("") == check_against_server.kept_loads(f"{tmp_path}/new.json") == {}
  path = tmp_path / "old.json"
  path.write_text('{"loads": {"one": {"within": true}}}', "utf-8")
  assert check_against_server.kept_loads(str(path)) == {"one": {"within": True}}
  path.write_text("[]", "utf-8")
  with pytest.raises(ConfigError, match="no result of this check"):
    check_against_server.kept_loads(str(path))


def test_a_bad_flag_is_one_line_and_exit_code_2(capsys):
  assert check_against_server.main(["--trace=/nowhere.csv"]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert "/nowhere.csv" in error
