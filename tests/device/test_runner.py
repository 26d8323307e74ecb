"""The device behind the real Scheduler and Engine: any schedule gives the tokens of a plain forward pass."""

import dataclasses
import random
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.batch import Admission, Batch
from engine.device.programs import step_program
from engine.device.step_call import StepCall
from engine.errors import ShapeNotOnLadder
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.shapes import ShapeLadder, StepShape
from models.decoder import Decoder
from tests.device.serving import make_engine, serve
from tests.device.tiny_model import EOS, TINY, dense_greedy, dense_logits, make_runner, random_params
from tests.fakes import FakeConstraint
from tests.fakes import tokens_of as allowed_by
from tools.soak_compiles import soak

pytestmark = pytest.mark.usefixtures("quick_steps")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
  return random_params(TINY, jnp.float32)


@pytest.fixture(scope="module")
def runner(model):
  runner = make_runner(model=model)
  layers = [np.asarray(layer) for layer in runner.kv]
  assert len({layer.ctypes.data for layer in layers}) == TINY.num_layers, "layers share memory"
  assert not any(layer.any() for layer in layers), "a new pool is not zero"
  del layers  # views, which would keep the first step from taking the memory over
  runner.warm_up(lambda *_: None)
  return runner


@pytest.fixture(scope="module")
def prompts():
  rng = np.random.default_rng(7)
  lengths = (1, 2, 5, 9, 16, 17, 30, 40, 3, 12, 33, 8)
  return [rng.integers(2, TINY.vocab_size, size=length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def reference(model, prompts):
  return [dense_greedy(model, prompt, 12) for prompt in prompts]


def tokens_of(served):
  return [one.tokens for one in served]


def test_alone(runner, prompts, reference):
  for prompt, expected in zip(prompts, reference, strict=True):
    assert tokens_of(serve(runner, [(prompt, GREEDY)])[0]) == [expected]


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"prefill_chunk": 1},
    {"prefill_chunk": 3},
    {"prefill_chunk": 8},
    {"prefix_cache_scope": "off"},
    {"batching": "static"},
  ],
  ids=str,
)
def test_together(runner, prompts, reference, changes):
  served, _ = serve(runner, [(prompt, GREEDY) for prompt in prompts], **changes)
  assert tokens_of(served) == reference
  assert {one.finish_reason for one in served} == {FinishReason.LENGTH}


@pytest.mark.catalogue("C4", "C5")
def test_preempted_again_and_again(runner, prompts, reference):
  served, engine = serve(runner, [(prompt, GREEDY) for prompt in prompts], num_blocks=14)
  assert engine.stats().num_preemptions > 0
  assert tokens_of(served) == reference


def test_without_overlap(runner, prompts, reference):
  assert tokens_of(serve(runner, [(prompt, GREEDY) for prompt in prompts], overlap=False)[0]) == reference


def test_draws_do_not_depend_on_company_chunks_or_preemption(runner, prompts):
  choices = [
    {},
    {"top_p": 0.8},
    {"top_k": 7},
    {"min_p": 0.1},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"logit_bias": ((5, 3.0), (6, -100.0))},
    {"allowed_token_ids": tuple(range(10, 60))},
    {"frequency_penalty": 2.0},
  ]
  requests = [
    (prompt, SamplingParams(max_tokens=12, ignore_eos=True, seed=index, **choices[index % len(choices)]))
    for index, prompt in enumerate(prompts)
  ]
  alone = [serve(runner, [request])[0][0].tokens for request in requests]
  for changes in ({}, {"prefill_chunk": 3}, {"num_blocks": 14}):
    assert tokens_of(serve(runner, requests, **changes)[0]) == alone


def test_stop_min_tokens_and_ignore_eos(runner, prompts):
  always_eos, most = ((EOS[0], 100.0),), 20
  served, _ = serve(
    runner,
    [
      (prompts[3], SamplingParams(most, temperature=0.0, logit_bias=always_eos)),
      (prompts[3], SamplingParams(most, temperature=0.0, logit_bias=always_eos, min_tokens=5)),
      (prompts[3], SamplingParams(most, temperature=0.0, logit_bias=always_eos, ignore_eos=True)),
      (
        prompts[3],
        SamplingParams(most, temperature=0.0, logit_bias=((40, 100.0),), stop_token_ids=(40,), min_tokens=3),
      ),
    ],
  )
  assert [len(one.tokens) for one in served] == [1, 6, most, 4]
  assert served[0].tokens == [EOS[0]] and EOS[0] not in served[1].tokens[:5] and served[1].tokens[5] == EOS[0]
  assert set(served[2].tokens) == {EOS[0]}
  assert 40 not in served[3].tokens[:3] and served[3].tokens[3] == 40


