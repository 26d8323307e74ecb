"""Every bad input gets its status, its reason and a message with value, limit and remedy; and harms nobody."""

from collections.abc import Iterator
import itertools
import json
import random

from google.rpc import error_details_pb2
import grpc
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.harness import Served, detail_of, endings_of, generate, reason_of, running

INVALID = grpc.StatusCode.INVALID_ARGUMENT
IDS = pb.TokenIds(ids=[7, 8, 9])
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def server(tokenizer) -> Iterator[Served]:
  """One server for all: after every bad request it must still serve."""
  with running(tokenizer) as served:
    yield served


@pytest.fixture(scope="module")
def textless() -> Iterator[Served]:
  """A server without a tokenizer."""
  with running(None) as served:
    yield served


def sampling(**fields):
  return {"token_ids": IDS, "sampling": pb.SamplingParams(**fields)}


def stopping(**fields):
  return {"token_ids": IDS, "stopping": pb.StopParams(**fields)}


def output(**fields):
  return {"token_ids": IDS, "output": pb.OutputParams(**fields)}


def constraint(**fields):
  return {"token_ids": IDS, "constraint": pb.OutputConstraint(**fields)}


def choice(*values: str):
  return constraint(choice=pb.Choices(values=values))


def chain(length: int) -> str:
  """A schema of references, each one level below the last."""
  links = {f"r{n}": {"items": {"$ref": f"#/$defs/r{n + 1}"}} for n in range(length)}
  return json.dumps({"$ref": "#/$defs/r0", "$defs": links | {f"r{length}": {"type": "string"}}})


