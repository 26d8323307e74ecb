"""Several devices that share each layer give the tokens of one, with few collective operations and no large gather.

Each test runs a process of its own with eight CPU devices, since JAX counts them at its start.
"""

import json
import pathlib
import types

import jax
import numpy as np
import pytest

from engine.device.mesh import make_mesh
from engine.device.options import BuildOptions
from engine.device.weights import open_checkpoint
from engine.errors import ConfigError
from extensions.disaggregated import build
from models.registry import config_from_hf
from tests.device.several_devices import make_requests, serve_on_devices
from tools.check_device.facts import collectives
from tools.make_random_adapter import write_plain_adapter
from tools.make_random_model import write_model
from tools.parity.cases import CASES, head_prompts, write_case

SETTINGS = {
  "token_budgets": [16],
  "max_num_seqs": 4,
  "num_blocks": 12,
  "block_size": 4,
  "max_model_len": 48,
  "prefill_chunk": 12,
}
LAYERS = 2
DEMO = pathlib.Path(__file__).parents[2] / "models" / "demo"


def make_model(folder: pathlib.Path, case: str, **changes) -> pathlib.Path:
  config, num_files = CASES[case]
  layers = {"num_hidden_layers": LAYERS}
  if "layer_types" in config:
    layers["layer_types"] = config["layer_types"][:LAYERS]
  write_model(folder, {**config, **layers, **changes}, seed=0, num_shards=num_files)
  return folder


def check_same(one: dict, *others: dict, same_steps: bool = True) -> None:
  """Asserts equal tokens, and log probabilities within rounding, of one device and of several.

  Args: same_steps: both also preempt as often, because no step depends on time.
  """
  assert one["preemptions"] > 0 and one["compiles"] == 0
  for other in others:
    assert other["tokens"] == one["tokens"]
    assert other["compiles"] == 0 and other["preemptions"] > 0
    assert not same_steps or other["preemptions"] == one["preemptions"]
    for entries, expected in zip(other["logprobs"], one["logprobs"], strict=True):
      assert [entry[0] for entry in entries] == [entry[0] for entry in expected]
      for entry, wanted in zip(entries, expected, strict=True):
        np.testing.assert_allclose(entry[1], wanted[1], atol=2e-4)
        np.testing.assert_allclose([x for _, x in entry[2:]], [x for _, x in wanted[2:]], atol=2e-4)


def check_collectives(found: dict, num_layers: int, devices: int) -> None:
  """Asserts the collective operations of every step: two sums a layer, one for the embedding, and few small ones."""
  for num_logits, text in found["programs"]:
    moved = collectives(text)
    always = [each.opcode for each in moved if not each.is_conditional]
    assert always.count("all-reduce") == 2 * num_layers + 1
    assert always.count("all-gather") == 1 and len(always) == 2 * num_layers + 2
    # Of 20 alternatives, their tokens and log probabilities: far below the logits of a row.
    assert max(each.elements for each in moved if each.opcode == "all-gather") <= devices * 2 * 20 * num_logits


def test_two_and_four_devices_give_the_tokens_of_one(tmp_path: pathlib.Path) -> None:
  """Packed weights and C++ kernels; at four devices each KV head is on two of them, and query heads are padded."""
  model = make_model(tmp_path / "model", "qwen2", vocab_size=250, intermediate_size=203)
  settings = [SETTINGS | {"num_devices": devices} for devices in (1, 2, 4)]
  one, two, four = serve_on_devices(model, settings, make_requests(7, 24, 8))
  check_same(one, two, four)
  assert one["kernels"] == two["kernels"] == four["kernels"] == ["cpu", "packed", "cpu"]
  assert two["kv_shares"] == [0.5] * 2 and four["kv_shares"] == [0.25] * 4 and four["state_share"] == 0.25
  assert not any(collectives(text) for _, text in one["programs"])
  check_collectives(two, LAYERS, 2)
  check_collectives(four, LAYERS, 4)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", ["packed", "xla"])
