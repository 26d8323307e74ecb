"""Heads of classes and backbones against transformers, by golden files (made by `make parity`)."""

import pathlib

import numpy as np
import pytest

from engine.device.build import build_engine
from engine.device.options import BuildOptions
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from models.registry import FAMILIES
from server.generation.prompt_embedding import tokenize_inputs
from tools.parity.cases import HEAD_CASES, head_prompts, write_case

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
EMBED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embed=True)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
  with np.load(GOLDEN / "heads.npz") as file:
    return dict(file)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
  return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def test_every_architecture_has_a_case():
  cases = {raw["architectures"][0] for raw, _ in HEAD_CASES.values()}
  assert cases == {name for family in FAMILIES.values() for name in (family.backbone, family.classifier) if name}


@pytest.mark.parametrize("name", HEAD_CASES)
def test_engine(name, golden, tmp_path):
  """In chunks of 16 tokens, all prompts at once."""
  write_case(name, tmp_path / "m")
  events: list[TokenEvent] = []
  built = build_engine(
    BuildOptions(str(tmp_path / "m"), num_blocks=64, token_budgets=(16,), max_num_seqs=4, prefill_chunk=16),
    lambda *_: None,
    events.extend,
  )
  prompts = tokenize_inputs(None, built.config, head_prompts(name), None, "inputs")
  for number, prompt in enumerate(prompts):
    built.engine.submit(Request(str(number), prompt, EMBED))
  while built.engine.num_live:
    assert built.engine.step()
  found = {event.request_id: np.frombuffer(event.embedding, "<f4") for event in events if event.embedding}
  errors = [relative_error(found[str(number)], theirs) for number, theirs in enumerate(golden[name])]
  print(f"{name}: relative error {max(errors):.2e}")
  assert len(errors) == 3 and max(errors) < 1e-4
  assert built.runner.compiles_after_ready == 0
