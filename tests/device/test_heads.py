"""Checkpoints without a head of tokens: how they load, what they refuse, and that a row's numbers are its own."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.device.build import Built, build_engine, build_side
from engine.device.mesh import make_mesh
from engine.device.options import BuildOptions
from engine.device.orbax_folder import save_orbax_folder
from engine.device.pooling import choose_pooling
from engine.device.weights import open_checkpoint
from engine.errors import CheckpointError, ConfigError, EngineError, InvalidRequest
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from models.registry import config_from_hf
from tools.parity.cases import CASES, HEAD_CASES, write_case

MESH = make_mesh(jax.devices()[:1])
EMBED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embed=True)
PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 16, 40)]


def make_options(folder: Path, **settings) -> BuildOptions:
  sizes = {"token_budgets": (8, 32), "max_num_seqs": 4, "prefill_chunk": 32, "num_blocks": 64, "max_model_len": 128}
  return BuildOptions(str(folder), **(sizes | settings))


def run(built: Built, events: list[TokenEvent], prompts: list[list[int]]) -> list[np.ndarray]:
  events.clear()
  for number, prompt in enumerate(prompts):
    built.engine.submit(Request(str(number), prompt, EMBED))
  while built.engine.num_live:
    built.engine.step()
  assert {event.finish_reason for event in events} == {None, FinishReason.LENGTH}
  found = {event.request_id: np.frombuffer(event.embedding, "<f4") for event in events if event.embedding}
  return [found[str(number)] for number in range(len(prompts))]


def build(folder: Path, **settings) -> tuple[Built, list[TokenEvent]]:
  events: list[TokenEvent] = []
  return build_engine(make_options(folder, **settings), lambda *_: None, events.extend), events


def edit(folder: Path, change) -> None:
  file = folder / "model.safetensors"
  values = dict(load_file(file))
  change(values)
  save_file(values, file)


def write_single(name: str, folder: Path) -> Path:
  """Writes a case of one file."""
  assert HEAD_CASES[name][1] == 1
  write_case(name, folder)
  return folder


def test_deterministic_numbers_have_the_same_bits_in_any_batch(tmp_path):
  built, events = build(write_single("qwen2_classes", tmp_path / "m"), deterministic=True)
  together = run(built, events, PROMPTS)
  for prompt, numbers in zip(PROMPTS, together, strict=True):
    assert run(built, events, [prompt])[0].tobytes() == numbers.tobytes()
  assert len({numbers.tobytes() for numbers in together}) == len(PROMPTS)


def test_a_sluice_folder_keeps_the_head(tmp_path):
  folder = write_single("gemma2_classes", tmp_path / "m")
  checkpoint = open_checkpoint(str(folder), MESH, "float32")
  leaves = dict(zip(checkpoint.kept, jax.tree.leaves(checkpoint.load().params), strict=True))
  save_orbax_folder(tmp_path / "sluice", leaves, "named", (folder / "config.json",))
  found = [run(*build(place), PROMPTS) for place in (folder, tmp_path / "sluice")]
  for one, other in zip(*found, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.long
def test_int8_changes_the_backbone_alone(tmp_path):
  folder = write_single("qwen2_classes", tmp_path / "m")
  plain, small = (run(*build(folder, quantization=kind), PROMPTS) for kind in ("none", "int8"))
  for one, other in zip(plain, small, strict=True):
    assert 1e-6 < np.abs(one - other).max() < 0.2


def test_a_whole_model_saved_as_a_backbone_generates_only_if_its_head_is_tied(tmp_path):
  """As Qwen3-Embedding is: its files name a whole model and hold a backbone's tensors, without `model.`."""
  for name, tied in (("qwen2", True), ("llama3", False)):
    folder = tmp_path / name
    write_case(f"{name}_states", folder)
    raw = CASES[name][0]
    assert raw["tie_word_embeddings"] == tied
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoint = open_checkpoint(str(folder), MESH, "float32")
    assert checkpoint.declared.config.has_token_head == tied
  built, _ = build(tmp_path / "llama3")
  assert built.config.headless == "LlamaModel" and built.config.embedding_size == 96
  with pytest.raises(InvalidRequest, match="since LlamaModel has no head of tokens; it serves embeddings"):
    built.engine.submit(Request("a", [1], SamplingParams(max_tokens=1)))


def test_a_backbones_unused_head_is_ignored(tmp_path):
  folder = write_single("qwen2_states", tmp_path / "m")
  edit(folder, lambda values: values.update({"lm_head.weight": values["embed_tokens.weight"] * 0 + 1}))
  assert open_checkpoint(str(folder), MESH, "float32").declared.config.has_token_head is False


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda values: values.pop("score.weight"), r"tensor score.weight of shape \[4, 96\] is missing"),
    (
      lambda values: values.update({"score.weight": values["score.weight"][:3]}),
      r"shape \[3, 96\].* \[4, 96\]",
    ),
    (lambda values: values.update({"score.bias": values["score.weight"][:, 0].copy()}), "score.bias is not part of"),
    (lambda values: values.update({"score.weight": values["score.weight"] * np.nan}), "score.weight holds NaN or Inf"),
    (lambda values: values.update({"score.weight": values["score.weight"].astype(np.int32)}), "score.weight"),
  ],
)
def test_a_broken_head_is_refused(tmp_path, change, words):
  folder = write_single("qwen2_classes", tmp_path / "m")
  edit(folder, change)
  with pytest.raises(CheckpointError, match=words):
    open_checkpoint(str(folder), MESH, "float32").load()


def test_disaggregated_batching_is_refused(tmp_path):
  folder = write_single("qwen2_classes", tmp_path / "m")
  options = make_options(folder, batching="disaggregated")
  with pytest.raises(ConfigError, match="Qwen2ForSequenceClassification has no head of tokens, so it needs no decode"):
    build_side(options, jax.devices()[:1], lambda *_: None, None)


def test_a_head_of_classes_takes_the_last_state(tmp_path):
  model = config_from_hf(HEAD_CASES["qwen2_classes"][0])
  assert choose_pooling(make_options(tmp_path), model) == "last"
  with pytest.raises(ConfigError, match="pooling=mean: Qwen2ForSequenceClassification scores classes from the last"):
    choose_pooling(make_options(tmp_path, pooling="mean"), model)
  (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.cross_encoder.modules.Dense"}]')
  with pytest.raises(EngineError, match="has a module Dense"):
    choose_pooling(make_options(tmp_path), model)


def test_numbers_that_are_not_finite_end_the_request(tmp_path):
  folder = write_single("qwen2_classes", tmp_path / "m")
  edit(folder, lambda values: values.update({"model.norm.weight": values["model.norm.weight"] * 0 + 3e38}))
  built, events = build(folder)
  built.engine.submit(Request("a", [5, 6, 7], EMBED))
  while built.engine.num_live:
    built.engine.step()
  assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.ERROR]