def test_every_family_gives_the_tokens_of_one_device(tmp_path: pathlib.Path, case: str, kernels: str) -> None:
  model = make_model(tmp_path / "model", case, vocab_size=250, intermediate_size=203)
  more = {"matmul": "xla", "attention": "reference"} if kernels == "xla" else {}
  settings = [SETTINGS | more | {"num_devices": devices} for devices in (1, 2, 4, 8)]
  one, *others = serve_on_devices(model, settings, make_requests(14, 30, 10))
  check_same(one, *others)
  for devices, other in zip((2, 4, 8), others, strict=True):
    check_collectives(other, LAYERS, devices)


@pytest.mark.long
def test_deterministic_steps_of_several_sizes_have_one_size_of_the_sampler(tmp_path: pathlib.Path) -> None:
  """Small steps sample fewer rows than the server has, and several devices pad these too."""
  model = make_model(tmp_path / "model", "llama3", vocab_size=250, intermediate_size=203)
  base = SETTINGS | {"token_budgets": [2, 16], "prefill_chunk": 8, "deterministic": True}
  one, *others = serve_on_devices(
    model, [base | {"num_devices": devices} for devices in (1, 2, 4)], make_requests(7, 24, 8)
  )
  check_same(one, *others)
  assert len(others[0]["programs"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["packed", "xla"])
@pytest.mark.parametrize(
  "more",
  [{"quantization": "int8"}, {"deterministic": True, "prefill_chunk": 8}, {"host_kv_mb": 4, "kv_dtype": "int8"}],
  ids=str,
)
def test_other_settings_give_the_tokens_of_one_device(tmp_path: pathlib.Path, more: dict, kernels: str) -> None:
  """With --deterministic each build also runs its own trial: a prompt alone, in chunks and among neighbors."""
  model = make_model(tmp_path / "model", "llama3", vocab_size=250, intermediate_size=203)
  more = more | ({"matmul": "xla", "attention": "reference"} if kernels == "xla" else {})
  settings = [SETTINGS | more | {"num_devices": devices} for devices in (1, 2, 4, 8)]
  one, *others = serve_on_devices(model, settings, make_requests(14, 30, 10))
  check_same(one, *others, same_steps="host_kv_mb" not in more)  # blocks come from the host when their copy is done


@pytest.mark.long
@pytest.mark.parametrize(
  ("more", "counts"),
  [
    ({"quantization": "w8a8", "matmul": "xla", "attention": "reference"}, (1, 2, 4)),
    ({"quantization": "int4", "quantization_group_size": 8}, (1, 2)),
    ({"quantization": "int4", "quantization_group_size": 8, "matmul": "xla", "attention": "reference"}, (1, 2)),
  ],
  ids=str,
)
def test_codes_by_group_give_the_tokens_of_one_device(tmp_path: pathlib.Path, more: dict, counts: tuple) -> None:
  """The groups of a device's inputs are those of the whole; packed w8a8 rounds activations by parts of its inputs."""
  model = make_model(tmp_path / "model", "llama3", vocab_size=250)
  settings = [SETTINGS | more | {"num_devices": devices} for devices in counts]
  check_same(*serve_on_devices(model, settings, make_requests(7, 24, 12)))


@pytest.mark.long
def test_codes_by_group_with_a_bundle_and_with_adapters(tmp_path: pathlib.Path) -> None:
  """A stored program takes the same codes, and an adapter changes only the rows that have it."""
  model = make_model(tmp_path / "model", "llama3", vocab_size=250)
  config = config_from_hf(json.loads((model / "config.json").read_text("utf-8")))
  write_plain_adapter(tmp_path / "a", config, 8, 0, strength=0.5)
  settings = SETTINGS | {"quantization": "int4", "quantization_group_size": 16}
  bundle, requests = str(tmp_path / "bundle"), make_requests(5, 20, 8)
  stored = [settings | {"bundle": [bundle, is_written]} for is_written in (True, False)]
  plain, written, restored = serve_on_devices(model, [settings, *stored], requests)
  assert plain["tokens"] == written["tokens"] == restored["tokens"]
  assert plain["compiles"] == restored["compiles"] == 0
  mixed = [(prompt, params | {"adapter": "a" if n % 2 else ""}) for n, (prompt, params) in enumerate(requests)]
  lora = settings | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
  (adapted,) = serve_on_devices(model, [lora], mixed, {"a": str(tmp_path / "a")})
  same = [mine == theirs for mine, theirs in zip(adapted["tokens"], plain["tokens"], strict=True)]
  assert same == [True, False, True, False, True]


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["packed", "xla"])
def test_adapters_on_several_devices(tmp_path: pathlib.Path, kernels: str) -> None:
  model = make_model(tmp_path / "model", "qwen3", vocab_size=250, intermediate_size=203)
  config = config_from_hf(json.loads((model / "config.json").read_text("utf-8")))
  for seed, name in enumerate("ab"):
    write_plain_adapter(tmp_path / name, config, 8 - seed, seed, strength=0.5)
  adapters = {name: str(tmp_path / name) for name in "ab"}
  requests = [
    (prompt, params | {"adapter": ("a", "b", "")[n % 3]})
    for n, (prompt, params) in enumerate(make_requests(14, 30, 10))
  ]
  more = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
  more |= {"matmul": "xla", "attention": "reference"} if kernels == "xla" else {}
  settings = [SETTINGS | more | {"num_devices": devices} for devices in (1, 2, 4, 8)]
  one, *others = serve_on_devices(model, settings, requests, adapters)
  check_same(one, *others)
  (plain,) = serve_on_devices(model, [SETTINGS], make_requests(14, 30, 10))
  assert plain["tokens"] != one["tokens"]


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen2_classes", "gemma2_states"])
def test_heads_of_classes_and_embeddings_on_several_devices(tmp_path: pathlib.Path, case: str) -> None:
  write_case(case, tmp_path / "model")
  requests = [(prompt, {"max_tokens": 1, "embed": True}) for prompt in head_prompts(case)]
  settings = [SETTINGS | {"num_blocks": 64, "max_model_len": 96, "num_devices": devices} for devices in (1, 2, 4, 8)]
  one, *others = serve_on_devices(tmp_path / "model", settings, requests)
  assert len(one["embeddings"]) == len(requests)
  for other in others:
    assert other["compiles"] == 0
    for name, numbers in one["embeddings"].items():
      np.testing.assert_allclose(other["embeddings"][name], numbers, atol=1e-4)


