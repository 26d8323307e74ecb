"""vllm.grpc.engine over a real socket: the wire's numbers are the published ones, answers are those of sluice.v1."""

import hashlib
import io
import json
import os
import pathlib
import re
import zipfile

import grpc
import pytest
import tokenizers

from extensions.vllm_api.proto import smg_common_pb2 as smg_pb
from extensions.vllm_api.proto import vllm_engine_pb2 as vllm_pb
from extensions.vllm_api.proto import vllm_engine_pb2_grpc
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer
from tests.server.harness import END, generate, reason_of, running, tiny_config, token_ids_of, write_tokenizer

# Fields and methods of the published descriptor: name -> number, type, repeated, presence, message, oneof.
PUBLISHED = json.loads((pathlib.Path(__file__).parents[2] / "golden" / "vllm_engine_fields.json").read_text())
IDS = [7, 8, 9]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tokenizer):
  with running(tokenizer, host=HostOptions(enable_vllm_api=True)) as served:
    yield served


def stub(served) -> vllm_engine_pb2_grpc.VllmEngineStub:
  return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


def ask(served, *, stream: bool = True, ids=IDS, **sampling) -> list[vllm_pb.GenerateResponse]:
  request = vllm_pb.GenerateRequest(
    request_id="r",
    tokenized=vllm_pb.TokenizedInput(input_ids=ids),
    sampling_params=vllm_pb.SamplingParams(**sampling),
    stream=stream,
  )
  return list(stub(served).Generate(request, timeout=30))


def parts(answers, index: int = 0):
  """Chunks and the one completion of an index."""
  chunks = [each.chunk for each in answers if each.HasField("chunk") and each.chunk.index == index]
  (complete,) = [each.complete for each in answers if each.HasField("complete") and each.complete.index == index]
  return chunks, complete


def own(served, *, ids=IDS, stop=(), stop_token_ids=(), n=1, ignore_eos=True, max_tokens=12, **output):
  """The same through sluice.v1."""
  return generate(
    served,
    token_ids=pb.TokenIds(ids=ids),
    sampling=pb.SamplingParams(temperature=0.0, n=n),
    stopping=pb.StopParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop=stop, stop_token_ids=stop_token_ids),
    output=pb.OutputParams(**output),
  )


def test_every_field_and_method_is_the_published_one():
  service = vllm_pb.DESCRIPTOR.services_by_name["VllmEngine"]
  assert service.full_name == "vllm.grpc.engine.VllmEngine" and len(service.methods) == 7
  for method in service.methods:
    assert PUBLISHED["methods"][method.name] == [
      method.input_type.full_name,
      method.output_type.full_name,
      method.client_streaming,
      method.server_streaming,
    ]
  assert smg_pb.DESCRIPTOR.package == "smg.grpc.common"
  messages = [*vllm_pb.DESCRIPTOR.message_types_by_name.values(), *smg_pb.DESCRIPTOR.message_types_by_name.values()]
  for message in messages:
    for field in message.fields:
      assert PUBLISHED["messages"][message.name][field.name] == [
        field.number,
        field.type,
        field.is_repeated,
        field.has_presence,
        field.message_type.full_name if field.message_type else "",
        field.containing_oneof.name if field.containing_oneof else "",
      ], field.full_name


def test_a_stream(server):
  wanted = token_ids_of(own(server))
  chunks, complete = parts(ask(server, **GREEDY))
  assert [token for chunk in chunks for token in chunk.token_ids] == wanted
  assert all(chunk.completion_tokens == len(chunk.token_ids) and chunk.prompt_tokens == 3 for chunk in chunks)
  assert (complete.finish_reason, complete.prompt_tokens) == ("length", 3)
  assert complete.output_ids == chunks[-1].token_ids and complete.WhichOneof("matched_stop") is None


def test_one_message(server):
  wanted = token_ids_of(own(server))
  chunks, complete = parts(ask(server, stream=False, **GREEDY))
  assert not chunks and list(complete.output_ids) == wanted and complete.completion_tokens == 12


def test_several_outputs(server):
  answers = ask(server, n=3, **GREEDY)
  wanted = token_ids_of(own(server))
  for index in range(3):
    chunks, _ = parts(answers, index)
    assert [token for chunk in chunks for token in chunk.token_ids] == wanted


