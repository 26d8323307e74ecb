"""The TPU's first contact without a TPU: kernels in Pallas' simulator, wrong ones, a dry run."""

from collections.abc import Callable
import json

import jax
from jax.experimental.pallas import tpu as pltpu
import pytest

from pallas_kernels.paged_attention import arg_specs
from pallas_kernels.row_copies import tpu as row_copies
from tests.tools.conftest import run_module
from tools.gpu import cases, losses, report, timing
from tools.gpu.jobs import Setting
from tools.tpu import __main__ as tpu_main
from tools.tpu import jobs

ROW_COPIES = {"kind": "smoke", "implementation": "tpu", "op": "row copies"}


def test_every_job_names_a_spec_and_its_kernels() -> None:
  made = [job for stage in tpu_main.STAGES for job in tpu_main.jobs_of(stage)]
  names = {spec.name for spec in (*arg_specs.GPU_BENCHMARK, *arg_specs.CONFORMANCE)}
  assert {job["spec"] for job in made if "spec" in job} <= names
  assert len({report.describe(job) for job in made}) == len(made)
  checked = {job["spec"] for job in made if job["kind"] == "check"}
  assert {spec.name for spec in arg_specs.GPU_BENCHMARK} <= checked and "odd_sizes" not in checked
  assert ROW_COPIES in made
  by_name = {report.describe(job): losses.name_kernels(job) for job in made}
  assert by_name["time tpu decode decode 64 x 1024"] == {"tpu attention 128"}
  assert by_name["smoke tpu row copies"] == {"smoke tpu row copies"}  # its loss stops no attention kernel
  assert by_name["check tpu attend decode 64 x 1024"] == {"tpu write 128", "tpu attention 128"}


def _run(job: dict) -> dict:
  setting = Setting(jax.devices()[0], "interpret", timing.Effort(1, 1e-6))
  with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
    prepared = jobs.prepare(job, setting)
    return prepared.run(prepared.compile())


@pytest.mark.kernels
@pytest.mark.parametrize("op", jobs.SMOKE_OPS)
def test_a_wrong_kernel_shows(monkeypatch, op: str) -> None:
  job = {"kind": "smoke", "implementation": "tpu", "op": op, "head_dim": 64, "kv_dtype": ""}
  assert _run(job)["error"] < 4e-3
  write, attention = jobs.tpu.write_kv, jobs.tpu.ragged_paged_attention
  monkeypatch.setattr(jobs.tpu, "write_kv", lambda kv, k, v, slots: write(kv, v, k, slots))
  monkeypatch.setattr(jobs.tpu, "ragged_paged_attention", lambda *args, **kwargs: 1.05 * attention(*args, **kwargs))
  with pytest.raises(cases.Wrong, match="lines of the pool|attention: error"):
    _run(job)


@pytest.mark.kernels
def test_row_copies_are_right() -> None:
  found = _run(ROW_COPIES)
  assert (found["error"], found["read"]) == (0, 0)


@pytest.mark.kernels
@pytest.mark.parametrize(
  ("name", "bug", "message"),
  [
    ("write_rows", lambda write: lambda buffer, rows, values: write(buffer, rows % 129, values), "rows of the buffer"),
    ("write_rows", lambda write: lambda buffer, rows, values: write(buffer, rows, -values), "rows of the buffer"),
    ("read_rows", lambda read: lambda buffer, rows, width: read(buffer, rows + 1, width), "^rows that were read"),
  ],
  ids=["padding is written", "other values are written", "other rows are read"],
)
def test_wrong_row_copies_show(monkeypatch: pytest.MonkeyPatch, name: str, bug: Callable, message: str) -> None:
  monkeypatch.setattr(row_copies, name, bug(getattr(row_copies, name)))
  with pytest.raises(cases.Wrong, match=message):
    _run(ROW_COPIES)


@pytest.mark.kernels
def test_a_dry_run_leaves_its_files(tmp_path) -> None:
  match = "smoke (add|dma)|ceiling copy|time tpu write decode"
  done = run_module("tools.tpu", f"--out={tmp_path}", "--dry_run=interpret", "--minutes=4", f"--match={match}")
  assert done.returncode == 0, done.stdout + done.stderr
  lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
  assert lines[0]["meta"]["mode"] == "interpret"
  assert [report.describe(line["job"]) for line in lines[1:]] == [
    "smoke add",
    "smoke dma copy",
    "ceiling copy",
    "time tpu write decode 64 x 1024",
  ]
  assert done.stdout == (tmp_path / "table.txt").read_text() and "smoke: each kernel alone" in done.stdout


def test_without_a_tpu_it_says_so(tmp_path) -> None:
  done = run_module("tools.tpu", f"--out={tmp_path}", "--only=smoke")
  assert done.returncode == 2 and "ended with exit code 1 before it took a job" in done.stdout
  assert "not a tpu" in (tmp_path / "log.txt").read_text()
