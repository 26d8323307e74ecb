"""Outputs that must look like something: they do, whatever is drawn; and nobody beside them notices."""

from collections.abc import Callable
import dataclasses
import json
import pathlib
import re
import resource
from typing import Any

import grpc
import pytest

from engine.constraint import ConstraintFailed
from engine.errors import InvalidRequest
from engine.request import Request
from engine.sampling_params import SamplingParams
from server.proto import sluice_pb2 as pb
from server.text import constraint_compiler
from server.text.grammar_cache import GrammarCache
from tests.fakes import oracle, tokens_of
from tests.server.harness import END, endings_of, generate, reason_of, running, text_of, token_ids_of
from tools.chaos.server.books import check_scheduler

PROMPT = pb.TokenIds(ids=[7, 8, 9])
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def is_person(value: Any) -> bool:
  return (
    list(value) == ["name", "age", "tags"]
    and re.fullmatch("[A-Z][a-z]{1,8}", value["name"]) is not None
    and type(value["age"]) is int
    and 0 <= value["age"] <= 150
    and isinstance(value["tags"], list)
    and len(value["tags"]) <= 3
    and all(tag in ("a", "b", "c d") for tag in value["tags"])
  )


def is_tree(value: Any) -> bool:
  return set(value) <= {"value", "left"} and type(value["value"]) is bool and is_leaf_or_tree(value.get("left"))


def is_leaf_or_tree(value: Any) -> bool:
  return value is None or is_tree(value)


PERSON = {
  "type": "object",
  "properties": {
    "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["a", "b", "c d"]}, "maxItems": 3},
  },
  "required": ["name", "age", "tags"],
  "additionalProperties": False,
}
TREE = {
  "$ref": "#/$defs/node",
  "$defs": {
    "node": {
      "type": "object",
      "properties": {"value": {"type": "boolean"}, "left": {"$ref": "#/$defs/node"}},
      "required": ["value"],
      "additionalProperties": False,
    }
  },
}
SCHEMAS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
  "person": (PERSON, is_person),
  "tree": (TREE, is_tree),
  "text": ({"type": "string", "maxLength": 12}, lambda value: isinstance(value, str) and len(value) <= 12),
  "choice": (
    {"anyOf": [{"const": "x\u00e9\U0001f600"}, {"type": "null"}]},
    lambda value: value in (None, "x\u00e9\U0001f600"),
  ),
  "pair": (
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1, 2]}], "minItems": 2, "maxItems": 2},
    lambda value: type(value[0]) is bool and value[1] in (1, 2) and len(value) == 2,
  ),
}


def ask(served, *, n: int = 1, seed: int = 0, stopping: dict | None = None, sampling: dict | None = None, **kind):
  """(texts, endings), in order of index."""
  messages = generate(
    served,
    token_ids=PROMPT,
    sampling=pb.SamplingParams(**{"temperature": 1.0, "n": n, "seed": seed} | (sampling or {})),
    stopping=pb.StopParams(**{"max_tokens": 400} | (stopping or {})),
    constraint=pb.OutputConstraint(**kind),
  )
  endings = sorted(endings_of(messages), key=lambda ending: ending.index)
  return [text_of(messages, index) for index in range(n)], endings


def stopped(endings) -> bool:
  return all(ending.reason == pb.FINISH_REASON_STOP for ending in endings)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_is_one_of_the_schema(served, name):
  schema, is_valid = SCHEMAS[name]
  texts = set()
  for seed in range(0, 48, 16):
    answers, endings = ask(served, n=16, seed=seed, json_schema=json.dumps(schema | COMPACT))
    assert stopped(endings)
    for text in answers:
      assert is_valid(json.loads(text)), text
    texts.update(answers)
  assert len(texts) > 1


def test_whitespace_is_free_unless_the_schema_says_no(served):
  answers, endings = ask(served, n=16, json_schema=json.dumps(PERSON))
  whole = [text for text, ending in zip(answers, endings, strict=True) if ending.reason == pb.FINISH_REASON_STOP]
  assert whole and all(is_person(json.loads(text)) for text in whole)
  assert any(json.dumps(json.loads(text), separators=(",", ":")) != text for text in whole)


def test_any_object(served):
  answers, endings = ask(served, n=16, json_object=True)
  whole = [text for text, ending in zip(answers, endings, strict=True) if ending.reason == pb.FINISH_REASON_STOP]
  assert whole and all(isinstance(json.loads(text), dict) for text in whole)


