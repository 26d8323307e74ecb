"""Reasoning in chats with the real openai client: split out, streamed, left in the text, and left out."""

import openai
import pytest

from tests.server.http.openai.test_tools import CHAT, TOOLS, serving, wrote

THINK_TEMPLATE = (
  "{% if tools %}<tool_call>{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
  "{% endfor %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}"
)
TEXT = "<think>\nthe dog\n</think>\n\nthe cat"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "cat"}}</tool_call>'


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
  with serving(tmp_path_factory.mktemp("thinker"), THINK_TEMPLATE) as served:
    yield served[1]


def write_with(client, **fields):
  body = {"structured_outputs": {"choice": [TEXT]}, **fields}
  return client.chat.completions.create(model="tiny", messages=CHAT, extra_body=body).choices[0].message


def said(message) -> tuple[str | None, str | None]:
  extra = message.model_extra or {}
  assert extra.get("reasoning_content") == extra.get("reasoning")
  return extra.get("reasoning_content"), message.content


def test_reasoning_is_apart_from_the_content(thinker):
  [choice] = wrote(thinker, TEXT).choices
  assert said(choice.message) == ("the dog\n", "the cat")
  deltas = [chunk.choices[0].delta for chunk in wrote(thinker, TEXT, stream=True)]
  parts = [said(delta) for delta in deltas]
  assert (
    "".join(part[0] or "" for part in parts) == "the dog\n" and "".join(part[1] or "" for part in parts) == "the cat"
  )
  assert deltas[0].role == "assistant"


def test_a_call_after_reasoning(thinker):
  [choice] = wrote(thinker, f"<think>I look {CALL}</think>{CALL}").choices
  assert said(choice.message) == (f"I look {CALL}", None) and choice.finish_reason == "tool_calls"
  assert len(choice.message.tool_calls) == 1


def test_the_prompt_may_open_the_reasoning(thinker):
  """The output then begins inside. The model is random, so it never closes it."""
  for thinks, stream in ((True, False), (True, True), (False, False)):
    answer = thinker.chat.completions.create(
      model="tiny", messages=CHAT, max_tokens=8, seed=1, stream=stream,
      extra_body={"chat_template_kwargs": {"enable_thinking": thinks}},
    )  # fmt: skip
    if stream:
      parts = [said(chunk.choices[0].delta) for chunk in answer]
      assert not any(content for _, content in parts) and any(reasoning for reasoning, _ in parts)
    else:
      reasoning, content = said(answer.choices[0].message)
      assert (bool(reasoning), content is None) == (thinks, thinks)


@pytest.mark.parametrize("field", [{"separate_reasoning": False}, {"reasoning_format": "none"}])
def test_reasoning_can_stay_in_the_content(thinker, field):
  assert said(write_with(thinker, **field)) == (None, TEXT)


def test_reasoning_can_be_left_out(thinker):
  assert said(write_with(thinker, include_reasoning=False)) == (None, "the cat")


def test_forced_calls_and_constraints_begin_with_the_answer(thinker):
  body = {"chat_template_kwargs": {"enable_thinking": True}}
  answer = thinker.chat.completions.create(
    model="tiny", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=400, seed=1, extra_body=body,
    parallel_tool_calls=False,
  )  # fmt: skip
  assert said(answer.choices[0].message)[0] is None and answer.choices[0].message.tool_calls
  body |= {"structured_outputs": {"choice": ["yes"]}}
  answer = thinker.chat.completions.create(model="tiny", messages=CHAT, extra_body=body)
  assert said(answer.choices[0].message) == (None, "yes")


@pytest.mark.parametrize(
  "field, error",
  [
    ({"reasoning_format": "xml"}, "reasoning_format is not one that exists: send one of none"),
    ({"thinking_token_budget": 9}, "thinking_token_budget=9 .*no budget of its own"),
  ],
)
def test_bad_fields(thinker, field, error):
  with pytest.raises(openai.BadRequestError, match=error):
    thinker.chat.completions.create(model="tiny", messages=CHAT, extra_body=field)


def test_the_parser_can_be_chosen(tmp_path):
  with serving(tmp_path, THINK_TEMPLATE, reasoning_parser="none") as (_, client):
    assert said(wrote(client, TEXT).choices[0].message) == (None, TEXT)
    with pytest.raises(openai.BadRequestError, match="include_reasoning=false is not supported"):
      client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"include_reasoning": False})


def test_markers_that_are_special_tokens(tmp_path, monkeypatch):
  """The parser sees them and no other special token; the client sees none."""
  from tests.server import harness

  special = [*harness.SPECIAL, "[THINK]", "[/THINK]", "[OTHER]"]
  monkeypatch.setattr(harness, "SPECIAL", special)
  with serving(tmp_path, "{% if false %}[THINK]{% endif %}the cat") as (_, client):
    begin, end, other = range(len(special) - 3, len(special))
    grammar = f'start: <[{begin}]> "the dog" <[{other}]> <[{end}]> "the" <[{other}]> " cat"'
    for stream in (False, True):
      answer = client.chat.completions.create(
        model="tiny", messages=CHAT, stream=stream, extra_body={"structured_outputs": {"grammar": grammar}}
      )
      messages = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
      parts = [said(message) for message in messages]
      assert ["".join(part[at] or "" for part in parts) for at in (0, 1)] == ["the dog", "the cat"]
