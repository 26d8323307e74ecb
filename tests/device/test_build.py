"""From a model folder to an engine that serves; and every setting that is refused before anything is allocated."""

import jax
import pytest
from safetensors.numpy import load_file

from engine.build_facts import BuildFact, DeviceFact, KVFact, ModelFact, ProgramsFact, ProgramsMadeFact
from engine.config import choose_overlap
from engine.device import kv_cache
from engine.device.build import build_engine
from engine.device.host_blocks import MemorySlots
from engine.device.options import BuildOptions
from engine.errors import CheckpointError, ConfigError
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.shapes import PADDED, UNPADDED_CPU
from pallas_kernels import native
from tools.make_random_model import write_model
from tools.parity.cases import CASES

pytestmark = pytest.mark.usefixtures("quick_steps")

RAW = CASES["llama3"][0] | {"num_hidden_layers": 2}
SMALL = {"token_budgets": (8, 16), "max_num_seqs": 4, "prefill_chunk": 16}
ONE_SIZE = SMALL | {"token_budgets": (16,)}  # where the sizes of steps are not what is tested: each is compiled


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp("models") / "tiny"
  write_model(path, RAW, seed=3)
  return str(path)


def silent(what: str, done: int, total: int) -> None:
  del what, done, total


def no_events(events: list[TokenEvent]) -> None:
  raise AssertionError(events)


