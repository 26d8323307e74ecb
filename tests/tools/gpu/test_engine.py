"""The engine's stages on a GPU, without one: what fails or hangs costs one command, verdicts are right, a dry run."""

import dataclasses
import json
import pathlib
import sys
import time

import jax.numpy as jnp
import pytest

from engine.errors import ConfigError
from models.registry import config_from_hf
from tests.tools.conftest import run_module
from tools.bench.engine import ModelWork, model_folder
from tools.gpu import engine
from tools.gpu.engine import Command, Sizes
from tools.make_random_model import write_model
from tools.parity.cases import CASES


def test_every_command_has_a_name_of_its_own_and_shares_what_it_should() -> None:
  made = engine.stages(pathlib.Path("/scratch"), Sizes())
  commands = [command for commands in made.values() for command in commands]
  names = [command.name for command in commands]
  assert len(set(names)) == len(names) and tuple(made) == engine.STAGES
  words = {command.name: " ".join(command.words) for command in commands}
  assert "--shape=llama3-8b" in words["decode_8b"] and "--batches=1,8,32,64" in words["decode_8b"]
  assert "--shape=llama3.2-1b" in words["decode_1b"] and "--contexts=1024" in words["decode_1b"]
  assert "--requests=256" in words["offline"] and "--lengths=100,1024" in words["offline"]
  assert words["offline_plain"].startswith(words["offline"].replace("offline.json", "offline_plain.json"))
  assert "--overlap=false" in words["offline_plain"] and "--lengths=1000,1000" in words["full"]
  # What is restored must be what decode_8b made: the same ladder, slots and pool.
  for name in ("--batches=", "--prompts=", "--num_blocks=", "--max_model_len=", "--executable_bundle="):
    assert _flag(made, "start_bundle", name) == _flag(made, "decode_8b", name) != ""
  assert _flag(made, "start_bundle", "--compile_cache_dir=") == ""
  shared = "--token_budgets=", "--max_num_seqs=", "--prefill_chunk=", "--num_blocks=", "--max_model_len="
  for name in (*shared, "--compile_cache_dir="):
    for stage in ("twin_sluice", "full", "offline_plain"):
      assert _flag(made, stage, name) == _flag(made, "offline", name) != ""
  # With the same programs as decode_8b's, but for the one that is --deterministic.
  for name in ("--batches=", "--num_blocks=", "--max_model_len=", "--compile_cache_dir="):
    assert _flag(made, "deterministic", name) == _flag(made, "decode_8b", name) != ""
  assert all(command.limit_s <= 300 for command in commands), "ten minutes are all there is"
  assert sum(command.limit_s for command in made["twin"]) < 1000


def _flag(made: dict[str, list[Command]], name: str, flag: str) -> str:
  (command,) = [command for commands in made.values() for command in commands if command.name == name]
  return " ".join(word for word in command.words if word.startswith(flag))


def test_steps_of_every_stage_can_be_compiled_without_a_gpu() -> None:
  for stage in engine.STAGES:
    assert engine.compile_only([stage])
  assert len(engine.compile_only(engine.STAGES)) == 5


def test_a_command_that_fails_or_hangs_costs_only_itself(tmp_path) -> None:
  def run(code: str, seconds: float, limit_s: float = 100.0) -> dict:
    kept = tmp_path / "kept.json"
    command = Command("some thing", (sys.executable, "-c", code, str(kept)), limit_s, "--xla_dump_to=", kept)
    with open(tmp_path / "log", "w") as log:
      return engine.run(command, time.monotonic() + seconds, log)

  said = run("import os; print('noise'); print('{\"flags\": \"' + os.environ['XLA_FLAGS'] + '\"}')", 100.0)
  assert said["flags"].endswith("--xla_dump_to=") and said["took_s"] >= 0
  assert run("import os; print('{\"umask\": %d}' % os.umask(0))", 100.0)["umask"] == 0o077
  assert run("raise SystemExit(3)", 100.0)["error"] == "exit code 3: it printed nothing"
  assert run("raise SystemExit('no such card\\n')", 100.0)["error"] == "exit code 1: no such card"
  assert run("print('no json')", 100.0)["error"] == "its last output line is not JSON"
  assert run("import time; time.sleep(600)", 0.2)["error"].startswith("out of time")
  assert run("", -1.0)["error"] == "out of time"
  left = "import sys; open(sys.argv[1], 'w').write('{\"decode\": [1]}'); "
  found = run(left + "import time; sys.stdout.flush(); time.sleep(600)", 100.0, limit_s=5.0)
  assert found["error"] == "out of time after 5 s" and found["decode"] == [1], "what it had measured is kept"
  assert "decode" not in run("raise SystemExit(1)", 100.0), "but not what another run had"