BAD_REQUESTS = {
  # Constraints.
  "no constraint": (constraint(), "constraint", "has no kind: send json_schema"),
  "json_object false": (constraint(json_object=False), "constraint.json_object", "send true, or leave"),
  "empty schema": (constraint(json_schema=""), "constraint.json_schema", "0 bytes, allowed are 1 to 32768"),
  "large schema": (constraint(json_schema=" " * 32769), "constraint.json_schema", "32769 bytes, allowed are 1 to"),
  "no JSON": (constraint(json_schema="{'a': 1}"), "constraint.json_schema", "is not JSON: .* line 1, column 2"),
  "NaN in a schema": (constraint(json_schema='{"minimum": NaN}'), "constraint.json_schema", "is not JSON"),
  "a schema after a schema": (
    constraint(json_schema='{}}, {"lark_grammar": "start: /x/"}, {"json_schema": {}'),
    "constraint.json_schema",
    "is not JSON: Extra data",
  ),
  "list schema": (constraint(json_schema="[]"), "constraint.json_schema", "must be an object or boolean"),
  "schema of no type": (constraint(json_schema='{"type": "objekt"}'), "constraint.json_schema", "Invalid type: objekt"),
  "schema keyword": (
    constraint(json_schema='{"uniqueItems": true}'),
    "constraint.json_schema",
    "has uniqueItems at uniqueItems, which cannot be enforced: leave it out",
  ),
  "no value": (constraint(json_schema="false"), "constraint.json_schema", "Unsatisfiable schema"),
  "endless schema": (
    constraint(json_schema='{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    "constraint.json_schema",
    "allows no output, or one that takes more work",
  ),
  "schema elsewhere": (constraint(json_schema='{"$ref": "http://x/y"}'), "constraint.json_schema", "does not fetch"),
  "deep schema": (
    constraint(json_schema='{"items":' * 64 + "{}" + "}" * 64),
    "constraint.json_schema",
    "nested too deeply: it has more than 64 levels",
  ),
  "very deep schema": (constraint(json_schema="[" * 30_000), "constraint.json_schema", "more than 64 levels"),
  "chain of references": (
    constraint(json_schema=chain(700)),
    "constraint.json_schema",
    "701 references in 4 levels, .* is 512 for",
  ),
  "lookaround": (constraint(regex="(?=a)b"), "constraint.regex", "look-around, .* is not supported; correct"),
  "back reference": (constraint(regex="(a)\\1"), "constraint.regex", "backreferences are not supported"),
  "open group": (constraint(regex="("), "constraint.regex", "unclosed group"),
  "deep regex": (constraint(regex="(" * 4000 + ")" * 4000), "constraint.regex", "exceed the maximum number of nested"),
  "long regex": (constraint(regex="a" * 8193), "constraint.regex", "8193 bytes, allowed are 1 to 8192"),
  "no choices": (choice(), "constraint.choice", "0 strings, allowed are 1 to 1024"),
  "many choices": (choice(*["a"] * 1025), "constraint.choice", "1025 strings, allowed are 1 to 1024"),
  "empty choice": (choice("a", ""), "constraint.choice", "has an empty string: leave it out"),
  "long choices": (choice(*["a" * 4_000] * 10), "constraint.choice", "40000 bytes, the limit is 32768"),
  "no grammar": (constraint(grammar="what"), "constraint.grammar", "and is not GBNF either: Expected ::="),
  "unknown rule": (constraint(grammar='start: "a" b'), "constraint.grammar", 'unknown name: "b"'),
  "GBNF without root": (constraint(grammar='a ::= "b"'), "constraint.grammar", "No 'root' rule"),
  "deep GBNF": (constraint(grammar="root ::= " + "(" * 4000), "constraint.grammar", "is not GBNF either"),
  "deep grammar": (constraint(grammar="start: " + "(" * 4000), "constraint.grammar", "too deeply nested"),
  "many rules": (
    constraint(grammar="start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(520)) + 'r520: "a"'),
    "constraint.grammar",
    "522 colons, .* the limit is 512",
  ),
  "schema in a grammar": (constraint(grammar="start: %json {}"), "constraint.grammar", "%json, which is not taken"),
  "constraint and allowed ids": (
    constraint(regex="a*") | {"sampling": pb.SamplingParams(allowed_token_ids=pb.TokenIds(ids=[7]))},
    "allowed_token_ids",
    "together with an output constraint",
  ),
  # Prompts.
  "no prompt": ({}, "prompt", "prompt is missing: send text, token_ids or chat"),
  "empty text": ({"text": ""}, "prompt", "prompt is empty"),
  "empty ids": ({"token_ids": pb.TokenIds()}, "prompt", "prompt is empty; send at least one token"),
  "empty chat": ({"chat": pb.ChatPrompt()}, "chat.messages", "send at least one message"),
  "chat role": (
    {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="end|><|user", content="x")])},
    "chat.messages[0].role",
    "send one of system",
  ),
  "refused chat": (
    {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="refuse me")])},
    "chat",
    "refuses these messages: no such content",
  ),
  "prompt id too large": ({"token_ids": pb.TokenIds(ids=[7, 400])}, "prompt", "400 is not in .* 0 to 399"),
  "prompt id negative": ({"token_ids": pb.TokenIds(ids=[-1])}, "prompt", "-1 is not in .* 0 to 399"),
  "prompt id huge": ({"token_ids": pb.TokenIds(ids=[2**31 - 1])}, "prompt", "2147483647 is not in"),
  "too long": (
    {"token_ids": pb.TokenIds(ids=[7] * 510), "stopping": pb.StopParams(max_tokens=3)},
    "prompt",
    "prompt of 510 tokens plus max_tokens=3 is 513, but the maximum context length is 512 tokens; shorten",
  ),
  "far too long": ({"token_ids": pb.TokenIds(ids=[7] * 100_000)}, "prompt", "the maximum context length is 512 tokens"),
  "too much text": ({"text": "a" * ((1 << 20) + 1)}, "prompt", "1048577 bytes of text, the limit is 1048576"),
  # Sampling values.
  "temperature below 0": (sampling(temperature=-0.5), "temperature", "-0.5 .* from 0 to 100"),
  "temperature NaN": (sampling(temperature=NAN), "temperature", "nan"),
  "temperature infinite": (sampling(temperature=INF), "temperature", "inf"),
  "top_p 0": (sampling(top_p=0.0), "top_p", "above 0 to 1"),
  "top_p above 1": (sampling(top_p=1.5), "top_p", "1.5 is not allowed"),
  "top_p NaN": (sampling(top_p=NAN), "top_p", "nan"),
  "top_k negative": (sampling(top_k=-2), "top_k", "-2 .* from 0"),
  "min_p above 1": (sampling(min_p=2.0), "min_p", "from 0 to 1"),
  "min_p NaN": (sampling(min_p=NAN), "min_p", "nan"),
  "presence_penalty": (sampling(presence_penalty=2.5), "presence_penalty", "from -2 to 2"),
  "frequency_penalty": (sampling(frequency_penalty=-INF), "frequency_penalty", "from -2 to 2"),
  "repetition_penalty 0": (sampling(repetition_penalty=0.0), "repetition_penalty", "above 0"),
  "repetition_penalty NaN": (sampling(repetition_penalty=NAN), "repetition_penalty", "nan"),
  "n 0": (sampling(n=0), "n", "n=0 is not allowed: send a whole number from 1 to 16"),
  "n 17": (sampling(n=17), "n", "n=17 .* from 1 to 16"),
  "n huge": (sampling(n=2**31 - 1), "n", "n=2147483647"),
  "logit_bias id": (sampling(logit_bias={400: 1.0}), "logit_bias", "400 .* 0 to 399"),
  "logit_bias negative id": (sampling(logit_bias={-1: 1.0}), "logit_bias", "-1"),
  "logit_bias value": (sampling(logit_bias={7: 101.0}), "logit_bias[7]", "from -100 to 100"),
  "logit_bias NaN": (sampling(logit_bias={7: NAN}), "logit_bias[7]", "nan"),
  "logit_bias entries": (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias", "1025 .* most 1024"),
  "allowed ids": (sampling(allowed_token_ids=pb.TokenIds(ids=[7, 401])), "allowed_token_ids", "401 .* 0 to 399"),
  "no allowed ids": (sampling(allowed_token_ids=pb.TokenIds()), "allowed_token_ids", "at least one id"),
  # Stopping.
  "max_tokens 0": (stopping(max_tokens=0), "max_tokens", "0 .* from 1"),
  "max_tokens negative": (stopping(max_tokens=-1), "max_tokens", "-1 .* from 1"),
  "max_tokens huge": (stopping(max_tokens=2**31 - 1), "prompt", "the maximum context length is 512 tokens"),
  "min_tokens above max_tokens": (stopping(max_tokens=4, min_tokens=5), "min_tokens", "5 .* from 0 to 4"),
  "min_tokens negative": (stopping(min_tokens=-1), "min_tokens", "-1"),
  "20 stop strings": (stopping(stop=[f"s{index}" for index in range(20)]), "stop", "20 strings, the limit is 16"),
  "empty stop string": (stopping(stop=["a", ""]), "stop[1]", "0 bytes, allowed are 1 to 256"),
  "long stop string": (stopping(stop=["é" * 129]), "stop[0]", "258 bytes"),
  "stop id": (stopping(stop_token_ids=[400]), "stop_token_ids", "400 .* 0 to 399"),
  "stop ids": (stopping(stop_token_ids=[7] * 17), "stop_token_ids", "17 .* most 16"),
  # Output and the rest.
  "logprobs 21": (output(logprobs=21), "logprobs", "21 .* from 0 to 20"),
  "logprobs negative": (output(logprobs=-1), "logprobs", "-1"),
  "prompt_logprobs 21": (output(prompt_logprobs=21), "prompt_logprobs", "21 .* from 0 to 20"),
  "request id": ({"token_ids": IDS, "request_id": "a b"}, "request_id", "1 to 128 of A-Z"),
  "request id with slash": ({"token_ids": IDS, "request_id": "a/1"}, "request_id", "1 to 128 of A-Z"),
  "long request id": ({"token_ids": IDS, "request_id": "a" * 129}, "request_id", "1 to 128 of A-Z"),
  "tenant": ({"token_ids": IDS, "tenant": "t" * 129}, "tenant", "129 bytes, the limit is 128"),
  "cache salt": ({"token_ids": IDS, "cache_salt": "s" * 129}, "cache_salt", "129 bytes, the limit is 128"),
  "speculation": ({"token_ids": IDS, "speculation": "auto"}, "speculation", "='auto' .* send one of none, or serve"),
}