def test_text_and_what_is_left_of_the_length(server, tokenizer):
  request = vllm_pb.GenerateRequest(
    text="the cat", sampling_params=vllm_pb.SamplingParams(temperature=0, ignore_eos=True)
  )
  ((_, complete),) = [parts(list(stub(server).Generate(request, timeout=30)))]
  prompt = tokenizer.encode("the cat", add_special_tokens=True)
  assert complete.prompt_tokens == len(prompt) and complete.completion_tokens == 512 - len(prompt)


def test_endings(server):
  tokens = token_ids_of(own(server, max_tokens=40))
  stop_id = tokens[5]
  first = tokens.index(stop_id)
  _, complete = parts(ask(server, stream=False, stop_token_ids=[stop_id], **GREEDY | {"max_tokens": 40}))
  assert (complete.finish_reason, complete.matched_token_id) == ("stop", stop_id)
  assert list(complete.output_ids) == tokens[: first + 1], "the stop token is part of the output there"
  text = "".join(delta.text for message in own(server, max_tokens=40) for delta in message.deltas)
  _, complete = parts(ask(server, stream=False, stop=[text[2:5]], **GREEDY | {"max_tokens": 40}))
  assert (complete.finish_reason, complete.matched_stop_str) == ("stop", text[2:5])


def test_the_models_own_end_is_no_match(tokenizer):
  config = tiny_config(max_num_seqs=8, eos_token_ids=tuple(range(400)))
  with running(tokenizer, config=config, host=HostOptions(enable_vllm_api=True)) as served:
    _, complete = parts(ask(served, temperature=0.0))
    assert complete.finish_reason == "stop" and complete.WhichOneof("matched_stop") is None
    assert len(complete.output_ids) == 1


def test_logprobs(server):
  ids = list(range(10, 40))
  wanted = own(server, ids=ids, logprobs=2, prompt_logprobs=2)
  logprobs = [entry for message in wanted for delta in message.deltas for entry in delta.logprobs]
  prompt = [entry for message in wanted for delta in message.deltas for entry in delta.prompt_logprobs]
  for stream in (True, False):
    chunks, complete = parts(ask(server, ids=ids, stream=stream, logprobs=2, prompt_logprobs=2, **GREEDY))
    pieces = chunks if stream else [complete]
    assert [value for piece in pieces for value in piece.output_logprobs.token_logprobs] == [
      entry.logprob for entry in logprobs
    ]
    assert [list(top.token_ids) for piece in pieces for top in piece.output_logprobs.top_logprobs] == [
      [each.token_id for each in entry.top] for entry in logprobs
    ]
    given = pieces[0].input_logprobs
    assert list(given.token_ids) == ids and not given.token_logprobs[0].HasField("value")
    assert [each.value for each in given.token_logprobs[1:]] == [entry.logprob for entry in prompt]
    assert len(given.top_logprobs) == len(ids)
    assert not any(piece.HasField("input_logprobs") for piece in pieces[1:])


def test_zero_is_unset_where_there_is_no_presence(server):
  """So it must not be refused as a value that is too small."""
  wanted = token_ids_of(own(server))
  chunks, _ = parts(ask(server, top_p=0.0, repetition_penalty=0.0, n=0, top_k=0, **GREEDY))
  assert [token for chunk in chunks for token in chunk.token_ids] == wanted


def test_a_seed_of_minus_1_is_none(server):
  def once(seed):
    return list(parts(ask(server, stream=False, seed=seed, max_tokens=20, ignore_eos=True))[1].output_ids)

  assert once(-1) != once(-1) and once(-2) == once(-2) and once(0) == once(0)


