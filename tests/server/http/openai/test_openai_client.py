"""The real openai client gets what gRPC gives, token by token, and its own exception types."""

import asyncio
import contextlib
import json
import select
import socket

import httpx
import openai
import pytest

from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
  END,
  Served,
  endings_of,
  generate,
  running,
  text_of,
  tiny_config,
  token_ids_of,
  write_tokenizer,
)
from tests.server.http.conftest import url_of

IDS = [7, 8, 9]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat sat"}]


def grpc_answer(server: Served, index: int = 0, *, sampling=None, stopping=None, output=None, **prompt):
  """(text, token ids, ending) of the same generation over gRPC."""
  messages = generate(
    server,
    sampling=pb.SamplingParams(seed=5, **(sampling or {})),
    stopping=pb.StopParams(max_tokens=20, **(stopping or {})),
    output=pb.OutputParams(**(output or {})),
    **prompt,
  )
  ending = next(finished for finished in endings_of(messages) if finished.index == index)
  return text_of(messages, index), token_ids_of(messages, index), ending


def grpc_chat() -> pb.ChatPrompt:
  return pb.ChatPrompt(messages=[pb.ChatMessage(**message) for message in CHAT])


def test_models(client, server):
  [model] = client.models.list().data
  assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "sluice", 512)
  assert client.models.retrieve("tiny").id == "tiny"
  with pytest.raises(openai.NotFoundError, match="model='gpt' is not served here") as caught:
    client.models.retrieve("gpt")
  assert caught.value.code == "model_not_found"


def test_completion_of_text(client, server):
  text, token_ids, ending = grpc_answer(server, text="the cat")
  answer = client.completions.create(
    model="tiny", prompt="the cat", seed=5, max_tokens=20, extra_body={"return_token_ids": True}
  )
  [choice] = answer.choices
  assert (choice.text, choice.token_ids) == (text, token_ids)
  assert choice.prompt_token_ids[0] == 1, "the tokenizer's BOS is there"
  assert choice.finish_reason == {1: "stop", 2: "length"}[ending.reason]
  assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "tiny"
  assert answer.usage.prompt_tokens == ending.usage.prompt_tokens
  assert answer.usage.completion_tokens == ending.usage.completion_tokens
  assert answer.usage.total_tokens == ending.usage.total_tokens


def test_several_prompts_of_each_kind_in_order(client, server):
  for prompts, kind in ((["the cat", "a dog ran"], "text"), ([IDS, [20, 21], [30]], "ids")):
    answer = client.completions.create(model="tiny", prompt=prompts, seed=5, max_tokens=20, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))
    num_tokens = 0
    for place, prompt in enumerate(prompts):
      sent = {"text": prompt} if kind == "text" else {"token_ids": pb.TokenIds(ids=prompt)}
      for index in range(2):
        text, _, ending = grpc_answer(server, index, sampling={"n": 2}, **sent)
        assert answer.choices[2 * place + index].text == text
        num_tokens += ending.usage.completion_tokens
    assert answer.usage.completion_tokens == num_tokens


