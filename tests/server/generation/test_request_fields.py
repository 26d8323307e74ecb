"""Table E of the catalogue: every scalar, id and list at and beyond its limits, over gRPC and over HTTP.

Each refusal has its exact status and message, and nothing was queued for it; each value on the line is served.
"""

from collections.abc import Iterator
import math
from typing import Any

from google.rpc import error_details_pb2
import grpc
import httpx
import pytest

from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.harness import Served, detail_of, endings_of, generate, reason_of, running

NAN, INF = math.nan, math.inf
IDS = [7, 8, 9]
VOCAB = 400
GROUPS = {"max_tokens": "stopping", "min_tokens": "stopping", "logprobs": "output", "prompt_logprobs": "output"}


@pytest.fixture(scope="module")
def server(tokenizer) -> Iterator[Served]:
  """One server for all: after every bad request it must still serve."""
  with running(tokenizer, host=HostOptions(http_port=0)) as served:
    yield served
    assert endings_of(generate(served, token_ids=pb.TokenIds(ids=IDS), stopping=pb.StopParams(max_tokens=5)))[-1].last


@pytest.fixture(scope="module")
def http(server) -> Iterator[httpx.Client]:
  with httpx.Client(base_url=f"http://127.0.0.1:{server.host.http_port}", timeout=30) as client:
    yield client


