"""The cost table: what a step is made of, the fit, files, and one measured on a tiny model."""

import dataclasses
import json
import random

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.tools.conftest import ENGINE_FLAGS, json_line, run_here, run_module
from tools.report.latency import Objectives
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.fit_costs import calibrated, fit, fit_host, least_squares, with_launch_spread
from tools.simulate.replica import made_up
from tools.simulate.step_costs import After, AttentionWork, HostCosts, Launch, StepCosts, Warmth, roofline, work_of
from tools.simulate.step_points import LaunchPoint, Point, points_of, read_step_trace

TABLE = StepCosts(
  ((8, 1e-3), (64, 5e-3)),
  decode_row_s=1e-5,
  decode_key_s=1e-7,
  prefill_token_s=2e-6,
  prefill_key_s=3e-7,
  prefill_pair_s=1e-9,
  host=HostCosts(1e-4, 1e-6, 1e-7, 1e-5, 5e-5, 2e-6),
  kv_bytes_per_token=4096,
  cold_s=(4e-4, 3e-4, 2e-4),
  spread={After.IDLE: ((8, (2.0,)),), After.ALIKE: ((8, (0.5, 1.0, 3.0)), (64, (1.0,)))},
  launch_spread={Launch.DECODES: (1.0, 2.0), Launch.PROMPTS: (1.0,)},
  about={"source": "made up", "device": "none"},
)
LLAMA_8B = {
  "hidden_size": 4096,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "intermediate_size": 14336,
  "vocab_size": 128256,
}


def test_work_counts_keys_and_pairs_under_the_causal_mask():
  assert work_of((9, 0), (1, 1)) == AttentionWork(2, 11, 0, 0, 0)
  # A row of 3 tokens behind 10: they see 11, 12 and 13 keys.
  assert work_of((4, 10), (1, 3)) == AttentionWork(1, 5, 3, 13, 36)
  assert work_of((), ()) == AttentionWork(0, 0, 0, 0, 0)


def test_a_step_costs_its_rung_and_its_attention():
  assert TABLE.seconds(8, AttentionWork(2, 300, 0, 0, 0)) == pytest.approx(1e-3 + 2e-5 + 3e-5)
  assert TABLE.seconds(64, AttentionWork(0, 0, 50, 50, 1275)) == pytest.approx(5e-3 + 1e-4 + 1.5e-5 + 1.275e-6)
  assert TABLE.launch_seconds(10, 100, 2) == pytest.approx(1e-4 + 1e-5 + 1e-5 + 2e-5)
  assert TABLE.commit_seconds(10) == pytest.approx(7e-5)


def test_rungs_between_measured_ones_are_interpolated_and_never_extrapolated():
  assert TABLE.rung(36) == pytest.approx(3e-3)
  assert TABLE.rung(2) == TABLE.rung(8) == 1e-3
  with pytest.raises(ConfigError, match="65 tokens is above 64.*--token_budgets"):
    TABLE.rung(65)


def test_the_fit_finds_the_costs_that_made_the_points():
  rng = random.Random(3)
  points = []
  for _ in range(60):
    tokens = rng.choice((8, 64))
    work = AttentionWork(*(rng.randrange(1, most) for most in (tokens, 9000, 60, 4000, 100_000)))
    points.append(Point(tokens, work, TABLE.seconds(tokens, work)))
  table, error = fit(points)
  found = StepCosts(**table)
  assert error["worst_error"] < 1e-3
  for name in ("decode_row_s", "decode_key_s", "prefill_token_s", "prefill_key_s", "prefill_pair_s"):
    assert getattr(found, name) == pytest.approx(getattr(TABLE, name), rel=1e-2)
  assert found.rung(8) == pytest.approx(1e-3, rel=1e-2)
  # A tenth of the points disturbed by a factor of 3 hardly moves it.
  disturbed = [
    point._replace(seconds=point.seconds * (3 if index % 10 == 0 else 1)) for index, point in enumerate(points)
  ]
  robust = StepCosts(**fit(disturbed)[0])
  assert robust.seconds(64, AttentionWork(30, 3000, 0, 0, 0)) == pytest.approx(
    TABLE.seconds(64, AttentionWork(30, 3000, 0, 0, 0)), rel=0.05
  )