@pytest.mark.catalogue("E1", "E2", "E3", "E4", "E5", "E6")
@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request(server, name, method):
  fields, field, said = BAD_REQUESTS[name]
  with pytest.raises(grpc.RpcError, match="(?s)INVALID_ARGUMENT.*" + said) as caught:
    answer = getattr(server.generation, method)(pb.GenerateRequest(**fields), timeout=30)
    list(answer)
  error = caught.value
  assert error.code() is INVALID
  assert reason_of(error) in ("INVALID_REQUEST", "REQUEST_TOO_LONG")
  violation = detail_of(error, error_details_pb2.BadRequest).field_violations[0]
  assert (violation.field, violation.description) == (field, error.details())
  assert len(error.details()) < 400, "an error must not send the prompt back"
  assert server.engine.num_live == 0 and server.blocks_in_use == 0


def test_the_server_serves_after_all_that(server):
  assert endings_of(generate(server, token_ids=IDS, stopping=pb.StopParams(max_tokens=5)))[-1].last


@pytest.mark.catalogue("E7")
@pytest.mark.parametrize("method", ["Generate", "GenerateUnary", "Tokenize", "Detokenize"])
def test_unknown_model(server, method):
  request = {"Tokenize": pb.TokenizeRequest(model="gpt", text="a"), "Detokenize": pb.DetokenizeRequest(model="gpt")}
  with pytest.raises(grpc.RpcError, match="model='gpt' is not served here; send 'tiny'") as caught:
    list(getattr(server.generation, method)(request.get(method, pb.GenerateRequest(model="gpt", token_ids=IDS))))
  assert caught.value.code() is grpc.StatusCode.NOT_FOUND
  assert reason_of(caught.value) == "MODEL_NOT_FOUND"


