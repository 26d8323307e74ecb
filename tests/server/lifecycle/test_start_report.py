"""What a start prints: the lines' text, JSON's fields, and a status line that leaves nothing behind."""

import contextlib
import json
import logging
import os
import pty
import re
import sys
import time

import pytest

from engine.build_facts import DeviceFact, KVFact, ModelFact, ProgramsFact, ProgramsMadeFact
from server.host_options import HostOptions
from server.lifecycle import start_report
from server.lifecycle.start_report import StartReport, served_addresses, shorten_path
from server.telemetry.log_lines import Lines

DEVICE = DeviceFact(kind="NVIDIA H100", count=2, dtype="bfloat16", attention="gpu", matmul="xla")
MODEL = ModelFact(
  name="tiny",
  folder="/models/tiny",
  num_parameters=125_300_000,
  num_bytes=300 * 2**20,
  max_model_len=4096,
  own_length=8192,
  is_chosen=False,
)
KV = KVFact(num_blocks=100, block_size=16, num_bytes=2**30, max_model_len=500)
PROGRAMS = ProgramsFact(count=9, token_budgets=(8, 32), cache_dir="/cache", is_cache_empty=False)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
  return capsys.readouterr().err.splitlines()


def changed(fact, **changes):
  return type(fact)(**{name: changes.get(name, getattr(fact, name)) for name in fact.__dataclass_fields__})


@pytest.mark.parametrize(
  "fact, line",
  [
    (DEVICE, "device    2 x NVIDIA H100, bfloat16; attention gpu, matmul xla"),
    (
      changed(DEVICE, count=1, quantization="int8", fallbacks=("attention=reference: it is old",)),
      "device    NVIDIA H100, bfloat16, int8 weights; attention gpu, matmul xla (slower than it could be: "
      "attention=reference: it is old)",
    ),
    (
      changed(MODEL, max_model_len=8192),
      "model     tiny in /models/tiny, 125M parameters (300 MiB); length 8,192, the model's own",
    ),
    (
      changed(MODEL, is_chosen=True, is_random=True),
      "model     tiny in /models/tiny, 125M random parameters (300 MiB); length 4,096 by --max_model_len (the model's: "
      "8,192)",
    ),
    (
      changed(MODEL, lowered="1 MiB hold 4 KV blocks of 16"),
      "model     tiny in /models/tiny, 125M parameters (300 MiB); length 4,096 of the model's 8,192: 1 MiB hold 4 KV "
      "blocks of 16 (--max_model_len, --kv_cache_mb)",
    ),
    (
      changed(MODEL, max_model_len=8192, draft_name="small", num_draft_parameters=660_000),
      "model     tiny in /models/tiny, 125M parameters (300 MiB); draft model small, 660K parameters; length 8,192, "
      "the model's own",
    ),
    (KV, "KV        100 blocks of 16 = 1,600 tokens in 1 GiB; 3 sequences of full length"),
    (
      changed(KV, dtype="int8"),
      "KV        100 blocks of 16 = 1,600 tokens in 1 GiB of int8; 3 sequences of full length",
    ),
    (
      changed(KV, num_host_blocks=2000, num_host_bytes=3 * 2**29),
      "KV        100 blocks of 16 = 1,600 tokens in 1 GiB; 3 sequences of full length; 2,000 evicted blocks on the "
      "host in 1.5 GiB",
    ),
    (
      changed(KV, num_host_blocks=2000, num_host_bytes=3 * 2**29, host_dir="/scratch"),
      "KV        100 blocks of 16 = 1,600 tokens in 1 GiB; 3 sequences of full length; 2,000 evicted blocks on the "
      "host in 1.5 GiB of a file in /scratch",
    ),
    (PROGRAMS, "programs  9, for steps of 8, 32 tokens; compiled unless they are in /cache"),
    (
      changed(PROGRAMS, is_cache_empty=True),
      "programs  9, for steps of 8, 32 tokens; all compiled now, and kept in /cache for the next start",
    ),
    (
      changed(PROGRAMS, cache_dir=""),
      "programs  9, for steps of 8, 32 tokens; all compiled at every start (--compile_cache_dir keeps them)",
    ),
    (
      changed(PROGRAMS, has_bundle=True),
      "programs  9, for steps of 8, 32 tokens; from the executable bundle, in seconds",
    ),
  ],
)
def test_a_fact_is_one_line(capsys, fact, line):
  StartReport(Lines(), verbose=False).tell_fact(fact)
  assert said(capsys) == [line]


@pytest.mark.parametrize(
  "programs, compiled, origin",
  [
    (PROGRAMS, 9, " (9 of 9 compiled)"),
    (PROGRAMS, 0, " (all from the compile cache)"),
    (changed(PROGRAMS, has_bundle=True), 0, " (all from the executable bundle)"),
  ],
)
def test_ready_says_what_took_the_time_and_ends_with_the_line_for_programs(capsys, programs, compiled, origin):
  report = StartReport(Lines(), verbose=False)
  report.tell_fact(programs)
  report.tell_fact(ProgramsMadeFact(count=9, num_compiled=compiled))
  report.tell_ready(1.25, 3.0, served_addresses(HostOptions(), 50051, 8000, -1))
  _, ready, where, last = said(capsys)
  text = r"ready     after \d+\.\d s: weights 1\.2 s, programs and KV pool 3\.0 s"
  assert re.fullmatch(text + re.escape(origin), ready)
  assert where == (
    "open      http://127.0.0.1:8000/ (page), http://127.0.0.1:8000/v1 (API), gRPC 127.0.0.1:50051, metrics "
    "http://127.0.0.1:8000/metrics"
  )
  assert last == "ready on 127.0.0.1:50051"