def test_where_padding_is_left_out_a_step_costs_its_tokens():
  table = dataclasses.replace(TABLE, by_tokens=True, prefill_token_s=0.0)
  assert table.seconds(64, AttentionWork(36, 0, 0, 0, 0)) == pytest.approx(3e-3 + 36 * TABLE.decode_row_s)
  assert table.charged(64, 100) == 64, "static batching may pay for more than is in use, not for more than there is"
  rng = random.Random(4)
  points = []
  for _ in range(80):
    rung = rng.choice((8, 64))
    rows = rng.randrange(1, rung)
    prompt = rng.randrange(0, rung - rows)
    start = rng.randrange(100)
    work = AttentionWork(
      rows, rng.randrange(rows, 9000), prompt, start + prompt, prompt * (2 * start + prompt + 1) // 2
    )
    points.append(Point(rung, work, table.seconds(rung, work)))
  found, error = fit(points, by_tokens=True)
  assert error["worst_error"] < 1e-2 and found["prefill_token_s"] == 0.0
  assert dict(found["rung_s"])[64] == pytest.approx(5e-3, rel=0.02)


def test_costs_are_never_negative():
  assert least_squares([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.0])[1] == 0.0
  launches = [LaunchPoint(rows, 0, 0, 1e-3 + rows * 1e-5) for rows in range(1, 20)]
  host = fit_host(launches, [(rows, 1e-4) for rows in range(1, 20)])
  assert host.launch_s == pytest.approx(1e-3, rel=1e-3)
  assert host.launch_row_s == pytest.approx(1e-5, rel=1e-2)
  assert host.launch_admission_s == 0.0
  assert host.commit_row_s == pytest.approx(0.0, abs=1e-9)


def test_noise_does_not_make_costs_too_small():
  rng = random.Random(5)
  rows = [(1.0, float(rng.randint(1, 50))) for _ in range(2000)]
  # Times spread by a factor of 1.6 either way around 2 + 0.1 n.
  values = [(2 + 0.1 * n) * rng.lognormvariate(0, 0.5) for _, n in rows]
  found = least_squares(rows, values)
  assert found[0] + found[1] * 25 == pytest.approx(4.5, rel=0.1)


def test_a_device_is_cold_after_idle_moments_and_after_prompts():
  warmth = Warmth()
  found = []
  # (planned, rung, has a prompt, ends): a prompt, decodes behind it, a moment of nothing, a decode planned as another
  # ends, and prompts in larger steps.
  for planned, tokens, has_prompt, ends in [
    (0.0, 64, True, 0.01),
    (0.005, 8, False, 0.02),
    (0.015, 8, False, 0.03),
    (0.025, 8, False, 0.04),
    (0.2, 8, False, 0.21),
    (0.2105, 16, False, 0.22),
    (0.215, 64, True, 0.23),
    (0.225, 128, True, 0.24),
  ]:
    found.append(warmth.step(planned, tokens, has_prompt))
    warmth.ended(ends)
  assert [since for since, _ in found] == [0, 0, 1, 2, 0, 1, 2, 0]
  idle, smaller, alike = After.IDLE, After.SMALLER, After.ALIKE
  assert [after for _, after in found] == [idle, alike, alike, alike, idle, alike, smaller, alike]
  assert [TABLE.cold(since) for since in (0, 1, 2, 3, 4, 100)] == [4e-4, 3e-4, 2e-4, 2e-4, 0, 0]


