"""The study's arithmetic by hand, its page, and one claim end to end on a tiny model."""

import json
import pathlib
import subprocess
import sys

import pytest

from engine.errors import ConfigError
from tests.tools.conftest import ROOT, VOCAB_SIZE, json_line, run_module
from tools.report.latency import Outcome
from tools.simulate.step_costs import StepCosts
from tools.study import __main__ as study_batching
from tools.study import claims as claims
from tools.study import simulated as simulated

# A step takes 1 ms up to 64 tokens, then 1 ms more for every 64.
COSTS = StepCosts(((64, 1e-3), (8192, 0.128)), kv_bytes_per_token=100, about={"source": "made up"})


def case(name: str) -> claims.ClaimCase:
  return next(case for case in claims.CASES if case.name == name)


def outcome(name: int, output_len: int, times: list[float]) -> Outcome:
  return Outcome(name, output_len, 0.0, 0.0, tuple((time, 1) for time in times), (0,) * len(times))


# --- Arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "useful", "paid"), [("padding_4", 5250, 16_000), ("padding_4b", 680, 1600), ("padding_32", 25_600, 256_000)]
)
def test_the_scheduler_pays_for_the_slots_that_are_claimed(name, useful, paid, tmp_path):
  chosen = case(name)
  slots, _ = simulated.static_slots(chosen.rows(tmp_path)[: chosen.slots], chosen.slots)
  assert slots == (paid, useful)


def test_a_slot_idles_for_490_steps():
  assert simulated.idle_steps(10, 500) == 490


def test_decode_steps_of_a_wave_are_paid_for_at_full_width():
  # One step of 2 prompts of 4 tokens, then 2 steps of which the second has one row.
  slots, steps = simulated.static_slots([(4, 2), (4, 3)], 2)
  assert slots == (8 + 2 + 2, 8 + 2 + 1)
  assert [ids for _, ids in steps] == [("0", "1"), ("0", "1"), ("1",)]


def test_goodput_formulas_by_hand():
  # Two waves of two slots, of 3 s and of 1 s; 5 and 2 tokens.
  step = claims.TracedStep
  waves = [
    step(0.0, 1.0, ("a", "b"), 2),
    step(1.0, 2.0, ("a", "b"), 2),
    step(2.0, 3.0, ("a",), 1),
    step(4.0, 5.0, ("c", "d"), 2),
  ]
  static = claims.goodput_formulas(waves, waves=True)
  assert static == {"formula_tok_s": 1.75, "measured_tok_s": 1.4, "formula_over_measured": 1.25}
  # a takes 3 s, b 2 s, c and d 1 s; 7 rows in 4 steps.
  continuous = claims.goodput_formulas(waves, waves=False)
  assert continuous["formula_tok_s"] == pytest.approx(7 / (7 / (7 / 4)))


def test_formulas_of_a_simulated_trace_are_near_what_came():
  found = simulated.simulate_formulas([(8, 5), (8, 40)] * 8, 4, COSTS)
  assert found["static"]["formula_over_measured"] == pytest.approx(1.0, abs=0.01)
  assert found["measured_ratio"] > 1.2


def test_the_knee_is_the_last_doubling_that_paid():
  assert claims.knee({1: 10.0, 2: 19.0, 4: 30.0, 8: 40.0, 16: 100.0}) == 4


def test_the_decode_rate_counts_only_while_all_decode():
  first, second = outcome(0, 4, [1.0, 5.0, 6.0, 7.0]), outcome(1, 3, [5.0, 6.0, 7.0])
  assert claims.decode_rate([first, second]) == 2.0
  with pytest.raises(ConfigError, match="longer"):
    claims.decode_rate([outcome(0, 2, [1.0, 2.0]), outcome(1, 1, [3.0])])


def test_gaps_are_those_while_long_prompts_are_about():
  load = claims.LongPrompts(num_steady=1, steady_tokens=6, num_long=1, prompt=8, first_s=2.0, every_s=1.0)
  steady = outcome(0, 6, [0.0, 1.0, 1.5, 3.5, 4.0, 9.0])
  busy = load.gaps([steady, outcome(1, 2, [3.0, 4.0])])
  assert (busy["gap_max_ms"], busy["gap_p50_ms"]) == (5000.0, 2000.0)
  with pytest.raises(ConfigError, match="steady_tokens"):
    load.gaps([steady, outcome(1, 2, [3.0, 10.0])])


def test_tail_is_the_last_percent_over_the_middle():
  found = claims.tail([outcome(number, 2, [1.0, 2.0]) for number in range(99)] + [outcome(99, 2, [1.0, 202.0])])
  assert found["e2e_p50_ms"] == 2000.0
  assert found["e2e_p99_over_p50"] == pytest.approx(2.0)
  assert found["ttft_p99_over_p50"] == 1.0


def test_one_of_101_requests_is_the_small_tenants():
  rows, small = claims.Tenants(num_small=3).arrivals(10.0)
  assert len(rows) == 303
  assert [sum(small[start : start + 101]) for start in range(0, 303, 101)] == [1, 1, 1]
  assert rows == sorted(rows, key=lambda row: row[0])


