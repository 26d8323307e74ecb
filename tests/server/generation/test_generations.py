"""What a stream carries: the engine's tokens, their text, one ending for each index, and nothing twice."""

from concurrent.futures import ThreadPoolExecutor
import hashlib
import string
import threading
import time

import grpc
import pytest

from engine.config import EngineConfig
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from server.proto import sluice_pb2 as pb
from tests.fakes import oracle, oracle_prompt_logprobs
from tests.server.harness import END, endings_of, generate, running, text_of, tiny_config, token_ids_of

PROMPT = (7, 8, 9, 10)
IDS = pb.TokenIds(ids=PROMPT)


def expected(config: EngineConfig, prompt=PROMPT, **params) -> tuple[tuple[int, ...], FinishReason]:
  """Tokens of a greedy request served alone."""
  return oracle(config, Request("alone", prompt, SamplingParams(temperature=0.0, **params)))


def greedy(**fields) -> pb.SamplingParams:
  return pb.SamplingParams(temperature=0.0, **fields)


def test_a_stream_carries_the_tokens_and_their_text(served, tokenizer):
  messages = generate(
    served, token_ids=IDS, sampling=greedy(), request_id="mine", stopping=pb.StopParams(max_tokens=40, ignore_eos=True)
  )
  wanted, _ = expected(served.engine.config, max_tokens=40, ignore_eos=True)
  assert token_ids_of(messages) == list(wanted)
  assert tokenizer.decode(wanted).removesuffix("\ufffd") == text_of(messages).removesuffix("\ufffd")
  started = [message.started for message in messages if message.HasField("started")]
  assert started == [pb.Started(request_id="mine", model="tiny", num_prompt_tokens=4)]
  assert messages[0].HasField("started")
  (finished,) = endings_of(messages)
  assert finished.reason == pb.FINISH_REASON_LENGTH and finished.last and finished.WhichOneof("matched") is None
  assert finished.usage == pb.Usage(prompt_tokens=4, completion_tokens=40, total_tokens=44)
  assert 0 < finished.timing.time_to_first_token_s <= finished.timing.total_s
  assert messages[-1].finished == [finished]


def test_the_unary_twin_says_the_same(served):
  fields = {"text": "the cat", "sampling": greedy(n=2), "stopping": pb.StopParams(max_tokens=30, stop=["zz"])}
  messages = generate(served, **fields)
  response = served.generation.GenerateUnary(pb.GenerateRequest(**fields))
  assert response.model == "tiny" and response.num_prompt_tokens == messages[0].started.num_prompt_tokens
  for index, completion in enumerate(response.completions):
    assert completion.text == text_of(messages, index)
    assert list(completion.token_ids) == token_ids_of(messages, index)
    assert completion.finished.index == index
    (streamed,) = (finished for finished in endings_of(messages) if finished.index == index)
    assert completion.finished.reason == streamed.reason
    assert completion.finished.usage.completion_tokens == streamed.usage.completion_tokens
  assert [completion.finished.last for completion in response.completions] == [False, True]


def test_end_of_sequence_is_reported_and_not_part_of_the_output(served):
  prompt = next(
    (7, start)
    for start in range(5, 400)
    if expected(served.engine.config, (7, start), max_tokens=30)[1] is FinishReason.STOP
  )
  wanted, _ = expected(served.engine.config, prompt, max_tokens=30)
  messages = generate(
    served,
    token_ids=pb.TokenIds(ids=prompt),
    sampling=greedy(),
    output=pb.OutputParams(skip_special_tokens=False),
    stopping=pb.StopParams(max_tokens=30),
  )
  (finished,) = endings_of(messages)
  assert token_ids_of(messages) == list(wanted[:-1])
  assert "<|end|>" not in text_of(messages)
  assert finished.reason == pb.FINISH_REASON_STOP and finished.stop_token_id == END == wanted[-1]
  assert finished.usage.completion_tokens == len(wanted)


def test_a_stop_token_of_the_request(served):
  wanted, _ = expected(served.engine.config, max_tokens=20, ignore_eos=True)
  stop = wanted[9]
  messages = generate(
    served,
    token_ids=IDS,
    sampling=greedy(),
    stopping=pb.StopParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop]),
  )
  (finished,) = endings_of(messages)
  assert finished.stop_token_id == stop
  assert token_ids_of(messages) == list(wanted[: wanted.index(stop)])