def test_calibration_finds_what_an_engine_adds():
  rng = random.Random(7)
  plain = StepCosts(((8, 1e-3), (64, 5e-3), (128, 9e-3)), decode_row_s=1e-5)
  truth = StepCosts(((8, 1.5e-3), (64, 6e-3), (128, 9e-3)), decode_row_s=1e-5, cold_s=(8e-4, 4e-4))
  points = []
  for number in range(6000):
    tokens, since = rng.choice((8, 8, 64)), number % 40
    work = AttentionWork(rng.randint(1, 8), 100, 0, 0, 0) if tokens == 8 else AttentionWork(8, 800, 40, 40, 820)
    seconds = (truth.seconds(tokens, work) + truth.cold(since)) * rng.choice((0.8, 1.0, 1.2))
    points.append(Point(tokens, work, seconds, since))
  found = calibrated(plain, points)
  assert found.rung(8) == pytest.approx(1.5e-3, rel=0.05)
  assert found.rung(64) == pytest.approx(6e-3, rel=0.05)
  assert found.rung(128) == pytest.approx(9e-3 * 1.4, rel=0.15), "a rung nobody saw moves as the others do"
  assert found.cold_s[:2] == pytest.approx((8e-4, 4e-4), rel=0.3)
  assert max(found.cold_s[2:]) < 1e-4
  for tokens in (8, 64):
    factors = found.factors(tokens, After.ALIKE)
    assert (factors[10], factors[50], factors[90]) == pytest.approx((0.8, 1.0, 1.2), rel=0.06)


def test_calibration_keeps_busy_steps_apart_from_those_after_a_pause():
  plain, work = StepCosts(((8, 1e-3), (64, 5e-3), (128, 1e-2))), AttentionWork(1, 1, 0, 0, 0)
  points = [Point(64, work, 6e-3 * factor, after=After.ALIKE) for factor in (0.9, 1.0, 1.1) * 120]
  points += [Point(tokens, work, plain.rung(tokens) * 1.8, after=After.IDLE) for tokens in (64, 128) for _ in range(20)]
  found = calibrated(plain, points)
  assert found.rung(64) == pytest.approx(6e-3), "the median of steps after ones alike"
  assert set(found.factors(64, After.ALIKE)) == {0.9, 1.0, 1.1}
  # Few of each rung, enough together: they are one spread. Of the third kind there is none, so it is that of all.
  assert found.factors(64, After.IDLE) == found.factors(128, After.IDLE)
  assert min(found.factors(64, After.IDLE)) == pytest.approx(1.5, rel=0.01)
  assert set(found.factors(64, After.SMALLER)) >= {0.9, 1.0, 1.1, 1.5}


def test_rungs_with_few_steps_share_a_shape_about_medians_of_their_own():
  plain, work = StepCosts(((8, 1e-3), (64, 5e-3), (128, 1e-2))), AttentionWork(1, 1, 0, 0, 0)
  points = [Point(tokens, work, plain.rung(tokens)) for tokens in (8, 64, 128) for _ in range(300)]
  points += [Point(8, work, 2e-3 * factor, after=After.IDLE) for factor in (0.9, 1.0, 1.1) * 40]
  points += [Point(64, work, 6e-3 * factor, after=After.IDLE) for factor in (0.8, 1.0, 1.2) * 12]
  points += [Point(128, work, 3e-2, after=After.IDLE)] * 29  # too few for a median
  found = calibrated(plain, points)
  small, middle, large = (found.factors(tokens, After.IDLE) for tokens in (8, 64, 128))
  assert (small[50], middle[50]) == pytest.approx((2.0, 1.2), rel=1e-3)
  assert middle == pytest.approx([factor * 1.2 / 2.0 for factor in small], abs=1e-3), "one shape"
  assert middle[0] == pytest.approx(1.2 * 0.8) and middle[-1] == pytest.approx(1.2 * 1.2)
  assert {3.0, 2.0} <= set(large), "those of all, as they are"