@pytest.mark.parametrize(
  "pattern", ["[ab]{3}c?", "(yes|no), (?:[0-9]{1,3}\\.){2}[0-9]", "caf\u00e9|[\u65e5\u672c]{2}", "(a+)+b"]
)
def test_every_output_matches_the_regex(served, pattern):
  texts = set()
  for seed in (0, 16):
    answers, endings = ask(served, n=16, seed=seed, regex=pattern)
    assert stopped(endings)
    assert all(re.fullmatch(pattern, text) for text in answers), answers
    texts.update(answers)
  assert len(texts) > 1


def test_every_output_is_a_choice(served):
  choices = ["yes", "no", "not sure", 'say "\\ \n/', "\u00e9\U0001f600", "a", "ab"]
  answers, endings = ask(served, n=16, choice=pb.Choices(values=choices))
  assert stopped(endings) and set(answers) <= set(choices) and len(set(answers)) > 2
  ((answer,), _) = ask(served, choice=pb.Choices(values=["only this"]))
  assert answer == "only this"
  many = [f"choice {number}" for number in range(1024)]
  answers, endings = ask(served, n=16, choice=pb.Choices(values=many))
  assert stopped(endings) and set(answers) <= set(many)


GRAMMARS = {
  "lark": 'start: sum\nsum: NUMBER ("+" NUMBER)?\nNUMBER: /[1-9][0-9]?/',
  "gbnf": 'root ::= number ("+" number)?\nnumber ::= [1-9] [0-9]?',
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_output_follows_the_grammar(served, name):
  answers, endings = ask(served, n=16, grammar=GRAMMARS[name])
  assert stopped(endings)
  assert all(re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?)?", text) for text in answers), answers


def test_the_ending_is_told_like_any_other(served):
  messages = generate(
    served, token_ids=PROMPT, constraint=pb.OutputConstraint(choice=pb.Choices(values=["on the mat"]))
  )
  (ending,) = endings_of(messages)
  assert ending.reason == pb.FINISH_REASON_STOP and ending.last and ending.WhichOneof("matched") is None
  assert ending.usage.completion_tokens == len(token_ids_of(messages)) > 0


def test_with_other_ways_of_ending(served):
  ((text,), (ending,)) = ask(served, regex="[ab]{300}", stopping={"max_tokens": 5})
  assert ending.reason == pb.FINISH_REASON_LENGTH and re.fullmatch("[ab]+", text)
  ((text,), (ending,)) = ask(served, regex="[a-c]{300}", stopping={"stop": ["bb"]})
  assert ending.reason == pb.FINISH_REASON_STOP and ending.stop_string == "bb" and "bb" not in text
  # A complete output ends whatever min_tokens and ignore_eos say.
  ((text,), (ending,)) = ask(served, regex="[ab]c", stopping={"min_tokens": 50, "ignore_eos": True})
  assert text in ("ac", "bc") and ending.reason == pb.FINISH_REASON_STOP
  # As long as the grammar lets them, both hold.
  ((text,), (ending,)) = ask(served, regex="[ab]*", stopping={"min_tokens": 50, "max_tokens": 60})
  assert ending.usage.completion_tokens >= 50
  # An end-of-sequence that is an ordinary token still completes what may end.
  ((text,), (ending,)) = ask(served, regex="[ab]*", stopping={"ignore_eos": True}, seed=3)
  assert ending.reason == pb.FINISH_REASON_STOP and ending.WhichOneof("matched") is None
  ((text,), (ending,)) = ask(served, regex="[ab]*", seed=3)
  assert ending.stop_token_id == END


def test_with_penalties_bias_and_logprobs(served):
  messages = generate(
    served,
    token_ids=PROMPT,
    sampling=pb.SamplingParams(presence_penalty=2, repetition_penalty=1.5, logit_bias={7: 100.0}, top_k=3, top_p=0.5),
    output=pb.OutputParams(logprobs=0, prompt_logprobs=0),
    constraint=pb.OutputConstraint(regex="[ab]{20}"),
  )
  assert re.fullmatch("[ab]{20}", text_of(messages))
  entries = [entry for message in messages for delta in message.deltas for entry in delta.logprobs]
  assert [entry.token_id for entry in entries] == token_ids_of(messages)


def test_neighbours_without_a_constraint_keep_their_tokens(served):
  params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
  wanted, _ = oracle(served.engine.config, Request("x", (7, 8, 9, 10), params))
  before = served.engine.recorder.num_steps
  streams = [
    served.generation.Generate(
      pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[7, 8, 9, 10]) if index % 2 else PROMPT,
        sampling=pb.SamplingParams(temperature=0.0) if index % 2 else pb.SamplingParams(seed=index),
        stopping=pb.StopParams(max_tokens=60, ignore_eos=bool(index % 2)),
        constraint=None if index % 2 else pb.OutputConstraint(regex="[ab]{100}"),
      ),
      timeout=60,
    )
    for index in range(10)
  ]
  for index, stream in enumerate(streams):
    messages = list(stream)
    if index % 2:
      assert token_ids_of(messages) == list(wanted)
    else:
      assert re.fullmatch("[ab]+", text_of(messages))
  assert served.engine.recorder.num_steps > before