def test_penalties_count_tokens_of_earlier_steps(runner, model, prompts):
  params = SamplingParams(12, temperature=0.0, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0)
  served, _ = serve(runner, [(prompts[2], params)], prefill_chunk=2)
  tokens = list(prompts[2])
  for token in served[0].tokens:
    logits = dense_logits(model, tokens)[len(tokens) - 1].astype(np.float64)
    for seen in set(tokens[len(prompts[2]) :]):
      logits[seen] -= 2.0 + 2.0 * tokens[len(prompts[2]) :].count(seen)
    assert token == int(logits.argmax())
    tokens.append(token)


def check_logprob(entry, logits, number):
  """An entry of `number` alternatives against raw logits f32[V]."""
  expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
  np.testing.assert_allclose(entry.logprob, expected[entry.token_id], atol=1e-4)
  assert len(entry.top) == number
  np.testing.assert_allclose([value for _, value in entry.top], np.sort(expected)[::-1][:number], atol=1e-4)
  np.testing.assert_allclose([value for _, value in entry.top], [expected[token] for token, _ in entry.top], atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"prefill_chunk": 3}, {"num_blocks": 16}], ids=str)
def test_logprobs_of_outputs_and_prompt(runner, model, prompts, changes):
  wants = [(None, None), (0, None), (20, None), (None, 0), (3, 5), (1, 20)]
  requests = [
    (
      prompts[5 + index],
      SamplingParams(max_tokens=6, seed=index, ignore_eos=True, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
    )
    for index, (logprobs, prompt_logprobs) in enumerate(wants)
  ]
  served, _ = serve(runner, requests, **changes)
  for (prompt, params), one in zip(requests, served, strict=True):
    text = prompt + one.tokens
    logits = dense_logits(model, text)
    assert [entry.token_id for entry in one.logprobs] == (one.tokens if params.logprobs is not None else [])
    for position, entry in enumerate(one.logprobs, len(prompt)):
      check_logprob(entry, logits[position - 1], params.logprobs)
    on_prompt = prompt[1:] if params.prompt_logprobs is not None else []
    assert [entry.token_id for entry in one.prompt_logprobs] == on_prompt
    for position, entry in enumerate(one.prompt_logprobs, 1):
      check_logprob(entry, logits[position - 1], params.prompt_logprobs)


def test_logprobs_of_a_vocabulary_of_fewer_tokens_than_alternatives():
  config = dataclasses.replace(TINY, vocab_size=12)
  small = random_params(config, jnp.float32)
  runner = make_runner(config, model=small, token_budgets=(8,))
  params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=20, prompt_logprobs=20)
  served, _ = serve(runner, [([3, 4, 5], params)], vocab_size=12, prefill_chunk=8)
  logits = dense_logits(small, [3, 4, 5, *served[0].tokens])
  entries = [*served[0].prompt_logprobs, *served[0].logprobs]
  assert len(entries) == 5
  for position, entry in enumerate(entries):
    assert sorted(token for token, _ in entry.top) == list(range(12))
    check_logprob(entry, logits[position], 12)


class FewRows(ShapeLadder):
  """One rung of more logit rows than rows."""

  def rungs(self) -> tuple[StepShape, ...]:
    return (StepShape(8, 2, 8),)


def test_a_rung_may_have_more_logit_rows_than_rows(model, prompts):
  runner = make_runner(model=model, ladder=FewRows((8,), 8))
  (shape,) = runner.steps
  prompt = (prompts[5] * 9)[:9]
  params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
  admission = Admission(0, prompt, len(prompt), (1, 2, 3), params, 0)
  batch = Batch(0, shape, ("a",), (0,), (0,), (8,), (8,), (False,), (tuple(prompt[:8]),), (admission,))
  entries = runner.launch(batch).result().logprobs[0]
  logits = dense_logits(model, prompt)
  assert [entry.token_id for entry in entries] == prompt[1:]
  for position, entry in enumerate(entries):
    check_logprob(entry, logits[position], 3)


