"""The GPU benchmark without a GPU: what hangs or dies costs one job, wrong kernels are told, a dry run goes through."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import io
import json
import os
from pathlib import Path
import re
import subprocess
import sys
import textwrap
import time
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import arg_specs, tuning
from pallas_kernels.paged_attention.plan import make_plan
from tests.kernels import conformance
from tests.tools.conftest import ROOT, run_module
from tools.gpu import __main__ as bench_gpu
from tools.gpu import cases, device_run, jobs, protocol, report, smoke, sweep
from tools.gpu.losses import Losses

# --- the processes ----------------------------------------------------------------------------------------------------

_FAKE = """
import os, sys, time
from tools.gpu import protocol
lost = []
def run(job):
  if job["do"] == "raise": raise ValueError("as told")
  if job["do"] == "spoil": lost.append(job); raise ValueError("spoilt")
  if job["do"] == "die": os._exit(9)
  if job["do"] == "abort": os.abort()
  if job["do"] == "sleep": time.sleep(600)
  print("noise on standard output")
  return {"us": job["n"]}
def prepare(job):
  if job["do"] == "die early": os._exit(7)
  return protocol.Prepared(lambda: None, lambda _: run(job))
sys.exit(protocol.serve({"device": "fake"}, prepare, lambda: not lost))
"""


@pytest.fixture
def log(tmp_path) -> Iterator[TextIO]:
  with open(tmp_path / "log.txt", "w", encoding="utf-8") as file:
    yield file


def _worker(log: TextIO, patience_s: float = 60.0, code: str = _FAKE, examine=None) -> protocol.Worker:
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  return protocol.Worker([sys.executable, "-c", textwrap.dedent(code)], environment, log, patience_s, examine)


def _run(worker: protocol.Worker, *dos: str, seconds: float = 300.0) -> dict[int, dict]:
  asked = [{"n": n, "do": do} for n, do in enumerate(dos)]
  found = list(worker.run(asked, time.monotonic() + seconds))
  worker.close()
  assert sorted(record["job"]["n"] for record in found) == list(range(len(dos))), "one record for each job"
  return {record["job"]["n"]: record for record in found}


def test_a_job_that_fails_or_kills_its_process_is_the_only_one_lost(log) -> None:
  worker = _worker(log)
  found = _run(worker, "ok", "raise", "ok", "spoil", "die", "ok", "die early", "ok", "abort")
  assert [found[n]["ok"] for n in range(9)] == [True, False, True, False, False, True, False, True, False]
  assert found[5]["figures"] == {"us": 5}
  assert found[1]["error"] == "ValueError: as told"
  assert "code 9" in found[4]["error"] and "code 7" in found[6]["error"] and "SIGABRT" in found[8]["error"]
  assert [n for n in range(9) if found[n].get("lost")] == [3, 4, 6, 8]
  assert worker.hello == {"device": "fake"}


def test_what_hangs_is_examined_and_killed(log) -> None:
  seen = []
  found = _run(_worker(log, patience_s=6.0, examine=lambda pid: [f"pc of {seen.append(pid)}"]), "ok", "sleep", "ok")
  assert [found[n]["ok"] for n in range(3)] == [True, False, True]
  assert found[1]["error"].endswith(protocol.HANGS) and found[1]["stuck"] == ["pc of None"] and len(seen) == 1
  assert "in run" in Path(log.name).read_text(), "the log has the Python stack of the job"


def test_nothing_goes_on_after_the_deadline(log) -> None:
  found = _run(_worker(log), "ok", "sleep", "ok", seconds=3.0)
  assert found[1]["error"] == found[2]["error"] == protocol.OUT_OF_TIME


def test_who_stops_listening_gets_a_fresh_process_for_the_next_jobs(log) -> None:
  worker = _worker(log)
  records = worker.run([{"n": 0, "do": "ok"}, {"n": 1, "do": "sleep"}], time.monotonic() + 300)
  assert next(records)["job"]["n"] == 0
  records.close()
  assert _run(worker, "ok")[0]["ok"] and worker.starts == 2


def test_a_process_that_cannot_start_is_told_at_once(log) -> None:
  with pytest.raises(protocol.DidNotStart, match="code 4"):
    _run(_worker(log, code="raise SystemExit(4)"), "ok")


def test_a_stage_stops_at_its_share_and_what_is_left_is_recorded(monkeypatch, tmp_path) -> None:
  results = io.StringIO()
  run = device_run.DeviceRun(
    tmp_path, io.StringIO(), results, "interpret", 100.0, re.compile("copy|matmul|check"), started=time.monotonic()
  )
  sent = []

  def take(batch, deadline, patience_s):
    sent.append(len(batch))
    run.started -= 30.0  # a batch takes 30 seconds
    return [{"job": job, "ok": True, "figures": {"us": 1.0}} for job in batch]

  monkeypatch.setattr(run.worker, "run", take)
  made = [{"kind": "check", "op": "parts", "spec": str(n)} for n in range(20)] + [{"kind": "ceiling", "what": "read"}]
  found = list(run.do(made, 0.5))
  assert sent == [8, 8]
  assert [record["ok"] for record in found] == [True] * 16 + [False] * 4
  assert {record["error"] for record in found[16:]} == {protocol.OUT_OF_TIME}
  assert [json.loads(line) for line in results.getvalue().splitlines()][1:] == found
  assert not any(report.failed(record) for record in found)


def test_every_job_names_a_spec_and_shares_rise() -> None:
  names = {spec.name for spec in arg_specs.GPU_SPECS}
  made = [job for stage in bench_gpu.STAGES for job in bench_gpu.jobs_of(stage)]
  made += sweep.jobs(sweep.FACTORS[0], {"split_tokens": 256, "block_size": 64})
  assert {job["spec"] for job in made if "spec" in job} <= names
  assert {job["kind"] for job in made} == {
    "smoke",
    "ceiling",
    "check",
    "deterministic",
    "time",
    "profile",
    "peer",
    "step",
  }
  assert device_run.share_out({"ceilings": 4, "check": 6}) == {"ceilings": 0.4, "check": 1.0}, "no time is left unused"
  checked = {job["spec"] for job in made if job["kind"] == "check"}
  assert {spec.name for spec in arg_specs.GPU_BENCHMARK} <= checked and "mixed_window" in checked


def test_every_setting_of_the_table_and_of_the_sweep_is_checked() -> None:
  """The table's in each block size, and in both dtypes of a pool."""
  made, setting = bench_gpu.jobs_of("settings"), jobs.Setting(jax.devices()[0], "emulate")
  found = set()
  for job in made:
    spec = setting.spec(job["spec"])
    found.add((spec.head_dim, job["block_size"], setting.tuning(spec, job["tuning"]), job.get("kv_dtype", "")))
  assert len(found) == len(made), "no setting is checked twice"
  for head_dim, block_size, values in tuning.list_tunings():
    for size in (16, 32, 64, 128) if block_size is None else (block_size,):
      assert {(head_dim, size, values, ""), (head_dim, size, values, "uint8")} <= found
  for factor in sweep.FACTORS:
    for change in factor.values:
      fields = [job["tuning"] | {"block_size": job["block_size"]} for job in made]
      assert any(change.items() <= each.items() for each in fields), change
  assert "settings" not in bench_gpu.STAGES, "make gpu has no time for it"