def test_queue_timeout_must_be_positive(server):
  for seconds in (0, -1):
    request = pb.GenerateRequest(token_ids=IDS)
    request.queue_timeout.seconds = seconds
    request.queue_timeout.SetInParent()
    with pytest.raises(grpc.RpcError, match="queue_timeout=.* send more than 0"):
      server.generation.GenerateUnary(request)


@pytest.mark.catalogue("E8")
@pytest.mark.parametrize(
  "method, raw",
  [
    ("GenerationService/Generate", b"\xff\xff\xff"),
    ("GenerationService/GenerateUnary", b"\x0a\xff"),
    ("GenerationService/GenerateUnary", b"\x1a\x02\xff\xfe"),  # text that is not UTF-8
    ("GenerationService/Abort", b"\x07"),
    ("GenerationService/Tokenize", b"\x12\x05a"),
    ("GenerationService/Detokenize", b"\x0a\x01\xff"),
    ("ModelService/GetModelInfo", b"\xff"),
    ("ModelService/GetLoad", b"\xff"),
  ],
)
def test_malformed_protobuf(server, method, raw):
  call = server.channel.unary_unary(f"/sluice.v1.{method}")
  with pytest.raises(grpc.RpcError, match="bytes are no sluice.v1.") as caught:
    call(raw, timeout=30)
  assert caught.value.code() is INVALID
  assert reason_of(caught.value) == "MALFORMED_REQUEST"


@pytest.mark.hypothesis
def test_random_bytes_are_refused_or_served(server):
  call = server.channel.unary_stream("/sluice.v1.GenerationService/Generate")
  allowed = {INVALID, grpc.StatusCode.NOT_FOUND}
  seed = pb.GenerateRequest(
    token_ids=IDS,
    request_id="abc",
    sampling=pb.SamplingParams(temperature=1.0, n=2),
    stopping=pb.StopParams(max_tokens=3, stop=["x"]),
  ).SerializeToString()

  @settings(max_examples=200)
  @given(at=st.integers(0, len(seed)), drop=st.integers(0, 4), put=st.binary(max_size=6))
  def mutate(at, drop, put):
    try:
      list(call(seed[:at] + put + seed[at + drop :], timeout=30))
    except grpc.RpcError as error:
      assert error.code() in allowed, error

  mutate()