def refused_by_grpc(server: Served, message: str, field: str, **fields: Any) -> None:
  for method in (server.generation.Generate, server.generation.GenerateUnary):
    with pytest.raises(grpc.RpcError) as caught:
      list(method(pb.GenerateRequest(**fields), timeout=30))
    error = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)
    assert reason_of(error) in ("INVALID_REQUEST", "REQUEST_TOO_LONG")
    (violation,) = detail_of(error, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == (field, message)
  assert server.engine.num_live == 0


def refused_by_http(
  server: Served, http: httpx.Client, message: str, param: str | None, body: Any, path: str = "/v1/completions"
) -> None:
  sent = {"content": body} if isinstance(body, bytes) else {"json": body}
  answer = http.post(path, headers={"content-type": "application/json"}, **sent)
  assert answer.status_code == 400, answer.text
  error = answer.json()["error"]
  assert (error["message"], error["param"]) == (message, param)
  assert error["type"] == "invalid_request_error"
  assert error["code"] in (None, "context_length_exceeded")
  assert server.engine.num_live == 0


def grpc_fields(name: str, value: Any) -> dict[str, Any]:
  """A request in which one parameter has this value."""
  group = GROUPS.get(name, "sampling")
  message = {"stopping": pb.StopParams, "output": pb.OutputParams, "sampling": pb.SamplingParams}[group]
  return {"token_ids": pb.TokenIds(ids=IDS), group: message(**{name: value})}


# E1: numbers. A float travels in 32 bits, so the values are such that have these.
NUMBERS = {
  "temperature": ("from 0 to 100", (-0.5, 100.5, -1e-45), (-0.0, 1e-45, 1e-30, 100.0)),
  "top_p": ("above 0 to 1", (0.0, -0.0, -0.5, 1.5), (1e-45, 1e-30, 1.0)),
  "min_p": ("from 0 to 1", (-0.5, 1.5, -1e-45), (-0.0, 1e-45, 1.0)),
  "presence_penalty": ("from -2 to 2", (-2.5, 2.5), (-2.0, -0.0, 1e-45, 2.0)),
  "frequency_penalty": ("from -2 to 2", (-2.5, 2.5), (-2.0, -0.0, 1e-45, 2.0)),
  "repetition_penalty": ("above 0 to 100", (0.0, -0.0, -1.5, 100.5), (1e-45, 1e-30, 1.0, 100.0)),
}
BAD_NUMBERS = [(name, value) for name, (_, bad, _) in NUMBERS.items() for value in (*bad, NAN, INF, -INF)]
GOOD_NUMBERS = [(name, value) for name, (_, _, good) in NUMBERS.items() for value in good]


@pytest.mark.catalogue("E1")
@pytest.mark.parametrize("name, value", BAD_NUMBERS)
def test_numbers_beyond_their_limits_over_grpc(server, name, value):
  fields = grpc_fields(name, value)
  value = getattr(fields["sampling"], name)  # as it arrives
  message = f"{name}={value!r} is not allowed: send a finite number {NUMBERS[name][0]}"
  refused_by_grpc(server, message, name, **fields)


@pytest.mark.catalogue("E1")
@pytest.mark.parametrize("name, value", BAD_NUMBERS)
def test_numbers_beyond_their_limits_over_http(server, http, name, value):
  # JSON has no NaN, and no number beyond a float's.
  text = repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "1e999" if value > 0 else "-1e999"
  body = f'{{"prompt":[7],"{name}":{text}}}'.encode()
  if not math.isfinite(value):
    error = http.post("/v1/completions", content=body, headers={"content-type": "application/json"}).json()["error"]
    assert error["param"] == "body" and "send one JSON object in UTF-8, with finite numbers" in error["message"]
    return
  arrives = getattr(pb.SamplingParams(**{name: value + 0.0}), name)  # -0.0 arrives as 0
  message = f"{name}={arrives!r} is not allowed: send a finite number {NUMBERS[name][0]}"
  refused_by_http(server, http, message, name, body)


@pytest.mark.catalogue("E1")
def test_numbers_on_their_limits_are_served(server, http):
  few = pb.StopParams(max_tokens=2, ignore_eos=True)
  for name, value in GOOD_NUMBERS:
    assert endings_of(generate(server, **grpc_fields(name, value), stopping=few))[-1].last, (name, value)
    body = {"prompt": IDS, "max_tokens": 2, "ignore_eos": True, name: value}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2, (name, value)


# E2: whole numbers. What 32 bits cannot hold can only be sent over HTTP.
WHOLE = {
  "top_k": ("from 0 to 2147483647", (-2, -(2**31)), (0, 1, 2**31 - 1)),
  "n": ("from 1 to 16", (0, -1, 17, 2**31 - 1, -(2**31)), (1, 16)),
  "max_tokens": ("from 1 to 2147483647", (0, -1, -(2**31)), (1, 509)),
  "min_tokens": ("from 0 to 256", (-1, 257, 2**31 - 1), (0, 256)),
  "logprobs": ("from 0 to 20", (-1, 21, 2**31 - 1), (0, 20)),
  "prompt_logprobs": ("from 0 to 20", (-1, 21, 2**31 - 1), (0, 20)),
  "seed": ("", (), (-(2**63), -1, 0, 2**63 - 1)),
}
BAD_WHOLE = [(name, value) for name, (_, bad, _) in WHOLE.items() for value in bad]
GOOD_WHOLE = [(name, value) for name, (_, _, good) in WHOLE.items() for value in good]
OVER_HTTP = [name for name in WHOLE if name != "prompt_logprobs"]


@pytest.mark.catalogue("E2")
@pytest.mark.parametrize("name, value", BAD_WHOLE)
def test_whole_numbers_beyond_their_limits_over_grpc(server, name, value):
  message = f"{name}={value} is not allowed: send a whole number {WHOLE[name][0]}"
  refused_by_grpc(server, message, name, **grpc_fields(name, value))


@pytest.mark.catalogue("E2")
@pytest.mark.parametrize("name, value", [pair for pair in BAD_WHOLE if pair[0] in OVER_HTTP])
def test_whole_numbers_beyond_their_limits_over_http(server, http, name, value):
  limits = WHOLE[name][0] if name != "min_tokens" else "from 0 to 16"  # the default of max_tokens here
  message = f"{name}={value} is not allowed: send a whole number {limits}"
  refused_by_http(server, http, message, name, {"prompt": IDS, name: value})


@pytest.mark.catalogue("E2", "E8")
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63, 2**64, 10**29, 10**30, 10**4000])
@pytest.mark.parametrize("name", OVER_HTTP)
def test_whole_numbers_of_too_many_bits(server, http, name, value):
  bits = 64 if name == "seed" else 32
  shown = value if value < 10**30 else "1" + 29 * "0" + "..."
  message = f"{name}={shown} is not allowed: send a whole number that fits into {bits} bits"
  if name == "seed" and -(2**63) <= value < 2**63:
    answer = http.post("/v1/completions", json={"prompt": IDS, name: value, "max_tokens": 1})
    assert answer.status_code == 200
  else:
    refused_by_http(server, http, message, name, {"prompt": IDS, name: value})