@pytest.mark.long
def test_sluice_folders_and_random_weights_on_several_devices() -> None:
  """The demo model is a Sluice folder; on 4 devices its 2 KV heads repeat."""
  base = {"token_budgets": [8, 64], "max_num_seqs": 8, "num_blocks": 18, "max_model_len": 256, "prefill_chunk": 48}
  for more in ({}, {"matmul": "xla"}, {"random_weights": True}, {"random_weights": True, "matmul": "xla"}):
    settings = [base | more | {"num_devices": devices} for devices in (1, 2, 4)]
    check_same(*serve_on_devices(DEMO, settings, make_requests(12, 120, 40)))


@pytest.mark.long
def test_a_bundle_and_two_sides_of_several_devices(tmp_path: pathlib.Path) -> None:
  model = make_model(tmp_path / "model", "llama3", vocab_size=250, intermediate_size=203)
  bundle = str(tmp_path / "bundle")
  settings = [
    SETTINGS,
    SETTINGS | {"num_devices": 4, "bundle": [bundle, True]},
    SETTINGS | {"num_devices": 4, "bundle": [bundle, False]},
    SETTINGS | {"num_devices": 8, "batching": "disaggregated"},
  ]
  one, *shared, apart = serve_on_devices(model, settings, make_requests(14, 30, 10))
  check_same(one, *shared)
  assert [each["compiles_before"] for each in shared] == [shared[0]["compiles_before"], 0] != [0, 0]
  assert apart["tokens"] == one["tokens"] and apart["compiles"] == 0


def test_sides_with_other_shapes_of_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
  """One device for prefill has the demo model's 2 KV heads, and three for decode have one each."""
  declared = open_checkpoint(str(DEMO), make_mesh(jax.devices()[:1]), "float32").declared
  monkeypatch.setattr(build, "begin_build", lambda options: ([None] * 4, ""))
  monkeypatch.setattr(build, "build_side", lambda *_, **more: types.SimpleNamespace(loaded=declared))
  options = BuildOptions(str(DEMO), batching="disaggregated", num_devices=4, prefill_devices=1)
  with pytest.raises(ConfigError, match="2 KV heads become 2 on 1 devices for prefill, and 3 on 3 for decode"):
    build.build_any(options, lambda *_: None, lambda _: None)