def test_streams_of_several_prompts_are_the_whole_answer(client):
  asked = {"model": "tiny", "prompt": ["the cat", "dog", "a"], "seed": 5, "max_tokens": 20, "n": 2, "echo": True}
  asked["logprobs"] = 0
  whole = client.completions.create(**asked)
  texts, reasons, tokens, used = [""] * 6, [None] * 6, [[] for _ in range(6)], None
  for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
    assert chunk.id.startswith("cmpl-") and chunk.object == "text_completion"
    for choice in chunk.choices:
      assert reasons[choice.index] is None, "a choice has ended once"
      texts[choice.index] += choice.text
      reasons[choice.index] = choice.finish_reason
      tokens[choice.index] += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    if chunk.usage is not None:
      assert chunk.choices == [] and used is None
      used = chunk.usage
  assert texts == [choice.text for choice in whole.choices]
  assert reasons == [choice.finish_reason for choice in whole.choices]
  for index, choice in enumerate(whole.choices):
    assert tokens[index] == list(zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True))
  # Only what the prefix cache spared may differ the second time.
  assert (used.prompt_tokens, used.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_chat(client, server):
  text, token_ids, ending = grpc_answer(server, chat=grpc_chat())
  answer = client.chat.completions.create(
    model="tiny", messages=CHAT, seed=5, max_completion_tokens=20, max_tokens=1, extra_body={"return_token_ids": True}
  )
  [choice] = answer.choices
  assert (choice.message.role, choice.message.content) == ("assistant", text)
  assert choice.token_ids == token_ids
  assert answer.prompt_token_ids == list(server.generation.Tokenize(pb.TokenizeRequest(chat=grpc_chat())).token_ids)
  assert answer.object == "chat.completion"
  assert answer.usage.completion_tokens == ending.usage.completion_tokens


def test_chat_stream_with_logprobs_and_n(client, server):
  stream = client.chat.completions.create(
    model="tiny",
    messages=CHAT,
    seed=5,
    max_tokens=20,
    n=3,
    stream=True,
    logprobs=True,
    top_logprobs=1,
    stream_options={"include_usage": True},
    extra_body={"return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
  )
  texts, roles, token_ids, entries = [""] * 3, [[], [], []], [[], [], []], [[], [], []]
  last = None
  for chunk in stream:
    assert chunk.object == "chat.completion.chunk"
    last = chunk
    for choice in chunk.choices:
      texts[choice.index] += choice.delta.content or ""
      roles[choice.index].append(choice.delta.role)
      token_ids[choice.index] += choice.token_ids
      entries[choice.index] += choice.logprobs.content
      assert chunk.usage.prompt_tokens > 0
  assert last.choices == [] and last.usage.completion_tokens > 0
  for index in range(3):
    text, ids, _ = grpc_answer(server, index, sampling={"n": 3}, output={"logprobs": 1}, chat=grpc_chat())
    assert (texts[index], token_ids[index]) == (text, ids)
    assert roles[index] == ["assistant"] + [None] * (len(roles[index]) - 1)
    assert len(entries[index]) == len(ids)
    for entry, token_id in zip(entries[index], ids, strict=True):
      assert entry.token == bytes(entry.bytes).decode(errors="replace")
      assert bytes(entry.bytes) == b"" or token_id > 5
      assert entry.logprob <= 0


def test_text_parts_are_joined(client):
  asked = {"model": "tiny", "seed": 5, "max_tokens": 9}
  parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]
  one = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
  other = client.chat.completions.create(messages=[{"role": "user", "content": "the cat\nsat"}], **asked)
  assert one.choices[0].message.content == other.choices[0].message.content
  assert one.usage.prompt_tokens == other.usage.prompt_tokens


def test_the_tokenizer(http, server):
  said = http.post("/tokenize", json={"model": "tiny", "prompt": "the cat", "return_token_strs": True}).json()
  assert said["tokens"] == list(server.generation.Tokenize(pb.TokenizeRequest(text="the cat")).token_ids)
  assert said["token_strs"] == ["<|bos|>", "the", " cat"] and (said["count"], said["max_model_len"]) == (3, 512)
  assert http.post("/detokenize", json={"tokens": said["tokens"]}).json() == {"prompt": "<|bos|>the cat"}
  bare = http.post("/tokenize", json={"prompt": "the cat", "add_special_tokens": False}).json()["tokens"]
  assert bare == said["tokens"][1:]
  chat = http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
  assert chat == list(server.generation.Tokenize(pb.TokenizeRequest(chat=grpc_chat())).token_ids)
  told = http.get("/tokenizer_info").json()
  assert (told["bos_token"], told["eos_token"]) == ("<|bos|>", "<|end|>") and "messages" in told["chat_template"]


def test_a_server_without_a_tokenizer():
  with running(None, host=HostOptions(http_port=0)) as server, httpx.Client(base_url=url_of(server)) as http:
    choice = http.post(
      "/v1/completions",
      json={"prompt": IDS, "max_tokens": 4, "logprobs": 0, "echo": True, "return_token_ids": True, "ignore_eos": True},
    ).json()["choices"][0]
    assert choice["text"] == "" and len(choice["token_ids"]) == 4
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in [*IDS, *choice["token_ids"]]]
    refused = http.post("/v1/chat/completions", json={"messages": CHAT})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_tokenizer"