def test_results_are_kept_after_each_command_and_twins_need_a_model(tmp_path) -> None:
  def command(name: str, code: str) -> Command:
    return Command(name, (sys.executable, "-c", code), 100.0)

  seen = []
  commands = [
    command("twin_made", "raise SystemExit(1)"),
    command("twin_static", "print({})"),
    command("x", "print(1)"),
  ]
  with open(tmp_path / "log", "w") as log:
    engine.measure(commands[:2], time.monotonic() + 100.0, log, lambda results: seen.append(sorted(results)))
    assert seen == [["twin_made"], ["twin_made", "twin_static"]]
    results = engine.measure(commands[:2], time.monotonic() + 100.0, log, lambda results: None)
  assert results["twin_static"]["error"] == "has no model"


_WORK = {"kv_bytes": 131_072, "flops": {"token": 13.96e9, "row": 1.05e9, "pair": 524_288}}


def test_weights_drawn_by_several_processes_are_the_same(tmp_path) -> None:
  raw = CASES["llama3"][0] | {"num_hidden_layers": 1}
  for count in (1, 2):
    write_model(tmp_path / str(count), raw, seed=5, dtype="bfloat16", num_shards=2, num_processes=count)
  files = sorted(path.name for path in (tmp_path / "1").iterdir())
  assert len(files) == 4  # two shards, their index and the config
  for name in files:
    assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


_HOST = {"host": 400.0, "commit": 50.0}
_FULL = {
  "work": _WORK,
  "ceilings": {"bytes_s": 4.3e12, "flops_s": 790e12},
  "offline": {"lengths": [1000, 1000], "output_tok_s": 7000.0, "device_idle_share": 0.031, "host_us": _HOST},
}


def test_the_serial_roofline_is_that_of_the_goals() -> None:
  assert engine.serial_roofline(_FULL) == pytest.approx(12_100, rel=0.01)


def test_the_work_is_as_the_engine_benchmark_writes_it() -> None:
  raw = model_folder("llama3-8b")
  config = config_from_hf(json.loads((pathlib.Path(raw) / "config.json").read_text()))
  work = dataclasses.asdict(ModelWork.of(raw, config, jnp.dtype(jnp.bfloat16)))
  assert engine.serial_roofline(_FULL | {"work": work}) == pytest.approx(12_100, rel=0.01)