def test_each_kind_of_launch_has_a_spread_of_its_own():
  decodes = [LaunchPoint(4, 0, 0, TABLE.launch_seconds(4, 0, 0) * factor) for factor in (1.0, 2.0) * 40]
  prompts = [LaunchPoint(1, 50, 1, TABLE.launch_seconds(1, 50, 1) * 5, Launch.PROMPTS)] * 40
  cold = [LaunchPoint(1, 50, 1, TABLE.launch_seconds(1, 50, 1) * 7, Launch.COLD_PROMPTS)] * 3
  found = with_launch_spread(TABLE, decodes + prompts + cold)
  assert set(found.launch_factors(Launch.DECODES)) == {1.0, 2.0}
  assert set(found.launch_factors(Launch.PROMPTS)) == {5.0}
  assert found.launch_factors(Launch.COLD_PROMPTS) == (1.0,), "too few say nothing"


def test_a_launch_is_cold_after_a_change():
  assert Launch.of(True, 0, After.IDLE) is Launch.COLD_PROMPTS
  assert Launch.of(True, 0, After.SMALLER) is Launch.PROMPTS
  assert [Launch.of(False, since, After.ALIKE) for since in (0, 1, 2)] == [
    Launch.COLD_DECODES,
    Launch.COLD_DECODES,
    Launch.DECODES,
  ]


def test_too_few_steps_cannot_be_fitted():
  with pytest.raises(ConfigError, match="3 steps cannot determine 6 costs; measure more steps"):
    fit([Point(8, AttentionWork(1, 1, 0, 0, 0), 1.0)] * 3)


def test_a_table_comes_back_from_its_file(tmp_path):
  TABLE.save(str(tmp_path / "costs.json"))
  assert StepCosts.load(str(tmp_path / "costs.json")) == TABLE


@pytest.mark.parametrize(
  ("change", "complaint"),
  [
    ({"format": "other"}, "no cost table"),
    ({"rung_s": {}}, "rung_s names the rungs"),
    ({"rung_s": {"x": 1}}, "damaged"),
    ({"rung_s": {"8": -1}}, "-1.0 s is not a finite time"),
    ({"decode_key_s": "nan"}, "not a finite time"),
    ({"host": {"launch": 1}}, "damaged"),
    ({"kv_bytes_per_token": None}, "damaged"),
    ({"spread": {"idle": {"8": []}}}, "no quantile"),
    ({"spread": {"idle": {}}}, "no quantile"),
    ({"spread": {"idle": {"8": ["nan"]}}}, "not a finite time"),
    ({"spread": {"8": [1.0]}}, "damaged"),
    ({"cold_s": [-1.0]}, "not a finite time"),
    ({"launch_spread": [[1.0]]}, "damaged"),
    ({"launch_spread": {"decodes": []}}, "no quantile"),
  ],
)
def test_a_damaged_table_is_one_clear_error(tmp_path, change, complaint):
  path = tmp_path / "costs.json"
  TABLE.save(str(path))
  path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
  with pytest.raises(ConfigError, match=complaint):
    StepCosts.load(str(path))


def test_a_roofline_streams_weights_or_multiplies():
  table = roofline(
    LLAMA_8B, tflops=989, gb_s=4800, compute_efficiency=0.7, bandwidth_efficiency=0.9, overhead_s=5e-4, max_tokens=8192
  )
  # 7.5 billion weights of 2 bytes at 4.32 TB/s; then 14.0 GFLOP a token at 692 TFLOP/s.
  assert table.rung(1) == pytest.approx(5e-4 + 7.505e9 * 2 / 4.32e12, rel=1e-3)
  assert table.rung(8192) == pytest.approx(5e-4 + 8192 * 2 * 6.979e9 / 692.3e12, rel=1e-3)
  assert table.rung(table.about["knee_tokens"]) == pytest.approx(table.rung(1), rel=0.01)
  assert table.kv_bytes_per_token == 131_072
  with pytest.raises(ConfigError, match="hidden_size"):
    roofline({}, tflops=1, gb_s=1, compute_efficiency=1, bandwidth_efficiency=1, overhead_s=0, max_tokens=8)


