"""The two commands with a fixed face, run as others drive them: files in, files out, one JSON line, exit codes."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.tools.conftest import ENGINE_FLAGS, ROOT, VOCAB_SIZE, json_line, run_here, run_module
from tools import bench_offline, workload
from tools.report.run_file import read_run

OFFLINE_FIELDS = {
  "wall_s",
  "output_tok_s",
  "total_tok_s",
  "peak_rss_mb",
  "load_s",
  "warmup_s",
  "compiles_after_ready",
  "padding_share",
}
ONLINE_FIELDS = OFFLINE_FIELDS | {"ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tpot_p50_ms"}


@pytest.fixture(scope="module")
def requests() -> list[workload.WorkRequest]:
  return workload.synthetic(14, "uniform:1:50", "uniform:1:40", VOCAB_SIZE, seed=2, rate=40.0)


@pytest.fixture(scope="module")
def requests_file(requests, tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp("requests") / "requests.jsonl"
  with open(path, "w", encoding="utf-8") as file:
    workload.write_requests(file, requests, {"seed": 2})
  return str(path)


def offline_flags(model, requests_file, output, cache) -> list[str]:
  files = [f"--requests={requests_file}", f"--output_tokens={output}", f"--compile_cache_dir={cache}"]
  return [f"--model={model}", *files, *ENGINE_FLAGS]


def offline(model, requests_file, output, cache, *flags, run=run_here):
  return run("tools.bench_offline", *offline_flags(model, requests_file, output, cache), *flags)


def last_words(flags, capsys) -> str:
  """Of the command in this process, which must fail and print no figures."""
  try:
    code = bench_offline.main(flags)
  except SystemExit as stop:
    code = stop.code
  said = capsys.readouterr()
  assert (code, said.out) == (1, "") and "Traceback" not in said.err
  return said.err.splitlines()[-1]


@pytest.fixture(scope="module")
def offline_run(tiny_model, compile_cache, requests_file, tmp_path_factory):
  output = tmp_path_factory.mktemp("offline") / "tokens.jsonl"
  done = offline(tiny_model, requests_file, output, compile_cache, run=run_module)
  return done, output


def test_offline_prints_one_json_line_with_the_named_figures(offline_run, requests):
  done, _ = offline_run
  assert done.returncode == 0, done.stderr
  figures = json_line(done)
  assert figures.keys() >= OFFLINE_FIELDS
  output_tokens = sum(request.output_len for request in requests)
  prompt_tokens = sum(len(request.prompt) for request in requests)
  # wall_s is rounded to a tenth of a millisecond, and a run of a tiny model takes some tens of them.
  assert figures["output_tok_s"] * figures["wall_s"] == pytest.approx(output_tokens, rel=1e-2)
  assert figures["total_tok_s"] * figures["wall_s"] == pytest.approx(output_tokens + prompt_tokens, rel=1e-2)
  assert figures["compiles_after_ready"] == 0
  assert figures["completed"] == len(requests)
  # Padding is either computed or skipped, which is for the kernels that are built here to say.
  assert 0 <= figures["padding_share"] < 1 and (figures["padding_share"] > 0) is (figures["skipped_tokens"] == 0)
  # Every prompt token is computed once, and so is every output token but the last of each request.
  assert figures["prefill_tokens"] + figures["prefix_hit_tokens"] == prompt_tokens
  assert figures["decode_tokens"] == output_tokens - len(requests)


def test_offline_writes_exactly_the_tokens_asked_for(offline_run, requests):
  _, output = offline_run
  lines = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
  assert [line["id"] for line in lines] == [request.id for request in requests]
  assert [len(line["tokens"]) for line in lines] == [request.output_len for request in requests]
  tokens = {token for line in lines for token in line["tokens"]}
  assert tokens <= set(range(VOCAB_SIZE))
  assert tokens & set(range(8)), "no end-of-sequence token came up, so the test cannot tell that they are ignored"


def test_how_requests_are_scheduled_does_not_change_their_tokens(
  offline_run, tiny_model, compile_cache, requests_file, tmp_path
):
  _, output = offline_run
  static = offline(tiny_model, requests_file, tmp_path / "static.jsonl", compile_cache, "--batching=static")
  assert json_line(static)["batching"] == "static"
  realtime = offline(tiny_model, requests_file, tmp_path / "realtime.jsonl", compile_cache, "--realtime")
  assert json_line(realtime)["compiles_after_ready"] == 0
  expected = output.read_text("utf-8")
  assert (tmp_path / "static.jsonl").read_text("utf-8") == expected
  assert (tmp_path / "realtime.jsonl").read_text("utf-8") == expected


@pytest.mark.parametrize(
  ("line", "complaint"),
  [
    ('{"id": 0, "arrival_s": 0, "prompt": [96], "output_len": 4}', "96"),
    ('{"id": 0, "arrival_s": 0, "prompt": [1], "output_len": 400}', "256"),
    ('{"id": 0, "arrival_s": 0, "prompt": [], "output_len": 4}', "prompt"),
  ],
)
def test_offline_refuses_what_can_never_run_in_one_line(tiny_model, compile_cache, tmp_path, capsys, line, complaint):
  (tmp_path / "requests.jsonl").write_text(line + "\n", "utf-8")
  flags = offline_flags(tiny_model, tmp_path / "requests.jsonl", tmp_path / "out.jsonl", compile_cache)
  assert complaint in last_words(flags, capsys)
  assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("flags", [("--model=/nowhere",), ("--batching=lockstep",), ("--max_num_seqs=-1",)])
def test_offline_says_what_is_wrong_with_a_flag(tiny_model, requests_file, capsys, flags):
  said = last_words([f"--model={tiny_model}", f"--requests={requests_file}", *flags], capsys)
  assert said.startswith("tools.bench_offline: ")


@pytest.fixture(scope="module")
def server(tiny_model, compile_cache, tmp_path_factory):
  """HOST:PORT of a real server on the tiny model."""
  folder = tmp_path_factory.mktemp("server")
  port_file = folder / "port"
  with open(folder / "log", "w", encoding="utf-8") as log:
    process = subprocess.Popen(
      [
        sys.executable,
        "-m",
        "server.main",
        f"--model={tiny_model}",
        "--port=0",
        f"--port_file={port_file}",
        f"--compile_cache_dir={compile_cache}",
        *ENGINE_FLAGS,
      ],
      cwd=ROOT,
      stderr=log,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
  try:
    deadline = time.monotonic() + 240
    while not port_file.exists():
      assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text("utf-8")
      time.sleep(0.1)
    yield f"127.0.0.1:{port_file.read_text('utf-8').strip()}"
  finally:
    process.terminate()
    assert process.wait(180) == 0


def test_serving_gives_the_same_tokens_and_the_online_figures(server, offline_run, requests, requests_file, tmp_path):
  _, expected = offline_run
  done = run_module(
    "tools.bench_serving",
    f"--target={server}",
    f"--requests={requests_file}",
    f"--output_tokens={tmp_path / 'tokens.jsonl'}",
    "--slo_ttft_ms=600000",
  )
  assert done.returncode == 0, done.stderr
  figures = json_line(done)
  assert figures.keys() >= ONLINE_FIELDS
  assert figures["clients"] == 2
  assert figures["completed"] == len(requests)
  assert figures["slo_attainment"] == 1
  assert figures["compiles_after_ready"] == 0
  assert figures["wall_s"] >= requests[-1].arrival_s  # open loop: nothing is sent before its time
  assert (tmp_path / "tokens.jsonl").read_text("utf-8") == expected.read_text("utf-8")


def test_a_refused_request_is_a_miss_and_leaves_the_others_alone(server, tmp_path):
  lines = [{"id": index, "arrival_s": 0, "prompt": [1, 2, index], "output_len": 3} for index in range(3)]
  lines.append({"id": "long", "arrival_s": 0, "prompt": [1], "output_len": 4000})
  path = tmp_path / "requests.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
  figures = json_line(run_module("tools.bench_serving", f"--target={server}", f"--requests={path}", "--clients=3"))
  assert (figures["requests"], figures["completed"], figures["failed"]) == (4, 3, 1)
  assert figures["slo_attainment"] == 0.75
  assert figures["errors"] == {"INVALID_ARGUMENT": 1}


def test_serving_makes_requests_for_the_served_model(server):
  figures = json_line(
    run_module(
      "tools.bench_serving",
      f"--target={server}",
      "--trace=benchmarks/traces/azure_conv_500.csv",
      "--scale=0.1",
      "--rate_scale=50",
      "--num_requests=12",
    )
  )
  assert figures["completed"] == 12
  assert figures["workload"]["length_scale"] == 0.1
  assert figures["workload"]["rate_scale"] == 50


def test_a_run_is_kept_with_its_steps_and_without_its_warm_up(server, requests, requests_file, tiny_model, tmp_path):
  done = run_module(
    "tools.bench_serving",
    f"--target={server}",
    f"--requests={requests_file}",
    "--warmup_requests=4",
    f"--model={tiny_model}",
    f"--run_file={tmp_path / 'run.jsonl'}",
    "--slo_e2e_ms=600000",
  )
  figures = json_line(done)
  assert (figures["warmup_load"]["completed"], figures["completed"]) == (4, len(requests) - 4)
  run = read_run(str(tmp_path / "run.jsonl"))
  assert (run.label, run.about["slots"], run.about["slo"]) == ("chunked", 8, {"e2e_s": 600.0})
  assert [outcome.id for outcome in run.outcomes] == [request.id for request in requests[4:]]
  assert min(outcome.intended_s for outcome in run.outcomes) == 0
  # The steps that the server counted for the load are those that were read, and the account is theirs.
  account = figures["account"]
  assert len(run.steps) == figures["steps"] == account["steps"] and account["steps_missed"] == 0
  assert sum(step.decode_tokens for step in run.steps) == figures["decode_tokens"]
  assert {rung: row["padding_tokens"] for rung, row in account["by_rung"].items()} == {
    rung: row["padding_tokens"] for rung, row in figures["by_rung"].items()
  }
  assert account["skipped_tokens"] == figures["skipped_tokens"]
  assert (account["padding_flops_share"] > 0) is (account["skipped_tokens"] == 0)
  last_token = max(outcome.chunks[-1][0] for outcome in run.outcomes)
  # As near as a call takes, by which clocks are compared.
  assert all(-5 < step.time < last_token + 5 for step in run.steps), "steps and requests are on one clock"
  # And the engine tells of the same requests.
  assert figures["account_requests"]["requests"] == len(run.served) == len(requests) - 4
  assert sorted(record.output_tokens for record in run.served) == sorted(request.output_len for request in requests[4:])
  assert all(record.arrival < min(record.end, last_token + 5) for record in run.served)


def test_an_offline_run_is_kept_with_all_its_steps(tiny_model, compile_cache, requests_file, requests, tmp_path):
  path = tmp_path / "run.jsonl"
  done = offline(tiny_model, requests_file, tmp_path / "out", compile_cache, f"--run_file={path}", "--label=mine")
  figures, run = json_line(done), read_run(str(path))
  assert run.label == "mine" and len(run.outcomes) == len(requests)
  assert len(run.steps) == figures["steps"] == figures["account"]["steps"]
  assert len(run.served) == figures["account_requests"]["requests"] == len(requests)
  assert figures["account"]["padding_share"] == figures["padding_share"]


def test_serving_without_a_server_is_one_line(tmp_path):
  (tmp_path / "requests.jsonl").write_text('{"id": 0, "arrival_s": 0, "prompt": [1], "output_len": 4}\n', "utf-8")
  done = run_module("tools.bench_serving", "--target=127.0.0.1:9", f"--requests={tmp_path / 'requests.jsonl'}")
  assert done.returncode == 1
  assert done.stdout == ""
  assert done.stderr.splitlines()[-1].startswith("tools.bench_serving: ")
  assert "Traceback" not in done.stderr


def test_importing_the_client_side_loads_no_jax():
  code = (
    "import sys, tools.bench_serving, tools.workload, tools.demo, tools.demo.view, tools.study.compare_batching;"
    "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
  )
  assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0, pathlib.Path(code)
