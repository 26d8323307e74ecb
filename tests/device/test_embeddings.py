"""Embeddings on the demo model: the hidden states of the decoder run whole, in any batch, and only if they are on."""

from collections.abc import Iterator, Sequence
import contextlib
import json
from pathlib import Path
import random

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device.build import Built, build_engine
from engine.device.mesh import make_mesh
from engine.device.options import BuildOptions
from engine.device.pooling import choose_pooling
from engine.device.weights import open_checkpoint
from engine.errors import ConfigError, EngineError, InvalidRequest
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from extensions.disaggregated.build import build_any
from models.attention import dense_causal_attend
from models.registry import config_from_hf

pytestmark = pytest.mark.usefixtures("quick_steps")

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
MODEL = config_from_hf(json.loads((DEMO / "config.json").read_text()))
EMBED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embed=True)
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(3, 2048) for _ in range(length)] for length in (1, 2, 15, 16, 17, 64, 200, 333)]


def make_options(**settings) -> BuildOptions:
  sizes = {"token_budgets": (8, 64), "max_num_seqs": 8, "prefill_chunk": 64, "num_blocks": 128, "max_model_len": 512}
  return BuildOptions(str(DEMO), **(sizes | {"enable_embeddings": True} | settings))


class EventLog:
  """Collects the events of an engine."""

  def __init__(self) -> None:
    self.events: list[TokenEvent] = []

  def embed(self, built: Built, prompts: Sequence[Sequence[int]], others: int = 0) -> list[np.ndarray]:
    """Returns the embedding of each prompt; `others` requests generate meanwhile."""
    self.events.clear()
    for number in range(others):
      params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logprobs=number % 3)
      built.engine.submit(Request(f"other-{number}", [5 + number, 9, 11], params))
    for number, prompt in enumerate(prompts):
      built.engine.submit(Request(f"prompt-{number}", list(prompt), EMBED))
    while built.engine.num_live:
      built.engine.step()
    found = [
      [event.embedding for event in self.events if event.request_id == f"prompt-{number}" and event.embedding]
      for number in range(len(prompts))
    ]
    assert all(len(each) == 1 for each in found), "each prompt has one embedding"
    assert not any(event.embedding for event in self.events if event.request_id.startswith("other"))
    assert {event.finish_reason for event in self.events} <= {None, FinishReason.LENGTH}
    return [np.frombuffer(each[0], "<f4") for each in found]


@pytest.fixture(scope="module")
def log() -> EventLog:
  return EventLog()


@pytest.fixture(scope="module")
def built(log) -> Iterator[Built]:
  yield build_engine(make_options(), lambda *_: None, log.events.extend)