@pytest.mark.catalogue("F5")
def test_stop_strings_end_text_and_work(served, tokenizer):
  wanted, _ = expected(served.engine.config, max_tokens=400, ignore_eos=True)
  whole = tokenizer.decode(wanted)
  stops = [whole[start : start + 3] for start in range(90) if "\ufffd" not in whole[start : start + 3]]
  assert len(stops) > 10
  for stop in stops:
    messages = generate(
      served,
      token_ids=IDS,
      sampling=greedy(),
      stopping=pb.StopParams(max_tokens=400, ignore_eos=True, stop=["never seen", stop]),
    )
    (finished,) = endings_of(messages)
    assert text_of(messages) == whole[: whole.index(stop)]
    assert finished.reason == pb.FINISH_REASON_STOP and finished.stop_string == stop
    ids = token_ids_of(messages)
    assert ids == list(wanted[: len(ids)]) and finished.usage.completion_tokens == len(ids)
    assert stop in tokenizer.decode(ids) and stop not in tokenizer.decode(ids[:-1])
  served.wait_until(lambda: served.engine.num_live == 0)
  assert served.engine.stats().finished[FinishReason.STOP] > 0, "the engine must not go on for nobody"


def test_stop_strings_wait_for_min_tokens(served, tokenizer):
  wanted, _ = expected(served.engine.config, max_tokens=20, min_tokens=10, ignore_eos=True)
  first = tokenizer.decode(wanted[:1])
  messages = generate(
    served,
    token_ids=IDS,
    sampling=greedy(),
    stopping=pb.StopParams(max_tokens=20, min_tokens=10, ignore_eos=True, stop=[first]),
  )
  (finished,) = endings_of(messages)
  assert finished.usage.completion_tokens >= 10
  assert text_of(messages).startswith(first)


@pytest.mark.catalogue("F5")
def test_a_stop_string_that_only_begins_is_given_out_at_the_end(served, tokenizer):
  wanted, _ = expected(served.engine.config, max_tokens=12, ignore_eos=True)
  whole = tokenizer.decode(wanted)
  messages = generate(
    served,
    token_ids=IDS,
    sampling=greedy(),
    stopping=pb.StopParams(max_tokens=12, ignore_eos=True, stop=[whole[-3:] + "never"]),
  )
  assert text_of(messages).removesuffix("\ufffd") == whole.removesuffix("\ufffd")
  assert endings_of(messages)[0].reason == pb.FINISH_REASON_LENGTH


@pytest.mark.catalogue("F5")
def test_a_stop_string_that_ends_after_min_tokens_counts(served, tokenizer):
  """Wherever it began; one that ends within them is text."""
  letters = [token for char in string.ascii_lowercase for token in tokenizer.encode(char, add_special_tokens=False)]
  sampling = pb.SamplingParams(seed=5, allowed_token_ids=pb.TokenIds(ids=letters))
  asked = {"token_ids": IDS, "sampling": sampling}
  text = text_of(generate(served, **asked, stopping=pb.StopParams(max_tokens=12)))
  at = next(at for at in range(2, 9) if text.count(text[at : at + 2]) == 1)
  stop, ends_at = text[at : at + 2], at + 2
  for min_tokens in range(ends_at + 2):
    counts = min_tokens < ends_at
    stopping = pb.StopParams(max_tokens=12, min_tokens=min_tokens, stop=[stop])
    messages = generate(served, **asked, stopping=stopping)
    unary = served.generation.GenerateUnary(pb.GenerateRequest(**asked, stopping=stopping), timeout=30).completions[0]
    assert text_of(messages) == unary.text == (text[:at] if counts else text), min_tokens
    for ending in (*endings_of(messages), unary.finished):
      assert ending.stop_string == (stop if counts else "")
      assert ending.usage.completion_tokens == (ends_at if counts else 12)