def test_verdicts() -> None:
  steps = [{"batch": 1, "context": 1024, "over_roofline": 1.3}, {"batch": 64, "context": 1024, "over_roofline": 1.36}]
  sampler = [{"batch": 1, "asked": "greedy", "of_step": 0.01}, {"batch": 64, "asked": "top_k, top_p", "of_step": 0.09}]
  alone, best = {"waits_share": 0.02}, _FULL["ceilings"]
  found = {
    "decode_8b": {"decode": steps, "sampler": sampler, "alone": alone, "warmup_s": 61.0, "ceilings": best},
    "decode_1b": {"error": "out of time", "decode": [{"batch": 32, "context": 1024, "over_roofline": 1.5}]},
    "start_bundle": {"warmup_s": 9.0, "fallbacks": ["bundle: was made for another server"]},
    "offline": {"offline": {"output_tok_s": 5000.0, "device_idle_share": 0.01, "host_us": _HOST}},
    "offline_plain": {"offline": {"output_tok_s": 4000.0}},
    "full": _FULL | {"compiles_after_ready": 0},
    "deterministic": {"same_bits_in_ways": 24, "work": [{"work": "decode of 8 at 1024", "ratio": 1.5}]},
    "answers_profiled": {"right": {"copy": 8, "json": 7}, "of_each": 8},
    "buffers_always": {"decode": [{"step_s": 0.004}]},
    "twin_sluice": {"output_tok_s": 5000.0},
    "twin_static": {"output_tok_s": 2500.0, "agreeing_prefix": 0.5},
  }
  lines = {line[:54].strip(): line[54:].split() for line in engine.table(found)[1:]}
  assert engine.table(found)[0] == "failed: decode_1b: out of time"
  assert lines["decode_1b: 32 x 1024, over roofline"][-1] == "+", "what it had measured before counts"
  assert lines["decode_8b: 1 x 1024, over roofline"] == ["1.30", "<=", "1.35", "+"]
  assert lines["decode_8b: 64 x 1024, over roofline"][-1] == "no"
  assert lines["decode_8b: sampler, 64 rows, top_k, top_p, of a step"] == ["9.0%", "<=", "8%", "no"]
  assert lines["start, cold: all rungs ran, s after the weights"] == ["61.0", "<=", "60", "no"]
  assert lines["start, bundle: all rungs ran, s after the weights"][-1] == "+"
  assert "start, bundle: bundle: was made for another server" in engine.table(found)
  assert lines["offline: device idle"][-1] == "+" and lines["full: device idle"][-1] == "no"
  assert lines["full: host, ms a step"] == ["0.45", "<=", "0.5", "+"]
  assert lines["full: compiles after ready"] == ["0", "<=", "0", "+"]
  assert lines["full: of the serial roofline"] == ["0.58", ">=", "0.55", "+"]
  assert lines["offline: overlap over no overlap"] == ["1.25"]
  assert lines["decode_8b: one request alone, device idle"] == ["2.0%", "<=", "3%", "+"]
  assert lines["deterministic: variants with the same bits"] == ["24"]
  assert lines["deterministic: decode of 8 at 1024, times as long"] == ["1.50"]
  assert lines["command buffers, skip profiled: right answers of 16"] == ["15"]
  assert lines["command buffers, always: ms a step"] == ["4.000"]
  assert lines["twin static: tokens before a first difference"] == ["50.0%"]
  assert lines["twin static: Sluice over its tokens a second"] == ["2.00", ">=", "1.5", "+"]
  assert "twin batching: Sluice over its tokens a second" not in lines


@pytest.mark.parametrize("missing", engine.STAGES)
def test_whatever_failed_there_is_a_table(missing: str) -> None:
  made = engine.stages(pathlib.Path("/scratch"), Sizes())
  found = {command.name: {"error": "out of time", "took_s": 0.0} for command in made[missing]}
  assert len(engine.table(found)) == len(found)


def test_kinds_of_stages_are_not_mixed(tmp_path) -> None:
  done = run_module("tools.gpu", f"--out={tmp_path}", "--only=check,decode")
  assert done.returncode == 2 and "do not fit into one run" in done.stderr
  done = run_module("tools.gpu", f"--out={tmp_path}", "--only=start,full")
  assert done.returncode == 2 and "give both" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("stages", ["decode,start", "offline,full,overlap", "deterministic,buffers"])  # no torch here
def test_a_dry_run(tmp_path, stages: str) -> None:
  flags = f"--out={tmp_path}", f"--scratch={tmp_path / 'scratch'}", "--dry_run=interpret", "--minutes=4"
  done = run_module("tools.gpu", *flags, f"--only={stages}")
  assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "engine_log.txt").read_text()
  results = json.loads((tmp_path / "engine.json").read_text())
  wanted = engine.stages(tmp_path, engine.TINY)
  assert set(results) == {command.name for stage in stages.split(",") for command in wanted[stage]}
  assert not any("error" in found for found in results.values())
  assert done.stdout.endswith((tmp_path / "engine.txt").read_text())
  if "start" in stages:
    assert results["start_bundle"]["fallbacks"] == [], "every program came from the bundle"


def test_the_pool_fits_the_card() -> None:
  h100, h200 = (engine.fit_blocks(mib * 2**20) for mib in (81559, 143771))
  assert h200 == 8192 and h100 and 6000 < h100 < 7200 and h100 % 256 == 0
  assert engine.fit_blocks(None) is None
  with pytest.raises(ConfigError, match="22 GiB is too small.*need 30 GiB"):
    engine.fit_blocks(23034 * 2**20)
  words = engine.stages(pathlib.Path("/"), dataclasses.replace(engine.Sizes(), blocks=h100))["offline"][0].words
  assert f"--num_blocks={h100}" in words
