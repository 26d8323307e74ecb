"""Ladders by dynamic programming: against all ladders there are, against powers of two, as the server takes them."""

from collections import Counter
import itertools
import json
import random
import subprocess
import sys

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.tools.conftest import ROOT
from tools.report.latency import Objectives
from tools.simulate import __main__ as simulate
from tools.simulate import tune_ladder
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.replica import made_up
from tools.simulate.step_costs import StepCosts, roofline
from tools.simulate.tune_ladder import (
  Chunk,
  Running,
  Steps,
  best_ladder,
  candidates,
  largest_chunk,
  limited,
  powers_of_two,
  simulated_steps,
  tokens_only,
)
from tools.study.claims import LongPrompts
from tools.study.simulated import large_config, simulated

AZURE = str(ROOT / "benchmarks" / "traces" / "azure_conv_500.csv")
# An 8B model on a part of the H200's peaks.
LLAMA_8B = {
  "hidden_size": 4096,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "intermediate_size": 14336,
  "vocab_size": 128256,
}
H200 = roofline(
  LLAMA_8B, tflops=989, gb_s=4800, compute_efficiency=0.7, bandwidth_efficiency=0.9, overhead_s=5e-4, max_tokens=2048
)


@pytest.mark.parametrize("seed", range(20))
def test_no_ladder_is_better_than_the_one_found(seed):
  rng = random.Random(seed)
  rungs = sorted(rng.sample(range(2, 60), 7))
  useful = Counter(rng.randint(1, rungs[-1]) for _ in range(rng.randint(1, 40)))
  costs = StepCosts(tuple((tokens, rng.uniform(1, 2) + tokens * rng.random()) for tokens in (1, 20, 60)))
  most = rng.randint(1, 5)
  steps = Steps(useful)
  every = ((*lower, rungs[-1]) for count in range(most) for lower in itertools.combinations(rungs[:-1], count))
  least = min(steps.time(costs, ladder) for ladder in every)
  found = best_ladder(useful, costs, most, rungs)
  assert len(found) <= most
  assert found[-1] == rungs[-1]
  assert list(found) == sorted(set(found))
  assert steps.time(costs, found) == pytest.approx(least)


def test_it_is_never_worse_than_powers_of_two():
  rng = random.Random(1)
  for _ in range(20):
    useful = Counter(min(2048, 1 + int(rng.lognormvariate(5, 1.5))) for _ in range(500))
    for most in (1, 3, 8):
      tuned = best_ladder(useful, H200, most, candidates(2048, 8))
      assert Steps(useful).time(H200, tuned) <= Steps(useful).time(H200, powers_of_two(2048, most)) * (1 + 1e-12)


def test_padding_and_ideal_are_told():
  steps = Steps({10: 3, 20: 1}, attention_s=5.0)
  costs = tokens_only(64)
  assert steps.time(costs, (16, 64)) == pytest.approx(3 * 16 + 64 + 5)
  assert steps.ideal_time(costs) == pytest.approx(50 + 5)
  assert steps.padding((16, 64)) == pytest.approx(112 / 50)
  assert best_ladder(steps.useful, costs, 3, [2, 10, 16, 20, 64]) == (10, 20, 64)


def test_rungs_to_choose_from():
  assert candidates(20, 8) == [2, 4, 8, 16, 20]
  assert candidates(64, 24) == [2, 4, 8, 16, 24, 32, 48, 64]
  assert powers_of_two(2048, 8) == (16, 32, 64, 128, 256, 512, 1024, 2048)
  assert powers_of_two(8, 9) == (2, 4, 8)


def call(capsys, *flags) -> tuple[int, str, str]:
  try:
    code = tune_ladder.main([*flags])
  except SystemExit as stop:
    code = stop.code
  captured = capsys.readouterr()
  return code, captured.out, captured.err


