"""Drafts of grammars: forced tokens, the mask after each token, and a state that they leave as it was."""

import json
from pathlib import Path
import random

import llguidance
import pytest

from server.proto import sluice_pb2 as pb
from server.text.constraint_compiler import ConstraintCompiler, OutputGrammar
from server.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes import tokens_of

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
VOCAB_SIZE = 2048
PERSON = {
  "type": "object",
  "properties": {
    "full_name": {"type": "string"},
    "age_in_years": {"type": "integer"},
    "city": {"enum": ["Oslo", "Rome"]},
  },
  "required": ["full_name", "age_in_years", "city"],
  "additionalProperties": False,
  "x-guidance": {"whitespace_flexible": False},
}
SOURCES = (
  pb.OutputConstraint(json_schema=json.dumps(PERSON)),
  pb.OutputConstraint(json_object=True),
  pb.OutputConstraint(regex=r"(abc|abd|xyz){2,5}[0-9]{1,3}!"),
  pb.OutputConstraint(choice=pb.Choices(values=["a rather long sentence", "a rather long answer", "no"])),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
  loaded = load_tokenizer(DEMO, max_prompt_bytes=1 << 20)
  assert loaded is not None
  return loaded


@pytest.fixture(scope="module", params=[(), (0,)], ids=["without an end", "with an end"])
def compiler(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> ConstraintCompiler:
  return ConstraintCompiler(tokenizer, VOCAB_SIZE, request.param)


def compile_constraint(compiler: ConstraintCompiler, constraint: pb.OutputConstraint) -> OutputGrammar:
  return compiler.compile(constraint).copy()


@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize("index", range(len(SOURCES)))
def test_drafts_leave_the_state_and_their_masks_are_those_of_accepting(
  compiler: ConstraintCompiler, index: int, forces: bool
):
  num_forced = num_proposed = 0
  for seed in range(4):
    rng = random.Random(seed)
    watched, twin = (compile_constraint(compiler, SOURCES[index]) for _ in range(2))
    for _ in range(40):
      if twin.is_done:
        break
      ahead, proposed = twin.copy(), []
      for _ in range(rng.randint(0, 6)):  # a walk of allowed tokens, sometimes a wrong one
        proposed.append(rng.choice(tokens_of(ahead.allowed())) if rng.random() < 0.9 else rng.randrange(VOCAB_SIZE))
        if proposed[-1] not in tokens_of(ahead.allowed()):
          break
        ahead.accept(proposed[-1])
        if ahead.is_done:
          break
      count = rng.randint(1, 7)
      draft = watched.find_draft(proposed, count, forces)
      assert len(draft.tokens) == len(draft.masks) <= count
      assert watched.allowed() == twin.allowed() and not watched.is_done
      ahead = twin.copy()
      assert not draft.is_forced or tokens_of(ahead.allowed()) == [draft.tokens[0]]
      for token, mask in zip(draft.tokens, draft.masks, strict=True):
        ahead.accept(token)
        assert ahead.allowed() == mask and not ahead.is_done
      num_forced += draft.is_forced
      if not draft.is_forced:
        shared = min(len(draft.tokens), len(proposed))
        assert list(draft.tokens[:shared]) == proposed[:shared]
        num_proposed += shared
      token = draft.tokens[0] if draft.tokens and rng.random() < 0.6 else rng.choice(tokens_of(twin.allowed()))
      watched.accept(token)
      twin.accept(token)
      assert watched.is_done == twin.is_done and (twin.is_done or watched.allowed() == twin.allowed())
  assert num_proposed > 5
  assert bool(num_forced) == (forces and index != 1), "only an object without a schema leaves a choice everywhere"


@pytest.mark.parametrize("index", range(len(SOURCES)))
def test_a_forced_token_is_the_only_allowed_one(compiler: ConstraintCompiler, index: int):
  rng, num_forced = random.Random(index), 0
  for _ in range(4):
    grammar = compile_constraint(compiler, SOURCES[index])
    for _ in range(60):
      if grammar.is_done:
        break
      allowed, forced = tokens_of(grammar.allowed()), grammar.find_forced()
      assert ([forced] == allowed) if len(allowed) == 1 else forced == -1
      num_forced += forced >= 0
      grammar.accept(rng.choice(allowed))
    assert not grammar.is_done or grammar.find_forced() == -1
  assert num_forced


def test_names_of_a_schema_are_forced(compiler: ConstraintCompiler, tokenizer: Tokenizer):
  grammar = compile_constraint(compiler, SOURCES[0])
  for token in tokenizer.encode_plain('{"full_name":"Ada",'):
    grammar.accept(token)
  draft = grammar.find_draft((), 7, True)
  assert draft.is_forced and tokenizer.decode(list(draft.tokens)).startswith('"age_in')
  assert not grammar.find_draft((), 7, False).tokens
  assert len(grammar.find_draft((), 2, True).tokens) == 2


def test_the_token_that_completes_an_output_is_no_draft(compiler: ConstraintCompiler, tokenizer: Tokenizer):
  grammar = compile_constraint(compiler, pb.OutputConstraint(choice=pb.Choices(values=["a rather long sentence"])))
  tokens = tokenizer.encode_plain("a rather long sentence")
  draft = grammar.find_draft(tokens, 20, True)
  assert len(draft.tokens) < 20
  for token in draft.tokens:
    grammar.accept(token)
    assert not grammar.is_done


def test_a_token_outside_the_vocabulary_ends_a_draft(compiler: ConstraintCompiler):
  grammar = compile_constraint(compiler, SOURCES[1])
  for token in (-1, VOCAB_SIZE, 1 << 30):
    assert not grammar.find_draft((token,), 3, False).tokens


@pytest.mark.parametrize("index", range(len(SOURCES)))
def test_masks_are_those_of_llguidance_whether_a_token_is_forced_or_not(compiler: ConstraintCompiler, index: int):
  source = compile_constraint(compiler, SOURCES[index]).source
  rng = random.Random(index)
  for _ in range(4):
    grammar = compile_constraint(compiler, SOURCES[index])
    other = llguidance.LLMatcher(compiler._tokens(), source, log_level=0)
    while not grammar.is_done:
      assert tokens_of(grammar.allowed()) == [
        token for token in tokens_of(other.compute_bitmask()) if token < VOCAB_SIZE
      ]
      token = rng.choice(tokens_of(grammar.allowed()))
      grammar.accept(token)
      assert other.consume_token(token)
      if rng.random() < 0.01:
        break


def test_a_grammar_makes_tokens_of_a_forced_text_once_and_for_its_tenant_alone(monkeypatch: pytest.MonkeyPatch):
  tokenizer = load_tokenizer(DEMO, max_prompt_bytes=1 << 20)
  assert tokenizer is not None
  compiler, encode, num_made = ConstraintCompiler(tokenizer, VOCAB_SIZE, (0,)), tokenizer.encode_plain, 0

  def count(text: str) -> list[int]:
    nonlocal num_made
    num_made += 1
    return encode(text)

  tokens = encode('{"full_name":"Ada","age_in_years":36,"city":"Oslo"}')
  monkeypatch.setattr(tokenizer, "encode_plain", count)

  def follow(tenant: str) -> int:
    before = num_made
    grammar = compiler.compile(SOURCES[0], tenant)
    for token in tokens:
      grammar.accept(token)
    assert grammar.is_done
    return num_made - before

  first = follow("one")
  assert first > 5
  assert [follow(tenant) for tenant in ("one", "another", "one", "a third")] == [0, first, 0, first]
