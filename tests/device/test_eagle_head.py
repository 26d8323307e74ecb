"""The EAGLE-3 head on the device proposes what a plain numpy head proposes, whatever steps its tokens came in."""

import dataclasses
from functools import partial
import json
from pathlib import Path

from flax import nnx
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device import draft_model, eagle_programs, kv_cache
from engine.device import mesh as mesh_lib
from engine.device.draft_folder import open_draft
from engine.device.draft_model import DraftModel
from engine.device.eagle_folder import EagleFolder, open_eagle_head
from engine.device.file_checksums import sha256
from engine.device.runner import Making, ModelRunner
from engine.device.served_model import ServedModel
from engine.device.weights import parameter_name
from engine.errors import CheckpointError, ConfigError, EngineError
from engine.shapes import ShapeLadder
from models.attention import dense_causal_attend
from models.config import ModelConfig
from models.weight_form import PLAIN
from tests.device.drafts import DraftCounts, limits_of, serve_with_drafts
from tests.device.eagle_reference import STYLES, HeadSizes, ReferenceHead, make_tensors, write_head
from tests.device.proposal_checker import ProposalChecker
from tests.device.tiny_model import MAX_LEN, TINY, make_runner, random_params

pytestmark = pytest.mark.usefixtures("quick_steps")

TARGET = dataclasses.replace(TINY, num_layers=4)
LAYERS = (1, 2, 3)
NUM_PROPOSALS = 4
NUM_BLOCKS = 140
SHARED = HeadSizes(32, 40, 4, 2, 8, 40, TARGET, LAYERS)
OWN = HeadSizes(24, 40, 2, 1, 16, 96, TARGET, (0, 3, 1), norm_before_residual=True, has_embedding=True, theta=500.0)
F32 = jnp.dtype(jnp.float32)


def describe_served(folder: Path, model: ModelConfig = TARGET, random_weights: bool = False) -> ServedModel:
  return ServedModel(
    folder=str(folder),
    config=model,
    mesh=mesh_lib.make_mesh(jax.devices()[:1]),
    dtype=F32,
    form=PLAIN,
    kv_dtype=F32,
    block_size=4,
    attention="reference",
    random_weights=random_weights,
  )


def open_head(folder: Path, model: ModelConfig = TARGET, random_weights: bool = False) -> EagleFolder:
  return open_eagle_head(str(folder), folder, describe_served(folder, model, random_weights))


@partial(jax.jit, static_argnums=(0, 2))
def _dense_states(graphdef, state, layers, ids):
  positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
  decoder = nnx.merge(graphdef, state)
  return decoder.hidden_and_features(layers, ids, positions, (None,) * TARGET.num_layers, None, dense_causal_attend)[2]


class DenseProposer:
  """What the reference proposes, from a dense forward of the served model."""

  def __init__(self, sizes: HeadSizes, tensors: dict[str, np.ndarray], served):
    self._served, self._layers = served, sizes.feature_layers
    self._head = ReferenceHead(sizes, tensors, served[1]["embed"]["matrix"]["array"][...])

  def __call__(self, tokens: list[int], count: int) -> list[int]:
    ids = np.zeros((1, MAX_LEN), np.int32)
    ids[0, : len(tokens)] = tokens
    states = np.concatenate([np.asarray(each)[0] for each in _dense_states(*self._served, self._layers, ids)], -1)
    return self._head.propose(tokens, states, count)


def make_eagle_runner(folder: Path) -> ModelRunner:
  """A runner of the served model with the head of a folder."""
  opened = open_head(folder)
  served = random_params(TARGET, F32)
  made = make_runner(
    TARGET, num_blocks=NUM_BLOCKS, model=served, spec_settings={"feature_layers": opened.feature_layers}
  )
  spec = opened.make_spec(made.spec, NUM_BLOCKS)
  by_name = {
    parameter_name(path): leaf
    for (path, _), leaf in zip(jax.tree.leaves_with_path(served[1]), made.params, strict=True)
  }
  with Making(opened.make_programs(spec, made.spec, tuple(made.steps), NUM_PROPOSALS)) as making:
    leaves = opened.load_leaves(spec, by_name)
    made.draft = DraftModel(spec, leaves, ShapeLadder((8, 32), 8), making.wait(lambda *_: None))
  made.warm_up(lambda *_: None)
  return made


