"""Settings, shapes and sampling parameters refuse what is wrong, with value, limit and remedy."""

import dataclasses

import pytest

from engine.config import EngineConfig, choose_speculation
from engine.errors import ConfigError, InvalidRequest, ShapeNotOnLadder
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.shapes import ShapeLadder, StepShape


def test_the_ladder_is_short_and_gives_the_smallest_rung():
  ladder = ShapeLadder((8, 16, 64), 16)
  assert ladder.rungs() == (StepShape(8, 8, 8), StepShape(16, 16, 16), StepShape(64, 16, 16))
  assert [ladder.fit(tokens).tokens for tokens in (1, 8, 9, 16, 17, 64)] == [8, 8, 16, 16, 64, 64]
  assert ladder.max_tokens == 64


@pytest.mark.parametrize("tokens", [0, 65])
def test_what_is_not_on_the_ladder_is_an_error(tokens: int):
  with pytest.raises(ShapeNotOnLadder, match=rf"a step of {tokens} tokens is outside 1..64 of \(8, 16, 64\)"):
    ShapeLadder((8, 16, 64), 16).fit(tokens)


@pytest.mark.parametrize(
  "budgets, seqs, message",
  [
    ((), 1, "strictly increasing"),
    ((8, 8), 1, "strictly increasing"),
    ((1, 8), 1, "start at 2 or more"),
    ((8, 16), 0, "max_num_seqs=0 must be at least 1"),
    ((8, 16), 17, "max_num_seqs=17 exceeds the top token budget 16"),
  ],
)
def test_bad_ladders(budgets: tuple[int, ...], seqs: int, message: str):
  with pytest.raises(ConfigError, match=message):
    ShapeLadder(budgets, seqs)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"num_blocks": 0}, "num_blocks=0 must be at least 1; set --num_blocks"),
    ({"aging_s": float("nan")}, "aging_s=nan must be a finite number, at least 0; set --aging_s"),
    ({"queue_timeout_s": -1.0}, "queue_timeout_s=-1.0"),
    ({"prefill_chunk": 513}, "prefill_chunk=513 exceeds the top token budget 512"),
    ({"draft_step_limit": 0.9}, "draft_step_limit=0.9 must be 0 or at least 1; set --draft_step_limit"),
    ({"draft_step_limit": -1.0}, "draft_step_limit=-1.0 must be at least 0"),
    ({"speculation": "auto", "batching": "static"}, "speculation=auto does not go with batching=static"),
    ({"speculation": "auto", "max_num_seqs": 1}, "speculation=auto needs logit rows for drafts"),
  ],
)
def test_bad_settings(changes: dict, message: str):
  with pytest.raises(ConfigError, match=message):
    EngineConfig(**{"vocab_size": 100, "max_model_len": 64, "num_blocks": 4} | changes)


def test_derived_settings():
  config = EngineConfig(vocab_size=100, max_model_len=65, num_blocks=4, block_size=16)
  assert config.pool_tokens == 64


def test_drafts_lengthen_steps_by_little_where_nobody_asked_for_them():
  config = EngineConfig(vocab_size=100, max_model_len=65, num_blocks=4, speculation="auto")
  assert config.most_step_ratio == 1.25
  for changes in ({"speculation": "ngram"}, {"has_draft_model": True}):
    assert dataclasses.replace(config, **changes).most_step_ratio == float("inf")
    assert dataclasses.replace(config, draft_step_limit=1.5, **changes).most_step_ratio == 1.5


@pytest.mark.parametrize(
  ("changes", "found"),
  [
    ({}, "auto"),
    ({"batching": "disaggregated"}, "auto"),
    ({"batching": "static"}, "none"),
    ({"batching": "dynamic"}, "none"),
    ({"max_num_seqs": 1}, "none"),
    ({"headless": "LlamaModel"}, "none"),
    ({"batching": "static", "has_draft_model": True}, "auto"),
    ({"batching": "static", "setting": "ngram"}, "ngram"),
    ({"max_num_seqs": 1, "setting": "draft"}, "draft"),
  ],
)
def test_auto_is_none_where_no_step_could_verify_a_draft(changes: dict, found: str):
  assert choose_speculation(**{"setting": "auto", "batching": "chunked", "max_num_seqs": 64} | changes) == found


@pytest.mark.parametrize(
  "params, message",
  [
    ({"max_tokens": 0}, "max_tokens=0 is not allowed: send a whole number from 1"),
    ({"max_tokens": True}, "max_tokens=True"),
    ({"min_tokens": 300}, "min_tokens=300 is not allowed: send a whole number from 0 to 256"),
    ({"temperature": float("nan")}, "temperature=nan is not allowed: send a finite number from 0 to 100"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"top_k": -1}, "top_k=-1"),
    ({"top_p": 0.0}, "top_p=0.0 is not allowed: send a finite number above 0 to 1"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ({"logit_bias": ((100, 1.0),)}, "logit_bias=100 is not allowed: token ids of this model are 0 to 99"),
    ({"logit_bias": ((5, 101.0),)}, r"logit_bias\[5\]=101.0"),
    ({"logit_bias": ((5, float("nan")),)}, r"logit_bias\[5\]=nan"),
    ({"logit_bias": ((5, 1.0),) * 1025}, "logit_bias entries=1025 is not allowed: send at most 1024"),
    ({"allowed_token_ids": ()}, "allowed_token_ids=.* send at least one id"),
    ({"allowed_token_ids": (-1,)}, "allowed_token_ids=-1"),
    ({"stop_token_ids": (100,)}, "stop_token_ids=100"),
    ({"stop_token_ids": (1,) * 17}, "stop_token_ids entries=17 is not allowed: send at most 16"),
    ({"seed": 2**63}, "seed="),
    ({"logprobs": 21}, "logprobs=21 is not allowed: send a whole number from 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
  ],
)
def test_bad_sampling_params(params: dict, message: str):
  with pytest.raises(InvalidRequest, match=message):
    SamplingParams(**params).validate(100)


def test_good_sampling_params():
  SamplingParams().validate(100)
  SamplingParams(
    max_tokens=1,
    temperature=0.0,
    top_p=1.0,
    min_p=1.0,
    logit_bias=((99, -100.0),),
    seed=-(2**63),
    allowed_token_ids=(0, 99),
    stop_token_ids=(99,),
    logprobs=20,
    prompt_logprobs=0,
  ).validate(100)


def test_a_request_survives_its_state():
  request = Request(
    "a",
    (1, 2),
    SamplingParams(logit_bias=((3, 0.5),), allowed_token_ids=(4,), seed=9),
    cache_salt=b"\xff",
    deadline=2.5,
    block_keys=[b"\x01"],
    stop_ids=frozenset((5, 6)),
    rank=(1.0, 2),
  )
  copy = Request.from_state(request.state())
  assert copy.state() == request.state()
  assert copy.params == request.params and copy.stop_ids == request.stop_ids and copy.rank == request.rank
