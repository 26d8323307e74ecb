"""The front door: names that load when they are used, and a command that hands over to what does the work."""

import subprocess
import sys

import pytest

from server.version import server_version
import sluice
from tests.commands import ROOT, run_module


def run_sluice(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
  return run_module("sluice", *arguments, text=text)


def test_help_and_version_load_neither_jax_nor_grpc():
  code = "import sys, sluice\nfor argument in ('--help', '--version'):\n  sys.argv[1:] = [argument]\n  sluice.main()\n"
  code += "print([name for name in ('jax', 'numpy', 'grpc', 'absl', 'google.protobuf') if name in sys.modules])"
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
  *said, loaded = done.stdout.splitlines()
  assert loaded == "[]"
  assert said[0] == "usage: sluice COMMAND [ARGUMENT ...]" and said[-1] == f"sluice {server_version()}"


def test_every_name_is_there():
  assert sluice.__version__ == server_version()
  for name in sluice.__all__:
    assert getattr(sluice, name) is not None and name in dir(sluice)
  assert sluice.LLM.__module__ == "extensions.python_api.llm"
  with pytest.raises(AttributeError, match="module 'sluice' has no attribute 'Server'"):
    _ = sluice.Server


def test_every_command_is_listed():
  done = run_sluice("--help")
  assert done.returncode == 0 and run_sluice().stdout == done.stdout
  for command in ("serve", "chat", "bench", "demo", "lm-eval"):
    assert f"\n  {command} " in done.stdout


def test_every_benchmark_is_listed_and_there(monkeypatch, capsys):
  run = []
  monkeypatch.setattr(sluice, "_run_module", lambda module, arguments: run.append((module, arguments)))
  for name, (module, help) in sluice._BENCHES.items():
    assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    sluice._run_command(["bench", name, "--x=1"])
    assert run.pop() == (module, ["--x=1"])
    assert help
  sluice._run_command(["bench"])
  shown = capsys.readouterr().out
  assert all(f"\n  {name} " in shown for name in sluice._BENCHES)


@pytest.mark.parametrize(
  ("arguments", "complaint"),
  [
    (["srve"], "sluice: 'srve' is not a command; did you mean serve? `sluice --help` lists them"),
    (
      ["bench", "servng"],
      "sluice: 'servng' is not a benchmark; did you mean serving? `sluice bench --help` lists them",
    ),
    (["lm-eval", "run"], "sluice: lm-eval needs the package lm-eval, which is not installed; pip install lm-eval"),
    (["--modle=x"], "'--modle=x' is not a command"),
    (["chat", "ftp://host"], "sluice: 'ftp://host' is no address; give HOST:PORT, such as 127.0.0.1:50051"),
  ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, complaint):
  monkeypatch.setattr(sys, "argv", ["sluice", *arguments])
  assert sluice.main() == 2
  said = capsys.readouterr()
  assert complaint in said.err and said.err.count("\n") == 1 and not said.out


def test_serve_takes_the_flags_of_the_server():
  done = run_sluice("serve", "--help")
  assert done.returncode == 0 and done.stdout.startswith("usage: sluice serve [MODEL] [--name=value ...]")
  assert "--max_num_seqs" in done.stdout
  missing = run_sluice("serve", "/nowhere", "--port=0")
  assert missing.returncode in (1, 2) and "/nowhere" in missing.stderr.strip().splitlines()[-1]


def test_bench_offline_runs_through_the_command(tmp_path):
  done = run_sluice("bench", "offline", f"--model={tmp_path}", f"--requests={tmp_path / 'none.jsonl'}")
  assert done.returncode == 1 and "none.jsonl" in done.stderr.splitlines()[-1] and not done.stdout


@pytest.mark.parametrize(
  ("address", "flags"),
  [
    (["host:1"], ["--target=host:1"]),
    (["grpc://host:1"], ["--target=host:1"]),
    (["grpcs://host:1"], ["--target=host:1", "--tls"]),
    (["https://host:1/"], ["--target=https://host:1/"]),
    ([], []),
  ],
)
def test_chat_knows_addresses(monkeypatch, address, flags):
  run = []
  monkeypatch.setattr(sluice, "_run_module", lambda module, arguments: run.append((module, arguments)))
  sluice._run_command(["chat", *address, "--max_tokens=3"])
  assert run == [("tools.client", ["--chat", *flags, "--max_tokens=3"])]


def test_chat_answers_through_the_command():
  done = run_sluice("chat", "127.0.0.1:9", text="hello\n")
  assert done.returncode == 1 and "UNAVAILABLE" in done.stderr