@pytest.mark.parametrize("poison", [0, 50])  # 0 is also what padding tokens are
def test_nan_ends_its_own_request_alone(model, prompts, reference, poison):
  graphdef, state = model
  state = jax.tree.map(lambda leaf: leaf, state)
  embed = state["embed"]["matrix"]
  embed["array"] = embed["array"].replace(embed["array"].get_value().at[poison].set(jnp.nan))
  runner = make_runner(model=(graphdef, state), token_budgets=(32,))
  clean = [
    (prompt, expected)
    for prompt, expected in zip(prompts, reference, strict=True)
    if poison not in prompt and poison not in expected
  ]
  assert len(clean) > 6
  requests = [(prompt, GREEDY) for prompt, _ in clean]
  requests[2:2] = [([9, 8, poison, 7], GREEDY), ([poison] * 20, GREEDY)]
  for changes in ({}, {"num_blocks": 14}, {"prefill_chunk": 2}):
    served, _ = serve(runner, requests, **changes)
    assert [one.finish_reason for one in served[2:4]] == [FinishReason.ERROR] * 2
    assert tokens_of(served[:2] + served[4:]) == [expected for _, expected in clean]


def test_donation_updates_kv_in_place(runner, prompts):
  kv_bytes = sum(buffer.nbytes for buffer in runner.kv)
  state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.slot_state))
  before = [buffer.unsafe_buffer_pointer() for buffer in (*runner.kv, *jax.tree.leaves(runner.slot_state))]
  params = SamplingParams(max_tokens=4, presence_penalty=1.0, logit_bias=((4, 1.0),))
  serve(runner, [(prompt, params) for prompt in prompts])
  assert [buffer.unsafe_buffer_pointer() for buffer in (*runner.kv, *jax.tree.leaves(runner.slot_state))] == before
  for executable in runner.steps.values():
    assert executable.memory_analysis().alias_size_in_bytes >= kv_bytes + state_bytes


def constrained_greedy(model, prompt, count):
  """By the plain forward pass and the constraint's own masks."""
  constraint, tokens = FakeConstraint(TINY.vocab_size), list(prompt)
  for _ in range(count):
    allowed = allowed_by(constraint.allowed())
    logits = dense_logits(model, tokens)[-1][allowed]
    tokens.append(allowed[int(logits.argmax())])
    constraint.accept(tokens[-1])
  return tokens[len(prompt) :]


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 14}, {"prefill_chunk": 3}], ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_constrained_beside_others(runner, model, prompts, reference, overlap, changes):
  seen: dict[str, list[int]] = {}

  def emit(events):
    for event in events:
      seen.setdefault(event.request_id, []).extend(event.token_ids)

  runner.seal()
  engine = make_engine(runner, emit, overlap=overlap, **changes)
  for index, prompt in enumerate(prompts):
    constraint = FakeConstraint(TINY.vocab_size) if index != 3 else None
    engine.submit(Request(str(index), prompt, GREEDY, constraint=constraint))
  while engine.num_live:
    engine.step()
    assert engine.dead is None, engine.dead
  for index, prompt in enumerate(prompts):
    wanted = reference[index] if index == 3 else constrained_greedy(model, prompt, 12)
    assert seen[str(index)] == wanted
  assert runner.compiles_after_ready == 0


def test_masks_of_more_rows_than_one_call_takes(runner):
  """Each line of each call goes to its own slot, and the padding slot takes the rest."""
  words = runner.slot_state.mask.shape[1]
  rng = np.random.default_rng(5)
  num_lines = runner.slot_state.mask.shape[0]
  # Few by one program, many by another, and more than that in two calls.
  for slots in ((5, 0, 7), (5, 0, 7, *range(9, 40)), (5, 0, 7, *range(9, num_lines))):
    lines = [(slot, rng.integers(-(2**31), 2**31, words, dtype=np.int32)) for slot in slots]
    before = np.asarray(runner.slot_state.mask).copy()
    runner._set_masks([(slot, line.tobytes()) for slot, line in lines])
    after = np.asarray(runner.slot_state.mask)
    for slot, line in lines:
      assert np.array_equal(after[slot], line)
    untouched = [slot for slot in range(num_lines) if slot not in (8, *slots)]
    assert np.array_equal(after[untouched], before[untouched])


def test_a_shape_that_was_not_compiled_is_an_error(runner):
  with pytest.raises(ShapeNotOnLadder, match="tokens=9"):
    runner.launch(Batch(0, StepShape(9, 8, 8), (), (), (), (), (), (), ()))