def dense_states(prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
  """Hidden states after the final norm of each prompt, f32[length, D], by the decoder alone, without a cache."""
  loaded = open_checkpoint(str(DEMO), make_mesh(jax.devices()[:1]), jnp.float32).load()

  @jax.jit
  def forward(params, tokens):
    model = nnx.merge(loaded.graphdef, params)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, _ = model.hidden(tokens, positions, (None,) * loaded.config.num_layers, None, dense_causal_attend)
    return model.final_norm(hidden)

  longest = max(map(len, prompts))
  padded = np.zeros((len(prompts), longest), np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[: len(prompt)] = prompt
  return [
    np.asarray(forward(loaded.params, row[None])[0, : len(prompt)]) for row, prompt in zip(padded, prompts, strict=True)
  ]


def test_an_embedding_is_the_final_hidden_state_of_the_last_token(built, log):
  for found, states in zip(log.embed(built, PROMPTS), dense_states(PROMPTS), strict=True):
    assert np.max(np.abs(found - states[-1])) < 2e-5 * np.max(np.abs(states[-1]))


@pytest.mark.parametrize(
  "settings", [{}, {"num_blocks": 24, "max_model_len": 368}, {"prefix_cache_scope": "off", "overlap": "false"}]
)
def test_a_mean_is_that_of_the_hidden_states_of_all_tokens(settings):
  """In chunks, twice, so that blocks of the prefix cache would serve; also with preemptions."""
  log = EventLog()
  built = build_engine(make_options(pooling="mean", **settings), lambda *_: None, log.events.extend)
  assert built.config.pooling == "mean" and built.config.embedding_size == 256
  wanted = [states.mean(axis=0, dtype=np.float64) for states in dense_states(PROMPTS)]
  built.runner.seal()
  for _ in range(2):
    for found, mean in zip(log.embed(built, PROMPTS, others=7), wanted, strict=True):
      assert np.max(np.abs(found - mean)) < 2e-5 * np.max(np.abs(mean))
    assert not any(event.num_cached_tokens for event in log.events if event.request_id.startswith("prompt"))
  assert built.runner.compiles_after_ready == 0
  assert ("num_blocks" in settings) == bool(built.engine.stats().num_preemptions)


def test_neither_neighbors_nor_cached_prefixes_nor_chunks_change_it_by_much(built, log):
  alone = [log.embed(built, [prompt])[0] for prompt in PROMPTS]
  for found, wanted in zip(log.embed(built, PROMPTS, others=6), alone, strict=True):
    assert np.max(np.abs(found - wanted)) < 2e-5 * np.max(np.abs(wanted))
  assert sum(event.num_cached_tokens for event in log.events) > 300, "the second run finds the first one's blocks"


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_deterministic_serving_gives_the_same_bits(pooling):
  log = EventLog()
  options = make_options(deterministic=True, prefix_cache_scope="off", pooling=pooling)
  built = build_engine(options, lambda *_: None, log.events.extend)
  alone = [log.embed(built, [prompt])[0] for prompt in PROMPTS[:5]]
  together = log.embed(built, PROMPTS[:5], others=5)
  assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_nothing_compiles_after_the_start(built, log):
  built.runner.seal()
  log.embed(built, PROMPTS, others=3)
  assert built.runner.compiles_after_ready == 0


def test_requests_without_embeddings_get_the_same_tokens():
  found = []
  for settings in ({}, {"pooling": "mean"}, {"enable_embeddings": False}):
    log = EventLog()
    built = build_engine(make_options(**settings), lambda *_: None, log.events.extend)
    built.engine.submit(Request("a", PROMPTS[4], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)))
    while built.engine.num_live:
      built.engine.step()
    found.append([token for event in log.events for token in event.token_ids])
  assert len(found[0]) == 30 and found[0] == found[1] == found[2]


def test_what_cannot_be_is_refused(built):
  plain = build_engine(make_options(enable_embeddings=False), lambda *_: None, lambda _: None)
  with pytest.raises(InvalidRequest, match="embed is not served here; serve with --enable_embeddings"):
    plain.engine.submit(Request("a", [5], EMBED))
  with pytest.raises(InvalidRequest, match="max_tokens=2 .* send 1 with embed"):
    built.engine.submit(Request("a", [5], SamplingParams(max_tokens=2, embed=True)))
  with pytest.raises(ConfigError, match="enable_embeddings: .* serve without --batching=disaggregated"):
    build_any(make_options(batching="disaggregated", num_devices=2), lambda *_: None, lambda _: None)


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ('{"pooling_mode_cls_token": true, "pooling_mode_lasttoken": false}', "names pooling by cls_token, and"),
    ('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}', "by lasttoken, mean_tokens, and"),
    ('{"pooling_mode": "max"}', "names pooling by max, and .* choose one with --pooling=last"),
    ('{"pooling_mode_mean_tokens": true, "include_prompt": false}', "include_prompt=false, and"),
    ("{", "download the file again"),
    ("[]", "download the file again"),
  ],
)
def test_another_pooling_is_refused(tmp_path, text, words):
  (tmp_path / "1_Pooling").mkdir()
  (tmp_path / "1_Pooling" / "config.json").write_text(text)
  with pytest.raises(EngineError, match=words):
    choose_pooling(BuildOptions(str(tmp_path), enable_embeddings=True), MODEL)
  assert choose_pooling(BuildOptions(str(tmp_path), enable_embeddings=True, pooling="mean"), MODEL) == "mean"


@pytest.mark.parametrize(
  ("text", "pooling"),
  [
    ("{}", "last"),
    ('{"pooling_mode_lasttoken": true, "word_embedding_dimension": 256}', "last"),
    ('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false, "include_prompt": true}', "mean"),
    ('{"pooling_mode": "mean"}', "mean"),
  ],
)
def test_the_checkpoint_or_the_flag_chooses_the_pooling(tmp_path, text, pooling):
  options = BuildOptions(str(tmp_path), enable_embeddings=True)
  assert choose_pooling(options, MODEL) == "last"
  (tmp_path / "1_Pooling").mkdir()
  (tmp_path / "1_Pooling" / "config.json").write_text(text)
  assert choose_pooling(options, MODEL) == pooling
  assert choose_pooling(BuildOptions(str(tmp_path)), MODEL) == "auto"
  with pytest.raises(ConfigError, match="pooling=mean: .* add --enable_embeddings"):
    choose_pooling(BuildOptions(str(tmp_path), pooling="mean"), MODEL)


@pytest.mark.parametrize(
  ("kinds", "words"),
  [
    (["sentence_transformers.models.Transformer", "sentence_transformers.models.Normalize"], ""),
    (["sentence_transformers.models.Transformer", "sentence_transformers.models.Dense"], "has a module Dense, and"),
    ([None], "no list of modules"),
  ],
)
def test_modules_that_change_an_embedding_are_refused(tmp_path, kinds, words):
  (tmp_path / "modules.json").write_text(json.dumps([{"type": kind} for kind in kinds]))
  with pytest.raises(EngineError, match=words) if words else contextlib.nullcontext():
    choose_pooling(BuildOptions(str(tmp_path), enable_embeddings=True), MODEL)
