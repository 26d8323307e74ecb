"""LLM on the demo model: what goes in, what comes out, and what is left when it ends in any way."""

import asyncio
from collections.abc import Iterator
import concurrent.futures
import json
import signal
import threading
import time
from typing import Any

import jax
import pytest

from engine.errors import ConfigError, EngineError, InvalidRequest, RequestTooLong, Unavailable
from extensions.python_api import progress_bar
from extensions.python_api.llm import LLM
from extensions.python_api.outputs import RequestOutput
from server.errors import EngineFailed
from sluice import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_steps")

SETTINGS: dict[str, Any] = {"token_budgets": [8, 32], "max_num_seqs": 8, "num_blocks": 128, "compile_cache_dir": ""}
ONE_RUNG: dict[str, Any] = {**SETTINGS, "token_budgets": [8]}
PROMPTS = ["2 + 3 =", "Once upon a time", "The cat", "12 + 30 =", "A", "One day, a girl named"]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
  with LLM("demo", **SETTINGS) as made:
    yield made


def wait_idle(llm: LLM) -> None:
  while llm.engine.num_live:
    time.sleep(0.001)


def texts(outputs: list[RequestOutput]) -> list[str]:
  return [output.text for output in outputs]


def test_outputs_come_in_the_order_of_prompts(llm: LLM):
  together = llm.generate(PROMPTS, GREEDY)
  assert texts(together) == [llm.generate(prompt, GREEDY)[0].text for prompt in PROMPTS]
  assert [output.prompt for output in together] == PROMPTS
  assert all(len(output.token_ids) == 8 and output.ending.reason == "length" for output in together)
  assert all(llm.detokenize(output.token_ids) == output.text for output in together)


def test_token_ids_are_a_prompt_like_the_text(llm: LLM):
  ids = [llm.tokenize(prompt) for prompt in PROMPTS[:3]]
  expected = texts(llm.generate(PROMPTS[:3], GREEDY))
  assert texts(llm.generate(ids, GREEDY)) == expected
  assert texts(llm.generate(ids[1], GREEDY)) == expected[1:2]
  assert llm.generate(ids, GREEDY)[0].prompt_token_ids == tuple(ids[0])
  numbers: Any = jax.numpy.asarray(ids[1])
  assert texts(llm.generate(numbers, GREEDY)) == expected[1:2]
  assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM):
  params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (1, 5, 3)]
  assert [len(each.token_ids) for each in llm.generate(PROMPTS[:3], params)] == [1, 5, 3]
  with pytest.raises(InvalidRequest, match="sampling_params has 3 entries for 2 prompts"):
    llm.generate(PROMPTS[:2], params)


def test_stop_strings_log_probabilities_and_several_outputs(llm: LLM):
  (whole,) = llm.generate("Once upon a time", GREEDY)
  stop = whole.text[5:9]
  (cut,) = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0, stop=stop))
  assert cut.text == whole.text[: whole.text.index(stop)] and cut.ending.matched == stop
  (several,) = llm.generate("The cat", SamplingParams(max_tokens=6, seed=3, n=3, logprobs=2, prompt_logprobs=0))
  assert len(several.outputs) == 3 and len({output.token_ids for output in several.outputs}) > 1
  assert all(len(output.logprobs) == len(output.token_ids) for output in several.outputs)
  assert len(several.prompt_logprobs) == len(several.prompt_token_ids) - 1
  again = llm.generate("The cat", SamplingParams(max_tokens=6, seed=3, n=3))
  assert [each.token_ids for each in again[0].outputs] == [each.token_ids for each in several.outputs]


def test_constraints_hold(llm: LLM):
  schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
  schema["additionalProperties"] = False
  params = [
    SamplingParams(choice=["yes", "no"]),
    SamplingParams(regex="[0-9]{3}"),
    SamplingParams(json_schema=schema),
    SamplingParams(json_schema=json.dumps(schema)),
    SamplingParams(grammar='start: "a" "b"'),
  ]
  choice, number, parsed, likewise, grammar = texts(llm.generate(["Answer:"] * len(params), params))
  assert choice in ("yes", "no") and len(number) == 3 and number.isdigit() and grammar == "ab"
  assert isinstance(json.loads(parsed)["ok"], bool) and isinstance(json.loads(likewise)["ok"], bool)
  with pytest.raises(InvalidRequest, match="choice is given together with regex"):
    SamplingParams(regex="a", choice=["b"])


def test_a_setting_opens_objects_of_schemas(llm: LLM):
  schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
  schema["x-guidance"] = {"whitespace_flexible": False}
  params = SamplingParams(json_schema=schema, max_tokens=40, temperature=1.5, n=8, seed=1)
  (closed,) = llm.generate(["The"], params)
  assert {output.text for output in closed.outputs} == {'{"a":1}'}
  with LLM("demo", json_schema_additional_properties=True, host_kv_mb=8, **ONE_RUNG) as opened:
    assert opened.config.num_host_blocks == 2**23 // opened.config.block_bytes > 0
    (output,) = opened.generate(["The"], params)
  assert any(each.text.startswith('{"a":1,"') for each in output.outputs)
  with pytest.raises(ConfigError, match="json_schema_additional_properties='yes' is not allowed: it must be True or"):
    LLM("demo", json_schema_additional_properties="yes")


