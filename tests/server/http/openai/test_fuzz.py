"""Any JSON in any field, and any change of a body's bytes, is served or refused in words: never a 5xx, never a leak."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

COMMON = (
  "model temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty seed n stop "
  "stop_token_ids max_tokens min_tokens ignore_eos logit_bias allowed_token_ids logprobs skip_special_tokens priority "
  "cache_salt request_id stream stream_options return_token_ids return_tokens_as_token_ids response_format "
  "guided_json guided_regex guided_choice guided_grammar structured_outputs "
  "user unheard_of add_special_tokens best_of suffix echo"
).split()
CHAT = (
  "max_completion_tokens top_logprobs tools tool_choice chat_template_kwargs add_generation_prompt modalities".split()
)
RESPONSES = (
  "input instructions previous_response_id tools tool_choice parallel_tool_calls reasoning text chat_template_kwargs "
  "model metadata"
).split()
PATHS = {
  "/v1/completions": ("prompt", *COMMON),
  "/v1/chat/completions": ("messages", *COMMON, *CHAT),
  "/v1/responses": (*RESPONSES, *COMMON, *"max_output_tokens include top_logprobs store".split()),
  "/v1/responses/input_tokens": RESPONSES,
  "/tokenize": ("prompt", "messages", "add_special_tokens", "return_token_strs", "model"),
  "/detokenize": ("tokens", "skip_special_tokens", "model"),
}
GOOD = {
  "prompt": "the cat",
  "messages": [{"role": "user", "content": "hi"}],
  "input": [{"role": "user", "content": "hi"}],
  "max_output_tokens": 3,
  "tokens": [7, 8],
  "max_tokens": 3,
}

NUMBERS = st.one_of(
  st.integers(-3, 30),
  st.integers(-(2**70), 2**70),
  st.floats(allow_nan=False, allow_infinity=False),
  st.sampled_from([2**31, 2**31 - 1, -(2**31), 2**63, 1e308, 0.5, 1.0, -0.0]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.just("<|end|>"))
NAMES = st.sampled_from(
  ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "include_usage", "7", "400", "x"]
)
VALUES = st.recursive(
  LEAVES,
  lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.lists(st.integers(-1, 401), max_size=5), st.dictionaries(NAMES, inner, max_size=4)
  ),
  max_leaves=8,
)


@st.composite
def requests(draw):
  path = draw(st.sampled_from(sorted(PATHS)))
  names = PATHS[path]
  body = {name: value for name, value in GOOD.items() if name in names}
  body |= draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=4))
  return path, body


def check(server, answer) -> None:
  assert answer.status_code in (200, 400, 404), answer.text
  if answer.status_code != 200:
    error = answer.json()["error"]
    assert error["message"] and len(error["message"].encode()) <= 1024
  assert len(server.generations) == 0


@pytest.mark.catalogue("E8")
@settings(max_examples=40)
@given(requests())
def test_any_value_in_any_field(server, http, sent):
  path, body = sent
  check(server, http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}))


@pytest.mark.catalogue("E8")
@settings(max_examples=40)
@given(requests(), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_change_of_the_bytes(server, http, sent, changes):
  path, body = sent
  raw = bytearray(json.dumps(body).encode())
  for at, byte in changes:
    raw[min(int(at * len(raw)), len(raw) - 1)] = byte
  check(server, http.post(path, content=bytes(raw), headers={"content-type": "application/json"}))


def test_nothing_is_left(server):
  server.wait_until(lambda: server.engine.num_live == 0)
  assert server.blocks_in_use == 0
