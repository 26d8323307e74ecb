"""The cloud benchmark: what it plans for a device, its page from recorded results, servers that fail, a dry run."""

import argparse
import json
import subprocess
import sys

import pytest

from tests.commands import ROOT
from tools.bench_cloud import __main__ as bench_cloud
from tools.bench_cloud import http_load
from tools.bench_cloud.page import describe_part, make_lead
from tools.gpu.engine import Command

# Facts as the first part tells them. Those of the GPU and the TPU are written by hand: nothing has run there.
H100 = {"platform": "gpu", "device": "NVIDIA H100 80GB HBM3", "num_devices": 1, "memory_bytes": 75 << 30}
H100 |= {"compute_capability": "9.0", "driver": "580.82.07", "versions": {"jax": "0.11.2"}}
L4 = H100 | {"device": "NVIDIA L4", "memory_bytes": 21 << 30, "compute_capability": "8.9"}
V5E = {"platform": "tpu", "device": "TPU v5 lite", "num_devices": 1, "memory_bytes": 15 << 30}
V5E |= {"compute_capability": "", "driver": "", "versions": {"jax": "0.11.2", "libtpu": "0.0.48.1"}}


def planned(facts, tmp_path, **changes):
  settings = {"out": tmp_path, "minutes": 30.0, "model": "", "dry_run": False, "peer": []} | changes
  return bench_cloud.plan_parts(facts, argparse.Namespace(**settings))


def test_shapes_and_kernels_follow_the_device(tmp_path, monkeypatch):
  monkeypatch.setattr(bench_cloud.shutil, "which", lambda name: None)
  found = planned(H100, tmp_path)
  assert any(word.endswith("llama3-8b") for word in found["engine"].words)
  assert found["kernels"].words[2] == "tools.bench_cloud.gpu_kernels"
  assert found["peers"] == "none of vllm, sglang is on PATH; install one, or give --peer=NAME=COMMAND"
  for facts in (L4, V5E):
    found = planned(facts, tmp_path)
    assert any(word.endswith("llama3.2-1b") for word in found["engine"].words)
    assert "compute capability 9.0 (H100, H200), not" in found["kernels"] and facts["device"] in found["kernels"]


def test_limits_are_shares_of_the_time(tmp_path):
  found = planned(H100, tmp_path, minutes=10.0)
  assert all(0 < part.limit_s <= 300 for part in found.values() if isinstance(part, Command))


def test_peers_are_found_on_path_and_need_a_model(tmp_path, monkeypatch):
  monkeypatch.setattr(bench_cloud.shutil, "which", lambda name: f"/bin/{name}" if name == "vllm" else None)
  assert planned(H100, tmp_path)["peers"] == "peers need weights and a tokenizer; give --model=DIR"
  words = planned(H100, tmp_path, model="/models/m")["peers"].words
  servers = [word for word in words if word.startswith("--server=")]
  assert [server.split("=")[1] for server in servers] == ["sluice", "vllm"]
  assert servers[1] == "--server=vllm=vllm serve {model} --port={port} --served-model-name=model"
  words = planned(H100, tmp_path, model="/models/m", peer=[("mine", "serve {model} {port}")])["peers"].words
  assert "--server=mine=serve {model} {port}" in words and not any("vllm" in word for word in words)


def test_the_page_tells_what_ran_where_and_what_failed():
  about = {"facts": H100, "date": "2026-11-24", "commit": "abc123", "minutes": 4.2, "dry_run": False}
  about["machine"] = {"cpu": "Xeon", "cores": 26, "python": "3.12.1"}
  parts = {
    "answers": {"right": {"copy": 8, "json": 7}, "of_each": 8, "took_s": 31.0, "notes": ["attention=reference: <why>"]},
    "attention": {"error": "differs from the reference", "took_s": 3.0},
    "kernels": {"table": ["ceilings: read 4.1 TB/s", "correct: 30 of 30 specs, 0 failed"], "took_s": 100.0},
    "served": {"burst": {"output_tok_s": 1234.4, "completed": 200}, "run_files": [], "took_s": 60.0},
    "peers": {
      "vllm": {"error": "ConfigError: the server ended", "run_files": []},
      "sluice": {"burst": {"output_tok_s": 10.0}, "run_files": []},
    },
  }
  lead = make_lead(about, parts)
  for text in ("1 x NVIDIA H100 80GB HBM3, 75 GiB each", "580.82.07", "jax 0.11.2", "abc123", "2026-11-24", "26 cores"):
    assert f"{text}" in lead, text
  assert "15 of 16 known answers right" in lead and "failed: differs from the reference" in lead
  assert "correct: 30 of 30 specs" in lead and "read 4.1 TB/s" in lead and "&lt;why&gt;" in lead
  assert "1234 output tokens/s, 200 requests answered" in lead and "vllm: ConfigError: the server ended" in lead
  assert describe_part("peers", {"left_out": "none is here"}) == "left out: none is here"
  assert "the device did not start" in make_lead(about | {"facts": {}}, {})


def test_a_server_that_does_not_start_costs_only_itself(tmp_path, capsys):
  (tmp_path / "config.json").write_text('{"vocab_size": 64}')
  words = [f"--out={tmp_path / 'out'}", f"--model={tmp_path}"]
  words += [
    "--server=broken={python} -c 'print(\"no GPU here\"); raise SystemExit(3)'",
    "--server=missing=/no/such",
  ]
  assert http_load.main(words) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["broken"]["error"] == "ConfigError: the server ended with exit code 3: no GPU here"
  assert "FileNotFoundError" in found["missing"]["error"]


def test_a_device_that_does_not_start_is_the_report(tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "rocm")
  assert bench_cloud.main([f"--out={tmp_path}", "--minutes=2"]) == 1
  found = json.loads((tmp_path / "cloud.json").read_text())["parts"]
  assert "JAX_PLATFORMS=rocm: JAX finds no such device" in found["device"]["error"]
  assert [found[name] for name in bench_cloud.PARTS] == [{"left_out": "the device did not start"}] * 6
  assert (
    "failed: exit code 2: tools.bench_cloud.device_checks: JAX_PLATFORMS=rocm" in (tmp_path / "report.html").read_text()
  )


def test_bad_flags_are_one_line(capsys):
  for word, said in (("--only=nothing", "nothing is not one of answers"), ("--model=/no/such", "has no config.json")):
    with pytest.raises(SystemExit, match="2"):
      bench_cloud.main([word])
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


@pytest.mark.long
def test_a_dry_run(tmp_path):
  """Every part on a CPU, with a second Sluice as the peer."""
  peer = f"twin={sys.executable} -m server.main --model={{model}} --port=0 --http_port={{port}}"
  command = [sys.executable, "-m", "tools.bench_cloud", "--dry_run", f"--out={tmp_path}", f"--peer={peer}"]
  done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=1500, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  found = json.loads((tmp_path / "cloud.json").read_text())
  assert set(found["parts"]) == set(bench_cloud.PARTS) and found["about"]["dry_run"]
  assert found["parts"]["answers"]["right"] == dict.fromkeys(found["parts"]["answers"]["right"], 2)
  assert all(check["norm_error"] < 1e-4 for check in found["parts"]["attention"]["checks"])
  assert found["parts"]["served"]["burst"]["completed"] == 6
  for name in ("sluice", "twin"):
    figures = found["parts"]["peers"][name]["steady"]
    assert figures["completed"] == figures["requests"] == 6, figures
  page = (tmp_path / "report.html").read_text()
  assert "twin (HTTP)" in page and "data:image/png;base64," in page and "http" not in page.split("<h1>")[0]