@pytest.mark.catalogue("E2")
def test_whole_numbers_on_their_limits_are_served(server, http):
  for name, value in GOOD_WHOLE:
    fields = grpc_fields(name, value)
    if "stopping" not in fields:
      fields["stopping"] = pb.StopParams(max_tokens=2)
    assert endings_of(generate(server, **fields))[-1].last, (name, value)
    if name in OVER_HTTP:
      body = {"prompt": IDS, "max_tokens": 256 if name == "min_tokens" else 2, name: value}
      assert http.post("/v1/completions", json=body).status_code == 200, (name, value)
  assert http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 2, "top_k": -1}).status_code == 200


@pytest.mark.catalogue("E2", "C3")
@pytest.mark.parametrize("max_tokens", [510, 2**31 - 1])
def test_more_tokens_than_the_model_takes(server, http, max_tokens):
  message = (
    f"prompt of 3 tokens plus max_tokens={max_tokens} is {max_tokens + 3}, but the maximum context length is 512 "
    "tokens; shorten the prompt or lower max_tokens"
  )
  refused_by_grpc(server, message, "prompt", **grpc_fields("max_tokens", max_tokens))
  refused_by_http(server, http, message, "prompt", {"prompt": IDS, "max_tokens": max_tokens})


# E1, E2: other types than numbers, in every field.
KINDS = {"a string": "1", "a boolean": True, "a list": [1], "an object": {"a": 1}}


@pytest.mark.catalogue("E1", "E2", "E8")
@pytest.mark.parametrize("name", [*NUMBERS, *OVER_HTTP, "priority"])
def test_fields_of_other_types(server, http, name):
  wanted = "a number" if name in NUMBERS else "a whole number"
  for kind, value in KINDS.items():
    refused_by_http(server, http, f"{name} is {kind}: send {wanted}", name, {"prompt": IDS, name: value})
  if name not in NUMBERS:
    refused_by_http(server, http, f"{name} is a number: send {wanted}", name, {"prompt": IDS, name: 1.5})


# E3: prompts.


@pytest.mark.catalogue("E3")
@pytest.mark.parametrize(
  "fields, body, message, field",
  [
    ({}, None, "prompt is missing: send text, token_ids or chat", "prompt"),
    ({"text": ""}, {"prompt": ""}, "prompt is empty: send at least one character", "prompt"),
    (
      {"token_ids": pb.TokenIds()},
      {"prompt": [[]]},
      "prompt is empty; send at least one token",
      "prompt",
    ),
    (
      {"chat": pb.ChatPrompt()},
      None,
      "chat.messages=[] is empty: send at least one message",
      "chat.messages",
    ),
  ],
)
def test_prompts_of_nothing(server, http, fields, body, message, field):
  refused_by_grpc(server, message, field, **fields)
  if body is not None:
    refused_by_http(server, http, message, field, body)