def test_a_batch_shows_what_a_setting_changes() -> None:
  """Rows of several parts, rings that are used again, and whole tiles of written tokens beside a part of one."""
  for spec in arg_specs.SETTINGS:
    assert spec.num_tokens > 64 and spec.num_tokens % 4
    for values in (values for head_dim, _, values in tuning.list_tunings() if head_dim == spec.head_dim):
      decoded, prefilled = (max(length for queries, length in spec.rows if (queries > 4) == many) for many in (0, 1))
      assert decoded >= max(2 * values.split_tokens, 2 * 64 * values.decode_stages)
      assert prefilled > values.prefill_stages * values.prefill_tile_keys


def test_the_jobs_of_split_rows_have_parts_on_few_sms_and_on_all() -> None:
  """The smoke stage's, and the batches that the emulator and the interpreter run on two SMs."""
  spec = smoke.spec_of(128)
  of_rows = [(spec, 2), (spec, 132), *((case, 2) for case in arg_specs.SETTINGS)]
  of_rows += [(case, 2) for case in arg_specs.GPU_SPECS if case.name in ("long", "decode", "chunk_among_decodes")]
  for spec, num_sms in of_rows:
    case = cases.KernelCase(dataclasses.replace(spec, dtype="bfloat16"))
    plan = make_plan(spec.geometry, 64, num_sms, 2)
    pieces = plan.split(plan.make_work(case.query_starts, case.kv_lens))
    assert (pieces["decode_items"][: pieces["worker_starts"][-1], 7] > 1).any(), spec.name