@pytest.mark.catalogue("H1")
def test_oversize_message(server):
  with pytest.raises(grpc.RpcError, match="larger than max") as caught:
    list(server.generation.Generate(pb.GenerateRequest(text="a" * (5 << 20))))
  assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unknown_method(server):
  with pytest.raises(grpc.RpcError) as caught:
    server.channel.unary_unary("/sluice.v1.GenerationService/Nonsense")(b"")
  assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
  "ids, said",
  [([], "0 entries, allowed are 1 to 256"), (["a"] * 257, "257 entries"), (["a", "b c"], "request_id='b c'")],
)
def test_bad_abort(server, ids, said):
  with pytest.raises(grpc.RpcError, match=said) as caught:
    server.generation.Abort(pb.AbortRequest(request_ids=ids))
  assert caught.value.code() is INVALID


def test_bad_tokenize_and_detokenize(server):
  for request, said in ((pb.TokenizeRequest(), "prompt is missing"), (pb.TokenizeRequest(text=""), "prompt is empty")):
    with pytest.raises(grpc.RpcError, match=said):
      server.generation.Tokenize(request)
  for token_id in (-1, 400, 2**31 - 1):
    with pytest.raises(grpc.RpcError, match=f"token_ids={token_id} is not allowed: .* 0 to 399"):
      server.generation.Detokenize(pb.DetokenizeRequest(token_ids=[7, token_id]))


@pytest.mark.parametrize(
  "fields, said",
  [
    ({"text": "hello"}, "prompt.text needs a tokenizer"),
    ({"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])}, "prompt.chat needs a tokenizer"),
    (stopping(stop=["x"]), "stopping.stop needs a tokenizer"),
    (output(return_text=True), "output.return_text needs a tokenizer"),
  ],
)
def test_a_model_without_a_tokenizer(textless, fields, said):
  with pytest.raises(grpc.RpcError, match=said + ", and the served model has none; send and request") as caught:
    generate(textless, **fields)
  assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
  assert reason_of(caught.value) == "NO_TOKENIZER"
  with pytest.raises(grpc.RpcError, match="Detokenize needs a tokenizer"):
    textless.generation.Detokenize(pb.DetokenizeRequest(token_ids=[1]))


def test_a_model_without_a_tokenizer_serves_ids(textless):
  messages = generate(textless, token_ids=IDS, stopping=pb.StopParams(max_tokens=5, ignore_eos=True))
  assert sum(len(delta.token_ids) for message in messages for delta in message.deltas) == 5
  assert not any(delta.text for message in messages for delta in message.deltas)
  info = textless.model.GetModelInfo(pb.GetModelInfoRequest())
  assert not info.has_tokenizer and not info.has_chat_template


@pytest.mark.catalogue("H6")
def test_our_own_mistakes_stay_inside(server, monkeypatch, caplog):
  def broken(*_, **__):
    raise ValueError("secret of ours")

  monkeypatch.setattr(server.generations, "start_generation", broken)
  for method in ("Generate", "GenerateUnary"):
    with pytest.raises(grpc.RpcError, match="internal error, incident [0-9a-f]{8} in the server's log") as caught:
      list(getattr(server.generation, method)(pb.GenerateRequest(token_ids=IDS)))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert reason_of(caught.value) == "INTERNAL"
    assert "secret" not in str(caught.value)
  assert caplog.text.count("ValueError: secret of ours") == 2


UNKNOWN = pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=2)).SerializeToString()
UNKNOWN += b"\xa0\x06\x01" + b"\x42\x03\xf8\x06\x01"  # field 100 of the request, 111 of its output parameters


@pytest.mark.catalogue("E7")
@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
def test_unknown_fields_are_named(server, method):
  call = server.channel.stream_stream(f"/sluice.v1.GenerationService/{method}")(iter([UNKNOWN]), timeout=30)
  assert list(call)
  ignored = dict(call.trailing_metadata())["x-sluice-ignored-fields"]
  assert ignored == "sluice.v1.GenerateRequest.100,sluice.v1.OutputParams.111"
  known = server.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=2)))
  list(known)
  assert "x-sluice-ignored-fields" not in dict(known.trailing_metadata())