def test_serves_and_keeps_compiled_programs(folder, tmp_path):
  told: list[tuple[str, int, int]] = []
  events: list[TokenEvent] = []
  cache = tmp_path / "compiled"
  built = build_engine(
    BuildOptions(folder, kv_cache_mb=1, host_kv_mb=2, max_model_len=64, compile_cache_dir=str(cache), **SMALL),
    lambda *progress: told.append(progress),
    events.extend,
  )
  assert [what for what, done, total in told if done == total] == ["load", "compile", "warm up"]
  assert built.config.vocab_size == RAW["vocab_size"] == built.model.vocab_size
  assert built.config.max_model_len == 64 and built.model_name == "tiny"
  block_bytes = 2 * 2 * 16 * RAW["num_key_value_heads"] * built.model.head_dim * 4
  assert built.config.num_blocks == min(2**20 // block_bytes - 1, 2 * 4 * 64 // 16)
  assert built.runner.host_blocks is not None and isinstance(built.runner.host_blocks.slots, MemorySlots)
  assert built.config.num_host_blocks == 2**21 // block_bytes == len(built.runner.host_blocks.slots.memory)
  assert built.config.block_bytes == block_bytes == built.runner.host_blocks.slots.memory.shape[1]
  built.engine.submit(Request("a", [3, 4, 5], SamplingParams(max_tokens=5, ignore_eos=True)))
  while built.engine.num_live:
    built.engine.step()
  assert sum(len(event.token_ids) for event in events) == 5
  assert built.runner.compiles_after_ready == 0
  assert len(list(cache.iterdir())) >= len(SMALL["token_budgets"])


def test_facts_are_told_as_they_are_known(folder, tmp_path):
  """And programs that the cache holds are not counted as compiled."""
  options = BuildOptions(folder, num_blocks=16, max_model_len=64, compile_cache_dir=str(tmp_path / "compiled"), **SMALL)
  jax.clear_caches()  # programs that other tests have compiled in this process
  for is_first in (True, False):
    facts: list[BuildFact] = []
    built = build_engine(options, silent, no_events, report_fact=facts.append)
    device, model, kv, programs, made = facts
    assert isinstance(device, DeviceFact) and (device.count, device.dtype) == (1, "float32")
    assert (device.attention, device.matmul, device.fallbacks) == (built.attention, built.matmul, built.fallbacks)
    assert isinstance(model, ModelFact) and model.is_chosen and not model.lowered
    assert (model.name, model.max_model_len, model.own_length) == ("tiny", 64, RAW["max_position_embeddings"])
    assert model.num_parameters == sum(tensor.size for tensor in load_file(f"{folder}/model.safetensors").values())
    assert isinstance(kv, KVFact) and (kv.num_blocks, kv.num_full_sequences) == (16, 16 // -(-64 // kv.block_size))
    assert isinstance(programs, ProgramsFact) and programs.token_budgets == built.config.token_budgets
    assert programs.is_cache_empty == is_first and not programs.has_bundle
    assert isinstance(made, ProgramsMadeFact) and made.count == programs.count > len(programs.token_budgets)
    assert made.num_compiled == (made.count if is_first else 0)


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"overlap": "maybe"}, "overlap='maybe' must be one of auto, true, false; set --overlap"),
    ({"dtype": "float64"}, "dtype='float64' must be one of auto, float32, bfloat16, float16"),
    ({"kv_dtype": "fp4"}, "kv_dtype='fp4' must be one of auto, int8, fp8; set --kv_dtype"),
    ({"kv_cache_mb": 5, "num_blocks": 5}, "set only one of"),
    ({"kv_cache_mb": -1}, "kv_cache_mb=-1 must be at least 0"),
    ({"block_size": -1}, "block_size=-1 must be at least 0"),
    ({"attention": "cuda"}, "attention='cuda' must be one of auto, reference, cpu, gpu, portable, tpu"),
    ({"matmul": "fast"}, "matmul='fast' must be one of auto, xla, packed"),
    (
      {"quantization": "int3"},
      "quantization='int3' must be one of auto, none, int8, w8a8, int4, fp8; set --quantization",
    ),
    ({"quantization": "int4", "quantization_group_size": 20}, "quantization_group_size=20 must be a multiple of 8"),
    ({"quantization_group_size": 32}, "quantization_group_size=32 needs --quantization=int4, and quantization=auto"),
    ({"token_budgets": (8, 4)}, "strictly increasing"),
    ({"max_num_seqs": 99}, "max_num_seqs=99 exceeds the top token budget 16"),
    ({"prefill_chunk": 17}, "prefill_chunk=17 exceeds the top token budget 16"),
    ({"policy": "nonsense"}, "policy='nonsense' must be one of fair, fcfs"),
    ({"batching": "nonsense"}, "batching='nonsense' must be one of chunked"),
  ],
  ids=str,
)
def test_options_that_contradict_each_other(changes, said):
  with pytest.raises(ConfigError, match=said):
    BuildOptions("nowhere", **(SMALL | changes))


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    (
      {"host_kv_mb": 10**9},
      r"host_kv_mb=1000000000 needs 1000000000 MiB of this machine's memory beside weights, a step and KV \(one "
      r"sequence of \d+ tokens\), and \d+ MiB are free; lower --host_kv_mb",
    ),
    (
      {"host_kv_mb": 10**9, "host_kv_dir": "/tmp"},
      r"host_kv_mb=1000000000 needs 1000000000 MiB of the disk of host_kv_dir=/tmp, and \d+ MiB are free; lower",
    ),
    ({"host_kv_mb": 1, "host_kv_dir": "/nowhere"}, "host_kv_dir=/nowhere is not a folder in which this user may write"),
    ({"max_model_len": 10**6}, "max_model_len=1000000 exceeds the .* positions of .*tiny"),
    ({"num_devices": 64}, "num_devices=64, but this machine has"),
    ({"kv_cache_mb": 1, "block_size": 8192}, r"1 MiB \(--kv_cache_mb=1\) hold 0 KV blocks, but one"),
    ({"compile_cache_dir": "/proc/none"}, "compile_cache_dir=/proc/none"),
    (
      {"quantization": "fp8"},
      "quantization=fp8 is not for cpu; set --quantization to one of auto, none, int8, w8a8, int4",
    ),
    (
      {"quantization": "int4", "quantization_group_size": 80},
      r"tiny: head has 96 inputs, which groups of 80 do not divide; set --quantization_group_size or another --quant",
    ),
  ],
  ids=str,
)
def test_options_that_do_not_fit_the_model_or_the_machine(folder, changes, said):
  with pytest.raises(ConfigError, match=said):
    build_engine(BuildOptions(folder, **(SMALL | changes)), silent, no_events)


def test_the_ladder_follows_from_the_options():
  def ladder(**settings) -> tuple[int, ...]:
    return BuildOptions("any", **settings).choose_ladder("cpu", True, False).token_budgets

  assert ladder() == (8, 32, 64, 256)
  assert ladder(batching="continuous") == UNPADDED_CPU.token_budgets
  assert ladder(prefill_chunk=512) == UNPADDED_CPU.token_budgets
  assert ladder(all_rungs=True) == PADDED.token_budgets
  assert ladder(token_budgets=PADDED.token_budgets) == PADDED.token_budgets[:6]
  assert BuildOptions("any").choose_ladder("cpu", False, False).token_budgets == PADDED.token_budgets
  assert BuildOptions("any").choose_ladder("gpu", False, False).max_num_seqs == 256