MODEL = ["--max_num_seqs=128", "--max_model_len=8192", "--num_blocks=40000", "--prefix_cache_scope=off"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
  """The sample of the Azure conversation trace on a busy device, tuned once for the tests below."""
  folder = tmp_path_factory.mktemp("ladder")
  H200.save(str(folder / "costs.json"))
  command = [sys.executable, "-m", "tools.simulate.tune_ladder", f"--costs={folder}/costs.json", f"--trace={AZURE}"]
  command += ["--rate_scale=4", "--num_requests=250", "--iterations=1", "--gap_factor=inf"]
  command += [f"--output={folder}/ladder.flags", *MODEL]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  return folder, json.loads(done.stdout)


def test_eight_rungs_come_near_the_ideal_on_the_azure_trace(tuned):
  _, result = tuned
  best, powers = result["ladders"][0], next(row for row in result["ladders"] if row["name"] == "powers of two")
  assert result["ladder"] == best["token_budgets"]
  assert len(best["token_budgets"]) <= 8
  assert best["token_budgets"][-1] == 2048
  assert best["time_over_ideal"] <= 1.05
  assert best["time_over_ideal"] < powers["time_over_ideal"]
  assert best["asked_time_over_ideal"] < powers["asked_time_over_ideal"]


def test_the_server_and_the_simulator_take_the_file(tuned):
  folder, result = tuned
  flags = simulate.expand_flagfile([f"--flagfile={folder}/ladder.flags", "--x=1"])
  ladder = ",".join(map(str, result["ladder"]))
  assert flags == [f"--token_budgets={ladder}", "--prefill_chunk=2048", "--max_num_seqs=128", "--x=1"]
  code = "import sys; from server import flags; flags.parse_flags(sys.argv, 'x'); print(flags.engine_setting_values())"
  command = [sys.executable, "-c", code, f"--flagfile={folder}/ladder.flags"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  assert f"'token_budgets': {tuple(result['ladder'])}" in done.stdout
  assert "'prefill_chunk': 2048" in done.stdout


def test_recorded_steps_are_tuned_as_they_were(tmp_path, capsys):
  H200.save(str(tmp_path / "costs.json"))
  args = ["--token_budgets=16,2048", "--prefill_chunk=2048", "--max_model_len=8192", "--num_blocks=9000"]
  parser_config = simulate.engine_config(parse(args), H200)
  simulation = Simulation(parser_config, H200, Fleet(), Collector(Objectives()))
  simulation.replicas[0].engine.start_trace(str(tmp_path / "steps.jsonl"))
  simulation.run(made_up([(0.05 * number, 100 + number, 10) for number in range(20)]))
  simulation.replicas[0].engine.recorder.stop_trace()
  flags = [f"--step_trace={tmp_path}/steps.jsonl", "--max_rungs=3", f"--output={tmp_path}/ladder.flags"]
  code, out, _ = call(capsys, *flags, f"--costs={tmp_path}/costs.json")
  assert code == 0
  result = json.loads(out)
  tuned_row, powers_row = result["ladders"]
  assert len(result["ladder"]) == 3
  assert tuned_row["time_s"] < powers_row["time_s"]
  assert tuned_row["steps"] == simulation.replicas[0].engine.stats().num_steps
  # Without a table a step costs its tokens: padding is what counts.
  by_tokens = json.loads(call(capsys, *flags)[1])["ladders"][0]
  assert by_tokens["padded_over_useful_tokens"] <= tuned_row["padded_over_useful_tokens"]
  assert by_tokens["time_over_ideal"] == by_tokens["padded_over_useful_tokens"]
  code, out, err = call(capsys, *flags, "--max_tokens=64")
  assert (code, out, err.count("\n")) == (2, "", 1)
  assert "above max_tokens=64; raise --max_tokens" in err


# A step of decodes, and one that a prompt fills, by hand: a millisecond for 8 tokens, two for 16, ...
BY_HAND = StepCosts(
  ((8, 1e-3), (16, 2e-3), (32, 3e-3), (64, 5e-3)), decode_key_s=1e-5, prefill_token_s=1e-5, prefill_pair_s=1e-6
)


def test_the_largest_chunk_by_hand():
  running = Running(rows=6, context=10, longest_prompt=100)
  # Alone: 1 ms, and 6 * 10 keys of 10 us. With a prompt in 16 tokens: 2 ms, the keys, 10 tokens of 10 us, and their
  # 10 * 90 + 55 pairs of 1 us. In 32: 3 ms, 26 tokens with 26 * 74 + 351 pairs. In 64: 58 with 58 * 42 + 1711.
  decode_s = 1e-3 + 60e-5
  step_s = {16: 2e-3 + 60e-5 + 10e-5 + 955e-6, 32: 3e-3 + 60e-5 + 26e-5 + 2275e-6, 64: 5e-3 + 60e-5 + 58e-5 + 4147e-6}
  ladder = (8, 16, 32, 64)
  for factor, tokens, chosen in ((2.3, 10, 16), (3.8, 10, 16), (3.9, 26, 32), (6.4, 26, 32), (6.5, 58, 64)):
    chunk = largest_chunk(BY_HAND, ladder, running, factor)
    assert chunk == Chunk(tokens, chosen, pytest.approx(step_s[chosen]), pytest.approx(decode_s))
  # Of 8 tokens, 6 decodes leave 2: 1 ms, 60 keys, 2 tokens with 2 * 98 + 3 pairs.
  assert largest_chunk(BY_HAND, ladder, running, 1.2).tokens == 2
  with pytest.raises(ConfigError, match=r"gap_factor=1\.1 .* beside 6 decodes takes 1\.14 times the 1\.6 ms .*; raise"):
    largest_chunk(BY_HAND, ladder, running, 1.1)
  with pytest.raises(ConfigError, match="beside 64 decodes takes inf times"):
    largest_chunk(BY_HAND, ladder, running._replace(rows=64), 3.0)


def test_what_runs_is_told_by_the_steps():
  steps = Steps({8: 30}, decodes=Counter({1: 20, 10: 10}), decode_keys=1200, longest_prompt=30)
  assert steps.running() == Running(rows=round((20 + 1000) / 120), context=10, longest_prompt=30)
  assert Steps({8: 200}).running() is None


def test_the_chunk_is_in_the_file_and_no_step_is_larger(tmp_path, capsys):
  H200.save(str(tmp_path / "costs.json"))
  flags = [f"--costs={tmp_path}/costs.json", f"--trace={AZURE}", "--rate_scale=4", "--num_requests=100", *MODEL]
  flags += ["--iterations=1", f"--output={tmp_path}/ladder.flags"]
  code, out, err = call(capsys, *flags)
  assert code == 0, err
  result = json.loads(out)
  chunk, ladder = result["chunk"], result["ladder"]
  assert result["prefill_chunk"] == chunk["tokens"] == chunk["step_tokens"] - chunk["rows"]
  assert 1 < chunk["step_s"] / chunk["decode_s"] <= 3
  assert chunk["step_tokens"] == ladder[-1] < 2048
  assert f"prefill_chunk={chunk['tokens']}: a step of {ladder[-1]} tokens takes" in err
  assert f"--prefill_chunk={chunk['tokens']}" in (tmp_path / "ladder.flags").read_text("utf-8").splitlines()
  # The next larger rung would be too much.
  running = Running(*(chunk[name] for name in Running._fields))
  larger = largest_chunk(H200, [*ladder, ladder[-1] + 8], running, 1000.0)
  assert larger.step_tokens == ladder[-1] + 8 and larger.step_s > 3 * larger.decode_s
  code, out, err = call(capsys, *flags, "--gap_factor=1")
  assert (code, out, err.count("\n")) == (2, "", 1)
  assert "gap_factor=1 cannot be kept" in err


def test_gaps_between_tokens_stay_within_the_factor_while_long_prompts_arrive():
  load = LongPrompts(num_steady=24, context=200, steady_tokens=300, num_long=4, prompt=4000, first_s=0.3, every_s=0.2)
  rungs = candidates(2048, 8)
  whole = large_config(token_budgets=tuple(rungs), prefill_chunk=2048, max_num_seqs=28)
  running = simulated_steps(whole, H200, made_up(load.rows(quiet=False)))[0].running()
  assert running is not None and running.rows == 24 and running.longest_prompt == 4000
  chunked, _ = limited(whole, largest_chunk(H200, rungs, running, 3.0), rungs)

  def p99_ms(config: EngineConfig, quiet: bool) -> float:
    _, outcomes = simulated(config, H200, made_up(load.rows(quiet)))
    return load.gaps(outcomes)["gap_p99_ms"]

  quiet_ms = p99_ms(chunked, quiet=True)
  assert 2 * quiet_ms < p99_ms(chunked, quiet=False) <= 3.1 * quiet_ms, "the host's part is not in the factor"
  assert p99_ms(whole, quiet=False) > 6 * quiet_ms


def parse(flags):
  parser = simulate.CommandParser("test", None)
  simulate.add_engine_arguments(parser)
  return parser.parse_args([*flags, "--max_num_seqs=16"])


@pytest.mark.parametrize(
  ("flags", "complaint"),
  [
    ([], "give either --step_trace, or requests"),
    (["--trace=x.csv", "--step_trace=y.jsonl"], "give either"),
    (["--trace=x.csv"], "needs a cost table"),
    (["--step_trace=/nowhere.jsonl"], "cannot be read"),
    (["--trace=x.csv", "--costs=/nowhere.json"], "cannot be read"),
    (["--max_rungs=0"], "--max_rungs"),
  ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, complaint, capsys):
  code, out, err = call(capsys, *flags)
  assert code == 2
  assert out == ""
  assert complaint in err
  assert err.count("\n") == 1


def test_a_ladder_that_does_not_fit_is_refused(capsys, tmp_path):
  H200.save(str(tmp_path / "costs.json"))
  flags = [f"--costs={tmp_path}/costs.json", f"--trace={AZURE}", *MODEL]
  code, _, err = call(capsys, *flags, "--max_tokens=64")
  assert (code, err.count("\n")) == (2, 1)
  assert "max_num_seqs=128 exceeds the top token budget 64" in err
  code, _, err = call(capsys, *flags, "--max_tokens=4096")
  assert (code, err.count("\n")) == (2, 1)
  assert "4096 tokens is above 2048" in err