@pytest.mark.catalogue("E3")
def test_prompts_of_nothing_over_http_alone(server, http):
  wanted = "send a string, a list of strings, a list of token ids, or a list of lists of token ids"
  refused_by_http(server, http, f"prompt is missing: {wanted}", "prompt", {})
  refused_by_http(server, http, f"prompt is missing: {wanted}", "prompt", {"prompt": None})
  refused_by_http(server, http, f"prompt is an empty list: {wanted}", "prompt", {"prompt": []})
  chat = "/v1/chat/completions"
  refused_by_http(
    server, http, "messages is missing: send a list of messages with role and content", "messages", {}, chat
  )
  refused_by_http(server, http, "messages=[] is empty: send at least one message", "messages", {"messages": []}, chat)


@pytest.mark.catalogue("E3")
@pytest.mark.parametrize("text", [" ", "\t\n ", "\u3000", "\0", "<|bos|>"])
def test_prompts_of_blanks_or_bos_alone_are_served(server, http, text):
  few = pb.StopParams(max_tokens=2, ignore_eos=True)
  assert endings_of(generate(server, text=text, stopping=few))[-1].last
  body = {"prompt": text, "max_tokens": 2, "ignore_eos": True}
  assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
  chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "ignore_eos": True}
  assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 2


# E4: token ids, in every place that takes some.
BAD_IDS = (-1, VOCAB, 2**31 - 1, -(2**31))
PLACES = {
  "prompt": (
    lambda i: {"token_ids": pb.TokenIds(ids=[7, i])},
    lambda i: {"prompt": [7, i]},
    "prompt token id {} is not in the vocabulary; ids of this model are 0 to 399",
  ),
  "logit_bias": (
    lambda i: grpc_fields("logit_bias", {i: 1.0}),
    lambda i: {"prompt": IDS, "logit_bias": {str(i): 1}},
    "logit_bias={} is not allowed: token ids of this model are 0 to 399",
  ),
  "allowed_token_ids": (
    lambda i: grpc_fields("allowed_token_ids", pb.TokenIds(ids=[7, i])),
    lambda i: {"prompt": IDS, "allowed_token_ids": [7, i]},
    "allowed_token_ids={} is not allowed: token ids of this model are 0 to 399",
  ),
  "stop_token_ids": (
    lambda i: {"token_ids": pb.TokenIds(ids=IDS), "stopping": pb.StopParams(stop_token_ids=[7, i])},
    lambda i: {"prompt": IDS, "stop_token_ids": [7, i]},
    "stop_token_ids={} is not allowed: token ids of this model are 0 to 399",
  ),
}


@pytest.mark.catalogue("E4")
@pytest.mark.parametrize("token_id", BAD_IDS)
@pytest.mark.parametrize("place", PLACES)
def test_ids_outside_the_vocabulary(server, http, place, token_id):
  fields, body, message = PLACES[place]
  refused_by_grpc(server, message.format(token_id), place, **fields(token_id))
  refused_by_http(server, http, message.format(token_id), place, body(token_id))


@pytest.mark.catalogue("E4")
@pytest.mark.parametrize("token_id", [2**31, 2**32 + 7, -(2**31) - 1, 10**25])
@pytest.mark.parametrize("place", PLACES)
def test_ids_of_more_than_32_bits(server, http, place, token_id):
  """None of them may wrap around into the vocabulary: 2**32 + 7 is not 7."""
  where, what = (place, " has a key that") if place == "logit_bias" else (f"{place}[1]", f"={token_id}")
  message = f"{where}{what} is not allowed: send a whole number that fits into 32 bits"
  refused_by_http(server, http, message, where, PLACES[place][1](token_id))


@pytest.mark.catalogue("E4")
@pytest.mark.parametrize("token_id", BAD_IDS)
def test_ids_outside_the_vocabulary_elsewhere(server, http, token_id):
  said = "is not allowed: token ids of this model are 0 to 399"
  with pytest.raises(grpc.RpcError) as caught:
    server.generation.Detokenize(pb.DetokenizeRequest(token_ids=[7, token_id]), timeout=30)
  assert (caught.value.code(), caught.value.details()) == (
    grpc.StatusCode.INVALID_ARGUMENT,
    f"token_ids={token_id} {said}",
  )
  refused_by_http(server, http, f"tokens={token_id} {said}", "tokens", {"tokens": [7, token_id]}, "/detokenize")
  for prompt in ([7, token_id], [[7], [token_id]]):
    refused_by_http(server, http, f"prompt={token_id} {said}", "prompt", {"prompt": prompt, "echo": True})