def check_proposals(
  sizes: HeadSizes, tensors: dict[str, np.ndarray], folder: Path, seeds: int, count: int
) -> tuple[ProposalChecker, DraftCounts]:
  """Serves `count` requests a seed with a head, and compares its proposals with those of the reference."""
  runner = make_eagle_runner(write_head(folder, sizes.make_config(), tensors))
  proposer = DenseProposer(sizes, tensors, random_params(TARGET, F32))
  proposer([1, 2], 1)  # compiles
  runner.seal()
  checker, counts = ProposalChecker(runner, proposer, NUM_PROPOSALS, MAX_LEN, 1), DraftCounts()
  for seed in range(seeds):
    counts += serve_with_drafts(checker, limits_of(runner), seed, count=count)
  assert runner.compiles_after_ready == 0
  return checker, counts


@pytest.mark.parametrize("sizes", [SHARED, OWN], ids=["shared", "own"])
def test_proposals_are_those_of_the_reference(sizes: HeadSizes, tmp_path: Path):
  """Chunks of prompts, decodes, right and wrong drafts, tokens in flight and lost slots leave no other feature."""
  tensors = make_tensors(sizes, 7)
  checker, counts = check_proposals(sizes, tensors, tmp_path / "head", seeds=2, count=16)
  assert counts.accepted > 100 and counts.rejected > 50 and counts.in_flight > 20 and counts.preempted > 1, counts
  assert counts.across > 5, counts
  assert checker.num_checked > 100 and checker.num_after_drafts > 15 and checker.num_after_chunks > 1


def call_checked(compiled: jax.stages.Compiled):
  """Stands in for step_call.call_unchecked: only JAX's own call passes the tokens of the simulator's callbacks."""

  def call(*leaves: jax.Array) -> list[jax.Array]:
    arguments, _ = jax.tree.unflatten(compiled.in_tree, leaves)
    return jax.tree.leaves(compiled(*arguments))

  return call


@pytest.mark.kernels
def test_proposals_with_the_buffer_of_a_tpu_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Features of 24 numbers lie in rows of 1024, and the kernels that copy them run in Pallas' simulator."""
  monkeypatch.setattr(eagle_programs, "choose_row_copies", lambda attention: "tpu")
  monkeypatch.setattr(draft_model, "call_unchecked", call_checked)
  pltpu.set_tpu_interpret_mode(pltpu.InterpretParams())
  try:
    checker, counts = check_proposals(OWN, make_tensors(OWN, 7), tmp_path / "head", seeds=1, count=4)
  finally:
    pltpu.set_tpu_interpret_mode(None)
    pltpu.reset_tpu_interpret_mode_state()
  assert counts.accepted > 10 and counts.rejected > 5 and checker.num_checked > 10, counts


@pytest.mark.parametrize(("attention", "numbers"), [("reference", 32), ("tpu", 8 * 128)])
def test_a_block_counts_the_feature_as_the_device_holds_it(attention: str, numbers: int, tmp_path: Path):
  folder = write_head(tmp_path / "head", SHARED.make_config(), make_tensors(SHARED, 3))
  served = dataclasses.replace(describe_served(folder), attention=attention, block_size=32)
  opened = open_eagle_head(str(folder), folder, served)
  keys_and_values = kv_cache.bytes_per_block(opened.config.model, 32, F32, attention)
  assert opened.block_bytes == keys_and_values + 4 * numbers