# --- first contact ----------------------------------------------------------------------------------------------------

_DEBUGGER = """#!/bin/sh
echo "[New Thread 0x7f]"
echo "  Kernel Parent Dev Grid Status   SMs Mask  GridDim  BlockDim Invocation"
echo "*      0      -   0    1 Active 0xffffffff  (132,1,1) (256,1,1) decode_kernel"
echo "  (0,0,0) (0,0,0) (0,0,0) (127,0,0) 128 0x00007f2f5c2d0a50 n/a 0"
"""


def _contact(tmp_path, monkeypatch, stages: tuple[str, ...], match: str = "") -> tuple[int, device_run.DeviceRun, str]:
  """Runs stages on tests/tools/gpu/fake_worker.py."""
  monkeypatch.setattr(bench_gpu, "SMOKE_PATIENCE_S", {"device": 2.0})
  monkeypatch.setattr(device_run, "_PATIENCE_S", {"device": 2.0})
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  settings = {"mode": "device", "seconds": 300.0, "match": re.compile(match)}
  with device_run.open_run(tmp_path, worker_words=("tests.tools.gpu.fake_worker",), **settings) as run:
    code = device_run.finish(run, functools.partial(bench_gpu.run_stages, stages=stages))
  return code, run, (tmp_path / "table.txt").read_text()


def test_a_hang_an_abort_and_a_wrong_answer_are_all_in_the_report(tmp_path, monkeypatch) -> None:
  (tmp_path / "cuda-gdb").write_text(_DEBUGGER)
  (tmp_path / "cuda-gdb").chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  wanted = (
    "smoke (add|tma|(write|prefill|decode|decode parts) heads of 128$)|check parts decode$|time decode decode 8 x"
  )
  code, run, table = _contact(tmp_path, monkeypatch, ("smoke", "check", "time"), wanted)
  assert code == 1
  verdicts = {}
  for record in run.records:
    verdicts.setdefault(report.describe(record["job"]), []).append(report.name_verdict(record))
  assert verdicts == {
    "smoke add": ["right"],
    "smoke tma copy": ["right"],
    "smoke tma tiles": ["unsupported"],
    "smoke write heads of 128": ["WRONG"],
    "smoke prefill heads of 128": ["DIED", "DIED"],
    "smoke decode heads of 128": ["HANGS", "HANGS"],
    "smoke decode parts heads of 128": ["right"],
    "check parts decode": ["right"],  # heads of 64
    "time decode decode 8 x 1024": ["skipped"],
  }
  assert run.worker.starts == 5, "one more for each loss"
  wrong = next(record for record in run.records if record["job"].get("op") == "write")
  assert wrong["figures"] == {"query_error": 1e-3, "error": 2e-3, "wrong": ["values in the pool: token 7"]}
  for said in (
    "fake, device run",
    "smoke: each kernel alone on tiny data: 3 right",
    "WRONG       Wrong: values in the pool: token 7",
    "SIGABRT: F1126 cuda.cc:7] Check failed: CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "no sign of life for 2 s: hangs",
    "decode_kernel",
    "0x00007f2f5c2d0a50",
    "1 jobs were skipped: gpu decode 128 cost 2 processes before",
  ):
    assert said in table, f"{said!r} is not in\n{table}"
  assert "New Thread" not in table and "New Thread" in (tmp_path / "hangs.txt").read_text()


