"""A tiny random model on disk, and what the commands that are run on it print."""

import json
import subprocess

import pytest

from tests.commands import ROOT as ROOT
from tests.commands import run_here as run_here
from tests.commands import run_module as run_module
from tools.bench import ceilings
from tools.make_random_model import write_model

ENGINE_FLAGS = ("--token_budgets=8,32", "--prefill_chunk=32", "--max_num_seqs=8", "--num_blocks=128")
VOCAB_SIZE = 96


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
  """A two-layer model most of whose tokens end a sequence, so that forced lengths are really forced."""
  folder = tmp_path_factory.mktemp("model") / "tiny"
  write_model(
    folder,
    {
      "architectures": ["LlamaForCausalLM"],
      "model_type": "llama",
      "vocab_size": VOCAB_SIZE,
      "hidden_size": 32,
      "intermediate_size": 64,
      "num_hidden_layers": 2,
      "num_attention_heads": 2,
      "num_key_value_heads": 1,
      "head_dim": 16,
      "max_position_embeddings": 256,
      "rope_theta": 10_000.0,
      "rope_scaling": None,
      "rms_norm_eps": 1e-5,
      "tie_word_embeddings": False,
      "hidden_act": "silu",
      "bos_token_id": None,
      "eos_token_id": list(range(8)),
    },
    seed=0,
  )
  return str(folder)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory) -> str:
  """Shared by every process of the session: the same programs are compiled once."""
  return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
  """What memory and cores can do is measured in a moment, and wrongly."""
  monkeypatch.setattr(ceilings, "_ON_CPU", (2**16, 64))


def json_line(done: subprocess.CompletedProcess[str]) -> dict:
  """The one line of standard output, parsed; fails with standard error."""
  assert done.stdout.count("\n") == 1, done.stderr
  return json.loads(done.stdout)