def test_tools_and_variables_of_the_models_own_template(tmp_path):
  """What they say reaches the prompt, and special tokens in them are text."""
  write_tokenizer(tmp_path)
  (tmp_path / "chat_template.jinja").write_text(
    "{% for tool in tools or [] %}<|system|>{{ tool.function.name }} {{ tool.function.description }}<|end|>{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.what }}{% endfor %}<|end|>{% endfor %}"
    "{% if think %}the{% endif %}"
  )
  tool = {"type": "function", "function": {"name": "look", "description": "a <|end|> cat"}}
  call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"what": "dog"}'}}
  messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sat"}]
  with (
    running(Tokenizer(tmp_path), host=HostOptions(http_port=0)) as server,
    openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="x") as client,
  ):
    asked = {"model": "tiny", "max_tokens": 1, "messages": messages, "tools": [tool]}
    extra = {"return_token_ids": True, "chat_template_kwargs": {"think": True}}
    ids = client.chat.completions.create(**asked, extra_body=extra).prompt_token_ids
    text = Tokenizer(tmp_path).decode(ids, skip_special_tokens=False)
    assert text.startswith("<|system|>look a <|end|> cat<|end|><|system|>be brief") and text.endswith("the")
    assert "<|assistant|>dog<|end|><|tool|>sat<|end|>" in text
    assert ids.count(END) == 5, "one for each turn and tool, none from a text"
    without = client.chat.completions.create(**asked, tool_choice="none", extra_body={"return_token_ids": True})
    assert len(without.prompt_token_ids) < len(ids)


def test_stop_strings_and_stop_tokens(client, server):
  text, _, _ = grpc_answer(server, stopping={"ignore_eos": True}, text="the cat")
  stop = next(char for char in text[3:] if char not in text[:3] and char.isascii())
  answer = client.completions.create(
    model="tiny", prompt="the cat", seed=5, max_tokens=20, stop=stop, extra_body={"ignore_eos": True}
  )
  assert answer.choices[0].text == text[: text.index(stop)]
  assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)
  answer = client.completions.create(
    model="tiny", prompt=IDS, seed=5, max_tokens=20, extra_body={"stop_token_ids": [END], "min_tokens": 20}
  )
  assert answer.usage.completion_tokens == 20 and answer.choices[0].finish_reason == "length"


def test_vllm_parameters_reach_the_engine(client, server):
  extra = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True, "min_tokens": 3, "priority": 2}
  text, token_ids, _ = grpc_answer(
    server,
    sampling={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5},
    stopping={"ignore_eos": True, "min_tokens": 3},
    token_ids=pb.TokenIds(ids=IDS),
  )
  extra |= {"return_token_ids": True, "allowed_token_ids": None, "cache_salt": "s"}
  answer = client.completions.create(model="tiny", prompt=IDS, seed=5, max_tokens=20, extra_body=extra)
  assert (answer.choices[0].text, answer.choices[0].token_ids) == (text, token_ids)


def test_a_seed_of_minus_1_is_none(client):
  def once(seed):
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=IDS, seed=seed, max_tokens=20, extra_body=extra)
    return answer.choices[0].token_ids

  assert once(-1) != once(-1) and once(-2) == once(-2) and once(0) == once(0)


