"""The demo model with tools, and the page's samples: what a user tries first works, through the API and in a browser.

The page is opened in a real Chromium, where there is one.
"""

from collections.abc import Iterator
import json
import pathlib

import openai
import pytest

from engine.device.build import build_engine
from engine.device.options import BuildOptions
from server.lifecycle.host import HostOptions
from server.text.chat_template import Message
from server.text.tokenizer import Tokenizer
from tests.server.harness import Served, running
from tests.server.page.browser import open_page, wait_for_text
from tools.clients import use_anthropic
from tools.demo_model import skills
from tools.demo_model.tokenizer import CHAT_TEMPLATE

pytestmark = pytest.mark.usefixtures("quick_steps")

DEMO = pathlib.Path(__file__).resolve().parents[2] / "models" / "demo"
WEATHER = {
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris", "Rome"]}},
      "required": ["city"],
      "additionalProperties": False,
    },
    "strict": True,
  },
}
SAVE = {
  "type": "function",
  "function": {
    "name": "save_person",
    "parameters": {
      "type": "object",
      "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
      "required": ["name", "age", "city"],
      "additionalProperties": False,
    },
  },
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
  options = BuildOptions(
    str(DEMO), token_budgets=(16, 128), max_num_seqs=16, prefill_chunk=128, num_blocks=512, max_model_len=2048
  )
  built = build_engine(options, lambda *_: None, lambda _: None)
  built.runner.seal()
  host = HostOptions(http_port=0)
  with running(Tokenizer(DEMO), config=built.config, device=built.runner, host=host, model="sluice-demo") as served:
    yield served
  assert built.runner.compiles_after_ready == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
  with openai.OpenAI(base_url=f"http://127.0.0.1:{served.host.http_port}/v1", api_key="-", max_retries=0) as client:
    yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
  return Tokenizer(DEMO)


def test_without_tools_a_chat_is_rendered_as_it_was_trained(tokenizer: Tokenizer):
  assert tokenizer.chat_template == CHAT_TEMPLATE, "models/demo and what makes it disagree"
  turns = [("system", "Remember: Mira amber."), ("user", "Hi <b>"), ("assistant", ""), ("user", "What\ngoes?")]
  wanted = "<|bos|>" + "".join(f"<|{role}|>{content}<|end|>" for role, content in turns) + "<|assistant|>"
  special = tokenizer.encode_chat([Message(*turn) for turn in turns])
  assert tokenizer.decode(special, skip_special_tokens=False) == wanted


def test_an_agent_that_may_call_gets_an_answer(client: openai.OpenAI):
  right = 0
  instances = [one for skill in ("copy", "reverse", "arithmetic", "json") for one in skills.make_instances(skill, 4, 5)]
  for instance in instances:
    [choice] = client.chat.completions.create(
      model="sluice-demo", messages=instance.messages, tools=[WEATHER, SAVE], temperature=0, max_tokens=80
    ).choices
    assert choice.finish_reason in ("stop", "length", "tool_calls")
    right += skills.is_correct(instance, choice.message.content or "")
  assert right >= len(instances) * 3 // 4, f"{right} of {len(instances)} right beside the description of tools"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_made_answered_and_followed_by_words(client: openai.OpenAI, choice):
  messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
  asked = {"model": "sluice-demo", "tools": [WEATHER], "temperature": 0}
  [first] = client.chat.completions.create(messages=messages, tool_choice=choice, **asked).choices
  assert first.finish_reason == "tool_calls" and first.message.content is None
  calls = first.message.tool_calls
  messages.append({"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in calls]})
  for call in calls:
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris", "Rome")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
  [second] = client.chat.completions.create(messages=messages, max_tokens=40, **asked).choices
  assert second.finish_reason in ("stop", "length")


def test_anthropics_client_talks_and_has_a_tool_called(served: Served, capsys: pytest.CaptureFixture[str]):
  use_anthropic.main(f"http://127.0.0.1:{served.host.http_port}", "sluice-demo")
  assert capsys.readouterr().out.startswith("'42', get_weather(")


def test_calls_and_results_are_rendered_in_turns_that_the_vocabulary_has(tokenizer: Tokenizer):
  call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
  messages = [
    Message("user", "Weather?"),
    Message("assistant", "", {"tool_calls": [call]}),
    Message("tool", "sunny", {"tool_call_id": "1"}),
  ]
  text = tokenizer.decode(tokenizer.encode_chat(messages, tools=[WEATHER]), skip_special_tokens=False)
  assert text == (
    f"<|bos|><|system|>Tools: <tools>{json.dumps(WEATHER)}</tools> "
    'A call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|end|><|user|>Weather?<|end|>'
    '<|assistant|><tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call><|end|>'
    "<|user|><tool_response>sunny</tool_response><|end|><|assistant|>"
  )


SAMPLES = {
  "Copy": "^red cat sun apple$",
  "Reverse": "^sun cat red$",
  "Arithmetic": "^42$",
  "JSON": r'^\{"name": "Mira", "age": 7, "city": "Oslo"\}$',
  "Recall": r"^I remember Tom jazz\.$",
  "Story": r"\bMira\b.*\bkite\b",
  "Structured output": r'^\{\s*"name":\s*"Tom",\s*"age":\s*12,\s*"city":\s*"Paris"\s*\}$',
  "Tool call": r'^get_weather\(\{"city": ?"(Oslo|Paris|Rome)"\}\)$',
}


def test_the_pages_samples_do_what_they_say(chromium, served: Served):
  with open_page(chromium, served) as page:
    wait_for_text(page, "#state", "^ready$")
    wait_for_text(page, "#samples", "Tool call")
    assert page.locator("#samples button").all_text_contents() == list(SAMPLES)
    for name, answer in SAMPLES.items():
      page.locator("#samples button", has_text=name).first.click()
      wait_for_text(page, "#played", "ended: (stop|tool_calls)$")
      # The last: a recall has turns before it.
      wait_for_text(page, ".talk .answer:last-of-type", answer)
      assert page.input_value("#prompt") == ""