def test_preempted_it_gives_the_same(tokenizer, served):
  def run(server, seeds):
    """All of them at once."""
    server.runner.go.clear()
    streams = {
      seed: server.generation.Generate(
        pb.GenerateRequest(
          token_ids=PROMPT,
          sampling=pb.SamplingParams(temperature=1.0, seed=seed),
          stopping=pb.StopParams(max_tokens=100),
          constraint=pb.OutputConstraint(json_schema=json.dumps({"type": "string", "minLength": 40, "maxLength": 60})),
        ),
        timeout=60,
      )
      for seed in seeds
    }
    server.wait_until(lambda: server.engine.num_live == len(streams))
    server.runner.go.set()
    return {seed: token_ids_of(list(stream)) for seed, stream in streams.items()}

  alone = {}
  for seed in range(8):
    alone |= run(served, [seed])
  # Room for two and a half of them.
  config = dataclasses.replace(served.engine.config, num_blocks=26, max_num_seqs=8)
  with running(tokenizer, config=config) as small:
    assert run(small, range(8)) == alone
    assert small.engine.stats().num_preemptions > 0


def test_aborts_and_deadlines_leak_nothing(tokenizer):
  with running(tokenizer) as server:
    server.runner.seconds = 0.002
    request = pb.GenerateRequest(
      token_ids=PROMPT,
      sampling=pb.SamplingParams(n=4),
      stopping=pb.StopParams(max_tokens=400, min_tokens=400),
      constraint=pb.OutputConstraint(regex="[ab]*"),
    )
    for steps in range(6):
      stream = server.generation.Generate(request)
      next(iter(stream))
      server.wait_for_steps(steps)
      stream.cancel()
    server.wait_until(lambda: server.engine.num_live == 0 and len(server.generations) == 0)
    with pytest.raises(grpc.RpcError) as caught:
      list(server.generation.Generate(request, timeout=0.1))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.wait_until(lambda: server.engine.num_live == 0 and len(server.generations) == 0)
    assert server.blocks_in_use == 0
    check_scheduler(server.engine._scheduler)


def test_without_a_tokenizer_there_are_no_constraints():
  with running(None) as server, pytest.raises(grpc.RpcError) as caught:
    generate(server, token_ids=PROMPT, constraint=pb.OutputConstraint(regex="a"))
  assert reason_of(caught.value) == "NO_TOKENIZER" and "constraint needs a tokenizer" in caught.value.details()


@pytest.mark.catalogue("F4")
def test_one_that_takes_too_much_work_in_the_middle_ends_its_request_alone(served):
  message = (
    "the output constraint could not be followed: no token is left, or one takes more work than is allowed; simplify "
    "the constraint"
  )
  with pytest.raises(grpc.RpcError) as caught:
    ask(served, grammar="start: /a/ start", sampling={"logit_bias": {7: 1.0}})
  assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, message)
  assert reason_of(caught.value) == "GRAMMAR_LIMIT"
  ask(served, regex="[ab]{30}")


@pytest.mark.catalogue("F4")
def test_a_grammar_is_compiled_once_for_each_tenant(tokenizer):
  compiler = constraint_compiler.ConstraintCompiler(tokenizer, 400, (END,))
  constraint = pb.OutputConstraint(json_schema=json.dumps(PERSON))
  first = compiler.compile(constraint, "a")
  mask = first.allowed()
  first.accept(tokens_of(mask)[0])
  for count, tenant in ((1, "a"), (2, "b"), (2, "b"), (2, "a")):
    assert compiler.compile(constraint, tenant).allowed() == mask, "what is kept has not moved on"
    assert compiler.num_compiled == count, "another's is of no use, or its owner could be watched"
  assert compiler.compile_source(first.source, "a").allowed() == mask and compiler.num_compiled == 2
  for _ in range(2):
    with pytest.raises(InvalidRequest):
      compiler.compile(pb.OutputConstraint(regex="("), "a")
  assert compiler.num_compiled == 4, "what cannot be followed is not kept"


@dataclasses.dataclass
class Kept:
  name: str

  def copy(self) -> "Kept":
    return Kept(self.name)