def test_a_run_that_is_killed_leaves_a_table_of_all_jobs_so_far(tmp_path, monkeypatch) -> None:
  class Killed(BaseException):
    pass

  def end(run, stages):
    records = run.do(bench_gpu.jobs_of("smoke")[:3], 1.0)
    next(records)
    table, meta = (tmp_path / "table.txt").read_text(), json.loads((tmp_path / "meta.json").read_text())
    assert "smoke add" in table and "right" in table and meta["commit"] in table and meta["date"] in table
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    raise Killed

  monkeypatch.setattr(bench_gpu, "run_stages", end)
  with pytest.raises(Killed):
    _contact(tmp_path, monkeypatch, ("smoke",))


def test_what_costs_two_processes_is_skipped_wherever_it_is_used() -> None:
  losses = Losses()
  decode = {"kind": "smoke", "op": "decode", "head_dim": 128}
  check = {"kind": "check", "op": "parts", "spec": "decode 8 x 1024"}
  losses.add({"job": decode, "ok": False, "error": "", "lost": True})
  assert not losses.why_skip(check), "once may be chance"
  losses.add({"job": decode, "ok": False, "error": "", "lost": True})
  for job in (check, {"kind": "time", "op": "decode", "spec": "decode 8 x 1024"}, {"kind": "step", "rows": 8}):
    assert "gpu decode 128 cost 2 processes" in losses.why_skip(job)
  for job in (
    {"kind": "time", "op": "prefill", "spec": "prefill 1 x 4096"},
    {"kind": "check", "op": "parts", "spec": "decode 32 x 4096, heads of 64"},
    {"kind": "smoke", "op": "attend", "implementation": "reference", "head_dim": 128},
    {"kind": "ceiling", "what": "copy"},
  ):
    assert not losses.why_skip(job)
  setting = {"kind": "time", "op": "write", "spec": "decode 64 x 1024", "tuning": {"write_tokens": 64}}
  for _ in range(2):
    losses.add({"job": setting, "ok": False, "error": "", "lost": True})
  assert losses.why_skip(setting) and not losses.why_skip(setting | {"tuning": {"write_tokens": 8}})


# --- what is right ----------------------------------------------------------------------------------------------------