def test_n_outputs_share_the_prompt_and_end_one_by_one(served):
  prompt = tuple(range(10, 74))
  messages = generate(
    served,
    token_ids=pb.TokenIds(ids=prompt),
    sampling=pb.SamplingParams(n=5, seed=3),
    stopping=pb.StopParams(max_tokens=25),
  )
  endings = endings_of(messages)
  assert sorted(finished.index for finished in endings) == list(range(5))
  assert [finished.last for finished in endings] == [False] * 4 + [True]
  assert len({tuple(token_ids_of(messages, index)) for index in range(5)}) == 5
  assert [sum(finished.usage.cached_tokens > 0 for finished in endings)] == [4], "followers must share the prompt"
  for index in range(5):
    alone = generate(
      served,
      token_ids=pb.TokenIds(ids=prompt),
      sampling=pb.SamplingParams(seed=3 + index),
      stopping=pb.StopParams(max_tokens=25),
    )
    assert token_ids_of(alone) == token_ids_of(messages, index)
    indexes = [finished.index for message in messages for finished in message.finished if finished.index == index]
    assert indexes == [index]
    ended = next(
      at for at, message in enumerate(messages) if index in [finished.index for finished in message.finished]
    )
    assert not any(delta.index == index for message in messages[ended + 1 :] for delta in message.deltas)


def test_seeds_repeat_and_their_absence_does_not(served):
  def once(**fields):
    return token_ids_of(
      generate(
        served,
        token_ids=IDS,
        sampling=pb.SamplingParams(**fields),
        stopping=pb.StopParams(max_tokens=20, ignore_eos=True),
      )
    )

  assert once(seed=-(2**63)) == once(seed=-(2**63))
  assert once(seed=2**63 - 1, n=1) != once(seed=5)
  assert once() != once()
  assert once(seed=-1) != once(seed=-1), "none"
  assert once(seed=-2) == once(seed=-2)
  assert once(seed=-2, n=1) != once(seed=-3)
  assert (
    len(
      generate(
        served, token_ids=IDS, sampling=pb.SamplingParams(seed=2**63 - 1, n=3), stopping=pb.StopParams(max_tokens=3)
      )
    )
    > 0
  )


def test_logprobs_and_prompt_logprobs(served):
  messages = generate(
    served,
    token_ids=IDS,
    sampling=greedy(n=2),
    output=pb.OutputParams(logprobs=0, prompt_logprobs=0),
    stopping=pb.StopParams(max_tokens=9, ignore_eos=True),
  )
  request = Request("alone", PROMPT, SamplingParams(prompt_logprobs=0))
  for index in range(2):
    deltas = [delta for message in messages for delta in message.deltas if delta.index == index]
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == token_ids_of(messages, index)
    prompt = [entry for delta in deltas for entry in delta.prompt_logprobs]
    wanted = oracle_prompt_logprobs(tiny_config(), request) if index == 0 else ()
    assert [entry.token_id for entry in prompt] == [entry.token_id for entry in wanted]
    assert [entry.logprob for entry in prompt] == pytest.approx([entry.logprob for entry in wanted])


def test_padding_that_is_skipped_is_not_told_as_computed(tokenizer):
  """Of a device that leaves padding out GetLoad says so, in all, by bucket and by step."""
  with running(tokenizer, config=tiny_config(computes_padding=False)) as served:
    request = pb.GenerateRequest(token_ids=IDS, sampling=greedy(), stopping=pb.StopParams(max_tokens=5))
    assert list(served.generation.Generate(request, timeout=30))
    load = served.model.GetLoad(pb.GetLoadRequest(steps_after_s=0))
  assert load.padding_tokens_total == sum(rung.padding_tokens_total for rung in load.rungs) == 0
  assert load.skipped_tokens_total == sum(rung.skipped_tokens_total for rung in load.rungs) > 0
  assert not any(step.padding for step in load.steps)
  for rung in load.rungs:
    useful = rung.decode_tokens_total + rung.prefill_tokens_total
    assert useful + rung.skipped_tokens_total == rung.tokens * rung.steps_total


def test_what_is_not_wanted_is_not_sent(served):
  messages = generate(
    served,
    token_ids=IDS,
    output=pb.OutputParams(return_token_ids=False, return_text=False),
    stopping=pb.StopParams(max_tokens=9, stop=["zzz"]),
  )
  assert not any(message.deltas for message in messages) and len(endings_of(messages)) == 1
  messages = generate(
    served,
    token_ids=IDS,
    stopping=pb.StopParams(max_tokens=9, ignore_eos=True),
    output=pb.OutputParams(return_token_ids=False, return_text=False, logprobs=0),
  )
  assert sum(len(delta.logprobs) for message in messages for delta in message.deltas) == 9


