"""How many KV blocks a pool has, and the length that is served, for every known model and any free memory."""

import dataclasses
import json
import pathlib
import re

import jax
import pytest

from engine.config import EngineConfig
from engine.device import build as build_lib
from engine.device import memory_check, weights
from engine.device.options import BuildOptions
from engine.device.pool_size import CPU_KV_BYTES, PoolSize, PoolSizer
from engine.errors import ConfigError
from extensions.disaggregated.build import build_any

GIB = 2**30
SHAPES = sorted((pathlib.Path(__file__).parents[2] / "models" / "shapes").glob("*/"))
SIZER = PoolSizer(block_bytes=1000, block_size=16, longest=1600, is_chosen=False, max_num_seqs=2, shares_prefixes=True)
CHOSEN = dataclasses.replace(SIZER, is_chosen=True)


def test_memory_holds_blocks_and_one_of_them_is_padding():
  assert SIZER.size_by_memory(101_000, "x") == PoolSize(100, 1600)
  assert SIZER.size_by_memory(10**9, "x").num_blocks == 2 * 100 * 2
  assert dataclasses.replace(SIZER, shares_prefixes=False).size_by_memory(10**9, "x").num_blocks == 2 * 100


def test_the_models_own_length_is_lowered_and_a_chosen_one_refused():
  lowered = SIZER.size_by_memory(100_999, "--kv_cache_mb=1")
  assert lowered == PoolSize(99, 99 * 16, "0 MiB (--kv_cache_mb=1) hold 99 KV blocks of 16")
  assert SIZER.size_by_blocks(99, "--num_blocks gives") == PoolSize(99, 1584, "--num_blocks gives 99 KV blocks of 16")
  assert CHOSEN.size_by_blocks(100, "--num_blocks gives") == PoolSize(100, 1600)
  with pytest.raises(
    ConfigError, match="1600 needs 100 blocks of 16, but --num_blocks gives 99; lower --max_model_len to"
  ):
    CHOSEN.size_by_blocks(99, "--num_blocks gives")
  assert CHOSEN.size_by_memory(101_000, "x") == PoolSize(100, 1600)
  with pytest.raises(ConfigError, match=r"hold 99 KV blocks, but one sequence of 1600 tokens needs 100 .*--max_model_"):
    CHOSEN.size_by_memory(100_999, "x")


def test_a_length_of_no_use_is_refused():
  assert SIZER.size_by_memory(33_000, "x").max_model_len == 512
  with pytest.raises(ConfigError, match="hold 31 KV blocks, but one sequence of 512 tokens needs 32 .*--kv_cache_mb"):
    SIZER.size_by_memory(32_999, "x")


def test_a_cpus_share_is_half_of_what_is_left_and_no_more_than_is_of_use():
  large = dataclasses.replace(SIZER, block_bytes=10**7)  # 101 blocks of 10 MB hold one sequence
  assert SIZER.cpu_bytes(left=20 * GIB, weights=0) == CPU_KV_BYTES
  assert SIZER.cpu_bytes(left=20 * GIB, weights=8 * GIB) == 4 * GIB
  assert large.cpu_bytes(left=20 * GIB, weights=0) == 1010 * 10**6
  assert large.cpu_bytes(left=10**9, weights=0) == 14 * 2**25  # of 500 million bytes, four significant bits
  # What nobody chose is never below what a start needs, and what the user chose is had whole.
  assert large.cpu_bytes(left=10**8, weights=0) == 33 * 10**7
  assert dataclasses.replace(large, is_chosen=True).cpu_bytes(left=1010 * 10**6, weights=0) == 1010 * 10**6


class _DecidedError(Exception):
  """Raised where build() would begin to compile."""


@pytest.fixture
def decide(monkeypatch):
  """What build() decides on a model with so many bytes free: the engine's settings, and the line on the length."""
  found = {}

  def keep(owner, name):
    made = getattr(owner, name)

    def kept(*args, **kwargs):
      found[name] = made(*args, **kwargs)
      return found[name]

    monkeypatch.setattr(owner, name, kept)

  def stop(*_):
    raise _DecidedError

  keep(build_lib, "EngineConfig")
  keep(build_lib, "_describe_lowering")
  monkeypatch.setattr(build_lib, "all_programs", stop)
  monkeypatch.setattr(weights, "_generate", lambda *_: pytest.fail("weights were allocated"))

  def decided(folder: pathlib.Path | str, free: int, **options) -> tuple[EngineConfig, str]:
    monkeypatch.setattr(memory_check, "host_free_bytes", lambda: free)
    with pytest.raises(_DecidedError):
      build_any(BuildOptions(str(folder), random_weights=True, **options), lambda *_: None, lambda events: None)
    return found["EngineConfig"], found["_describe_lowering"]

  return decided


def kv_bytes(folder: pathlib.Path, tokens: int, itemsize: int) -> int:
  raw = json.loads((folder / "config.json").read_text())
  return tokens * raw["num_hidden_layers"] * 2 * raw["num_key_value_heads"] * raw["head_dim"] * itemsize