def test_the_oracle_is_that_of_the_conformance_suite() -> None:
  for spec in arg_specs.CONFORMANCE[4:8]:
    arguments, case = arg_specs.make_arguments(spec), cases.KernelCase(spec)
    np.testing.assert_array_equal(case.tables[0], arguments.block_tables)
    np.testing.assert_array_equal(case.query_starts, arguments.query_starts)
    kv = np.full(case.kv_shape(), np.nan, np.float32)
    for row, (keys, values) in enumerate(zip(arguments.keys, arguments.values, strict=True)):
      slots = arguments.slots(row, spec.block_size)
      kv[slots // spec.block_size, :, 0, slots % spec.block_size] = keys
      kv[slots // spec.block_size, :, 1, slots % spec.block_size] = values
    tokens = case.sampled(1000)
    assert list(tokens) == list(range(case.query_starts[-1]))
    found = case.attention(jnp.asarray(kv), arguments.q[tokens], tokens)
    expected = conformance.oracle(dataclasses.replace(spec, dtype="float32"), arguments)[tokens]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_copies_of_a_case_share_no_block() -> None:
  case = cases.KernelCase(cases.shrunk(arg_specs.GPU_BENCHMARK[1]), copies=3)
  page = case.spec.block_size
  used = [
    {block for row, (_, length) in enumerate(case.spec.rows) for block in table[row, : -(-length // page)]}
    for table in case.tables
  ]
  assert not (used[0] & used[1] or used[0] & used[2] or used[1] & used[2])
  assert 0 not in set().union(*used)
  assert len(set().union(*used)) + 1 + case.spec.spare_blocks == case.num_blocks
  at = case.slots[2][0]
  assert at // page in used[2] and at % page == (case.spec.rows[0][1] - 1) % page


def test_bytes_and_operations_of_a_spec() -> None:
  by_name = {spec.name: spec for spec in arg_specs.GPU_BENCHMARK}
  assert cases.read_bytes(by_name["decode 32 x 4096"]) == 32 * 4096 * 8 * 2 * 128 * 2
  assert cases.read_bytes(by_name["decode 32 x 8192, window 4096"]) == 32 * 4096 * 8 * 2 * 128 * 2
  assert cases.flops(by_name["prefill 1 x 4096"]) == 4096 * 4097 // 2 * 32 * 128 * 4
  assert cases.flops(by_name["decode 32 x 8192, window 4096"]) == 32 * 4096 * 32 * 128 * 4
  lengths = [length for _, length in by_name["decode 64 zipf"].rows]
  assert len(lengths) == 64 and max(lengths) == 16384 and min(lengths) == 128


# Kernels in plain jnp with the GPU kernels' signatures, right or with one mistake.


def _write(qkv, cos, sin, kv, slots, *, tuning, interpret, wrong=""):
  tokens, heads, rows, size = qkv.shape
  x, y = jnp.split(qkv[:, :, :-1].astype(jnp.float32), 2, axis=-1)
  c, s = (jnp.broadcast_to(each[:, None, None], x.shape) for each in (cos, sin))
  if wrong == "sine":
    s = -s
  turned = jnp.concatenate([x * c - y * s, y * c + x * s], axis=-1).astype(qkv.dtype)
  page = kv.shape[3]
  both = jnp.stack([turned[:, :, -1], qkv[:, :, -1]], axis=2)
  if wrong == "slot":
    slots = jnp.where(slots > 0, slots + 1, 0)
  kv = kv.at[slots // page, :, :, slots % page].set(both)
  queries = turned[:, :, :-1].transpose(1, 0, 2, 3).reshape(heads, -1, size)
  return queries, kv, jnp.zeros((heads, tokens), jnp.int32)


def _prefill(q, kv, tables, lens, starts, work, *, plan, tuning, interpret, scale, soft_cap, wrong=""):
  del work, tuning, interpret, soft_cap
  geometry = plan.geometry
  heads, size = geometry.num_kv_heads, geometry.head_dim
  grouped = q.reshape(heads, geometry.tokens, geometry.group, size).astype(jnp.float32)
  token = jnp.arange(geometry.tokens, dtype=jnp.int32)
  row = jnp.sum((starts[None, 1:] <= token[:, None]).astype(jnp.int32), axis=1)
  real = row < geometry.rows
  row = jnp.minimum(row, geometry.rows - 1)
  position = lens[row] - starts[row + 1] + token
  pages = kv[tables[row]].astype(jnp.float32)  # [T, B, K, 2, page, H]
  keys, values = pages.transpose(3, 2, 0, 1, 4, 5).reshape(2, heads, geometry.tokens, -1, size)
  at = jnp.arange(keys.shape[2], dtype=jnp.int32)[None]
  seen = at < position[:, None] if wrong == "mask" else at <= position[:, None]
  if geometry.sliding_window is not None:
    seen = seen & (at > position[:, None] - geometry.sliding_window)
  if wrong != "zeroing":
    values = jnp.where(jnp.broadcast_to(seen[None, :, :, None], values.shape), values, 0.0)
  scores = jnp.einsum("ktgh,ktlh->ktgl", grouped, keys) * scale
  scores = jnp.where(jnp.broadcast_to(seen[None, :, None], scores.shape), scores, -1e30)
  out = jnp.einsum("ktgl,ktlh->tkgh", jax.nn.softmax(scores, axis=-1), values).reshape(geometry.tokens, -1, size)
  zeros = jnp.full(out.shape, 1.0 if wrong == "padding" else 0.0)
  out = jnp.where(jnp.broadcast_to(real[:, None, None], out.shape), out, zeros)
  if wrong == "unwritten":
    out = out.at[0].set(jnp.nan)
  return out.astype(q.dtype)


def _decode(q, kv, tables, lens, starts, work, finished, out, **static):
  del q, kv, tables, lens, starts, work, finished, static
  return out


def _job(monkeypatch, job: dict, wrong: str = "") -> dict:
  monkeypatch.setattr(jobs.gpu_write, "rotate_and_write", functools.partial(_write, wrong=wrong))
  monkeypatch.setattr(jobs.gpu_prefill, "prefill", functools.partial(_prefill, wrong=wrong))
  monkeypatch.setattr(jobs.gpu_decode, "decode", _decode)
  prepared = jobs.prepare(job, jobs.Setting(jax.devices()[0], "interpret", jobs.timing.Effort(1, 1e-6)))
  return prepared.run(prepared.compile())


_CHECK = {"kind": "check", "op": "parts", "spec": "decode 63 x 1024 + prefill 449"}


@pytest.mark.kernels
@pytest.mark.parametrize(
  "name", ["decode 63 x 1024 + prefill 449", pytest.param("decode 32 x 8192, window 4096", marks=pytest.mark.long)]
)
def test_right_kernels_pass(monkeypatch, name: str) -> None:
  figures = _job(monkeypatch, {**_CHECK, "spec": name})
  assert 0 < figures["error"] < 4e-3 and figures["tokens_compared"] >= 4


def test_a_step_without_rows_passes(monkeypatch) -> None:
  assert _job(monkeypatch, {**_CHECK, "spec": "nothing"})["error"] == 0


@pytest.mark.kernels
@pytest.mark.parametrize(
  ("wrong", "says"),
  [
    ("sine", "rotated queries"),
    ("slot", "in the pool|outside its slots"),
    ("mask", "attention: error"),
    ("zeroing", "attention: .* hold NaN"),
    ("padding", "padding tokens"),
    ("unwritten", "hold NaN"),
  ],
)
def test_wrong_kernels_are_told(monkeypatch, wrong: str, says: str) -> None:
  with pytest.raises(cases.Wrong, match=says):
    _job(monkeypatch, _CHECK, wrong)


@pytest.mark.kernels
@pytest.mark.parametrize("op", ["write", "prefill"])
def test_what_is_timed_is_compared_too(monkeypatch, op: str) -> None:
  job = {"kind": "time", "op": op, "spec": "prefill 1 x 4096"}
  figures = _job(monkeypatch, job)
  assert figures["us"] > 0 and figures["times"] == 2
  with pytest.raises(cases.Wrong):
    _job(monkeypatch, job, {"write": "sine", "prefill": "mask"}[op])


# --- the sweep and the table ------------------------------------------------------------------------------------------


def _timed(job: dict, us: float, **figures: float) -> dict:
  return {"job": job, "ok": True, "figures": {"us": us, **figures}}


def _factor(time_of: Callable[[dict], float | None]):
  factor, current = sweep.FACTORS[0], {"split_tokens": 512, "write_tokens": 8, "block_size": 64}
  made = sweep.jobs(factor, current)
  assert len(made) == len(factor.values) * len(factor.cases), "the present value is one of them"
  records = []
  for job in made:
    us = time_of(job)
    records.append({"job": job, "ok": False, "error": "no"} if us is None else _timed(job, us))
  return current, sweep.choose(factor, current, records)


def test_the_best_setting_is_chosen() -> None:
  current, (best, ratio) = _factor(lambda job: 10.0 if job["tuning"]["split_tokens"] == 1024 else 20.0)
  assert best == current | {"split_tokens": 1024} and ratio == pytest.approx(0.5)


def test_a_setting_that_fails_somewhere_or_gains_nothing_is_not_chosen() -> None:
  def time_of(job: dict) -> float | None:
    if job["tuning"]["split_tokens"] == 1024:
      return None if job["spec"] == "decode 64 zipf" else 1.0
    return 19.9 if job["tuning"]["split_tokens"] == 128 else 20.0

  current, (best, ratio) = _factor(time_of)
  assert best == current and ratio == 1.0
  current, (best, ratio) = _factor(lambda job: None if job["tuning"]["split_tokens"] == 512 else 1.0)
  assert best == current and ratio is None, "there is nothing to compare with"


def test_settings_get_into_tuning_py() -> None:
  source = (ROOT / "pallas_kernels" / "paged_attention" / "tuning.py").read_text("utf-8")

  def table(text: str) -> Callable:
    space: dict = {"__name__": "tuning_of_a_test"}
    sys.modules["tuning_of_a_test"] = type(sys)("tuning_of_a_test")
    exec(compile(text, "tuning.py", "exec"), space)
    return space["tuning_for"]

  fields = _fields(tuning.tuning_for("", 128, 64))
  added = sweep.merged(source, "NVIDIA H200", 128, 64, fields | {"split_tokens": 1024})
  assert table(added)("NVIDIA H200", 128, 64).split_tokens == 1024
  assert _fields(table(added)("another", 128, 64)) == fields
  again = sweep.merged(added, "NVIDIA H200", 128, 64, fields | {"split_tokens": 512, "lowering": "Lane"})
  assert again.count("NVIDIA H200") == added.count("NVIDIA H200")
  found = table(again)("NVIDIA H200", 128, 64)
  assert found.split_tokens == 512 and found.lowering.name == "Lane"
  assert set(source.splitlines()) <= set(again.splitlines()), "the rest stays as it was"
  with pytest.raises(ValueError, match="_TABLE"):
    sweep.merged("x = 1\n", "NVIDIA H200", 128, 64, fields)


def _fields(settings) -> dict:
  found = dataclasses.asdict(settings)
  return found | {"lowering": found["lowering"].name}


_META = {"mode": "device", "minutes": 1.0, "commit": "abc", "date": "today", "device": "NVIDIA H200"}


def _decode_record(spec: str, us: float, held: float) -> dict:
  return _timed({"kind": "time", "op": "decode", "spec": spec}, us, bytes=held)


def test_the_table_shows_shares_of_the_best_bandwidth_and_verdicts() -> None:
  records = [
    _timed({"kind": "ceiling", "what": "read", "way": "all"}, 1.0, bytes_per_s=3e12),
    _timed({"kind": "peer", "what": "read"}, 1.0, bytes_per_s=4e12),
    _decode_record("decode 32 x 4096", 100.0, 4e8 * 0.86),
    {
      "job": {"kind": "profile", "op": "decode", "spec": "decode 32 x 4096"},
      "ok": True,
      "figures": {"kernels_us": 97.0},
    },
    _decode_record("decode 64 zipf", 100.0, 4e8 * 0.69),
    _decode_record("decode 1 x 16384", 20.0, 4e6 * 10),
    _timed({"kind": "time", "op": "prefill", "spec": "prefill 1 x 4096"}, 200.0, flops=1e11),
    _timed({"kind": "time", "op": "dense", "spec": "prefill 1 x 4096"}, 190.0, flops=1e11),
    _timed({"kind": "peer", "what": "flash", "spec": "prefill 1 x 4096"}, 180.0),
    _timed({"kind": "step", "rows": 8, "context": 1024}, 5200.0, bytes=16e9),
    {"job": {"kind": "check", "op": "parts", "spec": "mixed"}, "ok": False, "error": "Wrong: token 7\nmore"},
  ]
  lines = report.table(_META, records, ["sweep: split: as it is"])
  by_name = {line[:34].strip(): line[34:].split() for line in lines}
  assert by_name["decode 32 x 4096"][:6] == ["100.0", "97.0", "0.86", "0.85", "(0.92)", "+"]
  assert by_name["decode 64 zipf"][2:6] == ["0.69", "0.7", "(0.8)", "no"]
  assert by_name["decode 1 x 16384"][3:6] == ["25.0", "us", "+"]
  assert by_name["prefill 1 x 4096"][:7] == ["200.0", "500", "0.95", "0.75", "(0.9)", "++", "180.0"]
  assert by_name["step: 8 x 1024, Llama-3-8B"] == ["5200", "-", "1.30", "1.35", "(1.2)", "+"]
  assert "failed: check parts mixed: Wrong: token 7" in lines and "sweep: split: as it is" in lines
  assert "0 of 1 specs, 1 failed, 0 not reached" in lines[2]


def test_the_table_is_short_whatever_happens() -> None:
  assert len(report.table(_META, [], [])) <= 4
  failed = [{"job": {"kind": "check", "op": "parts", "spec": str(n)}, "ok": False, "error": "x"} for n in range(99)]
  timed = [_decode_record(str(n), 1.0, 1.0) for n in range(90)]
  assert len(report.table(_META, failed, [])) <= 20
  assert len(report.table(_META, [*failed, *timed], ["a", "b"])) == report.MOST_LINES


# --- a dry run --------------------------------------------------------------------------------------------------------


@pytest.mark.kernels
def test_a_dry_run_goes_through_the_interpreter_and_leaves_its_files(tmp_path) -> None:
  done = run_module(
    "tools.gpu",
    f"--out={tmp_path}",
    "--dry_run=interpret",
    "--minutes=4",
    "--only=ceilings,time",
    "--match=ceiling copy|time write decode 64",
  )
  assert done.returncode == 0, done.stdout + done.stderr
  lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
  assert lines[0]["meta"]["mode"] == "interpret"
  assert [report.describe(line["job"]) for line in lines[1:]] == ["ceiling copy", "time write decode 64 x 1024"]
  assert all(line["figures"]["us"] > 0 for line in lines[1:])
  assert done.stdout == (tmp_path / "table.txt").read_text() and "write: decode 64 x 1024" in done.stdout
  assert json.loads((tmp_path / "meta.json").read_text())["device"] == "cpu"


def test_a_dry_run_that_reaches_a_job_too_late_fails(tmp_path) -> None:
  words = "--dry_run=interpret", "--minutes=0.0001", "--only=ceilings", "--match=ceiling copy"
  done = run_module("tools.gpu", f"--out={tmp_path}", *words)
  assert done.returncode == 1, done.stdout + done.stderr
  assert "ceiling copy: out of time" in done.stderr


def test_without_a_gpu_it_says_so(tmp_path) -> None:
  done = run_module("tools.gpu", f"--out={tmp_path}", "--only=ceilings")
  assert done.returncode == 2 and "did not" not in done.stdout
  assert "not a gpu" in (tmp_path / "log.txt").read_text()


def _quarter_hour(tmp_path, **variables: str) -> subprocess.CompletedProcess[str]:
  command = ["bash", "tools/gpu/quarter_hour.sh", str(tmp_path / "out"), "8"]
  environment = os.environ | {"SCRATCH": str(tmp_path / "scratch")} | variables
  return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_quarter_of_an_hour_needs_jax(tmp_path) -> None:
  done = _quarter_hour(tmp_path, PYTHON="false")
  assert done.returncode == 2 and "false needs jax with its CUDA plugin, and flax" in done.stderr


@pytest.mark.long
def test_a_quarter_of_an_hour_in_a_dry_run(tmp_path) -> None:
  done = _quarter_hour(tmp_path, PYTHON=sys.executable, DRY_RUN="interpret", MATCH="smoke add|ceiling copy")
  assert done.returncode == 0, done.stdout + done.stderr
  kept = sorted(path.name for path in (tmp_path / "out").iterdir())
  assert kept == ["engine.json", "engine.txt", "log.txt", "meta.json", "results.jsonl", "table.txt"]
  assert "smoke add" in done.stdout and "decode_8b: 1 x 32, over roofline" in done.stdout


def test_wrong_flags_are_one_line(tmp_path) -> None:
  done = run_module("tools.gpu", f"--out={tmp_path}", "--only=check,everything")
  assert done.returncode == 2 and "everything is not one of smoke, ceilings" in done.stderr