@pytest.mark.catalogue("E4")
def test_the_last_id_of_the_vocabulary_is_one_of_it(server, http):
  """Also where the tokenizer has fewer: rows that pad the vocabulary exist in the weights."""
  last = VOCAB - 1
  for fields, body, _ in PLACES.values():
    few = pb.StopParams(max_tokens=2)
    request = pb.GenerateRequest(**fields(last))
    request.stopping.MergeFrom(few)
    assert server.generation.GenerateUnary(request, timeout=30).completions[0].finished.last
    assert http.post("/v1/completions", json=body(last) | {"max_tokens": 2}).status_code == 200


# E5: stop strings.
STOPS = {
  "17": (list("abcdefghijklmnopq"), "stop has 17 strings, the limit is 16: send fewer", "stop"),
  "10 000": (["x"] * 10_000, "stop has 10000 strings, the limit is 16: send fewer", "stop"),
  "empty": (["a", ""], "stop[1] has 0 bytes, allowed are 1 to 256: leave it out or shorten it", "stop[1]"),
  "10 kB": (["x" * 10_000], "stop[0] has 10000 bytes, allowed are 1 to 256: leave it out or shorten it", "stop[0]"),
  "characters of 4 bytes": (
    ["\U0001f600" * 65],
    "stop[0] has 260 bytes, allowed are 1 to 256: leave it out or shorten it",
    "stop[0]",
  ),
}


@pytest.mark.catalogue("E5")
@pytest.mark.parametrize("name", STOPS)
def test_stop_strings_beyond_their_limits(server, http, name):
  stops, message, field = STOPS[name]
  fields = {"token_ids": pb.TokenIds(ids=IDS), "stopping": pb.StopParams(stop=stops)}
  refused_by_grpc(server, message, field, **fields)
  refused_by_http(server, http, message, field, {"prompt": IDS, "stop": stops})


@pytest.mark.catalogue("E5")
def test_stop_strings_that_are_no_text(server, http):
  raw = pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), stopping=pb.StopParams(stop=["ab"])).SerializeToString()
  raw = raw.replace(b"ab", b"\xff\xfe")
  with pytest.raises(grpc.RpcError) as caught:
    list(server.channel.unary_stream("/sluice.v1.GenerationService/Generate")(raw, timeout=30))
  assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason_of(caught.value) == "MALFORMED_REQUEST"
  refused_by_http(
    server,
    http,
    "body is not JSON that can be taken: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte; send "
    "one JSON object in UTF-8, with finite numbers",
    "body",
    b'{"prompt":[7],"stop":["\xff\xfe"]}',
  )
  message = (
    "body is not JSON that can be taken: Input data was truncated; send one JSON object in UTF-8, with finite numbers"
  )
  refused_by_http(server, http, message, "body", b'{"prompt":[7],"stop":["\\ud800"]}')
  wanted = "send a string or a list"
  for value, kind in ((3, "a whole number"), ({}, "an object"), (True, "a boolean")):
    refused_by_http(server, http, f"stop is {kind}: {wanted}", "stop", {"prompt": IDS, "stop": value})
  refused_by_http(
    server, http, "stop[1] is a whole number: send a string", "stop[1]", {"prompt": IDS, "stop": ["a", 3]}
  )


