"""The attention benchmark: its naive version is right, and its tables have every line."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device.build import Built
from engine.errors import ConfigError
from pallas_kernels.paged_attention import api, arg_specs, reference
from tools.bench import attention as bench_attention
from tools.make_random_model import read_shape, write_model

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_naive_equals_ours() -> None:
  spec = dataclasses.replace(arg_specs.BENCHMARK[1], table_width=10)
  q, meta = bench_attention.operands(spec, 100)
  shape = api.kv_shape(100, spec.block_size, spec.num_kv_heads, spec.head_dim)
  slots = jnp.arange(100 * spec.block_size, dtype=jnp.int32)
  k, v = (jnp.asarray(np.random.default_rng(seed).standard_normal((slots.size, 4, 64), np.float32)) for seed in (1, 2))
  theirs = jnp.stack([k, v], axis=1).reshape(100, spec.block_size, 2, 4, 64)
  ours = jax.jit(reference.write_kv)(jnp.zeros(shape), k, v, slots)

  def attend(q, kv, meta):
    rows = meta.block_tables, meta.kv_lens, meta.query_starts
    return reference.ragged_paged_attention(q, kv, *rows, scale=spec.scale, sliding_window=None, soft_cap=None)

  one = jax.jit(attend)(q, ours, meta)
  other = jax.jit(functools.partial(bench_attention.naive, scale=spec.scale))(q, theirs, meta)
  np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.long
def test_a_line_holds_our_time_and_the_floor() -> None:
  spec = arg_specs.BENCHMARK[1]
  title, *columns = bench_attention.line(
    (("reference", "float32"), ("reference", "int8")), "name", spec, 100, 0.001, 1e10
  ).split()
  best, median, _, _, naive, held, floor, ratio = columns
  assert title == "name" and 0 < float(best) <= float(median) and float(naive) > 0
  assert float(held) == round(8 * 128 * 2 * 4 * 64 * 4 / 1e6, 2)
  assert float(floor) == round(8 * 128 * 2 * 4 * 64 * 4 / 1e7, 3)
  assert float(ratio) == pytest.approx(float(best) / float(floor), rel=0.01, abs=0.1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
  folder = tmp_path_factory.mktemp("model") / "tiny"
  changes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
  write_model(
    folder, {**read_shape("llama-125m"), **changes, "num_attention_heads": 2, "num_key_value_heads": 1}, seed=0
  )
  return str(folder)


def loops(built: Built) -> int:
  (program,) = built.runner.steps.values()
  return (program.as_text() or "").count(" while(")


@pytest.mark.long
def test_the_step_without_attention_has_none_and_the_other_has(tiny, monkeypatch) -> None:
  """Both are the engine's own step; what one holds less is the attention, and neither is taken for the other."""
  built, build_step = [], bench_attention.build_step

  def keep(*arguments, **named) -> Built:
    built.append(build_step(*arguments, **named))
    return built[-1]

  monkeypatch.setattr(bench_attention, "build_step", keep)
  found = bench_attention.share(tiny, 4, 40, 16, 0.01, "reference")
  assert found["steps"] >= 5 and found["step_ms"] > 0
  assert found["model"] == "tiny" and found["attention"] == "reference"
  real, without = built
  assert real.attention == "reference" != without.attention
  assert loops(without) <= loops(real) - 4  # of groups and of chunks, in decode and in prefill
  assert without.attention not in api.IMPLEMENTATIONS


def test_what_an_engine_takes_by_itself_is_what_is_measured(tiny) -> None:
  found = bench_attention.share(tiny, 2, 20, 0, 0.01, kv_dtype="int8")
  assert found["block_size"] == 16 and found["attention"] == bench_attention.implementations()[0][0]
  assert found["kv_dtype"] == "int8" and found["speedup"] > 0


def test_a_step_of_another_dtype_has_kv_of_it(tiny, monkeypatch) -> None:
  built, build_step = [], bench_attention.build_step

  def keep(*arguments, **named) -> Built:
    built.append(build_step(*arguments, **named))
    return built[-1]

  monkeypatch.setattr(bench_attention, "build_step", keep)
  found = bench_attention.share(tiny, 2, 20, 16, 0.01, kv_dtype="int8", dtype="bfloat16")
  assert found["dtype"] == "bfloat16"
  assert [each.runner.spec.dtype for each in built] == ["bfloat16"] * 3
  kv = [{leaf.dtype.name for leaf in jax.tree.leaves(each.runner.spec.kv)} for each in built]
  assert kv == [{"bfloat16"}, {"bfloat16"}, {"int8"}]


def test_rows_lie_anywhere_and_nowhere_twice(tiny) -> None:
  built = bench_attention.build_step(tiny, 4, 40, 16)
  batch = bench_attention.decodes(built, 4, 40)
  blocks = [block for admission in batch.admissions for block in admission.block_ids]
  assert sorted(blocks) == list(range(1, 13)) and blocks != sorted(blocks)
  assert batch.starts == (39,) * 4


def test_a_context_that_the_model_does_not_have_is_refused(tiny) -> None:
  with pytest.raises(ConfigError, match="context=4000 exceeds the 2048 positions of tiny"):
    bench_attention.share(tiny, 2, 4000, 16, 0.01)


def test_share_is_printed_in_words_and_as_json(tiny, capsys) -> None:
  assert bench_attention.main(["--share", f"--model={tiny}", "--rows=2", "--context=20", "--seconds=0.01"]) == 0
  words, line = capsys.readouterr().out.splitlines()
  found = json.loads(line)
  assert f"{100 * found['share']:.1f} %" in words and found["rows"] == 2 and found["context"] == 20