def test_a_small_machine_gets_scaled_requests(tmp_path):
  assert case("padding_4").scaled(tmp_path, 0.01, 4) == [(1, 1), (2, 1), (10, 1), (40, 1)]


# --- Simulation -------------------------------------------------------------------------------------------------------


def test_chunks_and_devices_apart_keep_gaps_short():
  load = claims.LongPrompts(
    num_steady=8, context=16, steady_tokens=600, num_long=4, prompt=4000, first_s=0.02, every_s=0.02
  )
  found = simulated.simulate_long_prompts(COSTS, load)
  ratios = {way: found[way]["p99_over_quiet"] for way in ("inline", "chunked", "disaggregated")}
  assert ratios["inline"] > 3 * ratios["chunked"] > 3 * ratios["disaggregated"]


def test_a_fair_share_is_served_soon():
  found = simulated.simulate_tenants(COSTS, claims.Tenants(num_small=3, prompt_len="uniform:800:1200", slots=32))
  assert found["fair"]["p50_over_alone"] < 4 < found["fcfs"]["p50_over_alone"]


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_one_claim_end_to_end(tiny_model, compile_cache, tmp_path):
  COSTS.save(str(tmp_path / "costs.json"))
  done = run_module(
    "tools.study",
    "--only=idle_490,formulas",
    "--sides=modelled,demo",
    f"--model={tiny_model}",
    f"--costs={tmp_path}/costs.json",
    f"--output={tmp_path}/study",
    f"--compile_cache_dir={compile_cache}",
    "--scale=0.02",
    "--num_requests=8",
    "--num_blocks=512",
  )
  assert json_line(done)["differing_requests"] == 0
  study = json.loads((tmp_path / "study" / "study.json").read_text("utf-8"))
  answers = study["parts"]["idle_490"]
  assert answers["modelled"]["idle_steps"] == 490
  assert answers["demo"]["tokens"] == {"requests": 8, "identical_requests": 8, "agreeing_prefix": 1.0}
  # Waves of two answers of 1 token and two of 10.
  assert answers["demo"]["idle_slot_share"] == 0.45
  assert study["parts"]["formulas"]["demo"]["requests"] == 8
  page = (tmp_path / "study" / "README.md").read_text("utf-8")
  assert "By the scheduler: 490 steps." in page
  assert "give identical tokens for 8 of 8 requests" in page
  assert VOCAB_SIZE < 2048  # else the demo model was served


def test_claims_keep_their_answers_when_others_are_asked_again(tmp_path, capsys):
  COSTS.save(str(tmp_path / "costs.json"))
  flags = ["--sides=modelled", f"--costs={tmp_path}/costs.json", f"--output={tmp_path}", f"--traces={tmp_path}"]
  assert study_batching.main([*flags, "--only=batch_size"]) == 0
  assert study_batching.main([*flags, "--only=padding_4b,sharegpt"]) == 0
  parts = json.loads((tmp_path / "study.json").read_text("utf-8"))["parts"]
  assert list(parts) == ["batch_size", "padding_4b", "sharegpt"]
  assert parts["sharegpt"]["modelled"] == {"skipped": "trace not at hand"}
  assert "680 of 1,600 slots are useful, 57.5% is padding" in (tmp_path / "README.md").read_text("utf-8")
  assert "sharegpt_8k_lengths.csv cannot be read" in capsys.readouterr().err


def test_the_figures_to_reach():
  ways = {name: {"p99_over_quiet": ratio} for name, ratio in (("chunked", 2.0), ("chunked_half", 1.5), ("inline", 2.5))}
  parts = {
    "azure_code": {"demo": {"chunked_over_static": 2.6, "continuous_over_static": 2.8, "idle_bound": 3.0}},
    "coding_assistant": {"demo": {"chunked_over_static": 1.0, "idle_bound": 3.0}},  # a claim, not a trace
    "long_prompt": {"demo": {**ways, "disaggregated": {"p99_over_quiet": 1.0}}},
    "tenants": {"demo": {"fair": {"p50_over_alone": 2.1}}},
  }
  found = [(entry["value"], entry["reached"]) for entry in study_batching.targets(parts)]
  assert found == [(0.933, True), (0.867, False), (2.0, True), (1.5, True), (1.0, True), (2.5, False), (2.1, False)]


@pytest.mark.parametrize(
  ("flags", "complaint"),
  [
    (["--only=sideways"], "sideways"),
    (["--sides=sideways"], "sideways"),
    (["--costs=/nowhere.json"], "cannot be read"),
  ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, complaint, tmp_path, capsys):
  assert study_batching.main([*flags, f"--output={tmp_path}"]) == 2
  captured = capsys.readouterr()
  assert complaint in captured.err
  assert (captured.err.count("\n"), captured.out) == (1, "")


def test_what_is_modelled_needs_no_jax(tmp_path):
  code = f"""
import sys
from tools.study import __main__ as study_batching
study_batching.main(["--sides=modelled", "--only=padding_4b", "--output={tmp_path}"])
print([name for name in ("jax", "numpy", "flax") if name in sys.modules])
"""
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == "[]"
  assert pathlib.Path(tmp_path, "study.json").exists()