def test_a_chat_goes_through_the_template(llm: LLM):
  chat = [{"role": "user", "content": "37 + 5 = ?"}]
  (answer,) = llm.chat(chat, SamplingParams(max_tokens=12, temperature=0))
  assert answer.text.strip() == "42"
  assert texts(llm.chat([chat, chat], SamplingParams(max_tokens=12, temperature=0))) == [answer.text] * 2
  with pytest.raises(InvalidRequest, match=r"messages\[0\]=.*: send a mapping with the texts"):
    llm.chat([{"role": "user"}])
  with pytest.raises(InvalidRequest, match=r"messages\[1\]\[0\]="):
    llm.chat([chat, [{"role": "user", "content": "x", "tool_calls": "y"}]])


def test_a_stream_is_the_output_in_pieces(llm: LLM):
  (whole,) = llm.generate("Once upon a time", GREEDY)
  pieces = list(llm.stream("Once upon a time", GREEDY))
  assert "".join(piece.text for piece in pieces) == whole.text and len(pieces) > 1
  assert [piece.ending is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
  chat = [{"role": "user", "content": "37 + 5 = ?"}]
  answer = "".join(piece.text for piece in llm.stream(chat, SamplingParams(max_tokens=12, temperature=0)))
  assert answer == llm.chat(chat, SamplingParams(max_tokens=12, temperature=0))[0].text


def test_a_stream_that_is_left_ends_its_request(llm: LLM):
  for _ in llm.stream("The cat", LONG):
    break
  wait_idle(llm)
  assert llm.engine.stats().blocks_used == 0


def test_a_score_is_what_generation_reports(llm: LLM):
  (made,) = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0))
  prompt = llm.tokenize("Once upon a time")
  (score,) = llm.score([prompt], [made.token_ids])
  assert score.token_ids == made.token_ids and score.is_greedy
  assert score.logprobs == pytest.approx([entry.logprob for entry in made.logprobs], abs=1e-4)
  (own,) = llm.score([[*prompt, *made.token_ids]])
  assert own.logprobs[len(prompt) - 1 :] == pytest.approx(score.logprobs, abs=1e-4)
  (unlikely,) = llm.score("Once upon a time", " 7")
  assert unlikely.token_ids == tuple(llm.tokenize("Once upon a time 7")[len(prompt) :])
  assert not unlikely.is_greedy and unlikely.total < score.total


def test_what_cannot_be_scored_is_told(llm: LLM):
  with pytest.raises(InvalidRequest, match="continuations has 1 entries for 2 prompts"):
    llm.score(["a", "b"], ["c"])
  with pytest.raises(InvalidRequest, match=r"continuations\[0\]='' adds no token"):
    llm.score("a", "")
  with pytest.raises(InvalidRequest, match=r"continuations\[0\] is a text where its prompt is token ids"):
    llm.score([[1, 2]], ["a"])


@pytest.mark.parametrize(
  ("params", "message"),
  [
    ({"top_k": 1.5}, "top_k=1.5 is not allowed: 'float' object"),
    ({"temperature": -1}, "temperature=-1.0 is not allowed"),
    ({"n": 17}, "n=17 is not allowed: send a whole number from 1 to 16"),
    ({"regex": "("}, "constraint.regex is not one that can be followed"),
    ({"max_tokens": 1 << 20}, "maximum context length"),
  ],
)
def test_a_bad_field_is_told_before_anything_runs(llm: LLM, params, message):
  before = llm.engine.stats().num_steps
  with pytest.raises(InvalidRequest, match=message) as caught:
    llm.generate(["fine", "bad"], [GREEDY, SamplingParams(**params)])
  assert caught.value.__notes__ == ["This is about prompts[1]."]
  wait_idle(llm)
  assert llm.engine.stats().num_steps == before


@pytest.mark.parametrize("prompt", [3, [1.5], ["a", 3], [[1, "b"]]])
def test_what_is_no_prompt_is_told(llm: LLM, prompt):
  with pytest.raises(InvalidRequest, match=r"prompts(\[\d\])?=.* is not allowed: send a text"):
    llm.generate(prompt)


def test_a_token_outside_the_vocabulary_is_told(llm: LLM):
  with pytest.raises(InvalidRequest, match="token id 5000000 is not in the vocabulary"):
    llm.generate([5_000_000])
  with pytest.raises(RequestTooLong, match="maximum context length"):
    llm.generate([5] * 5000)


