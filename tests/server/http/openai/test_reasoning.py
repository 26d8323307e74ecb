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
    ({"thinking_token_budget": -2}, "thinking_token_budget=-2 is not allowed: send 0 or more, or -1"),
    ({"thinking_token_budget": 9, "thinking_budget": 9}, "thinking_budget is not allowed beside thinking_token_budget"),
    ({"thinking_token_budget": 9, "allowed_token_ids": [9]}, "allowed_token_ids is not allowed beside thinking_token"),
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


def think(client, budget: int, *, name: str = "thinking_token_budget", stream: bool = False, **fields):
  """Returns (reasoning, content, token ids) of a chat whose prompt opens the reasoning."""
  body = {"chat_template_kwargs": {"enable_thinking": True}, name: budget, "return_token_ids": True, "ignore_eos": True}
  body |= fields.pop("extra", {})
  more = {"max_tokens": 40, "seed": 1, "temperature": 1.0} | fields
  answer = client.chat.completions.create(model="tiny", messages=CHAT, stream=stream, extra_body=body, **more)
  choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
  parts = [said(choice.delta if stream else choice.message) for choice in choices]
  token_ids = [token for choice in choices for token in (choice.model_extra or {}).get("token_ids") or []]
  return "".join(part[0] or "" for part in parts), "".join(part[1] or "" for part in parts), token_ids


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "thinking_budget_tokens"])
def test_a_budget_ends_the_reasoning(thinker, tokenizer, name):
  """The random model never ends it by itself."""
  closer = tokenizer.encode("</think>", add_special_tokens=False)
  for budget in (0, 1, 9):
    whole = think(thinker, budget, name=name)
    reasoning, content, token_ids = whole
    assert token_ids[budget : budget + len(closer)] == closer and len(token_ids) == 40
    assert bool(reasoning) == (budget > 0) and content and "</think>" not in content
    assert think(thinker, budget, name=name, stream=True) == whole
  reasoning, content, token_ids = think(thinker, -1, name=name)
  assert reasoning and not content


def test_max_tokens_bounds_reasoning_and_answer(thinker):
  reasoning, content, token_ids = think(thinker, 9, max_tokens=6)
  assert reasoning and not content and len(token_ids) == 6


def test_a_constraint_and_a_forced_call_follow_the_reasoning(thinker):
  reasoning, content, _ = think(thinker, 5, extra={"structured_outputs": {"choice": ["yes"]}})
  assert reasoning and content == "yes"
  for stream in (False, True):
    answer = thinker.chat.completions.create(
      model="tiny", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=400, seed=1, stream=stream,
      extra_body={"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5},
    )  # fmt: skip
    messages = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    assert "".join(said(message)[0] or "" for message in messages)
    assert not any(said(message)[1] for message in messages)
    assert sum(call.id is not None for message in messages for call in message.tool_calls or []) == 1


def test_a_constraint_holds_at_once_where_the_template_has_closed_the_reasoning(tmp_path):
  template = "{% if enable_thinking %}<think>{% else %}<think>\n\n</think>\n\n{% endif %}"
  with serving(tmp_path, template) as (_, client):
    for thinks in (True, False):
      answer = client.chat.completions.create(
        model="tiny", messages=CHAT, n=16, max_tokens=60, seed=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": thinks}, "thinking_token_budget": 3,
                    "structured_outputs": {"choice": ["yes"]}},
      )  # fmt: skip
      messages = [said(choice.message) for choice in answer.choices]
      assert {content for _, content in messages} == {"yes"}
      assert any(reasoning for reasoning, _ in messages) == thinks


def test_reasoning_in_the_content_has_the_budget_too(thinker):
  reasoning, content, _ = think(thinker, 5, extra={"separate_reasoning": False})
  assert not reasoning and "</think>" in content


def test_every_output_has_a_budget_of_its_own(thinker):
  answer = thinker.chat.completions.create(
    model="tiny", messages=CHAT, max_tokens=40, n=3, seed=1,
    extra_body={"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5, "ignore_eos": True},
  )  # fmt: skip
  assert len({choice.message.content for choice in answer.choices}) == 3
  assert all(all(said(choice.message)) for choice in answer.choices)


def test_channels_have_a_budget(tmp_path, monkeypatch):
  from server.http.model_output.channel_reader import CHANNEL_MARKERS
  from tests.server import harness
  from tests.server.http.openai import test_tools

  special = list(dict.fromkeys([*harness.SPECIAL, *CHANNEL_MARKERS]))
  monkeypatch.setattr(harness, "SPECIAL", special)
  monkeypatch.setattr(test_tools, "END", special.index("<|return|>"))
  with serving(tmp_path, "{% if false %}<|channel|>{% endif %}the cat") as (_, client):
    answer = client.chat.completions.create(
      model="tiny", messages=CHAT, max_tokens=100, n=16, seed=1,
      extra_body={"thinking_token_budget": 5, "structured_outputs": {"choice": ["yes"]}},
    )  # fmt: skip
    assert {said(choice.message)[1] for choice in answer.choices} == {"yes"}
    assert {bool(said(choice.message)[0]) for choice in answer.choices} == {True, False}


def test_a_budget_needs_known_reasoning(tmp_path):
  for name, template, parser in (("a", "the cat", "auto"), ("b", THINK_TEMPLATE, "none")):
    (tmp_path / name).mkdir()
    with serving(tmp_path / name, template, reasoning_parser=parser) as (_, client):
      with pytest.raises(
        openai.BadRequestError, match="thinking_budget=9 is not supported: the server finds no reason"
      ):
        think(client, 9, name="thinking_budget")
      think(client, -1)