CONSTRAINTS = {
  "json_schema": json.dumps({"enum": ["aaa", "bab"]}),
  "regex": "[ab]{3}",
  "grammar": "root ::= [ab] [ab] [ab]",
  "choice": vllm_pb.ChoiceConstraint(choices=["aaa", "bab"]),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_constrained_outputs(server, tokenizer, kind):
  for from_first_token in (False, True):
    answers = ask(
      server,
      n=8,
      seed=1,
      max_tokens=40,
      stream=False,
      grammar_from_first_token=from_first_token,
      **{kind: CONSTRAINTS[kind]},
    )
    for index in range(8):
      _, complete = parts(answers, index)
      text = tokenizer.decode(complete.output_ids, skip_special_tokens=True)
      assert complete.finish_reason == "stop" and re.fullmatch('[ab]{3}|"(aaa|bab)"', text), text


def test_any_json_object(server, tokenizer):
  answers = ask(server, n=16, seed=1, max_tokens=300, stream=False, json_object=True)
  ended = [
    complete for complete in (parts(answers, index)[1] for index in range(16)) if complete.finish_reason == "stop"
  ]
  assert ended
  for complete in ended:
    assert isinstance(json.loads(tokenizer.decode(complete.output_ids, skip_special_tokens=True)), dict)


BAD = {
  "no input": (vllm_pb.GenerateRequest().SerializeToString(), "input is missing: send tokenized or text"),
  "empty": (vllm_pb.GenerateRequest(tokenized=vllm_pb.TokenizedInput()).SerializeToString(), "prompt is empty"),
  "rank": (
    vllm_pb.GenerateRequest(tokenized=vllm_pb.TokenizedInput(input_ids=IDS), data_parallel_rank=1).SerializeToString(),
    "data_parallel_rank=1 does not exist",
  ),
  "large id": (
    vllm_pb.GenerateRequest(tokenized=vllm_pb.TokenizedInput(input_ids=[2**32 - 1])).SerializeToString(),
    "token id of 2147483648 or more; token ids of this model are 0 to 399",
  ),
  "id": (
    vllm_pb.GenerateRequest(tokenized=vllm_pb.TokenizedInput(input_ids=[400])).SerializeToString(),
    "400 is not in",
  ),
  "media": (
    vllm_pb.GenerateRequest(tokenized=vllm_pb.TokenizedInput(input_ids=IDS)).SerializeToString() + b"\x3a\x00",
    "vllm.grpc.engine.GenerateRequest.7 is not a field that this server knows: leave it out",
  ),
  "structural tag": (
    vllm_pb.GenerateRequest(tokenized=vllm_pb.TokenizedInput(input_ids=IDS)).SerializeToString()
    + b"\x22\x05\x9a\x01\x02{}",
    "vllm.grpc.engine.SamplingParams.19 is not a field that this server knows",
  ),
  "malformed": (b"\xff\xff", "the 2 bytes are no vllm.grpc.engine.GenerateRequest"),
}
for name, value in {
  "top_p": 2.0,
  "top_k": 2**32 - 1,
  "n": 17,
  "max_tokens": 2**32 - 1,
  "min_tokens": 2**31,
  "stop_token_ids": [2**31],
  "logprobs": -1,
  "prompt_logprobs": 21,
  "repetition_penalty": float("nan"),
  "json_schema": "{",
  "regex": "(?=a)b",
  "grammar": "nothing",
  "json_object": False,
  "choice": vllm_pb.ChoiceConstraint(),
}.items():
  BAD[name] = (
    vllm_pb.GenerateRequest(
      tokenized=vllm_pb.TokenizedInput(input_ids=IDS), sampling_params=vllm_pb.SamplingParams(**{name: value})
    ).SerializeToString(),
    name,
  )


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(server, name):
  raw, said = BAD[name]
  with pytest.raises(grpc.RpcError, match=said) as caught:
    list(server.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(raw, timeout=30))
  assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
  assert reason_of(caught.value) in ("INVALID_REQUEST", "MALFORMED_REQUEST", "REQUEST_TOO_LONG")
  assert server.engine.num_live == 0


def test_the_other_methods(server):
  engine = stub(server)
  assert engine.HealthCheck(vllm_pb.HealthCheckRequest()).healthy
  info = engine.GetModelInfo(vllm_pb.GetModelInfoRequest())
  assert (info.served_model_name, info.is_generation, info.max_context_length) == ("tiny", True, 512)
  assert (info.vocab_size, list(info.eos_token_ids)) == (400, [END])
  server.runner.seconds = 0.05
  request = vllm_pb.GenerateRequest(
    request_id="mine",
    tokenized=vllm_pb.TokenizedInput(input_ids=IDS),
    sampling_params=vllm_pb.SamplingParams(max_tokens=400, ignore_eos=True),
    stream=True,
  )
  call = engine.Generate(request, timeout=30)
  next(call)
  (load,) = engine.GetLoads(vllm_pb.GetLoadsRequest()).loads
  assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (1, 0, 64)
  assert load.max_total_num_tokens == 255 * 8 or load.max_total_num_tokens == 256 * 8
  assert 0 < load.token_usage < 1
  told = engine.GetServerInfo(vllm_pb.GetServerInfoRequest())
  assert (told.active_requests, told.server_type, told.max_num_seqs) == (1, "vllm-grpc", 64)
  engine.Abort(vllm_pb.AbortRequest(request_ids=["mine"]))
  with pytest.raises(grpc.RpcError, match="request mine was aborted") as caught:
    list(call)
  assert caught.value.code() is grpc.StatusCode.CANCELLED
  server.runner.seconds = 0.0
  server.wait_until(lambda: server.engine.num_live == 0)


def test_the_tokenizer_as_a_zip(server, tokenizer_dir):
  """What a client makes of it gives the ids that the server gives."""
  for _ in range(2):
    chunks = list(stub(server).GetTokenizer(smg_pb.GetTokenizerRequest(), timeout=30))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
      assert archive.namelist() == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
      for name in archive.namelist():
        assert archive.read(name) == (tokenizer_dir / name).read_bytes()
      made = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
    for text in ("the cat sat on the mat", "<|user|> naïve café 😀 日本", " "):
      assert list(server.generation.Tokenize(pb.TokenizeRequest(text=text)).token_ids) == made.encode(text).ids


def test_a_model_without_a_tokenizer_has_none_to_send():
  with running(None, host=HostOptions(enable_vllm_api=True)) as served:
    with pytest.raises(grpc.RpcError, match="GetTokenizer needs a tokenizer, and the served model has none") as caught:
      list(stub(served).GetTokenizer(smg_pb.GetTokenizerRequest(), timeout=30))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION and reason_of(caught.value) == "NO_TOKENIZER"


def test_a_tokenizer_that_was_changed_is_not_sent_until_it_is_back(tmp_path):
  write_tokenizer(tmp_path)
  (tmp_path / "large.jinja").write_bytes(os.urandom(200_000))
  with running(Tokenizer(tmp_path), host=HostOptions(enable_vllm_api=True)) as served:
    good = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(good + b" ")
    with pytest.raises(grpc.RpcError, match="tokenizer.json has changed since the server read it") as caught:
      list(stub(served).GetTokenizer(smg_pb.GetTokenizerRequest(), timeout=30))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION and reason_of(caught.value) == "NOT_CONFIGURED"
    (tmp_path / "tokenizer.json").write_bytes(good)
    chunks = list(stub(served).GetTokenizer(smg_pb.GetTokenizerRequest(), timeout=30))
    assert [len(chunk.data) for chunk in chunks[:3]] == [64 << 10] * 3
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(b"".join(chunk.data for chunk in chunks)).hexdigest()


INSTEAD = {
  "Embed": "Embed of sluice.v1 and /v1/embeddings",
  "FlushCache": "the prefix cache evicts blocks by itself",
  "StartProfile": "SetTrace of sluice.admin.v1",
  "StopProfile": "SetTrace of sluice.admin.v1",
  "SubscribeKvEvents": "route by earlier requests and by GetLoads",
}


@pytest.mark.parametrize("name", sorted(PUBLISHED["methods"].keys() - vllm_engine_pb2_grpc.VllmEngineServicer.__dict__))
def test_published_methods_that_are_not_served_say_what_to_do_instead(server, name):
  for raw in (b"", b"\x0a\x01r", b"\xff\xff"):
    _, _, _, streams = PUBLISHED["methods"][name]
    make = server.channel.unary_stream if streams else server.channel.unary_unary
    with pytest.raises(grpc.RpcError, match=f"{name} is not served here: .*{INSTEAD[name]}") as caught:
      answer = make(f"/vllm.grpc.engine.VllmEngine/{name}")(raw, timeout=30)
      list(answer)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED and reason_of(caught.value) == "UNKNOWN_METHOD"


def test_it_is_not_there_unless_asked_for(served):
  with pytest.raises(grpc.RpcError, match="is not served here") as caught:
    stub(served).HealthCheck(vllm_pb.HealthCheckRequest())
  assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