@pytest.mark.long  # the step sizes of the default ladder, which take half a minute to compile
@pytest.mark.parametrize("built_here", [True, False])
def test_kernels_are_the_best_there_are_and_what_is_not_there_is_said(folder, built_here, monkeypatch):
  if not built_here:
    monkeypatch.setattr(native, "load_library", nothing_built)
  elif native.compiler() is None:
    pytest.skip("no C++ compiler")
  found = build_engine(
    BuildOptions(folder, **SMALL | {"token_budgets": (64, 256), "prefill_chunk": 0}), silent, no_events
  )
  assert (found.attention, found.matmul) == (("cpu", "packed") if built_here else ("reference", "xla"))
  assert found.config.prefill_chunk == (UNPADDED_CPU.prefill_chunk if built_here else 256)
  assert found.config.computes_padding is not built_here
  assert found.config.overlap
  assert len(found.fallbacks) == (0 if built_here else 2)
  assert all("not built" in reason for reason in found.fallbacks)
  chosen = build_engine(
    BuildOptions(folder, **ONE_SIZE, attention="reference", matmul="xla", overlap="false"), silent, no_events
  )
  assert (chosen.attention, chosen.matmul, chosen.fallbacks) == ("reference", "xla", ())
  assert not chosen.config.overlap


@pytest.mark.parametrize(
  ("platform", "weight_bytes", "overlap"), [("cpu", 20_000_000, True), ("cpu", 500_000_000, False), ("gpu", 16e9, True)]
)
def test_a_cpu_with_long_steps_does_not_launch_ahead(platform, weight_bytes, overlap):
  assert choose_overlap("auto", platform, int(weight_bytes)) is overlap


def test_int8_without_the_kernel_works_and_says_what_it_costs(folder, monkeypatch):
  monkeypatch.setattr(native, "load_library", nothing_built)
  found = build_engine(BuildOptions(folder, **ONE_SIZE, quantization="int8", attention="reference"), silent, no_events)
  assert (found.matmul, found.quantization) == ("xla", "int8")
  (reason,) = found.fallbacks
  assert "not built" in reason and "every step converts int8 weights, which saves memory but no time" in reason


def nothing_built(name):
  raise native.NativeMissing(f"native {name} is not built")


@pytest.mark.parametrize("option", ["attention", "matmul"])
def test_what_was_asked_for_and_is_not_built_is_refused(folder, option, monkeypatch):
  monkeypatch.setattr(native, "load_library", nothing_built)
  chosen = {"attention": "cpu"} if option == "attention" else {"matmul": "packed"}
  with pytest.raises(ConfigError, match=f"not built.*set --{option}"):
    build_engine(BuildOptions(folder, **SMALL, **chosen), silent, no_events)


def test_missing_folder(tmp_path):
  with pytest.raises(CheckpointError, match="no such folder"):
    build_engine(BuildOptions(str(tmp_path / "gone"), **SMALL), silent, no_events)


def test_the_pool_takes_the_memory_that_is_left(folder, monkeypatch):
  asked = []

  def free_bytes(mesh, step_bytes):
    asked.append(step_bytes)
    return 3 * 2**20 - step_bytes

  monkeypatch.setattr(kv_cache, "free_bytes", free_bytes)
  options = BuildOptions(
    folder, max_model_len=256, prefix_cache_scope="off", token_budgets=(8,), max_num_seqs=8, prefill_chunk=8
  )
  config = build_engine(options, silent, no_events).config
  sampler_state = 2 * 4 * 9 * RAW["vocab_size"]
  assert asked[:-1] == [0, 0] and asked[-1] > sampler_state
  block_bytes = 2 * 2 * 16 * RAW["num_key_value_heads"] * (RAW["hidden_size"] // RAW["num_attention_heads"]) * 4
  assert config.num_blocks == min((3 * 2**20 - asked[-1]) // block_bytes - 1, 8 * 256 // 16)