def test_the_models_own_defaults_count(llm: LLM):
  llm_defaults = {name: llm.defaults[name] for name in ("temperature", "top_p") if name in llm.defaults}
  assert llm_defaults, "the demo model has some"
  seeded = SamplingParams(max_tokens=8, seed=5)
  spelled = SamplingParams(max_tokens=8, seed=5, **llm_defaults)
  assert texts(llm.generate(PROMPTS, seeded)) == texts(llm.generate(PROMPTS, spelled))
  assert texts(llm.generate(PROMPTS, seeded)) != texts(
    llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0))
  )


def test_ctrl_c_ends_every_request_and_leaves_the_engine_usable(llm: LLM):
  expected = texts(llm.generate(PROMPTS, GREEDY))

  def interrupt() -> None:
    while not llm.engine.stats().num_running:
      time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  with pytest.raises(KeyboardInterrupt):
    llm.generate(PROMPTS * 20, LONG)
  thread.join()
  wait_idle(llm)
  assert llm.engine.stats().blocks_used == 0 and not len(llm._thread._generations)
  assert texts(llm.generate(PROMPTS, GREEDY)) == expected


def test_calls_work_under_a_running_event_loop_and_from_threads(llm: LLM):
  expected = texts(llm.generate(PROMPTS, GREEDY))

  async def notebook_cell() -> list[list[str]]:
    here = texts(llm.generate(PROMPTS, GREEDY))
    away = await asyncio.gather(*(asyncio.to_thread(llm.generate, PROMPTS, GREEDY) for _ in range(3)))
    return [here, *map(texts, away)]

  assert asyncio.run(notebook_cell()) == [expected] * 4


def test_a_bar_is_shown_where_somebody_asks(llm: LLM, capsys, monkeypatch):
  llm.generate(PROMPTS, GREEDY)
  llm.generate(PROMPTS, GREEDY, progress=True)  # shorter than a second
  assert capsys.readouterr().err == ""
  monkeypatch.setattr(progress_bar, "_DELAY_S", 0)
  llm.generate(PROMPTS, GREEDY, progress=True)
  assert f"{len(PROMPTS)}/{len(PROMPTS)}" in capsys.readouterr().err
  llm.generate(PROMPTS, GREEDY, progress=False)
  assert capsys.readouterr().err == ""


def test_closing_frees_everything_and_another_one_can_follow():
  arrays, threads = len(jax.live_arrays()), set(threading.enumerate())
  found = []
  for _ in range(2):
    llm = LLM("demo", **ONE_RUNG)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      running = pool.submit(llm.generate, PROMPTS, LONG)
      while not llm.engine.stats().num_running:
        time.sleep(0.001)
      found += texts(llm.generate("The cat", GREEDY))
      llm.close()
      with pytest.raises(Unavailable, match="closed before the request was finished"):
        running.result()
    llm.close()
    for call in (llm.generate, llm.score, llm.stream):
      with pytest.raises(Unavailable, match="this LLM is closed; make another one"):
        call("a")
    assert len(jax.live_arrays()) <= arrays
    assert not {thread for thread in threading.enumerate() if thread.name == "sluice-engine"} - threads
  assert len(set(found)) == 1


def test_an_engine_that_fails_is_told_with_its_cause():
  with LLM("demo", **ONE_RUNG) as llm:

    def launch(batch: object) -> Any:
      raise OSError("the device is gone")

    llm.engine._runner.launch = launch
    with pytest.raises(EngineFailed) as caught:
      llm.generate(PROMPTS, GREEDY)
    assert "the device is gone" in str(caught.value.__cause__)
    with pytest.raises(EngineError, match="the engine has failed: OSError.'the device is gone'.; make another LLM"):
      llm.generate("a", GREEDY)


def test_a_forgotten_llm_ends_its_thread():
  llm = LLM("demo", **ONE_RUNG)
  thread = llm._thread._thread
  del llm
  thread.join(60)
  assert not thread.is_alive()


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"max_seqs": 3}, "max_seqs=3 is not a setting of LLM; the nearest is max_num_seqs"),
    ({"max_num_seqs": "3"}, "max_num_seqs='3' is not allowed: it must be a whole number"),
    ({"token_budgets": 8}, "token_budgets=8 is not allowed: it must be a list of whole numbers"),
    ({"dtype": "float8"}, "dtype='float8' must be one of"),
    ({"generation_config": "mine"}, "generation_config='mine' must be one of auto, none"),
    ({"gpu_memory_utilization": 0.9}, "is a setting of vLLM that Sluice does not have; set --kv_cache_mb"),
    ({"host_kv_mb": 8, "prefix_cache_scope": "off"}, "host_kv_mb=8 does not go with prefix_cache_scope=off"),
    ({"tensor_parallel_size": 99}, "num_devices=99, but this machine has"),
  ],
)
def test_a_setting_that_cannot_be_is_told(settings, message):
  with pytest.raises(ConfigError, match=message):
    LLM("demo", **settings)


def test_a_folder_that_is_no_model_is_told(tmp_path):
  with pytest.raises(ConfigError, match=str(tmp_path)):
    LLM(str(tmp_path))