def test_features_are_the_inputs_of_layers():
  """A model of the first layers alone ends with the states that enter the next one."""
  graphdef, state = random_params(TARGET, F32)
  ids = np.arange(5, 5 + MAX_LEN, dtype=np.int32)[None]
  found = _dense_states(graphdef, state, (0, 1, 3), ids)
  for number, states in zip((1, 3), found[1:], strict=True):
    part = nnx.merge(graphdef, state)
    part.layers = nnx.List(list(part.layers)[:number])
    part.config = dataclasses.replace(TARGET, num_layers=number)
    positions = jnp.arange(MAX_LEN, dtype=jnp.int32)[None]
    hidden, _ = part.hidden(jnp.array(ids), positions, (None,) * number, None, dense_causal_attend)
    np.testing.assert_allclose(states, hidden, atol=1e-5)
  embedding = np.asarray(state["embed"]["matrix"]["array"][...])
  np.testing.assert_array_equal(found[0][0], embedding[ids[0]])


@pytest.mark.parametrize("style", sorted(set(STYLES) - {"eagle"}))
def test_each_style_of_names_loads_alike(style: str, tmp_path: Path):
  tensors, config = make_tensors(OWN, 3), OWN.make_config()
  spec_of = make_runner(TARGET, num_blocks=8).spec
  leaves = []
  for number, each in enumerate(("eagle", style)):
    opened = open_head(write_head(tmp_path / f"{number}", config, tensors, each))
    leaves.append(opened.load_leaves(opened.make_spec(spec_of, 8), {}))
  assert len(leaves[0]) == 12
  for one, other in zip(*leaves, strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
  ("changes", "layers"),
  [
    ({}, LAYERS),
    (
      {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
      LAYERS,
    ),
    ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": True}}, (2, 2, 1)),
    ({"eagle_aux_hidden_state_layer_ids": None}, (2, 2, 1)),
  ],
)
def test_feature_layers_of_each_key(changes, layers, tmp_path: Path):
  """vLLM's key counts layers by inputs, SGLang's by outputs; the default is that of both."""
  folder = write_head(tmp_path / "head", SHARED.make_config() | changes, make_tensors(SHARED, 3))
  assert open_head(folder).feature_layers == layers


def test_a_speculators_config_names_its_layer_apart(tmp_path: Path):
  config = OWN.make_config()
  apart = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
  layer = {key: config.pop(key) for key in (*apart, "num_hidden_layers", "rms_norm_eps", "vocab_size")}
  config |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
  del config["model_type"]
  opened = open_head(write_head(tmp_path / "head", config, make_tensors(OWN, 3), "vllm"))
  expected = open_head(write_head(tmp_path / "other", OWN.make_config(), make_tensors(OWN, 3)))
  assert opened.config == expected.config


def _without(name: str):
  return lambda tensors: tensors.pop(name)


def _set_offset(index: int, value: int):
  def change(tensors):
    tensors["d2t"][index] = value

  return change


@pytest.mark.parametrize(
  ("changes", "change", "message"),
  [
    ({}, _without("fc.weight"), r"tensor fc.weight of shape \[32, 96\] is missing from the head; copy all files"),
    ({}, _without("midlayer.hidden_norm.weight"), "tensor midlayer.hidden_norm.weight of shape"),
    ({}, _without("lm_head.weight"), "tensor lm_head.weight of shape"),
    ({}, _without("d2t"), r"tensor d2t of shape \[40\] is missing from the head, whose draft_vocab_size=40"),
    ({}, _set_offset(39, 60), r"d2t\[39\] leads to token 99, outside the model's 0 to 95; use the head of this model"),
    ({}, _set_offset(0, -1), r"d2t\[0\] leads to token -1, outside"),
    ({}, lambda t: t.update(d2t=t["d2t"].astype(np.float32)), "tensor d2t of dtype F32"),
    ({}, lambda t: t.update({"mask_hidden": t["fc.weight"]}), "tensor mask_hidden is not part of an EAGLE-3 head"),
    ({}, lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].copy()}), r"tensor fc.weight has shape \[32, 64\]"),
    ({"hidden_size": 64, "head_dim": 8}, lambda t: None, "hidden size 64, but the model's is 32; use the head"),
    ({"target_hidden_size": 48}, lambda t: None, "hidden size 48, but the model's is 32; use the head of this model"),
    ({"vocab_size": 128}, lambda t: None, "vocab_size=128, but the model's is 96; use the head of this model"),
    ({"draft_vocab_size": 97}, lambda t: None, "draft_vocab_size=97 is above the model's 96 tokens"),
    ({"num_hidden_layers": 2}, lambda t: None, "num_hidden_layers=2 is not supported; supported is a head of 1 layer"),
    ({"attention_bias": True}, lambda t: None, "attention_bias"),
    ({"norm_before_fc": True}, lambda t: None, "norm_before_fc=True is not supported"),
    (
      {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
      lambda t: None,
      r"\[1, 2, 4\] names inputs of layers 1 to 4, but",
    ),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, lambda t: None, "must be a list of 3 numbers of layers"),
    (
      {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": False}},
      lambda t: None,
      "use_aux_hidden_state=false is not supported",
    ),
  ],
)
def test_a_head_that_does_not_fit_is_refused(changes, change, message: str, tmp_path: Path):
  tensors = make_tensors(SHARED, 3)
  change(tensors)
  folder = write_head(tmp_path / "head", SHARED.make_config() | changes, tensors)
  with pytest.raises(EngineError, match=message) as error:
    open_head(folder)
  assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("vocab", [{"a": 0}, {"b": 0}])