CHOICES = {
  "SamplingParams": b"\x32\x03\xf8\x06\x01",
  "StopParams": b"\x3a\x03\xf8\x06\x01",
  "OutputConstraint": b"\x4a\x03\xf8\x06\x01",
  "ChatPrompt": b"\x2a\x03\xf8\x06\x01",
}


@pytest.mark.catalogue("E7")
@pytest.mark.parametrize("message", CHOICES)
def test_unknown_fields_that_change_the_output_are_refused(server, message):
  """Field 111, perhaps of a later proto: what it asks for would be missing from the output."""
  request = pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=2)).SerializeToString()
  for method in ("Generate", "GenerateUnary"):
    with pytest.raises(grpc.RpcError) as caught:
      list(
        server.channel.stream_stream(f"/sluice.v1.GenerationService/{method}")(
          iter([request + CHOICES[message]]), timeout=30
        )
      )
    assert (caught.value.code(), caught.value.details()) == (
      INVALID,
      f"sluice.v1.{message}.111 is not a field that this server knows: leave it out",
    )


OTHERS = {
  "Tokenize": pb.TokenizeRequest(text="the"),
  "Detokenize": pb.DetokenizeRequest(token_ids=[7]),
  "Abort": pb.AbortRequest(request_ids=["nobody"]),
}


@pytest.mark.catalogue("E7")
@pytest.mark.parametrize("method", OTHERS)
def test_unknown_fields_of_the_other_methods_are_named(server, method):
  call = server.channel.stream_stream(f"/sluice.v1.GenerationService/{method}")
  raw = OTHERS[method].SerializeToString()
  for sent, ignored in ((raw, None), (raw + b"\xa0\x06\x01", f"sluice.v1.{method}Request.100")):
    answer = call(iter([sent]), timeout=30)
    assert len(list(answer)) == 1
    assert dict(answer.trailing_metadata()).get("x-sluice-ignored-fields") == ignored


@pytest.mark.catalogue("E7")
def test_unknown_fields_are_refused_where_that_is_wished(tokenizer):
  with running(tokenizer, host=HostOptions(strict_requests=True)) as served:
    with pytest.raises(grpc.RpcError, match="sluice.v1.GenerateRequest.100 is not a field that this server") as caught:
      list(served.channel.unary_stream("/sluice.v1.GenerationService/Generate")(UNKNOWN, timeout=30))
    assert caught.value.code() is INVALID
    field = detail_of(caught.value, error_details_pb2.BadRequest).field_violations[0].description
    assert field == caught.value.details()
    for method, request in OTHERS.items():
      call = served.channel.unary_unary(f"/sluice.v1.GenerationService/{method}")
      call(request.SerializeToString(), timeout=30)
      with pytest.raises(grpc.RpcError) as caught:
        call(request.SerializeToString() + b"\xa0\x06\x01", timeout=30)
      assert (caught.value.code(), caught.value.details()) == (
        INVALID,
        f"sluice.v1.{method}Request.100 is not a field that this server knows: leave it out",
      )
    generate(
      served, token_ids=IDS, sampling=pb.SamplingParams(logit_bias={7: 1.0}), stopping=pb.StopParams(max_tokens=2)
    )


EDGES = {
  "temperature": (-0.0, 1e-45, 1e-30, 100.0),
  "top_p": (1e-45, 1.0),
  "top_k": (0, 1, 2**31 - 1),
  "min_p": (-0.0, 1e-45, 1.0),
  "frequency_penalty": (-2.0, 2.0),
  "presence_penalty": (-2.0, 2.0),
  "repetition_penalty": (1e-45, 1.0),
  "seed": (-(2**63), 0, 2**63 - 1),
  "n": (1, 16),
}