@pytest.mark.catalogue("B5")
def test_a_slow_reader_gets_fewer_and_larger_messages_and_all_tokens(served):
  wanted, _ = expected(served.engine.config, max_tokens=400, ignore_eos=True)
  call = served.generation.Generate(
    pb.GenerateRequest(token_ids=IDS, sampling=greedy(), stopping=pb.StopParams(max_tokens=400, ignore_eos=True))
  )
  served.wait_until(lambda: served.engine.num_live == 0 and served.engine.recorder.num_output_tokens == 400)
  assert token_ids_of(list(call)) == list(wanted)


@pytest.mark.catalogue("B11")
def test_64_concurrent_streams_are_each_as_if_alone(served):
  def one(number):
    prompt = (7, 5 + number)
    messages = generate(
      served,
      token_ids=pb.TokenIds(ids=prompt),
      sampling=greedy(),
      stopping=pb.StopParams(max_tokens=40, ignore_eos=True),
    )
    assert sum(finished.last for finished in endings_of(messages)) == 1
    return token_ids_of(messages) == list(expected(served.engine.config, prompt, max_tokens=40, ignore_eos=True)[0])

  with ThreadPoolExecutor(64) as pool:
    assert all(pool.map(one, range(64)))


@pytest.mark.catalogue("B9")
def test_request_ids_are_unique_while_live_and_free_afterwards(served):
  served.runner.go.clear()
  request = pb.GenerateRequest(token_ids=IDS, request_id="same", stopping=pb.StopParams(max_tokens=5))
  call = served.generation.Generate(request)
  served.wait_until(lambda: len(served.generations) == 1)
  with pytest.raises(grpc.RpcError, match="request_id=same is in use by a live request") as caught:
    served.generation.GenerateUnary(request)
  assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
  served.runner.go.set()
  assert len(endings_of(list(call))) == 1
  for _ in range(20):  # at once again, also where a stop string ended it and the engine learns of it later
    generate(
      served,
      token_ids=IDS,
      request_id="same",
      sampling=greedy(),
      stopping=pb.StopParams(max_tokens=300, ignore_eos=True, stop=list("aeinot ,<0")),
    )


def test_tokenize_detokenize_and_model_info(served, tokenizer):
  ids = served.generation.Tokenize(pb.TokenizeRequest(text="the cat 😀")).token_ids
  assert list(ids) == tokenizer.encode("the cat 😀")
  bare = served.generation.Tokenize(pb.TokenizeRequest(text="the cat 😀", add_special_tokens=False)).token_ids
  assert [1, *bare] == list(ids)
  chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="the cat")], add_generation_prompt=False)
  chat_ids = served.generation.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids
  whole = served.generation.Detokenize(pb.DetokenizeRequest(token_ids=chat_ids, skip_special_tokens=False)).text
  assert whole == "<|bos|><|user|>the cat<|end|>"
  assert served.generation.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "the cat 😀"
  long_text = "the cat sat on " * 1000
  assert len(served.generation.Tokenize(pb.TokenizeRequest(text=long_text)).token_ids) > 1000
  info = served.model.GetModelInfo(pb.GetModelInfoRequest())
  assert (info.model, info.vocab_size, info.max_model_len, list(info.eos_token_ids)) == ("tiny", 400, 512, [END])
  assert info.has_tokenizer and info.has_chat_template and list(info.token_budgets) == [8, 64, 128]


def test_load_counts(served):
  served.runner.go.clear()
  calls = [
    served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=5, ignore_eos=True)))
    for _ in range(3)
  ]

  def live(load):
    return load.running_requests + load.queued_requests

  served.wait_until(lambda: live(served.model.GetLoad(pb.GetLoadRequest())) == 3)
  load = served.model.GetLoad(pb.GetLoadRequest())
  assert load.running_requests >= 1 and load.kv_blocks_in_use == load.running_requests
  assert load.kv_blocks_total == 256 and load.load_s == 0.5 and load.warmup_s == 0.25
  served.runner.go.set()
  for call in calls:
    list(call)
  served.wait_until(lambda: served.model.GetLoad(pb.GetLoadRequest()).requests_finished_total == 3)
  load = served.model.GetLoad(pb.GetLoadRequest())
  assert load.output_tokens_total == 15 and load.requests_finished_total == 3 and live(load) == 0
  assert [(rung.tokens, rung.rows) for rung in load.rungs] == [(8, 8), (64, 64), (128, 64)]
  assert sum(rung.steps_total for rung in load.rungs) == load.steps_total > 0
  assert sum(rung.padding_tokens_total for rung in load.rungs) == load.padding_tokens_total
  assert sum(rung.skipped_tokens_total for rung in load.rungs) == load.skipped_tokens_total == 0
  assert not load.steps, "steps come only when asked for"
  steps = served.model.GetLoad(pb.GetLoadRequest(steps_after_s=0)).steps
  assert [step.step for step in steps] == list(range(load.steps_total)) and steps[-1].time <= load.now_s
  assert sum(step.decode_tokens + step.prefill_tokens for step in steps) == (
    load.decode_tokens_total + load.prefill_tokens_total
  )
  assert served.model.GetLoad(pb.GetLoadRequest(steps_after_s=steps[-2].time)).steps == steps[-1:]
  assert load.peak_rss_bytes > 1 << 20 and load.uptime_s > 0 and load.compiles_after_ready == 0