@pytest.mark.parametrize(
  "options, ports, wanted",
  [
    ({}, (1, -1, -1), "gRPC 127.0.0.1:1"),
    ({}, (1, -1, 3), "gRPC 127.0.0.1:1, metrics http://127.0.0.1:3/metrics"),
    (
      {"host": "0.0.0.0"},
      (1, 2, 3),
      "http://localhost:2/ (page), http://localhost:2/v1 (API), gRPC 0.0.0.0:1, metrics http://localhost:3/metrics; on "
      "every address of this machine",
    ),
    (
      {"http_host": "::1", "tls_cert_file": "cert"},
      (1, 2, -1),
      "https://[::1]:2/ (page), https://[::1]:2/v1 (API), gRPC 127.0.0.1:1, metrics https://[::1]:2/metrics",
    ),
  ],
)
def test_addresses_are_what_a_person_opens(options, ports, wanted):
  assert served_addresses(HostOptions(**options), *ports).describe() == wanted


def test_what_another_line_has_said_is_no_note(capsys):
  report = StartReport(Lines(), verbose=False)
  report.tell_fact(changed(DEVICE, fallbacks=("slow kernel",)))
  report.tell_detail("settings")
  report.tell_notes(("slow kernel", "", "a cache that cannot be written"), ("an unknown key",))
  assert said(capsys)[1:] == ["note: a cache that cannot be written", "warning: an unknown key"]
  StartReport(Lines(), verbose=True).tell_detail("settings")
  assert said(capsys) == ["settings"]


def test_progress_in_a_pipe_is_a_line_at_the_ends(capsys):
  report = StartReport(Lines(), verbose=False)
  for done in range(4):
    report.tell_progress("load", done, 3)
  for done in range(3):
    report.tell_progress("compile", done, 2)
  assert said(capsys) == ["load: 0 of 3 MiB", "load: 3 of 3 MiB", "compile: 0 of 2", "compile: 2 of 2"]


def test_silence_is_broken(capsys, monkeypatch):
  monkeypatch.setattr(start_report, "SILENCE_S", 0.2)
  monkeypatch.setattr(start_report, "_LOOK_S", 0.01)
  with StartReport(Lines(), verbose=False) as report:
    report.enter_stage("importing JAX")
    lines: list[str] = []
    while not any(line.startswith("importing JAX, ") for line in lines):
      time.sleep(0.01)
      lines += said(capsys)
    report.tell_progress("compile", 1, 9)
    while not any(line.startswith("compile: 1 of 9") for line in lines):
      time.sleep(0.01)
      lines += said(capsys)


def test_an_estimate_needs_a_share_that_is_done(monkeypatch):
  monkeypatch.setattr(start_report.time, "monotonic", lambda: 130.0)
  for done, left in ((2, ""), (3, ", about 40 s left"), (10, "")):
    work = start_report._Work(began=100.0, changed=130.0, done=done, total=10 if done != 3 else 7)
    assert start_report._progress_text("compile", work) == f"compile: {done} of {work.total}, 30 s{left}"


def read_terminal(master: int) -> str:
  """Returns all that came to a terminal whose other side is closed; a single read may return a part of it."""
  shown = b""
  with os.fdopen(master, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # EIO at the end
    while piece := terminal.read(65536):
      shown += piece
  return shown.decode()


def test_a_terminal_shows_one_line_that_is_rewritten(monkeypatch):
  master, slave = pty.openpty()
  with os.fdopen(slave, "w") as terminal:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    lines = Lines()
    assert lines.is_terminal
    with StartReport(lines, verbose=False) as report:
      report.enter_stage("importing JAX")
      for done in range(4):
        report.tell_progress("compile", done, 3)
      report.tell_fact(KV)
      report.enter_stage("starting the engine")
  shown = read_terminal(master)
  # What is left on the screen when every carriage return and erasure has done its work.
  left = [re.split(r"\r\x1b\[K", line)[-1].rstrip("\r") for line in shown.split("\n")]
  assert left == ["KV        100 blocks of 16 = 1,600 tokens in 1 GiB; 3 sequences of full length", ""]
  assert "importing JAX, 0 s" in shown and "starting the engine, 0 s" in shown


def test_json_lines_have_the_same_facts_as_fields(capsys):
  root = logging.getLogger()
  handlers, level = root.handlers[:], root.level
  try:
    lines = Lines()
    lines.set_up("json")
    report = StartReport(lines, verbose=False)
    report.tell_fact(KV)
    report.tell_progress("load", 0, 3)
    report.tell_ready(1.0, 2.0, served_addresses(HostOptions(), 50051, 8000, -1))
  finally:
    root.handlers[:], root.level = handlers, level
  kv, load, ready, where, last = map(json.loads, said(capsys))
  assert (kv["event"], kv["num_blocks"], kv["block_size"], kv["level"]) == ("KV", 100, 16, "info")
  assert (load["stage"], load["done"], load["total"]) == ("load", 0, 3)
  assert (ready["load_s"], ready["warmup_s"]) == (1.0, 2.0) and where["api"] == "http://127.0.0.1:8000/v1"
  assert last["message"] == "ready on 127.0.0.1:50051"


def test_paths_are_shown_as_a_person_knows_them(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  monkeypatch.chdir(tmp_path)
  wanted = {"models/demo": "models/demo", tmp_path / "a" / "b": "a/b", "/elsewhere/x": "/elsewhere/x"}
  assert {path: shorten_path(str(path)) for path in wanted} == wanted
  monkeypatch.chdir("/")
  assert shorten_path(str(tmp_path / "home" / "cache")).endswith("home/cache")
