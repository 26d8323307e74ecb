"""The roofline's arithmetic by hand, the shapes, and the whole tool on a tiny model."""

import json
import pathlib

import jax.numpy as jnp
import pytest

from models.registry import config_from_hf
from tests.tools.conftest import ENGINE_FLAGS, json_line, run_here
from tools.bench import engine as bench_engine
from tools.bench.ceilings import Ceilings
from tools.bench.engine import SHAPES, ModelWork, beside_roofline
from tools.report.accounting import Flops


def shape(name: str):
  return config_from_hf(json.loads((SHAPES / name / "config.json").read_text("utf-8")))


def work_in_bfloat16(name: str) -> ModelWork:
  return ModelWork.of(str(SHAPES / name), shape(name), jnp.dtype(jnp.bfloat16))


def test_what_a_step_of_an_8b_model_reads_and_computes():
  work = work_in_bfloat16("llama3-8b")
  assert work.weight_bytes == pytest.approx(15.01e9, rel=1e-3)  # the table of embeddings is looked up, not streamed
  assert work.kv_bytes == 131_072
  assert work.flops.token == pytest.approx(13.96e9, rel=1e-3)
  assert work.flops.row == pytest.approx(1.05e9, rel=1e-2)
  num_bytes, flops = work.of_step((1023,) * 32, (1,) * 32)
  assert num_bytes == work.weight_bytes + 32 * 1024 * 131_072
  assert flops == 32 * (work.flops.token + work.flops.row) + 32 * 1024 * 4 * 32 * 32 * 128
  # Three tokens behind ten see 11, 12 and 13 keys; one row samples.
  _, flops = work.of_step((10,), (3,))
  assert flops == 3 * work.flops.token + work.flops.row + 36 * work.flops.pair


def test_a_tied_head_is_read_once():
  work = work_in_bfloat16("llama3.2-1b")
  assert work.weight_bytes == pytest.approx(2.47e9, rel=1e-2)
  assert work.kv_bytes == 32_768


@pytest.mark.parametrize("quantization", ("int8", "w8a8", "fp8"))
def test_weights_of_eight_bits_are_half_of_bfloat16s_bytes(quantization):
  dtype = jnp.dtype(jnp.bfloat16)
  work = ModelWork.of(str(SHAPES / "llama3-8b"), shape("llama3-8b"), dtype, quantization)
  assert 2 * work.weight_bytes == work_in_bfloat16("llama3-8b").weight_bytes


def test_a_step_beside_ceilings():
  work = ModelWork(Flops(token=20, row=10, pair=5), weight_bytes=80, kv_bytes=10)
  # Two rows of four keys each: 160 bytes, 2 * 30 + 8 * 5 operations, in 2 s.
  row = beside_roofline(2.0, [(3, 1), (3, 1)], work, Ceilings(bytes_s=160.0, flops_s=200.0))
  assert (row["bytes_s"], row["flops_s"], row["intensity"], row["tok_s"]) == (80.0, 50.0, 100 / 160, 1.0)
  assert (row["of_read"], row["of_rate"], row["over_roofline"]) == (0.5, 0.25, 2.0)
  assert row["ceilings"] == {"bytes_s": 160.0, "flops_s": 200.0, "median_bytes_s": 0.0}


def test_every_shape_is_a_model_of_the_registry():
  names = sorted(path.name for path in SHAPES.iterdir())
  assert names == ["llama-125m", "llama-15m", "llama3-70b", "llama3-8b", "llama3.2-1b", "qwen3-0.6b"]
  for name in names:
    assert shape(name).num_layers > 0
    assert bench_engine.model_folder(name) == str(SHAPES / name)


@pytest.mark.parametrize(
  ("flags", "complaint"),
  [
    (["--shape=llama9"], "shape='llama9' is unknown; set --shape to one of demo, llama-125m"),
    (["--parts=decode,encode"], "encode is not one of decode, prefill, alone, offline"),
    (["--lengths=20,10"], "the smaller first"),
    (["--output=/nowhere/x.json"], "the folder does not exist"),
    (["--model=/nowhere"], "/nowhere: no such folder"),
    (["--write_executable_bundle"], "--write_executable_bundle needs a folder to write to; set --executable_bundle"),
  ],
)
def test_bad_flags_are_one_line_and_exit_code_2(flags, complaint, capsys):
  try:
    code = bench_engine.main(flags)
  except SystemExit as stop:
    code = stop.code
  assert code == 2
  error = capsys.readouterr().err
  assert complaint in error.splitlines()[-1]
  assert "Traceback" not in error


@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.long
def test_all_parts_on_a_model_that_is_only_a_config(tiny_model, compile_cache, tmp_path):
  config = tmp_path / "model"
  config.mkdir()
  (config / "config.json").write_bytes((pathlib.Path(tiny_model) / "config.json").read_bytes())
  done = run_here(
    "tools.bench.engine",
    f"--model={config}",
    "--random_weights=true",
    "--batches=1,4",
    "--contexts=8,250,100000",
    "--prompts=32",
    "--requests=5",
    "--lengths=2,9",
    "--seconds=0.01",
    f"--plot={tmp_path}/roofline.png",
    f"--compile_cache_dir={compile_cache}",
    *ENGINE_FLAGS,
    "--num_blocks=20",
  )
  assert done.returncode == 0, done.stderr
  result = json_line(done)
  # Four rows of 16 blocks each are more than the pool has; positions beyond the model's are not asked for.
  assert [(row["batch"], row["context"]) for row in result["decode"]] == [(1, 8), (4, 8), (1, 250)]
  assert "'batch': 4, 'context': 250}: left out" in done.stderr
  assert [row["prompt"] for row in result["prefill"]] == [32]
  for row in result["decode"] + result["prefill"]:
    assert row["over_roofline"] == pytest.approx(row["step_s"] / row["roofline_s"], rel=1e-2)
    assert row["of_read"] == pytest.approx(row["bytes_s"] / row["ceilings"]["bytes_s"], rel=1e-2, abs=1e-3)
    slowest, fastest = result["ceilings_seen"]["bytes_s"]
    assert slowest <= row["ceilings"]["bytes_s"] <= fastest == result["ceilings"]["bytes_s"]
  assert result["offline"]["failed"] == 0
  assert result["offline"]["requests"] == 5
  assert 0 <= result["offline"]["device_idle_share"] < 1
  assert 0 <= result["alone"]["waits_share"] < 1 and result["alone"]["engine_s"] > 0
  assert "one request alone at" in done.stderr
  assert result["compiles_after_ready"] == 0
  assert result["random_weights"] is True
  assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