def test_a_pool_that_free_memory_limits_has_the_same_size_at_most_starts():
  """The compile cache finds programs for a pool of one size only."""
  large = dataclasses.replace(SIZER, longest=16 * 10**9)
  limits = [2 * (GIB + step * GIB // 1000) for step in range(0, 7000, 7)]
  sizes = [large.cpu_bytes(left=limit, weights=0) for limit in limits]
  assert len(set(sizes)) == 8 + 8 + 8  # between powers of two
  assert all(limit // 2 >= size > limit // 2 * 8 / 9 for limit, size in zip(limits, sizes, strict=True))


@pytest.mark.parametrize(
  "free",
  [
    4 * GIB,
    pytest.param(6 * GIB, marks=pytest.mark.long),
    11 * GIB,
    pytest.param(22 * GIB, marks=pytest.mark.long),
    200 * GIB,
  ],
)
@pytest.mark.parametrize(
  "settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str
)
@pytest.mark.parametrize(
  "shape",
  # Deciding for the largest one takes seconds: its programs have 80 layers.
  [pytest.param(path, marks=pytest.mark.long if "70b" in path.name else ()) for path in SHAPES],
  ids=lambda path: path.name,
)
def test_every_known_shape_starts_on_a_cpu_where_its_weights_fit(shape, settings, free, decide):
  """By default: no pool beyond half of what is free, no length that the pool does not hold, and no silence about it."""
  own = json.loads((shape / "config.json").read_text())["max_position_embeddings"]
  try:
    config, line = decide(shape, free, **settings)
  except ConfigError as refused:
    (needs,) = re.findall(r"needs (\d+) MiB for weights", str(refused))
    assert int(needs) * 2**20 > 0.9 * free, refused
    return
  assert config.max_model_len <= config.pool_tokens
  assert kv_bytes(shape, config.pool_tokens, 4 if settings["dtype"] == "float32" else 2) <= max(
    free // 2, kv_bytes(shape, 512, 4)
  )
  assert (line == "") == (config.max_model_len == own)
  if line:
    assert line.startswith(f"max_model_len is {config.max_model_len}, not the model's {own}: "), line
    assert "--max_model_len" in line and "--kv_cache_mb" in line and "\n" not in line
  if free == 200 * GIB:
    assert config.max_model_len == own


@pytest.mark.parametrize("name", ["llama-15m", "llama-125m"])
def test_small_models_take_no_more_than_they_need(name, decide):
  """However much is free: pages are written at start, which takes time."""
  folder = SHAPES[0].parent / name
  block = kv_bytes(folder, 16, 4)
  config, _ = decide(folder, 200 * GIB)
  assert config.num_blocks == CPU_KV_BYTES // block - 1


LLAMA_1B = SHAPES[0].parent / "llama3.2-1b"


def test_a_length_that_the_user_chose_is_had_or_refused(decide):
  config, line = decide(LLAMA_1B, 22 * GIB, dtype="bfloat16", max_model_len=131_072)
  assert (config.max_model_len, line) == (131_072, "") and config.pool_tokens >= 131_072
  with pytest.raises(ConfigError, match="KV .one sequence of 131072 tokens.*MiB are missing.*--max_model_len"):
    decide(LLAMA_1B, 6 * GIB, dtype="bfloat16", max_model_len=131_072)
  with pytest.raises(ConfigError, match="--kv_cache_mb=64. hold 127 KV blocks, but one sequence of 131072 tokens"):
    decide(LLAMA_1B, 22 * GIB, dtype="bfloat16", max_model_len=131_072, kv_cache_mb=64)


@pytest.mark.parametrize(
  ("setting", "said"),
  [
    ({"kv_cache_mb": 64}, "64 MiB (--kv_cache_mb=64) hold 127 KV blocks of 16"),
    ({"num_blocks": 100}, "--num_blocks gives 100 KV blocks of 16"),
  ],
  ids=str,
)
def test_a_pool_that_the_user_chose_lowers_the_models_own_length(setting, said, decide):
  config, line = decide(LLAMA_1B, 22 * GIB, dtype="bfloat16", **setting)
  assert config.max_model_len == config.pool_tokens < 131_072
  assert line == (
    f"max_model_len is {config.max_model_len}, not the model's 131072: {said}; --max_model_len chooses a length, "
    "--kv_cache_mb the memory"
  )


def test_two_sides_of_one_cpu_share_its_memory(monkeypatch, decide):
  """Disaggregated: the first side leaves the second what it takes itself."""
  config, _ = decide(LLAMA_1B, 22 * GIB, dtype="bfloat16")
  sizes = []
  kept = PoolSizer.cpu_bytes
  monkeypatch.setattr(
    PoolSizer, "cpu_bytes", lambda self, left, weights: sizes.append(left) or kept(self, left, weights)
  )
  monkeypatch.setattr(build_lib, "find_devices", lambda count: jax.devices()[:1] * 2)
  halved, _ = decide(LLAMA_1B, 22 * GIB, dtype="bfloat16", batching="disaggregated", num_devices=2)
  weight_bytes = 1_235_814_400 * 2
  assert 2 * sizes[0] + 2 * weight_bytes == pytest.approx(22 * GIB, rel=0.02)
  assert halved.num_blocks <= config.num_blocks


def test_kernels_that_take_no_table_so_long_lower_the_models_own_length(monkeypatch, decide):
  """A TPU's block tables lie in scalar memory: 64 tables of 131,072 tokens do not fit it."""
  monkeypatch.setattr(build_lib, "attention_candidates", lambda requested, device: (("tpu",), ""))
  config, line = decide(LLAMA_1B, 200 * GIB, dtype="bfloat16")
  assert config.max_model_len == 3840 * 32
  assert line.startswith(
    "max_model_len is 122880, not the model's 131072: paged attention on TPU: 64 block tables of 4096"
  )
  with pytest.raises(ConfigError, match="max_model_len=131072: .*960 KiB .*lower --max_model_len to 122880"):
    decide(LLAMA_1B, 200 * GIB, dtype="bfloat16", max_model_len=131_072)
  config, line = decide(LLAMA_1B, 200 * GIB, dtype="bfloat16", max_num_seqs=32)
  assert (config.max_model_len, line) == (131_072, "")