def test_load_tells_of_requests_that_ended(served):
  def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]

  def ended(after_s: float) -> list[pb.RequestLoad]:
    return list(served.model.GetLoad(pb.GetLoadRequest(steps_after_s=after_s)).requests)

  for name, count in (("one", 3), ("two", 4)):
    generate(served, request_id=name, token_ids=IDS, stopping=pb.StopParams(max_tokens=count, ignore_eos=True))
  served.wait_until(lambda: len(ended(0)) == 2)  # kept just after its last token is sent
  one, two = ended(0)
  assert [(record.id, record.reason, record.output_tokens) for record in (one, two)] == [
    (digest("one"), "length", 3),
    (digest("two"), "length", 4),
  ]
  assert one.prompt_tokens == 4 and one.arrival <= one.first_scheduled <= one.first_token <= one.end
  assert ended(one.end) == [two]
  assert not served.model.GetLoad(pb.GetLoadRequest()).requests, "they come only when asked for"
  # One that ended before its first step: those times are unset.
  served.runner.go.clear()
  num_steps = served.runner.num_steps
  first = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=2)))
  # The engine has planned two steps, and waits for the first one.
  served.wait_until(lambda: served.runner.num_steps == num_steps + 2)
  request = pb.GenerateRequest(request_id="late", token_ids=IDS)
  request.queue_timeout.FromMilliseconds(1)
  late = served.generation.Generate(request)
  served.wait_until(lambda: served.engine.num_live == 2)
  time.sleep(0.01)
  served.runner.go.set()
  list(first)
  with pytest.raises(grpc.RpcError):
    list(late)
  served.wait_until(lambda: len(ended(two.end)) == 2)
  record = next(record for record in ended(two.end) if record.id == digest("late"))
  assert record.reason == "timeout" and record.end > record.arrival
  assert not record.HasField("first_scheduled") and not record.HasField("first_token")


def test_nan_ends_one_stream_alone(tokenizer):
  with running(tokenizer, poison=99) as served:
    served.runner.go.clear()
    healthy = served.generation.Generate(
      pb.GenerateRequest(token_ids=IDS, sampling=greedy(), stopping=pb.StopParams(max_tokens=8, ignore_eos=True))
    )
    sick = served.generation.Generate(
      pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7, 99]), sampling=greedy(n=2), request_id="sick")
    )
    served.wait_until(lambda: len(served.generations) == 2)
    served.runner.go.set()
    with pytest.raises(grpc.RpcError, match="NaN or infinite logits") as caught:
      list(sick)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert token_ids_of(list(healthy)) == list(expected(served.engine.config, max_tokens=8, ignore_eos=True)[0])


def test_one_wake_of_the_loop_a_step(served, monkeypatch):
  """A step's tokens of all streams cross the threads in one piece."""
  batches = []
  dispatch = served.generations.dispatch_events
  monkeypatch.setattr(
    served.generations, "dispatch_events", lambda events: (batches.append(len(events)), dispatch(events))
  )
  served.runner.go.clear()
  calls = [
    served.generation.Generate(
      pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=10, ignore_eos=True))
    )
    for _ in range(8)
  ]
  served.wait_until(lambda: served.engine.num_live == 8)
  readers = [threading.Thread(target=list, args=(call,)) for call in calls]
  for reader in readers:
    reader.start()
  served.runner.go.set()
  for reader in readers:
    reader.join(60)
  assert sum(batches) == 80 and len(batches) <= served.engine.recorder.num_steps
