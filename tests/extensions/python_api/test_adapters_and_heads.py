"""LLM with LoRA adapters, embeddings and heads of classes."""

from collections.abc import Iterator
import json
import math
from pathlib import Path
import shutil
import threading
from typing import Any

import pytest

from engine.errors import AdapterNotLoaded, CheckpointError, ConfigError, InvalidRequest, RequestTooLong, Unavailable
from extensions.python_api.llm import DEMO_MODEL, LLM
from models.registry import config_from_hf
from sluice import SamplingParams
from tools.make_random_adapter import write_plain_adapter
from tools.make_random_model import write_model
from tools.parity.cases import CASES

SETTINGS: dict[str, Any] = {
  **{"token_budgets": [32], "max_num_seqs": 4, "num_blocks": 64, "max_model_len": 256, "compile_cache_dir": ""},
  **{"enable_embeddings": True, "enable_lora": True, "max_loras": 2},
}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp("adapters")
  config = config_from_hf(json.loads((DEMO_MODEL / "config.json").read_text()))
  for seed, name in enumerate(("a", "b", "c")):
    write_plain_adapter(folder / name, config, 8, seed, ["q_proj", "v_proj", "down_proj"], 1.0)
  (folder / "empty").mkdir()
  return folder


@pytest.fixture(scope="module")
def llm(folder) -> Iterator[LLM]:
  with LLM("demo", **SETTINGS) as made:
    made.load_adapter("a", str(folder / "a"))
    made.load_adapter("b", folder / "b")
    yield made


def outputs(llm: LLM, *adapters: str | None) -> list[tuple[int, ...]]:
  return [each.token_ids for each in llm.generate([PROMPT] * len(adapters), GREEDY, adapter=adapters)]


def test_an_adapter_counts_for_a_call_or_for_each_prompt(llm: LLM):
  plain, a, b = outputs(llm, None, "a", "b")
  assert len({plain, a, b}) == 3
  assert [each.token_ids for each in llm.generate([PROMPT, PROMPT], GREEDY, adapter="a")] == [a, a]
  assert llm.generate(PROMPT, GREEDY)[0].token_ids == plain
  assert tuple(token for piece in llm.stream(PROMPT, GREEDY, adapter="b") for token in piece.token_ids) == b
  assert llm.chat(CHAT, GREEDY, adapter="a")[0].token_ids != llm.chat(CHAT, GREEDY)[0].token_ids
  scores = llm.score([PROMPT] * 2, [" there"] * 2, adapter=[None, "a"])
  assert abs(scores[0].total - scores[1].total) > 1e-3
  vectors = llm.embed([PROMPT] * 2, adapter=["a", None])
  assert math.dist(*vectors) > 1e-3


def test_adapters_are_replaced_and_unloaded_without_a_compile(llm: LLM, folder: Path):
  a, b = outputs(llm, "a", "b")
  llm.load_adapter("b", str(folder / "c"), load_inplace=True)
  assert outputs(llm, "a")[0] == a and outputs(llm, "b")[0] != b
  llm.unload_adapter("b")
  with pytest.raises(AdapterNotLoaded, match=r"adapter='b' is no loaded adapter \(loaded: a\); call load"):
    llm.generate(PROMPT, GREEDY, adapter="b")
  llm.load_adapter("b", str(folder / "b"))
  assert outputs(llm, "b")[0] == b


def test_adapters_load_beside_running_requests(llm: LLM, folder: Path):
  """From another thread, while the engine steps."""
  long = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
  alone = llm.generate(PROMPT, long, adapter="a")[0].token_ids
  found: list[tuple[int, ...]] = []
  thread = threading.Thread(target=lambda: found.append(llm.generate(PROMPT, long, adapter="a")[0].token_ids))
  thread.start()
  for name in ("c", "b"):
    llm.load_adapter("b", str(folder / name), load_inplace=True)
  thread.join()
  assert found == [alone]


@pytest.mark.parametrize(
  ("adapter", "words"),
  [
    ("x", r"adapter='x' is no loaded adapter \(loaded: a, b\)"),
    (["a", "x"], "adapter='x' is no loaded adapter"),
    (["a"], r"adapter=\['a'\] is not allowed for 2 prompts"),
    ([5, None], "is not allowed for 2 prompts"),
  ],
)
def test_a_wrong_adapter_is_refused_before_anything_runs(llm: LLM, adapter: Any, words: str):
  before = llm.engine.num_accepted
  for call in (llm.generate, llm.score, llm.embed):
    with pytest.raises(InvalidRequest, match=words):
      call([PROMPT, PROMPT], adapter=adapter)
  if isinstance(adapter, str):
    with pytest.raises(InvalidRequest, match=words):
      llm.stream(PROMPT, adapter=adapter)
  assert llm.engine.num_accepted == before