@pytest.mark.parametrize("text", ["", "{", '{"event": "other"}', "[]", '{"event": "schedule"}'])
def test_what_is_no_step_trace_is_refused(tmp_path, text):
  (tmp_path / "steps.jsonl").write_text(text, "utf-8")
  with pytest.raises(ConfigError, match="step trace"):
    read_step_trace(str(tmp_path / "steps.jsonl"))


@pytest.fixture(scope="module")
def measured(tiny_model, compile_cache, tmp_path_factory) -> dict:
  path = tmp_path_factory.mktemp("costs") / "costs.json"
  done = run_here(
    "tools.simulate.measure_costs",
    f"--model={tiny_model}",
    f"--output={path}",
    "--seconds=0.005",
    "--load_seconds=0.3",
    "--rounds=1",
    f"--compile_cache_dir={compile_cache}",
    *ENGINE_FLAGS,
  )
  assert done.returncode == 0, done.stderr
  return {"line": json_line(done), "path": str(path)}


def test_the_command_measures_every_rung_and_names_the_device(measured):
  table = StepCosts.load(measured["path"])
  assert [tokens for tokens, _ in table.rung_s] == [1, 8, 32], "a step of one token, too, as the CPU skips padding"
  assert table.seconds(32, AttentionWork(8, 80, 0, 0, 0)) > 0
  assert table.host.launch_s + table.host.launch_row_s > 0
  for name in ("device", "model", "dtype", "jax", "commit", "date", "machine", "fit", "points"):
    assert table.about[name], name
  assert table.kv_bytes_per_token == 2 * 2 * 16 * 4  # keys and values of two layers, one head of 16, float32
  assert table.about["num_blocks"] == 128
  assert measured["line"]["rung_ms"].keys() == {"1", "8", "32"}


def test_recorded_steps_make_points(tmp_path):
  path = str(tmp_path / "steps.jsonl")
  config = EngineConfig(
    vocab_size=10, max_model_len=64, num_blocks=8, token_budgets=(8, 64), max_num_seqs=8, prefill_chunk=64
  )
  table = dataclasses.replace(TABLE, spread={}, cold_s=(), launch_spread={})
  simulation = Simulation(config, table, Fleet(), Collector(Objectives()))
  simulation.replicas[0].engine.start_trace(path)
  simulation.run(made_up([(0.0, 3, 4)]))
  simulation.replicas[0].engine.recorder.stop_trace()
  points, launches = points_of(read_step_trace(path))
  assert [(point.tokens, point.work, point.since_cold) for point in points] == [
    (8, AttentionWork(0, 0, 3, 3, 6), 0),
    (8, AttentionWork(1, 4, 0, 0, 0), 0),
    (8, AttentionWork(1, 5, 0, 0, 0), 1),
    (8, AttentionWork(1, 6, 0, 0, 0), 2),
  ]
  assert [launch.kind for launch in launches] == [
    Launch.COLD_PROMPTS,
    Launch.COLD_DECODES,
    Launch.COLD_DECODES,
    Launch.DECODES,
  ]
  # The recorder writes microseconds; a step is timed from the launch, or from the end of the one before.
  for point in points:
    assert point.seconds == pytest.approx(TABLE.seconds(8, point.work), abs=2e-6)


def test_a_bad_flag_or_model_is_one_line_and_exit_code_2(tmp_path):
  done = run_module("tools.simulate.measure_costs", "--model=/nowhere", f"--output={tmp_path}/costs.json")
  assert done.returncode == 2
  assert "/nowhere" in done.stderr.splitlines()[-1]
  assert "Traceback" not in done.stderr
