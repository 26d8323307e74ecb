"""The engine's stages on a GPU, without one: what fails or hangs costs one command, verdicts are right, a dry run."""

import json
import pathlib
import sys
import time

import pytest

from tests.tools.conftest import run_module
from tools.gpu import engine
from tools.gpu.engine import Command, Sizes


def test_every_command_has_a_file_of_its_own() -> None:
  made = engine.stages(pathlib.Path("/out"), Sizes())
  commands = [command for commands in made.values() for command in commands]
  names = [command.name for command in commands]
  assert len(set(names)) == len(names) and tuple(made) == engine.STAGES
  words = {command.name: " ".join(command.words) for command in commands}
  assert "--shape=llama3-8b" in words["decode_8b"] and "--batches=1,8,32,64" in words["decode_8b"]
  assert "--shape=llama3.2-1b" in words["decode_1b"] and "--contexts=1024" in words["decode_1b"]
  assert "--requests=256" in words["offline"] and "--lengths=100,1024" in words["offline"]
  assert words["offline_plain"].startswith(words["offline"]) and "--overlap=false" in words["offline_plain"]
  assert "--lengths=1000,1000" in words["full"]
  assert words["start_cold"] == words["start_cached"], "only the cache's contents differ"
  assert "programs_of_start" in words["start_cold"] and "programs_of_start" not in words["decode_8b"]


def test_a_command_that_fails_or_hangs_costs_only_itself(tmp_path) -> None:
  def run(code: str, seconds: float) -> dict:
    command = Command("some thing", (sys.executable, "-c", code), "--xla_dump_to=")
    with open(tmp_path / "log", "w") as log:
      found = engine.run(command, tmp_path, time.monotonic() + seconds, log)
    assert json.loads((tmp_path / "some_thing.json").read_text()) == found
    return found

  said = run("import os; print('noise'); print('{\"flags\": \"' + os.environ['XLA_FLAGS'] + '\"}')", 100.0)
  assert said["flags"].endswith("--xla_dump_to=") and said["took_s"] >= 0
  assert run("raise SystemExit(3)", 100.0)["error"] == 3
  assert run("print('no json')", 100.0)["error"] == "said nothing that is understood"
  assert run("import time; time.sleep(600)", 0.2)["error"] == "out of time"


_WORK = {"kv_bytes": 131_072, "token_flops": 13.96e9, "head_flops": 1.05e9}
_FULL = {
  "work": _WORK,
  "ceilings": {"bytes_s": 4.3e12, "flops_s": 790e12},
  "offline": {"lengths": [1000, 1000], "output_tok_s": 7000.0, "device_idle_share": 0.031},
}


def test_the_serial_roofline_is_that_of_the_goals() -> None:
  assert engine.serial_roofline(_FULL) == pytest.approx(12_100, rel=0.01)


def test_verdicts() -> None:
  steps = [{"batch": 1, "context": 1024, "over_roofline": 1.3}, {"batch": 64, "context": 1024, "over_roofline": 1.36}]
  sampler = [{"batch": 1, "asked": "greedy", "of_step": 0.01}, {"batch": 64, "asked": "top_k, top_p", "of_step": 0.09}]
  found = {
    "start_cold": {"error": "out of time"},
    "start_cached": {"warmup_s": 9.0},
    "decode_8b": {"decode": steps, "sampler": sampler},
    "offline": {"offline": {"output_tok_s": 5000.0, "device_idle_share": 0.01}},
    "offline_plain": {"offline": {"output_tok_s": 4000.0}},
    "full": _FULL,
    "buffers_always": {"decode": [{"step_s": 0.004}]},
    "twin_sluice": {"output_tok_s": 5000.0},
    "twin_static": {"output_tok_s": 2500.0, "agreeing_prefix": 0.5},
  }
  lines = {line[:54].strip(): line[54:].split() for line in engine.table(found)[1:]}
  assert engine.table(found)[0] == "failed: start_cold: out of time"
  assert lines["decode_8b: 1 x 1024, over roofline"] == ["1.30", "<=", "1.35", "+"]
  assert lines["decode_8b: 64 x 1024, over roofline"][-1] == "no"
  assert lines["decode_8b: sampler, 64 rows, top_k, top_p, of a step"] == ["9.0%", "<=", "8%", "no"]
  assert lines["offline: device idle"][-1] == "+" and lines["full: device idle"][-1] == "no"
  assert lines["full: of the serial roofline"] == ["0.58", ">=", "0.55", "+"]
  assert lines["offline: overlap over no overlap"] == ["1.25"]
  assert lines["start_cached: all rungs ready, s after the weights"][-1] == "+"
  assert lines["command buffers, always: ms a step"] == ["4.000"]
  assert lines["twin static: tokens before a first difference"] == ["50.0%"]
  assert lines["twin static: ours over its tokens a second"] == ["2.00", ">=", "1.5", "+"]
  assert "twin batching: ours over its tokens a second" not in lines


def test_kinds_of_stages_are_not_mixed(tmp_path) -> None:
  done = run_module("tools.bench_gpu", f"--out={tmp_path}", "--only=check,decode")
  assert done.returncode == 2 and "do not fit into one run" in done.stderr
  done = run_module("tools.bench_gpu", f"--out={tmp_path}", "--only=decode", "--dry_run=compile")
  assert done.returncode == 2 and "make check-device" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("stage", [stage for stage in engine.STAGES if stage != "twin"])  # that needs torch
def test_a_dry_run(tmp_path, stage: str) -> None:
  done = run_module("tools.bench_gpu", f"--out={tmp_path}", "--dry_run=interpret", "--minutes=4", f"--only={stage}")
  assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "engine_log.txt").read_text()
  for command in engine.stages(tmp_path, engine.TINY)[stage]:
    assert "error" not in json.loads((tmp_path / f"{command.name.replace(' ', '_')}.json").read_text())
  assert done.stdout == (tmp_path / "engine.txt").read_text()