@pytest.mark.catalogue("F4")
def test_who_keeps_most_grammars_gives_way():
  cache: GrammarCache[Kept] = GrammarCache(max_entries=4, max_source_bytes=20)
  cache.keep("small", "s", Kept("s"))
  for number in range(5):
    cache.keep("big", f"b{number}", Kept(f"b{number}"))
    assert cache.get("big", "b0") == Kept("b0"), "used all the time"
  assert cache.get("small", "s") == Kept("s")
  assert [number for number in range(5) if cache.get("big", f"b{number}")] == [0, 3, 4]
  assert cache.get("small", "b0") is None and cache.get("nobody", "s") is None
  cache.keep("big", "b" * 18, Kept("long"))
  assert cache.get("big", "b" * 18) and cache.get("small", "s")
  cache.keep("huge", "h" * 21, Kept("too long"))
  assert cache.get("huge", "h" * 21) is None and cache.get("small", "s")


@pytest.mark.parametrize("vocab_size", [383, 384, 400, 416])
def test_masks_hold_tokens_of_the_model_alone(tokenizer, vocab_size):
  """Also where the vocabulary is padded, and where its last word is not full."""
  for eos in ((END,), (END, 5), ()):
    compiler = constraint_compiler.ConstraintCompiler(tokenizer, vocab_size, eos)
    output = compiler.compile(pb.OutputConstraint(regex="a(b|c)?"))
    assert len(output.allowed()) == 4 * -(-vocab_size // 32)
    (a,) = tokenizer.encode_plain("a")
    assert a in tokens_of(output.allowed()) and not output.is_done
    twin = output.copy()
    output.accept(a)
    assert set(eos) <= set(tokens_of(output.allowed())) and max(tokens_of(output.allowed())) < vocab_size
    assert a in tokens_of(twin.allowed()), "a copy goes its own way"
    with pytest.raises(ConstraintFailed):
      twin.accept(0)
    if eos:
      output.accept(eos[-1])
    else:
      (b,) = tokenizer.encode_plain("b")
      output.accept(b)
    assert output.is_done


def test_a_model_without_an_end_of_sequence_ends_when_nothing_can_follow(tokenizer, served):
  config = dataclasses.replace(served.engine.config, eos_token_ids=())
  with running(tokenizer, config=config) as server:
    ((text,), (ending,)) = ask(server, json_schema=json.dumps(PERSON | COMPACT))
    assert is_person(json.loads(text)) and ending.reason == pb.FINISH_REASON_STOP
    ((text,), (ending,)) = ask(server, regex="[ab]*", stopping={"max_tokens": 20})
    assert ending.reason == pb.FINISH_REASON_LENGTH


@pytest.mark.long
@pytest.mark.catalogue("F4")
def test_ten_thousand_schemas_take_no_memory(tokenizer):
  def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

  compiler = constraint_compiler.ConstraintCompiler(tokenizer, 400, (END,))
  before = resident_bytes()
  for number in range(10_000):
    schema = {"type": "object", "properties": {f"p{number}_{i}": {"type": "string"} for i in range(8)}}
    compiler.compile(pb.OutputConstraint(json_schema=json.dumps(schema)), f"tenant {number % 3}")
  assert compiler.num_compiled == 10_000
  assert resident_bytes() - before < 64 << 20


@pytest.mark.catalogue("F4")
@pytest.mark.parametrize("through", ["allOf", "references"])
def test_patterns_that_must_hold_together_are_few(served, through):
  """Two dozen of them would hold the compiler, which nothing can stop, for minutes."""
  patterns = [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(24)]
  if through == "allOf":
    schema: dict[str, Any] = {"allOf": patterns}
  else:
    schema = {
      "$defs": {f"d{i}": pattern | {"$ref": f"#/$defs/d{i + 1}"} for i, pattern in enumerate(patterns)} | {"d24": {}},
      "$ref": "#/$defs/d0",
    }
  with pytest.raises(grpc.RpcError, match="24 patterns and an allOf, or a pattern beside a") as caught:
    ask(served, json_schema=json.dumps(schema))
  assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
  # As many as one likes where they stand alone, and a few together.
  alone = {"anyOf": [{"const": "x"}, *patterns]}
  few = {"allOf": [{"type": "string", "pattern": "^[ab]*$"}, {"pattern": "^.{3}$"}]}
  for schema in (alone, few):
    assert ask(served, json_schema=json.dumps(schema), stopping={"max_tokens": 3})[1]


@pytest.mark.catalogue("F4")
def test_texts_are_not_too_long(served):
  """The time of a token grows with the text that it is part of."""
  for text in ("x" * 4097, "\u00e9" * 2049):
    for kind in ({"json_schema": json.dumps({"const": text})}, {"choice": pb.Choices(values=["a", text])}):
      with pytest.raises(grpc.RpcError, match="409[78] bytes, the limit for each is 4096") as caught:
        ask(served, **kind)
      assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
  assert ask(served, choice=pb.Choices(values=["x" * 4096]), stopping={"max_tokens": 5})[0][0].startswith("x")