def test_values_at_the_edges_are_served(server):
  """On the line is inside; the fake device draws no conclusions from them, the sampler's own tests do."""
  for name, values in EDGES.items():
    for value in values:
      messages = generate(
        server, **sampling(**{name: value}) | {"stopping": pb.StopParams(max_tokens=2, ignore_eos=True)}
      )
      assert endings_of(messages)[-1].last, (name, value)


@pytest.mark.catalogue("E9")
def test_pairs_of_all_parameters(server):
  """Every value of every parameter beside every value of every other: each is served, and to its end."""
  choices = {
    ("sampling", "temperature"): (0.0, 1.5),
    ("sampling", "top_p"): (0.5, 1.0),
    ("sampling", "top_k"): (0, 5),
    ("sampling", "min_p"): (0.0, 0.2),
    ("sampling", "frequency_penalty"): (0.0, 1.0),
    ("sampling", "presence_penalty"): (0.0, -1.0),
    ("sampling", "repetition_penalty"): (1.0, 1.3),
    ("sampling", "seed"): (None, -5),
    ("sampling", "n"): (1, 3),
    ("sampling", "logit_bias"): ({}, {7: -100.0, 399: 100.0}),
    ("sampling", "allowed_token_ids"): (None, pb.TokenIds(ids=[7, 8, 300])),
    ("stopping", "max_tokens"): (1, 6),
    ("stopping", "min_tokens"): (0, 1),
    ("stopping", "stop"): ((), ("a", "the")),
    ("stopping", "stop_token_ids"): ((), (9, 10)),
    ("stopping", "ignore_eos"): (False, True),
    ("output", "logprobs"): (None, 20),
    ("output", "prompt_logprobs"): (None, 3),
    ("output", "return_text"): (False, True),
    ("output", "return_token_ids"): (False, True),
    ("output", "skip_special_tokens"): (False, True),
  }
  wanted = {
    frozenset(((one, i), (other, j)))
    for one, other in itertools.combinations(choices, 2)
    for i in range(2)
    for j in range(2)
  }
  rng = random.Random(5)
  while wanted:
    picks = {name: rng.randrange(2) for name in choices}
    for (one, i), (other, j) in (tuple(pair) for pair in itertools.islice(wanted, 1)):
      picks[one], picks[other] = i, j
    wanted -= {frozenset(pair) for pair in itertools.combinations(picks.items(), 2)}
    fields = {}
    for (group, name), pick in picks.items():
      if choices[group, name][pick] is not None:
        fields.setdefault(group, {})[name] = choices[group, name][pick]
    messages = generate(
      server,
      token_ids=IDS,
      sampling=pb.SamplingParams(**fields["sampling"]),
      stopping=pb.StopParams(**fields["stopping"]),
      output=pb.OutputParams(**fields["output"]),
    )
    assert len(endings_of(messages)) == fields["sampling"]["n"] and endings_of(messages)[-1].last, fields
  assert server.engine.num_live == 0


@pytest.mark.catalogue("E3")
def test_prompts_of_nothing_but_blanks_or_bos_are_served(server):
  few = pb.StopParams(max_tokens=2, ignore_eos=True)
  for prompt in ({"text": "   \n\t"}, {"text": "\0"}, {"text": "<|bos|>"}, {"token_ids": pb.TokenIds(ids=[1])}):
    assert endings_of(generate(server, stopping=few, **prompt))[-1].last
  both = pb.GenerateRequest(text="the", stopping=few).SerializeToString()
  both += pb.GenerateRequest(token_ids=IDS).SerializeToString()
  (first, *_) = server.channel.unary_stream("/sluice.v1.GenerationService/Generate")(both, timeout=30)
  assert pb.GenerateResponse.FromString(first).started.num_prompt_tokens == 3, "of a oneof the last one counts"


@pytest.mark.catalogue("H8")
def test_reflection_may_be_off(tokenizer):
  with running(tokenizer, host=HostOptions(enable_reflection=False)) as served:
    for version in ("v1", "v1alpha"):
      with pytest.raises(grpc.RpcError, match="is not served here") as caught:
        list(
          served.channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")(iter([b""]))
        )
      assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