def test_scoring_with_echo_alone(client, server):
  """What harnesses do: the prompt's logprobs, and no token more."""
  output = pb.OutputParams(logprobs=0, prompt_logprobs=0)
  messages = generate(server, token_ids=pb.TokenIds(ids=IDS), stopping=pb.StopParams(max_tokens=1), output=output)
  wanted = [entry.logprob for message in messages for delta in message.deltas for entry in delta.prompt_logprobs]
  assert len(wanted) == 2
  for max_tokens in (0, 1):
    answer = client.completions.create(
      model="tiny", prompt=[IDS, IDS[:1]], max_tokens=max_tokens, echo=True, logprobs=0, seed=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[:3] == [None, *wanted]
    assert logprobs.top_logprobs[:2] == [None, {logprobs.tokens[1]: wanted[0]}]
    assert "".join(logprobs.tokens)[:3] == answer.choices[0].text[:3]
    assert logprobs.text_offset[:3] == [0, 1, 2]
    if max_tokens == 0:
      assert len(logprobs.tokens) == 3 and answer.usage.completion_tokens == 0
      assert len(answer.choices[1].logprobs.tokens) == 1 and answer.choices[1].finish_reason == "length"


@pytest.mark.parametrize("prompt", ["the cat 😀 sat", "<|bos|>the cat", "the<|user|> cat", " naïve café"])
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("as_ids", [True, False])
def test_offsets_are_places_in_the_text(client, tokenizer, prompt, echo, skip, as_ids):
  """With and without an echo, of a text and of its ids, whole and as a stream; also where BOS is not in the text."""
  extra = {"ignore_eos": True, "skip_special_tokens": skip, "return_tokens_as_token_ids": as_ids}
  asked = {"model": "tiny", "max_tokens": 12, "echo": echo, "logprobs": 0, "seed": 3}
  ids = tokenizer.encode(prompt)
  for given in (prompt, ids):
    choice = client.completions.create(prompt=given, extra_body=extra | {"return_token_ids": True}, **asked).choices[0]
    places, text = choice.logprobs.text_offset, choice.text
    tokens = (ids if echo else []) + choice.token_ids
    assert len(places) == len(tokens) == len(choice.logprobs.tokens)
    assert places == sorted(places) and places[0] == 0 and places[-1] <= len(text)
    for token_id, place in zip(tokens, places, strict=True):
      raw = tokenizer.token_bytes(token_id)
      shown = token_id > 5 or not skip or (echo and raw.decode() in prompt and given is prompt)
      if shown and raw.isascii() and not (token_id == 1 and given is prompt and place == 0):
        assert text[place:].startswith(raw.decode()), "a token begins at its place"
    chunks = list(client.completions.create(prompt=given, stream=True, extra_body=extra, **asked))
    streamed = [chunk.choices[0] for chunk in chunks]
    assert [at for each in streamed if each.logprobs for at in each.logprobs.text_offset] == places
    assert "".join(each.text for each in streamed) == text


def test_many_logprobs_are_whole(client):
  """They are written by another thread."""
  answer = client.completions.create(
    model="tiny",
    prompt=[[7] * 200, [8] * 200],
    max_tokens=50,
    n=2,
    echo=True,
    logprobs=0,
    extra_body={"ignore_eos": True},
  )
  assert [len(choice.logprobs.tokens) for choice in answer.choices] == [250] * 4
  assert answer.usage.completion_tokens == 200


def test_many_async_streams_are_exact(server):
  wanted = {}
  for seed in range(64):
    messages = generate(
      server, token_ids=pb.TokenIds(ids=[7, 8, 9 + seed]), sampling=pb.SamplingParams(seed=seed),
      stopping=pb.StopParams(max_tokens=30),
    )  # fmt: skip
    wanted[seed] = token_ids_of(messages)

  async def one(client: openai.AsyncOpenAI, seed: int) -> list[int]:
    stream = await client.completions.create(
      model="tiny",
      prompt=[7, 8, 9 + seed],
      seed=seed,
      max_tokens=30,
      stream=True,
      extra_body={"return_token_ids": True},
    )
    return [token_id async for chunk in stream for choice in chunk.choices for token_id in choice.token_ids]

  async def all_of_them() -> list[list[int]]:
    async with openai.AsyncOpenAI(base_url=f"{url_of(server)}/v1", api_key="x", timeout=60) as client:
      return await asyncio.gather(*(one(client, seed) for seed in wanted))

  assert asyncio.run(all_of_them()) == list(wanted.values())


def test_errors_are_the_clients_own_types(client):
  with pytest.raises(openai.BadRequestError, match="top_p=1.5 is not allowed") as bad:
    client.completions.create(model="tiny", prompt="a", top_p=1.5)
  assert (bad.value.type, bad.value.param, bad.value.code) == ("invalid_request_error", "top_p", None)
  with pytest.raises(openai.BadRequestError, match="plus max_tokens=600 is") as long:
    client.completions.create(model="tiny", prompt="a", max_tokens=600)
  assert long.value.code == "context_length_exceeded"
  with pytest.raises(openai.NotFoundError) as missing:
    client.chat.completions.create(model="gpt", messages=CHAT)
  assert missing.value.code == "model_not_found"
  assert missing.value.request_id.startswith("req-")


def test_a_live_duplicate_is_a_conflict_that_is_not_retried(paced):
  paced.runner.seconds = 0.05
  with openai.OpenAI(base_url=f"{url_of(paced)}/v1", api_key="x", timeout=30) as client:
    asked = {
      "model": "tiny",
      "prompt": IDS,
      "max_tokens": 400,
      "extra_body": {"request_id": "mine", "ignore_eos": True},
    }
    stream = client.completions.create(**asked, stream=True)
    first = next(iter(stream))
    assert first.id == "cmpl-mine"
    started = paced.generations.num_started
    with pytest.raises(openai.ConflictError, match="request_id=cmpl-mine is in use") as caught:
      client.completions.create(**asked)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert paced.generations.num_started == started
    # Abort by the id that was sent, over gRPC: the stream ends with an error and not as if it were whole.
    paced.generation.Abort(pb.AbortRequest(request_ids=["cmpl-mine"]))
    with pytest.raises(openai.APIError, match="aborted by an Abort call") as aborted:
      list(stream)
    assert aborted.value.code == "aborted_by_request"


def test_overload_is_a_rate_limit_with_a_time(tokenizer):
  config = tiny_config(token_budgets=(8, 64, 128), eos_token_ids=(END,), max_queued_requests=2)
  with (
    running(tokenizer, host=HostOptions(http_port=0), config=config) as server,
    openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="x", max_retries=0, timeout=30) as client,
    contextlib.ExitStack() as cleanup,
  ):
    with pytest.raises(openai.BadRequestError, match="3 entries of n=1 outputs, but at most 2 requests may wait"):
      client.completions.create(model="tiny", prompt=["a"] * 3)
    server.runner.go.clear()
    content = json.dumps({"prompt": [IDS, IDS], "max_tokens": 9}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    connections = []
    for _ in range(3):
      connection = socket.create_connection(("127.0.0.1", server.host.http_port), timeout=30)
      connections.append(cleanup.enter_context(connection))
      connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
      # The first runs: the engine has planned two steps, and waits for the first one.
      server.wait_until(lambda: server.runner.num_steps == 2)
    # The second fills the queue; the third is answered, with a refusal.
    assert select.select(connections, [], [], 30)[0]
    with pytest.raises(openai.RateLimitError, match="requests are queued, the limit is 2") as caught:
      client.completions.create(model="tiny", prompt=[IDS, IDS])
    assert caught.value.type == "rate_limit_error"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert int(caught.value.response.headers["retry-after-ms"]) >= 1
    assert len(server.generations) == 4, "of several prompts all begin, or none"
    server.runner.go.set()


def test_keys(tokenizer, tmp_path):
  key_file, log = tmp_path / "keys", tmp_path / "log"
  key_file.write_text("rW5vJ8Jk2nq4uYt1sXzB8mE0 team-a\n")
  key_file.chmod(0o600)
  host = HostOptions(http_port=0, api_key_file=str(key_file), access_log=str(log))
  with (
    running(tokenizer, host=host) as server,
    openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="wrong", max_retries=0) as client,
  ):
    with pytest.raises(openai.AuthenticationError, match="the API key is not known here") as caught:
      client.models.list()
    assert caught.value.code == "invalid_api_key"
    good = client.with_options(api_key="rW5vJ8Jk2nq4uYt1sXzB8mE0")
    assert good.models.list().data[0].id == "tiny"
    good.completions.create(model="tiny", prompt="a secret", max_tokens=3, extra_headers={"X-Request-Id": "r.1"})
  lines = [json.loads(line) for line in log.read_text().splitlines()]
  last = lines[-1]
  assert last["method"] == "POST /v1/completions" and last["request_id"] == "r.1" and last["code"] == 200
  assert last["tenant"] == "team-a" and last["output_tokens"] >= 1 and last["generation_id"].startswith("cmpl-")
  assert lines[0]["code"] == 401 and "secret" not in log.read_text()