def test_a_heads_tokenizer_is_that_of_the_model_if_it_has_one(vocab: dict[str, int], tmp_path: Path):
  folder = write_head(tmp_path / "head", SHARED.make_config(), make_tensors(SHARED, 3))
  (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}))
  (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))

  def open_folder():
    return open_draft(str(folder), describe_served(tmp_path))

  if "a" in vocab:
    assert open_folder().feature_layers == LAYERS
  else:
    with pytest.raises(ConfigError, match="tokenizer.json has other tokens than the model's; set --draft_model"):
      open_folder()


def test_a_changed_bit_is_refused_where_the_folder_has_checksums(tmp_path: Path):
  folder = write_head(tmp_path / "head", SHARED.make_config(), make_tensors(SHARED, 3))
  (folder / "SHA256SUMS").write_text(f"{sha256(folder / 'model.safetensors')}  model.safetensors\n")
  assert open_head(folder).feature_layers == LAYERS
  data = bytearray((folder / "model.safetensors").read_bytes())
  data[-1] ^= 1
  (folder / "model.safetensors").write_bytes(data)
  with pytest.raises(CheckpointError, match="is corrupt, its SHA-256 is not the one in SHA256SUMS"):
    open_head(folder)


def test_a_model_without_a_head_of_tokens_takes_no_head(tmp_path: Path):
  folder = write_head(tmp_path / "head", SHARED.make_config(), make_tensors(SHARED, 3))
  with pytest.raises(ConfigError, match="drafts need a model with a head of tokens; leave out --draft_model"):
    open_head(folder, dataclasses.replace(TARGET, has_token_head=False))


def test_random_weights_need_no_file(tmp_path: Path):
  folder = write_head(tmp_path / "head", SHARED.make_config(), {})
  (folder / "model.safetensors").unlink()
  opened = open_head(folder, random_weights=True)
  spec = opened.make_spec(make_runner(TARGET, num_blocks=8).spec, 8)
  leaves = opened.load_leaves(spec, {"embed": jnp.zeros(1)})
  assert [leaf.shape for leaf in leaves[1:]] == [leaf.shape for leaf in spec.params[1:]]
  np.testing.assert_array_equal(opened.target_ids, np.arange(40))
