"""The pages about the simulator, word for word: their files are written, their commands run, what they claim comes."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.tools.conftest import ROOT
from tools.report.run_file import RecordedRun, read_run

HOW_TO = ROOT / "docs" / "how-to"


def blocks(page: str, language: str, marker: str = "") -> list[str]:
  """The code blocks of a page in a language; with a marker, those that it stands above."""
  text = (HOW_TO / page).read_text("utf-8")
  found = re.findall(r"^(?:<!-- (.*?) -->\n)?```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
  return [code for above, its_language, code in found if its_language == language and marker in ("", above)]


def commands(page: str, marker: str) -> list[list[str]]:
  """Each line of the marked shell blocks, in words."""
  return [shlex.split(line) for block in blocks(page, "bash", marker) for line in block.splitlines() if line]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
  """A folder where commands find what they find in the root of a checkout, and may write."""
  (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  return tmp_path


def run(command: list[str]) -> str:
  """What a command of a page prints."""
  assert command[0] == "python"
  done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr
  return done.stdout


@contextlib.contextmanager
def serving(command: list[str], folder: pathlib.Path) -> Iterator[None]:
  """The server of a page, once it is ready: on free ports, and without a model's weights. It must stop well."""
  assert command[:3] == ["python", "-m", "server.main"]
  port_file = folder / "port"
  more = ["--fake_device", "--port=0", "--http_port=-1", f"--port_file={port_file}"]
  with open(folder / "server.log", "w", encoding="utf-8") as log:
    process = subprocess.Popen([sys.executable, *command[1:], *more], stdout=log, stderr=log)
  try:
    for _ in range(600):
      if port_file.exists() or process.poll() is not None:
        break
      time.sleep(0.1)
    assert process.poll() is None and port_file.exists(), (folder / "server.log").read_text("utf-8")
    yield
  finally:
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
  assert code == 0


def rows_of(table: str) -> dict[str, list[float]]:
  """The numbers of each policy's line."""
  lines = [line.split() for line in table.splitlines()]
  return {line[0]: [float(cell.replace(",", "").rstrip("%")) for cell in line[1:]] for line in lines if line}


def table_of(text: str) -> tuple[str, str]:
  """The head of the table that a text ends with, and its lines."""
  start = text.index("policy  ")
  head, _, lines = text[start:].partition("\n")
  return head, lines.split("\n\n")[0]


def check_claims(rows: dict[str, list[float]]) -> None:
  """What the page says of its table: column by column from the second."""
  tokens, p50, p99 = ({name: values[column] for name, values in rows.items()} for column in range(3))
  own, dynamic = "my_policy:ShortestPrompt", "my_policy:LongestWait"
  assert p50[own] < p50[dynamic] < p50["fcfs"]
  assert p99[own] > p99[dynamic] > p99["fcfs"]
  assert max(tokens.values()) < 1.02 * min(tokens.values())


@pytest.mark.long
def test_a_policy_is_written_simulated_drawn_and_served(folder):
  page = "write-a-policy.md"
  (code,) = blocks(page, "python")
  assert "`my_policy.py`" in (HOW_TO / page).read_text("utf-8")
  (folder / "my_policy.py").write_text(code, "utf-8")
  simulate, serve = commands(page, "test: policy")

  printed = run(simulate)
  (shown,) = blocks(page, "")
  head, lines = table_of(printed)
  assert head == shown.splitlines()[0], "the page shows other columns"
  assert rows_of(lines).keys() == rows_of(table_of(shown)[1]).keys()
  check_claims(rows_of(lines))
  check_claims(rows_of(table_of(shown)[1]))
  runs = [read_run(str(path)) for path in sorted(folder.glob("out/*.jsonl"))]
  assert [run.label for run in runs] == ["LongestWait", "ShortestPrompt", "fcfs"]
  assert order_of_first_tokens(runs[1]) != order_of_first_tokens(runs[2])
  assert (folder / "out" / "report.html").stat().st_size > 100_000
  assert {"modes.png", "cdf.png", "senders.png", "phases.png", "kv.png"} <= set(os.listdir(folder / "out"))

  with serving(serve, folder):
    pass


def order_of_first_tokens(run: RecordedRun) -> list[int | str]:
  """The ids of a run's requests, first served first."""
  return [outcome.id for outcome in sorted(run.outcomes, key=lambda outcome: outcome.chunks[0])]


def test_a_ladder_is_tuned_checked_and_served(folder):
  page = "tune-the-ladder.md"
  tune, with_ladder, without, serve = commands(page, "test: ladder")
  run(tune)
  text = (folder / "ladder.flags").read_text("utf-8")
  (shown,) = blocks(page, "")
  ladder = shown.splitlines()[1].split()[-1]
  assert f"--token_budgets={ladder}\n" in text, "the page shows another ladder"
  tuned, default = (rows_of(table_of(run(command))[1])["fcfs"] for command in (with_ladder, without))
  assert tuned[5] < default[5], "the page says that ITL p99 is lower"
  assert tuned[1] > default[1], "and that TTFT is the price"
  with serving(serve, folder):
    pass