def test_a_bad_load_changes_nothing(llm: LLM, folder: Path):
  for name, path, error, words in (
    ("a", "a", InvalidRequest, "lora_name='a' is loaded already; unload it first, or set load_inplace"),
    ("c", "nowhere", InvalidRequest, "lora_name='c' finds no free slot: 2 adapters are loaded"),
    ("-", "c", InvalidRequest, "lora_name='-' is not allowed"),
    (llm.model_name, "c", InvalidRequest, "is the served model's name"),
  ):
    with pytest.raises(error, match=words):
      llm.load_adapter(name, str(folder / path))
  with pytest.raises(CheckpointError, match="adapter_config.json: no such file"):
    llm.load_adapter("a", str(folder / "empty"), load_inplace=True)
  with pytest.raises(AdapterNotLoaded, match="lora_name='x' is no loaded adapter"):
    llm.unload_adapter("x")
  assert [each.name for each in llm.engine.adapters()] == ["a", "b"]


def test_embeddings_are_scaled_shortened_and_checked(llm: LLM):
  vectors = llm.embed([PROMPT, llm.tokenize(PROMPT), "a cat"])
  assert [len(each) for each in vectors] == [256] * 3 and math.isclose(math.hypot(*vectors[2]), 1, abs_tol=1e-5)
  assert math.dist(vectors[0], vectors[1]) < 1e-4 < math.dist(vectors[0], vectors[2])
  raw = llm.embed("a cat", normalize=False)[0]
  assert math.hypot(*raw) > 2
  short = llm.embed("a cat", dimensions=8)[0]
  assert len(short) == 8 and math.isclose(short[0] / short[1], raw[0] / raw[1], rel_tol=1e-3)
  assert llm.embed([]) == []
  before = llm.engine.num_accepted
  for given, error, words in (
    ({"inputs": "a", "dimensions": 257}, InvalidRequest, "dimensions=257 is not allowed: send 1 to the model's 256"),
    ({"inputs": ["a", ""]}, InvalidRequest, "inputs has an empty entry"),
    ({"inputs": [5000]}, InvalidRequest, "inputs=5000 is not allowed"),
    ({"inputs": 5}, InvalidRequest, "inputs=5 is not allowed"),
    ({"inputs": ["a", [7] * 300]}, RequestTooLong, "maximum context length is 256 tokens"),
  ):
    with pytest.raises(error, match=words):
      llm.embed(**given)
  with pytest.raises(InvalidRequest, match="has no head of classes"):
    llm.classify("a")
  assert llm.engine.num_accepted == before


def test_a_head_of_classes_classifies_and_generates_nothing(tmp_path):
  change = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
  write_model(tmp_path / "m", CASES["qwen2"][0] | {"vocab_size": 2048} | change, seed=3)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(DEMO_MODEL / name, tmp_path / "m" / name)
  settings = {name: value for name, value in SETTINGS.items() if not name.startswith("enable")}
  with LLM(str(tmp_path / "m"), **settings) as llm:
    texts = [PROMPT, llm.tokenize(PROMPT), ("a cat", "the cat sat")]
    found = llm.classify(texts)
    assert all(list(each) == ["no", "yes"] and math.isclose(sum(each.values()), 1) for each in found)
    assert math.isclose(found[0]["yes"], found[1]["yes"], rel_tol=1e-4)
    assert math.isclose(llm.classify(("a cat", "the cat sat"))[0]["yes"], found[2]["yes"], rel_tol=1e-4)
    raw = llm.classify(PROMPT, use_activation=False)[0]
    assert math.isclose(found[0]["yes"], 1 / (1 + math.exp(raw["no"] - raw["yes"])), rel_tol=1e-4)
    before = llm.engine.num_accepted
    for call in (llm.generate, llm.stream, llm.score, llm.chat):
      with pytest.raises(InvalidRequest, match="ForSequenceClassification has no head of tokens; it serves classes"):
        call(CHAT if call == llm.chat else PROMPT)
    with pytest.raises(InvalidRequest, match="gives no embeddings"):
      llm.embed("a")
    with pytest.raises(ConfigError, match="this LLM has no slots for LoRA adapters; make it with enable_lora=True"):
      llm.load_adapter("a", str(tmp_path))
    with pytest.raises(AdapterNotLoaded, match="adapter='a' is no loaded adapter .* make the LLM with enable"):
      llm.classify("a", adapter="a")
    assert llm.engine.num_accepted == before
  with pytest.raises(Unavailable, match="this LLM is closed"):
    llm.load_adapter("a", str(tmp_path))