@pytest.mark.catalogue("C15")
def test_nothing_compiles_in_ten_thousand_steps_of_anything(runner):
  inbox = []
  engine = make_engine(runner, inbox.extend, num_blocks=24, policy="priority", queue_timeout_s=0.0)
  runner.seal()
  soaked = soak(engine, inbox, num_steps=10_000, seed=1)
  assert min(soaked.requests, soaked.aborts, soaked.preemptions) > 100 and not soaked.errors
  assert runner.compiles_after_ready == 0
  jax.jit(lambda x: x + 1)(jnp.float32(1)).block_until_ready()
  assert runner.compiles_after_ready > 0, "the counter counts"


def test_bf16_stays_near_f32(model, prompts):
  graphdef, _ = random_params(TINY, jnp.bfloat16)
  half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model[1])
  runner = make_runner(model=(graphdef, half), dtype=jnp.bfloat16, token_budgets=(32,))
  params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
  requests = [(prompt, params) for prompt in prompts[4:8]]
  served, _ = serve(runner, requests)
  for (prompt, _), one in zip(requests, served, strict=True):
    logits = dense_logits(model, prompt).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    got = np.array([entry.logprob for entry in one.prompt_logprobs])
    wanted = expected[np.arange(len(prompt) - 1), prompt[1:]]
    assert np.abs(got - wanted).mean() < 0.1


def test_submitting_from_another_step_keeps_slots_apart(runner, prompts, reference):
  """Requests join while others run, so slots are reused by requests of every kind."""
  found: dict[str, list[int]] = {}
  engine = make_engine(runner, lambda events: [found[event.request_id].extend(event.token_ids) for event in events])
  order = random.Random(0)
  rich = SamplingParams(max_tokens=9, presence_penalty=2.0, logit_bias=((9, 50.0),), min_tokens=2)
  expected = {}
  for index in range(60):
    which = order.randrange(len(prompts))
    plain = index % 2 == 0
    params = GREEDY if plain else rich
    found[str(index)] = []
    engine.submit(Request(str(index), prompts[which], params, seed=index))
    if plain:
      expected[str(index)] = reference[which]
    for _ in range(order.randrange(4)):
      engine.step()
  while engine.num_live:
    engine.step()
  assert engine.dead is None
  assert {name: found[name] for name in expected} == expected


def test_the_last_layer_of_larger_rungs_computes_tokens_with_logits_alone(runner, monkeypatch: pytest.MonkeyPatch):
  hidden, selects = Decoder.hidden_and_features, []

  def note(self, *arguments):
    selects.append(arguments[7] is not None)
    return hidden(self, *arguments)

  monkeypatch.setattr(Decoder, "hidden_and_features", note)
  for shape in (StepShape(8, 8, 8), StepShape(16, 16, 16), StepShape(16, 8, 8)):
    program = step_program(runner.spec, shape)
    jax.eval_shape(program.function, *program.arguments)
  assert selects == [False, True, True]


def test_packed_arrays_are_the_devices_own_and_used_again(runner, prompts):
  """A step that waits for another is not written over; what comes back is taken next, and what never does is missed."""
  shape, call = next(iter(runner.calls.items()))
  runner.seal()
  serve(runner, [(prompt, GREEDY) for prompt in prompts])
  held = [call.take() for _ in range(4)]
  assert len({packed.values.ctypes.data for packed in held}) == 4
  for packed in held:
    assert packed.values.size == runner.spec.layout(shape).size
    assert packed.argument.unsafe_buffer_pointer() == packed.values.ctypes.data
    packed.values[:] = 7
    assert (np.asarray(packed.argument) == 7).all()
  call.give_back(held[1])
  assert call.take() is held[1]
  padding = Batch(-1, shape, (), (), (), (), (), (), ())
  steps = [runner.launch(padding) for _ in range(3)]  # none of which is read before the last is launched
  for step in steps:
    step.result()
    step.result()  # read twice, it returns its array once
  assert len({packed.values.ctypes.data for packed in [call.take() for _ in range(4)]}) == 4
  assert runner.compiles_after_ready == 0


def test_packed_arrays_of_several_devices_are_each_new():
  """When the output of one device is there, another may still read what it was given."""
  sharding: Any = types.SimpleNamespace(device_set={"one", "another"})
  compiled: Any = object()
  call = StepCall(compiled, 8, sharding)
  first = call.take()
  call.give_back(first)
  assert first.argument is first.values
  assert not np.shares_memory(call.take().values, first.values)
  assert call.execute is compiled