@pytest.mark.catalogue("E5")
def test_stop_strings_on_their_limits_and_overlapping_are_served(server, http):
  for stops in (["x" * 256], ["\U0001f600" * 64], list("abcdefghijklmnop"), ["aa", "aaa", "a", "aa"], ["\0", "\n"]):
    few = pb.StopParams(max_tokens=3, stop=stops, ignore_eos=True)
    assert endings_of(generate(server, token_ids=pb.TokenIds(ids=IDS), stopping=few))[-1].last
    body = {"prompt": IDS, "max_tokens": 3, "stop": stops, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200


# E6: what an output must look like. Kind of constraint (over HTTP a schema is called json), its text, what is said.
FOLLOWED = "is not one that can be followed"
TOO_MUCH = f"{FOLLOWED}: it allows no output, or one that takes more work than is allowed; simplify it"
CONSTRAINTS = {
  "not JSON": (
    "json_schema",
    "{'a': 1}",
    "is not JSON: Expecting property name enclosed in double quotes at line 1, column 2; send the text of a JSON "
    "schema",
  ),
  "1 MB": ("json_schema", " " * (1 << 20), "has 1048576 bytes, allowed are 1 to 32768: send a shorter one"),
  "no such type": (
    "json_schema",
    '{"type": "objekt"}',
    f"{FOLLOWED}: Invalid type: objekt; correct or simplify it",
  ),
  "a reference to itself": ("json_schema", '{"$ref": "#"}', TOO_MUCH),
  "references in a circle": (
    "json_schema",
    '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
    TOO_MUCH,
  ),
  "65 levels": (
    "json_schema",
    '{"items":' * 64 + "{}" + "}" * 64,
    "is nested too deeply: it has more than 64 levels; send a flatter schema",
  ),
  "lookaround": (
    "regex",
    "(?=a)b",
    f"{FOLLOWED}: look-around, including look-ahead and look-behind, is not supported; correct or simplify it",
  ),
  "back reference": ("regex", r"(a)\1", f"{FOLLOWED}: backreferences are not supported; correct or simplify it"),
  "open group": ("regex", "(", f"{FOLLOWED}: unclosed group; correct or simplify it"),
  "long expression": ("regex", "a" * 8193, "has 8193 bytes, allowed are 1 to 8192: send a shorter one"),
  "deep expression": (
    "regex",
    "(" * 4000 + ")" * 4000,
    f"{FOLLOWED}: exceed the maximum number of nested parentheses/brackets (250); correct or simplify it",
  ),
  "unknown rule": ("grammar", 'start: "a" b', f'{FOLLOWED}: at 1(8): unknown name: "b"; correct or simplify it'),
  "a rule that is itself": ("grammar", "start: start", TOO_MUCH),
}


@pytest.mark.catalogue("E6")
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_that_cannot_be_followed(server, http, name):
  refused_constraint(server, http, *CONSTRAINTS[name])


def refused_constraint(server, http, kind: str, text: str, said: str) -> None:
  """Over both protocols, with the field and the same words."""
  wanted = pb.OutputConstraint(**{kind: text})
  message, field = f"constraint.{kind} {said}", f"constraint.{kind}"
  refused_by_grpc(server, message, field, token_ids=pb.TokenIds(ids=IDS), constraint=wanted)
  name = "json" if kind == "json_schema" else kind
  field = f"structured_outputs.{name}"
  refused_by_http(server, http, f"{field} {said}", field, {"prompt": IDS, "structured_outputs": {name: text}})


def counted(times: int, where: str = "") -> str:
  return (
    f"has a count of {times}{where} (nested ones multiply), the limit is 100000: send a smaller one, or none for any "
    "number"
  )


# Counts that nothing could follow, in every kind of constraint that has them.
COUNTS = {
  "a bound": ("regex", "a{1,1000000000}", counted(10**9)),
  "a lower bound": ("regex", "[ab]{1000000000,}", counted(10**9)),
  "nested bounds": ("regex", "((a{1,1000}){1,1000}){1,1000}", counted(10**9)),
  "one more than the limit": ("regex", "x?a{100001}", counted(100_001)),
  "a pattern": (
    "json_schema",
    '{"items": {"pattern": "^a{1,1000000000}$"}}',
    counted(10**9, " in pattern"),
  ),
  "a pattern of names": (
    "json_schema",
    '{"patternProperties": {"(a{1000}){1000}": {}}}',
    counted(10**6, " in patternProperties"),
  ),
  "a shortest text": ("json_schema", '{"minLength": 1000000000}', counted(10**9, " in minLength")),
  "endlessly many items": ("json_schema", '{"minItems": 1e999}', counted(10**12, " in minItems")),
  "a rule": ("grammar", 'start: "a"{1,1000000000}', counted(10**9)),
  "a rule, in another way": ("grammar", 'start: "a" ~ 1 .. 1000000000', counted(10**9)),
  "an expression in a rule": ("grammar", "start: A\nA: /a{1000000000}/", counted(10**9)),
  "nested in an expression": ("grammar", "start: /(a{1,1000}){1000}/", counted(10**6)),
  "behind a text": ("grammar", 'start: "{1}"{1000000}', counted(10**6)),
  "behind a class": ("regex", "[+-[]{1000000}", counted(10**6)),
  "GBNF": ("grammar", 'root ::= "a"{1000000000}', counted(10**9)),
  "GBNF, behind a text": ("grammar", 'root ::= "{1}"{1000000} # {1}', counted(10**6)),
}


@pytest.mark.catalogue("E6")
@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_nothing_could_follow(server, http, name):
  refused_constraint(server, http, *COUNTS[name])


@pytest.mark.catalogue("E6")
@pytest.mark.parametrize(
  "kind, text",
  [
    ("regex", "[ab]{0,100000}"),
    ("regex", "(a+)+$"),
    ("regex", "(a|aa)+b"),
    ("regex", "(.*a){20}"),
    ("regex", r"[{1000000}]+\{1000000}"),
    ("grammar", 'start: "{1000000}" /[{1000000}]+/ // {1000000}'),
    ("grammar", 'root ::= "{1000000}" [{1000000}]+ # {1000000}'),
    ("regex", "(.*a.{4000}b)+"),
    ("json_schema", '{"type": "array", "items": {"$ref": "#"}}'),
    ("json_schema", '{"type": "string", "maxLength": 2147483647}'),
    ("json_schema", '{"type": "array", "items": {"type": "string", "pattern": "^a+$"}, "maxItems": 2147483647}'),
  ],
)
def test_constraints_that_would_be_bombs_elsewhere_are_served(server, http, kind, text):
  """Nothing backtracks here: see test_hostile_grammars for what they may cost at most."""
  wanted = pb.OutputConstraint(**{kind: text})
  few = pb.StopParams(max_tokens=3)
  assert endings_of(generate(server, token_ids=pb.TokenIds(ids=IDS), constraint=wanted, stopping=few))[-1].last
  body = {"prompt": IDS, "max_tokens": 3, "structured_outputs": {"json" if kind == "json_schema" else kind: text}}
  assert http.post("/v1/completions", json=body).status_code == 200


# E7: names.


@pytest.mark.catalogue("E7")
def test_another_model(server, http):
  message = "model='gpt' is not served here; send 'tiny', or leave it empty"
  with pytest.raises(grpc.RpcError) as caught:
    server.generation.GenerateUnary(pb.GenerateRequest(model="gpt", token_ids=pb.TokenIds(ids=IDS)), timeout=30)
  assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, message)
  assert reason_of(caught.value) == "MODEL_NOT_FOUND"
  for path, body in (
    ("/v1/completions", {"prompt": IDS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [7]}),
  ):
    answer = http.post(path, json=body | {"model": "gpt"})
    assert answer.status_code == 404
    assert answer.json()["error"] == {
      "message": message,
      "type": "invalid_request_error",
      "param": None,
      "code": "model_not_found",
    }
  assert http.get("/v1/models/gpt").status_code == 404
