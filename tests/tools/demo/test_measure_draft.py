"""What tools.demo_model.measure_draft counts: agreements of the draft model, and the steps that they save."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from engine.batch import MAX_DRAFTS
from tools.demo_model import measure_draft
from tools.demo_model.measure_draft import KINDS, count_steps, find_agreement, make_messages
from tools.demo_model.train import PAD, forward, logits, read_weights
from tools.demo_model.train_draft import MODEL

DRAFT = str(pathlib.Path(measure_draft.__file__).parents[2] / "models" / "demo_draft")


@pytest.mark.parametrize(
  ("agrees", "steps"),
  [
    ([], 0),
    ([False] * 5, 5),
    ([True], 1),
    ([False, True, True, False, True], 2),  # the token after accepted drafts is the step's own
    ([True] * (1 + MAX_DRAFTS), 1),
    ([True] * (2 + MAX_DRAFTS), 2),
  ],
)
def test_a_step_takes_the_drafts_up_to_the_first_wrong_one(agrees: list[bool], steps: int):
  assert count_steps([agrees] * MAX_DRAFTS) == steps


def test_a_later_draft_of_a_step_counts_as_one_after_the_heads_own_features():
  right, wrong = [True] * 9, [False] * 9
  assert count_steps([right, right, wrong, *[right] * (MAX_DRAFTS - 3)]) == 3
  assert count_steps([wrong, *[right] * (MAX_DRAFTS - 1)]) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_are_repeatable_and_of_any_number(kind: str):
  found = make_messages(kind, 5)
  assert len(found) == 5 and found == make_messages(kind, 5)
  assert all(messages[-1]["role"] == "user" and messages[-1]["content"] for messages in found)


def test_the_draft_model_agrees_with_its_own_likeliest_tokens_alone():
  params, prompt = read_weights(DRAFT, MODEL), [5, 9, 200, 31]
  tokens = np.full((1, 8), PAD, np.int32)
  tokens[0, :4] = prompt
  output = []
  for place in range(4, 7):
    scores = logits(params, forward(params, jnp.array(tokens), jnp.arange(8)[None], MODEL), MODEL)
    output.append(int(jnp.argmax(scores[0, place - 1])))
    tokens[0, place] = output[-1]
  assert find_agreement(params, prompt, output) == [True] * 3
  output[1] ^= 1
  assert find_agreement(params, prompt, output)[:2] == [True, False]
